//! The records of a batch, in the bytes of its Records frames.
//!
//! ```text
//! of each record: kind 1 · distance varint · length varint · body
//! ```
//!
//! *distance* counts from the position of the record before, and from the batch's *from* for the first. A varint has
//! seven bits in each byte, the lowest first; all but the last byte have bit 7 set.

use ashlar_types::LogPosition;

use crate::FrameError;

/// A record of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchRecord<'a> {
    /// Its position in the session's log.
    pub position: LogPosition,
    /// The kind of the update.
    pub kind: u8,
    /// The update.
    pub body: &'a [u8],
}

/// Appends a record to the bytes of a batch. `before` is the position from which its distance counts.
pub fn push_record(bytes: &mut Vec<u8>, before: LogPosition, record: &BatchRecord<'_>) {
    bytes.push(record.kind);
    push_number(bytes, record.position.0 - before.0);
    push_number(bytes, record.body.len() as u64);
    bytes.extend_from_slice(record.body);
}

/// Reads the records of a batch that begins at `from`.
///
/// # Errors
/// [`FrameError::Malformed`] if the bytes are none that [`push_record`] writes.
pub fn read_records(from: LogPosition, mut bytes: &[u8]) -> Result<Vec<BatchRecord<'_>>, FrameError> {
    let (mut records, mut before) = (Vec::new(), from);
    while let Some((&kind, rest)) = bytes.split_first() {
        let (distance, rest) = read_number(rest)?;
        let (length, rest) = read_number(rest)?;
        let length = usize::try_from(length).map_err(|_| FrameError::Malformed)?;
        let (body, rest) = rest.split_at_checked(length).ok_or(FrameError::Malformed)?;
        let position = LogPosition(before.0.checked_add(distance).ok_or(FrameError::Malformed)?);
        if position == before && !records.is_empty() {
            return Err(FrameError::Malformed);
        }
        records.push(BatchRecord { position, kind, body });
        (before, bytes) = (position, rest);
    }
    Ok(records)
}

fn push_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn read_number(bytes: &[u8]) -> Result<(u64, &[u8]), FrameError> {
    let mut number = 0u64;
    for (index, &byte) in bytes.iter().enumerate().take(10) {
        let bits = u64::from(byte & 0x7f);
        let shifted = bits << (7 * index);
        if shifted >> (7 * index) != bits || index > 0 && byte == 0 {
            return Err(FrameError::Malformed);
        }
        number |= shifted;
        if byte & 0x80 == 0 {
            return Ok((number, &bytes[index + 1..]));
        }
    }
    Err(FrameError::Malformed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn records_read_as_they_were_pushed(
            from in 0..u64::MAX / 2,
            parts in prop::collection::vec((1..u64::MAX >> 20, any::<u8>(), prop::collection::vec(any::<u8>(), 0..300)), 0..40),
        ) {
            let (mut bytes, mut before) = (Vec::new(), LogPosition(from));
            let mut pushed = Vec::new();
            for (distance, kind, body) in &parts {
                let position = before.plus(*distance);
                let record = BatchRecord { position, kind: *kind, body };
                push_record(&mut bytes, before, &record);
                pushed.push(record);
                before = position;
            }
            prop_assert_eq!(read_records(LogPosition(from), &bytes).unwrap(), pushed);
            for cut in 0..bytes.len().min(200) {
                // A cut never panics, and never yields a record that was not pushed.
                if let Ok(read) = read_records(LogPosition(from), &bytes[..cut]) {
                    prop_assert!(read.len() <= parts.len());
                }
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read_records(LogPosition(7), &bytes);
        }
    }
}
