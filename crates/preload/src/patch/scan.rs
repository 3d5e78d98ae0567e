//! Finds the system calls in a library's code, and the instructions that make room.

use std::ops::Range;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};

use super::apply::JUMP_BYTES;
use super::{Library, PatchSite, Plan, WINDOW_MAX, unwind_tables};

/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes of code that are searched in some ten microseconds.
const LITTLE_CODE: usize = 32 << 10;
/// Instructions before a system call that are checked for its number.
const BEFORE: usize = 16;
/// Instructions on each side of a system call that may make room.
const NEIGHBOURS: usize = 4;
/// `rt_sigreturn`, which must find the stack as the signal left it.
const SIGRETURN: i32 = libc::SYS_rt_sigreturn as i32;

/// The targets of all branches.
struct Targets(Vec<u64>);

impl Targets {
    fn contains(&self, address: u64) -> bool {
        self.0.binary_search(&address).is_ok()
    }
}

/// Plans the patches of a library.
///
/// Each function that contains the two bytes of a system call is decoded from its first byte on. If no table lists the
/// functions, each segment is decoded from its start, and only calls whose number is plain are planned. After data
/// between functions, the decoder recovers within a few instructions, and its errors there don't look like such a call.
pub(crate) fn scan(library: &Library) -> Plan {
    let mut sites = Vec::new();
    if has_no_call_bytes(library) {
        return Plan { build_id: library.build_id.clone(), sites };
    }
    let functions = unwind_tables::functions(library).filter(|functions| !functions.is_empty());
    let mut targets = Vec::new();
    let mut calls: Vec<(Vec<Instruction>, usize)> = Vec::new();
    for part in parts_with_calls(library, functions.as_deref().unwrap_or(&library.code)) {
        decode_part(bytes_of(&part), part.start as u64, &mut targets, &mut calls);
    }
    if functions.is_some() {
        // All branches within the functions are collected by now.
        collect_far_branches(library, &calls, &mut targets);
    }
    targets.sort_unstable();
    let targets = Targets(targets);
    for (instructions, at) in &calls {
        let site = plan_site(library, instructions, *at, &targets);
        sites.extend(site.filter(|site| functions.is_some() || site.number != PatchSite::ANY_NUMBER));
    }
    Plan { build_id: library.build_id.clone(), sites }
}

/// Returns whether a library has little code, without the bytes of a system call.
///
/// For so little code, this check takes less time than opening a file.
pub(super) fn is_small_without_calls(library: &Library) -> bool {
    let bytes: usize = library.code.iter().map(ExactSizeIterator::len).sum();
    bytes <= LITTLE_CODE && has_no_call_bytes(library)
}

/// Returns whether nothing in a library looks like a system call.
fn has_no_call_bytes(library: &Library) -> bool {
    library.code.iter().all(|code| find_bytes(bytes_of(code), SYSCALL).is_none())
}

/// Returns a part of a library's code as bytes.
fn bytes_of<'a>(part: &Range<usize>) -> &'a [u8] {
    // SAFETY: the linker has loaded its segment, and nothing changes it while this runs.
    unsafe { std::slice::from_raw_parts(part.start as *const u8, part.len()) }
}

/// Returns those parts of a library's code, in order, that contain the bytes of a system call.
fn parts_with_calls(library: &Library, all: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    for code in &library.code {
        let bytes = bytes_of(code);
        let mut from = 0;
        while let Some(found) = find_bytes(&bytes[from..], SYSCALL) {
            let at = code.start + from + found;
            from += found + 1;
            let behind = all.partition_point(|part| part.start <= at);
            let Some(part) = all[..behind].last() else { continue };
            let end = all.get(behind).map_or(code.end, |next| next.start.min(code.end));
            let part = if part.contains(&at) { part.clone() } else { extend_function(part, end) };
            if part.contains(&at) && parts.last() != Some(&part) {
                parts.push(part);
            }
        }
    }
    parts
}

/// Extends a function by the code that it runs into after its end, at most up to `end`.
///
/// The table's entry of libc's `clone` ends where the new thread has no caller.
fn extend_function(function: &Range<usize>, end: usize) -> Range<usize> {
    let goes_on = |instruction: &Instruction| {
        instruction.mnemonic() == Mnemonic::Syscall
            || matches!(instruction.flow_control(), FlowControl::Next | FlowControl::ConditionalBranch)
    };
    let mut decoder =
        Decoder::with_ip(64, bytes_of(&(function.start..end)), function.start as u64, DecoderOptions::NONE);
    let mut at = function.start;
    while decoder.can_decode() {
        let instruction = decoder.decode();
        at = instruction.next_ip() as usize;
        if at >= function.end && (instruction.is_invalid() || !goes_on(&instruction)) {
            break;
        }
    }
    function.start..at.max(function.end)
}

/// Collects the targets of four-byte branches in all of the code, if they are near a system call.
///
/// A compiler puts the rarely used part of a function elsewhere. Each byte may begin a branch here, so some are none.
fn collect_far_branches(library: &Library, calls: &[(Vec<Instruction>, usize)], targets: &mut Vec<u64>) {
    let around = calls.iter().filter_map(|(window, _)| Some(window.first()?.ip()..window.last()?.next_ip()));
    let mut around: Vec<Range<u64>> = around.collect();
    around.sort_unstable_by_key(|window| window.start);
    around.dedup_by(|later, kept| {
        let touches = later.start <= kept.end;
        if touches {
            kept.end = kept.end.max(later.end);
        }
        touches
    });
    for code in &library.code {
        for (index, bytes) in bytes_of(code).windows(6).enumerate() {
            let is_branch = matches!(bytes[1], 0xe8 | 0xe9) || bytes[0] == 0x0f && bytes[1] & 0xf0 == 0x80;
            if is_branch {
                let distance = i32::from_le_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]);
                let target = ((code.start + index + bytes.len()) as u64).wrapping_add_signed(distance.into());
                let before = around.partition_point(|window| window.start <= target);
                targets.extend(around[..before].last().filter(|window| window.contains(&target)).map(|_| target));
            }
        }
    }
}

fn find_bytes(bytes: &[u8], what: [u8; 2]) -> Option<usize> {
    // SAFETY: both are as long as stated.
    let found = unsafe { libc::memmem(bytes.as_ptr().cast(), bytes.len(), what.as_ptr().cast(), what.len()) };
    (!found.is_null()).then(|| found as usize - bytes.as_ptr() as usize)
}

/// Decodes a part of the code.
///
/// It collects the targets of its branches, and its system calls with their neighbours.
fn decode_part(bytes: &[u8], start: u64, targets: &mut Vec<u64>, calls: &mut Vec<(Vec<Instruction>, usize)>) {
    let mut decoder = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE);
    let mut before: Vec<Instruction> = Vec::new();
    let mut open: Vec<(Vec<Instruction>, usize)> = Vec::new();
    while decoder.can_decode() {
        let instruction = decoder.decode();
        if instruction.is_jcc_short_or_near() || instruction.is_jmp_short_or_near() || instruction.is_call_near() {
            targets.push(instruction.near_branch_target());
        }
        for (window, _) in &mut open {
            window.push(instruction);
        }
        if instruction.code() == Code::Syscall {
            let mut window = before.clone();
            window.push(instruction);
            open.push((window, before.len()));
        }
        before.push(instruction);
        if before.len() > BEFORE {
            before.remove(0);
        }
        while open.first().is_some_and(|(window, at)| window.len() > at + NEIGHBOURS) {
            calls.push(open.remove(0));
        }
    }
    calls.append(&mut open);
}

/// Returns whether an instruction does the same at another address.
///
/// One that addresses memory relative to itself does so once its displacement is adjusted.
fn may_move(instruction: &Instruction) -> bool {
    !instruction.is_invalid()
        && instruction.flow_control() == FlowControl::Next
        && instruction.code() != Code::Syscall
        && instruction.memory_base() != Register::EIP
}

fn is_relative(instruction: &Instruction) -> bool {
    (0..instruction.op_count()).any(|operand| instruction.op_kind(operand) == OpKind::Memory)
        && instruction.memory_base() == Register::RIP
}

/// Plans the best window around a system call, into which no branch leads.
///
/// That is the window with the fewest instructions, before the call rather than after it.
fn plan_site(library: &Library, instructions: &[Instruction], at: usize, targets: &Targets) -> Option<PatchSite> {
    let number = number_before_call(&instructions[..at], instructions[at].ip(), targets);
    if number == Some(SIGRETURN) {
        return None;
    }
    let mut best: Option<(usize, usize)> = None;
    for first in (at.saturating_sub(NEIGHBOURS)..=at).rev() {
        for last in at..instructions.len() {
            let window = &instructions[first..=last];
            if best.is_none_or(|(first, last)| window.len() <= last - first)
                && is_usable_window(window, first, at, targets)
            {
                best = Some((first, last));
            }
        }
    }
    let (first, last) = best?;
    let window = &instructions[first..=last];
    let start = window.first()?.ip();
    let length = (window.last()?.next_ip() - start) as usize;
    let relative = window.iter().find(|instruction| is_relative(instruction));
    let displacement = match relative {
        Some(instruction) => displacement_at(instruction)? + (instruction.ip() - start) as usize,
        None => PatchSite::NO_DISPLACEMENT,
    };
    let mut bytes = [0; WINDOW_MAX];
    // SAFETY: the instructions were decoded from there.
    let code = unsafe { std::slice::from_raw_parts(start as *const u8, length) };
    bytes.get_mut(..length)?.copy_from_slice(code);
    Some(PatchSite {
        offset: (start as usize - library.base) as u32,
        number: number.unwrap_or(PatchSite::ANY_NUMBER),
        length: length as u8,
        call: (instructions[at].ip() - start) as u8,
        displacement: displacement as u8,
        bytes,
    })
}

fn is_usable_window(window: &[Instruction], first: usize, at: usize, targets: &Targets) -> bool {
    let length: usize = window.iter().map(Instruction::len).sum();
    let moved = window.iter().enumerate().filter(|(index, _)| first + index != at);
    (JUMP_BYTES..=WINDOW_MAX).contains(&length)
        && moved.clone().all(|(_, instruction)| may_move(instruction))
        && moved.filter(|(_, instruction)| is_relative(instruction)).count() <= 1
        && window.windows(2).all(|pair| pair[0].next_ip() == pair[1].ip())
        && window.iter().skip(1).all(|instruction| !targets.contains(instruction.ip()))
}

/// Returns the offset of an instruction's displacement of four bytes.
fn displacement_at(instruction: &Instruction) -> Option<usize> {
    // SAFETY: the instruction was decoded from there.
    let bytes = unsafe { std::slice::from_raw_parts(instruction.ip() as *const u8, instruction.len()) };
    let displacement = (instruction.memory_displacement64().wrapping_sub(instruction.next_ip()) as i32).to_le_bytes();
    let mut places = (1..bytes.len().saturating_sub(3)).filter(|&place| bytes[place..place + 4] == displacement);
    let place = places.next()?;
    places.next().is_none().then_some(place)
}

/// Returns the number of the call, if it is set just before the call.
fn number_before_call(before: &[Instruction], call: u64, targets: &Targets) -> Option<i32> {
    let mut next = call;
    for instruction in before.iter().rev() {
        if targets.contains(next) || instruction.flow_control() != FlowControl::Next || instruction.next_ip() != next {
            return None;
        }
        match instruction.code() {
            Code::Mov_r32_imm32 if instruction.op0_register() == Register::EAX => {
                return Some(instruction.immediate32() as i32);
            }
            Code::Mov_rm64_imm32 if instruction.op0_register() == Register::RAX => {
                return Some(instruction.immediate32to64() as i32);
            }
            Code::Xor_r32_rm32 | Code::Xor_rm32_r32
                if instruction.op0_register() == Register::EAX && instruction.op1_register() == Register::EAX =>
            {
                return Some(0);
            }
            _ if (0..instruction.op_count()).any(|i| instruction.op_register(i).full_register() == Register::RAX) => {
                return None;
            }
            _ => next = instruction.ip(),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::library_of;
    use super::*;

    /// Returns code in memory as an object of which nothing else is known.
    fn object(code: &[u8]) -> Library {
        let start = code.as_ptr() as usize;
        let part = start..start + code.len();
        Library { base: start, code: vec![part], ..Library::default() }
    }

    #[test]
    fn libc_calls_are_planned_except_sigreturn() {
        let library = library_of(libc::gnu_get_libc_version as *const () as usize).expect("loaded");
        let plan = scan(&library);
        let has = |number: i64| plan.sites.iter().any(|site| i64::from(site.number) == number);
        for number in [libc::SYS_openat, libc::SYS_clone, libc::SYS_clone3, libc::SYS_execve, libc::SYS_exit] {
            assert!(has(number), "{number}");
        }
        assert!(has(PatchSite::ANY_NUMBER.into()), "the function that makes any call");
        assert!(!has(libc::SYS_rt_sigreturn));
        let restorer = [0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05];
        let is_it = |site: &PatchSite| {
            let window = library.base + site.offset as usize + usize::from(site.call) - 7;
            bytes_of(&(window..window + restorer.len())) == restorer
        };
        assert!(!plan.sites.iter().any(is_it), "the signal's frame must be where the stack is");
    }

    #[test]
    fn code_without_tables_keeps_calls_of_unknown_number() {
        // mov eax, 1; syscall; ret, and mov rax, rdi; syscall; ret
        let known = object(&[0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0xc3]);
        assert_eq!(scan(&known).sites.iter().map(|site| site.number).collect::<Vec<_>>(), [1]);
        let unknown = object(&[0x48, 0x89, 0xf8, 0x0f, 0x05, 0xc3, 0x90, 0x90]);
        assert!(scan(&unknown).sites.is_empty());
    }

    #[test]
    fn bytes_within_an_instruction_are_no_call() {
        // mov eax, 0x050f0001; ret
        let library = object(&[0xb8, 0x01, 0x00, 0x0f, 0x05, 0xc3, 0x90, 0x90]);
        assert!(!has_no_call_bytes(&library) && scan(&library).sites.is_empty());
    }

    #[test]
    fn function_falling_through_its_end_is_extended() {
        // mov eax, 56; syscall; ret; nop, of which a table names the first five bytes
        let code = [0xb8_u8, 0x38, 0, 0, 0, 0x0f, 0x05, 0xc3, 0x90];
        let start = code.as_ptr() as usize;
        assert_eq!(extend_function(&(start..start + 5), start + code.len()), start..start + 8);
        assert_eq!(extend_function(&(start..start + 8), start + code.len()), start..start + 8, "it has returned");
    }
}
