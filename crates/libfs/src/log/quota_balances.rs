//! Quota balances: the amounts that SharedFS has granted and that pay for updates.
//!
//! A balance is valid for one quota version. SharedFS takes back all balances of a session by beginning another version
//! and then sealing the log. After that, no record can be appended that was paid for before.

use std::collections::HashMap;

use ashlar_types::{QuotaAmount, QuotaKey, QuotaVersion};
use ashlar_wire::{QuotaGrant, QuotaRequest};
use rustix_futex_sync::Mutex;

/// Balances to keep. Beyond, all are dropped, which wastes their amounts until SharedFS takes them back.
const BALANCES_MAX: usize = 4096;

/// The amounts that may still be used; `None`: not limited.
#[derive(Clone, Copy, Debug, Default)]
struct QuotaBalance {
    blocks: Option<u64>,
    inodes: Option<u64>,
}

impl QuotaBalance {
    fn covers(&self, amount: QuotaAmount) -> bool {
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
struct BalanceTable {
    version: QuotaVersion,
    quota_balances: HashMap<QuotaKey, QuotaBalance>,
}

/// The balances of one quota version.
#[derive(Debug, Default)]
pub(crate) struct QuotaBalances(Mutex<BalanceTable>);

impl QuotaBalances {
    /// Pays all amounts or none.
    ///
    /// `false` if a balance is too small or not known for this version.
    pub(crate) fn pay(&self, version: QuotaVersion, wants: &[QuotaRequest]) -> bool {
        if wants.is_empty() {
            return true;
        }
        let mut inner = self.0.lock();
        let covers = |want: &QuotaRequest| {
            inner.quota_balances.get(&want.key).is_some_and(|balance| balance.covers(want.amount))
        };
        if inner.version != version || !wants.iter().all(covers) {
            return false;
        }
        for want in wants {
            if let Some(balance) = inner.quota_balances.get_mut(&want.key) {
                balance.take(want.amount);
            }
        }
        true
    }

    /// Gives back the payment for an update that was not appended.
    pub(crate) fn give_back(&self, version: QuotaVersion, wants: &[QuotaRequest]) {
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

    /// Adds grants to balances. A grant of an earlier version is worth nothing.
    pub(crate) fn fill(&self, version: QuotaVersion, grants: &[QuotaGrant]) {
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

#[cfg(test)]
mod tests {
    use super::*;

    const VERSION: QuotaVersion = QuotaVersion(3);

    fn want(uid: u32, blocks: u64, inodes: u64) -> QuotaRequest {
        QuotaRequest { key: QuotaKey::User(uid), amount: QuotaAmount { blocks, inodes }, exempt: false }
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
