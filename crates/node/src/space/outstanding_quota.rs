//! The quota balances of one session.

use std::collections::BTreeMap;

use ashlar_store::Move;
use ashlar_types::{QuotaAmount, QuotaKey, QuotaLimits};

/// A session's outstanding balances: granted, and not yet found used, by account.
#[derive(Debug, Default)]
pub struct OutstandingQuota {
    amounts: BTreeMap<QuotaKey, QuotaAmount>,
}

impl OutstandingQuota {
    /// Returns the balance of an account.
    pub fn of(&self, key: QuotaKey) -> QuotaAmount {
        self.amounts.get(&key).copied().unwrap_or_default()
    }

    /// Books a granted balance.
    pub fn grant(&mut self, key: QuotaKey, amount: QuotaAmount) {
        let held = self.amounts.entry(key).or_default();
        held.blocks = held.blocks.saturating_add(amount.blocks);
        held.inodes = held.inodes.saturating_add(amount.inodes);
    }

    /// Books the use of a limited resource by a batch.
    ///
    /// Returns `false` if that is more than was granted.
    pub fn spend(&mut self, moved: &Move, limits: QuotaLimits) -> bool {
        let held = self.amounts.entry(moved.key).or_default();
        let spend = |held: &mut u64, limit: Option<u64>, more: i64| {
            let more = u64::try_from(more).unwrap_or(0);
            let is_granted = limit.is_none() || more <= *held;
            *held = held.saturating_sub(more);
            is_granted
        };
        let blocks = spend(&mut held.blocks, limits.blocks, moved.blocks);
        let inodes = spend(&mut held.inodes, limits.inodes, moved.inodes);
        blocks && inodes
    }

    /// Clears all outstanding balances.
    pub fn clear(&mut self) {
        self.amounts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_beyond_grant_is_detected_and_freeing_grants_nothing() {
        let (key, limits) = (QuotaKey::User(1), QuotaLimits { blocks: Some(100), inodes: None });
        let moved = |blocks, inodes| Move { key, blocks, inodes };
        let mut outstanding = OutstandingQuota::default();
        outstanding.grant(key, QuotaAmount { blocks: 10, inodes: 0 });
        assert!(outstanding.spend(&moved(4, 1000), limits));
        assert!(outstanding.spend(&moved(-50, -1), limits), "freeing is no new grant");
        assert_eq!(outstanding.of(key).blocks, 6);
        assert!(!outstanding.spend(&moved(7, 0), limits));
        assert_eq!(outstanding.of(key).blocks, 0);
    }
}
