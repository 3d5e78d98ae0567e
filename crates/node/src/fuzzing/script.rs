//! Draws records from arbitrary bytes.
//!
//! Most records name inodes and entries that exist, so that many are accepted. Some are changed in a few bytes, and
//! some are nothing but bytes.

use ashlar_types::{FileKind, InodeId, LogPosition, QuotaId, SessionId, Timestamp};
use ashlar_update::{
    Allocation, Create, Rename, SetAttributes, Update, Whiteout, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_CAPABILITY,
    XATTR_QUOTA,
};

use super::tree::{ANN, BOB, BYSTANDER, TEAM, TreeInodes, access_list};
use crate::Node;

/// The time of most records: later than the tree's, and in the past.
const NOW: Timestamp = Timestamp { seconds: 1_700_000_000, nanoseconds: 7 };
const NAMES: [&[u8]; 6] = [b"file", b"big", b"new", b"other", b"made", &[b'n'; 255]];
const ODD_NAMES: [&[u8]; 4] = [b"", b"", b"..", b"a/b"];
const ALL_KINDS: [FileKind; 10] = [
    FileKind::Regular,
    FileKind::Regular,
    FileKind::Regular,
    FileKind::Directory,
    FileKind::Directory,
    FileKind::Symlink,
    FileKind::Fifo,
    FileKind::Socket,
    FileKind::CharDevice,
    FileKind::BlockDevice,
];

/// A record's kind and body.
#[derive(Clone, Debug)]
pub struct RawRecord {
    /// The number of its kind.
    pub kind: u8,
    /// Its body.
    pub body: Vec<u8>,
}

/// Bytes that decide on everything. Behind their end, all are 0.
#[derive(Clone, Copy, Debug)]
pub struct RecordScript<'a>(&'a [u8]);

impl<'a> RecordScript<'a> {
    /// Begins at the first byte.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns whether no bytes are left.
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes a byte.
    pub fn byte(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    /// Takes a byte, and returns true for about one of so many values.
    pub fn is_one_in(&mut self, many: u8) -> bool {
        self.byte() % many == 0
    }

    /// Takes a whole word.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// Takes some bytes, or those that are left.
    fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::from(self.byte()) % of.len()]
    }

    /// Takes a number near an end of some range, a small one, or one near the bounds of blocks.
    fn number(&mut self) -> u64 {
        let (shape, small) = (self.byte() % 32, u64::from(self.byte()));
        match shape {
            0 => 0,
            1 => u64::MAX - small % 3,
            2 => (1 << 63) - 2 + small % 4,
            3 => u64::from(u32::MAX) - 1 + small % 4,
            4 => 1 << (small % 64),
            5 => self.word(),
            6..16 => small << 12,
            16..20 => (small % 8) << 12 | u64::from(self.byte()),
            20..24 => small % 3 * 512 * 1024 + u64::from(self.byte()),
            _ => small,
        }
    }

    fn time(&mut self) -> Timestamp {
        match self.byte() % 16 {
            0 => Timestamp { seconds: self.number() as i64, nanoseconds: self.number() as u32 },
            1 => Timestamp { seconds: i64::MAX, nanoseconds: 999_999_999 },
            // Not the tree's own time: a change must show.
            2 => Timestamp::default(),
            step => Timestamp { seconds: NOW.seconds + i64::from(step), ..NOW },
        }
    }

    fn mode(&mut self) -> u32 {
        let mode = self.pick(&[0o644, 0o600, 0o666, 0o755, 0o777, 0o1777, 0o2775, 0o4755, 0o6777, 0o2644, 0]);
        if self.is_one_in(8) { self.number() as u32 } else { mode }
    }

    fn name(&mut self) -> &'static [u8] {
        if self.is_one_in(16) { self.pick(&ODD_NAMES) } else { self.pick(&NAMES) }
    }

    /// Takes an inode: one of the user's, one of the tree, one that the session may make, or any number.
    fn inode(&mut self, tree: &TreeInodes) -> InodeId {
        match self.byte() {
            0..100 => self.pick(&tree.own),
            100..170 => self.pick(&tree.known),
            chosen @ 170..250 => InodeId(tree.first_new.0 + u64::from(chosen % 4)),
            _ => InodeId(self.number()),
        }
    }

    /// Takes an inode, mostly a regular file of the user's.
    fn file(&mut self, tree: &TreeInodes) -> InodeId {
        if self.is_one_in(3) { self.inode(tree) } else { self.pick(&tree.own_files) }
    }

    /// Takes a number for a new inode, mostly one that is free.
    fn new_inode(&mut self, state: &Node, tree: &TreeInodes) -> InodeId {
        let free = (tree.first_new.0..).map(InodeId).find(|id| matches!(state.store.inode(*id), Ok(None)));
        if self.is_one_in(8) { self.inode(tree) } else { free.unwrap_or(tree.first_new) }
    }

    fn directory(&mut self, tree: &TreeInodes) -> InodeId {
        match self.byte() % 16 {
            0 => self.inode(tree),
            1..4 => self.pick(&tree.directories),
            _ => self.pick(&tree.own_directories),
        }
    }

    /// Takes a directory, a name in it, and the inode of that name, mostly as they are.
    fn entry(&mut self, state: &Node, tree: &TreeInodes) -> (InodeId, Vec<u8>, InodeId) {
        let directory = self.directory(tree);
        let mut entries = state.store.entries(directory, 0, usize::MAX).expect("a sound store");
        // The order of the directory itself depends on the arena's key.
        entries.sort_by(|one, other| one.1.as_bytes().cmp(other.1.as_bytes()));
        if entries.is_empty() || self.is_one_in(16) {
            return (directory, self.name().to_vec(), self.inode(tree));
        }
        let (_, name, entry) = &entries[usize::from(self.byte()) % entries.len()];
        (directory, name.as_bytes().to_vec(), entry.inode)
    }

    /// Takes an access list in bytes, mostly a valid one.
    fn list(&mut self) -> Vec<u8> {
        match self.byte() % 4 {
            0 => self.word().to_le_bytes().to_vec(),
            1 => access_list(&[], 7, self.byte() & 7),
            2 => access_list(&[(ANN, 7), (BOB, self.byte() & 7)], 7, 0),
            _ => access_list(&[(BOB, 6)], self.byte() & 7, 4),
        }
    }

    fn whiteout<'b>(&mut self, user: u32, inode: InodeId, acl_access: &'b [u8]) -> Whiteout<'b> {
        let [uid, gid] = [(); 2].map(|()| self.pick(&[user, user, user, ANN, TEAM, 0]));
        Whiteout { inode, uid, gid, acl_access }
    }

    /// Takes a record.
    pub fn record(&mut self, state: &Node, tree: &TreeInodes) -> RawRecord {
        let form = self.byte() % 32;
        if form == 0 {
            let (kind, length) = (self.byte(), self.byte().into());
            return RawRecord { kind, body: self.bytes(length).to_vec() };
        }
        let mut record = self.encoded_update(state, tree);
        if form < 3 {
            self.mutate(&mut record);
        }
        record
    }

    /// Changes some bytes.
    fn mutate(&mut self, record: &mut RawRecord) {
        for _ in 0..1 + self.byte() % 4 {
            let (at, byte) = (usize::from(self.byte()) % record.body.len().max(1), self.byte());
            match self.byte() % 6 {
                0 => record.body.truncate(at),
                1 => record.body.insert(at, byte),
                2 => record.body.extend((0..self.pick(&[1, 9, 250])).map(|_| byte)),
                3 => record.kind = byte % 20,
                _ => record.body.get_mut(at).into_iter().for_each(|there| *there = byte),
            }
        }
    }

    fn encoded_update(&mut self, state: &Node, tree: &TreeInodes) -> RawRecord {
        let at = self.time();
        let update = match self.byte() % 24 {
            0..3 => return self.creation(state, tree, at),
            3..6 => return self.renaming(state, tree, at),
            6..8 => return self.attribute(tree, at),
            8..11 => self.content(tree, at),
            11 => {
                let (parent, name) = (self.directory(tree), self.name());
                Update::Link { inode: self.file(tree), parent, name, at }
            }
            chosen @ 12..16 => {
                let (parent, name, inode) = self.entry(state, tree);
                let (name, release) = (&*name, chosen % 2 == 0);
                let is_directory = state.store.inode(inode).is_ok_and(|found| found.is_some_and(|i| i.is_directory()));
                let update = if is_directory != self.is_one_in(16) {
                    Update::RemoveDirectory { inode, parent, name, release, at }
                } else {
                    Update::Unlink { inode, parent, name, release, at }
                };
                return encode(&update);
            }
            16..19 => {
                let [owner, team, times] = [self.byte(), self.byte(), self.byte()];
                Update::SetAttributes(SetAttributes {
                    inode: self.inode(tree),
                    mode: (times & 1 == 0).then(|| self.mode()),
                    uid: (owner % 4 == 0).then(|| self.pick(&[ANN, BOB, 0])),
                    gid: (team % 3 == 0).then(|| self.pick(&[ANN, TEAM, BOB, 0])),
                    accessed: (times & 2 == 0).then(|| if times & 8 == 0 { at } else { self.time() }),
                    modified: (times & 4 == 0).then(|| if times & 8 == 0 { at } else { self.time() }),
                    at,
                })
            }
            19 => Update::Accessed { inode: self.inode(tree), at },
            20 => Update::Release { inode: self.inode(tree) },
            21 => {
                let session = if self.is_one_in(2) { BYSTANDER } else { SessionId(self.number()) };
                Update::Depend { session, position: LogPosition(self.number()) }
            }
            22 => {
                let quota = self.pick(&[QuotaId::NONE, QuotaId::of(tree.limited), QuotaId(u64::MAX >> 8)]);
                let quota = if self.is_one_in(8) { QuotaId(self.number()) } else { quota };
                Update::SetQuota { inode: self.inode(tree), quota, at }
            }
            _ => {
                let (inode, mode) = (self.inode(tree), self.is_one_in(4).then(|| self.mode()));
                let name = self.pick(&[&b"user.a"[..], XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_CAPABILITY]);
                Update::RemoveXattr { inode, name, mode, at }
            }
        };
        encode(&update)
    }

    /// Takes a change of a file's content.
    fn content(&mut self, tree: &TreeInodes, at: Timestamp) -> Update<'static> {
        let (inode, offset, strip) = (self.file(tree), self.number(), !self.is_one_in(4));
        match self.byte() % 4 {
            0 => Update::Resize { inode, size: offset, strip, at },
            1 => {
                let how = self.pick(&Allocation::ALL);
                Update::Allocate { inode, how, offset, length: self.number(), strip, at }
            }
            _ => {
                let data = self.pick(&[&b"data"[..], b"", &[7; 1500], &[8; 4096], &[9; 5000]]);
                Update::Write { inode, offset, at, strip, data }
            }
        }
    }

    fn creation(&mut self, state: &Node, tree: &TreeInodes, at: Timestamp) -> RawRecord {
        let (inode, parent) = (self.new_inode(state, tree), self.directory(tree));
        let (kind, name, mode) = (self.pick(&ALL_KINDS), self.name(), self.mode());
        let gid = if self.is_one_in(4) { self.pick(&[ANN, TEAM, TEAM, BOB, 0]) } else { tree.user };
        let uid = if self.is_one_in(8) { self.pick(&[0, BOB]) } else { tree.user };
        let target = if (kind == FileKind::Symlink) != self.is_one_in(32) { &b"target"[..] } else { b"" };
        let device = if self.is_one_in(4) { self.number() } else { 0 };
        let lists = [0; 2].map(|_| if self.is_one_in(8) { self.list() } else { Vec::new() });
        let [acl_access, acl_default] = [&lists[0], &lists[1]].map(Vec::as_slice);
        let create = Create { inode, parent, name, kind, mode, uid, gid, device, at, target, acl_access, acl_default };
        encode(&Update::Create(create))
    }

    fn renaming(&mut self, state: &Node, tree: &TreeInodes, at: Timestamp) -> RawRecord {
        let (parent, name, inode) = self.entry(state, tree);
        let (new_parent, new_name) = if self.is_one_in(2) {
            let (directory, name, _) = self.entry(state, tree);
            (directory, name)
        } else {
            (self.directory(tree), self.name().to_vec())
        };
        let there = state.store.entry(new_parent, &new_name).ok().flatten().map(|entry| entry.inode);
        let target = if self.is_one_in(16) { Some(self.inode(tree)) } else { there };
        let (flags, list) = (self.byte(), if self.is_one_in(8) { self.list() } else { Vec::new() });
        let whiteout = (flags & 7 == 0).then(|| {
            let made = self.new_inode(state, tree);
            self.whiteout(tree.user, made, &list)
        });
        let (exchange, release) = (flags & 7 == 1, flags & 8 == 0);
        let (name, new_name) = (&*name, &*new_name);
        let rename = Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at };
        encode(&Update::Rename(rename))
    }

    fn attribute(&mut self, tree: &TreeInodes, at: Timestamp) -> RawRecord {
        let (inode, list) = (self.inode(tree), self.list());
        let name = self.pick(&[
            &b"user.a"[..],
            b"user.b",
            XATTR_ACL_ACCESS,
            XATTR_ACL_ACCESS,
            XATTR_ACL_DEFAULT,
            XATTR_CAPABILITY,
            XATTR_QUOTA,
            b"trusted.x",
        ]);
        let is_list = [XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT].contains(&name);
        let value = match self.byte() % 8 {
            0 => &[0; 4000],
            1 => &b""[..],
            chosen if chosen > 2 && is_list => &list,
            _ => b"value",
        };
        let mode = (name == XATTR_ACL_ACCESS || self.is_one_in(16)).then(|| self.mode());
        encode(&Update::SetXattr { inode, name, value, mode, at })
    }
}

fn encode(update: &Update<'_>) -> RawRecord {
    RawRecord { kind: update.kind() as u8, body: update.encode().parts().concat() }
}
