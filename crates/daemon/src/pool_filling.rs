//! Prepares the sessions of the pool.

use crate::retired_files::{clean_session, give_up_kept, remove};
use crate::session_pool::PoolJob;
use crate::sessions::prepare_session;
use crate::shared_state::SharedState;

/// Runs the thread that prepares sessions.
///
/// It also removes those that no process has taken.
pub fn fill_thread(shared: &SharedState) {
    let pool = &shared.pool;
    while let Some(job) = pool.wait() {
        match job {
            PoolJob::Make => match prepare_session(shared) {
                Ok(prepared) => pool.add_prepared(prepared),
                Err(reason) => {
                    tracing::debug!(reason, "no session can be made in advance");
                    pool.record_failure();
                }
            },
            PoolJob::MakeOf(retired) => {
                let too_much = clean_session(shared, retired).and_then(|prepared| pool.put_first(prepared));
                too_much.iter().for_each(|prepared| remove(shared, prepared.id));
            }
            PoolJob::Forget(made) => made.iter().for_each(|prepared| remove(shared, prepared.id)),
        }
    }
    pool.take_made().iter().for_each(|prepared| remove(shared, prepared.id));
    give_up_kept(shared);
}
