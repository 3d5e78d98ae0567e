//! Runs a program as a child as if it had replaced this process.
//!
//! Signals reach the child, and this process ends as the child ends.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, getpgid, getpgrp, getpid, kill_process, set_child_subreaper, setrlimit,
    wait,
};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::iterator::exfiltrator::origin::Origin;

use crate::error::CliError;

/// Signals that another process may send to this process when it means the program, whose parent it is.
const PASSED_ON: [i32; 8] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH];
/// The exit status of shells for a program that a signal has ended, less the signal.
const SIGNALLED: i32 = 128;

/// How a program has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramEnd {
    /// With an exit status.
    Exited(i32),
    /// By a signal.
    Signalled(i32),
}

/// A running program.
pub struct ChildProgram {
    child: Child,
    is_over: Arc<AtomicBool>,
}

/// Starts a program. This process adopts the processes that the program starts and leaves behind, so they count as its
/// descendants.
///
/// # Errors
/// Those of running it.
pub fn start_child(command: &mut Command) -> io::Result<ChildProgram> {
    set_child_subreaper(Some(getpid()))?;
    let ignored = ignored_signals();
    // A signal that this process ignores must be ignored by the program too, as 'nohup' needs.
    let mut signals =
        SignalsInfo::<WithOrigin>::new(PASSED_ON.iter().filter(|&&signal| ignored & 1 << (signal - 1) == 0))?;
    let child = command.spawn()?;
    let is_over = Arc::new(AtomicBool::new(false));
    let (pid, ends) = (Pid::from_child(&child), Arc::clone(&is_over));
    std::thread::spawn(move || {
        for origin in signals.forever() {
            if !ends.load(Ordering::Acquire) && must_pass_on(&origin) {
                if let Some(signal) = Signal::from_named_raw(origin.signal) {
                    // It fails only if the program is gone.
                    let _ = kill_process(pid, signal);
                }
            }
        }
    });
    Ok(ChildProgram { child, is_over })
}

impl ChildProgram {
    /// Waits for the program's end, and reaps adopted children meanwhile.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn wait(self) -> Result<ProgramEnd, CliError> {
        let pid = Pid::from_child(&self.child);
        loop {
            let ended = match wait(WaitOptions::empty()) {
                Err(rustix::io::Errno::INTR) => continue,
                ended => ended.map_err(CliError::system("waiting for the program"))?,
            };
            let Some(end) = ended
                .filter(|(ended, _)| *ended == pid)
                .and_then(|(_, status)| program_end(ExitStatus::from_raw(status.as_raw())))
            else {
                continue;
            };
            self.is_over.store(true, Ordering::Release);
            return Ok(end);
        }
    }
}

impl ProgramEnd {
    /// Ends this process as the program has ended, as far as possible.
    pub fn end_alike(self) -> ExitCode {
        match self {
            Self::Exited(code) => ExitCode::from(code as u8),
            Self::Signalled(signal) => {
                // The program has dumped its memory, if that is enabled; this process need not.
                let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
                // A signal whose default action does not end a process returns.
                let _ = signal_hook::low_level::emulate_default_handler(signal);
                ExitCode::from((SIGNALLED + signal) as u8)
            }
        }
    }
}

fn program_end(status: ExitStatus) -> Option<ProgramEnd> {
    status.code().map(ProgramEnd::Exited).or_else(|| status.signal().map(ProgramEnd::Signalled))
}

/// Whether the program has not had the signal itself. The kernel sends a terminal's signals to the whole process group.
/// A process of that group that signals this one has mostly signalled the whole group.
fn must_pass_on(origin: &Origin) -> bool {
    let Some(sender) = origin.process.and_then(|process| Pid::from_raw(process.pid)) else { return false };
    getpgid(Some(sender)).map_or(true, |group| group != getpgrp())
}

/// Returns the signals that this process ignores: signal N is bit N - 1.
fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_found() {
        // Rust programs ignore SIGPIPE, and no other signal.
        assert_eq!(ignored_signals() & (1 << 12 | 1 << 14), 1 << 12);
    }

    #[test]
    fn exit_status_and_signal_are_distinct() {
        let ended = |script: &str| program_end(Command::new("sh").args(["-c", script]).status().expect("a shell"));
        assert_eq!(ended("exit 7"), Some(ProgramEnd::Exited(7)));
        assert_eq!(ended("kill -TERM $$"), Some(ProgramEnd::Signalled(SIGTERM)));
    }
}
