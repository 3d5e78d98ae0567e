//! Mounts, kills and checks the real `ashlar`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::command::{Done, ashlar, eventually, kill, kill_all, parent, processes_naming, run, signal};
use crate::mirrors::{Mirror, await_sync};
use crate::reference::unmount;
use crate::shadows::{SHADOWS, compare_with_shadow, note_comparison};
use crate::{Outcome, ensure, open_directory, tried};

/// The longest time that a background process may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most mounts that a test makes of one arena.
const MOUNTS_MAX: usize = 4;

/// How a program reaches the files of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// Through the kernel and FUSE.
    Mount,
    /// Through LibFS in its own process, `ashlar run`, after the first calls: the default for users.
    Run,
    /// As `Run`, from the first call on.
    RunAtOnce,
}

impl Front {
    /// A program, not yet run, that reaches files this way. The file system must be mounted.
    pub fn command<S: AsRef<OsStr>>(self, program: S) -> Command {
        match self {
            Self::Mount => Command::new(program),
            Self::Run | Self::RunAtOnce => {
                let mut command = ashlar(&["run", "--"]);
                command.arg(program);
                if self == Self::RunAtOnce {
                    command.env(ashlar_wire::DEFER_VARIABLE, "0");
                }
                command
            }
        }
    }
}

/// Why nothing can be mounted here; `None` if mounting works.
#[must_use]
pub fn obstacle() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root, which mounting takes".into());
    }
    if !Path::new("/dev/fuse").exists() {
        return Some("there is no /dev/fuse".into());
    }
    None
}

/// The beginning of the names of directories that process `pid` makes for its arenas and mounts.
#[must_use]
pub fn prefix(pid: u32) -> String {
    format!("ashlar-test-{pid}-")
}

/// Removes the leftovers of a killed test: its processes, mounts and directories have its prefix in their names.
pub fn clear_behind(pid: u32) {
    let prefix = prefix(pid);
    let _ = kill_all(&processes_naming(&prefix));
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for point in table.lines().filter_map(|line| line.split(' ').nth(4)).filter(|point| point.contains(&prefix)) {
        unmount(Path::new(point));
    }
    for place in [std::env::temp_dir(), "/dev/shm".into()] {
        let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// The medium of an arena, for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// On tmpfs.
    Memory,
    /// In the directory for temporary files.
    Disk,
}

/// An arena of a test's own, with directories to mount it on. A drop removes all of it.
#[derive(Debug)]
pub struct TestArena {
    directory: TempDir,
    arena: PathBuf,
    _memory: Option<TempDir>,
    size: &'static str,
    /// The test has damaged it, so that its tree can't be read.
    is_damaged: AtomicBool,
    /// The tests' copies, shadow or replica, are for this arena too.
    has_copy: bool,
    /// Its replica, if tests have mirrors.
    mirror: Mutex<Option<Mirror>>,
}

impl TestArena {
    /// A test arena of `size`, not yet mounted.
    pub fn new(medium: Medium, size: &'static str) -> Outcome<Self> {
        let directory = open_directory(&prefix(std::process::id()))?;
        let memory = match medium {
            Medium::Disk => None,
            Medium::Memory => Some(
                TempDir::with_prefix_in(prefix(std::process::id()), "/dev/shm")
                    .map_err(tried("making a directory in /dev/shm"))?,
            ),
        };
        let arena = memory.as_ref().unwrap_or(&directory).path().join("arena");
        Ok(Self {
            directory,
            arena,
            _memory: memory,
            size,
            is_damaged: AtomicBool::new(false),
            has_copy: true,
            mirror: Mutex::default(),
        })
    }

    /// A test arena in a directory of the caller's.
    pub fn within(place: &Path, size: &'static str) -> Outcome<Self> {
        let directory = open_directory(&prefix(std::process::id()))?;
        Ok(Self {
            directory,
            arena: place.join("arena"),
            _memory: None,
            size,
            is_damaged: AtomicBool::new(false),
            has_copy: true,
            mirror: Mutex::default(),
        })
    }

    /// Leaves the arena out of the comparison with its copy: the test is about to damage it.
    pub fn expect_damage(&self) {
        self.is_damaged.store(true, Ordering::Relaxed);
    }

    /// A test arena with a first mount.
    pub fn mounted(medium: Medium, size: &'static str) -> Outcome<Self> {
        let site = Self::new(medium, size)?;
        site.mount(0)?;
        Ok(site)
    }

    /// The arena's directory.
    #[must_use]
    pub fn arena(&self) -> &Path {
        &self.arena
    }

    /// A directory of the host's file system, outside the mounts.
    #[must_use]
    pub fn outside(&self) -> &Path {
        self.directory.path()
    }

    /// The directory of mount `number`.
    #[must_use]
    pub fn point(&self, number: usize) -> PathBuf {
        self.directory.path().join(format!("mount{number}"))
    }

    /// Never has a copy: its disk has no room for one.
    #[must_use]
    pub fn without_copy(mut self) -> Self {
        self.has_copy = false;
        self
    }

    /// `ashlar` with arguments and this arena.
    pub fn ashlar(&self, arguments: &[&str]) -> Outcome<Done> {
        let mut command = ashlar(arguments);
        if !self.has_copy {
            command.env_remove(SHADOWS);
        }
        if let ["arena", "resize", size] = arguments {
            self.grow_replica(size)?;
        }
        run(command.arg("--arena").arg(&self.arena))
    }

    /// Makes the arena of the replica larger, if there is one: there is only as much room as the smaller one has.
    fn grow_replica(&self, size: &str) -> Outcome {
        let mirror = self.mirror.lock().map_err(|_| "a thread of the test panicked")?;
        mirror.as_ref().map_or(Ok(()), |mirror| mirror.grow(size))
    }

    /// Mounts at directory `number`.
    pub fn mount(&self, number: usize) -> Outcome<Done> {
        let point = self.point(number);
        match std::fs::create_dir(&point) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists && !is_dead(&error) => {
                return Err(format!("making {}: {error}", point.display()));
            }
            _ => {}
        }
        let is_mirror = self.start_mirror()?;
        // Most tests with ordinary users are about their sessions.
        let done = self.ashlar(&["mount", "--sessions", "all", "--size", self.size, &point.display().to_string()])?;
        let done = done.success()?;
        if is_mirror {
            await_sync(&self.arena)?;
        }
        Ok(done)
    }

    /// Gives an arena that is not there yet a replica, if arenas are to have one; returns whether it did.
    fn start_mirror(&self) -> Outcome<bool> {
        let is_new = Mirror::is_wanted() && self.has_copy && !self.arena.exists();
        if is_new {
            let mut mirror = self.mirror.lock().map_err(|_| "a thread of the test panicked")?;
            *mirror = Some(Mirror::start(&self.arena, self.size)?);
        }
        Ok(is_new)
    }

    /// Unmounts directory `number`.
    pub fn umount(&self, number: usize) -> Outcome<Done> {
        run(ashlar(&["umount"]).arg(self.point(number)))?.success()
    }

    /// Waits until no process of the arena is left. The daemon of a cluster's node stays without mounts, and is ended.
    pub fn await_end(&self, patience: Duration) -> Outcome {
        if self.mirror.lock().is_ok_and(|mirror| mirror.is_some()) {
            signal(self.daemon()?, Signal::TERM)?;
        }
        eventually("all processes end", patience, || !self.is_named())
    }

    /// Whether any process has the arena on its command line.
    #[must_use]
    pub fn is_named(&self) -> bool {
        !processes_naming(&self.arena.display().to_string()).is_empty()
    }

    /// The output of `status --json` for this arena.
    pub fn status(&self) -> Outcome<Value> {
        let done = self.ashlar(&["status", "--json"])?.success()?;
        let report: Value = serde_json::from_str(&done.output).map_err(tried("reading the JSON of status"))?;
        report["arenas"].get(0).cloned().ok_or_else(|| format!("no arena in {report}"))
    }

    /// The value of one of SharedFS's counters.
    pub fn counter(&self, name: &str) -> Outcome<u64> {
        let status = self.status()?;
        let counters = status["daemon"]["counters"].as_array().map(Vec::as_slice).unwrap_or_default();
        let found = counters.iter().find(|counter| counter[0] == name).and_then(|counter| counter[1].as_u64());
        found.ok_or_else(|| format!("no counter {name} in {status}"))
    }

    /// The process number of SharedFS.
    pub fn daemon(&self) -> Outcome<u32> {
        let status = self.status()?;
        let pid = status["daemon"]["pid"].as_u64().ok_or_else(|| format!("no daemon runs: {status}"))?;
        u32::try_from(pid).map_err(tried("the daemon's number"))
    }

    /// The processes behind the mounts.
    pub fn mount_processes(&self) -> Outcome<Vec<u32>> {
        let status = self.status()?;
        let sessions = status["daemon"]["sessions"].as_array().cloned().unwrap_or_default();
        let mounts = sessions.iter().filter(|session| session["kind"] == "Mount");
        Ok(mounts.filter_map(|session| session["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok())).collect())
    }

    /// The processes behind the mounts by their own records, whether or not a daemon answers.
    pub(crate) fn recorded(&self) -> Vec<u32> {
        let records = std::fs::read_dir("/run/ashlar").into_iter().flatten().flatten();
        let records =
            records.filter_map(|file| serde_json::from_slice::<Value>(&std::fs::read(file.path()).ok()?).ok());
        let ours =
            records.filter(|record| record["arena"].as_str().is_some_and(|arena| Path::new(arena) == self.arena));
        ours.filter_map(|record| u32::try_from(record["pid"].as_u64()?).ok()).collect()
    }

    /// Kills SharedFS, and waits until another one answers in its place. A supervisor gives up if SharedFS dies again
    /// and again within a second of its start, so SharedFS gets that second first.
    pub fn kill_daemon(&self) -> Outcome {
        self.let_daemon_run()?;
        self.kill_daemon_at_once()
    }

    /// Waits until SharedFS has run so long that the supervisor does not count its death as an early one.
    pub fn let_daemon_run(&self) -> Outcome {
        eventually("the daemon has run for a second", PATIENCE, || {
            self.status().is_ok_and(|status| status["daemon"]["uptime_seconds"].as_u64() >= Some(1))
        })
    }

    /// Does the same as [`Self::kill_daemon`], however short a time SharedFS has run.
    pub fn kill_daemon_at_once(&self) -> Outcome {
        let before = self.daemon()?;
        kill(before)?;
        eventually("a new daemon answers", PATIENCE, || self.daemon().is_ok_and(|now| now != before))
    }

    /// Kills the processes behind the mounts: LibFS.
    pub fn kill_mounts(&self) -> Outcome {
        let processes = self.mount_processes()?;
        ensure!(!processes.is_empty(), "there is no mount process to kill");
        kill_all(&processes)
    }

    /// Kills supervisor, SharedFS and LibFS in one go.
    pub fn kill_everything(&self) -> Outcome {
        let daemon = self.daemon()?;
        let mut processes: Vec<_> = parent(daemon).into_iter().chain([daemon]).collect();
        processes.extend(self.mount_processes()?);
        kill_all(&processes)
    }

    /// Kills all processes of the arena, whether or not a daemon answers.
    pub fn kill_leftovers(&self) -> Outcome {
        let mut processes = self.recorded();
        if let Ok(daemon) = self.daemon() {
            processes.extend(parent(daemon).into_iter().chain([daemon]));
        }
        kill_all(&processes)
    }

    /// Removes mounts, dead or alive.
    pub fn clear_mounts(&self) {
        for number in 0..MOUNTS_MAX {
            while is_mount_point(&self.point(number)) {
                unmount(&self.point(number));
            }
        }
    }

    /// Checks the arena, in use or not; fails unless it's clean. Returns the counts.
    pub fn check(&self) -> Outcome<Value> {
        let done = self.ashlar(&["fsck", "--json"])?;
        if !done.status.success() {
            return Err(format!("the check is not clean: {}", done.describe()));
        }
        let findings: Value = serde_json::from_str(&done.output).map_err(tried("reading the JSON of fsck"))?;
        ensure!(findings["problems"].as_array().is_some_and(Vec::is_empty), "the check is not clean: {findings}");
        Ok(findings["counts"].clone())
    }
}

/// The daemons' complaints, of the arenas that are gone.
static COMPLAINTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps the last warnings of an arena's daemon, for the report of a failed test.
pub fn keep_complaints(arena: &Path) {
    const SHOWN: usize = 20;
    let log = std::fs::read_to_string(arena.join("daemon.log")).unwrap_or_default();
    let lines: Vec<_> = log.lines().filter(|line| !line.contains("\"INFO\"")).collect();
    let complaints = lines[lines.len().saturating_sub(SHOWN)..].join("\n");
    if let Ok(mut all) = COMPLAINTS.lock() {
        all.extend(Some(complaints).filter(|lines| !lines.is_empty()));
    }
}

/// Takes what daemons have complained of in their logs, for the report of a failed test.
pub fn take_complaints() -> String {
    COMPLAINTS.lock().map(|mut all| std::mem::take(&mut *all).join("\n")).unwrap_or_default()
}

impl Drop for TestArena {
    fn drop(&mut self) {
        keep_complaints(&self.arena);
        if !self.is_damaged.load(Ordering::Relaxed) {
            compare_with_shadow(&self.arena);
            if let Some(mirror) = self.mirror.get_mut().ok().and_then(Option::take) {
                note_comparison(mirror.compare(self));
            }
        }
        // A failed test may leave anything behind: mounts that hang, daemons that run. Processes end first, by their
        // numbers. The following tests report leftovers that can't be ended, when they find them.
        let _ = self.kill_leftovers();
        self.clear_mounts();
    }
}

/// Whether an error is that of a directory under a mount whose process is gone.
fn is_dead(error: &std::io::Error) -> bool {
    error.raw_os_error().is_some_and(|number| ashlar_types::Errno(number).is_of_dead_mount())
}

fn is_mount_point(path: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().any(|line| line.split(' ').nth(4).is_some_and(|point| Path::new(point) == path))
}
