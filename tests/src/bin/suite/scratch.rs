//! Programs that read back what they have written, as a sort on disk does, while SharedFS is killed again and again: it had put
//! data in blocks that it did not live to commit, and the next one puts other data there.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Medium, Site, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, number, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[Test { name: "kill/what_is_read_back_is_what_was_written", run: read_back }];

/// Programs at work at the same time, every other one on the second mount, where no kernel keeps pages.
const PROGRAMS: u64 = 4;
const BLOCK_BYTES: usize = 8192;
const BLOCKS_MAX: u64 = 300;

fn read_back() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let kills = number("ASHLAR_KILL_SCRATCH", 20);
    let mut reads = 0;
    for (mounts, kills) in [(1, kills.div_ceil(2)), (2, kills / 2)] {
        let site = Site::mounted(Medium::Memory, "256M")?;
        if mounts == 2 {
            site.mount(1)?;
        }
        reads += run(&site, mounts, kills)?;
        site.check()?;
        for mount in 0..mounts {
            site.umount(mount)?;
        }
        site.check()?;
    }
    ensure!(reads > kills * 100, "only {reads} reads in {kills} kills: nothing was tried");
    Ok(Verdict::Passed(format!("{kills} kills, {reads} blocks read back")))
}

fn run(site: &Site, mounts: usize, kills: u64) -> Outcome<u64> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let programs: Vec<_> = (0..PROGRAMS)
            .map(|seed| {
                let (root, done) = (site.point(seed as usize % mounts), &done);
                scope.spawn(move || {
                    let mut random = Random::new(number("ASHLAR_SEED", 1) * PROGRAMS + seed);
                    let mut reads = 0;
                    while !done.load(Ordering::Relaxed) {
                        // Some files stay and are written anew, most go: their blocks are used again.
                        let path = root.join(format!("scratch-{seed}-{}", random.below(5)));
                        reads +=
                            sort(&path, &mut random, seed).map_err(|error| format!("{}: {error}", path.display()))?;
                        if random.below(3) > 0 {
                            std::fs::remove_file(&path).map_err(tried("removing a file"))?;
                        }
                    }
                    Ok::<u64, String>(reads)
                })
            })
            .collect();
        let mut killed = Ok(());
        for _ in 0..kills {
            if programs.iter().any(std::thread::ScopedJoinHandle::is_finished) {
                break;
            }
            killed = killed.and_then(|()| site.kill_daemon());
        }
        done.store(true, Ordering::Relaxed);
        let reads = programs
            .into_iter()
            .map(|program| program.join().map_err(|_| "a thread panicked".to_owned())?)
            .sum::<Outcome<u64>>();
        killed.and(reads)
    })
}

/// Writes a file in blocks, each with a word of its own, and reads blocks of it in between. Says how many it read.
fn sort(path: &Path, random: &mut Random, seed: u64) -> Outcome<u64> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
    let file = file.map_err(tried("opening a file"))?;
    let most = 1 + random.below(BLOCKS_MAX);
    let mut words: Vec<u64> = Vec::new();
    let mut reads = 0;
    for _ in 0..most * 3 {
        let word = random.draw() << 8 | seed;
        match random.below(10) {
            0..5 if (words.len() as u64) < most => {
                write(&file, words.len(), word)?;
                words.push(word);
            }
            5 | 6 if !words.is_empty() => {
                let at = random.below(words.len() as u64) as usize;
                write(&file, at, word)?;
                words[at] = word;
            }
            _ if !words.is_empty() => {
                let at = random.below(words.len() as u64) as usize;
                let mut found = vec![0; BLOCK_BYTES];
                file.read_exact_at(&mut found, (at * BLOCK_BYTES) as u64).map_err(tried("reading a block"))?;
                let other = found.chunks_exact(8).position(|chunk| chunk != words[at].to_le_bytes());
                ensure!(
                    other.is_none(),
                    "block {at} of {} holds {:x?} where {:x} was written",
                    words.len(),
                    &found[other.unwrap_or(0) * 8..][..8],
                    words[at]
                );
                reads += 1;
            }
            _ => {}
        }
    }
    Ok(reads)
}

fn write(file: &File, block: usize, word: u64) -> Outcome {
    let bytes = word.to_le_bytes().repeat(BLOCK_BYTES / 8);
    file.write_all_at(&bytes, (block * BLOCK_BYTES) as u64).map_err(tried("writing a block"))
}
