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

use ashlar_store::Store;
use ashlar_types::{Errno, InodeId, QuotaAmount, QuotaKey, QuotaLimits, QuotaVersion, SessionId};
use ashlar_wire::{QuotaGrant, QuotaRequest, QuotaStatus};

use crate::access::inode_names::find_path;
use crate::sessions::session_table::SessionTable;

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

/// Returns the use and the limits of an account.
///
/// Mapped blocks that no file has any more count against the user whose processes keep them.
fn quota(store: &Store, sessions: &SessionTable, key: QuotaKey) -> (QuotaAmount, QuotaLimits) {
    let (mut used, limits) = store.quota(key);
    if let QuotaKey::User(uid) = key {
        used.blocks = used.blocks.saturating_add(sessions.mapped_by_user(store, uid).1);
    }
    (used, limits)
}

/// Returns the amount that can still be granted under a limit.
fn quota_left(store: &Store, sessions: &SessionTable, key: QuotaKey) -> QuotaLimits {
    let (used, limits) = quota(store, sessions, key);
    let held = sessions.values().map(|session| session.outstanding.of(key));
    let (blocks, inodes) = held.fold((used.blocks, used.inodes), |sum, held| {
        (sum.0.saturating_add(held.blocks), sum.1.saturating_add(held.inodes))
    });
    QuotaLimits {
        blocks: limits.blocks.map(|limit| limit.saturating_sub(blocks)),
        inodes: limits.inodes.map(|limit| limit.saturating_sub(inodes)),
    }
}

/// Grants all that is wanted, or nothing.
pub fn grant_quota(
    store: &Store,
    sessions: &mut SessionTable,
    id: SessionId,
    wants: &[QuotaRequest],
) -> Option<(QuotaVersion, Vec<QuotaGrant>)> {
    let is_privileged = sessions.live(id)?.credentials.is_privileged();
    let mut grants = Vec::with_capacity(wants.len());
    for want in wants {
        let (left, exempt) = (quota_left(store, sessions, want.key), want.exempt && is_privileged);
        let blocks = decide_grant(left.blocks, want.amount.blocks, CHUNK.blocks, exempt)?;
        let inodes = decide_grant(left.inodes, want.amount.inodes, CHUNK.inodes, exempt)?;
        grants.push((want.key, left, QuotaAmount { blocks, inodes }));
    }
    let session = sessions.get_mut(&id)?;
    let granted = grants.into_iter().map(|(key, left, amount)| {
        let (blocks, inodes) = (left.blocks.map(|_| amount.blocks), left.inodes.map(|_| amount.inodes));
        if !left.is_none() {
            session.outstanding.grant(key, QuotaAmount { blocks: blocks.unwrap_or(0), inodes: inodes.unwrap_or(0) });
        }
        QuotaGrant { key, blocks, inodes }
    });
    let granted: Vec<_> = granted.collect();
    Some((session.quota_version, granted))
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

/// Returns all owners, groups and subtrees with use or limits.
///
/// # Errors
/// `EIO`.
pub fn list_quotas(store: &Store, sessions: &SessionTable) -> Result<Vec<QuotaStatus>, Errno> {
    let mut left = ENTRIES_SEEN_MAX;
    let mut list = Vec::new();
    for (key, ..) in store.quotas() {
        let (used, limits) = quota(store, sessions, key);
        let path = match key {
            QuotaKey::Subtree(top) => find_path(store, InodeId(top.0), &mut left).map_err(|error| {
                tracing::error!(%error, "the path of a subtree can't be read");
                Errno::EIO
            })?,
            QuotaKey::User(_) | QuotaKey::Group(_) => None,
        };
        list.push(QuotaStatus { key, used, limits, path });
    }
    Ok(list)
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
}
