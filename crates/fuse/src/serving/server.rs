//! The threads that serve a mount, and the state that they share.
//!
//! A few threads take requests from the device and answer them, each with its own buffers, which are used again and
//! again. One of them waits for requests, and the others join in when there is more than one request to serve
//! ([`DeviceTurn`]). All of them may be held up, by a lease that must first come from another session or by a disk's
//! `fsync`. Then one more thread is started for the time.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Duration;

use ashlar_helper::{Helper, Line};
use ashlar_types::{Errno, InodeId};
use ashlar_wire::BusyWait;

use crate::callers::report_runs::ReportRuns;
use crate::callers::watches::Watches;
use crate::connection::device::{FuseDevice, REQUEST_BYTES, SendOutcome, TRANSFER_BYTES};
use crate::connection::negotiate::Agreement;
use crate::connection::notify::Pages;
use crate::connection::reply_buffer::{CachedItem, ReplyBuffer};
use crate::connection::reply_route::ReplyRoute;
use crate::file_system::FileSystem;
use crate::kernel_cache::dentry_ttl::DentryTtls;
use crate::kernel_cache::estale_retry::EstaleRetries;
use crate::kernel_cache::invalidation::{Invalidations, StaleItem};
use crate::kernel_cache::mappable::MappableFiles;
use crate::kernel_cache::page_fills::PageFills;
use crate::kernel_cache::shown_directories::ShownDirectories;
use crate::operations::dispatch::{FuseRequest, ReplyAction, RequestResult};
use crate::operations::locks::Locks;
use crate::operations::write_handles::WriteHandles;
use crate::proto::{Arguments, InHeader, Opcode};
use crate::serving::device_turn::DeviceTurn;
use crate::serving::ring_workers::RingWorkers;

/// The most threads that serve at once. The kernel has at most as many requests in flight as threads wait in it. More
/// threads than these would wait for the same leases.
const WORKERS_MAX: usize = 16;
/// How long all threads must be held up, without finishing a request, before one more is started.
const HELD_UP: Duration = Duration::from_millis(2);
/// After so many rounds without a finished request, the supervisor sleeps until it is woken. Waking it takes as long as
/// many requests, so it does not fall asleep in a short pause of a program.
const QUIET_ROUNDS: u32 = 50;
/// One more thread joins when so many requests in a row left others behind them in the queue. A single client causes
/// that too, since no process waits for RELEASE and FORGET, but not so often in a row.
const QUEUED_IN_A_ROW: u32 = 4;
/// A request longer than this, in bytes, makes one more thread join at once if others are queued: it takes long.
const LONG_REQUEST: u32 = 64 << 10;

/// A mount's state, which all its threads share.
#[derive(Debug)]
pub(crate) struct Server<F> {
    pub(crate) file_system: Arc<F>,
    pub(crate) device: FuseDevice,
    pub(crate) locks: Locks,
    pub(crate) invalidations: Invalidations,
    pub(crate) page_fills: PageFills,
    pub(crate) mappable: MappableFiles,
    pub(crate) write_handles: WriteHandles,
    pub(crate) agreement: Agreement,
    pub(crate) shown_directories: ShownDirectories,
    pub(crate) dentry_ttls: DentryTtls,
    pub(crate) estale_retries: EstaleRetries,
    pub(crate) report_runs: ReportRuns,
    pub(crate) watches: Watches,
    pub(crate) ring_workers: RingWorkers,
    /// Notifications that may wait: pages and single names.
    pub(crate) forgetting: Line,
    /// Notifications for all names that the kernel keeps, for which a new session waits.
    expiring: Line,
    /// The number of the next handle, without its flags.
    pub(crate) next_handle: AtomicU64,
    workers: Workers,
}

#[derive(Debug, Default)]
struct Workers {
    /// How many threads serve when none is held up.
    base: usize,
    count: AtomicUsize,
    turn: DeviceTurn,
    /// Requests finished so far.
    finished: AtomicU64,
    /// Whether the supervisor is awake.
    watched: AtomicBool,
    closed: AtomicBool,
    supervisor: OnceLock<Thread>,
}

impl Workers {
    fn wake_supervisor(&self) {
        if let Some(supervisor) = self.supervisor.get() {
            supervisor.unpark();
        }
    }

    /// Ends a turn. Until another thread takes the next one, the supervisor checks whether that takes too long.
    fn end_waiting(&self) {
        self.turn.give_back();
        if !self.watched.load(Ordering::SeqCst) && !self.watched.swap(true, Ordering::SeqCst) {
            self.wake_supervisor();
        }
    }

    /// Whether a worker that has just finished may end: enough others are ready.
    fn is_spare(&self) -> bool {
        self.count.load(Ordering::Relaxed) > self.base && self.turn.ready_count() >= self.base
    }
}

/// Counts a worker out, however it ends.
struct WorkerGuard<'a>(&'a Workers);

impl Drop for WorkerGuard<'_> {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.wake_supervisor();
        }
    }
}

impl<F: FileSystem> Server<F> {
    pub(crate) fn new(
        file_system: Arc<F>,
        device: FuseDevice,
        threads: usize,
        (agreement, ring_workers): (Agreement, RingWorkers),
        helper: Helper,
    ) -> Self {
        let helper = Arc::new(helper);
        // If the mount has rings, few requests come from the device.
        let threads = if ring_workers.are_any() { 1 } else { threads };
        let workers = Workers { base: threads.clamp(1, WORKERS_MAX), ..Workers::default() };
        Self {
            file_system,
            device,
            locks: Locks::default(),
            invalidations: Invalidations::default(),
            page_fills: PageFills::default(),
            mappable: MappableFiles::default(),
            write_handles: WriteHandles::default(),
            agreement,
            shown_directories: ShownDirectories::default(),
            dentry_ttls: DentryTtls::default(),
            estale_retries: EstaleRetries::default(),
            report_runs: ReportRuns::default(),
            watches: Watches::default(),
            ring_workers,
            forgetting: Line::new(Arc::clone(&helper)),
            expiring: Line::new(helper),
            next_handle: AtomicU64::new(0),
            workers,
        }
    }

    /// Makes the kernel ask for an inode's attributes again, at once. Unlike all other invalidations this never waits
    /// for a lock of the kernel, so a serving thread may do it.
    pub(crate) fn forget_attributes(&self, inode: InodeId) {
        let device = std::os::fd::AsFd::as_fd(&self.device);
        if let Err(errno) =
            crate::connection::notify::inval_inode(&device, inode, crate::connection::notify::Pages::Keep)
        {
            tracing::debug!(inode = inode.0, %errno, "the kernel keeps its attributes until they expire");
        }
    }

    /// Serves until the mount is gone, whose files show the device number `device_number`. The calling thread
    /// supervises the others.
    pub(crate) fn run(self: &Arc<Self>, device_number: u64) -> std::io::Result<()> {
        let _ = self.workers.supervisor.set(std::thread::current());
        self.device.set_nonblocking()?;
        let invalidating = Arc::clone(self);
        let forgetting = std::thread::Builder::new().name("ashlar-forget".into()).spawn(move || {
            invalidating.invalidations.run_tasks(|task| invalidating.carry_out_task(task));
        })?;
        self.start_name_invalidation(device_number)?;
        self.start_watch_search(device_number)?;
        let mut started = self.start_cores();
        for _ in 0..self.workers.base {
            started = started.and_then(|()| self.start_worker());
        }
        if started.is_ok() || self.workers.count.load(Ordering::Acquire) > 0 {
            self.supervise();
            started = Ok(());
        }
        self.locks.cancel_all(self);
        self.invalidations.close();
        self.ring_workers.join_threads();
        // If it panicked, that has been reported, and nothing is left that it could harm.
        let _ = forgetting.join();
        started
    }

    /// Starts the thread that makes the kernel forget names when the mount is no longer the sole mount. The thread ends
    /// with the process, and keeps nothing of the mount but its file system.
    fn start_name_invalidation(self: &Arc<Self>, device_number: u64) -> std::io::Result<()> {
        let (file_system, server) = (Arc::clone(&self.file_system), Arc::downgrade(self));
        let mut known = file_system.company();
        let watch = move || {
            loop {
                file_system.wait_company(known);
                let Some(server) = server.upgrade() else { return };
                let company = file_system.company();
                if company == known {
                    continue;
                }
                known = company;
                if file_system.is_shared() {
                    // The new session waits until this is done.
                    server.watches.search_all(&*file_system, device_number);
                    server.drop_mappable_pages();
                    if server.forget_names() {
                        file_system.confirm_names_dropped(company);
                    }
                }
            }
        };
        std::thread::Builder::new().name("ashlar-company".into()).spawn(watch).map(drop)
    }

    /// Makes the kernel write back and forget pages of files that programs may have mapped for writing. No other
    /// session existed when those were filled, so the files are not reserved. The next touch fills the pages anew.
    pub(crate) fn drop_mappable_pages(&self) {
        let device = std::os::fd::AsFd::as_fd(&self.device);
        for inode in self.mappable.inodes() {
            if let Err(errno) = crate::connection::notify::inval_inode(&self.expiring.to(device), inode, Pages::ALL) {
                tracing::debug!(inode = inode.0, %errno, "the kernel has no pages to forget");
            }
        }
    }

    /// Starts the thread that searches for watches on the mount. It ends with the process, and keeps nothing of the
    /// mount but its file system.
    fn start_watch_search(self: &Arc<Self>, device_number: u64) -> std::io::Result<()> {
        let (file_system, server) = (Arc::clone(&self.file_system), Arc::downgrade(self));
        let search = move || {
            loop {
                let Some(server) = server.upgrade() else { return };
                let pause = server.watches.search_while_used(&*file_system, device_number);
                drop(server);
                match pause {
                    Some(pause) => std::thread::sleep(pause),
                    None => file_system.wait_programs(),
                }
            }
        };
        std::thread::Builder::new().name("ashlar-watches".into()).spawn(search).map(drop)
    }

    /// Makes the kernel forget all names that it keeps. Returns whether it could.
    fn forget_names(&self) -> bool {
        if !self.agreement.expires() {
            return false;
        }
        // Names may be exchanged while the first call waits for their directories. They are recorded meanwhile, and the
        // second call forgets them.
        self.forget_recorded_names() && self.forget_recorded_names()
    }

    fn forget_recorded_names(&self) -> bool {
        let (names, lost_until) = self.dentry_ttls.take_names();
        let device = std::os::fd::AsFd::as_fd(&self.device);
        let entries = names.iter().map(|(directory, name)| (*directory, &**name));
        if let Err(errno) = crate::connection::notify::expire_entries(&self.expiring.to(device), entries) {
            tracing::debug!(%errno, "the kernel keeps a name until it expires");
            return false;
        }
        lost_until.is_none()
    }

    fn start_worker(self: &Arc<Self>) -> std::io::Result<()> {
        self.workers.count.fetch_add(1, Ordering::AcqRel);
        let server = Arc::clone(self);
        let thread = std::thread::Builder::new().name("ashlar-fuse".into());
        let spawned = thread.spawn(move || {
            let _guard = WorkerGuard(&server.workers);
            DeviceWorker::new(&server).run();
        });
        if spawned.is_err() {
            self.workers.count.fetch_sub(1, Ordering::AcqRel);
        }
        spawned.map(|_| ())
    }

    /// Waits for the workers' end. While all of them are held up, starts more. On an idle machine it never wakes.
    fn supervise(self: &Arc<Self>) {
        let workers = &self.workers;
        let (mut finished, mut quiet_rounds) = (0, 0);
        while workers.count.load(Ordering::Acquire) > 0 {
            if !workers.watched.load(Ordering::SeqCst) {
                std::thread::park();
                continue;
            }
            std::thread::park_timeout(HELD_UP);
            let before = std::mem::replace(&mut finished, workers.finished.load(Ordering::Relaxed));
            if workers.turn.is_taken() {
                quiet_rounds = if finished == before { quiet_rounds + 1 } else { 0 };
                if quiet_rounds >= QUIET_ROUNDS {
                    quiet_rounds = 0;
                    workers.watched.store(false, Ordering::SeqCst);
                    // A worker that ended its turn before that store has not woken this thread.
                    if !workers.turn.is_taken() {
                        workers.watched.store(true, Ordering::SeqCst);
                    }
                }
                continue;
            }
            if finished != before || workers.closed.load(Ordering::Relaxed) || workers.turn.call_standby() {
                continue;
            }
            if workers.count.load(Ordering::Relaxed) < WORKERS_MAX {
                if let Err(error) = self.start_worker() {
                    tracing::warn!(%error, "no further thread could be started to serve the mount");
                }
            }
        }
    }
}

/// One thread that serves, and its buffers.
struct DeviceWorker<'a, F> {
    server: &'a Arc<Server<F>>,
    request: Vec<u8>,
    reply: ReplyBuffer,
    /// How many requests in a row left others behind them in the queue.
    queued: Cell<u32>,
    watch: BusyWait,
}

impl<'a, F: FileSystem> DeviceWorker<'a, F> {
    fn new(server: &'a Arc<Server<F>>) -> Self {
        Self {
            server,
            request: vec![0; REQUEST_BYTES],
            reply: ReplyBuffer::new(TRANSFER_BYTES),
            queued: Cell::new(0),
            // If the mount has rings, no process waits for the requests that come from the device.
            watch: if server.ring_workers.are_any() { BusyWait::never() } else { BusyWait::default() },
        }
    }

    fn run(&mut self) {
        let workers = &self.server.workers;
        while workers.turn.take_turn() {
            let received = self.server.device.receive(&mut self.request, &mut self.watch);
            workers.end_waiting();
            match received {
                Ok(Some(length)) => self.serve(length),
                Ok(None) => {
                    workers.turn.close();
                    break;
                }
                Err(errno) => {
                    tracing::error!(%errno, "the kernel gave no request; this thread ends");
                    workers.turn.call_standby();
                    break;
                }
            }
            workers.finished.fetch_add(1, Ordering::Relaxed);
            if workers.is_spare() {
                return;
            }
        }
        workers.closed.store(true, Ordering::Relaxed);
    }

    /// Makes one more thread join if there is work for it.
    fn share_work(&self, header: &InHeader) {
        let workers = &self.server.workers;
        if !workers.turn.has_standby() {
            return;
        }
        let waits = matches!(
            Opcode::from_u32(header.opcode),
            Some(Opcode::Fsync | Opcode::Fsyncdir | Opcode::Syncfs | Opcode::Fallocate | Opcode::CopyFileRange)
        );
        let queued = if self.server.device.has_request() { self.queued.get() + 1 } else { 0 };
        let is_long = queued > 0 && header.len > LONG_REQUEST;
        let rings = waits || is_long || queued >= QUEUED_IN_A_ROW;
        if rings {
            workers.turn.call_standby();
        }
        self.queued.set(if rings { 0 } else { queued });
    }

    fn serve(&mut self, length: usize) {
        let server = self.server;
        let request = self.request.get(..length).unwrap_or_default();
        let Some((header, arguments)) = split_request(request) else { return };
        self.share_work(&header);
        let answer = server.carry_out(header, arguments, &mut self.reply, &ReplyRoute::ToDevice);
        if matches!(answer, Ok(ReplyAction::NoReply | ReplyAction::SendLater)) {
            return;
        }
        let reply = self.reply.seal(header.unique, answer.map(drop));
        match server.device.send(reply) {
            Ok(SendOutcome::Taken) => server.recheck_cached(request, &self.reply),
            Ok(SendOutcome::Unwanted) => {
                if let Ok(ReplyAction::SendOpened(inode, handle)) = answer {
                    server.close_handle(inode, handle);
                }
            }
            Err(errno) => tracing::error!(opcode = header.opcode, %errno, "the kernel took no answer"),
        }
        server.end_answer(&mut self.reply);
    }
}

/// Splits a request into its header and its arguments.
pub(crate) fn split_request(request: &[u8]) -> Option<(InHeader, Arguments<'_>)> {
    let mut arguments = Arguments::new(request);
    let header = arguments.structure::<InHeader>();
    if header.is_err() {
        tracing::error!(length = request.len(), "the kernel sent a request without a header");
    }
    Some((header.ok()?, arguments))
}

impl<F: FileSystem> Server<F> {
    /// Carries a request out. If it succeeds, the reply lists the items that the kernel may keep. They have to be
    /// checked once the reply is sent ([`Self::recheck_cached`]).
    pub(crate) fn carry_out(
        self: &Arc<Self>,
        header: InHeader,
        arguments: Arguments<'_>,
        reply: &mut ReplyBuffer,
        route: &ReplyRoute,
    ) -> RequestResult {
        reply.clear();
        self.report_runs.count_request(&header);
        let answer = FuseRequest { server: self, header, arguments, reply: &mut *reply, route }.dispatch();
        self.track_estale_retry(&header, answer);
        if matches!(answer, Ok(ReplyAction::NoReply | ReplyAction::SendLater)) {
            self.end_answer(reply);
        }
        answer
    }

    /// Tracks retries: records a thread whose request fails with `ESTALE`, and ends a thread's retry. Between the
    /// look-up and the end of a retry come requests about rights.
    fn track_estale_retry(&self, header: &InHeader, answer: RequestResult) {
        let is_between = || {
            let between = [Opcode::Lookup, Opcode::Getattr, Opcode::Getxattr, Opcode::Forget, Opcode::BatchForget];
            Opcode::from_u32(header.opcode).is_none_or(|opcode| between.contains(&opcode))
        };
        let closed = match answer {
            Err(Errno::ESTALE) => self.estale_retries.record_estale(header.pid),
            _ if self.estale_retries.is_any() && !is_between() => self.estale_retries.end_retry(header.pid),
            _ => return,
        };
        closed.into_iter().for_each(|inode| self.file_system.close(inode));
    }

    /// Checks whether the items that the kernel caches of a reply still hold. If a lease was lost since, SharedFS made
    /// the kernel forget the item before the reply came. So the kernel is made to forget it once more.
    pub(crate) fn recheck_cached(&self, request: &[u8], reply: &ReplyBuffer) {
        let mut last = (InodeId(0), true);
        let mut holds = |inode: InodeId| {
            if last.0 != inode {
                last = (inode, self.file_system.is_valid(inode));
            }
            last.1
        };
        let forget = |stale| self.invalidations.push_stale(stale);
        let named = |item: &CachedItem| match item {
            CachedItem::Name(directory, place) => Some((*directory, request.get(place.clone()).unwrap_or_default())),
            CachedItem::Listed(directory, _, place) => Some((*directory, reply.body(place.clone()))),
            CachedItem::Attributes(_) | CachedItem::Pages(_) => None,
        };
        if reply.has_name_ttls {
            let ttl = Duration::from_millis(self.file_system.cache_ttl_max_ms());
            self.dentry_ttls.record_names(reply.cached_items().iter().filter_map(named), ttl);
        }
        for item in reply.cached_items() {
            if let Some((directory, name)) = named(item).filter(|(directory, _)| !holds(*directory)) {
                forget(StaleItem::Entry(directory, name.into()));
            }
            match item {
                CachedItem::Attributes(inode) if !holds(*inode) => self.forget_attributes(*inode),
                CachedItem::Pages(inode) if !holds(*inode) => forget(StaleItem::Inode(*inode, Pages::ALL)),
                // This does not use `holds`: that would then remember the entries, and ask for the directory again for
                // each.
                CachedItem::Listed(_, inode, _) if !self.file_system.is_valid(*inode) => {
                    self.forget_attributes(*inode);
                }
                CachedItem::Attributes(_) | CachedItem::Pages(_) | CachedItem::Name(..) | CachedItem::Listed(..) => {}
            }
        }
    }

    /// Ends the work on a reply.
    pub(crate) fn end_answer(&self, reply: &mut ReplyBuffer) {
        if std::mem::take(&mut reply.has_name_ttls) {
            self.dentry_ttls.end_answer();
        }
    }
}
