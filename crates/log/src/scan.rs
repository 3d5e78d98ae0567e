//! Reading records that another process may be writing.

use std::ops::Range;

use ashlar_pmem::{Crc32c, Persistent};
use ashlar_types::{LogGeneration, LogPosition};

use crate::layout::RING_AT;
use crate::record::{HEADER_BYTES, Mark, PREFIX_BYTES, PREFIX_CRC_AT, PREFIX_OWN_AT, SlotVerdict, UNIT_BYTES, place};
use crate::{Bug, Corrupt, Fault, Log};

/// A record, copied out of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The record's position.
    pub position: LogPosition,
    /// The position of what comes next.
    pub end: LogPosition,
    /// The position of the body's first byte, for [`Log::read`].
    pub body_position: LogPosition,
    /// The kind that it was appended with.
    pub kind: u8,
    /// The body.
    pub body: Vec<u8>,
}

/// A record in a [`Scanner`]'s buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordRef<'a> {
    /// The record's position.
    pub position: LogPosition,
    /// The position of what comes next.
    pub end: LogPosition,
    /// The position of the body's first byte, for [`Log::read`].
    pub body_position: LogPosition,
    /// The kind that it was appended with.
    pub kind: u8,
    /// The body.
    pub body: &'a [u8],
}

impl RecordRef<'_> {
    fn to_record(self) -> Record {
        let Self { position, end, body_position, kind, body } = self;
        Record { position, end, body_position, kind, body: body.to_vec() }
    }
}

/// Where a record stands, in the log and in a caller's buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordAt {
    /// The record's position.
    pub position: LogPosition,
    /// The position of what comes next.
    pub end: LogPosition,
    /// The position of the body's first byte, for [`Log::read`].
    pub body_position: LogPosition,
    /// The kind that it was appended with.
    pub kind: u8,
    /// The body's place in the buffer.
    pub body: Range<usize>,
}

/// Walks over the records of a settled range, skipping voids. A record is copied first and verified after, so what a
/// caller gets stays what was verified, whatever the session does to its log.
#[derive(Debug)]
pub struct Scanner<'a, M> {
    log: &'a Log<M>,
    position: LogPosition,
    to: LogPosition,
    // Records follow one another in generations that never go back.
    generation: LogGeneration,
    // For callers that bring no buffer.
    buffer: Vec<u8>,
    failed: bool,
}

/// A record's header, between its begin and end, before its body is read.
struct Found {
    mark: Mark,
    record: LogPosition,
    end: LogPosition,
}

/// The bytes before a record's body that its checksum covers.
struct Prefix {
    bytes: [u8; PREFIX_BYTES],
    kind: u8,
    body_bytes: u64,
    crc: u32,
}

/// A record that is verified where it stands is looked at in pieces of this length.
const CHUNK_BYTES: usize = 1024;

impl<M: Persistent> Log<M> {
    /// Verifies the record at a position of a settled range, without copying it. For its writer, which may have had
    /// other threads.
    ///
    /// # Errors
    /// [`Corrupt`], also if no record begins there.
    pub fn verify(&self, position: LogPosition) -> Result<(), Corrupt> {
        let scanner = self.scanner(position, position);
        let verified = if position.0 % UNIT_BYTES == 0 {
            scanner.find_slot().and_then(|found| match found.mark.verdict {
                SlotVerdict::Record => scanner.verify(&found),
                SlotVerdict::Void => Err(Fault::NoRecord),
            })
        } else {
            Err(Fault::Range)
        };
        verified.map_err(|fault| Corrupt { position, fault })
    }

    /// Walks over the records in `from..to`, one buffer for all. Both must be ends of settled prefixes.
    #[must_use]
    pub fn scanner(&self, from: LogPosition, to: LogPosition) -> Scanner<'_, M> {
        Scanner { log: self, position: from, to, generation: LogGeneration(0), buffer: Vec::new(), failed: false }
    }

    /// Walks over the records in `from..to`, each with a body of its own. After an error there is nothing more.
    pub fn scan(&self, from: LogPosition, to: LogPosition) -> impl Iterator<Item = Result<Record, Corrupt>> + '_ {
        let mut scanner = self.scanner(from, to);
        std::iter::from_fn(move || Some(scanner.next()?.map(RecordRef::to_record)))
    }
}

impl<M: Persistent> Scanner<'_, M> {
    /// Where the walk has got to: the end of the last record, or the place of the fault.
    #[must_use]
    pub fn position(&self) -> LogPosition {
        self.position
    }

    /// The next record, none at the range's end. After an error there is nothing more.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Option<Result<RecordRef<'_>, Corrupt>> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let found = self.next_into(&mut buffer, 0);
        self.buffer = buffer;
        Some(found?.map(|RecordAt { position, end, body_position, kind, body }| RecordRef {
            position,
            end,
            body_position,
            kind,
            body: &self.buffer[body],
        }))
    }

    /// Returns the next record, copied to `at` or behind it in the caller's buffer.
    ///
    /// The buffer grows where it must. Its other content there is overwritten, so a buffer that is used again and again
    /// costs nothing but the copy.
    pub fn next_into(&mut self, buffer: &mut Vec<u8>, at: usize) -> Option<Result<RecordAt, Corrupt>> {
        if self.failed || self.position == self.to {
            return None;
        }
        match self.find_record(buffer, at) {
            Ok(None) => None,
            Ok(Some((found, kind, body))) => {
                let position = std::mem::replace(&mut self.position, found.end);
                let body_position = found.record.plus(HEADER_BYTES);
                Some(Ok(RecordAt { position, end: found.end, body_position, kind, body }))
            }
            Err(fault) => {
                self.failed = true;
                Some(Err(Corrupt { position: self.position, fault }))
            }
        }
    }

    /// Goes to the next record and takes it into the buffer.
    fn find_record(&mut self, buffer: &mut Vec<u8>, at: usize) -> Result<Option<(Found, u8, Range<usize>)>, Fault> {
        let capacity = self.log.header.capacity;
        if self.position > self.to || self.to.0 - self.position.0 > capacity || self.position.0 % UNIT_BYTES != 0 {
            return Err(Fault::Range);
        }
        while self.position != self.to {
            let found = self.find_slot()?;
            if found.end > self.to {
                return Err(Fault::Length);
            }
            if found.mark.verdict == SlotVerdict::Record {
                let (kind, body) = self.take(&found, buffer, at)?;
                self.generation = found.mark.generation;
                return Ok(Some((found, kind, body)));
            }
            self.generation = found.mark.generation;
            self.position = found.end;
        }
        Ok(None)
    }

    /// Finds the mark of the slot at the present position: there, or at the ring's start for a record that did not fit.
    ///
    /// A log that was recovered may have a genuine mark in both places: a slot of an older generation, which was cut
    /// off, and the one that took its position afterwards, with another length. The newer one is the log's.
    fn find_slot(&self) -> Result<Found, Fault> {
        let capacity = self.log.header.capacity;
        let lap_end = self.position.0 - self.position.0 % capacity + capacity;
        let mut best: Result<Found, Fault> = Err(Fault::NoRecord);
        for record in [self.position, LogPosition(lap_end)] {
            let Ok(word) = self.log.memory.load_u64(self.log.ring_offset(record)) else { continue };
            let Some(mark) = self.log.stamp(self.position).read_mark(word) else { continue };
            let units = HEADER_BYTES / UNIT_BYTES..=capacity / UNIT_BYTES;
            let (placed, end) = place(self.position, mark.units, capacity);
            if !units.contains(&mark.units) || placed != record {
                continue;
            }
            match &best {
                _ if !self.may_stand_here(mark.generation) => best = best.or(Err(Fault::Generation)),
                Ok(other) if other.mark.generation >= mark.generation => {}
                _ => best = Ok(Found { mark, record, end }),
            }
        }
        best
    }

    /// Whether the present position is one for records of this generation.
    fn may_stand_here(&self, generation: LogGeneration) -> bool {
        let recovered = self.position >= self.log.header.boundary;
        recovered == (generation == self.log.header.generation) && generation >= self.generation
    }

    /// Copies a record's body to `at` in the buffer and verifies the copy. Returns its kind and its body's place.
    fn take(&self, found: &Found, buffer: &mut Vec<u8>, at: usize) -> Result<(u8, Range<usize>), Fault> {
        let log = self.log;
        let slot_bytes = found.mark.units * UNIT_BYTES;
        if slot_bytes - HEADER_BYTES > log.body_bytes_max() {
            return Err(Fault::Length);
        }
        let (Prefix { bytes, kind, body_bytes, crc }, offset) = self.prefix_of(found)?;
        let body = at..at + body_bytes as usize;
        if buffer.len() < body.end {
            buffer.resize(body.end, 0);
        }
        let mut sum = Crc32c::default();
        sum.update(&bytes);
        log.memory.load_summed(offset, &mut buffer[body.clone()], &mut sum).map_err(|_| Fault::Length)?;
        if sum.finish() != crc && !log.planted(Bug::SkipChecksum) {
            return Err(Fault::Checksum);
        }
        Ok((kind, body))
    }

    /// Verifies a record where it stands. Later changes by its writer are not seen: only the writer itself may rely on
    /// this.
    fn verify(&self, found: &Found) -> Result<(), Fault> {
        let memory = &self.log.memory;
        let (Prefix { bytes, body_bytes, crc, .. }, mut at) = self.prefix_of(found)?;
        let mut sum = Crc32c::default();
        sum.update(&bytes);
        let end = at + body_bytes;
        let mut chunk = [0; CHUNK_BYTES];
        while at < end {
            let chunk = &mut chunk[..(end - at).min(CHUNK_BYTES as u64) as usize];
            memory.load_summed(at, chunk, &mut sum).map_err(|_| Fault::Length)?;
            at += chunk.len() as u64;
        }
        if sum.finish() == crc { Ok(()) } else { Err(Fault::Checksum) }
    }

    /// The bytes that a record's checksum covers before its body, and where in memory that body begins.
    fn prefix_of(&self, found: &Found) -> Result<(Prefix, u64), Fault> {
        let at = RING_AT + found.record.0 % self.log.header.capacity + UNIT_BYTES;
        let mut own = [0; PREFIX_BYTES - PREFIX_OWN_AT];
        self.log.memory.load(at, &mut own).map_err(|_| Fault::Length)?;
        Ok((self.prefix(found, &own)?, at + own.len() as u64))
    }

    /// The bytes that a record's checksum covers before its body: from the record's position, and from its own claims
    /// (`own`, from its second word on).
    fn prefix(&self, found: &Found, own: &[u8]) -> Result<Prefix, Fault> {
        let word = |at: usize, length: usize| {
            let bytes = &own[at - PREFIX_OWN_AT..at - PREFIX_OWN_AT + length];
            bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
        };
        let second = word(PREFIX_OWN_AT, 8);
        let crc = word(PREFIX_CRC_AT, 4) as u32;
        let (kind, unused) = ((second >> 56) as u8, second % UNIT_BYTES);
        let slot_bytes = found.mark.units * UNIT_BYTES;
        let body_bytes = (slot_bytes - HEADER_BYTES).checked_sub(unused).ok_or(Fault::Length)?;
        // Position and generation are taken from where we are, not from the bytes, so one comparison of the checksum
        // covers them as well.
        let stamp = crate::record::Stamp { generation: found.mark.generation, ..self.log.stamp(self.position) };
        let bytes = stamp.prefix(found.mark.units, kind, body_bytes);
        let is_same =
            |range: Range<usize>| bytes[range.clone()] == own[range.start - PREFIX_OWN_AT..range.end - PREFIX_OWN_AT];
        if !is_same(PREFIX_OWN_AT..PREFIX_CRC_AT) || !is_same(PREFIX_CRC_AT + 4..PREFIX_BYTES) {
            return Err(Fault::Checksum);
        }
        Ok(Prefix { bytes, kind, body_bytes, crc })
    }
}
