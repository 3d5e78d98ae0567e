//! The process as the kernel has made it: where it begins, its arguments and environment, memory, and the calls by which it ends or becomes another one.
//!
//! All `unsafe` code of the command stands here.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::alloc::{GlobalAlloc, Layout};
use core::arch::{asm, global_asm};
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char};
use core::marker::PhantomData;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use rustix::io::Errno;

// The kernel begins a process with its stack pointer on the number of arguments; functions want the stack on a multiple of 16.
global_asm!(
    ".pushsection .text._start, \"ax\", @progbits",
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {begin}",
    "ud2",
    ".popsection",
    begin = sym begin,
);

// The compiler's own functions. libc's are chosen by what the processor can do, when libc begins. They are written in assembly since a compiler makes
// calls of such functions out of loops that do what they do. `rep movsb` is as fast as any other way, but for a start of some ten cycles.
global_asm!(
    ".pushsection .text.memory, \"ax\", @progbits",
    ".globl memcpy, memmove, memset, memcmp, bcmp, strlen",
    "memmove:",
    "mov rax, rdi",
    "sub rax, rsi",
    "cmp rax, rdx",
    "jae memcpy",
    // The target begins within the source, so its end is first.
    "mov rax, rdi",
    "mov rcx, rdx",
    "lea rdi, [rdi + rdx - 1]",
    "lea rsi, [rsi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "bcmp:",
    "memcmp:",
    "xor eax, eax",
    "xor ecx, ecx",
    "2:",
    "cmp rcx, rdx",
    "je 3f",
    "movzx eax, byte ptr [rdi + rcx]",
    "movzx r8d, byte ptr [rsi + rcx]",
    "inc rcx",
    "sub eax, r8d",
    "je 2b",
    "3:",
    "ret",
    "strlen:",
    "mov rax, -1",
    "4:",
    "inc rax",
    "cmp byte ptr [rdi + rax], 0",
    "jne 4b",
    "ret",
    ".popsection",
);

/// What the stack began with: the number of arguments, then their addresses and those of the environment, each list with a null at its end.
static STACK: AtomicPtr<usize> = AtomicPtr::new(ptr::null_mut());

extern "C" fn begin(stack: *mut usize) -> ! {
    STACK.store(stack, Ordering::Relaxed);
    end(super::serve())
}

fn end(status: u8) -> ! {
    loop {
        // SAFETY: the call takes a number, and ends the process.
        unsafe { call(EXIT_GROUP, status.into(), 0, 0, 0) };
    }
}

/// A list of strings that the kernel has laid down for this process.
struct Strings<'a>(*const *const c_char, PhantomData<&'a CStr>);

impl<'a> Iterator for Strings<'a> {
    type Item = &'a CStr;

    fn next(&mut self) -> Option<&'a CStr> {
        // SAFETY: the list ends with a null, beyond which nothing goes, and nobody else has it.
        let string = unsafe { self.0.read() };
        if string.is_null() {
            return None;
        }
        // SAFETY: as above: it was not the null.
        self.0 = unsafe { self.0.add(1) };
        // SAFETY: the kernel has put the string on the stack, with a zero at its end, where it stays as it is.
        Some(unsafe { CStr::from_ptr(string) })
    }
}

fn argument_count() -> usize {
    // SAFETY: the stack begins with the number.
    unsafe { STACK.load(Ordering::Relaxed).read() }
}

/// The list of arguments from one of them on, or its end.
fn list_from(argument: usize) -> *const *const c_char {
    let argument = argument.min(argument_count());
    // SAFETY: behind the number are as many addresses, and a null.
    unsafe { STACK.load(Ordering::Relaxed).add(1 + argument).cast_const().cast() }
}

/// All arguments, the command's own name with them.
pub(super) fn arguments<'a>() -> impl Iterator<Item = &'a CStr> {
    Strings(list_from(0), PhantomData)
}

/// The environment.
pub(super) fn environment<'a>() -> impl Iterator<Item = &'a CStr> {
    // SAFETY: the environment begins behind the null after the arguments.
    Strings(unsafe { list_from(argument_count()).add(1) }, PhantomData)
}

/// An environment for a program.
pub(super) struct Environment<'a> {
    list: Vec<*const c_char>,
    strings: PhantomData<&'a CStr>,
}

impl<'a> Environment<'a> {
    pub(super) fn new(variables: &[&'a CStr]) -> Self {
        let list = variables.iter().map(|variable| variable.as_ptr()).chain([ptr::null()]).collect();
        Self { list, strings: PhantomData }
    }
}

/// Runs a program in place of this one, with the arguments from one of them on. Returns, with why, if that can't be.
pub(super) fn execute(file: &CStr, first: usize, environment: &Environment) -> Errno {
    // SAFETY: both lists end with a null, and all that they lead to lives.
    unsafe { execve(file, list_from(first), environment.list.as_ptr()) }
}

/// Runs a program in place of this one, as this one was run, but for a name. Returns, with why, if that can't be.
pub(super) fn execute_as_typed(file: &CStr, name: &'static CStr) -> Errno {
    // Kernels before 5.18 begin a process without any argument, if that was asked for.
    let alone = [name.as_ptr(), ptr::null()];
    let mut list = alone.as_ptr();
    if argument_count() > 0 {
        list = list_from(0);
        // SAFETY: the place is that of the first argument; nobody holds on to what is in the list.
        unsafe { list.cast_mut().write(name.as_ptr()) };
    }
    // SAFETY: the environment begins behind the null after the arguments, which is there still, and both lists are as the call wants them.
    unsafe { execve(file, list, list_from(argument_count()).add(1)) }
}

/// # Safety
/// Both are lists of strings that end with a null.
unsafe fn execve(file: &CStr, arguments: *const *const c_char, environment: *const *const c_char) -> Errno {
    // SAFETY: as the caller says.
    let error = unsafe { call(EXECVE, file.as_ptr().addr(), arguments.addr(), environment.addr(), 0) };
    Errno::from_raw_os_error(-error as i32)
}

/// Gives `SIGPIPE` its default, which it has in all programs that the standard library runs.
pub(super) fn end_at_broken_pipes() {
    const SIGPIPE: usize = 13;
    /// A handler, flags, a restorer and a mask of signals, as the kernel has them.
    static DEFAULT: [u64; 4] = [0; 4];
    // SAFETY: the call reads an action of that shape, and writes nothing.
    unsafe { call(RT_SIGACTION, SIGPIPE, DEFAULT.as_ptr().addr(), 0, size_of::<u64>()) };
}

/// Writes a line to standard error, which may be closed.
pub(super) fn complain(line: &str) {
    for text in [line, "\n"] {
        // SAFETY: the call reads the text.
        unsafe { call(WRITE, 2, text.as_ptr().addr(), text.len(), 0) };
    }
}

const WRITE: usize = 1;
const RT_SIGACTION: usize = 13;
const EXECVE: usize = 59;
const EXIT_GROUP: usize = 231;

/// A system call.
///
/// # Safety
/// That of the call.
unsafe fn call(number: usize, first: usize, second: usize, third: usize, fourth: usize) -> isize {
    let result;
    // SAFETY: the kernel leaves all registers as they are but for those named, and the caller answers for what it does to memory.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// Bytes for all that is allocated: a thousand times what it takes as a rule, and room for an environment of ten thousand variables.
const ROOM: usize = 1 << 20;
/// Bytes for `ashlar-main` to be run when these are used up.
const RESERVE: usize = 128 << 10;
/// The coarsest alignment.
const ALIGNMENT_MAX: usize = 16;

/// Memory that is given out from its start to its end. Of what is given back only the last piece is used again: the process is gone before it matters.
#[repr(C, align(16))]
struct Memory {
    bytes: UnsafeCell<[u8; ROOM + RESERVE]>,
    used: AtomicUsize,
    is_reserve_open: AtomicBool,
}

// SAFETY: there is one thread. The bytes are used by those alone to whom they were given.
unsafe impl Sync for Memory {}

#[global_allocator]
static MEMORY: Memory = Memory {
    bytes: UnsafeCell::new([0; ROOM + RESERVE]),
    used: AtomicUsize::new(0),
    is_reserve_open: AtomicBool::new(false),
};

impl Memory {
    /// Gives out the bytes from a place on. What does not fit is for `ashlar-main`, which has a heap.
    fn give(&self, from: usize, size: usize) -> Option<usize> {
        let end = from.checked_add(size)?;
        if end > ROOM {
            if !self.is_reserve_open.swap(true, Ordering::Relaxed) {
                self::end(super::go_on());
            }
            if end > ROOM + RESERVE {
                return None;
            }
        }
        self.used.store(end, Ordering::Relaxed);
        Some(from)
    }

    fn start(&self) -> *mut u8 {
        self.bytes.get().cast()
    }

    /// Where a piece begins.
    fn place_of(&self, piece: *mut u8) -> usize {
        piece.addr() - self.start().addr()
    }

    fn is_last(&self, piece: *mut u8, size: usize) -> bool {
        self.place_of(piece) + size == self.used.load(Ordering::Relaxed)
    }
}

// SAFETY: pieces lie within the bytes, at multiples of their alignment, and none over another: each begins where all that are used end.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let from = self.used.load(Ordering::Relaxed).next_multiple_of(layout.align());
        let place = self.give(from, layout.size()).filter(|_| layout.align() <= ALIGNMENT_MAX);
        // SAFETY: the place is within the bytes.
        place.map_or(ptr::null_mut(), |place| unsafe { self.start().add(place) })
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        if self.is_last(piece, layout.size()) {
            self.used.store(self.place_of(piece), Ordering::Relaxed);
        }
    }

    unsafe fn realloc(&self, piece: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if self.is_last(piece, layout.size()) {
            return self.give(self.place_of(piece), size).map_or(ptr::null_mut(), |_| piece);
        }
        if size <= layout.size() {
            return piece;
        }
        // SAFETY: as the caller of this function says; the new piece is none that was given out.
        unsafe {
            let longer = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !longer.is_null() {
                longer.copy_from_nonoverlapping(piece, layout.size());
            }
            longer
        }
    }
}
