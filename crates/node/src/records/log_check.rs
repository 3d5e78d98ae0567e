//! Checks a log whose records no SharedFS has applied, for `fsck`.

use ashlar_log::Log;
use ashlar_pmem::Persistent;
use ashlar_types::LogPosition;
use ashlar_update::Update;

/// The findings in one log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogCheck {
    /// Records that the next start digests.
    pub records: u64,
    /// The fault that ends them.
    pub fault: Option<LogFault>,
}

/// A fault of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogFault {
    /// The slots contradict each other.
    Slots,
    /// A record is damaged.
    Record {
        /// Its position.
        position: LogPosition,
        /// A description of the damage.
        reason: String,
        /// Bytes from there on that are not digested.
        left: u64,
    },
}

/// Reads a log from where it is committed.
///
/// `is_of_this_boot` says whether its process began after the machine's last start.
pub fn check_log<M: Persistent>(log: &Log<M>, committed: LogPosition, is_of_this_boot: bool) -> LogCheck {
    let mut check = LogCheck::default();
    // Records that processes wrote before the machine went down may end anywhere. The next start finds the end in this
    // way; it is no damage.
    if !is_of_this_boot {
        let mut scanner = log.scanner(committed, committed.plus(log.capacity()));
        while scanner.next().is_some_and(|record| record.is_ok()) {
            check.records += 1;
        }
        return check;
    }
    let Ok(settled) = log.settled() else {
        return LogCheck { fault: Some(LogFault::Slots), ..check };
    };
    let mut scanner = log.scanner(committed, settled);
    while let Some(record) = scanner.next() {
        let fault = match record {
            Ok(record) => Update::decode(record.kind, record.body).err().map(|e| (record.position, e.to_string())),
            Err(corrupt) => Some((corrupt.position, format!("{:?}", corrupt.fault))),
        };
        if let Some((position, reason)) = fault {
            let left = settled.0.saturating_sub(position.0);
            return LogCheck { fault: Some(LogFault::Record { position, reason, left }), ..check };
        }
        check.records += 1;
    }
    check
}
