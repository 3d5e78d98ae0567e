//! `ashlar daemon`: SharedFS under its supervisor.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ashlar_daemon::{Config, DaemonError, RESTART_EXIT, RETRY_EXIT, ROLE_EXIT, ReplicaFault};
use ashlar_wire::Admission;
use tracing_subscriber::EnvFilter;

use crate::arguments::{DaemonArguments, SharedFsArguments};
use crate::error::CliError;
use crate::output::size::Size;
use crate::system::admission::resolve_admission;
use crate::system::arena::{ArenaLocation, survives};
use crate::system::background::{leave_terminal, this_program};
use crate::system::mounts::has_mounts;

/// Gives each daemon a shadow, if it is not empty.
const SHADOWS: &str = "ASHLAR_SHADOWS";
/// Names a fault that is planted in the shadow.
const SHADOW_FAULT: &str = "ASHLAR_SHADOW_FAULT";

/// Runs the supervisor, and SharedFS under it.
pub fn run(arguments: &DaemonArguments) -> Result<ExitCode, CliError> {
    start_log();
    if arguments.background {
        leave_terminal()?;
    }
    let sessions = match &arguments.sessions {
        Some(choice) => resolve_admission(Some(choice))?,
        None => Admission::default(),
    };
    if let Some(address) = &arguments.metrics {
        // An address that can't be had is reported here, with the next step. Later, SharedFS only tries again.
        address.listen().map_err(|error| CliError::Metrics { address: address.clone(), error })?;
    }
    let place = ArenaLocation::new(&arguments.arena.arena)?;
    let prepared = place.prepare(arguments.create.size, arguments.create.emulate_pmem)?;
    let place = ArenaLocation::at(place.directory().to_owned())?;
    if !arguments.background {
        // The arena is opened and closed again. So an arena in use is reported here, with the next step, and not in a
        // log.
        let medium = place.open()?.medium().kind.name();
        println!("arena     {} ({})", place.directory().display(), Size(prepared.summary.size_bytes));
        println!("medium    {medium}: {}", survives(medium));
        println!("mount     ashlar mount DIR --arena {}", place.directory().display());
        if let Some(address) = &arguments.metrics {
            println!("metrics   http://{address}/metrics");
        }
    }
    let mut words: Vec<OsString> = vec!["shared-fs".into(), "--arena".into(), place.directory().into()];
    if let Some(seconds) = arguments.linger_seconds {
        words.extend(["--linger-seconds".into(), seconds.to_string().into()]);
    }
    if let Some(address) = &arguments.metrics {
        words.extend(["--metrics".into(), address.to_string().into()]);
    }
    words.extend(["--sessions".into(), sessions.to_string().into()]);
    if let Some(shadow) = find_shadow(arguments.shadow.as_deref(), place.directory()) {
        words.extend([
            "--shadow".into(),
            std::path::absolute(shadow).map_err(CliError::system("finding the shadow"))?.into(),
        ]);
    }
    // A daemon that was made for mounts ends with them, also while it can't run: its disk may be gone for good.
    let is_needed = || arguments.linger_seconds.is_none() || has_mounts(place.directory());
    ashlar_daemon::supervise(&this_program()?, &words, &is_needed)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the directory of the shadow, if there is to be one.
///
/// Tests give each daemon one, also where a mount starts the daemon: beside its arena.
fn find_shadow(chosen: Option<&Path>, arena: &Path) -> Option<PathBuf> {
    let is_everywhere = || std::env::var_os(SHADOWS).is_some_and(|value| !value.is_empty());
    chosen.map(Path::to_owned).or_else(|| is_everywhere().then(|| arena.with_extension("shadow")))
}

/// Runs SharedFS itself.
pub fn run_shared_fs(arguments: &SharedFsArguments) -> Result<ExitCode, CliError> {
    start_log();
    let mut config = Config::new(&arguments.arena);
    config.linger_seconds = arguments.linger_seconds;
    config.sessions = arguments.sessions.clone();
    config.metrics = arguments.metrics.clone();
    config.shadow = arguments.shadow.clone();
    config.shadow_fault = std::env::var(SHADOW_FAULT).ok().and_then(|name| ReplicaFault::named(&name));
    config.helper = helper_command(&arguments.arena);
    match ashlar_daemon::run(config) {
        Err(DaemonError::RoleChanged) => Ok(ExitCode::from(ROLE_EXIT)),
        Err(error) if error.asks_for_restart() => {
            tracing::error!(%error, "SharedFS ends, to be started again");
            Ok(ExitCode::from(RESTART_EXIT))
        }
        Err(error) if error.is_temporary() => {
            // The log may be on the disk that fails.
            let _ = writeln!(std::io::stderr(), "ashlar: {}", CliError::from(error));
            Ok(ExitCode::from(RETRY_EXIT))
        }
        result => Ok(result.map(|()| ExitCode::SUCCESS)?),
    }
}

/// Returns the command of the helper, for SharedFS and for the processes behind mounts: work that may have to wait for
/// a mount.
///
/// It is the very program that runs, even if another release has been installed since. The command line has the arena
/// for lists of processes.
pub fn helper_command(arena: &Path) -> Vec<OsString> {
    vec!["/proc/self/exe".into(), "helper".into(), "--arena".into(), arena.into()]
}

/// Runs the helper's process. Its starter is at the other end of standard input.
pub fn run_helper() -> Result<ExitCode, CliError> {
    start_log();
    let line = std::io::stdin().as_fd().try_clone_to_owned();
    ashlar_helper::run(line.map_err(CliError::system("opening the connection to the starter"))?.into());
    Ok(ExitCode::SUCCESS)
}

/// Ends the whole process if one of its threads panics: a broken invariant. The others would wait for that thread for
/// ever, while a new start recovers from the logs.
pub fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// Starts structured logs on standard error: lines for people on a terminal, JSON otherwise. `ASHLAR_LOG` sets the
/// level.
pub fn start_log() {
    let filter = EnvFilter::try_from_env("ASHLAR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // If the log can't be written, on a disk that is full or gone, no operation fails. No place is left to report that.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    // Only the first of several calls has an effect, as intended.
    let _ = if std::io::stderr().is_terminal() { log.try_init() } else { log.json().try_init() };
}
