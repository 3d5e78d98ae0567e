//! One request of the kernel, and how it is answered.

use std::sync::Arc;

use ashlar_types::{Credentials, Errno, InodeId};

use crate::connection::reply_buffer::ReplyBuffer;
use crate::connection::reply_route::ReplyRoute;
use crate::proto::{Arguments, InHeader};
use crate::state::mount_state::MountState;

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
    pub(crate) mount: &'a Arc<MountState<F>>,
    pub(crate) header: InHeader,
    pub(crate) arguments: Arguments<'a>,
    pub(crate) reply: &'a mut ReplyBuffer,
    pub(crate) route: &'a ReplyRoute,
}

impl<F> FuseRequest<'_, F> {
    /// Returns the file system.
    pub(crate) fn fs(&self) -> &F {
        &self.mount.file_system
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
}
