//! The store: reading, numbers, sessions, space.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Weak};

use ashlar_pmem::SegmentInfo;
use ashlar_types::{
    BlockAddress, Inode, InodeId, LogGeneration, LogPosition, Name, NameHashKey, NodeNumber, QuotaAmount, QuotaKey,
    QuotaLimits, SessionId, XATTRS_BYTES_MAX, name_cookie,
};
use ashlar_update::Entry;
use ashlar_update::xattr_size::{attribute_bytes, attribute_fits};

use crate::StoreError;
use crate::blocks::allocator::{Allocator, Freer};
use crate::blocks::readers::StateReaders;
use crate::blocks::segment::StoreSegment;
use crate::commit::Frozen;
use crate::copying::touched::TouchedRows;
use crate::database::{Database, Snapshot};
use crate::files::mapped::Mapped;
use crate::medium::StoreMedium;
use crate::metadata::batch::{Batch, LayerValue};
use crate::metadata::chunk::ExtentChunk;
use crate::metadata::inode_cache::InodeCache;
use crate::metadata::rows::{self, EntryKey, StoredCounters, kind};
use crate::model::{ArenaSpace, JournalMark, RoomLimit, SessionState, Xattrs};
use crate::quotas::{Holding, Move, Quotas};

/// Numbers that one row sets aside.
///
/// At most so many are skipped after a crash, and so many are used without a commit in between.
const INODES_AHEAD: u64 = 1 << 20;
const SESSIONS_AHEAD: u64 = 1 << 10;

/// The most inodes whose attributes' size is known without reading them. Then all are forgotten.
const XATTR_BYTES_KNOWN_MAX: usize = 4096;

/// The most directories whose depth is known without climbing. Then all are forgotten.
const DEPTHS_KNOWN_MAX: usize = 16_384;

/// The shared area of one arena. See the crate's documentation.
pub struct Store {
    pub(crate) medium: StoreMedium,
    pub(crate) snapshot: Snapshot,
    /// Decoded rows of it.
    pub(crate) seen: InodeCache,
    pub(crate) database: Arc<Database>,
    pub(crate) node: NodeNumber,
    pub(crate) hash_key: NameHashKey,
    /// Changes since the last freeze.
    pub(crate) active: Batch,
    /// Changes whose commit is under way, or has failed and must be tried again.
    pub(crate) frozen: Option<Arc<Frozen>>,
    pub(crate) segments: BTreeMap<u32, Arc<StoreSegment>>,
    pub(crate) allocator: Allocator,
    pub(crate) mapped: Mapped,
    pub(crate) sessions: HashMap<SessionId, SessionState>,
    /// Sessions whose rows differ from those of the last freeze; `false`: removed.
    pub(crate) changed_sessions: BTreeMap<SessionId, bool>,
    /// How far each node's journal is applied.
    pub(crate) journals: BTreeMap<NodeNumber, JournalMark>,
    /// The journals whose marks the next commit writes.
    pub(crate) changed_journals: BTreeSet<NodeNumber>,
    /// The next numbers, and the reserved blocks of the applied state.
    pub(crate) counters: StoredCounters,
    /// The room of another copy.
    pub(crate) room_limit: Option<RoomLimit>,
    /// The content of the counters row: numbers below are set aside.
    pub(crate) stored: StoredCounters,
    /// The use of each account, as applied.
    pub(crate) quotas: Quotas,
    /// The usage of the inodes that the current update has read, so that none is read again when it changes.
    pub(crate) holdings: std::cell::RefCell<Vec<(InodeId, Option<Holding>)>>,
    /// Readers of committed states, which need blocks that are freed later to stay as they are.
    pub(crate) readers: Arc<StateReaders>,
    /// The copies that are being made of the tree.
    pub(crate) copies: Vec<Weak<TouchedRows>>,
    pub(crate) poisoned: bool,
    /// Which blocks are used is not known for certain, so nothing may be changed.
    pub(crate) damaged: bool,
    /// How many batches were frozen.
    pub(crate) batches: u64,
    pub(crate) damaged_blocks: u64,
    pub(crate) committed_bytes: u64,
    /// The session that frees the blocks that the current update takes out of use.
    pub(crate) freer: Freer,
    /// Whether the update being applied has changed anything, so that a failure from there on leaves it half done.
    pub(crate) touched: bool,
    /// A row that the layers below the active batch were just found to lack: updates look a thing up before they make
    /// it.
    pub(crate) absent_inode: std::cell::Cell<Option<InodeId>>,
    pub(crate) absent_entry: std::cell::Cell<Option<(u64, u64)>>,
    /// The depths of some directories.
    pub(crate) depths: std::cell::RefCell<HashMap<InodeId, u32>>,
    /// The bytes that the attributes of some inodes count together.
    pub(crate) xattr_bytes: std::cell::RefCell<HashMap<InodeId, usize>>,
    /// No layer below the active batch has an inode with this number or a higher one: most of those that are made.
    pub(crate) inode_end: u64,
}

impl Store {
    // ---- quotas

    /// The use of an owner, a group or a subtree, as applied, and its limits.
    #[must_use]
    pub fn quota(&self, key: QuotaKey) -> (QuotaAmount, QuotaLimits) {
        self.quotas.account(key)
    }

    /// Every account with use or limits: its use and its limits.
    #[must_use]
    pub fn quotas(&self) -> Vec<(QuotaKey, QuotaAmount, QuotaLimits)> {
        self.quotas.all()
    }

    /// Whether any account is limited.
    #[must_use]
    pub fn has_quota_limits(&self) -> bool {
        self.quotas.has_limits()
    }

    /// Sets limits, or removes them. Nothing is refused for them here: the grantor of credit does that. They are
    /// durable with the next commit.
    pub fn set_quota_limits(&mut self, key: QuotaKey, limits: QuotaLimits) {
        self.quotas.set_limits(key, limits);
    }

    /// The changes of limited accounts since the last call.
    pub fn take_quota_moves(&mut self) -> Vec<Move> {
        self.quotas.take_moves()
    }

    // ---- sessions

    /// The sessions that the store knows.
    #[must_use]
    pub fn sessions(&self) -> Vec<(SessionId, SessionState)> {
        let mut sessions: Vec<_> = self.sessions.iter().map(|(&id, &state)| (id, state)).collect();
        sessions.sort_unstable_by_key(|(id, _)| *id);
        sessions
    }

    /// Returns whether a session has a row.
    #[must_use]
    pub fn has_session(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    /// The end of the part of the session's log that is applied; 0 for a session that is not known.
    #[must_use]
    pub fn applied(&self, session: SessionId) -> LogPosition {
        self.sessions.get(&session).map_or(LogPosition(0), |state| state.applied)
    }

    /// The end of the part of the session's log that is committed; 0 for a session that is not known.
    #[must_use]
    pub fn committed(&self, session: SessionId) -> LogPosition {
        self.sessions.get(&session).map_or(LogPosition(0), |state| state.committed)
    }

    /// Makes a session known, with an empty log at `position`. It is durable with the next commit.
    pub fn set_session(&mut self, session: SessionId, generation: LogGeneration, position: LogPosition) {
        self.sessions.insert(session, SessionState { generation, applied: position, committed: position });
        self.changed_sessions.insert(session, true);
    }

    /// Removes a session; after the commit its log is no longer needed.
    pub fn remove_session(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.changed_sessions.insert(session, false);
        self.release_all(session);
    }

    /// Returns how far a node's journal is applied; `None` if none of it was.
    #[must_use]
    pub fn journal_mark(&self, node: NodeNumber) -> Option<JournalMark> {
        self.journals.get(&node).copied()
    }

    /// Notes how far a node's journal is applied. The next commit says so too.
    pub fn set_journal_mark(&mut self, node: NodeNumber, mark: JournalMark) {
        self.journals.insert(node, mark);
        self.changed_journals.insert(node);
    }

    /// Forgets a node's journal. The next commit does so too.
    pub fn remove_journal_mark(&mut self, node: NodeNumber) {
        self.journals.remove(&node);
        self.changed_journals.insert(node);
    }

    /// Moves a session's applied position without an update, past records that say nothing.
    pub fn advance(&mut self, session: SessionId, end: LogPosition) {
        if session == SessionId::SHARED_FS {
            return;
        }
        let state = self.sessions.entry(session).or_default();
        state.applied = state.applied.max(end);
        self.changed_sessions.insert(session, true);
    }

    /// Releases a session's older extents.
    ///
    /// The session no longer reads by extents that its log before `upto` has changed. After the commit, the blocks that
    /// those records freed may be given out again.
    pub fn release(&mut self, session: SessionId, upto: LogPosition) {
        let bound = self.readers.bound();
        self.allocator.release(session, upto, bound);
    }

    /// Whether blocks wait for the session to release its log further, but not beyond this position.
    pub fn has_unreleased(&self, session: SessionId, upto: LogPosition) -> bool {
        self.allocator.has_unreleased(session, upto)
    }

    /// The session reads nothing any more.
    pub fn release_all(&mut self, session: SessionId) {
        self.release(session, LogPosition(u64::MAX));
    }

    /// Fails where nothing may be changed.
    ///
    /// # Errors
    /// [`StoreError::Poisoned`]; [`StoreError::Corrupt`].
    pub fn check_sound(&self) -> Result<(), StoreError> {
        match (self.poisoned, self.damaged) {
            (true, _) => Err(StoreError::Poisoned),
            (_, true) => Err(StoreError::Corrupt("a session, a bitmap or the counters cannot be read")),
            _ => Ok(()),
        }
    }

    // ---- numbers

    /// Returns inode numbers that were never used before and never will be again.
    ///
    /// # Errors
    /// [`StoreError::NumbersExhausted`]; those of the database: when the last numbers run out, more are set aside,
    /// which waits for a commit under way.
    pub fn allocate_inodes(&mut self, count: u64) -> Result<Range<u64>, StoreError> {
        self.check_sound()?;
        let first = self.counters.next_inode;
        let end = InodeId::numbers_of(self.node).end;
        if count > end.saturating_sub(first) {
            return Err(StoreError::NumbersExhausted { node: self.node, what: "inode numbers" });
        }
        if first + count > self.stored.next_inode {
            self.store_counters(end.min(first + count + INODES_AHEAD), self.stored.next_session)?;
        }
        self.counters.next_inode += count;
        Ok(first..first + count)
    }

    /// Returns a session number that was never used before and never will be again.
    ///
    /// # Errors
    /// As for [`Self::allocate_inodes`].
    pub fn next_session_id(&mut self) -> Result<SessionId, StoreError> {
        self.check_sound()?;
        let session = self.counters.next_session;
        let end = SessionId::numbers_of(self.node).end;
        if session >= end {
            return Err(StoreError::NumbersExhausted { node: self.node, what: "session numbers" });
        }
        if session >= self.stored.next_session {
            self.store_counters(self.stored.next_inode, end.min(session + SESSIONS_AHEAD))?;
        }
        self.counters.next_session += 1;
        Ok(SessionId(session))
    }

    /// Skips inode numbers that a journal says are given out: later ones are given out next.
    ///
    /// Numbers of another node are none that this store gives out, so they change nothing.
    ///
    /// # Errors
    /// As for [`Self::allocate_inodes`].
    pub fn skip_inodes(&mut self, first: InodeId, count: u64) -> Result<(), StoreError> {
        self.check_sound()?;
        if !first.is_of(self.node) {
            return Ok(());
        }
        let end = InodeId::numbers_of(self.node).end;
        let next = first.0.saturating_add(count).min(end).max(self.counters.next_inode);
        if next > self.stored.next_inode {
            self.store_counters(end.min(next + INODES_AHEAD), self.stored.next_session)?;
        }
        self.counters.next_inode = next;
        Ok(())
    }

    /// Skips a session number that a journal says is given out, as [`Self::skip_inodes`] does.
    ///
    /// # Errors
    /// As for [`Self::allocate_inodes`].
    pub fn skip_session_id(&mut self, session: SessionId) -> Result<(), StoreError> {
        self.check_sound()?;
        if !session.is_of(self.node) {
            return Ok(());
        }
        let next = (session.0 + 1).max(self.counters.next_session);
        if next > self.stored.next_session {
            let end = SessionId::numbers_of(self.node).end;
            self.store_counters(self.stored.next_inode, end.min(next + SESSIONS_AHEAD))?;
        }
        self.counters.next_session = next;
        Ok(())
    }

    fn store_counters(&mut self, next_inode: u64, next_session: u64) -> Result<(), StoreError> {
        let mut writer = self.database.write(1, 64)?;
        let found = writer.get(&[kind::COUNTERS])?.and_then(rows::decode_counters);
        let mut counters = found.ok_or(StoreError::Corrupt("the counters' row is damaged"))?;
        counters.next_inode = counters.next_inode.max(next_inode);
        counters.next_session = counters.next_session.max(next_session);
        writer.put(&[kind::COUNTERS], &rows::encode_counters(counters))?;
        writer.commit()?;
        self.stored.next_inode = counters.next_inode;
        self.stored.next_session = counters.next_session;
        Ok(())
    }

    /// The counters that the next commit is to store: numbers are set aside well before they run out.
    pub(crate) fn counters_to_store(&self) -> StoredCounters {
        let ahead = |next: u64, stored: u64, step: u64, numbers: Range<u64>| {
            if next + step / 2 > stored { (next + step).min(numbers.end).max(next) } else { stored }
        };
        let (inodes, sessions) = (InodeId::numbers_of(self.node), SessionId::numbers_of(self.node));
        StoredCounters {
            next_inode: ahead(self.counters.next_inode, self.stored.next_inode, INODES_AHEAD, inodes),
            next_session: ahead(self.counters.next_session, self.stored.next_session, SESSIONS_AHEAD, sessions),
            reserved_blocks: self.counters.reserved_blocks,
        }
    }

    // ---- names

    /// The key of the name hash.
    #[must_use]
    pub fn hash_key(&self) -> NameHashKey {
        self.hash_key
    }

    /// The node that gives out the numbers of this store.
    #[must_use]
    pub fn node(&self) -> NodeNumber {
        self.node
    }

    /// A name's place in any directory's order.
    #[must_use]
    pub fn name_cookie(&self, name: &[u8]) -> u64 {
        name_cookie(&self.hash_key, name)
    }

    // ---- reading

    /// The content of the batches above the database, the newest first.
    pub(crate) fn find_in_batches<'a, T>(&'a self, ask: impl Fn(&'a Batch) -> LayerValue<T>) -> LayerValue<T> {
        ask(&self.active).or_else(|| ask(&self.frozen.as_ref()?.batch))
    }

    /// An inode as applied, or `None`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Database`].
    pub fn inode(&self, inode: InodeId) -> Result<Option<Inode>, StoreError> {
        if let Some(said) = self.find_in_batches(|batch| batch.inode(inode)) {
            return Ok(said.cloned());
        }
        if let Some(seen) = self.seen.get(inode) {
            return Ok(Some(seen));
        }
        let value =
            if inode.0 >= self.inode_end { None } else { self.snapshot.get(&rows::key1(kind::INODE, inode.0))? };
        let Some(value) = value else {
            self.absent_inode.set(Some(inode));
            return Ok(None);
        };
        let found = rows::decode_inode(value).ok_or(StoreError::Corrupt("an inode's row is damaged"))?;
        self.seen.put(inode, &found);
        Ok(Some(found))
    }

    /// How many directories lead from the root to a directory, itself included; at most about `most`.
    ///
    /// The way up is remembered until a directory moves, so that many updates in a deep directory cost little.
    ///
    /// # Errors
    /// As [`Self::inode`].
    pub fn depth(&self, directory: InodeId, most: u32) -> Result<u32, StoreError> {
        let (mut climbed, mut at) = (Vec::new(), directory);
        let mut depth = loop {
            if let Some(known) = self.depths.borrow().get(&at) {
                break *known;
            }
            if climbed.len() as u32 >= most {
                return Ok(most);
            }
            match self.inode(at)?.map(|found| found.parent) {
                Some(parent) if parent != at => climbed.push(std::mem::replace(&mut at, parent)),
                _ => break 0,
            }
        };
        let mut depths = self.depths.borrow_mut();
        if depths.len() + climbed.len() > DEPTHS_KNOWN_MAX {
            depths.clear();
        }
        for id in climbed.into_iter().rev() {
            depth += 1;
            depths.insert(id, depth);
        }
        Ok(depth)
    }

    /// The entry called `name` in a directory, as applied, or `None`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Database`].
    pub fn entry(&self, directory: InodeId, name: &[u8]) -> Result<Option<Entry>, StoreError> {
        let cookie = self.name_cookie(name);
        self.absent_entry.set(None);
        if let Some(said) = self.find_in_batches(|batch| batch.entry(directory.0, cookie, name)) {
            return Ok(said);
        }
        // A directory that the active batch has made has no entries below it.
        let value = if self.active.has_made(directory) {
            None
        } else {
            self.snapshot.get(EntryKey::new(directory.0, cookie, name).as_bytes())?
        };
        let Some(value) = value else {
            self.absent_entry.set(Some((directory.0, cookie)));
            return Ok(None);
        };
        rows::decode_entry(value).map(Some).ok_or(StoreError::Corrupt("an entry's row is damaged"))
    }

    /// Entries of a directory with cookies above `after`, in the order of cookies. Entries of one cookie are never
    /// split, so there may be a few more than `limit`.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`], [`StoreError::Database`].
    pub fn entries(&self, directory: InodeId, after: u64, limit: usize) -> Result<Vec<(u64, Name, Entry)>, StoreError> {
        let from = rows::key2(kind::ENTRY, directory.0, after.saturating_add(1));
        let mut stored = self
            .snapshot
            .from(&from)?
            .map_while(|row| match row {
                Ok((key, value)) => match rows::split_key2(key) {
                    Some((of, cookie, name)) if of == directory.0 => Some(Ok((cookie, name, value))),
                    _ => None,
                },
                Err(error) => Some(Err(error)),
            })
            .peekable();
        let mut active = self.active.entries(directory.0, after).peekable();
        let mut frozen = self.frozen.iter().flat_map(|frozen| frozen.batch.entries(directory.0, after)).peekable();
        let mut found: Vec<(u64, Name, Entry)> = Vec::new();
        loop {
            let next_stored = match stored.peek() {
                Some(Ok((cookie, name, _))) => Some((*cookie, *name)),
                Some(Err(_)) => return stored.next().map_or(Ok(found), |error| error.map(|_| Vec::new())),
                None => None,
            };
            let next_active = active.peek().map(|&(cookie, name, _)| (cookie, name));
            let heads = [next_active, frozen.peek().map(|&(cookie, name, _)| (cookie, name)), next_stored];
            let Some((cookie, name)) = heads.into_iter().flatten().min() else { break };
            if found.len() >= limit && found.last().is_some_and(|(last, ..)| *last != cookie) {
                break;
            }
            let at = Some((cookie, name));
            let newest = if heads[0] == at { active.next() } else { None };
            let older = if heads[1] == at { frozen.next() } else { None };
            let oldest = if heads[2] == at { stored.next().transpose()? } else { None };
            let entry = match newest.or(older) {
                Some((_, _, entry)) => entry,
                None => match oldest {
                    Some((_, _, value)) => {
                        Some(rows::decode_entry(value).ok_or(StoreError::Corrupt("an entry's row is damaged"))?)
                    }
                    None => None,
                },
            };
            if let Some(entry) = entry {
                let name = Name::new(name).map_err(|_| StoreError::Corrupt("an entry's name is no name"))?;
                found.push((cookie, name, entry));
            }
        }
        Ok(found)
    }

    /// An extended attribute as applied, or `None`.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub fn xattr(&self, inode: InodeId, name: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let key = rows::xattr_key(inode, name);
        Ok(match self.find_in_batches(|batch| batch.row(&key)) {
            Some(said) => said.map(<[u8]>::to_vec),
            None => self.snapshot.get(&key)?.map(<[u8]>::to_vec),
        })
    }

    /// The extended attributes of an inode, by name.
    ///
    /// These are all that an inode may have. If an earlier version has stored more, the first ones are returned: a
    /// grant must not grow without end. Access lists and capabilities stand before users' attributes.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub fn xattrs(&self, inode: InodeId) -> Result<Xattrs, StoreError> {
        let mut bytes = 0;
        let found = self.xattr_rows(inode, 2 * XATTRS_BYTES_MAX, <[u8]>::to_vec)?.into_iter();
        let fits = |(name, value): &(Vec<u8>, Vec<u8>)| {
            bytes += attribute_bytes(name, value.as_slice());
            bytes <= XATTRS_BYTES_MAX
        };
        Ok(found.take_while(fits).collect())
    }

    /// Whether an inode may have this extended attribute beside its others.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub fn xattr_fits(&self, inode: InodeId, name: &[u8], value: &[u8]) -> Result<bool, StoreError> {
        let replaced = self.xattr(inode, name)?.map_or(0, |old| attribute_bytes(name, &old));
        Ok(attribute_fits(self.xattr_bytes(inode)?, replaced, attribute_bytes(name, value)))
    }

    /// Returns the bytes that the extended attributes of an inode count together.
    pub(crate) fn xattr_bytes(&self, inode: InodeId) -> Result<usize, StoreError> {
        if let Some(&bytes) = self.xattr_bytes.borrow().get(&inode) {
            return Ok(bytes);
        }
        let rows = self.xattr_rows(inode, usize::MAX, |value| value.len())?;
        let bytes = rows.iter().map(|(name, length)| attribute_bytes(name, &[]) + length).sum();
        let mut known = self.xattr_bytes.borrow_mut();
        if known.len() >= XATTR_BYTES_KNOWN_MAX {
            known.clear();
        }
        known.insert(inode, bytes);
        Ok(bytes)
    }

    /// Stores or removes an extended attribute.
    pub(crate) fn set_xattr(&mut self, inode: InodeId, name: &[u8], value: Option<&[u8]>) -> Result<(), StoreError> {
        if self.xattr_bytes.get_mut().contains_key(&inode) {
            let before = self.xattr(inode, name)?.map_or(0, |old| attribute_bytes(name, &old));
            let after = value.map_or(0, |value| attribute_bytes(name, value));
            self.xattr_bytes.get_mut().entry(inode).and_modify(|bytes| *bytes = *bytes + after - before);
        }
        self.active.set_row(inode, &rows::xattr_key(inode, name), value);
        Ok(())
    }

    /// Removes all extended attributes of an inode that is removed.
    pub(crate) fn remove_xattrs(&mut self, inode: InodeId) -> Result<(), StoreError> {
        self.xattr_bytes.get_mut().remove(&inode);
        for (name, ()) in self.xattr_rows(inode, usize::MAX, |_| ())? {
            self.active.set_row(inode, &rows::xattr_key(inode, &name), None);
        }
        Ok(())
    }

    /// Returns what `take` makes of the values of an inode's attributes, in the order of their names.
    ///
    /// It reads about `most` bytes, and leaves out the names that follow.
    fn xattr_rows<V>(
        &self,
        inode: InodeId,
        most: usize,
        take: impl Fn(&[u8]) -> V,
    ) -> Result<Vec<(Vec<u8>, V)>, StoreError> {
        let prefix = rows::key1(kind::XATTR, inode.0);
        let found = self.rows_with(&prefix, !self.active.has_made(inode), most, take)?;
        Ok(found.into_iter().map(|(key, value)| (key[prefix.len()..].to_vec(), value)).collect())
    }

    /// The inodes without links that still exist.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub fn orphans(&self) -> Result<Vec<InodeId>, StoreError> {
        let found = self.rows_with(&[kind::ORPHAN], true, usize::MAX, |_| ())?;
        Ok(found.keys().filter_map(|key| rows::split_key1(key)).map(|(number, _)| InodeId(number)).collect())
    }

    /// The rows with a prefix, as applied; `below`: there may be some below the active batch.
    ///
    /// It reads about `most` bytes, and leaves out the keys that follow.
    fn rows_with<V>(
        &self,
        prefix: &[u8],
        below: bool,
        most: usize,
        take: impl Fn(&[u8]) -> V,
    ) -> Result<BTreeMap<Vec<u8>, V>, StoreError> {
        let mut found = BTreeMap::new();
        let (mut bytes, mut last) = (0, None);
        if below {
            for row in self.snapshot.prefix(prefix)? {
                let (key, value) = row?;
                bytes += key.len() + value.len();
                found.insert(key.to_vec(), take(value));
                if bytes > most {
                    last = Some(key.to_vec());
                    break;
                }
            }
        }
        for batch in self.frozen.iter().map(|frozen| &frozen.batch).chain([&self.active]) {
            for (key, value) in batch.rows(prefix) {
                if last.as_ref().is_some_and(|last| key > last.as_slice()) {
                    break;
                }
                match value {
                    Some(value) => found.insert(key.to_vec(), take(value)),
                    None => found.remove(key),
                };
            }
        }
        Ok(found)
    }

    /// Returns a chunk's applied map, or `None` for a hole.
    pub(crate) fn chunk(&self, inode: InodeId, number: u64) -> Result<Option<ExtentChunk>, StoreError> {
        match self.find_in_batches(|batch| batch.chunk(inode, number)) {
            Some(said) => Ok(said.cloned()),
            None => self.stored_chunk(inode, number),
        }
    }

    pub(crate) fn stored_chunk(&self, inode: InodeId, number: u64) -> Result<Option<ExtentChunk>, StoreError> {
        if self.active.has_made(inode) {
            return Ok(None);
        }
        let Some(value) = self.snapshot.get(&rows::key2(kind::CHUNK, inode.0, number))? else { return Ok(None) };
        ExtentChunk::decode(value).map(Some).ok_or(StoreError::Corrupt("a file's map is damaged"))
    }

    /// The numbers of the chunks in a range that are not holes.
    pub(crate) fn chunk_numbers(&self, inode: InodeId, range: Range<u64>) -> Result<Vec<u64>, StoreError> {
        let mut found = BTreeMap::new();
        if !self.active.has_made(inode) {
            let start = rows::key2(kind::CHUNK, inode.0, range.start);
            for row in self.snapshot.from(&start)? {
                let (key, _) = row?;
                match rows::split_key2(key) {
                    Some((of, number, _)) if key[0] == kind::CHUNK && of == inode.0 && number < range.end => {
                        found.insert(number, true);
                    }
                    _ => break,
                }
            }
            found.extend(self.frozen.iter().flat_map(|frozen| frozen.batch.chunks(inode, range.clone())));
        }
        found.extend(self.active.chunks(inode, range));
        Ok(found.into_iter().filter(|(_, there)| *there).map(|(number, _)| number).collect())
    }

    /// Returns the applied bytes of a small file, or `None` if it has none, or has blocks.
    pub(crate) fn inline(&self, inode: InodeId) -> Result<Option<Vec<u8>>, StoreError> {
        if let Some(said) = self.find_in_batches(|batch| batch.inline(inode)) {
            return Ok(said.cloned());
        }
        if self.active.has_made(inode) {
            return Ok(None);
        }
        Ok(self.snapshot.get(&rows::key1(kind::INLINE, inode.0))?.map(<[u8]>::to_vec))
    }

    // ---- space

    /// How much space there is.
    ///
    /// It is no more than another copy has ([`Self::limit_room`]).
    #[must_use]
    pub fn space(&self) -> ArenaSpace {
        let reserved = self.counters.reserved_blocks;
        let (blocks, metadata_bytes) = (self.allocator.total_blocks(), self.database.budget_bytes());
        let limit = self.room_limit.unwrap_or(RoomLimit { blocks, metadata_bytes });
        let missing_blocks = blocks.saturating_sub(limit.blocks);
        ArenaSpace {
            blocks_total: blocks - missing_blocks,
            blocks_free: self.allocator.free_blocks().saturating_sub(reserved + missing_blocks),
            blocks_pinned: self.allocator.pinned_blocks(),
            blocks_reserved: reserved,
            metadata_bytes_total: metadata_bytes.min(limit.metadata_bytes),
            metadata_bytes_used: self.metadata_bytes_used(),
        }
    }

    /// Counts no more room than another copy has, from now on: updates must fit there, too.
    pub fn limit_room(&mut self, limit: RoomLimit) {
        self.room_limit = Some(limit);
    }

    pub(crate) fn metadata_bytes_used(&self) -> u64 {
        self.committed_bytes + self.active.growth() + self.frozen.as_ref().map_or(0, |frozen| frozen.batch.growth())
    }

    /// Blocks found damaged by updates that changed a part of them. They stay detectably damaged.
    #[must_use]
    pub fn damaged_blocks(&self) -> u64 {
        self.damaged_blocks
    }

    /// Takes into use a segment that was added to the arena.
    ///
    /// # Errors
    /// [`StoreError::Arena`], [`StoreError::Map`]; [`StoreError::Segment`] if it is in use already.
    pub fn add_segment(&mut self, info: SegmentInfo) -> Result<(), StoreError> {
        if self.segments.contains_key(&info.number) {
            return Err(StoreError::Segment(info.number));
        }
        let segment = self.medium.open_segment(info)?;
        self.segments.insert(info.number, Arc::new(segment));
        self.allocator.add_segment(info.number, info.blocks);
        Ok(())
    }

    /// The segments, mapped.
    pub fn segments(&self) -> impl Iterator<Item = &Arc<StoreSegment>> {
        self.segments.values()
    }

    pub(crate) fn segment(&self, address: BlockAddress) -> Result<&StoreSegment, StoreError> {
        let segment = self.segments.get(&address.segment()).filter(|_| address.node() == self.node);
        segment.map(|segment| &**segment).ok_or(StoreError::Corrupt("an extent lies in a segment that does not exist"))
    }
}

#[cfg(test)]
mod tests;
