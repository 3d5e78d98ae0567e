//! libashlar: LibFS for programs that link it, with a C interface.
//!
//! Purpose: the calls of POSIX on an Ashlar file system, in the calling process, for any language that can call C. The
//! interface, with units and errors, is `include/ashlar.h`.
//!
//! Invariants:
//! - A call returns a negative errno or its result, and never unwinds into its caller: a defect gives the call that
//!   meets it `EIO`.
//! - C's pointers become references in `pointers`, and nowhere else. A null pointer gives `EFAULT`.
//! - A forked process never touches its parent's log: every call first checks the session's process (`fork`).
//! - LibFS decides the meaning of a path and the effects of `open`, for this front end as for others. This crate holds
//!   only the rest: the table of open files, the mount point, the process's user.
//!
//! Non-goals: descriptors of the kernel, and the uses of files that only the kernel offers (`mmap`, running them).
//! `ashlar run` and the mount have those.
//!
//! Source: `docs/design.md`, `docs/capi.md`.

mod directory;
mod error_texts;
mod exports;
mod files;
mod fork;
mod fs_protected;
mod locks;
mod mount_lookup;
mod names;
mod numbered_file;
mod pointers;
mod session;
mod transfer;
mod xattrs;
