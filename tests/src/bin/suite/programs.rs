//! Programs that know nothing of Ashlar: the same job gives the same results here and on the reference file system.

use std::path::Path;

use ashlar_tests::command::{Done, eventually, run};
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::mount::{Medium, Site, obstacle};
use ashlar_tests::reference::Reference;
use ashlar_tests::{Outcome, ensure, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "programs/git", run: || same("git", include_str!("../../../jobs/git.sh")) },
    Test { name: "programs/sqlite", run: || same("sqlite", include_str!("../../../jobs/sqlite.sh")) },
    Test { name: "programs/make", run: || same("make", include_str!("../../../jobs/make.sh")) },
    Test { name: "programs/archives", run: || same("archive", include_str!("../../../jobs/archive.sh")) },
    Test { name: "programs/python", run: || same("python", include_str!("../../../jobs/python.sh")) },
    Test {
        name: "programs/corners_of_the_kernel_interface",
        run: || same("kernel", include_str!("../../../jobs/kernel.sh")),
    },
    Test { name: "programs/jobs_survive_the_daemon_being_killed", run: killed_daemon },
];

const PRELUDE: &str = include_str!("../../../jobs/prelude.sh");

fn job(name: &str, script: &str, place: &Path) -> Outcome<Done> {
    let directory = place.join(name);
    std::fs::create_dir(&directory).map_err(tried(format!("making {}", directory.display())))?;
    run(std::process::Command::new("bash")
        .args(["-euo", "pipefail", "-c", &format!("# {name}\n{PRELUDE}\n{script}")])
        .current_dir(directory))
}

fn same(name: &str, script: &str) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let reference = Reference::new(512)?;
    let expected = job(name, script, &reference.path())?.success()?;
    let site = Site::mounted(Medium::Memory, "512M")?;
    let found = job(name, script, &site.point(0))?.success()?;
    compare(&expected.output, &found.output)?;
    site.check()?;
    let again = remounted(&site, name)?;
    site.umount(0)?;
    site.check()?;
    Ok(Verdict::Passed(format!("as on {}; {again} files after another mount", reference.name())))
}

/// After another mount everything is there, byte for byte.
fn remounted(site: &Site, name: &str) -> Outcome<usize> {
    let root = site.point(0).join(name);
    let sums = || {
        let script = "find . -type f -print0 | sort -z | xargs -0 sha256sum";
        Ok::<_, String>(ashlar_tests::command::shell(&root, script)?.success()?.output)
    };
    let before = sums()?;
    site.umount(0)?;
    ensure!(!root.exists(), "the files are there although nothing is mounted");
    site.mount(0)?;
    compare(&before, &sums()?)?;
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

/// All jobs at once, while SharedFS is killed again and again: the jobs see a pause, and results stay the same.
fn killed_daemon() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let jobs: [(&str, &str); 3] = [
        ("git", include_str!("../../../jobs/git.sh")),
        ("make", include_str!("../../../jobs/make.sh")),
        ("sqlite", include_str!("../../../jobs/sqlite.sh")),
    ];
    let reference = Reference::new(512)?;
    let site = Site::mounted(Medium::Memory, "512M")?;
    let mut kills = 0;
    std::thread::scope(|scope| -> Outcome {
        let running: Vec<_> = jobs
            .map(|(name, script)| {
                let (here, there) = (reference.path(), site.point(0));
                scope.spawn(move || -> Outcome {
                    let found = job(name, script, &there)?.success()?;
                    let expected = job(name, script, &here)?.success()?;
                    compare(&expected.output, &found.output)
                })
            })
            .into_iter()
            .collect();
        // Killed at least twice, and then on as long as jobs run.
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
