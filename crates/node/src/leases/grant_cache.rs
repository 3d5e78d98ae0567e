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

use std::sync::Arc;

use ashlar_lease::SlotWord;
use ashlar_pmem::SharedMemory;
use ashlar_store::{Store, StoreError};
use ashlar_types::{Contents, Credentials, InodeId, LeaseScope, SessionId, Timestamp};
use ashlar_wire::{GrantCache, GrantCacheWriter, GrantReply, LeaseWord, Need, PublishedGrant};

use crate::access::ways::{TRUSTED_PREFIX, USER_PREFIX, Viewer, Visibility, Ways};
use crate::leases::leasing::{Ancestors, Leasing, lease_word};

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
    writer: GrantCacheWriter<Arc<SharedMemory>>,
    /// The ordinary users whose sessions have mapped it.
    audience: Vec<Viewer>,
    /// At least how many inodes have a grant in it.
    published: usize,
}

impl GrantPublisher {
    /// Takes fresh memory as an empty grant cache; `None` if it is too short.
    pub fn new(session: SessionId, memory: Arc<SharedMemory>) -> Option<Self> {
        Some(Self { session, writer: GrantCacheWriter::new(memory)?, audience: Vec::new(), published: 0 })
    }

    /// Returns the reading side.
    pub fn grant_cache(&self) -> &GrantCache<Arc<SharedMemory>> {
        self.writer.grant_cache()
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
            self.writer.set_word(word.slot, lease_word(word), word.inode);
        }
    }

    /// Withdraws what not all of the audience may see any more.
    ///
    /// # Errors
    /// Those of the store.
    pub fn withdraw_hidden(&mut self, store: &Store, ways: &Ways) -> Result<(), StoreError> {
        if self.audience.is_empty() {
            return Ok(());
        }
        if std::mem::take(&mut self.published) > CHECKED_MAX {
            self.writer.withdraw_all();
            return Ok(());
        }
        for inode in self.writer.published() {
            let seen = match store.inode(inode)? {
                Some(found) => ways.visibility(store, &self.audience, (inode, &found))?,
                None => Visibility::Hidden,
            };
            match seen {
                Visibility::Hidden => self.writer.withdraw(inode),
                _ => self.published += 1,
            }
        }
        Ok(())
    }

    /// Publishes an answer's grants that sessions only read.
    ///
    /// No other session may write the inode. Returns how many were published.
    pub fn publish(
        &mut self,
        replies: &[GrantReply],
        leasing: &mut Leasing,
        (store, ways): (&Store, &Ways),
        now_us: u64,
    ) -> u64 {
        // The files of a directory stand under one lease, so the grant cache joins its readers once for all of them.
        let mut joined: Option<(LeaseWord, u32, SlotWord)> = None;
        let mut count = 0;
        for reply in replies.iter().filter(|reply| may_be_published(reply)) {
            let (state_sent, word) = (&reply.state, LeaseWord(reply.word));
            let seen = ways.visibility(store, &self.audience, (reply.inode, &state_sent.attributes));
            // The session that asked has its answer already.
            let Ok(seen @ (Visibility::All | Visibility::Attributes)) = seen else { continue };
            let is_content = |contents: &Contents| !matches!(contents, Contents::Withheld(_));
            let contents = seen == Visibility::All && state_sent.contents.as_ref().is_some_and(is_content);
            let entries = seen == Visibility::All && state_sent.entries.is_some();
            // A mount's grants on inodes that are reserved for the kernel are for that mount alone.
            if leasing.manager.is_reserved_from(self.session, reply.inode, &Ancestors(store)) {
                continue;
            }
            if count == PUBLISHED_MAX
                || self.has_grant(reply.inode, Need { contents, entries, xattrs: true, children: false })
            {
                continue;
            }
            let is_under_it = |joined: &(LeaseWord, u32, SlotWord)| (joined.0, joined.1) == (word, reply.slot);
            let lease = match joined.filter(|joined| word.scope() == LeaseScope::Files && is_under_it(joined)) {
                Some((_, _, lease)) => lease,
                None => match leasing.manager.join_readers(now_us, self.session, reply.inode, &Ancestors(store)) {
                    Some(lease) => lease.word,
                    None => continue,
                },
            };
            self.write_word(&lease);
            joined = Some((word, reply.slot, lease));
            let dependencies = leasing.manager.dependencies(self.session, reply.inode, &Ancestors(store));
            let (slot, word, mut published) = (lease.slot, lease_word(&lease), state_sent.clone());
            published.contents = published.contents.filter(|_| contents);
            published.entries = published.entries.filter(|_| entries);
            published.hides_entries = false;
            if !self.audience.is_empty() {
                let Some(xattrs) = shown_xattrs(store, reply.inode, seen) else { continue };
                published.xattrs = Some(xattrs);
            }
            // A state that is published under the same lease is as true as this.
            let before = self.writer.grant_cache().find(reply.inode, Need::default());
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
            self.published += 1;
            count += u64::from(self.writer.publish(&post, reply.inode, store.next_batch()));
        }
        count
    }
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
