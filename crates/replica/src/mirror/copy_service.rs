//! A replica without a whole store: it takes a copy of the whole file system from its writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ashlar_cluster::chain::{ChainTiming, CopyTarget, CopyView, LinkProblem, PeerMessage};
use ashlar_cluster::{ClusterDocument, HardState};
use ashlar_fabric::{Event, Fabric};
use ashlar_journal::{JournalCursor, Lineage};
use ashlar_pmem::Arena;
use ashlar_store::{CopyEnd, StoreImport};
use ashlar_types::{Epoch, FileSystemId, JournalPosition};
use parking_lot::Mutex;

use crate::error::ReplicaError;
use crate::full_copy::{CopyOrigin, begin_full_copy, finish_full_copy};
use crate::mirror::cluster_files::ClusterFiles;
use crate::mirror::writer_link::{CopyAct, LinkNews, WriterLink};

/// Bytes of parts after which the import is committed.
const COMMIT_BYTES: u64 = 16 << 20;
/// How long a replica that can't store a part waits before it begins anew.
const FAILURE_PAUSE: Duration = Duration::from_secs(10);

/// The state of a replica that is being filled, for people.
#[derive(Clone, Debug)]
pub struct CopyStatus {
    /// Parts are taken.
    pub is_copying: bool,
    /// Bytes of parts so far.
    pub bytes: u64,
    /// Its hard state.
    pub state: HardState,
    /// Why the link went down last.
    pub last_problem: Option<LinkProblem>,
}

/// A replica that is being filled.
pub struct CopyService {
    fabric: Arc<dyn Fabric>,
    arena: Arc<Arena>,
    file_system: FileSystemId,
    link: Mutex<WriterLink>,
    bytes: AtomicU64,
    is_ending: AtomicBool,
}

/// The copy as far as it is.
#[derive(Default)]
struct PartialCopy {
    import: Option<StoreImport>,
    /// Bytes since the last commit.
    uncommitted: u64,
    is_whole: bool,
}

impl CopyService {
    /// Returns the service of a replica, which connects when it runs.
    #[must_use]
    pub fn new(
        fabric: Arc<dyn Fabric>,
        files: ClusterFiles,
        document: &ClusterDocument,
        state: HardState,
        arena: Arc<Arena>,
        timing: ChainTiming,
        now: Duration,
    ) -> Self {
        let link = WriterLink::new(Arc::clone(&fabric), files, document, state, timing, now);
        Self {
            fabric,
            arena,
            file_system: document.cluster,
            link: Mutex::new(link),
            bytes: AtomicU64::new(0),
            is_ending: AtomicBool::new(false),
        }
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.fabric.wake();
    }

    /// Returns its state.
    #[must_use]
    pub fn status(&self) -> CopyStatus {
        let link = self.link.lock();
        CopyStatus {
            is_copying: link.follower.is_copying(),
            bytes: self.bytes.load(Ordering::Relaxed),
            state: link.follower.hard_state(),
            last_problem: link.last_problem.clone(),
        }
    }

    /// Runs the thread. Returns whether the store is whole; otherwise [`Self::end`] has ended it.
    ///
    /// # Errors
    /// None at present: a part that can't be stored makes it begin anew.
    pub fn run(&self, now: &dyn Fn() -> Duration) -> Result<bool, ReplicaError> {
        let (mut events, mut copy) = (Vec::new(), PartialCopy::default());
        while !self.is_ending.load(Ordering::Acquire) && !copy.is_whole {
            let wait = self.link.lock().prepare_wait(now());
            self.fabric.poll(Some(wait), &mut events);
            for event in events.drain(..) {
                self.handle_event(&mut copy, now, event);
            }
            let mut link = self.link.lock();
            link.follower.handle_time(now());
            self.perform(&mut link, &mut copy, now);
        }
        self.link.lock().close();
        Ok(copy.is_whole)
    }

    fn handle_event(&self, copy: &mut PartialCopy, now: &dyn Fn() -> Duration, event: Event) {
        let news = self.link.lock().handle_event(now(), event);
        let done = match news {
            Some(LinkNews::Up) => {
                let end = JournalPosition(0);
                let lineage = Lineage::new(Epoch::default(), end);
                let view =
                    CopyView { lineage: &lineage, end, applied: end, committed: end, is_whole: false, room: None };
                self.link.lock().follower.handle_up(now(), &view);
                Ok(())
            }
            Some(LinkNews::Message(bytes)) => self.handle_message(copy, now, &bytes),
            None => Ok(()),
        };
        let mut link = self.link.lock();
        if let Err(error) = done {
            copy.import = None;
            link.lose_for(now(), FAILURE_PAUSE, format!("the copy can't go on, and begins anew: {error}"));
        }
        self.perform(&mut link, copy, now);
    }

    /// Takes a message. Parts are stored without the link's lock, so that the state can be shown meanwhile.
    fn handle_message(
        &self,
        copy: &mut PartialCopy,
        now: &dyn Fn() -> Duration,
        bytes: &[u8],
    ) -> Result<(), ReplicaError> {
        let is_copying = self.link.lock().follower.is_copying();
        match PeerMessage::decode(bytes) {
            Ok(PeerMessage::CopyPart { bytes }) if is_copying => {
                self.take_part(copy, bytes)?;
                self.link.lock().follower.handle_part_taken(now());
            }
            Ok(PeerMessage::CopyEnd { target, bytes }) if is_copying => self.finish(copy, target, bytes)?,
            Ok(message) => self.link.lock().follower.handle_message(now(), &message),
            Err(error) => self.link.lock().lose(now(), error.to_string().into()),
        }
        Ok(())
    }

    fn take_part(&self, copy: &mut PartialCopy, part: &[u8]) -> Result<(), ReplicaError> {
        let Some(import) = &mut copy.import else { return Ok(()) };
        import.import_part(part)?;
        copy.uncommitted += part.len() as u64;
        if copy.uncommitted >= COMMIT_BYTES {
            import.commit()?;
            copy.uncommitted = 0;
        }
        self.bytes.fetch_add(part.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn finish(&self, copy: &mut PartialCopy, target: CopyTarget, bytes: &[u8]) -> Result<(), ReplicaError> {
        let Some(import) = copy.import.take() else { return Ok(()) };
        let end = CopyEnd::decode(bytes)?;
        let CopyTarget { position, seed, lineage } = target;
        let origin = CopyOrigin { begin: JournalCursor { position, seed }, lineage };
        finish_full_copy(&self.arena, self.file_system, import, &end, origin)?;
        let bytes = self.bytes.load(Ordering::Relaxed);
        tracing::info!(position = position.0, bytes, "the copy of the whole file system is made");
        copy.is_whole = true;
        Ok(())
    }

    /// Performs what the follower asks for.
    fn perform(&self, link: &mut WriterLink, copy: &mut PartialCopy, now: &dyn Fn() -> Duration) {
        while let Some(act) = link.poll_act(now) {
            match act {
                CopyAct::EmptyStore => {
                    // Its memory is given back first.
                    *copy = PartialCopy::default();
                    self.bytes.store(0, Ordering::Relaxed);
                    match begin_full_copy(&self.arena) {
                        Ok(import) => {
                            copy.import = Some(import);
                            link.follower.handle_emptied(now());
                        }
                        Err(error) => link.lose_for(now(), FAILURE_PAUSE, error.to_string()),
                    }
                }
                CopyAct::Cut(_) => {
                    link.lose(now(), "it takes an empty store for a whole one".into());
                }
            }
        }
    }
}
