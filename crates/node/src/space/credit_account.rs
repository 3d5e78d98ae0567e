//! The account of one session's credit.
//!
//! Granted = used by applied records + in the log + in the control page. SharedFS knows the first two sums by itself.
//! The control page holds a claim; SharedFS cuts a claim above the account down to the account.

use ashlar_wire::Credit;

/// The credit that a session was granted and has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreditAccount {
    /// Credit granted so far, less what was recalled.
    pub granted: Credit,
    /// Cost of the records that are applied.
    pub used: Credit,
}

impl CreditAccount {
    /// Returns the credit that the session may still use.
    pub fn outstanding(&self) -> Credit {
        Credit {
            blocks: self.granted.blocks.saturating_sub(self.used.blocks),
            metadata_bytes: self.granted.metadata_bytes.saturating_sub(self.used.metadata_bytes),
        }
    }

    /// Books a grant.
    pub fn grant(&mut self, credit: Credit) {
        self.granted.blocks += credit.blocks;
        self.granted.metadata_bytes += credit.metadata_bytes;
    }

    /// Books credit that was taken out of the control page.
    ///
    /// At most the outstanding credit counts, whatever the page said.
    pub fn recall(&mut self, taken: Credit) {
        let outstanding = self.outstanding();
        self.granted.blocks -= taken.blocks.min(outstanding.blocks);
        self.granted.metadata_bytes -= taken.metadata_bytes.min(outstanding.metadata_bytes);
    }

    /// Takes back the cost of a record that was booked and then not applied.
    pub fn refund(&mut self, cost: Credit) {
        self.used.blocks = self.used.blocks.saturating_sub(cost.blocks);
        self.used.metadata_bytes = self.used.metadata_bytes.saturating_sub(cost.metadata_bytes);
    }

    /// Books a record that is to be applied; returns `false` if its credit is missing.
    pub fn spend(&mut self, cost: Credit) -> bool {
        let outstanding = self.outstanding();
        if cost.blocks > outstanding.blocks || cost.metadata_bytes > outstanding.metadata_bytes {
            return false;
        }
        self.used.blocks += cost.blocks;
        self.used.metadata_bytes += cost.metadata_bytes;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credit(blocks: u64, metadata_bytes: u64) -> Credit {
        Credit { blocks, metadata_bytes }
    }

    #[test]
    fn credit_forged_in_page_gains_nothing() {
        let mut account = CreditAccount::default();
        account.grant(credit(10, 1000));
        assert!(account.spend(credit(4, 300)));
        account.recall(credit(u64::MAX, 200));
        assert_eq!(account.outstanding(), credit(0, 500));
        assert!(!account.spend(credit(1, 0)));
        assert!(account.spend(credit(0, 500)));
        assert!(!account.spend(credit(0, 1)));
    }
}
