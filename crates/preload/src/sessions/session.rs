//! Sessions with SharedFS, one for each mount, opened at the first use.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ashlar_libfs::{ADDRESS_SPACE_LEAST, ConnectError, DescriptorPolicy, LibFs, Options, PathCache};
use ashlar_types::{Credentials, Errno, InodeId};
use ashlar_wire::{PATIENCE_MS, SessionKind, decode_mounts};

use crate::entry::arch::{DESCRIPTORS, system_call};
use crate::entry::single_thread;
use crate::files::unnamed_files::{self, UnnamedFile};
use crate::files::{descriptors, materialise, path, record_locks, shared_file};
use crate::memory::heap::HeldHeap;
use crate::memory::memory_reserve::MemoryReserve;
use crate::memory::segment_mapping;
use crate::sessions::deferred_session;
use crate::sessions::submounts::{FirstCheck, Submounts};
use crate::sessions::user_sessions::{self, OtherSessions};

/// The most mounts that a process can use.
pub(crate) const MOUNTS_MAX: usize = 8;
const NOT_MOUNTED: &str = "no Ashlar is mounted there for writing";
/// The library's descriptors are the last ones below this number, or below the limit if that is less.
///
/// There they don't disturb the program's. But each fork copies the table of descriptors up to the highest one: if a
/// million descriptors are allowed, that takes a millisecond.
const DESCRIPTORS_KEPT: u64 = 64;
const DESCRIPTORS_COMMON: u64 = 1024;

/// Descriptors below this number are checked one by one for being open.
const LOWEST: i32 = 256;
/// How often the supplementary groups are asked for, while they change.
const GROUPS_TRIES: usize = 8;
/// The inode number of the machine's first user namespace (`PROC_USER_INIT_INO`).
const FIRST_USER_NAMESPACE: u64 = 0xEFFF_FFFD;
/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITIES_VERSION: u32 = 0x2008_0522;
/// `CAP_CHOWN`, `CAP_DAC_OVERRIDE`, `CAP_DAC_READ_SEARCH`, `CAP_FOWNER`, `CAP_FSETID`.
const FILE_CAPABILITIES: u32 = 0b11111;

/// The place of an Ashlar's mount, and the socket of its SharedFS.
#[derive(Debug)]
pub(crate) struct AshlarMount {
    /// The mount point, without a slash at its end.
    pub(crate) path: Vec<u8>,
    socket: PathBuf,
}

/// A session.
#[derive(Debug)]
pub(crate) struct MountSession {
    /// Its number among the mounts.
    pub(crate) number: u32,
    /// LibFS.
    pub(crate) fs: Arc<LibFs>,
    /// The user that it acts for.
    pub(crate) user: Credentials,
    /// The same, for calls through an open file: the rights were checked at the opening.
    pub(crate) admitted: Credentials,
    /// `st_dev` of all its files.
    pub(crate) device: u64,
    /// Directories on which another file system is mounted.
    pub(crate) submounts: Submounts,
    /// The paths that were resolved.
    pub(crate) paths: PathCache,
    /// The mount's root, as an `O_PATH` descriptor: that asks nothing of the mount, and still leads to it after a lazy
    /// unmount.
    root: OwnedFd,
    /// The same root, opened; negative until then.
    opened: AtomicI32,
    /// It has ended, or is that of the process from which this one was forked.
    is_over: AtomicBool,
}

impl Drop for MountSession {
    fn drop(&mut self) {
        let opened = *self.opened.get_mut();
        if opened >= 0 {
            // The number is released with those of LibFS.
            descriptors::close_number(opened);
        }
    }
}

impl MountSession {
    /// Checks again for file systems mounted in the mount, if that is due; at once if `now`.
    pub(crate) fn refresh_submounts(&self, now: bool) {
        self.submounts.refresh(&mounts()[self.number as usize].path, &self.fs, now);
    }

    /// Returns whether it is the process's current session with that mount.
    pub(crate) fn is_current(&self) -> bool {
        by_number(self.number).is_some_and(|current| std::ptr::eq(current, self))
    }

    /// Returns whether it is no longer used.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Records that it is no longer used.
    pub(crate) fn mark_over(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Closes its descriptors of the mount in a forked process.
    pub(crate) fn close_in_child(&self) {
        for number in [self.root.as_raw_fd(), self.opened.swap(-1, Ordering::Relaxed)] {
            // The program may have taken the number of a session that has ended.
            if descriptors::is_internal(number) {
                descriptors::forget_internal(number);
                descriptors::close_number(number);
            }
        }
    }

    /// Takes it from this process, which goes on with fewer rights.
    ///
    /// It has ended. If it can't be taken, as for want of memory, SharedFS still serves it no more.
    pub(crate) fn give_up(&self) {
        self.mark_over();
        let Ok(instead) = placeholder() else { return };
        // SAFETY: it stays open.
        let _ = self.fs.give_up_session(unsafe { BorrowedFd::borrow_raw(instead) });
        for number in [self.root.as_raw_fd(), self.opened.load(Ordering::Relaxed)] {
            if descriptors::is_internal(number) {
                let arguments = [instead as u64, number as u64, libc::O_CLOEXEC as u64, 0, 0, 0];
                // SAFETY: the number is the library's, and nothing more is done through it.
                unsafe { system_call(libc::SYS_dup3 as u64, arguments) };
            }
        }
    }

    /// Returns whether its changes of content clear set-id bits: those of all but the super-user do.
    pub(crate) fn strips_set_id(&self) -> bool {
        self.user.uid != 0
    }

    /// Returns an `O_PATH` descriptor of the mount's root.
    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Opens a real open file beside LibFS's: SharedFS opens it below the mount's root.
    ///
    /// # Errors
    /// Those of SharedFS.
    pub(crate) fn materialise(&self, inode: InodeId, flags: i32) -> Result<OwnedFd, Errno> {
        let root = self.root.as_raw_fd();
        let opened = open_once(&self.opened, || open_high(root, c".", libc::O_RDONLY | libc::O_DIRECTORY));
        // If the user may not open the root, pass the `O_PATH` descriptor: SharedFS may open it, and takes a little
        // longer.
        let opened = opened.unwrap_or(root);
        // SAFETY: both stay open for as long as the session.
        self.fs.materialise(unsafe { BorrowedFd::borrow_raw(opened) }, inode, flags as u32)
    }
}

static MOUNTS: OnceLock<Vec<AshlarMount>> = OnceLock::new();
static SESSIONS: [AtomicPtr<MountSession>; MOUNTS_MAX] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MOUNTS_MAX];
/// Mounts that can't be used, by bit: the kernel serves them.
static UNUSABLE: AtomicU32 = AtomicU32::new(0);
/// Mounts with no sessions for the current user, by bit: the kernel serves them until the process becomes another user.
static REFUSED: AtomicU32 = AtomicU32::new(0);
/// Held while a session is opened.
static CONNECTING: Mutex<OtherSessions> = Mutex::new(OtherSessions::NONE);
static PLACEHOLDER: AtomicI32 = AtomicI32::new(-1);
/// The file creation mask, which only the process itself changes.
pub(crate) static UMASK: AtomicU32 = AtomicU32::new(0o022);
/// How long a call waits for a SharedFS that does not answer, in milliseconds.
static CALL_PATIENCE_MS: AtomicU64 = AtomicU64::new(PATIENCE_MS);
/// The longest file that the process may write (`RLIMIT_FSIZE`).
///
/// 0: not yet asked for.
static FILE_LIMIT: AtomicU64 = AtomicU64::new(0);

/// Sets the mounts that `ashlar run` has named, and how long a call waits for their SharedFS.
pub(crate) fn set_mounts(text: &[u8], patience_ms: u64) -> bool {
    CALL_PATIENCE_MS.store(patience_ms, Ordering::Relaxed);
    let mount_of = |(path, socket): (&[u8], &[u8])| {
        let socket = PathBuf::from(std::str::from_utf8(socket).ok()?);
        path.starts_with(b"/").then(|| AshlarMount { path: path.to_vec(), socket })
    };
    let mounts: Vec<_> = decode_mounts(text).filter_map(mount_of).take(MOUNTS_MAX).collect();
    let is_any = !mounts.is_empty();
    MOUNTS.set(mounts).is_ok() && is_any
}

/// Returns the mounts.
pub(crate) fn mounts() -> &'static [AshlarMount] {
    MOUNTS.get().map_or(&[], Vec::as_slice)
}

/// Returns a session that was opened.
pub(crate) fn by_number(number: u32) -> Option<&'static MountSession> {
    let session = SESSIONS.get(number as usize)?.load(Ordering::Acquire);
    // SAFETY: a session that was opened is freed only while no other thread may use it (`user_sessions`).
    unsafe { session.as_ref() }
}

/// Returns the session for a mount.
///
/// Returns `None` if it can have none, and then the kernel serves the call.
pub(crate) fn of_mount(number: u32) -> Option<&'static MountSession> {
    if let Some(session) = by_number(number) {
        // The kernel knows where the paths of an unmounted mount lead. Its open files stay LibFS's.
        return (!session.submounts.is_unreachable()).then_some(session);
    }
    if !is_usable(number) || deferred_session::defers_session(number) {
        return None;
    }
    open_session(number)
}

/// Returns whether the current user may have a session with a mount, as far as is known.
fn is_usable(number: u32) -> bool {
    (UNUSABLE.load(Ordering::Relaxed) | REFUSED.load(Ordering::Relaxed)) & 1 << number == 0
}

/// Lets the process's next user try mounts that refused this one.
pub(crate) fn forget_refusals() {
    REFUSED.store(0, Ordering::Relaxed);
}

/// Why there is no session with a mount.
enum NoSession {
    /// It has none for this user.
    NotAdmitted,
    /// A sentence for people.
    Because(String),
}

impl From<&str> for NoSession {
    fn from(reason: &str) -> Self {
        Self::Because(reason.to_owned())
    }
}

impl From<String> for NoSession {
    fn from(reason: String) -> Self {
        Self::Because(reason)
    }
}

/// Opens a session for a mount, if there is none.
pub(crate) fn open_session(number: u32) -> Option<&'static MountSession> {
    if user_sessions::begins_no_sessions() {
        return None;
    }
    let mut others = other_sessions();
    if let Some(session) = by_number(number) {
        return Some(session);
    }
    // A refused process gets the message once.
    if !is_usable(number) || !user_sessions::may_begin_session(&others) {
        return None;
    }
    let opened = match credentials() {
        None => Err(NoSession::from("the process has other rights than its user")),
        Some(user) if others.is_refused(number, &user) => Err(NoSession::NotAdmitted),
        Some(user) => match others.resume(number, &user) {
            Some(known) => Ok(known),
            None => connect(number, &user).map(|session| &*Box::leak(Box::new(session))).inspect_err(|error| {
                if matches!(error, NoSession::NotAdmitted) {
                    others.record_refusal(number, user);
                }
            }),
        },
    };
    match opened {
        Ok(session) => {
            SESSIONS[number as usize].store(std::ptr::from_ref(session).cast_mut(), Ordering::Release);
            record_locks::record_inherited(number);
            drop(others);
            user_sessions::end_oldest(number);
            Some(session)
        }
        // That is as it should be, and needs no notice.
        Err(NoSession::NotAdmitted) => {
            REFUSED.fetch_or(1 << number, Ordering::Relaxed);
            None
        }
        Err(NoSession::Because(reason)) => {
            UNUSABLE.fetch_or(1 << number, Ordering::Relaxed);
            write_notice(&format!(
                "ashlar: {} is served by the kernel: {reason}\n",
                mounts()[number as usize].path.escape_ascii()
            ));
            None
        }
    }
}

/// Returns the sessions beside the current ones.
///
/// While this is held, none is opened.
pub(crate) fn other_sessions() -> MutexGuard<'static, OtherSessions> {
    CONNECTING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(number: u32, user: &Credentials) -> Result<MountSession, NoSession> {
    let mount = &mounts()[number as usize];
    let path = CString::new(mount.path.clone()).map_err(|_| NOT_MOUNTED)?;
    let root = open_high(libc::AT_FDCWD, &path, libc::O_PATH | libc::O_DIRECTORY);
    let root = root.map_err(|errno| format!("the mount can't be opened: {errno}"))?;
    match begin_session(mount, root.as_fd()) {
        Ok((look, fs, device)) => {
            let submounts = Submounts::new(look, &mount.path, &fs);
            let admitted = Credentials { checked: true, ..user.clone() };
            let (paths, opened, is_over) = (PathCache::default(), AtomicI32::new(-1), AtomicBool::new(false));
            let user = user.clone();
            Ok(MountSession { number, fs, user, admitted, device, submounts, paths, root, opened, is_over })
        }
        Err(reason) => {
            close_high(root);
            Err(reason)
        }
    }
}

/// Returns the beginning of a session with a mount: its submounts, LibFS, and its files' `st_dev`.
///
/// The mount's root is `root`.
fn begin_session(mount: &AshlarMount, root: BorrowedFd<'_>) -> Result<(FirstCheck, Arc<LibFs>, u64), NoSession> {
    // This asks nothing of the mount, which would make the caller wait while SharedFS is away. The answer stays the
    // same for as long as the mount exists.
    let stat = statx(root.as_raw_fd(), libc::AT_STATX_DONT_SYNC);
    let (device, inode) = stat.map(file_identity).map_err(|errno| format!("the mount can't be examined: {errno}"))?;
    if inode != InodeId::ROOT {
        return Err(NOT_MOUNTED.into());
    }
    let look = FirstCheck::check_mount(&mount.path, root).ok_or(NOT_MOUNTED)?;
    let options = Options {
        socket: mount.socket.clone(),
        kind: SessionKind::Process,
        label: process_name(),
        patience_ms: CALL_PATIENCE_MS.load(Ordering::Relaxed),
        notice: |words| write_notice(&format!("ashlar: {words}\n")),
        descriptors: DescriptorPolicy {
            from: lowest_internal() as i32,
            note: descriptors::record_session_descriptor,
            forget: descriptors::forget_session_descriptor,
        },
        beside: device,
        yields_to_kernel: true,
    };
    let fs = LibFs::connect(&options).map_err(|error| match error {
        ConnectError::NotAdmitted => NoSession::NotAdmitted,
        error => NoSession::Because(error.to_string()),
    })?;
    if let Some(placeholder) = fs.take_placeholder() {
        keep_placeholder(placeholder);
    }
    crate::HEAP.with_reserve(MemoryReserve::reserve_space);
    Ok((look, fs, device))
}

/// Returns the name of the process: that of its first thread.
fn process_name() -> String {
    // SAFETY: the calls take no arguments.
    let [thread, process] =
        [libc::SYS_gettid, libc::SYS_getpid].map(|number| unsafe { system_call(number as u64, [0; 6]) });
    if thread != process {
        return std::fs::read_to_string("/proc/self/comm").unwrap_or_default().trim_end().to_owned();
    }
    let mut name = [0u8; 16];
    // SAFETY: it fills sixteen bytes, and ends them with a zero.
    unsafe { system_call(libc::SYS_prctl as u64, [libc::PR_GET_NAME as u64, name.as_mut_ptr() as u64, 0, 0, 0, 0]) };
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// The flags to open a directory for listing.
const LISTED: i32 = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;

/// Returns all open descriptors of the process, as far as other threads leave them alone.
///
/// Most processes have few: the lowest numbers, and the library's. If those are as many as the kernel counts (from
/// Linux 6.2 on), nothing is listed, which takes fifty times as long.
pub(crate) fn open_numbers() -> Vec<i32> {
    let least = lowest_internal() as i32;
    let ours = (least..least + DESCRIPTORS_KEPT as i32).filter(|&number| descriptors::has_entry(number));
    let mut found: Vec<i32> = ours.filter(|&number| is_open(number)).collect();
    let count = statx_at(libc::AT_FDCWD, c"/proc/self/fd", 0, libc::STATX_SIZE).map_or(0, |stat| stat.stx_size);
    let mut lowest = 0..LOWEST.min(least);
    while (found.len() as u64) < count {
        match lowest.next() {
            Some(number) => found.extend(is_open(number).then_some(number)),
            None => break,
        }
    }
    // Another thread may have opened one of the lowest meanwhile, which is none of those that were counted.
    if count > 0 && found.len() as u64 == count && single_thread::is_known_single() {
        return found;
    }
    numbers_in_directory(c"/proc/self/fd")
}

/// Returns the names of a directory of the kernel's that are numbers.
///
/// Returns none if it can't be read.
///
/// It does not use libc, whose `opendir` allocates. A forking thread holds the locks of libc's heap, and may wait for
/// the listing thread.
pub(crate) fn numbers_in_directory(path: &CStr) -> Vec<i32> {
    let mut numbers = Vec::new();
    let arguments = [libc::AT_FDCWD as u64, path.as_ptr() as u64, LISTED as u64, 0, 0, 0];
    // SAFETY: the path is a string that outlives the call.
    let directory = unsafe { system_call(libc::SYS_openat as u64, arguments) };
    if directory < 0 {
        return numbers;
    }
    let mut buffer = [0_u8; 4096];
    loop {
        let arguments = [directory as u64, buffer.as_mut_ptr() as u64, buffer.len() as u64, 0, 0, 0];
        // SAFETY: the buffer is as long as stated.
        let count = unsafe { system_call(libc::SYS_getdents64 as u64, arguments) };
        let Some(mut entries) = usize::try_from(count).ok().filter(|count| *count > 0).map(|count| &buffer[..count])
        else {
            break;
        };
        // inode:8 offset:8 length:2 kind:1 name, with a zero after it
        while let Some(length) = entries.get(16..18).map(|bytes| usize::from(u16::from_ne_bytes([bytes[0], bytes[1]])))
        {
            let name = entries.get(19..length).and_then(|name| CStr::from_bytes_until_nul(name).ok());
            numbers.extend(name.and_then(|name| name.to_str().ok()?.parse::<i32>().ok()));
            entries = entries.get(length.max(19)..).unwrap_or_default();
        }
    }
    descriptors::close_number(directory as i32);
    numbers
}

fn is_open(number: i32) -> bool {
    // SAFETY: it changes nothing.
    unsafe { system_call(libc::SYS_fcntl as u64, [number as u64, libc::F_GETFD as u64, 0, 0, 0, 0]) >= 0 }
}

/// Opens a file at one of the library's descriptors.
fn open_high(directory: i32, path: &CStr, flags: i32) -> Result<OwnedFd, Errno> {
    let arguments = [directory as u64, path.as_ptr() as u64, (flags | libc::O_CLOEXEC) as u64, 0, 0, 0];
    // SAFETY: the path is a string that outlives the call.
    let low = unsafe { system_call(libc::SYS_openat as u64, arguments) };
    if low < 0 {
        return Err(Errno(-low as i32));
    }
    // SAFETY: the descriptor is new.
    materialise::move_high(unsafe { OwnedFd::from_raw_fd(low as i32) })
}

/// Closes such a file, and removes the record of its number.
fn close_high(file: OwnedFd) {
    let number = file.into_raw_fd();
    descriptors::forget_internal(number);
    descriptors::close_number(number);
}

/// Removes the records of closed descriptors of the library's.
pub(crate) fn forget_closed_internal() {
    let is_closed = |number: &i32| descriptors::is_internal(*number) && !is_open(*number);
    (0..DESCRIPTORS as i32).filter(is_closed).for_each(descriptors::forget_internal);
}

/// Returns a descriptor of the library's that is opened at the first use, and stays.
fn open_once(known: &AtomicI32, make: impl FnOnce() -> Result<OwnedFd, Errno>) -> Result<i32, Errno> {
    let found = known.load(Ordering::Acquire);
    if found >= 0 {
        return Ok(found);
    }
    let made = make()?.into_raw_fd();
    match known.compare_exchange(-1, made, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => Ok(made),
        Err(first) => {
            // SAFETY: it was just made, and no other thread has it.
            close_high(unsafe { OwnedFd::from_raw_fd(made) });
            Ok(first)
        }
    }
}

/// Returns the lowest number of the library's descriptors.
pub(crate) fn lowest_internal() -> u64 {
    soft_limit(libc::RLIMIT_NOFILE as u64).min(DESCRIPTORS_COMMON).saturating_sub(DESCRIPTORS_KEPT)
}

/// Returns whether a process may have too little address space for a session.
pub(crate) fn has_little_address_space() -> bool {
    address_space() < ADDRESS_SPACE_LEAST
}

/// Returns how much address space the process may have, in bytes.
pub(crate) fn address_space() -> u64 {
    soft_limit(libc::RLIMIT_AS as u64)
}

/// Reduces the reserve after the limit of address space was lowered, for the sessions that exist.
pub(crate) fn resize_reserve() {
    // A session that begins has reserved its part by the former limit.
    let _none_begins = other_sessions();
    crate::HEAP.with_reserve(MemoryReserve::release_space);
    if is_any_open() {
        crate::HEAP.with_reserve(MemoryReserve::reserve_space);
    }
}

/// Returns the soft limit of a resource.
fn soft_limit(resource: u64) -> u64 {
    let mut limits = [u64::MAX; 2];
    // SAFETY: the limits are a local variable.
    unsafe { system_call(libc::SYS_prlimit64 as u64, [0, resource, 0, limits.as_mut_ptr() as u64, 0, 0]) };
    limits[0]
}

/// Returns the longest file that this process may write.
pub(crate) fn file_limit() -> u64 {
    match FILE_LIMIT.load(Ordering::Relaxed) {
        0 => {
            let found = soft_limit(libc::RLIMIT_FSIZE as u64).max(1);
            FILE_LIMIT.store(found, Ordering::Relaxed);
            found
        }
        known => known,
    }
}

/// Discards the known limits, which may have changed.
pub(crate) fn forget_limits() {
    FILE_LIMIT.store(0, Ordering::Relaxed);
}

/// Returns `st_dev` and `st_ino`.
fn file_identity(stat: libc::statx) -> (u64, InodeId) {
    (libc::makedev(stat.stx_dev_major, stat.stx_dev_minor), InodeId(stat.stx_ino))
}

/// Returns the user that the process acts for.
///
/// Returns `None` if its rights are not just those of its user: the kernel knows them.
pub(crate) fn credentials() -> Option<Credentials> {
    // SAFETY: the calls take no arguments, or a user that does not exist, which changes nothing.
    let (uid, gid, fs_uid, fs_gid) = unsafe {
        let call = |number: i64, argument: u64| system_call(number as u64, [argument, 0, 0, 0, 0, 0]) as u32;
        (
            call(libc::SYS_geteuid, 0),
            call(libc::SYS_getegid, 0),
            call(libc::SYS_setfsuid, u64::MAX),
            call(libc::SYS_setfsgid, u64::MAX),
        )
    };
    let groups = groups()?;
    if !has_plain_numbers() {
        return None;
    }
    let capable = capabilities()[0] & FILE_CAPABILITIES;
    let is_plain = if uid == 0 { capable == FILE_CAPABILITIES } else { capable == 0 };
    ((uid, gid) == (fs_uid, fs_gid) && is_plain).then_some(Credentials { uid, gid, groups, checked: false })
}

/// Returns the supplementary groups.
fn groups() -> Option<Vec<u32>> {
    // SAFETY: the list is as long as stated; an empty one is only counted.
    let list = |groups: &mut [u32]| unsafe {
        let arguments = [groups.len() as u64, groups.as_mut_ptr() as u64, 0, 0, 0, 0];
        usize::try_from(system_call(libc::SYS_getgroups as u64, arguments)).ok()
    };
    // Another thread may change them in between.
    for _ in 0..GROUPS_TRIES {
        let mut groups = vec![0u32; list(&mut [])?];
        if groups.is_empty() {
            return Some(groups);
        }
        if let Some(count) = list(&mut groups) {
            groups.truncate(count);
            return Some(groups);
        }
    }
    None
}

/// Returns whether user and group numbers mean the same to process and SharedFS.
///
/// In a user namespace they may not.
fn has_plain_numbers() -> bool {
    let namespace = statx_at(libc::AT_FDCWD, c"/proc/self/ns/user", 0, libc::STATX_INO);
    if namespace.is_ok_and(|stat| stat.stx_ino == FIRST_USER_NAMESPACE) {
        return true;
    }
    let map = std::fs::read_to_string("/proc/self/uid_map");
    map.is_ok_and(|map| map.split_ascii_whitespace().eq(["0", "0", "4294967295"]))
}

/// Returns the first 32 capabilities: the effective ones, and the permitted ones.
fn capabilities() -> [u32; 2] {
    let header = [CAPABILITIES_VERSION, 0u32];
    let mut sets = [0u32; 6];
    let arguments = [(&raw const header) as u64, sets.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the header asks for this thread, and the sets have room for both halves of the three.
    unsafe { system_call(libc::SYS_capget as u64, arguments) };
    [sets[0], sets[1]]
}

/// Returns the permitted capabilities, as bits; those above the 32nd are left out.
pub(crate) fn permitted_capabilities() -> u32 {
    capabilities()[1]
}

/// Returns the descriptor that all LibFS descriptors are duplicates of.
pub(crate) fn placeholder() -> Result<i32, Errno> {
    open_once(&PLACEHOLDER, open_placeholder)
}

/// Keeps the descriptor that SharedFS has sent as the placeholder, unless there is one.
///
/// All calls with it that the library misses fail.
fn keep_placeholder(sent: OwnedFd) {
    // If it can't be kept, the process makes one of its own.
    let _ = open_once(&PLACEHOLDER, || materialise::move_high(sent));
}

/// Opens a placeholder if SharedFS has sent none: an `O_PATH` descriptor of an empty file.
///
/// Data can't be read or written through it, but it has attributes.
fn open_placeholder() -> Result<OwnedFd, Errno> {
    // SAFETY: the name is a string that outlives the call.
    let memory = unsafe {
        let arguments = [c"ashlar".as_ptr() as u64, libc::MFD_CLOEXEC.into(), 0, 0, 0, 0];
        system_call(libc::SYS_memfd_create as u64, arguments)
    };
    if memory < 0 {
        return Err(Errno(-memory as i32));
    }
    // SAFETY: the descriptor is new.
    let memory = unsafe { OwnedFd::from_raw_fd(memory as i32) };
    let path = CString::new(format!("/proc/self/fd/{}", memory.as_raw_fd())).map_err(|_| Errno::EINVAL)?;
    let open = |path| open_high(libc::AT_FDCWD, path, libc::O_PATH);
    open(&path).or_else(|_| open(c"/dev/null"))
}

/// Returns whether there is a session.
pub(crate) fn is_any_open() -> bool {
    all().next().is_some()
}

/// Returns all sessions.
pub(crate) fn all() -> impl Iterator<Item = &'static MountSession> {
    (0..MOUNTS_MAX as u32).filter_map(by_number)
}

/// All that other threads must not change over a fork.
///
/// These are sessions, mapped data segments, the records of locks, of mapped files, of files without a name and of the
/// working directory, the table of descriptors, and the heap.
#[allow(dead_code, reason = "they are held, and no more")]
pub(crate) struct AllHeld(
    MutexGuard<'static, OtherSessions>,
    MutexGuard<'static, segment_mapping::MappingTable>,
    record_locks::HeldLockRecords,
    MutexGuard<'static, Vec<(u32, InodeId)>>,
    rustix_futex_sync::MutexGuard<'static, Vec<UnnamedFile>>,
    rustix_futex_sync::MutexGuard<'static, Option<(u32, InodeId)>>,
    rustix_futex_sync::MutexGuard<'static, descriptors::Inherited>,
    HeldHeap<'static>,
);

/// Keeps other threads from all of this over a fork.
///
/// A thread that held one of these locks would be missing in the new process.
pub(crate) fn hold_all() -> AllHeld {
    let connecting = other_sessions();
    let direct = segment_mapping::hold_mappings();
    let (locks, mapped, unnamed, working) =
        (record_locks::hold_records(), materialise::hold_mapped(), unnamed_files::hold_unnamed(), path::hold_working());
    AllHeld(connecting, direct, locks, mapped, unnamed, working, descriptors::hold_table(), crate::HEAP.hold())
}

impl AllHeld {
    /// Returns the data segments that are mapped for the program.
    pub(crate) fn mapped(&mut self) -> &mut segment_mapping::MappingTable {
        &mut self.1
    }
}

/// Discards the placeholder, whose number now leads elsewhere.
pub(crate) fn forget_placeholder() {
    descriptors::forget_internal(PLACEHOLDER.swap(-1, Ordering::AcqRel));
}

/// Discards the sessions of the process that this one was forked from.
///
/// They stay the parent's.
pub(crate) fn forget_sessions() {
    deferred_session::restart_after_fork();
    user_sessions::forget_user_sessions();
    shared_file::forget_process();
    descriptors::forget_ours();
    segment_mapping::forget_mappings();
    record_locks::forget_records();
}

/// Removes and returns all current sessions.
///
/// Later calls open new ones, even for mounts that had none before.
pub(crate) fn take_all() -> impl Iterator<Item = &'static MountSession> {
    UNUSABLE.store(0, Ordering::Relaxed);
    forget_refusals();
    // SAFETY: as in `by_number`.
    SESSIONS.iter().filter_map(|session| unsafe { session.swap(std::ptr::null_mut(), Ordering::AcqRel).as_ref() })
}

/// Returns the session and the inode of a kernel descriptor, if it is on one of the mounts in use.
pub(crate) fn file_of(descriptor: i32) -> Option<(u32, InodeId)> {
    let (device, inode) = identity_of(descriptor)?;
    let session = all().find(|session| session.device == device)?;
    Some((session.number, inode))
}

/// Returns a kernel descriptor's `st_dev` and `st_ino`.
pub(crate) fn identity_of(descriptor: i32) -> Option<(u64, InodeId)> {
    statx(descriptor, libc::AT_STATX_DONT_SYNC).ok().map(file_identity)
}

/// Returns a kernel descriptor's `st_dev`.
pub(crate) fn device_of(descriptor: i32) -> Option<u64> {
    identity_of(descriptor).map(|(device, _)| device)
}

/// Returns a kernel descriptor's `st_dev`, and whether it is a regular file.
pub(crate) fn device_and_kind_of(descriptor: i32) -> Option<(u64, bool)> {
    let stat = statx_at(descriptor, c"", libc::AT_STATX_DONT_SYNC, libc::STATX_TYPE | libc::STATX_INO).ok()?;
    Some((file_identity(stat).0, u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFREG))
}

/// Makes the kernel ask for a file's attributes, even if it knows some.
///
/// Returns the size that it assumes then.
pub(crate) fn refresh_size(descriptor: i32) -> Option<u64> {
    statx(descriptor, libc::AT_STATX_FORCE_SYNC).ok().map(|stat| stat.stx_size)
}

fn statx(descriptor: i32, how: i32) -> Result<libc::statx, Errno> {
    statx_at(descriptor, c"", how, libc::STATX_INO | libc::STATX_SIZE)
}

fn statx_at(directory: i32, path: &CStr, how: i32, wanted: u32) -> Result<libc::statx, Errno> {
    // SAFETY: zeros are a `statx`, which the call fills; the path is a string.
    let (done, stat) = unsafe {
        let mut stat: libc::statx = std::mem::zeroed();
        let flags = (libc::AT_EMPTY_PATH | how) as u64;
        let arguments = [directory as u64, path.as_ptr() as u64, flags, u64::from(wanted), (&raw mut stat) as u64, 0];
        (system_call(libc::SYS_statx as u64, arguments), stat)
    };
    if done < 0 { Err(Errno(-done as i32)) } else { Ok(stat) }
}

/// Returns the number of the mount that an open file is on, which is never reused.
///
/// Returns `None` if the kernel gives none (before Linux 6.8).
pub(crate) fn mount_number(descriptor: i32) -> Option<u64> {
    let stat = statx_at(descriptor, c"", libc::AT_STATX_DONT_SYNC, libc::STATX_MNT_ID_UNIQUE).ok()?;
    (stat.stx_mask & libc::STATX_MNT_ID_UNIQUE != 0).then_some(stat.stx_mnt_id)
}

/// Reads the file creation mask, which can only be read by setting it.
///
/// No other thread runs yet.
pub(crate) fn read_umask() {
    // SAFETY: it takes a number.
    let mask = unsafe { system_call(libc::SYS_umask as u64, [0o022, 0, 0, 0, 0, 0]) };
    // SAFETY: as above.
    unsafe { system_call(libc::SYS_umask as u64, [mask as u64, 0, 0, 0, 0, 0]) };
    UMASK.store(mask as u32, Ordering::Relaxed);
}

/// Writes one line to standard error, if that is a terminal.
fn write_notice(text: &str) {
    // SAFETY: the buffer outlives the call; the terminal's settings go into a local variable that is large enough.
    unsafe {
        let mut settings = [0u64; 16];
        let arguments = [2, libc::TCGETS, settings.as_mut_ptr() as u64, 0, 0, 0];
        if system_call(libc::SYS_ioctl as u64, arguments) == 0 {
            system_call(libc::SYS_write as u64, [2, text.as_ptr() as u64, text.len() as u64, 0, 0, 0]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_descriptors_low_and_high_are_all_found() {
        let file = std::fs::File::open("/dev/null").expect("opened");
        // Other tests may open and close some meanwhile; these stay.
        let at = |number: u64| {
            let arguments = [file.as_raw_fd() as u64, libc::F_DUPFD_CLOEXEC as u64, number, 0, 0, 0];
            // SAFETY: it makes a duplicate of a descriptor of this test.
            let made = unsafe { system_call(libc::SYS_fcntl as u64, arguments) };
            // SAFETY: the descriptor is new.
            unsafe { OwnedFd::from_raw_fd(i32::try_from(made).expect("a number")) }
        };
        let low = at(10);
        let found = open_numbers();
        assert!(found.contains(&low.as_raw_fd()) && found.contains(&0) && !found.contains(&(LOWEST + 500)));
        let high = at(LOWEST as u64 + 500);
        let found = open_numbers();
        assert!(found.contains(&high.as_raw_fd()) && found.contains(&low.as_raw_fd()) && found.contains(&0));
        drop(low);
        assert!(open_numbers().contains(&high.as_raw_fd()));
    }

    #[test]
    fn user_groups_and_name_match_the_kernel() {
        let map = std::fs::read_to_string("/proc/self/uid_map").expect("read");
        assert_eq!(has_plain_numbers(), map.split_ascii_whitespace().eq(["0", "0", "4294967295"]));
        let mut known = vec![0; 1 << 16];
        // SAFETY: the list is as long as stated.
        let count = unsafe { libc::getgroups(known.len() as i32, known.as_mut_ptr()) };
        known.truncate(count as usize);
        assert_eq!(groups(), Some(known));
        assert!(!process_name().is_empty() && process_name().len() < 16);
    }
}
