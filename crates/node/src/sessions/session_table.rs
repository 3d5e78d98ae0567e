//! The table of sessions.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use ashlar_store::Store;
use ashlar_types::{Errno, SessionId};
use ashlar_wire::{Credit, Request, SessionKind};

use crate::sessions::session::ServedSession;

/// Sessions, also fenced ones, until their process is gone.
///
/// It is a map with questions about all sessions, so it shows the map.
#[derive(Default)]
pub struct SessionTable(BTreeMap<SessionId, ServedSession>);

impl Deref for SessionTable {
    type Target = BTreeMap<SessionId, ServedSession>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for SessionTable {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl SessionTable {
    /// Returns the session, unless it's gone or fenced.
    pub fn live(&self, id: SessionId) -> Option<&ServedSession> {
        self.0.get(&id).filter(|session| session.fenced.is_none())
    }

    /// Returns the sessions that are neither gone nor fenced.
    pub fn live_ids(&self) -> Vec<SessionId> {
        self.all_live().map(|session| session.id).collect()
    }

    /// Returns the sessions that are neither gone nor fenced.
    pub fn all_live(&self) -> impl Iterator<Item = &ServedSession> {
        self.0.values().filter(|session| session.fenced.is_none())
    }

    /// Returns the session, if a request of it is served.
    ///
    /// # Errors
    /// `ESTALE` if it is gone, `EIO` if it is over.
    pub fn asking(&self, id: SessionId, request: &Request) -> Result<&ServedSession, Errno> {
        let session = self.0.get(&id).ok_or(Errno::ESTALE)?;
        // A fenced session may end before its process does: its user may have only so many.
        let is_fenced = session.fenced.is_some() && !matches!(request, Request::Goodbye);
        if is_fenced || session.is_ending { Err(Errno::EIO) } else { Ok(session) }
    }

    /// Returns the session, if it may have locks.
    ///
    /// # Errors
    /// `EIO` if it is over.
    pub fn lockable(&self, id: SessionId) -> Result<&ServedSession, Errno> {
        self.live(id).filter(|session| !session.is_ending).ok_or(Errno::EIO)
    }

    /// Returns a session if its user's rights decide.
    pub fn ordinary(&self, id: SessionId) -> Option<&ServedSession> {
        self.0.get(&id).filter(|session| !session.credentials.is_privileged())
    }

    /// Returns the error for a session that does not reach what it asks for.
    pub fn refusal(&self, id: SessionId) -> Errno {
        self.0.get(&id).map_or(Errno::EIO, ServedSession::refusal)
    }

    /// Returns whether a session is a process's.
    pub fn is_process(&self, id: SessionId) -> bool {
        self.0.get(&id).is_some_and(|session| session.identity.kind == SessionKind::Process)
    }

    /// Returns whether a session is a mount's.
    pub fn is_mount(&self, id: SessionId) -> bool {
        self.0.get(&id).is_some_and(|session| session.identity.kind == SessionKind::Mount)
    }

    /// Returns the sessions of a user.
    pub fn of_user(&self, uid: u32) -> impl Iterator<Item = &ServedSession> {
        self.0.values().filter(move |session| session.identity.uid == uid)
    }

    /// Returns the unused credit of all sessions of a user.
    pub fn held_credit(&self, uid: u32) -> Credit {
        self.of_user(uid).map(|session| session.account.outstanding()).fold(Credit::default(), |sum, credit| Credit {
            blocks: sum.blocks.saturating_add(credit.blocks),
            metadata_bytes: sum.metadata_bytes.saturating_add(credit.metadata_bytes),
        })
    }

    /// Returns how many blocks a user's sessions have mapped, and how many of them belong to no file any more.
    pub fn mapped_by_user(&self, store: &Store, uid: u32) -> (u64, u64) {
        let each = self.of_user(uid).filter(|session| session.mapped.is_some());
        each.map(|session| store.mapped_blocks(session.id)).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Returns the ended sessions that are committed as a whole.
    #[must_use]
    pub fn ended(&self, store: &Store) -> Vec<SessionId> {
        let is_over = |id: SessionId| store.committed(id) >= store.applied(id);
        let ended = self.0.values().filter(|session| session.is_ending && session.enders == 0);
        ended.map(|session| session.id).filter(|id| is_over(*id)).collect()
    }

    /// Returns the fenced sessions whose files are to be quarantined.
    ///
    /// All that was applied of their logs is committed: until then a restart needs the log.
    #[must_use]
    pub fn settled_fenced(&self, store: &Store) -> Vec<SessionId> {
        let is_meant = |id: SessionId| store.committed(id) >= store.applied(id);
        let fenced = self.0.values().filter(|session| session.fenced.is_some() && !session.is_quarantined);
        fenced.map(|session| session.id).filter(|id| is_meant(*id)).collect()
    }
}
