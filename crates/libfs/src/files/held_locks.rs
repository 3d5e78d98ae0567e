//! The file locks that owners of a mount hold for certain, to be restored in a restarted SharedFS.
//!
//! A restarted SharedFS believes these locks, in the order in which they come. So a lock that an owner may have given
//! up must not be among them: another owner may have it by now, and its own request could come later. While a request
//! is under way, an owner therefore holds only what it has whether or not SharedFS has served the request.

use std::collections::HashMap;

use ashlar_types::{ByteRange, InodeId, LockAction, LockKind, LockMode, LockedRange, change_range};
use ashlar_wire::Request;
use rustix_futex_sync::Mutex;

/// The most ranges of one owner on a file that are restored.
///
/// SharedFS's table takes no more of a session than that.
const RANGES_MAX: usize = 4096;

/// An owner of locks on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LockHolder {
    /// The file.
    pub(crate) inode: InodeId,
    /// The owner's number: of a process, or of an open file.
    pub(crate) owner: u64,
    /// The kind of its locks.
    pub(crate) kind: LockKind,
}

/// The locks that owners hold for certain.
#[derive(Debug, Default)]
pub(crate) struct HeldLocks(Mutex<HashMap<LockHolder, OwnerLocks>>);

/// The locks of an owner on a file that has locks there, or may have.
#[derive(Debug, Default)]
struct OwnerLocks {
    pid: u32,
    certain: LockedRanges,
    /// SharedFS may have locks that are not certain.
    is_doubtful: bool,
}

/// A request for a lock that is under way, and the locks in its range.
#[derive(Debug)]
pub(crate) struct PendingLock {
    range: ByteRange,
    action: LockAction,
    /// The locks before the request.
    before: Vec<LockedRange>,
    /// The locks that the owner has whether or not SharedFS has served the request.
    least: Vec<LockedRange>,
}

impl PendingLock {
    /// Returns whether SharedFS removes the held lock before it sets this one.
    ///
    /// `flock(2)` does so if it changes the mode.
    fn is_conversion(&self, kind: LockKind) -> bool {
        let wanted = self.action.mode();
        kind == LockKind::Flock && wanted.is_some() && self.before.iter().any(|held| Some(held.mode) != wanted)
    }

    /// Returns the locks that are left after a refusal.
    ///
    /// A refused conversion has lost its lock.
    pub(crate) fn refused(&self, kind: LockKind) -> &[LockedRange] {
        if self.is_conversion(kind) { &[] } else { &self.before }
    }

    /// Returns the locks before the request.
    pub(crate) fn before(&self) -> &[LockedRange] {
        &self.before
    }

    /// Returns the locks that another SharedFS lacks after a refusal, as it got the certain ones alone.
    pub(crate) fn weakened(&self, kind: LockKind) -> impl Iterator<Item = &LockedRange> {
        self.refused(kind).iter().filter(|held| !self.least.contains(held))
    }
}

impl HeldLocks {
    /// Returns whether an owner may have locks on a file.
    pub(crate) fn has_locks(&self, holder: LockHolder) -> bool {
        self.0.lock().contains_key(&holder)
    }

    /// Begins a request. Until it is answered, the owner has the weaker of its locks from before and after.
    pub(crate) fn begin_request(&self, holder: LockHolder, range: ByteRange, action: LockAction) -> PendingLock {
        let mut all = self.0.lock();
        let Some(locks) = all.get_mut(&holder) else {
            return PendingLock { range, action, before: Vec::new(), least: Vec::new() };
        };
        let before = locks.certain.within(range);
        let mut pending = PendingLock { range, action, before, least: Vec::new() };
        match action.mode().filter(|_| !pending.is_conversion(holder.kind)) {
            Some(mode) => locks.certain.weaken(range, mode),
            None => locks.certain.set(range, LockAction::Unlock),
        }
        pending.least = locks.certain.within(range);
        pending
    }

    /// Records that SharedFS has served a request.
    pub(crate) fn record_served(&self, holder: LockHolder, pid: u32, pending: &PendingLock) {
        let mut all = self.0.lock();
        if pending.action == LockAction::Unlock && pending.range.first == 0 && pending.range.last >= i64::MAX as u64 {
            all.remove(&holder);
            return;
        }
        let locks = all.entry(holder).or_default();
        locks.pid = pid;
        locks.certain.set(pending.range, pending.action);
        remove_if_empty(&mut all, holder);
    }

    /// Takes a record of [`Self::record_served`] back: another SharedFS runs, which may not know of it.
    pub(crate) fn record_unserved(&self, holder: LockHolder, pending: &PendingLock) {
        self.put_back(holder, pending.range, &pending.least, true);
    }

    /// Records that SharedFS has refused a request. The owner has these locks in the range now.
    pub(crate) fn record_refused(&self, holder: LockHolder, pending: &PendingLock, left: &[LockedRange]) {
        self.put_back(holder, pending.range, left, false);
    }

    /// Records that SharedFS may have locks of the owner that are not certain.
    ///
    /// They go when the owner releases its locks.
    pub(crate) fn mark_doubtful(&self, holder: LockHolder) {
        self.0.lock().entry(holder).or_default().is_doubtful = true;
    }

    fn put_back(&self, holder: LockHolder, range: ByteRange, left: &[LockedRange], is_doubtful: bool) {
        let mut all = self.0.lock();
        let Some(locks) = all.get_mut(&holder) else { return };
        locks.is_doubtful |= is_doubtful;
        locks.certain.set(range, LockAction::Unlock);
        left.iter().for_each(|held| locks.certain.set(held.range, held.mode.into()));
        remove_if_empty(&mut all, holder);
    }

    /// Forgets an owner's locks on a file; returns whether it may have had any.
    pub(crate) fn forget_locks(&self, holder: LockHolder) -> bool {
        self.0.lock().remove(&holder).is_some()
    }

    /// Returns the requests that restore the locks. None of them waits.
    pub(crate) fn requests(&self) -> Vec<Request> {
        let all = self.0.lock();
        let requests = all.iter().flat_map(|(&LockHolder { inode, owner, kind }, locks)| {
            locks.certain.0.iter().map(move |&LockedRange { mode, range }| {
                let (pid, action) = (locks.pid, mode.into());
                Request::Lock { inode, kind, owner, pid, range, action, wait: None, slot: None }
            })
        });
        requests.collect()
    }
}

fn remove_if_empty(all: &mut HashMap<LockHolder, OwnerLocks>, holder: LockHolder) {
    if all.get(&holder).is_some_and(|locks| locks.certain.0.is_empty() && !locks.is_doubtful) {
        all.remove(&holder);
    }
}

/// Locked ranges of bytes, in order; none overlap.
#[derive(Debug, Default)]
struct LockedRanges(Vec<LockedRange>);

impl LockedRanges {
    /// Locks or unlocks a range, as far as there is room.
    fn set(&mut self, range: ByteRange, action: LockAction) {
        let mut new: Vec<LockedRange> = Vec::with_capacity(self.0.len() + 2);
        change_range(&self.0, range, action, |held| {
            if !new.last_mut().is_some_and(|before| before.extend(&held)) && new.len() < RANGES_MAX {
                new.push(held);
            }
            true
        });
        self.0 = new;
    }

    /// Makes the locks in a range no stronger than a mode.
    fn weaken(&mut self, range: ByteRange, mode: LockMode) {
        let held = self.within(range).into_iter();
        held.filter(|held| held.mode > mode).for_each(|held| self.set(held.range, mode.into()));
    }

    /// Returns the parts that lie in a range.
    fn within(&self, range: ByteRange) -> Vec<LockedRange> {
        let overlapping = self.0.iter().filter(|held| held.range.overlaps(range));
        let clip = |held: &LockedRange| {
            let ByteRange { first, last } = held.range;
            let range = ByteRange::new(first.max(range.first), last.min(range.last));
            LockedRange { range, ..*held }
        };
        overlapping.map(clip).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDS: LockHolder = LockHolder { inode: InodeId(9), owner: 1, kind: LockKind::Record };
    const FLOCK: LockHolder = LockHolder { kind: LockKind::Flock, ..RECORDS };

    fn serve(held: &HeldLocks, holder: LockHolder, (first, last): (u64, u64), action: LockAction) {
        let pending = held.begin_request(holder, ByteRange::new(first, last), action);
        held.record_served(holder, 7, &pending);
    }

    /// The locks that a restarted SharedFS would be asked for.
    fn restored(held: &HeldLocks) -> Vec<(u64, u64, LockAction)> {
        let requests = held.requests().into_iter().map(|request| match request {
            Request::Lock { pid: 7, range, action, wait: None, .. } => (range.first, range.last, action),
            other => panic!("{other:?}"),
        });
        requests.collect()
    }

    #[test]
    fn granted_locks_are_requested_again_without_waiting() {
        let held = HeldLocks::default();
        serve(&held, RECORDS, (0, 9), LockAction::Read);
        serve(&held, RECORDS, (20, 29), LockAction::Write);
        serve(&held, RECORDS, (0, 4), LockAction::Unlock);
        assert_eq!(restored(&held), [(5, 9, LockAction::Read), (20, 29, LockAction::Write)]);
        serve(&held, RECORDS, (0, u64::MAX), LockAction::Unlock);
        assert!(restored(&held).is_empty() && !held.forget_locks(RECORDS));
    }

    /// SharedFS may have served it, and so have given to others what it gives up.
    #[test]
    fn lock_under_request_is_restored_as_weaker_one() {
        let held = HeldLocks::default();
        serve(&held, RECORDS, (0, 19), LockAction::Write);
        let weaker = held.begin_request(RECORDS, ByteRange::new(10, 29), LockAction::Read);
        assert_eq!(restored(&held), [(0, 9, LockAction::Write), (10, 19, LockAction::Read)]);
        held.record_refused(RECORDS, &weaker, weaker.refused(LockKind::Record));
        assert_eq!(restored(&held), [(0, 19, LockAction::Write)]);
        let removed = held.begin_request(RECORDS, ByteRange::new(0, 4), LockAction::Unlock);
        assert_eq!(restored(&held), [(5, 19, LockAction::Write)]);
        held.record_served(RECORDS, 7, &removed);
        let stronger = held.begin_request(RECORDS, ByteRange::new(30, 39), LockAction::Write);
        held.record_served(RECORDS, 7, &stronger);
        held.record_unserved(RECORDS, &stronger);
        assert_eq!(restored(&held), [(5, 19, LockAction::Write)]);
        serve(&held, RECORDS, (5, 19), LockAction::Unlock);
        assert!(restored(&held).is_empty() && held.forget_locks(RECORDS), "SharedFS may know the unserved one");
    }

    #[test]
    fn flock_in_conversion_is_not_restored() {
        let held = HeldLocks::default();
        serve(&held, FLOCK, (0, u64::MAX), LockAction::Read);
        let same = held.begin_request(FLOCK, ByteRange::ALL, LockAction::Read);
        held.record_refused(FLOCK, &same, same.refused(LockKind::Flock));
        assert_eq!(restored(&held).len(), 1, "nothing is converted");
        let other = held.begin_request(FLOCK, ByteRange::ALL, LockAction::Write);
        assert!(restored(&held).is_empty());
        held.record_refused(FLOCK, &other, other.refused(LockKind::Flock));
        assert!(restored(&held).is_empty() && !held.has_locks(FLOCK), "a refused conversion has lost the lock");
    }

    #[test]
    fn doubtful_lock_is_released_and_not_restored() {
        let held = HeldLocks::default();
        held.mark_doubtful(RECORDS);
        assert!(held.has_locks(RECORDS) && restored(&held).is_empty());
        assert!(held.forget_locks(RECORDS) && !held.has_locks(RECORDS));
    }
}
