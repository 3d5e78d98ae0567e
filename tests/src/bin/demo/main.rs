//! `make demo`: unmodified programs on a mount, with kills in the middle.
//!
//! At the end it counts the acknowledged results.
#![forbid(unsafe_code)]

mod jobs;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use ashlar_tests::command::eventually;
use ashlar_tests::mount::{Medium, TestArena, obstacle, program};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::jobs::{JOBS, Job};

/// How long programs work before the first kill, between kills, and after the last one.
const WORK: Duration = Duration::from_secs(5);
/// Kills of SharedFS under running programs.
const KILLS: usize = 3;

fn main() -> ExitCode {
    if let Some(why) = obstacle() {
        eprintln!("demo: can't run here: {why}");
        return ExitCode::FAILURE;
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("\nFAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The clock of the story.
struct Story(Instant);

impl Story {
    fn say(&self, words: &str) {
        println!("[{:5.1} s] {words}", self.0.elapsed().as_secs_f64());
    }
}

struct Running {
    job: &'static Job,
    child: Child,
    journal: PathBuf,
}

fn run() -> Outcome {
    let story = Story(Instant::now());
    let site = TestArena::new(Medium::Disk, "512M")?;
    println!("Ashlar demo: {}\n", program().display());
    story.say("ashlar mount: makes an arena, starts the daemon, mounts");
    print!("{}", indented(&site.mount(0)?.output));
    let mut running = JOBS.iter().map(|job| start(job, &site)).collect::<Outcome<Vec<_>>>()?;
    story.say("these work on it, and write down outside whatever was acknowledged to them:");
    JOBS.iter().for_each(|job| println!("            {:<8} {}", job.name, job.description));
    eventually("every program has got something done", Duration::from_secs(60), || {
        running.iter().all(|it| lines(&it.journal) > 0)
    })?;
    kill_daemon_repeatedly(&story, &site, &mut running)?;
    std::thread::sleep(WORK);
    kill_everything(&story, &site, &mut running)?;
    let start = Instant::now();
    site.mount(0)?;
    story.say(&format!("mounted again, logs recovered: {} ms", start.elapsed().as_millis()));
    verify(&story, &site, &running)?;
    let start = Instant::now();
    site.umount(0)?;
    site.check()?;
    story.say(&format!(
        "unmounted ({} ms), nothing left running, and the check at rest is clean",
        start.elapsed().as_millis()
    ));
    println!("\neverything that was acknowledged is there");
    Ok(())
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("            {line}\n")).collect()
}

fn start(job: &'static Job, site: &TestArena) -> Outcome<Running> {
    use std::os::unix::process::CommandExt;
    let directory = site.point(0).join(job.name);
    fs::create_dir(&directory).map_err(tried(format!("making {}", directory.display())))?;
    let journal = site.outside().join(format!("{}.journal", job.name));
    let complaints =
        fs::File::create(site.outside().join(format!("{}.errors", job.name))).map_err(tried("making a file"))?;
    let writer = std::env::current_exe().map_err(tried("finding this program"))?.with_file_name("ashlar-writer");
    let child = Command::new("bash")
        .args(["-euo", "pipefail", "-c", &format!("{}\n{}", jobs::PRELUDE, job.work)])
        .current_dir(&directory)
        .env("JOURNAL", &journal)
        .env("WRITER", writer)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(complaints)
        // A group of its own, so that all its processes can be killed at once.
        .process_group(0)
        .spawn()
        .map_err(tried(format!("starting {}", job.name)))?;
    Ok(Running { job, child, journal })
}

fn lines(journal: &Path) -> usize {
    fs::read(journal).map_or(0, |text| text.iter().filter(|&&byte| byte == b'\n').count())
}

/// Kills SharedFS while all programs run: each of them pauses, none of them fails.
fn kill_daemon_repeatedly(story: &Story, site: &TestArena, running: &mut [Running]) -> Outcome {
    for _ in 0..KILLS {
        std::thread::sleep(WORK);
        let pid = site.daemon()?;
        let before: Vec<_> = running.iter().map(|it| lines(&it.journal)).collect();
        let start = Instant::now();
        site.kill_daemon()?;
        let back = start.elapsed();
        eventually("all programs continue", Duration::from_secs(60), || {
            running.iter().zip(&before).all(|(it, before)| lines(&it.journal) > before + 1)
        })?;
        for it in running.iter_mut() {
            let ended = it.child.try_wait().map_err(tried("looking at a program"))?;
            ensure!(ended.is_none(), "{} ended with {ended:?}: {}", it.job.name, complaints(site, it.job));
        }
        story.say(&format!(
            "kill -9 of the daemon (process {pid}) in the middle of their work: another one serves after {} ms; all {} programs continued",
            back.as_millis(),
            running.len()
        ));
    }
    Ok(())
}

fn complaints(site: &TestArena, job: &Job) -> String {
    fs::read_to_string(site.outside().join(format!("{}.errors", job.name))).unwrap_or_default()
}

fn kill_everything(story: &Story, site: &TestArena, running: &mut [Running]) -> Outcome {
    // The file system's processes first, so that they die in the middle of the programs' calls.
    let killed = site.kill_everything();
    for it in running.iter_mut() {
        let group = i32::try_from(it.child.id()).ok().and_then(Pid::from_raw).ok_or("no process number")?;
        kill_process_group(group, Signal::KILL).map_err(tried(format!("killing {}", it.job.name)))?;
        it.child.wait().map_err(tried(format!("ending {}", it.job.name)))?;
    }
    killed?;
    story.say("kill -9 of everything at once: programs, mount, daemon, supervisor");
    Ok(())
}

fn verify(story: &Story, site: &TestArena, running: &[Running]) -> Outcome {
    for it in running {
        let start = Instant::now();
        let verdict = (it.job.verify)(&site.point(0).join(it.job.name), &it.journal)
            .map_err(|error| format!("{}: {error}", it.job.name))?;
        story.say(&format!("{:<8} {verdict} ({} ms)", it.job.name, start.elapsed().as_millis()));
    }
    let start = Instant::now();
    let counts = site.check()?;
    let (inodes, blocks) = (&counts["inodes"], &counts["blocks"]);
    story.say(&format!("fsck     clean: {inodes} inodes, {blocks} blocks ({} ms)", start.elapsed().as_millis()));
    Ok(())
}
