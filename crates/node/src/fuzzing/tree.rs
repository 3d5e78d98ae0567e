//! The tree of files that records are about, its users, and the sessions.

use ashlar_types::{
    FileKind, InodeId, LogPosition, QuotaId, QuotaKey, QuotaLimits, SessionId, Timestamp, WHITEOUT_DEVICE,
};
use ashlar_update::{Create, Update, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_CAPABILITY};

use crate::Node;
use crate::digest::commit::commit;
use crate::records::apply::apply_update;

/// A user, and its group.
pub const ANN: u32 = 1000;
/// Another user, and its group.
pub const BOB: u32 = 1001;
/// A group with Ann in it, and without Bob.
pub const TEAM: u32 = 50;
/// The session whose records are validated.
pub const WRITER: SessionId = SessionId(7);
/// A session of the super-user, with files open.
pub const BYSTANDER: SessionId = SessionId(8);
/// The times of the tree's files.
pub const FOUND_AT: Timestamp = Timestamp { seconds: 987_654_321, nanoseconds: 123_456_789 };
/// Inode numbers that the session may use.
pub const NEW_INODES: u64 = 12;

/// A file of the tree: the number of its directory; its name, kind, mode, owner and group.
pub type TreeRow = (usize, &'static [u8], FileKind, u32, u32, u32);

/// The tree. Directory 0 is the root, and directory `n` is in row `n - 1`.
pub const TREE: [TreeRow; 26] = [
    (0, b"home", FileKind::Directory, 0o755, ANN, ANN),
    (0, b"shared", FileKind::Directory, 0o1777, 0, 0),
    (0, b"team", FileKind::Directory, 0o2775, 0, TEAM),
    (0, b"private", FileKind::Directory, 0o700, 0, 0),
    (0, b"bob", FileKind::Directory, 0o700, BOB, BOB),
    (1, b"inner", FileKind::Directory, 0o750, ANN, TEAM),
    (1, b"limited", FileKind::Directory, 0o777, ANN, ANN),
    (6, b"deep", FileKind::Directory, 0o755, ANN, ANN),
    (1, b"file", FileKind::Regular, 0o644, ANN, ANN),
    (1, b"big", FileKind::Regular, 0o6755, ANN, TEAM),
    (2, b"open", FileKind::Regular, 0o666, BOB, BOB),
    (2, b"list", FileKind::Regular, 0o660, BOB, BOB),
    (3, b"program", FileKind::Regular, 0o2775, 0, TEAM),
    (4, b"secret", FileKind::Regular, 0o600, 0, 0),
    (4, b"public", FileKind::Regular, 0o666, 0, 0),
    (5, b"file", FileKind::Regular, 0o600, BOB, BOB),
    (6, b"link", FileKind::Symlink, 0o777, ANN, ANN),
    (2, b"fifo", FileKind::Fifo, 0o666, 0, 0),
    (2, b"white", FileKind::CharDevice, 0, ANN, ANN),
    (7, b"counted", FileKind::Regular, 0o644, ANN, ANN),
    (8, b"file", FileKind::Regular, 0o664, ANN, TEAM),
    (2, b"plain", FileKind::Regular, 0o644, 0, 0),
    (1, b"empty", FileKind::Directory, 0o755, ANN, ANN),
    (2, b"empty", FileKind::Directory, 0o755, BOB, BOB),
    (1, b"", FileKind::Regular, 0o600, ANN, ANN),
    (2, b"", FileKind::Regular, 0o644, BOB, BOB),
];
/// Rows of [`TREE`].
const INNER: usize = 5;
pub const LIMITED: usize = 6;
const BIG: usize = 9;
pub const OPEN: usize = 10;
const LIST: usize = 11;
const PROGRAM: usize = 12;
const COUNTED: usize = 19;
/// Rows that neither Ann nor Bob can reach, and those that Ann can't.
pub const HIDDEN_FROM_ALL: [usize; 2] = [13, 14];
pub const HIDDEN_FROM_ANN: [usize; 1] = [15];

/// The inodes that scripts name, and the session's user.
#[derive(Clone, Debug)]
pub struct TreeInodes {
    /// All inodes of the tree, and the one by which directories move.
    pub known: Vec<InodeId>,
    /// The directories among them.
    pub directories: Vec<InodeId>,
    /// Those that the user owns, or that all may write.
    pub own: Vec<InodeId>,
    /// The directories among the user's own.
    pub own_directories: Vec<InodeId>,
    /// The regular files among the user's own.
    pub own_files: Vec<InodeId>,
    /// The directory whose subtree has a limited quota.
    pub limited: InodeId,
    /// The first number that the session may give an inode.
    pub first_new: InodeId,
    /// The session's user.
    pub user: u32,
}

impl TreeInodes {
    /// Returns these inodes for a session of a user.
    pub fn of_user(&self, user: u32) -> Self {
        let own_rows = |kind: Option<FileKind>| {
            // The root and the inode by which directories move stand in front of the rows.
            let rows = TREE.iter().zip(&self.known[2..]);
            let is_own = move |row: &TreeRow| row.4 == user || user == 0 || row.3 & 0o002 != 0;
            let own = rows.filter(move |(row, _)| is_own(row) && kind.is_none_or(|kind| row.2 == kind));
            own.map(|(_, inode)| *inode).collect::<Vec<_>>()
        };
        let (own_directories, own_files) = (own_rows(Some(FileKind::Directory)), own_rows(Some(FileKind::Regular)));
        Self { user, own: own_rows(None), own_directories, own_files, ..self.clone() }
    }

    /// Returns the inodes of the tree, and those that the session may have made.
    pub fn watched(&self) -> impl Iterator<Item = InodeId> + '_ {
        let new = (self.first_new.0..self.first_new.0 + NEW_INODES).map(InodeId);
        self.known.iter().copied().filter(|id| *id != InodeId::RENAME).chain(new)
    }
}

/// Returns an access list with these named users and the rights of the mask and of others.
pub fn access_list(users: &[(u32, u8)], mask: u8, others: u8) -> Vec<u8> {
    const NONE: u32 = u32::MAX;
    let mut entries = vec![(0x01, 6, NONE)];
    entries.extend(users.iter().map(|(user, rights)| (0x02, *rights, *user)));
    entries.push((0x04, 4, NONE));
    entries.extend((!users.is_empty()).then_some((0x10, mask, NONE)));
    entries.push((0x20, others, NONE));
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend(u16::to_le_bytes(tag));
        bytes.extend(u16::from(rights).to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Makes the tree, and returns its inodes in the order of the rows.
pub fn make_tree(state: &mut Node) -> Vec<InodeId> {
    let numbers = state.store.allocate_inodes(TREE.len() as u64 + NEW_INODES).expect("numbers");
    let inodes: Vec<InodeId> = numbers.take(TREE.len()).map(InodeId).collect();
    let at = FOUND_AT;
    let mut apply = |update: Update<'_>| {
        apply_update(state, SessionId::SHARED_FS, LogPosition(1), &update).expect("it fits the state");
    };
    for (row, &inode) in TREE.iter().zip(&inodes) {
        let &(directory, name, kind, mode, uid, gid) = row;
        let parent = directory.checked_sub(1).map_or(InodeId::ROOT, |index| inodes[index]);
        let target = if kind == FileKind::Symlink { &b"file"[..] } else { b"" };
        let (device, acl_access, acl_default) = (WHITEOUT_DEVICE, &[][..], &[][..]);
        apply(Update::Create(Create {
            inode,
            parent,
            name,
            kind,
            mode,
            uid,
            gid,
            device,
            at,
            target,
            acl_access,
            acl_default,
        }));
        if kind == FileKind::Regular {
            apply(Update::Write { inode, offset: 0, at, strip: false, data: b"some content" });
            apply(Update::SetXattr { inode, name: b"user.a", value: b"value", mode: None, at });
        }
    }
    let set = |row: usize, name, value| Update::SetXattr { inode: inodes[row], name, value, mode: None, at };
    let list = access_list(&[(ANN, 6)], 6, 0);
    apply(set(LIST, XATTR_ACL_ACCESS, &list));
    apply(set(PROGRAM, XATTR_CAPABILITY, b"capability"));
    apply(set(INNER, XATTR_ACL_DEFAULT, &list));
    for block in [0, 1, 3, 200] {
        apply(Update::Write { inode: inodes[BIG], offset: block << 12, at, strip: false, data: &[5; 4096] });
    }
    let (name, inode) = (&b"twin"[..], inodes[OPEN]);
    apply(Update::Link { inode, parent: inodes[0], name, at });
    // The file in the limited directory counts against it too.
    for row in [LIMITED, COUNTED] {
        apply(Update::SetQuota { inode: inodes[row], quota: QuotaId::of(inodes[LIMITED]), at });
    }
    let limits = QuotaLimits { blocks: Some(100), inodes: Some(100) };
    state.store.set_quota_limits(QuotaKey::Subtree(QuotaId::of(inodes[LIMITED])), limits);
    commit(state).expect("committed");
    inodes
}
