//! Attributes, access checks and extended attributes of inodes.

use ashlar_types::{
    Access, Credentials, Errno, FILE_SIZE_MAX, FileKind, Inode, InodeId, MODE_PERMISSIONS, MODE_SETGID, MODE_SETUID,
    MODE_STICKY, QuotaId, Timestamp, XATTR_NAME_MAX, XATTR_VALUE_MAX,
};
use ashlar_update::acl::Acl;
use ashlar_update::xattr_size::{attribute_bytes, attribute_fits};
use ashlar_update::{
    Entry, SetAttributes, Update, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_CAPABILITY, XATTR_HIDDEN, XATTR_QUOTA,
    permission,
};
use ashlar_wire::OperationKind;

use crate::LibFs;
use crate::api::{AttributeChange, FoundInode, Outcome, SetTime, XattrFlags};
use crate::cache::node::NodeState;
use crate::files::open_file::OpenInode;
use crate::leases::claim::Claim;
use crate::leases::grants::{LockedNodes, Stop};

/// The claim of a directory in which a name is made, removed or moved next.
fn claim_to_change(directory: InodeId) -> Claim {
    Claim::read(directory).soon_written().with_entries()
}

impl LibFs {
    /// Returns an inode's attributes.
    ///
    /// # Errors
    /// `ESTALE` if the inode is gone.
    pub fn attributes(&self, id: InodeId) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        self.find_attributes(Claim::read(id))
    }

    /// Returns the attributes of an inode that the caller has open, by the fast path.
    ///
    /// `None` if that takes more; the caller then calls [`LibFs::attributes`].
    #[must_use]
    pub fn attributes_open(&self, open: &OpenInode) -> Option<FoundInode> {
        self.inspect_open(open, |id, inode| FoundInode { id, inode: inode.clone() })
    }

    /// Calls `look` with the attributes of an inode that the caller has open, by the fast path; returns its result.
    #[inline]
    pub fn inspect_open<R>(&self, open: &OpenInode, look: impl FnOnce(InodeId, &Inode) -> R) -> Option<R> {
        self.check_alive().ok()?;
        let trial = self.try_operation(OperationKind::Name);
        let state = open.state(self)?;
        let found = self.covered_state(&state).and_then(|state| Some(look(open.id(), state.inode.as_ref()?)))?;
        drop(state);
        trial.count_done(self);
        Some(found)
    }

    /// As [`LibFs::attributes`], as a part of another operation.
    pub(crate) fn find_inode(&self, id: InodeId) -> Outcome<FoundInode> {
        self.find_inode_by(Claim::read(id))
    }

    /// As [`LibFs::find_inode`], with all that `claim` asks for.
    pub(crate) fn find_inode_by(&self, claim: Claim) -> Outcome<FoundInode> {
        let (id, guard) = (claim.id, self.view_node(claim)?);
        Ok(FoundInode { id, inode: guard.inode.clone().ok_or(Errno::ESTALE)? })
    }

    /// As [`LibFs::find_inode_by`], for an operation that needs no more of the inode.
    ///
    /// Attributes that are only read, and for the first time, need not be cached.
    pub(crate) fn find_attributes(&self, claim: Claim) -> Outcome<FoundInode> {
        match self.cached_grant_attributes(&claim) {
            Some(inode) => Ok(FoundInode { id: claim.id, inode }),
            None => self.find_inode_by(claim),
        }
    }

    /// Returns an inode's attributes if they are cached under a valid lease.
    pub(crate) fn cached_attributes(&self, id: InodeId) -> Option<Inode> {
        let node = self.nodes.existing(id)?;
        let state = node.read();
        if state.is_gone || !self.holds_lease(&state, false) { None } else { state.inode.clone() }
    }

    /// Checks that `user` has an access to an inode.
    ///
    /// # Errors
    /// `EACCES` if not; `ESTALE` if the inode is gone.
    pub fn check_access(&self, user: &Credentials, id: InodeId, access: Access) -> Outcome<()> {
        self.check_claimed_access(user, Claim::read(id), access)
    }

    /// As [`LibFs::check_access`], for a directory in which a name is created, removed or moved next.
    pub(crate) fn check_change(&self, user: &Credentials, directory: InodeId) -> Outcome<()> {
        self.check_claimed_access(user, claim_to_change(directory), Access::WRITE | Access::EXECUTE)
    }

    /// As [`LibFs::check_change`], for the right to look up the name only.
    pub(crate) fn check_search(&self, user: &Credentials, directory: InodeId) -> Outcome<()> {
        self.check_claimed_access(user, claim_to_change(directory), Access::EXECUTE)
    }

    /// Fails unless `user` may remove a directory's entry: as a directory, or as anything else.
    ///
    /// The order of the errors is the kernel's (`may_delete`): rights to the directory, its sticky bit, kinds.
    pub(crate) fn check_removal(
        &self,
        user: &Credentials,
        directory: InodeId,
        entry: Entry,
        as_directory: bool,
    ) -> Outcome<()> {
        if let Some(sticky) = self.check_change_of_sticky(user, directory)?
            && permission::is_stuck(&sticky, &self.find_inode(entry.inode)?.inode, user)
        {
            return Err(Errno::EPERM);
        }
        match (entry.kind == FileKind::Directory, as_directory) {
            (true, false) => Err(Errno::EISDIR),
            (false, true) => Err(Errno::ENOTDIR),
            _ => Ok(()),
        }
    }

    /// As [`LibFs::check_change`]; returns the directory if it is sticky.
    fn check_change_of_sticky(&self, user: &Credentials, directory: InodeId) -> Outcome<Option<Inode>> {
        if user.checked {
            return Ok(None);
        }
        let _using = self.enter_operation();
        let guard = self.view_node(claim_to_change(directory).with_xattrs())?;
        if !self.allows_access(&guard, user, Access::WRITE | Access::EXECUTE) {
            return Err(Errno::EACCES);
        }
        Ok(guard.inode.as_ref().filter(|inode| inode.mode & MODE_STICKY != 0).cloned())
    }

    fn check_claimed_access(&self, user: &Credentials, claim: Claim, access: Access) -> Outcome<()> {
        if user.checked {
            return Ok(());
        }
        let _using = self.enter_operation();
        let guard = self.view_node(claim.with_xattrs())?;
        if self.allows_access(&guard, user, access) { Ok(()) } else { Err(Errno::EACCES) }
    }

    pub(crate) fn allows_access(&self, state: &NodeState, user: &Credentials, access: Access) -> bool {
        let Some(inode) = &state.inode else { return false };
        permission::allows(inode, access_list(state).as_ref(), user, access)
    }

    /// Returns the access with which `user` may have an inode open.
    pub(crate) fn held_access(&self, state: &NodeState, user: &Credentials) -> Access {
        let acl = access_list(state);
        state.inode.as_ref().map_or(Access::NONE, |inode| permission::granted_access(inode, acl.as_ref(), user))
    }

    /// Returns whether `user` may give an inode another name.
    pub(crate) fn may_link(&self, state: &NodeState, user: &Credentials) -> bool {
        state.inode.as_ref().is_some_and(|inode| permission::may_link(inode, access_list(state).as_ref(), user))
    }

    /// Sets attributes: chmod, chown, truncate and utimens in one.
    ///
    /// # Errors
    /// `EPERM`, `EACCES`, `EINVAL`, `EISDIR`, `EFBIG`, `ENOSPC`, `EDQUOT`.
    pub fn set_attributes(&self, user: &Credentials, id: InodeId, change: &AttributeChange) -> Outcome<FoundInode> {
        let _measured = self.begin_operation(OperationKind::Name);
        let mut claim = Claim::write(id).with_xattrs();
        if change.size.is_some() {
            claim = claim.with_contents();
        }
        let attributes = change.mode.is_some()
            || change.uid.is_some()
            || change.gid.is_some()
            || change.accessed.is_some()
            || change.modified.is_some()
            || (change.strip && change.size.is_none());
        if let Some(size) = change.size {
            self.change_nodes(&[claim], |locked| self.set_size(locked, user, id, size, change.strip))?;
        }
        if !attributes {
            return self.find_inode(id);
        }
        self.change_nodes(&[claim], |locked| {
            locked.act_for(user);
            let set = self.attributes_to_set(locked.state(id)?, user, id, change)?;
            if set.uid.is_some() || set.gid.is_some() || change.strip {
                Self::drop_capabilities(locked, id)?;
            }
            self.set_mode_with_acl(locked, id, set)?;
            Ok(FoundInode { id, inode: locked.inode(id)?.clone() })
        })
    }

    fn set_size(
        &self,
        locked: &mut LockedNodes<'_>,
        user: &Credentials,
        id: InodeId,
        size: u64,
        strip: bool,
    ) -> Result<(), Stop> {
        locked.act_for(user);
        let inode = locked.inode(id)?;
        match inode.kind {
            FileKind::Regular => {}
            FileKind::Directory => return Err(Errno::EISDIR.into()),
            _ => return Err(Errno::EINVAL.into()),
        }
        if size > FILE_SIZE_MAX {
            return Err(Errno::EFBIG.into());
        }
        if !self.allows_access(locked.state(id)?, user, Access::WRITE) {
            return Err(Errno::EACCES.into());
        }
        let strip = strip || !user.is_privileged();
        Self::drop_capabilities(locked, id)?;
        locked.log_update(&Update::Resize { inode: id, size, strip, at: Self::now() }).map(drop)
    }

    /// Checks POSIX's rules for a change of attributes; returns the attributes to set.
    fn attributes_to_set(
        &self,
        state: &NodeState,
        user: &Credentials,
        id: InodeId,
        change: &AttributeChange,
    ) -> Result<SetAttributes, Stop> {
        let inode = state.inode.as_ref().ok_or(Errno::ESTALE)?;
        let owns = permission::owns(inode, user);
        if change.mode.is_some() && !owns {
            return Err(Errno::EPERM.into());
        }
        let gives_away = change.uid.is_some_and(|uid| uid != inode.uid);
        let foreign_group = change.gid.is_some_and(|gid| gid != inode.gid && !user.is_member(gid));
        if (change.uid.is_some() || change.gid.is_some())
            && !user.is_privileged()
            && (!owns || gives_away || foreign_group)
        {
            return Err(Errno::EPERM.into());
        }
        let only_now = change.accessed == Some(SetTime::Now) && change.modified == Some(SetTime::Now);
        if (change.accessed.is_some() || change.modified.is_some()) && !owns {
            if !only_now {
                return Err(Errno::EPERM.into());
            }
            if !self.allows_access(state, user, Access::WRITE) {
                return Err(Errno::EACCES.into());
            }
        }
        let at = Self::now();
        let time = |set: Option<SetTime>| -> Result<Option<Timestamp>, Stop> {
            match set {
                Some(SetTime::At(given)) if given.nanoseconds >= 1_000_000_000 => Err(Errno::EINVAL.into()),
                Some(SetTime::At(given)) => Ok(Some(given)),
                Some(SetTime::Now) => Ok(Some(at)),
                None => Ok(None),
            }
        };
        let mut mode = change.mode.map(|mode| mode & MODE_PERMISSIONS);
        if let Some(mode) = mode.as_mut() {
            // Only a member of the file's group may set its set-group-id bit.
            let gid = change.gid.unwrap_or(inode.gid);
            if !user.is_privileged() && !user.is_member(gid) {
                *mode &= !MODE_SETGID;
            }
        }
        let changes_owner = change.uid.is_some() || change.gid.is_some();
        let strips = change.strip || (changes_owner && !user.is_privileged());
        if strips && mode.is_none() && !inode.is_directory() {
            let mut kept = inode.mode & !MODE_SETUID;
            if inode.mode & 0o010 != 0 || !user.is_privileged() && !user.is_member(inode.gid) {
                kept &= !MODE_SETGID;
            }
            mode = (kept != inode.mode).then_some(kept);
            // POSIX allows every user a change of owner that names neither user nor group. It must not clear bits of
            // another user's file.
            if mode.is_some() && !owns {
                return Err(Errno::EPERM.into());
            }
        }
        Ok(SetAttributes {
            inode: id,
            mode,
            uid: change.uid,
            gid: change.gid,
            accessed: time(change.accessed)?,
            modified: time(change.modified)?,
            at,
        })
    }

    /// Sets attributes. If the inode has an access list, a new mode changes the list with it.
    fn set_mode_with_acl(&self, locked: &mut LockedNodes<'_>, id: InodeId, set: SetAttributes) -> Result<(), Stop> {
        let acl = locked.state(id)?.xattrs.as_ref().and_then(|all| all.get(XATTR_ACL_ACCESS)).cloned();
        let acl = acl.as_deref().and_then(Acl::parse);
        if let (Some(mode), Some(acl)) = (set.mode, acl) {
            let value = acl.with_mode(mode).to_bytes();
            // The group may change only with the attributes, and a stranger to the old one may not set this bit.
            let (name, mode) = (XATTR_ACL_ACCESS, Some(mode & !MODE_SETGID));
            locked.log_update(&Update::SetXattr { inode: id, name, value: &value, mode, at: set.at })?;
        }
        locked.log_update(&Update::SetAttributes(set)).map(drop)
    }

    /// Removes a file's capabilities, as every change of its content or owner does.
    ///
    /// The kernel leaves this to the file system (`FUSE_HANDLE_KILLPRIV_V2`).
    pub(crate) fn drop_capabilities(locked: &mut LockedNodes<'_>, id: InodeId) -> Result<(), Stop> {
        if locked.state(id)?.xattrs.as_ref().is_some_and(|all| all.contains_key(XATTR_CAPABILITY)) {
            let at = Self::now();
            locked.log_update(&Update::RemoveXattr { inode: id, name: XATTR_CAPABILITY, mode: None, at })?;
        }
        Ok(())
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` if the inode is no symbolic link.
    pub fn read_link(&self, id: InodeId) -> Outcome<Vec<u8>> {
        let _measured = self.begin_operation(OperationKind::Name);
        let inode = self.find_inode(id)?.inode;
        if inode.kind == FileKind::Symlink { Ok(inode.target) } else { Err(Errno::EINVAL) }
    }

    /// Returns the value of an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is none; `EINVAL`, `EOPNOTSUPP` if no attribute can have this name.
    pub fn xattr(&self, id: InodeId, name: &[u8]) -> Outcome<Vec<u8>> {
        let _measured = self.begin_operation(OperationKind::Name);
        let guard = self.view_node(Claim::read(id).with_xattrs())?;
        if name == XATTR_QUOTA {
            let quota = guard.inode.as_ref().map_or(QuotaId::NONE, |inode| inode.quota);
            return if quota == QuotaId::NONE { Err(Errno::ENODATA) } else { Ok(quota.to_string().into_bytes()) };
        }
        let value = guard.xattrs.as_ref().and_then(|all| all.get(name)).cloned();
        value.ok_or_else(|| permission::check_xattr_name(name).err().unwrap_or(Errno::ENODATA))
    }

    /// Checks that `user` may read an extended attribute of this name, as the kernel does before [`LibFs::xattr`].
    ///
    /// # Errors
    /// `EACCES`; `ENODATA` for a name that this kind of file never has, or that this user may not see; `EOPNOTSUPP` for
    /// an access list of a link.
    pub fn check_xattr_read(&self, user: &Credentials, id: InodeId, name: &[u8]) -> Outcome<()> {
        if name.starts_with(b"user.") {
            let kind = self.attributes(id)?.inode.kind;
            if !matches!(kind, FileKind::Regular | FileKind::Directory) {
                return Err(Errno::ENODATA);
            }
            return self.check_access(user, id, Access::READ);
        }
        if permission::is_acl(name) {
            let kind = self.attributes(id)?.inode.kind;
            return if kind == FileKind::Symlink { Err(Errno::EOPNOTSUPP) } else { Ok(()) };
        }
        if name.starts_with(b"trusted.") {
            return if user.is_privileged() { Ok(()) } else { Err(Errno::ENODATA) };
        }
        // For these two namespaces, the file system alone decides about reading.
        let is_system = name.starts_with(b"security.") || name.starts_with(b"system.");
        if is_system { Ok(()) } else { self.check_access(user, id, Access::READ) }
    }

    /// Returns the names of all extended attributes.
    ///
    /// # Errors
    /// `ESTALE` if the inode is gone.
    pub fn xattr_names(&self, id: InodeId) -> Outcome<Vec<Vec<u8>>> {
        let _measured = self.begin_operation(OperationKind::Name);
        let guard = self.view_node(Claim::read(id).with_xattrs())?;
        let names = guard.xattrs.iter().flat_map(|all| all.keys()).filter(|name| *name != XATTR_HIDDEN);
        Ok(names.cloned().collect())
    }

    /// Sets an extended attribute.
    ///
    /// An access list sets the permission bits with it. LibFS keeps the list only if the bits don't express all of it.
    /// `strip_sgid` also clears set-group-id.
    ///
    /// # Errors
    /// `EEXIST`, `ENODATA`, `EPERM`, `EACCES`, `EINVAL`, `E2BIG`, `ERANGE`, `EOPNOTSUPP`, `ENOSPC`.
    pub fn set_xattr(
        &self,
        user: &Credentials,
        id: InodeId,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        strip_sgid: bool,
    ) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Name);
        if name.is_empty() || name.len() > XATTR_NAME_MAX {
            return Err(Errno::ERANGE);
        }
        if value.len() > XATTR_VALUE_MAX {
            return Err(Errno::E2BIG);
        }
        if name == XATTR_QUOTA {
            return self.set_quota(user, id, value);
        }
        if permission::is_acl(name) {
            return self.set_acl(user, id, name, value, strip_sgid);
        }
        self.change_nodes(&[Claim::write(id).with_xattrs()], |locked| {
            Self::check_xattr_change(locked.state(id)?, user, name)?;
            let exists = locked.state(id)?.xattrs.as_ref().is_some_and(|all| all.contains_key(name));
            if flags.create && exists {
                return Err(Errno::EEXIST.into());
            }
            if flags.replace && !exists {
                return Err(Errno::ENODATA.into());
            }
            check_room_for_xattr(locked.state(id)?, name, value)?;
            locked.log_update(&Update::SetXattr { inode: id, name, value, mode: None, at: Self::now() }).map(drop)
        })
    }

    /// Sets an access list; a list without entries removes it. The kernel ignores flags here.
    fn set_acl(&self, user: &Credentials, id: InodeId, name: &[u8], value: &[u8], strip_sgid: bool) -> Outcome<()> {
        if Acl::check_form(value)? == 0 {
            return self.remove_xattr(user, id, name);
        }
        self.change_nodes(&[Claim::write(id).with_xattrs()], |locked| {
            let inode = locked.inode(id)?;
            if name == XATTR_ACL_DEFAULT && inode.kind != FileKind::Symlink && !inode.is_directory() {
                return Err(Errno::EACCES.into());
            }
            Self::check_xattr_change(locked.state(id)?, user, name)?;
            let acl = Acl::parse(value).ok_or(Errno::EINVAL)?;
            check_room_for_xattr(locked.state(id)?, name, value)?;
            let at = Self::now();
            let mut mode = None;
            if name == XATTR_ACL_ACCESS {
                let strips = strip_sgid || !user.is_privileged() && !user.is_member(inode.gid);
                let kept = if strips { inode.mode & !MODE_SETGID } else { inode.mode };
                mode = Some(kept & !0o777 | acl.mode());
                if acl.is_mode_only() {
                    return locked.log_update(&Update::RemoveXattr { inode: id, name, mode, at }).map(drop);
                }
            }
            locked.log_update(&Update::SetXattr { inode: id, name, value, mode, at }).map(drop)
        })
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA` if there is none and the name is no access list's; `EPERM`, `EACCES`, `EINVAL`, `EOPNOTSUPP`.
    pub fn remove_xattr(&self, user: &Credentials, id: InodeId, name: &[u8]) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Name);
        if name == XATTR_QUOTA {
            return self.set_quota(user, id, b"0");
        }
        self.change_nodes(&[Claim::write(id).with_xattrs()], |locked| {
            let inode = locked.inode(id)?;
            if name == XATTR_ACL_DEFAULT && inode.kind != FileKind::Symlink && !inode.is_directory() {
                // There is none, so the result is the same for every user.
                return Ok(());
            }
            Self::check_xattr_change(locked.state(id)?, user, name)?;
            if !locked.state(id)?.xattrs.as_ref().is_some_and(|all| all.contains_key(name)) {
                return if permission::is_acl(name) { Ok(()) } else { Err(Errno::ENODATA.into()) };
            }
            locked.log_update(&Update::RemoveXattr { inode: id, name, mode: None, at: Self::now() }).map(drop)
        })
    }

    /// Sets the subtree, as a decimal number, against whose quota an inode counts.
    fn set_quota(&self, user: &Credentials, id: InodeId, value: &[u8]) -> Outcome<()> {
        let number = std::str::from_utf8(value).ok().and_then(|text| text.trim_ascii().parse::<u64>().ok());
        let quota = QuotaId(number.filter(|number| number >> QuotaId::BITS == 0).ok_or(Errno::EINVAL)?);
        self.change_nodes(&[Claim::write(id).with_xattrs()], |locked| {
            Self::check_xattr_change(locked.state(id)?, user, XATTR_QUOTA)?;
            if locked.inode(id)?.quota == quota {
                return Ok(());
            }
            locked.log_update(&Update::SetQuota { inode: id, quota, at: Self::now() }).map(drop)
        })
    }

    fn check_xattr_change(state: &NodeState, user: &Credentials, name: &[u8]) -> Result<(), Stop> {
        let inode = state.inode.as_ref().ok_or(Errno::ESTALE)?;
        Ok(permission::check_xattr_change(inode, access_list(state).as_ref(), user, name)?)
    }
}

/// Fails with `ENOSPC`, as ext4, if the inode may not have this attribute beside its others.
fn check_room_for_xattr(state: &NodeState, name: &[u8], value: &[u8]) -> Result<(), Stop> {
    let all = state.xattrs.as_ref().ok_or(Errno::EIO)?;
    let present = all.iter().map(|(name, value)| attribute_bytes(name, value)).sum();
    let replaced = all.get(name).map_or(0, |value| attribute_bytes(name, value));
    let fits = attribute_fits(present, replaced, attribute_bytes(name, value));
    if fits { Ok(()) } else { Err(Errno::ENOSPC.into()) }
}

fn access_list(state: &NodeState) -> Option<Acl> {
    state.xattrs.as_ref()?.get(XATTR_ACL_ACCESS).and_then(|value| Acl::parse(value))
}
