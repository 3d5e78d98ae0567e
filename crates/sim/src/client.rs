//! A scripted client: it plays LibFS for one session.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ashlar_log::Log;
use ashlar_node::pending::RequestTicket;
use ashlar_pmem::{Readable, SharedMemory};
use ashlar_types::{Credentials, Errno, InodeId, LogPosition, QuotaVersion, SealCount, SessionId};
use ashlar_wire::{ControlPage, LeaseTable, LeaseWord, QuotaRequest, Reply, Request, TakenCredit};

use crate::client_locks::{ClientLocks, WantedLock};
use crate::intent::Intent;
use crate::machine::{Machine, SessionTwins};
use crate::quota_balances::ClientBalances;

/// The aim of a client.
#[derive(Clone, Debug)]
pub enum Goal {
    /// Change the tree.
    Change(Intent),
    /// Open a file.
    Open(InodeId),
    /// Close a file.
    Close(InodeId),
    /// Make a file persistent, with all earlier updates of the session.
    SyncInode(InodeId),
    /// Make everything persistent.
    SyncAll,
    /// Have all of the log digested and committed.
    Digest,
    /// Set or remove a lock.
    Lock(WantedLock),
    /// Ask which lock conflicts.
    QueryLock(WantedLock),
    /// Ask which locks the process itself has on a file.
    ProbeLocks(InodeId),
    /// Remove all locks on a file.
    ReleaseLocks(InodeId),
    /// End the session in order.
    End,
}

/// An update that is ready to be appended.
#[derive(Debug)]
pub struct PreparedUpdate {
    /// The kind of the record.
    pub kind: u8,
    /// The body of the record.
    pub body: Vec<u8>,
    /// The credit that pays for it.
    pub taken: TakenCredit,
    /// The quota version and the amounts that it has paid.
    pub paid: (QuotaVersion, Vec<QuotaRequest>),
    /// The inode that it makes.
    pub made: Option<InodeId>,
}

/// How far a sync has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncStage {
    /// SharedFS is asked first.
    Ask,
    /// The lease table follows.
    Leases,
    /// The log is last.
    Log,
}

/// A sync under way.
#[derive(Clone, Copy, Debug)]
pub struct SyncProgress {
    /// How far it has come.
    pub stage: SyncStage,
    /// How many updates were logged by all sessions when it began.
    pub updates_before: usize,
}

/// A request that was sent, or will be.
#[derive(Debug)]
pub enum Asked {
    /// Nothing.
    Nothing,
    /// SharedFS does not run, or has lost it: it is sent when SharedFS runs.
    Unsent(Request),
    /// SharedFS has it.
    Pending(Request, RequestTicket),
    /// The reply has arrived.
    Answered(Request, Box<Result<Reply, Errno>>),
}

/// A client.
#[derive(Debug)]
pub struct SimClient {
    /// Its process.
    pub pid: u32,
    /// Its session.
    pub session: SessionId,
    /// Its user.
    pub user: Credentials,
    /// Its log.
    pub log: Log<Arc<SharedMemory>>,
    /// Its control page.
    pub control: ControlPage<Arc<SharedMemory>>,
    /// Its lease table.
    pub leases: LeaseTable<Arc<SharedMemory>, Readable>,
    /// Inode numbers that it may use.
    pub inodes: Range<u64>,
    /// Its leases: slot and word.
    pub granted: BTreeMap<InodeId, (u32, u64)>,
    /// Dependencies that it must log before the next update.
    pub unlogged: BTreeMap<SessionId, LogPosition>,
    /// Dependencies that it has logged.
    pub logged: BTreeMap<SessionId, LogPosition>,
    /// Dependencies that `fsync` has not made persistent yet.
    pub unsynced: BTreeMap<SessionId, LogPosition>,
    /// Files that it has open.
    pub handles: Vec<InodeId>,
    /// Its file locks.
    pub locks: ClientLocks,
    /// Whether a restarted SharedFS does not know all its locks yet.
    pub must_resume: bool,
    /// Its quota balances.
    pub balances: ClientBalances,
    /// Its aim.
    pub goal: Option<Goal>,
    /// Its request.
    pub asked: Asked,
    /// The seal count, read before the leases were checked.
    pub seal: Option<SealCount>,
    /// The update that it appends next.
    pub prepared: Option<PreparedUpdate>,
    /// The sync that is under way.
    pub sync: Option<SyncProgress>,
    /// How often it has tried for its goal.
    pub tries: u32,
    /// Whether it uses leases at present.
    pub is_using: bool,
    /// Where its last record ends.
    pub end: LogPosition,
    /// No loss of power may take records before this position.
    pub durable: LogPosition,
    /// Its process is stopped until this time.
    pub stopped_until: u64,
}

impl SimClient {
    /// Starts a process of a user, and begins its session.
    ///
    /// # Errors
    /// A description of what refused.
    pub fn begin(machine: &mut Machine, uid: u32, now_us: u64) -> Result<Self, String> {
        let pid = machine.start_process();
        let (id, first, count) = machine.begin_session(pid, uid, now_us)?;
        let twins = machine.twins.get(&id).ok_or("the session's memory is gone")?;
        let inodes = first.0..first.0 + count;
        Ok(Self::attach(pid, id, uid, twins, inodes).ok_or("the session's memory can't be used")?)
    }

    /// Attaches to a session's memory; `None` if it is not whole.
    fn attach(pid: u32, session: SessionId, uid: u32, twins: &SessionTwins, inodes: Range<u64>) -> Option<Self> {
        Some(Self {
            pid,
            session,
            user: Credentials { uid, gid: uid, groups: Vec::new(), checked: false },
            log: Log::open(Arc::clone(&twins.log)).ok()?,
            control: ControlPage::new(Arc::clone(&twins.control))?,
            leases: LeaseTable::read_only(Arc::clone(&twins.leases))?,
            inodes,
            granted: BTreeMap::new(),
            unlogged: BTreeMap::new(),
            logged: BTreeMap::new(),
            unsynced: BTreeMap::new(),
            handles: Vec::new(),
            locks: ClientLocks::default(),
            must_resume: false,
            balances: ClientBalances::default(),
            goal: None,
            asked: Asked::Nothing,
            seal: None,
            prepared: None,
            sync: None,
            tries: 0,
            is_using: false,
            end: LogPosition(0),
            durable: LogPosition(0),
            stopped_until: 0,
        })
    }

    /// Returns whether a lease that it was granted still holds.
    #[must_use]
    pub fn holds(&self, inode: InodeId, is_write: bool) -> bool {
        self.granted.get(&inode).is_some_and(|&(slot, word)| {
            let word = LeaseWord(word);
            self.leases.word(slot) == word && if is_write { word.may_write() } else { word.may_read() }
        })
    }

    /// Notes updates of other sessions on which later updates may depend.
    pub fn note_dependencies(&mut self, dependencies: &[(SessionId, LogPosition)]) {
        for &(session, position) in dependencies {
            if self.logged.get(&session).is_none_or(|logged| *logged < position) {
                for positions in [&mut self.unlogged, &mut self.unsynced] {
                    let newest = positions.entry(session).or_default();
                    *newest = position.max(*newest);
                }
            }
        }
    }

    /// Takes back what was paid for an update that is not appended.
    pub fn give_back(&mut self, prepared: &PreparedUpdate) {
        self.control.give_back(&prepared.taken);
        self.balances.give_back(prepared.paid.0, &prepared.paid.1);
    }

    /// Ends the goal.
    pub fn end_goal(&mut self) {
        if self.is_using {
            self.control.end_use();
            self.is_using = false;
        }
        if let Some(prepared) = self.prepared.take() {
            self.give_back(&prepared);
        }
        (self.goal, self.seal, self.sync, self.tries, self.locks.underway) = (None, None, None, 0, None);
    }
}
