//! `ashlar daemon`: SharedFS under its supervisor.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

use ashlar_daemon::Config;
use tracing_subscriber::EnvFilter;

use crate::arena::{Place, survives};
use crate::arguments::{DaemonArguments, SharedFsArguments};
use crate::error::CliError;
use crate::launch::{leave_terminal, this_program};
use crate::size::Size;

/// Runs the supervisor, and SharedFS under it.
pub fn run(arguments: &DaemonArguments) -> Result<ExitCode, CliError> {
    start_log();
    if arguments.background {
        leave_terminal()?;
    }
    let place = Place::new(&arguments.arena.arena)?;
    let prepared = place.prepare(arguments.create.size, arguments.create.emulate_pmem)?;
    let place = Place::at(place.directory().to_owned())?;
    if !arguments.background {
        // Opened and closed again, so that an arena in use is told here, with what to do, and not in a log.
        let medium = place.open()?.medium().kind.name();
        println!("arena     {} ({})", place.directory().display(), Size(prepared.summary.size_bytes));
        println!("medium    {medium}: {}", survives(medium));
        println!("mount     ashlar mount DIR --arena {}", place.directory().display());
    }
    let mut words: Vec<OsString> = vec!["shared-fs".into(), "--arena".into(), place.directory().into()];
    if let Some(seconds) = arguments.linger_seconds {
        words.extend(["--linger-seconds".into(), seconds.to_string().into()]);
    }
    ashlar_daemon::supervise(&this_program()?, &words)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs SharedFS itself.
pub fn run_shared_fs(arguments: &SharedFsArguments) -> Result<ExitCode, CliError> {
    start_log();
    let mut config = Config::new(&arguments.arena);
    config.linger_seconds = arguments.linger_seconds;
    ashlar_daemon::run(config)?;
    Ok(ExitCode::SUCCESS)
}

/// Structured logs on standard error: lines for people on a terminal, JSON elsewhere. `ASHLAR_LOG` says how much.
pub fn start_log() {
    let filter = EnvFilter::try_from_env("ASHLAR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Only the first of several calls takes effect, which is what is wanted.
    let _ = if std::io::stderr().is_terminal() { log.try_init() } else { log.json().try_init() };
}
