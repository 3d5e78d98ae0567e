//! What others were told, read from the board without a question.
//!
//! What is taken over from there is known like what was granted, only that the lease that it stands under is the board's. Nothing is
//! taken over of what this session has changed and not yet forgotten: a state that it was told by SharedFS says up to which of its
//! updates are in it, and one that was told to another session does not.

use std::sync::Arc;

use ashlar_pmem::Mapping;
use ashlar_types::{LogPosition, SessionId};
use ashlar_wire::{ControlPage, LeaseWord, ScopeKind, Want};

use crate::LibFs;
use crate::node::{Lease, Told};

/// The board of the SharedFS that welcomed the session.
#[derive(Debug)]
pub(crate) struct Board {
    board: ashlar_wire::Board<Arc<Mapping>>,
    /// The era of segments in which that SharedFS lives; another one begins a new era before it grants anything.
    era: u64,
}

impl Board {
    pub(crate) fn new(memory: Mapping, era: u64) -> Option<Self> {
        Some(Self { board: ashlar_wire::Board::new(Arc::new(memory))?, era })
    }

    /// The word of a slot of the board's leases, now; one that allows nothing once another SharedFS has begun.
    pub(crate) fn word(&self, slot: u32, control: &ControlPage<Mapping>) -> LeaseWord {
        let word = self.board.word(slot);
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        if self.is_good(control) { word } else { LeaseWord::default() }
    }

    fn is_good(&self, control: &ControlPage<Mapping>) -> bool {
        control.segment_era() == self.era
    }
}

impl LibFs {
    /// Takes over what is wanted from the board, if all of it stands there. Whoever called looks again whether it is there.
    pub(crate) fn read_board(&self, want: &Want, revision: u64) -> bool {
        let Some(board) = &self.board else { return false };
        if want.write || want.scope == ScopeKind::Subtree || !board.is_good(&self.control) || !self.is_clean(want) {
            return false;
        }
        let (era, evictions) = (self.control.block_era(), self.nodes.evictions());
        let Some(post) = board.board.find(want.inode, want.need) else { return false };
        let is_others = |(session, _): &(SessionId, LogPosition)| *session != self.calls.session();
        let dependencies: Vec<_> = post.dependencies.into_iter().filter(is_others).collect();
        if !dependencies.is_empty() && self.depend(&dependencies).is_err() {
            return false;
        }
        let lease = Lease { is_posted: true, slot: post.slot, word: post.word };
        // The session has changed nothing since, nor before, that would have to be done to it again.
        let told = Told { applied: LogPosition(u64::MAX), era, evictions };
        let state = &mut self.nodes.write(want.inode);
        self.install_in(state, lease, &post.state, told, Some(revision)) && self.stands(lease, false)
    }

    /// Whether the session has changed nothing of an inode that SharedFS has not committed, as far as it knows.
    fn is_clean(&self, want: &Want) -> bool {
        self.nodes.existing(want.inode).is_none_or(|node| {
            let state = node.read();
            state.is_clean() && !state.gone
        })
    }
}
