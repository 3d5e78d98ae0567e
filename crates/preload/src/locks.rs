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
//! in the session: [`of_kernel`] sets them for kernel descriptors, until a call needs more than setting them.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_libfs::alone::is_alone;
use ashlar_libfs::{LibFs, LockMode, RecordLock};
use ashlar_types::{Errno, InodeId};

use crate::arch::system_call;
use crate::descriptors::{self, File};
use crate::{deferred, hook, materialise, memory, session, signals};

/// The last byte that can be locked.
const LAST: i64 = i64::MAX;
/// How often the move of a file's locks to the kernel is tried, if SharedFS restarts meanwhile.
const MOVES: u32 = 3;

/// A file that the process has locked: the session's number and the inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Locked {
    session: u32,
    inode: InodeId,
}

/// The owner of the process's locks on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Through {
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
pub(crate) enum Way {
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
pub(crate) type Held = [MutexGuard<'static, Option<Files>>; PARTS];
pub(crate) type Files = HashMap<Locked, Through>;

/// Inodes are spread over parts: threads that lock different files seldom wait for each other.
const PARTS: usize = 16;
/// Whether the process has ever locked a file.
static IS_USED: AtomicBool = AtomicBool::new(false);
static FILES: [Mutex<Option<Files>>; PARTS] = [const { Mutex::new(None) }; PARTS];

fn part(number: usize) -> MutexGuard<'static, Option<Files>> {
    FILES[number % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
}

impl Locked {
    fn of(file: &File) -> Result<Self, Errno> {
        Ok(Self { session: file.session()?.number, inode: file.inode() })
    }

    /// Returns the records of the part that the file is in.
    fn files(self) -> MutexGuard<'static, Option<Files>> {
        part(self.inode.0 as usize)
    }

    fn fs(self) -> Result<&'static LibFs, Errno> {
        session::by_number(self.session).map(|session| &*session.fs).ok_or(Errno::EIO)
    }
}

/// A lock as a program asks for it.
struct Asked {
    range: (u64, u64),
    mode: LockMode,
}

impl Asked {
    /// Reads the lock that a structure asks for; `None` if the file was handed over to the kernel.
    ///
    /// # Errors
    /// `EINVAL` and `EOVERFLOW`, as fcntl(2) says.
    fn new(file: &File, asked: &libc::flock) -> Result<Option<Self>, Errno> {
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
        let range = range(place, asked.l_start, asked.l_len)?;
        let mode = match i32::from(asked.l_type) {
            libc::F_RDLCK => LockMode::Read,
            libc::F_WRLCK => LockMode::Write,
            libc::F_UNLCK => LockMode::Unlock,
            _ => return Err(Errno::EINVAL),
        };
        Ok(Self { range, mode })
    }
}

/// Returns whether an open file with such flags may be locked so.
fn allows(flags: i32, mode: LockMode) -> bool {
    match mode {
        LockMode::Read => flags & libc::O_ACCMODE != libc::O_WRONLY,
        LockMode::Write => flags & libc::O_ACCMODE != libc::O_RDONLY,
        LockMode::Unlock => true,
    }
}

/// Returns the first and the last byte of a range that begins so far from an offset.
fn range(from: i64, start: i64, length: i64) -> Result<(u64, u64), Errno> {
    let start = from.checked_add(start).ok_or(Errno::EOVERFLOW)?;
    let (first, last) = match length {
        0 => (start, LAST),
        1.. => (start, start.max(0).checked_add(length - 1).ok_or(Errno::EOVERFLOW)?),
        _ => (start.checked_add(length).ok_or(Errno::EINVAL)?, start.saturating_sub(1)),
    };
    let bytes = |at: i64| u64::try_from(at).map_err(|_| Errno::EINVAL);
    Ok((bytes(first)?, bytes(last)?))
}

/// Serves `F_GETLK`, `F_SETLK` and `F_SETLKW`.
///
/// # Errors
/// Those of fcntl(2).
pub(crate) fn control(descriptor: i32, command: i32, address: u64) -> Result<Way, Errno> {
    if descriptors::is_internal(descriptor) {
        return Err(Errno::EBADF);
    }
    let Some(file) = descriptors::file(descriptor) else { return of_kernel(descriptor, command, address) };
    let asked: libc::flock = memory::load(address)?;
    if command == libc::F_GETLK && !matches!(i32::from(asked.l_type), libc::F_RDLCK | libc::F_WRLCK) {
        return Err(Errno::EINVAL);
    }
    let Some(lock) = Asked::new(&file, &asked)? else { return give_way(Locked::of(&file)?) };
    if command == libc::F_GETLK {
        return query(&file, &lock, asked, address);
    }
    if !allows(file.flags(), lock.mode) {
        return Err(Errno::EBADF);
    }
    // The kernel does not ask the file system about directories.
    if file.is_directory() {
        return through_kernel(&file, &asked);
    }
    let locked = Locked::of(&file)?;
    let mut has_come = false;
    loop {
        match attempt(locked, Some(&file), &lock) {
            Ok(RecordLock::Done) => return Ok(Way::Done),
            Ok(_) => {
                // The kernel would wait for the lock that has come, which it would take for another process's.
                if has_come {
                    locked.fs()?.drop_awaited(locked.inode, lock.range)?;
                }
                return through_kernel(&file, &asked);
            }
            Err(Errno::EAGAIN) if command == libc::F_SETLKW => {}
            Err(errno) => {
                if has_come {
                    locked.fs()?.doubt_records(locked.inode);
                }
                return Err(errno);
            }
        }
        has_come = match wait(&file, descriptor, &lock)? {
            ControlFlow::Continue(has_come) => has_come,
            ControlFlow::Break(way) => return Ok(way),
        };
    }
}

/// Serves the same commands on a kernel descriptor.
fn of_kernel(descriptor: i32, command: i32, address: u64) -> Result<Way, Errno> {
    let Some((locked, flags)) = opened(descriptor) else { return Ok(Way::Kernel) };
    if command == libc::F_SETLK && materialise::is_mapped(locked.session, locked.inode) {
        let asked: libc::flock = memory::load(address)?;
        // Only the kernel knows a descriptor's offset, and the size that it assumes for the file.
        if i32::from(asked.l_whence) == libc::SEEK_SET {
            let lock = Asked::from(0, &asked)?;
            if !allows(flags, lock.mode) {
                return Err(Errno::EBADF);
            }
            if attempt(locked, None, &lock)? == RecordLock::Done {
                // Another thread may have closed the descriptor before its closing was watched.
                if !is_alone() && opened(descriptor).is_none_or(|(file, _)| file != locked) {
                    forget_file(locked);
                    return Err(Errno::EBADF);
                }
                return Ok(Way::Done);
            }
        }
    }
    give_way(locked)
}

/// Lets the kernel serve a call on the descriptor that it names.
///
/// The kernel has the process's locks on the file from now on.
fn give_way(locked: Locked) -> Result<Way, Errno> {
    note_kernel(locked)?;
    Ok(Way::Kernel)
}

/// Sets a lock of the session, if the session has the file's locks.
///
/// The lock is set through a LibFS open file, or, without one, through a kernel descriptor.
fn attempt(locked: Locked, file: Option<&File>, lock: &Asked) -> Result<RecordLock, Errno> {
    let mut files = locked.files();
    let known = files.get_or_insert_default();
    match known.get(&locked) {
        Some(Through::Session) => {}
        Some(Through::Kernel | Through::Own(_) | Through::HandedOver(_)) => return Ok(RecordLock::OfMount),
        // The process has no locks that this code knows of; LibFS asks SharedFS if it can't know.
        None if lock.mode == LockMode::Unlock => {}
        // Locks from before this program are the kernel's.
        Some(Through::Inherited) if lock.mode == LockMode::Unlock => {
            known.insert(locked, Through::Kernel);
            return Ok(RecordLock::OfMount);
        }
        None | Some(Through::Inherited) => {
            note_kernels(locked);
            known.insert(locked, Through::Session);
            IS_USED.store(true, Ordering::Release);
        }
    }
    let fs = locked.fs()?;
    let done = fs.lock_record(locked.inode, lock.range, lock.mode)?;
    match done {
        RecordLock::Done => {}
        // A program that ran in this process before has left its locks.
        RecordLock::OfMount => give_to_kernel(known, locked, Through::Kernel)?,
        RecordLock::NoRoom => match file {
            None => give_to_kernel(known, locked, Through::Kernel)?,
            Some(file) => {
                let own = materialise::high(materialise::beside(file)?)?.into_raw_fd();
                give_to_kernel(known, locked, Through::Own(own)).inspect_err(|_| close(own))?;
            }
        },
    }
    Ok(done)
}

/// Watches the closing of a file's kernel descriptors: the session has the process's locks on it.
fn note_kernels(locked: Locked) {
    for (descriptor, _) in kernels(locked) {
        descriptors::note_kernels(descriptor);
    }
}

/// Waits for a lock.
///
/// Returns whether it has come, and then the session has it until the caller takes it.
fn wait(file: &File, descriptor: i32, lock: &Asked) -> Result<ControlFlow<Way, bool>, Errno> {
    let locked = Locked::of(file)?;
    let fs = locked.fs()?;
    // If the file was handed over to the kernel meanwhile, no lock has come.
    let has_come = match fs.await_record(locked.inode, lock.range, lock.mode, &mut signals::pause) {
        Ok(came) => came == RecordLock::Done,
        Err(Errno::EINTR) if hook::restarts() => return Ok(ControlFlow::Break(Way::Again)),
        Err(errno) => return Err(errno),
    };
    let drop_awaited = || if has_come { fs.drop_awaited(locked.inode, lock.range) } else { Ok(()) };
    let is_sessions = locked.files().as_ref().and_then(|files| files.get(&locked)) == Some(&Through::Session);
    // The lock came in vain if the descriptor was closed meanwhile, or the locks moved to the kernel.
    let is_gone = file.is_gone();
    let is_closed = !is_gone && !file.is_at(descriptor);
    if is_closed || !is_sessions {
        drop_awaited()?;
    }
    if is_closed {
        return Err(Errno::EBADF);
    }
    if is_gone && !is_sessions {
        return give_way(locked).map(ControlFlow::Break);
    }
    Ok(ControlFlow::Continue(has_come && is_sessions))
}

/// Serves `F_GETLK`.
fn query(file: &File, lock: &Asked, asked: libc::flock, address: u64) -> Result<Way, Errno> {
    if file.is_directory() {
        return through_kernel(file, &asked);
    }
    let locked = Locked::of(file)?;
    let known = locked.files().as_ref().and_then(|files| files.get(&locked)).copied();
    if !matches!(known, None | Some(Through::Session | Through::Inherited)) {
        return through_kernel(file, &asked);
    }
    let mut told = asked;
    match locked.fs()?.query_record(locked.inode, lock.range, lock.mode)? {
        Err(_) => {
            give_to_kernel(locked.files().get_or_insert_default(), locked, Through::Kernel)?;
            return through_kernel(file, &asked);
        }
        Ok(None) => told.l_type = libc::F_UNLCK as i16,
        Ok(Some((mode, first, last, pid))) => {
            told.l_type = if mode == LockMode::Write { libc::F_WRLCK } else { libc::F_RDLCK } as i16;
            told.l_whence = libc::SEEK_SET as i16;
            told.l_start = first as i64;
            told.l_len = if last >= LAST as u64 { 0 } else { (last - first + 1) as i64 };
            told.l_pid = pid as i32;
        }
    }
    memory::store(address, &told)?;
    Ok(Way::Done)
}

/// Lets the kernel serve a call on a LibFS file, through a descriptor of its own.
fn through_kernel(file: &File, asked: &libc::flock) -> Result<Way, Errno> {
    let number = own_descriptor(file)?;
    if i32::from(asked.l_whence) == libc::SEEK_CUR {
        if let Some(place) = file.place() {
            materialise::set_offset(number, place.offset);
        }
    }
    if i32::from(asked.l_whence) == libc::SEEK_END {
        session::size_of(number);
    }
    Ok(Way::Instead(number))
}

/// Returns the kernel descriptor for locks on a file whose locks are the kernel's.
fn own_descriptor(file: &File) -> Result<i32, Errno> {
    let locked = Locked::of(file)?;
    let mut files = locked.files();
    let files = files.get_or_insert_default();
    let known = files.get(&locked).copied();
    if let Some(Through::Own(descriptor) | Through::HandedOver(descriptor)) = known {
        return Ok(descriptor);
    }
    let made = materialise::high(materialise::beside(file)?)?.into_raw_fd();
    files.insert(locked, Through::Own(made));
    IS_USED.store(true, Ordering::Release);
    Ok(made)
}

/// Returns whether the process has ever locked a file.
pub(crate) fn is_used() -> bool {
    IS_USED.load(Ordering::Acquire)
}

/// Calls `then` with a real open file of the kernel's beside a LibFS one.
///
/// If that becomes the program's (`hands_over`), the process's locks on the file move to the kernel. Otherwise it is
/// closed again, which ends no locks (`ashlar-fuse`, FLUSH).
///
/// # Errors
/// Those of making it.
pub(crate) fn with_real<R>(
    file: &File,
    hands_over: bool,
    then: impl FnOnce(i32) -> Result<R, Errno>,
) -> Result<R, Errno> {
    // An `O_PATH` descriptor has no locks.
    if file.is_alone() || !IS_USED.load(Ordering::Acquire) {
        let real = materialise::beside(file)?;
        return then(real.as_raw_fd());
    }
    let locked = Locked::of(file)?;
    let mut guard = locked.files();
    let files = guard.get_or_insert_default();
    match known(files, locked)? {
        Some(Through::Own(descriptor)) if !hands_over || materialise::is_as(descriptor, file) => {
            if hands_over {
                files.insert(locked, Through::HandedOver(descriptor));
            }
            materialise::renew_size(descriptor, file);
            then(descriptor)
        }
        known => {
            let is_sessions = known == Some(Through::Session);
            let moves = is_sessions && hands_over && locked.fs()?.has_records(locked.inode);
            let attempt = || {
                if moves {
                    // Open files that followed later could not be closed any more.
                    for other in ours(locked).filter(|other| !other.is_same(file)) {
                        materialise::without_locks(&other)?;
                    }
                }
                let real = materialise::beside(file)?;
                let result = then(real.as_raw_fd());
                drop(real);
                if moves && result.is_ok() {
                    give_to_kernel(files, locked, Through::Kernel)?;
                } else if is_sessions && hands_over && !moves {
                    release(files, locked);
                }
                result
            };
            let result = attempt();
            if moves && result.is_err() {
                // Some of its descriptors may be the kernel's by now, while the session has its locks.
                note_kernels(locked);
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
/// As [`with_real`].
pub(crate) fn with_mapped<R>(file: &File, then: impl FnOnce(i32, bool) -> Result<R, Errno>) -> Result<R, Errno> {
    let locked = Locked::of(file)?;
    {
        let mut guard = locked.files();
        if guard.get_or_insert_default().get(&locked) == Some(&Through::Session) {
            // The kernel has no locks that would end when it is closed again.
            let real = materialise::beside(file)?;
            return then(real.as_raw_fd(), true);
        }
    }
    with_real(file, true, |real| then(real, false))
}

/// Moves all the process's locks to the kernel, as the sessions end.
pub(crate) fn give_all() {
    for number in 0..PARTS {
        let mut guard = part(number);
        let Some(files) = guard.as_mut() else { continue };
        let all: Vec<_> =
            files.iter().filter(|&(_, through)| *through == Through::Session).map(|(file, _)| *file).collect();
        for locked in all {
            // If SharedFS is away, the locks end with the session.
            let _ = give_to_kernel(files, locked, Through::Kernel);
        }
    }
}

/// Returns the owner of a file's locks, and asks SharedFS if the kernel may have inherited ones.
fn known(files: &mut Files, locked: Locked) -> Result<Option<Through>, Errno> {
    if files.get(&locked) == Some(&Through::Inherited) {
        match locked.fs()?.query_record(locked.inode, (0, LAST as u64), LockMode::Write)? {
            Err(_) => files.insert(locked, Through::Kernel),
            Ok(_) => files.remove(&locked),
        };
    }
    Ok(files.get(&locked).copied())
}

/// Records at a session's start that the kernel may have locks on files with kernel descriptors.
///
/// The process may have set them before it ran this program.
pub(crate) fn note_inherited(session: u32) {
    // The program has no locks on files that it has opened without a session.
    let is_before = |number: &i32| deferred::is_any_carried() || !descriptors::is_candidate(*number);
    let files = all_of_kernel().filter(is_before).filter_map(opened);
    for (locked, _) in files.filter(|(file, _)| file.session == session) {
        locked.files().get_or_insert_default().entry(locked).or_insert(Through::Inherited);
        IS_USED.store(true, Ordering::Release);
    }
}

/// Returns whether closing a kernel descriptor would end locks of the process.
pub(crate) fn keep(descriptor: i32) -> bool {
    if !IS_USED.load(Ordering::Acquire) {
        return false;
    }
    let Some((locked, _)) = opened(descriptor) else { return false };
    // If SharedFS does not answer, it may.
    !matches!(known(locked.files().get_or_insert_default(), locked), Ok(None | Some(Through::Session)))
}

/// Records that the program locks a file through a kernel descriptor.
fn note_kernel(locked: Locked) -> Result<(), Errno> {
    let mut guard = locked.files();
    let files = guard.get_or_insert_default();
    match files.get(&locked) {
        Some(Through::Session) => give_to_kernel(files, locked, Through::Kernel)?,
        None | Some(Through::Inherited) => drop(files.insert(locked, Through::Kernel)),
        Some(_) => {}
    }
    IS_USED.store(true, Ordering::Release);
    Ok(())
}

/// Moves the locks on a file to the kernel, those that exist and those to come, through this owner.
fn give_to_kernel(files: &mut Files, locked: Locked, through: Through) -> Result<(), Errno> {
    let fs = locked.fs()?;
    let own = if let Through::Own(descriptor) = through { Some(descriptor) } else { None };
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
fn set_in_kernel(locked: Locked, own: Option<i32>, ranges: &[(LockMode, u64, u64)]) -> Result<(), Errno> {
    let usable = || own.map(with_flags).into_iter().chain(kernels(locked)).collect::<Vec<_>>();
    let mut through = usable();
    let is_good = |&(_, flags): &(i32, i32), mode| flags >= 0 && allows(flags, mode);
    if !ranges.iter().all(|&(mode, ..)| through.iter().any(|one| is_good(one, mode))) {
        // LibFS open files that allow these locks exist. Hand them over first: once the kernel has the first of the
        // locks, none could be made.
        ours(locked).try_for_each(|file| materialise::without_locks(&file))?;
        through = usable();
    }
    for &(mode, first, last) in ranges {
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
fn ours(locked: Locked) -> impl Iterator<Item = File> {
    let all = descriptors::ours(0, u32::MAX).filter_map(descriptors::file);
    all.filter(move |file| !file.is_alone() && Locked::of(file) == Ok(locked))
}

/// Returns a descriptor with its flags.
fn with_flags(number: i32) -> (i32, i32) {
    (number, materialise::flags(number))
}

/// Returns the file of a kernel descriptor, and its flags.
///
/// Returns `None` for an `O_PATH` one.
///
/// An `O_PATH` descriptor has no locks, and closing it ends none.
fn opened(number: i32) -> Option<(Locked, i32)> {
    let (_, flags) = with_flags(number);
    if flags < 0 || flags & libc::O_PATH != 0 {
        return None;
    }
    session::file_of(number).map(|(session, inode)| (Locked { session, inode }, flags))
}

/// Returns the process's kernel descriptors of a file, with their flags.
fn kernels(locked: Locked) -> Vec<(i32, i32)> {
    let all = all_of_kernel().filter_map(|number| opened(number).map(|(file, flags)| (number, file, flags)));
    all.filter(|&(_, file, _)| file == locked).map(|(number, _, flags)| (number, flags)).collect()
}

/// Returns the program's kernel descriptors.
fn all_of_kernel() -> impl Iterator<Item = i32> {
    let all = session::open_numbers().into_iter();
    all.filter(|&number| !descriptors::is_ours(number) && !descriptors::is_internal(number))
}

/// Returns the file of a kernel descriptor that is about to be closed.
///
/// Returns `None` if that ends no locks that the kernel doesn't know.
pub(crate) fn file_of_named(descriptor: i32) -> Option<Locked> {
    let is_seen = descriptors::is_named(descriptor) || descriptors::is_inherited(descriptor);
    if !IS_USED.load(Ordering::Acquire) || !is_seen {
        return None;
    }
    opened(descriptor).map(|(locked, _)| locked)
}

/// Returns the same for all descriptors in a range.
pub(crate) fn files_of_named(first: u32, last: u32) -> Vec<Locked> {
    if !IS_USED.load(Ordering::Acquire) {
        return Vec::new();
    }
    let inherited = descriptors::inherited().filter(|&number| (first..=last).contains(&(number as u32)));
    descriptors::named(first, last).chain(inherited).filter_map(file_of_named).collect()
}

/// Ends the session's locks after such a descriptor was closed.
///
/// If the kernel has the locks, the session may still have some about which SharedFS has not answered.
pub(crate) fn forget_file(locked: Locked) {
    let mut guard = locked.files();
    let Some(files) = guard.as_mut() else { return };
    if matches!(files.get(&locked), Some(Through::Session | Through::Kernel)) {
        release(files, locked);
    }
}

/// Ends the session's locks.
///
/// If SharedFS is away, the next closing repeats this, or they end with the session.
fn release(files: &mut Files, locked: Locked) {
    if locked.fs().is_ok_and(|fs| fs.release_records(locked.inode).is_err()) {
        files.insert(locked, Through::Session);
    } else {
        files.remove(&locked);
    }
}

/// Ends the process's locks on a file when the program closes a descriptor of it.
pub(crate) fn forget(file: &File) {
    if file.is_alone() || !IS_USED.load(Ordering::Acquire) {
        return;
    }
    let Ok(locked) = Locked::of(file) else { return };
    let mut guard = locked.files();
    let Some(files) = guard.as_mut() else { return };
    // If SharedFS is away, close a kernel descriptor too.
    let through = known(files, locked).unwrap_or(Some(Through::Kernel));
    // If the kernel has the locks, the session may still have some about which SharedFS has not answered.
    if through.is_some() {
        release(files, locked);
    }
    match through {
        Some(Through::Session) => {}
        Some(Through::Own(descriptor) | Through::HandedOver(descriptor)) => close(descriptor),
        // Make a real open file and a duplicate of it, and close both: the second closing counts. If that fails,
        // SharedFS is away, and its locks are gone.
        Some(Through::Kernel | Through::Inherited) => {
            if let Ok(second) = materialise::beside(file).and_then(materialise::high) {
                close(second.into_raw_fd());
            }
        }
        None => {}
    }
}

/// Keeps other threads from the records of locks, over a fork.
pub(crate) fn hold() -> Held {
    std::array::from_fn(part)
}

/// Discards the records in a forked process, which has no locks.
pub(crate) fn forget_all() {
    for number in 0..PARTS {
        for (_, through) in part(number).take().into_iter().flatten() {
            if let Through::Own(descriptor) | Through::HandedOver(descriptor) = through {
                close(descriptor);
            }
        }
    }
}

fn close(descriptor: i32) {
    descriptors::forget_internal(descriptor);
    descriptors::close_number(descriptor);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_fcntl() {
        assert_eq!(range(0, 5, 10), Ok((5, 14)));
        assert_eq!(range(100, 5, 0), Ok((105, LAST as u64)));
        assert_eq!(range(100, 0, -10), Ok((90, 99)));
        assert_eq!(range(100, 5, -105), Ok((0, 104)));
        assert_eq!(range(0, LAST, 1), Ok((LAST as u64, LAST as u64)));
        assert_eq!(range(100, -101, 0), Err(Errno::EINVAL));
        assert_eq!(range(100, 0, -101), Err(Errno::EINVAL));
        assert_eq!(range(0, -1, 1), Err(Errno::EINVAL));
        assert_eq!(range(0, i64::MIN, -1), Err(Errno::EINVAL));
        assert_eq!(range(1, LAST, 0), Err(Errno::EOVERFLOW));
        assert_eq!(range(0, LAST, 2), Err(Errno::EOVERFLOW));
    }
}
