//! The grant cache in the memory that the session shares with SharedFS.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use ashlar_pmem::Mapping;
use ashlar_types::{Inode, InodeId, SegmentVersion};
use ashlar_wire::{ControlPage, GrantCache, LeaseWord, Need, PublishedGrant};

/// The grant cache of the SharedFS that opened the session.
#[derive(Debug)]
pub(crate) struct GrantCacheReader {
    grant_cache: GrantCache<Arc<Mapping>>,
    memory: Arc<Mapping>,
    /// The segment version of that SharedFS; another SharedFS begins a new version before it grants anything.
    version: SegmentVersion,
}

impl GrantCacheReader {
    pub(crate) fn new(memory: Mapping, version: SegmentVersion) -> Option<Self> {
        let memory = Arc::new(memory);
        Some(Self { grant_cache: GrantCache::new(Arc::clone(&memory))?, memory, version })
    }

    /// Returns the memory.
    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
    }

    /// Returns the lease word of a slot, as it is now; after a restart of SharedFS, a word that allows nothing.
    pub(crate) fn word(&self, slot: u32, control: &ControlPage<Mapping>) -> LeaseWord {
        let word = self.grant_cache.word(slot);
        fence(Ordering::Acquire);
        if self.is_current(control) { word } else { LeaseWord::default() }
    }

    /// Returns a published grant of an inode, if it holds all that is needed.
    pub(crate) fn find_grant(&self, id: InodeId, need: Need) -> Option<PublishedGrant> {
        self.grant_cache.find(id, need)
    }

    /// Returns an inode's published attributes.
    pub(crate) fn find_attributes(&self, id: InodeId) -> Option<PublishedGrant<Inode>> {
        self.grant_cache.attributes(id)
    }

    /// Returns whether the SharedFS that opened the session still serves it.
    pub(crate) fn is_current(&self, control: &ControlPage<Mapping>) -> bool {
        control.segment_version() == self.version
    }
}
