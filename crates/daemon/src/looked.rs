//! Detects directory scans: when a session accesses several files of a directory, all of them are granted at once.

use std::collections::VecDeque;

use ashlar_types::InodeId;

/// Directories remembered: as many as threads scan at the same time, and as many as read-ahead grants.
const SEEN_MAX: usize = 128;
/// A directory of at most so many entries is granted with the first access to it or to one of its files.
///
/// That takes no longer than one more request.
pub const FEW: u64 = 16;
/// A directory of at most so many entries is listed with the first access to it.
///
/// Most programs that access a directory list it next.
pub const LISTED: u64 = 64;
/// A session must access one file of so many in the directory again before all are granted again.
const LOOKS: u64 = 16;
/// A session must read one file of so many in the directory before the contents of all are sent.
///
/// Sending them costs as much as a request for each of those reads.
const READS: u64 = 32;
/// Files of a larger directory are not granted together: a thread that waits for one would wait for all.
const MANY: u64 = 1024;
/// The most bytes of attributes, with the extended ones, that go along unasked: the rest is sent on request.
pub const BYTES: usize = 256 << 10;
/// The most bytes of contents that go along unasked: small files stand in the answer itself, others as their extents.
pub const CONTENT_BYTES: usize = 128 << 10;
/// Contents of files with more blocks do not go along unasked: their extent lists may be long.
pub const CONTENT_BLOCKS: u64 = 256;
/// The extents of a file of at most so many blocks go along with the first access to it.
pub const SHORT_BLOCKS: u64 = 16;

/// The directories in which a session has accessed files, the latest first.
#[derive(Debug, Default)]
pub struct Looked(VecDeque<Seen>);

#[derive(Debug)]
struct Seen {
    directory: InodeId,
    entries: u64,
    looks: Looks,
    reads: Looks,
}

/// Accesses to files of one directory, of one kind.
#[derive(Debug)]
struct Looks {
    count: u64,
    /// After more than so many accesses, the session is likely to access the other files.
    needed: u64,
    /// The slot and generation of the lease under which all files were granted.
    told: (u32, u64),
}

impl Looked {
    /// Records that the session accesses a file of a directory with so many entries, or reads it for the first time.
    ///
    /// Returns whether the session is likely to access further files.
    pub fn note(&mut self, directory: InodeId, entries: u64, reads: bool) -> bool {
        let known = self.0.iter().position(|seen| seen.directory == directory).and_then(|at| self.0.remove(at));
        let looks = |needed| Looks { count: 0, needed, told: (0, 0) };
        let mut seen = known.unwrap_or(Seen { directory, entries, looks: looks(1), reads: looks(entries / READS) });
        seen.entries = entries;
        seen.looks.count += 1;
        seen.reads.count += u64::from(reads);
        let is_likely = seen.looks.is_likely(entries);
        self.0.push_front(seen);
        self.0.truncate(SEEN_MAX);
        is_likely
    }

    /// Records that the session will access the files of a directory with so many entries.
    pub fn foresee(&mut self, directory: InodeId, entries: u64) {
        self.0.retain(|seen| seen.directory != directory);
        let looks = |count, needed| Looks { count, needed, told: (0, 0) };
        self.0.push_front(Seen { directory, entries, looks: looks(2, 1), reads: looks(2, 1) });
        self.0.truncate(SEEN_MAX);
    }

    /// Returns whether all files of the directory are to be granted with one of them, under a lease of this slot and
    /// generation.
    ///
    /// They are granted once. After that, the session must access some of them again. Otherwise a reader of one file
    /// would be sent all of them each time that another session writes one.
    pub fn is_to_be_told(&mut self, directory: InodeId, slot: u32, generation: u64) -> bool {
        self.is_due(directory, (slot, generation), |seen| &mut seen.looks)
    }

    /// Returns whether the contents of all files are to be sent with one that is read; as [`Self::is_to_be_told`].
    pub fn is_to_be_shown(&mut self, directory: InodeId, slot: u32, generation: u64) -> bool {
        self.is_due(directory, (slot, generation), |seen| &mut seen.reads)
    }

    /// Records that some of a directory's files were not granted, since the grant cache held them.
    ///
    /// If the session asks for one next, the grant cache holds them no more.
    pub fn note_left_out(&mut self, directory: InodeId) {
        if let Some(seen) = self.0.iter_mut().find(|seen| seen.directory == directory) {
            seen.looks = Looks { count: 0, needed: 0, told: (0, 0) };
        }
    }

    fn is_due(&mut self, directory: InodeId, lease: (u32, u64), of: impl Fn(&mut Seen) -> &mut Looks) -> bool {
        let seen = self.0.iter_mut().find(|seen| seen.directory == directory && seen.entries <= MANY);
        let Some(seen) = seen else { return false };
        let entries = seen.entries;
        let looks = of(seen);
        if looks.told == lease || !looks.is_likely(entries) {
            return false;
        }
        *looks = Looks { count: 0, needed: 1 + entries / LOOKS, told: lease };
        true
    }
}

impl Looks {
    fn is_likely(&self, entries: u64) -> bool {
        self.count > self.needed || entries <= FEW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: InodeId = InodeId(1120);
    const LARGE: InodeId = InodeId(1121);

    #[test]
    fn second_access_grants_all_files() {
        let mut looked = Looked::default();
        assert!(!looked.note(LARGE, 100, false));
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.note(LARGE, 100, false));
        assert!(looked.is_to_be_told(LARGE, 0, 7));
        // Once, until the lease is another one, and the session accessed some again.
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!((0..7).all(|_| !looked.note(LARGE, 100, false)));
        assert!(!looked.is_to_be_told(LARGE, 0, 8));
        assert!(looked.note(LARGE, 100, false));
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.is_to_be_told(LARGE, 1, 7));
    }

    #[test]
    fn files_left_out_granted_on_next_request() {
        let mut looked = Looked::default();
        assert!(!looked.note(LARGE, 100, false) && looked.note(LARGE, 100, false));
        assert!(looked.is_to_be_told(LARGE, 0, 7));
        looked.note_left_out(LARGE);
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.note(LARGE, 100, false) && looked.is_to_be_told(LARGE, 0, 7));
        assert!(!looked.is_to_be_told(LARGE, 0, 7), "once");
    }

    #[test]
    fn contents_sent_after_some_reads() {
        let mut looked = Looked::default();
        assert!((0..3).map(|_| looked.note(LARGE, 100, true)).eq([false, true, true]));
        assert!(looked.is_to_be_told(LARGE, 0, 7) && !looked.is_to_be_shown(LARGE, 0, 7));
        looked.note(LARGE, 100, true);
        assert!(looked.is_to_be_shown(LARGE, 0, 7) && !looked.is_to_be_told(LARGE, 0, 7));
        assert!(!looked.is_to_be_shown(LARGE, 0, 7), "once");
    }

    #[test]
    fn small_directory_granted_at_once_large_never() {
        let mut looked = Looked::default();
        assert!(looked.note(SMALL, FEW, false) && looked.is_to_be_told(SMALL, 0, 1));
        looked.note(LARGE, MANY + 1, false);
        assert!(looked.note(LARGE, MANY + 1, false) && !looked.is_to_be_told(LARGE, 0, 1));
    }

    #[test]
    fn oldest_directory_is_forgotten_first() {
        let mut looked = Looked::default();
        for directory in 0..SEEN_MAX as u64 {
            looked.note(InodeId(directory), 100, false);
        }
        assert!(looked.note(InodeId(0), 100, false));
        looked.note(LARGE, 100, false);
        assert!(!looked.note(InodeId(1), 100, false), "it was the oldest one");
    }
}
