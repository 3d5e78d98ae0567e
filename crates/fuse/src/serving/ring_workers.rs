//! Threads that serve requests by rings: several for each core, bound to it.
//!
//! A request made on a core comes by that core's queue. The kernel just switches to a thread there and back: 3 us for a
//! request and its answer. A thread that reads from the device has to be woken on another core, which takes 20 to 100
//! us.
//!
//! Each thread has one entry, so the kernel gives it no request while it is at work. The kernel gives a request to the
//! entry that came last: as long as one thread of a core is enough, the others sleep. They help when that thread is
//! held up, by a lease that must first come from another session or by a disk's `fsync`. They also help when another
//! thread will answer its request: it then waits for that answer alone, and passes it on at once. When only one thread
//! of a core is left that waits for a request, one more is started.
//!
//! A request that finds no entry waits until an answer gives one back: a newly made entry does not bring it. So a
//! thread that is added later makes the kernel send a request about a regular file ([`notify::ask_kernel`]). If no
//! regular file is known yet, no process waits for a lock, and all other requests are answered before long.
//!
//! FORGET and INTERRUPT come from the device in any case.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use ashlar_types::InodeId;
use parking_lot::Mutex;

use crate::connection::device::{FuseDevice, TRANSFER_BYTES};
use crate::connection::notify;
use crate::connection::reply_buffer::ReplyBuffer;
use crate::connection::reply_route::ReplyRoute;
use crate::connection::ring::{FuseRing, RingEvent, WorkerInbox};
use crate::file_system::FileSystem;
use crate::operations::dispatch::{carry_out, split_request};
use crate::operations::request::ReplyAction;
use crate::proto::Opcode;
use crate::state::allowed_cores::{AllowedCores, bind_to_core};
use crate::state::mount_state::MountState;

/// Threads that each core has from the beginning.
const CORE_WORKERS: usize = 3;
/// Threads that a core has at most: more than the locks that may wait at once.
const CORE_WORKERS_MAX: usize = 256;
/// After so many requests in a row that move at least [`LARGE_BYTES`] each, a thread leaves its core. Such requests are
/// work that is better done on another core than the client's.
const LARGE_IN_A_ROW: u32 = 2;
const LARGE_BYTES: usize = 64 << 10;

/// The threads that serve by rings; none if requests come from the device.
#[derive(Debug, Default)]
pub(crate) struct RingWorkers {
    cores: Vec<RingCore>,
    allowed_cores: AllowedCores,
    /// Rings whose threads are not started yet.
    rings: Mutex<Vec<(FuseRing, ServedQueues)>>,
    threads: Mutex<Threads>,
    asked: AtomicU64,
    /// The regular file that was used last.
    file: AtomicU64,
}

#[derive(Debug)]
struct RingCore {
    number: usize,
    /// Its threads, and how many of them wait for a request.
    workers: AtomicUsize,
    free: AtomicUsize,
    /// Whether one more thread is about to start.
    is_growing: AtomicBool,
}

#[derive(Debug, Default)]
struct Threads {
    started: Vec<(Arc<WorkerInbox>, JoinHandle<FuseRing>)>,
    closed: bool,
}

/// The queues that a thread serves.
#[derive(Clone, Debug)]
enum ServedQueues {
    /// The queue of the core at this index. `late` if the thread is added because the core's others are at work.
    CoreQueue { index: usize, late: bool },
    /// The queues of cores that are off. If such a core is switched on, this thread alone serves it.
    Off(Vec<u16>),
}

impl RingWorkers {
    /// Makes the rings of a mount, before INIT agrees on them: from then on the kernel waits for them. Returns `None`
    /// if this process may not run on all cores, or can't have rings.
    pub(crate) fn new(device: &FuseDevice) -> Option<Self> {
        let listed =
            |file: &str| parse_core_list(&std::fs::read_to_string(format!("/sys/devices/system/cpu/{file}")).ok()?);
        let (online, possible) = (listed("online")?, listed("possible")?);
        let allowed_cores = AllowedCores::read()?;
        let is_whole = possible.iter().copied().eq(0..possible.len()) && rustix::param::page_size() == 4096;
        if !is_whole || !online.iter().all(|core| allowed_cores.has(*core)) {
            tracing::info!("this process may not run on all cores, so requests are read from the device");
            return None;
        }
        let off: Vec<u16> = possible.iter().filter(|core| !online.contains(core)).map(|core| *core as u16).collect();
        let served = (0..online.len() * CORE_WORKERS)
            .map(|number| ServedQueues::CoreQueue { index: number / CORE_WORKERS, late: false });
        let served = served.chain((!off.is_empty()).then_some(ServedQueues::Off(off)));
        let rings = served.map(|queues| Ok((FuseRing::new(device.as_fd())?, queues))).collect::<io::Result<_>>();
        let rings = rings.inspect_err(|error| tracing::info!(%error, "no rings, so requests are read from the device"));
        let cores = online.iter().map(|core| RingCore::new(*core)).collect();
        Some(Self { cores, allowed_cores, rings: Mutex::new(rings.ok()?), ..Self::default() })
    }

    /// Whether the mount is served by rings.
    pub(crate) fn are_any(&self) -> bool {
        !self.cores.is_empty()
    }

    /// Ends all threads, when the mount is gone.
    pub(crate) fn join_threads(&self) {
        let started = {
            let mut threads = self.threads.lock();
            threads.closed = true;
            std::mem::take(&mut threads.started)
        };
        for (inbox, _) in &started {
            inbox.close();
        }
        for (_, thread) in started {
            // The kernel may write to an entry's memory as long as the thread lives that gave the entry. If a thread
            // panicked, that has been reported, and its memory is leaked.
            if let Ok(ring) = thread.join() {
                ring.free();
            }
        }
    }

    /// Makes the kernel send a request by the queue of the core that the caller runs on.
    fn ask_by_queue(&self, device: &FuseDevice) {
        let (number, file) = (self.asked.fetch_add(1, Ordering::Relaxed), InodeId(self.file.load(Ordering::Relaxed)));
        if let Err(errno) = notify::ask_kernel(device.as_fd(), number, file) {
            tracing::debug!(%errno, "the kernel sent no request by a queue");
        }
    }

    /// Returns the cores on which unbound threads may run.
    pub(crate) const fn allowed_cores(&self) -> AllowedCores {
        self.allowed_cores
    }

    /// Starts the threads that serve by rings.
    pub(crate) fn start_cores<F: FileSystem>(self: &Arc<Self>, mount: &Arc<MountState<F>>) -> io::Result<()> {
        let rings = std::mem::take(&mut *self.rings.lock());
        rings.into_iter().try_for_each(|(ring, queues)| self.start_core_worker(mount, ring, queues))
    }

    fn start_core_worker<F: FileSystem>(
        self: &Arc<Self>,
        mount: &Arc<MountState<F>>,
        ring: FuseRing,
        queues: ServedQueues,
    ) -> io::Result<()> {
        let mut threads = self.threads.lock();
        if threads.closed {
            return Ok(());
        }
        let inbox = Arc::clone(ring.inbox());
        let (mount, workers) = (Arc::clone(mount), Arc::clone(self));
        let thread = std::thread::Builder::new().name("ashlar-ring".into());
        let joined = thread.spawn(move || RingWorker::new(&mount, &workers, ring).run(&queues))?;
        threads.started.push((inbox, joined));
        Ok(())
    }

    /// Starts one more thread for a core most of whose threads are at work.
    fn add_worker<F: FileSystem>(self: &Arc<Self>, mount: &Arc<MountState<F>>, index: usize) {
        let core = &self.cores[index];
        if core.workers.load(Ordering::Relaxed) >= CORE_WORKERS_MAX || core.is_growing.swap(true, Ordering::Relaxed) {
            return;
        }
        let queues = ServedQueues::CoreQueue { index, late: true };
        if let Err(error) =
            FuseRing::new(mount.device.as_fd()).and_then(|ring| self.start_core_worker(mount, ring, queues))
        {
            core.is_growing.store(false, Ordering::Relaxed);
            tracing::warn!(%error, "no further thread could be started to serve the mount");
        }
    }
}

impl RingCore {
    fn new(number: usize) -> Self {
        let (workers, free) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { number, workers, free, is_growing: AtomicBool::new(false) }
    }
}

/// Returns the core numbers that a list such as `0-3,8` names.
fn parse_core_list(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    (!numbers.is_empty() && numbers.iter().all(|number| u16::try_from(*number).is_ok())).then_some(numbers)
}

/// One thread, its ring and its buffers.
struct RingWorker<'a, F> {
    mount: &'a Arc<MountState<F>>,
    workers: &'a Arc<RingWorkers>,
    ring: FuseRing,
    request: Vec<u8>,
    reply: ReplyBuffer,
    /// The number of large requests in a row.
    large: u32,
}

impl<'a, F: FileSystem> RingWorker<'a, F> {
    fn new(mount: &'a Arc<MountState<F>>, workers: &'a Arc<RingWorkers>, ring: FuseRing) -> Self {
        Self { mount, workers, ring, request: Vec::new(), reply: ReplyBuffer::new(TRANSFER_BYTES), large: 0 }
    }

    /// Serves until the mount is gone. Returns the ring, whose memory is the kernel's until this thread has ended.
    fn run(mut self, queues: &ServedQueues) -> FuseRing {
        let result = match queues {
            ServedQueues::CoreQueue { index, late } => self.serve_core(*index, *late),
            ServedQueues::Off(queues) => self.serve_off(queues),
        };
        if let Err(error) = result {
            tracing::error!(%error, ?queues, "a ring broke, and its thread ends");
        }
        self.ring
    }

    fn serve_core(&mut self, index: usize, late: bool) -> io::Result<()> {
        let core = &self.workers.cores[index];
        let queue = core.number as u16;
        let mut is_bound = bind_to_core(core.number);
        let begun = self.begin_queue(queue);
        if late {
            self.workers.ask_by_queue(&self.mount.device);
            core.is_growing.store(false, Ordering::Relaxed);
        }
        begun?;
        let _worker = CountGuard::new(&core.workers);
        let mut free = Some(CountGuard::new(&core.free));
        loop {
            match self.ring.next()? {
                RingEvent::Request(entry) => {
                    drop(free.take());
                    if core.free.load(Ordering::Relaxed) <= 1 {
                        self.workers.add_worker(self.mount, index);
                    }
                    if !self.serve_entry(entry)? {
                        continue;
                    }
                    // A thread that moves much data runs beside the client, on any core.
                    let binds = self.large < LARGE_IN_A_ROW;
                    if binds && !is_bound {
                        is_bound = bind_to_core(core.number);
                    } else if !binds && is_bound {
                        self.workers.allowed_cores.unbind_thread();
                        is_bound = false;
                    }
                    free = Some(CountGuard::new(&core.free));
                }
                RingEvent::Lost(_) => self.ring.register(queue)?,
                RingEvent::Inbox if !self.pass_on_answers()? => return Ok(()),
                RingEvent::Inbox if free.is_none() && self.ring.has_waiting_entry(queue) => {
                    free = Some(CountGuard::new(&core.free))
                }
                RingEvent::Inbox => {}
                RingEvent::Gone => return Ok(()),
            }
        }
    }

    /// Serves the queues of cores that are off. A request that another thread will answer keeps its queue's entry. Then
    /// the queue gets another entry, since no other thread serves it.
    fn serve_off(&mut self, queues: &[u16]) -> io::Result<()> {
        queues.iter().try_for_each(|queue| self.ring.register(*queue))?;
        self.ring.watch_inbox()?;
        loop {
            match self.ring.next()? {
                RingEvent::Request(entry) if self.serve_entry(entry)? => {}
                RingEvent::Request(entry) | RingEvent::Lost(entry) => {
                    let queue = self.ring.queue(entry);
                    if !self.ring.has_waiting_entry(queue) {
                        self.ring.register(queue)?;
                    }
                }
                RingEvent::Inbox if self.pass_on_answers()? => {}
                RingEvent::Inbox | RingEvent::Gone => return Ok(()),
            }
        }
    }

    fn begin_queue(&mut self, queue: u16) -> io::Result<()> {
        self.ring.watch_inbox()?;
        self.ring.register(queue)?;
        self.ring.submit()
    }

    /// Gives the kernel the answers that came by the inbox. Returns `false` once the inbox is closed.
    fn pass_on_answers(&mut self) -> io::Result<bool> {
        let Some(answers) = self.ring.inbox().take() else { return Ok(false) };
        for (entry, answer) in answers {
            self.ring.answer(entry, &answer)?;
        }
        self.ring.watch_inbox()?;
        Ok(true)
    }

    /// Serves the request in an entry. Returns whether it is answered; if not, its answer comes by the inbox.
    fn serve_entry(&mut self, entry: usize) -> io::Result<bool> {
        let mount = self.mount;
        let is_short = self.ring.receive(entry, &mut self.request);
        let request = if is_short { self.request.as_slice() } else { self.ring.request(entry) };
        let length = request.len();
        let Some((header, arguments)) = split_request(request) else { unreachable!("an entry has room for a header") };
        let of_file = [Opcode::Read, Opcode::Write, Opcode::Flush, Opcode::Fsync, Opcode::Setlkw];
        if Opcode::from_u32(header.opcode).is_some_and(|opcode| of_file.contains(&opcode)) {
            self.workers.file.store(header.nodeid, Ordering::Relaxed);
        }
        let route = ReplyRoute::ToRing(Arc::clone(self.ring.inbox()), entry);
        let answer = carry_out(mount, header, arguments, &mut self.reply, &route);
        match answer {
            Ok(ReplyAction::SendLater) => return Ok(false),
            // Every request of a ring is answered, or its entry would be lost.
            Ok(ReplyAction::NoReply) => self.reply.clear(),
            _ => {}
        }
        let reply = self.reply.seal(header.unique, answer.map(drop));
        self.large = if length.max(reply.len()) >= LARGE_BYTES { self.large.saturating_add(1) } else { 0 };
        let mut sent = self.ring.answer(entry, reply);
        if self.reply.is_cached() {
            sent = sent.and_then(|()| self.ring.submit());
            // A long request has no names.
            mount.kernel_cache.recheck_cached(if is_short { &self.request } else { &[] }, &self.reply);
            mount.kernel_cache.end_answer(&mut self.reply);
        }
        sent.map(|()| true)
    }
}

/// Raises a counter as long as it lives.
struct CountGuard<'a>(&'a AtomicUsize);

impl<'a> CountGuard<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for CountGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_read() {
        assert_eq!(parse_core_list("0-3\n"), Some(vec![0, 1, 2, 3]));
        assert_eq!(parse_core_list("0,2-3,8"), Some(vec![0, 2, 3, 8]));
        assert_eq!(parse_core_list("5"), Some(vec![5]));
        for wrong in ["", "a", "1-", "70000"] {
            assert_eq!(parse_core_list(wrong), None, "{wrong}");
        }
    }
}
