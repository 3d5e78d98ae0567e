//! The listing of directories.

use std::collections::VecDeque;
use std::ffi::c_char;
use std::sync::{Arc, Mutex};

use ashlar_libfs::{FinalLink, ListedName, Outcome};
use ashlar_types::{Access, Errno, InodeId, NAME_MAX};

use crate::session::{CapiSession, locked};

/// The entries fetched at a time.
const PAGE_ENTRIES: usize = 256;

/// `ashlar_dirent`: an entry for the caller.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Dirent {
    inode: libc::ino_t,
    next: libc::off_t,
    kind: u8,
    name: [c_char; NAME_MAX + 1],
}

const _: () = assert!(std::mem::offset_of!(Dirent, name) == 17 && size_of::<Dirent>() == 280, "as C lays it out");

impl Dirent {
    fn of(listed: &ListedName<'_>) -> Self {
        let mut name = [0; NAME_MAX + 1];
        // A name has at most `NAME_MAX` bytes, so the last one stays a NUL.
        name.iter_mut().zip(listed.name.iter().take(NAME_MAX)).for_each(|(to, byte)| *to = *byte as c_char);
        Self { inode: listed.id.0, next: listed.cookie as i64, kind: listed.kind as u8, name }
    }
}

/// The position of a listing.
#[derive(Debug, Default)]
struct Position {
    /// The cookie of the last entry returned.
    after: u64,
    /// Entries that were fetched and not returned yet.
    ahead: VecDeque<Dirent>,
}

/// `ashlar_dir`: a directory stream.
#[derive(Debug)]
pub struct Stream {
    pub(crate) session: Arc<CapiSession>,
    directory: InodeId,
    number: u64,
    position: Mutex<Position>,
}

impl Stream {
    /// Begins a listing.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn open(session: &Arc<CapiSession>, path: &[u8]) -> Outcome<Self> {
        let directory = session.act_on(path, FinalLink::Follow, |found| {
            if !found.inode.is_directory() {
                return Err(Errno::ENOTDIR);
            }
            session.fs.check_access(&session.user, found.id, Access::READ)?;
            Ok(session.fs.open(found.id)?.id)
        })?;
        let number = session.record_stream(directory);
        Ok(Self { session: Arc::clone(session), directory, number, position: Mutex::default() })
    }

    /// Returns the next entry, if one is left.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn next(&self) -> Outcome<Option<Dirent>> {
        let position = &mut *locked(&self.position);
        if position.ahead.is_empty() {
            let ahead = &mut position.ahead;
            self.session.fs.list_with_dots(self.directory, position.after, &mut |listed| {
                // Names that share a cookie are fetched together, since a listing continues behind a cookie.
                let is_full =
                    ahead.len() >= PAGE_ENTRIES && ahead.back().is_none_or(|last| last.next != listed.cookie as i64);
                if !is_full {
                    ahead.push_back(Dirent::of(&listed));
                }
                !is_full
            })?;
        }
        let next = position.ahead.pop_front();
        if let Some(entry) = &next {
            position.after = entry.next as u64;
        }
        Ok(next)
    }

    /// Returns the position of the listing.
    pub(crate) fn tell(&self) -> i64 {
        locked(&self.position).after as i64
    }

    /// Moves the listing to another position.
    ///
    /// # Errors
    /// `EINVAL` if the position is negative.
    pub(crate) fn seek(&self, place: i64) -> Outcome<()> {
        let after = u64::try_from(place).map_err(|_| Errno::EINVAL)?;
        *locked(&self.position) = Position { after, ahead: VecDeque::new() };
        Ok(())
    }

    /// Ends the listing. In a child of the session's process, the session stays untouched.
    pub(crate) fn close(self) {
        if self.session.is_of_this_process() {
            self.session.close_stream(self.number);
        } else {
            std::mem::forget(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_types::FileKind;

    #[test]
    fn longest_name_ends_with_a_nul() {
        let listed = ListedName { cookie: 7, name: &[b'n'; NAME_MAX], id: InodeId(30), kind: FileKind::Symlink };
        let entry = Dirent::of(&listed);
        assert_eq!((entry.inode, entry.next, entry.kind), (30, 7, libc::DT_LNK));
        assert_eq!((entry.name[NAME_MAX - 1], entry.name[NAME_MAX]), (b'n' as c_char, 0));
    }
}
