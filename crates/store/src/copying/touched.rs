//! The rows that commits change while a copy is made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::blocks::segment::StoreSegment;
use crate::copying::error::FullCopyError;
use crate::metadata::rows::kind;

/// A row's key.
pub type RowKey = Box<[u8]>;

/// The segments of a store, by number.
pub type SegmentMaps = BTreeMap<u32, Arc<StoreSegment>>;

#[derive(Debug, Default)]
struct TouchedState {
    rows: BTreeSet<RowKey>,
    /// How many of them are chunks.
    chunks: u64,
    /// The rows of the batch whose commit is under way: it may become visible at any moment.
    under_way: Arc<[RowKey]>,
    segments: SegmentMaps,
    /// There were more rows than are kept.
    is_full: bool,
    /// Nothing more is noted.
    is_over: bool,
}

impl TouchedState {
    fn note(&mut self, rows: &[RowKey], rows_max: usize) {
        for key in rows {
            let is_chunk = key.first() == Some(&kind::CHUNK);
            if self.rows.insert(key.clone()) {
                self.chunks += u64::from(is_chunk);
            }
        }
        if self.rows.len() > rows_max {
            self.is_full = true;
            self.rows.clear();
        }
    }
}

/// The rows that a store notes for one copy.
#[derive(Debug)]
pub struct TouchedRows {
    state: Mutex<TouchedState>,
    rows_max: usize,
}

impl TouchedRows {
    /// Begins with the segments of the store. At most so many rows are noted in a pass.
    pub fn new(segments: SegmentMaps, rows_max: usize) -> Self {
        Self { state: Mutex::new(TouchedState { segments, ..TouchedState::default() }), rows_max }
    }

    fn lock(&self) -> MutexGuard<'_, TouchedState> {
        // A panic in the middle leaves some rows noted, which are sent once more than needed, or the copy fails.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the rows of a batch, before its commit becomes visible, and the segments that they may refer to.
    pub fn begin_batch(&self, rows: &Arc<[RowKey]>, segments: &SegmentMaps) {
        let mut state = self.lock();
        if state.is_over || state.is_full {
            return;
        }
        if state.segments.keys().ne(segments.keys()) {
            state.segments.clone_from(segments);
        }
        state.under_way = Arc::clone(rows);
        state.note(rows, self.rows_max);
    }

    /// Notes that the commit of the last batch is visible.
    pub fn finish_batch(&self) {
        self.lock().under_way = Arc::default();
    }

    /// Takes the rows of a pass. Those of a commit that is under way stay noted as well, for the next pass.
    pub fn take(&self) -> Result<BTreeSet<RowKey>, FullCopyError> {
        let mut state = self.lock();
        if state.is_full {
            return Err(FullCopyError::TooManyTouched(self.rows_max));
        }
        let taken = std::mem::take(&mut state.rows);
        state.chunks = 0;
        let under_way = Arc::clone(&state.under_way);
        state.note(&under_way, self.rows_max);
        Ok(taken)
    }

    /// Notes nothing any more.
    pub fn stop(&self) {
        *self.lock() = TouchedState { is_over: true, ..TouchedState::default() };
    }

    /// Returns how many rows are noted, and how many of them are chunks.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.lock();
        (state.rows.len() as u64, state.chunks)
    }

    /// Returns the segments that visible rows may refer to.
    pub fn segments(&self) -> SegmentMaps {
        self.lock().segments.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(numbers: &[u8]) -> Arc<[RowKey]> {
        numbers.iter().map(|number| RowKey::from([kind::CHUNK, *number])).collect()
    }

    fn taken(rows: &TouchedRows) -> Vec<u8> {
        rows.take().unwrap().iter().map(|key| key[1]).collect()
    }

    #[test]
    fn rows_of_a_commit_under_way_are_taken_twice() {
        let rows = TouchedRows::new(BTreeMap::new(), 10);
        rows.begin_batch(&keys(&[1, 2]), &BTreeMap::new());
        rows.finish_batch();
        rows.begin_batch(&keys(&[2, 3]), &BTreeMap::new());
        assert_eq!(rows.counts(), (3, 3));
        assert_eq!(taken(&rows), [1, 2, 3]);
        rows.finish_batch();
        assert_eq!(taken(&rows), [2, 3]);
        assert_eq!(taken(&rows), [0; 0]);
    }

    #[test]
    fn too_many_rows_end_the_copy() {
        let rows = TouchedRows::new(BTreeMap::new(), 2);
        rows.begin_batch(&keys(&[1, 2]), &BTreeMap::new());
        rows.finish_batch();
        rows.begin_batch(&keys(&[3]), &BTreeMap::new());
        assert!(matches!(rows.take(), Err(FullCopyError::TooManyTouched(2))));
    }
}
