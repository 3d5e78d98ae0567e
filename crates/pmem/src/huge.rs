//! Huge pages, under what is much used.
//!
//! A processor remembers where some thousand pages lie, and looks into the page tables for all others: in a virtual machine that takes nearly as long as it takes to copy
//! 4 KiB. Logs and segments are larger than so many small pages. tmpfs gives huge ones only where its mount says so, but gathers small ones into a huge one where
//! it's asked to (`MADV_COLLAPSE`, Linux 6.1). That takes the kernel about a millisecond of copying, in which others who use these pages wait; so it's
//! done once for each, in the background, by who has made the file. Everybody who maps it has the huge page from then on, if his mapping begins where
//! one can.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::Mapping;

/// Bytes of a huge page, on processors whose small ones are of 4 KiB.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Whether the machine's administrator lets programs have huge pages, and the kernel has them.
#[must_use]
pub fn is_allowed() -> bool {
    static IS_ALLOWED: OnceLock<bool> = OnceLock::new();
    *IS_ALLOWED.get_or_init(|| {
        let said = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        said.is_ok_and(|said| !said.contains("[never]"))
    })
}

const UNUSED: u8 = 0;
const WANTED: u8 = 1;
const DONE: u8 = 2;

/// Which huge pages of a file are worth to be made.
#[derive(Debug)]
pub struct HugePages(Box<[AtomicU8]>);

impl HugePages {
    /// Of a file of so many bytes, none yet.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self((0..bytes / HUGE_PAGE_BYTES).map(|_| AtomicU8::new(UNUSED)).collect())
    }

    /// Bytes are used, if any: their huge pages are worth it.
    #[inline]
    pub fn note_used(&self, bytes: Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        let (first, end) = (bytes.start / HUGE_PAGE_BYTES, bytes.end.div_ceil(HUGE_PAGE_BYTES));
        for page in self.0.iter().take(end as usize).skip(first as usize) {
            if page.load(Ordering::Relaxed) == UNUSED {
                page.store(WANTED, Ordering::Relaxed);
            }
        }
    }

    /// Makes one that is worth it in the mapping of the whole file; it's tried once. `None` where there is none.
    pub fn make_one(&self, file: &Mapping) -> Option<io::Result<()>> {
        self.take().map(|offset| file.collapse(offset))
    }

    /// How many are to be made.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.0.iter().filter(|page| page.load(Ordering::Relaxed) == WANTED).count() as u64
    }

    /// The offset of one that is to be made, which counts as made from now on.
    fn take(&self) -> Option<u64> {
        let is_taken =
            |page: &AtomicU8| page.compare_exchange(WANTED, DONE, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        self.0.iter().position(is_taken).map(|page| page as u64 * HUGE_PAGE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_is_made_once() {
        let pages = HugePages::new(5 * HUGE_PAGE_BYTES + 4096);
        assert_eq!(pages.take(), None);
        pages.note_used(HUGE_PAGE_BYTES - 1..HUGE_PAGE_BYTES + 1);
        pages.note_used(4 * HUGE_PAGE_BYTES..6 * HUGE_PAGE_BYTES);
        pages.note_used(HUGE_PAGE_BYTES..HUGE_PAGE_BYTES + 1);
        assert_eq!(pages.waiting(), 3);
        let made: Vec<u64> = std::iter::from_fn(|| pages.take()).map(|offset| offset / HUGE_PAGE_BYTES).collect();
        assert_eq!(made, [0, 1, 4]);
        pages.note_used(0..4096);
        assert_eq!(pages.take(), None);
    }
}
