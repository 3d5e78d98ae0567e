//! Joins short writes, each of which begins at the end of the one before.
//!
//! Purpose: a program that appends lines to a file, or records to a log of its own, leaves dozens of records for each
//! block. Applied one by one, each reads the block again, and computes its checksum. Joined, they are digested several
//! times as fast. Unlike [`crate::coalesce`], this copies data; so only short writes are joined.
//!
//! Invariants:
//! - The joined write leaves the same bytes, size, blocks and times as the writes one after the other.
//! - Nothing else lies between them, so a session that sees only the end of the batch misses nothing.

use ashlar_types::{BLOCK_BYTES, FILE_SIZE_MAX, InodeId};

use crate::Update;

/// Bytes of the longest write that is joined with others: beyond, the copy costs what it saves.
const JOINED_BYTES_MAX: usize = BLOCK_BYTES as usize;

/// Where a short write ends, and what else must be the same for the next one to be joined with it.
fn end_of(update: &Update<'_>) -> Option<(InodeId, bool, u64)> {
    match *update {
        Update::Write { inode, offset, strip, data, .. } if data.len() <= JOINED_BYTES_MAX => {
            Some((inode, strip, offset.checked_add(data.len() as u64)?))
        }
        _ => None,
    }
}

/// How many of these updates, from the first on, are writes that [`join`] makes one of: 1 or more, where there is one
/// at all.
pub fn stretch<'a: 'b, 'b>(updates: impl IntoIterator<Item = &'b Update<'a>>) -> usize {
    let mut updates = updates.into_iter();
    let Some(first) = updates.next() else { return 0 };
    let Some(mut last) = end_of(first) else { return 1 };
    let joins = |next: &&Update<'_>| {
        let Update::Write { inode, offset, strip, .. } = next else { return false };
        let Some(end) = end_of(next).filter(|(.., end)| *end <= FILE_SIZE_MAX) else { return false };
        let follows = (*inode, *strip, *offset) == last;
        last = end;
        follows
    };
    1 + updates.take_while(joins).count()
}

/// The write that does what the writes of a [`stretch`] do; their bytes go into `data`, in place of what that holds.
/// `None` where these are no writes.
pub fn join<'a, 'b: 'c, 'c>(
    writes: impl IntoIterator<Item = &'c Update<'b>>,
    data: &'a mut Vec<u8>,
) -> Option<Update<'a>> {
    data.clear();
    let mut joined = None;
    for write in writes {
        let Update::Write { inode, offset, at, strip, data: part } = *write else { return None };
        data.extend_from_slice(part);
        let (_, first, ..) = joined.unwrap_or((inode, offset, at, strip));
        joined = Some((inode, first, at, strip));
    }
    joined.map(|(inode, offset, at, strip)| Update::Write { inode, offset, at, strip, data })
}

#[cfg(test)]
mod tests {
    use ashlar_types::FileKind;
    use proptest::prelude::*;

    use super::*;
    use crate::model::{ModelTree, UpdateChoice};

    /// The result of a batch when each stretch of it is joined.
    fn applied(start: &ModelTree, batch: &[Update<'_>]) -> ModelTree {
        let (mut tree, mut data) = (start.clone(), Vec::new());
        let mut rest = batch;
        while !rest.is_empty() {
            let (these, others) = rest.split_at(stretch(rest));
            match these {
                [one] => drop(tree.apply(one).expect("it fits")),
                writes => drop(tree.apply(&join(writes, &mut data).expect("writes")).expect("it fits")),
            }
            rest = others;
        }
        tree
    }

    proptest! {
        #[test]
        fn joined_writes_leave_the_same_state(
            before in prop::collection::vec(any::<UpdateChoice>(), 0..15),
            offset in 0u64..9000,
            writes in prop::collection::vec((0usize..5000, 0u8..8, any::<u32>()), 1..40),
        ) {
            let mut start = ModelTree::new();
            let mut next = InodeId::FIRST_FREE.0;
            start.grow(&[(0, 0, 0, 0, 1)], &mut next);
            start.grow(&before, &mut next);
            let files: Vec<InodeId> =
                start.inodes.iter().filter(|(_, inode)| inode.kind == FileKind::Regular).map(|(id, _)| *id).collect();
            prop_assume!(!files.is_empty());
            let bytes: Vec<u8> = (0..5000).map(|byte| byte as u8).collect();
            let mut end = offset;
            let mut batch = Vec::new();
            for (length, what, number) in &writes {
                let inode = files[usize::from(*what == 0) % files.len()];
                // Most go on where the last one has ended.
                let offset = if *what == 1 { u64::from(number % 9000) } else { end };
                let at = crate::test_updates::at(batch.len() as i64);
                batch.push(Update::Write { inode, offset, at, strip: *what == 2, data: &bytes[..*length] });
                end = offset + *length as u64;
            }
            let mut expected = start.clone();
            for update in &batch {
                expected.apply(update).expect("it fits");
            }
            prop_assert_eq!(applied(&start, &batch), expected, "{:?}", batch);
        }
    }

    #[test]
    fn consecutive_short_writes_are_joined() {
        let write = |inode, offset, length: usize| Update::Write {
            inode: InodeId(inode),
            offset,
            at: crate::test_updates::at(1),
            strip: false,
            data: &[7; 8192][..length],
        };
        let batch = [
            write(9, 0, 100),
            write(9, 100, 4096),
            write(9, 4196, 0),
            write(9, 4196, 1),
            // Another file, a gap, a long one, and what follows it.
            write(8, 4197, 10),
            write(8, 4208, 10),
            write(8, 4218, 4097),
            write(8, 8315, 10),
        ];
        let mut lengths = Vec::new();
        let mut rest = &batch[..];
        while !rest.is_empty() {
            lengths.push(stretch(rest));
            rest = &rest[lengths[lengths.len() - 1]..];
        }
        assert_eq!(lengths, [4, 1, 1, 1, 1]);
        let mut data = vec![1; 3];
        let Some(Update::Write { offset: 0, data, .. }) = join(&batch[..4], &mut data) else { panic!("no write") };
        assert_eq!(data.len(), 4197);
        assert_eq!(stretch([]), 0);
        let too_long = [write(9, FILE_SIZE_MAX - 10, 10), write(9, FILE_SIZE_MAX, 1)];
        assert_eq!(stretch(&too_long), 1);
    }
}
