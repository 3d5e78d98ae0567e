//! Kill loops: a ledger is written, and something is killed.
//!
//! Afterwards everything acknowledged must be there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use ashlar_tests::command::{eventually, was_killed};
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::ledger::checker::{Bound, check};
use ashlar_tests::mount::{Front, Medium, TestArena, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::tree::Tree;
use ashlar_tests::{Outcome, ensure, number, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test {
        name: "kill/killed_applications_lose_nothing",
        run: || when_mountable(Kill::Application, Front::Mount, "ASHLAR_KILL_WRITER", 30),
    },
    Test {
        name: "kill/killed_sharedfs_loses_nothing",
        run: || when_mountable(Kill::Daemon, Front::Mount, "ASHLAR_KILL_DAEMON", 30),
    },
    Test {
        name: "kill/killed_everything_loses_nothing",
        run: || when_mountable(Kill::Everything, Front::Mount, "ASHLAR_KILL_ALL", 10),
    },
    Test {
        name: "run/killed_applications_lose_nothing",
        run: || when_mountable(Kill::Application, Front::RunAtOnce, "ASHLAR_KILL_WRITER", 14),
    },
    Test {
        name: "run/killed_sharedfs_loses_nothing",
        run: || when_mountable(Kill::Daemon, Front::RunAtOnce, "ASHLAR_KILL_DAEMON", 10),
    },
    Test {
        name: "run/killed_everything_loses_nothing",
        run: || when_mountable(Kill::Everything, Front::RunAtOnce, "ASHLAR_KILL_ALL", 6),
    },
];

/// Writers at work at the same time, each in a directory of its own, spread over the mounts.
const WRITERS: usize = 3;
/// More operations than a writer completes before it is killed.
const UNTIL_KILLED: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kill {
    Application,
    Daemon,
    Everything,
}

/// A writer at work.
pub struct Writer {
    /// Its process.
    pub child: Child,
    /// Its journal.
    pub journal: PathBuf,
    /// The seed of its operations.
    pub seed: u64,
}

impl Writer {
    /// Starts a writer that runs until it is killed.
    pub fn start(front: Front, directory: &Path, journal: &Path, seed: u64) -> Outcome<Self> {
        let program = std::env::current_exe().map_err(tried("finding this program"))?.with_file_name("ashlar-writer");
        let complaints = fs::File::create(complaints_of(journal)).map_err(tried("making a file for errors"))?;
        let child = front
            .command(program)
            .arg(directory)
            .arg(journal)
            .args([seed.to_string(), UNTIL_KILLED.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(complaints)
            .spawn()
            .map_err(tried("starting a writer"))?;
        Ok(Self { child, journal: journal.to_owned(), seed })
    }
}

/// The sum of the rounds.
#[derive(Default)]
struct KillTotals {
    acknowledged: u64,
    pending: u64,
}

fn when_mountable(kill: Kill, front: Front, variable: &str, default: u64) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let rounds = number(variable, default);
    let mut sum = KillTotals::default();
    // Half on each medium: they differ in what a digest has to wait for.
    for (medium, rounds) in [(Medium::Memory, rounds.div_ceil(2)), (Medium::Disk, rounds / 2)] {
        let site = TestArena::mounted(medium, "256M")?;
        run(kill, front, &site, rounds, &mut sum).map_err(|error| format!("{medium:?}: {error}"))?;
    }
    ensure!(sum.acknowledged > rounds * 10, "only {} updates in {rounds} rounds: nothing was tried", sum.acknowledged);
    let KillTotals { acknowledged, pending } = sum;
    Ok(Verdict::Passed(format!(
        "{rounds} kills, {acknowledged} acknowledged updates all there, {pending} that were under way done whole"
    )))
}

fn run(kill: Kill, front: Front, site: &TestArena, rounds: u64, sum: &mut KillTotals) -> Outcome {
    site.mount(1)?;
    let mut random = Random::new(number("ASHLAR_SEED", 1));
    let mut trees = vec![Tree::new(); WRITERS];
    for writer in 0..WRITERS {
        fs::create_dir(site.point(0).join(format!("w{writer}"))).map_err(tried("making a directory"))?;
    }
    for round in 0..rounds {
        let seed = random.draw();
        let with_round = |error: String| format!("round {round}, seed {seed}: {error}");
        let mut writers =
            (0..WRITERS).map(|index| start(front, site, index, round, seed)).collect::<Outcome<Vec<_>>>()?;
        eventually("the writers are at work", Duration::from_secs(60), || {
            writers.iter().all(|writer| journal_size(&writer.journal) > 2000)
        })
        .map_err(|error| with_round(format!("{error}: {}", last_words(&writers))))?;
        std::thread::sleep(Duration::from_millis(random.below(150)));
        kill_and_restart(kill, site, &mut writers, &mut random).map_err(with_round)?;
        for (index, writer) in writers.iter().enumerate() {
            // Read through the mount that the writer did not use, if possible.
            let root = directory(site, (index + 1) % 2, index);
            let verdict = check(&root, &writer.journal, &trees[index], writer.seed, Bound::Acknowledged)
                .map_err(|error| with_round(format!("writer {index}: {error}")))?;
            sum.acknowledged += verdict.acknowledged;
            sum.pending += verdict.survived - verdict.acknowledged;
            trees[index] = verdict.tree;
            fs::remove_file(&writer.journal).map_err(tried("removing a journal"))?;
        }
        site.check().map_err(with_round)?;
    }
    site.umount(0)?;
    site.umount(1)?;
    site.check()?;
    Ok(())
}

fn directory(site: &TestArena, mount: usize, index: usize) -> PathBuf {
    site.point(mount).join(format!("w{index}"))
}

fn start(front: Front, site: &TestArena, index: usize, round: u64, seed: u64) -> Outcome<Writer> {
    let journal = site.outside().join(format!("journal-{index}-{round}"));
    Writer::start(front, &directory(site, index % 2, index), &journal, seed.wrapping_add(index as u64))
}

/// Kills, restarts whatever reading needs, and leaves no writer running.
fn kill_and_restart(kill: Kill, site: &TestArena, writers: &mut [Writer], random: &mut Random) -> Outcome {
    match kill {
        Kill::Application => {
            kill_writers(writers)?;
            // Every other time the processes behind the mounts too: LibFS is part of an application.
            if random.below(2) == 0 {
                site.kill_mounts()?;
                site.mount(0)?;
                site.mount(1)?;
            }
        }
        Kill::Daemon => {
            site.kill_daemon()?;
            // The writers must continue: their journals grow, and none of their calls may fail.
            let before: Vec<_> = writers.iter().map(|writer| journal_size(&writer.journal)).collect();
            eventually("the writers continue", Duration::from_secs(60), || {
                writers.iter().zip(&before).all(|(writer, before)| journal_size(&writer.journal) > before + 500)
            })?;
            for writer in writers.iter_mut() {
                let ended = writer.child.try_wait().map_err(tried("looking at a writer"))?;
                ensure!(ended.is_none(), "a writer ended with {ended:?} when the daemon was killed");
            }
            kill_writers(writers)?;
        }
        Kill::Everything => {
            site.kill_everything()?;
            // Calls of the writers fail now; only those acknowledged before count.
            for writer in writers.iter_mut() {
                let _ = writer.child.kill();
                writer.child.wait().map_err(tried("ending a writer"))?;
                forget_failure(&writer.journal)?;
            }
            site.mount(0)?;
            site.mount(1)?;
        }
    }
    Ok(())
}

fn kill_writers(writers: &mut [Writer]) -> Outcome {
    for writer in writers.iter_mut() {
        writer.child.kill().map_err(tried("killing a writer"))?;
        let status = writer.child.wait().map_err(tried("ending a writer"))?;
        ensure!(was_killed(status), "a writer ended before it was killed, with {status}");
    }
    Ok(())
}

/// Each writer's last operations and error messages, for a message.
fn last_words(writers: &[Writer]) -> String {
    let last =
        |path: &Path| fs::read_to_string(path).unwrap_or_default().lines().last().unwrap_or("nothing").to_owned();
    let words = |writer: &Writer| {
        let (done, complaint) = (last(&writer.journal), last(&complaints_of(&writer.journal)));
        format!("{done} (errors: {complaint})")
    };
    writers.iter().map(words).collect::<Vec<_>>().join("; ")
}

/// The file of a writer's error messages, beside its journal.
fn complaints_of(journal: &Path) -> PathBuf {
    journal.with_extension("complaints")
}

fn journal_size(journal: &Path) -> u64 {
    fs::metadata(journal).map_or(0, |journal| journal.len())
}

/// Removes the journal's last line if it says that the call under way failed because of the kill.
pub fn forget_failure(journal: &Path) -> Outcome {
    let text = fs::read_to_string(journal).map_err(tried("reading a journal"))?;
    if let Some(at) = text.rfind("\nfailed ") {
        fs::write(journal, &text[..=at]).map_err(tried("writing a journal"))?;
    }
    Ok(())
}
