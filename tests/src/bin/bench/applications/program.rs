//! Runs a program to be timed.
//!
//! The tests' library polls for a program's end only every 20 ms; this code waits for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::{Pid, Signal, kill_process_group};

/// The longest time of a job's program, on two slow cores.
const LIMIT: Duration = Duration::from_secs(900);

/// Kills a program that takes too long, with all processes that it has started. A drop ends the watch.
struct ProgramLimit(#[expect(dead_code, reason = "it's the dropping of it that counts")] Sender<()>);

impl ProgramLimit {
    fn over(child: &Child) -> Self {
        let (ended, wait) = channel();
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        std::thread::spawn(move || {
            if let (Err(RecvTimeoutError::Timeout), Some(group)) = (wait.recv_timeout(LIMIT), group) {
                // If it has ended at this very moment, there is nothing to kill.
                let _ = kill_process_group(group, Signal::KILL);
            }
        });
        Self(ended)
    }
}

/// Runs a program to its end, which must be a success; returns its time and its output.
pub fn time(command: &mut Command) -> Outcome<(Duration, String)> {
    let line = format!("{command:?}");
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = Instant::now();
    let child = command.spawn().map_err(tried(format!("starting {line}")))?;
    let watch = ProgramLimit::over(&child);
    let done = child.wait_with_output().map_err(tried(format!("waiting for {line}")))?;
    let took = started.elapsed();
    drop(watch);
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{line}: {}: {errors}", done.status);
    Ok((took, String::from_utf8_lossy(&done.stdout).into_owned()))
}

/// Runs a program that times itself: it prints a line when it is ready, and waits for one. `settle` runs in between.
pub fn time_itself(command: &mut Command, settle: impl FnOnce() -> Outcome) -> Outcome<String> {
    let line = format!("{command:?}");
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = command.spawn().map_err(tried(format!("starting {line}")))?;
    let watch = ProgramLimit::over(&child);
    let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
    let mut ready = String::new();
    let heard = output.read_line(&mut ready).map_err(tried(format!("reading from {line}")));
    let settled = heard.and_then(|_| settle());
    if let Some(mut input) = child.stdin.take().filter(|_| settled.is_ok()) {
        // If it has ended already, its status says why.
        let _ = writeln!(input, "go");
    }
    let mut said = String::new();
    let heard = output.read_to_string(&mut said).map_err(tried(format!("reading from {line}")));
    let status = child.wait().map_err(tried(format!("waiting for {line}")))?;
    drop(watch);
    settled?;
    heard?;
    ensure!(status.success(), "{line}: {status}");
    Ok(said)
}
