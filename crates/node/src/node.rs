//! A node: its parts, and the requests that wait.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use ashlar_store::{Store, StoreError};
use ashlar_types::{Errno, LogPosition, SessionId};

use crate::invariants::check_session;
use crate::journal::acts::remove_session_row;
use crate::leases::decisions::decide_all;
use crate::limits::NodeLimits;
use crate::node_core::NodeCore;
use crate::pending::progress::Progress;
use crate::pending::request::{NodeAnswer, NodeRequest, RequestTerms, RequestTicket};
use crate::pending::table::PendingRequests;
use crate::records::apply::{Slice, apply_log};
use crate::records::logs::{fence_session, find_settled};
use crate::records::validate::Violation;
use crate::sessions::identity::ProcessTable;
use crate::time::NodeTime;

/// A node.
///
/// Its shell lends the parts to functions that need no request, so a node shows its parts.
pub struct Node {
    core: NodeCore,
    pending: PendingRequests,
}

impl Deref for Node {
    type Target = NodeCore;

    fn deref(&self) -> &NodeCore {
        &self.core
    }
}

impl DerefMut for Node {
    fn deref_mut(&mut self) -> &mut NodeCore {
        &mut self.core
    }
}

impl Node {
    /// Returns a node without sessions.
    ///
    /// # Errors
    /// Those of the store.
    pub fn new(
        store: Store,
        limits: NodeLimits,
        processes: Arc<dyn ProcessTable>,
        now: NodeTime,
    ) -> Result<Self, StoreError> {
        Ok(Self { core: NodeCore::new(store, limits, processes, now)?, pending: PendingRequests::default() })
    }

    /// Returns how many requests wait.
    #[must_use]
    pub fn pending_count(&self) -> usize {
        self.pending.count()
    }

    /// Begins a request. The shell advances it next.
    pub fn begin_request(&mut self, request: NodeRequest, terms: RequestTerms) -> RequestTicket {
        self.pending.begin(&mut self.core, request, terms)
    }

    /// Goes on with a request. A request that has ended is no longer pending.
    ///
    /// # Panics
    /// If no such request is pending.
    pub fn advance(&mut self, ticket: RequestTicket) -> Progress<Result<NodeAnswer, Errno>> {
        self.pending.advance(&mut self.core, ticket)
    }

    /// Gives up a request; returns whether it has ended by that.
    ///
    /// A request for a lock that has just got it keeps it, and must be advanced once more.
    pub fn cancel_request(&mut self, ticket: RequestTicket) -> bool {
        self.pending.cancel(&mut self.core, ticket)
    }

    /// Applies a session's log up to `to`, or one batch of it; see [`apply_log`].
    pub fn apply(&mut self, id: SessionId, to: LogPosition, slice: Slice) -> bool {
        let reached = apply_log(&mut self.core, id, to, slice);
        check_session(&mut self.core, id);
        reached
    }

    /// Returns the end of the settled part of a session's log; see [`find_settled`].
    pub fn settled(&mut self, id: SessionId) -> Option<LogPosition> {
        find_settled(&mut self.core, id)
    }

    /// Fences a session; see [`fence_session`].
    pub fn fence(&mut self, id: SessionId, violation: &Violation) {
        fence_session(&mut self.core, id, violation);
    }

    /// Performs all of the lease manager's commands, and applies all logs that they seal.
    pub fn decide_all(&mut self) {
        decide_all(&mut self.core);
    }

    /// Returns the ended sessions that are committed as a whole.
    #[must_use]
    pub fn ended_sessions(&self) -> Vec<SessionId> {
        self.core.sessions.ended(&self.core.store)
    }

    /// Returns the fenced sessions whose files are to be quarantined.
    #[must_use]
    pub fn settled_fenced(&self) -> Vec<SessionId> {
        self.core.sessions.settled_fenced(&self.core.store)
    }

    /// Removes the row of a session that has ended; see [`remove_session_row`].
    pub fn remove_session_row(&mut self, id: SessionId) {
        remove_session_row(&mut self.core, id);
    }
}
