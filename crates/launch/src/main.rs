//! The `ashlar` command: `ashlar run PROGRAM…`, and the way to all other verbs.
//!
//! Purpose: programs are run by the thousand, so what runs them is as small as it can be. Where the compiler has what that takes (`build.rs`), it's
//! linked without the dynamic linker, and begins without libc, whose own start takes longer than all that is done here. Whatever else was typed, an
//! option of `run` too, is for `ashlar-main`, which takes this process's place.
//!
//! Invariants: says nothing that `ashlar-main` would not say.
//!
//! Non-goals: any verb or option that is not used by the thousand.
//!
//! Source: `docs/architecture.md`, section "Processes".
#![cfg_attr(bare, no_std, no_main)]
#![deny(unsafe_code)]

#[cfg(bare)]
extern crate alloc;
// Linked for what the language needs of it (a panic's way), and used for types.
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
