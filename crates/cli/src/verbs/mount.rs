//! `ashlar mount DIR`: mounts a file system, and starts everything that it needs.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, ExitCode};

use ashlar_types::{Errno, RING_SWITCH};
use ashlar_wire::{MountTerms, StatusReply};

use crate::arguments::{MountArguments, MountProcessArguments};
use crate::error::CliError;
use crate::output::size::Size;
use crate::system::admission::{describe_terms, resolve_admission};
use crate::system::arena::{ArenaLocation, PreparedArena, survives};
use crate::system::background::{await_replica, ensure_daemon, start_reporting, this_program};
use crate::system::mounts;
use crate::verbs::mount_process;

/// Mounts, and starts all processes that do not run yet.
pub fn run(arguments: &MountArguments) -> Result<ExitCode, CliError> {
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::NotRoot { what: "mounting a file system" });
    }
    if !Path::new("/dev/fuse").exists() {
        return Err(CliError::NoFuseDevice);
    }
    let directory = mounts::resolve_mount_point(&arguments.directory)?;
    mounts::end_dead_mount(&directory);
    check_mount_point(&directory)?;
    let sessions = resolve_admission(arguments.sessions.as_ref())?;
    // This is known only before the mount covers the directory.
    let hides = is_not_empty(&directory);
    let place = ArenaLocation::new(&arguments.arena.arena)?;
    let prepared = place.prepare(arguments.create.size, arguments.create.emulate_pmem)?;
    // The directory may exist only now, and may have been named through a symbolic link.
    let place = ArenaLocation::at(place.directory().to_owned())?;
    let (daemon, started) = ensure_daemon(&place)?;
    let daemon = await_replica(&place, daemon);
    let process = MountProcessArguments {
        directory: directory.clone(),
        arena: place.directory().to_owned(),
        read_only: arguments.read_only,
        sessions,
    };
    let print_summary = || {
        if !arguments.quiet {
            print!("{}", summary(&place, arguments, &process, &prepared, &daemon, started, hides));
        }
    };
    if arguments.foreground {
        return mount_process::serve(&process, &print_summary);
    }
    start_in_background(&process, &place)?;
    print_summary();
    Ok(ExitCode::SUCCESS)
}

/// Checks that a mount point is a directory, and no mount of Ashlar. A mount whose process died is removed.
fn check_mount_point(directory: &Path) -> Result<(), CliError> {
    match fs::metadata(directory) {
        Ok(_) if mounts::is_mounted(directory) => Err(CliError::AlreadyMounted(directory.to_owned())),
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(CliError::NotADirectory(directory.to_owned())),
        Err(error) if is_dead(&error) && mounts::is_mounted(directory) => {
            eprintln!("ashlar: the process behind the mount on {} is gone; mounting anew", directory.display());
            ashlar_fuse::unmount(directory, true)?;
            check_mount_point(directory)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(CliError::NoDirectory(directory.to_owned())),
        Err(error) => Err(CliError::system(format!("looking at {}", directory.display()))(error)),
    }
}

/// Whether a mount on `directory` hides files.
fn is_not_empty(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
}

/// Whether the error means that the mount's process is gone.
fn is_dead(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|number| Errno(number).is_of_dead_mount())
}

fn start_in_background(process: &MountProcessArguments, place: &ArenaLocation) -> Result<(), CliError> {
    let mut command = Command::new(this_program()?);
    command.arg("mount-process").arg(&process.directory).arg("--arena").arg(&process.arena);
    if process.read_only {
        command.arg("--read-only");
    }
    command.arg("--sessions").arg(process.sessions.to_string());
    // It outlives this process, and nothing waits for it here.
    drop(start_reporting(&mut command, &place.open_directory()?)?);
    Ok(())
}

/// Returns the summary to print: the mount, the arena, the daemon.
fn summary(
    place: &ArenaLocation,
    arguments: &MountArguments,
    process: &MountProcessArguments,
    prepared: &PreparedArena,
    daemon: &StatusReply,
    started: bool,
    hides: bool,
) -> String {
    let (size, directory) = (Size(daemon.arena_bytes), &process.directory);
    let terms = MountTerms { read_only: process.read_only, sessions: process.sessions.clone() };
    let mut text =
        format!("mounted   {}{}\n", directory.display(), if arguments.read_only { " (read-only)" } else { "" });
    let made = if prepared.made { ", made now" } else { "" };
    text += &format!("arena     {} ({size}{made})\n", place.directory().display());
    text += &format!("medium    {}: {}\n", daemon.medium, survives(&daemon.medium));
    let how = if started { "started now" } else { "was running" };
    text += &format!("daemon    process {} ({how}; log: {})\n", daemon.pid, place.daemon_log().display());
    text += &format!("sessions  {}\n", describe_terms(&terms));
    if arguments.create.size.is_some_and(|asked| !prepared.made && asked.0 != prepared.summary.size_bytes) {
        text += "note      the arena was there and keeps its size; 'ashlar arena resize' changes it\n";
    }
    if arguments.create.emulate_pmem && !prepared.made && !prepared.summary.emulated {
        text += "note      the arena was there and was not made with --emulate-pmem\n";
    }
    if hides {
        text += &format!("note      {} was not empty; its files are visible again after umount\n", directory.display());
    }
    if ashlar_fuse::rings_are_on() == Some(false) {
        text += "note      this kernel can hand requests over several times as fast (FUSE over io_uring), and has that switched off:\n";
        text += &format!("          'echo Y > {RING_SWITCH}' as root, then mount again\n");
    }
    text += &format!("unmount   ashlar umount {}\n", directory.display());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_existing_directories() {
        let directory = tempfile::tempdir().expect("a directory");
        assert!(check_mount_point(directory.path()).is_ok());
        assert!(matches!(check_mount_point(&directory.path().join("none")), Err(CliError::NoDirectory(_))));
        let file = directory.path().join("file");
        fs::write(&file, b"").expect("a file");
        assert!(matches!(check_mount_point(&file), Err(CliError::NotADirectory(_))));
    }

    #[test]
    fn mount_point_that_is_not_empty_is_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        assert!(!is_not_empty(directory.path()));
        fs::write(directory.path().join("file"), b"").expect("a file");
        assert!(is_not_empty(directory.path()));
    }
}
