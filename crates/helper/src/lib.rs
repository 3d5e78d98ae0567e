//! The helper: a process for work that may have to wait for a mount.
//!
//! Purpose: let SharedFS and the processes behind mounts be killed at any moment. Opening or closing a file on a mount
//! takes answers of the mount's process. Making its kernel drop pages or names waits for requests in flight that hold
//! them, and these wait for that process, or for SharedFS. A thread that waits so is in the kernel, where no signal
//! ends it. While it exists, its process exists: with its sockets, its locks and its devices. A SharedFS that was
//! killed in such a moment could not be followed by another one, for which the request waited. The death of a mount's
//! process would not be noticed. So all such work is done by a process that no other waits for.
//!
//! Invariants:
//! - A process with a helper never waits in the kernel for a mount. It waits for the helper's answer, and a signal ends
//!   that.
//! - SharedFS gets no descriptor of a program: programs hand theirs to the helper. Where the kernel lets one through
//!   all the same, it stays in the queue of its socket, and the helper closes it.
//! - A helper ends when its starter is gone. A waiting thread of it then keeps only its own descriptors. If one of them
//!   is the device of a mount whose process is dead, SharedFS ends that mount's connection by its number: nothing else
//!   would.
//! - It is started when it is first needed, and again if it was killed. If it can't be started, notifications are
//!   written by their sender.
//!
//! Non-goals: deciding anything; work without waiting, such as forgetting attributes.
#![forbid(unsafe_code)]

mod client;
mod close;
mod errand;
mod notify;
mod open;
mod process;

pub use client::{FileOpening, FileReport, Helper};
pub use notify::{Line, LineSender, Notified, Pages, end_connection, inval_inode};
pub use process::{raise_descriptor_limit, run};
