//! Random operations on the ranges of one file, compared with a model.
//!
//! They include those of fsx, and also those that fsx does not know: collapsing, inserting, zeroing and looking for
//! holes. The model is in memory.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

use crate::random::Random;
use crate::{Outcome, ensure, tried};

/// The file's size limit.
const SIZE_MAX: u64 = 256 << 10;
/// The longest range of an operation.
const LENGTH_MAX: u64 = 32 << 10;
/// Collapsing and inserting take whole blocks.
const BLOCK: u64 = 4096;
/// After this many operations the whole file is compared.
const COMPARED_EVERY: u64 = 500;

/// The operations on ranges that only some file systems have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeSupport {
    /// Everything.
    All,
    /// All but collapsing and inserting, which the kernel passes on to no FUSE file system.
    NoShifting,
    /// Neither those nor zeroing, as on tmpfs.
    Little,
}

/// A process that reads and writes through a shared mapping: safe Rust can't map.
#[derive(Debug)]
struct Mapper {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// A file under test, and its expected content.
#[derive(Debug)]
struct Subject {
    path: PathBuf,
    file: File,
    model: Vec<u8>,
    mapper: Mapper,
    random: Random,
}

/// Runs `operations` random operations that `seed` names on a new file at `path`, and leaves the file. Calls `after`
/// after each operation; the canary spoils the file there.
///
/// # Errors
/// The first operation after which the file differs from the model.
pub fn run(
    path: &Path,
    seed: u64,
    operations: u64,
    knows: RangeSupport,
    after: impl Fn(u64, &File),
) -> Outcome<Vec<u8>> {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).map_err(tried("creating"))?;
    let mapper = Mapper::start(path)?;
    let mut subject = Subject { path: path.to_owned(), file, model: Vec::new(), mapper, random: Random::new(seed) };
    for number in 1..=operations {
        let failure = |error| format!("operation {number}: {error}");
        let what = subject.step(knows).map_err(failure)?;
        after(number, &subject.file);
        let size = subject.file.metadata().map_err(tried("stat"))?.len();
        let expected = subject.model.len() as u64;
        ensure!(size == expected, "operation {number}: after {what} the size is {size}, not {expected}");
        if number % COMPARED_EVERY == 0 || number == operations {
            subject.read(0, SIZE_MAX).map_err(|error| format!("operation {number}: after {what}: {error}"))?;
        }
    }
    Ok(std::mem::take(&mut subject.model))
}

/// Fails, and names the place, unless bytes that were read at `offset` equal those of the model.
fn compare(found: &[u8], model: &[u8], offset: u64) -> Outcome {
    ensure!(found.len() == model.len(), "{} bytes at {offset}, not {}", found.len(), model.len());
    match found.iter().zip(model).position(|(one, two)| one != two) {
        None => Ok(()),
        Some(at) => {
            let wrong = found.iter().zip(model).filter(|(one, two)| one != two).count();
            Err(format!(
                "byte {} is {:#04x}, not {:#04x}; {wrong} of {} bytes from {offset} on are wrong",
                offset + at as u64,
                found[at],
                model[at],
                model.len()
            ))
        }
    }
}

impl Subject {
    /// Makes one operation, and describes it in words.
    fn step(&mut self, knows: RangeSupport) -> Outcome<String> {
        let size = self.model.len() as u64;
        let offset = self.random.below(SIZE_MAX - LENGTH_MAX);
        let length = 1 + self.random.below(LENGTH_MAX);
        let within = if size == 0 { 0 } else { self.random.below(size) };
        let blocks = BLOCK * (1 + self.random.below(LENGTH_MAX / BLOCK));
        let keeps_size = self.random.below(2) == 0;
        match self.random.below(100) {
            0..18 => self.write(offset, length),
            18..34 => self.read(within, length),
            34..42 if size > 0 => self.map_write(within, length),
            42..50 if size > 0 => self.map_read(within, length),
            50..57 => self.truncate(self.random.clone().below(SIZE_MAX)),
            57..64 => self.punch(offset, length),
            64..71 if knows != RangeSupport::Little => self.zero(offset, length, keeps_size),
            71..78 if knows == RangeSupport::All => self.collapse(within / BLOCK * BLOCK, blocks),
            78..85 if knows == RangeSupport::All => self.insert(within / BLOCK * BLOCK, blocks),
            85..91 => self.copy(within, length, offset),
            91..94 => self.reopen(),
            94..96 => self.file.sync_all().map_err(tried("fsync")).map(|()| "fsync".into()),
            _ => self.look_for_holes(within),
        }
    }

    /// Puts bytes into the model, which grows if necessary.
    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let (start, end) = (offset as usize, offset as usize + bytes.len());
        self.model.resize(self.model.len().max(end), 0);
        self.model[start..end].copy_from_slice(bytes);
    }

    /// The part of a range that lies in the file.
    fn inside(&self, offset: u64, length: u64) -> std::ops::Range<usize> {
        let clamp = |at: u64| at.min(self.model.len() as u64) as usize;
        clamp(offset)..clamp(offset + length)
    }

    fn write(&mut self, offset: u64, length: u64) -> Outcome<String> {
        let bytes = self.random.bytes(length as usize);
        self.file.write_all_at(&bytes, offset).map_err(tried("writing"))?;
        self.put(offset, &bytes);
        Ok(format!("writing {length} bytes at {offset}"))
    }

    fn read(&self, offset: u64, length: u64) -> Outcome<String> {
        let mut bytes = vec![0; length as usize];
        let mut count = 0;
        loop {
            match self.file.read_at(&mut bytes[count..], offset + count as u64).map_err(tried("reading"))? {
                0 => break,
                more => count += more,
            }
        }
        compare(&bytes[..count], &self.model[self.inside(offset, length)], offset)?;
        Ok(format!("reading {length} bytes at {offset}"))
    }

    fn map_write(&mut self, offset: u64, length: u64) -> Outcome<String> {
        let inside = self.inside(offset, length);
        let bytes = self.random.bytes(inside.len());
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let answer = self.mapper.ask(&format!("write {offset} {hex}"))?;
        ensure!(answer == "done", "the mapping says '{answer}'");
        self.put(offset, &bytes);
        Ok(format!("writing {} bytes at {offset} through a mapping", bytes.len()))
    }

    fn map_read(&mut self, offset: u64, length: u64) -> Outcome<String> {
        let inside = self.inside(offset, length);
        let answer = self.mapper.ask(&format!("read {offset} {}", inside.len()))?;
        let digits: Vec<u8> = answer.chars().filter_map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
        let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        compare(&bytes, &self.model[inside], offset).map_err(|error| format!("through a mapping: {error}"))?;
        Ok(format!("reading {} bytes at {offset} through a mapping", bytes.len()))
    }

    fn truncate(&mut self, size: u64) -> Outcome<String> {
        self.random.draw();
        self.file.set_len(size).map_err(tried("truncating"))?;
        self.model.resize(size as usize, 0);
        Ok(format!("truncating to {size}"))
    }

    fn punch(&mut self, offset: u64, length: u64) -> Outcome<String> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, offset, length).map_err(tried("punching"))?;
        let inside = self.inside(offset, length);
        self.model[inside].fill(0);
        let (first, last) = (offset.next_multiple_of(BLOCK), (offset + length) / BLOCK * BLOCK);
        if first < last && first < self.model.len() as u64 {
            let found = seek(&self.file, SeekFrom::Data(first));
            let is_hole = found.map_or_else(|errno| errno == Errno::NXIO, |data| data >= last);
            ensure!(is_hole, "blocks from {first} to {last} were punched, but there are data at {found:?}");
        }
        Ok(format!("punching {length} bytes at {offset}"))
    }

    fn zero(&mut self, offset: u64, length: u64, keeps_size: bool) -> Outcome<String> {
        let keeping = if keeps_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        fallocate(&self.file, FallocateFlags::ZERO_RANGE | keeping, offset, length).map_err(tried("zeroing"))?;
        if keeps_size {
            let inside = self.inside(offset, length);
            self.model[inside].fill(0);
        } else {
            self.put(offset, &vec![0; length as usize]);
        }
        Ok(format!("zeroing {length} bytes at {offset}, keeping the size: {keeps_size}"))
    }

    /// Collapsing must end before the end of the file; otherwise it must be refused.
    fn collapse(&mut self, offset: u64, length: u64) -> Outcome<String> {
        let result = fallocate(&self.file, FallocateFlags::COLLAPSE_RANGE, offset, length);
        if offset + length >= self.model.len() as u64 {
            ensure!(result == Err(Errno::INVAL), "collapsing to the end gave {result:?}");
        } else {
            result.map_err(tried("collapsing"))?;
            self.model.drain(offset as usize..(offset + length) as usize);
        }
        Ok(format!("collapsing {length} bytes at {offset}"))
    }

    fn insert(&mut self, offset: u64, length: u64) -> Outcome<String> {
        if self.model.len() as u64 + length > SIZE_MAX {
            return Ok("nothing".into());
        }
        let result = fallocate(&self.file, FallocateFlags::INSERT_RANGE, offset, length);
        if offset >= self.model.len() as u64 {
            ensure!(result == Err(Errno::INVAL), "inserting at the end gave {result:?}");
        } else {
            result.map_err(tried("inserting"))?;
            let rest = self.model.split_off(offset as usize);
            self.model.resize((offset + length) as usize, 0);
            self.model.extend(rest);
        }
        Ok(format!("inserting {length} bytes at {offset}"))
    }

    /// Copies within the file; a copy of overlapping ranges must be refused.
    fn copy(&mut self, from: u64, length: u64, to: u64) -> Outcome<String> {
        let length = self.inside(from, length).len() as u64;
        let (mut source, mut target) = (from, to);
        let overlaps = from < to + length && to < from + length;
        while source < from + length {
            let rest = (from + length - source) as usize;
            let result =
                rustix::fs::copy_file_range(&self.file, Some(&mut source), &self.file, Some(&mut target), rest);
            if overlaps {
                ensure!(result == Err(Errno::INVAL), "copying onto itself gave {result:?}");
                return Ok("nothing".into());
            }
            ensure!(result.map_err(tried("copying"))? > 0, "copying stopped at {source}");
        }
        let bytes = self.model[self.inside(from, length)].to_vec();
        if !bytes.is_empty() {
            self.put(to, &bytes);
        }
        Ok(format!("copying {length} bytes from {from} to {to}"))
    }

    fn reopen(&mut self) -> Outcome<String> {
        self.file = OpenOptions::new().read(true).write(true).open(&self.path).map_err(tried("opening"))?;
        let answer = self.mapper.ask("open")?;
        ensure!(answer == "done", "the process that maps says '{answer}'");
        Ok("opening it again".into())
    }

    /// Checks that holes hold zeros, and that all other bytes are found as data.
    fn look_for_holes(&self, offset: u64) -> Outcome<String> {
        let size = self.model.len() as u64;
        let is_zero =
            |from: u64, to: u64| self.model[from as usize..to.min(size) as usize].iter().all(|byte| *byte == 0);
        match seek(&self.file, SeekFrom::Data(offset)) {
            Ok(data) => ensure!(
                data >= offset && data < size && is_zero(offset, data),
                "data at {offset} are said to be at {data}"
            ),
            Err(Errno::NXIO) => ensure!(offset >= size || is_zero(offset, size), "data behind {offset} are not found"),
            Err(errno) => return Err(format!("looking for data at {offset}: {errno}")),
        }
        match seek(&self.file, SeekFrom::Hole(offset)) {
            Ok(hole) => {
                let end = (hole / BLOCK + 1) * BLOCK;
                ensure!(hole >= offset && hole <= size && is_zero(hole, end), "there is no hole at {hole}");
            }
            Err(errno) => ensure!(errno == Errno::NXIO && offset >= size, "looking for a hole at {offset}: {errno}"),
        }
        Ok(format!("looking for holes at {offset}"))
    }
}

impl Mapper {
    fn start(path: &Path) -> Outcome<Self> {
        let mut command = Command::new("python3");
        command.args(["-c", include_str!("../jobs/mapper.py")]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(tried("starting python3"))?;
        let (input, output) = (child.stdin.take().ok_or("no input")?, child.stdout.take().ok_or("no output")?);
        Ok(Self { child, input, output: BufReader::new(output) })
    }

    fn ask(&mut self, line: &str) -> Outcome<String> {
        writeln!(self.input, "{line}").map_err(tried("asking for a mapping"))?;
        let mut answer = String::new();
        self.output.read_line(&mut answer).map_err(tried("hearing of a mapping"))?;
        Ok(answer.trim_end().to_owned())
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        // The child holds nothing that needs a clean end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let path = directory.path().join("file");
        (directory, path)
    }

    #[test]
    fn tmpfs_passes() {
        let (_directory, path) = file();
        let model = run(&path, 1, 2000, RangeSupport::Little, |_, _| ()).expect("tmpfs works");
        assert_eq!(std::fs::read(path).expect("read"), model);
    }

    #[test]
    fn spoilt_byte_is_found() {
        let (_directory, path) = file();
        let spoil = |number: u64, file: &File| {
            let size = file.metadata().expect("stat").len();
            if number >= 1990 && size > 0 {
                let mut byte = [0];
                file.read_exact_at(&mut byte, size / 2).expect("read");
                file.write_all_at(&[byte[0] ^ 1], size / 2).expect("written");
            }
        };
        let error = run(&path, 1, 2000, RangeSupport::Little, spoil).expect_err("spoilt");
        assert!(error.contains("wrong") || error.contains("data") || error.contains("hole"), "{error}");
    }

    #[test]
    fn comparison_names_first_wrong_byte() {
        assert!(compare(b"abcd", b"abcd", 7).is_ok());
        let error = compare(b"abxd", b"abcd", 7).expect_err("different");
        assert!(error.contains("byte 9 is 0x78, not 0x63") && error.contains("1 of 4"), "{error}");
        assert!(compare(b"abc", b"abcd", 7).is_err());
    }
}
