//! Makes mounts' kernels forget what is no longer true.
//!
//! Each mount has a thread of its own, because a write to `/dev/fuse` may wait for an inode lock that the kernel holds while
//! it waits for an answer of ours. Nobody waits for such a thread longer than the kernel may believe its cache anyway.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_types::InodeId;
use parking_lot::{Condvar, Mutex};

/// Notifications that may wait; a mount that falls behind so far gets one that covers all.
const QUEUE_MAX: usize = 4096;

const INVAL_INODE: i32 = 2;
/// Since Linux 6.16 (FUSE 7.44): all cached names are looked up again.
const INC_EPOCH: i32 = 8;

/// What a kernel shall forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stale {
    /// Of which inode.
    pub inode: InodeId,
    /// Its pages too, not only its attributes.
    pub data: bool,
    /// Names in it.
    pub names: bool,
    /// Everything below it as well.
    pub subtree: bool,
}

/// A mount's notifier.
#[derive(Debug)]
pub struct Notifier {
    state: Mutex<State>,
    changed: Condvar,
    ttl: Duration,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Stale>,
    queued: u64,
    written: u64,
    /// The kernel can't be told to forget names: they live until their time is over.
    names_need_time: bool,
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
    pub fn start(device: OwnedFd, ttl: Duration) -> std::io::Result<Arc<Self>> {
        let notifier = Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), ttl });
        let worker = Arc::clone(&notifier);
        std::thread::Builder::new().name("notify".into()).stack_size(256 << 10).spawn(move || worker.work(&device))?;
        Ok(notifier)
    }

    /// Queues a notification; called with SharedFS's lock held, so it never waits.
    pub fn queue(self: &Arc<Self>, stale: Stale) -> Ticket {
        let mut state = self.state.lock();
        let overflow = state.queue.len() >= QUEUE_MAX;
        if overflow {
            state.queue.clear();
            state.queue.push_back(Stale { inode: InodeId::ROOT, data: true, names: true, subtree: true });
        } else {
            state.queue.push_back(stale);
        }
        state.queued += 1;
        self.changed.notify_all();
        Ticket {
            notifier: Arc::clone(self),
            number: state.queued,
            stale,
            needs_time: stale.subtree || overflow,
            deadline: Instant::now() + self.ttl,
        }
    }

    /// Ends the thread, as soon as it has nothing to write.
    pub fn end(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }

    fn work(&self, device: &OwnedFd) {
        loop {
            let mut state = self.state.lock();
            while state.queue.is_empty() {
                if state.ended {
                    return;
                }
                self.changed.wait(&mut state);
            }
            let batch: Vec<Stale> = state.queue.drain(..).collect();
            let (upto, names_need_time) = (state.queued, state.names_need_time);
            drop(state);
            let wants_names = !names_need_time && batch.iter().any(|stale| stale.names);
            let names_failed = wants_names && !write(device, INC_EPOCH, &[]);
            for stale in &batch {
                invalidate_inode(device, *stale);
            }
            let mut state = self.state.lock();
            state.names_need_time |= names_failed;
            state.written = upto;
            self.changed.notify_all();
        }
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
        state.written >= self.number && !self.needs_time && !(self.stale.names && state.names_need_time)
    }

    /// Waits until the kernel has forgotten, or may not believe it any more.
    pub fn wait(&self) {
        let mut state = self.notifier.state.lock();
        loop {
            if self.is_told(&state) || self.notifier.changed.wait_until(&mut state, self.deadline).timed_out() {
                return;
            }
        }
    }
}

/// `FUSE_NOTIFY_INVAL_INODE`: `inode:8 offset:8 length:8`; a negative offset means attributes alone.
fn invalidate_inode(device: &OwnedFd, stale: Stale) {
    let offset: i64 = if stale.data { 0 } else { -1 };
    let mut body = [0; 24];
    body[..8].copy_from_slice(&stale.inode.0.to_le_bytes());
    body[8..16].copy_from_slice(&offset.to_le_bytes());
    // An inode that the kernel does not know needs no forgetting, and a mount that is gone neither.
    let _ = write(device, INVAL_INODE, &body);
}

/// Writes a notification: `length:4 code:4 unique:8 (0)` and its body. Whether the kernel understood it.
fn write(device: &OwnedFd, code: i32, body: &[u8]) -> bool {
    let mut message = Vec::with_capacity(16 + body.len());
    message.extend_from_slice(&(16 + body.len() as u32).to_le_bytes());
    message.extend_from_slice(&code.to_le_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(body);
    loop {
        match rustix::io::write(device, &message) {
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NOTCONN) => return true,
            result => return result.is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    const STALE: Stale = Stale { inode: InodeId(77), data: true, names: true, subtree: false };

    #[test]
    fn a_kernel_that_takes_the_notification_delays_nobody() {
        let (ours, mut kernel) = UnixStream::pair().expect("sockets");
        let notifier = Notifier::start(ours.into(), Duration::from_secs(60)).expect("started");
        notifier.queue(STALE).wait();
        let mut bytes = [0; 16 + 40];
        kernel.read_exact(&mut bytes).expect("epoch and inode");
        assert_eq!((bytes[0], bytes[4]), (16, INC_EPOCH as u8));
        assert_eq!((bytes[16], bytes[20], bytes[32]), (40, INVAL_INODE as u8, 77));
        notifier.end();
    }

    #[test]
    fn a_kernel_that_cannot_forget_names_is_given_the_time_to() {
        // Writing to the read end of a pipe fails: stands for a kernel that does not know the epoch.
        let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
        let notifier = Notifier::start(reader, Duration::from_millis(80)).expect("started");
        let start = Instant::now();
        notifier.queue(STALE).wait();
        assert!(start.elapsed() >= Duration::from_millis(80));
        let start = Instant::now();
        notifier.queue(Stale { names: false, ..STALE }).wait();
        assert!(start.elapsed() < Duration::from_millis(80), "pages and attributes need no time");
        notifier.end();
    }
}
