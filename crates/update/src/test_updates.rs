//! Parts of updates, which this crate's tests share.

use ashlar_types::{InodeId, Timestamp};

use crate::Rename;

pub fn at(seconds: i64) -> Timestamp {
    Timestamp { seconds, nanoseconds: 0 }
}

/// Moves a name; what stands at the new one goes.
pub fn rename(
    inode: InodeId,
    (parent, name): (InodeId, &'static [u8]),
    (new_parent, new_name): (InodeId, &'static [u8]),
    target: Option<InodeId>,
) -> Rename<'static> {
    Rename {
        parent,
        name,
        inode,
        new_parent,
        new_name,
        target,
        exchange: false,
        whiteout: None,
        release: true,
        at: at(5),
    }
}
