//! The lease manager: events in, commands out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ashlar_types::{InodeId, LeaseMode, LeaseScope, LogPosition, SessionId};

use crate::dependencies::Dependencies;
use crate::evaluate::{Demand, Work};
use crate::held_leases::HeldLeases;
use crate::reserved::ReservedInodes;
use crate::{
    Ancestry, Command, Grant, InodeHome, LeaseTarget, Limits, RequestError, RequestId, RequestedLease, RevokeReason,
    SlotWord, Stats,
};

/// The most directories remembered as contended.
///
/// The number suffices for every session to collide in several directories. Forgetting one costs only time.
const CONTENDED_MAX: usize = 1024;

/// Decides on the leases of one machine's sessions.
///
/// The shell calls [`LeaseManager::poll_command`] after every event until it returns `None`, and performs each command
/// before it asks for the next one. It reports every change that it applies to the tree with
/// [`LeaseManager::handle_made`], [`LeaseManager::handle_moved`] and [`LeaseManager::handle_gone`], each right after
/// the update and before the next.
#[derive(Debug)]
pub struct LeaseManager {
    pub(crate) limits: Limits,
    pub(crate) leases: HeldLeases,
    pub(crate) reserved: ReservedInodes,
    pub(crate) dependencies: Dependencies,
    pub(crate) queue: VecDeque<Work>,
    pub(crate) commands: VecDeque<Command>,
    /// How many of the commands [`Self::take_attached`] has already searched.
    attach_scanned: usize,
    /// Sessions whose logs must be applied before the first piece of work is evaluated again.
    pub(crate) awaiting: BTreeSet<SessionId>,
    /// The changes that the first piece of work has already announced to the sessions.
    pub(crate) announced: BTreeSet<Demand>,
    pub(crate) wait_until_us: Option<u64>,
    /// Sessions that have not used a lease yet that is to be taken from them: the manager waits until they have.
    pub(crate) waited_for: BTreeSet<SessionId>,
    /// Directories whose subtree leases collided too often, with the time until which leases there stay narrow.
    contended: BTreeMap<InodeId, u64>,
    next_request: u64,
    pub(crate) stats: Stats,
}

impl LeaseManager {
    /// Makes a manager without leases.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self::with_floor(limits, &[])
    }

    /// Makes a manager after SharedFS's restart.
    ///
    /// `words` are all slots of all lease tables, including free slots that were ever used. `applied` says how far
    /// grants may include each session's log. Before anything else, the manager makes the shell change all words and
    /// apply all logs.
    ///
    /// The ancestry is the tree before the logs are applied again. Records applied before the restart are not validated
    /// against leases: the leases under which they were written may have moved.
    #[must_use]
    pub fn restore(
        limits: Limits,
        words: &[SlotWord],
        applied: &[(SessionId, LogPosition)],
        ancestry: &impl Ancestry,
    ) -> Self {
        let mut manager = Self::with_floor(limits, applied);
        let mut words = words.to_vec();
        words.sort_by_key(|word| (word.session, word.slot));
        for word in &words {
            manager.leases.restore_slot(word);
        }
        let mut sessions = BTreeSet::new();
        for word in &words {
            sessions.insert(word.session);
            let Some(mode) = word.mode else { continue };
            let target = LeaseTarget { inode: word.inode, scope: word.scope };
            if manager.conflicts(target, mode, word.session) {
                let word = manager.leases.raise_generation(word.session, word.slot);
                manager.commands.push_back(Command::Revoke { word, reason: RevokeReason::Conflict });
                continue;
            }
            manager.leases.take(word.slot, target, word.session, mode, ancestry);
            let slot = manager.leases.slot_mut(word.session, word.slot);
            slot.live = true;
            // A node or subtree that the session can read may have been written before. A directory's files can't, on
            // that slot.
            if target.scope != LeaseScope::Files {
                manager.leases.set_dirty(word.session, word.slot);
            }
        }
        for (session, position) in applied {
            sessions.insert(*session);
            manager.leases.holder(*session).applied = *position;
        }
        manager.queue.extend(sessions.into_iter().map(|session| Work::Refresh { session }));
        manager
    }

    fn with_floor(limits: Limits, applied: &[(SessionId, LogPosition)]) -> Self {
        assert!(
            limits.entries_per_session_max < limits.table_slots as usize,
            "a full table leaves no room for a grant"
        );
        Self {
            limits,
            leases: HeldLeases::default(),
            reserved: ReservedInodes::default(),
            dependencies: Dependencies::new(limits.marks_max, applied),
            queue: VecDeque::new(),
            commands: VecDeque::new(),
            attach_scanned: 0,
            awaiting: BTreeSet::new(),
            announced: BTreeSet::new(),
            wait_until_us: None,
            waited_for: BTreeSet::new(),
            contended: BTreeMap::new(),
            next_request: 1,
            stats: Stats::default(),
        }
    }

    /// Whether a restored lease conflicts with those restored before.
    fn conflicts(&self, target: LeaseTarget, mode: LeaseMode, session: SessionId) -> bool {
        match target.scope {
            LeaseScope::Subtree => self.leases.subtrees.contains_key(&target.inode),
            LeaseScope::Files => mode == LeaseMode::Write || self.leases.slot_at(target, session).is_some(),
            LeaseScope::Node => self.leases.nodes.get(&target.inode).is_some_and(|holders| {
                holders.iter().any(|(holder, slot)| {
                    *holder == session
                        || mode == LeaseMode::Write
                        || self.leases.slot(*holder, *slot).mode == LeaseMode::Write
                })
            }),
        }
    }

    /// Sets the number of slots of a session's table that have room. Without this call, all have.
    ///
    /// Leases beyond the former number are written now, if they have come to lie in the table.
    pub fn set_table_slots(&mut self, session: SessionId, slots: u32) {
        let before = self.table_slots(session);
        let holder = self.leases.holder(session);
        holder.table_slots = Some(slots);
        let beyond = before..slots.min(holder.slots.len() as u32);
        let held: Vec<_> = beyond.filter(|slot| !holder.free.contains(slot)).collect();
        for slot in held {
            // A lease that is being taken is revoked already.
            let is_going = self.announced.iter().any(|demand| demand.removes(session, slot));
            let word = self.leases.word(session, slot);
            self.push(Command::Attach { word: if is_going { SlotWord { mode: None, ..word } } else { word } });
        }
    }

    /// Returns the number of slots in the session's table that have room.
    pub(crate) fn table_slots(&self, session: SessionId) -> u32 {
        let own = self.leases.holders.get(&session).and_then(|holder| holder.table_slots);
        own.map_or(self.limits.table_slots, |own| own.min(self.limits.table_slots))
    }

    /// Returns the most leases of a session: half of the slots of a small table.
    pub(crate) fn entries_max(&self, session: SessionId) -> usize {
        self.limits.entries_per_session_max.min(match self.table_slots(session) {
            all if all == self.limits.table_slots => usize::MAX,
            some => some as usize / 2,
        })
    }

    /// Queues a session's request for leases, all or none. They are granted by [`Command::Grant`].
    ///
    /// # Errors
    ///
    /// See [`RequestError`].
    pub fn handle_request(
        &mut self,
        now_us: u64,
        session: SessionId,
        wants: &[RequestedLease],
        ancestry: &impl Ancestry,
    ) -> Result<RequestId, RequestError> {
        if self.queue.len() >= self.limits.queue_max {
            return Err(RequestError::QueueFull(self.queue.len()));
        }
        if wants.len() > self.limits.wants_max.min(self.entries_max(session) / 2) {
            return Err(RequestError::TooManyWants(wants.len()));
        }
        if let Some(odd) = wants.iter().find(|want| is_odd(want, ancestry)) {
            return Err(RequestError::OddScope(odd.lease.inode));
        }
        let holder = self.leases.holder(session);
        if holder.ending {
            return Err(RequestError::Ended(session));
        }
        holder.active_us = now_us;
        let request = RequestId(self.next_request);
        self.next_request += 1;
        self.queue.push_back(Work::Acquire { session, request, wants: wants.to_vec() });
        Ok(request)
    }

    /// Returns the next command; `None` until the next event, or until the time of the last [`Command::Wait`].
    ///
    /// `is_using` says whether a session has not yet used all its grants. When it returns false, a command may be ready
    /// before that time.
    pub fn poll_command(
        &mut self,
        now_us: u64,
        ancestry: &impl Ancestry,
        is_using: &impl Fn(SessionId) -> bool,
    ) -> Option<Command> {
        loop {
            if let Some(command) = self.commands.pop_front() {
                self.attach_scanned = self.attach_scanned.saturating_sub(1);
                return Some(command);
            }
            let is_early = self.wait_until_us.is_some_and(|until_us| now_us < until_us);
            if !self.awaiting.is_empty() || is_early && self.waited_for.iter().any(|session| is_using(*session)) {
                return None;
            }
            if !self.advance_work(now_us, ancestry, is_using) {
                return None;
            }
        }
    }

    /// Returns the time to poll again even if nothing has happened.
    #[must_use]
    pub fn next_time_us(&self) -> Option<u64> {
        self.wait_until_us
    }

    /// Records that the session's log was sealed and applied, for [`Command::SealAndApply`].
    ///
    /// `position` is the log's end. The shell does not report an apply without a seal. It also reports a log that it
    /// could not apply to the end; the session ends then.
    pub fn handle_applied(&mut self, session: SessionId, position: LogPosition) {
        if !self.awaiting.remove(&session) {
            return;
        }
        self.stats.applications += 1;
        let holder = self.leases.holder(session);
        holder.applied = holder.applied.max(position);
        for number in std::mem::take(&mut holder.dirty) {
            let slot = &mut holder.slots[number as usize];
            let is_late = std::mem::take(&mut slot.late);
            if is_late || slot.live && slot.mode == LeaseMode::Write {
                holder.dirty.insert(number);
                continue;
            }
            slot.dirty = false;
            slot.written = position;
            if let (Some(target), LeaseMode::Read) = (slot.target, slot.mode) {
                self.dependencies.mark(target, session, position);
            }
            for shadowed in slot.shadowed.clone() {
                holder.slots[shadowed as usize].written = position;
            }
        }
    }

    /// Returns the lease that covers this access, and the dependencies of the inode's state.
    ///
    /// This is an answer outside the queue: `None` if the session holds no such lease. The shell writes the word, then
    /// answers.
    pub fn find_covering(
        &mut self,
        now_us: u64,
        session: SessionId,
        inode: InodeId,
        mode: LeaseMode,
        ancestry: &impl Ancestry,
    ) -> Option<(Grant, Vec<(SessionId, LogPosition)>)> {
        let is_ending = self.leases.holders.get(&session).is_none_or(|holder| holder.ending);
        if is_ending || !self.awaiting.is_empty() || !self.commands.is_empty() || !self.announced.is_empty() {
            return None;
        }
        if self.is_reserved_from(session, inode, ancestry) {
            return None;
        }
        let slot = self.leases.slot_governing(session, inode, ancestry)?;
        if self.leases.slot(session, slot).mode < mode || slot >= self.table_slots(session) {
            return None;
        }
        self.stats.grants += 1;
        self.leases.record_grant(session, slot, now_us);
        let grant = Grant { inode, word: self.leases.word(session, slot) };
        Some((grant, self.dependencies(session, inode, ancestry)))
    }

    /// Gives a session a passive read lease on an inode, if nothing must be taken from other sessions.
    ///
    /// The shell writes the word, then publishes the state and its dependencies ([`Self::dependencies`]). If the
    /// session may hold no more leases, its least recently granted read lease is removed, and the next call finds room.
    pub fn join_readers(
        &mut self,
        now_us: u64,
        session: SessionId,
        inode: InodeId,
        ancestry: &impl Ancestry,
    ) -> Option<Grant> {
        if !self.awaiting.is_empty() || !self.commands.is_empty() || !self.announced.is_empty() {
            return None;
        }
        let target = self.leases.governing(inode, ancestry)?;
        if self.is_reserved_from(session, inode, ancestry) {
            return None;
        }
        let reads = |(holder, slot)| {
            self.leases.slot(holder, slot).mode == LeaseMode::Read && !self.leases.is_dirty(holder, slot)
        };
        // A subtree lease is always a write lease.
        if !self.leases.holders_of(target).all(reads) {
            return None;
        }
        let slot = match self.leases.slot_at(target, session) {
            Some(slot) => slot,
            None if self.leases.holder(session).entries() >= self.entries_max(session) => {
                self.evict_one(session);
                return None;
            }
            None => self.leases.add(target, session, LeaseMode::Read, ancestry),
        };
        self.stats.grants += 1;
        self.leases.holder(session).is_passive = true;
        self.leases.record_grant(session, slot, now_us);
        Some(Grant { inode, word: self.leases.word(session, slot) })
    }

    /// Whether any session waits for leases.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether a session may read an inode at once, without taking a lease from a possible writer.
    #[must_use]
    pub fn is_free_to_read(&self, session: SessionId, inode: InodeId, ancestry: &impl Ancestry) -> bool {
        let Some(target) = self.leases.governing(inode, ancestry) else { return true };
        self.leases.holders_of(target).all(|(holder, slot)| {
            let is_read = self.leases.slot(holder, slot).mode == LeaseMode::Read || target.scope == LeaseScope::Subtree;
            holder == session || is_read && !self.leases.is_dirty(holder, slot)
        })
    }

    /// Whether the session has a subtree lease on a directory or on one of its ancestors.
    #[must_use]
    pub fn has_below(&self, session: SessionId, directory: InodeId, ancestry: &impl Ancestry) -> bool {
        let top = self.leases.governing_subtree(Some(directory), ancestry);
        top.is_some_and(|top| self.leases.slot_at(LeaseTarget::subtree(top), session).is_some())
    }

    /// Whether a lease is that of a passive reader.
    ///
    /// It is removed without waiting, and taking it does not count as a collision.
    pub(crate) fn is_passive(&self, session: SessionId, slot: u32) -> bool {
        let state = self.leases.slot(session, slot);
        self.leases.holders[&session].is_passive
            && state.mode == LeaseMode::Read
            && !self.leases.is_dirty(session, slot)
    }

    /// Removes a session's least recently granted read lease that has no unapplied records.
    fn evict_one(&mut self, session: SessionId) {
        let is_read = |slot: &u32| {
            self.leases.slot(session, *slot).mode == LeaseMode::Read && !self.leases.is_dirty(session, *slot)
        };
        let oldest = self.leases.holders[&session].by_stamp.iter().map(|(_, slot)| *slot).find(is_read);
        if let Some(slot) = oldest {
            self.drop_read(session, slot, RevokeReason::Evicted);
        }
    }

    /// Removes a read lease without unapplied records.
    fn drop_read(&mut self, session: SessionId, slot: u32, reason: RevokeReason) {
        self.announce_to_shadows(session, slot, LeaseMode::Read);
        let word = SlotWord { mode: None, ..self.leases.raise_generation(session, slot) };
        self.push(Command::Revoke { word, reason });
        self.mark_dependency(session, slot, None);
        self.leases.remove(session, slot);
    }

    /// Removes the passive readers' leases that are older than [`Limits::passive_ttl_us`].
    fn expire_passive(&mut self, now_us: u64) {
        if !self.awaiting.is_empty() || !self.commands.is_empty() || !self.announced.is_empty() {
            return;
        }
        let passive = self.leases.holders.iter().filter(|(_, holder)| holder.is_passive);
        let slots = passive.flat_map(|(session, holder)| holder.by_stamp.iter().map(|(_, slot)| (*session, *slot)));
        let is_old = |(session, slot): &(SessionId, u32)| {
            let granted_us = self.leases.slot(*session, *slot).granted_us;
            self.is_passive(*session, *slot) && now_us.saturating_sub(granted_us) >= self.limits.passive_ttl_us
        };
        for (session, slot) in slots.filter(is_old).collect::<Vec<_>>() {
            self.drop_read(session, slot, RevokeReason::Expired);
        }
    }

    /// Whether an inode at `home` is governed like all files of the directory without a lease of their own.
    ///
    /// A session that is granted one of those files may get the state of this one too.
    #[must_use]
    pub fn is_among_files(&self, directory: InodeId, inode: InodeId, home: InodeHome) -> bool {
        home.as_file() == Some(directory) && !self.leases.nodes.contains_key(&inode) && !self.reserved.keeps(inode)
    }

    /// Returns the dependencies of such a file beyond those of every file of its directory.
    #[must_use]
    pub fn own_dependencies(&self, session: SessionId, inode: InodeId) -> Vec<(SessionId, LogPosition)> {
        let mut found = BTreeMap::new();
        self.dependencies.collect_at(LeaseTarget::node(inode), &mut found);
        found.remove(&session);
        found.into_iter().collect()
    }

    /// Returns updates of other sessions that the inode's applied state includes and that may not be persistent.
    #[must_use]
    pub fn dependencies(
        &self,
        session: SessionId,
        inode: InodeId,
        ancestry: &impl Ancestry,
    ) -> Vec<(SessionId, LogPosition)> {
        let mut found = BTreeMap::new();
        self.dependencies.collect(inode, ancestry, &mut found);
        found.remove(&session);
        found.into_iter().collect()
    }

    /// Returns the sessions whose unapplied records may change an inode, or a directory that leads to it.
    ///
    /// These are the sessions whose records [`Self::may_write`] allows there.
    #[must_use]
    pub fn writers(&self, inode: InodeId, ancestry: &impl Ancestry) -> BTreeSet<SessionId> {
        let mut found = BTreeSet::new();
        let writes = |&(session, slot): &(SessionId, u32)| {
            self.leases.slot(session, slot).mode == LeaseMode::Write || self.leases.is_dirty(session, slot)
        };
        // From the top down, the subtree lease that governs each inode is known from the one above.
        let way: Vec<_> = path_up(inode, ancestry).collect();
        let mut top = None;
        for (id, home) in way.into_iter().rev() {
            let target = self.leases.governing_below(id, home, top);
            found.extend(target.into_iter().flat_map(|target| self.leases.holders_of(target)).filter(writes));
            if self.leases.subtrees.contains_key(&id) {
                top = Some(id);
            }
        }
        found.into_iter().map(|(session, _)| session).collect()
    }

    /// Returns [`Self::dependencies`] of an inode and of all directories that lead to it.
    #[must_use]
    pub fn path_dependencies(
        &self,
        session: SessionId,
        inode: InodeId,
        ancestry: &impl Ancestry,
    ) -> Vec<(SessionId, LogPosition)> {
        let mut found = BTreeMap::new();
        self.dependencies.collect_path(path_up(inode, ancestry), &mut found);
        found.remove(&session);
        found.into_iter().collect()
    }

    /// Whether a word need not be written any more, since its slot has a newer word or a new target.
    ///
    /// Written in its turn, it would remove the new lease for a session that reads the slot just then. An attached
    /// target is written ahead of its turn ([`Self::take_attached`]), and may have the slot of a target that no longer
    /// exists.
    #[must_use]
    pub fn is_superseded(&self, word: &SlotWord) -> bool {
        let holder = self.leases.holders.get(&word.session);
        let Some(now) = holder.and_then(|holder| holder.slots.get(word.slot as usize)) else { return false };
        // A lease that is being taken stays in place until no session uses it.
        let is_going = || self.announced.iter().any(|demand| demand.removes(word.session, word.slot));
        now.generation > word.generation || word.mode.is_none() && now.target.is_some() && !is_going()
    }

    /// Returns the words of [`Command::Attach`] that neither this nor [`Self::poll_command`] has returned yet.
    ///
    /// A shell that publishes a position in between writes them first. Writing them again in their turn does no harm.
    pub fn take_attached(&mut self) -> impl Iterator<Item = SlotWord> + '_ {
        let from = std::mem::replace(&mut self.attach_scanned, self.commands.len());
        let attaches = self.commands.range(from..).filter(|command| matches!(command, Command::Attach { .. }));
        attaches.flat_map(Command::words)
    }

    /// Whether a record of the session on this inode, found in its log now, may have been written under a lease.
    #[must_use]
    pub fn may_write(&self, session: SessionId, inode: InodeId, ancestry: &impl Ancestry) -> bool {
        self.leases.slot_governing(session, inode, ancestry).is_some_and(|slot| {
            self.leases.slot(session, slot).mode == LeaseMode::Write || self.leases.is_dirty(session, slot)
        })
    }

    /// Whether the session holds a lease that governs the inode.
    #[must_use]
    pub fn is_governed_by(&self, session: SessionId, inode: InodeId, ancestry: &impl Ancestry) -> bool {
        self.leases.slot_governing(session, inode, ancestry).is_some()
    }

    /// Records that the session's log has made `inode` in `parent`.
    ///
    /// The session knows the new inode on the lease by which it governs `parent`. If that lease does not cover the
    /// inode, or if others read the files of `parent`, the inode gets a lease of its own.
    pub fn handle_made(
        &mut self,
        session: SessionId,
        inode: InodeId,
        parent: InodeId,
        is_directory: bool,
        ancestry: &impl Ancestry,
    ) {
        self.leases.forget_governor(inode);
        if self.leases.below.knows(inode) || self.reserved.keeps(inode) {
            // A session asked for the number before there was such an inode.
            let home = ancestry.home(inode).directory;
            self.leases.below.record_move(inode, home, ancestry);
            self.reserved.record_move(inode, home, ancestry);
        }
        let target = LeaseTarget { inode, scope: if is_directory { LeaseScope::Subtree } else { LeaseScope::Node } };
        let is_known = self.leases.nodes.contains_key(&inode) || self.leases.subtrees.contains_key(&inode);
        if is_known {
            return;
        }
        let filled = self.leases.slot_at(LeaseTarget::node(parent), session);
        let slot = filled.or_else(|| {
            let is_read = !is_directory && self.leases.files.contains_key(&parent);
            let top = if is_read { self.leases.governing_subtree(Some(parent), ancestry) } else { None };
            self.leases.slot_at(LeaseTarget::subtree(top?), session)
        });
        if let Some(slot) = slot {
            self.attach(target, session, slot, ancestry);
        }
        if let Some(made) = filled.map(|slot| self.leases.record_made(session, slot)) {
            // If widening fails, the manager tries again after twice as many entries.
            if made >= self.limits.widen_after_entries && made.is_power_of_two() {
                self.queue.push_back(Work::Widen { session, directory: parent });
            }
        }
    }

    /// Records that the directory through which an inode may be governed has changed, and the ancestry with it.
    ///
    /// The cause is a rename, a second link, the removal of the second-last or last link, or the first link of an
    /// unnamed file. `None`: the inode had or has no such directory (several links, or no link).
    pub fn handle_moved(
        &mut self,
        inode: InodeId,
        from: Option<InodeId>,
        to: Option<InodeId>,
        is_directory: bool,
        ancestry: &impl Ancestry,
    ) {
        let target = LeaseTarget { inode, scope: if is_directory { LeaseScope::Subtree } else { LeaseScope::Node } };
        let has_node = !is_directory && self.leases.nodes.contains_key(&inode);
        let is_own = has_node || self.leases.subtrees.contains_key(&inode);
        if is_directory {
            self.leases.forget_governors();
        } else {
            self.leases.forget_governor(inode);
        }
        self.leases.below.record_move(inode, to, ancestry);
        self.reserved.record_move(inode, to, ancestry);
        self.take_if_reserved(inode, ancestry);
        if is_directory {
            self.dependencies.move_marks(inode, from, ancestry);
        }
        if is_own {
            return;
        }
        let before = self.leases.governing_in(from, is_directory, ancestry);
        let after = self.leases.governing_in(to, is_directory, ancestry);
        // A session that moves one of several files that are read together holds a lease of its own on it.
        let top = before.filter(|before| before.scope == LeaseScope::Subtree && Some(*before) != after);
        if let Some(top) = top {
            let (session, slot) = self.leases.subtrees[&top.inode];
            self.attach(target, session, slot, ancestry);
        }
    }

    /// Records that the inode no longer exists.
    pub fn handle_gone(&mut self, inode: InodeId) {
        self.leases.forget_governor(inode);
        self.free_reserved(inode);
        let slots: Vec<_> = self.leases.holders_at(inode).collect();
        for (session, slot) in slots {
            let word = self.leases.end_lease(session, slot);
            self.push(Command::Revoke { word: SlotWord { mode: None, ..word }, reason: RevokeReason::Gone });
            self.announced.retain(|demand| !demand.is_about(session, slot));
        }
    }

    /// Gives `target` to the session, which knows it on `slot` so far.
    fn attach(&mut self, target: LeaseTarget, session: SessionId, slot: u32, ancestry: &impl Ancestry) {
        let known_on = self.leases.slot(session, slot);
        if !known_on.live && !self.leases.is_dirty(session, slot) {
            return;
        }
        let (mut shadows, is_late) = (known_on.shadows.clone(), known_on.late);
        if known_on.live {
            shadows.insert(slot);
        }
        let own = self.leases.add(target, session, LeaseMode::Write, ancestry);
        self.leases.set_shadows(session, own, shadows);
        self.leases.set_dirty(session, own);
        self.leases.slot_mut(session, own).late = is_late;
        self.record_slot(session, own);
        let (most, slots) = (self.entries_max(session), self.table_slots(session));
        let holder = self.leases.holder(session);
        // The session may exceed its limit by a few, so that not every new inode seals the log.
        if (own >= slots || holder.entries() > most + most / 16) && !holder.trimming {
            holder.trimming = true;
            self.queue.push_back(Work::Trim { session });
        }
    }

    /// Makes the shell write the slot, if it is in the table.
    ///
    /// A lease beyond the table is held all the same, until the next restart.
    pub(crate) fn record_slot(&mut self, session: SessionId, slot: u32) {
        let word = self.leases.word(session, slot);
        self.push(Command::Attach { word });
    }

    /// Queues the release of the session's leases on the inode itself.
    pub fn handle_release(&mut self, session: SessionId, inode: InodeId) {
        if self.leases.holders_at(inode).any(|holder| holder.0 == session) {
            self.queue.push_back(Work::Release { session, inode });
        }
    }

    /// Cancels a request that is not granted yet. Sessions that lost leases for it ask for them again.
    pub fn handle_cancel(&mut self, request: RequestId) {
        let is_it = |work: &Work| matches!(work, Work::Acquire { request: asked, .. } if *asked == request);
        let Some(at) = self.queue.iter().position(is_it) else { return };
        self.queue.remove(at);
        if at == 0 {
            self.announced.clear();
            self.wait_until_us = None;
        }
    }

    /// Ends a session: its requests are dropped, its log is applied, and its leases are removed.
    pub fn handle_session_end(&mut self, session: SessionId) {
        let holder = self.leases.holder(session);
        if holder.ending {
            return;
        }
        holder.ending = true;
        let mut is_first = true;
        let mut lost_first = false;
        self.queue.retain(|work| {
            let is_kept = !matches!(work, Work::Acquire { session: asking, .. } if *asking == session);
            lost_first |= is_first && !is_kept;
            is_first = false;
            is_kept
        });
        if lost_first {
            self.announced.clear();
        }
        self.wait_until_us = None;
        self.queue.push_back(Work::End { session });
    }

    /// Whether the manager has forgotten the session.
    ///
    /// The session has ended, and no session waits for a lease that it had.
    #[must_use]
    pub fn has_ended(&self, session: SessionId) -> bool {
        !self.leases.holders.contains_key(&session)
    }

    /// Records that the session was active.
    pub fn handle_activity(&mut self, session: SessionId, now_us: u64) {
        if let Some(holder) = self.leases.holders.get_mut(&session) {
            holder.active_us = holder.active_us.max(now_us);
        }
    }

    /// Expires the leases of idle sessions, and old leases of passive readers.
    pub fn handle_time(&mut self, now_us: u64) {
        self.expire_passive(now_us);
        if self.limits.lease_ttl_us == 0 {
            return;
        }
        for (session, holder) in &mut self.leases.holders {
            if holder.active_us == 0 {
                // A restored session's last activity before the restart is not known.
                holder.active_us = now_us;
            }
            let is_idle = now_us.saturating_sub(holder.active_us) >= self.limits.lease_ttl_us;
            if is_idle && !holder.ending && holder.entries() > 0 {
                holder.active_us = now_us;
                self.queue.push_back(Work::Expire { session: *session });
            }
        }
    }

    /// Records that the session's log is persistent up to `position`: nothing depends on that part any more.
    pub fn handle_persistent(&mut self, session: SessionId, position: LogPosition) {
        self.dependencies.forget(session, position);
    }

    /// Returns the counts.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let holders = self.leases.holders.values().filter(|holder| !holder.is_passive);
        let holders = holders.map(|holder| holder.entries() as u64);
        Stats {
            entries: holders.clone().sum(),
            sessions: holders.filter(|entries| *entries > 0).count() as u64,
            waiting: self.queue.len() as u64,
            ..self.stats
        }
    }

    pub(crate) fn push(&mut self, mut command: Command) {
        if let Some(word) = command.word_mut().filter(|word| word.slot >= self.table_slots(word.session)) {
            word.slot = SlotWord::UNRECORDED;
        }
        match &command {
            Command::Revoke { .. } => self.stats.revocations += 1,
            Command::Downgrade { .. } => self.stats.downgrades += 1,
            Command::Split { hole: Some(_), .. } => self.stats.splits += 1,
            Command::Grant { .. } => self.stats.grants += 1,
            _ => {}
        }
        self.commands.push_back(command);
    }

    /// Returns the highest ancestor of an inode below which no other session holds a lease.
    pub(crate) fn find_widest(
        &self,
        now_us: u64,
        session: SessionId,
        inode: InodeId,
        ancestry: &impl Ancestry,
    ) -> Option<InodeId> {
        let mut widest = None;
        let mut next = match ancestry.home(inode).directory {
            None if inode == InodeId::ROOT => Some(inode),
            parent => parent,
        };
        while let Some(directory) = next {
            let is_taken = self.leases.below.has_others(directory, session);
            if is_taken
                || self.is_contended(now_us, directory)
                || !self.reserved.admits_below(session, directory, ancestry)
            {
                break;
            }
            widest = Some(directory);
            next = ancestry.home(directory).directory;
        }
        widest
    }

    /// Whether sessions have collided below this directory recently.
    pub(crate) fn is_contended(&self, now_us: u64, directory: InodeId) -> bool {
        self.contended.get(&directory).is_some_and(|until_us| now_us < *until_us)
    }

    /// Records that sessions collide below this directory: for a while, leases stay narrower.
    pub(crate) fn record_contention(&mut self, now_us: u64, directory: InodeId) {
        self.contended.retain(|_, until_us| now_us < *until_us);
        if self.contended.len() >= CONTENDED_MAX {
            self.contended.pop_first();
        }
        self.contended.insert(directory, now_us + self.limits.contended_us);
    }
}

/// Whether a lease of this scope makes no sense: no honest session asks for it.
fn is_odd(want: &RequestedLease, ancestry: &impl Ancestry) -> bool {
    match want.lease.scope {
        LeaseScope::Node => false,
        LeaseScope::Files => want.lease.mode == LeaseMode::Write,
        LeaseScope::Subtree => want.lease.mode == LeaseMode::Read || !ancestry.home(want.lease.inode).is_directory,
    }
}

/// Returns an inode, and the directories that lead to it, up to the root, each with its home.
fn path_up(inode: InodeId, ancestry: &impl Ancestry) -> impl Iterator<Item = (InodeId, InodeHome)> {
    let with_home = |id| (id, ancestry.home(id));
    std::iter::successors(Some(with_home(inode)), move |(_, home)| home.directory.map(with_home))
}
