//! The replica's two threads: one takes frames and makes them durable, the other applies them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_cluster::chain::{ChainTiming, CopyRoom, CopyView, LinkProblem, PeerMessage};
use ashlar_cluster::{ClusterDocument, HardState};
use ashlar_fabric::{Event, Fabric};
use ashlar_node::journal::{JournalCopy, ReplayError, Replica, ReplicaStore};
use ashlar_pmem::SegmentInfo;
use ashlar_store::StoreError;
use ashlar_types::{Epoch, JournalPosition};
use parking_lot::{Condvar, Mutex};

use crate::error::ReplicaError;
use crate::mirror::cluster_files::ClusterFiles;
use crate::mirror::writer_link::{CopyAct, LinkNews, WriterLink};

/// How old the oldest uncommitted frame may become, and how many bytes of metadata may wait.
const COMMIT_AGE: Duration = Duration::from_millis(500);
const UNCOMMITTED_BYTES: usize = 32 << 20;
/// How long frames wait for room in the copy before the link is closed.
const ROOM_PATIENCE: Duration = Duration::from_millis(400);

/// The state of a replica, for people.
#[derive(Clone, Debug)]
pub struct ReplicaStatus {
    /// It takes frames of its writer.
    pub is_following: bool,
    /// The copy's end, and how far it is durable, applied and committed.
    pub end: JournalPosition,
    /// Durable.
    pub durable: JournalPosition,
    /// Applied.
    pub applied: JournalPosition,
    /// Committed.
    pub committed: JournalPosition,
    /// Its hard state.
    pub state: HardState,
    /// Why the link went down last.
    pub last_problem: Option<LinkProblem>,
    /// Another node has taken over from its writer, in this epoch.
    pub superseded: Option<Epoch>,
}

/// A replica that follows its writer.
pub struct ReplicaService {
    fabric: Arc<dyn Fabric>,
    link: Mutex<WriterLink>,
    copy: Mutex<JournalCopy>,
    store: Mutex<ReplicaStore>,
    /// How far the store is committed.
    committed: AtomicU64,
    /// Signals frames that may be applied, and room in the copy.
    changed: Condvar,
    is_ending: AtomicBool,
    /// The whole file system must be copied.
    needs_copy: AtomicBool,
    failure: Mutex<Option<ReplicaError>>,
}

impl ReplicaService {
    /// Returns the service of a replica, which connects when it runs.
    #[must_use]
    pub fn new(
        fabric: Arc<dyn Fabric>,
        files: ClusterFiles,
        document: &ClusterDocument,
        state: HardState,
        replica: Replica,
        timing: ChainTiming,
        now: Duration,
    ) -> Self {
        let (copy, store) = replica.into_parts();
        let link = WriterLink::new(Arc::clone(&fabric), files, document, state, timing, now);
        Self {
            fabric,
            link: Mutex::new(link),
            copy: Mutex::new(copy),
            committed: AtomicU64::new(store.committed().0),
            store: Mutex::new(store),
            changed: Condvar::new(),
            is_ending: AtomicBool::new(false),
            needs_copy: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// Ends both threads.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.fabric.wake();
        let _copy = self.copy.lock();
        self.changed.notify_all();
    }

    /// Returns whether the writer was heard of within this time.
    ///
    /// One that refuses this node for its `min_replicas` closes each link, and is heard of about once a second.
    #[must_use]
    pub fn has_heard(&self, within: Duration, now: Duration) -> bool {
        let link = self.link.lock();
        let is_refused = matches!(link.last_problem, Some(LinkProblem::MinReplicas { .. }));
        let within = if is_refused { 3 * within } else { within };
        (link.is_up() || is_refused) && now < link.follower.heard_at() + within
    }

    /// Returns its state.
    #[must_use]
    pub fn status(&self) -> ReplicaStatus {
        let (applied, committed) = {
            let store = self.store.lock();
            (store.mark().position, store.committed())
        };
        let (end, durable) = {
            let copy = self.copy.lock();
            (copy.end(), copy.durable())
        };
        let link = self.link.lock();
        ReplicaStatus {
            is_following: link.follower.is_following(),
            end,
            durable,
            applied,
            committed,
            state: link.follower.hard_state(),
            last_problem: link.last_problem.clone(),
            superseded: link.follower.superseded(),
        }
    }

    /// Takes into use segments that were added to its arena, and tells the writer by connecting anew.
    ///
    /// # Errors
    /// Those of the store.
    pub fn add_segments(&self, segments: Vec<SegmentInfo>, now: Duration) -> Result<(), StoreError> {
        if segments.is_empty() {
            return Ok(());
        }
        let mut store = self.store.lock();
        segments.into_iter().try_for_each(|segment| store.add_segment(segment))?;
        drop(store);
        self.link.lock().lose(now, "the arena has grown".into());
        self.fabric.wake();
        Ok(())
    }

    /// Returns whether it has ended because the whole file system must be copied.
    #[must_use]
    pub fn needs_copy(&self) -> bool {
        self.needs_copy.load(Ordering::Acquire)
    }

    /// Runs the thread that takes frames, until [`Self::end`], an error, or until the file system must be copied.
    ///
    /// # Errors
    /// Those of the copy: the replica must be opened again.
    pub fn run_link(&self, now: &dyn Fn() -> Duration) -> Result<(), ReplicaError> {
        let mut events = Vec::new();
        while !self.is_ending.load(Ordering::Acquire) {
            let wait = self.link.lock().prepare_wait(now());
            self.fabric.poll(Some(wait), &mut events);
            let mut link = self.link.lock();
            for event in events.drain(..) {
                self.handle_event(&mut link, now, event)?;
                self.perform(&mut link, now)?;
            }
            link.follower.handle_committed(JournalPosition(self.committed.load(Ordering::Acquire)));
            link.follower.handle_time(now());
            self.perform(&mut link, now)?;
            drop(link);
            // Not before the acknowledgement is sent: the writer waits for that, and not for the tree here.
            self.changed.notify_all();
        }
        self.link.lock().close();
        self.failure.lock().take().map_or(Ok(()), Err)
    }

    /// Runs the thread that applies frames, until [`Self::end`] or an error.
    pub fn run_applier(&self) {
        if let Err(error) = self.apply_frames() {
            self.failure.lock().get_or_insert(error);
            self.end();
        }
    }

    fn handle_event(
        &self,
        link: &mut WriterLink,
        now: &dyn Fn() -> Duration,
        event: Event,
    ) -> Result<(), ReplicaError> {
        let bytes = match link.handle_event(now(), event) {
            Some(LinkNews::Message(bytes)) => bytes,
            Some(LinkNews::Up) => {
                let (applied, space) = {
                    let store = self.store.lock();
                    (store.cursor().position, store.store().space())
                };
                let room = CopyRoom { blocks: space.blocks_total, metadata_bytes: space.metadata_bytes_total };
                let state = self.copy.lock().state();
                let committed = JournalPosition(self.committed.load(Ordering::Acquire));
                let (lineage, end, room) = (&state.lineage, state.end, Some(room));
                let copy = CopyView { lineage, end, applied, committed, is_whole: true, room };
                link.follower.handle_up(now(), &copy);
                return Ok(());
            }
            None => return Ok(()),
        };
        match PeerMessage::decode(&bytes) {
            Ok(PeerMessage::Frames { durable, bytes }) if link.follower.is_following() => {
                self.take_frames(link, now, bytes, durable)?;
            }
            Ok(message) => link.follower.handle_message(now(), &message),
            Err(error) => link.lose(now(), error.to_string().into()),
        }
        Ok(())
    }

    /// Stores frames, makes them durable, and acknowledges that.
    fn take_frames(
        &self,
        link: &mut WriterLink,
        now: &dyn Fn() -> Duration,
        bytes: &[u8],
        durable: JournalPosition,
    ) -> Result<(), ReplicaError> {
        link.follower.handle_message(now(), &PeerMessage::Frames { durable, bytes: &[] });
        let mut copy = self.copy.lock();
        copy.handle_durable(durable);
        let until = Instant::now() + ROOM_PATIENCE;
        while copy.room() < bytes.len() as u64 {
            self.changed.notify_all();
            if self.changed.wait_until(&mut copy, until).timed_out() {
                drop(copy);
                link.lose(now(), "the copy of the journal is full: frames are applied too slowly".into());
                return Ok(());
            }
        }
        match copy.take_frames(bytes) {
            Ok(()) => {}
            Err(ReplayError::Copy(error)) => {
                drop(copy);
                link.lose(now(), error.to_string().into());
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        copy.flush()?;
        let reached = copy.durable();
        drop(copy);
        let committed = JournalPosition(self.committed.load(Ordering::Acquire));
        link.follower.handle_durable(now(), reached, committed);
        Ok(())
    }

    /// Performs what the follower asks for.
    fn perform(&self, link: &mut WriterLink, now: &dyn Fn() -> Duration) -> Result<(), ReplicaError> {
        while let Some(act) = link.poll_act(now) {
            match act {
                CopyAct::Cut(plan) => {
                    let applied = self.store.lock().cursor().position;
                    let mut copy = self.copy.lock();
                    copy.follow(plan, applied)?;
                    // The rest of a message that had bad frames was stored and not made durable.
                    copy.flush()?;
                    let end = copy.durable();
                    drop(copy);
                    link.follower.handle_cut(end);
                }
                CopyAct::EmptyStore => {
                    // The store is in use here. It is emptied by the service that fills it.
                    self.needs_copy.store(true, Ordering::Release);
                    self.end();
                }
            }
        }
        Ok(())
    }

    fn apply_frames(&self) -> Result<(), ReplicaError> {
        let (mut buffer, mut oldest) = (Vec::new(), None::<Instant>);
        loop {
            let mut store = self.store.lock();
            let mut copy = self.copy.lock();
            let frame = copy.read_frame(store.cursor(), &mut buffer)?;
            if let Some(frame) = frame {
                drop(copy);
                let is_first = match store.apply_frame(&frame) {
                    Err(ReplayError::CommitFirst) => true,
                    applied => applied.map(|()| false)?,
                };
                oldest.get_or_insert_with(Instant::now);
                let is_due = is_first
                    || oldest.is_some_and(|oldest| oldest.elapsed() >= COMMIT_AGE)
                    || store.store().uncommitted_bytes() > UNCOMMITTED_BYTES;
                if is_due {
                    self.commit(&mut store)?;
                    oldest = None;
                }
                continue;
            }
            let is_ending = self.is_ending.load(Ordering::Acquire);
            let is_full = copy.room() < ashlar_cluster::chain::FRAMES_BYTES_MAX as u64;
            if oldest.is_some_and(|oldest| is_ending || is_full || oldest.elapsed() >= COMMIT_AGE) {
                drop(copy);
                self.commit(&mut store)?;
                oldest = None;
                continue;
            }
            if is_ending {
                return Ok(());
            }
            drop(store);
            match oldest {
                Some(oldest) => _ = self.changed.wait_until(&mut copy, oldest + COMMIT_AGE),
                None => self.changed.wait(&mut copy),
            }
        }
    }

    fn commit(&self, store: &mut ReplicaStore) -> Result<(), ReplicaError> {
        while let Some(job) = store.begin_commit() {
            let committed = store.finish_commit(job.run())?;
            self.committed.store(committed.0, Ordering::Release);
            self.copy.lock().reuse(committed)?;
            self.changed.notify_all();
        }
        Ok(())
    }
}
