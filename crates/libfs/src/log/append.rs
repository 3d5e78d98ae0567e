//! Appending records to the update log, applying them to nodes, and log space.

use std::sync::atomic::Ordering;

use ashlar_log::AppendError;
use ashlar_types::{BLOCK_BYTES, Errno, Inode, InodeId, LogPosition, Name, SessionId, blocks_for};
use ashlar_update::{Allocation, Applied, Entry, Invalid, Tree, Update, apply};
use ashlar_wire::{Credit, CreditKind, Reply, Request, TakenCredit};
use rustix_futex_sync::MutexGuard;

use crate::LibFs;
use crate::api::Outcome;
use crate::cache::children::{CachedEntry, Children};
use crate::cache::file_map::{DataChange, FileMap};
use crate::cache::node::{NodeChange, NodeState, NodeWriteGuard};
use crate::leases::claim::Nodes;
use crate::leases::grants::{FoundNames, LockedNodes, Stop};
use crate::log::update_log::LOG_STEP_LEAST;

/// The part of the log, as a divisor, that may fill with committed records before they are forgotten.
const TIDY_PART: u64 = 8;
/// The part of the log, as a divisor, whose space a session that needs room waits for. It continues while SharedFS
/// digests the rest.
const ROOM_PART: u64 = 4;
/// The most bytes of a log that are made ready at once: the kernel clears the pages, about a millisecond.
const LOG_STEP_BYTES: u64 = 4 << 20;

impl LockedNodes<'_> {
    /// Logs an update and applies it to the locked nodes.
    ///
    /// The caller has made all checks. From here on the operation fails only for lack of room, credit or leases, and
    /// then nothing has happened.
    pub(crate) fn log_update(&mut self, update: &Update<'_>) -> Result<Applied, Stop> {
        let fs = self.fs;
        let Some(leases) = &self.leases else {
            // The operation finds no error of its own. The kernel checks it, if there is one.
            return Err(Stop::Errno(if fs.client.yields_to_kernel() { Errno::RESERVED } else { Errno::EPERM }));
        };
        let version = leases.quota_version();
        let wants = if version.has_limits() { self.quota_wants(update)? } else { Vec::new() };
        if !fs.quota_balances.pay(version, &wants) {
            return Err(Stop::Quota(wants));
        }
        let credit = Credit::from(update.cost());
        let taken = self.take_credit(credit, update).inspect_err(|_| fs.quota_balances.give_back(version, &wants))?;
        let encoded = update.encode();
        let (appended, _held) = match leases.append_held(update.kind() as u8, &encoded.parts()) {
            Ok(appended) => appended,
            Err(error) => {
                fs.control.give_back(&taken);
                fs.quota_balances.give_back(version, &wants);
                return Err(match error {
                    AppendError::Sealed => Stop::Sealed,
                    AppendError::Full { needed } => Stop::Full { needed },
                    AppendError::Unready { upto } => Stop::Unready { upto },
                    AppendError::Limited { upto } => Stop::Limited { upto },
                    AppendError::TooLong => Stop::Errno(Errno::EFBIG),
                    _ => Stop::Errno(Errno::EIO),
                });
            }
        };
        let mut tree = LockedTree {
            fs,
            nodes: &mut self.nodes,
            to_show: &mut self.to_show,
            found_names: &mut self.found_names,
            position: appended.position,
            data: appended.body.plus(encoded.data_offset()),
        };
        let applied = apply(&mut tree, update);
        self.list_dirty_nodes();
        applied.map_err(|errno| {
            // The record does not fit the state against which it was checked: a defect. The session must not go on from
            // a state that SharedFS will refuse.
            tracing::error!(?update, ?errno, "a logged update does not fit the session's state");
            fs.poisoned.store(true, Ordering::Release);
            Stop::Errno(Errno::EIO)
        })
    }

    /// Adds the nodes that have changes now to the dirty list.
    fn list_dirty_nodes(&mut self) {
        for (id, node) in &mut self.nodes {
            self.fs.list_if_dirty(*id, node);
        }
    }

    /// Takes credit for an update. The reserved credit is for updates that replace, when no other is left.
    fn take_credit(&self, want: Credit, update: &Update<'_>) -> Result<TakenCredit, Stop> {
        if let Some(taken) = self.fs.control.take_credit(want, CreditKind::Common) {
            return Ok(taken);
        }
        let replaces = self.is_replacing(update)?;
        let taken = if replaces { self.fs.control.take_credit(want, CreditKind::Kept) } else { None };
        taken.ok_or(Stop::Credit { want, replaces })
    }

    /// Returns whether an update, once committed, gives back as much as it takes.
    ///
    /// It does if it writes where data or a reservation takes up blocks already, or cuts some off.
    fn is_replacing(&self, update: &Update<'_>) -> Result<bool, Stop> {
        let is_taken = |inode: InodeId, offset: u64, length: u64| {
            let content = self.state(inode)?.content.as_ref().ok_or(Stop::Errno(Errno::EIO))?;
            Ok(content.blocks_missing(offset / BLOCK_BYTES..blocks_for(offset + length)) == 0)
        };
        match *update {
            Update::Write { inode, offset, data, .. } => {
                let (found, length) = (self.inode(inode)?, data.len() as u64);
                // The one block of a file as small as that may not exist yet: its content may be stored with the
                // metadata.
                let may_spill = found.blocks == 1 && found.size < BLOCK_BYTES.min(offset + length);
                Ok(!may_spill && is_taken(inode, offset, length)?)
            }
            Update::Resize { inode, size, .. } => Ok(size <= self.inode(inode)?.size),
            Update::Allocate { how: Allocation::Punch | Allocation::Collapse, .. } => Ok(true),
            Update::Allocate { how: Allocation::Insert, .. } => Ok(false),
            Update::Allocate { inode, offset, length, .. } => is_taken(inode, offset, length),
            _ => Ok(false),
        }
    }
}

impl LibFs {
    /// Adds a node to the dirty list, if it has changes and is not in it.
    #[inline]
    pub(crate) fn list_if_dirty(&self, id: InodeId, node: &mut NodeState) {
        if node.is_dirty_listed {
            return;
        }
        if let Some((first, _)) = node.changes.front() {
            node.is_dirty_listed = true;
            self.dirty_list.add_node(*first, id);
        }
    }

    /// Logs that later updates may depend on another session's.
    pub(crate) fn log_dependency(&self, session: SessionId, position: LogPosition) -> Outcome<()> {
        loop {
            self.check_alive()?;
            match self.log.append_dependency(session, position) {
                Ok(()) => return Ok(()),
                Err(AppendError::Sealed) => {}
                Err(AppendError::Full { needed }) => self.make_log_room(needed)?,
                Err(AppendError::Unready { upto }) => self.make_ready(upto)?,
                Err(AppendError::Limited { upto }) => self.raise_limit(upto, true)?,
                Err(_) => return Err(Errno::EIO),
            }
        }
    }

    /// Fails if the session is fenced or poisoned.
    pub(crate) fn check_alive(&self) -> Outcome<()> {
        if self.control.is_fenced() || self.poisoned.load(Ordering::Acquire) { Err(Errno::EIO) } else { Ok(()) }
    }

    /// Waits until SharedFS has digested the whole log, and forgets the committed changes.
    ///
    /// The caller has locked no node. A thread that tidies already is waited for, since it may have begun before this
    /// digest.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn make_room(&self) -> Outcome<()> {
        self.call(&Request::Digest)?;
        self.forget_committed(&self.tidying.lock());
        Ok(())
    }

    /// Waits until SharedFS has digested enough of the log for `needed` more bytes, and forgets those changes.
    ///
    /// It also makes some room for the records that follow. The caller has locked no node.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub(crate) fn make_log_room(&self, needed: u64) -> Outcome<()> {
        if needed == 0 {
            return self.make_room();
        }
        let capacity = self.log.capacity();
        let enough = self.log.tail().0.saturating_sub(capacity - capacity / ROOM_PART);
        let upto = LogPosition(self.tidied.load(Ordering::Acquire)).plus(needed).max(LogPosition(enough));
        // The records that are committed by now may be enough, once they are forgotten.
        if self.control.committed() < upto {
            self.call(&Request::MakeRoom { upto })?;
        }
        self.forget_committed(&self.tidying.lock());
        Ok(())
    }

    /// Makes the log ready up to a position and beyond: its file has room there, and its pages are mapped.
    ///
    /// Going beyond means that a session that keeps logging seldom waits here.
    ///
    /// # Errors
    /// `ENOSPC` if the arena's file system is full.
    pub(crate) fn make_ready(&self, upto: LogPosition) -> Outcome<()> {
        let before = self.log.ready();
        if upto <= before {
            return Ok(());
        }
        let step = (before.0 - self.log_began.0 + LOG_STEP_LEAST).min(LOG_STEP_BYTES);
        let mut ready = upto.max(before.plus(step));
        let (least, bytes) = (self.log.bytes_upto(upto), self.log.bytes_upto(ready));
        if bytes > self.log_room.load(Ordering::Relaxed) {
            let bytes = match self.call(&Request::LogSpace { bytes }) {
                Err(Errno::ENOSPC) if bytes > least => {
                    self.call(&Request::LogSpace { bytes: least })?;
                    ready = upto;
                    least
                }
                reply => reply.map(|_| bytes)?,
            };
            self.log_room.fetch_max(bytes, Ordering::Relaxed);
        }
        // A session that uses more than the beginning will use this part too.
        self.log.memory().set_read_ahead(true);
        for part in self.log.parts(before, ready) {
            self.log.memory().prepare(part.start, part.end - part.start);
        }
        // After one round, all of the log is ready.
        let is_all = ready.0 - self.log_began.0 >= self.log.capacity();
        self.log.record_ready(if is_all { LogPosition(u64::MAX) } else { ready });
        Ok(())
    }

    /// Waits until SharedFS lets appends go up to a position. The caller has locked no node.
    ///
    /// `reads` says that a read needs that, and no change.
    ///
    /// It waits for the replica if the journal is full.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub(crate) fn raise_limit(&self, upto: LogPosition, reads: bool) -> Outcome<()> {
        self.call(&Request::LogLimit { upto, reads }).map(drop)
    }

    /// Requests credit for an update.
    pub(crate) fn request_credit(&self, want: Credit, replaces: bool) -> Outcome<()> {
        match self.call(&Request::Credit { want, replaces })? {
            Reply::Credit(_) => {
                self.means_granted.fetch_add(1, Ordering::Release);
                Ok(())
            }
            _ => Err(Errno::EIO),
        }
    }

    /// Forgets committed changes, if there are enough of them and no other thread does it already.
    pub(crate) fn forget_committed_if_due(&self) {
        let waiting = self.control.committed().0.saturating_sub(self.tidied.load(Ordering::Relaxed));
        if waiting > self.log.capacity() / TIDY_PART {
            self.tidying.try_lock().inspect(|turn| self.forget_committed(turn));
        }
    }

    /// Forgets changes that SharedFS has committed: the log may overwrite them, and SharedFS may reuse freed blocks.
    pub(crate) fn forget_committed(&self, _turn: &MutexGuard<'_, ()>) {
        let bound = self.log.end_before_held(self.control.committed());
        // The bound is raised before anything is forgotten: no state without these changes is installed from now on.
        self.tidied.fetch_max(bound.0, Ordering::AcqRel);
        let (mut finished, mut again) = (Vec::new(), Vec::new());
        for id in self.dirty_list.take_nodes(bound) {
            if let Some(mut state) = self.nodes.write_existing(id) {
                state.prune_changes(bound);
                match state.changes.front().map(|(position, _)| *position) {
                    Some(first) => again.push((first, id)),
                    None => state.is_dirty_listed = false,
                }
                if state.is_gone && state.is_clean() {
                    finished.push(id);
                }
            }
        }
        self.dirty_list.add_nodes_again(&again);
        if !finished.is_empty() {
            self.nodes.begin_eviction();
            finished.into_iter().for_each(|id| self.nodes.remove(id));
        }
        self.log.release(bound);
        self.control.set_released(bound);
        self.segments.keep_current(self.control.segment_version());
        self.nodes.keep_bounded();
    }
}

/// The nodes that an operation has locked, as the transition function sees them.
struct LockedTree<'a> {
    fs: &'a LibFs,
    nodes: &'a mut Nodes,
    to_show: &'a mut Option<InodeId>,
    found_names: &'a mut FoundNames,
    position: LogPosition,
    /// Where the update's data lie in the log.
    data: LogPosition,
}

/// Why an update does not fit the nodes: each of these is a defect of LibFS.
#[derive(Debug)]
#[allow(dead_code, reason = "only the log line reads the fields")]
enum Misfit {
    Invalid(Invalid),
    NotLocked(InodeId),
    NotLoaded(InodeId),
}

impl From<Invalid> for Misfit {
    fn from(invalid: Invalid) -> Self {
        Self::Invalid(invalid)
    }
}

impl LockedTree<'_> {
    fn locked_node(&mut self, id: InodeId) -> Result<&mut NodeWriteGuard, Misfit> {
        self.nodes.iter_mut().find(|(found, _)| *found == id).map(|(_, guard)| guard).ok_or(Misfit::NotLocked(id))
    }

    fn change_data(&mut self, id: InodeId, change: DataChange) -> Result<u64, Misfit> {
        let position = self.position;
        let guard = self.locked_node(id)?;
        let blocks = guard.content.as_mut().ok_or(Misfit::NotLoaded(id))?.apply(&change);
        guard.note_change(position, NodeChange::Data(change));
        if guard.is_followed {
            *self.to_show = Some(id);
        }
        Ok(blocks)
    }

    fn change_entry(&mut self, parent: InodeId, name: &[u8], entry: Option<Entry>) -> Result<(), Misfit> {
        let cookie = match self.found_names.iter_mut().find(|known| known.is_for(parent, name)) {
            Some(known) => {
                known.entry = entry;
                known.cookie
            }
            None => self.fs.cookie(name),
        };
        let (fs, position) = (self.fs, self.position);
        let guard = self.locked_node(parent)?;
        // A removed name is in memory already.
        let gone = if entry.is_none() { guard.children.remove_name(cookie, name) } else { None };
        let (name, changes_paths) = match gone {
            Some(name) => (name, true),
            None => {
                let name = Name::new(name).map_err(|_| Misfit::Invalid(Invalid::BadName))?;
                (name.clone(), guard.children.set_entry(cookie, name, entry))
            }
        };
        if changes_paths {
            fs.directory_versions.raise_version(parent);
        }
        guard.note_change(position, NodeChange::Entry(name, entry));
        Ok(())
    }
}

/// Returns whether a path through a directory may lead elsewhere after this change of its attributes.
fn changes_paths(old: &Inode, new: &Inode) -> bool {
    old.is_directory() && (old.mode, old.uid, old.gid, old.links == 0) != (new.mode, new.uid, new.gid, new.links == 0)
}

impl Tree for LockedTree<'_> {
    type Error = Misfit;

    fn inode(&self, id: InodeId) -> Result<Option<Inode>, Misfit> {
        let guard = self.nodes.iter().find(|(found, _)| *found == id).ok_or(Misfit::NotLocked(id))?;
        Ok(guard.1.inode.clone().filter(|_| !guard.1.is_gone))
    }

    fn put_inode(&mut self, id: InodeId, value: Inode) -> Result<(), Misfit> {
        let (fs, position) = (self.fs, self.position);
        let guard = self.locked_node(id)?;
        if guard.inode.as_ref().is_some_and(|old| changes_paths(old, &value)) {
            fs.directory_versions.raise_version(id);
        }
        if guard.inode.is_none() {
            // This update creates the inode, so all of its state is known.
            guard.children = Children::empty_directory();
            guard.content = Some(FileMap::default());
            guard.xattrs = Some(std::collections::BTreeMap::new());
        }
        guard.inode = Some(value);
        guard.note_change(position, NodeChange::Attributes);
        Ok(())
    }

    fn remove_inode(&mut self, id: InodeId) -> Result<(), Misfit> {
        let position = self.position;
        self.fs.directory_versions.raise_version(id);
        let guard = self.locked_node(id)?;
        guard.is_gone = true;
        guard.content = None;
        guard.xattrs = None;
        guard.children = Children::unknown();
        guard.note_change(position, NodeChange::Attributes);
        Ok(())
    }

    fn entry(&self, parent: InodeId, name: &[u8]) -> Result<Option<Entry>, Misfit> {
        if let Some(known) = self.found_names.iter().find(|known| known.is_for(parent, name)) {
            return Ok(known.entry);
        }
        let guard = self.nodes.iter().find(|(found, _)| *found == parent).ok_or(Misfit::NotLocked(parent))?;
        match guard.1.children.find_cached(self.fs.cookie(name), name) {
            CachedEntry::Known(entry) => Ok(entry),
            CachedEntry::Unknown => Err(Misfit::NotLoaded(parent)),
        }
    }

    fn put_entry(&mut self, parent: InodeId, name: &[u8], entry: Entry) -> Result<(), Misfit> {
        self.change_entry(parent, name, Some(entry))
    }

    fn remove_entry(&mut self, parent: InodeId, name: &[u8]) -> Result<(), Misfit> {
        self.change_entry(parent, name, None)
    }

    fn set_orphan(&mut self, _inode: InodeId, _orphan: bool) -> Result<(), Misfit> {
        // An inode with no links is an orphan already.
        Ok(())
    }

    fn may_free(&self, _inode: InodeId) -> bool {
        // Only SharedFS knows whether other sessions have it open; for this session it is gone.
        true
    }

    fn put_xattr(&mut self, id: InodeId, name: &[u8], value: &[u8]) -> Result<(), Misfit> {
        let position = self.position;
        self.fs.directory_versions.raise_version(id);
        let guard = self.locked_node(id)?;
        guard.xattrs.as_mut().ok_or(Misfit::NotLoaded(id))?.insert(name.to_vec(), value.to_vec());
        guard.note_change(position, NodeChange::Xattr(name.to_vec(), Some(value.to_vec())));
        Ok(())
    }

    fn remove_xattr(&mut self, id: InodeId, name: &[u8]) -> Result<(), Misfit> {
        let position = self.position;
        self.fs.directory_versions.raise_version(id);
        let guard = self.locked_node(id)?;
        guard.xattrs.as_mut().ok_or(Misfit::NotLoaded(id))?.remove(name);
        guard.note_change(position, NodeChange::Xattr(name.to_vec(), None));
        Ok(())
    }

    fn write(&mut self, id: InodeId, _: &Inode, offset: u64, data: &[u8], _size: u64) -> Result<u64, Misfit> {
        let (record, body) = (self.position, self.data);
        self.change_data(id, DataChange::Write { offset, length: data.len() as u64, record, body })
    }

    fn resize(&mut self, id: InodeId, _: &Inode, size: u64) -> Result<u64, Misfit> {
        self.change_data(id, DataChange::Resize { size })
    }

    fn allocate(
        &mut self,
        id: InodeId,
        _: &Inode,
        how: Allocation,
        offset: u64,
        length: u64,
        size: u64,
    ) -> Result<u64, Misfit> {
        self.change_data(id, DataChange::Allocate { how, offset, length, size })
    }
}
