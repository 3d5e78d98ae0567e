//! Leases and file locks as state machines without I/O.
//!
//! Purpose: decide which session may read or write which inode, so that sessions of one machine share files with
//! linearizable results while their warm operations cost no message; and keep POSIX record locks and `flock` locks
//! ([`locks`]). The shell (SharedFS, behind one lock) hands events in with `handle_*` and performs the commands that
//! `poll_*` gives, one by one and in order. Time, ancestry and log positions come in with the calls.
//!
//! # How it works
//!
//! A session's leases stand in *slots* of a table in shared memory. A slot's word says generation and mode; what the
//! session has cached holds as long as the slot on which it was granted has the generation of the grant. So a
//! revocation is a store by SharedFS, and needs no help from the holder: one that is stopped delays nobody.
//!
//! A lease stands at a [`Place`]: on one inode, on the files of a directory, or on a directory and all below it. Node leases are
//! read (shared) or write (exclusive), those on files always read and shared, subtree leases always write, with one holder.
//! **Governing rule**: an inode is governed by the node leases on it, if there are any; else, if it is no directory, by the leases on
//! the files of its directory; else by the subtree lease on it or on its nearest ancestor that has one; else by nobody. So a
//! narrower lease below another session's wider one is a hole in it. An inode with several links (not a directory), or with
//! none, has no ancestors here.
//!
//! A session may also *read along* ([`LeaseManager::join`]): it gets a lease to read on the place that governs an inode, if all who hold that read
//! only and nothing of theirs waits to be applied, so that nothing is to be taken from anybody. Else it gets none, and waits for nothing. That is how
//! SharedFS itself holds leases, for what it shows to all sessions. Such leases are in nobody's way: whoever takes one has collided with nobody, as
//! far as contention goes, and they go when they are old ([`Limits::along_us`]) or when their session may hold no more.
//!
//! Some inodes are *reserved* ([`LeaseManager::reserve`]): no session but those that are admitted may hold leases that cover them.
//!
//! # Invariants
//!
//! - No two sessions hold leases that conflict on the place that governs an inode ([`LeaseManager::check`]).
//! - Whatever a session can still take for valid, it governs: while a slot is *live* (its generation was granted),
//!   every inode that was granted on it is governed by that slot, or by another slot of that session that names it as
//!   its *shadow*. A place is taken only after its slot and all its shadows got a new generation.
//! - A place whose holder may have written (*dirty*) is taken only after the holder's log was sealed behind the new
//!   word and applied. Until then the holder's records validate ([`LeaseManager::may_write`]).
//! - A slot's generation only grows, also when another lease uses the slot, and across restarts.
//! - A grant names the updates of others that it shows, unless they are persistent. Marks are never replaced by later
//!   ones: a later holder that wrote nothing has no dependency record in its log that would stand for them.
//! - Every queue and table has a limit ([`Limits`]).
//!
//! # Attacks on the plan, and what became of them
//!
//! - *A move is not the only way out from under a subtree lease.* A second link, and the removal of the last one,
//!   take an inode away from its ancestors while the holder has it cached; a file that is made under a node lease on
//!   its directory was never granted at all, yet its maker has it cached. All of these are reported
//!   ([`LeaseManager::handle_moved`], [`LeaseManager::handle_made`]) and leave a lease on the inode itself, whose
//!   shadow is the slot that its holder knows.
//! - *A moved directory with other sessions' leases below* needs no prohibition: places go by inode, and a lease
//!   attached to the directory keeps governing all that was governed through it.
//! - *Who looks at many files* would hold as many leases. One on all files of a directory needs no write lease below it to go:
//!   what has one is a hole from the start. Who reads next joins it, as one cut out of it would have to be cut for all its readers; and
//!   a session that writes one of the files beside them knows that file on both slots, so the wide one becomes the shadow
//!   of the narrow one.
//! - *Who only reads* must not be given what nobody can read along with ([`Want::widens`]), and should not ask for each file when it begins to write.
//!   A lease on all files of a directory becomes one on all below it then, on the same slot, if nobody else has anything there; whoever has read one of
//!   those files meanwhile is seen by the narrower lease that the session got on it, whose shadow the wide one is.
//! - *A session's own new lease may hide its older one.* When the slot that governs an inode changes, the former slot
//!   gets a new generation even though both are the same session's: a reader in the middle of a copy checks the old
//!   one.
//! - *Many holes*: each one makes the holder validate its whole cache again. A lease that was never used again since
//!   the last hole needs no sealing for the next one, and one that was split too often ([`Limits::splits_max`]) is
//!   revoked, and nobody gets as wide a one for a while ([`Limits::contended_us`]): narrower ones don't collide.
//! - *Kernel caches* live longer than the words: a lease that is not live still is told to the shell when it is taken.
//! - *Head-of-line waiting*: the minimum hold ([`Limits::hold_us`]) delays the queue, not only its first request. It
//!   is short and ends when the holder has used what it was granted, and what a session holds already is answered past the
//!   queue ([`LeaseManager::covered`]).
//! - *Restart*: shadows are not in shared memory, so restored leases are all validated again before the first request
//!   is served (words change, logs are applied), and dependencies begin with all that was applied.
//! - *A full lease table* must not stop a log from being applied: a lease that is attached then stands outside the
//!   table until older ones have made room. Only a crash of SharedFS in that moment forgets it.
//! - *The tree changes while a lease is being taken*, by the very log that is applied for it: what stands in the way
//!   is worked out again afterwards, until nothing does. What was revoked meanwhile goes in any case, so that words
//!   and tables agree.
//!
//! Non-goals: permissions, open handles, the content of what is granted, leases between nodes.
//!
//! Source: Assise §3.3; `docs/architecture.md`, section "Leases".
#![forbid(unsafe_code)]

mod below;
mod check;
mod command;
mod dependencies;
mod evaluate;
mod holds;
pub mod locks;
mod manager;
mod reserved;
#[cfg(test)]
mod tests;

pub use command::{
    Ancestry, Command, Grant, Hole, Home, Limits, Mode, Place, Reason, RequestError, RequestId, Scope, SlotWord, Stats,
    Want,
};
pub use manager::LeaseManager;
pub use reserved::Reach;
