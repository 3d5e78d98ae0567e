//! Maps blocks of files for processes (DAX).

use std::ops::Range;

use ashlar_store::{MapBlocks, Store, StoreError};
use ashlar_types::{Access, BLOCK_BYTES, Errno, Inode, InodeId, QuotaKey, SessionId};
use ashlar_wire::SessionKind;

use crate::access::open_rights;
use crate::access::rights::may_change;
use crate::access::tree_view::TreeView;
use crate::leases::grant::{LATER, report_store_error};
use crate::leases::leasing::Ancestors;
use crate::node_core::NodeCore;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// Of all blocks, the part that an ordinary user's sessions may have mapped at once, and the most of them.
///
/// They stay taken when their files are deleted, and are counted again and again.
const USER_PART: u64 = 4;
const USER_BLOCKS_MAX: u64 = (4 << 30) / BLOCK_BYTES;

/// Maps blocks of a file for a session, if no commit must come first.
///
/// # Errors
/// `EBADF` if the session has not opened the file; `ESTALE` if the file is gone; `EACCES` if the user may not read it;
/// `EAGAIN` if the mapping is to follow writes and the session does not hold the write lease; `EINVAL`; `EIO`;
/// [`LATER`] if the session has no table yet.
pub fn try_to_map(
    state: &mut NodeCore,
    id: SessionId,
    inode: InodeId,
    (number, follows): (u32, bool),
    blocks: Range<u64>,
) -> Result<MapBlocks, Errno> {
    let found = state.store.inode(inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    let session = state.live(id).ok_or(Errno::EIO)?;
    if !session.control.has_open(inode) {
        return Err(Errno::EBADF);
    }
    open_rights::check_rights(state.tree(), session, (inode, &found), Access::READ, false)?;
    if state.leasing.manager.is_reserved_from(id, inode, &Ancestors(&state.store)) {
        return Ok(MapBlocks::Impossible);
    }
    // Then no other session holds a lease, and a session that gets one learns of the mapping.
    if follows && !state.leasing.manager.may_write(id, inode, &Ancestors(&state.store)) {
        return Err(Errno::EAGAIN);
    }
    // Writes through a mapping of the kernel's pages would be visible only after their write-back.
    let is_mounts = |other: &ServedSession| other.identity.kind == SessionKind::Mount && other.control.has_open(inode);
    if follows && state.sessions.values().any(is_mounts) {
        return Ok(MapBlocks::Impossible);
    }
    if !may_map_more(&state.store, &state.sessions, session, blocks.end - blocks.start) {
        return Ok(MapBlocks::Impossible);
    }
    let NodeCore { store, sessions, .. } = state;
    let table = sessions.get_mut(&id).and_then(|session| session.mapped.as_mut()).ok_or(LATER)?;
    // The session asks again if it lost the answer.
    store.unmap_blocks(id, Some(number));
    table.forget_number(number);
    let mapped = store.map_blocks(id, (number, follows), inode, blocks).map_err(|error| report_store_error(&error))?;
    if let MapBlocks::Done(runs) = &mapped
        && !table.record_runs(runs)
    {
        table.forget_number(number);
        store.unmap_blocks(id, Some(number));
        return Ok(MapBlocks::Impossible);
    }
    Ok(mapped)
}

/// Returns whether an ordinary user's session may map so many blocks more.
fn may_map_more(store: &Store, sessions: &SessionTable, session: &ServedSession, blocks: u64) -> bool {
    if session.credentials.is_privileged() {
        return true;
    }
    let (mapped, kept) = sessions.mapped_by_user(store, session.identity.uid);
    let most = (store.space().blocks_total / USER_PART).min(USER_BLOCKS_MAX);
    let (used, limits) = store.quota(QuotaKey::User(session.identity.uid));
    let is_within = limits.blocks.is_none_or(|limit| kept == 0 || used.blocks.saturating_add(kept) < limit);
    mapped.saturating_add(blocks) <= most && is_within
}

/// Removes the mappings that a session has unmapped under a number.
pub fn unmap_blocks(store: &mut Store, session: Option<&mut ServedSession>, id: SessionId, number: u32) {
    // Remove them from the table last: after a kill in between, blocks stay unused, and never have two owners.
    store.unmap_blocks(id, Some(number));
    if let Some(table) = session.and_then(|session| session.mapped.as_mut()) {
        table.forget_number(number);
    }
}

/// Fails unless a session can have written to a file.
///
/// # Errors
/// `EACCES`; `EIO` if the session is fenced or the shared area has failed.
pub fn check_shown(tree: TreeView<'_>, id: SessionId, inode: InodeId) -> Result<(), Errno> {
    let session = tree.sessions.live(id).ok_or(Errno::EIO)?;
    let found = tree.store.inode(inode).map_err(|error| report_store_error(&error))?;
    let may_show = |found: &Inode| {
        Ok::<_, StoreError>(tree.reaches(session, (inode, found))? && may_change(tree.store, session, (inode, found))?)
    };
    let is_allowed = found.as_ref().map_or(Ok(true), may_show).map_err(|error| report_store_error(&error))?;
    if is_allowed { Ok(()) } else { Err(Errno::EACCES) }
}
