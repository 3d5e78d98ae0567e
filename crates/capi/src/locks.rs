//! Locks of open files. SharedFS keeps them, beside the locks that come through mounts.

use std::sync::atomic::Ordering;

use ashlar_libfs::Outcome;
use ashlar_types::{ByteRange, Errno, LockAction, LockKind};

use crate::session::CapiSession;

impl CapiSession {
    /// `flock`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn lock_whole(&self, file: i32, operation: i32) -> Outcome<()> {
        let action = match operation & !libc::LOCK_NB {
            libc::LOCK_SH => LockAction::Read,
            libc::LOCK_EX => LockAction::Write,
            libc::LOCK_UN => LockAction::Unlock,
            _ => return Err(Errno::EINVAL),
        };
        self.lock(file, LockKind::Flock, ByteRange::ALL, action, operation & libc::LOCK_NB == 0)
    }

    /// Sets or removes a lock of a range of bytes.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn lock_bytes(&self, file: i32, kind: i32, start: i64, bytes: i64, waits: bool) -> Outcome<()> {
        let open = self.file(file)?;
        let (action, is_allowed) = match kind {
            libc::F_RDLCK => (LockAction::Read, open.may_read()),
            libc::F_WRLCK => (LockAction::Write, open.may_write()),
            libc::F_UNLCK => (LockAction::Unlock, true),
            _ => return Err(Errno::EINVAL),
        };
        let range = range(start, bytes)?;
        if !is_allowed {
            return Err(Errno::EBADF);
        }
        self.lock(file, LockKind::Record, range, action, waits)
    }

    fn lock(&self, file: i32, kind: LockKind, range: ByteRange, action: LockAction, waits: bool) -> Outcome<()> {
        let file = self.file(file)?;
        let wait = (waits && action != LockAction::Unlock).then(|| self.new_ticket());
        // Recorded first: a lock that is granted late is then removed with the file.
        file.has_locks.store(true, Ordering::Relaxed);
        self.fs.lock(file.inode, kind, file.lock_owner, std::process::id(), range, action, wait)
    }
}

/// Returns the range that begins so far into a file.
fn range(start: i64, bytes: i64) -> Outcome<ByteRange> {
    let first = u64::try_from(start).map_err(|_| Errno::EINVAL)?;
    match u64::try_from(bytes).map_err(|_| Errno::EINVAL)? {
        0 => Ok(ByteRange::new(first, i64::MAX as u64)),
        bytes => Ok(ByteRange::new(first, (first + bytes - 1).min(i64::MAX as u64))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_fcntl() {
        assert_eq!(range(5, 10), Ok(ByteRange::new(5, 14)));
        assert_eq!(range(5, 0), Ok(ByteRange::new(5, i64::MAX as u64)));
        assert_eq!(range(i64::MAX, i64::MAX), Ok(ByteRange::new(i64::MAX as u64, i64::MAX as u64)));
        assert_eq!(range(-1, 1), Err(Errno::EINVAL));
        assert_eq!(range(1, -1), Err(Errno::EINVAL));
    }
}
