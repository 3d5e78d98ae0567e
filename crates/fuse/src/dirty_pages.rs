//! Which files may have pages in the kernel that are newer than what this side knows.
//!
//! A program that writes through a shared mapping changes the kernel's pages, and the mount learns of it when the kernel writes
//! them back. Until then a block may look like a hole here and hold data. A writable shared mapping needs a handle that both
//! reads and writes, whose RELEASE comes after the mapping's end, and pages that READ or WRITE have filled before. So a file
//! without such a handle, or without a page since it was opened, has no data that are unknown here.
//!
//! LSEEK of such a file is answered once the kernel has written back the pages of the hole that the answer would name
//! ([`Server::seek_written_back`]). The number of blocks that a file takes up is never told as none: programs take that for a file
//! without data, and don't read it. Having pages written back for each look at a file would take them away from a database.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use ashlar_libfs::{Outcome, Seek};
use ashlar_types::{BLOCK_BYTES, Errno, InodeId};
use parking_lot::Mutex;

use crate::file_system::FileSystem;
use crate::invalidate::Stale;
use crate::notify::Pages;
use crate::server::Server;

/// One file with handles through which it may be mapped for writing.
#[derive(Debug)]
struct Mappable {
    handles: u32,
    has_pages: bool,
}

/// The files whose pages may be dirty. There are at most as many as open handles.
#[derive(Debug, Default)]
pub(crate) struct DirtyPages {
    files: Mutex<HashMap<InodeId, Mappable>>,
    count: AtomicUsize,
}

impl DirtyPages {
    /// Counts a handle that may be mapped for writing; `has_pages` if the kernel may have pages of the file already. Returns
    /// whether pages may be dirty that could not be before.
    pub(crate) fn open(&self, inode: InodeId, has_pages: bool) -> bool {
        let mut files = self.files.lock();
        let file = files.entry(inode).or_insert(Mappable { handles: 0, has_pages: false });
        file.handles += 1;
        let begins = has_pages && !file.has_pages;
        file.has_pages |= has_pages;
        self.count.store(files.len(), Ordering::Release);
        begins
    }

    /// Counts out a handle that [`Self::open`] counted.
    pub(crate) fn close(&self, inode: InodeId) {
        let mut files = self.files.lock();
        if let Some(file) = files.get_mut(&inode) {
            file.handles -= 1;
            if file.handles == 0 {
                files.remove(&inode);
            }
        }
        self.count.store(files.len(), Ordering::Release);
    }

    /// The kernel is about to fill pages of a file. Returns whether they may be dirty from now on and could not be before.
    pub(crate) fn fill(&self, inode: InodeId) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut files = self.files.lock();
        files.get_mut(&inode).is_some_and(|file| !std::mem::replace(&mut file.has_pages, true))
    }

    /// Whether the kernel may have pages of a file that are newer than what stands here.
    pub(crate) fn may_be(&self, inode: InodeId) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.files.lock().get(&inode).is_some_and(|file| file.has_pages)
    }

    /// The `st_blocks` to show of a file with so many bytes and blocks: not 0 if there may be data.
    pub(crate) fn shown_blocks(&self, inode: InodeId, size: u64, blocks: u64) -> u64 {
        if blocks == 0 && size > 0 && self.may_be(inode) { BLOCK_BYTES / 512 } else { blocks }
    }
}

impl<F: FileSystem> Server<F> {
    /// The kernel is about to fill pages of a file, by READ or WRITE.
    pub(crate) fn note_fill(&self, inode: InodeId) {
        self.fills.fill(inode);
        if self.dirty_pages.fill(inode) {
            self.forget_no_blocks(inode);
        }
    }

    /// A handle was made through which a file may be mapped for writing.
    pub(crate) fn note_mappable(&self, inode: InodeId) {
        if self.dirty_pages.open(inode, self.fills.must_drop(inode)) {
            self.forget_no_blocks(inode);
        }
    }

    /// Has the kernel ask again how many blocks a file takes up, if it was told that there are none.
    fn forget_no_blocks(&self, inode: InodeId) {
        let found = self.file_system.attributes(inode);
        if found.is_ok_and(|found| found.inode.blocks == 0 && found.inode.size > 0) {
            self.forget_attributes(inode);
        }
    }

    /// Finds data or a hole once the kernel has written back whatever it has of the hole that is found. Waits for the kernel.
    pub(crate) fn seek_written_back(&self, inode: InodeId, what: Seek, offset: u64) -> Outcome<u64> {
        let seek = |what, offset| self.file_system.seek(inode, what, offset);
        let write_back = |hole: Range<u64>| {
            let length = if hole.end == u64::MAX { 0 } else { hole.end - hole.start };
            self.forget_waiting(&Stale::Inode(inode, Pages::Range { offset: hole.start, length }));
        };
        seek_past_dirty(&seek, &write_back, what, offset)
    }
}

/// See [`Server::seek_written_back`]. What was a hole and was written back is not written back again: it holds what stands here.
fn seek_past_dirty(
    seek: &dyn Fn(Seek, u64) -> Outcome<u64>,
    write_back: &dyn Fn(Range<u64>),
    what: Seek,
    offset: u64,
) -> Outcome<u64> {
    let mut clean = offset;
    loop {
        let answer = seek(what, offset);
        let hole = hole_of(seek, what, offset, answer);
        if hole.is_empty() || hole.end <= clean {
            return answer;
        }
        write_back(hole.start.max(clean)..hole.end);
        clean = hole.end;
    }
}

/// The hole that an answer to LSEEK rests on; to `u64::MAX` where it reaches to the file's end.
fn hole_of(seek: &dyn Fn(Seek, u64) -> Outcome<u64>, what: Seek, offset: u64, answer: Outcome<u64>) -> Range<u64> {
    match (what, answer) {
        (Seek::Data, Ok(data)) => offset..data,
        (Seek::Data, Err(Errno::ENXIO)) => offset..u64::MAX,
        // The end of the file is a hole, behind which there is nothing.
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

    const FILE: InodeId = InodeId(20);

    #[test]
    fn pages_may_be_dirty_with_a_handle_and_a_fill() {
        let dirty = DirtyPages::default();
        assert!(!dirty.fill(FILE), "nothing can be mapped for writing");
        assert!(!dirty.open(FILE, false) && !dirty.may_be(FILE));
        assert!(dirty.fill(FILE) && dirty.may_be(FILE));
        assert!(!dirty.fill(FILE) && !dirty.open(FILE, true), "that was so before");
        dirty.close(FILE);
        assert!(dirty.may_be(FILE), "another handle is left");
        dirty.close(FILE);
        assert!(!dirty.may_be(FILE));
        assert!(dirty.open(FILE, true) && dirty.may_be(FILE), "a reader has filled pages");
    }

    #[test]
    fn blocks_are_not_none_if_pages_may_be_dirty() {
        let dirty = DirtyPages::default();
        dirty.open(FILE, true);
        assert_eq!(dirty.shown_blocks(FILE, 100, 0), 8);
        assert_eq!(dirty.shown_blocks(FILE, 0, 0), 0, "an empty file has no pages");
        assert_eq!(dirty.shown_blocks(FILE, 1 << 20, 16), 16);
        assert_eq!(dirty.shown_blocks(InodeId(21), 100, 0), 0);
    }

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
        assert_eq!(*model.written_back.borrow(), [1..6, 3..4], "only what would be called a hole");
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
