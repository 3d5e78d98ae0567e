//! Readers of committed states: a check, and a copy of the tree.
//!
//! A reader has a snapshot of the rows, and reads the blocks that these rows name. It needs the blocks as they were, so
//! a block that was freed by a later commit is not given out before the reader has ended. Blocks that were freed before
//! the snapshot are none of its concern, and come free as always: many short readers, one after the other, hold nothing
//! back for long.
//!
//! Invariant: a reader is noted before it takes its snapshot, and with the number of the last commit that is noted by
//! then. So its snapshot has that commit, or a later one.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct ReadersState {
    /// How many batches are committed.
    committed: u64,
    /// The readers: how many began after so many batches.
    readers: BTreeMap<u64, usize>,
}

/// All readers of a store's committed states.
#[derive(Debug, Default)]
pub struct StateReaders(Mutex<ReadersState>);

impl StateReaders {
    fn lock(&self) -> MutexGuard<'_, ReadersState> {
        // Each change is one step, so a panic leaves a sound state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how many batches are committed.
    pub fn note_committed(&self, batches: u64) {
        self.lock().committed = batches;
    }

    /// Adds a reader, which must take its snapshot after this.
    pub fn begin_read(self: &Arc<Self>) -> StateReader {
        let mut state = self.lock();
        let since = state.committed;
        *state.readers.entry(since).or_default() += 1;
        drop(state);
        StateReader { readers: Arc::clone(self), since }
    }

    /// Returns the batch from which on freed blocks must stay as they are: some reader may see the state before it.
    pub fn bound(&self) -> u64 {
        self.lock().readers.first_key_value().map_or(u64::MAX, |(since, _)| *since)
    }

    /// Whether there is any reader.
    pub fn is_any(&self) -> bool {
        !self.lock().readers.is_empty()
    }
}

/// A reader; it ends when this is dropped.
#[derive(Debug)]
pub struct StateReader {
    readers: Arc<StateReaders>,
    since: u64,
}

impl Drop for StateReader {
    fn drop(&mut self) {
        let mut state = self.readers.lock();
        if let Some(count) = state.readers.get_mut(&self.since) {
            *count -= 1;
            if *count == 0 {
                state.readers.remove(&self.since);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bound_is_that_of_the_oldest_reader() {
        let readers = Arc::new(StateReaders::default());
        assert_eq!((readers.bound(), readers.is_any()), (u64::MAX, false));
        readers.note_committed(3);
        let one = readers.begin_read();
        readers.note_committed(5);
        let (two, three) = (readers.begin_read(), readers.begin_read());
        assert_eq!(readers.bound(), 3);
        drop(one);
        assert_eq!(readers.bound(), 5);
        drop(two);
        assert!(readers.is_any());
        drop(three);
        assert_eq!((readers.bound(), readers.is_any()), (u64::MAX, false));
    }
}
