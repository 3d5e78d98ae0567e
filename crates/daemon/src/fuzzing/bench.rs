//! A small arena with the files of several users, and sessions on it.

use std::path::Path;
use std::sync::Arc;

use ashlar_pmem::{Arena, ArenaOptions};
use ashlar_store::Store;
use ashlar_types::{Contents, FileKind, Inode, InodeId, LeaseMode, LeaseScope, LogPosition, SessionId, WantedLease};
use ashlar_wire::{Credit, CreditKind, SessionKind};
use tempfile::TempDir;

use super::script::RecordScript;
use super::tree::{
    ANN, BOB, BYSTANDER, FOUND_AT, HIDDEN_FROM_ALL, HIDDEN_FROM_ANN, LIMITED, NEW_INODES, OPEN, TEAM, TREE, TreeInodes,
    TreeRow, WRITER, make_tree,
};
use crate::Config;
use crate::clock;
use crate::process::find_process;
use crate::recovery::make_node;
use crate::session_files::PreparedSession;
use ashlar_node::access::open_handles::note_opened;
use ashlar_node::leases::leasing::{Ancestors, RequestedLease, lease_word};
use ashlar_node::sessions::identity::{Process, SessionIdentity};
use ashlar_node::sessions::session::{LogRoom, ServedSession, SessionLog};
use ashlar_node::{Node, NodeCore};

/// The smallest arena that there is.
const ARENA_BYTES: u64 = 16 << 20;
/// A record may take a quarter of a log's ring.
const RING_BYTES: u64 = 32 << 10;
/// Well below the arena's free space: credit covers each record.
const CREDIT: Credit = Credit { blocks: 500, metadata_bytes: 1 << 20 };

/// An arena whose committed state is the tree.
///
/// A case commits nothing, so the next one finds the tree again.
pub struct ArenaBench {
    arena: Arc<Arena>,
    tree: TreeInodes,
    hidden: [Vec<InodeId>; 2],
    contents: Vec<(InodeId, Inode, Contents)>,
    process: Process,
    /// The session of the super-user; its own records are none, so that no case changes it.
    bystander: Option<ServedSession>,
    _directory: TempDir,
}

impl ArenaBench {
    /// Makes an arena with the tree.
    pub fn make() -> Self {
        let memory = Path::new("/dev/shm");
        let directory = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let directory = directory.expect("a directory");
        let options = ArenaOptions { size_bytes: ARENA_BYTES, emulate_pmem: true };
        let arena = Arc::new(Arena::create(&directory.path().join("arena"), &options).expect("an arena"));
        Store::format(&arena, FOUND_AT).expect("formatted");
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
        let process = find_process(std::process::id()).expect("this process");
        let mut bench = Self { arena, tree, hidden, contents, process, bystander: None, _directory: directory };
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
        let bytes = SessionLog::bytes_for(RING_BYTES);
        let groups = if uid == ANN { vec![TEAM] } else { Vec::new() };
        let (process, kind, label) = (self.process, SessionKind::Process, String::new());
        let identity = SessionIdentity { process, uid, gid: uid, groups, kind, label };
        let prepared = PreparedSession::make(&self.arena, id, LogRoom { bytes, allocated: bytes }).expect("made");
        let (mut session, _) = prepared.give_to(identity, clock::boot_time()).expect("given");
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
        self.arena.remove_session(WRITER).expect("removed");
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

fn open_state(arena: &Arc<Arena>) -> Node {
    make_node(&Config::new(arena.dir()), arena).expect("a sound store")
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
