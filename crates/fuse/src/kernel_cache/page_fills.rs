//! Tracks which files may have stale pages in the kernel after a direct write.
//!
//! A handle that bypasses the kernel's pages drops them before its write is sent. Another program may fill them again
//! with the old content while the write is under way. So they have to be dropped once more before the write is
//! answered. Kernels do that themselves at best for synchronous writes. Asking for attributes (`AUTO_INVAL_DATA`) is
//! not enough: the kernel takes the new time of modification before it drops the pages. A process that reads in between
//! gets the old ones.
//!
//! The thread that invalidates would have to drop these pages, and most files that are written so have none. So this
//! table knows some files that have none; a file that it does not know may have some.

use ashlar_types::InodeId;
use parking_lot::Mutex;

/// How many files are known at once: many more than are written at the same time, and 96 KiB.
const FILES_MAX: usize = 4096;

/// The known state of one file. Moments are numbers that only grow. So a slot that changed hands in between is not
/// mistaken for its former self.
#[derive(Clone, Copy, Debug, Default)]
struct FillState {
    inode: u64,
    /// When a page of it may have been filled last.
    filled: u64,
    /// All pages filled up to then are gone.
    dropped: u64,
}

#[derive(Debug)]
struct FillTable {
    now: u64,
    known: Box<[FillState]>,
}

impl FillTable {
    fn next_moment(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn slot(&mut self, inode: InodeId) -> Option<&mut FillState> {
        self.known.get_mut(inode.0 as usize % FILES_MAX)
    }
}

/// The table. Its lock is held for a few instructions.
#[derive(Debug)]
pub(crate) struct PageFills(Mutex<FillTable>);

impl Default for PageFills {
    fn default() -> Self {
        Self(Mutex::new(FillTable { now: 0, known: vec![FillState::default(); FILES_MAX].into() }))
    }
}

impl PageFills {
    /// Records a new file: it has no pages.
    pub(crate) fn record_new_file(&self, inode: InodeId) {
        let mut table = self.0.lock();
        let now = table.next_moment();
        if let Some(slot) = table.slot(inode) {
            *slot = FillState { inode: inode.0, filled: now, dropped: now };
        }
    }

    /// Records that pages of a file are about to be filled with its present content, or are filled already.
    pub(crate) fn record_fill(&self, inode: InodeId) {
        let mut table = self.0.lock();
        let now = table.next_moment();
        if let Some(slot) = table.slot(inode).filter(|slot| slot.inode == inode.0) {
            slot.filled = now;
        }
    }

    /// Whether pages of a file are to be dropped, now that a write past them is done. From here on the file is known.
    pub(crate) fn must_drop(&self, inode: InodeId) -> bool {
        let mut table = self.0.lock();
        let now = table.next_moment();
        let Some(slot) = table.slot(inode) else { return true };
        if slot.inode != inode.0 {
            *slot = FillState { inode: inode.0, filled: now, dropped: 0 };
        }
        slot.filled > slot.dropped
    }

    /// Returns the moment at which a dropping of all pages of a file begins.
    pub(crate) fn begin_drop(&self) -> u64 {
        self.0.lock().now
    }

    /// Records that all pages are gone that had been filled when the dropping began.
    pub(crate) fn end_drop(&self, inode: InodeId, began: u64) {
        let mut table = self.0.lock();
        if let Some(slot) = table.slot(inode).filter(|slot| slot.inode == inode.0) {
            slot.dropped = slot.dropped.max(began);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: InodeId = InodeId(20);
    /// Another file with the same slot in the table.
    const RIVAL: InodeId = InodeId(20 + FILES_MAX as u64);

    fn drop_pages(fills: &PageFills, inode: InodeId) {
        let began = fills.begin_drop();
        fills.end_drop(inode, began);
    }

    #[test]
    fn pages_are_dropped_once_per_fill() {
        let fills = PageFills::default();
        assert!(fills.must_drop(FILE), "the file is unknown");
        assert!(fills.must_drop(FILE), "until they are dropped");
        drop_pages(&fills, FILE);
        assert!(!fills.must_drop(FILE));
        fills.record_fill(FILE);
        assert!(fills.must_drop(FILE));
        drop_pages(&fills, FILE);
        assert!(!fills.must_drop(FILE));
        fills.record_new_file(FILE);
        assert!(!fills.must_drop(FILE));
    }

    #[test]
    fn pages_filled_during_a_drop_must_be_dropped() {
        let fills = PageFills::default();
        fills.record_new_file(FILE);
        fills.record_fill(FILE);
        let began = fills.begin_drop();
        fills.record_fill(FILE);
        fills.end_drop(FILE, began);
        assert!(fills.must_drop(FILE));
    }

    #[test]
    fn file_whose_slot_was_taken_is_unknown() {
        let fills = PageFills::default();
        fills.record_new_file(FILE);
        let began = fills.begin_drop();
        fills.record_new_file(RIVAL);
        fills.record_fill(FILE);
        fills.end_drop(FILE, began);
        assert!(!fills.must_drop(RIVAL));
        assert!(fills.must_drop(FILE), "a page was filled while the file was unknown");
        fills.end_drop(FILE, began);
        assert!(fills.must_drop(FILE), "an earlier dropping does not count");
    }
}
