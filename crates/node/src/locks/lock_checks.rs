//! Checks which locks a session may have.

use ashlar_lease::locks::{LockOwner, LockRequest};
use ashlar_types::{Access, Errno, LockAction, LockKind, SessionId};
use ashlar_wire::{Request, SessionKind};

use crate::access::open_handles::HandleLeases;
use crate::access::open_rights::held_access;
use crate::leases::grant::report_store_error;
use crate::locks::locking::{CheckedLock, is_own};
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

fn decode_lock(session: SessionId, request: &Request) -> Option<LockRequest> {
    let (inode, kind, owner, pid, range, action, wait) = match *request {
        Request::Lock { inode, kind, owner, pid, range, action, wait, .. } => {
            (inode, kind, owner, pid, range, action, wait)
        }
        Request::QueryLock { inode, kind, owner, range, action } => (inode, kind, owner, 0, range, action, None),
        _ => return None,
    };
    let owner = LockOwner { session, owner };
    range.is_valid().then_some(LockRequest { inode, kind, owner, pid, range, action, wait })
}

/// Returns a request as the table takes it.
///
/// A process's locks bear the number by which SharedFS knows it, whatever the process says.
fn lock_request_of(sessions: &SessionTable, id: SessionId, request: &Request) -> Result<LockRequest, Errno> {
    let mut asked = decode_lock(id, request).ok_or(Errno::EINVAL)?;
    let session = sessions.lockable(id)?;
    if session.identity.kind == SessionKind::Process {
        asked.pid = session.identity.process.pid;
    }
    Ok(asked)
}

/// Fails unless the session may have such a lock on the inode.
///
/// It must have the inode open, in LibFS or by a descriptor of a mount. Then it needs no right to the directories that
/// lead there. The super-user's sessions are trusted: a mount asks for what the kernel has checked.
///
/// # Errors
/// `ESTALE` if the inode does not exist; `EACCES` if the session does not have it open with the right to access it so.
fn check_lock_rights(
    sessions: &SessionTable,
    handles: HandleLeases<'_>,
    id: SessionId,
    request: &LockRequest,
    is_query: bool,
) -> Result<(), Errno> {
    let session = sessions.lockable(id)?;
    let found = handles.store.inode(request.inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    if !session.needs_validation() {
        return Ok(());
    }
    let is_mounts =
        |other: &ServedSession| other.identity.kind == SessionKind::Mount && other.control.has_open(request.inode);
    if !handles.has_opened(session, request.inode) && !sessions.values().any(is_mounts) {
        return Err(Errno::EACCES);
    }
    let held = held_access(handles.store, session, (request.inode, &found))?;
    let is_allowed = match request.action {
        LockAction::Read if !is_query && request.kind == LockKind::Record => held.contains(Access::READ),
        LockAction::Write if !is_query && request.kind == LockKind::Record => held.contains(Access::WRITE),
        _ => held != Access::NONE,
    };
    if is_allowed { Ok(()) } else { Err(Errno::EACCES) }
}

/// Checks a request to set a lock, before it waits for anything.
///
/// # Errors
/// `EINVAL`; `ESTALE`; `EACCES`; `EIO` if the session is over.
pub fn check_lock(
    sessions: &SessionTable,
    handles: HandleLeases<'_>,
    id: SessionId,
    request: &Request,
    reclaims: bool,
) -> Result<CheckedLock, Errno> {
    let &Request::Lock { slot, .. } = request else { return Err(Errno::EINVAL) };
    let request = lock_request_of(sessions, id, request)?;
    if request.action != LockAction::Unlock {
        check_lock_rights(sessions, handles, id, &request, false)?;
    }
    let session = sessions.lockable(id)?;
    let is_trusted = session.credentials.is_privileged();
    if is_trusted && request.action != LockAction::Unlock && !is_own(&request) {
        session.page.set_other_locks();
    }
    let is_repeated = reclaims && is_trusted;
    let awaits_grace = !is_repeated && request.action != LockAction::Unlock;
    Ok(CheckedLock { request, slot, is_repeated, awaits_grace })
}

/// Checks a request about conflicting locks, before it waits for anything.
///
/// # Errors
/// As [`check_lock`].
pub fn check_query(
    sessions: &SessionTable,
    handles: HandleLeases<'_>,
    id: SessionId,
    request: &Request,
) -> Result<CheckedLock, Errno> {
    let request = lock_request_of(sessions, id, request)?;
    check_lock_rights(sessions, handles, id, &request, true)?;
    Ok(CheckedLock { request, slot: None, is_repeated: false, awaits_grace: true })
}
