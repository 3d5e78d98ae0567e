//! The node's journal: what sessions logged, with the node's verdicts, for replicas.
//!
//! The writing node appends to it ([`NodeJournal`]) under the lock of its state, before any session sees the effect.
//! A replica applies it ([`Replica`], [`FrameApplier`]) and judges nothing. So does a start, for frames that the store
//! lacks.
//!
//! A machine by itself has no journal.
//!
//! The format is in `docs/format-journal.md`.

pub mod acts;
pub mod applier;
pub mod copy;
pub mod log_limits;
pub mod replica;
pub mod writer;

pub use applier::{FrameApplier, ReplayError, ReplicaFault};
pub use copy::{CopyPart, CopyPlan, CopySender, CopyState};
pub use replica::{JournalCopy, Replica, ReplicaStore};
pub use writer::{BatchNotes, NodeJournal};
