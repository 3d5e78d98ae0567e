//! Where a session has looked at files lately. Who looks at several of one directory is best told of all of them at once.

use std::collections::VecDeque;

use ashlar_types::InodeId;

/// Directories remembered: as many as threads look into at the same time.
const SEEN_MAX: usize = 8;
/// What is in a directory so small is told with the first look at it or at one of its files: that takes no longer than one more question.
pub const FEW: u64 = 16;
/// One look at a file again for so many of the directory, before all are told again.
const LOOKS: u64 = 16;
/// Files of a larger directory are not told together: whoever waits for one would wait for all.
const MANY: u64 = 1024;
/// Nor more than so much, with their extended attributes: the rest is told when it is asked for.
pub const BYTES: usize = 256 << 10;

/// The directories in which a session has looked at files, the last one first.
#[derive(Debug, Default)]
pub struct Looked(VecDeque<Seen>);

#[derive(Debug)]
struct Seen {
    directory: InodeId,
    entries: u64,
    files: u64,
    /// After so many it is likely to look at the others.
    needed: u64,
    /// The slot and generation of the lease under which all was told.
    told: (u32, u64),
}

impl Looked {
    /// The session looks at a file of a directory with so many entries. Whether it is likely to look at others.
    pub fn note(&mut self, directory: InodeId, entries: u64) -> bool {
        let known = self.0.iter().position(|seen| seen.directory == directory).and_then(|at| self.0.remove(at));
        let mut seen = known.unwrap_or(Seen { directory, entries, files: 0, needed: 1, told: (0, 0) });
        (seen.entries, seen.files) = (entries, seen.files + 1);
        let is_likely = seen.is_likely();
        self.0.push_front(seen);
        self.0.truncate(SEEN_MAX);
        is_likely
    }

    /// Whether all files of the directory are to be told with one of them, under a lease on this slot, of this generation. They are
    /// told once; after that only to who has looked at some of them again, lest a reader of one file is told all each time that somebody
    /// writes another.
    pub fn is_to_be_told(&mut self, directory: InodeId, slot: u32, generation: u64) -> bool {
        let seen = self.0.iter_mut().find(|seen| seen.directory == directory && seen.told != (slot, generation));
        let seen = seen.filter(|seen| seen.is_likely() && seen.entries <= MANY);
        let Some(seen) = seen else { return false };
        (seen.told, seen.files, seen.needed) = ((slot, generation), 0, 1 + seen.entries / LOOKS);
        true
    }
}

impl Seen {
    fn is_likely(&self) -> bool {
        self.files > self.needed || self.entries <= FEW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: InodeId = InodeId(20);
    const LARGE: InodeId = InodeId(21);

    #[test]
    fn the_second_file_of_a_directory_brings_all_of_them() {
        let mut looked = Looked::default();
        assert!(!looked.note(LARGE, 100));
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.note(LARGE, 100));
        assert!(looked.is_to_be_told(LARGE, 0, 7));
        // Once, until the lease is another one, and some were looked at again.
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!((0..7).all(|_| !looked.note(LARGE, 100)));
        assert!(!looked.is_to_be_told(LARGE, 0, 8));
        assert!(looked.note(LARGE, 100));
        assert!(!looked.is_to_be_told(LARGE, 0, 7));
        assert!(looked.is_to_be_told(LARGE, 1, 7));
    }

    #[test]
    fn few_files_are_told_at_once_and_very_many_one_by_one() {
        let mut looked = Looked::default();
        assert!(looked.note(SMALL, FEW) && looked.is_to_be_told(SMALL, 0, 1));
        looked.note(LARGE, MANY + 1);
        assert!(looked.note(LARGE, MANY + 1) && !looked.is_to_be_told(LARGE, 0, 1));
    }

    #[test]
    fn as_many_directories_are_remembered_as_are_looked_into_at_once() {
        let mut looked = Looked::default();
        for directory in 0..SEEN_MAX as u64 {
            looked.note(InodeId(directory), 100);
        }
        assert!(looked.note(InodeId(0), 100));
        looked.note(LARGE, 100);
        assert!(!looked.note(InodeId(1), 100), "it was the one that was looked into longest ago");
    }
}
