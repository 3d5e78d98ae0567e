//! Private mappings of files that are only read: of a copy in memory, which costs a fiftieth of a real descriptor on the mount.
//!
//! POSIX leaves open whether a private mapping shows what is written to the file later. The copy is the file as it is when it is mapped,
//! whole, under one lease. It is a file of the kernel's without a name: pages that are dropped come back, and behind its end there is
//! nothing, as with the file itself. Whoever might look for later changes all the same gets the file: who can write through the
//! descriptor, and who maps more than there is yet. So does who might run what is mapped, since tools go by the names of that.
//!
//! And so does who has a mapping grow (`mremap`): behind its old end the file is to be seen, as long as it is by then. The copy's name,
//! which the kernel tells in its table of what is mapped, says which file that is.

use std::ffi::CString;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::{BLOCK_BYTES, Errno, FileKind, InodeId};

use crate::arch::system_call;
use crate::descriptors::File;
use crate::{materialise, recycled, session};

/// Longer files are not copied: a part may be all that is looked at, and the kernel's pages of a file are there once for all who map it.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// Nor more than so much in the life of a process, which may keep all that it maps.
const COPIED_BYTES_MAX: u64 = 1 << 30;

const PAGE: u64 = 4096;
/// What a copy's name begins with; the session's number and the inode's follow.
const NAME: &str = "ashlar-private-";
/// In the kernel's table of pages: it is in memory, or swapped out, and belongs to a file.
const IS_PRESENT: u64 = 1 << 63;
const IS_SWAPPED: u64 = 1 << 62;
const IS_OF_FILE: u64 = 1 << 61;

/// What this process has copied so far.
static COPIED: AtomicU64 = AtomicU64::new(0);
/// Where copies were mapped, a bit for each page by a hash of its number: one that is set says that a copy may be there. None is ever taken
/// back, as a false one costs no more than a look into the kernel's table for a mapping that is moved.
static PAGES: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

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
    let name = format!("{NAME}{}-{}", session.number, file.inode().0);
    let Some(copy) = in_memory(&name, &bytes).filter(|_| is_whole) else { return Ok(None) };
    let arguments = [a[0], a[1], a[2], a[3], copy.as_raw_fd() as u64, a[5]];
    // SAFETY: the program's own call, but for the number of the descriptor.
    let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
    note(mapped, a[1]);
    Ok(Some(mapped))
}

/// Notes where a copy may be, if a call has put one somewhere.
fn note(address: i64, length: u64) {
    if address < 0 {
        return;
    }
    let first = address as u64 / PAGE;
    for page in first..first.saturating_add(length.div_ceil(PAGE).min(FILE_BYTES_MAX / PAGE)) {
        word(page).fetch_or(1 << (page % 64), Ordering::Relaxed);
    }
}

fn word(page: u64) -> &'static AtomicU64 {
    &PAGES[(page / 64) as usize % PAGES.len()]
}

/// Whether a copy may be mapped at an address.
pub(crate) fn may_be_at(address: u64) -> bool {
    let page = address / PAGE;
    word(page).load(Ordering::Relaxed) & 1 << (page % 64) != 0
}

/// Changes the length or the place of a mapping, with the arguments of mremap(2). A copy that is to be longer makes way for its file.
pub(crate) fn remap(a: [u64; 6]) -> i64 {
    let [address, old, new, ..] = a;
    if old < new {
        // Whatever is wrong, there is no mapping so long to be had; but a file that is gone does not grow any more.
        match Copied::at(address, old).map_or(Ok(()), |copy| copy.replace()) {
            Ok(()) | Err(Errno::ENOENT | Errno::ESTALE) => {}
            Err(_) => return -i64::from(libc::ENOMEM),
        }
    }
    // SAFETY: the program's own call.
    let mapped = unsafe { system_call(libc::SYS_mremap as u64, a) };
    note(mapped, new);
    mapped
}

/// A part of the program's memory in which a copy is mapped.
#[derive(Debug, PartialEq, Eq)]
struct Copied {
    address: u64,
    length: u64,
    /// What may be done with it, as mmap(2) says it.
    protection: i32,
    /// Where it begins in the file.
    offset: u64,
    session: u32,
    inode: InodeId,
}

impl Copied {
    /// The copy that is mapped at an address and so far behind it, if one is.
    fn at(address: u64, length: u64) -> Option<Self> {
        let length = length.checked_next_multiple_of(PAGE).filter(|_| length > 0)?;
        let maps = BufReader::new(std::fs::File::open("/proc/self/maps").ok()?);
        maps.split(b'\n')
            .map_while(Result::ok)
            .find_map(|line| Self::in_line(std::str::from_utf8(&line).ok()?, address, length))
    }

    /// The same, by a line of the kernel's table: `START-END PERMISSIONS OFFSET DEVICE INODE NAME`.
    fn in_line(line: &str, address: u64, length: u64) -> Option<Self> {
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

    /// Has the file itself stand there, with what the program has written over it.
    fn replace(&self) -> Result<(), Errno> {
        let session = session::by_number(self.session).or_else(|| session::open(self.session)).ok_or(Errno::EIO)?;
        let real = materialise::to_read(session, self.inode)?;
        let fresh = self.map(&real);
        drop(real);
        let fresh = fresh?;
        self.put(fresh).inspect_err(|_| {
            // SAFETY: it was mapped here, and nobody else knows of it.
            unsafe { system_call(libc::SYS_munmap as u64, [fresh, self.length, 0, 0, 0, 0]) };
        })
    }

    /// Maps the same part of the file where there is room.
    fn map(&self, real: &OwnedFd) -> Result<u64, Errno> {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let arguments = [0, self.length, protection, libc::MAP_PRIVATE as u64, real.as_raw_fd() as u64, self.offset];
        // SAFETY: it takes nothing away that is mapped.
        let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
        if mapped < 0 { Err(Errno(-mapped as i32)) } else { Ok(mapped as u64) }
    }

    /// Puts a mapping of the file in the copy's place.
    fn put(&self, fresh: u64) -> Result<(), Errno> {
        let failed = |_: std::io::Error| Errno::ENOMEM;
        let table = std::fs::File::open("/proc/self/pagemap").map_err(failed)?;
        // Read through a file, it's there whatever its protection is.
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
            crate::memory::store_bytes(fresh + at, &page)?;
        }
        let done = |number: i64, arguments: [u64; 6]| {
            // SAFETY: the mapping is one that was made here; it takes the place of the copy, which the program is about to have moved.
            let done = unsafe { system_call(number as u64, arguments) };
            if done < 0 { Err(Errno(-done as i32)) } else { Ok(()) }
        };
        done(libc::SYS_mprotect, [fresh, self.length, self.protection as u64, 0, 0, 0])?;
        let moves = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        done(libc::SYS_mremap, [fresh, self.length, self.length, moves, self.address, 0])
    }
}

/// A file in memory with these bytes; `None` where there is no room, and for programs that may not have one.
fn in_memory(name: &str, bytes: &[u8]) -> Option<OwnedFd> {
    // It may be the last number that there is.
    recycled::end();
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
    // SAFETY: the buffer is ours, and has that many bytes.
    let written = unsafe { system_call(libc::SYS_pwrite64 as u64, arguments) };
    (written == bytes.len() as i64).then_some(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_found_by_its_name_where_it_is_mapped() {
        let line = "7f0000003000-7f0000006000 rw-p 00002000 00:01 1057                       /memfd:ashlar-private-3-77 (deleted)";
        let found = Copied::in_line(line, 0x7f00_0000_4000, PAGE);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (address, inode) = (0x7f00_0000_4000, InodeId(77));
        assert_eq!(found, Some(Copied { address, length: PAGE, protection, offset: 0x3000, session: 3, inode }));
        assert_eq!(Copied::in_line(line, 0x7f00_0000_4000, 3 * PAGE), None, "it ends before");
        assert_eq!(Copied::in_line(line, 0x7f00_0000_2000, PAGE), None, "it begins behind");
        for other in
            ["7f0000003000-7f0000006000 rw-p 00000000 00:00 0", "7f0000003000-7f0000006000 r--p 0 0:1 9 /lib/x"]
        {
            assert_eq!(Copied::in_line(other, 0x7f00_0000_4000, PAGE), None);
        }
    }

    #[test]
    fn a_page_on_which_a_copy_was_mapped_is_remembered() {
        note(0x5000_1234_0000, 2 * PAGE);
        assert!(may_be_at(0x5000_1234_0000) && may_be_at(0x5000_1234_1fff));
        assert!(!may_be_at(0x5000_1234_2000) && !may_be_at(0x5000_1233_f000));
        note(-i64::from(libc::ENOMEM), PAGE);
        assert!(!may_be_at(-i64::from(libc::ENOMEM) as u64), "nothing is mapped where a call has failed");
    }
}
