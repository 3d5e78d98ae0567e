//! Descriptors of ours that become the kernel's: one real open file on the FUSE mount for all numbers of an open file.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_types::{Errno, InodeId};

use crate::arch::system_call;
use crate::descriptors::{self, File, Place};
use crate::session::Session;
use crate::shared::{Identity, Shared};
use crate::{direct, locks, recycled, session, shared};

/// Status flags that a new open file of the kernel's takes over.
const KEPT_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_DIRECT
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_NOATIME;

/// How often the kernel is asked for a size until it has the right one. While a file grows all the time it never has.
const SIZE_TRIES: u32 = 64;

/// A real open file beside one of ours, with its access mode and flags.
///
/// # Errors
/// Those of SharedFS, which opens it.
pub(crate) fn beside(file: &File) -> Result<OwnedFd, Errno> {
    // It may be the last number that there is.
    recycled::end();
    let session = file.session()?;
    if file.is_alone() {
        return session.materialise(file.inode(), file.flags());
    }
    let directory = if file.is_directory() { libc::O_DIRECTORY } else { 0 };
    let real = session.materialise(file.inode(), file.flags() & (KEPT_FLAGS | directory))?;
    renew_size(real.as_raw_fd(), file);
    Ok(real)
}

/// Whether a kernel's open file was opened as one of ours was.
pub(crate) fn is_as(real: i32, file: &File) -> bool {
    let flags = flags(real);
    flags >= 0 && (flags ^ file.flags()) & KEPT_FLAGS == 0
}

/// The access mode and flags of a kernel's open file, or a negative errno.
pub(crate) fn flags(descriptor: i32) -> i32 {
    // SAFETY: it asks for flags.
    unsafe { system_call(libc::SYS_fcntl as u64, [descriptor as u64, libc::F_GETFL as u64, 0, 0, 0, 0]) as i32 }
}

/// Sees to it that the kernel has the size that a file has: it goes by that where a mapping of the file is touched, and does not ask
/// then. An answer that comes when a lease has just moved it does not take.
pub(crate) fn renew_size(real: i32, file: &File) {
    if let Ok(session) = file.session() {
        renew_size_of(real, session, file.inode());
    }
}

/// As [`renew_size`], for a file that may have no open file of ours.
pub(crate) fn renew_size_of(real: i32, session: &Session, inode: InodeId) {
    for _ in 0..SIZE_TRIES {
        let kernel = session::size_of(real);
        match session.fs.attributes(inode) {
            Ok(found) if Some(found.inode.size) != kernel => {}
            Ok(_) => return,
            // What can't be looked at here is gone, or reserved for the kernel: its lease has moved for the last time by now.
            Err(_) => {
                session::size_of(real);
                return;
            }
        }
    }
}

/// A real open file to read, of a file that may have no open file of ours.
///
/// # Errors
/// As [`beside`].
pub(crate) fn to_read(session: &Session, inode: InodeId) -> Result<OwnedFd, Errno> {
    // A reserved inode can't be opened here, and SharedFS hands it over all the same.
    let is_open = match session.fs.open(inode) {
        Err(Errno::RESERVED) => false,
        opened => opened.map(|_| true)?,
    };
    let real = session.materialise(inode, libc::O_RDONLY);
    if let Ok(real) = &real {
        renew_size_of(real.as_raw_fd(), session, inode);
    }
    if is_open {
        session.fs.close(inode);
    }
    real
}

/// Moves a descriptor to where a program does not look for its own.
///
/// # Errors
/// `EMFILE`.
pub(crate) fn high(low: OwnedFd) -> Result<OwnedFd, Errno> {
    let arguments = [low.as_raw_fd() as u64, libc::F_DUPFD_CLOEXEC as u64, session::floor(), 0, 0, 0];
    // SAFETY: it makes a descriptor of one that is ours.
    let made = unsafe { system_call(libc::SYS_fcntl as u64, arguments) };
    if made < 0 {
        return Err(Errno(-made as i32));
    }
    descriptors::note_internal(made as i32);
    // SAFETY: the descriptor is new.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}

/// Sets a kernel's file offset.
pub(crate) fn set_offset(descriptor: i32, offset: u64) {
    let arguments = [descriptor as u64, offset, libc::SEEK_SET as u64, 0, 0, 0];
    // SAFETY: it changes the offset of an open file that is ours to change.
    unsafe { system_call(libc::SYS_lseek as u64, arguments) };
}

/// A kernel's file offset.
///
/// # Errors
/// Those of lseek(2).
pub(crate) fn offset(descriptor: i32) -> Result<u64, Errno> {
    let arguments = [descriptor as u64, 0, libc::SEEK_CUR as u64, 0, 0, 0];
    // SAFETY: it changes nothing.
    let offset = unsafe { system_call(libc::SYS_lseek as u64, arguments) };
    if offset < 0 { Err(Errno(-offset as i32)) } else { Ok(offset as u64) }
}

/// Makes a descriptor the kernel's, and all others of the same open file. One that is the kernel's already stays as it is.
///
/// # Errors
/// Those of SharedFS; then it stays ours.
pub(crate) fn descriptor(number: i32) -> Result<(), Errno> {
    found(number, descriptors::file(number))
}

/// As [`descriptor`], for what was found there.
pub(crate) fn found(number: i32, file: Option<File>) -> Result<(), Errno> {
    match file {
        Some(file) => {
            file_of(&file)?;
            if file.shared().is_some() {
                renew_size(number, &file);
            }
            Ok(())
        }
        None => {
            leave_inherited(number);
            descriptors::forget_candidate(number);
            Ok(())
        }
    }
}

/// A descriptor that the process was forked with, and the others of that open file, are the kernel's for good, and so they are for all who share it.
pub(crate) fn leave_inherited(number: i32) {
    if let Some(shared) = descriptors::inherited_at(number) {
        // By one that leads there, whatever the program has done to the others past us.
        let _ = descriptors::inherited_alike(&shared).into_iter().any(|number| shared.leave(number));
        descriptors::replace_inherited(&shared, None);
        if let Some(session) = session::by_number(shared.file().mount).filter(|_| shared.is_at(number)) {
            renew_size_of(number, session, shared.file().inode);
        }
    }
}

fn file_of(file: &File) -> Result<(), Errno> {
    if file.shared().is_some() && !locks::is_used() {
        // The real one is there.
        return file.hand_over(false, |_, _| Ok(()));
    }
    locks::with_real(file, true, |real| file.hand_over(false, |number, place| put(real, number, place)))
}

/// As [`file_of`], for one whose locks are on their way to the kernel.
pub(crate) fn without_locks(file: &File) -> Result<(), Errno> {
    let real = beside(file)?;
    file.hand_over(false, |number, place| put(real.as_raw_fd(), number, place))
}

/// Puts a real open file in the place of one of ours at one of its numbers; at none, has it stand where ours stands.
fn put(real: i32, number: Option<i32>, place: &Place) -> Result<(), Errno> {
    let Some(number) = number else {
        set_offset(real, place.offset);
        return Ok(());
    };
    // The kernel's placeholder there gives way to the real file.
    put_at(real, number)
}

/// Has a number lead to what another descriptor has open, in place of what it led to, with the flag for the run of another program that it had.
///
/// # Errors
/// Those of dup3(2).
pub(crate) fn put_at(descriptor: i32, number: i32) -> Result<(), Errno> {
    let cloexec = if descriptors::closes_on_exec(number) == Some(false) { 0 } else { libc::O_CLOEXEC };
    let arguments = [descriptor as u64, number as u64, cloexec as u64, 0, 0, 0];
    // SAFETY: both stand for the same open file of the program's, the one in the kernel and the one here.
    let done = unsafe { system_call(libc::SYS_dup3 as u64, arguments) };
    if done < 0 { Err(Errno(-done as i32)) } else { Ok(()) }
}

/// Files that the process has mapped for sharing: what a mapping shows and what descriptors read and write must be the same at once, so
/// the kernel has them from then on.
static MAPPED: Mutex<Vec<(u32, InodeId)>> = Mutex::new(Vec::new());
static IS_ANY_MAPPED: AtomicBool = AtomicBool::new(false);
/// More files than these are not kept apart: then all are the kernel's.
const MAPPED_MAX: usize = 1024;

/// Whether a file is the kernel's since it was mapped for sharing.
pub(crate) fn is_mapped(session: u32, inode: InodeId) -> bool {
    IS_ANY_MAPPED.load(Ordering::Acquire) && {
        let mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.len() >= MAPPED_MAX || mapped.contains(&(session, inode))
    }
}

/// A file is about to be mapped for sharing: all its descriptors become the kernel's, and those that come are so at once.
///
/// # Errors
/// As [`descriptor`].
pub(crate) fn map_shared(file: &File) -> Result<(), Errno> {
    let session = file.session()?.number;
    note_mapped((session, file.inode()));
    direct::leave_file(session, file.inode());
    share(session, file.inode())
}

fn note_mapped(file: (u32, InodeId)) {
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    if mapped.len() < MAPPED_MAX && !mapped.contains(&file) {
        mapped.push(file);
    }
    IS_ANY_MAPPED.store(true, Ordering::Release);
}

/// The same, for a file that is mapped for sharing already, otherwise than by the kernel.
///
/// # Errors
/// As [`descriptor`].
pub(crate) fn share(session: u32, inode: InodeId) -> Result<(), Errno> {
    let this = (session, inode);
    note_mapped(this);
    for number in descriptors::ours(0, u32::MAX) {
        let Some(other) = descriptors::file(number) else { continue };
        // One of a session that has ended gives errors as it is.
        if other.session().is_ok_and(|session| (session.number, other.inode()) == this) {
            locks::with_mapped(&other, |real, is_noted| {
                other.hand_over(is_noted, |number, place| put(real, number, place))
            })?;
        }
    }
    Ok(())
}

/// Makes all descriptors the kernel's, and says whether it could. One that can't be stays ours: what does not know us finds the
/// placeholder there, and an error.
pub(crate) fn all() -> bool {
    descriptors::candidates().for_each(descriptors::forget_candidate);
    // The program's call goes on; a descriptor that stays answers for itself.
    // All are tried, also behind one that fails.
    descriptors::ours(0, u32::MAX).filter(|&number| descriptor(number).is_err()).count() == 0
}

/// Before a process is made: regular files get real open files, which both will have, and stay ours; all else becomes the kernel's. Says whether it
/// could.
pub(crate) fn share_all() -> bool {
    descriptors::candidates().for_each(descriptors::forget_candidate);
    let mut files: Vec<(File, Identity)> = Vec::new();
    for file in descriptors::ours(0, u32::MAX).filter_map(descriptors::file) {
        let is_new = file.shared().is_none() && !files.iter().any(|(other, _)| other.is_same(&file));
        if is_new && !file.is_directory() && !file.is_alone() {
            let Ok(session) = file.session() else { continue };
            let identity = Identity { mount: session.number, device: session.device, inode: file.inode() };
            files.push((file, identity));
        }
    }
    let identities: Vec<_> = files.iter().map(|(_, identity)| *identity).collect();
    // Without memory all become the kernel's.
    let prepared = shared::prepare(&identities).unwrap_or_default();
    for ((file, _), shared) in files.iter().zip(prepared) {
        // One that can't have a real one becomes the kernel's, or stays ours alone, below.
        let _ = share_one(file, shared);
    }
    drop(files);
    let is_left = |number: &i32| descriptors::file(*number).is_some_and(|file| file.shared().is_none());
    descriptors::ours(0, u32::MAX).filter(is_left).filter(|&number| descriptor(number).is_err()).count() == 0
}

fn share_one(file: &File, shared: Shared) -> Result<(), Errno> {
    let real = beside(file)?;
    shared::put_nowhere(real.as_raw_fd());
    file.share(shared, |number| put_at(real.as_raw_fd(), number))
}

/// Whether all that is ours is shared with the processes that are made now.
pub(crate) fn is_all_shared() -> bool {
    descriptors::ours(0, u32::MAX).filter_map(descriptors::file).all(|file| file.shared().is_some())
}

/// Keeps other threads from what is known of mapped files, over a fork.
pub(crate) fn hold() -> MutexGuard<'static, Vec<(u32, InodeId)>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}
