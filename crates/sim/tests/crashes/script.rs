//! A session at work, and SharedFS's work for it, from one seed.

use std::sync::{Arc, Mutex};

use ashlar_log::AppendError;
use ashlar_node::Node;
use ashlar_node::digest::commit::{NodeCommit, NodeCommitDone, begin_commit, finish_commit};
use ashlar_node::digest::freed_blocks::release_blocks;
use ashlar_node::records::apply::Slice;
use ashlar_pmem::Persistent;
use ashlar_sim::client::SimClient;
use ashlar_sim::intent::{Claims, Intent};
use ashlar_sim::machine::Machine;
use ashlar_sim::random::SimRandom;
use ashlar_sim::tree_picture::PicturedTree;
use ashlar_types::{FileKind, InodeId, LogPosition, Timestamp};
use ashlar_update::model::ModelTree;
use ashlar_update::{Allocation, Update};
use ashlar_wire::{Credit, CreditKind, LeaseRequest, Need, Reply, Request};

use crate::trials::{STARTED_US, Story, lock};

/// Blocks that are left for deletions, which copy blocks too.
///
/// Only updates of at most one block may take them.
const SPARE_BLOCKS: u64 = 5;
const BLOCK: u64 = 4096;
const FILE_BLOCKS_MAX: u64 = 5;
/// The script itself sees to it that updates fit.
const CREDIT: Credit = Credit { blocks: 1 << 40, metadata_bytes: 1 << 40 };

/// The kind and the body of a record.
pub type LoggedRecord = (u8, Vec<u8>);

/// Returns the model of a tree that was recovered after these updates.
///
/// Its orphans are gone.
pub fn replay(records: &[LoggedRecord]) -> ModelTree {
    let mut model = ModelTree::new();
    for (kind, body) in records {
        model.apply(&Update::decode(*kind, body).expect("encoded")).expect("valid");
    }
    for inode in model.orphans() {
        model.apply(&Update::Release { inode }).expect("valid");
    }
    model
}

/// The session, and the machine on which it works.
pub struct SessionScript {
    pub machine: Machine,
    client: SimClient,
    story: Arc<Mutex<Story>>,
    random: SimRandom,
    /// How many of four chances to go on with a commit are taken.
    haste: u64,
    model: ModelTree,
    /// All updates, those of former lives included.
    pub records: Vec<LoggedRecord>,
    /// The records of this life: where they end, and the blocks that they may need.
    ends: Vec<(LogPosition, u64)>,
    /// The last write.
    written: Option<Intent>,
    job: Option<NodeCommit>,
    done: Option<NodeCommitDone>,
    pub commits: u64,
}

impl SessionScript {
    /// Begins a session on a machine whose tree these updates have made.
    pub fn begin(mut machine: Machine, records: Vec<LoggedRecord>, story: Arc<Mutex<Story>>, seed: u64) -> Self {
        let client = SimClient::begin(&mut machine, 0, STARTED_US).expect("begun");
        let node = machine.node.as_mut().expect("SharedFS runs");
        node.sessions.get_mut(&client.session).expect("begun").grant_credit(CREDIT, CreditKind::Common);
        let model = replay(&records);
        Self {
            machine,
            client,
            story,
            random: SimRandom::new(seed, 5),
            haste: 1 + seed % 3,
            model,
            records,
            ends: Vec::new(),
            written: None,
            job: None,
            done: None,
            commits: 0,
        }
    }

    /// Returns how often the log went round.
    pub fn laps(&self) -> u64 {
        self.client.log.tail().0 / self.client.log.capacity()
    }

    /// Returns how many updates SharedFS did not have to apply.
    pub fn coalesced(&mut self) -> u64 {
        self.node().counters.coalesced_records
    }

    /// Makes one random step.
    pub fn step(&mut self) {
        match self.random.below(30) {
            0..=20 => self.change(),
            21 | 22 => self.apply_some(),
            23..=26 if self.random.below(4) < self.haste => self.advance_commit(),
            27 if self.machine.is_disk() => self.sync_or_write_back(),
            _ => self.release(),
        }
    }

    /// Applies everything, and compares it with the model.
    pub fn check_applied(&mut self) -> Option<String> {
        self.machine.apply_log(self.client.session);
        let node = self.node();
        if node.counters.sessions_fenced > 0 {
            return Some("the session is fenced".into());
        }
        let tree = match PicturedTree::of_store(&node.store) {
            Ok(tree) => tree,
            Err(error) => return Some(error.to_string()),
        };
        tree.difference(lock(&self.story).trees.last()?)
    }

    // ---- SharedFS's part

    fn node(&mut self) -> &mut Node {
        self.machine.node.as_mut().expect("SharedFS runs")
    }

    fn applied(&mut self) -> LogPosition {
        let session = self.client.session;
        self.node().store.applied(session)
    }

    /// Applies the log up to any record, as happens when a lease moves at that moment.
    fn apply_some(&mut self) {
        let applied = self.applied();
        let waiting: Vec<LogPosition> = self.ends.iter().map(|(end, _)| *end).filter(|end| *end > applied).collect();
        let Some(to) = self.random.pick(&waiting) else { return };
        let session = self.client.session;
        assert!(self.node().apply(session, to, Slice::All), "the log is applied up to {to}");
        self.node().decide_all();
    }

    /// Brings the commit one stage further.
    ///
    /// Other steps may come between any two stages.
    fn advance_commit(&mut self) {
        if let Some(done) = self.done.take() {
            finish_commit(self.node(), done).expect("committed");
            self.commits += 1;
            lock(&self.story).is_committing = false;
        } else if let Some(job) = self.job.take() {
            self.done = Some(job.run());
            let mut story = lock(&self.story);
            story.durable = story.durable.max(story.frozen);
        } else {
            self.job = begin_commit(self.node());
            let applied = self.applied();
            let mut story = lock(&self.story);
            story.is_committing = self.job.is_some();
            story.frozen = self.ends.iter().filter(|(end, _)| *end <= applied).count();
        }
    }

    /// Releases the committed part of the log.
    ///
    /// It also declares that the session reads by no extent older than what is applied.
    fn release(&mut self) {
        self.client.log.release(self.client.control.committed());
        self.client.control.set_released(self.client.control.applied());
        let core = &mut **self.node();
        release_blocks(&mut core.store, &core.sessions);
    }

    fn sync_or_write_back(&mut self) {
        if self.random.one_in(2) {
            return self.machine.write_back(&mut self.random);
        }
        // As LibFS does.
        self.client.leases.memory().sync().expect("synced");
        self.client.log.memory().sync().expect("synced");
        let mut story = lock(&self.story);
        story.durable = story.returned;
    }

    fn make_room(&mut self) {
        self.machine.apply_log(self.client.session);
        while self.job.is_some() || self.done.is_some() || self.node().store.is_dirty() {
            self.advance_commit();
        }
        self.release();
    }

    // ---- the session's part

    /// Draws a change, and makes it if it is valid.
    fn change(&mut self) {
        let drawn = match self.random.below(16) {
            0..=6 => self.draw_write(),
            7 | 8 => self.draw_allocation(),
            9 => return self.open_or_close(),
            _ => Intent::draw(&self.model, &self.client.handles, true, &mut self.random),
        };
        if let Some(intent) = drawn {
            self.make(&intent);
        }
    }

    /// Picks a file: mostly the newest, so that much is written more than once.
    fn pick_file(&mut self) -> Option<InodeId> {
        let files: Vec<InodeId> =
            self.model.inodes().filter(|(_, inode)| is_named_file(inode)).map(|(id, _)| id).collect();
        if self.random.one_in(3) { self.random.pick(&files) } else { files.last().copied() }
    }

    fn draw_write(&mut self) -> Option<Intent> {
        let inode = self.pick_file()?;
        let value = self.random.draw() as u8;
        self.written = match self.written.take() {
            // Over the last write, which then need not be applied any more.
            Some(Intent::Write(inode, offset, length, _)) if self.random.one_in(3) => {
                Some(Intent::Write(inode, offset, length, value))
            }
            _ => {
                let within = self.random.pick(&[0, 0, 0, 100, 4000])?;
                let blocks = if self.random.one_in(3) { FILE_BLOCKS_MAX - 1 } else { 2 };
                let length = self.random.pick(&[1, 300, BLOCK, BLOCK, 5000])?;
                Some(Intent::Write(inode, self.random.below(blocks) * BLOCK + within, length, value))
            }
        };
        self.written.clone()
    }

    fn draw_allocation(&mut self) -> Option<Intent> {
        let inode = self.pick_file()?;
        let (first, blocks) = (self.random.below(FILE_BLOCKS_MAX), self.random.between(1, 2));
        let how = self.random.pick(&[
            Allocation::Punch,
            Allocation::Punch,
            Allocation::Zero,
            Allocation::ReserveKeepSize,
            Allocation::Collapse,
            Allocation::Insert,
        ])?;
        let size = self.model.inodes().find(|(id, _)| *id == inode).map_or(0, |(_, inode)| inode.size);
        let moves = matches!(how, Allocation::Collapse | Allocation::Insert);
        if moves && size + blocks * BLOCK > FILE_BLOCKS_MAX * BLOCK {
            return None;
        }
        let (offset, length) =
            if moves || self.random.one_in(2) { (first * BLOCK, blocks * BLOCK) } else { (first * BLOCK + 70, 5000) };
        Some(Intent::Allocate(inode, how, offset, length))
    }

    /// Opens a file, which may then lose its name, or closes one.
    fn open_or_close(&mut self) {
        if self.random.one_in(2) {
            let Some(inode) = self.pick_file().filter(|inode| !self.client.handles.contains(inode)) else { return };
            self.acquire(&[(inode, false)]);
            self.client.control.open_handle(inode);
            self.client.handles.push(inode);
        } else {
            let Some(inode) = self.random.pick(&self.client.handles) else { return };
            if self.model.orphans().contains(&inode) {
                self.make(&Intent::Release(inode));
            }
            self.client.control.close_handle(inode);
            self.client.handles.retain(|open| *open != inode);
        }
    }

    /// Gets the leases that the session does not hold; returns whether it held all of them.
    fn acquire(&mut self, claims: &[(InodeId, bool)]) -> bool {
        let is_missing = |(id, is_write): &&(InodeId, bool)| !self.client.holds(*id, *is_write);
        let want = |&(id, is_write): &(InodeId, bool)| LeaseRequest::on_inode(id, is_write, Need::default());
        let wants: Vec<_> = claims.iter().filter(is_missing).map(want).collect();
        if wants.is_empty() {
            return true;
        }
        let reply = self.machine.serve(self.client.session, Request::Acquire(wants)).expect("granted");
        let Reply::Granted { grants, .. } = reply else { panic!("{reply:?}") };
        self.client.granted.extend(grants.iter().map(|grant| (grant.inode, (grant.slot, grant.word))));
        false
    }

    fn get_inode_numbers(&mut self) {
        if self.client.inodes.is_empty() {
            let reply = self.machine.serve(self.client.session, Request::InodeRange).expect("numbers");
            let Reply::Inodes(first, count) = reply else { panic!("{reply:?}") };
            self.client.inodes = first.0..first.0 + count;
        }
    }

    /// Returns the blocks that are neither used nor needed by logged records.
    fn room(&mut self) -> u64 {
        let applied = self.applied();
        let promised: u64 = self.ends.iter().filter(|(end, _)| *end > applied).map(|(_, blocks)| blocks).sum();
        self.node().store.space().blocks_free.saturating_sub(promised)
    }

    /// Returns whether so many blocks fit, after a commit if need be.
    fn has_room(&mut self, blocks: u64) -> bool {
        if self.room() >= blocks + SPARE_BLOCKS {
            return true;
        }
        self.make_room();
        blocks <= 1 || self.room() >= blocks + SPARE_BLOCKS
    }

    /// Makes a change, if it is valid and there is room for it.
    fn make(&mut self, intent: &Intent) {
        let Some(claims) = intent.claims(&self.model) else { return };
        self.get_inode_numbers();
        // Each update leaves a time of its own, also in the inode that it accesses.
        let at = Timestamp { seconds: self.records.len() as i64 + 1, nanoseconds: self.random.below(1000) as u32 };
        let (made, mut data, handles) = (InodeId(self.client.inodes.start), Vec::new(), self.client.handles.clone());
        let is_open = |inode: InodeId| handles.contains(&inode);
        let Some(update) = intent.update(&self.model, &self.client.user, &is_open, made, at, &mut data) else { return };
        if !self.has_room(update.cost().blocks) || self.model.apply(&update).is_err() {
            return;
        }
        if self.model.inodes().any(|(inode, _)| inode == made) {
            self.client.inodes.next();
            if let Intent::Create(place, ..) = intent
                && place.name.is_empty()
            {
                self.client.control.open_handle(made);
                self.client.handles.push(made);
            }
        }
        {
            let mut story = lock(&self.story);
            let tree = PicturedTree::of_model(&self.model, story.trees.last().expect("the first"));
            story.trees.push(tree);
        }
        self.append(&claims, &update);
        if let Intent::Create(place, ..) = intent {
            // The session knows the inode by the lease on its directory.
            let lease = self.client.granted[&place.directory];
            self.client.granted.insert(made, lease);
        }
    }

    fn append(&mut self, claims: &Claims, update: &Update<'_>) {
        let (kind, body) = (update.kind() as u8, update.encode().parts().concat());
        let end = loop {
            let seal = self.client.log.seal_count();
            if !self.acquire(claims) {
                continue;
            }
            match self.client.log.append(seal, kind, &[&body]) {
                Ok(appended) => break appended.end,
                Err(AppendError::Full { .. }) => self.make_room(),
                Err(AppendError::Sealed) => {}
                Err(error) => panic!("append: {error}"),
            }
        };
        self.ends.push((end, update.cost().blocks));
        self.records.push((kind, body));
        let mut story = lock(&self.story);
        story.returned = story.trees.len() - 1;
        if !self.machine.is_disk() {
            story.durable = story.returned;
        }
    }
}

fn is_named_file(inode: &ashlar_types::Inode) -> bool {
    inode.kind == FileKind::Regular && inode.links > 0
}
