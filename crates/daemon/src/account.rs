//! The account of one session's credit.
//!
//! Granted = used by records that are applied + in the log + in the control page. SharedFS knows the first two of these
//! sums by itself; what the page says is a claim, and a claim above the account is cut down to it.

use ashlar_wire::Credit;

/// What a session was granted and has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Granted so far, less what was recalled.
    pub granted: Credit,
    /// Cost of the records that are applied.
    pub used: Credit,
}

impl Account {
    /// What the session may still use.
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

    /// Books what was taken out of the page; no more than the account shows to be outstanding, whatever the page said.
    pub fn recall(&mut self, taken: Credit) {
        let outstanding = self.outstanding();
        self.granted.blocks -= taken.blocks.min(outstanding.blocks);
        self.granted.metadata_bytes -= taken.metadata_bytes.min(outstanding.metadata_bytes);
    }

    /// Takes back what was booked for a record that was not applied after all.
    pub fn refund(&mut self, cost: Credit) {
        self.used.blocks = self.used.blocks.saturating_sub(cost.blocks);
        self.used.metadata_bytes = self.used.metadata_bytes.saturating_sub(cost.metadata_bytes);
    }

    /// Books a record that is to be applied; `false` where it was not paid for.
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
    fn a_session_that_writes_credit_into_its_page_gains_nothing() {
        let mut account = Account::default();
        account.grant(credit(10, 1000));
        assert!(account.spend(credit(4, 300)));
        account.recall(credit(u64::MAX, 200));
        assert_eq!(account.outstanding(), credit(0, 500));
        assert!(!account.spend(credit(1, 0)));
        assert!(account.spend(credit(0, 500)));
        assert!(!account.spend(credit(0, 1)));
    }
}
