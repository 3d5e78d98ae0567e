//! The session's update log, and the one protocol by which records are appended to it.
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
//! The types carry no more than the seal count and the session, and cost nothing.

use std::ops::Range;

use ashlar_log::{AppendError, Appended, Corrupt, Log, LogOpenError, Pin};
use ashlar_pmem::{Mapping, OutOfBounds};
use ashlar_types::{InodeId, LogPosition, QuotaVersion, SealCount, SessionId};
use ashlar_update::Update;
use ashlar_wire::LeaseRequest;

use crate::LibFs;
use crate::cache::node::{NodeState, NodeWriteGuard};
use crate::leases::grants::{Claim, Nodes};

/// A request for what a claim lacks, and the revision of the node that lacks it.
pub(crate) type MissingGrant = (LeaseRequest, u64);

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

/// The session's update log. Records that need leases are appended by [`LeasesChecked::append_held`].
#[derive(Debug)]
pub(crate) struct UpdateLog(Log<Mapping>);

impl UpdateLog {
    /// Attaches to a session's log.
    ///
    /// # Errors
    /// [`LogOpenError`].
    pub(crate) fn open(memory: Mapping) -> Result<Self, LogOpenError> {
        Log::open(memory).map(Self)
    }

    /// Appends a record that later updates may depend on another session's. It needs no lease and changes no node.
    ///
    /// # Errors
    /// [`AppendError`]; then nothing was appended.
    pub(crate) fn append_dependency(&self, session: SessionId, position: LogPosition) -> Result<(), AppendError> {
        let update = Update::Depend { session, position };
        self.0.append(self.0.seal_count(), update.kind() as u8, &update.encode().parts()).map(drop)
    }

    /// Returns the memory of the log.
    pub(crate) fn memory(&self) -> &Mapping {
        self.0.memory()
    }

    /// Returns the bytes of the ring.
    pub(crate) fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    /// Returns the longest body of a record.
    #[inline]
    pub(crate) fn body_bytes_max(&self) -> u64 {
        self.0.body_bytes_max()
    }

    /// Returns the position at which the next slot will begin.
    pub(crate) fn tail(&self) -> LogPosition {
        self.0.tail()
    }

    /// Limits appends to a position, before the first append.
    pub(crate) fn set_ready(&self, upto: LogPosition) {
        self.0.set_ready(upto);
    }

    /// Raises the position up to which appends may go.
    pub(crate) fn record_ready(&self, upto: LogPosition) {
        self.0.record_ready(upto);
    }

    /// Returns the position up to which appends may go.
    pub(crate) fn ready(&self) -> LogPosition {
        self.0.ready()
    }

    /// Returns the ranges of memory between two positions, which are at most one lap apart.
    pub(crate) fn parts(&self, from: LogPosition, to: LogPosition) -> [Range<u64>; 2] {
        self.0.parts(from, to)
    }

    /// Returns the bytes of memory, from its beginning, that the first appends up to a position write.
    pub(crate) fn bytes_upto(&self, upto: LogPosition) -> u64 {
        self.0.bytes_upto(upto)
    }

    /// Returns the position before which no append is under way or held, at most `upto`.
    pub(crate) fn end_before_held(&self, upto: LogPosition) -> LogPosition {
        self.0.end_before_held(upto)
    }

    /// Releases log bytes before `upto`, to which this process refers no more.
    pub(crate) fn release(&self, upto: LogPosition) {
        self.0.release(upto);
    }

    /// Copies bytes out of the body of a record that is not released.
    ///
    /// # Errors
    /// [`OutOfBounds`] if the bytes leave the ring, which no record's body does.
    #[inline]
    pub(crate) fn read(&self, position: LogPosition, into: &mut [u8]) -> Result<(), OutOfBounds> {
        self.0.read(position, into)
    }

    /// Verifies a record of this session where it stands.
    ///
    /// # Errors
    /// [`Corrupt`], also if no record begins there.
    pub(crate) fn verify(&self, position: LogPosition) -> Result<(), Corrupt> {
        self.0.verify(position)
    }
}
