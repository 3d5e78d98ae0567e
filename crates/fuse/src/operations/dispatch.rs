//! Leads a request to the operation that it asks for.

use ashlar_types::{Credentials, Errno, InodeId};

use crate::connection::reply_buffer::ReplyBuffer;
use crate::connection::reply_route::ReplyRoute;
use crate::file_system::FileSystem;
use crate::proto::{Arguments, InHeader, InterruptIn, Opcode};
use crate::serving::server::Server;

/// How a request that did not fail is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyAction {
    /// The reply is sent.
    Send,
    /// The reply is sent; if the caller is gone, this handle (its inode and its number) is closed again.
    SendOpened(InodeId, u64),
    /// The request has no reply.
    NoReply,
    /// Another thread sends the reply, by the request's [`ReplyRoute`].
    SendLater,
}

/// The result of an operation.
pub(crate) type RequestResult = Result<ReplyAction, Errno>;

/// One request, with everything that is needed to carry it out.
pub(crate) struct FuseRequest<'a, F> {
    pub(crate) server: &'a std::sync::Arc<Server<F>>,
    pub(crate) header: InHeader,
    pub(crate) arguments: Arguments<'a>,
    pub(crate) reply: &'a mut ReplyBuffer,
    pub(crate) route: &'a ReplyRoute,
}

impl<F: FileSystem> FuseRequest<'_, F> {
    /// Returns the file system.
    pub(crate) fn fs(&self) -> &F {
        &self.server.file_system
    }

    /// Returns the inode that the request is about. The kernel's node numbers are inode numbers, so FORGET has nothing
    /// to free.
    pub(crate) const fn inode(&self) -> InodeId {
        InodeId(self.header.nodeid)
    }

    /// Returns the user and group of the caller. The kernel has checked permissions (`default_permissions`),
    /// supplementary groups and ACLs included.
    pub(crate) const fn credentials(&self) -> Credentials {
        Credentials::checked(self.header.uid, self.header.gid)
    }

    /// Carries the request out.
    pub(crate) fn dispatch(self) -> RequestResult {
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

    /// INTERRUPT: only a waiting lock can be cancelled; all other requests end by themselves.
    fn interrupt(mut self) -> RequestResult {
        let asked: InterruptIn = self.arguments.structure()?;
        self.server.locks.interrupt_wait(self.server, asked.unique);
        Ok(ReplyAction::NoReply)
    }
}
