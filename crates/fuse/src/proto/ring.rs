//! What a ring's entries have beside requests and replies.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::requests::layouts;

layouts! {
    /// Behind the request's header and its structure: how much follows, and by which number it's answered.
    RingHeader(32) {
        flags: u64,
        commit_id: u64,
        payload_sz: u32,
        padding: u32,
        reserved: u64,
    }
    /// In the ring's question: which request is answered, and of which queue.
    RingCommand(24) {
        flags: u64,
        commit_id: u64,
        qid: u16,
        padding: [u8; 6],
    }
}

/// Gives an entry to the kernel.
pub(crate) const RING_REGISTER: u32 = 1;
/// Answers the request in an entry, and gives it back.
pub(crate) const RING_COMMIT_AND_FETCH: u32 = 2;
