//! The clients' work: each event takes a client one step further, so that anything may come between two steps.

use ashlar_log::AppendError;
use ashlar_node::leases::grant::Patience;
use ashlar_node::pending::{NodeRequest, RequestTerms};
use ashlar_pmem::Persistent;
use ashlar_types::{Errno, FileKind, InodeId, LeaseScope, LogPosition};
use ashlar_update::Update;
use ashlar_wire::{Credit, CreditKind, LeaseRequest, Need, Reply, Request};

use super::{SimEvent, Simulation, Waiter};
use crate::client::{Asked, Goal, PreparedUpdate, SimClient, SyncProgress, SyncStage};
use crate::client_locks::{LockPlace, cells_of};
use crate::faults::SimBug;
use crate::history::LoggedUpdate;
use crate::intent::{Intent, inode};
use crate::machine::wall_time;
use crate::quota_balances::quota_wants;

/// How often a client tries for a goal before it gives up.
const TRIES_MAX: u32 = 300;
/// One directory in so many is asked for with all that is below it.
const SUBTREE_PART: u64 = 6;
/// How often a client that needs SharedFS looks whether it runs, in microseconds.
const RECONNECT_US: u64 = 2_000;

impl Simulation {
    /// Schedules a slot's next step, in place of one that is scheduled already.
    pub(super) fn schedule_client(&mut self, slot: usize, pause_us: u64) {
        self.schedule(pause_us, SimEvent::Client(slot));
        self.slots[slot].wake = self.scheduled;
    }

    pub(super) fn client(&mut self, slot: usize) -> &mut SimClient {
        self.slots[slot].client.as_mut().expect("a client")
    }

    pub(super) fn schedule_soon(&mut self, slot: usize) {
        let pause = if self.work.one_in(40) { self.work.between(1_000, 20_000) } else { self.work.between(1, 30) };
        self.schedule_client(slot, pause);
    }

    pub(super) fn go_on(&mut self, slot: usize) {
        let now = self.now_us;
        let Some(client) = &mut self.slots[slot].client else { return self.begin_session(slot) };
        if client.stopped_until > now {
            let pause = client.stopped_until - now;
            return self.schedule_client(slot, pause);
        }
        if self.resume(slot) {
            return self.schedule_soon(slot);
        }
        let client = self.client(slot);
        match std::mem::replace(&mut client.asked, Asked::Nothing) {
            Asked::Pending(request, ticket) => {
                client.asked = Asked::Pending(request, ticket);
                self.cancel_wait_if_due(slot);
            }
            Asked::Unsent(Request::Lock { .. }) if client.locks.underway.is_some_and(|of| of.is_cancelled) => {
                // A SharedFS that has forgotten the wait has ended it.
                self.take_lock_reply(slot, Err(Errno::EINTR));
                self.schedule_soon(slot);
            }
            Asked::Unsent(request) => self.send(slot, request),
            Asked::Answered(request, reply) => {
                self.take_reply(slot, &request, *reply);
                if self.slots[slot].client.is_some() {
                    self.schedule_soon(slot);
                }
            }
            Asked::Nothing => match client.goal.clone() {
                None => self.draw_goal(slot),
                Some(goal) => self.pursue(slot, &goal),
            },
        }
    }

    fn begin_session(&mut self, slot: usize) {
        if self.steps_left == 0 {
            return;
        }
        if self.machine.node.is_none() {
            return self.schedule_client(slot, RECONNECT_US);
        }
        let uid = self.slots[slot].uid;
        match SimClient::begin(&mut self.machine, uid, self.now_us) {
            Ok(client) => {
                self.trace(&format!("client {slot}"), || format!("begins session {} of user {uid}", client.session));
                self.slots[slot].client = Some(client);
                self.schedule_soon(slot);
            }
            Err(error) => self.break_check("session", error),
        }
    }

    // ---- goals

    fn draw_goal(&mut self, slot: usize) {
        if self.steps_left == 0 {
            // Other clients may wait for its locks.
            if let Some(inode) = self.client(slot).locks.files().pop_first() {
                self.client(slot).goal = Some(Goal::ReleaseLocks(inode));
                self.schedule_soon(slot);
            }
            return;
        }
        let tree = &self.history.tree.model;
        let Some(client) = &self.slots[slot].client else { return };
        let files: Vec<InodeId> = tree
            .inodes()
            .filter(|(_, inode)| inode.kind == FileKind::Regular && inode.links > 0)
            .map(|(id, _)| id)
            .collect();
        let (handles, is_root) = (client.handles.clone(), client.user.is_privileged());
        let has_links = |id: &InodeId| tree.inodes().any(|(found, inode)| found == *id && inode.links > 0);
        // A removed file is written as long as it is open.
        let removed = handles.iter().find(|id| !has_links(id)).copied().filter(|_| self.work.one_in(3));
        let goal = match self.work.below(50) {
            0..=30 if removed.is_some() => removed.map(|inode| Goal::Change(Intent::Write(inode, 100, 300, 7))),
            31 | 32 => self.work.pick(&files).filter(|id| !handles.contains(id)).map(Goal::Open),
            33 | 34 => self.work.pick(&handles).map(Goal::Close),
            35 | 36 => self.work.pick(&files).map(Goal::SyncInode),
            37 => Some(Goal::SyncAll),
            38 => Some(Goal::Digest),
            40..=49 => self.draw_lock_goal(slot),
            39 => self.work.one_in(2).then_some(Goal::End),
            _ => Intent::draw(tree, &handles, is_root, &mut self.work).map(Goal::Change),
        };
        if let Some(goal) = goal {
            self.steps_left -= 1;
            self.counts.steps += 1;
            self.trace(&format!("client {slot}"), || format!("wants {goal:?}"));
            self.client(slot).goal = Some(goal);
        }
        self.schedule_soon(slot);
    }

    pub(super) fn end_goal(&mut self, slot: usize, how: &str) {
        let client = self.client(slot);
        client.end_goal();
        client.log.release(client.control.committed());
        client.control.set_released(client.control.applied());
        self.trace(&format!("client {slot}"), || how.to_owned());
        let pause = if self.work.one_in(20) { self.work.between(5_000, 400_000) } else { self.work.between(10, 1_500) };
        self.schedule_client(slot, pause);
    }

    fn pursue(&mut self, slot: usize, goal: &Goal) {
        let client = self.client(slot);
        client.tries += 1;
        if client.tries > TRIES_MAX {
            return self.end_goal(slot, "gives up");
        }
        match goal {
            Goal::Change(intent) => self.change(slot, intent),
            Goal::Open(inode) => self.open(slot, *inode),
            Goal::Close(inode) => self.close(slot, *inode),
            Goal::SyncInode(inode) => self.sync(slot, Some(*inode)),
            Goal::SyncAll => self.sync(slot, None),
            Goal::Digest => self.ask(slot, Request::Digest),
            Goal::Lock(wanted) => self.lock(slot, wanted),
            Goal::QueryLock(wanted) => self.query_lock(slot, wanted),
            Goal::ProbeLocks(inode) => self.ask(slot, Request::YieldLocks { inode: *inode, moves: false }),
            Goal::ReleaseLocks(inode) => self.release_file(slot, *inode),
            Goal::End => self.end_client(slot, "ends its session"),
        }
    }

    // ---- requests

    pub(super) fn ask(&mut self, slot: usize, request: Request) {
        let client = self.client(slot);
        client.seal = None;
        if matches!(request, Request::Acquire(_)) && !client.is_using {
            client.control.begin_use();
            client.is_using = true;
        }
        self.send(slot, request);
    }

    fn send(&mut self, slot: usize, request: Request) {
        if self.machine.node.is_none() {
            self.client(slot).asked = Asked::Unsent(request);
            return self.schedule_client(slot, RECONNECT_US);
        }
        let terms = RequestTerms { patience: Patience::Any, bytes_max: usize::MAX, reclaims: false };
        let asked = NodeRequest::Session(self.client(slot).session, request.clone());
        let ticket = self.begin_request(asked, terms, Waiter::Client(slot));
        self.trace(&format!("client {slot}"), || format!("asks {request:?}"));
        self.client(slot).asked = Asked::Pending(request, ticket);
        self.cancel_wait_if_due(slot);
    }

    fn take_reply(&mut self, slot: usize, request: &Request, reply: Result<Reply, Errno>) {
        let goal = self.client(slot).goal.clone();
        if matches!(request, Request::Lock { .. }) {
            return self.take_lock_reply(slot, reply);
        }
        let client = self.client(slot);
        let error = match (request, reply) {
            (Request::QueryLock { .. }, Ok(Reply::Conflict(found))) => {
                return self.take_conflict(slot, found.is_some());
            }
            (Request::YieldLocks { inode, .. }, Ok(Reply::Locks(found))) => {
                return self.take_known_locks(slot, *inode, &cells_of(&found));
            }
            (Request::ReleaseLocks { inode, owner, kind }, Ok(_)) => {
                client.locks.finish_release(LockPlace { inode: *inode, kind: *kind, owner: *owner });
                None
            }
            (Request::Acquire(wants), Ok(Reply::Granted { grants, dependencies, .. })) => {
                client.note_dependencies(&dependencies);
                client.granted.extend(grants.iter().map(|grant| (grant.inode, (grant.slot, grant.word))));
                let is_refused = wants
                    .iter()
                    .zip(&grants)
                    .any(|(want, grant)| want.lease.mode.is_write() && !ashlar_wire::LeaseWord(grant.word).may_write());
                is_refused.then_some(Errno::EACCES)
            }
            (_, Ok(Reply::Inodes(first, count))) => {
                client.inodes = first.0..first.0 + count;
                None
            }
            (Request::Digest | Request::MakeRoom { .. }, Ok(Reply::Committed(position))) => {
                client.log.release(client.control.committed());
                let session = client.session;
                let own = |logged: &&mut LoggedUpdate| logged.session == session && logged.end <= position;
                self.history.updates.iter_mut().filter(own).for_each(|logged| logged.is_durable = true);
                if matches!(goal, Some(Goal::Digest)) {
                    return self.end_goal(slot, "has digested");
                }
                None
            }
            (Request::SyncDependencies(_) | Request::SyncInode { .. } | Request::SyncAll, Ok(_)) => {
                let asked = match request {
                    Request::SyncDependencies(positions) => positions.clone(),
                    Request::SyncInode { dependencies, .. } => dependencies.clone(),
                    _ => Vec::new(),
                };
                client.unsynced.retain(|session, position| !asked.contains(&(*session, *position)));
                if let Some(sync) = &mut client.sync {
                    sync.stage = SyncStage::Leases;
                }
                None
            }
            (_, Ok(Reply::Quota { version, grants })) => {
                client.balances.fill(version, &grants);
                None
            }
            (_, Ok(_)) => None,
            (_, Err(Errno::EAGAIN)) => None,
            (Request::Acquire(wants), Err(Errno::ESTALE))
                if wants.iter().all(|want| client.handles.contains(&want.lease.inode)) =>
            {
                let session = client.session;
                return self
                    .break_check("open file", format!("session {session} has it open, and it is gone: {wants:?}"));
            }
            (_, Err(errno)) => Some(errno),
        };
        if let Some(errno) = error {
            self.end_goal(slot, &format!("is refused: {}", errno.symbol()));
        }
    }

    // ---- changes

    fn holds(&self, slot: usize, inode: InodeId, is_write: bool) -> bool {
        let Some(client) = &self.slots[slot].client else { return false };
        if self.has_plant(SimBug::UnrevokedLease) {
            return client.granted.get(&inode).is_some_and(|(_, word)| {
                let word = ashlar_wire::LeaseWord(*word);
                if is_write { word.may_write() } else { word.may_read() }
            });
        }
        client.holds(inode, is_write)
    }

    fn change(&mut self, slot: usize, intent: &Intent) {
        if self.client(slot).prepared.is_some() {
            return self.append(slot, intent);
        }
        if let Some((&session, &position)) = self.client(slot).unlogged.first_key_value() {
            return self.log_dependency(slot, session, position);
        }
        let client = self.client(slot);
        if client.seal.is_none() {
            if intent.makes_inode() && client.inodes.is_empty() {
                return self.ask(slot, Request::InodeRange);
            }
            client.seal = Some(client.log.seal_count());
            return self.schedule_soon(slot);
        }
        self.prepare(slot, intent);
    }

    /// Logs that the updates that follow depend on another session's.
    fn log_dependency(&mut self, slot: usize, session: ashlar_types::SessionId, position: LogPosition) {
        let is_skipped = self.has_plant(SimBug::UnloggedDependencies);
        let client = self.client(slot);
        let update = Update::Depend { session, position };
        let appended = if is_skipped {
            Ok(client.end)
        } else {
            let seal = client.log.seal_count();
            client.log.append(seal, update.kind() as u8, &update.encode().parts()).map(|appended| appended.end)
        };
        match appended {
            Ok(end) => {
                client.end = end;
                client.unlogged.remove(&session);
                client.logged.insert(session, position);
                self.trace(&format!("client {slot}"), || format!("logs {update:?} up to {end}"));
                self.schedule_soon(slot);
            }
            Err(error) => self.handle_append_error(slot, error),
        }
    }

    /// Checks the leases, and prepares the update.
    fn prepare(&mut self, slot: usize, intent: &Intent) {
        let Some(claims) = intent.claims(&self.history.tree.model) else {
            return self.end_goal(slot, "finds nothing there");
        };
        let missing: Vec<_> = claims.iter().filter(|(id, is_write)| !self.holds(slot, *id, *is_write)).collect();
        if !missing.is_empty() {
            let asks_all = self.work.one_in(2);
            let has_need = self.work.one_in(3);
            let need = Need { contents: has_need, entries: has_need, children: has_need, xattrs: has_need };
            let wanted: Vec<_> = if asks_all { claims.iter().collect() } else { missing };
            let tree = &self.history.tree.model;
            let is_directory = |id| inode(tree, id).is_some_and(|found| found.is_directory());
            let mut wants = Vec::with_capacity(wanted.len());
            for &&(id, is_write) in &wanted {
                let mut want = LeaseRequest::on_inode(id, is_write, need);
                if is_write && is_directory(id) && self.work.one_in(SUBTREE_PART) {
                    want.lease.scope = LeaseScope::Subtree;
                }
                wants.push(want);
            }
            return self.ask(slot, Request::Acquire(wants));
        }
        let (now, has_late_seal) = (self.now_us, self.has_plant(SimBug::LateSealCount));
        let Some(client) = &mut self.slots[slot].client else { return };
        let made = InodeId(client.inodes.start);
        let mut data = Vec::new();
        let is_open = |id: InodeId| client.handles.contains(&id);
        let tree = &self.history.tree;
        let has_lost = |id: &InodeId| {
            let is_unlinked = tree.model.inodes().any(|(found, inode)| found == *id && inode.links == 0);
            is_unlinked && !is_open(*id)
        };
        if !matches!(intent, Intent::Release(_)) && claims.iter().any(|(id, _)| has_lost(id)) {
            return self.end_goal(slot, "finds it removed");
        }
        let update = intent.update(&tree.model, &client.user, &is_open, made, wall_time(now), &mut data);
        let fits = |update: &Update<'_>| tree.clone().apply(update).is_ok();
        let Some(update) = update.filter(fits) else { return self.end_goal(slot, "may not do that") };
        let version = client.control.quota_version();
        let wants = match version.has_limits() {
            true => quota_wants(&tree.model, &update, client.user.is_privileged()),
            false => Vec::new(),
        };
        if !client.balances.pay(version, &wants) {
            return self.ask(slot, Request::Quota(wants));
        }
        let credit = Credit::from(update.cost());
        let Some(taken) = client.control.take_credit(credit, CreditKind::Common) else {
            client.balances.give_back(version, &wants);
            return self.ask(slot, Request::Credit { want: credit, replaces: false });
        };
        let makes = intent.makes_inode() && update_makes(&update);
        if makes {
            client.inodes.next();
        }
        if let Update::Create(create) = &update
            && create.name.is_empty()
        {
            client.control.open_handle(made);
        }
        let (kind, body) = (update.kind() as u8, update.encode().parts().concat());
        client.prepared =
            Some(PreparedUpdate { kind, body, taken, paid: (version, wants), made: makes.then_some(made) });
        if has_late_seal {
            client.seal = None;
        }
        self.schedule_soon(slot);
    }

    fn append(&mut self, slot: usize, intent: &Intent) {
        let client = self.client(slot);
        let Some(prepared) = client.prepared.take() else { return };
        let seal = client.seal.take().unwrap_or_else(|| client.log.seal_count());
        match client.log.append(seal, prepared.kind, &[&prepared.body]) {
            Ok(appended) => {
                client.end = appended.end;
                if let (Intent::Create(place, ..), Some(made)) = (intent, prepared.made) {
                    // The session knows the inode by the lease on its directory.
                    if let Some(lease) = client.granted.get(&place.directory).copied() {
                        client.granted.insert(made, lease);
                    }
                    if place.name.is_empty() {
                        client.handles.push(made);
                    }
                }
                if let Intent::Release(inode) = intent {
                    client.control.close_handle(*inode);
                    client.handles.retain(|open| open != inode);
                }
                let (session, end, kind) = (client.session, appended.end, prepared.kind);
                let is_root = client.user.is_privileged();
                let is_durable = !self.machine.is_disk();
                let logged = LoggedUpdate { session, end, kind, body: prepared.body, is_durable };
                self.counts.updates += 1;
                let number = self.history.updates.len();
                self.trace(&format!("client {slot}"), || format!("logs update {number} up to {end}"));
                let used_before = self.use_of_names();
                if let Err(invalid) = self.history.push(logged) {
                    return self
                        .break_check("one writer", format!("session {session} logs what does not fit: {invalid}"));
                }
                self.check_use(session, is_root, &used_before);
                self.end_goal(slot, "is done");
            }
            Err(error) => {
                client.give_back(&prepared);
                if let Some(made) = prepared.made {
                    client.inodes.start = made.0;
                    if client.control.has_open(made) && !client.handles.contains(&made) {
                        client.control.close_handle(made);
                    }
                }
                self.handle_append_error(slot, error);
            }
        }
    }

    fn handle_append_error(&mut self, slot: usize, error: AppendError) {
        let client = self.client(slot);
        client.seal = None;
        match error {
            AppendError::Sealed => self.schedule_soon(slot),
            AppendError::Full { needed } => {
                client.log.release(client.control.committed());
                let capacity = client.log.capacity();
                let upto = LogPosition(client.end.0.saturating_sub(capacity / 2)).max(client.log.head().plus(needed));
                let request = if needed == 0 { Request::Digest } else { Request::MakeRoom { upto } };
                self.ask(slot, request);
            }
            AppendError::Limited { upto } => self.ask(slot, Request::LogLimit { upto, reads: false }),
            error => {
                let session = client.session;
                self.break_check("append", format!("session {session}: {error}"));
            }
        }
    }

    // ---- handles

    fn open(&mut self, slot: usize, inode: InodeId) {
        if !self.holds(slot, inode, false) {
            let want = LeaseRequest::on_inode(inode, false, Need::default());
            return self.ask(slot, Request::Acquire(vec![want]));
        }
        let is_named = self.history.tree.model.inodes().any(|(found, of)| found == inode && of.links > 0);
        let is_hidden = self.has_plant(SimBug::FreedOpenInode);
        let client = self.client(slot);
        if !is_named {
            return self.end_goal(slot, "finds nothing to open");
        }
        // SharedFS can see the handle before the lease is checked once more.
        if !is_hidden {
            client.control.open_handle(inode);
        }
        if self.holds(slot, inode, false) {
            self.client(slot).handles.push(inode);
            return self.end_goal(slot, "has opened it");
        }
        self.client(slot).control.close_handle(inode);
        self.schedule_soon(slot);
    }

    fn close(&mut self, slot: usize, inode: InodeId) {
        if let Some(place) = self.client(slot).locks.owners_of(inode).first().copied() {
            return self.release_owner(slot, place);
        }
        let is_removed = self.history.tree.model.inodes().any(|(found, of)| found == inode && of.links == 0);
        // Without the lease, SharedFS frees the file later.
        let is_released = is_removed && self.holds(slot, inode, true);
        let client = self.client(slot);
        if is_released {
            client.goal = Some(Goal::Change(Intent::Release(inode)));
            return self.schedule_soon(slot);
        }
        client.control.close_handle(inode);
        client.handles.retain(|open| *open != inode);
        self.end_goal(slot, "has closed it");
    }

    // ---- persistence

    /// Makes an inode persistent, or everything.
    fn sync(&mut self, slot: usize, inode: Option<InodeId>) {
        let (updates_before, is_disk) = (self.history.updates.len(), self.machine.is_disk());
        let (skips_request, skips_log) =
            (self.has_plant(SimBug::UnsyncedDependencies), self.has_plant(SimBug::UnsyncedLog));
        let is_leased = inode.is_some_and(|inode| self.holds(slot, inode, false));
        let client = self.client(slot);
        let first = if is_disk && !skips_request { SyncStage::Ask } else { SyncStage::Leases };
        let SyncProgress { stage, updates_before } =
            *client.sync.get_or_insert(SyncProgress { stage: first, updates_before });
        match stage {
            SyncStage::Ask => {
                let dependencies: Vec<_> = client.unsynced.iter().map(|(id, position)| (*id, *position)).collect();
                let request = match inode {
                    None => Request::SyncAll,
                    Some(_) if is_leased && dependencies.is_empty() => {
                        client.sync = Some(SyncProgress { stage: SyncStage::Leases, updates_before });
                        return self.schedule_soon(slot);
                    }
                    Some(_) if is_leased => Request::SyncDependencies(dependencies),
                    Some(inode) => Request::SyncInode { inode, dependencies },
                };
                self.ask(slot, request);
            }
            SyncStage::Leases => {
                let synced = client.leases.memory().sync();
                client.sync = Some(SyncProgress { stage: SyncStage::Log, updates_before });
                match synced {
                    Ok(()) => self.schedule_soon(slot),
                    Err(error) => self.break_check("sync", error.to_string()),
                }
            }
            SyncStage::Log => {
                let synced = if skips_log { Ok(()) } else { client.log.memory().sync() };
                if let Err(error) = synced {
                    return self.break_check("sync", error.to_string());
                }
                client.durable = client.end;
                let session = client.session;
                for (index, logged) in self.history.updates.iter_mut().enumerate() {
                    let is_meant = index < updates_before && inode.is_none_or(|inode| logged.changes(inode));
                    logged.is_durable |= logged.session == session || is_meant;
                }
                self.end_goal(slot, "has synced");
            }
        }
    }
}

fn update_makes(update: &Update<'_>) -> bool {
    match update {
        Update::Create(_) => true,
        Update::Rename(rename) => rename.whiteout.is_some(),
        _ => false,
    }
}
