//! Directory versions: how LibFS notices that its own change may lead a remembered path elsewhere.

use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_types::InodeId;

/// Directory versions; inodes share them. If one has changed for another inode, the only cost is another walk.
const VERSIONS: usize = 1024;

/// Directory versions: counts of this session's changes that may lead a path elsewhere.
///
/// Such a change removes or replaces a name, or changes rights.
#[derive(Debug)]
pub(crate) struct DirectoryVersions(Box<[AtomicU64]>);

impl DirectoryVersions {
    pub(crate) fn new() -> Self {
        Self((0..VERSIONS).map(|_| AtomicU64::new(0)).collect())
    }

    fn counter(&self, id: InodeId) -> &AtomicU64 {
        &self.0[id.0 as usize % VERSIONS]
    }

    /// Returns an inode's version.
    pub(crate) fn version_of(&self, id: InodeId) -> u64 {
        self.counter(id).load(Ordering::Acquire)
    }

    /// Records that paths through an inode may lead elsewhere from now on. The caller has locked the inode's node for
    /// writing.
    pub(crate) fn raise_version(&self, id: InodeId) {
        self.counter(id).fetch_add(1, Ordering::Release);
    }
}
