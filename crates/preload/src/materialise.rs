//! Descriptors of ours that become the kernel's: one real open file on the FUSE mount for all numbers of an open file.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use ashlar_types::Errno;

use crate::arch::system_call;
use crate::descriptors::{self, File, Place};
use crate::{locks, session};

/// Status flags that a new open file of the kernel's takes over.
const KEPT_FLAGS: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_DIRECT
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_NOATIME;

/// A real open file beside one of ours, with its access mode and flags.
///
/// # Errors
/// Those of SharedFS, which opens it.
pub(crate) fn beside(file: &File) -> Result<OwnedFd, Errno> {
    let session = file.session()?;
    let directory = if file.is_directory() { libc::O_DIRECTORY } else { 0 };
    let real = session.fs.materialise(session.root(), file.inode(), (file.flags() & KEPT_FLAGS | directory) as u32)?;
    // The kernel may have an older size, and goes by that where a mapping of the file is touched: it does not ask then.
    session::look_at(real.as_raw_fd());
    Ok(real)
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
    // SAFETY: the descriptor is new.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}

/// Sets a kernel's file offset.
pub(crate) fn set_offset(descriptor: i32, offset: u64) {
    let arguments = [descriptor as u64, offset, libc::SEEK_SET as u64, 0, 0, 0];
    // SAFETY: it changes the offset of an open file that is ours to change.
    unsafe { system_call(libc::SYS_lseek as u64, arguments) };
}

/// Makes a descriptor the kernel's, and all others of the same open file. One that is the kernel's already stays as it is.
///
/// # Errors
/// Those of SharedFS; then it stays ours.
pub(crate) fn descriptor(number: i32) -> Result<(), Errno> {
    match descriptors::file(number) {
        Some(file) => file_of(&file),
        None => Ok(()),
    }
}

fn file_of(file: &File) -> Result<(), Errno> {
    locks::with_real(file, true, |real| file.hand_over(|number, place| put(real, number, place)))
}

/// Puts a real open file in the place of one of ours at one of its numbers; at none, has it stand where ours stands.
fn put(real: i32, number: Option<i32>, place: &Place) -> Result<(), Errno> {
    let Some(number) = number else {
        set_offset(real, place.offset);
        return Ok(());
    };
    // SAFETY: the number is one of ours; the kernel's placeholder there gives way to the real file, with the same flag.
    let done = unsafe {
        let flags = system_call(libc::SYS_fcntl as u64, [number as u64, libc::F_GETFD as u64, 0, 0, 0, 0]);
        let cloexec = if flags & i64::from(libc::FD_CLOEXEC) != 0 { libc::O_CLOEXEC } else { 0 };
        let arguments = [real as u64, number as u64, cloexec as u64, 0, 0, 0];
        system_call(libc::SYS_dup3 as u64, arguments)
    };
    if done < 0 { Err(Errno(-done as i32)) } else { Ok(()) }
}

/// Makes all descriptors the kernel's. One that can't be stays ours: what does not know us finds the placeholder there, and an error.
pub(crate) fn all() {
    for number in descriptors::ours(0, u32::MAX) {
        // The program's call goes on; the descriptor answers for itself.
        let _ = descriptor(number);
    }
}
