//! The grant cache: grants on inodes that are only read, which all sessions may use without asking.
//!
//! The cache is one file. Each SharedFS makes it anew and alone writes it; sessions map it read-only.
//!
//! ```text
//!       0  lease table of the cache itself: its posts hold as long as the words there (`control.rs`)
//! 1052672  kept from:8                     the ring is whole from this position on
//! 1052680  persistent:8 (unused:48)        the last batch of updates that is committed
//! 1052736  16,384 rows of 4 times inode:8 position:8; an inode stands in the row of its hash
//! 2101312  ring of 32 MiB; position p is at byte p modulo its length
//!          inode:8  word:8  slot:4 length:4  parts:8  then `length` bytes, in postcard encoding: dependencies, their
//!          batch, state
//! ```
//!
//! # How sessions read it
//!
//! SharedFS raises *kept from* before it overwrites the oldest posts. A reader checks it after copying a post: the copy
//! is whole if its position was still kept. The lease word says whether the post is still true, as with any lease: the
//! cache holds read leases like a session. SharedFS revokes them like a session's, except that it need not wait for an
//! answer.

use std::sync::atomic::{Ordering, fence};

use ashlar_pmem::{CheckedMemory, PartAt, Persistent, Readable, RowsAt, WordAt};
use ashlar_types::{FileKind, Inode, InodeId, LogPosition, SessionId};
use serde::de::DeserializeOwned;
use smallvec::SmallVec;

use crate::{InodeState, LEASE_TABLE_BYTES, LeaseTable, LeaseWord, Need};

const KEPT_FROM: CacheWord = CacheWord::new(LEASE_TABLE_BYTES);
const PERSISTENT: CacheWord = CacheWord::new(LEASE_TABLE_BYTES + 8);
const INDEX: u64 = LEASE_TABLE_BYTES + 64;
const ROWS: u64 = 16_384;
const WAYS: u64 = 4;
const WAY_BYTES: u64 = 16;
const INDEX_WAYS: RowsAt<GRANT_CACHE_BYTES, WAY_BYTES> = RowsAt::new(INDEX, ROWS * WAYS);
const WAY_INODE: WordAt<WAY_BYTES> = WordAt::new(0);
const WAY_POSITION: WordAt<WAY_BYTES> = WordAt::new(8);
const RING: u64 = INDEX + ROWS * WAYS * WAY_BYTES;
const RING_BYTES: u64 = 32 << 20;
const RING_WORDS: RowsAt<GRANT_CACHE_BYTES, 8> = RowsAt::new(RING, RING_BYTES / 8);
const RING_PIECES: RowsAt<GRANT_CACHE_BYTES, CLEARED_BYTES> = RowsAt::new(RING, RING_BYTES / CLEARED_BYTES);
const HEADER_BYTES: u64 = 32;
/// Bytes that are cleared at once.
const CLEARED_BYTES: u64 = 4096;
/// The longest post, so that one directory does not push out all others.
const POST_BYTES_MAX: u64 = RING_BYTES / 64;
/// Bytes of most files' posts.
///
/// An inode's attributes take fewer bytes than this, unless they belong to a long symbolic link.
const SHORT_BYTES: usize = 512;
/// Bytes of the grant cache's file.
pub const GRANT_CACHE_BYTES: u64 = RING + RING_BYTES;

/// The offset of a word in the grant cache.
type CacheWord = WordAt<GRANT_CACHE_BYTES>;

const _: () = assert!(KEPT_FROM.offset() == 1_052_672 && INDEX == 1_052_736 && RING == 2_101_312);

/// A published grant on an inode: its state, or a part of that.
#[derive(Clone, Debug)]
pub struct PublishedGrant<S = InodeState> {
    /// The slot of the grant cache's own lease table.
    pub slot: u32,
    /// The slot's word as long as the post is true.
    pub word: LeaseWord,
    /// The inode's state.
    pub state: S,
    /// Updates that the state includes and that may not be persistent yet.
    pub dependencies: Vec<(SessionId, LogPosition)>,
}

/// Encodes the parts of a state as bits.
fn parts(contents: bool, entries: bool, xattrs: bool) -> u64 {
    u64::from(contents) | u64::from(entries) << 1 | u64::from(xattrs) << 2
}

/// Returns the parts about which SharedFS has nothing more to send.
///
/// A session that asks for an unknown inode also asks for parts that only other kinds of inodes have.
fn parts_of(state: &InodeState) -> u64 {
    let inode = &state.attributes;
    let has_contents = state.contents.is_some() || inode.kind != FileKind::Regular;
    let has_entries = state.entries.is_some() || !inode.is_directory() || inode.entries > Need::ENTRIES_MAX;
    parts(has_contents, has_entries, state.xattrs.is_some())
}

fn has_all(parts_there: u64, need: Need) -> bool {
    let needed = parts(need.contents, need.entries, need.xattrs);
    parts_there & needed == needed
}

/// A header in the ring.
struct Header {
    word: LeaseWord,
    slot: u32,
    length: u64,
    parts: u64,
}

/// The grant cache, as sessions and SharedFS read it.
#[derive(Debug)]
pub struct GrantCache<M> {
    memory: CheckedMemory<M, GRANT_CACHE_BYTES, Readable>,
    leases: LeaseTable<M, Readable>,
}

impl<M: Persistent + Clone> GrantCache<M> {
    /// Takes memory as a grant cache; `None` if it is shorter than [`GRANT_CACHE_BYTES`].
    pub fn new(memory: M) -> Option<Self> {
        Some(Self { leases: LeaseTable::read_only(memory.clone())?, memory: CheckedMemory::read_only(memory).ok()? })
    }

    /// Returns a slot's current word.
    #[inline]
    pub fn word(&self, slot: u32) -> LeaseWord {
        self.leases.word(slot)
    }

    /// Whether the cache holds everything needed of an inode, and it is true now.
    pub fn has(&self, inode: InodeId, need: Need) -> bool {
        let header = self.position(inode).and_then(|position| self.header(inode, position));
        header.is_some_and(|header| has_all(header.parts, need) && self.is_current(&header))
    }

    /// Returns an inode's post, if it is true now and has everything needed.
    pub fn find(&self, inode: InodeId, need: Need) -> Option<PublishedGrant> {
        self.read(inode, need, POST_BYTES_MAX)
    }

    /// Returns the attributes in an inode's post, with which its state begins, if they are true now.
    pub fn attributes(&self, inode: InodeId) -> Option<PublishedGrant<Inode>> {
        self.read(inode, Need::default(), SHORT_BYTES as u64)
    }

    /// Reads an inode's post like [`Self::find`], at most so many bytes of it.
    fn read<S: DeserializeOwned>(&self, inode: InodeId, need: Need, most: u64) -> Option<PublishedGrant<S>> {
        let position = self.position(inode)?;
        let header = self.header(inode, position)?;
        if !has_all(header.parts, need) || header.length > POST_BYTES_MAX || !self.is_current(&header) {
            return None;
        }
        let mut bytes: SmallVec<[u8; SHORT_BYTES]> = SmallVec::new();
        bytes.resize(header.length.min(most) as usize, 0);
        self.memory.memory().load(body_offset(position), &mut bytes).ok()?;
        fence(Ordering::Acquire);
        if !self.is_kept(position) {
            return None;
        }
        let (mut dependencies, batch, state): (Vec<_>, u64, S) = postcard::from_bytes(&bytes).ok()?;
        if self.memory.load(PERSISTENT) >= batch {
            dependencies.clear();
        }
        Some(PublishedGrant { slot: header.slot, word: header.word, state, dependencies })
    }

    fn is_current(&self, header: &Header) -> bool {
        let word = self.word(header.slot);
        word.generation() == header.word.generation() && word.may_read()
    }

    fn is_kept(&self, position: u64) -> bool {
        position >= self.memory.load(KEPT_FROM)
    }

    /// Returns the position of an inode's last post.
    ///
    /// Positions begin behind the ring's length, so that no position is 0.
    fn position(&self, inode: InodeId) -> Option<u64> {
        let ways = index_slots(inode);
        let found = ways.into_iter().find(|way| self.memory.load(way.word(WAY_INODE)) == inode.0)?;
        Some(self.memory.load(found.word(WAY_POSITION))).filter(|position| self.is_kept(*position))
    }

    /// Returns the header at a position; `None` if another post has overwritten it.
    fn header(&self, inode: InodeId, position: u64) -> Option<Header> {
        let [inode_at, word_at, size_at, parts_at] = header_words(position);
        let word = LeaseWord(self.memory.load(word_at));
        let (size, parts) = (self.memory.load(size_at), self.memory.load(parts_at));
        let is_its = self.memory.load(inode_at) == inode.0;
        fence(Ordering::Acquire);
        let header = Header { word, slot: size as u32, length: size >> 32, parts };
        (is_its && self.is_kept(position)).then_some(header)
    }
}

/// Returns the offsets in the index where an inode may stand.
#[inline]
fn index_slots(inode: InodeId) -> [PartAt<GRANT_CACHE_BYTES, WAY_BYTES>; WAYS as usize] {
    let row = inode.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50;
    std::array::from_fn(|way| INDEX_WAYS.row(row * WAYS + way as u64))
}

/// Returns the words of the header at a position: inode, word, slot with length, parts.
#[inline]
fn header_words(position: u64) -> [CacheWord; HEADER_BYTES as usize / 8] {
    std::array::from_fn(|word| RING_WORDS.word(position / 8 + word as u64))
}

/// Returns the offset of the bytes behind the header at a position. A forged length may lead out of the ring.
#[inline]
fn body_offset(position: u64) -> u64 {
    RING + position % RING_BYTES + HEADER_BYTES
}

const _: () = assert!(1 << (64 - 50) == ROWS);

/// SharedFS's writer of the grant cache.
#[derive(Debug)]
pub struct GrantCacheWriter<M> {
    grant_cache: GrantCache<M>,
    memory: CheckedMemory<M, GRANT_CACHE_BYTES>,
    leases: LeaseTable<M>,
    /// The position of the next post.
    next: u64,
    /// The position up to which the memory was cleared last.
    cleared: u64,
}

impl<M: Persistent + Clone> GrantCacheWriter<M> {
    /// Takes memory that holds zeros as an empty grant cache; `None` if it is shorter than [`GRANT_CACHE_BYTES`], or
    /// read-only.
    pub fn new(memory: M) -> Option<Self> {
        let (grant_cache, leases) = (GrantCache::new(memory.clone())?, LeaseTable::new(memory.clone())?);
        let memory = CheckedMemory::new(memory).ok()?;
        memory.store(KEPT_FROM, RING_BYTES);
        Some(Self { grant_cache, memory, leases, next: RING_BYTES, cleared: RING_BYTES })
    }

    /// Writes a slot of the grant cache's leases.
    pub fn set_word(&self, slot: u32, word: LeaseWord, inode: InodeId) {
        self.leases.set(slot, word, inode);
    }

    /// Returns the grant cache, as sessions see it.
    pub fn grant_cache(&self) -> &GrantCache<M> {
        &self.grant_cache
    }

    /// Publishes the batch of updates that is committed. Batches are counted from 1.
    pub fn set_persistent(&self, batch: u64) {
        self.memory.store(PERSISTENT, batch);
    }

    /// Publishes an inode's state in place of its last post; `false` if it is too long.
    ///
    /// The state's dependencies are persistent with this batch.
    pub fn publish(&mut self, post: &PublishedGrant, inode: InodeId, batch: u64) -> bool {
        let PublishedGrant { slot, word, state, dependencies } = post;
        let Ok(bytes) = postcard::to_allocvec(&(dependencies, batch, state)) else { return false };
        let length = bytes.len() as u64;
        if length > POST_BYTES_MAX {
            return false;
        }
        let (memory, size) = (&self.memory, (HEADER_BYTES + length).next_multiple_of(8));
        let room = RING_BYTES - self.next % RING_BYTES;
        let position = if room < size { self.next + room } else { self.next };
        self.next = position + size;
        let kept_from = (self.next - RING_BYTES).max(memory.load(KEPT_FROM));
        memory.store(KEPT_FROM, kept_from);
        fence(Ordering::SeqCst);
        let header = [inode.0, word.0, length << 32 | u64::from(*slot), parts_of(state)];
        header_words(position).into_iter().zip(header).for_each(|(at, value)| memory.store(at, value));
        if memory.memory().store(body_offset(position), &bytes).is_err() {
            return false;
        }
        // Take the inode's own place in the row, or that of the oldest post. A reader of a row that changes finds
        // another inode in the ring.
        let by_age = |way: &PartAt<GRANT_CACHE_BYTES, WAY_BYTES>| match memory.load(way.word(WAY_INODE)) {
            found if found == inode.0 => 0,
            _ => memory.load(way.word(WAY_POSITION)).max(1),
        };
        if let Some(way) = index_slots(inode).into_iter().min_by_key(by_age) {
            memory.store(way.word(WAY_INODE), 0);
            memory.store(way.word(WAY_POSITION), position);
            memory.store(way.word(WAY_INODE), inode.0);
        }
        true
    }

    /// Returns the inodes that have posts.
    pub fn published(&self) -> Vec<InodeId> {
        let ways = (0..INDEX_WAYS.rows()).map(|way| INDEX_WAYS.row(way));
        let posts = ways.map(|way| [WAY_INODE, WAY_POSITION].map(|word| self.memory.load(way.word(word))));
        let kept = posts.filter(|[inode, position]| *inode != 0 && self.grant_cache.is_kept(*position));
        kept.map(|[inode, _]| InodeId(inode)).collect()
    }

    /// Removes all posts.
    pub fn withdraw_all(&self) {
        self.memory.store(KEPT_FROM, self.next);
    }

    /// Removes all posts, and clears their memory.
    pub fn clear(&mut self) {
        self.withdraw_all();
        fence(Ordering::SeqCst);
        (0..INDEX_WAYS.rows()).for_each(|way| self.memory.store(INDEX_WAYS.row(way).word(WAY_INODE), 0));
        let used = (self.next - self.cleared).min(RING_BYTES);
        for piece in (self.next - used) / CLEARED_BYTES..self.next.div_ceil(CLEARED_BYTES) {
            self.memory.store_bytes(RING_PIECES.row(piece), &[0; CLEARED_BYTES as usize]);
        }
        self.cleared = self.next;
    }

    /// Removes an inode's post from the index.
    pub fn withdraw(&mut self, inode: InodeId) {
        let words = index_slots(inode).map(|way| way.word(WAY_INODE));
        let its = words.into_iter().filter(|word| self.memory.load(*word) == inode.0);
        its.for_each(|word| self.memory.store(word, 0));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use ashlar_pmem::{Mapping, MappingAccess, Medium};
    use ashlar_types::{LeaseScope, Timestamp};

    use super::*;

    fn grant_caches() -> (GrantCacheWriter<Arc<Mapping>>, GrantCache<Arc<Mapping>>) {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(GRANT_CACHE_BYTES).expect("a length");
        let map = |access| Arc::new(Mapping::map(&file, GRANT_CACHE_BYTES, access, Medium::MEMORY).expect("mapped"));
        let writer = GrantCacheWriter::new(map(MappingAccess::ReadWrite)).expect("a grant cache");
        (writer, GrantCache::new(map(MappingAccess::ReadOnly)).expect("a grant cache"))
    }

    /// Makes a state that shows its inode in each of its parts.
    fn state(number: u64, length: usize) -> InodeState {
        let mut attributes = Inode::new(FileKind::Regular, 0o644, InodeId::ROOT, Timestamp::default());
        attributes.size = number;
        let xattrs = Some(vec![(number.to_le_bytes().to_vec(), vec![number as u8; length])]);
        InodeState { attributes, contents: None, entries: None, hides_entries: false, xattrs, is_followed: false }
    }

    fn is_of(post: &PublishedGrant, number: u64) -> bool {
        let [(name, value)] = &post.state.xattrs.as_ref().expect("xattrs")[..] else { return false };
        let is_its = value.iter().all(|byte| *byte == number as u8);
        post.state.attributes.size == number && name[..] == number.to_le_bytes() && is_its
    }

    const WORD: u64 = 7;
    const XATTRS: Need = Need { contents: false, entries: false, children: false, xattrs: true };

    fn word(generation: u64) -> LeaseWord {
        LeaseWord::new(generation, LeaseScope::Node, false)
    }

    fn publish(
        writer: &mut GrantCacheWriter<Arc<Mapping>>,
        id: u64,
        lease: (u32, LeaseWord),
        state: InodeState,
    ) -> bool {
        let dependencies = vec![(SessionId(4), LogPosition(id))];
        writer.publish(&PublishedGrant { slot: lease.0, word: lease.1, state, dependencies }, InodeId(id), 2)
    }

    #[test]
    fn post_is_found_while_its_lease_holds() {
        let (mut writer, grant_cache) = grant_caches();
        let id = InodeId(77);
        assert!(grant_cache.find(id, XATTRS).is_none() && grant_cache.find(InodeId(0), Need::default()).is_none());
        writer.set_word(3, word(WORD), id);
        assert!(publish(&mut writer, id.0, (3, word(WORD)), state(5, 9)));
        let found = grant_cache.find(id, XATTRS).expect("posted");
        assert!(is_of(&found, 5) && (found.slot, found.word) == (3, word(WORD)));
        let seen = grant_cache.attributes(id).expect("posted");
        assert!(seen.state == found.state.attributes && (seen.slot, seen.word) == (3, word(WORD)));
        assert_eq!(seen.dependencies, found.dependencies);
        assert_eq!(found.dependencies, [(SessionId(4), LogPosition(77))]);
        writer.set_persistent(1);
        assert_eq!(grant_cache.find(id, XATTRS).expect("posted").dependencies.len(), 1, "that was another batch");
        writer.set_persistent(2);
        assert!(grant_cache.find(id, XATTRS).expect("posted").dependencies.is_empty());
        assert!(grant_cache.has(id, XATTRS) && grant_cache.find(InodeId(78), XATTRS).is_none());
        // Parts that the state lacks are absent. Parts that no regular file has count as present.
        assert!(
            !grant_cache.has(id, Need { contents: true, ..XATTRS })
                && grant_cache.has(id, Need { entries: true, ..XATTRS })
        );
        for gone in [LeaseWord::revoked(WORD + 1), word(WORD + 1), LeaseWord::revoked(WORD)] {
            writer.set_word(3, gone, id);
            assert!(grant_cache.find(id, XATTRS).is_none() && !grant_cache.has(id, Need::default()));
            assert!(grant_cache.attributes(id).is_none());
        }
        assert!(publish(&mut writer, id.0, (3, word(WORD + 2)), state(6, 9)));
        writer.set_word(3, word(WORD + 2), id);
        assert!(is_of(&grant_cache.find(id, XATTRS).expect("posted anew"), 6));
        writer.withdraw(id);
        assert!(grant_cache.find(id, XATTRS).is_none());
        assert!(publish(&mut writer, id.0, (3, word(WORD + 2)), state(6, 9)));
        assert!(!publish(&mut writer, id.0, (3, word(WORD + 2)), state(8, POST_BYTES_MAX as usize)), "too long");
        assert!(is_of(&grant_cache.find(id, XATTRS).expect("what was there stays"), 6));
        // The attributes are at the beginning, however long the rest is.
        assert!(publish(&mut writer, id.0, (3, word(WORD + 2)), state(9, 100_000)));
        assert_eq!(grant_cache.attributes(id).expect("posted").state.size, 9);
        let mut link = state(10, 0);
        link.attributes.target = vec![b'l'; SHORT_BYTES];
        assert!(publish(&mut writer, id.0, (3, word(WORD + 2)), link));
        assert!(grant_cache.attributes(id).is_none() && is_of(&grant_cache.find(id, XATTRS).expect("posted"), 10));
    }

    #[test]
    fn cleared_cache_holds_nothing_of_its_posts() {
        let (mut writer, grant_cache) = grant_caches();
        writer.set_word(0, word(WORD), InodeId(1));
        for round in 0..2 {
            for id in 1..=600 {
                assert!(publish(&mut writer, id, (0, word(WORD)), state(id, 60_000)));
            }
            assert!(!writer.published().is_empty());
            writer.clear();
            assert!(writer.published().is_empty());
            assert!((1..=600).all(|id| grant_cache.find(InodeId(id), XATTRS).is_none()), "round {round}");
            let mut ring = vec![1; RING_BYTES as usize];
            grant_cache.memory.memory().load(RING, &mut ring).expect("read");
            assert!(ring.iter().all(|byte| *byte == 0), "round {round}");
            assert!(publish(&mut writer, 7, (0, word(WORD)), state(7, 9)));
            assert!(is_of(&grant_cache.find(InodeId(7), XATTRS).expect("posted anew"), 7));
        }
    }

    #[test]
    fn reader_of_overwritten_ring_finds_whole_posts_or_none() {
        let (mut writer, grant_cache) = grant_caches();
        writer.set_word(0, word(WORD), InodeId(1));
        let is_over = AtomicBool::new(false);
        let found = std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut found = 0_u64;
                while !is_over.load(Ordering::Relaxed) {
                    for id in 1..=300 {
                        if let Some(post) = grant_cache.find(InodeId(id), XATTRS) {
                            assert!(is_of(&post, id));
                            found += 1;
                        }
                    }
                }
                found
            });
            // Write four times round the ring, with posts of all lengths.
            for round in 0..4_u64 {
                for step in 0..1000 {
                    let id = 1 + (step * 7 + round) % 300;
                    let length = (step * step * 31 % 60_000) as usize;
                    assert!(publish(&mut writer, id, (0, word(WORD)), state(id, length)));
                }
            }
            is_over.store(true, Ordering::Relaxed);
            reading.join().expect("no post was torn")
        });
        assert!(found > 0 && writer.memory.load(KEPT_FROM) > 2 * RING_BYTES, "{found} found");
    }

    #[test]
    fn full_index_drops_the_oldest_posts() {
        let (mut writer, grant_cache) = grant_caches();
        writer.set_word(0, word(WORD), InodeId(1));
        let most = 2 * ROWS * WAYS;
        for id in 1..=most {
            assert!(publish(&mut writer, id, (0, word(WORD)), state(id, 0)));
        }
        let found =
            (1..=most).filter(|id| grant_cache.find(InodeId(*id), XATTRS).is_some_and(|post| is_of(&post, *id)));
        let (old, new): (Vec<_>, Vec<_>) = found.partition(|id| *id <= most / 2);
        assert!(old.len() < new.len() / 8 && new.len() as u64 > most / 3, "{} and {}", old.len(), new.len());
    }
}
