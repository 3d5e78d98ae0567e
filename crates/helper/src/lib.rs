//! The helper: a process that does what may have to wait for a mount.
//!
//! Purpose: let SharedFS and the processes behind mounts be killed at any moment. Opening a file on a mount, and closing it, takes answers of the mount's process;
//! having its kernel drop pages or names waits for requests in flight that hold them, and these wait for that process, or for SharedFS. A thread that waits so is in the
//! kernel, where no signal ends it, and as long as it's there its process is: with its sockets, its locks and its devices. A SharedFS that was killed in such a moment could not
//! be followed by another one, for which the request waited; the death of a mount's process would not be noticed. So all of it is done by a process that nobody waits for.
//!
//! Invariants:
//! - Whoever has a helper never waits in the kernel for a mount, but for the helper's answer, and a signal ends that.
//! - A helper ends when whoever started it is gone. A thread of it that waits then keeps nothing but what it was given. Where that is the device of a mount whose process is dead, SharedFS
//!   ends that mount's connection by its number: nothing else would.
//! - It's started when it's first needed, and again where it was killed. Where it can't be started, notifications are written by who has them.
//!
//! Non-goals: deciding anything; what takes no waiting (attributes that are forgotten) takes no helper.
#![forbid(unsafe_code)]

mod client;
mod notify;
mod open;
mod process;

pub use client::{Helper, OpenError};
pub use notify::{Line, Notified, OfLine, Pages, end_connection, inval_inode};
pub use process::{raise_descriptor_limit, run};
