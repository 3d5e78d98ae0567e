//! Measures making, stating, opening and listing files.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::CliError;
use crate::verbs::bench::case::{Measurement, Step};
use crate::verbs::bench::floor_log::FloorLog;
use crate::verbs::bench::timing::{Summary, measure};
use crate::verbs::bench::turn_page::{PAGE, TurnPage};
use crate::verbs::bench::worker::files::{create as make_file, look, system};
use crate::verbs::bench::worker::task::WorkerTask;

/// The size of a new file's content.
const CONTENT: usize = 4096;
/// The most bytes of the update log for one new file: the content and the records of four calls.
const LOGGED: usize = CONTENT + 512;
/// The part of the log that two processes may fill together without waiting for the digest; through a mount they share
/// one log.
const QUIET_PART: usize = 5;
const FILES_MAX: usize = 2000;
/// Names that files are renamed to in a sustained run: each file replaces one before it, so that space stays bounded.
const NAMES: usize = 1000;
/// How often a sustained run fills the log.
const LAPS: u64 = 10;
/// Entries of the directory whose files are read.
const ENTRIES: usize = 1000;
const STATS: usize = 20_000;
const OPENS: usize = 10_000;
const LISTINGS: usize = 200;

/// Makes a file as programs do that replace files safely: writes it under another name, closes it, renames it.
fn make(fresh: &Path, name: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(fresh)?;
    file.write_all(content)?;
    drop(file);
    fs::rename(fresh, name)
}

/// Makes `count` files in a directory of the process's own, under `names` names.
fn made(task: &WorkerTask, count: usize, names: usize) -> Result<Summary, CliError> {
    let content = vec![9; CONTENT];
    if task.is_floor() {
        let mut ring = FloorLog::new(task.log_bytes, &task.medium).map_err(CliError::system("mapping memory"))?;
        return measure(count, |_| ring.write(&content)).map_err(CliError::system("copying"));
    }
    let directory = task.directory.join(format!("private-{}", task.worker));
    fs::create_dir(&directory).map_err(system("making", &directory))?;
    let fresh = directory.join("new");
    let names: Vec<_> = (0..names).map(|number| directory.join(format!("file-{number}"))).collect();
    task.warm_log()?;
    if task.step == Step::Pair {
        TurnPage::open(&task.aside.join(PAGE))
            .and_then(|page| page.meet())
            .map_err(system("meeting in", &task.aside))?;
    }
    let summary = measure(count, |number| make(&fresh, &names[number % names.len()], &content));
    let summary = summary.map_err(system("making files in", &directory))?;
    fs::remove_dir_all(&directory).map_err(system("removing", &directory))?;
    Ok(summary)
}

pub fn create(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let count = (task.log_bytes as usize / QUIET_PART / 2 / LOGGED).clamp(16, FILES_MAX);
    let summary = made(task, count, count)?;
    Ok(match task.step {
        Step::Pair => vec![Measurement::rate(TWO_PROCESSES, summary)],
        _ => vec![
            Measurement::median("create, write 4 KB, close, rename", summary),
            Measurement::rate(ONE_PROCESS, summary),
        ],
    })
}

/// The lines whose ratio shows the gain of a second process.
pub const ONE_PROCESS: &str = "the same, 1 process";
pub const TWO_PROCESSES: &str = "the same, 2 processes";

pub fn create_sustained(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    // Each file takes more of the log than its content.
    let count = (LAPS * task.log_bytes) as usize / CONTENT;
    let summary = made(task, count, NAMES)?;
    Ok(vec![Measurement::mean("create, write, close, rename: 10 times round the log", summary)])
}

/// Makes a directory of files, and stats all of them.
fn entries(task: &WorkerTask) -> Result<(PathBuf, Vec<PathBuf>), CliError> {
    let directory = task.directory.join("directory");
    fs::create_dir(&directory).map_err(system("making", &directory))?;
    let names: Vec<_> = (0..ENTRIES).map(|number| directory.join(format!("file-{number}"))).collect();
    for name in &names {
        make_file(name)?;
    }
    task.wait_for_digest()?;
    names.iter().try_for_each(|name| fs::metadata(name).map(drop)).map_err(system("looking into", &directory))?;
    Ok((directory, names))
}

pub fn stat(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let (directory, names) = entries(task)?;
    let stat = |number: usize| look(fs::metadata(&names[number % ENTRIES]));
    let summary = measure(STATS, stat).map_err(system("looking into", &directory))?;
    Ok(vec![Measurement::median("stat", summary)])
}

pub fn open(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let (directory, names) = entries(task)?;
    let open = |number: usize| File::open(&names[number % ENTRIES]).map(drop);
    names.iter().try_for_each(|name| File::open(name).map(drop)).map_err(system("opening in", &directory))?;
    let summary = measure(OPENS, open).map_err(system("opening in", &directory))?;
    Ok(vec![Measurement::median("open + close", summary)])
}

pub fn readdir(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let (directory, _) = entries(task)?;
    let list = |_| match fs::read_dir(&directory)?.try_fold(0, |count, entry| entry.map(|_| count + 1))? {
        ENTRIES => Ok(()),
        count => Err(io::Error::other(format!("{count} entries were listed, and {ENTRIES} are there"))),
    };
    let summary = measure(LISTINGS, list).map_err(system("listing", &directory))?;
    Ok(vec![Measurement::median("readdir of 1,000 entries", summary)])
}
