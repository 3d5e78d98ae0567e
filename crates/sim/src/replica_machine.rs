//! The machine of a replica: its media, and the replica on it.

use std::fmt;
use std::sync::Arc;

use ashlar_journal::{JournalIdentity, JournalRing};
use ashlar_node::journal::{ReplayError, Replica, ReplicaFault};
use ashlar_pmem::{CrashMedium, CrashTwin, SharedMemory};
use ashlar_store::{MemoryArena, MemoryArenaOptions, Store, StoreError};
use ashlar_types::{Epoch, FileSystemId, JournalPosition, NodeNumber, Timestamp};

use crate::random::SimRandom;

/// The journal of the writing node.
pub const JOURNAL: JournalIdentity = JournalIdentity { file_system: FileSystemId(1), node: NodeNumber::FIRST };

/// How a replica's machine is made.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaOptions {
    /// How its memory survives a loss of power.
    pub medium: CrashMedium,
    /// Blocks of the only data segment.
    pub blocks: u32,
    /// Bytes of the ring, the same as the writing node's.
    pub ring_bytes: u64,
    /// The fault that is planted.
    pub fault: Option<ReplicaFault>,
}

/// The machine of a replica.
pub struct ReplicaMachine {
    options: ReplicaOptions,
    /// The shared area's media.
    pub arena: Arc<MemoryArena>,
    /// The copy's memory.
    pub ring: Arc<SharedMemory>,
    /// The replica, while it runs.
    pub replica: Option<Replica>,
    /// The copy's end when the replica ran last.
    end: JournalPosition,
}

impl fmt::Debug for ReplicaMachine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicaMachine").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Makes the memory of an empty journal.
///
/// # Errors
/// Those of the journal.
pub fn new_ring(twin: CrashTwin) -> Result<Arc<SharedMemory>, ReplayError> {
    let ring = Arc::new(SharedMemory::Twin(twin));
    JournalRing::format(Arc::clone(&ring), JOURNAL, Epoch::default())?;
    Ok(ring)
}

/// Returns how a loss of power chooses among the contents that each word or page may have.
///
/// None of the unsettled ones is there, all are, or some.
pub fn power_loss(random: &mut SimRandom) -> impl FnMut(usize) -> usize {
    let style = random.below(4);
    move |contents: usize| match style {
        0 => 0,
        1 => contents - 1,
        2 => random.below(contents as u64) as usize,
        _ if random.one_in(4) => 0,
        _ => contents - 1,
    }
}

impl ReplicaMachine {
    /// Makes a machine with an empty arena and an empty copy; the replica does not run.
    ///
    /// # Errors
    /// Those of the store and the journal.
    pub fn new(options: ReplicaOptions) -> Result<Self, ReplayError> {
        let arena = Arc::new(MemoryArena::new(&MemoryArenaOptions::new(options.medium, vec![options.blocks])));
        Store::format_in_memory(&arena, Timestamp::default())?;
        let bytes = JournalRing::<SharedMemory>::bytes_for(options.ring_bytes) as usize;
        let ring = new_ring(CrashTwin::new(options.medium, bytes))?;
        Ok(Self { options, arena, ring, replica: None, end: JournalPosition(0) })
    }

    /// Starts the replica.
    ///
    /// # Errors
    /// Those of the store and the journal; [`ReplayError::Contradiction`] if the copy is longer than before.
    pub fn start(&mut self) -> Result<(), ReplayError> {
        let store = Store::open_in_memory(Arc::clone(&self.arena))?;
        let mut replica = Replica::open(store, Arc::clone(&self.ring), JOURNAL)?;
        if let Some(fault) = self.options.fault {
            replica.plant(fault);
        }
        if replica.copy_state().end > self.end {
            return Err(ReplayError::Contradiction("the copy is longer than when the replica ended"));
        }
        self.replica = Some(replica);
        Ok(())
    }

    fn end_replica(&mut self) {
        self.end = self.replica.take().map_or(self.end, |replica| replica.copy_state().end);
    }

    /// Kills the replica's process.
    pub fn kill(&mut self) {
        self.end_replica();
        self.arena = Arc::new(self.arena.after_process_death());
    }

    /// Cuts the power.
    pub fn lose_power(&mut self, random: &mut SimRandom) {
        self.end_replica();
        let mut choose = power_loss(random);
        self.arena = Arc::new(self.arena.after_crash(&mut choose));
        if let Some(twin) = self.ring.twin() {
            self.ring = Arc::new(SharedMemory::Twin(twin.after_crash(&mut choose)));
        }
    }

    /// Commits what the replica has applied.
    ///
    /// # Errors
    /// Those of the store.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        let Some(replica) = &mut self.replica else { return Ok(()) };
        match replica.begin_commit() {
            Some(job) => replica.finish_commit(job.run()),
            None => Ok(()),
        }
    }
}
