//! Makes mounts' kernels forget cached state that is no longer true.
//!
//! SharedFS notifies in two steps:
//! - Attributes, before it answers the grant that makes them untrue. This never makes the writer wait for the mount's
//!   process, so the thread that answers the grant writes the notification itself. The kernel then asks for the
//!   attributes before it reads from its pages. It drops pages whose file has another modification time
//!   (`AUTO_INVAL_DATA`). So reads and writes need no more.
//! - Pages, afterwards, for shared mappings. The helper does this, and a thread of the mount's own waits for it. It
//!   waits for pages that a READ or WRITE in flight has locked, and such a request may wait for the very lease that
//!   moves. So no mount waits for this thread. A SharedFS that is killed meanwhile ends at once, and leaves the helper
//!   waiting. A program does wait if it is about to write a file that a mount has open: processes that have mapped the
//!   file there are to see its writes. SharedFS still takes from that program the leases that the request waits for.
//!
//! Names get no notification: the one that covers all of them (`FUSE_NOTIFY_INC_EPOCH`) unhashes working directories.
//! So kernels keep names only while there is one session (`ControlPage::is_shared`).
//!
//! SharedFS cuts off a mount whose process is gone at once: SharedFS's copy of the device would keep the mount's users
//! waiting for answers.
//!
//! A restarted SharedFS has no device of a mount until the mount's process has returned with it. A grant that takes a
//! lease from such a mount waits. It waits until SharedFS can notify the kernel, or until the kernel no longer believes
//! its cache from before the start.

use std::any::Any;
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_helper::{Helper, Line, Pages, end_connection, inval_inode};
use ashlar_node::leases::grant::AnswerGate;
use ashlar_node::leases::kernel_notifier::{KernelNotifier, KernelTicket, NoteStale, StaleCache};
use ashlar_processes::clock::boot_time;
use ashlar_types::{InodeId, MountLine, mount_lines};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Stat;

/// The most notifications that wait.
///
/// A mount that falls behind so far gets one that covers all.
const QUEUE_MAX: usize = 4096;

/// Notifies one mount's kernel.
pub struct Notifier {
    device: Mutex<Option<Arc<MountDevice>>>,
    state: Mutex<NotifierState>,
    changed: Condvar,
    /// Held while attributes are written.
    ///
    /// So a thread that sees them written may rely on it.
    writing: Mutex<()>,
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
pub struct MountDevice {
    file: OwnedFd,
    /// The device number that the mount's files show.
    shown: u64,
    /// The line to the helper for writes that may have to wait.
    line: Line,
}

#[derive(Debug, Default)]
struct NotifierState {
    /// Until when the kernel of a mount that has not returned believes its cache.
    absent_until: Option<Instant>,
    /// Whether the thread runs.
    has_worker: bool,
    /// A lease is being taken, and its notifications are not queued yet.
    is_owing: bool,
    queue: VecDeque<StaleCache>,
    queued: u64,
    written: u64,
    /// Files whose pages are to be dropped.
    pages: BTreeSet<InodeId>,
    /// The file whose pages are being dropped.
    dropping: Option<InodeId>,
    /// Until when the kernel may believe stale state because notifications were lost.
    ///
    /// Either the queue was full, or an earlier SharedFS has left notifications unsent.
    lost_until: Duration,
    ended: bool,
}

/// A wait for a notification.
///
/// It must end before any session may learn of the change that made the cache stale.
#[derive(Debug)]
pub struct NotificationTicket {
    notifier: Arc<Notifier>,
    number: u64,
    stale: StaleCache,
    /// Only the passing of time makes this kernel forget all of it.
    needs_time: bool,
    deadline: Instant,
}

impl Notifier {
    /// Starts the thread of a mount whose device is `device`.
    ///
    /// # Errors
    /// The system's, if no thread can be started.
    pub fn start(device: MountDevice, ttl: Duration, note_stale: NoteStale) -> std::io::Result<Arc<Self>> {
        let notifier = Self::without_device(NotifierState::default(), ttl, note_stale);
        notifier.connect(device)?;
        Ok(notifier)
    }

    /// Returns the notifier of a mount that has not returned yet after a restart.
    ///
    /// An earlier SharedFS has left its kernel without notifications of state that it may believe until `lost_until`.
    pub fn absent(ttl: Duration, lost_until: Duration, note_stale: NoteStale) -> Arc<Self> {
        let absent_until = Some(Instant::now() + ttl);
        Self::without_device(NotifierState { absent_until, lost_until, ..NotifierState::default() }, ttl, note_stale)
    }

    fn without_device(state: NotifierState, ttl: Duration, note_stale: NoteStale) -> Arc<Self> {
        Arc::new(Self {
            device: Mutex::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            writing: Mutex::default(),
            ttl,
            note_stale,
        })
    }

    /// Returns whether the mount has not returned yet.
    pub fn is_absent(&self) -> bool {
        self.state.lock().absent_until.is_some()
    }

    /// Restarts the time for which an absent mount's kernel may believe its cache.
    ///
    /// Until now the mount could still hold leases from before the start.
    pub fn renew_absence(&self) {
        let mut state = self.state.lock();
        if state.absent_until.is_some() {
            state.absent_until = Some(Instant::now() + self.ttl);
        }
    }

    /// Connects the mount's device when it registers or returns.
    ///
    /// The thread begins with the queued notifications.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn connect(self: &Arc<Self>, device: MountDevice) -> std::io::Result<()> {
        let mut state = self.state.lock();
        if !state.has_worker {
            let worker = Arc::clone(self);
            let thread = std::thread::Builder::new().name("notify".into()).stack_size(256 << 10);
            thread.spawn(move || worker.run())?;
            state.has_worker = true;
        }
        *self.device.lock() = Some(Arc::new(device));
        state.absent_until = None;
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until pages of a file are dropped.
    ///
    /// It waits no longer than the kernel may keep them.
    fn wait_pages(&self, inode: InodeId) {
        let deadline = Instant::now() + self.ttl;
        let mut state = self.state.lock();
        while state.owes_pages(inode) && !self.changed.wait_until(&mut state, deadline).timed_out() {}
    }

    /// Ends the thread and closes the device; returns whether there was a device.
    ///
    /// If the mount's process is dead (`cut_off`), all processes that wait for its answers fail now. A living mount's
    /// kernel first receives the queued notifications.
    pub fn stop(&self, cut_off: bool) -> bool {
        if !cut_off && !self.is_absent() {
            self.write_queued(Instant::now() + self.ttl);
        }
        self.state.lock().ended = true;
        self.changed.notify_all();
        let device = self.device.lock().take();
        if let (true, Some(device)) = (cut_off, &device) {
            device.abort();
        }
        device.is_some()
    }

    /// Writes the queued notifications of attributes to the kernel.
    ///
    /// Until `deadline` at most, it waits for another thread that does so, or for a mount to return.
    fn write_queued(&self, deadline: Instant) {
        let Some(_writing) = self.writing.try_lock_until(deadline) else { return };
        let mut state = self.state.lock();
        while state.absent_until.is_some() {
            if state.ended || self.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
        let batch: Vec<StaleCache> = state.queue.drain(..).collect();
        let upto = state.queued;
        drop(state);
        let device = self.device.lock().clone();
        if let Some(device) = device {
            for stale in &batch {
                // A mount that is gone has nothing to forget.
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

    fn run(&self) {
        loop {
            let mut state = self.state.lock();
            while state.queue.is_empty() && state.pages.is_empty() && !state.ended {
                self.changed.wait(&mut state);
            }
            if state.ended {
                return;
            }
            let is_all_written = state.queue.is_empty();
            let pages = if is_all_written { state.pages.pop_first() } else { None };
            state.dropping = pages;
            drop(state);
            self.write_queued(Instant::now() + self.ttl);
            let device = self.device.lock().clone();
            if let (Some(inode), Some(device)) = (pages, device) {
                let _ = inval_inode(&device.line.to(device.file.as_fd()), inode, Pages::ALL);
                self.state.lock().dropping = None;
                self.changed.notify_all();
            }
        }
    }
}

impl KernelNotifier for Notifier {
    fn begin_revocation(&self) {
        let mut state = self.state.lock();
        state.is_owing = true;
        (self.note_stale)(boot_time() + self.ttl);
    }

    fn queue_stale(self: Arc<Self>, before: &[StaleCache], stale: StaleCache) -> Arc<dyn KernelTicket> {
        let all = || before.iter().chain([&stale]);
        let mut state = self.state.lock();
        let until = boot_time() + self.ttl;
        (self.note_stale)(until);
        state.is_owing = false;
        let overflow = state.queue.len() + before.len() >= QUEUE_MAX;
        if overflow {
            state.lost_until = until;
            state.queue.clear();
            state.queue.push_back(StaleCache { inode: InodeId::ROOT, data: false, subtree: true });
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
        Arc::new(NotificationTicket {
            notifier: Arc::clone(&self),
            number: state.queued,
            stale,
            needs_time: overflow,
            deadline: state.absent_until.unwrap_or_else(|| Instant::now() + self.ttl),
        })
    }

    fn owes_pages(&self, inode: InodeId) -> bool {
        self.state.lock().owes_pages(inode)
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl NotifierState {
    fn owes_pages(&self, inode: InodeId) -> bool {
        !self.ended && (self.dropping == Some(inode) || self.pages.contains(&inode))
    }
}

impl NotificationTicket {
    fn is_written(&self, state: &NotifierState) -> bool {
        state.ended || state.written >= self.number && !self.needs_time
    }

    /// Waits until the kernel has forgotten the state, or may not believe it any more.
    fn wait(&self) {
        let is_due = {
            let state = self.notifier.state.lock();
            !state.ended && state.written < self.number
        };
        if is_due {
            self.notifier.write_queued(self.deadline);
        }
        let mut state = self.notifier.state.lock();
        loop {
            if self.is_written(&state) || self.notifier.changed.wait_until(&mut state, self.deadline).timed_out() {
                return;
            }
        }
    }
}

impl KernelTicket for NotificationTicket {
    fn stale(&self) -> StaleCache {
        self.stale
    }

    fn is_done(&self) -> bool {
        self.is_written(&self.notifier.state.lock()) || Instant::now() >= self.deadline
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Returns the notifier of a mount, as this shell made it.
pub fn notifier_of(notifier: &Arc<dyn KernelNotifier>) -> Option<Arc<Notifier>> {
    Arc::clone(notifier).into_any().downcast().ok()
}

/// Waits until no kernel believes anything that an answer makes untrue.
pub fn await_gate(gate: AnswerGate) {
    std::thread::sleep(gate.not_before.saturating_sub(boot_time()));
    for ticket in gate.tickets {
        if let Ok(ticket) = ticket.into_any().downcast::<NotificationTicket>() {
            ticket.wait();
        }
    }
    for (notifier, inode) in gate.pages {
        if let Some(notifier) = notifier_of(&notifier) {
            notifier.wait_pages(inode);
        }
    }
}

impl MountDevice {
    /// Makes the device of a mount whose files show the device number `shown`.
    pub fn new(file: OwnedFd, shown: u64, helper: &Arc<Helper>) -> Self {
        Self { file, shown, line: Line::new(Arc::clone(helper)) }
    }

    /// Returns whether it's a FUSE device whose mount is still there.
    ///
    /// The kernel reuses the number of a mount that is gone.
    fn is_connected(&self) -> bool {
        const FUSE: (u32, u32) = (10, 229);
        let is_fuse = |found: Stat| (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev)) == FUSE;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
        rustix::fs::fstat(&self.file).is_ok_and(is_fuse)
            && poll(&mut fds, Some(&now)).is_ok()
            && !fds[0].revents().contains(PollFlags::ERR)
    }

    /// Ends the connection if its mount is still there.
    ///
    /// Other processes may have the device too.
    fn abort(&self) {
        // Once SharedFS closes its copy, the connection most often ends too.
        if self.is_connected()
            && let Err(error) = end_connection(self.shown)
        {
            tracing::debug!(%error, device = self.shown, "a dead mount's connection can't be aborted");
        }
    }
}

/// Ends the connection of a dead process's mount of this arena.
///
/// The mount's files showed this device number. A helper that waits for one of its requests still has its device, and
/// the mount's users would wait for ever.
pub fn abort_dead_mount(shown: u64, arena: &Path) {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let device = format!("{}:{}", rustix::fs::major(shown), rustix::fs::minor(shown));
    // The kernel reuses the number of a mount that is gone.
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
    const STALE: StaleCache = StaleCache { inode: InodeId(77), data: true, subtree: false };

    /// A socket in place of a device, without a helper.
    fn device(socket: UnixStream) -> MountDevice {
        MountDevice::new(socket.into(), 0, &Arc::new(Helper::new(Vec::new())))
    }

    fn queue(notifier: &Arc<Notifier>) -> Arc<NotificationTicket> {
        Arc::clone(notifier).queue_stale(&[], STALE).into_any().downcast().expect("its own ticket")
    }

    fn message(kernel: &mut UnixStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        kernel.read_exact(&mut bytes).expect("a notification");
        assert_eq!(usize::from(bytes[0]), length);
        bytes
    }

    #[test]
    fn attributes_are_notified_at_once_pages_after() {
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        let notifier = Notifier::start(device(ours), Duration::from_secs(60), Box::new(|_| {})).expect("started");
        let start = Instant::now();
        queue(&notifier).wait();
        assert!(start.elapsed() < Duration::from_secs(30), "a kernel that takes it causes no delay");
        let attributes = message(&mut kernel, 40);
        assert_eq!((attributes[4], attributes[16], attributes[24]), (INVAL_INODE as u8, 77, 0xff));
        kernel.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        let pages = message(&mut kernel, 40);
        assert_eq!((pages[4], pages[16], pages[24]), (INVAL_INODE as u8, 77, 0));
        notifier.stop(false);
    }

    #[test]
    fn stale_note_lasts_until_all_is_notified() {
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
        assert_eq!(noted.load(SeqCst), 0, "all notifications are written");
        notifier.begin_revocation();
        notifier.write_queued(Instant::now());
        assert_ne!(noted.load(SeqCst), 0, "a lease is being taken");
        queue(&notifier).wait();
        assert_eq!(noted.load(SeqCst), 0);
        notifier.stop(false);
    }

    #[test]
    fn stale_note_of_earlier_sharedfs_stays() {
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
        notifier.stop(false);
    }

    #[test]
    fn returning_mount_gets_queued_notifications() {
        let notifier = Notifier::absent(Duration::from_secs(60), Duration::ZERO, Box::new(|_| {}));
        let ticket = queue(&notifier);
        assert!(!ticket.is_done());
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ticket.wait());
            notifier.connect(device(ours)).expect("started");
            waiting.join().expect("no panic");
            kernel.set_nonblocking(true).expect("set");
            assert_eq!(message(&mut kernel, 40)[24], 0xff, "the waiting thread goes on after the notification");
        });
        notifier.stop(false);
    }

    #[test]
    fn absent_mount_is_awaited_for_cache_ttl() {
        let ttl = Duration::from_millis(50);
        let (start, notifier) = (Instant::now(), Notifier::absent(ttl, Duration::ZERO, Box::new(|_| {})));
        queue(&notifier).wait();
        assert!(start.elapsed() >= ttl);
        assert!(queue(&notifier).is_done(), "the kernel no longer believes its cache from before the restart");
        notifier.stop(false);
    }

    #[test]
    fn ended_mount_delays_no_ticket_and_closes_device() {
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        let notifier = Notifier::start(device(ours), Duration::from_secs(60), Box::new(|_| {})).expect("started");
        for _ in 0..QUEUE_MAX {
            queue(&notifier);
        }
        let ticket = queue(&notifier);
        let is_waited_for = !ticket.is_done();
        notifier.stop(true);
        let start = Instant::now();
        ticket.wait();
        assert!(!is_waited_for || start.elapsed() < Duration::from_secs(30));
        kernel.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        kernel.read_to_end(&mut Vec::new()).expect("the end of the stream");
    }

    #[test]
    fn socket_is_no_connected_device() {
        let (ours, _theirs) = UnixStream::pair().expect("sockets");
        assert!(!device(ours).is_connected());
    }
}
