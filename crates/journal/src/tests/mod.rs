//! Tests of frames and of the ring; what belongs to one module alone is tested there.

mod basics;
mod bodies;
mod crashes;
mod model;

use std::sync::Arc;

use ashlar_pmem::{CrashMedium, CrashTwin, Persistent};
use ashlar_types::{Epoch, FileSystemId, JournalPosition, NodeNumber};

use crate::layout::RING_AT;
use crate::{FrameBody, FrameHeader, JournalCursor, JournalError, JournalIdentity, JournalRing, OwnAct, StoredFrame};

pub(super) const IDENTITY: JournalIdentity =
    JournalIdentity { file_system: FileSystemId(0xf5), node: NodeNumber::new(7).unwrap() };

pub(super) type Twin = Arc<CrashTwin>;

pub(super) fn twin(medium: CrashMedium, ring_bytes: u64) -> Twin {
    CrashTwin::new(medium, (RING_AT + ring_bytes) as usize).into()
}

pub(super) fn epoch(number: u32) -> Epoch {
    Epoch { number, node: NodeNumber::new(number as u16 % 3).unwrap() }
}

/// A ring in the heap, which begins in epoch 1.
pub(super) fn ring(ring_bytes: u64) -> JournalRing<Twin> {
    JournalRing::format(twin(CrashMedium::Words, ring_bytes), IDENTITY, epoch(1)).unwrap()
}

/// A frame whose body is these bytes and three more.
pub(super) fn plain(body: &[u8]) -> FrameBody<'_> {
    FrameBody::Own(OwnAct::Update { kind: 1, body })
}

/// A frame in memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedFrame {
    pub header: FrameHeader,
    pub body: Vec<u8>,
}

impl OwnedFrame {
    pub(super) fn stored(&self) -> StoredFrame<'_> {
        StoredFrame { header: self.header, body: &self.body }
    }

    /// The bytes that [`plain`] was made of; `None` if it was not made so.
    pub(super) fn content(&self) -> Option<Vec<u8>> {
        match self.stored().decode() {
            Ok(FrameBody::Own(OwnAct::Update { kind: 1, body })) => Some(body.to_vec()),
            _ => None,
        }
    }
}

/// All frames from a place on.
pub(super) fn frames_from<M: Persistent>(
    ring: &JournalRing<M>,
    mut cursor: JournalCursor,
) -> Result<Vec<OwnedFrame>, JournalError> {
    let (mut frames, mut buffer) = (Vec::new(), Vec::new());
    while let Some(frame) = ring.read_frame(cursor, &mut buffer)? {
        cursor = frame.next();
        frames.push(OwnedFrame { header: frame.header, body: frame.body.to_vec() });
    }
    assert_eq!(cursor, ring.end_cursor());
    Ok(frames)
}

pub(super) fn frames<M: Persistent>(ring: &JournalRing<M>) -> Vec<OwnedFrame> {
    frames_from(ring, ring.head_cursor()).unwrap()
}

/// The frames' contents.
pub(super) fn contents<M: Persistent>(ring: &JournalRing<M>) -> Vec<Vec<u8>> {
    frames(ring).iter().map(|frame| frame.content().unwrap()).collect()
}

/// The bytes between two positions.
pub(super) fn bytes_between<M: Persistent>(
    ring: &JournalRing<M>,
    from: JournalPosition,
    to: JournalPosition,
) -> Vec<u8> {
    let mut bytes = vec![0; (to.0 - from.0) as usize];
    ring.read_bytes(from, &mut bytes).unwrap();
    bytes
}

/// Numbers that only look random: splitmix64.
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
