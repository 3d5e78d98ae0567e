//! Quotas: what sessions were granted of what is limited, and the limits.
//!
//! A session uses what is limited only as far as it was granted (`ashlar-libfs`, `quota`). For each session and each owner,
//! group or subtree with limits, SharedFS knows what is *outstanding*: granted, and not yet found used in applied records. It grants
//! where what is used, what is outstanding to all, and what is wanted stay within the limit. Where they do not, it takes back what is
//! outstanding, so that only what is used counts: a new era begins, the log is sealed, and all of it is applied. The super-user asks
//! too, and is refused nothing but for subtrees, so that what is outstanding is always told in full.
//!
//! Nothing of it outlives SharedFS. The next one applies the logs as they are, begins another era for everybody who runs, and
//! has granted nothing.

use std::collections::BTreeMap;
use std::time::Instant;

use ashlar_store::{Move, StoreError};
use ashlar_types::{Errno, InodeId, Name, QuotaAmount, QuotaKey, QuotaLimits, SessionId};
use ashlar_wire::{QuotaGrant, QuotaStatus, QuotaVersion, QuotaWant, Reply};
use parking_lot::MutexGuard;

use crate::session::Session;
use crate::shared::Shared;
use crate::state::State;
use crate::validate::Violation;

/// What a session gets at a time while there is plenty, so that it asks seldom.
const CHUNK: QuotaAmount = QuotaAmount { blocks: (16 << 20) / ashlar_types::BLOCK_BYTES, inodes: 1024 };
/// The part of what is free that one chunk may take at most; with less, sessions get exactly what they ask for.
const PLENTY_PART: u64 = 16;
/// No update has more use something than an owner, a group and a subtree.
const WANTS_MAX: usize = 4;
/// Entries of a directory that are looked at for a name, when the path of a subtree is to be shown.
const ENTRIES_SEEN_MAX: usize = 100_000;
/// Directories above one whose path is to be shown.
const DEPTH_MAX: usize = 1000;

/// What a session was granted and has not been found to have used, by whose account it is.
#[derive(Debug, Default)]
pub struct Outstanding {
    amounts: BTreeMap<QuotaKey, QuotaAmount>,
}

impl Outstanding {
    fn of(&self, key: QuotaKey) -> QuotaAmount {
        self.amounts.get(&key).copied().unwrap_or_default()
    }

    fn grant(&mut self, key: QuotaKey, amount: QuotaAmount) {
        let held = self.amounts.entry(key).or_default();
        held.blocks = held.blocks.saturating_add(amount.blocks);
        held.inodes = held.inodes.saturating_add(amount.inodes);
    }

    /// Books what a batch has used of what is limited; `false` where that is more than was granted.
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

    /// Nothing is outstanding any more.
    pub fn clear(&mut self) {
        self.amounts.clear();
    }
}

/// What may be granted at once where so much is free (`None`: it's not limited), and `exempt` says that the limit does not
/// hold; `None`: it's too little.
fn decide(free: Option<u64>, want: u64, chunk: u64, exempt: bool) -> Option<u64> {
    // Nothing is held that nobody has asked for.
    let Some(free) = free.filter(|_| want > 0) else { return Some(want) };
    match want <= free {
        true => Some(want.max(chunk.min(free / PLENTY_PART))),
        false => exempt.then_some(want),
    }
}

impl State {
    /// What can still be granted of what is limited.
    fn quota_left(&self, key: QuotaKey) -> QuotaLimits {
        let (used, limits) = self.store.quota(key);
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
    fn grant_quota(&mut self, id: SessionId, wants: &[QuotaWant]) -> Option<(QuotaVersion, Vec<QuotaGrant>)> {
        let is_privileged = self.live(id)?.credentials.is_privileged();
        let mut grants = Vec::with_capacity(wants.len());
        for want in wants {
            let (left, exempt) = (self.quota_left(want.key), want.exempt && is_privileged);
            let blocks = decide(left.blocks, want.amount.blocks, CHUNK.blocks, exempt)?;
            let inodes = decide(left.inodes, want.amount.inodes, CHUNK.inodes, exempt)?;
            grants.push((want.key, left, QuotaAmount { blocks, inodes }));
        }
        let session = self.sessions.get_mut(&id)?;
        let told = grants.into_iter().map(|(key, left, amount)| {
            let (blocks, inodes) = (left.blocks.map(|_| amount.blocks), left.inodes.map(|_| amount.inodes));
            if !left.is_none() {
                session
                    .outstanding
                    .grant(key, QuotaAmount { blocks: blocks.unwrap_or(0), inodes: inodes.unwrap_or(0) });
            }
            QuotaGrant { key, blocks, inodes }
        });
        let told: Vec<_> = told.collect();
        Some((session.quota_version, told))
    }

    /// Books what a batch of a session has used of what is limited. Whoever used more than was granted forged a record; of
    /// root's sessions it is not asked, which act for many and are trusted.
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

    /// Takes back all that a session holds: what it appends from here on is paid for anew, and what it has appended is applied.
    pub fn invalidate_quota_balances(&mut self, id: SessionId, has_limits: bool) {
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.fenced.is_none()) else { return };
        session.raise_quota_version(has_limits);
        self.seal_and_apply(id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.outstanding.clear();
        }
    }
}

impl Session {
    /// Begins another era of quotas; the log must be sealed next.
    pub fn raise_quota_version(&mut self, has_limits: bool) {
        self.quota_version = self.quota_version.next(has_limits);
        self.control.set_quota_version(self.quota_version);
    }
}

/// Grants what a session wants to use of what is limited. Where there is too little, what all sessions hold of it is taken back, and
/// all logs are applied, so that only what is really used counts; only then the answer is no.
pub fn grant(shared: &Shared, id: SessionId, wants: &[QuotaWant]) -> Result<Reply, Errno> {
    // Who asks twice at once for the same would get twice what is left.
    let is_repeated = |(index, want): (usize, &QuotaWant)| wants[..index].iter().any(|other| other.key == want.key);
    if wants.len() > WANTS_MAX || wants.iter().enumerate().any(is_repeated) {
        return Err(Errno::EINVAL);
    }
    let mut state = shared.apply_settled(shared.lock(), id);
    if let Some((version, grants)) = state.grant_quota(id, wants) {
        return Ok(Reply::Quota { version, grants });
    }
    state = reclaim(shared, state, wants);
    // Nobody had the lock in between: this answer is exact.
    if state.live(id).is_none() {
        return Err(Errno::EIO);
    }
    match state.grant_quota(id, wants) {
        Some((version, grants)) => Ok(Reply::Quota { version, grants }),
        None => {
            state.counters.quota_refused += 1;
            Err(Errno::EDQUOT)
        }
    }
}

fn reclaim<'a>(shared: &'a Shared, mut state: MutexGuard<'a, State>, wants: &[QuotaWant]) -> MutexGuard<'a, State> {
    state = shared.apply_all_settled(state);
    state = crate::digest::sweep_orphans(shared, state);
    for id in state.live_ids() {
        let holds =
            |session: &Session| wants.iter().any(|want| session.outstanding.of(want.key) != QuotaAmount::default());
        if state.live(id).is_some_and(holds) {
            let has_limits = state.store.has_quota_limits();
            state.invalidate_quota_balances(id, has_limits);
        }
    }
    shared.drive(&mut state);
    state
}

/// Sets limits, or takes them away. They hold from here on, for everybody, and are durable on return.
pub fn set(shared: &Shared, key: QuotaKey, limits: QuotaLimits) -> Result<(), Errno> {
    let mut state = shared.apply_all_settled(shared.lock());
    let others = state.store.quotas().into_iter().any(|(other, _, limits)| other != key && !limits.is_none());
    for id in state.live_ids() {
        // What was logged before was not paid for under these limits, so it is applied before they hold.
        state.invalidate_quota_balances(id, others || !limits.is_none());
    }
    state.store.set_quota_limits(key, limits);
    state.oldest_uncommitted.get_or_insert_with(Instant::now);
    shared.drive(&mut state);
    shared.commit_all(&mut state)
}

/// Everybody who uses something or is limited.
pub fn list(shared: &Shared) -> Result<Vec<QuotaStatus>, Errno> {
    let state = shared.apply_all_settled(shared.lock());
    let mut left = ENTRIES_SEEN_MAX;
    let mut list = Vec::new();
    for (key, used, limits) in state.store.quotas() {
        let path = match key {
            QuotaKey::Subtree(top) => path_of(&state, InodeId(top.0), &mut left).map_err(|error| {
                tracing::error!(%error, "the path of a subtree can't be read");
                Errno::EIO
            })?,
            QuotaKey::User(_) | QuotaKey::Group(_) => None,
        };
        list.push(QuotaStatus { key, used, limits, path });
    }
    Ok(list)
}

/// The path of a directory from the root; `None` where it is gone, or not found among so many entries as may still be looked at.
fn path_of(state: &State, directory: InodeId, left: &mut usize) -> Result<Option<Vec<u8>>, StoreError> {
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

/// The name of an inode in a directory; `None` where it is not found among so many entries as may still be looked at.
pub fn name_in(state: &State, parent: InodeId, inode: InodeId, left: &mut usize) -> Result<Option<Name>, StoreError> {
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
    fn a_chunk_while_there_is_plenty_the_exact_wish_when_it_is_tight_and_always_for_the_super_user() {
        assert_eq!(decide(None, 7, 100, false), Some(7));
        assert_eq!(decide(Some(1 << 20), 0, 100, false), Some(0));
        assert_eq!(decide(Some(0), 0, 100, false), Some(0));
        assert_eq!(decide(Some(1 << 20), 1, 100, false), Some(100));
        assert_eq!(decide(Some(1 << 20), 1000, 100, false), Some(1000));
        assert_eq!(decide(Some(160), 1, 100, false), Some(10));
        assert_eq!(decide(Some(5), 5, 100, false), Some(5));
        assert_eq!(decide(Some(5), 6, 100, false), None);
        assert_eq!(decide(Some(5), 6, 100, true), Some(6));
    }

    #[test]
    fn who_uses_more_than_was_granted_is_found_out_and_what_is_free_is_not_counted() {
        let (key, limits) = (QuotaKey::User(1), QuotaLimits { blocks: Some(100), inodes: None });
        let moved = |blocks, inodes| Move { key, blocks, inodes };
        let mut outstanding = Outstanding::default();
        outstanding.grant(key, QuotaAmount { blocks: 10, inodes: 0 });
        assert!(outstanding.spend(&moved(4, 1000), limits));
        assert!(outstanding.spend(&moved(-50, -1), limits), "what is freed is no new grant");
        assert_eq!(outstanding.of(key).blocks, 6);
        assert!(!outstanding.spend(&moved(7, 0), limits));
        assert_eq!(outstanding.of(key).blocks, 0);
    }
}
