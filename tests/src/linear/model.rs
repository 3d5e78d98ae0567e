//! The reference for workers: directories, names, links and contents, nothing else.

use std::collections::BTreeMap;

use rustix::io::Errno;

use super::operation::{Answer, DIRECTORIES, EntryName, Move, NAMES, Operation};

/// The target of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A directory, by its number in the model.
    Directory(usize),
    /// A file, by its inode number.
    File(u64),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Directory {
    entries: [Option<Target>; NAMES.len()],
    /// `None` for the round's own directory, which no worker moves.
    parent: Option<usize>,
    is_removed: bool,
    was_moved: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    content: Vec<u8>,
    links: u32,
}

/// The target of one path, as seen from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A directory.
    Directory,
    /// A file: inode number, links, content as answers show it.
    File(u64, u32, String),
}

/// The content of a round's directory, by path.
pub type Picture = BTreeMap<String, Seen>;

/// A state of the reference file system.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Model {
    directories: Vec<Directory>,
    files: BTreeMap<u64, File>,
}

/// How far an operation of several steps has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Progress {
    /// It has done nothing yet.
    #[default]
    Begun,
    /// A name was looked up, and led here.
    Found(Target),
    /// A listing has read these names in the state that it shows.
    Listed(u8),
}

type Result<T = ()> = std::result::Result<T, Errno>;

impl Default for Model {
    fn default() -> Self {
        let mut model = Self { directories: vec![Directory::default()], files: BTreeMap::new() };
        for (directory, name) in DIRECTORIES {
            // The places differ, so none is taken.
            let _ = model.make_directory(EntryName(directory, name));
        }
        model
    }
}

impl Model {
    /// The states after one more step of an operation that gave `answer`, and how far it is then; `None` if it's done.
    /// Returns no state if the operation can't have given that answer now.
    #[must_use]
    pub fn step(&self, operation: &Operation, answer: &Answer, progress: Progress) -> Vec<(Self, Option<Progress>)> {
        let mut steps = Vec::new();
        if self.may_be_stale(operation, answer) {
            return vec![(self.clone(), None)];
        }
        match (operation, progress) {
            (Operation::List(directory), progress) => steps.extend(self.list(*directory, answer, progress)),
            (Operation::Stat(place), Progress::Begun) => match self.look_up(*place) {
                None if *answer == error(Errno::NOENT) => steps.push((self.clone(), None)),
                None => {}
                Some(node) => steps.push((self.clone(), Some(Progress::Found(node)))),
            },
            (Operation::Stat(_), Progress::Found(node)) if self.attributes(node) == *answer => {
                steps.push((self.clone(), None));
            }
            (Operation::Link(from, _), Progress::Begun) => match self.look_up(*from) {
                None if *answer == error(Errno::NOENT) => steps.push((self.clone(), None)),
                None => {}
                Some(node) => steps.push((self.clone(), Some(Progress::Found(node)))),
            },
            (Operation::Link(_, to), Progress::Found(node)) => {
                let mut after = self.clone();
                // If several reasons apply, the answer may name any of them.
                let refused = match node {
                    Target::Directory(_) => *answer == error(Errno::PERM),
                    Target::File(file) => *answer == error(Errno::NOENT) && self.links(file) == 0,
                };
                if refused || answer_of(after.link(node, *to)) == *answer {
                    steps.push((after, None));
                }
            }
            (Operation::Rename(from, to, how), Progress::Begun) => {
                let mut after = self.clone();
                if answer_of(after.rename(*from, *to, *how)) == *answer {
                    steps.push((after, None));
                }
                let needs_two_looks = matches!(answer, Answer::Done) || *answer != error(Errno::NOENT);
                if let Some(node) = self.look_up(*from).filter(|_| needs_two_looks) {
                    steps.push((self.clone(), Some(Progress::Found(node))));
                }
            }
            (Operation::Rename(from, to, how), Progress::Found(node)) => {
                let same = self.look_up(*to) == Some(node) && *how != Move::NoReplace && *answer == Answer::Done;
                if same || self.refusals(node, *from, *to, *how).iter().any(|errno| error(*errno) == *answer) {
                    steps.push((self.clone(), None));
                }
            }
            (_, Progress::Begun) => {
                let mut after = self.clone();
                if after.apply(operation) == *answer {
                    steps.push((after, None));
                }
            }
            _ => {}
        }
        steps
    }

    /// Makes an operation that has one step.
    fn apply(&mut self, operation: &Operation) -> Answer {
        match operation {
            Operation::MakeDirectory(place) => answer_of(self.make_directory(*place)),
            Operation::RemoveDirectory(place) => answer_of(self.remove_directory(*place)),
            Operation::Unlink(place) => answer_of(self.unlink(*place)),
            Operation::Open(place) => match self.look_up(*place) {
                None => error(Errno::NOENT),
                Some(Target::Directory(_)) => error(Errno::ISDIR),
                Some(Target::File(file)) => Answer::File(file),
            },
            Operation::Write(file, offset, text) => {
                self.write(*file, *offset, text.as_bytes());
                Answer::Done
            }
            Operation::Append(file, text) => {
                let end = self.content(*file).len();
                self.write(*file, end, text.as_bytes());
                Answer::Done
            }
            Operation::Read(file, offset, count) => {
                let content = self.content(*file);
                let end = content.len().min(offset + count);
                Answer::Text(text_of(content.get(*offset..end).unwrap_or_default()))
            }
            Operation::Truncate(file, size) => {
                self.files.entry(*file).or_default().content.resize(*size, 0);
                Answer::Done
            }
            Operation::StatOpen(file) => self.attributes(Target::File(*file)),
            // A create needs the number that its answer brings; the others take several steps.
            Operation::Create(_)
            | Operation::Rename(..)
            | Operation::Link(..)
            | Operation::Stat(_)
            | Operation::List(_) => error(Errno::NOSYS),
        }
    }

    /// The states after an exclusive create that gave `answer`: only the answer names the number of the new file.
    #[must_use]
    pub fn step_create(&self, place: EntryName, answer: &Answer) -> Option<Self> {
        let mut after = self.clone();
        if self.may_be_stale(&Operation::Create(place), answer) {
            return Some(after);
        }
        match (self.may_make(place), answer) {
            (Ok(()), Answer::File(file)) if !self.files.contains_key(file) => {
                after.directories[place.0].entries[place.1] = Some(Target::File(*file));
                after.files.insert(*file, File { content: Vec::new(), links: 1 });
                Some(after)
            }
            (Err(refused), answer) if *answer == error(refused) => Some(after),
            _ => None,
        }
    }

    fn look_up(&self, EntryName(directory, name): EntryName) -> Option<Target> {
        self.directories[directory].entries[name]
    }

    fn content(&self, file: u64) -> &[u8] {
        self.files.get(&file).map_or(&[], |file| &file.content)
    }

    fn links(&self, file: u64) -> u32 {
        self.files.get(&file).map_or(0, |file| file.links)
    }

    fn write(&mut self, file: u64, offset: usize, bytes: &[u8]) {
        let content = &mut self.files.entry(file).or_default().content;
        content.resize(content.len().max(offset + bytes.len()), 0);
        content[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn attributes(&self, node: Target) -> Answer {
        match node {
            Target::Directory(_) => Answer::Directory,
            Target::File(number) => Answer::Attributes(number, self.content(number).len(), self.links(number)),
        }
    }

    fn may_make(&self, place: EntryName) -> Result {
        if self.directories[place.0].is_removed {
            return Err(Errno::NOENT);
        }
        if self.look_up(place).is_some() { Err(Errno::EXIST) } else { Ok(()) }
    }

    fn make_directory(&mut self, place: EntryName) -> Result {
        self.may_make(place)?;
        let number = self.directories.len();
        self.directories.push(Directory { parent: Some(place.0), ..Directory::default() });
        self.directories[place.0].entries[place.1] = Some(Target::Directory(number));
        Ok(())
    }

    fn is_empty(&self, directory: usize) -> bool {
        self.directories[directory].entries.iter().all(Option::is_none)
    }

    fn remove_directory(&mut self, place: EntryName) -> Result {
        match self.look_up(place).ok_or(Errno::NOENT)? {
            Target::File(_) => Err(Errno::NOTDIR),
            Target::Directory(number) if !self.is_empty(number) => Err(Errno::NOTEMPTY),
            node => {
                self.drop_node(node);
                self.directories[place.0].entries[place.1] = None;
                Ok(())
            }
        }
    }

    fn unlink(&mut self, place: EntryName) -> Result {
        match self.look_up(place).ok_or(Errno::NOENT)? {
            Target::Directory(_) => Err(Errno::ISDIR),
            node => {
                self.drop_node(node);
                self.directories[place.0].entries[place.1] = None;
                Ok(())
            }
        }
    }

    /// Releases the target of a removed name.
    fn drop_node(&mut self, node: Target) {
        match node {
            Target::Directory(number) => self.directories[number].is_removed = true,
            Target::File(number) => {
                if let Some(file) = self.files.get_mut(&number) {
                    file.links -= 1;
                }
            }
        }
    }

    fn link(&mut self, node: Target, to: EntryName) -> Result {
        self.may_make(to)?;
        let Target::File(number) = node else { return Err(Errno::PERM) };
        let file = self.files.get_mut(&number).filter(|file| file.links > 0).ok_or(Errno::NOENT)?;
        file.links += 1;
        self.directories[to.0].entries[to.1] = Some(node);
        Ok(())
    }

    fn rename(&mut self, from: EntryName, to: EntryName, how: Move) -> Result {
        let node = self.look_up(from).ok_or(Errno::NOENT)?;
        if self.directories[to.0].is_removed {
            return Err(Errno::NOENT);
        }
        let target = self.look_up(to);
        if target == Some(node) && how != Move::NoReplace {
            return Ok(());
        }
        if let Some(refused) = self.refusals(node, from, to, how).first() {
            return Err(*refused);
        }
        match (target, how) {
            (Some(Target::Directory(number)), Move::Replace) if !self.is_empty(number) => return Err(Errno::NOTEMPTY),
            (Some(target), Move::Replace) => self.drop_node(target),
            _ => {}
        }
        self.directories[from.0].entries[from.1] = target.filter(|_| how == Move::Exchange);
        self.directories[to.0].entries[to.1] = Some(node);
        for (moved, parent) in [(Some(node), to.0), (target.filter(|_| how == Move::Exchange), from.0)] {
            if let Some(Target::Directory(number)) = moved {
                self.directories[number].parent = Some(parent);
                self.directories[number].was_moved = true;
            }
        }
        Ok(())
    }

    /// The errors with which a rename of `node` may be refused because of the new name and the directories above it.
    /// The old name is not resolved for that. If several reasons apply, the answer may name any of them.
    fn refusals(&self, node: Target, from: EntryName, to: EntryName, how: Move) -> Vec<Errno> {
        let target = self.look_up(to);
        let is_above = |node: Option<Target>, directory: usize| matches!(node, Some(Target::Directory(number)) if self.is_within(directory, number));
        let reasons = [
            (how == Move::NoReplace && target.is_some(), Errno::EXIST),
            (how == Move::Exchange && target.is_none(), Errno::NOENT),
            (is_above(Some(node), to.0), Errno::INVAL),
            (is_above(target, from.0), if how == Move::Exchange { Errno::INVAL } else { Errno::NOTEMPTY }),
            (
                how == Move::Replace && matches!((node, target), (Target::Directory(_), Some(Target::File(_)))),
                Errno::NOTDIR,
            ),
            (
                how == Move::Replace && matches!((node, target), (Target::File(_), Some(Target::Directory(_)))),
                Errno::ISDIR,
            ),
        ];
        reasons.into_iter().filter(|(applies, _)| *applies).map(|(_, errno)| errno).collect()
    }

    /// Whether a kernel may take a directory for one above another: it stood there before it was moved, or a directory
    /// above it was. A process that works in an open directory does not look up its new place.
    fn may_seem_above(&self, node: Option<Target>, directory: usize) -> bool {
        let mut at = Some(directory);
        while let Some(number) = at {
            if self.directories[number].was_moved {
                return matches!(node, Some(Target::Directory(_)));
            }
            at = self.directories[number].parent;
        }
        false
    }

    /// Whether an answer may come from a kernel that does not know of another mount's move.
    ///
    /// The kernel of one mount learns that another has moved a directory only when it looks the new name up. That
    /// look-up may fail, and then nothing has happened. It fails with `ESTALE` if the kernel can't move its own entry
    /// at that moment, as in the middle of a rename. It fails with `ELOOP` if the kernel would have to put a directory
    /// below itself first. Until then the kernel may also refuse a rename for a former cycle. Every network file system
    /// has that: the kernel alone knows these entries.
    fn may_be_stale(&self, operation: &Operation, answer: &Answer) -> bool {
        let places = match operation {
            Operation::Rename(from, to, _) | Operation::Link(from, to) => vec![*from, *to],
            Operation::Create(place)
            | Operation::Open(place)
            | Operation::MakeDirectory(place)
            | Operation::RemoveDirectory(place)
            | Operation::Unlink(place)
            | Operation::Stat(place) => vec![*place],
            _ => Vec::new(),
        };
        let was_moved = |place: &EntryName| matches!(self.look_up(*place), Some(Target::Directory(number)) if self.directories[number].was_moved);
        if let Operation::Rename(from, to, how) = operation {
            let above_new = self.may_seem_above(self.look_up(*from), to.0) && *answer == error(Errno::INVAL);
            let errno = if *how == Move::Exchange { Errno::INVAL } else { Errno::NOTEMPTY };
            if above_new || self.may_seem_above(self.look_up(*to), from.0) && *answer == error(errno) {
                return true;
            }
        }
        is_stale(answer) && places.iter().any(was_moved)
    }

    /// Whether a directory is another, or below it.
    fn is_within(&self, directory: usize, other: usize) -> bool {
        let mut at = Some(directory);
        while let Some(number) = at {
            if number == other {
                return true;
            }
            at = self.directories[number].parent;
        }
        false
    }

    /// Reads once all names of a directory that are now as the listing shows them. POSIX lets a listing read each name
    /// at a moment of its own.
    fn list(&self, directory: usize, answer: &Answer, progress: Progress) -> Option<(Self, Option<Progress>)> {
        let all = (1 << NAMES.len()) - 1;
        let before = if let Progress::Listed(seen) = progress { seen } else { 0 };
        let shown = match answer {
            Answer::Names(names) => *names,
            Answer::Error(_) if *answer == error(Errno::NOENT) && self.directories[directory].is_removed => {
                return Some((self.clone(), None));
            }
            _ => return None,
        };
        let is_so = |name: usize| self.look_up(EntryName(directory, name)).is_some() == (shown >> name & 1 == 1);
        let seen = (0..NAMES.len()).filter(|&name| is_so(name)).fold(before, |seen, name| seen | 1 << name);
        match seen {
            seen if seen == all => Some((self.clone(), None)),
            seen if seen != before => Some((self.clone(), Some(Progress::Listed(seen)))),
            _ => None,
        }
    }

    /// The visible state.
    #[must_use]
    pub fn picture(&self) -> Picture {
        let mut picture = Picture::new();
        self.draw(0, "", &mut picture);
        picture
    }

    fn draw(&self, directory: usize, above: &str, picture: &mut Picture) {
        for (name, node) in NAMES.iter().zip(self.directories[directory].entries) {
            let path = format!("{above}{name}");
            match node {
                None => {}
                Some(Target::Directory(number)) => {
                    self.draw(number, &format!("{path}/"), picture);
                    picture.insert(path, Seen::Directory);
                }
                Some(Target::File(number)) => {
                    picture.insert(path, Seen::File(number, self.links(number), text_of(self.content(number))));
                }
            }
        }
    }
}

/// Whether an answer comes from a kernel that could not follow a directory's move.
#[must_use]
pub fn is_stale(answer: &Answer) -> bool {
    [Errno::STALE, Errno::LOOP].iter().any(|errno| error(*errno) == *answer)
}

/// An error as an answer.
#[must_use]
pub fn error(errno: Errno) -> Answer {
    Answer::Error(errno.raw_os_error())
}

fn answer_of(result: Result) -> Answer {
    result.map_or_else(error, |()| Answer::Done)
}

/// Bytes as answers show them.
#[must_use]
pub fn text_of(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| if byte == 0 { '.' } else { byte as char }).collect()
}
