//! Structures of a ring's entries, beside requests and replies.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::requests::layouts;

layouts! {
    /// Follows the request's header and its structure: the payload's length, and the number by which the request is
    /// answered.
    RingHeader(32) {
        flags: u64,
        commit_id: u64,
        payload_sz: u32,
        padding: u32,
        reserved: u64,
    }
    /// In a ring's command: the request that is answered, and its queue.
    RingCommand(24) {
        flags: u64,
        commit_id: u64,
        qid: u16,
        padding: [u8; 6],
    }
}

/// Gives an entry to the kernel.
pub(crate) const RING_REGISTER: u32 = 1;
/// Answers the request in an entry, and gives the entry back.
pub(crate) const RING_COMMIT_AND_FETCH: u32 = 2;
