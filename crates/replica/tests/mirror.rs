//! A writer and a replica on two fabrics of this machine: real arenas, real sockets, real threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ashlar_cluster::chain::{ChainTiming, LinkProblem};
use ashlar_cluster::{ClusterDocument, CopiesNeeded, DocumentMember, HardState, MemberRole, Standing};
use ashlar_fabric::{Fabric, FabricIdentity, Member, Security, TcpFabric};
use ashlar_journal::OwnAct;
use ashlar_node::digest::commit::{begin_commit, finish_commit};
use ashlar_node::journal::acts::journal_act;
use ashlar_node::pending::progress::{Progress, WaitFor};
use ashlar_node::pending::{NodeRequest, RequestTerms};
use ashlar_node::recovery::take_up::take_up_sessions;
use ashlar_node::sessions::identity::{Process, ProcessTable};
use ashlar_node::{Node, NodeCore, NodeLimits, NodeTime};
use ashlar_pmem::{Arena, ArenaOptions, MediumKind};
use ashlar_replica::mirror::{
    ClusterFiles, LeaderOptions, LeaderService, LeaderStatus, ReplicaService, WriterNode, adopt_copy,
};
use ashlar_replica::{open_copy, open_journal};
use ashlar_store::{Store, StoreError, compare_dumps};
use ashlar_types::{ArenaId, Epoch, Errno, NodeNumber, QuotaKey, QuotaLimits, Timestamp};
use parking_lot::{Condvar, Mutex, MutexGuard};

const PATIENCE: Duration = Duration::from_secs(20);

struct NoProcesses;

impl ProcessTable for NoProcesses {
    fn is_gone(&self, _: &Process) -> bool {
        true
    }
}

fn node_number(number: u16) -> NodeNumber {
    NodeNumber::new(number).expect("a node's number")
}

fn since_boot() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn now() -> NodeTime {
    NodeTime { since_boot: since_boot(), wall: Timestamp { seconds: 1000, nanoseconds: 0 } }
}

/// A writing node without sessions. Its updates are limits of users.
struct Writer {
    node: Mutex<Node>,
    progress: Condvar,
    standing: Mutex<Option<Standing>>,
}

impl WriterNode for Writer {
    fn with_node(&self, work: &mut dyn FnMut(&mut NodeCore)) {
        let mut node = self.node.lock();
        node.handle_time(now());
        work(&mut node);
        while node.poll_effect().is_some() {}
        self.progress.notify_all();
    }

    fn now(&self) -> Duration {
        since_boot()
    }

    fn handle_standing(&self, standing: Standing) {
        *self.standing.lock() = Some(standing);
    }

    fn handle_replicated(&self) {
        self.progress.notify_all();
    }

    fn handle_failure(&self, error: StoreError) {
        panic!("{error}");
    }
}

impl Writer {
    /// Serves a request, and waits for `patience` at most.
    fn serve(&self, leader: &LeaderService, request: NodeRequest, patience: Duration) -> Result<(), Errno> {
        let mut node = self.node.lock();
        node.limits.replication_patience = patience;
        node.handle_time(now());
        let ticket = node.begin_request(request, RequestTerms::OWN);
        let mut has_sent = false;
        loop {
            match node.advance(ticket) {
                Progress::Done(answer) => return answer.map(drop),
                Progress::More => {}
                Progress::Wait(event, until) => {
                    if event == WaitFor::Copies && !std::mem::replace(&mut has_sent, true) {
                        MutexGuard::unlocked(&mut node, || leader.send_now(self));
                        continue;
                    }
                    let pause = until.map_or(PATIENCE, |until| until.saturating_sub(since_boot()));
                    self.progress.wait_for(&mut node, pause);
                    node.handle_time(now());
                }
            }
        }
    }

    /// Limits a user, and returns once that is durable in all copies that count.
    fn set_limit(&self, leader: &LeaderService, user: u32, blocks: u64) -> Result<(), Errno> {
        self.journal_limit(user, blocks);
        self.serve(leader, NodeRequest::Sync, PATIENCE)
    }

    /// Limits a user, in the store and in the journal.
    fn journal_limit(&self, user: u32, blocks: u64) {
        let (key, limits) = (QuotaKey::User(user), QuotaLimits { blocks: Some(blocks), ..QuotaLimits::default() });
        self.with_node(&mut |core| {
            core.store.set_quota_limits(key, limits);
            journal_act(core, OwnAct::Limits { key, limits });
        });
    }

    /// Commits if all copies that count have the journal; returns whether it did.
    fn commit(&self) -> bool {
        let mut node = self.node.lock();
        let Some(mut job) = begin_commit(&mut node) else { return true };
        job.flush();
        let upto = job.awaited().expect("a journal");
        let is_there = node.journal.as_ref().is_some_and(|journal| journal.is_acknowledged(upto));
        let done = if is_there { job.run() } else { job.give_up() };
        finish_commit(&mut node, done).is_ok()
    }
}

/// The two arenas, whose nodes start and stop.
struct Mirror {
    places: [tempfile::TempDir; 2],
    document: ClusterDocument,
}

/// A running writer.
struct RunningWriter {
    node: Arc<Writer>,
    leader: Arc<LeaderService>,
    thread: JoinHandle<()>,
}

impl RunningWriter {
    /// Stops it: in order, or as a crash does.
    fn stop(self, in_order: bool) {
        if in_order {
            self.leader.end();
        } else {
            self.leader.abandon();
        }
        self.thread.join().expect("ended");
    }

    fn await_status(&self, what: &str, is_it: impl Fn(&LeaderStatus) -> bool) {
        await_condition(what, || is_it(&self.leader.status()), || format!("{:?}", self.leader.status()));
    }
}

/// A running replica.
struct RunningReplica {
    service: Arc<ReplicaService>,
    threads: [JoinHandle<()>; 2],
    is_over: Arc<AtomicBool>,
}

impl RunningReplica {
    fn stop(self) {
        self.service.end();
        self.threads.into_iter().for_each(|thread| thread.join().expect("ended"));
        assert!(self.is_over.load(Ordering::Acquire), "it ended without an error");
    }
}

fn await_condition(what: &str, is_it: impl Fn() -> bool, state: impl Fn() -> String) {
    let until = Instant::now() + PATIENCE;
    while !is_it() {
        assert!(Instant::now() < until, "not {what}: {}", state());
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Mirror {
    /// Makes two arenas of one file system, and the files of both members. The replica is empty, as the writer is.
    fn make(min_replicas: u8) -> Self {
        let places = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let paths: [_; 2] = [0, 1].map(|at: usize| places[at].path().join("arena"));
        let writer = Arena::create(&paths[0], &ArenaOptions::new(64 << 20)).expect("an arena");
        let file_system = writer.summary().file_system;
        let options =
            ArenaOptions { node: node_number(1), file_system: Some(file_system), ..ArenaOptions::new(64 << 20) };
        let replica = Arena::create(&paths[1], &options).expect("an arena");
        for arena in [&writer, &replica] {
            Store::format(arena, Timestamp { seconds: 1000, nanoseconds: 0 }).expect("formatted");
        }
        let arenas = [&writer, &replica].map(|arena| ArenaId(arena.summary().id));
        let [address_0, address_1] = [(); 2].map(|()| free_address());
        let first =
            DocumentMember { node: node_number(0), arena: arenas[0], address: address_0, role: MemberRole::Writer };
        let document = ClusterDocument::new(file_system.id, first, false)
            .and_then(|document| document.with_replica(arenas[1], address_1))
            .and_then(|document| document.with_min_replicas(min_replicas))
            .expect("a document");
        for path in &paths {
            let files = ClusterFiles::of(path);
            files.make().expect("a directory");
            files.write_document(&document).expect("written");
            files.write_hard_state(&HardState::default()).expect("written");
        }
        Self { places, document }
    }

    fn path(&self, at: usize) -> std::path::PathBuf {
        self.places[at].path().join("arena")
    }

    fn files(&self, at: usize) -> ClusterFiles {
        ClusterFiles::of(&self.path(at))
    }

    fn start_writer(&self) -> RunningWriter {
        self.start_writer_of(&self.document)
    }

    fn start_writer_of(&self, document: &ClusterDocument) -> RunningWriter {
        let at = usize::from(document.writer().node.get());
        let arena = Arc::new(Arena::open_when_free(&self.path(at), &|| true).expect("an arena"));
        let mut store = Store::open(Arc::clone(&arena)).expect("a store");
        let journal = open_journal(&arena, &mut store).expect("a journal");
        let limits = NodeLimits::new(MediumKind::Memory);
        let mut node = Node::new(store, limits, Arc::new(NoProcesses), now()).expect("a node");
        node.journal = Some(journal);
        take_up_sessions(&mut node, BTreeMap::new()).expect("replayed");
        let journal = node.journal.as_mut().expect("a journal");
        journal.answer_syncs();
        let end = journal.mark().position;
        let state = self.files(at).hard_state().expect("there");
        let fabric = fabric_of(document, at as u16);
        let options = LeaderOptions { alone_after: Duration::from_millis(200), ..LeaderOptions::default() };
        let leader = Arc::new(LeaderService::new(fabric, self.files(at), document, state, options, since_boot(), end));
        let node = Arc::new(Writer { node: Mutex::new(node), progress: Condvar::new(), standing: Mutex::new(None) });
        let (service, writer) = (Arc::clone(&leader), Arc::clone(&node));
        let thread = std::thread::spawn(move || service.run(&*writer));
        RunningWriter { node, leader, thread }
    }

    fn start_replica(&self) -> RunningReplica {
        self.start_replica_of(&self.document)
    }

    fn start_replica_of(&self, document: &ClusterDocument) -> RunningReplica {
        let arena = Arc::new(Arena::open_when_free(&self.path(1), &|| true).expect("an arena"));
        let replica = open_copy(&arena, self.document.cluster, node_number(0)).expect("a replica");
        let state = self.files(1).hard_state().expect("there");
        let (fabric, files, timing) = (fabric_of(&self.document, 1), self.files(1), ChainTiming::default());
        let service = ReplicaService::new(fabric, files, document, state, replica, timing, since_boot());
        let (service, is_over) = (Arc::new(service), Arc::new(AtomicBool::new(false)));
        let (one, two, over) = (Arc::clone(&service), Arc::clone(&service), Arc::clone(&is_over));
        let link = std::thread::spawn(move || {
            one.run_link(&since_boot).expect("no error of the copy");
            over.store(true, Ordering::Release);
        });
        let applier = std::thread::spawn(move || two.run_applier());
        RunningReplica { service, threads: [link, applier], is_over }
    }

    /// Starts both nodes, and waits until the replica is in sync.
    fn start_whole(&self) -> (RunningWriter, RunningReplica) {
        let (writer, replica) = (self.start_writer(), self.start_replica());
        writer.await_status("whole", |status| status.is_whole);
        (writer, replica)
    }

    /// Makes node 1 the writer, as `ashlar node promote` does.
    fn promote(&mut self) {
        self.document = self.document.with_promotion(node_number(1)).expect("a replica");
        self.files(1).write_document(&self.document).expect("written");
        let arena = Arc::new(Arena::open_when_free(&self.path(1), &|| true).expect("an arena"));
        assert!(adopt_copy(&arena, self.document.cluster, node_number(0)).expect("adopted"));
        assert!(!adopt_copy(&arena, self.document.cluster, node_number(0)).expect("adopted"), "there is no more to do");
    }

    /// Compares the trees of both arenas, while no node runs.
    fn compare(&self) {
        let [one, two] = [0, 1].map(|at| {
            let arena = Arc::new(Arena::open_when_free(&self.path(at), &|| true).expect("an arena"));
            Store::open(arena).expect("a store").dump_lines().expect("readable").collect::<Vec<_>>()
        });
        let compared = compare_dumps(one, two, 10).expect("readable");
        assert!(compared.is_equal(), "{:?}", compared.differences);
    }

    /// Ends both nodes once the replica has committed all that the writer has.
    fn finish(&self, writer: RunningWriter, replica: RunningReplica) {
        writer.node.serve(&writer.leader, NodeRequest::Sync, PATIENCE).expect("both copies");
        await_condition("committed", || writer.node.commit(), String::new);
        let end = writer.node.node.lock().journal.as_ref().expect("a journal").mark().position;
        let service = &replica.service;
        await_condition("level", || service.status().applied == end, || format!("{:?}", service.status()));
        writer.stop(true);
        replica.stop();
        self.compare();
    }
}

/// Returns the fabric of a member, which listens.
fn fabric_of(document: &ClusterDocument, at: u16) -> Arc<TcpFabric> {
    let own = document.member(node_number(at)).expect("a member");
    let identity = FabricIdentity {
        cluster: document.cluster,
        node: own.node,
        arena: own.arena,
        epoch: document.epoch,
        versions: ashlar_cluster::chain::PEER_VERSIONS,
    };
    let fabric = TcpFabric::new(identity, &Security::Plain).expect("a fabric");
    let others = document.members.iter().filter(|member| member.node != own.node);
    let member = |member: &DocumentMember| Member {
        node: member.node,
        arena: member.arena,
        address: member.address.clone(),
        oldest_epoch: Epoch::default(),
    };
    fabric.set_members(others.map(member).collect());
    fabric.listen(&own.address).expect("a free port");
    Arc::new(fabric)
}

/// Returns an address on which nothing listens.
fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").to_string()
}

#[test]
fn synced_update_is_at_both_nodes() {
    let mirror = Mirror::make(2);
    let (writer, replica) = mirror.start_whole();
    assert_eq!(*writer.node.standing.lock(), Some(Standing::Serving));
    for user in 1..100 {
        writer.node.set_limit(&writer.leader, user, u64::from(user)).expect("synced");
        let end = writer.node.node.lock().journal.as_ref().expect("a journal").mark().position;
        assert!(replica.service.status().durable >= end, "a sync returned before the replica had it");
    }
    mirror.finish(writer, replica);
}

/// The replica may have been promoted while the writer was down.
#[test]
fn writer_without_its_replica_waits() {
    let mirror = Mirror::make(2);
    let writer = mirror.start_writer();
    assert_eq!(writer.leader.status().standing, Standing::Waiting(node_number(1)));
    let replica = mirror.start_replica();
    writer.await_status("serving", |status| status.standing == Standing::Serving);
    mirror.finish(writer, replica);
}

#[test]
fn sync_without_replica_fails_after_patience() {
    let mirror = Mirror::make(2);
    let (writer, replica) = mirror.start_whole();
    replica.stop();
    writer.await_status("alone", |status| status.progress.is_none());
    writer.node.journal_limit(7, 70);
    let failed = writer.node.serve(&writer.leader, NodeRequest::Sync, Duration::from_millis(300));
    assert_eq!(failed, Err(Errno::EIO));
    let replica = mirror.start_replica();
    writer.node.serve(&writer.leader, NodeRequest::Sync, PATIENCE).expect("the replica is back");
    mirror.finish(writer, replica);
}

#[test]
fn lone_writer_goes_on_and_becomes_whole_again() {
    let mirror = Mirror::make(1);
    let (writer, replica) = mirror.start_whole();
    replica.stop();
    writer.node.set_limit(&writer.leader, 7, 70).expect("it goes on alone");
    assert!(mirror.files(0).hard_state().expect("there").alone.is_some(), "that was recorded before");
    let replica = mirror.start_replica();
    writer.await_status("whole", |status| status.is_whole);
    assert_eq!(writer.leader.status().copies, CopiesNeeded::Both);
    assert!(mirror.files(0).hard_state().expect("there").alone.is_none());
    writer.node.set_limit(&writer.leader, 8, 80).expect("both copies");
    mirror.finish(writer, replica);
}

#[test]
fn both_nodes_restart_and_agree() {
    let mirror = Mirror::make(2);
    for round in 0..4 {
        let (writer, replica) = mirror.start_whole();
        for user in 1..20 {
            writer.node.set_limit(&writer.leader, user, 100 * round + u64::from(user)).expect("synced");
        }
        if round % 2 == 0 {
            mirror.finish(writer, replica);
        } else {
            writer.stop(false);
            replica.stop();
        }
    }
}

#[test]
fn orderly_stop_is_recorded_at_the_replica() {
    let mirror = Mirror::make(1);
    let (writer, replica) = mirror.start_whole();
    writer.node.set_limit(&writer.leader, 7, 70).expect("synced");
    writer.stop(true);
    let state = mirror.files(1).hard_state().expect("there");
    assert!(state.writer_stopped_at.is_some() && state.in_sync, "{state:?}");
    let writer = mirror.start_writer();
    writer.await_status("whole", |status| status.is_whole);
    assert_eq!(mirror.files(1).hard_state().expect("there").writer_stopped_at, None, "it is back");
    writer.stop(false);
    replica.stop();
}

#[test]
fn promoted_replica_has_all_synced_updates() {
    let mut mirror = Mirror::make(2);
    let (writer, replica) = mirror.start_whole();
    for user in 1..50 {
        writer.node.set_limit(&writer.leader, user, u64::from(user)).expect("synced");
    }
    writer.stop(false);
    replica.stop();
    mirror.promote();
    let writer = mirror.start_writer();
    writer.await_status("serving", |status| status.standing == Standing::Serving);
    let limits = |user| writer.node.node.lock().store.quota(QuotaKey::User(user)).1.blocks;
    assert!((1..50).all(|user| limits(user) == Some(u64::from(user))));
    writer.node.set_limit(&writer.leader, 7, 700).expect("its own copy is enough");
    writer.stop(true);
}

#[test]
fn returning_writer_learns_of_its_successor() {
    let mut mirror = Mirror::make(2);
    let (writer, replica) = mirror.start_whole();
    writer.stop(false);
    replica.stop();
    let old = mirror.document.clone();
    mirror.promote();
    let former = mirror.start_writer_of(&old);
    assert_eq!(former.leader.status().standing, Standing::Waiting(node_number(1)));
    let successor = mirror.start_writer();
    let epoch = mirror.document.epoch;
    former.await_status("replaced", |status| status.standing == Standing::Replaced(epoch));
    assert_eq!(mirror.files(0).hard_state().expect("there").newest_epoch, epoch, "it knows it after a restart");
    former.stop(false);
    successor.stop(true);
}

/// An administrator has edited one of the two documents.
#[test]
fn nodes_of_other_min_replicas_are_not_linked() {
    let mirror = Mirror::make(2);
    let writer = mirror.start_writer();
    let replica = mirror.start_replica_of(&ClusterDocument { min_replicas: 1, ..mirror.document.clone() });
    let problem = Some(LinkProblem::MinReplicas { writer: 2, replica: 1 });
    writer.await_status("refused", |status| status.last_problem == problem);
    let service = &replica.service;
    await_condition("refused", || service.status().last_problem == problem, || format!("{:?}", service.status()));
    assert_eq!(writer.leader.status().standing, Standing::Waiting(node_number(1)));
    assert!(!service.status().is_following);
    replica.stop();
    let replica = mirror.start_replica();
    writer.await_status("whole", |status| status.is_whole);
    mirror.finish(writer, replica);
}

#[test]
fn writer_learns_what_an_idle_replica_has_committed() {
    let mirror = Mirror::make(2);
    let (writer, replica) = mirror.start_whole();
    writer.node.set_limit(&writer.leader, 7, 70).expect("synced");
    let end = writer.node.node.lock().journal.as_ref().expect("a journal").mark().position;
    writer.await_status("level", |status| status.progress.is_some_and(|progress| progress.committed == end));
    mirror.finish(writer, replica);
}
