//! Queues what a mount's kernel must forget when a lease is taken from the mount.

use std::sync::Arc;

use ashlar_lease::Ancestry;
use ashlar_store::Store;
use ashlar_types::{InodeId, LeaseScope};

use crate::leases::kernel_notifier::{KernelTicket, StaleCache};
use crate::leases::leasing::Ancestors;
use crate::sessions::session::ServedSession;

/// Records that a lease is about to be taken.
///
/// A restart from here on waits until the kernel no longer believes it.
pub fn begin_invalidation(session: Option<&ServedSession>) {
    if let Some(notifier) = session.and_then(|session| session.notifier.as_ref()) {
        notifier.begin_revocation();
    }
}

/// Queues what the kernel must forget; returns a ticket if the session has a kernel to notify.
///
/// The kernel's cache below a directory can't be listed. The kernel looks up all names afresh, which brings attributes
/// too, and an inode that is reached without a name is open.
pub fn queue_invalidation(
    store: &Store,
    session: &ServedSession,
    inode: InodeId,
    scope: LeaseScope,
) -> Option<Arc<dyn KernelTicket>> {
    let notifier = session.notifier.clone()?;
    // The kernel's cache of a directory's files can't be listed either.
    let subtree = scope != LeaseScope::Node;
    let stale = |inode: InodeId, subtree| {
        let found = store.inode(inode).ok().flatten();
        StaleCache { inode, data: found.is_some_and(|found| !found.is_directory()), subtree }
    };
    let is_below = |open: &InodeId| *open != inode && is_below(&Ancestors(store), *open, inode);
    let open = if subtree { session.control.open_inodes() } else { Vec::new() };
    let open: Vec<_> = open.into_iter().filter(is_below).map(|open| stale(open, false)).collect();
    // It is queued behind the others, so its ticket stands for all of them. Names need no notification: kernels keep
    // none while there is more than one session.
    Some(notifier.queue_stale(&open, stale(inode, subtree)))
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
