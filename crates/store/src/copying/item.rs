//! The items of a copy, and their encoding.
//!
//! A part is a sequence of items, each in postcard's encoding. An item says all about one row, or about some blocks of
//! one chunk, so items may come in any order and more than once: the last one of a row counts. Numbers of kinds never
//! change their meaning; the messages around the parts have the version.

use ashlar_types::{
    BLOCK_BYTES, FileKind, Inode, InodeId, LogGeneration, LogPosition, NodeNumber, QuotaAmount, QuotaKey, QuotaLimits,
    SessionId,
};
use serde::{Deserialize, Serialize, Serializer};

use crate::copying::error::FullCopyError;
use crate::metadata::chunk::CHUNK_BLOCKS;
use crate::model::JournalMark;

/// Bytes of a part, at most.
pub const COPY_PART_BYTES_MAX: usize = 256 << 10;
/// Blocks whose bytes are in one item, at most: half a part, so that two items fill one.
pub const ITEM_BLOCKS_MAX: u64 = 31;

/// Bytes of an item beside the bytes of blocks, of a name or of a value, at most.
const ITEM_HEAD_BYTES_MAX: usize = 512;
const _: () = {
    assert!(ITEM_BLOCKS_MAX as usize * BLOCK_BYTES as usize + ITEM_HEAD_BYTES_MAX <= COPY_PART_BYTES_MAX / 2);
    assert!(ashlar_types::XATTR_VALUE_MAX + ashlar_types::XATTR_NAME_MAX + ITEM_HEAD_BYTES_MAX <= COPY_PART_BYTES_MAX);
    assert!(CHUNK_BLOCKS <= u8::MAX as u64);
};

/// One row of the writer's tree, or some blocks of a file. `None` in place of a value: the row is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopyItem<'a> {
    /// An inode.
    Inode {
        /// Its number.
        inode: InodeId,
        /// Its attributes.
        value: Option<Inode>,
    },
    /// A directory entry.
    Entry {
        /// The directory.
        directory: InodeId,
        /// The name.
        name: &'a [u8],
        /// The inode that it leads to.
        target: Option<(InodeId, FileKind)>,
    },
    /// Blocks of a file, all in one chunk of its map.
    Blocks {
        /// The file.
        inode: InodeId,
        /// The first block in the file.
        first: u64,
        /// The blocks.
        #[serde(borrow)]
        blocks: CopiedBlocks<'a>,
    },
    /// The bytes of a small file.
    Inline {
        /// The file.
        inode: InodeId,
        /// The bytes.
        bytes: Option<&'a [u8]>,
    },
    /// An extended attribute.
    Xattr {
        /// The inode.
        inode: InodeId,
        /// The name.
        name: &'a [u8],
        /// The value.
        value: Option<&'a [u8]>,
    },
    /// Whether an inode is an orphan.
    Orphan {
        /// The inode.
        inode: InodeId,
        /// It has no links and is still there.
        is_orphan: bool,
    },
    /// A session: its log's generation, and how far the log is applied.
    Session {
        /// The session.
        session: SessionId,
        /// Its state.
        state: Option<(LogGeneration, LogPosition)>,
    },
    /// The use and the limits of a user, a group or a subtree.
    Quota {
        /// The account.
        key: QuotaKey,
        /// Its row.
        account: Option<(QuotaAmount, QuotaLimits)>,
    },
}

/// Blocks that follow each other in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CopiedBlocks<'a> {
    /// So many blocks are a hole.
    Hole(u8),
    /// So many blocks are reserved and not written.
    Reserved(u8),
    /// Written blocks.
    Written {
        /// The bytes of whole blocks.
        #[serde(serialize_with = "serialize_bytes")]
        bytes: &'a [u8],
        /// The blocks among them, by index, that are damaged at the writer. They must be damaged in the copy.
        damaged: Vec<u8>,
    },
}

/// Writes bytes at once; serde's own way writes them one by one.
fn serialize_bytes<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

/// The end of a copy, which the writer knows when its last pass begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyEnd {
    /// The writer.
    pub writer: NodeNumber,
    /// The copy is the tree at this position of the writer's journal.
    pub mark: JournalMark,
    /// How many inodes the tree has.
    pub inodes: u64,
    /// How many entries it has.
    pub entries: u64,
}

impl CopyEnd {
    /// Returns the encoded end.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("memory takes any end")
    }

    /// Reads an end.
    ///
    /// # Errors
    /// [`FullCopyError::Encoding`].
    pub fn decode(bytes: &[u8]) -> Result<Self, FullCopyError> {
        match postcard::take_from_bytes(bytes) {
            Ok((end, [])) => Ok(end),
            _ => Err(FullCopyError::Encoding("an end is damaged")),
        }
    }
}

impl<'a> CopyItem<'a> {
    /// Appends the encoded item to a part.
    pub fn encode(&self, part: &mut Vec<u8>) {
        let encoded = postcard::to_extend(self, std::mem::take(part));
        *part = encoded.expect("memory takes any item");
    }

    /// Takes the first item off a part.
    ///
    /// # Errors
    /// [`FullCopyError::Encoding`].
    pub fn decode(part: &'a [u8]) -> Result<(Self, &'a [u8]), FullCopyError> {
        postcard::take_from_bytes(part).map_err(|_| FullCopyError::Encoding("an unknown kind, or a part is missing"))
    }
}

#[cfg(test)]
mod tests {
    use ashlar_types::Timestamp;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn items_survive_their_encoding() {
        let inode = Inode::new(FileKind::Directory, 0o755, InodeId::ROOT, Timestamp { seconds: -5, nanoseconds: 7 });
        let bytes = vec![5; 2 * BLOCK_BYTES as usize];
        let written = CopiedBlocks::Written { bytes: &bytes, damaged: vec![1] };
        let key = QuotaKey::User(7);
        let account = (QuotaAmount { blocks: 1, inodes: 2 }, QuotaLimits { blocks: None, inodes: Some(3) });
        let items = [
            CopyItem::Inode { inode: InodeId(9), value: Some(inode) },
            CopyItem::Inode { inode: InodeId(9), value: None },
            CopyItem::Entry { directory: InodeId(1), name: b"name", target: Some((InodeId(9), FileKind::Fifo)) },
            CopyItem::Blocks { inode: InodeId(9), first: 1 << 40, blocks: written },
            CopyItem::Blocks { inode: InodeId(9), first: 0, blocks: CopiedBlocks::Hole(128) },
            CopyItem::Blocks { inode: InodeId(9), first: 0, blocks: CopiedBlocks::Reserved(1) },
            CopyItem::Inline { inode: InodeId(9), bytes: Some(b"small") },
            CopyItem::Xattr { inode: InodeId(9), name: b"user.x", value: Some(b"") },
            CopyItem::Orphan { inode: InodeId(9), is_orphan: true },
            CopyItem::Session { session: SessionId(3), state: Some((LogGeneration(1), LogPosition(2))) },
            CopyItem::Quota { key, account: Some(account) },
        ];
        let mut part = Vec::new();
        items.iter().for_each(|item| item.encode(&mut part));
        let mut rest = &part[..];
        for item in &items {
            let (found, behind) = CopyItem::decode(rest).unwrap();
            assert_eq!(found, *item);
            rest = behind;
        }
        assert!(rest.is_empty());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_an_item_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok((item, _)) = CopyItem::decode(&bytes) {
                let mut part = Vec::new();
                item.encode(&mut part);
                prop_assert_eq!(CopyItem::decode(&part).unwrap(), (item, &[][..]));
            }
        }
    }
}
