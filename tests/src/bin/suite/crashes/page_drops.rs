//! Kills while kernels drop pages.
//!
//! Dropping waits in the kernel for requests in flight, and no signal ends that wait. A process that waits so can't be
//! killed, and a process that waits for its end has to wait too.

use std::fs;
use std::process::{Child, Stdio};
use std::time::Duration;

use ashlar_tests::command::{eventually, kill};
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure, number, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "kill/sharedfs_dies_as_pages_are_dropped", run: || when_mountable("ASHLAR_KILL_DAEMON", 10, daemon) },
    Test { name: "kill/mounts_die_as_pages_are_dropped", run: || when_mountable("ASHLAR_KILL_MOUNT", 30, mounts) },
    Test {
        name: "kill/everything_dies_as_pages_are_dropped",
        run: || when_mountable("ASHLAR_KILL_ALL", 10, everything),
    },
];

/// A longer wait waits for something that does not come.
const SOON: Duration = Duration::from_secs(20);
/// Long enough for all to be at work, and for a lease to move some hundred times.
const WORK: Duration = Duration::from_millis(300);

fn when_mountable(variable: &str, default: u64, test: fn(&TestArena, u64) -> Outcome) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let kills = number(variable, default);
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    fs::write(site.point(0).join("file"), vec![0; 64 << 10]).map_err(tried("writing a file"))?;
    test(&site, kills)?;
    site.umount(0)?;
    site.await_end(SOON)?;
    site.check()?;
    Ok(Verdict::Passed(format!("{kills} kills")))
}

/// Programs at work on one file.
struct Workers(Vec<Child>);

impl Workers {
    /// Starts readers through the mount beside a writer. The writer works through the mount, too, or under `ashlar
    /// run`, where it takes the lease from the mount.
    fn start(site: &TestArena, readers: usize, writer: Front) -> Outcome<Self> {
        let program =
            std::env::current_exe().map_err(tried("finding this program"))?.with_file_name("ashlar-repeat-io");
        let start = |(front, what): (Front, &str)| {
            let mut command = front.command(&program);
            command.arg(what).arg(site.point(0).join("file")).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().map_err(tried("starting a program"))
        };
        let work = std::iter::repeat_n((Front::Mount, "read"), readers).chain([(writer, "write")]);
        work.map(start).collect::<Outcome<_>>().map(Self)
    }

    fn are_running(&mut self) -> bool {
        self.0.iter_mut().all(|child| matches!(child.try_wait(), Ok(None)))
    }

    fn have_ended(&mut self) -> bool {
        self.0.iter_mut().all(|child| matches!(child.try_wait(), Ok(Some(_))))
    }

    fn end(&mut self) -> Outcome {
        self.kill();
        eventually("programs that are killed end", SOON, || self.have_ended())
    }

    fn kill(&mut self) {
        for child in &mut self.0 {
            // The kill fails for a worker that has ended.
            let _ = child.kill();
        }
    }
}

/// Waits for no worker if a test has failed: that may take for ever.
impl Drop for Workers {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Formerly, one in three or so of these kills left SharedFS's process there until the programs gave up, and no other
/// one started.
fn daemon(site: &TestArena, kills: u64) -> Outcome {
    let mut workers = Workers::start(site, 2, Front::RunAtOnce)?;
    for _ in 0..kills {
        std::thread::sleep(WORK);
        site.kill_daemon()?;
        ensure!(workers.are_running(), "a program has failed");
    }
    workers.end()
}

/// Formerly, one in twenty or so of these kills left all users of the mount waiting for ever, and no process noticed
/// that it was dead. Every third time SharedFS is killed as well. The next one then finds a dead mount, or dies before
/// the mount has come back.
fn mounts(site: &TestArena, kills: u64) -> Outcome {
    (0..kills).try_for_each(|turn| {
        let mut workers = Workers::start(site, 7, Front::Mount)?;
        std::thread::sleep(WORK);
        let (processes, daemon) = (site.mount_processes()?, site.daemon()?);
        if turn % 3 == 0 {
            kill(daemon)?;
        }
        processes.into_iter().try_for_each(kill)?;
        eventually("programs on a dead mount end", SOON, || workers.have_ended())?;
        site.mount(0).map(drop)
    })
}

/// Then only a new mount can end the dead mount's connection.
fn everything(site: &TestArena, kills: u64) -> Outcome {
    (0..kills).try_for_each(|_| {
        let mut workers = Workers::start(site, 2, Front::RunAtOnce)?;
        std::thread::sleep(WORK);
        site.kill_everything()?;
        site.mount(0)?;
        workers.end()
    })
}
