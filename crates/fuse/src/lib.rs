//! The FUSE front end: a LibFS session acting for many users.
//!
//! Purpose: everything that the kernel can ask of a mounted file system becomes a call of LibFS, on behalf of whoever made
//! the call. What the kernel caches (names, attributes, pages, listings) stays coherent with every other mount and
//! session through leases.
//!
//! Invariants:
//! - The kernel may keep an answer only as long as LibFS says that its lease can hold; when the lease goes, SharedFS has
//!   the kernel forget it, through a descriptor that [`FileSystem::register_mount`] gave it. If a lease goes between an
//!   answer's making and its sending, the mount does that itself.
//! - The kernel checks permissions (`default_permissions` with POSIX ACLs), and LibFS then takes the operation as checked. Set-id
//!   bits are cleared here, atomically with the write, wherever the kernel says so (`HANDLE_KILLPRIV_V2`).
//! - No thread that serves requests waits for the kernel's locks (notifications go through one thread of their own) or for an
//!   application (a lock that waits has a thread of its own).
//! - Updates reach LibFS in the order in which applications made them: the kernel's write-back cache is off.
//! - A write past the kernel's pages is answered only when the kernel has no older page: nobody reads what was there before.
//! - No hole is named where the kernel may have data that it has not written back.
//! - The kernel's node numbers are inode numbers, which are never used twice; nothing must be kept per inode.
//! - A request that makes no sense gives `EIO`; nothing here panics on purpose.
//!
//! Non-goals: mounting as an ordinary user; the session's life (its owner ends it after [`Mount::run`]).
//!
//! Source: `docs/architecture.md`, section "FUSE"; the kernel's `include/uapi/linux/fuse.h`; why there is a protocol layer of
//! its own: `docs/decisions/mount.md`.
#![deny(unsafe_code)]

mod again;
mod attr;
mod caller;
mod cores;
mod device;
mod directory;
mod dirty_pages;
mod dispatch;
mod file;
mod file_system;
mod fills;
mod follow;
mod given;
mod invalidate;
mod locks;
mod mappable;
mod mount;
mod mountinfo;
mod names;
mod negotiate;
pub mod notify;
mod proto;
mod reply;
#[allow(unsafe_code)]
mod ring;
mod route;
mod runs;
mod server;
mod shown;
mod turns;
mod watch_finder;
mod watches;
mod xattr;

pub use file_system::FileSystem;
pub use mount::{Mount, MountError, MountOptions, rings_are_on, unmount};
pub use mountinfo::is_ashlar_mount;
