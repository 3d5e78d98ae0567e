//! Checks which inodes a session's user comes to, and which parts of them it may be shown.
//!
//! A session names inodes by number. An ordinary program names them by paths, and the kernel asks for the right to
//! search each directory on the way. So SharedFS asks for these rights before it grants anything on a number.
//!
//! - A session *reaches* an inode if its user may search all directories that lead to it from the root.
//! - It reaches an inode that it has open if that was so at any time since the session began, as a process keeps its
//!   open files. SharedFS notes when a directory is narrowed or moved until when each user could search it (a *cut*).
//!   That leaves out inodes that were made or moved there after the cut: no handle can stem from before.
//! - It reaches an open inode that is renamed or loses its last name if it reached it before. That is noted as a kept
//!   right ([`KeptRights`]), which a later SharedFS finds. So are the ways to open inodes that a cut ends, as far as
//!   they are soon found.
//! - A file with several names has one directory in its attributes, which may be none of those. A user that has looked
//!   up a name of it, or reached it before a name was made or removed, reaches it until any directory is narrowed.
//!
//! A record needs no open file: its session had the lease, and may have closed the file since. So a record counts if
//! the session reached the inode at any time since it began.
//!
//! These results are kept until a directory is narrowed or moved (another *version* of the ways). So a check takes a
//! look into a table, and a walk up to the root only for the first inode of a directory.
//!
//! Non-goals: the super-user's sessions and mounts, whose users the kernel has checked.
//!
//! [`KeptRights`]: crate::sessions::kept_rights::KeptRights

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasherDefault;

use ashlar_store::{Store, StoreError};
use ashlar_types::{Access, Credentials, Inode, InodeHasher, InodeId};
use ashlar_update::Update;
use ashlar_update::acl::Acl;
use ashlar_update::permission::allows;

use crate::access::rights::access_acl;
use crate::access::way_changes::{WayChange, changed_inodes, changed_ways, is_link, placed_inodes};
use crate::records::validate::{RecordRefusal, Violation};
use crate::sessions::session::ServedSession;

/// The most directories between an inode and the root. The kernel serves what lies deeper.
const DEPTH_MAX: usize = 4096;
/// The most entries in each table of a user. A table that is full begins anew.
const KNOWN_MAX: usize = 1 << 17;
/// The most entries of the root among which SharedFS searches for files.
const ROOT_ENTRIES_MAX: u64 = 1 << 16;

/// The names of extended attributes whose values only readers see.
pub const USER_PREFIX: &[u8] = b"user.";
/// The names of extended attributes that only the super-user sees.
pub const TRUSTED_PREFIX: &[u8] = b"trusted.";

type Versions = HashMap<InodeId, u64, BuildHasherDefault<InodeHasher>>;

/// The user or users for which a way is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Viewer {
    /// One user.
    User(Credentials),
    /// Every user: what is allowed to each of them.
    Everyone,
}

impl Viewer {
    fn allows(&self, inode: &Inode, acl: Option<&Acl>, access: Access) -> bool {
        match self {
            Self::User(credentials) => allows(inode, acl, credentials, access),
            Self::Everyone => acl.is_none() && [6, 3, 0].iter().all(|class| inode.mode >> class & access.0 == access.0),
        }
    }
}

/// When inodes came to their places: a user that could go there before did not reach them.
///
/// It is noted while any directory is cut. A handle alone proves nothing: a session may claim it in advance.
#[derive(Debug, Default)]
struct Placings {
    /// The version in which each was made or got a name.
    versions: Versions,
    /// The same for all that are not noted.
    others: u64,
}

impl Placings {
    fn of(&self, inode: InodeId) -> u64 {
        self.versions.get(&inode).copied().unwrap_or(self.others)
    }

    fn note(&mut self, inode: InodeId, version: u64) {
        if self.versions.len() >= KNOWN_MAX {
            self.versions.clear();
            self.others = version;
        }
        self.versions.insert(inode, version);
    }
}

/// The ways that were checked for one viewer.
#[derive(Debug)]
struct ViewerWays {
    viewer: Viewer,
    /// Directories that it may search, as all above them, in this version of the ways.
    searched: Versions,
    /// Directories that were narrowed or moved, and the last version in which it could search them and all above.
    cuts: Versions,
    /// Inodes that it has reached otherwise than by the directory in their attributes, and the last such version.
    met: Versions,
}

/// The ways to inodes, as far as they were checked.
#[derive(Debug)]
pub struct Ways {
    version: u64,
    placings: Placings,
    viewers: RefCell<Vec<ViewerWays>>,
    /// The inodes in the root, once they were searched: a file whose directory is not known names the root instead.
    in_root: RefCell<Option<HashSet<InodeId, BuildHasherDefault<InodeHasher>>>>,
}

/// How much of an inode all of some viewers may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// Not even that it is there.
    Hidden,
    /// Its attributes.
    Attributes,
    /// Its attributes and its content or entries.
    All,
}

impl Default for Ways {
    fn default() -> Self {
        let (placings, viewers, in_root) = (Placings::default(), RefCell::default(), RefCell::default());
        Self { version: 1, placings, viewers, in_root }
    }
}

fn insert_bounded(table: &mut Versions, inode: InodeId, version: u64) {
    if table.len() >= KNOWN_MAX {
        table.clear();
    }
    table.insert(inode, version);
}

impl ViewerWays {
    fn new(viewer: Viewer) -> Self {
        let (searched, cuts, met) = (Versions::default(), Versions::default(), Versions::default());
        Self { viewer, searched, cuts, met }
    }

    /// Returns the last version in which the viewer could search a directory and all above it, as far as is known.
    ///
    /// That is the present one if it may now.
    fn walk_up(
        &mut self,
        store: &Store,
        (version, placings): (u64, &Placings),
        from: InodeId,
    ) -> Result<Option<u64>, StoreError> {
        let (mut passed, mut cut, mut placed, mut at) = (Vec::new(), None, 0, from);
        while self.searched.get(&at) != Some(&version) {
            cut = cut.max(self.cuts.get(&at).copied().filter(|last| *last >= placed));
            placed = placed.max(placings.of(at));
            let Some(found) = store.inode(at)?.filter(|found| found.is_directory() && found.links > 0) else {
                return Ok(cut);
            };
            if passed.len() == DEPTH_MAX
                || !self.viewer.allows(&found, access_acl(store, at)?.as_ref(), Access::EXECUTE)
            {
                return Ok(cut);
            }
            passed.push(at);
            if found.parent == at {
                break;
            }
            at = found.parent;
        }
        passed.into_iter().for_each(|directory| insert_bounded(&mut self.searched, directory, version));
        Ok(Some(version))
    }
}

impl Ways {
    /// Returns the present version of the ways.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns whether there is no user but the super-user.
    pub fn has_no_viewers(&self) -> bool {
        self.viewers.borrow().is_empty()
    }

    fn with_viewer<R>(&self, viewer: &Viewer, look: impl FnOnce(&mut ViewerWays) -> R) -> R {
        let mut viewers = self.viewers.borrow_mut();
        match viewers.iter_mut().find(|known| known.viewer == *viewer) {
            Some(known) => look(known),
            None => {
                let mut known = ViewerWays::new(viewer.clone());
                let seen = look(&mut known);
                viewers.push(known);
                seen
            }
        }
    }

    fn with_user<R>(&self, user: &Credentials, look: impl FnOnce(&mut ViewerWays) -> R) -> R {
        let is_it = |known: &&mut ViewerWays| matches!(&known.viewer, Viewer::User(credentials) if credentials == user);
        if let Some(known) = self.viewers.borrow_mut().iter_mut().find(is_it) {
            return look(known);
        }
        self.with_viewer(&Viewer::User(user.clone()), look)
    }

    /// Registers a user. Changes of directories from now on are noted for it.
    pub fn add_user(&self, user: &Credentials) {
        if !user.is_privileged() {
            self.with_user(user, |_| ());
        }
    }

    /// Forgets the users that are not among these.
    pub fn keep_viewers(&self, is_needed: impl Fn(&Viewer) -> bool) {
        self.viewers.borrow_mut().retain(|known| is_needed(&known.viewer));
    }

    /// Whether a file whose attributes name the root is there, or in a directory that is not known.
    fn is_in_root(&self, store: &Store, id: InodeId) -> Result<bool, StoreError> {
        let mut in_root = self.in_root.borrow_mut();
        if in_root.is_none() {
            let entries = store.inode(InodeId::ROOT)?.map_or(0, |root| root.entries);
            if entries > ROOT_ENTRIES_MAX {
                return Ok(false);
            }
            let all = store.entries(InodeId::ROOT, 0, usize::MAX)?;
            *in_root = Some(all.into_iter().map(|(_, _, entry)| entry.inode).collect());
        }
        Ok(in_root.as_ref().is_some_and(|known| known.contains(&id)))
    }

    /// Returns the directory in which an inode has a name, if its attributes tell.
    fn directory_of(&self, store: &Store, id: InodeId, found: &Inode) -> Result<Option<InodeId>, StoreError> {
        let is_known = found.is_directory() || found.parent != InodeId::ROOT || self.is_in_root(store, id)?;
        Ok((is_known && found.links > 0).then_some(found.parent))
    }

    /// Returns the last version in which a viewer reached an inode by a name, as far as is known.
    fn last_reached(
        &self,
        store: &Store,
        known: &mut ViewerWays,
        placings: &Placings,
        (id, found): (InodeId, &Inode),
    ) -> Result<Option<u64>, StoreError> {
        if id == InodeId::ROOT || id == InodeId::RENAME {
            return Ok(Some(self.version));
        }
        let met = known.met.get(&id).copied();
        if met == Some(self.version) {
            return Ok(met);
        }
        let by_directory = match self.directory_of(store, id, found)? {
            Some(directory) => known.walk_up(store, (self.version, placings), directory)?,
            None => None,
        };
        let by_directory = by_directory.filter(|last| *last >= placings.of(id));
        Ok(by_directory.max(met))
    }

    /// Returns what all of these viewers may see of an inode.
    pub fn visibility(
        &self,
        store: &Store,
        viewers: &[Viewer],
        (id, found): (InodeId, &Inode),
    ) -> Result<Visibility, StoreError> {
        let mut seen = Visibility::All;
        for viewer in viewers {
            let reached = self.with_viewer(viewer, |known| self.last_reached_now(store, known, (id, found)))?;
            if !reached {
                return Ok(Visibility::Hidden);
            }
            if !viewer.allows(found, access_acl(store, id)?.as_ref(), Access::READ) {
                seen = Visibility::Attributes;
            }
        }
        Ok(seen)
    }

    fn last_reached_now(
        &self,
        store: &Store,
        known: &mut ViewerWays,
        inode: (InodeId, &Inode),
    ) -> Result<bool, StoreError> {
        Ok(self.last_reached(store, known, &self.placings, inode)? == Some(self.version))
    }

    /// Notes until when all users could go ways that an update is about to change.
    pub fn record_cuts(&self, store: &Store, update: &Update<'_>) -> Result<(), StoreError> {
        let mut viewers = self.viewers.borrow_mut();
        for (id, becomes) in changed_ways(update) {
            let Some(found) = store.inode(id)? else { continue };
            let has_several = found.links > 1 || is_link(update);
            for known in viewers.iter_mut() {
                match becomes {
                    WayChange::Rights | WayChange::Named(Some(_)) if found.is_directory() => {
                        if let Some(last) = known.walk_up(store, (self.version, &self.placings), id)? {
                            insert_bounded(&mut known.cuts, id, last);
                        }
                    }
                    // Only one of its directories is known. A user that came by another one still may.
                    WayChange::Named(_) if has_several && !found.is_directory() => {
                        if let Some(last) = self.last_reached(store, known, &self.placings, (id, &found))? {
                            insert_bounded(&mut known.met, id, last);
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Takes note of an update that is applied. Returns whether any user may search less than before.
    pub fn record_applied(&mut self, store: &Store, update: &Update<'_>) -> Result<bool, StoreError> {
        if self.in_root.get_mut().is_some() {
            self.record_root(store, update)?;
        }
        let viewers = self.viewers.get_mut();
        if viewers.is_empty() {
            return Ok(false);
        }
        let mut is_narrower = false;
        for (id, becomes) in changed_ways(update) {
            let is_of_directories = !is_link(update) && !matches!(becomes, WayChange::Named(None));
            if !is_of_directories || !store.inode(id)?.is_some_and(|found| found.is_directory()) {
                continue;
            }
            let before = self.version;
            self.version += 1;
            for known in viewers.iter_mut() {
                known.searched.clear();
                if known.walk_up(store, (self.version, &self.placings), id)? == Some(self.version) {
                    // It leads on, so that nothing is to be remembered.
                    known.cuts.remove(&id);
                } else {
                    is_narrower |= known.cuts.get(&id) == Some(&before);
                }
            }
        }
        if viewers.iter().any(|known| !known.cuts.is_empty()) {
            placed_inodes(update).for_each(|id| self.placings.note(id, self.version));
        }
        Ok(is_narrower)
    }

    /// Keeps [`Self::in_root`] true.
    fn record_root(&mut self, store: &Store, update: &Update<'_>) -> Result<(), StoreError> {
        let in_root = self.in_root.get_mut();
        let Some(known) = in_root.as_mut() else { return Ok(()) };
        let has_names = |id: InodeId| store.inode(id).map(|found| found.is_some_and(|found| found.links > 0));
        let root = InodeId::ROOT;
        let mut is_lost = false;
        match update {
            Update::Create(create) if create.parent == root && !create.name.is_empty() => {
                known.insert(create.inode);
            }
            Update::Link { inode, parent, .. } if *parent == root => {
                known.insert(*inode);
            }
            Update::Unlink { inode, parent, .. } | Update::RemoveDirectory { inode, parent, .. } if *parent == root => {
                known.remove(inode);
                is_lost = has_names(*inode)?;
            }
            Update::Rename(rename) if rename.parent == root || rename.new_parent == root => {
                let is_simple = !rename.exchange && rename.whiteout.is_none() && rename.new_parent == root;
                is_lost = !is_simple;
                known.insert(rename.inode);
                if let Some(target) = rename.target {
                    known.remove(&target);
                    is_lost |= has_names(target)?;
                }
            }
            _ => {}
        }
        if is_lost {
            // It may have another name there.
            *in_root = None;
        }
        Ok(())
    }

    /// Returns the last version of the ways in which a session reached an inode, as far as is known.
    fn last_reached_by(
        &self,
        store: &Store,
        session: &ServedSession,
        placings: &Placings,
        inode: (InodeId, &Inode),
    ) -> Result<Option<u64>, StoreError> {
        let (id, found) = inode;
        let is_own = found.links == 0 && session.ranges.contains(id);
        if session.credentials.is_privileged() || is_own || session.rights.has(id, Access::EXECUTE) {
            return Ok(Some(self.version));
        }
        self.with_user(&session.credentials, |known| self.last_reached(store, known, placings, inode))
    }

    /// Returns whether a session reaches an inode.
    ///
    /// # Errors
    /// Those of the store.
    pub fn reaches(
        &self,
        store: &Store,
        session: &ServedSession,
        inode: (InodeId, &Inode),
    ) -> Result<bool, StoreError> {
        let Some(last) = self.last_reached_by(store, session, &self.placings, inode)? else { return Ok(false) };
        Ok(last == self.version || last >= session.ways_from && session.control.has_open(inode.0))
    }

    /// Returns whether a session has reached an inode at any time since it began.
    ///
    /// # Errors
    /// Those of the store.
    pub fn has_reached(&self, store: &Store, session: &ServedSession, id: InodeId) -> Result<bool, StoreError> {
        // It may have been granted an inode that came below a cut directory, with a lease on a directory that it kept.
        let placings = Placings::default();
        // A file without a name was reached when it had one, or is its maker's.
        let Some(found) = store.inode(id)?.filter(|found| found.links > 0) else { return Ok(true) };
        Ok(self.last_reached_by(store, session, &placings, (id, &found))?.is_some_and(|last| last >= session.ways_from))
    }

    /// Fails if a record changes an inode that its session never reached.
    ///
    /// # Errors
    /// [`RecordRefusal::Forged`]; those of the store.
    pub fn check_reached(
        &self,
        store: &Store,
        session: &ServedSession,
        update: &Update<'_>,
    ) -> Result<(), RecordRefusal> {
        if session.credentials.is_privileged() {
            return Ok(());
        }
        for id in changed_inodes(update) {
            if !self.has_reached(store, session, id)? {
                return Err(Violation::NotPermitted(id).into());
            }
        }
        Ok(())
    }

    /// Notes that a session has found a name of an inode in a directory that it reaches and may search.
    ///
    /// # Errors
    /// Those of the store.
    pub fn record_found(&self, store: &Store, session: &ServedSession, inode: InodeId) -> Result<(), StoreError> {
        let Some(found) = store.inode(inode)?.filter(|_| !session.credentials.is_privileged()) else { return Ok(()) };
        if self.last_reached_by(store, session, &self.placings, (inode, &found))? != Some(self.version) {
            let version = self.version;
            self.with_user(&session.credentials, |known| insert_bounded(&mut known.met, inode, version));
        }
        Ok(())
    }

    /// Notes that a session has made or named inodes in a directory that it may search no more by its name.
    ///
    /// The update is applied. The session reaches them as it does the directory.
    ///
    /// # Errors
    /// Those of the store.
    pub fn record_placed(&self, store: &Store, session: &ServedSession, update: &Update<'_>) -> Result<(), StoreError> {
        if session.credentials.is_privileged() || self.version == 1 {
            return Ok(());
        }
        for inode in placed_inodes(update) {
            let Some(found) = store.inode(inode)?.filter(|found| found.links > 0) else { continue };
            // Its records are validated by what it reached at any time; so is what it may have open.
            let last = self.last_reached_by(store, session, &Placings::default(), (inode, &found))?;
            if let Some(last) = last.filter(|last| *last < self.version) {
                self.with_user(&session.credentials, |known| insert_bounded(&mut known.met, inode, last));
            }
        }
        Ok(())
    }

    /// Returns whether a session's user may search a directory and all above it now.
    ///
    /// # Errors
    /// Those of the store.
    pub fn leads_to(&self, store: &Store, session: &ServedSession, directory: InodeId) -> Result<bool, StoreError> {
        let walk = |known: &mut ViewerWays| known.walk_up(store, (self.version, &self.placings), directory);
        Ok(self.with_user(&session.credentials, walk)? == Some(self.version))
    }

    /// Returns whether a session reached an inode since it began, and its way there was cut.
    ///
    /// # Errors
    /// Those of the store.
    pub fn is_cut_from(
        &self,
        store: &Store,
        session: &ServedSession,
        inode: (InodeId, &Inode),
    ) -> Result<bool, StoreError> {
        let last = self.last_reached_by(store, session, &self.placings, inode)?;
        Ok(last.is_some_and(|last| last >= session.ways_from && last < self.version))
    }
}
