//! Measures each part of one operation by itself.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Seek, Write};
use std::time::Instant;

use crate::error::CliError;
use crate::verbs::bench::breakdown::{APPEND, CREATE, Part, STAT};
use crate::verbs::bench::case::{Contender, Measurement};
use crate::verbs::bench::floor_log::{FloorLog, checksum};
use crate::verbs::bench::timing::{Summary, measure};
use crate::verbs::bench::worker::files::{create, look, system};
use crate::verbs::bench::worker::task::WorkerTask;

const PAGE: usize = 4096;
/// How often each part is measured. The appends together fill no quarter of an update log of the usual length, so they
/// meet no digest.
const COUNT: usize = 2000;
const FILES: usize = 500;

pub fn breakdown(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    task.warm_log()?;
    let mut parts = append(task)?;
    task.wait_for_digest()?;
    parts.extend(stat(task)?);
    parts.extend(files(task)?);
    Ok(parts)
}

fn part(operation: &str, part: Part, summary: Summary) -> Measurement {
    Measurement::median(format!("{operation}: {}", part.name()), summary)
}

fn append(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let path = task.directory.join("append");
    let mut file = create(&path)?;
    let data = vec![7; PAGE];
    let count = COUNT.min(task.log_bytes as usize / 5 / (PAGE + 64)).max(64);
    let whole = measure(count, |_| file.write_all(&data)).map_err(system("writing", &path))?;
    let mut parts = vec![part(APPEND, Part::Whole, whole)];
    let empty = measure(COUNT, |_| stay(&mut file)).map_err(system("asking", &path))?;
    parts.push(part(APPEND, Part::Empty, empty));
    if task.contender == Contender::Run {
        let mut ring = FloorLog::new(task.log_bytes, &task.medium).map_err(CliError::system("mapping memory"))?;
        let failed = || CliError::system("copying");
        parts.push(part(APPEND, Part::Copy, measure(COUNT, |_| ring.copy(&data)).map_err(failed())?));
        parts.push(part(APPEND, Part::CopyAndFlush, measure(COUNT, |_| ring.persist(&data)).map_err(failed())?));
        let sum = |_| {
            checksum(&data);
            Ok(())
        };
        parts.push(part(APPEND, Part::Checksum, measure(COUNT, sum).map_err(failed())?));
    }
    Ok(parts)
}

fn stat(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let path = task.directory.join("stat");
    let mut file = create(&path)?;
    let failed = || system("looking at", &path);
    let whole = measure(COUNT, |_| look(fs::metadata(&path))).map_err(failed())?;
    let open = measure(COUNT, |_| look(file.metadata())).map_err(failed())?;
    let empty = measure(COUNT, |_| stay(&mut file)).map_err(failed())?;
    Ok(vec![part(STAT, Part::Whole, whole), part(STAT, Part::Empty, empty), part(STAT, Part::OpenFile, open)])
}

/// A call that does nothing: `lseek` by nothing.
fn stay(file: &mut File) -> io::Result<()> {
    black_box(file.stream_position()?);
    Ok(())
}

/// The four calls that make a file, each timed by itself.
fn files(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let directory = task.directory.join("files");
    fs::create_dir(&directory).map_err(system("making", &directory))?;
    let fresh = directory.join("new");
    let content = vec![9; PAGE];
    let mut times: [Vec<f64>; 4] = Default::default();
    for number in 0..FILES {
        let name = directory.join(format!("file-{number}"));
        let start = Instant::now();
        let opened = File::options().write(true).create_new(true).open(&fresh);
        let mut file = opened.map_err(system("making", &fresh))?;
        let made = Instant::now();
        file.write_all(&content).map_err(system("writing", &fresh))?;
        let written = Instant::now();
        drop(file);
        let closed = Instant::now();
        fs::rename(&fresh, &name).map_err(system("renaming", &fresh))?;
        let moments = [start, made, written, closed, Instant::now()];
        for (times, pair) in times.iter_mut().zip(moments.windows(2)) {
            times.push((pair[1] - pair[0]).as_nanos() as f64);
        }
    }
    let calls = [Part::Create, Part::Write, Part::Close, Part::Rename];
    Ok(calls.into_iter().zip(&mut times).map(|(call, times)| part(CREATE, call, Summary::of(times))).collect())
}
