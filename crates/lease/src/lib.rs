//! Leases and file locks as state machines without I/O.
//!
//! Purpose: decide which session may read or write which inode. Sessions of one machine share files with linearizable
//! results, and their warm operations cost no message. The crate also keeps POSIX record locks and `flock` locks
//! ([`locks`]). The shell (SharedFS, behind one lock) passes events in with `handle_*` and performs the commands that
//! `poll_*` returns, one by one and in order. Time, ancestry and log positions are arguments of the calls.
//!
//! # How it works
//!
//! A session's leases stand in *slots* of a table in shared memory. A slot's word holds a generation and a mode. The
//! session's cached state is valid as long as the slot on which it was granted has the generation of the grant. So a
//! revocation is a store by SharedFS and needs no help from the holder: a stopped holder causes no delay.
//!
//! A lease has a [`LeaseTarget`]: one inode, the files of a directory, or a directory and everything below it. Node
//! leases are read (shared) or write (exclusive). Leases on files are always read and shared. Subtree leases are always
//! write, with one holder.
//!
//! **Governing rule**: the leases that govern an inode are the first that exist of these:
//! - the node leases on it,
//! - if it is not a directory, the leases on the files of its directory,
//! - the subtree lease on it or on its nearest ancestor that has one.
//!
//! So a narrower lease below another session's wider one is a hole in it. An inode with several links (not a
//! directory), or with none, has no ancestors here.
//!
//! A session may be a *passive reader* ([`LeaseManager::join_readers`]). It gets a read lease on the target that
//! governs an inode if all its holders only read and have no records there that wait to be applied. So nothing is taken
//! from any session. Otherwise it gets no lease, and does not wait. SharedFS itself holds leases in this way, for the
//! grants that it publishes to all sessions. Such leases obstruct no session: taking one does not count as a collision.
//! They are removed when they are old ([`Limits::passive_ttl_us`]), or when their session may hold no more.
//!
//! Some inodes are *reserved* ([`LeaseManager::reserve`]): only admitted sessions may hold leases that cover them.
//!
//! # Invariants
//!
//! - No two sessions hold leases that conflict on the target that governs an inode ([`LeaseManager::check`]).
//! - A session governs all state that it can still consider valid. While a slot is *live* (its generation was granted),
//!   every inode granted on it is governed by that slot, or by another slot of that session that names it as its
//!   *shadow*. A target is taken only after its slot and all its shadows got a new generation.
//! - A target whose holder may have written (*dirty*) is taken only after the holder's log was sealed behind the new
//!   word and applied. Until then the holder's records are valid ([`LeaseManager::may_write`]).
//! - A slot's generation only grows, also when another lease uses the slot, and across restarts.
//! - A grant names the updates of other sessions that it includes, unless they are persistent. Later marks never
//!   replace earlier ones: a later holder that wrote nothing has no dependency record in its log that would stand for
//!   them.
//! - Every queue and table has a limit ([`Limits`]).
//!
//! # Attacks on the plan, and their answers
//!
//! - *A move is not the only way out from under a subtree lease.* A second link, and the removal of the last one, take
//!   an inode away from its ancestors while the holder has it cached. A file made under a node lease on its directory
//!   was never granted, yet its maker has it cached. All of these are reported ([`LeaseManager::handle_moved`],
//!   [`LeaseManager::handle_made`]). They leave a lease on the inode itself, whose shadow is the slot that its holder
//!   knows.
//! - *A moved directory with other sessions' leases below* needs no prohibition. Targets name inodes, and a lease
//!   attached to the directory continues to govern all inodes that were governed through it.
//! - *A session that reads many files* would hold as many leases. One lease on all files of a directory requires no
//!   write lease below it to be removed: a file with a write lease is a hole from the start. The next reader joins that
//!   lease, since a lease cut out of it would have to be cut out for all its readers. A session that writes one of the
//!   files knows that file on both slots, so the wide slot becomes the shadow of the narrow one.
//! - *A session that only reads* must not get a lease that excludes other readers ([`RequestedLease::may_widen`]). Nor
//!   should it ask for each file when it begins to write. If no other session holds anything there, its lease on all
//!   files of a directory becomes one on everything below, on the same slot. A session that has read one of those files
//!   meanwhile is known by the narrower lease that the session got on that file, whose shadow the wide one is.
//! - *A session's own new lease may hide its older one.* When the slot that governs an inode changes, the former slot
//!   gets a new generation even if both belong to the same session: a reader in the middle of a copy checks the old
//!   one.
//! - *Many holes*: each hole makes the holder validate its whole cache again. A lease that was not used again since the
//!   last hole needs no sealing for the next one. A lease that was split too often ([`Limits::splits_max`]) is revoked,
//!   and for a while no session gets as wide a one ([`Limits::contended_us`]): narrower leases do not collide.
//! - *Kernel caches* live longer than the words: the shell is notified also when a lease that is not live is taken.
//! - *Head-of-line waiting*: the minimum hold ([`Limits::hold_us`]) delays the queue, not only its first request. It is
//!   short and ends when the holder has used its grant. Requests for leases that a session already holds are answered
//!   outside the queue ([`LeaseManager::find_covering`]).
//! - *Restart*: shadows are not in shared memory. So all restored leases are validated again before the first request
//!   is served (words change, logs are applied), and dependencies begin with everything that was applied.
//! - *A full lease table* must not stop a log from being applied. A lease that is attached then stands outside the
//!   table until older leases have made room. Only a crash of SharedFS in that moment forgets it.
//! - *The tree changes while a lease is being taken*, by the very log that is applied for it. So the obstacles are
//!   computed again afterwards, until none is left. Leases that were revoked meanwhile are removed in any case, so that
//!   words and tables agree.
//!
//! Non-goals: permissions, open handles, the content of grants, leases between nodes.
//!
//! Source: Assise §3.3; `docs/architecture.md`, section "Leases".
#![forbid(unsafe_code)]

mod command;
mod dependencies;
mod evaluate;
mod held_leases;
mod invariants;
mod leases_below;
pub mod locks;
mod manager;
mod reserved;
#[cfg(test)]
mod tests;

pub use command::{
    Ancestry, Command, Grant, InodeHome, LeaseHole, LeaseTarget, Limits, RequestError, RequestId, RequestedLease,
    RevokeReason, SlotWord, Stats,
};
pub use manager::LeaseManager;
pub use reserved::Reach;
