//! Data segments, mapped read-only, and their checksums.

use std::collections::HashMap;
use std::sync::Arc;

use ashlar_pmem::{Mapping, MappingAccess, OutOfBounds, Persistent};
use ashlar_types::{BLOCK_BYTES, Errno};
use ashlar_wire::{Reply, Request};
use parking_lot::RwLock;

use crate::LibFs;
use crate::api::Outcome;

const BLOCK: usize = BLOCK_BYTES as usize;

/// A data segment.
#[derive(Debug)]
pub(crate) struct Segment {
    mapping: Mapping,
    data_offset: u64,
}

impl Segment {
    /// Copies bytes that begin `skip` bytes behind the start of `block`, and may go on over the blocks behind it. `false`
    /// where a block does not match its checksum; every block is checked whole at every read.
    pub(crate) fn read(&self, block: u32, skip: u64, into: &mut [u8]) -> Result<bool, OutOfBounds> {
        let mut scratch = [0; BLOCK];
        let (mut block, mut skip, mut done) = (block, skip as usize, 0);
        while done < into.len() {
            let count = (BLOCK - skip).min(into.len() - done);
            let at = self.data_offset + u64::from(block) * BLOCK_BYTES;
            let is_good = if count == BLOCK {
                let whole = &mut into[done..done + BLOCK];
                self.mapping.copy_out(at, whole)?;
                self.matches(block, whole)?
            } else {
                self.mapping.copy_out(at, &mut scratch)?;
                into[done..done + count].copy_from_slice(&scratch[skip..skip + count]);
                self.matches(block, &scratch)?
            };
            if !is_good {
                return Ok(false);
            }
            done += count;
            skip = 0;
            block += 1;
        }
        Ok(true)
    }

    fn matches(&self, block: u32, data: &[u8]) -> Result<bool, OutOfBounds> {
        let mut expected = [0; 4];
        self.mapping.load(u64::from(block) * 4, &mut expected)?;
        Ok(u32::from_le_bytes(expected) == crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, data) as u32)
    }
}

/// The segments that were asked for so far.
#[derive(Debug, Default)]
pub(crate) struct Segments(RwLock<Mapped>);

#[derive(Debug, Default)]
struct Mapped {
    /// The era of segments in which they were asked for.
    era: u64,
    by_number: HashMap<u32, Arc<Segment>>,
}

impl Segments {
    /// Unmaps the segments of earlier eras: memory that the arena has given back is free only then.
    pub(crate) fn keep_current(&self, era: u64) {
        if self.0.read().era < era {
            let mut mapped = self.0.write();
            if mapped.era < era {
                *mapped = Mapped { era, by_number: HashMap::new() };
            }
        }
    }

    fn get(&self, number: u32, era: u64) -> Option<Arc<Segment>> {
        let mapped = self.0.read();
        if mapped.era == era { mapped.by_number.get(&number).cloned() } else { None }
    }
}

impl LibFs {
    /// A segment, mapped when it's first needed. Whether it is still that one shows the era of blocks, afterwards.
    pub(crate) fn segment(&self, number: u32) -> Outcome<Arc<Segment>> {
        let era = self.control.segment_era();
        if let Some(segment) = self.segments.get(number, era) {
            return Ok(segment);
        }
        self.segments.keep_current(era);
        let (reply, descriptors) = self.call_with(&Request::Segment(number), &[])?;
        let (Reply::Segment(info), Some(file)) = (reply, descriptors.first()) else { return Err(Errno::EIO) };
        let bytes = info.data_offset + u64::from(info.blocks) * BLOCK_BYTES;
        let mapping = Mapping::map(file, bytes, MappingAccess::ReadOnly, self.medium).map_err(|_| Errno::EIO)?;
        let segment = Arc::new(Segment { mapping, data_offset: info.data_offset });
        let mut mapped = self.segments.0.write();
        if mapped.era == era {
            mapped.by_number.insert(number, Arc::clone(&segment));
        }
        Ok(segment)
    }
}
