//! Renaming: moving a name, and exchanging two names.

use ashlar_types::{Access, Credentials, Errno, FileKind, InodeId, LINK_MAX, WHITEOUT_DEVICE, WHITEOUT_MODE};
use ashlar_update::{Entry, Rename, Update, Whiteout, permission, quota_allows};
use ashlar_wire::OperationKind;
use smallvec::{SmallVec, smallvec};

use crate::LibFs;
use crate::api::{NewInode, Outcome, RenameFlags, check_new_name};
use crate::leases::claim::{CLAIMS_MAX, Claim};
use crate::leases::grants::{LockedNodes, Stop};
use crate::names::entries::Inheritance;

/// The inode that a rename leaves at the old name if it is asked for a whiteout.
const WHITEOUT: NewInode<'_> =
    NewInode { kind: FileKind::CharDevice, mode: WHITEOUT_MODE, umask: 0, device: WHITEOUT_DEVICE, target: &[] };

impl LibFs {
    /// Moves a name, or exchanges two.
    ///
    /// # Errors
    /// `ENOENT`, `EEXIST`, `ENOTDIR`, `EISDIR`, `ENOTEMPTY`, `EINVAL` (a directory into itself, flags that exclude each
    /// other), `ENAMETOOLONG` (also a directory that comes to lie deeper than [`ashlar_types::DEPTH_MAX`]), `EBUSY`,
    /// `EACCES`, `EPERM`, `EMLINK`, `EXDEV` (another subtree's quota), `ENOSPC`; for a whiteout
    /// `EDQUOT`.
    pub fn rename(
        &self,
        user: &Credentials,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        flags: RenameFlags,
    ) -> Outcome<()> {
        self.rename_found(user, from, to, flags, None)
    }

    /// As [`LibFs::rename`], for the entries that were just looked up at the two names, if they were.
    pub(crate) fn rename_found(
        &self,
        user: &Credentials,
        from: (InodeId, &[u8]),
        to: (InodeId, &[u8]),
        flags: RenameFlags,
        mut found_entries: Option<(Entry, Option<Entry>)>,
    ) -> Outcome<()> {
        let _measured = self.begin_operation(OperationKind::Name);
        let (parent, name) = from;
        let (new_parent, new_name) = to;
        check_new_name(name, Errno::EBUSY)?;
        check_new_name(new_name, Errno::EBUSY)?;
        if flags.exchange && (flags.no_replace || flags.whiteout) {
            return Err(Errno::EINVAL);
        }
        if found_entries.is_none() {
            self.check_access(user, parent, Access::EXECUTE)?;
            self.check_access(user, new_parent, Access::EXECUTE)?;
        }
        loop {
            let were_found = found_entries.is_some();
            let (source, target) = match found_entries.take() {
                Some(found) => found,
                None => {
                    let source = self.find_entry(parent, name, true)?.ok_or(Errno::ENOENT)?;
                    (source, self.find_entry(new_parent, new_name, true)?)
                }
            };
            if flags.replaced.is_some_and(|replaced| target.is_none_or(|target| target.inode != replaced)) {
                return Err(Errno::ESTALE);
            }
            match (target, flags) {
                (Some(_), RenameFlags { no_replace: true, .. }) => return Err(Errno::EEXIST),
                (None, RenameFlags { exchange: true, .. }) => return Err(Errno::ENOENT),
                _ => {}
            }
            if were_found {
                self.check_above((parent, source), (new_parent, target), flags.exchange)?;
            }
            if let Some(found) = target
                && found.inode == source.inode
            {
                // Both names lead to one inode: POSIX asks for no change, whatever the rights to change the
                // directories. But during another rename, a name may be seen at both places; so both are checked under
                // the locks.
                let claims = [parent, new_parent].map(|directory| Claim::read(directory).with_entries());
                let are_both_there = self.change_nodes(&claims, |locked| {
                    locked.expect_entry(parent, name, Some(source)).map_err(|_| Errno::ECANCELED)?;
                    Ok(locked.expect_entry(new_parent, new_name, target).map_err(|_| Errno::ECANCELED)?)
                });
                match are_both_there {
                    Err(Errno::ECANCELED | Errno::ESTALE) => continue,
                    result => return result,
                }
            }
            let is_directory = |entry: Entry| entry.kind == FileKind::Directory;
            self.check_removal(user, parent, source, is_directory(source))?;
            match target {
                Some(target) => {
                    let as_directory = is_directory(if flags.exchange { target } else { source });
                    self.check_removal(user, new_parent, target, as_directory)?;
                }
                None if new_parent != parent => self.check_change(user, new_parent)?,
                None => {}
            }
            let whiteout = flags.whiteout.then(|| self.next_inode()).transpose()?;
            let plan =
                RenamePlan { parent, name, new_parent, new_name, source, target, exchange: flags.exchange, whiteout };
            match self.move_once(user, &plan) {
                Err(Errno::ECANCELED) => {}
                Err(Errno::ESTALE) if self.find_entry(parent, name, true)? != Some(source) => {}
                Err(Errno::ESTALE) if self.find_entry(new_parent, new_name, true)? != target => {}
                result => return result,
            }
        }
    }

    /// Fails if a directory would move into itself, or replace one of its ancestors.
    ///
    /// The kernel reports this before kinds and rights. The result is certain only while directories stand still
    /// ([`Self::move_once`]).
    fn check_above(
        &self,
        (parent, source): (InodeId, Entry),
        (new_parent, target): (InodeId, Option<Entry>),
        exchange: bool,
    ) -> Outcome<()> {
        if parent == new_parent {
            return Ok(());
        }
        if source.kind == FileKind::Directory && self.is_ancestor(source.inode, new_parent)? {
            return Err(Errno::EINVAL);
        }
        match target.filter(|target| target.kind == FileKind::Directory) {
            Some(target) if self.is_ancestor(target.inode, parent)? => {
                Err(if exchange { Errno::EINVAL } else { Errno::ENOTEMPTY })
            }
            _ => Ok(()),
        }
    }

    fn move_once(&self, user: &Credentials, plan: &RenamePlan<'_>) -> Outcome<()> {
        let source_is_directory = plan.source.kind == FileKind::Directory;
        let target_is_directory = plan.target.is_some_and(|target| target.kind == FileKind::Directory);
        let crosses = plan.parent != plan.new_parent;
        let parent = Claim::to_change(user, plan.parent);
        // A whiteout inherits from its directory like every new inode.
        let parent = if plan.whiteout.is_some() { parent.with_xattrs() } else { parent };
        let mut claims: SmallVec<[Claim; CLAIMS_MAX]> = smallvec![parent, Claim::to_change(user, plan.new_parent)];
        let moves_directory = crosses && (source_is_directory || plan.exchange && target_is_directory);
        if moves_directory {
            claims.push(Claim::write(InodeId::RENAME));
        }
        let claim = |entry: Entry| {
            let moves = crosses && entry.kind == FileKind::Directory;
            if moves { Claim::to_change(user, entry.inode).with_subtree() } else { Claim::write(entry.inode) }
        };
        claims.push(claim(plan.source));
        // A replaced directory is empty: nothing below it needs a lease.
        claims.extend(plan.target.map(|target| if plan.exchange { claim(target) } else { Claim::write(target.inode) }));
        let _one_at_a_time = moves_directory.then(|| self.moving.lock());
        let mut lease = None;
        if moves_directory {
            // The rename lease keeps the ancestors where they are while it is held. It is claimed again with the other
            // nodes below, and must be the same lease then.
            lease =
                self.change_nodes(&[Claim::write(InodeId::RENAME)], |locked| Ok(locked.state(InodeId::RENAME)?.lease))?;
            if source_is_directory && self.is_ancestor(plan.source.inode, plan.new_parent)? {
                return Err(Errno::EINVAL);
            }
            if source_is_directory {
                self.check_depth(plan.new_parent)?;
            }
            if let Some(target) = plan.target.filter(|_| plan.exchange && target_is_directory) {
                if self.is_ancestor(target.inode, plan.parent)? {
                    return Err(Errno::EINVAL);
                }
                self.check_depth(plan.parent)?;
            }
        }
        // An ancestor can't be replaced: it isn't empty.
        self.change_nodes(&claims, |locked| {
            if moves_directory && locked.state(InodeId::RENAME)?.lease != lease {
                return Err(Errno::ECANCELED.into());
            }
            self.move_locked(locked, user, plan)
        })
    }

    fn move_locked(&self, locked: &mut LockedNodes<'_>, user: &Credentials, plan: &RenamePlan<'_>) -> Result<(), Stop> {
        let &RenamePlan { parent, name, new_parent, new_name, source, target, exchange, whiteout } = plan;
        locked.act_for(user);
        locked.expect_entry(parent, name, Some(source)).map_err(|_| Errno::ECANCELED)?;
        locked.expect_entry(new_parent, new_name, target).map_err(|_| Errno::ECANCELED)?;
        let into = locked.inode(new_parent)?;
        if into.links == 0 {
            return Err(Errno::ENOENT.into());
        }
        locked.check_change(user, parent)?;
        locked.check_change(user, new_parent)?;
        if parent != new_parent
            && source.kind == FileKind::Directory
            && into.links >= LINK_MAX
            && target.is_none_or(|t| t.kind != FileKind::Directory)
        {
            return Err(Errno::EMLINK.into());
        }
        if permission::is_stuck(locked.inode(parent)?, locked.inode(source.inode)?, user) {
            return Err(Errno::EPERM.into());
        }
        check_quotas(locked, plan)?;
        // A directory that moves gets a new "..": that is a write to it.
        let needs_write = |locked: &LockedNodes<'_>, entry: Entry| -> Result<bool, Stop> {
            let crosses = parent != new_parent && entry.kind == FileKind::Directory;
            Ok(crosses && !self.allows_access(locked.state(entry.inode)?, user, Access::WRITE))
        };
        if needs_write(locked, source)? {
            return Err(Errno::EACCES.into());
        }
        let mut release = false;
        if let Some(target) = target {
            if permission::is_stuck(into, locked.inode(target.inode)?, user) {
                return Err(Errno::EPERM.into());
            }
            if exchange {
                if needs_write(locked, target)? {
                    return Err(Errno::EACCES.into());
                }
            } else if locked.inode(target.inode)?.entries != 0 {
                return Err(Errno::ENOTEMPTY.into());
            }
            release = !exchange && !self.control.has_open(target.inode);
        }
        let rename = Rename {
            parent,
            name,
            inode: source.inode,
            new_parent,
            new_name,
            target: target.map(|target| target.inode),
            exchange,
            whiteout: None,
            release,
            at: Self::now(),
        };
        let Some(inode) = whiteout else { return locked.log_update(&Update::Rename(rename)).map(drop) };
        let Inheritance { gid, acl_access, .. } = Inheritance::from(locked, parent, user, &WHITEOUT)?;
        let whiteout = Whiteout { inode, uid: user.uid, gid, acl_access: &acl_access };
        let rename = Rename { whiteout: Some(whiteout), ..rename };
        self.log_creation(locked, &Update::Rename(rename), inode, parent)
    }

    /// Returns whether `ancestor` is `inode` or above it. While the caller holds the rename lease, nothing moves.
    fn is_ancestor(&self, ancestor: InodeId, inode: InodeId) -> Outcome<bool> {
        let mut at = inode;
        loop {
            if at == ancestor {
                return Ok(true);
            }
            let parent = self.find_inode(at)?.inode.parent;
            if parent == at {
                return Ok(false);
            }
            at = parent;
        }
    }
}

/// A rename with the entries that were looked up.
struct RenamePlan<'a> {
    parent: InodeId,
    name: &'a [u8],
    new_parent: InodeId,
    new_name: &'a [u8],
    source: Entry,
    target: Option<Entry>,
    exchange: bool,
    /// The inode number of the whiteout that it leaves.
    whiteout: Option<InodeId>,
}

/// Checks that no inode moves to where another subtree's quota counts.
///
/// The program then copies the inode, and the copy counts there.
fn check_quotas(locked: &LockedNodes<'_>, plan: &RenamePlan<'_>) -> Result<(), Stop> {
    if plan.parent == plan.new_parent {
        return Ok(());
    }
    let (from, into) = (locked.inode(plan.parent)?, locked.inode(plan.new_parent)?);
    let comes_back = plan.target.filter(|_| plan.exchange).map(|target| (target, from));
    for (entry, directory) in std::iter::once((plan.source, into)).chain(comes_back) {
        if !quota_allows(entry.inode, locked.inode(entry.inode)?, directory) {
            return Err(Errno::EXDEV.into());
        }
    }
    Ok(())
}
