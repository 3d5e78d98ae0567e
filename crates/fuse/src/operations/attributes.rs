//! Attributes: GETATTR, SETATTR, STATX, STATFS, and the kernel's forms of them.

use ashlar_libfs::{AttributeChange, FoundInode, SetTime};
use ashlar_types::{BLOCK_BYTES, Errno, FileKind, Inode, InodeId, NAME_MAX, Timestamp};
use ashlar_update::permission::lends_rights;

use crate::connection::reply_buffer::CachedItem;
use crate::file_system::FileSystem;
use crate::operations::request::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{Attr, AttrOut, EntryOut, RequestText, SetattrIn, StatfsOut, Statx, StatxOut, SxTime, fattr};

/// `STATX_BASIC_STATS` and `STATX_BTIME`.
const STATX_MASK: u32 = 0x7ff | 0x800;

/// The error of the kernel's clock for validities. It counts in ticks of 10 ms at the longest, rounds up, and lets one
/// more pass.
const CLOCK_ERROR_MS: u64 = 30;

/// Returns how long the kernel may keep something, in whole seconds and nanoseconds. It is less than `ttl_ms`, by the
/// error of the kernel's clock.
pub(crate) fn validity(ttl_ms: u64) -> (u64, u32) {
    let ttl_ms = ttl_ms.saturating_sub(CLOCK_ERROR_MS);
    (ttl_ms / 1000, u32::try_from(ttl_ms % 1000 * 1_000_000).unwrap_or(0))
}

/// Returns an inode as `fuse_attr`.
pub(crate) fn fuse_attr(id: InodeId, inode: &Inode) -> Attr {
    Attr {
        ino: id.0,
        size: inode.size,
        blocks: inode.st_blocks(),
        // Seconds before 1970 are negative; the kernel takes the number's bits as they are.
        atime: inode.accessed.seconds as u64,
        mtime: inode.modified.seconds as u64,
        ctime: inode.changed.seconds as u64,
        atimensec: inode.accessed.nanoseconds,
        mtimensec: inode.modified.nanoseconds,
        ctimensec: inode.changed.nanoseconds,
        mode: inode.st_mode(),
        nlink: inode.links,
        uid: inode.uid,
        gid: inode.gid,
        rdev: inode.st_rdev(),
        blksize: BLOCK_BYTES as u32,
        flags: 0,
    }
}

fn sx_time(time: Timestamp) -> SxTime {
    SxTime { seconds: time.seconds, nanoseconds: time.nanoseconds, reserved: 0 }
}

fn fuse_statx(found: &FoundInode) -> Statx {
    let inode = &found.inode;
    let device = inode.st_rdev();
    Statx {
        mask: STATX_MASK,
        blksize: BLOCK_BYTES as u32,
        nlink: inode.links,
        uid: inode.uid,
        gid: inode.gid,
        mode: (inode.st_mode() & 0xffff) as u16,
        ino: found.id.0,
        size: inode.size,
        blocks: inode.st_blocks(),
        atime: sx_time(inode.accessed),
        btime: sx_time(inode.born),
        ctime: sx_time(inode.changed),
        mtime: sx_time(inode.modified),
        rdev_major: device >> 8 & 0xfff,
        rdev_minor: device & 0xff | device >> 12 & 0xf_ff00,
        ..Statx::default()
    }
}

/// Returns the time that SETATTR sets, if it sets one.
fn requested_time(valid: u32, set: u32, now: u32, seconds: u64, nanoseconds: u32) -> Option<SetTime> {
    if valid & now != 0 {
        Some(SetTime::Now)
    } else if valid & set != 0 {
        Some(SetTime::At(Timestamp { seconds: seconds as i64, nanoseconds }))
    } else {
        None
    }
}

/// Returns the change that SETATTR asks for.
fn requested_change(asked: &SetattrIn) -> AttributeChange {
    let has = |bit: u32| asked.valid & bit != 0;
    let owner = has(fattr::UID | fattr::GID);
    AttributeChange {
        mode: has(fattr::MODE).then_some(asked.mode & ashlar_types::MODE_PERMISSIONS),
        uid: has(fattr::UID).then_some(asked.uid),
        gid: has(fattr::GID).then_some(asked.gid),
        size: has(fattr::SIZE).then_some(asked.size),
        accessed: requested_time(asked.valid, fattr::ATIME, fattr::ATIME_NOW, asked.atime, asked.atimensec),
        modified: requested_time(asked.valid, fattr::MTIME, fattr::MTIME_NOW, asked.mtime, asked.mtimensec),
        strip: has(fattr::KILL_SUIDGID) || (owner && !has(fattr::MODE)) || asks_for_nothing(asked.valid),
    }
}

/// Whether SETATTR names no attribute. The kernel sends such a request to have set-id bits cleared and nothing else:
/// before a write or `fallocate` by an ordinary user, and at `chown(path, -1, -1)`. The mount has promised
/// `HANDLE_KILLPRIV_V2`, so it clears them.
const fn asks_for_nothing(valid: u32) -> bool {
    let all = fattr::MODE | fattr::UID | fattr::GID | fattr::SIZE | fattr::ATIME | fattr::MTIME;
    valid & (all | fattr::ATIME_NOW | fattr::MTIME_NOW) == 0
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// Returns an inode as `fuse_attr`, with the number of blocks that may be shown.
    fn shown_attr(&self, found: &FoundInode) -> Attr {
        let attr = fuse_attr(found.id, &found.inode);
        Attr { blocks: self.mount.kernel_cache.mappable.shown_blocks(found.id, attr.size, attr.blocks), ..attr }
    }

    /// Replies with one inode's attributes.
    pub(crate) fn reply_attributes(&mut self, found: &FoundInode) -> RequestResult {
        let ttl_ms = self.fs().cache_ttl_ms(found.id);
        let (attr_valid, attr_valid_nsec) = validity(ttl_ms);
        let attr = self.shown_attr(found);
        self.reply.structure(&AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr })?;
        if ttl_ms > 0 {
            self.reply.record_cached(CachedItem::Attributes(found.id));
        }
        Ok(ReplyAction::Send)
    }

    /// Returns how long the kernel may keep names of a directory, in milliseconds. The server records the names of the
    /// answer when it sends it.
    pub(crate) fn name_ttl_ms(&mut self, directory: InodeId) -> u64 {
        if !self.reply.has_name_ttls {
            // A thread that waits for answers with names waits only for those that began before the mount was shared.
            if self.fs().is_shared() {
                return 0;
            }
            self.begin_name_ttls();
        }
        self.fs().name_ttl_ms(directory)
    }

    /// Begins an answer with names. From here until the answer is sent and its names are recorded, a thread that makes
    /// the kernel forget names waits.
    pub(crate) fn begin_name_ttls(&mut self) {
        self.mount.kernel_cache.dentry_ttls.begin_answer();
        self.reply.has_name_ttls = true;
    }

    /// Puts the entry that a name leads to into the answer. The kernel may keep its attributes for `attr_ttl_ms`.
    pub(crate) fn put_entry(
        &mut self,
        directory: InodeId,
        name: &RequestText<'_>,
        found: &FoundInode,
        attr_ttl_ms: u64,
    ) -> Result<(), Errno> {
        let entry_ttl_ms = self.name_ttl_ms(directory);
        let (entry_valid, entry_valid_nsec) = validity(entry_ttl_ms);
        let (attr_valid, attr_valid_nsec) = validity(attr_ttl_ms);
        self.reply.structure(&EntryOut {
            nodeid: found.id.0,
            generation: 0,
            entry_valid,
            attr_valid,
            entry_valid_nsec,
            attr_valid_nsec,
            attr: self.shown_attr(found),
        })?;
        if entry_ttl_ms > 0 {
            self.reply.record_cached(CachedItem::Name(directory, name.place.clone()));
        }
        if attr_ttl_ms > 0 {
            self.reply.record_cached(CachedItem::Attributes(found.id));
        }
        Ok(())
    }

    /// GETATTR.
    pub(crate) fn getattr(mut self) -> RequestResult {
        let found = self.fs().attributes(self.inode())?;
        self.reply_attributes(&found)
    }

    /// SETATTR.
    pub(crate) fn setattr(mut self) -> RequestResult {
        let asked: SetattrIn = self.arguments.structure()?;
        let change = requested_change(&asked);
        if asks_for_nothing(asked.valid) {
            self.check_clearing()?;
        }
        let found = self.fs().set_attributes(&self.credentials(), self.inode(), &change)?;
        self.reply_attributes(&found)
    }

    /// Refuses strangers that would clear set-id bits without writing.
    fn check_clearing(&self) -> Result<(), Errno> {
        let (inode, user) = (self.inode(), self.header.uid);
        if user == 0 || self.mount.write_handles.has(inode) {
            return Ok(());
        }
        let found = self.fs().attributes(inode)?.inode;
        let clears = !found.is_directory() && lends_rights(&found);
        if clears && found.uid != user { Err(Errno::EPERM) } else { Ok(()) }
    }

    /// STATX: the kernel sends it when the caller wants the time of birth.
    pub(crate) fn statx(self) -> RequestResult {
        let found = self.fs().attributes(self.inode())?;
        let ttl_ms = self.fs().cache_ttl_ms(found.id);
        let (attr_valid, attr_valid_nsec) = validity(ttl_ms);
        let stat = fuse_statx(&found);
        let blocks = self.mount.kernel_cache.mappable.shown_blocks(found.id, stat.size, stat.blocks);
        self.reply.structure(&StatxOut {
            attr_valid,
            attr_valid_nsec,
            flags: 0,
            spare: [0; 2],
            stat: Statx { blocks, ..stat },
        })?;
        if ttl_ms > 0 {
            self.reply.record_cached(CachedItem::Attributes(found.id));
        }
        Ok(ReplyAction::Send)
    }

    /// STATFS.
    pub(crate) fn statfs(self) -> RequestResult {
        let space = self.fs().space(self.inode())?;
        self.reply.structure(&StatfsOut {
            blocks: space.blocks_total,
            bfree: space.blocks_free,
            bavail: space.blocks_free,
            files: space.inodes_total,
            ffree: space.inodes_free,
            bsize: BLOCK_BYTES as u32,
            namelen: NAME_MAX as u32,
            frsize: BLOCK_BYTES as u32,
            ..StatfsOut::default()
        })?;
        Ok(ReplyAction::Send)
    }
}

/// Whether the inode is a regular file, whose content OPEN opens.
pub(crate) fn is_regular(found: &FoundInode) -> bool {
    found.inode.kind == FileKind::Regular
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(valid: u32) -> SetattrIn {
        SetattrIn {
            valid,
            size: 10,
            atime: (-5_i64) as u64,
            atimensec: 7,
            mode: 0o104_755,
            uid: 1,
            gid: 2,
            ..SetattrIn::default()
        }
    }

    #[test]
    fn setattr_changes_only_marked_attributes() {
        let change = requested_change(&asked(fattr::SIZE | fattr::ATIME | fattr::MTIME_NOW | fattr::MTIME));
        assert_eq!((change.mode, change.uid, change.gid, change.size), (None, None, None, Some(10)));
        assert_eq!(change.accessed, Some(SetTime::At(Timestamp { seconds: -5, nanoseconds: 7 })));
        assert_eq!(change.modified, Some(SetTime::Now));
        assert!(!change.strip);
    }

    #[test]
    fn set_id_bits_are_cleared_with_owner_or_on_request() {
        assert!(requested_change(&asked(fattr::UID)).strip);
        assert!(requested_change(&asked(fattr::SIZE | fattr::KILL_SUIDGID)).strip);
        assert!(requested_change(&asked(0)).strip, "an empty change only clears set-id bits");
        assert!(!requested_change(&asked(fattr::MODE)).strip);
        assert!(!requested_change(&asked(fattr::MODE | fattr::UID)).strip, "the mode given wins");
        assert_eq!(requested_change(&asked(fattr::MODE)).mode, Some(0o4755), "the kind is no part of the mode");
    }

    #[test]
    fn device_numbers_split_as_linux_does() {
        let found = FoundInode {
            id: InodeId(20),
            inode: Inode {
                device: libc::makedev(0xabc, 0xf_edcb),
                blocks: 3,
                modified: Timestamp { seconds: -1, nanoseconds: 5 },
                born: Timestamp { seconds: 9, nanoseconds: 1 },
                ..Inode::new(FileKind::CharDevice, 0o600, InodeId::ROOT, Timestamp::default())
            },
        };
        let statx = fuse_statx(&found);
        assert_eq!((statx.rdev_major, statx.rdev_minor), (0xabc, 0xf_edcb));
        assert_eq!((statx.btime.seconds, statx.blocks, statx.mode), (9, 24, 0o020_600));
        assert_eq!(fuse_attr(found.id, &found.inode).mtime, u64::MAX);
    }

    #[test]
    fn validity_is_split_into_seconds_and_nanoseconds() {
        assert_eq!((validity(0), validity(10)), ((0, 0), (0, 0)));
        assert_eq!(validity(2_345), (2, 315_000_000));
    }
}
