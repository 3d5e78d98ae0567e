//! The arena: segment files, their medium, and the meaning of *persist* on it.
//!
//! Purpose: one way to reach shared, persistent memory ([`Mapping`], through the [`Persistent`] trait), and one
//! description of that memory ([`Medium`]). [`Arena`] is the directory of files that makes up a node's arena.
//! [`CrashTwin`] stands in for a mapping in tests and knows the possible states after a crash.
//!
//! # The crash model
//! Every crate above relies on this model and on no other; [`CrashTwin`] is its executable form.
//!
//! * The unit is the aligned 8-byte **word**: after a crash a word holds, whole, one of the values that it was given.
//! * A word is **clean** when its last value is known to be on the medium; **dirty** from a store until a flush of its
//!   line; **in flight** from the flush until the flushing thread's next fence.
//! * A fence makes the values that were flushed before it durable. Until then any subset of the unsettled words may
//!   have reached the medium. Caches evict lines at any time and in any order, so a dirty word may survive as well. A
//!   word that was stored several times may survive with any of its values.
//! * On [`MediumKind::Disk`] and [`MediumKind::Memory`] flush and fence do nothing, since the page cache outlives every
//!   process. After a power loss each 4096-byte page of a disk file holds its content of the last
//!   [`Persistent::sync`], or a later one, independently of all other pages.
//!
//! # Invariants
//! * No reference to mapped memory ever exists: other processes write to it. Bytes are copied in and out, words are
//!   atomics, and every access is bounds-checked and fails with a typed error. [`CheckedMemory`] proves once that a
//!   page is whole; accesses at its typed offsets can't fail.
//! * A process that truncates its file harms no other: the file's mapping reads as zeros and reports that it is
//!   truncated ([`sigbus`]).
//! * An arena stands in a directory that no other user can change, and no file in it is opened through a symbolic link.
//! * A segment's blocks are allocated when the segment is added, so a full disk shows then, and not as a fault later.
//!
//! Not here: allocation of blocks, the content of logs and of the metadata directory, checksums of blocks.
//!
//! Source: `docs/design.md`, section "Arenas"; the crash model is that of the verified-storage and SquirrelFS work.

mod arena;
mod checked_memory;
mod crash;
mod crc32c;
mod file_handle;
mod flush;
pub mod huge;
mod mapping;
mod medium;
mod peer;
mod persistent;
mod private_directory;
#[cfg(target_arch = "x86_64")]
pub mod processor;
mod read_ahead;
mod shared_memory;
mod shared_words;
pub mod sigbus;
mod superblock;
mod write_gate;

pub use arena::{
    ARENA_BYTES_MIN, Arena, ArenaError, ArenaOptions, Resized, SEGMENT_BYTES_MAX, SegmentInfo, SessionFile, allocate,
};
pub use checked_memory::{CheckedMemory, PartAt, Readable, RowsAt, WordAt, Writable};
pub use crash::{CrashImages, CrashMedium, CrashState, CrashTwin};
pub use crc32c::Crc32c;
pub use file_handle::open_by_handle;
pub use flush::FlushMethod;
pub use huge::{HUGE_PAGE_BYTES, HugePages};
pub use mapping::{MapError, Mapping, MappingAccess, is_only_user, replace_descriptor};
pub use medium::{Medium, MediumKind};
pub use peer::{peer_groups, peer_process, set_descriptors_pass};
pub use persistent::{OutOfBounds, Persistent};
pub use private_directory::{DirectoryError, PrivateDirectory, UnsafeReason, resolve_directory};
pub use read_ahead::FetchedAhead;
pub use shared_memory::SharedMemory;
pub use superblock::ArenaSummary;
pub use write_gate::WriteGate;
