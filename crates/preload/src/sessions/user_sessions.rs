//! Sessions of the process's former users, and sessions that have ended.
//!
//! A session acts for one user. For each request, a server changes to the user that it serves, and back (`seteuid`).
//! Such a process may change back to a former user, and then resumes that user's session. If it can't change back, the
//! session ends with the change: a process with fewer rights must have no log in which it could write with its former
//! rights.
//!
//! An ended session is freed when the process has one thread: others may be in the middle of a call with it.
//!
//! The kernel knows users by thread, and a session is of the process. libc changes all threads, one after the other; a
//! direct system call changes one. While threads differ, the kernel serves the process; if they differ for longer, it
//! does so for good.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use ashlar_types::Credentials;

use crate::entry::arch::system_call;
use crate::entry::single_thread;
use crate::files::{descriptors, materialise, shared_file};
use crate::memory::segment_mapping;
use crate::sessions::session::{self, MountSession};

/// The most sessions set aside for a mount: the process's own, and one of a user that it has served.
const ASIDE_MAX: usize = 2;
/// The most ended sessions that are kept because there are several threads.
///
/// If more have ended, the kernel serves the process.
const ENDED_MAX: usize = 16;
/// The most refused users that are remembered: a server serves few at a time.
const REFUSED_MAX: usize = 16;
/// If threads differ for longer, in milliseconds, they do so for good.
///
/// libc changes them all in less, unless one is held up in the kernel.
const CHANGE_MS: u64 = 50;
/// `CAP_SETGID`, `CAP_SETUID`.
const USER_CAPABILITIES: u32 = 1 << 6 | 1 << 7;
/// The lines of a thread's status that identify its user and rights.
const IDENTITY: [&str; 4] = ["Uid:", "Gid:", "Groups:", "CapEff:"];

/// Whether the process, or a thread, has ever changed its user.
static HAS_CHANGED: AtomicBool = AtomicBool::new(false);
/// Whether the process begins no more sessions.
static IS_KERNELS: AtomicBool = AtomicBool::new(false);
/// Whether the process's user is its real one: 0 for unknown, 1 for no, 2 for yes.
///
/// Once it, or a thread, has changed, each call asks again.
static IS_REAL_USER: AtomicU8 = AtomicU8::new(0);
/// Whether the next call frees ended sessions.
///
/// Some may have ended, and the process had one thread at the last end.
static IS_ANY_ENDED: AtomicBool = AtomicBool::new(false);
/// When threads were first found to differ, by the machine's clock.
///
/// 0 means that they agreed at the last check, or one has changed since.
static DIFFER_SINCE_MS: AtomicU64 = AtomicU64::new(0);

/// Sessions beside the current ones.
#[derive(Debug)]
pub(crate) struct OtherSessions {
    /// Those of users that the process may change back to; the newest last.
    aside: Vec<&'static MountSession>,
    /// Those that begin no more calls.
    ended: Vec<&'static MountSession>,
    /// Users that a mount, by its number, has no sessions for.
    refused: Vec<(u32, Credentials)>,
}

impl OtherSessions {
    pub(crate) const NONE: Self = Self { aside: Vec::new(), ended: Vec::new(), refused: Vec::new() };

    /// Returns whether a mount has refused this user.
    ///
    /// A server that changes to such a user for each request then asks once.
    pub(crate) fn is_refused(&self, mount: u32, user: &Credentials) -> bool {
        self.refused.iter().any(|(number, refused)| *number == mount && refused == user)
    }

    /// Records that a mount has refused this user.
    pub(crate) fn record_refusal(&mut self, mount: u32, user: Credentials) {
        if self.refused.len() == REFUSED_MAX {
            self.refused.remove(0);
        }
        self.refused.push((mount, user));
    }

    /// Removes and returns the session that the process had with a mount as this user, if it is usable.
    pub(crate) fn resume(&mut self, mount: u32, user: &Credentials) -> Option<&'static MountSession> {
        let is_it = |session: &&MountSession| {
            session.number == mount && session.user == *user && !session.submounts.is_unreachable()
        };
        self.aside.iter().position(is_it).map(|index| self.aside.remove(index))
    }

    /// Removes and returns the oldest ones of a mount, beyond so many.
    fn take_oldest(&mut self, mount: u32, most: usize) -> Vec<&'static MountSession> {
        let count = self.aside.iter().filter(|session| session.number == mount).count();
        let oldest = self.aside.extract_if(.., |session| session.number == mount);
        oldest.take(count.saturating_sub(most)).collect()
    }
}

/// Returns whether the process, or a thread of it, has ever changed its user.
#[inline]
pub(crate) fn has_changed_user() -> bool {
    HAS_CHANGED.load(Ordering::Relaxed)
}

/// Returns whether this thread's user is the real one, for which `access` asks.
#[inline]
pub(crate) fn is_real_user() -> bool {
    match IS_REAL_USER.load(Ordering::Relaxed) {
        known if known != 0 && !has_changed_user() => known == 2,
        _ => check_real_user(),
    }
}

#[cold]
fn check_real_user() -> bool {
    // SAFETY: the calls take no arguments.
    let is_it = unsafe {
        let call = |number: i64| system_call(number as u64, [0; 6]);
        call(libc::SYS_getuid) == call(libc::SYS_geteuid) && call(libc::SYS_getgid) == call(libc::SYS_getegid)
    };
    IS_REAL_USER.store(1 + u8::from(is_it), Ordering::Relaxed);
    is_it
}

/// Returns whether the process begins no more sessions.
pub(crate) fn begins_no_sessions() -> bool {
    IS_KERNELS.load(Ordering::Relaxed)
}

/// Returns the sessions that are set aside.
pub(crate) fn sessions_aside() -> Vec<&'static MountSession> {
    if has_changed_user() { session::other_sessions().aside.clone() } else { Vec::new() }
}

/// Frees ended sessions, as a call begins on this thread, unless another thread may use one.
///
/// A program that runs another one is spared this.
#[inline]
pub(crate) fn free_if_ended(call: i64) {
    if IS_ANY_ENDED.load(Ordering::Relaxed) && !matches!(call, libc::SYS_execve | libc::SYS_execveat) {
        free_ended();
    }
}

#[cold]
fn free_ended() {
    IS_ANY_ENDED.store(false, Ordering::Relaxed);
    // The program may have made a thread past the library.
    if !single_thread::is_single_thread() {
        return;
    }
    // A session is kept until the process ends if, for want of memory, a mapping or an open file of it remains.
    let is_left = |session: &MountSession| {
        segment_mapping::is_any_mapped(session)
            || descriptors::ours(0, u32::MAX).any(|number| is_open_in(number, session))
    };
    let gone: Vec<_> = session::other_sessions().ended.extract_if(.., |session| !is_left(session)).collect();
    for session in gone {
        leave_session(session);
        // SAFETY: it was leaked as a box when it was opened, and is in no list any more. This thread, the only one, has
        // just begun a call, and no other call is in progress: signal handlers wait until a call is done. No open file
        // is of it.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(session).cast_mut()) });
    }
    session::forget_closed_internal();
}

/// Returns whether a session may begin: all threads of the process have the same user.
pub(crate) fn may_begin_session(others: &OtherSessions) -> bool {
    if begins_no_sessions() {
        return false;
    }
    if !has_changed_user() {
        return true;
    }
    if others.ended.len() > ENDED_MAX {
        IS_KERNELS.store(true, Ordering::Relaxed);
        return false;
    }
    if single_thread::is_single_thread() || do_threads_agree() {
        DIFFER_SINCE_MS.store(0, Ordering::Relaxed);
        return true;
    }
    let now = shared_file::uptime_ms();
    match DIFFER_SINCE_MS.load(Ordering::Relaxed) {
        0 => DIFFER_SINCE_MS.store(now, Ordering::Relaxed),
        since if now.saturating_sub(since) > CHANGE_MS => IS_KERNELS.store(true, Ordering::Relaxed),
        _ => {}
    }
    false
}

/// Returns whether the kernel says that all threads have the same user.
fn do_threads_agree() -> bool {
    let identity = |thread: i32| {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).ok()?;
        // The first thread may have ended before the others, and keeps the user that it had then.
        if status.lines().any(|line| line.starts_with("State:") && line.contains(['Z', 'X'])) {
            return None;
        }
        let is_meant = |line: &&str| IDENTITY.iter().any(|name| line.starts_with(name));
        Some(status.lines().filter(is_meant).collect::<Vec<_>>().join("\n"))
    };
    // A thread that ends meanwhile has no status.
    let known: Vec<_> = single_thread::thread_ids().into_iter().filter_map(identity).collect();
    known.first().is_some_and(|first| known.iter().all(|other| other == first))
}

/// Ends the oldest other sessions with a mount, when one begins.
pub(crate) fn end_oldest(mount: u32) {
    let gone = session::other_sessions().take_oldest(mount, ASIDE_MAX - 1);
    end_sessions(gone);
}

/// Records that the process, or a thread of it, may have changed its user.
///
/// Nothing is open in its sessions.
pub(crate) fn record_user_change() {
    HAS_CHANGED.store(true, Ordering::Relaxed);
    session::forget_refusals();
    DIFFER_SINCE_MS.store(0, Ordering::Relaxed);
    let user = session::credentials();
    let may_return = session::permitted_capabilities() & USER_CAPABILITIES == USER_CAPABILITIES;
    // If another thread is opening a session, that is complete once this lock is taken.
    let mut others = session::other_sessions();
    if session::all().all(|session| user.as_ref() == Some(&session.user)) && may_return {
        return;
    }
    let mut gone = Vec::new();
    for session in session::take_all() {
        others.aside.push(session);
        gone.extend(others.take_oldest(session.number, ASIDE_MAX));
    }
    if !may_return {
        // The current user may go on with its own sessions.
        gone.extend(others.aside.extract_if(.., |session| user.as_ref() != Some(&session.user)));
    }
    drop(others);
    // Leave mappings that another thread has made until now. No thread makes more through these sessions.
    segment_mapping::hand_over_all();
    end_sessions(gone);
    if !may_return {
        give_up_ended(user.as_ref());
    }
}

/// Takes the ended sessions of other users from a process that can't become these users again.
fn give_up_ended(user: Option<&Credentials>) {
    if session::other_sessions().ended.is_empty() {
        return;
    }
    // If there is one thread, this call is the only one in progress, and it uses no session any more.
    free_ended();
    let others = session::other_sessions();
    others.ended.iter().filter(|session| user != Some(&session.user)).for_each(|session| session.give_up());
}

/// Removes and returns all sessions, current and set aside.
fn take_all_sessions(others: &mut OtherSessions) -> Vec<&'static MountSession> {
    session::take_all().chain(others.aside.drain(..)).collect()
}

/// Ends all sessions, with nothing open in them.
///
/// The kernel serves the process, or it runs another program. If the kernel serves it, the library does not see when
/// the process becomes another user. So the process `gives_up` their memory and descriptors, unless other threads may
/// be in the middle of a call.
pub(crate) fn end_all_sessions(gives_up: bool) {
    let gone = take_all_sessions(&mut session::other_sessions());
    segment_mapping::hand_over_all();
    end_sessions(gone);
    // From here on the program may use the numbers of their descriptors, so these stay as they are.
    IS_ANY_ENDED.store(false, Ordering::Relaxed);
    let ended = std::mem::take(&mut session::other_sessions().ended);
    for session in ended {
        if !segment_mapping::is_any_mapped(session) {
            leave_session(session);
        }
        if gives_up {
            session.give_up();
        }
    }
}

/// Returns whether there is a session, current or set aside.
pub(crate) fn is_any_session() -> bool {
    session::is_any_open() || !session::other_sessions().aside.is_empty()
}

/// Ends all sessions, with nothing open in them, and frees them at once.
///
/// If there are other threads, they may be in the middle of a call with one: no new call begins with it.
pub(crate) fn end_and_free() {
    let gone = take_all_sessions(&mut session::other_sessions());
    segment_mapping::hand_over_all();
    if single_thread::is_single_thread() {
        end_sessions(gone);
        free_ended();
    } else {
        session::other_sessions().ended.extend(gone);
    }
}

/// Stops the process from beginning more sessions.
pub(crate) fn stop_beginning() {
    IS_KERNELS.store(true, Ordering::Relaxed);
}

fn is_open_in(number: i32, session: &MountSession) -> bool {
    descriptors::file(number).is_some_and(|file| file.is_in_session(session))
}

fn end_sessions(gone: Vec<&'static MountSession>) {
    if gone.is_empty() {
        return;
    }
    // Hand over files that other threads have opened until now. Those that can't be handed over give errors from here
    // on.
    let is_meant = |number: &i32| gone.iter().any(|session| is_open_in(*number, session));
    descriptors::ours(0, u32::MAX).filter(is_meant).for_each(|number| {
        let _ = materialise::hand_over(number);
    });
    // SharedFS keeps blocks that are still mapped until they are unmapped.
    gone.iter().filter(|session| !segment_mapping::is_any_mapped(session)).for_each(|session| leave_session(session));
    session::other_sessions().ended.extend(gone);
    IS_ANY_ENDED.store(single_thread::is_single_thread(), Ordering::Relaxed);
}

fn leave_session(session: &MountSession) {
    if !session.is_over() {
        session.mark_over();
        session.fs.leave_session();
    }
}

/// Discards all sessions in a forked process: they are the parent's.
///
/// The process may become another user. So it has none of their descriptors when its own code begins, and the kernel
/// has kept their memory from it (`MADV_DONTFORK`). They are not freed: other memory may stand there.
pub(crate) fn forget_user_sessions() {
    let mut others = session::other_sessions();
    for session in take_all_sessions(&mut others).into_iter().chain(others.ended.drain(..)) {
        session.mark_over();
        session.close_in_child();
    }
    descriptors::close_session_descriptors();
    // The new process has one thread, and thus one user.
    IS_REAL_USER.store(0, Ordering::Relaxed);
    [&HAS_CHANGED, &IS_KERNELS, &IS_ANY_ENDED].into_iter().for_each(|known| known.store(false, Ordering::Relaxed));
}
