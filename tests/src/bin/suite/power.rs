//! Power cuts: an arena on a disk of its own, whose power goes while ledgers are written.
//!
//! The disk is an ext4 in a file. Its shutdown call stops it from writing anything more: what is in the page cache is lost,
//! what was synced stays, and whatever writeback has reached before stays too. So that the latter is as mixed as it can be,
//! random pages of the arena's files are written back all the time.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ashlar_tests::command::eventually;
use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::ledger::checker::{Bound, check};
use ashlar_tests::mount::{Site, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::reference::Reference;
use ashlar_tests::tree::Tree;
use ashlar_tests::{Outcome, ensure, number, tried};

use crate::kill::{Writer, forget_failure};

/// The tests of this group.
pub const TESTS: &[Test] = &[Test { name: "power/what_was_synced_survives_as_a_prefix", run: cuts }];

const WRITERS: usize = 3;

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
    if let Some(why) = disk.uncuttable() {
        return Ok(Verdict::Skipped(why));
    }
    let rounds = number("ASHLAR_POWER_CUTS", 4);
    let site = Site::within(&disk.path(), "128M")?;
    let mut random = Random::new(number("ASHLAR_SEED", 1));
    let mut trees = vec![Tree::new(); WRITERS];
    let (mut acknowledged, mut survived) = (0, 0);
    site.mount(0)?;
    for writer in 0..WRITERS {
        fs::create_dir(directory(&site, writer)).map_err(tried("making a directory"))?;
    }
    // The directories themselves are not part of the ledgers.
    fs::File::open(site.point(0)).and_then(|root| root.sync_all()).map_err(tried("syncing"))?;
    for round in 0..rounds {
        let seed = random.draw();
        let told = |error: String| format!("round {round}, seed {seed}: {error}");
        let cut = cut(&site, &disk, seed, Duration::from_millis(random.below(700))).map_err(told)?;
        site.kill_all_there_is().map_err(told)?;
        site.clear_mounts();
        disk.restore_power().map_err(told)?;
        site.mount(0).map_err(told)?;
        for (index, (writer, journal_bytes)) in cut.iter().enumerate() {
            forget_failure(&writer.journal)?;
            let bound = Bound::FsyncWithin { journal_bytes: *journal_bytes };
            let verdict = check(&directory(&site, index), &writer.journal, &trees[index], writer.seed, bound)
                .map_err(|error| told(format!("writer {index}: {error}")))?;
            acknowledged += verdict.acknowledged;
            survived += verdict.survived;
            trees[index] = verdict.tree;
            fs::remove_file(&writer.journal).map_err(tried("removing a journal"))?;
        }
        site.check().map_err(told)?;
    }
    site.umount(0)?;
    site.check()?;
    ensure!(acknowledged > rounds * 10, "only {acknowledged} updates in {rounds} rounds: nothing was tried");
    Ok(Verdict::Passed(format!(
        "{rounds} cuts, {survived} of {acknowledged} acknowledged updates survived, each time a prefix with all that was synced"
    )))
}

fn directory(site: &Site, index: usize) -> PathBuf {
    site.point(0).join(format!("w{index}"))
}

/// Lets writers work, cuts the power in the middle of it, and ends them. With each writer comes the length of its journal just
/// before the cut.
fn cut(site: &Site, disk: &Reference, seed: u64, work: Duration) -> Outcome<Vec<(Writer, usize)>> {
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
    let cut = working.and_then(|()| disk.cut_power(&journals));
    end(&mut writeback)?;
    for writer in &mut writers {
        end(&mut writer.child)?;
    }
    cut.map(|lengths| writers.into_iter().zip(lengths).collect())
}

fn end(child: &mut Child) -> Outcome {
    // One that has failed has ended by itself.
    let _ = child.kill();
    child.wait().map(drop).map_err(tried("ending a process"))
}
