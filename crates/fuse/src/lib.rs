//! The FUSE front end: one LibFS session that acts for many users.
//!
//! Purpose: each request of the kernel to a mounted file system becomes a call of LibFS, on behalf of the calling
//! process. The kernel caches names, attributes, pages and listings. Leases keep these caches coherent with every other
//! mount and session.
//!
//! Invariants:
//! - The kernel may keep an answer only as long as LibFS says that its lease can hold. When the lease ends, SharedFS
//!   makes the kernel forget the answer, through a descriptor that [`FileSystem::register_mount`] gave it. If a lease
//!   ends after an answer is made and before it is sent, the mount does that itself.
//! - The kernel checks permissions (`default_permissions` with POSIX ACLs), and LibFS then takes the operation as
//!   checked. Set-id bits are cleared here, atomically with the write, whenever the kernel says so
//!   (`HANDLE_KILLPRIV_V2`).
//! - No thread that serves requests waits for the kernel's locks: notifications go through one thread of their own. Nor
//!   does it wait for an application: a lock that waits has a thread of its own.
//! - Updates reach LibFS in the order in which applications made them: the kernel's write-back cache is off.
//! - A write past the kernel's pages is answered only when the kernel has no older page. So no process reads the old
//!   content afterwards.
//! - No hole is named where the kernel may have data that it has not written back.
//! - The kernel's node numbers are inode numbers, which are never used twice. So the mount keeps nothing per inode.
//! - A malformed request gives `EIO`. Nothing here panics on purpose.
//!
//! Modules, each of which uses only those before it: `proto` and `connection`, the kernel's protocol; `callers` and
//! `kernel_cache`, records about both sides; `state`, which all threads share; `operations`; `serving`, the threads.
//!
//! Non-goals: mounting as an ordinary user; the session's life (its owner ends it after [`FuseMount::run`]).
//!
//! Source: `docs/architecture.md`, section "FUSE"; the kernel's `include/uapi/linux/fuse.h`. `docs/decisions/mount.md`
//! says why the crate has a protocol layer of its own.
#![deny(unsafe_code)]

mod callers;
mod connection;
mod file_system;
mod kernel_cache;
mod mount;
mod mount_error;
mod mountinfo;
mod operations;
mod proto;
mod serving;
mod state;

pub use connection::notify;
pub use file_system::FileSystem;
pub use mount::{FuseMount, MountOptions, rings_are_on, unmount};
pub use mount_error::MountError;
pub use mountinfo::is_ashlar_mount;
