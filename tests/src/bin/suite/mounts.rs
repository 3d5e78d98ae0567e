//! Tests of file systems on one mount or two: their life, limits and conformance.

mod conformance;
mod life;
mod linearizability;
mod quota;
mod two_mounts;

use ashlar_tests::harness::Test;

/// The groups of tests here.
pub const GROUPS: &[&[Test]] =
    &[life::TESTS, quota::TESTS, two_mounts::TESTS, linearizability::TESTS, conformance::TESTS];
