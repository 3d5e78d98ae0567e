//! `ashlar-main`: all verbs of the `ashlar` command (`crates/launch`).
//!
//! Purpose: turn the command line into calls of the crates below, and start the processes that run in the background.
//! Print in plain words the result, all paths, and, if something fails, the next step.
//!
//! Invariants:
//! - `ashlar mount DIR` needs nothing prepared and nothing running; `ashlar umount DIR` leaves nothing running.
//! - Output for people goes to standard output, errors and progress to standard error; `--json` prints one document.
//! - Every error names its subject and the next step. The exit status is 0, 1 (failed) or 2 (wrong usage); `fsck` has
//!   the exit statuses of fsck(8), and `fsck --compare` those of diff(1).
//!
//! Non-goals: deciding anything about files: that is SharedFS's and LibFS's.
//!
//! Source: `docs/architecture.md`, section "Processes".
#![forbid(unsafe_code)]

mod arguments;
mod error;
mod output;
mod system;
mod verbs;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use crate::arguments::{ArenaVerb, Arguments, Verb};
use crate::error::CliError;
use crate::verbs::{bench, cluster, daemon, dev, fsck, mount, mount_process, quota, resize, run, status, top, umount};

fn main() -> ExitCode {
    // Lists of processes show the command that the user typed.
    let _ = rustix::thread::set_name(c"ashlar");
    finish(serve(&Arguments::parse()))
}

fn serve(arguments: &Arguments) -> Result<ExitCode, CliError> {
    match &arguments.verb {
        Verb::Mount(mount) => mount::run(mount),
        Verb::Umount(umount) => umount::run(umount),
        Verb::Run(run) => run::run(run),
        Verb::Status(status) => status::run(status),
        Verb::Top(top) => top::run(top),
        Verb::Fsck(fsck) => fsck::run(fsck),
        Verb::Daemon(daemon) => daemon::run(daemon),
        Verb::Arena(ArenaVerb::Resize(resize)) => resize::run(resize),
        Verb::Cluster(verb) => cluster::run_cluster(verb),
        Verb::Node(verb) => cluster::run_node(verb),
        Verb::Dev(verb) => dev::run(verb),
        Verb::Quota(verb) => quota::run(verb),
        Verb::Bench(bench) => bench::run(bench),
        Verb::BenchWorker(worker) => bench::run_worker(worker),
        Verb::SharedFs(shared) => daemon::run_shared_fs(shared),
        Verb::Helper(_) => daemon::run_helper(),
        Verb::MountProcess(mount) => mount_process::run(mount),
        Verb::BenchPeer => bench::run_peer(),
    }
}

fn finish(result: Result<ExitCode, CliError>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) => {
            // Standard error may be a log on a disk that is gone.
            let _ = writeln!(std::io::stderr(), "ashlar: {error}");
            error.exit_code()
        }
    }
}
