//! The operations, and their effects on a tree: the reference for the file system.

use std::collections::BTreeMap;

use crate::random::Random;
use crate::tree::{Node, Tree, WHITEOUT};

/// Names in one directory: few, so that renames and links meet others.
const NAMES: u64 = 12;
/// Files stay below this size.
const FILE_BYTES_MAX: usize = 192 << 10;
/// A write stays below the size that the kernel passes on in one request.
const WRITE_BYTES_MAX: u64 = 48 << 10;
/// The kernel's unit of cached file content.
const PAGE_BYTES: usize = 4096;
/// Entries in the whole tree; with more, more are removed than made.
const ENTRIES_MAX: usize = 60;

/// One operation, with paths below the workload's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Makes an empty file.
    Create(String, u32),
    /// Writes the bytes that a seed names, at an offset.
    Write(String, usize, usize, u64),
    /// Writes them at the end.
    Append(String, usize, u64),
    /// Sets the size.
    Truncate(String, usize),
    /// Renames, and replaces any node at the new name.
    Rename(String, String),
    /// Renames, and leaves a whiteout at the old name.
    RenameAndLeave(String, String),
    /// Exchanges two names.
    Exchange(String, String),
    /// Makes another name for a file.
    Link(String, String),
    /// Makes a symbolic link.
    Symlink(String, String),
    /// Removes a name.
    Unlink(String),
    /// Makes a directory.
    MakeDirectory(String, u32),
    /// Removes an empty directory.
    RemoveDirectory(String),
    /// Sets permission bits.
    Chmod(String, u32),
    /// Makes everything before it durable.
    Fsync(String),
}

/// The bytes that a seed names.
#[must_use]
pub fn bytes(seed: u64, count: usize) -> Vec<u8> {
    Random::new(seed).bytes(count)
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct File {
    content: Vec<u8>,
    mode: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Directory(u32),
    File(u64),
    Symlink(String),
    Whiteout,
}

/// A tree as the operations leave it.
#[derive(Clone, Debug, Default)]
pub struct Model {
    entries: BTreeMap<String, Entry>,
    files: BTreeMap<u64, File>,
    next_file: u64,
}

impl Model {
    /// The model of an existing tree. `None` if the tree holds a node that no workload makes.
    #[must_use]
    pub fn from_tree(tree: &Tree) -> Option<Self> {
        let mut model = Self::default();
        let mut numbers = BTreeMap::new();
        for (path, node) in tree {
            let entry = match node {
                Node::Directory(mode) => Entry::Directory(*mode),
                Node::Symlink(target) => Entry::Symlink(String::from_utf8(target.clone()).ok()?),
                Node::File { content, mode, first_name } => {
                    let number = *numbers.entry(first_name.clone()).or_insert_with(|| {
                        model.next_file += 1;
                        model.next_file
                    });
                    model.files.insert(number, File { content: content.clone(), mode: *mode });
                    Entry::File(number)
                }
                Node::Other(WHITEOUT) => Entry::Whiteout,
                Node::Other(_) => return None,
            };
            model.entries.insert(path.clone(), entry);
        }
        Some(model)
    }

    /// The tree that should stand in the directory.
    #[must_use]
    pub fn tree(&self) -> Tree {
        let mut first_names = BTreeMap::new();
        let mut tree = Tree::new();
        for (path, entry) in &self.entries {
            let node = match entry {
                Entry::Directory(mode) => Node::Directory(*mode),
                Entry::Symlink(target) => Node::Symlink(target.clone().into_bytes()),
                Entry::Whiteout => Node::Other(WHITEOUT),
                Entry::File(number) => {
                    let first_name = first_names.entry(*number).or_insert_with(|| path.clone()).clone();
                    let file = &self.files[number];
                    Node::File { content: file.content.clone(), mode: file.mode, first_name }
                }
            };
            tree.insert(path.clone(), node);
        }
        tree
    }

    /// Draws an operation that succeeds on this state.
    pub fn draw(&self, random: &mut Random) -> Operation {
        loop {
            if let Some(operation) = self.try_draw(random) {
                return operation;
            }
        }
    }

    fn try_draw(&self, random: &mut Random) -> Option<Operation> {
        let files = self.names(|entry| matches!(entry, Entry::File(_)));
        let full = self.entries.len() >= ENTRIES_MAX;
        let kind = random.below(100);
        Some(match kind {
            0..14 if !full => Operation::Create(self.free_name(random)?, 0o600 + (random.below(64) as u32)),
            14..34 => {
                let (name, length) = self.file_of(random, &files)?;
                let offset = random.below(length as u64 + 5000) as usize;
                let count = 1 + random.below(WRITE_BYTES_MAX) as usize;
                (offset + count <= FILE_BYTES_MAX).then(|| Operation::Write(name, offset, count, random.draw()))?
            }
            34..48 => {
                let (name, length) = self.file_of(random, &files)?;
                let count = 1 + random.below(WRITE_BYTES_MAX / 4) as usize;
                (length + count <= FILE_BYTES_MAX).then(|| Operation::Append(name, count, random.draw()))?
            }
            48..53 => {
                let (name, length) = self.file_of(random, &files)?;
                Operation::Truncate(name, random.below(length as u64 * 2 + 10) as usize % FILE_BYTES_MAX)
            }
            53..65 => self.draw_rename(random)?,
            65..69 if !full => Operation::Link((*random.pick(&files)?).clone(), self.free_name(random)?),
            69..71 if !full => Operation::Symlink(format!("to{}", random.below(100)), self.free_name(random)?),
            71..80 => {
                let names = self.names(|entry| !matches!(entry, Entry::Directory(_)));
                Operation::Unlink((*random.pick(&names)?).clone())
            }
            80..85 if !full => Operation::MakeDirectory(self.free_name(random)?, 0o700 + (random.below(64) as u32)),
            85..88 => {
                let directories = self.names(|entry| matches!(entry, Entry::Directory(_)));
                let name = random.pick(&directories)?;
                self.is_empty(name).then(|| Operation::RemoveDirectory((*name).clone()))?
            }
            88..92 => Operation::Chmod((*random.pick(&files)?).clone(), 0o600 + (random.below(64) as u32)),
            92..100 => Operation::Fsync((*random.pick(&files)?).clone()),
            _ => return None,
        })
    }

    fn draw_rename(&self, random: &mut Random) -> Option<Operation> {
        let names = self.names(|_| true);
        let from = (*random.pick(&names)?).clone();
        if random.below(4) == 0 {
            let to = (*random.pick(&names)?).clone();
            let apart = from != to && !is_below(&from, &to) && !is_below(&to, &from);
            return apart.then_some(Operation::Exchange(from, to));
        }
        let to = self.any_name(random)?;
        if from == to || is_below(&to, &from) || is_below(&from, &to) {
            return None;
        }
        let fits = match (self.entries.get(&from)?, self.entries.get(&to)) {
            (_, None) => true,
            (Entry::Directory(_), Some(Entry::Directory(_))) => self.is_empty(&to),
            (Entry::Directory(_), Some(_)) | (_, Some(Entry::Directory(_))) => false,
            // Renaming one name of a file to another name of it does nothing, as POSIX says.
            (a, Some(b)) => a != b,
        };
        let leaves = random.below(3) == 0 && self.entries.len() < ENTRIES_MAX;
        fits.then_some(if leaves { Operation::RenameAndLeave(from, to) } else { Operation::Rename(from, to) })
    }

    /// Performs an operation that [`Model::draw`] has drawn on this state.
    pub fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Create(path, mode) => {
                self.next_file += 1;
                self.files.insert(self.next_file, File { content: Vec::new(), mode: *mode });
                self.entries.insert(path.clone(), Entry::File(self.next_file));
            }
            Operation::Write(path, offset, count, seed) => self.write(path, *offset, *count, *seed),
            Operation::Append(path, count, seed) => {
                let end = self.file(path).map_or(0, |file| file.content.len());
                self.write(path, end, *count, *seed);
            }
            Operation::Truncate(path, size) => self.change(path, |file| file.content.resize(*size, 0)),
            Operation::Chmod(path, mode) => self.change(path, |file| file.mode = *mode),
            Operation::Link(path, name) => {
                if let Some(entry) = self.entries.get(path).cloned() {
                    self.entries.insert(name.clone(), entry);
                }
            }
            Operation::Symlink(target, path) => {
                self.entries.insert(path.clone(), Entry::Symlink(target.clone()));
            }
            Operation::MakeDirectory(path, mode) => {
                self.entries.insert(path.clone(), Entry::Directory(*mode));
            }
            Operation::Unlink(path) | Operation::RemoveDirectory(path) => {
                self.entries.remove(path);
            }
            Operation::Rename(from, to) => self.rename(from, to),
            Operation::RenameAndLeave(from, to) => {
                self.rename(from, to);
                self.entries.insert(from.clone(), Entry::Whiteout);
            }
            Operation::Exchange(a, b) => {
                let (first, second) = (self.take(a), self.take(b));
                self.put(b, first);
                self.put(a, second);
            }
            Operation::Fsync(_) => {}
        }
    }

    /// The states after a write that is done up to the end of a page, and not whole.
    #[must_use]
    pub fn pieces(&self, operation: &Operation) -> Vec<Self> {
        let (path, offset, count, seed) = match operation {
            Operation::Write(path, offset, count, seed) => (path, *offset, *count, *seed),
            Operation::Append(path, count, seed) => {
                (path, self.file(path).map_or(0, |it| it.content.len()), *count, *seed)
            }
            _ => return Vec::new(),
        };
        let ends = (offset / PAGE_BYTES + 1..).map(|page| page * PAGE_BYTES).take_while(|end| *end < offset + count);
        ends.map(|end| {
            let mut piece = self.clone();
            piece.write_part(path, offset, &bytes(seed, count)[..end - offset]);
            piece
        })
        .collect()
    }

    fn rename(&mut self, from: &str, to: &str) {
        self.entries.remove(to);
        let moved = self.take(from);
        self.put(to, moved);
    }

    fn write(&mut self, path: &str, offset: usize, count: usize, seed: u64) {
        self.write_part(path, offset, &bytes(seed, count));
    }

    fn write_part(&mut self, path: &str, offset: usize, data: &[u8]) {
        self.change(path, |file| {
            if file.content.len() < offset + data.len() {
                file.content.resize(offset + data.len(), 0);
            }
            file.content[offset..offset + data.len()].copy_from_slice(data);
        });
    }

    fn change(&mut self, path: &str, with: impl FnOnce(&mut File)) {
        if let Some(Entry::File(number)) = self.entries.get(path) {
            if let Some(file) = self.files.get_mut(number) {
                with(file);
            }
        }
    }

    fn file(&self, path: &str) -> Option<&File> {
        match self.entries.get(path)? {
            Entry::File(number) => self.files.get(number),
            _ => None,
        }
    }

    /// Takes out a name and all names below it, with paths relative to it.
    fn take(&mut self, path: &str) -> Vec<(String, Entry)> {
        let names: Vec<_> = self.entries.keys().filter(|name| *name == path || is_below(name, path)).cloned().collect();
        names
            .into_iter()
            .filter_map(|name| Some((name[path.len()..].to_owned(), self.entries.remove(&name)?)))
            .collect()
    }

    fn put(&mut self, path: &str, taken: Vec<(String, Entry)>) {
        self.entries.extend(taken.into_iter().map(|(below, entry)| (format!("{path}{below}"), entry)));
    }

    fn names(&self, which: impl Fn(&Entry) -> bool) -> Vec<&String> {
        self.entries.iter().filter(|(_, entry)| which(entry)).map(|(name, _)| name).collect()
    }

    fn file_of(&self, random: &mut Random, files: &[&String]) -> Option<(String, usize)> {
        let name = (*random.pick(files)?).clone();
        let length = self.file(&name)?.content.len();
        Some((name, length))
    }

    fn any_name(&self, random: &mut Random) -> Option<String> {
        let mut directories = self.names(|entry| matches!(entry, Entry::Directory(_)));
        let root = String::new();
        directories.push(&root);
        let directory = *random.pick(&directories)?;
        // Two levels are enough for moves between levels.
        if directory.matches('/').count() >= 2 {
            return None;
        }
        let name = format!("n{}", random.below(NAMES));
        Some(if directory.is_empty() { name } else { format!("{directory}/{name}") })
    }

    fn free_name(&self, random: &mut Random) -> Option<String> {
        self.any_name(random).filter(|name| !self.entries.contains_key(name))
    }

    fn is_empty(&self, directory: &str) -> bool {
        !self.entries.keys().any(|name| is_below(name, directory))
    }
}

fn is_below(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_draws_every_operation_reproducibly() {
        let run = |seed| {
            let (mut model, mut random, mut drawn) = (Model::default(), Random::new(seed), Vec::new());
            for _ in 0..3000 {
                let operation = model.draw(&mut random);
                model.apply(&operation);
                drawn.push(operation);
            }
            (drawn, model.tree())
        };
        let (drawn, tree) = run(7);
        assert_eq!((&drawn, &tree), (&run(7).0, &run(7).1));
        let kinds: std::collections::BTreeSet<_> =
            drawn.iter().map(|operation| format!("{operation:?}").split('(').next().map(str::to_owned)).collect();
        assert_eq!(kinds.len(), 14, "{kinds:?}");
    }

    #[test]
    fn partial_write_ends_at_page_boundary() {
        let mut model = Model::default();
        model.apply(&Operation::Create("f".into(), 0o600));
        model.apply(&Operation::Write("f".into(), 0, 100, 1));
        let pieces = model.pieces(&Operation::Write("f".into(), 4000, 9000, 2));
        let sizes: Vec<_> = pieces.iter().map(|piece| piece.file("f").map_or(0, |file| file.content.len())).collect();
        assert_eq!(sizes, [4096, 8192, 12288]);
        assert!(model.pieces(&Operation::Append("f".into(), 3996, 2)).is_empty(), "it ends where the page does");
    }

    #[test]
    fn model_from_tree_equals_model() {
        let (mut model, mut random) = (Model::default(), Random::new(3));
        for _ in 0..1000 {
            let operation = model.draw(&mut random);
            model.apply(&operation);
        }
        let tree = model.tree();
        assert_eq!(Model::from_tree(&tree).expect("a model").tree(), tree);
    }
}
