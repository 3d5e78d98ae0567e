//! Detects directory scans.
//!
//! When a session accesses several files of a directory, all of them are granted at once.

use std::collections::VecDeque;

use ashlar_types::InodeId;

/// The most directories remembered.
///
/// Threads scan so many at the same time, and read-ahead grants so many.
const DIRECTORIES_MAX: usize = 128;
/// A directory of at most so many entries is granted with the first access.
///
/// The access is to the directory or to one of its files. That takes no longer than one more request.
pub const SMALL_ENTRIES_MAX: u64 = 16;
/// A directory of at most so many entries is listed with the first access to it.
///
/// Most programs that access a directory list it next.
pub const LISTED_ENTRIES_MAX: u64 = 64;
/// One of so many files must be accessed again before all are granted again.
const ENTRIES_PER_ACCESS: u64 = 16;
/// One of so many files must be read before the contents of all are sent.
///
/// Sending them costs as much as a request for each of those reads.
const ENTRIES_PER_READ: u64 = 32;
/// Files of a larger directory are not granted together.
///
/// A thread that waits for one would wait for all.
const ENTRIES_MAX: u64 = 1024;
/// The most bytes of attributes that go along unasked, extended ones included.
///
/// The rest is sent on request.
pub const ATTRIBUTE_BYTES_MAX: usize = 256 << 10;
/// The most bytes of contents that go along unasked.
///
/// Small files stand in the answer itself, others as their extents.
pub const CONTENT_BYTES_MAX: usize = 128 << 10;
/// Contents of files with more blocks do not go along unasked.
///
/// Their extent lists may be long.
pub const CONTENT_BLOCKS_MAX: u64 = 256;
/// The extents of a file of at most so many blocks go along with its first access.
pub const SHORT_FILE_BLOCKS: u64 = 16;

/// The directories in which a session has accessed files, the latest first.
#[derive(Debug, Default)]
pub struct ScanDetector(VecDeque<ScannedDirectory>);

#[derive(Debug)]
struct ScannedDirectory {
    directory: InodeId,
    entries: u64,
    accesses: Accesses,
    reads: Accesses,
}

/// Accesses to files of one directory, of one kind.
#[derive(Debug)]
struct Accesses {
    count: u64,
    /// After more than so many accesses, further ones are likely.
    needed: u64,
    /// The slot and generation of the lease under which all files were granted.
    granted_under: (u32, u64),
}

impl ScanDetector {
    /// Records an access to a file of a directory with so many entries.
    ///
    /// `reads` says that the session reads the file for the first time. Returns whether the session is likely to access
    /// further files.
    pub fn record_access(&mut self, directory: InodeId, entries: u64, reads: bool) -> bool {
        let known = self.0.iter().position(|seen| seen.directory == directory).and_then(|at| self.0.remove(at));
        let accesses = |needed| Accesses { count: 0, needed, granted_under: (0, 0) };
        let mut seen = known.unwrap_or(ScannedDirectory {
            directory,
            entries,
            accesses: accesses(1),
            reads: accesses(entries / ENTRIES_PER_READ),
        });
        seen.entries = entries;
        seen.accesses.count += 1;
        seen.reads.count += u64::from(reads);
        let is_likely = seen.accesses.is_likely(entries);
        self.0.push_front(seen);
        self.0.truncate(DIRECTORIES_MAX);
        is_likely
    }

    /// Records that the session will access the files of a directory.
    pub fn expect_scan(&mut self, directory: InodeId, entries: u64) {
        self.0.retain(|seen| seen.directory != directory);
        let accesses = |count, needed| Accesses { count, needed, granted_under: (0, 0) };
        self.0.push_front(ScannedDirectory { directory, entries, accesses: accesses(2, 1), reads: accesses(2, 1) });
        self.0.truncate(DIRECTORIES_MAX);
    }

    /// Returns whether all files of the directory are to be granted with one of them.
    ///
    /// The grant is under a lease of this slot and generation. They are granted once. After that, the session must
    /// access some of them again. Otherwise a reader of one file would be sent all of them each time that another
    /// session writes one.
    pub fn is_grant_due(&mut self, directory: InodeId, slot: u32, generation: u64) -> bool {
        self.is_due(directory, (slot, generation), |seen| &mut seen.accesses)
    }

    /// Returns whether the contents of all files are to be sent with one that is read.
    ///
    /// It decides as [`Self::is_grant_due`].
    pub fn is_content_due(&mut self, directory: InodeId, slot: u32, generation: u64) -> bool {
        self.is_due(directory, (slot, generation), |seen| &mut seen.reads)
    }

    /// Records that some of a directory's files were not granted.
    ///
    /// The grant cache held them. If the session asks for one next, the grant cache holds them no more.
    pub fn record_left_out(&mut self, directory: InodeId) {
        if let Some(seen) = self.0.iter_mut().find(|seen| seen.directory == directory) {
            seen.accesses = Accesses { count: 0, needed: 0, granted_under: (0, 0) };
        }
    }

    fn is_due(
        &mut self,
        directory: InodeId,
        lease: (u32, u64),
        of: impl Fn(&mut ScannedDirectory) -> &mut Accesses,
    ) -> bool {
        let seen = self.0.iter_mut().find(|seen| seen.directory == directory && seen.entries <= ENTRIES_MAX);
        let Some(seen) = seen else { return false };
        let entries = seen.entries;
        let accesses = of(seen);
        if accesses.granted_under == lease || !accesses.is_likely(entries) {
            return false;
        }
        *accesses = Accesses { count: 0, needed: 1 + entries / ENTRIES_PER_ACCESS, granted_under: lease };
        true
    }
}

impl Accesses {
    fn is_likely(&self, entries: u64) -> bool {
        self.count > self.needed || entries <= SMALL_ENTRIES_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: InodeId = InodeId(1120);
    const LARGE: InodeId = InodeId(1121);

    #[test]
    fn second_access_grants_all_files() {
        let mut scans = ScanDetector::default();
        assert!(!scans.record_access(LARGE, 100, false));
        assert!(!scans.is_grant_due(LARGE, 0, 7));
        assert!(scans.record_access(LARGE, 100, false));
        assert!(scans.is_grant_due(LARGE, 0, 7));
        // Once, until the lease is another one, and the session accessed some again.
        assert!(!scans.is_grant_due(LARGE, 0, 7));
        assert!((0..7).all(|_| !scans.record_access(LARGE, 100, false)));
        assert!(!scans.is_grant_due(LARGE, 0, 8));
        assert!(scans.record_access(LARGE, 100, false));
        assert!(!scans.is_grant_due(LARGE, 0, 7));
        assert!(scans.is_grant_due(LARGE, 1, 7));
    }

    #[test]
    fn files_left_out_granted_on_next_request() {
        let mut scans = ScanDetector::default();
        assert!(!scans.record_access(LARGE, 100, false) && scans.record_access(LARGE, 100, false));
        assert!(scans.is_grant_due(LARGE, 0, 7));
        scans.record_left_out(LARGE);
        assert!(!scans.is_grant_due(LARGE, 0, 7));
        assert!(scans.record_access(LARGE, 100, false) && scans.is_grant_due(LARGE, 0, 7));
        assert!(!scans.is_grant_due(LARGE, 0, 7), "once");
    }

    #[test]
    fn contents_sent_after_some_reads() {
        let mut scans = ScanDetector::default();
        assert!((0..3).map(|_| scans.record_access(LARGE, 100, true)).eq([false, true, true]));
        assert!(scans.is_grant_due(LARGE, 0, 7) && !scans.is_content_due(LARGE, 0, 7));
        scans.record_access(LARGE, 100, true);
        assert!(scans.is_content_due(LARGE, 0, 7) && !scans.is_grant_due(LARGE, 0, 7));
        assert!(!scans.is_content_due(LARGE, 0, 7), "once");
    }

    #[test]
    fn small_directory_granted_at_once_large_never() {
        let mut scans = ScanDetector::default();
        assert!(scans.record_access(SMALL, SMALL_ENTRIES_MAX, false) && scans.is_grant_due(SMALL, 0, 1));
        scans.record_access(LARGE, ENTRIES_MAX + 1, false);
        assert!(scans.record_access(LARGE, ENTRIES_MAX + 1, false) && !scans.is_grant_due(LARGE, 0, 1));
    }

    #[test]
    fn oldest_directory_is_forgotten_first() {
        let mut scans = ScanDetector::default();
        for directory in 0..DIRECTORIES_MAX as u64 {
            scans.record_access(InodeId(directory), 100, false);
        }
        assert!(scans.record_access(InodeId(0), 100, false));
        scans.record_access(LARGE, 100, false);
        assert!(!scans.record_access(InodeId(1), 100, false), "it was the oldest one");
    }
}
