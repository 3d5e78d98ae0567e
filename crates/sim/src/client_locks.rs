//! The file locks of a client, as far as it can know of them.
//!
//! A client's knowledge has two bounds. It holds at least what SharedFS has granted and it has not begun to give back.
//! It holds at most what it ever asked for and does not know to be gone. While no request is under way, they are equal.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ashlar_types::{ByteRange, InodeId, LockAction, LockKind, LockMode, LockedRange, SegmentVersion};
use ashlar_wire::{LOCK_LAST, LOCK_OWNER_PROCESS, LockList, Request};

/// Ranges of bytes that are locked as a whole: few, so that locks meet.
pub const CELLS: usize = 12;
/// Bytes of a cell; the last one reaches to the end.
const CELL_BYTES: u64 = 10;

/// The mode of each cell.
pub type LockCells = [Option<LockMode>; CELLS];

/// A lock's owner on a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LockPlace {
    /// The file.
    pub inode: InodeId,
    /// The kind.
    pub kind: LockKind,
    /// The owner in the session.
    pub owner: u64,
}

impl LockPlace {
    /// Returns whether the locks are the process's own, which SharedFS notes and may delegate.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.kind == LockKind::Record && self.owner == LOCK_OWNER_PROCESS
    }
}

/// A wanted lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WantedLock {
    /// Its owner and file.
    pub place: LockPlace,
    /// The first and the last cell.
    pub cells: (usize, usize),
    /// Whether it is set, and how.
    pub action: LockAction,
    /// Whether the client waits for it.
    pub waits: bool,
}

impl WantedLock {
    /// Returns its bytes.
    #[must_use]
    pub fn range(&self) -> ByteRange {
        bytes_of(self.cells)
    }

    /// Returns the request for it.
    #[must_use]
    pub fn request(&self, pid: u32, wait: Option<u64>, slot: Option<ashlar_wire::LockSlot>) -> Request {
        let LockPlace { inode, kind, owner } = self.place;
        Request::Lock { inode, kind, owner, pid, range: self.range(), action: self.action, wait, slot }
    }
}

fn bytes_of((first, last): (usize, usize)) -> ByteRange {
    let end = if last + 1 == CELLS { LOCK_LAST } else { (last as u64 + 1) * CELL_BYTES - 1 };
    ByteRange::new(first as u64 * CELL_BYTES, end)
}

/// Returns the cells of locked ranges, which end where cells end.
#[must_use]
pub fn cells_of(ranges: &[LockedRange]) -> LockCells {
    std::array::from_fn(|cell| {
        let bytes = bytes_of((cell, cell));
        ranges.iter().find(|held| held.range.contains(bytes)).map(|held| held.mode)
    })
}

/// The bounds of an owner's locks on a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldCells {
    /// Locks that it holds for certain.
    pub least: LockCells,
    /// Locks that it may hold.
    pub most: LockCells,
}

impl HeldCells {
    /// A request is about to be sent.
    fn begin(&mut self, wanted: &WantedLock) {
        for cell in wanted.cells.0..=wanted.cells.1 {
            let (least, most) = (&mut self.least[cell], &mut self.most[cell]);
            match wanted.action.mode() {
                None => *least = None,
                Some(mode) => {
                    // `flock` removes a lock of another mode first.
                    let is_kept = wanted.place.kind == LockKind::Record || *least == Some(mode);
                    *least = least.filter(|_| is_kept).map(|held| held.min(mode));
                    *most = (*most).max(Some(mode));
                }
            }
        }
    }

    /// A request is done.
    fn settle(&mut self, wanted: &WantedLock) {
        for cell in wanted.cells.0..=wanted.cells.1 {
            (self.least[cell], self.most[cell]) = (wanted.action.mode(), wanted.action.mode());
        }
    }
}

/// Returns whether two owners' locks conflict in any of these cells.
#[must_use]
pub fn conflicts(one: &LockCells, two: &LockCells) -> bool {
    one.iter().zip(two).any(|pair| match pair {
        (Some(one), Some(two)) => *one == LockMode::Write || *two == LockMode::Write,
        _ => false,
    })
}

/// A lock request that is under way.
#[derive(Clone, Copy, Debug)]
pub struct LockUnderway {
    /// The wanted lock.
    pub wanted: WantedLock,
    /// The locks of its owner before it.
    before: HeldCells,
    /// SharedFS's life in which it was asked.
    pub life: SegmentVersion,
    /// The ticket of the wait.
    pub ticket: Option<u64>,
    /// When the client stops waiting.
    pub cancels_at: Option<u64>,
    /// Whether it has stopped.
    pub is_cancelled: bool,
    /// Whether another owner may have held a conflicting lock at some time since it was sent.
    pub saw_conflict: bool,
    /// Whether no other owner held a conflicting lock for certain at some time since it was sent.
    pub saw_free: bool,
    /// Since when no other owner can hold a conflicting lock.
    pub free_since: Option<u64>,
}

/// The locks of a client.
#[derive(Debug, Default)]
pub struct ClientLocks {
    /// The locks of each owner.
    pub held: BTreeMap<LockPlace, HeldCells>,
    /// Files on which SharedFS may have locks that the process does not know.
    pub doubtful: BTreeSet<InodeId>,
    /// The request that is under way.
    pub underway: Option<LockUnderway>,
    /// Requests that tell a restarted SharedFS of locks, until it has all of them.
    pub reclaims: Option<VecDeque<Request>>,
    tickets: u64,
}

impl ClientLocks {
    /// A request is about to be sent.
    pub fn begin(&mut self, wanted: WantedLock, life: SegmentVersion, wait: Option<Option<u64>>) -> Option<u64> {
        let held = self.held.entry(wanted.place).or_default();
        let before = *held;
        held.begin(&wanted);
        self.tickets += 1;
        let ticket = wait.map(|_| self.tickets);
        self.underway = Some(LockUnderway {
            wanted,
            before,
            life,
            ticket,
            cancels_at: wait.flatten(),
            is_cancelled: false,
            saw_conflict: false,
            saw_free: false,
            free_since: None,
        });
        ticket
    }

    /// A question about conflicting locks is about to be sent.
    pub fn begin_query(&mut self, wanted: WantedLock, life: SegmentVersion) {
        let before = self.held.get(&wanted.place).copied();
        self.begin(wanted, life, None);
        match before {
            Some(before) => _ = self.held.insert(wanted.place, before),
            None => _ = self.held.remove(&wanted.place),
        }
    }

    /// The request is done.
    pub fn finish(&mut self, wanted: &WantedLock) {
        self.underway = None;
        self.held.entry(wanted.place).or_default().settle(wanted);
    }

    /// The request has changed nothing.
    pub fn fail(&mut self) {
        let Some(LockUnderway { wanted, before, .. }) = self.underway.take() else { return };
        let is_lost = |cell: &Option<LockMode>| cell.is_some() && *cell != wanted.action.mode();
        let is_converted = wanted.place.kind == LockKind::Flock && before.most.iter().any(is_lost);
        // `flock` has lost the lock that it was to convert.
        let left = if is_converted { HeldCells::default() } else { before };
        self.held.insert(wanted.place, left);
    }

    /// Another SharedFS may have read the client's locks before the answer was noted: the client asks it too.
    pub fn begin_again(&mut self) {
        if let Some(LockUnderway { wanted, before, .. }) = self.underway.take() {
            let held = self.held.entry(wanted.place).or_default();
            // SharedFS may have set it already, and so have given others what it is weaker than.
            for (least, before) in held.least.iter_mut().zip(before.least) {
                *least = (*least).min(before);
            }
            if wanted.place.is_own() {
                self.doubtful.insert(wanted.place.inode);
            }
        }
    }

    /// Returns the owners on a file that may have locks.
    #[must_use]
    pub fn owners_of(&self, inode: InodeId) -> Vec<LockPlace> {
        let has_any = |held: &HeldCells| held.most.iter().any(Option::is_some);
        let mut owners: Vec<_> = self
            .held
            .iter()
            .filter(|(place, held)| place.inode == inode && has_any(held))
            .map(|(place, _)| *place)
            .collect();
        let own = LockPlace { inode, kind: LockKind::Record, owner: LOCK_OWNER_PROCESS };
        if self.doubtful.contains(&inode) && !owners.contains(&own) {
            owners.push(own);
        }
        owners
    }

    /// Returns the files on which the client may have locks.
    #[must_use]
    pub fn files(&self) -> BTreeSet<InodeId> {
        let held = self.held.iter().filter(|(_, held)| held.most.iter().any(Option::is_some));
        held.map(|(place, _)| place.inode).chain(self.doubtful.iter().copied()).collect()
    }

    /// Returns the locks that an owner may hold.
    #[must_use]
    pub fn most_of(&self, place: &LockPlace) -> LockCells {
        if place.is_own() && self.doubtful.contains(&place.inode) {
            return [Some(LockMode::Write); CELLS];
        }
        self.held.get(place).map_or([None; CELLS], |held| held.most)
    }

    /// The client begins to remove all locks of an owner on a file.
    pub fn begin_release(&mut self, place: LockPlace) {
        self.held.entry(place).or_default().least = [None; CELLS];
    }

    /// The owner has no locks on the file any more.
    pub fn finish_release(&mut self, place: LockPlace) {
        self.held.remove(&place);
        if place.is_own() {
            self.doubtful.remove(&place.inode);
        }
    }

    /// Returns whether any locks are not the process's own.
    #[must_use]
    pub fn has_others(&self) -> bool {
        self.held.iter().any(|(place, held)| !place.is_own() && held.most.iter().any(Option::is_some))
    }

    /// Returns the requests by which a restarted SharedFS learns of the locks that it did not note.
    #[must_use]
    pub fn reclaim_requests(&self, pid: u32) -> VecDeque<Request> {
        let mut requests = VecDeque::new();
        for (place, held) in self.held.iter().filter(|(place, _)| !place.is_own()) {
            // They are the weaker ones of before and after a request that is under way: an earlier SharedFS may have
            // served it, and given others what it gives up.
            for (cell, mode) in held.least.iter().enumerate() {
                let Some(mode) = mode else { continue };
                let is_whole = place.kind == LockKind::Flock;
                let cells = if is_whole { (0, CELLS - 1) } else { (cell, cell) };
                let wanted = WantedLock { place: *place, cells, action: (*mode).into(), waits: false };
                requests.push_back(wanted.request(pid, None, None));
                if is_whole {
                    break;
                }
            }
        }
        requests
    }
}

/// Sets or removes a lock in a slot's list; `false` if it has no room.
#[must_use]
pub fn set_in(list: &mut LockList, wanted: &WantedLock) -> bool {
    list.set(wanted.range(), wanted.action)
}
