//! Writes back pages of the kernel that are newer than the mount's own state.
//!
//! A program that writes through a shared mapping changes the kernel's pages. The mount learns of it when the kernel
//! writes them back. Until then a block may look like a hole here and hold data. [`MappableFiles`] knows the files that
//! may have such pages.
//!
//! LSEEK of such a file is answered once the kernel has written back the pages of the hole that the answer would name
//! ([`seek_past_dirty`]). The number of blocks that a file takes up is never shown as 0: programs take that for a file
//! without data, and don't read it. Writing pages back for each `stat` would take them away from a database.
//!
//! [`MappableFiles`]: crate::kernel_cache::mappable::MappableFiles

use std::ops::Range;

use ashlar_libfs::{Outcome, Seek};
use ashlar_types::Errno;

/// Finds data or a hole that no newer pages of the kernel contradict.
///
/// `write_back` writes back the pages of the hole that `seek` finds. A hole that was written back is not written back
/// again: it holds no newer data.
pub(crate) fn seek_past_dirty(
    seek: &dyn Fn(Seek, u64) -> Outcome<u64>,
    write_back: &dyn Fn(Range<u64>),
    what: Seek,
    offset: u64,
) -> Outcome<u64> {
    let mut clean = offset;
    loop {
        let answer = seek(what, offset);
        let hole = answered_hole(seek, what, offset, answer);
        if hole.is_empty() || hole.end <= clean {
            return answer;
        }
        write_back(hole.start.max(clean)..hole.end);
        clean = hole.end;
    }
}

/// Returns the hole that an answer to LSEEK rests on; its end is `u64::MAX` if it reaches to the file's end.
fn answered_hole(
    seek: &dyn Fn(Seek, u64) -> Outcome<u64>,
    what: Seek,
    offset: u64,
    answer: Outcome<u64>,
) -> Range<u64> {
    match (what, answer) {
        (Seek::Data, Ok(data)) => offset..data,
        (Seek::Data, Err(Errno::ENXIO)) => offset..u64::MAX,
        // The end of the file is a hole, and nothing follows it.
        (Seek::Hole, Ok(hole)) => match seek(Seek::Data, hole) {
            Ok(data) => hole..data,
            Err(_) if seek(Seek::Hole, hole).is_ok() => hole..u64::MAX,
            Err(_) => hole..hole,
        },
        (_, Err(_)) => offset..offset,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A file of eight blocks: `data` are known, `dirty` ones are the kernel's alone until they are written back.
    struct Model {
        data: RefCell<[bool; 8]>,
        dirty: RefCell<[bool; 8]>,
        written_back: RefCell<Vec<Range<u64>>>,
    }

    impl Model {
        fn new(data: [usize; 2], dirty: &[usize]) -> Self {
            let set = |blocks: &[usize]| std::array::from_fn(|block| blocks.contains(&block));
            Self { data: RefCell::new(set(&data)), dirty: RefCell::new(set(dirty)), written_back: RefCell::default() }
        }

        fn seek(&self, what: Seek, offset: u64) -> Outcome<u64> {
            let data = self.data.borrow();
            let is_it = |block: &u64| data[*block as usize] == (what == Seek::Data);
            match (offset..8).find(is_it) {
                _ if offset >= 8 => Err(Errno::ENXIO),
                None if what == Seek::Hole => Ok(8),
                found => found.ok_or(Errno::ENXIO),
            }
        }

        fn write_back(&self, range: Range<u64>) {
            for block in range.start..range.end.min(8) {
                self.data.borrow_mut()[block as usize] |= self.dirty.borrow()[block as usize];
            }
            self.written_back.borrow_mut().push(range);
        }

        fn answer(&self, what: Seek, offset: u64) -> Outcome<u64> {
            seek_past_dirty(&|what, offset| self.seek(what, offset), &|hole| self.write_back(hole), what, offset)
        }
    }

    #[test]
    fn seek_finds_data_that_were_dirty() {
        let model = Model::new([0, 6], &[2, 4]);
        assert_eq!(model.answer(Seek::Data, 1), Ok(2));
        assert_eq!(model.answer(Seek::Data, 3), Ok(4));
        assert_eq!(*model.written_back.borrow(), [1..6, 3..4], "only holes are written back");
        assert_eq!(model.answer(Seek::Data, 7), Err(Errno::ENXIO));
        assert_eq!(Model::new([0, 1], &[7]).answer(Seek::Data, 3), Ok(7));
    }

    #[test]
    fn seek_names_no_hole_that_was_dirty() {
        let model = Model::new([1, 3], &[0, 2, 5]);
        assert_eq!(model.answer(Seek::Hole, 0), Ok(4));
        assert_eq!(*model.written_back.borrow(), [0..1, 2..3, 4..u64::MAX]);
        let model = Model::new([0, 1], &[2, 3, 4, 5, 6, 7]);
        assert_eq!(model.answer(Seek::Hole, 0), Ok(8), "the end");
        assert_eq!(model.answer(Seek::Hole, 8), Err(Errno::ENXIO));
        assert_eq!(model.written_back.borrow().len(), 1);
    }
}
