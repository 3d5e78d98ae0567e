//! Inodes that a mount has reserved for its kernel.

use ashlar_types::InodeId;
use ashlar_wire::{Request, ReserveReason};

use crate::LibFs;
use crate::api::Outcome;

impl LibFs {
    /// Reserves an inode for the kernel (a mount's session): when this returns, no session but mounts' holds a lease
    /// that covers it, and their calls fail with [`Errno::RESERVED`], so that the kernel serves them. It holds until
    /// [`Self::free_reserved`], also where SharedFS is started anew.
    ///
    /// [`Errno::RESERVED`]: ashlar_types::Errno::RESERVED
    ///
    /// # Errors
    /// `EPERM` where the session is no mount's; `ESTALE` where the inode is gone; `ENFILE` where too many are reserved;
    /// `EIO`.
    pub fn reserve(&self, inode: InodeId, reason: ReserveReason) -> Outcome<()> {
        // Noted first: a SharedFS that is started anew meanwhile gets it in any case.
        self.reserved.lock().insert((inode, reason));
        let reserved = self.call(&Request::Reserve { inode, reason });
        if reserved.is_err() {
            self.reserved.lock().remove(&(inode, reason));
        }
        reserved.map(drop)
    }

    /// Ends what [`Self::reserve`] began. Where SharedFS does not answer, it knows of no reservation when it is back.
    pub fn free_reserved(&self, inode: InodeId, reason: ReserveReason) {
        if self.reserved.lock().remove(&(inode, reason)) {
            let _ = self.call(&Request::Free { inode, reason });
        }
    }

    /// The requests that tell SharedFS of all of them again.
    pub(crate) fn reservations(&self) -> Vec<Request> {
        let reserved = self.reserved.lock();
        reserved.iter().map(|&(inode, reason)| Request::Reserve { inode, reason }).collect()
    }
}
