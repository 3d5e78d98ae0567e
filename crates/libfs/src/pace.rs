//! How many operations there are, and how long some of them take, in the control page for `ashlar top`; and whether one is about to use what
//! it was granted.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use ashlar_wire::{OPERATION_LANES, OperationKind};

use crate::LibFs;

/// One of so many operations is measured: two looks at the clock take as long as the shortest operation. It's a prime, so that a program that
/// does the same few things again and again has all of them measured.
const SAMPLED: u64 = 61;
/// Threads that have counted so far, in whatever session: the first ones have a lane for themselves in each, so they add to it as to any memory
/// of their own. All others share one, and add with the lock of the processor, which takes as long as a tenth of the shortest operation.
static THREADS: AtomicU32 = AtomicU32::new(0);
const UNKNOWN: u32 = u32::MAX;

thread_local! {
    /// This thread's lane.
    static LANE: Cell<u32> = const { Cell::new(UNKNOWN) };
    /// This thread's operations, each a part of the one before.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether they have asked for leases.
    static HAS_ASKED: Cell<bool> = const { Cell::new(false) };
}

/// An operation that is going on.
pub(crate) struct Measured<'a> {
    using: Using<'a>,
    kind: OperationKind,
    began: Option<Instant>,
}

/// An operation that counts only if it is done: otherwise another one takes its place.
pub(crate) struct Trial {
    kind: OperationKind,
    lane: u32,
    began: Option<Instant>,
}

impl Trial {
    /// It is done.
    #[inline]
    pub(crate) fn done(self, fs: &LibFs) {
        fs.control.count_operation(self.kind, self.lane);
        if let Some(began) = self.began {
            note(fs, self.kind, began);
        }
    }
}

/// An operation of this thread's, or a part of one.
pub(crate) struct Using<'a> {
    fs: &'a LibFs,
}

impl Drop for Using<'_> {
    #[inline]
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        if HAS_ASKED.get() && DEPTH.get() == 0 {
            HAS_ASKED.set(false);
            self.fs.control.end_use();
        }
    }
}

impl LibFs {
    /// Counts an operation that begins, until the value is dropped.
    #[inline]
    pub(crate) fn measured(&self, kind: OperationKind) -> Measured<'_> {
        let before = self.control.count_operation(kind, lane());
        let began = if before % SAMPLED == 0 { now() } else { None };
        Measured { using: self.using(), kind, began }
    }

    /// An operation that begins and asks for no leases; it is counted when it is done.
    #[inline]
    pub(crate) fn try_measured(&self, kind: OperationKind) -> Trial {
        let lane = lane();
        let before = self.control.operations_in(kind, lane);
        Trial { kind, lane, began: if before % SAMPLED == 0 { now() } else { None } }
    }

    /// An operation that begins, or a part of one, and is not counted.
    #[inline]
    pub(crate) fn using(&self) -> Using<'_> {
        DEPTH.set(DEPTH.get() + 1);
        Using { fs: self }
    }

    /// The operation that goes on is about to ask for leases: SharedFS leaves them to it until it is done with them, for a while.
    pub(crate) fn begin_use(&self) {
        // Nobody would say when it is done.
        if DEPTH.get() != 0 && !HAS_ASKED.replace(true) {
            self.control.begin_use();
        }
    }
}

impl Drop for Measured<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(began) = self.began {
            note(self.using.fs, self.kind, began);
        }
    }
}

#[cold]
fn now() -> Option<Instant> {
    Some(Instant::now())
}

#[cold]
fn note(fs: &LibFs, kind: OperationKind, began: Instant) {
    fs.control.note_latency(kind, u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
}

#[inline]
fn lane() -> u32 {
    // A thread that is about to end may have lost its variables.
    LANE.try_with(|lane| if lane.get() == UNKNOWN { choose(lane) } else { lane.get() }).unwrap_or(0)
}

#[cold]
fn choose(lane: &Cell<u32>) -> u32 {
    let next = |taken: u32| (taken < OPERATION_LANES - 1).then_some(taken + 1);
    let chosen = THREADS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_or(0, |taken| taken + 1);
    lane.set(chosen);
    chosen
}
