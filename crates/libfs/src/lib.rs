//! LibFS: POSIX operations over update log, granted state and data segments.
//!
//! Purpose: LibFS is a session's half of the file system. Each operation works on cached inodes that a lease makes
//! valid. A change is one record in the session's update log. LibFS runs the transition function of `ashlar-update` on
//! its cached inodes. SharedFS later runs the same function on the record. A warm operation costs no message.
//!
//! Invariants:
//! - LibFS appends a record only while every lease that it needs holds. It reads the log's seal count first, then the
//!   lease words. If SharedFS revokes a lease between that and the reservation, the reservation fails and the operation
//!   starts again. Types enforce that order (`log/update_log/leased_append.rs`).
//! - LibFS forgets committed changes only up to a bound: the first record that is being written or whose changes are
//!   not noted yet.
//! - A read returns bytes that were true at one moment between call and return: LibFS copies them and reads the lease
//!   word afterwards.
//! - Nothing here exits, aborts or unwinds on purpose; a failure is an [`Errno`].
//! - The call that asks for space gets the refusal. LibFS pays for each record before it appends it: with credit, and
//!   from the quota balances of the user, group and subtree if quotas limit them.
//!
//! Folders:
//! - `client`: requests to SharedFS, by messages or in the request slot.
//! - `cache`: cached inodes, with entries, file maps and uncommitted changes.
//! - `leases`: grants, the grant cache and reserved inodes.
//! - `log`: appending records, and paying for them.
//! - `files`: content, handles, locks and mappings of files; the fast path of open files.
//! - `names`: directory entries, paths and attributes; the fast path of cached paths.
//!
//! Non-goals: descriptors and all else around the file system (front ends have them), and kernel caches
//! (`ashlar-fuse`).
//!
//! Source: `docs/architecture.md`; Assise §3.2 and §3.3.
mod api;
mod cache;
mod client;
mod clock;
mod files;
mod leases;
mod log;
mod names;
mod operation_stats;

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ashlar_pmem::{Mapping, MappingAccess, Medium, Readable};
use ashlar_types::{Errno, InodeId, LogPosition, NameHashKey, SegmentVersion, SessionId};
use ashlar_wire::{
    CONTROL_BYTES, ControlPage, GRANT_CACHE_BYTES, LEASE_TABLE_BYTES, LeaseTable, MountTerms, Reply, Request,
    SessionKind,
};
use rustix_futex_sync::Mutex;

pub use api::{
    AttributeChange, ConnectError, FoundInode, Listed, ListedName, NewInode, Options, Outcome, RenameFlags, Seek,
    SetTime, WriteAt, Written, XattrFlags,
};
#[cfg(target_arch = "x86_64")]
pub use ashlar_pmem::processor;
pub use ashlar_types::{ByteRange, LockAction, LockKind, LockMode, LockedRange};
pub use ashlar_update::acl::Acl;
pub use ashlar_update::{Allocation, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_QUOTA};
pub use ashlar_wire::{ReserveReason, SpaceReply as Space};
pub use client::own_descriptors::DescriptorPolicy;
pub use client::sharedfs_client::WakeReason;
pub use files::dax::{MappedFile, MappedPiece};
pub use files::file_io::{allocation_of, check_copied_range};
pub use files::open_file::OpenInode;
pub use files::record_locks::{ConflictingLock, RecordLockOutcome};
pub use names::path_cache::PathCache;
pub use names::path_walk::{
    FinalLink, OpenAction, PathContext, PathIntent, PathPurpose, ResolvedPath, WalkOutcome, access_of,
};
pub use names::stat::{stat_of, xattr_list};

use cache::dirty_list::DirtyList;
use cache::node::NodeTable;
use client::own_descriptors::OwnDescriptor;
use client::sharedfs_client::SharedFsClient;
use files::held_locks::HeldLocks;
use files::mapping_numbers::MappingNumbers;
use files::record_lock_state::RecordLockState;
use files::segments::{MappedSegment, Segments};
use leases::first_reads::FirstReads;
use leases::grant_cache_reader::GrantCacheReader;
use leases::request_locks::RequestLocks;
use log::quota_balances::QuotaBalances;
use log::update_log::{LOG_STEP_LEAST, UpdateLog};
use names::directory_versions::DirectoryVersions;

/// Milliseconds between two rounds in which an idle mount forgets committed changes.
const IDLE_TIDY_MS: u64 = 200;
/// Rounds without anything to forget after which a mount returns freed memory to the system.
const TRIM_AFTER: u32 = 5;

/// Decides when freed memory returns to the system: once, after a busy time.
///
/// The allocator keeps freed memory otherwise. An idle mount should not hold the memory that an unpacked archive took.
#[derive(Debug, Default)]
struct FreedMemory {
    tidied: u64,
    idle_times: u32,
}

impl FreedMemory {
    fn give_back_when_idle(&mut self, tidied: u64) {
        self.idle_times = if tidied == self.tidied { self.idle_times.saturating_add(1) } else { 0 };
        self.tidied = tidied;
        if self.idle_times == TRIM_AFTER {
            #[cfg(target_env = "gnu")]
            // SAFETY: `malloc_trim` takes no pointers; any thread may call it at any time.
            unsafe {
                libc::malloc_trim(0);
            }
        }
    }
}

/// The least address space, in bytes, that a process must be allowed if it is to have a session.
///
/// A session takes some 100 MiB of it, beside data segments.
pub const ADDRESS_SPACE_LEAST: u64 = 256 << 20;

/// The other sessions' updates that this session's updates depend on.
#[derive(Debug, Default)]
struct Dependencies {
    /// For each session, the newest position for which this session has logged a dependency.
    logged: HashMap<SessionId, LogPosition>,
    /// The positions that `fsync` has not made persistent yet.
    unsynced: HashMap<SessionId, LogPosition>,
}

/// Descriptors that come with each session: log, control page and lease table.
const SESSION_FILES: usize = 3;

/// A session: one process's half of the file system. Its threads share it.
#[derive(Debug)]
pub struct LibFs {
    /// The descriptor numbers of the session's mappings. Field order drops them before the mappings close the
    /// descriptors.
    #[allow(dead_code, reason = "held only for its drop")]
    mapped: Vec<OwnDescriptor<RawFd>>,
    client: SharedFsClient,
    log: UpdateLog,
    control: ControlPage<Mapping>,
    leases: LeaseTable<Mapping, Readable>,
    grant_cache: Option<GrantCacheReader>,
    /// The descriptor that the front end puts at the kernel's side of LibFS's descriptors, until the front end takes
    /// it.
    placeholder: Mutex<Option<OwnedFd>>,
    first_reads: FirstReads,
    nodes: NodeTable,
    request_locks: RequestLocks,
    directory_versions: DirectoryVersions,
    dirty_list: DirtyList,
    quota_balances: QuotaBalances,
    segments: Segments,
    mapping_numbers: Mutex<MappingNumbers>,
    held_locks: HeldLocks,
    /// The inodes that a mount has reserved for its kernel. A restarted SharedFS is sent them again.
    reserved: Mutex<BTreeSet<(InodeId, ReserveReason)>>,
    record_locks: RecordLockState,
    /// Serialises writers of the control page's handle table.
    handles: Mutex<()>,
    /// Held while a directory moves, from the check of its ancestors until it has moved. Threads of one session share
    /// its leases, so leases alone don't keep them apart.
    moving: Mutex<()>,
    /// Free inode numbers: the next one, and how many there are.
    inodes: Mutex<(u64, u64)>,
    dependencies: Mutex<Dependencies>,
    hash_key: NameHashKey,
    cache_ttl_ms: u64,
    descriptors: DescriptorPolicy,
    sync_needed: bool,
    /// `fsync` asks SharedFS, which waits for the replica.
    is_replicated: bool,
    /// Where this session's part of the log begins. Earlier sessions may have logged before it.
    log_began: LogPosition,
    /// Bytes of the log's file that have room on the medium.
    log_room: AtomicU64,
    /// How often SharedFS has granted means: the session itself, inode numbers, and credit.
    means_granted: AtomicU64,
    /// The grants up to this one are noted in the lease table so that a loss of power leaves them.
    means_lasting: AtomicU64,
    medium: Medium,
    poisoned: AtomicBool,
    tidying: Mutex<()>,
    /// The position up to which committed changes are forgotten.
    tidied: AtomicU64,
}

impl LibFs {
    /// Opens a session with SharedFS.
    ///
    /// # Errors
    /// [`ConnectError`], with what to do next.
    pub fn connect(options: &Options) -> Result<Arc<Self>, ConnectError> {
        let memory = |error: &dyn std::fmt::Display| ConnectError::Memory(error.to_string());
        if let Some(bytes) = files::segments::address_space().filter(|bytes| *bytes < ADDRESS_SPACE_LEAST) {
            return Err(memory(&format!(
                "the process may have no more than {} MiB of address space (ulimit -v)",
                bytes >> 20
            )));
        }
        let (client, welcome, mut descriptors) = SharedFsClient::open(options)?;
        let before = SESSION_FILES + welcome.segment.iter().len() + 1;
        let placeholder = if descriptors.len() > before { descriptors.pop() } else { None };
        let wrong = || memory(&"the daemon sent the wrong number of descriptors");
        let [log, control, leases, others @ ..] = &descriptors[..] else { return Err(wrong()) };
        // If the process has too few free descriptor numbers, the last descriptors are missing.
        let (first, grant_cache) = others.split_at(welcome.segment.iter().len().min(others.len()));
        let medium = match &welcome {
            welcome if welcome.sync_needed => Medium::DISK,
            welcome if welcome.emulated => Medium::emulated_pmem(),
            welcome if welcome.flush_needed => Medium::pmem(),
            _ => Medium::MEMORY,
        };
        let map = |file: &OwnedFd, bytes: u64, access: MappingAccess, medium: Medium| {
            let mapping = Mapping::map_above(file, bytes, access, medium, options.descriptors.from);
            let kept = mapping.and_then(|mapping| Ok(mapping.keep_from_children().map(|()| mapping)?));
            kept.map_err(|error| memory(&error))
        };
        let volatile = Medium::MEMORY;
        let log = map(log, welcome.log_bytes, MappingAccess::ReadWrite, medium)?;
        let log = UpdateLog::open(log).map_err(|error| memory(&error))?;
        let log_began = log.tail();
        if options.kind != SessionKind::Mount {
            // A session that writes no more than the log's beginning ends soon.
            let room = welcome.log_allocated.saturating_sub(log.bytes_upto(log_began));
            let has_all = log.bytes_upto(log_began.plus(LOG_STEP_LEAST)) <= welcome.log_allocated;
            log.set_ready(log_began.plus(if has_all { LOG_STEP_LEAST } else { room }));
            log.memory().set_read_ahead(false);
        }
        let table = |file: &OwnedFd, bytes: u64, access: MappingAccess| {
            map(file, bytes, access, if welcome.sync_needed { Medium::DISK } else { volatile })
                .inspect(|memory| memory.set_read_ahead(false))
        };
        let control = ControlPage::new(table(control, CONTROL_BYTES, MappingAccess::ReadWrite)?);
        let leases = LeaseTable::read_only(table(leases, LEASE_TABLE_BYTES, MappingAccess::ReadOnly)?);
        let (Some(control), Some(leases)) = (control, leases) else {
            return Err(memory(&"the control page is too short"));
        };
        // A session works without these two: LibFS then requests everything. So little address space is no reason to
        // refuse the session.
        let first = first.first().zip(welcome.segment.as_ref()).and_then(|(file, info)| {
            Some((info.number, MappedSegment::new(file, info, medium, options.descriptors).ok()?))
        });
        let grant_cache = grant_cache
            .first()
            .and_then(|grant_cache| map(grant_cache, GRANT_CACHE_BYTES, MappingAccess::ReadOnly, volatile).ok());
        let mapped = [log.memory(), control.memory(), leases.memory()].into_iter().chain(&grant_cache);
        let mapped = mapped.map(|memory| OwnDescriptor::new(memory.file().as_raw_fd(), options.descriptors)).collect();
        let fs = Arc::new(Self {
            mapped,
            client,
            log,
            control,
            leases,
            grant_cache: grant_cache.and_then(|memory| GrantCacheReader::new(memory, welcome.segment_version)),
            placeholder: Mutex::new(placeholder),
            first_reads: FirstReads::new(),
            nodes: NodeTable::new(),
            request_locks: RequestLocks::new(),
            directory_versions: DirectoryVersions::new(),
            dirty_list: DirtyList::default(),
            quota_balances: QuotaBalances::default(),
            segments: Segments::new(welcome.segment_version, first),
            mapping_numbers: Mutex::default(),
            held_locks: HeldLocks::default(),
            reserved: Mutex::default(),
            record_locks: RecordLockState::default(),
            handles: Mutex::new(()),
            moving: Mutex::default(),
            inodes: Mutex::new((welcome.inodes.0.0, welcome.inodes.1)),
            dependencies: Mutex::default(),
            hash_key: welcome.hash_key,
            cache_ttl_ms: welcome.cache_ttl_ms,
            descriptors: options.descriptors,
            sync_needed: welcome.sync_needed,
            is_replicated: welcome.is_replicated,
            log_began,
            log_room: AtomicU64::new(welcome.log_allocated),
            means_granted: AtomicU64::new(1),
            means_lasting: AtomicU64::new(0),
            medium,
            poisoned: AtomicBool::new(false),
            tidying: Mutex::new(()),
            tidied: AtomicU64::new(0),
        });
        if options.kind == SessionKind::Mount {
            let weak = Arc::downgrade(&fs);
            // A mount is a process of its own, so this thread disturbs no program. A session inside a program has no
            // thread.
            let spawned = std::thread::Builder::new().name("ashlar-tidy".into()).spawn(move || {
                let mut memory = FreedMemory::default();
                let mut version = welcome.segment_version;
                while let Some(fs) = weak.upgrade() {
                    fs.forget_committed(&fs.tidying.lock());
                    fs.register_again(&mut version);
                    memory.give_back_when_idle(fs.tidied.load(Ordering::Relaxed));
                    drop(fs);
                    std::thread::sleep(std::time::Duration::from_millis(IDLE_TIDY_MS));
                }
            });
            spawned.map_err(|error| memory(&error))?;
        }
        Ok(fs)
    }

    /// Takes the descriptor that the kernel may keep at the numbers of files that LibFS has open.
    ///
    /// All that a process does with it in the kernel fails. A SharedFS that may not mount sends none.
    pub fn take_placeholder(&self) -> Option<OwnedFd> {
        self.placeholder.lock().take()
    }

    /// Registers the mount again with a restarted SharedFS, without waiting for a call of the mount.
    ///
    /// Other sessions may ask for the mount's locks, or for inodes that its kernel caches. SharedFS does not wait long
    /// for a mount. A restarted SharedFS begins a new segment version, which shows here.
    fn register_again(&self, known: &mut SegmentVersion) {
        let version = self.control.segment_version();
        // Any request will do: the client sends device and locks before it.
        if version != *known && self.call(&Request::SyncDependencies(Vec::new())).is_ok() {
            *known = version;
        }
    }

    /// Hands SharedFS the mount's `/dev/fuse` descriptor, its files' device number (`st_dev`), and its terms.
    ///
    /// SharedFS uses the descriptor to invalidate stale entries of the kernel's caches. After a restart of SharedFS,
    /// LibFS registers the mount again by itself.
    ///
    /// # Errors
    /// `EIO` if SharedFS is away.
    pub fn register_mount(&self, device: OwnedFd, number: u64, terms: MountTerms) -> Outcome<()> {
        self.client.register_mount(device, number, terms, self)
    }

    /// Returns how long, in milliseconds, a kernel may cache the last answer about an inode; 0 if it is stale.
    #[must_use]
    pub fn cache_ttl_ms(&self, id: InodeId) -> u64 {
        if self.is_valid(id) { self.cache_ttl_ms } else { 0 }
    }

    /// Returns the longest time, in milliseconds, that a kernel may cache any answer.
    #[must_use]
    pub fn cache_ttl_max_ms(&self) -> u64 {
        self.cache_ttl_ms
    }

    /// Returns how long, in milliseconds, a kernel may cache names of a directory.
    ///
    /// It is 0 while other sessions share the arena.
    #[must_use]
    pub fn name_ttl_ms(&self, directory: InodeId) -> u64 {
        if self.is_shared() { 0 } else { self.cache_ttl_ms(directory) }
    }

    /// Returns whether there are other sessions.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.control.is_shared()
    }

    /// Returns how often the answer of [`Self::is_shared`] has changed; odd while there are other sessions.
    #[must_use]
    pub fn company(&self) -> u64 {
        self.control.company()
    }

    /// Sleeps while [`Self::company`] is still `company`. It may return sooner.
    pub fn wait_company(&self, company: u64) {
        self.control.wait_company(company);
    }

    /// Returns how many sessions of programs there are beside a mount's.
    #[must_use]
    pub fn programs(&self) -> u64 {
        self.control.programs()
    }

    /// Sleeps while there are no sessions of programs beside a mount's. It may return sooner.
    pub fn wait_programs(&self) {
        self.control.wait_programs();
    }

    /// Records that the kernel has dropped all names that it cached before `company` began.
    pub fn confirm_names_dropped(&self, company: u64) {
        self.control.set_company_known(company);
    }

    /// Returns whether the lease under which an inode was last answered still holds.
    #[must_use]
    pub fn is_valid(&self, id: InodeId) -> bool {
        self.nodes.existing(id).is_some_and(|node| {
            let state = node.read();
            !state.is_gone && self.holds_lease(&state, false)
        })
    }

    /// Ends the session in order: SharedFS digests its log and takes back its leases and locks.
    ///
    /// On a writing node it is a sync, and waits for no commit: that may come only when the replica is back.
    pub fn close_session(&self) {
        let closed = if self.is_replicated {
            if self.call(&Request::SyncAll).is_err() {
                tracing::warn!("the session ends, and its last updates may not be at the replica yet");
            }
            self.call(&Request::Leave)
        } else {
            self.make_room().and_then(|()| self.call(&Request::Goodbye))
        };
        if closed.is_err() {
            tracing::warn!("the daemon is away; it will digest the session's log when it is back");
        }
    }

    /// Ends the session without waiting for a commit; other sessions see all that it did.
    ///
    /// The caller has nothing open in the session and uses it no more.
    pub fn leave_session(&self) {
        // If SharedFS restarts at this moment, no process resumes the session. SharedFS then ends it with its process.
        let _ = self.call(&Request::Leave);
        self.client.close_connections();
    }

    /// Takes the session from its own process, which goes on with fewer rights.
    ///
    /// The process keeps none of the session's memory and files; `instead` takes the place of its descriptors. Other
    /// threads may be in the middle of a call, which fails. It can't be undone.
    ///
    /// # Errors
    /// If the kernel refuses a part, the rest is gone all the same.
    pub fn give_up_session(&self, instead: BorrowedFd<'_>) -> std::io::Result<()> {
        self.poisoned.store(true, Ordering::Release);
        self.client.close_connections();
        let memory = [self.log.memory(), self.control.memory(), self.leases.memory()].into_iter();
        let memory = memory.chain(self.grant_cache.as_ref().map(GrantCacheReader::memory));
        let mut given_up = Ok(());
        for outcome in memory.map(|memory| memory.give_up_file(instead)) {
            given_up = given_up.and(outcome);
        }
        given_up.and(self.segments.give_up_files(instead))
    }

    pub(crate) fn call(&self, request: &Request) -> Outcome<Reply> {
        self.client.call(request, Some(&self.control), self)
    }

    /// As [`Self::call`]; also returns the descriptors that came with the answer.
    pub(crate) fn call_with(&self, request: &Request) -> Outcome<(Reply, Vec<OwnedFd>)> {
        self.client.call_with(request, &[], self)
    }

    /// Returns whether there is a number for a new inode without a request.
    pub(crate) fn has_inodes(&self) -> bool {
        self.inodes.lock().1 > 0
    }

    /// Takes back an unused inode number, if it was given out last. No record names it.
    pub(crate) fn return_inode(&self, id: InodeId) {
        let mut range = self.inodes.lock();
        if range.0 == id.0 + 1 {
            *range = (id.0, range.1 + 1);
        }
    }

    /// Returns a number for a new inode.
    pub(crate) fn next_inode(&self) -> Outcome<InodeId> {
        let mut range = self.inodes.lock();
        if range.1 == 0 {
            let Reply::Inodes(first, count) = self.call(&Request::InodeRange)? else { return Err(Errno::EIO) };
            self.means_granted.fetch_add(1, Ordering::Release);
            *range = (first.0, count);
        }
        let id = InodeId(range.0);
        *range = (range.0 + 1, range.1.checked_sub(1).ok_or(Errno::EIO)?);
        Ok(id)
    }
}
