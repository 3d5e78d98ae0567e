//! A writer and a replica, any order of cuts, crashes, losses of power and stops, and a promotion without force.
//!
//! Whatever happens, nothing that was acknowledged is missing at the successor, no two nodes acknowledge, and the copy
//! is equal to the journal as far as it is applied.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use ashlar_journal::Lineage;
use ashlar_types::{Epoch, JournalPosition};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};

use super::{mirror, node};
use crate::authority::AuthorityBug;
use crate::chain::{
    ChainTiming, CopyTarget, CopyView, Follower, FollowerEffect, JournalView, Leader, LeaderEffect, PeerMessage,
};
use crate::{
    AloneSince, AuthorityEffect, ClusterDocument, CopiesNeeded, HardState, LinkEvidence, Standing, WriterAuthority,
    check_promotion,
};

/// Bytes of a frame of the model.
const FRAME: u64 = 8;
const PATIENCE: Duration = Duration::from_millis(500);

/// A step of the world.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The writer journals an update, if it serves.
    Append,
    FlushWriter,
    /// The writer commits, and reuses its journal as far as its replica allows.
    CommitWriter,
    /// The replica makes its copy durable and acknowledges it.
    FlushReplica,
    /// The replica applies what is durable on both sides.
    ApplyReplica,
    /// A message arrives.
    ToReplica,
    ToWriter,
    Connect,
    Cut,
    Pass(u16),
    /// Records can't be written, or can be again.
    FailWrites(bool),
    KillWriter {
        power: bool,
    },
    KillReplica {
        power: bool,
    },
    StopWriter,
    StartWriter,
    StartReplica,
    /// An administrator edits `min_replicas` of a document: the writer's, or the replica's. A start reads it.
    Edit {
        is_writers: bool,
        min_replicas: u8,
    },
    Promote,
    /// Everything works for a while.
    Calm,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => Just(Step::Append),
        4 => Just(Step::FlushWriter),
        2 => Just(Step::CommitWriter),
        4 => Just(Step::FlushReplica),
        2 => Just(Step::ApplyReplica),
        6 => Just(Step::ToReplica),
        6 => Just(Step::ToWriter),
        4 => Just(Step::Connect),
        2 => Just(Step::Cut),
        3 => (0u16..700).prop_map(Step::Pass),
        1 => any::<bool>().prop_map(Step::FailWrites),
        1 => any::<bool>().prop_map(|power| Step::KillWriter { power }),
        1 => any::<bool>().prop_map(|power| Step::KillReplica { power }),
        1 => Just(Step::StopWriter),
        2 => Just(Step::StartWriter),
        2 => Just(Step::StartReplica),
        2 => (any::<bool>(), 1u8..=2).prop_map(|(is_writers, min_replicas)| Step::Edit { is_writers, min_replicas }),
        1 => Just(Step::Promote),
        5 => Just(Step::Calm),
    ];
    prop::collection::vec(step, 1..80)
}

/// A journal, or a copy: each frame is a number that no other has.
#[derive(Clone, Debug)]
struct Journal {
    lineage: Lineage,
    /// Frames before this one are no longer there.
    head: usize,
    frames: Vec<u64>,
    flushed: usize,
}

impl Journal {
    fn new() -> Self {
        let lineage = Lineage::new(Epoch { number: 1, node: node(0) }, JournalPosition(0));
        Self { lineage, head: 0, frames: Vec::new(), flushed: 0 }
    }

    fn end(&self) -> JournalPosition {
        position(self.frames.len())
    }

    fn view(&self) -> JournalView<'_> {
        JournalView {
            lineage: &self.lineage,
            head: position(self.head),
            end: self.end(),
            flushed: position(self.flushed),
        }
    }

    fn lose_power(&mut self) {
        self.frames.truncate(self.flushed);
    }
}

fn position(frames: usize) -> JournalPosition {
    JournalPosition(frames as u64 * FRAME)
}

fn frames_before(position: JournalPosition) -> usize {
    (position.0 / FRAME) as usize
}

/// Returns the position up to which sessions' updates are acknowledged.
fn replicated(leader: &Leader, flushed: JournalPosition, acknowledged: JournalPosition) -> JournalPosition {
    match (leader.authority().standing(), leader.authority().copies_needed()) {
        (Standing::Serving, CopiesNeeded::Own) => flushed,
        (Standing::Serving, CopiesNeeded::Both) => flushed.min(acknowledged),
        _ => JournalPosition(0),
    }
}

/// Returns the messages of a copy of the whole file system, in one part, at the position of the writer's store.
fn send_copy(leader: &mut Leader, journal: &Journal, now: Duration) -> [Vec<u8>; 2] {
    let (position, lineage) = (position(journal.head), journal.lineage.clone());
    let end = PeerMessage::CopyEnd { target: CopyTarget { position, seed: 0, lineage }, bytes: &[] };
    [PeerMessage::CopyPart { bytes: &[] }, end].map(|message| {
        assert!(leader.may_send_part(), "two parts are few");
        leader.handle_part_sent(now);
        message.encode_head()
    })
}

/// A message on its way, as bytes.
type Wire = VecDeque<Vec<u8>>;

/// The two nodes, and all that both ever promised.
struct World {
    document: ClusterDocument,
    /// The replica's, which is read when it starts.
    replica_document: ClusterDocument,
    bug: Option<AuthorityBug>,
    now: Duration,
    writes_fail: bool,
    next_frame: u64,
    next_epoch: u32,
    leader: Option<Leader>,
    journal: Journal,
    writer_state: HardState,
    /// The position up to which the replica's copy is durable, as the writer knows.
    replicated: JournalPosition,
    /// Frames that were acknowledged to sessions.
    acknowledged: BTreeSet<u64>,
    is_linked: bool,
    to_replica: Wire,
    to_writer: Wire,
    follower: Option<Follower>,
    copy: Journal,
    /// Frames that are durable at the writer, as the replica knows.
    durable_there: usize,
    applied: Vec<u64>,
    /// The replica's store is whole.
    is_whole: bool,
    replica_state: HardState,
    promoted: Option<Epoch>,
    /// The frames that the successor has.
    successors: BTreeSet<u64>,
    /// The writer has started since the promotion, or knows of it.
    is_late: bool,
}

impl World {
    /// A new cluster's writer is alone by order; an old one's replica is in sync.
    fn new(min_replicas: u8, is_new: bool, bug: Option<AuthorityBug>) -> Self {
        let alone = is_new.then_some(AloneSince { since: JournalPosition(0), by_order: true });
        let mut world = Self {
            document: mirror(min_replicas),
            replica_document: mirror(min_replicas),
            bug,
            now: Duration::ZERO,
            writes_fail: false,
            next_frame: 0,
            next_epoch: 2,
            leader: None,
            journal: Journal::new(),
            writer_state: HardState { alone, ..HardState::default() },
            replicated: JournalPosition(0),
            acknowledged: BTreeSet::new(),
            is_linked: false,
            to_replica: Wire::new(),
            to_writer: Wire::new(),
            follower: None,
            copy: Journal::new(),
            durable_there: 0,
            applied: Vec::new(),
            is_whole: !is_new,
            replica_state: HardState {
                in_sync: !is_new,
                writer_min_replicas: (!is_new).then_some(min_replicas),
                ..HardState::default()
            },
            promoted: None,
            successors: BTreeSet::new(),
            is_late: false,
        };
        world.start_writer();
        world.start_replica();
        world
    }

    fn start_writer(&mut self) {
        if self.leader.is_some() {
            return;
        }
        self.is_late = self.promoted.is_some();
        // All that is found is made durable, and an epoch begins.
        self.journal.flushed = self.journal.frames.len();
        let epoch = Epoch { number: self.next_epoch, node: node(0) };
        self.next_epoch += 1;
        self.journal.lineage.begin_epoch(epoch, self.journal.end()).expect("few epochs");
        let (state, end) = (self.writer_state, self.journal.end());
        let mut authority = WriterAuthority::new(&self.document, state, PATIENCE, self.now, end);
        authority.bug = self.bug;
        // It decides anew, now with the fault.
        authority.handle_epoch(self.document.epoch);
        self.leader = Some(Leader::new(authority, self.document.epoch, ChainTiming::default(), self.now));
        self.replicated = JournalPosition(0);
    }

    fn start_replica(&mut self) {
        if self.follower.is_none() && self.promoted.is_none() {
            self.copy.flushed = self.copy.frames.len();
            self.durable_there = self.applied.len();
            let timing = ChainTiming::default();
            self.follower = Some(Follower::new(self.replica_state, &self.replica_document, timing, self.now));
        }
    }

    /// Performs all effects, sends frames, and acknowledges to sessions what may be.
    fn settle(&mut self) {
        self.settle_leader();
        self.settle_follower();
        let Some(leader) = &self.leader else { return };
        let flushed = position(self.journal.flushed);
        let upto = replicated(leader, flushed, self.replicated);
        self.acknowledged.extend(&self.journal.frames[..frames_before(upto)]);
    }

    fn settle_leader(&mut self) {
        let mut is_closed = false;
        let Some(leader) = &mut self.leader else { return };
        while let Some(effect) = leader.poll_effect() {
            match effect {
                LeaderEffect::Send(message) if self.is_linked => self.to_replica.push_back(message.encode_head()),
                LeaderEffect::Send(_) | LeaderEffect::BeginFrames(_) | LeaderEffect::LimitRoom(_) => {}
                LeaderEffect::BeginCopy => self.to_replica.extend(send_copy(leader, &self.journal, self.now)),
                LeaderEffect::Close(_) => is_closed = true,
                LeaderEffect::Replicated(durable) => self.replicated = durable,
                LeaderEffect::Authority(AuthorityEffect::WriteHardState(_)) if self.writes_fail => {
                    leader.authority_mut().handle_write_failed(self.now);
                }
                LeaderEffect::Authority(AuthorityEffect::WriteHardState(state)) => {
                    self.writer_state = state;
                    leader.authority_mut().handle_written();
                }
                LeaderEffect::Authority(AuthorityEffect::DeclareInSync) if self.is_linked => {
                    let message = PeerMessage::InSync { at: self.journal.end() };
                    self.to_replica.push_back(message.encode_head());
                }
                LeaderEffect::Authority(_) => {}
            }
            while !is_closed && let Some(wanted) = leader.frames_wanted(&self.journal.view()) {
                let sent = frames_before(leader.progress().expect("streaming").sent);
                let upto = self.journal.frames.len().min(sent + (wanted.bytes_max as u64 / FRAME) as usize);
                let frames = self.journal.frames[sent..upto].iter().enumerate();
                let bytes: Vec<u8> =
                    frames.flat_map(|(at, frame)| [(sent + at) as u64, *frame]).flat_map(u64::to_le_bytes).collect();
                let durable = position(self.journal.flushed);
                let message = PeerMessage::Frames { durable, bytes: &bytes };
                self.to_replica.push_back([message.encode_head().as_slice(), message.tail()].concat());
                leader.handle_frames_sent(self.now, position(upto), durable);
            }
        }
        if is_closed {
            self.cut();
        }
    }

    fn settle_follower(&mut self) {
        let mut is_closed = false;
        let Some(follower) = &mut self.follower else { return };
        while let Some(effect) = follower.poll_effect() {
            match effect {
                FollowerEffect::Send(message) if self.is_linked => self.to_writer.push_back(message.encode_head()),
                FollowerEffect::Send(_) => {}
                FollowerEffect::EmptyStore => {
                    (self.is_whole, self.copy, self.durable_there) = (false, Journal::new(), 0);
                    self.applied.clear();
                    follower.handle_emptied(self.now);
                }
                FollowerEffect::Close(problem) => {
                    assert!(!problem.to_string().contains("lost updates"), "a writer never loses what it flushed");
                    is_closed = true;
                }
                FollowerEffect::WriteHardState(_) if self.writes_fail => {
                    is_closed = true;
                    break;
                }
                FollowerEffect::WriteHardState(state) => {
                    self.replica_state = state;
                    follower.handle_written();
                }
                FollowerEffect::Cut { lineage, from } => {
                    let from = frames_before(from);
                    assert!(from >= self.applied.len() && from <= self.copy.frames.len(), "a cut of applied frames");
                    self.copy.frames.truncate(from);
                    self.copy.flushed = from;
                    self.copy.lineage = lineage;
                    follower.handle_cut(position(from));
                }
            }
        }
        if is_closed {
            self.cut();
        }
    }

    fn cut(&mut self) {
        self.is_linked = false;
        self.to_replica.clear();
        self.to_writer.clear();
        if let Some(leader) = &mut self.leader {
            leader.handle_down(self.now);
        }
        if let Some(follower) = &mut self.follower {
            follower.handle_down();
        }
    }

    fn connect(&mut self) {
        if let (Some(epoch), Some(leader)) = (self.promoted, &mut self.leader) {
            leader.handle_up(self.now, epoch);
            leader.handle_down(self.now);
            self.is_late = true;
            return;
        }
        if self.is_linked {
            return;
        }
        if let (Some(leader), Some(follower)) = (&mut self.leader, &mut self.follower) {
            self.is_linked = true;
            leader.handle_up(self.now, self.document.epoch);
            let applied = position(self.applied.len());
            let (lineage, end, is_whole) = (&self.copy.lineage, self.copy.end(), self.is_whole);
            let copy = CopyView { lineage, end, applied, committed: applied, is_whole, room: None };
            follower.handle_up(self.now, &copy);
        }
    }

    fn deliver_to_replica(&mut self) -> Result<(), TestCaseError> {
        let Some((bytes, follower)) = self.to_replica.pop_front().zip(self.follower.as_mut()) else { return Ok(()) };
        let message = PeerMessage::decode(&bytes).expect("a message");
        if let PeerMessage::Frames { durable, bytes } = message
            && follower.is_following()
        {
            for pair in bytes.chunks(16) {
                let number = |at: usize| u64::from_le_bytes(pair[at..at + 8].try_into().expect("8 bytes"));
                prop_assert_eq!(number(0), self.copy.frames.len() as u64, "frames follow each other");
                self.copy.frames.push(number(8));
            }
            self.durable_there = self.durable_there.max(frames_before(durable));
        }
        match message {
            PeerMessage::CopyPart { .. } if follower.is_copying() => follower.handle_part_taken(self.now),
            PeerMessage::CopyEnd { target, .. } if follower.is_copying() => {
                let upto = frames_before(target.position);
                let frames = self.journal.frames[..upto].to_vec();
                self.applied.clone_from(&frames);
                self.copy = Journal { lineage: target.lineage, head: 0, frames, flushed: upto };
                self.is_whole = true;
                self.cut();
            }
            message => follower.handle_message(self.now, &message),
        }
        Ok(())
    }

    fn deliver_to_writer(&mut self) {
        if let Some((bytes, leader)) = self.to_writer.pop_front().zip(self.leader.as_mut()) {
            let message = PeerMessage::decode(&bytes).expect("a message");
            leader.handle_message(self.now, &self.journal.view(), &message);
        }
    }

    fn flush_replica(&mut self) {
        self.copy.flushed = self.copy.frames.len();
        if let Some(follower) = &mut self.follower {
            follower.handle_durable(self.now, position(self.copy.flushed), position(self.applied.len()));
        }
    }

    fn apply_replica(&mut self) -> Result<(), TestCaseError> {
        if self.follower.is_none() {
            return Ok(());
        }
        let upto = self.copy.flushed.min(self.durable_there);
        let from = self.applied.len();
        if from < upto {
            self.applied.extend_from_slice(&self.copy.frames[from..upto]);
            // The writer's journal had these frames durable, so it has them for ever.
            prop_assert_eq!(&self.applied[from..], &self.journal.frames[from..upto], "copies part");
        }
        Ok(())
    }

    fn commit_writer(&mut self) {
        let Some(leader) = &self.leader else { return };
        let bound = frames_before(replicated(leader, position(self.journal.flushed), self.replicated));
        self.journal.head = self.journal.head.max(bound);
    }

    fn stop_writer(&mut self) -> Result<(), TestCaseError> {
        if let Some(leader) = &mut self.leader {
            self.journal.flushed = self.journal.frames.len();
            leader.handle_stop(self.now, &self.journal.view());
            self.settle();
            while self.leader.as_ref().is_some_and(|leader| !leader.has_said_goodbye()) && !self.to_replica.is_empty() {
                self.calm()?;
            }
        }
        self.cut();
        self.leader = None;
        Ok(())
    }

    /// Delivers and flushes everything, until nothing is under way.
    fn calm(&mut self) -> Result<(), TestCaseError> {
        for _ in 0..20 {
            self.journal.flushed = if self.leader.is_some() { self.journal.frames.len() } else { self.journal.flushed };
            self.settle();
            while !self.to_replica.is_empty() && self.follower.is_some() {
                self.deliver_to_replica()?;
                self.settle();
            }
            let is_behind = self.copy.flushed < self.copy.frames.len();
            if is_behind && self.follower.is_some() {
                self.flush_replica();
            }
            self.settle();
            while !self.to_writer.is_empty() && self.leader.is_some() {
                self.deliver_to_writer();
                self.settle();
            }
        }
        Ok(())
    }

    /// Promotes the replica if its rules allow that. A cut link looks like a dead writer.
    fn promote(&mut self) -> Result<(), TestCaseError> {
        let evidence = LinkEvidence { writer_answers: self.is_linked, durable: position(self.copy.flushed) };
        let state = self.follower.as_ref().map_or(self.replica_state, Follower::hard_state);
        if self.promoted.is_some() || check_promotion(&self.replica_document, &state, node(1), evidence, false).is_err()
        {
            return Ok(());
        }
        let there: BTreeSet<u64> = self.copy.frames[..self.copy.flushed].iter().copied().collect();
        prop_assert!(self.acknowledged.is_subset(&there), "an acknowledged update is lost");
        self.successors = there;
        self.promoted = Some(self.document.with_promotion(node(1)).expect("a replica").epoch);
        self.follower = None;
        Ok(())
    }

    fn take_step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Append => {
                if self.leader.as_ref().is_some_and(|leader| leader.authority().standing() == Standing::Serving) {
                    self.journal.frames.push(self.next_frame);
                    self.next_frame += 1;
                }
            }
            Step::FlushWriter => {
                if self.leader.is_some() {
                    self.journal.flushed = self.journal.frames.len();
                }
            }
            Step::CommitWriter => self.commit_writer(),
            Step::FlushReplica => self.flush_replica(),
            Step::ApplyReplica => self.apply_replica()?,
            Step::ToReplica => self.deliver_to_replica()?,
            Step::ToWriter => self.deliver_to_writer(),
            Step::Connect => self.connect(),
            Step::Cut => self.cut(),
            Step::Pass(ms) => self.now += Duration::from_millis(ms.into()),
            Step::FailWrites(fail) => self.writes_fail = fail,
            Step::KillWriter { power } => {
                self.cut();
                self.leader = None;
                if power {
                    self.journal.lose_power();
                }
            }
            Step::KillReplica { power } => {
                self.cut();
                self.follower = None;
                if power {
                    self.copy.lose_power();
                }
            }
            Step::StopWriter => self.stop_writer()?,
            Step::StartWriter => self.start_writer(),
            Step::StartReplica => self.start_replica(),
            Step::Edit { is_writers: true, min_replicas } if self.leader.is_none() => {
                self.document.min_replicas = min_replicas;
            }
            Step::Edit { is_writers: false, min_replicas } if self.follower.is_none() => {
                self.replica_document.min_replicas = min_replicas;
            }
            // The running node has the old one.
            Step::Edit { .. } => {}
            Step::Promote => self.promote()?,
            Step::Calm => self.calm()?,
        }
        if let Some(leader) = &mut self.leader {
            leader.handle_time(self.now, &self.journal.view());
        }
        if let Some(follower) = &mut self.follower {
            follower.handle_committed(position(self.applied.len()));
            follower.handle_time(self.now);
        }
        self.settle();
        let kept: BTreeSet<u64> = self.journal.frames.iter().copied().collect();
        prop_assert!(self.acknowledged.is_subset(&kept), "the writer lost an acknowledged update");
        // The replica had acknowledged those that it has, before it was promoted.
        let is_split = self.promoted.is_some() && !self.acknowledged.is_subset(&self.successors);
        prop_assert!(!is_split, "two nodes acknowledge");
        let serves = self.leader.as_ref().is_some_and(|leader| leader.authority().standing() == Standing::Serving);
        prop_assert!(!(self.is_late && serves), "a writer serves beside its successor");
        Ok(())
    }
}

fn run(cluster: (u8, bool), bug: Option<AuthorityBug>, steps: &[Step]) -> Result<World, TestCaseError> {
    let mut world = World::new(cluster.0, cluster.1, bug);
    world.settle();
    steps.iter().try_for_each(|step| world.take_step(*step))?;
    Ok(world)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn promotion_without_force_loses_nothing(cluster in (1u8..=2, any::<bool>()), steps in steps()) {
        run(cluster, None, &steps)?;
    }

    /// After faults have ended, the replica catches up, unless the node was replaced.
    #[test]
    fn chain_is_whole_after_faults_end(cluster in (1u8..=2, any::<bool>()), steps in steps()) {
        let mut world = run(cluster, None, &steps)?;
        if world.promoted.is_none() {
            world.writes_fail = false;
            world.cut();
            if world.document != world.replica_document {
                world.replica_document = world.document.clone();
                world.follower = None;
            }
            world.start_writer();
            world.start_replica();
            world.now += Duration::from_secs(2);
            // A copy of the whole file system ends the link; then frames go on.
            for _ in 0..2 {
                world.connect();
                world.calm()?;
            }
            let leader = world.leader.as_ref().expect("started");
            prop_assert!(leader.authority().is_whole(), "{leader:?}");
        }
    }
}

/// Each fault makes some order of events lose an acknowledged update, or two nodes acknowledge.
#[test]
fn planted_faults_of_authority_are_found() {
    use AuthorityBug::{DeclareBeforeWrite, GoAlone, IgnoreEpoch, IgnoreMinReplicas, ServeUnconfirmed};
    for bug in [ServeUnconfirmed, DeclareBeforeWrite, IgnoreEpoch, GoAlone, IgnoreMinReplicas] {
        let config = ProptestConfig { cases: 60_000, failure_persistence: None, ..ProptestConfig::default() };
        let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        let result = runner
            .run(&((1u8..=2, any::<bool>()), steps()), |(cluster, steps)| run(cluster, Some(bug), &steps).map(drop));
        assert!(matches!(result, Err(TestError::Fail(..))), "{bug:?} is not found");
    }
}
