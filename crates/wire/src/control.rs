//! Control page and lease table: the words in shared memory.
//!
//! Control page (one file a session; the session may write all of it):
//!
//! ```text
//!    0  magic:8 "ASHLCTL1"   session:8
//!   64  SharedFS writes:  committed:8  applied:8  fenced:8  extent_version:8  company:8  quota_version:8
//!                         segment_version:8  handle_slots:8
//!  128  the session writes: released:8  company_known:8  using:8
//!  192  both change by compare-and-swap: credit_blocks:8  credit_metadata_bytes:8  kept_blocks:8
//!                         kept_metadata_bytes:8; each is version << 48 | amount
//!  224  SharedFS writes: programs:8
//!  256  the session writes: 24 lanes of 4 operations:8 (32 bytes unused), by thread
//! 2048  the session writes: 4 times 64 of sampled:8, by kind of operation and bucket of time
//! 4096  handles: 512 near slots of inode:8 count:8, 65,024 far ones, of which handle_slots have room; an inode stands
//!       in one of the 64 slots that begin at its hash, or among the far ones if those near ones were all taken
//! 1052672  record locks                                                      (`lock_slots.rs`)
//! 1073152  a question to SharedFS and its answer                             (`request_slot.rs`)
//! ```
//!
//! Lease table (one file a session; the session may only read it):
//!
//! ```text
//!    0  magic:8 "ASHLLSE1"   session:8   token:8
//! 4096  65,536 slots of word:8 inode:8; word = generation << 16 | scope << 8 | mode
//! ```

mod open_handles;

use std::borrow::Borrow;
use std::ops::Range;
use std::sync::Arc;

use ashlar_pmem::{CheckedMemory, Mapping, PartAt, Persistent, Readable, RowsAt, SharedMemory, WordAt, Writable};
use ashlar_types::{
    ExtentVersion, InodeId, LeaseScope, LockedRange, LogPosition, QuotaVersion, SegmentVersion, SessionId,
};

pub use self::open_handles::HandleSlot;
use crate::lock_slots::{LOCK_SLOTS_BYTES, LockChange, LockList, LockSlotState, LockSlots};
use crate::request_slot::{REQUEST_SLOT_BYTES, RequestSlot};
use crate::{Credit, LATENCY_BUCKETS, LockSlot, OperationCounts, OperationKind, latency_bucket};

/// Slots in the table of open handles, which limit the different inodes that a session may have open.
pub const HANDLE_SLOTS: u64 = 65_536;
/// Handle slots that have room from the beginning.
///
/// Few programs have more files open, and each page costs microseconds to create and to free.
const HANDLE_SLOTS_NEAR: u64 = 512;
/// Slots in the lease table, which limit the leases that a session may hold.
pub const LEASE_SLOTS: u32 = 65_536;
/// Slots of the lease table that have room from the beginning.
pub const LEASE_SLOTS_FIRST: u32 = 1024;
/// Bytes of the control page's file.
pub const CONTROL_BYTES: u64 = REQUEST_SLOT + REQUEST_SLOT_BYTES;
/// The parts of the control page that have room from the beginning.
pub const CONTROL_ROOM: [Range<u64>; 2] = [0..TABLE + HANDLE_SLOTS_NEAR * SLOT_BYTES, LOCKS..CONTROL_BYTES];
/// The part of the control page that gets room when the near handle slots are taken.
///
/// See [`ControlPage::set_all_handle_slots`].
pub const CONTROL_ROOM_FAR: Range<u64> = CONTROL_ROOM[0].end..LOCKS;
/// Bytes of the lease table's file.
pub const LEASE_TABLE_BYTES: u64 = TABLE + LEASE_SLOTS as u64 * SLOT_BYTES;

/// The lanes in which operations are counted.
pub const OPERATION_LANES: u32 = 24;

/// The offset of a word in the control page.
type ControlWord = WordAt<CONTROL_BYTES>;

const TABLE: u64 = 4096;
const SLOT_BYTES: u64 = 16;
const LOCKS: u64 = TABLE + HANDLE_SLOTS * SLOT_BYTES;
const REQUEST_SLOT: u64 = (LOCKS + LOCK_SLOTS_BYTES).next_multiple_of(4096);
const CONTROL_MAGIC: u64 = u64::from_le_bytes(*b"ASHLCTL1");
const LEASE_MAGIC: u64 = u64::from_le_bytes(*b"ASHLLSE1");
const MAGIC: ControlWord = ControlWord::new(0);
const SESSION: ControlWord = ControlWord::new(8);
const COMMITTED: ControlWord = ControlWord::new(64);
const APPLIED: ControlWord = ControlWord::new(72);
const FENCED: ControlWord = ControlWord::new(80);
const EXTENT_VERSION: ControlWord = ControlWord::new(88);
const COMPANY: ControlWord = ControlWord::new(96);
const QUOTA: ControlWord = ControlWord::new(104);
const SEGMENT_VERSION: ControlWord = ControlWord::new(112);
const HANDLES: ControlWord = ControlWord::new(120);
const RELEASED: ControlWord = ControlWord::new(128);
const COMPANY_KNOWN: ControlWord = ControlWord::new(136);
const USING: ControlWord = ControlWord::new(144);
const CREDIT_BLOCKS: ControlWord = ControlWord::new(192);
const CREDIT_METADATA: ControlWord = ControlWord::new(200);
const KEPT_BLOCKS: ControlWord = ControlWord::new(208);
const KEPT_METADATA: ControlWord = ControlWord::new(216);
const PROGRAMS: ControlWord = ControlWord::new(224);
const OPERATIONS: u64 = 256;
const LANE_BYTES: u64 = 64;
const SAMPLED: u64 = 2048;
const SAMPLED_BYTES: u64 = LATENCY_BUCKETS as u64 * 8;

const HANDLE_ROWS: RowsAt<CONTROL_BYTES, SLOT_BYTES> = RowsAt::new(TABLE, HANDLE_SLOTS);
const LOCKS_PART: PartAt<CONTROL_BYTES, LOCK_SLOTS_BYTES> = PartAt::new(LOCKS);
const REQUEST_SLOT_PART: PartAt<CONTROL_BYTES, REQUEST_SLOT_BYTES> = PartAt::new(REQUEST_SLOT);
const LANES: RowsAt<CONTROL_BYTES, LANE_BYTES> = RowsAt::new(OPERATIONS, OPERATION_LANES as u64);
const LANE_WORDS: RowsAt<LANE_BYTES, 8> = RowsAt::new(0, OPERATION_KINDS);
const SAMPLES: RowsAt<CONTROL_BYTES, SAMPLED_BYTES> = RowsAt::new(SAMPLED, OPERATION_KINDS);
const BUCKETS: RowsAt<SAMPLED_BYTES, 8> = RowsAt::new(0, LATENCY_BUCKETS as u64);

const LEASE_MAGIC_AT: WordAt<LEASE_TABLE_BYTES> = WordAt::new(0);
const OWNER: WordAt<LEASE_TABLE_BYTES> = WordAt::new(8);
const TOKEN: WordAt<LEASE_TABLE_BYTES> = WordAt::new(16);
const LEASE_ROWS: RowsAt<LEASE_TABLE_BYTES, SLOT_BYTES> = RowsAt::new(TABLE, LEASE_SLOTS as u64);
/// The first word of a slot: an inode of a handle, or the word of a lease.
const FIRST: WordAt<SLOT_BYTES> = WordAt::new(0);
/// The second word of a slot: a count of handles, or the inode of a lease.
const SECOND: WordAt<SLOT_BYTES> = WordAt::new(8);

const _: () = assert!(KEPT_METADATA.offset() + 8 <= PROGRAMS.offset() && PROGRAMS.offset() + 8 <= OPERATIONS);
const _: () = assert!(OPERATION_KINDS * 8 <= LANE_BYTES);
const _: () = assert!(OPERATIONS + OPERATION_LANES as u64 * LANE_BYTES <= SAMPLED);
const _: () = assert!(SAMPLED + OPERATION_KINDS * SAMPLED_BYTES <= TABLE);
const _: () = assert!(REQUEST_SLOT == 1_073_152);
const OPERATION_KINDS: u64 = OperationKind::ALL.len() as u64;

/// The use that credit may be put to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreditKind {
    /// Every update.
    Common,
    /// Updates that replace: once committed, they free as much as they take. If the arena is full, they use the credit
    /// that is kept back for them.
    Kept,
}

impl CreditKind {
    const ALL: [Self; 2] = [Self::Common, Self::Kept];

    /// Returns the offsets of this credit in the control page: blocks, metadata bytes.
    const fn offsets(self) -> (ControlWord, ControlWord) {
        match self {
            Self::Common => (CREDIT_BLOCKS, CREDIT_METADATA),
            Self::Kept => (KEPT_BLOCKS, KEPT_METADATA),
        }
    }
}

/// How often a change of a credit word is tried.
///
/// A session that changes the word each time does so on purpose, and harms only itself.
const CREDIT_TRIES: u32 = 1000;
/// Bits of a credit word that hold the amount; those above hold the version.
const CREDIT_AMOUNT: u64 = (1 << 48) - 1;

/// Credit that a session has taken for an update, of the versions in which it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenCredit {
    credit: Credit,
    kind: CreditKind,
    versions: (u64, u64),
}

/// A session's control page.
#[derive(Debug)]
pub struct ControlPage<M>(CheckedMemory<M, CONTROL_BYTES>);

impl<M: Persistent> ControlPage<M> {
    /// Takes memory as a control page; `None` if it is shorter than [`CONTROL_BYTES`], or read-only.
    pub fn new(memory: M) -> Option<Self> {
        CheckedMemory::new(memory).ok().map(Self)
    }

    /// Makes an empty page for a session.
    pub fn format(&self, session: SessionId) {
        self.0.store(HANDLES, HANDLE_SLOTS_NEAR);
        self.0.store(MAGIC, CONTROL_MAGIC);
        self.0.store(SESSION, session.0);
    }

    /// Clears all that a session has left in the pages that have room from the beginning.
    ///
    /// Returns `false` if the session has had more pages.
    pub fn clear(&self) -> bool {
        let is_near = self.0.load(HANDLES) == HANDLE_SLOTS_NEAR;
        const NEAR: PartAt<CONTROL_BYTES, { CONTROL_ROOM[0].end }> = PartAt::new(0);
        const LAST: PartAt<CONTROL_BYTES, { CONTROL_BYTES - LOCKS }> = PartAt::new(LOCKS);
        self.0.clear(NEAR);
        self.0.clear(LAST);
        is_near
    }

    /// Returns the session that owns the page; `None` if this is not a control page.
    pub fn session(&self) -> Option<SessionId> {
        (self.0.load(MAGIC) == CONTROL_MAGIC).then(|| SessionId(self.0.load(SESSION)))
    }

    /// Returns the memory.
    pub fn memory(&self) -> &M {
        self.0.memory()
    }

    /// Returns the position up to which the session's log is committed.
    pub fn committed(&self) -> LogPosition {
        LogPosition(self.0.load(COMMITTED))
    }

    /// Publishes the committed position.
    pub fn set_committed(&self, position: LogPosition) {
        self.0.store(COMMITTED, position.0);
    }

    /// Returns the position up to which the session's log is applied.
    pub fn applied(&self) -> LogPosition {
        LogPosition(self.0.load(APPLIED))
    }

    /// Publishes the applied position.
    pub fn set_applied(&self, position: LogPosition) {
        self.0.store(APPLIED, position.0);
    }

    /// Whether the session was fenced: all its calls return `EIO`.
    pub fn is_fenced(&self) -> bool {
        self.0.load(FENCED) != 0
    }

    /// Fences the session.
    pub fn set_fenced(&self) {
        self.0.store(FENCED, 1);
    }

    /// Whether other sessions exist. A kernel then caches no names.
    pub fn is_shared(&self) -> bool {
        self.company() % 2 == 1
    }

    /// Counts how often other sessions have appeared and gone: odd while other sessions exist.
    pub fn company(&self) -> u64 {
        self.0.load(COMPANY)
    }

    /// Publishes whether other sessions exist, and returns the new count of changes.
    pub fn set_shared(&self, is_shared: bool) -> u64 {
        let company = self.company();
        if is_shared == self.is_shared() {
            return company;
        }
        self.0.store(COMPANY, company.wrapping_add(1));
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        company.wrapping_add(1)
    }

    /// Returns how many sessions of programs exist beside a mount's.
    pub fn programs(&self) -> u64 {
        self.0.load(PROGRAMS)
    }

    /// Publishes how many sessions of programs exist.
    pub fn set_programs(&self, programs: u64) {
        self.0.store(PROGRAMS, programs);
    }

    /// Returns the last change of company that the session's mount has handled.
    ///
    /// After a change is handled, the mount's kernel has forgotten the names that it cached as sole mount.
    pub fn company_known(&self) -> u64 {
        self.0.load(COMPANY_KNOWN)
    }

    /// Publishes the last change that the mount has handled.
    pub fn set_company_known(&self, company: u64) {
        self.0.store(COMPANY_KNOWN, company);
    }

    /// Begins an operation that uses leases, before it asks for them.
    pub fn begin_use(&self) {
        self.0.add(USING, 1);
    }

    /// Ends an operation that uses leases.
    pub fn end_use(&self) {
        self.0.add(USING, u64::MAX);
    }

    /// Whether the session has operations that use leases, or are about to ask for them.
    pub fn is_using(&self) -> bool {
        self.0.load(USING) != 0
    }

    /// Returns the quota version.
    ///
    /// It changes with every limit, and whenever SharedFS takes back quota balances of the last version.
    pub fn quota_version(&self) -> QuotaVersion {
        QuotaVersion(self.0.load(QUOTA))
    }

    /// Begins a quota version.
    ///
    /// The caller must seal the log next, so that no record is appended that was paid for under the last version.
    pub fn set_quota_version(&self, version: QuotaVersion) {
        self.0.store(QUOTA, version.0);
    }

    /// Returns the extent version: extents that the session read under an earlier version are invalid.
    ///
    /// A version ends with a life of SharedFS, which may have put data into blocks and died before the commit. It ends
    /// too when SharedFS takes away blocks that the session might still read.
    pub fn extent_version(&self) -> ExtentVersion {
        ExtentVersion(self.0.load(EXTENT_VERSION))
    }

    /// Begins an extent version.
    ///
    /// All sessions see it before any block is written that the program writes later.
    pub fn raise_extent_version(&self) {
        self.0.store(EXTENT_VERSION, self.extent_version().next().0);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Returns the segment version.
    ///
    /// A segment that was mapped under an earlier version may be another segment now: the number of a removed segment
    /// is used again.
    pub fn segment_version(&self) -> SegmentVersion {
        SegmentVersion(self.0.load(SEGMENT_VERSION))
    }

    /// Begins a segment version, and with it an extent version.
    pub fn raise_segment_version(&self) {
        self.0.store(SEGMENT_VERSION, self.segment_version().next().0);
        self.raise_extent_version();
    }

    /// Returns the released position.
    ///
    /// The session no longer reads blocks that updates before this position have replaced in part.
    pub fn released(&self) -> LogPosition {
        LogPosition(self.0.load(RELEASED))
    }

    /// Publishes the released position.
    pub fn set_released(&self, position: LogPosition) {
        self.0.store(RELEASED, position.0);
    }

    /// Takes credit of one kind for an update, all of it or none; `None` if too little is left.
    pub fn take_credit(&self, credit: Credit, kind: CreditKind) -> Option<TakenCredit> {
        let (blocks, metadata) = kind.offsets();
        let version = self.take(blocks, credit.blocks)?;
        let Some(metadata_version) = self.take(metadata, credit.metadata_bytes) else {
            self.give_within(blocks, credit.blocks, Some(version));
            return None;
        };
        Some(TakenCredit { credit, kind, versions: (version, metadata_version) })
    }

    /// Gives back credit of an update that was not made, unless SharedFS has taken it back already.
    pub fn give_back(&self, taken: &TakenCredit) {
        let (blocks, metadata) = taken.kind.offsets();
        self.give_within(blocks, taken.credit.blocks, Some(taken.versions.0));
        self.give_within(metadata, taken.credit.metadata_bytes, Some(taken.versions.1));
    }

    /// Adds credit that SharedFS grants.
    pub fn give_credit(&self, credit: Credit, kind: CreditKind) {
        let (blocks, metadata) = kind.offsets();
        self.give_within(blocks, credit.blocks, None);
        self.give_within(metadata, credit.metadata_bytes, None);
    }

    /// Returns the unused credit of one kind.
    pub fn credit_left(&self, kind: CreditKind) -> Credit {
        let (blocks, metadata) = kind.offsets();
        let amount = |word| self.0.load(word) & CREDIT_AMOUNT;
        Credit { blocks: amount(blocks), metadata_bytes: amount(metadata) }
    }

    /// Takes away all unused credit, and returns how much it was.
    ///
    /// It begins another version: credit that a thread has taken before does not come back. Once the log is sealed and
    /// applied, the session has no credit left but what it was granted since.
    pub fn recall_credit(&self) -> Credit {
        CreditKind::ALL.iter().fold(Credit::default(), |sum, kind| {
            let (blocks, metadata) = kind.offsets();
            Credit {
                blocks: sum.blocks.saturating_add(self.recall_word(blocks)),
                metadata_bytes: sum.metadata_bytes.saturating_add(self.recall_word(metadata)),
            }
        })
    }

    /// Takes an amount out of a word, and returns the word's version.
    fn take(&self, word: ControlWord, amount: u64) -> Option<u64> {
        let mut current = self.0.load(word);
        while current & CREDIT_AMOUNT >= amount {
            if amount == 0 {
                return Some(current & !CREDIT_AMOUNT);
            }
            match self.0.exchange(word, current, current - amount) {
                Ok(_) => return Some(current & !CREDIT_AMOUNT),
                Err(found) => current = found,
            }
        }
        None
    }

    /// Adds an amount to a word, if it has this version or none is named.
    fn give_within(&self, word: ControlWord, amount: u64, version: Option<u64>) {
        if amount == 0 {
            return;
        }
        let mut current = self.0.load(word);
        for _ in 0..CREDIT_TRIES {
            let own = current & !CREDIT_AMOUNT;
            if version.is_some_and(|version| version != own) {
                return;
            }
            let sum = (current & CREDIT_AMOUNT).saturating_add(amount).min(CREDIT_AMOUNT);
            match self.0.exchange(word, current, own | sum) {
                Ok(_) => return,
                Err(found) => current = found,
            }
        }
    }

    fn recall_word(&self, word: ControlWord) -> u64 {
        let next = |word: u64| (word & !CREDIT_AMOUNT).wrapping_add(CREDIT_AMOUNT + 1);
        let mut current = self.0.load(word);
        for _ in 0..CREDIT_TRIES {
            match self.0.exchange(word, current, next(current)) {
                Ok(_) => return current & CREDIT_AMOUNT,
                Err(found) => current = found,
            }
        }
        self.0.store(word, next(current));
        current & CREDIT_AMOUNT
    }

    /// Counts an operation in a lane, and returns the lane's count before.
    ///
    /// All threads share lane 0. Each other lane belongs to one thread, which counts there without an atomic addition.
    #[inline]
    pub fn count_operation(&self, kind: OperationKind, lane: u32) -> u64 {
        let word = Self::operations_at(kind, lane);
        if lane == 0 || lane >= OPERATION_LANES {
            return self.0.add(word, 1);
        }
        let before = self.0.load(word);
        self.0.store(word, before.wrapping_add(1));
        before
    }

    /// Returns how many operations were counted in a lane.
    #[inline]
    pub fn operations_in(&self, kind: OperationKind, lane: u32) -> u64 {
        self.0.load(Self::operations_at(kind, lane))
    }

    #[inline]
    fn operations_at(kind: OperationKind, lane: u32) -> ControlWord {
        let lane = if lane < OPERATION_LANES { lane } else { 0 };
        LANES.row(lane.into()).word(LANE_WORDS.word(kind as u64))
    }

    /// Counts the time of an operation that was measured.
    pub fn record_latency(&self, kind: OperationKind, nanoseconds: u64) {
        self.0.add(SAMPLES.row(kind as u64).word(BUCKETS.word(latency_bucket(nanoseconds) as u64)), 1);
    }

    /// Returns the operations that the session has counted, by kind.
    pub fn operations(&self) -> Vec<OperationCounts> {
        let counts = |kind: &OperationKind| {
            let lanes = (0..OPERATION_LANES).map(|lane| self.operations_in(*kind, lane));
            let operations = lanes.fold(0u64, u64::saturating_add);
            let words = (0..BUCKETS.rows()).map(|bucket| SAMPLES.row(*kind as u64).word(BUCKETS.word(bucket)));
            let mut sampled: Vec<u64> = words.map(|word| self.0.load(word)).collect();
            sampled.truncate(sampled.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1));
            OperationCounts { operations, sampled }
        };
        OperationKind::ALL.iter().map(counts).collect()
    }

    fn lock_slots(&self) -> LockSlots<'_, M, CONTROL_BYTES> {
        LockSlots { memory: &self.0, at: LOCKS_PART }
    }

    /// Returns the slot that holds the session's record locks on a file, if one does. The session calls this.
    pub fn lock_slot_of(&self, inode: InodeId) -> Option<u32> {
        self.lock_slots().find_slot(inode)
    }

    /// Claims a free slot for a file's record locks, shared and empty; `None` if no slot is free.
    ///
    /// The session calls this, one thread at a time.
    pub fn claim_lock_slot(&self, inode: InodeId) -> Option<u32> {
        self.lock_slots().claim(inode)
    }

    /// Frees a slot with the locks in it; `false` if SharedFS has just changed its state.
    ///
    /// The session calls this, under the same lock as [`Self::change_locks`].
    pub fn free_lock_slot(&self, slot: u32) -> bool {
        self.lock_slots().free(slot)
    }

    /// Returns the content of a slot, for the session.
    ///
    /// The session calls this under the same lock as [`Self::change_locks`].
    pub fn lock_slot(&self, slot: u32) -> (InodeId, LockSlotState, LockList) {
        self.lock_slots().read_content(slot)
    }

    /// Changes the locks in a slot, if the slot is that file's and in that state.
    ///
    /// `change` returns whether the slot had room. The session calls this, one thread at a time for each file.
    #[inline]
    pub fn change_locks(
        &self,
        slot: u32,
        inode: InodeId,
        state: LockSlotState,
        change: impl FnOnce(&mut LockList) -> bool,
    ) -> LockChange {
        self.lock_slots().change(slot, inode, state, change)
    }

    /// Returns a slot as a request describes it to SharedFS.
    ///
    /// The session calls this under the same lock as [`Self::change_locks`].
    pub fn lock_slot_at_present(&self, slot: u32) -> LockSlot {
        self.lock_slots().at_present(slot)
    }

    /// Delegates a file's record locks to the session, and writes them into the slot.
    ///
    /// Returns `false` if the slot differs from the session's description. SharedFS calls this while the session waits
    /// for its answer.
    pub fn delegate_locks(&self, slot: LockSlot, inode: InodeId, locks: &[LockedRange]) -> bool {
        self.lock_slots().delegate(slot, inode, locks)
    }

    /// Recalls delegated locks, and returns the session's locks on the file. SharedFS calls this.
    pub fn recall_locks(&self, slot: u32, inode: InodeId) -> Vec<LockedRange> {
        self.lock_slots().recall(slot, inode)
    }

    /// Returns all slots in use, with their locks. SharedFS calls this after a restart.
    pub fn claimed_lock_slots(&self) -> Vec<(u32, InodeId, LockSlotState, Vec<LockedRange>)> {
        self.lock_slots().claimed()
    }

    /// Returns the slot through which the session asks SharedFS without a message.
    pub fn request_slot(&self) -> RequestSlot<'_, M, CONTROL_BYTES> {
        RequestSlot::new(&self.0, REQUEST_SLOT_PART)
    }
}

impl<M: Persistent + Borrow<Mapping>> ControlPage<M> {
    /// Sleeps while [`Self::company`] has this value. It may return sooner.
    pub fn wait_company(&self, company: u64) {
        self.memory().borrow().wait(COMPANY.offset(), company as u32);
    }

    /// Sleeps while no sessions of programs exist. It may return sooner.
    pub fn wait_programs(&self) {
        self.memory().borrow().wait(PROGRAMS.offset(), 0);
    }
}

impl ControlPage<Arc<SharedMemory>> {
    /// Wakes a thread that sleeps until sessions of programs exist.
    pub fn wake_programs(&self) {
        self.memory().wake(PROGRAMS.offset());
    }

    /// Wakes the threads that sleep until the company changes.
    pub fn wake_company(&self) {
        self.memory().wake(COMPANY.offset());
    }
}

/// The word of a lease slot. Its generation changes with every grant and every revocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseWord(pub u64);

impl LeaseWord {
    /// Makes the word of a lease.
    #[must_use]
    pub fn new(generation: u64, scope: LeaseScope, write: bool) -> Self {
        let scope: u64 = match scope {
            LeaseScope::Node => 0,
            LeaseScope::Subtree => 1,
            LeaseScope::Files => 2,
        };
        Self(generation << 16 | scope << 8 | if write { 2 } else { 1 })
    }

    /// Makes the word of a revoked lease.
    #[must_use]
    pub fn revoked(generation: u64) -> Self {
        Self(generation << 16)
    }

    /// Returns the generation.
    #[must_use]
    pub fn generation(self) -> u64 {
        self.0 >> 16
    }

    /// Whether it lets the holder read.
    #[must_use]
    pub fn may_read(self) -> bool {
        self.0 & 0xff != 0
    }

    /// Whether it lets the holder write.
    #[must_use]
    pub fn may_write(self) -> bool {
        self.0 & 0xff == 2
    }

    /// Returns the scope that the lease covers.
    #[must_use]
    pub fn scope(self) -> LeaseScope {
        match self.0 >> 8 & 0xff {
            1 => LeaseScope::Subtree,
            2 => LeaseScope::Files,
            _ => LeaseScope::Node,
        }
    }
}

/// A session's lease table.
///
/// SharedFS writes it; for a session, it is [`Readable`].
#[derive(Debug)]
pub struct LeaseTable<M, A = Writable>(CheckedMemory<M, LEASE_TABLE_BYTES, A>);

impl<M: Persistent> LeaseTable<M, Readable> {
    /// Takes memory as a table that is only read; `None` if it is shorter than [`LEASE_TABLE_BYTES`].
    pub fn read_only(memory: M) -> Option<Self> {
        CheckedMemory::read_only(memory).ok().map(Self)
    }
}

impl<M: Persistent> LeaseTable<M> {
    /// Takes memory as a lease table; `None` if it is shorter than [`LEASE_TABLE_BYTES`], or read-only.
    pub fn new(memory: M) -> Option<Self> {
        CheckedMemory::new(memory).ok().map(Self)
    }

    /// Makes an empty table for a session.
    pub fn format(&self, session: SessionId, token: u64) {
        self.0.store(LEASE_MAGIC_AT, LEASE_MAGIC);
        self.0.store(OWNER, session.0);
        self.0.store(TOKEN, token);
    }

    /// Clears the first slots.
    pub fn clear(&self, slots: u32) {
        self.0.clear_rows(LEASE_ROWS, slots.into());
    }

    /// Writes a slot: the word last, since it makes the rest valid.
    pub fn set(&self, slot: u32, word: LeaseWord, inode: InodeId) {
        let row = LEASE_ROWS.row(slot.into());
        self.0.store(row.word(SECOND), inode.0);
        self.0.store(row.word(FIRST), word.0);
    }

    /// Returns the bytes of the file up to the end of so many slots.
    pub const fn bytes_of(slots: u32) -> u64 {
        TABLE + slots as u64 * SLOT_BYTES
    }
}

impl<M: Persistent, A> LeaseTable<M, A> {
    /// Returns the memory.
    pub fn memory(&self) -> &M {
        self.0.memory()
    }

    /// Returns the session and its secret; `None` if this is not a lease table.
    pub fn owner(&self) -> Option<(SessionId, u64)> {
        (self.0.load(LEASE_MAGIC_AT) == LEASE_MAGIC).then(|| (SessionId(self.0.load(OWNER)), self.0.load(TOKEN)))
    }

    /// Returns a slot's current word.
    #[inline]
    pub fn word(&self, slot: u32) -> LeaseWord {
        LeaseWord(self.0.load(LEASE_ROWS.row(slot.into()).word(FIRST)))
    }

    /// Returns a slot's inode.
    pub fn inode(&self, slot: u32) -> InodeId {
        InodeId(self.0.load(LEASE_ROWS.row(slot.into()).word(SECOND)))
    }
}

#[cfg(test)]
mod tests {
    use ashlar_pmem::{Mapping, MappingAccess, Medium};

    use super::*;

    pub(super) fn page(access: MappingAccess) -> ControlPage<Mapping> {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(CONTROL_BYTES).expect("a length");
        ControlPage::new(Mapping::map(&file, CONTROL_BYTES, access, Medium::MEMORY).expect("mapped")).expect("a page")
    }

    #[test]
    fn operations_are_counted_by_kind_over_all_lanes() {
        let page = page(MappingAccess::ReadWrite);
        page.format(SessionId(7));
        page.give_credit(Credit { blocks: 5, metadata_bytes: 6 }, CreditKind::Kept);
        assert!(page.open_handle(InodeId(9)));
        for lane in 0..OPERATION_LANES + 2 {
            for (number, kind) in (1..).zip(OperationKind::ALL) {
                // Threads beyond the last lane use the lane that all threads share.
                let before = page.count_operation(kind, lane);
                assert_eq!(before, u64::from(lane.saturating_sub(OPERATION_LANES - 1)), "lane {lane}");
                (0..number).for_each(|_| page.record_latency(kind, 1 << (10 * number)));
            }
        }
        for (number, counts) in (1..).zip(page.operations()) {
            assert_eq!(counts.operations, u64::from(OPERATION_LANES + 2));
            let expected = number * u64::from(OPERATION_LANES + 2);
            assert_eq!(counts.sampled.len(), latency_bucket(1 << (10 * number)) + 1);
            assert_eq!((counts.sampled.iter().sum::<u64>(), counts.sampled.last()), (expected, Some(&expected)));
        }
        page.record_latency(OperationKind::Sync, u64::MAX);
        assert_eq!(page.operations()[3].sampled.len(), LATENCY_BUCKETS);
        // No other word was overwritten.
        assert_eq!((page.session(), page.open_inodes()), (Some(SessionId(7)), vec![InodeId(9)]));
        assert_eq!(page.recall_credit(), Credit { blocks: 5, metadata_bytes: 6 });
    }

    #[test]
    fn recalled_credit_does_not_come_back() {
        let page = page(MappingAccess::ReadWrite);
        page.format(SessionId(7));
        let credit = |blocks, metadata_bytes| Credit { blocks, metadata_bytes };
        let take = |amount| page.take_credit(amount, CreditKind::Common);
        page.give_credit(credit(10, 100), CreditKind::Common);
        page.give_credit(credit(3, 0), CreditKind::Kept);
        assert_eq!((take(credit(11, 0)), take(credit(1, 101))), (None, None));
        assert_eq!(page.credit_left(CreditKind::Common), credit(10, 100), "all or none");
        let (given, taken) = (take(credit(4, 40)).expect("there"), take(credit(2, 20)).expect("there"));
        page.give_back(&given);
        assert_eq!(page.credit_left(CreditKind::Common), credit(8, 80));
        assert_eq!(page.recall_credit(), credit(11, 80));
        page.give_credit(credit(5, 50), CreditKind::Common);
        page.give_back(&taken);
        assert_eq!(page.credit_left(CreditKind::Common), credit(5, 50), "it was taken back before");
        // Versions begin anew after the last one, and amounts never reach into them.
        (0..1 << 16).for_each(|_| _ = page.recall_credit());
        page.give_credit(credit(u64::MAX, u64::MAX), CreditKind::Common);
        page.give_credit(credit(1, 1), CreditKind::Common);
        assert_eq!(page.recall_credit(), credit(CREDIT_AMOUNT, CREDIT_AMOUNT));
        assert_eq!(page.recall_credit(), Credit::default());
    }

    #[test]
    fn threads_sharing_a_lane_lose_no_count() {
        let page = page(MappingAccess::ReadWrite);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        page.count_operation(OperationKind::Read, 0);
                    }
                });
            }
        });
        assert_eq!(page.operations()[0].operations, 40_000);
    }

    #[test]
    fn forged_counts_stay_harmless() {
        let page = page(MappingAccess::ReadWrite);
        page.memory().store(OPERATIONS, &[0xff; (TABLE - OPERATIONS) as usize]).expect("stored");
        assert!(page.operations().iter().all(|counts| counts.operations == u64::MAX));
        page.count_operation(OperationKind::Write, 3);
        assert_eq!(page.operations()[1].operations, u64::MAX);
    }
}
