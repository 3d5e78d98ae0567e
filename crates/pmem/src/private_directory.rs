//! Directories that no other user can change, and the files in them.
//!
//! SharedFS makes, truncates and removes files by name, mostly as root. A user that can change a directory on the way
//! chooses what these names mean. So an arena is used only if each directory on its path is safe: it is owned by root
//! or by the user of this process, and no other user may write to it. A directory with the sticky bit may be written by
//! all, as `/tmp` is: what root or the user owns in it stays. Symbolic links on the way count as directories do.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, fstat, mkdirat, openat, readlinkat, statat, unlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;
use thiserror::Error;

/// The most symbolic links that are followed on a path: as many as the kernel follows.
const LINKS_MAX: u32 = 40;
/// The permission bits that let other users than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// Why a directory can't be used.
#[derive(Debug, Error)]
pub enum DirectoryError {
    /// Another user may change the meaning of names in it.
    #[error("{path} {reason}; name a directory that only {} can change", user_name())]
    Unsafe {
        /// The directory, or the symbolic link, that is at fault.
        path: PathBuf,
        /// How another user may change it.
        reason: UnsafeReason,
    },
    /// The system refused.
    #[error("{path}: {source}")]
    Io {
        /// The directory or file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// How another user may change a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnsafeReason {
    /// Another user owns it.
    #[error("belongs to user {0}")]
    Owner(u32),
    /// Its mode lets others write.
    #[error("can be written by other users (mode {0:03o})")]
    Mode(u32),
}

fn user_name() -> String {
    if geteuid().is_root() { "root".into() } else { format!("root and user {}", geteuid().as_raw()) }
}

fn at(path: &Path) -> impl FnOnce(Errno) -> DirectoryError + '_ {
    move |errno| DirectoryError::Io { path: path.to_owned(), source: errno.into() }
}

/// An open directory that no other user can change.
#[derive(Debug)]
pub struct PrivateDirectory {
    file: File,
    path: PathBuf,
}

impl PrivateDirectory {
    /// Opens the directory at `path`, which the user of this process must own.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub fn open(path: &Path) -> Result<Self, DirectoryError> {
        Self::walk(path, None)
    }

    /// Does as [`Self::open`], and makes the directory with `mode` if it does not exist. Those above it get 0755.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn make(path: &Path, mode: u32) -> Result<Self, DirectoryError> {
        Self::walk(path, Some(mode))
    }

    fn walk(path: &Path, mode: Option<u32>) -> Result<Self, DirectoryError> {
        let (directory, path) = PathWalk { mode, checks_directories: true, links: LINKS_MAX }.follow(path)?;
        Self::of(directory.as_fd(), path)
    }

    /// Opens an `O_PATH` descriptor of a directory for use.
    fn of(directory: BorrowedFd<'_>, path: PathBuf) -> Result<Self, DirectoryError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let file = openat(directory, c".", flags, Mode::empty()).map_err(at(&path))?;
        let found = fstat(&file).map_err(at(&path))?;
        let reason = if found.st_uid != geteuid().as_raw() {
            Some(UnsafeReason::Owner(found.st_uid))
        } else {
            (found.st_mode & WRITABLE_BY_OTHERS != 0).then_some(UnsafeReason::Mode(found.st_mode & 0o7777))
        };
        match reason {
            Some(reason) => Err(DirectoryError::Unsafe { path, reason }),
            None => Ok(Self { file: file.into(), path }),
        }
    }

    /// Returns its path, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a directory in it, and makes it with mode 0700 if it does not exist.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn subdirectory(&self, name: &str) -> Result<Self, DirectoryError> {
        let path = self.path.join(name);
        make_directory(self.file.as_fd(), OsStr::new(name), 0o700).map_err(at(&path))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = openat(&self.file, name, flags, Mode::empty()).map_err(at(&path))?;
        Self::of(found.as_fd(), path)
    }

    /// Opens a file in it, never through a symbolic link. A file that this makes gets mode 0600.
    ///
    /// # Errors
    /// Those of `openat(2)`: `ELOOP` if the name is a symbolic link's.
    pub fn open_file(&self, name: impl AsRef<OsStr>, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.file, name.as_ref(), flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Returns the attributes of a file in it, or of a symbolic link.
    ///
    /// # Errors
    /// Those of `fstatat(2)`.
    pub fn stat(&self, name: impl AsRef<OsStr>) -> io::Result<Stat> {
        Ok(statat(&self.file, name.as_ref(), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Gives a file in it another name in it.
    ///
    /// # Errors
    /// Those of `renameat(2)`.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.file, from.as_ref(), &self.file, to.as_ref())?)
    }

    /// Removes a file in it, if there is one.
    ///
    /// # Errors
    /// Those of `unlinkat(2)`.
    pub fn remove_file(&self, name: impl AsRef<OsStr>) -> io::Result<()> {
        match unlinkat(&self.file, name.as_ref(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the names in it.
    ///
    /// # Errors
    /// Those of `getdents(2)`.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.file)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
            }
        }
        Ok(names)
    }

    /// Makes the names in it durable.
    ///
    /// # Errors
    /// Those of `fsync(2)`.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

impl AsFd for PrivateDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the path of an existing directory without symbolic links. A link on the way must be root's or the user's
/// own; directories may be any user's.
///
/// # Errors
/// [`DirectoryError`].
pub fn resolve_directory(path: &Path) -> Result<PathBuf, DirectoryError> {
    let walk = PathWalk { mode: None, checks_directories: false, links: LINKS_MAX };
    walk.follow(path).map(|(_, path)| path)
}

/// One walk along a path.
struct PathWalk {
    /// The mode of a directory that is made if it does not exist.
    mode: Option<u32>,
    /// Whether all directories must be safe, and not only links.
    checks_directories: bool,
    /// How many more links are followed.
    links: u32,
}

impl PathWalk {
    /// Follows a path from the root, and checks each step before the next one is taken.
    fn follow(mut self, path: &Path) -> Result<(OwnedFd, PathBuf), DirectoryError> {
        let io = |source| DirectoryError::Io { path: path.to_owned(), source };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open_root = || openat(rustix::fs::CWD, c"/", flags, Mode::empty()).map_err(at(Path::new("/")));
        let mut left = steps(&std::path::absolute(path).map_err(io)?);
        let (mut directory, mut reached) = (open_root()?, PathBuf::from("/"));
        self.check_directory(directory.as_fd(), &reached)?;
        while let Some(step) = left.pop_front() {
            if step == ".." {
                reached.pop();
                directory = openat(&directory, c"..", flags, Mode::empty()).map_err(at(&reached))?;
                continue;
            }
            let next = reached.join(&step);
            let found = self.open_step(directory.as_fd(), &step, left.is_empty()).map_err(at(&next))?;
            let attributes = fstat(&found).map_err(at(&next))?;
            match FileType::from_raw_mode(attributes.st_mode) {
                FileType::Symlink => {
                    check_owner(&attributes, &next)?;
                    self.links = self.links.checked_sub(1).ok_or(Errno::LOOP).map_err(at(&next))?;
                    let target = readlinkat(&found, c"", Vec::new()).map_err(at(&next))?;
                    let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
                    if target.is_absolute() {
                        (directory, reached) = (open_root()?, PathBuf::from("/"));
                    }
                    let mut beyond = steps(&target);
                    beyond.append(&mut left);
                    left = beyond;
                }
                FileType::Directory => {
                    (directory, reached) = (found, next);
                    self.check_directory(directory.as_fd(), &reached)?;
                }
                _ => return Err(at(&next)(Errno::NOTDIR)),
            }
        }
        Ok((directory, reached))
    }

    /// Opens a directory or link, and makes a missing directory if it may.
    fn open_step(&self, directory: BorrowedFd<'_>, name: &OsStr, is_last: bool) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match (openat(directory, name, flags, Mode::empty()), self.mode) {
            (Err(Errno::NOENT), Some(mode)) => {
                make_directory(directory, name, if is_last { mode } else { 0o755 })?;
                openat(directory, name, flags, Mode::empty())
            }
            (opened, _) => opened,
        }
    }

    fn check_directory(&self, directory: BorrowedFd<'_>, path: &Path) -> Result<(), DirectoryError> {
        if !self.checks_directories {
            return Ok(());
        }
        let attributes = fstat(directory).map_err(at(path))?;
        check_owner(&attributes, path)?;
        let is_sticky = attributes.st_mode & STICKY != 0;
        if attributes.st_mode & WRITABLE_BY_OTHERS != 0 && !is_sticky {
            let reason = UnsafeReason::Mode(attributes.st_mode & 0o7777);
            return Err(DirectoryError::Unsafe { path: path.to_owned(), reason });
        }
        Ok(())
    }
}

/// Returns the steps of a path, the first one first.
fn steps(path: &Path) -> VecDeque<OsString> {
    let step = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(step).collect()
}

/// Fails unless root or the user of this process owns a directory or link.
fn check_owner(attributes: &Stat, path: &Path) -> Result<(), DirectoryError> {
    if attributes.st_uid == 0 || attributes.st_uid == geteuid().as_raw() {
        return Ok(());
    }
    Err(DirectoryError::Unsafe { path: path.to_owned(), reason: UnsafeReason::Owner(attributes.st_uid) })
}

fn make_directory(parent: BorrowedFd<'_>, name: &OsStr, mode: u32) -> Result<(), Errno> {
    match mkdirat(parent, name, Mode::from_raw_mode(mode)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

    use super::*;

    const STRANGER: u32 = 65534;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn reason(path: &Path) -> Option<(PathBuf, UnsafeReason)> {
        match PrivateDirectory::make(path, 0o700) {
            Err(DirectoryError::Unsafe { path, reason }) => Some((path, reason)),
            Err(error) => panic!("{error}"),
            Ok(_) => None,
        }
    }

    #[test]
    fn directory_others_may_write_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let outer = top.path().join("outer");
        let inner = outer.join("inner");
        assert_eq!(reason(&inner), None, "it is made");
        chmod(&inner, 0o770);
        assert_eq!(reason(&inner), Some((inner.clone(), UnsafeReason::Mode(0o770))));
        chmod(&inner, 0o1777);
        assert_eq!(reason(&inner), Some((inner.clone(), UnsafeReason::Mode(0o1777))), "others may add files");
        chmod(&inner, 0o755);
        chmod(&outer, 0o757);
        assert_eq!(reason(&inner), Some((outer.clone(), UnsafeReason::Mode(0o757))));
        assert_eq!(reason(&outer.join("new")), Some((outer.clone(), UnsafeReason::Mode(0o757))));
        assert!(!outer.join("new").exists(), "nothing is made in it");
        chmod(&outer, 0o1777);
        assert_eq!(reason(&inner), None, "as in /tmp");
    }

    #[test]
    fn directory_of_another_user_is_refused() {
        if !geteuid().is_root() {
            return;
        }
        let top = tempfile::tempdir().unwrap();
        let (outer, theirs) = (top.path().join("outer"), top.path().join("outer/theirs"));
        fs::create_dir_all(&theirs).unwrap();
        chmod(&outer, 0o1777);
        chown(&theirs, Some(STRANGER), None).unwrap();
        let owner = UnsafeReason::Owner(STRANGER);
        assert_eq!(reason(&theirs), Some((theirs.clone(), owner)));
        assert_eq!(reason(&theirs.join("new")), Some((theirs.clone(), owner)), "also on the way");
        assert!(!theirs.join("new").exists());
        symlink(top.path(), outer.join("link")).unwrap();
        assert_eq!(reason(&outer.join("link/mine")), None, "root's own link");
        assert!(top.path().join("mine").is_dir());
        lchown(outer.join("link"), Some(STRANGER), None).unwrap();
        assert_eq!(reason(&outer.join("link/mine")), Some((outer.join("link"), owner)));
        assert!(matches!(resolve_directory(&outer.join("link")), Err(DirectoryError::Unsafe { .. })));
        assert_eq!(resolve_directory(&theirs).unwrap(), theirs, "only links count");
    }

    #[test]
    fn path_without_links_is_found() {
        let top = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(top.path()).unwrap();
        fs::create_dir_all(real.join("a/b")).unwrap();
        symlink("../a", real.join("a/back")).unwrap();
        symlink("loop", real.join("loop")).unwrap();
        assert_eq!(resolve_directory(&real.join("a/back/./b/..")).unwrap(), real.join("a"));
        let failed = |path: &Path| match resolve_directory(path) {
            Err(DirectoryError::Io { source, .. }) => source.raw_os_error(),
            other => panic!("{other:?}"),
        };
        assert_eq!(failed(&real.join("loop")), Some(libc::ELOOP));
        assert_eq!(failed(&real.join("none")), Some(libc::ENOENT));
        fs::write(real.join("file"), "").unwrap();
        assert_eq!(failed(&real.join("file")), Some(libc::ENOTDIR));
    }

    #[test]
    fn link_in_place_of_a_file_is_not_followed() {
        let top = tempfile::tempdir().unwrap();
        let victim = top.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        let directory = PrivateDirectory::make(&top.path().join("arena"), 0o700).unwrap();
        for name in ["lock", "sub"] {
            symlink(&victim, directory.path().join(name)).unwrap();
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        assert_eq!(directory.open_file("lock", flags).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert!(directory.subdirectory("sub").is_err());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    }
}
