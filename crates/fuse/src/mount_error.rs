//! Errors of mounting and unmounting, and what a person can do about each.

use std::path::PathBuf;

use rustix::io::Errno;
use thiserror::Error;

/// Why mounting or unmounting failed.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum MountError {
    /// `/dev/fuse` is missing.
    #[error(
        "/dev/fuse cannot be opened ({0}); load the kernel's FUSE module with 'modprobe fuse', or pass the device into the container"
    )]
    NoDevice(Errno),
    /// The caller may not mount.
    #[error("{path} cannot be mounted or unmounted: only root may do that; run the command with sudo")]
    NotRoot { path: PathBuf },
    /// The mount point is missing.
    #[error("{path} does not exist; make it with 'mkdir -p {path}'")]
    NotFound { path: PathBuf },
    /// The mount point is no directory.
    #[error("{path} is not a directory; name a directory to mount on")]
    NotADirectory { path: PathBuf },
    /// The directory is a mount of Ashlar already.
    #[error("{path} is mounted already; see it with 'ashlar status', or unmount it with 'ashlar unmount {path}'")]
    AlreadyMounted { path: PathBuf },
    /// The mount is in use.
    #[error(
        "{path} is in use; see which processes use it with 'fuser -vm {path}', or detach it with 'ashlar unmount --lazy {path}'"
    )]
    Busy { path: PathBuf },
    /// The path is not a mount of Ashlar.
    #[error("{path} is not a mount of Ashlar; see what is mounted with 'findmnt -t fuse.ashlar'")]
    NotMounted { path: PathBuf },
    /// The kernel's protocol is too old.
    #[error("this kernel speaks FUSE {major}.{minor}, and 7.31 is needed: Linux 5.4 or later")]
    OldKernel { major: u32, minor: u32 },
    /// The kernel did not behave as the protocol says.
    #[error("the kernel and this program did not understand each other: {reason}")]
    Protocol { reason: String },
    /// SharedFS did not take the mount.
    #[error("the daemon could not take charge of the mount ({0}); look at the daemon's log, and mount again")]
    NotRegistered(ashlar_types::Errno),
    /// Another system call failed.
    #[error("{path}: {reason}")]
    Failed { path: PathBuf, reason: Errno },
    /// No thread could be started.
    #[error("no thread could be started to serve the mount: {0}")]
    NoThread(std::io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do_next() {
        let error = MountError::Busy { path: "/mnt".into() };
        assert!(error.to_string().contains("ashlar unmount --lazy /mnt"), "{error}");
    }
}
