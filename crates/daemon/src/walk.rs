//! Directories that a session is told before it asks for them: one that goes through a tree asks for one directory after the other.
//!
//! As a kernel reads a file ahead. What comes after a directory is what one comes to next who looks into each directory before those beside
//! it, by name or in the order of a listing. A session that asks for the one that comes after the last is told of some more with it, and of what is
//! in them; each time it has used those up, of more. One that asks for any other begins anew. Nothing is taken from anybody who may have written
//! there: where the next directory is somebody's, the session will have to ask.

use std::collections::HashMap;

use ashlar_store::{Store, StoreError};
use ashlar_types::{FileKind, Inode, InodeId, SessionId};
use ashlar_wire::{Need, ScopeKind, SessionKind, Want};

use crate::leasing::{Ancestors, home_of};
use crate::looked;
use crate::state::State;

/// How many more a session is told of when it goes on for the first time, how that grows, and the most. Each takes two leases, of which there may be 64
/// in one answer.
const FIRST: usize = 4;
const GROWTH: usize = 4;
const MOST: usize = 30;
/// Entries of the directories that one answer tells of ahead.
const ENTRIES_MAX: u64 = 1024;
/// Where the directories of a larger one are is not looked for.
const SIBLINGS_MAX: u64 = 512;
/// How far up it is looked for where a directory is.
const DEPTH_MAX: usize = 64;
/// A program may leave out so many.
const SKIPPED_MAX: usize = 2;

/// The way that a session goes through a tree.
#[derive(Debug, Default)]
pub struct Walk {
    /// The last directory that it asked for or was told of ahead.
    last: Option<InodeId>,
    order: Order,
    /// How many it was told of ahead with the last question.
    window: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Name,
    Listing,
}

/// The directories below directories, in one order, as far as they were looked for.
struct Tree<'a> {
    store: &'a Store,
    order: Order,
    below: HashMap<InodeId, Vec<InodeId>>,
}

impl<'a> Tree<'a> {
    fn new(store: &'a Store, order: Order) -> Self {
        Self { store, order, below: HashMap::new() }
    }

    fn below(&mut self, directory: InodeId) -> Result<&[InodeId], StoreError> {
        if !self.below.contains_key(&directory) {
            let is_small = |found: Option<Inode>| found.is_some_and(|found| found.entries <= SIBLINGS_MAX);
            let mut entries = if is_small(self.store.inode(directory)?) {
                self.store.entries(directory, 0, usize::MAX)?
            } else {
                Vec::new()
            };
            entries.retain(|(_, _, entry)| entry.kind == FileKind::Directory);
            if self.order == Order::Name {
                entries.sort_unstable_by(|one, other| one.1.as_bytes().cmp(other.1.as_bytes()));
            }
            self.below.insert(directory, entries.into_iter().map(|(_, _, entry)| entry.inode).collect());
        }
        Ok(self.below.get(&directory).map_or(&[], Vec::as_slice))
    }

    /// The directory that comes after this one.
    fn after(&mut self, directory: InodeId) -> Result<Option<InodeId>, StoreError> {
        if let Some(first) = self.below(directory)?.first() {
            return Ok(Some(*first));
        }
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            let Some(found) = self.store.inode(at)?.filter(|found| found.parent != at) else { return Ok(None) };
            let beside = self.below(found.parent)?;
            let next = beside.iter().position(|one| *one == at).and_then(|place| beside.get(place + 1));
            if next.is_some() {
                return Ok(next.copied());
            }
            at = found.parent;
        }
        Ok(None)
    }

    /// Whether a directory comes after another one, or nearly so.
    fn comes_after(&mut self, directory: InodeId, before: InodeId) -> Result<bool, StoreError> {
        let mut at = before;
        for _ in 0..=SKIPPED_MAX {
            match self.after(at)? {
                Some(next) if next == directory => return Ok(true),
                Some(next) => at = next,
                None => break,
            }
        }
        Ok(false)
    }
}

/// Adds to what a session asks for what it is likely to ask for next.
pub fn look_ahead(state: &mut State, id: SessionId, wants: &mut Vec<Want>) {
    let is_directory = |want: &&Want| !want.write && want.scope == ScopeKind::Node && want.need.children;
    let (Some(asked), true) = (wants.iter().find(is_directory).map(|want| want.inode), wants.len() <= 2) else {
        return;
    };
    let Some(session) = state.sessions.get_mut(&id) else { return };
    // A kernel would have to be told of each that is taken back.
    if session.identity.kind != SessionKind::Process {
        return;
    }
    let walk = std::mem::take(&mut session.walk);
    // Where the shared area can't be read, the request itself will show it.
    let (walk, ahead) = next(state, id, walk, asked).unwrap_or_default();
    for directory in &ahead {
        let need = Need { entries: true, children: true, xattrs: true, contents: false };
        if *directory != asked {
            wants.push(Want { inode: *directory, write: false, scope: ScopeKind::Node, need });
        }
        if let Some((file, entries)) = file_of(state, id, *directory) {
            if let Some(session) = state.sessions.get_mut(&id) {
                session.looked.foresee(*directory, entries);
            }
            let need = Need { xattrs: true, ..Need::default() };
            wants.push(Want { inode: file, write: false, scope: ScopeKind::Files, need });
        }
    }
    if let Some(session) = state.sessions.get_mut(&id) {
        session.walk = walk;
    }
}

/// How a walk goes on with a directory that is asked for, and which ones to tell of, that one among them.
fn next(state: &State, id: SessionId, walk: Walk, asked: InodeId) -> Result<(Walk, Vec<InodeId>), StoreError> {
    let begins = Walk { last: Some(asked), ..Walk::default() };
    let Some(last) = walk.last.filter(|last| *last != asked) else { return Ok((begins, Vec::new())) };
    if !is_near(&state.store, asked, last)? {
        return Ok((begins, Vec::new()));
    }
    let orders: &[Order] = if walk.window == 0 { &[Order::Name, Order::Listing] } else { &[walk.order] };
    for order in orders {
        let mut tree = Tree::new(&state.store, *order);
        if !tree.comes_after(asked, last)? {
            continue;
        }
        let window = if walk.window == 0 { FIRST } else { (walk.window * GROWTH).min(MOST) };
        let (mut told, mut entries) = (vec![asked], 0);
        while told.len() <= window {
            let Some(directory) = tree.after(told[told.len() - 1])? else { break };
            entries += state.store.inode(directory)?.map_or(0, |found| found.entries);
            if entries > ENTRIES_MAX || !state.leasing.manager.is_free_to_read(id, directory, &Ancestors(&state.store))
            {
                break;
            }
            told.push(directory);
        }
        return Ok((Walk { last: told.last().copied(), order: *order, window }, told));
    }
    Ok((begins, Vec::new()))
}

/// Whether a directory is in another one, or beside it or one of those that it is in: what comes after it is.
fn is_near(store: &Store, directory: InodeId, other: InodeId) -> Result<bool, StoreError> {
    let Some(parent) = store.inode(directory)?.map(|found| found.parent) else { return Ok(false) };
    let mut at = other;
    for _ in 0..DEPTH_MAX {
        if at == parent {
            return Ok(true);
        }
        match store.inode(at)? {
            Some(found) if found.parent != at => at = found.parent,
            _ => break,
        }
    }
    Ok(false)
}

/// A file that stands for all of its directory that have no lease of their own, and how many entries that has; `None` where there is none, or a lease
/// of the session's on the whole directory covers them.
fn file_of(state: &State, id: SessionId, directory: InodeId) -> Option<(InodeId, u64)> {
    let (store, manager) = (&state.store, &state.leasing.manager);
    let entries = store.inode(directory).ok()??.entries;
    if entries > looked::LISTED || manager.has_below(id, directory, &Ancestors(store)) {
        return None;
    }
    let all = store.entries(directory, 0, usize::MAX).ok()?;
    let stands = |file: InodeId| {
        let home = store.inode(file).ok().flatten().map(|found| home_of(file, &found));
        home.is_some_and(|home| manager.is_among_files(directory, file, home))
            && manager.is_free_to_read(id, file, &Ancestors(store))
    };
    let files =
        all.into_iter().filter(|(_, _, entry)| entry.kind == FileKind::Regular).map(|(_, _, entry)| entry.inode);
    files.take(SKIPPED_MAX + 1).find(|file| stands(*file)).map(|file| (file, entries))
}
