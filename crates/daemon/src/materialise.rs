//! Opens real files on a mount for sessions that serve their files themselves.
//!
//! A file that leaves a session's sight must become a real one. A session names an inode and shows a directory on a
//! mount of the arena. It gets a new open file description of the inode on that mount. The helper sees the directory
//! and opens the file; this module decides whether the session may have it: by the rights to the inode, and to search
//! the directories that lead to it.

use ashlar_helper::FileOpening;
use ashlar_types::{Access, Errno, FileKind, Inode, InodeId, SessionId};
use ashlar_update::permission::{granted_access, owns};
use ashlar_wire::SessionKind;
use rustix::fs::OFlags;

use crate::grant::report_store_error;
use crate::quota;
use crate::reserved;
use crate::session::ServedSession;
use crate::shared_state::SharedState;
use crate::state::State;
use crate::ways::access_acl;

/// The most entries of a directory that SharedFS searches for a file's name.
const NAMES_MAX: usize = 100_000;

/// The flags that a session may choose. None of them makes or truncates a file.
const FLAGS: OFlags = OFlags::RWMODE
    .union(OFlags::APPEND)
    .union(OFlags::NONBLOCK)
    .union(OFlags::DIRECT)
    .union(OFlags::SYNC)
    .union(OFlags::DSYNC)
    .union(OFlags::NOATIME)
    .union(OFlags::DIRECTORY)
    .union(OFlags::PATH)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::from_bits_retain(libc::O_ASYNC as u32))
    .union(OFlags::LARGEFILE);

/// Begins to open an inode for a session, on a mount that the session shows to the helper.
///
/// # Errors
/// `EINVAL` if the arena has no mount, or the flags or the inode's kind do not fit; `ESTALE` if the inode is gone;
/// `EACCES`, and `EPERM` for `O_NOATIME`, if the session's user may not; those of the helper.
pub fn materialise(shared: &SharedState, id: SessionId, (inode, flags): (InodeId, u32)) -> Result<FileOpening, Errno> {
    let wanted = OFlags::from_bits_retain(flags);
    let access = access_of(wanted)?;
    let (entry, devices) = {
        // The session's latest changes of the inode's rights count, and an inode that it has just made is there.
        let state = shared.apply_settled(shared.lock(), id);
        let session = state.live(id).ok_or(Errno::EIO)?;
        let found = state.store.inode(inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
        if wanted.contains(OFlags::PATH) {
            // An O_PATH descriptor neither reads nor writes, and opens nothing; but it allows more than a number does.
            check_way(&state, session, (inode, &found))?;
        } else {
            check_rights(&state, session, (inode, &found), access, wanted.contains(OFlags::NOATIME))?;
        }
        let devices: Vec<u64> = state.sessions.values().filter_map(served_device).collect();
        if devices.is_empty() {
            return Err(Errno::EINVAL);
        }
        (watched_entry(&state, (inode, &found))?, devices)
    };
    shared.helper.open((inode, flags), entry, devices)
}

/// Returns a name of a file in a directory that a program watches.
///
/// By that name the kernel knows which watchers to notify of changes to the file.
fn watched_entry(state: &State, (inode, found): (InodeId, &Inode)) -> Result<Option<(InodeId, Vec<u8>)>, Errno> {
    if found.is_directory() || found.links == 0 || !reserved::is_watched(&state.reservations, found.parent) {
        return Ok(None);
    }
    let name =
        quota::name_in(state, found.parent, inode, &mut { NAMES_MAX }).map_err(|error| report_store_error(&error))?;
    Ok(name.map(|name| (found.parent, name.as_bytes().to_vec())))
}

/// Returns the access that the flags ask for.
fn access_of(flags: OFlags) -> Result<Access, Errno> {
    if !FLAGS.contains(flags) {
        return Err(Errno::EINVAL);
    }
    match flags.intersection(OFlags::RWMODE) {
        OFlags::RDONLY => Ok(Access::READ),
        OFlags::WRONLY => Ok(Access::WRITE),
        OFlags::RDWR => Ok(Access::READ | Access::WRITE),
        _ => Err(Errno::EINVAL),
    }
}

/// Returns the device that the files of a living session's mount show.
fn served_device(session: &ServedSession) -> Option<u64> {
    let is_serving = session.identity.kind == SessionKind::Mount
        && session.mount_device != 0
        && session.fenced.is_none()
        && !session.is_ending;
    is_serving.then_some(session.mount_device)
}

/// Returns the living session that serves a mount whose files show this device.
pub fn find_mount(state: &State, device: u64) -> Option<&ServedSession> {
    state.sessions.values().find(|session| served_device(session) == Some(device))
}

/// Returns whether a living session serves a mount whose files show this device.
pub fn is_mount(state: &State, device: u64) -> bool {
    find_mount(state, device).is_some()
}

/// Fails unless the session reaches an inode.
fn check_way(state: &State, session: &ServedSession, inode: (InodeId, &Inode)) -> Result<(), Errno> {
    let reached = state.reaches(session, inode).map_err(|error| report_store_error(&error))?;
    if reached { Ok(()) } else { Err(Errno::EACCES) }
}

/// Fails unless the session may open an inode.
///
/// Devices, pipes and sockets are the kernel's from the beginning. Opening one may wait for ever or have effects.
pub fn check_rights(
    state: &State,
    session: &ServedSession,
    (inode, found): (InodeId, &Inode),
    access: Access,
    keeps_time: bool,
) -> Result<(), Errno> {
    if !matches!(found.kind, FileKind::Regular | FileKind::Directory) {
        return Err(Errno::EINVAL);
    }
    if keeps_time && !owns(found, &session.credentials) {
        return Err(Errno::EPERM);
    }
    check_way(state, session, (inode, found))?;
    if held_access(state, session, (inode, found))?.contains(access) { Ok(()) } else { Err(Errno::EACCES) }
}

/// Returns the access with which a session may have an inode open: as its user has it now, and kept rights.
pub fn held_access(state: &State, session: &ServedSession, (inode, found): (InodeId, &Inode)) -> Result<Access, Errno> {
    let acl = access_acl(&state.store, inode).map_err(|error| report_store_error(&error))?;
    let granted = granted_access(found, acl.as_ref(), &session.credentials);
    Ok(granted | session.rights.kept(inode).without(Access::EXECUTE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_make_or_truncate_are_refused() {
        let asked = |flags: OFlags| access_of(flags).map(|access| access.0);
        assert_eq!(asked(OFlags::RDONLY | OFlags::DIRECTORY), Ok(4));
        assert_eq!(asked(OFlags::WRONLY | OFlags::APPEND | OFlags::LARGEFILE), Ok(2));
        assert_eq!(asked(OFlags::RDWR | OFlags::SYNC | OFlags::DIRECT | OFlags::NONBLOCK), Ok(6));
        for refused in [OFlags::RWMODE, OFlags::CREATE, OFlags::TRUNC, OFlags::TMPFILE, OFlags::EXCL] {
            assert_eq!(asked(refused), Err(Errno::EINVAL), "{refused:?}");
        }
    }
}
