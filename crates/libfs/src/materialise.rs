//! Descriptors of the kernel's for files that LibFS serves.

use std::os::fd::{BorrowedFd, OwnedFd};

use ashlar_types::{Errno, InodeId};
use ashlar_wire::{Reply, Request};

use crate::LibFs;
use crate::api::Outcome;

impl LibFs {
    /// A descriptor of the kernel's on an inode: a new open file description on the mount on which the directory `directory` stands,
    /// opened with `flags` (of open(2): an access mode, and flags that neither make nor cut anything), closed on exec. What was done
    /// through LibFS shows through it and the other way round; offset and locks are its own.
    ///
    /// The caller has the inode open meanwhile, so that it stays where it has no name.
    ///
    /// # Errors
    /// `EINVAL` where `directory` is no directory on a mount of this arena, or was opened with `O_PATH`; for other flags; and for what
    /// is neither a regular file nor a directory. `ESTALE` where the inode is gone; `EACCES`, and `EPERM` for `O_NOATIME`, where this
    /// process's user may not, unless it had the inode open when that changed; `EMFILE`; those of open(2).
    pub fn materialise(&self, directory: BorrowedFd<'_>, id: InodeId, flags: u32) -> Outcome<OwnedFd> {
        match self.call_with(&Request::Materialise { inode: id, flags }, &[directory])? {
            // Without room for it in this process, the kernel leaves the descriptor out.
            (Reply::Done, descriptors) => descriptors.into_iter().next().ok_or(Errno::EMFILE),
            _ => Err(Errno::EIO),
        }
    }
}
