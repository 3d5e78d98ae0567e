//! Looking up, creating, linking, removing and listing names in directories.
//!
//! Renaming: `names/rename.rs`.

use std::sync::atomic::Ordering;

use ashlar_types::{
    Access, COOKIE_PARENT, COOKIE_SELF, Credentials, DEPTH_MAX, Errno, FileKind, Inode, InodeId, LINK_MAX, MODE_SETGID,
    Name,
};
use ashlar_update::acl::Acl;
use ashlar_update::xattr_size::lists_fit;
use ashlar_update::{Create, Entry, Update, XATTR_ACL_DEFAULT, permission, quota_allows};
use ashlar_wire::{OperationKind, Reply, Request};

use crate::LibFs;
use crate::api::{FoundInode, Listed, ListedName, NewInode, Outcome, check_name, check_new_name};
use crate::cache::children::Children;
use crate::cache::node::Lease;
use crate::leases::claim::Claim;
use crate::leases::grants::{LockedNodes, Stop};
use crate::names::path_walk::PathPurpose;

/// Entries to request at a time of a directory that is too large to be known as a whole.
const PAGE_ENTRIES: u32 = 1024;

impl LibFs {
    /// Looks up a name; `.` and `..` too.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `EACCES`, `ENAMETOOLONG`.
    pub fn lookup(&self, user: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        if name == b"." || name == b".." {
            return self.lookup_dot(user, directory, name);
        }
        self.look_up(user, directory, name, PathPurpose::Look, false).map(|(found, _)| found)
    }

    /// Looks up `.` or `..` of a directory.
    pub(crate) fn lookup_dot(&self, user: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<FoundInode> {
        // The kernel asks a mount so for an inode of which it has a handle.
        if user.checked && self.is_released(directory) {
            self.make_room()?;
        }
        self.check_access(user, directory, Access::EXECUTE)?;
        let found = self.find_inode(directory)?;
        if name == b"." { Ok(found) } else { self.find_inode(found.inode.parent) }
    }

    /// Returns the inode that a name leads to, and the lease by which the directory is known.
    ///
    /// `makes`: if the name is absent, the caller creates it next.
    pub(crate) fn look_up(
        &self,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        purpose: PathPurpose,
        makes: bool,
    ) -> Outcome<(FoundInode, Option<Lease>)> {
        let claim = Claim { soon_written: purpose == PathPurpose::Name, makes, ..Claim::read(directory) };
        let claim_found = |id| purpose.claim(id);
        loop {
            let (entry, lease) = self.look_up_entry(user, claim, name, &claim_found)?;
            let entry = entry.ok_or(Errno::ENOENT)?;
            // Most calls follow a link or read its attributes, so a link needs no more than those.
            let is_link = entry.kind == FileKind::Symlink && purpose != PathPurpose::Name;
            match self.find_attributes(if is_link { Claim::read(entry.inode) } else { claim_found(entry.inode) }) {
                // The inode was removed after its name was looked up; the next lookup shows that.
                Err(Errno::ESTALE) if self.find_entry(directory, name, false)? != Some(entry) => {}
                found => return found.map(|found| (found, lease)),
            }
        }
    }

    /// Returns an entry of a directory that `user` may search, and the lease by which it is known.
    pub(crate) fn look_up_entry(
        &self,
        user: &Credentials,
        directory: Claim,
        name: &[u8],
        found: &dyn Fn(InodeId) -> Claim,
    ) -> Outcome<(Option<Entry>, Option<Lease>)> {
        // One read of the directory gives both the right to search it and the name's entry.
        let directory = if user.checked { directory } else { directory.with_xattrs() };
        self.find_entry_if(directory, found, name, |state| {
            if !user.checked && !self.allows_access(state, user, Access::EXECUTE) {
                return Err(Errno::EACCES);
            }
            check_name(name)
        })
    }

    /// Creates an inode: mkdir, mknod, symlink, creat. The inode is not open.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT` (a removed directory), `ENOTDIR`, `EACCES`, `ENAMETOOLONG` (also a directory deeper than
    /// [`DEPTH_MAX`]), `EMLINK`, `ENOSPC`, `EDQUOT`,
    /// `EINVAL`.
    pub fn make(
        &self,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
    ) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        check_new_name(name, Errno::EEXIST)?;
        self.make_inode(user, directory, name, make, false)
    }

    /// As [`LibFs::make`], and opens the file in one step.
    ///
    /// # Errors
    /// As [`LibFs::make`]; `ENFILE`.
    pub fn make_open(
        &self,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
    ) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        check_new_name(name, Errno::EEXIST)?;
        self.make_inode(user, directory, name, make, true)
    }

    /// Creates and opens a file without a name (`O_TMPFILE`).
    ///
    /// # Errors
    /// As [`LibFs::make_open`].
    pub fn make_unnamed(&self, user: &Credentials, directory: InodeId, make: &NewInode<'_>) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        self.make_inode(user, directory, b"", make, true)
    }

    fn make_inode(
        &self,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
        open: bool,
    ) -> Outcome<FoundInode> {
        if make.kind == FileKind::Symlink && make.target.is_empty() {
            return Err(Errno::ENOENT);
        }
        if make.target.len() > ashlar_types::SYMLINK_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        self.check_change(user, directory)?;
        let is_there = || Ok(!name.is_empty() && self.find_entry(directory, name, true)?.is_some());
        // Most callers have just looked the name up. If a number takes a request, the name is checked first: an
        // existing name is then the error, whatever the request would give.
        if !self.has_inodes() && is_there()? {
            return Err(Errno::EEXIST);
        }
        if make.kind == FileKind::Directory {
            self.check_depth(directory)?;
        }
        let id = self.next_inode()?;
        let claim = Claim::write(directory).with_xattrs();
        let claims = [if name.is_empty() { claim } else { claim.with_entries() }];
        let made = loop {
            let made =
                self.change_nodes(&claims, |locked| self.make_locked(locked, user, directory, name, make, id, open));
            match made {
                // The name exists, or is not known.
                Err(Errno::ECANCELED) => match is_there() {
                    Ok(false) => {}
                    Ok(true) => break Err(Errno::EEXIST),
                    Err(errno) => break Err(errno),
                },
                made => break made,
            }
        };
        made.inspect_err(|_| self.return_inode(id))
    }

    #[allow(clippy::too_many_arguments, reason = "the parameters of one call")]
    fn make_locked(
        &self,
        locked: &mut LockedNodes<'_>,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        make: &NewInode<'_>,
        id: InodeId,
        open: bool,
    ) -> Result<FoundInode, Stop> {
        locked.act_for(user);
        let parent = locked.inode(directory)?;
        if !parent.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        if parent.links == 0 {
            return Err(Errno::ENOENT.into());
        }
        locked.check_change(user, directory)?;
        if !name.is_empty() {
            locked.expect_entry(directory, name, None).map_err(|_| Errno::ECANCELED)?;
        }
        if make.kind == FileKind::Directory && locked.inode(directory)?.links >= LINK_MAX {
            return Err(Errno::EMLINK.into());
        }
        let plan = Inheritance::from(locked, directory, user, make)?;
        if !lists_fit(&plan.acl_access, &plan.acl_default) {
            return Err(Errno::ENOSPC.into());
        }
        let create = Create {
            inode: id,
            parent: directory,
            name,
            kind: make.kind,
            mode: plan.mode,
            uid: user.uid,
            gid: plan.gid,
            device: make.device,
            at: Self::now(),
            target: make.target,
            acl_access: &plan.acl_access,
            acl_default: &plan.acl_default,
        };
        let handle = if open { Some(self.record_open_new(id)?) } else { None };
        if let Err(stop) = self.log_creation(locked, &Update::Create(create), id, directory) {
            if open {
                self.record_closed(id);
            }
            return Err(stop);
        }
        if let Some(handle) = handle {
            locked.state(id)?.handle.set_slot(handle);
        }
        Ok(FoundInode { id, inode: locked.inode(id)?.clone() })
    }

    /// Fails with `ENAMETOOLONG` if a directory in this one would lie too deep.
    pub(crate) fn check_depth(&self, directory: InodeId) -> Outcome<()> {
        // Parents are known of nearly all directories that lead here. One that has moved since is asked for again only
        // if it makes the difference.
        let known = |id| {
            let state = self.nodes.read_existing(id)?;
            Some(state.inode.as_ref()?.parent)
        };
        if self.is_deep(directory, &|id| known(id).map_or_else(|| self.parent(id), Ok))?
            && self.is_deep(directory, &|id| self.parent(id))?
        {
            return Err(Errno::ENAMETOOLONG);
        }
        Ok(())
    }

    fn parent(&self, directory: InodeId) -> Outcome<InodeId> {
        Ok(self.find_inode(directory)?.inode.parent)
    }

    /// Returns whether a directory has as many directories above it, itself included, as may be.
    fn is_deep(&self, directory: InodeId, parent: &dyn Fn(InodeId) -> Outcome<InodeId>) -> Outcome<bool> {
        let mut at = directory;
        for _ in 0..DEPTH_MAX {
            if at == InodeId::ROOT {
                return Ok(false);
            }
            at = parent(at)?;
        }
        Ok(true)
    }

    /// As [`LockedNodes::log_update`], for an update that creates an inode in a directory.
    pub(crate) fn log_creation(
        &self,
        locked: &mut LockedNodes<'_>,
        update: &Update<'_>,
        id: InodeId,
        directory: InodeId,
    ) -> Result<(), Stop> {
        let lease = locked.state(directory)?.lease;
        locked.nodes.push((id, self.nodes.write_new(id)));
        if let Err(stop) = locked.log_update(update) {
            drop(locked.nodes.pop());
            self.nodes.remove(id);
            return Err(stop);
        }
        // Another session must learn of the new inode from the directory. So the directory's lease covers both, until
        // SharedFS revokes one of the two.
        if let Some((_, guard)) = locked.nodes.last_mut() {
            guard.lease = lease;
        }
        Ok(())
    }

    /// Creates another name for an inode.
    ///
    /// # Errors
    /// `EEXIST`, `EPERM` (a directory, or a file to which `fs.protected_hardlinks` at 1 allows the user no name),
    /// `EMLINK`, `ENOENT` (no link left and not made by `O_TMPFILE`), `ENOTDIR`, `EACCES`, `ENOSPC`, `EXDEV` (another
    /// subtree's quota).
    pub fn link(&self, user: &Credentials, inode: InodeId, directory: InodeId, name: &[u8]) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        check_new_name(name, Errno::EEXIST)?;
        if !user.is_privileged() && !self.may_link(&*self.view_node(Claim::to_change(user, inode).reading())?, user) {
            return Err(Errno::EPERM);
        }
        self.check_change(user, directory)?;
        loop {
            if self.find_entry(directory, name, true)?.is_some() {
                return Err(Errno::EEXIST);
            }
            let claims = [Claim::to_change(user, inode), Claim::to_change(user, directory)];
            let linked = self.change_nodes(&claims, |locked| {
                let found = locked.inode(inode)?;
                if found.is_directory() || !self.may_link(locked.state(inode)?, user) {
                    return Err(Errno::EPERM.into());
                }
                if found.links >= LINK_MAX {
                    return Err(Errno::EMLINK.into());
                }
                let into = locked.inode(directory)?;
                // A kernel that has looked a name up may not know that another mount has removed it since.
                if !permission::is_linkable(found) || into.links == 0 {
                    return Err(Errno::ENOENT.into());
                }
                if !quota_allows(inode, found, into) {
                    return Err(Errno::EXDEV.into());
                }
                locked.check_change(user, directory)?;
                // The lease may have gone and come back without the entries: then the name is looked up again.
                locked.expect_entry(directory, name, None).map_err(|_| Errno::ECANCELED)?;
                locked.log_update(&Update::Link { inode, parent: directory, name, at: Self::now() })?;
                Ok(FoundInode { id: inode, inode: locked.inode(inode)?.clone() })
            });
            match linked {
                Err(Errno::ECANCELED) => {}
                linked => return linked,
            }
        }
    }

    /// Removes a name that leads to no directory.
    ///
    /// # Errors
    /// `ENOENT`, `EISDIR`, `EACCES`, `EPERM` (sticky directory).
    pub fn unlink(&self, user: &Credentials, directory: InodeId, name: &[u8]) -> Outcome<()> {
        self.remove_name(user, directory, name, false, (None, None))
    }

    /// Removes an empty directory. If `found` is given, it is the directory that the caller found at the name.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`, `EINVAL` (`.`), `EACCES`, `EPERM`; `ESTALE` if the name leads to another inode
    /// than `found`.
    pub fn remove_directory(
        &self,
        user: &Credentials,
        directory: InodeId,
        name: &[u8],
        found: Option<InodeId>,
    ) -> Outcome<()> {
        self.remove_name(user, directory, name, true, (found, None))
    }

    /// Removes a name: as a directory, or as anything else.
    ///
    /// `found_entry` is the entry that was just looked up, if one was.
    pub(crate) fn remove_name(
        &self,
        user: &Credentials,
        parent: InodeId,
        name: &[u8],
        is_directory: bool,
        (found, mut found_entry): (Option<InodeId>, Option<Entry>),
    ) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Name);
        let dots = match name {
            _ if !is_directory => Errno::EISDIR,
            b".." => Errno::ENOTEMPTY,
            _ => Errno::EINVAL,
        };
        check_new_name(name, dots)?;
        if found_entry.is_none() {
            self.check_search(user, parent)?;
        }
        loop {
            let entry = match found_entry.take() {
                Some(entry) => entry,
                None => self.find_entry(parent, name, true)?.ok_or(Errno::ENOENT)?,
            };
            let inode = entry.inode;
            if found.is_some_and(|found| found != inode) {
                return Err(Errno::ESTALE);
            }
            self.check_removal(user, parent, entry, is_directory)?;
            let result = self.change_nodes(&[Claim::to_change(user, parent), Claim::write(inode)], |locked| {
                locked.expect_entry(parent, name, Some(entry)).map_err(|_| Errno::ECANCELED)?;
                locked.check_change(user, parent)?;
                if permission::is_stuck(locked.inode(parent)?, locked.inode(inode)?, user) {
                    return Err(Errno::EPERM.into());
                }
                if locked.inode(inode)?.entries != 0 {
                    return Err(Errno::ENOTEMPTY.into());
                }
                let (at, release) = (Self::now(), !self.control.has_open(inode));
                let update = if is_directory {
                    Update::RemoveDirectory { inode, parent, name, release, at }
                } else {
                    Update::Unlink { inode, parent, name, release, at }
                };
                locked.log_update(&update).map(drop)
            });
            match result {
                // The entry changed between lookup and lock.
                Err(Errno::ECANCELED | Errno::ESTALE) if self.find_entry(parent, name, true)? != Some(entry) => {}
                Err(Errno::ECANCELED) => {}
                result => return result,
            }
        }
    }

    /// Calls `each` with the entries behind cookie `after`, until it returns `false` or the directory ends.
    ///
    /// `after` 0 starts at the beginning; `.` and `..` are not among the entries. They come in cookie order. A front
    /// end must not stop between two entries with the same cookie: a listing that continues at that cookie skips the
    /// second one.
    ///
    /// # Errors
    /// `ENOTDIR`, `ENOENT`.
    pub fn list(&self, directory: InodeId, after: u64, each: &mut dyn FnMut(Listed) -> bool) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Name);
        let mut after = after;
        loop {
            let at_hand = self.read_all_entries(directory, |children| {
                let mut page: Vec<(u64, Name, Entry)> = Vec::new();
                for (cookie, name, entry) in children.between(after, u64::MAX) {
                    // Entries that share a cookie stay on one page.
                    if page.len() >= PAGE_ENTRIES as usize && page.last().is_some_and(|&(last, ..)| last != cookie) {
                        return (page, Some(cookie - 1));
                    }
                    page.extend(entry.map(|entry| (cookie, name.clone(), entry)));
                }
                (page, None)
            })?;
            let (page, next) = match at_hand {
                Some(page) => page,
                None => self.remote_page(directory, after)?,
            };
            for (cookie, name, entry) in page {
                let inode = self.cached_attributes(entry.inode);
                let name = name.as_bytes().to_vec();
                if !each(Listed { cookie, name, id: entry.inode, kind: entry.kind, inode }) {
                    return Ok(());
                }
            }
            match next {
                Some(next) => after = next,
                None => return Ok(()),
            }
        }
    }

    /// As [`LibFs::list`], without attributes and without memory for the names.
    ///
    /// LibFS may hold the directory's lock while it calls `each`, which therefore must not call LibFS.
    ///
    /// # Errors
    /// As [`LibFs::list`].
    pub fn list_names(
        &self,
        directory: InodeId,
        after: u64,
        each: &mut dyn FnMut(ListedName<'_>) -> bool,
    ) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Name);
        let mut give = |cookie, name: &Name, entry: Entry| {
            each(ListedName { cookie, name: name.as_bytes(), id: entry.inode, kind: entry.kind })
        };
        let mut after = after;
        loop {
            let is_done = self.read_all_entries(directory, |children| {
                let known = children.between(after, u64::MAX);
                let mut entries = known.filter_map(|(cookie, name, entry)| Some((cookie, name, entry?)));
                entries.all(|(cookie, name, entry)| give(cookie, name, entry));
            })?;
            if is_done.is_some() {
                return Ok(());
            }
            let (page, next) = self.remote_page(directory, after)?;
            if !page.iter().all(|(cookie, name, entry)| give(*cookie, name, *entry)) {
                return Ok(());
            }
            match next {
                Some(next) => after = next,
                None => return Ok(()),
            }
        }
    }

    /// As [`LibFs::list_names`], with `.` and `..` before the others, at the cookies that all front ends use.
    ///
    /// # Errors
    /// As [`LibFs::list`]; `ENOENT` for a directory that was removed.
    pub fn list_with_dots(
        &self,
        directory: InodeId,
        after: u64,
        each: &mut dyn FnMut(ListedName<'_>) -> bool,
    ) -> Outcome<()> {
        let found = self.attributes(directory)?;
        if found.inode.is_directory() && found.inode.links == 0 {
            return Err(Errno::ENOENT);
        }
        let dots = [(COOKIE_SELF, &b"."[..], directory), (COOKIE_PARENT, b"..", found.inode.parent)];
        for (cookie, name, id) in dots.into_iter().filter(|&(cookie, ..)| after < cookie) {
            if !each(ListedName { cookie, name, id, kind: FileKind::Directory }) {
                return Ok(());
            }
        }
        self.list_names(directory, after.max(COOKIE_PARENT), each)
    }

    /// Calls `read` with the entries of a directory, if all are known.
    fn read_all_entries<R>(&self, directory: InodeId, read: impl FnOnce(&Children) -> R) -> Outcome<Option<R>> {
        loop {
            let guard = self.view_node(Claim::read(directory).with_entries())?;
            if !guard.inode.as_ref().is_some_and(Inode::is_directory) {
                return Err(Errno::ENOTDIR);
            }
            if !guard.prefers_single_names(true) {
                return Ok(guard.children.is_complete().then(|| read(&guard.children)));
            }
            // A listing reads all names.
            guard.lookups.store(u32::MAX, Ordering::Relaxed);
        }
    }

    /// Returns a page of a directory that is too large to be known as a whole.
    ///
    /// The page has SharedFS's entries, overlaid with this session's. With it comes the cookie where the next page
    /// begins, if there is one.
    fn remote_page(&self, directory: InodeId, after: u64) -> Outcome<Page> {
        let request = Request::ReadDirectory { directory, after, limit: PAGE_ENTRIES };
        let Reply::Entries(theirs) = self.call(&request)? else { return Err(Errno::EIO) };
        let next = if theirs.len() < PAGE_ENTRIES as usize { None } else { theirs.last().map(|entry| entry.cookie) };
        let guard = self.view_node(Claim::read(directory))?;
        let mut merged = std::collections::BTreeMap::new();
        for entry in theirs {
            let name = Name::new(&entry.name).map_err(|_| Errno::EIO)?;
            merged.insert((entry.cookie, name), Some(Entry { inode: entry.inode, kind: entry.kind }));
        }
        for (cookie, name, entry) in guard.children.between(after, next.unwrap_or(u64::MAX)) {
            merged.insert((cookie, name.clone()), entry);
        }
        let page = merged.into_iter().filter_map(|((cookie, name), entry)| entry.map(|entry| (cookie, name, entry)));
        Ok((page.collect(), next))
    }
}

/// Entries by cookie, and the cookie behind which the next page begins, if there is one.
type Page = (Vec<(u64, Name, Entry)>, Option<u64>);

/// The attributes that a new inode inherits from its directory.
pub(crate) struct Inheritance {
    mode: u32,
    pub(crate) gid: u32,
    pub(crate) acl_access: Vec<u8>,
    acl_default: Vec<u8>,
}

impl Inheritance {
    /// Returns the inheritance of a directory that the operation has claimed with its extended attributes.
    pub(crate) fn from(
        locked: &LockedNodes<'_>,
        directory: InodeId,
        user: &Credentials,
        make: &NewInode<'_>,
    ) -> Result<Self, Stop> {
        let xattrs = locked.state(directory)?.xattrs.as_ref();
        let default = xattrs.and_then(|all| all.get(XATTR_ACL_DEFAULT));
        Ok(Self::compute(locked.inode(directory)?, default.map(Vec::as_slice), user, make))
    }

    fn compute(parent: &Inode, default: Option<&[u8]>, user: &Credentials, make: &NewInode<'_>) -> Self {
        let mut mode = make.mode & ashlar_types::MODE_PERMISSIONS;
        let mut gid = user.gid;
        if parent.mode & MODE_SETGID != 0 {
            gid = parent.gid;
            if make.kind == FileKind::Directory {
                mode |= MODE_SETGID;
            } else if mode & (MODE_SETGID | 0o010) == (MODE_SETGID | 0o010)
                && !user.is_privileged()
                && !user.is_member(gid)
            {
                mode &= !MODE_SETGID;
            }
        }
        let none = Self { mode, gid, acl_access: Vec::new(), acl_default: Vec::new() };
        if make.kind == FileKind::Symlink {
            return Self { mode: 0o777, ..none };
        }
        let Some(acl) = default.and_then(Acl::parse) else { return Self { mode: mode & !make.umask, ..none } };
        let (access, mode) = acl.inherited(mode);
        let acl_access = if access.is_mode_only() { Vec::new() } else { access.to_bytes() };
        let acl_default = if make.kind == FileKind::Directory { acl.to_bytes() } else { Vec::new() };
        Self { mode, acl_access, acl_default, ..none }
    }
}
