//! Validates a record before it is applied.
//!
//! An honest session that acts for its user under its leases must be able to have written the record. The transition
//! function checks what the state itself decides (entries, kinds, counts).

use ashlar_store::{Store, StoreError};
use ashlar_types::{
    Access, Credentials, DEPTH_MAX, FileKind, Inode, InodeId, LogPosition, MODE_SETGID, SessionId, WHITEOUT_DEVICE,
};
use ashlar_update::acl::Acl;
use ashlar_update::permission::{
    allows, check_xattr_change, granted_access, is_acl, is_stuck, lends_group, lends_rights, may_link, owns,
};
use ashlar_update::xattr_size::lists_fit;
use ashlar_update::{Create, DecodeError, Invalid, Rename, SetAttributes, Update, XATTR_ACL_ACCESS, XATTR_CAPABILITY};
use thiserror::Error;

/// The most directories above another, in any state that is not damaged.
const CLIMB_MAX: u32 = 1 << 20;

/// An act of a session that no honest session does.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Violation {
    /// The log's own structure is broken.
    #[error("its log is damaged: {0}")]
    Log(String),
    /// The log's file was truncated.
    #[error("its log's file was truncated")]
    Truncated,
    /// The log's or the control page's file was made longer.
    #[error("a file of it was made longer")]
    Lengthened,
    /// The record's body is no update.
    #[error("a record can't be read: {0}")]
    Unreadable(#[from] DecodeError),
    /// The update does not fit the state.
    #[error("a record does not fit the state: {0}")]
    Misfit(#[from] Invalid),
    /// The session held no lease that lets it change this inode.
    #[error("a record changes inode {0} without a lease")]
    NoLease(InodeId),
    /// The new inode's number was not granted to the session.
    #[error("a record makes inode {0}, a number that was not granted")]
    ForeignNumber(InodeId),
    /// The session's user may not do this.
    #[error("a record does to inode {0} what its user may not do")]
    NotPermitted(InodeId),
    /// A directory would lie too deep.
    #[error("a record makes a directory far too deep in directory {0}")]
    TooDeep(InodeId),
    /// The inode would have more extended attributes than any may have.
    #[error("a record gives inode {0} too many extended attributes")]
    TooManyAttributes(InodeId),
    /// The session had no credit left for it.
    #[error("a record uses space that was not granted")]
    NoCredit,
    /// The records use more of a limited quota than the session was granted.
    #[error("its records use more than a quota granted it")]
    NoQuota,
    /// The record depends on an update that was not made.
    #[error("a record depends on updates that do not exist")]
    ForgedDependency,
    /// A record or a request of the session made SharedFS panic.
    #[error("serving it met a defect of SharedFS")]
    Panicked,
}

/// Why a record can't be applied.
#[derive(Debug, Error)]
pub enum RecordRefusal {
    /// The session forged it.
    #[error(transparent)]
    Forged(#[from] Violation),
    /// A dependency of the record is not applied yet (at recovery).
    #[error("a record depends on updates of session {0} up to {1} that are not there")]
    Unmet(SessionId, LogPosition),
    /// The session is not known to have been granted this.
    ///
    /// A session from before the machine's last start forged the record, or had not made the grant last.
    #[error(transparent)]
    NotGranted(Violation),
    /// SharedFS itself failed.
    #[error(transparent)]
    Store(StoreError),
}

impl From<StoreError> for RecordRefusal {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Invalid(invalid) => Self::Forged(Violation::Misfit(invalid)),
            error => Self::Store(error),
        }
    }
}

/// The leases of the session whose record is validated.
pub trait Leases {
    /// Returns whether it holds a write lease that governs the inode.
    fn may_write(&self, inode: InodeId) -> bool;
}

/// The state, credentials and leases by which a record is validated.
pub struct Validator<'a, L> {
    /// The applied state.
    pub store: &'a Store,
    /// The session's rights.
    pub credentials: &'a Credentials,
    /// Its leases; `None` if they do not decide.
    ///
    /// The record was validated by leases already, or they were lost with the machine's memory.
    pub leases: Option<L>,
    /// Whether it may make an inode of this number.
    pub is_granted: &'a dyn Fn(InodeId) -> bool,
    /// Whether it had the file open for writing before that right was taken away.
    pub keeps_write: &'a dyn Fn(InodeId) -> bool,
}

fn access_list(store: &Store, id: InodeId) -> Result<Option<Acl>, StoreError> {
    Ok(store.xattr(id, XATTR_ACL_ACCESS)?.and_then(|value| Acl::parse(&value)))
}

/// Returns whether a user may have an inode open with this access.
///
/// # Errors
/// Those of the store.
pub fn may_hold(store: &Store, credentials: &Credentials, id: InodeId, access: Access) -> Result<bool, StoreError> {
    let Some(inode) = store.inode(id)? else { return Ok(false) };
    Ok(granted_access(&inode, access_list(store, id)?.as_ref(), credentials).contains(access))
}

impl<L: Leases> Validator<'_, L> {
    /// Validates one record.
    ///
    /// # Errors
    /// [`RecordRefusal::Forged`] if no honest session could have written it.
    pub fn validate(&self, update: &Update<'_>) -> Result<(), RecordRefusal> {
        match update {
            Update::Write { inode, strip, .. }
            | Update::Resize { inode, strip, .. }
            | Update::Allocate { inode, strip, .. } => self.check_content(*inode, *strip),
            Update::Create(create) => self.check_create(create),
            Update::Link { inode, parent, .. } => {
                self.check_leases(&[*parent, *inode])?;
                if self.check_directory(*parent)?.is_none() {
                    return Ok(());
                }
                let found = self.inode(*inode)?;
                self.require(*inode, may_link(&found, self.acl(*inode)?.as_ref(), self.credentials))
            }
            Update::Unlink { inode, parent, .. } | Update::RemoveDirectory { inode, parent, .. } => {
                self.check_leases(&[*parent, *inode])?;
                self.check_removal(*parent, *inode)
            }
            Update::Rename(rename) => self.check_rename(rename),
            Update::SetAttributes(set) => self.check_attributes(set),
            Update::SetQuota { inode, .. } => {
                self.check_leases(&[*inode])?;
                self.require(*inode, self.credentials.is_privileged())
            }
            Update::SetXattr { inode, name, value, mode, .. } => self.check_xattr(*inode, name, Some(value), *mode),
            Update::RemoveXattr { inode, name, mode, .. } => self.check_xattr(*inode, name, None, *mode),
            // These need no lease: they merge, free nothing without a lease, or only state a fact.
            Update::Accessed { .. } | Update::Release { .. } | Update::Depend { .. } => Ok(()),
        }
    }

    fn check_leases(&self, inodes: &[InodeId]) -> Result<(), RecordRefusal> {
        let Some(leases) = &self.leases else { return Ok(()) };
        match inodes.iter().find(|inode| !leases.may_write(**inode)) {
            Some(inode) => Err(Violation::NoLease(*inode).into()),
            None => Ok(()),
        }
    }

    fn inode(&self, id: InodeId) -> Result<Inode, RecordRefusal> {
        self.store.inode(id)?.ok_or_else(|| Violation::Misfit(Invalid::NoInode(id)).into())
    }

    fn acl(&self, id: InodeId) -> Result<Option<Acl>, StoreError> {
        access_list(self.store, id)
    }

    fn is_allowed(&self, id: InodeId, inode: &Inode, access: Access) -> Result<bool, RecordRefusal> {
        Ok(allows(inode, self.acl(id)?.as_ref(), self.credentials, access))
    }

    fn require(&self, id: InodeId, permitted: bool) -> Result<(), RecordRefusal> {
        if permitted { Ok(()) } else { Err(Violation::NotPermitted(id).into()) }
    }

    /// Returns a directory in which the session's user may make and remove entries.
    fn check_directory(&self, id: InodeId) -> Result<Option<Inode>, RecordRefusal> {
        if self.credentials.is_privileged() {
            return Ok(None);
        }
        let inode = self.inode(id)?;
        self.require(id, self.is_allowed(id, &inode, Access::WRITE | Access::EXECUTE)?)?;
        Ok(Some(inode))
    }

    fn check_removal(&self, parent: InodeId, id: InodeId) -> Result<(), RecordRefusal> {
        let Some(directory) = self.check_directory(parent)? else { return Ok(()) };
        self.require(id, !is_stuck(&directory, &self.inode(id)?, self.credentials))
    }

    fn check_content(&self, id: InodeId, strip: bool) -> Result<(), RecordRefusal> {
        self.check_leases(&[id])?;
        if self.credentials.is_privileged() {
            return Ok(());
        }
        let inode = self.inode(id)?;
        let may_write = owns(&inode, self.credentials)
            || (self.keeps_write)(id)
            || may_hold(self.store, self.credentials, id, Access::WRITE)?;
        self.require(id, may_write)?;
        // New content gets no rights that the file had: the owner too may be a stranger to the file's group.
        self.require(id, strip || !lends_rights(&inode))?;
        self.require(id, self.store.xattr(id, XATTR_CAPABILITY)?.is_none())
    }

    fn check_create(&self, create: &Create<'_>) -> Result<(), RecordRefusal> {
        self.check_leases(&[create.parent])?;
        if !(self.is_granted)(create.inode) {
            return Err(Violation::ForeignNumber(create.inode).into());
        }
        if create.kind == FileKind::Directory {
            self.check_depth(create.parent)?;
        }
        let Some(parent) = self.check_directory(create.parent)? else { return Ok(()) };
        let inherits = parent.mode & MODE_SETGID != 0 && create.gid == parent.gid;
        let member = self.credentials.is_member(create.gid);
        let lends_group = create.kind != FileKind::Directory && lends_group(create.mode);
        // A whiteout opens nothing, so Linux lets any user make one.
        let is_device = match create.kind {
            FileKind::CharDevice => create.device != WHITEOUT_DEVICE,
            kind => kind == FileKind::BlockDevice,
        };
        let lists = [create.acl_access, create.acl_default];
        let takes_lists = (create.acl_access.is_empty() || create.kind != FileKind::Symlink)
            && (create.acl_default.is_empty() || create.kind == FileKind::Directory)
            && lists_fit(create.acl_access, create.acl_default);
        let permitted = create.uid == self.credentials.uid
            && (member || inherits)
            && (member || !lends_group)
            && !is_device
            && takes_lists
            && lists.iter().all(|list| list.is_empty() || Acl::parse(list).is_some());
        self.require(create.inode, permitted)
    }

    fn check_rename(&self, rename: &Rename<'_>) -> Result<(), RecordRefusal> {
        self.check_leases(&[rename.parent, rename.new_parent, rename.inode])?;
        self.check_leases(rename.target.as_slice())?;
        self.check_moved_directory(rename.inode, rename.parent, rename.new_parent)?;
        if let (Some(target), true) = (rename.target, rename.exchange) {
            self.check_moved_directory(target, rename.new_parent, rename.parent)?;
        }
        self.check_removal(rename.parent, rename.inode)?;
        if let Some(create) = rename.makes() {
            self.check_create(&create)?;
        }
        match rename.target {
            Some(target) => self.check_removal(rename.new_parent, target),
            None => self.check_directory(rename.new_parent).map(drop),
        }
    }

    /// Checks the move of a directory to another parent.
    ///
    /// No other session may do such a move at the same time, or two moves could close a cycle.
    fn check_moved_directory(&self, id: InodeId, from: InodeId, to: InodeId) -> Result<(), RecordRefusal> {
        if from == to {
            return Ok(());
        }
        let inode = self.inode(id)?;
        if !inode.is_directory() {
            return Ok(());
        }
        self.check_leases(&[InodeId::RENAME])?;
        self.check_depth(to)?;
        let mut at = to;
        // In a damaged state, the way up may be a circle.
        for _ in 0..CLIMB_MAX {
            match self.inode(at)?.parent {
                _ if at == id => break,
                parent if parent == at => break,
                parent => at = parent,
            }
        }
        if at == id || self.inode(at)?.parent != at {
            return Err(Violation::Misfit(Invalid::Cycle(id)).into());
        }
        // Its entry `..` changes.
        let permitted = self.credentials.is_privileged() || self.is_allowed(id, &inode, Access::WRITE)?;
        self.require(id, permitted)
    }

    /// Refuses a directory that would lie so deep that no honest session makes one there.
    ///
    /// LibFS's limit is lower: meanwhile, another session may have moved the directories above.
    fn check_depth(&self, directory: InodeId) -> Result<(), RecordRefusal> {
        let most = 2 * DEPTH_MAX;
        if self.credentials.is_privileged() || self.store.depth(directory, most)? < most {
            Ok(())
        } else {
            Err(Violation::TooDeep(directory).into())
        }
    }

    fn check_attributes(&self, set: &SetAttributes) -> Result<(), RecordRefusal> {
        self.check_leases(&[set.inode])?;
        if self.credentials.is_privileged() {
            return Ok(());
        }
        let inode = self.inode(set.inode)?;
        let owner = owns(&inode, self.credentials);
        if !owner {
            let names_none = set.mode.is_none() && set.uid.is_none() && set.gid.is_none();
            let permitted = match (set.accessed, set.modified) {
                // A change of owner that names neither is allowed to every user, as on Linux: only the file's time of
                // change moves.
                (None, None) => names_none,
                // A user with write access may set both times to the present.
                (Some(accessed), Some(modified)) => {
                    names_none
                        && (accessed, modified) == (set.at, set.at)
                        && self.is_allowed(set.inode, &inode, Access::WRITE)?
                }
                _ => false,
            };
            return self.require(set.inode, permitted);
        }
        let gid = set.gid.unwrap_or(inode.gid);
        let permitted = set.uid.is_none_or(|uid| uid == inode.uid)
            && (gid == inode.gid || self.credentials.is_member(gid))
            && set.mode.is_none_or(|mode| mode & MODE_SETGID == 0 || self.credentials.is_member(gid));
        self.require(set.inode, permitted)
    }

    fn check_xattr(
        &self,
        id: InodeId,
        name: &[u8],
        value: Option<&[u8]>,
        mode: Option<u32>,
    ) -> Result<(), RecordRefusal> {
        self.check_leases(&[id])?;
        if self.credentials.is_privileged() {
            return Ok(());
        }
        if name == XATTR_CAPABILITY {
            // Each write removes a program's capabilities, and so does each change of owner, also one that names
            // neither.
            return self.require(id, value.is_none() && mode.is_none());
        }
        let inode = self.inode(id)?;
        let acl = self.acl(id)?;
        self.require(id, check_xattr_change(&inode, acl.as_ref(), self.credentials, name).is_ok())?;
        let keeps_mode = match mode {
            Some(mode) if name == XATTR_ACL_ACCESS => mode & MODE_SETGID == 0 || self.credentials.is_member(inode.gid),
            mode => mode.is_none(),
        };
        let is_list = match value {
            Some(value) if is_acl(name) => {
                Acl::parse(value).is_some() && (name == XATTR_ACL_ACCESS || inode.is_directory())
            }
            _ => true,
        };
        self.require(id, keeps_mode && is_list)?;
        match value {
            Some(value) if !self.store.xattr_fits(id, name, value)? => Err(Violation::TooManyAttributes(id).into()),
            _ => Ok(()),
        }
    }
}
