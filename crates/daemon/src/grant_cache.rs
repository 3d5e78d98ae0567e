//! Publishes grants into the grant cache ([`ashlar_wire::GrantCache`]).
//!
//! All sessions read them there. SharedFS publishes each grant that a session only reads. The grant cache must be able
//! to hold a read lease beside that session, without taking a lease from another one ([`LeaseManager::join_readers`]).
//! So nothing is published where one process writes in a tree under a lease on all of it. Where many processes access
//! the same directories and files, the first one asks for all of them. Programs of a build do so, or commands that
//! follow each other.
//!
//! - A published grant is true while its lease stands. SharedFS takes that lease like any other: by a store, with no
//!   process to wait for.
//! - SharedFS publishes nothing while a kernel may still believe the old state: a reader of the grant cache waits for
//!   no kernel.
//! - A published grant names the updates of other sessions that it shows and that may still be lost. It also names the
//!   batch that commits them: after that commit, its readers need not record that they depend on them.
//! - An access changes a file's access time without a lease, so SharedFS then publishes the grant anew.
//! - SharedFS takes the grant cache's leases after a minute: it can't see whether they are of use, and they keep
//!   sessions from wider ones.
//! - The grant cache lives as long as this SharedFS. A session that outlives it sees that in its own control page,
//!   before any session is granted anything.
//! - All sessions can read all published grants. So SharedFS publishes only what each user may see that has ever opened
//!   a session since SharedFS started: its *audience*. The super-user may see all, so a machine of one user loses
//!   nothing. Beyond a few users, only what every user may see is published. If the audience grows, the memory is
//!   cleared before the new user's session maps it; if a directory is narrowed, what lies below is withdrawn.
//!
//! [`LeaseManager::join_readers`]: ashlar_lease::LeaseManager::join_readers

use std::fs::File;
use std::io;
use std::sync::Arc;

use ashlar_lease::SlotWord;
use ashlar_pmem::{Mapping, MappingAccess, Medium};
use ashlar_store::{Store, StoreError};
use ashlar_types::{Contents, Credentials, InodeId, LeaseScope, SessionId, Timestamp};
use ashlar_wire::{GRANT_CACHE_BYTES, GrantCacheWriter, GrantReply, LeaseWord, Need, PublishedGrant};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::grant::{lease_word, now_us};
use crate::leasing::Ancestors;
use crate::session::read_only;
use crate::state::State;
use crate::ways::{TRUSTED_PREFIX, USER_PREFIX, Viewer, Visibility};

/// The most grants published for one answer.
///
/// Later answers publish the rest of a directory.
const PUBLISHED_MAX: u64 = 1024;
/// The most entries of a directory, and extents of a file, in one published grant.
const ENTRIES_MAX: usize = 2048;
const EXTENTS_MAX: usize = 4096;
/// The most users for each of which the ways to a published inode are checked.
const AUDIENCE_MAX: usize = 8;
/// The most published inodes that are checked anew when a directory is narrowed. If there are more, all are withdrawn.
const CHECKED_MAX: usize = 4096;

/// The writing side of the grant cache.
pub struct GrantPublisher {
    /// The session without a process that holds the grant cache's leases.
    session: SessionId,
    writer: GrantCacheWriter<Arc<Mapping>>,
    file: Arc<File>,
    /// The ordinary users whose sessions have mapped it.
    audience: Vec<Viewer>,
    /// At least how many inodes have a grant in it.
    published: usize,
}

impl GrantPublisher {
    /// Makes an empty grant cache.
    ///
    /// # Errors
    /// The system's, if it gives no memory or no address space for the grant cache.
    pub fn make(session: SessionId) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("ashlar-grant-cache", flags)?);
        file.set_len(GRANT_CACHE_BYTES)?;
        let memory = Mapping::map(&file, GRANT_CACHE_BYTES, MappingAccess::ReadWrite, Medium::MEMORY);
        let memory = memory.map_err(|error| io::Error::other(error.to_string()))?;
        // A process with a descriptor could open the file again to write. From here on only the existing mapping can
        // write.
        let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let writer = GrantCacheWriter::new(Arc::new(memory)).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { session, writer, file: Arc::new(read_only(&file)?), audience: Vec::new(), published: 0 })
    }

    /// Returns the file that sessions map.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Adds an ordinary user to the audience.
    pub fn admit(&mut self, user: &Credentials) {
        let viewer = Viewer::User(user.clone());
        if self.is_for(&viewer) || self.is_for(&Viewer::Everyone) {
            return;
        }
        if self.audience.len() < AUDIENCE_MAX {
            self.audience.push(viewer);
        } else {
            self.audience = vec![Viewer::Everyone];
        }
        self.writer.clear();
        self.published = 0;
    }

    /// Returns whether the audience is checked by what this viewer may see, among others.
    pub fn is_for(&self, viewer: &Viewer) -> bool {
        self.audience.contains(viewer)
    }

    /// Returns the session that holds the grant cache's leases.
    pub fn holder(&self) -> SessionId {
        self.session
    }

    /// Publishes that all updates of the store's batches up to this one are committed.
    pub fn set_persistent(&self, batch: u64) {
        self.writer.set_persistent(batch);
    }

    /// Changes the access time in an inode's published grant, which needs no lease.
    ///
    /// `batch` is the store's next one.
    pub fn record_access_time(&mut self, inode: InodeId, at: Timestamp, batch: u64) {
        let mut found = self.writer.grant_cache().find(inode, Need::default());
        let is_noted = found.as_mut().is_some_and(|post| {
            let attributes = &mut post.state.attributes;
            attributes.accessed = attributes.accessed.max(at);
            self.writer.publish(post, inode, batch)
        });
        if !is_noted {
            self.writer.withdraw(inode);
        }
    }

    /// Returns whether the grant cache holds all the needed, true state of an inode.
    pub fn has_grant(&self, inode: InodeId, need: Need) -> bool {
        self.writer.grant_cache().has(inode, need)
    }

    /// Writes a lease word, if it is one of the grant cache's.
    pub fn write_word(&self, word: &SlotWord) {
        if word.session == self.session {
            self.writer.grant_cache().set_word(word.slot, lease_word(word), word.inode);
        }
    }
}

/// Withdraws what not all of the audience may see any more.
///
/// # Errors
/// Those of the store.
pub fn withdraw_hidden(state: &mut State) -> Result<(), StoreError> {
    let State { grant_cache: Some(grant_cache), store, ways, .. } = state else { return Ok(()) };
    if grant_cache.audience.is_empty() {
        return Ok(());
    }
    if std::mem::take(&mut grant_cache.published) > CHECKED_MAX {
        grant_cache.writer.withdraw_all();
        return Ok(());
    }
    for inode in grant_cache.writer.published() {
        let seen = match store.inode(inode)? {
            Some(found) => ways.visibility(store, &grant_cache.audience, (inode, &found))?,
            None => Visibility::Hidden,
        };
        match seen {
            Visibility::Hidden => grant_cache.writer.withdraw(inode),
            _ => grant_cache.published += 1,
        }
    }
    Ok(())
}

/// Returns extended attributes that are published with a state; `None` if some of the audience may not see all of them.
///
/// The sent ones may lack values that the asking user may not see.
fn shown_xattrs(store: &Store, inode: InodeId, seen: Visibility) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let hides =
        |name: &[u8]| name.starts_with(TRUSTED_PREFIX) || seen != Visibility::All && name.starts_with(USER_PREFIX);
    let xattrs = store.xattrs(inode).ok()?;
    (!xattrs.iter().any(|(name, _)| hides(name))).then_some(xattrs)
}

/// Publishes an answer's grants that sessions only read.
///
/// No other session may write the inode.
pub fn publish(state: &mut State, replies: &[GrantReply]) {
    let State { grant_cache: Some(grant_cache), leasing, store, counters, ways, .. } = state else { return };
    // The files of a directory stand under one lease, so the grant cache joins its readers once for all of them.
    let mut joined: Option<(LeaseWord, u32, SlotWord)> = None;
    let mut count = 0;
    for reply in replies.iter().filter(|reply| may_be_published(reply)) {
        let (state_sent, word) = (&reply.state, LeaseWord(reply.word));
        let seen = ways.visibility(store, &grant_cache.audience, (reply.inode, &state_sent.attributes));
        // The session that asked has its answer already.
        let Ok(seen @ (Visibility::All | Visibility::Attributes)) = seen else { continue };
        let is_content = |contents: &Contents| !matches!(contents, Contents::Withheld(_));
        let contents = seen == Visibility::All && state_sent.contents.as_ref().is_some_and(is_content);
        let entries = seen == Visibility::All && state_sent.entries.is_some();
        // A mount's grants on inodes that are reserved for the kernel are for that mount alone.
        if leasing.manager.is_reserved_from(grant_cache.session, reply.inode, &Ancestors(store)) {
            continue;
        }
        if count == PUBLISHED_MAX
            || grant_cache.has_grant(reply.inode, Need { contents, entries, xattrs: true, children: false })
        {
            continue;
        }
        let is_under_it = |joined: &(LeaseWord, u32, SlotWord)| (joined.0, joined.1) == (word, reply.slot);
        let lease = match joined.filter(|joined| word.scope() == LeaseScope::Files && is_under_it(joined)) {
            Some((_, _, lease)) => lease,
            None => match leasing.manager.join_readers(now_us(), grant_cache.session, reply.inode, &Ancestors(store)) {
                Some(lease) => lease.word,
                None => continue,
            },
        };
        grant_cache.write_word(&lease);
        joined = Some((word, reply.slot, lease));
        let dependencies = leasing.manager.dependencies(grant_cache.session, reply.inode, &Ancestors(store));
        let (slot, word, mut published) = (lease.slot, lease_word(&lease), state_sent.clone());
        published.contents = published.contents.filter(|_| contents);
        published.entries = published.entries.filter(|_| entries);
        published.hides_entries = false;
        if !grant_cache.audience.is_empty() {
            let Some(xattrs) = shown_xattrs(store, reply.inode, seen) else { continue };
            published.xattrs = Some(xattrs);
        }
        // State that is published under the same lease is as true as this.
        let before = grant_cache.writer.grant_cache().find(reply.inode, Need::default());
        if let Some(before) = before.filter(|before| (before.slot, before.word) == (slot, word)) {
            published.contents = published.contents.or(before.state.contents);
            published.entries = published.entries.or(before.state.entries);
            published.xattrs = published.xattrs.or(before.state.xattrs);
        }
        if published.xattrs.is_none() {
            // The session that asked has its answer already.
            let Ok(xattrs) = store.xattrs(reply.inode) else { continue };
            published.xattrs = Some(xattrs);
        }
        let post = PublishedGrant { slot, word, state: published, dependencies };
        grant_cache.published += 1;
        count += u64::from(grant_cache.writer.publish(&post, reply.inode, store.next_batch()));
    }
    counters.posts += count;
}

/// Returns whether a grant is for reading, and short enough for the grant cache.
fn may_be_published(reply: &GrantReply) -> bool {
    let (state_sent, word) = (&reply.state, LeaseWord(reply.word));
    let is_long = match (&state_sent.entries, &state_sent.contents) {
        (Some(entries), _) => entries.len() > ENTRIES_MAX,
        (_, Some(Contents::Extents(extents))) => extents.len() > EXTENTS_MAX,
        _ => false,
    };
    let is_read = !word.may_write() && word.scope() != LeaseScope::Subtree;
    // An inode without a name may be freed under leases that do not cover it.
    is_read && reply.inode != InodeId::RENAME && state_sent.attributes.links > 0 && !is_long
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ashlar_log::Log;
    use ashlar_pmem::SessionFile;
    use ashlar_types::FileKind;
    use ashlar_update::{SetAttributes, Update};
    use ashlar_wire::{Credit, CreditKind, LeaseRequest};

    use super::*;
    use crate::session::{LogRoom, PreparedSession};
    use crate::shared_state::SharedState;
    use crate::test_sessions::{identity, insert_session, make_arena};
    use crate::{Config, digest, grant, recovery};

    const LOG_BYTES: u64 = 1 << 20;

    /// Starts SharedFS on a new arena; leases move at once.
    fn start(place: &Path) -> SharedState {
        make_arena(place);
        recovery::recover(Config { cache_ttl_ms: 0, lease_hold_us: 0, ..Config::new(place) }).expect("recovered")
    }

    /// Opens a session of this process, and its log.
    fn session(shared: &SharedState) -> (SessionId, Log<Arc<Mapping>>) {
        let id = shared.lock().store.next_session_id().expect("a number");
        let prepared =
            PreparedSession::make(&shared.arena, id, LogRoom { bytes: LOG_BYTES, allocated: LOG_BYTES }).expect("made");
        let mut session = prepared.give_to(identity(std::process::id(), 0)).expect("given");
        session.grant_credit(Credit { blocks: 9, metadata_bytes: 1 << 20 }, CreditKind::Common).expect("granted");
        insert_session(shared, session);
        let file = shared.arena.open_session_file(id, SessionFile::Log).expect("there");
        let memory = Mapping::map(&file, LOG_BYTES, MappingAccess::ReadWrite, shared.arena.medium()).expect("mapped");
        (id, Log::open(Arc::new(memory)).expect("a log"))
    }

    /// A commit retried after a failure covers only the frozen batch.
    ///
    /// It failed after a resize. It once counted one batch more on its second try. So it stood for updates that were
    /// applied after the freeze, and that a crash could still lose.
    #[test]
    fn commit_retry_persists_only_frozen_batch() {
        let directory = tempfile::tempdir().expect("a directory");
        let shared = start(&directory.path().join("arena"));
        let ((writer, log), (reader, _)) = (session(&shared), session(&shared));
        let need = Need { entries: true, ..Need::default() };
        let acquire = |id, write| {
            let want = LeaseRequest::on_inode(InodeId::ROOT, write, need);
            grant::acquire(&shared, id, &[want], grant::Patience::Any, usize::MAX).expect("granted");
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
        // A thread that waits now for all that is applied waits for this commit.
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

    #[test]
    fn only_what_the_audience_may_see_is_published() {
        let directory = tempfile::tempdir().expect("a directory");
        let shared = start(&directory.path().join("arena"));
        let ((writer, log), (reader, _)) = (session(&shared), session(&shared));
        let need = Need { contents: true, entries: true, xattrs: true, children: false };
        let acquire = |id, inode, write| {
            let want = LeaseRequest::on_inode(inode, write, need);
            grant::acquire(&shared, id, &[want], grant::Patience::Any, usize::MAX).expect("granted");
        };
        let append = |update: &Update<'_>| {
            log.append(log.seal_count(), update.kind() as u8, &update.encode().parts()).expect("appended");
        };
        let at = Timestamp { seconds: 7, nanoseconds: 0 };
        let (private, open) = (InodeId(1000), InodeId(1001));
        let (below, shown, secret) = (InodeId(1002), InodeId(1003), InodeId(1004));
        let page = Arc::clone(&shared.lock().sessions[&writer].page);
        let added = shared.lock().sessions.get_mut(&writer).expect("there").ranges.add(&*page, private, 9);
        added.expect("a range");
        acquire(writer, InodeId::ROOT, true);
        let make = |inode, parent, name: &[u8], kind, mode| {
            let (uid, gid, device) = (0, 0, 0);
            let (target, acl_access, acl_default) = (&[][..], &[][..], &[][..]);
            append(&Update::Create(ashlar_update::Create {
                inode,
                parent,
                name,
                kind,
                mode,
                uid,
                gid,
                device,
                at,
                target,
                acl_access,
                acl_default,
            }));
        };
        make(private, InodeId::ROOT, b"private", FileKind::Directory, 0o700);
        make(open, InodeId::ROOT, b"open", FileKind::Directory, 0o755);
        make(below, private, b"below", FileKind::Regular, 0o644);
        make(shown, open, b"shown", FileKind::Regular, 0o644);
        make(secret, open, b"secret", FileKind::Regular, 0o600);
        let parts = |inode| {
            let state = shared.lock();
            let cache = state.grant_cache.as_ref().expect("a grant cache").writer.grant_cache();
            let has = |need| cache.has(inode, need);
            let whole = Need { xattrs: true, ..need };
            [has(Need::default()), has(whole)]
        };
        let read_all = || {
            [private, open, below, shown, secret].into_iter().for_each(|inode| acquire(reader, inode, false));
            [private, open, below, shown, secret].map(parts)
        };
        let (all, part, none) = ([true, true], [true, false], [false, false]);
        assert_eq!(read_all(), [all; 5], "the super-user may see all");
        let user = Credentials { uid: 7, gid: 7, groups: Vec::new(), checked: false };
        shared.lock().ways.add_user(&user);
        shared.lock().grant_cache.as_mut().expect("a grant cache").admit(&user);
        assert_eq!([private, open, below, shown, secret].map(parts), [none; 5], "the user maps no older grant");
        assert_eq!(read_all(), [part, all, none, all, part]);
        let (mode, uid, gid, accessed, modified) = (Some(0o700), None, None, None, None);
        acquire(writer, open, true);
        append(&Update::SetAttributes(SetAttributes { inode: open, mode, uid, gid, accessed, modified, at }));
        drop(shared.apply_settled(shared.lock(), writer));
        assert_eq!([shown, secret].map(parts), [none; 2], "the way is narrowed");
    }
}
