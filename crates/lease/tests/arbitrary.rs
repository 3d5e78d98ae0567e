//! Whatever sessions ask of the lease manager, it panics at nothing, and its tables agree.
//!
//! `ASHLAR_LEASE_CASES` sets the number of scripts; `make soak` runs a million.

mod script;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Scripts without the variable.
const CASES: u32 = 3000;

#[test]
fn arbitrary_wants_never_panic_and_invariants_hold() {
    let cases = std::env::var("ASHLAR_LEASE_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(CASES);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let scripts = prop::collection::vec(any::<u8>(), 1..600);
    let checked = TestRunner::new(config).run(&scripts, |script| script::run(&script).map_err(TestCaseError::fail));
    checked.unwrap_or_else(|error| panic!("{error}"));
}
