//! One session: its files, its memory, and its state in SharedFS.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use ashlar_log::{Log, LogOpenError};
use ashlar_pmem::{
    Arena, ArenaError, HUGE_PAGE_BYTES, HugePages, MapError, Mapping, MappingAccess, MediumKind, OutOfBounds,
    SessionFile,
};
use ashlar_types::{Credentials, Errno, InodeId, LogGeneration, LogPosition, QuotaVersion, SessionId};
use ashlar_wire::{
    ADMITTED_MAX, CONTROL_BYTES, CONTROL_BYTES_BEFORE, CONTROL_ROOM, CONTROL_ROOM_FAR, ControlPage, Credit, CreditKind,
    LEASE_SLOTS, LEASE_SLOTS_FIRST, LEASE_TABLE_BYTES, LeaseTable, LeaseWord, MountTerms, Question, Reply,
};
use thiserror::Error;

use crate::credit_account::CreditAccount;
use crate::identity::{SessionIdentity, fresh_token};
use crate::kept_rights::{self, KeptRights};
use crate::mapped::MappedTable;
use crate::mount_notifier::{NoteStale, Notifier};
use crate::noted_locks::{LEASES_FILE_BYTES, NotedLocks};
use crate::quota::OutstandingQuota;
use crate::read_ahead::TreeWalks;
use crate::retired::RetiredSession;
use crate::scan_detection::ScanDetector;
use crate::session_page::{self, InodeRanges};
use crate::validate::{RecordRefusal, Violation};

/// Why a session's files can't be made or taken up.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The arena refused.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// A file can't be mapped: it may be too short.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The log can't be opened.
    #[error(transparent)]
    Log(#[from] LogOpenError),
    /// A file is too small for what it must hold.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// The files name no owner: the session was never welcomed.
    #[error("the session's files were never finished")]
    Unfinished,
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// How many times as many leases the lease table gets room for when it grows.
const LEASE_GROWTH: u32 = 4;

/// The log in SharedFS's memory.
pub type SessionLog = Log<Arc<Mapping>>;
/// The control page in SharedFS's memory.
pub type Control = ControlPage<Arc<Mapping>>;

/// The descriptors that a session gets.
///
/// Log and control page are read-write, the lease table is read-only.
#[derive(Clone, Debug)]
pub struct SessionFiles {
    /// The log.
    pub log: Arc<File>,
    /// The control page.
    pub control: Arc<File>,
    /// The lease table, opened again for reading only.
    pub leases: Arc<File>,
}

impl SessionFiles {
    /// Opens the files again for the session's process.
    ///
    /// SharedFS's own descriptions show whether any process has others.
    fn new(log: &Mapping, control: &Mapping, leases: &Mapping) -> io::Result<Self> {
        let open = |memory: &Mapping, access| open_again(memory.file(), access).map(Arc::new);
        let (both, read) = (MappingAccess::ReadWrite, MappingAccess::ReadOnly);
        Ok(Self { log: open(log, both)?, control: open(control, both)?, leases: open(leases, read)? })
    }
}

/// Bytes of a log's file.
#[derive(Clone, Copy, Debug)]
pub struct LogRoom {
    /// All of them.
    pub bytes: u64,
    /// How many of them have room for certain, from the first on.
    pub allocated: u64,
}

/// A prepared session: all its files are there, and it has no owner.
pub struct PreparedSession {
    /// Its number.
    pub id: SessionId,
    /// The user of the session that these files come from; no other user may take them.
    pub only_for: Option<Credentials>,
    token: u64,
    log: (SessionLog, Arc<Mapping>, LogRoom),
    control: Control,
    leases: (LeaseTable<Arc<Mapping>>, Arc<Mapping>),
    files: SessionFiles,
}

impl PreparedSession {
    /// Makes the files of a session.
    ///
    /// The log has room for `room`, and the others what most sessions need.
    ///
    /// # Errors
    /// [`SessionError`]; the files are removed again.
    pub fn make(arena: &Arena, id: SessionId, room: LogRoom) -> Result<Self, SessionError> {
        let made = Self::make_files(arena, id, room);
        if made.is_err() {
            // The next start removes files that can't be removed now.
            let _ = arena.remove_session(id);
        }
        made
    }

    fn make_files(arena: &Arena, id: SessionId, log_room: LogRoom) -> Result<Self, SessionError> {
        let medium = arena.medium();
        let [beginning, locks] = CONTROL_ROOM;
        let room = LeaseTable::<Mapping>::bytes_of(LEASE_SLOTS_FIRST);
        // The lease table is first: without its entries, the other files mean nothing.
        let leases = (SessionFile::Leases, LEASES_FILE_BYTES, room);
        let log = (SessionFile::Log, log_room.bytes, log_room.allocated);
        let control = (SessionFile::Control, CONTROL_BYTES, beginning.end);
        let [leases_file, log_file, control_file] = arena.session_files(id, [leases, log, control])?;
        ashlar_pmem::allocate(&control_file, locks)?;
        let log_memory = Arc::new(Mapping::map(&log_file, log_room.bytes, MappingAccess::ReadWrite, medium)?);
        let control = map_control(arena, &control_file)?;
        let page = Arc::new(Mapping::map(&leases_file, LEASES_FILE_BYTES, MappingAccess::ReadWrite, medium)?);
        // None of them has content yet.
        let fresh = [&log_memory, control.memory(), &page];
        fresh.iter().for_each(|memory| memory.set_read_ahead(false));
        let log = Log::format(Arc::clone(&log_memory), LogGeneration(1))?;
        control.format(id);
        session_page::set_lease_room(&*page, LEASE_SLOTS_FIRST)?;
        session_page::set_log_bytes(&*page, log_room.bytes)?;
        let leases = LeaseTable::new(Arc::clone(&page)).ok_or(SessionError::Unfinished)?;
        let token = fresh_token(id)?;
        leases.format(id, token);
        log_memory.set_read_ahead(true);
        let files = SessionFiles::new(&log_memory, control.memory(), &page)?;
        let (log, leases) = ((log, log_memory, log_room), (leases, page));
        Ok(Self { id, only_for: None, token, log, control, leases, files })
    }

    /// Prepares a retired session again.
    ///
    /// All of its log is committed, and no other process has its files.
    ///
    /// # Errors
    /// [`SessionError`]; then the files can't be used.
    pub fn of_retired(retired: RetiredSession) -> Result<Self, SessionError> {
        let RetiredSession { id, owner, log, log_memory, log_room, control, leases, page, lease_top, end: begins } =
            retired;
        // Threads that share them have answered all requests about them.
        let (Some(_), Some(control)) = (Arc::into_inner(log), Arc::into_inner(control)) else {
            return Err(SessionError::Unfinished);
        };
        // From here on its files have no owner, wherever a kill cuts this.
        SessionIdentity::wipe(&*page)?;
        let log = Log::open(Arc::clone(&log_memory))?;
        let is_sound = !log.is_fenced() && log.head() == begins && log.settled().is_ok_and(|settled| settled == begins);
        if !is_sound || !control.clear() {
            return Err(SessionError::Unfinished);
        }
        control.format(id);
        control.set_committed(begins);
        control.set_applied(begins);
        control.set_released(begins);
        leases.clear(lease_top.saturating_add(1));
        kept_rights::clear_rights(&page)?;
        NotedLocks::new(&page).ok_or(SessionError::Unfinished)?.clear();
        session_page::format_page(&*page, session_page::lease_room(&*page), begins)?;
        session_page::set_log_bytes(&*page, log_room.bytes)?;
        let token = fresh_token(id)?;
        leases.format(id, token);
        let files = SessionFiles::new(&log_memory, control.memory(), &page)?;
        let (log, leases) = ((log, log_memory, log_room), (leases, page));
        Ok(Self { id, only_for: Some(owner), token, log, control, leases, files })
    }

    /// Bytes of its log's file.
    pub fn log_room(&self) -> LogRoom {
        self.log.2
    }

    /// Gives all tables room, whatever they will need.
    ///
    /// # Errors
    /// [`SessionError`].
    pub fn make_whole(&self) -> Result<(), SessionError> {
        ServedSession::make_handle_room(&self.control)?;
        self.leases.1.allocate(0..LEASE_TABLE_BYTES)?;
        Ok(session_page::set_lease_room(&*self.leases.1, LEASE_SLOTS)?)
    }

    /// Gives the session to an owner.
    ///
    /// The identity is written last: a session whose files have none was never welcomed. On a disk the identity is
    /// durable from the owner's first `fsync` on. Updates from before it are lost with it, and all that depends on
    /// them.
    ///
    /// # Errors
    /// [`SessionError`].
    pub fn give_to(self, identity: SessionIdentity) -> Result<ServedSession, SessionError> {
        identity.store(&*self.leases.1)?;
        let rights = KeptRights::load(Arc::clone(&self.leases.1))?;
        let locks = NotedLocks::new(&self.leases.1).ok_or(SessionError::Unfinished)?;
        let Self { id, token, log, control, leases, files, .. } = self;
        Ok(ServedSession::assemble(id, identity, token, log, control, leases, (rights, locks), files))
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
    pub log_memory: Arc<Mapping>,
    /// Bytes of the log's file.
    pub log_room: LogRoom,
    /// The parts of the log's file that were used.
    pub log_used: Arc<HugePages>,
    /// Its control page.
    pub control: Arc<Control>,
    /// Its lease table.
    pub leases: LeaseTable<Arc<Mapping>>,
    /// The lease table's first page, which only SharedFS writes.
    pub page: Arc<Mapping>,
    /// Rights to open files that its user had before other sessions narrowed them.
    pub rights: KeptRights,
    /// The record locks of its process in the lock table, for the next SharedFS.
    pub noted_locks: NotedLocks,
    /// The descriptors that it receives when it connects again.
    pub files: SessionFiles,
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
    pub lease_top: u32,
    /// Whether it could not get more room when it last should have.
    pub lacks_lease_room: bool,
    /// Leases granted to it since then.
    pub leases_granted: u64,
    /// Lease words revoked, narrowed or renewed since then.
    pub leases_revoked: u64,
    /// A thread waits until its log is digested up to here.
    pub wanted: LogPosition,
    /// The log is to be applied up to here, which was its tail when it was last due.
    pub due: LogPosition,
    /// The log's tail when it was last seen to move, and the time of that.
    pub moved: (LogPosition, Instant),
    /// Whether its process has connected since this SharedFS started.
    ///
    /// It has then repeated what an earlier one knew.
    pub is_connected: bool,
    /// Whether its process is gone or closed it.
    ///
    /// It is removed as soon as all of it is committed.
    pub is_ending: bool,
    /// Threads that apply the last of its log, in steps.
    ///
    /// Between two steps other threads have the lock. The session is not removed while there are any.
    pub enders: u32,
    /// Whether its further records depend on lost updates.
    ///
    /// Then no more of its log is applied.
    pub is_cut: bool,
    /// How many of its records were skipped at recovery: they build on what another session has destroyed.
    pub skipped: u32,
    /// Whether its files are quarantined.
    pub is_quarantined: bool,
    /// Why it was fenced, if it was.
    pub fenced: Option<String>,
    /// Its mount's notifier.
    pub notifier: Option<Arc<Notifier>>,
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
    /// Takes up the files of a session that this or an earlier SharedFS made.
    ///
    /// A living session may be appending at this moment, so its log is only opened. A log from before the machine's
    /// last start is recovered from `committed` on.
    ///
    /// # Errors
    /// [`SessionError::Unfinished`] if the session was never welcomed; others if the files are damaged.
    pub fn take_up(arena: &Arena, id: SessionId, committed: LogPosition) -> Result<Self, SessionError> {
        let medium = arena.medium();
        let page = open_lease_table(arena, id)?;
        let page = Arc::new(page);
        let identity = SessionIdentity::load(&*page).ok_or(SessionError::Unfinished)?;
        let leases = LeaseTable::new(Arc::clone(&page)).ok_or(SessionError::Unfinished)?;
        let (owner, token) = leases.owner().ok_or(SessionError::Unfinished)?;
        if owner != id {
            return Err(SessionError::Unfinished);
        }
        let control_file = arena.open_session_file(id, SessionFile::Control)?;
        // A page of an earlier version lacks record locks, and the missing bytes are zeros.
        if (CONTROL_BYTES_BEFORE..CONTROL_BYTES).contains(&control_file.metadata()?.len()) {
            ashlar_pmem::allocate(&control_file, 0..CONTROL_BYTES)?;
            control_file.set_len(CONTROL_BYTES)?;
        }
        // While no SharedFS ran, its process may have made its files longer.
        cut_file(&control_file, CONTROL_BYTES)?;
        let control = map_control(arena, &control_file)?;
        let log_file = arena.open_session_file(id, SessionFile::Log)?;
        let found = log_file.metadata()?.len();
        let log_bytes = session_page::log_bytes(&*page).map_or(found, |made| made.min(found));
        cut_file(&log_file, log_bytes)?;
        let log_memory = Arc::new(Mapping::map(&log_file, log_bytes, MappingAccess::ReadWrite, medium)?);
        // A dead process's writes to a disk may be there in part. The machine need not have restarted since: the disk
        // may have been taken away under it. Its log then holds a valid prefix. Its lease table and page may be older
        // than that, so they validate only sessions whose user could exploit that.
        let is_whole = identity.process.is_of_this_boot()
            && (medium.kind != MediumKind::Disk || identity.uid != 0 || identity.process.open().is_some());
        let log = if is_whole {
            Log::open(Arc::clone(&log_memory))?
        } else {
            Log::recover(Arc::clone(&log_memory), committed)?.0
        };
        let files = SessionFiles::new(&log_memory, control.memory(), &page)?;
        let used = session_page::cost_before(&*page, committed);
        let log_room = LogRoom { bytes: log_bytes, allocated: 0 };
        let rights = KeptRights::load(Arc::clone(&page))?;
        if rights.is_any() {
            // SharedFS was killed, perhaps before the commit that would have synced it; the logs are about to be
            // applied again.
            page.sync_range(0, LEASES_FILE_BYTES)?;
        }
        let noted = (rights, NotedLocks::new(&page).ok_or(SessionError::Unfinished)?);
        let log = (log, log_memory, log_room);
        let mut session = Self::assemble(id, identity, token, log, control, (leases, page), noted, files);
        session.is_whole = is_whole;
        session.ranges = InodeRanges::load(&*session.page);
        session.validated = session_page::validated(&*session.page);
        let is_used = |slot: &u32| session.leases.word(*slot) != LeaseWord::default();
        session.lease_top = (0..session.lease_room).rev().find(is_used).unwrap_or(0);
        session.quota_version = session.control.quota_version();
        session.is_quota_validated = false;
        // An earlier SharedFS may have been killed while it polled.
        session.control.request_slot().set_listening(false);
        session.mount_device = session_page::mount_device(&*session.page);
        session.mount_terms = session_page::mount_terms(&*session.page);
        session.account.granted = session_page::granted(&*session.page);
        // After a loss of power, the page may lack the last commits: then the cost of an earlier one counts.
        session.account.used = used;
        Ok(session)
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one session")]
    fn assemble(
        id: SessionId,
        identity: SessionIdentity,
        token: u64,
        (log, log_memory, log_room): (SessionLog, Arc<Mapping>, LogRoom),
        control: Control,
        (leases, page): (LeaseTable<Arc<Mapping>>, Arc<Mapping>),
        (rights, noted_locks): (KeptRights, NotedLocks),
        files: SessionFiles,
    ) -> Self {
        let (tail, lease_room) = (log.tail(), session_page::lease_room(&*page));
        Self {
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
            files,
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
            wanted: LogPosition(0),
            due: LogPosition(0),
            moved: (tail, Instant::now()),
            is_connected: false,
            is_ending: false,
            enders: 0,
            is_cut: false,
            skipped: 0,
            is_quarantined: false,
            fenced: None,
            notifier: None,
            mount_device: 0,
            mount_terms: MountTerms::default(),
            scans: ScanDetector::default(),
            walks: TreeWalks::default(),
            kept: None,
            mapped: None,
        }
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
            let bytes_of = LeaseTable::<Mapping>::bytes_of;
            self.page.allocate(bytes_of(self.lease_room)..bytes_of(more)).inspect_err(|error| {
                if !was_lacking {
                    tracing::warn!(session = self.id.0, %error, "no room for more leases: those granted longest ago make room");
                }
            })?;
            session_page::set_lease_room(&*self.page, more).map_err(io::Error::other)?;
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
        let stored = session_page::set_mount_terms(&*self.page, &terms)
            .and_then(|()| session_page::set_mount_device(&*self.page, device));
        stored.map_err(|_| Errno::EIO)?;
        (self.mount_device, self.mount_terms) = (device, terms);
        Ok(())
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
        let page = Arc::clone(&self.page);
        // The page is mapped whole, so the store can't miss it.
        Box::new(move |until| _ = session_page::set_stale_until_ms(&*page, until.as_millis() as u64))
    }

    /// Grants credit: in the account first, then where the session sees it.
    pub fn grant_credit(&mut self, credit: Credit, kind: CreditKind) -> Result<(), OutOfBounds> {
        self.account.grant(credit);
        session_page::set_granted(&*self.page, self.account.granted)?;
        self.control.give_credit(credit, kind);
        Ok(())
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

    /// Removes the owner from its files, durably: no start takes them up any more.
    ///
    /// # Errors
    /// Those of the medium; then a start may still take them up.
    pub fn remove_owner(&self) -> io::Result<()> {
        SessionIdentity::wipe(&*self.page).map_err(io::Error::other)?;
        self.page.sync_range(0, LEASE_TABLE_BYTES)
    }

    /// Takes back the session's unused credit, as far as its control page shows it.
    pub fn recall_credit(&mut self) -> Result<(), OutOfBounds> {
        let taken = self.control.recall_credit();
        self.account.recall(taken);
        session_page::set_granted(&*self.page, self.account.granted)
    }

    /// Writes off all credit that the session has not used.
    ///
    /// The credit was recalled, and the log was then sealed and applied. So no record can use it any more.
    pub fn write_off_credit(&mut self) -> Result<(), OutOfBounds> {
        self.account.granted = self.account.used;
        session_page::set_granted(&*self.page, self.account.granted)
    }
}

/// Opens a session's lease table.
///
/// # Errors
/// [`SessionError::Unfinished`] if its making was cut short; others.
pub fn open_lease_table(arena: &Arena, id: SessionId) -> Result<Mapping, SessionError> {
    let file = arena.open_session_file(id, SessionFile::Leases)?;
    if file.metadata()?.len() == 0 {
        return Err(SessionError::Unfinished);
    }
    // A table of an earlier version has nothing behind the slots.
    if (LEASE_TABLE_BYTES..LEASES_FILE_BYTES).contains(&file.metadata()?.len()) {
        file.set_len(LEASES_FILE_BYTES)?;
    }
    Ok(Mapping::map(&file, LEASES_FILE_BYTES, MappingAccess::ReadWrite, arena.medium())?)
}

/// Cuts a file that is longer than it should be.
fn cut_file(file: &File, bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() > bytes { file.set_len(bytes) } else { Ok(()) }
}

fn map_control(arena: &Arena, file: &File) -> Result<Control, SessionError> {
    let mapping = Mapping::map(file, CONTROL_BYTES, MappingAccess::ReadWrite, arena.medium())?;
    ControlPage::new(Arc::new(mapping)).ok_or(SessionError::Unfinished)
}

/// Opens the file again for reading only, whatever its path is by now.
pub fn read_only(file: &File) -> io::Result<File> {
    open_again(file.as_fd(), MappingAccess::ReadOnly)
}

fn open_again(file: BorrowedFd<'_>, access: MappingAccess) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(access == MappingAccess::ReadWrite).open(path)
}
