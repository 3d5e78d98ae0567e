//! The ring of one thread, by which requests and answers pass (FUSE over io_uring).
//!
//! The kernel has a queue of requests for each core, and a request made on a core comes by its queue. A queue has
//! *entries*: memory for a request and for its answer. An entry belongs to the kernel until it holds a request, and
//! then to this side until the request is answered. The answer gives it back for the next one.
//!
//! An entry's memory, by bytes from its beginning: at 0 the kernel's headers; at [`IOVECS`] the addresses of its parts;
//! at [`PAYLOAD`] the bytes that follow a request's own structure, or an answer's header.
//!
//! Source: the kernel's `include/uapi/linux/fuse.h` (`struct fuse_uring_req_header`), and its documentation of FUSE
//! over io_uring.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use zerocopy::{FromBytes, IntoBytes};

use crate::connection::device::TRANSFER_BYTES;
use crate::proto::{InHeader, OutHeader, RING_COMMIT_AND_FETCH, RING_REGISTER, RingCommand, RingHeader};

/// The place of an operation's own structure, after the header, and the room that it has.
const STRUCTURE: usize = 128;
const STRUCTURE_BYTES: usize = 128;
const RING_HEADER: usize = STRUCTURE + STRUCTURE_BYTES;
const HEADERS_BYTES: usize = RING_HEADER + size_of::<RingHeader>();
const IOVECS: usize = 1024;
const PAYLOAD: usize = 4096;
const ENTRY_BYTES: usize = PAYLOAD + TRANSFER_BYTES;
const _: () = assert!(HEADERS_BYTES < IOVECS);
/// A request of up to so many bytes is copied out of its entry. The entry can then take the next request before this
/// one's work is done.
const COPIED_BYTES: usize = 8 << 10;
/// The place of the length in `struct io_uring_sqe`, which the library does not set.
const LENGTH_IN_COMMAND: usize = 24;
/// Marks completions of the inbox.
const INBOX: u64 = u64::MAX;
/// How many submissions fit in a ring before it is submitted to the kernel. A thread has one or two.
const COMMANDS_MAX: u32 = 16;
/// How long to wait before a kernel without memory is asked again.
const PAUSE: Duration = Duration::from_millis(1);

/// An event that a ring reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingEvent {
    /// A request is in this entry.
    Request(usize),
    /// The kernel has given up this entry without a request.
    Lost(usize),
    /// Something is in the inbox.
    Inbox,
    /// The mount is gone, or has no rings.
    Gone,
}

/// Answers of other threads to requests of a ring. The ring's own thread gives them to the kernel: when a thread ends,
/// the kernel cancels the commands that this thread submitted.
#[derive(Debug)]
pub(crate) struct WorkerInbox {
    posted: Mutex<PostedAnswers>,
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct PostedAnswers {
    answers: Vec<(usize, Box<[u8]>)>,
    closed: bool,
}

impl WorkerInbox {
    /// Posts the answer to the request in an entry.
    pub(crate) fn post(&self, entry: usize, answer: &[u8]) {
        self.posted.lock().answers.push((entry, answer.into()));
        self.ring_bell();
    }

    /// Makes the thread end.
    pub(crate) fn close(&self) {
        self.posted.lock().closed = true;
        self.ring_bell();
    }

    /// Takes the posted answers; returns `None` once the inbox is closed.
    pub(crate) fn take(&self) -> Option<Vec<(usize, Box<[u8]>)>> {
        // The bell is cleared first: answers that are posted from here on ring again.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        let mut posted = self.posted.lock();
        (!posted.closed).then(|| std::mem::take(&mut posted.answers))
    }

    fn ring_bell(&self) {
        if let Err(errno) = rustix::io::write(&self.bell, &1_u64.to_ne_bytes()) {
            tracing::error!(%errno, "a thread that serves could not be woken for an answer");
        }
    }
}

/// A ring, and the entries that were made with it.
pub(crate) struct FuseRing {
    io: IoUring<Entry128, cqueue::Entry>,
    device: types::Fd,
    entries: Vec<Entry>,
    inbox: Arc<WorkerInbox>,
}

#[derive(Debug)]
struct Entry {
    memory: NonNull<u8>,
    queue: u16,
    /// Whether the kernel has it.
    is_waiting: bool,
    /// The number of its request, which the answer needs; 0 until the first request.
    commit_id: u64,
    /// The place of the request.
    request: Range<usize>,
}

// SAFETY: the memory belongs to the entry alone, and moves with it.
unsafe impl Send for Entry {}

impl Entry {
    fn new(queue: u16) -> Self {
        let memory = Box::leak(vec![0_u8; ENTRY_BYTES].into_boxed_slice());
        Self { memory: NonNull::from(memory).cast(), queue, is_waiting: true, commit_id: 0, request: 0..0 }
    }

    /// Its memory.
    ///
    /// # Safety
    /// The kernel does not have the entry.
    unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: it was made with so many bytes. The caller ensures that the kernel doesn't write to them, and no
        // other reference to them exists.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), ENTRY_BYTES) }
    }

    /// Its memory, to be read.
    ///
    /// # Safety
    /// As for [`Self::bytes`].
    unsafe fn read(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), ENTRY_BYTES) }
    }

    /// Frees its memory.
    ///
    /// # Safety
    /// As for [`Self::bytes`], and the entry is not used any more.
    unsafe fn free(&mut self) {
        let memory = std::ptr::slice_from_raw_parts_mut(self.memory.as_ptr(), ENTRY_BYTES);
        // SAFETY: it came from a box of so many bytes.
        drop(unsafe { Box::from_raw(memory) });
    }
}

impl std::fmt::Debug for FuseRing {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FuseRing").field("entries", &self.entries).finish_non_exhaustive()
    }
}

impl FuseRing {
    /// Makes a ring without entries, for a device that stays open as long as the ring is used.
    pub(crate) fn new(device: BorrowedFd<'_>) -> io::Result<Self> {
        let io = IoUring::builder().build(COMMANDS_MAX)?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let inbox = Arc::new(WorkerInbox { posted: Mutex::default(), bell });
        Ok(Self { io, device: types::Fd(device.as_raw_fd()), entries: Vec::new(), inbox })
    }

    /// Returns the inbox to which other threads post answers.
    pub(crate) const fn inbox(&self) -> &Arc<WorkerInbox> {
        &self.inbox
    }

    /// Whether an entry of this queue waits for a request.
    pub(crate) fn has_waiting_entry(&self, queue: u16) -> bool {
        self.entries.iter().any(|entry| entry.is_waiting && entry.queue == queue)
    }

    /// Asks for an event once something is in the inbox.
    pub(crate) fn watch_inbox(&mut self) -> io::Result<()> {
        let bell = types::Fd(self.inbox.bell.as_raw_fd());
        let command = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(INBOX);
        self.push(&command.into())
    }

    /// Makes an entry for a core's queue. The kernel has it after the next [`Self::submit`].
    pub(crate) fn register(&mut self, queue: u16) -> io::Result<()> {
        let mut entry = Entry::new(queue);
        let at = |place: usize, length: usize| {
            let base = entry.memory.as_ptr().wrapping_add(place);
            [base as usize, length]
        };
        let iovecs = [at(0, HEADERS_BYTES), at(PAYLOAD, TRANSFER_BYTES)];
        let place = IOVECS..IOVECS + size_of_val(&iovecs);
        // SAFETY: the kernel does not know the entry yet.
        let bytes = unsafe { entry.bytes() };
        bytes[place].copy_from_slice(iovecs.as_bytes());
        let place = entry.memory.as_ptr().wrapping_add(IOVECS) as u64;
        let mut command = self.command(RING_REGISTER, queue, 0, self.entries.len(), Some(place));
        let length = (&raw mut command).cast::<u8>().wrapping_add(LENGTH_IN_COMMAND).cast::<u32>();
        // SAFETY: the library's entry is the kernel's `struct io_uring_sqe`, which is longer than this place, and whose
        // length is 32 bits wide and aligned.
        unsafe { length.write(iovecs.len() as u32) };
        self.entries.push(entry);
        self.push(&command)
    }

    fn command(&self, code: u32, qid: u16, commit_id: u64, entry: usize, place: Option<u64>) -> Entry128 {
        let asked = RingCommand { flags: 0, commit_id, qid, padding: [0; 6] };
        let mut bytes = [0; 80];
        bytes[..size_of::<RingCommand>()].copy_from_slice(asked.as_bytes());
        opcode::UringCmd80::new(self.device, code).cmd(bytes).addr(place).build().user_data(entry as u64)
    }

    fn push(&mut self, command: &Entry128) -> io::Result<()> {
        // SAFETY: it points to an entry's memory, which stays until the ring is gone.
        while unsafe { self.io.submission().push(command) }.is_err() {
            self.submit()?;
        }
        Ok(())
    }

    /// Submits all commands to the kernel.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.enter(0)
    }

    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        loop {
            let Err(error) = self.io.submit_and_wait(wanted) else { return Ok(()) };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // The kernel has no memory, or too many completions to report, just now.
                Some(libc::EAGAIN | libc::ENOMEM) => std::thread::sleep(PAUSE),
                Some(libc::EBUSY) if wanted > 0 => return Ok(()),
                _ => return Err(error),
            }
        }
    }

    /// Waits for the next event. All earlier answers are submitted before it waits.
    pub(crate) fn next(&mut self) -> io::Result<RingEvent> {
        loop {
            let wanted = usize::from(self.io.completion().is_empty());
            if wanted > 0 || !self.io.submission().is_empty() {
                self.enter(wanted)?;
            }
            let completed = self.io.completion().next();
            if let Some(completed) = completed {
                return Ok(self.event_of(completed.user_data(), completed.result()));
            }
        }
    }

    fn event_of(&mut self, of: u64, result: i32) -> RingEvent {
        if of == INBOX {
            return RingEvent::Inbox;
        }
        let entry = of as usize;
        self.entries[entry].is_waiting = false;
        match -result {
            0 => RingEvent::Request(entry),
            libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED | libc::ENODEV => RingEvent::Gone,
            errno => {
                tracing::error!(errno, "the kernel took no answer, or no entry for requests");
                if self.entries[entry].commit_id == 0 { RingEvent::Gone } else { RingEvent::Lost(entry) }
            }
        }
    }

    /// Returns the queue of an entry.
    pub(crate) fn queue(&self, entry: usize) -> u16 {
        self.entries[entry].queue
    }

    /// Reads the request that has come in an entry, and lays it out as it would come from the device. A short one is
    /// copied to `short`. Returns `false` if the request is long: it then stays in its entry until it is answered
    /// ([`Self::request`]).
    pub(crate) fn receive(&mut self, entry: usize, short: &mut Vec<u8>) -> bool {
        let entry = &mut self.entries[entry];
        // SAFETY: the kernel has reported that a request is in it.
        let bytes = unsafe { entry.bytes() };
        let (Ok((header, _)), Ok((ring, _))) =
            (InHeader::read_from_prefix(bytes), RingHeader::read_from_prefix(&bytes[RING_HEADER..]))
        else {
            unreachable!("an entry is longer than its headers")
        };
        let payload = (ring.payload_sz as usize).min(TRANSFER_BYTES);
        let structure = (header.len as usize).saturating_sub(size_of::<InHeader>() + payload).min(STRUCTURE_BYTES);
        let begin = PAYLOAD - structure - size_of::<InHeader>();
        bytes.copy_within(STRUCTURE..STRUCTURE + structure, PAYLOAD - structure);
        bytes[begin..PAYLOAD - structure].copy_from_slice(header.as_bytes());
        let request = begin..PAYLOAD + payload;
        let is_short = request.len() <= COPIED_BYTES;
        if is_short {
            short.clear();
            short.extend_from_slice(&bytes[request.clone()]);
        }
        entry.commit_id = ring.commit_id;
        entry.request = request;
        is_short
    }

    /// Returns the request in an entry.
    pub(crate) fn request(&self, entry: usize) -> &[u8] {
        let entry = &self.entries[entry];
        // SAFETY: its request was received and not answered, so this side has the entry.
        let bytes = unsafe { entry.read() };
        &bytes[entry.request.clone()]
    }

    /// Answers the request in an entry. The kernel has the entry again after the next [`Self::submit`].
    pub(crate) fn answer(&mut self, entry: usize, answer: &[u8]) -> io::Result<()> {
        let (head, body) = answer.split_at(size_of::<OutHeader>());
        let slot = &mut self.entries[entry];
        let ring = RingHeader { payload_sz: body.len() as u32, ..RingHeader::default() };
        // SAFETY: its request was received and is not answered yet.
        let bytes = unsafe { slot.bytes() };
        bytes[..head.len()].copy_from_slice(head);
        bytes[RING_HEADER..HEADERS_BYTES].copy_from_slice(ring.as_bytes());
        bytes[PAYLOAD..PAYLOAD + body.len()].copy_from_slice(body);
        let command =
            self.command(RING_COMMIT_AND_FETCH, self.entries[entry].queue, self.entries[entry].commit_id, entry, None);
        self.entries[entry].is_waiting = true;
        self.push(&command)
    }

    /// Frees its memory, when the thread that used it has ended.
    pub(crate) fn free(self) {
        let Self { io, mut entries, .. } = self;
        drop(io);
        for entry in &mut entries {
            // SAFETY: the kernel writes to an entry in the context of the thread that gave it, and that thread has
            // ended.
            unsafe { entry.free() };
        }
    }
}
