//! A library's patched code in a file, which programs map over the loaded code.
//!
//! ```text
//! magic:8 "ASHLIMG1"  distance:8  code from:8  code bytes:8  trampolines bytes:8, then from the next page on:
//! trampolines  code
//! ```
//!
//! The jumps are relative, so the trampolines are at one distance from the library's base in all programs. The page
//! before them is each program's own, with the address of the entry. The file is named by the builds of the library and
//! of this library.

use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use super::apply::{PAGE, PatchLayout, TRAMPOLINES_AT};
use super::kept_file::KeptFile;
use super::{Library, PatchSite};
use crate::entry::arch::{ashlar_entry, system_call};

const MAGIC: u64 = u64::from_le_bytes(*b"ASHLIMG1");
/// Distance of the trampolines from the library's base.
///
/// Mappings reach that address only long after a program's start.
const DISTANCE: i64 = -(1 << 30);

/// The head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ImageHead {
    distance: i64,
    code_from: u64,
    code_bytes: u64,
    trampolines_bytes: u64,
}

impl ImageHead {
    const BYTES: usize = 40;

    fn encode(self) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        let words = [MAGIC, self.distance as u64, self.code_from, self.code_bytes, self.trampolines_bytes];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let word = |index: usize| bytes[index * 8..][..8].try_into().map_or(0, u64::from_le_bytes);
        let head =
            Self { distance: word(1) as i64, code_from: word(2), code_bytes: word(3), trampolines_bytes: word(4) };
        (word(0) == MAGIC).then_some(head)
    }

    fn file_bytes(&self) -> Option<u64> {
        (PAGE as u64).checked_add(self.trampolines_bytes)?.checked_add(self.code_bytes)
    }
}

/// Writes the image of a library with jumps at these sites, which are as planned.
pub(super) fn store_image(library: &Library, sites: &[&PatchSite], kept: &KeptFile) {
    let (Some(code), Some(room)) = (library.pages(), library.base.checked_add_signed(DISTANCE as isize)) else {
        return;
    };
    // If the code is in pieces, something else may lie between them.
    if library.code.len() != 1 || sites.is_empty() {
        return;
    }
    let layout = PatchLayout::new(library, sites, room);
    // SAFETY: the pages are code of the loaded library, and readable.
    let mut patched = unsafe { std::slice::from_raw_parts(code.start as *const u8, code.len()) }.to_vec();
    for (window, jump) in &layout.jumps {
        patched[window - code.start..][..jump.len()].copy_from_slice(jump);
    }
    let head = ImageHead {
        distance: DISTANCE,
        code_from: (code.start - library.base) as u64,
        code_bytes: code.len() as u64,
        trampolines_bytes: layout.trampolines.len() as u64,
    };
    kept.store(&[&head.encode()[..], &layout.trampolines, &patched].concat());
    kept.remove_others();
}

/// Maps the image in place of a library's code; returns whether it did.
///
/// No other thread may run yet.
///
/// There may be no image, its file system may allow no programs, or a mapping may lie at the trampolines' address.
pub(super) fn map_image(library: &Library, kept: &KeptFile) -> bool {
    try_map_image(library, kept).is_some()
}

fn try_map_image(library: &Library, kept: &KeptFile) -> Option<()> {
    let (file, length) = kept.open()?;
    let mut bytes = [0; ImageHead::BYTES];
    file.read_exact_at(&mut bytes, 0).ok()?;
    let head = ImageHead::decode(&bytes)?;
    let code = library.pages()?;
    let is_for_it = head.code_from == (code.start - library.base) as u64 && head.code_bytes == code.len() as u64;
    if !is_for_it || head.file_bytes() != Some(length) || head.trampolines_bytes % PAGE as u64 != 0 {
        return None;
    }
    let room = library.base.checked_add_signed(head.distance as isize)? / PAGE * PAGE;
    let trampolines = room + TRAMPOLINES_AT;
    let new = libc::MAP_FIXED_NOREPLACE;
    map_at(room, PAGE, None, libc::PROT_WRITE, new)?;
    let is_mapped = map_at(
        trampolines,
        head.trampolines_bytes as usize,
        Some((file.as_raw_fd(), PAGE as u64)),
        libc::PROT_EXEC,
        new,
    )
    .is_some();
    if !is_mapped {
        unmap(room, PAGE);
        return None;
    }
    // SAFETY: the page was mapped above.
    unsafe { ptr::write(room as *mut usize, ashlar_entry as *const () as usize) };
    let from = PAGE as u64 + head.trampolines_bytes;
    // The mapped code is the same, but for the jumps, so all code that this function calls still runs.
    let is_mapped =
        map_at(code.start, code.len(), Some((file.as_raw_fd(), from)), libc::PROT_EXEC, libc::MAP_FIXED).is_some();
    if !is_mapped {
        unmap(room, TRAMPOLINES_AT + head.trampolines_bytes as usize);
        return None;
    }
    // SAFETY: the page was mapped above.
    unsafe { system_call(libc::SYS_mprotect as u64, [room as u64, PAGE as u64, libc::PROT_READ as u64, 0, 0, 0]) };
    Some(())
}

/// Maps memory, or a part of a file, at an address, readable and with `access`.
fn map_at(at: usize, bytes: usize, file: Option<(RawFd, u64)>, access: i32, how: i32) -> Option<()> {
    let kind = libc::MAP_PRIVATE | how | if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
    let (descriptor, from) = file.map_or((u64::MAX, 0), |(descriptor, from)| (descriptor as u64, from));
    let arguments = [at as u64, bytes as u64, (libc::PROT_READ | access) as u64, kind as u64, descriptor, from];
    // SAFETY: if the mapping replaces anything, that is the library's code, by the same code.
    let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
    if mapped > 0 && mapped != at as i64 {
        // A kernel that does not know the flag took the address as a hint.
        unmap(mapped as usize, bytes);
    }
    (mapped == at as i64).then_some(())
}

fn unmap(at: usize, bytes: usize) {
    // SAFETY: it was mapped here, and nothing jumps there.
    unsafe { system_call(libc::SYS_munmap as u64, [at as u64, bytes as u64, 0, 0, 0, 0]) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_head_round_trips() {
        let head =
            ImageHead { distance: DISTANCE, code_from: 0x2_6000, code_bytes: 342 << 12, trampolines_bytes: 9 << 12 };
        let bytes = head.encode();
        assert_eq!(ImageHead::decode(bytes[..ImageHead::BYTES].try_into().expect("its length")), Some(head));
        let mut other = bytes;
        other[7] = b'0';
        assert_eq!(ImageHead::decode(other[..ImageHead::BYTES].try_into().expect("its length")), None);
        assert_eq!(ImageHead { code_bytes: u64::MAX, ..head }.file_bytes(), None);
    }
}
