//! Operations on names, and on the attributes of the inodes that they name.

use ashlar_libfs::{AttributeChange, FinalLink, FoundInode, NewInode, Outcome, PathPurpose, RenameFlags, SetTime};
use ashlar_types::{Access, Errno, FileKind, MODE_PERMISSIONS, MODE_STICKY};

use crate::session::{CapiSession, retry_stale};

const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const RENAME_WHITEOUT: u32 = 4;

impl CapiSession {
    /// `mkdir`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn make_directory(&self, path: &[u8], mode: u32) -> Outcome<()> {
        // A new directory takes its set-id bits from its parent.
        let mode = mode & (0o777 | MODE_STICKY);
        let make = NewInode { kind: FileKind::Directory, mode, umask: self.umask(), device: 0, target: &[] };
        self.make(path, &make)
    }

    /// `symlink`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn make_link(&self, target: &[u8], path: &[u8]) -> Outcome<()> {
        self.make(path, &NewInode { kind: FileKind::Symlink, mode: 0o777, umask: 0, device: 0, target })
    }

    fn make(&self, path: &[u8], make: &NewInode<'_>) -> Outcome<()> {
        self.act_at(path, FinalLink::Keep.to(PathPurpose::Look).making(), |place| {
            place.check_new(make.kind == FileKind::Directory)?;
            self.fs.make(&self.user, place.directory, &place.name, make).map(drop)
        })
    }

    /// `unlink` and `rmdir`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn remove(&self, path: &[u8], is_directory: bool) -> Outcome<()> {
        self.act_at(path, FinalLink::Keep.to(PathPurpose::Name), |place| {
            self.fs.remove_at(&self.user, place, is_directory)
        })
    }

    /// `renameat2`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn rename(&self, from: &[u8], to: &[u8], flags: u32) -> Outcome<()> {
        let has = |flag: u32| flags & flag != 0;
        let known = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT;
        if flags & !known != 0 || has(RENAME_EXCHANGE) && has(RENAME_NOREPLACE | RENAME_WHITEOUT) {
            return Err(Errno::EINVAL);
        }
        let flags = RenameFlags {
            no_replace: has(RENAME_NOREPLACE),
            exchange: has(RENAME_EXCHANGE),
            whiteout: has(RENAME_WHITEOUT),
            replaced: None,
        };
        let aim = FinalLink::Keep.to(PathPurpose::Name);
        retry_stale(|| {
            let (source, target) = (self.walk(from, aim)?, self.walk(to, aim)?);
            self.fs.rename_at(&self.user, &source, &target, flags)
        })
    }

    /// `link`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn link(&self, from: &[u8], to: &[u8]) -> Outcome<()> {
        self.act_on(from, FinalLink::Keep.to(PathPurpose::SetAttributes), |found| self.link_found(found, to, false))
    }

    /// Gives an open file a name.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn link_file(&self, file: i32, to: &[u8]) -> Outcome<()> {
        let file = self.file(file)?;
        retry_stale(|| self.link_found(&self.fs.attributes(file.inode)?, to, file.stays_unnamed()))
    }

    fn link_found(&self, found: &FoundInode, to: &[u8], stays_unnamed: bool) -> Outcome<()> {
        let place = self.walk(to, FinalLink::Keep.to(PathPurpose::Look).making())?;
        place.check_new(false)?;
        if stays_unnamed {
            self.fs.check_access(&self.user, place.directory, Access::WRITE | Access::EXECUTE)?;
            return Err(Errno::ENOENT);
        }
        self.fs.link(&self.user, found.id, place.directory, &place.name).map(drop)
    }

    /// `readlink`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn read_link(&self, path: &[u8]) -> Outcome<Vec<u8>> {
        self.act_on(path, FinalLink::Keep, |found| match found.inode.kind {
            FileKind::Symlink => Ok(found.inode.target.clone()),
            _ => Err(Errno::EINVAL),
        })
    }

    /// `eaccess`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn check(&self, path: &[u8], mode: i32) -> Outcome<()> {
        let access = u32::try_from(mode).ok().filter(|mode| mode & !7 == 0).ok_or(Errno::EINVAL)?;
        self.act_on(path, FinalLink::Follow, |found| match access {
            0 => Ok(()),
            access => self.fs.check_access(&self.user, found.id, Access(access)),
        })
    }

    fn change(&self, found: &FoundInode, change: &AttributeChange) -> Outcome<()> {
        self.fs.set_attributes(&self.user, found.id, change).map(drop)
    }

    /// `chmod` of an inode.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn set_mode(&self, found: &FoundInode, mode: u32) -> Outcome<()> {
        self.change(found, &AttributeChange { mode: Some(mode & MODE_PERMISSIONS), ..AttributeChange::default() })
    }

    /// `chown` of an inode.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn set_owner(&self, found: &FoundInode, uid: u32, gid: u32) -> Outcome<()> {
        let given = |id: u32| Some(id).filter(|id| *id != u32::MAX);
        // A change that names neither owner nor group also moves the change time.
        self.change(
            found,
            &AttributeChange { uid: given(uid), gid: given(gid), strip: true, ..AttributeChange::default() },
        )
    }

    /// `utimensat` of an inode.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn set_times(&self, found: &FoundInode, times: Option<&[libc::timespec; 2]>) -> Outcome<()> {
        let (accessed, modified) = match times {
            None => (Some(SetTime::Now), Some(SetTime::Now)),
            Some([accessed, modified]) => (SetTime::from_timespec(accessed)?, SetTime::from_timespec(modified)?),
        };
        if accessed.is_none() && modified.is_none() {
            return Ok(());
        }
        self.change(found, &AttributeChange { accessed, modified, ..AttributeChange::default() })
    }

    /// Returns the current inode of an open file.
    ///
    /// # Errors
    /// `EBADF` if the number is unused.
    pub(crate) fn current_inode(&self, file: i32) -> Outcome<FoundInode> {
        self.fs.attributes(self.file(file)?.inode)
    }
}
