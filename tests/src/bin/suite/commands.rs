//! Tests of the `ashlar` commands: their output, their refusals, and their figures.

mod bench;
mod compare;
mod errors;
pub(crate) mod report;
mod small_command;
mod top;
mod users;

use ashlar_tests::harness::Test;

/// The groups of tests here.
pub const GROUPS: &[&[Test]] =
    &[bench::TESTS, compare::TESTS, errors::TESTS, small_command::TESTS, report::TESTS, top::TESTS, users::TESTS];
