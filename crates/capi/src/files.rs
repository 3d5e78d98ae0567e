//! Calls that open files, or work on one as a whole.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use ashlar_libfs::{
    AttributeChange, FinalLink, FoundInode, NewInode, OpenAction, Outcome, PathIntent, PathPurpose, ResolvedPath,
};
use ashlar_types::{Access, Errno, FileKind, InodeId};

use crate::numbered_file::{NumberedFile, TMPFILE};
use crate::session::CapiSession;

/// The flags that `ashlar_open` accepts beside an access mode.
const KNOWN_FLAGS: i32 = libc::O_CREAT
    | libc::O_EXCL
    | libc::O_TRUNC
    | libc::O_APPEND
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | TMPFILE
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_NOATIME
    | libc::O_CLOEXEC
    | libc::O_DIRECT
    | libc::O_NOCTTY
    | libc::O_NONBLOCK
    | LARGE_FILE;
/// The kernel's value of `O_LARGEFILE`. Libc defines it as 0 if all files may be large.
const LARGE_FILE: i32 = 0o100_000;

impl CapiSession {
    /// `open`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn open_file(&self, path: &[u8], flags: i32, mode: u32) -> Outcome<i32> {
        let is_unclear = flags & libc::O_CREAT != 0 && flags & libc::O_DIRECTORY != 0;
        if flags & !(KNOWN_FLAGS | libc::O_ACCMODE) != 0 || flags & libc::O_ACCMODE == libc::O_ACCMODE || is_unclear {
            return Err(Errno::EINVAL);
        }
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if flags & TMPFILE != 0 && !(writes && flags & libc::O_DIRECTORY != 0) {
            return Err(Errno::EINVAL);
        }
        if flags & libc::O_CREAT != 0 {
            self.check_makes_file(path)?;
        }
        self.files.check_room()?;
        let file = self.act_at(path, PathIntent::of_open_flags(flags), |place| self.open_place(place, flags, mode))?;
        self.files.add(Arc::new(file))
    }

    /// Fails for a path with a slash at its end: it names a directory, which `open` does not create.
    fn check_makes_file(&self, path: &[u8]) -> Outcome<()> {
        let Some(end) = path.iter().rposition(|&byte| byte != b'/').filter(|end| end + 1 < path.len()) else {
            return Ok(());
        };
        match &path[..=end] {
            name if name.ends_with(b"/.") || name.ends_with(b"/..") || name == b"." || name == b".." => Ok(()),
            name => self.walk(name, FinalLink::Keep).and(Err(Errno::EISDIR)),
        }
    }

    fn open_place(&self, place: &ResolvedPath, flags: i32, mode: u32) -> Outcome<NumberedFile> {
        let make =
            NewInode { kind: FileKind::Regular, mode: mode & 0o7777, umask: self.umask(), device: 0, target: &[] };
        match place.opening(flags)? {
            OpenAction::Create => match self.fs.make_open(&self.user, place.directory, &place.name, &make) {
                // Another session was faster: its file is opened.
                Err(Errno::EEXIST) if flags & libc::O_EXCL == 0 => Err(Errno::ESTALE),
                made => Ok(self.make_open_file(made?.id, FileKind::Regular, flags)),
            },
            OpenAction::CreateUnnamed(directory) => {
                let made = self.fs.make_unnamed(&self.user, directory, &make)?;
                Ok(self.make_open_file(made.id, FileKind::Regular, flags))
            }
            OpenAction::Existing(found, access) => self.open_existing(place, found, access, flags),
        }
    }

    fn open_existing(
        &self,
        place: &ResolvedPath,
        found: &FoundInode,
        access: Access,
        flags: i32,
    ) -> Outcome<NumberedFile> {
        let uid = self.user.uid;
        if flags & libc::O_CREAT != 0 {
            let directory = self.fs.attributes(place.directory)?.inode;
            if !self.guards.allow_creating(uid, &directory, &found.inode) {
                return Err(Errno::EACCES);
            }
        }
        let found = self.fs.open_for(&self.user, found.id, access)?;
        if flags & libc::O_NOATIME != 0 && uid != 0 && uid != found.inode.uid {
            self.fs.close(found.id);
            return Err(Errno::EPERM);
        }
        let file = self.make_open_file(found.id, found.inode.kind, flags);
        if flags & libc::O_TRUNC != 0 && !file.is_directory {
            let change = AttributeChange { size: Some(0), strip: self.clears_set_id(), ..AttributeChange::default() };
            self.fs.set_attributes(&self.admitted, found.id, &change)?;
        }
        Ok(file)
    }

    /// Makes an open file for a handle that LibFS has recorded.
    fn make_open_file(&self, inode: InodeId, kind: FileKind, flags: i32) -> NumberedFile {
        NumberedFile {
            fs: Arc::clone(&self.fs),
            inode,
            is_directory: kind == FileKind::Directory,
            flags,
            offset: Mutex::new(0),
            lock_owner: self.new_ticket(),
            has_locks: AtomicBool::new(false),
        }
    }

    /// `truncate`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn truncate(&self, path: &[u8], size: i64) -> Outcome<()> {
        let size = self.checked_size(size)?;
        let change = AttributeChange { size: Some(size), strip: self.clears_set_id(), ..AttributeChange::default() };
        self.act_on(path, FinalLink::Follow.to(PathPurpose::Write), |found| {
            self.fs.set_attributes(&self.user, found.id, &change).map(drop)
        })
    }

    /// `ftruncate`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn truncate_file(&self, file: i32, size: i64) -> Outcome<()> {
        if size < 0 {
            return Err(Errno::EINVAL);
        }
        let file = self.file(file)?;
        let size = self.checked_size(size)?;
        if !file.may_write() {
            return Err(Errno::EINVAL);
        }
        let change = AttributeChange { size: Some(size), strip: self.clears_set_id(), ..AttributeChange::default() };
        self.fs.set_attributes(&self.admitted, file.inode, &change).map(drop)
    }

    fn checked_size(&self, size: i64) -> Outcome<u64> {
        let size = u64::try_from(size).map_err(|_| Errno::EINVAL)?;
        if size > self.file_limit { Err(Errno::EFBIG) } else { Ok(size) }
    }

    /// `fallocate`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn allocate(&self, file: i32, mode: i32, offset: i64, bytes: i64) -> Outcome<()> {
        let file = self.file(file)?;
        let (Ok(offset), Ok(bytes @ 1..)) = (u64::try_from(offset), u64::try_from(bytes)) else {
            return Err(Errno::EINVAL);
        };
        let how = ashlar_libfs::allocation_of(mode).ok_or(Errno::EOPNOTSUPP)?;
        if !file.may_write() {
            return Err(Errno::EBADF);
        }
        if mode & libc::FALLOC_FL_KEEP_SIZE == 0 && offset.saturating_add(bytes) > self.file_limit {
            return Err(Errno::EFBIG);
        }
        self.fs.allocate(&self.admitted, file.inode, how, offset, bytes, self.clears_set_id())
    }
}
