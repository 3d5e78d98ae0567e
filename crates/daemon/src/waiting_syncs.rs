//! Requests to make updates durable that wait for the copies of the journal.
//!
//! No thread waits for them: the thread that learns that the copies have the journal sends the replies itself. So a
//! process is woken by that thread, and not by way of another one.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ashlar_node::blame;
use ashlar_node::leases::grant::ENDING;
use ashlar_node::pending::progress::Progress;
use ashlar_node::pending::{NodeAnswer, RequestTicket};
use ashlar_types::{Errno, SessionId};
use ashlar_wire::{Reply, send_reply_now};
use parking_lot::Mutex;

use crate::node_requests::fence_after_panic;
use crate::shared_state::SharedState;

/// A request that waits, and the way to its process.
struct WaitingSync {
    ticket: RequestTicket,
    session: SessionId,
    socket: Arc<UnixStream>,
}

/// The requests that wait: one of each connection at most.
#[derive(Default)]
pub struct WaitingSyncs {
    /// It is locked after the node.
    waiting: Mutex<Vec<WaitingSync>>,
}

impl WaitingSyncs {
    /// Adds a request, whose reply another thread sends. The node is locked.
    pub fn add(&self, ticket: RequestTicket, session: SessionId, socket: Arc<UnixStream>) {
        self.waiting.lock().push(WaitingSync { ticket, session, socket });
    }

    /// Advances all of them, and sends the replies of those that have ended.
    pub fn advance_all(&self, shared: &SharedState) {
        let mut ended = Vec::new();
        let mut state = shared.lock();
        // A request that can go on at once is advanced again.
        self.waiting.lock().retain(|sync| {
            loop {
                match blame::contain(|| state.advance(sync.ticket)) {
                    Ok(Progress::More) => {}
                    Ok(Progress::Wait(..)) => return true,
                    Ok(Progress::Done(answer)) => {
                        ended.push((Arc::clone(&sync.socket), Ok(answer)));
                        return false;
                    }
                    Err(blame::Panicked) => {
                        ended.push((Arc::clone(&sync.socket), Err(sync.session)));
                        return false;
                    }
                }
            }
        });
        drop(state);
        for (socket, answer) in ended {
            let is_sent = match answer {
                Ok(answer) => send_answer(&socket, answer),
                Err(session) => {
                    fence_after_panic(shared, Some(session));
                    false
                }
            };
            if !is_sent {
                // The thread of the connection ends by that.
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Sends the answer; returns whether the connection is still of use.
fn send_answer(socket: &UnixStream, answer: Result<NodeAnswer, Errno>) -> bool {
    let reply = match answer {
        Ok(NodeAnswer::Reply(gated)) => gated.reply,
        Ok(_) => Reply::Error(Errno::EIO),
        // The next SharedFS answers.
        Err(ENDING) => return false,
        Err(errno) => Reply::Error(errno),
    };
    send_reply_now(socket, &reply).is_ok()
}
