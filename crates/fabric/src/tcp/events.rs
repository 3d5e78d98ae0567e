//! Events that wait for the next poll.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::event::{Event, LinkId};

/// Events that wait for the next poll. A link's events are added under the link's lock.
#[derive(Default)]
pub(super) struct EventQueue {
    events: Mutex<VecDeque<Event>>,
}

impl EventQueue {
    pub(super) fn push(&self, event: Event) {
        self.events.lock().push_back(event);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.lock().is_empty()
    }

    /// Moves all events to the caller's list. After that no closing link can take them back.
    pub(super) fn take(&self, into: &mut Vec<Event>) {
        into.extend(self.events.lock().drain(..));
    }

    /// Drops the events of a link that the layers above have closed.
    pub(super) fn forget(&self, link: LinkId) {
        self.events.lock().retain(|event| event.link() != link);
    }

    /// Drops what a link has carried, and keeps the events that say whether it is up.
    pub(super) fn forget_traffic(&self, link: LinkId) {
        self.events.lock().retain(|event| event.link() != link || !event.is_traffic());
    }
}
