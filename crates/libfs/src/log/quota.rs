//! Quotas: paying for an update before it is appended.
//!
//! Without any limit, which one word of the control page shows, nothing here costs anything. If there are limits, LibFS
//! pays before it appends an update that takes up blocks, of data or of metadata, or creates an inode. It pays from
//! *quota balances* that SharedFS fills (`log/quota_balances.rs`): those of the inode's owner, of its group, and of the
//! subtree that it counts against. So the call that asks for space gets `EDQUOT`.

use ashlar_types::{
    BLOCK_BYTES, Errno, InodeId, QuotaAmount, QuotaId, QuotaKey, blocks_for, entry_blocks, quota_keys, xattr_blocks,
};
use ashlar_update::xattr_size::attribute_bytes;
use ashlar_update::{Allocation, Create, Update};
use ashlar_wire::{QuotaRequest, Reply, Request};

use crate::LibFs;
use crate::api::Outcome;
use crate::leases::grants::{LockedNodes, Stop};

impl LockedNodes<'_> {
    /// Returns the amounts that an update will use, by owner, group and subtree: never less than SharedFS will count.
    pub(crate) fn quota_wants(&self, update: &Update<'_>) -> Result<Vec<QuotaRequest>, Stop> {
        let wants = match *update {
            Update::Write { inode, offset, data, .. } => self.wants_of_range(inode, offset, data.len() as u64)?,
            Update::Allocate { inode, how, offset, length, .. } => match how {
                Allocation::Reserve | Allocation::ReserveKeepSize | Allocation::Zero | Allocation::ZeroKeepSize => {
                    self.wants_of_range(inode, offset, length)?
                }
                Allocation::Punch | Allocation::Collapse | Allocation::Insert => Vec::new(),
            },
            Update::Create(ref create) => {
                let named = !create.name.is_empty();
                let entry = if named { self.wants_of_entry(create.parent)? } else { Vec::new() };
                self.wants_of_new(create)?.into_iter().chain(entry).collect()
            }
            Update::Link { parent, .. } => self.wants_of_entry(parent)?,
            Update::Rename(ref rename) => {
                let whiteout = rename.makes();
                let is_more = rename.target.is_none() && (rename.parent != rename.new_parent || whiteout.is_some());
                let entry = if is_more { self.wants_of_entry(rename.new_parent)? } else { Vec::new() };
                let made = whiteout.map(|create| self.wants_of_new(&create)).transpose()?;
                made.into_iter().flatten().chain(entry).collect()
            }
            Update::SetXattr { inode, name, value, .. } => self.wants_of_xattr(inode, name, value)?,
            Update::SetAttributes(set) => {
                let inode = self.inode(set.inode)?;
                let owner = set.uid.filter(|uid| *uid != inode.uid).map(QuotaKey::User);
                let group = set.gid.filter(|gid| *gid != inode.gid).map(QuotaKey::Group);
                let moved = owner.into_iter().chain(group);
                moved.map(|key| Ok(self.build_want(key, self.amount_of(set.inode)?))).collect::<Result<_, Stop>>()?
            }
            Update::SetQuota { inode, quota, .. } => {
                let (inode, amount) = (self.inode(inode)?, self.amount_of(inode)?);
                let is_new = quota != inode.quota && quota != QuotaId::NONE;
                // Only the super-user does this. A tree that is too large already is counted, and grows no further.
                let want = QuotaRequest { key: QuotaKey::Subtree(quota), amount, exempt: true };
                is_new.then_some(want).into_iter().collect()
            }
            _ => Vec::new(),
        };
        Ok(merge_wants(wants))
    }

    /// Returns what an inode itself counts, with its extended attributes.
    fn amount_of(&self, id: InodeId) -> Result<QuotaAmount, Stop> {
        let QuotaAmount { blocks, inodes } = self.inode(id)?.quota_amount();
        Ok(QuotaAmount { blocks: blocks + xattr_blocks(self.xattr_bytes(id, &[])?), inodes })
    }

    /// Returns the bytes of an inode's extended attributes, but for the one with a name.
    fn xattr_bytes(&self, id: InodeId, without: &[u8]) -> Result<u64, Stop> {
        let xattrs = self.state(id)?.xattrs.as_ref().ok_or(Errno::EIO)?;
        let others = xattrs.iter().filter(|(name, _)| &name[..] != without);
        Ok(others.map(|(name, value)| attribute_bytes(name, value) as u64).sum())
    }

    /// Returns the amounts for an extended attribute.
    fn wants_of_xattr(&self, id: InodeId, name: &[u8], value: &[u8]) -> Result<Vec<QuotaRequest>, Stop> {
        let (before, others) = (self.xattr_bytes(id, &[])?, self.xattr_bytes(id, name)?);
        let after = others + attribute_bytes(name, value) as u64;
        self.wants_of_blocks(id, xattr_blocks(after).saturating_sub(xattr_blocks(before)))
    }

    /// Returns the amounts for one more entry of a directory.
    fn wants_of_entry(&self, directory: InodeId) -> Result<Vec<QuotaRequest>, Stop> {
        let entries = self.inode(directory)?.entries;
        self.wants_of_blocks(directory, entry_blocks(entries + 1) - entry_blocks(entries))
    }

    /// Returns the amounts for blocks that an inode takes more.
    fn wants_of_blocks(&self, id: InodeId, blocks: u64) -> Result<Vec<QuotaRequest>, Stop> {
        let inode = self.inode(id)?;
        if blocks == 0 {
            return Ok(Vec::new());
        }
        Ok(inode.quota_keys().map(|key| self.build_want(key, QuotaAmount { blocks, inodes: 0 })).collect())
    }

    /// Returns the amounts for a new inode.
    fn wants_of_new(&self, create: &Create<'_>) -> Result<Vec<QuotaRequest>, Stop> {
        let keys = quota_keys(create.uid, create.gid, self.inode(create.parent)?.quota);
        Ok(keys.map(|key| self.build_want(key, QuotaAmount { blocks: 0, inodes: 1 })).collect())
    }

    /// Returns the amounts for taking up all blocks of a range.
    fn wants_of_range(&self, id: InodeId, offset: u64, length: u64) -> Result<Vec<QuotaRequest>, Stop> {
        let content = self.state(id)?.content.as_ref().ok_or(Errno::EIO)?;
        let range = offset / BLOCK_BYTES..blocks_for(offset + length);
        self.wants_of_blocks(id, if length == 0 { 0 } else { content.blocks_missing(range) })
    }

    /// Returns a want. Only the limits of subtrees bind the super-user.
    fn build_want(&self, key: QuotaKey, amount: QuotaAmount) -> QuotaRequest {
        QuotaRequest { key, amount, exempt: self.is_exempt && !matches!(key, QuotaKey::Subtree(_)) }
    }
}

/// Merges wants of the same account: SharedFS takes one of each.
fn merge_wants(wants: Vec<QuotaRequest>) -> Vec<QuotaRequest> {
    let mut merged: Vec<QuotaRequest> = Vec::with_capacity(wants.len());
    for want in wants {
        match merged.iter_mut().find(|earlier| earlier.key == want.key) {
            Some(earlier) => {
                earlier.amount.blocks += want.amount.blocks;
                earlier.amount.inodes += want.amount.inodes;
            }
            None => merged.push(want),
        }
    }
    merged
}

impl LibFs {
    /// Requests amounts that an update will use.
    pub(crate) fn request_quota(&self, wants: Vec<QuotaRequest>) -> Outcome<()> {
        match self.call(&Request::Quota(wants))? {
            Reply::Quota { version, grants } => {
                self.quota_balances.fill(version, &grants);
                Ok(())
            }
            _ => Err(Errno::EIO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn want(uid: u32, blocks: u64, inodes: u64) -> QuotaRequest {
        QuotaRequest { key: QuotaKey::User(uid), amount: QuotaAmount { blocks, inodes }, exempt: false }
    }

    #[test]
    fn wants_of_one_account_are_merged() {
        let merged = merge_wants(vec![want(1, 2, 1), want(2, 0, 1), want(1, 1, 0)]);
        assert_eq!(merged, [want(1, 3, 1), want(2, 0, 1)]);
    }
}
