//! Tracks files that programs may have mapped for writing, by this mount's pages.
//!
//! The kernel reports neither mappings nor stores to their pages until it writes those back. But a writable shared
//! mapping needs a handle that both reads and writes, and its RELEASE comes after the mapping's end. And the first
//! touch of a page that the kernel lacks is a READ that fills it. So without such a handle, or without a page since it
//! was opened, a file has no data that is unknown to the mount.
//!
//! If such a page is filled while other sessions exist, the mount reserves the file for the kernel before it answers.
//! Programs of other sessions then read and write the file by the same pages, until the last such handle is released.
//!
//! - Handles that bypass pages, as all do that are opened beside other sessions, fill none but for mappings. So a
//!   program that opens a file for reading and writing, and never maps it, reserves nothing.
//! - Pages that were filled before there were other sessions are dropped when the first one begins
//!   ([`KernelCache::drop_mappable_pages`]), which writes back changed ones. A mapping by a handle that bypasses pages
//!   drops those that exist.
//!
//! [`KernelCache::drop_mappable_pages`]: crate::kernel_cache::coherence::KernelCache::drop_mappable_pages

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use ashlar_types::{BLOCK_BYTES, Errno, InodeId};
use parking_lot::Mutex;

/// One file with handles through which it may be mapped for writing.
#[derive(Debug, Default)]
struct Mappable {
    handles: u32,
    has_pages: bool,
}

/// The files that may be mapped for writing, and which of them are reserved. At most as many as open handles.
#[derive(Debug, Default)]
pub(crate) struct MappableFiles {
    files: Mutex<HashMap<InodeId, Mappable>>,
    /// The number of files, so that most fills need no lock.
    count: AtomicUsize,
    /// Locked while the mount asks SharedFS, so that these requests are in order. SharedFS asks the mount for nothing
    /// meanwhile.
    reserved: Mutex<HashSet<InodeId>>,
}

impl MappableFiles {
    /// Counts a handle that may be mapped for writing; `has_pages` if the kernel may have pages of the file already.
    /// Returns whether pages may be dirty that could not be before.
    pub(crate) fn add_handle(&self, inode: InodeId, has_pages: bool) -> bool {
        let mut files = self.files.lock();
        let file = files.entry(inode).or_default();
        file.handles += 1;
        let begins = has_pages && !file.has_pages;
        file.has_pages |= has_pages;
        self.count.store(files.len(), Ordering::Release);
        begins
    }

    /// Counts out a handle that [`Self::add_handle`] counted. `free` ends the file's reservation, if this was its last
    /// handle.
    pub(crate) fn remove_handle(&self, inode: InodeId, free: impl FnOnce()) {
        {
            let mut files = self.files.lock();
            let Some(file) = files.get_mut(&inode) else { return };
            file.handles -= 1;
            if file.handles > 0 {
                return;
            }
            files.remove(&inode);
            self.count.store(files.len(), Ordering::Release);
        }
        let mut reserved = self.reserved.lock();
        if !reserved.is_empty() && !self.has(inode) && reserved.remove(&inode) {
            free();
        }
    }

    /// Records that the kernel is about to fill pages of a file. Returns whether they may be dirty from now on and
    /// could not be before.
    pub(crate) fn record_fill(&self, inode: InodeId) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut files = self.files.lock();
        files.get_mut(&inode).is_some_and(|file| !std::mem::replace(&mut file.has_pages, true))
    }

    /// Whether [`Self::reserve_once`] would reserve the file.
    pub(crate) fn is_unreserved(&self, inode: InodeId) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.has(inode) && !self.reserved.lock().contains(&inode)
    }

    /// Reserves a file whose pages are about to be filled or written back. Does nothing if the file can't be mapped for
    /// writing or is reserved already.
    ///
    /// # Errors
    /// Those of `reserve`.
    pub(crate) fn reserve_once(
        &self,
        inode: InodeId,
        reserve: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        if self.count.load(Ordering::Acquire) == 0 || !self.has(inode) {
            return Ok(());
        }
        let mut reserved = self.reserved.lock();
        // The file's last handle may have been released meanwhile. Then nothing would end the reservation.
        if reserved.contains(&inode) || !self.has(inode) {
            return Ok(());
        }
        reserve()?;
        reserved.insert(inode);
        Ok(())
    }

    /// Whether the kernel may have pages of a file that are newer than the mount's own state.
    pub(crate) fn may_be_dirty(&self, inode: InodeId) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.files.lock().get(&inode).is_some_and(|file| file.has_pages)
    }

    /// Returns the `st_blocks` to show of a file with so many bytes and blocks: not 0 if there may be data.
    pub(crate) fn shown_blocks(&self, inode: InodeId, size: u64, blocks: u64) -> u64 {
        if blocks == 0 && size > 0 && self.may_be_dirty(inode) { BLOCK_BYTES / 512 } else { blocks }
    }

    /// Returns all such files.
    pub(crate) fn inodes(&self) -> Vec<InodeId> {
        self.files.lock().keys().copied().collect()
    }

    fn has(&self, inode: InodeId) -> bool {
        self.files.lock().contains_key(&inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: InodeId = InodeId(20);

    #[test]
    fn pages_may_be_dirty_with_a_handle_and_a_fill() {
        let dirty = MappableFiles::default();
        assert!(!dirty.record_fill(FILE), "nothing can be mapped for writing");
        assert!(!dirty.add_handle(FILE, false) && !dirty.may_be_dirty(FILE));
        assert!(dirty.record_fill(FILE) && dirty.may_be_dirty(FILE));
        assert!(!dirty.record_fill(FILE) && !dirty.add_handle(FILE, true), "that was so before");
        dirty.remove_handle(FILE, || ());
        assert!(dirty.may_be_dirty(FILE), "another handle is left");
        dirty.remove_handle(FILE, || ());
        assert!(!dirty.may_be_dirty(FILE));
        assert!(dirty.add_handle(FILE, true) && dirty.may_be_dirty(FILE), "a reader has filled pages");
    }

    #[test]
    fn blocks_are_not_none_if_pages_may_be_dirty() {
        let dirty = MappableFiles::default();
        dirty.add_handle(FILE, true);
        assert_eq!(dirty.shown_blocks(FILE, 100, 0), 8);
        assert_eq!(dirty.shown_blocks(FILE, 0, 0), 0, "an empty file has no pages");
        assert_eq!(dirty.shown_blocks(FILE, 1 << 20, 16), 16);
        assert_eq!(dirty.shown_blocks(InodeId(21), 100, 0), 0);
    }

    #[test]
    fn page_fill_reserves_file_once_until_release() {
        let files = MappableFiles::default();
        let (mut reserved, mut freed) = (0, 0);
        let mut fill = |files: &MappableFiles| {
            let reserve = || {
                reserved += 1;
                Ok(())
            };
            files.reserve_once(FILE, reserve).expect("done");
            reserved
        };
        assert_eq!(fill(&files), 0, "it can't be mapped to be written");
        files.add_handle(FILE, false);
        files.add_handle(FILE, false);
        assert_eq!(files.inodes(), [FILE]);
        assert_eq!((fill(&files), fill(&files)), (1, 1));
        files.remove_handle(FILE, || freed += 1);
        assert_eq!((fill(&files), freed), (1, 0));
        files.remove_handle(FILE, || freed += 1);
        assert_eq!((fill(&files), freed), (1, 1));
        files.add_handle(FILE, false);
        files.remove_handle(FILE, || freed += 1);
        assert_eq!(freed, 1, "it was not reserved again");
    }

    #[test]
    fn reservation_that_failed_is_tried_again() {
        let files = MappableFiles::default();
        files.add_handle(FILE, false);
        assert_eq!(files.reserve_once(FILE, || Err(Errno::EIO)), Err(Errno::EIO));
        let mut reserved = 0;
        let reserve = || {
            reserved += 1;
            Ok(())
        };
        assert_eq!(files.reserve_once(FILE, reserve), Ok(()));
        assert_eq!(reserved, 1);
    }
}
