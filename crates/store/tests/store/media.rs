//! Arenas for tests of the store: files with LMDB, and their twin in memory.

use std::path::Path;
use std::sync::Arc;

use ashlar_pmem::{Arena, ArenaOptions, CrashMedium, Persistent, SegmentInfo};
use ashlar_store::{MemoryArena, MemoryArenaOptions, Store};
use ashlar_types::{BLOCK_BYTES, BlockAddress, Timestamp};

/// Blocks of a segment in memory, whose twin takes several times its bytes.
const SEGMENT_BLOCKS_MAX: u64 = 4096;

/// Runs each of these tests on LMDB and on its twin in memory.
macro_rules! on_both_databases {
    ($($test:ident),* $(,)?) => {
        mod lmdb {
            $(
                #[test]
                fn $test() {
                    super::$test(super::TestMedium::Lmdb);
                }
            )*
        }

        mod memory {
            $(
                #[test]
                fn $test() {
                    super::$test(super::TestMedium::Memory);
                }
            )*
        }
    };
}
pub(crate) use on_both_databases;

/// The medium of a test's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TestMedium {
    /// Files in memory, and LMDB.
    Lmdb,
    /// Persistent memory's twin, and LMDB's.
    Memory,
}

/// A formatted arena.
pub enum StoreTestArena {
    /// Files in a directory of the test's own.
    Files(Arc<Arena>, tempfile::TempDir),
    /// The twin.
    Memory(Arc<MemoryArena>),
}

impl StoreTestArena {
    /// Makes an arena. The twin has a quarter of the bytes.
    pub fn new(medium: TestMedium, size_bytes: u64) -> Self {
        match medium {
            TestMedium::Lmdb => {
                let memory = Path::new("/dev/shm");
                let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
                Self::in_directory(directory.unwrap(), size_bytes)
            }
            TestMedium::Memory => Self::twin(CrashMedium::Words, size_bytes),
        }
    }

    /// Makes an arena of files in this directory.
    pub fn in_directory(directory: tempfile::TempDir, size_bytes: u64) -> Self {
        let options = ArenaOptions::new(size_bytes);
        let arena = Arc::new(Arena::create(&directory.path().join("arena"), &options).unwrap());
        Store::format(&arena, Timestamp::default()).unwrap();
        Self::Files(arena, directory)
    }

    /// Makes a twin.
    pub fn twin(medium: CrashMedium, size_bytes: u64) -> Self {
        let (mut left, mut segment_blocks) = (size_bytes / 4 / BLOCK_BYTES, Vec::new());
        while left > 0 {
            let blocks = left.min(SEGMENT_BLOCKS_MAX);
            segment_blocks.push(blocks as u32);
            left -= blocks;
        }
        let arena = Arc::new(MemoryArena::new(&MemoryArenaOptions::new(medium, segment_blocks)));
        Store::format_in_memory(&arena, Timestamp::default()).unwrap();
        Self::Memory(arena)
    }

    /// Opens the store. It must not be open.
    pub fn open(&self) -> Store {
        match self {
            Self::Files(arena, _) => Store::open(Arc::clone(arena)).unwrap(),
            Self::Memory(arena) => Store::open_in_memory(Arc::clone(arena)).unwrap(),
        }
    }

    /// The segments.
    pub fn segments(&self) -> Vec<SegmentInfo> {
        match self {
            Self::Files(arena, _) => arena.segments(),
            Self::Memory(arena) => arena.segments(),
        }
    }

    /// Flips the bits of a block's byte behind the store's back.
    pub fn damage(&self, address: BlockAddress, within: u64) {
        use std::os::unix::fs::FileExt;
        let info = self.segments().into_iter().find(|info| info.number == address.segment()).unwrap();
        let (at, mut byte) = (info.block_offset(address.block()) + within, [0]);
        match self {
            Self::Files(arena, _) => {
                let file = arena.segment_file(info.number, true).unwrap();
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[!byte[0]], at).unwrap();
            }
            Self::Memory(arena) => {
                let memory = arena.segment_memory(info.number).unwrap();
                memory.load(at, &mut byte).unwrap();
                memory.store(at, &[!byte[0]]).unwrap();
            }
        }
    }
}

/// Chooses one of several contents that a crash may leave, by a number that follows from the seed (splitmix64).
pub fn choose(seed: &mut u64, choices: usize) -> usize {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *seed;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) >> 8) as usize % choices
}
