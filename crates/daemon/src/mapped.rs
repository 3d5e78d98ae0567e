//! Files that processes map directly (DAX).
//!
//! A restarted SharedFS knows these mappings from tables. A process maps blocks of data segments after SharedFS has
//! promised that they stay in place. The process can't repeat that promise to a later SharedFS: it may sleep or be
//! stopped while SharedFS is killed and started again. So a session's mappings stand in a file of their own, which
//! SharedFS alone writes:
//!
//! ```text
//! record n, of 32 bytes, from byte 32 n on
//!   0  inode:8
//!   8  first block in the file:8
//!  16  address:8
//!  24  follows:1 number:31 blocks:32         0: no mapping; written last, and cleared first
//! ```
//!
//! A mapping ends with its session, unless it was unmapped: a process that ends its session and lives on has unmapped
//! all. A session that was fenced for a forged log keeps its mappings until SharedFS is restarted. From then on its
//! process may see other content there.

use std::io::ErrorKind;
use std::ops::Range;
use std::time::Duration;

use ashlar_pmem::{Arena, ArenaError, Mapping, MappingAccess, MediumKind, OutOfBounds, Persistent, SessionFile};
use ashlar_store::{MapBlocks, MappedRun, StoreError};
use ashlar_types::{Access, BLOCK_BYTES, BlockAddress, Errno, Inode, InodeId, QuotaKey, SessionId};
use ashlar_wire::{Reply, SessionKind};

use crate::grant::{Patience, lock_applied, report_store_error};
use crate::leasing::Ancestors;
use crate::materialise;
use crate::session::{ServedSession, SessionError};
use crate::shared_state::SharedState;
use crate::state::State;

const RECORD_BYTES: u64 = 32;
const WORD: u64 = 24;
const NUMBER_AT: u32 = 32;
const NUMBER_MAX: u32 = u32::MAX >> 1;
const FOLLOWS: u64 = 1 << 63;
/// The most extents that a session may have mapped.
///
/// Beyond that, the kernel maps files for it.
const RECORDS_MAX: u64 = 4096;
/// Of all blocks, the part that an ordinary user's sessions may have mapped at once, and the most of them.
///
/// They stay taken when their files are deleted, and are counted again and again.
const USER_PART: u64 = 4;
const USER_BLOCKS_MAX: u64 = (4 << 30) / BLOCK_BYTES;
/// How often SharedFS commits other sessions' writes to map a file.
const TRIES: u32 = 3;
/// How often a thread checks for another thread's table, and the pause between.
const TABLE_TRIES: u32 = 1000;
const PAUSE: Duration = Duration::from_millis(1);
const TABLE_BYTES: u64 = RECORDS_MAX * RECORD_BYTES;

/// A session's mappings, as they stand in its file.
#[derive(Debug)]
pub struct MappedTable {
    memory: Mapping,
    /// The number of each record that is used.
    used: Vec<Option<u32>>,
}

impl MappedTable {
    /// Makes an empty table for a session that has none.
    ///
    /// # Errors
    /// [`SessionError`].
    fn make(arena: &Arena, id: SessionId) -> Result<Self, SessionError> {
        let [file] = arena.session_files(id, [(SessionFile::Mapped, TABLE_BYTES, TABLE_BYTES)])?;
        Ok(Self { memory: map_table(arena, &file)?, used: Vec::new() })
    }

    /// Returns the table that an earlier SharedFS has left, with its mappings.
    ///
    /// Returns `None` if there is none.
    ///
    /// # Errors
    /// [`SessionError`].
    fn take_up(arena: &Arena, id: SessionId) -> Result<Option<(Self, Vec<MappedRun>)>, SessionError> {
        let file = match arena.open_session_file(id, SessionFile::Mapped) {
            Ok(file) => file,
            Err(ArenaError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let mut table = Self { memory: map_table(arena, &file)?, used: Vec::new() };
        let mut runs = Vec::new();
        for record in 0..RECORDS_MAX {
            let run = table.load(record)?;
            table.used.push(run.map(|run| run.number));
            runs.extend(run);
        }
        Ok(Some((table, runs)))
    }

    fn load(&self, record: u64) -> Result<Option<MappedRun>, OutOfBounds> {
        let at = |offset: u64| self.memory.load_u64(record * RECORD_BYTES + offset);
        let word = at(WORD)?;
        if word == 0 {
            return Ok(None);
        }
        Ok(Some(MappedRun {
            number: (word >> NUMBER_AT) as u32 & NUMBER_MAX,
            follows: word & FOLLOWS != 0,
            inode: InodeId(at(0)?),
            logical_block: at(8)?,
            blocks: word & u64::from(u32::MAX),
            address: BlockAddress(at(16)?),
        }))
    }

    fn store(&self, record: u64, run: &MappedRun) -> Result<(), OutOfBounds> {
        let put = |offset: u64, value: u64| self.memory.store_u64(record * RECORD_BYTES + offset, value);
        put(0, run.inode.0)?;
        put(8, run.logical_block)?;
        put(16, run.address.0)?;
        let follows = if run.follows { FOLLOWS } else { 0 };
        put(WORD, follows | u64::from(run.number) << NUMBER_AT | run.blocks)
    }

    /// Records the runs that are mapped under a number.
    ///
    /// It records all of them or, without room, none.
    fn record_runs(&mut self, runs: &[MappedRun]) -> bool {
        let free: Vec<u64> = (0..RECORDS_MAX)
            .filter(|&record| self.used.get(record as usize).is_none_or(Option::is_none))
            .take(runs.len())
            .collect();
        if free.len() < runs.len() {
            return false;
        }
        for (&record, run) in free.iter().zip(runs) {
            if self.store(record, run).is_err() {
                return false;
            }
            let index = record as usize;
            self.used.resize(self.used.len().max(index + 1), None);
            self.used[index] = Some(run.number);
        }
        true
    }

    /// Removes the runs that were mapped under a number.
    fn forget_number(&mut self, number: u32) {
        for (record, used) in (0..).zip(&mut self.used).filter(|(_, used)| **used == Some(number)) {
            // The table is mapped whole.
            let _ = self.memory.store_u64(record * RECORD_BYTES + WORD, 0);
            *used = None;
        }
    }
}

fn map_table(arena: &Arena, file: &std::fs::File) -> Result<Mapping, SessionError> {
    Ok(Mapping::map(file, TABLE_BYTES, MappingAccess::ReadWrite, arena.medium())?)
}

/// Maps blocks of a file for a session.
///
/// # Errors
/// `EBADF` if the session has not opened the file; `ESTALE` if the file is gone; `EACCES` if the user may not read it;
/// `EAGAIN` if the mapping is to follow writes and the session does not hold the write lease; `EINVAL`; `EIO`;
/// [`SharedState::LATER`] without patience.
pub fn map_blocks(
    shared: &SharedState,
    id: SessionId,
    inode: InodeId,
    (first, blocks): (u64, u64),
    (number, follows): (u32, bool),
    patience: Patience,
) -> Result<Reply, Errno> {
    let end = first.checked_add(blocks).filter(|end| *end > first && number <= NUMBER_MAX).ok_or(Errno::EINVAL)?;
    if patience == Patience::Any {
        make_table(shared, id)?;
    }
    let mut state = lock_applied(shared, id, patience)?;
    for tries in 1.. {
        match try_to_map(&mut state, id, inode, (number, follows), first..end)? {
            MapBlocks::Done(runs) => return Ok(Reply::Mapped(runs.iter().map(MappedRun::extent).collect())),
            // A commit takes longer than a mapping by the kernel.
            MapBlocks::CommitFirst if shared.arena.medium().kind == MediumKind::Disk => break,
            MapBlocks::CommitFirst if patience == Patience::None => return Err(SharedState::LATER),
            MapBlocks::CommitFirst if tries < TRIES => shared.commit_all(&mut state)?,
            MapBlocks::CommitFirst | MapBlocks::Impossible => break,
        }
    }
    Ok(Reply::Mapped(Vec::new()))
}

fn try_to_map(
    state: &mut State,
    id: SessionId,
    inode: InodeId,
    (number, follows): (u32, bool),
    blocks: Range<u64>,
) -> Result<MapBlocks, Errno> {
    let found = state.store.inode(inode).map_err(|error| report_store_error(&error))?.ok_or(Errno::ESTALE)?;
    let session = state.live(id).ok_or(Errno::EIO)?;
    if !session.control.has_open(inode) {
        return Err(Errno::EBADF);
    }
    materialise::check_rights(state, session, (inode, &found), Access::READ, false)?;
    if state.leasing.manager.is_reserved_from(id, inode, &Ancestors(&state.store)) {
        return Ok(MapBlocks::Impossible);
    }
    // Then no other session holds a lease, and a session that gets one learns of the mapping.
    if follows && !state.leasing.manager.may_write(id, inode, &Ancestors(&state.store)) {
        return Err(Errno::EAGAIN);
    }
    // Writes through a mapping of the kernel's pages would be visible only after their write-back.
    let is_mounts = |other: &ServedSession| other.identity.kind == SessionKind::Mount && other.control.has_open(inode);
    if follows && state.sessions.values().any(is_mounts) {
        return Ok(MapBlocks::Impossible);
    }
    if !may_map_more(state, session, blocks.end - blocks.start) {
        return Ok(MapBlocks::Impossible);
    }
    let State { store, sessions, .. } = state;
    let table = sessions.get_mut(&id).and_then(|session| session.mapped.as_mut()).ok_or(SharedState::LATER)?;
    // The session asks again if it lost the answer.
    store.unmap_blocks(id, Some(number));
    table.forget_number(number);
    let mapped = store.map_blocks(id, (number, follows), inode, blocks).map_err(|error| report_store_error(&error))?;
    if let MapBlocks::Done(runs) = &mapped
        && !table.record_runs(runs)
    {
        table.forget_number(number);
        store.unmap_blocks(id, Some(number));
        return Ok(MapBlocks::Impossible);
    }
    Ok(mapped)
}

/// Returns whether an ordinary user's session may map so many blocks more.
fn may_map_more(state: &State, session: &ServedSession, blocks: u64) -> bool {
    if session.credentials.is_privileged() {
        return true;
    }
    let (mapped, kept) = mapped_by_user(state, session.identity.uid);
    let most = (state.store.space().blocks_total / USER_PART).min(USER_BLOCKS_MAX);
    let (used, limits) = state.store.quota(QuotaKey::User(session.identity.uid));
    let is_within = limits.blocks.is_none_or(|limit| kept == 0 || used.blocks.saturating_add(kept) < limit);
    mapped.saturating_add(blocks) <= most && is_within
}

/// Returns how many blocks a user's sessions have mapped, and how many of them belong to no file any more.
pub fn mapped_by_user(state: &State, uid: u32) -> (u64, u64) {
    let of_user = state.sessions.values().filter(|session| session.identity.uid == uid && session.mapped.is_some());
    let each = of_user.map(|session| state.store.mapped_blocks(session.id));
    each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// Makes a session's table, if it has none.
fn make_table(shared: &SharedState, id: SessionId) -> Result<(), Errno> {
    for _ in 0..TABLE_TRIES {
        if shared.lock().live(id).ok_or(Errno::EIO)?.mapped.is_some() {
            return Ok(());
        }
        // It takes a while on a disk, so the lock is free meanwhile.
        match MappedTable::make(&shared.arena, id) {
            Ok(table) => {
                let mut state = shared.lock();
                let session = state.sessions.get_mut(&id).ok_or(Errno::EIO)?;
                session.mapped = Some(table);
                return Ok(());
            }
            // Another thread of the process has nearly made it.
            Err(SessionError::Arena(ArenaError::Io { source, .. })) if source.kind() == ErrorKind::AlreadyExists => {
                std::thread::sleep(PAUSE);
            }
            Err(error) => {
                tracing::warn!(session = id.0, %error, "the table of mapped files can't be made");
                return Err(Errno::EIO);
            }
        }
    }
    Err(Errno::EIO)
}

/// Removes the mappings that a session has unmapped under a number.
pub fn unmap_blocks(shared: &SharedState, id: SessionId, number: u32) {
    let mut state = shared.lock();
    // Remove them from the table last: after a kill in between, blocks stay unused, and never have two owners.
    state.store.unmap_blocks(id, Some(number));
    if let Some(table) = state.sessions.get_mut(&id).and_then(|session| session.mapped.as_mut()) {
        table.forget_number(number);
    }
}

/// Shows what a session has written to a file in the file's mappings.
///
/// # Errors
/// `EACCES` if the session can't have written to it; `EIO` if the session is fenced or the shared area has failed.
pub fn show_writes(shared: &SharedState, id: SessionId, inode: InodeId) -> Result<(), Errno> {
    let mut state = shared.apply_settled(shared.lock(), id);
    let session = state.live(id).ok_or(Errno::EIO)?;
    let found = state.store.inode(inode).map_err(|error| report_store_error(&error))?;
    let may_show = |found: &Inode| {
        Ok::<_, StoreError>(state.reaches(session, (inode, found))? && state.may_change(session, (inode, found))?)
    };
    if !found.as_ref().map_or(Ok(true), may_show).map_err(|error| report_store_error(&error))? {
        return Err(Errno::EACCES);
    }
    if state.store.lags(inode) {
        shared.commit_all(&mut state)?;
        // For the case that there was nothing to commit. A running check of the arena makes mappings lag until it has
        // ended; no thread waits for that.
        state.store.show_lagging();
    }
    Ok(())
}

/// Takes up the mappings of a session whose process lives.
///
/// A dead process has nothing mapped any more.
///
/// # Errors
/// [`SessionError`].
pub fn take_up(arena: &Arena, state: &mut State, id: SessionId) -> Result<(), SessionError> {
    let Some(session) = state.sessions.get_mut(&id).filter(|session| session.identity.process.open().is_some()) else {
        return Ok(());
    };
    let Some((table, runs)) = MappedTable::take_up(arena, id)? else { return Ok(()) };
    session.mapped = Some(table);
    for run in runs {
        if !state.store.take_up_mapped(id, &run) {
            tracing::error!(session = id.0, ?run, "the blocks that a session has mapped are not there");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ashlar_pmem::ArenaOptions;

    use super::*;

    #[test]
    fn mapped_table_taken_up_holds_only_mapped_runs() {
        let directory = tempfile::tempdir().expect("a directory");
        let options = ArenaOptions::new(16 << 20);
        let arena = Arena::create(&directory.path().join("arena"), &options).expect("an arena");
        let id = SessionId(5);
        assert!(MappedTable::take_up(&arena, id).expect("none").is_none());
        let mut table = MappedTable::make(&arena, id).expect("made");
        assert!(MappedTable::make(&arena, id).is_err(), "there is one");
        let run = |number, first: u64| MappedRun {
            number,
            follows: number == 1,
            inode: InodeId(77),
            logical_block: first,
            blocks: 3,
            address: BlockAddress::new(ashlar_types::NodeNumber::FIRST, 2, first as u32 + 9),
        };
        let (one, two) = (1, 2);
        assert!(table.record_runs(&[run(one, 0), run(one, 3)]) && table.record_runs(&[run(two, 6)]));
        table.forget_number(one);
        let (mut again, found) = MappedTable::take_up(&arena, id).expect("read").expect("there");
        assert_eq!(found, [run(two, 6)]);
        let many: Vec<_> = (0..RECORDS_MAX).map(|first| run(3, first)).collect();
        assert!(!again.record_runs(&many), "there is no room for all");
        assert!(again.record_runs(&many[1..]));
    }
}
