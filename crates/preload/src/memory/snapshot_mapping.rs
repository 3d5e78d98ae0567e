//! Private read-only mappings of files: they map a copy in memory.
//!
//! A copy costs a fiftieth of a real descriptor on the mount. POSIX leaves open whether a private mapping shows later
//! writes to the file. The copy is the file as it is at the mapping, whole, under one lease. It is a file of the
//! kernel's without a name: dropped pages come back, and after its end there is nothing, as in the file itself.
//!
//! A caller that might look for later changes gets the file instead: one that can write through the descriptor, and one
//! that maps more than the file's length. So does a caller that might run the mapped code, since tools use the names of
//! such mappings.
//!
//! A mapping that grows (`mremap`) is also moved to the file: after its old end it must show the file as long as it is
//! by then. The copy's name, which is in the kernel's table of mappings, tells which file that is.

use std::ffi::CString;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::{BLOCK_BYTES, Errno, FileKind, InodeId};

use crate::entry::arch::system_call;
use crate::files::descriptors::OpenFileRef;
use crate::files::{materialise, recycled_descriptor};
use crate::sessions::session;

/// Longer files are not copied.
///
/// The program may need only a part, and the kernel's pages are shared by all processes that map the file.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// The most bytes copied in the life of a process, which may keep all its mappings.
const COPIED_BYTES_MAX: u64 = 1 << 30;

const PAGE: u64 = 4096;
/// The beginning of a copy's name; the session's number and the inode's follow.
const NAME: &str = "ashlar-private-";
/// Bits in the kernel's table of pages: the page is in memory, is swapped out, belongs to a file.
const IS_PRESENT: u64 = 1 << 63;
const IS_SWAPPED: u64 = 1 << 62;
const IS_OF_FILE: u64 = 1 << 61;

/// Bytes that this process has copied so far.
static COPIED_BYTES: AtomicU64 = AtomicU64::new(0);
/// Pages that copies were mapped at: one bit for each, by a hash of its number.
///
/// A set bit means that a copy may be there. No bit is ever cleared: a false one costs only a look into the kernel's
/// table for a mapping that is moved.
static PAGES: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// Maps a copy of a file, with the arguments of mmap(2).
///
/// Returns `None` if the file itself must be mapped.
///
/// # Errors
/// Those of LibFS.
pub(crate) fn map_copy(file: &OpenFileRef, a: [u64; 6]) -> Result<Option<i64>, Errno> {
    let is_read = file.flags() & (libc::O_ACCMODE | libc::O_PATH | libc::O_DIRECT) == libc::O_RDONLY;
    if !is_read || file.is_directory() || a[2] & libc::PROT_EXEC as u64 != 0 {
        return Ok(None);
    }
    let session = file.session()?;
    let found = session.fs.attributes(file.inode())?.inode;
    let size = found.size;
    let is_there = a[5].checked_add(a[1]).is_some_and(|end| end <= size.next_multiple_of(BLOCK_BYTES));
    // A process that may not write so long a file may not write the copy either.
    let is_allowed = size <= FILE_BYTES_MAX && size <= crate::sessions::session::file_limit();
    if found.kind != FileKind::Regular || !is_allowed || !is_there {
        return Ok(None);
    }
    if COPIED_BYTES.fetch_add(size, Ordering::Relaxed) >= COPIED_BYTES_MAX {
        COPIED_BYTES.fetch_sub(size, Ordering::Relaxed);
        return Ok(None);
    }
    // With a byte more, the read shows whether the file has grown since.
    let mut bytes = vec![0; size as usize + 1];
    let is_whole = session.fs.read(file.inode(), 0, &mut bytes).is_ok_and(|count| count as u64 == size);
    bytes.pop();
    // Unreadable data is an error when the mapping is touched, and not here.
    let name = format!("{NAME}{}-{}", session.number, file.inode().0);
    let Some(copy) = make_memory_file(&name, &bytes).filter(|_| is_whole) else { return Ok(None) };
    let arguments = [a[0], a[1], a[2], a[3], copy.as_raw_fd() as u64, a[5]];
    // SAFETY: the program's own call, but for the number of the descriptor.
    let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
    record_pages(mapped, a[1]);
    Ok(Some(mapped))
}

/// Records the pages of a copy, if a call has mapped one.
fn record_pages(address: i64, length: u64) {
    if address < 0 {
        return;
    }
    let first = address as u64 / PAGE;
    for page in first..first.saturating_add(length.div_ceil(PAGE).min(FILE_BYTES_MAX / PAGE)) {
        page_word(page).fetch_or(1 << (page % 64), Ordering::Relaxed);
    }
}

fn page_word(page: u64) -> &'static AtomicU64 {
    &PAGES[(page / 64) as usize % PAGES.len()]
}

/// Returns whether a copy may be mapped at an address.
pub(crate) fn may_be_at(address: u64) -> bool {
    let page = address / PAGE;
    page_word(page).load(Ordering::Relaxed) & 1 << (page % 64) != 0
}

/// Changes the length or the address of a mapping, with the arguments of mremap(2).
///
/// Its file replaces a copy that grows.
pub(crate) fn serve_remap(a: [u64; 6]) -> i64 {
    let [address, old, new, ..] = a;
    if old < new {
        // After any error there can be no mapping of that length; but a file that is gone grows no more.
        match MappedCopy::find_at(address, old).map_or(Ok(()), |copy| copy.replace_by_file()) {
            Ok(()) | Err(Errno::ENOENT | Errno::ESTALE) => {}
            Err(_) => return -i64::from(libc::ENOMEM),
        }
    }
    // SAFETY: the program's own call.
    let mapped = unsafe { system_call(libc::SYS_mremap as u64, a) };
    record_pages(mapped, new);
    mapped
}

/// A part of the program's memory in which a copy is mapped.
#[derive(Debug, PartialEq, Eq)]
struct MappedCopy {
    address: u64,
    length: u64,
    /// Its protection, as for mmap(2).
    protection: i32,
    /// Its start in the file.
    offset: u64,
    session: u32,
    inode: InodeId,
}

impl MappedCopy {
    /// Finds the copy that is mapped at an address for a length, if there is one.
    fn find_at(address: u64, length: u64) -> Option<Self> {
        let length = length.checked_next_multiple_of(PAGE).filter(|_| length > 0)?;
        let maps = BufReader::new(std::fs::File::open("/proc/self/maps").ok()?);
        maps.split(b'\n')
            .map_while(Result::ok)
            .find_map(|line| Self::parse_line(std::str::from_utf8(&line).ok()?, address, length))
    }

    /// Reads the same from a line of the kernel's table: `START-END PERMISSIONS OFFSET DEVICE INODE NAME`.
    fn parse_line(line: &str, address: u64, length: u64) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let number = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = words.next()?.split_once('-')?;
        let (start, end) = (number(start)?, number(end)?);
        let (permissions, offset) = (words.next()?, number(words.next()?)?);
        let name = words.nth(2)?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
        let (session, inode) = name.split_once('-')?;
        let is_there = start <= address && address.checked_add(length)? <= end;
        if !is_there {
            return None;
        }
        let kinds = [('r', libc::PROT_READ), ('w', libc::PROT_WRITE), ('x', libc::PROT_EXEC)];
        let protection = kinds.iter().filter(|(letter, _)| permissions.contains(*letter)).map(|(_, kind)| kind).sum();
        Some(Self {
            address,
            length,
            protection,
            offset: offset + (address - start),
            session: session.parse().ok()?,
            inode: InodeId(inode.parse().ok()?),
        })
    }

    /// Replaces the copy by the file itself, with the pages that the program has written.
    fn replace_by_file(&self) -> Result<(), Errno> {
        let session =
            session::by_number(self.session).or_else(|| session::open_session(self.session)).ok_or(Errno::EIO)?;
        let real = materialise::open_to_read(session, self.inode)?;
        let fresh = self.map_file(&real);
        drop(real);
        let fresh = fresh?;
        self.move_over(fresh).inspect_err(|_| {
            // SAFETY: it was mapped here, and nothing else uses it.
            unsafe { system_call(libc::SYS_munmap as u64, [fresh, self.length, 0, 0, 0, 0]) };
        })
    }

    /// Maps the same part of the file at a free address.
    fn map_file(&self, real: &OwnedFd) -> Result<u64, Errno> {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let arguments = [0, self.length, protection, libc::MAP_PRIVATE as u64, real.as_raw_fd() as u64, self.offset];
        // SAFETY: it replaces no mapping.
        let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
        if mapped < 0 { Err(Errno(-mapped as i32)) } else { Ok(mapped as u64) }
    }

    /// Moves a mapping of the file over the copy.
    fn move_over(&self, fresh: u64) -> Result<(), Errno> {
        let failed = |_: std::io::Error| Errno::ENOMEM;
        let table = std::fs::File::open("/proc/self/pagemap").map_err(failed)?;
        // Read as a file, the memory is readable whatever its protection is.
        let memory = std::fs::File::open("/proc/self/mem").map_err(failed)?;
        let mut page = [0; PAGE as usize];
        for at in (0..self.length).step_by(PAGE as usize) {
            let mut word = [0; 8];
            table.read_exact_at(&mut word, (self.address + at) / PAGE * 8).map_err(failed)?;
            let word = u64::from_ne_bytes(word);
            if word & (IS_PRESENT | IS_SWAPPED) == 0 || word & IS_OF_FILE != 0 {
                continue;
            }
            memory.read_exact_at(&mut page, self.address + at).map_err(failed)?;
            crate::memory::program_memory::store_bytes(fresh + at, &page)?;
        }
        let done = |number: i64, arguments: [u64; 6]| {
            // SAFETY: the mapping was made here; it replaces the copy, which the program is about to move.
            let done = unsafe { system_call(number as u64, arguments) };
            if done < 0 { Err(Errno(-done as i32)) } else { Ok(()) }
        };
        done(libc::SYS_mprotect, [fresh, self.length, self.protection as u64, 0, 0, 0])?;
        let moves = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        done(libc::SYS_mremap, [fresh, self.length, self.length, moves, self.address, 0])
    }
}

/// Makes a file in memory with these bytes.
///
/// Returns `None` if there is no room, or the program may not have one.
fn make_memory_file(name: &str, bytes: &[u8]) -> Option<OwnedFd> {
    // The recycled number may be the last one.
    recycled_descriptor::close_recycled();
    let name = CString::new(name).ok()?;
    let arguments = [name.as_ptr() as u64, libc::MFD_CLOEXEC.into(), 0, 0, 0, 0];
    // SAFETY: the name is a string that outlives the call.
    let memory = unsafe { system_call(libc::SYS_memfd_create as u64, arguments) };
    if memory < 0 {
        return None;
    }
    // SAFETY: the descriptor is new.
    let memory = unsafe { OwnedFd::from_raw_fd(memory as i32) };
    let arguments = [memory.as_raw_fd() as u64, bytes.as_ptr() as u64, bytes.len() as u64, 0, 0, 0];
    // SAFETY: the buffer has that many bytes.
    let written = unsafe { system_call(libc::SYS_pwrite64 as u64, arguments) };
    (written == bytes.len() as i64).then_some(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_copy_is_found_by_name() {
        let line = "7f0000003000-7f0000006000 rw-p 00002000 00:01 1057                       /memfd:ashlar-private-3-77 (deleted)";
        let found = MappedCopy::parse_line(line, 0x7f00_0000_4000, PAGE);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (address, inode) = (0x7f00_0000_4000, InodeId(77));
        assert_eq!(found, Some(MappedCopy { address, length: PAGE, protection, offset: 0x3000, session: 3, inode }));
        assert_eq!(MappedCopy::parse_line(line, 0x7f00_0000_4000, 3 * PAGE), None, "it ends before");
        assert_eq!(MappedCopy::parse_line(line, 0x7f00_0000_2000, PAGE), None, "it begins behind");
        for other in
            ["7f0000003000-7f0000006000 rw-p 00000000 00:00 0", "7f0000003000-7f0000006000 r--p 0 0:1 9 /lib/x"]
        {
            assert_eq!(MappedCopy::parse_line(other, 0x7f00_0000_4000, PAGE), None);
        }
    }

    #[test]
    fn page_of_mapped_copy_is_remembered() {
        record_pages(0x5000_1234_0000, 2 * PAGE);
        assert!(may_be_at(0x5000_1234_0000) && may_be_at(0x5000_1234_1fff));
        assert!(!may_be_at(0x5000_1234_2000) && !may_be_at(0x5000_1233_f000));
        record_pages(-i64::from(libc::ENOMEM), PAGE);
        assert!(!may_be_at(-i64::from(libc::ENOMEM) as u64), "nothing is mapped where a call has failed");
    }
}
