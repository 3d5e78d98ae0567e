//! Huge pages under logs and segments.
//!
//! A processor remembers the places of some thousand pages, and walks the page tables for all others. In a virtual
//! machine that takes nearly as long as copying 4 KiB. Logs and segments are larger than so many small pages. tmpfs
//! gives huge ones only if its mount says so, but gathers small ones into a huge one on request (`MADV_COLLAPSE`, Linux
//! 6.1). That takes the kernel about a millisecond of copying, in which other users of these pages wait. So the process
//! that made the file does it once for each, in the background. From then on every mapping has the huge page, if it
//! begins where one can.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::Mapping;

/// Bytes of a huge page, on processors whose small ones are of 4 KiB.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Whether the administrator lets programs have huge pages, and the kernel has them.
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
const TRIED: u8 = 2;
const MADE: u8 = 3;

/// The huge pages of a file that are worth making.
#[derive(Debug)]
pub struct HugePages(Box<[AtomicU8]>);

impl HugePages {
    /// Makes the set for a file of this size, in which no page is worth making yet.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self((0..bytes / HUGE_PAGE_BYTES).map(|_| AtomicU8::new(UNUSED)).collect())
    }

    /// Bytes are used, if any: their huge pages are worth it.
    #[inline]
    pub fn record_used(&self, bytes: Range<u64>) {
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

    /// Makes one huge page in the mapping of the whole file, and tries each only once. `None` if none is left.
    pub fn make_one(&self, file: &Mapping) -> Option<io::Result<()>> {
        let offset = self.take()?;
        let made = file.collapse(offset);
        if made.is_ok() {
            self.record_made(offset);
        }
        Some(made)
    }

    fn record_made(&self, offset: u64) {
        if let Some(page) = self.0.get((offset / HUGE_PAGE_BYTES) as usize) {
            page.store(MADE, Ordering::Relaxed);
        }
    }

    /// Whether bytes lie in huge pages that were made, so that a store to them has nothing brought in or cleared.
    #[must_use]
    #[inline]
    pub fn are_made(&self, bytes: Range<u64>) -> bool {
        let (first, end) = (bytes.start / HUGE_PAGE_BYTES, bytes.end.div_ceil(HUGE_PAGE_BYTES));
        let pages = self.0.get(first as usize..end as usize);
        pages.is_some_and(|pages| pages.iter().all(|page| page.load(Ordering::Relaxed) == MADE))
    }

    /// Returns the number of huge pages to make.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.0.iter().filter(|page| page.load(Ordering::Relaxed) == WANTED).count() as u64
    }

    /// Takes the offset of one huge page to make, which counts as tried from now on.
    fn take(&self) -> Option<u64> {
        let is_taken =
            |page: &AtomicU8| page.compare_exchange(WANTED, TRIED, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        self.0.iter().position(is_taken).map(|page| page as u64 * HUGE_PAGE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_huge_page_is_taken_once() {
        let pages = HugePages::new(5 * HUGE_PAGE_BYTES + 4096);
        assert_eq!(pages.take(), None);
        pages.record_used(HUGE_PAGE_BYTES - 1..HUGE_PAGE_BYTES + 1);
        pages.record_used(4 * HUGE_PAGE_BYTES..6 * HUGE_PAGE_BYTES);
        pages.record_used(HUGE_PAGE_BYTES..HUGE_PAGE_BYTES + 1);
        assert_eq!(pages.waiting(), 3);
        let made: Vec<u64> = std::iter::from_fn(|| pages.take()).map(|offset| offset / HUGE_PAGE_BYTES).collect();
        assert_eq!(made, [0, 1, 4]);
        assert!(!pages.are_made(0..1));
        pages.record_made(0);
        pages.record_made(HUGE_PAGE_BYTES);
        assert!(pages.are_made(0..2 * HUGE_PAGE_BYTES));
        assert!(!pages.are_made(HUGE_PAGE_BYTES..2 * HUGE_PAGE_BYTES + 1));
        assert!(!pages.are_made(4 * HUGE_PAGE_BYTES..6 * HUGE_PAGE_BYTES), "the last one is none");
        pages.record_used(0..4096);
        assert_eq!(pages.take(), None);
    }
}
