//! The bare process: its start, arguments, environment, memory, exit and exec.
//!
//! All `unsafe` code of the command is here.
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

// The kernel begins a process with its stack pointer on the number of arguments; functions want the stack on a multiple
// of 16.
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

// The compiler's own functions. libc chooses its variants by the processor when it begins, which it does not do here.
// They are written in assembly, since a compiler turns loops that do the same into calls of these very functions. `rep
// movsb` is as fast as any other way, but for a start of some ten cycles.
global_asm!(
    ".pushsection .text.memory, \"ax\", @progbits",
    ".globl memcpy, memmove, memset, memcmp, bcmp, strlen",
    "memmove:",
    "mov rax, rdi",
    "sub rax, rsi",
    "cmp rax, rdx",
    "jae memcpy",
    // The target begins within the source, so its end is copied first.
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

/// The stack as the kernel made it: the number of arguments, then their addresses and those of the environment, each
/// list with a null at its end.
static STACK: AtomicPtr<usize> = AtomicPtr::new(ptr::null_mut());

extern "C" fn begin(stack: *mut usize) -> ! {
    STACK.store(stack, Ordering::Relaxed);
    exit(super::serve())
}

fn exit(status: u8) -> ! {
    loop {
        // SAFETY: the call takes a number, and ends the process.
        unsafe { system_call(EXIT_GROUP, status.into(), 0, 0, 0) };
    }
}

/// A list of strings that the kernel has laid out for this process.
struct Strings<'a>(*const *const c_char, PhantomData<&'a CStr>);

impl<'a> Iterator for Strings<'a> {
    type Item = &'a CStr;

    fn next(&mut self) -> Option<&'a CStr> {
        // SAFETY: the list ends with a null, and the iterator never moves past it. No other code writes it.
        let string = unsafe { self.0.read() };
        if string.is_null() {
            return None;
        }
        // SAFETY: as above: it was not the null.
        self.0 = unsafe { self.0.add(1) };
        // SAFETY: the kernel has put the string on the stack, with a zero at its end, and it does not change.
        Some(unsafe { CStr::from_ptr(string) })
    }
}

fn argument_count() -> usize {
    // SAFETY: the stack begins with the number.
    unsafe { STACK.load(Ordering::Relaxed).read() }
}

/// Returns the list of arguments from one of them on, or its end.
fn list_from(argument: usize) -> *const *const c_char {
    let argument = argument.min(argument_count());
    // SAFETY: after the number follow as many addresses, and a null.
    unsafe { STACK.load(Ordering::Relaxed).add(1 + argument).cast_const().cast() }
}

/// Returns all arguments, including the command's own name.
pub(super) fn arguments<'a>() -> impl Iterator<Item = &'a CStr> {
    Strings(list_from(0), PhantomData)
}

/// Returns the environment.
pub(super) fn environment<'a>() -> impl Iterator<Item = &'a CStr> {
    // SAFETY: the environment begins after the null that ends the arguments.
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

/// Runs a program in place of this one, with the arguments from one of them on. Returns the error if that fails.
pub(super) fn execute(file: &CStr, first: usize, environment: &Environment) -> Errno {
    // SAFETY: both lists end with a null, and all that they point to lives.
    unsafe { execve(file, list_from(first), environment.list.as_ptr()) }
}

/// Runs a program in place of this one, with the same arguments except the name. Returns the error if that fails.
pub(super) fn execute_as_typed(file: &CStr, name: &'static CStr) -> Errno {
    // Kernels before 5.18 begin a process without any argument, if the caller asks for that.
    let alone = [name.as_ptr(), ptr::null()];
    let mut list = alone.as_ptr();
    if argument_count() > 0 {
        list = list_from(0);
        // SAFETY: the place is that of the first argument, and no reference to the list's elements exists.
        unsafe { list.cast_mut().write(name.as_ptr()) };
    }
    // SAFETY: the environment begins after the null that ends the arguments, which is still there, and both lists have
    // the form that the call needs.
    unsafe { execve(file, list, list_from(argument_count()).add(1)) }
}

/// # Safety
/// Both are lists of strings that end with a null.
unsafe fn execve(file: &CStr, arguments: *const *const c_char, environment: *const *const c_char) -> Errno {
    // SAFETY: as the caller says.
    let error = unsafe { system_call(EXECVE, file.as_ptr().addr(), arguments.addr(), environment.addr(), 0) };
    Errno::from_raw_os_error(-error as i32)
}

/// Gives `SIGPIPE` its default action, as the standard library does for all programs that it runs.
pub(super) fn reset_sigpipe() {
    const SIGPIPE: usize = 13;
    /// A handler, flags, a restorer and a mask of signals, in the kernel's layout.
    static DEFAULT: [u64; 4] = [0; 4];
    // SAFETY: the call reads an action of that shape, and writes nothing.
    unsafe { system_call(RT_SIGACTION, SIGPIPE, DEFAULT.as_ptr().addr(), 0, size_of::<u64>()) };
}

/// Writes a line to standard error, which may be closed.
pub(super) fn write_error(line: &str) {
    for text in [line, "\n"] {
        // SAFETY: the call reads the text.
        unsafe { system_call(WRITE, 2, text.as_ptr().addr(), text.len(), 0) };
    }
}

const WRITE: usize = 1;
const RT_SIGACTION: usize = 13;
const EXECVE: usize = 59;
const EXIT_GROUP: usize = 231;

/// Makes a system call.
///
/// # Safety
/// That of the call.
unsafe fn system_call(number: usize, first: usize, second: usize, third: usize, fourth: usize) -> isize {
    let result;
    // SAFETY: the kernel preserves all registers but those named, and the caller ensures that the call's effect on
    // memory is sound.
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

/// Bytes for all allocations: a thousand times the usual need, and room for an environment of ten thousand variables.
const HEAP_BYTES: usize = 1 << 20;
/// Bytes for running `ashlar-main` when these are used up.
const RESERVE_BYTES: usize = 128 << 10;
/// The coarsest alignment.
const ALIGNMENT_MAX: usize = 16;

/// BumpAllocator that is allocated from its start to its end. Of freed pieces only the last one is used again: the
/// process ends before it matters.
#[repr(C, align(16))]
struct BumpAllocator {
    bytes: UnsafeCell<[u8; HEAP_BYTES + RESERVE_BYTES]>,
    used: AtomicUsize,
    is_reserve_open: AtomicBool,
}

// SAFETY: there is one thread. Each byte is used only by the owner of its piece.
unsafe impl Sync for BumpAllocator {}

#[global_allocator]
static ALLOCATOR: BumpAllocator = BumpAllocator {
    bytes: UnsafeCell::new([0; HEAP_BYTES + RESERVE_BYTES]),
    used: AtomicUsize::new(0),
    is_reserve_open: AtomicBool::new(false),
};

impl BumpAllocator {
    /// Allocates the bytes from a place on. If they do not fit, `ashlar-main` takes over, which has a heap.
    fn allocate(&self, from: usize, size: usize) -> Option<usize> {
        let end = from.checked_add(size)?;
        if end > HEAP_BYTES {
            if !self.is_reserve_open.swap(true, Ordering::Relaxed) {
                self::exit(super::exec_main());
            }
            if end > HEAP_BYTES + RESERVE_BYTES {
                return None;
            }
        }
        self.used.store(end, Ordering::Relaxed);
        Some(from)
    }

    fn start(&self) -> *mut u8 {
        self.bytes.get().cast()
    }

    /// Returns where a piece begins.
    fn place_of(&self, piece: *mut u8) -> usize {
        piece.addr() - self.start().addr()
    }

    fn is_last(&self, piece: *mut u8, size: usize) -> bool {
        self.place_of(piece) + size == self.used.load(Ordering::Relaxed)
    }
}

// SAFETY: pieces lie within the bytes, at multiples of their alignment, and do not overlap: each begins at the end of
// all used ones.
unsafe impl GlobalAlloc for BumpAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let from = self.used.load(Ordering::Relaxed).next_multiple_of(layout.align());
        let place = self.allocate(from, layout.size()).filter(|_| layout.align() <= ALIGNMENT_MAX);
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
            return self.allocate(self.place_of(piece), size).map_or(ptr::null_mut(), |_| piece);
        }
        if size <= layout.size() {
            return piece;
        }
        // SAFETY: as the caller of this function says; the new piece overlaps no other.
        unsafe {
            let longer = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !longer.is_null() {
                longer.copy_from_nonoverlapping(piece, layout.size());
            }
            longer
        }
    }
}
