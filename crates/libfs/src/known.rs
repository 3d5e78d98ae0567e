//! Looking at and opening what paths lead to that were followed before: the way of most calls that name a path.
//!
//! As for open files ([`crate::warm`]): the same is looked at as in general ([`LibFs::walk`] and what follows it), of one inode and without copies of its
//! attributes, and wherever something does not come out at once nothing has happened, and the caller takes the general way.

use ashlar_types::{Access, Errno, FileKind, Inode, InodeId};
use ashlar_wire::OperationKind;

use crate::LibFs;
use crate::api::Outcome;
use crate::node::NodeState;
use crate::path::{Aim, Last, Surroundings};
use crate::stat::stat_of;
use crate::warm::OpenInode;

impl LibFs {
    /// As `stat` tells it, what a path leads to, on a mount whose files show `device`, if it is at hand. `None` where it takes more.
    #[must_use]
    pub fn stat_known(
        &self,
        around: &impl Surroundings,
        (from, path): (InodeId, &[u8]),
        last: Last,
        device: u64,
    ) -> Option<libc::stat> {
        let trial = self.try_measured(OperationKind::Name);
        let id = self.known_end(around, from, path)?;
        let stat = self.nodes.look(id, |state| {
            let inode = self.at_hand(state).and_then(|state| state.inode.as_ref())?;
            let leads_on = inode.kind == FileKind::Symlink && last == Last::Follow;
            (!leads_on).then(|| stat_of(id, inode, device))
        })?;
        trial.done(self);
        Some(stat)
    }

    /// Whether the user of the surroundings has an access to what a path leads to, if that is at hand. `None` where it takes more.
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

    /// Opens the regular file that a path leads to for an aim, if all that takes is at hand, the user of the surroundings has the access, and the front end
    /// `admits` it. `None` where it takes more, and then nothing is open.
    #[must_use]
    pub fn open_known(
        &self,
        around: &impl Surroundings,
        (from, path): (InodeId, &[u8]),
        aim: Aim,
        access: Access,
        admits: impl FnOnce(InodeId, &Inode) -> bool,
    ) -> Option<OpenInode> {
        let trial = self.try_measured(OperationKind::Name);
        let id = self.known_end(around, from, path)?;
        let node = self.nodes.existing(id)?;
        let state = node.read();
        self.note_open_of(id, &state).ok()?;
        // As in general: the handle stands in the table before the lease is looked at.
        let is_good = self.at_hand(&state).is_some_and(|state| {
            let is_regular = |inode: &Inode| inode.kind == FileKind::Regular && inode.links > 0 && admits(id, inode);
            let claim = aim.claim(id).with_xattrs();
            self.lacks(state, &claim).is_none()
                && state.inode.as_ref().is_some_and(is_regular)
                && self.allows(state, around.who(), access)
        });
        if !is_good {
            // The general way finds out what is wrong, or does what is left.
            self.note_closed(id);
            return None;
        }
        drop(state);
        trial.done(self);
        Some(self.open_node(id, node))
    }

    /// What a path leads to, if it was followed before and that still holds.
    fn known_end(&self, around: &impl Surroundings, from: InodeId, path: &[u8]) -> Option<InodeId> {
        self.check_alive().ok()?;
        Some(around.paths().end(self, around.era(), from, path)?.id)
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
