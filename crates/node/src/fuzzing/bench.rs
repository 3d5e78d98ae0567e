//! A small arena with the files of several users, and sessions on it.

use std::sync::Arc;
use std::time::Duration;

use ashlar_lease::RequestedLease;
use ashlar_pmem::{CrashMedium, MediumKind};
use ashlar_store::{MemoryArena, MemoryArenaOptions, Store};
use ashlar_types::{
    Contents, FileKind, Inode, InodeId, LeaseMode, LeaseScope, LogPosition, SessionId, Timestamp, WantedLease,
};
use ashlar_wire::{Credit, CreditKind, SessionKind};

use super::script::RecordScript;
use super::tree::{
    ANN, BOB, BYSTANDER, FOUND_AT, HIDDEN_FROM_ALL, HIDDEN_FROM_ANN, LIMITED, NEW_INODES, OPEN, TEAM, TREE, TreeInodes,
    TreeRow, WRITER, make_tree,
};
use crate::access::open_handles::note_opened;
use crate::leases::leasing::{Ancestors, lease_word};
use crate::sessions::identity::{Process, ProcessTable, SessionIdentity};
use crate::sessions::session::{ServedSession, SessionMemory};
use crate::{Node, NodeCore, NodeLimits, NodeTime};

/// Blocks of the arena: 16 MiB.
const ARENA_BLOCKS: u32 = 4096;
/// The time of day in all cases.
const NOW: Timestamp = Timestamp { seconds: 1_800_000_000, nanoseconds: 0 };
/// The one process.
const PROCESS: Process = Process { pid: 1, start_ticks: 1, boot: [0; 16] };
/// A record may take a quarter of a log's ring.
const RING_BYTES: u64 = 32 << 10;
/// Well below the arena's free space: credit covers each record.
const CREDIT: Credit = Credit { blocks: 500, metadata_bytes: 1 << 20 };

/// An arena whose committed state is the tree.
///
/// A case commits nothing, so the next one finds the tree again.
pub struct ArenaBench {
    arena: Arc<MemoryArena>,
    tree: TreeInodes,
    hidden: [Vec<InodeId>; 2],
    contents: Vec<(InodeId, Inode, Contents)>,
    /// The session of the super-user; its own records are none, so that no case changes it.
    bystander: Option<ServedSession>,
}

impl ArenaBench {
    /// Makes an arena with the tree.
    pub fn make() -> Self {
        let options = MemoryArenaOptions::new(CrashMedium::Words, vec![ARENA_BLOCKS]);
        let arena = Arc::new(MemoryArena::new(&options));
        Store::format_in_memory(&arena, FOUND_AT).expect("formatted");
        let mut state = open_state(&arena);
        let inodes = make_tree(&mut state);
        let of_rows = |rows: &[usize]| rows.iter().map(|row| inodes[*row]).collect::<Vec<_>>();
        let hidden_from_all = of_rows(&HIDDEN_FROM_ALL);
        let hidden = [[hidden_from_all.clone(), of_rows(&HIDDEN_FROM_ANN)].concat(), hidden_from_all];
        let is_directory = |row: &TreeRow| row.2 == FileKind::Directory;
        let directories = TREE.iter().zip(&inodes).filter(|(row, _)| is_directory(row)).map(|(_, inode)| *inode);
        let tree = TreeInodes {
            directories: [InodeId::ROOT].into_iter().chain(directories).collect(),
            known: [InodeId::ROOT, InodeId::RENAME].into_iter().chain(inodes.iter().copied()).collect(),
            own: Vec::new(),
            own_directories: Vec::new(),
            own_files: Vec::new(),
            limited: inodes[LIMITED],
            first_new: InodeId(inodes[TREE.len() - 1].0 + 1),
            user: 0,
        };
        let found = tree.known.iter().filter_map(|id| {
            let inode =
                state.store.inode(*id).expect("a sound store").filter(|inode| inode.kind == FileKind::Regular)?;
            Some((*id, inode, state.store.contents(*id).expect("a sound store")))
        });
        let contents = found.collect();
        drop(state);
        let mut bench = Self { arena, tree, hidden, contents, bystander: None };
        let bystander = bench.make_session(BYSTANDER, 0);
        // One has a name, and one has none.
        for row in [OPEN, TREE.len() - 1] {
            assert!(bystander.control.open_handle(inodes[row]), "a free slot");
        }
        bench.bystander = Some(bystander);
        bench
    }

    /// Makes a session of a user.
    fn make_session(&self, id: SessionId, uid: u32) -> ServedSession {
        let groups = if uid == ANN { vec![TEAM] } else { Vec::new() };
        let (kind, label) = (SessionKind::Process, String::new());
        let identity = SessionIdentity { process: PROCESS, uid, gid: uid, groups, kind, label };
        let memory = SessionMemory::in_twins(CrashMedium::Words, id, 1, RING_BYTES).expect("long enough");
        let mut session = ServedSession::new(id, identity, 1, memory, Duration::ZERO).expect("long enough");
        session.grant_credit(CREDIT, CreditKind::Common);
        session.ranges.add(&session.page, self.tree.first_new, NEW_INODES);
        session
    }

    /// Begins a case: user, leases and open files are as the script says.
    pub fn begin(&mut self, script: &mut RecordScript<'_>) -> (Node, TreeInodes) {
        let user = match script.byte() % 8 {
            0 => 0,
            1 | 2 => BOB,
            _ => ANN,
        };
        let tree = self.tree.of_user(user);
        let mut state = open_state(&self.arena);
        let mut session = self.make_session(WRITER, user);
        state.store.set_session(WRITER, session.log.generation(), LogPosition(0));
        state.ways.add_user(&session.credentials);
        session.raise_quota_version(true);
        session.ways_from = state.ways.version();
        state.leasing.take_up(&session);
        state.sessions.insert(WRITER, session);
        state.sessions.extend(self.bystander.take().map(|bystander| (BYSTANDER, bystander)));
        take_leases(&mut state, &tree, script);
        let opened = script.byte();
        for (index, inode) in tree.known.iter().enumerate().filter(|(index, _)| opened >> (index % 8) & 1 != 0) {
            let is_new = state.sessions[&WRITER].control.open_handle(*inode);
            // SharedFS has seen some of the handles under leases that it took since.
            if is_new && index < tree.known.len() / 2 {
                let NodeCore { store, sessions, .. } = &mut *state;
                note_opened(store, sessions, (WRITER, None), *inode, LeaseScope::Node);
            }
        }
        (state, tree)
    }

    /// Ends a case, and takes back what the next one needs.
    pub fn end(&mut self, mut state: Node) {
        self.bystander = state.sessions.remove(&BYSTANDER);
        drop(state);
    }

    /// Returns the inodes that a user can't reach.
    pub fn hidden_from(&self, user: u32) -> &[InodeId] {
        match user {
            ANN => &self.hidden[0],
            BOB => &self.hidden[1],
            _ => &[],
        }
    }

    /// Returns a file whose attributes are those of the tree and whose content is not.
    pub fn changed_content(&self, state: &Node) -> Option<InodeId> {
        let is_changed = |(id, inode, contents): &&(InodeId, Inode, Contents)| {
            let is_same = state.store.inode(*id).expect("a sound store").as_ref() == Some(inode);
            is_same && state.store.contents(*id).expect("a sound store") != *contents
        };
        self.contents.iter().find(is_changed).map(|(id, ..)| *id)
    }
}

/// Knows that the one process lives.
struct OneProcess;

impl ProcessTable for OneProcess {
    fn is_gone(&self, process: &Process) -> bool {
        *process != PROCESS
    }
}

fn open_state(arena: &Arc<MemoryArena>) -> Node {
    let store = Store::open_in_memory(Arc::clone(arena)).expect("a sound store");
    let limits = NodeLimits { lease_hold_us: 200, ..NodeLimits::new(MediumKind::Pmem) };
    let now = NodeTime { since_boot: Duration::from_secs(1), wall: NOW };
    Node::new(store, limits, Arc::new(OneProcess), now).expect("a sound store")
}

/// Grants the leases that the script names, whatever the user may do.
fn take_leases(state: &mut NodeCore, tree: &TreeInodes, script: &mut RecordScript<'_>) {
    let (how, chosen) = (script.byte(), script.word());
    let subtree = match how % 8 {
        0 => None,
        1 => Some(tree.directories[usize::from(how >> 3) % tree.directories.len()]),
        _ => Some(InodeId::ROOT),
    };
    // A subtree's lease doesn't cover files with several names or none.
    let is_chosen = |index: usize| how % 8 > 3 || chosen >> (index % 64) & 1 != 0;
    let nodes = tree.known.iter().enumerate().filter(|(index, _)| is_chosen(*index)).map(|(_, inode)| *inode);
    let wants = nodes.map(|inode| (inode, LeaseScope::Node)).chain(subtree.map(|top| (top, LeaseScope::Subtree)));
    for (inode, scope) in wants {
        let lease = WantedLease { inode, mode: LeaseMode::Write, scope };
        let want = RequestedLease { lease, may_widen: false };
        let ancestors = Ancestors(&state.store);
        state.leasing.manager.handle_request(1, WRITER, &[want], &ancestors).expect("a request like any other");
        while let Some(command) = state.leasing.manager.poll_command(1, &ancestors, &|_| false) {
            let session = state.sessions.get_mut(&WRITER).expect("it is there");
            command.words().for_each(|word| session.set_lease(word.slot, lease_word(&word), word.inode));
        }
    }
}
