//! Claims: what an operation needs of inodes, and the nodes that it locks for them.

use ashlar_types::{Credentials, InodeId};
use ashlar_wire::LeaseRequest;
use smallvec::SmallVec;

use crate::cache::node::NodeWriteGuard;

/// The most claims of an operation. A rename claims two directories, the rename lease, the moved and the replaced
/// inode, and creates a whiteout.
pub(crate) const CLAIMS_MAX: usize = 6;

/// An operation's needs of one inode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) id: InodeId,
    pub(crate) write: bool,
    /// The operation writes it soon: if LibFS must send a request anyhow, it requests a lease to write.
    pub(crate) soon_written: bool,
    /// If a name is looked up in it and is absent, the operation creates the name next.
    pub(crate) makes: bool,
    pub(crate) contents: bool,
    pub(crate) entries: bool,
    pub(crate) xattrs: bool,
    pub(crate) subtree: bool,
}

impl Claim {
    /// Returns a claim to read attributes.
    pub(crate) fn read(id: InodeId) -> Self {
        Self {
            id,
            write: false,
            soon_written: false,
            makes: false,
            contents: false,
            entries: false,
            xattrs: false,
            subtree: false,
        }
    }

    /// Returns a claim to change attributes.
    pub(crate) fn write(id: InodeId) -> Self {
        Self { write: true, ..Self::read(id) }
    }

    /// Returns a claim to change an inode to which `user` needs a right. Its access list may give or take that.
    pub(crate) fn to_change(user: &Credentials, id: InodeId) -> Self {
        Self { xattrs: !user.is_privileged(), ..Self::write(id) }
    }

    /// Returns the claim of an operation that changes nothing.
    pub(crate) fn reading(self) -> Self {
        Self { write: false, soon_written: false, makes: false, subtree: false, ..self }
    }

    pub(crate) fn soon_written(self) -> Self {
        Self { soon_written: true, ..self }
    }

    pub(crate) fn with_contents(self) -> Self {
        Self { contents: true, ..self }
    }

    pub(crate) fn with_entries(self) -> Self {
        Self { entries: true, ..self }
    }

    pub(crate) fn with_xattrs(self) -> Self {
        Self { xattrs: true, ..self }
    }

    /// Demands a lease that covers all below a directory: before it moves to another parent.
    pub(crate) fn with_subtree(self) -> Self {
        Self { subtree: true, ..self }
    }

    /// Returns whether the claim is to read attributes and nothing else.
    pub(crate) fn reads_attributes_only(&self) -> bool {
        let Self { id: _, write, soon_written, makes, contents, entries, xattrs, subtree } = *self;
        !(write || soon_written || makes || contents || entries || xattrs || subtree)
    }
}

/// The locked nodes of one operation.
pub(crate) type Nodes = SmallVec<[(InodeId, NodeWriteGuard); CLAIMS_MAX]>;

/// A request for what a claim lacks, and the revision of the node that lacks it.
pub(crate) type MissingGrant = (LeaseRequest, u64);
