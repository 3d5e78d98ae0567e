//! `ashlar-suite [WORD…]`: runs tests of whole processes.
//!
//! It runs the tests whose names contain one of the words.
#![forbid(unsafe_code)]

mod bench;
mod capi;
mod conformance;
mod differ;
mod errors;
mod family;
mod fenced;
mod foreign;
mod hammer;
mod kill;
mod launch;
mod life;
mod linear;
mod locks;
mod mapped;
mod pages;
mod power;
mod programs;
mod quota;
mod report;
mod rights;
mod run;
mod scratch;
mod short;
mod synced;
mod top;
mod trouble;
mod unlucky;
mod watched;

use std::process::ExitCode;

fn main() -> ExitCode {
    // Without this, files would not have the permission bits that tests request.
    rustix::process::umask(rustix::fs::Mode::from_bits_truncate(0o022));
    let groups = [
        life::TESTS,
        top::TESTS,
        errors::TESTS,
        bench::TESTS,
        programs::TESTS,
        kill::TESTS,
        pages::TESTS,
        scratch::TESTS,
        hammer::TESTS,
        linear::TESTS,
        quota::TESTS,
        run::TESTS,
        launch::TESTS,
        locks::TESTS,
        mapped::TESTS,
        unlucky::TESTS,
        watched::TESTS,
        family::TESTS,
        fenced::TESTS,
        capi::TESTS,
        report::TESTS,
        rights::TESTS,
        short::TESTS,
        foreign::TESTS,
        trouble::TESTS,
        conformance::TESTS,
        differ::TESTS,
        power::TESTS,
        synced::TESTS,
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
    ashlar_tests::harness::main(&groups.concat(), &io_uring_groups)
}
