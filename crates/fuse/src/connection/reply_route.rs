//! The way by which a request came and its answer is sent.

use std::sync::Arc;

use rustix::io::Errno;

use crate::connection::device::{FuseDevice, SendOutcome};
use crate::connection::ring::WorkerInbox;

/// The way of an answer that another thread sends than the one that serves the request.
#[derive(Clone, Debug)]
pub(crate) enum ReplyRoute {
    /// To the device.
    ToDevice,
    /// To a ring, into this entry.
    ToRing(Arc<WorkerInbox>, usize),
}

impl ReplyRoute {
    /// Sends an answer.
    pub(crate) fn send(&self, device: &FuseDevice, answer: &[u8]) -> Result<SendOutcome, Errno> {
        match self {
            Self::ToDevice => device.send(answer),
            Self::ToRing(inbox, entry) => {
                inbox.post(*entry, answer);
                Ok(SendOutcome::Taken)
            }
        }
    }
}
