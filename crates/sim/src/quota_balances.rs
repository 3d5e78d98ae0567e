//! A client pays for its updates where quotas limit users, groups and subtrees, as LibFS does it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ashlar_types::{
    BLOCK_BYTES, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaVersion, blocks_for, entry_blocks, quota_keys,
    xattr_blocks,
};
use ashlar_update::model::ModelTree;
use ashlar_update::xattr_size::attribute_bytes;
use ashlar_update::{Allocation, Create, Update};
use ashlar_wire::{QuotaGrant, QuotaRequest};

use crate::intent::inode;

/// The amounts of one account that a client may still use; `None`: not limited.
#[derive(Clone, Copy, Debug, Default)]
struct ClientBalance {
    blocks: Option<u64>,
    inodes: Option<u64>,
}

/// The balances of a client in one quota version.
#[derive(Debug, Default)]
pub struct ClientBalances {
    version: QuotaVersion,
    balances: BTreeMap<QuotaKey, ClientBalance>,
}

impl ClientBalances {
    /// Pays all amounts or none; `false` if a balance is too small, or not known in this version.
    pub fn pay(&mut self, version: QuotaVersion, wants: &[QuotaRequest]) -> bool {
        let is_covered = |want: &QuotaRequest| {
            self.balances.get(&want.key).is_some_and(|balance| {
                balance.blocks.is_none_or(|blocks| blocks >= want.amount.blocks)
                    && balance.inodes.is_none_or(|inodes| inodes >= want.amount.inodes)
            })
        };
        if !wants.is_empty() && (self.version != version || !wants.iter().all(is_covered)) {
            return false;
        }
        self.shift(wants, u64::saturating_sub);
        true
    }

    /// Gives back what was paid for an update that was not appended.
    pub fn give_back(&mut self, version: QuotaVersion, wants: &[QuotaRequest]) {
        if self.version == version {
            self.shift(wants, u64::saturating_add);
        }
    }

    fn shift(&mut self, wants: &[QuotaRequest], with: fn(u64, u64) -> u64) {
        for want in wants {
            if let Some(balance) = self.balances.get_mut(&want.key) {
                balance.blocks = balance.blocks.map(|blocks| with(blocks, want.amount.blocks));
                balance.inodes = balance.inodes.map(|inodes| with(inodes, want.amount.inodes));
            }
        }
    }

    /// Adds what was granted. A grant of an earlier version is worth nothing.
    pub fn fill(&mut self, version: QuotaVersion, grants: &[QuotaGrant]) {
        if version < self.version {
            return;
        }
        if version > self.version {
            (self.version, self.balances) = (version, BTreeMap::new());
        }
        for grant in grants {
            let balance = self.balances.entry(grant.key).or_default();
            let sum = |had: Option<u64>, more: Option<u64>| more.map(|more| had.unwrap_or(0).saturating_add(more));
            let (blocks, inodes) = (sum(balance.blocks, grant.blocks), sum(balance.inodes, grant.inodes));
            *balance = ClientBalance { blocks, inodes };
        }
    }
}

/// Returns what an update will use of each account; never less than SharedFS will count.
#[must_use]
pub fn quota_wants(tree: &ModelTree, update: &Update<'_>, is_root: bool) -> Vec<QuotaRequest> {
    let used = UpdateUse { tree };
    let amounts = match update {
        Update::Write { inode, offset, data, .. } => used.of_range(*inode, *offset, data.len() as u64),
        Update::Allocate {
            inode,
            how: Allocation::Zero | Allocation::ZeroKeepSize | Allocation::Reserve | Allocation::ReserveKeepSize,
            offset,
            length,
            ..
        } => used.of_range(*inode, *offset, *length),
        Update::Create(create) => {
            let entry = if create.name.is_empty() { Vec::new() } else { used.of_entry(create.parent) };
            [used.of_new(create), entry].concat()
        }
        Update::Link { parent, .. } => used.of_entry(*parent),
        Update::Rename(rename) => {
            let whiteout = rename.makes();
            let is_more = rename.target.is_none() && (rename.parent != rename.new_parent || whiteout.is_some());
            let entry = if is_more { used.of_entry(rename.new_parent) } else { Vec::new() };
            [whiteout.map_or_else(Vec::new, |create| used.of_new(&create)), entry].concat()
        }
        Update::SetXattr { inode, name, value, .. } => {
            let (before, others) = (used.xattr_bytes(*inode, b""), used.xattr_bytes(*inode, name));
            let after = others + attribute_bytes(name, value) as u64;
            used.of_blocks(*inode, xattr_blocks(after).saturating_sub(xattr_blocks(before)))
        }
        Update::SetAttributes(set) => inode(tree, set.inode).map_or_else(Vec::new, |found| {
            let owner = set.uid.filter(|uid| *uid != found.uid).map(QuotaKey::User);
            let group = set.gid.filter(|gid| *gid != found.gid).map(QuotaKey::Group);
            owner.into_iter().chain(group).map(|key| (key, used.of_inode(set.inode))).collect()
        }),
        Update::SetQuota { inode: id, quota, .. } if *quota != QuotaId::NONE => {
            let is_new = inode(tree, *id).is_some_and(|found| found.quota != *quota);
            is_new.then(|| (QuotaKey::Subtree(*quota), used.of_inode(*id))).into_iter().collect()
        }
        _ => Vec::new(),
    };
    // A tree that is too large already may be counted, and grows no further.
    let is_counted_anew = matches!(update, Update::SetQuota { .. });
    let mut wants: Vec<QuotaRequest> = Vec::new();
    for (key, amount) in amounts {
        match wants.iter_mut().find(|want| want.key == key) {
            Some(want) => {
                want.amount.blocks += amount.blocks;
                want.amount.inodes += amount.inodes;
            }
            None => wants.push(QuotaRequest {
                key,
                amount,
                exempt: is_root && (is_counted_anew || !matches!(key, QuotaKey::Subtree(_))),
            }),
        }
    }
    wants
}

type Amounts = Vec<(QuotaKey, QuotaAmount)>;

/// Counts the use by parts of an update, as the tree is before it.
struct UpdateUse<'a> {
    tree: &'a ModelTree,
}

impl UpdateUse<'_> {
    fn of_range(&self, id: InodeId, offset: u64, length: u64) -> Amounts {
        let range: Range<u64> = offset / BLOCK_BYTES..blocks_for(offset + length);
        let taken = self.tree.blocks(id).into_iter().filter(|(block, _)| range.contains(block)).count() as u64;
        self.of_blocks(id, if length == 0 { 0 } else { (range.end - range.start).saturating_sub(taken) })
    }

    fn of_entry(&self, directory: InodeId) -> Amounts {
        let entries = inode(self.tree, directory).map_or(0, |found| found.entries);
        self.of_blocks(directory, entry_blocks(entries + 1) - entry_blocks(entries))
    }

    fn of_new(&self, create: &Create<'_>) -> Amounts {
        let Some(parent) = inode(self.tree, create.parent) else { return Vec::new() };
        let keys = quota_keys(create.uid, create.gid, parent.quota);
        keys.map(|key| (key, QuotaAmount { blocks: 0, inodes: 1 })).collect()
    }

    fn of_blocks(&self, id: InodeId, blocks: u64) -> Amounts {
        match inode(self.tree, id).filter(|_| blocks > 0) {
            Some(found) => found.quota_keys().map(|key| (key, QuotaAmount { blocks, inodes: 0 })).collect(),
            None => Vec::new(),
        }
    }

    fn of_inode(&self, id: InodeId) -> QuotaAmount {
        let QuotaAmount { blocks, inodes } = inode(self.tree, id).map_or_else(Default::default, |i| i.quota_amount());
        QuotaAmount { blocks: blocks + xattr_blocks(self.xattr_bytes(id, b"")), inodes }
    }

    fn xattr_bytes(&self, id: InodeId, without: &[u8]) -> u64 {
        let xattrs = self.tree.xattrs(id);
        xattrs.iter().filter(|(name, _)| name != without).map(|(name, value)| attribute_bytes(name, value) as u64).sum()
    }
}

/// Returns the use of each account by all inodes that have names, or are among `others`.
#[must_use]
pub fn use_of_tree(tree: &ModelTree, others: &BTreeSet<InodeId>) -> BTreeMap<QuotaKey, QuotaAmount> {
    let mut sums = BTreeMap::<QuotaKey, QuotaAmount>::new();
    let used = UpdateUse { tree };
    for (id, inode) in tree.inodes().filter(|(id, inode)| inode.links > 0 || others.contains(id)) {
        let amount = used.of_inode(id);
        for key in inode.quota_keys() {
            let sum = sums.entry(key).or_default();
            (sum.blocks, sum.inodes) = (sum.blocks + amount.blocks, sum.inodes + amount.inodes);
        }
    }
    sums
}
