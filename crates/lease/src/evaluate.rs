//! The evaluation of queued work: find the obstacles, remove them, grant.
//!
//! One piece of work is evaluated at a time.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};

use crate::{
    Ancestry, Command, Grant, LeaseHole, LeaseManager, LeaseTarget, RequestId, RequestedLease, RevokeReason, SlotWord,
};

/// A piece of work in the queue.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Acquire {
        session: SessionId,
        request: RequestId,
        wants: Vec<RequestedLease>,
    },
    Release {
        session: SessionId,
        inode: InodeId,
    },
    Expire {
        session: SessionId,
    },
    End {
        session: SessionId,
    },
    Refresh {
        session: SessionId,
    },
    /// The session has more attached leases than it may hold.
    Trim {
        session: SessionId,
    },
    /// The session fills a directory that it holds, and each new file would be attached separately.
    Widen {
        session: SessionId,
        directory: InodeId,
    },
}

/// A change to a held lease that a piece of work needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Demand {
    session: SessionId,
    slot: u32,
    change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    /// The lease is removed.
    Remove(RevokeReason),
    /// A lease on more than one inode loses a part.
    Cut { target: LeaseTarget, keeps_read: bool },
    /// The write lease becomes a read lease.
    ReadOnly,
    /// The lease stays, but everything that was granted on it is invalid.
    Refresh,
}

impl LeaseManager {
    /// Advances the first piece of work by one step; `false` if the queue is empty.
    pub(crate) fn advance_work(
        &mut self,
        now_us: u64,
        ancestry: &impl Ancestry,
        is_using: &impl Fn(SessionId) -> bool,
    ) -> bool {
        let Some(work) = self.queue.front().cloned() else { return false };
        let demands = self.demands(now_us, &work, ancestry);
        let held = demands.iter().filter(|demand| is_using(demand.session));
        let held = held.filter_map(|demand| Some((demand.session, self.held_until_us(demand, &work)?)));
        let held: Vec<_> = held.filter(|(_, until_us)| now_us < *until_us).collect();
        self.waited_for = held.iter().map(|(session, _)| *session).collect();
        if let Some(until_us) = held.into_iter().map(|(_, until_us)| until_us).max() {
            self.wait_until_us = Some(until_us);
            self.push(Command::Wait { until_us });
            return true;
        }
        self.wait_until_us = None;
        for demand in &demands {
            self.announce_change(*demand);
        }
        let mut dirty: BTreeSet<_> =
            demands.iter().filter(|demand| self.is_unapplied(demand)).map(|d| d.session).collect();
        if let Work::End { session } | Work::Refresh { session } = work
            && self.announced.insert(Demand { session, slot: u32::MAX, change: Change::Refresh })
        {
            // The whole log must be applied, whatever leases are left.
            dirty.insert(session);
        }
        if dirty.is_empty() {
            self.announced.clear();
            self.complete_work(now_us, &work, &demands, ancestry);
            self.queue.pop_front();
            return true;
        }
        for session in &dirty {
            self.push(Command::SealAndApply { session: *session });
        }
        self.awaiting = dirty;
        true
    }

    /// Returns the time until which a demand is delayed, so that the holder can use its grant.
    fn held_until_us(&self, demand: &Demand, work: &Work) -> Option<u64> {
        let Work::Acquire { session, .. } = work else { return None };
        if *session == demand.session || self.leases.holders[&demand.session].ending || self.limits.hold_us == 0 {
            return None;
        }
        let slot = self.leases.slot(demand.session, demand.slot);
        let shadows = slot.shadows.iter().map(|shadow| self.leases.slot(demand.session, *shadow).granted_us);
        slot.live.then_some(slot.granted_us).into_iter().chain(shadows).max().map(|at| at + self.limits.hold_us)
    }

    fn demands(&self, now_us: u64, work: &Work, ancestry: &impl Ancestry) -> Vec<Demand> {
        // Revoked leases are removed, even if they have moved out of the way since.
        let revoked = self.announced.iter().filter(|demand| matches!(demand.change, Change::Remove(_)));
        let mut demands: BTreeSet<Demand> = revoked.copied().collect();
        match work {
            Work::Acquire { session, wants, .. } => {
                let may_keep = wants.iter().all(|want| want.lease.scope != LeaseScope::Subtree);
                for want in &merged(wants, ancestry) {
                    let target = self.target_for(now_us, *session, want, ancestry);
                    match target.scope {
                        LeaseScope::Node if self.leases.nodes.contains_key(&want.lease.inode) => {
                            self.demand_shared(*session, want, &mut demands);
                        }
                        LeaseScope::Node | LeaseScope::Files => {
                            let keeps_read = may_keep && want.lease.mode == LeaseMode::Read;
                            self.demand_part(*session, want, target, keeps_read, ancestry, &mut demands);
                        }
                        LeaseScope::Subtree => self.demand_subtree(*session, want.lease.inode, ancestry, &mut demands),
                    }
                }
                self.demand_room(*session, wants, ancestry, &mut demands);
            }
            Work::Trim { session } => self.demand_room(*session, &[], ancestry, &mut demands),
            Work::Widen { session, directory } => {
                if self.filled_on(now_us, *session, *directory, ancestry).is_some() {
                    self.demand_filled(*session, *directory, ancestry, &mut demands);
                }
            }
            Work::Release { session, inode } => {
                let own = self.leases.holders_at(*inode).filter(|holder| holder.0 == *session);
                demands.extend(own.map(|(holder, slot)| Demand::remove(holder, slot, RevokeReason::Released)));
            }
            Work::Expire { session } => {
                self.demand_all(*session, Change::Remove(RevokeReason::Expired), &mut demands);
                demands.retain(|demand| !self.is_kept(demand.session, demand.slot));
            }
            Work::End { session } => self.demand_all(*session, Change::Remove(RevokeReason::Ended), &mut demands),
            Work::Refresh { session } => self.demand_all(*session, Change::Refresh, &mut demands),
        }
        // A slot that is removed needs no other change: a word written for that change would outlive it.
        let mut needed: Vec<Demand> = Vec::with_capacity(demands.len());
        for demand in demands {
            let is_going = needed.last().is_some_and(|last| {
                last.is_about(demand.session, demand.slot) && matches!(last.change, Change::Remove(_))
            });
            if !is_going {
                needed.push(demand);
            }
        }
        needed
    }

    fn demand_all(&self, session: SessionId, change: Change, demands: &mut BTreeSet<Demand>) {
        let slots = self.leases.holders.get(&session).into_iter().flat_map(|holder| &holder.by_stamp);
        demands.extend(slots.map(|(_, slot)| Demand { session, slot: *slot, change }));
    }

    /// Returns the target at which a session would hold the lease that it asks for, if it does not hold it yet.
    fn target_for(
        &self,
        now_us: u64,
        session: SessionId,
        want: &RequestedLease,
        ancestry: &impl Ancestry,
    ) -> LeaseTarget {
        let WantedLease { inode, mode, scope } = want.lease;
        if scope == LeaseScope::Subtree {
            return LeaseTarget::subtree(inode);
        }
        if mode == LeaseMode::Write || self.leases.nodes.contains_key(&inode) {
            return LeaseTarget::node(inode);
        }
        let may_share = |directory: &InodeId| {
            let is_shared = self.leases.files.contains_key(directory);
            let is_wanted = is_shared || scope == LeaseScope::Files && !self.is_contended(now_us, *directory);
            let is_reader = || self.leases.slot_at(LeaseTarget::files(*directory), session).is_some();
            is_wanted && (self.reserved.admits_files(session, *directory) || is_reader())
        };
        ancestry.home(inode).as_file().filter(may_share).map_or(LeaseTarget::node(inode), LeaseTarget::files)
    }

    /// Demands changes of the leases on the inode itself.
    fn demand_shared(&self, session: SessionId, want: &RequestedLease, demands: &mut BTreeSet<Demand>) {
        let WantedLease { inode, mode, .. } = want.lease;
        for (holder, slot) in self.leases.nodes.get(&inode).into_iter().flatten() {
            let (holder, slot) = (*holder, *slot);
            if holder == session {
                let state = self.leases.slot(holder, slot);
                if state.mode >= mode {
                    continue;
                }
                if self.leases.slot_at(LeaseTarget::subtree(inode), session).is_some() {
                    // The session may write everything below, and needs no other lease on the directory itself.
                    demands.insert(Demand::remove(session, slot, RevokeReason::Folded));
                } else if !state.shadowed.is_empty() {
                    // Other state known on this slot must not become writable with it.
                    demands.insert(Demand { session, slot, change: Change::Refresh });
                }
            } else if mode == LeaseMode::Write {
                demands.insert(Demand::remove(holder, slot, RevokeReason::Conflict));
            } else if self.leases.slot(holder, slot).mode == LeaseMode::Write || self.leases.is_dirty(holder, slot) {
                demands.insert(Demand { session: holder, slot, change: Change::ReadOnly });
            }
        }
    }

    /// Demands that `target` becomes a part of its own, cut out of the lease that governs the inode now.
    fn demand_part(
        &self,
        session: SessionId,
        want: &RequestedLease,
        target: LeaseTarget,
        keeps_read: bool,
        ancestry: &impl Ancestry,
        demands: &mut BTreeSet<Demand>,
    ) {
        match self.leases.governing(want.lease.inode, ancestry) {
            Some(LeaseTarget { inode, scope: LeaseScope::Subtree }) => {
                self.demand_cut(session, inode, target, keeps_read, demands);
            }
            // A passive reader takes no lease from any session.
            Some(LeaseTarget { inode, scope: LeaseScope::Files }) if target.scope != LeaseScope::Files => {
                self.demand_cut_of_files(session, inode, target, ancestry, demands);
            }
            _ => {}
        }
    }

    /// Demands that `target` is cut out of other sessions' leases on the files of a directory.
    fn demand_cut_of_files(
        &self,
        session: SessionId,
        directory: InodeId,
        target: LeaseTarget,
        ancestry: &impl Ancestry,
        demands: &mut BTreeSet<Demand>,
    ) {
        let holders = self.leases.files.get(&directory).into_iter().flatten();
        let holders: Vec<(SessionId, u32)> = holders.map(|(holder, slot)| (*holder, *slot)).collect();
        let is_split =
            |(holder, slot): &(SessionId, u32)| self.leases.slot(*holder, *slot).splits >= self.limits.splits_max;
        if holders.iter().any(is_split) {
            demands.extend(
                holders.iter().map(|(holder, slot)| Demand::remove(*holder, *slot, RevokeReason::TooManyHoles)),
            );
            return;
        }
        let (passive, holders): (Vec<_>, Vec<_>) =
            holders.into_iter().partition(|(holder, slot)| *holder != session && self.is_passive(*holder, *slot));
        demands.extend(passive.into_iter().map(|(holder, slot)| Demand::remove(holder, slot, RevokeReason::Conflict)));
        if let [(holder, slot)] = holders[..] {
            if holder == session && self.has_below(session, directory, ancestry) {
                // The session alone reads files that it may write without asking.
                demands.insert(Demand::remove(session, slot, RevokeReason::Folded));
            }
        }
        let change = Change::Cut { target, keeps_read: false };
        let others = holders.iter().filter(|holder| holder.0 != session);
        demands.extend(others.map(|(holder, slot)| Demand { session: *holder, slot: *slot, change }));
    }

    fn demand_subtree(
        &self,
        session: SessionId,
        directory: InodeId,
        ancestry: &impl Ancestry,
        demands: &mut BTreeSet<Demand>,
    ) {
        self.demand_others_below(session, directory, demands);
        // One slot must stand for the directory and for everything below it.
        if let Some(slot) = self.leases.slot_at(LeaseTarget::node(directory), session) {
            demands.insert(Demand::remove(session, slot, RevokeReason::Folded));
        }
        if let Some(top) = self.leases.governing_subtree(Some(directory), ancestry) {
            self.demand_cut(session, top, LeaseTarget::subtree(directory), false, demands);
        }
    }

    /// Returns the slot on which a session holds a directory that it fills, if its lease may cover everything below.
    ///
    /// That requires that others hold there only leases on a few files, and that none of these is new. A mount holds
    /// such leases, for example, on files that were made through it before the session began.
    fn filled_on(&self, now_us: u64, session: SessionId, directory: InodeId, ancestry: &impl Ancestry) -> Option<u32> {
        let slot = self.leases.slot_at(LeaseTarget::node(directory), session)?;
        let state = self.leases.slot(session, slot);
        let is_held = state.live && state.mode == LeaseMode::Write && !self.leases.holders[&session].ending;
        let is_own = self.leases.slot_at(LeaseTarget::subtree(directory), session).is_some();
        let is_open = !self.is_contended(now_us, directory) && self.reserved.admits_below(session, directory, ancestry);
        if !is_held || is_own || !is_open {
            return None;
        }
        let others = self.leases.below.inodes_with_others(directory, session, self.limits.widen_takes_max);
        let is_new = |(holder, slot): (SessionId, u32)| {
            let last_grant_us = self.leases.slot(holder, slot).last_grant_us;
            holder != session && now_us < last_grant_us + self.limits.widen_min_age_us
        };
        let is_in_the_way = |inode: &InodeId| {
            let is_elsewhere = *inode != directory && ancestry.home(*inode).as_file() != Some(directory);
            is_elsewhere || self.leases.holders_at(*inode).any(is_new)
        };
        // The lease out of which it is cut loses a part as well. If that is the session's own lease, the session knows
        // files there by it, on another slot.
        let top = self.leases.governing_subtree(Some(directory), ancestry).map(|top| self.leases.subtrees[&top]);
        let is_whole = |(holder, slot): (SessionId, u32)| {
            let has_room = self.leases.slot(holder, slot).splits < self.limits.splits_max;
            holder != session && has_room && !is_new((holder, slot))
        };
        let is_free = others.len() <= self.limits.widen_takes_max && !others.iter().any(is_in_the_way);
        (is_free && top.is_none_or(is_whole)).then_some(slot)
    }

    /// Whether the lease on a directory's files may become a write lease on everything below, on the same slot.
    ///
    /// The session reads the files on this slot and now writes one, and so continues without asking. The condition is
    /// that only passive readers hold leases there, and that no session holds all of it from above.
    fn is_sole_reader(&self, now_us: u64, session: SessionId, slot: u32, ancestry: &impl Ancestry) -> bool {
        let state = self.leases.slot(session, slot);
        let Some(LeaseTarget { inode: directory, scope: LeaseScope::Files }) = state.target else { return false };
        let is_sole = self.leases.holders_of(LeaseTarget::files(directory)).all(|(holder, _)| holder == session);
        // Inodes that the session knows by this lease and holds by another one become writable, too.
        let is_written = |other: &u32| self.leases.slot(session, *other).mode == LeaseMode::Write;
        let is_top = self.leases.governing_subtree(Some(directory), ancestry).is_none();
        if !state.live || !is_sole || !state.shadowed.iter().all(is_written) {
            return false;
        }
        if !is_top || self.is_contended(now_us, directory) || !self.reserved.admits_below(session, directory, ancestry)
        {
            return false;
        }
        let others = self.leases.below.inodes_with_others(directory, session, self.limits.widen_takes_max);
        let mut holders = others.iter().flat_map(|inode| self.leases.holders_at(*inode));
        others.len() <= self.limits.widen_takes_max
            && holders.all(|(holder, slot)| holder == session || self.is_passive(holder, slot))
    }

    fn demand_filled(
        &self,
        session: SessionId,
        directory: InodeId,
        ancestry: &impl Ancestry,
        demands: &mut BTreeSet<Demand>,
    ) {
        self.demand_others_below(session, directory, demands);
        // Files that are read together come under the new lease first.
        if let Some(slot) = self.leases.slot_at(LeaseTarget::files(directory), session) {
            demands.insert(Demand::remove(session, slot, RevokeReason::Folded));
        }
        if let Some(top) = self.leases.governing_subtree(Some(directory), ancestry) {
            self.demand_cut(session, top, LeaseTarget::subtree(directory), false, demands);
        }
    }

    fn demand_others_below(&self, session: SessionId, directory: InodeId, demands: &mut BTreeSet<Demand>) {
        for inode in self.leases.below.inodes_with_others(directory, session, usize::MAX) {
            let others = self.leases.holders_at(inode).filter(|holder| holder.0 != session);
            demands.extend(others.map(|(holder, slot)| Demand::remove(holder, slot, RevokeReason::Conflict)));
        }
    }

    /// Demands that `target` is cut out of the subtree lease on `top`, if another session holds that lease.
    fn demand_cut(
        &self,
        session: SessionId,
        top: InodeId,
        target: LeaseTarget,
        keeps_read: bool,
        demands: &mut BTreeSet<Demand>,
    ) {
        let (holder, slot) = self.leases.subtrees[&top];
        if holder == session {
            return;
        }
        let change = if target == LeaseTarget::subtree(top) {
            Change::Remove(RevokeReason::Conflict)
        } else if self.leases.slot(holder, slot).splits >= self.limits.splits_max && !self.reserved.keeps(top) {
            Change::Remove(RevokeReason::TooManyHoles)
        } else {
            let has_room = self.leases.holders[&holder].entries() < self.entries_max(holder);
            Change::Cut { target, keeps_read: keeps_read && has_room }
        };
        demands.insert(Demand { session: holder, slot, change });
    }

    /// Demands room for the leases asked for: the session's least recently granted leases are removed.
    fn demand_room(
        &self,
        session: SessionId,
        wants: &[RequestedLease],
        ancestry: &impl Ancestry,
        demands: &mut BTreeSet<Demand>,
    ) {
        let Some(holder) = self.leases.holders.get(&session) else { return };
        let is_going = |demand: &&Demand| demand.session == session && matches!(demand.change, Change::Remove(_));
        let going = demands.iter().filter(is_going).count();
        let most = self.entries_max(session);
        let excess = (holder.entries() + wants.len()).saturating_sub(most + going);
        if excess == 0 {
            return;
        }
        let mut kept: BTreeSet<u32> =
            wants.iter().filter_map(|want| self.leases.slot_governing(session, want.lease.inode, ancestry)).collect();
        kept.extend(demands.iter().filter(|demand| demand.session == session).map(|demand| demand.slot));
        let oldest = holder.by_stamp.iter().map(|(_, slot)| *slot);
        let oldest = oldest.filter(|slot| !kept.contains(slot) && !self.is_kept(session, *slot));
        // Remove a few more, so that not every later request seals the log.
        let count = excess + most / 16;
        demands.extend(oldest.take(count).map(|slot| Demand::remove(session, slot, RevokeReason::Evicted)));
    }

    /// Whether a lease stands at a reserved inode, and so is not evicted.
    fn is_kept(&self, session: SessionId, slot: u32) -> bool {
        self.leases.slot(session, slot).target.is_some_and(|target| self.reserved.keeps(target.inode))
    }

    fn is_unapplied(&self, demand: &Demand) -> bool {
        self.leases.is_dirty(demand.session, demand.slot)
    }

    /// Changes the words so that the holder's checks fail.
    ///
    /// The command is repeated even if nothing was granted since: the holder's kernel may still cache state that the
    /// session has forgotten.
    fn announce_change(&mut self, demand: Demand) {
        let Demand { session, slot, change } = demand;
        let is_new = self.announced.insert(demand);
        // A reader may continue to read on the slot on which it knows the inode.
        self.announce_to_shadows(
            session,
            slot,
            if change == Change::ReadOnly { LeaseMode::Write } else { LeaseMode::Read },
        );
        let is_live = self.leases.slot(session, slot).live;
        match change {
            Change::Remove(reason) if is_live || is_new => {
                let word = SlotWord { mode: None, ..self.leases.raise_generation(session, slot) };
                self.push(Command::Revoke { word, reason });
            }
            Change::Cut { target, keeps_read } if is_live || is_new => {
                let word = self.leases.raise_generation(session, slot);
                let hole = LeaseHole { inode: target.inode, scope: target.scope, keeps_read };
                self.push(Command::Split { word, hole: Some(hole) });
            }
            Change::ReadOnly if self.leases.slot(session, slot).mode == LeaseMode::Write => {
                self.downgrade(session, slot)
            }
            Change::Refresh if is_live => {
                let word = self.leases.raise_generation(session, slot);
                self.push(Command::Split { word, hole: None });
            }
            _ => {}
        }
    }

    /// Changes the words of the other slots on which the session knows the slot's target.
    ///
    /// Only slots whose mode is `least` or more are changed.
    pub(crate) fn announce_to_shadows(&mut self, session: SessionId, slot: u32, least: LeaseMode) {
        for shadow in self.leases.slot(session, slot).shadows.clone() {
            if self.leases.slot(session, shadow).mode >= least {
                let word = self.leases.raise_generation(session, shadow);
                self.push(Command::Split { word, hole: None });
            }
        }
    }

    fn downgrade(&mut self, session: SessionId, slot: u32) {
        self.leases.slot_mut(session, slot).mode = LeaseMode::Read;
        let word = self.leases.word(session, slot);
        self.push(Command::Downgrade { word });
        if self.leases.is_dirty(session, slot) {
            // The target is marked once the log is applied.
            self.leases.set_dirty(session, slot);
        } else {
            self.mark_dependency(session, slot, None);
        }
    }

    /// Marks that other sessions may now read the session's writes at the slot's target, or at a part of it.
    pub(crate) fn mark_dependency(&mut self, session: SessionId, slot: u32, part: Option<LeaseTarget>) {
        let state = self.leases.slot(session, slot);
        if let Some(target) = part.or(state.target) {
            self.dependencies.mark(target, session, state.written);
        }
    }

    /// Removes the demanded lease or part, which is no longer in use.
    fn take_lease(&mut self, now_us: u64, demand: &Demand, ancestry: &impl Ancestry) {
        let Demand { session, slot, change } = *demand;
        match change {
            Change::Remove(reason) => {
                if let (RevokeReason::TooManyHoles, Some(target)) = (reason, self.leases.slot(session, slot).target) {
                    self.record_contention(now_us, target.inode);
                }
                self.mark_dependency(session, slot, None);
                self.leases.remove(session, slot);
            }
            Change::Cut { target, keeps_read } => {
                self.leases.slot_mut(session, slot).splits += 1;
                self.mark_dependency(session, slot, Some(target));
                if keeps_read && self.leases.slot_at(target, session).is_none() {
                    let kept = self.leases.add(target, session, LeaseMode::Read, ancestry);
                    self.record_slot(session, kept);
                }
            }
            Change::ReadOnly | Change::Refresh => {}
        }
    }

    /// Completes a piece of work without obstacles: changes the tables, and answers.
    fn complete_work(&mut self, now_us: u64, work: &Work, demands: &[Demand], ancestry: &impl Ancestry) {
        let was_contended = demands.iter().any(|demand| !self.is_passive(demand.session, demand.slot));
        for demand in demands {
            self.take_lease(now_us, demand, ancestry);
        }
        match work {
            Work::Acquire { session, request, wants } => {
                for slot in self.leases.record_all(*session, self.table_slots(*session), ancestry) {
                    self.record_slot(*session, slot);
                }
                for want in &merged(wants, ancestry) {
                    self.give_lease(now_us, *session, want, was_contended, ancestry);
                }
                self.answer(now_us, *session, *request, wants, ancestry);
                // A log that was applied for this request may have moved an inode to where it is reserved.
                wants.iter().for_each(|want| self.take_if_reserved(want.lease.inode, ancestry));
            }
            Work::End { session } => {
                self.leases.holders.remove(session);
                self.reserved.forget_session(*session);
            }
            Work::Trim { session } => {
                for slot in self.leases.record_all(*session, self.table_slots(*session), ancestry) {
                    self.record_slot(*session, slot);
                }
                self.leases.holder(*session).trimming = false;
            }
            Work::Widen { session, directory } => {
                if let Some(slot) = self.filled_on(now_us, *session, *directory, ancestry) {
                    self.leases.widen_lease(*session, slot);
                    self.record_slot(*session, slot);
                }
            }
            Work::Release { .. } | Work::Expire { .. } | Work::Refresh { .. } => {}
        }
    }

    /// Gives a session the lease that it asks for, after all obstacles are removed.
    fn give_lease(
        &mut self,
        now_us: u64,
        session: SessionId,
        want: &RequestedLease,
        was_contended: bool,
        ancestry: &impl Ancestry,
    ) {
        let mut shadows = BTreeSet::new();
        if let Some(slot) = self.leases.slot_governing(session, want.lease.inode, ancestry) {
            let state = self.leases.slot(session, slot);
            if want.lease.scope != LeaseScope::Subtree {
                if state.mode >= want.lease.mode {
                    return;
                }
                if state.target.is_some_and(|target| target.scope == LeaseScope::Node) {
                    self.leases.slot_mut(session, slot).mode = want.lease.mode;
                    return;
                }
                if want.may_widen && !was_contended && self.is_sole_reader(now_us, session, slot, ancestry) {
                    self.leases.widen_lease(session, slot);
                    return;
                }
                // The session has read the file on this slot, together with others.
                shadows.extend(state.live.then_some(slot));
            } else if self.leases.slot_at(LeaseTarget::node(want.lease.inode), session).is_none() {
                return;
            }
        }
        let is_governed = self.leases.governing(want.lease.inode, ancestry).is_some();
        let widest = if !want.may_widen || is_governed || was_contended {
            None
        } else {
            self.find_widest(now_us, session, want.lease.inode, ancestry)
        };
        let target = self.target_for(now_us, session, want, ancestry);
        let (target, mode) = match (widest, target.scope) {
            (Some(top), _) => (LeaseTarget::subtree(top), LeaseMode::Write),
            (None, LeaseScope::Subtree) => (target, LeaseMode::Write),
            (None, LeaseScope::Node | LeaseScope::Files) => (target, want.lease.mode),
        };
        let slot = self.leases.add(target, session, mode, ancestry);
        self.leases.set_shadows(session, slot, shadows);
    }

    fn answer(
        &mut self,
        now_us: u64,
        session: SessionId,
        request: RequestId,
        wants: &[RequestedLease],
        ancestry: &impl Ancestry,
    ) {
        let mut grants = Vec::with_capacity(wants.len());
        let mut dependencies = BTreeMap::new();
        for want in wants {
            // The session was given a lease a moment ago. If it has none, the answer has no grant at all.
            let Some(slot) = self.leases.slot_governing(session, want.lease.inode, ancestry) else {
                grants.clear();
                break;
            };
            self.leases.record_grant(session, slot, now_us);
            grants.push(Grant { inode: want.lease.inode, word: self.leases.word(session, slot) });
            self.dependencies.collect(want.lease.inode, ancestry, &mut dependencies);
        }
        dependencies.remove(&session);
        self.push(Command::Grant { session, request, grants, dependencies: dependencies.into_iter().collect() });
    }
}

/// Merges requests so that one is left for each inode, in order.
///
/// A directory may have gone since it was asked for. Nothing is below it then, and a lease on it alone does no harm.
fn merged(wants: &[RequestedLease], ancestry: &impl Ancestry) -> Vec<RequestedLease> {
    let mut merged: BTreeMap<InodeId, RequestedLease> = BTreeMap::new();
    for want in wants {
        let is_gone = want.lease.scope == LeaseScope::Subtree && !ancestry.home(want.lease.inode).is_directory;
        let scope = if is_gone { LeaseScope::Node } else { want.lease.scope };
        let want = RequestedLease { lease: WantedLease { scope, ..want.lease }, ..*want };
        let known = merged.entry(want.lease.inode).or_insert(want);
        known.lease.mode = known.lease.mode.max(want.lease.mode);
        known.lease.scope = known.lease.scope.max(want.lease.scope);
        known.may_widen |= want.may_widen;
    }
    merged.into_values().collect()
}

impl Demand {
    /// Whether the demand concerns this slot.
    pub(crate) fn is_about(&self, session: SessionId, slot: u32) -> bool {
        (self.session, self.slot) == (session, slot)
    }

    /// Whether the demand removes the lease on this slot.
    pub(crate) fn removes(&self, session: SessionId, slot: u32) -> bool {
        self.is_about(session, slot) && matches!(self.change, Change::Remove(_))
    }

    const fn remove(session: SessionId, slot: u32, reason: RevokeReason) -> Self {
        Self { session, slot, change: Change::Remove(reason) }
    }
}
