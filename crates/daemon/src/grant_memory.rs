//! The memory of the grant cache, which all sessions map.

use std::fs::File;
use std::io;
use std::sync::Arc;

use ashlar_pmem::{Mapping, MappingAccess, Medium, SharedMemory};
use ashlar_wire::GRANT_CACHE_BYTES;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::session_files::read_only;

/// Makes memory for the grant cache, and the file that sessions map.
///
/// # Errors
/// The system's, if it gives no memory or no address space for it.
pub fn make_grant_memory() -> io::Result<(Arc<SharedMemory>, Arc<File>)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("ashlar-grant-cache", flags)?);
    file.set_len(GRANT_CACHE_BYTES)?;
    let memory = Mapping::map(&file, GRANT_CACHE_BYTES, MappingAccess::ReadWrite, Medium::MEMORY);
    let memory = memory.map_err(|error| io::Error::other(error.to_string()))?;
    // A process with a descriptor could open the file again to write. From here on only the existing mapping can
    // write.
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok((Arc::new(SharedMemory::Mapped(memory)), Arc::new(read_only(&file)?)))
}
