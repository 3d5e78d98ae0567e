//! A session: LibFS, and its surroundings in this process.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ashlar_libfs::{
    ConnectError, DescriptorPolicy, FoundInode, LibFs, Options, Outcome, PathCache, PathContext, PathIntent,
    ResolvedPath, Space, WalkOutcome,
};
use ashlar_types::{Credentials, Errno, InodeId};
use ashlar_wire::{PATIENCE_VARIABLE, SessionKind, patience_ms};

use crate::fork::{self, Token};
use crate::fs_protected::Guards;
use crate::mount_lookup::{NamedFileSystem, OpenRefusal};
use crate::numbered_file::{FileNumbers, NumberedFile};

/// The lowest number of the library's own descriptors.
///
/// They avoid the numbers of a program's standard input and output, even if the program has closed those.
const DESCRIPTORS_FROM: i32 = 3;
/// How often a path is followed anew after its inode was removed meanwhile.
///
/// Each failed attempt means that another process replaced the file in the microseconds between two look-ups.
const ATTEMPTS: u32 = 1000;

/// A process's session with one file system.
#[derive(Debug)]
pub(crate) struct CapiSession {
    pub(crate) fs: Arc<LibFs>,
    /// The user on whose behalf it acts.
    pub(crate) user: Credentials,
    /// The same user, for operations through an open file: the right was checked when the file was opened.
    pub(crate) admitted: Credentials,
    pub(crate) guards: Guards,
    pub(crate) files: FileNumbers,
    /// The largest size that this process may give a file.
    pub(crate) file_limit: u64,
    /// Numbers for owners of locks, and for waits.
    tickets: AtomicU64,
    file_system: NamedFileSystem,
    umask: AtomicU32,
    process: Token,
    is_over: AtomicBool,
    /// The directories with open streams, by number.
    streams: Mutex<HashMap<u64, InodeId>>,
    paths: PathCache,
}

/// Locks a mutex. A call that panicked has left its value intact.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CapiSession {
    /// Opens a session with the file system at `place`.
    ///
    /// # Errors
    /// An errno, and a sentence for people.
    pub(crate) fn open(place: &[u8]) -> Result<Self, OpenRefusal> {
        let file_system = NamedFileSystem::find(place)?;
        if !is_in_first_user_namespace() {
            return Err((
                Errno::EOPNOTSUPP,
                "this process is in a user namespace; use the files through the mount".into(),
            ));
        }
        let process =
            Token::of_process().map_err(|errno| (errno, format!("there is no memory for a session: {errno}")))?;
        let user = credentials().map_err(|errno| (errno, format!("the process's groups can't be read: {errno}")))?;
        let label = std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim_end().to_owned();
        let said = std::env::var_os(PATIENCE_VARIABLE);
        let options = Options {
            socket: file_system.socket.clone(),
            kind: SessionKind::Process,
            label,
            patience_ms: patience_ms(said.as_deref().map(OsStr::as_bytes)),
            // The program gets an errno; the library writes nothing to the program's standard error.
            notice: |_| {},
            descriptors: DescriptorPolicy {
                from: DESCRIPTORS_FROM,
                note: fork::record_descriptor,
                forget: fork::forget_descriptor,
            },
            beside: file_system.device,
            yields_to_kernel: false,
        };
        fork::watch_forks();
        let fs = LibFs::connect(&options).map_err(|error| refusal(&file_system.socket, &error))?;
        // A file of this interface has no number in the kernel.
        drop(fs.take_placeholder());
        Ok(Self {
            fs,
            admitted: Credentials { checked: true, ..user.clone() },
            user,
            guards: Guards::of_machine(),
            files: FileNumbers::default(),
            file_limit: rustix::process::getrlimit(rustix::process::Resource::Fsize).current.unwrap_or(u64::MAX),
            tickets: AtomicU64::new(1),
            file_system,
            umask: AtomicU32::new(umask_of_process()),
            process,
            is_over: AtomicBool::new(false),
            streams: Mutex::default(),
            paths: PathCache::default(),
        })
    }

    /// Fails with `EBADF` after the session has ended, or in a process that did not open it.
    pub(crate) fn check_alive(&self) -> Outcome<()> {
        if self.process.is_here() && !self.is_over.load(Ordering::Relaxed) { Ok(()) } else { Err(Errno::EBADF) }
    }

    /// Ends the session. In a child of its process, nothing is left to end.
    pub(crate) fn close_session(self: Arc<Self>) {
        if !self.process.is_here() {
            // The session's memory is not there, and other memory may be in its place. Threads of the parent may hold
            // locks of the session.
            std::mem::forget(self);
            return;
        }
        self.is_over.store(true, Ordering::Relaxed);
        self.files.close_all();
        locked(&self.streams).drain().for_each(|(_, directory)| self.fs.close(directory));
        self.fs.leave_session();
    }

    /// Whether the caller is the process that opened the session.
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process.is_here()
    }

    /// Sets the file creation mask; returns the one before.
    pub(crate) fn set_umask(&self, mask: u32) -> u32 {
        self.umask.swap(mask & 0o777, Ordering::Relaxed)
    }

    /// Returns the file creation mask.
    pub(crate) fn umask(&self) -> u32 {
        self.umask.load(Ordering::Relaxed)
    }

    /// Whether a change of content clears set-id bits: for all users but the super-user.
    pub(crate) fn clears_set_id(&self) -> bool {
        self.user.uid != 0
    }

    /// Returns a number that the session has not used yet.
    pub(crate) fn new_ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Records a directory with an open stream, and returns the stream's number.
    pub(crate) fn record_stream(&self, directory: InodeId) -> u64 {
        let number = self.new_ticket();
        locked(&self.streams).insert(number, directory);
        number
    }

    /// Closes a stream's directory, unless the session's end has done so.
    pub(crate) fn close_stream(&self, number: u64) {
        if let Some(directory) = locked(&self.streams).remove(&number) {
            self.fs.close(directory);
        }
    }

    /// Returns an open file.
    pub(crate) fn file(&self, number: i32) -> Outcome<Arc<NumberedFile>> {
        self.files.get(number)
    }

    /// Follows a path from the root, and passes the result to `act`.
    ///
    /// If the inode was removed in between, it starts again.
    ///
    /// # Errors
    /// Those of paths; those of `act`.
    pub(crate) fn act_at<R>(
        &self,
        path: &[u8],
        aim: impl Into<PathIntent>,
        mut act: impl FnMut(&ResolvedPath) -> Outcome<R>,
    ) -> Outcome<R> {
        let aim = aim.into();
        retry_stale(|| act(&self.walk(path, aim)?))
    }

    /// Acts on the inode at a path like [`Self::act_at`], if it exists.
    ///
    /// # Errors
    /// `ENOENT`, and as [`Self::act_at`].
    pub(crate) fn act_on<R>(
        &self,
        path: &[u8],
        aim: impl Into<PathIntent>,
        mut act: impl FnMut(&FoundInode) -> Outcome<R>,
    ) -> Outcome<R> {
        self.act_at(path, aim, |place| act(place.found.as_ref().ok_or(Errno::ENOENT)?))
    }

    /// Follows a path from the root.
    ///
    /// # Errors
    /// Those of paths.
    pub(crate) fn walk(&self, path: &[u8], aim: impl Into<PathIntent>) -> Outcome<ResolvedPath> {
        match self.fs.walk(self, InodeId::ROOT, path, aim)? {
            WalkOutcome::Inside(place) => Ok(place),
            WalkOutcome::Outside => Err(Errno::EXDEV),
        }
    }

    /// Converts attributes to the form of `stat`.
    pub(crate) fn stat(&self, found: &FoundInode) -> libc::stat {
        found.stat(self.file_system.device)
    }

    /// Returns the space in the form of `statvfs`.
    ///
    /// # Errors
    /// `EIO`.
    pub(crate) fn space(&self, id: InodeId) -> Outcome<libc::statvfs> {
        let Space { blocks_total, blocks_free, inodes_total, inodes_free } = self.fs.space(id)?;
        // SAFETY: zeros are a valid `statvfs`.
        let mut space: libc::statvfs = unsafe { std::mem::zeroed() };
        space.f_bsize = ashlar_types::BLOCK_BYTES as _;
        space.f_frsize = ashlar_types::BLOCK_BYTES as _;
        space.f_blocks = blocks_total;
        (space.f_bfree, space.f_bavail) = (blocks_free, blocks_free);
        space.f_files = inodes_total;
        (space.f_ffree, space.f_favail) = (inodes_free, inodes_free);
        space.f_namemax = ashlar_types::NAME_MAX as _;
        Ok(space)
    }
}

impl PathContext for CapiSession {
    fn user(&self) -> &Credentials {
        &self.user
    }

    fn inside<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        let rest = path.strip_prefix(&self.file_system.point.as_ref()?[..])?;
        (rest.is_empty() || rest[0] == b'/').then_some(rest)
    }

    fn is_covered(&self, _: InodeId) -> bool {
        false
    }

    fn submount_version(&self) -> u64 {
        0
    }

    fn paths(&self) -> &PathCache {
        &self.paths
    }

    fn may_follow(&self, directory: InodeId, link: &FoundInode) -> Outcome<bool> {
        let directory = self.fs.attributes(directory)?.inode;
        if self.guards.allow_following(self.user.uid, &directory, &link.inode) { Ok(true) } else { Err(Errno::EACCES) }
    }
}

/// Repeats an action as long as an inode is gone to which a name has just led.
///
/// # Errors
/// Those of `act`.
pub(crate) fn retry_stale<R>(mut act: impl FnMut() -> Outcome<R>) -> Outcome<R> {
    for _ in 0..ATTEMPTS {
        match act() {
            Err(Errno::ESTALE) => {}
            done => return done,
        }
    }
    Err(Errno::ENOENT)
}

fn refusal(socket: &Path, error: &ConnectError) -> OpenRefusal {
    let errno = match error {
        ConnectError::NoDaemon { .. } => match rustix::fs::access(socket, rustix::fs::Access::WRITE_OK) {
            Err(rustix::io::Errno::ACCESS) => {
                let name = socket.as_os_str().as_bytes().escape_ascii();
                let sentence = format!(
                    "this user may not reach the daemon's socket {name}; root can open the socket's directory to this user"
                );
                return (Errno::EACCES, sentence);
            }
            _ => Errno::ENOTCONN,
        },
        ConnectError::Refused(_) => Errno(libc::ECONNREFUSED),
        ConnectError::NotAdmitted => Errno::EACCES,
        ConnectError::ReadOnly => Errno::EROFS,
        ConnectError::Memory(_) => Errno::ENOMEM,
    };
    (errno, error.to_string())
}

fn credentials() -> Outcome<Credentials> {
    let groups = rustix::process::getgroups().map_err(|error| Errno(error.raw_os_error()))?;
    Ok(Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: groups.into_iter().map(rustix::process::Gid::as_raw).collect(),
        checked: false,
    })
}

/// Whether the process's user numbers mean the same users as in SharedFS.
///
/// In another user namespace they differ, and SharedFS would take the session's records for forged.
fn is_in_first_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map");
    map.is_ok_and(|map| map.split_ascii_whitespace().eq(["0", "0", "4294967295"]))
}

/// Returns the process's own mask, read without setting it: other threads may be creating files.
fn umask_of_process() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    mask.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()).unwrap_or(0o022)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_umask_is_read_without_setting_it() {
        let mask = umask_of_process();
        // SAFETY: it takes a number, and the test restores at once the mask that it has set.
        let real = unsafe { libc::umask(mask) };
        assert_eq!(mask, real);
    }

    #[test]
    fn inode_replaced_repeatedly_gives_a_known_error() {
        let mut attempts = 0;
        let found = retry_stale(|| {
            attempts += 1;
            if attempts < 5 { Err(Errno::ESTALE) } else { Ok(attempts) }
        });
        assert_eq!(found, Ok(5));
        assert_eq!(retry_stale(|| Err::<(), _>(Errno::ESTALE)), Err(Errno::ENOENT));
        assert_eq!(retry_stale(|| Err::<(), _>(Errno::EACCES)), Err(Errno::EACCES));
    }
}
