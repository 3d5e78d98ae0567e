//! Reading and writing open files of which all is at hand: the way that nearly every transfer of a program takes.
//!
//! What an operation needs in general (claims of several inodes, waiting for leases, room, credit and quotas, repeating) costs more than
//! copying a few bytes. Here the same checks are made of one inode, in the same order, and wherever one of them does not come out at
//! once nothing has happened, and the caller takes the general way, which knows what to do. An open file keeps its inode's node,
//! so that it isn't looked up.
//!
//! What must hold here as there (`grants`, `record`): the log's seal count is read before the lease word; the record is paid for
//! before it is appended; a change is noted under the lock under which its record was appended, while the record is held; a copy
//! counts only if lease and era held after it.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use ashlar_types::{FileKind, InodeId};
use ashlar_update::{Update, XATTR_CAPABILITY, note_written, write_fields, written_size};
use ashlar_wire::{Credit, CreditKind, OperationKind};

use crate::LibFs;
use crate::api::{WriteAt, Written};
use crate::content::DataChange;
use crate::data::is_access_time_due;
use crate::node::{Change, Node, NodeState};

/// Who reads on finds so many of the bytes that follow in the processor's cache, or on their way there: the program returns and calls again meanwhile. The
/// processor itself fetches ahead of a copy only once it has begun.
const AHEAD_BYTES: u64 = 2048;
/// No more of them than so many times what was read.
const AHEAD_TIMES: u64 = 4;

/// What an open file keeps of its inode. Whoever has one has noted a handle on the inode ([`LibFs::open`]), and not yet closed it.
#[derive(Debug)]
pub struct OpenInode {
    id: InodeId,
    /// The table that the node is of. In another session, such as one with another user's rights, it means nothing.
    table: u64,
    node: Node,
    /// Where the last read ended: one that begins there reads on.
    read_to: AtomicU64,
}

impl OpenInode {
    /// The inode.
    #[must_use]
    #[inline]
    pub fn id(&self) -> InodeId {
        self.id
    }

    /// What a session knows of it, if it is the session that it is of.
    #[inline]
    pub(crate) fn state(&self, fs: &LibFs) -> Option<impl Deref<Target = NodeState>> {
        (self.table == fs.nodes.number()).then(|| self.node.read())
    }
}

impl LibFs {
    /// The way to an inode that the caller has opened.
    #[must_use]
    pub fn open_inode(&self, id: InodeId) -> OpenInode {
        self.open_node(id, self.nodes.node(id))
    }

    pub(crate) fn open_node(&self, id: InodeId, node: Node) -> OpenInode {
        OpenInode { id, table: self.nodes.number(), node, read_to: AtomicU64::new(0) }
    }

    /// Reads up to `most` bytes, if that needs nothing but a copy. `buffer` gives room for as many bytes as there are, if it
    /// can. `None` where it takes more: [`LibFs::read`] knows.
    #[inline]
    pub fn read_open<'b>(
        &self,
        open: &OpenInode,
        offset: u64,
        most: usize,
        buffer: impl FnOnce(usize) -> Option<&'b mut [u8]>,
    ) -> Option<usize> {
        self.check_alive().ok()?;
        let trial = self.try_measured(OperationKind::Read);
        let state = open.state(self)?;
        if state.gone || !self.holds(&state, false) {
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
        let is_good = self.holds(&state, false) && content.is_current(self.control.extent_version());
        if !is_good || length > 0 && is_access_time_due(inode) {
            return None;
        }
        drop(state);
        trial.done(self);
        Some(length)
    }

    /// Writes `data`, if all that it takes is a record, and the file does not grow beyond `limit`. `None` where it takes more, and then
    /// nothing has happened: [`LibFs::write`] knows.
    #[inline]
    pub fn write_open(&self, open: &OpenInode, at: WriteAt, data: &[u8], strip: bool, limit: u64) -> Option<Written> {
        self.check_alive().ok()?;
        if data.is_empty() || data.len() > self.record_data_max() {
            return None;
        }
        self.tidy_if_due();
        let trial = self.try_measured(OperationKind::Write);
        let seal = self.log.seal_count();
        let mut guard = open.node.write();
        let state = &mut *guard;
        if open.table != self.nodes.number() || state.gone || !self.holds(state, true) {
            return None;
        }
        // What is followed is shown, which takes a question.
        let NodeState { inode: Some(inode), content: Some(content), xattrs: Some(xattrs), is_followed: false, .. } =
            state
        else {
            return None;
        };
        let is_held = inode.links > 0 || self.control.has_open(open.id);
        let is_plain = inode.kind == FileKind::Regular && !xattrs.contains_key(XATTR_CAPABILITY);
        // The log's seal was looked at before: an era of quotas that begins from here on stops the record at the log.
        if !is_held
            || !is_plain
            || !content.is_current(self.control.extent_version())
            || self.control.quota_version().has_limits()
        {
            return None;
        }
        let offset = match at {
            WriteAt::Offset(offset) => offset,
            WriteAt::End => inode.size,
        };
        let length = data.len() as u64;
        let size = written_size(inode, offset, length).filter(|_| offset + length <= limit)?;
        let at = if state.is_unseen.load(Ordering::Relaxed) { Self::now_unseen(inode.changed) } else { Self::now() };
        let update = Update::Write { inode: open.id, offset, at, strip, data };
        let credit = Credit::from(update.cost());
        if !self.control.take_credit(credit, CreditKind::Common) {
            return None;
        }
        let fields = write_fields(open.id, offset, at, strip);
        let Ok((appended, _held)) = self.log.append_held(seal, update.kind() as u8, &[&fields, data]) else {
            self.control.give_credit(credit, CreditKind::Common);
            return None;
        };
        let body = appended.body.plus(fields.len() as u64);
        // Each is made where it goes: what was stored word by word just now would be waited for where it is copied by larger pieces.
        let change = || DataChange::Write { offset, length, record: appended.position, body };
        let blocks = content.apply(&change());
        note_written(inode, size, blocks, at, strip);
        state.note(appended.position, Change::Data(change()));
        *state.is_unseen.get_mut() = true;
        self.list_if_new(open.id, state);
        drop(guard);
        trial.done(self);
        Some(Written { offset, bytes: data.len() })
    }
}
