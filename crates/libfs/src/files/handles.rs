//! Open handles: recording them in the control page, and freeing nameless inodes.

use ashlar_types::{Access, Credentials, Errno, InodeId};
use ashlar_update::Update;
use ashlar_wire::{HandleSlot, OperationKind};

use crate::LibFs;
use crate::api::{FoundInode, Outcome};
use crate::cache::node::{HandleHint, NodeState};
use crate::files::open_file::OpenInode;
use crate::leases::claim::Claim;
use crate::leases::grants::Stop;

impl LibFs {
    /// Records a handle: the inode lives until its last handle is closed, even if its last name is removed.
    ///
    /// # Errors
    /// `ESTALE` if it is gone; `ENFILE` if too many are open.
    pub fn open(&self, id: InodeId) -> Outcome<FoundInode> {
        self.open_if(id, &|| self.find_inode(id))
    }

    /// As [`LibFs::open`], if `user` has the access.
    ///
    /// # Errors
    /// As [`LibFs::open`]; `EACCES`.
    pub fn open_for(&self, user: &Credentials, id: InodeId, access: Access) -> Outcome<FoundInode> {
        if user.checked {
            return self.open(id);
        }
        self.open_if(id, &|| {
            let guard = self.view_node(Claim::read(id).with_xattrs())?;
            if !self.allows_access(&guard, user, access) {
                return Err(Errno::EACCES);
            }
            Ok(FoundInode { id, inode: guard.inode.clone().ok_or(Errno::ESTALE)? })
        })
    }

    /// As [`LibFs::open`], for a file that was opened with this access outside the session.
    ///
    /// Its rights are those that `user` has now.
    ///
    /// # Errors
    /// As [`LibFs::open`]; `EACCES` if another session has narrowed the rights, so that SharedFS would take writes for
    /// forged.
    pub fn open_adopted(&self, user: &Credentials, id: InodeId, access: Access) -> Outcome<FoundInode> {
        if user.is_privileged() {
            return self.open(id);
        }
        self.open_if(id, &|| {
            let guard = self.view_node(Claim::read(id).with_xattrs())?;
            if !self.held_access(&guard, user).contains(access) {
                return Err(Errno::EACCES);
            }
            Ok(FoundInode { id, inode: guard.inode.clone().ok_or(Errno::ESTALE)? })
        })
    }

    fn open_if(&self, id: InodeId, read: &dyn Fn() -> Outcome<FoundInode>) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        while let Err(stop) = self.record_open(id) {
            self.recover_from(stop)?;
        }
        // The handle is recorded before the inode is read. SharedFS first revokes the lease that this read needs, then
        // reads the handles. It frees no inode with a handle.
        let mut found = read();
        if found.as_ref().err() == Some(&Errno::ESTALE) && self.is_released(id) {
            found = self.make_room().and_then(|()| read());
        }
        if found.as_ref().is_ok_and(|found| found.inode.links == 0) {
            // SharedFS may free a nameless inode under the inode's own lease. This session may still know it by the
            // lease of its former directory. Only SharedFS knows, and its earlier answers don't count.
            self.nodes.begin_eviction();
            self.nodes.write(id).lease = None;
            found = read();
        }
        if found.is_err() {
            self.record_closed(id);
        }
        found
    }

    /// Removes a handle. Closing the last handle of a nameless inode frees the inode.
    pub fn close(&self, id: InodeId) {
        if self.record_closed(id) {
            let is_freed = self.nodes.read_existing(id).is_some_and(|state| self.is_freed(&state));
            self.finish_close(id, is_freed);
        }
    }

    /// As [`LibFs::close`], for an inode that is open by its node.
    pub fn close_open(&self, open: OpenInode) {
        let id = open.id();
        let Some(state) = open.state(self) else { return self.close(id) };
        let (is_last, is_freed) = (self.record_closed_of(id, &state), self.is_freed(&state));
        drop(state);
        // The node must not outlive an inode that is freed.
        drop(open);
        if is_last {
            self.finish_close(id, is_freed);
        }
    }

    /// Returns whether this session frees an inode at its last close.
    ///
    /// If another session removed the last name, SharedFS finds the inode among its orphans.
    fn is_freed(&self, state: &NodeState) -> bool {
        !state.is_gone && state.is_orphan() && self.holds_lease(state, true)
    }

    /// Returns whether this session has freed an inode, as far as it knows.
    ///
    /// Another session may still have the inode open. SharedFS answers so once the removal is committed and forgotten
    /// here ([`LibFs::make_room`]).
    pub(crate) fn is_released(&self, id: InodeId) -> bool {
        self.nodes.read_existing(id).is_some_and(|state| state.is_gone)
    }

    /// Ends the last close of an inode: frees it if `is_freed`.
    fn finish_close(&self, id: InodeId, is_freed: bool) {
        if !is_freed {
            return;
        }
        let _using = self.enter_operation();
        let freed = self.change_nodes_holding(&[Claim::write(id)], false, |locked| {
            if locked.inode(id)?.links == 0 && !self.control.has_open(id) {
                locked.log_update(&Update::Release { inode: id }).map(drop)
            } else {
                Ok(())
            }
        });
        if let Err(errno) = freed {
            tracing::debug!(inode = id.0, %errno, "an orphan is left to the daemon");
        }
    }

    /// Records a handle in the table. It has few slots at first: most sessions need no more.
    pub(crate) fn record_open(&self, id: InodeId) -> Result<(), Stop> {
        // The node is created here if there is none. A node that another thread created meanwhile would start with a
        // slot that is no longer the inode's.
        self.record_open_of(id, &self.nodes.node(id).read())
    }

    /// As [`LibFs::record_open`], for a new inode that no other thread knows; returns the slot for its future node.
    pub(crate) fn record_open_new(&self, id: InodeId) -> Result<HandleSlot, Stop> {
        self.record_open_in(id, None)
    }

    /// As [`LibFs::record_open`], for a node.
    pub(crate) fn record_open_of(&self, id: InodeId, state: &NodeState) -> Result<(), Stop> {
        self.record_open_in(id, Some(&state.handle)).map(drop)
    }

    fn record_open_in(&self, id: InodeId, known: Option<&HandleHint>) -> Result<HandleSlot, Stop> {
        let _one_writer = self.handles.lock();
        // Read first: another thread may just have made room in the table.
        let has_all = self.control.has_all_handle_slots();
        let last = known.map_or(HandleSlot::default(), HandleHint::slot);
        let Some(noted) = self.control.open_handle_at(id, last) else {
            return Err(if has_all { Errno::ENFILE.into() } else { Stop::Handles });
        };
        // Under the lock, before another thread can record a handle of the inode.
        known.into_iter().for_each(|known| known.set_slot(noted));
        Ok(noted)
    }

    /// As [`LibFs::record_closed`], for a node.
    fn record_closed_of(&self, id: InodeId, state: &NodeState) -> bool {
        let _one_writer = self.handles.lock();
        self.control.close_handle_at(id, state.handle.slot())
    }

    /// Removes a handle from the table; returns whether it was the inode's last one.
    pub(crate) fn record_closed(&self, id: InodeId) -> bool {
        let _one_writer = self.handles.lock();
        self.control.close_handle(id)
    }
}
