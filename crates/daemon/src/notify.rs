//! Makes mounts' kernels forget what is no longer true.
//!
//! Two things are told, in two steps:
//! - Attributes, before the grant that makes them untrue is answered. This never makes the writer wait for the mount's process,
//!   so whoever answers the grant writes them itself. As the kernel then asks for the attributes before it reads
//!   from its pages, and drops pages whose file has another time of modification (`AUTO_INVAL_DATA`), reads and writes need no more.
//! - Pages, afterwards, for shared mappings, by the helper and a thread of the mount's own that waits for it. That waits for pages that a READ or WRITE in flight has
//!   locked, and such a request may wait for the very lease that moves. So no mount waits for this thread; and a SharedFS that is killed meanwhile ends at once, and leaves
//!   the helper waiting. A program does that is about to write a file which a mount has open, so that who has mapped it there sees what it writes: what the
//!   request waits for is taken from the program all the same.
//!
//! Names are not told: the one notification that covers all of them (`FUSE_NOTIFY_INC_EPOCH`) unhashes working directories, so
//! kernels keep names only while there is one session (`ControlPage::is_shared`).
//!
//! A mount whose process is gone is cut off at once: a copy of its device in our hands would keep its users waiting for answers.
//!
//! A SharedFS that was started anew has no mount's device, until the mount's process has come back with it. What is taken from such a mount
//! waits until its kernel can be told, or can't believe any more what it was told under leases from before the start.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_helper::{Helper, Line, Pages, end_connection, inval_inode};
use ashlar_types::{InodeId, MountLine, mount_lines};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Stat;

use crate::grant::boot_time;

/// Notifications that may wait; a mount that falls behind so far gets one that covers all.
const QUEUE_MAX: usize = 4096;

/// What a kernel shall forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// Of which inode.
    pub inode: InodeId,
    /// Its pages too, not only its attributes.
    pub data: bool,
    /// It stands for everything below it as well.
    pub subtree: bool,
}

/// Notes until when, on the clock that counts from the machine's start, a mount's kernel may believe what is not so any more: a SharedFS that is started
/// anew waits so long. Zero: it was told all.
pub type NoteStale = Box<dyn Fn(Duration) + Send + Sync>;

/// A mount's notifier.
pub struct Notifier {
    device: Mutex<Option<Arc<Device>>>,
    state: Mutex<State>,
    changed: Condvar,
    /// Held while attributes are written, so that whoever sees them written may rely on it.
    telling: Mutex<()>,
    ttl: Duration,
    note_stale: NoteStale,
}

impl std::fmt::Debug for Notifier {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Notifier").field("state", &self.state).finish_non_exhaustive()
    }
}

/// A mount's device.
#[derive(Debug)]
pub struct Device {
    file: OwnedFd,
    /// The device number that the mount's files show.
    shown: u64,
    /// What may have to wait.
    line: Line,
}

#[derive(Debug, Default)]
struct State {
    /// The mount has not come back yet. Its kernel believes nothing any more from then on.
    absent_until: Option<Instant>,
    /// There is a thread.
    has_worker: bool,
    /// A lease is being taken, and what is to be told for that is not queued yet.
    is_owing: bool,
    queue: VecDeque<Stale>,
    queued: u64,
    written: u64,
    /// Files whose pages are to go, …
    pages: BTreeSet<InodeId>,
    /// … and the one whose pages are going.
    dropping: Option<InodeId>,
    /// There was more to tell than could be, or an earlier SharedFS has left something untold: until then the kernel may believe some of it.
    lost_until: Duration,
    ended: bool,
}

/// Something to wait for before what made the cache stale may be told to anyone.
#[derive(Debug)]
pub struct Ticket {
    notifier: Arc<Notifier>,
    number: u64,
    stale: Stale,
    /// Only the passing of time makes this kernel forget all of it.
    needs_time: bool,
    deadline: Instant,
}

impl Notifier {
    /// Starts the thread of a mount whose device is `device`.
    ///
    /// # Errors
    /// The system's, where no thread can be started.
    pub fn start(device: Device, ttl: Duration, note_stale: NoteStale) -> std::io::Result<Arc<Self>> {
        let notifier = Self::without_device(State::default(), ttl, note_stale);
        notifier.connect(device)?;
        Ok(notifier)
    }

    /// Of a mount that has not come back yet after a restart. An earlier SharedFS has left it untold what it may believe until `lost_until`.
    pub fn absent(ttl: Duration, lost_until: Duration, note_stale: NoteStale) -> Arc<Self> {
        let absent_until = Some(Instant::now() + ttl);
        Self::without_device(State { absent_until, lost_until, ..State::default() }, ttl, note_stale)
    }

    fn without_device(state: State, ttl: Duration, note_stale: NoteStale) -> Arc<Self> {
        Arc::new(Self {
            device: Mutex::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            telling: Mutex::default(),
            ttl,
            note_stale,
        })
    }

    /// Whether the mount has not come back yet.
    pub fn is_absent(&self) -> bool {
        self.state.lock().absent_until.is_some()
    }

    /// Until now a mount that has not come back could still hold leases from before the start, and let its kernel believe what they say.
    pub fn renew_absence(&self) {
        let mut state = self.state.lock();
        if state.absent_until.is_some() {
            state.absent_until = Some(Instant::now() + self.ttl);
        }
    }

    /// The mount is there, with this device, or has come back with one: its thread begins with what it was not told yet.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn connect(self: &Arc<Self>, device: Device) -> std::io::Result<()> {
        let mut state = self.state.lock();
        if !state.has_worker {
            let worker = Arc::clone(self);
            let thread = std::thread::Builder::new().name("notify".into()).stack_size(256 << 10);
            thread.spawn(move || worker.work())?;
            state.has_worker = true;
        }
        *self.device.lock() = Some(Arc::new(device));
        state.absent_until = None;
        self.changed.notify_all();
        Ok(())
    }

    /// A lease is about to be taken of which the kernel must be told: a restart from here on waits for what it may believe. What is to be told is queued next.
    pub fn begin(&self) {
        let mut state = self.state.lock();
        state.is_owing = true;
        (self.note_stale)(boot_time() + self.ttl);
    }

    /// Queues a notification behind others; called with SharedFS's lock held, so it never waits. The ticket is its, and so stands for all.
    pub fn queue(self: &Arc<Self>, before: &[Stale], stale: Stale) -> Ticket {
        let all = || before.iter().chain([&stale]);
        let mut state = self.state.lock();
        let until = boot_time() + self.ttl;
        (self.note_stale)(until);
        state.is_owing = false;
        let overflow = state.queue.len() + before.len() >= QUEUE_MAX;
        if overflow {
            state.lost_until = until;
            state.queue.clear();
            state.queue.push_back(Stale { inode: InodeId::ROOT, data: false, subtree: true });
        } else {
            state.queue.extend(all());
        }
        for stale in all().filter(|stale| stale.data) {
            if state.pages.len() < QUEUE_MAX {
                state.pages.insert(stale.inode);
            }
        }
        state.queued += 1;
        self.changed.notify_all();
        Ticket {
            notifier: Arc::clone(self),
            number: state.queued,
            stale,
            needs_time: overflow,
            deadline: state.absent_until.unwrap_or_else(|| Instant::now() + self.ttl),
        }
    }

    /// Whether pages of a file are still to be dropped.
    pub fn owes_pages(&self, inode: InodeId) -> bool {
        self.state.lock().owes_pages(inode)
    }

    /// Waits until pages of a file are dropped, but for no longer than the kernel may keep what it was told.
    pub fn wait_pages(&self, inode: InodeId) {
        let deadline = Instant::now() + self.ttl;
        let mut state = self.state.lock();
        while state.owes_pages(inode) && !self.changed.wait_until(&mut state, deadline).timed_out() {}
    }

    /// Ends the thread and gives the device back. Where the mount's process is dead (`cut_off`), whoever waits for an answer
    /// of it fails now; the kernel of one that lives is told first what it's owed. Whether there was a device.
    pub fn end(&self, cut_off: bool) -> bool {
        if !cut_off && !self.is_absent() {
            self.tell(Instant::now() + self.ttl);
        }
        self.state.lock().ended = true;
        self.changed.notify_all();
        let device = self.device.lock().take();
        if let (true, Some(device)) = (cut_off, &device) {
            device.abort();
        }
        device.is_some()
    }

    /// Tells the kernel of attributes that are queued; does not wait for another that does so, or for a mount to come back, longer than to
    /// `deadline`.
    fn tell(&self, deadline: Instant) {
        let Some(_telling) = self.telling.try_lock_until(deadline) else { return };
        let mut state = self.state.lock();
        while state.absent_until.is_some() {
            if state.ended || self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
        let batch: Vec<Stale> = state.queue.drain(..).collect();
        let upto = state.queued;
        drop(state);
        let device = self.device.lock().clone();
        if let Some(device) = device {
            for stale in &batch {
                // A mount that is gone needs no forgetting.
                let _ = inval_inode(&device.file.as_fd(), stale.inode, Pages::Keep);
            }
        }
        let mut state = self.state.lock();
        state.written = upto;
        if state.queue.is_empty() && !state.is_owing {
            let lost_until = state.lost_until;
            (self.note_stale)(if lost_until > boot_time() { lost_until } else { Duration::ZERO });
        }
        self.changed.notify_all();
    }

    fn work(&self) {
        loop {
            let mut state = self.state.lock();
            while state.queue.is_empty() && state.pages.is_empty() && !state.ended {
                self.changed.wait(&mut state);
            }
            if state.ended {
                return;
            }
            let is_told = state.queue.is_empty();
            let pages = if is_told { state.pages.pop_first() } else { None };
            state.dropping = pages;
            drop(state);
            self.tell(Instant::now() + self.ttl);
            let device = self.device.lock().clone();
            if let (Some(inode), Some(device)) = (pages, device) {
                let _ = inval_inode(&device.line.to(device.file.as_fd()), inode, Pages::ALL);
                self.state.lock().dropping = None;
                self.changed.notify_all();
            }
        }
    }
}

impl State {
    fn owes_pages(&self, inode: InodeId) -> bool {
        !self.ended && (self.dropping == Some(inode) || self.pages.contains(&inode))
    }
}

impl Ticket {
    /// What is to be forgotten.
    pub fn stale(&self) -> Stale {
        self.stale
    }

    /// Whether nobody need wait for it any more.
    pub fn is_done(&self) -> bool {
        self.is_told(&self.notifier.state.lock()) || Instant::now() >= self.deadline
    }

    fn is_told(&self, state: &State) -> bool {
        state.ended || state.written >= self.number && !self.needs_time
    }

    /// Waits until the kernel has forgotten, or may not believe it any more.
    pub fn wait(&self) {
        let is_due = {
            let state = self.notifier.state.lock();
            !state.ended && state.written < self.number
        };
        if is_due {
            self.notifier.tell(self.deadline);
        }
        let mut state = self.notifier.state.lock();
        loop {
            if self.is_told(&state) || self.notifier.changed.wait_until(&mut state, self.deadline).timed_out() {
                return;
            }
        }
    }
}

impl Device {
    /// A mount's, whose files show the device number `shown`.
    pub fn new(file: OwnedFd, shown: u64, helper: &Arc<Helper>) -> Self {
        Self { file, shown, line: Line::new(Arc::clone(helper)) }
    }

    /// Whether it's a device, and its mount still there. The kernel gives the number of one that is gone to others.
    fn is_connected(&self) -> bool {
        const FUSE: (u32, u32) = (10, 229);
        let is_fuse = |found: Stat| (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev)) == FUSE;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
        rustix::fs::fstat(&self.file).is_ok_and(is_fuse)
            && poll(&mut fds, Some(&now)).is_ok()
            && !fds[0].revents().contains(PollFlags::ERR)
    }

    /// Ends the connection if its mount is still there, whoever else has the device.
    fn abort(&self) {
        // Once we close our copy, the connection most often ends too.
        if self.is_connected()
            && let Err(error) = end_connection(self.shown)
        {
            tracing::debug!(%error, device = self.shown, "a dead mount's connection can't be aborted");
        }
    }
}

/// Ends the connection of a mount of this arena whose process is dead, and whose files showed this device number: a helper that waits for one of its requests has its device
/// still, and its users would wait for ever.
pub fn abort_dead(shown: u64, arena: &Path) {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let device = format!("{}:{}", rustix::fs::major(shown), rustix::fs::minor(shown));
    // The number of a mount that is gone is given to others.
    let is_it =
        |line: MountLine<'_>| line.device == device.as_bytes() && line.arena() == Some(arena.as_os_str().as_bytes());
    if mount_lines(&table).any(is_it)
        && let Err(error) = end_connection(shown)
    {
        tracing::warn!(%error, device, "a dead mount's connection can't be ended; unmount it");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    const INVAL_INODE: i32 = 2;
    const STALE: Stale = Stale { inode: InodeId(77), data: true, subtree: false };

    /// A device that is none, and has no helper.
    fn device(socket: UnixStream) -> Device {
        Device::new(socket.into(), 0, &Arc::new(Helper::new(Vec::new())))
    }

    fn queue(notifier: &Arc<Notifier>) -> Ticket {
        notifier.queue(&[], STALE)
    }

    fn message(kernel: &mut UnixStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        kernel.read_exact(&mut bytes).expect("a notification");
        assert_eq!(usize::from(bytes[0]), length);
        bytes
    }

    #[test]
    fn attributes_are_told_at_once_and_pages_behind_them() {
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        let notifier = Notifier::start(device(ours), Duration::from_secs(60), Box::new(|_| {})).expect("started");
        let start = Instant::now();
        queue(&notifier).wait();
        assert!(start.elapsed() < Duration::from_secs(30), "a kernel that takes it delays nobody");
        let attributes = message(&mut kernel, 40);
        assert_eq!((attributes[4], attributes[16], attributes[24]), (INVAL_INODE as u8, 77, 0xff));
        kernel.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        let pages = message(&mut kernel, 40);
        assert_eq!((pages[4], pages[16], pages[24]), (INVAL_INODE as u8, 77, 0));
        notifier.end(false);
    }

    #[test]
    fn a_restart_waits_for_what_was_not_told() {
        use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        let noted = Arc::new(AtomicU64::new(0));
        let note = Arc::clone(&noted);
        let note_stale = Box::new(move |until: Duration| note.store(until.as_millis() as u64, SeqCst));
        let notifier = Notifier::absent(Duration::from_secs(60), Duration::ZERO, note_stale);
        let before = boot_time().as_millis() as u64;
        let ticket = queue(&notifier);
        assert!(noted.load(SeqCst) >= before + 60_000);
        notifier.connect(device(ours)).expect("started");
        ticket.wait();
        message(&mut kernel, 40);
        assert_eq!(noted.load(SeqCst), 0, "it was told all");
        notifier.begin();
        notifier.tell(Instant::now());
        assert_ne!(noted.load(SeqCst), 0, "a lease is being taken");
        queue(&notifier).wait();
        assert_eq!(noted.load(SeqCst), 0);
        notifier.end(false);
    }

    #[test]
    fn what_an_earlier_sharedfs_has_left_untold_stays_noted() {
        use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
        let (ours, _kernel) = UnixStream::pair().expect("sockets");
        let noted = Arc::new(AtomicU64::new(0));
        let note = Arc::clone(&noted);
        let lost_until = boot_time() + Duration::from_secs(50);
        let note_stale = Box::new(move |until: Duration| note.store(until.as_millis() as u64, SeqCst));
        let notifier = Notifier::absent(Duration::from_secs(60), lost_until, note_stale);
        notifier.connect(device(ours)).expect("started");
        queue(&notifier).wait();
        assert_eq!(noted.load(SeqCst), lost_until.as_millis() as u64);
        notifier.end(false);
    }

    #[test]
    fn a_mount_that_comes_back_is_told_what_was_taken_from_it_meanwhile() {
        let notifier = Notifier::absent(Duration::from_secs(60), Duration::ZERO, Box::new(|_| {}));
        let ticket = queue(&notifier);
        assert!(!ticket.is_done());
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ticket.wait());
            notifier.connect(device(ours)).expect("started");
            waiting.join().expect("no panic");
            kernel.set_nonblocking(true).expect("set");
            assert_eq!(message(&mut kernel, 40)[24], 0xff, "who waited goes on when it is told");
        });
        notifier.end(false);
    }

    #[test]
    fn a_mount_that_does_not_come_back_is_waited_for_as_long_as_its_kernel_believes() {
        let ttl = Duration::from_millis(50);
        let (start, notifier) = (Instant::now(), Notifier::absent(ttl, Duration::ZERO, Box::new(|_| {})));
        queue(&notifier).wait();
        assert!(start.elapsed() >= ttl);
        assert!(queue(&notifier).is_done(), "what was told before the restart is believed no more");
        notifier.end(false);
    }

    #[test]
    fn an_ended_mount_holds_up_nobody_and_its_device_is_closed() {
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        let notifier = Notifier::start(device(ours), Duration::from_secs(60), Box::new(|_| {})).expect("started");
        for _ in 0..QUEUE_MAX {
            queue(&notifier);
        }
        let ticket = queue(&notifier);
        let is_waited_for = !ticket.is_done();
        notifier.end(true);
        let start = Instant::now();
        ticket.wait();
        assert!(!is_waited_for || start.elapsed() < Duration::from_secs(30));
        kernel.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        kernel.read_to_end(&mut Vec::new()).expect("the end of the stream");
    }

    #[test]
    fn only_a_device_has_a_connection() {
        let (ours, _theirs) = UnixStream::pair().expect("sockets");
        assert!(!device(ours).is_connected());
    }
}
