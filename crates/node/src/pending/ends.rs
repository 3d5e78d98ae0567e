//! The ends of sessions whose processes are gone or closed them.

use ashlar_types::{LogPosition, SessionId};

use crate::effects::NodeEffect;
use crate::node_core::NodeCore;
use crate::pending::progress::{Progress, done};
use crate::pending::steps::decide_next;
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
    ///
    /// From here on none of them counts as ended before its turn: other requests are served between two turns, and a
    /// session of which nothing is applied would look as if it were committed as a whole.
    pub fn new(node: &mut NodeCore, mut ids: Vec<SessionId>) -> Self {
        ids.retain(|id| node.sessions.contains_key(id));
        for id in &ids {
            node.sessions.entry(*id).and_modify(|session| {
                session.is_ending = true;
                session.enders += 1;
            });
        }
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
                // Its end decides all that is left at once.
                done!(decide_next(node));
                self.current = None;
                node.sessions.entry(id).and_modify(|session| session.enders -= 1);
                end_holdings(node, id);
            }
            let Some(id) = self.left.pop() else { break };
            match begin_session_end(node, id) {
                Some(sealed) => self.current = Some((id, sealed)),
                // A fenced session holds nothing any more.
                None => _ = node.sessions.entry(id).and_modify(|session| session.enders -= 1),
            }
        }
        done!(decide_next(node));
        node.effects.push(NodeEffect::WakeLocks);
        Progress::Done(())
    }
}
