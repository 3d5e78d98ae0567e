//! The kernel's guards for directories that many users may write (`fs.protected_*`).
//!
//! The machine's administrator switches them on (`Documentation/admin-guide/sysctl/fs.rst`). LibFS and SharedFS always
//! act as if `fs.protected_hardlinks` were on.

use ashlar_types::{Inode, MODE_STICKY};

const OTHERS_WRITE: u32 = 0o002;
const GROUP_WRITES: u32 = 0o020;

/// The guards that were on when the session was opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guards {
    symlinks: bool,
    /// 1: in directories that all users may write; 2: also in directories that a group may write.
    regular: u32,
}

impl Guards {
    /// Reads the machine's guards; a guard that can't be read counts as on.
    pub(crate) fn of_machine() -> Self {
        let level = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/fs/protected_{name}")).unwrap_or_default();
            text.trim().parse().unwrap_or(1u32)
        };
        Self { symlinks: level("symlinks") != 0, regular: level("regular") }
    }

    /// Whether a user may follow a link at a path's end.
    pub(crate) fn allow_following(&self, uid: u32, directory: &Inode, link: &Inode) -> bool {
        let is_shared = directory.mode & (MODE_STICKY | OTHERS_WRITE) == MODE_STICKY | OTHERS_WRITE;
        !self.symlinks || link.uid == uid || !is_shared || directory.uid == link.uid
    }

    /// Whether a user may open an existing file with `O_CREAT`.
    pub(crate) fn allow_creating(&self, uid: u32, directory: &Inode, file: &Inode) -> bool {
        let writers = if self.regular >= 2 { OTHERS_WRITE | GROUP_WRITES } else { OTHERS_WRITE };
        self.regular == 0
            || directory.mode & MODE_STICKY == 0
            || file.uid == directory.uid
            || file.uid == uid
            || directory.mode & writers == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_types::{FileKind, InodeId, Timestamp};

    const ON: Guards = Guards { symlinks: true, regular: 1 };

    fn inode(kind: FileKind, mode: u32, uid: u32) -> Inode {
        Inode { uid, ..Inode::new(kind, mode, InodeId::ROOT, Timestamp::default()) }
    }

    #[test]
    fn other_users_link_in_a_shared_directory_is_not_followed() {
        let link = |uid| inode(FileKind::Symlink, 0o777, uid);
        let directory = |mode| inode(FileKind::Directory, mode, 0);
        assert!(!ON.allow_following(5, &directory(0o1777), &link(6)));
        assert!(ON.allow_following(5, &directory(0o1777), &link(5)));
        assert!(ON.allow_following(5, &directory(0o1777), &link(0)), "the directory's owner made it");
        assert!(ON.allow_following(5, &directory(0o777), &link(6)), "the directory is not sticky");
        assert!(Guards { symlinks: false, ..ON }.allow_following(5, &directory(0o1777), &link(6)));
    }

    #[test]
    fn other_users_file_is_not_opened_as_a_new_one() {
        let file = |uid| inode(FileKind::Regular, 0o666, uid);
        let directory = |mode| inode(FileKind::Directory, mode, 0);
        assert!(!ON.allow_creating(5, &directory(0o1777), &file(6)));
        assert!(ON.allow_creating(5, &directory(0o1777), &file(5)));
        assert!(ON.allow_creating(5, &directory(0o1770), &file(6)));
        assert!(!Guards { regular: 2, ..ON }.allow_creating(5, &directory(0o1770), &file(6)));
        assert!(Guards { regular: 0, ..ON }.allow_creating(5, &directory(0o1777), &file(6)));
    }
}
