//! Open files that several processes have: who is forked has those of its parent, with one offset and one set of flags for all.
//!
//! Before a fork an open file of ours gets a real one of the kernel's at its numbers, as if it were to become the kernel's (`materialise`). It goes on being
//! served here all the same, with its offset in memory that the processes have in common. Until somebody uses it otherwise than through us, the
//! kernel's own offset stands where nothing can be read or written ([`NOWHERE`]): what gets past us fails. Before somebody does, the open file
//! *leaves*: the kernel gets the offset, and all who share it see that at their next call.
//!
//! Memory is made anew for the files that are first shared at a fork, and used for no others: whoever has been made before, maybe to
//! have fewer rights, has no part in them.

use std::fmt;
use std::io::Write;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ashlar_types::{Errno, InodeId};

use crate::arch::{Frame, system_call};
use crate::{calls, descriptors, materialise, session};

/// Where the kernel's offset stands while it does not count: with any bytes at all behind it that is no place (`EINVAL`).
const NOWHERE: u64 = i64::MAX as u64;
/// How often a place is asked for before others get the processor, and before this thread sleeps.
const SPINS: u32 = 200;
const YIELDS: u32 = 400;
static SLEEP: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 200_000 };
/// After so many tries, some seconds, others go on without a holder that is alive: it may be frozen, or wait for something itself.
const PATIENT_TRIES: u32 = YIELDS + 15_000;
/// Processes have numbers of so many bits at most (`PID_MAX_LIMIT`).
const PROCESS_BITS: u32 = 22;
/// In a [`Holder`], behind the number: what is between the offset and the next one is his, also when others take the place from him.
const RESERVED: u64 = 1 << PROCESS_BITS;
/// Where the time begins in a [`Holder`].
const TIME_AT: u32 = PROCESS_BITS + 1;
/// What clocks and the kernel's notes of when a process began may differ by, in milliseconds: it counts hundredths of a second.
const CLOCK_SLACK_MS: u64 = 20;
/// Bytes of a process's line in `/proc` that are looked at: the name is 64 at most.
const STAT_BYTES: usize = 512;
/// The open file is served by those who share it.
const LIVE: u32 = 0;
/// The kernel has it.
const LEFT: u32 = 1;

/// What processes share of an open file.
#[repr(C, align(64))]
struct Slot {
    /// Who uses or changes it: a [`Holder`], or 0.
    holder: AtomicU64,
    offset: AtomicU64,
    /// Where it will stand when the holder is done, if he has [`RESERVED`] that: others go on from there when he does not.
    next: AtomicU64,
    /// Status flags.
    flags: AtomicU32,
    /// [`LIVE`] or [`LEFT`].
    state: AtomicU32,
}

/// A process, so that one that has its number later is not taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder(u64);

impl Holder {
    /// This process.
    fn this() -> Self {
        match THIS.load(Ordering::Relaxed) {
            0 => {
                let this = Self::asked_for();
                THIS.store(this.0, Ordering::Relaxed);
                this
            }
            known => Self(known),
        }
    }

    /// This process, which may be one that has borrowed another's memory.
    fn asked_for() -> Self {
        // SAFETY: it takes nothing.
        let process = unsafe { system_call(libc::SYS_getpid as u64, [0; 6]) } as u64;
        Self(since_start_ms() << TIME_AT | process & ((1 << PROCESS_BITS) - 1))
    }

    /// What it does, as far as that can be known.
    fn life(self) -> Life {
        let process = self.0 & ((1 << PROCESS_BITS) - 1);
        // SAFETY: no signal is sent.
        let there = unsafe { system_call(libc::SYS_kill as u64, [process, 0, 0, 0, 0, 0]) };
        if there == -i64::from(libc::ESRCH) {
            return Life::Dead;
        }
        // Who may not look takes it for alive.
        let mut buffer = [0; STAT_BYTES];
        let Some(found) = read_stat(process, &mut buffer).and_then(Stat::of) else { return Life::Alive };
        let is_another = found.began_ms > (self.0 >> TIME_AT) + CLOCK_SLACK_MS;
        match found.state {
            _ if is_another => Life::Dead,
            // Its first thread may have ended before the others.
            "Z" | "X" if found.threads <= 1 => Life::Dead,
            "T" | "t" => Life::Stopped,
            _ => Life::Alive,
        }
    }
}

/// What a process does that holds a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Alive,
    Stopped,
    Dead,
}

/// The beginning of a process's line in `/proc`. Nothing is allocated: the memory may be lent.
fn read_stat(process: u64, buffer: &mut [u8; STAT_BYTES]) -> Option<&str> {
    let mut path = [0_u8; 32];
    // The zero behind it stays.
    write!(&mut path[..31], "/proc/{process}/stat").ok()?;
    let arguments = [path.as_ptr() as u64, (libc::O_RDONLY | libc::O_CLOEXEC) as u64, 0, 0, 0, 0];
    // SAFETY: the path is a string that outlives the call.
    let file = unsafe { system_call(libc::SYS_open as u64, arguments) };
    if file < 0 {
        return None;
    }
    let arguments = [file as u64, buffer.as_mut_ptr() as u64, buffer.len() as u64, 0, 0, 0];
    // SAFETY: the buffer is as long as said, and the file was just opened.
    let count = unsafe {
        let count = system_call(libc::SYS_read as u64, arguments);
        system_call(libc::SYS_close as u64, [file as u64, 0, 0, 0, 0, 0]);
        count
    };
    std::str::from_utf8(buffer.get(..usize::try_from(count).ok()?)?).ok()
}

/// What a process's line in `/proc` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat<'a> {
    /// That of its first thread.
    state: &'a str,
    threads: u32,
    /// In milliseconds since the machine began.
    began_ms: u64,
}

impl<'a> Stat<'a> {
    fn of(text: &'a str) -> Option<Self> {
        // NUMBER (NAME) STATE …; the 20th word are the threads, the 22nd is the beginning in hundredths of a second.
        let mut words = text.rsplit_once(") ")?.1.split(' ');
        let state = words.next()?;
        let threads = words.nth(16)?.parse().ok()?;
        Some(Self { state, threads, began_ms: words.nth(1)?.parse::<u64>().ok()? * 10 })
    }
}

/// Milliseconds since the machine began.
pub(crate) fn since_start_ms() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it fills a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// This process; 0: not yet asked for.
static THIS: AtomicU64 = AtomicU64::new(0);

/// How often the process, or those that it was forked from, have become another user's.
static USER: AtomicU32 = AtomicU32::new(0);

/// The process becomes another user's, who may not open all that it has open.
pub(crate) fn change_user() {
    USER.fetch_add(1, Ordering::Relaxed);
}

/// Whether the process may have open files that others have too.
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Whether the process may have open files that others have too.
pub(crate) fn is_any() -> bool {
    IS_ANY.load(Ordering::Relaxed)
}

/// The process shares an open file.
pub(crate) fn note_any() {
    IS_ANY.store(true, Ordering::Relaxed);
}

/// This process is a new one.
pub(crate) fn forget_this() {
    THIS.store(0, Ordering::Relaxed);
}

/// Memory for what processes share of some open files.
struct Memory {
    start: NonNull<Slot>,
    length: usize,
}

// SAFETY: it is plain memory of atomics, which is there until the last one lets go of it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        let arguments = [self.start.as_ptr() as u64, self.length as u64, 0, 0, 0, 0];
        // SAFETY: it was mapped with this length, and nobody refers to it any more.
        unsafe { system_call(libc::SYS_munmap as u64, arguments) };
    }
}

/// A file, to know it again by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The number of the mount that it is on.
    pub(crate) mount: u32,
    /// `st_dev`.
    pub(crate) device: u64,
    /// `st_ino`.
    pub(crate) inode: InodeId,
}

/// An open file that may be shared.
#[derive(Clone)]
pub(crate) struct Shared {
    memory: Arc<Memory>,
    index: usize,
    file: Identity,
    /// Whose it was, of those that the process has been.
    user: u32,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Shared").field("index", &self.index).field("file", &self.file).finish_non_exhaustive()
    }
}

/// Prepares for open files that are about to be shared, each of these files.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn prepare(files: &[Identity]) -> Result<Vec<Shared>, Errno> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let length = files.len() * size_of::<Slot>();
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let arguments = [0, length as u64, protection as u64, flags as u64, u64::MAX, 0];
    // SAFETY: new memory at an address of the kernel's choice.
    let start = unsafe { system_call(libc::SYS_mmap as u64, arguments) };
    // An address has no sign, so a number that has one is an error.
    let start = NonNull::new(start as *mut Slot).filter(|_| start > 0).ok_or(Errno::ENOMEM)?;
    let memory = Arc::new(Memory { start, length });
    let user = USER.load(Ordering::Relaxed);
    let shared = |(index, &file)| Shared { memory: Arc::clone(&memory), index, file, user };
    Ok(files.iter().enumerate().map(shared).collect())
}

impl Shared {
    fn slot(&self) -> &Slot {
        // SAFETY: the memory has a slot for each index that was given out, and is there as long as this refers to it. Zeros are a slot,
        // and all that is in it are atomics.
        unsafe { self.memory.start.add(self.index).as_ref() }
    }

    /// Begins to share an open file, with its status flags, before anybody else has it.
    pub(crate) fn begin(&self, offset: u64, flags: i32) {
        self.slot().offset.store(offset, Ordering::Relaxed);
        self.slot().flags.store(flags as u32, Ordering::Relaxed);
        self.slot().state.store(LIVE, Ordering::Release);
    }

    /// Whether it was shared by who the process is now, for whom SharedFS opens what he could open then.
    pub(crate) fn is_own_users(&self) -> bool {
        self.user == USER.load(Ordering::Relaxed)
    }

    /// Its file.
    pub(crate) fn file(&self) -> Identity {
        self.file
    }

    /// Has the kernel serve a call that reads, writes or moves, which finds the place where it is; `None` where the kernel has it anyway.
    pub(crate) fn lend(&self, descriptor: i32, writes: Option<u64>, call: impl FnOnce() -> i64) -> Option<i64> {
        // One that others did not wait for is let go before the next one is taken: both have the same name.
        let held = loop {
            let held = self.hold()?;
            if !self.is_at(descriptor) {
                return None;
            }
            if writes.is_none_or(|bytes| held.reserve(held.offset().saturating_add(bytes))) {
                break held;
            }
        };
        materialise::set_offset(descriptor, held.offset());
        let result = call();
        if let Ok(offset) = materialise::offset(descriptor) {
            held.set_offset(offset);
        }
        put_nowhere(descriptor);
        Some(result)
    }

    /// Whether it is the same open file as another.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory) && self.index == other.index
    }

    /// Status flags. Those who have fewer rights can set any.
    pub(crate) fn flags(&self) -> &AtomicU32 {
        &self.slot().flags
    }

    /// Whether the kernel has it.
    pub(crate) fn has_left(&self) -> bool {
        self.slot().state.load(Ordering::Acquire) == LEFT
    }

    /// Its place, for one process at a time; `None` where the kernel has it.
    pub(crate) fn hold(&self) -> Option<Held> {
        self.hold_as(Holder::this())
    }

    fn hold_as(&self, this: Holder) -> Option<Held> {
        let slot = self.slot();
        let take =
            |before: u64| slot.holder.compare_exchange(before, this.0, Ordering::Acquire, Ordering::Relaxed).err();
        let mut tries = 0;
        while let Some(holder) = take(0) {
            tries += 1;
            // Another thread of this process lets it go itself.
            if tries > YIELDS && holder != 0 && holder & !RESERVED != this.0 {
                let life = Holder(holder).life();
                let is_over = life != Life::Alive || tries > PATIENT_TRIES;
                if is_over && take(holder).is_none() {
                    // Who was killed in the middle has left it as it was before. Who goes on later has what he took, and others what is behind it.
                    if life != Life::Dead && holder & RESERVED != 0 {
                        slot.offset.store(slot.next.load(Ordering::Acquire), Ordering::Relaxed);
                    }
                    break;
                }
            }
            wait(tries);
        }
        let held = Held { shared: self.clone(), this, began: slot.offset.load(Ordering::Relaxed) };
        (slot.state.load(Ordering::Relaxed) == LIVE).then_some(held)
    }

    /// Whether a descriptor of the kernel's leads to its file.
    pub(crate) fn is_at(&self, descriptor: i32) -> bool {
        session::identity_of(descriptor) == Some((self.file.device, self.file.inode))
    }

    /// Has the open file become the kernel's, for all who share it, by one of this process's numbers of it. Whether it has.
    pub(crate) fn leave(&self, descriptor: i32) -> bool {
        self.leave_as(descriptor, Holder::this())
    }

    fn leave_as(&self, descriptor: i32, this: Holder) -> bool {
        if self.has_left() {
            return true;
        }
        let Some(held) = self.hold_as(this) else { return true };
        // What has got to that number past us is none of ours.
        if !self.is_at(descriptor) {
            return false;
        }
        // It has the size of the time when it was made.
        session::size_of(descriptor);
        materialise::set_offset(descriptor, held.offset());
        self.slot().state.store(LEFT, Ordering::Release);
        true
    }
}

/// Waits a little for who holds a place.
fn wait(tries: u32) {
    match tries {
        ..SPINS => std::hint::spin_loop(),
        // SAFETY: it takes nothing.
        SPINS..YIELDS => drop(unsafe { system_call(libc::SYS_sched_yield as u64, [0; 6]) }),
        // SAFETY: the time is a constant.
        _ => drop(unsafe { system_call(libc::SYS_nanosleep as u64, [(&raw const SLEEP) as u64, 0, 0, 0, 0, 0]) }),
    }
}

/// The place of a shared open file, which nobody else changes meanwhile.
#[derive(Debug)]
pub(crate) struct Held {
    shared: Shared,
    this: Holder,
    /// The file offset.
    began: u64,
}

impl Held {
    /// The file offset, which is one whatever others have made of it.
    pub(crate) fn offset(&self) -> u64 {
        self.began & i64::MAX as u64
    }

    /// Takes what is before an offset for what is about to be written, also should others not wait until it is. `false` where they have the place by now.
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

impl Drop for Held {
    fn drop(&mut self) {
        // Where others did not wait, another one has it by now.
        let holder = &self.shared.slot().holder;
        for word in [self.this.0, self.this.0 | RESERVED] {
            if holder.compare_exchange(word, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }
}

/// Puts the kernel's offset of an open file where nothing can be read or written.
pub(crate) fn put_nowhere(descriptor: i32) {
    materialise::set_offset(descriptor, NOWHERE);
}

/// Whether a call, with an inherited descriptor, goes its way without the offset and the flags of the open file.
pub(crate) fn is_without_place(call: &Frame) -> bool {
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
            [libc::FIOCLEX, libc::FIONCLEX].contains(&request) || calls::is_for_terminals(request)
        }

        _ => false,
    }
}

/// Before the kernel maps a file of which the place is not its own: a mapping goes by the size that it takes the file to have, and it does not ask then.
pub(crate) fn grow(descriptor: i32) {
    session::size_of(descriptor);
}

/// Whether a call does no more with its descriptor than to read, to write, or to move.
pub(crate) fn is_transfer(number: i64) -> bool {
    matches!(number, libc::SYS_read | libc::SYS_write | libc::SYS_readv | libc::SYS_writev | libc::SYS_lseek)
}

/// What a process that has borrowed memory has open of what is shared: its descriptors are its own, and the table of those whose memory it is goes on
/// changing.
#[derive(Debug, Default)]
pub(crate) struct Lent(Vec<(i32, Shared)>);

impl Lent {
    /// What a process has that is made now.
    pub(crate) fn new() -> Self {
        Self(descriptors::all_shared())
    }

    /// Whether there is any.
    pub(crate) fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Before such a process makes a call: what it may use otherwise than by a number that we know leaves. Nothing is allocated or freed.
    pub(crate) fn before(&mut self, call: &Frame) {
        let a = &call.arguments;
        match call.rax as i64 {
            libc::SYS_close => self.forget(a[0] as u32, a[0] as u32),
            libc::SYS_close_range if a[2] as u32 & !libc::CLOSE_RANGE_UNSHARE == 0 => {
                self.forget(a[0] as u32, a[1] as u32);
            }
            libc::SYS_close_range => {}
            libc::SYS_dup2 | libc::SYS_dup3 => {
                self.leave(|number| number == a[0] as i32);
                if a[0] as i32 != a[1] as i32 && descriptors::closes_on_exec(a[0] as i32).is_some() {
                    self.forget(a[1] as u32, a[1] as u32);
                }
            }
            libc::SYS_execve | libc::SYS_execveat => {
                self.leave(|number| descriptors::closes_on_exec(number) == Some(false));
            }
            // What becomes of it then is not seen.
            libc::SYS_clone
            | libc::SYS_clone3
            | libc::SYS_fork
            | libc::SYS_vfork
            | libc::SYS_sendmsg
            | libc::SYS_sendmmsg => self.leave(|_| true),
            libc::SYS_mmap if self.0.iter().any(|(number, _)| *number == a[4] as i32) => grow(a[4] as i32),
            _ if is_without_place(call) => {}
            number => self
                .leave(|number_of_file| calls::descriptors_of(number).iter().any(|&at| a[at] as i32 == number_of_file)),
        }
    }

    fn leave(&self, is_meant: impl Fn(i32) -> bool) {
        for (number, shared) in self.0.iter().filter(|(number, _)| *number >= 0 && is_meant(*number)) {
            shared.leave_as(*number, Holder::asked_for());
        }
    }

    /// Numbers lead elsewhere, or nowhere.
    fn forget(&mut self, first: u32, last: u32) {
        // What they led to is let go of by whose memory it is.
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
    fn a_process_is_known_by_its_number_and_its_beginning() {
        let text = "17 (a b) c) S 1 17 17 0 -1 4194560 100 0 0 0 0 0 0 0 20 0 3 0 12345 1000 10 0";
        assert_eq!(Stat::of(text), Some(Stat { state: "S", threads: 3, began_ms: 123_450 }));
        assert_eq!(Stat::of("17 (a"), None);
        let this = Holder::asked_for();
        assert_eq!(this.life(), Life::Alive);
        let before = Holder(this.0 & ((1 << PROCESS_BITS) - 1));
        assert_eq!(before.life(), Life::Dead, "one that had the number when the machine began");
    }

    fn shared() -> Shared {
        let files = [1, 2].map(|inode| Identity { mount: 0, device: 0, inode: InodeId(inode) });
        let shared = prepare(&files).expect("memory").pop().expect("two");
        shared.begin(5, libc::O_RDWR);
        shared
    }

    /// A child that has the place, and has said that it will move it to 9.
    fn holder(shared: &Shared, ends: bool) -> i32 {
        // SAFETY: the child makes no call but these.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let held = shared.hold_as(Holder::asked_for()).expect("served by us");
            assert!(held.reserve(9));
            // SAFETY: it ends or stops the process. It then goes on as one that has written all.
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
        // SAFETY: the child is ours, and the status a local variable.
        unsafe { libc::waitpid(child, &raw mut status, libc::WUNTRACED) };
        assert_ne!(shared.slot().holder.load(Ordering::Relaxed), 0, "it has it");
        child
    }

    #[test]
    fn who_is_stopped_with_a_place_has_what_he_took_and_others_go_on_behind_it() {
        let shared = shared();
        let child = holder(&shared, false);
        let held = shared.hold().expect("served by us");
        assert_eq!(held.offset(), 9);
        held.set_offset(12);
        drop(held);
        let mut status = 0;
        // SAFETY: the child is ours, and the status a local variable.
        unsafe {
            libc::kill(child, libc::SIGCONT);
            libc::waitpid(child, &raw mut status, 0);
        }
        assert_eq!(shared.hold().map(|held| held.offset()), Some(12), "he has not taken it back");
    }

    #[test]
    fn who_is_killed_with_a_place_keeps_nobody_from_it() {
        let shared = shared();
        holder(&shared, true);
        let held = shared.hold().expect("served by us");
        assert_eq!(held.offset(), 5);
        held.set_offset(7);
        drop(held);
        assert_eq!(shared.slot().holder.load(Ordering::Relaxed), 0);
        assert_eq!(shared.hold().map(|held| held.offset()), Some(7));
    }
}
