//! The thread that has the kernel put what is used of logs and segments into huge pages, where the arena lies in memory: who reads and writes them finds them faster
//! ([`ashlar_pmem::huge`]). It looks after each commit, and makes one at a time, since who uses a page meanwhile waits.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ashlar_pmem::{MediumKind, huge};

use crate::session::Session;
use crate::shared::Shared;
use crate::state::State;

/// As long as making a page takes, others have the processor and the file.
const PAUSE: Duration = Duration::from_millis(1);

/// Whether there is anything to do for such a thread.
pub fn is_wanted(shared: &Shared) -> bool {
    shared.arena.medium().kind == MediumKind::Memory && huge::is_allowed()
}

/// How many are to be made.
pub fn waiting(state: &State) -> u64 {
    if !state.makes_huge_pages {
        return 0;
    }
    let of_segments: u64 = state.store.segments().map(|segment| segment.huge_pages_waiting()).sum();
    of_segments + state.sessions.values().map(|session| session.log_used.waiting()).sum::<u64>()
}

/// The thread. It ends where the kernel makes none.
pub fn huge_thread(shared: &Shared) {
    shared.lock().makes_huge_pages = true;
    make_as_used(shared);
    shared.lock().makes_huge_pages = false;
}

fn make_as_used(shared: &Shared) {
    let mut seen = 0;
    loop {
        let mut state = shared.lock();
        while !state.ending && state.commits_ended == seen {
            shared.progress.wait(&mut state);
        }
        if state.ending {
            return;
        }
        seen = state.commits_ended;
        let segments: Vec<_> = state.store.segments().map(Arc::clone).collect();
        let log = |session: &Session| (Arc::clone(&session.log_memory), Arc::clone(&session.log_used));
        let logs: Vec<_> = state.sessions.values().map(log).collect();
        drop(state);
        let of_segments = segments.iter().map(|segment| make_all(shared, &|| segment.make_huge_page()));
        let of_logs = logs.iter().map(|(memory, used)| make_all(shared, &|| used.make_one(memory)));
        if !of_segments.chain(of_logs).all(|goes_on| goes_on) {
            return;
        }
    }
}

/// Makes all that are worth it of one file; whether to go on with others.
fn make_all(shared: &Shared, make: &dyn Fn() -> Option<io::Result<()>>) -> bool {
    while let Some(made) = make() {
        let is_made = match made {
            Ok(()) => true,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                tracing::info!("this kernel makes no huge pages of small ones");
                return false;
            }
            // There is no memory in one piece, or somebody else uses a page: it stays as it is.
            Err(_) => false,
        };
        std::thread::sleep(PAUSE);
        let mut state = shared.lock();
        state.counters.huge_pages += u64::from(is_made);
        if state.ending {
            return false;
        }
    }
    true
}
