//! A session at work, and SharedFS's work for it.
//!
//! All runs in one thread and from one seed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use ashlar_log::{AppendError, Log};
use ashlar_pmem::{Mapping, MappingAccess, MediumKind, Persistent, SessionFile};
use ashlar_processes::clock::boot_time;
use ashlar_processes::process::find_process;
use ashlar_sim::tree_picture::PicturedTree;
use ashlar_tests::random::Random;
use ashlar_types::{FileKind, InodeId, LogPosition, SessionId, Timestamp};
use ashlar_update::model::ModelTree;
use ashlar_update::{Allocation, Create, Rename, SetAttributes, Update, Whiteout};
use ashlar_wire::{Credit, CreditKind, LeaseRequest, Need, Reply, SessionKind};

use super::mirror::Mirror;
use crate::node_requests::ask_node;
use crate::session_files::PreparedSession;
use crate::shared_state::SharedState;
use crate::test_sessions::{acquire, apply_settled};
use crate::{Config, recovery};
use ashlar_node::NodeCore;
use ashlar_node::digest::commit::{NodeCommit, NodeCommitDone, begin_commit, finish_commit};
use ashlar_node::digest::freed_blocks::release_blocks;
use ashlar_node::leases::grant::Patience;
use ashlar_node::pending::RequestTerms;
use ashlar_node::records::apply::Slice;
use ashlar_node::sessions::identity::SessionIdentity;
use ashlar_node::sessions::session::{Control, LogRoom};

/// Small, so that the log goes round often; a record may take a quarter of it.
const RING_BYTES: u64 = 24 << 10;
/// Blocks that are left for deletions, which copy blocks too.
///
/// Only updates of at most one block may take them.
const SPARE_BLOCKS: u64 = 5;
const BLOCK: u64 = 4096;
const FILE_BLOCKS_MAX: u64 = 5;
const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b"a long name, so that rows differ in length"];

/// The history so far, as far as crashes are concerned.
#[derive(Default)]
pub struct Story {
    /// The tree after each update, and before the first.
    ///
    /// The last update may be under way.
    pub trees: Vec<PicturedTree>,
    /// How many updates' calls have returned.
    pub returned: usize,
    /// How many of them the loss of power must not take.
    pub durable: usize,
    /// How many of them are in the batch whose commit began last.
    pub frozen: usize,
    /// A commit is under way: begun and not finished.
    pub is_committing: bool,
    /// Its data and rows are being written.
    pub is_writing: bool,
}

/// The session, and SharedFS.
pub struct Live {
    shared: SharedState,
    id: SessionId,
    log: Log<Arc<Mapping>>,
    control: Arc<Control>,
    kind: MediumKind,
    story: Rc<RefCell<Story>>,
    mirror: Rc<RefCell<Mirror>>,
    pub random: Random,
    /// How many of four chances to go on with a commit are taken.
    haste: u64,
    model: ModelTree,
    /// The encoded updates.
    pub records: Vec<(u8, Vec<u8>)>,
    ends: Vec<(LogPosition, u64)>,
    inodes: Range<u64>,
    /// The file, offset and length of the last write.
    written: Option<(InodeId, u64, u64)>,
    /// Leases on single inodes: slot and word.
    leased: BTreeMap<InodeId, (u32, u64)>,
    job: Option<NodeCommit>,
    done: Option<NodeCommitDone>,
    pub commits: u64,
}

/// Returns the configuration of SharedFS in these tests.
pub fn config(arena: &Path) -> Config {
    Config { cache_ttl_ms: 0, lease_hold_us: 0, ..Config::new(arena) }
}

impl Story {
    /// Begins with the tree that was recovered after these updates.
    pub fn after(records: &[(u8, Vec<u8>)]) -> Self {
        Self { trees: vec![PicturedTree::of_model(&replayed(records), &PicturedTree::default())], ..Self::default() }
    }
}

/// Returns the model of a tree that was recovered after these updates.
///
/// Its orphans are gone.
fn replayed(records: &[(u8, Vec<u8>)]) -> ModelTree {
    let mut model = ModelTree::new();
    for (kind, body) in records {
        model.apply(&Update::decode(*kind, body).expect("encoded")).expect("valid");
    }
    for inode in model.orphans() {
        model.apply(&Update::Release { inode }).expect("valid");
    }
    model
}

impl Live {
    /// Starts SharedFS on an arena, and a session.
    pub fn start(
        arena: &Path,
        kind: MediumKind,
        records: Vec<(u8, Vec<u8>)>,
        story: Rc<RefCell<Story>>,
        mirror: Rc<RefCell<Mirror>>,
        seed: u64,
    ) -> Self {
        let shared = recovery::recover(config(arena)).expect("a sound arena");
        let process = find_process(std::process::id()).expect("this process");
        let identity = SessionIdentity {
            process,
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            kind: SessionKind::Mount,
            label: "test".into(),
        };
        let id = shared.lock().store.next_session_id().expect("a number");
        let log_bytes = Log::<Mapping>::bytes_for(RING_BYTES);
        let mut session = PreparedSession::make(&shared.arena, id, LogRoom { bytes: log_bytes, allocated: log_bytes })
            .and_then(|prepared| Ok(prepared.give_to(identity, boot_time())?.0))
            .expect("made");
        session.grant_credit(Credit { blocks: 1 << 40, metadata_bytes: 1 << 40 }, CreditKind::Common);
        let control = Arc::clone(&session.control);
        {
            let mut state = shared.lock();
            state.store.set_session(id, session.log.generation(), LogPosition(0));
            state.sessions.insert(id, session);
        }
        let file = shared.arena.open_session_file(id, SessionFile::Log).expect("there");
        let memory = Mapping::map(&file, log_bytes, MappingAccess::ReadWrite, shared.arena.medium()).expect("mapped");
        let log = Log::open(Arc::new(memory)).expect("a log");
        let model = replayed(&records);
        let mut live = Self {
            shared,
            id,
            log,
            control,
            kind,
            story,
            mirror,
            random: Random::new(seed),
            haste: 1 + seed % 3,
            model,
            records,
            ends: Vec::new(),
            inodes: 0..0,
            written: None,
            leased: BTreeMap::new(),
            job: None,
            done: None,
            commits: 0,
        };
        live.acquire(InodeId::ROOT);
        live
    }

    /// Returns how often the log went round.
    pub fn laps(&self) -> u64 {
        self.log.tail().0 / self.log.capacity()
    }

    /// Returns how many updates SharedFS did not have to apply.
    pub fn coalesced(&self) -> u64 {
        self.shared.lock().counters.coalesced_records
    }

    /// Makes one random step.
    pub fn step(&mut self) {
        match self.random.below(30) {
            0..=20 => self.update(),
            21 | 22 => self.apply_some(),
            23..=26 if self.random.below(4) < self.haste => self.advance_commit(),
            27 if self.kind == MediumKind::Disk => self.sync_or_write_back(),
            _ => self.release(),
        }
    }

    /// Applies everything, and compares it with the model.
    pub fn check_applied(&self) -> Option<String> {
        let mut state = self.shared.lock();
        apply_settled(&mut state, self.id);
        if state.counters.sessions_fenced > 0 {
            return Some("the session is fenced".into());
        }
        let tree = match PicturedTree::of_store(&state.store) {
            Ok(tree) => tree,
            Err(error) => return Some(error.to_string()),
        };
        tree.difference(self.story.borrow().trees.last()?)
    }

    // ---- SharedFS's part

    fn applied(&self) -> LogPosition {
        self.shared.lock().store.applied(self.id)
    }

    /// Applies the log up to any record, as happens when a lease moves at that moment.
    fn apply_some(&mut self) {
        let applied = self.applied();
        let waiting: Vec<LogPosition> = self.ends.iter().map(|(end, _)| *end).filter(|end| *end > applied).collect();
        let Some(to) = self.random.pick(&waiting).copied() else { return };
        let mut state = self.shared.lock();
        assert!(state.apply(self.id, to, Slice::All));
        state.decide_all();
    }

    /// Brings the commit one stage further.
    ///
    /// Other steps may come between any two stages.
    fn advance_commit(&mut self) {
        if let Some(done) = self.done.take() {
            finish_commit(&mut self.shared.lock(), done).expect("committed");
            self.commits += 1;
            self.story.borrow_mut().is_committing = false;
        } else if let Some(job) = self.job.take() {
            self.story.borrow_mut().is_writing = true;
            self.done = Some(job.run());
            self.story.borrow_mut().is_writing = false;
        } else {
            let mut state = self.shared.lock();
            self.job = begin_commit(&mut state);
            let applied = state.store.applied(self.id);
            let frozen = self.ends.iter().filter(|(end, _)| *end <= applied).count();
            let mut story = self.story.borrow_mut();
            story.is_committing = self.job.is_some();
            story.frozen = frozen;
        }
    }

    /// Releases the committed part of the log.
    ///
    /// It also declares that the session reads by no extent older than what is applied.
    fn release(&mut self) {
        let mut state = self.shared.lock();
        self.log.release(self.control.committed());
        self.control.set_released(state.store.applied(self.id));
        let NodeCore { store, sessions, .. } = &mut **state;
        release_blocks(store, sessions);
    }

    fn sync_or_write_back(&mut self) {
        if self.random.one_in(2) {
            self.mirror.borrow().write_back(&mut self.random);
            return;
        }
        // As LibFS does.
        let state = self.shared.lock();
        let session = state.live(self.id).expect("it goes on");
        session.page.memory().sync().expect("synced");
        self.log.memory().sync().expect("synced");
        drop(state);
        let mut story = self.story.borrow_mut();
        story.durable = story.returned;
    }

    fn make_room(&mut self) {
        apply_settled(&mut self.shared.lock(), self.id);
        while self.job.is_some() || self.done.is_some() {
            self.advance_commit();
        }
        while self.shared.lock().store.is_dirty() {
            self.advance_commit();
        }
        self.release();
    }

    // ---- the session's part

    fn acquire(&mut self, inode: InodeId) {
        let need = Need { contents: false, entries: false, children: false, xattrs: false };
        let want = LeaseRequest::on_inode(inode, true, need);
        let reply = acquire(&self.shared, self.id, want);
        let Reply::Granted { grants, .. } = reply else { panic!("{reply:?}") };
        self.leased.insert(inode, (grants[0].slot, grants[0].word));
    }

    /// Returns whether a lease granted on the inode still holds, as LibFS checks it.
    fn holds(&self, inode: InodeId) -> bool {
        let state = self.shared.lock();
        self.leased.get(&inode).is_some_and(|&(slot, word)| state.sessions[&self.id].leases.word(slot).0 == word)
    }

    fn new_inode(&mut self) -> InodeId {
        if self.inodes.is_empty() {
            let terms = RequestTerms { patience: Patience::Any, bytes_max: usize::MAX, reclaims: false };
            let reply = ask_node(&self.shared, self.id, ashlar_wire::Request::InodeRange, terms).expect("numbers");
            let Reply::Inodes(first, count) = reply else { panic!("{reply:?}") };
            self.inodes = first.0..first.0 + count;
        }
        InodeId(self.inodes.next().expect("not empty"))
    }

    /// Returns the blocks that are neither used nor needed by logged records.
    fn room(&self) -> u64 {
        let state = self.shared.lock();
        let applied = state.store.applied(self.id);
        let promised: u64 = self.ends.iter().filter(|(end, _)| *end > applied).map(|(_, blocks)| blocks).sum();
        state.store.space().blocks_free.saturating_sub(promised)
    }

    /// Makes an update, if it is valid.
    fn try_update(&mut self, update: &Update<'_>) {
        let blocks = update.cost().blocks;
        if self.room() < blocks + SPARE_BLOCKS {
            self.make_room();
            if blocks > 1 && self.room() < blocks + SPARE_BLOCKS {
                return;
            }
        }
        let shared = |id: InodeId| {
            self.model.inodes().any(|(found, inode)| found == id && inode.links > 1 && !inode.is_directory())
        };
        let (inode, is_link, target) = match update {
            Update::Link { inode, .. } => (*inode, true, None),
            Update::Rename(rename) => (rename.inode, false, rename.target),
            Update::Write { inode, .. }
            | Update::Unlink { inode, .. }
            | Update::Resize { inode, .. }
            | Update::Allocate { inode, .. }
            | Update::SetXattr { inode, .. }
            | Update::RemoveXattr { inode, .. } => (*inode, false, None),
            Update::SetAttributes(set) => (set.inode, false, None),
            _ => (InodeId::ROOT, false, None),
        };
        let needs_own: Vec<InodeId> = [Some(inode), target]
            .into_iter()
            .flatten()
            .filter(|&id| (shared(id) || is_link) && !self.holds(id))
            .collect();
        if self.model.apply(update).is_err() {
            return;
        }
        for id in needs_own {
            self.acquire(id);
        }
        {
            let mut story = self.story.borrow_mut();
            let tree = PicturedTree::of_model(&self.model, story.trees.last().expect("the first"));
            story.trees.push(tree);
        }
        self.append(update, blocks);
    }

    fn append(&mut self, update: &Update<'_>, blocks: u64) {
        let (kind, body) = (update.kind() as u8, update.encode());
        let end = loop {
            match self.log.append(self.log.seal_count(), kind, &body.parts()) {
                Ok(appended) => break appended.end,
                Err(AppendError::Full { .. }) => self.make_room(),
                Err(AppendError::Sealed) => {}
                Err(error) => {
                    let why = self.shared.lock().sessions[&self.id].fenced.clone();
                    panic!("append: {error}: {why:?}");
                }
            }
        };
        self.ends.push((end, blocks));
        self.records.push((kind, body.parts().concat()));
        let mut story = self.story.borrow_mut();
        story.returned = story.trees.len() - 1;
        if self.kind != MediumKind::Disk {
            story.durable = story.returned;
        }
    }

    fn files(&self) -> Vec<InodeId> {
        self.model.inodes().filter(|(_, inode)| inode.kind == FileKind::Regular).map(|(id, _)| id).collect()
    }

    /// Picks a file: mostly the newest, so that much is written more than once.
    fn file(&mut self) -> Option<InodeId> {
        let files = self.files();
        if self.random.one_in(3) { self.random.pick(&files).copied() } else { files.last().copied() }
    }

    fn directory(&mut self) -> InodeId {
        let found: Vec<InodeId> = self
            .model
            .inodes()
            .filter(|(_, inode)| inode.is_directory() && inode.links > 0)
            .map(|(id, _)| id)
            .collect();
        self.random.pick(&found).copied().expect("the root")
    }

    fn name(&mut self) -> &'static [u8] {
        self.random.pick(&NAMES).copied().expect("a name")
    }

    fn entry(&mut self) -> Option<(InodeId, Vec<u8>, InodeId, FileKind)> {
        let parent = self.directory();
        let found: Vec<_> =
            self.model.entries(parent).map(|(name, entry)| (parent, name.to_vec(), entry.inode, entry.kind)).collect();
        self.random.pick(&found).cloned()
    }

    fn update(&mut self) {
        let at = Timestamp { seconds: self.records.len() as i64 + 1, nanoseconds: self.random.below(1000) as u32 };
        match self.random.below(32) {
            0..=3 => self.create(at),
            4..=14 => self.write(at),
            15 => {
                let Some(inode) = self.file() else { return };
                let size = self.random.below(FILE_BLOCKS_MAX * BLOCK);
                self.try_update(&Update::Resize { inode, size, strip: false, at });
            }
            16..=19 => self.allocate(at),
            20..=23 => self.unlink(at),
            24..=26 => self.rename(at),
            27 => {
                let Some((_, _, inode, FileKind::Regular)) = self.entry() else { return };
                let (parent, name) = (self.directory(), self.name());
                self.try_update(&Update::Link { inode, parent, name, at });
            }
            28 => {
                let Some(inode) = self.file() else { return };
                let mode = Some(0o600 + self.random.below(0o100) as u32);
                let set =
                    SetAttributes { inode, mode, uid: Some(7), gid: None, accessed: None, modified: Some(at), at };
                self.try_update(&Update::SetAttributes(set));
            }
            29 => {
                let (inode, name) = (self.directory(), b"user.colour");
                let value = vec![b'x'; self.random.below(300) as usize];
                self.try_update(&Update::SetXattr { inode, name, value: &value, mode: None, at });
            }
            30 => {
                let inode = self.directory();
                self.try_update(&Update::RemoveXattr { inode, name: b"user.colour", mode: None, at });
            }
            _ => self.close(),
        }
    }

    fn create(&mut self, at: Timestamp) {
        let kinds = [FileKind::Regular, FileKind::Regular, FileKind::Regular, FileKind::Directory, FileKind::Symlink];
        let kind = self.random.pick(&kinds).copied().expect("a kind");
        let (inode, parent) = (self.new_inode(), self.directory());
        let is_unnamed = kind == FileKind::Regular && self.random.one_in(8);
        let name = if is_unnamed { b"" } else { self.name() };
        if is_unnamed {
            self.control.open_handle(inode);
        }
        self.try_update(&Update::Create(Create {
            inode,
            parent,
            name,
            kind,
            mode: 0o755,
            uid: 1,
            gid: 2,
            device: 0,
            at,
            target: if kind == FileKind::Symlink { b"somewhere" } else { b"" },
            acl_access: &[],
            acl_default: &[],
        }));
    }

    fn write(&mut self, at: Timestamp) {
        let Some(inode) = self.file() else { return };
        let place = match self.written {
            // Over the last write, which then need not be applied any more.
            Some(place) if self.random.one_in(3) => place,
            _ => {
                let within = [0, 0, 0, 100, 4000][self.random.below(5) as usize];
                let blocks = if self.random.one_in(3) { FILE_BLOCKS_MAX - 1 } else { 2 };
                let length = [1, 300, BLOCK, BLOCK, 5000][self.random.below(5) as usize];
                (inode, self.random.below(blocks) * BLOCK + within, length)
            }
        };
        self.written = Some(place);
        let (inode, offset, length) = place;
        let value = self.random.draw() as u8;
        let data: Vec<u8> = (0..length).map(|index| value.wrapping_add((index / 64) as u8)).collect();
        self.try_update(&Update::Write { inode, offset, at, strip: false, data: &data });
    }

    fn allocate(&mut self, at: Timestamp) {
        let Some(inode) = self.file() else { return };
        let (first, blocks) = (self.random.below(FILE_BLOCKS_MAX), 1 + self.random.below(2));
        let how = [
            Allocation::Punch,
            Allocation::Punch,
            Allocation::Zero,
            Allocation::ReserveKeepSize,
            Allocation::Collapse,
            Allocation::Insert,
        ];
        let how = self.random.pick(&how).copied().expect("one");
        let size = self.model.inodes().find(|(id, _)| *id == inode).map_or(0, |(_, inode)| inode.size);
        let moves = matches!(how, Allocation::Collapse | Allocation::Insert);
        if moves && size + blocks * BLOCK > FILE_BLOCKS_MAX * BLOCK {
            return;
        }
        let (offset, length) =
            if moves || self.random.one_in(2) { (first * BLOCK, blocks * BLOCK) } else { (first * BLOCK + 70, 5000) };
        self.try_update(&Update::Allocate { inode, how, offset, length, strip: false, at });
    }

    fn unlink(&mut self, at: Timestamp) {
        let Some((parent, name, inode, kind)) = self.entry() else { return };
        let release = self.random.one_in(2);
        if !release {
            // It stays open, as an orphan.
            self.control.open_handle(inode);
        }
        let (name, kind_is_directory) = (&*name, kind == FileKind::Directory);
        self.try_update(&if kind_is_directory {
            Update::RemoveDirectory { inode, parent, name, release, at }
        } else {
            Update::Unlink { inode, parent, name, release, at }
        });
    }

    fn rename(&mut self, at: Timestamp) {
        let Some((parent, name, inode, _)) = self.entry() else { return };
        let (new_parent, new_name) = (self.directory(), self.name());
        if ashlar_update::would_make_cycle(&self.model, inode, new_parent).expect("a tree") {
            return;
        }
        let target = self.model.entries(new_parent).find(|(found, _)| *found == new_name).map(|(_, entry)| entry.inode);
        let exchange = self.random.one_in(4) && target.is_some();
        if exchange && ashlar_update::would_make_cycle(&self.model, target.expect("read"), parent).expect("a tree") {
            return;
        }
        let release = !target.is_some_and(|target| self.control.has_open(target));
        let whiteout = !exchange && self.random.one_in(3);
        let whiteout = whiteout.then(|| Whiteout { inode: self.new_inode(), uid: 1, gid: 2, acl_access: &[] });
        let rename =
            Rename { parent, name: &name, inode, new_parent, new_name, target, exchange, whiteout, release, at };
        self.try_update(&Update::Rename(rename));
    }

    /// Closes files that are open without a name.
    fn close(&mut self) {
        let orphans = self.model.orphans();
        let Some(inode) = self.random.pick(&orphans).copied() else { return };
        self.try_update(&Update::Release { inode });
        while self.control.has_open(inode) {
            self.control.close_handle(inode);
        }
    }
}
