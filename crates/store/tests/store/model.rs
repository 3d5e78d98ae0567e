//! The store against the model of a tree: random updates, valid and not, on both.
//!
//! Commits, crashes and releases come in between. After each run, everything that can be read is compared, and a full
//! check must find nothing.

use std::sync::Arc;

use crate::comparison::compare_trees;
use crate::media::{StoreTestArena, TestMedium, choose};
use ashlar_pmem::CrashMedium;
use ashlar_store::{CommitDone, Store, StoreError};
use ashlar_types::{Contents, FileKind, InodeId, LogGeneration, LogPosition, QuotaId, SessionId, Timestamp};
use ashlar_update::model::ModelTree;
use ashlar_update::{Allocation, Create, Rename, SetAttributes, Update, Whiteout};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

const SESSIONS: u64 = 2;
const KIB: u64 = 1024;

/// One step, as numbers that each kind of step reads in its own way, so that a failing run shrinks well.
type Step = (u8, u8, u8, u8, u16, u16);

/// One record of a log.
struct Record {
    kind: u8,
    body: Vec<u8>,
    may_free: bool,
}

struct Twins {
    arena: StoreTestArena,
    store: Option<Store>,
    model: ModelTree,
    log: Vec<Record>,
    next_inode: u64,
    /// A commit that was run and not yet finished.
    pending: Option<CommitDone>,
}

impl Twins {
    fn new(arena: StoreTestArena) -> Self {
        let mut store = arena.open();
        for session in 1..=SESSIONS {
            store.set_session(SessionId(session), LogGeneration(1), LogPosition(0));
        }
        store.commit().unwrap();
        let model = ModelTree::new();
        Self { arena, store: Some(store), model, log: Vec::new(), next_inode: 16, pending: None }
    }

    fn store(&mut self) -> &mut Store {
        self.store.as_mut().unwrap()
    }

    /// Replays one record into the store alone.
    fn replay(&mut self, index: usize) -> Result<ashlar_update::Applied, StoreError> {
        let Self { store, log, .. } = self;
        let record = &log[index];
        let update = Update::decode(record.kind, &record.body).unwrap();
        let (session, end) = (SessionId(index as u64 % SESSIONS + 1), LogPosition(index as u64 + 1));
        store.as_mut().unwrap().apply(session, end, &update, &|_| record.may_free)
    }

    fn update(&mut self, update: &Update<'_>, may_free: bool) {
        let body = update.encode().parts().concat();
        let open: Vec<InodeId> = self.model.inodes().map(|(id, _)| id).filter(|_| !may_free).collect();
        self.model.set_open(open);
        let expected = self.model.apply(update);
        self.log.push(Record { kind: update.kind() as u8, body, may_free });
        match (self.replay(self.log.len() - 1), expected) {
            (Ok(applied), Ok(expected)) => assert_eq!(applied, expected, "{update:?}"),
            (Err(StoreError::Invalid(invalid)), Err(expected)) => {
                assert_eq!(invalid, expected, "{update:?}");
                // The log of an honest session has no such records, so neither do the replays.
                self.log.pop();
            }
            (got, expected) => panic!("{update:?}: {got:?} instead of {expected:?}"),
        }
    }

    /// The process dies, or the twin loses power: updates that were not committed come back from the logs.
    fn crash(&mut self) {
        self.pending = None;
        self.store = None;
        if let StoreTestArena::Memory(arena) = &self.arena {
            let mut seed = self.log.len() as u64;
            self.arena = StoreTestArena::Memory(Arc::new(arena.after_crash(&mut |choices| choose(&mut seed, choices))));
        }
        self.store = Some(self.arena.open());
        for index in 0..self.log.len() {
            let session = SessionId(index as u64 % SESSIONS + 1);
            if self.store().committed(session) < LogPosition(index as u64 + 1) {
                self.replay(index).unwrap();
            }
        }
    }

    fn begin(&mut self) {
        if self.pending.is_none() {
            self.pending = self.store().begin_commit().map(|job| job.run());
        }
    }

    fn finish(&mut self) {
        if let Some(done) = self.pending.take() {
            self.store().finish_commit(done).unwrap();
        }
    }

    fn step(&mut self, step: Step) {
        let (kind, a, b, c, d, e) = step;
        let at = Timestamp { seconds: self.log.len() as i64, nanoseconds: u32::from(e) };
        let inode = |n: u8| self.pick(n, |_| true);
        let directory = |n: u8| self.pick(n, |inode| inode.is_directory() && inode.links > 0);
        let file = |n: u8| self.pick(n, |inode| inode.kind == FileKind::Regular);
        let names: [&[u8]; 5] = [b"a", b"b", b"c", b"\xff\n", &[b'n'; 255]];
        let name = |n: u8| names[n as usize % names.len()];
        let may_free = e % 4 != 0;
        let release = e % 3 != 0;
        let strip = e % 2 == 0;
        match kind % 27 {
            0..=5 => self.create(directory(a), name(b), c, at, may_free),
            6 => self.update(&Update::Link { inode: file(a), parent: directory(b), name: name(c), at }, may_free),
            7 | 8 => {
                let (parent, name, inode) = self.pick_entry(directory(a), name(b), b, inode(c));
                self.update(&Update::Unlink { inode, parent, name: &name, release, at }, may_free);
            }
            9 => {
                let (parent, name, inode) = self.pick_entry(directory(a), name(b), b, inode(c));
                self.update(&Update::RemoveDirectory { inode, parent, name: &name, release, at }, may_free);
            }
            10 | 11 => {
                let (parent, old_name, moved) = self.pick_entry(directory(a), name(b), b, inode(c));
                let (new_parent, new_name) = (directory(d as u8), name((d >> 8) as u8));
                let target = self.model_entry(new_parent, new_name);
                let exchange = kind % 27 == 11 && target.is_some();
                if ashlar_update::would_make_cycle(&self.model, moved, new_parent).unwrap() {
                    return;
                }
                if exchange && ashlar_update::would_make_cycle(&self.model, target.unwrap(), parent).unwrap() {
                    return;
                }
                let name = &old_name;
                // Mostly a new number.
                let number = if e % 7 == 0 { inode(b) } else { InodeId(self.next_inode) };
                let acl_access: &[u8] = if e % 5 == 0 { b"list" } else { b"" };
                let whiteout =
                    Some(Whiteout { inode: number, uid: 1, gid: 3, acl_access }).filter(|_| e % 2 == 0 && !exchange);
                self.next_inode += 1;
                let inode = moved;
                let rename =
                    Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at };
                self.update(&Update::Rename(rename), may_free);
            }
            12..=15 => {
                let data: Vec<u8> = (0..length_of(d) % (20 * KIB)).map(|i| (i as u8) ^ (e as u8)).collect();
                let update = Update::Write { inode: file(a), offset: offset_of(b, c), at, strip, data: &data };
                self.update(&update, may_free);
            }
            16 => self.update(&Update::Resize { inode: file(a), size: offset_of(b, c), strip, at }, may_free),
            17..=19 => {
                let (how, offset, length) = allocation(b, c, d);
                self.update(&Update::Allocate { inode: file(a), how, offset, length, strip, at }, may_free);
            }
            20 => {
                let mode = (b % 2 == 0).then_some(u32::from(d) & 0o7777);
                let (uid, gid) = ((c % 2 == 0).then_some(5), (c % 3 == 0).then_some(6));
                let (accessed, modified) = ((b % 3 == 0).then_some(at), (b % 5 == 0).then_some(at));
                let set = SetAttributes { inode: inode(a), mode, uid, gid, accessed, modified, at };
                self.update(&Update::SetAttributes(set), may_free);
            }
            21 if c % 3 > 0 => {
                let value = vec![c; usize::from(d % 3000)];
                let mode = (e % 5 == 0).then_some(0o640);
                let update = Update::SetXattr { inode: inode(a), name: name(b), value: &value, mode, at };
                self.update(&update, may_free);
            }
            21 => self.update(&Update::RemoveXattr { inode: inode(a), name: name(b), mode: None, at }, may_free),
            22 if c % 2 == 0 => self.update(&Update::Accessed { inode: inode(a), at }, may_free),
            22 => self.update(&Update::Release { inode: inode(a) }, may_free),
            26 => {
                let quota = [QuotaId::NONE, QuotaId::of(inode(b)), QuotaId(16)][usize::from(c) % 3];
                self.update(&Update::SetQuota { inode: inode(a), quota, at }, may_free);
            }
            23 => self.begin(),
            24 if c % 3 == 0 => self.crash(),
            24 => self.finish(),
            _ => {
                let (session, upto) = (SessionId(u64::from(a) % SESSIONS + 1), LogPosition(self.log.len() as u64));
                self.store().release(session, upto);
            }
        }
    }

    fn create(&mut self, parent: InodeId, name: &[u8], c: u8, at: Timestamp, may_free: bool) {
        let kinds = [
            FileKind::Regular,
            FileKind::Directory,
            FileKind::Regular,
            FileKind::Symlink,
            FileKind::Directory,
            FileKind::CharDevice,
            FileKind::Fifo,
            FileKind::Socket,
        ];
        let kind = kinds[c as usize % kinds.len()];
        let is_unnamed = c >= 240 && kind != FileKind::Directory;
        let create = Create {
            inode: InodeId(self.next_inode),
            parent,
            name: if is_unnamed { b"" } else { name },
            kind,
            mode: 0o644,
            uid: 1,
            gid: 2,
            device: if kind == FileKind::CharDevice { 77 } else { 0 },
            at,
            target: if kind == FileKind::Symlink { b"../somewhere" } else { b"" },
            acl_access: if c % 16 == 0 { b"list" } else { b"" },
            acl_default: &[],
        };
        self.next_inode += 1;
        self.update(&Update::Create(create), may_free);
    }

    fn model_entry(&self, parent: InodeId, name: &[u8]) -> Option<InodeId> {
        self.model.entries(parent).find(|(found, _)| *found == name).map(|(_, entry)| entry.inode)
    }

    /// One of the inodes that fit, mostly; sometimes any other, or one that does not exist.
    fn pick(&self, n: u8, fits: impl Fn(&ashlar_types::Inode) -> bool) -> InodeId {
        let wild = n % 16 == 15;
        let found: Vec<InodeId> =
            self.model.inodes().filter(|(_, inode)| wild || fits(inode)).map(|(id, _)| id).collect();
        match usize::from(n) % (found.len() + usize::from(wild)).max(1) {
            index if index < found.len() => found[index],
            _ => InodeId(self.next_inode + 5),
        }
    }

    /// One of the directory's entries, mostly; sometimes what is none.
    fn pick_entry(&self, parent: InodeId, name: &[u8], n: u8, other: InodeId) -> (InodeId, Vec<u8>, InodeId) {
        let found: Vec<_> = self.model.entries(parent).collect();
        if found.is_empty() || n % 16 == 15 {
            return (parent, name.to_vec(), self.model_entry(parent, name).unwrap_or(other));
        }
        let (name, entry) = found[usize::from(n) % found.len()];
        (parent, name.to_vec(), if n % 16 == 14 { other } else { entry.inode })
    }

    /// The canonical dump of the store.
    fn dump(&mut self) -> String {
        let mut text = Vec::new();
        self.store().dump(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    fn compare(&mut self) {
        let next = self.next_inode;
        compare_trees(self.store.as_ref().unwrap(), &self.model, next + 1);
    }
}

/// Offsets and sizes where things happen: the start, block and chunk borders, the inline limit, far away.
fn offset_of(b: u8, c: u8) -> u64 {
    let fine = u64::from(c);
    match b % 8 {
        0 => 0,
        1 => fine * 5,
        2 => fine * 20,
        3 => fine % 20 * 4 * KIB,
        4 => 126 * 4 * KIB + fine * 100,
        5 => fine * 1000,
        6 => 1024 - fine % 3,
        _ => (1 << 62) + fine,
    }
}

fn length_of(d: u16) -> u64 {
    match d % 5 {
        0 => u64::from(d) % 200,
        1 => 4 * KIB * (u64::from(d) % 5),
        2 => 4 * KIB,
        _ => u64::from(d),
    }
}

fn allocation(b: u8, c: u8, d: u16) -> (Allocation, u64, u64) {
    let how = Allocation::ALL[usize::from(d % 7)];
    let offset = offset_of(b, c);
    let length = 1 + length_of(d / 7) * (1 + u64::from(c % 8));
    if d % 2 == 0 || d % 7 > 4 {
        (how, offset / 4096 * 4096, length.div_ceil(4096) * 4096)
    } else {
        (how, offset, length)
    }
}

fn run(arena: StoreTestArena, steps: Vec<Step>) {
    let mut twins = Twins::new(arena);
    for (index, step) in steps.into_iter().enumerate() {
        twins.step(step);
        if index % 40 == 39 {
            twins.compare();
        }
    }
    twins.compare();
    let dump = twins.dump();
    twins.finish();
    assert_eq!(twins.dump(), dump, "a commit changes no logical state");
    twins.crash();
    twins.compare();
    assert_eq!(twins.dump(), dump, "the replayed logs give the same tree");
    let report = twins.store().check(&mut |_| {}).unwrap();
    assert!(report.is_clean(), "{:#?}", report.problems);
    twins.compare();
    let space = twins.store().space();
    for session in 1..=SESSIONS {
        twins.store().release_all(SessionId(session));
    }
    twins.store().commit().unwrap();
    let settled = twins.store().space();
    assert_eq!(settled.blocks_pinned, 0);
    let written = twins.model.inodes().flat_map(|(id, inode)| {
        let is_inline = matches!(twins.store.as_ref().unwrap().contents(id).unwrap(), Contents::Inline(_));
        (!is_inline).then_some(inode.blocks)
    });
    // Every block is free, pinned, reserved or in a file.
    assert_eq!(settled.blocks_free + written.sum::<u64>(), space.blocks_total);
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any::<Step>(), 1..length)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn store_and_model_agree(steps in steps(300)) {
        run(StoreTestArena::new(TestMedium::Lmdb, 16 << 20), steps);
    }

    /// The same in memory, where crashes take unsettled words away.
    #[test]
    fn store_in_memory_and_model_agree(steps in steps(300), is_disk in any::<bool>()) {
        let medium = if is_disk { CrashMedium::Pages } else { CrashMedium::Words };
        run(StoreTestArena::twin(medium, 64 << 20), steps);
    }
}

/// The same on a disk, where commits write and sync in another way.
#[test]
fn store_and_model_agree_on_a_disk() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for _ in 0..2 {
        let steps = steps(300).new_tree(&mut runner).unwrap().current();
        run(StoreTestArena::in_directory(tempfile::tempdir().unwrap(), 16 << 20), steps);
    }
}
