//! The state that is sent with grants.

use std::sync::Arc;

use ashlar_lease::{Grant, RequestId};
use ashlar_store::StoreError;
use ashlar_types::{
    Access, Contents, Credentials, Errno, Extent, FileKind, Inode, InodeId, LeaseMode, LeaseScope, SessionId,
    blocks_for,
};
use ashlar_update::acl::Acl;
use ashlar_update::permission::allows;
use ashlar_update::xattr_size::attribute_bytes;
use ashlar_update::{XATTR_ACL_ACCESS, XATTR_HIDDEN};
use ashlar_wire::{DirectoryEntry, GrantReply, InodeState, LeaseRequest, Need, SessionKind};

use crate::access::ways::{TRUSTED_PREFIX, USER_PREFIX};
use crate::leases::decisions::{lease_word, write_word};
use crate::leases::grant::{
    AnswerGate, GrantAnswer, LONG, check_directory, directory_entry, refusal, report_store_error,
};
use crate::leases::grant_cache;
use crate::leases::kernel_notifier::KernelNotifier;
use crate::leases::leasing::{GrantDependencies, WantedLeases, home_of};
use crate::leases::scan_detection;
use crate::node::Node;
use crate::sessions::session::ServedSession;

/// Takes from a state what a session's user may not see.
fn hide_unreadable(state: &Node, id: SessionId, inode: InodeId, described: &mut InodeState) -> Result<(), StoreError> {
    let Some(session) = state.ordinary_session(id) else { return Ok(()) };
    let found = (inode, &described.attributes);
    let may_read = state.may_read(session, found)?;
    if let Some(xattrs) = described.xattrs.as_mut().filter(|xattrs| !xattrs.is_empty()) {
        let may_change = state.may_change(session, found)?;
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

/// Makes the answer to a request that is granted, for the request to take.
pub fn store_answer(
    state: &mut Node,
    id: SessionId,
    request: RequestId,
    grants: &[Grant],
    dependencies: GrantDependencies,
) {
    let wanted = state.leasing.wanted.remove(&request);
    let is_waited_for = wanted.is_some();
    // The words must stand even if no thread waits for the answer any more.
    let answer = make_answer(state, id, &wanted.unwrap_or_default(), grants, dependencies);
    if is_waited_for {
        state.leasing.answers.insert(request, answer);
    }
}

/// Makes an answer: the grants with their state.
pub fn make_answer(
    state: &mut Node,
    id: SessionId,
    wanted: &WantedLeases,
    grants: &[Grant],
    mut dependencies: GrantDependencies,
) -> GrantAnswer {
    for grant in grants {
        write_word(state, &grant.word);
        if let Some(session) = state.sessions.get_mut(&grant.word.session) {
            session.leases_granted += 1;
        }
    }
    state.counters.leases_granted += grants.len() as u64;
    let tickets = state.leasing.tickets.iter().filter(|ticket| {
        let stale = ticket.stale();
        stale.subtree || grants.iter().any(|g| g.inode == stale.inode || g.word.scope != LeaseScope::Node)
    });
    let tickets: Vec<_> = tickets.map(Arc::clone).collect();
    let grants = grant_replies(state, id, wanted, grants, &mut dependencies);
    if state.not_before <= state.now.since_boot && tickets.iter().all(|ticket| ticket.is_done()) {
        grant_cache::publish(state, grants.as_deref().unwrap_or(&[]));
    }
    dependencies.sort_unstable();
    dependencies.dedup();
    let pages = find_pages_to_drop(state, id, wanted);
    let gate = AnswerGate { not_before: state.not_before, tickets, pages };
    GrantAnswer { grants, dependencies, applied: state.store.applied(id), gate }
}

/// Returns files whose pages a mount's kernel must drop first.
///
/// A program is about to write them. Another process may have them mapped through the mount, and is to see these
/// writes. A mount waits for no pages, since the request may be in flight that has locked them.
fn find_pages_to_drop(state: &Node, id: SessionId, wanted: &WantedLeases) -> Vec<(Arc<dyn KernelNotifier>, InodeId)> {
    let is_program = |session: &ServedSession| session.identity.kind == SessionKind::Process;
    if !state.sessions.get(&id).is_some_and(is_program) {
        return Vec::new();
    }
    let notifiers = state.sessions.values().filter_map(|session| Some((session, session.notifier.as_ref()?)));
    let notifiers: Vec<_> = notifiers.collect();
    let written = wanted.wants.iter().filter(|want| want.lease.mode.is_write()).map(|want| want.lease.inode);
    let owed = written.flat_map(|inode| {
        let owes = move |(session, notifier): &&(&ServedSession, &Arc<dyn KernelNotifier>)| {
            session.control.has_open(inode) && notifier.owes_pages(inode)
        };
        notifiers.iter().filter(owes).map(move |(_, notifier)| (Arc::clone(*notifier), inode))
    });
    owed.collect()
}

/// Bytes of unasked state in one answer, which are limited.
#[derive(Debug, Default)]
struct UnaskedBytes {
    /// Attributes, including extended ones.
    bytes: usize,
    /// Contents of files.
    content_bytes: usize,
}

fn grant_replies(
    state: &mut Node,
    id: SessionId,
    wanted: &WantedLeases,
    grants: &[Grant],
    dependencies: &mut GrantDependencies,
) -> Result<Vec<GrantReply>, Errno> {
    if grants.len() < wanted.wants.len() {
        return Err(Errno::EIO);
    }
    let mut replies = Vec::with_capacity(grants.len());
    let mut children = Vec::new();
    let mut unasked = UnaskedBytes::default();
    let mut bytes = 0;
    for (index, (want, grant)) in wanted.wants.iter().zip(grants).enumerate() {
        let is_asked = index < wanted.asked;
        // The state of an inode is sent once, however often the session asks for it.
        let is_sent = |earlier: &LeaseRequest| earlier.lease.inode == want.lease.inode && earlier.need == want.need;
        let want = &if wanted.wants[..index].iter().any(is_sent) {
            LeaseRequest { need: Need::default(), ..*want }
        } else {
            *want
        };
        let need = Need {
            xattrs: want.need.xattrs && unasked.bytes < scan_detection::ATTRIBUTE_BYTES_MAX,
            contents: want.need.contents && is_asked,
            ..want.need
        };
        let mut described = match load_state(state, grant.inode, need).map_err(|error| report_store_error(&error))? {
            Some(described) => described,
            None if is_asked => return Err(Errno::ESTALE),
            // It was freed while logs of other sessions were applied.
            None => continue,
        };
        if !is_reached(state, id, grant.inode, &described)? {
            // Another session's log was applied, and narrowed a directory that leads to it.
            if is_asked {
                return Err(refusal(state, id));
            }
            continue;
        }
        unasked.bytes += xattr_bytes(&described);
        let sends_contents =
            !is_asked && want.need.contents && unasked.content_bytes < scan_detection::CONTENT_BYTES_MAX;
        if (sends_contents || is_short_first_access(want, &described)) && may_send_contents(state, id, &described) {
            let contents = state.store.contents(grant.inode).map_err(|error| report_store_error(&error))?;
            unasked.content_bytes += content_bytes(&contents);
            described.contents = Some(contents);
        }
        hide_unreadable(state, id, grant.inode, &mut described).map_err(|error| report_store_error(&error))?;
        bytes += state_bytes(&described);
        if bytes > wanted.bytes_max {
            return Err(LONG);
        }
        let reply = make_reply(grant, described);
        if want.need.children && grant.word.scope == LeaseScope::Subtree {
            add_children(state, id, &reply, grant, &mut unasked, &mut children, dependencies)
                .map_err(|error| report_store_error(&error))?;
        }
        if !want.lease.mode.is_write() && grant.word.scope != LeaseScope::Node {
            let reads = want.need.contents;
            add_siblings(state, id, (&reply, reads), grant, &mut unasked, &mut children, dependencies)
                .map_err(|error| report_store_error(&error))?;
        }
        replies.push(reply);
    }
    replies.append(&mut children);
    Ok(replies)
}

fn is_reached(state: &Node, id: SessionId, inode: InodeId, described: &InodeState) -> Result<bool, Errno> {
    let Some(session) = state.ordinary_session(id) else { return Ok(true) };
    state.reaches(session, (inode, &described.attributes)).map_err(|error| report_store_error(&error))
}

fn make_reply(grant: &Grant, state: InodeState) -> GrantReply {
    GrantReply { inode: grant.inode, slot: grant.word.slot, word: lease_word(&grant.word).0, state }
}

/// Adds the attributes of those entries that the directory's own lease governs too.
///
/// Extended attributes go along until there are enough of them.
fn add_children(
    state: &mut Node,
    id: SessionId,
    directory: &GrantReply,
    grant: &Grant,
    unasked: &mut UnaskedBytes,
    children: &mut Vec<GrantReply>,
    dependencies: &mut GrantDependencies,
) -> Result<(), StoreError> {
    if let Some(session) = state.ordinary_session(id)
        && !state.may_search(session, (directory.inode, &directory.state.attributes))?
    {
        return Ok(());
    }
    for entry in directory.state.entries.iter().flatten() {
        let Some((found, seen)) = state.covering_lease(state.now.since_boot_us(), id, entry.inode, LeaseMode::Read)
        else {
            continue;
        };
        if found.word != grant.word {
            continue;
        }
        // With the access lists: otherwise opening such a file would take a request.
        let need = Need { xattrs: unasked.bytes < scan_detection::ATTRIBUTE_BYTES_MAX, ..Need::default() };
        if let Some(mut described) = load_state(state, entry.inode, need)? {
            state.record_found(id, entry.inode)?;
            hide_unreadable(state, id, entry.inode, &mut described)?;
            unasked.bytes += xattr_bytes(&described);
            children.push(make_reply(&found, described));
            dependencies.extend(seen);
        }
    }
    Ok(())
}

/// Adds the other files of a file's directory, as far as the lease covers them.
///
/// It does so if the session is likely to access them. Their contents go along if the session is likely to read them,
/// and may.
fn add_siblings(
    state: &mut Node,
    id: SessionId,
    (file, reads): (&GrantReply, bool),
    grant: &Grant,
    unasked: &mut UnaskedBytes,
    files: &mut Vec<GrantReply>,
    dependencies: &mut GrantDependencies,
) -> Result<(), StoreError> {
    let Some(directory) = home_of(file.inode, &file.state.attributes).as_file() else { return Ok(()) };
    if check_directory(state, id, directory, Access::READ).is_err()
        || check_directory(state, id, directory, Access::EXECUTE).is_err()
    {
        return Ok(());
    }
    let Some(session) = state.sessions.get_mut(&id) else { return Ok(()) };
    let (slot, generation) = (grant.word.slot, grant.word.generation);
    let grants_all = session.scans.is_grant_due(directory, slot, generation);
    let sends_all_contents = reads && session.scans.is_content_due(directory, slot, generation);
    if !grants_all && !sends_all_contents {
        return Ok(());
    }
    // A process need not be sent grants that it finds in the grant cache.
    let reads_grant_cache = session.identity.kind == SessionKind::Process;
    let mut is_left_out = false;
    for (_, _, entry) in state.store.entries(directory, 0, usize::MAX)? {
        let sends_contents = sends_all_contents
            && unasked.content_bytes < scan_detection::CONTENT_BYTES_MAX
            && entry.kind == FileKind::Regular;
        if unasked.bytes >= scan_detection::ATTRIBUTE_BYTES_MAX {
            break;
        }
        if !grants_all && !sends_contents || entry.kind == FileKind::Directory || entry.inode == file.inode {
            continue;
        }
        let need = Need { contents: sends_contents, xattrs: true, ..Need::default() };
        if reads_grant_cache
            && state.grant_cache.as_ref().is_some_and(|grant_cache| grant_cache.has_grant(entry.inode, need))
        {
            is_left_out = true;
            continue;
        }
        let Some(found) = state.store.inode(entry.inode)? else { continue };
        if !state.leasing.manager.is_among_files(directory, entry.inode, home_of(entry.inode, &found)) {
            continue;
        }
        let mut described = complete_state(state, entry.inode, found, Need { xattrs: true, ..Need::default() })?;
        if sends_contents && may_send_contents(state, id, &described) {
            let contents = state.store.contents(entry.inode)?;
            unasked.content_bytes += content_bytes(&contents);
            described.contents = Some(contents);
        } else if !grants_all {
            continue;
        }
        state.record_found(id, entry.inode)?;
        hide_unreadable(state, id, entry.inode, &mut described)?;
        unasked.bytes += xattr_bytes(&described) + size_of::<Inode>() + described.attributes.target.len();
        files.push(make_reply(&Grant { inode: entry.inode, word: grant.word }, described));
        dependencies.extend(state.leasing.manager.own_dependencies(id, entry.inode));
    }
    if let Some(session) = state.sessions.get_mut(&id).filter(|_| is_left_out && !reads) {
        session.scans.record_left_out(directory);
    }
    Ok(())
}

/// Returns whether a first access to a short file gets its contents too.
///
/// They cost a twentieth of the request that they save.
fn is_short_first_access(want: &LeaseRequest, file: &InodeState) -> bool {
    let is_short =
        file.attributes.kind == FileKind::Regular && file.attributes.blocks <= scan_detection::SHORT_FILE_BLOCKS;
    is_short && !want.lease.mode.is_write() && !want.need.contents && want.need.xattrs
}

fn xattr_bytes(state: &InodeState) -> usize {
    state.xattrs.iter().flatten().map(|(name, value)| name.len() + value.len()).sum()
}

/// Returns the bytes of memory that the parts of a state take that may be long.
fn state_bytes(state: &InodeState) -> usize {
    let entries = state.entries.iter().flatten().map(|entry| size_of::<DirectoryEntry>() + entry.name.len());
    entries.sum::<usize>() + xattr_bytes(state) + state.contents.as_ref().map_or(0, content_bytes)
}

fn content_bytes(contents: &Contents) -> usize {
    match contents {
        Contents::Inline(bytes) => bytes.len(),
        Contents::Extents(extents) | Contents::Withheld(extents) => size_of_val(&extents[..]),
    }
}

/// Returns whether a file's contents may be sent unasked.
///
/// They may only be sent to a session that may read them.
fn may_send_contents(state: &Node, id: SessionId, file: &InodeState) -> bool {
    // Without the access list, this is unknown.
    let may_read = |session: &ServedSession| file.xattrs.is_some() && allows_reading(file, &session.credentials);
    file.attributes.blocks <= scan_detection::CONTENT_BLOCKS_MAX && state.sessions.get(&id).is_some_and(may_read)
}

fn allows_reading(file: &InodeState, credentials: &Credentials) -> bool {
    let list = file.xattrs.iter().flatten().find(|(name, _)| name == XATTR_ACL_ACCESS);
    let acl = list.and_then(|(_, value)| Acl::parse(value));
    allows(&file.attributes, acl.as_ref(), credentials, Access::READ)
}

/// Returns the needed state of an inode; `None` if it does not exist.
fn load_state(state: &Node, id: InodeId, need: Need) -> Result<Option<InodeState>, StoreError> {
    // The right to move directories is a lease on no inode: the root's attributes stand in.
    let id = if id == InodeId::RENAME { InodeId::ROOT } else { id };
    state.store.inode(id)?.map(|found| complete_state(state, id, found, need)).transpose()
}

fn complete_state(state: &Node, id: InodeId, attributes: Inode, need: Need) -> Result<InodeState, StoreError> {
    let store = &state.store;
    let contents = if need.contents && attributes.kind == FileKind::Regular { Some(store.contents(id)?) } else { None };
    let entries = if need.entries && attributes.is_directory() && attributes.entries <= Need::ENTRIES_MAX {
        Some(store.entries(id, 0, usize::MAX)?.into_iter().map(directory_entry).collect())
    } else {
        None
    };
    let xattrs = if need.xattrs { Some(store.xattrs(id)?) } else { None };
    Ok(InodeState { attributes, contents, entries, hides_entries: false, xattrs, is_followed: store.is_followed(id) })
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
