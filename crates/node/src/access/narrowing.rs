//! Keeps what an update takes from sessions that have an inode open.
//!
//! A process keeps its open files, and the rights that it had when it opened them.

use ashlar_store::{Store, StoreError};
use ashlar_types::{Access, Inode, InodeId, MODE_PERMISSIONS};
use ashlar_update::acl::Acl;
use ashlar_update::permission::granted_access;
use ashlar_update::{Update, XATTR_ACL_ACCESS};

use crate::access::rights::access_acl;
use crate::access::way_changes::{WayChange, changed_ways};
use crate::access::ways::Ways;
use crate::journal::BatchNotes;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// The most directories that are climbed for open inodes when a directory is narrowed.
const CUT_STEPS_MAX: u32 = 8192;

/// The attributes that decide which users may open a file.
struct OpenRules {
    inode: Inode,
    acl: Option<Acl>,
}

impl OpenRules {
    /// Returns the rules before and after an update; `None` if it changes none.
    fn around(
        store: &Store,
        sessions: &SessionTable,
        update: &Update<'_>,
    ) -> Result<Option<(InodeId, Self, Self)>, StoreError> {
        let id = match update {
            Update::SetAttributes(set) if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() => set.inode,
            Update::SetXattr { inode, name, .. } | Update::RemoveXattr { inode, name, .. }
                if *name == XATTR_ACL_ACCESS =>
            {
                *inode
            }
            _ => return Ok(None),
        };
        // Most changed files are open in no other session.
        let concerns = |session: &ServedSession| {
            session.needs_validation() && (session.control.has_open(id) || session.rights.opened(id) != Access::NONE)
        };
        if !sessions.values().any(concerns) {
            return Ok(None);
        }
        let Some(inode) = store.inode(id)? else { return Ok(None) };
        let acl = access_acl(store, id)?;
        let before = Self { inode, acl };
        let mut after = Self { inode: before.inode.clone(), acl: before.acl.clone() };
        let mode = match update {
            Update::SetAttributes(set) => {
                after.inode.uid = set.uid.unwrap_or(after.inode.uid);
                after.inode.gid = set.gid.unwrap_or(after.inode.gid);
                set.mode
            }
            Update::SetXattr { value, mode, .. } => {
                after.acl = Acl::parse(value);
                *mode
            }
            Update::RemoveXattr { mode, .. } => {
                after.acl = None;
                *mode
            }
            _ => None,
        };
        after.inode.mode = mode.map_or(after.inode.mode, |mode| mode & MODE_PERMISSIONS);
        Ok(Some((id, before, after)))
    }

    fn held_by(&self, session: &ServedSession) -> Access {
        granted_access(&self.inode, self.acl.as_ref(), &session.credentials)
    }
}

/// Notes the rights to open files that sessions lose by an update.
///
/// The update is not applied yet.
///
/// # Errors
/// Those of the store.
pub fn keep_rights(
    store: &Store,
    sessions: &mut SessionTable,
    notes: &mut BatchNotes,
    update: &Update<'_>,
) -> Result<(), StoreError> {
    let Some((inode, before, after)) = OpenRules::around(store, sessions, update)? else { return Ok(()) };
    for session in sessions.values_mut().filter(|session| session.needs_validation()) {
        if !session.control.has_open(inode) {
            session.rights.note_closed(inode);
            continue;
        }
        let narrowed = before.held_by(session).without(after.held_by(session));
        let lost = Access(narrowed.0 & session.rights.opened(inode).0).without(Access::EXECUTE);
        if lost != Access::NONE {
            keep_right(store, session, notes, (inode, lost));
        }
    }
    Ok(())
}

/// Notes that a session keeps a right to an inode that it has open.
///
/// The update that takes the right is not applied yet. [`Access::EXECUTE`] is the way to the inode.
fn keep_right(store: &Store, session: &mut ServedSession, notes: &mut BatchNotes, (inode, access): (InodeId, Access)) {
    notes.keep_right(session.id, inode, access);
    session.keep_right(inode, access, store.next_batch(), store.committed(session.id));
}

/// Notes what an update, which is not applied yet, takes from sessions that have an inode open.
///
/// # Errors
/// Those of the store.
pub fn keep_ways(
    store: &Store,
    sessions: &mut SessionTable,
    ways: &Ways,
    notes: &mut BatchNotes,
    update: &Update<'_>,
) -> Result<(), StoreError> {
    if ways.has_no_viewers() || changed_ways(update).next().is_none() {
        return Ok(());
    }
    ways.record_cuts(store, update)?;
    for (id, becomes) in changed_ways(update) {
        let WayChange::Named(to) = becomes else { continue };
        let holds = |session: &&mut ServedSession| {
            let is_noted = session.rights.has(id, Access::EXECUTE);
            session.needs_validation() && !is_noted && session.control.has_open(id)
        };
        for session in sessions.values_mut().filter(holds) {
            let Some(found) = store.inode(id)? else { continue };
            let leads_on = to.map_or(Ok(false), |to| ways.leads_to(store, session, to))?;
            if !leads_on && ways.reaches(store, session, (id, &found))? {
                keep_right(store, session, notes, (id, Access::EXECUTE));
            }
        }
    }
    Ok(())
}

/// Notes the ways to open inodes that a narrowed directory has cut, so that a later SharedFS finds them.
///
/// The update is applied. Ways beyond `CUT_STEPS_MAX` are known to this SharedFS alone.
///
/// # Errors
/// Those of the store.
pub fn keep_cut_ways(
    store: &Store,
    sessions: &mut SessionTable,
    ways: &Ways,
    notes: &mut BatchNotes,
) -> Result<(), StoreError> {
    let mut left = CUT_STEPS_MAX;
    for session in sessions.values_mut().filter(|session| session.needs_validation()) {
        for id in session.control.open_inodes() {
            let Some(found) = store.inode(id)?.filter(|_| left > 0) else { continue };
            left = left.saturating_sub(1 + store.depth(found.parent, left)?);
            if ways.is_cut_from(store, session, (id, &found))? && !session.rights.has(id, Access::EXECUTE) {
                keep_right(store, session, notes, (id, Access::EXECUTE));
            }
        }
    }
    Ok(())
}
