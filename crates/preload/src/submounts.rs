//! What is mounted: whether a mount is an Ashlar that may be written, and what is mounted inside it. There LibFS must not look.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use ashlar_libfs::LibFs;
use ashlar_types::{Credentials, InodeId};

use crate::arch::{system_call, ticks};

const TABLE: &str = "/proc/self/mountinfo";
const TYPE: &[u8] = b"fuse.ashlar";

/// A line of the table: mount point, options, type.
struct Line<'a> {
    point: Vec<u8>,
    options: &'a [u8],
    kind: &'a [u8],
}

/// Reads `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
fn parse(line: &[u8]) -> Option<Line<'_>> {
    let mut words = line.split(|&byte| byte == b' ');
    let point = unescape(words.nth(4)?);
    let options = words.next()?;
    let kind = words.skip_while(|word| *word != b"-").nth(1)?;
    Some(Line { point, options, kind })
}

/// Blanks and backslashes stand as three octal digits behind a backslash.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(|_| first == b'\\') {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    bytes
}

/// Whether what is mounted topmost on a path is an Ashlar, and may be written.
pub(crate) fn is_writable_ashlar(path: &[u8]) -> bool {
    let Ok(table) = std::fs::read(TABLE) else { return false };
    let topmost = table.rsplit(|&byte| byte == b'\n').filter_map(parse).find(|line| line.point == path);
    topmost
        .is_some_and(|line| line.kind == TYPE && line.options.split(|&byte| byte == b',').all(|option| option != b"ro"))
}

/// The directories below a path on which something is mounted.
fn below(path: &[u8], fs: &LibFs) -> Vec<InodeId> {
    let Ok(table) = std::fs::read(TABLE) else { return Vec::new() };
    let who = Credentials::checked(0, 0);
    let inside = |line: Line<'_>| {
        let rest = line.point.strip_prefix(path)?.strip_prefix(b"/")?.to_vec();
        rest.split(|&byte| byte == b'/').try_fold(InodeId::ROOT, |at, name| Some(fs.lookup(&who, at, name).ok()?.id))
    };
    table.split(|&byte| byte == b'\n').filter_map(parse).filter_map(inside).collect()
}

/// Ticks of the processor's clock after which the table is looked at again, as others may mount something at any time: some milliseconds.
const LOOK_TICKS: u64 = 1 << 24;

/// Something may have been mounted.
static IS_SUSPECTED: AtomicBool = AtomicBool::new(false);

/// Has the table be looked at before the next path is followed.
pub(crate) fn suspect() {
    IS_SUSPECTED.store(true, Ordering::Relaxed);
}

/// The directories of a mount on which something is mounted, as of a moment ago.
#[derive(Debug)]
pub(crate) struct Covered {
    table: Option<File>,
    looked: AtomicU64,
    is_any: AtomicBool,
    directories: Mutex<Vec<InodeId>>,
}

impl Covered {
    /// Those of the mount on a path.
    pub(crate) fn new(path: &[u8], fs: &LibFs) -> Self {
        // The kernel says through it when something was mounted. It is opened before the table is read.
        let table = File::open(TABLE).ok().and_then(|low| crate::materialise::high(low.into()).ok()).map(File::from);
        let covered = Self {
            table,
            looked: AtomicU64::new(ticks()),
            is_any: AtomicBool::new(false),
            directories: Mutex::default(),
        };
        covered.set(below(path, fs));
        covered
    }

    fn set(&self, directories: Vec<InodeId>) {
        self.is_any.store(!directories.is_empty(), Ordering::Relaxed);
        *self.directories.lock().unwrap_or_else(PoisonError::into_inner) = directories;
    }

    /// Looks at the table again if it has changed, and was not looked at just now; at once, if `now` says so.
    pub(crate) fn renew(&self, path: &[u8], fs: &LibFs, now: bool) {
        let is_due = now || ticks().wrapping_sub(self.looked.load(Ordering::Relaxed)) > LOOK_TICKS;
        if !is_due && !IS_SUSPECTED.load(Ordering::Relaxed) {
            return;
        }
        IS_SUSPECTED.store(false, Ordering::Relaxed);
        self.looked.store(ticks(), Ordering::Relaxed);
        if self.has_changed() {
            self.set(below(path, fs));
        }
    }

    fn has_changed(&self) -> bool {
        let Some(table) = &self.table else { return true };
        let mut polled = libc::pollfd { fd: table.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
        // SAFETY: it fills one structure, and waits for nothing.
        let count = unsafe { system_call(libc::SYS_poll as u64, [(&raw mut polled) as u64, 1, 0, 0, 0, 0]) };
        count != 0
    }

    /// Whether something is mounted on a directory.
    pub(crate) fn contains(&self, directory: InodeId) -> bool {
        self.is_any.load(Ordering::Relaxed)
            && self.directories.lock().unwrap_or_else(PoisonError::into_inner).contains(&directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_table_are_understood() {
        let line = parse(br"36 35 98:0 / /mnt\040a ro,noatime master:1 shared:2 - fuse.ashlar x rw").expect("a line");
        assert_eq!(line.point, b"/mnt a");
        assert_eq!((line.options, line.kind), (&b"ro,noatime"[..], TYPE));
        assert!(parse(b"36 35").is_none());
    }
}
