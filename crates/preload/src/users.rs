//! Sessions of those who the process was before, and sessions that have ended.
//!
//! A session acts for one user. A server becomes the user whom it serves, and itself again, for each request (`seteuid`): what such a process was before, it may become
//! again, and then the session of that time goes on. Where it can't become that user any more, the session ends with the change: who has fewer rights now has no log any more
//! in which he could write with those of before.
//!
//! What has ended is freed when the process has one thread: others may be in the middle of a call with it.
//!
//! The kernel knows users by thread, and a session is of the process. libc has all threads change, one after the other; who makes the call himself changes one. While threads
//! differ, the kernel serves the process, and if they go on to differ, for good.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use ashlar_types::Credentials;

use crate::arch::system_call;
use crate::session::{self, Session};
use crate::{descriptors, direct, materialise, shared, threads};

/// Of a mount so many sessions are set aside: who the process was, and whom it has served.
const ASIDE_MAX: usize = 2;
/// While the process has several threads, no more sessions than these end and are not freed: after that the kernel serves it.
const ENDED_MAX: usize = 16;
/// Threads that differ for longer, in milliseconds, do so for good. libc has them all changed in less, unless one is held up in the kernel.
const CHANGE_MS: u64 = 50;
/// `CAP_SETGID`, `CAP_SETUID`.
const USER_CAPABILITIES: u32 = 1 << 6 | 1 << 7;
/// What of a thread's status says who it is.
const IDENTITY: [&str; 4] = ["Uid:", "Gid:", "Groups:", "CapEff:"];

/// Whether the process has ever changed its user, or a thread has.
static HAS_CHANGED: AtomicBool = AtomicBool::new(false);
/// Whether it has no sessions any more.
static IS_KERNELS: AtomicBool = AtomicBool::new(false);
/// Whether the process's user is its real one: 0 where nobody has looked, then 1 for no and 2 for yes. Once it, or a thread, has changed, each look is a new one.
static IS_AS_REAL: AtomicU8 = AtomicU8::new(0);
/// Whether some may have ended, and the process had one thread when the last one did: the next call frees them.
static IS_ANY_ENDED: AtomicBool = AtomicBool::new(false);
/// Since when threads are known to differ, in milliseconds of the machine's clock; 0: they did not, at the last look, or one has changed since.
static DIFFER_SINCE: AtomicU64 = AtomicU64::new(0);

/// Sessions beside the current ones.
#[derive(Debug)]
pub(crate) struct Others {
    /// Of users that the process may become again; the newest last.
    aside: Vec<&'static Session>,
    /// Nobody begins anything with them any more.
    ended: Vec<&'static Session>,
}

impl Others {
    pub(crate) const NONE: Self = Self { aside: Vec::new(), ended: Vec::new() };

    /// The session that the process had with a mount when it was this user, if it goes on.
    pub(crate) fn take(&mut self, mount: u32, who: &Credentials) -> Option<&'static Session> {
        let is_it = |session: &&Session| session.number == mount && session.who == *who && !session.covered.is_gone();
        self.aside.iter().position(is_it).map(|index| self.aside.remove(index))
    }

    /// Takes the oldest ones of a mount out, of which there are more than so many.
    fn shorten(&mut self, mount: u32, most: usize) -> Vec<&'static Session> {
        let count = self.aside.iter().filter(|session| session.number == mount).count();
        let oldest = self.aside.extract_if(.., |session| session.number == mount);
        oldest.take(count.saturating_sub(most)).collect()
    }
}

/// Whether the process, or a thread of it, has ever become another user's.
#[inline]
pub(crate) fn has_changed() -> bool {
    HAS_CHANGED.load(Ordering::Relaxed)
}

/// Whether this thread's user is the real one, for whom `access` asks.
#[inline]
pub(crate) fn is_as_real() -> bool {
    match IS_AS_REAL.load(Ordering::Relaxed) {
        known if known != 0 && !has_changed() => known == 2,
        _ => look_as_real(),
    }
}

#[cold]
fn look_as_real() -> bool {
    // SAFETY: they take nothing.
    let is_it = unsafe {
        let call = |number: i64| system_call(number as u64, [0; 6]);
        call(libc::SYS_getuid) == call(libc::SYS_geteuid) && call(libc::SYS_getgid) == call(libc::SYS_getegid)
    };
    IS_AS_REAL.store(1 + u8::from(is_it), Ordering::Relaxed);
    is_it
}

/// Whether the process has no sessions any more.
pub(crate) fn are_kernels() -> bool {
    IS_KERNELS.load(Ordering::Relaxed)
}

/// The sessions that are set aside.
pub(crate) fn aside() -> Vec<&'static Session> {
    if has_changed() { session::others().aside.clone() } else { Vec::new() }
}

/// Frees what has ended, as a call begins on this thread, unless another thread may be in the middle of one. Who runs another program is spared it.
#[inline]
pub(crate) fn free(call: i64) {
    if IS_ANY_ENDED.load(Ordering::Relaxed) && !matches!(call, libc::SYS_execve | libc::SYS_execveat) {
        free_ended();
    }
}

#[cold]
fn free_ended() {
    IS_ANY_ENDED.store(false, Ordering::Relaxed);
    // It may have made another one past us.
    if !threads::is_one() {
        return;
    }
    // What is mapped all the same, for want of memory, or could not become the kernel's, is kept until the process ends.
    let is_left = |session: &Session| {
        direct::is_any_of(session) || descriptors::ours(0, u32::MAX).any(|number| is_open_in(number, session))
    };
    let gone: Vec<_> = session::others().ended.extract_if(.., |session| !is_left(session)).collect();
    for session in gone {
        leave(session);
        // SAFETY: it was leaked as a box when it was opened, and it's in no list any more. This thread, the only one, has just begun a call, and no other one is under way:
        // handlers of signals wait until a call is done. No open file is of it.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(session).cast_mut()) });
    }
    session::forget_closed();
}

/// Whether a session may begin: all threads of the process are the same user's.
pub(crate) fn may_begin(others: &Others) -> bool {
    if are_kernels() {
        return false;
    }
    if !has_changed() {
        return true;
    }
    if others.ended.len() > ENDED_MAX {
        IS_KERNELS.store(true, Ordering::Relaxed);
        return false;
    }
    if threads::is_one() || do_threads_agree() {
        DIFFER_SINCE.store(0, Ordering::Relaxed);
        return true;
    }
    let now = shared::since_start_ms();
    match DIFFER_SINCE.load(Ordering::Relaxed) {
        0 => DIFFER_SINCE.store(now, Ordering::Relaxed),
        since if now.saturating_sub(since) > CHANGE_MS => IS_KERNELS.store(true, Ordering::Relaxed),
        _ => {}
    }
    false
}

/// Whether all threads are the same user's, as the kernel tells; not where it doesn't.
fn do_threads_agree() -> bool {
    let identity = |thread: i32| {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).ok()?;
        // The first one may have ended before the others: it is what it was then.
        if status.lines().any(|line| line.starts_with("State:") && line.contains(['Z', 'X'])) {
            return None;
        }
        let is_meant = |line: &&str| IDENTITY.iter().any(|name| line.starts_with(name));
        Some(status.lines().filter(is_meant).collect::<Vec<_>>().join("\n"))
    };
    // One that ends meanwhile has no status.
    let known: Vec<_> = threads::numbers().into_iter().filter_map(identity).collect();
    known.first().is_some_and(|first| known.iter().all(|other| other == first))
}

/// A session begins: of the others with that mount the oldest go.
pub(crate) fn make_room(mount: u32) {
    let gone = session::others().shorten(mount, ASIDE_MAX - 1);
    end(gone);
}

/// The process, or a thread of it, may have become another user's, with nothing open in its sessions.
pub(crate) fn change() {
    HAS_CHANGED.store(true, Ordering::Relaxed);
    DIFFER_SINCE.store(0, Ordering::Relaxed);
    let who = session::credentials();
    let may_return = session::permitted() & USER_CAPABILITIES == USER_CAPABILITIES;
    // A session that another thread is opening is there when it lets go.
    let mut others = session::others();
    if session::all().all(|session| who.as_ref() == Some(&session.who)) && may_return {
        return;
    }
    let mut gone = Vec::new();
    for session in session::take_all() {
        others.aside.push(session);
        gone.extend(others.shorten(session.number, ASIDE_MAX));
    }
    if !may_return {
        // The user that it is may go on with what it has begun.
        gone.extend(others.aside.extract_if(.., |session| who.as_ref() != Some(&session.who)));
    }
    drop(others);
    // What another thread has mapped until now. Nobody maps anything any more by these.
    direct::leave_all();
    end(gone);
}

/// All sessions, current and set aside, which are neither any more.
fn take_all(others: &mut Others) -> Vec<&'static Session> {
    session::take_all().chain(others.aside.drain(..)).collect()
}

/// Ends all sessions, with nothing open in them: the kernel serves the process, or it runs another program.
pub(crate) fn end_all() {
    let gone = take_all(&mut session::others());
    direct::leave_all();
    end(gone);
    // The program may take the numbers of their descriptors for its own from here on, so they stay as they are.
    IS_ANY_ENDED.store(false, Ordering::Relaxed);
    let ended = std::mem::take(&mut session::others().ended);
    ended.iter().filter(|session| !direct::is_any_of(session)).for_each(|session| leave(session));
}

/// Whether there is a session, current or set aside.
pub(crate) fn is_any() -> bool {
    session::is_any() || !session::others().aside.is_empty()
}

/// Ends all sessions, with nothing open in them, and frees them at once. Where there are other threads, they may be in the middle of a call with one: nobody begins
/// anything new by it.
pub(crate) fn make_way() {
    let gone = take_all(&mut session::others());
    direct::leave_all();
    if threads::is_one() {
        end(gone);
        free_ended();
    } else {
        session::others().ended.extend(gone);
    }
}

/// The process begins no sessions from here on.
pub(crate) fn begin_none() {
    IS_KERNELS.store(true, Ordering::Relaxed);
}

fn is_open_in(number: i32, session: &Session) -> bool {
    descriptors::file(number).is_some_and(|file| file.is_of(session))
}

fn end(gone: Vec<&'static Session>) {
    if gone.is_empty() {
        return;
    }
    // What other threads have opened until now. What can't become the kernel's gives errors from here on.
    let is_meant = |number: &i32| gone.iter().any(|session| is_open_in(*number, session));
    descriptors::ours(0, u32::MAX).filter(is_meant).for_each(|number| {
        let _ = materialise::descriptor(number);
    });
    // What is mapped all the same SharedFS keeps until it's unmapped.
    gone.iter().filter(|session| !direct::is_any_of(session)).for_each(|session| leave(session));
    session::others().ended.extend(gone);
    IS_ANY_ENDED.store(threads::is_one(), Ordering::Relaxed);
}

fn leave(session: &Session) {
    if !session.is_over() {
        session.end();
        session.fs.leave();
    }
}

/// The process was forked: the sessions are the other's. They are not freed: the program may take the numbers of their descriptors for its own here.
pub(crate) fn forget_all() {
    let mut others = session::others();
    let all = take_all(&mut others).into_iter().chain(others.ended.drain(..));
    for session in all.filter(|session| !session.is_over()) {
        session.end();
        session.fs.hang_up();
    }
    // It has one thread, and is one user's.
    IS_AS_REAL.store(0, Ordering::Relaxed);
    [&HAS_CHANGED, &IS_KERNELS, &IS_ANY_ENDED].into_iter().for_each(|known| known.store(false, Ordering::Relaxed));
}
