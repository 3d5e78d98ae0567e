//! Directories that a session is told before it asks for them: one that goes through a tree asks for one directory after the other.
//!
//! As a kernel reads a file ahead. What comes after a directory is what one comes to next who looks into each directory before those beside
//! it, by name or in the order of a listing. A session that asks for the one that comes after the last is told of some more with it, and of what is
//! in them; each time it has used those up, of more. One that asks for any other begins anew. Nothing is taken from anybody who may have written
//! there: where the next directory is somebody's, the session will have to ask.

use std::collections::{HashMap, VecDeque};

use ashlar_store::{Store, StoreError};
use ashlar_types::{FileKind, InodeId, SessionId};
use ashlar_wire::{Need, ScopeKind, SessionKind, Want};

use crate::leasing::{Ancestors, home_of};
use crate::looked;
use crate::session::Session;
use crate::state::State;

/// How many more a session is told of when it goes on for the first time, how that grows, and the most. Each takes two leases, of which there may be 64
/// in one answer.
const FIRST: usize = 4;
const GROWTH: usize = 4;
const MOST: usize = 30;
/// The most where it is told what is in the files too.
const MOST_READ: usize = 4;
/// Entries of the directories that one answer tells of ahead.
const ENTRIES_MAX: u64 = 1024;
/// Where the directories of a larger one are is not looked for.
const SIBLINGS_MAX: u64 = 256;
/// How far up it is looked for where a directory is.
const DEPTH_MAX: usize = 64;
/// A program may leave out so many.
const SKIPPED_MAX: usize = 2;

/// Walks that are remembered: as many as threads go through a tree at the same time.
const WALKS_MAX: usize = 32;

/// The ways on which a session goes through trees, the last one first.
#[derive(Debug, Default)]
pub struct Walks(VecDeque<Walk>);

/// One of them.
#[derive(Debug)]
struct Walk {
    /// The last directory that was asked for or told of ahead, and those that it is in, up to the root.
    above: Vec<InodeId>,
    order: Order,
    /// How many were told of ahead with the last question.
    window: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Name = 0,
    Listing = 1,
}

/// The directories below directories, in both orders, as far as they were looked for.
struct Tree<'a> {
    store: &'a Store,
    below: HashMap<InodeId, [Vec<InodeId>; 2]>,
}

impl<'a> Tree<'a> {
    fn new(store: &'a Store) -> Self {
        Self { store, below: HashMap::new() }
    }

    fn below(&mut self, directory: InodeId, order: Order) -> Result<&[InodeId], StoreError> {
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

    /// The directory that comes after this one.
    fn after(&mut self, directory: InodeId, order: Order) -> Result<Option<InodeId>, StoreError> {
        if let Some(first) = self.below(directory, order)?.first() {
            return Ok(Some(*first));
        }
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(found) = self.store.inode(at)?.filter(|found| found.parent != at) else { return Ok(None) };
            let beside = self.below(found.parent, order)?;
            let next = beside.iter().position(|one| *one == at).and_then(|place| beside.get(place + 1));
            if next.is_some() {
                return Ok(next.copied());
            }
            at = found.parent;
        }
        Ok(None)
    }

    /// The first of the walks that a directory goes on with, and in which order.
    fn find(
        &mut self,
        walks: &VecDeque<Walk>,
        directory: InodeId,
        parent: InodeId,
    ) -> Result<Option<(usize, Order)>, StoreError> {
        for (place, walk) in walks.iter().enumerate() {
            for order in [Order::Name, Order::Listing] {
                let may_be_its = walk.window == 0 || order == walk.order;
                if may_be_its && self.goes_on(walk, directory, parent, order)? {
                    return Ok(Some((place, order)));
                }
            }
        }
        Ok(None)
    }

    /// Whether a directory in `parent` comes after the last one of a walk, or nearly so: it is one of the first in that one, or behind it or one that
    /// it is in.
    fn goes_on(&mut self, walk: &Walk, directory: InodeId, parent: InodeId, order: Order) -> Result<bool, StoreError> {
        let Some(depth) = walk.above.iter().position(|above| *above == parent) else { return Ok(false) };
        let beside = self.below(parent, order)?;
        let place = |wanted: InodeId| beside.iter().position(|one| *one == wanted);
        let from = match depth.checked_sub(1) {
            None => Some(0),
            Some(inner) => place(walk.above[inner]).map(|place| place + 1),
        };
        Ok(from.zip(place(directory)).is_some_and(|(from, place)| (from..=from + SKIPPED_MAX).contains(&place)))
    }
}

/// Adds to what a session asks for what it is likely to ask for next.
pub fn look_ahead(state: &mut State, id: SessionId, wants: &mut Vec<Want>) {
    // A kernel would have to be told of each that is taken back.
    let is_process = |session: &Session| session.identity.kind == SessionKind::Process;
    if wants.len() > 2 || !state.sessions.get(&id).is_some_and(is_process) {
        return;
    }
    let Some((place, directory)) =
        wants.iter().enumerate().find_map(|(place, want)| Some((place, looks_into(state, want)?)))
    else {
        return;
    };
    let reads = wants[place].need.contents;
    let mut walks = state.sessions.get_mut(&id).map(|session| std::mem::take(&mut session.walks)).unwrap_or_default();
    // Where the shared area can't be read, the request itself will show it.
    let ahead = next(state, id, &mut walks.0, directory, if reads { MOST_READ } else { MOST }).unwrap_or_default();
    for told in &ahead {
        let is_first = *told == directory;
        if !is_first {
            let need = Need { entries: true, children: true, xattrs: true, contents: false };
            wants.push(Want { inode: *told, write: false, scope: ScopeKind::Node, need });
        }
        let asked = Some(wants[place].inode).filter(|asked| is_first && *asked != directory);
        let Some((file, entries)) = file_of(state, id, *told, asked) else { continue };
        if let Some(session) = state.sessions.get_mut(&id) {
            session.looked.foresee(*told, entries);
        }
        if asked.is_some() {
            wants[place].scope = ScopeKind::Files;
        } else {
            let need = Need { xattrs: true, contents: reads, ..Need::default() };
            wants.push(Want { inode: file, write: false, scope: ScopeKind::Files, need });
        }
    }
    if let Some(session) = state.sessions.get_mut(&id) {
        session.walks = walks;
    }
}

/// The directory that a session looks into which wants this: itself, or the one of a file.
fn looks_into(state: &State, want: &Want) -> Option<InodeId> {
    if want.write || want.scope == ScopeKind::Subtree || want.need == Need::default() {
        return None;
    }
    if want.need.children {
        return Some(want.inode);
    }
    let found = state.store.inode(want.inode).ok()??;
    home_of(want.inode, &found).as_file()
}

/// How a walk goes on with a directory that is asked for: which ones to tell of, that one among them.
fn next(
    state: &State,
    id: SessionId,
    walks: &mut VecDeque<Walk>,
    asked: InodeId,
    most: usize,
) -> Result<Vec<InodeId>, StoreError> {
    let store = &state.store;
    if walks.iter().any(|walk| walk.above[0] == asked) {
        return Ok(Vec::new());
    }
    let Some(parent) = store.inode(asked)?.map(|found| found.parent) else { return Ok(Vec::new()) };
    let mut tree = Tree::new(store);
    let Some((place, order)) = tree.find(walks, asked, parent)? else {
        walks.truncate(WALKS_MAX - 1);
        walks.push_front(Walk { above: above(store, asked)?, order: Order::Name, window: 0 });
        return Ok(Vec::new());
    };
    let window = walks.remove(place).map_or(0, |walk| walk.window);
    let window = if window == 0 { FIRST } else { window * GROWTH }.min(most);
    let (mut told, mut last, mut entries) = (vec![asked], asked, 0);
    while told.len() <= window {
        let Some(directory) = tree.after(last, order)? else { break };
        entries += store.inode(directory)?.map_or(0, |found| found.entries);
        if entries > ENTRIES_MAX || !state.leasing.manager.is_free_to_read(id, directory, &Ancestors(store)) {
            break;
        }
        told.push(directory);
        last = directory;
    }
    walks.push_front(Walk { above: above(store, last)?, order, window });
    Ok(told)
}

/// A directory, and those that it is in.
fn above(store: &Store, directory: InodeId) -> Result<Vec<InodeId>, StoreError> {
    let (mut above, mut at) = (vec![directory], directory);
    while above.len() < DEPTH_MAX {
        let Some(found) = store.inode(at)?.filter(|found| found.parent != at) else { break };
        at = found.parent;
        above.push(at);
    }
    Ok(above)
}

/// A file that stands for all of its directory that have no lease of their own, and how many entries that has: `asked`, or any. `None` where there is
/// none, or a lease of the session's on the whole directory covers them.
fn file_of(state: &State, id: SessionId, directory: InodeId, asked: Option<InodeId>) -> Option<(InodeId, u64)> {
    let (store, manager) = (&state.store, &state.leasing.manager);
    let entries = store.inode(directory).ok()??.entries;
    if entries > looked::LISTED || manager.has_below(id, directory, &Ancestors(store)) {
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
