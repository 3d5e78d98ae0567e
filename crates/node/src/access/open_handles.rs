//! Knows which of its handles a session has opened by right.
//!
//! A session says in its control page which inodes it has open. The notes of [`KeptRights`] tell which of these count.
//!
//! [`KeptRights`]: crate::sessions::kept_rights::KeptRights

use std::collections::BTreeMap;

use ashlar_store::Store;
use ashlar_types::{Access, InodeId, LeaseScope, SessionId};

use crate::access::rights::openable;
use crate::blame::Blame;
use crate::leases::grant_cache::GrantPublisher;
use crate::leases::leasing::{Ancestors, Leasing};
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// The most handles to check when a lease on many inodes is taken, and at a restart, of a user.
///
/// It takes some milliseconds, for which no other request is served.
const CHECKED_MAX: usize = 16_384;
const FOUND_MAX: usize = 65_536;

/// The leases under which handles may have been opened that are not noted yet.
#[derive(Clone, Copy)]
pub struct HandleLeases<'a> {
    /// The shared area.
    pub store: &'a Store,
    /// The leases.
    pub leasing: &'a Leasing,
    /// The grant cache, under whose leases all sessions open files.
    pub grant_cache: Option<&'a GrantPublisher>,
}

impl HandleLeases<'_> {
    /// Returns whether a session has an inode open that it has opened by right, also under a lease that still stands.
    pub fn has_opened(&self, session: &ServedSession, inode: InodeId) -> bool {
        if !session.control.has_open(inode) || session.has_opened(inode) {
            return session.has_opened(inode);
        }
        let covers = |holder| self.leasing.manager.is_governed_by(holder, inode, &Ancestors(self.store));
        let is_covered = covers(session.id) || self.grant_cache.is_some_and(|cache| covers(cache.holder()));
        is_covered && openable(self.store, session, inode).is_ok_and(|access| access != Access::NONE)
    }
}

/// Notes the handles that were opened under a lease, after the lease was taken.
///
/// `holder` is its session, or the grant cache's (`publisher`), under whose leases all sessions open files.
pub fn note_opened(
    store: &Store,
    sessions: &mut SessionTable,
    (holder, publisher): (SessionId, Option<SessionId>),
    inode: InodeId,
    scope: LeaseScope,
) {
    let is_published = publisher == Some(holder);
    let is_user = |session: &&ServedSession| session.needs_validation() && (is_published || session.id == holder);
    let mut left = CHECKED_MAX;
    let of_users = sessions.values().filter(is_user);
    let opened: Vec<_> = match scope {
        LeaseScope::Node => {
            of_users.filter(|user| user.control.has_open(inode)).map(|user| (user.id, vec![inode])).collect()
        }
        LeaseScope::Files | LeaseScope::Subtree => of_users.map(|user| (user.id, user.control.open_inodes())).collect(),
    };
    for (id, inodes) in opened {
        if let Some(session) = sessions.get_mut(&id) {
            note_handles(store, session, &inodes, &mut left);
        }
    }
}

/// Notes the handle of a session that has made an inode, or has removed its last name.
pub fn note_own_handle(store: &Store, session: Option<&mut ServedSession>, inode: InodeId) {
    let is_open = |session: &&mut ServedSession| session.needs_validation() && session.control.has_open(inode);
    if let Some(session) = session.filter(is_open) {
        note_handles(store, session, &[inode], &mut { 1 });
    }
}

/// Notes the handles that sessions had at a restart of SharedFS.
pub fn note_handles_found(store: &Store, sessions: &mut SessionTable) {
    let mut left = BTreeMap::new();
    for session in sessions.values_mut().filter(|session| session.needs_validation()) {
        let _blame = Blame::for_request(session);
        let (uid, inodes) = (session.identity.uid, session.control.open_inodes());
        note_handles(store, session, &inodes, left.entry(uid).or_insert(FOUND_MAX));
    }
}

/// Notes handles of a session on inodes that its user may open.
fn note_handles(store: &Store, session: &mut ServedSession, inodes: &[InodeId], left: &mut usize) {
    for &inode in inodes {
        if *left == 0 {
            return;
        }
        if session.rights.opened(inode).contains(Access::READ | Access::WRITE) {
            continue;
        }
        *left -= 1;
        let access = openable(store, session, inode).unwrap_or_else(|error| {
            tracing::error!(%inode, %error, "the rights to an open file can't be read");
            Access::NONE
        });
        if access != Access::NONE {
            session.note_opened(inode, access, store.committed(session.id));
        }
    }
}
