//! `ashlar umount DIR`: unmounts, and ends a daemon that nothing uses.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use ashlar_fuse::MountError;
use ashlar_wire::{Reply, Request};

use crate::arguments::UmountArguments;
use crate::error::CliError;
use crate::output::progress;
use crate::system::arena::ArenaLocation;
use crate::system::background::{AwaitedProcess, ask, daemon_status, ensure_daemon};
use crate::system::mounts;

/// Unmounts, waits until everything is digested, and ends a daemon that a mount has started and that nothing uses.
pub fn run(arguments: &UmountArguments) -> Result<ExitCode, CliError> {
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::NotRoot { what: "unmounting a file system" });
    }
    let directory = mounts::resolve_mount_point(&arguments.directory)?;
    if !mounts::is_mounted(&directory) {
        return Err(CliError::NotMounted(directory));
    }
    mounts::end_dead_mount(&directory);
    let record = mounts::record_of(&directory);
    let process = record.as_ref().map(|record| AwaitedProcess::new(record.pid));
    let place = record.map(|record| ArenaLocation::at(record.arena)).transpose()?;
    if let Some(place) = &place {
        // A daemon that was killed together with its supervisor is needed once more, to digest the session's log.
        ensure_daemon(place)?;
    }
    unmount(&directory, arguments.lazy)?;
    if arguments.lazy {
        print_unless_quiet(
            arguments,
            &format!("{} is out of the tree; it ends when the last program has closed its files", directory.display()),
        );
        return Ok(ExitCode::SUCCESS);
    }
    let spinner = progress::spinner("writing everything to its place");
    if let Some(process) = process {
        process.wait().map_err(CliError::system("waiting for the process behind the mount"))?;
    }
    let ended = place.as_ref().map_or(Ok(false), end_daemon)?;
    spinner.finish_and_clear();
    let also = if ended { ", and nothing is left running" } else { "" };
    print_unless_quiet(arguments, &format!("unmounted {}{also}", directory.display()));
    Ok(ExitCode::SUCCESS)
}

fn print_unless_quiet(arguments: &UmountArguments, words: &str) {
    if !arguments.quiet {
        println!("{words}");
    }
}

fn unmount(directory: &Path, lazy: bool) -> Result<(), CliError> {
    match ashlar_fuse::unmount(directory, lazy) {
        Err(MountError::Busy { .. }) => {
            Err(CliError::Busy { path: directory.to_owned(), users: mounts::users_of(directory) })
        }
        result => Ok(result?),
    }
}

/// Ends an unused daemon, if a mount has started it and it belongs to no cluster. Returns whether it ended.
pub fn end_daemon(place: &ArenaLocation) -> Result<bool, CliError> {
    let Some(status) = daemon_status(place).unwrap_or(None) else { return Ok(true) };
    if status.cluster.is_some() || !was_started_by_mount(status.pid) {
        return Ok(false);
    }
    let daemon = AwaitedProcess::new(status.pid);
    let supervisor = parent_of(status.pid).map(AwaitedProcess::new);
    // If the connection ends without an answer, the daemon has ended.
    if let Ok(Some(Reply::Error(_))) = ask(place, &Request::Shutdown) {
        // Another session exists, or came just now: it keeps the daemon.
        return Ok(false);
    }
    for process in std::iter::once(daemon).chain(supervisor) {
        process.wait().map_err(CliError::system("waiting for the daemon"))?;
    }
    Ok(true)
}

/// Whether a mount has started the daemon. A daemon that a person or a service manager started has no limit to its
/// lingering, and stays.
fn was_started_by_mount(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| line.split(|&byte| byte == 0).any(|word| word == b"--linger-seconds"))
}

/// Returns the parent of a process, from the fourth word of its `stat`; the second one, its name, may hold any
/// characters.
fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    // Process 1 adopts orphans, and nothing waits for it.
    (parent > 1).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_found() {
        assert_eq!(parent_of(std::process::id()), Some(std::os::unix::process::parent_id()));
        assert_eq!(parent_of(1), None);
    }

    #[test]
    fn only_daemons_with_a_limit_are_of_a_mount() {
        assert!(!was_started_by_mount(std::process::id()));
    }
}
