//! The mount's records about locks: which owners may have some, and which requests wait for one.

use std::collections::{HashMap, HashSet, VecDeque};

use ashlar_types::{Errno, InodeId};
use parking_lot::Mutex;

/// The most locks that wait at once. Each takes a thread here and a connection to SharedFS, which has 256 in all.
const WAITS_MAX: usize = 128;
/// How many early interrupts are remembered: those that came before the request that they interrupt was seen to wait.
/// An interrupt passes its request only on the way through the threads that serve, few of which are at work at once.
const EARLY_MAX: usize = 1024;

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

    /// Records that an owner may have record locks on an inode, through this handle.
    pub(crate) fn record_owner(&self, inode: InodeId, owner: u64, handle: u64) {
        self.record_owners.lock().record(inode, owner, handle);
    }

    /// Records that request `unique` is interrupted. Returns whether it waits, and its waiting is to be cancelled now.
    pub(crate) fn interrupt_wait(&self, unique: u64) -> bool {
        let mut waits = self.waits.lock();
        match waits.active.get_mut(&unique) {
            Some(is_cancelled) => !std::mem::replace(is_cancelled, true),
            None => {
                if waits.early.len() == EARLY_MAX {
                    waits.early.pop_front();
                }
                waits.early.push_back(unique);
                false
            }
        }
    }

    /// Refuses further waits: the mount is gone. Returns the requests whose waiting is to be cancelled now.
    pub(crate) fn close_waits(&self) -> Vec<u64> {
        let mut waits = self.waits.lock();
        waits.closed = true;
        let cancelled = waits
            .active
            .iter_mut()
            .filter_map(|(unique, is_cancelled)| (!std::mem::replace(is_cancelled, true)).then_some(*unique));
        cancelled.collect()
    }

    /// Records that a request begins to wait.
    ///
    /// # Errors
    /// `EINTR` if it was interrupted already, or the mount is gone; `ENOLCK` if too many requests wait.
    pub(crate) fn begin_wait(&self, unique: u64) -> Result<(), Errno> {
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

    /// Records that a request waits no longer.
    pub(crate) fn end_wait(&self, unique: u64) {
        self.waits.lock().active.remove(&unique);
    }

    /// Whether a request waits.
    pub(crate) fn is_waiting(&self, unique: u64) -> bool {
        self.waits.lock().active.contains_key(&unique)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_without_lock_sends_no_message() {
        let locks = Locks::default();
        assert!(!locks.forget_record_owner(InodeId(20), 5));
        locks.record_owner(InodeId(20), 5, 1);
        assert!(!locks.forget_record_owner(InodeId(20), 6));
        assert!(locks.forget_record_owner(InodeId(20), 5));
        assert!(!locks.forget_record_owner(InodeId(20), 5));
    }

    #[test]
    fn open_file_that_owns_locks_is_found_at_release() {
        let locks = Locks::default();
        let (process, description) = (5, 6);
        for (owner, handle) in [(process, 1), (process, 2), (description, 2)] {
            locks.record_owner(InodeId(20), owner, handle);
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
        assert!(!locks.interrupt_wait(7), "it does not wait yet");
        assert_eq!(locks.begin_wait(7), Err(Errno::EINTR));
        for unique in 100..100 + WAITS_MAX as u64 {
            locks.begin_wait(unique).unwrap();
        }
        assert_eq!(locks.begin_wait(8), Err(Errno::ENOLCK));
        locks.end_wait(100);
        locks.begin_wait(8).unwrap();
        assert!(locks.is_waiting(8) && !locks.is_waiting(100));
    }

    #[test]
    fn each_wait_is_cancelled_once() {
        let locks = Locks::default();
        locks.begin_wait(7).unwrap();
        locks.begin_wait(8).unwrap();
        assert!(locks.interrupt_wait(7));
        assert!(!locks.interrupt_wait(7));
        assert_eq!(locks.close_waits(), [8]);
        assert_eq!(locks.begin_wait(9), Err(Errno::EINTR));
    }
}
