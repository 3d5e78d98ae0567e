//! Private mappings of files that are only read: of a copy in memory, which costs a fiftieth of a real descriptor on the mount.
//!
//! POSIX leaves open whether a private mapping shows what is written to the file later. The copy is the file as it is when it is mapped,
//! whole, under one lease. It is a file of the kernel's without a name: pages that are dropped come back, and behind its end there is
//! nothing, as with the file itself. Whoever might look for later changes all the same gets the file: who can write through the
//! descriptor, and who maps more than there is yet. So does who might run what is mapped, since tools go by the names of that.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::{BLOCK_BYTES, Errno, FileKind};

use crate::arch::system_call;
use crate::descriptors::File;

/// Longer files are not copied: a part may be all that is looked at, and the kernel's pages of a file are there once for all who map it.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// Nor more than so much in the life of a process, which may keep all that it maps.
const COPIED_BYTES_MAX: u64 = 1 << 30;

/// What this process has copied so far.
static COPIED: AtomicU64 = AtomicU64::new(0);

/// Maps a copy of a file, with the arguments of mmap(2); `None` where it is to be the file.
///
/// # Errors
/// Those of LibFS.
pub(crate) fn map(file: &File, a: [u64; 6]) -> Result<Option<i64>, Errno> {
    let is_read = file.flags() & (libc::O_ACCMODE | libc::O_PATH | libc::O_DIRECT) == libc::O_RDONLY;
    if !is_read || file.is_directory() || a[2] & libc::PROT_EXEC as u64 != 0 {
        return Ok(None);
    }
    let session = file.session()?;
    let found = session.fs.attributes(file.inode())?.inode;
    let size = found.size;
    let is_there = a[5].checked_add(a[1]).is_some_and(|end| end <= size.next_multiple_of(BLOCK_BYTES));
    // A process that may write no file so long may not write the copy either.
    let is_allowed = size <= FILE_BYTES_MAX && size <= crate::session::file_limit();
    if found.kind != FileKind::Regular || !is_allowed || !is_there {
        return Ok(None);
    }
    if COPIED.fetch_add(size, Ordering::Relaxed) >= COPIED_BYTES_MAX {
        COPIED.fetch_sub(size, Ordering::Relaxed);
        return Ok(None);
    }
    // With a byte more it shows whether the file has grown since.
    let mut bytes = vec![0; size as usize + 1];
    let is_whole = session.fs.read(file.inode(), 0, &mut bytes).is_ok_and(|count| count as u64 == size);
    bytes.pop();
    // What can't be read is an error where the mapping is touched, and not here.
    let Some(copy) = in_memory(&bytes).filter(|_| is_whole) else { return Ok(None) };
    let arguments = [a[0], a[1], a[2], a[3], copy.as_raw_fd() as u64, a[5]];
    // SAFETY: the program's own call, but for the number of the descriptor.
    Ok(Some(unsafe { system_call(libc::SYS_mmap as u64, arguments) }))
}

/// A file in memory with these bytes; `None` where there is no room, and for programs that may not have one.
fn in_memory(bytes: &[u8]) -> Option<OwnedFd> {
    let arguments = [c"ashlar-private".as_ptr() as u64, libc::MFD_CLOEXEC.into(), 0, 0, 0, 0];
    // SAFETY: the name is a string that outlives the call.
    let memory = unsafe { system_call(libc::SYS_memfd_create as u64, arguments) };
    if memory < 0 {
        return None;
    }
    // SAFETY: the descriptor is new.
    let memory = unsafe { OwnedFd::from_raw_fd(memory as i32) };
    let arguments = [memory.as_raw_fd() as u64, bytes.as_ptr() as u64, bytes.len() as u64, 0, 0, 0];
    // SAFETY: the buffer is ours, and has that many bytes.
    let written = unsafe { system_call(libc::SYS_pwrite64 as u64, arguments) };
    (written == bytes.len() as i64).then_some(memory)
}
