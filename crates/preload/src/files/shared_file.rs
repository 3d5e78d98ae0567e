//! Open files that processes share after a fork, with one offset and one set of flags.
//!
//! Before a fork, a LibFS open file gets a real open file of the kernel's at its numbers, as if it were handed over
//! (`materialise`). But LibFS goes on serving it, with its offset in memory that the processes share. Until a process
//! uses it past LibFS, the kernel's own offset is at a position without any data ([`NOWHERE`]): calls that the library
//! misses fail. Before a process uses it so, the open file is *handed over*: the kernel gets the offset, and all
//! processes that share it see that at their next call.
//!
//! Each fork that first shares files makes new memory for them, which is used for no others. So a process that was made
//! before, maybe to have fewer rights, has no access to them.

use std::fmt;
use std::io::Write;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ashlar_types::{Errno, InodeId};

use crate::calls;
use crate::entry::arch::{Frame, system_call};
use crate::files::{descriptors, materialise};
use crate::sessions::session;

/// The kernel's offset while it does not count.
///
/// No byte fits after it, so any transfer is invalid (`EINVAL`).
const NOWHERE: u64 = i64::MAX as u64;
/// How often a thread tries to lock a place before it yields the processor, and before it sleeps.
const SPINS: u32 = 200;
const YIELDS: u32 = 400;
static SLEEP: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 200_000 };
/// Tries, some seconds, after which others go on without a living holder.
///
/// The holder may be frozen, or wait itself.
const PATIENT_TRIES: u32 = YIELDS + 15_000;
/// Bits of a process id (`PID_MAX_LIMIT`).
const PROCESS_BITS: u32 = 22;
/// In a [`HolderProcess`], after the process id: it has reserved a part.
///
/// The part between the offset and `next` is the holder's, even if others take the place from it.
const RESERVED: u64 = 1 << PROCESS_BITS;
/// The first bit of the time in a [`HolderProcess`].
const TIME_AT: u32 = PROCESS_BITS + 1;
/// The most by which the clock and a process's recorded start differ.
///
/// The kernel records the start in hundredths of a second.
const CLOCK_SLACK_MS: u64 = 20;
/// Bytes of a process's line in `/proc` that are read: the name has at most 64.
const STAT_BYTES: usize = 512;
/// The processes that share the open file serve it.
const SERVED_BY_SHARERS: u32 = 0;
/// The kernel has it.
const HANDED_OVER: u32 = 1;

/// The shared state of an open file.
#[repr(C, align(64))]
struct PlaceSlot {
    /// The process that uses or changes it: a [`HolderProcess`], or 0.
    holder: AtomicU64,
    offset: AtomicU64,
    /// The offset when the holder is done, if it has [`RESERVED`] that part: if the holder stops, others go on from
    /// there.
    next: AtomicU64,
    /// Status flags.
    flags: AtomicU32,
    /// [`SERVED_BY_SHARERS`] or [`HANDED_OVER`].
    state: AtomicU32,
}

/// A process, by its id and its start, so that a later process with the same id is not taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HolderProcess(u64);

impl HolderProcess {
    /// Returns this process.
    fn this() -> Self {
        match THIS_PROCESS.load(Ordering::Relaxed) {
            0 => {
                let this = Self::ask_kernel();
                THIS_PROCESS.store(this.0, Ordering::Relaxed);
                this
            }
            known => Self(known),
        }
    }

    /// Returns this process, which may be one that has borrowed another's memory.
    fn ask_kernel() -> Self {
        // SAFETY: the call takes no arguments.
        let process = unsafe { system_call(libc::SYS_getpid as u64, [0; 6]) } as u64;
        Self(uptime_ms() << TIME_AT | process & ((1 << PROCESS_BITS) - 1))
    }

    /// Returns its state, as far as that can be known.
    fn state(self) -> HolderState {
        let process = self.0 & ((1 << PROCESS_BITS) - 1);
        // SAFETY: no signal is sent.
        let there = unsafe { system_call(libc::SYS_kill as u64, [process, 0, 0, 0, 0, 0]) };
        if there == -i64::from(libc::ESRCH) {
            return HolderState::Dead;
        }
        // If its line can't be read, it counts as alive.
        let mut buffer = [0; STAT_BYTES];
        let Some(found) = read_stat(process, &mut buffer).and_then(ProcStat::of) else { return HolderState::Alive };
        let is_another = found.began_ms > (self.0 >> TIME_AT) + CLOCK_SLACK_MS;
        match found.state {
            _ if is_another => HolderState::Dead,
            // Its first thread may have ended before the others.
            "Z" | "X" if found.threads <= 1 => HolderState::Dead,
            "T" | "t" => HolderState::Stopped,
            _ => HolderState::Alive,
        }
    }
}

/// The state of a process that holds a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HolderState {
    Alive,
    Stopped,
    Dead,
}

/// Reads the beginning of a process's line in `/proc`.
///
/// It allocates nothing: the memory may be lent.
fn read_stat(process: u64, buffer: &mut [u8; STAT_BYTES]) -> Option<&str> {
    let mut path = [0_u8; 32];
    // The zero after it stays.
    write!(&mut path[..31], "/proc/{process}/stat").ok()?;
    let arguments = [path.as_ptr() as u64, (libc::O_RDONLY | libc::O_CLOEXEC) as u64, 0, 0, 0, 0];
    // SAFETY: the path is a string that outlives the call.
    let file = unsafe { system_call(libc::SYS_open as u64, arguments) };
    if file < 0 {
        return None;
    }
    let arguments = [file as u64, buffer.as_mut_ptr() as u64, buffer.len() as u64, 0, 0, 0];
    // SAFETY: the buffer is as long as stated, and the file was just opened.
    let count = unsafe {
        let count = system_call(libc::SYS_read as u64, arguments);
        system_call(libc::SYS_close as u64, [file as u64, 0, 0, 0, 0, 0]);
        count
    };
    std::str::from_utf8(buffer.get(..usize::try_from(count).ok()?)?).ok()
}

/// The content of a process's line in `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcStat<'a> {
    /// The state of its first thread.
    state: &'a str,
    threads: u32,
    /// In milliseconds since the machine started.
    began_ms: u64,
}

impl<'a> ProcStat<'a> {
    fn of(text: &'a str) -> Option<Self> {
        // NUMBER (NAME) STATE …; the 20th word is the number of threads, the 22nd the start in hundredths of a second.
        let mut words = text.rsplit_once(") ")?.1.split(' ');
        let state = words.next()?;
        let threads = words.nth(16)?.parse().ok()?;
        Some(Self { state, threads, began_ms: words.nth(1)?.parse::<u64>().ok()? * 10 })
    }
}

/// Returns milliseconds since the machine started.
pub(crate) fn uptime_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it fills a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// This process; 0: not yet asked for.
static THIS_PROCESS: AtomicU64 = AtomicU64::new(0);

/// How often the process, or those that it was forked from, have changed their user.
static USER_CHANGES: AtomicU32 = AtomicU32::new(0);

/// Records that the process changes its user: the new one may lack the rights to its open files.
pub(crate) fn record_user_change() {
    USER_CHANGES.fetch_add(1, Ordering::Relaxed);
}

/// Whether the process may have open files that others share.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Returns whether the process may have open files that others share.
pub(crate) fn is_any_shared() -> bool {
    IS_ANY.load(Ordering::Relaxed)
}

/// Records that the process shares an open file.
pub(crate) fn record_sharing() {
    IS_ANY.store(true, Ordering::Relaxed);
}

/// Discards the record of this process in a forked one.
pub(crate) fn forget_process() {
    THIS_PROCESS.store(0, Ordering::Relaxed);
}

/// Memory for the shared state of some open files.
struct SlotMemory {
    start: NonNull<PlaceSlot>,
    length: usize,
}

// SAFETY: it is plain memory of atomics, which lives until its last user drops it.
unsafe impl Send for SlotMemory {}
// SAFETY: as above.
unsafe impl Sync for SlotMemory {}

impl Drop for SlotMemory {
    fn drop(&mut self) {
        let arguments = [self.start.as_ptr() as u64, self.length as u64, 0, 0, 0, 0];
        // SAFETY: it was mapped with this length, and nothing refers to it any more.
        unsafe { system_call(libc::SYS_munmap as u64, arguments) };
    }
}

/// The identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    /// The number of the mount that it is on.
    pub(crate) mount: u32,
    /// `st_dev`.
    pub(crate) device: u64,
    /// `st_ino`.
    pub(crate) inode: InodeId,
}

/// An open file that may be shared.
#[derive(Clone)]
pub(crate) struct SharedFile {
    memory: Arc<SlotMemory>,
    index: usize,
    file: FileIdentity,
    /// The number of changes of the user before it was shared.
    user: u32,
}

impl fmt::Debug for SharedFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SharedFile")
            .field("index", &self.index)
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

/// Prepares the shared state of open files, one for each of these files.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn prepare_slots(files: &[FileIdentity]) -> Result<Vec<SharedFile>, Errno> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let length = files.len() * size_of::<PlaceSlot>();
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let arguments = [0, length as u64, protection as u64, flags as u64, u64::MAX, 0];
    // SAFETY: new memory at an address of the kernel's choice.
    let start = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
    // An address is positive; a negative number is an error.
    let start = NonNull::new(start as *mut PlaceSlot).filter(|_| start > 0).ok_or(Errno::ENOMEM)?;
    let memory = Arc::new(SlotMemory { start, length });
    let user = USER_CHANGES.load(Ordering::Relaxed);
    let shared = |(index, &file)| SharedFile { memory: Arc::clone(&memory), index, file, user };
    Ok(files.iter().enumerate().map(shared).collect())
}

impl SharedFile {
    fn slot(&self) -> &PlaceSlot {
        // SAFETY: the memory has a slot for each index that was given out, and lives as long as this refers to it.
        // Zeros are a slot, and all its fields are atomics.
        unsafe { self.memory.start.add(self.index).as_ref() }
    }

    /// Begins to share an open file, with its status flags, before any other process has it.
    pub(crate) fn begin_sharing(&self, offset: u64, flags: i32) {
        self.slot().offset.store(offset, Ordering::Relaxed);
        self.slot().flags.store(flags as u32, Ordering::Relaxed);
        self.slot().state.store(SERVED_BY_SHARERS, Ordering::Release);
    }

    /// Returns whether the process had the same user when it was shared: SharedFS opens for that user what it could
    /// open then.
    pub(crate) fn is_of_same_user(&self) -> bool {
        self.user == USER_CHANGES.load(Ordering::Relaxed)
    }

    /// Returns its file.
    pub(crate) fn file(&self) -> FileIdentity {
        self.file
    }

    /// Lets the kernel serve a call that reads, writes or seeks, at the current offset; `None` if it was handed over.
    pub(crate) fn lend_to_kernel(
        &self,
        descriptor: i32,
        writes: Option<u64>,
        call: impl FnOnce() -> i64,
    ) -> Option<i64> {
        // A place that others did not wait for is dropped before the next one is taken: both have the same holder.
        let held = loop {
            let held = self.hold_place()?;
            if !self.is_at(descriptor) {
                return None;
            }
            if writes.is_none_or(|bytes| held.reserve(held.offset().saturating_add(bytes))) {
                break held;
            }
        };
        materialise::set_kernel_offset(descriptor, held.offset());
        let result = call();
        if let Ok(offset) = materialise::kernel_offset(descriptor) {
            held.set_offset(offset);
        }
        hide_offset(descriptor);
        Some(result)
    }

    /// Returns whether it is the same open file as another.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory) && self.index == other.index
    }

    /// Returns the status flags. Processes with fewer rights can set any of them.
    pub(crate) fn flags(&self) -> &AtomicU32 {
        &self.slot().flags
    }

    /// Returns whether it was handed over to the kernel.
    pub(crate) fn was_handed_over(&self) -> bool {
        self.slot().state.load(Ordering::Acquire) == HANDED_OVER
    }

    /// Locks its place for this process; `None` if it was handed over to the kernel.
    pub(crate) fn hold_place(&self) -> Option<HeldPlace> {
        self.hold_place_as(HolderProcess::this())
    }

    fn hold_place_as(&self, this: HolderProcess) -> Option<HeldPlace> {
        let slot = self.slot();
        let take =
            |before: u64| slot.holder.compare_exchange(before, this.0, Ordering::Acquire, Ordering::Relaxed).err();
        let mut tries = 0;
        while let Some(holder) = take(0) {
            tries += 1;
            // Another thread of this process unlocks it itself.
            if tries > YIELDS && holder != 0 && holder & !RESERVED != this.0 {
                let life = HolderProcess(holder).state();
                let is_over = life != HolderState::Alive || tries > PATIENT_TRIES;
                if is_over && take(holder).is_none() {
                    // A holder that was killed in the middle has left the offset unchanged. One that goes on later
                    // keeps its reserved part, and others go on after it.
                    if life != HolderState::Dead && holder & RESERVED != 0 {
                        slot.offset.store(slot.next.load(Ordering::Acquire), Ordering::Relaxed);
                    }
                    break;
                }
            }
            wait_for_holder(tries);
        }
        let held = HeldPlace { shared: self.clone(), this, began: slot.offset.load(Ordering::Relaxed) };
        (slot.state.load(Ordering::Relaxed) == SERVED_BY_SHARERS).then_some(held)
    }

    /// Returns whether a kernel descriptor leads to its file.
    pub(crate) fn is_at(&self, descriptor: i32) -> bool {
        session::identity_of(descriptor) == Some((self.file.device, self.file.inode))
    }

    /// Hands the open file over to the kernel for all processes, by one of this process's numbers; returns whether it
    /// did.
    pub(crate) fn hand_over(&self, descriptor: i32) -> bool {
        self.hand_over_as(descriptor, HolderProcess::this())
    }

    fn hand_over_as(&self, descriptor: i32, this: HolderProcess) -> bool {
        if self.was_handed_over() {
            return true;
        }
        let Some(held) = self.hold_place_as(this) else { return true };
        // The program has put another file at that number past the library.
        if !self.is_at(descriptor) {
            return false;
        }
        // The real open file still has the size from its opening.
        session::refresh_size(descriptor);
        materialise::set_kernel_offset(descriptor, held.offset());
        self.slot().state.store(HANDED_OVER, Ordering::Release);
        true
    }
}

/// Waits a little for the holder of a place.
fn wait_for_holder(tries: u32) {
    match tries {
        ..SPINS => std::hint::spin_loop(),
        // SAFETY: the call takes no arguments.
        SPINS..YIELDS => drop(unsafe { system_call(libc::SYS_sched_yield as u64, [0; 6]) }),
        // SAFETY: the time is a constant.
        _ => drop(unsafe { system_call(libc::SYS_nanosleep as u64, [(&raw const SLEEP) as u64, 0, 0, 0, 0, 0]) }),
    }
}

/// The place of a shared open file, which no other process changes meanwhile.
#[derive(Debug)]
pub(crate) struct HeldPlace {
    shared: SharedFile,
    this: HolderProcess,
    /// The file offset.
    began: u64,
}

impl HeldPlace {
    /// Returns the file offset, valid whatever others have stored.
    pub(crate) fn offset(&self) -> u64 {
        self.began & i64::MAX as u64
    }

    /// Reserves the part before an offset for the data about to be written, even if others don't wait for it.
    ///
    /// Returns `false` if others have the place by now.
    #[must_use]
    pub(crate) fn reserve(&self, next: u64) -> bool {
        let slot = self.shared.slot();
        slot.next.store(next, Ordering::Relaxed);
        slot.holder.compare_exchange(self.this.0, self.this.0 | RESERVED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Changes the file offset, unless others have gone on from it.
    pub(crate) fn set_offset(&self, offset: u64) {
        let word = &self.shared.slot().offset;
        let _ = word.compare_exchange(self.began, offset, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Drop for HeldPlace {
    fn drop(&mut self) {
        // If others did not wait, another process holds it by now.
        let holder = &self.shared.slot().holder;
        for word in [self.this.0, self.this.0 | RESERVED] {
            if holder.compare_exchange(word, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }
}

/// Sets the kernel's offset of an open file to a position without any data.
pub(crate) fn hide_offset(descriptor: i32) {
    materialise::set_kernel_offset(descriptor, NOWHERE);
}

/// Returns whether a call needs neither the offset nor the flags of its open file.
///
/// The call is on an inherited descriptor.
pub(crate) fn needs_no_offset(call: &Frame) -> bool {
    match call.rax as i64 {
        libc::SYS_close
        | libc::SYS_pread64
        | libc::SYS_preadv
        | libc::SYS_pwrite64
        | libc::SYS_pwritev
        | libc::SYS_fstat
        | libc::SYS_newfstatat
        | libc::SYS_statx
        | libc::SYS_fstatfs
        | libc::SYS_fsync
        | libc::SYS_fdatasync
        | libc::SYS_ftruncate
        | libc::SYS_fallocate
        | libc::SYS_fadvise64
        | libc::SYS_fchmod
        | libc::SYS_fchown
        | libc::SYS_mmap => true,
        libc::SYS_fcntl => matches!(call.arguments[1] as i32, libc::F_GETFD | libc::F_SETFD),
        libc::SYS_ioctl => {
            let request = call.arguments[1];
            [libc::FIOCLEX, libc::FIONCLEX].contains(&request) || calls::is_terminal_request(request)
        }

        _ => false,
    }
}

/// Updates the kernel's size of a file whose offset is not the kernel's, before the kernel maps it.
///
/// A mapping uses the size that the kernel assumes, and does not ask then.
pub(crate) fn refresh_kernel_size(descriptor: i32) {
    session::refresh_size(descriptor);
}

/// Returns whether a call only reads, writes or seeks with its descriptor.
pub(crate) fn is_transfer(number: i64) -> bool {
    matches!(number, libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev | libc::SYS_lseek)
}

/// The shared open files of a process that has borrowed memory.
///
/// Its descriptors are its own, and the table in the lender's memory goes on changing.
#[derive(Debug, Default)]
pub(crate) struct BorrowerFiles(Vec<(i32, SharedFile)>);

impl BorrowerFiles {
    /// Returns the shared open files of a new process.
    pub(crate) fn collect() -> Self {
        Self(descriptors::all_shared())
    }

    /// Returns whether there are any.
    pub(crate) fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Checks a call of such a process before it: hands over files that it may use by numbers unknown here.
    ///
    /// It neither allocates nor frees.
    pub(crate) fn check_call(&mut self, call: &Frame) {
        let a = &call.arguments;
        match call.rax as i64 {
            libc::SYS_close => self.forget_numbers(a[0] as u32, a[0] as u32),
            libc::SYS_close_range if a[2] as u32 & !libc::CLOSE_RANGE_UNSHARE == 0 => {
                self.forget_numbers(a[0] as u32, a[1] as u32);
            }
            libc::SYS_close_range => {}
            libc::SYS_dup2 | libc::SYS_dup3 => {
                self.hand_over_if(|number| number == a[0] as i32);
                if a[0] as i32 != a[1] as i32 && descriptors::closes_on_exec(a[0] as i32).is_some() {
                    self.forget_numbers(a[1] as u32, a[1] as u32);
                }
            }
            libc::SYS_execve | libc::SYS_execveat => {
                self.hand_over_if(|number| descriptors::closes_on_exec(number) == Some(false));
            }
            // Later uses of the files are not seen.
            libc::SYS_clone
            | libc::SYS_clone3
            | libc::SYS_fork
            | libc::SYS_vfork
            | libc::SYS_sendmsg
            | libc::SYS_sendmmsg => self.hand_over_if(|_| true),
            libc::SYS_mmap if self.0.iter().any(|(number, _)| *number == a[4] as i32) => {
                refresh_kernel_size(a[4] as i32)
            }
            _ if needs_no_offset(call) => {}
            number => self.hand_over_if(|number_of_file| {
                calls::descriptors_of(number).iter().any(|&at| a[at] as i32 == number_of_file)
            }),
        }
    }

    fn hand_over_if(&self, is_meant: impl Fn(i32) -> bool) {
        for (number, shared) in self.0.iter().filter(|(number, _)| *number >= 0 && is_meant(*number)) {
            shared.hand_over_as(*number, HolderProcess::ask_kernel());
        }
    }

    /// Records that numbers lead elsewhere, or nowhere.
    fn forget_numbers(&mut self, first: u32, last: u32) {
        // The lender drops the open files.
        self.0
            .iter_mut()
            .filter(|(number, _)| (first..=last).contains(&(*number as u32)))
            .for_each(|(number, _)| *number = -1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_process_id_is_another_process() {
        let text = "17 (a b) c) S 1 17 17 0 -1 4194560 100 0 0 0 0 0 0 0 20 0 3 0 12345 1000 10 0";
        assert_eq!(ProcStat::of(text), Some(ProcStat { state: "S", threads: 3, began_ms: 123_450 }));
        assert_eq!(ProcStat::of("17 (a"), None);
        let this = HolderProcess::ask_kernel();
        assert_eq!(this.state(), HolderState::Alive);
        let before = HolderProcess(this.0 & ((1 << PROCESS_BITS) - 1));
        assert_eq!(before.state(), HolderState::Dead, "a process with this id at the start of the machine");
    }

    fn shared() -> SharedFile {
        let files = [1, 2].map(|inode| FileIdentity { mount: 0, device: 0, inode: InodeId(inode) });
        let shared = prepare_slots(&files).expect("memory").pop().expect("two");
        shared.begin_sharing(5, libc::O_RDWR);
        shared
    }

    /// Forks a child that holds the place, and has announced that it will move it to 9.
    fn holder(shared: &SharedFile, ends: bool) -> i32 {
        // SAFETY: the child makes no call but these.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let held = shared.hold_place_as(HolderProcess::ask_kernel()).expect("LibFS serves it");
            assert!(held.reserve(9));
            // SAFETY: it ends or stops the process. A stopped process then goes on as one that has written all.
            unsafe {
                if ends {
                    libc::_exit(0);
                }
                libc::raise(libc::SIGSTOP);
                held.set_offset(9);
                drop(held);
                libc::_exit(0);
            }
        }
        let mut status = 0;
        // SAFETY: the child is this test's, and the status a local variable.
        unsafe { libc::waitpid(child, &raw mut status, libc::WUNTRACED) };
        assert_ne!(shared.slot().holder.load(Ordering::Relaxed), 0, "the child holds it");
        child
    }

    #[test]
    fn stopped_holder_keeps_reserved_part_others_go_on_after() {
        let shared = shared();
        let child = holder(&shared, false);
        let held = shared.hold_place().expect("LibFS serves it");
        assert_eq!(held.offset(), 9);
        held.set_offset(12);
        drop(held);
        let mut status = 0;
        // SAFETY: the child is this test's, and the status a local variable.
        unsafe {
            libc::kill(child, libc::SIGCONT);
            libc::waitpid(child, &raw mut status, 0);
        }
        assert_eq!(shared.hold_place().map(|held| held.offset()), Some(12), "the stopped holder has not taken it back");
    }

    #[test]
    fn killed_holder_blocks_no_other_process() {
        let shared = shared();
        holder(&shared, true);
        let held = shared.hold_place().expect("LibFS serves it");
        assert_eq!(held.offset(), 5);
        held.set_offset(7);
        drop(held);
        assert_eq!(shared.slot().holder.load(Ordering::Relaxed), 0);
        assert_eq!(shared.hold_place().map(|held| held.offset()), Some(7));
    }
}
