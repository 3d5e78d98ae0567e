//! The socket at which a node answers: any process may connect, and some commands are for its administrators.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::net::sockopt::socket_peercred;

use crate::Listener;

/// Any process may connect. Its user and groups decide what it may do.
const SOCKET_MODE: u32 = 0o666;

/// Listens at a path, for processes of all users.
///
/// # Errors
/// Those of the socket.
pub fn listen_to_all(path: &Path) -> io::Result<Listener> {
    let listener = Listener::bind(path)?;
    // The socket's own file is opened to all, and none that a link in its place leads to.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    std::fs::set_permissions(itself, std::fs::Permissions::from_mode(SOCKET_MODE))?;
    Ok(listener)
}

/// Returns whether the peer's process is of root, or of the user that runs this one.
///
/// # Errors
/// The system's.
pub fn is_administrator(socket: impl AsFd) -> io::Result<bool> {
    let peer = socket_peercred(socket)?;
    Ok(peer.uid.is_root() || peer.uid == rustix::process::geteuid())
}
