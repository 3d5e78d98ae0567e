//! The transfers of a link that its peer has not answered.

use std::collections::VecDeque;

use crate::provider::{READ_BYTES_MAX, TRANSFERS_MAX};

/// A transfer that this side has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    Write,
    Read { length: usize },
}

impl Transfer {
    pub(crate) const fn read_bytes(self) -> usize {
        match self {
            Self::Write => 0,
            Self::Read { length } => length,
        }
    }
}

/// The transfers of a link that its peer has not answered. The peer answers in order.
#[derive(Debug, Default)]
pub(crate) struct TransferWindow {
    transfers: VecDeque<(u64, Transfer)>,
    begun: u64,
    /// Bytes that the reads among them ask for.
    asked_bytes: usize,
}

impl TransferWindow {
    pub(crate) fn has_room(&self, transfer: Transfer) -> bool {
        self.transfers.len() < TRANSFERS_MAX && self.asked_bytes + transfer.read_bytes() <= READ_BYTES_MAX
    }

    /// Half of the room is free.
    pub(crate) fn is_roomy(&self) -> bool {
        self.transfers.len() <= TRANSFERS_MAX / 2 && self.asked_bytes <= READ_BYTES_MAX / 2
    }

    /// The number of the next transfer.
    pub(crate) const fn next(&self) -> u64 {
        self.begun + 1
    }

    /// Records the next transfer as begun.
    pub(crate) fn begin(&mut self, transfer: Transfer) {
        self.begun += 1;
        self.asked_bytes += transfer.read_bytes();
        self.transfers.push_back((self.begun, transfer));
    }

    /// Records an answer; `false` if it is not that of the oldest transfer.
    #[must_use]
    pub(crate) fn finish(&mut self, number: u64, transfer: Transfer) -> bool {
        if self.transfers.front() != Some(&(number, transfer)) {
            return false;
        }
        self.transfers.pop_front();
        self.asked_bytes -= transfer.read_bytes();
        true
    }
}
