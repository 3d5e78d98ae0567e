//! The helper's process: it runs each errand in a thread.

use std::os::unix::net::UnixStream;

use ashlar_wire::Connection;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::errand::Errand;
use crate::{close, notify, open};

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
            Errand::Open { inode, flags, entry, devices } => {
                open::begin_open((inode, flags, entry), devices, first, descriptors);
            }
            Errand::Close => close::begin_close(first),
            Errand::Notify => notify::begin_notify(first, descriptors),
        }
    }
}

/// Raises the limit of open descriptors to its maximum. A session takes five descriptors, and each connection two. An
/// errand takes four while it lasts, and there may be as many errands as SharedFS has connections.
pub fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // If this fails, fewer can be open at once.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
