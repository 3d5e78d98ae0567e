//! Grants leases to sessions, with the state that comes with them.
//!
//! It performs the lease manager's decisions.

use std::io;
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_lease::{Command, Grant, RequestId, RevokeReason, SlotWord};
use ashlar_store::StoreError;
use ashlar_types::{
    Access, Contents, Credentials, Errno, Extent, FileKind, Inode, InodeId, LeaseMode, LeaseScope, LogPosition, Name,
    SessionId, WantedLease, blocks_for,
};
use ashlar_update::acl::Acl;
use ashlar_update::permission::allows;
use ashlar_update::xattr_size::attribute_bytes;
use ashlar_update::{XATTR_ACL_ACCESS, XATTR_HIDDEN};
use ashlar_wire::{DirectoryEntry, GrantReply, InodeState, LeaseRequest, LeaseWord, Need, Reply, SessionKind};
use parking_lot::MutexGuard;

use crate::apply::Slice;
use crate::grant_cache;
use crate::invalidation;
use crate::leasing::{Ancestors, WantedLeases, home_of};
use crate::mount_notifier::{NotificationTicket, Notifier};
use crate::read_ahead;
use crate::scan_detection;
use crate::session::ServedSession;
use crate::session_page;
use crate::shared_state::{SharedState, StateGuard};
use crate::state::State;
use crate::ways::{TRUSTED_PREFIX, USER_PREFIX};

/// Updates of other sessions on which a grant depends.
type Dependencies = Vec<(SessionId, LogPosition)>;

/// How long a request that must wait pauses before it checks again.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(10);
/// The same while it waits for a session to use its fresh grant.
///
/// That rarely takes longer.
const PAUSE_IN_USE: Duration = Duration::from_micros(50);

/// The answer to a request, until the requesting thread takes it.
///
/// It is made when the leases are granted.
#[derive(Debug)]
pub struct GrantAnswer {
    grants: Result<Vec<GrantReply>, Errno>,
    dependencies: Dependencies,
    /// How far the session's own log was part of the state then.
    applied: LogPosition,
    /// Notifications that kernels must have received before the answer may be sent.
    tickets: Vec<Arc<NotificationTicket>>,
    /// Files whose pages kernels must have dropped by then.
    pages: Vec<(Arc<Notifier>, InodeId)>,
}

/// Returns the time since boot.
///
/// The clock runs through suspension and is the same for all processes.
pub fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

pub fn now_us() -> u64 {
    boot_time().as_micros() as u64
}

/// Whether a request may sleep until it can be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// It may.
    Any,
    /// It fails with [`SharedState::LATER`].
    ///
    /// The session asks again by message, and then receives whatever was granted meanwhile.
    None,
}

/// The entry that a session looks up.
#[derive(Debug)]
pub struct LookupTarget<'a> {
    pub directory: InodeId,
    pub name: &'a [u8],
    /// The lease on the directory that the session lacks.
    pub within: Option<LeaseRequest>,
    /// If the entry is missing, the session makes it next.
    pub makes: bool,
    /// The session will write the found inode.
    pub write: bool,
    /// The state to send of the found inode.
    pub need: Need,
}

/// Applies what a session has logged; without patience, only if one batch suffices.
pub fn lock_applied(shared: &SharedState, id: SessionId, patience: Patience) -> Result<StateGuard<'_>, Errno> {
    let mut state = shared.lock();
    if patience == Patience::Any {
        return Ok(shared.apply_settled(state, id));
    }
    // More than one batch takes a while.
    let is_applied = state.settled(id).is_none_or(|settled| state.apply(id, settled, Slice::Batch));
    shared.perform_decisions(&mut state);
    if is_applied { Ok(state) } else { Err(SharedState::LATER) }
}

/// Applies what a session has logged.
///
/// If an inode is missing that another session may have made, it applies the other logs too.
pub fn begin_request<'a>(
    shared: &'a SharedState,
    id: SessionId,
    wants: &[LeaseRequest],
    patience: Patience,
) -> Result<StateGuard<'a>, Errno> {
    let mut state = lock_applied(shared, id, patience)?;
    if patience == Patience::None {
        return if check_exists(&state, wants).is_ok() {
            check_scopes(&state, wants)?;
            Ok(state)
        } else {
            Err(SharedState::LATER)
        };
    }
    if check_exists(&state, wants).is_err() {
        // A session that has the number from a descriptor may ask before the log of the inode's maker is applied.
        let may_be_made = |want: &LeaseRequest| {
            state.sessions.values().any(|session| session.id != id && session.ranges.contains(want.lease.inode))
        };
        if wants.iter().any(may_be_made) {
            state = shared.apply_all_settled(state);
        }
        check_exists(&state, wants)?;
        state.live(id).ok_or(Errno::EIO)?;
    }
    check_scopes(&state, wants)?;
    Ok(state)
}

/// Grants leases, with state.
pub fn acquire(
    shared: &SharedState,
    id: SessionId,
    wants: &[LeaseRequest],
    patience: Patience,
    bytes_max: usize,
) -> Result<Reply, Errno> {
    let mut state = shared.lock();
    if !is_extent_request(&mut state, id, wants) {
        drop(state);
        state = begin_request(shared, id, wants, patience)?;
    }
    let answer = request_grant(shared, &mut state, id, wants, (patience, bytes_max))?;
    let (applied, not_before) = (answer.applied, state.not_before);
    drop(state);
    let (grants, dependencies) = answer.finish(not_before, patience)?;
    Ok(Reply::Granted { grants, applied, dependencies })
}

/// Returns whether a session asks only for extents under leases that it holds.
///
/// The session itself applies to the answer what it has logged and SharedFS has not applied yet. So it need not wait
/// for that: otherwise a program that reads back what it wrote would wait for the digest of all that it has written
/// since.
fn is_extent_request(state: &mut State, id: SessionId, wants: &[LeaseRequest]) -> bool {
    // A session that knows nothing of an inode wants its extended attributes, too.
    let is_of_bytes = |want: &LeaseRequest| {
        let Need { contents, entries, xattrs, .. } = want.need;
        contents && !entries && !xattrs && want.lease.scope == LeaseScope::Node
    };
    state.live(id).is_some()
        && wants.iter().all(is_of_bytes)
        && check_exists(state, wants).is_ok()
        && wants.iter().all(|want| state.covering_lease(now_us(), id, want.lease.inode, want.lease.mode).is_some())
}

/// Looks up one entry of a directory.
///
/// It grants a lease on the entry's inode, and on the directory if the session asks for one.
pub fn lookup(
    shared: &SharedState,
    id: SessionId,
    sought: &LookupTarget<'_>,
    patience: Patience,
    bytes_max: usize,
) -> Result<Reply, Errno> {
    let &LookupTarget { directory, name, within, makes, write, need } = sought;
    Name::check(name).map_err(|_| Errno::EINVAL)?;
    if within.is_some_and(|within| within.lease.inode != directory) {
        return Err(Errno::EINVAL);
    }
    let mut wants = Vec::with_capacity(2);
    let mut state = begin_request(shared, id, within.as_slice(), patience)?;
    check_directory(&state, id, directory, Access::EXECUTE)?;
    let mut before = ReplacedAnswers::default();
    if let Some(within) = within {
        // Changes that other sessions have made in the directory are visible only after the lease is taken from them.
        before.keep_conditions(request_grant(
            shared,
            &mut state,
            id,
            &[LeaseRequest { need: Need::default(), ..within }],
            (patience, bytes_max),
        )?);
    }
    let (entry, answer) = loop {
        // Another session's log may have been applied, and may have narrowed the directory.
        check_directory(&state, id, directory, Access::EXECUTE)?;
        let found = state.store.entry(directory, name).map_err(|error| report_store_error(&error))?;
        if let Some(found) = &found {
            state.record_found(id, found.inode).map_err(|error| report_store_error(&error))?;
        }
        wants.clear();
        let makes_entry = makes && found.is_none();
        wants.extend(within.map(|within| if makes_entry { within.to_write() } else { within }));
        wants.extend(found.map(|found| {
            // A session that writes into a file follows a link to it, and does nothing to the link.
            let write = write && !(need.contents && found.kind == FileKind::Symlink);
            // A session that holds the lease already has asked for all the state that it wants.
            let is_held =
                need.entries && state.covering_lease(now_us(), id, found.inode, LeaseMode::new(write)).is_some();
            let need = Need { entries: need.entries && !is_held, children: need.children && !is_held, ..need };
            LeaseRequest::on_inode(found.inode, write, need)
        }));
        let answer = if wants.is_empty() {
            None
        } else {
            Some(request_grant(shared, &mut state, id, &wants, (patience, bytes_max))?)
        };
        // For the grant, SharedFS may have applied another session's log, and that may have changed the entry.
        if state.store.entry(directory, name).map_err(|error| report_store_error(&error))? == found {
            break (found, answer);
        }
        answer.into_iter().for_each(|answer| before.keep_conditions(answer));
    };
    let entry = entry.map(|entry| DirectoryEntry {
        cookie: state.store.name_cookie(name),
        name: name.to_vec(),
        inode: entry.inode,
        kind: entry.kind,
    });
    let applied = state.store.applied(id);
    let nothing = || GrantAnswer {
        grants: Ok(Vec::new()),
        dependencies: Vec::new(),
        applied,
        tickets: Vec::new(),
        pages: Vec::new(),
    };
    let mut answer = answer.unwrap_or_else(nothing);
    let (applied, not_before) = (answer.applied, state.not_before);
    drop(state);
    answer.tickets.append(&mut before.tickets);
    answer.pages.append(&mut before.pages);
    answer.dependencies.append(&mut before.dependencies);
    let (mut grants, dependencies) = answer.finish(not_before, patience)?;
    let directory = within.and_then(|_| if grants.is_empty() { None } else { Some(grants.remove(0)) });
    Ok(Reply::Entry { entry, directory, grants, applied, dependencies })
}

/// The remains of answers that a later answer replaces.
#[derive(Debug, Default)]
struct ReplacedAnswers {
    dependencies: Dependencies,
    tickets: Vec<Arc<NotificationTicket>>,
    pages: Vec<(Arc<Notifier>, InodeId)>,
}

impl ReplacedAnswers {
    /// Keeps the conditions of a replaced answer.
    ///
    /// The leases stay. The states are sent again, so whether the replaced answer had any means nothing.
    fn keep_conditions(&mut self, mut answer: GrantAnswer) {
        self.dependencies.append(&mut answer.dependencies);
        self.tickets.append(&mut answer.tickets);
        self.pages.append(&mut answer.pages);
    }
}

/// Fails unless a session reaches a directory and has an access to it.
///
/// Reading goes on where it began before the directory was narrowed.
fn check_directory(state: &State, id: SessionId, directory: InodeId, access: Access) -> Result<(), Errno> {
    let Some(session) = state.ordinary_session(id) else { return Ok(()) };
    let found = state.store.inode(directory).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    let inode = (directory, &found);
    let is_reached = state.reaches(session, inode).map_err(|error| report_store_error(&error))?;
    if !is_reached {
        return Err(session.refusal());
    }
    let allowed =
        if access == Access::READ { state.may_read(session, inode) } else { state.may_search(session, inode) };
    if allowed.map_err(|error| report_store_error(&error))? { Ok(()) } else { Err(Errno::EACCES) }
}

/// Returns a page of a directory.
///
/// # Errors
/// `EACCES` if the session's user may not read it; `EIO`.
pub fn read_directory(
    shared: &SharedState,
    id: SessionId,
    directory: InodeId,
    after: u64,
    limit: u32,
) -> Result<Reply, Errno> {
    let limit = (limit as usize).min(Need::ENTRIES_MAX as usize);
    let state = shared.lock();
    check_directory(&state, id, directory, Access::READ)?;
    let entries = state.store.entries(directory, after, limit).map_err(|error| report_store_error(&error))?;
    Ok(Reply::Entries(entries.into_iter().map(directory_entry).collect()))
}

fn directory_entry((cookie, name, entry): (u64, Name, ashlar_update::Entry)) -> DirectoryEntry {
    DirectoryEntry { cookie, name: name.as_bytes().to_vec(), inode: entry.inode, kind: entry.kind }
}

pub fn report_store_error(error: &StoreError) -> Errno {
    tracing::error!(%error, "the shared area can't be read");
    Errno::EIO
}

fn check_exists(state: &State, wants: &[LeaseRequest]) -> Result<(), Errno> {
    for want in wants {
        let exists = want.lease.inode == InodeId::RENAME
            || state.store.inode(want.lease.inode).map_err(|error| report_store_error(&error))?.is_some();
        if !exists {
            return Err(Errno::ESTALE);
        }
    }
    Ok(())
}

/// Fails if a session asks for a scope that no session asks for.
///
/// Only SharedFS grants the files of a directory at once, and only directories have something below them.
fn check_scopes(state: &State, wants: &[LeaseRequest]) -> Result<(), Errno> {
    for want in wants {
        let is_odd = match want.lease.scope {
            LeaseScope::Node => false,
            LeaseScope::Files => true,
            LeaseScope::Subtree => {
                let found = state.store.inode(want.lease.inode).map_err(|error| report_store_error(&error))?;
                found.is_none_or(|found| !found.is_directory())
            }
        };
        if is_odd {
            return Err(Errno::EINVAL);
        }
    }
    Ok(())
}

impl GrantAnswer {
    /// Waits until no kernel believes anything that the grants make untrue.
    fn finish(self, not_before: Instant, patience: Patience) -> Result<(Vec<GrantReply>, Dependencies), Errno> {
        let now = Instant::now();
        let waits = not_before > now
            || self.tickets.iter().any(|ticket| !ticket.is_done())
            || self.pages.iter().any(|(notifier, inode)| notifier.owes_pages(*inode));
        if waits && patience == Patience::None {
            return Err(SharedState::LATER);
        }
        if not_before > now {
            std::thread::sleep(not_before - now);
        }
        for ticket in self.tickets {
            ticket.wait();
        }
        for (notifier, inode) in self.pages {
            notifier.wait_pages(inode);
        }
        Ok((self.grants?, self.dependencies))
    }
}

/// Requests a grant and waits for it.
///
/// On the way, requests of other sessions that come first are served. The answer is [`SharedState::LONG`] if it would
/// take more than `bytes_max` bytes of memory.
fn request_grant(
    shared: &SharedState,
    state: &mut MutexGuard<'_, State>,
    id: SessionId,
    wants: &[LeaseRequest],
    (patience, bytes_max): (Patience, usize),
) -> Result<GrantAnswer, Errno> {
    let mut wants = wants.to_vec();
    for want in &mut wants {
        *want = check_want(state, id, want)
            .map_err(|error| report_store_error(&error))?
            .ok_or_else(|| refusal(state, id))?;
    }
    if wants.iter().any(|want| state.is_refused(id, want)) {
        return Err(Errno::RESERVED);
    }
    shared.perform_decisions(state);
    // If there is no room, older leases make room.
    let top = state.sessions.get(&id).map_or(0, |session| session.lease_top);
    let _ = make_lease_room(state, id, top + wants.len() as u32);
    let mut wants: Vec<_> = wants.iter().map(|want| widen_want(state, id, want)).collect();
    let asked = wants.len();
    // While other sessions wait, no session gets more than it asks for.
    if !state.leasing.manager.has_requests() {
        read_ahead::add_read_ahead(state, id, &mut wants);
        let mut index = 0;
        wants.retain(|want| {
            index += 1;
            index <= asked
                || !state.is_refused(id, want) && check_want(state, id, want).is_ok_and(|want| want.is_some())
        });
    }
    let wanted = WantedLeases { wants, asked, bytes_max };
    if let Some(answer) = answer_covered(state, id, &wanted) {
        return Ok(answer);
    }
    let request = state.request_leases(now_us(), id, wanted)?;
    loop {
        let wait = shared.perform_decisions(state);
        if let Some(answer) = state.leasing.answers.remove(&request) {
            return Ok(answer);
        }
        if state.ending || state.live(id).is_none_or(|session| session.is_ending) {
            state.leasing.wanted.remove(&request);
            return Err(if state.ending { SharedState::ENDING } else { Errno::EIO });
        }
        if patience == Patience::None {
            state.leasing.wanted.remove(&request);
            state.leasing.manager.handle_cancel(request);
            shared.perform_decisions(state);
            return Err(SharedState::LATER);
        }
        shared.grants_changed.wait_for(state, pause_until(wait));
    }
}

/// Returns the error for a session that does not reach what it asks for.
fn refusal(state: &State, id: SessionId) -> Errno {
    state.sessions.get(&id).map_or(Errno::EIO, ServedSession::refusal)
}

/// Returns what a session is granted of what it wants; `None` if it does not reach the inode.
///
/// Without a right to change anything of the inode, it gets a lease to read: LibFS asks before it knows the rights.
fn check_want(state: &State, id: SessionId, want: &LeaseRequest) -> Result<Option<LeaseRequest>, StoreError> {
    let (Some(session), Some(found)) = (state.ordinary_session(id), state.store.inode(want.lease.inode)?) else {
        return Ok(Some(*want));
    };
    if !state.reaches(session, (want.lease.inode, &found))? {
        return Ok(None);
    }
    let write = want.lease.mode.is_write() && state.may_change(session, (want.lease.inode, &found))?;
    let scope = if write || want.lease.scope == LeaseScope::Files { want.lease.scope } else { LeaseScope::Node };
    let lease = WantedLease { inode: want.lease.inode, mode: LeaseMode::new(write), scope };
    Ok(Some(LeaseRequest { lease, ..*want }))
}

/// Takes from a state what a session's user may not see.
fn hide_unreadable(state: &State, id: SessionId, inode: InodeId, described: &mut InodeState) -> Result<(), StoreError> {
    let Some(session) = state.ordinary_session(id) else { return Ok(()) };
    let found = (inode, &described.attributes);
    let may_read = state.may_read(session, found)?;
    if let Some(xattrs) = described.xattrs.as_mut().filter(|xattrs| !xattrs.is_empty()) {
        let may_change = state.may_change(session, found)?;
        let hidden = xattrs.extract_if(.., |(name, _)| name.starts_with(TRUSTED_PREFIX));
        let hidden: usize = hidden.map(|(name, value)| attribute_bytes(&name, &value)).sum();
        if hidden > 0 && may_change {
            xattrs.push((XATTR_HIDDEN.to_vec(), vec![0; hidden - attribute_bytes(XATTR_HIDDEN, &[])]));
        }
        // A user that may not read the inode may list the names. If it may add attributes, it must know the sizes.
        let values = xattrs.iter_mut().filter(|(name, _)| !may_read && name.starts_with(USER_PREFIX));
        values.for_each(|(_, value)| if may_change { value.fill(0) } else { value.clear() });
    }
    if may_read {
        return Ok(());
    }
    described.hides_entries = described.entries.take().is_some();
    described.contents = described.contents.take().map(withhold);
    Ok(())
}

/// Returns content for a user that may not read it: which blocks there are.
fn withhold(contents: Contents) -> Contents {
    Contents::Withheld(match contents {
        Contents::Inline(bytes) if bytes.is_empty() => Vec::new(),
        Contents::Inline(bytes) => {
            vec![Extent { logical_block: 0, blocks: blocks_for(bytes.len() as u64), address: None }]
        }
        Contents::Extents(extents) | Contents::Withheld(extents) => {
            extents.into_iter().map(|extent| Extent { address: None, ..extent }).collect()
        }
    })
}

/// Takes leases for a session without sending it any state yet.
///
/// # Errors
/// As for leases that a session asks for.
pub fn take_leases(
    shared: &SharedState,
    state: &mut MutexGuard<'_, State>,
    id: SessionId,
    wants: &[LeaseRequest],
) -> Result<(), Errno> {
    request_grant(shared, state, id, wants, (Patience::Any, usize::MAX))?.grants.map(drop)
}

/// Widens a want to what the session is likely to access next.
fn widen_want(state: &mut State, id: SessionId, want: &LeaseRequest) -> LeaseRequest {
    // If no state is to be sent, no further state is sent either.
    if want.lease.mode.is_write() || want.lease.scope != LeaseScope::Node || want.need == Need::default() {
        return *want;
    }
    let inode = |inode| state.store.inode(inode).ok().flatten();
    let Some(found) = inode(want.lease.inode) else { return *want };
    if found.is_directory() && found.entries <= scan_detection::LISTED_ENTRIES_MAX {
        return LeaseRequest { need: Need { entries: true, children: true, ..want.need }, ..*want };
    }
    let directory = home_of(want.lease.inode, &found).as_file();
    let entries = directory.and_then(inode).map(|found| found.entries);
    let (Some(directory), Some(entries), Some(session)) = (directory, entries, state.sessions.get_mut(&id)) else {
        return *want;
    };
    let scope = if session.scans.record_access(directory, entries, want.need.contents) {
        LeaseScope::Files
    } else {
        LeaseScope::Node
    };
    LeaseRequest { lease: WantedLease { scope, ..want.lease }, ..*want }
}

/// Answers a want that the session's leases cover, ahead of waiting sessions.
fn answer_covered(state: &mut State, id: SessionId, wanted: &WantedLeases) -> Option<GrantAnswer> {
    let (mut grants, mut dependencies) = (Vec::with_capacity(wanted.wants.len()), Vec::new());
    for want in &wanted.wants {
        // Other sessions may hold leases below a directory that a session's lease covers: only the manager takes those.
        if want.lease.scope == LeaseScope::Subtree {
            return None;
        }
        let (grant, shown) = state.covering_lease(now_us(), id, want.lease.inode, want.lease.mode)?;
        grants.push(grant);
        dependencies.extend(shown);
    }
    Some(make_answer(state, id, wanted, &grants, dependencies))
}

/// Performs the lease manager's commands until there is none, and until the logs that they seal are applied.
///
/// `between` is called with the state after each batch that leaves a part of such a log. Returns whether requests were
/// answered, and when to go on, if there is such a time.
pub fn perform_decisions<S: DerefMut<Target = State>>(state: &mut S, between: impl Fn(&mut S)) -> (bool, Option<u64>) {
    let mut answered = false;
    loop {
        answered |= perform_commands(state);
        match state.apply_sealed() {
            None => break,
            Some(true) => {}
            Some(false) => between(state),
        }
    }
    for session in state.sessions.values() {
        if session_page::is_revoking(&*session.page) {
            // The page is mapped whole, so the store can't miss it.
            let _ = session_page::set_revoking(&*session.page, false);
        }
    }
    (answered, state.leasing.manager.next_time_us())
}

/// Performs the lease manager's commands until there is none; returns whether requests were answered.
fn perform_commands(state: &mut State) -> bool {
    let mut answered = false;
    loop {
        let State { leasing, store, sessions, .. } = state;
        let is_using = |id: SessionId| sessions.get(&id).is_some_and(|session| session.control.is_using());
        match leasing.manager.poll_command(now_us(), &Ancestors(store), &is_using) {
            Some(Command::Grant { session, request, grants, dependencies }) => {
                answered = true;
                store_answer(state, session, request, &grants, dependencies);
            }
            Some(command) => perform_command(state, &command),
            None => match state.leasing.take_dropped() {
                Some(fenced) => {
                    state.store.release_all(fenced);
                    state.leasing.manager.handle_session_end(fenced);
                }
                None => return answered,
            },
        }
    }
}

/// Takes all leases of a session that is over.
pub fn end_leases(state: &mut State, id: SessionId) {
    state.leasing.manager.handle_session_end(id);
    perform_decisions(&mut &mut *state, |_| {});
}

/// Takes the leases on these inodes from all sessions.
///
/// The state granted with them is no longer true. A session without a process asks for them, and ends.
///
/// # Errors
/// `EIO` if the shared area fails; [`SharedState::ENDING`].
pub fn take_from_all(shared: &SharedState, state: &mut MutexGuard<'_, State>, inodes: &[InodeId]) -> Result<(), Errno> {
    let nobody = state.store.next_session_id().map_err(|error| report_store_error(&error))?;
    for &inode in inodes {
        let want = LeaseRequest::on_inode(inode, true, Need::default());
        let request = state.request_leases(
            now_us(),
            nobody,
            WantedLeases { wants: vec![want], asked: 1, bytes_max: usize::MAX },
        )?;
        loop {
            let wait = shared.perform_decisions(state);
            if state.leasing.answers.remove(&request).is_some() {
                break;
            }
            if state.ending {
                return Err(SharedState::ENDING);
            }
            shared.grants_changed.wait_for(state, pause_until(wait));
        }
    }
    end_leases(state, nobody);
    Ok(())
}

/// Returns how long to wait for a grant before asking the lease manager again.
fn pause_until(until_us: Option<u64>) -> Duration {
    until_us
        .map_or(PAUSE_MAX, |until| Duration::from_micros(until.saturating_sub(now_us())).clamp(PAUSE_MIN, PAUSE_IN_USE))
}

fn perform_command(state: &mut State, command: &Command) {
    match command {
        Command::Revoke { word, reason: RevokeReason::Folded | RevokeReason::Ended } => take_word(state, word),
        Command::Revoke { word, .. } => take_word_and_notify(state, word, word.inode, word.scope),
        Command::Downgrade { word } => take_word(state, word),
        Command::Split { word, hole: Some(hole) } if !hole.keeps_read => {
            take_word_and_notify(state, word, hole.inode, hole.scope);
        }
        Command::Split { word, .. } => take_word(state, word),
        Command::Attach { word } => write_word(state, word),
        Command::SealAndApply { session } => state.seal(*session),
        Command::Grant { .. } | Command::Wait { .. } => {}
    }
}

/// Writes a word that takes something from its session.
///
/// From here until its log is applied, the log may hold records that are valid under the old word. A restart must know
/// that.
fn take_word(state: &mut State, word: &SlotWord) {
    if let Some(session) = state.sessions.get_mut(&word.session) {
        state.counters.leases_revoked += 1;
        session.leases_revoked += 1;
        // The page is mapped whole, so the store can't miss it.
        let _ = session_page::set_revoking(&*session.page, true);
    }
    write_word(state, word);
    // No handle is opened under the lease from here on.
    state.note_opened(word.session, word.inode, word.scope);
}

/// Writes such a word also for a mount, and queues a notification of its kernel.
fn take_word_and_notify(state: &mut State, word: &SlotWord, inode: InodeId, scope: LeaseScope) {
    invalidation::begin_invalidation(state, word.session);
    take_word(state, word);
    invalidation::queue_invalidation(state, word.session, inode, scope);
}

/// Writes down leases that sessions hold without having been sent them.
///
/// That must happen before SharedFS publishes the position up to which it has validated their records. After a restart
/// in between, SharedFS would otherwise validate later records by a table that lacks these leases.
pub fn write_attached(state: &mut State) {
    loop {
        let words: Vec<_> = state.leasing.manager.take_attached().collect();
        if words.is_empty() {
            return;
        }
        // If a table grows for one word, further words have room in it.
        words.iter().for_each(|word| write_word(state, word));
    }
}

/// Returns the lease word for a slot word.
pub fn lease_word(word: &SlotWord) -> LeaseWord {
    match word.mode {
        None => LeaseWord::revoked(word.generation),
        Some(mode) => LeaseWord::new(word.generation, word.scope, mode.is_write()),
    }
}

fn write_word(state: &mut State, word: &SlotWord) {
    let is_recorded = word.slot != SlotWord::UNRECORDED;
    if is_recorded && state.leasing.manager.is_superseded(word) {
        return;
    }
    if let Some(session) = state.sessions.get_mut(&word.session) {
        if is_recorded {
            session.set_lease(word.slot, lease_word(word), word.inode);
        }
        // If there was no room a moment ago, the next request tries again.
        if !session.lacks_lease_room {
            let slot = if is_recorded { word.slot } else { session.lease_room };
            let _ = make_lease_room(state, word.session, slot);
        }
    } else if let Some(grant_cache) = state.grant_cache.as_ref().filter(|_| is_recorded) {
        grant_cache.write_word(word);
    }
}

/// Gives a session's lease table more room, if this slot is near its end.
///
/// # Errors
/// As [`ServedSession::make_lease_room`].
pub fn make_lease_room(state: &mut State, id: SessionId, slot: u32) -> io::Result<()> {
    let Some(session) = state.sessions.get_mut(&id) else { return Ok(()) };
    let before = session.lease_room;
    let made = session.make_lease_room(slot);
    let after = session.lease_room;
    if after != before {
        state.leasing.manager.set_table_slots(id, after);
    }
    made
}

fn store_answer(state: &mut State, id: SessionId, request: RequestId, grants: &[Grant], dependencies: Dependencies) {
    let wanted = state.leasing.wanted.remove(&request);
    let is_waited_for = wanted.is_some();
    // The words must stand even if no thread waits for the answer any more.
    let answer = make_answer(state, id, &wanted.unwrap_or_default(), grants, dependencies);
    if is_waited_for {
        state.leasing.answers.insert(request, answer);
    }
}

fn make_answer(
    state: &mut State,
    id: SessionId,
    wanted: &WantedLeases,
    grants: &[Grant],
    mut dependencies: Dependencies,
) -> GrantAnswer {
    for grant in grants {
        write_word(state, &grant.word);
        if let Some(session) = state.sessions.get_mut(&grant.word.session) {
            session.leases_granted += 1;
        }
    }
    state.counters.leases_granted += grants.len() as u64;
    let tickets = state.leasing.tickets.iter().filter(|ticket| {
        let stale = ticket.stale();
        stale.subtree || grants.iter().any(|g| g.inode == stale.inode || g.word.scope != LeaseScope::Node)
    });
    let tickets: Vec<_> = tickets.map(Arc::clone).collect();
    let grants = grant_replies(state, id, wanted, grants, &mut dependencies);
    if state.not_before <= Instant::now() && tickets.iter().all(|ticket| ticket.is_done()) {
        grant_cache::publish(state, grants.as_deref().unwrap_or(&[]));
    }
    dependencies.sort_unstable();
    dependencies.dedup();
    let pages = find_pages_to_drop(state, id, wanted);
    GrantAnswer { grants, dependencies, applied: state.store.applied(id), tickets, pages }
}

/// Returns files whose pages a mount's kernel must drop first.
///
/// A program is about to write them. Another process may have them mapped through the mount, and is to see these
/// writes. A mount waits for no pages, since the request may be in flight that has locked them.
fn find_pages_to_drop(state: &State, id: SessionId, wanted: &WantedLeases) -> Vec<(Arc<Notifier>, InodeId)> {
    let is_program = |session: &ServedSession| session.identity.kind == SessionKind::Process;
    if !state.sessions.get(&id).is_some_and(is_program) {
        return Vec::new();
    }
    let notifiers = state.sessions.values().filter_map(|session| Some((session, session.notifier.as_ref()?)));
    let notifiers: Vec<_> = notifiers.collect();
    let written = wanted.wants.iter().filter(|want| want.lease.mode.is_write()).map(|want| want.lease.inode);
    let owed = written.flat_map(|inode| {
        let owes = move |(session, notifier): &&(&ServedSession, &Arc<Notifier>)| {
            session.control.has_open(inode) && notifier.owes_pages(inode)
        };
        notifiers.iter().filter(owes).map(move |(_, notifier)| (Arc::clone(*notifier), inode))
    });
    owed.collect()
}

/// Bytes of unasked state in one answer, which are limited.
#[derive(Debug, Default)]
struct UnaskedBytes {
    /// Attributes, including extended ones.
    bytes: usize,
    /// Contents of files.
    content_bytes: usize,
}

fn grant_replies(
    state: &mut State,
    id: SessionId,
    wanted: &WantedLeases,
    grants: &[Grant],
    dependencies: &mut Dependencies,
) -> Result<Vec<GrantReply>, Errno> {
    if grants.len() < wanted.wants.len() {
        return Err(Errno::EIO);
    }
    let mut replies = Vec::with_capacity(grants.len());
    let mut children = Vec::new();
    let mut unasked = UnaskedBytes::default();
    let mut bytes = 0;
    for (index, (want, grant)) in wanted.wants.iter().zip(grants).enumerate() {
        let is_asked = index < wanted.asked;
        // The state of an inode is sent once, however often the session asks for it.
        let is_sent = |earlier: &LeaseRequest| earlier.lease.inode == want.lease.inode && earlier.need == want.need;
        let want = &if wanted.wants[..index].iter().any(is_sent) {
            LeaseRequest { need: Need::default(), ..*want }
        } else {
            *want
        };
        let need = Need {
            xattrs: want.need.xattrs && unasked.bytes < scan_detection::ATTRIBUTE_BYTES_MAX,
            contents: want.need.contents && is_asked,
            ..want.need
        };
        let mut described = match load_state(state, grant.inode, need).map_err(|error| report_store_error(&error))? {
            Some(described) => described,
            None if is_asked => return Err(Errno::ESTALE),
            // It was freed while logs of other sessions were applied.
            None => continue,
        };
        if !is_reached(state, id, grant.inode, &described)? {
            // Another session's log was applied, and narrowed a directory that leads to it.
            if is_asked {
                return Err(refusal(state, id));
            }
            continue;
        }
        unasked.bytes += xattr_bytes(&described);
        let sends_contents =
            !is_asked && want.need.contents && unasked.content_bytes < scan_detection::CONTENT_BYTES_MAX;
        if (sends_contents || is_short_first_access(want, &described)) && may_send_contents(state, id, &described) {
            let contents = state.store.contents(grant.inode).map_err(|error| report_store_error(&error))?;
            unasked.content_bytes += content_bytes(&contents);
            described.contents = Some(contents);
        }
        hide_unreadable(state, id, grant.inode, &mut described).map_err(|error| report_store_error(&error))?;
        bytes += state_bytes(&described);
        if bytes > wanted.bytes_max {
            return Err(SharedState::LONG);
        }
        let reply = make_reply(grant, described);
        if want.need.children && grant.word.scope == LeaseScope::Subtree {
            add_children(state, id, &reply, grant, &mut unasked, &mut children, dependencies)
                .map_err(|error| report_store_error(&error))?;
        }
        if !want.lease.mode.is_write() && grant.word.scope != LeaseScope::Node {
            let reads = want.need.contents;
            add_siblings(state, id, (&reply, reads), grant, &mut unasked, &mut children, dependencies)
                .map_err(|error| report_store_error(&error))?;
        }
        replies.push(reply);
    }
    replies.append(&mut children);
    Ok(replies)
}

fn is_reached(state: &State, id: SessionId, inode: InodeId, described: &InodeState) -> Result<bool, Errno> {
    let Some(session) = state.ordinary_session(id) else { return Ok(true) };
    state.reaches(session, (inode, &described.attributes)).map_err(|error| report_store_error(&error))
}

fn make_reply(grant: &Grant, state: InodeState) -> GrantReply {
    GrantReply { inode: grant.inode, slot: grant.word.slot, word: lease_word(&grant.word).0, state }
}

/// Adds the attributes of those entries that the directory's own lease governs too.
///
/// Extended attributes go along until there are enough of them.
fn add_children(
    state: &mut State,
    id: SessionId,
    directory: &GrantReply,
    grant: &Grant,
    unasked: &mut UnaskedBytes,
    children: &mut Vec<GrantReply>,
    dependencies: &mut Dependencies,
) -> Result<(), StoreError> {
    if let Some(session) = state.ordinary_session(id)
        && !state.may_search(session, (directory.inode, &directory.state.attributes))?
    {
        return Ok(());
    }
    for entry in directory.state.entries.iter().flatten() {
        let Some((found, seen)) = state.covering_lease(now_us(), id, entry.inode, LeaseMode::Read) else { continue };
        if found.word != grant.word {
            continue;
        }
        // With the access lists: otherwise opening such a file would take a request.
        let need = Need { xattrs: unasked.bytes < scan_detection::ATTRIBUTE_BYTES_MAX, ..Need::default() };
        if let Some(mut described) = load_state(state, entry.inode, need)? {
            state.record_found(id, entry.inode)?;
            hide_unreadable(state, id, entry.inode, &mut described)?;
            unasked.bytes += xattr_bytes(&described);
            children.push(make_reply(&found, described));
            dependencies.extend(seen);
        }
    }
    Ok(())
}

/// Adds the other files of a file's directory, as far as the lease covers them.
///
/// It does so if the session is likely to access them. Their contents go along if the session is likely to read them,
/// and may.
fn add_siblings(
    state: &mut State,
    id: SessionId,
    (file, reads): (&GrantReply, bool),
    grant: &Grant,
    unasked: &mut UnaskedBytes,
    files: &mut Vec<GrantReply>,
    dependencies: &mut Dependencies,
) -> Result<(), StoreError> {
    let Some(directory) = home_of(file.inode, &file.state.attributes).as_file() else { return Ok(()) };
    if check_directory(state, id, directory, Access::READ).is_err()
        || check_directory(state, id, directory, Access::EXECUTE).is_err()
    {
        return Ok(());
    }
    let Some(session) = state.sessions.get_mut(&id) else { return Ok(()) };
    let (slot, generation) = (grant.word.slot, grant.word.generation);
    let grants_all = session.scans.is_grant_due(directory, slot, generation);
    let sends_all_contents = reads && session.scans.is_content_due(directory, slot, generation);
    if !grants_all && !sends_all_contents {
        return Ok(());
    }
    // A process need not be sent grants that it finds in the grant cache.
    let reads_grant_cache = session.identity.kind == SessionKind::Process;
    let mut is_left_out = false;
    for (_, _, entry) in state.store.entries(directory, 0, usize::MAX)? {
        let sends_contents = sends_all_contents
            && unasked.content_bytes < scan_detection::CONTENT_BYTES_MAX
            && entry.kind == FileKind::Regular;
        if unasked.bytes >= scan_detection::ATTRIBUTE_BYTES_MAX {
            break;
        }
        if !grants_all && !sends_contents || entry.kind == FileKind::Directory || entry.inode == file.inode {
            continue;
        }
        let need = Need { contents: sends_contents, xattrs: true, ..Need::default() };
        if reads_grant_cache
            && state.grant_cache.as_ref().is_some_and(|grant_cache| grant_cache.has_grant(entry.inode, need))
        {
            is_left_out = true;
            continue;
        }
        let Some(found) = state.store.inode(entry.inode)? else { continue };
        if !state.leasing.manager.is_among_files(directory, entry.inode, home_of(entry.inode, &found)) {
            continue;
        }
        let mut described = complete_state(state, entry.inode, found, Need { xattrs: true, ..Need::default() })?;
        if sends_contents && may_send_contents(state, id, &described) {
            let contents = state.store.contents(entry.inode)?;
            unasked.content_bytes += content_bytes(&contents);
            described.contents = Some(contents);
        } else if !grants_all {
            continue;
        }
        state.record_found(id, entry.inode)?;
        hide_unreadable(state, id, entry.inode, &mut described)?;
        unasked.bytes += xattr_bytes(&described) + size_of::<Inode>() + described.attributes.target.len();
        files.push(make_reply(&Grant { inode: entry.inode, word: grant.word }, described));
        dependencies.extend(state.leasing.manager.own_dependencies(id, entry.inode));
    }
    if let Some(session) = state.sessions.get_mut(&id).filter(|_| is_left_out && !reads) {
        session.scans.record_left_out(directory);
    }
    Ok(())
}

/// Returns whether a first access to a short file gets its contents too.
///
/// They cost a twentieth of the request that they save.
fn is_short_first_access(want: &LeaseRequest, file: &InodeState) -> bool {
    let is_short =
        file.attributes.kind == FileKind::Regular && file.attributes.blocks <= scan_detection::SHORT_FILE_BLOCKS;
    is_short && !want.lease.mode.is_write() && !want.need.contents && want.need.xattrs
}

fn xattr_bytes(state: &InodeState) -> usize {
    state.xattrs.iter().flatten().map(|(name, value)| name.len() + value.len()).sum()
}

/// Returns the bytes of memory that the parts of a state take that may be long.
fn state_bytes(state: &InodeState) -> usize {
    let entries = state.entries.iter().flatten().map(|entry| size_of::<DirectoryEntry>() + entry.name.len());
    entries.sum::<usize>() + xattr_bytes(state) + state.contents.as_ref().map_or(0, content_bytes)
}

fn content_bytes(contents: &Contents) -> usize {
    match contents {
        Contents::Inline(bytes) => bytes.len(),
        Contents::Extents(extents) | Contents::Withheld(extents) => size_of_val(&extents[..]),
    }
}

/// Returns whether a file's contents may be sent unasked.
///
/// They may only be sent to a session that may read them.
fn may_send_contents(state: &State, id: SessionId, file: &InodeState) -> bool {
    // Without the access list, this is unknown.
    let may_read = |session: &ServedSession| file.xattrs.is_some() && allows_reading(file, &session.credentials);
    file.attributes.blocks <= scan_detection::CONTENT_BLOCKS_MAX && state.sessions.get(&id).is_some_and(may_read)
}

fn allows_reading(file: &InodeState, credentials: &Credentials) -> bool {
    let list = file.xattrs.iter().flatten().find(|(name, _)| name == XATTR_ACL_ACCESS);
    let acl = list.and_then(|(_, value)| Acl::parse(value));
    allows(&file.attributes, acl.as_ref(), credentials, Access::READ)
}

/// Returns the needed state of an inode; `None` if it does not exist.
fn load_state(state: &State, id: InodeId, need: Need) -> Result<Option<InodeState>, StoreError> {
    // The right to move directories is a lease on no inode: the root's attributes stand in.
    let id = if id == InodeId::RENAME { InodeId::ROOT } else { id };
    state.store.inode(id)?.map(|found| complete_state(state, id, found, need)).transpose()
}

fn complete_state(state: &State, id: InodeId, attributes: Inode, need: Need) -> Result<InodeState, StoreError> {
    let store = &state.store;
    let contents = if need.contents && attributes.kind == FileKind::Regular { Some(store.contents(id)?) } else { None };
    let entries = if need.entries && attributes.is_directory() && attributes.entries <= Need::ENTRIES_MAX {
        Some(store.entries(id, 0, usize::MAX)?.into_iter().map(directory_entry).collect())
    } else {
        None
    };
    let xattrs = if need.xattrs { Some(store.xattrs(id)?) } else { None };
    Ok(InodeState { attributes, contents, entries, hides_entries: false, xattrs, is_followed: store.is_followed(id) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_types::Timestamp;

    #[test]
    fn unasked_contents_sent_only_to_session_that_may_read() {
        let mut file = Inode::new(FileKind::Regular, 0o640, InodeId::ROOT, Timestamp::default());
        (file.uid, file.gid) = (7, 8);
        let mut state = InodeState {
            attributes: file,
            contents: None,
            entries: None,
            hides_entries: false,
            xattrs: Some(Vec::new()),
            is_followed: false,
        };
        let may_read = |state: &InodeState, uid, gid| {
            allows_reading(state, &Credentials { checked: false, ..Credentials::checked(uid, gid) })
        };
        assert!(may_read(&state, 7, 0) && may_read(&state, 1, 8) && may_read(&state, 0, 0));
        assert!(!may_read(&state, 1, 1));
        // An access list: owner rw, user 1 r, group nothing, mask r, others nothing.
        let entries: [(u16, u16, u32); 5] =
            [(1, 6, u32::MAX), (2, 4, 1), (4, 0, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
        let mut list = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            list.extend(tag.to_le_bytes().iter().chain(&permissions.to_le_bytes()).chain(&id.to_le_bytes()));
        }
        state.xattrs = Some(vec![(XATTR_ACL_ACCESS.to_vec(), list)]);
        assert!(may_read(&state, 1, 1) && !may_read(&state, 2, 8), "the access list decides");
    }
}
