//! Asks the node for a session, and waits for the answer's conditions.

use ashlar_node::leases::grant::{LATER, Patience};
use ashlar_node::pending::{GatedReply, NodeAnswer, NodeRequest, RequestTerms};
use ashlar_node::records::validate::Violation;
use ashlar_processes::clock;
use ashlar_types::{Errno, SessionId};
use ashlar_wire::{Reply, Request};

use crate::mount_notifier::await_gate;
use crate::shared_state::SharedState;

/// Asks the node, and waits until no kernel believes anything that the answer makes untrue.
///
/// # Errors
/// Those of the request; [`LATER`] without patience.
pub fn ask_node(shared: &SharedState, id: SessionId, request: Request, terms: RequestTerms) -> Result<Reply, Errno> {
    let answer = shared.lock().serve_request(NodeRequest::Session(id, request), terms)?;
    finish_answer(answer, terms.patience)
}

/// Waits for the condition of an answer.
pub fn finish_answer(answer: NodeAnswer, patience: Patience) -> Result<Reply, Errno> {
    let NodeAnswer::Reply(GatedReply { reply, gate }) = answer else { return Err(Errno::EIO) };
    if patience == Patience::None && !gate.is_open(clock::boot_time()) {
        return Err(LATER);
    }
    await_gate(gate);
    Ok(reply)
}

/// Fences a session whose request made SharedFS panic. Nothing that others share was changed.
pub fn fence_after_panic(shared: &SharedState, session: Option<SessionId>) {
    let Some(id) = session else { return };
    let mut state = shared.lock();
    state.fence(id, &Violation::Panicked);
    state.decide_all();
}
