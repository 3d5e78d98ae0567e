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

/// A session asks for a number that no inode has yet.
#[test]
fn lease_taken_before_its_inode_is_made_is_counted() {
    const SCRIPT: [u8; 117] = [
        0, 201, 23, 22, 0, 0, 0, 0, 91, 0, 89, 0, 5, 0, 0, 0, 0, 21, 0, 0, 0, 0, 16, 0, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 3, 0, 0, 0, 16, 6, 0, 21, 0, 0, 0, 6, 0, 0, 16, 0, 0, 0, 132, 0, 3, 0, 0, 0, 0, 0, 90, 0, 0, 6, 0, 0, 15,
        0, 0, 0, 192, 0, 0, 0, 192, 36, 0, 0, 192, 0, 0, 72, 32, 49, 222, 6, 126, 6, 138, 0, 208, 0, 0, 0, 0, 0, 208,
        0, 0, 0, 0, 129, 91, 5, 0, 0, 0, 24, 231, 0, 17, 0, 29, 0, 131,
    ];
    let script: Vec<_> = SCRIPT.into_iter().chain([0; 64]).collect();
    script::run(&script).expect("the tables agree");
}
