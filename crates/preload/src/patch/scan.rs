//! Finds the system calls in a library's code, and the instructions that may make room.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};

use super::{Library, Plan, Site, WINDOW_MAX};

/// Bytes of a jump.
const JUMP: usize = 5;
/// The instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Code, in bytes, that is searched in some ten microseconds.
const LITTLE_CODE: usize = 32 << 10;
/// Bytes before a system call in which its number is set.
const NUMBER_BEFORE: usize = 64;
/// How many instructions before a system call are looked at for its number, and how many on each side for room.
const BEFORE: usize = 16;
const NEIGHBOURS: usize = 4;
/// `rt_sigreturn`, which must find the stack as the signal left it.
const SIGRETURN: i32 = libc::SYS_rt_sigreturn as i32;

/// A branch leads here.
struct Targets(Vec<u64>);

impl Targets {
    fn contains(&self, address: u64) -> bool {
        self.0.binary_search(&address).is_ok()
    }
}

/// Plans the patches of a library. Code is decoded from the start of each segment on; where data stand between functions the decoder
/// finds its way back within a few instructions, and what it sees there is no system call, or is left alone by the checks.
pub(crate) fn scan(library: &Library) -> Plan {
    let mut sites = Vec::new();
    let mut targets = Vec::new();
    let mut calls: Vec<(Vec<Instruction>, usize)> = Vec::new();
    for code in &library.code {
        // SAFETY: the linker has loaded the segment, and nothing changes it while this runs.
        let bytes = unsafe { std::slice::from_raw_parts(code.start as *const u8, code.len()) };
        if !may_call(bytes) {
            continue;
        }
        collect(bytes, code.start as u64, &mut targets, &mut calls);
    }
    targets.sort_unstable();
    let targets = Targets(targets);
    for (instructions, at) in &calls {
        sites.extend(plan_site(library, instructions, *at, &targets));
    }
    Plan { build_id: library.build_id.clone(), sites }
}

/// Whether a library has so little code, without anything in it that looks like a system call, that to see so takes less than to open a file.
pub(super) fn is_plainly_without(library: &Library) -> bool {
    let bytes: usize = library.code.iter().map(ExactSizeIterator::len).sum();
    // SAFETY: the linker has loaded the segments, and nothing changes them while this runs.
    let mut codes =
        library.code.iter().map(|code| unsafe { std::slice::from_raw_parts(code.start as *const u8, code.len()) });
    bytes <= LITTLE_CODE && !codes.any(may_call)
}

/// Whether there is anything that looks like a system call: its two bytes, with a number moved to where the kernel looks for it
/// shortly before.
fn may_call(bytes: &[u8]) -> bool {
    let is_number = |five: &[u8]| five[0] == 0xb8 && five[2] <= 1 && five[3..] == [0, 0];
    let has_number = |at: usize| bytes[at.saturating_sub(NUMBER_BEFORE)..at].windows(5).any(is_number);
    let mut from = 0;
    while let Some(at) = find(&bytes[from..], SYSCALL) {
        if has_number(from + at) {
            return true;
        }
        from += at + 1;
    }
    false
}

fn find(bytes: &[u8], what: [u8; 2]) -> Option<usize> {
    // SAFETY: both are as long as said.
    let found = unsafe { libc::memmem(bytes.as_ptr().cast(), bytes.len(), what.as_ptr().cast(), what.len()) };
    (!found.is_null()).then(|| found as usize - bytes.as_ptr() as usize)
}

/// Decodes a segment: where its branches lead, and its system calls with their neighbours.
fn collect(bytes: &[u8], start: u64, targets: &mut Vec<u64>, calls: &mut Vec<(Vec<Instruction>, usize)>) {
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

/// Whether an instruction does the same wherever it stands; one that addresses memory relative to itself does once its displacement
/// is changed.
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

/// The best window around a system call: the fewest instructions, rather before it than behind it, into which no branch leads.
fn plan_site(library: &Library, instructions: &[Instruction], at: usize, targets: &Targets) -> Option<Site> {
    let number = number_of(&instructions[..at], instructions[at].ip(), targets);
    if number == Some(SIGRETURN) {
        return None;
    }
    let mut best: Option<(usize, usize)> = None;
    for first in (at.saturating_sub(NEIGHBOURS)..=at).rev() {
        for last in at..instructions.len() {
            let window = &instructions[first..=last];
            if best.is_none_or(|(first, last)| window.len() <= last - first) && fits(window, first, at, targets) {
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
        None => Site::NO_DISPLACEMENT,
    };
    let mut bytes = [0; WINDOW_MAX];
    // SAFETY: the instructions were decoded from there.
    let code = unsafe { std::slice::from_raw_parts(start as *const u8, length) };
    bytes.get_mut(..length)?.copy_from_slice(code);
    Some(Site {
        offset: (start as usize - library.base) as u32,
        number: number.unwrap_or(Site::ANY_NUMBER),
        length: length as u8,
        call: (instructions[at].ip() - start) as u8,
        displacement: displacement as u8,
        bytes,
    })
}

fn fits(window: &[Instruction], first: usize, at: usize, targets: &Targets) -> bool {
    let length: usize = window.iter().map(Instruction::len).sum();
    let moved = window.iter().enumerate().filter(|(index, _)| first + index != at);
    (JUMP..=WINDOW_MAX).contains(&length)
        && moved.clone().all(|(_, instruction)| may_move(instruction))
        && moved.filter(|(_, instruction)| is_relative(instruction)).count() <= 1
        && window.windows(2).all(|pair| pair[0].next_ip() == pair[1].ip())
        && window.iter().skip(1).all(|instruction| !targets.contains(instruction.ip()))
}

/// Where in an instruction its displacement of four bytes stands.
fn displacement_at(instruction: &Instruction) -> Option<usize> {
    // SAFETY: the instruction was decoded from there.
    let bytes = unsafe { std::slice::from_raw_parts(instruction.ip() as *const u8, instruction.len()) };
    let displacement = (instruction.memory_displacement64().wrapping_sub(instruction.next_ip()) as i32).to_le_bytes();
    let mut places = (1..bytes.len().saturating_sub(3)).filter(|&place| bytes[place..place + 4] == displacement);
    let place = places.next()?;
    places.next().is_none().then_some(place)
}

/// The number of the call, where it is set just before it.
fn number_of(before: &[Instruction], call: u64, targets: &Targets) -> Option<i32> {
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
