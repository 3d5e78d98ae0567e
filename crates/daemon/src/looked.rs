//! Where a session has looked at files lately. Who looks at several of one directory is best told of all of them at once.

use std::collections::VecDeque;

use ashlar_types::InodeId;

/// Directories remembered: as many as threads look into at the same time, and as they are told of ahead.
const SEEN_MAX: usize = 128;
/// What is in a directory so small is told with the first look at it or at one of its files: that takes no longer than one more question.
pub const FEW: u64 = 16;
/// The names in a directory of no more are told with the first look at it: most who look at a directory look into it next.
pub const LISTED: u64 = 64;
/// One look at a file again for so many of the directory, before all are told again.
const LOOKS: u64 = 16;
/// One read for so many of the directory, before it is told what is in all of them: that costs as much as a question for each of those.
const READS: u64 = 32;
/// Files of a larger directory are not told together: whoever waits for one would wait for all.
const MANY: u64 = 1024;
/// Nor more than so much, with their extended attributes: the rest is told when it is asked for.
pub const BYTES: usize = 256 << 10;
/// Nor so much of what is in the files: small ones stand in the answer itself, of others where their blocks are.
pub const CONTENT_BYTES: usize = 128 << 10;
/// Files of more blocks are not told of along with others: their maps may be long.
pub const CONTENT_BLOCKS: u64 = 256;
/// Of a file of so many blocks it is told with the first look where they are.
pub const SHORT_BLOCKS: u64 = 16;

/// The directories in which a session has looked at files, the last one first.
#[derive(Debug, Default)]
pub struct Looked(VecDeque<Seen>);

#[derive(Debug)]
struct Seen {
    directory: InodeId,
    entries: u64,
    looks: Looks,
    reads: Looks,
}

/// Looks at files of one directory, of one kind.
#[derive(Debug)]
struct Looks {
    count: u64,
    /// After so many the others are likely to be looked at.
    needed: u64,
    /// The slot and generation of the lease under which all was told.
    told: (u32, u64),
}

impl Looked {
    /// The session looks at a file of a directory with so many entries, or reads it for the first time. Whether it is likely to look at
    /// others.
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

    /// The session will look at the files of a directory with so many entries.
    pub fn foresee(&mut self, directory: InodeId, entries: u64) {
        self.0.retain(|seen| seen.directory != directory);
        let looks = |count, needed| Looks { count, needed, told: (0, 0) };
        self.0.push_front(Seen { directory, entries, looks: looks(2, 1), reads: looks(2, 1) });
        self.0.truncate(SEEN_MAX);
    }

    /// Whether all files of the directory are to be told with one of them, under a lease on this slot, of this generation. They are
    /// told once; after that only to who has looked at some of them again, lest a reader of one file is told all each time that somebody
    /// writes another.
    pub fn is_to_be_told(&mut self, directory: InodeId, slot: u32, generation: u64) -> bool {
        self.is_due(directory, (slot, generation), |seen| &mut seen.looks)
    }

    /// As [`Self::is_to_be_told`], of what is in the files, with one that is read.
    pub fn is_to_be_shown(&mut self, directory: InodeId, slot: u32, generation: u64) -> bool {
        self.is_due(directory, (slot, generation), |seen| &mut seen.reads)
    }

    /// Some of a directory's files were not told, since they stood on the board. Where one is asked for next, they don't any more.
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
    fn the_second_file_of_a_directory_brings_all_of_them() {
        let mut looked = Looked::default();
        assert!(!looked.note(LARGE, 100, false));
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.note(LARGE, 100, false));
        assert!(looked.is_to_be_told(LARGE, 0, 7));
        // Once, until the lease is another one, and some were looked at again.
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!((0..7).all(|_| !looked.note(LARGE, 100, false)));
        assert!(!looked.is_to_be_told(LARGE, 0, 8));
        assert!(looked.note(LARGE, 100, false));
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.is_to_be_told(LARGE, 1, 7));
    }

    #[test]
    fn what_stood_on_the_board_is_told_when_one_is_asked_for() {
        let mut looked = Looked::default();
        assert!(!looked.note(LARGE, 100, false) && looked.note(LARGE, 100, false));
        assert!(looked.is_to_be_told(LARGE, 0, 7));
        looked.note_left_out(LARGE);
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.note(LARGE, 100, false) && looked.is_to_be_told(LARGE, 0, 7));
        assert!(!looked.is_to_be_told(LARGE, 0, 7), "once");
    }

    #[test]
    fn what_is_in_files_is_told_to_who_reads_some() {
        let mut looked = Looked::default();
        assert!((0..3).map(|_| looked.note(LARGE, 100, true)).eq([false, true, true]));
        assert!(looked.is_to_be_told(LARGE, 0, 7) && !looked.is_to_be_shown(LARGE, 0, 7));
        looked.note(LARGE, 100, true);
        assert!(looked.is_to_be_shown(LARGE, 0, 7) && !looked.is_to_be_told(LARGE, 0, 7));
        assert!(!looked.is_to_be_shown(LARGE, 0, 7), "once");
    }

    #[test]
    fn few_files_are_told_at_once_and_very_many_one_by_one() {
        let mut looked = Looked::default();
        assert!(looked.note(SMALL, FEW, false) && looked.is_to_be_told(SMALL, 0, 1));
        looked.note(LARGE, MANY + 1, false);
        assert!(looked.note(LARGE, MANY + 1, false) && !looked.is_to_be_told(LARGE, 0, 1));
    }

    #[test]
    fn as_many_directories_are_remembered_as_are_looked_into_at_once() {
        let mut looked = Looked::default();
        for directory in 0..SEEN_MAX as u64 {
            looked.note(InodeId(directory), 100, false);
        }
        assert!(looked.note(InodeId(0), 100, false));
        looked.note(LARGE, 100, false);
        assert!(!looked.note(InodeId(1), 100, false), "it was the one that was looked into longest ago");
    }
}
