//! Power cuts: the disk of an arena loses power while ledgers are written.
//!
//! The disk is an ext4 in a file. Its shutdown call stops all its writes: the page cache is lost, and synced data stay,
//! and so do data that writeback has reached before. To make the latter as mixed as possible, random pages of the
//! arena's files are written back all the time.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ashlar_tests::command::{eventually, wait_for};
use ashlar_tests::harness::{Test, Verdict, passed};
use ashlar_tests::ledger::checker::{Bound, check};
use ashlar_tests::mount::{Front, TestArena, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::reference::Reference;
use ashlar_tests::tree::Tree;
use ashlar_tests::{Outcome, ensure, number, tried};

use crate::crashes::kill_loops::{Writer, forget_failure};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "power/synced_updates_survive_as_a_prefix", run: cuts },
    Test { name: "power/lost_disk_gives_errors_without_wait", run: gone },
];

const WRITERS: usize = 3;
const MOUNTS: usize = 2;

/// Writes random pages of the arena's files back, as a kernel short of memory does.
const WRITEBACK: &str = r#"
import ctypes, os, random, sys, time
libc = ctypes.CDLL(None)
libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
random.seed(int(sys.argv[2]))
while True:
    for folder, _, names in os.walk(sys.argv[1]):
        for name in names:
            try:
                fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            except OSError:
                continue
            pages = os.fstat(fd).st_size // 4096 + 1
            for _ in range(20):
                libc.sync_file_range(fd, random.randrange(pages) * 4096, random.choice([1, 1, 1, 2, 16]) * 4096, 2)
            os.close(fd)
    time.sleep(0.005)
"#;

fn cuts() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let mut disk = Reference::new(512)?;
    if let Some(why) = disk.power_cut_obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let rounds = number("ASHLAR_POWER_CUTS", 4);
    let site = TestArena::within(&disk.path(), "128M")?;
    let mut random = Random::new(number("ASHLAR_SEED", 1));
    let mut trees = vec![Tree::new(); WRITERS];
    let (mut acknowledged, mut survived, mut seen) = (0, 0, 0);
    mount(&site)?;
    for writer in 0..WRITERS {
        fs::create_dir(directory(&site, writer)).map_err(tried("making a directory"))?;
    }
    for name in SEEN {
        fs::write(site.point(0).join(name), count_text(0)).map_err(tried(format!("making {name}")))?;
    }
    // The directories themselves are not part of the ledgers.
    File::open(site.point(0)).and_then(|root| root.sync_all()).map_err(tried("syncing"))?;
    for round in 0..rounds {
        let seed = random.draw();
        let with_round = |error: String| format!("round {round}, seed {seed}: {error}");
        let (cut, synced) =
            cut_power(&site, &disk, seed, Duration::from_millis(random.below(700))).map_err(with_round)?;
        site.kill_leftovers().map_err(with_round)?;
        site.clear_mounts();
        disk.restore_power().map_err(with_round)?;
        mount(&site).map_err(with_round)?;
        let [first, second] = SEEN.map(|name| count(&site.point(0).join(name)));
        let (first, second) = (first.map_err(with_round)?, second.map_err(with_round)?);
        ensure!(
            second <= first && synced <= second,
            "round {round}, seed {seed}: {synced} was synced, {second} is there, of which {first} had been seen"
        );
        seen += second;
        for (index, (writer, journal_bytes)) in cut.iter().enumerate() {
            forget_failure(&writer.journal)?;
            let bound = Bound::FsyncWithin { journal_bytes: *journal_bytes };
            let verdict = check(&directory(&site, index), &writer.journal, &trees[index], writer.seed, bound)
                .map_err(|error| with_round(format!("writer {index}: {error}")))?;
            acknowledged += verdict.acknowledged;
            survived += verdict.survived;
            trees[index] = verdict.tree;
            fs::remove_file(&writer.journal).map_err(tried("removing a journal"))?;
        }
        site.check().map_err(with_round)?;
    }
    (0..MOUNTS).try_for_each(|mount| site.umount(mount).map(drop))?;
    site.check()?;
    ensure!(seen > rounds * 10, "only {seen} turns between the mounts: nothing was tried");
    ensure!(acknowledged > rounds * 10, "only {acknowledged} updates in {rounds} rounds: nothing was tried");
    Ok(Verdict::Passed(format!(
        "{rounds} cuts, {survived} of {acknowledged} acknowledged updates survived, each time a prefix with all that was synced"
    )))
}

/// Programs get an error when nothing can be written any more, even if SharedFS can't write its own log.
fn gone() -> Outcome<Verdict> {
    // If SharedFS itself gives up, calls wait two minutes for another one.
    const SOON: Duration = Duration::from_secs(180);
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let mut disk = Reference::new(512)?;
    if let Some(why) = disk.power_cut_obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let site = TestArena::within(&disk.path(), "128M")?;
    site.mount(0)?;
    let point = site.point(0);
    fs::write(point.join("kept"), "synced").map_err(tried("writing"))?;
    File::open(point.join("kept")).and_then(|file| file.sync_all()).map_err(tried("syncing"))?;
    disk.cut_power(&[])?;
    let mut sync = Command::new("sync").arg(point.join("kept")).stderr(Stdio::null()).spawn().map_err(tried("sync"))?;
    // More than the log holds, so that it must be digested.
    let mut writer = Command::new("dd")
        .args(["if=/dev/zero", "bs=1M", "count=100"])
        .arg(format!("of={}", point.join("big").display()))
        .stderr(Stdio::null())
        .spawn()
        .map_err(tried("starting dd"))?;
    let ended = [wait_for(&mut sync, SOON), wait_for(&mut writer, SOON)];
    let read = fs::read(point.join("kept"));
    site.kill_leftovers()?;
    site.clear_mounts();
    let [sync, writer] = ended;
    ensure!(!sync?.ok_or("fsync hangs")?.success(), "what can't be synced is said to be");
    ensure!(!writer?.ok_or("writing hangs")?.success(), "100 MiB were written to a disk that is gone");
    ensure!(read.is_ok_and(|content| content == b"synced"), "what is there can't be read");
    disk.restore_power()?;
    site.mount(0)?;
    let kept = fs::read_to_string(point.join("kept")).map_err(tried("reading"))?;
    ensure!(kept == "synced", "what was synced before is '{kept}' now");
    site.umount(0)?;
    site.check()?;
    passed()
}

fn mount(site: &TestArena) -> Outcome {
    (0..MOUNTS).try_for_each(|number| site.mount(number).map(drop))
}

fn directory(site: &TestArena, index: usize) -> PathBuf {
    site.point(index % MOUNTS).join(format!("w{index}"))
}

/// A count goes from mount to mount: written on one, seen on the other, and written there into a second file. The
/// second file's session then depends on the first one's. The second file must never be ahead of the first.
const SEEN: [&str; 2] = ["written", "seen"];

fn count_text(count: u64) -> String {
    format!("{count:020}")
}

fn count(path: &std::path::Path) -> Outcome<u64> {
    let text = fs::read_to_string(path).map_err(tried(format!("reading {}", path.display())))?;
    text.parse().map_err(|_| format!("{} holds '{text}'", path.display()))
}

/// Counts until the power goes; returns the last count that was synced before.
fn count_in_turns(site: &TestArena, is_cut: &AtomicBool) -> Outcome<u64> {
    let mut synced = count(&site.point(0).join(SEEN[1]))?;
    let open = |mount: usize, name: &str| OpenOptions::new().read(true).write(true).open(site.point(mount).join(name));
    let mut turn = |number: u64, files: &[[File; 2]; MOUNTS]| -> io::Result<()> {
        let (one, other) = (number as usize % MOUNTS, (number as usize + 1) % MOUNTS);
        files[one][0].write_all_at(count_text(number).as_bytes(), 0)?;
        let mut found = [0; 20];
        files[other][0].read_exact_at(&mut found, 0)?;
        files[other][1].write_all_at(&found, 0)?;
        if number % 4 == 0 {
            files[other][1].sync_all()?;
            if !is_cut.load(Ordering::SeqCst) {
                synced = number;
            }
        }
        Ok(())
    };
    let files =
        (|| Ok::<_, io::Error>([[open(0, SEEN[0])?, open(0, SEEN[1])?], [open(1, SEEN[0])?, open(1, SEEN[1])?]]))()
            .map_err(tried("opening what is counted in"))?;
    let first = count(&site.point(0).join(SEEN[0]))? + 1;
    // Ends with the first error, which the power cut causes.
    let _ = (first..).try_for_each(|number| turn(number, &files));
    Ok(synced)
}

/// Lets writers work, cuts the power in the middle of it, and ends them. Returns each writer with the length of its
/// journal just before the cut, and the last count that was synced.
fn cut_power(site: &TestArena, disk: &Reference, seed: u64, work: Duration) -> Outcome<(Vec<(Writer, usize)>, u64)> {
    let is_cut = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let counter = scope.spawn(|| count_in_turns(site, &is_cut));
        let cut = cut_writers(site, disk, seed, work, &is_cut);
        if cut.is_err() || !counter.is_finished() {
            // The rest of the mounts no longer answers, or never failed.
            site.kill_leftovers()?;
            site.clear_mounts();
        }
        let synced = counter.join().map_err(|_| "a thread panicked".to_owned())?;
        Ok((cut?, synced?))
    })
}

fn cut_writers(
    site: &TestArena,
    disk: &Reference,
    seed: u64,
    work: Duration,
    is_cut: &AtomicBool,
) -> Outcome<Vec<(Writer, usize)>> {
    let mut writeback = Command::new("python3")
        .args(["-c", WRITEBACK])
        .arg(site.arena())
        .arg(seed.to_string())
        .stdin(Stdio::null())
        .spawn()
        .map_err(tried("starting the writeback"))?;
    let mut writers = (0..WRITERS)
        .map(|index| {
            Writer::start(
                Front::Mount,
                &directory(site, index),
                &site.outside().join(format!("journal{index}")),
                seed.wrapping_add(index as u64),
            )
        })
        .collect::<Outcome<Vec<_>>>()?;
    let working = eventually("the writers are at work", Duration::from_secs(60), || {
        writers.iter().all(|writer| fs::metadata(&writer.journal).is_ok_and(|journal| journal.len() > 3000))
    });
    std::thread::sleep(work);
    let journals: Vec<_> = writers.iter().map(|writer| writer.journal.as_path()).collect();
    is_cut.store(true, Ordering::SeqCst);
    let cut = working.and_then(|()| disk.cut_power(&journals));
    kill_child(&mut writeback)?;
    for writer in &mut writers {
        kill_child(&mut writer.child)?;
    }
    cut.map(|lengths| writers.into_iter().zip(lengths).collect())
}

fn kill_child(child: &mut Child) -> Outcome {
    // A writer that has failed has ended by itself.
    let _ = child.kill();
    child.wait().map(drop).map_err(tried("ending a process"))
}
