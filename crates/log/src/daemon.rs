//! SharedFS's side of a log in use.

use std::sync::{MutexGuard, PoisonError};

use ashlar_pmem::Persistent;
use ashlar_types::{LogPosition, SealCount};

use crate::layout::{FENCED_AT, LIMIT_AT, SLOTS};
use crate::slots::{LogSlot, SlotState, TRIES_MAX, Undecided};
use crate::{Damaged, Log};

impl<M: Persistent> Log<M> {
    /// Seals the log: appends under older seal counts fail from now on.
    ///
    /// Every slot that its owner has not committed is void. Returns the new seal count and the end of the settled,
    /// durable prefix. The prefix holds every append that returned before this call.
    ///
    /// # Errors
    /// [`Damaged`] if the session has forged the log's words.
    pub fn seal(&self) -> Result<(SealCount, LogPosition), Damaged> {
        let _guard = self.lock_daemon();
        for _ in 0..TRIES_MAX {
            let tail = self.load_tail()?;
            let Some(entry) = self.free_entry(tail, Undecided::Void)? else { continue };
            let start = self.load_start(tail.number)?;
            if !self.swap_slot(entry, LogSlot { number: tail.number, state: SlotState::Voided, units: 0 })? {
                continue;
            }
            self.advance(tail, Undecided::Void)?;
            let mut number = self.first_doubtful(tail.number);
            while number != tail.number {
                self.settle(number, Undecided::Void)?;
                number = number.wrapping_add(1);
            }
            self.record_settled(tail.number.wrapping_add(1));
            return Ok((SealCount(tail.seal.0.wrapping_add(1)), start));
        }
        Err(Damaged)
    }

    /// Returns the end of the prefix in which every slot is a durable record or a durable void.
    ///
    /// The call disturbs no session.
    ///
    /// # Errors
    /// [`Damaged`] if the session has forged the log's words.
    pub fn settled(&self) -> Result<LogPosition, Damaged> {
        let _guard = self.lock_daemon();
        let (tail, end) = self.load_tail_start()?;
        let mut number = self.first_doubtful(tail.number);
        for _ in 0..TRIES_MAX {
            if number == tail.number {
                self.record_settled(number);
                return Ok(end);
            }
            if self.settle(number, Undecided::Leave)? {
                number = number.wrapping_add(1);
                continue;
            }
            // The start belongs to the slot if the slot is still not settled after it was read.
            let start = self.load_start(number)?;
            let slot = self.load_slot(number)?;
            if slot.number == number && !slot.is_settled() {
                self.record_settled(number);
                return Ok(start);
            }
        }
        Err(Damaged)
    }

    /// Publishes that everything before `head` is durably committed, so that SharedFS allows its reuse.
    ///
    /// `head` is the end of a settled prefix.
    pub fn set_head(&self, head: LogPosition) {
        let _guard = self.lock_daemon();
        // Memory that was mapped whole cannot be too short, and a head that is not stored only keeps space from reuse.
        let _ = self.store_head(head);
    }

    /// Lets appends go up to a position, or sets no limit.
    ///
    /// A limit holds for all appends at once if it is raised, and after the next seal if it is lowered.
    pub fn set_limit(&self, upto: Option<LogPosition>) {
        // As for the head. A session that overwrites it is found out by the end of its log.
        let _ = self.memory.store_u64(LIMIT_AT, upto.map_or(0, |upto| upto.0.saturating_add(1)));
        self.memory.fence();
    }

    /// Ends all appends, for good.
    ///
    /// # Errors
    /// [`Damaged`] as for [`Self::seal`]. The log is fenced all the same, but an append under way may still complete.
    pub fn fence_session(&self) -> Result<(), Damaged> {
        self.memory.store_u64(FENCED_AT, 1)?;
        self.memory.flush(FENCED_AT, 8)?;
        self.memory.fence();
        // A thread that passed the check of the word above holds an old seal count.
        self.seal().map(|_| ())
    }

    fn lock_daemon(&self) -> MutexGuard<'_, ()> {
        self.daemon_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const _: () = assert!(SLOTS.is_power_of_two(), "slot numbers wrap at 2^32, where entries must stay in step");
