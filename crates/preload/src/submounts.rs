//! What is mounted: whether a mount is an Ashlar that may be written, and what is mounted inside it. There LibFS must not look.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use ashlar_libfs::LibFs;
use ashlar_types::{Credentials, InodeId, MountLine, mount_lines, topmost_mount};

use crate::arch::{system_call, ticks};

const TABLE: &str = "/proc/self/mountinfo";

/// More than most tables are long: each read of one has the kernel write it anew from the line on where the last one ended.
const TABLE_BYTES: usize = 32 << 10;

/// What the kernel says is mounted. It says through the file when that has changed since it was opened.
#[derive(Debug)]
pub(crate) struct Table {
    file: File,
    text: Vec<u8>,
}

impl Table {
    /// Reads the table.
    pub(crate) fn read() -> Option<Self> {
        let mut file = File::open(TABLE).ok()?;
        let mut text = Vec::with_capacity(TABLE_BYTES);
        file.read_to_end(&mut text).ok()?;
        Some(Self { file, text })
    }

    /// Whether what is mounted topmost on a path is an Ashlar, and may be written.
    pub(crate) fn has_writable_ashlar(&self, path: &[u8]) -> bool {
        is_writable_ashlar_in(&self.text, path)
    }
}

fn is_writable_ashlar_in(table: &[u8], path: &[u8]) -> bool {
    topmost_mount(table, path).is_some_and(|line| line.is_ashlar() && !line.is_read_only())
}

/// The directories below a path on which something is mounted.
fn below(table: &[u8], path: &[u8], fs: &LibFs) -> Vec<InodeId> {
    let who = Credentials::checked(0, 0);
    let inside = |line: MountLine<'_>| {
        let rest = line.point.strip_prefix(path)?.strip_prefix(b"/")?.to_vec();
        rest.split(|&byte| byte == b'/').try_fold(InodeId::ROOT, |at, name| Some(fs.lookup(&who, at, name).ok()?.id))
    };
    mount_lines(table).filter_map(inside).collect()
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
    era: AtomicU64,
    directories: Mutex<Vec<InodeId>>,
    /// Whether the mount itself is not to be seen at its path any more: it was taken out of the tree (`ashlar umount --lazy`), or
    /// something was mounted over it. It stays so.
    is_gone: AtomicBool,
}

impl Covered {
    /// Those of the mount on a path, by a table in which it stands.
    pub(crate) fn new(table: Table, path: &[u8], fs: &LibFs) -> Self {
        let covered = Self {
            table: crate::materialise::high(table.file.into()).ok().map(File::from),
            looked: AtomicU64::new(ticks()),
            is_any: AtomicBool::new(false),
            era: AtomicU64::new(0),
            directories: Mutex::default(),
            is_gone: AtomicBool::new(false),
        };
        covered.take(&table.text, path, fs);
        covered
    }

    fn take(&self, table: &[u8], path: &[u8], fs: &LibFs) {
        if !is_writable_ashlar_in(table, path) {
            self.is_gone.store(true, Ordering::Relaxed);
            return;
        }
        let directories = below(table, path, fs);
        self.is_any.store(!directories.is_empty(), Ordering::Relaxed);
        *self.directories.lock().unwrap_or_else(PoisonError::into_inner) = directories;
        self.era.fetch_add(1, Ordering::Release);
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
            if let Ok(table) = std::fs::read(TABLE) {
                self.take(&table, path, fs);
            }
        }
    }

    fn has_changed(&self) -> bool {
        let Some(table) = &self.table else { return true };
        let mut polled = libc::pollfd { fd: table.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
        // SAFETY: it fills one structure, and waits for nothing.
        let count = unsafe { system_call(libc::SYS_poll as u64, [(&raw mut polled) as u64, 1, 0, 0, 0, 0]) };
        count != 0
    }

    /// Changes with the directories on which something is mounted.
    pub(crate) fn era(&self) -> u64 {
        self.era.load(Ordering::Acquire)
    }

    /// Whether the kernel is to follow the mount's paths.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Whether something is mounted on a directory.
    pub(crate) fn contains(&self, directory: InodeId) -> bool {
        self.is_any.load(Ordering::Relaxed)
            && self.directories.lock().unwrap_or_else(PoisonError::into_inner).contains(&directory)
    }
}
