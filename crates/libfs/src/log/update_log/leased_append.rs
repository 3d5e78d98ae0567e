//! The one protocol by which records that need leases are appended to the update log.
//!
//! A record may be appended only while every lease that it needs holds. Each step of the protocol needs the result of
//! the step before, so another order does not compile:
//!
//! 1. [`SealRead`]: LibFS has read the log's seal count.
//! 2. [`LeasesChecked`]: LibFS has then checked the lease words of the nodes that the operation has locked.
//! 3. [`LeasesChecked::append_held`]: the log reserves the record's slot, by a compare-and-swap that fails if the seal
//!    count has moved. Then it fills the slot and commits it.
//!
//! SharedFS takes a lease away by writing its word first, and seals the log next. So an operation sees the new word, or
//! its append fails and the operation begins anew. A quota version begins in the same way.
//!
//! The types carry no more than the seal count and the session, and cost nothing. No other module can reserve a slot
//! for such a record: the log is private to [`UpdateLog`](super::UpdateLog) and to this module.

use ashlar_log::{AppendError, Appended, Pin};
use ashlar_types::{InodeId, QuotaVersion, SealCount};

use crate::LibFs;
use crate::cache::node::{NodeState, NodeWriteGuard};
use crate::leases::claim::{Claim, MissingGrant, Nodes};

/// The log's seal count, read before the leases are checked under which a record is appended.
#[derive(Debug)]
#[must_use]
pub(crate) struct SealRead<'a> {
    fs: &'a LibFs,
    seal: SealCount,
}

impl<'a> SealRead<'a> {
    /// Reads the seal count of a session's log.
    #[inline]
    pub(crate) fn read(fs: &'a LibFs) -> Self {
        Self { fs, seal: fs.log.0.seal_count() }
    }

    /// Checks the lease to write a locked node; `None` if it does not hold.
    #[inline]
    pub(crate) fn check_write(self, state: &NodeState) -> Option<LeasesChecked<'a>> {
        self.fs.holds_lease(state, true).then_some(LeasesChecked { fs: self.fs, seal: self.seal })
    }

    /// Checks all that an operation claims of its locked nodes, which are in the order of the claims.
    ///
    /// # Errors
    /// The requests for what the nodes lack.
    pub(crate) fn check_claims(self, claims: &[Claim], nodes: &Nodes) -> Result<LeasesChecked<'a>, Vec<MissingGrant>> {
        debug_assert!(claims.iter().map(|claim| claim.id).eq(nodes.iter().map(|(id, _)| *id)));
        let missing_of = |(claim, (_, state)): (&Claim, &(InodeId, NodeWriteGuard))| {
            self.fs.find_missing(state, claim).map(|want| (want, state.revision))
        };
        let missing: Vec<_> = claims.iter().zip(nodes).filter_map(missing_of).collect();
        if missing.is_empty() { Ok(LeasesChecked { fs: self.fs, seal: self.seal }) } else { Err(missing) }
    }
}

/// The right to append records: leases that held after the log's seal count was read.
#[derive(Debug)]
pub(crate) struct LeasesChecked<'a> {
    fs: &'a LibFs,
    seal: SealCount,
}

impl<'a> LeasesChecked<'a> {
    /// Returns the quota version under which the records are paid for.
    ///
    /// If another version begins after this, the log refuses the records.
    #[inline]
    pub(crate) fn quota_version(&self) -> QuotaVersion {
        self.fs.control.quota_version()
    }

    /// Appends a record whose body is `parts` in a row, and holds it.
    ///
    /// While the [`Pin`] lives, tidying does not treat the record's changes as noted.
    ///
    /// # Errors
    /// [`AppendError`]; then nothing was appended. [`AppendError::Sealed`] means that a lease may be gone.
    #[inline]
    pub(crate) fn append_held(&self, kind: u8, parts: &[&[u8]]) -> Result<(Appended, Pin<'a>), AppendError> {
        self.fs.log.0.append_held(self.seal, kind, parts)
    }
}
