//! A process's own record locks (`fcntl`), which cost no message where nobody else locks the file.
//!
//! They stand in the slots of the control page, which say who has the say over them (`ashlar-wire`, `lock_slots`): the slot itself, where
//! SharedFS has delegated them, or SharedFS's table. In the second case a lock is a request, and the slot has a copy, so that a SharedFS
//! that was started anew finds them without asking anybody. Where there is no slot to be had, or no room in it, requests are noted as those
//! of a mount are (`HeldLocks`), and asked for again.
//!
//! The copy never has what the table has not been asked for: locks are copied when they were granted, and taken out before they are
//! given back. Where another SharedFS has begun meanwhile, it's its table that counts, and it is asked anew.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use ashlar_types::{Errno, InodeId};
use ashlar_wire::{
    LOCK_LAST, LOCK_OWNER_PROCESS, LOCK_SLOTS, LockChange, LockKind, LockList, LockMode, LockSlot, LockSlotState,
    Reply, Request,
};
use rustix_futex_sync::{Mutex, MutexGuard};

use crate::LibFs;
use crate::api::Outcome;
use crate::calls::{Pause, Reclaim};

/// Locks of files, by inode: more than threads that lock at the same moment.
const GUARDS: usize = 16;

/// What a lock is asked for by: first byte, last byte.
type Range = (u64, u64);
/// A lock that is in the way: mode, first byte, last byte, process.
pub type Conflict = (LockMode, u64, u64, u32);

/// What became of a record lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordLock {
    /// It is done.
    Done,
    /// The process has locked this file through a mount, and must go on there. Nothing was done.
    OfMount,
    /// There is no room for it here, and the process must go on through a mount, where what it has must move ([`LibFs::yield_records`]).
    /// Whether it was done does not matter: it is to be asked for there.
    NoRoom,
}

/// What a session knows of its process's record locks beside the slots.
#[derive(Debug, Default)]
pub(crate) struct RecordLocks {
    /// Held over each change of the locks of a file.
    guards: [Mutex<()>; GUARDS],
    /// Held while a slot is looked for.
    claiming: Mutex<()>,
    /// The last name of a waiting.
    ticket: AtomicU64,
    /// Files on which the process may have locks that it knows nothing of, as SharedFS gave no answer: they go with the file.
    doubtful: Mutex<HashSet<InodeId>>,
}

impl RecordLocks {
    fn guard(&self, inode: InodeId) -> &Mutex<()> {
        &self.guards[inode.0 as usize % GUARDS]
    }

    /// Notes that a request for a lock has failed: where SharedFS was away, the lock may come all the same.
    fn failed(&self, inode: InodeId, errno: Errno) -> Errno {
        if errno == Errno::EIO {
            self.doubtful.lock().insert(inode);
        }
        errno
    }

    fn is_doubtful(&self, inode: InodeId) -> bool {
        self.doubtful.lock().contains(&inode)
    }
}

fn request(inode: InodeId, (start, end): Range, mode: LockMode, wait: Option<u64>, slot: Option<LockSlot>) -> Request {
    let pid = std::process::id();
    Request::Lock { inode, kind: LockKind::Record, owner: LOCK_OWNER_PROCESS, pid, start, end, mode, wait, slot }
}

impl LibFs {
    /// Sets or removes a record lock of the process, without waiting.
    ///
    /// # Errors
    /// `EAGAIN` where another lock is in the way; `ENOLCK`; `EIO` where SharedFS is needed, and away.
    pub fn lock_record(&self, inode: InodeId, range: Range, mode: LockMode) -> Outcome<RecordLock> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        if self.control.is_fenced() {
            // What it has in its slots is worth nothing any more.
            return Err(Errno::EIO);
        }
        if let Some(slot) = self.control.lock_slot_of(inode) {
            let set = |list: &mut LockList| list.set(range.0, range.1, mode);
            return match self.control.change_locks(slot, inode, LockSlotState::Delegated, set) {
                LockChange::Done => Ok(RecordLock::Done),
                LockChange::Full => Ok(RecordLock::NoRoom),
                LockChange::Moved => self.lock_shared(slot, inode, range, mode),
            };
        }
        if mode == LockMode::Unlock && !self.record_locks.is_doubtful(inode) {
            return Ok(RecordLock::Done);
        }
        match self.claim_slot(inode) {
            Some(slot) => self.lock_shared(slot, inode, range, mode),
            None => Ok(RecordLock::NoRoom),
        }
    }

    /// SharedFS's table has the locks, and the slot a copy.
    fn lock_shared(&self, slot: u32, inode: InodeId, range: Range, mode: LockMode) -> Outcome<RecordLock> {
        let copy = || {
            let set = |list: &mut LockList| list.set(range.0, range.1, mode);
            self.control.change_locks(slot, inode, LockSlotState::Shared, set) != LockChange::Full
        };
        if mode == LockMode::Unlock {
            let is_locked = self.control.lock_slot(slot).2.overlaps(range.0, range.1);
            if !is_locked && !self.record_locks.is_doubtful(inode) {
                return Ok(RecordLock::Done);
            }
            if !copy() {
                return Ok(RecordLock::NoRoom);
            }
        }
        let before = self.control.lock_slot(slot).2;
        loop {
            let asked_of = self.asked_of();
            let asked = self.control.lock_slot_at_present(slot);
            match self.call(&request(inode, range, mode, None, Some(asked))) {
                Ok(Reply::Done) if mode == LockMode::Unlock => return Ok(RecordLock::Done),
                Ok(Reply::Delegated) => return Ok(RecordLock::Done),
                Ok(Reply::Done) => {}
                Ok(Reply::LockedOnMount) => return Ok(RecordLock::OfMount),
                Ok(_) => return Err(Errno::EIO),
                Err(errno) => return Err(self.record_locks.failed(inode, errno)),
            }
            if !copy() {
                return Ok(RecordLock::NoRoom);
            }
            // A SharedFS that was started anew begins an era before it looks at the copies: it has found this one, or is asked. So it waits for no
            // session to come back before it gives others what they ask for.
            fence(Ordering::SeqCst);
            if self.asked_of() == asked_of {
                return Ok(RecordLock::Done);
            }
            // Until it has answered, the process has what it had before; what it has found of this it is asked to take back with the file.
            self.record_locks.doubtful.lock().insert(inode);
            self.control.change_locks(slot, inode, LockSlotState::Shared, |list| {
                *list = before.clone();
                true
            });
        }
    }

    /// Which SharedFS a lock is asked of: each begins an era of segments before it looks at anything. Where this is another once the answer is noted, one may
    /// have looked at what the session has before that.
    pub(crate) fn asked_of(&self) -> (u64, u64) {
        (self.control.segment_version(), self.calls.resumptions())
    }

    /// A slot for a file: a free one, or one of a file that the process has no locks on.
    fn claim_slot(&self, inode: InodeId) -> Option<u32> {
        let _one_at_a_time = self.record_locks.claiming.lock();
        if let Some(slot) = self.control.claim_lock_slot(inode) {
            return Some(slot);
        }
        // Each time another one: what was used last comes last, more or less.
        let begin = self.record_locks.ticket.fetch_add(1, Ordering::Relaxed) as u32;
        let is_freed = |slot: u32| {
            let (other, ..) = self.control.lock_slot(slot);
            let guard = self.record_locks.guard(other);
            let held: Option<MutexGuard<'_, ()>> = guard.try_lock();
            // The caller holds its own.
            let may_look = held.is_some() || std::ptr::eq(guard, self.record_locks.guard(inode));
            let (now, _, list) = self.control.lock_slot(slot);
            may_look && now == other && list.is_empty() && self.control.free_lock_slot(slot)
        };
        (0..LOCK_SLOTS).map(|step| begin.wrapping_add(step) % LOCK_SLOTS).find(|&slot| is_freed(slot))?;
        self.control.claim_lock_slot(inode)
    }

    /// Waits until a record lock could be had; it must then be asked for with [`LibFs::lock_record`], which may find that it can't be had
    /// any more. `pause` waits for a socket, as long as it likes to.
    ///
    /// # Errors
    /// `EINTR` where `pause` says so, and no lock has come; `EDEADLK`; `EIO` where SharedFS is away, and then the lock may come all the same
    /// and stays up to [`LibFs::release_records`].
    pub fn await_record(
        &self,
        inode: InodeId,
        range: Range,
        mode: LockMode,
        pause: &mut dyn FnMut(BorrowedFd<'_>, Duration) -> Pause,
    ) -> Outcome<RecordLock> {
        let ticket = self.record_locks.ticket.fetch_add(1, Ordering::Relaxed);
        let asked = request(inode, range, mode, Some(ticket), None);
        let cancel = Request::CancelLock { ticket };
        match self.calls.call_interruptible(&asked, &cancel, self, pause) {
            Ok(Reply::LockedOnMount) => Ok(RecordLock::OfMount),
            Ok(_) => Ok(RecordLock::Done),
            Err(errno) => Err(self.record_locks.failed(inode, errno)),
        }
    }

    /// Gives back what came of [`LibFs::await_record`], where nobody wants it any more.
    ///
    /// # Errors
    /// `EIO` where SharedFS is away.
    pub fn drop_awaited(&self, inode: InodeId, range: Range) -> Outcome<()> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        let dropped = self.call(&request(inode, range, LockMode::Unlock, None, None));
        dropped.map(drop).map_err(|errno| self.record_locks.failed(inode, errno))
    }

    /// Says that SharedFS may have locks of the process on a file that it knows nothing of: they go with the file.
    pub fn doubt_records(&self, inode: InodeId) {
        self.record_locks.doubtful.lock().insert(inode);
    }

    /// The first lock that is in the way of a record lock of the process: `Err` in the answer where the process must ask on a mount.
    ///
    /// # Errors
    /// `EIO` where SharedFS is needed, and away.
    pub fn query_record(
        &self,
        inode: InodeId,
        range: Range,
        mode: LockMode,
    ) -> Outcome<Result<Option<Conflict>, RecordLock>> {
        let slot = self.control.lock_slot_of(inode);
        if slot.is_some_and(|slot| {
            let (found, state, _) = self.control.lock_slot(slot);
            (found, state) == (inode, LockSlotState::Delegated)
        }) {
            return Ok(Ok(None));
        }
        let (kind, owner) = (LockKind::Record, LOCK_OWNER_PROCESS);
        match self.call(&Request::QueryLock { inode, kind, owner, start: range.0, end: range.1, mode })? {
            Reply::Conflict(conflict) => Ok(Ok(conflict)),
            Reply::LockedOnMount => Ok(Err(RecordLock::OfMount)),
            _ => Err(Errno::EIO),
        }
    }

    /// Whether the process has record locks of the session on a file.
    #[must_use]
    pub fn has_records(&self, inode: InodeId) -> bool {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        let slot = self.control.lock_slot_of(inode);
        slot.is_some_and(|slot| !self.control.lock_slot(slot).2.is_empty())
    }

    /// Removes all record locks of the process on a file.
    ///
    /// # Errors
    /// `EIO` where SharedFS is needed, and away. It then has them, and is asked again the next time.
    pub fn release_records(&self, inode: InodeId) -> Outcome<()> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        let clear = |list: &mut LockList| list.set(0, LOCK_LAST, LockMode::Unlock);
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
        let is_doubtful = self.record_locks.doubtful.lock().remove(&inode);
        if !is_copied && !is_doubtful {
            return Ok(());
        }
        let (owner, kind) = (LOCK_OWNER_PROCESS, LockKind::Record);
        let released = self.call(&Request::ReleaseLocks { inode, owner, kind });
        // Nothing else tells of them any more: the copy is empty.
        released.map(drop).map_err(|errno| self.record_locks.failed(inode, errno))
    }

    /// Lets the process take its record locks on a file over on a mount: mode, first and last byte of each. Until
    /// [`LibFs::release_records`] they are in nobody else's reach.
    ///
    /// # Errors
    /// `EIO` where SharedFS is away.
    pub fn yield_records(&self, inode: InodeId) -> Outcome<Vec<(LockMode, u64, u64)>> {
        let _one_at_a_time = self.record_locks.guard(inode).lock();
        match self.call(&Request::YieldLocks { inode, moves: true })? {
            Reply::Locks(locks) => Ok(locks),
            _ => Err(Errno::EIO),
        }
    }
}

impl Reclaim for LibFs {
    fn requests(&self) -> Vec<Request> {
        // What is in slots SharedFS looks at itself: a request might be older than an unlock.
        let locks = self.held_locks.requests();
        // First: while the mount has not come back, SharedFS shows nobody what was taken from it.
        self.reservations().into_iter().chain(locks).collect()
    }
}
