//! Runs commands: keeps their output, limits their time, reports failures in full.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::{Outcome, tried};

/// The longest time a command of a test may take, on two slow cores.
const LIMIT: Duration = Duration::from_secs(600);

/// The longest time that killed processes may take to end.
const KILL_LIMIT: Duration = Duration::from_secs(60);

/// The result of a command.
#[derive(Debug)]
pub struct Done {
    /// The command line, for messages.
    pub line: String,
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output.
    pub output: String,
    /// Its standard error.
    pub errors: String,
}

impl Done {
    /// Everything about the result, for a message.
    #[must_use]
    pub fn describe(&self) -> String {
        let cut = |text: &str| {
            let lines: Vec<_> = text.lines().collect();
            lines[lines.len().saturating_sub(40)..].join("\n")
        };
        // Scripts are long; their beginning shows which one it was.
        let line: String = self.line.chars().take(200).collect();
        format!("'{line}' ended with {}\n{}\n{}", self.status, cut(&self.output), cut(&self.errors))
    }

    /// Fails unless it succeeded.
    pub fn success(self) -> Outcome<Self> {
        if self.status.success() { Ok(self) } else { Err(self.describe()) }
    }

    /// Fails unless it ended with `code` and its standard error contains all `words`.
    pub fn failure(self, code: i32, words: &[&str]) -> Outcome<Self> {
        if self.status.code() != Some(code) {
            return Err(format!("expected exit status {code}: {}", self.describe()));
        }
        match words.iter().find(|word| !self.errors.contains(**word)) {
            None => Ok(self),
            Some(word) => Err(format!("the error message lacks '{word}': {}", self.describe())),
        }
    }
}

/// Variables that an outer `make` passes on. With them, an inner `make` prints levels and directories.
const FROM_MAKE: [&str; 3] = ["MAKEFLAGS", "MAKELEVEL", "MFLAGS"];

/// Runs a command to its end, in the same way with and without an outer `make`.
pub fn run(command: &mut Command) -> Outcome<Done> {
    let line = line_of(command);
    for name in FROM_MAKE {
        command.env_remove(name);
    }
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    finish(child.map_err(tried(format!("starting '{line}'")))?, line)
}

/// Runs a program with arguments to its end.
pub fn call<S: AsRef<OsStr>>(program: &str, arguments: &[S]) -> Outcome<Done> {
    run(Command::new(program).args(arguments))
}

/// Runs a shell script in a directory to its end.
pub fn shell(directory: &std::path::Path, script: &str) -> Outcome<Done> {
    run(Command::new("bash").args(["-euo", "pipefail", "-c", script]).current_dir(directory))
}

/// Waits for a child whose output was piped.
pub fn finish(mut child: Child, line: String) -> Outcome<Done> {
    fn drain<R: Read + Send + 'static>(from: Option<R>) -> std::thread::JoinHandle<String> {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut from) = from {
                // Output before a read error is still shown.
                let _ = from.read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }
    let (output, errors) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = wait(&mut child, LIMIT).map_err(|error| format!("'{line}': {error}"))?;
    let text = |thread: std::thread::JoinHandle<String>| thread.join().unwrap_or_default();
    Ok(Done { line, status, output: text(output), errors: text(errors) })
}

/// Waits for a child, and kills it if it takes longer than `limit`.
pub fn wait(child: &mut Child, limit: Duration) -> Outcome<ExitStatus> {
    if let Some(status) = wait_for(child, limit)? {
        return Ok(status);
    }
    // The child is not reaped yet, so its number is still its own.
    let _ = child.kill();
    let _ = child.wait();
    Err(format!("not done after {} s, so it was killed", limit.as_secs()))
}

/// Waits for a child, but no longer than `limit`.
pub fn wait_for(child: &mut Child, limit: Duration) -> Outcome<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait().map_err(tried("waiting"))? {
            return Ok(Some(status));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Waits until `condition` holds.
pub fn eventually(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) -> Outcome {
    let deadline = Instant::now() + limit;
    while !condition() {
        if Instant::now() > deadline {
            return Err(format!("{what}: not so after {} s", limit.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Kills a process by its number, at once.
pub fn kill(pid: u32) -> Outcome {
    signal(pid, Signal::KILL)
}

/// Sends a signal to a process. After SIGSTOP it waits until every thread has stopped: until then they go on.
pub fn signal(pid: u32, signal: Signal) -> Outcome {
    let target = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or("no process number")?;
    kill_process(target, signal).map_err(tried(format!("sending a signal to process {pid}")))?;
    if signal == Signal::STOP {
        eventually(&format!("process {pid} is stopped"), Duration::from_secs(10), || has_stopped(pid))?;
    }
    Ok(())
}

fn has_stopped(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.map(|thread| state(&thread.path())).all(|state| matches!(state, None | Some('T' | 'Z' | 'X')))
}

/// The letter that `/proc` gives for the state of a process or thread; `None` if there is none.
fn state(directory: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(directory.join("stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether a process runs (one that waits to be reaped does not).
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    state(Path::new(&format!("/proc/{pid}"))).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Whether a status says that SIGKILL ended the process.
#[must_use]
pub fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::KILL.as_raw())
}

/// The `ashlar` command: `ASHLAR` in the environment, or the one beside this program.
#[must_use]
pub fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("ASHLAR") {
        return path.into();
    }
    let beside = std::env::current_exe().ok().and_then(|path| path.parent().map(|directory| directory.join("ashlar")));
    beside.unwrap_or_else(|| "ashlar".into())
}

/// `ashlar` with arguments, not yet run, and without the caller's `ASHLAR_ARENA`.
pub fn ashlar<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let mut command = Command::new(program());
    command.args(arguments).env_remove("ASHLAR_ARENA");
    command
}

/// Starts the daemon of an arena, without output.
pub fn start_daemon(arena: &Path, options: &[&str]) -> Outcome<Child> {
    let mut daemon = ashlar(&["daemon"]);
    daemon.args(options).arg("--arena").arg(arena);
    daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    daemon.spawn().map_err(tried("starting a daemon"))
}

/// The processes whose command line contains a text.
pub fn processes_naming(text: &str) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|process| {
        let words = std::fs::read(process.path().join("cmdline")).ok()?;
        let is_it = String::from_utf8_lossy(&words).contains(text);
        is_it.then(|| process.file_name().to_str()?.parse().ok()).flatten()
    });
    processes.collect()
}

/// Kills processes by their numbers, and waits until they are gone.
pub fn kill_all(processes: &[u32]) -> Outcome {
    for &pid in processes {
        // A process that is gone already needs no kill.
        let _ = kill(pid);
    }
    eventually("the killed processes are gone", KILL_LIMIT, || !processes.iter().any(|&pid| is_alive(pid)))
}

/// A process's parent, unless that is process 1 (or a reaper of a container, which has no ashlar in its name).
#[must_use]
pub fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let parent: u32 = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    let name = std::fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    (name.trim() == "ashlar").then_some(parent)
}

fn line_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
