//! Opening a store: its rows are read, and checked as far as a use of it depends on them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use ashlar_pmem::Arena;
use ashlar_types::{InodeId, NodeNumber, SessionId, Timestamp};

use crate::blocks::allocator::{Allocator, Freer};
use crate::database::{Database, Snapshot};
use crate::files::mapped::Mapped;
use crate::format::format_database;
use crate::medium::{MemoryArena, StoreIdentity, StoreMedium};
use crate::metadata::batch::Batch;
use crate::metadata::inode_cache::InodeCache;
use crate::metadata::rows::{self, StoredCounters, Superblock, kind};
use crate::model::SessionState;
use crate::quotas::Quotas;
use crate::{Store, StoreError};

/// Replaces counters that can't be read: every request for a number is refused, since the row must be repaired first.
const COUNTERS_UNKNOWN: StoredCounters =
    StoredCounters { next_inode: u64::MAX >> 1, next_session: u64::MAX >> 1, reserved_blocks: 0 };

impl Store {
    /// Makes an empty shared area, with a root directory of this time, in an arena that has none.
    ///
    /// # Errors
    /// [`StoreError::Database`], [`StoreError::Map`]. An area that is there already is left as it is.
    pub fn format(arena: &Arena, at: Timestamp) -> Result<(), StoreError> {
        format_database(&Database::open(arena)?, StoreIdentity::of_arena(arena), at)
    }

    /// Makes an empty shared area like [`Self::format`], in memory.
    ///
    /// # Errors
    /// [`StoreError::Database`]. An area that is there already is left as it is.
    pub fn format_in_memory(arena: &MemoryArena, at: Timestamp) -> Result<(), StoreError> {
        format_database(&arena.open_database(), arena.identity(), at)
    }

    /// Opens the shared area of an arena, as of the last commit.
    ///
    /// # Errors
    /// [`StoreError::NotFormatted`], [`StoreError::WrongVersion`], [`StoreError::WrongArena`], [`StoreError::Copying`],
    /// [`StoreError::Corrupt`], and those of the arena and of the database.
    pub fn open(arena: Arc<Arena>) -> Result<Self, StoreError> {
        Self::open_on(StoreMedium::Arena(arena))
    }

    /// Opens the shared area of an arena in memory, as of the last commit.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in_memory(arena: Arc<MemoryArena>) -> Result<Self, StoreError> {
        Self::open_on(StoreMedium::Memory(arena))
    }

    pub(crate) fn open_on(medium: StoreMedium) -> Result<Self, StoreError> {
        let database = Arc::new(medium.open_database()?);
        let superblock = read_superblock(&database.snapshot()?, medium.identity())?.ok_or(StoreError::NotFormatted)?;
        if superblock.is_whole { Self::over(medium, database) } else { Err(StoreError::Copying) }
    }

    /// Opens the shared area over its database, whole or not.
    pub(crate) fn over(medium: StoreMedium, database: Arc<Database>) -> Result<Self, StoreError> {
        let snapshot = database.snapshot()?;
        let StoreIdentity { node, file_system, .. } = medium.identity();
        let found = match read_counters(&snapshot, node) {
            Err(StoreError::Corrupt(_)) => None,
            found => Some(found?),
        };
        let stored = found.unwrap_or(COUNTERS_UNKNOWN);
        let inode_end = snapshot.inode_end()?;
        let mut store = Self {
            committed_bytes: snapshot.used_bytes()?,
            medium,
            snapshot,
            seen: InodeCache::default(),
            database,
            node,
            hash_key: file_system.hash_key,
            active: Batch::default(),
            frozen: None,
            segments: BTreeMap::new(),
            allocator: Allocator::new(node),
            room_limit: None,
            mapped: Mapped::default(),
            sessions: HashMap::new(),
            changed_sessions: BTreeMap::new(),
            journals: BTreeMap::new(),
            changed_journals: BTreeSet::new(),
            counters: stored,
            stored,
            quotas: Quotas::default(),
            holdings: std::cell::RefCell::default(),
            readers: Arc::default(),
            copies: Vec::new(),
            poisoned: false,
            damaged: false,
            batches: 0,
            damaged_blocks: 0,
            freer: Freer::NOBODY,
            touched: false,
            absent_inode: std::cell::Cell::new(None),
            absent_entry: std::cell::Cell::new(None),
            depths: std::cell::RefCell::default(),
            xattr_bytes: std::cell::RefCell::default(),
            inode_end,
        };
        for info in store.medium.segments() {
            store.add_segment(info)?;
        }
        store.load_rows()?;
        store.damaged |= found.is_none();
        if store.damaged {
            tracing::error!("the metadata is damaged; the arena needs `ashlar fsck`");
        }
        Ok(store)
    }

    /// Reads which blocks are used, and the sessions. Damaged rows leave a store that can be read, checked and
    /// repaired, and not changed.
    pub(crate) fn load_rows(&mut self) -> Result<(), StoreError> {
        self.damaged = false;
        self.xattr_bytes.get_mut().clear();
        self.depths.get_mut().clear();
        for row in self.snapshot.prefix(&[kind::BITMAP])? {
            let (key, value) = row?;
            let place = rows::split_key1(key).filter(|(_, rest)| rest.is_empty());
            let known = place.is_some_and(|(place, _)| self.allocator.load((place >> 32) as u32, place as u32, value));
            self.damaged |= !known;
        }
        for row in self.snapshot.prefix(&[kind::SESSION])? {
            let (key, value) = row?;
            match rows::decode_session(key, value) {
                Some((session, generation, position)) => {
                    let state = SessionState { generation, applied: position, committed: position };
                    self.sessions.insert(session, state);
                }
                None => self.damaged = true,
            }
        }
        self.journals.clear();
        for row in self.snapshot.prefix(&[kind::JOURNAL])? {
            let (key, value) = row?;
            match rows::decode_journal_mark(key, value) {
                Some((node, mark)) => _ = self.journals.insert(node, mark),
                None => self.damaged = true,
            }
        }
        self.quotas = Quotas::default();
        for row in self.snapshot.prefix(&[kind::QUOTA])? {
            let (key, value) = row?;
            match rows::decode_quota(key, value) {
                Some((key, used, limits)) => self.quotas.load(key, used, limits),
                None => self.damaged = true,
            }
        }
        Ok(())
    }
}

/// Reads the superblock row of an arena's store; `None` if there is none.
pub(crate) fn read_superblock(snapshot: &Snapshot, identity: StoreIdentity) -> Result<Option<Superblock>, StoreError> {
    let Some(superblock) = snapshot.get(&[kind::SUPERBLOCK])? else { return Ok(None) };
    let superblock = rows::decode_superblock(superblock).ok_or(StoreError::NotFormatted)?;
    if rows::FORMAT_VERSIONS.negotiate(superblock.versions).is_none() {
        return Err(StoreError::WrongVersion { found: superblock.versions, supported: rows::FORMAT_VERSIONS });
    }
    if superblock.arena != identity.id {
        return Err(StoreError::WrongArena { found: superblock.arena, expected: identity.id });
    }
    Ok(Some(superblock))
}

/// Reads the counters row of a node's store.
pub(crate) fn read_counters(snapshot: &Snapshot, node: NodeNumber) -> Result<StoredCounters, StoreError> {
    let row = snapshot.get(&[kind::COUNTERS])?;
    // The end of a node's numbers stands there when it has given out the last one.
    let is_of = |numbers: Range<u64>, next: u64| numbers.start <= next && next <= numbers.end;
    let is_sound = |counters: &StoredCounters| {
        is_of(InodeId::numbers_of(node), counters.next_inode)
            && is_of(SessionId::numbers_of(node), counters.next_session)
    };
    row.and_then(rows::decode_counters).filter(is_sound).ok_or(StoreError::Corrupt("the counters' row is damaged"))
}
