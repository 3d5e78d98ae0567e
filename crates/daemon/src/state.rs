//! What the one lock guards, and the application of records to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ashlar_store::{Store, StoreError};
use ashlar_types::{InodeId, LogPosition, SessionId};
use ashlar_update::{Applied, Update};
use ashlar_wire::Credit;

use crate::counters::Counters;
use crate::leasing::Leasing;
use crate::locking::Locking;
use crate::page;
use crate::session::Session;
use crate::validate::{Judge, Offence, Refusal};

/// The session under whose name SharedFS itself applies updates: the freeing of orphans.
pub const OWN_SESSION: SessionId = SessionId(0);

/// Records and bytes after which a digest lets others have the lock.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// Records.
    pub records: u64,
    /// Bytes of log.
    pub bytes: u64,
}

impl Slice {
    /// Short enough that nobody notices the wait: well below a millisecond.
    pub const BACKGROUND: Self = Self { records: 256, bytes: 1 << 20 };
    /// All there is: a lease can't move before its holder's log is applied.
    pub const ALL: Self = Self { records: u64::MAX, bytes: u64::MAX };
}

/// What the one lock guards.
pub struct State {
    /// The shared area.
    pub store: Store,
    /// Leases.
    pub leasing: Leasing,
    /// File locks.
    pub locking: Locking,
    /// Sessions, the fenced ones too, until their process is gone.
    pub sessions: BTreeMap<SessionId, Session>,
    /// Inodes without links that may be open somewhere.
    pub orphans: BTreeSet<InodeId>,
    /// What happened.
    pub counters: Counters,
    /// When the oldest update was applied that no commit has taken yet.
    pub oldest_uncommitted: Option<Instant>,
    /// Somebody waits for a commit.
    pub commit_wanted: bool,
    /// A batch is being written.
    pub is_committing: bool,
    /// Commits begun, and commits ended well.
    pub commits_begun: u64,
    /// See [`Self::commits_begun`].
    pub commits_ended: u64,
    /// Somebody waits for a digest.
    pub digest_wanted: bool,
    /// For how long a mount's kernel may believe its cache.
    pub cache_ttl: Duration,
    /// No grant is told before this time: an earlier SharedFS may have left kernels with stale caches.
    pub not_before: Instant,
    /// SharedFS is about to end.
    pub ending: bool,
    /// The shared area is unusable: SharedFS must end, and say why.
    pub failure: Option<StoreError>,
    /// Logs are being applied after a start, in the order of their dependencies.
    pub is_recovering: bool,
    /// At recovery: who waits for whom.
    pub unmet: BTreeMap<SessionId, SessionId>,
    /// Sessions whose logs could not be read at recovery.
    pub lost: BTreeSet<SessionId>,
    /// Files that a session had open for writing before others took its right to, by session.
    pub kept_open: BTreeSet<(SessionId, InodeId)>,
}

impl State {
    /// The state of a store without sessions.
    pub fn new(store: Store, leasing: Leasing, cache_ttl: Duration) -> Result<Self, StoreError> {
        let orphans = store.orphans()?.into_iter().collect();
        Ok(Self {
            store,
            leasing,
            locking: Locking::default(),
            sessions: BTreeMap::new(),
            orphans,
            counters: Counters::default(),
            oldest_uncommitted: None,
            commit_wanted: false,
            is_committing: false,
            commits_begun: 0,
            commits_ended: 0,
            digest_wanted: false,
            cache_ttl,
            not_before: Instant::now(),
            ending: false,
            failure: None,
            is_recovering: false,
            unmet: BTreeMap::new(),
            lost: BTreeSet::new(),
            kept_open: BTreeSet::new(),
        })
    }

    /// The session, unless it's gone or fenced.
    pub fn live(&self, id: SessionId) -> Option<&Session> {
        self.sessions.get(&id).filter(|session| session.fenced.is_none())
    }

    /// The sessions that are neither gone nor fenced.
    pub fn live_ids(&self) -> Vec<SessionId> {
        self.sessions.values().filter(|session| session.fenced.is_none()).map(|session| session.id).collect()
    }

    /// Applies a session's log up to `to`, or one slice of it. Whether `to` was reached; a session that forged a record is
    /// fenced, and then there is nothing more to reach.
    pub fn apply(&mut self, id: SessionId, to: LogPosition, slice: Slice) -> bool {
        let Some(session) = self.live(id) else { return true };
        let (log, from) = (Arc::clone(&session.log), self.store.applied(id));
        if from >= to {
            return true;
        }
        let mut scanner = log.scanner(from, to);
        let (mut records, mut refusal, mut reached) = (0, None, false);
        while records < slice.records && scanner.position().0 - from.0 < slice.bytes {
            match scanner.next() {
                None => {
                    reached = true;
                    break;
                }
                Some(Ok(record)) => {
                    records += 1;
                    if let Err(error) = self.apply_record(id, record.kind, record.body, record.position, record.end) {
                        refusal = Some(error);
                        break;
                    }
                }
                Some(Err(corrupt)) => {
                    refusal = Some(Offence::Log(corrupt.to_string()).into());
                    break;
                }
            }
        }
        if reached {
            self.store.advance(id, to);
        }
        self.note_applied(id, from, records);
        match refusal {
            None => reached,
            Some(error) => {
                self.refuse(id, error);
                true
            }
        }
    }

    fn note_applied(&mut self, id: SessionId, from: LogPosition, records: u64) {
        let applied = self.store.applied(id);
        self.counters.records_applied += records;
        self.counters.bytes_applied += applied.0.saturating_sub(from.0);
        if applied > from {
            self.oldest_uncommitted.get_or_insert_with(Instant::now);
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            session.records += records;
            session.control.set_applied(applied);
            // The page is mapped whole, so the store can't miss it.
            let _ = page::set_validated(&*session.page, applied.max(session.judged));
        }
    }

    fn apply_record(
        &mut self,
        id: SessionId,
        kind: u8,
        body: &[u8],
        position: LogPosition,
        end: LogPosition,
    ) -> Result<(), Refusal> {
        let update = Update::decode(kind, body).map_err(Offence::from)?;
        let cost = update.cost();
        let cost = Credit { blocks: cost.blocks, metadata_bytes: cost.metadata_bytes };
        self.judge(id, &update, position)?;
        let Some(session) = self.sessions.get_mut(&id) else { return Ok(()) };
        if !session.account.spend(cost) && session.identity.process.is_of_this_boot() {
            return Err(Offence::NoCredit.into());
        }
        self.note_kept_open(id, &update)?;
        self.apply_update(id, end, &update)?;
        Ok(())
    }

    /// Applies an update that was found good, and tells the leases what it moved.
    pub fn apply_update(
        &mut self,
        id: SessionId,
        end: LogPosition,
        update: &Update<'_>,
    ) -> Result<Applied, StoreError> {
        let sessions = &self.sessions;
        let may_free = |inode: InodeId| {
            !sessions.values().any(|other| other.id != id && other.fenced.is_none() && other.control.has_open(inode))
        };
        let moves = Leasing::before(&self.store, update)?;
        let applied = self.store.apply(id, end, update, &may_free)?;
        self.leasing.after(&self.store, id, update, applied, moves)?;
        if let Some(inode) = applied.orphaned {
            self.orphans.insert(inode);
        }
        if let Some(inode) = applied.freed {
            self.orphans.remove(&inode);
        }
        if let Update::Link { inode, .. } = update {
            self.orphans.remove(inode);
        }
        Ok(applied)
    }

    fn judge(&self, id: SessionId, update: &Update<'_>, position: LogPosition) -> Result<(), Refusal> {
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        if let Update::Depend { session: other, position } = update {
            // A session that is no more was committed as a whole before it went.
            let is_known = *other != id && (self.sessions.contains_key(other) || self.lost.contains(other));
            return match is_known && *position > self.store.applied(*other) {
                true if self.is_recovering => Err(Refusal::Unmet(*other)),
                true if !self.lost.contains(other) => Err(Offence::ForgedDependency.into()),
                _ => Ok(()),
            };
        }
        // The lease table and the page of a session from before the machine's last start may be older than its log.
        let this_boot = session.identity.process.is_of_this_boot();
        let leases = (this_boot && position >= session.judged).then(|| self.leasing.of(id, &self.store));
        Judge {
            store: &self.store,
            credentials: &session.credentials,
            leases,
            is_granted: &|inode| session.ranges.contains(inode) || !this_boot && inode >= InodeId::FIRST_FREE,
            kept_open: &|inode| self.kept_open.contains(&(id, inode)),
        }
        .judge(update)
    }

    /// Before a file's rights narrow: who has it open and may write it keeps that right until it's closed, as POSIX has it.
    fn note_kept_open(&mut self, by: SessionId, update: &Update<'_>) -> Result<(), StoreError> {
        let inode = match update {
            Update::SetAttributes(set) if set.mode.is_some() || set.uid.is_some() || set.gid.is_some() => set.inode,
            Update::SetXattr { inode, name, .. } | Update::RemoveXattr { inode, name, .. }
                if *name == ashlar_update::XATTR_ACL_ACCESS =>
            {
                *inode
            }
            _ => return Ok(()),
        };
        self.kept_open.retain(|(id, kept)| self.sessions.get(id).is_some_and(|s| s.control.has_open(*kept)));
        for session in self.sessions.values() {
            if session.id == by || session.credentials.is_privileged() || !session.control.has_open(inode) {
                continue;
            }
            let Some(found) = self.store.inode(inode)? else { return Ok(()) };
            let acl = self.store.xattr(inode, ashlar_update::XATTR_ACL_ACCESS)?;
            let acl = acl.and_then(|value| ashlar_update::acl::Acl::parse(&value));
            let write = ashlar_types::Access::WRITE;
            if ashlar_update::permission::allows(&found, acl.as_ref(), &session.credentials, write) {
                self.kept_open.insert((session.id, inode));
            }
        }
        Ok(())
    }

    fn refuse(&mut self, id: SessionId, refusal: Refusal) {
        match refusal {
            Refusal::Forged(offence) => self.fence(id, &offence),
            Refusal::Unmet(other) => {
                self.unmet.insert(id, other);
            }
            Refusal::Store(error @ (StoreError::FullBlocks { .. } | StoreError::FullMetadata { .. })) => {
                // Credit covers every record, so only damage leads here. The record is kept aside with its log.
                tracing::error!(session = id.0, %error, "a record that was paid for finds no room");
                self.fence(id, &Offence::Log(error.to_string()));
            }
            Refusal::Store(error) => {
                tracing::error!(session = id.0, %error, "the shared area failed");
                self.failure.get_or_insert(error);
            }
        }
    }

    /// Fences a session: nothing more of its log is taken, and all its calls fail. Its leases go after the current step.
    pub fn fence(&mut self, id: SessionId, offence: &Offence) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.fenced.is_some() {
            return;
        }
        let offence = if session.is_torn() { &Offence::Torn } else { offence };
        let (pid, uid, label) = (session.identity.process.pid, session.identity.uid, &session.identity.label);
        tracing::error!(session = id.0, pid, uid, %label, reason = %offence, "session fenced for a forged log");
        session.fenced = Some(offence.to_string());
        // A log that is damaged is fenced all the same.
        let _ = session.log.fence_session();
        session.control.set_fenced();
        session.account.granted = session.account.used;
        self.counters.sessions_fenced += 1;
        self.commit_wanted = true;
        self.leasing.drop_later(id);
        self.locking.end_session(id);
        self.kept_open.retain(|(owner, _)| *owner != id);
    }

    /// The end of the part of a session's log in which every slot is committed or void; a log that makes no sense fences
    /// its session.
    pub fn settled(&mut self, id: SessionId) -> Option<LogPosition> {
        let session = self.live(id)?;
        let reason = match session.log.settled() {
            Ok(_) if session.is_torn() => "torn".to_owned(),
            Ok(settled) if settled >= self.store.applied(id) => return Some(settled),
            Ok(_) => "it goes backwards".to_owned(),
            Err(damaged) => damaged.to_string(),
        };
        self.fence(id, &Offence::Log(reason));
        None
    }

    /// Seals a session's log and applies all of it.
    pub fn seal_and_apply(&mut self, id: SessionId) {
        let Some(session) = self.live(id) else { return };
        let sealed = session.log.seal();
        self.counters.seals += 1;
        match sealed {
            Ok((_, end)) => {
                self.apply(id, end, Slice::ALL);
            }
            Err(damaged) => self.fence(id, &Offence::Log(damaged.to_string())),
        }
    }

    /// Whether any session that is not fenced has the inode open.
    pub fn is_open(&self, inode: InodeId) -> bool {
        self.sessions.values().any(|session| session.fenced.is_none() && session.control.has_open(inode))
    }
}
