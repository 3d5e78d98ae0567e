//! libashlar: LibFS for programs that link it, with a C interface.
//!
//! Purpose: the calls of POSIX on an Ashlar file system, in the calling process, for any language that can call C. The interface, with
//! units and errors, is `include/ashlar.h`.
//!
//! Invariants:
//! - A call returns a negative errno or its result, and never unwinds into its caller: a defect is an `EIO` of the call that meets it.
//! - C's pointers become references in `pointers`, and nowhere else. A null pointer is `EFAULT`.
//! - A forked process never touches its parent's log: every call asks first whose the session is (`fork`).
//! - What a path means and what `open` has to do LibFS says, for this front end as for others; here stands what lies around it: the
//!   table of open files, the mount point, the process's user.
//!
//! Non-goals: descriptors of the kernel, and what only it can do with files (`mmap`, running them); `ashlar run` and the mount have that.
//!
//! Source: DESIGN §3 and §9; `docs/capi.md`.

mod directory;
mod exports;
mod files;
mod fork;
mod guards;
mod locks;
mod names;
mod pointers;
mod session;
mod site;
mod transfer;
mod words;
mod xattrs;
