//! A session's walks through directory trees, and where each goes next.

use std::collections::{HashMap, VecDeque};

use ashlar_store::{Store, StoreError};
use ashlar_types::{FileKind, InodeId};

/// How many directories a session is granted ahead: at first, growth, at most.
///
/// Each takes two leases, and one answer holds at most 64.
const FIRST: usize = 4;
const GROWTH: usize = 4;
/// The most at all.
pub const MOST: usize = 30;
/// The most if the contents of files go along too.
pub const MOST_READ: usize = 4;
/// The most entries of the directories that one answer grants ahead.
const ENTRIES_MAX: u64 = 1024;
/// SharedFS does not search a larger directory for its subdirectories.
const SIBLINGS_MAX: u64 = 256;
/// How many levels up SharedFS searches for the position of a directory.
const DEPTH_MAX: usize = 64;
/// A program may leave out so many directories.
pub const SKIPPED_MAX: usize = 2;

/// The most walks remembered.
///
/// As many threads may walk through trees at the same time.
const WALKS_MAX: usize = 32;

/// A session's walks through trees, the latest first.
#[derive(Debug, Default)]
pub struct TreeWalks(VecDeque<TreeWalk>);

impl TreeWalks {
    /// Continues a walk with a directory that is asked for.
    ///
    /// Returns the directories to grant, with that one, as far as they may be granted.
    pub fn continue_walk(
        &mut self,
        store: &Store,
        asked: InodeId,
        most: usize,
        may_grant: impl Fn(InodeId) -> bool,
    ) -> Result<Vec<InodeId>, StoreError> {
        let Self(walks) = self;
        if walks.iter().any(|walk| walk.above[0] == asked) {
            return Ok(Vec::new());
        }
        let Some(parent) = store.inode(asked)?.map(|found| found.parent) else { return Ok(Vec::new()) };
        let mut tree = WalkedTree::new(store);
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
            if entries > ENTRIES_MAX || !may_grant(directory) {
                break;
            }
            granted.push(directory);
            last = directory;
        }
        walks.push_front(TreeWalk { above: with_ancestors(store, last)?, order, window });
        Ok(granted)
    }
}

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
struct WalkedTree<'a> {
    store: &'a Store,
    below: HashMap<InodeId, [Vec<InodeId>; 2]>,
}

impl<'a> WalkedTree<'a> {
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
