//! Checks what sessions ask for, and says how much of it they may be granted.

use std::sync::Arc;
use std::time::Duration;

use ashlar_store::StoreError;
use ashlar_types::{Access, Errno, InodeId, LeaseMode, LeaseScope, LogPosition, Name, SessionId, WantedLease};
use ashlar_wire::{DirectoryEntry, GrantReply, LeaseRequest, Need, Reply};

use crate::leases::kernel_notifier::{KernelNotifier, KernelTicket};
use crate::leases::leasing::{GrantDependencies, WantedLeases, home_of};
use crate::leases::scan_detection;
use crate::leases::states::make_answer;
use crate::node::Node;
use crate::sessions::session::ServedSession;

/// The error of a request during which SharedFS ends.
///
/// It never reaches a session: SharedFS closes the session's connection instead, and the session asks the next
/// SharedFS.
pub const ENDING: Errno = Errno::ECANCELED;
/// The error of a request without patience that can't be answered at once.
///
/// It never reaches a program: the session asks again by a message.
pub const LATER: Errno = Errno::EINPROGRESS;
/// The error of a request whose answer needs more memory than was reserved for it.
///
/// It never reaches a session: the request is served again when no other answer waits for the session's user.
pub const LONG: Errno = Errno::EMSGSIZE;

/// The conditions under which an answer may be sent.
#[derive(Debug, Default)]
pub struct AnswerGate {
    /// No answer is sent before this time since boot.
    pub not_before: Duration,
    /// Notifications that kernels must have received.
    pub tickets: Vec<Arc<dyn KernelTicket>>,
    /// Files whose pages kernels must have dropped.
    pub pages: Vec<(Arc<dyn KernelNotifier>, InodeId)>,
}

impl AnswerGate {
    /// Returns whether the answer may be sent now.
    #[must_use]
    pub fn is_open(&self, now: Duration) -> bool {
        self.not_before <= now
            && self.tickets.iter().all(|ticket| ticket.is_done())
            && !self.pages.iter().any(|(notifier, inode)| notifier.owes_pages(*inode))
    }

    /// Adds the conditions of an answer that this one replaces.
    pub fn add(&mut self, other: Self) {
        self.not_before = self.not_before.max(other.not_before);
        self.tickets.extend(other.tickets);
        self.pages.extend(other.pages);
    }
}

/// The answer to a request for leases, until the request takes it.
///
/// It is made when the leases are granted.
#[derive(Debug)]
pub struct GrantAnswer {
    /// The grants, or why there are none.
    pub grants: Result<Vec<GrantReply>, Errno>,
    /// Updates of other sessions on which they depend.
    pub dependencies: GrantDependencies,
    /// How far the session's own log was part of the state then.
    pub applied: LogPosition,
    /// The conditions under which the answer may be sent.
    pub gate: AnswerGate,
}

/// Whether a request may sleep until it can be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// It may.
    Any,
    /// It fails with [`LATER`].
    ///
    /// The session asks again by message, and then receives whatever was granted meanwhile.
    None,
}

/// Returns whether a session asks only for extents under leases that it holds.
///
/// The session itself applies to the answer what it has logged and SharedFS has not applied yet. So it need not wait
/// for that: otherwise a program that reads back what it wrote would wait for the digest of all that it has written
/// since.
pub fn is_extent_request(state: &mut Node, id: SessionId, wants: &[LeaseRequest]) -> bool {
    // A session that knows nothing of an inode wants its extended attributes, too.
    let is_of_bytes = |want: &LeaseRequest| {
        let Need { contents, entries, xattrs, .. } = want.need;
        contents && !entries && !xattrs && want.lease.scope == LeaseScope::Node
    };
    state.live(id).is_some()
        && wants.iter().all(is_of_bytes)
        && check_exists(state, wants).is_ok()
        && wants.iter().all(|want| {
            state.covering_lease(state.now.since_boot_us(), id, want.lease.inode, want.lease.mode).is_some()
        })
}

/// Fails unless a session reaches a directory and has an access to it.
///
/// Reading goes on where it began before the directory was narrowed.
pub fn check_directory(state: &Node, id: SessionId, directory: InodeId, access: Access) -> Result<(), Errno> {
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
pub fn read_directory(state: &Node, id: SessionId, directory: InodeId, after: u64, limit: u32) -> Result<Reply, Errno> {
    let limit = (limit as usize).min(Need::ENTRIES_MAX as usize);
    check_directory(state, id, directory, Access::READ)?;
    let entries = state.store.entries(directory, after, limit).map_err(|error| report_store_error(&error))?;
    Ok(Reply::Entries(entries.into_iter().map(directory_entry).collect()))
}

/// Returns an entry as it is sent.
pub fn directory_entry((cookie, name, entry): (u64, Name, ashlar_update::Entry)) -> DirectoryEntry {
    DirectoryEntry { cookie, name: name.as_bytes().to_vec(), inode: entry.inode, kind: entry.kind }
}

/// Logs a failure of the shared area, and returns the error that a session gets.
pub fn report_store_error(error: &StoreError) -> Errno {
    tracing::error!(%error, "the shared area can't be read");
    Errno::EIO
}

/// Fails if a session asks for an inode that does not exist.
pub fn check_exists(state: &Node, wants: &[LeaseRequest]) -> Result<(), Errno> {
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
pub fn check_scopes(state: &Node, wants: &[LeaseRequest]) -> Result<(), Errno> {
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

/// Returns the error for a session that does not reach what it asks for.
pub fn refusal(state: &Node, id: SessionId) -> Errno {
    state.sessions.get(&id).map_or(Errno::EIO, ServedSession::refusal)
}

/// Returns what a session is granted of what it wants; `None` if it does not reach the inode.
///
/// Without a right to change anything of the inode, it gets a lease to read: LibFS asks before it knows the rights.
pub fn check_want(state: &Node, id: SessionId, want: &LeaseRequest) -> Result<Option<LeaseRequest>, StoreError> {
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

/// Widens a want to what the session is likely to access next.
pub fn widen_want(state: &mut Node, id: SessionId, want: &LeaseRequest) -> LeaseRequest {
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
pub fn answer_covered(state: &mut Node, id: SessionId, wanted: &WantedLeases) -> Option<GrantAnswer> {
    let (mut grants, mut dependencies) = (Vec::with_capacity(wanted.wants.len()), Vec::new());
    for want in &wanted.wants {
        // Other sessions may hold leases below a directory that a session's lease covers: only the manager takes those.
        if want.lease.scope == LeaseScope::Subtree {
            return None;
        }
        let (grant, shown) = state.covering_lease(state.now.since_boot_us(), id, want.lease.inode, want.lease.mode)?;
        grants.push(grant);
        dependencies.extend(shown);
    }
    Some(make_answer(state, id, wanted, &grants, dependencies))
}

impl GrantAnswer {
    /// Returns an answer without grants, to a session whose log is applied up to there.
    pub fn without_grants(applied: LogPosition) -> Self {
        Self { grants: Ok(Vec::new()), dependencies: Vec::new(), applied, gate: AnswerGate::default() }
    }

    /// Keeps the conditions of an answer that a later one replaces.
    ///
    /// The leases stay. The states are sent again, so whether the replaced answer had any means nothing.
    pub fn keep_conditions(&mut self, answer: Self) {
        self.dependencies.extend(answer.dependencies);
        self.gate.add(answer.gate);
    }
}
