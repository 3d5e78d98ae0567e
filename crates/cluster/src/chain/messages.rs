//! The messages between a writer and its replica: `docs/replication.md`, section "The chain of two".

use ashlar_journal::{Lineage, LineageEntry};
use ashlar_types::{Epoch, JournalPosition, VersionRange};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The versions of these messages.
pub const PEER_VERSIONS: VersionRange = VersionRange::new(1, 1);
/// Bytes of frames in one message, at most.
pub const FRAMES_BYTES_MAX: usize = 512 << 10;

/// Why bytes are no message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the peer sent something that is no message: {0}")]
pub struct MessageError(&'static str);

/// A replica's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follow {
    /// The epoch of its document.
    pub epoch: Epoch,
    /// The epochs of its copy's frames.
    #[serde(with = "lineage_entries")]
    pub lineage: Lineage,
    /// The end of its copy.
    pub end: JournalPosition,
    /// How far it has applied its copy: the copy can't be cut before.
    pub applied: JournalPosition,
    /// How far it has committed it: that much was durable at its writer.
    pub committed: JournalPosition,
    /// Its store is whole. Otherwise the file system must be copied first.
    pub is_whole: bool,
    /// The `min_replicas` of its document.
    pub min_replicas: u8,
    /// The room of its arena, if its store is whole.
    pub room: Option<CopyRoom>,
}

/// The room of a replica's arena, used or free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyRoom {
    /// Blocks of data.
    pub blocks: u64,
    /// Bytes of metadata.
    pub metadata_bytes: u64,
}

/// A writer's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lead {
    /// The epoch of its document.
    pub epoch: Epoch,
    /// It acknowledges without its replica at present, and may have done so since the replica was in sync.
    pub is_alone: bool,
    /// The epochs of its journal's frames.
    #[serde(with = "lineage_entries")]
    pub lineage: Lineage,
    /// The position of the first frame that it sends.
    pub from: JournalPosition,
}

/// A writer's answer to a replica that needs a copy of the whole file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyOffer {
    /// The epoch of its document.
    pub epoch: Epoch,
}

/// The end of a copy of the whole file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyTarget {
    /// The position of the writer's journal at which the copy is, and the next frame.
    pub position: JournalPosition,
    /// The checksum with which the next frame is seeded.
    pub seed: u32,
    /// The epochs of the journal's frames.
    #[serde(with = "lineage_entries")]
    pub lineage: Lineage,
}

/// Why a writer does not lead a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusedLead {
    /// The replica has committed frames that the writer's journal does not have: the writer has lost updates.
    OtherCopy,
    /// The two have different documents.
    OtherEpoch(Epoch),
    /// The two documents have another `min_replicas`.
    OtherMinReplicas {
        /// The writer's.
        min_replicas: u8,
        /// As in [`Lead`].
        is_alone: bool,
    },
}

/// A message between a writer and its replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerMessage<'a> {
    /// A replica begins.
    Follow(Follow),
    /// The writer answers.
    Lead(Lead),
    /// The writer refuses.
    Refused(RefusedLead),
    /// The replica's copy ends where the writer's frames go on, and is durable.
    Ready,
    /// Frames, as they stand in the journal; none if only `durable` is news.
    Frames {
        /// The position up to which the journal is durable at the writer.
        durable: JournalPosition,
        /// The frames. They follow the encoded message.
        #[serde(skip)]
        bytes: &'a [u8],
    },
    /// The replica's copy is durable up to a position, and committed up to another.
    Ack {
        /// Durable.
        durable: JournalPosition,
        /// Committed to the replica's store.
        committed: JournalPosition,
    },
    /// With its copy up to `at`, the replica has all that was acknowledged to sessions.
    InSync {
        /// The journal's end.
        at: JournalPosition,
    },
    /// The writer ends in order, and its journal ends here.
    Stopped {
        /// The journal's end.
        at: JournalPosition,
    },
    /// The replica has recorded that.
    StopNoted,
    /// The sender is there.
    Beat,
    /// The writer will send the whole file system. The replica empties its store, and answers that it is ready.
    CopyBegin(CopyOffer),
    /// A part of the file system.
    CopyPart {
        /// The part. It follows the encoded message.
        #[serde(skip)]
        bytes: &'a [u8],
    },
    /// The replica has stored so many parts.
    CopyTaken {
        /// Parts since the copy began.
        parts: u64,
    },
    /// All parts were sent. The replica makes its copy whole and connects again.
    CopyEnd {
        /// Where the copy goes on.
        target: CopyTarget,
        /// The store's part of the end. It follows the encoded message.
        #[serde(skip)]
        bytes: &'a [u8],
    },
}

impl<'a> PeerMessage<'a> {
    /// Returns the message's head; the bytes of frames, or of a part, follow it.
    #[must_use]
    pub fn encode_head(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("memory takes any message")
    }

    /// Returns the bytes that follow the head.
    #[must_use]
    pub fn tail(&self) -> &'a [u8] {
        match self {
            Self::Frames { bytes, .. } | Self::CopyPart { bytes } | Self::CopyEnd { bytes, .. } => bytes,
            _ => &[],
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let (mut message, rest) = postcard::take_from_bytes::<PeerMessage<'_>>(bytes)
            .map_err(|_| MessageError("an unknown kind, a part is missing, or a lineage that no journal has"))?;
        match &mut message {
            Self::Frames { bytes, .. } | Self::CopyPart { bytes } | Self::CopyEnd { bytes, .. } => *bytes = rest,
            _ if rest.is_empty() => {}
            _ => return Err(MessageError("it is too long")),
        }
        Ok(message)
    }
}

/// A lineage as it is encoded: its entries.
mod lineage_entries {
    use super::{Deserialize, Epoch, JournalPosition, Lineage, LineageEntry, Serialize};

    pub fn serialize<S: serde::Serializer>(lineage: &Lineage, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = lineage.entries().iter().map(|LineageEntry { begin, epoch }| (*begin, *epoch));
        entries.collect::<Vec<_>>().serialize(serializer)
    }

    pub fn deserialize<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Lineage, D::Error> {
        let entries = Vec::<(JournalPosition, Epoch)>::deserialize(deserializer)?;
        let entries = entries.into_iter().map(|(begin, epoch)| LineageEntry { begin, epoch }).collect();
        Lineage::from_entries(entries).ok_or_else(|| serde::de::Error::custom("a lineage that no journal has"))
    }
}
