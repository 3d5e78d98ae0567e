//! The answers to requests for leases, and the errors of requests that get none.

use std::sync::Arc;
use std::time::Duration;

use ashlar_store::StoreError;
use ashlar_types::{Errno, InodeId, LogPosition, SessionId};
use ashlar_wire::GrantReply;

use crate::leases::kernel_notifier::{KernelNotifier, KernelTicket};

/// The error of a request during which SharedFS ends.
///
/// It never reaches a session: SharedFS closes the session's connection instead. The session asks the next SharedFS.
pub const ENDING: Errno = Errno::ECANCELED;
/// The error of a request without patience that can't be answered at once.
///
/// It never reaches a program: the session asks again by a message.
pub const LATER: Errno = Errno::EINPROGRESS;
/// The error of a request whose answer needs more memory than was reserved for it.
///
/// It never reaches a session: the request is served again when no other answer waits for the session's user.
pub const LONG: Errno = Errno::EMSGSIZE;

/// Updates of other sessions on which a grant depends.
pub type GrantDependencies = Vec<(SessionId, LogPosition)>;

/// The conditions under which an answer may be sent.
#[derive(Debug, Default)]
pub struct AnswerGate {
    /// No answer is sent before this time since boot.
    pub not_before: Duration,
    /// Notifications that kernels must have received.
    pub tickets: Vec<Arc<dyn KernelTicket>>,
    /// Files whose pages kernels must have dropped.
    pub pages: Vec<(Arc<dyn KernelNotifier>, InodeId)>,
}

impl AnswerGate {
    /// Returns whether the answer may be sent now.
    #[must_use]
    pub fn is_open(&self, now: Duration) -> bool {
        self.not_before <= now
            && self.tickets.iter().all(|ticket| ticket.is_done())
            && !self.pages.iter().any(|(notifier, inode)| notifier.owes_pages(*inode))
    }

    /// Adds the conditions of an answer that this one replaces.
    pub fn add(&mut self, other: Self) {
        self.not_before = self.not_before.max(other.not_before);
        self.tickets.extend(other.tickets);
        self.pages.extend(other.pages);
    }
}

/// The answer to a request for leases, until the request takes it.
///
/// It is made when the leases are granted.
#[derive(Debug)]
pub struct GrantAnswer {
    /// The grants, or why there are none.
    pub grants: Result<Vec<GrantReply>, Errno>,
    /// Updates of other sessions on which they depend.
    pub dependencies: GrantDependencies,
    /// How far the session's own log was part of the state then.
    pub applied: LogPosition,
    /// The conditions under which the answer may be sent.
    pub gate: AnswerGate,
}

impl GrantAnswer {
    /// Returns an answer without grants, to a session whose log is applied up to there.
    pub fn without_grants(applied: LogPosition) -> Self {
        Self { grants: Ok(Vec::new()), dependencies: Vec::new(), applied, gate: AnswerGate::default() }
    }

    /// Keeps the conditions of an answer that a later one replaces.
    ///
    /// The leases stay. The states are sent again, so whether the replaced answer had any means nothing.
    pub fn keep_conditions(&mut self, answer: Self) {
        self.dependencies.extend(answer.dependencies);
        self.gate.add(answer.gate);
    }
}

/// Whether a request may sleep until it can be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// It may.
    Any,
    /// It fails with [`LATER`].
    ///
    /// The session asks again by message, and then receives whatever was granted meanwhile.
    None,
}

/// Logs a failure of the shared area, and returns the error that a session gets.
pub fn report_store_error(error: &StoreError) -> Errno {
    tracing::error!(%error, "the shared area can't be read");
    Errno::EIO
}
