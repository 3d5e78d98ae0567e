//! Files made without a name (`O_TMPFILE`), which may get one.
//!
//! The kernel refuses a name to a file without links, unless it knows that the file was made so. It does not know that
//! of files that LibFS has made, whichever descriptor leads to them. So LibFS names them, even after their open files
//! were handed over to the kernel, and for processes that were forked since.

use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_libfs::FoundInode;
use ashlar_types::{InodeId, Timestamp};
use rustix_futex_sync::{Mutex, MutexGuard};

use crate::sessions::session::{self, MountSession};

/// If there are more files than these, the oldest are removed.
const UNNAMED_MAX: usize = 1024;

/// A file that was made without a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnnamedFile {
    /// The number of its mount.
    mount: u32,
    /// `st_dev`.
    device: u64,
    inode: InodeId,
    /// When it was made: a later file with its inode is not taken for it.
    born: Timestamp,
    /// The process that has made it, and may name it by its descriptor alone.
    maker: u32,
}

static UNNAMED: Mutex<Vec<UnnamedFile>> = Mutex::new(Vec::new());
static IS_ANY: AtomicBool = AtomicBool::new(false);

/// Records a file that was made without a name.
pub(crate) fn record_unnamed(session: &MountSession, made: &FoundInode) {
    let file = UnnamedFile {
        mount: session.number,
        device: session.device,
        inode: made.id,
        born: made.inode.born,
        maker: std::process::id(),
    };
    let mut unnamed = UNNAMED.lock();
    if unnamed.len() == UNNAMED_MAX {
        unnamed.remove(0);
    }
    unnamed.push(file);
    IS_ANY.store(true, Ordering::Relaxed);
}

/// Returns the session and the inode of a kernel descriptor's file, if that was made without a name.
///
/// It opens the session if there is none.
pub(crate) fn session_of_unnamed(descriptor: i32) -> Option<(&'static MountSession, InodeId)> {
    if !is_any_known() {
        return None;
    }
    let (device, inode) = session::identity_of(descriptor)?;
    let mount = UNNAMED.lock().iter().find(|file| (file.device, file.inode) == (device, inode))?.mount;
    let session = session::by_number(mount).or_else(|| session::open_session(mount))?;
    Some((session, inode))
}

/// Returns whether the process knows of any.
pub(crate) fn is_any_known() -> bool {
    IS_ANY.load(Ordering::Relaxed)
}

/// Returns whether another process has made a file without a name.
pub(crate) fn is_of_another_process(session: &MountSession, found: &FoundInode) -> bool {
    let is_it = |file: &UnnamedFile| {
        (file.device, file.inode, file.born) == (session.device, found.id, found.inode.born)
            && file.maker != std::process::id()
    };
    is_any_known() && UNNAMED.lock().iter().any(is_it)
}

/// Removes a file that the process has closed.
pub(crate) fn forget_unnamed(session: &MountSession, inode: InodeId) {
    if is_any_known() {
        UNNAMED.lock().retain(|file| (file.device, file.inode) != (session.device, inode));
    }
}

/// Keeps other threads from these records, over a fork.
pub(crate) fn hold_unnamed() -> MutexGuard<'static, Vec<UnnamedFile>> {
    UNNAMED.lock()
}
