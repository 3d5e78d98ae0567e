//! The writer's side of a copy of the whole file system.

use ashlar_cluster::chain::{CopyTarget, PeerMessage};
use ashlar_node::NodeCore;
use ashlar_store::{COPY_PART_BYTES_MAX, CopyEnd, CopyProgress, CopySource};

use crate::error::ReplicaError;
use crate::full_copy::CopyOrigin;

/// The last pass begins once no more rows were touched in the pass before: it then takes some milliseconds.
const LAST_ROWS: u64 = 512;
const LAST_CHUNKS: u64 = 16;
/// It begins after so many passes in any case: programs may touch as many rows as a pass takes time for.
const PASSES_MAX: u32 = 12;

/// The next message of a copy.
pub enum NextPart {
    /// A part.
    Part(Vec<u8>),
    /// The end.
    End(CopyTarget, Vec<u8>),
}

/// Something that is run with the node locked.
pub type NodeWork<'a> = &'a mut dyn FnMut(&mut NodeCore);

/// A copy of the whole file system that is being sent.
pub struct FullCopySender {
    source: CopySource,
    end: Option<(CopyEnd, CopyOrigin)>,
}

impl FullCopySender {
    /// Begins a copy.
    ///
    /// # Errors
    /// Those of the store.
    pub fn begin(core: &mut NodeCore) -> Result<Self, ReplicaError> {
        Ok(Self { source: core.store.begin_copy()?, end: None })
    }

    /// Returns how far it is.
    pub fn progress(&self) -> CopyProgress {
        self.source.progress()
    }

    /// Returns what is to be sent next. `with_node` runs something with the node locked; parts are read without that.
    ///
    /// # Errors
    /// Those of the store and of the journal: the copy must be begun anew.
    pub fn next(&mut self, with_node: &dyn Fn(NodeWork<'_>)) -> Result<NextPart, ReplicaError> {
        loop {
            if let Some(part) = self.source.next_part(COPY_PART_BYTES_MAX)? {
                return Ok(NextPart::Part(part));
            }
            if let Some((end, CopyOrigin { begin, lineage })) = &self.end {
                let (position, seed) = (begin.position, begin.seed);
                return Ok(NextPart::End(CopyTarget { position, seed, lineage: lineage.clone() }, end.encode()));
            }
            let backlog = self.source.backlog();
            let is_short = backlog.rows <= LAST_ROWS && backlog.chunks <= LAST_CHUNKS;
            if !is_short && self.source.progress().pass < PASSES_MAX {
                self.source.begin_pass()?;
                continue;
            }
            // With the node locked, the journal does not reuse the frame at which the copy ends.
            let mut begun = None;
            with_node(&mut |core| {
                let source = &mut self.source;
                begun = core.journal.as_ref().map(|journal| {
                    let end = source.begin_last_pass()?;
                    Ok::<_, ReplicaError>((end, CopyOrigin::find(journal, &end)?))
                });
            });
            self.end = begun.transpose()?;
        }
    }
}

impl NextPart {
    /// Returns the message, and whether it is the last one.
    pub fn message(&self) -> (PeerMessage<'_>, bool) {
        match self {
            Self::Part(bytes) => (PeerMessage::CopyPart { bytes }, false),
            Self::End(target, bytes) => (PeerMessage::CopyEnd { target: target.clone(), bytes }, true),
        }
    }
}
