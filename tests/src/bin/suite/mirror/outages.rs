//! The replica or the link fails under load, and comes back.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_tests::cluster::{ClusterOptions, PATIENCE, TestCluster};
use ashlar_tests::command::{eventually, wait_for};
use ashlar_tests::harness::{Test, Verdict, passed, when_mountable};
use ashlar_tests::{Outcome, ensure, loops, tried};

use super::load::run_rounds;

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "mirror/one_copy_goes_on_while_replica_is_killed", run: || when_mountable(|| alone(Fault::Kill)) },
    Test { name: "mirror/one_copy_goes_on_while_replica_is_frozen", run: || when_mountable(|| alone(Fault::Freeze)) },
    Test { name: "mirror/one_copy_goes_on_while_link_is_cut", run: || when_mountable(|| alone(Fault::Cut)) },
    Test {
        name: "mirror/one_copy_goes_on_while_replica_disk_is_full",
        run: || when_mountable(|| alone(Fault::FullDisk)),
    },
    Test { name: "mirror/two_copies_wait_while_replica_is_killed", run: || when_mountable(|| waiting(Fault::Kill)) },
    Test { name: "mirror/two_copies_wait_while_replica_is_frozen", run: || when_mountable(|| waiting(Fault::Freeze)) },
    Test { name: "mirror/two_copies_wait_while_link_is_cut", run: || when_mountable(|| waiting(Fault::Cut)) },
    Test {
        name: "mirror/two_copies_wait_while_replica_disk_is_full",
        run: || when_mountable(|| waiting(Fault::FullDisk)),
    },
    Test { name: "mirror/fsync_fails_after_long_outage_then_succeeds", run: || when_mountable(long_outage) },
];

/// A replica whose disk is full fails within this time of an update that needs room.
const FAILURE_SHOWS: Duration = Duration::from_millis(1500);

/// A fault of the replica or of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Kill,
    Freeze,
    Cut,
    FullDisk,
}

impl Fault {
    /// The options of a cluster that can have the fault.
    fn options(self, copies: u8) -> ClusterOptions {
        // The journal of a small arena may not hold all that a writer does alone: its replica would need a full copy.
        let size = if copies == 1 { "256M" } else { "64M" };
        let replica_disk = (self == Self::FullDisk).then_some(if copies == 1 { "512M" } else { "192M" });
        ClusterOptions { copies, size, replica_disk }
    }

    fn begin(self, cluster: &TestCluster) -> Outcome {
        match self {
            Self::Kill => cluster.kill(1).map(drop),
            Self::Freeze => cluster.dev(&["freeze", "1"])?.success().map(drop),
            Self::Cut => cluster.dev(&["cut"])?.success().map(drop),
            Self::FullDisk => cluster.fill_replica_disk().and_then(|()| grow_arenas(cluster)),
        }
    }

    fn end(self, cluster: &TestCluster) -> Outcome {
        match self {
            Self::Kill => cluster.start(1).map(drop),
            Self::Freeze | Self::Cut => cluster.dev(&["heal"])?.success().map(drop),
            Self::FullDisk => cluster.free_replica_disk(),
        }
    }
}

/// Adds names until the replica fails: a full disk stops none whose arena has room left.
fn grow_arenas(cluster: &TestCluster) -> Outcome {
    let point = cluster.point(0);
    let mut directories = (0..).map(|number| point.join(format!("names-{number}"))).filter(|place| !place.exists());
    for _ in 0..20 {
        let directory = directories.next().ok_or("no number is free")?;
        std::fs::create_dir(&directory).map_err(tried("making a directory"))?;
        for number in 0..2000 {
            let file = directory.join(format!("{number:0>200}"));
            std::fs::File::create(file).map_err(tried("making a file"))?;
        }
        // The replica starts again and again, and has a link for some moments.
        if eventually("", FAILURE_SHOWS, || cluster.state(0).is_ok_and(|state| state["is_linked"] == false)).is_ok() {
            return Ok(());
        }
    }
    Err("the replica's arena does not grow".into())
}

/// With one copy, the writer goes on alone, and is in sync again when the fault is over.
fn alone(fault: Fault) -> Outcome<Verdict> {
    run_rounds("outages", loops(2), fault.options(1), |cluster, load| {
        fault.begin(cluster)?;
        cluster.wait_for(0, "it goes on alone", |state| state["is_alone"] == true)?;
        // Twice: the first one may have begun before.
        load.wait_for_syncs()?;
        load.wait_for_syncs()?;
        fault.end(cluster)?;
        cluster.wait_in_sync(0)?;
        load.wait_for_syncs()
    })
}

/// With two copies, fsync waits, and returns when the fault is over.
fn waiting(fault: Fault) -> Outcome<Verdict> {
    run_rounds("outages", loops(2), fault.options(2), |cluster, load| {
        fault.begin(cluster)?;
        cluster.wait_for(0, "its replica is away", |state| state["is_linked"] == false)?;
        load.wait_until_held()?;
        let state = cluster.state(0)?;
        ensure!(state["is_alone"] == false, "the writer goes on alone, with two copies needed: {state}");
        fault.end(cluster)?;
        load.wait_for_syncs()?;
        cluster.wait_in_sync(0)?;
        load.wait_for_syncs()
    })
}

/// An fsync that gets no second copy fails in the end. The next one, when the replica is back, succeeds.
fn long_outage() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions::default())?;
    cluster.mount(0, 0)?;
    let file = cluster.point(0).join("file");
    std::fs::write(&file, "content").map_err(tried("writing"))?;
    cluster.kill(1)?;
    cluster.wait_for(0, "its replica is away", |state| state["is_linked"] == false)?;
    let started = Instant::now();
    let sync = || Command::new("sync").arg(&file).stderr(Stdio::null()).spawn().map_err(tried("starting sync"));
    let mut child = sync()?;
    let Some(status) = wait_for(&mut child, PATIENCE)? else {
        let _ = child.kill();
        return Err(format!("fsync hangs for {} s", PATIENCE.as_secs()));
    };
    let seconds = started.elapsed().as_secs();
    ensure!(!status.success(), "fsync returned after {seconds} s without a second copy");
    ensure!(seconds >= 25, "fsync failed after only {seconds} s");
    cluster.start(1)?;
    cluster.wait_in_sync(0)?;
    let status = wait_for(&mut sync()?, PATIENCE)?.ok_or("fsync hangs, with the replica back")?;
    ensure!(status.success(), "fsync fails, with the replica back");
    cluster.expect_no_fence(0)?;
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    passed()
}
