//! Arbitrary bytes in the place of frames and of a journal's memory.
//!
//! The property tests and the fuzz target run these.

use std::sync::Arc;

use ashlar_journal::{
    CopyError, FRAME_HEADER_BYTES, FrameBody, FrameHeader, JournalIdentity, JournalRing, OwnAct, StoredFrame,
};
use ashlar_pmem::{CrashMedium, CrashTwin};
use ashlar_types::{Epoch, FileSystemId, JournalPosition, NodeNumber};

const IDENTITY: JournalIdentity =
    JournalIdentity { file_system: FileSystemId(0xf5), node: NodeNumber::new(7).unwrap() };
const RING_BYTES: u64 = 1024;

fn require(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// Decodes kind, flags and session hint, and a body behind them.
///
/// Returns whether they are a frame; then it is encoded to the same bytes.
pub fn decode(data: &[u8]) -> Result<bool, String> {
    let Some((&[kind, flags, low, high], body)) = data.split_first_chunk() else { return Ok(false) };
    let header = FrameHeader {
        kind,
        flags: flags >> 7,
        session: u16::from_le_bytes([low, high]),
        length: body.len() as u32,
        position: JournalPosition(0),
        checksum: 0,
        epoch: 1,
    };
    // The header's hint is rarely that of the body. One that the body seems to ask for makes more bytes frames.
    let byte = |index: usize| u16::from(body.get(index).copied().unwrap_or(0));
    let hints = [header.session, 0, byte(0), byte(1)];
    let candidates = hints.map(|session| StoredFrame { header: FrameHeader { session, ..header }, body });
    let Some((header, decoded)) = candidates.into_iter().find_map(|frame| Some((frame.header, frame.decode().ok()?)))
    else {
        return Ok(false);
    };
    require(decoded.kind() as u8 == kind, "the kind is another one")?;
    require(decoded.session().is_none_or(|session| header.may_be_of(session)), "the header names another session")?;
    let encoded = decoded.encode().map_err(|error| format!("{decoded:?} is decoded, but not encoded: {error}"))?;
    require(encoded.parts().concat() == body, "the body is encoded to other bytes")?;
    require(encoded.frame_bytes() == header.frame_bytes(), "the frame's length is another one")?;
    Ok(true)
}

/// The frames of a ring: positions and bodies.
fn frames(ring: &JournalRing<Arc<CrashTwin>>) -> Result<Vec<(JournalPosition, Vec<u8>)>, String> {
    let (mut found, mut buffer, mut cursor) = (Vec::new(), Vec::new(), ring.head_cursor());
    while let Some(frame) = ring.read_frame(cursor, &mut buffer).map_err(|error| error.to_string())? {
        found.push((frame.header.position, frame.body.to_vec()));
        cursor = frame.next();
    }
    Ok(found)
}

/// A journal that has gone around its ring, and the frames that it holds.
fn journal() -> JournalRing<Arc<CrashTwin>> {
    let bytes = JournalRing::<CrashTwin>::bytes_for(RING_BYTES) as usize;
    let memory = Arc::new(CrashTwin::new(CrashMedium::Words, bytes));
    let epoch = |number| Epoch { number, node: NodeNumber::new(1).unwrap() };
    let mut ring = JournalRing::format(memory, IDENTITY, epoch(1)).expect("enough memory");
    for index in 0..20u8 {
        let body = vec![index; 30 + usize::from(index)];
        ring.append(&FrameBody::Own(OwnAct::Update { kind: 1, body: &body })).expect("room");
        if index % 5 == 4 {
            ring.flush().expect("memory");
            ring.truncate(JournalPosition(ring.end().0 - 150)).expect("flushed");
            ring.begin_epoch(epoch(u32::from(index))).expect("a higher number");
        }
    }
    ring.append(&FrameBody::Own(OwnAct::Update { kind: 1, body: &[99; 50] })).expect("room");
    ring
}

/// Changes bytes of a journal's memory, opens it, and sends the rest to a copy.
///
/// Returns whether the damaged journal opened; then it holds only frames that were written.
pub fn damage(data: &[u8]) -> Result<bool, String> {
    let written = journal();
    let genuine = frames(&written)?;
    let mut image = written.memory().state().current();
    let mut stream = vec![0; written.used() as usize];
    written.read_bytes(written.head(), &mut stream).map_err(|error| error.to_string())?;
    for change in data.chunks_exact(3) {
        // Most of the pages before the ring is empty: half of the changes are to what is in use.
        let at = usize::from(u16::from_le_bytes([change[0], change[1]]));
        let place =
            if at % 2 == 0 { image.len() - RING_BYTES as usize + at / 2 % 1024 } else { at / 2 % 3 * 4096 + at % 96 };
        image[place] ^= change[2];
        let place = at % stream.len();
        stream[place] ^= change[2];
    }
    // A copy takes no frame that was not written.
    let bytes = JournalRing::<CrashTwin>::bytes_for(RING_BYTES) as usize;
    let memory = Arc::new(CrashTwin::new(CrashMedium::Words, bytes));
    let mut copy = JournalRing::format_copy(memory, IDENTITY, written.head_cursor(), written.lineage().clone())
        .map_err(|error| error.to_string())?;
    match copy.append_copied(&stream) {
        Ok(_) => require(copy.end() == written.end(), "the copy ends elsewhere")?,
        Err(CopyError::NotNext { position, .. }) => require(position == copy.end(), "another frame is refused")?,
        Err(error) => return Err(error.to_string()),
    }
    require(genuine.starts_with(&frames(&copy)?), "the copy took a frame that was not written")?;
    let Ok(opened) = JournalRing::open(Arc::new(CrashTwin::from_image(CrashMedium::Words, &image)), IDENTITY) else {
        return Ok(false);
    };
    // If the newer state page is damaged, the older one says where the journal begins: space that was reused.
    let found = frames(&opened)?;
    require(opened.head() != written.head() || genuine.starts_with(&found), "a frame was read that was not written")?;
    require(opened.end().0 % 8 == 0 && opened.used() >= found.len() as u64 * FRAME_HEADER_BYTES, "the end is odd")?;
    Ok(true)
}
