//! Measures writing, reading and mapping.

use std::fs::{self, File};
use std::hint::black_box;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use ashlar_pmem::{Mapping, MappingAccess, Medium};

use crate::error::CliError;
use crate::verbs::bench::case::{Measurement, Step};
use crate::verbs::bench::floor_log::FloorLog;
use crate::verbs::bench::timing::{Summary, measure};
use crate::verbs::bench::worker::files::{LARGE, create, system};
use crate::verbs::bench::worker::task::WorkerTask;

/// Bytes of a write.
const SIZES: [(&str, usize); 3] = [("128 B", 128), ("4 KB", 4 << 10), ("64 KB", 64 << 10)];
/// Bytes of a record's header, which a write takes besides its own.
const HEADER: usize = 56;
/// The part of the log that writes may fill which do not wait for the digest: it begins by itself at a quarter.
const QUIET_PART: usize = 5;
/// The most small writes: more of them give no other result.
const WRITES_MAX: usize = 16_384;
/// The number of pieces of an overwritten file.
const PIECES: usize = 64;
/// Bytes of the files that are read, and of a read.
const READ_BYTES: usize = 64 << 20;
/// How often they are read through before reads are timed. If other processes use the processor's outermost cache too,
/// it fills up over some passes.
const WARM_PASSES: usize = 8;
const PAGE: usize = 4096;
/// Bytes of the files that are mapped, and how often.
const MAPPED: [(&str, usize); 2] = [("1 MB", 1 << 20), ("16 MB", 16 << 20)];
const MAPPINGS: usize = 50;

/// Returns how many writes of a size stay within a third of the log's part that is free before the digest begins.
fn quiet_count(task: &WorkerTask, bytes: usize) -> usize {
    (task.log_bytes as usize / QUIET_PART / SIZES.len() / (bytes + HEADER)).clamp(4, WRITES_MAX)
}

/// Returns how many writes of a size fill the log as often as the task wants.
fn sustained_count(task: &WorkerTask, bytes: usize) -> usize {
    (task.laps * task.log_bytes) as usize / (bytes + HEADER)
}

pub fn append(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    if !task.is_floor() {
        task.warm_log()?;
    }
    let measured = SIZES.map(|(label, bytes)| {
        let summary = appended(task, bytes, quiet_count(task, bytes))?;
        Ok(Measurement::median(format!("append {label}"), summary))
    });
    measured.into_iter().collect()
}

/// Measures appends after the process has run a command. Its open file is then shared with new processes, or handed
/// over to the kernel.
pub fn after_a_command(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    if !task.is_floor() {
        task.warm_log()?;
    }
    let (label, bytes) = SIZES[1];
    let data = vec![7; bytes];
    let count = quiet_count(task, bytes);
    let summary = if task.is_floor() {
        floor(task, &data, count)
    } else {
        let path = task.directory.join("processes");
        let mut file = create(&path)?;
        Command::new("true").status().map_err(CliError::system("running 'true'"))?;
        measure(count, |_| file.write_all(&data)).map_err(system("writing", &path))
    };
    Ok(vec![Measurement::median(format!("append {label}, after a command was run"), summary?)])
}

/// Writes `count` times after the end.
fn appended(task: &WorkerTask, bytes: usize, count: usize) -> Result<Summary, CliError> {
    let data = vec![7; bytes];
    if task.is_floor() {
        return floor(task, &data, count);
    }
    let path = task.directory.join(format!("append-{bytes}"));
    let mut file = create(&path)?;
    measure(count, |_| file.write_all(&data)).map_err(system("writing", &path))
}

/// Measures the floor: the same bytes, copied, checksummed and persisted.
fn floor(task: &WorkerTask, data: &[u8], count: usize) -> Result<Summary, CliError> {
    let ring = FloorLog::new(task.log_bytes, &task.medium);
    let mut ring = ring.map_err(CliError::system("mapping memory"))?;
    measure(count, |_| ring.write(data)).map_err(CliError::system("copying"))
}

pub fn overwrite(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    if !task.is_floor() {
        SIZES.iter().try_for_each(|(_, bytes)| prepare_pieces(task, *bytes))?;
        task.warm_log()?;
    }
    let measured = SIZES.map(|(label, bytes)| {
        let summary = overwritten(task, bytes, quiet_count(task, bytes))?;
        Ok(Measurement::median(format!("overwrite {label}"), summary))
    });
    measured.into_iter().collect()
}

fn pieces(task: &WorkerTask, bytes: usize) -> std::path::PathBuf {
    task.directory.join(format!("overwrite-{bytes}"))
}

fn prepare_pieces(task: &WorkerTask, bytes: usize) -> Result<(), CliError> {
    let path = pieces(task, bytes);
    create(&path)?.write_all(&vec![1; PIECES * bytes]).map_err(system("writing", &path))
}

/// Overwrites `count` times the pieces that [`prepare_pieces`] has written.
fn overwritten(task: &WorkerTask, bytes: usize, count: usize) -> Result<Summary, CliError> {
    let data = vec![7; bytes];
    if task.is_floor() {
        return floor(task, &data, count);
    }
    let path = pieces(task, bytes);
    let file = File::options().write(true).open(&path).map_err(system("opening", &path))?;
    let at = |number: usize| (number % PIECES * bytes) as u64;
    measure(count, |number| file.write_all_at(&data, at(number))).map_err(system("writing", &path))
}

pub fn sustained(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    if !task.is_floor() {
        task.warm_log()?;
    }
    let mut measured = Vec::new();
    for (label, bytes) in SIZES {
        let count = sustained_count(task, bytes);
        // Each lap has a million small writes: minutes, if each of them is a request to the mount.
        if !task.is_long && bytes < PAGE {
            continue;
        }
        let summary = appended(task, bytes, count)?;
        measured.push(Measurement::mean(format!("sustained append {label}"), summary));
        remove(task, &task.directory.join(format!("append-{bytes}")))?;
        if !task.is_floor() {
            prepare_pieces(task, bytes)?;
            task.wait_for_digest()?;
        }
        let summary = overwritten(task, bytes, count)?;
        measured.push(Measurement::mean(format!("sustained overwrite {label}"), summary));
        remove(task, &pieces(task, bytes))?;
    }
    Ok(measured)
}

/// Removes the files of a case before the next one begins.
fn remove(task: &WorkerTask, path: &Path) -> Result<(), CliError> {
    if task.is_floor() {
        return Ok(());
    }
    fs::remove_file(path).map_err(system("removing", path))?;
    task.wait_for_digest()
}

pub fn read(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let (own, foreign) = (task.directory.join("own"), task.directory.join("others"));
    if task.step == Step::Before {
        write_source(&foreign)?;
        task.wait_for_digest()?;
        return Ok(Vec::new());
    }
    let orders = [("in order", (0..READ_BYTES / PAGE).collect()), ("at random", shuffled(READ_BYTES / PAGE))];
    let name = |whose: &str, how: &str| format!("read 4 KB {how}, {whose} data");
    let mut measured = Vec::new();
    if task.is_floor() {
        let source = source();
        for whose in ["own", "others'"] {
            for (how, order) in &orders {
                measured.push(Measurement::median(name(whose, how), copied(&source, order)?));
            }
        }
        return Ok(measured);
    }
    write_source(&own)?;
    task.wait_for_digest()?;
    for (whose, path) in [("own", &own), ("others'", &foreign)] {
        let file = File::open(path).map_err(system("opening", path))?;
        for (how, order) in &orders {
            let mut buffer = [0; PAGE];
            let read = |page: usize| {
                file.read_exact_at(&mut buffer, (page * PAGE) as u64)?;
                black_box(&buffer);
                Ok(())
            };
            let summary = warm(order, read).map_err(system("reading", path))?;
            measured.push(Measurement::median(name(whose, how), summary));
        }
    }
    Ok(measured)
}

pub fn map(task: &WorkerTask) -> Result<Vec<Measurement>, CliError> {
    let files = MAPPED.map(|(label, bytes)| (label, bytes, task.directory.join(format!("mapped-{bytes}"))));
    if task.step == Step::Before {
        files.iter().try_for_each(|(_, bytes, path)| write_part(path, *bytes))?;
        task.wait_for_digest()?;
        return Ok(Vec::new());
    }
    let mut measured = Vec::new();
    for (label, bytes, path) in files {
        let file = File::open(&path).map_err(system("opening", &path))?;
        let look = |_| {
            let bytes = bytes as u64;
            let mapping = Mapping::map(&file, bytes, MappingAccess::ReadOnly, Medium::MEMORY);
            let mapping = mapping.map_err(std::io::Error::other)?;
            let mut byte = [0];
            for page in (0..bytes).step_by(PAGE) {
                mapping.copy_out(page, &mut byte).map_err(std::io::Error::other)?;
                black_box(&byte);
            }
            Ok(())
        };
        let summary = measure(MAPPINGS, look).map_err(system("mapping", &path))?;
        measured.push(Measurement::median(format!("map {label}, look at each page, unmap"), summary));
    }
    Ok(measured)
}

/// Measures the floor of reads: the same bytes copied in the same order.
fn copied(source: &[u8], order: &[usize]) -> Result<Summary, CliError> {
    let mut buffer = [0; PAGE];
    let copy = |page: usize| {
        let at = page * PAGE;
        buffer.copy_from_slice(black_box(&source[at..at + PAGE]));
        black_box(&mut buffer);
        Ok(())
    };
    warm(order, copy).map_err(CliError::system("copying"))
}

/// Measures `read` with pages in this order, after all were read some times.
fn warm(order: &[usize], mut read: impl FnMut(usize) -> std::io::Result<()>) -> std::io::Result<Summary> {
    for _ in 0..WARM_PASSES {
        order.iter().try_for_each(|page| read(*page))?;
    }
    measure(order.len(), |number| read(order[number]))
}

/// Returns the content of files that are read.
fn source() -> Vec<u8> {
    (0..READ_BYTES).map(|at| (at / 7) as u8).collect()
}

fn write_source(path: &Path) -> Result<(), CliError> {
    write_part(path, READ_BYTES)
}

/// Writes the first bytes of that content.
fn write_part(path: &Path, bytes: usize) -> Result<(), CliError> {
    let mut file = create(path)?;
    source()[..bytes].chunks(LARGE).try_for_each(|part| file.write_all(part)).map_err(system("writing", path))
}

/// Returns the numbers below `count` in an order without a pattern, the same each time.
fn shuffled(count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..count).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for last in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.swap(last, (state % (last as u64 + 1)) as usize);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffled_order_has_every_page_once() {
        let mut order = shuffled(1000);
        assert!(order.windows(2).filter(|pair| pair[1] == pair[0] + 1).count() < 10, "it's no order of a pattern");
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..1000));
    }
}
