//! Record locks and flock: GETLK, SETLK, SETLKW, and INTERRUPT of a waiting one.
//!
//! A lock that must wait does so on a thread of its own, so that the threads that serve never wait for an application.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ashlar_libfs::{ByteRange, LockAction, LockKind, LockedRange};
use ashlar_types::{Errno, InodeId};
use parking_lot::Mutex;

use crate::connection::reply_buffer::ReplyBuffer;
use crate::file_system::FileSystem;
use crate::operations::dispatch::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{FileLock, LK_FLOCK, LkIn, LkOut};
use crate::serving::server::Server;

/// The most locks that wait at once. Each takes a thread here and a connection to SharedFS, which has 256 in all.
const WAITS_MAX: usize = 128;
/// How many early interrupts are remembered: those that came before the request that they interrupt was seen to wait.
/// An interrupt passes its request only on the way through the threads that serve, few of which are at work at once.
const EARLY_MAX: usize = 1024;
/// A waiting thread does nothing but a call of LibFS.
const STACK_BYTES: usize = 256 << 10;
/// How long to wait before a lock is cancelled again. Cancelling has no effect if the lock is not on its way to
/// SharedFS yet.
const CANCEL_AGAIN: Duration = Duration::from_millis(5);

/// The mount's records about its locks. The locks themselves are SharedFS's.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    record_owners: Mutex<RecordOwners>,
    /// Handles that a helper has made for another process, each with the thread that made it. A handle stays here until
    /// that process has closed the descriptor that it was sent.
    sent: Mutex<HashMap<u64, u32>>,
    waits: Mutex<Waits>,
}

/// Which owners may have record locks on which inodes, and through which handles. So closing a file costs nothing if no
/// owner has any.
///
/// An owner is a process or, for locks of an open file description (`F_OFD_SETLK`), that description; the protocol does
/// not say which. When a process closes a file, FLUSH names it as owner. A description is never named: at its end only
/// RELEASE comes, with its handle. By then all processes that had it open have closed it. So an owner that is still
/// recorded with that handle is the description.
#[derive(Debug, Default)]
struct RecordOwners(HashMap<InodeId, HashSet<(u64, u64)>>);

impl RecordOwners {
    fn record(&mut self, inode: InodeId, owner: u64, handle: u64) {
        self.0.entry(inode).or_default().insert((owner, handle));
    }

    /// Removes the owners and handles that `is_meant` picks; returns these owners.
    fn take_owners(&mut self, inode: InodeId, is_meant: impl Fn(u64, u64) -> bool) -> HashSet<u64> {
        let Some(noted) = self.0.get_mut(&inode) else { return HashSet::new() };
        let mut taken = HashSet::new();
        noted.retain(|&(owner, handle)| {
            let stays = !is_meant(owner, handle);
            if !stays {
                taken.insert(owner);
            }
            stays
        });
        if noted.is_empty() {
            self.0.remove(&inode);
        }
        taken
    }
}

#[derive(Debug, Default)]
struct Waits {
    /// Requests that wait, by their number, and whether they were cancelled.
    active: HashMap<u64, bool>,
    early: VecDeque<u64>,
    closed: bool,
}

impl Locks {
    /// Forgets that an owner may have record locks; returns whether it might.
    pub(crate) fn forget_record_owner(&self, inode: InodeId, owner: u64) -> bool {
        !self.record_owners.lock().take_owners(inode, |other, _| other == owner).is_empty()
    }

    /// Records a handle that a helper makes. The process that receives the descriptor duplicates it to its final
    /// number, and closes the received one. The program did not close the file then, so none of its locks end.
    pub(crate) fn record_sent_handle(&self, handle: u64, helper: u32) {
        self.sent.lock().insert(handle, helper);
    }

    /// Whether a thread closes the descriptor that a helper sent. If so, the handle is no longer recorded.
    pub(crate) fn take_sent_close(&self, handle: u64, thread: u32) -> bool {
        let mut sent = self.sent.lock();
        let is_it = sent.get(&handle).is_some_and(|&helper| helper != thread);
        if is_it {
            sent.remove(&handle);
        }
        is_it
    }

    /// Forgets a handle that is released; returns the owners that may still have record locks through it.
    pub(crate) fn forget_handle(&self, inode: InodeId, handle: u64) -> HashSet<u64> {
        self.sent.lock().remove(&handle);
        self.record_owners.lock().take_owners(inode, |_, other| other == handle)
    }

    /// Cancels the waiting of request `unique`.
    pub(crate) fn interrupt_wait<F: FileSystem>(&self, server: &Arc<Server<F>>, unique: u64) {
        let mut waits = self.waits.lock();
        match waits.active.get_mut(&unique) {
            Some(is_cancelled) => {
                if !std::mem::replace(is_cancelled, true) {
                    cancel_wait(server, unique);
                }
            }
            None => {
                if waits.early.len() == EARLY_MAX {
                    waits.early.pop_front();
                }
                waits.early.push_back(unique);
            }
        }
    }

    /// Cancels all waiting locks: the mount is gone.
    pub(crate) fn cancel_all<F: FileSystem>(&self, server: &Arc<Server<F>>) {
        let mut waits = self.waits.lock();
        waits.closed = true;
        for (unique, is_cancelled) in &mut waits.active {
            if !std::mem::replace(is_cancelled, true) {
                cancel_wait(server, *unique);
            }
        }
    }

    fn begin_wait(&self, unique: u64) -> Result<(), Errno> {
        let mut waits = self.waits.lock();
        if waits.closed || waits.early.contains(&unique) {
            return Err(Errno::EINTR);
        }
        if waits.active.len() == WAITS_MAX {
            return Err(Errno::ENOLCK);
        }
        waits.active.insert(unique, false);
        Ok(())
    }

    fn end_wait(&self, unique: u64) {
        self.waits.lock().active.remove(&unique);
    }

    fn is_waiting(&self, unique: u64) -> bool {
        self.waits.lock().active.contains_key(&unique)
    }
}

/// Cancels a waiting lock, from another thread: it takes a message to SharedFS.
fn cancel_wait<F: FileSystem>(server: &Arc<Server<F>>, unique: u64) {
    let server = Arc::clone(server);
    let thread = std::thread::Builder::new().name("ashlar-unlock".into()).stack_size(STACK_BYTES);
    let spawned = thread.spawn(move || {
        while server.locks.is_waiting(unique) {
            // The result does not matter: the waiting lock reports how it ended.
            let _ = server.file_system.cancel_lock(unique);
            std::thread::sleep(CANCEL_AGAIN);
        }
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "a waiting lock could not be interrupted");
    }
}

fn lock_kind(asked: &LkIn) -> LockKind {
    if asked.lk_flags & LK_FLOCK != 0 { LockKind::Flock } else { LockKind::Record }
}

/// Returns the owner of a lock. A flock belongs to its open file, which the kernel names by its address in memory. The
/// kernel reports an open file's end only afterwards, when the next one may have the same address: its lock would end
/// with the other's. A handle's number is never used again.
fn lock_owner(asked: &LkIn) -> u64 {
    if asked.lk_flags & LK_FLOCK != 0 { asked.fh } else { asked.owner }
}

fn lock_action(asked: &LkIn) -> Result<LockAction, Errno> {
    match i32::try_from(asked.lk.kind).map_err(|_| Errno::EINVAL)? {
        libc::F_RDLCK => Ok(LockAction::Read),
        libc::F_WRLCK => Ok(LockAction::Write),
        libc::F_UNLCK => Ok(LockAction::Unlock),
        _ => Err(Errno::EINVAL),
    }
}

/// Returns an action as `fcntl` numbers it.
fn fcntl_number(action: LockAction) -> u32 {
    let number = match action {
        LockAction::Read => libc::F_RDLCK,
        LockAction::Write => libc::F_WRLCK,
        LockAction::Unlock => libc::F_UNLCK,
    };
    number as u32
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// GETLK.
    pub(crate) fn getlk(mut self) -> RequestResult {
        let asked: LkIn = self.arguments.structure()?;
        let range = ByteRange::new(asked.lk.start, asked.lk.end);
        let found =
            self.fs().query_lock(self.inode(), lock_kind(&asked), lock_owner(&asked), range, lock_action(&asked)?)?;
        let lk = match found {
            Some((LockedRange { mode, range }, pid)) => {
                FileLock { start: range.first, end: range.last, kind: fcntl_number(mode.into()), pid }
            }
            None => FileLock { kind: fcntl_number(LockAction::Unlock), ..asked.lk },
        };
        self.reply.structure(&LkOut { lk })?;
        Ok(ReplyAction::Send)
    }

    /// SETLK, and SETLKW, which may wait.
    pub(crate) fn setlk(mut self, may_wait: bool) -> RequestResult {
        let asked: LkIn = self.arguments.structure()?;
        let (inode, kind, action) = (self.inode(), lock_kind(&asked), lock_action(&asked)?);
        if kind == LockKind::Record && action != LockAction::Unlock {
            // Recorded before the lock exists: a record in vain costs one message at close.
            self.server.locks.record_owners.lock().record(inode, asked.owner, asked.fh);
        }
        let range = ByteRange::new(asked.lk.start, asked.lk.end);
        match self.fs().lock(inode, kind, lock_owner(&asked), asked.lk.pid, range, action, None) {
            Err(Errno::EAGAIN) if may_wait => self.wait_for_lock(&asked, kind, action),
            result => result.map(|()| ReplyAction::Send),
        }
    }

    /// Waits on another thread, which answers the request.
    fn wait_for_lock(&self, asked: &LkIn, kind: LockKind, action: LockAction) -> RequestResult {
        let (unique, inode, asked) = (self.header.unique, self.inode(), *asked);
        self.server.locks.begin_wait(unique)?;
        let (server, route) = (Arc::clone(self.server), self.route.clone());
        let thread = std::thread::Builder::new().name("ashlar-lock".into()).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            server.ring_workers.unbind_thread();
            let range = ByteRange::new(asked.lk.start, asked.lk.end);
            let result =
                server.file_system.lock(inode, kind, lock_owner(&asked), asked.lk.pid, range, action, Some(unique));
            server.locks.end_wait(unique);
            let mut reply = ReplyBuffer::new(0);
            if let Err(errno) = route.send(&server.device, reply.seal(unique, result)) {
                tracing::error!(%errno, "the kernel took no answer to a lock request");
            }
        });
        match spawned {
            Ok(_) => Ok(ReplyAction::SendLater),
            Err(_) => {
                self.server.locks.end_wait(unique);
                Err(Errno::ENOLCK)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_without_lock_sends_no_message() {
        let locks = Locks::default();
        assert!(!locks.forget_record_owner(InodeId(20), 5));
        locks.record_owners.lock().record(InodeId(20), 5, 1);
        assert!(!locks.forget_record_owner(InodeId(20), 6));
        assert!(locks.forget_record_owner(InodeId(20), 5));
        assert!(!locks.forget_record_owner(InodeId(20), 5));
    }

    #[test]
    fn open_file_that_owns_locks_is_found_at_release() {
        let locks = Locks::default();
        let (process, description) = (5, 6);
        for (owner, handle) in [(process, 1), (process, 2), (description, 2)] {
            locks.record_owners.lock().record(InodeId(20), owner, handle);
        }
        assert!(locks.forget_record_owner(InodeId(20), process), "it closes one of its two files");
        assert!(locks.forget_handle(InodeId(20), 1).is_empty());
        assert!(locks.forget_handle(InodeId(21), 2).is_empty());
        assert_eq!(locks.forget_handle(InodeId(20), 2), HashSet::from([description]));
        assert!(locks.record_owners.lock().0.is_empty(), "nothing is kept");
    }

    #[test]
    fn waits_are_bounded_and_an_early_interrupt_counts() {
        let locks = Locks::default();
        locks.waits.lock().early.push_back(7);
        assert_eq!(locks.begin_wait(7), Err(Errno::EINTR));
        for unique in 100..100 + WAITS_MAX as u64 {
            locks.begin_wait(unique).unwrap();
        }
        assert_eq!(locks.begin_wait(8), Err(Errno::ENOLCK));
        locks.end_wait(100);
        locks.begin_wait(8).unwrap();
        assert!(locks.is_waiting(8) && !locks.is_waiting(100));
    }
}
