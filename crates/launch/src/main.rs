//! The `ashlar` command: runs `ashlar run PROGRAM…`, and starts all other verbs.
//!
//! Purpose: users run programs by the thousand, so the command that starts them is as small as it can be. If the
//! compiler can (`build.rs`), it is linked without the dynamic linker. It then begins without libc, whose own start
//! takes longer than all work here. All other command lines, those with options of `run` too, are for `ashlar-main`,
//! which takes this process's place.
//!
//! Invariants: prints nothing that `ashlar-main` would not print.
//!
//! Non-goals: any verb or option that is not used by the thousand.
//!
//! Source: `docs/architecture.md`, section "Processes".
#![cfg_attr(bare, no_std, no_main)]
#![deny(unsafe_code)]

#[cfg(bare)]
extern crate alloc;
// Linked for the parts that the language needs (a panic's way), and used for types.
#[cfg(bare)]
extern crate std;

#[cfg(bare)]
mod bare;
#[cfg(not(bare))]
mod hosted;

#[cfg(not(bare))]
fn main() -> std::process::ExitCode {
    hosted::serve()
}
