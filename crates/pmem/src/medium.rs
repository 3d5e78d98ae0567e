//! The medium of an arena's files, found out by probing.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, fstatfs, ftruncate, open, openat};

use crate::FlushMethod;

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
const PROBE_BYTES: usize = 4096;

/// The kind of an arena, which decides the meaning of persist and what survives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumKind {
    /// Persistent memory under a DAX file system: flushed and fenced values survive power loss.
    Pmem,
    /// Memory only: it survives processes, not the machine.
    Memory,
    /// A file on any other file system: it survives power loss from `fdatasync` on.
    Disk,
}

impl MediumKind {
    /// The name that people see and write.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pmem => "pmem",
            Self::Memory => "memory",
            Self::Disk => "disk",
        }
    }
}

/// A medium: its kind, and how bytes reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Medium {
    /// The kind.
    pub kind: MediumKind,
    /// Set where memory stands in for persistent memory: the flush instructions run, so costs can be measured, but
    /// nothing survives the machine.
    pub emulated: bool,
    /// How lines are flushed.
    pub flush: FlushMethod,
}

impl Medium {
    /// Returns its name for people, which says if it is emulated.
    #[must_use]
    pub const fn label(self) -> &'static str {
        if self.emulated { "pmem (emulated)" } else { self.kind.name() }
    }

    /// Memory that needs no flushing.
    pub const MEMORY: Self = Self { kind: MediumKind::Memory, emulated: false, flush: FlushMethod::None };
    /// A file behind the page cache.
    pub const DISK: Self = Self { kind: MediumKind::Disk, emulated: false, flush: FlushMethod::None };

    /// Real persistent memory, with this processor's best flush.
    #[must_use]
    pub fn pmem() -> Self {
        Self { kind: MediumKind::Pmem, emulated: false, flush: FlushMethod::best() }
    }

    /// Memory that runs the flush instructions of persistent memory.
    #[must_use]
    pub fn emulated_pmem() -> Self {
        Self { kind: MediumKind::Memory, emulated: true, flush: FlushMethod::best() }
    }

    /// Finds the medium of files in the directory `dir`.
    ///
    /// It is memory on tmpfs and ramfs, persistent memory if a mapping with `MAP_SYNC` works, and disk everywhere else.
    /// `emulate` asks for the flush instructions on memory and changes nothing on other kinds.
    ///
    /// # Errors
    /// Those of opening the directory and of making a small unnamed file in it.
    pub fn probe(dir: &Path, emulate: bool) -> io::Result<Self> {
        Self::of_directory(open(dir, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?, emulate)
    }

    /// Does as [`Self::probe`], in an open directory.
    ///
    /// # Errors
    /// As [`Self::probe`].
    pub fn of_directory(directory: impl AsFd, emulate: bool) -> io::Result<Self> {
        let magic = fstatfs(&directory)?.f_type as u64 & 0xffff_ffff;
        if matches!(magic, TMPFS_MAGIC | RAMFS_MAGIC | HUGETLBFS_MAGIC) {
            return Ok(if emulate { Self::emulated_pmem() } else { Self::MEMORY });
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = match openat(&directory, ".", flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => file,
            // File systems without unnamed files are not DAX file systems; ones that cannot be written say so later.
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR | rustix::io::Errno::INVAL) => {
                return Ok(Self::DISK);
            }
            Err(error) => return Err(error.into()),
        };
        ftruncate(&file, PROBE_BYTES as u64)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PROBE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Ok(Self::DISK);
        }
        // SAFETY: the mapping was made above with this length and nothing points into it.
        unsafe { libc::munmap(address, PROBE_BYTES) };
        Ok(Self::pmem())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tmpfs_is_memory_and_emulation_gives_it_flushes() {
        let shm = Path::new("/dev/shm");
        if !shm.is_dir() {
            return;
        }
        assert_eq!(Medium::probe(shm, false).unwrap(), Medium::MEMORY);
        let emulated = Medium::probe(shm, true).unwrap();
        assert!(emulated.emulated && emulated.kind == MediumKind::Memory);
        assert_eq!(emulated.flush, FlushMethod::best());
    }

    #[test]
    fn missing_directory_gives_an_error() {
        assert_eq!(Medium::probe(Path::new("/nonexistent"), false).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
