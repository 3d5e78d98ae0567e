//! Quotas: what an update has whom use, and what SharedFS has granted of it.
//!
//! Where nobody is limited, which one word of the control page says, nothing here costs anything. Where somebody is, each update that
//! takes up blocks or makes an inode is paid for before it is appended, from *purses* that SharedFS fills: those of the inode's owner, of
//! its group, and of the subtree that it counts against. So `EDQUOT` comes from the call that asked.
//!
//! A purse is good for one era. SharedFS takes back what is in all purses of a session by beginning another era, and then seals
//! the log: a record that was paid for before can't be appended after.

use std::collections::HashMap;

use ashlar_types::{BLOCK_BYTES, Errno, InodeId, QuotaAmount, QuotaId, QuotaKey, blocks_for, quota_keys};
use ashlar_update::{Allocation, Create, Update};
use ashlar_wire::{QuotaGrant, QuotaVersion, QuotaWant, Reply, Request};

use crate::LibFs;
use crate::alone::Mutex;
use crate::api::Outcome;
use crate::grants::{Locked, Stop};

/// Purses kept at the most. Where there are more they are all dropped, which wastes what is in them until SharedFS takes it back.
const BALANCES_MAX: usize = 4096;

/// What may still be used; `None`: it is not limited.
#[derive(Clone, Copy, Debug, Default)]
struct QuotaBalance {
    blocks: Option<u64>,
    inodes: Option<u64>,
}

impl QuotaBalance {
    fn holds(&self, amount: QuotaAmount) -> bool {
        self.blocks.is_none_or(|blocks| blocks >= amount.blocks)
            && self.inodes.is_none_or(|inodes| inodes >= amount.inodes)
    }

    fn take(&mut self, amount: QuotaAmount) {
        self.blocks = self.blocks.map(|blocks| blocks.saturating_sub(amount.blocks));
        self.inodes = self.inodes.map(|inodes| inodes.saturating_sub(amount.inodes));
    }

    fn give(&mut self, amount: QuotaAmount) {
        self.blocks = self.blocks.map(|blocks| blocks.saturating_add(amount.blocks));
        self.inodes = self.inodes.map(|inodes| inodes.saturating_add(amount.inodes));
    }
}

#[derive(Debug, Default)]
struct Inner {
    version: QuotaVersion,
    quota_balances: HashMap<QuotaKey, QuotaBalance>,
}

/// The purses of one era.
#[derive(Debug, Default)]
pub(crate) struct QuotaBalances(Mutex<Inner>);

impl QuotaBalances {
    /// Pays, all or nothing; `false` where a purse holds too little, or nothing is known of it in this era.
    pub(crate) fn pay(&self, version: QuotaVersion, wants: &[QuotaWant]) -> bool {
        if wants.is_empty() {
            return true;
        }
        let mut inner = self.0.lock();
        let holds =
            |want: &QuotaWant| inner.quota_balances.get(&want.key).is_some_and(|balance| balance.holds(want.amount));
        if inner.version != version || !wants.iter().all(holds) {
            return false;
        }
        for want in wants {
            if let Some(balance) = inner.quota_balances.get_mut(&want.key) {
                balance.take(want.amount);
            }
        }
        true
    }

    /// Gives back what was paid for an update that was not appended.
    pub(crate) fn give_back(&self, version: QuotaVersion, wants: &[QuotaWant]) {
        let mut inner = self.0.lock();
        if inner.version != version {
            return;
        }
        for want in wants {
            if let Some(balance) = inner.quota_balances.get_mut(&want.key) {
                balance.give(want.amount);
            }
        }
    }

    /// Fills purses. A grant of an era that is over is worth nothing.
    fn fill(&self, version: QuotaVersion, grants: &[QuotaGrant]) {
        let mut inner = self.0.lock();
        if version < inner.version {
            return;
        }
        if version > inner.version || inner.quota_balances.len() > BALANCES_MAX {
            inner.version = version;
            inner.quota_balances.clear();
        }
        for grant in grants {
            let balance = inner.quota_balances.entry(grant.key).or_default();
            let sum = |had: Option<u64>, more: Option<u64>| more.map(|more| had.unwrap_or(0).saturating_add(more));
            *balance =
                QuotaBalance { blocks: sum(balance.blocks, grant.blocks), inodes: sum(balance.inodes, grant.inodes) };
        }
    }
}

impl Locked<'_> {
    /// What an update will have whom use: never less than what SharedFS will find.
    pub(crate) fn quota_wants(&self, update: &Update<'_>) -> Result<Vec<QuotaWant>, Stop> {
        let wants = match *update {
            Update::Write { inode, offset, data, .. } => self.wants_of_range(inode, offset, data.len() as u64)?,
            Update::Allocate { inode, how, offset, length, .. } => match how {
                Allocation::Reserve | Allocation::ReserveKeepSize | Allocation::Zero | Allocation::ZeroKeepSize => {
                    self.wants_of_range(inode, offset, length)?
                }
                Allocation::Punch | Allocation::Collapse | Allocation::Insert => Vec::new(),
            },
            Update::Create(ref create) => self.wants_of_new(create)?,
            Update::Rename(ref rename) => match rename.makes() {
                Some(create) => self.wants_of_new(&create)?,
                None => Vec::new(),
            },
            Update::SetAttributes(set) => {
                let inode = self.inode(set.inode)?;
                let owner = set.uid.filter(|uid| *uid != inode.uid).map(QuotaKey::User);
                let group = set.gid.filter(|gid| *gid != inode.gid).map(QuotaKey::Group);
                owner.into_iter().chain(group).map(|key| self.want(key, inode.quota_amount())).collect()
            }
            Update::SetQuota { inode, quota, .. } => {
                let inode = self.inode(inode)?;
                let is_new = quota != inode.quota && quota != QuotaId::NONE;
                // The super-user's own doing: a tree that is too large already is counted, and grows no further.
                let want = QuotaWant { key: QuotaKey::Subtree(quota), amount: inode.quota_amount(), exempt: true };
                is_new.then_some(want).into_iter().collect()
            }
            _ => Vec::new(),
        };
        Ok(wants)
    }

    /// What it takes to make an inode.
    fn wants_of_new(&self, create: &Create<'_>) -> Result<Vec<QuotaWant>, Stop> {
        let keys = quota_keys(create.uid, create.gid, self.inode(create.parent)?.quota);
        Ok(keys.map(|key| self.want(key, QuotaAmount { blocks: 0, inodes: 1 })).collect())
    }

    /// What it takes to have all blocks of a range taken up.
    fn wants_of_range(&self, id: InodeId, offset: u64, length: u64) -> Result<Vec<QuotaWant>, Stop> {
        let state = self.state(id)?;
        let (Some(inode), Some(content)) = (&state.inode, &state.content) else { return Err(Errno::EIO.into()) };
        let range = offset / BLOCK_BYTES..blocks_for(offset + length);
        let blocks = if length == 0 { 0 } else { content.blocks_missing(range) };
        if blocks == 0 {
            return Ok(Vec::new());
        }
        Ok(inode.quota_keys().map(|key| self.want(key, QuotaAmount { blocks, inodes: 0 })).collect())
    }

    /// The super-user is held by the limits of subtrees only.
    fn want(&self, key: QuotaKey, amount: QuotaAmount) -> QuotaWant {
        QuotaWant { key, amount, exempt: self.is_exempt && !matches!(key, QuotaKey::Subtree(_)) }
    }
}

impl LibFs {
    /// Asks SharedFS for what an update will have whom use.
    pub(crate) fn ask_quota(&self, wants: Vec<QuotaWant>) -> Outcome<()> {
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

    const VERSION: QuotaVersion = QuotaVersion(3);

    fn want(uid: u32, blocks: u64, inodes: u64) -> QuotaWant {
        QuotaWant { key: QuotaKey::User(uid), amount: QuotaAmount { blocks, inodes }, exempt: false }
    }

    fn grant(uid: u32, blocks: Option<u64>, inodes: Option<u64>) -> QuotaGrant {
        QuotaGrant { key: QuotaKey::User(uid), blocks, inodes }
    }

    #[test]
    fn balances_pay_all_or_nothing() {
        let quota_balances = QuotaBalances::default();
        assert!(!quota_balances.pay(VERSION, &[want(1, 0, 1)]), "nothing is known yet");
        quota_balances.fill(VERSION, &[grant(1, Some(3), None), grant(2, None, Some(1))]);
        assert!(quota_balances.pay(VERSION, &[want(1, 2, 1000), want(2, 1000, 1)]));
        assert!(!quota_balances.pay(VERSION, &[want(1, 1, 0), want(2, 0, 1)]), "the second has nothing left");
        assert!(quota_balances.pay(VERSION, &[want(1, 1, 0)]), "so the first has lost nothing");
        quota_balances.give_back(VERSION, &[want(2, 0, 1)]);
        assert!(quota_balances.pay(VERSION, &[want(2, 0, 1)]));
        quota_balances.fill(VERSION, &[grant(1, Some(2), None)]);
        quota_balances.fill(VERSION, &[grant(1, Some(2), None)]);
        assert!(quota_balances.pay(VERSION, &[want(1, 4, 0)]));
    }

    #[test]
    fn balance_is_void_in_another_version() {
        let quota_balances = QuotaBalances::default();
        quota_balances.fill(VERSION, &[grant(1, Some(10), None)]);
        let next = VERSION.next(true);
        assert!(!quota_balances.pay(next, &[want(1, 1, 0)]));
        quota_balances.fill(next, &[grant(1, Some(1), None)]);
        quota_balances.fill(VERSION, &[grant(1, Some(10), None)]);
        quota_balances.give_back(VERSION, &[want(1, 10, 0)]);
        assert!(quota_balances.pay(next, &[want(1, 1, 0)]) && !quota_balances.pay(next, &[want(1, 1, 0)]));
    }
}
