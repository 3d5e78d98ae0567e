//! The state that is sent with grants.

use std::sync::Arc;

use ashlar_lease::{Grant, RequestId};
use ashlar_store::StoreError;
use ashlar_types::{Access, Errno, FileKind, Inode, InodeId, LeaseMode, LeaseScope, SessionId};
use ashlar_wire::{GrantReply, InodeState, LeaseRequest, Need, SessionKind};

use crate::access::rights::may_search;
use crate::access::tree_view::TreeView;
use crate::leases::grant::{AnswerGate, GrantAnswer, GrantDependencies, LONG, report_store_error};
use crate::leases::inode_state::{
    complete_state, content_bytes, hide_unreadable, load_state, may_send_contents, state_bytes, xattr_bytes,
};
use crate::leases::kernel_notifier::KernelNotifier;
use crate::leases::leasing::{WantedLeases, home_of, lease_word};
use crate::leases::scan_detection;
use crate::leases::wants::check_directory;
use crate::node_core::NodeCore;
use crate::sessions::session::ServedSession;
use crate::sessions::session_table::SessionTable;

/// Makes the answer to a request that is granted, for the request to take.
pub fn store_answer(
    state: &mut NodeCore,
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

/// Answers a want that the session's leases cover, ahead of waiting sessions.
pub fn answer_covered(state: &mut NodeCore, id: SessionId, wanted: &WantedLeases) -> Option<GrantAnswer> {
    let (mut grants, mut dependencies) = (Vec::with_capacity(wanted.wants.len()), Vec::new());
    for want in &wanted.wants {
        // Other sessions may hold leases below a directory that a session's lease covers: only the manager takes those.
        if want.lease.scope == LeaseScope::Subtree {
            return None;
        }
        let NodeCore { leasing, store, now, .. } = &mut *state;
        let (grant, shown) =
            leasing.find_covering(store, now.since_boot_us(), id, want.lease.inode, want.lease.mode)?;
        grants.push(grant);
        dependencies.extend(shown);
    }
    Some(make_answer(state, id, wanted, &grants, dependencies))
}

/// Makes an answer: the grants with their state.
pub fn make_answer(
    state: &mut NodeCore,
    id: SessionId,
    wanted: &WantedLeases,
    grants: &[Grant],
    mut dependencies: GrantDependencies,
) -> GrantAnswer {
    for grant in grants {
        state.lease_tables().write_word(&grant.word);
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
    let may_publish = state.not_before <= state.now.since_boot && tickets.iter().all(|ticket| ticket.is_done());
    if let Some(grant_cache) = state.grant_cache.as_mut().filter(|_| may_publish) {
        let (replies, now_us) = (grants.as_deref().unwrap_or(&[]), state.now.since_boot_us());
        state.counters.posts += grant_cache.publish(replies, &mut state.leasing, (&state.store, &state.ways), now_us);
    }
    dependencies.sort_unstable();
    dependencies.dedup();
    let pages = find_pages_to_drop(&state.sessions, id, wanted);
    let gate = AnswerGate { not_before: state.not_before, tickets, pages };
    GrantAnswer { grants, dependencies, applied: state.store.applied(id), gate }
}

/// Returns files whose pages a mount's kernel must drop first.
///
/// A program is about to write them. Another process may have them mapped through the mount, and is to see these
/// writes. A mount waits for no pages, since the request may be in flight that has locked them.
fn find_pages_to_drop(
    sessions: &SessionTable,
    id: SessionId,
    wanted: &WantedLeases,
) -> Vec<(Arc<dyn KernelNotifier>, InodeId)> {
    if !sessions.is_process(id) {
        return Vec::new();
    }
    let notifiers = sessions.values().filter_map(|session| Some((session, session.notifier.as_ref()?)));
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
    state: &mut NodeCore,
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
        let mut described =
            match load_state(&state.store, grant.inode, need).map_err(|error| report_store_error(&error))? {
                Some(described) => described,
                None if is_asked => return Err(Errno::ESTALE),
                // It was freed while logs of other sessions were applied.
                None => continue,
            };
        if !is_reached(state.tree(), id, grant.inode, &described)? {
            // Another session's log was applied, and narrowed a directory that leads to it.
            if is_asked {
                return Err(state.sessions.refusal(id));
            }
            continue;
        }
        unasked.bytes += xattr_bytes(&described);
        let sends_contents =
            !is_asked && want.need.contents && unasked.content_bytes < scan_detection::CONTENT_BYTES_MAX;
        if (sends_contents || is_short_first_access(want, &described))
            && may_send_contents(state.sessions.get(&id), &described)
        {
            let contents = state.store.contents(grant.inode).map_err(|error| report_store_error(&error))?;
            unasked.content_bytes += content_bytes(&contents);
            described.contents = Some(contents);
        }
        hide_unreadable(&state.store, state.sessions.get(&id), grant.inode, &mut described)
            .map_err(|error| report_store_error(&error))?;
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

fn is_reached(tree: TreeView<'_>, id: SessionId, inode: InodeId, described: &InodeState) -> Result<bool, Errno> {
    let Some(session) = tree.sessions.ordinary(id) else { return Ok(true) };
    tree.reaches(session, (inode, &described.attributes)).map_err(|error| report_store_error(&error))
}

fn make_reply(grant: &Grant, state: InodeState) -> GrantReply {
    GrantReply { inode: grant.inode, slot: grant.word.slot, word: lease_word(&grant.word).0, state }
}

/// Adds the attributes of those entries that the directory's own lease governs too.
///
/// Extended attributes go along until there are enough of them.
fn add_children(
    state: &mut NodeCore,
    id: SessionId,
    directory: &GrantReply,
    grant: &Grant,
    unasked: &mut UnaskedBytes,
    children: &mut Vec<GrantReply>,
    dependencies: &mut GrantDependencies,
) -> Result<(), StoreError> {
    if let Some(session) = state.sessions.ordinary(id)
        && !may_search(&state.store, session, (directory.inode, &directory.state.attributes))?
    {
        return Ok(());
    }
    for entry in directory.state.entries.iter().flatten() {
        let now_us = state.now.since_boot_us();
        let covering = state.leasing.find_covering(&state.store, now_us, id, entry.inode, LeaseMode::Read);
        let Some((found, seen)) = covering else { continue };
        if found.word != grant.word {
            continue;
        }
        // With the access lists: otherwise opening such a file would take a request.
        let need = Need { xattrs: unasked.bytes < scan_detection::ATTRIBUTE_BYTES_MAX, ..Need::default() };
        if let Some(mut described) = load_state(&state.store, entry.inode, need)? {
            state.tree().record_found(id, entry.inode)?;
            hide_unreadable(&state.store, state.sessions.get(&id), entry.inode, &mut described)?;
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
    state: &mut NodeCore,
    id: SessionId,
    (file, reads): (&GrantReply, bool),
    grant: &Grant,
    unasked: &mut UnaskedBytes,
    files: &mut Vec<GrantReply>,
    dependencies: &mut GrantDependencies,
) -> Result<(), StoreError> {
    let Some(directory) = home_of(file.inode, &file.state.attributes).as_file() else { return Ok(()) };
    if check_directory(state.tree(), id, directory, Access::READ).is_err()
        || check_directory(state.tree(), id, directory, Access::EXECUTE).is_err()
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
        let mut described = complete_state(&state.store, entry.inode, found, Need { xattrs: true, ..Need::default() })?;
        if sends_contents && may_send_contents(state.sessions.get(&id), &described) {
            let contents = state.store.contents(entry.inode)?;
            unasked.content_bytes += content_bytes(&contents);
            described.contents = Some(contents);
        } else if !grants_all {
            continue;
        }
        state.tree().record_found(id, entry.inode)?;
        hide_unreadable(&state.store, state.sessions.get(&id), entry.inode, &mut described)?;
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
