//! Counts and latencies of operations, in the control page for `ashlar top`.
//!
//! The same scopes tell SharedFS whether an operation still uses the leases that it was granted.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use ashlar_wire::{OPERATION_LANES, OperationKind};

use crate::LibFs;

/// One of so many operations is measured: two reads of the clock take as long as the shortest operation.
///
/// It is a prime, so all operations of a program that repeats a few things get measured.
const SAMPLE_EVERY: u64 = 61;
/// Threads that have counted so far, in any session.
///
/// Each of the first threads has its own lane in each session, and adds to it as to private memory. All later threads
/// share one lane and add atomically, which takes as long as a tenth of the shortest operation.
static THREADS: AtomicU32 = AtomicU32::new(0);
const UNKNOWN: u32 = u32::MAX;

thread_local! {
    /// This thread's lane.
    static LANE: Cell<u32> = const { Cell::new(UNKNOWN) };
    /// How deeply this thread's operations are nested.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// Whether these operations have requested leases.
    static HAS_ASKED: Cell<bool> = const { Cell::new(false) };
}

/// An operation that is running, counted from its beginning.
pub(crate) struct MeasuredOperation<'a> {
    scope: OperationScope<'a>,
    kind: OperationKind,
    began: Option<Instant>,
}

/// An operation by the fast path, counted only at its end: if it fails, the slow path takes its place.
pub(crate) struct TrialOperation {
    kind: OperationKind,
    lane: u32,
    began: Option<Instant>,
}

impl TrialOperation {
    /// Counts the operation, which has succeeded.
    #[inline]
    pub(crate) fn count_done(self, fs: &LibFs) {
        fs.control.count_operation(self.kind, self.lane);
        if let Some(began) = self.began {
            record_latency(fs, self.kind, began);
        }
    }
}

/// The scope of an operation of this thread, or of a part of one.
pub(crate) struct OperationScope<'a> {
    fs: &'a LibFs,
}

impl Drop for OperationScope<'_> {
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
    /// Counts an operation that begins; it lasts until the value is dropped.
    #[inline]
    pub(crate) fn begin_operation(&self, kind: OperationKind) -> MeasuredOperation<'_> {
        let before = self.control.count_operation(kind, thread_lane());
        let began = if before % SAMPLE_EVERY == 0 { start_timer() } else { None };
        MeasuredOperation { scope: self.enter_operation(), kind, began }
    }

    /// Begins an operation that requests no leases and is counted when it has succeeded.
    #[inline]
    pub(crate) fn try_operation(&self, kind: OperationKind) -> TrialOperation {
        let lane = thread_lane();
        let before = self.control.operations_in(kind, lane);
        TrialOperation { kind, lane, began: if before % SAMPLE_EVERY == 0 { start_timer() } else { None } }
    }

    /// Begins an operation, or a part of one, that is not counted.
    #[inline]
    pub(crate) fn enter_operation(&self) -> OperationScope<'_> {
        DEPTH.set(DEPTH.get() + 1);
        OperationScope { fs: self }
    }

    /// Announces that the running operation requests leases.
    ///
    /// SharedFS leaves them to it until it ends, for a limited time.
    pub(crate) fn begin_use(&self) {
        // Without a scope, nothing would announce the end.
        if DEPTH.get() != 0 && !HAS_ASKED.replace(true) {
            self.control.begin_use();
        }
    }
}

impl Drop for MeasuredOperation<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(began) = self.began {
            record_latency(self.scope.fs, self.kind, began);
        }
    }
}

#[cold]
fn start_timer() -> Option<Instant> {
    Some(Instant::now())
}

#[cold]
fn record_latency(fs: &LibFs, kind: OperationKind, began: Instant) {
    fs.control.record_latency(kind, u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
}

#[inline]
fn thread_lane() -> u32 {
    // A thread that is about to end may have lost its variables.
    LANE.try_with(|lane| if lane.get() == UNKNOWN { choose_lane(lane) } else { lane.get() }).unwrap_or(0)
}

#[cold]
fn choose_lane(lane: &Cell<u32>) -> u32 {
    let next = |taken: u32| (taken < OPERATION_LANES - 1).then_some(taken + 1);
    let chosen = THREADS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_or(0, |taken| taken + 1);
    lane.set(chosen);
    chosen
}
