//! Kills while kernels drop pages: that waits for requests in flight, in the kernel, where no signal ends it. Whoever waits so himself can't be killed, and whoever waits for his end has to wait too.

use std::fs;
use std::process::{Child, Stdio};
use std::time::Duration;

use ashlar_tests::command::{eventually, kill};
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::{Outcome, ensure, number, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "kill/sharedfs_dies_as_pages_are_dropped", run: || with("ASHLAR_KILL_DAEMON", 10, daemon) },
    Test { name: "kill/mounts_die_as_pages_are_dropped", run: || with("ASHLAR_KILL_MOUNT", 30, mounts) },
    Test { name: "kill/everything_dies_as_pages_are_dropped", run: || with("ASHLAR_KILL_ALL", 10, everything) },
];

/// What takes longer waits for what does not come.
const SOON: Duration = Duration::from_secs(20);
/// So that all are at work, and a lease has moved some hundred times.
const WORK: Duration = Duration::from_millis(300);

fn with(variable: &str, default: u64, test: fn(&TestArena, u64) -> Outcome) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let kills = number(variable, default);
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    fs::write(site.point(0).join("file"), vec![0; 64 << 10]).map_err(tried("writing a file"))?;
    test(&site, kills)?;
    site.umount(0)?;
    eventually("all processes end", SOON, || !site.is_named())?;
    site.check()?;
    Ok(Verdict::Passed(format!("{kills} kills")))
}

/// Programs at work on one file.
struct Workers(Vec<Child>);

impl Workers {
    /// Starts some that read through the mount beside one that writes: through it, too, or under `ashlar run`, where it takes the lease from the mount.
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
            // It fails for one that has ended.
            let _ = child.kill();
        }
    }
}

/// Nobody is waited for where a test has failed: that may be for ever.
impl Drop for Workers {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One in three or so of these kills left SharedFS's process there until the programs gave up, and no other one started.
fn daemon(site: &TestArena, kills: u64) -> Outcome {
    let mut workers = Workers::start(site, 2, Front::RunAtOnce)?;
    for _ in 0..kills {
        std::thread::sleep(WORK);
        site.kill_daemon()?;
        ensure!(workers.are_running(), "a program has failed");
    }
    workers.end()
}

/// One in twenty or so of these kills left all who used the mount waiting for ever, and nobody knew that it was dead. Every third time SharedFS is killed as well, and the next one finds a mount
/// that is dead, or dies before it has come back.
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

/// Nobody is left to end the mount's connection then but who mounts anew.
fn everything(site: &TestArena, kills: u64) -> Outcome {
    (0..kills).try_for_each(|_| {
        let mut workers = Workers::start(site, 2, Front::RunAtOnce)?;
        std::thread::sleep(WORK);
        site.kill_everything()?;
        site.mount(0)?;
        workers.end()
    })
}
