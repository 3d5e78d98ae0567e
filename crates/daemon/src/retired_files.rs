//! Prepares the files of retired sessions again, or removes them.

use std::time::Duration;

use ashlar_node::Node;
use ashlar_types::SessionId;

use crate::retired::RetiredSession;
use crate::session_files::PreparedSession;
use crate::shared_state::SharedState;

/// How often, and how long each time, SharedFS waits for a process to end.
///
/// A process that has closed its session has the files mapped until it ends.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(2);

/// Prepares a session from it, or removes its files if they can't be used again.
pub fn clean_session(shared: &SharedState, retired: RetiredSession) -> Option<PreparedSession> {
    let id = retired.id;
    for attempt in 0..TRIES {
        if attempt > 0 {
            std::thread::sleep(PAUSE);
        }
        if retired.is_free(&shared.arena) {
            match PreparedSession::of_retired(retired) {
                Ok(prepared) => return Some(prepared),
                Err(error) => {
                    tracing::debug!(session = id.0, %error, "a retired session's files can't be used again")
                }
            }
            break;
        }
    }
    remove(shared, id);
    None
}

/// Removes all retired sessions; returns whether there were any.
///
/// Their room is wanted.
pub fn give_up_kept(shared: &SharedState) -> bool {
    let kept = shared.pool.take_kept();
    kept.iter().for_each(|id| remove(shared, *id));
    !kept.is_empty()
}

/// Removes the files of a retired session. No thread waits for the disk meanwhile.
pub fn remove(shared: &SharedState, id: SessionId) {
    if has_removed_files(shared, id) {
        shared.lock().remove_session_row(id);
    }
}

/// Removes the files of a retired session, with the lock held.
pub fn remove_with(shared: &SharedState, state: &mut Node, id: SessionId) {
    if has_removed_files(shared, id) {
        state.remove_session_row(id);
    }
}

/// Removes the files before the row.
///
/// Files without a row would look like a new session's, and be applied again.
fn has_removed_files(shared: &SharedState, id: SessionId) -> bool {
    let removed = shared.arena.remove_session(id);
    removed
        .inspect_err(|error| {
            tracing::error!(session = id.0, %error, "an ended session's files can't be removed; the next start does it");
        })
        .is_ok()
}
