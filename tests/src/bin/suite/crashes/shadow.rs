//! The shadow: a replica in SharedFS's own process, whose tree must be the same.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use ashlar_tests::command::{Done, ashlar, eventually, run, wait};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::{Pid, Signal, kill_process};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "shadow/tree_is_equal_in_use_after_kills_and_at_the_end", run: || when_mountable(equal) },
    Test { name: "shadow/planted_fault_is_found", run: || when_mountable(planted) },
    Test { name: "shadow/file_system_with_files_gets_none", run: || when_mountable(late) },
    Test { name: "shadow/start_without_it_removes_the_journal", run: || when_mountable(given_up) },
];

const PATIENCE: Duration = Duration::from_secs(60);
/// The exit status of a comparison that finds differences.
const DIFFERENT: i32 = 1;

/// An arena whose daemon has a shadow.
struct ShadowedArena {
    site: TestArena,
    shadow: PathBuf,
    daemon: Child,
}

impl ShadowedArena {
    fn start(medium: Medium, fault: Option<&str>) -> Outcome<Self> {
        let site = TestArena::new(medium, "64M")?;
        let shadow = site.outside().join("shadow");
        let daemon = start_daemon(&site, Some(&shadow), fault)?;
        site.mount(0)?;
        Ok(Self { site, shadow, daemon })
    }

    fn compare(&self) -> Outcome<Done> {
        run(ashlar(&["fsck", "--compare"]).arg(self.site.arena()).arg(&self.shadow))
    }

    /// Ends the daemon, as a shutdown of the machine does.
    fn stop(&mut self) -> Outcome {
        let pid = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw).ok_or("no number")?;
        kill_process(pid, Signal::TERM).map_err(tried("ending the daemon"))?;
        let status = wait(&mut self.daemon, PATIENCE)?;
        ensure!(status.success(), "the daemon ended with {status}");
        Ok(())
    }
}

fn start_daemon(site: &TestArena, shadow: Option<&Path>, fault: Option<&str>) -> Outcome<Child> {
    let mut command = ashlar(&["daemon", "--size", "64M", "--arena"]);
    command.arg(site.arena());
    if let Some(shadow) = shadow {
        command.arg("--shadow").arg(shadow);
    }
    if let Some(fault) = fault {
        command.env("ASHLAR_SHADOW_FAULT", fault);
    }
    // As the daemons that mounts start, it logs into the arena.
    fs::create_dir_all(site.arena()).map_err(tried("making the arena's directory"))?;
    let log = fs::File::create(site.arena().join("daemon.log")).map_err(tried("making the log"))?;
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let daemon = quiet.spawn().map_err(tried("starting the daemon"))?;
    eventually("the daemon serves", PATIENCE, || site.daemon().is_ok())?;
    Ok(daemon)
}

/// Makes, changes and removes files of several kinds.
fn work(top: &Path, round: u32) -> Outcome {
    let place = top.join(format!("round{round}"));
    let name = |number: u32| place.join(format!("file{number}"));
    let work = || -> std::io::Result<()> {
        fs::create_dir(&place)?;
        for number in 0..100 {
            fs::write(name(number), vec![number as u8; 100 * number as usize])?;
        }
        for number in (0..100).step_by(3) {
            fs::hard_link(name(number), place.join(format!("link{number}")))?;
            fs::rename(name(number), place.join(format!("renamed{number}")))?;
        }
        for number in (1..100).step_by(3) {
            fs::set_permissions(name(number), fs::Permissions::from_mode(0o600 + number % 8))?;
            let file = fs::OpenOptions::new().write(true).open(name(number))?;
            file.set_len(50 * u64::from(number))?;
            file.write_all_at(b"behind the end", 20_000)?;
        }
        for number in (2..100).step_by(3) {
            fs::remove_file(name(number))?;
        }
        std::os::unix::fs::symlink("renamed0", place.join("symbolic"))?;
        fs::read(place.join("renamed3")).map(drop)
    };
    work().map_err(tried("working"))
}

fn equal() -> Outcome<Verdict> {
    for medium in [Medium::Memory, Medium::Disk] {
        let mut shadowed = ShadowedArena::start(medium, None)?;
        let top = shadowed.site.point(0);
        for round in 0..3 {
            work(&top, round)?;
            // It lives on without a name, over a kill.
            let path = top.join("kept");
            fs::write(&path, "kept").map_err(tried("writing"))?;
            let kept = fs::File::open(&path).map_err(tried("opening"))?;
            fs::remove_file(&path).map_err(tried("removing"))?;
            shadowed.compare()?.success()?;
            shadowed.site.kill_daemon()?;
            shadowed.compare()?.success()?;
            ensure!(fs::read(top.join("round0/renamed3")).is_ok_and(|data| data.len() == 300), "a file has changed");
            drop(kept);
            shadowed.compare()?.success()?;
        }
        shadowed.site.umount(0)?;
        shadowed.stop()?;
        shadowed.compare()?.success()?;
        let shadow = run(ashlar(&["fsck", "--arena"]).arg(&shadowed.shadow))?;
        shadow.success()?;
        shadowed.site.check()?;
    }
    passed()
}

fn planted() -> Outcome<Verdict> {
    for fault in ["kept-inode", "batch-border", "access-time"] {
        let shadowed = ShadowedArena::start(Medium::Memory, Some(fault))?;
        let (site, path) = (&shadowed.site, shadowed.site.point(0).join("file"));
        fs::write(&path, "content").map_err(tried("writing"))?;
        // Another session keeps the file when it loses its name.
        site.mount(1)?;
        let open = fs::File::open(site.point(1).join("file")).map_err(tried("opening"))?;
        let mut one = [0];
        open.read_at(&mut one, 0).map_err(tried("reading"))?;
        if fault == "kept-inode" {
            fs::remove_file(&path).map_err(tried("removing"))?;
        }
        let done = shadowed.compare()?;
        ensure!(done.status.code() == Some(DIFFERENT), "{fault} is not found: {}", done.describe());
        drop(open);
    }
    passed()
}

fn late() -> Outcome<Verdict> {
    let site = TestArena::mounted(Medium::Memory, "64M")?;
    fs::write(site.point(0).join("file"), "content").map_err(tried("writing"))?;
    site.kill_everything()?;
    let shadow = site.outside().join("shadow");
    let refused = run(ashlar(&["daemon", "--arena"]).arg(site.arena()).arg("--shadow").arg(&shadow))?;
    refused.failure(1, &["begins with an empty file system", "leave out --shadow"])?;
    site.mount(0)?;
    ensure!(fs::read(site.point(0).join("file")).is_ok_and(|data| data == b"content"), "the file has changed");
    site.umount(0)?;
    site.check()?;
    passed()
}

fn given_up() -> Outcome<Verdict> {
    let mut shadowed = ShadowedArena::start(Medium::Memory, None)?;
    work(&shadowed.site.point(0), 0)?;
    shadowed.site.kill_everything()?;
    let journal = shadowed.site.arena().join("journal");
    ensure!(journal.exists(), "there is no journal");
    shadowed.daemon = start_daemon(&shadowed.site, None, None)?;
    ensure!(!journal.exists(), "the journal is still there");
    let (arena, shadow) = (shadowed.site.arena().to_owned(), shadowed.shadow.clone());
    shadowed.stop()?;
    let refused = run(ashlar(&["daemon", "--arena"]).arg(&arena).arg("--shadow").arg(&shadow))?;
    refused.failure(1, &["does not belong to this journal"])?;
    shadowed.site.mount(0)?;
    let data = fs::read(shadowed.site.point(0).join("round0/renamed3"));
    ensure!(data.is_ok_and(|data| data.len() == 300), "a file has changed");
    shadowed.site.umount(0)?;
    shadowed.site.check()?;
    passed()
}
