//! Changes that a session wants: drawn from the tree as the session sees it, and turned into updates later.

use ashlar_types::{Access, Credentials, FileKind, Inode, InodeId, MODE_STICKY, QuotaId, Timestamp};
use ashlar_update::model::ModelTree;
use ashlar_update::permission::{allows, check_xattr_change, granted_access, is_linkable, is_stuck, may_link, owns};
use ashlar_update::{Allocation, Create, Rename, SetAttributes, Update, Whiteout, would_make_cycle};

use crate::random::SimRandom;

const NAMES: [&[u8]; 6] = [b"a", b"b", b"c", b"d", b"e", b"a long name, so that rows differ in length"];
const XATTRS: [&[u8]; 2] = [b"user.colour", b"user.shape"];
/// Modes under which every user may read and search.
const FILE_MODES: [u32; 4] = [0o644, 0o666, 0o666, 0o664];
const DIRECTORY_MODES: [u32; 4] = [0o777, 0o777, 0o755, 0o777 | MODE_STICKY];
const BLOCK: u64 = 4096;
const FILE_BLOCKS_MAX: u64 = 5;
/// The most directories and other inodes with names: a small tree has more conflicts.
const DIRECTORIES_MAX: usize = 6;
const INODES_MAX: usize = 32;

/// A name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamePlace {
    /// The directory.
    pub directory: InodeId,
    /// The name.
    pub name: &'static [u8],
}

/// A change that a session is about to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Makes an inode; without a name if the name is empty.
    Create(NamePlace, FileKind, u32),
    /// Writes so many bytes of a value.
    Write(InodeId, u64, u64, u8),
    /// Sets a size.
    Resize(InodeId, u64),
    /// Changes a range.
    Allocate(InodeId, Allocation, u64, u64),
    /// Gives an inode another name.
    Link(InodeId, NamePlace),
    /// Removes a name, of a file or a directory.
    Unlink(NamePlace),
    /// Renames, exchanges if the second is set, and leaves a whiteout if the third is set.
    Rename(NamePlace, NamePlace, bool, bool),
    /// Changes the mode, or the times, or the owner.
    SetAttributes(InodeId, IntendedAttributes),
    /// Sets an attribute of so many bytes, or removes it.
    SetXattr(InodeId, &'static [u8], Option<u64>),
    /// Notes an access.
    Accessed(InodeId),
    /// Has closed the last handle on a removed file.
    Release(InodeId),
}

/// A change of attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntendedAttributes {
    /// The mode.
    Mode(u32),
    /// The times.
    Times(i64),
    /// The owner.
    Owner(u32),
    /// An empty directory becomes the top of a subtree that is counted, or ends to be one.
    Subtree(bool),
}

/// The inodes on which a session needs a lease, and whether to write.
pub type Claims = Vec<(InodeId, bool)>;

/// Returns an inode of the tree.
pub(crate) fn inode(tree: &ModelTree, id: InodeId) -> Option<&Inode> {
    tree.inodes().find(|(found, _)| *found == id).map(|(_, inode)| inode)
}

fn entry(tree: &ModelTree, place: NamePlace) -> Option<(InodeId, FileKind)> {
    tree.entries(place.directory).find(|(name, _)| *name == place.name).map(|(_, entry)| (entry.inode, entry.kind))
}

impl Intent {
    /// Draws a change that may fit the tree; `open` are inodes that the session has open.
    pub fn draw(tree: &ModelTree, open: &[InodeId], is_root: bool, random: &mut SimRandom) -> Option<Self> {
        let named = |wanted: &dyn Fn(&Inode) -> bool| -> Vec<InodeId> {
            tree.inodes().filter(|(_, inode)| inode.links > 0 && wanted(inode)).map(|(id, _)| id).collect()
        };
        let directories = named(&|inode| inode.is_directory());
        let mut files = named(&|inode| inode.kind == FileKind::Regular);
        files.extend(open.iter().filter(|id| inode(tree, **id).is_some_and(|found| found.kind == FileKind::Regular)));
        let all = named(&|_| true);
        let entries: Vec<(InodeId, Vec<u8>)> = directories
            .iter()
            .flat_map(|&directory| tree.entries(directory).map(move |(name, _)| (directory, name.to_vec())))
            .collect();
        let taken = |random: &mut SimRandom| {
            let (directory, name) = entries.get(random.below(entries.len() as u64) as usize)?;
            let name = NAMES.into_iter().find(|known| known == name)?;
            Some(NamePlace { directory: *directory, name })
        };
        let place = |random: &mut SimRandom| {
            Some(NamePlace { directory: random.pick(&directories)?, name: random.pick(&NAMES)? })
        };
        Some(match random.below(34) {
            0..=6 if all.len() < INODES_MAX => {
                let kinds = [FileKind::Regular, FileKind::Regular, FileKind::Directory, FileKind::Symlink];
                let kind = random.pick(&kinds)?;
                if kind == FileKind::Directory && directories.len() >= DIRECTORIES_MAX {
                    return None;
                }
                let mut place = place(random)?;
                if kind == FileKind::Regular && random.one_in(8) {
                    place.name = b"";
                }
                let modes = if kind == FileKind::Directory { DIRECTORY_MODES } else { FILE_MODES };
                Self::Create(place, kind, random.pick(&modes)?)
            }
            0..=13 => {
                let within = random.pick(&[0, 0, 0, 100, 4000])?;
                let blocks = if random.one_in(3) { FILE_BLOCKS_MAX - 1 } else { 2 };
                let length = random.pick(&[1, 300, BLOCK, BLOCK, 5000])?;
                Self::Write(random.pick(&files)?, random.below(blocks) * BLOCK + within, length, random.draw() as u8)
            }
            14 | 15 => Self::Resize(random.pick(&files)?, random.pick(&[0, 1, 700, 5000, 9000])?),
            16 => {
                let how = [Allocation::Punch, Allocation::Zero, Allocation::ReserveKeepSize, Allocation::Collapse];
                let first = random.below(FILE_BLOCKS_MAX - 1);
                Self::Allocate(random.pick(&files)?, random.pick(&how)?, first * BLOCK, BLOCK)
            }
            17 | 18 => Self::Link(random.pick(&files)?, place(random)?),
            19..=22 => Self::Unlink(taken(random)?),
            23..=26 => {
                let (from, to) = (taken(random)?, place(random)?);
                Self::Rename(from, to, random.one_in(4), random.one_in(8))
            }
            27 | 28 => {
                let id = random.pick(&all)?;
                let is_directory = inode(tree, id)?.is_directory();
                let modes = if is_directory { DIRECTORY_MODES } else { FILE_MODES };
                let change = match random.below(3) {
                    0 if is_root && is_directory && id != InodeId::ROOT && random.one_in(2) => {
                        IntendedAttributes::Subtree(random.one_in(2))
                    }
                    0 if is_root && id != InodeId::ROOT => IntendedAttributes::Owner(random.pick(&[0, 1001, 1002])?),
                    0 | 1 => IntendedAttributes::Times(random.below(1000) as i64),
                    _ => IntendedAttributes::Mode(random.pick(&modes)?),
                };
                Self::SetAttributes(id, change)
            }
            29..=31 => {
                let bytes = if random.one_in(4) { None } else { Some(random.below(300)) };
                Self::SetXattr(random.pick(&all)?, random.pick(&XATTRS)?, bytes)
            }
            _ => Self::Accessed(random.pick(&files)?),
        })
    }

    /// Returns the leases that the change needs, as the session sees the tree; `None` if it can't be made.
    #[must_use]
    pub fn claims(&self, tree: &ModelTree) -> Option<Claims> {
        Some(match self {
            Self::Create(place, ..) => {
                inode(tree, place.directory)?;
                vec![(place.directory, true)]
            }
            Self::Write(id, ..)
            | Self::Resize(id, _)
            | Self::Allocate(id, ..)
            | Self::SetAttributes(id, _)
            | Self::SetXattr(id, ..) => vec![(*id, true)],
            Self::Link(id, place) => vec![(place.directory, true), (*id, true)],
            Self::Unlink(place) => vec![(place.directory, true), (entry(tree, *place)?.0, true)],
            Self::Rename(from, to, exchange, _) => {
                let (moved, kind) = entry(tree, *from)?;
                let target = entry(tree, *to);
                let mut claims = vec![(from.directory, true), (moved, true)];
                if to.directory != from.directory {
                    claims.push((to.directory, true));
                }
                claims.extend(target.map(|(id, _)| (id, true)).filter(|(id, _)| *id != moved));
                let moves_directory = kind == FileKind::Directory
                    || *exchange && target.is_some_and(|(_, kind)| kind == FileKind::Directory);
                if moves_directory && to.directory != from.directory {
                    claims.push((InodeId::RENAME, true));
                }
                claims
            }
            Self::Accessed(id) => vec![(*id, false)],
            Self::Release(id) => vec![(*id, true)],
        })
    }

    /// Returns whether the change makes an inode.
    #[must_use]
    pub const fn makes_inode(&self) -> bool {
        matches!(self, Self::Create(..) | Self::Rename(_, _, _, true))
    }

    /// Returns the update, if the tree allows it and the user may make it; `made` is the number of a new inode.
    #[must_use]
    pub fn update<'a>(
        &self,
        tree: &ModelTree,
        user: &Credentials,
        is_open: &dyn Fn(InodeId) -> bool,
        made: InodeId,
        at: Timestamp,
        data: &'a mut Vec<u8>,
    ) -> Option<Update<'a>> {
        let found = |id| inode(tree, id);
        let may_change = |directory: InodeId| {
            found(directory).is_some_and(|found| {
                found.is_directory() && found.links > 0 && allows(found, None, user, Access::WRITE | Access::EXECUTE)
            })
        };
        let may_remove = |directory: InodeId, id: InodeId| {
            let (Some(parent), Some(inode)) = (found(directory), found(id)) else { return false };
            may_change(directory) && !is_stuck(parent, inode, user)
        };
        let may_write = |id| found(id).is_some_and(|inode| granted_access(inode, None, user).contains(Access::WRITE));
        let strip = !user.is_privileged();
        Some(match *self {
            Self::Create(place, kind, mode) => {
                if !may_change(place.directory) || !place.name.is_empty() && entry(tree, place).is_some() {
                    return None;
                }
                let target: &[u8] = if kind == FileKind::Symlink { b"somewhere" } else { b"" };
                Update::Create(Create {
                    inode: made,
                    parent: place.directory,
                    name: place.name,
                    kind,
                    mode,
                    uid: user.uid,
                    gid: user.gid,
                    device: 0,
                    at,
                    target,
                    acl_access: &[],
                    acl_default: &[],
                })
            }
            Self::Write(inode, offset, length, value) => {
                if !may_write(inode) {
                    return None;
                }
                data.extend((0..length).map(|index| value.wrapping_add((index / 64) as u8)));
                Update::Write { inode, offset, at, strip, data }
            }
            Self::Resize(inode, size) if may_write(inode) => Update::Resize { inode, size, strip, at },
            Self::Allocate(inode, how, offset, length) if may_write(inode) => {
                Update::Allocate { inode, how, offset, length, strip, at }
            }
            Self::Link(inode, place) => {
                let source = found(inode)?;
                if !may_change(place.directory)
                    || entry(tree, place).is_some()
                    || !is_linkable(source)
                    || !may_link(source, None, user)
                {
                    return None;
                }
                Update::Link { inode, parent: place.directory, name: place.name, at }
            }
            Self::Unlink(place) => {
                let (inode, kind) = entry(tree, place)?;
                if !may_remove(place.directory, inode) {
                    return None;
                }
                let (parent, name, release) = (place.directory, place.name, !is_open(inode));
                if kind == FileKind::Directory {
                    Update::RemoveDirectory { inode, parent, name, release, at }
                } else {
                    Update::Unlink { inode, parent, name, release, at }
                }
            }
            Self::Rename(from, to, exchange, whiteout) => {
                return self.rename(tree, user, is_open, made, at, (from, to, exchange, whiteout));
            }
            Self::SetAttributes(inode, IntendedAttributes::Subtree(is_top)) => {
                let (directory, is_counted) = (found(inode)?, |quota| quota == QuotaId::of(inode));
                let quota = if is_top { QuotaId::of(inode) } else { QuotaId::NONE };
                // Without entries, and not within another subtree.
                let is_free = directory.quota == QuotaId::NONE || is_counted(directory.quota);
                if !directory.is_directory() || directory.entries > 0 || !is_free || !user.is_privileged() {
                    return None;
                }
                Update::SetQuota { inode, quota, at }
            }
            Self::SetAttributes(inode, change) if owns(found(inode)?, user) => {
                // The time of access is not set back: records of accesses need no lease, so an earlier one may follow.
                let modified = match change {
                    IntendedAttributes::Times(seconds) => Some(Timestamp { seconds, nanoseconds: 0 }),
                    _ => None,
                };
                let accessed = modified.map(|_| at);
                let mode = if let IntendedAttributes::Mode(mode) = change { Some(mode) } else { None };
                let uid = if let IntendedAttributes::Owner(uid) = change { Some(uid) } else { None };
                Update::SetAttributes(SetAttributes { inode, mode, uid, gid: None, accessed, modified, at })
            }
            Self::SetXattr(inode, name, bytes) => {
                let attributes = tree.xattrs(inode);
                let is_there = attributes.iter().any(|(known, _)| known == name);
                if check_xattr_change(found(inode)?, None, user, name).is_err() || bytes.is_none() && !is_there {
                    return None;
                }
                match bytes {
                    Some(bytes) => {
                        data.resize(bytes as usize, b'x');
                        Update::SetXattr { inode, name, value: data, mode: None, at }
                    }
                    None => Update::RemoveXattr { inode, name, mode: None, at },
                }
            }
            Self::Accessed(inode) => {
                found(inode)?;
                Update::Accessed { inode, at }
            }
            Self::Release(inode) => Update::Release { inode },
            _ => return None,
        })
    }

    fn rename(
        &self,
        tree: &ModelTree,
        user: &Credentials,
        is_open: &dyn Fn(InodeId) -> bool,
        made: InodeId,
        at: Timestamp,
        (from, to, exchange, whiteout): (NamePlace, NamePlace, bool, bool),
    ) -> Option<Update<'static>> {
        let (id, kind) = entry(tree, from)?;
        let target = entry(tree, to);
        let allows_in = |directory: InodeId, id: Option<InodeId>| {
            let Some(parent) = inode(tree, directory) else { return false };
            parent.is_directory()
                && parent.links > 0
                && allows(parent, None, user, Access::WRITE | Access::EXECUTE)
                && id.is_none_or(|id| inode(tree, id).is_some_and(|found| !is_stuck(parent, found, user)))
        };
        let exchange = exchange && target.is_some();
        if !allows_in(from.directory, Some(id)) || !allows_in(to.directory, target.map(|(id, _)| id)) {
            return None;
        }
        let may_move = |moved: InodeId, kind: FileKind, new: InodeId| {
            kind != FileKind::Directory
                || from.directory == to.directory
                || !would_make_cycle(tree, moved, new).unwrap_or(true)
                    && inode(tree, moved)
                        .is_some_and(|found| user.is_privileged() || allows(found, None, user, Access::WRITE))
        };
        let moves_back = target.is_none_or(|(other, kind)| !exchange || may_move(other, kind, from.directory));
        if !may_move(id, kind, to.directory) || !moves_back {
            return None;
        }
        let target = target.map(|(id, _)| id);
        let whiteout =
            (whiteout && !exchange).then_some(Whiteout { inode: made, uid: user.uid, gid: user.gid, acl_access: &[] });
        Some(Update::Rename(Rename {
            parent: from.directory,
            name: from.name,
            inode: id,
            new_parent: to.directory,
            new_name: to.name,
            target,
            exchange,
            whiteout,
            release: !target.is_some_and(is_open),
            at,
        }))
    }
}
