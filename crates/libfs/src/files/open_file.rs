//! The fast path for reading and writing open files.
//!
//! Nearly every transfer of a program takes it. The slow path claims several inodes, waits for leases, room, credit and
//! quotas, and repeats; that costs more than copying a few bytes. The fast path makes the same checks for one inode, in
//! the same order. If one of them fails, nothing has happened, and the caller takes the slow path. An open file keeps
//! its inode's node, so that no lookup is needed.
//!
//! Records are appended as on the slow path (`log/update_log/leased_append.rs`). These rules hold as there
//! (`leases/grants.rs`, `log/append.rs`):
//! - The record is paid for before it is appended.
//! - A change is noted under the lock under which its record was appended, while the record is held.
//! - A copy counts only if lease and extent version held after it.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ashlar_types::{FileKind, InodeId};
use ashlar_update::{Update, XATTR_CAPABILITY, record_written, write_fields, written_size};
use ashlar_wire::{Credit, CreditKind, OperationKind};

use crate::LibFs;
use crate::api::{WriteAt, Written};
use crate::cache::file_map::DataChange;
use crate::cache::node::{CachedNode, NodeChange, NodeState};
use crate::files::file_io::is_access_time_due;
use crate::log::update_log::leased_append::SealRead;

/// Bytes to prefetch behind a sequential read, for the program's next read.
///
/// The program returns and calls again meanwhile. The processor itself fetches ahead of a copy only once the copy has
/// begun.
const AHEAD_BYTES: u64 = 2048;
/// The most bytes to prefetch, as a multiple of the bytes read.
const AHEAD_TIMES: u64 = 4;

/// An open file's reference to its inode.
///
/// Its owner has recorded a handle on the inode ([`LibFs::open`]) and not yet closed it.
#[derive(Debug)]
pub struct OpenInode {
    id: InodeId,
    /// The number of the node's table. The node means nothing in another session, such as one with another user's
    /// rights.
    table: u64,
    node: CachedNode,
    /// Where the last read ended: a read that begins there is sequential.
    read_to: AtomicU64,
}

impl OpenInode {
    /// Returns the inode's number.
    #[must_use]
    #[inline]
    pub fn id(&self) -> InodeId {
        self.id
    }

    /// Returns the node's state, if `fs` is the node's session.
    #[inline]
    pub(crate) fn state(&self, fs: &LibFs) -> Option<impl Deref<Target = NodeState>> {
        (self.table == fs.nodes.number()).then(|| self.node.read())
    }
}

impl LibFs {
    /// Returns the reference to an inode that the caller has opened.
    #[must_use]
    pub fn open_inode(&self, id: InodeId) -> OpenInode {
        self.open_node(id, self.nodes.node(id))
    }

    pub(crate) fn open_node(&self, id: InodeId, node: CachedNode) -> OpenInode {
        OpenInode { id, table: self.nodes.number(), node, read_to: AtomicU64::new(0) }
    }

    /// Reads up to `most` bytes, if that takes nothing but a copy.
    ///
    /// `buffer` gives room for as many bytes as there are, if it can. `None` if the read takes more; the caller then
    /// calls [`LibFs::read`].
    #[inline]
    pub fn read_open<'b>(
        &self,
        open: &OpenInode,
        offset: u64,
        most: usize,
        buffer: impl FnOnce(usize) -> Option<&'b mut [u8]>,
    ) -> Option<usize> {
        self.check_alive().ok()?;
        let trial = self.try_operation(OperationKind::Read);
        let state = open.state(self)?;
        if state.is_gone || !self.holds_lease(&state, false) {
            return None;
        }
        let inode = state.inode.as_ref().filter(|inode| inode.kind == FileKind::Regular)?;
        let content = state.content_at(self.control.extent_version())?;
        let length = inode.size.saturating_sub(offset).min(most as u64) as usize;
        if length > 0 {
            let reads_on = open.read_to.load(Ordering::Relaxed) == offset;
            let ahead = if reads_on { AHEAD_BYTES.min(AHEAD_TIMES * length as u64) } else { 0 };
            open.read_to.store(offset + length as u64, Ordering::Relaxed);
            self.copy_out(content, offset, buffer(length)?, ahead).ok()?;
        }
        fence(Ordering::Acquire);
        let is_good = self.holds_lease(&state, false) && content.is_current(self.control.extent_version());
        if !is_good || length > 0 && is_access_time_due(inode) {
            return None;
        }
        drop(state);
        trial.count_done(self);
        Some(length)
    }

    /// Writes `data`, if that takes nothing but a record, and the file does not grow beyond `limit`.
    ///
    /// `None` if the write takes more, and then nothing has happened; the caller then calls [`LibFs::write`].
    #[inline]
    pub fn write_open(&self, open: &OpenInode, at: WriteAt, data: &[u8], strip: bool, limit: u64) -> Option<Written> {
        self.check_alive().ok()?;
        if data.is_empty() || data.len() > self.record_data_max() {
            return None;
        }
        self.forget_committed_if_due();
        let trial = self.try_operation(OperationKind::Write);
        let seal = SealRead::read(self);
        let mut guard = open.node.write();
        let state = &mut *guard;
        if open.table != self.nodes.number() || state.is_gone {
            return None;
        }
        let leases = seal.check_write(state)?;
        // Writes to a followed file must show in mappings, which takes a request.
        let NodeState { inode: Some(inode), content: Some(content), xattrs: Some(xattrs), is_followed: false, .. } =
            state
        else {
            return None;
        };
        let is_held = inode.links > 0 || self.control.has_open(open.id);
        let is_plain = inode.kind == FileKind::Regular && !xattrs.contains_key(XATTR_CAPABILITY);
        if !is_held
            || !is_plain
            || !content.is_current(self.control.extent_version())
            || leases.quota_version().has_limits()
        {
            return None;
        }
        let offset = match at {
            WriteAt::Offset(offset) => offset,
            WriteAt::End => inode.size,
        };
        let length = data.len() as u64;
        let size = written_size(inode, offset, length).filter(|_| offset + length <= limit)?;
        let at = Self::now();
        let update = Update::Write { inode: open.id, offset, at, strip, data };
        let taken = self.control.take_credit(Credit::from(update.cost()), CreditKind::Common)?;
        let fields = write_fields(open.id, offset, at, strip);
        let Ok((appended, _held)) = leases.append_held(update.kind() as u8, &[&fields, data]) else {
            self.control.give_back(&taken);
            return None;
        };
        let body = appended.body.plus(fields.len() as u64);
        // Each change is built at its destination. A value stored word by word and then copied in larger pieces would
        // stall the processor.
        let change = || DataChange::Write { offset, length, record: appended.position, body };
        let blocks = content.apply(&change());
        record_written(inode, size, blocks, at, strip);
        state.note_change(appended.position, NodeChange::Data(change()));
        self.list_if_dirty(open.id, state);
        drop(guard);
        trial.count_done(self);
        Some(Written { offset, bytes: data.len() })
    }
}
