//! Checks the lengths of sessions' files, and fences the sessions that make them longer.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use ashlar_node::records::validate::Violation;

use crate::file_guard::GuardedFiles;
use crate::shared_state::SharedState;

/// How often lengths are checked, and how often while some process makes files longer.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
const CHECK_INTERVAL_GROWING: Duration = Duration::from_millis(10);
/// The most sessions of an ordinary user whose files its processes have, those that have ended among them.
///
/// A process may keep a log after its session's end. A program that ends lets go of its files a moment after that.
const GUARDED_OF_USER_MAX: usize = 64;

/// Returns whether a user's processes have the files of too many sessions.
pub fn is_user_over(shared: &SharedState, user: u32) -> bool {
    let guard = &shared.file_guard;
    if user == 0 || guard.files_of(user).len() < GUARDED_OF_USER_MAX {
        return false;
    }
    forget_free(shared, &guard.files_of(user));
    guard.files_of(user).len() >= GUARDED_OF_USER_MAX
}

/// Runs the thread that checks the lengths.
pub fn check_lengths_thread(shared: &SharedState) {
    let mut pause = CHECK_INTERVAL;
    while let Some(files) = shared.file_guard.wait(pause) {
        let grown: Vec<_> = files.iter().filter(|files| files.cut()).collect();
        pause = if grown.is_empty() { CHECK_INTERVAL } else { CHECK_INTERVAL_GROWING };
        fence_owners(shared, &grown);
        forget_free(shared, &files);
    }
}

/// Fences the sessions that have made files longer, those that have not ended yet.
fn fence_owners(shared: &SharedState, grown: &[&Arc<GuardedFiles>]) {
    if grown.is_empty() {
        return;
    }
    let mut state = shared.lock();
    for files in grown {
        if state.sessions.get(&files.session).is_some_and(|session| session.token == files.token) {
            state.fence(files.session, &Violation::Lengthened);
        }
    }
    state.decide_all();
}

/// Forgets the files of ended sessions that no process has any more.
fn forget_free(shared: &SharedState, files: &[Arc<GuardedFiles>]) {
    let living: HashSet<_> = shared.lock().sessions.values().map(|session| (session.id, session.token)).collect();
    let is_free = |files: &Arc<GuardedFiles>| !living.contains(&(files.session, files.token)) && files.is_free();
    let free: Vec<_> = files.iter().filter(|files| is_free(files)).cloned().collect();
    if !free.is_empty() {
        shared.file_guard.forget(&free);
    }
}
