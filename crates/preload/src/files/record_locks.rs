//! Record locks of a process (`fcntl`), which LibFS or the kernel may have.
//!
//! They end when the process closes any descriptor of the file.
//!
//! LibFS serves the locks that a process sets through LibFS descriptors: they are its session's. They take no message
//! if no other process locks the file. If the process locks the file through a kernel descriptor, or a descriptor of a
//! locked file is handed over, all its locks on the file move to the kernel. From then on they live as the kernel's
//! descriptors do; in particular, they stay when another program is run. They move one by one, and no other owner can
//! come between: SharedFS knows that the two owners are one process.
//!
//! A file whose locks are the kernel's is locked through a kernel descriptor, one for each file. When the program
//! closes a LibFS descriptor, the kernel must see one of its own closed: that one, or, if the program has locked the
//! file through another, a new one. Kernel descriptors of a file whose locks are the session's are recorded, so that
//! the library sees their closing. So a file that was handed over because it was mapped for sharing can keep its locks
//! in the session: [`control_kernel_lock`] sets them for kernel descriptors, until a call needs more than setting them.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_libfs::{ByteRange, LibFs, LockAction, LockMode, LockedRange, RecordLockOutcome};
use ashlar_types::{Errno, InodeId};

use crate::entry::arch::system_call;
use crate::entry::{hook, signals, single_thread};
use crate::files::descriptors::{self, OpenFileRef};
use crate::files::materialise::{self, RealFile};
use crate::memory::program_memory;
use crate::sessions::{deferred_session, session};

/// The last byte that can be locked.
const LAST: i64 = i64::MAX;
/// How often the move of a file's locks to the kernel is tried, if SharedFS restarts meanwhile.
const MOVES: u32 = 3;

/// A file that the process has locked: the session's number and the inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LockedFile {
    session: u32,
    inode: InodeId,
}

/// The owner of the process's locks on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordLockOwner {
    /// The session.
    Session,
    /// The kernel, through kernel descriptors that the process had.
    Kernel,
    /// The kernel, if there are any locks.
    ///
    /// The process began with a kernel descriptor of this file, and has not asked SharedFS yet.
    Inherited,
    /// The kernel, through a descriptor that was made for the locks.
    Own(i32),
    /// The kernel, through a descriptor that was made for the locks and is now the program's open file.
    HandedOver(i32),
}

/// How a call goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FcntlOutcome {
    /// The call is done.
    Done,
    /// The kernel serves it, with this descriptor.
    Instead(i32),
    /// The kernel serves it.
    Kernel,
    /// The call is made again.
    Again,
}

/// The records of all locks, held against other threads.
pub(crate) type HeldLockRecords = [MutexGuard<'static, Option<LockRecords>>; PARTS];
pub(crate) type LockRecords = HashMap<LockedFile, RecordLockOwner>;

/// Inodes are spread over parts: threads that lock different files seldom wait for each other.
const PARTS: usize = 16;
/// Whether the process has ever locked a file.
static IS_USED: AtomicBool = AtomicBool::new(false);
static RECORDS: [Mutex<Option<LockRecords>>; PARTS] = [const { Mutex::new(None) }; PARTS];

fn records_part(number: usize) -> MutexGuard<'static, Option<LockRecords>> {
    RECORDS[number % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
}

impl LockedFile {
    fn of(file: &OpenFileRef) -> Result<Self, Errno> {
        Ok(Self { session: file.session()?.number, inode: file.inode() })
    }

    /// Returns the records of the part that the file is in.
    fn records(self) -> MutexGuard<'static, Option<LockRecords>> {
        records_part(self.inode.0 as usize)
    }

    fn fs(self) -> Result<&'static LibFs, Errno> {
        session::by_number(self.session).map(|session| &*session.fs).ok_or(Errno::EIO)
    }

    /// Returns LibFS of the mount's current session, or of the session that `file` is open in.
    ///
    /// A process has no current session while its threads are different users.
    fn fs_or_of(self, file: &OpenFileRef) -> Result<&'static LibFs, Errno> {
        self.fs().or_else(|_| file.session().map(|session| &*session.fs))
    }
}

/// A lock as a program asks for it.
struct RequestedLock {
    range: ByteRange,
    action: LockAction,
}

impl RequestedLock {
    /// Reads the lock that a structure asks for; `None` if the file was handed over to the kernel.
    ///
    /// # Errors
    /// `EINVAL` and `EOVERFLOW`, as fcntl(2) says.
    fn new(file: &OpenFileRef, asked: &libc::flock) -> Result<Option<Self>, Errno> {
        let from = match i32::from(asked.l_whence) {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => match file.place() {
                Some(place) => i64::try_from(place.offset).map_err(|_| Errno::EOVERFLOW)?,
                None => return Ok(None),
            },
            libc::SEEK_END => {
                let size = file.session()?.fs.attributes(file.inode())?.inode.size;
                i64::try_from(size).map_err(|_| Errno::EOVERFLOW)?
            }
            _ => return Err(Errno::EINVAL),
        };
        Self::from(from, asked).map(Some)
    }

    /// Reads the lock that a structure asks for, if its range is relative to an offset.
    fn from(place: i64, asked: &libc::flock) -> Result<Self, Errno> {
        let range = lock_range(place, asked.l_start, asked.l_len)?;
        let action = match i32::from(asked.l_type) {
            libc::F_RDLCK => LockAction::Read,
            libc::F_WRLCK => LockAction::Write,
            libc::F_UNLCK => LockAction::Unlock,
            _ => return Err(Errno::EINVAL),
        };
        Ok(Self { range, action })
    }
}

/// Returns whether an open file with such flags may be locked so.
fn allows_lock(flags: i32, action: LockAction) -> bool {
    match action {
        LockAction::Read => flags & libc::O_ACCMODE != libc::O_WRONLY,
        LockAction::Write => flags & libc::O_ACCMODE != libc::O_RDONLY,
        LockAction::Unlock => true,
    }
}

/// Returns the range that begins so far from an offset.
fn lock_range(from: i64, start: i64, length: i64) -> Result<ByteRange, Errno> {
    let start = from.checked_add(start).ok_or(Errno::EOVERFLOW)?;
    let (first, last) = match length {
        0 => (start, LAST),
        1.. => (start, start.max(0).checked_add(length - 1).ok_or(Errno::EOVERFLOW)?),
        _ => (start.checked_add(length).ok_or(Errno::EINVAL)?, start.saturating_sub(1)),
    };
    let bytes = |at: i64| u64::try_from(at).map_err(|_| Errno::EINVAL);
    Ok(ByteRange::new(bytes(first)?, bytes(last)?))
}

/// Serves `F_GETLK`, `F_SETLK` and `F_SETLKW`.
///
/// # Errors
/// Those of fcntl(2).
pub(crate) fn control_lock(descriptor: i32, command: i32, address: u64) -> Result<FcntlOutcome, Errno> {
    if descriptors::is_internal(descriptor) {
        return Err(Errno::EBADF);
    }
    let Some(file) = descriptors::file(descriptor) else { return control_kernel_lock(descriptor, command, address) };
    let asked: libc::flock = program_memory::load(address)?;
    if command == libc::F_GETLK && !matches!(i32::from(asked.l_type), libc::F_RDLCK | libc::F_WRLCK) {
        return Err(Errno::EINVAL);
    }
    let Some(lock) = RequestedLock::new(&file, &asked)? else { return leave_to_kernel(LockedFile::of(&file)?) };
    if command == libc::F_GETLK {
        return query_lock(&file, &lock, asked, address);
    }
    if !allows_lock(file.flags(), lock.action) {
        return Err(Errno::EBADF);
    }
    // The kernel does not ask the file system about directories.
    if file.is_directory() {
        return lock_through_kernel(&file, &asked);
    }
    let locked = LockedFile::of(&file)?;
    let mut has_come = false;
    loop {
        match set_session_lock(locked, Some(&file), &lock) {
            Ok(RecordLockOutcome::Done) => return Ok(FcntlOutcome::Done),
            Ok(_) => {
                // The kernel would wait for the lock that has come, which it would take for another process's.
                if has_come {
                    locked.fs()?.release_awaited(locked.inode, lock.range)?;
                }
                return lock_through_kernel(&file, &asked);
            }
            Err(Errno::EAGAIN) if command == libc::F_SETLKW => {}
            Err(errno) => {
                if has_come {
                    locked.fs()?.mark_records_doubtful(locked.inode);
                }
                return Err(errno);
            }
        }
        has_come = match wait_for_lock(&file, descriptor, &lock)? {
            ControlFlow::Continue(has_come) => has_come,
            ControlFlow::Break(way) => return Ok(way),
        };
    }
}

/// Serves the same commands on a kernel descriptor.
fn control_kernel_lock(descriptor: i32, command: i32, address: u64) -> Result<FcntlOutcome, Errno> {
    let Some((locked, flags)) = kernel_file(descriptor) else { return Ok(FcntlOutcome::Kernel) };
    if command == libc::F_SETLK && materialise::is_mapped_shared(locked.session, locked.inode) {
        let asked: libc::flock = program_memory::load(address)?;
        // Only the kernel knows a descriptor's offset, and the size that it assumes for the file.
        if i32::from(asked.l_whence) == libc::SEEK_SET {
            let lock = RequestedLock::from(0, &asked)?;
            if !allows_lock(flags, lock.action) {
                return Err(Errno::EBADF);
            }
            if set_session_lock(locked, None, &lock)? == RecordLockOutcome::Done {
                // Another thread may have closed the descriptor before its closing was watched.
                if !single_thread::is_known_single() && kernel_file(descriptor).is_none_or(|(file, _)| file != locked) {
                    end_locks_of_closed(locked);
                    return Err(Errno::EBADF);
                }
                return Ok(FcntlOutcome::Done);
            }
        }
    }
    leave_to_kernel(locked)
}

/// Lets the kernel serve a call on the descriptor that it names.
///
/// The kernel has the process's locks on the file from now on.
fn leave_to_kernel(locked: LockedFile) -> Result<FcntlOutcome, Errno> {
    record_kernel_lock(locked)?;
    Ok(FcntlOutcome::Kernel)
}

/// Sets a lock of the session, if the session has the file's locks.
///
/// The lock is set through a LibFS open file, or, without one, through a kernel descriptor.
fn set_session_lock(
    locked: LockedFile,
    file: Option<&OpenFileRef>,
    lock: &RequestedLock,
) -> Result<RecordLockOutcome, Errno> {
    let mut files = locked.records();
    let known = files.get_or_insert_default();
    match known.get(&locked) {
        Some(RecordLockOwner::Session) => {}
        Some(RecordLockOwner::Kernel | RecordLockOwner::Own(_) | RecordLockOwner::HandedOver(_)) => {
            return Ok(RecordLockOutcome::OfMount);
        }
        // The process has no locks that this code knows of; LibFS asks SharedFS if it can't know.
        None if lock.action == LockAction::Unlock => {}
        // Locks from before this program are the kernel's.
        Some(RecordLockOwner::Inherited) if lock.action == LockAction::Unlock => {
            known.insert(locked, RecordLockOwner::Kernel);
            return Ok(RecordLockOutcome::OfMount);
        }
        None | Some(RecordLockOwner::Inherited) => {
            watch_kernel_descriptors(locked);
            known.insert(locked, RecordLockOwner::Session);
            IS_USED.store(true, Ordering::Release);
        }
    }
    let fs = locked.fs()?;
    let done = fs.lock_record(locked.inode, lock.range, lock.action)?;
    match done {
        RecordLockOutcome::Done => {}
        // A program that ran in this process before has left its locks.
        RecordLockOutcome::OfMount => move_to_kernel(fs, known, locked, RecordLockOwner::Kernel)?,
        RecordLockOutcome::NoRoom => match file {
            None => move_to_kernel(fs, known, locked, RecordLockOwner::Kernel)?,
            Some(file) => {
                let own = materialise::open_beside(file)?.keep()?;
                move_to_kernel(fs, known, locked, RecordLockOwner::Own(own)).inspect_err(|_| close_internal(own))?;
            }
        },
    }
    Ok(done)
}

/// Watches the closing of a file's kernel descriptors: the session has the process's locks on it.
fn watch_kernel_descriptors(locked: LockedFile) {
    for (descriptor, _) in kernel_descriptors(locked) {
        descriptors::record_if_kernels(descriptor);
    }
}

/// Waits for a lock.
///
/// Returns whether it has come, and then the session has it until the caller takes it.
fn wait_for_lock(
    file: &OpenFileRef,
    descriptor: i32,
    lock: &RequestedLock,
) -> Result<ControlFlow<FcntlOutcome, bool>, Errno> {
    let locked = LockedFile::of(file)?;
    let fs = locked.fs()?;
    // If the file was handed over to the kernel meanwhile, no lock has come.
    let has_come = match fs.await_record(locked.inode, lock.range, lock.action, &mut signals::wait_for_socket) {
        Ok(came) => came == RecordLockOutcome::Done,
        Err(Errno::EINTR) if hook::restarts_call() => return Ok(ControlFlow::Break(FcntlOutcome::Again)),
        Err(errno) => return Err(errno),
    };
    let release_awaited = || if has_come { fs.release_awaited(locked.inode, lock.range) } else { Ok(()) };
    let is_sessions = locked.records().as_ref().and_then(|files| files.get(&locked)) == Some(&RecordLockOwner::Session);
    // The lock came in vain if the descriptor was closed meanwhile, or the locks moved to the kernel.
    let is_gone = file.is_kernels();
    let is_closed = !is_gone && !file.is_at(descriptor);
    if is_closed || !is_sessions {
        release_awaited()?;
    }
    if is_closed {
        return Err(Errno::EBADF);
    }
    if is_gone && !is_sessions {
        return leave_to_kernel(locked).map(ControlFlow::Break);
    }
    Ok(ControlFlow::Continue(has_come && is_sessions))
}

/// Serves `F_GETLK`.
fn query_lock(
    file: &OpenFileRef,
    lock: &RequestedLock,
    asked: libc::flock,
    address: u64,
) -> Result<FcntlOutcome, Errno> {
    if file.is_directory() {
        return lock_through_kernel(file, &asked);
    }
    let locked = LockedFile::of(file)?;
    let known = locked.records().as_ref().and_then(|files| files.get(&locked)).copied();
    if !matches!(known, None | Some(RecordLockOwner::Session | RecordLockOwner::Inherited)) {
        return lock_through_kernel(file, &asked);
    }
    let mut answer = asked;
    let fs = locked.fs()?;
    match fs.query_record(locked.inode, lock.range, lock.action)? {
        Err(_) => {
            move_to_kernel(fs, locked.records().get_or_insert_default(), locked, RecordLockOwner::Kernel)?;
            return lock_through_kernel(file, &asked);
        }
        Ok(None) => answer.l_type = libc::F_UNLCK as i16,
        Ok(Some((LockedRange { mode, range: ByteRange { first, last } }, pid))) => {
            answer.l_type = if mode == LockMode::Write { libc::F_WRLCK } else { libc::F_RDLCK } as i16;
            answer.l_whence = libc::SEEK_SET as i16;
            answer.l_start = first as i64;
            answer.l_len = if last >= LAST as u64 { 0 } else { (last - first + 1) as i64 };
            answer.l_pid = pid as i32;
        }
    }
    program_memory::store(address, &answer)?;
    Ok(FcntlOutcome::Done)
}

/// Lets the kernel serve a call on a LibFS file, through a descriptor of its own.
fn lock_through_kernel(file: &OpenFileRef, asked: &libc::flock) -> Result<FcntlOutcome, Errno> {
    let number = lock_descriptor(file)?;
    if i32::from(asked.l_whence) == libc::SEEK_CUR {
        if let Some(place) = file.place() {
            materialise::set_kernel_offset(number, place.offset);
        }
    }
    if i32::from(asked.l_whence) == libc::SEEK_END {
        session::refresh_size(number);
    }
    Ok(FcntlOutcome::Instead(number))
}

/// Returns the kernel descriptor for locks on a file whose locks are the kernel's.
fn lock_descriptor(file: &OpenFileRef) -> Result<i32, Errno> {
    let locked = LockedFile::of(file)?;
    let mut files = locked.records();
    let files = files.get_or_insert_default();
    let known = files.get(&locked).copied();
    if let Some(RecordLockOwner::Own(descriptor) | RecordLockOwner::HandedOver(descriptor)) = known {
        return Ok(descriptor);
    }
    let made = materialise::open_beside(file)?.keep()?;
    files.insert(locked, RecordLockOwner::Own(made));
    IS_USED.store(true, Ordering::Release);
    Ok(made)
}

/// Returns whether the process has ever locked a file.
pub(crate) fn has_ever_locked() -> bool {
    IS_USED.load(Ordering::Acquire)
}

/// Calls `then` with a real open file of the kernel's beside a LibFS one.
///
/// If that becomes the program's (`hands_over`), the process's locks on the file move to the kernel. Otherwise it is
/// closed again, which ends no locks (`ashlar-fuse`, FLUSH).
///
/// # Errors
/// Those of making it.
pub(crate) fn with_real_file<R>(
    file: &OpenFileRef,
    hands_over: bool,
    then: impl FnOnce(i32) -> Result<R, Errno>,
) -> Result<R, Errno> {
    // An `O_PATH` descriptor has no locks.
    if file.is_o_path() || !IS_USED.load(Ordering::Acquire) {
        let real = materialise::open_beside(file)?.raise();
        return then(real.as_raw_fd());
    }
    let locked = LockedFile::of(file)?;
    let mut guard = locked.records();
    let files = guard.get_or_insert_default();
    let fs = locked.fs_or_of(file)?;
    match lock_owner(files, locked, Ok(fs))? {
        Some(RecordLockOwner::Own(descriptor)) if !hands_over || materialise::has_same_flags(descriptor, file) => {
            if hands_over {
                files.insert(locked, RecordLockOwner::HandedOver(descriptor));
            }
            materialise::refresh_size(descriptor, file);
            then(descriptor)
        }
        known => {
            let is_sessions = known == Some(RecordLockOwner::Session);
            let moves = is_sessions && hands_over && fs.has_records(locked.inode);
            let attempt = || {
                if moves {
                    // Open files that followed later could not be closed any more.
                    for other in libfs_files(locked).filter(|other| !other.is_same(file)) {
                        materialise::hand_over_without_locks(&other)?;
                    }
                }
                let real = materialise::open_beside(file)?;
                let real = if known.is_none() { real.raise() } else { real };
                let result = then(real.as_raw_fd());
                drop(real);
                if moves && result.is_ok() {
                    move_to_kernel(fs, files, locked, RecordLockOwner::Kernel)?;
                } else if is_sessions && hands_over && !moves {
                    release_locks(files, locked);
                }
                result
            };
            let result = attempt();
            if moves && result.is_err() {
                // Some of its descriptors may be the kernel's by now, while the session has its locks.
                watch_kernel_descriptors(locked);
            }
            result
        }
    }
}

/// Calls `then` with a real open file for a program that maps the file for sharing.
///
/// The open file becomes the program's.
///
/// Locks of the session stay there; then `then` gets `true`, and the closing of the file's descriptors must be watched.
///
/// # Errors
/// As [`with_real_file`].
pub(crate) fn with_mapped_file<R>(
    file: &OpenFileRef,
    then: impl FnOnce(i32, bool) -> Result<R, Errno>,
) -> Result<R, Errno> {
    let locked = LockedFile::of(file)?;
    {
        let mut guard = locked.records();
        if guard.get_or_insert_default().get(&locked) == Some(&RecordLockOwner::Session) {
            // The kernel has no locks that would end when it is closed again.
            let real = materialise::open_beside(file)?;
            return then(real.as_raw_fd(), true);
        }
    }
    with_real_file(file, true, |real| then(real, false))
}

/// Moves all the process's locks to the kernel, as the sessions end.
pub(crate) fn move_all_to_kernel() {
    for number in 0..PARTS {
        let mut guard = records_part(number);
        let Some(files) = guard.as_mut() else { continue };
        let all: Vec<_> =
            files.iter().filter(|&(_, through)| *through == RecordLockOwner::Session).map(|(file, _)| *file).collect();
        for locked in all {
            // If SharedFS is away, the locks end with the session.
            let _ = locked.fs().and_then(|fs| move_to_kernel(fs, files, locked, RecordLockOwner::Kernel));
        }
    }
}

/// Returns the owner of a file's locks, and asks SharedFS by `fs` if the kernel may have inherited ones.
fn lock_owner(
    files: &mut LockRecords,
    locked: LockedFile,
    fs: Result<&LibFs, Errno>,
) -> Result<Option<RecordLockOwner>, Errno> {
    if files.get(&locked) == Some(&RecordLockOwner::Inherited) {
        match fs?.query_record(locked.inode, ByteRange::new(0, LAST as u64), LockAction::Write)? {
            Err(_) => files.insert(locked, RecordLockOwner::Kernel),
            Ok(_) => files.remove(&locked),
        };
    }
    Ok(files.get(&locked).copied())
}

/// Records at a session's start that the kernel may have locks on files with kernel descriptors.
///
/// The process may have set them before it ran this program.
pub(crate) fn record_inherited(session: u32) {
    // The program has no locks on files that it has opened without a session.
    let is_before = |number: &i32| deferred_session::has_exec_files() || !descriptors::is_adoptable(*number);
    let files = all_kernel_descriptors().filter(is_before).filter_map(kernel_file);
    for (locked, _) in files.filter(|(file, _)| file.session == session) {
        locked.records().get_or_insert_default().entry(locked).or_insert(RecordLockOwner::Inherited);
        IS_USED.store(true, Ordering::Release);
    }
}

/// Returns whether closing a kernel descriptor would end locks of the process.
pub(crate) fn closing_ends_locks(descriptor: i32) -> bool {
    if !IS_USED.load(Ordering::Acquire) {
        return false;
    }
    let Some((locked, _)) = kernel_file(descriptor) else { return false };
    // If SharedFS does not answer, it may.
    let owner = lock_owner(locked.records().get_or_insert_default(), locked, locked.fs());
    !matches!(owner, Ok(None | Some(RecordLockOwner::Session)))
}

/// Records that the program locks a file through a kernel descriptor.
fn record_kernel_lock(locked: LockedFile) -> Result<(), Errno> {
    let mut guard = locked.records();
    let files = guard.get_or_insert_default();
    match files.get(&locked) {
        Some(RecordLockOwner::Session) => move_to_kernel(locked.fs()?, files, locked, RecordLockOwner::Kernel)?,
        None | Some(RecordLockOwner::Inherited) => drop(files.insert(locked, RecordLockOwner::Kernel)),
        Some(_) => {}
    }
    IS_USED.store(true, Ordering::Release);
    Ok(())
}

/// Moves the locks on a file to the kernel, those that exist and those to come, through this owner.
fn move_to_kernel(
    fs: &LibFs,
    files: &mut LockRecords,
    locked: LockedFile,
    through: RecordLockOwner,
) -> Result<(), Errno> {
    let own = if let RecordLockOwner::Own(descriptor) = through { Some(descriptor) } else { None };
    for tried in 1.. {
        if !fs.has_records(locked.inode) {
            break;
        }
        let moved = fs.yield_records(locked.inode).and_then(|ranges| set_in_kernel(locked, own, &ranges));
        match moved {
            Ok(()) => fs.release_records(locked.inode)?,
            // A restarted SharedFS does not know that they move.
            Err(Errno::EAGAIN) if tried < MOVES => {}
            Err(errno) => return Err(errno),
        }
    }
    files.insert(locked, through);
    IS_USED.store(true, Ordering::Release);
    Ok(())
}

/// Sets locks through kernel descriptors that the process has.
///
/// It uses `own`, if its access mode allows.
fn set_in_kernel(locked: LockedFile, own: Option<i32>, held: &[LockedRange]) -> Result<(), Errno> {
    let usable = || own.map(with_flags).into_iter().chain(kernel_descriptors(locked)).collect::<Vec<_>>();
    let mut through = usable();
    let is_good = |&(_, flags): &(i32, i32), mode: LockMode| flags >= 0 && allows_lock(flags, mode.into());
    if !held.iter().all(|held| through.iter().any(|one| is_good(one, held.mode))) {
        // LibFS open files that allow these locks exist. Hand them over first: once the kernel has the first of the
        // locks, none could be made.
        libfs_files(locked).try_for_each(|file| materialise::hand_over_without_locks(&file))?;
        through = usable();
    }
    for &LockedRange { mode, range: ByteRange { first, last } } in held {
        let (descriptor, _) = through.iter().find(|one| is_good(one, mode)).ok_or(Errno::EBADF)?;
        let kind = if mode == LockMode::Write { libc::F_WRLCK } else { libc::F_RDLCK };
        let asked = libc::flock {
            l_type: kind as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: first as i64,
            l_len: if last >= LAST as u64 { 0 } else { (last - first + 1) as i64 },
            l_pid: 0,
        };
        let arguments = [*descriptor as u64, libc::F_SETLK as u64, (&raw const asked) as u64, 0, 0, 0];
        // SAFETY: the structure is a local variable.
        let done = unsafe { system_call(libc::SYS_fcntl as u64, arguments) };
        if done < 0 {
            return Err(Errno(-done as i32));
        }
    }
    Ok(())
}

/// Returns the LibFS open files of a file.
fn libfs_files(locked: LockedFile) -> impl Iterator<Item = OpenFileRef> {
    let all = descriptors::ours(0, u32::MAX).filter_map(descriptors::file);
    all.filter(move |file| !file.is_o_path() && LockedFile::of(file) == Ok(locked))
}

/// Returns a descriptor with its flags.
fn with_flags(number: i32) -> (i32, i32) {
    (number, materialise::kernel_flags(number))
}

/// Returns the file of a kernel descriptor, and its flags.
///
/// Returns `None` for an `O_PATH` one.
///
/// An `O_PATH` descriptor has no locks, and closing it ends none.
fn kernel_file(number: i32) -> Option<(LockedFile, i32)> {
    let (_, flags) = with_flags(number);
    if flags < 0 || flags & libc::O_PATH != 0 {
        return None;
    }
    session::file_of(number).map(|(session, inode)| (LockedFile { session, inode }, flags))
}

/// Returns the process's kernel descriptors of a file, with their flags.
fn kernel_descriptors(locked: LockedFile) -> Vec<(i32, i32)> {
    let all =
        all_kernel_descriptors().filter_map(|number| kernel_file(number).map(|(file, flags)| (number, file, flags)));
    all.filter(|&(_, file, _)| file == locked).map(|(number, _, flags)| (number, flags)).collect()
}

/// Returns the program's kernel descriptors.
fn all_kernel_descriptors() -> impl Iterator<Item = i32> {
    let all = session::open_numbers().into_iter();
    all.filter(|&number| !descriptors::is_ours(number) && !descriptors::is_internal(number))
}

/// Returns the file of a kernel descriptor that is about to be closed.
///
/// Returns `None` if that ends no locks that the kernel doesn't know.
pub(crate) fn file_of_closing(descriptor: i32) -> Option<LockedFile> {
    let is_seen = descriptors::is_path_base(descriptor) || descriptors::is_inherited(descriptor);
    if !IS_USED.load(Ordering::Acquire) || !is_seen {
        return None;
    }
    kernel_file(descriptor).map(|(locked, _)| locked)
}

/// Returns the same for all descriptors in a range.
pub(crate) fn files_of_closing(first: u32, last: u32) -> Vec<LockedFile> {
    if !IS_USED.load(Ordering::Acquire) {
        return Vec::new();
    }
    let inherited = descriptors::inherited().filter(|&number| (first..=last).contains(&(number as u32)));
    descriptors::path_bases(first, last).chain(inherited).filter_map(file_of_closing).collect()
}

/// Ends the session's locks after such a descriptor was closed.
///
/// If the kernel has the locks, the session may still have some about which SharedFS has not answered.
pub(crate) fn end_locks_of_closed(locked: LockedFile) {
    let mut guard = locked.records();
    let Some(files) = guard.as_mut() else { return };
    if matches!(files.get(&locked), Some(RecordLockOwner::Session | RecordLockOwner::Kernel)) {
        release_locks(files, locked);
    }
}

/// Ends the session's locks.
///
/// If SharedFS is away, the next closing repeats this, or they end with the session.
fn release_locks(files: &mut LockRecords, locked: LockedFile) {
    if locked.fs().is_ok_and(|fs| fs.release_records(locked.inode).is_err()) {
        files.insert(locked, RecordLockOwner::Session);
    } else {
        files.remove(&locked);
    }
}

/// Ends the process's locks on a file when the program closes a descriptor of it.
pub(crate) fn end_locks(file: &OpenFileRef) {
    if file.is_o_path() || !IS_USED.load(Ordering::Acquire) {
        return;
    }
    let Ok(locked) = LockedFile::of(file) else { return };
    let mut guard = locked.records();
    let Some(files) = guard.as_mut() else { return };
    // If SharedFS is away, close a kernel descriptor too.
    let through = lock_owner(files, locked, locked.fs_or_of(file)).unwrap_or(Some(RecordLockOwner::Kernel));
    // If the kernel has the locks, the session may still have some about which SharedFS has not answered.
    if through.is_some() {
        release_locks(files, locked);
    }
    match through {
        Some(RecordLockOwner::Session) => {}
        Some(RecordLockOwner::Own(descriptor) | RecordLockOwner::HandedOver(descriptor)) => close_internal(descriptor),
        // Make a real open file and a duplicate of it, and close both: the second closing counts. If that fails,
        // SharedFS is away, and its locks are gone.
        Some(RecordLockOwner::Kernel | RecordLockOwner::Inherited) => {
            if let Ok(second) = materialise::open_beside(file).and_then(RealFile::keep) {
                close_internal(second);
            }
        }
        None => {}
    }
}

/// Keeps other threads from the records of locks, over a fork.
pub(crate) fn hold_records() -> HeldLockRecords {
    std::array::from_fn(records_part)
}

/// Discards the records in a forked process, which has no locks.
pub(crate) fn forget_records() {
    for number in 0..PARTS {
        for (_, through) in records_part(number).take().into_iter().flatten() {
            if let RecordLockOwner::Own(descriptor) | RecordLockOwner::HandedOver(descriptor) = through {
                close_internal(descriptor);
            }
        }
    }
}

fn close_internal(descriptor: i32) {
    descriptors::forget_internal(descriptor);
    descriptors::close_number(descriptor);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_ranges_match_fcntl() {
        assert_eq!(lock_range(0, 5, 10), Ok(ByteRange::new(5, 14)));
        assert_eq!(lock_range(100, 5, 0), Ok(ByteRange::new(105, LAST as u64)));
        assert_eq!(lock_range(100, 0, -10), Ok(ByteRange::new(90, 99)));
        assert_eq!(lock_range(100, 5, -105), Ok(ByteRange::new(0, 104)));
        assert_eq!(lock_range(0, LAST, 1), Ok(ByteRange::new(LAST as u64, LAST as u64)));
        assert_eq!(lock_range(100, -101, 0), Err(Errno::EINVAL));
        assert_eq!(lock_range(100, 0, -101), Err(Errno::EINVAL));
        assert_eq!(lock_range(0, -1, 1), Err(Errno::EINVAL));
        assert_eq!(lock_range(0, i64::MIN, -1), Err(Errno::EINVAL));
        assert_eq!(lock_range(1, LAST, 0), Err(Errno::EOVERFLOW));
        assert_eq!(lock_range(0, LAST, 2), Err(Errno::EOVERFLOW));
    }
}
