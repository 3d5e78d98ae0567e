//! Coalescing: leaves out the records of a batch that a later record of the batch undoes or overwrites.
//!
//! Purpose: a log holds many updates that leave nothing behind: temporary files, pages written over and over,
//! attributes set twice. A node that applies or ships a batch as a whole can save them (Assise §3.3, after Strata). The
//! result is one action for each record of the batch. Applying the actions ends in the same state as applying all the
//! records, with the same times, block counts and orphans.
//!
//! Invariants:
//! - The result stands for the batch as a whole only: the states in between are no prefixes. So a batch is committed,
//!   and shown to others, at its end or not at all.
//! - The batch is valid: each record was validated against the state that the records before it leave. A batch that
//!   holds a forged record is cut there first. (The result of an invalid batch is unspecified, but nothing panics.)
//! - Before the batch ends, no other session knows an inode that the batch makes. So none has it open:
//!   [`crate::Tree::may_free`] would return true. The session holds the lease under which it made the inode during the
//!   whole batch.
//! - No record is left out because of a record on the other side of an [`Update::Depend`].
//! - Trees keep [`crate::Tree`]'s rules on blocks and sizes: records are left out because of them.
//! - Nothing is assumed of the state before the batch; every rule holds for all of them.
//!
//! Non-goals: joining small writes into a larger one, which copies their data ([`crate::join`]).
//!
//! Method: a first pass, forwards, finds the inodes that are both made and freed in the batch (`vanish`). A second,
//! backwards, keeps for each inode which parts of its state are overwritten later before anything reads them (`later`),
//! as a compiler removes dead stores: a record all of whose effects are dead is dropped. Both take O(n log n) time, and
//! memory in proportion to the number of records; the caller bounds that by the batch's length.

use std::collections::HashMap;

use ashlar_types::{FileKind, InodeId, Timestamp};

use crate::{Rename, SetAttributes, Update};

mod later;
mod ranges;
#[cfg(test)]
mod tests;
mod vanish;

use later::Later;
use vanish::Vanishing;

/// The action for one record of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<'a> {
    /// It is applied.
    Keep,
    /// It is not applied.
    Drop,
    /// This is applied in its place.
    Replace(Update<'a>),
}

/// The extent of coalescing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoalesceScope {
    /// Only records that change a file's content are dropped or replaced: [`Update::Write`], [`Update::Resize`] and
    /// [`Update::Allocate`]. All others stay, so each record may still be validated by owner, mode, names and kinds
    /// just before its action is applied.
    Content,
    /// All kinds of records. They must have been validated before.
    All,
}

/// The result of coalescing a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coalesced<'a> {
    /// An action for each record of the batch, in order.
    pub actions: Vec<Action<'a>>,
    /// Records that are dropped.
    pub dropped: u64,
    /// Bytes of record bodies that need not be applied or shipped.
    pub saved_bytes: u64,
}

impl<'a> Coalesced<'a> {
    /// Returns, for each record, the update that is left to apply, if any.
    pub fn left<'b>(&'b self, batch: &'b [Update<'a>]) -> impl Iterator<Item = Option<&'b Update<'a>>> {
        self.actions.iter().zip(batch).map(|(action, update)| match action {
            Action::Keep => Some(update),
            Action::Drop => None,
            Action::Replace(other) => Some(other),
        })
    }
}

/// Faults that tests plant to see that their comparison bites.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The size is always taken for dead.
    IgnoreSize,
    /// Blocks are always taken for dead.
    IgnoreBlocks,
    /// Times that a change of content sets are taken for dead.
    IgnoreTimes,
    /// Stripped set-id bits are forgotten.
    IgnoreStrip,
    /// A record that moves content does not protect the records behind it.
    IgnoreMoves,
    /// A vanishing inode takes its directories' times along.
    IgnoreParents,
    /// An inode vanishes although one that is in it stays.
    IgnoreDependents,
    /// Attributes are joined across records that read them.
    IgnoreReaders,
    /// An inode vanishes although it is still open or has names.
    IgnoreFreed,
    /// An inode vanishes although its move leaves a whiteout.
    IgnoreWhiteouts,
}

#[cfg(test)]
impl Bug {
    const ALL: [Self; 10] = [
        Self::IgnoreSize,
        Self::IgnoreBlocks,
        Self::IgnoreTimes,
        Self::IgnoreStrip,
        Self::IgnoreMoves,
        Self::IgnoreParents,
        Self::IgnoreDependents,
        Self::IgnoreReaders,
        Self::IgnoreFreed,
        Self::IgnoreWhiteouts,
    ];
}

#[cfg(test)]
thread_local! {
    static BUG: std::cell::Cell<Bug> = const { std::cell::Cell::new(Bug::None) };
}

/// Whether a test has planted this fault.
macro_rules! planted {
    ($bug:ident) => {{
        #[cfg(test)]
        let planted = crate::coalesce::BUG.get() == crate::coalesce::Bug::$bug;
        #[cfg(not(test))]
        let planted = false;
        planted
    }};
}
use planted;

/// Returns an action for each record of a batch. The module's header states the conditions on the batch.
#[must_use]
pub fn coalesce<'a>(batch: &[Update<'a>], scope: CoalesceScope) -> Coalesced<'a> {
    let mut actions = vec![Action::Keep; batch.len()];
    let mut start = 0;
    for part in batch.split_inclusive(|update| matches!(update, Update::Depend { .. })) {
        let end = start + part.len();
        Pass::new(part, scope).run(part, &mut actions[start..end]);
        start = end;
    }
    let mut coalesced = Coalesced { actions, ..Coalesced::default() };
    for (action, update) in coalesced.actions.iter().zip(batch) {
        let left = match action {
            Action::Keep => continue,
            Action::Drop => {
                coalesced.dropped += 1;
                0
            }
            Action::Replace(other) => other.body_bytes(),
        };
        coalesced.saved_bytes += update.body_bytes().saturating_sub(left);
    }
    coalesced
}

/// The pass backwards over the records between two dependencies.
struct Pass<'a> {
    scope: CoalesceScope,
    vanishing: Vanishing,
    later: HashMap<InodeId, Later<'a>>,
}

impl<'a> Pass<'a> {
    fn new(part: &[Update<'a>], scope: CoalesceScope) -> Self {
        let vanishing = if scope == CoalesceScope::All { Vanishing::of(part) } else { Vanishing::default() };
        Self { scope, vanishing, later: HashMap::new() }
    }

    fn run(&mut self, part: &[Update<'a>], actions: &mut [Action<'a>]) {
        for (index, update) in part.iter().enumerate().rev() {
            actions[index] = match update {
                Update::Write { inode, .. } | Update::Resize { inode, .. } | Update::Allocate { inode, .. } => {
                    if self.vanishing.holds(*inode) { Action::Drop } else { self.later(*inode).content_action(update) }
                }
                Update::SetAttributes(set) => self.set_attributes(index, set, actions),
                Update::SetXattr { inode, name, mode, .. } | Update::RemoveXattr { inode, name, mode, .. } => {
                    self.on_inode(*inode, |later| later.xattr_is_dead(name, mode.is_some()))
                }
                Update::Accessed { inode, at } => self.on_inode(*inode, |later| later.access_is_dead(*at)),
                Update::Release { inode } => self.on_inode(*inode, |_| false),
                // A new entry of a directory reads it.
                Update::SetQuota { inode, .. } => self.on_inode(*inode, |later| {
                    later.changed = true;
                    false
                }),
                Update::Depend { .. } => Action::Keep,
                Update::Create(create) => {
                    let parent = (!create.name.is_empty()).then_some(create.parent);
                    // Records on the number before it is made concern no inode.
                    self.later.remove(&create.inode);
                    self.on_entry(create.inode, parent.as_slice(), create.at)
                }
                Update::Link { inode, parent, at, .. }
                | Update::Unlink { inode, parent, at, .. }
                | Update::RemoveDirectory { inode, parent, at, .. } => self.on_entry(*inode, &[*parent], *at),
                Update::Rename(rename) => self.rename(rename),
            };
        }
    }

    fn later(&mut self, inode: InodeId) -> &mut Later<'a> {
        self.later.entry(inode).or_default()
    }

    /// Returns the action for a record that changes only `inode`; `is_dead` also records the parts that it overwrites.
    fn on_inode(&mut self, inode: InodeId, is_dead: impl FnOnce(&mut Later<'a>) -> bool) -> Action<'a> {
        if self.vanishing.holds(inode) {
            return Action::Drop;
        }
        let may_drop = self.scope == CoalesceScope::All;
        if is_dead(self.later(inode)) && may_drop { Action::Drop } else { Action::Keep }
    }

    fn set_attributes(&mut self, index: usize, set: &SetAttributes, actions: &mut [Action<'a>]) -> Action<'a> {
        if self.vanishing.holds(set.inode) {
            return Action::Drop;
        }
        if self.scope == CoalesceScope::Content {
            self.later(set.inode).record_attributes(index, set);
            return Action::Keep;
        }
        match self.later(set.inode).fold_attributes(index, set) {
            later::Folded::Kept => Action::Keep,
            later::Folded::Dead => Action::Drop,
            later::Folded::Into(at, joined) => {
                actions[at] = Action::Replace(Update::SetAttributes(joined));
                Action::Drop
            }
        }
    }

    /// The action for a record that makes or removes `inode`'s entry in `parents`.
    fn on_entry(&mut self, inode: InodeId, parents: &[InodeId], at: Timestamp) -> Action<'a> {
        if self.vanishing.holds(inode) {
            return self.touch_only(parents, at);
        }
        self.later(inode).changed = true;
        self.touch(parents);
        Action::Keep
    }

    fn touch(&mut self, parents: &[InodeId]) {
        for parent in parents {
            let later = self.later(*parent);
            later.modified = true;
            later.changed = true;
        }
    }

    /// The remainder of a record on a vanishing inode: the times of the directories that stay.
    ///
    /// At most one of them is still to be set: an entry that comes into a directory leaves it again later in the batch,
    /// which sets them.
    fn touch_only(&mut self, parents: &[InodeId], at: Timestamp) -> Action<'a> {
        for parent in parents {
            if self.vanishing.holds(*parent) {
                continue;
            }
            let later = self.later(*parent);
            if !(later.modified && later.changed || planted!(IgnoreParents)) {
                later.modified = true;
                later.changed = true;
                return Action::Replace(Update::SetAttributes(SetAttributes {
                    inode: *parent,
                    mode: None,
                    uid: None,
                    gid: None,
                    accessed: None,
                    modified: Some(at),
                    at,
                }));
            }
        }
        Action::Drop
    }

    fn rename(&mut self, rename: &Rename<'a>) -> Action<'a> {
        let Rename { parent, inode, new_parent, new_name, target, release, at, .. } = *rename;
        let target_vanishes = target.is_some_and(|target| self.vanishing.holds(target));
        if let Some(whiteout) = rename.whiteout {
            // As for all that is made: what is said of the number before concerns no inode.
            self.later.remove(&whiteout.inode);
        }
        if self.vanishing.holds(inode) {
            let Some(target) = target.filter(|_| !target_vanishes) else {
                return self.touch_only(&[parent, new_parent], at);
            };
            // The target is removed as before; the inode that replaced it has vanished. Both were in one directory.
            self.later(target).changed = true;
            self.touch(&[new_parent]);
            let (inode, parent, name) = (target, new_parent, new_name);
            return Action::Replace(if self.vanishing.kind(rename.inode) == Some(FileKind::Directory) {
                Update::RemoveDirectory { inode, parent, name, release, at }
            } else {
                Update::Unlink { inode, parent, name, release, at }
            });
        }
        self.later(inode).changed = true;
        self.touch(&[parent, new_parent]);
        match target {
            Some(_) if target_vanishes => {
                Action::Replace(Update::Rename(Rename { target: None, release: false, ..*rename }))
            }
            Some(target) => {
                self.later(target).changed = true;
                Action::Keep
            }
            None => Action::Keep,
        }
    }
}
