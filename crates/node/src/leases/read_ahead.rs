//! Grants directories ahead to a session that walks through a tree.
//!
//! The session reads one directory after the other. This resembles a kernel that reads a file ahead. The next directory
//! is the one that a depth-first walk visits next, by name or in the order of a listing. When a session asks for the
//! one after its last, it is granted some more with it, and their files. Each time it has used those up, it is granted
//! more. A session that asks for any other directory begins anew. No lease is taken from a session that may have
//! written there: if another session holds the next directory, the walking session must ask.

use ashlar_lease::LeaseManager;
use ashlar_store::Store;
use ashlar_types::{FileKind, InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};
use ashlar_wire::{LeaseRequest, Need, SessionKind};

use crate::leases::leasing::{Ancestors, home_of};
use crate::leases::scan_detection;
use crate::leases::tree_walks::{MOST, MOST_READ, SKIPPED_MAX};
use crate::sessions::session::ServedSession;

/// Adds to a session's wants the leases that it is likely to ask for next.
pub fn add_read_ahead(
    store: &Store,
    manager: &LeaseManager,
    session: &mut ServedSession,
    wants: &mut Vec<LeaseRequest>,
) {
    // A mount's kernel would have to be notified of each lease that is taken back.
    if wants.len() > 2 || session.identity.kind != SessionKind::Process {
        return;
    }
    let Some((place, directory)) =
        wants.iter().enumerate().find_map(|(place, want)| Some((place, directory_of_want(store, want)?)))
    else {
        return;
    };
    let reads = wants[place].need.contents;
    let (id, most) = (session.id, if reads { MOST_READ } else { MOST });
    let may_grant = |directory| manager.is_free_to_read(id, directory, &Ancestors(store));
    // If the shared area can't be read, the request itself will show that.
    let ahead = session.walks.continue_walk(store, directory, most, may_grant).unwrap_or_default();
    for granted in &ahead {
        let is_first = *granted == directory;
        if !is_first {
            let need = Need { entries: true, children: true, xattrs: true, contents: false };
            wants.push(LeaseRequest::on_inode(*granted, false, need));
        }
        let asked = Some(wants[place].lease.inode).filter(|asked| is_first && *asked != directory);
        let Some((file, entries)) = representative_file(store, manager, id, *granted, asked) else { continue };
        session.scans.expect_scan(*granted, entries);
        if asked.is_some() {
            wants[place].lease.scope = LeaseScope::Files;
        } else {
            let need = Need { xattrs: true, contents: reads, ..Need::default() };
            let lease = WantedLease { inode: file, mode: LeaseMode::Read, scope: LeaseScope::Files };
            wants.push(LeaseRequest { lease, need });
        }
    }
}

/// Returns the directory that a session with this want reads.
///
/// It is the wanted one, or a wanted file's.
fn directory_of_want(store: &Store, want: &LeaseRequest) -> Option<InodeId> {
    if want.lease.mode.is_write() || want.lease.scope == LeaseScope::Subtree || want.need == Need::default() {
        return None;
    }
    if want.need.children {
        return Some(want.lease.inode);
    }
    let found = store.inode(want.lease.inode).ok()??;
    home_of(want.lease.inode, &found).as_file()
}

/// Returns a file that stands for the files of its directory.
///
/// It stands for those without a lease of their own. The directory's entry count comes with it. It is `asked`, if
/// given, or any file. `None` if there is none, or the session's lease on the whole directory covers them.
fn representative_file(
    store: &Store,
    manager: &LeaseManager,
    id: SessionId,
    directory: InodeId,
    asked: Option<InodeId>,
) -> Option<(InodeId, u64)> {
    let entries = store.inode(directory).ok()??.entries;
    if entries > scan_detection::LISTED_ENTRIES_MAX || manager.has_below(id, directory, &Ancestors(store)) {
        return None;
    }
    let stands = |file: InodeId| {
        let home = store.inode(file).ok().flatten().map(|found| home_of(file, &found));
        home.is_some_and(|home| manager.is_among_files(directory, file, home))
            && manager.is_free_to_read(id, file, &Ancestors(store))
    };
    if asked.is_some() {
        return asked.filter(|file| stands(*file)).map(|file| (file, entries));
    }
    let all = store.entries(directory, 0, usize::MAX).ok()?.into_iter();
    let files = all.filter(|(_, _, entry)| entry.kind == FileKind::Regular).map(|(_, _, entry)| entry.inode);
    files.take(SKIPPED_MAX + 1).find(|file| stands(*file)).map(|file| (file, entries))
}
