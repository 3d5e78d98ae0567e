//! The cases of every contender.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use ashlar_tests::command::shell;
use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, tried};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use tempfile::TempDir;

/// Files of the cases on small files.
const FILES: usize = 4000;
/// Their length, and that of the small reads and writes.
const SMALL: usize = 4096;
/// Length of the large reads and writes.
const LARGE: usize = 1 << 20;
/// The total of the small and the large reads and writes.
const SMALL_TOTAL: usize = 64 << 20;
const LARGE_TOTAL: usize = 256 << 20;
/// Files of the tree, if the limit of open files allows as many, and the number of files in a directory.
const TREE_FILES: usize = 20_000;
const TREE_FANOUT: usize = 20;

/// A measured time.
#[derive(Clone, Debug)]
pub struct Time {
    /// The measured action.
    pub action: &'static str,
    /// The unit that it counts.
    pub unit: &'static str,
    /// Units a second.
    pub speed: f64,
    /// Whether the bar applies to it.
    pub bar: bool,
}

/// A case: works in an empty directory, and returns its measurements.
pub type Case = fn(&Path, &Fixture) -> Outcome<Vec<Time>>;

/// The cases.
pub const CASES: &[(&str, Case)] = &[
    ("files", small_files),
    ("small-io", |directory, _| transfers(directory, SMALL, SMALL_TOTAL, &SMALL_NAMES)),
    ("large-io", |directory, _| transfers(directory, LARGE, LARGE_TOTAL, &LARGE_NAMES)),
    ("tree", tree),
];

const SMALL_NAMES: [&str; 4] = ["write 4 KB", "overwrite 4 KB", "read 4 KB", "re-read 4 KB"];
const LARGE_NAMES: [&str; 4] = ["write 1 MB", "overwrite 1 MB", "read 1 MB", "re-read 1 MB"];

/// Unmeasured inputs of the cases: an archive of a tree under version control.
#[derive(Debug)]
pub struct Fixture {
    directory: TempDir,
    /// Files in the archive's tree.
    pub files: usize,
}

impl Fixture {
    /// Makes the archive, in memory. A process may have `open_files` files open; directories and git's own files take
    /// some.
    pub fn new(open_files: usize) -> Outcome<Self> {
        let files = TREE_FILES.min(open_files / 5 * 4);
        let directory = TempDir::with_prefix_in("ashlar-bench-", "/dev/shm").map_err(tried("making a directory"))?;
        make_archive(directory.path(), files)?;
        Ok(Self { directory, files })
    }

    fn archive(&self) -> PathBuf {
        self.directory.path().join("tree.tar")
    }
}

/// Makes an archive, `tree.tar`, of a tree of so many files under version control. Only git's times differ between two
/// archives.
pub fn make_archive(directory: &Path, files: usize) -> Outcome {
    let tree = directory.join("tree");
    let mut random = Random::new(1);
    for file in 0..files {
        let below = tree.join(format!("part{}/dir{}", file / TREE_FANOUT / 25, file / TREE_FANOUT));
        std::fs::create_dir_all(&below).map_err(tried("making a directory"))?;
        // Lengths as in a tree of sources: most a few KiB, some ten times that.
        let length = 200 + random.below(6000) * if file % 16 == 0 { 10 } else { 1 };
        let line = format!("{file} {}\n", random.below(u64::MAX));
        let text = line.repeat(length as usize / line.len() + 1);
        std::fs::write(below.join(format!("file{file}.c")), text).map_err(tried("making a file"))?;
    }
    let script = "
        git -C tree init -q
        git -C tree add .
        git -C tree -c gc.auto=0 -c user.name=bench -c user.email=bench@localhost commit -qm tree
        git -C tree gc -q
        tar cf tree.tar tree
        rm -rf tree";
    shell(directory, script)?.success().map(|_| ())
}

/// Times an action of `units` units.
fn time(
    action: &'static str,
    (units, unit): (f64, &'static str),
    bar: bool,
    work: impl FnOnce() -> Outcome,
) -> Outcome<Time> {
    let started = Instant::now();
    work()?;
    Ok(Time { action, unit, speed: units / started.elapsed().as_secs_f64(), bar })
}

fn small_files(directory: &Path, _: &Fixture) -> Outcome<Vec<Time>> {
    let data = vec![7; SMALL];
    let names: Vec<_> = (0..FILES).map(|file| directory.join(format!("file{file}"))).collect();
    let fresh = directory.join("fresh");
    let count = FILES as f64;
    let make = || {
        for name in &names {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&fresh).map_err(tried("creating"))?;
            file.write_all(&data).map_err(tried("writing"))?;
            drop(file);
            std::fs::rename(&fresh, name).map_err(tried("renaming"))?;
        }
        Ok(())
    };
    let look = |flags: AtFlags, times: usize| {
        for name in (0..times).flat_map(|_| &names) {
            let found = statx(CWD, name, flags, StatxFlags::BASIC_STATS).map_err(tried("stat"))?;
            ensure!(found.stx_size == SMALL as u64, "a file has {} bytes", found.stx_size);
        }
        Ok(())
    };
    let read = || {
        for name in &names {
            ensure!(std::fs::read(name).map_err(tried("reading"))?.len() == SMALL, "a file is short");
        }
        Ok(())
    };
    let unlink = || names.iter().try_for_each(|name| std::fs::remove_file(name).map_err(tried("unlink")));
    Ok(vec![
        time("create, write 4 KB, close, rename", (count, "1/s"), true, make)?,
        time("stat, asked of the file system", (2.0 * count, "1/s"), true, || look(AtFlags::STATX_FORCE_SYNC, 2))?,
        time("stat, cached", (10.0 * count, "1/s"), true, || look(AtFlags::empty(), 10))?,
        time("open, read 4 KB, close", (count, "1/s"), false, read)?,
        time("unlink", (count, "1/s"), false, unlink)?,
    ])
}

fn transfers(directory: &Path, length: usize, total: usize, names: &[&'static str; 4]) -> Outcome<Vec<Time>> {
    let path = directory.join("file");
    let mut data = vec![7; length];
    let megabytes = (total as f64 / 1e6, "MB/s");
    let [written, overwritten, read, again] = *names;
    let mut times = Vec::new();
    for (action, bar) in [(written, true), (overwritten, false)] {
        let work = || {
            let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
            let mut file = opened.map_err(tried("opening"))?;
            (0..total / length).try_for_each(|_| file.write_all(&data).map_err(tried("writing")))
        };
        times.push(time(action, megabytes, bar, work)?);
    }
    let mut file = File::open(&path).map_err(tried("opening"))?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).map_err(tried("dropping pages"))?;
    for action in [read, again] {
        let work = || {
            file.rewind().map_err(tried("rewinding"))?;
            for _ in 0..total / length {
                file.read_exact(&mut data).map_err(tried("reading"))?;
                black_box(&data);
            }
            Ok(())
        };
        times.push(time(action, megabytes, true, work)?);
    }
    Ok(times)
}

fn tree(directory: &Path, fixture: &Fixture) -> Outcome<Vec<Time>> {
    let files = (fixture.files as f64, "files/s");
    let archive = fixture.archive().display().to_string();
    // This waits for the commands itself: the tests' library polls only every 20 ms.
    let run = |line: &[&str]| {
        let (program, arguments) = line.split_first().ok_or("no command")?;
        let done = Command::new(program).args(arguments).current_dir(directory).output();
        let done = done.map_err(tried(format!("starting {program}")))?;
        let said = || String::from_utf8_lossy(&[&done.stdout[..], &done.stderr[..]].concat()).into_owned();
        ensure!(done.status.success() && done.stdout.is_empty(), "{program}: {}: {}", done.status, said());
        Ok(())
    };
    let status = ["git", "-C", "tree", "status", "--porcelain"];
    Ok(vec![
        time("untar", files, true, || run(&["tar", "xf", &archive]))?,
        time("git status, the first", files, true, || run(&status))?,
        time("git status, the second", files, true, || run(&status))?,
        time("rm -rf", files, true, || run(&["rm", "-rf", "tree"]))?,
    ])
}
