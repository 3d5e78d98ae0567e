//! `ashlar dev` itself: clusters side by side, without root's namespaces, and half made.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use ashlar_tests::command::{ashlar, call, run};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::mount::prefix;
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, loops, number, tried};
use tempfile::TempDir;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "mirror/dev_cluster_without_namespaces_cannot_be_cut", run: || when_mountable(loopback) },
    Test { name: "mirror/dev_refusals_name_the_remedy", run: || when_mountable(refusals) },
    Test { name: "mirror/dev_up_killed_midway_is_removed_by_down", run: || when_mountable(killed_midway) },
];

/// A name of this test's own.
fn name_of(number: u64) -> String {
    format!("test-{}-{}", std::process::id(), 100 + number)
}

fn directory() -> Outcome<TempDir> {
    TempDir::with_prefix_in(prefix(std::process::id()), "/dev/shm").map_err(tried("making a directory"))
}

fn dev(words: &[&str], name: &str) -> Outcome<ashlar_tests::command::Done> {
    run(ashlar(&["dev"]).args(words).args(["--name", name]))
}

fn loopback() -> Outcome<Verdict> {
    let (directory, name) = (directory()?, name_of(0));
    let place = directory.path().display().to_string();
    dev(&["up", "2", "--loopback", "--no-tls", "--size", "64M", "--directory", &place], &name)?.success()?;
    dev(&["cut"], &name)?.failure(1, &["takes root", "without --loopback"])?;
    let status = dev(&["status"], &name)?.success()?;
    ensure!(status.output.contains("127.0.0.1:"), "the status lacks addresses: {}", status.output);
    dev(&["kill", "1"], &name)?.success()?;
    let status = dev(&["status"], &name)?.success()?;
    ensure!(status.output.contains("ashlar dev start 1"), "the status lacks the remedy: {}", status.output);
    dev(&["start", "1"], &name)?.success()?;
    dev(&["down"], &name)?.success()?;
    expect_nothing_left(&name, directory.path())?;
    passed()
}

fn refusals() -> Outcome<Verdict> {
    let (directory, name) = (directory()?, name_of(1));
    let place = directory.path().display().to_string();
    dev(&["up", "3"], &name)?.failure(1, &["two nodes", "ashlar dev up 2"])?;
    dev(&["status"], &name)?.failure(1, &["there is no cluster", "ashlar dev up 2"])?;
    dev(&["down"], &name)?.failure(1, &["there is no cluster"])?;
    dev(&["up", "2"], "No/Name")?.failure(1, &["can't name a cluster"])?;
    std::fs::create_dir(directory.path().join("node0")).map_err(tried("making a directory"))?;
    let file = directory.path().join("node0/file");
    std::fs::write(&file, "a user's").map_err(tried("writing"))?;
    dev(&["up", "2", "--directory", &place], &name)?.failure(1, &["is there already", "--directory"])?;
    ensure!(file.exists(), "a user's file is gone");
    std::fs::remove_file(&file).map_err(tried("removing"))?;
    let namespace = format!("ashlar-{name}-1");
    call("ip", &["netns", "add", &namespace])?.success()?;
    let refused = dev(&["up", "2", "--directory", &place], &name)?;
    let is_kept = Path::new("/run/netns").join(&namespace).exists();
    call("ip", &["netns", "delete", &namespace])?.success()?;
    refused.failure(1, &["network namespace", "ip netns delete"])?;
    ensure!(is_kept, "a namespace that the cluster has not made is gone");
    dev(&["up", "2", "--size", "64M", "--directory", &place], &name)?.success()?;
    let again = dev(&["up", "2", "--directory", &place], &name)?;
    let no_node = dev(&["kill", "7"], &name)?;
    let running = dev(&["start", "0"], &name)?;
    dev(&["down"], &name)?.success()?;
    again.failure(1, &["is there already", "ashlar dev down"])?;
    no_node.failure(1, &["has no node 7"])?;
    running.failure(1, &["runs already"])?;
    expect_nothing_left(&name, directory.path())?;
    passed()
}

/// `up` is killed at any moment.
fn killed_midway() -> Outcome<Verdict> {
    let rounds = loops(6);
    let mut random = Random::new(number("ASHLAR_SEED", 1));
    let mut made = 0;
    for round in 0..rounds {
        let (directory, name) = (directory()?, name_of(2 + round));
        let pause = Duration::from_millis(random.below(1500));
        let mut command = ashlar(&["dev", "up", "2", "--size", "64M", "--name", &name, "--directory"]);
        let command = command.arg(directory.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(tried("starting 'ashlar dev up'"))?;
        std::thread::sleep(pause);
        // It may be done already.
        let _ = child.kill();
        child.wait().map_err(tried("ending 'ashlar dev up'"))?;
        let words = format!("killed after {} ms", pause.as_millis());
        // A command that was killed before it began has left nothing, and 'down' says so.
        let done = dev(&["down"], &name)?;
        let is_fine = done.status.success() || done.errors.contains("there is no cluster");
        ensure!(is_fine, "{words}: {}", done.describe());
        made += u64::from(done.status.success());
        expect_nothing_left(&name, directory.path()).map_err(|error| format!("{words}: {error}"))?;
    }
    ensure!(made > 0, "each 'up' was killed before it began");
    Ok(Verdict::Passed(format!("{rounds} kills, {made} half-made clusters removed")))
}

fn expect_nothing_left(name: &str, directory: &Path) -> Outcome {
    let namespaces = call("ip", &["netns", "list"])?.success()?;
    ensure!(!namespaces.output.contains(name), "a namespace is left: {}", namespaces.output);
    ensure!(!Path::new("/run/ashlar/dev").join(name).exists(), "the record of {name} is left");
    let left: Vec<_> = std::fs::read_dir(directory).map_err(tried("reading"))?.flatten().map(|it| it.path()).collect();
    ensure!(left.is_empty(), "arenas are left: {left:?}");
    let place = directory.display().to_string();
    let processes = call("pgrep", &["-f", &place])?;
    ensure!(processes.output.is_empty(), "processes are left: {}", processes.output);
    Ok(())
}
