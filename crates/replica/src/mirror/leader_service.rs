//! The writer's thread: it carries the journal to the replica.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ashlar_cluster::chain::{
    ChainTiming, CopyRoom, JournalView, Leader, LeaderEffect, LinkProblem, PEER_VERSIONS, PeerMessage, ReplicaProgress,
};
use ashlar_cluster::{
    AuthorityEffect, ClusterDocument, CopiesNeeded, HardState, MemberRole, Standing, WriterAuthority,
};
use ashlar_fabric::{CloseReason, Event, Fabric, LinkId};
use ashlar_journal::FlushJob;
use ashlar_node::NodeCore;
use ashlar_node::journal::{CopyPart, CopySender, NodeJournal};
use ashlar_pmem::SharedMemory;
use ashlar_store::{CopyProgress, RoomLimit, StoreError};
use ashlar_types::{JournalPosition, NodeNumber};
use parking_lot::Mutex;

use crate::mirror::cluster_files::ClusterFiles;
use crate::mirror::copy_sender::FullCopySender;
use crate::mirror::link_log::LinkLog;

/// How long the thread waits for events if nothing else is due.
const IDLE: Duration = Duration::from_secs(1);

/// How often a successor tells replaced members that they were.
const TELL: Duration = Duration::from_secs(2);

/// Parts of the whole file system that are sent before the thread looks after other things.
const PARTS_AT_A_TIME: u32 = 4;

/// How long a step waits for events where the node's only thread drives the link.
const DRIVE_PAUSE: Duration = Duration::from_millis(50);

/// The writing node, as the thread needs it.
pub trait WriterNode {
    /// Runs something with the node locked. Its effects are performed afterwards.
    fn with_node(&self, work: &mut dyn FnMut(&mut NodeCore));

    /// Returns the time since boot.
    fn now(&self) -> Duration;

    /// Takes the news that the node may serve, or may not any more.
    fn handle_standing(&self, standing: Standing);

    /// Takes the news that the journal may be in all copies up to a later position. The node is not locked.
    fn handle_replicated(&self);

    /// Takes the news that the journal can't be read or made durable: SharedFS must end.
    fn handle_failure(&self, error: StoreError);
}

/// How a writer leads.
#[derive(Clone, Copy, Debug)]
pub struct LeaderOptions {
    /// The times of the link.
    pub timing: ChainTiming,
    /// How long the replica may be away before the writer goes on alone, with `min_replicas = 1`.
    pub alone_after: Duration,
}

impl Default for LeaderOptions {
    fn default() -> Self {
        Self { timing: ChainTiming::default(), alone_after: Duration::from_millis(500) }
    }
}

/// The state of replication, for people.
#[derive(Clone, Debug)]
pub struct LeaderStatus {
    /// Whether the writer serves.
    pub standing: Standing,
    /// How many copies an acknowledgement needs.
    pub copies: CopiesNeeded,
    /// The replica is in sync.
    pub is_whole: bool,
    /// How far the replica is; `None` while its link is down.
    pub progress: Option<ReplicaProgress>,
    /// Why the link went down last.
    pub last_problem: Option<LinkProblem>,
    /// How far the copy of the whole file system is, while one is being sent.
    pub full_copy: Option<CopyProgress>,
}

/// Carries the journal to the replica.
pub struct LeaderService {
    fabric: Arc<dyn Fabric>,
    files: ClusterFiles,
    replica: Option<NodeNumber>,
    /// Members that this node or a former one has replaced, and whether the replica has the address of theirs. One that
    /// is back may not know it.
    replaced: Vec<(NodeNumber, bool)>,
    chain: Mutex<Chain>,
    is_ending: AtomicBool,
    is_abandoned: AtomicBool,
    is_forced: AtomicBool,
    is_left: AtomicBool,
}

/// A node that its only thread lends, at a start or an end.
struct LentNode<'a> {
    core: RefCell<&'a mut NodeCore>,
    now: &'a dyn Fn() -> Duration,
    failure: RefCell<Option<StoreError>>,
}

impl<'a> LentNode<'a> {
    fn new(core: &'a mut NodeCore, now: &'a dyn Fn() -> Duration) -> Self {
        Self { core: RefCell::new(core), now, failure: RefCell::new(None) }
    }
}

impl WriterNode for LentNode<'_> {
    fn with_node(&self, work: &mut dyn FnMut(&mut NodeCore)) {
        work(&mut self.core.borrow_mut());
    }

    fn now(&self) -> Duration {
        (self.now)()
    }

    fn handle_standing(&self, _: Standing) {}

    fn handle_replicated(&self) {}

    fn handle_failure(&self, error: StoreError) {
        *self.failure.borrow_mut() = Some(error);
    }
}

struct Chain {
    leader: Leader,
    link: Option<LinkId>,
    sender: Option<CopySender>,
    /// A copy of the whole file system is being sent.
    full_copy: Option<FullCopySender>,
    last_problem: Option<LinkProblem>,
    log: LinkLog,
    has_stopped: bool,
    tell_at: Duration,
}

impl LeaderService {
    /// Returns the service of a writer. The fabric listens already.
    #[must_use]
    pub fn new(
        fabric: Arc<dyn Fabric>,
        files: ClusterFiles,
        document: &ClusterDocument,
        state: HardState,
        options: LeaderOptions,
        now: Duration,
        end: JournalPosition,
    ) -> Self {
        let authority = WriterAuthority::new(document, state, options.alone_after, now, end);
        let leader = Leader::new(authority, document.epoch, options.timing, now);
        let chain = Chain {
            leader,
            link: None,
            sender: None,
            full_copy: None,
            last_problem: None,
            log: LinkLog::default(),
            has_stopped: false,
            tell_at: now,
        };
        let replica_address = document.replica().map(|member| &member.address);
        let replaced = document.members.iter().filter(|member| member.role == MemberRole::Replaced);
        // A new member may listen where a replaced one did.
        let replaced = replaced.map(|member| (member.node, Some(&member.address) == replica_address));
        Self {
            fabric,
            files,
            replica: document.replica().map(|member| member.node),
            replaced: replaced.collect(),
            chain: Mutex::new(chain),
            is_ending: AtomicBool::new(false),
            is_abandoned: AtomicBool::new(false),
            is_forced: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
        }
    }

    /// Tells the thread that the journal has grown, or that something is to be made durable.
    pub fn wake(&self) {
        self.fabric.wake();
    }

    /// Ends the thread; the replica learns that the writer has stopped in order.
    pub fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.fabric.wake();
    }

    /// Ends the thread at once, as a crash does: SharedFS has failed.
    pub fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Release);
        self.fabric.wake();
    }

    /// Returns the state of replication.
    #[must_use]
    pub fn status(&self) -> LeaderStatus {
        let chain = self.chain.lock();
        let authority = chain.leader.authority();
        LeaderStatus {
            standing: authority.standing(),
            copies: authority.copies_needed(),
            is_whole: authority.is_whole(),
            progress: chain.leader.progress(),
            last_problem: chain.last_problem.clone(),
            full_copy: match &chain.full_copy {
                Some(sender) => Some(sender.progress()),
                // The replica empties its store, or makes its copy whole.
                None => chain.leader.is_copying().then(CopyProgress::default),
            },
        }
    }

    /// Takes an administrator's order to go on without the replica.
    ///
    /// # Errors
    /// A sentence for people: the replica is connected, so the order is none.
    pub fn order_alone(&self) -> Result<(), String> {
        if self.chain.lock().link.is_some() {
            return Err("the replica is connected, so there is nothing to order; stop it first if it is to go".into());
        }
        self.is_forced.store(true, Ordering::Release);
        self.fabric.wake();
        Ok(())
    }

    /// Ends the thread, and leaves the link as it is: [`Self::drive_until`] and [`Self::say_goodbye`] follow.
    pub fn leave(&self) {
        self.is_left.store(true, Ordering::Release);
        self.fabric.wake();
    }

    /// Carries the journal, without the thread, until the replica has made it durable up to a position.
    ///
    /// # Errors
    /// [`StoreError::CommitUnderWay`] if that takes longer than `patience`; those of the journal.
    pub fn drive_until(
        &self,
        core: &mut NodeCore,
        upto: JournalPosition,
        now: &dyn Fn() -> Duration,
        patience: Duration,
    ) -> Result<(), StoreError> {
        let until = now() + patience;
        let node = LentNode::new(core, now);
        while !with_journal(&node, |journal| journal.is_acknowledged(upto)).unwrap_or(true) {
            if now() >= until {
                return Err(StoreError::CommitUnderWay);
            }
            self.step(&node, DRIVE_PAUSE);
            if let Some(error) = node.failure.borrow_mut().take() {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Carries the journal, without the thread, until the writer may serve, or `is_over` says that it never will.
    pub fn drive_until_serving(&self, core: &mut NodeCore, now: &dyn Fn() -> Duration, is_over: &dyn Fn() -> bool) {
        let node = LentNode::new(core, now);
        loop {
            match self.status().standing {
                Standing::Waiting(_) if !is_over() => _ = self.step(&node, DRIVE_PAUSE),
                _ => return,
            }
        }
    }

    /// Tells the replica that the writer stops in order, without the thread.
    pub fn say_goodbye(&self, core: &mut NodeCore, now: &dyn Fn() -> Duration) {
        let node = LentNode::new(core, now);
        self.is_left.store(false, Ordering::Release);
        self.is_ending.store(true, Ordering::Release);
        while self.step(&node, DRIVE_PAUSE) {}
    }

    /// Sends frames from the calling thread, for which the journal has just grown: that saves waking the other one.
    pub fn send_now(&self, node: &dyn WriterNode) {
        match self.chain.try_lock() {
            Some(mut chain) => self.send_frames(node, &mut chain),
            // The thread may have looked at the journal before it grew.
            None => self.fabric.wake(),
        }
    }

    /// Runs the thread, until [`Self::end`] or [`Self::abandon`].
    pub fn run(&self, node: &dyn WriterNode) {
        loop {
            if self.is_left.load(Ordering::Acquire) || !self.step(node, IDLE) {
                return;
            }
        }
    }

    /// Does what is due, and waits for events, for at most so long; returns whether the thread goes on.
    ///
    /// A start calls it while it waits for the replica, before other threads have the node.
    pub fn step(&self, node: &dyn WriterNode, wait_max: Duration) -> bool {
        let mut guard = self.chain.lock();
        let chain = &mut *guard;
        if self.is_forced.swap(false, Ordering::AcqRel) {
            chain.leader.authority_mut().handle_force(end_of(node));
        }
        self.perform(node, chain);
        self.send_frames(node, chain);
        let is_copying = self.send_parts(node, chain);
        if self.has_ended(node, chain) {
            chain.link.take().into_iter().for_each(|link| self.fabric.close(link));
            return false;
        }
        let tell_at = self.tell_replaced(chain, node.now());
        let next = [chain.leader.deadline(), tell_at].into_iter().flatten().min();
        let wait = next.map_or(wait_max, |next| next.saturating_sub(node.now()));
        let wait = if is_copying { Duration::ZERO } else { wait };
        drop(guard);
        let mut events = Vec::new();
        self.fabric.poll(Some(wait.min(wait_max)), &mut events);
        let mut guard = self.chain.lock();
        let chain = &mut *guard;
        for event in events {
            self.handle_event(node, chain, event);
            self.perform(node, chain);
        }
        let now = node.now();
        with_journal(node, |journal| chain.leader.handle_time(now, &view_of(journal)));
        drop(guard);
        // Requests that have waited for too long end too.
        node.handle_replicated();
        true
    }

    /// Connects to replaced members, which learn this node's epoch by that. Returns when that is due again.
    fn tell_replaced(&self, chain: &mut Chain, now: Duration) -> Option<Duration> {
        if self.replaced.is_empty() {
            return None;
        }
        if now >= chain.tell_at {
            chain.tell_at = now + TELL;
            // One that is away gives an event that says so, which changes nothing.
            let is_linked = chain.link.is_some();
            let away = self.replaced.iter().filter(|(_, is_replicas)| !(is_linked && *is_replicas));
            away.for_each(|(node, _)| _ = self.fabric.connect(*node));
        }
        Some(chain.tell_at)
    }

    /// Returns whether the thread is to end: the replica has learned that the writer stops in order, or need not.
    fn has_ended(&self, node: &dyn WriterNode, chain: &mut Chain) -> bool {
        if self.is_abandoned.load(Ordering::Acquire) {
            return true;
        }
        if !self.is_ending.load(Ordering::Acquire) {
            return false;
        }
        if !std::mem::replace(&mut chain.has_stopped, true) {
            let now = node.now();
            with_journal(node, |journal| chain.leader.handle_stop(now, &view_of(journal)));
            self.perform(node, chain);
        }
        chain.leader.has_said_goodbye()
    }

    fn handle_event(&self, node: &dyn WriterNode, chain: &mut Chain, event: Event) {
        match event {
            Event::Up { link, peer, .. }
                if Some(peer.node) == self.replica && peer.version == PEER_VERSIONS.current =>
            {
                if let Some(older) = chain.link.replace(link) {
                    self.fabric.close(older);
                }
                (chain.sender, chain.full_copy) = (None, None);
                chain.log.handle_up();
                chain.leader.handle_up(node.now(), peer.epoch);
            }
            Event::Up { link, peer, .. } => {
                // A successor says so by its epoch; another member has nothing to say.
                chain.leader.authority_mut().handle_epoch(peer.epoch);
                self.fabric.close(link);
            }
            Event::Message { link, bytes } if chain.link == Some(link) => match PeerMessage::decode(&bytes) {
                Ok(message) => {
                    let now = node.now();
                    let leader = &mut chain.leader;
                    with_journal(node, |journal| leader.handle_message(now, &view_of(journal), &message));
                }
                Err(error) => self.lose_link(node, chain, error.to_string().into()),
            },
            Event::Down { link, reason } if chain.link == Some(link) => {
                chain.link = None;
                self.note_down(node, chain, reason.to_string().into(), reason == CloseReason::ClosedByPeer);
            }
            Event::Refused { epoch: Some(epoch), .. } => chain.leader.authority_mut().handle_epoch(epoch),
            _ => {}
        }
    }

    /// Ends the link for a reason, if it is still up.
    fn lose_link(&self, node: &dyn WriterNode, chain: &mut Chain, problem: LinkProblem) {
        if let Some(link) = chain.link.take() {
            self.fabric.close(link);
        }
        self.note_down(node, chain, problem, false);
    }

    /// Takes the news that the link is down. `is_orderly` says that nothing has failed.
    fn note_down(&self, node: &dyn WriterNode, chain: &mut Chain, problem: LinkProblem, is_orderly: bool) {
        chain.log.write_down(&problem, is_orderly);
        chain.last_problem = Some(problem);
        (chain.sender, chain.full_copy) = (None, None);
        chain.leader.handle_down(node.now());
    }

    /// Sends a message, if the link is up.
    fn send(&self, node: &dyn WriterNode, chain: &mut Chain, message: &PeerMessage<'_>) {
        if let Some(link) = chain.link
            && let Err(error) = self.fabric.send(link, &[&message.encode_head(), message.tail()])
        {
            self.lose_link(node, chain, error.to_string().into());
        }
    }

    /// Performs what the leader asks for.
    fn perform(&self, node: &dyn WriterNode, chain: &mut Chain) {
        while let Some(effect) = chain.leader.poll_effect() {
            match effect {
                LeaderEffect::Send(message) => self.send(node, chain, &message),
                LeaderEffect::Close(reason) => self.lose_link(node, chain, reason),
                LeaderEffect::BeginFrames(from) => {
                    match with_journal(node, |journal| CopySender::from_position(journal, from)) {
                        Some(Ok(sender)) => chain.sender = Some(sender),
                        Some(Err(error)) => self.lose_link(node, chain, error.to_string().into()),
                        None => {}
                    }
                }
                LeaderEffect::Replicated(durable) => {
                    with_journal(node, |journal| journal.handle_ack(durable));
                    node.handle_replicated();
                }
                LeaderEffect::LimitRoom(CopyRoom { blocks, metadata_bytes }) => {
                    let limit = RoomLimit { blocks, metadata_bytes };
                    node.with_node(&mut |core| core.store.limit_room(limit));
                }
                LeaderEffect::BeginCopy => {
                    tracing::info!("the replica needs the whole file system, which is copied now");
                    let mut begun = None;
                    node.with_node(&mut |core| begun = Some(FullCopySender::begin(core)));
                    match begun {
                        Some(Ok(sender)) => chain.full_copy = Some(sender),
                        Some(Err(error)) => self.lose_link(node, chain, error.to_string().into()),
                        None => {}
                    }
                }
                LeaderEffect::Authority(effect) => self.perform_authority(node, chain, effect),
            }
        }
    }

    fn perform_authority(&self, node: &dyn WriterNode, chain: &mut Chain, effect: AuthorityEffect) {
        match effect {
            AuthorityEffect::WriteHardState(state) => match self.files.write_hard_state(&state) {
                Ok(()) => chain.leader.authority_mut().handle_written(),
                Err(error) => {
                    chain.log.write_state_failure(&error.to_string());
                    chain.leader.authority_mut().handle_write_failed(node.now());
                }
            },
            AuthorityEffect::NeedCopies(copies) => {
                tracing::info!(?copies, "acknowledgements need so many copies from now on");
                let durable = chain.leader.progress().map_or(JournalPosition(0), |progress| progress.durable);
                let needed = (copies == CopiesNeeded::Both).then_some(durable);
                with_journal(node, |journal| journal.set_replica(needed));
                node.handle_replicated();
            }
            AuthorityEffect::StandingChanged(standing) => node.handle_standing(standing),
            AuthorityEffect::DeclareInSync => self.send(node, chain, &PeerMessage::InSync { at: end_of(node) }),
        }
    }

    /// Sends some parts of the whole file system, if they are due. Returns whether more are due at once.
    fn send_parts(&self, node: &dyn WriterNode, chain: &mut Chain) -> bool {
        for _ in 0..PARTS_AT_A_TIME {
            let (Some(sender), Some(link), true) = (&mut chain.full_copy, chain.link, chain.leader.may_send_part())
            else {
                return false;
            };
            let next = match sender.next(&|work| node.with_node(work)) {
                Ok(next) => next,
                Err(error) => {
                    self.lose_link(node, chain, format!("the file system can't be copied: {error}").into());
                    return false;
                }
            };
            let (message, is_last) = next.message();
            if let Err(error) = self.fabric.send(link, &[&message.encode_head(), message.tail()]) {
                self.lose_link(node, chain, error.to_string().into());
                return false;
            }
            chain.leader.handle_part_sent(node.now());
            if is_last {
                chain.full_copy = None;
            }
        }
        chain.full_copy.is_some() && chain.leader.may_send_part()
    }

    /// Sends frames as far as the replica takes them, and makes the journal durable here meanwhile.
    fn send_frames(&self, node: &dyn WriterNode, chain: &mut Chain) {
        loop {
            let mut next: Option<Result<Option<CopyPart>, _>> = None;
            let mut flush: Option<(FlushJob, Arc<SharedMemory>)> = None;
            node.with_node(&mut |core| {
                let Some(journal) = &mut core.journal else { return };
                let wanted = chain.leader.frames_wanted(&view_of(journal));
                if let Some((wanted, sender)) = wanted.zip(chain.sender.as_mut()) {
                    next = Some(sender.next_part(journal, wanted.bytes_max));
                }
                flush = journal.begin_wanted_flush();
            });
            let mut is_done = true;
            match (next, chain.link) {
                (Some(Ok(Some(part))), Some(link)) => {
                    is_done = false;
                    let message = PeerMessage::Frames { durable: part.durable, bytes: &part.bytes };
                    match self.fabric.send(link, &[&message.encode_head(), message.tail()]) {
                        Ok(()) => chain.leader.handle_frames_sent(node.now(), part.end, part.durable),
                        Err(error) => self.lose_link(node, chain, error.to_string().into()),
                    }
                }
                (Some(Err(error)), _) => self.lose_link(node, chain, error.to_string().into()),
                _ => {}
            }
            if let Some((job, memory)) = flush {
                is_done = false;
                let mut result = Some(job.run(&*memory));
                let finished = with_journal(node, |journal| match result.take() {
                    Some(result) => {
                        let before = journal.replicated();
                        journal.finish_flush(&job, result).map(|()| journal.replicated() > before)
                    }
                    None => Ok(false),
                });
                match finished {
                    Some(Err(error)) => return node.handle_failure(error),
                    Some(Ok(true)) => node.handle_replicated(),
                    _ => {}
                }
            }
            if is_done {
                return;
            }
        }
    }
}

/// Runs something with the node's journal; `None` if it has none.
fn with_journal<R>(node: &dyn WriterNode, mut work: impl FnMut(&mut NodeJournal) -> R) -> Option<R> {
    let mut result = None;
    node.with_node(&mut |core| result = core.journal.as_mut().map(&mut work));
    result
}

/// Returns the end of the node's journal.
fn end_of(node: &dyn WriterNode) -> JournalPosition {
    with_journal(node, |journal| journal.mark().position).unwrap_or_default()
}

fn view_of(journal: &NodeJournal) -> JournalView<'_> {
    let ring = journal.ring();
    JournalView { lineage: ring.lineage(), head: ring.head(), end: ring.end(), flushed: ring.flushed() }
}
