//! The files of sessions: made, prepared, taken up and opened again.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use ashlar_log::{Log, LogOpenError};
use ashlar_node::sessions::identity::{SESSION_VERSIONS, SessionIdentity};
use ashlar_node::sessions::kept_rights::{self};
use ashlar_node::sessions::mapped_table::{MappedTable, TABLE_BYTES};
use ashlar_node::sessions::noted_locks::{LEASES_FILE_BYTES, NotedLocks};
use ashlar_node::sessions::session::{Control, LogRoom, ServedSession, SessionLog, SessionMemory, SessionMemoryError};
use ashlar_node::sessions::session_page::SessionPage;
use ashlar_pmem::{
    Arena, ArenaError, MapError, Mapping, MappingAccess, MediumKind, OutOfBounds, SessionFile, SharedMemory,
};
use ashlar_processes::process::{is_of_this_boot, open_process};
use ashlar_store::MappedRun;
use ashlar_types::{Credentials, LogGeneration, LogPosition, SessionId, VersionRange};
use ashlar_wire::{
    CONTROL_BYTES, CONTROL_ROOM, ControlPage, LEASE_SLOTS, LEASE_SLOTS_FIRST, LEASE_TABLE_BYTES, LeaseTable,
};
use thiserror::Error;

use crate::error::DaemonError;
use crate::retired::RetiredSession;

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
    /// Another version of the program made the files.
    #[error("the files of a session have format {0}, this program reads {SESSION_VERSIONS}")]
    WrongVersion(VersionRange),
    /// The system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<SessionMemoryError> for SessionError {
    fn from(error: SessionMemoryError) -> Self {
        match error {
            SessionMemoryError::OutOfBounds(error) => error.into(),
            SessionMemoryError::Unfinished => Self::Unfinished,
        }
    }
}

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
    fn new(log: &SharedMemory, control: &SharedMemory, leases: &SharedMemory) -> io::Result<Self> {
        let open = |memory, access| open_again(mapping_of(memory)?.file(), access).map(Arc::new);
        let (both, read) = (MappingAccess::ReadWrite, MappingAccess::ReadOnly);
        Ok(Self { log: open(log, both)?, control: open(control, both)?, leases: open(leases, read)? })
    }
}

/// A prepared session: all its files are there, and it has no owner.
pub struct PreparedSession {
    /// Its number.
    pub id: SessionId,
    /// The user of the session that these files come from; no other user may take them.
    pub only_for: Option<Credentials>,
    token: u64,
    log: (SessionLog, Arc<SharedMemory>, LogRoom),
    control: Control,
    leases: (LeaseTable<Arc<SharedMemory>>, SessionPage),
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
        let [beginning, locks] = CONTROL_ROOM;
        let room = LeaseTable::<SharedMemory>::bytes_of(LEASE_SLOTS_FIRST);
        // The lease table is first: without its entries, the other files mean nothing.
        let leases = (SessionFile::Leases, LEASES_FILE_BYTES, room);
        let log = (SessionFile::Log, log_room.bytes, log_room.allocated);
        let control = (SessionFile::Control, CONTROL_BYTES, beginning.end);
        let [leases_file, log_file, control_file] = arena.session_files(id, [leases, log, control])?;
        ashlar_pmem::allocate(&control_file, locks)?;
        let log_memory = map_file(arena, &log_file, log_room.bytes)?;
        let control = map_control(arena, &control_file)?;
        let table = map_file(arena, &leases_file, LEASES_FILE_BYTES)?;
        // None of them has content yet.
        let fresh = [&log_memory, control.memory(), &table];
        fresh.iter().filter_map(|memory| memory.mapping()).for_each(|memory| memory.set_read_ahead(false));
        let log = Log::format(Arc::clone(&log_memory), LogGeneration(1))?;
        control.format(id);
        let page = SessionPage::new(Arc::clone(&table))?;
        page.set_lease_room(LEASE_SLOTS_FIRST);
        page.set_log_bytes(log_room.bytes);
        let leases = LeaseTable::new(table).ok_or(SessionError::Unfinished)?;
        let token = fresh_token(id)?;
        leases.format(id, token);
        mapping_of(&log_memory)?.set_read_ahead(true);
        let files = SessionFiles::new(&log_memory, control.memory(), page.memory())?;
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
        SessionIdentity::wipe(page.memory())?;
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
        NotedLocks::new(page.memory()).ok_or(SessionError::Unfinished)?.clear();
        page.format_page(page.lease_room(), begins);
        page.set_log_bytes(log_room.bytes);
        let token = fresh_token(id)?;
        leases.format(id, token);
        let files = SessionFiles::new(&log_memory, control.memory(), page.memory())?;
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
        let page = &self.leases.1;
        page.memory().allocate(0..LEASE_TABLE_BYTES)?;
        page.set_lease_room(LEASE_SLOTS);
        Ok(())
    }

    /// Gives the session to an owner.
    ///
    /// The identity is written last: a session whose files have none was never welcomed. On a disk the identity is
    /// durable from the owner's first `fsync` on. Updates from before it are lost with it, and all that depends on
    /// them.
    ///
    /// # Errors
    /// [`SessionError`].
    pub fn give_to(
        self,
        identity: SessionIdentity,
        now: Duration,
    ) -> Result<(ServedSession, SessionFiles), SessionError> {
        identity.store(self.leases.1.memory())?;
        let Self { id, token, log: (log, log_memory, log_room), control, leases: (leases, page), files, .. } = self;
        let memory = SessionMemory { log, log_memory, log_room, control, leases, page };
        Ok((ServedSession::new(id, identity, token, memory, now)?, files))
    }
}

/// Takes up the files of a session that this or an earlier SharedFS made.
///
/// A living session may be appending at this moment, so its log is only opened. A log from before the machine's last
/// start is recovered from `committed` on.
///
/// # Errors
/// [`SessionError::Unfinished`] if the session was never welcomed; others if the files are damaged.
pub fn take_up_session(
    arena: &Arena,
    id: SessionId,
    committed: LogPosition,
    now: Duration,
) -> Result<(ServedSession, SessionFiles), SessionError> {
    let medium = arena.medium();
    let table = open_lease_table(arena, id)?;
    let page = SessionPage::new(Arc::clone(&table))?;
    let identity = load_identity(&table)?;
    let leases = LeaseTable::new(table).ok_or(SessionError::Unfinished)?;
    let (owner, token) = leases.owner().ok_or(SessionError::Unfinished)?;
    if owner != id {
        return Err(SessionError::Unfinished);
    }
    let control_file = arena.open_session_file(id, SessionFile::Control)?;
    // While no SharedFS ran, its process may have made its files longer.
    cut_file(&control_file, CONTROL_BYTES)?;
    let control = map_control(arena, &control_file)?;
    let log_file = arena.open_session_file(id, SessionFile::Log)?;
    let log_bytes = page.log_bytes().min(log_file.metadata()?.len());
    cut_file(&log_file, log_bytes)?;
    let log_memory = map_file(arena, &log_file, log_bytes)?;
    // A dead process's writes to a disk may be there in part. The machine need not have restarted since: the disk may
    // have been taken away under it. Its log then holds a valid prefix. Its lease table and page may be older than
    // that, so they validate only sessions whose user could exploit that.
    let is_whole = is_of_this_boot(&identity.process)
        && (medium.kind != MediumKind::Disk || identity.uid != 0 || open_process(&identity.process).is_some());
    let log = if is_whole {
        Log::open(Arc::clone(&log_memory))?
    } else {
        Log::recover(Arc::clone(&log_memory), committed)?.0
    };
    let files = SessionFiles::new(&log_memory, control.memory(), page.memory())?;
    let log_room = LogRoom { bytes: log_bytes, allocated: 0 };
    let memory = SessionMemory { log, log_memory, log_room, control, leases, page };
    let session = ServedSession::take_up(id, identity, token, memory, (committed, is_whole), now)?;
    if session.rights.is_any() {
        // SharedFS was killed, perhaps before the commit that would have synced it; the logs are about to be applied
        // again.
        session.page.memory().sync_range(0, LEASES_FILE_BYTES)?;
    }
    Ok((session, files))
}

/// Removes the owner from a session's files, durably: no start takes them up any more.
///
/// # Errors
/// Those of the medium; then a start may still take them up.
pub fn remove_owner(session: &ServedSession) -> io::Result<()> {
    SessionIdentity::wipe(session.page.memory()).map_err(io::Error::other)?;
    session.page.memory().sync_range(0, LEASE_TABLE_BYTES)
}

/// Makes an empty table of mapped files for a session that has none.
///
/// # Errors
/// [`SessionError`].
pub fn make_mapped_table(arena: &Arena, id: SessionId) -> Result<MappedTable, SessionError> {
    let [file] = arena.session_files(id, [(SessionFile::Mapped, TABLE_BYTES, TABLE_BYTES)])?;
    let mapping = Mapping::map(&file, TABLE_BYTES, MappingAccess::ReadWrite, arena.medium())?;
    Ok(MappedTable::empty(SharedMemory::Mapped(mapping)))
}

/// Returns the table of mapped files that an earlier SharedFS has left, with its mappings.
///
/// Returns `None` if there is none.
///
/// # Errors
/// [`SessionError`].
pub fn open_mapped_table(arena: &Arena, id: SessionId) -> Result<Option<(MappedTable, Vec<MappedRun>)>, SessionError> {
    let file = match arena.open_session_file(id, SessionFile::Mapped) {
        Ok(file) => file,
        Err(ArenaError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let memory = Mapping::map(&file, TABLE_BYTES, MappingAccess::ReadWrite, arena.medium())?;
    Ok(Some(MappedTable::take_up(SharedMemory::Mapped(memory))?))
}

/// Maps a session's file.
fn map_file(arena: &Arena, file: &File, bytes: u64) -> Result<Arc<SharedMemory>, SessionError> {
    let mapping = Mapping::map(file, bytes, MappingAccess::ReadWrite, arena.medium())?;
    Ok(Arc::new(SharedMemory::Mapped(mapping)))
}

/// Returns the mapping of memory that this shell has mapped.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a twin, which no shell has.
pub fn mapping_of(memory: &SharedMemory) -> io::Result<&Mapping> {
    memory.mapping().ok_or_else(|| ErrorKind::Unsupported.into())
}

/// Returns a secret that proves that a connection belongs to a session.
pub fn fresh_token(session: SessionId) -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes))?;
    // Never zero, which a table that was not formatted holds.
    Ok(u64::from_le_bytes(bytes) | 1 << (session.0 % 64))
}

/// Opens a session's lease table.
///
/// # Errors
/// [`SessionError::Unfinished`] if its making was cut short; others.
pub fn open_lease_table(arena: &Arena, id: SessionId) -> Result<Arc<SharedMemory>, SessionError> {
    let file = arena.open_session_file(id, SessionFile::Leases)?;
    if file.metadata()?.len() == 0 {
        return Err(SessionError::Unfinished);
    }
    map_file(arena, &file, LEASES_FILE_BYTES)
}

/// Reads the identity of a session from its lease table.
///
/// # Errors
/// [`SessionError::Unfinished`] if the files have no owner, [`SessionError::WrongVersion`].
pub fn load_identity(table: &SharedMemory) -> Result<SessionIdentity, SessionError> {
    let versions = SessionIdentity::versions(table).ok_or(SessionError::Unfinished)?;
    SESSION_VERSIONS.negotiate(versions).ok_or(SessionError::WrongVersion(versions))?;
    SessionIdentity::load(table).ok_or(SessionError::Unfinished)
}

/// Checks that this program understands the files of all sessions. It changes none of them.
///
/// # Errors
/// [`DaemonError::WrongVersion`], [`DaemonError::Arena`].
pub fn check_versions(arena: &Arena) -> Result<(), DaemonError> {
    for session in arena.sessions()? {
        // Other errors concern one session, and show again when it is taken up.
        let identity = open_lease_table(arena, session).and_then(|table| load_identity(&table));
        if let Err(SessionError::WrongVersion(found)) = identity {
            return Err(DaemonError::WrongVersion { session, found });
        }
    }
    Ok(())
}

/// Cuts a file that is longer than it should be.
fn cut_file(file: &File, bytes: u64) -> io::Result<()> {
    if file.metadata()?.len() > bytes { file.set_len(bytes) } else { Ok(()) }
}

/// Fences all sessions that have files: another node has taken over, so none of them may go on here.
pub fn fence_all(arena: &Arena) -> Result<(), SessionError> {
    for id in arena.sessions()? {
        let fenced = arena.open_session_file(id, SessionFile::Control).map_err(SessionError::from);
        match fenced.and_then(|file| map_control(arena, &file)) {
            Ok(control) => control.set_fenced(),
            Err(error) => tracing::warn!(session = id.0, %error, "a session of a replaced node can't be fenced"),
        }
    }
    Ok(())
}

fn map_control(arena: &Arena, file: &File) -> Result<Control, SessionError> {
    ControlPage::new(map_file(arena, file, CONTROL_BYTES)?).ok_or(SessionError::Unfinished)
}

/// Opens the file again for reading only, whatever its path is by now.
pub fn read_only(file: &File) -> io::Result<File> {
    open_again(file.as_fd(), MappingAccess::ReadOnly)
}

fn open_again(file: BorrowedFd<'_>, access: MappingAccess) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(access == MappingAccess::ReadWrite).open(path)
}

#[cfg(test)]
mod tests {
    use ashlar_pmem::ArenaOptions;
    use ashlar_types::{BlockAddress, InodeId, NodeNumber};

    use super::*;

    #[test]
    fn mapped_table_taken_up_holds_only_mapped_runs() {
        let directory = tempfile::tempdir().expect("a directory");
        let options = ArenaOptions::new(16 << 20);
        let arena = Arena::create(&directory.path().join("arena"), &options).expect("an arena");
        let id = SessionId(5);
        assert!(open_mapped_table(&arena, id).expect("none").is_none());
        let mut table = make_mapped_table(&arena, id).expect("made");
        assert!(make_mapped_table(&arena, id).is_err(), "there is one");
        let run = |number, first: u64| MappedRun {
            number,
            follows: number == 1,
            inode: InodeId(77),
            logical_block: first,
            blocks: 3,
            address: BlockAddress::new(NodeNumber::FIRST, 2, first as u32 + 9),
        };
        let (one, two) = (1, 2);
        assert!(table.record_runs(&[run(one, 0), run(one, 3)]) && table.record_runs(&[run(two, 6)]));
        table.forget_number(one);
        let (mut again, found) = open_mapped_table(&arena, id).expect("read").expect("there");
        assert_eq!(found, [run(two, 6)]);
        let many: Vec<_> = (0..ashlar_node::sessions::mapped_table::RECORDS_MAX).map(|first| run(3, first)).collect();
        assert!(!again.record_runs(&many), "there is no room for all");
        assert!(again.record_runs(&many[1..]));
    }
}
