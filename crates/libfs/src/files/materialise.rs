//! Real kernel descriptors for files that LibFS serves.

use std::os::fd::{BorrowedFd, OwnedFd};

use ashlar_types::{Errno, InodeId};
use ashlar_wire::{Reply, Request, WireError};

use crate::LibFs;
use crate::api::Outcome;

/// How often SharedFS or its helper may die while it opens a file.
const TRIES: u32 = 16;

impl LibFs {
    /// Returns a kernel descriptor for an inode: a new open file description on a mount.
    ///
    /// `directory` is on that mount. `flags` are those of open(2): an access mode, and flags that neither create nor
    /// truncate. The descriptor is closed on exec. Changes through it and through LibFS show in both; its offset and
    /// locks are its own.
    ///
    /// The caller has the inode open meanwhile, so that an inode without a name lives on.
    ///
    /// # Errors
    /// - `EINVAL`: `directory` is no directory on a mount of this arena, or was opened with `O_PATH`; other flags; an
    ///   inode that is neither a regular file nor a directory.
    /// - `ESTALE`: the inode is gone.
    /// - `EACCES`, and `EPERM` for `O_NOATIME`: this process's user lacks the right, unless the process had the inode
    ///   open when the right changed.
    /// - `EMFILE`; those of open(2).
    pub fn materialise(&self, directory: BorrowedFd<'_>, id: InodeId, flags: u32) -> Outcome<OwnedFd> {
        for _ in 0..TRIES {
            let (Reply::OpenThere, sockets) = self.call_with(&Request::Materialise { inode: id, flags })? else {
                return Err(Errno::EIO);
            };
            // If this process has no free descriptor number, the kernel leaves the descriptor out.
            let socket = sockets.into_iter().next().ok_or(Errno::EMFILE)?;
            return match self.client.call_helper(socket, directory) {
                Ok((Reply::Done, descriptors)) => descriptors.into_iter().next().ok_or(Errno::EMFILE),
                Ok((Reply::Error(errno), _)) => Err(errno),
                Err(WireError::Closed) => continue,
                _ => Err(Errno::EIO),
            };
        }
        Err(Errno::EIO)
    }
}
