//! Free space: sessions' credit, the rest, and the answer to `statfs`.
//!
//! Invariant: credit that no session uses can be had by another one, whatever its holder says and does. If the control
//! page does not show it, SharedFS begins another version of the page's credit, seals the holder's log, and applies it.
//! No record can be appended then that was paid for before, so all that is not used is free.
//!
//! An ordinary user's sessions together hold unused at most half of what they can have, and hardly more than the user's
//! quota leaves. Beyond that they get exactly what one update needs, and lose the rest. So other users seldom have to
//! take anything back.

use ashlar_store::Store;
use ashlar_types::{Errno, QuotaId, QuotaKey, SessionId};
use ashlar_wire::{Credit, CreditKind, SpaceReply};

use crate::digest::freed_blocks::take_unreleased_blocks;
use crate::sessions::session_table::SessionTable;

/// The credit that a session gets at a time while there is plenty.
///
/// It is so large that the session asks seldom.
const CHUNK: Credit = Credit { blocks: (16 << 20) / ashlar_types::BLOCK_BYTES, metadata_bytes: 4 << 20 };
/// The credit that a session begins with, without asking.
///
/// It suffices for a short program's output.
const BEGINNING: Credit = Credit { blocks: (256 << 10) / ashlar_types::BLOCK_BYTES, metadata_bytes: 64 << 10 };
/// The part of the free space that one chunk takes at most.
///
/// With less, sessions get exactly what they ask for.
const PLENTY_PART: u64 = 16;
/// The part of the free space that an ordinary user's sessions hold unused at most.
const HELD_PART: u64 = 2;
/// The blocks that they may hold unused though a quota leaves less.
///
/// To write over a block takes another one for a moment.
const HELD_LEAST: u64 = (1 << 20) / ashlar_types::BLOCK_BYTES;
/// The part of the arena that is kept back for updates that replace content.
///
/// SharedFS copies a block before it frees the old one. A hundredth of the arena is kept, and at least 64 blocks.
const KEPT_PART: u64 = 100;
const KEPT_BLOCKS_MIN: u64 = 64;
/// How many times SharedFS reclaims everything before it refuses.
///
/// Other sessions may take what was reclaimed.
pub const ATTEMPTS: u32 = 4;
/// Metadata bytes that a file takes at least: its inode and its entry.
const FILE_METADATA_BYTES: u64 = 1024;

/// Returns the space that is neither used nor granted as credit.
///
/// For common use, it leaves out the space that is kept back.
fn free_credit(store: &Store, sessions: &SessionTable, kind: CreditKind) -> Credit {
    let space = store.space();
    let promised = sessions.values().map(|session| session.account.outstanding());
    let (blocks, metadata_bytes) =
        promised.fold((0u64, 0u64), |sum, credit| (sum.0 + credit.blocks, sum.1 + credit.metadata_bytes));
    let (kept_blocks, kept_metadata_bytes) = match kind {
        CreditKind::Common => {
            ((space.blocks_total / KEPT_PART).max(KEPT_BLOCKS_MIN), space.metadata_bytes_total / KEPT_PART)
        }
        CreditKind::Kept => (0, 0),
    };
    Credit {
        blocks: space.blocks_free.saturating_sub(blocks + kept_blocks),
        metadata_bytes: space
            .metadata_bytes_total
            .saturating_sub(space.metadata_bytes_used + metadata_bytes + kept_metadata_bytes),
    }
}

/// Returns the credit that a session begins with, while there is plenty.
pub fn initial_credit(store: &Store, sessions: &SessionTable) -> Credit {
    let free = free_credit(store, sessions, CreditKind::Common);
    Credit {
        blocks: BEGINNING.blocks.min(free.blocks / PLENTY_PART),
        metadata_bytes: BEGINNING.metadata_bytes.min(free.metadata_bytes / PLENTY_PART),
    }
}

/// Decides how much of `free` to grant; `None` if there is too little.
///
/// The session wants `want` and has `left`. A session gets no more of a kind of which it has enough. Otherwise a
/// session that writes data would come to hold all metadata bytes, and one that makes files all blocks. It gets more
/// than it wants only as far as its user may hold `most` more.
fn decide_grant(free: Credit, want: Credit, left: Credit, most: Credit) -> Option<Credit> {
    let amount = |free: u64, want: u64, left: u64, chunk: u64| {
        if want <= left { Some(0) } else { (want <= free).then(|| want.max(chunk.min(free / PLENTY_PART))) }
    };
    let (blocks, metadata_bytes) = (CHUNK.blocks.min(most.blocks), CHUNK.metadata_bytes.min(most.metadata_bytes));
    Some(Credit {
        blocks: amount(free.blocks, want.blocks, left.blocks, blocks)?,
        metadata_bytes: amount(free.metadata_bytes, want.metadata_bytes, left.metadata_bytes, metadata_bytes)?,
    })
}

/// Returns how much more credit the sessions of a session's user may hold unused.
pub fn holdable(store: &Store, sessions: &SessionTable, id: SessionId) -> Credit {
    let unlimited = Credit { blocks: u64::MAX, metadata_bytes: u64::MAX };
    let ordinary = sessions.live(id).filter(|session| !session.credentials.is_privileged());
    let Some(session) = ordinary else { return unlimited };
    let free = free_credit(store, sessions, CreditKind::Common);
    let held = sessions.held_credit(session.identity.uid);
    let (used, limits) = store.quota(QuotaKey::User(session.identity.uid));
    let part = |free: u64, held: u64| (free.saturating_add(held) / HELD_PART).saturating_sub(held);
    let limit = limits
        .blocks
        .map_or(u64::MAX, |limit| limit.saturating_sub(used.blocks).max(HELD_LEAST).saturating_sub(held.blocks));
    Credit {
        blocks: part(free.blocks, held.blocks).min(limit),
        metadata_bytes: part(free.metadata_bytes, held.metadata_bytes),
    }
}

/// Grants credit to a session, if there is enough; `most` is what its user may hold beyond what it wants.
///
/// Updates that replace content get it, in the end, out of the space that is kept back: it returns with their commit. A
/// session that only claims to replace content gets no more than that hundredth.
///
/// # Errors
/// `EIO` if the session is gone.
pub fn try_grant(
    store: &Store,
    sessions: &mut SessionTable,
    id: SessionId,
    want: Credit,
    kinds: &[CreditKind],
    most: Credit,
) -> Result<Option<Credit>, Errno> {
    let session = sessions.live(id).ok_or(Errno::EIO)?;
    let found = kinds.iter().find_map(|&kind| {
        let granted = decide_grant(free_credit(store, sessions, kind), want, session.credit_left(kind), most)?;
        Some((granted, kind))
    });
    let Some((credit, kind)) = found else { return Ok(None) };
    let session = sessions.get_mut(&id).ok_or(Errno::EIO)?;
    session.grant_credit(credit, kind);
    Ok(Some(credit))
}

/// Takes freed blocks from sessions that might still read them, if so many blocks are wanted.
///
/// Sessions that lose blocks must ask again where their data are, so the node takes blocks only if that helps.
pub fn take_blocks_if_of_use(store: &mut Store, sessions: &SessionTable, blocks: u64, kinds: &[CreditKind]) {
    let most = kinds.iter().map(|&kind| free_credit(store, sessions, kind).blocks).max().unwrap_or(0);
    if blocks > most && blocks <= most + store.space().blocks_pinned {
        take_unreleased_blocks(store, sessions);
    }
}

/// Returns the answer to a session's `statfs`, after its log was applied.
///
/// It is [`space_of_all`], but no more than the limits of a subtree leave.
pub fn space(store: &Store, sessions: &SessionTable, id: Option<SessionId>, subtree: QuotaId) -> SpaceReply {
    let (used, limits) = store.quota(QuotaKey::Subtree(subtree));
    let within = |total: u64, free: u64, used: u64, limit: Option<u64>| match limit {
        Some(limit) => (total.min(limit), free.min(limit.saturating_sub(used))),
        None => (total, free),
    };
    let all = space_of_all(store, sessions, id);
    let (blocks_total, blocks_free) = within(all.blocks_total, all.blocks_free, used.blocks, limits.blocks);
    let (inodes_total, inodes_free) = within(all.inodes_total, all.inodes_free, used.inodes, limits.inodes);
    SpaceReply { blocks_total, blocks_free, inodes_total, inodes_free }
}

/// Returns the space of the whole arena.
///
/// A session may write what is free and what it was granted. Freed blocks that wait for a commit count, since no
/// request for credit is refused before that commit.
pub fn space_of_all(store: &Store, sessions: &SessionTable, id: Option<SessionId>) -> SpaceReply {
    let total = store.space();
    let mut free = free_credit(store, sessions, CreditKind::Common);
    free.blocks += total.blocks_pinned;
    // Other sessions use one chunk soon. They lose all beyond that when it is needed.
    for other in sessions.values().filter(|session| Some(session.id) != id) {
        let held = other.account.outstanding();
        free.blocks += held.blocks.saturating_sub(CHUNK.blocks);
        free.metadata_bytes += held.metadata_bytes.saturating_sub(CHUNK.metadata_bytes);
    }
    if let Some(session) = id.and_then(|id| sessions.get(&id)) {
        let own = session.account.outstanding();
        free.blocks += own.blocks;
        free.metadata_bytes += own.metadata_bytes;
    }
    SpaceReply {
        blocks_total: total.blocks_total,
        blocks_free: free.blocks,
        inodes_total: total.metadata_bytes_total / FILE_METADATA_BYTES,
        inodes_free: free.metadata_bytes / FILE_METADATA_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credit(blocks: u64, metadata_bytes: u64) -> Credit {
        Credit { blocks, metadata_bytes }
    }

    #[test]
    fn grant_is_chunk_if_plenty_else_exact_want() {
        let nothing = credit(0, 0);
        let decide_grant = |free, want, left| decide_grant(free, want, left, credit(u64::MAX, u64::MAX));
        assert_eq!(decide_grant(credit(1 << 30, 1 << 40), credit(1, 1), nothing), Some(CHUNK));
        assert_eq!(
            decide_grant(credit(1 << 30, 1 << 40), credit(1 << 29, 1), nothing).map(|c| c.blocks),
            Some(1 << 29)
        );
        assert_eq!(decide_grant(credit(20, 2000), credit(3, 1500), nothing), Some(credit(3, 1500)));
        assert_eq!(decide_grant(credit(20, 2000), credit(21, 1), nothing), None);
        assert_eq!(decide_grant(credit(20, 2000), credit(1, 2001), nothing), None);
    }

    #[test]
    fn grant_of_sufficient_kind_is_zero() {
        let plenty = credit(1 << 30, 1 << 40);
        let decide_grant = |free, want, left| decide_grant(free, want, left, credit(u64::MAX, u64::MAX));
        assert_eq!(decide_grant(plenty, credit(1, 256), credit(0, 256)), Some(credit(CHUNK.blocks, 0)));
        assert_eq!(decide_grant(plenty, credit(0, 1024), credit(500, 1023)), Some(credit(0, CHUNK.metadata_bytes)));
        assert_eq!(decide_grant(credit(0, 2000), credit(1, 2000), credit(1, 0)), Some(credit(0, 2000)));
        assert_eq!(decide_grant(plenty, credit(1, 1), credit(1, 1)), Some(credit(0, 0)));
    }

    #[test]
    fn grant_beyond_holdable_is_exact() {
        let (plenty, nothing) = (credit(1 << 30, 1 << 40), credit(0, 0));
        assert_eq!(decide_grant(plenty, credit(5, 700), nothing, nothing), Some(credit(5, 700)));
        assert_eq!(decide_grant(plenty, credit(5, 700), nothing, credit(9, 800)), Some(credit(9, 800)));
    }
}
