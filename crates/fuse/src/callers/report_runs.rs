//! Counts requests of `ashlar run --report` that the library has not counted.
//!
//! A request names the thread that asks, and that thread waits for the answer. So while a request is not answered, two
//! sources describe the thread. The file of counts says whether it is in a call that the library has counted. `/proc`
//! says which process it descends from and which call it is in. The mount reads `/proc` only for requests of the run
//! that were not counted. If no run wants a report, all this costs a request one test of a flag.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use ashlar_types::Errno;
use ashlar_wire::{
    MissedProgram, MissedReply, REPORT_BEGIN, REPORT_BYTES, REPORT_CALLS, REPORT_DIRECTORY, REPORT_END, REPORT_THREADS,
    THREAD_COUNTED, THREAD_HAS_LIBRARY,
};
use parking_lot::{Mutex, RwLock};

use crate::callers::calling_thread::ThreadCall;
use crate::proto::{InHeader, Opcode};

/// Runs that are counted at once. Each request that none of them has counted is checked against each of them.
const RUNS_MAX: usize = 16;
/// Programs that are told apart in a run; its others count together.
const PROGRAMS_MAX: usize = 256;
/// The deepest nesting of processes.
const ANCESTORS_MAX: usize = 64;
/// How long a thread or process of no run is known as a stranger, in milliseconds. The kernel gives a number again only
/// after all others, which takes longer.
const STRANGER_TTL_MS: u32 = 200;
/// Strangers that are known at once, in 32 KiB; one more takes another's slot.
const STRANGERS_MAX: usize = 4096;
/// How often a thread that still runs is read.
const READS_MAX: u32 = 20;
/// After so many requests of strangers, the mount checks whether the run has ended without saying so.
const STRANGER_REQUESTS: u64 = 256;

/// The runs that are counted.
#[derive(Debug, Default)]
pub(crate) struct ReportRuns {
    is_any: AtomicBool,
    list: RwLock<Vec<Arc<ReportRun>>>,
    clock: Clock,
}

/// Milliseconds since the mount began; they wrap around after 49 days.
#[derive(Debug)]
struct Clock(Instant);

impl Default for Clock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock {
    fn now_ms(&self) -> u32 {
        self.0.elapsed().as_millis() as u32
    }
}

#[derive(Debug)]
struct ReportRun {
    /// The process that wants the report.
    pid: u32,
    /// When it began, which distinguishes it from a later process of this number.
    start_ticks: u64,
    counts: File,
    counted: AtomicU64,
    /// Threads and processes that are not of this run.
    strangers: Strangers,
    stranger_requests: AtomicU64,
    missed: Mutex<MissedRequests>,
}

/// Numbers of threads and processes that were found to be strangers a moment ago. A stranger stays one: a process
/// adopts only children of its own descendants.
#[derive(Debug)]
struct Strangers(Box<[AtomicU64]>);

impl Default for Strangers {
    fn default() -> Self {
        Self((0..STRANGERS_MAX).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Strangers {
    fn slot(&self, number: u32) -> &AtomicU64 {
        &self.0[number as usize % STRANGERS_MAX]
    }

    fn record(&self, number: u32, now_ms: u32) {
        let until_ms = now_ms.wrapping_add(STRANGER_TTL_MS);
        self.slot(number).store(u64::from(number) << 32 | u64::from(until_ms), Ordering::Relaxed);
    }

    fn has(&self, number: u32, now_ms: u32) -> bool {
        let slot = self.slot(number).load(Ordering::Relaxed);
        // By the difference, as the clock wraps around.
        slot >> 32 == u64::from(number) && (slot as u32).wrapping_sub(now_ms).wrapping_sub(1) < STRANGER_TTL_MS
    }
}

#[derive(Debug, Default)]
struct MissedRequests {
    calls: BTreeMap<i64, u64>,
    programs: BTreeMap<(String, bool), u64>,
    memory: u64,
    read_ahead: u64,
}

/// The activity of a thread that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadActivity {
    /// A call on files, by its number; -1 if the number may not be read.
    SystemCall(i64),
    /// It loads a program, or uses mapped memory.
    Memory,
    /// It has gone on: the kernel reads ahead.
    ReadAhead,
}

impl ReportRuns {
    /// Counts a request, before it is answered.
    #[inline]
    pub(crate) fn count_request(&self, header: &InHeader) {
        if self.is_any.load(Ordering::Relaxed) {
            self.count_in_runs(header);
        }
    }

    #[cold]
    fn count_in_runs(&self, header: &InHeader) {
        let Some(opcode) = Opcode::from_u32(header.opcode).filter(|opcode| is_awaited(*opcode)) else { return };
        if header.pid == 0 {
            return;
        }
        let (thread, now_ms) = (header.pid, self.clock.now_ms());
        // Each run counts the request, whatever another run says.
        let known = {
            let list = self.list.read();
            let all = list.iter().all(|run| run.strangers.has(thread, now_ms));
            all.then(|| list.iter().filter(|run| run.pass_stranger()).count())
        };
        let due = known.unwrap_or_else(|| {
            let list = self.list.read().clone();
            list.iter().filter(|run| run.count_request(thread, opcode, now_ms)).count()
        });
        if due > 0 {
            self.remove_runs(|run| !run.is_alive());
        }
    }

    /// Serves the attributes by which a run speaks. Returns `None` for all other attributes.
    pub(crate) fn serve_attribute(&self, header: &InHeader, name: &[u8]) -> Option<Result<Vec<u8>, Errno>> {
        let name = std::str::from_utf8(name).ok()?;
        if let Some(file) = name.strip_prefix(REPORT_BEGIN) {
            return Some(self.begin_run(header, file).map(|()| vec![1]));
        }
        (name == REPORT_END).then(|| self.end_run(header.pid).and_then(|missed| missed.encode().ok_or(Errno::E2BIG)))
    }

    fn begin_run(&self, header: &InHeader, file: &str) -> Result<(), Errno> {
        self.remove_runs(|run| run.pid == header.pid || !run.is_alive());
        let start_ticks = start_time(header.pid).ok_or(Errno(libc::ESRCH))?;
        let counts = open_counts(file, header.uid)?;
        let mut list = self.list.write();
        if list.len() == RUNS_MAX {
            return Err(Errno::EAGAIN);
        }
        list.push(Arc::new(ReportRun {
            pid: header.pid,
            start_ticks,
            counts,
            counted: AtomicU64::new(0),
            strangers: Strangers::default(),
            stranger_requests: AtomicU64::new(0),
            missed: Mutex::default(),
        }));
        self.is_any.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn end_run(&self, pid: u32) -> Result<MissedReply, Errno> {
        let run = self.list.read().iter().find(|run| run.pid == pid).cloned().ok_or(Errno(libc::ESRCH))?;
        self.remove_runs(|run| run.pid == pid);
        let missed = run.missed.lock();
        let programs = missed.programs.iter();
        Ok(MissedReply {
            calls: missed.calls.iter().map(|(&call, &count)| (call, count)).collect(),
            counted: run.counted.load(Ordering::Relaxed),
            memory: missed.memory,
            behind: missed.read_ahead,
            programs: programs
                .map(|((name, has_library), &requests)| MissedProgram {
                    name: name.clone(),
                    has_library: *has_library,
                    requests,
                })
                .collect(),
        })
    }

    fn remove_runs(&self, is_over: impl Fn(&ReportRun) -> bool) {
        let mut list = self.list.write();
        list.retain(|run| !is_over(run));
        self.is_any.store(!list.is_empty(), Ordering::Relaxed);
    }
}

impl ReportRun {
    /// Counts a request, if it is of this run. Returns whether to check now that the run has not ended.
    fn count_request(&self, thread: u32, opcode: Opcode, now_ms: u32) -> bool {
        if self.strangers.has(thread, now_ms) {
            return self.pass_stranger();
        }
        if self.library_flags(thread) & THREAD_COUNTED != 0 {
            self.counted.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let Some(asking) = AskingProcess::read(thread).filter(|asking| self.includes(thread, asking, now_ms)) else {
            return self.pass_stranger();
        };
        let activity = activity_of(thread, opcode);
        let has_library = self.library_flags(asking.process) & THREAD_HAS_LIBRARY != 0;
        let mut missed = self.missed.lock();
        match activity {
            ThreadActivity::Memory => missed.memory += 1,
            ThreadActivity::ReadAhead => missed.read_ahead += 1,
            ThreadActivity::SystemCall(call) => {
                *missed.calls.entry(call).or_default() += 1;
                let is_room = missed.programs.len() < PROGRAMS_MAX;
                let name = (asking.name, has_library);
                let name = if is_room || missed.programs.contains_key(&name) { name } else { ("others".into(), false) };
                *missed.programs.entry(name).or_default() += 1;
            }
        }
        false
    }

    /// Passes a request that is not of this run. Returns whether to check now that the run has not ended.
    fn pass_stranger(&self) -> bool {
        self.stranger_requests.fetch_add(1, Ordering::Relaxed) % STRANGER_REQUESTS == STRANGER_REQUESTS - 1
    }

    /// Whether a thread is of this run. If it is not, its process and their ancestors are recorded as strangers too.
    fn includes(&self, thread: u32, asking: &AskingProcess, now_ms: u32) -> bool {
        let descent = asking.descent(self.pid, |process| self.strangers.has(process, now_ms));
        if let Descent::Strange(ancestors) = &descent {
            [thread, asking.process].iter().chain(ancestors).for_each(|number| self.strangers.record(*number, now_ms));
        }
        descent == Descent::Own
    }

    /// Returns the library's flags for a thread or process. They are 0 if a process of the run has truncated the file,
    /// which is its own.
    fn library_flags(&self, number: u32) -> u8 {
        let mut byte = [0];
        let read = self.counts.read_at(&mut byte, REPORT_THREADS as u64 + u64::from(number));
        if read.is_ok() { byte[0] } else { 0 }
    }

    fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.start_ticks)
    }
}

/// Opens a file of counts that the user `user` has made. Refuses files of other users, and files whose opening could
/// block.
fn open_counts(name: &str, user: u32) -> Result<File, Errno> {
    if name.contains('/') || name.starts_with('.') || name.is_empty() {
        return Err(Errno::EINVAL);
    }
    let path = Path::new(REPORT_DIRECTORY).join(name);
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let refused = |error: std::io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(refused)?;
    let found = file.metadata().map_err(refused)?;
    let is_right = found.is_file() && found.uid() == user && found.len() == REPORT_BYTES as u64;
    if is_right { Ok(file) } else { Err(Errno::EACCES) }
}

/// Returns when a process began, in ticks of the machine's time.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold blanks and brackets. After the last bracket follow fields without any, of which this is the
    // twentieth.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The descent of a process.
#[derive(Debug, PartialEq, Eq)]
enum Descent {
    /// From the run.
    Own,
    /// From another process, through these ancestors.
    Strange(Vec<u32>),
    /// It has too many ancestors, or one has ended meanwhile.
    Unknown,
}

/// The process whose thread asks.
struct AskingProcess {
    name: String,
    process: u32,
    parent: u32,
}

impl AskingProcess {
    fn read(thread: u32) -> Option<Self> {
        let status = fs::read(format!("/proc/{thread}/status")).ok()?;
        let status = String::from_utf8_lossy(&status);
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        Some(Self {
            name: field("Name:")?.to_owned(),
            process: field("Tgid:")?.parse().ok()?,
            parent: field("PPid:")?.parse().ok()?,
        })
    }

    /// Follows the parents of a process up to the process `run`. Processes whose parents end are given to `run`, as it
    /// has asked for. A process that is known as a stranger has only strangers as children.
    fn descent(&self, run: u32, is_stranger: impl Fn(u32) -> bool) -> Descent {
        let (mut parent, mut ancestors) = (self.parent, Vec::new());
        while ancestors.len() < ANCESTORS_MAX {
            if parent == run {
                return Descent::Own;
            }
            if is_stranger(parent) {
                return Descent::Strange(ancestors);
            }
            ancestors.push(parent);
            match Self::read(parent) {
                Some(next) if next.parent == 0 => return Descent::Strange(ancestors),
                Some(next) => parent = next.parent,
                None => break,
            }
        }
        Descent::Unknown
    }
}

/// Whether a thread waits for the request in a call. The other requests come when a file is closed, from the thread
/// that closes it last. That thread's program may be ending, or be replaced by another program. It is then locked for
/// `/proc`, so reading there would wait for the very answer that the read delays.
fn is_awaited(opcode: Opcode) -> bool {
    !matches!(
        opcode,
        Opcode::Init
            | Opcode::Destroy
            | Opcode::Forget
            | Opcode::BatchForget
            | Opcode::NotifyReply
            | Opcode::Interrupt
            | Opcode::Release
            | Opcode::Releasedir
            | Opcode::Flush
            | Opcode::Setlk
    )
}

/// Returns the activity of a thread that has sent a request.
fn activity_of(thread: u32, opcode: Opcode) -> ThreadActivity {
    match ThreadCall::read(thread, READS_MAX) {
        ThreadCall::Waiting(call) => activity_in_call(call.number, opcode),
        ThreadCall::Running if opcode == Opcode::Read => ThreadActivity::ReadAhead,
        ThreadCall::Running | ThreadCall::Hidden => ThreadActivity::SystemCall(-1),
    }
}

/// Returns the activity of a thread in the call with this number, -1 for none.
const fn activity_in_call(number: i64, opcode: Opcode) -> ThreadActivity {
    match number {
        -1
        | libc::SYS_execve
        | libc::SYS_execveat
        | libc::SYS_munmap
        | libc::SYS_mremap
        | libc::SYS_mprotect
        | libc::SYS_madvise
        | libc::SYS_msync
        | libc::SYS_brk
        | libc::SYS_exit
        | libc::SYS_exit_group => ThreadActivity::Memory,
        // The kernel reads ahead, and the thread that began that has gone on since.
        _ if matches!(opcode, Opcode::Read) && !reads_files(number) => ThreadActivity::ReadAhead,
        0.. if number < REPORT_CALLS as i64 => ThreadActivity::SystemCall(number),
        _ => ThreadActivity::SystemCall(-1),
    }
}

/// Whether a call reads from files.
const fn reads_files(number: i64) -> bool {
    matches!(
        number,
        libc::SYS_read
            | libc::SYS_pread64
            | libc::SYS_readv
            | libc::SYS_preadv
            | libc::SYS_preadv2
            | libc::SYS_sendfile
            | libc::SYS_splice
            | libc::SYS_copy_file_range
            | libc::SYS_readahead
            | libc::SYS_fadvise64
            | libc::SYS_mmap
            | libc::SYS_write
            | libc::SYS_pwrite64
            | libc::SYS_io_uring_enter
            | libc::SYS_io_getevents
            | libc::SYS_io_submit
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_number_gives_thread_activity() {
        assert_eq!(activity_in_call(257, Opcode::Lookup), ThreadActivity::SystemCall(257));
        assert_eq!(activity_in_call(-1, Opcode::Lookup), ThreadActivity::Memory);
        assert_eq!(activity_in_call(libc::SYS_execve, Opcode::Lookup), ThreadActivity::Memory);
        assert_eq!(activity_in_call(9999, Opcode::Lookup), ThreadActivity::SystemCall(-1));
        assert_eq!(activity_in_call(libc::SYS_futex, Opcode::Read), ThreadActivity::ReadAhead);
        assert_eq!(activity_in_call(libc::SYS_read, Opcode::Read), ThreadActivity::SystemCall(libc::SYS_read));
    }

    #[test]
    fn descent_is_found_and_ends() {
        let this = AskingProcess::read(std::process::id()).expect("this process");
        assert_eq!(this.process, std::process::id());
        let parent = std::os::unix::process::parent_id();
        assert_eq!(this.descent(parent, |_| false), Descent::Own);
        let Descent::Strange(ancestors) = this.descent(std::process::id(), |_| false) else {
            panic!("no process descends from itself")
        };
        assert_eq!(ancestors.first(), Some(&parent));
        let known = this.descent(std::process::id(), |process| process == parent);
        assert_eq!(known, Descent::Strange(Vec::new()), "a known stranger's ancestors are not read");
        assert!(start_time(std::process::id()) > start_time(1));
    }

    #[test]
    fn stranger_is_known_until_its_ttl_ends() {
        let strangers = Strangers::default();
        assert!(!strangers.has(0, 0) && !strangers.has(7, 0));
        for now in [0, 1000, u32::MAX - 10] {
            strangers.record(7, now);
            assert!(strangers.has(7, now) && strangers.has(7, now.wrapping_add(STRANGER_TTL_MS - 1)));
            assert!(!strangers.has(7, now.wrapping_add(STRANGER_TTL_MS)), "its number may be another's");
            assert!(!strangers.has(7 + STRANGERS_MAX as u32, now), "another number in its place");
        }
    }

    #[test]
    fn stranger_and_its_ancestors_are_known_after_one_look() {
        let (own, parent) = (std::process::id(), std::os::unix::process::parent_id());
        let file = File::open("/dev/null").expect("a file");
        // No process descends from one with this number.
        let run = ReportRun {
            pid: u32::MAX,
            start_ticks: 0,
            counts: file,
            counted: AtomicU64::new(0),
            strangers: Strangers::default(),
            stranger_requests: AtomicU64::new(0),
            missed: Mutex::default(),
        };
        assert!(!run.count_request(own, Opcode::Lookup, 1));
        assert!(run.strangers.has(own, 1) && run.strangers.has(parent, 1));
        let of_parent = ReportRun { pid: parent, strangers: Strangers::default(), ..run };
        assert!(!of_parent.count_request(own, Opcode::Lookup, 1));
        assert!(!of_parent.strangers.has(own, 1), "it belongs to the run");
        assert_eq!(of_parent.missed.lock().programs.values().sum::<u64>(), 1);
    }

    #[test]
    fn only_files_of_counts_are_opened() {
        let user = rustix::process::geteuid().as_raw();
        for name in ["", ".", "../dev/zero", "no-such-file-of-counts"] {
            assert!(open_counts(name, user).is_err(), "{name} was opened");
        }
        let name = format!("ashlar-test-{}", std::process::id());
        let path = Path::new(REPORT_DIRECTORY).join(&name);
        fs::write(&path, "short").expect("a file");
        let is_short_refused = open_counts(&name, user).is_err();
        File::options().write(true).open(&path).and_then(|file| file.set_len(REPORT_BYTES as u64)).expect("longer");
        let (mine, another_s) = (open_counts(&name, user).is_ok(), open_counts(&name, user + 1).is_ok());
        fs::remove_file(&path).expect("removed");
        assert_eq!((is_short_refused, mine, another_s), (true, true, false));
    }
}
