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
    /// What `look` finds in the attributes of what a path leads to, if they are at hand. `None` where it takes more.
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

    /// Whether the user of the surroundings has an access to what a path leads to, if that is at hand. `None` where it
    /// takes more.
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

    /// Opens the regular file or the directory that a path leads to for an aim, if all that takes is at hand, the user
    /// of the surroundings has the access, and the front end `admits` it. `None` where it takes more, and then nothing
    /// is open.
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
        // As in general: the handle stands in the table before the lease is looked at.
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
            // The general way finds out what is wrong, or does what is left.
            self.note_closed(id);
            return None;
        };
        drop(state);
        trial.done(self);
        Some((self.open_node(id, node), kind))
    }

    /// What a path leads to, if it was followed before and that still holds.
    fn known_end(&self, around: &impl Surroundings, from: InodeId, path: &[u8]) -> Option<InodeId> {
        self.check_alive().ok()?;
        Some(around.paths().end(self, around.submount_version(), from, path)?.id)
    }

    /// A node's state, if it can be looked at as it is.
    #[inline]
    pub(crate) fn at_hand<'a>(&self, state: &'a NodeState) -> Option<&'a NodeState> {
        if state.gone || state.inode.is_none() || !self.holds(state, false) {
            return None;
        }
        state.note_seen();
        Some(state)
    }
}
