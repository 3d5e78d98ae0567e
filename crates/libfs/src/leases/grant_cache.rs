//! Reading published grants from the grant cache, without a request.
//!
//! LibFS treats a state from the grant cache like a granted one, except that its lease is the grant cache's. It
//! installs no such state for an inode with changes that this session has not forgotten yet. A grant to this session
//! says which of the session's updates it includes; a published grant does not.
//!
//! An inode's attributes that are read for the first time are copied from the grant cache and not installed: a program
//! that walks through a tree reads most attributes once. At the second read they are installed.

use ashlar_types::{Inode, LeaseScope, LogPosition, SessionId};
use ashlar_wire::LeaseRequest;

use crate::LibFs;
use crate::cache::node::{GrantContext, Lease};
use crate::leases::claim::Claim;

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
        let Some(published) = grant_cache.find_grant(want.lease.inode, want.need) else { return false };
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
        let published = grant_cache.find_attributes(claim.id)?;
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
