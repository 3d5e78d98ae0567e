//! x86-64: the path from a patched system call into the hook and back.
//!
//! A patched system call jumps to its trampoline (`patch::apply`). The trampoline steps over the red zone and calls
//! [`ashlar_entry`] with all registers as they stand before `syscall`. The entry decides whether the call may concern
//! the library. It reads two tables, and checks whether a descriptor number is recycled (`recycled_descriptor`). If the
//! call doesn't concern the library, the entry makes it and returns. Otherwise it saves all that the kernel would
//! preserve and calls the hook.

use std::arch::{asm, global_asm};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use ashlar_libfs::processor;

/// System calls with a number below this one can be caught.
pub(crate) const CALLS: usize = 512;
/// LibFS can serve descriptors below this one.
pub(crate) const DESCRIPTORS: usize = 65_536;

/// How the entry treats each system call: an `INTEREST_*` value, with [`INTEREST_IGNORES_FREE`] or without.
pub(crate) static ASHLAR_INTEREST: [AtomicU8; CALLS] = [const { AtomicU8::new(0) }; CALLS];
/// The entry passes the call to the kernel.
pub(crate) const INTEREST_NONE: u8 = 0;
/// The entry catches the call if its first argument is a LibFS descriptor.
pub(crate) const INTEREST_DESCRIPTOR: u8 = 1;
/// The entry catches the call.
pub(crate) const INTEREST_ALWAYS: u8 = 2;
/// Added to the first two: the entry doesn't catch the call for a recycled number either.
pub(crate) const INTEREST_IGNORES_FREE: u8 = 4;

/// The number of each descriptor's open file (`descriptors`), or 0 if the kernel serves the descriptor.
pub(crate) static ASHLAR_DESCRIPTORS: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];

/// Whether the entry saves the upper halves of wide registers, if they are in use.
static ASHLAR_WIDE: AtomicU8 = AtomicU8::new(0);
/// The processor's bit for the upper halves, in its word of the state components in use.
const UPPER_HALVES: u32 = 1 << 2;

/// Makes the entry save the upper halves of wide registers, as the kernel does.
///
/// libc keeps nothing in them over a call. A program may, and its own system calls are caught too. If the processor
/// doesn't report whether they are in use, the entry doesn't save them.
pub(crate) fn keep_wide_registers() {
    if processor::keeps_wide_registers() && processor::tells_registers_in_use() {
        ASHLAR_WIDE.store(1, Ordering::Relaxed);
    }
}

/// In [`ASHLAR_DESCRIPTORS`]: an adoptable descriptor, which the kernel serves for the time being.
pub(crate) const ADOPTABLE: u32 = u32::MAX - 1;
/// Descriptors below this one can be adoptable.
pub(crate) const ADOPTABLE_MAX: usize = 1024;

/// A caught call, as the entry has put it on the stack.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Frame {
    /// The call's number, and then its result: a negative errno for an error.
    pub(crate) rax: u64,
    /// The call's arguments.
    pub(crate) arguments: [u64; 6],
    /// The signal mask or descriptor for the entry.
    ///
    /// The mask is for [`After::Unmask`] and [`After::Again`], the descriptor for [`After::KernelInstead`].
    pub(crate) extra: u64,
}

/// How the entry goes on after the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum After {
    /// The call is done, and its result is in the frame.
    Return = 0,
    /// The entry makes the call with nothing of the library's on the stack.
    ///
    /// The call makes a thread, which begins on a stack of its own.
    Native = 1,
    /// As `Native`, for a call that lends the caller's memory to a new process.
    ///
    /// The entry calls `ashlar_after_vfork` when the memory is back.
    Vfork = 2,
    /// As `Return`, and then the entry sets the signal mask in the frame.
    ///
    /// That lets in the signals held back meanwhile. The entry has no unwind tables: if such a signal cancels the
    /// thread, no frame of the library is unwound.
    Unmask = 3,
    /// The entry makes the call as it came: the call may wait or be interrupted, and its thread may be cancelled.
    Kernel = 4,
    /// As `Kernel`, with another descriptor as the first argument: the one in the frame.
    KernelInstead = 5,
    /// As `Kernel`, and the descriptor that the call opens becomes adoptable.
    KernelOpen = 6,
    /// As `Kernel`, and the entry calls `ashlar_after_kernel` after the call.
    KernelCounted = 7,
    /// As `KernelInstead`, and the entry calls `ashlar_after_kernel` after the call.
    InsteadCounted = 8,
    /// As `KernelOpen`, and the entry calls `ashlar_after_kernel` after the call.
    OpenCounted = 9,
    /// The entry lets signals in as for `Unmask`, and then makes the call anew.
    ///
    /// It begins at its own start, as the kernel would have restarted the call.
    Again = 10,
}

/// The hook's return value, in two registers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct HookAnswer {
    /// An [`After`].
    after: u64,
    /// The argument of `ashlar_after_kernel`.
    word: u64,
}

impl HookAnswer {
    /// Returns how to go on, and what to count after the kernel's call.
    #[inline(always)]
    pub(crate) fn new(after: After, word: u64) -> Self {
        Self { after: after as u64, word }
    }
}

/// Bytes of memory that each thread has for [`thread_memory`], and the alignment of their start.
pub(crate) const THREAD_BYTES: usize = 1024;
pub(crate) const THREAD_ALIGN: usize = 16;

unsafe extern "C" {
    /// The target of all trampolines.
    pub(crate) fn ashlar_entry();
    /// Calls `function(frame)` on another stack, whose end is `call_stack`.
    pub(crate) fn ashlar_on_stack(frame: *mut Frame, stack: *mut u8, function: unsafe extern "C" fn(*mut Frame));
}

/// Stores all vector registers that compiled code may use over a system call, from a place on.
///
/// First come 256 bytes of the 16-byte registers. Then come 256 bytes of the upper halves of the wide registers, which
/// a program's own code may use; they are stored if they are in use. The last byte says whether they are stored. `rax`,
/// `rcx` and `rdx` are lost.
macro_rules! keep_vectors {
    ($place:literal, $label:literal) => {
        concat!(
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15\n",
            concat!("movaps [", $place, " + 16 * \\n], xmm\\n\n"),
            ".endr\n",
            concat!("mov byte ptr [", $place, " + 512], 0\n"),
            "cmp byte ptr [rip + {wide}], 0\n",
            concat!("je ", $label, "f\n"),
            "mov ecx, 1\n",
            "xgetbv\n",
            "and eax, {upper_halves}\n",
            concat!("mov [", $place, " + 512], al\n"),
            concat!("jz ", $label, "f\n"),
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15\n",
            concat!("vextractf128 [", $place, " + 256 + 16 * \\n], ymm\\n, 1\n"),
            ".endr\n",
            concat!($label, ":"),
        )
    };
}

/// Restores what `keep_vectors` has stored.
macro_rules! restore_vectors {
    ($place:literal, $label:literal) => {
        concat!(
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15\n",
            concat!("movaps xmm\\n, [", $place, " + 16 * \\n]\n"),
            ".endr\n",
            concat!("cmp byte ptr [", $place, " + 512], 0\n"),
            concat!("je ", $label, "f\n"),
            ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15\n",
            concat!("vinsertf128 ymm\\n, ymm\\n, [", $place, " + 256 + 16 * \\n], 1\n"),
            ".endr\n",
            concat!($label, ":"),
        )
    };
}

global_asm!(
    ".hidden ashlar_entry",
    ".globl ashlar_entry",
    ".type ashlar_entry, @function",
    ".p2align 4",
    "ashlar_entry:",
    // rcx and r11 are free: the kernel would have overwritten them.
    "cmp rax, {calls}",
    "jae 15f",
    "lea r11, [rip + {interest}]",
    "movzx ecx, byte ptr [r11 + rax]",
    "test ecx, 2",
    "jnz 3f",
    "test ecx, 1",
    "jz 2f",
    "mov ecx, edi",
    "cmp ecx, {descriptors_max}",
    "jae 2f",
    "lea r11, [rip + {descriptors}]",
    "cmp dword ptr [r11 + rcx * 4], 0",
    "jne 3f",
    "cmp eax, {close}",
    "jne 2f",
    "cmp edi, dword ptr [rip + {lowest}]",
    "jb 3f",
    "2:",
    "cmp dword ptr [rip + {recycled}], 0",
    "jne 16f",
    "15:",
    "syscall",
    "ret",
    "16:",
    "lea r11, [rip + {interest}]",
    "test byte ptr [r11 + rax], 4",
    "jnz 15b",
    "3:",
    "cmp eax, {sigreturn}",
    "je 17f",
    "push rbp",
    "mov rbp, rsp",
    // Above the frame, at the upper end, there is room for two words.
    "sub rsp, 608",
    "and rsp, -16",
    "mov [rsp], rax",
    "mov [rsp + 8], rdi",
    "mov [rsp + 16], rsi",
    "mov [rsp + 24], rdx",
    "mov [rsp + 32], r10",
    "mov [rsp + 40], r8",
    "mov [rsp + 48], r9",
    keep_vectors!("rsp + 64", "20"),
    "mov rdi, rsp",
    "call {hook}",
    "mov ecx, eax",
    "mov [rbp - 8], rdx",
    restore_vectors!("rsp + 64", "21"),
    "cmp ecx, 10",
    "je 14f",
    "cmp ecx, 3",
    "jne 4f",
    "14:",
    "mov [rbp - 16], rcx",
    // rt_sigprocmask(SIG_SETMASK, &frame.mask, NULL, 8)
    "mov eax, 14",
    "mov edi, 2",
    "lea rsi, [rsp + 56]",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "mov rcx, [rbp - 16]",
    "cmp ecx, 10",
    "je 4f",
    "xor ecx, ecx",
    "4:",
    "mov r11, [rsp + 56]",
    "mov rax, [rsp]",
    "mov rdi, [rsp + 8]",
    "mov rsi, [rsp + 16]",
    "mov rdx, [rsp + 24]",
    "mov r10, [rsp + 32]",
    "mov r8, [rsp + 40]",
    "mov r9, [rsp + 48]",
    "mov rsp, rbp",
    "pop rbp",
    "test ecx, ecx",
    "jz 8f",
    "cmp ecx, 4",
    "jb 5f",
    "ja 9f",
    "syscall",
    "8:",
    "ret",
    "9:",
    "cmp ecx, 10",
    "je ashlar_entry",
    "cmp ecx, 6",
    "ja 10f",
    "je 12f",
    "push rdi",
    "mov rdi, r11",
    "syscall",
    "pop rdi",
    "ret",
    "12:",
    "syscall",
    "cmp rax, {adoptable_max}",
    "jae 8b",
    "lea r11, [rip + {descriptors}]",
    "mov dword ptr [r11 + rax * 4], {adoptable}",
    "ret",
    // The word is still in the red zone. A signal handler may make other calls during this one, so keep it on the
    // stack.
    "10:",
    "push qword ptr [rsp - 16]",
    "push rdi",
    "push rcx",
    "cmp ecx, 8",
    "jne 11f",
    "mov rdi, r11",
    "11:",
    "syscall",
    "pop rcx",
    "cmp ecx, 9",
    "jne 13f",
    "cmp rax, {adoptable_max}",
    "jae 13f",
    "lea r11, [rip + {descriptors}]",
    "mov dword ptr [r11 + rax * 4], {adoptable}",
    "13:",
    "pop rdi",
    "push rbp",
    "mov rbp, rsp",
    ".irp register, rax, rdi, rsi, rdx, r10, r8, r9",
    "push \\register",
    ".endr",
    "sub rsp, 528",
    "and rsp, -16",
    keep_vectors!("rsp + 0", "22"),
    "mov rdi, [rbp + 8]",
    "call {after_kernel}",
    restore_vectors!("rsp + 0", "23"),
    "lea rsp, [rbp - 56]",
    ".irp register, r9, r8, r10, rdx, rsi, rdi, rax, rbp",
    "pop \\register",
    ".endr",
    "lea rsp, [rsp + 8]",
    "ret",
    // The call returns twice, or on another stack, so nothing of the library may be left on this one. The call has five
    // arguments at most. The sixth's register keeps the address in the trampoline after its step over the red zone, an
    // instruction of 8 bytes.
    "5:",
    "pop r9",
    "add r9, 8",
    "lea rsp, [rsp + 128]",
    "cmp ecx, 2",
    "je 6f",
    "syscall",
    "jmp r9",
    "6:",
    "syscall",
    "test rax, rax",
    "jz 7f",
    // By now the new process has its own memory, or has ended.
    "lea rsp, [rsp - 128]",
    "push rbp",
    "mov rbp, rsp",
    ".irp register, rax, rdi, rsi, rdx, r10, r8, r9, rbx",
    "push \\register",
    ".endr",
    "mov rbx, rsp",
    "and rsp, -16",
    "call {after_vfork}",
    "mov rsp, rbx",
    ".irp register, rbx, r9, r8, r10, rdx, rsi, rdi, rax, rbp",
    "pop \\register",
    ".endr",
    "lea rsp, [rsp + 128]",
    "7:",
    "jmp r9",
    // The kernel expects the signal's frame where the stack was before the trampoline. It does not return here.
    "17:",
    "lea rsp, [rsp + 136]",
    "syscall",
    ".size ashlar_entry, . - ashlar_entry",
    "",
    ".hidden ashlar_on_stack",
    ".globl ashlar_on_stack",
    ".type ashlar_on_stack, @function",
    ".p2align 4",
    "ashlar_on_stack:",
    "push rbp",
    "mov rbp, rsp",
    "mov rsp, rsi",
    "call rdx",
    "mov rsp, rbp",
    "pop rbp",
    "ret",
    ".size ashlar_on_stack, . - ashlar_on_stack",
    calls = const CALLS,
    descriptors_max = const DESCRIPTORS,
    adoptable_max = const ADOPTABLE_MAX,
    adoptable = const ADOPTABLE,
    interest = sym ASHLAR_INTEREST,
    descriptors = sym ASHLAR_DESCRIPTORS,
    recycled = sym crate::files::recycled_descriptor::ASHLAR_RECYCLED,
    lowest = sym crate::files::recycled_descriptor::ASHLAR_LOWEST,
    close = const libc::SYS_close,
    sigreturn = const libc::SYS_rt_sigreturn,
    wide = sym ASHLAR_WIDE,
    upper_halves = const UPPER_HALVES,
    hook = sym crate::entry::hook::ashlar_hook,
    after_vfork = sym crate::entry::hook::ashlar_after_vfork,
    after_kernel = sym crate::report::ashlar_after_kernel,
);

// The library is loaded before the program begins, so its thread variables lie at a fixed distance from the thread
// pointer.
global_asm!(
    ".pushsection .tbss, \"awT\", @nobits",
    ".hidden ashlar_thread",
    ".globl ashlar_thread",
    ".type ashlar_thread, @object",
    ".size ashlar_thread, {bytes}",
    ".balign {align}",
    "ashlar_thread:",
    ".zero {bytes}",
    ".popsection",
    bytes = const THREAD_BYTES,
    align = const THREAD_ALIGN,
);

/// Returns memory of this thread's own, zeros at first.
#[inline(always)]
pub(crate) fn thread_memory() -> *mut u8 {
    let memory: *mut u8;
    // SAFETY: it reads the thread pointer and the offset of the variable, which never change.
    unsafe {
        asm!(
            "mov {memory}, qword ptr fs:[0]",
            "add {memory}, qword ptr [rip + ashlar_thread@GOTTPOFF]",
            memory = out(reg) memory,
            options(pure, nomem, nostack),
        );
    }
    memory
}

/// Returns the processor's clock, in ticks of no particular length.
pub(crate) fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, which touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Makes a system call, past all interception.
///
/// The result is a negative errno if the call failed.
///
/// # Safety
/// As the call itself.
#[inline(always)]
pub(crate) unsafe fn system_call(number: u64, a: [u64; 6]) -> i64 {
    let result: i64;
    // SAFETY: the kernel preserves all registers but these. The caller answers for what the call does to memory.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2], in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}
