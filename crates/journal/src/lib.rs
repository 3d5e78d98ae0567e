//! The journal: what a node's sessions logged, with the node's verdict, as every replica applies it.
//!
//! Purpose: SharedFS of a node writes frames into a ring, in memory that outlives it. The same bytes stand at the same
//! positions in every replica's copy. A replica applies them and validates nothing.
//!
//! * The writing node encodes a [`FrameBody`] and appends it ([`JournalRing::append`]). It flushes by a [`FlushJob`],
//!   without a lock, and commits up to the flushed position only.
//! * A sender walks over whole frames ([`JournalRing::skip_frame`]) and takes their bytes ([`JournalRing::parts`]).
//! * A replica checks and stores these bytes ([`JournalRing::append_copied`]), reads them ([`JournalRing::read_frame`])
//!   and applies them.
//! * A start reads all frames from the head on: [`JournalRing::open`] has found the end.
//! * A node that compares its copy with another one uses [`Lineage::last_common`], and cuts its copy
//!   ([`JournalRing::cut`]).
//!
//! # Invariants
//! * **Prefix**: after a crash, the frames are a prefix of those appended, and hold all that were flushed.
//! * **Nothing stale or torn is a frame**: a checksum covers header and body, and is seeded with that of the frame
//!   before. A frame's position and epoch are the expected ones. A cut end is zeros before the cut returns.
//! * **Space is reused late**: bytes are overwritten only after a head behind them is durable, and the head stays
//!   within the caller's bound and the flushed position.
//! * **Bounded**: decoding never panics, and takes memory in proportion to the frame's bytes.
//!
//! Not here: what records mean, which frames to write, when to flush, how far to reuse, which copy is right. All
//! writers of a journal are trusted: checksums find damage, not forgery.
//!
//! The format is in `docs/format-journal.md`.
//!
//! Source: LineFS (SOSP 2021), §3; comparing lineages as Kafka's leader epochs (KIP-101).
#![forbid(unsafe_code)]

mod body;
mod encode;
mod error;
mod frame;
mod layout;
mod lineage;
mod records;
mod ring;
mod scan;
#[cfg(test)]
mod tests;

pub use body::{BatchVerdict, FrameBody, LogRecords, OwnAct, RefusalReason, RefusedRecord, SessionBegan, split_batch};
pub use encode::EncodedFrame;
pub use error::{CopyError, FrameError, FrameFault, JournalDamaged, JournalError, JournalOpenError};
pub use frame::{FRAME_BYTES_MAX, FRAME_HEADER_BYTES, FrameHeader, FrameKind, StoredFrame, frame_bytes};
pub use layout::JournalIdentity;
pub use lineage::{LINEAGE_ENTRIES_MAX, Lineage, LineageEntry};
pub use records::{BatchRecord, push_record, read_records};
pub use ring::{AppendedFrame, FlushJob, JournalCursor, JournalRing, TruncateJob};
