//! Queues what a mount's kernel must forget when a lease is taken from the mount.

use ashlar_lease::Ancestry;
use ashlar_types::{InodeId, LeaseScope, SessionId};

use crate::leases::kernel_notifier::StaleCache;
use crate::leases::leasing::Ancestors;
use crate::node::Node;

/// Records that a lease is about to be taken.
///
/// A restart from here on waits until the kernel no longer believes it.
pub fn begin_invalidation(state: &Node, id: SessionId) {
    if let Some(notifier) = state.sessions.get(&id).and_then(|session| session.notifier.as_ref()) {
        notifier.begin_revocation();
    }
}

/// Queues what the kernel must forget.
///
/// The kernel's cache below a directory can't be listed. The kernel looks up all names afresh, which brings attributes
/// too, and an inode that is reached without a name is open.
pub fn queue_invalidation(state: &mut Node, id: SessionId, inode: InodeId, scope: LeaseScope) {
    let Some(session) = state.sessions.get(&id) else { return };
    let Some(notifier) = session.notifier.clone() else { return };
    // The kernel's cache of a directory's files can't be listed either.
    let subtree = scope != LeaseScope::Node;
    let stale = |inode: InodeId, subtree| {
        let found = state.store.inode(inode).ok().flatten();
        StaleCache { inode, data: found.is_some_and(|found| !found.is_directory()), subtree }
    };
    let is_below = |open: &InodeId| *open != inode && is_below(&Ancestors(&state.store), *open, inode);
    let open = if subtree { session.control.open_inodes() } else { Vec::new() };
    let open: Vec<_> = open.into_iter().filter(is_below).map(|open| stale(open, false)).collect();
    // It is queued behind the others, so its ticket stands for all of them. Names need no notification: kernels keep
    // none while there is more than one session.
    let ticket = notifier.queue_stale(&open, stale(inode, subtree));
    state.counters.invalidations += 1;
    state.leasing.tickets.retain(|ticket| !ticket.is_done());
    state.leasing.tickets.push(ticket);
}

/// Returns whether a lease on everything below `top` may govern the inode.
///
/// An inode without a home may have had its home there.
fn is_below(ancestors: &Ancestors<'_>, inode: InodeId, top: InodeId) -> bool {
    let mut at = inode;
    loop {
        if at == top || at == InodeId::ROOT {
            return at == top;
        }
        match ancestors.home(at).directory {
            Some(parent) => at = parent,
            None => return true,
        }
    }
}
