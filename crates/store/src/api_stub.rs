#![allow(missing_docs, unused_variables, dead_code)]
use std::ops::Range;
use std::sync::Arc;
use ashlar_pmem::{Arena, SegmentInfo};
use ashlar_types::{BlockAddress, Inode, InodeId, LogGeneration, LogPosition, Name, SessionId};
use ashlar_update::{Applied, Entry, Update};
use crate::StoreError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent { pub logical_block: u64, pub blocks: u64, pub address: Option<BlockAddress> }
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents { Inline(Vec<u8>), Extents(Vec<Extent>) }
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space { pub blocks_total: u64, pub blocks_free: u64, pub blocks_pinned: u64, pub blocks_reserved: u64,
    pub metadata_bytes_total: u64, pub metadata_bytes_used: u64 }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionState { pub generation: LogGeneration, pub applied: LogPosition, pub committed: LogPosition }
/// One committed position per session that moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed { pub sessions: Vec<(SessionId, LogPosition)> }
/// Writes one frozen batch; `run` needs no lock, hand its result to `finish_commit`.
pub struct CommitJob(());
pub struct CommitDone(());
impl CommitJob { pub fn run(self) -> CommitDone { unimplemented!() } }
/// A check of the last committed state, which runs without the store.
pub struct Checker(());
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress { pub done: u64, pub total: u64 }
#[derive(Clone, Debug, Default)]
pub struct Report { pub problems: Vec<Problem>, pub counts: Counts }
#[derive(Clone, Debug, Default)]
pub struct Counts { pub inodes: u64, pub directories: u64, pub entries: u64, pub blocks: u64, pub bytes: u64 }
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem { }
impl Problem { pub fn is_repairable(&self) -> bool { unimplemented!() } }
impl std::fmt::Display for Problem { fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { unimplemented!() } }
impl Checker { pub fn run(self, progress: &mut dyn FnMut(Progress)) -> Result<Report, StoreError> { unimplemented!() } }

pub struct Store(());
impl Store {
    pub fn format(arena: &Arena) -> Result<(), StoreError> { unimplemented!() }
    pub fn open(arena: Arc<Arena>) -> Result<Self, StoreError> { unimplemented!() }
    pub fn apply(&mut self, session: SessionId, end: LogPosition, update: &Update<'_>, may_free: &dyn Fn(InodeId) -> bool) -> Result<Applied, StoreError> { unimplemented!() }
    /// Moves the session's applied position without an update (void and pad records).
    pub fn advance(&mut self, session: SessionId, end: LogPosition) { unimplemented!() }
    pub fn applied(&self, session: SessionId) -> LogPosition { unimplemented!() }
    pub fn committed(&self, session: SessionId) -> LogPosition { unimplemented!() }
    pub fn sessions(&self) -> Vec<(SessionId, SessionState)> { unimplemented!() }
    pub fn set_session(&mut self, session: SessionId, generation: LogGeneration, position: LogPosition) { unimplemented!() }
    pub fn remove_session(&mut self, session: SessionId) { unimplemented!() }
    pub fn allocate_inodes(&mut self, count: u64) -> Result<Range<u64>, StoreError> { unimplemented!() }
    pub fn next_session_id(&mut self) -> Result<SessionId, StoreError> { unimplemented!() }
    pub fn hash_key(&self) -> [u8; 16] { unimplemented!() }
    pub fn name_cookie(&self, name: &[u8]) -> u64 { unimplemented!() }
    pub fn inode(&self, inode: InodeId) -> Result<Option<Inode>, StoreError> { unimplemented!() }
    pub fn entry(&self, directory: InodeId, name: &[u8]) -> Result<Option<Entry>, StoreError> { unimplemented!() }
    /// Entries with cookies above `after`, in cookie order; entries of one cookie are never split, so there may be a few more than `limit`.
    pub fn entries(&self, directory: InodeId, after: u64, limit: usize) -> Result<Vec<(u64, Name, Entry)>, StoreError> { unimplemented!() }
    pub fn xattr(&self, inode: InodeId, name: &[u8]) -> Result<Option<Vec<u8>>, StoreError> { unimplemented!() }
    pub fn xattrs(&self, inode: InodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>, StoreError> { unimplemented!() }
    pub fn contents(&self, inode: InodeId) -> Result<Contents, StoreError> { unimplemented!() }
    pub fn contents_range(&self, inode: InodeId, blocks: Range<u64>) -> Result<Contents, StoreError> { unimplemented!() }
    /// Reads at most `into.len()` bytes, up to the file's end; returns how many.
    pub fn read(&self, inode: InodeId, offset: u64, into: &mut [u8]) -> Result<usize, StoreError> { unimplemented!() }
    pub fn orphans(&self) -> Result<Vec<InodeId>, StoreError> { unimplemented!() }
    /// Whether anything is applied that is not committed.
    pub fn is_dirty(&self) -> bool { unimplemented!() }
    /// Bytes of metadata that wait for a commit.
    pub fn uncommitted_bytes(&self) -> usize { unimplemented!() }
    /// `None`: nothing to commit, or a job is under way.
    pub fn begin_commit(&mut self) -> Option<CommitJob> { unimplemented!() }
    pub fn finish_commit(&mut self, done: CommitDone) -> Result<Committed, StoreError> { unimplemented!() }
    /// begin, run, finish.
    pub fn commit(&mut self) -> Result<Committed, StoreError> { unimplemented!() }
    pub fn release(&mut self, session: SessionId, upto: LogPosition) { unimplemented!() }
    pub fn release_all(&mut self, session: SessionId) { unimplemented!() }
    pub fn space(&self) -> Space { unimplemented!() }
    pub fn add_segment(&mut self, segment: SegmentInfo) -> Result<(), StoreError> { unimplemented!() }
    /// Moves all blocks out of the segment and allocates none there any more; returns the inodes whose extents moved.
    pub fn retire_segment(&mut self, number: u32) -> Result<Vec<InodeId>, StoreError> { unimplemented!() }
    /// After a commit: forgets a retired segment, whose file may then be removed.
    pub fn remove_segment(&mut self, number: u32) -> Result<(), StoreError> { unimplemented!() }
    /// A check of the last committed state.
    pub fn checker(&mut self) -> Result<Checker, StoreError> { unimplemented!() }
    pub fn check(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<Report, StoreError> { unimplemented!() }
    /// Repairs what can be repaired; nothing else may use the store.
    pub fn repair(&mut self, report: &Report) -> Result<(), StoreError> { unimplemented!() }
}
