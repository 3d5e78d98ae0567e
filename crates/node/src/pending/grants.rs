//! Requests for leases and for the state that comes with them.

use ashlar_lease::RequestId;
use ashlar_store::{Store, StoreError};
use ashlar_types::{Access, Errno, FileKind, InodeId, LeaseMode, Name, SessionId};
use ashlar_update::Entry;
use ashlar_wire::{DirectoryEntry, LeaseRequest, Need, Reply, ReserveReason};

use crate::access::tree_view::TreeView;
use crate::leases::decisions::{decide_batch, end_leases};
use crate::leases::grant::{ENDING, GrantAnswer, LATER, Patience, report_store_error};
use crate::leases::leasing::WantedLeases;
use crate::leases::read_ahead::add_read_ahead;
use crate::leases::states::answer_covered;
use crate::leases::wants::{check_directory, check_exists, check_scopes, check_want, is_extent_request, widen_want};
use crate::node_core::NodeCore;
use crate::pending::progress::{Progress, WaitFor, done, ok};
use crate::pending::request::{GatedReply, RequestTerms};
use crate::pending::steps::{ApplyLogs, decide_next};

/// Applies what a session has logged, until the inodes that it names are there.
#[derive(Debug)]
pub enum ApplyOwn {
    /// The session's own log is applied.
    Own(ApplyLogs),
    /// Another session may have made an inode that is missing: all logs are applied.
    All(ApplyLogs),
}

impl ApplyOwn {
    /// Begins with the session's own log.
    pub fn new(id: SessionId) -> Self {
        Self::Own(ApplyLogs::of(id))
    }

    /// Goes on. Without patience, the result is [`LATER`] if one batch does not suffice.
    pub fn advance(
        &mut self,
        node: &mut NodeCore,
        id: SessionId,
        wants: &[LeaseRequest],
        patience: Patience,
    ) -> Progress<Result<(), Errno>> {
        loop {
            match self {
                Self::Own(apply) => {
                    match apply.advance(node) {
                        Progress::Done(()) => {}
                        Progress::More if patience == Patience::None => return Progress::Done(Err(LATER)),
                        progress => done!(progress),
                    }
                    if let Err(missing) = check_exists(&node.store, wants) {
                        if patience == Patience::None {
                            return Progress::Done(Err(LATER));
                        }
                        // A session that has the number from a descriptor may ask before the log of the inode's maker
                        // is applied.
                        let may_be_made = |want: &LeaseRequest| {
                            node.sessions
                                .values()
                                .any(|session| session.id != id && session.ranges.contains(want.lease.inode))
                        };
                        if !wants.iter().any(may_be_made) {
                            return Progress::Done(Err(missing));
                        }
                        *self = Self::All(ApplyLogs::of_all(&node.sessions));
                        continue;
                    }
                }
                Self::All(apply) => {
                    done!(apply.advance(node));
                    ok!(check_exists(&node.store, wants));
                    ok!(node.live(id).ok_or(Errno::EIO));
                }
            }
            return Progress::Done(check_scopes(&node.store, wants));
        }
    }
}

/// Asks the lease manager for a grant, and waits for it.
#[derive(Debug)]
pub struct GrantRequest {
    wants: Vec<LeaseRequest>,
    stage: GrantStage,
}

#[derive(Debug)]
enum GrantStage {
    Check,
    Decide,
    Wait(RequestId),
}

impl GrantRequest {
    /// Asks for these leases, whose inodes are there.
    pub fn new(wants: Vec<LeaseRequest>) -> Self {
        Self { wants, stage: GrantStage::Check }
    }

    /// Goes on. Requests of other sessions that come first are served on the way.
    ///
    /// The answer has no grants but [`LONG`](crate::leases::grant::LONG) if it would take more memory than it may.
    pub fn advance(
        &mut self,
        node: &mut NodeCore,
        id: SessionId,
        terms: RequestTerms,
    ) -> Progress<Result<GrantAnswer, Errno>> {
        loop {
            match self.stage {
                GrantStage::Check => {
                    for want in &mut self.wants {
                        let checked = check_want(node.tree(), id, want).map_err(|error| report_store_error(&error));
                        *want = ok!(ok!(checked).ok_or_else(|| node.sessions.refusal(id)));
                    }
                    if self.wants.iter().any(|want| node.leasing.is_refused(&node.store, id, want)) {
                        return Progress::Done(Err(Errno::RESERVED));
                    }
                    self.stage = GrantStage::Decide;
                }
                GrantStage::Decide => {
                    done!(decide_next(node));
                    let wanted = self.widen(node, id, terms.bytes_max);
                    if let Some(answer) = answer_covered(node, id, &wanted) {
                        return Progress::Done(Ok(answer));
                    }
                    self.stage = GrantStage::Wait(ok!(request_leases(node, id, wanted)));
                }
                GrantStage::Wait(request) => {
                    done!(decide_next(node));
                    if let Some(answer) = node.leasing.answers.remove(&request) {
                        return Progress::Done(Ok(answer));
                    }
                    if node.ending || node.live(id).is_none_or(|session| session.is_ending) {
                        node.leasing.wanted.remove(&request);
                        return Progress::Done(Err(if node.ending { ENDING } else { Errno::EIO }));
                    }
                    if terms.patience == Patience::None {
                        self.cancel(node);
                        return Progress::Done(Err(LATER));
                    }
                    return Progress::Wait(WaitFor::Grants, Some(node.leasing.next_decision(node.now)));
                }
            }
        }
    }

    /// Gives up the request.
    pub fn cancel(&mut self, node: &mut NodeCore) {
        if let GrantStage::Wait(request) = self.stage {
            node.leasing.wanted.remove(&request);
            node.leasing.answers.remove(&request);
            node.leasing.manager.handle_cancel(request);
            if !decide_batch(node) {
                // It goes on with the rest.
                node.request_digest();
            }
        }
    }

    /// Adds what the session is likely to ask for next.
    fn widen(&self, node: &mut NodeCore, id: SessionId, bytes_max: usize) -> WantedLeases {
        // If there is no room, older leases make room.
        let top = node.sessions.get(&id).map_or(0, |session| session.lease_top);
        let _ = node.lease_tables().make_room(id, top + self.wants.len() as u32);
        let mut wants: Vec<_> =
            self.wants.iter().map(|want| widen_want(&node.store, &mut node.sessions, id, want)).collect();
        let asked = wants.len();
        // While other sessions wait, no session gets more than it asks for.
        if !node.leasing.manager.has_requests() {
            if let Some(session) = node.sessions.get_mut(&id) {
                add_read_ahead(&node.store, &node.leasing.manager, session, &mut wants);
            }
            let mut index = 0;
            wants.retain(|want| {
                index += 1;
                index <= asked
                    || !node.leasing.is_refused(&node.store, id, want)
                        && check_want(node.tree(), id, want).is_ok_and(|want| want.is_some())
            });
        }
        WantedLeases { wants, asked, bytes_max }
    }
}

/// Queues a session's request for leases.
fn request_leases(node: &mut NodeCore, id: SessionId, wanted: WantedLeases) -> Result<RequestId, Errno> {
    let now_us = node.now.since_boot_us();
    node.leasing.request_leases(&node.store, now_us, (id, node.sessions.is_mount(id)), wanted)
}

/// A session asks for leases on inodes that it names.
#[derive(Debug)]
pub struct AcquireTask {
    stage: AcquireStage,
}

#[derive(Debug)]
enum AcquireStage {
    Begin(Vec<LeaseRequest>),
    Apply(Vec<LeaseRequest>, ApplyOwn),
    Grant(GrantRequest),
}

impl AcquireTask {
    /// Asks for these leases.
    pub fn new(wants: Vec<LeaseRequest>) -> Self {
        Self { stage: AcquireStage::Begin(wants) }
    }

    /// Goes on.
    pub fn advance(
        &mut self,
        node: &mut NodeCore,
        id: SessionId,
        terms: RequestTerms,
    ) -> Progress<Result<GatedReply, Errno>> {
        loop {
            match &mut self.stage {
                AcquireStage::Begin(wants) => {
                    let wants = std::mem::take(wants);
                    let NodeCore { store, leasing, sessions, now, .. } = &mut *node;
                    self.stage = if is_extent_request((store, leasing), sessions, now.since_boot_us(), id, &wants) {
                        AcquireStage::Grant(GrantRequest::new(wants))
                    } else {
                        AcquireStage::Apply(wants, ApplyOwn::new(id))
                    };
                }
                AcquireStage::Apply(wants, apply) => {
                    ok!(done!(apply.advance(node, id, wants, terms.patience)));
                    let wants = std::mem::take(wants);
                    self.stage = AcquireStage::Grant(GrantRequest::new(wants));
                }
                AcquireStage::Grant(grant) => {
                    let GrantAnswer { grants, dependencies, applied, gate } =
                        ok!(done!(grant.advance(node, id, terms)));
                    let grants = ok!(grants);
                    return Progress::Done(Ok(GatedReply {
                        reply: Reply::Granted { grants, applied, dependencies },
                        gate,
                    }));
                }
            }
        }
    }

    /// Gives up the request.
    pub fn cancel(&mut self, node: &mut NodeCore) {
        if let AcquireStage::Grant(grant) = &mut self.stage {
            grant.cancel(node);
        }
    }
}

/// The entry that a session looks up.
#[derive(Clone, Debug)]
pub struct LookupTarget {
    /// The directory.
    pub directory: InodeId,
    /// The entry's name.
    pub name: Vec<u8>,
    /// The lease on the directory that the session lacks.
    pub within: Option<LeaseRequest>,
    /// If the entry is missing, the session makes it next.
    pub makes: bool,
    /// The session will write the found inode.
    pub write: bool,
    /// The state to send of the found inode.
    pub need: Need,
}

/// A session looks up one entry of a directory.
///
/// It is granted a lease on the entry's inode, and on the directory if it asks for one.
#[derive(Debug)]
pub struct LookupTask {
    target: LookupTarget,
    /// Conditions of answers that a later one replaces. The leases stay, and the states are sent again.
    before: GrantAnswer,
    stage: LookupStage,
}

#[derive(Debug)]
enum LookupStage {
    Begin,
    Apply(ApplyOwn),
    Directory(GrantRequest),
    Find,
    Entry(Option<Entry>, GrantRequest),
}

impl LookupTask {
    /// Looks up an entry.
    pub fn new(target: LookupTarget) -> Self {
        let before = GrantAnswer::without_grants(Default::default());
        Self { target, before, stage: LookupStage::Begin }
    }

    /// Goes on.
    pub fn advance(
        &mut self,
        node: &mut NodeCore,
        id: SessionId,
        terms: RequestTerms,
    ) -> Progress<Result<GatedReply, Errno>> {
        let directory = self.target.directory;
        loop {
            match &mut self.stage {
                LookupStage::Begin => {
                    ok!(Name::check(&self.target.name).map_err(|_| Errno::EINVAL));
                    if self.target.within.is_some_and(|within| within.lease.inode != directory) {
                        return Progress::Done(Err(Errno::EINVAL));
                    }
                    self.stage = LookupStage::Apply(ApplyOwn::new(id));
                }
                LookupStage::Apply(apply) => {
                    ok!(done!(apply.advance(node, id, self.target.within.as_slice(), terms.patience)));
                    ok!(check_directory(node.tree(), id, directory, Access::EXECUTE));
                    self.stage = match self.target.within {
                        // Changes that other sessions have made in the directory are visible only after the lease is
                        // taken from them.
                        Some(within) => LookupStage::Directory(GrantRequest::new(vec![LeaseRequest {
                            need: Need::default(),
                            ..within
                        }])),
                        None => LookupStage::Find,
                    };
                }
                LookupStage::Directory(grant) => {
                    let answer = ok!(done!(grant.advance(node, id, terms)));
                    self.before.keep_conditions(answer);
                    self.stage = LookupStage::Find;
                }
                LookupStage::Find => {
                    // Another session's log may have been applied, and may have narrowed the directory.
                    ok!(check_directory(node.tree(), id, directory, Access::EXECUTE));
                    let found =
                        ok!(find_entry(node.tree(), id, &self.target).map_err(|error| report_store_error(&error)));
                    let wants = self.wants(node, id, found.as_ref());
                    if wants.is_empty() {
                        let answer = GrantAnswer::without_grants(node.store.applied(id));
                        return Progress::Done(self.answer(&node.store, found, answer));
                    }
                    self.stage = LookupStage::Entry(found, GrantRequest::new(wants));
                }
                LookupStage::Entry(found, grant) => {
                    let answer = ok!(done!(grant.advance(node, id, terms)));
                    let found = found.take();
                    let now = node.store.entry(directory, &self.target.name);
                    // For the grant, SharedFS may have applied another session's log, and that may have changed the
                    // entry.
                    if ok!(now.map_err(|error| report_store_error(&error))) == found {
                        return Progress::Done(self.answer(&node.store, found, answer));
                    }
                    self.before.keep_conditions(answer);
                    self.stage = LookupStage::Find;
                }
            }
        }
    }

    /// Gives up the request.
    pub fn cancel(&mut self, node: &mut NodeCore) {
        if let LookupStage::Directory(grant) | LookupStage::Entry(_, grant) = &mut self.stage {
            grant.cancel(node);
        }
    }

    fn wants(&self, node: &mut NodeCore, id: SessionId, found: Option<&Entry>) -> Vec<LeaseRequest> {
        let LookupTarget { within, makes, write, need, .. } = self.target;
        let mut wants = Vec::with_capacity(2);
        let makes_entry = makes && found.is_none();
        let NodeCore { leasing, store, now, .. } = node;
        let mut is_covered = |inode, mode| leasing.find_covering(store, now.since_boot_us(), id, inode, mode).is_some();
        wants.extend(within.map(|within| if makes_entry { within.to_write() } else { within }));
        wants.extend(found.map(|found| {
            // A session that writes into a file follows a link to it, and does nothing to the link.
            let write = write && !(need.contents && found.kind == FileKind::Symlink);
            // A session that holds the lease already has asked for all the state that it wants.
            let is_held = need.entries && is_covered(found.inode, LeaseMode::new(write));
            let need = Need { entries: need.entries && !is_held, children: need.children && !is_held, ..need };
            LeaseRequest::on_inode(found.inode, write, need)
        }));
        wants
    }

    fn answer(&mut self, store: &Store, found: Option<Entry>, answer: GrantAnswer) -> Result<GatedReply, Errno> {
        let entry = found.map(|entry| DirectoryEntry {
            cookie: store.name_cookie(&self.target.name),
            name: self.target.name.clone(),
            inode: entry.inode,
            kind: entry.kind,
        });
        let GrantAnswer { grants, mut dependencies, applied, mut gate } = answer;
        gate.add(std::mem::take(&mut self.before.gate));
        dependencies.append(&mut self.before.dependencies);
        let mut grants = grants?;
        let is_first_directorys = self.target.within.is_some() && !grants.is_empty();
        let directory = is_first_directorys.then(|| grants.remove(0));
        Ok(GatedReply { reply: Reply::Entry { entry, directory, grants, applied, dependencies }, gate })
    }
}

/// Finds the entry of a lookup, and notes that the session has found it.
fn find_entry(tree: TreeView<'_>, id: SessionId, target: &LookupTarget) -> Result<Option<Entry>, StoreError> {
    let found = tree.store.entry(target.directory, &target.name)?;
    if let Some(found) = &found {
        tree.record_found(id, found.inode)?;
    }
    Ok(found)
}

/// A mount's session reserves an inode for the kernel.
#[derive(Debug)]
pub struct ReserveTask {
    inode: InodeId,
    reason: ReserveReason,
    stage: ReserveStage,
}

#[derive(Debug)]
enum ReserveStage {
    Apply(ApplyOwn),
    Take(GrantRequest),
}

impl ReserveTask {
    /// Reserves an inode.
    pub fn new(id: SessionId, inode: InodeId, reason: ReserveReason) -> Self {
        Self { inode, reason, stage: ReserveStage::Apply(ApplyOwn::new(id)) }
    }

    /// Goes on.
    pub fn advance(&mut self, node: &mut NodeCore, id: SessionId, terms: RequestTerms) -> Progress<Result<(), Errno>> {
        loop {
            match &mut self.stage {
                ReserveStage::Apply(apply) => {
                    // The log of the session that made it may not be applied yet.
                    let want = LeaseRequest::on_inode(self.inode, true, Need::default());
                    ok!(done!(apply.advance(node, id, &[want], terms.patience)));
                    let want = ok!(reserve(node, id, (self.inode, self.reason)));
                    self.stage = ReserveStage::Take(GrantRequest::new(vec![want]));
                }
                ReserveStage::Take(grant) => {
                    let answer = ok!(done!(grant.advance(node, id, terms)));
                    return Progress::Done(answer.grants.map(drop));
                }
            }
        }
    }

    /// Gives up the request.
    pub fn cancel(&mut self, node: &mut NodeCore) {
        if let ReserveStage::Take(grant) = &mut self.stage {
            grant.cancel(node);
        }
    }
}

/// Reserves an inode for the kernel of a session's mount.
fn reserve(node: &mut NodeCore, id: SessionId, reserved: (InodeId, ReserveReason)) -> Result<LeaseRequest, Errno> {
    let NodeCore { reservations, sessions, leasing, store, .. } = node;
    reservations.reserve(sessions.live(id).ok_or(Errno::EIO)?, reserved, leasing, store)
}

/// Takes the leases on inodes from all sessions: the state granted with them is no longer true.
///
/// A session without a process asks for them, and ends.
#[derive(Debug)]
pub struct TakeFromAll {
    left: Vec<InodeId>,
    taker: Option<SessionId>,
    request: Option<RequestId>,
}

impl TakeFromAll {
    /// Takes the leases on these inodes.
    pub fn new(inodes: Vec<InodeId>) -> Self {
        Self { left: inodes, taker: None, request: None }
    }

    /// Goes on. The result is `EIO` if the shared area fails, or [`ENDING`].
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<Result<(), Errno>> {
        let taker = match self.taker {
            Some(taker) => taker,
            None => {
                let taker = ok!(node.store.next_session_id().map_err(|error| report_store_error(&error)));
                *self.taker.insert(taker)
            }
        };
        loop {
            let Some(request) = self.request else {
                let Some(inode) = self.left.pop() else {
                    end_leases(node, taker);
                    return Progress::Done(Ok(()));
                };
                let want = LeaseRequest::on_inode(inode, true, Need::default());
                let wanted = WantedLeases { wants: vec![want], asked: 1, bytes_max: usize::MAX };
                self.request = Some(ok!(request_leases(node, taker, wanted)));
                continue;
            };
            done!(decide_next(node));
            if node.leasing.answers.remove(&request).is_some() {
                self.request = None;
                continue;
            }
            if node.ending {
                return Progress::Done(Err(ENDING));
            }
            return Progress::Wait(WaitFor::Grants, Some(node.leasing.next_decision(node.now)));
        }
    }
}
