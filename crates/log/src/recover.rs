//! Recovery after the machine went down.

use ashlar_pmem::Persistent;
use ashlar_types::{LogGeneration, LogPosition, SealCount};

use crate::layout::Header;
use crate::slots::Tail;
use crate::{Bug, Log, LogOpenError};

impl<M: Persistent> Log<M> {
    /// Finds the valid prefix from `committed` on and makes the log one that ends there.
    ///
    /// `committed` is the position up to which the metadata store has this log's records. Returns the log and the
    /// prefix's end.
    ///
    /// The prefix ends at the first slot whose mark, generation or checksum is not right. Records behind it are never
    /// taken for valid again, after another crash either: the log continues under a new generation, and from the
    /// prefix's end on only records of that generation count. That is durable before this returns.
    ///
    /// # Errors
    /// [`LogOpenError`]. The log is then as it was.
    pub fn recover(memory: M, committed: LogPosition) -> Result<(Self, LogPosition), LogOpenError> {
        Self::recover_with(memory, committed, Bug::None)
    }

    pub(crate) fn recover_with(
        memory: M,
        committed: LogPosition,
        bug: Bug,
    ) -> Result<(Self, LogPosition), LogOpenError> {
        let mut header = Header::read(&memory)?;
        let mut log = Self::over(memory, header, committed);
        #[cfg(test)]
        {
            log.bug = bug;
        }
        let mut scanner = log.scanner(committed, committed.plus(header.capacity));
        while scanner.next().is_some_and(|record| record.is_ok()) {}
        let end = scanner.position();
        // The prefix may have been read from caches, if only processes went down: from here on it must not shrink.
        let capacity = header.capacity;
        log.memory.flush(log.ring_offset(LogPosition(0)), capacity)?;
        log.memory.fence();
        log.memory.sync()?;
        if bug != Bug::SkipGeneration {
            header.boundary = end;
            header.generation = LogGeneration(header.generation.0.wrapping_add(1));
        }
        header.write_incarnation(&log.memory)?;
        log.memory.sync()?;
        log.header = header;
        let seal = log.load_tail().map_or(SealCount(0), |tail| SealCount(tail.seal.0.wrapping_add(1)));
        log.reset_slots(Tail { number: 0, seal }, end).map_err(|_| LogOpenError::DamagedHeader)?;
        log.store_head(committed)?;
        Ok((log, end))
    }
}
