//! Finds watches of inotify and fanotify on a mount, in `/proc`.
//!
//! The kernel reports neither the beginning nor the end of a watch to a file system. It shows the watches of a
//! descriptor in `/proc/PID/fdinfo`, which is read again and again. Listing the descriptors of all processes takes
//! long. So a process with an unchanged number of descriptors is listed again only now and then.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ashlar_types::InodeId;
use ashlar_wire::ReserveReason;

/// After so many rounds a process whose descriptors seem unchanged is listed again: it may have closed one and opened
/// another.
const ROUNDS: u64 = 32;
/// So many watched inodes are told apart. If there are more, all inodes count as watched.
const INODES_MAX: usize = 1 << 16;
/// Kinds of descriptors, as their links in `/proc/PID/fd` read.
const INSTANCES: [&[u8]; 2] = [b"anon_inode:inotify", b"anon_inode:[fanotify]"];

/// The watches on a mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FoundWatches {
    inodes: BTreeSet<InodeId>,
    /// A mount or the file system is watched as a whole, or too many inodes are watched.
    is_all: bool,
}

impl FoundWatches {
    /// Returns the inodes to reserve, and the reasons.
    pub(crate) fn reasons(&self) -> impl Iterator<Item = (InodeId, ReserveReason)> + '_ {
        let all = self.is_all.then_some((InodeId::ROOT, ReserveReason::WatchedAll));
        all.into_iter().chain(self.inodes.iter().map(|inode| (*inode, ReserveReason::Watched)))
    }

    /// Returns why an inode is to be reserved.
    pub(crate) fn reason_of(&self, inode: InodeId) -> Option<ReserveReason> {
        match inode {
            InodeId::ROOT if self.is_all => Some(ReserveReason::WatchedAll),
            _ => self.inodes.contains(&inode).then_some(ReserveReason::Watched),
        }
    }
}

/// The known descriptors of a process.
#[derive(Debug, Default)]
struct KnownProcess {
    /// The number of its descriptors, and the identity of the directory that shows them.
    seen: (u64, u64, i64, i64),
    /// The descriptors by which it watches.
    instances: Vec<u32>,
    /// The round in which they were listed, and the round in which the process was last seen.
    listed: u64,
    round: u64,
}

/// Searches for watches, and remembers which descriptors have some.
#[derive(Debug, Default)]
pub(crate) struct WatchFinder {
    processes: BTreeMap<u32, KnownProcess>,
    round: u64,
    /// Whether the kernel says how many descriptors a process has.
    has_counts: bool,
    text: String,
}

impl WatchFinder {
    /// Searches for watches on the file system with this device number.
    ///
    /// `lists_all`: a process may have opened the descriptor of a watch and closed another one since.
    pub(crate) fn find_watches(&mut self, device: u64, lists_all: bool) -> FoundWatches {
        let mut found = FoundWatches::default();
        self.round += 1;
        self.has_counts = fs::metadata("/proc/self/fd").is_ok_and(|own| own.size() > 0);
        for pid in numbers_in(Path::new("/proc")) {
            self.scan_process(pid, device, lists_all, &mut found);
        }
        let round = self.round;
        self.processes.retain(|_, process| process.round == round);
        if found.inodes.len() > INODES_MAX {
            found.is_all = true;
        }
        if found.is_all {
            found.inodes.clear();
        }
        found
    }

    fn scan_process(&mut self, pid: u32, device: u64, lists_all: bool, found: &mut FoundWatches) {
        let process = Path::new("/proc").join(pid.to_string());
        let directory = process.join("fd");
        // From Linux 6.2 on, the size is the number of descriptors; before, it is 0. Another process of this number has
        // another directory.
        let Ok(stat) = fs::metadata(&directory) else { return };
        let seen = (stat.size(), stat.ino(), stat.ctime(), stat.ctime_nsec());
        let known = self.processes.entry(pid).or_default();
        known.round = self.round;
        // Not all processes are listed in one round.
        let is_due = lists_all || known.listed == 0 || (self.round + u64::from(pid)).is_multiple_of(ROUNDS);
        if known.seen != seen || !self.has_counts || is_due {
            (known.seen, known.listed) = (seen, self.round);
            let is_instance = |number: &u32| {
                let link = fs::read_link(directory.join(number.to_string())).unwrap_or_default();
                INSTANCES.contains(&link.as_os_str().as_encoded_bytes())
            };
            known.instances = numbers_in(&directory).filter(is_instance).collect();
        }
        for number in &known.instances {
            self.text.clear();
            let file = fs::File::open(process.join("fdinfo").join(number.to_string()));
            // A descriptor that was closed meanwhile watches nothing.
            if file.and_then(|mut file| file.read_to_string(&mut self.text)).is_ok() {
                add_watches(&self.text, device, &process, found);
            }
        }
    }
}

/// Returns the names of a directory that are numbers; none if it can't be read.
fn numbers_in(directory: &Path) -> impl Iterator<Item = u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Adds the watches on a device that the text of a descriptor in `/proc/PID/fdinfo` shows.
fn add_watches(text: &str, device: u64, process: &Path, found: &mut FoundWatches) {
    for line in text.lines() {
        if !(line.starts_with("inotify ") || line.starts_with("fanotify ")) {
            continue;
        }
        let field = |name: &str| {
            let mut words = line.split_ascii_whitespace();
            words.find_map(|word| word.strip_prefix(name)?.strip_prefix(':'))
        };
        let number = |name: &str| field(name).and_then(|text| u64::from_str_radix(text, 16).ok());
        // The kernel's own number of a device.
        let is_it = |number: u64| rustix::fs::makedev((number >> 20) as u32, number as u32 & 0xf_ffff) == device;
        match (number("ino"), number("sdev"), number("mnt_id")) {
            (Some(inode), Some(number), _) if is_it(number) => {
                found.inodes.insert(InodeId(inode));
            }
            (None, Some(number), _) if is_it(number) => found.is_all = true,
            (None, None, Some(mount)) => {
                let table = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
                found.is_all |= device_of_mount(&table, mount) == Some(device);
            }
            _ => {}
        }
    }
}

/// Returns the device of a mount, by its number in a table of mounts.
fn device_of_mount(table: &str, mount: u64) -> Option<u64> {
    // number parent major:minor …
    let line = table.lines().find(|line| line.split(' ').next().is_some_and(|first| first.parse() == Ok(mount)))?;
    let (major, minor) = line.split(' ').nth(2)?.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const INOTIFY: &str = "pos:\t0\nflags:\t04000\nmnt_id:\t17\nino:\t1038
inotify wd:1 ino:10 sdev:28 mask:fff ignored_mask:0 fhandle-bytes:c fhandle-type:81 f_handle:000000001000000000000000
inotify wd:2 ino:1f sdev:28 mask:3c0 ignored_mask:0 fhandle-bytes:c fhandle-type:81 f_handle:000000001000000000000000
inotify wd:3 ino:11 sdev:800001 mask:fff ignored_mask:0
";

    fn found(text: &str) -> FoundWatches {
        let mut found = FoundWatches::default();
        let device = rustix::fs::makedev(0, 0x28);
        add_watches(text, device, Path::new("/proc/self"), &mut found);
        found
    }

    #[test]
    fn inotify_watches_are_found_by_device() {
        let found = found(INOTIFY);
        assert_eq!(found.inodes, BTreeSet::from([InodeId(0x10), InodeId(0x1f)]));
        assert!(!found.is_all);
    }

    #[test]
    fn fanotify_marks_are_found_by_what_they_mark() {
        let inode = found("fanotify flags:10 event-flags:0\nfanotify ino:4f sdev:28 mflags:0 mask:3b ignored_mask:0\n");
        assert_eq!(inode.inodes, BTreeSet::from([InodeId(0x4f)]));
        assert!(found("fanotify sdev:28 mflags:0 mask:3b ignored_mask:0\n").is_all);
        assert!(!found("fanotify sdev:29 mflags:0 mask:3b ignored_mask:0\n").is_all);
        assert!(!found("fanotify mnt_id:7fffffff mflags:0 mask:3b ignored_mask:0\n").is_all);
    }

    #[test]
    fn mount_is_found_in_table() {
        let table = "22 1 0:20 / /proc rw - proc proc rw\n31 22 8:1 / /a rw - ext4 /dev/sda1 rw\n";
        assert_eq!(device_of_mount(table, 31), Some(rustix::fs::makedev(8, 1)));
        assert_eq!(device_of_mount(table, 3), None);
    }

    #[test]
    fn watch_of_another_process_is_found_until_it_ends() {
        let directory = std::env::temp_dir();
        let stat = fs::metadata(&directory).expect("a directory");
        let device = stat.dev();
        let mut finder = WatchFinder::default();
        finder.find_watches(device, false);
        let file = tempfile::NamedTempFile::new_in(&directory).expect("a file");
        let inode = InodeId(file.as_file().metadata().expect("its attributes").ino());
        let mut child =
            std::process::Command::new("tail").args(["-f", "--"]).arg(file.path()).spawn().expect("a child");
        let sees = |finder: &mut WatchFinder| finder.find_watches(device, false).inodes.contains(&inode);
        while !sees(&mut finder) {
            assert_eq!(child.try_wait().expect("asked"), None, "it watches nothing, and has ended");
            std::thread::yield_now();
        }
        child.kill().and_then(|()| child.wait()).expect("ended");
        assert!(!sees(&mut finder));
    }

    #[test]
    fn replaced_descriptor_is_found_when_all_are_listed() {
        use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
        let directory = tempfile::tempdir().expect("a directory");
        let stat = fs::metadata(directory.path()).expect("a directory");
        let other = fs::File::open(directory.path()).expect("opened");
        let mut finder = WatchFinder::default();
        finder.find_watches(stat.dev(), false);
        drop(other);
        let watching = init(CreateFlags::CLOEXEC).expect("a descriptor");
        add_watch(&watching, directory.path(), WatchFlags::CREATE).expect("a watch");
        assert!(finder.find_watches(stat.dev(), true).inodes.contains(&InodeId(stat.ino())));
    }
}
