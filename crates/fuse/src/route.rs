//! The way by which a request came, and its answer goes.

use std::sync::Arc;

use rustix::io::Errno;

use crate::device::{Device, Sent};
use crate::ring::WorkerInbox;

/// Where an answer goes that another thread than the one that serves sends.
#[derive(Clone, Debug)]
pub(crate) enum Route {
    /// To the device.
    Device,
    /// To a ring, into this entry.
    Ring(Arc<WorkerInbox>, usize),
}

impl Route {
    /// Sends an answer by it.
    pub(crate) fn send(&self, device: &Device, answer: &[u8]) -> Result<Sent, Errno> {
        match self {
            Self::Device => device.send(answer),
            Self::Ring(inbox, entry) => {
                inbox.post(*entry, answer);
                Ok(Sent::Taken)
            }
        }
    }
}
