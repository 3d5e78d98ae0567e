//! Errands: what a helper is asked to do, and the threads that do it.

use std::os::fd::OwnedFd;

use ashlar_types::InodeId;
use serde::{Deserialize, Serialize};

/// Stack of a thread that runs one errand.
const STACK_BYTES: usize = 128 << 10;

/// An errand of the helper.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Errand {
    /// Open an inode with flags of open(2), under this name in this directory if that leads to it.
    ///
    /// Two descriptors are sent with it: a socket for the report, and one on which a session sends a directory of a
    /// mount whose files show one of these device numbers. The session gets the answer there.
    Open { inode: InodeId, flags: u32, entry: Option<(InodeId, Vec<u8>)>, devices: Vec<u64> },
    /// Close the descriptors in the queue of a socket, which is sent with it.
    Close,
    /// Write messages from a socket to a mount's device until the socket is closed. Both descriptors are sent with it.
    Notify,
}

/// Starts the thread of an errand. Returns whether it could.
pub(crate) fn start_errand(name: &str, errand: impl FnOnce() + Send + 'static) -> bool {
    std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES).spawn(errand).is_ok()
}

/// The descriptors of an errand, after the first.
pub(crate) type Descriptors = std::vec::IntoIter<OwnedFd>;
