//! The set of files of a workload: their names, lengths, and users.

use std::f64::consts::TAU;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use ashlar_tests::random::Random;
use ashlar_tests::{Outcome, ensure, tried};

/// Bytes of one read or write (Filebench: `iosize`).
pub const TRANSFER: usize = 1 << 20;

/// A file of the set.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Its length when a thread writes it as a whole.
    planned: u64,
    /// Its length now; `None` if it does not exist.
    length: Option<u64>,
}

/// The set.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
    width: u64,
    entries: Mutex<Vec<Entry>>,
    /// Numbers of files that no thread uses: those that exist, and those that do not.
    idle: Mutex<[Vec<u64>; 2]>,
}

impl Files {
    /// Plans `count` files and makes four fifths of them.
    pub fn make(directory: &Path, count: u64, width: u64, mean: u64) -> Outcome<Self> {
        let mut random = Random::new(count);
        let entries = (0..count).map(|_| Entry { planned: length(&mut random, mean), length: None }).collect();
        let idle = Mutex::new([(0..count).collect(), Vec::new()]);
        let files = Self { directory: directory.to_owned(), width, entries: Mutex::new(entries), idle };
        for number in 0..count {
            if number % width == 0 {
                let above = files.path(number);
                let above = above.parent().unwrap_or(directory);
                std::fs::create_dir_all(above).map_err(tried(format!("making {}", above.display())))?;
            }
        }
        let mut buffer = vec![0; TRANSFER];
        for _ in 0..count / 5 * 4 {
            let mut held = files.take(false, &mut random)?;
            held.create()?;
            held.write_whole(&mut buffer)?;
        }
        Ok(files)
    }

    fn path(&self, number: u64) -> PathBuf {
        let leaf = number / self.width;
        self.directory.join(format!("{}/{leaf}/{number}", leaf / self.width))
    }

    fn entry(&self, number: u64) -> Entry {
        lock(&self.entries)[number as usize]
    }

    /// Takes a file that exists, or one that does not. There is always one: threads use fewer than there are of either
    /// kind.
    pub fn take(&self, there: bool, random: &mut Random) -> Outcome<BorrowedFile<'_>> {
        let mut idle = lock(&self.idle);
        let numbers = &mut idle[usize::from(there)];
        ensure!(!numbers.is_empty(), "no file is left that is {}", if there { "there" } else { "not there" });
        let number = numbers.swap_remove(random.below(numbers.len() as u64) as usize);
        Ok(BorrowedFile { files: self, number, file: None })
    }

    /// Checks that the files that should exist do, with their lengths, and no others.
    pub fn check(&self) -> Outcome {
        let entries = lock(&self.entries);
        for (number, entry) in (0..).zip(entries.iter()) {
            let path = self.path(number);
            let found = std::fs::metadata(&path).map(|found| found.len()).ok();
            ensure!(
                found == entry.length,
                "{} has {found:?} bytes, and should have {:?}",
                path.display(),
                entry.length
            );
        }
        Ok(())
    }
}

/// If a thread has panicked, the whole run is a failure, so half-done work does not matter.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A length of Filebench's gamma distribution of shape 1.5: an exponential one, and half of a squared normal one.
fn length(random: &mut Random, mean: u64) -> u64 {
    let mut unit = || (random.draw() >> 11) as f64 / (1_u64 << 53) as f64;
    let (first, second, angle) = (1.0 - unit(), 1.0 - unit(), unit() * TAU);
    let shape = -first.ln() - second.ln() * angle.cos().powi(2);
    (mean as f64 / 1.5 * shape) as u64
}

/// A file that one thread uses, given back at the drop.
#[derive(Debug)]
pub struct BorrowedFile<'a> {
    files: &'a Files,
    number: u64,
    file: Option<File>,
}

impl BorrowedFile<'_> {
    fn failure(&self, action: &str) -> impl FnOnce(std::io::Error) -> String + use<> {
        tried(format!("{action} file {}", self.number))
    }

    fn file(&mut self) -> Outcome<&mut File> {
        self.file.as_mut().ok_or_else(|| format!("file {} is not open", self.number))
    }

    fn length(&self) -> u64 {
        self.files.entry(self.number).length.unwrap_or(0)
    }

    fn set_length(&self, length: Option<u64>) {
        lock(&self.files.entries)[self.number as usize].length = length;
    }

    /// The value of each of its bytes.
    const fn byte(&self) -> u8 {
        self.number as u8
    }

    /// Makes it, empty, and opens it.
    pub fn create(&mut self) -> Outcome {
        let opened = OpenOptions::new().read(true).write(true).create_new(true).open(self.files.path(self.number));
        self.file = Some(opened.map_err(self.failure("making"))?);
        self.set_length(Some(0));
        Ok(())
    }

    /// Opens it.
    pub fn open(&mut self) -> Outcome {
        let opened = OpenOptions::new().read(true).write(true).open(self.files.path(self.number));
        self.file = Some(opened.map_err(self.failure("opening"))?);
        Ok(())
    }

    fn write(&mut self, length: u64, buffer: &mut [u8]) -> Outcome {
        let (byte, failure) = (self.byte(), self.failure("writing"));
        let file = self.file()?;
        let most = buffer.len();
        let piece = &mut buffer[..most.min(length as usize)];
        piece.fill(byte);
        let mut left = length as usize;
        let mut write = || {
            while left > 0 {
                let now = left.min(piece.len());
                file.write_all(&piece[..now])?;
                left -= now;
            }
            Ok(())
        };
        write().map_err(failure)
    }

    /// Writes its planned length.
    pub fn write_whole(&mut self, buffer: &mut [u8]) -> Outcome {
        let planned = self.files.entry(self.number).planned;
        self.write(planned, buffer)?;
        self.set_length(Some(planned));
        Ok(())
    }

    /// Writes at its end.
    pub fn append(&mut self, length: u64, buffer: &mut [u8]) -> Outcome {
        let (before, failure) = (self.length(), self.failure("seeking in"));
        let end = self.file()?.seek(SeekFrom::End(0)).map_err(failure)?;
        ensure!(end == before, "file {} ends at {end}, and should at {before}", self.number);
        self.write(length, buffer)?;
        self.set_length(Some(before + length));
        Ok(())
    }

    /// Reads all of it.
    pub fn read_whole(&mut self, buffer: &mut [u8]) -> Outcome {
        let (length, byte, number) = (self.length(), self.byte(), self.number);
        let failure = self.failure("reading");
        let file = self.file()?;
        // The buffer may hold another file's bytes, which differ; but if it holds this file's, the checked place is
        // overwritten.
        buffer[0] = !byte;
        let mut total = 0;
        let mut read = || loop {
            let count = file.read(buffer)?;
            if count == 0 {
                return Ok(());
            }
            if [buffer[0], buffer[count - 1]] != [byte; 2] {
                return Err(std::io::Error::other("it holds bytes that no thread has written there"));
            }
            total += count as u64;
        };
        read().map_err(failure)?;
        ensure!(total == length, "of file {number} {total} bytes can be read, and {length} were written");
        Ok(())
    }

    /// Syncs it to the medium.
    pub fn sync(&mut self) -> Outcome {
        let failure = self.failure("syncing");
        self.file()?.sync_all().map_err(failure)
    }

    /// Stats it.
    pub fn stat(self) -> Outcome {
        let found = std::fs::metadata(self.files.path(self.number)).map_err(self.failure("looking at"))?.len();
        ensure!(found == self.length(), "file {} has {found} bytes, and should have {}", self.number, self.length());
        Ok(())
    }

    /// Removes it.
    pub fn delete(self) -> Outcome {
        std::fs::remove_file(self.files.path(self.number)).map_err(self.failure("removing"))?;
        self.set_length(None);
        Ok(())
    }
}

impl Drop for BorrowedFile<'_> {
    fn drop(&mut self) {
        // Closed before another thread takes it.
        self.file = None;
        let there = self.files.entry(self.number).length.is_some();
        lock(&self.files.idle)[usize::from(there)].push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_their_mean_and_spread() {
        let mut random = Random::new(7);
        let lengths: Vec<_> = (0..100_000).map(|_| length(&mut random, 16_384) as f64).collect();
        let mean = lengths.iter().sum::<f64>() / 100_000.0;
        let variance = lengths.iter().map(|length| (length - mean).powi(2)).sum::<f64>() / 100_000.0;
        assert!((mean / 16_384.0 - 1.0).abs() < 0.02, "mean {mean}");
        // In a gamma distribution, the square of the mean divided by the variance is the shape.
        assert!((mean * mean / variance - 1.5).abs() < 0.05, "shape {}", mean * mean / variance);
    }

    #[test]
    fn what_is_lost_or_changed_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::make(directory.path(), 100, 20, 1000).unwrap();
        files.check().unwrap();
        let mut random = Random::new(1);
        let mut buffer = vec![0; TRANSFER];
        let mut held = files.take(true, &mut random).unwrap();
        held.open().unwrap();
        held.append(5, &mut buffer).unwrap();
        held.open().unwrap();
        held.read_whole(&mut buffer).unwrap();
        std::fs::write(files.path(held.number), vec![!held.byte(); held.length() as usize]).unwrap();
        held.open().unwrap();
        assert!(held.read_whole(&mut buffer).is_err());
        std::fs::write(files.path(held.number), "").unwrap();
        assert!(files.check().is_err());
    }
}
