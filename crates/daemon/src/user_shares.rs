//! Shares of ordinary users in what SharedFS has: places, time and memory.
//!
//! Purpose: no user can keep others out, or make SharedFS slow for them or large. Root is not limited: it could end
//! SharedFS as well. A part of all that is counted is kept for root, as which mounts run.
//!
//! - **Places** (sessions, connections): a user has at most a fixed number, and at most half of those that all users
//!   leave free ([`ashlar_node::sessions::admission::has_room`]). So a few users that conspire leave some to the next
//!   one.
//! - **Time**: while others ask for anything, the users besides root get three quarters of one processor's time
//!   between them. When they use that up, each gets the same part of it, and waits before its next request beyond that.
//!   Only one thread at a time contends for the state's lock on behalf of a user.
//! - **Memory** for answers: each request whose answer may be long reserves room for it until the answer is sent. A
//!   longer answer is made while no other one of the user's is there.
//!
//! Non-goals: the rate at which logs are applied, which has limits of its own; disk time of commits.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::time::{ClockId, clock_gettime};

use ashlar_processes::clock::now_us;

/// A user counts as asking for so long after its last request.
const ASKING_US: u64 = 100_000;
/// The time that a user may use before its part matters: a few of the longest requests.
const BURST_US: u64 = 10_000;
/// The part of the time that all users besides root get together while others ask.
const TIME_PART: (u64, u64) = (3, 4);
/// The longest sleep before a waiting thread looks again.
const PAUSE_MAX_US: u64 = 20_000;
/// Bytes of memory for a user's answers.
const ANSWERS_BYTES: usize = 64 << 20;
/// Bytes of memory for each of its answers that may be long, and is not known to be longer.
pub const ANSWER_BYTES: usize = 4 << 20;
/// Users beyond so many are forgotten once nothing is known of them.
const USERS_MAX: usize = 1024;

/// The uses of time and memory by ordinary users.
#[derive(Debug, Default)]
pub struct UserShares {
    users: Mutex<BTreeMap<u32, Arc<UserShare>>>,
    /// The time that all of them use.
    time: Mutex<UsedTime>,
    /// When root last asked, in microseconds since boot.
    root_asked_us: AtomicU64,
}

/// An ordinary user's share.
#[derive(Debug, Default)]
pub struct UserShare {
    /// When the user last asked, in microseconds since boot.
    asked_us: AtomicU64,
    time: Mutex<UsedTime>,
    /// Held by the one thread that contends for the state's lock on behalf of the user.
    turn: Arc<Mutex<()>>,
    /// Bytes reserved for answers.
    answers: Mutex<usize>,
    answers_sent: Condvar,
}

#[derive(Debug, Default)]
struct UsedTime {
    /// Time used beyond the user's part.
    debt_us: u64,
    /// When the debt was last reckoned.
    reckoned_us: u64,
}

impl UsedTime {
    /// Lowers the debt by the part, for each of so many users, of the time that has passed; returns it.
    fn reckon(&mut self, now_us: u64, users: u64) -> u64 {
        let passed_us = now_us.saturating_sub(self.reckoned_us);
        self.reckoned_us = now_us;
        self.debt_us = self.debt_us.saturating_sub(passed_us * TIME_PART.0 / (TIME_PART.1 * users));
        self.debt_us
    }

    fn charge(&mut self, used_us: u64) {
        if self.debt_us == 0 {
            self.reckoned_us = now_us();
        }
        self.debt_us += used_us;
    }
}

thread_local! {
    /// The turn of the user whose request this thread serves.
    static TURN: RefCell<Option<Arc<Mutex<()>>>> = const { RefCell::new(None) };
}

/// Takes the state's lock when no other thread contends for it on behalf of the same user.
///
/// Threads that act for root, or for no user, need not wait for a turn.
pub fn lock_in_turn<T>(lock: impl FnOnce() -> T) -> T {
    TURN.with_borrow(|turn| {
        let _turn = turn.as_ref().map(|turn| turn.lock());
        lock()
    })
}

impl UserShares {
    /// Returns the share of a user; `None` for root.
    pub fn of(&self, uid: u32) -> Option<Arc<UserShare>> {
        if uid == 0 {
            return None;
        }
        let mut users = self.users.lock();
        if users.len() >= USERS_MAX {
            users.retain(|_, share| Arc::strong_count(share) > 1 || share.is_asking(now_us()));
        }
        Some(Arc::clone(users.entry(uid).or_default()))
    }

    /// Waits until a user may have a request served; the service ends when the returned value is dropped.
    ///
    /// The user is charged for the processor's time of this thread. If other threads work for the request too, it is
    /// charged for all of the time.
    pub fn begin_service<'a>(&'a self, user: Option<&'a UserShare>, employs_others: bool) -> Service<'a> {
        let Some(user) = user else {
            self.root_asked_us.store(now_us(), Ordering::Relaxed);
            return Service { shares: self, user: None, clock: now_us, began_us: 0 };
        };
        loop {
            let wait_us = self.time_to_wait(user, now_us());
            if wait_us == 0 {
                break;
            }
            std::thread::sleep(Duration::from_micros(wait_us.min(PAUSE_MAX_US)));
        }
        TURN.set(Some(Arc::clone(&user.turn)));
        let clock = if employs_others { now_us } else { thread_time_us };
        Service { shares: self, user: Some(user), clock, began_us: clock() }
    }

    /// Charges a user for time that SharedFS used for it.
    pub fn charge(&self, user: &UserShare, used_us: u64) {
        user.time.lock().charge(used_us);
        self.time.lock().charge(used_us);
    }

    /// Returns whether a user has used up its part of the time.
    pub fn is_indebted(&self, user: &UserShare) -> bool {
        self.time_to_wait(user, now_us()) > 0
    }

    /// Returns how long a user must wait until its next request is served.
    fn time_to_wait(&self, user: &UserShare, now_us: u64) -> u64 {
        user.asked_us.store(now_us, Ordering::Relaxed);
        let mut time = user.time.lock();
        if time.debt_us <= BURST_US {
            // Few users ever owe more, so the others are not counted.
            return 0;
        }
        let asking = self.users.lock().values().filter(|user| user.is_asking(now_us)).count() as u64;
        let root_asks = now_us.saturating_sub(self.root_asked_us.load(Ordering::Relaxed)) < ASKING_US;
        let is_scarce = self.time.lock().reckon(now_us, 1) > BURST_US && (asking > 1 || root_asks);
        let debt_us = time.reckon(now_us, asking.max(1));
        if is_scarce {
            return debt_us.saturating_sub(BURST_US) * TIME_PART.1 * asking.max(1) / TIME_PART.0;
        }
        // Time that was there in plenty is not owed.
        time.debt_us = debt_us.min(BURST_US);
        0
    }
}

/// The service of one request.
pub struct Service<'a> {
    shares: &'a UserShares,
    user: Option<&'a UserShare>,
    clock: fn() -> u64,
    began_us: u64,
}

impl Drop for Service<'_> {
    fn drop(&mut self) {
        if let Some(user) = self.user {
            TURN.set(None);
            self.shares.charge(user, (self.clock)().saturating_sub(self.began_us));
        }
    }
}

/// Returns the processor time that this thread has used.
fn thread_time_us() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1000
}

impl UserShare {
    fn is_asking(&self, now_us: u64) -> bool {
        now_us.saturating_sub(self.asked_us.load(Ordering::Relaxed)) < ASKING_US
    }

    /// Waits until there is room for one more answer, and reserves it.
    pub fn reserve_answer(&self) -> AnswerRoom<'_> {
        self.reserve(ANSWER_BYTES)
    }

    /// Waits until the user has no other answer, and reserves all of the room.
    pub fn reserve_all(&self) -> AnswerRoom<'_> {
        self.reserve(ANSWERS_BYTES)
    }

    fn reserve(&self, bytes: usize) -> AnswerRoom<'_> {
        let mut reserved = self.answers.lock();
        // An answer that its session does not take is given up in the end.
        while *reserved + bytes > ANSWERS_BYTES {
            self.answers_sent.wait(&mut reserved);
        }
        *reserved += bytes;
        AnswerRoom { user: self, bytes }
    }
}

/// Memory reserved for an answer.
pub struct AnswerRoom<'a> {
    user: &'a UserShare,
    bytes: usize,
}

impl Drop for AnswerRoom<'_> {
    fn drop(&mut self) {
        *self.user.answers.lock() -= self.bytes;
        self.user.answers_sent.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use ashlar_node::sessions::admission::has_room;

    use super::*;

    /// Returns how many places users get that take all they can, one after the other.
    fn places(users: usize, own_max: usize, all: usize) -> Vec<usize> {
        let mut taken = Vec::new();
        for _ in 0..users {
            let before: usize = taken.iter().sum();
            let own = (0..).find(|own| !has_room(*own, own_max, all - before - own));
            taken.push(own.expect("an end"));
        }
        taken
    }

    #[test]
    fn users_that_conspire_leave_places_to_the_next() {
        let taken = places(10, 32, 192);
        assert_eq!(taken[..4], [32; 4], "a few users have what they like");
        assert!(taken.iter().all(|own| *own >= 2), "{taken:?}");
        assert!(has_room(0, 32, 1) && !has_room(0, 32, 0));
    }

    /// Says that a user has used so much more than all may, at a time.
    fn set_debt(shares: &UserShares, user: &UserShare, debt_us: u64, now_us: u64) {
        for time in [&user.time, &shares.time] {
            *time.lock() = UsedTime { debt_us, reckoned_us: now_us };
        }
    }

    #[test]
    fn user_waits_after_its_part_only_while_others_ask() {
        let shares = UserShares::default();
        let (greedy, other) = (shares.of(7).expect("a user"), shares.of(8).expect("a user"));
        let now = 1_000_000;
        set_debt(&shares, &greedy, BURST_US, now);
        assert_eq!(shares.time_to_wait(&greedy, now), 0);
        set_debt(&shares, &greedy, BURST_US + 3000, now);
        assert_eq!(shares.time_to_wait(&greedy, now), 0, "alone");
        assert_eq!(shares.time_to_wait(&other, now), 0);
        set_debt(&shares, &greedy, BURST_US + 3000, now);
        assert_eq!(shares.time_to_wait(&greedy, now), 8000, "two users share three quarters");
        assert_eq!(shares.time_to_wait(&greedy, now + 4000), 0, "all of it was not used");
        let later = now + 2 * ASKING_US;
        shares.root_asked_us.store(later, Ordering::Relaxed);
        set_debt(&shares, &greedy, BURST_US + 3000, later);
        assert_eq!(shares.time_to_wait(&greedy, later), 4000, "root has the other quarter");
        assert_eq!(shares.time_to_wait(&greedy, later + 4000), 0, "the debt is paid");
        assert!(shares.of(0).is_none());
    }

    #[test]
    fn answers_of_one_user_wait_for_each_other() {
        let shares = UserShares::default();
        let user = shares.of(7).expect("a user");
        let mut held: Vec<_> = (0..ANSWERS_BYTES / ANSWER_BYTES).map(|_| user.reserve_answer()).collect();
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| drop(user.reserve_answer()));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished());
            held.pop();
            waiting.join().expect("room");
            let all = threads.spawn(|| drop(user.reserve_all()));
            held.clear();
            all.join().expect("room");
        });
        assert_eq!(*user.answers.lock(), 0);
    }
}
