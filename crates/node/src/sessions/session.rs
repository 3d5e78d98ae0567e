//! One session: its memory, and its state in the node.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ashlar_log::{Damaged, Log};
use ashlar_pmem::{CrashMedium, CrashTwin, HUGE_PAGE_BYTES, HugePages, OutOfBounds, SharedMemory};
use ashlar_store::{Move, Store};
use ashlar_types::{Access, Credentials, Errno, InodeId, LogGeneration, LogPosition, QuotaVersion, SessionId};
use ashlar_wire::{
    ADMITTED_MAX, CONTROL_BYTES, CONTROL_ROOM_FAR, ControlPage, Credit, CreditKind, LEASE_SLOTS, LeaseTable, LeaseWord,
    MountTerms, Question, Reply, SessionStatus,
};
use thiserror::Error;

use crate::counters::EventCounters;
use crate::leases::kernel_notifier::{KernelNotifier, NoteStale};
use crate::leases::scan_detection::ScanDetector;
use crate::leases::tree_walks::TreeWalks;
use crate::records::validate::{RecordRefusal, Violation};
use crate::sessions::identity::SessionIdentity;
use crate::sessions::kept_rights::KeptRights;
use crate::sessions::mapped_table::MappedTable;
use crate::sessions::noted_locks::{LEASES_FILE_BYTES, NotedLocks};
use crate::sessions::session_page::{InodeRanges, SessionPage};
use crate::space::credit_account::CreditAccount;
use crate::space::outstanding_quota::OutstandingQuota;

/// Why a session's memory can't be taken.
#[derive(Debug, Error)]
pub enum SessionMemoryError {
    /// A part is too small for what it must hold.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// The memory names no owner: the session was never welcomed.
    #[error("the session's files were never finished")]
    Unfinished,
}

/// How many times as many leases the lease table gets room for when it grows.
const LEASE_GROWTH: u32 = 4;

/// The log in the node's memory.
pub type SessionLog = Log<Arc<SharedMemory>>;
/// The control page in the node's memory.
pub type Control = ControlPage<Arc<SharedMemory>>;

/// Bytes of a log's file.
#[derive(Clone, Copy, Debug)]
pub struct LogRoom {
    /// All of them.
    pub bytes: u64,
    /// How many of them have room for certain, from the first on.
    pub allocated: u64,
}

/// The memory of a session, which the shell has mapped.
pub struct SessionMemory {
    /// Its log.
    pub log: SessionLog,
    /// The mapping under the log.
    pub log_memory: Arc<SharedMemory>,
    /// Bytes of the log's file.
    pub log_room: LogRoom,
    /// Its control page.
    pub control: Control,
    /// Its lease table.
    pub leases: LeaseTable<Arc<SharedMemory>>,
    /// The lease table's first page.
    pub page: SessionPage,
}

impl SessionMemory {
    /// Makes the memory of a new session in twins, which a simulation can crash.
    ///
    /// The log's ring has `ring_bytes`.
    ///
    /// # Errors
    /// [`SessionMemoryError`] if the ring is too short.
    pub fn in_twins(
        medium: CrashMedium,
        id: SessionId,
        token: u64,
        ring_bytes: u64,
    ) -> Result<Self, SessionMemoryError> {
        let twin = |bytes: u64| Arc::new(SharedMemory::Twin(CrashTwin::new(medium, bytes as usize)));
        let bytes = SessionLog::bytes_for(ring_bytes);
        let log_memory = twin(bytes);
        let log = Log::format_with_key(Arc::clone(&log_memory), LogGeneration(1), token);
        let log = log.map_err(|_| SessionMemoryError::Unfinished)?;
        let control = ControlPage::new(twin(CONTROL_BYTES)).ok_or(SessionMemoryError::Unfinished)?;
        control.format(id);
        let table = twin(LEASES_FILE_BYTES);
        let page = SessionPage::new(Arc::clone(&table))?;
        page.set_lease_room(LEASE_SLOTS);
        page.set_log_bytes(bytes);
        let leases = LeaseTable::new(table).ok_or(SessionMemoryError::Unfinished)?;
        leases.format(id, token);
        Ok(Self { log, log_memory, log_room: LogRoom { bytes, allocated: bytes }, control, leases, page })
    }
}

/// A session.
pub struct ServedSession {
    /// Its number.
    pub id: SessionId,
    /// Its process, user and label.
    pub identity: SessionIdentity,
    /// The credentials under which its records are validated.
    pub credentials: Credentials,
    /// Whether the kernel serves its process what SharedFS refuses.
    pub yields_to_kernel: bool,
    /// The version of the ways in which it began.
    pub ways_from: u64,
    /// The secret that its connections show.
    pub token: u64,
    /// Its log.
    pub log: Arc<SessionLog>,
    /// The mapping under the log, which knows whether the file was truncated.
    pub log_memory: Arc<SharedMemory>,
    /// Bytes of the log's file.
    pub log_room: LogRoom,
    /// The parts of the log's file that were used.
    pub log_used: Arc<HugePages>,
    /// Its control page.
    pub control: Arc<Control>,
    /// Its lease table.
    pub leases: LeaseTable<Arc<SharedMemory>>,
    /// The lease table's first page, which only SharedFS writes.
    pub page: SessionPage,
    /// Rights to open files that its user had before other sessions narrowed them.
    pub rights: KeptRights,
    /// The record locks of its process in the lock table, for the next SharedFS.
    pub noted_locks: NotedLocks,
    /// Its credit.
    pub account: CreditAccount,
    /// Its quota version.
    pub quota_version: QuotaVersion,
    /// Its outstanding quota balances in this version.
    pub outstanding: OutstandingQuota,
    /// Whether its records must have been granted what they use.
    ///
    /// Another SharedFS granted those from before the last start.
    pub is_quota_validated: bool,
    /// Inode numbers that it may use.
    pub ranges: InodeRanges,
    /// Whether its lease table and page are as new as its log.
    pub is_whole: bool,
    /// Records before this position were validated under the leases of their time.
    ///
    /// That was before SharedFS was restarted.
    pub validated: LogPosition,
    /// Records before this position are not validated by leases.
    ///
    /// SharedFS was killed while it took one of them.
    pub trusted: LogPosition,
    /// Records applied since this SharedFS started or the session began.
    pub records: u64,
    /// Bytes of its log applied since then.
    pub digested_bytes: u64,
    /// Slots of the lease table that have room.
    pub lease_room: u32,
    /// The last slot of the lease table that was used.
    pub lease_top: u32,
    /// Whether it could not get more room when it last should have.
    pub lacks_lease_room: bool,
    /// Leases granted to it since then.
    pub leases_granted: u64,
    /// Lease words revoked, narrowed or renewed since then.
    pub leases_revoked: u64,
    /// No append goes behind this position; `None` on a machine without a journal.
    ///
    /// The session can change the word in its log, so records behind this are forged.
    pub append_limit: Option<LogPosition>,
    /// A request waits until its log is digested up to here.
    pub wanted: LogPosition,
    /// The log is to be applied up to here, which was its tail when it was last due.
    pub due: LogPosition,
    /// The log's tail when it was last seen to move, and the time of that since boot.
    pub moved: (LogPosition, Duration),
    /// Whether its process has connected since this SharedFS started.
    ///
    /// It has then repeated what an earlier one knew.
    pub is_connected: bool,
    /// Whether its process is gone or closed it.
    ///
    /// It is removed as soon as all of it is committed.
    pub is_ending: bool,
    /// Requests that apply the last of its log, in steps.
    ///
    /// Other requests are served between two steps. The session is not removed while there are any.
    pub enders: u32,
    /// Whether its further records depend on lost updates.
    ///
    /// Then no more of its log is applied.
    pub is_cut: bool,
    /// How many of its records were skipped at recovery: they build on what another session has destroyed.
    pub skipped: u32,
    /// How far its log was applied at the last check of invariants.
    pub checked: LogPosition,
    /// Whether its files are quarantined.
    pub is_quarantined: bool,
    /// Why it was fenced, if it was.
    pub fenced: Option<String>,
    /// Its mount's notifier.
    pub notifier: Option<Arc<dyn KernelNotifier>>,
    /// The device number that its mount's files show; 0 before it has registered.
    pub mount_device: u64,
    /// The terms of its mount.
    pub mount_terms: MountTerms,
    /// Detects directories that it scans.
    pub scans: ScanDetector,
    /// Its walks through directory trees.
    pub walks: TreeWalks,
    /// An answer that was too long for its request slot, until it's fetched.
    pub kept: Option<(Question, Reply)>,
    /// The files that its process has mapped, once it has mapped any.
    pub mapped: Option<MappedTable>,
}

impl ServedSession {
    /// Takes the memory of a session whose log is empty, or ends where its row says.
    ///
    /// `now` is the time since boot.
    ///
    /// # Errors
    /// [`SessionMemoryError`] if a part of the memory is too short.
    pub fn new(
        id: SessionId,
        identity: SessionIdentity,
        token: u64,
        memory: SessionMemory,
        now: Duration,
    ) -> Result<Self, SessionMemoryError> {
        let SessionMemory { log, log_memory, log_room, control, leases, page } = memory;
        let rights = KeptRights::load(page.clone())?;
        let noted_locks = NotedLocks::new(page.memory()).ok_or(SessionMemoryError::Unfinished)?;
        let (tail, lease_room) = (log.tail(), page.lease_room());
        Ok(Self {
            lease_room,
            lease_top: 0,
            lacks_lease_room: false,
            id,
            credentials: identity.credentials(),
            identity,
            yields_to_kernel: false,
            ways_from: 0,
            token,
            log: Arc::new(log),
            log_memory,
            log_room,
            log_used: Arc::new(HugePages::new(log_room.bytes)),
            control: Arc::new(control),
            leases,
            page,
            rights,
            noted_locks,
            account: CreditAccount::default(),
            quota_version: QuotaVersion::default(),
            outstanding: OutstandingQuota::default(),
            is_quota_validated: true,
            ranges: InodeRanges::default(),
            is_whole: true,
            validated: LogPosition(0),
            trusted: LogPosition(0),
            records: 0,
            digested_bytes: 0,
            leases_granted: 0,
            leases_revoked: 0,
            append_limit: None,
            wanted: LogPosition(0),
            due: LogPosition(0),
            moved: (tail, now),
            is_connected: false,
            is_ending: false,
            enders: 0,
            is_cut: false,
            skipped: 0,
            checked: LogPosition(0),
            is_quarantined: false,
            fenced: None,
            notifier: None,
            mount_device: 0,
            mount_terms: MountTerms::default(),
            scans: ScanDetector::default(),
            walks: TreeWalks::default(),
            kept: None,
            mapped: None,
        })
    }

    /// Takes up the memory of a session that this or an earlier SharedFS made.
    ///
    /// The log is committed up to `committed`. `is_whole` says whether the lease table and its page are as new as the
    /// log.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn take_up(
        id: SessionId,
        identity: SessionIdentity,
        token: u64,
        memory: SessionMemory,
        (committed, is_whole): (LogPosition, bool),
        now: Duration,
    ) -> Result<Self, SessionMemoryError> {
        let mut session = Self::new(id, identity, token, memory, now)?;
        session.is_whole = is_whole;
        session.ranges = InodeRanges::load(&session.page);
        session.validated = session.page.validated();
        let is_used = |slot: &u32| session.leases.word(*slot) != LeaseWord::default();
        session.lease_top = (0..session.lease_room).rev().find(is_used).unwrap_or(0);
        session.quota_version = session.control.quota_version();
        session.is_quota_validated = false;
        // An earlier SharedFS may have been killed while it polled.
        session.control.request_slot().set_listening(false);
        session.mount_device = session.page.mount_device();
        session.mount_terms = session.page.mount_terms();
        session.account.granted = session.page.granted();
        // After a loss of power, the page may lack the last commits: then the cost of an earlier one counts.
        session.account.used = session.page.cost_before(committed);
        Ok(session)
    }

    /// Returns whether its records are validated by its user's rights.
    pub fn needs_validation(&self) -> bool {
        self.fenced.is_none() && !self.credentials.is_privileged()
    }

    /// Returns the refusal of a record that uses more than the session was granted.
    ///
    /// After a loss of power, the medium may have a record that nothing acknowledged, and not its grant. The log then
    /// ends before that record.
    pub fn refuse_use(&self, violation: Violation) -> RecordRefusal {
        if self.is_whole { RecordRefusal::Forged(violation) } else { RecordRefusal::NotGranted(violation) }
    }

    /// Returns whether its log's or control page's file was truncated under SharedFS.
    pub fn is_truncated(&self) -> bool {
        self.log_memory.is_torn() || self.control.memory().is_torn()
    }

    /// Writes a slot of the lease table, which has room.
    pub fn set_lease(&mut self, slot: u32, word: LeaseWord, inode: InodeId) {
        self.lease_top = self.lease_top.max(slot);
        self.leases.set(slot, word, inode);
    }

    /// Gives the lease table more room, unless this slot is well below half of it.
    ///
    /// A session may hold so many leases, and leases that it did not ask for come on top.
    ///
    /// # Errors
    /// `ENOSPC` if the arena's file system is full.
    pub fn make_lease_room(&mut self, slot: u32) -> io::Result<()> {
        let was_lacking = std::mem::replace(&mut self.lacks_lease_room, true);
        while self.lease_room < LEASE_SLOTS && slot >= self.lease_room / 8 * 3 {
            let more = (self.lease_room * LEASE_GROWTH).min(LEASE_SLOTS);
            let bytes_of = LeaseTable::<SharedMemory>::bytes_of;
            self.page.memory().allocate(bytes_of(self.lease_room)..bytes_of(more)).inspect_err(|error| {
                if !was_lacking {
                    tracing::warn!(session = self.id.0, %error, "no room for more leases: those granted longest ago make room");
                }
            })?;
            self.page.set_lease_room(more);
            self.lease_room = more;
        }
        self.lacks_lease_room = false;
        Ok(())
    }

    /// Gives all handles room.
    ///
    /// # Errors
    /// As [`Self::make_lease_room`].
    pub fn make_handle_room(control: &Control) -> io::Result<()> {
        control.memory().allocate(CONTROL_ROOM_FAR)?;
        control.set_all_handle_slots();
        Ok(())
    }

    /// Records the number of its mount's device and the mount's terms, so that a restarted SharedFS finds them.
    ///
    /// Programs may begin sessions by the mount, or ask for descriptors on it, before the mount's process has noticed
    /// the restart.
    ///
    /// # Errors
    /// `EINVAL` if the terms name too many users.
    pub fn set_mount(&mut self, device: u64, terms: MountTerms) -> Result<(), Errno> {
        if terms.sessions.users.len() + terms.sessions.groups.len() > ADMITTED_MAX {
            return Err(Errno::EINVAL);
        }
        // The terms come first: by the device, programs find the mount.
        self.page.set_mount_terms(&terms);
        self.page.set_mount_device(device);
        (self.mount_device, self.mount_terms) = (device, terms);
        Ok(())
    }

    /// Returns its line of the status. Its log is committed up to `committed`.
    pub fn status(&self, committed: LogPosition) -> SessionStatus {
        SessionStatus {
            session: self.id,
            kind: self.identity.kind,
            pid: self.identity.process.pid,
            uid: self.identity.uid,
            label: self.identity.label.clone(),
            log_used_bytes: self.log.tail().0.saturating_sub(committed.0),
            log_bytes: self.log.capacity(),
            records: self.records,
            digested_bytes: self.digested_bytes,
            leases_granted: self.leases_granted,
            leases_revoked: self.leases_revoked,
            operations: self.control.operations(),
            fenced: self.fenced.clone(),
            terms: (self.mount_device != 0).then(|| self.mount_terms.clone()),
        }
    }

    /// Lets it append up to a position, which is not below the last limit.
    pub fn limit_appends(&mut self, upto: LogPosition) {
        self.append_limit = Some(upto);
        self.log.set_limit(Some(upto));
    }

    /// Limits it to what its log holds.
    ///
    /// # Errors
    /// [`Damaged`] if it has forged the log's words, or passed its limit.
    pub fn lower_limit(&mut self) -> Result<LogPosition, Damaged> {
        self.log.set_limit(Some(LogPosition(0)));
        // No append under way goes behind the seal, and each later one sees the limit.
        let (_, end) = self.log.seal()?;
        if self.append_limit.is_some_and(|limit| end > limit) {
            return Err(Damaged);
        }
        self.append_limit = Some(end);
        Ok(end)
    }

    /// Sets the committed position of the log.
    ///
    /// The log is free up to there, and will be used there again.
    pub fn set_committed(&self, position: LogPosition) {
        let before = self.log.head();
        self.log.set_head(position);
        self.control.set_committed(position);
        // If the file has no room there, a huge page would make some.
        let room = self.log_room.allocated / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        for part in self.log.parts(before, position) {
            self.log_used.record_used(part.start..part.end.min(room));
        }
    }

    /// Returns a function that notes how long the mount's kernel may be stale.
    ///
    /// A restarted SharedFS finds the noted time.
    pub fn note_stale(&self) -> NoteStale {
        let page = self.page.clone();
        Box::new(move |until| page.set_stale_until_ms(until.as_millis() as u64))
    }

    /// Grants credit: in the account first, then where the session sees it.
    pub fn grant_credit(&mut self, credit: Credit, kind: CreditKind) {
        self.account.grant(credit);
        self.page.set_granted(self.account.granted);
        self.control.give_credit(credit, kind);
    }

    /// Returns the credit of one kind that the session claims to have left.
    ///
    /// It is no more than the account shows.
    pub fn credit_left(&self, kind: CreditKind) -> Credit {
        let (said, outstanding) = (self.control.credit_left(kind), self.account.outstanding());
        Credit {
            blocks: said.blocks.min(outstanding.blocks),
            metadata_bytes: said.metadata_bytes.min(outstanding.metadata_bytes),
        }
    }

    /// Takes back the session's unused credit, as far as its control page shows it.
    pub fn recall_credit(&mut self) {
        let taken = self.control.recall_credit();
        self.account.recall(taken);
        self.page.set_granted(self.account.granted);
    }

    /// Writes off all credit that the session has not used.
    ///
    /// The credit was recalled, and the log was then sealed and applied. So no record can use it any more.
    pub fn write_off_credit(&mut self) {
        self.account.granted = self.account.used;
        self.page.set_granted(self.account.granted);
    }

    /// Books the use of limited resources by a batch of its log.
    ///
    /// A session that used more than it was granted forged a record. Root's sessions are exempt: they act for many
    /// users and are trusted.
    ///
    /// # Errors
    /// [`Violation::NoQuota`].
    pub fn spend_quota(
        &mut self,
        moves: &[Move],
        store: &Store,
        counters: &mut EventCounters,
    ) -> Result<(), Violation> {
        let mut is_granted = true;
        for moved in moves {
            is_granted &= self.outstanding.spend(moved, store.quota(moved.key).1);
        }
        if is_granted || !self.is_quota_validated {
            return Ok(());
        }
        if self.credentials.is_privileged() {
            counters.quota_unpaid += 1;
            return Ok(());
        }
        Err(Violation::NoQuota)
    }

    /// Begins another quota version; the log must be sealed next.
    pub fn raise_quota_version(&mut self, has_limits: bool) {
        self.quota_version = self.quota_version.next(has_limits);
        self.control.set_quota_version(self.quota_version);
    }

    /// Returns the error with which a request about an inode fails that the session does not reach.
    ///
    /// The kernel checks such a call anew, where there is one: the process may have come there by a descriptor, or by a
    /// mount of a part of the tree.
    pub fn refusal(&self) -> Errno {
        if self.yields_to_kernel { Errno::RESERVED } else { Errno::EACCES }
    }

    /// Returns whether the session has an inode open that it has opened by right.
    ///
    /// No lease of it covers the inode: then SharedFS has noted all handles.
    pub fn has_opened(&self, inode: InodeId) -> bool {
        self.control.has_open(inode) && (self.credentials.is_privileged() || self.rights.opened(inode) != Access::NONE)
    }

    /// Notes that it has opened an inode with this access.
    ///
    /// Its log is committed up to `committed`.
    pub fn note_opened(&mut self, inode: InodeId, access: Access, committed: LogPosition) {
        let (control, log) = (&self.control, &self.log);
        self.rights.note_opened(inode, access, |rights| closed_inodes(rights, control, log, committed));
    }

    /// Notes that it keeps a right to an inode that it has open.
    ///
    /// The update that takes the right is not applied yet. The store's next batch commits it.
    pub fn keep_right(&mut self, inode: InodeId, access: Access, batch: u64, committed: LogPosition) {
        let (control, log) = (&self.control, &self.log);
        self.rights.keep(inode, access, batch, |rights| closed_inodes(rights, control, log, committed));
    }
}

/// Returns the noted inodes that the session has closed, and whose rights no record needs any more.
///
/// The log is committed up to `committed`.
fn closed_inodes(rights: &KeptRights, control: &Control, log: &SessionLog, committed: LogPosition) -> Vec<InodeId> {
    let mut closed: Vec<_> = rights.inodes().filter(|inode| !control.has_open(*inode)).collect();
    // The tail is read after that: records from before a file was closed lie before the tail.
    let (is_committed, is_full) = (committed >= log.tail(), rights.is_full());
    closed.retain(|inode| match rights.kept(*inode) {
        Access::NONE => true,
        // The session may have a lease on the inode and open it by another name, of which SharedFS learns nothing.
        kept if kept.contains(Access::EXECUTE) => is_committed && is_full,
        _ => is_committed,
    });
    closed
}
