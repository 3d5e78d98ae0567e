//! Facts about a session that SharedFS must know after its own restart.
//!
//! They stand in the first page of the session's lease table, which the session can only read. Each fact is one word,
//! or guarded by one, so a kill between two stores never shows half a fact.
//!
//! ```text
//!   64  identity                                                              (`identity.rs`)
//! 2048  validated:8                       records before it were validated under the leases of their time
//! 2056  granted blocks:8  metadata:8      credit granted so far, less what was recalled
//! 2072  revoking:8                        a lease is being taken, and records written under it are not validated yet
//! 2080  stale until:8                     milliseconds since boot until which a mount's kernel may believe stale state
//! 2088  mount's device:8                  the device number that its files show, 0 if it is no mount
//! 2096  lease slots:8                     of the table, that have room; 0 if all have, as an earlier version made it
//! 2104  other locks:8                     1: it has had a lock that does not stand in its control page
//! 2112  4 times  position+1:8 blocks:8 metadata:8 unused:8   cost of all records before the position
//! 2304  128 times  first inode << 16 | count                 inode numbers granted, oldest overwritten
//! 3328  16 times  inode:8                 files whose record locks are delegated, by the control page's slot
//! 3456  rights:8                          words behind the lease slots that were ever used (`kept_rights.rs`)
//! 3464  terms:8                           of a mount: 1 read-only, 2 sessions for all, users << 16, groups << 32
//! 3472  64 times  number:4                users and then groups whose programs may have sessions by the mount
//! 3728  log bytes:8                       of the log's file as SharedFS made it; 0: an earlier version made it
//! 3736  barred:8                          position+1 of the first record that may never be applied; 0: there is none
//! ```

use ashlar_pmem::{OutOfBounds, Persistent};
use ashlar_types::{InodeId, LogPosition};
use ashlar_wire::{ADMITTED_MAX, Admission, Credit, LEASE_SLOTS, LOCK_SLOTS, MountTerms};

const VALIDATED: u64 = 2048;
const GRANTED_BLOCKS: u64 = 2056;
const GRANTED_METADATA: u64 = 2064;
const REVOKING: u64 = 2072;
const STALE_UNTIL: u64 = 2080;
const MOUNT_DEVICE: u64 = 2088;
const LEASE_ROOM: u64 = 2096;
const OTHER_LOCKS: u64 = 2104;
const COSTS: u64 = 2112;
const COST_SLOTS: u64 = 4;
const COST_BYTES: u64 = 32;
const RANGES: u64 = 2304;
const RANGE_SLOTS: u64 = 128;
const DELEGATED: u64 = 3328;
const _: () = assert!(COSTS + COST_SLOTS * COST_BYTES <= RANGES && RANGES + 8 * RANGE_SLOTS <= DELEGATED);
const RIGHTS: u64 = DELEGATED + 8 * LOCK_SLOTS as u64;
const TERMS: u64 = RIGHTS + 8;
const ADMITTED: u64 = TERMS + 8;
const LOG_BYTES: u64 = ADMITTED + 4 * ADMITTED_MAX as u64;
const BARRED: u64 = LOG_BYTES + 8;
const PAGE_END: u64 = BARRED + 8;
const _: () = assert!(PAGE_END <= 4096);

/// The most inode numbers in one range: the count must fit 16 bits.
pub const RANGE_MAX: u64 = 0xffff;

/// Formats a page with the table's room and the position of the log's begin.
///
/// It states nothing else. All before that position is settled and committed.
pub fn format_page(page: &impl Persistent, slots: u32, position: LogPosition) -> Result<(), OutOfBounds> {
    let noted = (VALIDATED..PAGE_END).step_by(8);
    noted.filter(|at| page.load_u64(*at).is_ok_and(|word| word != 0)).try_for_each(|at| page.store_u64(at, 0))?;
    set_lease_room(page, slots)?;
    set_validated(page, position)?;
    set_cost_at(page, position, Credit::default())
}

/// Returns the position up to which records were validated.
///
/// They were validated under the leases of their time.
pub fn validated(page: &impl Persistent) -> LogPosition {
    LogPosition(page.load_u64(VALIDATED).unwrap_or(0))
}

/// Sets that position.
pub fn set_validated(page: &impl Persistent, position: LogPosition) -> Result<(), OutOfBounds> {
    page.store_u64(VALIDATED, position.0)
}

/// Returns the position from which on no record of the session may be applied; `None` if there is none.
///
/// The records, or a request after those before them, made SharedFS panic.
pub fn barred(page: &impl Persistent) -> Option<LogPosition> {
    page.load_u64(BARRED).unwrap_or(0).checked_sub(1).map(LogPosition)
}

/// Notes that position.
pub fn set_barred(page: &impl Persistent, position: LogPosition) -> Result<(), OutOfBounds> {
    page.store_u64(BARRED, position.0.saturating_add(1))?;
    page.flush(BARRED, 8)
}

/// Returns whether a kill came while a lease was being taken.
///
/// Records written under it may not be validated.
pub fn is_revoking(page: &impl Persistent) -> bool {
    page.load_u64(REVOKING).unwrap_or(0) != 0
}

/// Notes that a lease is about to be taken, or that its records are validated.
pub fn set_revoking(page: &impl Persistent, revoking: bool) -> Result<(), OutOfBounds> {
    page.store_u64(REVOKING, u64::from(revoking))
}

/// Returns whether the session may have locks that its control page lacks.
///
/// Only an earlier SharedFS knew them, and the session asks for them again.
pub fn has_other_locks(page: &impl Persistent) -> bool {
    page.load_u64(OTHER_LOCKS).unwrap_or(0) != 0
}

/// Notes that it is about to have such a lock.
pub fn set_other_locks(page: &impl Persistent) -> Result<(), OutOfBounds> {
    page.store_u64(OTHER_LOCKS, 1)
}

/// Returns until when a mount's kernel may be stale, in milliseconds since boot.
pub fn stale_until_ms(page: &impl Persistent) -> u64 {
    page.load_u64(STALE_UNTIL).unwrap_or(0)
}

/// Sets that time.
pub fn set_stale_until_ms(page: &impl Persistent, until_ms: u64) -> Result<(), OutOfBounds> {
    page.store_u64(STALE_UNTIL, until_ms)
}

/// Returns the device number that the files of the session's mount show.
///
/// It is 0 before the mount has registered one. No file system has the number 0.
pub fn mount_device(page: &impl Persistent) -> u64 {
    page.load_u64(MOUNT_DEVICE).unwrap_or(0)
}

/// Sets that number.
pub fn set_mount_device(page: &impl Persistent, device: u64) -> Result<(), OutOfBounds> {
    page.store_u64(MOUNT_DEVICE, device)
}

/// Returns the terms of the session's mount; those of a mount that has not registered admit root alone.
pub fn mount_terms(page: &impl Persistent) -> MountTerms {
    let word = page.load_u64(TERMS).unwrap_or(0);
    let mut numbers = [0; 4 * ADMITTED_MAX];
    if page.load(ADMITTED, &mut numbers).is_err() {
        return MountTerms::default();
    }
    let mut numbers = numbers.chunks_exact(4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    let [users, groups] = [16, 32].map(|shift| (word >> shift & 0xffff) as usize);
    let users = numbers.by_ref().take(users).collect();
    let sessions = Admission { all: word & 2 != 0, users, groups: numbers.take(groups).collect() };
    MountTerms { read_only: word & 1 != 0, sessions }
}

/// Sets those terms, which name at most [`ADMITTED_MAX`] users and groups.
pub fn set_mount_terms(page: &impl Persistent, terms: &MountTerms) -> Result<(), OutOfBounds> {
    let Admission { all, users, groups } = &terms.sessions;
    page.store_u64(TERMS, 0)?;
    let numbers: Vec<u8> = users.iter().chain(groups).flat_map(|number| number.to_le_bytes()).collect();
    page.store(ADMITTED, &numbers)?;
    let flags = u64::from(terms.read_only) | u64::from(*all) << 1;
    page.store_u64(TERMS, flags | (users.len() as u64) << 16 | (groups.len() as u64) << 32)
}

/// Returns how many slots of the lease table have room.
pub fn lease_room(page: &impl Persistent) -> u32 {
    match page.load_u64(LEASE_ROOM) {
        Ok(slots @ 1..) => slots.min(LEASE_SLOTS.into()) as u32,
        _ => LEASE_SLOTS,
    }
}

/// Sets that number.
pub fn set_lease_room(page: &impl Persistent, slots: u32) -> Result<(), OutOfBounds> {
    page.store_u64(LEASE_ROOM, slots.into())
}

/// Returns the bytes of the log's file as SharedFS made it; `None` if an earlier version did.
pub fn log_bytes(page: &impl Persistent) -> Option<u64> {
    page.load_u64(LOG_BYTES).ok().filter(|&bytes| bytes != 0)
}

/// Sets those bytes.
pub fn set_log_bytes(page: &impl Persistent, bytes: u64) -> Result<(), OutOfBounds> {
    page.store_u64(LOG_BYTES, bytes)
}

/// Returns the file whose record locks are delegated in a slot.
///
/// Returns `None` if there is none.
pub fn delegated(page: &impl Persistent, slot: u32) -> Option<InodeId> {
    let noted = page.load_u64(DELEGATED + 8 * u64::from(slot % LOCK_SLOTS)).unwrap_or(0);
    (noted != 0).then_some(InodeId(noted))
}

/// Notes that file, or that there is none.
///
/// A file is noted before the session can see the delegation, and removed before another session gets a lock on it.
pub fn set_delegated(page: &impl Persistent, slot: u32, inode: Option<InodeId>) -> Result<(), OutOfBounds> {
    page.store_u64(DELEGATED + 8 * u64::from(slot % LOCK_SLOTS), inode.map_or(0, |inode| inode.0))
}

/// Notes that the session has nothing delegated any more.
pub fn clear_delegated(page: &impl Persistent) -> Result<(), OutOfBounds> {
    (0..LOCK_SLOTS).try_for_each(|slot| set_delegated(page, slot, None))
}

/// Returns how many words for kept rights were ever used.
pub fn rights_used(page: &impl Persistent) -> u32 {
    page.load_u64(RIGHTS).map_or(0, |used| u32::try_from(used).unwrap_or(u32::MAX))
}

/// Sets that number.
pub fn set_rights_used(page: &impl Persistent, used: u32) -> Result<(), OutOfBounds> {
    page.store_u64(RIGHTS, used.into())?;
    page.flush(RIGHTS, 8)?;
    page.fence();
    Ok(())
}

/// Returns the credit granted, less what was recalled.
pub fn granted(page: &impl Persistent) -> Credit {
    Credit {
        blocks: page.load_u64(GRANTED_BLOCKS).unwrap_or(0),
        metadata_bytes: page.load_u64(GRANTED_METADATA).unwrap_or(0),
    }
}

/// Sets that credit.
///
/// A grant is noted before the session sees it, a recall after: a kill in between errs in the session's favour. On a
/// disk LibFS makes the page last before its log.
pub fn set_granted(page: &impl Persistent, credit: Credit) -> Result<(), OutOfBounds> {
    page.store_u64(GRANTED_BLOCKS, credit.blocks)?;
    page.store_u64(GRANTED_METADATA, credit.metadata_bytes)?;
    page.flush(GRANTED_BLOCKS, 16)?;
    page.fence();
    Ok(())
}

/// Returns the costs that are noted, each with the position before which its records stand.
fn costs(page: &impl Persistent) -> impl Iterator<Item = (LogPosition, Credit)> + '_ {
    (0..COST_SLOTS).map(|slot| COSTS + slot * COST_BYTES).filter_map(move |at| {
        let position = page.load_u64(at).ok()?.checked_sub(1)?;
        let cost = Credit { blocks: page.load_u64(at + 8).ok()?, metadata_bytes: page.load_u64(at + 16).ok()? };
        Some((LogPosition(position), cost))
    })
}

/// Returns the cost of all records before a position, as far as it is noted.
///
/// A commit up to there was about to begin. After a loss of power its note may be lost: then the note of the last
/// earlier commit counts, in the session's favour.
pub fn cost_before(page: &impl Persistent, position: LogPosition) -> Credit {
    let earlier = costs(page).filter(|(noted, _)| *noted <= position);
    earlier.max_by_key(|(noted, _)| *noted).map_or(Credit::default(), |(_, cost)| cost)
}

/// Notes the cost before a commit up to `position` begins.
///
/// The slot of the last commit stays: SharedFS does not know yet which of the two the store holds after a kill.
pub fn set_cost_at(page: &impl Persistent, position: LogPosition, cost: Credit) -> Result<(), OutOfBounds> {
    if costs(page).any(|(noted, _)| noted == position) {
        return Ok(());
    }
    let mut oldest = COSTS;
    for slot in 1..COST_SLOTS {
        let at = COSTS + slot * COST_BYTES;
        if page.load_u64(at)? < page.load_u64(oldest)? {
            oldest = at;
        }
    }
    page.store_u64(oldest, 0)?;
    persist(page, oldest)?;
    page.store_u64(oldest + 8, cost.blocks)?;
    page.store_u64(oldest + 16, cost.metadata_bytes)?;
    persist(page, oldest)?;
    page.store_u64(oldest, position.0 + 1)?;
    persist(page, oldest)
}

/// Makes one noted cost durable as far as the medium goes without a sync.
fn persist(page: &impl Persistent, at: u64) -> Result<(), OutOfBounds> {
    page.flush(at, COST_BYTES)?;
    page.fence();
    Ok(())
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
    pub fn load(page: &impl Persistent) -> Self {
        let slots: Vec<_> = (0..RANGE_SLOTS)
            .map_while(|slot| page.load_u64(RANGES + 8 * slot).ok().filter(|&word| word != 0))
            .map(|word| (word >> 16, word & RANGE_MAX))
            .collect();
        let newest = (0..slots.len()).max_by_key(|&slot| slots[slot].0);
        Self { next: newest.map_or(0, |slot| (slot + 1) % RANGE_SLOTS as usize), slots, replaceable: 0 }
    }

    /// Returns whether the log must be committed before the next range.
    ///
    /// The range replaces an old one, whose numbers are then refused. A start reads the log from the last commit on, so
    /// no record that uses them may be there. One commit allows for half of the slots.
    pub fn needs_commit(&self) -> bool {
        self.slots.len() == RANGE_SLOTS as usize && self.replaceable == 0
    }

    /// Records that the log is committed.
    pub fn record_commit(&mut self) {
        self.replaceable = RANGE_SLOTS as usize / 2;
    }

    /// Adds a range, in the page first.
    pub fn add(&mut self, page: &impl Persistent, first: InodeId, count: u64) -> Result<(), OutOfBounds> {
        let last = (self.next + RANGE_SLOTS as usize - 1) % RANGE_SLOTS as usize;
        let grown = self.slots.get(last).filter(|(f, c)| f + c == first.0 && c + count <= RANGE_MAX).copied();
        let (slot, range) = grown.map_or((self.next, (first.0, count)), |(f, c)| (last, (f, c + count)));
        let at = RANGES + 8 * slot as u64;
        page.store_u64(at, range.0 << 16 | range.1)?;
        page.flush(at, 8)?;
        page.fence();
        if slot == self.slots.len() {
            self.slots.push(range);
        } else {
            self.replaceable = self.replaceable.saturating_sub(grown.is_none().into());
            self.slots[slot] = range;
        }
        if grown.is_none() {
            self.next = (self.next + 1) % RANGE_SLOTS as usize;
        }
        Ok(())
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

    fn page() -> CrashTwin {
        CrashTwin::new(CrashMedium::Pages, 4096)
    }

    #[test]
    fn ranges_survive_reload_and_oldest_is_replaced() {
        let page = page();
        let mut ranges = InodeRanges::load(&page);
        for n in 0..200 {
            ranges.add(&page, InodeId(1000 + n * 20), 10).expect("added");
        }
        for ranges in [ranges, InodeRanges::load(&page)] {
            assert!(ranges.needs_commit());
            assert!(ranges.contains(InodeId(1000 + 199 * 20 + 9)));
            assert!(!ranges.contains(InodeId(1000 + 199 * 20 + 10)));
            assert!(ranges.contains(InodeId(1000 + 72 * 20)));
            assert!(!ranges.contains(InodeId(1000 + 71 * 20)), "the oldest is gone");
        }
        let mut again = InodeRanges::load(&page);
        again.add(&page, InodeId(9000), 5).expect("added");
        assert!(!again.contains(InodeId(1000 + 72 * 20)) && again.contains(InodeId(9004)));
    }

    #[test]
    fn terms_of_mount_survive_reload() {
        let page = page();
        assert_eq!(mount_terms(&page), MountTerms::default());
        let full = (1..=ADMITTED_MAX as u32).map(|user| format!("user={user}")).collect::<Vec<_>>().join(",");
        for (read_only, text) in [(true, "root,user=1000,user=7,group=50"), (false, "all"), (false, &full)] {
            let terms = MountTerms { read_only, sessions: text.parse().expect("an admission") };
            set_mount_terms(&page, &terms).expect("noted");
            assert_eq!(mount_terms(&page), terms);
        }
        format_page(&page, LEASE_SLOTS, LogPosition(0)).expect("formatted");
        assert_eq!(mount_terms(&page), MountTerms::default());
    }

    #[test]
    fn adjacent_ranges_share_one_slot() {
        let page = page();
        let mut ranges = InodeRanges::load(&page);
        for n in 0..100 {
            ranges.add(&page, InodeId(16 + n * 4096), 4096).expect("added");
        }
        assert!(ranges.slots.len() < 8 && InodeRanges::load(&page).contains(InodeId(16 + 100 * 4096 - 1)));
    }

    #[test]
    fn costs_of_last_and_coming_commit_are_kept() {
        let page = page();
        for n in 1..50 {
            let cost = Credit { blocks: n, metadata_bytes: 2 * n };
            set_cost_at(&page, LogPosition(n * 100), cost).expect("noted");
            assert_eq!(cost_before(&page, LogPosition(n * 100)), cost);
            assert_eq!(cost_before(&page, LogPosition((n - 1) * 100)).blocks, n - 1);
        }
        assert_eq!(cost_before(&page, LogPosition(4950)).blocks, 49, "the note of a later commit was lost");
        assert_eq!(cost_before(&page, LogPosition(7)), Credit::default());
    }
}
