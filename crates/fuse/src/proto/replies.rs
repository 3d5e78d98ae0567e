//! Structures that the mount sends to the kernel: replies and notifications.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::requests::{FileLock, layouts};

layouts! {
    /// Heads every reply and notification. A notification has `unique` 0 and its code in `error`.
    OutHeader(16) {
        len: u32,
        error: i32,
        unique: u64,
    }
    /// INIT.
    InitOut(64) {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
        max_background: u16,
        congestion_threshold: u16,
        max_write: u32,
        time_gran: u32,
        max_pages: u16,
        map_alignment: u16,
        flags2: u32,
        max_stack_depth: u32,
        unused: [u32; 6],
    }
    Attr(88) {
        ino: u64,
        size: u64,
        blocks: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        nlink: u32,
        uid: u32,
        gid: u32,
        rdev: u32,
        blksize: u32,
        flags: u32,
    }
    /// LOOKUP and all operations that make an entry.
    EntryOut(128) {
        nodeid: u64,
        generation: u64,
        entry_valid: u64,
        attr_valid: u64,
        entry_valid_nsec: u32,
        attr_valid_nsec: u32,
        attr: Attr,
    }
    AttrOut(104) {
        attr_valid: u64,
        attr_valid_nsec: u32,
        dummy: u32,
        attr: Attr,
    }
    SxTime(16) {
        seconds: i64,
        nanoseconds: u32,
        reserved: i32,
    }
    StatxOut(288) {
        attr_valid: u64,
        attr_valid_nsec: u32,
        flags: u32,
        spare: [u64; 2],
        stat: Statx,
    }
    Statx(256) {
        mask: u32,
        blksize: u32,
        attributes: u64,
        nlink: u32,
        uid: u32,
        gid: u32,
        mode: u16,
        spare0: u16,
        ino: u64,
        size: u64,
        blocks: u64,
        attributes_mask: u64,
        atime: SxTime,
        btime: SxTime,
        ctime: SxTime,
        mtime: SxTime,
        rdev_major: u32,
        rdev_minor: u32,
        dev_major: u32,
        dev_minor: u32,
        spare2: [u64; 14],
    }
    OpenOut(16) {
        fh: u64,
        open_flags: u32,
        padding: u32,
    }
    /// WRITE and COPY_FILE_RANGE.
    WriteOut(8) {
        size: u32,
        padding: u32,
    }
    StatfsOut(80) {
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
        padding: u32,
        spare: [u32; 6],
    }
    /// GETXATTR and LISTXATTR, if the caller asked only for the size.
    GetxattrOut(8) {
        size: u32,
        padding: u32,
    }
    LkOut(24) {
        lk: FileLock,
    }
    /// LSEEK, and the 64-bit COPY_FILE_RANGE.
    OffsetOut(8) {
        offset: u64,
    }
    /// An entry of READDIR; its name follows, padded to a multiple of 8 bytes.
    Dirent(24) {
        ino: u64,
        off: u64,
        namelen: u32,
        kind: u32,
    }
    /// The name follows, with a NUL that `namelen` doesn't count.
    NotifyInvalEntry(16) {
        parent: u64,
        namelen: u32,
        flags: u32,
    }
    /// The kernel sends the requested bytes as a request of its own, with this number.
    NotifyRetrieve(32) {
        notify_unique: u64,
        nodeid: u64,
        offset: u64,
        size: u32,
        padding: u32,
    }
}
