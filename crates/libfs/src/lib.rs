//! LibFS: POSIX operations over the update log, granted state and data segments.
//!
//! Purpose: a session's half of the file system. Every operation works on cached objects that a lease makes valid; what
//! changes state is one record in the session's update log, and the same transition function that SharedFS will run
//! on the record (`ashlar-update`) runs on the cached objects. A warm operation costs no message.
//!
//! Invariants:
//! - A record is appended only while every lease that it needs holds: the log's seal count is read first, then the lease
//!   words; a revocation between that and the reservation makes the reservation fail, and the operation starts again.
//! - What is committed is forgotten only up to the first record that is on its way, or whose changes are not noted yet.
//! - What a read returns was true at one moment between call and return: it's copied, and then the lease word is looked at.
//! - Nothing here exits, aborts or unwinds on purpose; a failure is an [`Errno`].
//! - The call that asks for space gets the refusal: every record is paid for with credit, and from the purses of those whom quotas
//!   limit, before it is appended.
//!
//! Non-goals: descriptors, and what lies around the file system (front ends have them), kernel caches (`ashlar-fuse`).
//!
//! Source: `docs/architecture.md`; Assise §3.2 and §3.3.
pub mod alone;
mod api;
mod attributes;
mod calls;
mod children;
mod clock;
mod content;
mod counted;
mod data;
mod grant_cache;
mod grants;
mod handles;
mod intervals;
mod known;
mod ledger;
mod mapped;
mod materialise;
mod moves;
mod names;
mod node;
mod own;
mod pace;
mod path;
mod paths;
mod pieces;
mod quota;
mod record;
mod record_locks;
mod request_slot;
mod reserved;
mod segments;
mod stat;
mod warm;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ashlar_log::Log;
use ashlar_pmem::{Mapping, MappingAccess, Medium};
use ashlar_types::{Errno, InodeId, LogPosition, SessionId};
use ashlar_wire::{
    CONTROL_BYTES, ControlPage, GRANT_CACHE_BYTES, LEASE_TABLE_BYTES, LeaseTable, Reply, Request, SessionKind,
};

pub use api::{
    Change, ConnectError, Found, Listed, ListedName, Make, Options, Outcome, RenameFlags, Seek, SetTime, Space,
    WriteAt, Written, XattrFlags,
};
#[cfg(target_arch = "x86_64")]
pub use ashlar_pmem::processor;
pub use ashlar_update::acl::Acl;
pub use ashlar_update::{Allocation, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_QUOTA};
pub use ashlar_wire::{LockKind, LockMode, ReserveReason};
pub use calls::Pause;
pub use data::allocation_of;
pub use mapped::{MappedFile, MappedPiece};
pub use own::OwnDescriptors;
pub use path::{Aim, Last, Opening, Place, Purpose, Surroundings, Walked, access_of};
pub use paths::Paths;
pub use record_locks::{Conflict, RecordLock};
pub use stat::{stat_of, xattr_list};
pub use warm::OpenInode;

use alone::Mutex;
use calls::Calls;
use grant_cache::{Glimpses, GrantCacheReader};
use handles::HeldLocks;
use ledger::Ledger;
use mapped::MappingNumbers;
use node::NodeTable;
use own::Own;
use paths::Detours;
use quota::QuotaBalances;
use record::LOG_STEP_LEAST;
use record_locks::RecordLocks;
use segments::{Segment, Segments};

/// How often a mount forgets what was committed while nothing calls it, in milliseconds.
const IDLE_TIDY_MS: u64 = 200;
/// After so many such times without anything to forget, a mount gives memory that has become free back to the system.
const TRIM_AFTER: u32 = 5;

/// When memory that was freed goes back to the system: once, after a busy time. The allocator keeps it otherwise, and an idle
/// mount shall not hold what an unpacked archive took.
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
            // SAFETY: it takes no pointers, and may be called at any time from any thread.
            unsafe {
                libc::malloc_trim(0);
            }
        }
    }
}

/// A process that may have less address space than this, in bytes, has no session, which takes some 100 MiB of it beside data segments.
pub const ADDRESS_SPACE_LEAST: u64 = 256 << 20;

/// What this session has seen of others.
#[derive(Debug, Default)]
struct Dependencies {
    /// The newest position of each session for which a record was logged.
    logged: HashMap<SessionId, LogPosition>,
    /// Those that `fsync` has not yet made persistent.
    unsynced: HashMap<SessionId, LogPosition>,
}

/// Descriptors that come with each session: log, control page and lease table.
const SESSION_FILES: usize = 3;

/// A session: one process's half of the file system. Shared between threads.
#[derive(Debug)]
pub struct LibFs {
    /// The numbers of what is mapped for as long as the session. They are forgotten before that is closed.
    #[allow(dead_code, reason = "they are held, and no more")]
    mapped: Vec<Own<RawFd>>,
    calls: Calls,
    log: Log<Mapping>,
    control: ControlPage<Mapping>,
    leases: LeaseTable<Mapping>,
    grant_cache: Option<GrantCacheReader>,
    /// What came with the session for the kernel's side of descriptors, until it is taken.
    placeholder: Mutex<Option<OwnedFd>>,
    glimpses: Glimpses,
    nodes: NodeTable,
    /// Held by inode while it is asked for.
    asking: [Mutex<()>; grants::ASKING],
    directory_versions: Detours,
    ledger: Ledger,
    quota_balances: QuotaBalances,
    segments: Segments,
    mapping_numbers: Mutex<MappingNumbers>,
    held_locks: HeldLocks,
    /// What a mount has reserved for its kernel, to be told again to a SharedFS that was started anew.
    reserved: Mutex<BTreeSet<(InodeId, ReserveReason)>>,
    record_locks: RecordLocks,
    /// The control page's handle table has one writer at a time.
    handles: Mutex<()>,
    /// Open files that this session has made without a name (`O_TMPFILE`): they may get one.
    unnamed: Mutex<HashSet<InodeId>>,
    /// Held from the look at what is above a directory that moves until it has moved: threads of one session share its leases.
    moving: Mutex<()>,
    /// Inode numbers that may be given out: the next, and how many.
    inodes: Mutex<(u64, u64)>,
    dependencies: Mutex<Dependencies>,
    hash_key: [u8; 16],
    cache_ttl_ms: u64,
    descriptors: OwnDescriptors,
    sync_needed: bool,
    /// Where this session's part of the log begins: others may have logged before.
    log_began: LogPosition,
    /// Bytes of the log's file that have room.
    log_room: AtomicU64,
    /// A loss of power would leave what says whose session it is.
    is_known_to_last: AtomicBool,
    medium: Medium,
    poisoned: AtomicBool,
    tidying: Mutex<()>,
    /// Up to where what was committed is forgotten.
    tidied: AtomicU64,
}

impl LibFs {
    /// Opens a session with SharedFS.
    ///
    /// # Errors
    /// [`ConnectError`], with what to do next.
    pub fn connect(options: &Options) -> Result<Arc<Self>, ConnectError> {
        let memory = |error: &dyn std::fmt::Display| ConnectError::Memory(error.to_string());
        if let Some(bytes) = segments::address_space().filter(|bytes| *bytes < ADDRESS_SPACE_LEAST) {
            return Err(memory(&format!(
                "the process may have no more than {} MiB of address space (ulimit -v)",
                bytes >> 20
            )));
        }
        let (calls, welcome, mut descriptors) = Calls::open(options)?;
        let before = SESSION_FILES + welcome.segment.iter().len() + 1;
        let placeholder = if descriptors.len() > before { descriptors.pop() } else { None };
        let wrong = || memory(&"the daemon sent the wrong number of descriptors");
        let [log, control, leases, others @ ..] = &descriptors[..] else { return Err(wrong()) };
        // Where there were too few numbers left for all, the last ones are missing.
        let (first, grant_cache) = others.split_at(welcome.segment.iter().len().min(others.len()));
        let medium = match &welcome {
            welcome if welcome.sync_needed => Medium::DISK,
            welcome if welcome.emulated => Medium::emulated_pmem(),
            welcome if welcome.flush_needed => Medium::pmem(),
            _ => Medium::MEMORY,
        };
        let map = |file: &OwnedFd, bytes: u64, access: MappingAccess, medium: Medium| {
            Mapping::map_above(file, bytes, access, medium, options.descriptors.from).map_err(|error| memory(&error))
        };
        let volatile = Medium::MEMORY;
        let log = Log::open(map(log, welcome.log_bytes, MappingAccess::ReadWrite, medium)?).map_err(|e| memory(&e))?;
        let log_began = log.tail();
        if options.kind != SessionKind::Mount {
            // Who writes no more than the beginning of it ends soon.
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
        let leases = LeaseTable::new(table(leases, LEASE_TABLE_BYTES, MappingAccess::ReadOnly)?);
        let (Some(control), Some(leases)) = (control, leases) else {
            return Err(memory(&"the control page is too short"));
        };
        // Without these all is asked for: little address space is no reason to do without the session.
        let first = first
            .first()
            .zip(welcome.segment.as_ref())
            .and_then(|(file, told)| Some((told.number, Segment::new(file, told, medium, options.descriptors).ok()?)));
        let grant_cache = grant_cache
            .first()
            .and_then(|grant_cache| map(grant_cache, GRANT_CACHE_BYTES, MappingAccess::ReadOnly, volatile).ok());
        let mapped = [log.memory(), control.memory(), leases.memory()].into_iter().chain(&grant_cache);
        let mapped = mapped.map(|memory| Own::new(memory.file().as_raw_fd(), options.descriptors)).collect();
        let fs = Arc::new(Self {
            mapped,
            calls,
            log,
            control,
            leases,
            grant_cache: grant_cache.and_then(|memory| GrantCacheReader::new(memory, welcome.segment_version)),
            placeholder: Mutex::new(placeholder),
            glimpses: Glimpses::new(),
            nodes: NodeTable::new(),
            asking: std::array::from_fn(|_| Mutex::new(())),
            directory_versions: Detours::new(),
            ledger: Ledger::default(),
            quota_balances: QuotaBalances::default(),
            segments: Segments::new(welcome.segment_version, first),
            mapping_numbers: Mutex::default(),
            held_locks: HeldLocks::default(),
            reserved: Mutex::default(),
            record_locks: RecordLocks::default(),
            handles: Mutex::new(()),
            unnamed: Mutex::default(),
            moving: Mutex::default(),
            inodes: Mutex::new((welcome.inodes.0.0, welcome.inodes.1)),
            dependencies: Mutex::default(),
            hash_key: welcome.hash_key,
            cache_ttl_ms: welcome.cache_ttl_ms,
            descriptors: options.descriptors,
            sync_needed: welcome.sync_needed,
            log_began,
            log_room: AtomicU64::new(welcome.log_allocated),
            is_known_to_last: AtomicBool::new(false),
            medium,
            poisoned: AtomicBool::new(false),
            tidying: Mutex::new(()),
            tidied: AtomicU64::new(0),
        });
        if options.kind == SessionKind::Mount {
            let weak = Arc::downgrade(&fs);
            // A mount is a process of its own, so a thread disturbs nobody; inside an application there is none.
            let spawned = std::thread::Builder::new().name("ashlar-tidy".into()).spawn(move || {
                let mut memory = FreedMemory::default();
                let mut version = welcome.segment_version;
                while let Some(fs) = weak.upgrade() {
                    fs.tidy(&fs.tidying.lock());
                    fs.come_back(&mut version);
                    memory.give_back_when_idle(fs.tidied.load(Ordering::Relaxed));
                    drop(fs);
                    std::thread::sleep(std::time::Duration::from_millis(IDLE_TIDY_MS));
                }
            });
            spawned.map_err(|error| memory(&error))?;
        }
        Ok(fs)
    }

    /// Takes what the kernel may have at descriptors of a process whose files LibFS has open: whatever is done with it
    /// there fails. A SharedFS that may not mount sends none.
    pub fn take_placeholder(&self) -> Option<OwnedFd> {
        self.placeholder.lock().take()
    }

    /// Has a SharedFS that was started anew know the mount's device and its locks again, though nobody calls the mount: others may ask for the locks, or for
    /// what its kernel believes to know, and the mount is not waited for for long. Such a SharedFS begins an era of segments.
    fn come_back(&self, known: &mut u64) {
        let version = self.control.segment_version();
        // Whatever it is that is asked for first: device and locks come before it.
        if version != *known && self.call(&Request::SyncDependencies(Vec::new())).is_ok() {
            *known = version;
        }
    }

    /// Hands SharedFS the mount's `/dev/fuse` descriptor, through which it makes the kernel forget what is no longer true, and the
    /// device number that the mount's files show (`st_dev`). After a restart of SharedFS this happens again by itself.
    ///
    /// # Errors
    /// `EIO` where SharedFS is away.
    pub fn register_mount(&self, device: OwnedFd, number: u64) -> Outcome<()> {
        self.calls.register_mount(device, number, self)
    }

    /// For how long a kernel may keep what was just answered about an inode, in milliseconds; 0 where it's no longer true.
    #[must_use]
    pub fn cache_ttl_ms(&self, id: InodeId) -> u64 {
        if self.is_valid(id) { self.cache_ttl_ms } else { 0 }
    }

    /// The longest that a kernel may keep anything of what it's answered, in milliseconds.
    #[must_use]
    pub fn cache_ttl_max_ms(&self) -> u64 {
        self.cache_ttl_ms
    }

    /// For how long a kernel may keep names of a directory, in milliseconds: not at all while others share the arena.
    #[must_use]
    pub fn name_ttl_ms(&self, directory: InodeId) -> u64 {
        if self.is_shared() { 0 } else { self.cache_ttl_ms(directory) }
    }

    /// Whether there are other sessions.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.control.is_shared()
    }

    /// How often it has changed whether there are other sessions: odd while there are.
    #[must_use]
    pub fn company(&self) -> u64 {
        self.control.company()
    }

    /// Sleeps while [`Self::company`] is this. It may return sooner.
    pub fn wait_company(&self, company: u64) {
        self.control.wait_company(company);
    }

    /// How many sessions of programs there are beside a mount's.
    #[must_use]
    pub fn programs(&self) -> u64 {
        self.control.programs()
    }

    /// Sleeps while there are no sessions of programs beside a mount's. It may return sooner.
    pub fn wait_programs(&self) {
        self.control.wait_programs();
    }

    /// Says that the kernel has forgotten all names that it kept before the company changed to this.
    pub fn forgot_names(&self, company: u64) {
        self.control.set_company_known(company);
    }

    /// Whether the lease under which an inode was answered still holds.
    #[must_use]
    pub fn is_valid(&self, id: InodeId) -> bool {
        self.nodes.existing(id).is_some_and(|node| {
            let state = node.read();
            !state.gone && self.holds(&state, false)
        })
    }

    /// Ends the session in order: everything is digested, leases and locks go back.
    pub fn end(&self) {
        if self.make_room().and_then(|()| self.call(&Request::Goodbye).map(drop)).is_err() {
            tracing::warn!("the daemon is away; it will digest the session's log when it is back");
        }
    }

    /// Ends the session without waiting for a commit: what it did, others see. Nothing may be open in it, and nobody use it any more.
    pub fn leave(&self) {
        // A SharedFS that restarts at this moment finds the session resumed by nobody; it ends with its process then.
        let _ = self.call(&Request::Leave);
        self.calls.hang_up();
    }

    /// Closes the connections, in a process that was forked from the session's: the session is the other's.
    pub fn hang_up(&self) {
        self.calls.hang_up();
    }

    pub(crate) fn call(&self, request: &Request) -> Outcome<Reply> {
        self.calls.call(request, Some(&self.control), self)
    }

    pub(crate) fn call_with(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Outcome<(Reply, Vec<OwnedFd>)> {
        self.calls.call_with(request, descriptors, self)
    }

    /// Whether there is a number for a new inode without asking for some.
    pub(crate) fn has_inodes(&self) -> bool {
        self.inodes.lock().1 > 0
    }

    /// Takes back the number that was given last, if it is: nothing was logged of it.
    pub(crate) fn return_inode(&self, id: InodeId) {
        let mut range = self.inodes.lock();
        if range.0 == id.0 + 1 {
            *range = (id.0, range.1 + 1);
        }
    }

    /// A number for a new inode.
    pub(crate) fn next_inode(&self) -> Outcome<InodeId> {
        let mut range = self.inodes.lock();
        if range.1 == 0 {
            let Reply::Inodes(first, count) = self.call(&Request::InodeRange)? else { return Err(Errno::EIO) };
            *range = (first.0, count);
        }
        let id = InodeId(range.0);
        *range = (range.0 + 1, range.1.checked_sub(1).ok_or(Errno::EIO)?);
        Ok(id)
    }
}
