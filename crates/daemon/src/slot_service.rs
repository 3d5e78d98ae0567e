//! Answers the requests in request slots.

use std::time::Instant;

use ashlar_node::blame::{self, Blame};
use ashlar_node::leases::grant::{ENDING, LATER, LONG, Patience};
use ashlar_node::pending::RequestTerms;
use ashlar_types::{Errno, SessionId};
use ashlar_wire::{Reply, Request};

use crate::node_requests::{ask_node, fence_after_panic};
use crate::request_slots::SlotOwner;
use crate::shared_state::SharedState;

/// The longest answer that is kept until the session of an ordinary user fetches it.
///
/// A longer one is sent by a message.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// Answers a session's request, if there is one; returns whether there was.
pub fn serve_slot(shared: &SharedState, owner: &SlotOwner, buffer: &mut Vec<u8>) -> bool {
    let request_slot = owner.control.request_slot();
    if !request_slot.is_asked() {
        return false;
    }
    let (question, request) = match blame::contain(|| request_slot.take_question(buffer)) {
        Ok(Some(asked)) => asked,
        Ok(None) => return false,
        Err(blame::Panicked) => {
            fence_after_panic(shared, Some(owner.id));
            return true;
        }
    };
    let user = owner.user.as_deref();
    // The thread of another connection must not wait for this user's next part of the time.
    if user.is_some_and(|user| shared.user_shares.is_indebted(user)) {
        request_slot.decline_question(question);
        return true;
    }
    let bytes_max = if user.is_some() { KEPT_BYTES_MAX } else { usize::MAX };
    let began = user.map(|_| Instant::now());
    let answered = blame::contain(|| answer_question(shared, owner.id, request, bytes_max));
    if let (Some(user), Some(began)) = (user, began) {
        shared.user_shares.charge(user, began.elapsed().as_micros() as u64);
    }
    let reply = match answered {
        Ok(Err(ENDING | LATER | LONG)) => {
            request_slot.decline_question(question);
            return true;
        }
        Ok(Err(errno)) => Reply::Error(errno),
        Ok(Ok(reply)) => reply,
        Err(blame::Panicked) => {
            fence_after_panic(shared, Some(owner.id));
            Reply::Error(Errno::EIO)
        }
    };
    if !request_slot.send_answer(question, &reply, buffer) {
        match shared.lock().sessions.get_mut(&owner.id) {
            Some(session) => {
                session.kept = Some((question, reply));
                request_slot.keep_answer(question);
            }
            None => request_slot.decline_question(question),
        }
    }
    true
}

fn answer_question(shared: &SharedState, id: SessionId, request: Request, bytes_max: usize) -> Result<Reply, Errno> {
    let _blame = {
        let mut state = shared.lock();
        state.counters.requests += 1;
        state.counters.questions += 1;
        Blame::for_request(state.sessions.asking(id, &request)?)
    };
    let terms = RequestTerms { patience: Patience::None, bytes_max, reclaims: false };
    match request {
        Request::Acquire(_)
        | Request::Lookup { .. }
        | Request::ReadDirectory { .. }
        | Request::Map { .. }
        | Request::Unmap { .. } => ask_node(shared, id, request, terms),
        _ => Err(LATER),
    }
}
