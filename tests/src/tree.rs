//! Reads the content of a directory, and compares it with an expectation.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::{Outcome, tried};

/// The kind of node that a rename has left at the old name.
pub const WHITEOUT: &str = "whiteout";

/// One name in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A directory, with its permission bits.
    Directory(u32),
    /// A file: content, permission bits, and the first name (in order) that leads to the same inode.
    File {
        /// Content.
        content: Vec<u8>,
        /// Permission bits.
        mode: u32,
        /// The first of its names.
        first_name: String,
    },
    /// A symbolic link, with its target.
    Symlink(Vec<u8>),
    /// Anything else, by its kind.
    Other(&'static str),
}

/// A directory's tree, by path below it.
pub type Tree = BTreeMap<String, Node>;

/// Reads all of a tree.
pub fn read(root: &Path) -> Outcome<Tree> {
    let mut tree = Tree::new();
    let mut inodes = BTreeMap::new();
    read_into(root, "", &mut tree)?;
    // First names follow the order of names, whatever the order of the directory was.
    let files: Vec<_> =
        tree.iter().filter(|(_, node)| matches!(node, Node::File { .. })).map(|(name, _)| name.clone()).collect();
    for name in files {
        let inode = fs::symlink_metadata(root.join(&name)).map_err(tried(format!("stat {name}")))?.ino();
        let first: &String = inodes.entry(inode).or_insert_with(|| name.clone());
        if let Some(Node::File { first_name, .. }) = tree.get_mut(&name) {
            first_name.clone_from(first);
        }
    }
    Ok(tree)
}

fn read_into(root: &Path, below: &str, tree: &mut Tree) -> Outcome {
    let directory = root.join(below);
    for entry in fs::read_dir(&directory).map_err(tried(format!("listing {}", directory.display())))? {
        let entry = entry.map_err(tried(format!("listing {}", directory.display())))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        let metadata = entry.metadata().map_err(tried(format!("stat {path}")))?;
        let mode = metadata.mode() & 0o7777;
        let kind = metadata.file_type();
        let node = if kind.is_dir() {
            read_into(root, &path, tree)?;
            Node::Directory(mode)
        } else if kind.is_symlink() {
            Node::Symlink(
                fs::read_link(entry.path()).map_err(tried(format!("readlink {path}")))?.as_os_str().as_bytes().to_vec(),
            )
        } else if kind.is_file() {
            let content = fs::read(entry.path()).map_err(tried(format!("reading {path}")))?;
            if content.len() as u64 != metadata.len() {
                return Err(format!("{path} has {} bytes by stat and {} by read", metadata.len(), content.len()));
            }
            Node::File { content, mode, first_name: String::new() }
        } else {
            Node::Other(match (kind.is_fifo(), kind.is_char_device()) {
                (true, _) => "fifo",
                (_, true) if metadata.rdev() == 0 && mode == 0 => WHITEOUT,
                _ => "special",
            })
        };
        if tree.insert(path.clone(), node).is_some() {
            return Err(format!("{path} is listed twice"));
        }
    }
    Ok(())
}

/// The first difference between two trees, in words; `None` if they are equal.
pub fn difference(expected: &Tree, found: &Tree) -> Option<String> {
    differences(expected, found).into_iter().next()
}

/// All differences between two trees, in words.
pub fn differences(expected: &Tree, found: &Tree) -> Vec<String> {
    let lacking = expected.iter().filter_map(|(path, node)| match found.get(path) {
        None => Some(format!("{path} is missing")),
        Some(other) if other != node => Some(format!("{path}: {}", node_difference(node, other))),
        Some(_) => None,
    });
    let beyond = found.keys().filter(|path| !expected.contains_key(*path));
    lacking.chain(beyond.map(|path| format!("{path} should not be there"))).collect()
}

fn node_difference(expected: &Node, found: &Node) -> String {
    let (Node::File { content: a, mode: m, first_name: f }, Node::File { content: b, mode: n, first_name: g }) =
        (expected, found)
    else {
        return format!("expected {}, found {}", kind(expected), kind(found));
    };
    if a.len() != b.len() {
        return format!("expected {} bytes, found {}", a.len(), b.len());
    }
    if let Some(at) = a.iter().zip(b).position(|(x, y)| x != y) {
        let wrong = a.iter().zip(b).filter(|(x, y)| x != y).count();
        return format!("differs from byte {at} on, in {wrong} of {} bytes", a.len());
    }
    if m == n { format!("linked with {g}, expected with {f}") } else { format!("expected mode {m:o}, found {n:o}") }
}

fn kind(node: &Node) -> String {
    match node {
        Node::Directory(mode) => format!("a directory of mode {mode:o}"),
        Node::File { content, .. } => format!("a file of {} bytes", content.len()),
        Node::Symlink(target) => format!("a link to {}", String::from_utf8_lossy(target)),
        Node::Other(kind) => (*kind).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_names_every_kind() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path();
        fs::create_dir(root.join("d")).expect("made");
        fs::write(root.join("d/f"), b"abc").expect("made");
        fs::hard_link(root.join("d/f"), root.join("g")).expect("linked");
        let before = read(root).expect("read");
        assert_eq!(difference(&before, &before), None);
        fs::write(root.join("g"), b"abd").expect("changed");
        let changed = read(root).expect("read");
        assert!(difference(&before, &changed).expect("seen").contains("differs from byte 2 on, in 1 of 3 bytes"));
        fs::remove_file(root.join("g")).expect("removed");
        fs::write(root.join("g"), b"abd").expect("a file of its own");
        assert!(difference(&changed, &read(root).expect("read")).expect("seen").contains("linked with"));
        fs::remove_file(root.join("g")).expect("removed");
        assert!(difference(&changed, &read(root).expect("read")).expect("seen").contains("g is missing"));
        assert!(difference(&Tree::new(), &changed).expect("seen").contains("should not be there"));
    }
}
