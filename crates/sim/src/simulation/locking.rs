//! File locks: clients set them as LibFS does, and no two hold what conflicts.

use ashlar_node::leases::grant::Patience;
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::{NodeAnswer, NodeRequest, RequestTerms};
use ashlar_node::sessions::admission::record_return;
use ashlar_types::{Errno, FileKind, InodeId, LockAction, LockKind};
use ashlar_wire::{LOCK_OWNER_PROCESS, LOCK_SLOTS, LockChange, LockList, LockSlotState, Reply, Request};

use super::{Simulation, Waiter};
use crate::client::{Asked, Goal, SimClient};
use crate::client_locks::{CELLS, LockCells, LockPlace, WantedLock, conflicts, set_in};
use crate::faults::SimBug;

/// How long a lock may be free until its waiter must have it, in microseconds.
///
/// After a restart, new locks wait 200 ms for sessions that tell of theirs.
const FREE_MAX_US: u64 = 600_000;
/// The files that are locked: few, so that locks meet.
const LOCKED_FILES: usize = 2;

impl Simulation {
    /// Draws a goal that has to do with locks.
    pub(super) fn draw_lock_goal(&mut self, slot: usize) -> Option<Goal> {
        let files: Vec<InodeId> = self
            .history
            .tree
            .model
            .inodes()
            .filter(|(_, inode)| inode.kind == FileKind::Regular && inode.links > 0)
            .map(|(id, _)| id)
            .take(LOCKED_FILES)
            .collect();
        let inode = self.work.pick(&files)?;
        let client = self.slots[slot].client.as_ref()?;
        if !client.handles.contains(&inode) {
            return Some(Goal::Open(inode));
        }
        let is_root = client.user.is_privileged();
        let own = LockPlace { inode, kind: LockKind::Record, owner: LOCK_OWNER_PROCESS };
        // A process asks for record locks of other owners on a mount.
        let is_flock = is_root && self.work.one_in(3);
        let place =
            if is_flock { LockPlace { kind: LockKind::Flock, owner: self.work.between(1, 2), ..own } } else { own };
        let (one, two) = (self.work.below(CELLS as u64) as usize, self.work.below(CELLS as u64) as usize);
        let cells = if place.kind == LockKind::Flock { (0, CELLS - 1) } else { (one.min(two), one.max(two)) };
        let action = self.work.pick(&[LockAction::Read, LockAction::Write, LockAction::Write, LockAction::Unlock])?;
        let waits = action != LockAction::Unlock && self.work.one_in(2);
        Some(match self.work.below(10) {
            0 => Goal::QueryLock(WantedLock { place: own, cells: (one.min(two), one.max(two)), action, waits: false }),
            1 => Goal::ProbeLocks(inode),
            2 => Goal::ReleaseLocks(inode),
            _ => Goal::Lock(WantedLock { place, cells, action, waits }),
        })
    }

    // ---- setting and removing

    /// Sets or removes a lock.
    pub(super) fn lock(&mut self, slot: usize, wanted: &WantedLock) {
        let client = self.client(slot);
        let inode = wanted.place.inode;
        let is_known = client.locks.most_of(&wanted.place).iter().any(Option::is_some);
        if wanted.action == LockAction::Unlock && !is_known {
            return self.end_goal(slot, "has nothing to unlock");
        }
        if !wanted.place.is_own() {
            let wait = wanted.waits.then(|| Some(self.now_us + self.work.between(1_000, 1_500_000)));
            return self.send_lock(slot, *wanted, wait, None);
        }
        let Some(number) = client.control.lock_slot_of(inode).or_else(|| claim_slot(client, inode)) else {
            return self.end_goal(slot, "has no slot for locks");
        };
        match client.control.change_locks(number, inode, LockSlotState::Delegated, |list| set_in(list, wanted)) {
            LockChange::Done => return self.finish_lock(slot, wanted, "locks by itself"),
            LockChange::Full => return self.end_goal(slot, "has no room for locks"),
            LockChange::Moved => {}
        }
        if wanted.action == LockAction::Unlock {
            let is_locked = client.control.lock_slot(number).2.overlaps(wanted.range());
            if !is_locked && !client.locks.doubtful.contains(&inode) {
                return self.finish_lock(slot, wanted, "has nothing locked there");
            }
            if !copy_lock(client, number, wanted) {
                return self.end_goal(slot, "has no room for locks");
            }
        }
        let asked = client.control.lock_slot_at_present(number);
        self.send_lock(slot, *wanted, None, Some(asked));
    }

    fn send_lock(
        &mut self,
        slot: usize,
        wanted: WantedLock,
        wait: Option<Option<u64>>,
        lock_slot: Option<ashlar_wire::LockSlot>,
    ) {
        let client = self.client(slot);
        let ticket = client.locks.begin(wanted, client.control.segment_version(), wait);
        let request = wanted.request(client.pid, ticket, lock_slot);
        self.ask(slot, request);
    }

    /// The lock is set or removed; checks that it conflicts with no other.
    fn finish_lock(&mut self, slot: usize, wanted: &WantedLock, how: &str) {
        self.client(slot).locks.finish(wanted);
        self.check_grant(slot, &wanted.place);
        if self.broken.is_none() {
            self.end_goal(slot, how);
        }
    }

    /// Takes the answer to a request for a lock.
    pub(super) fn take_lock_reply(&mut self, slot: usize, reply: Result<Reply, Errno>) {
        self.observe_locks();
        let client = self.client(slot);
        let Some(underway) = client.locks.underway else { return };
        let wanted = underway.wanted;
        let inode = wanted.place.inode;
        let is_same_life = client.control.segment_version() == underway.life;
        match reply {
            Ok(Reply::Delegated) => self.finish_lock(slot, &wanted, "has the locks delegated"),
            Ok(_) if wanted.place.is_own() && underway.ticket.is_some() => {
                // The client asks for it once more, and copies it then.
                client.locks.finish(&wanted);
                client.goal = Some(Goal::Lock(WantedLock { waits: false, ..wanted }));
                self.check_grant(slot, &wanted.place);
            }
            Ok(_) if wanted.place.is_own() && wanted.action != LockAction::Unlock => {
                let Some(number) = client.control.lock_slot_of(inode) else { return client.locks.fail() };
                let before = client.control.lock_slot(number).2;
                if !copy_lock(client, number, &wanted) {
                    client.locks.doubtful.insert(inode);
                    client.locks.fail();
                    return self.end_goal(slot, "has no room for locks");
                }
                if client.control.segment_version() == underway.life {
                    return self.finish_lock(slot, &wanted, "has the lock");
                }
                client.locks.begin_again();
                client.control.change_locks(number, inode, LockSlotState::Shared, |list| {
                    *list = before.clone();
                    wanted.action.mode().into_iter().for_each(|mode| list.weaken(wanted.range(), mode));
                    true
                });
            }
            Ok(_) if wanted.place.is_own() || is_same_life => self.finish_lock(slot, &wanted, "has the lock"),
            Ok(_) => client.locks.begin_again(),
            Err(Errno::EINTR) => {
                if wanted.place.is_own() {
                    client.locks.doubtful.insert(inode);
                }
                client.locks.fail();
                self.end_goal(slot, "waits no longer");
            }
            Err(errno) => {
                client.locks.fail();
                if errno == Errno::EAGAIN && !underway.saw_conflict {
                    let session = client.session;
                    return self.break_check("locks", format!("session {session} is refused what is free: {wanted:?}"));
                }
                if errno == Errno::EAGAIN && wanted.waits {
                    // Without a time only if no circle can escape SharedFS.
                    let is_bound = client.locks.has_others() || self.work.one_in(2);
                    let at = is_bound.then(|| self.now_us + self.work.between(1_000, 1_500_000));
                    return self.send_lock(slot, wanted, Some(at), None);
                }
                self.end_goal(slot, &format!("is refused: {}", errno.symbol()));
            }
        }
    }

    /// A client that waits for a lock may wait no longer.
    pub(super) fn cancel_wait_if_due(&mut self, slot: usize) {
        let now = self.now_us;
        let Some(underway) = self.client(slot).locks.underway.as_mut() else { return };
        let (Some(at), Some(ticket), false) = (underway.cancels_at, underway.ticket, underway.is_cancelled) else {
            return;
        };
        if now < at {
            return self.schedule_client(slot, at - now);
        }
        underway.is_cancelled = true;
        let session = self.client(slot).session;
        self.trace(&format!("client {slot}"), || "gives up a wait".to_owned());
        if self.machine.node.is_some() {
            let request = NodeRequest::Session(session, Request::CancelLock { ticket });
            let terms = RequestTerms { patience: Patience::Any, bytes_max: usize::MAX, reclaims: false };
            self.begin_request(request, terms, Waiter::Unwanted);
        }
    }

    // ---- releasing

    /// Removes all locks of an owner on a file, as closing does; the goal goes on afterwards.
    pub(super) fn release_owner(&mut self, slot: usize, place: LockPlace) {
        let client = self.client(slot);
        let inode = place.inode;
        client.locks.begin_release(place);
        if place.is_own() {
            let clear = |list: &mut LockList| {
                *list = LockList::default();
                true
            };
            let is_copied = client.control.lock_slot_of(inode).is_some_and(|number| {
                match client.control.change_locks(number, inode, LockSlotState::Delegated, clear) {
                    LockChange::Done => false,
                    _ if client.control.lock_slot(number).2.is_empty() => false,
                    _ => client.control.change_locks(number, inode, LockSlotState::Shared, clear) == LockChange::Done,
                }
            });
            if !is_copied && !client.locks.doubtful.contains(&inode) {
                client.locks.finish_release(place);
                return self.schedule_soon(slot);
            }
        }
        self.ask(slot, Request::ReleaseLocks { inode, owner: place.owner, kind: place.kind });
    }

    /// Removes all locks on a file.
    pub(super) fn release_file(&mut self, slot: usize, inode: InodeId) {
        match self.client(slot).locks.owners_of(inode).first().copied() {
            Some(place) => self.release_owner(slot, place),
            None => self.end_goal(slot, "has released all locks"),
        }
    }

    // ---- asking

    /// Asks for the lock that conflicts.
    pub(super) fn query_lock(&mut self, slot: usize, wanted: &WantedLock) {
        let client = self.client(slot);
        let WantedLock { place: LockPlace { inode, kind, owner }, action, .. } = *wanted;
        client.locks.begin_query(*wanted, client.control.segment_version());
        self.ask(slot, Request::QueryLock { inode, kind, owner, range: wanted.range(), action });
    }

    /// Takes the answer about a conflicting lock.
    pub(super) fn take_conflict(&mut self, slot: usize, is_found: bool) {
        self.observe_locks();
        let client = self.client(slot);
        let Some(underway) = client.locks.underway.take() else { return };
        let (session, wanted) = (client.session, underway.wanted);
        if is_found && !underway.saw_conflict {
            return self.break_check("locks", format!("session {session} is shown a conflict with {wanted:?}"));
        }
        if !is_found && !underway.saw_free && wanted.action != LockAction::Unlock {
            return self.break_check("locks", format!("session {session} is shown no conflict with {wanted:?}"));
        }
        self.end_goal(slot, "knows of the conflict");
    }

    /// Compares the process's own locks with those that SharedFS knows.
    pub(super) fn take_known_locks(&mut self, slot: usize, inode: InodeId, found: &LockCells) {
        let client = self.client(slot);
        let place = LockPlace { inode, kind: LockKind::Record, owner: LOCK_OWNER_PROCESS };
        let (least, most) =
            (client.locks.held.get(&place).copied().unwrap_or_default().least, client.locks.most_of(&place));
        let is_within =
            found.iter().zip(least).zip(most).all(|((found, least), most)| least <= *found && *found <= most);
        let session = client.session;
        if !is_within {
            let detail =
                format!("session {session} has {found:?} on inode {inode}: at least {least:?}, at most {most:?}");
            return self.break_check("locks", detail);
        }
        self.end_goal(slot, "knows its locks");
    }

    // ---- a restart of SharedFS

    /// Tells a restarted SharedFS of one more lock; returns whether there is more to tell.
    pub(super) fn resume(&mut self, slot: usize) -> bool {
        let is_forgetful = self.has_plant(SimBug::UnreclaimedLock);
        let Some(node) = self.machine.node.as_mut() else { return false };
        let client = self.slots[slot].client.as_mut().expect("a client");
        if !client.must_resume {
            return false;
        }
        let (id, now) = (client.session, node.now.since_boot);
        if client.locks.reclaims.is_none() {
            if client.user.is_privileged() {
                node.locking.record_reclaim(now);
            }
            client.locks.reclaims = Some(client.locks.reclaim_requests(client.pid));
        }
        let next = client.locks.reclaims.as_mut().and_then(std::collections::VecDeque::pop_front);
        let Some(request) = next.filter(|_| !is_forgetful) else {
            record_return(node, id);
            (client.must_resume, client.locks.reclaims) = (false, None);
            return true;
        };
        let terms = RequestTerms { patience: Patience::Any, bytes_max: usize::MAX, reclaims: true };
        let ticket = node.begin_request(NodeRequest::Session(id, request.clone()), terms);
        let answer = loop {
            match node.advance(ticket) {
                Progress::Done(answer) => break answer,
                Progress::More => {}
                Progress::Wait(..) => {
                    return self.break_check_of("locks", format!("{request:?} waits after a restart"));
                }
            }
        };
        let is_kept = matches!(&answer, Ok(NodeAnswer::Reply(gated)) if matches!(gated.reply, Reply::Done));
        if !is_kept {
            return self.break_check_of("locks", format!("session {id} has lost {request:?}: {answer:?}"));
        }
        true
    }

    fn break_check_of(&mut self, check: &'static str, detail: String) -> bool {
        self.break_check(check, detail);
        true
    }

    // ---- checks

    /// Returns whether another owner's locks conflict: by what it holds for certain, and by what it may hold.
    fn meets(&self, slot: usize, place: &LockPlace, wanted: &LockCells) -> (bool, bool) {
        let mut met = (false, false);
        for (other_slot, client) in self.slots.iter().enumerate() {
            let Some(client) = &client.client else { continue };
            let doubtful = client.locks.doubtful.iter();
            let own = |inode: &InodeId| LockPlace { inode: *inode, kind: LockKind::Record, owner: LOCK_OWNER_PROCESS };
            let places = client.locks.held.keys().copied().chain(doubtful.map(own));
            for other in places.filter(|other| (other.inode, other.kind) == (place.inode, place.kind)) {
                if (other_slot, other.owner) != (slot, place.owner) {
                    let least = client.locks.held.get(&other).copied().unwrap_or_default().least;
                    met.0 |= conflicts(&least, wanted);
                    met.1 |= conflicts(&client.locks.most_of(&other), wanted);
                }
            }
        }
        met
    }

    fn check_grant(&mut self, slot: usize, place: &LockPlace) {
        let client = self.client(slot);
        let (session, held) = (client.session, client.locks.held.get(place).copied().unwrap_or_default().least);
        self.counts.checks += 1;
        if self.meets(slot, place, &held).0 {
            let detail = format!("session {session} holds what another owner holds: {place:?} {held:?}");
            self.break_check("locks", detail);
        }
    }

    /// Notes what requests for locks meet while they are under way.
    pub(super) fn observe_locks(&mut self) {
        let now = self.now_us;
        let is_up = self.machine.node.is_some();
        let is_settled = is_up && self.slots.iter().all(|of| of.client.as_ref().is_none_or(|c| !c.must_resume));
        for slot in 0..self.slots.len() {
            let Some(underway) = self.slots[slot].client.as_ref().and_then(|client| client.locks.underway) else {
                continue;
            };
            let WantedLock { place, cells: (first, last), action, .. } = underway.wanted;
            let wanted = std::array::from_fn(|cell| action.mode().filter(|_| (first..=last).contains(&cell)));
            let (is_held, may_be_held) = self.meets(slot, &place, &wanted);
            let client = self.client(slot);
            let is_asked = matches!(client.asked, Asked::Pending(..));
            let session = client.session;
            let Some(underway) = client.locks.underway.as_mut() else { continue };
            underway.saw_conflict |= may_be_held;
            underway.saw_free |= !is_held;
            if may_be_held || !is_settled || !is_asked {
                underway.free_since = None;
            } else if now > *underway.free_since.get_or_insert(now) + FREE_MAX_US {
                let wanted = underway.wanted;
                let detail = format!("session {session} waits for a lock that is free: {wanted:?}");
                return self.break_check("locks", detail);
            }
        }
    }

    /// Forgets the notes of locks, if that bug is planted.
    pub(super) fn plant_lost_notes(&self) {
        let Some(node) = &self.machine.node else { return };
        node.sessions.values().for_each(|session| session.noted_locks.clear());
    }
}

/// Claims a slot for a file's locks, or one of a file on which the process has none.
fn claim_slot(client: &SimClient, inode: InodeId) -> Option<u32> {
    let control = &client.control;
    control.claim_lock_slot(inode).or_else(|| {
        (0..LOCK_SLOTS).find(|slot| control.lock_slot(*slot).2.is_empty() && control.free_lock_slot(*slot))?;
        control.claim_lock_slot(inode)
    })
}

/// Copies a lock into the slot; `false` if it has no room.
fn copy_lock(client: &SimClient, number: u32, wanted: &WantedLock) -> bool {
    let inode = wanted.place.inode;
    let set = |list: &mut LockList| set_in(list, wanted);
    client.control.change_locks(number, inode, LockSlotState::Shared, set) != LockChange::Full
}
