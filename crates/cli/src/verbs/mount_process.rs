//! The process behind a mount: a LibFS session, and the FUSE device that it serves.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use ashlar_fuse::{FuseMount, MountOptions};
use ashlar_launch::MountRecord;
use ashlar_libfs::{DescriptorPolicy, LibFs, Options};
use ashlar_types::MOUNT_SOURCE;
use ashlar_wire::{PATIENCE_VARIABLE, SessionKind, patience_ms};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::arguments::MountProcessArguments;
use crate::error::CliError;
use crate::system::arena::ArenaLocation;
use crate::system::background::{READY, leave_terminal};
use crate::system::mounts;
use crate::verbs::daemon;

/// Serves a mount in the background: reports on standard output, once, and runs until it is unmounted.
pub fn run(arguments: &MountProcessArguments) -> Result<ExitCode, CliError> {
    ashlar_wire::BusyWait::respect_quota();
    daemon::start_log();
    leave_terminal()?;
    let ready = || {
        println!("{READY}");
        close_standard_output();
    };
    serve(arguments, &ready).inspect_err(|error| println!("{error}"))
}

/// Serves a mount until it is unmounted; `ready` is called when programs can use it.
pub fn serve(arguments: &MountProcessArguments, ready: &dyn Fn()) -> Result<ExitCode, CliError> {
    daemon::abort_on_panic();
    let directory = &arguments.directory;
    let place = ArenaLocation::at(arguments.arena.clone())?;
    let said = std::env::var_os(PATIENCE_VARIABLE);
    let session = LibFs::connect(&Options {
        socket: place.socket(),
        kind: SessionKind::Mount,
        label: directory.display().to_string(),
        patience_ms: patience_ms(said.as_deref().map(OsStr::as_bytes)),
        notice: |words| tracing::warn!("{words}"),
        descriptors: DescriptorPolicy::ANY,
        beside: 0,
        yields_to_kernel: false,
    })?;
    let options = MountOptions {
        read_only: arguments.read_only,
        sessions: arguments.sessions.clone(),
        source: format!("{MOUNT_SOURCE}{}", arguments.arena.display()),
        helper: daemon::helper_command(&arguments.arena),
        ..MountOptions::default()
    };
    let mount = FuseMount::new(session.clone(), directory, options)?;
    let device = mount.device_number();
    let record =
        MountRecord { directory: directory.clone(), arena: arguments.arena.clone(), pid: std::process::id(), device };
    record.write().map_err(CliError::system(format!("writing {}", record.path().display())))?;
    unmount_on_signal(directory)?;
    ready();
    let result = mount.run();
    session.close_session();
    record.remove();
    result?;
    Ok(ExitCode::SUCCESS)
}

/// Unmounts on the first signal. If the mount is busy, it is detached from the tree, and programs that have it open
/// keep it.
fn unmount_on_signal(directory: &Path) -> Result<(), CliError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(CliError::system("watching signals"))?;
    let directory = directory.to_owned();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if ashlar_fuse::unmount(&directory, false).is_err() && mounts::is_mounted(&directory) {
                // The log may be on a disk that fails.
                let users = mounts::users_of(&directory);
                let _ = writeln!(
                    std::io::stderr(),
                    "ashlar: {} is busy{users}; it ends when its programs end",
                    directory.display()
                );
                // It fails only if another process was faster.
                let _ = ashlar_fuse::unmount(&directory, true);
            }
        }
    });
    Ok(())
}

/// Closes standard output. The starter of this process has read enough, and must not wait for the end of the pipe.
fn close_standard_output() {
    // If one of these fails, the pipe ends with this process, which does no harm.
    let _ = std::io::stdout().flush();
    if let Ok(null) = std::fs::File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
    }
}
