//! A process's record locks (`fcntl`), without a message while it alone locks a file.
//!
//! The locks are in slots of the control page. A slot says which side decides about its locks (`ashlar-wire`,
//! `lock_slots`): the slot itself, if SharedFS has delegated them, or SharedFS's table. In the second case a lock is a
//! request, and the slot has a copy, by which LibFS knows what the process has locked. SharedFS notes what it grants
//! for its next life. If no slot is free, or a slot has no room, the caller gets [`RecordLockOutcome::NoRoom`] and
//! locks through a mount.
//!
//! The copy never has locks that the table was not asked for. LibFS copies locks after they were granted, and removes
//! them from the copy before it gives them back. If another SharedFS has begun meanwhile, its table counts, and LibFS
//! asks it again.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ashlar_types::{ByteRange, Errno, InodeId, LockAction, LockKind, LockedRange, SegmentVersion};
use ashlar_wire::{
    LOCK_LAST, LOCK_OWNER_PROCESS, LOCK_SLOTS, LockChange, LockList, LockSlot, LockSlotState, Reply, Request,
};
use rustix_futex_sync::MutexGuard;

use crate::LibFs;
use crate::api::Outcome;
use crate::client::sharedfs_client::{Reclaim, WakeReason};

/// A conflicting lock, and its process.
pub type ConflictingLock = (LockedRange, u32);

/// The outcome of a request for a record lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordLockOutcome {
    /// It is done.
    Done,
    /// The process has locked this file through a mount and must continue there. Nothing was done.
    OfMount,
    /// There is no room for the lock here, or SharedFS does not know that the session may have it: the kernel has the
    /// open file. The process must move its locks to a mount ([`LibFs::yield_records`]) and lock there. Whether this
    /// lock was set does not matter: the process asks for it there again.
    NoRoom,
}

fn lock_request(
    inode: InodeId,
    range: ByteRange,
    action: LockAction,
    wait: Option<u64>,
    slot: Option<LockSlot>,
) -> Request {
    let pid = std::process::id();
    Request::Lock { inode, kind: LockKind::Record, owner: LOCK_OWNER_PROCESS, pid, range, action, wait, slot }
}

impl LibFs {
    /// Sets or removes a record lock of the process, without waiting.
    ///
    /// # Errors
    /// `EAGAIN` if another lock is in the way; `ENOLCK`; `EIO` if SharedFS is needed and away.
    pub fn lock_record(&self, inode: InodeId, range: ByteRange, action: LockAction) -> Outcome<RecordLockOutcome> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        if self.control.is_fenced() {
            // The slots of a fenced session are worth nothing.
            return Err(Errno::EIO);
        }
        if let Some(slot) = self.control.lock_slot_of(inode) {
            let set = |list: &mut LockList| list.set(range, action);
            return match self.control.change_locks(slot, inode, LockSlotState::Delegated, set) {
                LockChange::Done => Ok(RecordLockOutcome::Done),
                LockChange::Full => Ok(RecordLockOutcome::NoRoom),
                LockChange::Moved => self.lock_shared(slot, inode, range, action),
            };
        }
        if action == LockAction::Unlock && !self.record_locks.is_doubtful(inode) {
            return Ok(RecordLockOutcome::Done);
        }
        match self.claim_slot(inode) {
            Some(slot) => self.lock_shared(slot, inode, range, action),
            None => Ok(RecordLockOutcome::NoRoom),
        }
    }

    /// Sets or removes a lock in SharedFS's table, with a copy in the slot.
    fn lock_shared(
        &self,
        slot: u32,
        inode: InodeId,
        range: ByteRange,
        action: LockAction,
    ) -> Outcome<RecordLockOutcome> {
        let copy = || {
            let set = |list: &mut LockList| list.set(range, action);
            self.control.change_locks(slot, inode, LockSlotState::Shared, set) != LockChange::Full
        };
        if action == LockAction::Unlock {
            let is_locked = self.control.lock_slot(slot).2.overlaps(range);
            if !is_locked && !self.record_locks.is_doubtful(inode) {
                return Ok(RecordLockOutcome::Done);
            }
            if !copy() {
                return Ok(RecordLockOutcome::NoRoom);
            }
        }
        let before = self.control.lock_slot(slot).2;
        loop {
            let sharedfs_generation = self.sharedfs_generation();
            let asked = self.control.lock_slot_at_present(slot);
            match self.call(&lock_request(inode, range, action, None, Some(asked))) {
                Ok(Reply::Done) if action == LockAction::Unlock => return Ok(RecordLockOutcome::Done),
                Ok(Reply::Delegated) => return Ok(RecordLockOutcome::Done),
                Ok(Reply::Done) => {}
                Ok(Reply::LockedOnMount) => return Ok(RecordLockOutcome::OfMount),
                Ok(_) => return Err(Errno::EIO),
                Err(Errno::EACCES) => return Ok(RecordLockOutcome::NoRoom),
                Err(errno) => return Err(self.record_locks.record_failure(inode, errno)),
            }
            if !copy() {
                return Ok(RecordLockOutcome::NoRoom);
            }
            // If SharedFS has restarted since the request, the answer may be the last one's, with a lock that it could
            // not note. So the new one is asked too.
            fence(Ordering::SeqCst);
            if self.sharedfs_generation() == sharedfs_generation {
                return Ok(RecordLockOutcome::Done);
            }
            // Until the new SharedFS has answered, the process has its former locks for certain, none stronger than the
            // requested one: another process may have got what a served request gave up. If SharedFS knows this lock by
            // a note, it is asked to remove it when the file is closed.
            self.record_locks.mark_doubtful(inode);
            self.control.change_locks(slot, inode, LockSlotState::Shared, |list| {
                *list = before.clone();
                action.mode().into_iter().for_each(|mode| list.weaken(range, mode));
                true
            });
        }
    }

    /// Returns which SharedFS a lock is requested from: its segment version, and this session's resumptions.
    ///
    /// Each SharedFS begins a segment version before it reads anything. If the value has changed once an answer is
    /// noted, another SharedFS may have read the session's state before that.
    pub(crate) fn sharedfs_generation(&self) -> (SegmentVersion, u64) {
        (self.control.segment_version(), self.client.resumptions())
    }

    /// Returns a slot for a file: a free one, or one of a file on which the process has no locks.
    fn claim_slot(&self, inode: InodeId) -> Option<u32> {
        let _one_at_a_time = self.record_locks.begin_claim();
        if let Some(slot) = self.control.claim_lock_slot(inode) {
            return Some(slot);
        }
        // Each search starts at another slot, so that slots are reused roughly in turn.
        let begin = self.record_locks.next_ticket() as u32;
        let is_freed = |slot: u32| {
            let (other, ..) = self.control.lock_slot(slot);
            let guard = self.record_locks.guard(other);
            let held: Option<MutexGuard<'_, ()>> = guard.try_lock();
            // The caller holds its own file's guard.
            let may_look = held.is_some() || std::ptr::eq(guard, self.record_locks.guard(inode));
            let (now, _, list) = self.control.lock_slot(slot);
            may_look && now == other && list.is_empty() && self.control.free_lock_slot(slot)
        };
        (0..LOCK_SLOTS).map(|step| begin.wrapping_add(step) % LOCK_SLOTS).find(|&slot| is_freed(slot))?;
        self.control.claim_lock_slot(inode)
    }

    /// Waits until a record lock can be had.
    ///
    /// The caller then asks for it with [`LibFs::lock_record`], which may find that it can't be had any more. `pause`
    /// waits for a socket, for as long as it decides.
    ///
    /// # Errors
    /// `EINTR` if `pause` says so and no lock has come; `EDEADLK`; `EIO` if SharedFS is away. In the last case the lock
    /// may be set all the same, and stays up to [`LibFs::release_records`].
    pub fn await_record(
        &self,
        inode: InodeId,
        range: ByteRange,
        action: LockAction,
        pause: &mut dyn FnMut(BorrowedFd<'_>, Duration) -> WakeReason,
    ) -> Outcome<RecordLockOutcome> {
        let ticket = self.record_locks.next_ticket();
        let asked = lock_request(inode, range, action, Some(ticket), None);
        let cancel = Request::CancelLock { ticket };
        match self.client.call_interruptible(&asked, &cancel, self, pause) {
            Ok(Reply::LockedOnMount) => Ok(RecordLockOutcome::OfMount),
            Ok(_) => Ok(RecordLockOutcome::Done),
            Err(errno) => Err(self.record_locks.record_failure(inode, errno)),
        }
    }

    /// Gives back the lock that [`LibFs::await_record`] got, if the process does not want it any more.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn release_awaited(&self, inode: InodeId, range: ByteRange) -> Outcome<()> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        let dropped = self.call(&lock_request(inode, range, LockAction::Unlock, None, None));
        dropped.map(drop).map_err(|errno| self.record_locks.record_failure(inode, errno))
    }

    /// Records that SharedFS may have unknown locks of the process on a file. Closing the file removes them.
    pub fn mark_records_doubtful(&self, inode: InodeId) {
        self.record_locks.mark_doubtful(inode);
    }

    /// Returns the first lock that conflicts with a record lock of the process.
    ///
    /// `Err` in the answer if the process must ask on a mount.
    ///
    /// # Errors
    /// `EIO` if SharedFS is needed and away.
    pub fn query_record(
        &self,
        inode: InodeId,
        range: ByteRange,
        action: LockAction,
    ) -> Outcome<Result<Option<ConflictingLock>, RecordLockOutcome>> {
        let slot = self.control.lock_slot_of(inode);
        if slot.is_some_and(|slot| {
            let (found, state, _) = self.control.lock_slot(slot);
            (found, state) == (inode, LockSlotState::Delegated)
        }) {
            return Ok(Ok(None));
        }
        let (kind, owner) = (LockKind::Record, LOCK_OWNER_PROCESS);
        match self.call(&Request::QueryLock { inode, kind, owner, range, action }) {
            Ok(Reply::Conflict(conflict)) => Ok(Ok(conflict)),
            Ok(Reply::LockedOnMount) => Ok(Err(RecordLockOutcome::OfMount)),
            Ok(_) => Err(Errno::EIO),
            Err(Errno::EACCES) => Ok(Err(RecordLockOutcome::NoRoom)),
            Err(errno) => Err(errno),
        }
    }

    /// Returns whether the process has record locks of the session on a file.
    #[must_use]
    pub fn has_records(&self, inode: InodeId) -> bool {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        let slot = self.control.lock_slot_of(inode);
        slot.is_some_and(|slot| !self.control.lock_slot(slot).2.is_empty())
    }

    /// Removes all record locks of the process on a file.
    ///
    /// # Errors
    /// `EIO` if SharedFS is needed and away. It then keeps them, and is asked again the next time.
    pub fn release_records(&self, inode: InodeId) -> Outcome<()> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        let clear = |list: &mut LockList| list.set(ByteRange::new(0, LOCK_LAST), LockAction::Unlock);
        let is_copied = self.control.lock_slot_of(inode).is_some_and(|slot| {
            match self.control.change_locks(slot, inode, LockSlotState::Delegated, clear) {
                LockChange::Done => false,
                _ if self.control.lock_slot(slot).2.is_empty() => false,
                _ => {
                    self.control.change_locks(slot, inode, LockSlotState::Shared, clear);
                    true
                }
            }
        });
        let is_doubtful = self.record_locks.take_doubtful(inode);
        if !is_copied && !is_doubtful {
            return Ok(());
        }
        let (owner, kind) = (LOCK_OWNER_PROCESS, LockKind::Record);
        let released = self.call(&Request::ReleaseLocks { inode, owner, kind });
        // No other record of them is left: the copy is empty.
        released.map(drop).map_err(|errno| self.record_locks.record_failure(inode, errno))
    }

    /// Lets the process take over its record locks on a file through a mount.
    ///
    /// Until [`LibFs::release_records`] no other process can get them.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn yield_records(&self, inode: InodeId) -> Outcome<Vec<LockedRange>> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        match self.call(&Request::YieldLocks { inode, moves: true })? {
            Reply::Locks(locks) => Ok(locks),
            _ => Err(Errno::EIO),
        }
    }
}

impl Reclaim for LibFs {
    fn requests(&self) -> Vec<Request> {
        // SharedFS has noted the locks in slots itself: a request might be older than an unlock.
        let locks = self.held_locks.requests();
        // Reservations come first: until the mount has resumed, SharedFS shows no other session the state that it took
        // from the mount.
        self.reservations().into_iter().chain(locks).collect()
    }
}
