//! The replica's arena is lost under load. A new one gets a full copy.

use std::path::{Path, PathBuf};

use ashlar_tests::cluster::{ClusterOptions, TestCluster};
use ashlar_tests::harness::{Test, Verdict, when_mountable};
use ashlar_tests::ledger::checker::Bound;
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, loops, number, tried};

use super::load::{LedgerLoad, LedgerTotals, MIXED};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test {
        name: "mirror/deleted_replica_arena_is_replaced_under_load",
        run: || when_mountable(|| lost(Remedy::Replace)),
    },
    Test {
        name: "mirror/deleted_replica_arena_is_joined_again_under_load",
        run: || when_mountable(|| lost(Remedy::Join)),
    },
];

/// How a replica is made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remedy {
    /// A new node takes its place, and the writer goes on alone until then.
    Replace,
    /// It uses its invitation once more, and syncs wait until then.
    Join,
}

fn lost(remedy: Remedy) -> Outcome<Verdict> {
    let rounds = loops(1);
    let mut random = Random::new(number("ASHLAR_SEED", 1));
    let cluster = TestCluster::up(ClusterOptions { size: "256M", ..ClusterOptions::default() })?;
    cluster.mount(0, 0)?;
    let seed = random.draw();
    let mut load = LedgerLoad::start(&cluster, 0, MIXED, seed)?;
    let mut invitation = None;
    for round in 0..rounds {
        lose_arena(&cluster, remedy, &mut invitation)
            .and_then(|()| load.wait_for_syncs())
            .and_then(|()| load.expect_at_work())
            .and_then(|()| cluster.expect_no_fence(0))
            .map_err(|error| format!("round {round}, seed {seed}: {error}"))?;
    }
    load.kill()?;
    let LedgerTotals { acknowledged, survived } = load.check(&cluster, 0, Bound::Acknowledged)?;
    cluster.umount(0)?;
    cluster.compare_at_rest(0)?;
    Ok(Verdict::Passed(format!("{rounds} arenas lost, {acknowledged} acknowledged updates, {survived} in both arenas")))
}

/// Deletes the replica's arena, and waits until a new one is in sync.
fn lose_arena(cluster: &TestCluster, remedy: Remedy, invitation: &mut Option<PathBuf>) -> Outcome {
    cluster.kill(1)?;
    std::fs::remove_dir_all(cluster.arena(1)).map_err(tried("deleting an arena"))?;
    cluster.wait_for(0, "its replica is away", |state| state["is_linked"] == false)?;
    // 'ashlar dev' keeps no invitation: the first one is always to a new node.
    let file = match invitation.take().filter(|_| remedy == Remedy::Join) {
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
