//! POSIX access control lists, in the format of the `system.posix_acl_*` extended attributes.
//!
//! ```text
//! version:4 (2)  then entries: tag:2 permissions:2 id:4
//! ```
//!
//! Rules: POSIX.1e draft 17 and `acl(5)`.

use ashlar_types::{Access, Credentials, Errno, Inode};

const VERSION: u32 = 2;
const TAG_USER_OWNER: u16 = 0x01;
const TAG_USER: u16 = 0x02;
const TAG_GROUP_OWNER: u16 = 0x04;
const TAG_GROUP: u16 = 0x08;
const TAG_MASK: u16 = 0x10;
const TAG_OTHER: u16 = 0x20;
const ID_NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// An access control list that keeps the rules: one entry each for owner, group and others, a mask where users or
/// groups are named, entries in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<AclEntry>);

impl Acl {
    /// Reads an extended attribute's value; `None` if it is not a valid list.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (version, entries) = value.split_first_chunk::<4>()?;
        if u32::from_le_bytes(*version) != VERSION || entries.len() % 8 != 0 || entries.is_empty() {
            return None;
        }
        let mut list: Vec<AclEntry> = entries
            .chunks_exact(8)
            .map(|e| AclEntry {
                tag: u16::from_le_bytes([e[0], e[1]]),
                permissions: u16::from_le_bytes([e[2], e[3]]),
                id: u32::from_le_bytes([e[4], e[5], e[6], e[7]]),
            })
            .collect();
        for entry in list.iter_mut().filter(|e| !matches!(e.tag, TAG_USER | TAG_GROUP)) {
            // The value there has no meaning, and equal lists must be equal.
            entry.id = ID_NONE;
        }
        list.sort_by_key(|e| (e.tag, e.id));
        let count = |tag: u16| list.iter().filter(|e| e.tag == tag).count();
        let known = TAG_USER_OWNER | TAG_USER | TAG_GROUP_OWNER | TAG_GROUP | TAG_MASK | TAG_OTHER;
        let well_formed = list.iter().all(|e| e.tag & !known == 0 && e.tag.is_power_of_two() && e.permissions <= 7)
            // The id that stands for none names no user or group.
            && !list.iter().any(|e| matches!(e.tag, TAG_USER | TAG_GROUP) && e.id == ID_NONE)
            && count(TAG_USER_OWNER) == 1
            && count(TAG_GROUP_OWNER) == 1
            && count(TAG_OTHER) == 1
            && count(TAG_MASK) <= 1
            && (count(TAG_MASK) == 1 || count(TAG_USER) + count(TAG_GROUP) == 0)
            && list.windows(2).all(|w| w[0].tag != w[1].tag || w[0].id != w[1].id);
        well_formed.then_some(Self(list))
    }

    /// Looks at the form of an extended attribute's value; returns how many entries it has. An empty value has none.
    ///
    /// # Errors
    /// `EINVAL`: it is cut off. `EOPNOTSUPP`: another version.
    pub fn check_form(value: &[u8]) -> Result<usize, Errno> {
        if value.is_empty() {
            return Ok(0);
        }
        let (version, entries) = value.split_first_chunk::<4>().ok_or(Errno::EINVAL)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(Errno::EOPNOTSUPP);
        }
        if entries.len() % 8 == 0 { Ok(entries.len() / 8) } else { Err(Errno::EINVAL) }
    }

    /// Whether an extended attribute's value is a valid list that the nine permission bits express fully.
    ///
    /// The kernel accepts a list only if its entries are in order.
    #[must_use]
    pub fn is_plain(value: &[u8]) -> bool {
        let tags = || value[4..].chunks_exact(8).map(|e| u16::from_le_bytes([e[0], e[1]]));
        Self::parse(value).is_some_and(|acl| acl.is_mode_only() && tags().eq(acl.0.iter().map(|entry| entry.tag)))
    }

    /// The extended attribute's value.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            out.extend_from_slice(&entry.tag.to_le_bytes());
            out.extend_from_slice(&entry.permissions.to_le_bytes());
            out.extend_from_slice(&entry.id.to_le_bytes());
        }
        out
    }

    fn find(&self, tag: u16) -> Option<u32> {
        self.0.iter().find(|e| e.tag == tag).map(|e| u32::from(e.permissions))
    }

    fn set(&mut self, tag: u16, permissions: u32) {
        if let Some(entry) = self.0.iter_mut().find(|e| e.tag == tag) {
            entry.permissions = permissions as u16;
        }
    }

    /// Whether the nine permission bits say all of it, so that no list need be kept.
    #[must_use]
    pub fn is_mode_only(&self) -> bool {
        self.0.len() == 3
    }

    /// The nine permission bits that go with the list: the mask stands for the group.
    #[must_use]
    pub fn mode(&self) -> u32 {
        let group = self.find(TAG_MASK).or_else(|| self.find(TAG_GROUP_OWNER)).unwrap_or(0);
        self.find(TAG_USER_OWNER).unwrap_or(0) << 6 | group << 3 | self.find(TAG_OTHER).unwrap_or(0)
    }

    /// The list after `chmod(mode)`.
    #[must_use]
    pub fn with_mode(mut self, mode: u32) -> Self {
        let group_tag = if self.find(TAG_MASK).is_some() { TAG_MASK } else { TAG_GROUP_OWNER };
        self.set(TAG_USER_OWNER, mode >> 6 & 7);
        self.set(group_tag, mode >> 3 & 7);
        self.set(TAG_OTHER, mode & 7);
        self
    }

    /// The access list and permission bits of a file made with `mode` in a directory with this default list. The
    /// default list takes the place of the umask.
    #[must_use]
    pub fn inherited(&self, mode: u32) -> (Self, u32) {
        let allowed = self.mode() & mode & 0o777;
        let list = self.clone().with_mode(allowed);
        (list, (mode & !0o777) | allowed)
    }

    /// Whether the list allows `access` to `credentials` on a file owned as `inode` says.
    #[must_use]
    pub fn allows(&self, inode: &Inode, credentials: &Credentials, access: Access) -> bool {
        let wanted = access.0;
        let mask = self.find(TAG_MASK).unwrap_or(7);
        if credentials.uid == inode.uid {
            return self.find(TAG_USER_OWNER).unwrap_or(0) & wanted == wanted;
        }
        if let Some(entry) = self.0.iter().find(|e| e.tag == TAG_USER && e.id == credentials.uid) {
            return u32::from(entry.permissions) & mask & wanted == wanted;
        }
        let mut is_member = false;
        for entry in self.0.iter().filter(|e| matches!(e.tag, TAG_GROUP_OWNER | TAG_GROUP)) {
            let gid = if entry.tag == TAG_GROUP_OWNER { inode.gid } else { entry.id };
            if credentials.is_member(gid) {
                is_member = true;
                if u32::from(entry.permissions) & mask & wanted == wanted {
                    return true;
                }
            }
        }
        !is_member && self.find(TAG_OTHER).unwrap_or(0) & wanted == wanted
    }
}

#[cfg(test)]
mod tests;
