//! All updates that sessions have logged, in the order of their appends, and the tree that they make.
//!
//! Leases put updates that conflict into one order. So the tree of any prefixes of the logs that are closed under their
//! dependencies is the tree of these updates in the order of their appends.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_types::{InodeId, LogPosition, SessionId};
use ashlar_update::model::ModelTree;
use ashlar_update::{Invalid, Update};

/// An update that a session has appended to its log.
#[derive(Clone, Debug)]
pub struct LoggedUpdate {
    /// The session.
    pub session: SessionId,
    /// Where its record ends in the log.
    pub end: LogPosition,
    /// The kind of the record.
    pub kind: u8,
    /// The body of the record.
    pub body: Vec<u8>,
    /// Whether no loss of power may take it.
    pub is_durable: bool,
}

impl LoggedUpdate {
    /// Returns the update.
    ///
    /// # Panics
    /// If the record is not one, which the encoder prevents.
    #[must_use]
    pub fn update(&self) -> Update<'_> {
        Update::decode(self.kind, &self.body).expect("an encoded update")
    }

    /// Returns whether it makes an inode count against another subtree.
    #[must_use]
    pub fn counts_subtree(&self) -> bool {
        matches!(self.update(), Update::SetQuota { .. })
    }

    /// Returns whether it changes the inode itself.
    #[must_use]
    pub fn changes(&self, inode: InodeId) -> bool {
        let changed = match self.update() {
            Update::Write { inode, .. }
            | Update::Resize { inode, .. }
            | Update::Allocate { inode, .. }
            | Update::SetXattr { inode, .. }
            | Update::RemoveXattr { inode, .. }
            | Update::SetQuota { inode, .. }
            | Update::Link { inode, .. } => inode,
            Update::Create(create) => create.inode,
            Update::SetAttributes(set) => set.inode,
            _ => return false,
        };
        changed == inode
    }
}

/// A tree that never frees an inode: whether a removed file is still open changes nothing that has a name.
#[derive(Clone, Debug)]
pub struct NamedTree {
    /// The tree.
    pub model: ModelTree,
    made: BTreeSet<InodeId>,
}

impl NamedTree {
    /// Makes the tree of an empty file system.
    #[must_use]
    pub fn new() -> Self {
        Self { model: ModelTree::new(), made: BTreeSet::new() }
    }

    /// Applies an update.
    ///
    /// # Errors
    /// [`Invalid`], and then nothing has changed.
    pub fn apply(&mut self, update: &Update<'_>) -> Result<(), Invalid> {
        let made = match update {
            Update::Create(create) => Some(create.inode),
            Update::Rename(rename) => rename.whiteout.map(|whiteout| whiteout.inode),
            _ => None,
        };
        if made.is_some_and(|inode| self.made.insert(inode)) {
            self.model.set_open(self.made.iter().copied());
        }
        self.model.apply(update).map(drop)
    }
}

impl Default for NamedTree {
    fn default() -> Self {
        Self::new()
    }
}

/// The history of all sessions.
#[derive(Debug, Default)]
pub struct UpdateHistory {
    /// The updates, in the order of their appends.
    pub updates: Vec<LoggedUpdate>,
    /// The tree that all of them make.
    pub tree: NamedTree,
}

impl UpdateHistory {
    /// Adds an update that was appended just now.
    ///
    /// # Errors
    /// [`Invalid`] if it does not fit the updates before it: another session had the right to change the same.
    pub fn push(&mut self, logged: LoggedUpdate) -> Result<(), Invalid> {
        let applied = self.tree.apply(&logged.update());
        self.updates.push(logged);
        applied
    }

    /// Returns the tree of the updates that are applied up to these positions.
    ///
    /// # Errors
    /// A description of the first update that does not fit those before it.
    pub fn tree_of(&self, applied: &BTreeMap<SessionId, LogPosition>) -> Result<NamedTree, String> {
        let mut tree = NamedTree::new();
        for (index, logged) in self.updates.iter().enumerate() {
            if !is_applied(logged, applied) {
                continue;
            }
            let update = logged.update();
            tree.apply(&update).map_err(|invalid| {
                format!(
                    "update {index} of session {} does not fit those before it ({invalid}): {update:?}",
                    logged.session
                )
            })?;
        }
        Ok(tree)
    }

    /// Drops the updates that a loss of power has taken.
    ///
    /// # Errors
    /// As for [`Self::tree_of`].
    pub fn keep_applied(&mut self, applied: &BTreeMap<SessionId, LogPosition>) -> Result<(), String> {
        self.tree = self.tree_of(applied)?;
        self.updates.retain(|logged| is_applied(logged, applied));
        self.updates.iter_mut().for_each(|logged| logged.is_durable = true);
        Ok(())
    }
}

/// Returns whether an update is before its session's position; a session without one has ended, committed as a whole.
fn is_applied(logged: &LoggedUpdate, applied: &BTreeMap<SessionId, LogPosition>) -> bool {
    applied.get(&logged.session).is_none_or(|position| logged.end <= *position)
}
