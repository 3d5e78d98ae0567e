//! Writes lease words where their sessions read them.

use std::io;

use ashlar_lease::SlotWord;
use ashlar_types::SessionId;

use crate::leases::grant_cache::GrantPublisher;
use crate::leases::leasing::{Leasing, lease_word};
use crate::sessions::session_table::SessionTable;

/// The lease tables of all sessions, with the grant cache's.
pub struct LeaseTables<'a> {
    /// The sessions.
    pub sessions: &'a mut SessionTable,
    /// The lease manager, which knows the words.
    pub leasing: &'a mut Leasing,
    /// The grant cache.
    pub grant_cache: Option<&'a GrantPublisher>,
}

impl LeaseTables<'_> {
    /// Writes down leases that sessions hold without having been sent them.
    ///
    /// That must happen before SharedFS publishes the position up to which it has validated their records. After a
    /// restart in between, SharedFS would otherwise validate later records by a table that lacks these leases.
    ///
    /// A slot may have had the lease of an inode that these records freed, and that earlier ones change. So a restart
    /// must not validate by leases until the position is published. Returns the sessions to which that applies; the
    /// caller then passes them to [`end_attaching`](Self::end_attaching).
    #[must_use]
    pub fn write_attached(&mut self) -> Vec<SessionId> {
        let mut attaching = Vec::new();
        loop {
            let words: Vec<_> = self.leasing.manager.take_attached().collect();
            if words.is_empty() {
                return attaching;
            }
            for word in &words {
                let session = self.sessions.get(&word.session).filter(|session| !session.page.is_revoking());
                if let Some(session) = session {
                    session.page.set_revoking(true);
                    attaching.push(word.session);
                }
                // If the table grows for this word, further words have room in it.
                self.write_word(word);
            }
        }
    }

    /// Lets leases decide again at a restart.
    pub fn end_attaching(&self, attaching: &[SessionId]) {
        for session in attaching.iter().filter_map(|id| self.sessions.get(id)) {
            session.page.set_revoking(false);
        }
    }

    /// Writes a lease word into the table of its session, or into the grant cache.
    pub fn write_word(&mut self, word: &SlotWord) {
        let is_recorded = word.slot != SlotWord::UNRECORDED;
        if is_recorded && self.leasing.manager.is_superseded(word) {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&word.session) {
            if is_recorded {
                session.set_lease(word.slot, lease_word(word), word.inode);
            }
            // If there was no room a moment ago, the next request tries again.
            if !session.lacks_lease_room {
                let slot = if is_recorded { word.slot } else { session.lease_room };
                let _ = self.make_room(word.session, slot);
            }
        } else if let Some(grant_cache) = self.grant_cache.filter(|_| is_recorded) {
            grant_cache.write_word(word);
        }
    }

    /// Gives a session's lease table more room, if this slot is near its end.
    ///
    /// # Errors
    /// Those of [`ServedSession::make_lease_room`](crate::sessions::session::ServedSession::make_lease_room).
    pub fn make_room(&mut self, id: SessionId, slot: u32) -> io::Result<()> {
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        let before = session.lease_room;
        let made = session.make_lease_room(slot);
        let after = session.lease_room;
        if after != before {
            self.leasing.manager.set_table_slots(id, after);
        }
        made
    }
}
