//! Unmodified programs: the same job gives the same results everywhere.
//!
//! It runs through the mount, under `ashlar run`, and on the reference file system.

use std::path::Path;

use ashlar_tests::command::{Done, eventually, run};
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::reference::Reference;
use ashlar_tests::{Outcome, ensure, tried};

/// A job: a script that runs programs and prints the results.
struct Job {
    name: &'static str,
    /// Programs or paths that it needs; a bar separates alternatives.
    takes: &'static [&'static str],
    script: &'static str,
}

macro_rules! job {
    ($name:literal, $($program:literal),*) => {
        Job { name: $name, takes: &[$($program),*], script: include_str!(concat!("../../../jobs/", $name, ".sh")) }
    };
}

const GIT: Job = job!("git", "git");
const SQLITE: Job = job!("sqlite", "sqlite3");
const MAKE: Job = job!("make", "make", "gcc");
const ARCHIVE: Job = job!("archive", "rsync", "tar", "setfattr", "setfacl");
const PYTHON: Job = job!("python", "python3");
const PIP: Job = job!("pip", "python3");
const CARGO: Job = job!("cargo", "cargo");
const VIM: Job = job!("vim", "vim.tiny|vim", "setfattr");
const LEVELDB: Job = job!("leveldb", "/usr/lib/python3/dist-packages/plyvel");
const ROCKSDB: Job = job!("rocksdb", "db_bench", "ldb");
const POSTGRES: Job = job!("postgres", "initdb|/usr/lib/postgresql", "runuser");
const DOVECOT: Job = job!("dovecot", "dovecot|/usr/sbin/dovecot", "/usr/lib/dovecot/lmtp", "python3");
const MARIADB: Job = job!("mariadb", "mariadbd|/usr/sbin/mariadbd", "mariadb-install-db");
const ASYNCHRONOUS: Job = job!("asynchronous", "python3");
const BASH: Job = job!("bash", "bash");
const TMUX: Job = job!("tmux", "tmux");
const MULTIPROCESSING: Job = job!("multiprocessing", "python3");
const DAEMON: Job = job!("daemon", "gcc");
const NODE: Job = job!("node", "node");
const JAVA: Job = job!("java", "javac", "jar");
const KERNEL: Job = job!("kernel", "python3");
const OVERLAY: Job = job!("overlay", "python3");
const MAPPED_WRITES: Job = job!("mapped_writes", "python3", "rsync", "tar");
const APPENDS: Job = job!("appends", "python3");
const PROGRAMS32: Job = job!("programs32", "gcc", "/usr/lib32/libc.so");

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "programs/git", run: || compare_places(&GIT) },
    Test { name: "programs/sqlite", run: || compare_places(&SQLITE) },
    Test { name: "programs/make", run: || compare_places(&MAKE) },
    Test { name: "programs/archives", run: || compare_places(&ARCHIVE) },
    Test { name: "programs/python", run: || compare_places(&PYTHON) },
    Test { name: "programs/pip", run: || compare_places(&PIP) },
    Test { name: "programs/cargo", run: || compare_places(&CARGO) },
    Test { name: "programs/vim", run: || compare_places(&VIM) },
    Test { name: "programs/leveldb", run: || compare_places(&LEVELDB) },
    Test { name: "programs/rocksdb", run: || compare_places(&ROCKSDB) },
    Test { name: "programs/postgres", run: || compare_places(&POSTGRES) },
    Test { name: "programs/dovecot", run: || compare_places(&DOVECOT) },
    Test { name: "programs/mariadb", run: || compare_places(&MARIADB) },
    Test { name: "programs/corners_of_the_kernel_interface", run: || compare_places(&KERNEL) },
    Test { name: "programs/overlay", run: overlay },
    Test { name: "programs/asynchronous_writes_leave_no_stale_pages", run: || compare_places(&ASYNCHRONOUS) },
    Test {
        name: "programs/mapped_writes_are_data_before_they_are_written_back",
        run: || compare_places(&MAPPED_WRITES),
    },
    Test { name: "programs/appends_go_to_the_end_or_requested_offset", run: || compare_places(&APPENDS) },
    Test { name: "programs/programs_with_32_bits_list_directories_whole", run: || compare_places(&PROGRAMS32) },
    Test { name: "programs/jobs_survive_killed_daemon", run: || killed_daemon(Front::Mount) },
    Test { name: "run/jobs_survive_killed_daemon", run: || killed_daemon(Front::RunAtOnce) },
    Test { name: "run/git", run: || compare_through(&GIT, Front::RunAtOnce) },
    Test { name: "run/sqlite", run: || compare_through(&SQLITE, Front::RunAtOnce) },
    Test { name: "run/make", run: || compare_through(&MAKE, Front::Run) },
    Test { name: "run/archives", run: || compare_through(&ARCHIVE, Front::Run) },
    Test { name: "run/python", run: || compare_through(&PYTHON, Front::RunAtOnce) },
    Test { name: "run/pip", run: || compare_through(&PIP, Front::Run) },
    Test { name: "run/cargo", run: || compare_through(&CARGO, Front::Run) },
    Test { name: "run/vim", run: || compare_through(&VIM, Front::Run) },
    Test { name: "run/leveldb", run: || compare_through(&LEVELDB, Front::RunAtOnce) },
    Test { name: "run/rocksdb", run: || compare_through(&ROCKSDB, Front::Run) },
    Test { name: "run/postgres", run: || compare_through(&POSTGRES, Front::Run) },
    Test { name: "run/dovecot", run: || compare_through(&DOVECOT, Front::RunAtOnce) },
    Test { name: "run/dovecot_after_the_first_calls", run: || compare_through(&DOVECOT, Front::Run) },
    Test { name: "run/mariadb", run: || compare_through(&MARIADB, Front::RunAtOnce) },
    Test { name: "run/bash_works_as_login_shell", run: || compare_through(&BASH, Front::Run) },
    Test { name: "run/tmux", run: || compare_through(&TMUX, Front::Run) },
    Test { name: "run/python_multiprocessing", run: || compare_through(&MULTIPROCESSING, Front::RunAtOnce) },
    Test { name: "run/daemon_leaves_its_terminal", run: || compare_through(&DAEMON, Front::RunAtOnce) },
    Test { name: "run/node", run: || compare_through(&NODE, Front::RunAtOnce) },
    Test { name: "run/java", run: || compare_through(&JAVA, Front::Run) },
    Test { name: "run/corners_of_the_kernel_interface", run: || compare_through(&KERNEL, Front::RunAtOnce) },
    Test { name: "run/corners_after_the_first_calls", run: || compare_through(&KERNEL, Front::Run) },
    Test { name: "run/git_after_the_first_calls", run: || compare_through(&GIT, Front::Run) },
];

/// Jobs with packages that are too large for every run of the tests, or whose servers begin to run. Each has the
/// need of `scripts/setup.sh` that installs them.
const APART: [(&str, &[Job]); 2] = [("runtimes", &[NODE, JAVA]), ("servers", &[DOVECOT, MARIADB])];
const PRELUDE: &str = include_str!("../../../jobs/prelude.sh");

impl Job {
    /// Why it can't run here; `None` if it can.
    fn obstacle(&self) -> Option<String> {
        let directories = std::env::var_os("PATH").unwrap_or_default();
        let found = |program: &str| std::env::split_paths(&directories).any(|at| at.join(program).exists());
        let missing = self.takes.iter().find(|alternatives| !alternatives.split('|').any(found))?;
        let is_this = |(_, jobs): &&(&str, &[Self])| jobs.iter().any(|job| job.name == self.name);
        let need = APART.iter().find(is_this).map_or("test", |(need, _)| need);
        Some(format!("there is no {missing}, which 'scripts/setup.sh {need}' installs"))
    }

    /// Runs it in a directory of its own below `place`. Its output is its result.
    fn run(&self, place: &Path, front: Front) -> Outcome<Done> {
        let directory = place.join(self.name);
        std::fs::create_dir(&directory).map_err(tried(format!("making {}", directory.display())))?;
        run(front
            .command("bash")
            .args(["-euo", "pipefail", "-c", &format!("# {}\n{PRELUDE}\n{}", self.name, self.script)])
            .current_dir(directory))?
        .success()
    }
}

fn compare_places(job: &Job) -> Outcome<Verdict> {
    compare_through(job, Front::Mount)
}

fn compare_through(job: &Job, front: Front) -> Outcome<Verdict> {
    if let Some(why) = obstacle().or_else(|| job.obstacle()) {
        return Ok(Verdict::Skipped(why));
    }
    let reference = Reference::new(512)?;
    let expected = job.run(&reference.path(), Front::Mount).map_err(tried(reference.name()))?;
    let site = TestArena::mounted(Medium::Memory, "512M")?;
    let found = job.run(&site.point(0), front).map_err(tried("Ashlar"))?;
    compare(&expected.output, &found.output)?;
    ensure!(expected.output.lines().count() > 1, "the job says nothing of what it did");
    site.check()?;
    if front != Front::Mount {
        check_second_mount(&site, job.name)?;
    }
    let again = check_remounted(&site, job.name)?;
    site.umount(0)?;
    site.check()?;
    Ok(Verdict::Passed(format!("as on {}; {again} files after another mount", reference.name())))
}

/// Does the same as [`compare_places`], if the kernel has overlays.
fn overlay() -> Outcome<Verdict> {
    let list = || std::fs::read_to_string("/proc/filesystems").map_err(tried("reading /proc/filesystems"));
    let has_overlays = || list().map(|known| known.lines().any(|line| line.ends_with("\toverlay")));
    if !has_overlays()? {
        // It may be a module that is not loaded yet. If not, the list shows it.
        run(std::process::Command::new("modprobe").arg("overlay"))?;
    }
    if !has_overlays()? {
        return Ok(Verdict::Skipped("the kernel has no overlays".into()));
    }
    compare_places(&OVERLAY)
}

/// The content of a job's directory, as a mount shows it.
fn contents(site: &TestArena, mount: usize, name: &str) -> Outcome<String> {
    let script = "find . -type f -print0 | sort -z | xargs -0 sha256sum";
    Ok(ashlar_tests::command::shell(&site.point(mount).join(name), script)?.success()?.output)
}

/// A second mount shows at once the changes of programs that bypassed the first one.
fn check_second_mount(site: &TestArena, name: &str) -> Outcome {
    site.mount(1)?;
    let (here, there) = (contents(site, 0, name)?, contents(site, 1, name)?);
    site.umount(1)?;
    compare(&here, &there).map_err(tried("another mount"))
}

/// After another mount everything is there, byte for byte.
fn check_remounted(site: &TestArena, name: &str) -> Outcome<usize> {
    let before = contents(site, 0, name)?;
    site.umount(0)?;
    ensure!(!site.point(0).join(name).exists(), "the files are there although nothing is mounted");
    site.mount(0)?;
    compare(&before, &contents(site, 0, name)?)?;
    Ok(before.lines().count())
}

fn compare(expected: &str, found: &str) -> Outcome {
    if expected == found {
        return Ok(());
    }
    let mut lines = expected.lines().zip(found.lines()).enumerate();
    let Some((number, (a, b))) = lines.find(|(_, (a, b))| a != b) else {
        return Err(format!("expected {} lines, found {}", expected.lines().count(), found.lines().count()));
    };
    Err(format!("line {}:\n  expected: {a}\n  found:    {b}", number + 1))
}

/// All jobs run at once while SharedFS is killed again and again: the jobs see a pause, and results stay the same.
fn killed_daemon(front: Front) -> Outcome<Verdict> {
    const JOBS: [&Job; 5] = [&GIT, &MAKE, &SQLITE, &LEVELDB, &POSTGRES];
    if let Some(why) = obstacle().or_else(|| JOBS.iter().find_map(|job| job.obstacle())) {
        return Ok(Verdict::Skipped(why));
    }
    let reference = Reference::new(512)?;
    let site = TestArena::mounted(Medium::Memory, "512M")?;
    let mut kills = 0;
    std::thread::scope(|scope| -> Outcome {
        let running: Vec<_> = JOBS
            .map(|job| {
                let (here, there, name) = (reference.path(), site.point(0), reference.name());
                scope.spawn(move || -> Outcome {
                    let found = job.run(&there, front).map_err(tried("Ashlar"))?;
                    let expected = job.run(&here, Front::Mount).map_err(tried(name))?;
                    compare(&expected.output, &found.output).map_err(tried(job.name))
                })
            })
            .into_iter()
            .collect();
        // At least two kills, and more as long as jobs run.
        while kills < 2 || !running.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            site.kill_daemon()?;
            kills += 1;
        }
        running.into_iter().try_for_each(|job| job.join().map_err(|_| "a job's thread panicked".to_owned())?)
    })?;
    eventually("the last daemon answers", std::time::Duration::from_secs(30), || site.daemon().is_ok())?;
    site.check()?;
    site.umount(0)?;
    site.check()?;
    passed().map(|_| Verdict::Passed(format!("{kills} kills")))
}
