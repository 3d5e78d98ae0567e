//! Arbitrary wants of several sessions in a changing tree.
//!
//! The lease manager must panic at nothing, and its invariants must hold.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/lease/tests/script/mod.rs"]
mod script;

fuzz_target!(|data: &[u8]| {
    if let Err(broken) = script::run(data) {
        panic!("{broken}");
    }
});
