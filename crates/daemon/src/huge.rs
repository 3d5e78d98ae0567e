//! The thread that has the kernel put what is used of logs and segments into huge pages, where the arena lies in memory: who reads and writes them finds them faster
//! ([`ashlar_pmem::huge`]). It looks for them when something was committed, and makes one at a time, since who uses a page meanwhile waits. Where memory is in pieces
//! the kernel takes several milliseconds for one, so most of the time is left to who has something to do.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_pmem::{HugePages, Mapping, MediumKind, huge};
use ashlar_store::Segment;

use crate::shared::Shared;
use crate::state::State;

/// Others have the processor and the file for so long at least after each page,
const PAUSE: Duration = Duration::from_millis(1);
/// and for as many times as long as it took to make, while somebody writes.
const BUSY_TIMES: u32 = 16;

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

/// What holds a page that is worth it.
enum Holder {
    Log(Arc<Mapping>, Arc<HugePages>),
    Segment(Arc<Segment>),
}

impl Holder {
    /// One, if there is any. All that is written goes through the logs, so they come first.
    fn next(state: &State) -> Option<Self> {
        let log = state.sessions.values().find(|session| session.log_used.waiting() > 0);
        let log = log.map(|session| Self::Log(Arc::clone(&session.log_memory), Arc::clone(&session.log_used)));
        let mut segments = state.store.segments();
        log.or_else(|| {
            segments.find(|segment| segment.huge_pages_waiting() > 0).map(|segment| Self::Segment(Arc::clone(segment)))
        })
    }

    fn make_one(&self) -> Option<io::Result<()>> {
        match self {
            Self::Log(memory, used) => used.make_one(memory),
            Self::Segment(segment) => segment.make_huge_page(),
        }
    }
}

fn make_as_used(shared: &Shared) {
    let mut applied = 0;
    loop {
        let mut state = shared.lock();
        let holder = loop {
            if state.ending {
                return;
            }
            match Holder::next(&state) {
                Some(holder) => break holder,
                // What is written is worth it once it's committed, if not before.
                None => shared.progress.wait(&mut state),
            }
        };
        drop(state);
        let began = Instant::now();
        let made = holder.make_one();
        let took = began.elapsed();
        // A log that its session has made shorter says nothing about the kernel.
        if let (Holder::Segment(_), Some(Err(error))) = (&holder, &made)
            && error.raw_os_error() == Some(libc::EINVAL)
        {
            tracing::info!("this kernel makes no huge pages of small ones");
            return;
        }
        // Nobody goes on in a log that somebody holds.
        drop(holder);
        let mut state = shared.lock();
        // Of others there is no memory in one piece, or somebody else uses a page: they stay as they are.
        state.counters.huge_pages += u64::from(matches!(made, Some(Ok(()))));
        let before = std::mem::replace(&mut applied, state.counters.bytes_applied);
        let until = Instant::now() + PAUSE.max(took * if applied == before { 1 } else { BUSY_TIMES });
        while !state.ending && !shared.progress.wait_until(&mut state, until).timed_out() {}
    }
}
