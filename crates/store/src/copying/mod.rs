//! A full copy of a store's tree into the store of another node, while the first one works on.
//!
//! The writer reads its *committed* rows in short steps ([`CopySource`]), each with a snapshot of its own and without
//! the store. It sends them as items ([`CopyItem`]), in parts of a bounded size, and the replica stores these
//! ([`StoreImport`]).
//!
//! # Passes
//! The first pass sends all rows. Meanwhile the writer's store notes the keys of the rows that commits change. All rows
//! of inodes that are made meanwhile are among them, so that the first pass leaves these out. Each further pass sends
//! the rows noted since the last one began, as they are then; a row that is gone is sent as a removal. The last
//! pass reads one snapshot, which is the tree at the journal position C of its mark. Frames from C on are then applied
//! to the copy, as by any replica.
//!
//! A touched row is noted with its key, not with its inode: of a long file that programs write to all the time, a pass
//! sends the touched chunks of 512 KiB, so that passes become short. They do not if the writer changes more than the
//! copy sends: then the caller must slow the writer down, or the copy fails in the end
//! ([`FullCopyError::TooManyTouched`]).
//!
//! Rows that are sent: inodes, entries, chunks with their blocks, inline bytes, extended attributes, orphans, sessions,
//! quotas. Rows that are local to a store: the superblock, the bitmaps and the counters (the replica has blocks and
//! numbers of its own; the count of its reserved blocks follows from its chunks), and the marks of journals. The copy
//! gets one mark, of the writer's journal at C.
//!
//! # Why the copy is the tree at C
//! * *Rows.* Take a row's last change up to C, by commit N. N was frozen before it became visible, and its keys are
//!   noted before that. The last pass takes its snapshot, and then the keys. So N's keys are among them, or among those
//!   of an earlier pass. Keys of a commit that is under way when a pass takes them are kept for the next pass as well.
//!   So if no later pass has N's keys, N was visible before the pass with them began, and that pass has sent the row as
//!   of N.
//! * *Data.* The bytes are those of the snapshot, never later ones. It would not do to send bytes that may be newer and
//!   let frames from C on write them again: a write of a part of a block keeps the rest of the old block, and at the
//!   replica that rest would be another file's, if the writer had freed the block and used it again before it was read.
//!   The store overwrites no block to which a committed row refers. A block that is freed after the snapshot waits for
//!   the reader (`blocks::readers`). It does so for one step only, or for the last pass.
//! * *Frames.* The caller keeps the writer's journal from before it begins the last pass: C is the position of a commit
//!   that is done by then or later, so the frame at C is still there.
//!
//! # Crashes
//! [`StoreImport::begin`] empties the replica's store and marks it in one transaction: its superblock is one that
//! [`Store::open`] refuses ([`StoreError::Copying`]), in this release and in earlier ones. So it is never written to,
//! adopted or promoted. [`StoreImport::finish`] writes the position C and the mark of a whole store in one transaction,
//! after all data are durable. After a crash of the replica before that, the copy begins anew. A crash of the writer
//! loses no more than the passes: nothing of them is durable there.
//!
//! The caller makes the replica's copy of the journal, which begins at C, *before* it finishes: a whole store without
//! frames to go on from would have to be copied again.
//!
//! Not here: the messages around the parts, flow control, and when a pass is short enough to be the last one. Nor a
//! check of the tree: a writer that sends a tree with contradictions is believed, as with its frames. `fsck` tells.
//!
//! [`Store::open`]: crate::Store::open
//! [`StoreError::Copying`]: crate::StoreError::Copying

mod error;
mod import;
mod item;
mod source;
pub(crate) mod touched;

pub use error::FullCopyError;
pub use import::StoreImport;
pub use item::{COPY_PART_BYTES_MAX, CopiedBlocks, CopyEnd, CopyItem};
pub use source::{CopyBacklog, CopyProgress, CopySource};
