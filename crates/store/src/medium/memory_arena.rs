//! The twin of an arena: all of a store in memory, and the states that a crash may leave.
//!
//! Blocks are in crash twins ([`CrashTwin`]), rows in a [`MemoryDatabase`]. There is no file, no clock and no
//! randomness: the same calls leave the same bytes, and a crash leaves what its caller chooses.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ashlar_pmem::{CrashMedium, CrashTwin, MediumKind, OutOfBounds, Persistent, SegmentInfo};
use ashlar_types::{FileSystemId, FileSystemIdentity, NameHashKey, NodeNumber};

use super::StoreIdentity;
use crate::database::{Database, MemoryDatabase};

/// How to make an arena in memory.
#[derive(Clone, Debug)]
pub struct MemoryArenaOptions {
    /// The arena's number.
    pub id: u64,
    /// The node whose arena it is.
    pub node: NodeNumber,
    /// The file system that the arena is a part of.
    pub file_system: FileSystemIdentity,
    /// How its memory survives a crash.
    pub medium: CrashMedium,
    /// The blocks of each segment.
    pub segment_blocks: Vec<u32>,
}

impl MemoryArenaOptions {
    /// Returns the options of arena 1, of the first node of file system 1. All such arenas hash names alike.
    #[must_use]
    pub const fn new(medium: CrashMedium, segment_blocks: Vec<u32>) -> Self {
        let file_system = FileSystemIdentity { id: FileSystemId(1), hash_key: NameHashKey([7; 16]) };
        Self { id: 1, node: NodeNumber::FIRST, file_system, medium, segment_blocks }
    }
}

/// The callback of [`MemoryArena::on_persist`].
pub type PersistObserver = Box<dyn FnMut(&MemoryArena) + Send>;

/// An arena in memory, which outlives the stores that work on it.
pub struct MemoryArena {
    identity: StoreIdentity,
    medium: CrashMedium,
    segments: Mutex<BTreeMap<u32, SegmentTwin>>,
    database: Arc<MemoryDatabase>,
    observer: Mutex<Option<PersistObserver>>,
}

#[derive(Clone, Debug)]
struct SegmentTwin {
    info: SegmentInfo,
    twin: Arc<CrashTwin>,
}

impl fmt::Debug for MemoryArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryArena")
            .field("identity", &self.identity)
            .field("segments", &self.segments)
            .finish_non_exhaustive()
    }
}

/// Locks. Neither the list of segments nor the observer is ever half changed, so a panic is not passed on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryArena {
    /// Makes an arena of zeros without a shared area.
    #[must_use]
    pub fn new(options: &MemoryArenaOptions) -> Self {
        let &MemoryArenaOptions { id, node, file_system, .. } = options;
        let arena =
            Self::with(StoreIdentity { id, node, file_system }, options.medium, BTreeMap::new(), MemoryDatabase::new());
        for &blocks in &options.segment_blocks {
            arena.add_segment(blocks);
        }
        arena
    }

    fn with(
        identity: StoreIdentity,
        medium: CrashMedium,
        segments: BTreeMap<u32, SegmentTwin>,
        database: MemoryDatabase,
    ) -> Self {
        Self {
            identity,
            medium,
            segments: Mutex::new(segments),
            database: Arc::new(database),
            observer: Mutex::new(None),
        }
    }

    /// The arena's number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.identity.id
    }

    /// The node whose arena it is.
    #[must_use]
    pub fn node(&self) -> NodeNumber {
        self.identity.node
    }

    /// The file system that the arena is a part of.
    #[must_use]
    pub fn file_system(&self) -> FileSystemIdentity {
        self.identity.file_system
    }

    pub(crate) fn identity(&self) -> StoreIdentity {
        self.identity
    }

    /// The kind of a medium that survives crashes as this one does.
    #[must_use]
    pub fn kind(&self) -> MediumKind {
        match self.medium {
            CrashMedium::Words => MediumKind::Pmem,
            CrashMedium::Pages => MediumKind::Disk,
        }
    }

    /// The segments, in the order of their numbers.
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentInfo> {
        lock(&self.segments).values().map(|segment| segment.info).collect()
    }

    /// Adds a segment of zeros. A store takes it into use with [`crate::Store::add_segment`].
    pub fn add_segment(&self, blocks: u32) -> SegmentInfo {
        let mut segments = lock(&self.segments);
        let number = segments.last_key_value().map_or(0, |(last, _)| last + 1);
        let info = SegmentInfo { number, blocks };
        let twin = Arc::new(CrashTwin::new(self.medium, info.file_bytes() as usize));
        segments.insert(number, SegmentTwin { info, twin });
        info
    }

    /// Removes a segment. Returns `false` if there is none of this number.
    pub fn remove_segment(&self, number: u32) -> bool {
        lock(&self.segments).remove(&number).is_some()
    }

    /// The memory of a segment: the checksums of its blocks, then the blocks.
    #[must_use]
    pub fn segment_memory(&self, number: u32) -> Option<Arc<CrashTwin>> {
        lock(&self.segments).get(&number).map(|segment| Arc::clone(&segment.twin))
    }

    /// The rows, whose commits can be planned to fail.
    #[must_use]
    pub fn database(&self) -> &MemoryDatabase {
        &self.database
    }

    pub(crate) fn open_database(&self) -> Database {
        Database::Memory(Arc::clone(&self.database))
    }

    /// Calls `observer` at every flush, fence and sync of a segment, just before it takes effect.
    ///
    /// A crash there ([`Self::after_crash`]) is the worst of the moments since the persist point before. Crashes around
    /// a commit of the rows are planned in [`Self::database`], which can also be observed in the middle of a commit.
    pub fn on_persist(&self, observer: PersistObserver) {
        *lock(&self.observer) = Some(observer);
    }

    /// Stops calling the observer.
    pub fn stop_observing(&self) {
        *lock(&self.observer) = None;
    }

    /// Returns the arena that a loss of power at this moment leaves.
    ///
    /// `choose` is called for every unsettled word or page of the segments, as by [`CrashTwin::after_crash`]. The rows
    /// are those of the last commit; in the middle of one, `choose` is called for them too.
    #[must_use]
    pub fn after_crash(&self, choose: &mut dyn FnMut(usize) -> usize) -> Self {
        let crash = |(number, segment): (&u32, &SegmentTwin)| {
            (*number, SegmentTwin { info: segment.info, twin: Arc::new(segment.twin.after_crash(choose)) })
        };
        let segments = lock(&self.segments).iter().map(crash).collect();
        Self::with(self.identity, self.medium, segments, self.database.after_crash(choose))
    }

    /// Returns the arena that the death of the process leaves: all stored bytes and committed rows are there.
    ///
    /// Bytes that were not settled are still not. The arena shares nothing with this one.
    #[must_use]
    pub fn after_process_death(&self) -> Self {
        let copy = |(number, segment): (&u32, &SegmentTwin)| {
            (*number, SegmentTwin { info: segment.info, twin: Arc::new(segment.twin.copy()) })
        };
        let segments = lock(&self.segments).iter().map(copy).collect();
        Self::with(self.identity, self.medium, segments, self.database.after_crash(&mut |_| 0))
    }

    /// Calls the observer. It is taken out meanwhile, so it does not see its own operations.
    fn report_persist(&self) {
        let observer = lock(&self.observer).take();
        if let Some(mut observer) = observer {
            observer(self);
            lock(&self.observer).get_or_insert(observer);
        }
    }
}

/// A store's way to the memory of a segment.
#[derive(Debug)]
pub struct TwinMemory {
    arena: Arc<MemoryArena>,
    twin: Arc<CrashTwin>,
}

impl TwinMemory {
    /// Opens a segment's memory. `None` if there is no segment of this number.
    pub fn open(arena: &Arc<MemoryArena>, number: u32) -> Option<Self> {
        let twin = arena.segment_memory(number)?;
        Some(Self { arena: Arc::clone(arena), twin })
    }
}

impl Persistent for TwinMemory {
    fn len(&self) -> u64 {
        self.twin.len()
    }

    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.twin.load(offset, into)
    }

    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.twin.store(offset, bytes)
    }

    fn load_u64(&self, offset: u64) -> Result<u64, OutOfBounds> {
        self.twin.load_u64(offset)
    }

    fn store_u64(&self, offset: u64, value: u64) -> Result<(), OutOfBounds> {
        self.twin.store_u64(offset, value)
    }

    fn compare_exchange_u64(&self, offset: u64, current: u64, new: u64) -> Result<Result<u64, u64>, OutOfBounds> {
        self.twin.compare_exchange_u64(offset, current, new)
    }

    fn flush(&self, offset: u64, length: u64) -> Result<(), OutOfBounds> {
        self.arena.report_persist();
        self.twin.flush(offset, length)
    }

    /// Waits for the flushes of all segments, as the processor's fence does.
    fn fence(&self) {
        self.arena.report_persist();
        lock(&self.arena.segments).values().for_each(|segment| segment.twin.fence());
    }

    fn sync(&self) -> io::Result<()> {
        self.arena.report_persist();
        self.twin.sync()
    }
}
