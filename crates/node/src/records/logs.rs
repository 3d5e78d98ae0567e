//! Logs as a whole: fenced, cut, sealed and applied up to a seal.

use ashlar_types::{LogPosition, SessionId};

use crate::blame::Blame;
use crate::effects::NodeEffect;
use crate::leases::reserved;
use crate::node::Node;
use crate::records::apply::Slice;
use crate::records::validate::Violation;

impl Node {
    /// Cuts the log of a session whose process is gone: nothing more of it is applied.
    pub fn cut(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            (session.is_ending, session.is_cut) = (true, true);
            self.counters.logs_cut += 1;
        }
    }

    /// Fences a session: nothing more of its log is taken, and all its calls fail.
    ///
    /// Its leases are taken after the current step.
    pub fn fence(&mut self, id: SessionId, violation: &Violation) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.fenced.is_some() {
            return;
        }
        let violation = if session.is_truncated() { &Violation::Truncated } else { violation };
        let (pid, uid, label) = (session.identity.process.pid, session.identity.uid, &session.identity.label);
        tracing::error!(session = id.0, pid, uid, %label, reason = %violation, "session fenced for a forged log");
        session.fenced = Some(violation.to_string());
        // A log that is damaged is fenced all the same.
        let _ = session.log.fence_session();
        session.control.set_fenced();
        session.account.granted = session.account.used;
        session.outstanding.clear();
        session.page.clear_delegated();
        session.noted_locks.clear();
        self.counters.sessions_fenced += 1;
        self.request_commit();
        self.effects.push(NodeEffect::WakeDigests);
        self.effects.push(NodeEffect::WakeLocks);
        self.leasing.drop_leases_later(id);
        reserved::end_session(self, id);
        self.locking.end_session(id);
    }

    /// Returns the end of the settled part of a session's log.
    ///
    /// There, every slot is committed or void. A log that contradicts itself fences its session.
    pub fn settled(&mut self, id: SessionId) -> Option<LogPosition> {
        let session = self.live(id)?;
        let _blame = Blame::for_records(session, self.store.applied(id));
        let reason = match session.log.settled() {
            Ok(_) if session.is_truncated() => "it is truncated".to_owned(),
            Ok(settled) if settled >= self.store.applied(id) => return Some(settled),
            Ok(_) => "it goes backwards".to_owned(),
            Err(damaged) => damaged.to_string(),
        };
        self.fence(id, &Violation::Log(reason));
        None
    }

    /// Seals a session's log, which is then to be applied up to there ([`Self::apply_sealed`]).
    ///
    /// A lease of the session moves only afterwards.
    pub fn seal(&mut self, id: SessionId) {
        let Some(session) = self.live(id) else {
            self.sealed.push_back((id, LogPosition(0)));
            return;
        };
        let _blame = Blame::for_records(session, self.store.applied(id));
        let sealed = session.log.seal();
        self.counters.seals += 1;
        let end = match sealed {
            Ok((_, end)) => end,
            Err(damaged) => {
                self.fence(id, &Violation::Log(damaged.to_string()));
                LogPosition(0)
            }
        };
        self.sealed.push_back((id, end));
    }

    /// Applies a batch of the first sealed log; `None` if there is none, else whether that log is applied as a whole.
    pub fn apply_sealed(&mut self) -> Option<bool> {
        let (id, end) = *self.sealed.front()?;
        let is_over = self.apply(id, end, Slice::Batch);
        if is_over {
            self.sealed.pop_front();
            let position = self.store.applied(id);
            self.leasing.manager.handle_applied(id, position);
        }
        Some(is_over)
    }

    /// Seals a session's log and applies all of it.
    pub fn seal_and_apply(&mut self, id: SessionId) {
        let Some(session) = self.live(id) else { return };
        let _blame = Blame::for_records(session, self.store.applied(id));
        let sealed = session.log.seal();
        self.counters.seals += 1;
        match sealed {
            Ok((_, end)) => {
                self.apply(id, end, Slice::All);
            }
            Err(damaged) => self.fence(id, &Violation::Log(damaged.to_string())),
        }
    }
}
