//! Names: looking up, making, removing, moving and linking.

use ashlar_libfs::{Found, Make, RenameFlags};
use ashlar_types::{Errno, FileKind, InodeId, MODE_PERMISSIONS};

use crate::attr::{is_regular, validity};
use crate::dispatch::{Answer, Call, Then};
use crate::file_system::FileSystem;
use crate::proto::{CreateIn, EntryOut, LinkIn, MkdirIn, MknodIn, Rename2In, RenameIn, Text};
use crate::reply::Check;

/// How often a retried look-up looks a name up, if the inode that it leads to is gone each time.
const TRIES: u32 = 8;
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const RENAME_WHITEOUT: u32 = 4;

/// Returns the attributes of an inode to be made, without the special ones of its kind.
const fn make(kind: FileKind, mode: u32, umask: u32) -> Make<'static> {
    Make { kind, mode: mode & MODE_PERMISSIONS, umask, device: 0, target: &[] }
}

impl<F: FileSystem> Call<'_, F> {
    /// LOOKUP.
    pub(crate) fn lookup(mut self) -> Answer {
        let name = self.arguments.text()?;
        let answer = self.look_up(name.bytes);
        if self.fs().is_shared() {
            let directory = answer.as_ref().ok().filter(|found| found.inode.is_directory());
            self.server.shown.note(self.inode(), name.bytes, directory.map(|found| found.id));
        }
        match answer {
            Ok(found) => {
                self.server.watches.note_found(self.fs(), &self.header, name.bytes, found.id);
                self.reply_entry(&name, &found)
            }
            Err(Errno::ENOENT) => self.reply_absent(&name),
            Err(errno) => Err(errno),
        }
    }

    /// Looks a name up. If the caller retries after `ESTALE`, the found inode is held.
    fn look_up(&self, name: &[u8]) -> Result<Found, Errno> {
        let find = || self.fs().lookup(&self.who(), self.inode(), name);
        let mut answer = find();
        for _ in 0..TRIES {
            let Some(found) = answer.as_ref().ok().filter(|found| is_regular(found) && self.server.again.is_any())
            else {
                break;
            };
            match self.fs().open(found.id) {
                // Another inode has its name already.
                Err(Errno::ESTALE) => answer = find(),
                Err(_) => break,
                Ok(_) => {
                    let not_held = self.server.again.hold(self.header.pid, found.id);
                    not_held.into_iter().for_each(|inode| self.fs().close(inode));
                    break;
                }
            }
        }
        answer
    }

    /// Replies that a name leads nowhere. The kernel may cache that too, as long as the directory's lease holds.
    fn reply_absent(&mut self, name: &Text<'_>) -> Answer {
        let directory = self.inode();
        let ttl_ms = self.name_ttl_ms(directory);
        if ttl_ms == 0 {
            return Err(Errno::ENOENT);
        }
        let (entry_valid, entry_valid_nsec) = validity(ttl_ms);
        self.reply.structure(&EntryOut { entry_valid, entry_valid_nsec, ..EntryOut::default() })?;
        self.reply.check(Check::Name(directory, name.place.clone()));
        Ok(Then::Send)
    }

    fn reply_entry(&mut self, name: &Text<'_>, found: &Found) -> Answer {
        let directory = self.inode();
        let ttl_ms = self.fs().cache_ttl_ms(found.id);
        self.put_entry(directory, name, found, ttl_ms)?;
        Ok(Then::Send)
    }

    /// READLINK.
    pub(crate) fn readlink(self) -> Answer {
        let target = self.fs().read_link(self.inode())?;
        self.reply.bytes(&target)?;
        Ok(Then::Send)
    }

    /// SYMLINK.
    pub(crate) fn symlink(mut self) -> Answer {
        let name = self.arguments.text()?;
        let target = self.arguments.text()?.bytes;
        let made = Make { target, ..make(FileKind::Symlink, 0o777, 0) };
        let found = self.fs().make(&self.who(), self.inode(), name.bytes, &made)?;
        self.reply_entry(&name, &found)
    }

    /// MKNOD.
    pub(crate) fn mknod(mut self) -> Answer {
        let asked: MknodIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let kind = FileKind::from_mode(asked.mode).ok_or(Errno::EINVAL)?;
        let made = Make { device: u64::from(asked.rdev), ..make(kind, asked.mode, asked.umask) };
        let found = self.fs().make(&self.who(), self.inode(), name.bytes, &made)?;
        self.reply_entry(&name, &found)
    }

    /// MKDIR.
    pub(crate) fn mkdir(mut self) -> Answer {
        let asked: MkdirIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let made = make(FileKind::Directory, asked.mode, asked.umask);
        let found = self.fs().make(&self.who(), self.inode(), name.bytes, &made)?;
        self.reply_entry(&name, &found)
    }

    /// CREATE: the kernel has found no such name.
    pub(crate) fn create(mut self) -> Answer {
        let asked: CreateIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let made = make(FileKind::Regular, asked.mode, asked.umask);
        let found = match self.fs().make_open(&self.who(), self.inode(), name.bytes, &made) {
            // Another mount was faster. The kernel checked the right to make a file, not the right to open that one:
            // ESTALE makes it look the name up again, check, and open.
            Err(Errno::EEXIST) if asked.flags & libc::O_EXCL as u32 == 0 => return Err(Errno::ESTALE),
            result => result?,
        };
        self.reply_opened(&name, &found, asked.flags)
    }

    /// TMPFILE.
    pub(crate) fn tmpfile(mut self) -> Answer {
        let asked: CreateIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let made = make(FileKind::Regular, asked.mode, asked.umask);
        let found = self.fs().make_unnamed(&self.who(), self.inode(), &made)?;
        self.reply_opened(&name, &found, asked.flags)
    }

    fn reply_opened(&mut self, name: &Text<'_>, found: &Found, flags: u32) -> Answer {
        debug_assert!(is_regular(found), "make_open makes regular files");
        let directory = self.inode();
        self.server.fills.is_new(found.id);
        // As with OPEN: the kernel doesn't know the inode before it has this answer.
        let ttl_ms = if self.fs().is_shared() { 0 } else { self.fs().cache_ttl_ms(found.id) };
        let entry = self.put_entry(directory, name, found, ttl_ms);
        let opened = entry.and_then(|()| self.put_open(found.id, flags));
        let handle = opened.inspect_err(|_| self.fs().close(found.id))?;
        Ok(Then::SendOpened(found.id, handle))
    }

    /// UNLINK.
    pub(crate) fn unlink(mut self) -> Answer {
        let name = self.arguments.text()?;
        self.fs().unlink(&self.who(), self.inode(), name.bytes)?;
        Ok(Then::Send)
    }

    /// RMDIR.
    pub(crate) fn rmdir(mut self) -> Answer {
        let name = self.arguments.text()?;
        let found = self.shown(self.inode(), name.bytes);
        self.fs().remove_directory(&self.who(), self.inode(), name.bytes, found)?;
        Ok(Then::Send)
    }

    /// RENAME.
    pub(crate) fn rename(mut self) -> Answer {
        let asked: RenameIn = self.arguments.structure()?;
        self.rename_to(InodeId(asked.newdir), RenameFlags::default())
    }

    /// RENAME2. The upper layer of an overlay needs whiteouts.
    pub(crate) fn rename2(mut self) -> Answer {
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
    fn shown(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        if self.fs().is_shared() { self.server.shown.directory(directory, name) } else { None }
    }

    fn rename_to(&mut self, directory: InodeId, flags: RenameFlags) -> Answer {
        let from = self.arguments.text()?;
        let to = self.arguments.text()?.bytes;
        let replaced = if flags.exchange { None } else { self.shown(directory, to) };
        let flags = RenameFlags { replaced, ..flags };
        if flags.exchange {
            self.begin_names();
        }
        self.fs().rename(&self.who(), (self.inode(), from.bytes), (directory, to), flags)?;
        // The kernel moves the names that it keeps, with the time for which it keeps them. It has looked the new name
        // up just now, so that name is recorded; the old one may have been recorded long before. The same holds if the
        // mount has become shared meanwhile: a name that the kernel keeps may not have expired yet.
        if flags.exchange {
            self.reply.check(Check::Name(self.inode(), from.place));
        }
        Ok(Then::Send)
    }

    /// LINK.
    pub(crate) fn link(mut self) -> Answer {
        let asked: LinkIn = self.arguments.structure()?;
        let name = self.arguments.text()?;
        let found = self.fs().link(&self.who(), InodeId(asked.oldnodeid), self.inode(), name.bytes)?;
        self.reply_entry(&name, &found)
    }
}
