//! The transition function.

use ashlar_types::{
    FILE_SIZE_MAX, FileKind, Inode, InodeId, LINK_MAX, MODE_SETGID, MODE_SETUID, NEVER_NAMED, QuotaId, Timestamp,
};

use crate::permission::{is_linkable, lends_group};
use crate::tree::{Entry, Invalid, Tree};
use crate::{Allocation, Create, Rename, SetAttributes, Update, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT};

/// The effects of an update beyond the state of the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// An inode lost its last link and stays as an orphan, since a session has it open.
    pub orphaned: Option<InodeId>,
    /// An inode was freed with all it held.
    pub freed: Option<InodeId>,
}

/// Applies one update to a tree.
///
/// # Errors
/// An [`Invalid`] (through the tree's error) if the update does not fit the state, and then the tree is unchanged; any
/// error of the tree itself.
pub fn apply<T: Tree>(tree: &mut T, update: &Update<'_>) -> Result<Applied, T::Error> {
    match update {
        Update::Write { inode, offset, at, strip, data } => write(tree, *inode, *offset, data, *at, *strip),
        Update::Create(create) => make(tree, create),
        Update::Link { inode, parent, name, at } => link(tree, *inode, *parent, name, *at),
        Update::Unlink { inode, parent, name, release, at } => {
            remove(tree, *inode, *parent, name, *release, *at, FileKind::Regular)
        }
        Update::RemoveDirectory { inode, parent, name, release, at } => {
            remove(tree, *inode, *parent, name, *release, *at, FileKind::Directory)
        }
        Update::Rename(rename) if rename.exchange => exchange(tree, rename),
        Update::Rename(rename) => move_entry(tree, rename),
        Update::Resize { inode, size, strip, at } => resize(tree, *inode, *size, *at, *strip),
        Update::Allocate { inode, how, offset, length, strip, at } => {
            allocate(tree, *inode, *how, *offset, *length, *at, *strip)
        }
        Update::SetAttributes(set) => set_attributes(tree, set),
        Update::SetXattr { inode, name, value, mode, at } => {
            let mut found = existing(tree, *inode)?;
            found.changed = *at;
            found.mode = mode.unwrap_or(found.mode);
            tree.put_xattr(*inode, name, value)?;
            tree.put_inode(*inode, found)?;
            Ok(Applied::default())
        }
        Update::RemoveXattr { inode, name, mode, at } => {
            let mut found = existing(tree, *inode)?;
            found.changed = *at;
            found.mode = mode.unwrap_or(found.mode);
            tree.remove_xattr(*inode, name)?;
            tree.put_inode(*inode, found)?;
            Ok(Applied::default())
        }
        Update::Accessed { inode, at } => {
            // The inode may be gone: these records are written without a lease.
            if let Some(mut found) = tree.inode(*inode)? {
                if found.accessed < *at {
                    found.accessed = *at;
                    tree.put_inode(*inode, found)?;
                }
            }
            Ok(Applied::default())
        }
        Update::Release { inode } => release(tree, *inode),
        Update::Depend { .. } => Ok(Applied::default()),
        Update::SetQuota { inode, quota, at } => {
            let mut found = existing(tree, *inode)?;
            found.quota = *quota;
            found.changed = *at;
            tree.put_inode(*inode, found)?;
            Ok(Applied::default())
        }
    }
}

/// Whether moving directory `inode` into `new_parent` would put it below itself.
///
/// If damaged parent pointers form a circle, it also returns true, so that nothing moves there.
///
/// # Errors
/// Those of the tree.
pub fn would_make_cycle<T: Tree>(tree: &T, inode: InodeId, new_parent: InodeId) -> Result<bool, T::Error> {
    let mut at = new_parent;
    // Brent's method: a mark left behind at each power of two is met again if the way is a circle.
    let (mut mark, mut steps, mut limit) = (new_parent, 0u64, 1u64);
    loop {
        if at == inode {
            return Ok(true);
        }
        match tree.inode(at)? {
            Some(found) if found.parent != at => at = found.parent,
            _ => return Ok(false),
        }
        if at == mark {
            return Ok(true);
        }
        steps += 1;
        if steps == limit {
            (mark, steps, limit) = (at, 0, limit * 2);
        }
    }
}

/// Whether quotas of subtrees allow an inode a name in a directory.
///
/// An inode that counts against one subtree must not be in another. The directory at the top of a subtree may be
/// anywhere, since its move changes no account.
#[must_use]
pub fn quota_allows(id: InodeId, inode: &Inode, directory: &Inode) -> bool {
    inode.quota == directory.quota || inode.quota == QuotaId::of(id)
}

fn check_quota(id: InodeId, inode: &Inode, directory: &Inode) -> Result<(), Invalid> {
    if quota_allows(id, inode, directory) { Ok(()) } else { Err(Invalid::OtherQuota(id)) }
}

fn existing<T: Tree>(tree: &T, inode: InodeId) -> Result<Inode, T::Error> {
    tree.inode(inode)?.ok_or_else(|| Invalid::NoInode(inode).into())
}

/// A directory that has a place in the tree: nothing can be made in a removed one.
fn directory<T: Tree>(tree: &T, inode: InodeId) -> Result<Inode, T::Error> {
    let found = existing(tree, inode)?;
    if !found.is_directory() || found.links == 0 {
        return Err(Invalid::WrongKind(inode).into());
    }
    Ok(found)
}

fn regular<T: Tree>(tree: &T, inode: InodeId) -> Result<Inode, T::Error> {
    let found = existing(tree, inode)?;
    if found.kind != FileKind::Regular {
        return Err(Invalid::WrongKind(inode).into());
    }
    Ok(found)
}

fn expect_entry<T: Tree>(tree: &T, parent: InodeId, name: &[u8], inode: InodeId) -> Result<Entry, T::Error> {
    match tree.entry(parent, name)? {
        Some(entry) if entry.inode == inode => Ok(entry),
        _ => Err(Invalid::WrongEntry.into()),
    }
}

/// Clears the bits that a change by an ordinary user clears.
///
/// They are set-user-id, and set-group-id if the group may execute. Without group execution the bit asks for mandatory
/// locking, and stays.
fn strip_set_id(inode: &mut Inode) {
    inode.mode &= !MODE_SETUID;
    if lends_group(inode.mode) {
        inode.mode &= !MODE_SETGID;
    }
}

fn touch(inode: &mut Inode, at: Timestamp) {
    inode.modified = at;
    inode.changed = at;
}

/// Changes a directory's count of entries and of subdirectories, and its times. Counts that can't be come from a
/// damaged state, which a record must not make worse.
fn change_directory(inode: &mut Inode, entries: i64, subdirectories: i32, at: Timestamp) -> Result<(), Invalid> {
    inode.entries = inode.entries.checked_add_signed(entries).ok_or(Invalid::OutOfRange)?;
    let links = inode.links.checked_add_signed(subdirectories);
    // A directory in the tree has its own two links always.
    inode.links = links.filter(|&links| links >= 2).ok_or(Invalid::OutOfRange)?;
    touch(inode, at);
    Ok(())
}

fn make<T: Tree>(tree: &mut T, create: &Create<'_>) -> Result<Applied, T::Error> {
    let mut parent = directory(tree, create.parent)?;
    if tree.inode(create.inode)?.is_some() {
        return Err(Invalid::InodeExists(create.inode).into());
    }
    let named = !create.name.is_empty();
    if named && tree.entry(create.parent, create.name)?.is_some() {
        return Err(Invalid::EntryExists.into());
    }
    let is_directory = create.kind == FileKind::Directory;
    if is_directory && !named {
        return Err(Invalid::WrongKind(create.inode).into());
    }
    if named {
        if is_directory && parent.links >= LINK_MAX {
            return Err(Invalid::OutOfRange.into());
        }
        change_directory(&mut parent, 1, i32::from(is_directory), create.at)?;
    }
    put_made(tree, create, parent.quota)?;
    if !named {
        tree.set_orphan(create.inode, true)?;
        return Ok(Applied { orphaned: Some(create.inode), freed: None });
    }
    tree.put_inode(create.parent, parent)?;
    Ok(Applied::default())
}

/// Stores a new inode, and its entry if it has a name. The caller updates its directory.
fn put_made<T: Tree>(tree: &mut T, create: &Create<'_>, quota: QuotaId) -> Result<(), T::Error> {
    let named = !create.name.is_empty();
    let is_directory = create.kind == FileKind::Directory;
    let inode = Inode {
        kind: create.kind,
        mode: create.mode,
        uid: create.uid,
        gid: create.gid,
        links: if is_directory { 2 } else { u32::from(named) },
        device: if named { create.device & !NEVER_NAMED } else { NEVER_NAMED },
        size: create.target.len() as u64,
        blocks: 0,
        entries: 0,
        parent: create.parent,
        accessed: create.at,
        modified: create.at,
        changed: create.at,
        born: create.at,
        quota,
        target: create.target.to_vec(),
    };
    tree.put_inode(create.inode, inode)?;
    for (name, value) in [(XATTR_ACL_ACCESS, create.acl_access), (XATTR_ACL_DEFAULT, create.acl_default)] {
        if !value.is_empty() {
            tree.put_xattr(create.inode, name, value)?;
        }
    }
    if named {
        tree.put_entry(create.parent, create.name, Entry { inode: create.inode, kind: create.kind })?;
    }
    Ok(())
}

fn link<T: Tree>(
    tree: &mut T,
    inode: InodeId,
    parent: InodeId,
    name: &[u8],
    at: Timestamp,
) -> Result<Applied, T::Error> {
    let mut into = directory(tree, parent)?;
    let mut found = existing(tree, inode)?;
    if found.is_directory() {
        return Err(Invalid::WrongKind(inode).into());
    }
    if !is_linkable(&found) {
        return Err(Invalid::Removed(inode).into());
    }
    if found.links >= LINK_MAX {
        return Err(Invalid::OutOfRange.into());
    }
    if tree.entry(parent, name)?.is_some() {
        return Err(Invalid::EntryExists.into());
    }
    check_quota(inode, &found, &into)?;
    change_directory(&mut into, 1, 0, at)?;
    if found.links == 0 {
        tree.set_orphan(inode, false)?;
    }
    found.links += 1;
    found.device &= !NEVER_NAMED;
    found.changed = at;
    found.parent = parent;
    tree.put_entry(parent, name, Entry { inode, kind: found.kind })?;
    tree.put_inode(inode, found)?;
    tree.put_inode(parent, into)?;
    Ok(Applied::default())
}

/// Removes one entry: of an empty directory where `kind` is one, of anything else otherwise.
fn remove<T: Tree>(
    tree: &mut T,
    inode: InodeId,
    parent: InodeId,
    name: &[u8],
    release: bool,
    at: Timestamp,
    kind: FileKind,
) -> Result<Applied, T::Error> {
    let mut from = directory(tree, parent)?;
    expect_entry(tree, parent, name, inode)?;
    let found = existing(tree, inode)?;
    if found.is_directory() != (kind == FileKind::Directory) {
        return Err(Invalid::WrongKind(inode).into());
    }
    if found.entries != 0 {
        return Err(Invalid::NotEmpty(inode).into());
    }
    // Only in a damaged state does a directory hold itself; its inode would be stored twice below.
    if inode == parent {
        return Err(Invalid::Cycle(inode).into());
    }
    change_directory(&mut from, -1, -i32::from(found.is_directory()), at)?;
    tree.remove_entry(parent, name)?;
    tree.put_inode(parent, from)?;
    drop_link(tree, (inode, found), parent, release, at)
}

/// Removes one link of an inode whose entry in `parent` is gone. Without links the inode is freed, or becomes an
/// orphan.
fn drop_link<T: Tree>(
    tree: &mut T,
    (id, mut inode): (InodeId, Inode),
    parent: InodeId,
    release: bool,
    at: Timestamp,
) -> Result<Applied, T::Error> {
    inode.links = if inode.is_directory() { 0 } else { inode.links.saturating_sub(1) };
    inode.changed = at;
    if inode.links > 0 {
        if inode.parent == parent {
            // The places of the other links are not known, and this directory may be removed while the file stays.
            inode.parent = InodeId::ROOT;
        }
        tree.put_inode(id, inode)?;
        return Ok(Applied::default());
    }
    if release && tree.may_free(id) {
        tree.remove_inode(id)?;
        return Ok(Applied { orphaned: None, freed: Some(id) });
    }
    tree.put_inode(id, inode)?;
    tree.set_orphan(id, true)?;
    Ok(Applied { orphaned: Some(id), freed: None })
}

/// A directory can't move into itself, nor take the place of one that it is in. A longer way round is for
/// [`would_make_cycle`] to see, which needs the ancestors; these cases would have one inode stored twice.
fn check_apart(rename: &Rename<'_>) -> Result<(), Invalid> {
    let Rename { parent, inode, new_parent, target, .. } = *rename;
    match [Some(inode), target].into_iter().flatten().find(|&id| id == parent || id == new_parent) {
        Some(id) => Err(Invalid::Cycle(id)),
        None => Ok(()),
    }
}

/// The two directories of a rename, or the one that is both.
type Parents = (Inode, Option<Inode>);

fn parents<T: Tree>(tree: &T, rename: &Rename<'_>) -> Result<Parents, T::Error> {
    let parent = directory(tree, rename.parent)?;
    let is_one = rename.parent == rename.new_parent;
    Ok((parent, if is_one { None } else { Some(directory(tree, rename.new_parent)?) }))
}

/// Returns the change in entries and subdirectories of each directory of a rename, summed if both are one.
fn change_parents(
    (parent, new_parent): &mut Parents,
    from: (i64, i32),
    into: (i64, i32),
    at: Timestamp,
) -> Result<(), Invalid> {
    match new_parent {
        None => change_directory(parent, from.0 + into.0, from.1 + into.1, at),
        Some(new_parent) => {
            change_directory(parent, from.0, from.1, at)?;
            change_directory(new_parent, into.0, into.1, at)
        }
    }
}

fn put_parents<T: Tree>(tree: &mut T, rename: &Rename<'_>, (parent, new_parent): Parents) -> Result<(), T::Error> {
    tree.put_inode(rename.parent, parent)?;
    new_parent.map_or(Ok(()), |new_parent| tree.put_inode(rename.new_parent, new_parent))
}

fn move_entry<T: Tree>(tree: &mut T, rename: &Rename<'_>) -> Result<Applied, T::Error> {
    let Rename { parent, name, inode, new_parent, new_name, target, release, at, .. } = *rename;
    let mut parents = parents(tree, rename)?;
    let entry = expect_entry(tree, parent, name, inode)?;
    check_apart(rename)?;
    let mut moved = existing(tree, inode)?;
    if let Some(into) = &parents.1 {
        check_quota(inode, &moved, into)?;
    }
    let is_directory = moved.is_directory();
    let replaced = match (tree.entry(new_parent, new_name)?, target) {
        (None, None) => None,
        (Some(found), Some(expected)) if found.inode == expected => Some((expected, existing(tree, expected)?)),
        _ => return Err(Invalid::WrongEntry.into()),
    };
    if let Some((id, replaced)) = &replaced {
        // Two names of one inode: POSIX has the call do nothing, so no record is written.
        if *id == inode || replaced.is_directory() != is_directory {
            return Err(Invalid::WrongKind(*id).into());
        }
        if replaced.entries != 0 {
            return Err(Invalid::NotEmpty(*id).into());
        }
    } else if is_directory && parents.1.as_ref().is_some_and(|into| into.links >= LINK_MAX) {
        return Err(Invalid::OutOfRange.into());
    }
    let made = rename.makes();
    if let Some(create) = &made {
        if tree.inode(create.inode)?.is_some() {
            return Err(Invalid::InodeExists(create.inode).into());
        }
    }
    // A replaced entry, and a replaced directory's link, make room for those that come; so does the moved one for a
    // whiteout.
    let (comes, goes) = (replaced.is_none(), made.is_none());
    let from = (-i64::from(goes), -i32::from(is_directory));
    change_parents(&mut parents, from, (i64::from(comes), i32::from(is_directory && comes)), at)?;
    tree.put_entry(new_parent, new_name, entry)?;
    match &made {
        None => tree.remove_entry(parent, name)?,
        Some(create) => put_made(tree, create, parents.0.quota)?,
    }
    put_parents(tree, rename, parents)?;
    moved.parent = new_parent;
    moved.changed = at;
    tree.put_inode(inode, moved)?;
    match replaced {
        Some(replaced) => drop_link(tree, replaced, new_parent, release, at),
        None => Ok(Applied::default()),
    }
}

fn exchange<T: Tree>(tree: &mut T, rename: &Rename<'_>) -> Result<Applied, T::Error> {
    let Rename { parent, name, inode, new_parent, new_name, target, at, .. } = *rename;
    let other = target.ok_or(Invalid::WrongEntry)?;
    if rename.whiteout.is_some() {
        // The target would take the place of the moved entry.
        return Err(Invalid::EntryExists.into());
    }
    let mut parents = parents(tree, rename)?;
    let entry = expect_entry(tree, parent, name, inode)?;
    let other_entry = expect_entry(tree, new_parent, new_name, other)?;
    if inode == other {
        return Err(Invalid::WrongEntry.into());
    }
    check_apart(rename)?;
    let mut first = existing(tree, inode)?;
    let mut second = existing(tree, other)?;
    if let (one, Some(two)) = &parents {
        check_quota(inode, &first, two)?;
        check_quota(other, &second, one)?;
    }
    let change = i32::from(second.is_directory()) - i32::from(first.is_directory());
    change_parents(&mut parents, (0, change), (0, -change), at)?;
    tree.put_entry(parent, name, other_entry)?;
    tree.put_entry(new_parent, new_name, entry)?;
    put_parents(tree, rename, parents)?;
    first.parent = new_parent;
    first.changed = at;
    second.parent = parent;
    second.changed = at;
    tree.put_inode(inode, first)?;
    tree.put_inode(other, second)?;
    Ok(Applied::default())
}

fn write<T: Tree>(
    tree: &mut T,
    id: InodeId,
    offset: u64,
    data: &[u8],
    at: Timestamp,
    strip: bool,
) -> Result<Applied, T::Error> {
    let mut inode = regular(tree, id)?;
    let size = written_size(&inode, offset, data.len() as u64).ok_or(Invalid::OutOfRange)?;
    let blocks = tree.write(id, &inode, offset, data, size)?;
    record_written(&mut inode, size, blocks, at, strip);
    tree.put_inode(id, inode)?;
    Ok(Applied::default())
}

/// Returns the size of a file after a write; `None` if it exceeds the largest size.
#[must_use]
#[inline]
pub fn written_size(inode: &Inode, offset: u64, length: u64) -> Option<u64> {
    let end = offset.checked_add(length).filter(|&end| end <= FILE_SIZE_MAX)?;
    Some(if length == 0 { inode.size } else { inode.size.max(end) })
}

/// Changes a file's attributes as a write does: the size by [`written_size`], and the blocks in use afterwards.
#[inline]
pub fn record_written(inode: &mut Inode, size: u64, blocks: u64, at: Timestamp, strip: bool) {
    inode.blocks = blocks;
    inode.size = size;
    record_change(inode, at, strip);
}

#[inline]
fn record_change(inode: &mut Inode, at: Timestamp, strip: bool) {
    touch(inode, at);
    if strip {
        strip_set_id(inode);
    }
}

fn resize<T: Tree>(tree: &mut T, id: InodeId, size: u64, at: Timestamp, strip: bool) -> Result<Applied, T::Error> {
    let mut inode = regular(tree, id)?;
    if size > FILE_SIZE_MAX {
        return Err(Invalid::OutOfRange.into());
    }
    inode.blocks = tree.resize(id, &inode, size)?;
    inode.size = size;
    finish_change(tree, id, inode, at, strip)
}

fn allocate<T: Tree>(
    tree: &mut T,
    id: InodeId,
    how: Allocation,
    offset: u64,
    length: u64,
    at: Timestamp,
    strip: bool,
) -> Result<Applied, T::Error> {
    let mut inode = regular(tree, id)?;
    let size = allocated_size(how, inode.size, offset, length).ok_or(Invalid::OutOfRange)?;
    inode.blocks = tree.allocate(id, &inode, how, offset, length, size)?;
    inode.size = size;
    finish_change(tree, id, inode, at, strip)
}

/// Returns the size of a file after an allocation; `None` if the range breaks the rules of `fallocate(2)`.
fn allocated_size(how: Allocation, size: u64, offset: u64, length: u64) -> Option<u64> {
    let end = offset.checked_add(length).filter(|&end| end <= FILE_SIZE_MAX && length > 0)?;
    let whole_blocks = offset % ashlar_types::BLOCK_BYTES == 0 && length % ashlar_types::BLOCK_BYTES == 0;
    match how {
        Allocation::Reserve | Allocation::Zero => Some(size.max(end)),
        Allocation::ReserveKeepSize | Allocation::ZeroKeepSize | Allocation::Punch => Some(size),
        Allocation::Collapse => (whole_blocks && end < size).then(|| size - length),
        Allocation::Insert => {
            size.checked_add(length).filter(|&grown| whole_blocks && offset < size && grown <= FILE_SIZE_MAX)
        }
    }
}

fn finish_change<T: Tree>(
    tree: &mut T,
    id: InodeId,
    mut inode: Inode,
    at: Timestamp,
    strip: bool,
) -> Result<Applied, T::Error> {
    record_change(&mut inode, at, strip);
    tree.put_inode(id, inode)?;
    Ok(Applied::default())
}

fn set_attributes<T: Tree>(tree: &mut T, set: &SetAttributes) -> Result<Applied, T::Error> {
    let mut inode = existing(tree, set.inode)?;
    inode.mode = set.mode.unwrap_or(inode.mode);
    inode.uid = set.uid.unwrap_or(inode.uid);
    inode.gid = set.gid.unwrap_or(inode.gid);
    inode.accessed = set.accessed.unwrap_or(inode.accessed);
    inode.modified = set.modified.unwrap_or(inode.modified);
    inode.changed = set.at;
    tree.put_inode(set.inode, inode)?;
    Ok(Applied::default())
}

fn release<T: Tree>(tree: &mut T, id: InodeId) -> Result<Applied, T::Error> {
    match tree.inode(id)? {
        Some(inode) if inode.links == 0 && tree.may_free(id) => {
            tree.remove_inode(id)?;
            Ok(Applied { orphaned: None, freed: Some(id) })
        }
        // Freed already, linked again, or still open elsewhere: the session that closes it last frees it.
        _ => Ok(Applied::default()),
    }
}

#[cfg(test)]
mod tests;
