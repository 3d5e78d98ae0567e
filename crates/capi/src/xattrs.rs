//! Operations on extended attributes.

use ashlar_libfs::{Outcome, XattrFlags, xattr_list};
use ashlar_types::InodeId;

use crate::session::CapiSession;

impl CapiSession {
    /// Returns an attribute's value.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn xattr(&self, id: InodeId, name: &[u8]) -> Outcome<Vec<u8>> {
        self.fs.check_xattr_read(&self.user, id, name)?;
        self.fs.xattr(id, name)
    }

    /// Returns the names of all attributes, with a NUL behind each.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn xattr_list(&self, id: InodeId) -> Outcome<Vec<u8>> {
        Ok(xattr_list(&self.fs.xattr_names(id)?))
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn set_xattr(&self, id: InodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Outcome<()> {
        let group = self.fs.attributes(id)?.inode.gid;
        let strip_sgid = !self.user.is_privileged() && !self.user.is_member(group);
        self.fs.set_xattr(&self.user, id, name, value, flags, strip_sgid)
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn remove_xattr(&self, id: InodeId, name: &[u8]) -> Outcome<()> {
        self.fs.remove_xattr(&self.user, id, name)
    }
}
