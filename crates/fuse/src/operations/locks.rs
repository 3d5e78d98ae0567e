//! Record locks and flock: GETLK, SETLK, SETLKW, and INTERRUPT of a waiting one.
//!
//! A lock that must wait does so on a thread of its own, so that the threads that serve never wait for an application.

use std::sync::Arc;
use std::time::Duration;

use ashlar_libfs::{ByteRange, LockAction, LockKind, LockedRange};
use ashlar_types::Errno;

use crate::connection::reply_buffer::ReplyBuffer;
use crate::file_system::FileSystem;
use crate::operations::request::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{FileLock, InterruptIn, LK_FLOCK, LkIn, LkOut};
use crate::state::mount_state::MountState;

/// A waiting thread does nothing but a call of LibFS.
const STACK_BYTES: usize = 256 << 10;
/// How long to wait before a lock is cancelled again. Cancelling has no effect if the lock is not on its way to
/// SharedFS yet.
const CANCEL_AGAIN: Duration = Duration::from_millis(5);

/// Cancels all waiting locks: the mount is gone.
pub(crate) fn cancel_waits<F: FileSystem>(mount: &Arc<MountState<F>>) {
    mount.locks.close_waits().into_iter().for_each(|unique| cancel_wait(mount, unique));
}

/// Cancels a waiting lock, from another thread: it takes a message to SharedFS.
fn cancel_wait<F: FileSystem>(mount: &Arc<MountState<F>>, unique: u64) {
    let mount = Arc::clone(mount);
    let thread = std::thread::Builder::new().name("ashlar-unlock".into()).stack_size(STACK_BYTES);
    let spawned = thread.spawn(move || {
        while mount.locks.is_waiting(unique) {
            // The result does not matter: the waiting lock reports how it ended.
            let _ = mount.file_system.cancel_lock(unique);
            std::thread::sleep(CANCEL_AGAIN);
        }
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "a waiting lock could not be interrupted");
    }
}

fn lock_kind(asked: &LkIn) -> LockKind {
    if asked.lk_flags & LK_FLOCK != 0 { LockKind::Flock } else { LockKind::Record }
}

/// Returns the owner of a lock. A flock belongs to its open file, which the kernel names by its address in memory. The
/// kernel reports an open file's end only afterwards, when the next one may have the same address: its lock would end
/// with the other's. A handle's number is never used again.
fn lock_owner(asked: &LkIn) -> u64 {
    if asked.lk_flags & LK_FLOCK != 0 { asked.fh } else { asked.owner }
}

fn lock_action(asked: &LkIn) -> Result<LockAction, Errno> {
    match i32::try_from(asked.lk.kind).map_err(|_| Errno::EINVAL)? {
        libc::F_RDLCK => Ok(LockAction::Read),
        libc::F_WRLCK => Ok(LockAction::Write),
        libc::F_UNLCK => Ok(LockAction::Unlock),
        _ => Err(Errno::EINVAL),
    }
}

/// Returns an action as `fcntl` numbers it.
fn fcntl_number(action: LockAction) -> u32 {
    let number = match action {
        LockAction::Read => libc::F_RDLCK,
        LockAction::Write => libc::F_WRLCK,
        LockAction::Unlock => libc::F_UNLCK,
    };
    number as u32
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// GETLK.
    pub(crate) fn getlk(mut self) -> RequestResult {
        let asked: LkIn = self.arguments.structure()?;
        let range = ByteRange::new(asked.lk.start, asked.lk.end);
        let found =
            self.fs().query_lock(self.inode(), lock_kind(&asked), lock_owner(&asked), range, lock_action(&asked)?)?;
        let lk = match found {
            Some((LockedRange { mode, range }, pid)) => {
                FileLock { start: range.first, end: range.last, kind: fcntl_number(mode.into()), pid }
            }
            None => FileLock { kind: fcntl_number(LockAction::Unlock), ..asked.lk },
        };
        self.reply.structure(&LkOut { lk })?;
        Ok(ReplyAction::Send)
    }

    /// SETLK, and SETLKW, which may wait.
    pub(crate) fn setlk(mut self, may_wait: bool) -> RequestResult {
        let asked: LkIn = self.arguments.structure()?;
        let (inode, kind, action) = (self.inode(), lock_kind(&asked), lock_action(&asked)?);
        if kind == LockKind::Record && action != LockAction::Unlock {
            // Recorded before the lock exists: a record in vain costs one message at close.
            self.mount.locks.record_owner(inode, asked.owner, asked.fh);
        }
        let range = ByteRange::new(asked.lk.start, asked.lk.end);
        match self.fs().lock(inode, kind, lock_owner(&asked), asked.lk.pid, range, action, None) {
            Err(Errno::EAGAIN) if may_wait => self.wait_for_lock(&asked, kind, action),
            result => result.map(|()| ReplyAction::Send),
        }
    }

    /// Waits on another thread, which answers the request.
    fn wait_for_lock(&self, asked: &LkIn, kind: LockKind, action: LockAction) -> RequestResult {
        let (unique, inode, asked) = (self.header.unique, self.inode(), *asked);
        self.mount.locks.begin_wait(unique)?;
        let (mount, route) = (Arc::clone(self.mount), self.route.clone());
        let thread = std::thread::Builder::new().name("ashlar-lock".into()).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            mount.allowed_cores.unbind_thread();
            let range = ByteRange::new(asked.lk.start, asked.lk.end);
            let result =
                mount.file_system.lock(inode, kind, lock_owner(&asked), asked.lk.pid, range, action, Some(unique));
            mount.locks.end_wait(unique);
            let mut reply = ReplyBuffer::new(0);
            if let Err(errno) = route.send(&mount.device, reply.seal(unique, result)) {
                tracing::error!(%errno, "the kernel took no answer to a lock request");
            }
        });
        match spawned {
            Ok(_) => Ok(ReplyAction::SendLater),
            Err(_) => {
                self.mount.locks.end_wait(unique);
                Err(Errno::ENOLCK)
            }
        }
    }

    /// INTERRUPT: only a waiting lock can be cancelled; all other requests end by themselves.
    pub(crate) fn interrupt(mut self) -> RequestResult {
        let asked: InterruptIn = self.arguments.structure()?;
        if self.mount.locks.interrupt_wait(asked.unique) {
            cancel_wait(self.mount, asked.unique);
        }
        Ok(ReplyAction::NoReply)
    }
}
