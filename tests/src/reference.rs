//! The file system that Ashlar is compared with.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::command::run;
use crate::{Outcome, tried};

/// A fresh ext4 in a file, mounted; where loop devices can't be had, a directory of the host's file system.
#[derive(Debug)]
pub struct Reference {
    directory: TempDir,
    mounted: bool,
}

impl Reference {
    /// Makes it.
    pub fn new(megabytes: u64) -> Outcome<Self> {
        let directory = TempDir::with_prefix("ashlar-reference-").map_err(tried("making a directory"))?;
        let image = directory.path().join("image");
        let file = std::fs::File::create(&image).map_err(tried("making an image"))?;
        file.set_len(megabytes << 20).map_err(tried("making an image"))?;
        let mut reference = Self { directory, mounted: false };
        let point = reference.path();
        std::fs::create_dir(&point).map_err(tried("making a directory"))?;
        let made = run(Command::new("mkfs.ext4").args(["-q", "-F", "-I", "256"]).arg(&image))?;
        if made.status.success() {
            let mount = run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point))?;
            reference.mounted = mount.status.success();
        }
        Ok(reference)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// What it is, for reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        if self.mounted { "ext4" } else { "the host's file system" }
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        if self.mounted {
            unmount(&self.path());
        }
    }
}

/// Unmounts whatever is there, for clearing up.
pub fn unmount(path: &Path) {
    // At the end of a test there is nobody left to tell; a mount that stays shows in the next one.
    let _ = run(Command::new("umount").arg("--lazy").arg(path));
}
