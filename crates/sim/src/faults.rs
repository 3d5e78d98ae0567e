//! Faults of the machine that a run draws from its seed, and bugs that a run plants.

use std::fmt;

use ashlar_node::journal::ReplicaFault;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// A session's process dies at any point of its work.
    ProcessDeath,
    /// SharedFS is killed, and started again after a while.
    SharedFsDeath,
    /// The machine loses its power.
    PowerLoss,
    /// A commit takes long.
    SlowCommit,
    /// The metadata database refuses a commit.
    FailedCommit,
    /// SharedFS or the machine ends in the middle of a commit.
    CommitCrash,
    /// SharedFS is killed once more while it recovers.
    RecoveryCrash,
    /// A process stops for a while.
    StoppedProcess,
    /// SharedFS is killed between two of its writes to the memory of sessions.
    KillInCall,
    /// The replica's process dies, and is started again after a while.
    ReplicaDeath,
    /// The replica's machine loses its power.
    ReplicaPowerLoss,
    /// The connection to the replica is lost, with all messages.
    CutLink,
    /// The link damages a message to the replica.
    GarbledPart,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [Self; 13] = [
        Self::ProcessDeath,
        Self::SharedFsDeath,
        Self::PowerLoss,
        Self::SlowCommit,
        Self::FailedCommit,
        Self::CommitCrash,
        Self::RecoveryCrash,
        Self::StoppedProcess,
        Self::KillInCall,
        Self::ReplicaDeath,
        Self::ReplicaPowerLoss,
        Self::CutLink,
        Self::GarbledPart,
    ];

    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ProcessDeath => "process-death",
            Self::SharedFsDeath => "sharedfs-death",
            Self::PowerLoss => "power-loss",
            Self::SlowCommit => "slow-commit",
            Self::FailedCommit => "failed-commit",
            Self::CommitCrash => "commit-crash",
            Self::RecoveryCrash => "recovery-crash",
            Self::StoppedProcess => "stopped-process",
            Self::KillInCall => "kill-in-call",
            Self::ReplicaDeath => "replica-death",
            Self::ReplicaPowerLoss => "replica-power-loss",
            Self::CutLink => "cut-link",
            Self::GarbledPart => "garbled-part",
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kinds of faults that a run may draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultKinds(u16);

impl FaultKinds {
    /// All of them.
    pub const ALL: Self = Self((1 << FaultKind::ALL.len()) - 1);

    /// Returns whether a kind is among these.
    #[must_use]
    pub const fn has(self, kind: FaultKind) -> bool {
        self.0 & 1 << kind as u16 != 0
    }

    /// Returns these without one kind.
    #[must_use]
    pub const fn without(self, kind: FaultKind) -> Self {
        Self(self.0 & !(1 << kind as u16))
    }
}

/// A bug that a run plants, to show that a checker finds it.
///
/// Each falsifies what the shell or a session does, what the medium keeps, or what the link brings; the crates under
/// test stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimBug {
    /// `fsync` returns before the session's log is persistent.
    UnsyncedLog,
    /// `fsync` asks SharedFS for nothing: other sessions' updates stay where they are.
    UnsyncedDependencies,
    /// A session does not log what its updates depend on.
    UnloggedDependencies,
    /// A commit is reported as done, and its rows are not written.
    LostCommit,
    /// Recovery takes up one record less of a log than there is.
    SkippedRecord,
    /// A session goes on under leases that were taken from it.
    UnrevokedLease,
    /// A session takes the seal count after it has checked its leases.
    LateSealCount,
    /// A removed file that is open is freed at once.
    FreedOpenInode,
    /// A freed block is given out before the commit that frees it.
    EarlyReuse,
    /// A log counts as committed as far as it is applied.
    EarlyCommitted,
    /// A request that waits is never advanced again.
    ForgottenRequest,
    /// A session gets twice the quota balance that was decided.
    DoubleQuotaGrant,
    /// Limits are reported as set, and SharedFS was not asked.
    UnsetLimits,
    /// The medium holds another use of an account than the tree has.
    MiscountedUse,
    /// A session does not tell a restarted SharedFS of its locks.
    UnreclaimedLock,
    /// SharedFS forgets the locks that it has noted.
    LostLockNotes,
    /// SharedFS does not learn of the end of processes.
    UnnoticedDeath,
    /// A write of SharedFS to the memory of sessions is lost, shortly before SharedFS is killed.
    LostWrite,
    /// The replica acknowledges frames before it has made them durable.
    EarlyAck,
    /// SharedFS commits before the replica has acknowledged.
    UngatedCommit,
    /// The replica frees inodes that are to be kept.
    DroppedKeptList,
    /// The replica ends a batch one record early.
    MovedBatchBorder,
    /// A connection begins without a comparison of epochs.
    UncomparedEpoch,
    /// The writing node counts its journal as flushed, and has not flushed it.
    UnflushedJournal,
    /// The replica does not verify the checksums of frames that it receives.
    ///
    /// The link damages frames in bits that leave the checksums as they are.
    UnverifiedPart,
    /// Opening a journal does not verify the checksums of its last frames.
    ///
    /// After a loss of power, the last bytes of torn frames are such that the checksums fit.
    UnverifiedEnd,
    /// Opening a copy takes frames that were cut from it for its next ones.
    ///
    /// Zeroing and epochs refuse each such frame, and chained checksums refuse those behind newer frames. So all three
    /// are left out together: the frames are put back with epochs and checksums that fit.
    RevivedFrames,
}

impl SimBug {
    /// All bugs.
    pub const ALL: [Self; 27] = [
        Self::UnsyncedLog,
        Self::UnsyncedDependencies,
        Self::UnloggedDependencies,
        Self::LostCommit,
        Self::SkippedRecord,
        Self::UnrevokedLease,
        Self::LateSealCount,
        Self::FreedOpenInode,
        Self::EarlyReuse,
        Self::EarlyCommitted,
        Self::ForgottenRequest,
        Self::DoubleQuotaGrant,
        Self::UnsetLimits,
        Self::MiscountedUse,
        Self::UnreclaimedLock,
        Self::LostLockNotes,
        Self::UnnoticedDeath,
        Self::LostWrite,
        Self::EarlyAck,
        Self::UngatedCommit,
        Self::DroppedKeptList,
        Self::MovedBatchBorder,
        Self::UncomparedEpoch,
        Self::UnflushedJournal,
        Self::UnverifiedPart,
        Self::UnverifiedEnd,
        Self::RevivedFrames,
    ];

    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::UnsyncedLog => "unsynced-log",
            Self::UnsyncedDependencies => "unsynced-dependencies",
            Self::UnloggedDependencies => "unlogged-dependencies",
            Self::LostCommit => "lost-commit",
            Self::SkippedRecord => "skipped-record",
            Self::UnrevokedLease => "unrevoked-lease",
            Self::LateSealCount => "late-seal-count",
            Self::FreedOpenInode => "freed-open-inode",
            Self::EarlyReuse => "early-reuse",
            Self::EarlyCommitted => "early-committed",
            Self::ForgottenRequest => "forgotten-request",
            Self::DoubleQuotaGrant => "double-quota-grant",
            Self::UnsetLimits => "unset-limits",
            Self::MiscountedUse => "miscounted-use",
            Self::UnreclaimedLock => "unreclaimed-lock",
            Self::LostLockNotes => "lost-lock-notes",
            Self::UnnoticedDeath => "unnoticed-death",
            Self::LostWrite => "lost-write",
            Self::EarlyAck => "early-ack",
            Self::UngatedCommit => "ungated-commit",
            Self::DroppedKeptList => "dropped-kept-list",
            Self::MovedBatchBorder => "moved-batch-border",
            Self::UncomparedEpoch => "uncompared-epoch",
            Self::UnflushedJournal => "unflushed-journal",
            Self::UnverifiedPart => "unverified-part",
            Self::UnverifiedEnd => "unverified-end",
            Self::RevivedFrames => "revived-frames",
        }
    }

    /// Returns the fault that it plants in the replica.
    #[must_use]
    pub const fn replica_fault(self) -> Option<ReplicaFault> {
        match self {
            Self::DroppedKeptList => Some(ReplicaFault::KeptInode),
            Self::MovedBatchBorder => Some(ReplicaFault::BatchBorder),
            _ => None,
        }
    }

    /// Returns the bug of a name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|bug| bug.name() == name)
    }
}
