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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CloseReason;

    #[test]
    fn closed_link_leaves_no_event_and_old_one_its_end() {
        let events = EventQueue::default();
        for link in [LinkId(1), LinkId(2), LinkId(3)] {
            events.push(Event::Message { link, bytes: Vec::new() });
            events.push(Event::Down { link, reason: CloseReason::OldEpoch });
        }
        events.forget(LinkId(1));
        events.forget_traffic(LinkId(2));
        let mut left = Vec::new();
        events.take(&mut left);
        let left: Vec<(u64, bool)> = left.iter().map(|event| (event.link().0, event.is_traffic())).collect();
        assert_eq!(left, [(2, false), (3, true), (3, false)]);
    }
}
