//! Open files: opening, reading, writing, allocating, and closing of handles.

use std::sync::atomic::Ordering;

use ashlar_libfs::{LockKind, ReserveReason, Seek, WriteAt, Written, allocation_of};
use ashlar_types::{Credentials, Errno, InodeId, MODE_SETGID, MODE_SETUID};
use ashlar_wire::HELPER_FLAG;
use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::callers::calling_thread::ThreadCall;
use crate::connection::device::TRANSFER_BYTES;
use crate::connection::notify::Pages;
use crate::connection::reply_buffer::CachedItem;
use crate::file_system::FileSystem;
use crate::kernel_cache::invalidation::{SeekRequest, StaleItem};
use crate::operations::request::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{
    CopyFileRangeIn, FallocateIn, FlushIn, LseekIn, OffsetOut, OpenIn, OpenOut, READ_LOCKOWNER, RELEASE_FLOCK_UNLOCK,
    ReadIn, ReleaseIn, WRITE_KILL_SUIDGID, WriteIn, WriteOut, fopen,
};
use crate::state::mount_state::MountState;

/// Flag of a handle that bypasses the kernel's pages. A handle's number is its own as long as the mount lives; its
/// lowest bits are flags.
const HANDLE_DIRECT: u64 = 1 << 0;
/// Flag of a handle through which the file may be mapped for writing.
const HANDLE_MAPPABLE: u64 = 1 << 1;
/// Flag of a handle through which the file can be written.
const HANDLE_WRITES: u64 = 1 << 2;
/// The difference between the numbers of two successive handles.
const HANDLE_STEP: u64 = 1 << 3;
/// WRITE: the kernel writes pages of a shared mapping back, on behalf of no process.
const WRITE_CACHE: u32 = 1 << 0;
/// A user and a group that do not exist.
const NOBODY: u32 = u32::MAX;
/// The most that one COPY_FILE_RANGE copies. Callers continue after it, and can be killed in between.
const COPY_BYTES_MAX: u64 = 64 << 20;

/// How often an appending thread is read until it waits for the answer. A thread that does not wait (it writes
/// asynchronously) is taken to append.
const APPEND_READS_MAX: u32 = 400;

const fn has(flags: u32, flag: i32) -> bool {
    flags & flag as u32 != 0
}

/// Whether a handle opened with `flags` bypasses the kernel's pages. Such handles are opened with `O_DIRECT`, or can
/// only write. The pages that a write-only handle would fill are of no use to readers: a write moves the file's time of
/// modification, so the kernel drops them when it next asks for the attributes (`AUTO_INVAL_DATA`). Without pages a
/// write is copied once less, and the kernel doesn't ask for the file's capabilities first. Nor can an append fill a
/// page in the wrong place.
const fn is_direct(flags: u32) -> bool {
    let only_writes = flags & libc::O_ACCMODE as u32 == libc::O_WRONLY as u32;
    has(flags, libc::O_DIRECT) || only_writes
}

/// Closes a handle of a regular file, or one of a directory, whose number is 0.
pub(crate) fn close_handle<F: FileSystem>(mount: &MountState<F>, inode: InodeId, handle: u64) {
    if handle & HANDLE_MAPPABLE != 0 {
        let free = || mount.file_system.free_reserved(inode, ReserveReason::Mapped);
        mount.kernel_cache.mappable.remove_handle(inode, free);
    }
    if handle & HANDLE_WRITES != 0 {
        mount.write_handles.remove(inode);
    }
    mount.file_system.close(inode);
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// OPEN.
    pub(crate) fn open(mut self) -> RequestResult {
        let asked: OpenIn = self.arguments.structure()?;
        let inode = self.inode();
        self.fs().open(inode)?;
        let handle = self.put_open(inode, asked.flags).inspect_err(|_| self.fs().close(inode))?;
        if has(asked.flags, HELPER_FLAG) && self.is_by_this_program() {
            self.mount.locks.record_sent_handle(handle, self.header.pid);
        }
        if self.fs().is_shared() {
            // SharedFS may have sent the notification that the inode's attributes are stale before the kernel knew the
            // inode: the look-up that led here introduced it. So the kernel is made to ask for the attributes again.
            self.mount.kernel_cache.forget_attributes(inode);
        }
        Ok(ReplyAction::SendOpened(inode, handle))
    }

    fn has_set_id(&self) -> Result<bool, Errno> {
        Ok(self.fs().attributes(self.inode())?.inode.mode & (MODE_SETUID | MODE_SETGID) != 0)
    }

    /// Puts a new handle into the answer. While the lease holds, all pages that the kernel has are right: SharedFS made
    /// it forget the others.
    pub(crate) fn put_open(&mut self, inode: InodeId, flags: u32) -> Result<u64, Errno> {
        let mut open =
            OpenOut { fh: self.mount.next_handle.fetch_add(HANDLE_STEP, Ordering::Relaxed), ..OpenOut::default() };
        let is_direct = is_direct(flags) || self.is_shared_directly();
        let access = flags & libc::O_ACCMODE as u32;
        let reads_and_writes = access == libc::O_RDWR as u32;
        if access != libc::O_RDONLY as u32 {
            open.fh |= HANDLE_WRITES;
        }
        if reads_and_writes && (!is_direct || self.mount.agreement.maps_direct()) {
            open.fh |= HANDLE_MAPPABLE;
        }
        if is_direct {
            open.fh |= HANDLE_DIRECT;
            open.open_flags = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        } else if self.fs().cache_ttl_ms(inode) > 0 && !(reads_and_writes && self.fs().is_shared()) {
            open.open_flags = fopen::KEEP_CACHE;
            self.reply.record_cached(CachedItem::Pages(inode));
        }
        self.reply.structure(&open)?;
        if open.fh & HANDLE_WRITES != 0 {
            self.mount.write_handles.add(inode);
        }
        if open.fh & HANDLE_MAPPABLE != 0 {
            self.mount.kernel_cache.record_mappable(inode);
        }
        Ok(open.fh)
    }

    /// Records that pages of a file are about to be filled, or are written back.
    ///
    /// If a program may have mapped the file for writing, the kernel serves it from here on. Without another session no
    /// other process can have a lease on it.
    fn prepare_page_fill(&self, inode: InodeId) -> Result<(), Errno> {
        self.mount.kernel_cache.record_fill(inode);
        if !self.fs().is_shared() || !self.mount.kernel_cache.mappable.is_unreserved(inode) {
            return Ok(());
        }
        // A file without a name may get one, and only LibFS can give it, to a file of its own. If the file were
        // reserved, it could get none.
        if self.fs().attributes(inode).is_ok_and(|found| found.inode.links == 0) {
            return Ok(());
        }
        self.mount.kernel_cache.mappable.reserve_once(inode, || self.fs().reserve(inode, ReserveReason::Mapped))
    }

    /// Whether the caller is a process of this program, as a helper is.
    fn is_by_this_program(&self) -> bool {
        // The cached identity is enough. The program may lie on this very mount, and asking for more would send a
        // request here.
        let how = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let identity = |path: &str| {
            let found = rustix::fs::statx(CWD, path, how, StatxFlags::INO);
            found.map(|found| (found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
        };
        // A helper runs as this process's own user. For other users the check is not worth its time.
        self.header.uid == rustix::process::geteuid().as_raw()
            && identity(&format!("/proc/{}/exe", self.header.pid))
                .is_ok_and(|found| identity("/proc/self/exe").is_ok_and(|own| own == found))
    }

    /// Whether handles bypass the kernel's pages because other mounts may change files.
    ///
    /// The kernel asks for attributes before it reads from its pages. If it is made to forget them before it has taken
    /// the answer, it uses the size and the pages that it has. Two leases that move in a row would then show the state
    /// before the first move.
    fn is_shared_directly(&self) -> bool {
        self.mount.agreement.maps_direct() && self.fs().is_shared()
    }

    /// READ.
    pub(crate) fn read(mut self) -> RequestResult {
        let asked: ReadIn = self.arguments.structure()?;
        let inode = self.inode();
        let size = (asked.size as usize).min(TRANSFER_BYTES);
        // A mapping through a handle that bypasses pages fills pages all the same.
        if asked.fh & HANDLE_DIRECT == 0 || asked.read_flags & READ_LOCKOWNER == 0 {
            self.prepare_page_fill(inode)?;
        }
        let buffer = self.reply.space(size)?;
        let count = self.mount.file_system.read(inode, asked.offset, buffer)?;
        self.reply.fill(count.min(size));
        if asked.fh & HANDLE_DIRECT == 0 {
            self.reply.record_cached(CachedItem::Pages(inode));
        }
        Ok(ReplyAction::Send)
    }

    /// WRITE.
    pub(crate) fn write(mut self) -> RequestResult {
        let asked: WriteIn = self.arguments.structure()?;
        let data = self.arguments.bytes(asked.size)?;
        let inode = self.inode();
        // The kernel writes back the pages of a mapping through the handle that made it, even if that handle bypasses
        // pages. Such pages must not be dropped before the answer: the kernel would wait for the end of their writing.
        let is_page = asked.write_flags & WRITE_CACHE != 0;
        let direct = asked.fh & HANDLE_DIRECT != 0 && !is_page;
        let appends = has(asked.flags, libc::O_APPEND) && !is_page && !self.writes_at_offset(asked.offset)?;
        let at = if appends { WriteAt::End } else { WriteAt::Offset(asked.offset) };
        let strip = asked.write_flags & WRITE_KILL_SUIDGID != 0;
        let loses_set_id = strip && self.has_set_id()?;
        if !direct {
            self.prepare_page_fill(inode)?;
        }
        // No one can tell which process wrote into a mapping. So the write counts as an ordinary user's, to which
        // quotas apply.
        let credentials = if is_page { Credentials::checked(NOBODY, NOBODY) } else { self.credentials() };
        let Written { offset, bytes } = self.fs().write(&credentials, inode, at, data, strip)?;
        if is_page && bytes < data.len() {
            // The kernel takes all of the pages for written, whatever number the reply has.
            return Err(Errno::ENOSPC);
        }
        // After a write the kernel asks for size and times again, but not for the mode. If the write was asynchronous,
        // it may have asked in between.
        if loses_set_id || has(asked.flags, libc::O_DIRECT) {
            self.mount.kernel_cache.forget_attributes(inode);
        }
        if offset != asked.offset {
            let pages = Pages::Range { offset: offset.min(asked.offset), length: 0 };
            self.mount.kernel_cache.invalidations.push_stale(StaleItem::Inode(inode, pages));
        }
        // For its own pages the kernel asks for FSYNC itself.
        if direct && has(asked.flags, libc::O_DSYNC) {
            self.fs().sync_inode(inode)?;
        }
        let size = u32::try_from(bytes).map_err(|_| Errno::EIO)?;
        self.reply.structure(&WriteOut { size, padding: 0 })?;
        if direct && self.mount.kernel_cache.page_fills.must_drop(inode) {
            let reply = self.reply.seal(self.header.unique, Ok(()));
            self.mount.kernel_cache.invalidations.answer_without_pages(inode, self.route, reply);
            return Ok(ReplyAction::SendLater);
        }
        Ok(ReplyAction::Send)
    }

    /// Whether a write through an appending handle goes to its offset all the same (`RWF_NOAPPEND`), which the request
    /// does not say. The kernel sends an append to the end that it knows. If the offset is not the end, another session
    /// has moved the end, or the caller has asked for this offset.
    fn writes_at_offset(&self, offset: u64) -> Result<bool, Errno> {
        let size = self.fs().attributes(self.inode())?.inode.size;
        Ok(offset != size && ThreadCall::read(self.header.pid, APPEND_READS_MAX).writes_at_offset())
    }

    /// FLUSH, sent for each `close`. It ends record locks of the process, unless the process closes a descriptor that a
    /// helper opened and sent.
    pub(crate) fn flush(mut self) -> RequestResult {
        let asked: FlushIn = self.arguments.structure()?;
        let inode = self.inode();
        if self.mount.locks.take_sent_close(asked.fh, self.header.pid) {
            return Ok(ReplyAction::Send);
        }
        if self.mount.locks.forget_record_owner(inode, asked.lock_owner) {
            self.fs().release_locks(inode, asked.lock_owner, LockKind::Record)?;
        }
        Ok(ReplyAction::Send)
    }

    /// RELEASE, when the last descriptor of an open file is closed.
    pub(crate) fn release(mut self) -> RequestResult {
        let asked: ReleaseIn = self.arguments.structure()?;
        let inode = self.inode();
        for owner in self.mount.locks.forget_handle(inode, asked.fh) {
            // If SharedFS is gone for good, so are all locks.
            let _ = self.fs().release_locks(inode, owner, LockKind::Record);
        }
        let unlocked = if asked.release_flags & RELEASE_FLOCK_UNLOCK != 0 {
            self.fs().release_locks(inode, asked.fh, LockKind::Flock)
        } else {
            Ok(())
        };
        close_handle(self.mount, inode, asked.fh);
        unlocked.map(|()| ReplyAction::Send)
    }

    /// FSYNC and FSYNCDIR: makes all changes of the inode persistent, whether the mount or another session made them.
    pub(crate) fn fsync(self) -> RequestResult {
        self.fs().sync_inode(self.inode())?;
        Ok(ReplyAction::Send)
    }

    /// SYNCFS, which today's kernels do not send to a FUSE mount like this one.
    pub(crate) fn syncfs(self) -> RequestResult {
        self.fs().sync_all()?;
        Ok(ReplyAction::Send)
    }

    /// FALLOCATE.
    pub(crate) fn fallocate(mut self) -> RequestResult {
        let asked: FallocateIn = self.arguments.structure()?;
        let how = allocation_of(asked.mode as i32).ok_or(Errno::EOPNOTSUPP)?;
        let strip = self.strips();
        self.fs().allocate(&self.credentials(), self.inode(), how, asked.offset, asked.length, strip)?;
        Ok(ReplyAction::Send)
    }

    /// Whether a change of content clears set-id bits, if the protocol has no flag for it: for all users but the
    /// super-user.
    const fn strips(&self) -> bool {
        self.header.uid != 0
    }

    /// LSEEK, for `SEEK_DATA` and `SEEK_HOLE`; the kernel handles the others itself.
    pub(crate) fn lseek(mut self) -> RequestResult {
        let asked: LseekIn = self.arguments.structure()?;
        let what = match asked.whence as i32 {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno::EINVAL),
        };
        let (inode, offset) = (self.inode(), asked.offset);
        if self.mount.kernel_cache.mappable.may_be_dirty(inode) {
            let (unique, route) = (self.header.unique, self.route.clone());
            self.mount.kernel_cache.invalidations.answer_seek(SeekRequest { inode, what, offset, unique, route });
            return Ok(ReplyAction::SendLater);
        }
        let offset = self.fs().seek(inode, what, offset)?;
        self.reply.structure(&OffsetOut { offset })?;
        Ok(ReplyAction::Send)
    }

    /// COPY_FILE_RANGE, whose reply has 32 or 64 bits.
    pub(crate) fn copy_file_range(mut self, wide: bool) -> RequestResult {
        let asked: CopyFileRangeIn = self.arguments.structure()?;
        if asked.flags != 0 {
            return Err(Errno::EINVAL);
        }
        let strip = self.strips();
        let length = asked.len.min(COPY_BYTES_MAX);
        let to = InodeId(asked.nodeid_out);
        let copied =
            self.fs().copy_range(&self.credentials(), self.inode(), asked.off_in, to, asked.off_out, length, strip)?;
        if wide {
            self.reply.structure(&OffsetOut { offset: copied })?;
        } else {
            self.reply.structure(&WriteOut { size: u32::try_from(copied).map_err(|_| Errno::EIO)?, padding: 0 })?;
        }
        Ok(ReplyAction::Send)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_that_only_write_bypass_pages() {
        let flags = |flags: i32| is_direct(flags as u32);
        assert!(flags(libc::O_WRONLY | libc::O_APPEND));
        assert!(flags(libc::O_WRONLY));
        assert!(flags(libc::O_RDONLY | libc::O_DIRECT));
        assert!(!flags(libc::O_RDWR | libc::O_APPEND), "it may be read and mapped");
        assert!(!flags(libc::O_RDONLY));
    }
}
