//! The tree as a session's user sees it.

use ashlar_store::{Store, StoreError};
use ashlar_types::{Inode, InodeId, SessionId};

use crate::access::ways::Ways;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// The shared area with the sessions that see it, and the ways on which they come to its inodes.
#[derive(Clone, Copy)]
pub struct TreeView<'a> {
    /// The shared area.
    pub store: &'a Store,
    /// The sessions.
    pub sessions: &'a SessionTable,
    /// The ways.
    pub ways: &'a Ways,
}

impl TreeView<'_> {
    /// Returns whether a session reaches an inode.
    ///
    /// # Errors
    /// Those of the store.
    pub fn reaches(&self, session: &ServedSession, inode: (InodeId, &Inode)) -> Result<bool, StoreError> {
        self.ways.reaches(self.store, session, inode)
    }

    /// Notes that a session has found a name of an inode in a directory that it reaches and may search.
    ///
    /// # Errors
    /// Those of the store.
    pub fn record_found(&self, id: SessionId, inode: InodeId) -> Result<(), StoreError> {
        self.sessions.get(&id).map_or(Ok(()), |session| self.ways.record_found(self.store, session, inode))
    }
}
