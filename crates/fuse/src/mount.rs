//! Mounting and unmounting.

use std::ffi::{CString, OsString};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ashlar_helper::Helper;
use ashlar_libfs::LibFs;
use ashlar_wire::{Admission, MountTerms};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::connection::device::{FuseDevice, TRANSFER_BYTES};
use crate::connection::negotiate::negotiate;
use crate::file_system::FileSystem;
use crate::mount_error::MountError;
use crate::mountinfo;
use crate::serving::ring_workers::RingWorkers;
use crate::serving::server::Server;

/// How far the kernel reads ahead in a file that is read in order, in KiB: one request of the largest size.
const READ_AHEAD_KIB: usize = TRANSFER_BYTES / 1024;

/// Whether the kernel hands requests over by rings (FUSE over io_uring); `None` if it can't.
#[must_use]
pub fn rings_are_on() -> Option<bool> {
    std::fs::read(ashlar_types::RING_SWITCH).ok().map(|switch| switch.starts_with(b"Y"))
}

/// How to mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountOptions {
    /// The source that `df` and `mount` show, such as `ashlar@/var/lib/ashlar/default`. Empty for just `ashlar`.
    pub source: String,
    /// Nothing can be changed through the mount.
    pub read_only: bool,
    /// The users whose programs may have sessions by the mount.
    pub sessions: Admission,
    /// Threads that read requests from the device. 0 for as many as fit the machine: one more than it has cores, three
    /// to five.
    pub threads: usize,
    /// Requests are read from the device even if the kernel offers them over io_uring.
    pub without_rings: bool,
    /// The command of a process that sends the kernel notifications that may wait there: it runs [`ashlar_helper::run`]
    /// on its standard input. Without one, this process can't be killed while such a notification waits.
    pub helper: Vec<OsString>,
}

/// A file system mounted on a directory. Dropping it unmounts it, lazily.
#[derive(Debug)]
pub struct FuseMount<F: FileSystem = LibFs> {
    server: Server<F>,
    mount_point: PathBuf,
    device_number: u64,
}

impl<F: FileSystem> FuseMount<F> {
    /// Mounts `file_system` on `mount_point`. No process can use the mount until [`FuseMount::run`] serves it.
    ///
    /// If the directory is a mount whose process is dead, that mount is removed first: no process can use it any more.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn new(file_system: Arc<F>, mount_point: &Path, options: MountOptions) -> Result<Self, MountError> {
        let mount_point = check_mount_point(mount_point)?;
        let device = FuseDevice::open().map_err(|errno| match errno {
            Errno::PERM | Errno::ACCESS => MountError::NotRoot { path: mount_point.clone() },
            errno => MountError::NoDevice(errno),
        })?;
        mount_device(&device, &mount_point, &options)?;
        let guard = UnmountGuard(Some(&mount_point));
        let make_rings = || if options.without_rings { None } else { RingWorkers::new(&device) };
        let (agreement, ring_workers) = negotiate(&device, make_rings)?;
        let duplicate =
            device.duplicate().map_err(|reason| MountError::Failed { path: mount_point.clone(), reason })?;
        // The device number comes from the kernel's table, since the mount itself answers nothing yet.
        let entry = mountinfo::find_mount(&mount_point);
        let number = entry.as_ref().and_then(mountinfo::MountEntry::device_number);
        let number = number.ok_or_else(|| MountError::NotMounted { path: mount_point.clone() })?;
        let terms = MountTerms { read_only: options.read_only, sessions: options.sessions };
        file_system.register_mount(duplicate, number, terms).map_err(MountError::NotRegistered)?;
        entry.iter().for_each(set_read_ahead);
        guard.keep_mount();
        let threads = if options.threads == 0 { default_threads() } else { options.threads };
        let ring_workers = ring_workers.unwrap_or_default();
        let server = Server::new(file_system, device, threads, (agreement, ring_workers), Helper::new(options.helper));
        Ok(Self { server, mount_point, device_number: number })
    }

    /// Returns the mount point, without symbolic links.
    #[must_use]
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Returns the device number that its files show.
    #[must_use]
    pub const fn device_number(&self) -> u64 {
        self.device_number
    }

    /// Whether requests come by rings (FUSE over io_uring).
    #[must_use]
    pub fn has_rings(&self) -> bool {
        self.server.has_rings()
    }

    /// Serves the mount until it is unmounted. This does not end the session: its owner does that.
    ///
    /// # Errors
    /// [`MountError::NoThread`].
    pub fn run(&self) -> Result<(), MountError> {
        self.server.run(self.device_number).map_err(MountError::NoThread)
    }
}

impl<F: FileSystem> Drop for FuseMount<F> {
    fn drop(&mut self) {
        // This unmounts only this mount, and not one that another process has made here since.
        if self.is_connected() {
            let _ = unmount(&self.mount_point, true);
        }
    }
}

impl<F: FileSystem> FuseMount<F> {
    /// Whether the device still has its mount: without one it polls as broken.
    fn is_connected(&self) -> bool {
        let mut polled = [PollFd::from_borrowed_fd(self.server.device(), PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let answered = rustix::event::poll(&mut polled, Some(&now));
        answered.is_ok() && polled.iter().all(|fd| !fd.revents().contains(PollFlags::ERR))
    }
}

/// Unmounts a mount that was not finished.
struct UnmountGuard<'a>(Option<&'a Path>);

impl UnmountGuard<'_> {
    fn keep_mount(mut self) {
        self.0 = None;
    }
}

impl Drop for UnmountGuard<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            let _ = unmount(path, true);
        }
    }
}

/// Returns how many threads serve by default: while one copies, another can take the next request.
fn default_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    cores.clamp(2, 4) + 1
}

/// Checks that a mount can be made at `path`, and returns the path as the kernel will know it.
fn check_mount_point(path: &Path) -> Result<PathBuf, MountError> {
    if !rustix::process::geteuid().is_root() {
        return Err(MountError::NotRoot { path: path.to_owned() });
    }
    let resolved =
        mountinfo::resolve_mount_point(path).ok_or_else(|| MountError::NotFound { path: path.to_owned() })?;
    if mountinfo::is_ashlar_mount(&resolved) {
        match rustix::fs::stat(&resolved) {
            Err(errno) if ashlar_types::Errno(errno.raw_os_error()).is_of_dead_mount() => unmount(&resolved, true)?,
            _ => return Err(MountError::AlreadyMounted { path: resolved }),
        }
    }
    match rustix::fs::stat(&resolved) {
        Ok(stat) if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() => Ok(resolved),
        Ok(_) => Err(MountError::NotADirectory { path: resolved }),
        Err(Errno::NOENT) => Err(MountError::NotFound { path: resolved }),
        Err(reason) => Err(MountError::Failed { path: resolved, reason }),
    }
}

/// Connects the device with a directory.
fn mount_device(device: &FuseDevice, path: &Path, options: &MountOptions) -> Result<(), MountError> {
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read={TRANSFER_BYTES}",
        device.as_fd().as_raw_fd()
    );
    let failed = |reason| MountError::Failed { path: path.to_owned(), reason };
    let data = CString::new(data).map_err(|_| failed(Errno::INVAL))?;
    // Set-id programs and devices work as on any file system: root mounts, and the file system is the machine's own.
    let flags = if options.read_only { MountFlags::RDONLY } else { MountFlags::empty() };
    let source = if options.source.is_empty() { "ashlar" } else { &options.source };
    rustix::mount::mount(source, path, ashlar_types::MOUNT_TYPE, flags, data.as_c_str()).map_err(|errno| match errno {
        Errno::PERM => MountError::NotRoot { path: path.to_owned() },
        Errno::NODEV => MountError::NoDevice(errno),
        Errno::BUSY => MountError::AlreadyMounted { path: path.to_owned() },
        errno => failed(errno),
    })
}

/// Lets the kernel read further ahead than its default of 128 KiB. If that can't be set, the kernel only reads in
/// smaller pieces.
fn set_read_ahead(entry: &mountinfo::MountEntry) {
    let file = format!("/sys/class/bdi/{}/read_ahead_kb", entry.device);
    if let Err(error) = std::fs::write(&file, READ_AHEAD_KIB.to_string()) {
        tracing::debug!(file, %error, "readahead stays as it is");
    }
}

/// Unmounts `mount_point`. If `lazy`, the mount leaves its directory at once, and ends when its last file is closed.
///
/// # Errors
/// [`MountError`].
pub fn unmount(mount_point: &Path, lazy: bool) -> Result<(), MountError> {
    let entry =
        mountinfo::find_mount(mount_point).ok_or_else(|| MountError::NotMounted { path: mount_point.to_owned() })?;
    let path = entry.mount_point;
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(&path, flags | UnmountFlags::NOFOLLOW).map_err(|errno| match errno {
        Errno::PERM => MountError::NotRoot { path },
        Errno::BUSY => MountError::Busy { path },
        Errno::INVAL => MountError::NotMounted { path },
        reason => MountError::Failed { path, reason },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmount_without_mount_fails() {
        let directory = tempfile::tempdir().unwrap();
        let result = unmount(directory.path(), false);
        assert!(matches!(result, Err(MountError::NotMounted { .. })), "{result:?}");
        assert!(!crate::is_ashlar_mount(directory.path()));
    }

    #[test]
    fn mount_point_must_be_a_directory() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(matches!(check_mount_point(&file), Err(MountError::NotADirectory { .. })));
        assert!(matches!(check_mount_point(&directory.path().join("none")), Err(MountError::NotFound { .. })));
        assert!(check_mount_point(directory.path()).is_ok());
    }
}
