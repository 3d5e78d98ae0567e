//! Performs the workload, and records what was acknowledged.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::model::{Model, Operation, bytes};
use crate::random::Random;
use crate::{Outcome, tree, tried};

/// The journal's mark of a call that began.
pub const BEGIN: &str = "begin";
/// The journal's mark of a call that returned without an error.
pub const END: &str = "end";
/// The journal's mark of a call that failed; no call of the workload may fail.
pub const FAILED: &str = "failed";

/// Runs `count` operations in `directory`, from the state that it holds, and appends to `journal`. The journal is
/// outside the file system under test. One call writes each of its lines, so a kill leaves whole lines.
pub fn run(directory: &Path, journal: &Path, seed: u64, count: u64) -> Outcome {
    let mut model = Model::from_tree(&tree::read(directory)?).ok_or("the directory holds what no workload makes")?;
    let mut journal =
        OpenOptions::new().create(true).append(true).open(journal).map_err(tried("opening the journal"))?;
    let mut say = |words: String| journal.write_all(words.as_bytes()).map_err(tried("writing the journal"));
    let mut random = Random::new(seed);
    for number in 0..count {
        let operation = model.draw(&mut random);
        say(format!("{BEGIN} {number} {operation:?}\n"))?;
        if let Err(error) = perform(directory, &operation) {
            say(format!("{FAILED} {number} {error}\n"))?;
            return Err(format!("operation {number}, {operation:?}: {error}"));
        }
        say(format!("{END} {number}\n"))?;
        model.apply(&operation);
    }
    Ok(())
}

/// Performs one operation.
pub fn perform(root: &Path, operation: &Operation) -> std::io::Result<()> {
    let open = |path: &str| OpenOptions::new().read(true).write(true).open(root.join(path));
    match operation {
        Operation::Create(path, mode) => {
            let file = OpenOptions::new().write(true).create_new(true).mode(*mode).open(root.join(path))?;
            drop(file);
        }
        Operation::Write(path, offset, count, seed) => {
            // One call, so that it is done whole or not at all; a short count is an error.
            let data = bytes(*seed, *count);
            let written = open(path)?.write_at(&data, *offset as u64)?;
            return whole(written, *count);
        }
        Operation::Append(path, count, seed) => {
            let data = bytes(*seed, *count);
            let mut file = OpenOptions::new().append(true).open(root.join(path))?;
            return whole(file.write(&data)?, *count);
        }
        Operation::Truncate(path, size) => open(path)?.set_len(*size as u64)?,
        Operation::Rename(from, to) => fs::rename(root.join(from), root.join(to))?,
        Operation::RenameAndLeave(from, to) => {
            renameat_with(CWD, root.join(from), CWD, root.join(to), RenameFlags::WHITEOUT)?;
        }
        Operation::Exchange(a, b) => renameat_with(CWD, root.join(a), CWD, root.join(b), RenameFlags::EXCHANGE)?,
        Operation::Link(path, name) => fs::hard_link(root.join(path), root.join(name))?,
        Operation::Symlink(target, path) => std::os::unix::fs::symlink(target, root.join(path))?,
        Operation::Unlink(path) => fs::remove_file(root.join(path))?,
        Operation::MakeDirectory(path, mode) => fs::DirBuilder::new().mode(*mode).create(root.join(path))?,
        Operation::RemoveDirectory(path) => fs::remove_dir(root.join(path))?,
        Operation::Chmod(path, mode) => fs::set_permissions(root.join(path), fs::Permissions::from_mode(*mode))?,
        Operation::Fsync(path) => File::open(root.join(path))?.sync_all()?,
    }
    Ok(())
}

fn whole(written: usize, wanted: usize) -> std::io::Result<()> {
    if written == wanted { Ok(()) } else { Err(std::io::Error::other(format!("wrote {written} of {wanted} bytes"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::checker::{Bound, check};

    #[test]
    fn workload_leaves_tree_of_model() {
        rustix::process::umask(rustix::fs::Mode::empty());
        // Other temporary directories may lie on an overlay, which does not allow whiteouts.
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let (root, journal) = (directory.path().join("root"), directory.path().join("journal"));
        fs::create_dir(&root).expect("made");
        run(&root, &journal, 5, 1500).expect("it runs");
        let verdict = check(&root, &journal, &tree::Tree::new(), 5, Bound::Acknowledged).expect("nothing lost");
        assert_eq!((verdict.acknowledged, verdict.survived), (1500, 1500));
    }
}
