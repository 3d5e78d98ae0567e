//! One machine: its media, its processes, and SharedFS on it.
//!
//! The media outlive SharedFS, and some of what they hold outlives a loss of power. The shell's part of SharedFS's
//! start and of sessions' beginnings and ends stands here, as `ashlar-daemon` does it with files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ashlar_journal::JournalRing;
use ashlar_log::Log;
use ashlar_node::digest::commit::{AwaitCopy, await_no_copy, commit_with};
use ashlar_node::journal::{NodeJournal, ReplayError};
use ashlar_node::leases::grant::Patience;
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::{NodeAnswer, NodeRequest, RequestTerms};
use ashlar_node::records::apply::Slice;
use ashlar_node::recovery::settling::SessionSettling;
use ashlar_node::recovery::take_up::{FoundSession, SoundSession, take_up_sessions};
use ashlar_node::recovery::{RecoveryFailure, recover_logs};
use ashlar_node::sessions::beginning::begin_session;
use ashlar_node::sessions::identity::{Process, ProcessTable, SessionIdentity};
use ashlar_node::sessions::noted_locks::LEASES_FILE_BYTES;
use ashlar_node::sessions::removal::remove_ended_sessions;
use ashlar_node::sessions::session::{LogRoom, ServedSession, SessionMemory};
use ashlar_node::sessions::session_page::SessionPage;
use ashlar_node::{Node, NodeLimits, NodeTime};
use ashlar_pmem::{CrashMedium, CrashTwin, MediumKind, Persistent, SharedMemory, WriteGate};
use ashlar_store::{CommitFault, MemoryArena, MemoryArenaOptions, Store, StoreError};
use ashlar_types::{Errno, InodeId, JournalPosition, LogGeneration, LogPosition, SessionId, Timestamp};
use ashlar_wire::{CONTROL_BYTES, ControlPage, LEASE_SLOTS_FIRST, LeaseTable, Reply, Request, SessionKind};

use crate::random::SimRandom;
use crate::replica_machine::{JOURNAL, new_ring, power_loss};

/// Bytes of a log's ring: few, so that logs go round.
const RING_BYTES: u64 = 24 << 10;
/// The steps of a request that nothing else delays.
const STEPS_MAX: u32 = 1000;
/// When the machine was first started, by the time of day.
const FIRST_SECOND: i64 = 1_000_000;

/// The memory of a session, which outlives SharedFS.
#[derive(Clone, Debug)]
pub struct SessionTwins {
    /// The log.
    pub log: Arc<SharedMemory>,
    /// The control page.
    pub control: Arc<SharedMemory>,
    /// The lease table.
    pub leases: Arc<SharedMemory>,
    /// Whether SharedFS has removed the memory: no crash brings it back.
    is_removed: Arc<AtomicBool>,
}

impl SessionTwins {
    fn each(&self) -> [&Arc<SharedMemory>; 3] {
        [&self.log, &self.control, &self.leases]
    }
}

/// A crash, by what it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashKind {
    /// The machine. Of what is not persistent, some is there.
    PowerLoss,
    /// SharedFS alone. The sessions go on.
    SharedFsDeath,
    /// SharedFS and the sessions' processes.
    AllProcessesDeath,
}

/// The callback of [`Machine::on_persist`].
pub type MachineObserver = Arc<dyn Fn() + Send + Sync>;

/// The processes that live.
#[derive(Debug)]
struct LivingProcesses(BTreeSet<u32>);

impl ProcessTable for LivingProcesses {
    fn is_gone(&self, process: &Process) -> bool {
        !self.0.contains(&process.pid)
    }
}

/// How the machine is made.
#[derive(Clone, Copy, Debug)]
pub struct MachineOptions {
    /// The medium, which says what its memory survives.
    pub medium: MediumKind,
    /// Blocks of the only data segment.
    pub blocks: u32,
    /// Microseconds for which a fresh lease isn't revoked.
    pub lease_hold_us: u64,
    /// Bytes of the journal's ring; `None` on a machine by itself.
    pub ring_bytes: Option<u64>,
}

/// The findings of a start of SharedFS.
#[derive(Debug, Default)]
pub struct StartReport {
    /// How far each log was applied when all were recovered.
    pub applied: BTreeMap<SessionId, LogPosition>,
    /// Logs that were cut.
    pub cut: u64,
    /// Sessions that were fenced, with the reason.
    pub fenced: Vec<String>,
}

/// A machine.
pub struct Machine {
    /// How it is made.
    pub options: MachineOptions,
    /// The shared area's media.
    pub arena: Arc<MemoryArena>,
    /// The memory of sessions.
    pub twins: BTreeMap<SessionId, SessionTwins>,
    /// The journal's memory, if there is a replica.
    pub ring: Option<Arc<SharedMemory>>,
    /// SharedFS, while it runs.
    pub node: Option<Node>,
    /// The arena that the next crash leaves in place of the true one, if a bug is planted.
    pub stale_arena: Option<Arc<MemoryArena>>,
    /// How far logs were applied by starts that were cut off; some of these sessions may be gone.
    recovered: BTreeMap<SessionId, LogPosition>,
    processes: BTreeSet<u32>,
    last_pid: u32,
    boots: u8,
    sessions_made: u64,
    /// SharedFS's writes to the memory of sessions.
    pub gate: Arc<WriteGate>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Returns SharedFS's time at a virtual time in microseconds.
#[must_use]
pub fn node_time(now_us: u64) -> NodeTime {
    NodeTime { since_boot: Duration::from_micros(now_us), wall: wall_time(now_us) }
}

/// Returns the time of day at a virtual time.
#[must_use]
pub fn wall_time(now_us: u64) -> Timestamp {
    Timestamp { seconds: FIRST_SECOND + (now_us / 1_000_000) as i64, nanoseconds: (now_us % 1_000_000 * 1000) as u32 }
}

/// Returns the error of a store whose journal can't be used.
fn store_error(error: ReplayError) -> StoreError {
    match error {
        ReplayError::Store(error) => error,
        error => StoreError::Io { what: "the journal can't be used", source: std::io::Error::other(error.to_string()) },
    }
}

fn crash_medium(options: MachineOptions) -> CrashMedium {
    if options.medium == MediumKind::Disk { CrashMedium::Pages } else { CrashMedium::Words }
}

fn new_arena(options: MachineOptions) -> Result<Arc<MemoryArena>, StoreError> {
    let arena = Arc::new(MemoryArena::new(&MemoryArenaOptions::new(crash_medium(options), vec![options.blocks])));
    Store::format_in_memory(&arena, Timestamp::default())?;
    Ok(arena)
}

impl Machine {
    /// Makes a machine with an empty arena; SharedFS does not run.
    ///
    /// # Errors
    /// Those of the store.
    pub fn new(options: MachineOptions) -> Result<Self, StoreError> {
        let gate = Arc::<WriteGate>::default();
        let new_ring = |bytes: u64| {
            let bytes = JournalRing::<SharedMemory>::bytes_for(bytes) as usize;
            new_ring(CrashTwin::new(crash_medium(options), bytes).behind_gate(&gate)).map_err(store_error)
        };
        Ok(Self {
            options,
            ring: options.ring_bytes.map(new_ring).transpose()?,
            arena: new_arena(options)?,
            twins: BTreeMap::new(),
            node: None,
            stale_arena: None,
            recovered: BTreeMap::new(),
            processes: BTreeSet::new(),
            last_pid: 100,
            boots: 1,
            sessions_made: 0,
            gate,
        })
    }

    /// Returns whether the medium is a disk.
    #[must_use]
    pub fn is_disk(&self) -> bool {
        self.options.medium == MediumKind::Disk
    }

    /// Returns whether a loss of power takes all of the medium.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        self.options.medium == MediumKind::Memory
    }

    fn boot(&self) -> [u8; 16] {
        [self.boots; 16]
    }

    fn report_processes(&mut self) {
        if let Some(node) = &mut self.node {
            node.processes = Arc::new(LivingProcesses(self.processes.clone()));
        }
    }

    /// Starts a process.
    pub fn start_process(&mut self) -> u32 {
        self.last_pid += 1;
        self.processes.insert(self.last_pid);
        self.report_processes();
        self.last_pid
    }

    /// Ends a process.
    pub fn end_process(&mut self, pid: u32) {
        self.processes.remove(&pid);
        self.report_processes();
    }

    fn twin(&self, bytes: u64) -> Arc<SharedMemory> {
        let twin = CrashTwin::new(crash_medium(self.options), bytes as usize);
        Arc::new(SharedMemory::Twin(twin.behind_gate(&self.gate)))
    }

    // ---- sessions

    /// Begins a session of a process; returns its number, and the inode numbers that it begins with.
    ///
    /// # Errors
    /// A description of what refused.
    pub fn begin_session(&mut self, pid: u32, uid: u32, now_us: u64) -> Result<(SessionId, InodeId, u64), String> {
        let process = Process { pid, start_ticks: u64::from(pid), boot: self.boot() };
        let identity = SessionIdentity {
            process,
            uid,
            gid: uid,
            groups: Vec::new(),
            kind: SessionKind::Process,
            label: "sim".into(),
        };
        let log_bytes = Log::<SharedMemory>::bytes_for(RING_BYTES);
        let twins = SessionTwins {
            log: self.twin(log_bytes),
            control: self.twin(CONTROL_BYTES),
            leases: self.twin(LEASES_FILE_BYTES),
            is_removed: Arc::default(),
        };
        self.sessions_made += 1;
        let secret = self.sessions_made;
        let node = self.node.as_mut().ok_or("SharedFS does not run")?;
        node.handle_time(node_time(now_us));
        let text = |error: &dyn fmt::Display| error.to_string();
        let id = node.store.next_session_id().map_err(|error| text(&error))?;
        let log = Log::format_with_key(Arc::clone(&twins.log), LogGeneration(1), secret << 20 | 1)
            .map_err(|error| text(&error))?;
        let control = ControlPage::new(Arc::clone(&twins.control)).ok_or("the control page is too short")?;
        control.format(id);
        let page = SessionPage::new(Arc::clone(&twins.leases)).map_err(|error| text(&error))?;
        page.set_lease_room(LEASE_SLOTS_FIRST);
        page.set_log_bytes(log_bytes);
        let leases = LeaseTable::new(Arc::clone(&twins.leases)).ok_or("the lease table is too short")?;
        leases.format(id, secret);
        // The identity is last: without one the session was never welcomed.
        identity.store(page.memory()).map_err(|error| text(&error))?;
        let log_room = LogRoom { bytes: log_bytes, allocated: log_bytes };
        let memory = SessionMemory { log, log_memory: Arc::clone(&twins.log), log_room, control, leases, page };
        let session =
            ServedSession::new(id, identity, secret, memory, node.now.since_boot).map_err(|error| text(&error))?;
        let begun = begin_session(node, session, false).map_err(|refused| format!("{refused:?}"))?;
        self.twins.insert(id, twins);
        let (first, count) = begun.inodes;
        Ok((id, first, count))
    }

    /// Removes the ended sessions that are committed as a whole; returns their numbers.
    pub fn remove_ended(&mut self) -> Vec<SessionId> {
        let Some(node) = &mut self.node else { return Vec::new() };
        remove_ended(node, &mut self.twins)
    }

    // ---- SharedFS's work

    /// Serves a request of a session at once: nothing else happens meanwhile.
    ///
    /// # Errors
    /// Those of the request.
    ///
    /// # Panics
    /// If SharedFS does not run, or if the request waits for an event.
    pub fn serve(&mut self, session: SessionId, request: Request) -> Result<Reply, Errno> {
        let terms = RequestTerms { patience: Patience::Any, bytes_max: usize::MAX, reclaims: false };
        let node = self.node.as_mut().expect("SharedFS runs");
        let ticket = node.begin_request(NodeRequest::Session(session, request), terms);
        for _ in 0..STEPS_MAX {
            match node.advance(ticket) {
                Progress::Done(Ok(NodeAnswer::Reply(gated))) => return Ok(gated.reply),
                Progress::Done(answer) => return Err(answer.err().unwrap_or(Errno::EPROTO)),
                Progress::More | Progress::Wait(..) => {}
            }
        }
        panic!("the request waits");
    }

    /// Applies all that a session has logged.
    ///
    /// # Panics
    /// If SharedFS does not run, or if the session's log is damaged.
    pub fn apply_log(&mut self, session: SessionId) {
        let node = self.node.as_mut().expect("SharedFS runs");
        let settled = node.settled(session).expect("a whole log");
        node.apply(session, settled, Slice::All);
        node.decide_all();
    }

    // ---- SharedFS's life

    /// Starts SharedFS, and recovers what all sessions have logged.
    ///
    /// `crash_at` plans a crash at one of the commits of the start.
    ///
    /// # Errors
    /// Those of the store: [`StoreError`] of the planned crash, for one.
    pub fn start(&mut self, now_us: u64, crash_at: Option<(u64, CommitFault)>) -> Result<StartReport, StoreError> {
        self.start_with(now_us, crash_at, &mut await_no_copy)
    }

    /// Starts SharedFS, which waits for its replica before each commit.
    ///
    /// # Errors
    /// As [`Self::start`], and those of `await_copy`.
    pub fn start_with(
        &mut self,
        now_us: u64,
        crash_at: Option<(u64, CommitFault)>,
        await_copy: &mut AwaitCopy<'_>,
    ) -> Result<StartReport, StoreError> {
        let limits = NodeLimits { lease_hold_us: self.options.lease_hold_us, ..NodeLimits::new(self.options.medium) };
        let processes = Arc::new(LivingProcesses(self.processes.clone()));
        if let Some((commits, fault)) = crash_at {
            self.arena.database().plan_fault(self.arena.database().commits() + commits, fault);
        }
        let store = Store::open_in_memory(Arc::clone(&self.arena))?;
        let open = |ring| NodeJournal::open(&store, ring, JOURNAL).map_err(store_error);
        let journal = self.ring.clone().map(open).transpose()?;
        let mut node = Node::new(store, limits, processes, node_time(now_us))?;
        node.journal = journal;
        node.begin_recovery();
        self.take_up_sessions(&mut node)?;
        // It connects: from here on no commit goes without it.
        await_copy(&mut node, JournalPosition(0))?;
        recover_logs(&mut node, await_copy).map_err(|failure| match failure {
            RecoveryFailure::Store(error) => error,
            RecoveryFailure::Panic(id) => panic!("SharedFS panics at the log of session {id}"),
        })?;
        node.store.show_lagging();
        let mut report = StartReport { cut: node.counters.logs_cut, ..StartReport::default() };
        for session in node.sessions.values() {
            report.applied.insert(session.id, node.store.applied(session.id));
            report.fenced.extend(session.fenced.as_ref().map(|reason| format!("session {}: {reason}", session.id)));
        }
        for &id in self.twins.keys().filter(|id| !node.sessions.contains_key(id)) {
            // Its owner was not persistent, and so was no update of it that is not committed.
            report.applied.insert(id, node.store.applied(id));
        }
        for (id, position) in std::mem::take(&mut self.recovered) {
            report.applied.entry(id).or_insert(position);
        }
        self.recovered = report.applied.clone();
        self.settle(&mut node, await_copy)?;
        self.node = Some(node);
        Ok(report)
    }

    fn take_up_sessions(&self, node: &mut Node) -> Result<(), StoreError> {
        let take_up = |(&id, twins): (&SessionId, &SessionTwins)| {
            let session = self.take_up_session(id, twins, node.store.committed(id), node.now.since_boot);
            let sound = |session| FoundSession::Sound(Box::new(SoundSession { session, mapped: None }));
            (id, session.map_or(FoundSession::Lost, sound))
        };
        let found = self.twins.iter().map(take_up).collect();
        take_up_sessions(node, found).map_err(store_error)
    }

    /// Takes up a session's memory; `None` if it has no owner.
    fn take_up_session(
        &self,
        id: SessionId,
        twins: &SessionTwins,
        committed: LogPosition,
        now: Duration,
    ) -> Option<ServedSession> {
        let page = SessionPage::new(Arc::clone(&twins.leases)).ok()?;
        let identity = SessionIdentity::load(&twins.leases)?;
        let leases = LeaseTable::new(Arc::clone(&twins.leases))?;
        let (_, token) = leases.owner().filter(|(owner, _)| *owner == id)?;
        let control = ControlPage::new(Arc::clone(&twins.control))?;
        let is_whole = identity.process.boot == self.boot()
            && (!self.is_disk() || identity.uid != 0 || self.processes.contains(&identity.process.pid));
        let log = if is_whole {
            Log::open(Arc::clone(&twins.log)).ok()?
        } else {
            Log::recover(Arc::clone(&twins.log), committed).ok()?.0
        };
        let log_room = LogRoom { bytes: twins.log.len(), allocated: 0 };
        let memory = SessionMemory { log, log_memory: Arc::clone(&twins.log), log_room, control, leases, page };
        let session = ServedSession::take_up(id, identity, token, memory, (committed, is_whole), now).ok()?;
        if session.rights.is_any() {
            session.page.memory().sync_range(0, LEASES_FILE_BYTES).ok()?;
        }
        Some(session)
    }

    /// Lets living sessions go on, and removes dead ones.
    fn settle(&mut self, node: &mut Node, await_copy: &mut AwaitCopy<'_>) -> Result<(), StoreError> {
        for session in node.sessions.values().filter(|session| session.is_cut) {
            // No start takes it up any more.
            let memory = session.page.memory();
            let _ = SessionIdentity::wipe(memory);
            let _ = memory.sync_range(0, LEASES_FILE_BYTES);
        }
        let mut settling = SessionSettling::default();
        for id in node.sessions.keys().copied().collect::<Vec<_>>() {
            let process = node.sessions[&id].identity.process;
            let is_alive = process.boot == self.boot() && self.processes.contains(&process.pid);
            settling.settle_session(node, id, is_alive, Duration::ZERO);
        }
        settling.finish(node);
        remove_ended(node, &mut self.twins);
        let sweep = node.begin_request(NodeRequest::SweepOrphans, RequestTerms::OWN);
        while !matches!(node.advance(sweep), Progress::Done(_)) {}
        // Memory of sessions that nothing took up.
        let lost: Vec<_> = self.twins.keys().filter(|id| !node.sessions.contains_key(id)).copied().collect();
        for id in lost {
            remove_memory(&mut self.twins, id);
            node.remove_session_row(id);
        }
        commit_with(node, await_copy)
    }

    /// Ends a start that no crash has cut off.
    pub fn end_start(&mut self) {
        self.recovered.clear();
    }

    // ---- crashes

    /// Kills SharedFS: its memory is gone, and that of sessions and media stays.
    pub fn kill_shared_fs(&mut self) {
        self.node = None;
        self.gate.open();
        let left = self.stale_arena.take().unwrap_or_else(|| Arc::clone(&self.arena));
        self.arena = Arc::new(left.after_process_death());
    }

    /// Cuts the power: all processes are gone, and of what is not persistent, some is there.
    pub fn lose_power(&mut self, random: &mut SimRandom) {
        let mut choose = power_loss(random);
        *self = self.after_crash(CrashKind::PowerLoss, &mut |_, contents| choose(contents));
    }

    /// Returns a machine that a crash at this moment leaves. It shares nothing with this one.
    ///
    /// After a loss of power, `choose` is called for every unsettled word or page. It gets the number of the memory,
    /// which is 0 for the arena, and the number of possible contents, from the settled one to the newest. It returns
    /// the index of one.
    ///
    /// # Panics
    /// If an empty arena can't be made, which a defect of the store alone causes.
    #[must_use]
    pub fn after_crash(&self, crash: CrashKind, choose: &mut dyn FnMut(usize, usize) -> usize) -> Self {
        let mut left = Self { gate: Arc::default(), stale_arena: None, ..self.without_shared_fs() };
        let arena = self.stale_arena.as_ref().unwrap_or(&self.arena);
        let is_power_loss = crash == CrashKind::PowerLoss;
        if crash != CrashKind::SharedFsDeath {
            left.processes.clear();
        }
        if is_power_loss {
            left.boots = self.boots.wrapping_add(1);
        }
        if is_power_loss && self.is_memory() {
            left.arena = new_arena(self.options).expect("an empty arena");
            left.twins.clear();
            left.recovered.clear();
            return left;
        }
        let mut choose_of_arena = |contents| choose(0, contents);
        let left_arena =
            if is_power_loss { arena.after_crash(&mut choose_of_arena) } else { arena.after_process_death() };
        left.arena = Arc::new(left_arena);
        let (mut number, gate) = (0, &left.gate);
        let mut crash_memory = |memory: &Arc<SharedMemory>| {
            number += 1;
            let crash_twin = |twin: &CrashTwin| {
                let mut choose = |contents| choose(number, contents);
                let left = if is_power_loss { twin.after_crash(&mut choose) } else { twin.copy() };
                Arc::new(SharedMemory::Twin(left.behind_gate(gate)))
            };
            memory.twin().map_or_else(|| Arc::clone(memory), crash_twin)
        };
        left.ring = self.ring.as_ref().map(&mut crash_memory);
        left.twins.retain(|_, twins| !twins.is_removed.load(Ordering::Relaxed));
        for twins in left.twins.values_mut() {
            let [log, control, leases] = twins.each().map(&mut crash_memory);
            *twins = SessionTwins { log, control, leases, is_removed: Arc::default() };
        }
        left
    }

    /// Returns a machine on the same media, on which SharedFS does not run.
    ///
    /// An observer uses it while the node works. It does not learn of sessions that begin later.
    #[must_use]
    pub fn without_shared_fs(&self) -> Self {
        Self {
            options: self.options,
            arena: Arc::clone(&self.arena),
            twins: self.twins.clone(),
            ring: self.ring.clone(),
            node: None,
            stale_arena: self.stale_arena.clone(),
            recovered: self.recovered.clone(),
            processes: self.processes.clone(),
            last_pid: self.last_pid,
            boots: self.boots,
            sessions_made: self.sessions_made,
            gate: Arc::clone(&self.gate),
        }
    }

    /// Returns the memory beside the arena.
    fn memories(&self) -> impl Iterator<Item = &CrashTwin> {
        self.ring.iter().chain(self.twins.values().flat_map(SessionTwins::each)).filter_map(|memory| memory.twin())
    }

    /// Calls `observer` at each persist point, just before it takes effect, and in the middle of each commit.
    ///
    /// A crash there ([`Self::after_crash`]) is the worst of the moments since the persist point before. Sessions that
    /// begin later are not observed.
    pub fn on_persist(&self, observer: &MachineObserver) {
        let call = || Arc::clone(observer);
        let (of_arena, of_rows) = (call(), call());
        self.arena.on_persist(Box::new(move |_| of_arena()));
        self.arena.database().on_commit(Box::new(move || of_rows()));
        for memory in self.memories() {
            let of_memory = call();
            memory.on_persist(Box::new(move |_| of_memory()));
        }
    }

    /// Stops calling the observer.
    pub fn stop_observing(&self) {
        self.arena.stop_observing();
        self.arena.database().stop_observing();
        self.memories().for_each(CrashTwin::stop_observing);
    }

    /// Writes an unsettled page back, as the kernel may at any moment.
    pub fn write_back(&self, random: &mut SimRandom) {
        let segments = self.arena.segments();
        let of_arena: Vec<_> =
            segments.iter().filter_map(|segment| self.arena.segment_memory(segment.number)).collect();
        let all: Vec<&CrashTwin> = self.memories().chain(of_arena.iter().map(|twin| &**twin)).collect();
        let unsettled: Vec<_> =
            all.iter().flat_map(|twin| twin.unsettled_pages().into_iter().map(move |page| (*twin, page))).collect();
        if let Some((twin, page)) = random.pick(&unsettled) {
            twin.write_back_page(page);
        }
    }
}

/// Removes a session's memory.
fn remove_memory(twins: &mut BTreeMap<SessionId, SessionTwins>, id: SessionId) {
    if let Some(removed) = twins.remove(&id) {
        removed.is_removed.store(true, Ordering::Relaxed);
    }
}

/// Removes the ended sessions that are committed as a whole, with their memory; returns their numbers.
fn remove_ended(node: &mut Node, twins: &mut BTreeMap<SessionId, SessionTwins>) -> Vec<SessionId> {
    let ended: Vec<_> = remove_ended_sessions(node).into_iter().map(|removed| removed.session.id).collect();
    for &id in &ended {
        remove_memory(twins, id);
        node.remove_session_row(id);
    }
    ended
}
