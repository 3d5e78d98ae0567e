//! Reading published grants from the grant cache, without a request.
//!
//! LibFS treats a state from the grant cache like a granted one, except that its lease is the grant cache's. It
//! installs no such state for an inode with changes that this session has not forgotten yet. A grant to this session
//! says which of the session's updates it includes; a published grant does not.
//!
//! An inode's attributes that are read for the first time are copied from the grant cache and not installed: a program
//! that walks through a tree reads most attributes once. At the second read they are installed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use ashlar_pmem::Mapping;
use ashlar_types::{Inode, InodeId, LeaseScope, LogPosition, SegmentVersion, SessionId};
use ashlar_wire::{ControlPage, LeaseRequest, LeaseWord};

use crate::LibFs;
use crate::cache::node::{GrantContext, Lease};
use crate::leases::grants::Claim;

/// Words of bits; several inodes share a bit.
const WORDS: usize = 1024;

/// The inodes whose attributes were read once.
#[derive(Debug)]
pub(crate) struct FirstReads {
    bits: Box<[AtomicU64]>,
    /// How many bits are set.
    count: AtomicU32,
}

impl FirstReads {
    pub(crate) fn new() -> Self {
        Self { bits: (0..WORDS).map(|_| AtomicU64::new(0)).collect(), count: AtomicU32::new(0) }
    }

    /// Returns whether an inode is read for the first time. It may wrongly return `false` for one that shares a bit.
    fn is_first_read(&self, id: InodeId) -> bool {
        let (word, bit) = (&self.bits[id.0 as usize / 64 % WORDS], 1 << (id.0 % 64));
        if word.load(Ordering::Relaxed) & bit != 0 {
            return false;
        }
        word.fetch_or(bit, Ordering::Relaxed);
        // With too many bits set, wrong answers would be the rule.
        if self.count.fetch_add(1, Ordering::Relaxed) as usize == WORDS * 64 / 2 {
            self.bits.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            self.count.store(0, Ordering::Relaxed);
        }
        true
    }
}

/// The grant cache of the SharedFS that opened the session.
#[derive(Debug)]
pub(crate) struct GrantCacheReader {
    grant_cache: ashlar_wire::GrantCache<Arc<Mapping>>,
    memory: Arc<Mapping>,
    /// The segment version of that SharedFS; another SharedFS begins a new version before it grants anything.
    version: SegmentVersion,
}

impl GrantCacheReader {
    pub(crate) fn new(memory: Mapping, version: SegmentVersion) -> Option<Self> {
        let memory = Arc::new(memory);
        Some(Self { grant_cache: ashlar_wire::GrantCache::new(Arc::clone(&memory))?, memory, version })
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

    fn is_current(&self, control: &ControlPage<Mapping>) -> bool {
        control.segment_version() == self.version
    }
}

impl LibFs {
    /// Installs a wanted grant from the grant cache, if it holds all of it. The caller checks the node again.
    pub(crate) fn read_grant_cache(&self, want: &LeaseRequest, revision: u64) -> bool {
        let Some(grant_cache) = &self.grant_cache else { return false };
        if want.lease.mode.is_write()
            || want.lease.scope == LeaseScope::Subtree
            || !grant_cache.is_current(&self.control)
            || !self.is_clean(want)
        {
            return false;
        }
        let (version, evictions) = (self.control.extent_version(), self.nodes.evictions());
        let Some(published) = grant_cache.grant_cache.find(want.lease.inode, want.need) else { return false };
        if !self.depend_on_published(&published.dependencies) {
            return false;
        }
        let lease = Lease { is_published: true, slot: published.slot, word: published.word };
        // The session has changed nothing since or before that would have to be applied again.
        let context = GrantContext { applied: LogPosition(u64::MAX), version, evictions };
        let state = &mut self.nodes.write(want.lease.inode);
        self.install_state(state, lease, &published.state, context, Some(revision)) && self.lease_holds(lease, false)
    }

    /// Returns attributes from the grant cache, for an inode that is read for the first time and has no node.
    pub(crate) fn cached_grant_attributes(&self, claim: &Claim) -> Option<Inode> {
        let grant_cache = self.grant_cache.as_ref()?;
        // If there is a node, this session may have changed the inode.
        if !claim.reads_attributes_only() || !self.first_reads.is_first_read(claim.id) || self.nodes.has_node(claim.id)
        {
            return None;
        }
        self.check_alive().ok()?;
        let published = grant_cache.grant_cache.attributes(claim.id)?;
        let lease = Lease { is_published: true, slot: published.slot, word: published.word };
        if !self.depend_on_published(&published.dependencies) || !self.lease_holds(lease, false) {
            return None;
        }
        Some(published.state)
    }

    /// Logs that later updates depend on other sessions' updates; returns whether it could.
    fn depend_on_published(&self, dependencies: &[(SessionId, LogPosition)]) -> bool {
        let is_others = |(session, _): &&(SessionId, LogPosition)| *session != self.client.session();
        let dependencies: Vec<_> = dependencies.iter().filter(is_others).copied().collect();
        dependencies.is_empty() || self.log_dependencies(&dependencies).is_ok()
    }

    /// Returns whether this session has no changes of an inode that SharedFS has not committed, as far as it knows.
    fn is_clean(&self, want: &LeaseRequest) -> bool {
        self.nodes.existing(want.lease.inode).is_none_or(|node| {
            let state = node.read();
            state.is_clean() && !state.is_gone
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_read_is_recorded_until_half_the_bits_are_set() {
        let first_reads = FirstReads::new();
        let most = WORDS as u64 * 32;
        assert!((0..most).all(|id| first_reads.is_first_read(InodeId(id))));
        assert!((0..most).all(|id| !first_reads.is_first_read(InodeId(id))));
        assert!(
            first_reads.is_first_read(InodeId(most)) && first_reads.is_first_read(InodeId(0)),
            "the bits are cleared"
        );
    }
}
