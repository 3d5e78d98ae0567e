//! Lists directories.

use ashlar_libfs::ListedName;
use ashlar_types::Errno;

use super::Served;
use crate::files::descriptors;
use crate::memory::program_memory;

/// Bytes of `linux_dirent64` before the name: inode:8 offset:8 length:2 kind:1.
const HEAD_BYTES: usize = 19;
/// The padding after a name, up to the entry's end.
const ZEROS: [u8; 8] = [0; 8];
/// The most bytes that one call fills.
const FILLED_MAX: usize = 1 << 20;
/// The bytes that libc asks for.
const ROOM_USUAL: usize = 32 << 10;

/// Entries in the form that the program gets.
struct ListingPage {
    bytes: Vec<u8>,
    room: usize,
    /// The last cookie, and the length of the page before its first entry.
    last: (u64, usize),
    /// The cookie from which the listing goes on.
    next: u64,
    is_full: bool,
}

impl ListingPage {
    /// Adds an entry, unless the page is full.
    ///
    /// A listing goes on after a cookie, so names that share a cookie are in one page.
    fn add(&mut self, listed: &ListedName<'_>) -> bool {
        let ListedName { cookie, name, id, kind } = *listed;
        let length = (HEAD_BYTES + name.len() + 1).next_multiple_of(8);
        if self.bytes.len() + length > self.room {
            if self.last.0 == cookie && self.last.1 > 0 {
                self.bytes.truncate(self.last.1);
                self.next = self.last_cookie();
            }
            self.is_full = true;
            return false;
        }
        if self.last.0 != cookie {
            self.last = (cookie, self.bytes.len());
        }
        let mut head = [0; HEAD_BYTES];
        head[..8].copy_from_slice(&id.0.to_le_bytes());
        head[8..16].copy_from_slice(&cookie.to_le_bytes());
        head[16..18].copy_from_slice(&(length as u16).to_le_bytes());
        head[18] = kind as u8;
        self.bytes.extend_from_slice(&head);
        self.bytes.extend_from_slice(name);
        self.bytes.extend_from_slice(&ZEROS[..length - HEAD_BYTES - name.len()]);
        self.next = cookie;
        true
    }

    /// Returns the cookie of the last entry that stayed.
    fn last_cookie(&self) -> u64 {
        let mut at = 0;
        let mut cookie = 0;
        while let Some(head) = self.bytes.get(at..at + HEAD_BYTES) {
            cookie = u64::from_le_bytes(head[8..16].try_into().unwrap_or_default());
            at += usize::from(u16::from_le_bytes([head[16], head[17]])).max(1);
        }
        cookie
    }
}

/// Serves `getdents64`.
pub(super) fn list(a: &[u64; 6]) -> Served {
    let Some(file) = descriptors::file(a[0] as i32) else { return Ok(None) };
    if !file.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let session = file.session()?;
    let Some(mut place) = file.place() else { return Ok(None) };
    let room = (a[2] as u32 as usize).min(FILLED_MAX);
    let mut page = ListingPage {
        bytes: Vec::with_capacity(room.min(ROOM_USUAL)),
        room,
        last: (0, 0),
        next: place.offset,
        is_full: false,
    };
    // Only the kernel knows the directory above the root, and FUSE lists the root's parent in the same way.
    session.fs.list_with_dots(file.inode(), place.offset, &mut |listed| page.add(&listed))?;
    if page.bytes.is_empty() && page.is_full {
        return Err(Errno::EINVAL);
    }
    program_memory::store_bytes(a[1], &page.bytes)?;
    place.offset = page.next;
    Ok(Some(page.bytes.len() as i64))
}
