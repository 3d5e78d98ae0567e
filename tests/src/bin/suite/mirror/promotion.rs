//! The writer fails, and its replica takes over.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ashlar_tests::cluster::{ClusterOptions, PATIENCE, TestCluster};
use ashlar_tests::command::{call, eventually, kill, parent, run, wait_for};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::ledger::checker::Bound;
use ashlar_tests::mount::{Front, take_complaints};
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, loops, number, tried};

use super::load::{LedgerLoad, LedgerTotals, ONE_SESSION};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "mirror/killed_writer_promotion_keeps_all_synced", run: || when_mountable(|| killed(2)) },
    Test { name: "mirror/killed_writer_forced_promotion_keeps_a_prefix", run: || when_mountable(|| killed(1)) },
    Test { name: "mirror/killed_writer_returns_and_acknowledges_nothing", run: || when_mountable(killed_returns) },
    Test { name: "mirror/sync_under_run_covers_the_program", run: || when_mountable(synced_by_program) },
    Test { name: "mirror/restored_writer_overwrites_nothing", run: || when_mountable(restored) },
    Test { name: "mirror/orderly_change_of_roles_logs_no_complaint", run: || when_mountable(orderly_change) },
    Test {
        name: "mirror/frozen_writer_returns_and_acknowledges_nothing",
        run: || when_mountable(|| returns(Away::Frozen)),
    },
    Test {
        name: "mirror/cut_off_writer_returns_and_acknowledges_nothing",
        run: || when_mountable(|| returns(Away::CutOff)),
    },
];

/// Appends lines to a file, syncs each, and counts the acknowledged ones in another file.
const COUNTER: &str = r#"
import os, sys
lines = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
counts = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    os.write(lines, b"line\n")
    os.fsync(lines)
    os.write(counts, b"line\n")
"#;

/// Writes to a file, and makes that durable by a call that names no file or any one.
const SYNCER: &str = r#"
import ctypes, os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(file, b"s" * (8 << 20))
if sys.argv[2] == "sync":
    os.sync()
elif ctypes.CDLL(None, use_errno=True).syncfs(file) != 0:
    sys.exit("syncfs: " + os.strerror(ctypes.get_errno()))
"#;

/// The writer dies as soon as `sync` or `syncfs` of a program has returned.
fn synced_by_program() -> Outcome<Verdict> {
    for call in ["sync", "syncfs"] {
        let cluster = TestCluster::up(ClusterOptions { size: "128M", ..ClusterOptions::default() })?;
        cluster.mount(0, 0)?;
        let mut command = Front::RunAtOnce.command("python3");
        let file = cluster.point(0).join("file");
        run(command.args(["-c", SYNCER]).arg(&file).arg(call))?
            .success()
            .map_err(|error| format!("{call}: {error}"))?;
        cluster.kill(0)?;
        cluster.promote_in_time(1, false)?;
        cluster.mount(1, 1)?;
        let found = fs::metadata(cluster.point(1).join("file")).map_err(tried("looking at what was synced"))?;
        ensure!(found.len() == 8 << 20, "{call}: {} bytes are there", found.len());
        cluster.umount(1)?;
    }
    passed()
}

/// The arena of a writer is an old copy of itself, as from a backup. Its replica has committed later updates.
fn restored() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    cluster.stop(0)?;
    let backup = cluster.outside().join("backup");
    call("cp", &["-a", &cluster.arena(0).display().to_string(), &backup.display().to_string()])?.success()?;
    cluster.start(0)?;
    cluster.wait_in_sync(0)?;
    cluster.mount(0, 0)?;
    let file = cluster.point(0).join("file");
    fs::write(&file, "later").and_then(|()| fs::File::open(&file)?.sync_all()).map_err(tried("syncing"))?;
    let end = cluster.state(0)?["journal_end"].clone();
    cluster.wait_for(1, "the replica has committed it", |state| state["replication"]["committed"] == end)?;
    cluster.kill(0)?;
    fs::remove_dir_all(cluster.arena(0)).map_err(tried("removing an arena"))?;
    call("cp", &["-a", &backup.display().to_string(), &cluster.arena(0).display().to_string()])?.success()?;
    cluster.start(0)?;
    for (node, words) in [(0, "updates that this node has lost"), (1, "lost updates that are committed here")] {
        cluster.wait_for(node, words, |state| state["problems"].to_string().contains(words))?;
    }
    ensure!(cluster.state(0)?["standing"] == "waiting", "a writer that has lost updates serves");
    cluster.promote_in_time(1, false)?;
    cluster.mount(1, 1)?;
    let found = fs::read_to_string(cluster.point(1).join("file")).map_err(tried("reading what was synced"))?;
    ensure!(found == "later", "the successor has '{found}'");
    cluster.umount(1)?;
    passed()
}

/// Nothing fails here, so no log has a line that says so.
fn orderly_change() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    let log_of = |node: usize| fs::read_to_string(cluster.arena(node).join("daemon.log")).unwrap_or_default();
    let before = [0, 1].map(|node| log_of(node).len());
    cluster.stop(0)?;
    cluster.promote_in_time(1, false)?;
    cluster.stop(1)?;
    for node in 0..2 {
        let log = log_of(node);
        let complaint = log[before[node]..].lines().find(|line| line.contains("WARN") || line.contains("ERROR"));
        ensure!(complaint.is_none(), "node {node} complains: {complaint:?}");
    }
    passed()
}

/// Everything of node 0 is killed under load, and node 1 takes over.
fn killed(copies: u8) -> Outcome<Verdict> {
    let rounds = loops(2);
    let mut random = Random::new(number("ASHLAR_SEED", 1));
    let mut sum = LedgerTotals::default();
    for round in 0..rounds {
        let seed = random.draw();
        let pause = Duration::from_millis(random.below(400));
        // Only the last round's are of interest.
        drop(take_complaints());
        let totals = kill_and_promote(copies, seed, pause)
            .map_err(|error| format!("round {round}, seed {seed}, {} ms: {error}", pause.as_millis()))?;
        sum.acknowledged += totals.acknowledged;
        sum.survived += totals.survived;
    }
    let LedgerTotals { acknowledged, survived } = sum;
    let kept = if copies == 2 { "with all that was synced" } else { "a prefix each time" };
    Ok(Verdict::Passed(format!("{rounds} promotions, {survived} of {acknowledged} acknowledged updates kept, {kept}")))
}

fn kill_and_promote(copies: u8, seed: u64, pause: Duration) -> Outcome<LedgerTotals> {
    let cluster = TestCluster::up(ClusterOptions { copies, ..ClusterOptions::default() })?;
    cluster.mount(0, 0)?;
    let mut load = LedgerLoad::start(&cluster, 0, ONE_SESSION, seed)?;
    load.wait_for_syncs()?;
    // Kills hit any moment of the work.
    std::thread::sleep(pause);
    cluster.kill(0)?;
    load.end_after_kill()?;
    if copies == 1 {
        cluster.promote(1, false)?.failure(1, &["may have acknowledged updates", "--force"])?;
    }
    cluster.promote_in_time(1, copies == 1)?;
    cluster.mount(1, 1)?;
    // With one copy, the writer may have gone on alone just before it was killed.
    let bound = Bound::FsyncWithin { journal_bytes: if copies == 2 { usize::MAX } else { 0 } };
    let totals = load.check(&cluster, 1, bound)?;
    cluster.check(1)?;
    sync_a_file(&cluster.point(1).join("new"))?;
    cluster.umount(1)?;
    cluster.stop(1)?;
    cluster.check(1)?;
    Ok(totals)
}

fn sync_a_file(path: &Path) -> Outcome {
    let write = || -> std::io::Result<()> {
        let mut file = fs::File::create(path)?;
        file.write_all(b"content")?;
        file.sync_all()
    };
    write().map_err(tried(format!("writing and syncing {}", path.display())))
}

/// The former writer's daemon starts again, with a mount that has outlived it.
fn killed_returns() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    cluster.mount(0, 0)?;
    sync_a_file(&cluster.point(0).join("kept"))?;
    let daemon = cluster.node(0)?["daemon"]["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    let daemon = daemon.ok_or("no daemon on node 0")?;
    // The supervisor first: it would start SharedFS again.
    parent(daemon).map_or(Err("no supervisor".into()), kill)?;
    kill(daemon)?;
    cluster.promote_in_time(1, false)?;
    cluster.mount(1, 1)?;
    sync_a_file(&cluster.point(1).join("later"))?;
    cluster.start(0)?;
    cluster.wait_for(0, "it learns that it was replaced", |state| state["standing"] == "replaced")?;
    cluster.try_mount(0, 2)?.failure(1, &["node 0 was replaced"])?;
    // The mount has outlived its daemon. It acknowledges nothing.
    for front in [Front::Mount, Front::RunAtOnce] {
        let mut command = front.command("dd");
        command.args(["if=/dev/zero", "bs=4096", "count=1", "conv=fsync"]);
        command.arg(format!("of={}", cluster.point(0).join("late").display()));
        let status = end_in_time(start_quietly(&mut command)?, "an fsync at the former writer")?;
        ensure!(!status.success(), "the former writer acknowledges an fsync ({front:?})");
    }
    let kept = fs::read(cluster.point(1).join("kept")).map_err(tried("reading at the new writer"))?;
    ensure!(kept == b"content", "the new writer has lost a file");
    sync_a_file(&cluster.point(1).join("last"))?;
    cluster.check(1)?;
    let state = cluster.state(1)?;
    ensure!(state["standing"] == "serving", "the new writer does not serve: {state}");
    passed()
}

/// How the writer is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    Frozen,
    CutOff,
}

/// The writer is alive when its replica is promoted. Whatever it acknowledges later would be lost.
fn returns(away: Away) -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    cluster.mount(0, 0)?;
    let (lines, counts) = (cluster.point(0).join("lines"), cluster.outside().join("counts"));
    // A program's own session lives on while its node is frozen.
    let mut command = if away == Away::Frozen { Front::RunAtOnce } else { Front::Mount }.command("python3");
    let mut counter = start_quietly(command.args(["-c", COUNTER]).arg(&lines).arg(&counts))?;
    let count = |path: &Path| fs::read_to_string(path).map_or(0, |text| text.lines().count());
    eventually("lines are synced", PATIENCE, || count(&counts) > 20)?;
    match away {
        Away::Frozen => cluster.dev(&["freeze", "0"])?.success()?,
        Away::CutOff => cluster.dev(&["cut"])?.success()?,
    };
    let acknowledged = count(&counts);
    cluster.promote_in_time(1, false)?;
    cluster.mount(1, 1)?;
    let there = count(&cluster.point(1).join("lines"));
    ensure!(there >= acknowledged, "{acknowledged} lines were acknowledged, {there} are at the new writer");
    sync_a_file(&cluster.point(1).join("new"))?;
    cluster.dev(&["heal"])?.success()?;
    cluster.wait_for(0, "it learns that it was replaced", |state| state["standing"] == "replaced")?;
    let status = end_in_time_or_kill(&mut counter, "the writing process")?;
    ensure!(!status.success(), "the writing process ended with success");
    let later = count(&counts);
    ensure!(later <= there, "{later} lines were acknowledged, {there} are at the new writer");
    let still = count(&cluster.point(1).join("lines"));
    ensure!(still == there, "the new writer had {there} lines, and has {still}");
    cluster.try_mount(0, 2)?.failure(1, &["node 0 was replaced"])?;
    cluster.check(1)?;
    Ok(Verdict::Passed(format!("{later} acknowledged, {there} kept")))
}

fn start_quietly(command: &mut Command) -> Outcome<Child> {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.spawn().map_err(tried("starting a program"))
}

/// Waits until a program ends. If it does not, it is killed, and the test fails.
fn end_in_time(mut child: Child, what: &str) -> Outcome<std::process::ExitStatus> {
    end_in_time_or_kill(&mut child, what)
}

fn end_in_time_or_kill(child: &mut Child, what: &str) -> Outcome<std::process::ExitStatus> {
    match wait_for(child, PATIENCE)? {
        Some(status) => Ok(status),
        None => {
            let _ = child.kill();
            Err(format!("{what} hangs for {} s", PATIENCE.as_secs()))
        }
    }
}
