//! `open_by_handle_at(2)`. It has nothing to do with memory. No crate wraps it safely, its callers forbid unsafe code,
//! and this is the lowest crate that may hold some.

use std::ffi::{c_int, c_uint};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// The longest handle that the kernel takes (`MAX_HANDLE_SZ`), in bytes.
const HANDLE_BYTES_MAX: usize = 128;

/// `struct file_handle`, with room behind it.
#[repr(C)]
struct FileHandle {
    bytes: c_uint,
    kind: c_int,
    content: [u8; HANDLE_BYTES_MAX],
}

/// Opens the file that a handle of `kind` names, as open(2) would with `flags`.
///
/// `mount` is any descriptor of the handle's mount. The new descriptor is closed on exec.
///
/// # Errors
/// The system's: `ESTALE` if the file does not exist, `EPERM` without `CAP_DAC_READ_SEARCH`; `EINVAL` for a handle that
/// is too long.
pub fn open_by_handle(mount: BorrowedFd<'_>, kind: i32, content: &[u8], flags: i32) -> io::Result<OwnedFd> {
    let mut handle = FileHandle { bytes: content.len() as c_uint, kind, content: [0; HANDLE_BYTES_MAX] };
    let too_long = || io::Error::from_raw_os_error(libc::EINVAL);
    handle.content.get_mut(..content.len()).ok_or_else(too_long)?.copy_from_slice(content);
    let flags = flags | libc::O_CLOEXEC;
    // SAFETY: the handle begins as `struct file_handle` does and lives through the call; the kernel reads only as many
    // bytes behind its head as it says, which were just found to fit.
    let opened = unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut handle).cast(), flags) };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor, and no other code knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn invalid_handle_opens_nothing() {
        let directory = std::fs::File::open("/").expect("open");
        let errno = |content: &[u8]| {
            let opened = open_by_handle(directory.as_fd(), 0x81, content, libc::O_RDONLY);
            opened.expect_err("no handle").raw_os_error()
        };
        assert_eq!(errno(&[0; HANDLE_BYTES_MAX + 1]), Some(libc::EINVAL));
        // The system's error differs with its file systems, and with the caller's rights.
        assert!(errno(&[0; 12]).is_some());
    }
}
