//! Whole processes: the suite, the demo, and the programs that they run.
//!
//! Purpose: show on the real `ashlar` command, with real mounts and real kills, what the crates' own tests show in
//! parts. This library holds what the programs in `src/bin` share: running commands, mounting, and the *ledger*, a
//! random workload with a journal of every acknowledged update outside the mount.
//!
//! Invariants:
//! - A test that can't run here says *skipped* and why; with `CI` set, that counts as a failure.
//! - A test ends processes by their numbers, and only those that it has started.
//!
//! Non-goals: looking inside. The suite tests the installed programs, not the crates.
//!
//! Source: `docs/testing.md`.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod command;
pub mod differ;
pub mod harness;
pub mod ledger;
pub mod linear;
pub mod mirrors;
pub mod mount;
pub mod random;
pub mod ranges;
pub mod reference;
pub mod shadows;
pub mod tree;

/// A test's result: nothing, or a sentence with the expectation and the event.
pub type Outcome<T = ()> = Result<T, String>;

/// Fails with a sentence unless a condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($words:tt)+) => {
        if !$condition {
            return Err(format!($($words)+));
        }
    };
}

/// For `map_err`: prefixes an error with the attempted action.
pub fn tried<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl FnOnce(E) -> String {
    move |error| format!("{what}: {error}")
}

/// A directory for temporary files that every user may search: some programs require a user of their own.
pub fn open_directory(prefix: &str) -> Outcome<tempfile::TempDir> {
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    let made = tempfile::Builder::new().prefix(prefix).permissions(permissions).tempdir();
    made.map_err(tried("making a directory"))
}

/// A number from the environment, for loops whose length CI and `make soak` choose differently.
#[must_use]
pub fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// How often a loop on clusters runs: `default` in CI, `ASHLAR_LOOPS` in long runs.
#[must_use]
pub fn loops(default: u64) -> u64 {
    number("ASHLAR_LOOPS", default)
}
