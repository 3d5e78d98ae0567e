//! The end of a session: all that it logged is digested, and all that it held is free.

use ashlar_types::{LogPosition, SessionId};

use crate::blame::Blame;
use crate::leases::decisions::end_leases;
use crate::leases::reserved;
use crate::node::Node;
use crate::records::validate::Violation;

impl Node {
    /// Begins the end of a session; returns the end of its log, which is to be applied up to there.
    ///
    /// Returns `None` if nothing of it is to be applied. Until [`Self::end_holdings`] the session stays.
    pub fn begin_session_end(&mut self, id: SessionId) -> Option<LogPosition> {
        let session = self.sessions.get_mut(&id)?;
        let _blame = Blame::for_request(session);
        session.is_ending = true;
        self.store.unmap_blocks(id, None);
        // The seal voids records that a thread of the ended process had begun to append.
        match self.live(id)?.log.seal() {
            Ok((_, sealed)) => Some(sealed),
            Err(damaged) => {
                self.fence(id, &Violation::Log(damaged.to_string()));
                None
            }
        }
    }

    /// Takes all that an ended session holds: its leases, reservations and locks.
    pub fn end_holdings(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.outstanding.clear();
            session.page.clear_delegated();
        }
        end_leases(self, id);
        reserved::end_session(self, id);
        self.locking.end_session(id);
    }

    /// Returns the ended sessions that are committed as a whole.
    #[must_use]
    pub fn ended_sessions(&self) -> Vec<SessionId> {
        let is_over = |id: SessionId| self.store.committed(id) >= self.store.applied(id);
        let ended = self.sessions.values().filter(|session| session.is_ending && session.enders == 0);
        ended.map(|session| session.id).filter(|id| is_over(*id)).collect()
    }

    /// Returns the fenced sessions whose files are to be quarantined.
    ///
    /// All that was applied of their logs is committed: until then a restart needs the log.
    #[must_use]
    pub fn settled_fenced(&self) -> Vec<SessionId> {
        let is_meant = |id: SessionId| self.store.committed(id) >= self.store.applied(id);
        let fenced = self.sessions.values().filter(|session| session.fenced.is_some() && !session.is_quarantined);
        fenced.map(|session| session.id).filter(|id| is_meant(*id)).collect()
    }
}
