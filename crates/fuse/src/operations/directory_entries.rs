//! Names: looking up, making, removing, moving and linking.

use ashlar_libfs::{FoundInode, NewInode, RenameFlags};
use ashlar_types::{Errno, FileKind, InodeId, MODE_PERMISSIONS};

use crate::connection::reply_buffer::CachedItem;
use crate::file_system::FileSystem;
use crate::operations::attributes::{is_regular, validity};
use crate::operations::request::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{CreateIn, EntryOut, LinkIn, MkdirIn, MknodIn, Rename2In, RenameIn, RequestText};

/// How often a retried look-up looks a name up, if the inode that it leads to is gone each time.
const LOOKUPS_MAX: u32 = 8;
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const RENAME_WHITEOUT: u32 = 4;

/// Returns the attributes of an inode to be made, without the special ones of its kind.
const fn new_inode(kind: FileKind, mode: u32, umask: u32) -> NewInode<'static> {
    NewInode { kind, mode: mode & MODE_PERMISSIONS, umask, device: 0, target: &[] }
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// LOOKUP.
    pub(crate) fn lookup(mut self) -> RequestResult {
        let name = self.arguments.text()?;
        let answer = self.look_up_held(name.bytes);
        if self.fs().is_shared() {
            let directory = answer.as_ref().ok().filter(|found| found.inode.is_directory());
            self.mount.kernel_cache.shown_directories.record_lookup(
                self.inode(),
                name.bytes,
                directory.map(|found| found.id),
            );
        }
        match answer {
            Ok(found) => {
                self.mount.watches.reserve_if_watched(self.fs(), &self.header, name.bytes, found.id);
                self.reply_entry(&name, &found)
            }
            Err(Errno::ENOENT) => self.reply_absent(&name),
            Err(errno) => Err(errno),
        }
    }

    /// Looks a name up. If the caller retries after `ESTALE`, the found inode is held.
    fn look_up_held(&self, name: &[u8]) -> Result<FoundInode, Errno> {
        let find = || self.fs().lookup(&self.credentials(), self.inode(), name);
        let mut answer = find();
        for _ in 0..LOOKUPS_MAX {
            let Some(found) =
                answer.as_ref().ok().filter(|found| is_regular(found) && self.mount.estale_retries.is_any())
            else {
                break;
            };
            match self.fs().open(found.id) {
                // Another inode has its name already.
                Err(Errno::ESTALE) => answer = find(),
                Err(_) => break,
                Ok(_) => {
                    let not_held = self.mount.estale_retries.hold_inode(self.header.pid, found.id);
                    not_held.into_iter().for_each(|inode| self.fs().close(inode));
                    break;
                }
            }
        }
        answer
    }

    /// Replies that a name leads nowhere. The kernel may cache that too, as long as the directory's lease holds.
    fn reply_absent(&mut self, name: &RequestText<'_>) -> RequestResult {
        let directory = self.inode();
        let ttl_ms = self.name_ttl_ms(directory);
        if ttl_ms == 0 {
            return Err(Errno::ENOENT);
        }
        let (entry_valid, entry_valid_nsec) = validity(ttl_ms);
        self.reply.structure(&EntryOut { entry_valid, entry_valid_nsec, ..EntryOut::default() })?;
        self.reply.record_cached(CachedItem::Name(directory, name.place.clone()));
        Ok(ReplyAction::Send)
    }

    fn reply_entry(&mut self, name: &RequestText<'_>, found: &FoundInode) -> RequestResult {
        let directory = self.inode();
        let ttl_ms = self.fs().cache_ttl_ms(found.id);
        self.put_entry(directory, name, found, ttl_ms)?;
        Ok(ReplyAction::Send)
    }

    /// READLINK.
    pub(crate) fn readlink(self) -> RequestResult {
        let target = self.fs().read_link(self.inode())?;
        self.reply.bytes(&target)?;
        Ok(ReplyAction::Send)
    }

    /// SYMLINK.
    pub(crate) fn symlink(mut self) -> RequestResult {
        let name = self.arguments.text()?;
        let target = self.arguments.text()?.bytes;
        let made = NewInode { target, ..new_inode(FileKind::Symlink, 0o777, 0) };
        let found = self.fs().make(&self.credentials(), self.inode(), name.bytes, &made)?;
        self.reply_entry(&name, &found)
    }

    /// MKNOD.
    pub(crate) fn mknod(mut self) -> RequestResult {
        let asked: MknodIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let kind = FileKind::from_mode(asked.mode).ok_or(Errno::EINVAL)?;
        let made = NewInode { device: u64::from(asked.rdev), ..new_inode(kind, asked.mode, asked.umask) };
        let found = self.fs().make(&self.credentials(), self.inode(), name.bytes, &made)?;
        self.reply_entry(&name, &found)
    }

    /// MKDIR.
    pub(crate) fn mkdir(mut self) -> RequestResult {
        let asked: MkdirIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let made = new_inode(FileKind::Directory, asked.mode, asked.umask);
        let found = self.fs().make(&self.credentials(), self.inode(), name.bytes, &made)?;
        self.reply_entry(&name, &found)
    }

    /// CREATE: the kernel has found no such name.
    pub(crate) fn create(mut self) -> RequestResult {
        let asked: CreateIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let made = new_inode(FileKind::Regular, asked.mode, asked.umask);
        let found = match self.fs().make_open(&self.credentials(), self.inode(), name.bytes, &made) {
            // Another mount was faster. The kernel checked the right to make a file, not the right to open that one:
            // ESTALE makes it look the name up again, check, and open.
            Err(Errno::EEXIST) if asked.flags & libc::O_EXCL as u32 == 0 => return Err(Errno::ESTALE),
            result => result?,
        };
        self.reply_opened(&name, &found, asked.flags)
    }

    /// TMPFILE.
    pub(crate) fn tmpfile(mut self) -> RequestResult {
        let asked: CreateIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let made = new_inode(FileKind::Regular, asked.mode, asked.umask);
        let found = self.fs().make_unnamed(&self.credentials(), self.inode(), &made)?;
        self.reply_opened(&name, &found, asked.flags)
    }

    fn reply_opened(&mut self, name: &RequestText<'_>, found: &FoundInode, flags: u32) -> RequestResult {
        debug_assert!(is_regular(found), "make_open makes regular files");
        let directory = self.inode();
        self.mount.kernel_cache.page_fills.record_new_file(found.id);
        // As with OPEN: the kernel doesn't know the inode before it has this answer.
        let ttl_ms = if self.fs().is_shared() { 0 } else { self.fs().cache_ttl_ms(found.id) };
        let entry = self.put_entry(directory, name, found, ttl_ms);
        let opened = entry.and_then(|()| self.put_open(found.id, flags));
        let handle = opened.inspect_err(|_| self.fs().close(found.id))?;
        Ok(ReplyAction::SendOpened(found.id, handle))
    }

    /// UNLINK.
    pub(crate) fn unlink(mut self) -> RequestResult {
        let name = self.arguments.text()?;
        self.fs().unlink(&self.credentials(), self.inode(), name.bytes)?;
        Ok(ReplyAction::Send)
    }

    /// RMDIR.
    pub(crate) fn rmdir(mut self) -> RequestResult {
        let name = self.arguments.text()?;
        let found = self.shown_directory(self.inode(), name.bytes);
        self.fs().remove_directory(&self.credentials(), self.inode(), name.bytes, found)?;
        Ok(ReplyAction::Send)
    }

    /// RENAME.
    pub(crate) fn rename(mut self) -> RequestResult {
        let asked: RenameIn = self.arguments.structure()?;
        self.rename_to(InodeId(asked.newdir), RenameFlags::default())
    }

    /// RENAME2. The upper layer of an overlay needs whiteouts.
    pub(crate) fn rename2(mut self) -> RequestResult {
        let asked: Rename2In = self.arguments.structure()?;
        if asked.flags & !(RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT) != 0 {
            return Err(Errno::EINVAL);
        }
        let no_replace = asked.flags & RENAME_NOREPLACE != 0;
        let exchange = asked.flags & RENAME_EXCHANGE != 0;
        let whiteout = asked.flags & RENAME_WHITEOUT != 0;
        if exchange && (no_replace || whiteout) {
            return Err(Errno::EINVAL);
        }
        self.rename_to(InodeId(asked.newdir), RenameFlags { no_replace, exchange, whiteout, replaced: None })
    }

    /// Returns the directory that the kernel believes to stand at a name; other mounts may have put another one there.
    /// If a removal or a rename removes a directory, the kernel takes the one that it believes in for dead. From then
    /// on it answers all requests in it by itself.
    fn shown_directory(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        if self.fs().is_shared() {
            self.mount.kernel_cache.shown_directories.directory_at(directory, name)
        } else {
            None
        }
    }

    fn rename_to(&mut self, directory: InodeId, flags: RenameFlags) -> RequestResult {
        let from = self.arguments.text()?;
        let to = self.arguments.text()?.bytes;
        let replaced = if flags.exchange { None } else { self.shown_directory(directory, to) };
        let flags = RenameFlags { replaced, ..flags };
        if flags.exchange {
            self.begin_name_ttls();
        }
        self.fs().rename(&self.credentials(), (self.inode(), from.bytes), (directory, to), flags)?;
        // The kernel moves the names that it keeps, with the time for which it keeps them. It has looked the new name
        // up just now, so that name is recorded; the old one may have been recorded long before. The same holds if the
        // mount has become shared meanwhile: a name that the kernel keeps may not have expired yet.
        if flags.exchange {
            self.reply.record_cached(CachedItem::Name(self.inode(), from.place));
        }
        Ok(ReplyAction::Send)
    }

    /// LINK.
    pub(crate) fn link(mut self) -> RequestResult {
        let asked: LinkIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let found = self.fs().link(&self.credentials(), InodeId(asked.oldnodeid), self.inode(), name.bytes)?;
        self.reply_entry(&name, &found)
    }
}
