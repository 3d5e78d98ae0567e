//! The state of an inode that is sent with a grant, as far as a session may see it.

use ashlar_store::{Store, StoreError};
use ashlar_types::{Access, Contents, Credentials, Extent, FileKind, Inode, InodeId, Name, blocks_for};
use ashlar_update::acl::Acl;
use ashlar_update::permission::allows;
use ashlar_update::xattr_size::attribute_bytes;
use ashlar_update::{XATTR_ACL_ACCESS, XATTR_HIDDEN};
use ashlar_wire::{DirectoryEntry, InodeState, Need};

use crate::access::rights::{may_change, may_read};
use crate::access::ways::{TRUSTED_PREFIX, USER_PREFIX};
use crate::leases::scan_detection;
use crate::sessions::session::ServedSession;

/// Returns whether a file's contents may be sent unasked.
///
/// They may only be sent to a session that may read them.
pub fn may_send_contents(session: Option<&ServedSession>, file: &InodeState) -> bool {
    // Without the access list, this is unknown.
    let may_read = |session: &ServedSession| file.xattrs.is_some() && allows_reading(file, &session.credentials);
    file.attributes.blocks <= scan_detection::CONTENT_BLOCKS_MAX && session.is_some_and(may_read)
}

fn allows_reading(file: &InodeState, credentials: &Credentials) -> bool {
    let list = file.xattrs.iter().flatten().find(|(name, _)| name == XATTR_ACL_ACCESS);
    let acl = list.and_then(|(_, value)| Acl::parse(value));
    allows(&file.attributes, acl.as_ref(), credentials, Access::READ)
}

/// Returns the needed state of an inode; `None` if it does not exist.
pub fn load_state(store: &Store, id: InodeId, need: Need) -> Result<Option<InodeState>, StoreError> {
    // The right to move directories is a lease on no inode: the root's attributes stand in.
    let id = if id == InodeId::RENAME { InodeId::ROOT } else { id };
    store.inode(id)?.map(|found| complete_state(store, id, found, need)).transpose()
}

/// Returns the needed state of an inode with these attributes.
pub fn complete_state(store: &Store, id: InodeId, attributes: Inode, need: Need) -> Result<InodeState, StoreError> {
    let contents = if need.contents && attributes.kind == FileKind::Regular { Some(store.contents(id)?) } else { None };
    let entries = if need.entries && attributes.is_directory() && attributes.entries <= Need::ENTRIES_MAX {
        Some(store.entries(id, 0, usize::MAX)?.into_iter().map(directory_entry).collect())
    } else {
        None
    };
    let xattrs = if need.xattrs { Some(store.xattrs(id)?) } else { None };
    Ok(InodeState { attributes, contents, entries, hides_entries: false, xattrs, is_followed: store.is_followed(id) })
}

/// Returns an entry as it is sent.
pub fn directory_entry((cookie, name, entry): (u64, Name, ashlar_update::Entry)) -> DirectoryEntry {
    DirectoryEntry { cookie, name: name.as_bytes().to_vec(), inode: entry.inode, kind: entry.kind }
}

/// Takes from a state what a session's user may not see.
pub fn hide_unreadable(
    store: &Store,
    session: Option<&ServedSession>,
    inode: InodeId,
    described: &mut InodeState,
) -> Result<(), StoreError> {
    let ordinary = session.filter(|session| !session.credentials.is_privileged());
    let Some(session) = ordinary else { return Ok(()) };
    let found = (inode, &described.attributes);
    let may_read = may_read(store, session, found)?;
    if let Some(xattrs) = described.xattrs.as_mut().filter(|xattrs| !xattrs.is_empty()) {
        let may_change = may_change(store, session, found)?;
        let hidden = xattrs.extract_if(.., |(name, _)| name.starts_with(TRUSTED_PREFIX));
        let hidden: usize = hidden.map(|(name, value)| attribute_bytes(&name, &value)).sum();
        if hidden > 0 && may_change {
            xattrs.push((XATTR_HIDDEN.to_vec(), vec![0; hidden - attribute_bytes(XATTR_HIDDEN, &[])]));
        }
        // A user that may not read the inode may list the names. If it may add attributes, it must know the sizes.
        let values = xattrs.iter_mut().filter(|(name, _)| !may_read && name.starts_with(USER_PREFIX));
        values.for_each(|(_, value)| if may_change { value.fill(0) } else { value.clear() });
    }
    if may_read {
        return Ok(());
    }
    described.hides_entries = described.entries.take().is_some();
    described.contents = described.contents.take().map(withhold);
    Ok(())
}

/// Returns content for a user that may not read it: which blocks there are.
fn withhold(contents: Contents) -> Contents {
    Contents::Withheld(match contents {
        Contents::Inline(bytes) if bytes.is_empty() => Vec::new(),
        Contents::Inline(bytes) => {
            vec![Extent { logical_block: 0, blocks: blocks_for(bytes.len() as u64), address: None }]
        }
        Contents::Extents(extents) | Contents::Withheld(extents) => {
            extents.into_iter().map(|extent| Extent { address: None, ..extent }).collect()
        }
    })
}

/// Returns the bytes of a state's extended attributes.
pub fn xattr_bytes(state: &InodeState) -> usize {
    state.xattrs.iter().flatten().map(|(name, value)| name.len() + value.len()).sum()
}

/// Returns the bytes of memory that the parts of a state take that may be long.
pub fn state_bytes(state: &InodeState) -> usize {
    let entries = state.entries.iter().flatten().map(|entry| size_of::<DirectoryEntry>() + entry.name.len());
    entries.sum::<usize>() + xattr_bytes(state) + state.contents.as_ref().map_or(0, content_bytes)
}

/// Returns the bytes of memory that contents take.
pub fn content_bytes(contents: &Contents) -> usize {
    match contents {
        Contents::Inline(bytes) => bytes.len(),
        Contents::Extents(extents) | Contents::Withheld(extents) => size_of_val(&extents[..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_types::Timestamp;

    #[test]
    fn unasked_contents_sent_only_to_session_that_may_read() {
        let mut file = Inode::new(FileKind::Regular, 0o640, InodeId::ROOT, Timestamp::default());
        (file.uid, file.gid) = (7, 8);
        let mut state = InodeState {
            attributes: file,
            contents: None,
            entries: None,
            hides_entries: false,
            xattrs: Some(Vec::new()),
            is_followed: false,
        };
        let may_read = |state: &InodeState, uid, gid| {
            allows_reading(state, &Credentials { checked: false, ..Credentials::checked(uid, gid) })
        };
        assert!(may_read(&state, 7, 0) && may_read(&state, 1, 8) && may_read(&state, 0, 0));
        assert!(!may_read(&state, 1, 1));
        // An access list: owner rw, user 1 r, group nothing, mask r, others nothing.
        let entries: [(u16, u16, u32); 5] =
            [(1, 6, u32::MAX), (2, 4, 1), (4, 0, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
        let mut list = 2u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            list.extend(tag.to_le_bytes().iter().chain(&permissions.to_le_bytes()).chain(&id.to_le_bytes()));
        }
        state.xattrs = Some(vec![(XATTR_ACL_ACCESS.to_vec(), list)]);
        assert!(may_read(&state, 1, 1) && !may_read(&state, 2, 8), "the access list decides");
    }
}
