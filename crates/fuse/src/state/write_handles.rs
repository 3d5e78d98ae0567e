//! Counts the handles through which files can be written.
//!
//! The kernel asks a mount to clear a file's set-id bits without a reason: before a write or `fallocate` by an ordinary
//! user, and at `chown(path, -1, -1)`, which any user may call on any file. A write has a handle. On ext4, the `chown`
//! of a stranger is `EPERM`. So the mount refuses strangers while no process has the file open for writing.

use std::collections::HashMap;

use ashlar_types::InodeId;
use parking_lot::Mutex;

/// The number of handles for writing of each file that has any.
#[derive(Debug, Default)]
pub(crate) struct WriteHandles(Mutex<HashMap<InodeId, u32>>);

impl WriteHandles {
    /// Counts a new handle.
    pub(crate) fn add(&self, inode: InodeId) {
        *self.0.lock().entry(inode).or_default() += 1;
    }

    /// Counts out a handle that [`Self::add`] counted.
    pub(crate) fn remove(&self, inode: InodeId) {
        let mut files = self.0.lock();
        if let Some(count) = files.get_mut(&inode) {
            *count -= 1;
            if *count == 0 {
                files.remove(&inode);
            }
        }
    }

    /// Whether a file has any.
    pub(crate) fn has(&self, inode: InodeId) -> bool {
        self.0.lock().contains_key(&inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_open_for_writing_until_its_last_handle_goes() {
        let (handles, file) = (WriteHandles::default(), InodeId(20));
        handles.add(file);
        handles.add(file);
        handles.remove(file);
        assert!(handles.has(file) && !handles.has(InodeId(21)));
        handles.remove(file);
        assert!(!handles.has(file));
    }
}
