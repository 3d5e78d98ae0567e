//! Coalescing of arbitrary decoded records.
//!
//! It must return an action for each record, and count exactly the records that it drops.
#![no_main]

use ashlar_update::Update;
use ashlar_update::coalesce::{CoalesceScope, coalesce};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // A record is a kind, a length, and a body.
    let mut rest = data;
    let mut batch = Vec::new();
    while let Some((&[kind, length], tail)) = rest.split_first_chunk() {
        let Some((body, tail)) = tail.split_at_checked(usize::from(length)) else { break };
        batch.extend(Update::decode(kind, body));
        rest = tail;
    }
    let whole: u64 = batch.iter().map(Update::body_bytes).sum();
    for scope in [CoalesceScope::All, CoalesceScope::Content] {
        let coalesced = coalesce(&batch, scope);
        assert_eq!(coalesced.actions.len(), batch.len());
        assert_eq!(coalesced.left(&batch).flatten().count() as u64 + coalesced.dropped, batch.len() as u64);
        assert!(coalesced.saved_bytes <= whole);
    }
});
