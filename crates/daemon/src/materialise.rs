//! Opens real files on a mount for sessions that serve their files themselves.
//!
//! A file that leaves a session's sight must become a real one. A session names an inode and shows a directory on a
//! mount of the arena. It gets a new open file description of the inode on that mount. The helper sees the directory
//! and opens the file; the node decides whether the session may have it.

use ashlar_helper::FileOpening;
use ashlar_node::pending::{NodeAnswer, NodeRequest, RequestTerms};
use ashlar_types::{Access, Errno, InodeId, SessionId};
use rustix::fs::OFlags;

use crate::shared_state::SharedState;

/// The flags that a session may choose. None of them makes or truncates a file.
const FLAGS: OFlags = OFlags::RWMODE
    .union(OFlags::APPEND)
    .union(OFlags::NONBLOCK)
    .union(OFlags::DIRECT)
    .union(OFlags::SYNC)
    .union(OFlags::DSYNC)
    .union(OFlags::NOATIME)
    .union(OFlags::DIRECTORY)
    .union(OFlags::PATH)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::from_bits_retain(libc::O_ASYNC as u32))
    .union(OFlags::LARGEFILE);

/// Begins to open an inode for a session, on a mount that the session shows to the helper.
///
/// # Errors
/// `EINVAL` if the arena has no mount, or the flags or the inode's kind do not fit; `ESTALE` if the inode is gone;
/// `EACCES`, and `EPERM` for `O_NOATIME`, if the session's user may not; those of the helper.
pub fn materialise(shared: &SharedState, id: SessionId, (inode, flags): (InodeId, u32)) -> Result<FileOpening, Errno> {
    let wanted = OFlags::from_bits_retain(flags);
    let access = access_of(wanted)?;
    let request = NodeRequest::Open {
        session: id,
        inode,
        access: (!wanted.contains(OFlags::PATH)).then_some(access),
        keeps_time: wanted.contains(OFlags::NOATIME),
    };
    let NodeAnswer::MayOpen { entry, devices } = shared.lock().serve_request(request, RequestTerms::OWN)? else {
        return Err(Errno::EIO);
    };
    shared.helper.open((inode, flags), entry, devices)
}

/// Returns the access that the flags ask for.
fn access_of(flags: OFlags) -> Result<Access, Errno> {
    if !FLAGS.contains(flags) {
        return Err(Errno::EINVAL);
    }
    match flags.intersection(OFlags::RWMODE) {
        OFlags::RDONLY => Ok(Access::READ),
        OFlags::WRONLY => Ok(Access::WRITE),
        OFlags::RDWR => Ok(Access::READ | Access::WRITE),
        _ => Err(Errno::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_make_or_truncate_are_refused() {
        let asked = |flags: OFlags| access_of(flags).map(|access| access.0);
        assert_eq!(asked(OFlags::RDONLY | OFlags::DIRECTORY), Ok(4));
        assert_eq!(asked(OFlags::WRONLY | OFlags::APPEND | OFlags::LARGEFILE), Ok(2));
        assert_eq!(asked(OFlags::RDWR | OFlags::SYNC | OFlags::DIRECT | OFlags::NONBLOCK), Ok(6));
        for refused in [OFlags::RWMODE, OFlags::CREATE, OFlags::TRUNC, OFlags::TMPFILE, OFlags::EXCL] {
            assert_eq!(asked(refused), Err(Errno::EINVAL), "{refused:?}");
        }
    }
}
