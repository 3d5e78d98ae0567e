//! Extended attributes, ACLs among them.

use ashlar_libfs::{XattrFlags, xattr_list};
use ashlar_types::Errno;

use crate::file_system::FileSystem;
use crate::operations::request::{FuseRequest, ReplyAction, RequestResult};
use crate::proto::{GetxattrIn, GetxattrOut, SETXATTR_ACL_KILL_SGID, SetxattrExtension, SetxattrIn};

impl<F: FileSystem> FuseRequest<'_, F> {
    /// SETXATTR.
    pub(crate) fn setxattr(mut self) -> RequestResult {
        let asked: SetxattrIn = self.arguments.structure()?;
        let extension: SetxattrExtension = if self.mount.agreement.setxattr_extended() {
            self.arguments.structure()?
        } else {
            SetxattrExtension::default()
        };
        let name = self.arguments.text()?.bytes;
        let value = self.arguments.bytes(asked.size)?;
        let flags = XattrFlags::of(asked.flags as i32)?;
        let strip_sgid = extension.setxattr_flags & SETXATTR_ACL_KILL_SGID != 0;
        self.fs().set_xattr(&self.credentials(), self.inode(), name, value, flags, strip_sgid)?;
        Ok(ReplyAction::Send)
    }

    /// GETXATTR.
    pub(crate) fn getxattr(mut self) -> RequestResult {
        let asked: GetxattrIn = self.arguments.structure()?;
        let name = self.arguments.text()?.bytes;
        let served = self.mount.report_runs.serve_attribute(&self.header, name);
        let value = match served.or_else(|| self.mount.watches.serve_attribute(self.fs(), &self.header, name)) {
            Some(served) => served?,
            None => self.fs().xattr(self.inode(), name)?,
        };
        self.reply_sized(asked.size, &value)
    }

    /// LISTXATTR.
    pub(crate) fn listxattr(mut self) -> RequestResult {
        let asked: GetxattrIn = self.arguments.structure()?;
        let list = xattr_list(&self.fs().xattr_names(self.inode())?);
        self.reply_sized(asked.size, &list)
    }

    /// Replies with a value, or with its size if the caller gave no room.
    fn reply_sized(&mut self, room: u32, value: &[u8]) -> RequestResult {
        let size = u32::try_from(value.len()).map_err(|_| Errno::E2BIG)?;
        if room == 0 {
            self.reply.structure(&GetxattrOut { size, padding: 0 })?;
        } else if size > room {
            return Err(Errno::ERANGE);
        } else {
            self.reply.bytes(value)?;
        }
        Ok(ReplyAction::Send)
    }

    /// REMOVEXATTR.
    pub(crate) fn removexattr(mut self) -> RequestResult {
        let name = self.arguments.text()?.bytes;
        self.fs().remove_xattr(&self.credentials(), self.inode(), name)?;
        Ok(ReplyAction::Send)
    }
}
