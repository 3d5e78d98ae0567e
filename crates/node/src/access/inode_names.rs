//! Finds the names of inodes, which only their directories know.

use ashlar_store::{Store, StoreError};
use ashlar_types::{InodeId, Name};

/// The most directories above one whose path is to be shown.
const DEPTH_MAX: usize = 1000;

/// Returns the path of a directory from the root.
///
/// Returns `None` if it is gone, or not found within `left` entries.
pub fn find_path(store: &Store, directory: InodeId, left: &mut usize) -> Result<Option<Vec<u8>>, StoreError> {
    let mut names: Vec<Name> = Vec::new();
    let mut at = directory;
    while at != InodeId::ROOT {
        let Some(found) = store.inode(at)?.filter(|found| found.links > 0 && names.len() < DEPTH_MAX) else {
            return Ok(None);
        };
        let Some(name) = find_name(store, found.parent, at, left)? else { return Ok(None) };
        names.push(name);
        at = found.parent;
    }
    let path = names.iter().rev().fold(Vec::new(), |path, name| [&path, &b"/"[..], name.as_bytes()].concat());
    Ok(Some(if path.is_empty() { b"/".to_vec() } else { path }))
}

/// Returns the name of an inode in a directory.
///
/// Returns `None` if it is not found within `left` entries.
pub fn find_name(store: &Store, parent: InodeId, inode: InodeId, left: &mut usize) -> Result<Option<Name>, StoreError> {
    const PAGE: usize = 1000;
    let mut after = 0;
    while *left > 0 {
        let page = store.entries(parent, after, PAGE)?;
        let Some(&(last, ..)) = page.last() else { return Ok(None) };
        *left = left.saturating_sub(page.len());
        after = last;
        if let Some((_, name, _)) = page.into_iter().find(|(_, _, entry)| entry.inode == inode) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}
