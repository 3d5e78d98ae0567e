//! Conversions of attributes, times and flags to and from the C library's forms.

use std::mem::zeroed;

use ashlar_types::{BLOCK_BYTES, Errno, Inode, InodeId, Timestamp};

use crate::api::{FoundInode, Outcome, SetTime, XattrFlags};

impl FoundInode {
    /// Returns the `stat` of the inode on a mount whose files show `device`.
    #[must_use]
    pub fn stat(&self, device: u64) -> libc::stat {
        stat_of(self.id, &self.inode, device)
    }
}

/// Returns the `stat` of an inode on a mount whose files show `device`.
#[must_use]
pub fn stat_of(id: InodeId, inode: &Inode, device: u64) -> libc::stat {
    // SAFETY: zeros are a valid `stat`.
    let mut stat: libc::stat = unsafe { zeroed() };
    stat.st_dev = device;
    stat.st_ino = id.0;
    stat.st_nlink = inode.links.into();
    stat.st_mode = inode.st_mode();
    stat.st_uid = inode.uid;
    stat.st_gid = inode.gid;
    stat.st_rdev = inode.st_rdev().into();
    stat.st_size = inode.size as i64;
    stat.st_blksize = BLOCK_BYTES as _;
    stat.st_blocks = inode.st_blocks() as i64;
    (stat.st_atime, stat.st_atime_nsec) = (inode.accessed.seconds, inode.accessed.nanoseconds.into());
    (stat.st_mtime, stat.st_mtime_nsec) = (inode.modified.seconds, inode.modified.nanoseconds.into());
    (stat.st_ctime, stat.st_ctime_nsec) = (inode.changed.seconds, inode.changed.nanoseconds.into());
    stat
}

impl SetTime {
    /// Converts a time of `utimensat`; `None` for a time that stays as it is.
    ///
    /// # Errors
    /// `EINVAL` for nanoseconds out of range.
    pub fn from_timespec(time: &libc::timespec) -> Outcome<Option<Self>> {
        match time.tv_nsec {
            libc::UTIME_NOW => Ok(Some(Self::Now)),
            libc::UTIME_OMIT => Ok(None),
            0..=999_999_999 => Ok(Some(Self::At(Timestamp { seconds: time.tv_sec, nanoseconds: time.tv_nsec as u32 }))),
            _ => Err(Errno::EINVAL),
        }
    }
}

impl XattrFlags {
    /// Converts the flags of `setxattr`.
    ///
    /// # Errors
    /// `EINVAL` for an unknown flag.
    pub fn of(flags: i32) -> Outcome<Self> {
        if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Self { create: flags & libc::XATTR_CREATE != 0, replace: flags & libc::XATTR_REPLACE != 0 })
    }
}

/// Returns the names of extended attributes as `listxattr` does: each with a NUL behind it.
#[must_use]
pub fn xattr_list(names: &[Vec<u8>]) -> Vec<u8> {
    names.iter().flat_map(|name| name.iter().copied().chain([0])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utimensat_times_are_converted() {
        let time =
            |seconds, nanoseconds| SetTime::from_timespec(&libc::timespec { tv_sec: seconds, tv_nsec: nanoseconds });
        assert_eq!(time(-5, 7), Ok(Some(SetTime::At(Timestamp { seconds: -5, nanoseconds: 7 }))));
        assert_eq!(time(1, libc::UTIME_NOW), Ok(Some(SetTime::Now)));
        assert_eq!(time(1, libc::UTIME_OMIT), Ok(None));
        assert_eq!(time(1, 1_000_000_000), Err(Errno::EINVAL));
        assert_eq!(time(1, -1), Err(Errno::EINVAL));
    }
}
