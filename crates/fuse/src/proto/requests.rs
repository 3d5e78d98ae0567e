//! Structures that the kernel sends.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Declares structures with the derives that reading them takes, and asserts their sizes.
macro_rules! layouts {
    ($($(#[$doc:meta])* $name:ident($size:literal) { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            pub(crate) struct $name {
                $(pub(crate) $field: $type,)*
            }
            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}
pub(crate) use layouts;

layouts! {
    /// Heads every request.
    InHeader(40) {
        len: u32,
        opcode: u32,
        unique: u64,
        nodeid: u64,
        uid: u32,
        gid: u32,
        pid: u32,
        total_extlen: u16,
        padding: u16,
    }
    /// INIT. The `flags2` half came with 7.36; older kernels send 16 bytes.
    InitIn(16) {
        major: u32,
        minor: u32,
        max_readahead: u32,
        flags: u32,
    }
    SetattrIn(88) {
        valid: u32,
        padding: u32,
        fh: u64,
        size: u64,
        lock_owner: u64,
        atime: u64,
        mtime: u64,
        ctime: u64,
        atimensec: u32,
        mtimensec: u32,
        ctimensec: u32,
        mode: u32,
        unused4: u32,
        uid: u32,
        gid: u32,
        unused5: u32,
    }
    MknodIn(16) {
        mode: u32,
        rdev: u32,
        umask: u32,
        padding: u32,
    }
    MkdirIn(8) {
        mode: u32,
        umask: u32,
    }
    RenameIn(8) {
        newdir: u64,
    }
    Rename2In(16) {
        newdir: u64,
        flags: u32,
        padding: u32,
    }
    LinkIn(8) {
        oldnodeid: u64,
    }
    OpenIn(8) {
        flags: u32,
        open_flags: u32,
    }
    CreateIn(16) {
        flags: u32,
        mode: u32,
        umask: u32,
        open_flags: u32,
    }
    ReleaseIn(24) {
        fh: u64,
        flags: u32,
        release_flags: u32,
        lock_owner: u64,
    }
    FlushIn(24) {
        fh: u64,
        unused: u32,
        padding: u32,
        lock_owner: u64,
    }
    /// READ, READDIR and READDIRPLUS.
    ReadIn(40) {
        fh: u64,
        offset: u64,
        size: u32,
        read_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }
    WriteIn(40) {
        fh: u64,
        offset: u64,
        size: u32,
        write_flags: u32,
        lock_owner: u64,
        flags: u32,
        padding: u32,
    }
    /// SETXATTR, without the fields that `FUSE_SETXATTR_EXT` adds.
    SetxattrIn(8) {
        size: u32,
        flags: u32,
    }
    /// The fields that `FUSE_SETXATTR_EXT` adds to SETXATTR.
    SetxattrExtension(8) {
        setxattr_flags: u32,
        padding: u32,
    }
    /// GETXATTR and LISTXATTR.
    GetxattrIn(8) {
        size: u32,
        padding: u32,
    }
    FileLock(24) {
        start: u64,
        end: u64,
        kind: u32,
        pid: u32,
    }
    LkIn(48) {
        fh: u64,
        owner: u64,
        lk: FileLock,
        lk_flags: u32,
        padding: u32,
    }
    InterruptIn(8) {
        unique: u64,
    }
    FallocateIn(32) {
        fh: u64,
        offset: u64,
        length: u64,
        mode: u32,
        padding: u32,
    }
    LseekIn(24) {
        fh: u64,
        offset: u64,
        whence: u32,
        padding: u32,
    }
    CopyFileRangeIn(56) {
        fh_in: u64,
        off_in: u64,
        nodeid_out: u64,
        fh_out: u64,
        off_out: u64,
        len: u64,
        flags: u64,
    }
}
