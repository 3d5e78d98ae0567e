//! Hands LibFS descriptors over to the kernel.
//!
//! One real open file on the FUSE mount replaces all numbers of an open file.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_types::{Errno, InodeId};

use crate::entry::arch::system_call;
use crate::files::descriptors::{self, FilePlace, OpenFileRef};
use crate::files::shared_file::{FileIdentity, SharedFile};
use crate::files::{record_locks, recycled_descriptor, shared_file};
use crate::memory::segment_mapping;
use crate::sessions::session;
use crate::sessions::session::MountSession;

/// Status flags that the real open file takes over.
const KEPT_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_DIRECT
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_ASYNC
    | libc::O_NOFOLLOW
    | libc::O_NOATIME;

/// How often the kernel is asked for a size until it has the right one.
///
/// While a file keeps growing, it never has.
const SIZE_TRIES: u32 = 64;

/// A real open file of the kernel's beside a LibFS one, until it is dropped.
pub(crate) struct RealFile {
    descriptor: OwnedFd,
    is_high: bool,
}

impl RealFile {
    /// Moves the descriptor to a high number, if there is room.
    ///
    /// At a low number, the program's call would find it open under the number of a closed descriptor. And a
    /// descriptor that the call makes would not get the lowest number. The process must have no record locks on the
    /// file: the mount takes the second close for the program's.
    pub(crate) fn raise(self) -> Self {
        match duplicate_high(&self.descriptor) {
            Ok(descriptor) => Self { descriptor, is_high: true },
            Err(_) => self,
        }
    }

    /// Keeps the descriptor open at a high number, away from the program's own.
    ///
    /// # Errors
    /// `EMFILE`.
    pub(crate) fn keep(self) -> Result<i32, Errno> {
        let raised = self.raise();
        if raised.is_high { Ok(ManuallyDrop::new(raised).as_raw_fd()) } else { Err(Errno::EMFILE) }
    }
}

impl AsRawFd for RealFile {
    fn as_raw_fd(&self) -> i32 {
        self.descriptor.as_raw_fd()
    }
}

impl Drop for RealFile {
    fn drop(&mut self) {
        if self.is_high {
            descriptors::forget_internal(self.as_raw_fd());
        }
    }
}

/// Opens a real open file beside a LibFS one, with its access mode and flags.
///
/// # Errors
/// Those of SharedFS, which opens it.
pub(crate) fn open_beside(file: &OpenFileRef) -> Result<RealFile, Errno> {
    // The recycled number may be the last one.
    recycled_descriptor::close_recycled();
    let session = file.session()?;
    let kept = match (file.is_o_path(), file.is_directory()) {
        (true, _) => !0,
        (false, true) => KEPT_FLAGS | libc::O_DIRECTORY,
        (false, false) => KEPT_FLAGS,
    };
    let descriptor = session.materialise(file.inode(), file.flags() & kept)?;
    let real = RealFile { descriptor, is_high: false };
    if !file.is_o_path() {
        refresh_size(real.as_raw_fd(), file);
    }
    Ok(real)
}

/// Returns whether a kernel's open file has the flags of a LibFS one.
pub(crate) fn has_same_flags(real: i32, file: &OpenFileRef) -> bool {
    let flags = kernel_flags(real);
    flags >= 0 && (flags ^ file.flags()) & KEPT_FLAGS == 0
}

/// Returns the access mode and flags of a kernel's open file, or a negative errno.
pub(crate) fn kernel_flags(descriptor: i32) -> i32 {
    // SAFETY: it asks for flags.
    unsafe { system_call(libc::SYS_fcntl as u64, [descriptor as u64, libc::F_GETFL as u64, 0, 0, 0, 0]) as i32 }
}

/// Makes the kernel take over a file's current size.
///
/// The kernel uses its own size when a mapping of the file is touched, and does not ask then. It ignores an answer that
/// arrives just after a lease has moved the size.
pub(crate) fn refresh_size(real: i32, file: &OpenFileRef) {
    if let Ok(session) = file.session() {
        refresh_size_of(real, session, file.inode());
    }
}

/// As [`refresh_size`], for a file without a LibFS open file.
pub(crate) fn refresh_size_of(real: i32, session: &MountSession, inode: InodeId) {
    for _ in 0..SIZE_TRIES {
        let answered = session::refresh_size(real);
        if answered.is_some_and(|size| !has_size(real, size)) {
            continue;
        }
        match session.fs.attributes(inode) {
            Ok(found) if Some(found.inode.size) != answered => {}
            // On an error the file is gone or reserved for the kernel: its lease has moved for the last time by now.
            Ok(_) | Err(_) => return,
        }
    }
}

/// Returns whether the kernel uses this size of an open file; it may have ignored the last answer.
fn has_size(real: i32, size: u64) -> bool {
    // It counts from the open file's offset, and cuts the count to 32 bits.
    let mut left: i32 = 0;
    let arguments = [real as u64, libc::FIONREAD, (&raw mut left) as u64, 0, 0, 0];
    // SAFETY: it fills the number.
    let done = unsafe { system_call(libc::SYS_ioctl as u64, arguments) };
    done < 0 || kernel_offset(real).is_ok_and(|offset| size.wrapping_sub(offset) as i32 == left)
}

/// Opens a real open file to read, for a file without a LibFS open file.
///
/// # Errors
/// As [`open_beside`].
pub(crate) fn open_to_read(session: &MountSession, inode: InodeId) -> Result<OwnedFd, Errno> {
    // A reserved inode can't be opened here, but SharedFS opens it all the same.
    let is_open = match session.fs.open(inode) {
        Err(Errno::RESERVED) => false,
        opened => opened.map(|_| true)?,
    };
    let real = session.materialise(inode, libc::O_RDONLY);
    if let Ok(real) = &real {
        refresh_size_of(real.as_raw_fd(), session, inode);
    }
    if is_open {
        session.fs.close(inode);
    }
    real
}

/// Moves a descriptor to a high number, away from the program's own.
///
/// # Errors
/// `EMFILE`.
pub(crate) fn move_high(low: OwnedFd) -> Result<OwnedFd, Errno> {
    duplicate_high(&low)
}

fn duplicate_high(low: &OwnedFd) -> Result<OwnedFd, Errno> {
    let arguments = [low.as_raw_fd() as u64, libc::F_DUPFD_CLOEXEC as u64, session::lowest_internal(), 0, 0, 0];
    // SAFETY: it makes a duplicate of a descriptor of the library's.
    let made = unsafe { system_call(libc::SYS_fcntl as u64, arguments) };
    if made < 0 {
        return Err(Errno(-made as i32));
    }
    descriptors::record_internal(made as i32);
    // SAFETY: the descriptor is new.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}

/// Sets a kernel's file offset.
pub(crate) fn set_kernel_offset(descriptor: i32, offset: u64) {
    let arguments = [descriptor as u64, offset, libc::SEEK_SET as u64, 0, 0, 0];
    // SAFETY: it changes the offset of an open file that the library may change.
    unsafe { system_call(libc::SYS_lseek as u64, arguments) };
}

/// Returns a kernel's file offset.
///
/// # Errors
/// Those of lseek(2).
pub(crate) fn kernel_offset(descriptor: i32) -> Result<u64, Errno> {
    let arguments = [descriptor as u64, 0, libc::SEEK_CUR as u64, 0, 0, 0];
    // SAFETY: it changes nothing.
    let offset = unsafe { system_call(libc::SYS_lseek as u64, arguments) };
    if offset < 0 { Err(Errno(-offset as i32)) } else { Ok(offset as u64) }
}

/// Hands a descriptor over to the kernel, with all others of the same open file.
///
/// A kernel descriptor stays as it is.
///
/// # Errors
/// Those of SharedFS; then it stays LibFS's.
pub(crate) fn hand_over(number: i32) -> Result<(), Errno> {
    hand_over_found(number, descriptors::file(number))
}

/// As [`hand_over`], for the file that was found there.
pub(crate) fn hand_over_found(number: i32, file: Option<OpenFileRef>) -> Result<(), Errno> {
    match file {
        Some(file) => {
            hand_over_file(&file)?;
            if file.shared().is_some() {
                refresh_size(number, &file);
            }
            Ok(())
        }
        None => {
            leave_inherited(number);
            descriptors::leave_adoptable(number);
            Ok(())
        }
    }
}

/// Leaves an inherited descriptor and its open file to the kernel for good.
///
/// This holds for all processes that share it.
pub(crate) fn leave_inherited(number: i32) {
    if let Some(shared) = descriptors::inherited_at(number) {
        // Try each number that leads there: the program may have changed the others past the library.
        let _ = descriptors::inherited_alike(&shared).into_iter().any(|number| shared.hand_over(number));
        descriptors::replace_inherited(&shared, None);
        if let Some(session) = session::by_number(shared.file().mount).filter(|_| shared.is_at(number)) {
            refresh_size_of(number, session, shared.file().inode);
        }
    }
}

fn hand_over_file(file: &OpenFileRef) -> Result<(), Errno> {
    if file.shared().is_some() && !record_locks::has_ever_locked() {
        // The real open file is there already.
        return file.hand_over(false, |_, _| Ok(()));
    }
    record_locks::with_real_file(file, true, |real| {
        file.hand_over(false, |number, place| put_real_file(real, number, place))
    })
}

/// As [`hand_over_file`], for a file whose locks are moving to the kernel.
pub(crate) fn hand_over_without_locks(file: &OpenFileRef) -> Result<(), Errno> {
    let real = open_beside(file)?;
    file.hand_over(false, |number, place| put_real_file(real.as_raw_fd(), number, place))
}

/// Puts a real open file at one of a LibFS open file's numbers.
///
/// Without a number, sets its offset.
fn put_real_file(real: i32, number: Option<i32>, place: &FilePlace) -> Result<(), Errno> {
    let Some(number) = number else {
        set_kernel_offset(real, place.offset);
        return Ok(());
    };
    // The real open file replaces the placeholder.
    duplicate_at(real, number)
}

/// Makes a number lead to another descriptor's open file, and keeps the number's close-on-exec flag.
///
/// # Errors
/// Those of dup3(2).
pub(crate) fn duplicate_at(descriptor: i32, number: i32) -> Result<(), Errno> {
    let cloexec = if descriptors::closes_on_exec(number) == Some(false) { 0 } else { libc::O_CLOEXEC };
    let arguments = [descriptor as u64, number as u64, cloexec as u64, 0, 0, 0];
    // SAFETY: both are the same open file for the program, the kernel's and LibFS's.
    let done = unsafe { system_call(libc::SYS_dup3 as u64, arguments) };
    if done < 0 { Err(Errno(-done as i32)) } else { Ok(()) }
}

/// Files that the process has mapped for sharing.
///
/// A mapping and the descriptors must show the same data at once, so the kernel serves these files from then on.
static MAPPED: Mutex<Vec<(u32, InodeId)>> = Mutex::new(Vec::new());
static IS_ANY_MAPPED: AtomicBool = AtomicBool::new(false);
/// More files than these are not listed: then the kernel serves all files.
const MAPPED_MAX: usize = 1024;

/// Returns whether the kernel serves a file because it was mapped for sharing.
pub(crate) fn is_mapped_shared(session: u32, inode: InodeId) -> bool {
    IS_ANY_MAPPED.load(Ordering::Acquire) && {
        let mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.len() >= MAPPED_MAX || mapped.contains(&(session, inode))
    }
}

/// Hands over all descriptors of a file that is about to be mapped for sharing.
///
/// Later ones are handed over at once.
///
/// # Errors
/// As [`hand_over`].
pub(crate) fn hand_over_mapped(file: &OpenFileRef) -> Result<(), Errno> {
    let session = file.session()?.number;
    record_mapped((session, file.inode()));
    segment_mapping::hand_over_file(session, file.inode());
    hand_over_inode(session, file.inode())
}

fn record_mapped(file: (u32, InodeId)) {
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    if mapped.len() < MAPPED_MAX && !mapped.contains(&file) {
        mapped.push(file);
    }
    IS_ANY_MAPPED.store(true, Ordering::Release);
}

/// Does the same for a file that is mapped for sharing already, but not by the kernel.
///
/// # Errors
/// As [`hand_over`].
pub(crate) fn hand_over_inode(session: u32, inode: InodeId) -> Result<(), Errno> {
    let this = (session, inode);
    record_mapped(this);
    for number in descriptors::ours(0, u32::MAX) {
        let Some(other) = descriptors::file(number) else { continue };
        // An open file of a session that has ended gives errors as it is.
        if other.session().is_ok_and(|session| (session.number, other.inode()) == this) {
            record_locks::with_mapped_file(&other, |real, is_noted| {
                other.hand_over(is_noted, |number, place| put_real_file(real, number, place))
            })?;
        }
    }
    Ok(())
}

/// Hands all descriptors over to the kernel; returns whether it could.
///
/// A descriptor that can't be handed over stays LibFS's: a program without the library finds the placeholder there, and
/// gets an error.
pub(crate) fn hand_over_all() -> bool {
    descriptors::adoptable().for_each(descriptors::leave_adoptable);
    // The program's call goes on; a descriptor that stays gives its own errors. All are tried, even after one that
    // fails.
    descriptors::ours(0, u32::MAX).filter(|&number| hand_over(number).is_err()).count() == 0
}

/// Prepares all open files for a new process; returns whether it could.
///
/// Regular files get real open files, which both processes will have, and stay LibFS's. All others are handed over to
/// the kernel.
pub(crate) fn share_all() -> bool {
    descriptors::adoptable().for_each(descriptors::leave_adoptable);
    let mut files: Vec<(OpenFileRef, FileIdentity)> = Vec::new();
    for file in descriptors::ours(0, u32::MAX).filter_map(descriptors::file) {
        let is_new = file.shared().is_none() && !files.iter().any(|(other, _)| other.is_same(&file));
        if is_new && !file.is_directory() && !file.is_o_path() {
            let Ok(session) = file.session() else { continue };
            let identity = FileIdentity { mount: session.number, device: session.device, inode: file.inode() };
            files.push((file, identity));
        }
    }
    let identities: Vec<_> = files.iter().map(|(_, identity)| *identity).collect();
    // Without memory, all are handed over to the kernel.
    let prepared = shared_file::prepare_slots(&identities).unwrap_or_default();
    for ((file, _), shared) in files.iter().zip(prepared) {
        // One that can't get a real open file is handed over below, or stays LibFS's alone.
        let _ = share_one(file, shared);
    }
    drop(files);
    let is_left = |number: &i32| descriptors::file(*number).is_some_and(|file| file.shared().is_none());
    descriptors::ours(0, u32::MAX).filter(is_left).filter(|&number| hand_over(number).is_err()).count() == 0
}

fn share_one(file: &OpenFileRef, shared: SharedFile) -> Result<(), Errno> {
    let real = open_beside(file)?;
    shared_file::hide_offset(real.as_raw_fd());
    file.share(shared, |number| duplicate_at(real.as_raw_fd(), number))
}

/// Returns whether all LibFS open files are shared with new processes.
pub(crate) fn is_all_shared() -> bool {
    descriptors::ours(0, u32::MAX).filter_map(descriptors::file).all(|file| file.shared().is_some())
}

/// Keeps other threads from the list of mapped files, over a fork.
pub(crate) fn hold_mapped() -> MutexGuard<'static, Vec<(u32, InodeId)>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}
