//! Reading, writing, seeking, copying and syncing files, by the slow path.

use std::sync::atomic::{Ordering, fence};

use ashlar_pmem::Persistent;
use ashlar_types::{
    BLOCK_BYTES, Credentials, Errno, FILE_SIZE_MAX, FileKind, Inode, InodeId, LogPosition, QuotaId, SessionId,
    blocks_for,
};
use ashlar_update::{Allocation, Update};
use ashlar_wire::{OperationKind, Reply, Request, SpaceReply};
use rustix_futex_sync::MappedRwLockReadGuard;

use crate::LibFs;
use crate::api::{Outcome, Seek, WriteAt, Written};
use crate::cache::file_map::FileMap;
use crate::cache::node::NodeState;
use crate::cache::pieces::PieceSource;
use crate::files::segments::MappedSegment;
use crate::leases::claim::Claim;
use crate::leases::grants::Stop;

/// The most data in one record: short enough for a small log to hold several records.
const RECORD_DATA_MAX: usize = 1 << 20;
/// Room for the fields of a write in front of its data.
const WRITE_FIELDS_BYTES: u64 = 64;
/// How many seconds an access time may lie behind before a read updates it (`relatime`).
const RELATIME_SECONDS: i64 = 24 * 60 * 60;
/// How often LibFS requests a block with a wrong checksum again: SharedFS may have been rewriting it.
const CHECKSUM_ATTEMPTS: u32 = 3;

/// Why a copy failed.
pub(crate) enum ReadStop {
    /// The bytes on the medium are not the written ones.
    Corrupt,
    Errno(Errno),
}

impl From<Errno> for ReadStop {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl LibFs {
    /// Reads into `buffer`; returns fewer bytes than asked for only at the end of the file.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`; `EIO` if the medium does not hold the written bytes.
    pub fn read(&self, id: InodeId, offset: u64, buffer: &mut [u8]) -> Outcome<usize> {
        let _measured = self.begin_operation(OperationKind::Read);
        let mut attempts = 0;
        loop {
            let guard = self.view_node(Claim::read(id).with_contents())?;
            let inode = guard.inode.as_ref().ok_or(Errno::ESTALE)?;
            match inode.kind {
                FileKind::Regular => {}
                FileKind::Directory => return Err(Errno::EISDIR),
                _ => return Err(Errno::EINVAL),
            }
            let length = inode.size.saturating_sub(offset).min(buffer.len() as u64);
            let content = guard.content.as_ref().ok_or(Errno::EIO)?;
            let copied = self.copy_out(content, offset, &mut buffer[..length as usize], 0);
            fence(Ordering::Acquire);
            // The copy counts if, after it, the lease held and the extent version was the map's: no process could
            // change the file or free its blocks.
            if !self.holds_lease(&guard, false) || !content.is_current(self.control.extent_version()) {
                continue;
            }
            match copied {
                Ok(()) => {
                    let touch = length > 0 && is_access_time_due(inode);
                    drop(guard);
                    if touch {
                        self.touch_accessed(id)?;
                    }
                    return Ok(length as usize);
                }
                Err(ReadStop::Errno(errno)) => return Err(errno),
                Err(ReadStop::Corrupt) => {
                    attempts += 1;
                    if attempts >= CHECKSUM_ATTEMPTS {
                        tracing::error!(inode = id.0, offset, length, "data do not match their checksum");
                        return Err(Errno::EIO);
                    }
                    drop(guard);
                    self.forget_content(id);
                }
            }
        }
    }

    /// Returns how many of `length` bytes the file has from an offset on.
    ///
    /// A read of these bytes that follows needs no further request.
    ///
    /// # Errors
    /// As [`LibFs::read`].
    pub fn readable_bytes(&self, id: InodeId, offset: u64, length: usize) -> Outcome<usize> {
        let _using = self.enter_operation();
        let guard = self.view_node(Claim::read(id).with_contents())?;
        let size = guard.inode.as_ref().ok_or(Errno::ESTALE)?.size;
        Ok(length.min(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX)))
    }

    /// Copies bytes out of a file's map; prefetches up to `ahead` bytes that follow them in the same piece.
    pub(crate) fn copy_out(
        &self,
        content: &FileMap,
        offset: u64,
        buffer: &mut [u8],
        ahead: u64,
    ) -> Result<(), ReadStop> {
        let end = offset + buffer.len() as u64;
        content.walk_parts(offset, end, |at, length, found| {
            let into = &mut buffer[(at - offset) as usize..(at - offset + length) as usize];
            let Some((piece, from)) = found else {
                into.fill(0);
                return Ok(());
            };
            match &piece.source {
                PieceSource::Inline(bytes, index) => {
                    let index = index + from as usize;
                    into.copy_from_slice(bytes.get(index..index + into.len()).ok_or(Errno::EIO)?);
                }
                PieceSource::Withheld => return Err(ReadStop::Errno(Errno::EACCES)),
                PieceSource::Log { record, body } => {
                    if !piece.is_verified() {
                        self.verify_record(*record)?;
                        piece.set_verified();
                    }
                    self.log.read(body.plus(from), into).map_err(|_| ReadStop::Errno(Errno::EIO))?;
                }
                PieceSource::Segment { block, skip } => {
                    let (block, skip) = (block.plus((skip + from) / BLOCK_BYTES), (skip + from) % BLOCK_BYTES);
                    let segment = self.segment(block.segment())?;
                    if !segment.read(block.block(), skip, into).map_err(|_| Errno::EIO)? {
                        return Err(ReadStop::Corrupt);
                    }
                    if ahead > 0 && at + length == end {
                        segment.prefetch_read(block.block(), skip + length, ahead.min(piece.length - from - length));
                    }
                }
            }
            Ok(())
        })
    }

    /// Returns a segment; maps it at the first use.
    ///
    /// Afterwards the extent version shows whether it is still the same segment.
    pub(crate) fn segment(&self, number: u32) -> Outcome<MappedRwLockReadGuard<'_, MappedSegment>> {
        loop {
            let version = self.control.segment_version();
            if let Some(segment) = self.segments.find_segment(number, version) {
                return Ok(segment);
            }
            self.segments.keep_current(version);
            let (reply, descriptors) = self.call_with(&Request::Segment(number))?;
            let (Reply::Segment(info), Some(file)) = (reply, descriptors.first()) else { return Err(Errno::EIO) };
            let segment = MappedSegment::new(file, &info, self.medium, self.descriptors).map_err(|_| Errno::EIO)?;
            self.segments.add_segment(number, version, segment);
        }
    }

    /// Checks a whole record in the session's own log, for its first reader.
    #[cold]
    fn verify_record(&self, record: LogPosition) -> Result<(), ReadStop> {
        self.log.verify(record).map_err(|_| ReadStop::Corrupt)
    }

    fn forget_content(&self, id: InodeId) {
        if let Some(node) = self.nodes.existing(id) {
            node.write().content = None;
        }
    }

    fn touch_accessed(&self, id: InodeId) -> Outcome<()> {
        let result = self.change_nodes(&[Claim::read(id)], |locked| {
            if !is_access_time_due(locked.inode(id)?) {
                return Ok(());
            }
            match locked.log_update(&Update::Accessed { inode: id, at: Self::now() }) {
                // A read does not wait for the replica.
                Err(Stop::Limited { .. }) => Ok(()),
                logged => logged.map(drop),
            }
        });
        match result {
            // If there is no room for a time, the read succeeds all the same.
            Err(Errno::ENOSPC | Errno::EDQUOT | Errno::ESTALE) => Ok(()),
            result => result,
        }
    }

    /// Returns the most data that one record takes.
    #[inline]
    pub(crate) fn record_data_max(&self) -> usize {
        RECORD_DATA_MAX.min(self.log.body_bytes_max().saturating_sub(WRITE_FIELDS_BYTES) as usize)
    }

    /// Writes `data`; returns where, and how many bytes.
    ///
    /// If the arena or a quota lacks room for all of it, LibFS writes the part that fits.
    ///
    /// # Errors
    /// `EINVAL`, `EISDIR`, `EFBIG`, `ENOSPC`, `EDQUOT`.
    pub fn write(&self, user: &Credentials, id: InodeId, at: WriteAt, data: &[u8], strip: bool) -> Outcome<Written> {
        self.write_within(user, id, at, data, strip, FILE_SIZE_MAX)
    }

    /// As [`LibFs::write`]; writes nothing beyond `limit`, in bytes from the file's beginning.
    ///
    /// # Errors
    /// As [`LibFs::write`]; `EFBIG` if the first byte lies at or beyond the limit.
    pub fn write_within(
        &self,
        user: &Credentials,
        id: InodeId,
        at: WriteAt,
        data: &[u8],
        strip: bool,
        limit: u64,
    ) -> Outcome<Written> {
        let _measured = self.begin_operation(OperationKind::Write);
        let limit = limit.min(FILE_SIZE_MAX);
        let mut start = None;
        let (mut written, mut length) = (0_usize, data.len());
        let mut most = self.record_data_max();
        loop {
            let mut tried = (0, 0);
            let result = self.change_nodes(&[Claim::write(id).with_contents().with_xattrs()], |locked| {
                locked.act_for(user);
                let inode = locked.inode(id)?;
                check_regular(inode)?;
                let offset = match (start, at) {
                    (Some(start), _) => start + written as u64,
                    (None, WriteAt::Offset(offset)) => offset,
                    (None, WriteAt::End) => inode.size,
                };
                let room = usize::try_from(limit.saturating_sub(offset)).unwrap_or(usize::MAX);
                if room == 0 && length > 0 {
                    return Err(Errno::EFBIG.into());
                }
                length = length.min(written.saturating_add(room));
                let part = &data[written..length.min(written + most)];
                tried = (offset, part.len());
                if !part.is_empty() {
                    Self::drop_capabilities(locked, id)?;
                    locked.log_update(&Update::Write { inode: id, offset, at: Self::now(), strip, data: part })?;
                }
                Ok((offset, part.len()))
            });
            match result {
                Ok((offset, bytes)) => {
                    start.get_or_insert(offset);
                    written += bytes;
                }
                Err(errno @ (Errno::EDQUOT | Errno::ENOSPC)) => match (halve_write(tried.0, tried.1), start) {
                    (Some(less), _) => {
                        most = less;
                        continue;
                    }
                    (None, Some(offset)) => return Ok(Written { offset, bytes: written }),
                    (None, None) => return Err(errno),
                },
                // The kernel serves the file from now on. The front end asks it for the rest, not for all bytes once
                // more.
                Err(Errno::RESERVED) if start.is_some() => {
                    return Ok(Written { offset: start.unwrap_or(0), bytes: written });
                }
                Err(errno) => return Err(errno),
            }
            if written == length {
                return Ok(Written { offset: start.unwrap_or(0), bytes: written });
            }
        }
    }

    /// Reserves, punches, zeroes, collapses or inserts a range.
    ///
    /// # Errors
    /// `EINVAL`, `ENODEV`, `EISDIR`, `EFBIG`, `ENOSPC`, `EDQUOT`.
    pub fn allocate(
        &self,
        user: &Credentials,
        id: InodeId,
        how: Allocation,
        offset: u64,
        length: u64,
        strip: bool,
    ) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Write);
        let end = offset.checked_add(length).filter(|&end| end <= FILE_SIZE_MAX).ok_or(Errno::EFBIG)?;
        if length == 0 {
            return Err(Errno::EINVAL);
        }
        let moves = matches!(how, Allocation::Collapse | Allocation::Insert);
        if moves && (offset % BLOCK_BYTES != 0 || length % BLOCK_BYTES != 0) {
            return Err(Errno::EINVAL);
        }
        self.change_nodes(&[Claim::write(id).with_contents().with_xattrs()], |locked| {
            locked.act_for(user);
            let inode = locked.inode(id)?;
            match inode.kind {
                FileKind::Regular => {}
                FileKind::Directory => return Err(Errno::EISDIR.into()),
                FileKind::Fifo => return Err(Errno::ESPIPE.into()),
                _ => return Err(Errno::ENODEV.into()),
            }
            match how {
                Allocation::Collapse if end >= inode.size => return Err(Errno::EINVAL.into()),
                Allocation::Insert if offset >= inode.size => return Err(Errno::EINVAL.into()),
                Allocation::Insert if inode.size + length > FILE_SIZE_MAX => return Err(Errno::EFBIG.into()),
                Allocation::Insert => {
                    // Blocks that are reserved behind the file's end move too.
                    let content = locked.state(id)?.content.as_ref().ok_or(Errno::EIO)?;
                    if content.end_block() + length / BLOCK_BYTES > blocks_for(FILE_SIZE_MAX) {
                        return Err(Errno::EINVAL.into());
                    }
                }
                _ => {}
            }
            Self::drop_capabilities(locked, id)?;
            locked.log_update(&Update::Allocate { inode: id, how, offset, length, strip, at: Self::now() }).map(drop)
        })
    }

    /// Returns the next data or hole at or behind `offset`.
    ///
    /// Blocks that are taken up are data; the end of the file is a hole.
    ///
    /// # Errors
    /// `ENXIO` at or behind the end, or if no data follow.
    pub fn seek(&self, id: InodeId, what: Seek, offset: u64) -> Outcome<u64> {
        let _measured = self.begin_operation(OperationKind::Read);
        let guard = self.view_node(Claim::read(id).with_contents())?;
        let inode = guard.inode.as_ref().ok_or(Errno::ESTALE)?;
        check_regular(inode).map_err(|_| Errno::EINVAL)?;
        if offset >= inode.size {
            return Err(Errno::ENXIO);
        }
        let content = guard.content.as_ref().ok_or(Errno::EIO)?;
        match what {
            Seek::Data => content.seek(offset, true).ok_or(Errno::ENXIO),
            Seek::Hole => Ok(content.seek(offset, false).unwrap_or(inode.size)),
        }
    }

    /// Returns the offset that `lseek` sets for a file at offset `place`; `whence` as the C library numbers it.
    ///
    /// # Errors
    /// `EINVAL` before the beginning, beyond the largest offset, for a directory's end, and for another `whence`;
    /// `ENXIO` as [`LibFs::seek`], and for a directory's data and holes.
    pub fn seek_from(&self, id: InodeId, place: u64, offset: i64, whence: i32) -> Outcome<u64> {
        let from = |base: u64| (base as i64).checked_add(offset).ok_or(Errno::EINVAL);
        let to = match whence {
            libc::SEEK_SET => offset,
            libc::SEEK_CUR => from(place)?,
            libc::SEEK_END => {
                let inode = self.attributes(id)?.inode;
                // A directory's end is not known before it is read.
                if inode.is_directory() {
                    return Err(Errno::EINVAL);
                }
                from(inode.size)?
            }
            libc::SEEK_DATA | libc::SEEK_HOLE => {
                let what = if whence == libc::SEEK_DATA { Seek::Data } else { Seek::Hole };
                let offset = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
                if self.attributes(id)?.inode.is_directory() {
                    return Err(Errno::ENXIO);
                }
                return self.seek(id, what, offset);
            }
            _ => return Err(Errno::EINVAL),
        };
        u64::try_from(to).map_err(|_| Errno::EINVAL)
    }

    /// Copies up to `length` bytes between files, or within one; returns how many.
    ///
    /// In one file, the ranges may not overlap.
    ///
    /// # Errors
    /// `EINVAL`, `EISDIR`, `EFBIG`, `ENOSPC`, `EDQUOT`. After an error behind some copied bytes it returns their number
    /// instead.
    #[allow(clippy::too_many_arguments, reason = "the parameters of the system call")]
    pub fn copy_range(
        &self,
        user: &Credentials,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        length: u64,
        strip: bool,
    ) -> Outcome<u64> {
        self.copy_range_within(user, from, from_offset, to, to_offset, length, strip, FILE_SIZE_MAX)
    }

    /// As [`LibFs::copy_range`]; writes nothing beyond `limit`.
    ///
    /// # Errors
    /// As [`LibFs::copy_range`] and [`LibFs::write_within`].
    #[allow(clippy::too_many_arguments, reason = "the parameters of the system call")]
    pub fn copy_range_within(
        &self,
        user: &Credentials,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        length: u64,
        strip: bool,
        limit: u64,
    ) -> Outcome<u64> {
        let room = limit.min(FILE_SIZE_MAX).saturating_sub(to_offset);
        if room == 0 && length > 0 {
            return Err(Errno::EFBIG);
        }
        let length = length.min(room);
        let reach = |offset: u64| offset.checked_add(length).ok_or(Errno::EOVERFLOW);
        let (from_end, to_end) = (reach(from_offset)?, reach(to_offset)?);
        if from == to && from_offset < to_end && to_offset < from_end {
            return Err(Errno::EINVAL);
        }
        let mut buffer = vec![0; RECORD_DATA_MAX.min(length as usize)];
        let mut copied = 0;
        while copied < length {
            let step = (length - copied).min(RECORD_DATA_MAX as u64) as usize;
            let done = self.read(from, from_offset + copied, &mut buffer[..step]).and_then(|count| {
                let at = WriteAt::Offset(to_offset + copied);
                let written = self.write_within(user, to, at, &buffer[..count], strip, limit)?;
                Ok(written.bytes)
            });
            match done {
                Ok(0) => break,
                Ok(count) => copied += count as u64,
                Err(_) if copied > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(copied)
    }

    /// Makes earlier changes of an inode persistent, and all earlier changes of this session.
    ///
    /// It covers changes of the inode and of its names by any session. It also covers all changes that this session's
    /// changes depend on.
    ///
    /// # Errors
    /// `EIO` if the medium fails, or if the replica is away for too long.
    pub fn sync_inode(&self, id: InodeId) -> Outcome<()> {
        // The lease is checked first: a grant's dependencies are recorded before its lease is installed.
        // A replica has nothing that SharedFS has not journalled, this session's own log included.
        let is_leased = self.sync_needed && !self.is_replicated && self.is_leased(id);
        self.sync_after_request(|dependencies| match is_leased {
            true if dependencies.is_empty() => None,
            true => Some(Request::SyncDependencies(dependencies)),
            false => Some(Request::SyncInode { inode: id, dependencies }),
        })
    }

    /// Makes persistent all earlier changes of all sessions.
    ///
    /// # Errors
    /// As [`LibFs::sync_inode`].
    pub fn sync_all(&self) -> Outcome<()> {
        self.sync_after_request(|_| Some(Request::SyncAll))
    }

    /// Returns whether a lease keeps other sessions from an inode.
    ///
    /// Their earlier changes are among the dependencies that came with the lease.
    fn is_leased(&self, id: InodeId) -> bool {
        self.nodes.read_existing(id).is_some_and(|state| state.inode.is_some() && self.holds_lease(&state, false))
    }

    /// Makes the session's log persistent, after a request to SharedFS.
    ///
    /// `request` gets the session's dependencies, and returns the request if one is needed.
    fn sync_after_request(
        &self,
        request: impl FnOnce(Vec<(SessionId, LogPosition)>) -> Option<Request>,
    ) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Sync);
        self.check_alive()?;
        if !self.sync_needed && !self.is_replicated {
            return Ok(());
        }
        let unsynced: Vec<_> = self.dependencies.lock().unsynced.iter().map(|(s, p)| (*s, *p)).collect();
        if let Some(request) = request(unsynced.clone()) {
            self.call(&request)?;
            let mut dependencies = self.dependencies.lock();
            for (session, position) in unsynced {
                if dependencies.unsynced.get(&session) == Some(&position) {
                    dependencies.unsynced.remove(&session);
                }
            }
        }
        if !self.sync_needed {
            return Ok(());
        }
        // The lease table must last too: whose session the log is, and the numbers and the credit that its records use.
        // After a loss of power SharedFS cuts a log where a grant is missing. These records have been granted theirs.
        let granted = self.means_granted.load(Ordering::Acquire);
        if self.means_lasting.load(Ordering::Acquire) < granted {
            self.leases.memory().sync().map_err(|_| Errno::EIO)?;
            self.means_lasting.fetch_max(granted, Ordering::AcqRel);
        }
        self.log.memory().sync().map_err(|_| Errno::EIO)?;
        // The disk takes its time; meanwhile SharedFS may have fenced the session.
        self.check_alive()
    }

    /// Returns the free and total space that an inode may use: within the limits of its subtree.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away, or the session is fenced.
    pub fn space(&self, id: InodeId) -> Outcome<SpaceReply> {
        self.check_alive()?;
        let subtree = self.find_inode(id).map_or(QuotaId::NONE, |found| found.inode.quota);
        match self.call(&Request::Space { subtree })? {
            Reply::Space(space) => Ok(space),
            _ => Err(Errno::EIO),
        }
    }
}

/// Fails if so many bytes can't be copied from one file offset to another.
///
/// Offsets are as `copy_file_range` gets them; negative ones are large numbers. The order of the errors is the
/// kernel's, also if nothing is left to copy.
///
/// # Errors
/// `EOVERFLOW`, `EFBIG`, `EINVAL`.
pub fn check_copied_range(from: u64, to: u64, bytes: u64) -> Outcome<()> {
    if [from, to].iter().any(|offset| offset.checked_add(bytes).is_none()) {
        return Err(Errno::EOVERFLOW);
    }
    match to {
        FILE_SIZE_MAX => Err(Errno::EFBIG),
        _ if from.max(to) > FILE_SIZE_MAX => Err(Errno::EINVAL),
        _ => Ok(()),
    }
}

/// Returns the operation that `fallocate` does with this mode; `None` for an unknown mode.
#[must_use]
pub fn allocation_of(mode: i32) -> Option<Allocation> {
    match mode {
        0 => Some(Allocation::Reserve),
        libc::FALLOC_FL_KEEP_SIZE => Some(Allocation::ReserveKeepSize),
        mode if mode == libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE => Some(Allocation::Punch),
        libc::FALLOC_FL_ZERO_RANGE => Some(Allocation::Zero),
        mode if mode == libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE => Some(Allocation::ZeroKeepSize),
        libc::FALLOC_FL_COLLAPSE_RANGE => Some(Allocation::Collapse),
        libc::FALLOC_FL_INSERT_RANGE => Some(Allocation::Insert),
        _ => None,
    }
}

/// Returns about half of a write for which there was no room, up to the end of a block.
///
/// `None` if the write lies in one block.
fn halve_write(offset: u64, length: usize) -> Option<usize> {
    let middle = (offset + length as u64 / 2) / BLOCK_BYTES * BLOCK_BYTES;
    let end = middle.max((offset / BLOCK_BYTES + 1) * BLOCK_BYTES);
    (end < offset + length as u64).then_some((end - offset) as usize)
}

fn check_regular(inode: &Inode) -> Result<(), Stop> {
    match inode.kind {
        FileKind::Regular => Ok(()),
        FileKind::Directory => Err(Errno::EISDIR.into()),
        _ => Err(Errno::EINVAL.into()),
    }
}

/// Returns whether an access updates the access time (`relatime`).
///
/// It does if the time is not newer than the last change, or a day old.
pub(crate) fn is_access_time_due(inode: &Inode) -> bool {
    inode.accessed <= inode.modified
        || inode.accessed <= inode.changed
        || inode.accessed.seconds.saturating_add(RELATIME_SECONDS) < LibFs::coarse_now().seconds
}

impl NodeState {
    /// Returns whether the inode has no link left.
    pub(crate) fn is_orphan(&self) -> bool {
        self.inode.as_ref().is_some_and(|inode| inode.links == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fallocate_mode_maps_to_its_operation() {
        let modes = [0, 1, 3, 0x10, 0x11, 0x08, 0x20];
        let meanings = modes.map(|mode| allocation_of(mode).unwrap() as u8);
        assert_eq!(meanings, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(allocation_of(2), None, "a hole cannot change the size");
        assert_eq!(allocation_of(0x40), None);
    }
}
