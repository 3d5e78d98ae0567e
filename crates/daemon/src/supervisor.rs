//! The supervisor: keeps SharedFS running.
//!
//! It holds nothing that could break: a child process, and the signals to pass on. It restarts SharedFS at once after a
//! death by signal, and after an exit with [`RESTART_EXIT`] or [`ROLE_EXIT`]. If SharedFS dies again and again, the
//! pauses become longer, up to [`PAUSE_MAX`]; the supervisor never gives up, as sessions and mounts wait. An exit with
//! another error is final, since SharedFS itself decided to end (wrong arena, no space). After it has once run, an exit
//! with [`RETRY_EXIT`] is not: the system may have later what it lacks now. A SharedFS that fails again and again is
//! given up once no process needs it: its disk may be gone for good.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::SupervisorError;

/// A run shorter than this counts as a failure to start.
const QUICK: Duration = Duration::from_secs(1);
/// The pause after the second quick death in a row; it doubles with each further one.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// After so many exits with an error in a row, SharedFS is started again only while it is needed.
const FAILURES_UNNEEDED: u32 = 2;
/// How often the supervisor asks, during a pause, whether SharedFS is still needed.
const NEED_INTERVAL: Duration = Duration::from_secs(1);

/// How supervision ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Supervised {
    /// SharedFS ended by itself: it was asked to, or no session needed it any more.
    Ended,
    /// The supervisor received a signal to end, and SharedFS has ended.
    Stopped,
}

enum Event {
    Signal,
    Died(std::io::Result<ExitStatus>),
}

/// Runs `program` with `args` until it ends with success.
///
/// It restarts the program each time it is killed. If the supervisor gets SIGTERM or SIGINT, it passes the signal on.
/// `is_needed` says whether any process waits for the program: if none does, a program that fails again and again is
/// given up.
///
/// # Errors
/// [`SupervisorError`] if the program can't be started, or ends with an error.
pub fn supervise(
    program: &Path,
    args: &[OsString],
    is_needed: &dyn Fn() -> bool,
) -> Result<Supervised, SupervisorError> {
    let (events, inbox) = channel();
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(SupervisorError::Signals)?;
    let signal_events = events.clone();
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if signal_events.send(Event::Signal).is_err() {
                return;
            }
        }
    });
    let (mut quick_deaths, mut failures, mut is_first) = (0, 0, true);
    loop {
        let started = Instant::now();
        let (status, stopped) = run_once(program, args, &events, &inbox)?;
        if status.success() || stopped {
            return if stopped { Ok(Supervised::Stopped) } else { Ok(Supervised::Ended) };
        }
        let has_new_role = status.code() == Some(i32::from(ROLE_EXIT));
        let may_mend =
            |code| has_new_role || code == i32::from(RESTART_EXIT) || !is_first && code == i32::from(RETRY_EXIT);
        if status.code().is_some_and(|code| !may_mend(code)) {
            return Err(SupervisorError::GaveUp(status));
        }
        is_first = false;
        quick_deaths = if started.elapsed() < QUICK { quick_deaths + 1 } else { 0 };
        failures = if status.code().is_some() && !has_new_role { failures + 1 } else { 0 };
        let pause = pause_after(quick_deaths);
        let pause_ms = pause.as_millis() as u64;
        if has_new_role {
            tracing::info!(pause_ms, "SharedFS is started again: the node's role in its cluster has changed");
        } else {
            tracing::warn!(%status, restarts = quick_deaths, pause_ms, "{DEATH_REPORT}");
        }
        let ended = Instant::now();
        loop {
            if failures >= FAILURES_UNNEEDED && !is_needed() {
                return Err(SupervisorError::GaveUp(status));
            }
            let left = pause.saturating_sub(ended.elapsed());
            if left.is_zero() {
                break;
            }
            if let Ok(Event::Signal) = inbox.recv_timeout(left.min(NEED_INTERVAL)) {
                return Ok(Supervised::Stopped);
            }
        }
    }
}

/// Returns how long to wait before the next start.
///
/// The first restart is at once, since sessions wait; a repeated death gets a pause, so that it burns no processor.
fn pause_after(quick_deaths: u32) -> Duration {
    match quick_deaths {
        0 | 1 => Duration::ZERO,
        more => PAUSE_MAX.min(PAUSE_FIRST * 2u32.saturating_pow(more - 2).min(1 << 16)),
    }
}

/// The report of each death of SharedFS in the log.
pub const DEATH_REPORT: &str = "SharedFS died and is started again";

/// The exit code of a SharedFS that a restart with recovery may mend.
///
/// It is also that of a Rust program whose main thread panicked.
pub const RESTART_EXIT: u8 = 101;
/// The exit code of a SharedFS whose node has another role in its cluster from now on: it must start anew.
pub const ROLE_EXIT: u8 = 102;
/// The exit code of a SharedFS that the system lacks something for.
///
/// It is `EX_TEMPFAIL`.
pub const RETRY_EXIT: u8 = 75;

/// How SharedFS's allocator is to give memory back (mallopt(3)).
///
/// Tables grow by tens of megabytes under load, in one thread after the other. With glibc's defaults each thread keeps
/// its own share of that: 74 MB after 100,000 files were made and removed, 15 MB with these. The one lock leaves
/// threads little to contend for.
const ALLOCATOR: [(&str, &str); 3] =
    [("MALLOC_ARENA_MAX", "1"), ("MALLOC_TRIM_THRESHOLD_", "262144"), ("MALLOC_MMAP_THRESHOLD_", "131072")];

fn run_once(
    program: &Path,
    args: &[OsString],
    events: &Sender<Event>,
    inbox: &Receiver<Event>,
) -> Result<(ExitStatus, bool), SupervisorError> {
    let failed = |error| SupervisorError::Start { program: program.to_owned(), error };
    let mut command = Command::new(program);
    command.args(args);
    for (name, value) in ALLOCATOR {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    let child = command.spawn().map_err(failed)?;
    let pid = Pid::from_child(&child);
    watch_child(child, events.clone());
    let mut stopped = false;
    loop {
        match inbox.recv() {
            Ok(Event::Signal) => {
                stopped = true;
                // A child that is gone already has its status on the way.
                let _ = kill_process(pid, Signal::TERM);
            }
            Ok(Event::Died(status)) => return Ok((status.map_err(failed)?, stopped)),
            Err(_) => return Err(failed(std::io::Error::other("the watching threads are gone"))),
        }
    }
}

fn watch_child(mut child: Child, events: Sender<Event>) {
    std::thread::spawn(move || {
        let status = child.wait();
        // The channel is closed once the supervisor has returned.
        let _ = events.send(Event::Died(status));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Result<Supervised, SupervisorError> {
        supervise(Path::new("/bin/sh"), &["-c".into(), script.into()], &|| true)
    }

    #[test]
    fn child_that_ends_well_ends_supervision() {
        assert_eq!(shell("exit 0").expect("ended"), Supervised::Ended);
    }

    #[test]
    fn child_gets_allocator_settings() {
        let script = ALLOCATOR.map(|(name, _)| format!("test -n \"${name}\"")).join(" && ");
        assert_eq!(shell(&script).expect("ended"), Supervised::Ended);
    }

    #[test]
    fn child_that_exits_with_error_is_not_restarted() {
        assert!(matches!(shell("exit 3"), Err(SupervisorError::GaveUp(status)) if status.code() == Some(3)));
    }

    #[test]
    fn killed_child_is_restarted() {
        let directory = tempfile::tempdir().expect("a directory");
        let mark = directory.path().join("mark").display().to_string();
        let script = format!("test -e {mark} && exit 0; : > {mark}; kill -9 $$");
        assert_eq!(shell(&script).expect("ended"), Supervised::Ended);
    }

    #[test]
    fn child_that_asks_for_restart_is_restarted() {
        let directory = tempfile::tempdir().expect("a directory");
        let mark = directory.path().join("mark").display().to_string();
        for code in [RESTART_EXIT, ROLE_EXIT] {
            let script = format!("rm {mark} && exit 0; : > {mark}; exit {code}");
            assert_eq!(shell(&script).expect("ended"), Supervised::Ended);
        }
    }

    #[test]
    fn child_that_keeps_dying_is_started_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let count = directory.path().join("count").display().to_string();
        let script = format!("echo >> {count}; test $(wc -l < {count}) -ge 7 && exit 0; kill -9 $$");
        assert_eq!(shell(&script).expect("ended"), Supervised::Ended);
    }

    #[test]
    fn pauses_between_starts_grow_to_their_maximum() {
        let pauses: Vec<_> = (0..6).map(|deaths| pause_after(deaths).as_millis()).collect();
        assert_eq!(pauses, [0, 0, 50, 100, 200, 400]);
        assert_eq!((pause_after(12), pause_after(u32::MAX)), (PAUSE_MAX, PAUSE_MAX));
    }

    #[test]
    fn temporary_failure_is_final_only_at_first() {
        let script = format!("exit {RETRY_EXIT}");
        assert!(matches!(shell(&script), Err(SupervisorError::GaveUp(status)) if status.code() == Some(75)));
        let directory = tempfile::tempdir().expect("a directory");
        let count = directory.path().join("count").display().to_string();
        let script = format!("echo >> {count}; case $(wc -l < {count}) in 1) kill -9 $$;; 2) exit {RETRY_EXIT};; esac");
        assert_eq!(shell(&script).expect("ended"), Supervised::Ended);
    }

    #[test]
    fn child_that_cannot_run_is_given_up_when_not_needed() {
        let directory = tempfile::tempdir().expect("a directory");
        let count = directory.path().join("count").display().to_string();
        let script = format!("echo >> {count}; case $(wc -l < {count}) in 1) kill -9 $$;; *) exit {RETRY_EXIT};; esac");
        let is_needed = || std::fs::read(&count).is_ok_and(|lines| lines.len() < 5);
        let ended = supervise(Path::new("/bin/sh"), &["-c".into(), script.into()], &is_needed);
        assert!(matches!(ended, Err(SupervisorError::GaveUp(status)) if status.code() == Some(75)));
        assert_eq!(std::fs::read(&count).expect("read").len(), 5);
    }
}
