//! The shared area: metadata in LMDB, data in the arena's segments.
//!
//! Purpose: hold the file system as the digested logs have made it, through any crash. [`Store`] is the tree that
//! [`ashlar_update::apply`] works on; tests check it against `ashlar_update::model::ModelTree`.
//!
//! # How it works
//! * **Apply and commit are separate.** An update changes a batch in memory, which is read from at once; data goes to
//!   its blocks at once. [`Store::begin_commit`] freezes the batch, [`CommitJob::run`] writes it in one LMDB
//!   transaction without the store, [`Store::finish_commit`] lets it go. A file that is made and deleted within a batch
//!   never reaches LMDB.
//! * **Metadata** are rows of bytes (`docs/format-store.md`). A file's map is cut into chunks of 128 blocks, one row
//!   each, so that a change needs no search for neighbours. Files of up to [`INLINE_BYTES_MAX`] bytes that never had
//!   blocks are rows.
//! * **Data** are blocks of 4 KiB with a CRC32C each, in the segment beside them.
//! * **Copies.** [`Store::begin_copy`] reads the committed tree for another node while the store works on, and
//!   [`StoreImport`] stores it there (module `copying`).
//! * **Files or memory.** [`Store::open`] works on an arena and LMDB, [`Store::open_in_memory`] on their twins
//!   ([`MemoryArena`]), which crash and fail as planned. The modules `database` and `medium` hide the difference.
//!
//! # Invariants
//! * A committed row never refers to a block that is not durable, and such a block is never overwritten. Blocks given
//!   out since the last freeze may be, so that many small appends cost one block.
//! * A freed block is given out again only after the commit that freed it, and after the end of each check or copy that
//!   reads a state from before. The session that freed it must also have
//!   released its log that far. Pins are in memory only: a process that opens the store again must ensure that no
//!   session reads by extents from before.
//! * A block that a process has mapped is given out to no other file, and overwritten only when no committed row refers
//!   to it.
//! * A session's committed position changes in the transaction that commits its log's updates up to there.
//! * A commit that fails loses nothing; the same batch is tried again.
//! * A damaged block that is partly overwritten stays detectably damaged.
//! * The use of an owner, a group or a subtree is the sum over its inodes, as applied and as committed.
//! * An update that fails leaves the state as it was, or poisons the store until it is opened again.
//!
//! Not here: leases, permissions, logs, clocks, and threads: the daemon runs the jobs.
//!
//! `unsafe` is needed once, to open LMDB's environment (`database::lmdb`), and denied everywhere else.
//!
//! Source: `docs/design.md`, section "Data path"; Assise §3; the layout's measurements are in
//! `docs/decisions/store-and-digest.md`.
#![deny(unsafe_code)]

mod blocks;
mod checking;
mod commit;
mod copying;
mod database;
mod dump;
mod error;
mod files;
mod format;
mod medium;
mod metadata;
mod model;
mod opening;
mod quotas;
mod store;
mod tree;

// The arenas that the crate's own tests and those in `tests/` share.
#[cfg(test)]
extern crate self as ashlar_store;
#[cfg(test)]
#[path = "../tests/store/media.rs"]
#[allow(dead_code, reason = "the tests in `tests/store` use the rest")]
mod test_media;

pub use blocks::segment::StoreSegment;
pub use checking::checker::Checker;
pub use checking::problem::{CheckProgress, CheckReport, PROBLEMS_MAX, Problem, TreeCounts};
pub use commit::{CommitDone, CommitJob};
pub use copying::{
    COPY_PART_BYTES_MAX, CopiedBlocks, CopyBacklog, CopyEnd, CopyItem, CopyProgress, CopySource, FullCopyError,
    StoreImport,
};
pub use database::{CommitFault, CommitObserver, DatabaseError, MemoryDatabase};
pub use dump::{
    DumpComparison, DumpDifference, DumpError, DumpHash, DumpLines, DumpSubject, DumpSummary, InodePart, compare_dumps,
};
pub use error::StoreError;
pub use medium::{MemoryArena, MemoryArenaOptions, PersistObserver};
pub use model::{ArenaSpace, Committed, JournalMark, MapBlocks, MappedRun, RoomLimit, SessionState, Xattrs};
pub use quotas::Move;
pub use store::Store;

/// Bytes of the largest file that is kept in a row instead of blocks.
pub const INLINE_BYTES_MAX: u64 = 1024;
