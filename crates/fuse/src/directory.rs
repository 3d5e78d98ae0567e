//! Directories: OPENDIR, READDIR, READDIRPLUS, RELEASEDIR.

use ashlar_libfs::Listed;
use ashlar_types::{COOKIE_PARENT, COOKIE_SELF, Errno, FileKind, InodeId};
use zerocopy::{FromBytes, IntoBytes};

use crate::attr::{attr, validity};
use crate::device::TRANSFER_BYTES;
use crate::dispatch::{Answer, Call, Then};
use crate::file_system::FileSystem;
use crate::proto::{Attr, Dirent, EntryOut, OpenOut, ReadIn, fopen};
use crate::reply::{Check, Reply};

const ENTRY_BYTES: usize = size_of::<EntryOut>() + size_of::<Dirent>();

/// Entries on their way into a reply.
struct Page<'a> {
    reply: &'a mut Reply,
    directory: InodeId,
    size: usize,
    /// Whether attributes come with the names (READDIRPLUS).
    plus: bool,
    /// The last cookie, and what the body's length and the number of checks were before the first entry that has it.
    last: (u64, usize, usize),
    result: Result<(), Errno>,
}

impl Page<'_> {
    /// Adds an entry; `false` where it doesn't fit any more. Two names may share a cookie, and a listing goes on behind a
    /// cookie: so all entries with the same one are in one page or in the next.
    fn add(&mut self, listed: &Listed) -> bool {
        let (length, checks) = (self.reply.body_length(), self.reply.check_count());
        let head = if self.plus { ENTRY_BYTES } else { size_of::<Dirent>() };
        if length + (head + listed.name.len()).next_multiple_of(8) > self.size {
            let (cookie, length, checks) = self.last;
            // A page that has room for nothing else keeps what it has, or the listing would never go on.
            if cookie == listed.cookie && length > 0 {
                self.reply.truncate(length);
                self.reply.truncate_checks(checks);
            }
            return false;
        }
        if self.last.0 != listed.cookie {
            self.last = (listed.cookie, length, checks);
        }
        self.result = self.put(listed);
        self.result.is_ok()
    }

    fn put(&mut self, listed: &Listed) -> Result<(), Errno> {
        if self.plus {
            self.reply.structure(&EntryOut {
                // Node number 0 says that no attributes come with this name.
                nodeid: listed.inode.as_ref().map_or(0, |_| listed.id.0),
                attr: listed.inode.as_ref().map(|inode| attr(listed.id, inode)).unwrap_or_default(),
                ..EntryOut::default()
            })?;
        }
        let namelen = u32::try_from(listed.name.len()).map_err(|_| Errno::EIO)?;
        let dirent = Dirent { ino: listed.id.0, off: listed.cookie, namelen, kind: listed.kind as u32 };
        self.reply.structure(&dirent)?;
        let start = self.reply.body_length();
        self.reply.bytes(&listed.name)?;
        let end = self.reply.body_length();
        self.reply.bytes([0; 7].get(..end.next_multiple_of(8) - end).unwrap_or_default())?;
        if self.plus && listed.inode.is_some() {
            self.reply.check(Check::Listed(self.directory, listed.id, start..end));
        }
        Ok(())
    }
}

/// An entry for the directory itself or its parent.
fn dot(name: &[u8], id: InodeId, cookie: u64) -> Listed {
    Listed { cookie, name: name.to_vec(), id, kind: FileKind::Directory, inode: None }
}

impl<F: FileSystem> Call<'_, F> {
    /// OPENDIR. The handle keeps a removed directory, as it keeps a removed file. The kernel may keep listings while nobody else
    /// can change them: at each start of one it compares the directory's time of change, but may miss an answer to that question
    /// when it's told to forget at the same moment.
    pub(crate) fn opendir(self) -> Answer {
        let inode = self.inode();
        self.fs().open(inode)?;
        let cached = self.fs().name_ttl_ms(inode) > 0;
        let open_flags = if cached { fopen::KEEP_CACHE | fopen::CACHE_DIR } else { 0 };
        self.reply.structure(&OpenOut { open_flags, ..OpenOut::default() })?;
        if cached {
            self.reply.check(Check::Pages(inode));
        }
        Ok(Then::SendOpened(inode, 0))
    }

    /// RELEASEDIR.
    pub(crate) fn releasedir(self) -> Answer {
        self.fs().close(self.inode());
        Ok(Then::Send)
    }

    /// READDIR.
    pub(crate) fn readdir(mut self) -> Answer {
        self.list(false)?;
        self.reply.check(Check::Pages(InodeId(self.header.nodeid)));
        Ok(Then::Send)
    }

    /// READDIRPLUS.
    pub(crate) fn readdirplus(mut self) -> Answer {
        self.list(true)?;
        let directory = self.inode();
        self.set_validity(directory)?;
        self.reply.check(Check::Pages(directory));
        Ok(Then::Send)
    }

    fn list(&mut self, plus: bool) -> Result<(), Errno> {
        let asked: ReadIn = self.arguments.structure()?;
        let directory = self.inode();
        let fs = &self.server.file_system;
        let size = (asked.size as usize).min(TRANSFER_BYTES);
        let mut page = Page { reply: self.reply, directory, size, plus, last: (0, 0, 0), result: Ok(()) };
        if asked.offset < COOKIE_SELF && !page.add(&dot(b".", directory, COOKIE_SELF)) {
            return page.result;
        }
        if asked.offset < COOKIE_PARENT {
            let parent = fs.attributes(directory)?.inode.parent;
            if !page.add(&dot(b"..", parent, COOKIE_PARENT)) {
                return page.result;
            }
        }
        let after = if asked.offset <= COOKIE_PARENT { 0 } else { asked.offset };
        fs.list(directory, after, &mut |listed| page.add(&listed))?;
        page.result
    }

    /// Says how long the kernel may keep the entries of a listing, and which blocks it may be shown of each. That is asked after
    /// the listing, and not for each entry within it, where LibFS may hold its locks.
    fn set_validity(&mut self, directory: InodeId) -> Result<(), Errno> {
        let (entry_valid, entry_valid_nsec) = validity(self.name_ttl_ms(directory));
        let fs = &self.server.file_system;
        for index in 0..self.reply.check_count() {
            let Some(Check::Listed(_, inode, name)) = self.reply.checks().get(index) else { continue };
            let (inode, start) = (*inode, name.start - ENTRY_BYTES);
            let (attr_valid, attr_valid_nsec) = validity(fs.cache_ttl_ms(inode));
            let bytes = self.reply.body_mut(start..start + size_of::<EntryOut>());
            let entry = EntryOut::read_from_bytes(bytes).map_err(|_| Errno::EIO)?;
            let blocks = self.server.dirty_pages.shown_blocks(inode, entry.attr.size, entry.attr.blocks);
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

    fn page(reply: &mut Reply, size: usize) -> Page<'_> {
        Page { reply, directory: InodeId::ROOT, size, plus: false, last: (0, 0, 0), result: Ok(()) }
    }

    #[test]
    fn entries_are_padded_to_eight_bytes() {
        let mut reply = Reply::new(4096);
        assert!(page(&mut reply, 4096).add(&listed(77, "abc")));
        assert_eq!(reply.body_length(), 32);
        let dirent = Dirent::read_from_bytes(reply.body(0..24)).unwrap();
        assert_eq!((dirent.ino, dirent.off, dirent.namelen, dirent.kind), (30, 77, 3, 8));
        assert_eq!(reply.body(24..32), b"abc\0\0\0\0\0");
    }

    #[test]
    fn entries_that_share_a_cookie_are_not_parted() {
        let mut reply = Reply::new(4096);
        let mut page = page(&mut reply, 96);
        assert!(page.add(&listed(5, "a")));
        assert!(page.add(&listed(9, "b")));
        assert!(page.add(&listed(9, "c")));
        assert!(!page.add(&listed(9, "d")));
        assert_eq!(reply.body_length(), 32, "the listing goes on behind 5, not behind 9");
    }

    #[test]
    fn a_full_page_ends_where_it_is() {
        let mut reply = Reply::new(4096);
        let mut page = page(&mut reply, 40);
        assert!(page.add(&listed(5, "a")));
        assert!(!page.add(&listed(6, "b")));
        assert_eq!(reply.body_length(), 32);
    }
}
