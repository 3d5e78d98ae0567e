//! Whatever bytes stand in the place of frames, nothing panics, and only frames that were written are read.
//!
//! `ASHLAR_JOURNAL_CASES` sets the number of scripts; `make soak` runs a million.

mod script;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Scripts without the variable: of as many, some 130 are frames.
const CASES: u32 = 4000;

fn run(strategy: impl Strategy<Value = Vec<u8>>, check: fn(&[u8]) -> Result<bool, String>) -> u32 {
    let cases = std::env::var("ASHLAR_JOURNAL_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CASES);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let accepted = std::cell::Cell::new(0);
    let checked = TestRunner::new(config).run(&strategy, |bytes| {
        let is_accepted = check(&bytes).map_err(TestCaseError::fail)?;
        accepted.set(accepted.get() + u32::from(is_accepted));
        Ok(())
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
    accepted.get()
}

#[test]
fn arbitrary_frames_are_refused_or_encoded_alike() {
    // Small numbers are kinds, flags, choices and lengths of lists.
    let byte = prop_oneof![3 => 0..8u8, 1 => any::<u8>()];
    let accepted = run(prop::collection::vec(byte, 4..12), script::decode);
    assert!(accepted > 50, "{accepted} of the cases are frames: the test shows nothing");
}

#[test]
fn arbitrary_damage_never_makes_a_frame() {
    let accepted = run(prop::collection::vec(any::<u8>(), 0..40), script::damage);
    assert!(accepted > 50, "{accepted} of the journals open: the test shows nothing");
}
