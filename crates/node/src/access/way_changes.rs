//! How updates change the ways to inodes.

use ashlar_types::InodeId;
use ashlar_update::{Update, XATTR_ACL_ACCESS};

/// How an update changes the ways to an inode, or through it.
#[derive(Clone, Copy, Debug)]
pub enum WayChange {
    /// The rights to the inode change.
    Rights,
    /// A name of it is made, moved or removed; the directory in which it has one afterwards, if that is known.
    Named(Option<InodeId>),
}

/// Returns whether an update makes a further name.
pub fn is_link(update: &Update<'_>) -> bool {
    matches!(update, Update::Link { .. })
}

/// Returns the inodes to which or through which an update changes ways.
pub fn changed_ways(update: &Update<'_>) -> impl Iterator<Item = (InodeId, WayChange)> {
    let (first, second) = match update {
        Update::SetAttributes(set) if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() => {
            (Some((set.inode, WayChange::Rights)), None)
        }
        Update::SetXattr { inode, name, .. } | Update::RemoveXattr { inode, name, .. } if *name == XATTR_ACL_ACCESS => {
            (Some((*inode, WayChange::Rights)), None)
        }
        Update::Link { inode, parent, .. } => (Some((*inode, WayChange::Named(Some(*parent)))), None),
        Update::Unlink { inode, .. } | Update::RemoveDirectory { inode, .. } => {
            (Some((*inode, WayChange::Named(None))), None)
        }
        Update::Rename(rename) => {
            let target = rename.exchange.then_some(rename.parent);
            let target = rename.target.map(|id| (id, WayChange::Named(target)));
            (Some((rename.inode, WayChange::Named(Some(rename.new_parent)))), target)
        }
        _ => (None, None),
    };
    first.into_iter().chain(second)
}

/// Returns the inodes that an update makes, or gives a name.
pub fn placed_inodes(update: &Update<'_>) -> impl Iterator<Item = InodeId> {
    let made = match update {
        Update::Create(create) => Some(create.inode),
        Update::Rename(rename) => rename.makes().map(|create| create.inode),
        _ => None,
    };
    let named = changed_ways(update).filter(|(_, becomes)| matches!(becomes, WayChange::Named(Some(_))));
    made.into_iter().chain(named.map(|(id, _)| id))
}

/// Returns the inodes that a record changes and that its session must have reached.
pub fn changed_inodes(update: &Update<'_>) -> impl Iterator<Item = InodeId> {
    let changed = match update {
        Update::Write { inode, .. }
        | Update::Resize { inode, .. }
        | Update::Allocate { inode, .. }
        | Update::SetXattr { inode, .. }
        | Update::RemoveXattr { inode, .. }
        | Update::SetQuota { inode, .. } => [Some(*inode), None],
        Update::SetAttributes(set) => [Some(set.inode), None],
        Update::Create(create) => [Some(create.parent), None],
        Update::Link { inode, parent, .. } => [Some(*inode), Some(*parent)],
        Update::Unlink { parent, .. } | Update::RemoveDirectory { parent, .. } => [Some(*parent), None],
        Update::Rename(rename) => [Some(rename.parent), Some(rename.new_parent)],
        Update::Accessed { .. } | Update::Release { .. } | Update::Depend { .. } => [None, None],
    };
    changed.into_iter().flatten()
}
