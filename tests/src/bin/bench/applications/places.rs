//! The places where jobs run.

use std::path::{Path, PathBuf};

use ashlar_tests::mount::{Front, Medium, TestArena};
use ashlar_tests::{Outcome, tried};
use tempfile::TempDir;

use super::size::Size;

/// Room for every job.
const ARENA: &str = "3G";

/// A directory to work in, and the way that programs reach it.
#[derive(Debug)]
pub struct JobPlace {
    /// Its name in the table.
    pub name: &'static str,
    /// Its description for people.
    pub description: String,
    /// The directory.
    pub root: PathBuf,
    /// The way that programs reach the place.
    pub front: Front,
}

/// All of them.
#[derive(Debug)]
pub struct JobPlaces {
    all: Vec<JobPlace>,
    sites: [TestArena; 2],
    size: Size,
    _directories: [TempDir; 2],
}

impl JobPlaces {
    /// Makes the places. There are two Ashlars: for half a minute after another session, a mount's kernel keeps no
    /// names, and a program on a sole mount must be measured as that.
    pub fn mounted(medium: Medium, disk: &Path, size: Size) -> Outcome<Self> {
        let directory = |below: &Path| {
            let made = TempDir::with_prefix_in("ashlar-bench-", below);
            made.map_err(tried(format!("making a directory in {}", below.display())))
        };
        let directories = [directory(disk)?, directory(Path::new("/dev/shm"))?];
        let sites = [TestArena::mounted(medium, ARENA)?, TestArena::mounted(medium, ARENA)?];
        let arena = match medium {
            Medium::Memory => "an arena in memory".to_owned(),
            Medium::Disk => format!("an arena on {}", file_system(sites[0].arena())?),
        };
        let [on_disk, in_memory] = directories.each_ref().map(|directory| directory.path().to_owned());
        let place = |name, description, root, front| JobPlace { name, description, root, front };
        let all = vec![
            place("disk", format!("{} ({})", file_system(&on_disk)?, disk.display()), on_disk.clone(), Front::Mount),
            place("tmpfs", file_system(&in_memory)?, in_memory.clone(), Front::Mount),
            place("FUSE", format!("Ashlar through its mount, {arena}"), sites[0].point(0), Front::Mount),
            place("run", format!("Ashlar under 'ashlar run', {arena} of its own"), sites[1].point(0), Front::Run),
        ];
        Ok(Self { all, sites, size, _directories: directories })
    }

    /// All places in the order of the table.
    pub fn all(&self) -> &[JobPlace] {
        &self.all
    }

    /// All places; each round begins with another.
    pub fn in_turn(&self, round: u64) -> impl Iterator<Item = &JobPlace> {
        let first = round as usize % self.all.len();
        self.all[first..].iter().chain(&self.all[..first])
    }

    /// Waits until no background work is left: digests, and the kernel's writing back.
    pub fn settle(&self) -> Outcome {
        if self.size == Size::Smallest {
            return Ok(());
        }
        let daemons = [self.sites[0].daemon()?, self.sites[1].daemon()?];
        crate::settle::settle(&daemons);
        rustix::fs::sync();
        Ok(())
    }
}

/// The type of a path's file system.
fn file_system(path: &Path) -> Outcome<String> {
    let path = path.canonicalize().map_err(tried(format!("looking at {}", path.display())))?;
    let table = std::fs::read_to_string("/proc/self/mountinfo").map_err(tried("reading the list of mounts"))?;
    type_of(&table, &path)
        .ok_or_else(|| format!("the list of mounts does not name the file system of {}", path.display()))
}

/// The type of a path's file system by the list of mounts. Of several mounts on one directory, the last hides the
/// others.
fn type_of(table: &str, path: &Path) -> Option<String> {
    let mounts = table.lines().filter_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        Some((Path::new(mount.split(' ').nth(4)?), source.split(' ').next()?))
    });
    let above = mounts.filter(|(point, _)| path.starts_with(point));
    above.max_by_key(|(point, _)| point.components().count()).map(|(_, name)| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_mount_tells_the_type() {
        let table = "21 1 0:1 / / rw - ext4 /dev/a rw\n22 21 0:2 / /tmp rw - xfs /dev/b rw\n\
                     23 21 0:3 / /tmp rw shared:1 - tmpfs none rw\n24 21 0:4 / /tmpest rw - btrfs none rw\n";
        let of = |path: &str| type_of(table, Path::new(path));
        assert_eq!(of("/tmp/x/y").as_deref(), Some("tmpfs"));
        assert_eq!(of("/var/tmp").as_deref(), Some("ext4"));
        assert_eq!(of("relative"), None);
    }
}
