//! The session's update log.

pub(crate) mod leased_append;

use std::ops::Range;

use ashlar_log::{AppendError, Corrupt, Log, LogOpenError};
use ashlar_pmem::{Mapping, OutOfBounds};
use ashlar_types::{LogPosition, SessionId};
use ashlar_update::Update;

/// The bytes of the log that are made ready first.
pub(crate) const LOG_STEP_LEAST: u64 = 64 << 10;

/// The session's update log. Only [`leased_append`] can append records that need leases.
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
