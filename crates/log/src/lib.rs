//! The update log: a session's private, persistent operation log.
#![allow(missing_docs, unused)]
mod error;
use ashlar_pmem::Persistent;
use ashlar_types::*;
pub use error::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended { pub position: LogPosition, pub end: LogPosition, pub body: LogPosition }
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record { pub position: LogPosition, pub end: LogPosition, pub body_position: LogPosition, pub kind: u8, pub body: Vec<u8> }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordRef<'a> { pub position: LogPosition, pub end: LogPosition, pub body_position: LogPosition, pub kind: u8, pub body: &'a [u8] }

pub struct Log<M> { memory: M }
pub struct Scanner<'a, M> { log: &'a Log<M> }

impl<M: Persistent> Log<M> {
    pub fn bytes_for(ring_bytes: u64) -> u64 { unimplemented!() }
    pub fn format(memory: M, generation: LogGeneration) -> Result<Self, OpenError> { unimplemented!() }
    pub fn open(memory: M) -> Result<Self, OpenError> { unimplemented!() }
    pub fn recover(memory: M, committed: LogPosition) -> Result<(Self, LogPosition), OpenError> { unimplemented!() }
    pub fn memory(&self) -> &M { unimplemented!() }
    pub fn generation(&self) -> LogGeneration { unimplemented!() }
    pub fn capacity(&self) -> u64 { unimplemented!() }
    pub fn body_bytes_max(&self) -> u64 { unimplemented!() }
    pub fn seal_count(&self) -> SealCount { unimplemented!() }
    pub fn append(&self, seal: SealCount, kind: u8, parts: &[&[u8]]) -> Result<Appended, AppendError> { unimplemented!() }
    pub fn release(&self, upto: LogPosition) { unimplemented!() }
    pub fn head(&self) -> LogPosition { unimplemented!() }
    pub fn tail(&self) -> LogPosition { unimplemented!() }
    pub fn used(&self) -> u64 { unimplemented!() }
    pub fn is_fenced(&self) -> bool { unimplemented!() }
    pub fn read(&self, position: LogPosition, into: &mut [u8]) -> Result<(), ashlar_pmem::OutOfBounds> { unimplemented!() }
    pub fn seal(&self) -> Result<(SealCount, LogPosition), Damaged> { unimplemented!() }
    pub fn settled(&self) -> Result<LogPosition, Damaged> { unimplemented!() }
    pub fn scanner(&self, from: LogPosition, to: LogPosition) -> Scanner<'_, M> { unimplemented!() }
    pub fn scan(&self, from: LogPosition, to: LogPosition) -> impl Iterator<Item = Result<Record, Corrupt>> + '_ { std::iter::empty() }
    pub fn set_head(&self, head: LogPosition) { unimplemented!() }
    pub fn fence_session(&self) { unimplemented!() }
}
impl<M: Persistent> Scanner<'_, M> {
    pub fn position(&self) -> LogPosition { unimplemented!() }
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<Result<RecordRef<'_>, Corrupt>> { unimplemented!() }
}
