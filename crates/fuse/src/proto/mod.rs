//! The kernel's FUSE protocol: its structures, flags and numbers.
//!
//! They are as `/usr/include/linux/fuse.h` and the kernel's newer headers lay them out. Every structure is `repr(C)`
//! with its padding named, so it is read from and written as bytes without unsafe code. The size of each is asserted
//! beside its definition.
mod arguments;
mod opcode;
mod replies;
mod requests;
mod ring;

pub(crate) use arguments::{Arguments, RequestText};
pub(crate) use opcode::Opcode;
pub(crate) use replies::*;
pub(crate) use requests::*;
pub(crate) use ring::*;

/// The major version of the protocol.
pub(crate) const VERSION_MAJOR: u32 = 7;
/// The newest minor version that this crate speaks: `FUSE_NOTIFY_INC_EPOCH` came with 7.44, the 64-bit
/// `copy_file_range` with 7.45.
pub(crate) const VERSION_MINOR: u32 = 45;
/// The oldest minor version that suffices (Linux 5.4). Later additions are only used if the kernel offers them.
pub(crate) const VERSION_MINOR_MIN: u32 = 31;

/// Makes a module of named bits.
macro_rules! bits {
    ($(#[$doc:meta])* $module:ident: $type:ty { $($name:ident = $bit:expr,)* }) => {
        $(#[$doc])*
        pub(crate) mod $module {
            $(pub(crate) const $name: $type = 1 << $bit;)*
        }
    };
}

bits! {
    /// Flags that INIT negotiates.
    init: u64 {
        ASYNC_READ = 0,
        POSIX_LOCKS = 1,
        EXPORT_SUPPORT = 4,
        BIG_WRITES = 5,
        DONT_MASK = 6,
        FLOCK_LOCKS = 10,
        AUTO_INVAL_DATA = 12,
        DO_READDIRPLUS = 13,
        READDIRPLUS_AUTO = 14,
        ASYNC_DIO = 15,
        PARALLEL_DIROPS = 18,
        POSIX_ACL = 20,
        MAX_PAGES = 22,
        CACHE_SYMLINKS = 23,
        HANDLE_KILLPRIV_V2 = 28,
        SETXATTR_EXT = 29,
        INIT_EXT = 30,
        HAS_EXPIRE_ONLY = 35,
        DIRECT_IO_ALLOW_MMAP = 36,
        OVER_IO_URING = 41,
    }
}

bits! {
    /// The attributes that SETATTR sets.
    fattr: u32 {
        MODE = 0,
        UID = 1,
        GID = 2,
        SIZE = 3,
        ATIME = 4,
        MTIME = 5,
        ATIME_NOW = 7,
        MTIME_NOW = 8,
        KILL_SUIDGID = 11,
    }
}

bits! {
    /// How the kernel is to treat a handle.
    fopen: u32 {
        DIRECT_IO = 0,
        KEEP_CACHE = 1,
        CACHE_DIR = 3,
        PARALLEL_DIRECT_WRITES = 6,
    }
}

/// RELEASE: the handle's flock ends with it.
pub(crate) const RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
/// SETLK: the lock is a flock, not a record lock.
pub(crate) const LK_FLOCK: u32 = 1 << 0;
/// READ: it has an owner. Reads past the kernel's pages have one, and those that fill pages have none.
pub(crate) const READ_LOCKOWNER: u32 = 1 << 1;
/// WRITE: set-id bits are to be cleared.
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// SETXATTR: an ACL clears set-group-id.
pub(crate) const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
