//! Tests of the log as a whole; what belongs to one module is tested there.

mod basics;
mod crashes;

mod hostile;
mod threads;

use ashlar_pmem::{CrashMedium, CrashTwin, Mapping, MappingAccess, Medium, Persistent};
use ashlar_types::{LogGeneration, LogPosition};

use crate::Log;
use crate::layout::RING_AT;

pub(crate) const GENERATION: LogGeneration = LogGeneration(3);
pub(crate) const KEY: u64 = 0x5eed;

/// A log in the heap, single-threaded tests' own.
pub(crate) fn log(ring_bytes: u64) -> Log<CrashTwin> {
    let twin = CrashTwin::new(CrashMedium::Words, (RING_AT + ring_bytes) as usize);
    Log::format_with_key(twin, GENERATION, KEY).unwrap()
}

/// Two mappings of one file, as session and SharedFS have them.
pub(crate) fn mappings(ring_bytes: u64, medium: Medium) -> [Mapping; 2] {
    let length = RING_AT + ring_bytes;
    let file =
        tempfile::tempfile_in(if std::path::Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" }).unwrap();
    file.set_len(length).unwrap();
    [(), ()].map(|()| Mapping::map(&file, length, MappingAccess::ReadWrite, medium).unwrap())
}

/// Everything in a range, or the reason why not.
pub(crate) fn records<M: Persistent>(
    log: &Log<M>,
    from: LogPosition,
    to: LogPosition,
) -> Result<Vec<crate::Record>, crate::Corrupt> {
    log.scan(from, to).collect()
}

/// Numbers that only look random: splitmix64.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
