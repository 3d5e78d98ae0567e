//! Trees of sources: cloned, unpacked, read, removed.

use std::path::Path;
use std::process::Command;

use ashlar_tests::{Outcome, ensure, tried};

use crate::applications::job::{Measured, Turn, seconds};
use crate::applications::program;
use crate::applications::size::Size;
use crate::cases::make_archive;

/// A repository without a working tree, cloned from the one that the benchmark is started in: this one.
pub fn prepare_clone(inputs: &Path, _: Size) -> Outcome {
    // The tree may belong to another user than root, which mounts.
    let mut command = Command::new("git");
    command
        .args(["-c", "safe.directory=*", "clone", "-q", "--bare", "--no-hardlinks", "."])
        .arg(inputs.join("repository"));
    let hint = |error| format!("run it in a clone of Ashlar's repository, which the benchmark clones: {error}");
    program::time(&mut command).map(|_| ()).map_err(hint)
}

/// Runs `git clone` through git's own protocol, which links no files, then `git status`, twice.
pub fn clone(turn: &Turn) -> Outcome<Vec<Measured>> {
    let source = format!("file://{}", turn.inputs.join("repository").display());
    let (cloned, _) = turn.time(turn.command("git").args(["clone", "-q", &source, "tree"]))?;
    let mut measured = Vec::new();
    for action in ["git status of the clone", "git status again"] {
        measured.push(status(turn, action)?);
    }
    let listed = turn.output_of(turn.plainly("git").args(["-C", "tree", "ls-files"]))?.lines().count();
    let present = count_files(&turn.directory.join("tree"))?;
    ensure!(present == listed, "{listed} files are known to git, and {present} are there");
    let found = format!("{present} files");
    measured.insert(0, seconds("git clone", cloned, found));
    Ok(measured)
}

fn status(turn: &Turn, action: &str) -> Outcome<Measured> {
    let (took, said) = turn.time(turn.command("git").args(["-C", "tree", "status", "--porcelain"]))?;
    ensure!(said.is_empty(), "{action}: the tree is not as it was committed: {said}");
    Ok(seconds(action, took, "clean".into()))
}

/// An archive of a generated tree of sources that git knows.
pub fn prepare_archive(inputs: &Path, size: Size) -> Outcome {
    make_archive(inputs, size.of(15_000, 200) as usize)
}

/// Runs `tar x`, `git status` of the tree, and `rm -rf`.
pub fn untar(turn: &Turn) -> Outcome<Vec<Measured>> {
    let archive = turn.inputs.join("tree.tar");
    let (unpacked, _) = turn.time(turn.command("tar").arg("xf").arg(&archive))?;
    let first = status(turn, "git status of what was unpacked")?;
    let again = status(turn, "the same again")?;
    let files = count_files(&turn.directory.join("tree"))?;
    ensure!(files as u64 == turn.size.of(15_000, 200), "{files} files were unpacked");
    let (removed, _) = turn.time(turn.command("rm").args(["-rf", "tree"]))?;
    let left = std::fs::read_dir(&turn.directory).map_err(tried("listing"))?.count();
    ensure!(left == 0, "rm -rf has left {left} names");
    let found = format!("{files} files");
    Ok(vec![seconds("untar", unpacked, found.clone()), first, again, seconds("rm -rf", removed, found)])
}

/// Common work on trees, one command after the other.
const HANDLING: [(&str, &str); 12] = [
    ("find -type f", "find tree -type f"),
    ("grep -r", "grep -rc 7 tree"),
    ("grep -r again", "grep -rc 7 tree"),
    ("cp -r", "cp -r tree copy"),
    ("cp -a", "cp -a tree exact"),
    ("diff -r", "diff -r tree copy"),
    ("chmod -R", "chmod -R g+w copy"),
    ("chown -R", "chown -R 1:1 exact"),
    ("sed -i", "find copy -name '*.c' -print0 | xargs -0 sed -i s/^1/22/"),
    ("rsync -a", "rsync -a tree/ again"),
    ("python3, shutil.copytree", "python3 -c 'import shutil; shutil.copytree(\"tree\", \"with python\")'"),
    ("rm -rf of the copies", "rm -rf copy exact again 'with python'"),
];

/// Copies, searches, changes and removes a tree by a shell's commands.
pub fn copy(turn: &Turn) -> Outcome<Vec<Measured>> {
    let unpack = turn.output_of(turn.command("tar").arg("xf").arg(turn.inputs.join("tree.tar")))?;
    ensure!(unpack.is_empty(), "tar says {unpack}");
    let mut measured = Vec::new();
    for (action, script) in HANDLING {
        let (took, said) = turn.time(turn.command("bash").args(["-c", script]))?;
        // Names and attributes, except the current times.
        let listing = "find . -path ./tree/.git -prune -o -type f -printf '%m %U:%G %s %P\\n' | sort | cksum";
        let there = turn.output_of(turn.plainly("bash").args(["-c", listing]))?;
        let sum = there.split(' ').next().unwrap_or_default();
        measured.push(seconds(action, took, format!("{sum}, {} lines", said.lines().count())));
    }
    Ok(measured)
}

/// Regular files of a tree, without git's own.
fn count_files(directory: &Path) -> Outcome<usize> {
    let mut files = 0;
    for entry in std::fs::read_dir(directory).map_err(tried("listing"))? {
        let entry = entry.map_err(tried("listing"))?;
        let kind = entry.file_type().map_err(tried("looking at a file"))?;
        if kind.is_dir() && entry.file_name() != ".git" {
            files += count_files(&entry.path())?;
        }
        files += usize::from(!kind.is_dir());
    }
    Ok(files)
}
