//! Power cuts.
use ashlar_tests::harness::Test;

/// The tests of this group.
pub const TESTS: &[Test] = &[];
