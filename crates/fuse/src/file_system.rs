//! The interface to the file system that the front end serves.

use std::os::fd::OwnedFd;

use ashlar_libfs::{
    Allocation, AttributeChange, ByteRange, ConflictingLock, FoundInode, LibFs, Listed, LockAction, LockKind, NewInode,
    Outcome, RenameFlags, ReserveReason, Seek, Space, WriteAt, Written, XattrFlags,
};
use ashlar_types::{Credentials, InodeId};
use ashlar_wire::MountTerms;

/// The operations of [`LibFs`] that a mount uses, with the same names and meanings. It is a trait so that the front end
/// can be tested against a file system in memory. Mounts are generic over it, so it costs nothing.
#[allow(missing_docs, clippy::too_many_arguments, clippy::missing_errors_doc)]
pub trait FileSystem: Send + Sync + 'static {
    fn register_mount(&self, device: OwnedFd, number: u64, terms: MountTerms) -> Outcome<()>;
    fn cache_ttl_ms(&self, inode: InodeId) -> u64;
    fn name_ttl_ms(&self, directory: InodeId) -> u64;
    fn is_shared(&self) -> bool;
    fn cache_ttl_max_ms(&self) -> u64;
    fn company(&self) -> u64;
    fn wait_company(&self, company: u64);
    fn programs(&self) -> u64;
    fn wait_programs(&self);
    fn confirm_names_dropped(&self, company: u64);
    fn is_valid(&self, inode: InodeId) -> bool;
    fn reserve(&self, inode: InodeId, reason: ReserveReason) -> Outcome<()>;
    fn free_reserved(&self, inode: InodeId, reason: ReserveReason);
    fn lookup(&self, credentials: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<FoundInode>;
    fn attributes(&self, inode: InodeId) -> Outcome<FoundInode>;
    fn set_attributes(
        &self,
        credentials: &Credentials,
        inode: InodeId,
        change: &AttributeChange,
    ) -> Outcome<FoundInode>;
    fn read_link(&self, inode: InodeId) -> Outcome<Vec<u8>>;
    fn make(
        &self,
        credentials: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
    ) -> Outcome<FoundInode>;
    fn make_open(
        &self,
        credentials: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
    ) -> Outcome<FoundInode>;
    fn make_unnamed(&self, credentials: &Credentials, directory: InodeId, make: &NewInode<'_>) -> Outcome<FoundInode>;
    fn link(&self, credentials: &Credentials, inode: InodeId, directory: InodeId, name: &[u8]) -> Outcome<FoundInode>;
    fn unlink(&self, credentials: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<()>;
    fn remove_directory(
        &self,
        credentials: &Credentials,
        directory: InodeId,
        name: &[u8],
        found: Option<InodeId>,
    ) -> Outcome<()>;
    fn rename(
        &self,
        credentials: &Credentials,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        flags: RenameFlags,
    ) -> Outcome<()>;
    fn open(&self, inode: InodeId) -> Outcome<FoundInode>;
    fn close(&self, inode: InodeId);
    fn read(&self, inode: InodeId, offset: u64, buffer: &mut [u8]) -> Outcome<usize>;
    fn write(
        &self,
        credentials: &Credentials,
        inode: InodeId,
        at: WriteAt,
        data: &[u8],
        strip: bool,
    ) -> Outcome<Written>;
    fn sync_inode(&self, inode: InodeId) -> Outcome<()>;
    fn sync_all(&self) -> Outcome<()>;
    fn allocate(
        &self,
        credentials: &Credentials,
        inode: InodeId,
        how: Allocation,
        offset: u64,
        length: u64,
        strip: bool,
    ) -> Outcome<()>;
    fn seek(&self, inode: InodeId, what: Seek, offset: u64) -> Outcome<u64>;
    fn copy_range(
        &self,
        credentials: &Credentials,
        from: InodeId,
        from_offset: u64,
        to: InodeId,
        to_offset: u64,
        length: u64,
        strip: bool,
    ) -> Outcome<u64>;
    fn list(&self, directory: InodeId, after: u64, each: &mut dyn FnMut(Listed) -> bool) -> Outcome<()>;
    fn xattr(&self, inode: InodeId, name: &[u8]) -> Outcome<Vec<u8>>;
    fn xattr_names(&self, inode: InodeId) -> Outcome<Vec<Vec<u8>>>;
    fn set_xattr(
        &self,
        credentials: &Credentials,
        inode: InodeId,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        strip_sgid: bool,
    ) -> Outcome<()>;
    fn remove_xattr(&self, credentials: &Credentials, inode: InodeId, name: &[u8]) -> Outcome<()>;
    fn space(&self, inode: InodeId) -> Outcome<Space>;
    fn lock(
        &self,
        inode: InodeId,
        kind: LockKind,
        owner: u64,
        pid: u32,
        range: ByteRange,
        action: LockAction,
        wait: Option<u64>,
    ) -> Outcome<()>;
    fn cancel_lock(&self, ticket: u64) -> Outcome<()>;
    fn query_lock(
        &self,
        inode: InodeId,
        kind: LockKind,
        owner: u64,
        range: ByteRange,
        action: LockAction,
    ) -> Outcome<Option<ConflictingLock>>;
    fn release_locks(&self, inode: InodeId, owner: u64, kind: LockKind) -> Outcome<()>;
}

/// Hands calls on to the inherent methods of [`LibFs`].
macro_rules! forward {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        impl FileSystem for LibFs {
            $(
                fn $name(&self $(, $argument: $type)*) $(-> $result)? {
                    LibFs::$name(self $(, $argument)*)
                }
            )*
        }
    };
}

forward! {
    fn register_mount(device: OwnedFd, number: u64, terms: MountTerms) -> Outcome<()>;
    fn cache_ttl_ms(inode: InodeId) -> u64;
    fn name_ttl_ms(directory: InodeId) -> u64;
    fn is_shared() -> bool;
    fn cache_ttl_max_ms() -> u64;
    fn company() -> u64;
    fn wait_company(company: u64);
    fn programs() -> u64;
    fn wait_programs();
    fn confirm_names_dropped(company: u64);
    fn is_valid(inode: InodeId) -> bool;
    fn reserve(inode: InodeId, reason: ReserveReason) -> Outcome<()>;
    fn free_reserved(inode: InodeId, reason: ReserveReason);
    fn lookup(credentials: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<FoundInode>;
    fn attributes(inode: InodeId) -> Outcome<FoundInode>;
    fn set_attributes(credentials: &Credentials, inode: InodeId, change: &AttributeChange) -> Outcome<FoundInode>;
    fn read_link(inode: InodeId) -> Outcome<Vec<u8>>;
    fn make(credentials: &Credentials, directory: InodeId, name: &[u8], make: &NewInode<'_>) -> Outcome<FoundInode>;
    fn make_open(credentials: &Credentials, directory: InodeId, name: &[u8], make: &NewInode<'_>) -> Outcome<FoundInode>;
    fn make_unnamed(credentials: &Credentials, directory: InodeId, make: &NewInode<'_>) -> Outcome<FoundInode>;
    fn link(credentials: &Credentials, inode: InodeId, directory: InodeId, name: &[u8]) -> Outcome<FoundInode>;
    fn unlink(credentials: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<()>;
    fn remove_directory(credentials: &Credentials, directory: InodeId, name: &[u8], found: Option<InodeId>) -> Outcome<()>;
    fn rename(credentials: &Credentials, from: (InodeId, &[u8]), to: (InodeId, &[u8]), flags: RenameFlags) -> Outcome<()>;
    fn open(inode: InodeId) -> Outcome<FoundInode>;
    fn close(inode: InodeId);
    fn read(inode: InodeId, offset: u64, buffer: &mut [u8]) -> Outcome<usize>;
    fn write(credentials: &Credentials, inode: InodeId, at: WriteAt, data: &[u8], strip: bool) -> Outcome<Written>;
    fn sync_inode(inode: InodeId) -> Outcome<()>;
    fn sync_all() -> Outcome<()>;
    fn allocate(credentials: &Credentials, inode: InodeId, how: Allocation, offset: u64, length: u64, strip: bool) -> Outcome<()>;
    fn seek(inode: InodeId, what: Seek, offset: u64) -> Outcome<u64>;
    fn copy_range(credentials: &Credentials, from: InodeId, from_offset: u64, to: InodeId, to_offset: u64, length: u64, strip: bool) -> Outcome<u64>;
    fn list(directory: InodeId, after: u64, each: &mut dyn FnMut(Listed) -> bool) -> Outcome<()>;
    fn xattr(inode: InodeId, name: &[u8]) -> Outcome<Vec<u8>>;
    fn xattr_names(inode: InodeId) -> Outcome<Vec<Vec<u8>>>;
    fn set_xattr(credentials: &Credentials, inode: InodeId, name: &[u8], value: &[u8], flags: XattrFlags, strip_sgid: bool) -> Outcome<()>;
    fn remove_xattr(credentials: &Credentials, inode: InodeId, name: &[u8]) -> Outcome<()>;
    fn space(inode: InodeId) -> Outcome<Space>;
    fn lock(inode: InodeId, kind: LockKind, owner: u64, pid: u32, range: ByteRange, action: LockAction, wait: Option<u64>) -> Outcome<()>;
    fn cancel_lock(ticket: u64) -> Outcome<()>;
    fn query_lock(inode: InodeId, kind: LockKind, owner: u64, range: ByteRange, action: LockAction) -> Outcome<Option<ConflictingLock>>;
    fn release_locks(inode: InodeId, owner: u64, kind: LockKind) -> Outcome<()>;
}
