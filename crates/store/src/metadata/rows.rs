//! The rows of the metadata database.
//!
//! A key is one byte for the row's kind, then big-endian numbers, so that rows sort by them. Values are little-endian.
//! `docs/format-store.md` has the diagrams.

use crate::model::JournalMark;
use ashlar_types::{
    FileKind, Inode, InodeId, JournalPosition, LogGeneration, LogPosition, MODE_PERMISSIONS, NodeNumber, QuotaAmount,
    QuotaId, QuotaKey, QuotaLimits, SessionId, Timestamp, VersionRange,
};
use ashlar_update::Entry;

/// The versions of this format that this release reads; it writes the newest.
pub const FORMAT_VERSIONS: VersionRange = VersionRange::new(3, 3);
/// The first version whose superblock row says which is the oldest to understand the rows.
const FIRST_WITH_RANGE: u32 = 3;
/// The superblock row's first bytes.
pub const MAGIC: [u8; 8] = *b"ASHLARST";
/// The superblock row's first bytes while the tree is copied from another node. Earlier releases know no such area.
pub const COPYING_MAGIC: [u8; 8] = *b"ASHLARCP";
/// The version of inode rows.
const INODE_VERSION: u8 = 2;

/// The kinds of rows, by the first byte of their keys.
pub mod kind {
    /// The superblock.
    pub const SUPERBLOCK: u8 = b'A';
    /// A piece of a segment's bitmap of used blocks.
    pub const BITMAP: u8 = b'B';
    /// A directory entry.
    pub const ENTRY: u8 = b'D';
    /// The extents of one chunk of a file.
    pub const CHUNK: u8 = b'E';
    /// An inode.
    pub const INODE: u8 = b'I';
    /// The bytes of a small file.
    pub const INLINE: u8 = b'L';
    /// How far a node's journal is applied.
    pub const JOURNAL: u8 = b'J';
    /// Counters.
    pub const COUNTERS: u8 = b'N';
    /// An orphan.
    pub const ORPHAN: u8 = b'O';
    /// The use and limits of an owner, a group or a subtree.
    pub const QUOTA: u8 = b'Q';
    /// A session.
    pub const SESSION: u8 = b'S';
    /// An extended attribute.
    pub const XATTR: u8 = b'X';
}

/// Bytes of an inode row before a symbolic link's target.
pub const INODE_BYTES: usize = 112;
/// Bytes of an entry row.
pub const ENTRY_BYTES: usize = 9;
/// Bytes of an entry's key before the name.
pub const ENTRY_KEY_BYTES: usize = 17;
/// Bytes of a session row.
pub const SESSION_BYTES: usize = 12;
/// Bytes of the counters row.
pub const COUNTERS_BYTES: usize = 24;
/// Bytes of a journal's mark.
pub const JOURNAL_BYTES: usize = 16;
/// Bytes of a quota row.
pub const QUOTA_BYTES: usize = 32;
/// Bytes of the superblock row.
pub const SUPERBLOCK_BYTES: usize = 24;

const _: () = {
    // kind, version, mode, uid, gid, links, device, size, blocks, entries, parent, four times, quota.
    assert!(INODE_BYTES == 1 + 1 + 2 + 3 * 4 + 5 * 8 + 4 * 12 + 8);
    assert!(ENTRY_BYTES == 8 + 1);
    assert!(SESSION_BYTES == 4 + 8);
    assert!(COUNTERS_BYTES == 3 * 8);
    assert!(QUOTA_BYTES == 4 * 8);
    assert!(SUPERBLOCK_BYTES == 8 + 4 + 4 + 8);
    // LMDB takes keys of at most 511 bytes.
    assert!(ENTRY_KEY_BYTES + ashlar_types::NAME_MAX <= 511 && 9 + ashlar_types::XATTR_NAME_MAX <= 511);
};

/// The counters that outlive the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredCounters {
    /// No inode number from this one on was ever used.
    pub next_inode: u64,
    /// No session number from this one on was ever used.
    pub next_session: u64,
    /// Blocks that files have reserved without having written them.
    pub reserved_blocks: u64,
}

/// The superblock row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The format's versions that understand the rows.
    pub versions: VersionRange,
    /// The arena that the metadata belongs to.
    pub arena: u64,
    /// The rows are a whole tree, and no part of one that is copied.
    pub is_whole: bool,
}

/// A key of a kind and one number.
pub fn key1(kind: u8, number: u64) -> [u8; 9] {
    let mut key = [kind; 9];
    key[1..].copy_from_slice(&number.to_be_bytes());
    key
}

/// A key of a kind and two numbers.
pub fn key2(kind: u8, first: u64, second: u64) -> [u8; 17] {
    let mut key = [kind; 17];
    key[1..9].copy_from_slice(&first.to_be_bytes());
    key[9..].copy_from_slice(&second.to_be_bytes());
    key
}

/// The key of an entry, in a buffer on the stack, since look-ups are many.
pub struct EntryKey {
    bytes: [u8; ENTRY_KEY_BYTES + ashlar_types::NAME_MAX],
    length: usize,
}

impl EntryKey {
    /// The key of `name` in `directory`.
    pub fn new(directory: u64, cookie: u64, name: &[u8]) -> Self {
        let mut bytes = [0; ENTRY_KEY_BYTES + ashlar_types::NAME_MAX];
        let name = &name[..name.len().min(ashlar_types::NAME_MAX)];
        bytes[..ENTRY_KEY_BYTES].copy_from_slice(&key2(kind::ENTRY, directory, cookie));
        bytes[ENTRY_KEY_BYTES..ENTRY_KEY_BYTES + name.len()].copy_from_slice(name);
        Self { bytes, length: ENTRY_KEY_BYTES + name.len() }
    }

    /// The key.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// The key of an extended attribute.
pub fn xattr_key(inode: InodeId, name: &[u8]) -> Vec<u8> {
    let mut key = key1(kind::XATTR, inode.0).to_vec();
    key.extend_from_slice(name);
    key
}

/// The key of a piece of a segment's bitmap.
pub fn bitmap_key(segment: u32, piece: u32) -> [u8; 9] {
    key1(kind::BITMAP, u64::from(segment) << 32 | u64::from(piece))
}

/// Returns the two numbers behind a key's kind, and the rest of the key.
pub fn split_key2(key: &[u8]) -> Option<(u64, u64, &[u8])> {
    let (first, rest) = key.get(1..)?.split_first_chunk::<8>()?;
    let (second, rest) = rest.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*first), u64::from_be_bytes(*second), rest))
}

/// Returns the number behind a key's kind, and the rest of the key.
pub fn split_key1(key: &[u8]) -> Option<(u64, &[u8])> {
    let (first, rest) = key.get(1..)?.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*first), rest))
}

/// Writes an inode row's value behind what `out` holds.
pub fn encode_inode(inode: &Inode, out: &mut Vec<u8>) {
    out.extend_from_slice(&[INODE_VERSION, inode.kind as u8]);
    out.extend_from_slice(&(inode.mode as u16).to_le_bytes());
    for value in [inode.uid, inode.gid, inode.links] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    for value in [inode.device, inode.size, inode.blocks, inode.entries, inode.parent.0] {
        out.extend_from_slice(&value.to_le_bytes());
    }
    for time in [inode.accessed, inode.modified, inode.changed, inode.born] {
        out.extend_from_slice(&time.seconds.to_le_bytes());
        out.extend_from_slice(&time.nanoseconds.to_le_bytes());
    }
    out.extend_from_slice(&inode.quota.0.to_le_bytes());
    out.extend_from_slice(&inode.target);
}

/// Reads an inode row's value.
pub fn decode_inode(value: &[u8]) -> Option<Inode> {
    let mut fields = Fields(value);
    let [version, kind] = fields.array()?;
    if version != INODE_VERSION {
        return None;
    }
    let kind = FileKind::from_u8(kind)?;
    let mode = u32::from(u16::from_le_bytes(fields.array()?));
    let (uid, gid, links) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let (device, size, blocks) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let (entries, parent) = (fields.u64()?, InodeId(fields.u64()?));
    let (accessed, modified) = (fields.time()?, fields.time()?);
    let (changed, born) = (fields.time()?, fields.time()?);
    let quota = QuotaId(fields.u64()?);
    let target = fields.0.to_vec();
    if mode & !MODE_PERMISSIONS != 0 || target.is_empty() == (kind == FileKind::Symlink) {
        return None;
    }
    Some(Inode {
        kind,
        mode,
        uid,
        gid,
        links,
        device,
        size,
        blocks,
        entries,
        parent,
        accessed,
        modified,
        changed,
        born,
        quota,
        target,
    })
}

/// An entry row's value.
pub fn encode_entry(entry: Entry) -> [u8; ENTRY_BYTES] {
    let mut value = [entry.kind as u8; ENTRY_BYTES];
    value[..8].copy_from_slice(&entry.inode.0.to_le_bytes());
    value
}

/// Reads an entry row's value.
pub fn decode_entry(value: &[u8]) -> Option<Entry> {
    let (inode, kind) = value.split_first_chunk::<8>()?;
    let [kind] = kind else { return None };
    Some(Entry { inode: InodeId(u64::from_le_bytes(*inode)), kind: FileKind::from_u8(*kind)? })
}

/// A session row's value: the log's generation, and the position up to which it is committed.
pub fn encode_session(generation: LogGeneration, position: LogPosition) -> [u8; SESSION_BYTES] {
    let mut value = [0; SESSION_BYTES];
    value[..4].copy_from_slice(&generation.0.to_le_bytes());
    value[4..].copy_from_slice(&position.0.to_le_bytes());
    value
}

/// Reads a session row.
pub fn decode_session(key: &[u8], value: &[u8]) -> Option<(SessionId, LogGeneration, LogPosition)> {
    let (session, rest) = split_key1(key)?;
    let mut fields = Fields(value);
    let (generation, position) = (LogGeneration(fields.u32()?), LogPosition(fields.u64()?));
    (rest.is_empty() && fields.0.is_empty()).then_some((SessionId(session), generation, position))
}

/// The counters row's value.
pub fn encode_counters(counters: StoredCounters) -> Vec<u8> {
    [counters.next_inode, counters.next_session, counters.reserved_blocks]
        .iter()
        .flat_map(|n| n.to_le_bytes())
        .collect()
}

/// Reads the counters row's value.
pub fn decode_counters(value: &[u8]) -> Option<StoredCounters> {
    let mut fields = Fields(value);
    let counters =
        StoredCounters { next_inode: fields.u64()?, next_session: fields.u64()?, reserved_blocks: fields.u64()? };
    fields.0.is_empty().then_some(counters)
}

/// Encodes how far a node's journal is applied.
pub fn encode_journal_mark(mark: JournalMark) -> [u8; JOURNAL_BYTES] {
    let mut value = [0; JOURNAL_BYTES];
    value[..8].copy_from_slice(&mark.position.0.to_le_bytes());
    value[8..].copy_from_slice(&mark.order.to_le_bytes());
    value
}

/// Reads how far a node's journal is applied.
pub fn decode_journal_mark(key: &[u8], value: &[u8]) -> Option<(NodeNumber, JournalMark)> {
    let (node, rest) = split_key1(key)?;
    let value: &[u8; JOURNAL_BYTES] = value.try_into().ok()?;
    let word = |at: usize| u64::from_le_bytes(value[at..at + 8].try_into().unwrap_or_default());
    let mark = JournalMark { position: JournalPosition(word(0)), order: word(8) };
    let node = NodeNumber::new(u16::try_from(node).ok()?)?;
    rest.is_empty().then_some((node, mark))
}

/// Bits of a quota's number below its kind.
const QUOTA_KIND_SHIFT: u32 = QuotaId::BITS;

/// The number of an owner, a group or a subtree among all of them: its kind in the highest byte.
pub const fn quota_number(key: QuotaKey) -> u64 {
    match key {
        QuotaKey::User(uid) => 1 << QUOTA_KIND_SHIFT | uid as u64,
        QuotaKey::Group(gid) => 2 << QUOTA_KIND_SHIFT | gid as u64,
        QuotaKey::Subtree(id) => 3 << QUOTA_KIND_SHIFT | id.0 & ((1 << QUOTA_KIND_SHIFT) - 1),
    }
}

/// Returns the user, group or subtree of a number.
pub fn quota_key_of(number: u64) -> Option<QuotaKey> {
    let id = number & ((1 << QUOTA_KIND_SHIFT) - 1);
    match number >> QUOTA_KIND_SHIFT {
        1 => u32::try_from(id).ok().map(QuotaKey::User),
        2 => u32::try_from(id).ok().map(QuotaKey::Group),
        3 => Some(QuotaKey::Subtree(QuotaId(id))).filter(|_| id != 0),
        _ => None,
    }
}

/// The key of a quota's row.
pub fn quota_row_key(key: QuotaKey) -> [u8; 9] {
    key1(kind::QUOTA, quota_number(key))
}

/// Stands for a limit that there is not.
const UNLIMITED: u64 = u64::MAX;

/// A quota row's value: blocks and inodes used, and the limits of both.
pub fn encode_quota(used: QuotaAmount, limits: QuotaLimits) -> Vec<u8> {
    let limit = |limit: Option<u64>| limit.unwrap_or(UNLIMITED);
    let fields = [used.blocks, used.inodes, limit(limits.blocks), limit(limits.inodes)];
    fields.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// Reads a quota row.
pub fn decode_quota(key: &[u8], value: &[u8]) -> Option<(QuotaKey, QuotaAmount, QuotaLimits)> {
    let (number, rest) = split_key1(key)?;
    let mut fields = Fields(value);
    let used = QuotaAmount { blocks: fields.u64()?, inodes: fields.u64()? };
    let mut limit = || Some(Some(fields.u64()?).filter(|&limit| limit != UNLIMITED));
    let limits = QuotaLimits { blocks: limit()?, inodes: limit()? };
    (rest.is_empty() && fields.0.is_empty()).then_some((quota_key_of(number)?, used, limits))
}

/// The superblock row's value.
pub fn encode_superblock(superblock: Superblock) -> Vec<u8> {
    let mut value = if superblock.is_whole { MAGIC } else { COPYING_MAGIC }.to_vec();
    value.extend_from_slice(&superblock.versions.current.to_le_bytes());
    value.extend_from_slice(&superblock.versions.oldest.to_le_bytes());
    value.extend_from_slice(&superblock.arena.to_le_bytes());
    value
}

/// Reads the superblock row's value. The versions come first, so that later releases may change what follows.
pub fn decode_superblock(value: &[u8]) -> Option<Superblock> {
    let mut fields = Fields(value);
    let is_whole = match fields.array()? {
        MAGIC => true,
        COPYING_MAGIC => false,
        _ => return None,
    };
    let current = fields.u32()?;
    let oldest = if current < FIRST_WITH_RANGE { current } else { fields.u32()? };
    Some(Superblock { versions: VersionRange::new(oldest, current), arena: fields.u64()?, is_whole })
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.array()?))
    }
    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.array()?))
    }
    fn time(&mut self) -> Option<Timestamp> {
        let (seconds, nanoseconds) = (i64::from_le_bytes(self.array()?), self.u32()?);
        (nanoseconds < 1_000_000_000).then_some(Timestamp { seconds, nanoseconds })
    }
}

#[cfg(test)]
mod tests {
    use ashlar_types::{NameHashKey, name_cookie};

    use super::*;

    fn sample(kind: FileKind, target: &[u8]) -> Inode {
        let time = |n: i64| Timestamp { seconds: -n, nanoseconds: n as u32 };
        Inode {
            kind,
            mode: 0o6755,
            uid: 1,
            gid: 2,
            links: 3,
            device: 4,
            size: 5,
            blocks: 6,
            entries: 7,
            parent: InodeId(8),
            accessed: time(9),
            modified: time(10),
            changed: time(11),
            born: time(12),
            quota: QuotaId(13),
            target: target.to_vec(),
        }
    }

    #[test]
    fn inodes_survive_their_rows() {
        for inode in [sample(FileKind::Regular, b""), sample(FileKind::Symlink, b"to/there")] {
            let mut value = Vec::new();
            encode_inode(&inode, &mut value);
            assert_eq!(value.len(), INODE_BYTES + inode.target.len());
            assert_eq!(decode_inode(&value), Some(inode));
            assert_eq!(decode_inode(&value[..INODE_BYTES - 1]), None);
            value[1] = 3;
            assert_eq!(decode_inode(&value), None);
        }
    }

    /// Cookies are in the keys of entries, so a release that hashed otherwise would find no file any more. These are
    /// the values of the reference implementation of SipHash-1-3.
    #[test]
    fn cookies_never_change() {
        let key = NameHashKey(std::array::from_fn(|i| i as u8));
        assert_eq!(name_cookie(&key, b""), 0xabac_0158_050f_c4dc >> 1);
        assert_eq!(name_cookie(&key, &[0]), 0xc9f4_9bf3_7d57_ca93 >> 1);
    }

    #[test]
    fn small_rows_survive() {
        let entry = Entry { inode: InodeId(77), kind: FileKind::Fifo };
        assert_eq!(decode_entry(&encode_entry(entry)), Some(entry));
        assert_eq!(decode_entry(&encode_entry(entry)[..8]), None);
        let session = (SessionId(5), LogGeneration(2), LogPosition(3));
        let key = key1(kind::SESSION, 5);
        assert_eq!(decode_session(&key, &encode_session(session.1, session.2)), Some(session));
        let used = QuotaAmount { blocks: 7, inodes: 8 };
        for key in [QuotaKey::User(u32::MAX), QuotaKey::Group(0), QuotaKey::Subtree(QuotaId(1))] {
            for limits in [QuotaLimits::default(), QuotaLimits { blocks: Some(0), inodes: Some(5) }] {
                let (row, value) = (quota_row_key(key), encode_quota(used, limits));
                assert_eq!(value.len(), QUOTA_BYTES);
                assert_eq!(decode_quota(&row, &value), Some((key, used, limits)));
                assert_eq!(decode_quota(&row[..8], &value), None);
            }
        }
        let counters = StoredCounters { next_inode: 1, next_session: 2, reserved_blocks: 3 };
        assert_eq!(encode_counters(counters).len(), COUNTERS_BYTES);
        assert_eq!(decode_counters(&encode_counters(counters)), Some(counters));
        for is_whole in [true, false] {
            let superblock = Superblock { versions: VersionRange::new(3, 4), arena: 9, is_whole };
            assert_eq!(encode_superblock(superblock).len(), SUPERBLOCK_BYTES);
            assert_eq!(decode_superblock(&encode_superblock(superblock)), Some(superblock));
        }
        let of_version_2 = [&MAGIC[..], &[2, 0, 0, 0], &[7; 24]].concat();
        let found = decode_superblock(&of_version_2).expect("read as far as it goes");
        assert_eq!(found.versions, VersionRange::new(2, 2));
        let key = EntryKey::new(1, 9, b"name");
        assert_eq!(split_key2(key.as_bytes()), Some((1, 9, &b"name"[..])));
    }
}
