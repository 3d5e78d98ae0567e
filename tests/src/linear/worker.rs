//! A worker: a process that makes the random operations of a round.
//!
//! It is a process of its own, so that it can be stopped. It reads `DIRECTORY SEED COUNT` from its standard input,
//! opens the directories of that round, and answers `ready`. Then it waits for `go`, and prints one event a line, and
//! `done`.

use std::io::{BufWriter, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, RawDir, RenameFlags, SeekFrom};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use super::model::{error, text_of};
use super::operation::{Answer, DIRECTORIES, EntryName, Event, HANDLES, Move, NAMES, Operation};
use crate::random::Random;
use crate::{Outcome, tried};

/// Files that a worker holds open at once.
const OPEN_MAX: usize = 2;
/// Writes begin below this offset, …
const OFFSET_MAX: u64 = 40;
/// … and files stay far below a page, so that a write is one request and one update.
const SIZE_MAX: u64 = 80;

/// How a file is open. Each mode takes another path through the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opened {
    Update,
    Append,
    AppendOnly,
}

/// A file that is open.
#[derive(Debug)]
struct Open {
    file: OwnedFd,
    number: u64,
    how: Opened,
}

/// A round as its worker sees it.
struct Round {
    directories: Vec<OwnedFd>,
    open: Vec<Open>,
    random: Random,
    texts: u64,
    mark: char,
}

/// Works on the mount at `point` until its input ends.
///
/// # Errors
/// Failures that are no answer of an operation.
pub fn run(point: &Path) -> Outcome {
    let (mut input, mut output) = (std::io::stdin().lines(), BufWriter::new(std::io::stdout().lock()));
    let mut say = |words: &str| writeln!(output, "{words}").and_then(|()| output.flush()).map_err(tried("printing"));
    while let Some(line) = input.next() {
        let line = line.map_err(tried("reading"))?;
        let words: Vec<_> = line.split(' ').collect();
        let [directory, seed, count] = words[..] else { return Err(format!("'{line}' is no round")) };
        let (seed, count) = (seed.parse().map_err(tried("the seed"))?, count.parse().map_err(tried("the count"))?);
        let mut round = Round::open(&point.join(directory), seed)?;
        say("ready")?;
        input.next().transpose().map_err(tried("reading"))?;
        let events = (0..count).map(|_| round.step()).collect::<Outcome<Vec<Event>>>()?;
        for event in events {
            say(&serde_json::to_string(&event).map_err(tried("writing an event"))?)?;
        }
        say("done")?;
    }
    Ok(())
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn answer_of(result: rustix::io::Result<()>) -> Answer {
    result.map_or_else(error, |()| Answer::Done)
}

impl Round {
    fn open(root: &Path, seed: u64) -> Outcome<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open =
            |path: &Path| rustix::fs::open(path, flags, Mode::empty()).map_err(tried(format!("{}", path.display())));
        let mut paths = vec![root.to_owned()];
        for (above, name) in DIRECTORIES {
            paths.push(paths[above].join(NAMES[name]));
        }
        let directories = paths.iter().map(|path| open(path)).collect::<Outcome<_>>()?;
        let mark = (b'a' + (seed % 26) as u8) as char;
        Ok(Self { directories, open: Vec::new(), random: Random::new(seed), texts: 0, mark })
    }

    /// Draws an operation, performs it, and records the times.
    fn step(&mut self) -> Outcome<Event> {
        let operation = self.draw();
        let how = [Opened::Update, Opened::Update, Opened::Append, Opened::AppendOnly][self.random.below(4) as usize];
        if matches!(operation, Operation::Create(_) | Operation::Open(_)) && self.open.len() >= OPEN_MAX {
            self.open.remove(0);
        }
        if self.random.below(4) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(self.random.below(300)));
        }
        let called = now();
        let answer = self.make(&operation, how)?;
        Ok(Event { called, returned: now(), operation, answer })
    }

    fn place(&mut self) -> EntryName {
        EntryName(self.random.below(HANDLES as u64) as usize, self.random.below(NAMES.len() as u64) as usize)
    }

    fn text(&mut self) -> String {
        self.texts += 1;
        // Every text differs from all others, so that a read shows which write it comes from.
        format!("{}{}", self.mark, self.texts).repeat(1 + self.random.below(6) as usize)
    }

    fn draw(&mut self) -> Operation {
        let how = [Move::Replace, Move::Replace, Move::NoReplace, Move::Exchange][self.random.below(4) as usize];
        let (one, two) = (self.place(), self.place());
        let index = self.random.below(self.open.len().max(1) as u64) as usize;
        let held = self.open.get(index).map(|open| (open.number, open.how));
        match (self.random.below(100), held) {
            (0..10, _) => Operation::Create(one),
            (10..16, _) => Operation::MakeDirectory(one),
            (16..21, _) => Operation::RemoveDirectory(one),
            (21..29, _) => Operation::Unlink(one),
            (29..47, _) => Operation::Rename(one, two, how),
            (47..54, _) => Operation::Link(one, two),
            (54..62, _) => Operation::Stat(one),
            (62..68, _) => Operation::List(one.0),
            (68..81, Some((file, Opened::Update))) => {
                Operation::Write(file, self.random.below(OFFSET_MAX) as usize, self.text())
            }
            (68..81, Some((file, _))) => Operation::Append(file, self.text()),
            (81..92, Some((file, Opened::Update | Opened::Append))) => {
                Operation::Read(file, self.random.below(OFFSET_MAX / 4) as usize, 4096)
            }
            (92..96, Some((file, _))) => Operation::Truncate(file, self.random.below(SIZE_MAX) as usize),
            (96.., Some((file, _))) => Operation::StatOpen(file),
            _ => Operation::Open(one),
        }
    }

    fn at(&self, place: EntryName) -> (&OwnedFd, &'static str) {
        (&self.directories[place.0], NAMES[place.1])
    }

    fn held(&self, number: u64) -> &OwnedFd {
        let open = self.open.iter().find(|open| open.number == number);
        // The directory gives `EISDIR` or `EBADF`, which no model gives.
        open.map_or(&self.directories[0], |open| &open.file)
    }

    fn make(&mut self, operation: &Operation, how: Opened) -> Outcome<Answer> {
        Ok(match operation {
            Operation::Create(place) => self.open_file(*place, how, OFlags::CREATE | OFlags::EXCL),
            Operation::Open(place) => self.open_file(*place, how, OFlags::empty()),
            Operation::MakeDirectory(place) => {
                let (directory, name) = self.at(*place);
                answer_of(rustix::fs::mkdirat(directory, name, Mode::from_bits_truncate(0o755)))
            }
            Operation::RemoveDirectory(place) => {
                let (directory, name) = self.at(*place);
                answer_of(rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR))
            }
            Operation::Unlink(place) => {
                let (directory, name) = self.at(*place);
                answer_of(rustix::fs::unlinkat(directory, name, AtFlags::empty()))
            }
            Operation::Rename(from, to, how) => {
                let ((from, old), (to, new)) = (self.at(*from), self.at(*to));
                let flags = match how {
                    Move::Replace => RenameFlags::empty(),
                    Move::NoReplace => RenameFlags::NOREPLACE,
                    Move::Exchange => RenameFlags::EXCHANGE,
                };
                answer_of(rustix::fs::renameat_with(from, old, to, new, flags))
            }
            Operation::Link(from, to) => {
                let ((from, old), (to, new)) = (self.at(*from), self.at(*to));
                answer_of(rustix::fs::linkat(from, old, to, new, AtFlags::empty()))
            }
            Operation::Stat(place) => {
                let (directory, name) = self.at(*place);
                rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                    .map_or_else(error, |stat| attributes(&stat))
            }
            Operation::StatOpen(file) => {
                rustix::fs::fstat(self.held(*file)).map_or_else(error, |stat| attributes(&stat))
            }
            Operation::List(directory) => list(&self.directories[*directory])?,
            Operation::Write(file, offset, text) => {
                written(rustix::io::pwrite(self.held(*file), text.as_bytes(), *offset as u64), text)?
            }
            Operation::Append(file, text) => written(rustix::io::write(self.held(*file), text.as_bytes()), text)?,
            Operation::Read(file, offset, count) => {
                let mut bytes = vec![0; *count];
                let read = rustix::io::pread(self.held(*file), &mut bytes, *offset as u64);
                read.map_or_else(error, |count| Answer::Text(text_of(&bytes[..count])))
            }
            Operation::Truncate(file, size) => answer_of(rustix::fs::ftruncate(self.held(*file), *size as u64)),
        })
    }

    fn open_file(&mut self, place: EntryName, how: Opened, make: OFlags) -> Answer {
        let flags = match how {
            Opened::Update => OFlags::RDWR,
            Opened::Append => OFlags::RDWR | OFlags::APPEND,
            Opened::AppendOnly => OFlags::WRONLY | OFlags::APPEND,
        };
        let (directory, name) = self.at(place);
        let opened =
            rustix::fs::openat(directory, name, flags | make | OFlags::CLOEXEC, Mode::from_bits_truncate(0o644));
        let numbered = opened.and_then(|file| rustix::fs::fstat(&file).map(|stat| (file, stat.st_ino)));
        match numbered {
            Ok((file, number)) => {
                // One descriptor a file: operations name an open file by its number.
                self.open.retain(|open| open.number != number);
                self.open.push(Open { file, number, how });
                Answer::File(number)
            }
            Err(errno) => error(errno),
        }
    }
}

fn attributes(stat: &rustix::fs::Stat) -> Answer {
    if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
        Answer::Directory
    } else {
        Answer::Attributes(stat.st_ino, stat.st_size as usize, stat.st_nlink as u32)
    }
}

/// POSIX allows a short write; one within a page never is short.
fn written(result: rustix::io::Result<usize>, text: &str) -> Outcome<Answer> {
    match result {
        Ok(count) if count == text.len() => Ok(Answer::Done),
        Ok(count) => Err(format!("{count} of {} bytes were written", text.len())),
        Err(errno) => Ok(error(errno)),
    }
}

/// Lists a directory from its beginning on, through a descriptor that was opened before a move could happen.
fn list(directory: impl AsFd) -> Outcome<Answer> {
    if let Err(errno) = rustix::fs::seek(&directory, SeekFrom::Start(0)) {
        return Ok(error(errno));
    }
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(directory, &mut buffer);
    let mut names = 0;
    while let Some(entry) = entries.next() {
        let name = match &entry {
            Ok(entry) => entry.file_name().to_bytes(),
            Err(Errno::INTR) => continue,
            Err(errno) => return Ok(error(*errno)),
        };
        match NAMES.iter().position(|known| known.as_bytes() == name) {
            Some(number) if names >> number & 1 == 0 => names |= 1 << number,
            Some(_) => return Err(format!("a listing shows '{}' twice", String::from_utf8_lossy(name))),
            None if name == b"." || name == b".." => {}
            None => return Err(format!("a listing shows '{}', which no worker made", String::from_utf8_lossy(name))),
        }
    }
    Ok(Answer::Names(names))
}
