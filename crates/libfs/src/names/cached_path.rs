//! The fast path for calls that name a path which was followed before.
//!
//! Most calls that name a path take it: stat, access and open. As for open files ([`crate::files::open_file`]), it
//! makes the same checks as the slow path ([`LibFs::walk`] and the operations behind it). It checks one inode and
//! copies no attributes. If any check fails, nothing has happened, and the caller takes the slow path.

use ashlar_types::{Access, Errno, FileKind, Inode, InodeId};
use ashlar_wire::OperationKind;

use crate::LibFs;
use crate::api::Outcome;
use crate::cache::node::NodeState;
use crate::files::open_file::OpenInode;
use crate::names::path_walk::{FinalLink, PathContext, PathIntent};

impl LibFs {
    /// Calls `look` with the attributes of the inode that a path leads to; returns its result.
    ///
    /// `None` if that takes the slow path.
    #[inline]
    pub fn inspect_cached_path<R>(
        &self,
        context: &impl PathContext,
        (from, path): (InodeId, &[u8]),
        last: FinalLink,
        look: impl FnOnce(InodeId, &Inode) -> R,
    ) -> Option<R> {
        let trial = self.try_operation(OperationKind::Name);
        let id = self.cached_end(context, from, path)?;
        let found = self.nodes.inspect_node(id, |state| {
            let inode = self.covered_state(state).and_then(|state| state.inode.as_ref())?;
            let leads_on = inode.kind == FileKind::Symlink && last == FinalLink::Follow;
            (!leads_on).then(|| look(id, inode))
        })?;
        trial.count_done(self);
        Some(found)
    }

    /// Checks that the user of `context` has an access to the inode that a path leads to.
    ///
    /// `None` if that takes the slow path.
    #[must_use]
    pub fn check_cached_access(
        &self,
        context: &impl PathContext,
        (from, path): (InodeId, &[u8]),
        last: FinalLink,
        access: Access,
    ) -> Option<Outcome<()>> {
        let trial = self.try_operation(OperationKind::Name);
        let id = self.cached_end(context, from, path)?;
        let allows = self.nodes.inspect_node(id, |state| {
            let state = self.covered_state(state).filter(|state| state.xattrs.is_some())?;
            let leads_on = state.inode.as_ref()?.kind == FileKind::Symlink && last == FinalLink::Follow;
            (!leads_on).then(|| self.allows_access(state, context.user(), access))
        })?;
        trial.count_done(self);
        Some(if allows { Ok(()) } else { Err(Errno::EACCES) })
    }

    /// Opens the regular file or the directory that a path leads to.
    ///
    /// The user of `context` must have the access, and the front end must `admit` the inode. `None` if that takes the
    /// slow path; then nothing is open.
    #[must_use]
    pub fn open_cached_path(
        &self,
        context: &impl PathContext,
        (from, path): (InodeId, &[u8]),
        intent: PathIntent,
        access: Access,
        admits: impl FnOnce(InodeId, &Inode) -> bool,
    ) -> Option<(OpenInode, FileKind)> {
        let trial = self.try_operation(OperationKind::Name);
        let id = self.cached_end(context, from, path)?;
        let node = self.nodes.existing(id)?;
        let state = node.read();
        self.record_open_of(id, &state).ok()?;
        // As on the slow path, the handle is recorded before the lease is checked.
        let kind = self.covered_state(&state).and_then(|state| {
            let inode = state.inode.as_ref()?;
            let is_served = match inode.kind {
                FileKind::Regular => true,
                FileKind::Directory => access.0 & Access::WRITE.0 == 0,
                _ => false,
            };
            let is_good = is_served
                && inode.links > 0
                && admits(id, inode)
                && self.find_missing(state, &intent.claim(id).with_xattrs()).is_none()
                && self.allows_access(state, context.user(), access);
            is_good.then_some(inode.kind)
        });
        let Some(kind) = kind else {
            // The slow path finds the error, or does the rest.
            self.record_closed(id);
            return None;
        };
        drop(state);
        trial.count_done(self);
        Some((self.open_node(id, node), kind))
    }

    /// Returns the inode that a path leads to, if the path was followed before and still leads there.
    fn cached_end(&self, context: &impl PathContext, from: InodeId, path: &[u8]) -> Option<InodeId> {
        self.check_alive().ok()?;
        Some(context.paths().find_end(self, context.submount_version(), from, path)?.id)
    }

    /// Returns a node's state, if a lease covers it now.
    #[inline]
    pub(crate) fn covered_state<'a>(&self, state: &'a NodeState) -> Option<&'a NodeState> {
        if state.is_gone || state.inode.is_none() || !self.holds_lease(state, false) {
            return None;
        }
        Some(state)
    }
}
