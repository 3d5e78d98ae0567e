//! Hostile sessions on a writer that replicates: each of them alone is fenced.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Stdio};

use ashlar_tests::cluster::{ClusterOptions, PATIENCE, TestCluster};
use ashlar_tests::command::{ashlar, eventually};
use ashlar_tests::harness::{Test, Verdict, when_mountable};
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, loops, number, tried};

use super::load::{LedgerLoad, MIXED};

/// The tests of this group.
pub const TESTS: &[Test] =
    &[Test { name: "mirror/hostile_session_alone_is_fenced", run: || when_mountable(hostile_sessions) }];

/// The offsets of a log's tail and of its ring in its file.
const TAIL_AT: u64 = 192;
const RING_AT: u64 = 8192;

/// The program writes and syncs without an end, so its log is sent to the replica all the time.
const PROGRAM: &str = "import os, sys
f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
while True:
    os.pwrite(f, b'h' * 5000, 0)
    os.fsync(f)
";

/// How a session destroys its own log.
#[derive(Clone, Copy, Debug)]
enum Attack {
    Truncate,
    ForgeTail,
    ForgeRecords,
}

impl Attack {
    const ALL: [Self; 3] = [Self::Truncate, Self::ForgeTail, Self::ForgeRecords];

    fn run(self, log: &Path, random: &mut Random) -> Outcome {
        let file = File::options().write(true).open(log).map_err(tried("opening a log"))?;
        let done = match self {
            Self::Truncate => file.set_len(random.below(2) * 4096),
            Self::ForgeTail => file.write_all_at(&[0xff; 8], TAIL_AT),
            Self::ForgeRecords => file.write_all_at(&random.bytes(2 << 20), RING_AT),
        };
        done.map_err(tried("destroying a log"))
    }
}

fn hostile_sessions() -> Outcome<Verdict> {
    let cluster = TestCluster::up(ClusterOptions { size: "256M", ..ClusterOptions::default() })?;
    cluster.mount(0, 0)?;
    let seed = Random::new(number("ASHLAR_SEED", 1)).draw();
    let mut random = Random::new(seed);
    let mut load = LedgerLoad::start(&cluster, 0, MIXED, seed)?;
    let rounds = loops(2);
    for round in 0..rounds {
        for attack in Attack::ALL {
            attack_once(&cluster, attack, &mut random)
                .and_then(|()| load.expect_at_work())
                .and_then(|()| load.wait_for_syncs())
                .map_err(|error| format!("round {round}, {attack:?}, seed {seed}: {error}"))?;
        }
    }
    load.kill()?;
    let totals = load.check(&cluster, 0, ashlar_tests::ledger::checker::Bound::Acknowledged)?;
    cluster.umount(0)?;
    remove_fenced_logs(&cluster)?;
    cluster.compare_at_rest(0)?;
    let fenced = rounds * Attack::ALL.len() as u64;
    Ok(Verdict::Passed(format!("{fenced} sessions fenced, {} acknowledged updates of others", totals.acknowledged)))
}

/// Starts a program, destroys its log, and waits until its session is fenced. No other one may be.
fn attack_once(cluster: &TestCluster, attack: Attack, random: &mut Random) -> Outcome {
    let before = sessions(cluster)?;
    let mut program = Program::start(&cluster.point(0).join("hostile"))?;
    let mut hostile = None;
    eventually("the program has a session", PATIENCE, || {
        let now = sessions(cluster).unwrap_or_default();
        hostile = now.iter().map(|session| session.0).find(|id| before.iter().all(|known| known.0 != *id));
        hostile.is_some()
    })?;
    let hostile = hostile.ok_or("no session")?;
    std::thread::sleep(std::time::Duration::from_millis(random.below(200)));
    attack.run(&cluster.arena(0).join(format!("sessions/{hostile}.log")), random)?;
    eventually("the session is fenced", PATIENCE, || {
        sessions(cluster).is_ok_and(|all| all.contains(&(hostile, true))) || program.has_failed()
    })?;
    let honest: Vec<_> = sessions(cluster)?.into_iter().filter(|session| session.0 != hostile && session.1).collect();
    ensure!(honest.is_empty(), "honest sessions are fenced: {honest:?}");
    let state = cluster.state(0)?;
    ensure!(state["is_linked"] == true && state["in_sync"] == true, "the link suffers: {state}");
    Ok(())
}

/// Removes the logs that were kept aside, as an administrator does: a check reports them.
fn remove_fenced_logs(cluster: &TestCluster) -> Outcome {
    let sessions = cluster.arena(0).join("sessions");
    let files = std::fs::read_dir(sessions).map_err(tried("reading a directory"))?;
    let mut fenced = files.flatten().filter(|file| file.file_name().to_string_lossy().starts_with("fenced-"));
    fenced.try_for_each(|file| std::fs::remove_file(file.path()).map_err(tried("removing a log")))
}

/// The sessions of the writer, each with whether it is fenced.
fn sessions(cluster: &TestCluster) -> Outcome<Vec<(u64, bool)>> {
    let sessions = cluster.sessions(0)?;
    Ok(sessions.iter().filter_map(|one| Some((one["session"].as_u64()?, !one["fenced"].is_null()))).collect())
}

/// A program that is killed at the end of its scope.
struct Program(Child);

impl Program {
    fn start(path: &Path) -> Outcome<Self> {
        let mut command = ashlar(&["run", "--", "python3", "-c", PROGRAM]);
        command.arg(path).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Self).map_err(tried("starting a program"))
    }

    /// Its calls fail, or its access to a file that it has truncated ends it.
    fn has_failed(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(Some(_)))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
