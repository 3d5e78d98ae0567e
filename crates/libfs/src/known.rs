//! The fast path for calls that name a path which was followed before.
//!
//! Most calls that name a path take it: stat, access and open. As for open files ([`crate::warm`]), it makes the same
//! checks as the slow path ([`LibFs::walk`] and the operations behind it). It checks one inode and copies no
//! attributes. If any check fails, nothing has happened, and the caller takes the slow path.

use ashlar_types::{Access, Errno, FileKind, Inode, InodeId};
use ashlar_wire::OperationKind;

use crate::LibFs;
use crate::api::Outcome;
use crate::node::NodeState;
use crate::path::{Aim, Last, Surroundings};
use crate::warm::OpenInode;

impl LibFs {
    /// Calls `look` with the attributes of the inode that a path leads to; returns its result.
    ///
    /// `None` if that takes the slow path.
    #[inline]
    pub fn look_at_known<R>(
        &self,
        around: &impl Surroundings,
        (from, path): (InodeId, &[u8]),
        last: Last,
        look: impl FnOnce(InodeId, &Inode) -> R,
    ) -> Option<R> {
        let trial = self.try_measured(OperationKind::Name);
        let id = self.known_end(around, from, path)?;
        let found = self.nodes.look(id, |state| {
            let inode = self.at_hand(state).and_then(|state| state.inode.as_ref())?;
            let leads_on = inode.kind == FileKind::Symlink && last == Last::Follow;
            (!leads_on).then(|| look(id, inode))
        })?;
        trial.done(self);
        Some(found)
    }

    /// Checks that the user of `around` has an access to the inode that a path leads to.
    ///
    /// `None` if that takes the slow path.
    #[must_use]
    pub fn access_known(
        &self,
        around: &impl Surroundings,
        (from, path): (InodeId, &[u8]),
        last: Last,
        access: Access,
    ) -> Option<Outcome<()>> {
        let trial = self.try_measured(OperationKind::Name);
        let id = self.known_end(around, from, path)?;
        let allows = self.nodes.look(id, |state| {
            let state = self.at_hand(state).filter(|state| state.xattrs.is_some())?;
            let leads_on = state.inode.as_ref()?.kind == FileKind::Symlink && last == Last::Follow;
            (!leads_on).then(|| self.allows(state, around.who(), access))
        })?;
        trial.done(self);
        Some(if allows { Ok(()) } else { Err(Errno::EACCES) })
    }

    /// Opens the regular file or the directory that a path leads to.
    ///
    /// The user of `around` must have the access, and the front end must `admit` the inode. `None` if that takes the
    /// slow path; then nothing is open.
    #[must_use]
    pub fn open_known(
        &self,
        around: &impl Surroundings,
        (from, path): (InodeId, &[u8]),
        aim: Aim,
        access: Access,
        admits: impl FnOnce(InodeId, &Inode) -> bool,
    ) -> Option<(OpenInode, FileKind)> {
        let trial = self.try_measured(OperationKind::Name);
        let id = self.known_end(around, from, path)?;
        let node = self.nodes.existing(id)?;
        let state = node.read();
        self.note_open_of(id, &state).ok()?;
        // As on the slow path, the handle is recorded before the lease is checked.
        let kind = self.at_hand(&state).and_then(|state| {
            let inode = state.inode.as_ref()?;
            let is_served = match inode.kind {
                FileKind::Regular => true,
                FileKind::Directory => access.0 & Access::WRITE.0 == 0,
                _ => false,
            };
            let is_good = is_served
                && inode.links > 0
                && admits(id, inode)
                && self.lacks(state, &aim.claim(id).with_xattrs()).is_none()
                && self.allows(state, around.who(), access);
            is_good.then_some(inode.kind)
        });
        let Some(kind) = kind else {
            // The slow path finds the error, or does the rest.
            self.note_closed(id);
            return None;
        };
        drop(state);
        trial.done(self);
        Some((self.open_node(id, node), kind))
    }

    /// Returns the inode that a path leads to, if the path was followed before and still leads there.
    fn known_end(&self, around: &impl Surroundings, from: InodeId, path: &[u8]) -> Option<InodeId> {
        self.check_alive().ok()?;
        Some(around.paths().end(self, around.submount_version(), from, path)?.id)
    }

    /// Returns a node's state, if a lease covers it now.
    #[inline]
    pub(crate) fn at_hand<'a>(&self, state: &'a NodeState) -> Option<&'a NodeState> {
        if state.gone || state.inode.is_none() || !self.holds(state, false) {
            return None;
        }
        state.note_seen();
        Some(state)
    }
}
