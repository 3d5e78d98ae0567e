//! Programs read back their own data, as a sort on disk does, over kills.
//!
//! SharedFS is killed again and again. It had put data in blocks that it did not live to commit, and the next one puts
//! other data there.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Medium, TestArena, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, number, tried};

/// The tests of this group.
pub const TESTS: &[Test] = &[Test { name: "kill/programs_read_back_their_writes_over_kills", run: read_back }];

/// Programs at work at the same time, every other one on the second mount, where no kernel keeps pages.
const PROGRAMS: u64 = 4;
const BLOCK_BYTES: usize = 8192;
const BLOCKS_MAX: u64 = 300;
/// The longest time of a call over a kill. A second is promised; the rest is for machines with much other work.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The programs' counts and longest call.
#[derive(Default)]
struct ReadBackCounts {
    reads: u64,
    pause: Duration,
}

impl ReadBackCounts {
    /// Records how long a call takes.
    fn time_call<R>(&mut self, call: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = call();
        self.pause = self.pause.max(start.elapsed());
        result
    }

    fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.pause = self.pause.max(other.pause);
    }
}

fn read_back() -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let kills = number("ASHLAR_KILL_SCRATCH", 20);
    let mut seen = ReadBackCounts::default();
    for (mounts, kills) in [(1, kills.div_ceil(2)), (2, kills / 2)] {
        let site = TestArena::mounted(Medium::Memory, "256M")?;
        if mounts == 2 {
            site.mount(1)?;
        }
        seen.add(&run(&site, mounts, kills)?);
        site.check()?;
        for mount in 0..mounts {
            site.umount(mount)?;
        }
        site.check()?;
    }
    let ReadBackCounts { reads, pause } = seen;
    ensure!(reads > kills * 100, "only {reads} reads in {kills} kills: nothing was tried");
    ensure!(pause < PAUSE_MAX, "a call took {} ms", pause.as_millis());
    Ok(Verdict::Passed(format!("{kills} kills, {reads} blocks read back, longest pause {} ms", pause.as_millis())))
}

fn run(site: &TestArena, mounts: usize, kills: u64) -> Outcome<ReadBackCounts> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let programs: Vec<_> = (0..PROGRAMS)
            .map(|seed| {
                let (root, done) = (site.point(seed as usize % mounts), &done);
                scope.spawn(move || {
                    let mut random = Random::new(number("ASHLAR_SEED", 1) * PROGRAMS + seed);
                    let mut seen = ReadBackCounts::default();
                    while !done.load(Ordering::Relaxed) {
                        // Some files stay and are written anew, most go: their blocks are used again.
                        let path = root.join(format!("scratch-{seed}-{}", random.below(5)));
                        write_and_read_back(&path, &mut random, seed, &mut seen)
                            .map_err(|error| format!("{}: {error}", path.display()))?;
                        if random.below(3) > 0 {
                            std::fs::remove_file(&path).map_err(tried("removing a file"))?;
                        }
                    }
                    Ok::<ReadBackCounts, String>(seen)
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
        let mut all = ReadBackCounts::default();
        for program in programs {
            all.add(&program.join().map_err(|_| "a thread panicked".to_owned())??);
        }
        killed.map(|()| all)
    })
}

/// Writes a file in blocks, each with a word of its own, and reads blocks of it in between.
fn write_and_read_back(path: &Path, random: &mut Random, seed: u64, seen: &mut ReadBackCounts) -> Outcome {
    let file = seen.time_call(|| OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path));
    let file = file.map_err(tried("opening a file"))?;
    let most = 1 + random.below(BLOCKS_MAX);
    let mut words: Vec<u64> = Vec::new();
    for _ in 0..most * 3 {
        let word = random.draw() << 8 | seed;
        match random.below(10) {
            0..5 if (words.len() as u64) < most => {
                seen.time_call(|| write(&file, words.len(), word))?;
                words.push(word);
            }
            5 | 6 if !words.is_empty() => {
                let at = random.below(words.len() as u64) as usize;
                seen.time_call(|| write(&file, at, word))?;
                words[at] = word;
            }
            _ if !words.is_empty() => {
                let at = random.below(words.len() as u64) as usize;
                let mut found = vec![0; BLOCK_BYTES];
                seen.time_call(|| file.read_exact_at(&mut found, (at * BLOCK_BYTES) as u64))
                    .map_err(tried("reading a block"))?;
                let other = found.chunks_exact(8).position(|chunk| chunk != words[at].to_le_bytes());
                ensure!(
                    other.is_none(),
                    "block {at} of {} holds {:x?} where {:x} was written",
                    words.len(),
                    &found[other.unwrap_or(0) * 8..][..8],
                    words[at]
                );
                seen.reads += 1;
            }
            _ => {}
        }
    }
    Ok(())
}

fn write(file: &File, block: usize, word: u64) -> Outcome {
    let bytes = word.to_le_bytes().repeat(BLOCK_BYTES / 8);
    file.write_all_at(&bytes, (block * BLOCK_BYTES) as u64).map_err(tried("writing a block"))
}
