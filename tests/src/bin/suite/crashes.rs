//! Tests that kill processes or cut the power, and compare what is left.

pub mod kill_loops;
mod page_drops;
mod power_cuts;
mod read_back;
mod shadow;
mod sync;

use ashlar_tests::harness::Test;

/// The groups of tests here.
pub const GROUPS: &[&[Test]] =
    &[kill_loops::TESTS, page_drops::TESTS, read_back::TESTS, power_cuts::TESTS, shadow::TESTS, sync::TESTS];
