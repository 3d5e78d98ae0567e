//! Turns of two processes: by shared memory that they watch, or by pipes.
//!
//! On a pipe a waiting process sleeps.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ashlar_pmem::{Mapping, MappingAccess, Medium, OutOfBounds, Persistent};
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// The name of the page that a pair of workers shares, in the directory `aside`.
pub const PAGE: &str = "page";

/// The file's length.
const BYTES: u64 = 4096;
/// The word that counts the processes that have arrived.
const HERE: u64 = 0;
/// The word that names the process whose turn it is, on a cache line of its own.
const TURN: u64 = 64;
/// A process whose partner is gone must end.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the word is read before the core is yielded.
const SPINS: u32 = 1000;

/// A page of shared memory.
#[derive(Debug)]
pub struct TurnPage {
    memory: Mapping,
    has_cores: bool,
}

impl TurnPage {
    /// Makes the page's file, and the pipes of a [`Bell`] beside it; replaces old ones.
    pub fn make(path: &Path) -> io::Result<()> {
        for pipe in [0, 1].map(|worker| Bell::pipe(path, worker)) {
            let _ = std::fs::remove_file(&pipe);
            mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        }
        let _ = std::fs::remove_file(path);
        File::create_new(path)?.set_len(BYTES)
    }

    /// Opens it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let memory = Mapping::map(&file, BYTES, MappingAccess::ReadWrite, Medium::MEMORY).map_err(io::Error::other)?;
        let has_cores = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
        Ok(Self { memory, has_cores })
    }

    /// Waits until both processes have arrived.
    pub fn meet(&self) -> io::Result<()> {
        loop {
            let here = self.load(HERE)?;
            if self.memory.compare_exchange_u64(HERE, here, here + 1).map_err(outside)?.is_ok() {
                break;
            }
        }
        self.wait(HERE, 2)
    }

    /// Waits for the worker's turn.
    pub fn wait_for_turn(&self, worker: u64) -> io::Result<()> {
        self.wait(TURN, worker)
    }

    /// Gives the turn to the other worker.
    pub fn hand_over(&self, worker: u64) -> io::Result<()> {
        self.memory.store_u64(TURN, 1 - worker).map_err(outside)
    }

    fn load(&self, at: u64) -> io::Result<u64> {
        self.memory.load_u64(at).map_err(outside)
    }

    /// Watches a word, which is the fastest way if a core is free. If none is, this process yields to the one that
    /// changes the word.
    fn wait(&self, at: u64, value: u64) -> io::Result<()> {
        let spins = if self.has_cores { SPINS } else { 1 };
        let mut deadline = None;
        loop {
            for _ in 0..spins {
                if self.load(at)? == value {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
            let now = Instant::now();
            if now > *deadline.get_or_insert(now + PATIENCE) {
                let words = format!("the other process has not answered for {} s", PATIENCE.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, words));
            }
        }
    }
}

/// A pipe to each process: a waiting process sleeps in the kernel, and is woken.
#[derive(Debug)]
pub struct Bell {
    own: File,
    others: File,
}

impl Bell {
    fn pipe(page: &Path, worker: u64) -> PathBuf {
        page.with_extension(format!("pipe{worker}"))
    }

    /// Opens the pipes beside a page.
    pub fn open(page: &Path, worker: u64) -> io::Result<Self> {
        // A pipe that is opened for both reading and writing does not wait until its other end is opened.
        let open = |worker| OpenOptions::new().read(true).write(true).open(Self::pipe(page, worker));
        Ok(Self { own: open(worker)?, others: open(1 - worker)? })
    }

    /// Wakes the other worker.
    pub fn ring(&mut self) -> io::Result<()> {
        self.others.write_all(&[1])
    }

    /// Sleeps until the other worker rings.
    pub fn sleep(&mut self) -> io::Result<()> {
        self.own.read_exact(&mut [0])
    }
}

fn outside(error: OutOfBounds) -> io::Error {
    io::Error::other(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_taken_one_after_the_other() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("page");
        TurnPage::make(&path).expect("made");
        let log = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for worker in 0..2 {
                let page = TurnPage::open(&path).expect("opened");
                let mut bell = Bell::open(&path, worker).expect("opened");
                let log = &log;
                scope.spawn(move || {
                    page.meet().expect("both are here");
                    for _ in 0..100 {
                        if worker == 1 {
                            page.wait_for_turn(worker).expect("its turn");
                        }
                        log.lock().expect("a log").push(worker);
                        page.hand_over(worker).expect("handed over");
                        if worker == 0 {
                            page.wait_for_turn(worker).expect("its turn");
                        }
                    }
                    for _ in 0..100 {
                        if worker == 1 {
                            bell.sleep().expect("its turn");
                        }
                        log.lock().expect("a log").push(worker);
                        bell.ring().expect("handed over");
                        if worker == 0 {
                            bell.sleep().expect("its turn");
                        }
                    }
                });
            }
        });
        let log = log.into_inner().expect("a log");
        assert!(log.len() == 400 && log.chunks(2).all(|pair| pair == [0, 1]), "{log:?}");
    }
}
