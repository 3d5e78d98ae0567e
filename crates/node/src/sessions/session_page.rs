//! Facts about a session that SharedFS must know after its own restart.
//!
//! They stand in the first page of the session's lease table, which the session can only read. Each fact is one word,
//! or guarded by one, so a kill between two stores never shows half a fact.
//!
//! ```text
//!   64  identity                                                              (`identity.rs`)
//! 2048  validated:8                       records before it were validated under the leases of their time
//! 2056  granted blocks:8  metadata:8      credit granted so far, less what was recalled
//! 2072  revoking:8                        a lease is being taken, or its slot passes on, and records written under it
//!                                         are not validated yet
//! 2080  stale until:8                     milliseconds since boot until which a mount's kernel may believe stale state
//! 2088  mount's device:8                  the device number that its files show, 0 if it is no mount
//! 2096  lease slots:8                     of the table, that have room; 0 if all have
//! 2104  other locks:8                     1: it has had a lock that does not stand in its control page
//! 2112  4 times  position+1:8 blocks:8 metadata:8 unused:8   cost of all records before the position
//! 2304  128 times  first inode << 16 | count                 inode numbers granted, oldest overwritten
//! 3328  16 times  inode:8                 files whose record locks are delegated, by the control page's slot
//! 3456  rights:8                          words behind the lease slots that were ever used (`kept_rights.rs`)
//! 3464  terms:8                           of a mount: 1 read-only, 2 sessions for all, users << 16, groups << 32
//! 3472  64 times  number:4                users and then groups whose programs may have sessions by the mount
//! 3728  log bytes:8                       of the log's file as SharedFS made it
//! 3736  barred:8                          position+1 of the first record that may never be applied; 0: there is none
//! ```

use std::sync::Arc;

use ashlar_pmem::{CheckedMemory, OutOfBounds, PartAt, Persistent, RowsAt, SharedMemory, WordAt};
use ashlar_types::{InodeId, LogPosition};
use ashlar_wire::{ADMITTED_MAX, Admission, Credit, LEASE_SLOTS, LOCK_SLOTS, MountTerms};

/// Bytes of the page.
const PAGE_BYTES: u64 = 4096;

/// The offset of a word in the page.
type PageWord = WordAt<PAGE_BYTES>;

const VALIDATED: PageWord = PageWord::new(2048);
const GRANTED: PartAt<PAGE_BYTES, 16> = PartAt::new(2056);
const GRANTED_BLOCKS: WordAt<16> = WordAt::new(0);
const GRANTED_METADATA: WordAt<16> = WordAt::new(8);
const REVOKING: PageWord = PageWord::new(2072);
const STALE_UNTIL: PageWord = PageWord::new(2080);
const MOUNT_DEVICE: PageWord = PageWord::new(2088);
const LEASE_ROOM: PageWord = PageWord::new(2096);
const OTHER_LOCKS: PageWord = PageWord::new(2104);
const COSTS: RowsAt<PAGE_BYTES, COST_BYTES> = RowsAt::new(2112, 4);
const COST_BYTES: u64 = 32;
const COST_POSITION: WordAt<COST_BYTES> = WordAt::new(0);
const COST_BLOCKS: WordAt<COST_BYTES> = WordAt::new(8);
const COST_METADATA: WordAt<COST_BYTES> = WordAt::new(16);
const RANGES: RowsAt<PAGE_BYTES, 8> = RowsAt::new(2304, RANGE_SLOTS as u64);
const RANGE_SLOTS: usize = 128;
const DELEGATED: RowsAt<PAGE_BYTES, 8> = RowsAt::new(3328, LOCK_SLOTS as u64);
const RIGHTS: PageWord = PageWord::new(3456);
const TERMS: PageWord = PageWord::new(3464);
const ADMITTED: PartAt<PAGE_BYTES, { 4 * ADMITTED_MAX as u64 }> = PartAt::new(3472);
const LOG_BYTES: PageWord = PageWord::new(3728);
const BARRED: PageWord = PageWord::new(3736);
/// All that this module writes.
const FACTS: PartAt<PAGE_BYTES, { 3744 - 2048 }> = PartAt::new(2048);
const _: () = {
    assert!(COSTS.row(COSTS.rows() - 1).offset() + COST_BYTES <= RANGES.row(0).offset());
    assert!(RANGES.word(RANGES.rows() - 1).offset() + 8 <= DELEGATED.row(0).offset());
    assert!(DELEGATED.word(DELEGATED.rows() - 1).offset() + 8 <= RIGHTS.offset());
    assert!(ADMITTED.offset() + 4 * ADMITTED_MAX as u64 <= LOG_BYTES.offset());
};

/// The most inode numbers in one range: the count must fit 16 bits.
pub const RANGE_MAX: u64 = 0xffff;

/// The page of a session that states these facts. Only SharedFS writes it.
///
/// The memory is the session's lease table, which begins with the page.
#[derive(Clone, Debug)]
pub struct SessionPage<M = Arc<SharedMemory>>(CheckedMemory<M, PAGE_BYTES>);

impl<M: Persistent> SessionPage<M> {
    /// Takes a lease table's memory.
    ///
    /// # Errors
    /// [`OutOfBounds`] if it is shorter than the page, or read-only.
    pub fn new(memory: M) -> Result<Self, OutOfBounds> {
        CheckedMemory::new(memory).map(Self)
    }

    /// Returns the lease table's memory.
    pub fn memory(&self) -> &M {
        self.0.memory()
    }

    /// Waits until all that was noted is durable as far as the medium goes without a sync.
    pub fn fence(&self) {
        self.0.fence();
    }

    /// Formats a page with the table's room and the position of the log's begin.
    ///
    /// It states nothing else. All before that position is settled and committed.
    pub fn format_page(&self, slots: u32, position: LogPosition) {
        self.0.clear(FACTS);
        self.set_lease_room(slots);
        self.set_validated(position);
        self.set_cost_at(position, Credit::default());
    }

    /// Returns the position up to which records were validated.
    ///
    /// They were validated under the leases of their time.
    pub fn validated(&self) -> LogPosition {
        LogPosition(self.0.load(VALIDATED))
    }

    /// Sets that position.
    pub fn set_validated(&self, position: LogPosition) {
        self.0.store(VALIDATED, position.0);
    }

    /// Returns the position from which on no record of the session may be applied; `None` if there is none.
    ///
    /// The records, or a request after those before them, made SharedFS panic.
    pub fn barred(&self) -> Option<LogPosition> {
        self.0.load(BARRED).checked_sub(1).map(LogPosition)
    }

    /// Notes that position.
    pub fn set_barred(&self, position: LogPosition) {
        self.0.store(BARRED, position.0.saturating_add(1));
        self.0.flush_word(BARRED);
    }

    /// Returns whether a kill came while a lease was being taken, or while its slot passed to another inode.
    ///
    /// Records written under it may not be validated.
    pub fn is_revoking(&self) -> bool {
        self.0.load(REVOKING) != 0
    }

    /// Notes that this is about to happen to a lease, or that its records are validated.
    pub fn set_revoking(&self, revoking: bool) {
        self.0.store(REVOKING, u64::from(revoking));
    }

    /// Returns whether the session may have locks that its control page lacks.
    ///
    /// Only an earlier SharedFS knew them, and the session asks for them again.
    pub fn has_other_locks(&self) -> bool {
        self.0.load(OTHER_LOCKS) != 0
    }

    /// Notes that it is about to have such a lock.
    pub fn set_other_locks(&self) {
        self.0.store(OTHER_LOCKS, 1);
    }

    /// Returns until when a mount's kernel may be stale, in milliseconds since boot.
    pub fn stale_until_ms(&self) -> u64 {
        self.0.load(STALE_UNTIL)
    }

    /// Sets that time.
    pub fn set_stale_until_ms(&self, until_ms: u64) {
        self.0.store(STALE_UNTIL, until_ms);
    }

    /// Returns the device number that the files of the session's mount show.
    ///
    /// It is 0 before the mount has registered one. No file system has the number 0.
    pub fn mount_device(&self) -> u64 {
        self.0.load(MOUNT_DEVICE)
    }

    /// Sets that number.
    pub fn set_mount_device(&self, device: u64) {
        self.0.store(MOUNT_DEVICE, device);
    }

    /// Returns the terms of the session's mount; those of a mount that has not registered admit root alone.
    pub fn mount_terms(&self) -> MountTerms {
        let word = self.0.load(TERMS);
        let mut numbers = [0; 4 * ADMITTED_MAX];
        self.0.load_bytes(ADMITTED, &mut numbers);
        let mut numbers =
            numbers.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        let [users, groups] = [16, 32].map(|shift| (word >> shift & 0xffff) as usize);
        let users = numbers.by_ref().take(users).collect();
        let sessions = Admission { all: word & 2 != 0, users, groups: numbers.take(groups).collect() };
        MountTerms { read_only: word & 1 != 0, sessions }
    }

    /// Sets those terms, which name at most [`ADMITTED_MAX`] users and groups.
    pub fn set_mount_terms(&self, terms: &MountTerms) {
        let Admission { all, users, groups } = &terms.sessions;
        self.0.store(TERMS, 0);
        let numbers: Vec<u8> = users.iter().chain(groups).flat_map(|number| number.to_le_bytes()).collect();
        self.0.store_bytes(ADMITTED, &numbers);
        let flags = u64::from(terms.read_only) | u64::from(*all) << 1;
        self.0.store(TERMS, flags | (users.len() as u64) << 16 | (groups.len() as u64) << 32);
    }

    /// Returns how many slots of the lease table have room.
    pub fn lease_room(&self) -> u32 {
        match self.0.load(LEASE_ROOM) {
            0 => LEASE_SLOTS,
            slots => slots.min(LEASE_SLOTS.into()) as u32,
        }
    }

    /// Sets that number.
    pub fn set_lease_room(&self, slots: u32) {
        self.0.store(LEASE_ROOM, slots.into());
    }

    /// Returns the bytes of the log's file as SharedFS made it.
    pub fn log_bytes(&self) -> u64 {
        self.0.load(LOG_BYTES)
    }

    /// Sets those bytes.
    pub fn set_log_bytes(&self, bytes: u64) {
        self.0.store(LOG_BYTES, bytes);
    }

    /// Returns the file whose record locks are delegated in a slot.
    ///
    /// Returns `None` if there is none.
    pub fn delegated(&self, slot: u32) -> Option<InodeId> {
        let noted = self.0.load(DELEGATED.word(slot.into()));
        (noted != 0).then_some(InodeId(noted))
    }

    /// Notes that file, or that there is none.
    ///
    /// A file is noted before the session can see the delegation, and removed before another session gets a lock on it.
    pub fn set_delegated(&self, slot: u32, inode: Option<InodeId>) {
        self.0.store(DELEGATED.word(slot.into()), inode.map_or(0, |inode| inode.0));
    }

    /// Notes that the session has nothing delegated any more.
    pub fn clear_delegated(&self) {
        (0..LOCK_SLOTS).for_each(|slot| self.set_delegated(slot, None));
    }

    /// Returns how many words for kept rights were ever used.
    pub fn rights_used(&self) -> u32 {
        u32::try_from(self.0.load(RIGHTS)).unwrap_or(u32::MAX)
    }

    /// Sets that number.
    pub fn set_rights_used(&self, used: u32) {
        self.0.store(RIGHTS, used.into());
        self.0.flush_word(RIGHTS);
        self.0.fence();
    }

    /// Returns the credit granted, less what was recalled.
    pub fn granted(&self) -> Credit {
        let [blocks, metadata_bytes] = [GRANTED_BLOCKS, GRANTED_METADATA].map(|at| self.0.load(GRANTED.word(at)));
        Credit { blocks, metadata_bytes }
    }

    /// Sets that credit.
    ///
    /// A grant is noted before the session sees it, a recall after: a kill in between errs in the session's favour. On
    /// a disk LibFS makes the page last before its log.
    pub fn set_granted(&self, credit: Credit) {
        self.0.store(GRANTED.word(GRANTED_BLOCKS), credit.blocks);
        self.0.store(GRANTED.word(GRANTED_METADATA), credit.metadata_bytes);
        self.0.flush(GRANTED);
        self.0.fence();
    }

    /// Returns the costs that are noted, each with the position before which its records stand.
    fn costs(&self) -> impl Iterator<Item = (LogPosition, Credit)> + '_ {
        (0..COSTS.rows()).map(|slot| COSTS.row(slot)).filter_map(|row| {
            let position = self.0.load(row.word(COST_POSITION)).checked_sub(1)?;
            let [blocks, metadata_bytes] = [COST_BLOCKS, COST_METADATA].map(|word| self.0.load(row.word(word)));
            Some((LogPosition(position), Credit { blocks, metadata_bytes }))
        })
    }

    /// Returns the cost of all records before a position, as far as it is noted.
    ///
    /// A commit up to there was about to begin. After a loss of power its note may be lost: then the note of the last
    /// earlier commit counts, in the session's favour.
    pub fn cost_before(&self, position: LogPosition) -> Credit {
        let earlier = self.costs().filter(|(noted, _)| *noted <= position);
        earlier.max_by_key(|(noted, _)| *noted).map_or(Credit::default(), |(_, cost)| cost)
    }

    /// Notes the cost before a commit up to `position` begins.
    ///
    /// The slot of the last commit stays: SharedFS does not know yet which of the two the store holds after a kill.
    pub fn set_cost_at(&self, position: LogPosition, cost: Credit) {
        if self.costs().any(|(noted, _)| noted == position) {
            return;
        }
        let slots = (0..COSTS.rows()).map(|slot| COSTS.row(slot));
        let Some(oldest) = slots.min_by_key(|row| self.0.load(row.word(COST_POSITION))) else { return };
        self.0.store(oldest.word(COST_POSITION), 0);
        self.persist(oldest);
        self.0.store(oldest.word(COST_BLOCKS), cost.blocks);
        self.0.store(oldest.word(COST_METADATA), cost.metadata_bytes);
        self.persist(oldest);
        self.0.store(oldest.word(COST_POSITION), position.0 + 1);
        self.persist(oldest);
    }

    /// Makes one noted cost durable as far as the medium goes without a sync.
    fn persist(&self, row: PartAt<PAGE_BYTES, COST_BYTES>) {
        self.0.flush(row);
        self.0.fence();
    }
}

/// The inode numbers that a session may give to inodes that it makes.
#[derive(Debug, Default)]
pub struct InodeRanges {
    /// First number and count, by slot of the page.
    slots: Vec<(u64, u64)>,
    next: usize,
    /// How many slots may be replaced before the log must be committed again.
    replaceable: usize,
}

impl InodeRanges {
    /// Reads the ranges from the page.
    ///
    /// Numbers only grow, so the newest range is the largest.
    pub fn load<M: Persistent>(SessionPage(page): &SessionPage<M>) -> Self {
        let words = (0..RANGES.rows()).map(|slot| page.load(RANGES.word(slot))).take_while(|&word| word != 0);
        let slots: Vec<_> = words.map(|word| (word >> 16, word & RANGE_MAX)).collect();
        let newest = (0..slots.len()).max_by_key(|&slot| slots[slot].0);
        Self { next: newest.map_or(0, |slot| (slot + 1) % RANGE_SLOTS), slots, replaceable: 0 }
    }

    /// Returns whether the log must be committed before the next range.
    ///
    /// The range replaces an old one, whose numbers are then refused. A start reads the log from the last commit on, so
    /// no record that uses them may be there. One commit allows for half of the slots.
    pub fn needs_commit(&self) -> bool {
        self.slots.len() == RANGE_SLOTS && self.replaceable == 0
    }

    /// Records that the log is committed.
    pub fn record_commit(&mut self) {
        self.replaceable = RANGE_SLOTS / 2;
    }

    /// Adds a range, in the page first.
    pub fn add<M: Persistent>(&mut self, SessionPage(page): &SessionPage<M>, first: InodeId, count: u64) {
        let last = (self.next + RANGE_SLOTS - 1) % RANGE_SLOTS;
        let grown = self.slots.get(last).filter(|(f, c)| f + c == first.0 && c + count <= RANGE_MAX).copied();
        let (slot, range) = grown.map_or((self.next, (first.0, count)), |(f, c)| (last, (f, c + count)));
        let at = RANGES.word(slot as u64);
        page.store(at, range.0 << 16 | range.1);
        page.flush_word(at);
        page.fence();
        if slot == self.slots.len() {
            self.slots.push(range);
        } else {
            self.replaceable = self.replaceable.saturating_sub(grown.is_none().into());
            self.slots[slot] = range;
        }
        if grown.is_none() {
            self.next = (self.next + 1) % RANGE_SLOTS;
        }
    }

    /// Returns whether the number was granted.
    pub fn contains(&self, inode: InodeId) -> bool {
        self.slots.iter().any(|&(first, count)| inode.0 >= first && inode.0 - first < count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_pmem::{CrashMedium, CrashTwin};

    fn page() -> SessionPage<CrashTwin> {
        SessionPage::new(CrashTwin::new(CrashMedium::Pages, PAGE_BYTES as usize)).expect("long enough")
    }

    #[test]
    fn ranges_survive_reload_and_oldest_is_replaced() {
        let page = page();
        let mut ranges = InodeRanges::load(&page);
        for n in 0..200 {
            ranges.add(&page, InodeId(1000 + n * 20), 10);
        }
        for ranges in [ranges, InodeRanges::load(&page)] {
            assert!(ranges.needs_commit());
            assert!(ranges.contains(InodeId(1000 + 199 * 20 + 9)));
            assert!(!ranges.contains(InodeId(1000 + 199 * 20 + 10)));
            assert!(ranges.contains(InodeId(1000 + 72 * 20)));
            assert!(!ranges.contains(InodeId(1000 + 71 * 20)), "the oldest is gone");
        }
        let mut again = InodeRanges::load(&page);
        again.add(&page, InodeId(9000), 5);
        assert!(!again.contains(InodeId(1000 + 72 * 20)) && again.contains(InodeId(9004)));
    }

    #[test]
    fn terms_of_mount_survive_reload() {
        let page = page();
        assert_eq!(page.mount_terms(), MountTerms::default());
        let full = (1..=ADMITTED_MAX as u32).map(|user| format!("user={user}")).collect::<Vec<_>>().join(",");
        for (read_only, text) in [(true, "root,user=1000,user=7,group=50"), (false, "all"), (false, &full)] {
            let terms = MountTerms { read_only, sessions: text.parse().expect("an admission") };
            page.set_mount_terms(&terms);
            assert_eq!(page.mount_terms(), terms);
        }
        page.format_page(LEASE_SLOTS, LogPosition(0));
        assert_eq!(page.mount_terms(), MountTerms::default());
    }

    #[test]
    fn adjacent_ranges_share_one_slot() {
        let page = page();
        let mut ranges = InodeRanges::load(&page);
        for n in 0..100 {
            ranges.add(&page, InodeId(16 + n * 4096), 4096);
        }
        assert!(ranges.slots.len() < 8 && InodeRanges::load(&page).contains(InodeId(16 + 100 * 4096 - 1)));
    }

    #[test]
    fn costs_of_last_and_coming_commit_are_kept() {
        let page = page();
        for n in 1..50 {
            let cost = Credit { blocks: n, metadata_bytes: 2 * n };
            page.set_cost_at(LogPosition(n * 100), cost);
            assert_eq!(page.cost_before(LogPosition(n * 100)), cost);
            assert_eq!(page.cost_before(LogPosition((n - 1) * 100)).blocks, n - 1);
        }
        assert_eq!(page.cost_before(LogPosition(4950)).blocks, 49, "the note of a later commit was lost");
        assert_eq!(page.cost_before(LogPosition(7)), Credit::default());
    }
}
