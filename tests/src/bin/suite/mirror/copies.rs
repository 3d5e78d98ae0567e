//! A replica gets a full copy under load: it is new, or its arena was lost.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Child;

use ashlar_tests::cluster::{ClusterOptions, PATIENCE, TestCluster, free_addresses};
use ashlar_tests::command::{ashlar, eventually, run, signal, start_daemon, wait_for};
use ashlar_tests::harness::{Test, Verdict, when_mountable};
use ashlar_tests::ledger::checker::Bound;
use ashlar_tests::mirrors::await_sync;
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, loops, number, tried};
use rustix::process::Signal;
use serde_json::Value;

use super::load::{LedgerLoad, LedgerTotals, MIXED, run_rounds};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "mirror/replica_is_added_while_programs_work", run: || when_mountable(added) },
    Test { name: "mirror/smaller_replica_limits_the_room", run: || when_mountable(smaller_replica) },
    Test {
        name: "mirror/deleted_replica_arena_is_replaced_under_load",
        run: || when_mountable(|| lost(Remedy::Replace)),
    },
    Test {
        name: "mirror/deleted_replica_arena_is_joined_again_under_load",
        run: || when_mountable(|| lost(Remedy::Join)),
    },
];

/// A writer and its replica, each with an arena of a test's own.
struct Pair {
    one: TestArena,
    two: TestArena,
    replica: Child,
}

impl Pair {
    /// Makes a writer that is mounted, and calls `before` before its replica joins.
    fn start(sizes: [&'static str; 2], before: impl FnOnce(&TestArena) -> Outcome) -> Outcome<Self> {
        let (one, two) = (TestArena::new(Medium::Memory, sizes[0])?, TestArena::new(Medium::Memory, sizes[1])?);
        let [first, second] = free_addresses()?;
        let invitation = one.outside().join("invitation").display().to_string();
        one.ashlar(&["cluster", "init", "--address", &first, "--size", sizes[0]])?.success()?;
        one.mount(0)?;
        before(&one)?;
        one.ashlar(&["node", "add", &second, "--invitation", &invitation])?.success()?;
        two.ashlar(&["node", "join", &invitation, "--size", sizes[1]])?.success()?;
        // The drop of its arena ends it, at the latest.
        let replica = start_daemon(two.arena(), &[])?;
        Ok(Self { one, two, replica })
    }

    fn wait_in_sync(&self) -> Outcome {
        await_sync(self.one.arena())
    }

    /// Ends both nodes. Fails unless both arenas hold the same tree.
    fn compare_at_rest(mut self) -> Outcome {
        self.one.umount(0)?;
        eventually("the replica has applied all", PATIENCE, || {
            let (Ok(writer), Ok(copy)) = (state_of(&self.one), state_of(&self.two)) else { return false };
            copy["replication"]["applied"] == writer["journal_end"]
        })?;
        signal(self.one.daemon()?, Signal::TERM)?;
        eventually("the writer's daemon ends", PATIENCE, || !self.one.is_named())?;
        signal(self.two.daemon()?, Signal::TERM)?;
        wait_for(&mut self.replica, PATIENCE)?.ok_or("the replica's daemon does not end")?;
        run(ashlar(&["fsck", "--compare"]).args([self.one.arena(), self.two.arena()]))?.success().map(drop)
    }
}

/// The state of the cluster as the node of an arena knows it.
fn state_of(arena: &TestArena) -> Outcome<Value> {
    arena.status().map(|status| status["daemon"]["cluster"].clone())
}

/// A writer without a replica gets one while programs work.
fn added() -> Outcome<Verdict> {
    let seed = number("ASHLAR_SEED", 1);
    let mut load = None;
    let pair = Pair::start(["64M", "64M"], |one| {
        load = Some(LedgerLoad::start_in(&one.point(0), one.outside(), MIXED, seed)?);
        Ok(())
    })?;
    let mut load = load.ok_or("no load")?;
    pair.wait_in_sync()?;
    load.wait_for_syncs().and_then(|()| load.expect_at_work())?;
    load.kill()?;
    let LedgerTotals { acknowledged, survived } = load.check_at(&pair.one.point(0), Bound::Acknowledged)?;
    pair.compare_at_rest()?;
    Ok(Verdict::Passed(format!("{acknowledged} acknowledged updates, {survived} in both arenas")))
}

/// Programs get no more room than the smaller arena has, and more as soon as it has grown.
fn smaller_replica() -> Outcome<Verdict> {
    let pair = Pair::start(["64M", "64M"], |_| Ok(()))?;
    pair.wait_in_sync()?;
    pair.one.ashlar(&["arena", "resize", "128M"])?.success()?;
    let mut file = File::create(pair.one.point(0).join("file")).map_err(tried("making a file"))?;
    let fitting = write_while_room(&mut file)?;
    ensure!(fitting > 40 && fitting < 64, "{fitting} MiB fit into an arena of 64 MiB");
    file.sync_all().map_err(tried("syncing"))?;
    pair.wait_in_sync()?;
    pair.two.ashlar(&["arena", "resize", "32M"])?.failure(1, &["can't be made smaller"])?;
    pair.two.ashlar(&["arena", "resize", "128M"])?.success()?;
    let mut more = 0;
    eventually("there is more room", PATIENCE, || {
        more += write_while_room(&mut file).unwrap_or(0);
        more > 40
    })?;
    drop(file);
    pair.wait_in_sync()?;
    pair.compare_at_rest()?;
    Ok(Verdict::Passed(format!("{fitting} MiB fit before the replica's arena has grown, {more} afterwards")))
}

/// Appends to a file until there is no room; returns how many MiB it took.
fn write_while_room(file: &mut File) -> Outcome<u64> {
    let mut written = 0;
    loop {
        match file.write_all(&vec![written as u8; 1 << 20]) {
            Ok(()) => written += 1,
            Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(written),
            Err(error) => return Err(format!("writing gives {error}")),
        }
    }
}

/// How a replica is made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remedy {
    /// A new node takes its place, and the writer goes on alone until then.
    Replace,
    /// It uses its invitation once more, and syncs wait until then.
    Join,
}

fn lost(remedy: Remedy) -> Outcome<Verdict> {
    let options = ClusterOptions { size: "256M", ..ClusterOptions::default() };
    let mut invitation = None;
    run_rounds("arenas lost", loops(1), options, |cluster, load| {
        lose_arena(cluster, remedy, &mut invitation)?;
        load.wait_for_syncs()
    })
}

/// Deletes the replica's arena, and waits until a new one is in sync.
fn lose_arena(cluster: &TestCluster, remedy: Remedy, invitation: &mut Option<PathBuf>) -> Outcome {
    cluster.kill(1)?;
    std::fs::remove_dir_all(cluster.arena(1)).map_err(tried("deleting an arena"))?;
    cluster.wait_for(0, "its replica is away", |state| state["is_linked"] == false)?;
    // 'ashlar dev' keeps no invitation: the first one is always to a new node.
    let file = match invitation.take().filter(|file| remedy == Remedy::Join && file.exists()) {
        Some(file) => file,
        None => invite_another(cluster)?,
    };
    join(cluster, &file)?;
    *invitation = Some(file);
    cluster.start(1)?;
    cluster.wait_in_sync(0)
}

/// Puts a new node in the place of the replica. Returns its invitation.
fn invite_another(cluster: &TestCluster) -> Outcome<PathBuf> {
    let members = cluster.state(0)?["members"].clone();
    let replica = members.as_array().into_iter().flatten().find(|member| member["role"] == "replica");
    let address = replica.and_then(|member| member["address"].as_str()).ok_or(format!("no replica in {members}"))?;
    let file = cluster.outside().join("invitation");
    if file.exists() {
        std::fs::remove_file(&file).map_err(tried("removing an invitation"))?;
    }
    let words = ["node", "add", address, "--replace", "--invitation", &file.display().to_string()];
    cluster.ashlar(0, &words)?.success()?;
    Ok(file)
}

fn join(cluster: &TestCluster, invitation: &Path) -> Outcome {
    cluster.ashlar(1, &["node", "join", &invitation.display().to_string(), "--size", "256M"])?.success().map(drop)
}
