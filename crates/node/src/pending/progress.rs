//! How far a pending request has come.

use std::time::Duration;

/// The kind of event that a pending request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitFor {
    /// A grant: [`NodeEffect::WakeGrants`](crate::NodeEffect::WakeGrants).
    Grants,
    /// A lock: [`NodeEffect::WakeLocks`](crate::NodeEffect::WakeLocks).
    Locks,
    /// A digest, a commit or the end of a session: [`NodeEffect::WakeDigests`](crate::NodeEffect::WakeDigests).
    Digests,
    /// The journal is in all copies that count. The shell sends it to the replica, and knows when that is so.
    Copies,
}

/// How far a pending request has come.
#[derive(Debug)]
pub enum Progress<T> {
    /// It has ended.
    Done(T),
    /// It can go on at once. Other requests may be served first.
    More,
    /// It waits for an event, and no longer than until this time since boot.
    Wait(WaitFor, Option<Duration>),
}

/// Returns the result of a step that has ended, or returns from the function with the step's progress.
macro_rules! done {
    ($progress:expr) => {
        match $progress {
            $crate::pending::progress::Progress::Done(result) => result,
            $crate::pending::progress::Progress::More => return $crate::pending::progress::Progress::More,
            $crate::pending::progress::Progress::Wait(event, until) => {
                return $crate::pending::progress::Progress::Wait(event, until);
            }
        }
    };
}

/// Returns the value of a result, or ends the request with its error.
macro_rules! ok {
    ($result:expr) => {
        match $result {
            Ok(value) => value,
            Err(error) => return $crate::pending::progress::Progress::Done(Err(error)),
        }
    };
}

pub(crate) use {done, ok};
