//! The replica's side of the link to its writer.

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_journal::Lineage;
use ashlar_types::{Epoch, JournalPosition};

use crate::chain::messages::{CopyRoom, Follow, Lead, PeerMessage, RefusedLead};
use crate::chain::problem::LinkProblem;
use crate::chain::timing::{ChainTiming, LinkPulse, PulseEvent};
use crate::document::ClusterDocument;
use crate::hard_state::HardState;

/// An act that the shell performs, before it reports anything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FollowerEffect {
    /// Send a message.
    Send(PeerMessage<'static>),
    /// Close the link, for this reason, and report that it is down.
    Close(LinkProblem),
    /// Write the hard state, durably. Then call [`Follower::handle_written`]; if that fails, close the link.
    WriteHardState(HardState),
    /// Cut the copy at this position, take over the lineage, and then call [`Follower::handle_cut`].
    Cut {
        /// The epochs of the writer's frames.
        lineage: Lineage,
        /// The end of the copy from then on.
        from: JournalPosition,
    },
    /// The writer will send the whole file system: empty the store, and then call [`Follower::handle_emptied`].
    EmptyStore,
}

/// The replica's copy, as it stands.
#[derive(Clone, Copy, Debug)]
pub struct CopyView<'a> {
    /// The epochs of its frames.
    pub lineage: &'a Lineage,
    /// Its end.
    pub end: JournalPosition,
    /// How far it is applied.
    pub applied: JournalPosition,
    /// How far it is committed.
    pub committed: JournalPosition,
    /// The store is whole.
    pub is_whole: bool,
    /// The room of its arena, if the store is whole.
    pub room: Option<CopyRoom>,
}

/// The state of the link.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// There is none.
    Down,
    /// The replica has said what it has.
    Greeting,
    /// The hard state is being written, before the copy is cut.
    Writing(Lead),
    /// The copy is being cut.
    Cutting,
    /// Frames are taken.
    Following,
    /// The hard state is being written, before the store is emptied.
    GivingUp,
    /// The store is being emptied.
    Emptying,
    /// Parts of the whole file system are taken.
    Copying {
        /// So many.
        parts: u64,
    },
}

/// The replica's side of its writer's link.
#[derive(Debug)]
pub struct Follower {
    epoch: Epoch,
    min_replicas: u8,
    pulse: LinkPulse,
    state: HardState,
    writing: Option<HardState>,
    phase: Phase,
    durable: JournalPosition,
    /// How far the store is committed, and how far the writer knows of it.
    committed: JournalPosition,
    committed_sent: JournalPosition,
    /// Announcements of the writer, which are recorded once the copy is durable up to there.
    in_sync_at: Option<JournalPosition>,
    stopped_at: Option<JournalPosition>,
    /// The epoch of another node that has taken over.
    superseded: Option<Epoch>,
    effects: VecDeque<FollowerEffect>,
}

impl Follower {
    /// Returns the follower of a replica that has just started.
    #[must_use]
    pub fn new(state: HardState, document: &ClusterDocument, timing: ChainTiming, now: Duration) -> Self {
        Self {
            epoch: document.epoch,
            min_replicas: document.min_replicas,
            pulse: LinkPulse::new(timing, now),
            state,
            writing: None,
            phase: Phase::Down,
            durable: JournalPosition(0),
            committed: JournalPosition(0),
            committed_sent: JournalPosition(0),
            in_sync_at: None,
            stopped_at: None,
            superseded: state.superseding(document.epoch),
            effects: VecDeque::new(),
        }
    }

    /// Returns the hard state that is durable.
    #[must_use]
    pub fn hard_state(&self) -> HardState {
        self.state
    }

    /// Returns whether frames are taken.
    #[must_use]
    pub fn is_following(&self) -> bool {
        self.phase == Phase::Following
    }

    /// Returns when the writer was heard of last.
    #[must_use]
    pub fn heard_at(&self) -> Duration {
        self.pulse.heard_at
    }

    /// Returns the newer epoch in which this node is no replica of its writer, if one is known.
    #[must_use]
    pub fn superseded(&self) -> Option<Epoch> {
        self.superseded
    }

    /// Takes the news that a link to the writer is up.
    pub fn handle_up(&mut self, now: Duration, copy: &CopyView<'_>) {
        self.handle_down();
        self.phase = Phase::Greeting;
        self.pulse.restart(now);
        let follow = Follow {
            epoch: self.epoch,
            lineage: copy.lineage.clone(),
            end: copy.end,
            applied: copy.applied,
            committed: copy.committed,
            is_whole: copy.is_whole,
            min_replicas: self.min_replicas,
            room: copy.room,
        };
        self.effects.push_back(FollowerEffect::Send(PeerMessage::Follow(follow)));
    }

    /// Takes the news that the link is down.
    pub fn handle_down(&mut self) {
        self.phase = Phase::Down;
        (self.writing, self.in_sync_at, self.stopped_at) = (None, None, None);
        self.effects.clear();
    }

    /// Takes a message of the writer. The shell has stored and flushed the frames of one before it says so by
    /// [`Self::handle_durable`].
    pub fn handle_message(&mut self, now: Duration, message: &PeerMessage<'_>) {
        self.pulse.heard_at = now;
        match (&self.phase, message) {
            (Phase::Down, _) | (_, PeerMessage::Beat) => {}
            (Phase::Greeting, PeerMessage::Lead(lead)) => {
                if lead.epoch != self.epoch {
                    return self.close("it has another epoch");
                }
                self.phase = Phase::Writing(lead.clone());
                self.write_state(self.state.with_writer(lead.is_alone, self.min_replicas));
            }
            (Phase::Greeting, &PeerMessage::Refused(reason)) => match reason {
                RefusedLead::OtherCopy => self.close("it has lost updates that are committed here"),
                RefusedLead::OtherEpoch(epoch) => {
                    self.superseded = self.state.with_epoch(epoch).superseding(self.epoch);
                    self.close("it has another epoch");
                }
                RefusedLead::OtherMinReplicas { min_replicas: writer, is_alone } => {
                    let state = self.state.with_writer(is_alone, writer);
                    // The writer refuses once a second, as long as the two differ.
                    if state != self.state {
                        self.write_state(state);
                    }
                    self.close(LinkProblem::MinReplicas { writer, replica: self.min_replicas });
                }
            },
            (Phase::Greeting, PeerMessage::CopyBegin(offer)) => {
                if offer.epoch != self.epoch {
                    return self.close("it has another epoch");
                }
                self.pulse.allow_silence();
                self.phase = Phase::GivingUp;
                self.write_state(self.state.with_copy_begun());
            }
            (Phase::Copying { .. }, PeerMessage::CopyPart { .. } | PeerMessage::CopyEnd { .. }) => {}
            (Phase::Following, PeerMessage::Frames { .. }) => {}
            (Phase::Following, &PeerMessage::InSync { at }) => {
                self.in_sync_at = Some(at);
                self.keep_announced();
            }
            (Phase::Following, &PeerMessage::Stopped { at }) => {
                self.stopped_at = Some(at);
                self.keep_announced();
            }
            _ => self.close("it sends messages out of turn"),
        }
    }

    /// Takes the news that the hard state is durable.
    ///
    /// # Panics
    /// If none was asked for.
    pub fn handle_written(&mut self) {
        self.state = self.writing.take().expect("a hard state was asked for");
        match &self.phase {
            Phase::Writing(Lead { lineage, from, .. }) => {
                let cut = FollowerEffect::Cut { lineage: lineage.clone(), from: *from };
                self.phase = Phase::Cutting;
                self.effects.push_back(cut);
            }
            Phase::GivingUp => {
                self.phase = Phase::Emptying;
                self.effects.push_back(FollowerEffect::EmptyStore);
            }
            _ if self.state.writer_stopped_at.is_some() => {
                self.effects.push_back(FollowerEffect::Send(PeerMessage::StopNoted));
            }
            _ => {}
        }
    }

    /// Takes the news that the copy is cut, and durable up to its end.
    pub fn handle_cut(&mut self, end: JournalPosition) {
        if self.phase == Phase::Cutting {
            self.phase = Phase::Following;
            self.durable = end;
            (self.committed, self.committed_sent) = (JournalPosition(0), JournalPosition(0));
            self.effects.push_back(FollowerEffect::Send(PeerMessage::Ready));
        }
    }

    /// Takes the news that the store is empty, and durably marked as no whole one.
    pub fn handle_emptied(&mut self, now: Duration) {
        if self.phase == Phase::Emptying {
            self.phase = Phase::Copying { parts: 0 };
            self.pulse.sent_at = now;
            self.effects.push_back(FollowerEffect::Send(PeerMessage::Ready));
        }
    }

    /// Returns whether parts of the whole file system are taken.
    #[must_use]
    pub fn is_copying(&self) -> bool {
        matches!(self.phase, Phase::Copying { .. })
    }

    /// Takes the news that a part is stored.
    pub fn handle_part_taken(&mut self, now: Duration) {
        if let Phase::Copying { parts } = &mut self.phase {
            *parts += 1;
            let taken = PeerMessage::CopyTaken { parts: *parts };
            self.pulse.sent_at = now;
            self.effects.push_back(FollowerEffect::Send(taken));
        }
    }

    /// Takes the news that the copy is durable up to a position, and committed up to another.
    pub fn handle_durable(&mut self, now: Duration, durable: JournalPosition, committed: JournalPosition) {
        if self.phase != Phase::Following {
            return;
        }
        assert!(durable >= self.durable && committed <= durable, "a copy does not shrink while it follows");
        self.durable = durable;
        self.pulse.sent_at = now;
        self.committed = committed;
        self.acknowledge();
        self.keep_announced();
    }

    /// Takes the news that the store is committed up to a position. The writer learns of it in place of a beat.
    pub fn handle_committed(&mut self, committed: JournalPosition) {
        if self.phase == Phase::Following {
            assert!(committed <= self.durable, "a store has no frames that the copy lacks");
            self.committed = committed;
        }
    }

    /// Takes the time.
    pub fn handle_time(&mut self, now: Duration) {
        if self.phase == Phase::Down {
            return;
        }
        match self.pulse.poll(now) {
            Some(PulseEvent::Silent) => self.close("it is silent"),
            Some(PulseEvent::Beat) if self.phase == Phase::Following && self.committed > self.committed_sent => {
                self.acknowledge();
            }
            Some(PulseEvent::Beat) => self.effects.push_back(FollowerEffect::Send(PeerMessage::Beat)),
            None => {}
        }
    }

    /// Returns when [`Self::handle_time`] must be called next.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        (self.phase != Phase::Down).then(|| self.pulse.deadline())
    }

    /// Returns the next act that the shell is to perform.
    pub fn poll_effect(&mut self) -> Option<FollowerEffect> {
        self.effects.pop_front()
    }

    fn acknowledge(&mut self) {
        let (durable, committed) = (self.durable, self.committed);
        self.committed_sent = committed;
        self.effects.push_back(FollowerEffect::Send(PeerMessage::Ack { durable, committed }));
    }

    /// Records what the writer has announced, once the copy has reached its position.
    fn keep_announced(&mut self) {
        let is_reached = |at: &JournalPosition| self.durable >= *at;
        let mut state = self.state;
        if self.in_sync_at.take_if(|at| is_reached(at)).is_some() {
            state = state.with_sync();
        }
        if let Some(at) = self.stopped_at.take_if(|at| is_reached(at)) {
            state = state.with_writer_stopped(at);
        }
        if state != self.state {
            self.write_state(state);
        }
    }

    fn write_state(&mut self, state: HardState) {
        self.writing = Some(state);
        self.effects.push_back(FollowerEffect::WriteHardState(state));
    }

    fn close(&mut self, reason: impl Into<LinkProblem>) {
        self.phase = Phase::Down;
        self.effects.push_back(FollowerEffect::Close(reason.into()));
    }
}
