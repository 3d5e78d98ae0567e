//! A script of events for the lease manager, read from arbitrary bytes.
//!
//! Several sessions ask for whatever they like, in a tree that they change. The property test and the fuzz target run
//! it. The shell keeps to the manager's contract; the sessions keep to nothing.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_lease::{Ancestry, Command, InodeHome, LeaseManager, Limits, Reach, RequestId, RequestedLease, SlotWord};
use ashlar_types::{InodeId, LeaseMode, LeaseScope, LogPosition, SessionId, WantedLease};

/// Sessions, and inode numbers: small numbers collide.
const SESSIONS: u64 = 4;
const INODES: u64 = 12;
const PASSIVE: SessionId = SessionId(99);
/// Commands after one event: more means that the manager goes in circles.
const COMMANDS_MAX: usize = 100_000;

/// A change that a session has logged.
#[derive(Clone, Copy, Debug)]
enum Change {
    Make { parent: InodeId, is_directory: bool },
    Move { inode: InodeId, to: InodeId },
    Link { inode: InodeId, to: InodeId },
    Remove { inode: InodeId, keeps: bool },
}

#[derive(Debug, Default)]
struct TreeInode {
    is_directory: bool,
    parents: BTreeSet<InodeId>,
}

#[derive(Debug, Default)]
struct Tree(BTreeMap<InodeId, TreeInode>);

impl Ancestry for Tree {
    fn home(&self, inode: InodeId) -> InodeHome {
        if inode == InodeId::RENAME {
            return InodeHome { directory: Some(InodeId::ROOT), is_directory: true };
        }
        let Some(found) = self.0.get(&inode) else { return InodeHome::default() };
        let directory = found.parents.first().copied().filter(|_| found.parents.len() == 1);
        InodeHome { directory, is_directory: found.is_directory }
    }
}

impl Tree {
    fn is_directory(&self, inode: InodeId) -> bool {
        self.0.get(&inode).is_some_and(|found| found.is_directory)
    }

    /// Whether a directory still has a name, up to the root, and does not lie below `inode`.
    fn leads_to_root(&self, directory: InodeId, avoids: InodeId) -> bool {
        let way = std::iter::successors(Some(directory), |at| self.home(*at).directory);
        let way: Vec<_> = way.collect();
        way.last() == Some(&InodeId::ROOT) && !way.contains(&avoids)
    }

    fn is_empty(&self, directory: InodeId) -> bool {
        !self.0.values().any(|found| found.parents.contains(&directory))
    }
}

/// The shell: the tree, the tables and the logs.
struct Shell {
    manager: LeaseManager,
    limits: Limits,
    tree: Tree,
    logs: BTreeMap<SessionId, Vec<Change>>,
    positions: BTreeMap<SessionId, u64>,
    words: BTreeMap<(SessionId, u32), SlotWord>,
    requests: Vec<RequestId>,
    next_inode: u64,
    now_us: u64,
}

/// Runs a script.
///
/// # Errors
/// The invariant that does not hold.
pub fn run(bytes: &[u8]) -> Result<(), String> {
    let mut bytes = bytes.iter().copied();
    let kind = bytes.next().unwrap_or(0);
    let tight = Limits {
        entries_per_session_max: 8,
        widen_after_entries: 2,
        widen_min_age_us: 3,
        table_slots: 10,
        splits_max: 2,
        marks_max: 4,
        passive_ttl_us: 30,
        queue_max: 6,
        hold_us: u64::from(kind >> 1 & 7),
        ..Limits::default()
    };
    let limits = if kind & 1 == 0 { Limits { hold_us: 0, ..Limits::default() } } else { tight };
    let root = TreeInode { is_directory: true, parents: BTreeSet::new() };
    let mut shell = Shell {
        manager: LeaseManager::new(limits),
        limits,
        tree: Tree([(InodeId::ROOT, root)].into()),
        logs: BTreeMap::new(),
        positions: BTreeMap::new(),
        words: BTreeMap::new(),
        requests: Vec::new(),
        next_inode: 16,
        now_us: 1,
    };
    // A tree to begin with.
    for (parent, is_directory) in [(1, true), (1, true), (16, false), (16, true), (19, false), (1, false)] {
        shell.make(InodeId(parent), is_directory);
    }
    loop {
        let mut next = || bytes.next();
        let Some(action) = next() else { return Ok(()) };
        let (a, b, c) = (next().unwrap_or(0), next().unwrap_or(0), next().unwrap_or(0));
        let wants: Vec<_> = (0..a >> 4 & 3).map(|_| [next().unwrap_or(0), next().unwrap_or(0)]).collect();
        shell.step(action, [a, b, c], &wants)?;
    }
}

impl Shell {
    fn inode(&self, by: u8) -> InodeId {
        match u64::from(by) % (INODES + 3) {
            0 | 1 => InodeId::ROOT,
            2 => InodeId::RENAME,
            3 => InodeId(u64::MAX),
            number => InodeId(self.next_inode.saturating_sub(number - 4).max(16)),
        }
    }

    fn want(&self, inode: u8, how: u8) -> RequestedLease {
        RequestedLease {
            lease: WantedLease {
                inode: self.inode(inode),
                mode: LeaseMode::new(how & 1 != 0),
                scope: [LeaseScope::Node, LeaseScope::Files, LeaseScope::Subtree][usize::from(how >> 1) % 3],
            },
            may_widen: how & 0x40 == 0,
        }
    }

    fn make(&mut self, parent: InodeId, is_directory: bool) {
        let inode = InodeId(self.next_inode);
        self.next_inode += 1;
        self.tree.0.insert(inode, TreeInode { is_directory, parents: [parent].into() });
    }

    fn step(&mut self, action: u8, [a, b, c]: [u8; 3], more: &[[u8; 2]]) -> Result<(), String> {
        let session = SessionId(1 + u64::from(a) % SESSIONS);
        let (inode, other) = (self.inode(b), self.inode(c));
        match action % 24 {
            0..9 => {
                let wants = [self.want(b, c)].into_iter().chain(more.iter().map(|want| self.want(want[0], want[1])));
                let wants: Vec<_> = wants.collect();
                let is_refused = wants.iter().any(|want| self.manager.refuses(session, &want.lease, &self.tree));
                if !is_refused {
                    let asked = self.manager.handle_request(self.now_us, session, &wants, &self.tree);
                    self.requests.extend(asked.ok());
                }
            }
            9 | 10 => self.log(session, Change::Make { parent: inode, is_directory: c & 1 == 0 }),
            11 => self.log(session, Change::Move { inode, to: other }),
            12 => self.log(session, Change::Link { inode, to: other }),
            13 | 14 => self.log(session, Change::Remove { inode, keeps: c & 1 == 0 }),
            15 => self.apply(session),
            16 => self.manager.handle_release(session, inode),
            17 => {
                let found =
                    self.manager.find_covering(self.now_us, session, inode, self.want(b, c).lease.mode, &self.tree);
                self.write(found.map(|(grant, _)| grant.word));
            }
            18 => {
                let found = self.manager.join_readers(self.now_us, PASSIVE, inode, &self.tree);
                self.write(found.map(|grant| grant.word));
            }
            19 => {
                self.now_us += u64::from(b);
                self.manager.handle_time(self.now_us);
            }
            20 => match c % 3 {
                0 => self.manager.free_reserved(inode),
                1 => self.manager.reserve(inode, [Reach::Inode, Reach::Directory][usize::from(c >> 2 & 1)], &self.tree),
                _ => self.manager.admit_to_reserved(session),
            },
            21 => {
                if let Some(request) = self.requests.get(usize::from(b) % self.requests.len().max(1)) {
                    self.manager.handle_cancel(*request);
                }
            }
            22 if c & 3 == 0 => {
                self.manager.handle_session_end(session);
                self.perform(true)?;
                self.words.retain(|(holder, _), _| *holder != session);
            }
            23 if c & 3 == 0 => {
                // The passive reader ends with SharedFS.
                self.words.retain(|(holder, _), _| *holder != PASSIVE);
                let words: Vec<_> = self.words.values().copied().collect();
                let applied: Vec<_> =
                    self.positions.iter().map(|(session, position)| (*session, LogPosition(*position))).collect();
                self.manager = LeaseManager::restore(self.limits, &words, &applied, &self.tree);
                self.requests.clear();
            }
            _ => {
                let position = LogPosition(self.positions.get(&session).copied().unwrap_or(0));
                self.manager.handle_persistent(session, position);
            }
        }
        self.perform(action & 0x80 == 0)
    }

    /// Performs commands; `is_using` says whether sessions have not used their grants yet.
    fn perform(&mut self, is_using: bool) -> Result<(), String> {
        for _ in 0..COMMANDS_MAX {
            let Some(command) = self.manager.poll_command(self.now_us, &self.tree, &|_| is_using) else {
                return self.manager.check(&self.tree);
            };
            self.write(command.words().collect::<Vec<_>>());
            match command {
                Command::SealAndApply { session } => {
                    self.apply(session);
                    let position = LogPosition(self.positions.get(&session).copied().unwrap_or(0));
                    self.manager.handle_applied(session, position);
                }
                Command::Grant { grants, request, .. } => {
                    self.requests.retain(|waiting| *waiting != request);
                    if grants.is_empty() {
                        return Err(format!("{request:?} was answered without a grant"));
                    }
                }
                Command::Wait { until_us } => self.now_us = self.now_us.max(until_us),
                _ => {}
            }
        }
        Err("the manager never comes to an end".to_owned())
    }

    fn write(&mut self, words: impl IntoIterator<Item = SlotWord>) {
        for word in words {
            if !self.manager.is_superseded(&word) {
                self.words.insert((word.session, word.slot), word);
            }
        }
    }

    fn log(&mut self, session: SessionId, change: Change) {
        self.logs.entry(session).or_default().push(change);
    }

    /// Applies a session's log, as far as the session may write what it changes.
    fn apply(&mut self, session: SessionId) {
        for change in self.logs.remove(&session).unwrap_or_default() {
            let touched = match change {
                Change::Make { parent, .. } => vec![parent],
                Change::Move { inode, to } | Change::Link { inode, to } => vec![inode, to],
                Change::Remove { inode, .. } => vec![inode],
            };
            if touched.iter().all(|inode| self.manager.may_write(session, *inode, &self.tree)) {
                self.apply_one(session, change);
                *self.positions.entry(session).or_default() += 1;
            }
        }
        let ahead: Vec<_> = self.manager.take_attached().filter(|word| word.slot != SlotWord::UNRECORDED).collect();
        self.write(ahead);
    }

    fn apply_one(&mut self, session: SessionId, change: Change) {
        let is_top = |inode| inode == InodeId::ROOT || inode == InodeId::RENAME;
        match change {
            Change::Make { parent, is_directory } => {
                if self.tree.is_directory(parent) && self.tree.leads_to_root(parent, InodeId(0)) {
                    let inode = InodeId(self.next_inode);
                    self.make(parent, is_directory);
                    self.manager.handle_made(session, inode, parent, is_directory, &self.tree);
                }
            }
            Change::Move { inode, to } | Change::Link { inode, to } => {
                let Some(found) = self.tree.0.get(&inode).filter(|_| !is_top(inode)) else { return };
                let links = matches!(change, Change::Link { .. });
                let fits = self.tree.is_directory(to) && self.tree.leads_to_root(to, inode);
                if !fits || links && found.is_directory || found.parents.is_empty() && found.is_directory {
                    return;
                }
                let from = self.tree.home(inode).directory;
                let is_directory = found.is_directory;
                if let Some(found) = self.tree.0.get_mut(&inode) {
                    if !links {
                        found.parents.pop_first();
                    }
                    found.parents.insert(to);
                }
                self.report_move(inode, from, is_directory);
            }
            Change::Remove { inode, keeps } => {
                let Some(found) = self.tree.0.get(&inode).filter(|_| !is_top(inode)) else { return };
                let is_directory = found.is_directory;
                if is_directory && !self.tree.is_empty(inode) {
                    return;
                }
                let from = self.tree.home(inode).directory;
                let is_last = found.parents.len() <= 1;
                if is_last && !keeps {
                    self.tree.0.remove(&inode);
                    self.manager.handle_gone(inode);
                } else if let Some(found) = self.tree.0.get_mut(&inode) {
                    found.parents.pop_first();
                    self.report_move(inode, from, is_directory);
                }
            }
        }
    }

    fn report_move(&mut self, inode: InodeId, from: Option<InodeId>, is_directory: bool) {
        let to = self.tree.home(inode).directory;
        if from != to {
            self.manager.handle_moved(inode, from, to, is_directory, &self.tree);
        }
    }
}
