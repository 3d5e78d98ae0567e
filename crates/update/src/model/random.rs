//! Updates at random that fit the model.

use ashlar_types::{FileKind, Inode, InodeId, QuotaId, Timestamp};

use super::ModelTree;
use crate::{Allocation, Create, Rename, SetAttributes, Update, Whiteout, permission};

/// Numbers from which a random update is made.
pub type UpdateChoice = (u8, u16, u16, u16, u16);

/// Bytes to write, none of them zero.
static PATTERN: [u8; 40_000] = {
    let (mut bytes, mut index) = ([0; 40_000], 0);
    while index < bytes.len() {
        bytes[index] = (index * 7 % 255) as u8 + 1;
        index += 1;
    }
    bytes
};
const NAMES: [&[u8]; 3] = [b"a", b"b", b"c"];
const MODES: [u32; 4] = [0o644, 0o6755, 0o2640, 0o4700];
const LENGTHS: [u64; 8] = [1, 100, 1024, 4096, 5000, 8192, 3 * 4096, 0];

fn pick<T: Copy>(from: &[T], choice: u16) -> Option<T> {
    if from.is_empty() { None } else { Some(from[usize::from(choice) % from.len()]) }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp { seconds, nanoseconds: 0 }
}

impl ModelTree {
    /// Inodes of some kinds, the newest ones first.
    fn chosen(&self, choice: u16, wanted: impl Fn(&Inode) -> bool) -> Option<InodeId> {
        let all: Vec<InodeId> =
            self.inodes.iter().rev().filter(|(_, inode)| wanted(inode)).map(|(id, _)| *id).collect();
        pick(&all, choice)
    }

    fn is_below(&self, inode: InodeId, other: InodeId) -> bool {
        crate::would_make_cycle(self, other, inode).expect("the model has no errors")
    }

    fn random_rename(&self, b: u16, c: u16, d: u16, time: Timestamp, next: InodeId) -> Option<Update<'static>> {
        let sources: Vec<_> = self.entries.iter().collect();
        let ((parent, source), entry) = pick(&sources, b)?;
        let name = NAMES.into_iter().find(|name| name == source)?;
        let new_parent = self.chosen(c >> 2, |inode| inode.is_directory() && inode.links > 0)?;
        let new_name = pick(&NAMES, d)?;
        let target = self.entries.get(&(new_parent, new_name.to_vec())).map(|entry| entry.inode);
        let exchange = target.is_some() && c % 8 == 0;
        let cycle = self.is_below(new_parent, entry.inode)
            || exchange && target.is_some_and(|target| self.is_below(*parent, target));
        let (parent, inode, release) = (*parent, entry.inode, d % 5 != 0);
        let acl_access: &[u8] = if d % 2 == 0 { b"list" } else { b"" };
        let whiteout = Whiteout { inode: next, uid: u32::from(d), gid: 7, acl_access };
        let whiteout = Some(whiteout).filter(|_| !exchange && d % 3 == 0);
        let rename =
            Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at: time };
        (!cycle).then_some(Update::Rename(rename))
    }

    fn random_content(&self, what: u16, c: u16, d: u16, time: Timestamp) -> Option<Update<'static>> {
        let inode = self.chosen(c, |inode| inode.kind == FileKind::Regular)?;
        let offset = u64::from(d % 20) * 1024 + u64::from(d / 20 % 3) * 10;
        let length = pick(&LENGTHS, d / 64)?;
        let strip = d % 7 == 0;
        Some(match what {
            0..=3 => {
                let from = usize::from(c % 251) * 10;
                let data = &PATTERN[from..from + length as usize];
                Update::Write { inode, offset, at: time, strip, data }
            }
            4 | 5 => {
                let size = if d % 3 == 0 { 0 } else { offset };
                Update::Resize { inode, size, strip, at: time }
            }
            what => {
                let how = Allocation::ALL[usize::from(what - 6) % 7];
                let moves = matches!(how, Allocation::Collapse | Allocation::Insert);
                let (offset, length) = if moves { (offset / 4096 * 4096, 4096) } else { (offset, length) };
                if self.inodes[&inode].size > 100_000 {
                    return None;
                }
                Update::Allocate { inode, how, offset, length, strip, at: time }
            }
        })
    }

    fn random_attributes(&self, what: u16, b: u16, c: u16, d: u16, time: Timestamp) -> Option<Update<'static>> {
        let inode = self.chosen(c, |_| true)?;
        let mode = pick(&MODES, d / 7);
        let name: &'static [u8] = if d % 2 == 0 { b"user.x" } else { b"user.y" };
        Some(match what {
            0..=2 => Update::SetAttributes(SetAttributes {
                inode,
                mode: mode.filter(|_| b & 1 != 0),
                uid: Some(u32::from(d)).filter(|_| b & 2 != 0),
                gid: Some(u32::from(d)).filter(|_| b & 4 != 0),
                accessed: Some(at(i64::from(d % 50))).filter(|_| b & 8 != 0),
                modified: Some(at(i64::from(d % 60))).filter(|_| b & 16 != 0),
                at: time,
            }),
            3 => {
                let value = &PATTERN[usize::from(d / 4)..usize::from(d / 4) + 4];
                Update::SetXattr { inode, name, value, mode: mode.filter(|_| b % 3 == 0), at: time }
            }
            4 => Update::RemoveXattr { inode, name, mode: mode.filter(|_| b % 3 == 0), at: time },
            5 => Update::SetQuota {
                inode,
                quota: [QuotaId::NONE, QuotaId::of(inode), QuotaId(16)][usize::from(d) % 3],
                at: time,
            },
            _ => Update::Accessed { inode, at: time },
        })
    }

    /// Returns an update that fits the tree, or nearly: the caller tries it.
    ///
    /// `next` is the number for a new inode. No file gets longer than some 100 KiB.
    #[must_use]
    pub fn random_update(&self, choice: UpdateChoice, next: InodeId) -> Option<Update<'static>> {
        let (kind, a, b, c, d) = choice;
        let time = at(i64::from(a % 97));
        let parent = self.chosen(c >> 3, |inode| inode.is_directory() && inode.links > 0)?;
        let name = pick(&NAMES, b)?;
        let entries: Vec<_> = self.entries.iter().collect();
        match kind % 32 {
            0..=5 => {
                let kind =
                    [FileKind::Regular, FileKind::Regular, FileKind::Directory, FileKind::Symlink][usize::from(c % 4)];
                let target: &[u8] = if kind == FileKind::Symlink { b"there" } else { b"" };
                let name = if kind == FileKind::Regular && d % 6 == 0 { b"" } else { name };
                let acl_access: &[u8] = if d % 9 == 0 { b"list" } else { b"" };
                let (mode, uid, gid) = (pick(&MODES, d)?, u32::from(d), 7);
                let inode = next;
                Some(Update::Create(Create {
                    inode,
                    parent,
                    name,
                    kind,
                    mode,
                    uid,
                    gid,
                    device: 0,
                    at: time,
                    target,
                    acl_access,
                    acl_default: b"",
                }))
            }
            6 => {
                let inode = self.chosen(d, |inode| !inode.is_directory() && permission::is_linkable(inode))?;
                Some(Update::Link { inode, parent, name, at: time })
            }
            7..=12 => {
                let ((parent, source), entry) = pick(&entries, d)?;
                let name = NAMES.into_iter().find(|name| name == source)?;
                let (inode, parent, release) = (entry.inode, *parent, c % 5 != 0);
                Some(if entry.kind == FileKind::Directory {
                    Update::RemoveDirectory { inode, parent, name, release, at: time }
                } else {
                    Update::Unlink { inode, parent, name, release, at: time }
                })
            }
            13..=16 => self.random_rename(b, c, d, time, next),
            17..=24 => self.random_content(b % 13, c, d, time),
            25..=29 => self.random_attributes(b % 7, b >> 3, c, d, time),
            _ => Some(Update::Release { inode: self.chosen(c, |inode| inode.links == 0)? }),
        }
    }

    /// Applies random updates, each of which fits; returns those that did.
    ///
    /// `next` is the number for the next new inode.
    pub fn grow(&mut self, choices: &[UpdateChoice], next: &mut u64) -> Vec<Update<'static>> {
        let mut done = Vec::new();
        for choice in choices {
            let Some(update) = self.random_update(*choice, InodeId(*next)) else { continue };
            if self.apply(&update).is_ok() {
                *next += 1;
                done.push(update);
            }
        }
        done
    }
}
