//! The thread that makes huge pages of used memory.
//!
//! It serves logs and segments, if the arena lies in memory. Processes then access them faster ([`ashlar_pmem::huge`]).
//! The thread searches for such parts after a commit. It makes one huge page at a time, since processes that use the
//! page wait meanwhile. If memory is fragmented, the kernel takes several milliseconds for one, so the thread leaves
//! most of the time to other work.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_pmem::{HugePages, MediumKind, SharedMemory, huge};
use ashlar_store::StoreSegment;

use crate::shared_state::SharedState;
use ashlar_node::Node;

/// The least pause after each huge page.
///
/// The thread leaves the processor and the file to others meanwhile.
const PAUSE: Duration = Duration::from_millis(1);
/// The pause while any session writes, in times of a page's making.
const BUSY_TIMES: u32 = 16;

/// Returns whether such a thread has anything to do.
pub fn is_wanted(shared: &SharedState) -> bool {
    shared.arena.medium().kind == MediumKind::Memory && huge::is_allowed()
}

/// Returns how many huge pages are still to be made.
pub fn count_waiting(state: &Node) -> u64 {
    if !state.makes_huge_pages {
        return 0;
    }
    let of_segments: u64 = state.store.segments().map(|segment| segment.huge_pages_waiting()).sum();
    of_segments + state.sessions.values().map(|session| session.log_used.waiting()).sum::<u64>()
}

/// Runs the thread. It ends if the kernel makes no huge pages.
pub fn huge_thread(shared: &SharedState) {
    shared.lock().makes_huge_pages = true;
    make_as_used(shared);
    shared.lock().makes_huge_pages = false;
}

/// The holder of memory that is worth a huge page.
enum HugePageHolder {
    Log(Arc<SharedMemory>, Arc<HugePages>),
    Segment(Arc<StoreSegment>),
}

impl HugePageHolder {
    /// Returns one, if there is any.
    ///
    /// All written bytes pass through the logs, so logs come first.
    fn next(state: &Node) -> Option<Self> {
        let log = state.sessions.values().find(|session| session.log_used.waiting() > 0);
        let log = log.map(|session| Self::Log(Arc::clone(&session.log_memory), Arc::clone(&session.log_used)));
        let mut segments = state.store.segments();
        log.or_else(|| {
            segments.find(|segment| segment.huge_pages_waiting() > 0).map(|segment| Self::Segment(Arc::clone(segment)))
        })
    }

    fn make_one(&self) -> Option<io::Result<()>> {
        match self {
            Self::Log(memory, used) => used.make_one(memory.mapping()?),
            Self::Segment(segment) => segment.make_huge_page(),
        }
    }
}

fn make_as_used(shared: &SharedState) {
    let mut applied = 0;
    loop {
        let mut state = shared.lock();
        let holder = loop {
            if state.ending {
                return;
            }
            match HugePageHolder::next(&state) {
                Some(holder) => break holder,
                // Written memory is worth a huge page once it's committed, if not before.
                None => state.wait(&shared.progress),
            }
        };
        drop(state);
        let began = Instant::now();
        let made = holder.make_one();
        let took = began.elapsed();
        // A log that its session has truncated says nothing about the kernel.
        if let (HugePageHolder::Segment(_), Some(Err(error))) = (&holder, &made)
            && error.raw_os_error() == Some(libc::EINVAL)
        {
            tracing::info!("this kernel makes no huge pages of small ones");
            return;
        }
        // No process reuses a log while another thread holds it.
        drop(holder);
        let mut state = shared.lock();
        // Otherwise there is no memory in one piece, or another process uses a page: such pages stay as they are.
        state.counters.huge_pages += u64::from(matches!(made, Some(Ok(()))));
        let before = std::mem::replace(&mut applied, state.counters.bytes_applied);
        let until = Instant::now() + PAUSE.max(took * if applied == before { 1 } else { BUSY_TIMES });
        while !state.ending && !state.wait_for(&shared.progress, until.saturating_duration_since(Instant::now())) {}
    }
}
