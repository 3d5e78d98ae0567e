//! The file system that tests compare Ashlar with.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use crate::command::{Done, eventually, run};
use crate::{Outcome, open_directory, tried};

/// The longest time that the end of a killed process may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// EXT4_IOC_SHUTDOWN (`_IOR('X', 125, __u32)`) with EXT4_GOING_FLAGS_NOLOGFLUSH, which leaves the journal as it is.
/// Just before, the script reads the lengths of some other files.
const SHUTDOWN: &str = "import fcntl, os, struct, sys
disk = os.open(sys.argv[1], os.O_RDONLY)
lengths = [os.stat(path).st_size for path in sys.argv[2:]]
fcntl.ioctl(disk, 0x8004587d, struct.pack('I', 2))
print(*lengths)";

/// A fresh ext4 in a file, mounted. If no loop device is available, a directory of the host's file system.
#[derive(Debug)]
pub struct Reference {
    directory: TempDir,
    mounted: bool,
}

impl Reference {
    /// Makes the file system.
    pub fn new(megabytes: u64) -> Outcome<Self> {
        let directory = open_directory("ashlar-reference-")?;
        let image = directory.path().join("image");
        let file = std::fs::File::create(&image).map_err(tried("making an image"))?;
        file.set_len(megabytes << 20).map_err(tried("making an image"))?;
        let mut reference = Self { directory, mounted: false };
        let point = reference.path();
        std::fs::create_dir(&point).map_err(tried("making a directory"))?;
        let made = run(Command::new("mkfs.ext4").args(["-q", "-F", "-I", "256"]).arg(&image))?;
        if made.status.success() {
            reference.mounted = reference.mount()?.status.success();
        }
        Ok(reference)
    }

    fn mount(&self) -> Outcome<Done> {
        run(Command::new("mount").args(["-o", "loop"]).arg(self.directory.path().join("image")).arg(self.path()))
    }

    /// Why its power can't be cut; `None` if it can.
    #[must_use]
    pub fn power_cut_obstacle(&self) -> Option<String> {
        (!self.mounted).then(|| "no loop device to be had, on which power could be cut".to_owned())
    }

    /// Stops all writes to the medium: unwritten data is lost, and every sync fails, except those that were under way.
    /// Returns the lengths of `watched`, files elsewhere, just before.
    pub fn cut_power(&self, watched: &[&Path]) -> Outcome<Vec<usize>> {
        let done = run(Command::new("python3").args(["-c", SHUTDOWN]).arg(self.path()).args(watched))?.success()?;
        done.output.split_whitespace().map(|length| length.parse().map_err(tried("reading a length"))).collect()
    }

    /// Turns the power on again: recovers the file system from the medium. No process may use it.
    pub fn restore_power(&mut self) -> Outcome {
        // Processes that were killed just now may still be freeing their memory.
        let umount = || run(Command::new("umount").arg(self.path()));
        eventually("the disk is not in use", PATIENCE, || umount().is_ok_and(|done| done.status.success()))?;
        self.mounted = false;
        self.mount()?.success()?;
        self.mounted = true;
        Ok(())
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    /// A description for reports.
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

/// Unmounts any mount at `path`, to clean up.
pub fn unmount(path: &Path) {
    // At the end of a test no code reads an error; a mount that stays shows in the next test.
    let _ = run(Command::new("umount").arg("--lazy").arg(path));
}
