//! Polls the request slots in shared memory, into which sessions put requests.
//!
//! A thread that has just served a session polls the request slots for a moment. Only one thread polls, for all
//! sessions that asked lately: several polling threads would take each other's cores, and those of the programs. It is
//! the thread of one of their connections, and that must not wait long for another session's request. So it declines a
//! request that can't be answered at once. The session then sends it as a message, to a thread of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ashlar_node::sessions::session::Control;
use ashlar_types::SessionId;
use ashlar_wire::Connection;
use parking_lot::Mutex;

use crate::user_shares::UserShare;

/// How soon after an answer, and how often in a row, messages count as quick.
///
/// A thread waits without sleeping for the next one then. Several processes use something in turn then, and one of them
/// is woken between two requests.
const SOON: Duration = Duration::from_micros(300);
const SOON_COUNT: u32 = 8;
/// Sessions that are polled at once: those that asked last.
const WATCHED_MAX: usize = 8;

/// A session that may ask in a request slot.
#[derive(Clone)]
pub struct SlotOwner {
    /// Its number.
    pub id: SessionId,
    /// Its control page, with the request slot.
    pub control: Arc<Control>,
    /// The share of its user; `None` if that is root.
    pub user: Option<Arc<UserShare>>,
}

/// The same, of a session that may be over.
struct WeakSlotOwner {
    id: SessionId,
    control: Weak<Control>,
    user: Option<Arc<UserShare>>,
}

impl WeakSlotOwner {
    fn of(owner: &SlotOwner) -> Self {
        Self { id: owner.id, control: Arc::downgrade(&owner.control), user: owner.user.clone() }
    }

    fn owner(&self) -> Option<SlotOwner> {
        self.control.upgrade().map(|control| SlotOwner { id: self.id, control, user: self.user.clone() })
    }
}

/// The sessions whose request slots are polled.
#[derive(Default)]
pub struct RequestSlots {
    /// Sessions that asked lately, the latest last. The polling thread holds the lock.
    watched: Mutex<Vec<WeakSlotOwner>>,
    /// Sessions that arrived while it was held.
    joining: Mutex<Vec<WeakSlotOwner>>,
    has_joining: AtomicBool,
    pace: Mutex<Pace>,
}

/// How soon messages follow answers.
#[derive(Default)]
struct Pace {
    /// When the last message was answered.
    answered: Option<Instant>,
    /// How many messages in a row came soon after an answer.
    soon: u32,
}

impl RequestSlots {
    /// Records a message of a process's session.
    pub fn record_message(&self) {
        let mut pace = self.pace.lock();
        let is_soon = pace.answered.is_some_and(|answered| answered.elapsed() < SOON);
        pace.soon = if is_soon { (pace.soon + 1).min(2 * SOON_COUNT) } else { pace.soon.saturating_sub(4) };
    }

    /// Records an answer; returns for how long to poll for the next message.
    ///
    /// Returns `None` if that is not known.
    fn record_answer(&self) -> Option<Duration> {
        let mut pace = self.pace.lock();
        pace.answered = Some(Instant::now());
        (pace.soon >= SOON_COUNT).then_some(SOON)
    }

    /// Watches a connection for a moment.
    ///
    /// It polls request slots if no other thread does. It polls the slots of sessions that asked lately; `own` is the
    /// session of the connection. `serve` answers the request in a slot, if there is one, and returns whether there
    /// was.
    pub fn watch_connection(
        &self,
        connection: &mut Connection,
        own: Option<&SlotOwner>,
        serve: impl Fn(&SlotOwner, &mut Vec<u8>) -> bool,
    ) {
        let Some(own) = own else { return connection.watch(None, &mut || false) };
        let pause = self.record_answer();
        let Some(mut recent) = self.watched.try_lock() else {
            let mut joining = self.joining.lock();
            joining.retain(|other| other.id != own.id);
            if joining.len() == WATCHED_MAX {
                joining.remove(0);
            }
            joining.push(WeakSlotOwner::of(own));
            self.has_joining.store(true, Ordering::Release);
            return;
        };
        let mut watched = recent.iter().filter_map(WeakSlotOwner::owner).collect();
        add_last(&mut watched, own.clone());
        set_listening(&watched, true);
        let mut buffer = Vec::new();
        connection.watch(pause, &mut || self.poll_slots(&mut watched, |owner| serve(owner, &mut buffer)));
        set_listening(&watched, false);
        *recent = watched.iter().map(WeakSlotOwner::of).collect();
    }

    /// Serves all sessions that have asked; returns whether any has.
    fn poll_slots(&self, watched: &mut Vec<SlotOwner>, mut serve: impl FnMut(&SlotOwner) -> bool) -> bool {
        let mut is_asked = false;
        if self.has_joining.load(Ordering::Relaxed) && self.has_joining.swap(false, Ordering::Acquire) {
            let joining = std::mem::take(&mut *self.joining.lock());
            joining.iter().filter_map(WeakSlotOwner::owner).for_each(|owner| add_last(watched, owner));
            set_listening(watched, true);
            is_asked = true;
        }
        for owner in &*watched {
            is_asked |= serve(owner);
        }
        is_asked
    }
}

/// Puts a session behind those that came before.
fn add_last(watched: &mut Vec<SlotOwner>, owner: SlotOwner) {
    watched.retain(|other| !Arc::ptr_eq(&other.control, &owner.control));
    if watched.len() == WATCHED_MAX {
        watched.remove(0).control.request_slot().set_listening(false);
    }
    watched.push(owner);
}

fn set_listening(watched: &[SlotOwner], listens: bool) {
    watched.iter().for_each(|owner| owner.control.request_slot().set_listening(listens));
}
