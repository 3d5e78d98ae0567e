//! Shared by tests of full copies: arenas of two nodes, and a writer that works at random.

use std::path::Path;
use std::sync::Arc;

use ashlar_pmem::{Arena, ArenaOptions, CrashMedium};
use ashlar_store::{
    CommitDone, CommitJob, CopyEnd, CopySource, FullCopyError, JournalMark, MemoryArena, MemoryArenaOptions, Store,
    StoreError, StoreImport,
};
use ashlar_types::{
    BLOCK_BYTES, FileSystemId, FileSystemIdentity, InodeId, JournalPosition, LogGeneration, LogPosition, NameHashKey,
    NodeNumber, QuotaKey, QuotaLimits, SessionId, Timestamp,
};
use ashlar_update::Update;
use ashlar_update::model::ModelTree;

use crate::comparison::compare_trees;
use crate::media::{TestMedium, choose};

/// The session whose updates the writer applies.
const SESSION: SessionId = SessionId(1);
/// Bytes of the journal between two acts.
const ACT_BYTES: u64 = 32;
pub const WRITER: NodeNumber = NodeNumber::FIRST;

pub fn replica() -> NodeNumber {
    NodeNumber::new(1).unwrap()
}

/// The arena of a node of one file system.
pub enum NodeArena {
    /// Files in a directory of the test's own.
    Files(Arc<Arena>, #[expect(dead_code, reason = "dropped with the arena")] tempfile::TempDir),
    /// Their twin.
    Memory(Arc<MemoryArena>),
}

impl NodeArena {
    /// Makes an arena without a store. Files have no less than 16 MiB.
    pub fn new(medium: TestMedium, node: NodeNumber, segment_blocks: &[u32]) -> Self {
        let file_system = FileSystemIdentity { id: FileSystemId(1), hash_key: NameHashKey([7; 16]) };
        match medium {
            TestMedium::Memory => {
                let options = MemoryArenaOptions::new(CrashMedium::Words, segment_blocks.to_vec());
                let options = MemoryArenaOptions { id: 1 + u64::from(node.get()), node, file_system, ..options };
                Self::Memory(Arc::new(MemoryArena::new(&options)))
            }
            TestMedium::Lmdb => {
                let blocks: u64 = segment_blocks.iter().map(|blocks| u64::from(*blocks)).sum();
                let size = (blocks * BLOCK_BYTES).max(16 << 20);
                let options = ArenaOptions { node, file_system: Some(file_system), ..ArenaOptions::new(size) };
                let memory = Path::new("/dev/shm");
                let directory =
                    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
                let arena = Arena::create(&directory.path().join("arena"), &options).unwrap();
                Self::Files(Arc::new(arena), directory)
            }
        }
    }

    /// Makes an empty store.
    pub fn format(&self) {
        match self {
            Self::Files(arena, _) => Store::format(arena, Timestamp::default()).unwrap(),
            Self::Memory(arena) => Store::format_in_memory(arena, Timestamp::default()).unwrap(),
        }
    }

    pub fn open(&self) -> Result<Store, StoreError> {
        match self {
            Self::Files(arena, _) => Store::open(Arc::clone(arena)),
            Self::Memory(arena) => Store::open_in_memory(Arc::clone(arena)),
        }
    }

    pub fn begin_import(&self) -> Result<StoreImport, FullCopyError> {
        match self {
            Self::Files(arena, _) => StoreImport::begin(Arc::clone(arena)),
            Self::Memory(arena) => StoreImport::begin_in_memory(Arc::clone(arena)),
        }
    }

    /// Loses power: of memory, unsettled words may be gone. Files stay as they are.
    pub fn crash(&mut self, mut seed: u64) {
        if let Self::Memory(arena) = self {
            *arena = Arc::new(arena.after_crash(&mut |choices| choose(&mut seed, choices)));
        }
    }

    pub fn is_copying(&self) -> bool {
        matches!(self.open(), Err(StoreError::Copying))
    }
}

pub fn dump(store: &Store) -> String {
    let mut text = Vec::new();
    store.dump(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// The updates that a writer has journalled.
#[derive(Clone)]
enum WriterAct {
    Update { update: Update<'static>, keeps: bool },
    Limits(QuotaKey, QuotaLimits),
    Began(SessionId),
    Ended(SessionId),
}

impl WriterAct {
    fn apply(&self, store: &mut Store, index: usize) -> Result<(), StoreError> {
        match self {
            Self::Update { update, keeps } => {
                store.apply(SESSION, LogPosition(index as u64 + 1), update, &|_| !keeps)?;
            }
            Self::Limits(key, limits) => store.set_quota_limits(*key, *limits),
            Self::Began(session) => store.set_session(*session, LogGeneration(2), LogPosition(0)),
            Self::Ended(session) => store.remove_session(*session),
        }
        let order = index as u64 + 1;
        store.set_journal_mark(WRITER, JournalMark { position: JournalPosition(order * ACT_BYTES), order });
        Ok(())
    }
}

/// A store that is written to at random, and the model of its tree after each act.
pub struct RandomWriter {
    pub store: Store,
    _arena: NodeArena,
    acts: Vec<WriterAct>,
    trees: Vec<ModelTree>,
    next_inode: u64,
    seed: u64,
    job: Option<CommitJob>,
    done: Option<CommitDone>,
}

impl RandomWriter {
    pub fn new(medium: TestMedium, segment_blocks: &[u32], seed: u64) -> Self {
        let arena = NodeArena::new(medium, WRITER, segment_blocks);
        arena.format();
        let mut store = arena.open().unwrap();
        store.set_session(SESSION, LogGeneration(1), LogPosition(0));
        store.commit().unwrap();
        let trees = vec![ModelTree::new()];
        Self { store, _arena: arena, acts: Vec::new(), trees, next_inode: 16, seed, job: None, done: None }
    }

    pub fn choose(&mut self, choices: usize) -> usize {
        choose(&mut self.seed, choices)
    }

    /// Does this many random things.
    pub fn work(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.choose(40) {
                0 => self.begin_commit(),
                1 => self.run_commit(),
                2 | 3 => self.finish_commit(),
                4 => self.store.release(SESSION, LogPosition(self.acts.len() as u64)),
                5 => {
                    let limits = QuotaLimits { blocks: Some(self.choose(9) as u64), inodes: None };
                    let limits = if self.choose(2) == 0 { limits } else { QuotaLimits::default() };
                    let user = QuotaKey::User(self.choose(3) as u32);
                    self.act(WriterAct::Limits(user, limits));
                }
                6 => {
                    let session = SessionId(2 + self.choose(4) as u64);
                    let is_known = self.store.has_session(session);
                    self.act(if is_known { WriterAct::Ended(session) } else { WriterAct::Began(session) });
                }
                _ => self.update(),
            }
        }
    }

    /// Applies a random update that fits.
    fn update(&mut self) {
        // Most of them change content.
        let kind = if self.choose(3) > 0 { 17 + self.choose(8) } else { self.choose(32) } as u8;
        let mut part = || choose(&mut self.seed, 1 << 16) as u16;
        let choice = (kind, part(), part(), part(), part());
        let keeps = part() % 2 == 0;
        let mut tree = self.tree().clone();
        let open: Vec<InodeId> = tree.inodes().map(|(id, _)| id).collect();
        tree.set_open(open.into_iter().filter(|_| keeps));
        let update = tree.random_update(choice, InodeId(self.next_inode));
        let Some(update) = update.filter(|update| tree.apply(update).is_ok()) else { return };
        let act = WriterAct::Update { update, keeps };
        match act.apply(&mut self.store, self.acts.len()) {
            Ok(()) => {
                self.next_inode += 1;
                self.acts.push(act);
                self.trees.push(tree);
            }
            Err(StoreError::FullBlocks { .. }) => self.commit(),
            Err(error) => panic!("{error}"),
        }
    }

    fn act(&mut self, act: WriterAct) {
        act.apply(&mut self.store, self.acts.len()).unwrap();
        let tree = self.tree().clone();
        self.acts.push(act);
        self.trees.push(tree);
    }

    fn tree(&self) -> &ModelTree {
        &self.trees[self.acts.len()]
    }

    fn begin_commit(&mut self) {
        if self.job.is_none() && self.done.is_none() {
            self.job = self.store.begin_commit();
        }
    }

    fn run_commit(&mut self) {
        if let Some(job) = self.job.take() {
            // Some are tried again.
            self.done = Some(if self.choose(8) == 0 { job.give_up("not now") } else { job.run() });
        }
    }

    fn finish_commit(&mut self) {
        if let Some(done) = self.done.take() {
            _ = self.store.finish_commit(done);
        }
    }

    /// Commits all that is applied.
    pub fn commit(&mut self) {
        self.run_commit();
        self.finish_commit();
        self.store.release(SESSION, LogPosition(self.acts.len() as u64));
        self.store.commit().unwrap();
    }

    /// Sends a pass; the writer works on by up to so many steps after each part.
    pub fn send_pass(&mut self, source: &mut CopySource, import: &mut StoreImport, part_bytes: usize, steps: usize) {
        while let Some(part) = source.next_part(part_bytes).unwrap() {
            import.import_part(&part).unwrap();
            if self.choose(6) == 0 {
                import.commit().unwrap();
            }
            let steps = self.choose(steps + 1);
            self.work(steps);
        }
    }

    /// Copies the tree while the writer works on. Returns the copy, and where it stands.
    pub fn copy_to(&mut self, replica: &NodeArena, part_bytes: usize, steps: usize) -> (Store, CopyEnd) {
        let mut source = self.store.begin_copy().unwrap();
        let mut import = replica.begin_import().unwrap();
        self.send_pass(&mut source, &mut import, part_bytes, steps);
        for _ in 0..self.choose(3) {
            source.begin_pass().unwrap();
            self.send_pass(&mut source, &mut import, part_bytes, steps);
        }
        self.work(steps);
        let end = source.begin_last_pass().unwrap();
        self.send_pass(&mut source, &mut import, part_bytes, steps);
        (import.finish(&end).unwrap(), end)
    }

    /// Checks that a store is the tree at a mark, applies what the writer has journalled since, and compares again.
    pub fn check_copy(&self, copy: &mut Store, end: &CopyEnd) {
        assert_eq!(copy.journal_mark(WRITER), Some(end.mark));
        let from = end.mark.order as usize;
        compare_trees(copy, &self.trees[from], self.next_inode);
        check_clean(copy);
        for (index, act) in self.acts.iter().enumerate().skip(from) {
            match act.apply(copy, index) {
                // The blocks that the writer's releases have freed wait for releases here as well.
                Err(StoreError::FullBlocks { .. }) => {
                    copy.release_all(SESSION);
                    copy.commit().unwrap();
                    act.apply(copy, index).unwrap();
                }
                done => done.unwrap(),
            }
        }
        assert_eq!(dump(copy), dump(&self.store));
        compare_trees(copy, self.tree(), self.next_inode);
        check_clean(copy);
    }
}

pub fn check_clean(store: &mut Store) {
    let report = store.check(&mut |_| {}).unwrap();
    assert!(report.is_clean(), "{:#?}", report.problems);
}
