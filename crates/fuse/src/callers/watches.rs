//! Reserves inodes on the mount that programs watch, by inotify or fanotify.
//!
//! The kernel then serves these inodes, since only the kernel makes events. It does not tell a file system which inodes
//! are watched. So the mount finds out in three ways:
//!
//! - While a thread is in a call that begins a watch, the kernel looks the path up here. The request names the thread,
//!   and `/proc/TID/syscall` the call. The inode is reserved before the answer, so no event is missed.
//! - The library in a program under `ashlar run` asks for an attribute ([`WATCH_ATTRIBUTE`]) of the path that the
//!   program is about to watch.
//! - A thread reads the watches of all processes again and again ([`WatchFinder`]). It finds those whose path needed no
//!   look-up (the mount's root, the working directory, a descriptor). It also sees watches end.
//!
//! All this happens only while programs have sessions, and for a while after that. After a longer time without any, the
//! first session waits until the thread has searched once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ashlar_types::{Errno, InodeId};
use ashlar_wire::{ReserveReason, WATCH_ALL_ATTRIBUTE, WATCH_ATTRIBUTE};
use parking_lot::Mutex;

use crate::callers::calling_thread::SystemCall;
use crate::callers::watch_finder::{FoundWatches, WatchFinder};
use crate::file_system::FileSystem;
use crate::proto::InHeader;

/// How long after its announcement a watch may be absent from `/proc`. Until then, the call that begins the watch may
/// be under way.
const ANNOUNCED_TTL: Duration = Duration::from_secs(2);
/// The shortest and the longest time between two searches of all processes.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A search takes at most one part in so many of the time.
const SEARCH_SHARE: u32 = 200;
/// How long the thread goes on searching after the last program's session has ended. SharedFS also waits this long
/// before it calls a mount a sole mount.
const SEARCH_TTL: Duration = Duration::from_secs(30);
/// The longest path that is read from a thread that begins a watch.
const PATH_MAX: usize = 4096;
/// Marks of fanotify on a mount or a file system (`FAN_MARK_MOUNT`, `FAN_MARK_FILESYSTEM`).
const MARKS_ALL: u64 = 0x110;
/// Both calls by their numbers for 32-bit programs on this processor. In the 64-bit numbering, calls with these numbers
/// look up nothing or do not exist.
#[cfg(target_arch = "x86_64")]
const CALLS_OF_32_BITS: [i64; 2] = [292, 339];
#[cfg(not(target_arch = "x86_64"))]
const CALLS_OF_32_BITS: [i64; 2] = [316, 367];

/// The watched inodes.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    /// Whether a search is under way.
    is_searching: AtomicBool,
    /// A watch was announced since the last search began.
    is_announced: AtomicBool,
    /// When a program was last seen to have a session.
    last_used: Mutex<Option<Instant>>,
    finder: Mutex<WatchFinder>,
    reserved: Mutex<BTreeMap<InodeId, ReservedWatch>>,
}

/// An inode that is reserved, or is about to be.
#[derive(Clone, Copy, Debug)]
struct ReservedWatch {
    reason: ReserveReason,
    /// Until then it stays reserved, whether a watch is found or not.
    until: Instant,
    is_done: bool,
}

/// A call that begins a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
enum WatchCall {
    /// On the file that a path leads to; the path is `None` if it could not be read.
    Path(Option<Vec<u8>>),
    /// On a mount or a file system as a whole.
    All,
}

thread_local! {
    /// The thread that asked last, and its file that shows which call it is in.
    static ASKING: RefCell<Option<(u32, File)>> = const { RefCell::new(None) };
}

impl Watches {
    /// Searches the watches of all processes, and returns the pause until the next search. Returns `None` if no program
    /// has had a session for long.
    pub(crate) fn search_while_used<F: FileSystem>(&self, file_system: &F, device: u64) -> Option<Duration> {
        let mut last_used = self.last_used.lock();
        if file_system.programs() > 0 {
            *last_used = Some(Instant::now());
        }
        if last_used.is_none_or(|last| last.elapsed() >= SEARCH_TTL) {
            self.is_searching.store(false, Ordering::SeqCst);
            return None;
        }
        drop(last_used);
        Some((self.search_all(file_system, device) * SEARCH_SHARE).clamp(PAUSE_MIN, PAUSE_MAX))
    }

    /// Searches the watches of all processes, and returns how long that took.
    pub(crate) fn search_all<F: FileSystem>(&self, file_system: &F, device: u64) -> Duration {
        self.is_searching.store(true, Ordering::SeqCst);
        let mut finder = self.finder.lock();
        let (began, busy) = (Instant::now(), thread_time());
        // Its descriptor was opened before. A process with as many descriptors as before would not be listed for long,
        // and the watch would count as over.
        let found = finder.find_watches(device, self.is_announced.swap(false, Ordering::SeqCst));
        let took = thread_time().saturating_sub(busy);
        drop(finder);
        self.apply_found(file_system, &found, began);
        took
    }

    /// Reserves watched inodes, and frees those that are no longer watched. A watch that was announced after the search
    /// began may not show yet, so it stays reserved.
    fn apply_found<F: FileSystem>(&self, file_system: &F, found: &FoundWatches, began: Instant) {
        let wanted = |inode: InodeId| found.reason_of(inode);
        let is_over = |(inode, watch): (&InodeId, &ReservedWatch)| {
            (wanted(*inode).is_none() && watch.until <= began).then_some((*inode, watch.reason))
        };
        let over: Vec<_> = self.reserved.lock().iter().filter_map(is_over).collect();
        for (inode, reason) in over {
            self.reserved.lock().remove(&inode);
            file_system.free_reserved(inode, reason);
        }
        for (inode, reason) in found.reasons() {
            let _ = self.reserve(file_system, inode, reason, began);
        }
    }

    /// Reserves an inode, at least until a time.
    fn reserve<F: FileSystem>(
        &self,
        file_system: &F,
        inode: InodeId,
        reason: ReserveReason,
        until: Instant,
    ) -> Result<(), Errno> {
        let before = {
            let mut reserved = self.reserved.lock();
            let watch = reserved.entry(inode).or_insert(ReservedWatch { reason, until, is_done: false });
            watch.until = watch.until.max(until);
            let before = *watch;
            if before.reason < reason {
                (watch.reason, watch.is_done) = (reason, false);
            }
            before
        };
        if before.is_done && before.reason >= reason {
            return Ok(());
        }
        let result = file_system.reserve(inode, before.reason.max(reason));
        if before.reason < reason {
            file_system.free_reserved(inode, before.reason);
        }
        // An inode that no longer exists needs no reservation.
        if matches!(result, Ok(()) | Err(Errno::ESTALE))
            && let Some(watch) = self.reserved.lock().get_mut(&inode)
        {
            watch.is_done = true;
        }
        result
    }

    /// Reserves an inode that a program is about to watch.
    fn reserve_announced<F: FileSystem>(
        &self,
        file_system: &F,
        inode: InodeId,
        reason: ReserveReason,
    ) -> Result<(), Errno> {
        self.is_announced.store(true, Ordering::SeqCst);
        self.reserve(file_system, inode, reason, Instant::now() + ANNOUNCED_TTL)
    }

    /// Serves the attributes by which the library in a program announces a watch. Returns `None` for all other
    /// attributes.
    pub(crate) fn serve_attribute<F: FileSystem>(
        &self,
        file_system: &F,
        header: &InHeader,
        name: &[u8],
    ) -> Option<Result<Vec<u8>, Errno>> {
        let inode = InodeId(header.nodeid);
        let announced = if name == WATCH_ATTRIBUTE.as_bytes() {
            self.reserve_announced(file_system, inode, ReserveReason::Watched)
        } else if name == WATCH_ALL_ATTRIBUTE.as_bytes() {
            // The kernel lets only root mark a file system.
            if header.uid != 0 {
                return Some(Err(Errno::EPERM));
            }
            self.reserve_announced(file_system, InodeId::ROOT, ReserveReason::WatchedAll)
        } else {
            return None;
        };
        Some(announced.map(|()| vec![1]))
    }

    /// Reserves a found inode before its look-up is answered, if the asking thread begins a watch on it.
    pub(crate) fn reserve_if_watched<F: FileSystem>(
        &self,
        file_system: &F,
        header: &InHeader,
        name: &[u8],
        inode: InodeId,
    ) {
        if header.pid == 0 || !self.is_searching.load(Ordering::Relaxed) {
            return;
        }
        let announced = match watch_call_of(header.pid) {
            Some(WatchCall::Path(path)) if path.as_deref().is_none_or(|path| may_be_last_name(path, name)) => {
                self.reserve_announced(file_system, inode, ReserveReason::Watched)
            }
            Some(WatchCall::All) => self.reserve_announced(file_system, InodeId::ROOT, ReserveReason::WatchedAll),
            _ => return,
        };
        if let Err(errno) = announced {
            tracing::debug!(inode = inode.0, %errno, "a watched inode can't be reserved");
        }
    }
}

/// Returns how long this thread has kept a core busy.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Returns the call that a thread is in, if that call begins a watch. The thread waits for an answer.
fn watch_call_of(thread: u32) -> Option<WatchCall> {
    let mut text = [0; 256];
    let length = ASKING.with_borrow_mut(|asking| {
        let read = |file: &File, text: &mut [u8]| file.read_at(text, 0).ok();
        let known = asking.as_ref().filter(|(known, _)| *known == thread);
        if let Some(length) = known.and_then(|(_, file)| read(file, &mut text)) {
            return Some(length);
        }
        let file = File::open(format!("/proc/{thread}/syscall")).ok()?;
        let length = read(&file, &mut text);
        *asking = Some((thread, file));
        length
    })?;
    let SystemCall { number, arguments } = SystemCall::parse(std::str::from_utf8(text.get(..length)?).ok()?)?;
    let at = match number {
        libc::SYS_inotify_add_watch => arguments[1],
        libc::SYS_fanotify_mark if arguments[1] & MARKS_ALL != 0 => return Some(WatchCall::All),
        libc::SYS_fanotify_mark => arguments[4],
        _ if CALLS_OF_32_BITS.contains(&number) => return Some(WatchCall::Path(None)),
        _ => return None,
    };
    Some(WatchCall::Path(read_path(thread, at)))
}

/// Reads the path at an address of a thread's memory.
fn read_path(thread: u32, address: u64) -> Option<Vec<u8>> {
    let memory = File::open(format!("/proc/{thread}/mem")).ok()?;
    let mut path = vec![0; PATH_MAX];
    let length = memory.read_at(&mut path, address).ok()?;
    let end = path.get(..length)?.iter().position(|byte| *byte == 0)?;
    path.truncate(end);
    Some(path)
}

/// Whether a name that is looked up along a path may be the path's last one. A name that is no part of the path comes
/// from a symbolic link, so it may be.
fn may_be_last_name(path: &[u8], name: &[u8]) -> bool {
    let mut names = path.split(|byte| *byte == b'/').rev().filter(|part| !matches!(part, [] | [b'.']));
    match names.next() {
        Some(b"..") | None => true,
        Some(last) => last == name || !names.any(|part| part == name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_name_of_path_differs_from_earlier_ones() {
        for (path, name, expected) in [
            ("/mnt/a/b", "b", true),
            ("/mnt/a/b", "a", false),
            ("/mnt/a/b//./", "b", true),
            ("/mnt/a/b/", "a", false),
            ("/mnt/a/a", "a", true),
            ("/mnt/a/..", "a", true),
            ("/mnt/link", "target", true),
            (".", "a", true),
        ] {
            assert_eq!(may_be_last_name(path.as_bytes(), name.as_bytes()), expected, "{name} in {path}");
        }
    }

    #[test]
    fn path_of_a_thread_is_read_from_its_memory() {
        let path = c"/some/path";
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        assert_eq!(read_path(thread, path.as_ptr().expose_provenance() as u64).as_deref(), Some(path.to_bytes()));
        assert_eq!(read_path(thread, 0), None);
    }
}
