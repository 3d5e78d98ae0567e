//! Writes trampolines, and the jumps to them, into a library in memory.

use std::ops::Range;
use std::ptr;

use super::{Library, PatchSite, Plan};
use crate::entry::arch::{ashlar_entry, system_call};

pub(super) const PAGE: usize = 4096;
/// The reach of a jump, less the room for the trampolines themselves.
const REACH: usize = (1 << 31) - (1 << 20);
/// The search for room for the trampolines tries multiples of this distance from a library.
const STEP: usize = 1 << 24;
/// The most bytes of a trampoline.
const TRAMPOLINE_BYTES: usize = 64;

/// Bytes of a near jump.
pub(super) const JUMP_BYTES: usize = 5;

/// `lea rsp, [rsp - 128]`: steps over the red zone.
const ENTER: [u8; 5] = [0x48, 0x8d, 0x64, 0x24, 0x80];
/// `lea rsp, [rsp + 128]`, of 8 bytes, as the entry expects.
const LEAVE: [u8; 8] = [0x48, 0x8d, 0xa4, 0x24, 0x80, 0x00, 0x00, 0x00];
const NOP: u8 = 0x90;

/// The bytes that patch a library, with its trampolines at one address.
pub(super) struct PatchLayout {
    /// The content from [`TRAMPOLINES_AT`] on: whole pages.
    pub(super) trampolines: Vec<u8>,
    /// The jumps: addresses, and the bytes written there.
    pub(super) jumps: Vec<(usize, Vec<u8>)>,
}

/// The room for trampolines begins with a page that holds the address of the entry.
pub(super) const TRAMPOLINES_AT: usize = PAGE;

impl PatchLayout {
    /// Returns the bytes of the room for so many trampolines.
    pub(super) fn room_bytes(sites: usize) -> usize {
        TRAMPOLINES_AT + (sites * TRAMPOLINE_BYTES).next_multiple_of(PAGE)
    }

    pub(super) fn new(library: &Library, sites: &[&PatchSite], room: usize) -> Self {
        let mut trampolines = vec![NOP; Self::room_bytes(sites.len()) - TRAMPOLINES_AT];
        let mut jumps = Vec::with_capacity(sites.len());
        for (site, place) in sites.iter().zip(trampolines.chunks_exact_mut(TRAMPOLINE_BYTES)) {
            let window = library.base + site.offset as usize;
            let at = room + TRAMPOLINES_AT + jumps.len() * TRAMPOLINE_BYTES;
            let trampoline = trampoline(site, window, at, room);
            place[..trampoline.len()].copy_from_slice(&trampoline);
            jumps.push((window, jump(window, at, site.length.into())));
        }
        Self { trampolines, jumps }
    }
}

/// Returns the sites of a plan that `wanted` accepts by the call's number, if the code is as planned.
///
/// The numbers include [`PatchSite::ANY_NUMBER`].
pub(super) fn sites_to_patch<'a>(
    library: &Library,
    plan: &'a Plan,
    wanted: impl Fn(i32) -> bool,
) -> Vec<&'a PatchSite> {
    plan.sites.iter().filter(|site| wanted(site.number) && is_as_planned(library, site)).collect()
}

/// Patches a library in place.
///
/// Returns the address range of its trampolines, if it did.
///
/// No thread may be in the middle of its code.
pub(super) fn patch_in_place(library: &Library, sites: &[&PatchSite]) -> Option<Range<usize>> {
    if sites.is_empty() {
        return None;
    }
    let bytes = PatchLayout::room_bytes(sites.len());
    let room = reserve_room(library, bytes)?;
    let layout = PatchLayout::new(library, sites, room);
    let read_and_run = libc::PROT_READ | libc::PROT_EXEC;
    let is_patched = |code: &&Range<usize>| layout.jumps.iter().any(|(window, _)| code.contains(window));
    let patched: Vec<_> = library.code.iter().filter(is_patched).collect();
    // The code stays as it is, and executable, so all code that this function calls still runs.
    if !patched.iter().all(|code| set_protection(code, read_and_run | libc::PROT_WRITE)) {
        patched.iter().for_each(|code| _ = set_protection(code, read_and_run));
        release_room(&(room..room + bytes));
        return None;
    }
    // SAFETY: the room is new and long enough. The windows were compared with the plan, in which each is a sequence of
    // whole instructions that nothing jumps into. No other thread runs that could be in the middle of one.
    unsafe {
        ptr::write(room as *mut usize, ashlar_entry as *const () as usize);
        copy_code(&layout.trampolines, room + TRAMPOLINES_AT);
        layout.jumps.iter().for_each(|(window, jump)| copy_code(jump, *window));
    }
    patched.iter().for_each(|code| _ = set_protection(code, read_and_run));
    set_protection(&(room..room + bytes), read_and_run);
    Some(room..room + bytes)
}

/// Replaces code by a jump to a function; returns whether it did.
///
/// No other thread may run yet.
pub(super) fn put_jump(library: &Library, at: usize, function: usize) -> bool {
    let read_and_run = libc::PROT_READ | libc::PROT_EXEC;
    let Some(room) = reserve_room(library, PAGE) else { return false };
    let code = at..at + JUMP_BYTES;
    if !set_protection(&code, read_and_run | libc::PROT_WRITE) {
        release_room(&(room..room + PAGE));
        return false;
    }
    // jmp [rip + 2], and after it, at a multiple of 8, the address
    let far = [&[0xff, 0x25, 2, 0, 0, 0, NOP, NOP][..], &function.to_le_bytes()].concat();
    // SAFETY: both are writable and long enough, and no other thread runs that could be in the middle of the code.
    unsafe {
        copy_code(&far, room);
        copy_code(&jump(at, room, JUMP_BYTES), at);
    }
    set_protection(&code, read_and_run) && set_protection(&(room..room + PAGE), read_and_run)
}

/// Sets the protection of the pages of a part of the memory.
///
/// Returns whether it could.
fn set_protection(part: &Range<usize>, protection: i32) -> bool {
    let (start, end) = (part.start / PAGE * PAGE, part.end.next_multiple_of(PAGE));
    let arguments = [start as u64, (end - start) as u64, protection as u64, 0, 0, 0];
    // SAFETY: the memory is code, or trampolines; it stays readable, and executable if it was.
    unsafe { system_call(libc::SYS_mprotect as u64, arguments) == 0 }
}

/// Releases the room of trampolines to which nothing jumps.
pub(super) fn release_room(room: &Range<usize>) {
    // SAFETY: nothing jumps there.
    unsafe { system_call(libc::SYS_munmap as u64, [room.start as u64, room.len() as u64, 0, 0, 0, 0]) };
}

/// Returns whether the library's code is as in the plan.
fn is_as_planned(library: &Library, site: &PatchSite) -> bool {
    let window = library.base + site.offset as usize;
    let is_inside = library.code.iter().any(|code| code.contains(&window) && window + site.code().len() <= code.end);
    // SAFETY: it lies in loaded code.
    is_inside && unsafe { std::slice::from_raw_parts(window as *const u8, site.code().len()) } == site.code()
}

/// Reserves memory for trampolines within reach of a jump from the library and back.
fn reserve_room(library: &Library, bytes: usize) -> Option<usize> {
    let protection = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
    let from = library.end.next_multiple_of(PAGE);
    let above = (0..REACH / STEP).map(|step| from + step * STEP);
    let below = (1..REACH / STEP).filter_map(|step| library.base.checked_sub(step * STEP));
    for at in above.chain(below) {
        let at = at / PAGE * PAGE;
        let arguments = [at as u64, bytes as u64, protection, flags, u64::MAX, 0];
        // SAFETY: the kernel maps only free addresses.
        let mapped = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
        if mapped == at as i64 {
            return Some(at);
        }
        if mapped > 0 {
            // A kernel that does not know the flag took the address as a hint.
            // SAFETY: it was mapped just now.
            unsafe { system_call(libc::SYS_munmap as u64, [mapped as u64, bytes as u64, 0, 0, 0, 0]) };
        }
    }
    None
}

/// Returns the trampoline at `at` of a window.
///
/// It consists of the instructions moved from before the call, the call of the entry past the red zone, the
/// instructions moved from after it, and the jump back. The address of the entry is at `entry`.
fn trampoline(site: &PatchSite, window: usize, at: usize, entry: usize) -> Vec<u8> {
    let (code, call) = (site.code(), usize::from(site.call));
    let mut bytes = Vec::with_capacity(TRAMPOLINE_BYTES);
    bytes.extend(&code[..call]);
    bytes.extend(ENTER);
    // call [rip + …]
    bytes.extend([0xff, 0x15]);
    bytes.extend(displacement_to(at + bytes.len() + 4, entry));
    bytes.extend(LEAVE);
    let moved_behind = bytes.len();
    bytes.extend(&code[call + 2..]);
    let displacement = usize::from(site.displacement);
    if displacement != PatchSite::NO_DISPLACEMENT {
        let place = if displacement < call { displacement } else { moved_behind + displacement - call - 2 };
        let old = bytes.get(place..place + 4).and_then(|b| b.try_into().ok()).map_or(0, i32::from_le_bytes);
        let moved_by = (at + place) as i64 - (window + displacement) as i64;
        bytes[place..place + 4].copy_from_slice(&(i64::from(old) - moved_by).to_le_bytes()[..4]);
    }
    bytes.push(0xe9);
    bytes.extend(displacement_to(at + bytes.len() + 4, window + code.len()));
    bytes
}

/// Returns a jump from a window to its trampoline, padded so that nothing else in the window runs.
fn jump(window: usize, to: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xe9];
    bytes.extend(displacement_to(window + 5, to));
    bytes.resize(length, NOP);
    bytes
}

/// Returns the displacement from the end of an instruction to an address.
fn displacement_to(from: usize, to: usize) -> [u8; 4] {
    (to.wrapping_sub(from) as i32).to_le_bytes()
}

/// Copies bytes into code.
///
/// # Safety
/// The destination is writable.
unsafe fn copy_code(bytes: &[u8], to: usize) {
    for (index, byte) in bytes.iter().enumerate() {
        // SAFETY: as the caller says. A byte at a time, volatile: libc's own `memcpy` may be the code that is patched.
        unsafe { ptr::write_volatile((to + index) as *mut u8, *byte) };
    }
}
