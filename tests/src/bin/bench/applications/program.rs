//! Running a program to be timed. The tests' library looks only every 20 ms whether one has ended; here it's waited
//! for.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::{Pid, Signal, kill_process_group};

/// No program of a job takes longer, on two slow cores.
const LIMIT: Duration = Duration::from_secs(900);

/// Ends a program, with all that it has started, that takes too long. Dropping it lets the program be.
struct Watch(#[expect(dead_code, reason = "it's the dropping of it that counts")] Sender<()>);

impl Watch {
    fn over(child: &Child) -> Self {
        let (ended, wait) = channel();
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        std::thread::spawn(move || {
            if let (Err(RecvTimeoutError::Timeout), Some(group)) = (wait.recv_timeout(LIMIT), group) {
                // Where it has ended at this very moment there is nothing to end.
                let _ = kill_process_group(group, Signal::KILL);
            }
        });
        Self(ended)
    }
}

/// Runs a program to its end, which must be a success: how long it took, and what it printed.
pub fn time(command: &mut Command) -> Outcome<(Duration, String)> {
    let line = format!("{command:?}");
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = Instant::now();
    let child = command.spawn().map_err(tried(format!("starting {line}")))?;
    let watch = Watch::over(&child);
    let done = child.wait_with_output().map_err(tried(format!("waiting for {line}")))?;
    let took = started.elapsed();
    drop(watch);
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{line}: {}: {errors}", done.status);
    Ok((took, String::from_utf8_lossy(&done.stdout).into_owned()))
}

/// Runs a program that says a line when it is ready, waits for one, and then does what it times itself. `settle` comes
/// in between.
pub fn time_itself(command: &mut Command, settle: impl FnOnce() -> Outcome) -> Outcome<String> {
    let line = format!("{command:?}");
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = command.spawn().map_err(tried(format!("starting {line}")))?;
    let watch = Watch::over(&child);
    let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
    let mut ready = String::new();
    let heard = output.read_line(&mut ready).map_err(tried(format!("reading from {line}")));
    let settled = heard.and_then(|_| settle());
    if let Some(mut input) = child.stdin.take().filter(|_| settled.is_ok()) {
        // One that has ended already tells why by its status.
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
