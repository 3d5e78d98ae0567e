//! The helper's process: it runs each errand in a thread.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use ashlar_types::InodeId;
use ashlar_wire::Connection;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::{notify, open};

/// Stack of a thread that runs one errand.
const STACK_BYTES: usize = 128 << 10;

/// An errand of the helper.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Errand {
    /// Open an inode with flags of open(2), under this name in this directory if that leads to it.
    ///
    /// Three descriptors are sent with it: a socket for the report, a directory on the mount, and the socket of the
    /// session that gets the answer.
    Open { inode: InodeId, flags: u32, entry: Option<(InodeId, Vec<u8>)> },
    /// Write messages from a socket to a mount's device until the socket is closed. Both descriptors are sent with it.
    Notify,
}

/// Runs the errands that arrive over `line`, each in a thread of its own, as long as their sender exists.
///
/// SharedFS's connections limit the threads: each asks for one file at a time. Beside these there is one for each
/// mount.
pub fn run(line: UnixStream) {
    raise_descriptor_limit();
    let mut line = Connection::from_socket(line);
    while let Ok((errand, descriptors)) = line.receive::<Errand>() {
        let mut descriptors = descriptors.into_iter();
        let Some(first) = descriptors.next().map(UnixStream::from) else { continue };
        match errand {
            Errand::Open { inode, flags, entry } => open::begin_open((inode, flags, entry), first, descriptors),
            Errand::Notify => notify::begin_notify(first, descriptors),
        }
    }
}

/// Starts the thread of an errand. Returns whether it could.
pub(crate) fn start_errand(name: &str, errand: impl FnOnce() + Send + 'static) -> bool {
    std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES).spawn(errand).is_ok()
}

/// The descriptors of an errand, after the first.
pub(crate) type Descriptors = std::vec::IntoIter<OwnedFd>;

/// Raises the limit of open descriptors to its maximum. A session takes five descriptors, and each connection two. An
/// errand takes five while it lasts, and there may be as many errands as SharedFS has connections.
pub fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // If this fails, fewer can be open at once.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
