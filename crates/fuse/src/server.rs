//! The threads that serve.
//!
//! A few threads take requests from the device and answer them, each with its own buffers, which are used again and again. When all
//! of them are held up (a lease that must first come from elsewhere, a disk's `fsync`), another one is started for the time.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Duration;

use ashlar_types::InodeId;

use crate::device::{Device, REQUEST_BYTES, Sent, TRANSFER_BYTES};
use crate::dispatch::{Answer, Call, Then};
use crate::file_system::FileSystem;
use crate::invalidate::{Invalidations, Stale};
use crate::locks::Locks;
use crate::notify::Pages;
use crate::proto::{Arguments, InHeader};
use crate::reply::{Check, Reply};

/// The most threads that serve at once; a kernel has at most as many requests in flight as there are threads in it that
/// wait, and more than these would wait for the same leases.
const WORKERS_MAX: usize = 16;
/// How long all threads must be held up, without finishing anything, before another is started.
const HELD_UP: Duration = Duration::from_millis(5);

/// A mount's state, which all its threads share.
#[derive(Debug)]
pub(crate) struct Server<F> {
    pub(crate) file_system: Arc<F>,
    pub(crate) device: Device,
    pub(crate) locks: Locks,
    pub(crate) invalidations: Invalidations,
    /// Whether SETXATTR requests have their extension.
    pub(crate) setxattr_extended: bool,
    workers: Workers,
}

#[derive(Debug, Default)]
struct Workers {
    /// How many there are when nothing is held up.
    base: usize,
    count: AtomicUsize,
    idle: AtomicUsize,
    /// Requests finished so far.
    finished: AtomicU64,
    /// Whether the supervisor was told that nobody is idle.
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

    fn begin_waiting(&self) {
        self.idle.fetch_add(1, Ordering::SeqCst);
    }

    fn end_waiting(&self) {
        let was_last = self.idle.fetch_sub(1, Ordering::SeqCst) == 1;
        if was_last && !self.watched.load(Ordering::SeqCst) && !self.watched.swap(true, Ordering::SeqCst) {
            self.wake_supervisor();
        }
    }

    /// Whether a worker that has just finished may go: those that are meant to be there stand ready.
    fn is_spare(&self) -> bool {
        self.count.load(Ordering::Relaxed) > self.base && self.idle.load(Ordering::Relaxed) >= self.base
    }
}

/// Counts a worker out, however it ends.
struct Counted<'a>(&'a Workers);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.wake_supervisor();
        }
    }
}

impl<F: FileSystem> Server<F> {
    pub(crate) fn new(file_system: Arc<F>, device: Device, threads: usize, setxattr_extended: bool) -> Self {
        let workers = Workers { base: threads.clamp(1, WORKERS_MAX), ..Workers::default() };
        Self {
            file_system,
            device,
            locks: Locks::default(),
            invalidations: Invalidations::default(),
            setxattr_extended,
            workers,
        }
    }

    /// Serves until the mount is gone. The calling thread looks after the others.
    pub(crate) fn run(self: &Arc<Self>) -> std::io::Result<()> {
        let _ = self.workers.supervisor.set(std::thread::current());
        let invalidating = Arc::clone(self);
        let forgetting = std::thread::Builder::new()
            .name("ashlar-forget".into())
            .spawn(move || invalidating.invalidations.run(std::os::fd::AsFd::as_fd(&invalidating.device)))?;
        let mut started = Ok(());
        for _ in 0..self.workers.base {
            started = started.and_then(|()| self.start_worker());
        }
        if started.is_ok() || self.workers.count.load(Ordering::Acquire) > 0 {
            self.supervise();
            started = Ok(());
        }
        self.locks.close(self);
        self.invalidations.close();
        // A panic there has been reported, and there is nothing left that it could harm.
        let _ = forgetting.join();
        started
    }

    fn start_worker(self: &Arc<Self>) -> std::io::Result<()> {
        self.workers.count.fetch_add(1, Ordering::AcqRel);
        let server = Arc::clone(self);
        let thread = std::thread::Builder::new().name("ashlar-fuse".into());
        let spawned = thread.spawn(move || {
            let _counted = Counted(&server.workers);
            Worker::new(&server).run();
        });
        if spawned.is_err() {
            self.workers.count.fetch_sub(1, Ordering::AcqRel);
        }
        spawned.map(|_| ())
    }

    /// Waits for the workers' end; while all of them are held up, starts more. On an idle machine it never wakes.
    fn supervise(self: &Arc<Self>) {
        let workers = &self.workers;
        while workers.count.load(Ordering::Acquire) > 0 {
            if !workers.watched.load(Ordering::SeqCst) {
                std::thread::park();
                continue;
            }
            let finished = workers.finished.load(Ordering::Relaxed);
            std::thread::park_timeout(HELD_UP);
            if workers.idle.load(Ordering::SeqCst) > 0 {
                workers.watched.store(false, Ordering::SeqCst);
                // Whoever became the last idle one before that store has told nobody.
                if workers.idle.load(Ordering::SeqCst) > 0 {
                    continue;
                }
                workers.watched.store(true, Ordering::SeqCst);
                continue;
            }
            let is_held_up = workers.finished.load(Ordering::Relaxed) == finished;
            let may_start = workers.count.load(Ordering::Relaxed) < WORKERS_MAX;
            if is_held_up && may_start && !workers.closed.load(Ordering::Relaxed) {
                if let Err(error) = self.start_worker() {
                    tracing::warn!(%error, "no further thread could be started to serve the mount");
                }
            }
        }
    }
}

/// One thread that serves, and its buffers.
struct Worker<'a, F> {
    server: &'a Arc<Server<F>>,
    request: Vec<u8>,
    reply: Reply,
}

impl<'a, F: FileSystem> Worker<'a, F> {
    fn new(server: &'a Arc<Server<F>>) -> Self {
        Self { server, request: vec![0; REQUEST_BYTES], reply: Reply::new(TRANSFER_BYTES) }
    }

    fn run(&mut self) {
        let workers = &self.server.workers;
        loop {
            workers.begin_waiting();
            let received = self.server.device.receive(&mut self.request);
            workers.end_waiting();
            match received {
                Ok(Some(length)) => self.serve(length),
                Ok(None) => break,
                Err(errno) => {
                    tracing::error!(%errno, "the kernel gave no request; this thread ends");
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

    fn serve(&mut self, length: usize) {
        self.reply.clear();
        let request = self.request.get(..length).unwrap_or_default();
        let mut arguments = Arguments::new(request);
        let Ok(header) = arguments.structure::<InHeader>() else {
            tracing::error!(length, "the kernel sent a request without a header");
            return;
        };
        let call = Call { server: self.server, header, arguments, reply: &mut self.reply };
        let answer = call.dispatch();
        if answer == Ok(Then::Silent) {
            return;
        }
        self.answer(header, length, answer);
    }

    fn answer(&mut self, header: InHeader, length: usize, answer: Answer) {
        let server = self.server;
        match server.device.send(self.reply.seal(header.unique, answer.map(|_| ()))) {
            Ok(Sent::Taken) => {}
            Ok(Sent::Unwanted) => {
                if let Ok(Then::SendOpened(inode)) = answer {
                    server.file_system.close(inode);
                }
                return;
            }
            Err(errno) => {
                tracing::error!(opcode = header.opcode, %errno, "the kernel took no answer");
                return;
            }
        }
        self.check(length);
    }

    /// Looks whether what the kernel caches of the reply still holds. If a lease was lost since, what SharedFS had the kernel
    /// forget came before the reply, so it's to be forgotten once more.
    fn check(&self, length: usize) {
        let request = self.request.get(..length).unwrap_or_default();
        let mut last = (InodeId(0), true);
        let mut holds = |inode: InodeId| {
            if last.0 != inode {
                last = (inode, self.server.file_system.is_valid(inode));
            }
            last.1
        };
        let forget = |stale| self.server.invalidations.push(stale);
        for check in self.reply.checks() {
            match check {
                Check::Attributes(inode) if !holds(*inode) => forget(Stale::Inode(*inode, Pages::Keep)),
                Check::Pages(inode) if !holds(*inode) => forget(Stale::Inode(*inode, Pages::ALL)),
                Check::Name(directory, place) if !holds(*directory) => {
                    forget(Stale::Entry(*directory, request.get(place.clone()).unwrap_or_default().into()));
                }
                Check::Listed(directory, inode, place) => {
                    if !holds(*directory) {
                        forget(Stale::Entry(*directory, self.reply.body(place.clone()).into()));
                    }
                    // Not by way of `holds`: it would then remember the entries, and ask for the directory again for each.
                    if !self.server.file_system.is_valid(*inode) {
                        forget(Stale::Inode(*inode, Pages::Keep));
                    }
                }
                Check::Attributes(_) | Check::Pages(_) | Check::Name(..) => {}
            }
        }
    }
}
