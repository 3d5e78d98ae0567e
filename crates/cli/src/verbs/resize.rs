//! `ashlar arena resize SIZE`: changes an arena's size.

use std::process::ExitCode;

use ashlar_types::Errno;
use ashlar_wire::{Reply, Request};

use crate::arguments::ResizeArguments;
use crate::error::CliError;
use crate::output::progress;
use crate::output::size::Size;
use crate::system::arena::ArenaLocation;
use crate::system::background::{ask, daemon_status, ensure_daemon};

/// Changes an arena's size through its daemon, which is started for this if none runs.
pub fn run(arguments: &ResizeArguments) -> Result<ExitCode, CliError> {
    let place = ArenaLocation::find(&arguments.arena.arena)?;
    let before = Size(place.probe()?.size_bytes);
    ensure_daemon(&place)?;
    let spinner = progress::spinner(&format!("changing the arena from {before} to {}", arguments.size));
    let reply = ask(&place, &Request::Resize { bytes: arguments.size.0 });
    spinner.finish_and_clear();
    match reply?.ok_or_else(|| CliError::NoDaemon(place.directory().to_owned()))? {
        Reply::Done => {}
        Reply::Error(Errno::ENOSPC) if arguments.size < before => return Err(CliError::ShrinkTooFar(arguments.size)),
        Reply::Error(Errno::ENOSPC) => {
            let arena = place.directory().to_owned();
            return Err(CliError::NoSpace { arena, wanted: arguments.size, free: place.free()? });
        }
        Reply::Error(Errno::EBUSY) => return Err(CliError::ShrinkMapped(arguments.size)),
        Reply::Error(Errno::EINVAL) => {
            return Err(CliError::TooSmall { wanted: arguments.size, least: Size(ashlar_pmem::ARENA_BYTES_MIN) });
        }
        Reply::Error(Errno::EPERM | Errno::EACCES) => {
            return Err(CliError::NotRoot { what: "changing an arena's size" });
        }
        Reply::Error(error) => {
            return Err(CliError::Refused { what: "change the arena's size", error, log: place.daemon_log() });
        }
        Reply::Refused(reason) => return Err(CliError::ClusterRefused(reason)),
        _ => return Err(CliError::Misunderstood),
    }
    let after = daemon_status(&place)?.map_or(arguments.size, |status| Size(status.arena_bytes));
    println!("arena {}: {before} before, {after} now", place.directory().display());
    Ok(ExitCode::SUCCESS)
}
