//! Whether a session has the arena to itself.

use std::sync::Arc;
use std::time::Duration;

use ashlar_wire::SessionKind;

use crate::sessions::session::{Control, ServedSession};
use crate::sessions::session_table::SessionTable;

/// How long a sole mount keeps its kernel from caching names.
///
/// The time counts from the end of the last other session. Where programs start and end all the time, each would
/// otherwise wait until the kernel has forgotten those names.
const SOLITUDE: Duration = Duration::from_secs(30);

/// Knows when there was last more than one session.
#[derive(Debug, Default)]
pub struct Sharing {
    /// That time, since boot.
    last_shared: Option<Duration>,
}

impl Sharing {
    /// Returns whether there are several sessions, or were within `SOLITUDE`.
    pub fn is_shared(&self, now: Duration) -> bool {
        self.last_shared.is_some_and(|last| now < last + SOLITUDE)
    }

    /// Writes into all control pages whether there are other sessions.
    ///
    /// Sessions count that ended within `SOLITUDE`. Returns the sole mounts that have become shared, each with the
    /// number of the change that its kernel must follow.
    pub fn publish(&mut self, sessions: &SessionTable, now: Duration) -> Vec<(Arc<Control>, u64)> {
        if sessions.len() > 1 {
            self.last_shared = Some(now);
        }
        let is_shared = self.is_shared(now);
        let is_program = |session: &&ServedSession| session.identity.kind == SessionKind::Process;
        let programs = sessions.values().filter(is_program).count() as u64;
        let mut disturbed = Vec::new();
        for session in sessions.values() {
            if session.identity.kind == SessionKind::Mount && session.control.programs() != programs {
                session.control.set_programs(programs);
                session.control.wake_programs();
            }
            let is_disturbed = is_shared && session.notifier.is_some() && !session.control.is_shared();
            let company = session.control.set_shared(is_shared);
            if is_disturbed {
                session.control.wake_company();
                disturbed.push((Arc::clone(&session.control), company));
            }
        }
        disturbed
    }
}
