//! Coalescing and joining the updates of a batch.
//!
//! Both are pure functions of the batch, so every node that applies it gets the same result.

use std::ops::Range;

use ashlar_update::coalesce::{CoalesceScope, coalesce};
use ashlar_update::{Update, join};

/// Records and bytes that coalescing dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoalescedAway {
    /// Records.
    pub records: u64,
    /// Bytes.
    pub bytes: u64,
}

fn changes_content(update: &&Update<'_>) -> bool {
    matches!(update, Update::Write { .. } | Update::Resize { .. } | Update::Allocate { .. })
}

/// Calls `apply` for each stretch of a batch: one record, or short writes that follow each other and are joined.
///
/// It gets the stretch's indexes, and the updates that coalescing left of it; `None` for a record that was dropped. It
/// returns whether to go on.
///
/// # Errors
/// The first error of `apply`.
pub fn for_each_stretch<'a, E>(
    updates: &[Update<'a>],
    mut apply: impl FnMut(Range<usize>, &[Option<&Update<'a>>]) -> Result<bool, E>,
) -> Result<CoalescedAway, E> {
    // With less than two changes of content, coalescing saves nothing.
    let coalesced =
        (updates.iter().filter(changes_content).nth(1).is_some()).then(|| coalesce(updates, CoalesceScope::Content));
    let away = coalesced.as_ref().map_or_else(CoalescedAway::default, |coalesced| CoalescedAway {
        records: coalesced.dropped,
        bytes: coalesced.saved_bytes,
    });
    let left: Vec<Option<&Update<'_>>> = match &coalesced {
        None => updates.iter().map(Some).collect(),
        Some(coalesced) => coalesced.left(updates).collect(),
    };
    let mut index = 0;
    while index < updates.len() {
        let length = join::stretch(left[index..].iter().map_while(|left| *left)).max(1);
        let these = index..index + length;
        if !apply(these.clone(), &left[these])? {
            break;
        }
        index += length;
    }
    Ok(away)
}
