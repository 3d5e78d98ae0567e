//! Starts daemons and mount processes in the background, and waits for them.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_pmem::{Arena, ArenaError, PrivateDirectory};
use ashlar_wire::{Connection, NodeStanding, Reply, Request, StatusReply, WireError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::CliError;
use crate::output::progress;
use crate::system::arena::{ArenaLocation, DAEMON_LOG, MOUNT_LOG, program_of};

/// How long without a session a daemon stays that a mount has started, in seconds.
pub const LINGER_SECONDS: u64 = 10;
/// How long to wait for a daemon that is just ending, or for a process that checks the arena.
const HANDOVER: Duration = Duration::from_secs(15);
/// How long a writer that has just started may wait for its replica: both machines may have started just now.
const REPLICA_PATIENCE: Duration = Duration::from_secs(10);
/// How long a daemon may take to answer a request for its status.
const SILENCE: Duration = Duration::from_secs(10);
/// A starting daemon that dies so often will not come up. Its supervisor alone would try on for ever.
const DEATHS_MAX: usize = 5;
/// A log that is longer than this is renamed at the next start.
const LOG_BYTES_MAX: u64 = 1 << 20;
/// How often an event is polled for that nothing announces.
const PAUSE: Duration = Duration::from_millis(5);

/// Asks the daemon of an arena; returns `None` if none answers.
pub fn ask(place: &ArenaLocation, request: &Request) -> Result<Option<Reply>, CliError> {
    let mut connection = match Connection::connect(&place.socket()) {
        Ok(connection) => connection,
        Err(error @ WireError::ForeignServer(_)) => return Err(error.into()),
        Err(_) => return Ok(None),
    };
    let (reply, _) = connection.call::<_, Reply>(request, &[])?;
    Ok(Some(reply))
}

/// Asks as [`ask`] does, but waits for a daemon that is just starting or ending. A killed daemon takes connections
/// until its last thread is gone, and answers none. Then the next daemon is asked, once, since the request itself may
/// be what ends them.
pub fn ask_patiently(place: &ArenaLocation, request: &Request) -> Result<Option<Reply>, CliError> {
    let mut deadline = Instant::now() + HANDOVER;
    let mut is_first = true;
    loop {
        match ask(place, request) {
            Err(CliError::Wire(WireError::Closed)) if is_first => {
                is_first = false;
                deadline = Instant::now() + HANDOVER;
                let dying = holder_pid(place);
                while dying.is_some() && holder_pid(place) == dying && Instant::now() < deadline {
                    std::thread::sleep(PAUSE);
                }
                if holder_pid(place).is_none() {
                    return Ok(None);
                }
            }
            Ok(None) if is_temporary(Arena::open(place.directory()).as_ref().err(), deadline) => {
                std::thread::sleep(PAUSE * 10);
            }
            answer => return answer,
        }
    }
}

/// Returns the process that holds an arena, if any; 0 if it has not written its number yet.
fn holder_pid(place: &ArenaLocation) -> Option<u32> {
    match Arena::open(place.directory()) {
        Err(ArenaError::InUse { pid }) => Some(pid),
        _ => None,
    }
}

/// Returns the status that the daemon of an arena reports; `None` if none answers.
pub fn daemon_status(place: &ArenaLocation) -> Result<Option<StatusReply>, CliError> {
    let mut connection = match Connection::connect_above(&place.socket(), 0, SILENCE) {
        Ok(connection) => connection,
        Err(error @ WireError::ForeignServer(_)) => return Err(error.into()),
        Err(_) => return Ok(None),
    };
    match connection.call::<_, Reply>(&Request::Status, &[]) {
        Ok((Reply::Status(status), _)) => Ok(Some(*status)),
        Ok(_) => Err(CliError::Misunderstood),
        // A request for status waits for no process that is stopped.
        Err(WireError::Silent) => Err(silence_error(place)),
        Err(error) => Err(error.into()),
    }
}

/// Returns the error of a daemon that does not answer. The user needs its process number.
fn silence_error(place: &ArenaLocation) -> CliError {
    match holder_pid(place) {
        Some(pid) if pid != 0 => CliError::DaemonSilent { arena: place.directory().to_owned(), pid },
        _ => CliError::NoDaemon(place.directory().to_owned()),
    }
}

/// Ensures that a daemon serves the arena. Returns whether it was started now.
pub fn ensure_daemon(place: &ArenaLocation) -> Result<(StatusReply, bool), CliError> {
    let spinner = progress::spinner("starting the daemon");
    let deadline = Instant::now() + HANDOVER;
    let result = loop {
        if let Ok(Some(status)) = daemon_status(place) {
            break Ok((status, false));
        }
        match Arena::open(place.directory()) {
            // No process holds it, so the daemon can. But if a daemon was killed just now, its supervisor may be
            // faster.
            Ok(arena) => {
                drop(arena);
                match start_daemon(place) {
                    Err(_) if is_temporary(Arena::open(place.directory()).as_ref().err(), deadline) => {}
                    result => break result.map(|status| (status, true)),
                }
            }
            Err(error) if is_temporary(Some(&error), deadline) => std::thread::sleep(PAUSE * 10),
            Err(error) => break Err(place.error(error)),
        }
    };
    spinner.finish_and_clear();
    result
}

/// Waits a while if the daemon is a writer's that waits for its replica. Returns the last status.
///
/// It may wait still: then a new session gets its reason.
pub fn await_replica(place: &ArenaLocation, mut status: StatusReply) -> StatusReply {
    let is_waiting =
        |status: &StatusReply| status.cluster.as_ref().is_some_and(|cluster| cluster.standing == NodeStanding::Waiting);
    if is_waiting(&status) {
        let spinner = progress::spinner("waiting for the replica");
        let deadline = Instant::now() + REPLICA_PATIENCE;
        while is_waiting(&status) && Instant::now() < deadline {
            std::thread::sleep(PAUSE * 10);
            // No answer: it has just got its replica, and opens its socket anew.
            status = daemon_status(place).ok().flatten().unwrap_or(status);
        }
        spinner.finish_and_clear();
    }
    status
}

/// Whether the obstacle is a daemon that starts or ends, or a check: it gets time to end, or to answer. A process that
/// has just opened the arena has not written its number yet.
fn is_temporary(error: Option<&ArenaError>, deadline: Instant) -> bool {
    let is_ashlar = |pid| pid == 0 || program_of(pid) == "ashlar";
    matches!(error, Some(&ArenaError::InUse { pid }) if is_ashlar(pid) && Instant::now() < deadline)
}

fn start_daemon(place: &ArenaLocation) -> Result<StatusReply, CliError> {
    let (log, said_before) = open_log(&place.open_directory()?, DAEMON_LOG)?;
    let mut child = Command::new(this_program()?)
        .args(["daemon", "--background", "--linger-seconds", &LINGER_SECONDS.to_string(), "--arena"])
        .arg(place.directory())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(CliError::system("starting the daemon"))?;
    loop {
        // Recovery of long logs takes time: as long as the daemon lives, it is starting.
        if let Ok(Some(status)) = daemon_status(place) {
            return Ok(status);
        }
        if let Some(status) = child.try_wait().map_err(CliError::system("waiting for the daemon"))? {
            let reason =
                first_error(&place.daemon_log(), said_before).unwrap_or_else(|| format!("it ended with {status}"));
            return Err(CliError::DaemonStart { reason, log: place.daemon_log() });
        }
        if count_deaths(&place.daemon_log(), said_before) >= DEATHS_MAX {
            end_supervisor(&mut child);
            let reason = format!("it died {DEATHS_MAX} times, each time within a second of its start");
            return Err(CliError::DaemonStart { reason, log: place.daemon_log() });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Returns how often a supervisor has reported the death of its SharedFS, in a log after `from`.
fn count_deaths(path: &Path, from: u64) -> usize {
    log_after(path, from).map_or(0, |text| text.matches(ashlar_daemon::DEATH_REPORT).count())
}

/// Ends a supervisor whose SharedFS does not come up.
fn end_supervisor(child: &mut Child) {
    // It may be gone already.
    let _ = rustix::process::kill_process(Pid::from_child(child), rustix::process::Signal::TERM);
    let _ = child.wait();
}

/// Opens a log to append to, and returns its length. A long one is kept as `….old`, in place of the one before.
pub fn open_log(directory: &PrivateDirectory, name: &str) -> Result<(File, u64), CliError> {
    if directory.stat(name).is_ok_and(|log| log.st_size as u64 > LOG_BYTES_MAX) {
        // If that fails, the log becomes longer.
        let _ = directory.rename(name, format!("{name}.old"));
    }
    let opened = directory.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND);
    let path = directory.path().join(name);
    let log = opened.map_err(CliError::system(format!("opening the log {}", path.display())))?;
    let length = log.metadata().map_or(0, |metadata| metadata.len());
    Ok((log, length))
}

/// Returns the first error for people in a log after `from`. The log's other lines are structured.
pub fn first_error(path: &Path, from: u64) -> Option<String> {
    error_line(&log_after(path, from)?)
}

/// Returns the text of a log after `from`.
fn log_after(path: &Path, from: u64) -> Option<String> {
    let mut log = File::open(path).ok()?;
    log.seek(SeekFrom::Start(from)).ok()?;
    let mut text = Vec::new();
    log.read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

fn error_line(text: &str) -> Option<String> {
    // The supervisor's error repeats that its child failed; the first one is the child's own, with the cause.
    text.lines().find_map(|line| line.strip_prefix("ashlar: ")).map(str::to_owned)
}

/// Starts a process in the background that prints on its standard output either `ready` or an error.
pub fn start_reporting(command: &mut Command, directory: &PrivateDirectory) -> Result<Child, CliError> {
    let (log_file, _) = open_log(directory, MOUNT_LOG)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log_file)
        .spawn()
        .map_err(CliError::system("starting the process behind the mount"))?;
    let mut said = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output)
            .read_line(&mut said)
            .map_err(CliError::system("listening to the process behind the mount"))?;
    }
    match said.trim_end() {
        READY => Ok(child),
        "" => {
            let status = child.wait().map_err(CliError::system("waiting for the process behind the mount"))?;
            Err(CliError::MountProcess(format!(
                "the process behind the mount ended with {status}; its log is {}",
                directory.path().join(MOUNT_LOG).display()
            )))
        }
        words => {
            // It ends by itself now.
            let _ = child.wait();
            Err(CliError::MountProcess(words.to_owned()))
        }
    }
}

/// A background process's message when it is ready.
pub const READY: &str = "ready";

/// Returns the path of this program.
pub fn this_program() -> Result<std::path::PathBuf, CliError> {
    std::env::current_exe().map_err(CliError::system("finding the ashlar program itself"))
}

/// Makes this process the leader of a session of its own, so that it outlives the terminal.
pub fn leave_terminal() -> Result<(), CliError> {
    rustix::process::setsid().map_err(CliError::system("leaving the terminal"))?;
    // A background process must not keep a directory busy that a user wants to unmount.
    std::env::set_current_dir("/").map_err(CliError::system("leaving the directory"))
}

/// A process to wait for, even if it is no child.
#[derive(Debug)]
pub struct AwaitedProcess(Option<rustix::fd::OwnedFd>);

impl AwaitedProcess {
    /// Opens the process `pid`.
    pub fn new(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Self(pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
    }

    /// Waits for its end; returns at once if it was already gone.
    pub fn wait(&self) -> io::Result<()> {
        let Some(process) = &self.0 else { return Ok(()) };
        loop {
            match poll(&mut [PollFd::new(process, PollFlags::IN)], None) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_error_in_a_log_is_the_cause() {
        let log = "{\"level\":\"INFO\"}\nashlar: no room\nashlar: SharedFS gave up: exit status: 1\n";
        assert_eq!(error_line(log).as_deref(), Some("no room"));
        assert_eq!(error_line("{}\n"), None);
    }

    #[test]
    fn long_log_is_renamed() {
        let directory = tempfile::tempdir().expect("a directory");
        let (log, old) = (directory.path().join(DAEMON_LOG), directory.path().join("daemon.log.old"));
        let open_log = || open_log(&PrivateDirectory::open(directory.path()).expect("a private one"), DAEMON_LOG);
        std::fs::write(&log, vec![b'x'; LOG_BYTES_MAX as usize]).expect("written");
        assert_eq!(open_log().expect("opened").1, LOG_BYTES_MAX);
        assert!(!old.exists());
        std::fs::write(&log, vec![b'x'; LOG_BYTES_MAX as usize + 1]).expect("written");
        assert_eq!(open_log().expect("opened").1, 0);
        assert_eq!(old.metadata().expect("kept").len(), LOG_BYTES_MAX + 1);
    }

    #[test]
    fn process_of_any_user_can_be_waited_for() {
        let mut child = Command::new("true").spawn().expect("started");
        let awaited = AwaitedProcess::new(child.id());
        awaited.wait().expect("ended");
        assert!(child.wait().expect("reaped").success());
        AwaitedProcess::new(child.id()).wait().expect("gone processes have ended");
    }

    #[test]
    fn message_of_a_background_process_is_handed_on() {
        let directory = tempfile::tempdir().expect("a directory");
        let logs = PrivateDirectory::open(directory.path()).expect("a private one");
        let run = |script: &str| start_reporting(Command::new("sh").args(["-c", script]), &logs);
        assert!(run("echo ready").expect("ready").wait().expect("ended").success());
        assert!(
            matches!(run("echo no such thing; exit 1"), Err(CliError::MountProcess(words)) if words == "no such thing")
        );
        assert!(matches!(run("exit 3"), Err(CliError::MountProcess(words)) if words.contains("exit status: 3")));
    }
}
