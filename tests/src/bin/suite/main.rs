//! `ashlar-suite [WORD…]`: runs tests of whole processes.
//!
//! It runs the tests whose names contain one of the words.
#![forbid(unsafe_code)]

mod capi;
mod commands;
mod crashes;
mod differ;
mod interception;
mod mirror;
mod mounts;
mod programs;
mod run;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Without this, files would not have the permission bits that tests request.
    rustix::process::umask(rustix::fs::Mode::from_bits_truncate(0o022));
    let groups = [
        mounts::GROUPS,
        commands::GROUPS,
        &[programs::TESTS, run::TESTS],
        interception::GROUPS,
        &[capi::TESTS, differ::TESTS],
        crashes::GROUPS,
        mirror::GROUPS,
    ];
    // Tests that depend more than others on the way that requests take.
    let io_uring_groups = [
        "life/",
        "conformance/",
        "kill/",
        "programs/git",
        "programs/corners",
        "programs/mapped_writes",
        "programs/appends",
        "programs/flock",
        "run/jobs_survive_killed_daemon",
    ];
    ashlar_tests::harness::main(&groups.concat().concat(), &io_uring_groups)
}
