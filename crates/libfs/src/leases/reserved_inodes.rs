//! Inodes that a mount has reserved for its kernel.

use ashlar_types::InodeId;
use ashlar_wire::{Request, ReserveReason};

use crate::LibFs;
use crate::api::Outcome;

impl LibFs {
    /// Reserves an inode for the kernel, in a mount's session.
    ///
    /// When this returns, only mounts' sessions hold a lease that covers the inode. Other sessions' calls fail with
    /// [`Errno::RESERVED`], so that the kernel serves them. The reservation lasts until [`Self::free_reserved`], also
    /// across a restart of SharedFS.
    ///
    /// [`Errno::RESERVED`]: ashlar_types::Errno::RESERVED
    ///
    /// # Errors
    /// `EPERM` if the session is no mount's; `ESTALE` if the inode is gone; `ENFILE` if too many are reserved; `EIO`.
    pub fn reserve(&self, inode: InodeId, reason: ReserveReason) -> Outcome<()> {
        // Recorded first: a SharedFS that restarts meanwhile gets it in any case.
        self.reserved.lock().insert((inode, reason));
        let reserved = self.call(&Request::Reserve { inode, reason });
        if reserved.is_err() {
            self.reserved.lock().remove(&(inode, reason));
        }
        reserved.map(drop)
    }

    /// Ends a reservation of [`Self::reserve`].
    ///
    /// If SharedFS does not answer, it knows of no reservation when it is back.
    pub fn free_reserved(&self, inode: InodeId, reason: ReserveReason) {
        if self.reserved.lock().remove(&(inode, reason)) {
            let _ = self.call(&Request::Free { inode, reason });
        }
    }

    /// Returns the requests that send all reservations to SharedFS again.
    pub(crate) fn reservations(&self) -> Vec<Request> {
        let reserved = self.reserved.lock();
        reserved.iter().map(|&(inode, reason)| Request::Reserve { inode, reason }).collect()
    }
}
