//! Cached inodes: state under a lease, and changes that SharedFS has not committed.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use ashlar_types::{ExtentVersion, Inode, InodeHasher, InodeId, LogPosition, Name};
use ashlar_update::Entry;
use ashlar_wire::{HandleSlot, InodeState, LeaseWord, Need};
use lock_api::{ArcRwLockReadGuard, ArcRwLockWriteGuard};
use rustix_futex_sync::{RawRwLock, RwLock};

use crate::cache::children::{Children, PARTIAL_MAX};
use crate::cache::file_map::{DataChange, FileMap};

/// The lease under which a node's state was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    /// The lease is the grant cache's, not the session's own.
    pub(crate) is_published: bool,
    pub(crate) slot: u32,
    pub(crate) word: LeaseWord,
}

/// When SharedFS sent a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrantContext {
    /// The state includes the session's updates before this position.
    pub(crate) applied: LogPosition,
    /// The extent version at the time of the request.
    pub(crate) version: ExtentVersion,
    /// The count of evictions at the time of the request.
    pub(crate) evictions: u64,
}

impl GrantContext {
    /// Returns whether nodes still note all changes of this session that the state lacks.
    ///
    /// Changes before `forgotten` may not be noted any more.
    pub(crate) fn has_all_since(&self, forgotten: u64) -> bool {
        forgotten <= self.applied.0
    }
}

/// A change that the session has logged and SharedFS has not yet committed.
///
/// A state from SharedFS includes changes before its applied position. Later changes are applied to it again.
#[derive(Clone, Debug)]
pub(crate) enum NodeChange {
    Data(DataChange),
    Entry(Name, Option<Entry>),
    Xattr(Vec<u8>, Option<Vec<u8>>),
    /// A change of attributes only; the cached attributes are the newest.
    Attributes,
}

/// The state of a cached inode.
#[derive(Debug, Default)]
pub(crate) struct NodeState {
    pub(crate) lease: Option<Lease>,
    /// Attributes; `None` before the first grant.
    pub(crate) inode: Option<Inode>,
    pub(crate) children: Children,
    pub(crate) content: Option<FileMap>,
    pub(crate) xattrs: Option<BTreeMap<Vec<u8>, Vec<u8>>>,
    /// Changes in the order of their positions: each is noted under the lock under which its record was appended.
    pub(crate) changes: VecDeque<(LogPosition, NodeChange)>,
    /// Whether the dirty list has the node.
    pub(crate) is_dirty_listed: bool,
    /// This session has removed the inode. The node stays until that is committed, so that an older state is never
    /// taken for it.
    pub(crate) is_gone: bool,
    /// Names looked up here since the lease was granted.
    pub(crate) lookups: AtomicU32,
    /// The directory's names are requested one by one. All of them came with an earlier lease, which went before many
    /// were looked up.
    pub(crate) is_by_name: bool,
    /// SharedFS sends no list of the directory's names: the session's user may not read it.
    pub(crate) hides_entries: bool,
    /// Processes have mapped the file, and writes to it must show there.
    pub(crate) is_followed: bool,
    /// Counts the changes made here. A state that was requested before a change does not overwrite it.
    pub(crate) revision: u64,
    /// The slot of its handles in the control page.
    pub(crate) handle: HandleHint,
}

/// The slot in which an inode's handles were recorded last.
#[derive(Debug, Default)]
pub(crate) struct HandleHint(AtomicU64);

impl HandleHint {
    pub(crate) fn slot(&self) -> HandleSlot {
        HandleSlot(self.0.load(Ordering::Relaxed))
    }

    pub(crate) fn set_slot(&self, slot: HandleSlot) {
        self.0.store(slot.0, Ordering::Relaxed);
    }
}

/// Entries that SharedFS can send in the time that one more request takes.
const ENTRIES_PER_REQUEST: u64 = 32;

impl NodeState {
    /// Counts a name that is looked up.
    pub(crate) fn count_lookup(&self) {
        // Losing a count to another thread does no harm.
        self.lookups.store(self.lookups.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
    }

    /// Returns whether a directory's names are better requested one by one than all with its lease.
    ///
    /// The lease may go again before the names are looked up. `held`: the lease is there.
    pub(crate) fn prefers_single_names(&self, held: bool) -> bool {
        let entries = self.inode.as_ref().map_or(0, |inode| inode.entries);
        let is_little_used = u64::from(self.lookups.load(Ordering::Relaxed)) * ENTRIES_PER_REQUEST < entries;
        is_little_used && (self.is_by_name || !held && self.children.is_complete())
    }

    /// Replaces all cached state by a state from SharedFS.
    pub(crate) fn replace_state(
        &mut self,
        lease: Lease,
        state: &InodeState,
        context: GrantContext,
        cookie: &dyn Fn(&[u8]) -> u64,
    ) {
        self.is_by_name = self.prefers_single_names(false);
        *self.lookups.get_mut() = 0;
        self.lease = Some(lease);
        self.inode = Some(state.attributes.clone());
        self.children = Children::unknown();
        self.content = None;
        self.xattrs = None;
        self.is_followed = false;
        self.hides_entries = false;
        self.revision += 1;
        self.merge_state(state, context, cookie);
    }

    /// Adds the parts of a state from SharedFS that are not cached yet.
    ///
    /// Attributes that a valid lease covers are never older here.
    pub(crate) fn merge_state(&mut self, state: &InodeState, context: GrantContext, cookie: &dyn Fn(&[u8]) -> u64) {
        let GrantContext { applied, version, .. } = context;
        self.is_followed |= state.is_followed;
        self.hides_entries |= state.hides_entries;
        if let (false, Some(contents)) = (self.content_at(version).is_some(), &state.contents) {
            let mut content = FileMap::from_grant(contents, state.attributes.size, version);
            for (_, change) in self.changes.iter().filter(|(position, _)| *position >= applied) {
                if let NodeChange::Data(change) = change {
                    content.apply(change);
                }
            }
            self.content = Some(content);
        }
        if let (None, Some(xattrs)) = (&self.xattrs, &state.xattrs) {
            let mut all: BTreeMap<_, _> = xattrs.iter().cloned().collect();
            for (_, change) in self.changes.iter().filter(|(position, _)| *position >= applied) {
                match change {
                    NodeChange::Xattr(name, Some(value)) => drop(all.insert(name.clone(), value.clone())),
                    NodeChange::Xattr(name, None) => drop(all.remove(name)),
                    _ => {}
                }
            }
            self.xattrs = Some(all);
        }
        if let (false, Some(entries)) = (self.children.is_complete(), &state.entries) {
            let mut children = Children::unknown();
            for entry in entries {
                if let Ok(name) = Name::new(&entry.name) {
                    children.set_entry(entry.cookie, name, Some(Entry { inode: entry.inode, kind: entry.kind }));
                }
            }
            children.set_complete();
            for (_, change) in self.changes.iter().filter(|(position, _)| *position >= applied) {
                if let NodeChange::Entry(name, entry) = change {
                    children.set_entry(cookie(name.as_bytes()), name.clone(), *entry);
                }
            }
            self.children = children;
        }
    }

    /// Returns the file's map, if blocks are still where it says at this extent version.
    pub(crate) fn content_at(&self, version: ExtentVersion) -> Option<&FileMap> {
        self.content.as_ref().filter(|content| content.is_current(version))
    }

    /// Records a change.
    #[inline(always)]
    pub(crate) fn note_change(&mut self, position: LogPosition, change: NodeChange) {
        self.revision += 1;
        match self.changes.back_mut() {
            // A record that changes anything also changes attributes: one note covers both.
            Some((last, _)) if *last == position && matches!(change, NodeChange::Attributes) => {}
            Some((last, noted @ NodeChange::Attributes)) if *last == position => *noted = change,
            _ => self.changes.push_back((position, change)),
        }
    }

    /// Forgets the changes before `bound`, which SharedFS has committed, and the state that refers to them.
    ///
    /// The log may overwrite their data, and SharedFS may reuse the blocks that they replaced.
    pub(crate) fn prune_changes(&mut self, bound: LogPosition) {
        let mut data_moved = false;
        let kept = self.changes.partition_point(|(position, _)| *position < bound);
        for (_, change) in self.changes.drain(..kept) {
            data_moved |= matches!(change, NodeChange::Data(_));
        }
        if data_moved {
            self.content = None;
            self.revision += 1;
        }
        if !self.children.is_complete() && self.children.len() > PARTIAL_MAX && self.changes.is_empty() {
            self.children = Children::unknown();
            self.revision += 1;
        }
        if self.changes.is_empty() {
            self.changes.shrink_to_fit();
        }
    }

    /// Returns whether the node can be dropped without losing a change.
    pub(crate) fn is_clean(&self) -> bool {
        self.changes.is_empty()
    }
}

/// A cached inode.
pub(crate) type CachedNode = Arc<RwLock<NodeState>>;

/// The lock of a node, which keeps the node alive.
pub(crate) type NodeWriteGuard = ArcRwLockWriteGuard<RawRwLock, NodeState>;
pub(crate) type NodeReadGuard = ArcRwLockReadGuard<RawRwLock, NodeState>;

/// Returns whether the table's reference to a node is the only one; it stays so while the node's shard is locked.
fn is_sole(node: &CachedNode) -> bool {
    let is_sole = Arc::strong_count(node) == 1;
    // The holders of the other references changed the node before they dropped them.
    fence(Ordering::Acquire);
    is_sole
}

type Shard = RwLock<HashMap<InodeId, CachedNode, BuildHasherDefault<InodeHasher>>>;

/// Enough that two threads that create nodes seldom meet.
const SHARDS: usize = 64;

/// Nodes to keep, unless more are dirty or in use: about 500 bytes each, so some 16 MiB.
const NODES_MAX: usize = 32_768;

/// All cached inodes of a session.
#[derive(Debug)]
pub(crate) struct NodeTable {
    /// Distinguishes the table from all others of this process: a node is valid in its own session only.
    number: u64,
    shards: Vec<Shard>,
    evictions: AtomicU64,
}

impl NodeTable {
    pub(crate) fn new() -> Self {
        static TABLES: AtomicU64 = AtomicU64::new(0);
        let number = TABLES.fetch_add(1, Ordering::Relaxed);
        Self { number, shards: (0..SHARDS).map(|_| Shard::default()).collect(), evictions: AtomicU64::new(0) }
    }

    /// Returns the table's number among this process's tables.
    #[inline]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn shard(&self, id: InodeId) -> &Shard {
        &self.shards[id.0 as usize % SHARDS]
    }

    /// Returns the node; creates an empty one if there is none.
    pub(crate) fn node(&self, id: InodeId) -> CachedNode {
        self.existing(id).unwrap_or_else(|| self.create_node(id))
    }

    /// Returns the node; creates an empty one if there is still none.
    fn create_node(&self, id: InodeId) -> CachedNode {
        self.shard(id).write().entry(id).or_default().clone()
    }

    /// Returns the node, locked for writing, if it most probably doesn't exist yet.
    pub(crate) fn write_new(&self, id: InodeId) -> NodeWriteGuard {
        self.create_node(id).write_arc()
    }

    /// Returns the node, locked for reading; creates an empty one if there is none.
    pub(crate) fn read(&self, id: InodeId) -> NodeReadGuard {
        self.read_existing(id).unwrap_or_else(|| self.create_node(id).read_arc())
    }

    /// Returns the node, locked for writing; creates an empty one if there is none.
    pub(crate) fn write(&self, id: InodeId) -> NodeWriteGuard {
        self.write_existing(id).unwrap_or_else(|| self.create_node(id).write_arc())
    }

    /// Returns the node, locked for reading, if there is one.
    pub(crate) fn read_existing(&self, id: InodeId) -> Option<NodeReadGuard> {
        // A free lock is taken under the shard's lock, which saves a count of the node.
        let free = self.shard(id).read().get(&id)?.try_read_arc();
        free.or_else(|| Some(self.existing(id)?.read_arc()))
    }

    /// Calls `look` with the node's state, if there is a node and its lock is free.
    ///
    /// The state can't change meanwhile. The shard stays locked for reading.
    #[inline]
    pub(crate) fn inspect_node<R>(&self, id: InodeId, look: impl FnOnce(&NodeState) -> Option<R>) -> Option<R> {
        let shard = self.shard(id).try_read()?;
        let state = shard.get(&id)?.try_read()?;
        look(&state)
    }

    /// Returns the node, locked for writing, if there is one.
    pub(crate) fn write_existing(&self, id: InodeId) -> Option<NodeWriteGuard> {
        let free = self.shard(id).read().get(&id)?.try_write_arc();
        free.or_else(|| Some(self.existing(id)?.write_arc()))
    }

    /// Returns whether there is a node.
    pub(crate) fn has_node(&self, id: InodeId) -> bool {
        self.shard(id).read().contains_key(&id)
    }

    /// Returns the node, if there is one.
    pub(crate) fn existing(&self, id: InodeId) -> Option<CachedNode> {
        self.shard(id).read().get(&id).cloned()
    }

    /// Returns how often nodes were dropped. A state that was requested before an eviction is not installed after it.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Acquire)
    }

    /// Announces that nodes will be dropped: no state that was requested before is installed any more.
    pub(crate) fn begin_eviction(&self) {
        self.evictions.fetch_add(1, Ordering::AcqRel);
    }

    /// Drops a node that no thread can have requested, or only after it was gone, since [`Self::begin_eviction`].
    pub(crate) fn remove(&self, id: InodeId) {
        self.shard(id).write().remove(&id);
    }

    /// Drops clean nodes that no thread uses, until `most` of those are left.
    pub(crate) fn evict_nodes(&self, most: usize) {
        let total: usize = self.shards.iter().map(|shard| shard.read().len()).sum();
        if total <= most {
            return;
        }
        // Nodes of open files stay, however many they are.
        let is_unused = |node: &&CachedNode| is_sole(node);
        let unused: usize = self.shards.iter().map(|shard| shard.read().values().filter(is_unused).count()).sum();
        if unused <= most {
            return;
        }
        self.begin_eviction();
        let mut surplus = unused - most / 2;
        // A directory too large to be granted as a whole costs a request for each of its names; any other inode costs
        // one request.
        for spares_large in [true, false] {
            for shard in &self.shards {
                shard.write().retain(|&id, node| {
                    let may_go = |state: &NodeState| {
                        let is_large = state.children.is_complete() && state.children.len() as u64 > Need::ENTRIES_MAX;
                        state.is_clean() && !(is_large && spares_large)
                    };
                    let busy = surplus == 0
                        || id == InodeId::ROOT
                        || !is_sole(node)
                        || !node.try_read().is_some_and(|state| may_go(&state));
                    surplus -= usize::from(!busy);
                    busy
                });
            }
        }
        for shard in &self.shards {
            shard.write().shrink_to_fit();
        }
    }

    /// Keeps the table within its usual bound.
    pub(crate) fn keep_bounded(&self) {
        self.evict_nodes(NODES_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_types::{Contents, FileKind, LeaseScope, Timestamp};

    fn context(entries: u64, names: Option<u64>) -> InodeState {
        let mut attributes = Inode::new(FileKind::Directory, 0o755, InodeId::ROOT, Timestamp::default());
        attributes.entries = entries;
        let entry = |number: u64| ashlar_wire::DirectoryEntry {
            cookie: number + 3,
            name: number.to_string().into_bytes(),
            inode: InodeId(number + 100),
            kind: FileKind::Regular,
        };
        let entries = names.map(|names| (0..names).map(entry).collect());
        InodeState { attributes, contents: None, entries, xattrs: None, is_followed: false, hides_entries: false }
    }

    #[test]
    fn little_used_directory_is_requested_by_name() {
        let lease = Lease { is_published: false, slot: 0, word: LeaseWord(0) };
        let when = GrantContext { applied: LogPosition(0), version: ExtentVersion(0), evictions: 0 };
        let mut state = NodeState::default();
        let grant = |state: &mut NodeState, names| state.replace_state(lease, &context(100, names), when, &|_| 7);
        let look_up = |state: &NodeState, times: u32| (0..times).for_each(|_| state.count_lookup());
        assert!(!state.prefers_single_names(false), "the directory is unknown");
        grant(&mut state, Some(100));
        look_up(&state, 3);
        assert!(!state.prefers_single_names(true), "all names are cached");
        assert!(state.prefers_single_names(false));
        grant(&mut state, None);
        look_up(&state, 3);
        assert!(state.prefers_single_names(true));
        look_up(&state, 1);
        assert!(!state.prefers_single_names(true), "one request for all names would have been cheaper");
        grant(&mut state, Some(100));
        look_up(&state, 4);
        assert!(!state.prefers_single_names(false), "enough names were used");
    }

    fn read(content: &FileMap) -> Vec<(u64, bool)> {
        let mut seen = Vec::new();
        let walked = content.walk_parts::<()>(0, 8, |_, length, found| {
            seen.push((
                length,
                found.is_some_and(|(piece, _)| matches!(piece.source, crate::cache::pieces::PieceSource::Log { .. })),
            ));
            Ok(())
        });
        walked.map(|()| seen).expect("nothing fails")
    }

    #[test]
    fn older_state_gets_later_changes_applied() {
        let mut inode = Inode::new(FileKind::Regular, 0o644, InodeId::ROOT, Timestamp::default());
        inode.size = 8;
        let lease = Lease { is_published: false, slot: 1, word: LeaseWord::new(1, LeaseScope::Files, false) };
        let context = |contents| InodeState {
            attributes: inode.clone(),
            contents,
            entries: None,
            hides_entries: false,
            xattrs: None,
            is_followed: false,
        };
        for (applied, expected) in [(40, vec![(2, false), (4, true), (2, false)]), (51, vec![(8, false)])] {
            let when = GrantContext { applied: LogPosition(applied), version: ExtentVersion(1), evictions: 0 };
            let mut state = NodeState::default();
            state.replace_state(lease, &context(None), when, &|_| 0);
            let body = LogPosition(60);
            let change = DataChange::Write { offset: 2, length: 4, record: LogPosition(50), body };
            state.note_change(LogPosition(50), NodeChange::Data(change));
            state.merge_state(&context(Some(Contents::Inline(vec![7; 8]))), when, &|_| 0);
            assert_eq!(state.content_at(ExtentVersion(1)).map(read), Some(expected));
            // Once the change is forgotten, an older state is not installed.
            assert_eq!(when.has_all_since(51), applied == 51);
        }
    }
}
