//! Locks of open files. SharedFS keeps them, beside the locks that come through mounts.

use std::sync::atomic::Ordering;

use ashlar_libfs::{LockKind, LockMode, Outcome};
use ashlar_types::Errno;

use crate::session::CapiSession;

impl CapiSession {
    /// `flock`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn lock_whole(&self, file: i32, operation: i32) -> Outcome<()> {
        let mode = match operation & !libc::LOCK_NB {
            libc::LOCK_SH => LockMode::Read,
            libc::LOCK_EX => LockMode::Write,
            libc::LOCK_UN => LockMode::Unlock,
            _ => return Err(Errno::EINVAL),
        };
        self.lock(file, LockKind::Flock, (0, u64::MAX), mode, operation & libc::LOCK_NB == 0)
    }

    /// Sets or removes a lock of a range of bytes.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn lock_bytes(&self, file: i32, kind: i32, start: i64, bytes: i64, waits: bool) -> Outcome<()> {
        let open = self.file(file)?;
        let (mode, is_allowed) = match kind {
            libc::F_RDLCK => (LockMode::Read, open.may_read()),
            libc::F_WRLCK => (LockMode::Write, open.may_write()),
            libc::F_UNLCK => (LockMode::Unlock, true),
            _ => return Err(Errno::EINVAL),
        };
        let range = range(start, bytes)?;
        if !is_allowed {
            return Err(Errno::EBADF);
        }
        self.lock(file, LockKind::Record, range, mode, waits)
    }

    fn lock(&self, file: i32, kind: LockKind, range: (u64, u64), mode: LockMode, waits: bool) -> Outcome<()> {
        let file = self.file(file)?;
        let wait = (waits && mode != LockMode::Unlock).then(|| self.new_ticket());
        // Recorded first: a lock that is granted late is then removed with the file.
        file.has_locks.store(true, Ordering::Relaxed);
        self.fs.lock(file.inode, kind, file.lock_owner, std::process::id(), range, mode, wait)
    }
}

/// Returns the first and the last byte of a range.
fn range(start: i64, bytes: i64) -> Outcome<(u64, u64)> {
    let first = u64::try_from(start).map_err(|_| Errno::EINVAL)?;
    match u64::try_from(bytes).map_err(|_| Errno::EINVAL)? {
        0 => Ok((first, i64::MAX as u64)),
        bytes => Ok((first, (first + bytes - 1).min(i64::MAX as u64))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_fcntl() {
        assert_eq!(range(5, 10), Ok((5, 14)));
        assert_eq!(range(5, 0), Ok((5, i64::MAX as u64)));
        assert_eq!(range(i64::MAX, i64::MAX), Ok((i64::MAX as u64, i64::MAX as u64)));
        assert_eq!(range(-1, 1), Err(Errno::EINVAL));
        assert_eq!(range(1, -1), Err(Errno::EINVAL));
    }
}
