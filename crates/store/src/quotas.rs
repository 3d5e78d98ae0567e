//! The accounts of users, groups and subtrees: use and limits.
//!
//! All accounts are in memory as applied, a few dozen bytes for each owner, group and subtree that is in use or
//! limited. Every change of an inode moves its blocks, and itself, between them. A commit writes those that have
//! changed in the transaction of the inodes.

use ashlar_types::{Inode, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaLimits, quota_keys};

use crate::metadata::batch::InodeMap;
use crate::metadata::rows;

/// An inode's use, and the accounts that it counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    uid: u32,
    gid: u32,
    quota: QuotaId,
    blocks: u64,
}

impl Holding {
    /// This inode's use, without its extended attributes.
    pub fn of(inode: &Inode) -> Self {
        Self { uid: inode.uid, gid: inode.gid, quota: inode.quota, blocks: inode.quota_amount().blocks }
    }

    /// The same with so many blocks more.
    pub fn plus(self, blocks: u64) -> Self {
        Self { blocks: self.blocks + blocks, ..self }
    }

    /// Whether another inode counts against the same accounts.
    pub fn has_accounts_of(&self, other: &Self) -> bool {
        (self.uid, self.gid, self.quota) == (other.uid, other.gid, other.quota)
    }
}

/// By how much an account has grown, or shrunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The account.
    pub key: QuotaKey,
    /// Blocks more, or less.
    pub blocks: i64,
    /// Inodes more, or less.
    pub inodes: i64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    used: QuotaAmount,
    limits: QuotaLimits,
    /// Its row differs from the last freeze's.
    is_changed: bool,
}

impl Account {
    /// Whether it says anything: it uses something, or is limited.
    fn is_needed(&self) -> bool {
        self.used != QuotaAmount::default() || !self.limits.is_none()
    }
}

/// The accounts.
#[derive(Debug, Default)]
pub struct Quotas {
    accounts: InodeMap<Account>,
    changed: Vec<QuotaKey>,
    limited: usize,
    /// Changes of accounts with limits since [`Self::take_moves`].
    moves: Vec<Move>,
}

impl Quotas {
    /// Takes a row over.
    pub fn load(&mut self, key: QuotaKey, used: QuotaAmount, limits: QuotaLimits) {
        self.limited += usize::from(!limits.is_none());
        self.accounts.insert(rows::quota_number(key), Account { used, limits, is_changed: false });
    }

    /// The account's use and limits.
    pub fn account(&self, key: QuotaKey) -> (QuotaAmount, QuotaLimits) {
        self.accounts.get(&rows::quota_number(key)).map_or_else(Default::default, |found| (found.used, found.limits))
    }

    /// All accounts that use something or are limited, in the order of their keys.
    pub fn all(&self) -> Vec<(QuotaKey, QuotaAmount, QuotaLimits)> {
        let known = |(&number, account): (&u64, &Account)| {
            let key = rows::quota_key_of(number)?;
            account.is_needed().then_some((key, account.used, account.limits))
        };
        let mut all: Vec<_> = self.accounts.iter().filter_map(known).collect();
        all.sort_unstable_by_key(|(key, ..)| *key);
        all
    }

    /// Whether any account has a limit.
    pub fn has_limits(&self) -> bool {
        self.limited > 0
    }

    /// Replaces an account's row.
    pub fn replace(&mut self, key: QuotaKey, used: QuotaAmount, limits: QuotaLimits) {
        self.set_limits(key, limits);
        Self::changing(&mut self.accounts, &mut self.changed, key).used = used;
    }

    /// Sets limits, or takes them away.
    pub fn set_limits(&mut self, key: QuotaKey, limits: QuotaLimits) {
        let account = Self::changing(&mut self.accounts, &mut self.changed, key);
        self.limited += usize::from(!limits.is_none());
        self.limited -= usize::from(!account.limits.is_none());
        account.limits = limits;
    }

    /// Removes the limits of a subtree whose top directory is gone.
    pub fn forget_top(&mut self, inode: InodeId) {
        let key = QuotaKey::Subtree(QuotaId::of(inode));
        if self.limited > 0 && !self.account(key).1.is_none() {
            self.set_limits(key, QuotaLimits::default());
        }
    }

    /// Changes the account of an inode's usage; `None`: the inode is new, or is removed.
    pub fn shift(&mut self, before: Option<Holding>, after: Option<Holding>) {
        if before == after {
            return;
        }
        let (old, new) = (before.as_ref(), after.as_ref());
        self.shift_one(old.map(|of| QuotaKey::User(of.uid)), new.map(|of| QuotaKey::User(of.uid)), old, new);
        self.shift_one(old.map(|of| QuotaKey::Group(of.gid)), new.map(|of| QuotaKey::Group(of.gid)), old, new);
        let subtree = |of: &Holding| (of.quota != QuotaId::NONE).then_some(QuotaKey::Subtree(of.quota));
        self.shift_one(old.and_then(subtree), new.and_then(subtree), old, new);
    }

    fn shift_one(
        &mut self,
        from: Option<QuotaKey>,
        to: Option<QuotaKey>,
        before: Option<&Holding>,
        after: Option<&Holding>,
    ) {
        let blocks = |of: Option<&Holding>| of.map_or(0, |of| of.blocks as i64);
        if from == to {
            if let Some(key) = from.filter(|_| blocks(before) != blocks(after)) {
                self.add(Move { key, blocks: blocks(after) - blocks(before), inodes: 0 });
            }
            return;
        }
        if let Some(key) = from {
            self.add(Move { key, blocks: -blocks(before), inodes: -1 });
        }
        if let Some(key) = to {
            self.add(Move { key, blocks: blocks(after), inodes: 1 });
        }
    }

    fn add(&mut self, moved: Move) {
        let account = Self::changing(&mut self.accounts, &mut self.changed, moved.key);
        // Less than nothing would come from damage, which the check tells of.
        account.used.blocks = account.used.blocks.saturating_add_signed(moved.blocks);
        account.used.inodes = account.used.inodes.saturating_add_signed(moved.inodes);
        if account.limits.is_none() {
            return;
        }
        match self.moves.iter_mut().find(|earlier| earlier.key == moved.key) {
            Some(earlier) => {
                earlier.blocks += moved.blocks;
                earlier.inodes += moved.inodes;
            }
            None => self.moves.push(moved),
        }
    }

    fn changing<'a>(
        accounts: &'a mut InodeMap<Account>,
        changed: &mut Vec<QuotaKey>,
        key: QuotaKey,
    ) -> &'a mut Account {
        let account = accounts.entry(rows::quota_number(key)).or_default();
        if !account.is_changed {
            account.is_changed = true;
            changed.push(key);
        }
        account
    }

    /// How accounts with limits have moved since this was called last, each in sum.
    pub fn take_moves(&mut self) -> Vec<Move> {
        std::mem::take(&mut self.moves)
    }

    /// Whether a commit has anything to write.
    pub fn is_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// The rows that have changed since the last freeze. Accounts of nothing are forgotten.
    pub fn freeze(&mut self) -> Vec<([u8; 9], Option<Vec<u8>>)> {
        let mut frozen = Vec::with_capacity(self.changed.len());
        for key in std::mem::take(&mut self.changed) {
            let number = rows::quota_number(key);
            let Some(account) = self.accounts.get_mut(&number) else { continue };
            account.is_changed = false;
            let is_kept = account.is_needed();
            frozen.push((rows::quota_row_key(key), is_kept.then(|| rows::encode_quota(account.used, account.limits))));
            if !is_kept {
                self.accounts.remove(&number);
            }
        }
        frozen
    }
}

/// The rows that count the root directory of a new file system.
pub fn rows_of_new(root: &Inode) -> impl Iterator<Item = ([u8; 9], Vec<u8>)> {
    let value = rows::encode_quota(root.quota_amount(), QuotaLimits::default());
    quota_keys(root.uid, root.gid, root.quota).map(move |key| (rows::quota_row_key(key), value.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding(uid: u32, quota: u64, blocks: u64) -> Option<Holding> {
        Some(Holding { uid, gid: 9, quota: QuotaId(quota), blocks })
    }

    #[test]
    fn blocks_and_inodes_move_between_accounts() {
        let mut quotas = Quotas::default();
        let (one, two, tree) = (QuotaKey::User(1), QuotaKey::User(2), QuotaKey::Subtree(QuotaId(16)));
        quotas.set_limits(two, QuotaLimits { blocks: Some(10), inodes: None });
        assert!(quotas.has_limits());
        quotas.shift(None, holding(1, 0, 0));
        quotas.shift(holding(1, 0, 0), holding(1, 0, 5));
        quotas.shift(holding(1, 0, 5), holding(2, 16, 5));
        quotas.shift(holding(2, 16, 5), holding(2, 16, 3));
        let used = |quotas: &Quotas, key| quotas.account(key).0;
        let amount = |blocks, inodes| QuotaAmount { blocks, inodes };
        assert_eq!(
            (used(&quotas, one), used(&quotas, two), used(&quotas, tree)),
            (amount(0, 0), amount(3, 1), amount(3, 1))
        );
        assert_eq!(used(&quotas, QuotaKey::Group(9)), amount(3, 1));
        assert_eq!(quotas.take_moves(), [Move { key: two, blocks: 3, inodes: 1 }], "only what is limited is watched");
        quotas.shift(holding(2, 16, 3), None);
        assert_eq!(quotas.all(), [(two, amount(0, 0), QuotaLimits { blocks: Some(10), inodes: None })]);
        let rows = quotas.freeze();
        assert_eq!((rows.len(), rows.iter().filter(|(_, value)| value.is_some()).count()), (4, 1));
        assert!(!quotas.is_changed());
        quotas.set_limits(two, QuotaLimits::default());
        assert!(!quotas.has_limits() && quotas.is_changed());
        quotas.set_limits(tree, QuotaLimits { blocks: None, inodes: Some(1) });
        quotas.forget_top(InodeId(17));
        assert!(quotas.has_limits());
        quotas.forget_top(InodeId(16));
        assert!(!quotas.has_limits());
    }
}
