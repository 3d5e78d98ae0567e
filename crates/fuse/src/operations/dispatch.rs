//! Leads a request to the operation that it asks for.

use std::sync::Arc;

use ashlar_types::Errno;

use crate::connection::reply_buffer::ReplyBuffer;
use crate::connection::reply_route::ReplyRoute;
use crate::file_system::FileSystem;
use crate::operations::request::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{Arguments, InHeader, Opcode};
use crate::state::mount_state::MountState;

/// Splits a request into its header and its arguments.
pub(crate) fn split_request(request: &[u8]) -> Option<(InHeader, Arguments<'_>)> {
    let mut arguments = Arguments::new(request);
    let header = arguments.structure::<InHeader>();
    if header.is_err() {
        tracing::error!(length = request.len(), "the kernel sent a request without a header");
    }
    Some((header.ok()?, arguments))
}

/// Carries a request out. If it succeeds, the reply lists the items that the kernel may keep. They have to be
/// checked once the reply is sent ([`KernelCache::recheck_cached`]).
///
/// [`KernelCache::recheck_cached`]: crate::kernel_cache::coherence::KernelCache::recheck_cached
pub(crate) fn carry_out<F: FileSystem>(
    mount: &Arc<MountState<F>>,
    header: InHeader,
    arguments: Arguments<'_>,
    reply: &mut ReplyBuffer,
    route: &ReplyRoute,
) -> RequestResult {
    reply.clear();
    mount.report_runs.count_request(&header);
    let answer = FuseRequest { mount, header, arguments, reply: &mut *reply, route }.dispatch();
    track_estale_retry(mount, &header, answer);
    if matches!(answer, Ok(ReplyAction::NoReply | ReplyAction::SendLater)) {
        mount.kernel_cache.end_answer(reply);
    }
    answer
}

/// Tracks retries: records a thread whose request fails with `ESTALE`, and ends a thread's retry. Between the
/// look-up and the end of a retry come requests about rights.
fn track_estale_retry<F: FileSystem>(mount: &MountState<F>, header: &InHeader, answer: RequestResult) {
    let is_between = || {
        let between = [Opcode::Lookup, Opcode::Getattr, Opcode::Getxattr, Opcode::Forget, Opcode::BatchForget];
        Opcode::from_u32(header.opcode).is_none_or(|opcode| between.contains(&opcode))
    };
    let closed = match answer {
        Err(Errno::ESTALE) => mount.estale_retries.record_estale(header.pid),
        _ if mount.estale_retries.is_any() && !is_between() => mount.estale_retries.end_retry(header.pid),
        _ => return,
    };
    closed.into_iter().for_each(|inode| mount.file_system.close(inode));
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// Carries the request out.
    fn dispatch(self) -> RequestResult {
        let Some(opcode) = Opcode::from_u32(self.header.opcode) else { return Err(Errno::ENOSYS) };
        match opcode {
            Opcode::Lookup => self.lookup(),
            Opcode::Getattr => self.getattr(),
            Opcode::Read => self.read(),
            Opcode::Write => self.write(),
            Opcode::Open => self.open(),
            Opcode::Create => self.create(),
            Opcode::Flush => self.flush(),
            Opcode::Release => self.release(),
            Opcode::Forget | Opcode::BatchForget | Opcode::NotifyReply => Ok(ReplyAction::NoReply),
            Opcode::Setattr => self.setattr(),
            Opcode::Statx => self.statx(),
            Opcode::Statfs => self.statfs(),
            Opcode::Readlink => self.readlink(),
            Opcode::Symlink => self.symlink(),
            Opcode::Mknod => self.mknod(),
            Opcode::Mkdir => self.mkdir(),
            Opcode::Unlink => self.unlink(),
            Opcode::Rmdir => self.rmdir(),
            Opcode::Rename => self.rename(),
            Opcode::Rename2 => self.rename2(),
            Opcode::Link => self.link(),
            Opcode::Tmpfile => self.tmpfile(),
            Opcode::Opendir => self.opendir(),
            Opcode::Readdir => self.readdir(),
            Opcode::Readdirplus => self.readdirplus(),
            Opcode::Releasedir => self.releasedir(),
            Opcode::Fsync | Opcode::Fsyncdir => self.fsync(),
            Opcode::Syncfs => self.syncfs(),
            Opcode::Fallocate => self.fallocate(),
            Opcode::Lseek => self.lseek(),
            Opcode::CopyFileRange => self.copy_file_range(false),
            Opcode::CopyFileRange64 => self.copy_file_range(true),
            Opcode::Setxattr => self.setxattr(),
            Opcode::Getxattr => self.getxattr(),
            Opcode::Listxattr => self.listxattr(),
            Opcode::Removexattr => self.removexattr(),
            Opcode::Getlk => self.getlk(),
            Opcode::Setlk => self.setlk(false),
            Opcode::Setlkw => self.setlk(true),
            Opcode::Interrupt => self.interrupt(),
            Opcode::Ioctl => Err(Errno::ENOTTY),
            Opcode::Destroy => Ok(ReplyAction::Send),
            // The mount was negotiated before it was served; a second INIT is no part of the protocol.
            Opcode::Init => Err(Errno::EIO),
        }
    }
}
