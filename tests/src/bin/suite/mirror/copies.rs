//! A replica gets a full copy under load: it is new, or its arena was lost.

use std::path::{Path, PathBuf};

use ashlar_tests::cluster::{ClusterOptions, PATIENCE, TestCluster, free_addresses, is_in_sync};
use ashlar_tests::command::{ashlar, eventually, run, signal, start_daemon, wait_for};
use ashlar_tests::harness::{Test, Verdict, when_mountable};
use ashlar_tests::ledger::checker::Bound;
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, loops, number, tried};
use rustix::process::Signal;

use super::load::{LedgerLoad, LedgerTotals, MIXED, run_rounds};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "mirror/replica_is_added_while_programs_work", run: || when_mountable(added) },
    Test {
        name: "mirror/deleted_replica_arena_is_replaced_under_load",
        run: || when_mountable(|| lost(Remedy::Replace)),
    },
    Test {
        name: "mirror/deleted_replica_arena_is_joined_again_under_load",
        run: || when_mountable(|| lost(Remedy::Join)),
    },
];

/// A writer without a replica gets one while programs work.
fn added() -> Outcome<Verdict> {
    let (one, two) = (TestArena::new(Medium::Memory, "64M")?, TestArena::new(Medium::Memory, "64M")?);
    let [first, second] = free_addresses()?;
    let invitation = one.outside().join("invitation").display().to_string();
    one.ashlar(&["cluster", "init", "--address", &first, "--size", "64M"])?.success()?;
    one.mount(0)?;
    let seed = number("ASHLAR_SEED", 1);
    let mut load = LedgerLoad::start_in(&one.point(0), one.outside(), MIXED, seed)?;
    one.ashlar(&["node", "add", &second, "--invitation", &invitation])?.success()?;
    load.wait_for_syncs()?;
    two.ashlar(&["node", "join", &invitation, "--size", "64M"])?.success()?;
    // The drop of its arena ends it, at the latest.
    let mut replica = start_daemon(two.arena(), &[])?;
    let progress = |arena: &TestArena| arena.status().map(|status| status["daemon"]["cluster"].clone());
    eventually("the replica is in sync", PATIENCE, || progress(&one).is_ok_and(|state| is_in_sync(&state)))?;
    load.wait_for_syncs().and_then(|()| load.expect_at_work())?;
    load.kill()?;
    let LedgerTotals { acknowledged, survived } = load.check_at(&one.point(0), Bound::Acknowledged)?;
    one.umount(0)?;
    eventually("the replica has applied all", PATIENCE, || {
        let (Ok(writer), Ok(copy)) = (progress(&one), progress(&two)) else { return false };
        copy["replication"]["applied"] == writer["journal_end"]
    })?;
    signal(one.daemon()?, Signal::TERM)?;
    eventually("the writer's daemon ends", PATIENCE, || !one.is_named())?;
    signal(two.daemon()?, Signal::TERM)?;
    wait_for(&mut replica, PATIENCE)?.ok_or("the replica's daemon does not end")?;
    run(ashlar(&["fsck", "--compare"]).args([one.arena(), two.arena()]))?.success()?;
    Ok(Verdict::Passed(format!("{acknowledged} acknowledged updates, {survived} in both arenas")))
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
