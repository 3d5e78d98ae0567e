//! The shadow: a replica in an arena of its own, in the same process.
//!
//! It is a way to test that two digests of one journal agree. SharedFS sends it every frame, and commits nothing before
//! the shadow has made the frames durable. The shadow judges nothing.
//!
//! It begins with an empty file system, and follows that until its arena is removed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ashlar_node::NodeCore;
use ashlar_node::journal::{CopySender, NodeJournal, ReplayError, Replica, ReplicaFault};
use ashlar_pmem::{Arena, ArenaError, ArenaOptions};
use ashlar_store::{DumpComparison, DumpError, Store, StoreError, compare_dumps};
use ashlar_types::{InodeId, JournalPosition};

use crate::error::ReplicaError;
use crate::journal_file::{identity_of, open_copy_memory, ring_bytes};

/// Bytes of frames that are sent at a time.
const PART_BYTES: usize = 1 << 20;
/// A shadow's arena is larger than its model by this part and so many bytes: it places blocks differently, and frees
/// them later.
const SPARE_PART: u64 = 4;
const SPARE_BYTES: u64 = 32 << 20;
/// So many differences are listed, and the others counted.
const DIFFERENCES_MAX: usize = 100;

/// A replica in an arena of its own.
pub struct Shadow {
    path: PathBuf,
    arena: Arc<Arena>,
    replica: Replica,
    sender: CopySender,
}

impl Shadow {
    /// Opens the shadow in a directory, or makes it, and connects it.
    ///
    /// # Errors
    /// [`ReplicaError::Shadow`]; those of the arena and the store.
    pub fn open(path: &Path, main: &Arena, state: &mut NodeCore) -> Result<Self, ReplicaError> {
        let NodeCore { store, journal, .. } = state;
        let journal = journal.as_mut().ok_or(ReplicaError::Journal(ReplayError::OtherCopy))?;
        let failed = |problem: String| ReplicaError::Shadow { path: path.to_owned(), problem };
        let arena = Arc::new(match Arena::open_when_free(path, &|| true) {
            Err(ArenaError::NotAnArena) => make_arena(path, main)?,
            opened => opened?,
        });
        let root = store.inode(InodeId::ROOT)?.ok_or(failed("there is no root directory".into()))?;
        // It leaves one that is there as it is.
        Store::format(&arena, root.changed)?;
        let identity = identity_of(main);
        let memory = open_copy_memory(&arena, identity, ring_bytes(main))?;
        let open = || -> Result<_, ReplayError> {
            let mut replica = Replica::open(Store::open(Arc::clone(&arena))?, memory, identity)?;
            let (plan, sender) = CopySender::begin(journal, &replica.copy_state())?;
            replica.follow(plan)?;
            Ok((replica, sender))
        };
        let (replica, sender) = open().map_err(|error| failed(error.to_string()))?;
        let shadow = Self { path: path.to_owned(), arena, replica, sender };
        let is_new = shadow.is_level(journal) && journal.mark().position == JournalPosition(0);
        if is_new && !shadow.compare(store)?.is_equal() {
            return Err(failed("a shadow begins with an empty file system, and this one has files".into()));
        }
        Ok(shadow)
    }

    /// Plants a fault, which a comparison must find.
    pub fn plant(&mut self, fault: ReplicaFault) {
        self.replica.plant(fault);
    }

    /// Takes what is new in the journal, makes it durable and acknowledges it; returns whether there was anything.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn take_frames(&mut self, journal: &mut NodeJournal) -> Result<bool, StoreError> {
        let part = self.sender.next_part(journal, PART_BYTES).map_err(|error| self.failure(&error))?;
        let Some(part) = part else { return Ok(false) };
        if self.replica.room() < part.bytes.len() as u64 {
            // The replica applies, and so commits, only what is durable on both sides.
            self.replica.handle_durable(journal.flush()?);
            self.apply_frames()?;
        }
        self.replica.take_frames(&part).map_err(|error| self.failure(&error))?;
        self.replica.flush().map_err(|error| self.failure(&error))?;
        journal.handle_ack(self.replica.durable());
        Ok(true)
    }

    /// Applies what is durable on both sides, and commits it.
    ///
    /// # Errors
    /// Those of the journal and the store.
    pub fn apply_frames(&mut self) -> Result<(), StoreError> {
        self.replica.apply_frames(usize::MAX).map_err(|error| self.failure(&error))?;
        while let Some(job) = self.replica.begin_commit() {
            self.replica.finish_commit(job.run())?;
        }
        Ok(())
    }

    /// Takes and applies all that the journal has and that is durable.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn catch_up(&mut self, state: &mut NodeCore) -> Result<(), StoreError> {
        let Some(journal) = &mut state.journal else { return Ok(()) };
        while self.take_frames(journal)? {
            self.apply_frames()?;
        }
        Ok(())
    }

    /// Compares its tree with another one.
    ///
    /// # Errors
    /// Those of the stores.
    pub fn compare(&self, store: &Store) -> Result<DumpComparison, StoreError> {
        let (one, two) = (store.dump_lines()?, self.replica.store().dump_lines()?);
        compare_dumps(one, two, DIFFERENCES_MAX).map_err(|error| match error {
            DumpError::Store(error) => error,
            error => self.failure(&error),
        })
    }

    /// Returns its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether it has applied all of the journal.
    pub fn is_level(&self, journal: &NodeJournal) -> bool {
        self.replica.mark() == journal.mark()
    }

    /// Makes its arena as much larger as its model has become.
    ///
    /// # Errors
    /// Those of the arena and the store.
    pub fn grow(&mut self, main: &Arena) -> Result<(), StoreError> {
        let wanted = size_beside(main);
        if wanted <= self.arena.summary().size_bytes {
            return Ok(());
        }
        let resized = self.arena.resize(wanted).map_err(|error| self.failure(&error))?;
        resized.added.into_iter().try_for_each(|segment| self.replica.add_segment(segment))
    }

    fn failure(&self, error: &dyn std::error::Error) -> StoreError {
        let text = format!("{}: {error}", self.path.display());
        StoreError::Io { what: "the shadow failed", source: std::io::Error::other(text) }
    }
}

/// Returns the bytes of the shadow of an arena.
fn size_beside(main: &Arena) -> u64 {
    let bytes = main.summary().size_bytes;
    (bytes + bytes / SPARE_PART + SPARE_BYTES) / 4096 * 4096
}

fn make_arena(path: &Path, main: &Arena) -> Result<Arena, ReplicaError> {
    let summary = main.summary();
    let options = ArenaOptions {
        emulate_pmem: summary.emulated,
        node: summary.node,
        file_system: Some(summary.file_system),
        ..ArenaOptions::new(size_beside(main))
    };
    Ok(Arena::create(path, &options)?)
}
