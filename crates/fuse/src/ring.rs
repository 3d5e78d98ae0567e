//! One thread's ring with the kernel, by which requests come and answers go: FUSE over io_uring.
//!
//! The kernel has a queue of requests for each core, and what is asked on a core comes by its queue. A queue has *entries*: memory for a request and for its
//! answer. An entry is the kernel's until a request is in it, and this side's until that is answered; the answer gives it back for the next one.
//!
//! An entry's memory, by bytes from its beginning: at 0 the kernel's headers, at [`IOVECS`] where all of it is, at [`PAYLOAD`] what follows a request's own
//! structure, or an answer's header.
//!
//! Source: the kernel's `include/uapi/linux/fuse.h` (`struct fuse_uring_req_header`), and its documentation of FUSE over io_uring.

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

use crate::device::TRANSFER_BYTES;
use crate::proto::{InHeader, OutHeader, RING_COMMIT_AND_FETCH, RING_REGISTER, RingCommand, RingHeader};

/// Where an operation's own structure stands, behind the header, and the room it has.
const STRUCTURE: usize = 128;
const STRUCTURE_BYTES: usize = 128;
const RING_HEADER: usize = STRUCTURE + STRUCTURE_BYTES;
const HEADERS_BYTES: usize = RING_HEADER + size_of::<RingHeader>();
const IOVECS: usize = 1024;
const PAYLOAD: usize = 4096;
const ENTRY_BYTES: usize = PAYLOAD + TRANSFER_BYTES;
const _: () = assert!(HEADERS_BYTES < IOVECS);
/// A request of up to so many bytes is copied out of its entry, so that the entry may have the next one before all is done that comes of this one.
const COPIED_BYTES: usize = 8 << 10;
/// Where `struct io_uring_sqe` has its length, which the library does not set.
const LENGTH_IN_QUESTION: usize = 24;
/// Marks what comes by the mailbox.
const MAIL: u64 = u64::MAX;
/// So many questions fit in a ring before the kernel is told of them. A thread has one or two.
const QUESTIONS: u32 = 16;
/// So long a kernel without memory is left alone.
const PAUSE: Duration = Duration::from_millis(1);

/// What comes by a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A request is in this entry.
    Request(usize),
    /// The kernel has let go of this entry without a request.
    Lost(usize),
    /// Something is in the mailbox.
    Mail,
    /// The mount is gone, or has no rings.
    Gone,
}

/// Answers that other threads have for requests of a ring. Its own thread gives them to the kernel, which takes back what a thread has asked that ends.
#[derive(Debug)]
pub(crate) struct WorkerInbox {
    posted: Mutex<Posted>,
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct Posted {
    answers: Vec<(usize, Box<[u8]>)>,
    closed: bool,
}

impl WorkerInbox {
    /// Posts the answer to the request in an entry.
    pub(crate) fn post(&self, entry: usize, answer: &[u8]) {
        self.posted.lock().answers.push((entry, answer.into()));
        self.ring();
    }

    /// Has the thread end.
    pub(crate) fn close(&self) {
        self.posted.lock().closed = true;
        self.ring();
    }

    /// What was posted; `None` once it's closed.
    pub(crate) fn take(&self) -> Option<Vec<(usize, Box<[u8]>)>> {
        // Silenced first: what is posted from here on rings again.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        let mut posted = self.posted.lock();
        (!posted.closed).then(|| std::mem::take(&mut posted.answers))
    }

    fn ring(&self) {
        if let Err(errno) = rustix::io::write(&self.bell, &1_u64.to_ne_bytes()) {
            tracing::error!(%errno, "a thread that serves could not be told of an answer");
        }
    }
}

/// A ring, and the entries that were made by it.
pub(crate) struct Ring {
    io: IoUring<Entry128, cqueue::Entry>,
    device: types::Fd,
    entries: Vec<Entry>,
    inbox: Arc<WorkerInbox>,
}

#[derive(Debug)]
struct Entry {
    memory: NonNull<u8>,
    queue: u16,
    /// It's the kernel's.
    waits: bool,
    /// The request's number, by which its answer finds it; 0 as long as there was none.
    commit_id: u64,
    /// Where the request is.
    request: Range<usize>,
}

// SAFETY: the memory is the entry's alone, and goes with it.
unsafe impl Send for Entry {}

impl Entry {
    fn new(queue: u16) -> Self {
        let memory = Box::leak(vec![0_u8; ENTRY_BYTES].into_boxed_slice());
        Self { memory: NonNull::from(memory).cast(), queue, waits: true, commit_id: 0, request: 0..0 }
    }

    /// Its memory.
    ///
    /// # Safety
    /// The entry is not the kernel's.
    unsafe fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: it was made with so many bytes; the caller says that the kernel doesn't write to them, and nobody else has them.
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

    /// Gives its memory back.
    ///
    /// # Safety
    /// As for [`Self::bytes`], and the entry isn't used any more.
    unsafe fn free(&mut self) {
        let memory = std::ptr::slice_from_raw_parts_mut(self.memory.as_ptr(), ENTRY_BYTES);
        // SAFETY: it came from a box of so many bytes.
        drop(unsafe { Box::from_raw(memory) });
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Ring").field("entries", &self.entries).finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring without entries, for a device that stays open as long as it's used.
    pub(crate) fn new(device: BorrowedFd<'_>) -> io::Result<Self> {
        let io = IoUring::builder().build(QUESTIONS)?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let inbox = Arc::new(WorkerInbox { posted: Mutex::default(), bell });
        Ok(Self { io, device: types::Fd(device.as_raw_fd()), entries: Vec::new(), inbox })
    }

    /// Where other threads post answers.
    pub(crate) const fn inbox(&self) -> &Arc<WorkerInbox> {
        &self.inbox
    }

    /// Whether an entry of this queue waits for a request.
    pub(crate) fn waits(&self, queue: u16) -> bool {
        self.entries.iter().any(|entry| entry.waits && entry.queue == queue)
    }

    /// Asks to be told once something is in the mailbox.
    pub(crate) fn watch_mail(&mut self) -> io::Result<()> {
        let bell = types::Fd(self.inbox.bell.as_raw_fd());
        let question = opcode::PollAdd::new(bell, libc::POLLIN as u32).build().user_data(MAIL);
        self.push(&question.into())
    }

    /// Makes an entry for a core's queue. The kernel has it with the next [`Self::submit`].
    pub(crate) fn register(&mut self, queue: u16) -> io::Result<()> {
        let mut entry = Entry::new(queue);
        let at = |place: usize, length: usize| {
            let base = entry.memory.as_ptr().wrapping_add(place);
            [base as usize, length]
        };
        let iovecs = [at(0, HEADERS_BYTES), at(PAYLOAD, TRANSFER_BYTES)];
        let place = IOVECS..IOVECS + size_of_val(&iovecs);
        // SAFETY: the kernel does not know of it yet.
        let bytes = unsafe { entry.bytes() };
        bytes[place].copy_from_slice(iovecs.as_bytes());
        let place = entry.memory.as_ptr().wrapping_add(IOVECS) as u64;
        let mut question = self.question(RING_REGISTER, queue, 0, self.entries.len(), Some(place));
        let length = (&raw mut question).cast::<u8>().wrapping_add(LENGTH_IN_QUESTION).cast::<u32>();
        // SAFETY: the library's entry is the kernel's `struct io_uring_sqe`, which is longer and whose length is 32 bits wide and aligned.
        unsafe { length.write(iovecs.len() as u32) };
        self.entries.push(entry);
        self.push(&question)
    }

    fn question(&self, code: u32, qid: u16, commit_id: u64, entry: usize, place: Option<u64>) -> Entry128 {
        let asked = RingCommand { flags: 0, commit_id, qid, padding: [0; 6] };
        let mut command = [0; 80];
        command[..size_of::<RingCommand>()].copy_from_slice(asked.as_bytes());
        opcode::UringCmd80::new(self.device, code).cmd(command).addr(place).build().user_data(entry as u64)
    }

    fn push(&mut self, question: &Entry128) -> io::Result<()> {
        // SAFETY: what it points to is an entry's memory, which stays until the ring is gone.
        while unsafe { self.io.submission().push(question) }.is_err() {
            self.submit()?;
        }
        Ok(())
    }

    /// Has the kernel take what was asked and answered.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.enter(0)
    }

    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        loop {
            let Err(error) = self.io.submit_and_wait(wanted) else { return Ok(()) };
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // It has no memory, or too much to tell, just now.
                Some(libc::EAGAIN | libc::ENOMEM) => std::thread::sleep(PAUSE),
                Some(libc::EBUSY) if wanted > 0 => return Ok(()),
                _ => return Err(error),
            }
        }
    }

    /// What comes next; waits for it. Nothing that was answered before waits meanwhile.
    pub(crate) fn next(&mut self) -> io::Result<Event> {
        loop {
            let wanted = usize::from(self.io.completion().is_empty());
            if wanted > 0 || !self.io.submission().is_empty() {
                self.enter(wanted)?;
            }
            let completed = self.io.completion().next();
            if let Some(completed) = completed {
                return Ok(self.event(completed.user_data(), completed.result()));
            }
        }
    }

    fn event(&mut self, of: u64, result: i32) -> Event {
        if of == MAIL {
            return Event::Mail;
        }
        let entry = of as usize;
        self.entries[entry].waits = false;
        match -result {
            0 => Event::Request(entry),
            libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED | libc::ENODEV => Event::Gone,
            errno => {
                tracing::error!(errno, "the kernel took no answer, or no entry for requests");
                if self.entries[entry].commit_id == 0 { Event::Gone } else { Event::Lost(entry) }
            }
        }
    }

    /// The queue of an entry.
    pub(crate) fn queue(&self, entry: usize) -> u16 {
        self.entries[entry].queue
    }

    /// Looks at the request that has come in an entry, and puts it together as it would come from the device. A short one is copied to `short`; `false`: it's long,
    /// and stays in its entry until it's answered ([`Self::request`]).
    pub(crate) fn receive(&mut self, entry: usize, short: &mut Vec<u8>) -> bool {
        let entry = &mut self.entries[entry];
        // SAFETY: the kernel has said that a request is in it.
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

    /// The request in an entry.
    pub(crate) fn request(&self, entry: usize) -> &[u8] {
        let entry = &self.entries[entry];
        // SAFETY: its request was received and not answered, so it's this side's.
        let bytes = unsafe { entry.read() };
        &bytes[entry.request.clone()]
    }

    /// Answers the request in an entry, which is the kernel's again with the next [`Self::submit`].
    pub(crate) fn answer(&mut self, entry: usize, answer: &[u8]) -> io::Result<()> {
        let (head, body) = answer.split_at(size_of::<OutHeader>());
        let slot = &mut self.entries[entry];
        let ring = RingHeader { payload_sz: body.len() as u32, ..RingHeader::default() };
        // SAFETY: its request was received and is not answered yet.
        let bytes = unsafe { slot.bytes() };
        bytes[..head.len()].copy_from_slice(head);
        bytes[RING_HEADER..HEADERS_BYTES].copy_from_slice(ring.as_bytes());
        bytes[PAYLOAD..PAYLOAD + body.len()].copy_from_slice(body);
        let question =
            self.question(RING_COMMIT_AND_FETCH, self.entries[entry].queue, self.entries[entry].commit_id, entry, None);
        self.entries[entry].waits = true;
        self.push(&question)
    }

    /// Gives its memory back, when the thread that used it has ended.
    pub(crate) fn end(self) {
        let Self { io, mut entries, .. } = self;
        drop(io);
        for entry in &mut entries {
            // SAFETY: the kernel writes to an entry in the thread that gave it, and that one has ended.
            unsafe { entry.free() };
        }
    }
}
