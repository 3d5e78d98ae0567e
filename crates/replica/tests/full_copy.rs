//! A replica that gets the writer's tree, and then its journal, while the writer works.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ashlar_node::digest::commit::{begin_commit, finish_commit};
use ashlar_node::journal::acts::{journal_act, journal_own};
use ashlar_node::journal::{CopySender, Replica};
use ashlar_node::recovery::take_up::take_up_sessions;
use ashlar_node::sessions::identity::{Process, ProcessTable};
use ashlar_node::{Node, NodeLimits, NodeTime};
use ashlar_pmem::{Arena, ArenaOptions, MediumKind};
use ashlar_replica::{CopyOrigin, ReplicaError, begin_full_copy, finish_full_copy, open_copy, open_journal};
use ashlar_store::{
    COPY_PART_BYTES_MAX, CopyEnd, CopySource, JournalMark, Store, StoreError, StoreImport, compare_dumps,
};
use ashlar_types::{FileKind, InodeId, JournalPosition, NodeNumber, QuotaKey, QuotaLimits, SessionId, Timestamp};
use ashlar_update::{Create, Update};

const AT: Timestamp = Timestamp { seconds: 1000, nanoseconds: 0 };
const WRITER: NodeNumber = NodeNumber::FIRST;

struct NoProcesses;

impl ProcessTable for NoProcesses {
    fn is_gone(&self, _: &Process) -> bool {
        true
    }
}

/// A writing node without sessions, which makes files itself.
struct Writer {
    node: Node,
    files: u64,
}

impl Writer {
    fn start(arena: &Arc<Arena>) -> Self {
        let mut store = Store::open(Arc::clone(arena)).expect("a store");
        let journal = open_journal(arena, &mut store).expect("a journal");
        let time = NodeTime { since_boot: Duration::from_secs(5), wall: AT };
        let node = Node::new(store, NodeLimits::new(MediumKind::Memory), Arc::new(NoProcesses), time);
        let mut node = node.expect("a node");
        node.journal = Some(journal);
        take_up_sessions(&mut node, BTreeMap::new()).expect("replayed");
        Self { node, files: 0 }
    }

    fn apply(&mut self, update: &Update<'_>) {
        let own = SessionId::SHARED_FS;
        let end = self.node.store.applied(own).plus(1);
        self.node.store.apply(own, end, update, &|_| true).expect("it fits");
        journal_own(&mut self.node, update);
    }

    /// Makes a file, writes to it and to the file before, and sets a limit.
    fn work(&mut self) {
        self.files += 1;
        let (number, inode) = (self.files, InodeId(100 + self.files));
        let name = format!("file {number}");
        self.apply(&Update::Create(Create {
            inode,
            parent: InodeId::ROOT,
            name: name.as_bytes(),
            kind: FileKind::Regular,
            mode: 0o644,
            uid: 1,
            gid: 2,
            device: 0,
            at: AT,
            target: b"",
            acl_access: &[],
            acl_default: &[],
        }));
        let data = vec![number as u8; 20_000];
        self.apply(&Update::Write { inode, offset: 0, at: AT, strip: false, data: &data });
        if number > 1 {
            let inode = InodeId(99 + number);
            self.apply(&Update::Write { inode, offset: 4090, at: AT, strip: false, data: &data[..50] });
        }
        if number > 4 && number % 2 == 0 {
            let (inode, name) = (InodeId(96 + number), format!("file {}", number - 4));
            let (parent, name) = (InodeId::ROOT, name.as_bytes());
            self.apply(&Update::Unlink { inode, parent, name, release: true, at: AT });
        }
        let key = QuotaKey::User(7);
        let limits = QuotaLimits { blocks: Some(number), ..QuotaLimits::default() };
        self.node.store.set_quota_limits(key, limits);
        journal_act(&mut self.node, ashlar_journal::OwnAct::Limits { key, limits });
        while self.node.poll_effect().is_some() {}
    }

    fn commit(&mut self) {
        while let Some(mut job) = begin_commit(&mut self.node) {
            job.flush();
            let done = job.run();
            finish_commit(&mut self.node, done).expect("committed");
        }
    }

    /// Sends the rest of a pass, while it works.
    fn send_pass(&mut self, source: &mut CopySource, import: &mut StoreImport) {
        let mut parts = 0;
        while let Some(part) = source.next_part(COPY_PART_BYTES_MAX / 8).expect("readable") {
            import.import_part(&part).expect("stored");
            parts += 1;
            // The copy is faster, so a pass ends.
            if parts % 3 == 0 {
                self.work();
                self.commit();
            }
        }
    }

    /// Sends the tree, until the last pass is over.
    fn send_tree(&mut self, import: &mut StoreImport) -> (CopyEnd, CopyOrigin) {
        let mut source = self.node.store.begin_copy().expect("sound");
        self.send_pass(&mut source, import);
        source.begin_pass().expect("few rows");
        self.send_pass(&mut source, import);
        let end = source.begin_last_pass().expect("few rows");
        let origin = CopyOrigin::find(self.node.journal.as_ref().expect("a journal"), &end).expect("there");
        self.send_pass(&mut source, import);
        (end, origin)
    }

    /// Sends frames until the replica has all of them, and compares the trees.
    fn catch_up(&mut self, replica: &mut Replica) {
        self.commit();
        let journal = self.node.journal.as_mut().expect("a journal");
        let (plan, mut sender) = CopySender::begin(journal, &replica.copy_state()).expect("a copy of this journal");
        assert_eq!(plan.from, replica.copy_state().end);
        replica.follow(plan).expect("it fits");
        while let Some(part) = sender.next_part(journal, 1 << 20).expect("readable") {
            replica.take_frames(&part).expect("the next frames");
            replica.flush().expect("durable");
            while replica.apply_frames(100).expect("they fit") {}
            journal.handle_ack(replica.durable());
        }
        while let Some(job) = replica.begin_commit() {
            replica.finish_commit(job.run()).expect("committed");
        }
        assert_eq!(replica.mark(), journal.mark());
        self.compare(replica.store());
    }

    fn compare(&self, store: &Store) {
        let dumps = (self.node.store.dump_lines().expect("sound"), store.dump_lines().expect("sound"));
        let compared = compare_dumps(dumps.0, dumps.1, 10).expect("readable");
        assert!(compared.is_equal(), "{:?}", compared.differences);
    }
}

/// Makes the arenas of a writer and of a replica.
fn make_arenas(places: &[tempfile::TempDir; 2]) -> [Arc<Arena>; 2] {
    let paths: [_; 2] = [0, 1].map(|at: usize| places[at].path().join("arena"));
    let writer = Arena::create(&paths[0], &ArenaOptions::new(64 << 20)).expect("an arena");
    let file_system = Some(writer.summary().file_system);
    let options = ArenaOptions { node: NodeNumber::new(1).expect("small"), file_system, ..ArenaOptions::new(80 << 20) };
    let replica = Arena::create(&paths[1], &options).expect("an arena");
    [writer, replica].map(|arena| {
        Store::format(&arena, AT).expect("formatted");
        Arc::new(arena)
    })
}

fn places() -> [tempfile::TempDir; 2] {
    [(); 2].map(|()| tempfile::tempdir().expect("a directory"))
}

#[test]
fn replica_with_another_tree_becomes_a_copy_and_follows() {
    let places = places();
    let [one, two] = make_arenas(&places);
    // It was a writer of its own.
    let mut parted = Writer::start(&two);
    parted.work();
    parted.commit();
    parted.work();
    drop(parted);
    let mut writer = Writer::start(&one);
    for _ in 0..40 {
        writer.work();
    }
    writer.commit();
    writer.work();
    let file_system = one.summary().file_system.id;
    let mut import = begin_full_copy(&two).expect("begun");
    let (end, origin) = writer.send_tree(&mut import);
    assert!(end.mark.position > JournalPosition(0));
    let mut replica = finish_full_copy(&two, file_system, import, &end, origin).expect("whole");
    assert_eq!((replica.mark(), replica.durable()), (end.mark, end.mark.position));
    let own = replica.store().journal_mark(NodeNumber::new(1).expect("small"));
    assert_eq!(own, None, "the journal that was given up is forgotten");
    writer.work();
    writer.catch_up(&mut replica);
    drop(replica);
    let mut replica = open_copy(&two, file_system, WRITER).expect("a replica");
    writer.compare(replica.store());
    writer.work();
    writer.catch_up(&mut replica);
}

#[test]
fn copy_killed_before_its_store_is_whole_is_begun_anew() {
    let places = places();
    let [one, two] = make_arenas(&places);
    let mut writer = Writer::start(&one);
    for _ in 0..10 {
        writer.work();
    }
    writer.commit();
    let file_system = one.summary().file_system.id;
    let is_marked = || matches!(open_copy(&two, file_system, WRITER), Err(ReplicaError::Store(StoreError::Copying)));
    let mut import = begin_full_copy(&two).expect("begun");
    drop(import);
    assert!(is_marked());
    import = begin_full_copy(&two).expect("begun");
    let (end, origin) = writer.send_tree(&mut import);
    // The journal is made, and the store is not whole.
    let other = CopyEnd { inodes: end.inodes + 1, ..end };
    assert!(finish_full_copy(&two, file_system, import, &other, origin.clone()).is_err());
    assert!(is_marked());
    let elsewhere = CopyEnd { mark: JournalMark { position: JournalPosition(8), ..end.mark }, ..end };
    let import = begin_full_copy(&two).expect("begun");
    assert!(finish_full_copy(&two, file_system, import, &elsewhere, origin).is_err());
    let mut import = begin_full_copy(&two).expect("begun");
    let (end, origin) = writer.send_tree(&mut import);
    let mut replica = finish_full_copy(&two, file_system, import, &end, origin).expect("whole");
    writer.catch_up(&mut replica);
}
