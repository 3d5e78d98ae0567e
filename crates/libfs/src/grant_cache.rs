//! What others were told, read from the board without a question.
//!
//! What is taken over from there is known like what was granted, only that the lease that it stands under is the board's. Nothing is
//! taken over of what this session has changed and not yet forgotten: a state that it was told by SharedFS says up to which of its
//! updates are in it, and one that was told to another session does not.
//!
//! Who looks at the attributes of what he does not know gets them from the board as they stand there, and nothing is taken over: a program
//! that walks through a tree looks at most of it once. With the second look they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use ashlar_pmem::Mapping;
use ashlar_types::{Inode, InodeId, LogPosition, SessionId};
use ashlar_wire::{ControlPage, LeaseWord, ScopeKind, Want};

use crate::grants::Claim;
use crate::node::{Lease, Told};
use crate::{LibFs, clock};

/// Words of bits, one for several inodes.
const WORDS: usize = 1024;

/// Which inodes were looked at once.
#[derive(Debug)]
pub(crate) struct Glimpses {
    bits: Box<[AtomicU64]>,
    /// How many are set.
    count: AtomicU32,
}

impl Glimpses {
    pub(crate) fn new() -> Self {
        Self { bits: (0..WORDS).map(|_| AtomicU64::new(0)).collect(), count: AtomicU32::new(0) }
    }

    /// Whether an inode is looked at for the first time. By chance it is said of one that it isn't.
    fn is_first(&self, id: InodeId) -> bool {
        let (word, bit) = (&self.bits[id.0 as usize / 64 % WORDS], 1 << (id.0 % 64));
        if word.load(Ordering::Relaxed) & bit != 0 {
            return false;
        }
        word.fetch_or(bit, Ordering::Relaxed);
        // With too many set, chance would be the rule.
        if self.count.fetch_add(1, Ordering::Relaxed) as usize == WORDS * 64 / 2 {
            self.bits.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            self.count.store(0, Ordering::Relaxed);
        }
        true
    }
}

/// The board of the SharedFS that welcomed the session.
#[derive(Debug)]
pub(crate) struct GrantCacheReader {
    grant_cache: ashlar_wire::GrantCache<Arc<Mapping>>,
    /// The era of segments in which that SharedFS lives; another one begins a new era before it grants anything.
    version: u64,
}

impl GrantCacheReader {
    pub(crate) fn new(memory: Mapping, version: u64) -> Option<Self> {
        Some(Self { grant_cache: ashlar_wire::GrantCache::new(Arc::new(memory))?, version })
    }

    /// The word of a slot of the board's leases, now; one that allows nothing once another SharedFS has begun.
    pub(crate) fn word(&self, slot: u32, control: &ControlPage<Mapping>) -> LeaseWord {
        let word = self.grant_cache.word(slot);
        fence(Ordering::Acquire);
        if self.is_good(control) { word } else { LeaseWord::default() }
    }

    fn is_good(&self, control: &ControlPage<Mapping>) -> bool {
        control.segment_version() == self.version
    }
}

impl LibFs {
    /// Takes over what is wanted from the board, if all of it stands there. Whoever called looks again whether it is there.
    pub(crate) fn read_grant_cache(&self, want: &Want, revision: u64) -> bool {
        let Some(grant_cache) = &self.grant_cache else { return false };
        if want.write || want.scope == ScopeKind::Subtree || !grant_cache.is_good(&self.control) || !self.is_clean(want)
        {
            return false;
        }
        let (version, evictions) = (self.control.extent_version(), self.nodes.evictions());
        let Some(post) = grant_cache.grant_cache.find(want.inode, want.need) else { return false };
        if !self.depend_on_post(&post.dependencies) {
            return false;
        }
        let lease = Lease { is_posted: true, slot: post.slot, word: post.word };
        // The session has changed nothing since, nor before, that would have to be done to it again.
        let told = Told { applied: LogPosition(u64::MAX), version, evictions };
        let state = &mut self.nodes.write(want.inode);
        self.install_in(state, lease, &post.state, told, Some(revision)) && self.stands(lease, false)
    }

    /// The attributes of what this session knows nothing of, looked at for the first time, as they stand on the board.
    pub(crate) fn glimpse(&self, claim: &Claim) -> Option<Inode> {
        let grant_cache = self.grant_cache.as_ref()?;
        // Whose node is there it may have changed.
        if !claim.is_a_look() || !self.glimpses.is_first(claim.id) || self.nodes.has(claim.id) {
            return None;
        }
        self.check_alive().ok()?;
        let post = grant_cache.grant_cache.attributes(claim.id)?;
        let lease = Lease { is_posted: true, slot: post.slot, word: post.word };
        if !self.depend_on_post(&post.dependencies) || !self.stands(lease, false) {
            return None;
        }
        clock::note(post.state.changed);
        Some(post.state)
    }

    /// Logs that what follows depends on what others have written; says whether it could.
    fn depend_on_post(&self, dependencies: &[(SessionId, LogPosition)]) -> bool {
        let is_others = |(session, _): &&(SessionId, LogPosition)| *session != self.calls.session();
        let dependencies: Vec<_> = dependencies.iter().filter(is_others).copied().collect();
        dependencies.is_empty() || self.depend(&dependencies).is_ok()
    }

    /// Whether the session has changed nothing of an inode that SharedFS has not committed, as far as it knows.
    fn is_clean(&self, want: &Want) -> bool {
        self.nodes.existing(want.inode).is_none_or(|node| {
            let state = node.read();
            state.is_clean() && !state.gone
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_looked_at_once_is_known_until_most_of_all_was() {
        let glimpses = Glimpses::new();
        let most = WORDS as u64 * 32;
        assert!((0..most).all(|id| glimpses.is_first(InodeId(id))));
        assert!((0..most).all(|id| !glimpses.is_first(InodeId(id))));
        assert!(glimpses.is_first(InodeId(most)) && glimpses.is_first(InodeId(0)), "it begins anew");
    }
}
