//! Submounts: whether a mount is a writable Ashlar, and what is mounted inside it.
//!
//! LibFS must not resolve paths below those. The kernel's table of mounts (`mountinfo`) says all of this. But reading
//! it takes a tenth of a millisecond: as long as some programs use a mount for. From Linux 6.13 on, the kernel answers
//! for a single mount what it is, and whether there are any mounts in it; the table is read only if there are.

use std::ffi::CStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use ashlar_libfs::LibFs;
use ashlar_types::{Credentials, InodeId, MOUNT_TYPE, MountLine, mount_lines, topmost_mount};

use crate::entry::arch::{system_call, ticks};
use crate::files::materialise;
use crate::sessions::session;

const TABLE: &str = "/proc/self/mountinfo";

/// More bytes than most tables have.
///
/// For each read, the kernel writes the table anew from the line after the last one.
const TABLE_BYTES: usize = 32 << 10;

/// System calls that libc has no names for yet.
///
/// Their numbers are the same on all machines.
const SYS_STATMOUNT: u64 = 457;
const SYS_LISTMOUNT: u64 = 458;
/// `STATMOUNT_MNT_BASIC`, `STATMOUNT_FS_TYPE`, `STATMOUNT_FS_SUBTYPE`: the type of a mount.
const KIND: u64 = 0x2 | 0x20 | 0x100;
/// `STATMOUNT_MNT_POINT`: the mount point.
const POINT: u64 = 0x10;

/// `struct mnt_id_req` of Linux 6.8: the request about a mount.
#[repr(C)]
struct MountRequest {
    bytes: u32,
    spare: u32,
    mount: u64,
    /// The requested fields, or the mount after which a list goes on.
    parameter: u64,
}

impl MountRequest {
    fn new(mount: u64, parameter: u64) -> Self {
        Self { bytes: size_of::<Self>() as u32, spare: 0, mount, parameter }
    }
}

/// `struct statmount` with room for strings; its fields give their offsets there.
#[repr(C)]
struct MountAnswer {
    before: [u64; 1],
    /// The fields that are filled.
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

const _: () =
    assert!(std::mem::offset_of!(MountAnswer, attributes) == 64 && std::mem::offset_of!(MountAnswer, point) == 108);
const _: () = assert!(std::mem::offset_of!(MountAnswer, fs_subtype) == 120);
const _: () = assert!(std::mem::offset_of!(MountAnswer, strings) == 512);

impl MountAnswer {
    fn string(&self, at: u32) -> Option<&CStr> {
        CStr::from_bytes_until_nul(self.strings.get(at as usize..)?).ok()
    }
}

/// Asks the kernel about a mount, by its number.
///
/// Returns `None` if the kernel does not fill all requested fields, or the mount is gone.
fn ask_about_mount(mount: u64, wanted: u64) -> Option<MountAnswer> {
    let asked = MountRequest::new(mount, wanted);
    // SAFETY: zeros are a value, which the call fills up to its length.
    let (done, answer) = unsafe {
        let mut answer: MountAnswer = std::mem::zeroed();
        let (to, bytes) = ((&raw mut answer) as u64, size_of::<MountAnswer>() as u64);
        (system_call(SYS_STATMOUNT, [(&raw const asked) as u64, to, bytes, 0, 0, 0]), answer)
    };
    (done >= 0 && answer.mask & wanted == wanted).then_some(answer)
}

/// Returns whether a mount is a writable Ashlar; `None` if the kernel does not say.
fn is_writable_ashlar(mount: u64) -> Option<bool> {
    let answer = ask_about_mount(mount, KIND)?;
    let (kind, subtype) =
        (answer.string(answer.fs_type)?.to_str().ok()?, answer.string(answer.fs_subtype)?.to_str().ok()?);
    let is_ashlar = MOUNT_TYPE.split_once('.') == Some((kind, subtype));
    Some(is_ashlar && answer.attributes & libc::MOUNT_ATTR_RDONLY == 0)
}

/// Returns whether nothing is mounted inside a mount.
///
/// Returns `false` if the kernel does not say.
fn has_no_submounts(mount: u64) -> bool {
    let (asked, mut first) = (MountRequest::new(mount, 0), 0u64);
    let arguments = [(&raw const asked) as u64, (&raw mut first) as u64, 1, 0, 0, 0];
    // SAFETY: it fills one number at most.
    unsafe { system_call(SYS_LISTMOUNT, arguments) == 0 }
}

/// The first check of a mount.
#[derive(Debug)]
pub(crate) enum FirstCheck {
    /// Nothing is mounted in the mount of this number.
    Empty(u64),
    /// The table names the mounts inside.
    Table(MountTable),
}

impl FirstCheck {
    /// Checks the mount on a path, whose root is open; `None` if it is no writable Ashlar.
    pub(crate) fn check_mount(path: &[u8], root: BorrowedFd<'_>) -> Option<Self> {
        if let Some(mount) = session::mount_number(root.as_raw_fd()) {
            match is_writable_ashlar(mount) {
                Some(false) => return None,
                Some(true) if has_no_submounts(mount) => return Some(Self::Empty(mount)),
                _ => {}
            }
        }
        MountTable::read_table().filter(|table| is_writable_ashlar_in(&table.text, path)).map(Self::Table)
    }
}

/// The kernel's table of mounts.
///
/// The file reports when the table has changed since it was opened.
#[derive(Debug)]
pub(crate) struct MountTable {
    file: File,
    text: Vec<u8>,
}

impl MountTable {
    /// Reads the table.
    fn read_table() -> Option<Self> {
        let mut file = File::open(TABLE).ok()?;
        let mut text = Vec::with_capacity(TABLE_BYTES);
        file.read_to_end(&mut text).ok()?;
        Some(Self { file, text })
    }
}

fn is_writable_ashlar_in(table: &[u8], path: &[u8]) -> bool {
    topmost_mount(table, path).is_some_and(|line| line.is_ashlar() && !line.is_read_only())
}

/// Returns whether a mount is still on a path, with nothing mounted in it or on it.
///
/// The path is not resolved: file systems on the way may not answer.
fn is_still_mounted(mount: u64, path: &[u8]) -> bool {
    has_no_submounts(mount)
        && ask_about_mount(mount, POINT)
            .is_some_and(|answer| answer.string(answer.point).map(CStr::to_bytes) == Some(path))
}

/// Returns the directories below a path on which something is mounted.
fn directories_below(table: &[u8], path: &[u8], fs: &LibFs) -> Vec<InodeId> {
    let user = Credentials::checked(0, 0);
    let inside = |line: MountLine<'_>| {
        let rest = line.point.strip_prefix(path)?.strip_prefix(b"/")?.to_vec();
        rest.split(|&byte| byte == b'/').try_fold(InodeId::ROOT, |at, name| Some(fs.lookup(&user, at, name).ok()?.id))
    };
    mount_lines(table).filter_map(inside).collect()
}

/// Ticks of the processor's clock between checks of the table: milliseconds.
///
/// Other processes may mount something at any time.
const CHECK_TICKS: u64 = 1 << 24;

/// Whether something may have been mounted.
static IS_SUSPECTED: AtomicBool = AtomicBool::new(false);

/// Makes the next path check the table first.
pub(crate) fn suspect_change() {
    IS_SUSPECTED.store(true, Ordering::Relaxed);
}

/// The directories of a mount on which something is mounted, as of a moment ago.
#[derive(Debug)]
pub(crate) struct Submounts {
    /// The mount's number, as long as the table was not needed; else 0.
    empty: AtomicU64,
    table: OnceLock<Option<File>>,
    last_check: AtomicU64,
    is_any: AtomicBool,
    version: AtomicU64,
    directories: Mutex<Vec<InodeId>>,
    /// Whether the mount itself can no longer be reached by its path.
    ///
    /// It was taken out of the tree (`ashlar umount --lazy`), or something was mounted over it. It stays so.
    is_gone: AtomicBool,
}

impl Submounts {
    /// Returns those of the mount on a path, from its first check.
    pub(crate) fn new(look: FirstCheck, path: &[u8], fs: &LibFs) -> Self {
        let covered = Self {
            empty: AtomicU64::new(0),
            table: OnceLock::new(),
            last_check: AtomicU64::new(ticks()),
            is_any: AtomicBool::new(false),
            version: AtomicU64::new(0),
            directories: Mutex::default(),
            is_gone: AtomicBool::new(false),
        };
        match look {
            FirstCheck::Empty(mount) => covered.empty.store(mount, Ordering::Relaxed),
            FirstCheck::Table(table) => {
                covered.table.get_or_init(|| materialise::move_high(table.file.into()).ok().map(File::from));
                covered.update(&table.text, path, fs);
            }
        }
        covered
    }

    fn update(&self, table: &[u8], path: &[u8], fs: &LibFs) {
        if !is_writable_ashlar_in(table, path) {
            self.is_gone.store(true, Ordering::Relaxed);
            return;
        }
        let directories = directories_below(table, path, fs);
        self.is_any.store(!directories.is_empty(), Ordering::Relaxed);
        *self.directories.lock().unwrap_or_else(PoisonError::into_inner) = directories;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Checks the table again if it has changed and the last check is some time ago; at once if `now`.
    pub(crate) fn refresh(&self, path: &[u8], fs: &LibFs, now: bool) {
        let is_due = now || ticks().wrapping_sub(self.last_check.load(Ordering::Relaxed)) > CHECK_TICKS;
        if !is_due && !IS_SUSPECTED.load(Ordering::Relaxed) {
            return;
        }
        IS_SUSPECTED.store(false, Ordering::Relaxed);
        self.last_check.store(ticks(), Ordering::Relaxed);
        if self.has_changed(path) {
            if let Ok(table) = std::fs::read(TABLE) {
                self.update(&table, path, fs);
            }
        }
    }

    fn has_changed(&self, path: &[u8]) -> bool {
        let empty = self.empty.load(Ordering::Relaxed);
        if empty != 0 && is_still_mounted(empty, path) {
            return false;
        }
        self.empty.store(0, Ordering::Relaxed);
        let mut is_new = false;
        let open = || materialise::move_high(File::open(TABLE).ok()?.into()).ok().map(File::from);
        let table = self.table.get_or_init(|| {
            is_new = true;
            open()
        });
        let Some(table) = table.as_ref().filter(|_| !is_new) else { return true };
        let mut polled = libc::pollfd { fd: table.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
        // SAFETY: it fills one structure, and does not wait.
        let count = unsafe { system_call(libc::SYS_poll as u64, [(&raw mut polled) as u64, 1, 0, 0, 0, 0]) };
        count != 0
    }

    /// Returns a counter that grows when these directories change.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Returns whether the kernel must resolve the mount's paths.
    pub(crate) fn is_unreachable(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }

    /// Returns whether something is mounted on a directory.
    pub(crate) fn contains(&self, directory: InodeId) -> bool {
        self.is_any.load(Ordering::Relaxed)
            && self.directories.lock().unwrap_or_else(PoisonError::into_inner).contains(&directory)
    }
}
