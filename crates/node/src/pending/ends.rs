//! The ends of sessions whose processes are gone or closed them.

use ashlar_types::{LogPosition, SessionId};

use crate::effects::NodeEffect;
use crate::leases::decisions::decide_some;
use crate::node_core::NodeCore;
use crate::pending::progress::Progress;
use crate::records::apply::{Slice, apply_log};
use crate::sessions::ending::{begin_session_end, end_holdings};

/// Applies all that sessions have logged, and takes all that they held.
#[derive(Debug)]
pub struct EndSessions {
    /// The sessions that follow, the next one last.
    left: Vec<SessionId>,
    current: Option<(SessionId, LogPosition)>,
}

impl EndSessions {
    /// Ends these sessions.
    pub fn new(mut ids: Vec<SessionId>) -> Self {
        ids.reverse();
        Self { left: ids, current: None }
    }

    /// Goes on with the next batch.
    pub fn advance(&mut self, node: &mut NodeCore) -> Progress<()> {
        loop {
            if let Some((id, sealed)) = self.current {
                if !apply_log(node, id, sealed, Slice::Batch) {
                    return Progress::More;
                }
                self.current = None;
                node.sessions.entry(id).and_modify(|session| session.enders -= 1);
                end_holdings(node, id);
            }
            let Some(id) = self.left.pop() else { break };
            if !node.sessions.contains_key(&id) {
                continue;
            }
            // A fenced session holds nothing any more.
            self.current = begin_session_end(node, id).map(|sealed| (id, sealed));
        }
        if !decide_some(node) {
            return Progress::More;
        }
        node.effects.push(NodeEffect::WakeLocks);
        Progress::Done(())
    }
}
