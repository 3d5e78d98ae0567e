//! Directories: OPENDIR, READDIR, READDIRPLUS, RELEASEDIR.

use std::mem::offset_of;

use ashlar_libfs::Listed;
use ashlar_types::{COOKIE_PARENT, COOKIE_SELF, Errno, FileKind, InodeId};
use zerocopy::{FromBytes, IntoBytes};

use crate::callers::calling_thread;
use crate::connection::device::TRANSFER_BYTES;
use crate::connection::reply_buffer::{CachedItem, ReplyBuffer};
use crate::file_system::FileSystem;
use crate::operations::attributes::{fuse_attr, validity};
use crate::operations::request::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{Attr, Dirent, EntryOut, OpenOut, ReadIn, fopen};

/// The handle of a directory that a 32-bit program has opened. Its library takes no place of more than 31 bits.
const HANDLE_NARROW: u64 = 1;

/// Returns an entry's place in 31 bits: the high half of its place in 63, so the order is the same. Many entries may
/// share one.
const fn narrow_place(cookie: u64) -> u64 {
    if cookie <= COOKIE_PARENT {
        return cookie;
    }
    let half = cookie >> 32;
    if half > COOKIE_PARENT { half } else { COOKIE_PARENT + 1 }
}

/// Returns the last place of 63 bits with this place of 31.
const fn widen_place(place: u64) -> u64 {
    if place <= COOKIE_PARENT || place > i32::MAX as u64 { place } else { place << 32 | u32::MAX as u64 }
}

const ENTRY_BYTES: usize = size_of::<EntryOut>() + size_of::<Dirent>();

/// Entries on their way into a reply.
struct ListingPage<'a> {
    reply: &'a mut ReplyBuffer,
    directory: InodeId,
    size: usize,
    /// Whether attributes are listed with the names (READDIRPLUS).
    plus: bool,
    /// Whether places have 31 bits.
    narrow: bool,
    /// The last place, and the body's length and the number of cached items before the first entry at that place.
    last: (u64, usize, usize),
    /// Where in the body the last entry's `Dirent` begins.
    last_dirent: usize,
    result: Result<(), Errno>,
}

impl<'a> ListingPage<'a> {
    const fn new(reply: &'a mut ReplyBuffer, directory: InodeId, size: usize, plus: bool) -> Self {
        ListingPage { reply, directory, size, plus, narrow: false, last: (0, 0, 0), last_dirent: 0, result: Ok(()) }
    }

    /// Adds an entry; returns `false` if it doesn't fit any more.
    ///
    /// Two names may share a place, and a listing continues after a place. So all entries with the same place are in
    /// one page or in the next. After each of them but the last, a listing continues before the first: the kernel hands
    /// a page on in parts, and showing an entry twice is better than not at all.
    fn add_entry(&mut self, listed: &Listed) -> bool {
        let place = if self.narrow { narrow_place(listed.cookie) } else { listed.cookie };
        let (length, cached) = (self.reply.body_length(), self.reply.cached_count());
        let head = if self.plus { ENTRY_BYTES } else { size_of::<Dirent>() };
        if length + (head + listed.name.len()).next_multiple_of(8) > self.size {
            let (last, length, cached) = self.last;
            // A page that has room for nothing else keeps its entries, or the listing would never continue.
            if last == place && length > 0 {
                self.reply.truncate(length);
                self.reply.truncate_cached(cached);
            }
            return false;
        }
        if self.last.0 == place {
            let off = self.last_dirent + offset_of!(Dirent, off);
            self.reply.body_mut(off..off + size_of::<u64>()).copy_from_slice((place - 1).as_bytes());
        } else {
            self.last = (place, length, cached);
        }
        self.last_dirent = length + head - size_of::<Dirent>();
        self.result = self.put_entry(listed, place);
        self.result.is_ok()
    }

    fn put_entry(&mut self, listed: &Listed, place: u64) -> Result<(), Errno> {
        if self.plus {
            self.reply.structure(&EntryOut {
                // Node number 0 says that this name has no attributes.
                nodeid: listed.inode.as_ref().map_or(0, |_| listed.id.0),
                attr: listed.inode.as_ref().map(|inode| fuse_attr(listed.id, inode)).unwrap_or_default(),
                ..EntryOut::default()
            })?;
        }
        let namelen = u32::try_from(listed.name.len()).map_err(|_| Errno::EIO)?;
        let dirent = Dirent { ino: listed.id.0, off: place, namelen, kind: listed.kind as u32 };
        self.reply.structure(&dirent)?;
        let start = self.reply.body_length();
        self.reply.bytes(&listed.name)?;
        let end = self.reply.body_length();
        self.reply.bytes([0; 7].get(..end.next_multiple_of(8) - end).unwrap_or_default())?;
        if self.plus && listed.inode.is_some() {
            self.reply.record_cached(CachedItem::Listed(self.directory, listed.id, start..end));
        }
        Ok(())
    }
}

/// Makes an entry for the directory itself or its parent.
fn dot_entry(name: &[u8], id: InodeId, cookie: u64) -> Listed {
    Listed { cookie, name: name.to_vec(), id, kind: FileKind::Directory, inode: None }
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// OPENDIR. The handle keeps a removed directory, as it keeps a removed file. The kernel may keep listings while no
    /// other session can change them. At the start of each listing it compares the directory's time of change. It may
    /// miss that answer if it is made to forget at the same moment. A kept listing has places of 63 bits.
    pub(crate) fn opendir(self) -> RequestResult {
        let inode = self.inode();
        self.fs().open(inode)?;
        let is_narrow = calling_thread::is_32_bit(self.header.pid);
        let cached = !is_narrow && self.fs().name_ttl_ms(inode) > 0;
        let open_flags = if cached { fopen::KEEP_CACHE | fopen::CACHE_DIR } else { 0 };
        let fh = if is_narrow { HANDLE_NARROW } else { 0 };
        self.reply.structure(&OpenOut { fh, open_flags, ..OpenOut::default() })?;
        if cached {
            self.reply.record_cached(CachedItem::Pages(inode));
        }
        Ok(ReplyAction::SendOpened(inode, 0))
    }

    /// RELEASEDIR.
    pub(crate) fn releasedir(self) -> RequestResult {
        self.fs().close(self.inode());
        Ok(ReplyAction::Send)
    }

    /// READDIR.
    pub(crate) fn readdir(mut self) -> RequestResult {
        self.list_entries(false)?;
        self.reply.record_cached(CachedItem::Pages(InodeId(self.header.nodeid)));
        Ok(ReplyAction::Send)
    }

    /// READDIRPLUS.
    pub(crate) fn readdirplus(mut self) -> RequestResult {
        self.list_entries(true)?;
        let directory = self.inode();
        self.set_validity(directory)?;
        self.reply.record_cached(CachedItem::Pages(directory));
        Ok(ReplyAction::Send)
    }

    fn list_entries(&mut self, plus: bool) -> Result<(), Errno> {
        let asked: ReadIn = self.arguments.structure()?;
        let directory = self.inode();
        let fs = &self.mount.file_system;
        let size = (asked.size as usize).min(TRANSFER_BYTES);
        let narrow = asked.fh & HANDLE_NARROW != 0;
        let mut page = ListingPage { narrow, ..ListingPage::new(self.reply, directory, size, plus) };
        if asked.offset < COOKIE_SELF && !page.add_entry(&dot_entry(b".", directory, COOKIE_SELF)) {
            return page.result;
        }
        if asked.offset < COOKIE_PARENT {
            let parent = fs.attributes(directory)?.inode.parent;
            if !page.add_entry(&dot_entry(b"..", parent, COOKIE_PARENT)) {
                return page.result;
            }
        }
        let after = match asked.offset {
            0..=COOKIE_PARENT => 0,
            place if narrow => widen_place(place),
            cookie => cookie,
        };
        fs.list(directory, after, &mut |listed| page.add_entry(&listed))?;
        page.result
    }

    /// Sets how long the kernel may keep the entries of a listing, and how many blocks it may show of each. This asks
    /// LibFS after the listing, and not for each entry within it, where LibFS may hold its locks.
    fn set_validity(&mut self, directory: InodeId) -> Result<(), Errno> {
        let (entry_valid, entry_valid_nsec) = validity(self.name_ttl_ms(directory));
        let fs = &self.mount.file_system;
        for index in 0..self.reply.cached_count() {
            let Some(CachedItem::Listed(_, inode, name)) = self.reply.cached_items().get(index) else { continue };
            let (inode, start) = (*inode, name.start - ENTRY_BYTES);
            let (attr_valid, attr_valid_nsec) = validity(fs.cache_ttl_ms(inode));
            let bytes = self.reply.body_mut(start..start + size_of::<EntryOut>());
            let entry = EntryOut::read_from_bytes(bytes).map_err(|_| Errno::EIO)?;
            let blocks = self.mount.kernel_cache.mappable.shown_blocks(inode, entry.attr.size, entry.attr.blocks);
            let attr = Attr { blocks, ..entry.attr };
            let entry = EntryOut { entry_valid, entry_valid_nsec, attr_valid, attr_valid_nsec, attr, ..entry };
            bytes.copy_from_slice(entry.as_bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(cookie: u64, name: &str) -> Listed {
        Listed { cookie, name: name.into(), id: InodeId(30), kind: FileKind::Regular, inode: None }
    }

    fn page(reply: &mut ReplyBuffer, size: usize) -> ListingPage<'_> {
        ListingPage::new(reply, InodeId::ROOT, size, false)
    }

    #[test]
    fn entries_are_padded_to_eight_bytes() {
        let mut reply = ReplyBuffer::new(4096);
        assert!(page(&mut reply, 4096).add_entry(&listed(77, "abc")));
        assert_eq!(reply.body_length(), 32);
        let dirent = Dirent::read_from_bytes(reply.body(0..24)).unwrap();
        assert_eq!((dirent.ino, dirent.off, dirent.namelen, dirent.kind), (30, 77, 3, 8));
        assert_eq!(reply.body(24..32), b"abc\0\0\0\0\0");
    }

    #[test]
    fn entries_that_share_a_cookie_stay_in_one_page() {
        let mut reply = ReplyBuffer::new(4096);
        let mut page = page(&mut reply, 96);
        assert!(page.add_entry(&listed(5, "a")));
        assert!(page.add_entry(&listed(9, "b")));
        assert!(page.add_entry(&listed(9, "c")));
        assert!(!page.add_entry(&listed(9, "d")));
        assert_eq!(reply.body_length(), 32, "the listing continues after 5, not after 9");
    }

    #[test]
    fn listing_continues_before_entries_that_share_a_place() {
        let mut reply = ReplyBuffer::new(4096);
        let mut page = ListingPage { narrow: true, ..page(&mut reply, 4096) };
        for (high, name) in [(7, "a"), (9, "b"), (9, "c"), (9, "d"), (0, "e")] {
            assert!(page.add_entry(&listed((high << 32) + 5, name)));
        }
        let off = |at: usize| Dirent::read_from_bytes(reply.body(at..at + 24)).unwrap().off;
        assert_eq!([0, 32, 64, 96, 128].map(off), [7, 8, 8, 9, 3]);
    }

    #[test]
    fn narrow_places_keep_the_order_and_fit() {
        let cookies = [1, 2, 3, 4 << 32, (4 << 32) + 7, 5 << 32, i64::MAX as u64];
        let places = cookies.map(narrow_place);
        assert!(places.is_sorted() && places[6] == i32::MAX as u64);
        for (cookie, place) in cookies.into_iter().zip(places) {
            assert!(widen_place(place) >= cookie && narrow_place(widen_place(place)) == place, "{cookie}");
        }
        assert!(widen_place(4) < cookies[5], "no following entry is skipped");
    }

    #[test]
    fn full_page_keeps_its_entries() {
        let mut reply = ReplyBuffer::new(4096);
        let mut page = page(&mut reply, 40);
        assert!(page.add_entry(&listed(5, "a")));
        assert!(!page.add_entry(&listed(6, "b")));
        assert_eq!(reply.body_length(), 32);
    }
}
