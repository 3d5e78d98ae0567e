//! Data segments, mapped for reading, and their block checksums.
//!
//! A process with limited address space needs it for itself: LibFS then reads segments by system calls.

use std::collections::HashMap;
use std::fs::File;
use std::hash::BuildHasherDefault;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ashlar_pmem::{Crc32c, MapError, Mapping, MappingAccess, Medium, OutOfBounds, replace_descriptor};
use ashlar_types::{BLOCK_BYTES, BlockAddress, Contents, InodeHasher, SegmentVersion};
use ashlar_wire::WelcomeSegment;
use rustix_futex_sync::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};

use crate::client::own_descriptors::{DescriptorPolicy, OwnDescriptor};

const BLOCK: usize = BLOCK_BYTES as usize;

/// The bytes of a segment's file.
#[derive(Debug)]
enum SegmentBytes {
    Mapped(Mapping),
    /// A file for which there is no address space.
    File {
        file: File,
        length: u64,
    },
}

impl SegmentBytes {
    fn of(file: &OwnedFd, length: u64, medium: Medium, least: i32) -> Result<Self, MapError> {
        if address_space().is_none() {
            match Mapping::map_above(file, length, MappingAccess::ReadOnly, medium, least) {
                Err(MapError::System(_) | MapError::TooMany) => {}
                mapped => {
                    let mapping = mapped?;
                    mapping.keep_from_children()?;
                    return Ok(Self::Mapped(mapping));
                }
            }
        }
        let moved = rustix::io::fcntl_dupfd_cloexec(file, least);
        let file = moved.or_else(|_| rustix::io::fcntl_dupfd_cloexec(file, 0)).map_err(std::io::Error::from)?;
        Ok(Self::File { file: file.into(), length })
    }

    #[inline]
    fn copy_out(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        match self {
            Self::Mapped(mapping) => mapping.copy_out(offset, into),
            Self::File { file, length } => read(file, *length, offset, into),
        }
    }

    #[inline]
    fn expect_copy_out(&self, offset: u64, bytes: u64) {
        if let Self::Mapped(mapping) = self {
            mapping.expect_copy_out(offset, bytes);
        }
    }

    fn file(&self) -> BorrowedFd<'_> {
        match self {
            Self::Mapped(mapping) => mapping.file(),
            Self::File { file, .. } => file.as_fd(),
        }
    }

    fn give_up_file(&self, instead: BorrowedFd<'_>) -> std::io::Result<()> {
        match self {
            Self::Mapped(mapping) => mapping.give_up_file(instead),
            Self::File { file, .. } => replace_descriptor(file.as_fd(), instead),
        }
    }
}

impl AsRawFd for SegmentBytes {
    fn as_raw_fd(&self) -> RawFd {
        self.file().as_raw_fd()
    }
}

#[cold]
fn read(file: &File, length: u64, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
    // If a process has truncated the file, the granted bytes are gone.
    let read = file.read_exact_at(into, offset);
    // As behind a copy: the checks that follow must not read memory earlier.
    fence(Ordering::Acquire);
    read.map_err(|_| OutOfBounds { offset, length: into.len() as u64, available: length })
}

/// Returns how much address space the process may have, in bytes; `None` if it is not limited.
pub(crate) fn address_space() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::As).current
}

/// A data segment.
#[derive(Debug)]
pub(crate) struct MappedSegment {
    bytes: OwnDescriptor<SegmentBytes>,
    data_offset: u64,
    /// A bit for each block: the block matched its checksum since it was last granted.
    verified: Box<[AtomicU64]>,
}

impl MappedSegment {
    /// Opens a segment by its file.
    pub(crate) fn new(
        file: &OwnedFd,
        info: &WelcomeSegment,
        medium: Medium,
        own: DescriptorPolicy,
    ) -> Result<Self, MapError> {
        let bytes = info.data_offset + u64::from(info.blocks) * BLOCK_BYTES;
        let bytes = OwnDescriptor::new(SegmentBytes::of(file, bytes, medium, own.from)?, own);
        let verified = (0..info.blocks.div_ceil(u64::BITS)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { bytes, data_offset: info.data_offset, verified })
    }

    /// Copies bytes that begin `skip` bytes behind the start of `block`, possibly over several blocks.
    ///
    /// `false` if a block does not match its checksum, which is verified at the first read under a grant.
    pub(crate) fn read(&self, block: u32, skip: u64, into: &mut [u8]) -> Result<bool, OutOfBounds> {
        let (mut block, mut skip, mut done) = (block, skip as usize, 0);
        while done < into.len() {
            let rest = into.len() - done;
            let blocks = (skip + rest).div_ceil(BLOCK) as u32;
            let good = (block..block.saturating_add(blocks)).take_while(|&block| self.is_verified(block)).count();
            let count = if good > 0 {
                let count = (good * BLOCK - skip).min(rest);
                self.bytes.copy_out(self.offset_of(block) + skip as u64, &mut into[done..done + count])?;
                count
            } else {
                let count = (BLOCK - skip).min(rest);
                if !self.read_first(block, skip, &mut into[done..done + count])? {
                    return Ok(false);
                }
                count
            };
            block = block.saturating_add(((skip + count) / BLOCK) as u32);
            skip = 0;
            done += count;
        }
        Ok(true)
    }

    /// Prefetches bytes that begin `skip` bytes behind the start of `block`, for a read that follows.
    pub(crate) fn prefetch_read(&self, block: u32, skip: u64, bytes: u64) {
        self.bytes.expect_copy_out(self.offset_of(block) + skip, bytes);
    }

    /// Copies bytes of one block that may not have been verified yet.
    ///
    /// It verifies a copy of its own: threads of the program may write to the caller's memory meanwhile.
    #[cold]
    fn read_first(&self, block: u32, skip: usize, into: &mut [u8]) -> Result<bool, OutOfBounds> {
        let mut copy = [0; BLOCK];
        self.bytes.copy_out(self.offset_of(block), &mut copy)?;
        if !self.matches(block, &copy)? {
            return Ok(false);
        }
        into.copy_from_slice(&copy[skip..skip + into.len()]);
        if let Some(word) = self.verified.get((block / u64::BITS) as usize) {
            word.fetch_or(1 << (block % u64::BITS), Ordering::Relaxed);
        }
        Ok(true)
    }

    /// Returns whether blocks match their checksums. It verifies only blocks that were not verified since they were
    /// granted.
    pub(crate) fn are_sound(&self, first: u32, blocks: u64) -> Result<bool, OutOfBounds> {
        let mut byte = [0];
        for block in (first..).take(blocks as usize).filter(|block| !self.is_verified(*block)).collect::<Vec<_>>() {
            if !self.read_first(block, 0, &mut byte)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The segment's file, which can only be read.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.bytes.file()
    }

    /// Returns a block's offset in the file, in bytes.
    pub(crate) fn offset_of(&self, block: u32) -> u64 {
        self.data_offset + u64::from(block) * BLOCK_BYTES
    }

    fn is_verified(&self, block: u32) -> bool {
        let word = self.verified.get((block / u64::BITS) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) & 1 << (block % u64::BITS) != 0)
    }

    /// Demands that blocks are verified again at their next read.
    ///
    /// A reader under an earlier grant that was stopped just then may mark one of them as verified.
    fn mark_unverified(&self, first: u32, blocks: u64) {
        let end = u64::from(first).saturating_add(blocks).min(self.verified.len() as u64 * u64::from(u64::BITS)) as u32;
        let mut at = first;
        while at < end {
            let (bit, index) = (at % u64::BITS, at / u64::BITS);
            let count = (u64::BITS - bit).min(end - at);
            let bits = u64::MAX >> (u64::BITS - count) << bit;
            self.verified[index as usize].fetch_and(!bits, Ordering::Relaxed);
            at += count;
        }
    }

    fn matches(&self, block: u32, data: &[u8]) -> Result<bool, OutOfBounds> {
        let mut expected = [0; 4];
        self.bytes.copy_out(u64::from(block) * 4, &mut expected)?;
        Ok(u32::from_le_bytes(expected) == Crc32c::of(data))
    }
}

/// The segments that LibFS has opened so far.
#[derive(Debug)]
pub(crate) struct Segments(RwLock<SegmentTable>);

#[derive(Debug, Default)]
struct SegmentTable {
    /// The segment version for which they were requested.
    version: SegmentVersion,
    by_number: HashMap<u32, MappedSegment, BuildHasherDefault<InodeHasher>>,
}

impl Segments {
    /// Returns the table with the segment that came with the session, for its segment version.
    pub(crate) fn new(version: SegmentVersion, first: Option<(u32, MappedSegment)>) -> Self {
        Self(RwLock::new(SegmentTable { version, by_number: first.into_iter().collect() }))
    }

    /// Unmaps the segments of earlier versions: memory that the arena has given back is free only then.
    pub(crate) fn keep_current(&self, version: SegmentVersion) {
        if self.0.read().version < version {
            let mut mapped = self.0.write();
            if mapped.version < version {
                *mapped = SegmentTable { version, by_number: HashMap::default() };
            }
        }
    }

    /// Gives up all segments' files, for good.
    pub(crate) fn give_up_files(&self, instead: BorrowedFd<'_>) -> std::io::Result<()> {
        self.0.read().by_number.values().try_for_each(|segment| segment.bytes.give_up_file(instead))
    }

    /// Returns a segment, if it was opened for this version.
    pub(crate) fn find_segment(
        &self,
        number: u32,
        version: SegmentVersion,
    ) -> Option<MappedRwLockReadGuard<'_, MappedSegment>> {
        let mapped = self.0.read();
        RwLockReadGuard::try_map(
            mapped,
            |mapped| if mapped.version == version { mapped.by_number.get(&number) } else { None },
        )
        .ok()
    }

    /// Adds a segment that was requested for a version, unless another version has begun.
    pub(crate) fn add_segment(&self, number: u32, version: SegmentVersion, segment: MappedSegment) {
        let mut mapped = self.0.write();
        if mapped.version == version {
            mapped.by_number.insert(number, segment);
        }
    }

    /// Demands that the blocks of a newly granted file are verified at their first read.
    pub(crate) fn mark_unverified(&self, contents: &Contents) {
        let Contents::Extents(extents) = contents else { return };
        let mapped = self.0.read();
        for extent in extents {
            let found = extent.address.and_then(|at: BlockAddress| Some((at, mapped.by_number.get(&at.segment())?)));
            if let Some((address, segment)) = found {
                segment.mark_unverified(address.block(), extent.blocks);
            }
        }
    }
}
