//! A model shell and sessions in one thread.
//!
//! Every operation's result is compared with a tree on which all operations run at once.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{InodeId, LeaseMode, LeaseScope, LogPosition, SessionId, WantedLease};

use crate::{Ancestry, Command, InodeHome, LeaseManager, Limits, Reach, RequestedLease, RevokeReason, SlotWord};

/// A bug in the shell, for the canaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    None,
    MoveNotReported,
    MakeNotReported,
    LogNotApplied,
    SplitNotWritten,
    KernelNotInvalidated,
    DependenciesLost,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inode {
    pub is_directory: bool,
    pub value: u64,
    pub parents: BTreeSet<InodeId>,
    pub children: BTreeSet<InodeId>,
    writer: (SessionId, LogPosition),
}

#[derive(Clone, Debug, Default)]
pub struct Tree(pub BTreeMap<InodeId, Inode>);

impl Ancestry for Tree {
    fn home(&self, inode: InodeId) -> InodeHome {
        if inode == InodeId::RENAME {
            return InodeHome { directory: Some(InodeId::ROOT), is_directory: true };
        }
        let is_directory = self.0.get(&inode).is_some_and(|inode| inode.is_directory);
        InodeHome { directory: self.governing_parent(inode), is_directory }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Op {
    Write { inode: InodeId, value: u64 },
    Make { inode: InodeId, parent: InodeId, is_directory: bool },
    Rename { inode: InodeId, from: InodeId, to: InodeId },
    Link { inode: InodeId, to: InodeId },
    Unlink { inode: InodeId, from: InodeId, keep: bool },
}

impl Op {
    /// Returns the inodes whose state the operation changes.
    fn touches(self) -> Vec<InodeId> {
        match self {
            Self::Write { inode, .. } => vec![inode],
            Self::Make { inode, parent, .. } => vec![parent, inode],
            Self::Rename { inode, from, to } => vec![from, to, inode],
            Self::Link { inode, to } => vec![to, inode],
            Self::Unlink { inode, from, .. } => vec![from, inode],
        }
    }
}

impl Tree {
    fn apply(&mut self, op: Op, by: (SessionId, LogPosition)) {
        match op {
            Op::Write { inode, value } => self.at(inode).value = value,
            Op::Make { inode, parent, is_directory } => {
                let made = Inode { is_directory, parents: [parent].into(), ..Inode::default() };
                self.0.insert(inode, made);
                self.at(parent).children.insert(inode);
            }
            Op::Rename { inode, from, to } => {
                self.at(from).children.remove(&inode);
                self.at(to).children.insert(inode);
                self.at(inode).parents.remove(&from);
                self.at(inode).parents.insert(to);
            }
            Op::Link { inode, to } => {
                self.at(to).children.insert(inode);
                self.at(inode).parents.insert(to);
            }
            Op::Unlink { inode, from, keep } => {
                self.at(from).children.remove(&inode);
                self.at(inode).parents.remove(&from);
                if self.at(inode).parents.is_empty() && !keep {
                    self.0.remove(&inode);
                }
            }
        }
        for inode in op.touches() {
            if let Some(inode) = self.0.get_mut(&inode) {
                inode.writer = by;
            }
        }
    }

    fn at(&mut self, inode: InodeId) -> &mut Inode {
        self.0.get_mut(&inode).expect("the operation was possible")
    }

    fn governing_parent(&self, inode: InodeId) -> Option<InodeId> {
        let parents = self.0.get(&inode).map(|inode| &inode.parents)?;
        if parents.len() == 1 { parents.first().copied() } else { None }
    }

    fn is_below(&self, inode: InodeId, top: InodeId) -> bool {
        let mut next = Some(inode);
        while let Some(inode) = next {
            if inode == top {
                return true;
            }
            next = self.0.get(&inode).and_then(|inode| inode.parents.first().copied());
        }
        false
    }
}

#[derive(Clone, Debug)]
struct Cached {
    slot: u32,
    generation: u64,
    state: Inode,
}

type Clock = BTreeMap<SessionId, LogPosition>;

#[derive(Debug, Default)]
struct Session {
    cached: BTreeMap<InodeId, Cached>,
    /// Threads in the middle of a read: they check the word again at the end.
    readers: BTreeMap<InodeId, Cached>,
    kernel: BTreeMap<InodeId, Inode>,
    log: Vec<(Op, LogPosition)>,
    position: LogPosition,
    applied: LogPosition,
    pending: Clock,
}

pub struct World {
    pub manager: LeaseManager,
    pub applied: Tree,
    truth: Tree,
    words: BTreeMap<(SessionId, u32), SlotWord>,
    sessions: BTreeMap<SessionId, Session>,
    /// The dependencies of each session's log, by its position.
    clocks: BTreeMap<SessionId, Vec<(LogPosition, Clock)>>,
    persistent: Clock,
    /// The updates that the commit under way includes.
    commit: Option<Clock>,
    next_inode: u64,
    next_session: u64,
    pub now_us: u64,
    limits: Limits,
    plant: Plant,
    pub seals: BTreeMap<SessionId, u64>,
    /// The slots with which a session's table begins, if not all.
    pub first_slots: Option<u32>,
    rooms: BTreeMap<SessionId, u32>,
    /// Everything that the manager ever reported.
    pub met: BTreeSet<String>,
    /// Words that were written ahead of their turn.
    ahead: BTreeMap<(SessionId, u32), SlotWord>,
    /// Operations that a session runs, one after the other, if its leases hold.
    ///
    /// They run after its log was sealed and applied, when no word was written since.
    pub after_seal: Vec<(SessionId, Op)>,
    /// The reservations: session and inode.
    reserved: BTreeSet<(SessionId, InodeId)>,
}

pub type Check<T = ()> = Result<T, String>;

impl World {
    pub fn new(limits: Limits, plant: Plant) -> Self {
        let root = Inode { is_directory: true, ..Inode::default() };
        let rename = Inode::default();
        let tree = Tree([(InodeId::ROOT, root), (InodeId::RENAME, rename)].into());
        Self {
            manager: LeaseManager::new(limits),
            applied: tree.clone(),
            truth: tree,
            words: BTreeMap::new(),
            sessions: BTreeMap::new(),
            clocks: BTreeMap::new(),
            persistent: Clock::new(),
            commit: None,
            next_inode: 16,
            next_session: 1,
            now_us: 0,
            limits,
            plant,
            seals: BTreeMap::new(),
            first_slots: None,
            rooms: BTreeMap::new(),
            met: BTreeSet::new(),
            ahead: BTreeMap::new(),
            after_seal: Vec::new(),
            reserved: BTreeSet::new(),
        }
    }

    pub fn begin(&mut self) -> SessionId {
        let session = SessionId(self.next_session);
        self.next_session += 1;
        self.sessions.insert(session, Session::default());
        if let Some(slots) = self.first_slots {
            self.rooms.insert(session, slots);
            self.manager.set_table_slots(session, slots);
        }
        session
    }

    pub fn sessions(&self) -> Vec<SessionId> {
        self.sessions.keys().copied().collect()
    }

    /// Returns the inodes that exist for SharedFS and for all sessions.
    pub fn inodes(&self, is_directory: Option<bool>) -> Vec<InodeId> {
        let is_it = |(inode, state): &(&InodeId, &Inode)| {
            **inode != InodeId::RENAME
                && self.truth.0.contains_key(inode)
                && is_directory.is_none_or(|is_directory| is_directory == state.is_directory)
        };
        self.applied.0.iter().filter(is_it).map(|(inode, _)| *inode).collect()
    }

    pub fn state(&self, inode: InodeId) -> &Inode {
        &self.truth.0[&inode]
    }

    pub fn is_valid(&self, session: SessionId, inode: InodeId, mode: LeaseMode) -> bool {
        self.sessions[&session].cached.get(&inode).is_some_and(|cached| self.stands(session, cached, mode))
    }

    fn stands(&self, session: SessionId, cached: &Cached, mode: LeaseMode) -> bool {
        let word = &self.words[&(session, cached.slot)];
        word.generation == cached.generation && word.mode.is_some_and(|held| held >= mode)
    }

    /// Asks for a write lease, but continues on the lease by which the session knows the inode already.
    ///
    /// A session does so when it looks up a name to write, and receives state again that it knows.
    pub fn look_up_to_write(&mut self, session: SessionId, inode: InodeId) -> Check {
        let known = self.sessions[&session].cached.get(&inode).cloned();
        self.acquire(
            session,
            &[RequestedLease {
                lease: WantedLease { inode, mode: LeaseMode::Write, scope: LeaseScope::Node },
                may_widen: true,
            }],
        )?;
        if let Some(known) = known {
            let latest = self.session(session).cached.insert(inode, known);
            if let Some(latest) = latest.filter(|_| !self.is_valid(session, inode, LeaseMode::Read)) {
                self.session(session).cached.insert(inode, latest);
            }
        }
        self.check_cached(session, inode)
    }

    pub fn word(&self, session: SessionId, inode: InodeId) -> SlotWord {
        self.words[&(session, self.sessions[&session].cached[&inode].slot)]
    }

    /// Whether a session may not have one of these leases, since it would cover reserved inodes.
    pub fn refuses(&self, session: SessionId, wants: &[RequestedLease]) -> bool {
        wants.iter().any(|want| self.manager.refuses(session, &want.lease, &self.applied))
    }

    /// Reserves an inode for an admitted session, and takes it from all others.
    pub fn reserve(&mut self, session: SessionId, inode: InodeId, reach: Reach) -> Check {
        self.manager.admit_to_reserved(session);
        self.reserved.insert((session, inode));
        self.manager.reserve(inode, reach, &self.applied);
        let scope = if reach == Reach::Directory { LeaseScope::Subtree } else { LeaseScope::Node };
        self.acquire(
            session,
            &[RequestedLease { lease: WantedLease { inode, mode: LeaseMode::Write, scope }, may_widen: true }],
        )
    }

    /// Ends a session's reservations of an inode, or of all inodes.
    pub fn free_reserved(&mut self, session: SessionId, inode: Option<InodeId>) {
        let ended =
            self.reserved.iter().filter(|(owner, of)| *owner == session && inode.is_none_or(|inode| inode == *of));
        for one in ended.copied().collect::<Vec<_>>() {
            self.reserved.remove(&one);
            if !self.reserved.iter().any(|(_, of)| *of == one.1) {
                self.manager.free_reserved(one.1);
            }
        }
    }

    /// Fails if a session knows an inode by a valid lease, though it may not ask for one.
    pub fn check_reserved(&self) -> Check {
        for (session, state) in &self.sessions {
            let known = state.cached.iter().filter(|(_, cached)| self.stands(*session, cached, LeaseMode::Read));
            for (inode, _) in known {
                if self.manager.is_reserved_from(*session, *inode, &self.applied) {
                    return Err(format!("{session} knows {inode}, which is reserved for others"));
                }
            }
        }
        Ok(())
    }

    /// Reads an inode, and asks for a lease only if the session has no valid state.
    pub fn read(&mut self, session: SessionId, inode: InodeId) -> Check<u64> {
        self.read_in(session, inode, LeaseScope::Node)
    }

    /// Reads an inode by a lease of this scope.
    pub fn read_in(&mut self, session: SessionId, inode: InodeId, scope: LeaseScope) -> Check<u64> {
        self.read_by(
            session,
            RequestedLease { lease: WantedLease { inode, mode: LeaseMode::Read, scope }, may_widen: true },
        )
    }

    /// Reads an inode by this lease.
    pub fn read_by(&mut self, session: SessionId, want: RequestedLease) -> Check<u64> {
        let inode = want.lease.inode;
        if !self.is_valid(session, inode, LeaseMode::Read) {
            self.acquire(session, &[want])?;
        }
        self.check_cached(session, inode)?;
        let cached = self.sessions[&session].cached[&inode].clone();
        let value = cached.state.value;
        // A lease may go before the kernel has the answer. So a mount checks it once more then, and has the kernel
        // forget the answer.
        let is_kept = self.is_valid(session, inode, LeaseMode::Read);
        let session = self.session(session);
        if is_kept {
            session.kernel.insert(inode, cached.state.clone());
        }
        session.readers.insert(inode, cached);
        Ok(value)
    }

    /// Joins the readers of an inode if that disturbs no session, and returns whether it did.
    pub fn join_readers(&mut self, session: SessionId, inode: InodeId) -> Check<bool> {
        let joined = self.manager.join_readers(self.now_us, session, inode, &self.applied);
        let Some(grant) = joined else { return self.perform(None).map(|_| false) };
        let dependencies = self.manager.dependencies(session, inode, &self.applied);
        let command =
            Command::Grant { session, request: crate::RequestId(0), grants: vec![grant], dependencies: Vec::new() };
        self.write(grant.word, &command)?;
        if self.plant != Plant::DependenciesLost {
            merge_clock(&mut self.session(session).pending, &dependencies.into_iter().collect());
        }
        if grant.word.mode != Some(LeaseMode::Read) || grant.word.scope == LeaseScope::Subtree {
            return Err(format!("a passive reader was granted {:?}", grant.word));
        }
        self.take_grant(session, inode, grant.word)?;
        self.perform(None)?;
        self.check_cached(session, inode)?;
        Ok(true)
    }

    /// Reads an inode from the kernel's cache.
    pub fn read_kernel(&mut self, session: SessionId, inode: InodeId) -> Check {
        match self.sessions[&session].kernel.get(&inode) {
            Some(state) if self.truth.0.get(&inode).is_some_and(|truth| truth != state) => {
                Err(format!("the kernel of {session} shows an old state of {inode}"))
            }
            _ => Ok(()),
        }
    }

    /// Runs an operation, with the leases that it needs. If one of them is refused, the kernel runs it.
    pub fn run(&mut self, session: SessionId, op: Op) -> Check {
        let wants = self.wants(op);
        if self.refuses(session, &wants) {
            return Ok(());
        }
        let is_held = |want: &RequestedLease| {
            let word =
                self.sessions[&session].cached.get(&want.lease.inode).map(|cached| self.words[&(session, cached.slot)]);
            self.is_valid(session, want.lease.inode, want.lease.mode)
                && (want.lease.scope == LeaseScope::Node || word.is_some_and(|word| word.scope == LeaseScope::Subtree))
        };
        // A held subtree lease may have holes: only SharedFS knows.
        let needs_subtree = wants.iter().any(|want| want.lease.scope == LeaseScope::Subtree);
        if needs_subtree || !wants.iter().all(is_held) {
            self.acquire(session, &wants)?;
        }
        // A lease may have been taken again for another session that fills a directory, which nothing delays. A session
        // that finds that asks once more.
        let is_valid =
            |world: &Self| wants.iter().all(|want| world.is_valid(session, want.lease.inode, want.lease.mode));
        if !is_valid(self) {
            self.acquire(session, &wants)?;
        }
        // A log that was applied for the request has moved an inode to where it is reserved.
        if self.refuses(session, &wants) {
            return Ok(());
        }
        if !is_valid(self) {
            return Err(format!("{session} doesn't get to use {wants:?}"));
        }
        wants.iter().try_for_each(|want| self.check_cached(session, want.lease.inode))?;
        self.append(session, op);
        Ok(())
    }

    pub fn wants(&self, op: Op) -> Vec<RequestedLease> {
        let node = |inode| RequestedLease {
            lease: WantedLease { inode, mode: LeaseMode::Write, scope: LeaseScope::Node },
            may_widen: true,
        };
        match op {
            Op::Write { inode, .. } => vec![node(inode)],
            Op::Make { parent, .. } => vec![node(parent)],
            Op::Rename { inode, from, to } if self.truth.0[&inode].is_directory => {
                let mut moved = node(inode);
                moved.lease.scope = LeaseScope::Subtree;
                vec![node(from), node(to), moved, node(InodeId::RENAME)]
            }
            Op::Rename { inode, from, to } => vec![node(from), node(to), node(inode)],
            Op::Link { inode, to } => vec![node(inode), node(to)],
            Op::Unlink { inode, from, .. } => vec![node(inode), node(from)],
        }
    }

    fn append(&mut self, session: SessionId, op: Op) {
        let pending = std::mem::take(&mut self.session(session).pending);
        let clock = self.known(session, &pending);
        let position = self.sessions[&session].position.plus(1);
        self.clocks.entry(session).or_default().push((position, clock));
        self.session(session).position = position;
        self.truth.apply(op, (session, position));
        self.session(session).log.push((op, position));
        for inode in op.touches() {
            let Some(state) = self.truth.0.get(&inode).cloned() else { continue };
            let known_on = match op {
                Op::Make { parent, .. } => self.sessions[&session].cached[&parent].clone(),
                _ => self.sessions[&session].cached[&inode].clone(),
            };
            let session = self.session(session);
            // Threads of one session see each other's changes.
            session.readers.remove(&inode);
            session.kernel.insert(inode, state.clone());
            session.cached.insert(inode, Cached { state, ..known_on });
        }
    }

    pub fn make(&mut self, session: SessionId, parent: InodeId, is_directory: bool) -> Check<InodeId> {
        let inode = InodeId(self.next_inode);
        self.next_inode += 1;
        self.run(session, Op::Make { inode, parent, is_directory })?;
        Ok(inode)
    }

    /// Whether a move makes sense.
    pub fn can_move(&self, inode: InodeId, to: InodeId) -> bool {
        !self.truth.is_below(to, inode)
    }

    fn session(&mut self, session: SessionId) -> &mut Session {
        self.sessions.get_mut(&session).expect("the session runs")
    }

    fn check_cached(&self, session: SessionId, inode: InodeId) -> Check {
        self.check_state(session, inode, &self.sessions[&session].cached[&inode].state)
    }

    fn check_state(&self, session: SessionId, inode: InodeId, cached: &Inode) -> Check {
        match self.truth.0.get(&inode) {
            Some(truth) if truth != cached => {
                Err(format!("{session} takes {cached:?} of {inode} for valid, but it is {truth:?}"))
            }
            _ => Ok(()),
        }
    }

    pub fn acquire(&mut self, session: SessionId, wants: &[RequestedLease]) -> Check {
        let request = self
            .manager
            .handle_request(self.now_us, session, wants, &self.applied)
            .map_err(|error| format!("refused: {error}"))?;
        if !self.perform(Some(request))? {
            return Err(format!("request {request:?} was not answered"));
        }
        Ok(())
    }

    /// Performs commands until none is left; returns whether this request was granted.
    pub fn perform(&mut self, request: Option<crate::RequestId>) -> Check<bool> {
        let mut is_granted = false;
        for _ in 0..10_000 {
            let Some(command) = self.manager.poll_command(self.now_us, &self.applied, &|_| true) else {
                if self.plant == Plant::None {
                    self.manager.check(&self.applied)?;
                    self.check_words()?;
                }
                return Ok(is_granted);
            };
            self.met.insert(label(&command));
            for word in command.words() {
                self.write(word, &command)?;
            }
            if self.plant == Plant::None {
                self.check_ahead()?;
            }
            self.invalidate(&command);
            match command {
                Command::SealAndApply { session } => self.seal_and_apply(session)?,
                Command::Grant { session, request: granted, grants, dependencies } => {
                    is_granted |= request == Some(granted);
                    if self.plant != Plant::DependenciesLost {
                        let pending = &mut self.session(session).pending;
                        merge_clock(pending, &dependencies.into_iter().collect());
                    }
                    for grant in grants {
                        if self.words.get(&(session, grant.word.slot)) != Some(&grant.word) {
                            return Err(format!("{session} was granted {grant:?}, but its word doesn't say so"));
                        }
                        self.take_grant(session, grant.inode, grant.word)?;
                        self.take_files(session, grant.inode, grant.word)?;
                    }
                }
                Command::Wait { until_us } => {
                    self.now_us = self.now_us.max(until_us);
                    // Others ask meanwhile, and their tables are enlarged.
                    let asks = |session: &SessionId| (session.0 + self.now_us) % 3 == 0;
                    let asking: Vec<_> = self.rooms.keys().copied().filter(asks).collect();
                    asking.into_iter().for_each(|session| self.make_room(session));
                }
                _ => {}
            }
        }
        Err("the manager never comes to an end".to_owned())
    }

    /// Checks that the tables agree with the manager.
    fn check_words(&self) -> Check {
        for session in self.sessions.keys().filter(|session| self.manager.leases.holders.contains_key(session)) {
            let holder = &self.manager.leases.holders[session];
            for slot in 0..holder.slots.len() as u32 {
                let meant = self.manager.leases.word(*session, slot);
                let written = self.words.get(&(*session, slot)).copied();
                let is_same = match (meant.mode, written.and_then(|word| word.mode)) {
                    (None, None) => true,
                    // A lease is written with its grant, or when it is attached.
                    (Some(_), _) => written == Some(meant),
                    _ => false,
                };
                if !is_same {
                    return Err(format!("{written:?} is written where {meant:?} is meant"));
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, word: SlotWord, command: &Command) -> Check {
        if self.plant == Plant::SplitNotWritten && matches!(command, Command::Split { .. }) {
            return Ok(());
        }
        let room = self.rooms.get(&word.session).copied().unwrap_or(self.limits.table_slots);
        if word.slot >= room {
            return Err(format!("slot {} is beyond the table", word.slot));
        }
        if self.manager.is_superseded(&word) {
            self.met.insert("superseded".to_owned());
            return Ok(());
        }
        // A table is enlarged in time, but not always: there may be no room for it.
        if word.slot >= room / 2 && word.generation % 3 == 0 {
            self.make_room(word.session);
        }
        let before = self.words.insert((word.session, word.slot), word);
        match before {
            Some(before) if before.generation > word.generation && self.plant == Plant::None => {
                Err(format!("{before:?} went back to {word:?}"))
            }
            _ => Ok(()),
        }
    }

    fn make_room(&mut self, session: SessionId) {
        let most = self.limits.table_slots;
        if let Some(room) = self.rooms.get_mut(&session).filter(|room| **room < most) {
            *room = (*room * 2).min(most);
            self.manager.set_table_slots(session, *room);
        }
    }

    fn take_grant(&mut self, session: SessionId, inode: InodeId, word: SlotWord) -> Check {
        let Some(state) = self.applied.0.get(&inode).cloned() else { return Ok(()) };
        if self.truth.0.get(&inode).is_some_and(|truth| *truth != state) && !self.has_logged(session, inode) {
            return Err(format!("{session} was granted an old state of {inode}"));
        }
        let (writer, position) = state.writer;
        let known = self.known(session, &self.sessions[&session].pending);
        let is_known = |clock: &Clock| clock.get(&writer).is_some_and(|known| *known >= position);
        if writer != session && position.0 > 0 && !is_known(&known) && !is_known(&self.persistent) {
            return Err(format!("{session} doesn't know that {inode} depends on {writer} up to {position}"));
        }
        // Unapplied state in the session's own log counts, too.
        let state = if self.has_logged(session, inode) { self.truth.0.get(&inode).cloned() } else { Some(state) };
        if let Some(state) = state {
            let cached = Cached { slot: word.slot, generation: word.generation, state };
            self.session(session).cached.insert(inode, cached);
        }
        Ok(())
    }

    /// Takes the directory's other files from the grant, as far as the lease covers them.
    fn take_files(&mut self, session: SessionId, granted: InodeId, word: SlotWord) -> Check {
        let directory = self.applied.home(granted).as_file().filter(|_| word.scope != LeaseScope::Node);
        let Some(directory) = directory else { return Ok(()) };
        let files: Vec<_> = self.applied.0[&directory].children.iter().copied().collect();
        for inode in files {
            let is_covered = self.manager.is_among_files(directory, inode, self.applied.home(inode));
            if is_covered && !self.is_valid(session, inode, LeaseMode::Read) {
                let shown = self.manager.own_dependencies(session, inode);
                if self.plant != Plant::DependenciesLost {
                    merge_clock(&mut self.session(session).pending, &shown.into_iter().collect());
                }
                self.take_grant(session, inode, word)?;
            }
        }
        Ok(())
    }

    fn has_logged(&self, session: SessionId, inode: InodeId) -> bool {
        self.sessions[&session].log.iter().any(|(op, _)| op.touches().contains(&inode))
    }

    fn known(&self, session: SessionId, pending: &Clock) -> Clock {
        let mut known = self.clock_at(session, LogPosition(u64::MAX));
        for (other, position) in pending {
            merge_clock(&mut known, &[(*other, *position)].into());
            merge_clock(&mut known, &self.clock_at(*other, *position));
        }
        known
    }

    fn clock_at(&self, session: SessionId, position: LogPosition) -> Clock {
        let clocks = self.clocks.get(&session).map(Vec::as_slice).unwrap_or_default();
        clocks.iter().rev().find(|(at, _)| *at <= position).map(|(_, clock)| clock.clone()).unwrap_or_default()
    }

    fn invalidate(&mut self, command: &Command) {
        let (session, inode, scope) = match command {
            Command::Revoke { reason: RevokeReason::Folded, .. } => return,
            Command::Revoke { word, .. } => (word.session, word.inode, word.scope),
            Command::Split { word, hole: Some(hole) } if !hole.keeps_read => (word.session, hole.inode, hole.scope),
            _ => return,
        };
        let Some(session) = self.sessions.get_mut(&session).filter(|_| self.plant != Plant::KernelNotInvalidated)
        else {
            return;
        };
        match scope {
            LeaseScope::Node => {
                session.kernel.remove(&inode);
            }
            LeaseScope::Files | LeaseScope::Subtree => session.kernel.clear(),
        }
    }

    fn seal_and_apply(&mut self, session: SessionId) -> Check {
        *self.seals.entry(session).or_insert(0) += 1;
        if self.plant != Plant::LogNotApplied {
            self.apply(session, usize::MAX)?;
        }
        let position = self.sessions[&session].applied;
        self.manager.handle_applied(session, position);
        for (by, op) in std::mem::take(&mut self.after_seal) {
            if by == session && self.wants(op).iter().all(|want| self.is_valid(by, want.lease.inode, want.lease.mode)) {
                self.met.insert("after a seal".to_owned());
                self.append(by, op);
            }
        }
        Ok(())
    }

    /// Applies some of a session's log, as SharedFS does now and then.
    pub fn digest(&mut self, session: SessionId, count: usize) -> Check {
        self.apply(session, count)?;
        self.perform(None).map(|_| ())
    }

    fn apply(&mut self, session: SessionId, count: usize) -> Check {
        let log = &mut self.session(session).log;
        let count = count.min(log.len());
        let due: Vec<_> = log.drain(..count).collect();
        for (op, position) in due {
            for inode in op.touches() {
                let is_made = matches!(op, Op::Make { inode: made, .. } if made == inode);
                let may_write = is_made || self.manager.may_write(session, inode, &self.applied);
                if !may_write && self.plant == Plant::None {
                    return Err(format!("{op:?} of {session} was not written under a lease on {inode}"));
                }
            }
            self.apply_one(session, op, position);
            self.session(session).applied = position;
        }
        let ahead: Vec<_> = self.manager.take_attached().filter(|word| word.slot != SlotWord::UNRECORDED).collect();
        self.ahead.extend(ahead.iter().map(|word| ((word.session, word.slot), *word)));
        ahead.into_iter().try_for_each(|word| self.write(word, &Command::Attach { word }))
    }

    /// Checks that words written ahead stand until a session takes them: a restart relies on it.
    fn check_ahead(&self) -> Check {
        for ((session, slot), ahead) in &self.ahead {
            let meant = self.manager.leases.holders.get(session).and_then(|holder| holder.slots.get(*slot as usize));
            let is_meant = meant.is_some_and(|meant| {
                let is_same =
                    meant.target.is_some_and(|target| (target.inode, target.scope) == (ahead.inode, ahead.scope));
                is_same && meant.generation == ahead.generation && Some(meant.mode) == ahead.mode
            });
            let written = self.words.get(&(*session, *slot));
            let is_there = |word: &SlotWord| {
                (word.inode, word.generation) == (ahead.inode, ahead.generation) && word.mode.is_some()
            };
            if is_meant && !written.is_some_and(is_there) {
                return Err(format!("{ahead:?} was written ahead, and there is {written:?}"));
            }
        }
        Ok(())
    }

    fn apply_one(&mut self, session: SessionId, op: Op, position: LogPosition) {
        let moved = match op {
            Op::Rename { inode, .. } | Op::Link { inode, .. } | Op::Unlink { inode, .. } => Some(inode),
            _ => None,
        };
        let from = moved.and_then(|inode| self.applied.governing_parent(inode));
        let is_directory = moved.is_some_and(|inode| self.applied.0[&inode].is_directory);
        self.applied.apply(op, (session, position));
        match op {
            Op::Make { inode, parent, is_directory } if self.plant != Plant::MakeNotReported => {
                self.manager.handle_made(session, inode, parent, is_directory, &self.applied);
            }
            Op::Unlink { inode, .. } if !self.applied.0.contains_key(&inode) => self.manager.handle_gone(inode),
            _ => {}
        }
        let Some(inode) = moved.filter(|inode| self.applied.0.contains_key(inode)) else { return };
        let to = self.applied.governing_parent(inode);
        if from != to && self.plant != Plant::MoveNotReported {
            self.manager.handle_moved(inode, from, to, is_directory, &self.applied);
        }
    }

    pub fn end(&mut self, session: SessionId) -> Check {
        self.manager.handle_session_end(session);
        self.perform(None)?;
        if self.plant == Plant::None && !self.sessions[&session].log.is_empty() {
            return Err(format!("{session} ended, but its log was not applied"));
        }
        self.free_reserved(session, None);
        self.sessions.remove(&session);
        self.words.retain(|(holder, _), _| *holder != session);
        Ok(())
    }

    pub fn release(&mut self, session: SessionId, inode: InodeId) -> Check {
        self.manager.handle_release(session, inode);
        self.perform(None).map(|_| ())
    }

    /// Kills and restarts SharedFS; sessions, words and logs stay.
    pub fn restart(&mut self) -> Check {
        self.commit = None;
        let words: Vec<_> = self.words.values().copied().collect();
        let mut applied: Vec<_> = self.sessions.iter().map(|(id, session)| (*id, session.applied)).collect();
        // The logs of ended sessions are digested before any session is served.
        let ended: Vec<_> = self.ended().collect();
        for session in ended {
            self.persistent.insert(session, LogPosition(u64::MAX));
        }
        applied.sort_unstable();
        self.manager = LeaseManager::restore(self.limits, &words, &applied, &self.applied);
        for (session, slots) in self.rooms.iter().filter(|(session, _)| self.sessions.contains_key(session)) {
            self.manager.set_table_slots(*session, *slots);
        }
        self.reserved.clear();
        self.perform(None).map(|_| ())
    }

    /// Begins a commit, or completes the one under way.
    ///
    /// It includes all updates that were applied when it began, of every session. No update becomes persistent without
    /// the updates on which it depends.
    pub fn commit(&mut self) {
        let Some(commit) = self.commit.take() else {
            let ended = self.ended().map(|id| (id, LogPosition(u64::MAX)));
            self.commit = Some(self.sessions.iter().map(|(id, session)| (*id, session.applied)).chain(ended).collect());
            return;
        };
        for (session, position) in commit {
            self.persistent.insert(session, position);
            if self.sessions.contains_key(&session) {
                self.manager.handle_persistent(session, position);
            }
        }
    }

    /// Returns sessions that have ended: all of their logs are applied.
    fn ended(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.clocks.keys().copied().filter(|id| !self.sessions.contains_key(id))
    }

    /// Commits all applied updates.
    pub fn commit_all(&mut self) {
        self.commit = None;
        self.commit();
        self.commit();
    }

    /// Checks that every state that any session considers valid is the true one.
    pub fn check(&self) -> Check {
        for (session, state) in &self.sessions {
            for inode in state.cached.keys().filter(|inode| self.is_valid(*session, **inode, LeaseMode::Read)) {
                self.check_cached(*session, *inode)?;
            }
            for (inode, cached) in
                state.readers.iter().filter(|(_, cached)| self.stands(*session, cached, LeaseMode::Read))
            {
                self.check_state(*session, *inode, &cached.state)?;
            }
        }
        Ok(())
    }
}

fn label(command: &Command) -> String {
    match command {
        Command::Revoke { word, reason } if word.scope == LeaseScope::Files => format!("revoke files {reason:?}"),
        Command::Revoke { reason, .. } => format!("revoke {reason:?}"),
        Command::Split { hole, .. } => format!("split {:?}", hole.map(|hole| (hole.scope, hole.keeps_read))),
        Command::Attach { word } if word.slot == SlotWord::UNRECORDED => "attach beyond the table".to_owned(),
        Command::Attach { word } => format!("attach {:?}", word.mode),
        Command::Downgrade { .. } => "downgrade".to_owned(),
        Command::Wait { .. } => "wait".to_owned(),
        Command::SealAndApply { .. } | Command::Grant { .. } => "serve".to_owned(),
    }
}

fn merge_clock(clock: &mut Clock, other: &Clock) {
    for (session, position) in other {
        let known = clock.entry(*session).or_insert(*position);
        *known = (*known).max(*position);
    }
}
