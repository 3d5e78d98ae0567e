//! Two mounts of one arena under load: no read is ever stale.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_tests::harness::{Test, Verdict};
use ashlar_tests::mount::{Medium, TestArena, obstacle};
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, number, tried};
use rustix::fs::{FlockOperation, flock};

/// The tests of this group.
pub const TESTS: &[Test] = &[
    Test { name: "two_mounts/writes_of_one_show_at_once_on_the_other", run: || when_mountable(fresh) },
    Test { name: "two_mounts/counters_under_locks_are_exact", run: || when_mountable(counters) },
    Test { name: "two_mounts/appends_are_never_lost", run: || when_mountable(appends) },
    Test { name: "two_mounts/exclusive_names_have_one_winner", run: || when_mountable(winners) },
    Test { name: "two_mounts/renames_of_the_same_names_lose_none", run: || when_mountable(names) },
    Test { name: "two_mounts/free_name_is_never_refused_as_taken", run: || when_mountable(free_names) },
];

fn when_mountable(test: fn(&TestArena) -> Outcome<String>) -> Outcome<Verdict> {
    if let Some(why) = obstacle() {
        return Ok(Verdict::Skipped(why));
    }
    let site = TestArena::mounted(Medium::Memory, "256M")?;
    site.mount(1)?;
    let words = test(&site)?;
    site.check()?;
    site.umount(0)?;
    site.umount(1)?;
    site.check()?;
    Ok(Verdict::Passed(words))
}

fn test_duration() -> Duration {
    Duration::from_secs(number("ASHLAR_HAMMER_SECONDS", 4))
}

/// Runs `work` on threads and returns the sum of their counts. A thread's number says which mount it uses.
fn run_threads(count: usize, work: impl Fn(usize) -> Outcome<u64> + Sync) -> Outcome<u64> {
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..count)
            .map(|number| {
                scope.spawn({
                    let work = &work;
                    move || work(number)
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?).sum()
    })
}

/// One thread changes something and says so; another reads it through the other mount at once: content, size, names,
/// modes.
fn fresh(site: &TestArena) -> Outcome<String> {
    let turn = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    let deadline = Instant::now() + test_duration();
    let (one, two) = (site.point(0), site.point(1));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let result = (1..).take_while(|_| Instant::now() < deadline).try_for_each(|number: u64| {
                change_files(&one, number)?;
                turn.store(number * 2 - 1, Ordering::SeqCst);
                await_turn(&turn, number * 2, &done)
            });
            done.store(true, Ordering::SeqCst);
            result
        });
        let reader = scope.spawn(|| {
            let mut number = 1;
            let result = loop {
                if let Err(error) = await_turn(&turn, number * 2 - 1, &done) {
                    break Err(error);
                }
                if done.load(Ordering::SeqCst) {
                    break Ok(number - 1);
                }
                if let Err(error) = check_state(&two, number) {
                    break Err(format!("turn {number}: {error}"));
                }
                turn.store(number * 2, Ordering::SeqCst);
                number += 1;
            };
            done.store(true, Ordering::SeqCst);
            result
        });
        let count: u64 = reader.join().map_err(|_| "the reader panicked".to_owned())??;
        writer.join().map_err(|_| "the writer panicked".to_owned())??;
        ensure!(count > 5, "only {count} turns: nothing was tried");
        Ok(format!("{count} turns"))
    })
}

fn await_turn(turn: &AtomicU64, number: u64, done: &AtomicBool) -> Outcome {
    let deadline = Instant::now() + Duration::from_secs(60);
    while turn.load(Ordering::SeqCst) < number && !done.load(Ordering::SeqCst) {
        ensure!(Instant::now() < deadline, "the other mount is stuck");
        std::thread::yield_now();
    }
    Ok(())
}

fn change_files(root: &Path, number: u64) -> Outcome {
    let file = root.join("file");
    let content = format!("{number} ").repeat(1 + (number % 3000) as usize);
    fs::write(&file, content).map_err(tried("writing"))?;
    let old = root.join(format!("name{}", number - 1));
    let new = root.join(format!("name{number}"));
    if number == 1 { File::create(&new).map(drop) } else { fs::rename(old, new) }.map_err(tried("renaming"))?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600 | (number % 64) as u32);
    fs::set_permissions(&file, mode).map_err(tried("chmod"))?;
    let directory = root.join("directory");
    if number % 2 == 1 { fs::create_dir(directory) } else { fs::remove_dir(directory) }.map_err(tried("mkdir or rmdir"))
}

fn check_state(root: &Path, number: u64) -> Outcome {
    use std::os::unix::fs::MetadataExt;
    let expected = format!("{number} ").repeat(1 + (number % 3000) as usize);
    let metadata = fs::metadata(root.join("file")).map_err(tried("stat"))?;
    ensure!(metadata.len() == expected.len() as u64, "size {} expected, {} seen", expected.len(), metadata.len());
    ensure!(metadata.mode() & 0o7777 == 0o600 | (number % 64) as u32, "mode {:o} seen", metadata.mode());
    let content = fs::read_to_string(root.join("file")).map_err(tried("reading"))?;
    ensure!(content == expected, "old content: '{}…' seen", &content[..content.len().min(20)]);
    ensure!(!root.join(format!("name{}", number - 1)).exists(), "the old name is still there");
    ensure!(root.join(format!("name{number}")).exists(), "the new name is not there");
    let mut names: Vec<_> =
        fs::read_dir(root).map_err(tried("listing"))?.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    let expected = 2 + (number % 2) as usize;
    ensure!(names.len() == expected, "{expected} names expected, {names:?} listed");
    ensure!(root.join("directory").exists() == (number % 2 == 1), "the directory is seen wrong");
    Ok(())
}

/// Read, add one, write, under flock: on one file by all threads of both mounts.
fn counters(site: &TestArena) -> Outcome<String> {
    let counter = |mount: usize| site.point(mount).join("counter");
    fs::write(counter(0), "0").map_err(tried("writing"))?;
    let deadline = Instant::now() + test_duration();
    let added = run_threads(4, |thread| {
        let mut added = 0;
        let mut file = OpenOptions::new().read(true).write(true).open(counter(thread % 2)).map_err(tried("opening"))?;
        while Instant::now() < deadline {
            flock(&file, FlockOperation::LockExclusive).map_err(tried("flock"))?;
            let mut text = String::new();
            file.rewind().map_err(tried("seeking"))?;
            file.read_to_string(&mut text).map_err(tried("reading"))?;
            let value: u64 = text.parse().map_err(tried(format!("reading '{text}'")))?;
            file.write_all_at((value + 1).to_string().as_bytes(), 0).map_err(tried("writing"))?;
            flock(&file, FlockOperation::Unlock).map_err(tried("unlocking"))?;
            added += 1;
        }
        Ok(added)
    })?;
    for mount in 0..2 {
        let value = fs::read_to_string(counter(mount)).map_err(tried("reading"))?;
        ensure!(value == added.to_string(), "{added} were added, mount {mount} counts {value}");
    }
    ensure!(added > 20, "only {added} were added: nothing was tried");
    Ok(format!("counted to {added}"))
}

/// All threads of both mounts append lines to one file: each line is there once, whole, in its writer's order.
fn appends(site: &TestArena) -> Outcome<String> {
    let path = |mount: usize| site.point(mount).join("lines");
    File::create(path(0)).map_err(tried("creating"))?;
    let deadline = Instant::now() + test_duration();
    let written = run_threads(4, |thread| {
        let mut file = OpenOptions::new().append(true).open(path(thread % 2)).map_err(tried("opening"))?;
        let mut count = 0;
        while Instant::now() < deadline && count < 20_000 {
            file.write_all(format!("{thread} {count} {}\n", "x".repeat(count as usize % 300)).as_bytes())
                .map_err(tried("appending"))?;
            count += 1;
        }
        Ok(count)
    })?;
    for mount in 0..2 {
        let text = fs::read_to_string(path(mount)).map_err(tried("reading"))?;
        let mut next = [0; 4];
        for line in text.lines() {
            let mut words = line.split(' ');
            let mut word = || words.next().unwrap_or_default().to_owned();
            let (thread, count, rest) = (word(), word(), word());
            let (Ok(thread), Ok(count)) = (thread.parse::<usize>(), count.parse::<u64>()) else {
                return Err(format!("a line that is not whole: '{line}'"));
            };
            ensure!(
                thread < 4 && next[thread] == count && rest.len() == count as usize % 300,
                "out of place: '{line}'"
            );
            next[thread] += 1;
        }
        ensure!(
            next.iter().sum::<u64>() == written,
            "{written} lines were written, mount {mount} has {}",
            next.iter().sum::<u64>()
        );
    }
    ensure!(written > 50, "only {written} lines: nothing was tried");
    Ok(format!("{written} lines"))
}

/// All threads try to make the same names; each name has exactly one maker.
fn winners(site: &TestArena) -> Outcome<String> {
    let next = AtomicU64::new(0);
    let wins: Vec<_> = (0..4).map(|_| AtomicU64::new(0)).collect();
    let deadline = Instant::now() + test_duration();
    run_threads(4, |thread| {
        let mut number = 0;
        while Instant::now() < deadline {
            let name = site.point(thread % 2).join(format!("n{number}"));
            match File::create_new(&name) {
                Ok(_) => {
                    wins[thread].fetch_add(1, Ordering::SeqCst);
                    next.fetch_max(number + 1, Ordering::SeqCst);
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(format!("creating {}: {error}", name.display())),
            }
            number += 1;
        }
        Ok(number)
    })?;
    let (names, won) =
        (next.load(Ordering::SeqCst), wins.iter().map(|count| count.load(Ordering::SeqCst)).sum::<u64>());
    ensure!(names == won, "{names} names were made by {won} makers");
    for mount in 0..2 {
        let listed = fs::read_dir(site.point(mount)).map_err(tried("listing"))?.count() as u64;
        ensure!(listed == names, "{names} names were made, mount {mount} lists {listed}");
    }
    ensure!(names > 50, "only {names} names: nothing was tried");
    Ok(format!("{names} names"))
}

/// All threads move files between directories; no file is lost, and none is doubled.
fn names(site: &TestArena) -> Outcome<String> {
    const FILES: u64 = 12;
    let place = |mount: usize, directory: u64, file: u64| site.point(mount).join(format!("d{directory}/f{file}"));
    for directory in 0..3 {
        fs::create_dir(site.point(0).join(format!("d{directory}"))).map_err(tried("mkdir"))?;
    }
    for file in 0..FILES {
        fs::write(place(0, 0, file), file.to_string()).map_err(tried("writing"))?;
    }
    let deadline = Instant::now() + test_duration();
    let moved = run_threads(4, |thread| {
        let (mut random, mut moved) = (Random::new(thread as u64), 0);
        while Instant::now() < deadline {
            let (file, from, to) = (random.below(FILES), random.below(3), random.below(3));
            match fs::rename(place(thread % 2, from, file), place(thread % 2, to, file)) {
                Ok(()) => moved += 1,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(format!("renaming: {error}")),
            }
        }
        Ok(moved)
    })?;
    for mount in 0..2 {
        for file in 0..FILES {
            let places: Vec<PathBuf> =
                (0..3).map(|directory| place(mount, directory, file)).filter(|path| path.exists()).collect();
            ensure!(places.len() == 1, "mount {mount}: file {file} is in {places:?}");
            let content = fs::read_to_string(&places[0]).map_err(tried("reading"))?;
            ensure!(content == file.to_string(), "file {file} holds '{content}'");
        }
    }
    ensure!(moved > 50, "only {moved} moves: nothing was tried");
    Ok(format!("{moved} moves"))
}

/// Each thread makes, moves and links names of its own in one directory, and removes them. Whatever the others do there
/// at the same time, its names are free.
fn free_names(site: &TestArena) -> Outcome<String> {
    let deadline = Instant::now() + test_duration();
    let made = run_threads(4, |thread| {
        let root = site.point(thread % 2);
        let [file, link, moved] = ["file", "link", "moved"].map(|name| root.join(format!("{name}{thread}")));
        let mut made = 0;
        while Instant::now() < deadline {
            File::create_new(&file).map_err(tried("creating"))?;
            fs::hard_link(&file, &link).map_err(tried("linking"))?;
            fs::rename(&link, &moved).map_err(tried("renaming"))?;
            fs::remove_file(&file).map_err(tried("unlinking"))?;
            fs::create_dir(&link).map_err(tried("making a directory"))?;
            fs::remove_dir(&link).map_err(tried("removing a directory"))?;
            fs::remove_file(&moved).map_err(tried("unlinking"))?;
            made += 1;
        }
        Ok(made)
    })?;
    for mount in 0..2 {
        let left = fs::read_dir(site.point(mount)).map_err(tried("listing"))?.count();
        ensure!(left == 0, "mount {mount} lists {left} names that were removed");
    }
    ensure!(made > 20, "only {made} rounds: nothing was tried");
    Ok(format!("{made} rounds"))
}
