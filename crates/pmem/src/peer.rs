//! Options of unix sockets that name the process at the other end. They have nothing to do with memory. No crate wraps
//! them safely, their callers forbid unsafe code, and this is the lowest crate that may hold some.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Answers with a descriptor of the process that connected; Linux 6.5 and later.
const SO_PEERPIDFD: c_int = 77;
/// Says whether others may send descriptors to the socket; Linux 6.16 and later.
const SO_PASSRIGHTS: c_int = 83;
/// Room for the groups of most processes, in the first question.
const GROUPS_FIRST: usize = 64;

/// Returns a descriptor of the process that connected a socket.
///
/// It stands for that very process, also after its number has passed to another one.
///
/// # Errors
/// The system's: `ENOPROTOOPT` before Linux 6.5; `ESRCH` or `EINVAL` if the process is gone.
pub fn peer_process(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let (mut pidfd, mut bytes): (c_int, _) = (-1, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: both places live through the call, and the length is that of the first.
    let result = unsafe {
        let value = (&raw mut pidfd).cast::<c_void>();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, value, &raw mut bytes)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor, and no other code knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Returns the supplementary groups that a socket's peer had when it connected.
///
/// # Errors
/// The system's: `ENODATA` if the socket has no peer.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0u32; GROUPS_FIRST];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        // SAFETY: the groups live through the call, and the length is theirs; any bytes make numbers.
        let result = unsafe {
            let value = groups.as_mut_ptr().cast::<c_void>();
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, value, &raw mut bytes)
        };
        let needed = bytes as usize / size_of::<u32>();
        if result == 0 {
            groups.truncate(needed);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // The kernel then says how much room they take.
        if error.raw_os_error() != Some(libc::ERANGE) || needed <= groups.len() {
            return Err(error);
        }
        groups.resize(needed, 0);
    }
}

/// Makes the kernel refuse descriptors that others send to a socket, or let them pass again.
///
/// A sender gets `EPERM`. A socket that listens hands the choice on to its connections.
///
/// # Errors
/// The system's: `ENOPROTOOPT` before Linux 6.16.
pub fn set_descriptors_pass(socket: BorrowedFd<'_>, pass: bool) -> io::Result<()> {
    let value = c_int::from(pass);
    // SAFETY: the value lives through the call, and the length is its own.
    let result = unsafe {
        let (value, bytes) = ((&raw const value).cast::<c_void>(), size_of::<c_int>() as libc::socklen_t);
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, value, bytes)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    #[test]
    fn peer_process_is_this_one_and_lives() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        match peer_process(one.as_fd()) {
            Ok(pidfd) => {
                let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
                assert_eq!(poll(&mut fds, Some(&Timespec::default())), Ok(0), "it has not ended");
            }
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOPROTOOPT), "a kernel before 6.5"),
        }
    }

    #[test]
    fn peer_groups_are_those_of_this_process() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        let mut expected: Vec<u32> =
            rustix::process::getgroups().expect("groups").into_iter().map(|group| group.as_raw()).collect();
        let mut found = peer_groups(one.as_fd()).expect("groups");
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
    }
}
