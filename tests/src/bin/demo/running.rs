//! Jobs that run, in process groups of their own.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ashlar_tests::command::{eventually, program};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::jobs::{Job, PRELUDE, Report};

/// The longest time that jobs may make no progress, on two slow cores.
const PATIENCE: Duration = Duration::from_secs(60);

/// A job that runs. A drop kills its processes.
pub struct Running {
    /// The job.
    pub job: &'static Job,
    /// Its directory on a mount.
    directory: PathBuf,
    /// A line for each acknowledged result, outside the mounts.
    journal: PathBuf,
    complaints: PathBuf,
    child: Child,
    /// Whether the processes may still run.
    is_running: bool,
    reader: Option<JoinHandle<Outcome<Duration>>>,
    longest_pause: Duration,
}

impl Running {
    /// Starts a job in a new directory of a mount. `outside` is where its journal is, with the name of the directory.
    pub fn start(job: &'static Job, directory: PathBuf, outside: &Path) -> Outcome<Self> {
        use std::os::unix::process::CommandExt;
        fs::create_dir(&directory).map_err(tried(format!("making {}", directory.display())))?;
        let name = directory.file_name().unwrap_or(job.name.as_ref()).display();
        let journal = outside.join(format!("{name}.journal"));
        let complaints = outside.join(format!("{name}.errors"));
        let errors = File::create(&complaints).map_err(tried("making a file"))?;
        let writer = std::env::current_exe().map_err(tried("finding this program"))?.with_file_name("ashlar-writer");
        let mut child = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &format!("{PRELUDE}\n{}", job.work)])
            .current_dir(&directory)
            .env("JOURNAL", &journal)
            .env("WRITER", writer)
            .env("ASHLAR", program())
            .stdin(Stdio::null())
            .stdout(if job.report == Report::Pipe { Stdio::piped() } else { Stdio::null() })
            .stderr(errors)
            // A group of its own, so that all its processes can be killed at once.
            .process_group(0)
            .spawn()
            .map_err(tried(format!("starting {}", job.name)))?;
        let output = child.stdout.take();
        let (reader, longest_pause) = (None, Duration::ZERO);
        let mut running = Self { job, directory, journal, complaints, child, is_running: true, reader, longest_pause };
        if let Some(output) = output {
            let journal = File::create(&running.journal).map_err(tried("making a journal"))?;
            running.reader = Some(std::thread::spawn(move || keep_lines(output, journal)));
        }
        Ok(running)
    }

    /// Returns how many results were acknowledged to it.
    pub fn count(&self) -> usize {
        fs::read(&self.journal).map_or(0, |text| text.iter().filter(|&&byte| byte == b'\n').count())
    }

    /// Fails if it has ended.
    pub fn expect_running(&mut self) -> Outcome {
        let ended = self.child.try_wait().map_err(tried("looking at a program"))?;
        let complaints = || fs::read_to_string(&self.complaints).unwrap_or_default();
        ensure!(ended.is_none(), "{} ended with {ended:?}: {}", self.job.name, complaints());
        Ok(())
    }

    /// Kills all its processes, and waits for the rest of its reports.
    pub fn kill(&mut self) -> Outcome {
        if !std::mem::replace(&mut self.is_running, false) {
            return Ok(());
        }
        let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).ok_or("no process number")?;
        kill_process_group(group, Signal::KILL).map_err(tried(format!("killing {}", self.job.name)))?;
        self.child.wait().map_err(tried(format!("ending {}", self.job.name)))?;
        if let Some(reader) = self.reader.take() {
            self.longest_pause = reader.join().unwrap_or_else(|_| Err("a reader failed".into()))?;
        }
        Ok(())
    }

    /// Returns the longest time between two results that a killed job has reported on its pipe.
    pub fn longest_pause(&self) -> Duration {
        self.longest_pause
    }

    /// Compares the results with the acknowledgements. The results are below `point`, where the file system is mounted
    /// now.
    pub fn verify(&self, point: &Path) -> Outcome<String> {
        let directory = point.join(self.directory.file_name().unwrap_or_default());
        (self.job.verify)(&directory, &self.journal).map_err(|error| format!("{}: {error}", self.job.name))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error that matters was reported before.
        let _ = self.kill();
    }
}

/// Keeps the whole lines that a job prints; a last line without an end was not reported. Returns the longest time
/// between two.
fn keep_lines(output: ChildStdout, mut journal: File) -> Outcome<Duration> {
    let mut output = BufReader::new(output);
    let (mut line, mut longest, mut last) = (Vec::new(), Duration::ZERO, None);
    while output.read_until(b'\n', &mut line).map_err(tried("reading a job's reports"))? > 0 && line.ends_with(b"\n") {
        journal.write_all(&line).map_err(tried("keeping a job's reports"))?;
        line.clear();
        let before = last.replace(Instant::now());
        longest = longest.max(before.map_or(Duration::ZERO, |before: Instant| before.elapsed()));
    }
    Ok(longest)
}

/// Waits until each job has got `more` results than now. Fails if one ends.
pub fn await_progress(running: &mut [Running], more: usize) -> Outcome {
    let before: Vec<_> = running.iter().map(Running::count).collect();
    let has_ended = |it: &mut Running| it.expect_running().is_err();
    let is_ahead = |running: &[Running]| running.iter().zip(&before).all(|(it, before)| it.count() >= before + more);
    eventually("all programs get something done", PATIENCE, || is_ahead(running) || running.iter_mut().any(has_ended))?;
    running.iter_mut().try_for_each(Running::expect_running)
}
