//! Questions that sessions ask in shared memory: whoever has just served a session looks for more of them for a moment.
//!
//! One thread looks, for all sessions that have asked something lately: several that did would take each other's cores, and those of the
//! programs. It's the thread of one of their connections, and that must not wait long for what another session asked. So what can't be answered
//! at once is declined, and comes again as a message, to a thread of its own session.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ashlar_types::{Errno, SessionId};
use ashlar_wire::{Connection, Reply, Request};
use parking_lot::Mutex;

use crate::grant::{self, Patience, Sought};
use crate::mapped;
use crate::session::Control;
use crate::shared::Shared;

/// Messages that come so soon after an answer, so many in a row, are waited for without sleeping: several processes use something in turn, and
/// between two requests one of them is woken.
const SOON: Duration = Duration::from_micros(300);
const SOON_COUNT: u32 = 8;
/// Sessions that are looked after at once: those that asked last.
const WATCHED_MAX: usize = 8;

/// A session that may ask.
#[derive(Clone)]
pub struct Asker {
    /// Its number.
    pub id: SessionId,
    /// Its control page, with the mailbox.
    pub control: Arc<Control>,
}

/// The same, of one that may be over.
struct Known {
    id: SessionId,
    control: Weak<Control>,
}

impl Known {
    fn of(asker: &Asker) -> Self {
        Self { id: asker.id, control: Arc::downgrade(&asker.control) }
    }

    fn asker(&self) -> Option<Asker> {
        self.control.upgrade().map(|control| Asker { id: self.id, control })
    }
}

/// Who looks after whom.
#[derive(Default)]
pub struct RequestSlots {
    /// Those that asked lately, the last one last. Held by the thread that looks.
    watched: Mutex<Vec<Known>>,
    /// Those that came while it was held.
    joining: Mutex<Vec<Known>>,
    has_joining: AtomicBool,
    pace: Mutex<Pace>,
}

/// How soon messages come.
#[derive(Default)]
struct Pace {
    /// When the last one was answered.
    answered: Option<Instant>,
    /// How many came soon after one that was, in a row.
    soon: u32,
}

impl RequestSlots {
    /// A message has come from a process's session.
    pub fn note_message(&self) {
        let mut pace = self.pace.lock();
        let is_soon = pace.answered.is_some_and(|answered| answered.elapsed() < SOON);
        pace.soon = if is_soon { (pace.soon + 1).min(2 * SOON_COUNT) } else { pace.soon.saturating_sub(4) };
    }

    /// For how long to look for the next one, as far as that is known.
    fn note_answered(&self) -> Option<Duration> {
        let mut pace = self.pace.lock();
        pace.answered = Some(Instant::now());
        (pace.soon >= SOON_COUNT).then_some(SOON)
    }

    /// Watches a connection for a moment, and the mailboxes of sessions that asked lately, if no other thread does; `own` is the session of
    /// the connection.
    pub fn attend(&self, shared: &Shared, connection: &mut Connection, own: Option<&Asker>) {
        let Some(own) = own else { return connection.watch(None, &mut || false) };
        let known = self.note_answered();
        let Some(mut recent) = self.watched.try_lock() else {
            let mut joining = self.joining.lock();
            joining.retain(|other| other.id != own.id);
            if joining.len() == WATCHED_MAX {
                joining.remove(0);
            }
            joining.push(Known::of(own));
            self.has_joining.store(true, Ordering::Release);
            return;
        };
        let mut watched = recent.iter().filter_map(Known::asker).collect();
        enter(&mut watched, own.clone());
        listen(&watched, true);
        let mut buffer = Vec::new();
        connection.watch(known, &mut || self.look(shared, &mut watched, &mut buffer));
        listen(&watched, false);
        *recent = watched.iter().map(Known::of).collect();
    }

    /// Serves all who have asked; says whether anybody has.
    fn look(&self, shared: &Shared, watched: &mut Vec<Asker>, buffer: &mut Vec<u8>) -> bool {
        let mut is_asked = false;
        if self.has_joining.load(Ordering::Relaxed) && self.has_joining.swap(false, Ordering::Acquire) {
            let joining = std::mem::take(&mut *self.joining.lock());
            joining.iter().filter_map(Known::asker).for_each(|asker| enter(watched, asker));
            listen(watched, true);
            is_asked = true;
        }
        for asker in &*watched {
            is_asked |= serve(shared, asker, buffer);
        }
        is_asked
    }
}

/// Puts a session behind those that came before.
fn enter(watched: &mut Vec<Asker>, asker: Asker) {
    watched.retain(|other| !Arc::ptr_eq(&other.control, &asker.control));
    if watched.len() == WATCHED_MAX {
        watched.remove(0).control.request_slot().set_listening(false);
    }
    watched.push(asker);
}

fn listen(watched: &[Asker], listens: bool) {
    watched.iter().for_each(|asker| asker.control.request_slot().set_listening(listens));
}

/// Answers what a session asks, if it does; says whether it did.
fn serve(shared: &Shared, asker: &Asker, buffer: &mut Vec<u8>) -> bool {
    let request_slot = asker.control.request_slot();
    if !request_slot.is_asked() {
        return false;
    }
    let Some((question, request)) = request_slot.take(buffer) else { return false };
    let reply = match answer(shared, asker.id, request) {
        Err(Shared::ENDING | Shared::LATER) => {
            request_slot.decline(question);
            return true;
        }
        Err(errno) => Reply::Error(errno),
        Ok(reply) => reply,
    };
    if !request_slot.answer(question, &reply, buffer) {
        match shared.lock().sessions.get_mut(&asker.id) {
            Some(session) => {
                session.kept = Some((question, reply));
                request_slot.keep(question);
            }
            None => request_slot.decline(question),
        }
    }
    true
}

fn answer(shared: &Shared, id: SessionId, request: Request) -> Result<Reply, Errno> {
    {
        let mut state = shared.lock();
        state.counters.requests += 1;
        state.counters.questions += 1;
        let session = state.sessions.get(&id).ok_or(Errno::ESTALE)?;
        if session.fenced.is_some() || session.is_ending {
            return Err(Errno::EIO);
        }
    }
    match request {
        Request::Acquire(wants) => grant::acquire(shared, id, &wants, Patience::None),
        Request::Lookup { directory, name, within, makes, write, need } => {
            let found = Sought { directory, name: &name, within, makes, write, need };
            grant::lookup(shared, id, &found, Patience::None)
        }
        Request::ReadDirectory { directory, after, limit } => grant::read_directory(shared, directory, after, limit),
        Request::Map { inode, first, blocks, follows, number } => {
            mapped::map_blocks(shared, id, inode, (first, blocks), (number, follows), Patience::None)
        }
        Request::Unmap { number } => {
            mapped::unmap_blocks(shared, id, number);
            Ok(Reply::Done)
        }
        _ => Err(Shared::LATER),
    }
}
