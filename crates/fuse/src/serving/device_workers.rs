//! The threads that take requests from the device.
//!
//! Each has its own buffers, which are used again and again. One of them waits for requests, and the others join in
//! when there is more than one request to serve ([`DeviceTurn`]). All of them may be held up, by a lease that must
//! first come from another session or by a disk's `fsync`. Then one more thread is started for the time.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use ashlar_wire::BusyWait;

use crate::connection::device::{REQUEST_BYTES, SendOutcome, TRANSFER_BYTES};
use crate::connection::reply_buffer::ReplyBuffer;
use crate::connection::reply_route::ReplyRoute;
use crate::file_system::FileSystem;
use crate::operations::dispatch::{carry_out, split_request};
use crate::operations::open_files::close_handle;
use crate::operations::request::ReplyAction;
use crate::proto::{InHeader, Opcode};
use crate::serving::device_turn::DeviceTurn;
use crate::state::mount_state::MountState;

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

/// The threads that read requests from the device.
#[derive(Debug, Default)]
pub(crate) struct DeviceWorkers {
    /// How many threads serve when none is held up.
    base: usize,
    /// Whether most requests come by rings.
    has_rings: bool,
    count: AtomicUsize,
    turn: DeviceTurn,
    /// Requests finished so far.
    finished: AtomicU64,
    /// Whether the supervisor is awake.
    watched: AtomicBool,
    closed: AtomicBool,
    supervisor: OnceLock<Thread>,
}

impl DeviceWorkers {
    /// Makes `threads` of them, or one if the mount has rings: few requests come from the device then.
    pub(crate) fn new(threads: usize, has_rings: bool) -> Self {
        let base = if has_rings { 1 } else { threads.clamp(1, WORKERS_MAX) };
        Self { base, has_rings, ..Self::default() }
    }

    /// Serves until the mount is gone. The calling thread supervises the others.
    pub(crate) fn run<F: FileSystem>(self: &Arc<Self>, mount: &Arc<MountState<F>>) -> std::io::Result<()> {
        let _ = self.supervisor.set(std::thread::current());
        let started = (0..self.base).try_for_each(|_| self.start_worker(mount));
        if started.is_err() && self.count.load(Ordering::Acquire) == 0 {
            return started;
        }
        self.supervise(mount);
        Ok(())
    }

    fn start_worker<F: FileSystem>(self: &Arc<Self>, mount: &Arc<MountState<F>>) -> std::io::Result<()> {
        self.count.fetch_add(1, Ordering::AcqRel);
        let (mount, workers) = (Arc::clone(mount), Arc::clone(self));
        let thread = std::thread::Builder::new().name("ashlar-fuse".into());
        let spawned = thread.spawn(move || {
            let _guard = WorkerGuard(&workers);
            DeviceWorker::new(&mount, &workers).run();
        });
        if spawned.is_err() {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
        spawned.map(|_| ())
    }

    /// Waits for the workers' end. While all of them are held up, starts more. On an idle machine it never wakes.
    fn supervise<F: FileSystem>(self: &Arc<Self>, mount: &Arc<MountState<F>>) {
        let (mut finished, mut quiet_rounds) = (0, 0);
        while self.count.load(Ordering::Acquire) > 0 {
            if !self.watched.load(Ordering::SeqCst) {
                std::thread::park();
                continue;
            }
            std::thread::park_timeout(HELD_UP);
            let before = std::mem::replace(&mut finished, self.finished.load(Ordering::Relaxed));
            if self.turn.is_taken() {
                quiet_rounds = if finished == before { quiet_rounds + 1 } else { 0 };
                if quiet_rounds >= QUIET_ROUNDS {
                    quiet_rounds = 0;
                    self.watched.store(false, Ordering::SeqCst);
                    // A worker that ended its turn before that store has not woken this thread.
                    if !self.turn.is_taken() {
                        self.watched.store(true, Ordering::SeqCst);
                    }
                }
                continue;
            }
            if finished != before || self.closed.load(Ordering::Relaxed) || self.turn.call_standby() {
                continue;
            }
            if self.count.load(Ordering::Relaxed) < WORKERS_MAX {
                if let Err(error) = self.start_worker(mount) {
                    tracing::warn!(%error, "no further thread could be started to serve the mount");
                }
            }
        }
    }

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
struct WorkerGuard<'a>(&'a DeviceWorkers);

impl Drop for WorkerGuard<'_> {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.wake_supervisor();
        }
    }
}

/// One thread that serves, and its buffers.
struct DeviceWorker<'a, F> {
    mount: &'a Arc<MountState<F>>,
    workers: &'a DeviceWorkers,
    request: Vec<u8>,
    reply: ReplyBuffer,
    /// How many requests in a row left others behind them in the queue.
    queued: Cell<u32>,
    watch: BusyWait,
}

impl<'a, F: FileSystem> DeviceWorker<'a, F> {
    fn new(mount: &'a Arc<MountState<F>>, workers: &'a DeviceWorkers) -> Self {
        Self {
            mount,
            workers,
            request: vec![0; REQUEST_BYTES],
            reply: ReplyBuffer::new(TRANSFER_BYTES),
            queued: Cell::new(0),
            // If the mount has rings, no process waits for the requests that come from the device.
            watch: if workers.has_rings { BusyWait::never() } else { BusyWait::default() },
        }
    }

    fn run(&mut self) {
        let workers = self.workers;
        while workers.turn.take_turn() {
            let received = self.mount.device.receive(&mut self.request, &mut self.watch);
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
        let workers = self.workers;
        if !workers.turn.has_standby() {
            return;
        }
        let waits = matches!(
            Opcode::from_u32(header.opcode),
            Some(Opcode::Fsync | Opcode::Fsyncdir | Opcode::Syncfs | Opcode::Fallocate | Opcode::CopyFileRange)
        );
        let queued = if self.mount.device.has_request() { self.queued.get() + 1 } else { 0 };
        let is_long = queued > 0 && header.len > LONG_REQUEST;
        let rings = waits || is_long || queued >= QUEUED_IN_A_ROW;
        if rings {
            workers.turn.call_standby();
        }
        self.queued.set(if rings { 0 } else { queued });
    }

    fn serve(&mut self, length: usize) {
        let mount = self.mount;
        let request = self.request.get(..length).unwrap_or_default();
        let Some((header, arguments)) = split_request(request) else { return };
        self.share_work(&header);
        let answer = carry_out(mount, header, arguments, &mut self.reply, &ReplyRoute::ToDevice);
        if matches!(answer, Ok(ReplyAction::NoReply | ReplyAction::SendLater)) {
            return;
        }
        let reply = self.reply.seal(header.unique, answer.map(drop));
        match mount.device.send(reply) {
            Ok(SendOutcome::Taken) => mount.kernel_cache.recheck_cached(request, &self.reply),
            Ok(SendOutcome::Unwanted) => {
                if let Ok(ReplyAction::SendOpened(inode, handle)) = answer {
                    close_handle(mount, inode, handle);
                }
            }
            Err(errno) => tracing::error!(opcode = header.opcode, %errno, "the kernel took no answer"),
        }
        mount.kernel_cache.end_answer(&mut self.reply);
    }
}
