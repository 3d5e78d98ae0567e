//! Record locks: they belong to a process and a file, and go when it closes any descriptor of that file.
//!
//! All of that the kernel does well, and waiting for one can be interrupted there. So a process locks a file of ours through a descriptor
//! of the kernel's on the same file, one for each file that it locks. When the program closes a descriptor of ours, the kernel must be told
//! so by the closing of one of its own: of that one, or, where the program has locked the file through another, of a new one.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ashlar_types::{Errno, InodeId};

use crate::descriptors::{self, File};
use crate::{materialise, session};

/// A file that the process has locked: in which session, and its inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Locked {
    session: u32,
    inode: InodeId,
}

/// Through what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Through {
    /// Through descriptors of the kernel's that it had.
    #[default]
    Kernel,
    /// Through a descriptor that was made for that.
    Own(i32),
    /// Through one that was made for that, and has become the program's open file.
    HandedOver(i32),
}

/// Whether the process has ever locked a file.
static IS_USED: AtomicBool = AtomicBool::new(false);
static FILES: Mutex<Option<HashMap<Locked, Through>>> = Mutex::new(None);

fn files() -> MutexGuard<'static, Option<HashMap<Locked, Through>>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn locked(file: &File) -> Result<Locked, Errno> {
    Ok(Locked { session: file.session()?.number, inode: file.inode() })
}

/// The descriptor through which a file is locked.
///
/// # Errors
/// Those of making it.
pub(crate) fn descriptor(file: &File) -> Result<i32, Errno> {
    let locked = locked(file)?;
    let mut files = files();
    let files = files.get_or_insert_default();
    let known = files.get(&locked).copied();
    if let Some(Through::Own(descriptor) | Through::HandedOver(descriptor)) = known {
        return Ok(descriptor);
    }
    let low = materialise::beside(file)?;
    // Closing the low one would end the locks that there are.
    let made = if known.is_none() { materialise::high(low)? } else { low }.into_raw_fd();
    files.insert(locked, Through::Own(made));
    IS_USED.store(true, Ordering::Release);
    Ok(made)
}

/// Has something done with a real open file of the kernel's beside one of ours; it may become the program's (`hands_over`). It is closed
/// again, unless that would end the process's locks on the file.
///
/// # Errors
/// Those of making it.
pub(crate) fn with_real<R>(
    file: &File,
    hands_over: bool,
    then: impl FnOnce(i32) -> Result<R, Errno>,
) -> Result<R, Errno> {
    let close = |real: OwnedFd, keeps: bool| {
        if keeps {
            let _ = real.into_raw_fd();
        } else {
            drop(real);
        }
    };
    // A path alone has nothing to do with locks.
    if file.is_alone() || !IS_USED.load(Ordering::Acquire) {
        let real = materialise::beside(file)?;
        let result = then(real.as_raw_fd());
        close(real, false);
        return result;
    }
    let locked = locked(file)?;
    let mut files = files();
    let known = files.as_mut().and_then(|files| files.get_mut(&locked));
    match known {
        Some(through @ Through::Own(_)) => {
            let Through::Own(descriptor) = *through else { return Err(Errno::EIO) };
            if hands_over {
                *through = Through::HandedOver(descriptor);
            }
            materialise::renew_size(descriptor, file);
            then(descriptor)
        }
        known => {
            let keeps = known.is_some();
            let real = materialise::beside(file)?;
            let result = then(real.as_raw_fd());
            close(real, keeps);
            result
        }
    }
}

/// The program locks a file through a descriptor of the kernel's.
pub(crate) fn note_kernel(descriptor: i32) {
    let Some((session, inode)) = session::file_of(descriptor) else { return };
    files().get_or_insert_default().entry(Locked { session, inode }).or_default();
    IS_USED.store(true, Ordering::Release);
}

/// The program closes a descriptor of a file: the process's locks on it go.
pub(crate) fn forget(file: &File) {
    if file.is_alone() || !IS_USED.load(Ordering::Acquire) {
        return;
    }
    let Ok(locked) = locked(file) else { return };
    match files().as_mut().and_then(|files| files.remove(&locked)) {
        Some(Through::Own(descriptor) | Through::HandedOver(descriptor)) => close(descriptor),
        // It goes again at once. Where it can't be made, SharedFS is away, and the locks with it.
        Some(Through::Kernel) => drop(materialise::beside(file)),
        None => {}
    }
}

/// The process was forked: it has no locks.
pub(crate) fn forget_all() {
    for (_, through) in files().take().into_iter().flatten() {
        if let Through::Own(descriptor) | Through::HandedOver(descriptor) = through {
            close(descriptor);
        }
    }
}

fn close(descriptor: i32) {
    descriptors::forget_internal(descriptor);
    descriptors::close_number(descriptor);
}
