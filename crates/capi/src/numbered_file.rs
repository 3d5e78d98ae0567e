//! Open files and their numbers.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ashlar_libfs::{LibFs, LockKind, Outcome};
use ashlar_types::{Errno, InodeId};

/// The first number.
///
/// No descriptor of the kernel is as high, so a descriptor of the wrong kind fails on either side.
const FIRST: i32 = 1 << 30;
/// The most open files of one session. SharedFS's table of a session's open inodes has as many slots.
const OPEN_MAX: usize = 65_536;

/// `O_TMPFILE` without `O_DIRECTORY`, which it includes.
pub(crate) const TMPFILE: i32 = libc::O_TMPFILE & !libc::O_DIRECTORY;

/// An open file. It lives until the last number that refers to it and the last call with it are gone.
#[derive(Debug)]
pub(crate) struct NumberedFile {
    pub(crate) fs: Arc<LibFs>,
    pub(crate) inode: InodeId,
    pub(crate) is_directory: bool,
    pub(crate) flags: i32,
    /// Its offset. A call that moves the offset holds the lock.
    pub(crate) offset: Mutex<u64>,
    /// The owner of its locks.
    pub(crate) lock_owner: u64,
    pub(crate) has_locks: AtomicBool,
}

impl NumberedFile {
    /// Whether its access mode allows reads.
    pub(crate) fn may_read(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    /// Whether its access mode allows writes.
    pub(crate) fn may_write(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }

    /// Whether writes go to the end.
    pub(crate) fn appends(&self) -> bool {
        self.flags & libc::O_APPEND != 0
    }

    /// Whether a write is persistent when the call returns.
    pub(crate) fn is_synchronous(&self) -> bool {
        self.flags & (libc::O_SYNC | libc::O_DSYNC) != 0
    }

    /// Whether it was created without a name and may never get one.
    pub(crate) fn stays_unnamed(&self) -> bool {
        self.flags & TMPFILE != 0 && self.flags & libc::O_EXCL != 0
    }
}

impl Drop for NumberedFile {
    fn drop(&mut self) {
        if self.has_locks.load(Ordering::Relaxed) {
            for kind in [LockKind::Flock, LockKind::Record] {
                // If SharedFS is away for good, it frees the locks with the session.
                let _ = self.fs.release_locks(self.inode, self.lock_owner, kind);
            }
        }
        self.fs.close(self.inode);
    }
}

#[derive(Debug, Default)]
struct Slots {
    files: Vec<Option<Arc<NumberedFile>>>,
    /// Free indices below the end.
    free: BinaryHeap<Reverse<usize>>,
}

/// The numbers of a session, and their open files.
#[derive(Debug, Default)]
pub(crate) struct FileNumbers(RwLock<Slots>);

impl FileNumbers {
    /// Gives an open file the lowest free number.
    ///
    /// # Errors
    /// `EMFILE` if none is free.
    pub(crate) fn add(&self, file: Arc<NumberedFile>) -> Outcome<i32> {
        let mut slots = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let index = match slots.free.pop() {
            Some(Reverse(index)) => index,
            None if slots.files.len() == OPEN_MAX => return Err(Errno::EMFILE),
            None => {
                slots.files.push(None);
                slots.files.len() - 1
            }
        };
        slots.files[index] = Some(file);
        Ok(FIRST + index as i32)
    }

    /// Fails with `EMFILE` if no number is free, before a file is created or truncated.
    ///
    /// Another thread may take the last number between that and [`FileNumbers::add`].
    pub(crate) fn check_room(&self) -> Outcome<()> {
        let slots = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if slots.free.is_empty() && slots.files.len() == OPEN_MAX { Err(Errno::EMFILE) } else { Ok(()) }
    }

    /// Returns the open file of a number.
    ///
    /// # Errors
    /// `EBADF` if the number is unused.
    pub(crate) fn get(&self, number: i32) -> Outcome<Arc<NumberedFile>> {
        let slots = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let index = usize::try_from(number.wrapping_sub(FIRST)).map_err(|_| Errno::EBADF)?;
        slots.files.get(index).and_then(Option::as_ref).cloned().ok_or(Errno::EBADF)
    }

    /// Removes a number.
    ///
    /// # Errors
    /// `EBADF` if the number is unused.
    pub(crate) fn remove(&self, number: i32) -> Outcome<Arc<NumberedFile>> {
        let mut slots = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let index = usize::try_from(number.wrapping_sub(FIRST)).map_err(|_| Errno::EBADF)?;
        let file = slots.files.get_mut(index).and_then(Option::take).ok_or(Errno::EBADF)?;
        slots.free.push(Reverse(index));
        Ok(file)
    }

    /// Removes all numbers.
    pub(crate) fn close_all(&self) {
        let slots = std::mem::take(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner));
        drop(slots);
    }
}
