//! Planted bugs that change the frames of a journal, in memory or on their way.

use std::sync::Arc;

use ashlar_journal::{FRAME_HEADER_BYTES, FrameHeader, JournalCursor, JournalRing};
use ashlar_node::journal::ReplayError;
use ashlar_pmem::{Crc32c, Persistent, SharedMemory};
use ashlar_types::JournalPosition;

use crate::replica_machine::JOURNAL;

/// The polynomial of CRC32C, the highest power in the lowest bit; the power 32 is left out.
const CRC32C: u32 = 0x82f6_3b78;
/// A damage that changes no checksum: the whole polynomial, in the order in which a checksum takes bits.
pub(crate) const UNSEEN_DAMAGE: u64 = 1 | (CRC32C as u64) << 1;

/// A journal in the memory of a simulated machine.
pub(crate) type MemoryRing = JournalRing<Arc<SharedMemory>>;

/// Opens the journal in a copy of this memory, which stays as it is.
pub(crate) fn open_copy(memory: &SharedMemory) -> Result<MemoryRing, ReplayError> {
    let twin = memory.twin().expect("the simulator's memory").copy();
    Ok(JournalRing::open(Arc::new(SharedMemory::Twin(twin)), JOURNAL)?)
}

/// Reads bytes of a journal's memory, which is laid out as `ring` is.
fn read_ring(ring: &MemoryRing, memory: &SharedMemory, at: JournalPosition, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    let [first, second] = ring.parts(at, at.plus(length));
    let (before, behind) = bytes.split_at_mut((first.end - first.start) as usize);
    memory.load(first.start, before).and_then(|()| memory.load(second.start, behind)).expect("the journal's memory");
    bytes
}

/// Stores bytes in a journal's memory, durably.
pub(crate) fn write_ring(ring: &MemoryRing, memory: &SharedMemory, at: JournalPosition, bytes: &[u8]) {
    let parts = ring.parts(at, at.plus(bytes.len() as u64));
    let (before, behind) = bytes.split_at((parts[0].end - parts[0].start) as usize);
    for (part, bytes) in parts.into_iter().zip([before, behind]) {
        memory.store(part.start, bytes).expect("the journal's memory");
        memory.flush(part.start, part.end - part.start).expect("the journal's memory");
    }
    memory.fence();
    memory.sync().expect("the simulator's memory");
}

/// Returns the checksum of a frame's parts, behind a frame with the checksum `seed`.
fn frame_sum(seed: u32, header: FrameHeader, rest: &[u8]) -> u32 {
    let mut sum = Crc32c::default();
    sum.update(&seed.to_le_bytes());
    sum.update(&FrameHeader { checksum: 0, ..header }.to_bytes());
    sum.update(rest);
    sum.finish()
}

/// Returns the register of a CRC32C before the zero bytes that led to this one.
fn rewind(register: u32, bytes: usize) -> u32 {
    let step = |register: u32, _| if register >> 31 == 1 { (register ^ CRC32C) << 1 | 1 } else { register << 1 };
    (0..8 * bytes).fold(register, step)
}

/// Makes torn frames at the end of a journal valid.
///
/// It is as if opening did not verify their checksums: the headers stay, with the checksums that seed those of the next
/// frames. The last four bytes of each body change.
pub(crate) fn validate_end(memory: &SharedMemory) {
    let Ok(ring) = open_copy(memory) else { return };
    let (mut cursor, lap) = (ring.end_cursor(), ring.head().plus(ring.capacity()));
    while cursor.position.plus(FRAME_HEADER_BYTES) <= lap {
        let bytes = read_ring(&ring, memory, cursor.position, FRAME_HEADER_BYTES);
        let header = FrameHeader::from_bytes(bytes.as_slice().try_into().expect("a header"));
        let (length, body) = (header.length as usize, cursor.position.plus(FRAME_HEADER_BYTES));
        let end = cursor.position.plus(header.frame_bytes());
        let epoch = ring.lineage().epoch_at(cursor.position).map(|epoch| epoch.number);
        let is_next = header.position == cursor.position && Some(header.epoch) == epoch;
        if !is_next || length < 4 || header.frame_bytes() > ring.frame_bytes_max() || end > lap {
            return;
        }
        let mut rest = read_ring(&ring, memory, body, end.0 - body.0);
        rest[length..].fill(0);
        let (before, last) = rest.split_at(length - 4);
        let fit = rewind(!header.checksum, last.len()) ^ !frame_sum(cursor.seed, header, before);
        rest[length - 4..length].copy_from_slice(&fit.to_le_bytes());
        write_ring(&ring, memory, body, &rest);
        cursor = JournalCursor { position: end, seed: header.checksum };
    }
}

/// Puts frames that were cut from a copy back behind its end, if one begins there.
///
/// They get the epochs and the checksums that fit.
pub(crate) fn revive_frames(memory: &SharedMemory, uncut: &MemoryRing) {
    let Ok(ring) = open_copy(memory) else { return };
    let (mut end, mut buffer) = (ring.end_cursor(), Vec::new());
    let Ok(mut cursor) = uncut.cursor_at(end.position) else { return };
    let cleared = read_ring(&ring, memory, end.position, uncut.end().0 - end.position.0);
    if cleared.iter().any(|byte| *byte != 0) {
        // Newer frames are torn there, and stand in the place of those that were cut.
        return;
    }
    while let Ok(Some(frame)) = uncut.read_frame(cursor, &mut buffer) {
        let epoch = ring.lineage().epoch_at(end.position).map_or(frame.header.epoch, |epoch| epoch.number);
        let mut header = FrameHeader { epoch, ..frame.header };
        cursor = frame.next();
        let body = end.position.plus(FRAME_HEADER_BYTES);
        let rest = read_ring(uncut, uncut.memory(), body, cursor.position.0 - body.0);
        header.checksum = frame_sum(end.seed, header, &rest);
        write_ring(&ring, memory, end.position, &[&header.to_bytes(), rest.as_slice()].concat());
        end = JournalCursor { position: cursor.position, seed: header.checksum };
    }
}
