//! Makes the placeholder that stands in the kernel for an open file.
//!
//! LibFS has the file open. Code that calls the kernel without LibFS must fail on it in every call. It is the root of a
//! FUSE mount that stands in no tree and that no process answers for. As an `O_PATH` descriptor it reads and writes
//! nothing, and a call for attributes gets `ENOTCONN`.

use std::fs::File;
use std::os::fd::AsRawFd;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Result;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};

/// Makes the descriptor.
///
/// # Errors
/// The system's: it takes the right to mount, and Linux 5.2.
pub fn make_placeholder() -> Result<File> {
    let device = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let number = device.as_raw_fd().to_string();
    let root = [("source", "ashlar"), ("fd", &number), ("rootmode", "100000"), ("user_id", "0"), ("group_id", "0")];
    root.into_iter().try_for_each(|(key, value)| fsconfig_set_string(&context, key, value))?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_RDONLY;
    let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    // The connection ends with the device: from here on each request fails at once.
    Ok(File::from(mount))
}

#[cfg(test)]
mod tests {
    use rustix::fs::fstat;
    use rustix::io::{Errno, read};

    use super::*;

    #[test]
    fn placeholder_fails_in_every_call() {
        match make_placeholder() {
            Ok(file) => {
                assert_eq!(fstat(&file).map(|_| ()), Err(Errno::NOTCONN));
                assert_eq!(read(&file, &mut [0; 1]), Err(Errno::BADF));
                let again = open(format!("/proc/self/fd/{}", file.as_raw_fd()), OFlags::RDONLY, Mode::empty());
                assert_eq!(again.map(|_| ()), Err(Errno::NOTCONN));
            }
            // The user of the tests may not mount.
            Err(error) => assert!(matches!(error, Errno::PERM | Errno::ACCESS | Errno::NOENT), "{error}"),
        }
    }
}
