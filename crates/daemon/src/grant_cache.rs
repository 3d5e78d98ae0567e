//! SharedFS's hand on the board, where sessions read what others were told ([`ashlar_wire::GrantCache`]).
//!
//! What a session is told of an inode that it only reads is posted too, if the board can read along without anything being taken from
//! anybody ([`LeaseManager::join`]). So where one process writes in a tree, under a lease on all of it, nothing is posted; where many
//! look at the same directories and files, as the programs of a build do, or one command after the other, the first asks for all of them.
//!
//! - A post is true while its lease stands, which is taken like any other: by a store, with nobody to wait for.
//! - Nothing is posted while a kernel may still believe what was so before: who reads the board waits for no kernel.
//! - A post names the updates of others that it shows and that may be lost yet, and the batch with which they are committed: from then on
//!   its readers need not write down that they depend on them.
//! - When a file was last accessed is noted without a lease, so its post is made anew then.
//! - Leases of the board that are a minute old go: it can't be seen whether they are of use, and they keep others from wider ones.
//! - The board lives as long as this SharedFS. Sessions that outlive it see that by their own control page, before anybody is granted anything.
//! - All sessions can read all posts, as they can read all data segments and ask for any inode: LibFS is trusted to read, not to write.
//!
//! [`LeaseManager::join`]: ashlar_lease::LeaseManager::join

use std::fs::File;
use std::io;
use std::sync::Arc;

use ashlar_lease::SlotWord;
use ashlar_pmem::{Mapping, MappingAccess, Medium};
use ashlar_types::{InodeId, SessionId, Timestamp};
use ashlar_wire::{Contents, GRANT_CACHE_BYTES, GrantCacheWriter, GrantReply, LeaseWord, Need, Post, ScopeKind};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::grant::{lease_word, now_us};
use crate::leasing::Ancestors;
use crate::session::read_only;
use crate::state::State;

/// Posts of one answer: what else a directory holds is posted with those that follow.
const POSTS_MAX: u64 = 1024;
/// The most entries of a directory, and pieces of a file, that are posted.
const ENTRIES_MAX: usize = 2048;
const EXTENTS_MAX: usize = 4096;

/// The board.
pub struct GrantPublisher {
    /// The session of no process that holds its leases.
    session: SessionId,
    writer: GrantCacheWriter<Arc<Mapping>>,
    file: Arc<File>,
}

impl GrantPublisher {
    /// An empty board.
    ///
    /// # Errors
    /// Where the system gives no memory for it, or no address space.
    pub fn make(session: SessionId) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("ashlar-grant-cache", flags)?);
        file.set_len(GRANT_CACHE_BYTES)?;
        let memory = Mapping::map(&file, GRANT_CACHE_BYTES, MappingAccess::ReadWrite, Medium::MEMORY);
        let memory = memory.map_err(|error| io::Error::other(error.to_string()))?;
        // Whoever has a descriptor could open it again to write: from here on nobody can, but by the mapping that is there.
        let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let writer = GrantCacheWriter::new(Arc::new(memory)).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { session, writer, file: Arc::new(read_only(&file)?) })
    }

    /// What sessions map.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// All updates of the store's batches up to this one are committed.
    pub fn set_persistent(&self, batch: u64) {
        self.writer.set_persistent(batch);
    }

    /// Has what stands of an inode say when it was last accessed: that has changed, though no lease says so. `batch` is the store's next one.
    pub fn note_accessed(&mut self, inode: InodeId, at: Timestamp, batch: u64) {
        let mut found = self.writer.grant_cache().find(inode, Need::default());
        let is_noted = found.as_mut().is_some_and(|post| {
            let attributes = &mut post.state.attributes;
            attributes.accessed = attributes.accessed.max(at);
            self.writer.post(post, inode, batch)
        });
        if !is_noted {
            self.writer.forget(inode);
        }
    }

    /// Whether all that is needed of an inode stands there and is true.
    pub fn has(&self, inode: InodeId, need: Need) -> bool {
        self.writer.grant_cache().has(inode, need)
    }

    /// Writes a word, if it is one of the board's.
    pub fn write(&self, word: &SlotWord) {
        if word.session == self.session {
            self.writer.grant_cache().set_word(word.slot, lease_word(word), word.inode);
        }
    }
}

/// Posts what a session is told, as far as it may only read that and nobody else may write it.
pub fn post(state: &mut State, replies: &[GrantReply]) {
    let State { grant_cache: Some(grant_cache), leasing, store, counters, .. } = state else { return };
    // The files of a directory stand under one lease, so the board joins its readers once for all of them.
    let mut joined: Option<(LeaseWord, u32, SlotWord)> = None;
    let mut posts = 0;
    for reply in replies.iter().filter(|reply| may_be_posted(reply)) {
        let (told, word) = (&reply.state, LeaseWord(reply.word));
        let (contents, entries) = (told.contents.is_some(), told.entries.is_some());
        // What a mount is told of what is reserved for the kernel is nobody else's.
        if leasing.manager.is_reserved_from(grant_cache.session, reply.inode, &Ancestors(store)) {
            continue;
        }
        if posts == POSTS_MAX || grant_cache.has(reply.inode, Need { contents, entries, xattrs: true, children: false })
        {
            continue;
        }
        let is_under_it = |joined: &(LeaseWord, u32, SlotWord)| (joined.0, joined.1) == (word, reply.slot);
        let lease = match joined.filter(|joined| word.scope() == ScopeKind::Files && is_under_it(joined)) {
            Some((_, _, lease)) => lease,
            None => match leasing.manager.join(now_us(), grant_cache.session, reply.inode, &Ancestors(store)) {
                Some(lease) => lease.word,
                None => continue,
            },
        };
        grant_cache.write(&lease);
        joined = Some((word, reply.slot, lease));
        let dependencies = leasing.manager.dependencies(grant_cache.session, reply.inode, &Ancestors(store));
        let (slot, word, mut posted) = (lease.slot, lease_word(&lease), told.clone());
        // What stands there already is as true as this.
        let before = grant_cache.writer.grant_cache().find(reply.inode, Need::default());
        if let Some(before) = before.filter(|before| (before.slot, before.word) == (slot, word)) {
            posted.contents = posted.contents.or(before.state.contents);
            posted.entries = posted.entries.or(before.state.entries);
            posted.xattrs = posted.xattrs.or(before.state.xattrs);
        }
        if posted.xattrs.is_none() {
            // Who asked has been told already.
            let Ok(xattrs) = store.xattrs(reply.inode) else { continue };
            posted.xattrs = Some(xattrs);
        }
        let post = Post { slot, word, state: posted, dependencies };
        posts += u64::from(grant_cache.writer.post(&post, reply.inode, store.next_batch()));
    }
    counters.posts += posts;
}

/// Whether it is something to read for all, and has room on the board.
fn may_be_posted(reply: &GrantReply) -> bool {
    let (told, word) = (&reply.state, LeaseWord(reply.word));
    let is_long = match (&told.entries, &told.contents) {
        (Some(entries), _) => entries.len() > ENTRIES_MAX,
        (_, Some(Contents::Extents(extents))) => extents.len() > EXTENTS_MAX,
        _ => false,
    };
    let is_read = !word.may_write() && word.scope() != ScopeKind::Subtree;
    // What has no name may be freed under leases that say nothing of it.
    is_read && reply.inode != InodeId::RENAME && told.attributes.links > 0 && !is_long
}

#[cfg(test)]
mod tests {
    use ashlar_log::Log;
    use ashlar_pmem::{Arena, ArenaOptions, SessionFile};
    use ashlar_store::Store;
    use ashlar_types::LogPosition;
    use ashlar_update::{SetAttributes, Update};
    use ashlar_wire::{Credit, CreditKind, SessionKind, Want};

    use super::*;
    use crate::identity::{Identity, Process};
    use crate::session::{Blank, LogRoom};
    use crate::shared::Shared;
    use crate::{Config, digest, grant, recovery};

    const LOG_BYTES: u64 = 1 << 20;

    /// A session of this process, and its log.
    fn session(shared: &Shared) -> (SessionId, Log<Arc<Mapping>>) {
        let process = Process::find(std::process::id()).expect("this process");
        let (kind, label) = (SessionKind::Process, "test".into());
        let identity = Identity { process, uid: 0, gid: 0, groups: Vec::new(), kind, label };
        let mut state = shared.lock();
        let id = state.store.next_session_id().expect("a number");
        let blank = Blank::make(&shared.arena, id, LogRoom { bytes: LOG_BYTES, allocated: LOG_BYTES }).expect("made");
        let mut session = blank.give(identity).expect("given");
        session.grant_credit(Credit { blocks: 9, metadata_bytes: 1 << 20 }, CreditKind::Common).expect("granted");
        state.store.set_session(id, session.log.generation(), LogPosition(0));
        state.sessions.insert(id, session);
        let file = shared.arena.open_session_file(id, SessionFile::Log).expect("there");
        let memory = Mapping::map(&file, LOG_BYTES, MappingAccess::ReadWrite, shared.arena.medium()).expect("mapped");
        (id, Log::open(Arc::new(memory)).expect("a log"))
    }

    /// Where an arena was resized and the commit for that failed, the frozen batch counted once more when it was tried again: so it stood for
    /// updates that were applied after it was frozen, and that a crash could still lose.
    #[test]
    fn what_is_applied_after_a_commit_has_failed_is_not_taken_for_persistent_with_its_second_try() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("arena");
        let arena =
            Arena::create(&path, &ArenaOptions { size_bytes: 16 << 20, emulate_pmem: false }).expect("an arena");
        Store::format(&arena, Timestamp::default()).expect("formatted");
        drop(arena);
        let shared =
            recovery::recover(Config { cache_ttl_ms: 0, lease_hold_us: 0, ..Config::new(&path) }).expect("recovered");
        let ((writer, log), (reader, _)) = (session(&shared), session(&shared));
        let need = Need { entries: true, ..Need::default() };
        let acquire = |id, write| {
            let want = Want { inode: InodeId::ROOT, write, scope: ScopeKind::Node, need };
            grant::acquire(&shared, id, &[want], grant::Patience::Any).expect("granted");
        };
        let change = |mode| {
            let at = Timestamp { seconds: 7, nanoseconds: 0 };
            let (inode, mode) = (InodeId::ROOT, Some(mode));
            let set = SetAttributes { inode, mode, uid: None, gid: None, accessed: None, modified: None, at };
            let update = Update::SetAttributes(set);
            log.append(log.seal_count(), update.kind() as u8, &update.encode().parts()).expect("appended");
        };
        let is_posted_as_persistent = |state: &State| {
            let post =
                state.grant_cache.as_ref().expect("a grant cache").writer.grant_cache().find(InodeId::ROOT, need);
            post.expect("posted").dependencies.is_empty()
        };
        acquire(writer, true);
        change(0o700);
        let mut state = shared.apply_settled(shared.lock(), writer);
        let failed = ashlar_pmem::witness::refuse_transactions(|| digest::commit(&mut state));
        assert!(failed.is_err());
        drop(state);
        change(0o711);
        acquire(reader, false);
        let mut state = shared.lock();
        assert!(!is_posted_as_persistent(&state));
        // Who waits now for all that is applied waits for this commit.
        let target = state.commits_begun + 1;
        let job = digest::begin_commit(&mut state).expect("the frozen batch");
        digest::finish_commit(&mut state, job.run()).expect("committed");
        assert!(state.store.committed(writer) < state.store.applied(writer));
        assert!(!is_posted_as_persistent(&state), "it's in the next batch");
        assert!(state.commits_ended < target);
        digest::commit(&mut state).expect("committed");
        assert_eq!(state.store.committed(writer), state.store.applied(writer));
        assert!(is_posted_as_persistent(&state) && state.commits_ended == target);
    }
}
