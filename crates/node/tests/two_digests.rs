//! Two digests of the same frames end with the same tree.
//!
//! A writing node digests random updates of three sessions. SharedFS dies in between, with and without a commit. A
//! replica applies the journal's frames, in a store of its own with its own commits. At equal positions the canonical
//! dumps must be equal.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ashlar_journal::{FrameBody, JournalIdentity, JournalRing, OwnAct};
use ashlar_log::{AppendError, Log};
use ashlar_node::digest::commit::{await_no_copy, commit_with};
use ashlar_node::journal::acts::journal_act;
use ashlar_node::journal::log_limits::recall_room;
use ashlar_node::journal::{CopySender, NodeJournal, Replica, ReplicaFault};
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::{NodeRequest, RequestTerms, RequestTicket};
use ashlar_node::records::apply::Slice;
use ashlar_node::recovery::recover_logs;
use ashlar_node::recovery::take_up::{FoundSession, SoundSession, take_up_sessions};
use ashlar_node::sessions::admission::Refused;
use ashlar_node::sessions::beginning::{BegunSession, begin_session};
use ashlar_node::sessions::identity::{Process, ProcessTable, SessionIdentity};
use ashlar_node::sessions::session::{LogRoom, ServedSession, SessionMemory};
use ashlar_node::sessions::session_page::SessionPage;
use ashlar_node::{Node, NodeCore, NodeLimits, NodeTime};
use ashlar_pmem::{CrashMedium, CrashTwin, MediumKind, Persistent, SharedMemory};
use ashlar_store::{DumpComparison, MemoryArena, MemoryArenaOptions, Store, StoreError, compare_dumps};
use ashlar_tests::random::Random;
use ashlar_types::{
    Access, Epoch, FileKind, FileSystemId, InodeId, JournalPosition, LeaseMode, LeaseScope, LogPosition, NodeNumber,
    QuotaKey, QuotaLimits, SessionId, Timestamp, WantedLease,
};
use ashlar_update::{Create, Rename, SetAttributes, Update};
use ashlar_wire::{ControlPage, Credit, CreditKind, LeaseRequest, LeaseTable, Need, Request, SessionKind};

const NODE: NodeNumber = NodeNumber::FIRST;
const WRITER: SessionId = SessionId(1);
/// It has files open.
const HOLDER: SessionId = SessionId(2);
/// An ordinary user, which reads.
const READER: SessionId = SessionId(3);
const PROCESS: Process = Process { pid: 1, start_ticks: 1, boot: [0; 16] };
/// Short enough to be reused several times.
const RING_BYTES: u64 = 1 << 20;
const STEPS: u32 = 300;

struct OneProcess;

impl ProcessTable for OneProcess {
    fn is_gone(&self, _: &Process) -> bool {
        false
    }
}

/// The memory of one session, which outlives SharedFS.
struct KeptMemory {
    id: SessionId,
    log: Arc<SharedMemory>,
    control: Arc<SharedMemory>,
    page: Arc<SharedMemory>,
}

/// All that outlives SharedFS.
struct Machine {
    arena: Arc<MemoryArena>,
    ring: Arc<SharedMemory>,
    sessions: Vec<KeptMemory>,
    now: NodeTime,
}

fn make_arena() -> Arc<MemoryArena> {
    let segment_blocks = vec![2048];
    let arena = Arc::new(MemoryArena::new(&MemoryArenaOptions::new(CrashMedium::Words, segment_blocks)));
    Store::format_in_memory(&arena, Timestamp::default()).expect("formatted");
    arena
}

fn make_ring() -> Arc<SharedMemory> {
    let bytes = JournalRing::<SharedMemory>::bytes_for(RING_BYTES) as usize;
    let ring = Arc::new(SharedMemory::Twin(CrashTwin::new(CrashMedium::Words, bytes)));
    JournalRing::format(Arc::clone(&ring), identity(), Epoch::default()).expect("formatted");
    ring
}

fn identity() -> JournalIdentity {
    JournalIdentity { file_system: FileSystemId(1), node: NODE }
}

impl Machine {
    fn make_node(&self) -> Node {
        let store = Store::open_in_memory(Arc::clone(&self.arena)).expect("a sound store");
        let journal = NodeJournal::open(&store, Arc::clone(&self.ring), identity()).expect("a sound journal");
        let limits = NodeLimits::new(MediumKind::Pmem);
        let mut node = Node::new(store, limits, Arc::new(OneProcess), self.now).expect("a sound store");
        node.journal = Some(journal);
        node
    }

    fn start() -> (Self, Node) {
        let wall = Timestamp { seconds: 1000, nanoseconds: 0 };
        let now = NodeTime { since_boot: Duration::from_secs(5), wall };
        let mut machine = Self { arena: make_arena(), ring: make_ring(), sessions: Vec::new(), now };
        let mut node = machine.make_node();
        take_up_sessions(&mut node, BTreeMap::new()).expect("nothing to replay");
        for (id, uid) in [(WRITER, 0), (HOLDER, 0), (READER, 7)] {
            machine.add_session(&mut node, id, uid);
        }
        (machine, node)
    }

    fn add_session(&mut self, node: &mut Node, id: SessionId, uid: u32) {
        self.begin(node, id, uid).expect("begun");
    }

    fn begin(&mut self, node: &mut Node, id: SessionId, uid: u32) -> Result<BegunSession, Refused> {
        let memory = SessionMemory::in_twins(CrashMedium::Words, id, 1, 64 << 10).expect("long enough");
        let (log, page) = (Arc::clone(&memory.log_memory), Arc::clone(memory.page.memory()));
        self.sessions.push(KeptMemory { id, log, control: Arc::clone(memory.control.memory()), page });
        let (groups, kind, label) = (Vec::new(), SessionKind::Process, String::new());
        let owner = SessionIdentity { process: PROCESS, uid, gid: uid, groups, kind, label };
        owner.store(memory.page.memory()).expect("stored");
        let mut session = ServedSession::new(id, owner, 1, memory, self.now.since_boot).expect("long enough");
        session.grant_credit(Credit { blocks: 1 << 40, metadata_bytes: 1 << 50 }, CreditKind::Common);
        session.ranges.add(&session.page, InodeId(1000 * id.0), 900);
        begin_session(node, session, false)
    }

    /// SharedFS dies, and starts again.
    fn restart(&mut self, node: Node, link: Link) -> (Node, Link) {
        drop(node);
        self.arena = Arc::new(self.arena.after_process_death());
        let mut node = self.make_node();
        node.begin_recovery();
        let mut found = BTreeMap::new();
        for KeptMemory { id, log, control, page } in &self.sessions {
            let owner = SessionIdentity::load(page).expect("it has an owner");
            let page = SessionPage::new(Arc::clone(page)).expect("long enough");
            let memory = SessionMemory {
                log: Log::open(Arc::clone(log)).expect("a sound log"),
                log_memory: Arc::clone(log),
                log_room: LogRoom { bytes: log.len(), allocated: log.len() },
                control: ControlPage::new(Arc::clone(control)).expect("long enough"),
                leases: LeaseTable::new(Arc::clone(page.memory())).expect("long enough"),
                page,
            };
            let state = (node.store.committed(*id), true);
            let session = ServedSession::take_up(*id, owner, 1, memory, state, self.now.since_boot).expect("taken up");
            found.insert(*id, FoundSession::Sound(Box::new(SoundSession { session, mapped: None })));
        }
        take_up_sessions(&mut node, found).expect("replayed");
        let mut link = link.reconnect(&mut node);
        let mut await_copy = |state: &mut NodeCore, upto: JournalPosition| {
            link.follow(state);
            await_no_copy(state, upto)
        };
        recover_logs(&mut node, &mut await_copy).expect("recovered");
        (node, link)
    }
}

/// Serves a request, with commits whenever it waits.
fn serve(node: &mut Node, link: &mut Link, request: NodeRequest) {
    let ticket = node.begin_request(request, RequestTerms::OWN);
    for _ in 0..1000 {
        match node.advance(ticket) {
            Progress::Done(answer) => return drop(answer.expect("granted")),
            Progress::More => {}
            Progress::Wait(..) => commit(node, link),
        }
    }
    panic!("the request waits for ever");
}

/// Commits; the replica has the frames first.
fn commit(node: &mut Node, link: &mut Link) {
    let mut await_copy = |state: &mut NodeCore, upto: JournalPosition| {
        link.follow(state);
        await_no_copy(state, upto)
    };
    commit_with(node, &mut await_copy).expect("committed");
    // As LibFS does before it appends.
    for session in node.sessions.values() {
        session.log.release(session.control.committed());
    }
}

/// The writer's files: number and name, once for each name.
struct Files {
    files: Vec<(InodeId, Vec<u8>)>,
    next: u64,
}

impl Files {
    fn create(&mut self, name: Vec<u8>, mode: u32, at: Timestamp, run: &mut dyn FnMut(&Update<'_>)) {
        let inode = InodeId(1000 + self.next);
        self.next += 1;
        let (parent, kind, empty) = (InodeId::ROOT, FileKind::Regular, &[][..]);
        let (uid, gid, device) = (0, 0, 0);
        let (target, acl_access, acl_default) = (empty, empty, empty);
        run(&Update::Create(Create {
            inode,
            parent,
            name: &name,
            kind,
            mode,
            uid,
            gid,
            device,
            at,
            target,
            acl_access,
            acl_default,
        }));
        self.files.push((inode, name));
    }

    fn random_update(&mut self, random: &mut Random, at: Timestamp, run: &mut dyn FnMut(&Update<'_>)) {
        let (parent, strip) = (InodeId::ROOT, true);
        let name = format!("file{}", random.below(1 << 40)).into_bytes();
        let mode = if random.one_in(2) { 0o600 } else { 0o644 };
        let Some((inode, old)) = random.pick(&self.files).cloned().filter(|_| !random.one_in(5)) else {
            return self.create(name, mode, at, run);
        };
        match random.below(8) {
            0 => {
                run(&Update::Unlink { inode, parent, name: &old, release: random.one_in(2), at });
                self.files.retain(|(_, other)| *other != old);
            }
            1 => {
                run(&Update::Link { inode, parent, name: &name, at });
                self.files.push((inode, name));
            }
            2 => {
                let (new_parent, new_name, target, exchange, whiteout) = (parent, &name[..], None, false, None);
                let (name, release) = (&old[..], true);
                let rename =
                    Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at };
                run(&Update::Rename(rename));
                self.files.iter_mut().filter(|(_, other)| *other == old).for_each(|file| file.1 = new_name.to_vec());
            }
            3 => run(&Update::Resize { inode, size: random.below(40_000), strip, at }),
            4 => {
                let (mode, uid, gid, accessed, modified) = (Some(mode), None, None, None, None);
                run(&Update::SetAttributes(SetAttributes { inode, mode, uid, gid, accessed, modified, at }));
            }
            _ => {
                let size = 1 + random.below(6000) as usize;
                let data = random.bytes(size);
                run(&Update::Write { inode, offset: random.below(30_000), at, strip, data: &data });
            }
        }
    }
}

fn append(node: &Node, id: SessionId, update: &Update<'_>) -> bool {
    let log = &node.sessions[&id].log;
    log.append(log.seal_count(), update.kind() as u8, &update.encode().parts()).is_ok()
}

fn apply_all(node: &mut Node, link: &mut Link) {
    for id in node.live_ids() {
        if let Some(settled) = node.settled(id) {
            while !node.apply(id, settled, Slice::Batch) {
                commit(node, link);
            }
        }
    }
    let fenced: Vec<_> = node.sessions.values().filter_map(|session| session.fenced.as_ref()).collect();
    assert!(fenced.is_empty(), "{fenced:?}");
    assert!(node.failure.is_none(), "{:?}", node.failure);
}

fn take_leases(node: &mut Node, link: &mut Link) {
    let lease = WantedLease { inode: InodeId::ROOT, mode: LeaseMode::Write, scope: LeaseScope::Subtree };
    let request = Request::Acquire(vec![LeaseRequest { lease, need: Need::default() }]);
    serve(node, link, NodeRequest::Session(WRITER, request));
}

/// A replica, its memory, and its connection to the writing node.
struct Link {
    arena: Arc<MemoryArena>,
    ring: Arc<SharedMemory>,
    replica: Replica,
    sender: CopySender,
}

impl Link {
    fn start(node: &mut NodeCore) -> Self {
        let (arena, ring) = (make_arena(), make_ring());
        let (replica, sender) = connect(node, open_replica(&arena, &ring));
        Self { arena, ring, replica, sender }
    }

    /// The replica's process dies, and starts again.
    fn restart(self, node: &mut NodeCore) -> Self {
        let Self { arena, ring, replica, .. } = self;
        drop(replica);
        let arena = Arc::new(arena.after_process_death());
        let (replica, sender) = connect(node, open_replica(&arena, &ring));
        Self { arena, ring, replica, sender }
    }

    /// The writing node has started again.
    fn reconnect(self, node: &mut NodeCore) -> Self {
        let (replica, sender) = connect(node, self.replica);
        Self { replica, sender, ..self }
    }

    /// Sends the journal to the replica, which makes it durable and applies it.
    fn follow(&mut self, node: &mut NodeCore) {
        let journal = node.journal.as_mut().expect("a journal");
        while let Some(part) = self.sender.next_part(journal, 1000).expect("frames") {
            if self.replica.room() < part.bytes.len() as u64 {
                self.commit();
            }
            self.replica.take_frames(&part).expect("the next frames");
            self.replica.flush().expect("durable");
            while self.replica.apply_frames(3).expect("applied") {}
        }
        journal.handle_ack(self.replica.durable());
    }

    fn commit(&mut self) {
        if let Some(job) = self.replica.begin_commit() {
            self.replica.finish_commit(job.run()).expect("committed");
        }
    }
}

fn open_replica(arena: &Arc<MemoryArena>, ring: &Arc<SharedMemory>) -> Replica {
    let store = Store::open_in_memory(Arc::clone(arena)).expect("a sound store");
    Replica::open(store, Arc::clone(ring), identity()).expect("a sound copy")
}

fn connect(node: &mut NodeCore, mut replica: Replica) -> (Replica, CopySender) {
    let journal = node.journal.as_mut().expect("a journal");
    let (plan, sender) = CopySender::begin(journal, &replica.copy_state()).expect("a copy of this journal");
    replica.follow(plan).expect("followed");
    (replica, sender)
}

fn assert_equal(pair: &mut Pair) {
    let comparison = compare(pair);
    assert!(comparison.is_equal(), "{comparison:#?}");
}

fn compare(pair: &mut Pair) -> DumpComparison {
    commit(&mut pair.node, &mut pair.link);
    pair.link.follow(&mut pair.node);
    let Pair { node, link: Link { replica, .. }, .. } = pair;
    let journal = node.journal.as_ref().expect("a journal");
    assert_eq!(journal.mark(), replica.mark(), "all frames are applied");
    let (one, two) = (node.store.dump_lines().expect("lines"), replica.store().dump_lines().expect("lines"));
    compare_dumps(one, two, 5).expect("sound dumps")
}

/// The writing node, its machine, and the link to its replica.
struct Pair {
    machine: Machine,
    node: Node,
    link: Link,
}

impl Pair {
    fn start() -> Self {
        let (machine, mut node) = Machine::start();
        let mut link = Link::start(&mut node);
        take_leases(&mut node, &mut link);
        Self { machine, node, link }
    }

    fn step(self, random: &mut Random) -> Self {
        let Self { mut machine, mut node, mut link } = self;
        match random.below(12) {
            0..=3 => apply_all(&mut node, &mut link),
            4 => commit(&mut node, &mut link),
            5 => {
                serve(&mut node, &mut link, NodeRequest::Session(WRITER, Request::InodeRange));
                serve(&mut node, &mut link, NodeRequest::Session(WRITER, Request::SyncAll));
            }
            6 => serve(&mut node, &mut link, NodeRequest::SweepOrphans),
            7 => {
                let limits = QuotaLimits { blocks: Some(100_000 + random.below(9)), inodes: None };
                let key = QuotaKey::User(10 + random.below(9) as u32);
                serve(&mut node, &mut link, NodeRequest::SetQuota(key, limits));
            }
            8 => link.follow(&mut node),
            9 => link.commit(),
            10 if random.one_in(3) => {
                (node, link) = machine.restart(node, link);
                take_leases(&mut node, &mut link);
            }
            11 if random.one_in(3) => link = link.restart(&mut node),
            _ => {}
        }
        Self { machine, node, link }
    }
}

fn run(seed: u64) {
    let random = &mut Random::new(seed);
    let mut pair = Pair::start();
    let mut files = Files { files: Vec::new(), next: 0 };
    for step in 0..STEPS {
        pair.machine.now.wall.seconds += 1;
        pair.machine.now.since_boot += Duration::from_millis(10);
        pair.node.handle_time(pair.machine.now);
        let at = Timestamp { nanoseconds: step, ..pair.machine.now.wall };
        let (node, link) = (&mut pair.node, &mut pair.link);
        files.random_update(random, at, &mut |update| {
            if !append(node, WRITER, update) {
                apply_all(node, link);
                commit(node, link);
                assert!(append(node, WRITER, update), "there is room");
            }
        });
        if let Some((inode, _)) = random.pick(&files.files) {
            let control = &node.sessions[&HOLDER].control;
            match random.below(4) {
                0 => _ = control.open_handle(*inode),
                1 => _ = control.close_handle(*inode),
                _ => {}
            }
            // Some of these times lie in the future, and some of the files the reader may not read.
            let at = Timestamp { seconds: at.seconds + random.below(5) as i64, ..at };
            append(node, READER, &Update::Accessed { inode: *inode, at });
        }
        pair = pair.step(random);
        if step % 20 == 0 {
            assert_equal(&mut pair);
        }
    }
    apply_all(&mut pair.node, &mut pair.link);
    assert_equal(&mut pair);
}

#[test]
fn replica_of_random_updates_has_the_same_tree() {
    (1..40).for_each(run);
}

#[test]
fn right_that_a_handle_keeps_stands_before_its_verdict() {
    let Pair { mut node, mut link, .. } = Pair::start();
    let mut files = Files { files: Vec::new(), next: 0 };
    let at = Timestamp { seconds: 1000, nanoseconds: 0 };
    files.create(b"open".to_vec(), 0o644, at, &mut |update| assert!(append(&node, WRITER, update)));
    apply_all(&mut node, &mut link);
    let inode = files.files[0].0;
    let reader = node.sessions.get_mut(&READER).expect("a session");
    reader.control.open_handle(inode);
    reader.rights.note_opened(inode, Access::READ, |_| Vec::new());
    let (mode, uid, gid, accessed, modified) = (Some(0o600), None, None, None, None);
    let narrow = Update::SetAttributes(SetAttributes { inode, mode, uid, gid, accessed, modified, at });
    assert!(append(&node, WRITER, &narrow));
    let ring = node.journal.as_ref().expect("a journal").ring();
    let (mut cursor, mut buffer, mut kept) = (ring.end_cursor(), Vec::new(), None);
    apply_all(&mut node, &mut link);
    let ring = node.journal.as_ref().expect("a journal").ring();
    while let Some(frame) = ring.read_frame(cursor, &mut buffer).expect("a sound journal") {
        match frame.decode().expect("a frame") {
            FrameBody::Own(OwnAct::Right { session, inode, access }) => kept = Some((session, inode, access)),
            FrameBody::Verdict(verdict) if verdict.session == WRITER => break,
            _ => {}
        }
        cursor = frame.next();
    }
    assert_eq!(kept, Some((READER, inode, Access::READ.0 as u8)));
}

/// Runs updates that show a fault, which is planted in the replica or not.
fn run_with(fault: Option<ReplicaFault>, shown: ReplicaFault) -> DumpComparison {
    let mut pair = Pair::start();
    let Pair { node, link, .. } = &mut pair;
    if let Some(fault) = fault {
        link.replica.plant(fault);
    }
    let mut files = Files { files: Vec::new(), next: 0 };
    let at = Timestamp { seconds: 1000, nanoseconds: 0 };
    files.create(b"file".to_vec(), 0o644, at, &mut |update| assert!(append(node, WRITER, update)));
    let (inode, parent) = (files.files[0].0, InodeId::ROOT);
    apply_all(node, link);
    let later = Timestamp { seconds: 1001, nanoseconds: 0 };
    let (by, update) = match shown {
        ReplicaFault::KeptInode => {
            node.sessions[&HOLDER].control.open_handle(inode);
            (WRITER, Update::Unlink { inode, parent, name: b"file", release: true, at })
        }
        ReplicaFault::BatchBorder => (WRITER, Update::Write { inode, offset: 0, at, strip: true, data: b"data" }),
        ReplicaFault::AccessTime => (WRITER, Update::Accessed { inode, at: later }),
        ReplicaFault::RefusedRecord => {
            let (mode, uid, gid, accessed, modified) = (Some(0o666), None, None, None, None);
            (READER, Update::SetAttributes(SetAttributes { inode, mode, uid, gid, accessed, modified, at }))
        }
    };
    assert!(append(node, by, &update));
    let settled = node.settled(by).expect("settled");
    while !node.apply(by, settled, Slice::Batch) {}
    assert_eq!(node.sessions[&by].fenced.is_some(), shown == ReplicaFault::RefusedRecord);
    compare(&mut pair)
}

#[test]
fn each_planted_fault_of_a_replica_is_found() {
    use ReplicaFault::{AccessTime, BatchBorder, KeptInode, RefusedRecord};
    for fault in [KeptInode, BatchBorder, AccessTime, RefusedRecord] {
        let sound = run_with(None, fault);
        assert!(sound.is_equal(), "{fault:?}: {sound:#?}");
        assert!(!run_with(Some(fault), fault).is_equal(), "{fault:?} is not found");
    }
}

/// Starts a pair, with the creation of one file in the writer's log. Returns where that ends.
fn start_with_file() -> (Pair, LogPosition) {
    let mut pair = Pair::start();
    let at = Timestamp { seconds: 1000, nanoseconds: 0 };
    Files { files: Vec::new(), next: 0 }
        .create(b"file".to_vec(), 0o644, at, &mut |update| assert!(append(&pair.node, WRITER, update)));
    let settled = pair.node.settled(WRITER).expect("settled");
    (pair, settled)
}

/// A start connects the replica, and may commit before the first frame is sent.
#[test]
fn commit_waits_for_a_replica_that_has_just_connected() {
    let (Pair { mut node, link, .. }, settled) = start_with_file();
    let mut link = link.restart(&mut node);
    while !node.apply(WRITER, settled, Slice::Batch) {}
    assert!(matches!(commit_with(&mut node, &mut await_no_copy), Err(StoreError::CommitUnderWay)));
    commit(&mut node, &mut link);
    assert_eq!(node.store.committed(WRITER), settled);
}

/// Writes so many blocks to the writer's newest file, and applies and commits them on the writing node.
fn write_blocks(node: &mut Node, link: &mut Link, inode: InodeId, blocks: u64) {
    let (data, at) = ([7; 12 << 10], Timestamp { seconds: 1002, nanoseconds: 0 });
    for offset in (0..blocks * 4096).step_by(data.len()) {
        assert!(append(node, WRITER, &Update::Write { inode, offset, at, strip: true, data: &data }));
        apply_all(node, link);
        commit(node, link);
    }
}

/// A commit sets blocks free, and the two nodes commit at different positions.
#[test]
fn replica_commits_where_a_batch_needs_freed_blocks() {
    let mut pair = Pair::start();
    let Pair { node, link, .. } = &mut pair;
    let at = Timestamp { seconds: 1000, nanoseconds: 0 };
    let mut files = Files { files: Vec::new(), next: 0 };
    files.create(b"first".to_vec(), 0o644, at, &mut |update| assert!(append(node, WRITER, update)));
    let first = files.files[0].0;
    write_blocks(node, link, first, 1900);
    link.commit();
    let unlink = Update::Unlink { inode: first, parent: InodeId::ROOT, name: b"first", release: true, at };
    assert!(append(node, WRITER, &unlink));
    files.create(b"second".to_vec(), 0o644, at, &mut |update| assert!(append(node, WRITER, update)));
    let committed = link.replica.committed();
    write_blocks(node, link, files.files[1].0, 200);
    assert!(link.replica.committed() > committed, "the replica had enough blocks, so nothing was shown");
    let compared = compare(&mut pair);
    assert!(compared.is_equal(), "{compared:#?}");
}

/// Fills the journal up to so many bytes, with acts that no commit has made reusable.
fn fill_journal(node: &mut Node, bytes: u64) {
    while node.journal.as_ref().expect("it has one").needed_bytes() < bytes {
        journal_act(node, OwnAct::Inodes { session: WRITER, first: InodeId(1 << 20), count: 1 });
    }
}

/// Goes on with a request, at most a hundred times; returns whether it has ended.
fn is_over(node: &mut Node, ticket: RequestTicket) -> bool {
    (0..100).any(|_| matches!(node.advance(ticket), Progress::Done(_)))
}

/// While the replica is away, the journal fills. Then appends wait; logs are applied, and sessions end.
#[test]
fn appends_alone_wait_while_the_journal_is_full() {
    let (Pair { mut node, link, .. }, _) = start_with_file();
    let mut link = link.restart(&mut node);
    fill_journal(&mut node, RING_BYTES / 4 * 3 - (12 << 10));
    let accessed = Update::Accessed { inode: InodeId(1000), at: Timestamp { seconds: 1001, nanoseconds: 0 } };
    assert!(append(&node, HOLDER, &accessed));
    recall_room(&mut node, READER);
    let mut appended = 0;
    let waiting = loop {
        let log = Arc::clone(&node.sessions[&WRITER].log);
        match log.append(log.seal_count(), accessed.kind() as u8, &accessed.encode().parts()) {
            Ok(_) => appended += 1,
            Err(AppendError::Limited { upto }) => {
                let request = NodeRequest::Session(WRITER, Request::LogLimit { upto, reads: false });
                let ticket = node.begin_request(request, RequestTerms::OWN);
                if !is_over(&mut node, ticket) {
                    break ticket;
                }
            }
            Err(error) => panic!("{error}"),
        }
    };
    assert!(appended > 100, "the room that was left is not used: {appended} appends");
    for id in [WRITER, HOLDER] {
        let settled = node.settled(id).expect("settled");
        assert!(node.apply(id, settled, Slice::All), "{id} is not applied");
    }
    let ticket = node.begin_request(NodeRequest::EndSessions(vec![HOLDER]), RequestTerms::OWN);
    assert!(is_over(&mut node, ticket), "the end of a session waits");
    assert!(node.failure.is_none() && node.sessions[&WRITER].fenced.is_none());
    assert!(!is_over(&mut node, waiting), "there is no room");
    commit(&mut node, &mut link);
    assert!(is_over(&mut node, waiting), "a commit makes room");
}

/// A session begins while no room may be promised: it appends nothing before there is some.
#[test]
fn session_that_begins_without_room_is_limited() {
    let Pair { mut machine, mut node, link } = Pair::start();
    let mut link = link.restart(&mut node);
    fill_journal(&mut node, RING_BYTES / 16 * 13);
    machine.begin(&mut node, SessionId(4), 0).expect("begun");
    let log = Arc::clone(&node.sessions[&SessionId(4)].log);
    let accessed = Update::Accessed { inode: InodeId::ROOT, at: Timestamp { seconds: 1001, nanoseconds: 0 } };
    let append = || log.append(log.seal_count(), accessed.kind() as u8, &accessed.encode().parts());
    let Err(AppendError::Limited { upto }) = append() else { panic!("it is not limited") };
    let ask = |node: &mut Node, reads| {
        let request = Request::LogLimit { upto, reads };
        let ticket = node.begin_request(NodeRequest::Session(SessionId(4), request), RequestTerms::OWN);
        is_over(node, ticket)
    };
    assert!(!ask(&mut node, false), "there is no room for a change");
    assert!(ask(&mut node, true), "a read waits");
    append().expect("it may append what a read needs");
    commit(&mut node, &mut link);
    assert!(ask(&mut node, false));
    let settled = node.settled(SessionId(4)).expect("settled");
    node.apply(SessionId(4), settled, Slice::All);
    assert!(node.sessions[&SessionId(4)].fenced.is_none());
}

/// The log's word that limits appends is the session's to change.
#[test]
fn session_that_passes_its_limit_is_fenced() {
    let (Pair { mut node, .. }, _) = start_with_file();
    fill_journal(&mut node, RING_BYTES / 16 * 13);
    recall_room(&mut node, READER);
    let log = Arc::clone(&node.sessions[&WRITER].log);
    log.set_limit(None);
    let accessed = Update::Accessed { inode: InodeId(1000), at: Timestamp { seconds: 1001, nanoseconds: 0 } };
    assert!(append(&node, WRITER, &accessed));
    let settled = node.settled(WRITER).expect("settled");
    node.apply(WRITER, settled, Slice::All);
    let reason = node.sessions[&WRITER].fenced.as_ref().expect("fenced");
    assert!(reason.contains("beyond its limit"), "{reason}");
}

/// Each session that begins takes room for its end.
#[test]
fn no_session_begins_while_the_journal_is_nearly_full() {
    let Pair { mut machine, mut node, link } = Pair::start();
    let mut link = link.restart(&mut node);
    fill_journal(&mut node, RING_BYTES / 16 * 15);
    let refused = machine.begin(&mut node, SessionId(4), 0).err();
    assert!(
        matches!(&refused, Some(Refused::Because(reason)) if reason.contains("the journal is full")),
        "{refused:?}"
    );
    commit(&mut node, &mut link);
    machine.begin(&mut node, SessionId(5), 0).expect("begun");
}

/// Frames that are kept for a replica alone leave room after a start, too: no commit need come that would free them.
#[test]
fn kept_frames_leave_room_after_a_start() {
    let Pair { mut machine, mut node, mut link } = Pair::start();
    fill_journal(&mut node, RING_BYTES / 16 * 9);
    commit(&mut node, &mut link);
    let needed = |node: &Node| node.journal.as_ref().expect("it has one").needed_bytes();
    assert_eq!(needed(&node), 0);
    let ring = node.journal.as_ref().expect("it has one").ring();
    assert!(ring.used() > ring.capacity() / 4, "too little is kept");
    (node, _) = machine.restart(node, link);
    assert!(needed(&node) < 1000, "{} bytes are needed", needed(&node));
}
