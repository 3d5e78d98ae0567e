//! Grants directories ahead to a session that walks through a tree.
//!
//! The session reads one directory after the other. This resembles a kernel that reads a file ahead. The next directory
//! is the one that a depth-first walk visits next, by name or in the order of a listing. When a session asks for the
//! one after its last, it is granted some more with it, and their files. Each time it has used those up, it is granted
//! more. A session that asks for any other directory begins anew. No lease is taken from a session that may have
//! written there: if another session holds the next directory, the walking session must ask.

use std::collections::{HashMap, VecDeque};

use ashlar_store::{Store, StoreError};
use ashlar_types::{FileKind, InodeId, LeaseMode, LeaseScope, SessionId, WantedLease};
use ashlar_wire::{LeaseRequest, Need, SessionKind};

use crate::leases::leasing::{Ancestors, home_of};
use crate::leases::scan_detection;
use crate::node::Node;
use crate::sessions::session::ServedSession;

/// How many directories a session is granted ahead: at first, growth, at most.
///
/// Each takes two leases, and one answer holds at most 64.
const FIRST: usize = 4;
const GROWTH: usize = 4;
const MOST: usize = 30;
/// The most if the contents of files go along too.
const MOST_READ: usize = 4;
/// The most entries of the directories that one answer grants ahead.
const ENTRIES_MAX: u64 = 1024;
/// SharedFS does not search a larger directory for its subdirectories.
const SIBLINGS_MAX: u64 = 256;
/// How many levels up SharedFS searches for the position of a directory.
const DEPTH_MAX: usize = 64;
/// A program may leave out so many directories.
const SKIPPED_MAX: usize = 2;

/// The most walks remembered.
///
/// As many threads may walk through trees at the same time.
const WALKS_MAX: usize = 32;

/// A session's walks through trees, the latest first.
#[derive(Debug, Default)]
pub struct TreeWalks(VecDeque<TreeWalk>);

/// One walk through a tree.
#[derive(Debug)]
struct TreeWalk {
    /// The last directory that was asked for or granted ahead, and its ancestors.
    above: Vec<InodeId>,
    order: Order,
    /// How many directories the last request granted ahead.
    window: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Name = 0,
    Listing = 1,
}

/// The subdirectories of directories, in both orders, as far as they were searched.
struct Tree<'a> {
    store: &'a Store,
    below: HashMap<InodeId, [Vec<InodeId>; 2]>,
}

impl<'a> Tree<'a> {
    fn new(store: &'a Store) -> Self {
        Self { store, below: HashMap::new() }
    }

    fn subdirectories(&mut self, directory: InodeId, order: Order) -> Result<&[InodeId], StoreError> {
        if !self.below.contains_key(&directory) {
            let is_small = self.store.inode(directory)?.is_some_and(|found| found.entries <= SIBLINGS_MAX);
            let mut entries = if is_small { self.store.entries(directory, 0, usize::MAX)? } else { Vec::new() };
            entries.retain(|(_, _, entry)| entry.kind == FileKind::Directory);
            let listed = entries.iter().map(|(_, _, entry)| entry.inode).collect();
            entries.sort_unstable_by(|one, other| one.1.as_bytes().cmp(other.1.as_bytes()));
            let by_name = entries.into_iter().map(|(_, _, entry)| entry.inode).collect();
            self.below.insert(directory, [by_name, listed]);
        }
        Ok(self.below.get(&directory).map_or(&[], |orders| &orders[order as usize]))
    }

    /// Returns the directory that a walk visits after this one.
    fn next_after(&mut self, directory: InodeId, order: Order) -> Result<Option<InodeId>, StoreError> {
        if let Some(first) = self.subdirectories(directory, order)?.first() {
            return Ok(Some(*first));
        }
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(found) = self.store.inode(at)?.filter(|found| found.parent != at) else { return Ok(None) };
            let beside = self.subdirectories(found.parent, order)?;
            let next = beside.iter().position(|one| *one == at).and_then(|place| beside.get(place + 1));
            if next.is_some() {
                return Ok(next.copied());
            }
            at = found.parent;
        }
        Ok(None)
    }

    /// Returns the first walk that this directory continues, and in which order.
    fn find_walk(
        &mut self,
        walks: &VecDeque<TreeWalk>,
        directory: InodeId,
        parent: InodeId,
    ) -> Result<Option<(usize, Order)>, StoreError> {
        for (place, walk) in walks.iter().enumerate() {
            for order in [Order::Name, Order::Listing] {
                let may_be_its = walk.window == 0 || order == walk.order;
                if may_be_its && self.continues_walk(walk, directory, parent, order)? {
                    return Ok(Some((place, order)));
                }
            }
        }
        Ok(None)
    }

    /// Returns whether a directory in `parent` continues a walk, or nearly so.
    ///
    /// It must be one of the first in the walk's last directory, or come soon behind that one or its ancestors.
    fn continues_walk(
        &mut self,
        walk: &TreeWalk,
        directory: InodeId,
        parent: InodeId,
        order: Order,
    ) -> Result<bool, StoreError> {
        let Some(depth) = walk.above.iter().position(|above| *above == parent) else { return Ok(false) };
        let beside = self.subdirectories(parent, order)?;
        let place = |wanted: InodeId| beside.iter().position(|one| *one == wanted);
        let from = match depth.checked_sub(1) {
            None => Some(0),
            Some(inner) => place(walk.above[inner]).map(|place| place + 1),
        };
        Ok(from.zip(place(directory)).is_some_and(|(from, place)| (from..=from + SKIPPED_MAX).contains(&place)))
    }
}

/// Adds to a session's wants the leases that it is likely to ask for next.
pub fn add_read_ahead(state: &mut Node, id: SessionId, wants: &mut Vec<LeaseRequest>) {
    // A mount's kernel would have to be notified of each lease that is taken back.
    let is_process = |session: &ServedSession| session.identity.kind == SessionKind::Process;
    if wants.len() > 2 || !state.sessions.get(&id).is_some_and(is_process) {
        return;
    }
    let Some((place, directory)) =
        wants.iter().enumerate().find_map(|(place, want)| Some((place, directory_of_want(state, want)?)))
    else {
        return;
    };
    let reads = wants[place].need.contents;
    let mut walks = state.sessions.get_mut(&id).map(|session| std::mem::take(&mut session.walks)).unwrap_or_default();
    // If the shared area can't be read, the request itself will show that.
    let ahead =
        continue_walk(state, id, &mut walks.0, directory, if reads { MOST_READ } else { MOST }).unwrap_or_default();
    for granted in &ahead {
        let is_first = *granted == directory;
        if !is_first {
            let need = Need { entries: true, children: true, xattrs: true, contents: false };
            wants.push(LeaseRequest::on_inode(*granted, false, need));
        }
        let asked = Some(wants[place].lease.inode).filter(|asked| is_first && *asked != directory);
        let Some((file, entries)) = representative_file(state, id, *granted, asked) else { continue };
        if let Some(session) = state.sessions.get_mut(&id) {
            session.scans.expect_scan(*granted, entries);
        }
        if asked.is_some() {
            wants[place].lease.scope = LeaseScope::Files;
        } else {
            let need = Need { xattrs: true, contents: reads, ..Need::default() };
            let lease = WantedLease { inode: file, mode: LeaseMode::Read, scope: LeaseScope::Files };
            wants.push(LeaseRequest { lease, need });
        }
    }
    if let Some(session) = state.sessions.get_mut(&id) {
        session.walks = walks;
    }
}

/// Returns the directory that a session with this want reads.
///
/// It is the wanted one, or a wanted file's.
fn directory_of_want(state: &Node, want: &LeaseRequest) -> Option<InodeId> {
    if want.lease.mode.is_write() || want.lease.scope == LeaseScope::Subtree || want.need == Need::default() {
        return None;
    }
    if want.need.children {
        return Some(want.lease.inode);
    }
    let found = state.store.inode(want.lease.inode).ok()??;
    home_of(want.lease.inode, &found).as_file()
}

/// Continues a walk with a directory that is asked for.
///
/// Returns the directories to grant, with that one.
fn continue_walk(
    state: &Node,
    id: SessionId,
    walks: &mut VecDeque<TreeWalk>,
    asked: InodeId,
    most: usize,
) -> Result<Vec<InodeId>, StoreError> {
    let store = &state.store;
    if walks.iter().any(|walk| walk.above[0] == asked) {
        return Ok(Vec::new());
    }
    let Some(parent) = store.inode(asked)?.map(|found| found.parent) else { return Ok(Vec::new()) };
    let mut tree = Tree::new(store);
    let Some((place, order)) = tree.find_walk(walks, asked, parent)? else {
        walks.truncate(WALKS_MAX - 1);
        walks.push_front(TreeWalk { above: with_ancestors(store, asked)?, order: Order::Name, window: 0 });
        return Ok(Vec::new());
    };
    let window = walks.remove(place).map_or(0, |walk| walk.window);
    let window = if window == 0 { FIRST } else { window * GROWTH }.min(most);
    let (mut granted, mut last, mut entries) = (vec![asked], asked, 0);
    while granted.len() <= window {
        let Some(directory) = tree.next_after(last, order)? else { break };
        entries += store.inode(directory)?.map_or(0, |found| found.entries);
        if entries > ENTRIES_MAX || !state.leasing.manager.is_free_to_read(id, directory, &Ancestors(store)) {
            break;
        }
        granted.push(directory);
        last = directory;
    }
    walks.push_front(TreeWalk { above: with_ancestors(store, last)?, order, window });
    Ok(granted)
}

/// Returns a directory and its ancestors.
fn with_ancestors(store: &Store, directory: InodeId) -> Result<Vec<InodeId>, StoreError> {
    let (mut above, mut at) = (vec![directory], directory);
    while above.len() < DEPTH_MAX {
        let Some(found) = store.inode(at)?.filter(|found| found.parent != at) else { break };
        at = found.parent;
        above.push(at);
    }
    Ok(above)
}

/// Returns a file that stands for the files of its directory.
///
/// It stands for those without a lease of their own. The directory's entry count comes with it. It is `asked`, if
/// given, or any file. `None` if there is none, or the session's lease on the whole directory covers them.
fn representative_file(
    state: &Node,
    id: SessionId,
    directory: InodeId,
    asked: Option<InodeId>,
) -> Option<(InodeId, u64)> {
    let (store, manager) = (&state.store, &state.leasing.manager);
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
