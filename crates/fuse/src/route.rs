//! The way by which a request came and its answer is sent.

use std::sync::Arc;

use rustix::io::Errno;

use crate::device::{Device, Sent};
use crate::ring::WorkerInbox;

/// The way of an answer that another thread sends than the one that serves the request.
#[derive(Clone, Debug)]
pub(crate) enum Route {
    /// To the device.
    Device,
    /// To a ring, into this entry.
    Ring(Arc<WorkerInbox>, usize),
}

impl Route {
    /// Sends an answer.
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
