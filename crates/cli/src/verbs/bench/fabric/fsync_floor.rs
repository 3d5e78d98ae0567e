//! The floor of an `fsync` over two nodes: the waking and the bytes, and nothing else.
//!
//! A program copies bytes to memory that it shares with a daemon, and wakes the daemon by a futex. The daemon sends the
//! bytes to a peer over a plain socket. The peer copies them to a mapped file in memory, and answers. The daemon then
//! wakes the program. No thread spins, and nothing is checksummed, queued or decided.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use ashlar_pmem::{Mapping, MappingAccess, Medium, OutOfBounds, Persistent};

use super::sockets;
use crate::verbs::bench::floor_log::FloorLog;

/// The longest data.
const DATA_MAX: usize = 64 << 10;
/// The word that counts the program's requests. The daemon sleeps on it.
const ASKED: u64 = 0;
/// The word that counts the daemon's answers. The program sleeps on it.
const ANSWERED: u64 = 64;
/// The words that describe a request: its path, and the length of its data.
const PATH: u64 = 128;
const LENGTH: u64 = 136;
/// The data, behind the first page.
const DATA: u64 = 4096;
const PAGE_BYTES: u64 = DATA + DATA_MAX as u64;
/// The count of answers once the daemon is gone.
const LOST: u64 = u64::MAX;
/// A frame on the socket begins with the length of its data.
const HEADER_BYTES: usize = 8;
/// The peer's answer.
const ANSWER_BYTES: usize = 8;
/// Bytes of the peer's file: several times the processor's caches, so that a log's memory is not warmer than real one.
const FILE_BYTES: u64 = 64 << 20;

/// How far a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsyncPath {
    /// To the daemon, which answers at once.
    DaemonAlone,
    /// To the daemon, and to the peer.
    OverPeer,
}

/// Memory that the program and the daemon share.
#[derive(Debug)]
pub struct FsyncPage {
    memory: Mapping,
}

impl FsyncPage {
    /// Makes the file, and maps it.
    pub fn make(path: &Path) -> io::Result<Self> {
        File::create_new(path)?.set_len(PAGE_BYTES)?;
        Self::open(path)
    }

    /// Maps an existing file.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::map(&OpenOptions::new().read(true).write(true).open(path)?)
    }

    fn map(file: &File) -> io::Result<Self> {
        let memory = Mapping::map(file, PAGE_BYTES, MappingAccess::ReadWrite, Medium::MEMORY);
        Ok(Self { memory: memory.map_err(io::Error::other)? })
    }

    /// Maps the file once more.
    pub fn try_clone(&self) -> io::Result<Self> {
        Self::map(&File::from(self.memory.file().try_clone_to_owned()?))
    }

    /// Describes the requests of a turn.
    pub fn begin_turn(&self, path: FsyncPath, length: usize) -> io::Result<()> {
        self.memory.store_u64(PATH, u64::from(path == FsyncPath::OverPeer)).map_err(outside)?;
        self.memory.store_u64(LENGTH, length as u64).map_err(outside)
    }

    /// Does what an `fsync` of a program does: copies the data, wakes the daemon, and sleeps until the answer.
    pub fn ask(&self, bytes: &[u8]) -> io::Result<()> {
        self.memory.store(DATA, bytes).map_err(outside)?;
        let number = self.load(ASKED)? + 1;
        self.memory.store_u64(ASKED, number).map_err(outside)?;
        self.memory.wake(ASKED);
        loop {
            match self.load(ANSWERED)? {
                LOST => return Err(io::Error::other("the process that forwards requests has ended")),
                answered if answered == number => return Ok(()),
                // The futex compares the lower half. Nothing else changes it while the program waits.
                answered => self.memory.wait(ANSWERED, answered as u32),
            }
        }
    }

    /// Wakes the program, whose daemon is gone.
    pub fn report_loss(&self) {
        let _ = self.memory.store_u64(ANSWERED, LOST);
        self.memory.wake(ANSWERED);
    }

    /// Answers requests, as the daemon.
    pub fn serve(&self, persister: &mut PersisterEnd) -> io::Result<()> {
        let mut answered = self.load(ANSWERED)?;
        loop {
            let asked = self.load(ASKED)?;
            if asked == answered {
                self.memory.wait(ASKED, asked as u32);
                continue;
            }
            if self.load(PATH)? != 0 {
                let length = self.load(LENGTH)? as usize;
                persister.persist(length, |data| self.memory.load(DATA, data).map_err(outside))?;
            }
            answered = asked;
            self.memory.store_u64(ANSWERED, answered).map_err(outside)?;
            self.memory.wake(ANSWERED);
        }
    }

    fn load(&self, at: u64) -> io::Result<u64> {
        self.memory.load_u64(at).map_err(outside)
    }
}

fn outside(error: OutOfBounds) -> io::Error {
    io::Error::other(error)
}

/// The daemon's connection to the peer.
#[derive(Debug)]
pub struct PersisterEnd {
    stream: TcpStream,
    frame: Vec<u8>,
}

impl PersisterEnd {
    /// Connects to the peer.
    pub fn connect(address: &str) -> io::Result<Self> {
        Ok(Self { stream: sockets::connect(address)?, frame: vec![0; HEADER_BYTES + DATA_MAX] })
    }

    /// Sends data in one call, and waits until the peer has persisted it.
    fn persist(&mut self, length: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
        let frame = self.frame.get_mut(..HEADER_BYTES + length).ok_or(io::ErrorKind::InvalidInput)?;
        let (header, data) = frame.split_at_mut(HEADER_BYTES);
        header.copy_from_slice(&(length as u64).to_le_bytes());
        fill(data)?;
        self.stream.write_all(frame)?;
        self.stream.read_exact(&mut [0; ANSWER_BYTES])
    }
}

/// Persists the data of one connection after the other, as the peer.
pub fn serve_persister(listener: &TcpListener) -> io::Result<()> {
    let mut file = FloorLog::new(FILE_BYTES, "memory")?;
    let mut buffer = vec![0; HEADER_BYTES + DATA_MAX];
    loop {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        while let Some(length) = receive_frame(&mut stream, &mut buffer)? {
            file.persist(&buffer[HEADER_BYTES..][..length])?;
            stream.write_all(&[0; ANSWER_BYTES])?;
        }
    }
}

/// Receives a frame, in one call if all of it is there; returns the length of its data, or `None` at the end.
fn receive_frame(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let mut have = 0;
    loop {
        if let Some(header) = buffer[..have].first_chunk::<HEADER_BYTES>() {
            let length = u64::from_le_bytes(*header) as usize;
            if length > DATA_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if have == HEADER_BYTES + length {
                return Ok(Some(length));
            }
        }
        match stream.read(&mut buffer[have..])? {
            0 if have == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => have += count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_reach_the_peer_and_lost_daemon_fails_them() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("page");
        let page = FsyncPage::make(&path).expect("made");
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = listener.local_addr().expect("bound").to_string();
        std::thread::spawn(move || serve_persister(&listener));
        let daemon = FsyncPage::open(&path).expect("opened");
        let mut persister = PersisterEnd::connect(&address).expect("connected");
        std::thread::spawn(move || daemon.serve(&mut persister));
        for (fsync, length) in
            [(FsyncPath::OverPeer, 128), (FsyncPath::DaemonAlone, 4096), (FsyncPath::OverPeer, 65_536)]
        {
            page.begin_turn(fsync, length).expect("begun");
            (0..10).for_each(|_| page.ask(&vec![3; length]).expect("answered"));
        }
        let lost = page.try_clone().expect("mapped");
        std::thread::spawn(move || lost.report_loss()).join().expect("reported");
        // No daemon answers any more: this one forwards data of a length that it can't.
        page.begin_turn(FsyncPath::OverPeer, DATA_MAX + 1).expect("begun");
        page.ask(&[]).expect_err("the daemon is lost");
    }
}
