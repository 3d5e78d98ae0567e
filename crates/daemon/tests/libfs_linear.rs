//! Concurrent calls of LibFS sessions, checked against a model.
//!
//! Some order of them must explain all answers.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_libfs::{LibFs, OpenInode, RenameFlags, WriteAt};
use ashlar_tests::linear::checker::{History, check};
use ashlar_tests::linear::model::{Picture, Seen, text_of};
use ashlar_tests::linear::operation::{Answer, DIRECTORIES, EntryName, Event, Move, NAMES, Operation};
use ashlar_tests::random::Random;
use ashlar_types::{Errno, FILE_SIZE_MAX, FileKind, InodeId};
use common::Site;
use common::libfs::{ROOT, connect, make};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// One thread's view of a round.
struct Worker {
    fs: Arc<LibFs>,
    directories: Vec<InodeId>,
    open: Vec<InodeId>,
    /// Open inodes that were read or written, kept as open files keep them.
    ways: HashMap<u64, OpenInode>,
    random: Random,
}

impl Worker {
    fn draw(&mut self) -> Operation {
        let how = [Move::Replace, Move::NoReplace, Move::Exchange][self.random.below(3) as usize];
        let mut place = || EntryName(self.random.below(4) as usize, self.random.below(NAMES.len() as u64) as usize);
        let (one, two) = (place(), place());
        let text = format!("{:x}", self.random.draw());
        let held = self.open.last().map(|file| file.0);
        match (self.random.below(100), held) {
            (0..12, _) => Operation::Create(one),
            (12..18, _) => Operation::MakeDirectory(one),
            (18..23, _) => Operation::RemoveDirectory(one),
            (23..31, _) => Operation::Unlink(one),
            (31..48, _) => Operation::Rename(one, two, how),
            (48..56, _) => Operation::Link(one, two),
            (56..63, _) => Operation::Stat(one),
            (63..70, _) => Operation::List(one.0),
            (70..78, Some(file)) => Operation::Write(file, self.random.below(30) as usize, text),
            (78..86, Some(file)) => Operation::Append(file, text),
            (86..96, Some(file)) => Operation::Read(file, 0, 4096),
            (96.., Some(file)) => Operation::StatOpen(file),
            _ => Operation::Open(one),
        }
    }

    /// Writes as a front end does: by the fast path if it serves the call.
    fn write(&mut self, file: u64, at: WriteAt, text: &str) -> Result<Answer, Errno> {
        let way = self.ways.entry(file).or_insert_with(|| self.fs.open_inode(InodeId(file)));
        match self.fs.write_open(way, at, text.as_bytes(), false, FILE_SIZE_MAX) {
            Some(_) => Ok(Answer::Done),
            None => self.fs.write(&ROOT, InodeId(file), at, text.as_bytes(), false).map(|_| Answer::Done),
        }
    }

    fn make(&mut self, operation: &Operation) -> Answer {
        self.try_make(operation).unwrap_or_else(|errno| Answer::Error(errno.0))
    }

    fn at(&self, place: EntryName) -> (InodeId, &'static [u8]) {
        (self.directories[place.0], NAMES[place.1].as_bytes())
    }

    /// Calls LibFS as the kernel does: a lookup comes first if the call names a path.
    fn try_make(&mut self, operation: &Operation) -> Result<Answer, Errno> {
        let fs = Arc::clone(&self.fs);
        match operation {
            Operation::Create(place) => {
                let (directory, name) = self.at(*place);
                let file = fs.make_open(&ROOT, directory, name, &make(FileKind::Regular))?.id;
                self.open.push(file);
                Ok(Answer::File(file.0))
            }
            Operation::Open(place) => loop {
                let (directory, name) = self.at(*place);
                let found = fs.lookup(&ROOT, directory, name)?;
                if found.inode.is_directory() {
                    return Err(Errno::EISDIR);
                }
                match fs.open(found.id) {
                    Err(Errno::ESTALE) => {}
                    opened => {
                        self.open.push(opened?.id);
                        return Ok(Answer::File(found.id.0));
                    }
                }
            },
            Operation::MakeDirectory(place) => {
                let (directory, name) = self.at(*place);
                fs.make(&ROOT, directory, name, &make(FileKind::Directory)).map(|_| Answer::Done)
            }
            Operation::RemoveDirectory(place) => {
                let (directory, name) = self.at(*place);
                fs.remove_directory(&ROOT, directory, name, None).map(|()| Answer::Done)
            }
            Operation::Unlink(place) => {
                let (directory, name) = self.at(*place);
                fs.unlink(&ROOT, directory, name).map(|()| Answer::Done)
            }
            Operation::Rename(from, to, how) => {
                let flags = RenameFlags {
                    no_replace: *how == Move::NoReplace,
                    exchange: *how == Move::Exchange,
                    ..RenameFlags::default()
                };
                fs.rename(&ROOT, self.at(*from), self.at(*to), flags).map(|()| Answer::Done)
            }
            Operation::Link(from, to) => loop {
                let ((old, name), (directory, new)) = (self.at(*from), self.at(*to));
                let found = fs.lookup(&ROOT, old, name)?;
                match fs.link(&ROOT, found.id, directory, new) {
                    Err(Errno::ESTALE) => {}
                    linked => return linked.map(|_| Answer::Done),
                }
            },
            Operation::Stat(place) => {
                let (directory, name) = self.at(*place);
                let found = fs.lookup(&ROOT, directory, name)?;
                Ok(attributes(found.id, &found.inode))
            }
            Operation::StatOpen(file) => {
                let found = fs.attributes(InodeId(*file))?;
                Ok(attributes(found.id, &found.inode))
            }
            Operation::List(directory) => {
                let mut names = 0;
                fs.list(self.directories[*directory], 0, &mut |listed| {
                    let number = NAMES.iter().position(|name| name.as_bytes() == listed.name).expect("a name of ours");
                    names |= 1 << number;
                    true
                })?;
                Ok(Answer::Names(names))
            }
            Operation::Write(file, offset, text) => self.write(*file, WriteAt::Offset(*offset as u64), text),
            Operation::Append(file, text) => self.write(*file, WriteAt::End, text),
            Operation::Read(file, offset, count) => {
                let (mut bytes, mut room) = (vec![0; *count], vec![0; *count]);
                let way = self.ways.entry(*file).or_insert_with(|| fs.open_inode(InodeId(*file)));
                let count = match fs.read_open(way, *offset as u64, *count, |length| room.get_mut(..length)) {
                    Some(count) => {
                        bytes.copy_from_slice(&room);
                        count
                    }
                    None => fs.read(InodeId(*file), *offset as u64, &mut bytes)?,
                };
                Ok(Answer::Text(text_of(&bytes[..count])))
            }
            Operation::Truncate(file, size) => {
                let change = ashlar_libfs::AttributeChange { size: Some(*size as u64), ..Default::default() };
                fs.set_attributes(&ROOT, InodeId(*file), &change).map(|_| Answer::Done)
            }
        }
    }
}

fn attributes(id: InodeId, inode: &ashlar_types::Inode) -> Answer {
    if inode.is_directory() { Answer::Directory } else { Answer::Attributes(id.0, inode.size as usize, inode.links) }
}

fn picture(fs: &LibFs, directory: InodeId, above: &str, picture: &mut Picture) {
    let mut entries = Vec::new();
    let list = fs.list(directory, 0, &mut |listed| {
        entries.push((String::from_utf8(listed.name).expect("a name of ours"), listed.id, listed.kind));
        true
    });
    list.expect("listed");
    for (name, id, kind) in entries {
        let path = format!("{above}{name}");
        if kind == FileKind::Directory {
            self::picture(fs, id, &format!("{path}/"), picture);
            picture.insert(path, Seen::Directory);
        } else {
            let mut bytes = vec![0; 4096];
            let count = fs.read(id, 0, &mut bytes).expect("read");
            let links = fs.attributes(id).expect("attributes").inode.links;
            picture.insert(path, Seen::File(id.0, links, text_of(&bytes[..count])));
        }
    }
}

#[test]
fn operations_of_two_sessions_are_linearizable() {
    linearizable(150, false);
}

#[test]
fn operations_are_linearizable_while_daemon_is_killed() {
    linearizable(60, true);
}

/// Runs rounds of random operations, checked against the model.
///
/// With `kills`, the daemon dies somewhere in each round.
fn linearizable(rounds: u64, kills: bool) {
    const OPERATIONS: usize = 14;
    let mut site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site)];
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, rounds) = (number("ASHLAR_SEED").unwrap_or(1), number("ASHLAR_ROUNDS").unwrap_or(rounds));
    for seed in first..first + rounds {
        let root = sessions[0].make(&ROOT, InodeId::ROOT, format!("r{seed}").as_bytes(), &make(FileKind::Directory));
        let mut directories = vec![root.expect("made").id];
        for (above, name) in DIRECTORIES {
            let above = directories[above];
            let made =
                sessions[0].make(&ROOT, above, NAMES[name].as_bytes(), &make(FileKind::Directory)).expect("made");
            directories.push(made.id);
        }
        for session in &sessions {
            // A session that has not looked a directory up can't know it.
            session.lookup(&ROOT, InodeId::ROOT, format!("r{seed}").as_bytes()).expect("found");
            for (above, name) in DIRECTORIES {
                session.lookup(&ROOT, directories[above], NAMES[name].as_bytes()).expect("found");
            }
            directories.iter().for_each(|id| drop(session.open(*id).expect("open")));
        }
        let (begin, ready) = (Instant::now(), AtomicU64::new(0));
        let histories: Vec<History> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4u64)
                .map(|number| {
                    let (fs, directories) = (Arc::clone(&sessions[number as usize % 2]), directories.clone());
                    let mut worker = Worker {
                        fs,
                        directories,
                        open: Vec::new(),
                        ways: HashMap::new(),
                        random: Random::new(seed * 4 + number),
                    };
                    let ready = &ready;
                    scope.spawn(move || {
                        ready.fetch_add(1, Ordering::SeqCst);
                        while ready.load(Ordering::SeqCst) < 4 {
                            std::hint::spin_loop();
                        }
                        let now = || begin.elapsed().as_nanos() as u64;
                        let history = (0..OPERATIONS).map(|_| {
                            let operation = worker.draw();
                            let called = now();
                            let answer = worker.make(&operation);
                            Event { called, returned: now(), operation, answer }
                        });
                        let history: History = history.collect();
                        worker.open.iter().for_each(|file| worker.fs.close(*file));
                        history
                    })
                })
                .collect();
            if kills {
                std::thread::sleep(Duration::from_micros(Random::new(seed).below(2000)));
                site.kill();
                site.start();
            }
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        for session in &sessions {
            let mut end = Picture::new();
            picture(session, directories[0], "", &mut end);
            if let Err(found) = check(&histories, &end) {
                panic!("seed {seed}: {found}");
            }
            directories.iter().for_each(|id| session.close(*id));
        }
    }
    sessions.iter().for_each(|session| session.close_session());
    site.check();
}
