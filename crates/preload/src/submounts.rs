//! What is mounted: whether a mount is an Ashlar that may be written, and what is mounted inside it. There LibFS must not look.
//!
//! The kernel's table of mounts (`mountinfo`) says all of it, and takes a tenth of a millisecond to be read: as long as some programs use a mount for.
//! From Linux 6.13 on the kernel says of a single mount what it is, and whether there are any in it; the table is read where there are.

use std::ffi::CStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use ashlar_libfs::LibFs;
use ashlar_types::{Credentials, InodeId, MOUNT_TYPE, MountLine, mount_lines, topmost_mount};

use crate::arch::{system_call, ticks};
use crate::{materialise, session};

const TABLE: &str = "/proc/self/mountinfo";

/// More than most tables are long: each read of one has the kernel write it anew from the line on where the last one ended.
const TABLE_BYTES: usize = 32 << 10;

/// System calls that the C library's interface does not know yet; their numbers are the same on all machines.
const SYS_STATMOUNT: u64 = 457;
const SYS_LISTMOUNT: u64 = 458;
/// `STATMOUNT_MNT_BASIC`, `STATMOUNT_FS_TYPE`, `STATMOUNT_FS_SUBTYPE`: what a mount is.
const KIND: u64 = 0x2 | 0x20 | 0x100;
/// `STATMOUNT_MNT_POINT`: where it is.
const POINT: u64 = 0x10;

/// `struct mnt_id_req`, as Linux 6.8 had it: whose mount is meant.
#[repr(C)]
struct Asked {
    bytes: u32,
    spare: u32,
    mount: u64,
    /// What is wanted of it, or behind which mount to go on listing.
    parameter: u64,
}

impl Asked {
    fn new(mount: u64, parameter: u64) -> Self {
        Self { bytes: size_of::<Self>() as u32, spare: 0, mount, parameter }
    }
}

/// `struct statmount` with room for strings, which say where they begin among those.
#[repr(C)]
struct Told {
    before: [u64; 1],
    /// What it tells.
    mask: u64,
    device: [u32; 2],
    magic: u64,
    flags: u32,
    fs_type: u32,
    numbers: [u64; 3],
    attributes: u64,
    others: [u64; 4],
    root: u32,
    point: u32,
    namespace: u64,
    fs_subtype: u32,
    source: u32,
    spare: [u64; 48],
    strings: [u8; 1024],
}

const _: () = assert!(std::mem::offset_of!(Told, attributes) == 64 && std::mem::offset_of!(Told, point) == 108);
const _: () = assert!(std::mem::offset_of!(Told, fs_subtype) == 120);
const _: () = assert!(std::mem::offset_of!(Told, strings) == 512);

impl Told {
    fn string(&self, at: u32) -> Option<&CStr> {
        CStr::from_bytes_until_nul(self.strings.get(at as usize..)?).ok()
    }
}

/// What the kernel says of a mount, by its number; `None` where it does not say all that is wanted, or there is no such mount any more.
fn ask(mount: u64, wanted: u64) -> Option<Told> {
    let asked = Asked::new(mount, wanted);
    // SAFETY: zeros are one, which the call fills as far as it is long.
    let (done, told) = unsafe {
        let mut told: Told = std::mem::zeroed();
        let (to, bytes) = ((&raw mut told) as u64, size_of::<Told>() as u64);
        (system_call(SYS_STATMOUNT, [(&raw const asked) as u64, to, bytes, 0, 0, 0]), told)
    };
    (done >= 0 && told.mask & wanted == wanted).then_some(told)
}

/// Whether a mount is an Ashlar that may be written; `None` where the kernel does not say.
fn is_writable_ashlar(mount: u64) -> Option<bool> {
    let told = ask(mount, KIND)?;
    let (kind, subtype) = (told.string(told.fs_type)?.to_str().ok()?, told.string(told.fs_subtype)?.to_str().ok()?);
    let is_ashlar = MOUNT_TYPE.split_once('.') == Some((kind, subtype));
    Some(is_ashlar && told.attributes & libc::MOUNT_ATTR_RDONLY == 0)
}

/// Whether nothing is mounted inside a mount; not so either where the kernel does not say.
fn is_empty(mount: u64) -> bool {
    let (asked, mut first) = (Asked::new(mount, 0), 0u64);
    let arguments = [(&raw const asked) as u64, (&raw mut first) as u64, 1, 0, 0, 0];
    // SAFETY: it fills one number at most.
    unsafe { system_call(SYS_LISTMOUNT, arguments) == 0 }
}

/// A mount as it was first looked at.
#[derive(Debug)]
pub(crate) enum Look {
    /// Nothing is mounted in the one of this number.
    Empty(u64),
    /// What is, stands in the table.
    Table(Table),
}

impl Look {
    /// Looks at the mount on a path, whose root is open; `None` where it is no Ashlar that may be written.
    pub(crate) fn at(path: &[u8], root: BorrowedFd<'_>) -> Option<Self> {
        if let Some(mount) = session::mount_number(root.as_raw_fd()) {
            match is_writable_ashlar(mount) {
                Some(false) => return None,
                Some(true) if is_empty(mount) => return Some(Self::Empty(mount)),
                _ => {}
            }
        }
        Table::read().filter(|table| is_writable_ashlar_in(&table.text, path)).map(Self::Table)
    }
}

/// What the kernel says is mounted. It says through the file when that has changed since it was opened.
#[derive(Debug)]
pub(crate) struct Table {
    file: File,
    text: Vec<u8>,
}

impl Table {
    /// Reads the table.
    fn read() -> Option<Self> {
        let mut file = File::open(TABLE).ok()?;
        let mut text = Vec::with_capacity(TABLE_BYTES);
        file.read_to_end(&mut text).ok()?;
        Some(Self { file, text })
    }
}

fn is_writable_ashlar_in(table: &[u8], path: &[u8]) -> bool {
    topmost_mount(table, path).is_some_and(|line| line.is_ashlar() && !line.is_read_only())
}

/// Whether a mount is still on a path, and nothing is mounted in it, nor on it. The path is not followed: what it leads through may not answer.
fn is_still(mount: u64, path: &[u8]) -> bool {
    is_empty(mount) && ask(mount, POINT).is_some_and(|told| told.string(told.point).map(CStr::to_bytes) == Some(path))
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
    /// The mount's number, while the table was not needed; else 0.
    empty: AtomicU64,
    table: OnceLock<Option<File>>,
    looked: AtomicU64,
    is_any: AtomicBool,
    version: AtomicU64,
    directories: Mutex<Vec<InodeId>>,
    /// Whether the mount itself is not to be seen at its path any more: it was taken out of the tree (`ashlar umount --lazy`), or
    /// something was mounted over it. It stays so.
    is_gone: AtomicBool,
}

impl Covered {
    /// Those of the mount on a path, as it was just looked at.
    pub(crate) fn new(look: Look, path: &[u8], fs: &LibFs) -> Self {
        let covered = Self {
            empty: AtomicU64::new(0),
            table: OnceLock::new(),
            looked: AtomicU64::new(ticks()),
            is_any: AtomicBool::new(false),
            version: AtomicU64::new(0),
            directories: Mutex::default(),
            is_gone: AtomicBool::new(false),
        };
        match look {
            Look::Empty(mount) => covered.empty.store(mount, Ordering::Relaxed),
            Look::Table(table) => {
                covered.table.get_or_init(|| materialise::high(table.file.into()).ok().map(File::from));
                covered.take(&table.text, path, fs);
            }
        }
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
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Looks at the table again if it has changed, and was not looked at just now; at once, if `now` says so.
    pub(crate) fn renew(&self, path: &[u8], fs: &LibFs, now: bool) {
        let is_due = now || ticks().wrapping_sub(self.looked.load(Ordering::Relaxed)) > LOOK_TICKS;
        if !is_due && !IS_SUSPECTED.load(Ordering::Relaxed) {
            return;
        }
        IS_SUSPECTED.store(false, Ordering::Relaxed);
        self.looked.store(ticks(), Ordering::Relaxed);
        if self.has_changed(path) {
            if let Ok(table) = std::fs::read(TABLE) {
                self.take(&table, path, fs);
            }
        }
    }

    fn has_changed(&self, path: &[u8]) -> bool {
        let empty = self.empty.load(Ordering::Relaxed);
        if empty != 0 && is_still(empty, path) {
            return false;
        }
        self.empty.store(0, Ordering::Relaxed);
        let mut is_new = false;
        let open = || materialise::high(File::open(TABLE).ok()?.into()).ok().map(File::from);
        let table = self.table.get_or_init(|| {
            is_new = true;
            open()
        });
        let Some(table) = table.as_ref().filter(|_| !is_new) else { return true };
        let mut polled = libc::pollfd { fd: table.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
        // SAFETY: it fills one structure, and waits for nothing.
        let count = unsafe { system_call(libc::SYS_poll as u64, [(&raw mut polled) as u64, 1, 0, 0, 0, 0]) };
        count != 0
    }

    /// Changes with the directories on which something is mounted.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
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
