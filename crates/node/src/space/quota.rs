//! Quotas: the limits, and the quota balances that sessions were granted.
//!
//! A session uses what is limited only as far as it was granted (`ashlar-libfs`, `quota`). SharedFS knows the
//! *outstanding* balance of each session for each owner, group or subtree with limits: granted, and not yet found used
//! in applied records. It grants if the use, all outstanding balances, and the wanted amount stay within the limit.
//! Otherwise it takes back the outstanding balances, so that only real use counts: it begins a new quota version, seals
//! the logs, and applies all of them. The super-user asks too, and is refused only for subtrees, so that SharedFS
//! always knows all outstanding balances.
//!
//! Blocks that a process has mapped stay taken when their file is deleted or written over. They count against the user
//! of the process until it unmaps them, so no user keeps more space than its limit.
//!
//! No balance outlives SharedFS. The next one applies the logs as they are, begins another quota version for every
//! running session, and has granted nothing.

use std::collections::BTreeMap;

use ashlar_journal::OwnAct;
use ashlar_store::{Move, StoreError};
use ashlar_types::{Errno, InodeId, Name, QuotaAmount, QuotaKey, QuotaLimits, QuotaVersion, SessionId};
use ashlar_wire::{QuotaGrant, QuotaRequest, QuotaStatus};

use crate::node::Node;
use crate::records::validate::Violation;
use crate::sessions::mapping;
use crate::sessions::session::ServedSession;

/// The balance that a session gets at a time while there is plenty.
///
/// It is so large that the session asks seldom.
const CHUNK: QuotaAmount = QuotaAmount { blocks: (16 << 20) / ashlar_types::BLOCK_BYTES, inodes: 1024 };
/// The part of the free amount that one chunk takes at most.
///
/// With less, sessions get exactly what they ask for.
const PLENTY_PART: u64 = 16;
/// No update makes more than two owners, groups and subtrees use something: a new inode's and its directory's.
const WANTS_MAX: usize = 6;
/// The most entries that SharedFS searches to show the paths of subtrees.
const ENTRIES_SEEN_MAX: usize = 100_000;
/// The most directories above one whose path is to be shown.
const DEPTH_MAX: usize = 1000;

/// A session's outstanding balances: granted, and not yet found used, by account.
#[derive(Debug, Default)]
pub struct OutstandingQuota {
    amounts: BTreeMap<QuotaKey, QuotaAmount>,
}

impl OutstandingQuota {
    fn of(&self, key: QuotaKey) -> QuotaAmount {
        self.amounts.get(&key).copied().unwrap_or_default()
    }

    fn grant(&mut self, key: QuotaKey, amount: QuotaAmount) {
        let held = self.amounts.entry(key).or_default();
        held.blocks = held.blocks.saturating_add(amount.blocks);
        held.inodes = held.inodes.saturating_add(amount.inodes);
    }

    /// Books the use of a limited resource by a batch.
    ///
    /// Returns `false` if that is more than was granted.
    fn spend(&mut self, moved: &Move, limits: QuotaLimits) -> bool {
        let held = self.amounts.entry(moved.key).or_default();
        let spend = |held: &mut u64, limit: Option<u64>, more: i64| {
            let more = u64::try_from(more).unwrap_or(0);
            let is_granted = limit.is_none() || more <= *held;
            *held = held.saturating_sub(more);
            is_granted
        };
        let blocks = spend(&mut held.blocks, limits.blocks, moved.blocks);
        let inodes = spend(&mut held.inodes, limits.inodes, moved.inodes);
        blocks && inodes
    }

    /// Clears all outstanding balances.
    pub fn clear(&mut self) {
        self.amounts.clear();
    }
}

/// Decides how much to grant at once of a free amount; `None` if it's too little.
///
/// A `free` of `None` means that there is no limit; `exempt` says that the limit does not hold.
fn decide_grant(free: Option<u64>, want: u64, chunk: u64, exempt: bool) -> Option<u64> {
    // A session holds nothing that it did not ask for.
    let Some(free) = free.filter(|_| want > 0) else { return Some(want) };
    match want <= free {
        true => Some(want.max(chunk.min(free / PLENTY_PART))),
        false => exempt.then_some(want),
    }
}

impl Node {
    /// Returns the use and the limits of an account.
    ///
    /// Mapped blocks that no file has any more count against the user whose processes keep them.
    fn quota(&self, key: QuotaKey) -> (QuotaAmount, QuotaLimits) {
        let (mut used, limits) = self.store.quota(key);
        if let QuotaKey::User(uid) = key {
            used.blocks = used.blocks.saturating_add(mapping::mapped_by_user(self, uid).1);
        }
        (used, limits)
    }

    /// Returns the amount that can still be granted under a limit.
    fn quota_left(&self, key: QuotaKey) -> QuotaLimits {
        let (used, limits) = self.quota(key);
        let held = self.sessions.values().map(|session| session.outstanding.of(key));
        let (blocks, inodes) = held.fold((used.blocks, used.inodes), |sum, held| {
            (sum.0.saturating_add(held.blocks), sum.1.saturating_add(held.inodes))
        });
        QuotaLimits {
            blocks: limits.blocks.map(|limit| limit.saturating_sub(blocks)),
            inodes: limits.inodes.map(|limit| limit.saturating_sub(inodes)),
        }
    }

    /// Grants all that is wanted, or nothing.
    pub fn grant_quota(&mut self, id: SessionId, wants: &[QuotaRequest]) -> Option<(QuotaVersion, Vec<QuotaGrant>)> {
        let is_privileged = self.live(id)?.credentials.is_privileged();
        let mut grants = Vec::with_capacity(wants.len());
        for want in wants {
            let (left, exempt) = (self.quota_left(want.key), want.exempt && is_privileged);
            let blocks = decide_grant(left.blocks, want.amount.blocks, CHUNK.blocks, exempt)?;
            let inodes = decide_grant(left.inodes, want.amount.inodes, CHUNK.inodes, exempt)?;
            grants.push((want.key, left, QuotaAmount { blocks, inodes }));
        }
        let session = self.sessions.get_mut(&id)?;
        let granted = grants.into_iter().map(|(key, left, amount)| {
            let (blocks, inodes) = (left.blocks.map(|_| amount.blocks), left.inodes.map(|_| amount.inodes));
            if !left.is_none() {
                session
                    .outstanding
                    .grant(key, QuotaAmount { blocks: blocks.unwrap_or(0), inodes: inodes.unwrap_or(0) });
            }
            QuotaGrant { key, blocks, inodes }
        });
        let granted: Vec<_> = granted.collect();
        Some((session.quota_version, granted))
    }

    /// Books the use of limited resources by a batch of a session.
    ///
    /// A session that used more than it was granted forged a record. Root's sessions are exempt: they act for many
    /// users and are trusted.
    pub fn spend_quota(&mut self, id: SessionId) -> Result<(), Violation> {
        let moves = self.store.take_quota_moves();
        if moves.is_empty() {
            return Ok(());
        }
        let Self { store, sessions, counters, .. } = self;
        let Some(session) = sessions.get_mut(&id) else { return Ok(()) };
        let mut is_granted = true;
        for moved in &moves {
            is_granted &= session.outstanding.spend(moved, store.quota(moved.key).1);
        }
        if is_granted || !session.is_quota_validated {
            return Ok(());
        }
        if session.credentials.is_privileged() {
            counters.quota_unpaid += 1;
            return Ok(());
        }
        Err(Violation::NoQuota)
    }

    /// Takes back all balances of a session.
    ///
    /// It pays anew for later records, and its logged ones are applied.
    pub fn invalidate_quota_balances(&mut self, id: SessionId, has_limits: bool) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.fenced.is_none()) else { return };
        session.raise_quota_version(has_limits);
        self.seal_and_apply(id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.outstanding.clear();
        }
    }
}

impl ServedSession {
    /// Begins another quota version; the log must be sealed next.
    pub fn raise_quota_version(&mut self, has_limits: bool) {
        self.quota_version = self.quota_version.next(has_limits);
        self.control.set_quota_version(self.quota_version);
    }
}

/// Fails if the wants are none that LibFS asks for.
///
/// # Errors
/// `EINVAL`.
pub fn check_quota_wants(wants: &[QuotaRequest]) -> Result<(), Errno> {
    // A session that asks twice at once for the same account would get its rest twice.
    let is_repeated = |(index, want): (usize, &QuotaRequest)| wants[..index].iter().any(|other| other.key == want.key);
    let is_odd = wants.len() > WANTS_MAX || wants.iter().enumerate().any(is_repeated);
    if is_odd { Err(Errno::EINVAL) } else { Ok(()) }
}

/// Takes back the balances of all sessions that hold any of what is wanted.
pub fn take_back_balances(state: &mut Node, wants: &[QuotaRequest]) {
    for id in state.live_ids() {
        let holds = |session: &ServedSession| {
            wants.iter().any(|want| session.outstanding.of(want.key) != QuotaAmount::default())
        };
        if state.live(id).is_some_and(holds) {
            let has_limits = state.store.has_quota_limits();
            state.invalidate_quota_balances(id, has_limits);
        }
    }
}

/// Sets or removes limits, after all logs were applied.
///
/// They hold from here on, for all sessions.
pub fn set_limits(state: &mut Node, key: QuotaKey, limits: QuotaLimits) {
    let others = state.store.quotas().into_iter().any(|(other, _, limits)| other != key && !limits.is_none());
    for id in state.live_ids() {
        // Earlier records were not paid for under these limits, so they are applied before the limits hold.
        state.invalidate_quota_balances(id, others || !limits.is_none());
    }
    state.store.set_quota_limits(key, limits);
    state.journal_act(OwnAct::Limits { key, limits });
    state.oldest_uncommitted.get_or_insert(state.now.since_boot);
}

/// Returns all owners, groups and subtrees with use or limits.
///
/// # Errors
/// `EIO`.
pub fn list_quotas(state: &Node) -> Result<Vec<QuotaStatus>, Errno> {
    let mut left = ENTRIES_SEEN_MAX;
    let mut list = Vec::new();
    for (key, ..) in state.store.quotas() {
        let (used, limits) = state.quota(key);
        let path = match key {
            QuotaKey::Subtree(top) => path_of(state, InodeId(top.0), &mut left).map_err(|error| {
                tracing::error!(%error, "the path of a subtree can't be read");
                Errno::EIO
            })?,
            QuotaKey::User(_) | QuotaKey::Group(_) => None,
        };
        list.push(QuotaStatus { key, used, limits, path });
    }
    Ok(list)
}

/// Returns the path of a directory from the root.
///
/// Returns `None` if it is gone, or not found within `left` entries.
fn path_of(state: &Node, directory: InodeId, left: &mut usize) -> Result<Option<Vec<u8>>, StoreError> {
    let mut names: Vec<Name> = Vec::new();
    let mut at = directory;
    while at != InodeId::ROOT {
        let Some(found) = state.store.inode(at)?.filter(|found| found.links > 0 && names.len() < DEPTH_MAX) else {
            return Ok(None);
        };
        let Some(name) = name_in(state, found.parent, at, left)? else { return Ok(None) };
        names.push(name);
        at = found.parent;
    }
    let path = names.iter().rev().fold(Vec::new(), |path, name| [&path, &b"/"[..], name.as_bytes()].concat());
    Ok(Some(if path.is_empty() { b"/".to_vec() } else { path }))
}

/// Returns the name of an inode in a directory.
///
/// Returns `None` if it is not found within `left` entries.
pub fn name_in(state: &Node, parent: InodeId, inode: InodeId, left: &mut usize) -> Result<Option<Name>, StoreError> {
    const PAGE: usize = 1000;
    let mut after = 0;
    while *left > 0 {
        let page = state.store.entries(parent, after, PAGE)?;
        let Some(&(last, ..)) = page.last() else { return Ok(None) };
        *left = left.saturating_sub(page.len());
        after = last;
        if let Some((_, name, _)) = page.into_iter().find(|(_, _, entry)| entry.inode == inode) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grant_is_chunk_if_plenty_exact_if_tight_any_if_exempt() {
        assert_eq!(decide_grant(None, 7, 100, false), Some(7));
        assert_eq!(decide_grant(Some(1 << 20), 0, 100, false), Some(0));
        assert_eq!(decide_grant(Some(0), 0, 100, false), Some(0));
        assert_eq!(decide_grant(Some(1 << 20), 1, 100, false), Some(100));
        assert_eq!(decide_grant(Some(1 << 20), 1000, 100, false), Some(1000));
        assert_eq!(decide_grant(Some(160), 1, 100, false), Some(10));
        assert_eq!(decide_grant(Some(5), 5, 100, false), Some(5));
        assert_eq!(decide_grant(Some(5), 6, 100, false), None);
        assert_eq!(decide_grant(Some(5), 6, 100, true), Some(6));
    }

    #[test]
    fn use_beyond_grant_is_detected_and_freeing_grants_nothing() {
        let (key, limits) = (QuotaKey::User(1), QuotaLimits { blocks: Some(100), inodes: None });
        let moved = |blocks, inodes| Move { key, blocks, inodes };
        let mut outstanding = OutstandingQuota::default();
        outstanding.grant(key, QuotaAmount { blocks: 10, inodes: 0 });
        assert!(outstanding.spend(&moved(4, 1000), limits));
        assert!(outstanding.spend(&moved(-50, -1), limits), "freeing is no new grant");
        assert_eq!(outstanding.of(key).blocks, 6);
        assert!(!outstanding.spend(&moved(7, 0), limits));
        assert_eq!(outstanding.of(key).blocks, 0);
    }
}
