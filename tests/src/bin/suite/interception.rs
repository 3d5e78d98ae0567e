//! Tests of `ashlar run`: calls that LibFS serves inside unmodified programs.

mod adverse;
mod faults;
mod fenced;
mod foreign_code;
mod former_sessions;
mod mappings;
mod narrowed_rights;
mod record_locks;
mod shared_files;
pub(crate) mod short_programs;
mod watches;

use ashlar_tests::harness::Test;

/// The groups of tests here.
pub const GROUPS: &[&[Test]] = &[
    record_locks::TESTS,
    mappings::TESTS,
    adverse::TESTS,
    watches::TESTS,
    shared_files::TESTS,
    fenced::TESTS,
    former_sessions::TESTS,
    narrowed_rights::TESTS,
    short_programs::TESTS,
    foreign_code::TESTS,
    faults::TESTS,
];
