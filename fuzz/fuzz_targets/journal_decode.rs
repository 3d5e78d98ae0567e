//! Arbitrary bytes in the place of a journal's frames and memory.
//!
//! Other nodes send frames, and a crash leaves memory in any state. A decoded frame is encoded to the same bytes. No
//! decoding takes more memory than its frame's length allows, and damage never makes a frame.
#![no_main]

mod counting_allocator;

use counting_allocator::most_taken;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/journal/tests/script/mod.rs"]
mod script;

/// Bytes of memory that a byte of a frame may take, and what any frame may take.
///
/// A byte may stand for an element of a list, and a list that grows is copied to twice its room.
const MEMORY_PER_BYTE: usize = 64;
const MEMORY_ANY: usize = 4 << 10;

fuzz_target!(|data: &[u8]| {
    let (decoded, taken) = most_taken(|| script::decode(data));
    assert!(taken <= MEMORY_ANY + MEMORY_PER_BYTE * data.len(), "{} bytes took {taken} of memory", data.len());
    if let Err(broken) = decoded.and_then(|_| script::damage(data)) {
        panic!("{broken}");
    }
});
