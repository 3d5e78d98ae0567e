//! The writer's side of the link to its replica.

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_journal::Lineage;
use ashlar_types::{Epoch, JournalPosition};

#[cfg(test)]
use crate::authority::AuthorityBug;
use crate::authority::{AuthorityEffect, Standing, WriterAuthority};
use crate::chain::messages::{CopyOffer, CopyRoom, FRAMES_BYTES_MAX, Follow, Lead, PeerMessage, RefusedLead};
use crate::chain::problem::LinkProblem;
use crate::chain::timing::{ChainTiming, LinkPulse, PulseEvent};

/// Bytes of frames without an acknowledgement, at most: what is sent for an `fsync` waits behind no more.
const WINDOW_BYTES: u64 = 1 << 20;
/// Parts of a copy of the whole file system without an acknowledgement, at most.
const WINDOW_PARTS: u64 = 8;

/// An act that the shell performs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderEffect {
    /// Send a message.
    Send(PeerMessage<'static>),
    /// Close the link, for this reason, and report that it is down.
    Close(LinkProblem),
    /// Send frames from this position on, when [`Leader::frames_wanted`] says so.
    BeginFrames(JournalPosition),
    /// The replica's copy is durable up to this position.
    Replicated(JournalPosition),
    /// The replica's arena has this room: no more may be granted to sessions.
    LimitRoom(CopyRoom),
    /// An act that [`WriterAuthority`] asks for.
    Authority(AuthorityEffect),
    /// The replica's store is empty: begin a copy of the whole file system, and send it as [`Leader::may_send_part`]
    /// says.
    BeginCopy,
}

/// The writer's journal, as it stands.
#[derive(Clone, Copy, Debug)]
pub struct JournalView<'a> {
    /// The epochs of its frames.
    pub lineage: &'a Lineage,
    /// The oldest frame.
    pub head: JournalPosition,
    /// The next frame.
    pub end: JournalPosition,
    /// The position up to which it is durable here.
    pub flushed: JournalPosition,
}

/// Frames that the shell is to send next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramesWanted {
    /// Bytes of frames, at most; one frame may be longer.
    pub bytes_max: usize,
}

/// How far the replica is, for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaProgress {
    /// The position up to which frames were sent.
    pub sent: JournalPosition,
    /// The position up to which its copy is durable.
    pub durable: JournalPosition,
    /// The position up to which it has committed them.
    pub committed: JournalPosition,
    /// The oldest frame without an acknowledgement was sent at this time.
    pub waiting_since: Option<Duration>,
}

/// The state of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// There is none.
    Down,
    /// It is up; the replica says what it has.
    Greeting,
    /// The replica knows where its copy goes on, and cuts it.
    Preparing { from: JournalPosition },
    /// Frames are sent.
    Streaming,
    /// The replica empties its store.
    Emptying,
    /// The whole file system is sent.
    Copying(SentParts),
}

/// The parts of a copy of the whole file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SentParts {
    sent: u64,
    taken: u64,
}

/// The writer's side of its replica's link, with what the writer may do.
#[derive(Debug)]
pub struct Leader {
    authority: WriterAuthority,
    epoch: Epoch,
    /// How long the replica may leave frames without an acknowledgement.
    stall: Duration,
    phase: Phase,
    progress: ReplicaProgress,
    /// The flushed position that was sent last.
    durable_sent: JournalPosition,
    pulse: LinkPulse,
    has_stopped: bool,
    is_stop_noted: bool,
    effects: VecDeque<LeaderEffect>,
}

impl Leader {
    /// Returns the leader of a writer that has just started.
    #[must_use]
    pub fn new(authority: WriterAuthority, epoch: Epoch, timing: ChainTiming, now: Duration) -> Self {
        Self {
            authority,
            epoch,
            stall: timing.stall,
            phase: Phase::Down,
            progress: ReplicaProgress::default(),
            durable_sent: JournalPosition(0),
            pulse: LinkPulse::new(timing, now),
            has_stopped: false,
            is_stop_noted: false,
            effects: VecDeque::new(),
        }
    }

    /// Returns what the writer may do.
    #[must_use]
    pub fn authority(&self) -> &WriterAuthority {
        &self.authority
    }

    /// Changes what the writer may do: an order, or a document.
    pub fn authority_mut(&mut self) -> &mut WriterAuthority {
        &mut self.authority
    }

    /// Returns how far the replica is; `None` while its link is down.
    #[must_use]
    pub fn progress(&self) -> Option<ReplicaProgress> {
        (self.phase == Phase::Streaming).then_some(self.progress)
    }

    /// Takes the news that a link to the replica is up. One that was up before is down.
    pub fn handle_up(&mut self, now: Duration, peer_epoch: Epoch) {
        if self.phase != Phase::Down {
            self.handle_down(now);
        }
        self.authority.handle_epoch(peer_epoch);
        self.phase = Phase::Greeting;
        self.pulse.restart(now);
    }

    /// Takes the news that the link is down.
    pub fn handle_down(&mut self, now: Duration) {
        self.phase = Phase::Down;
        self.authority.handle_replica_down(now);
    }

    /// Takes a message of the replica.
    pub fn handle_message(&mut self, now: Duration, journal: &JournalView<'_>, message: &PeerMessage<'_>) {
        self.pulse.heard_at = now;
        match (self.phase, message) {
            (Phase::Down, _) => {}
            (_, PeerMessage::Beat) => {}
            (Phase::Greeting, PeerMessage::Follow(follow)) => self.greet(journal, follow),
            (Phase::Preparing { from }, PeerMessage::Ready) => {
                self.phase = Phase::Streaming;
                self.progress = ReplicaProgress { sent: from, durable: from, committed: from, waiting_since: None };
                self.durable_sent = JournalPosition(0);
                self.effects.push_back(LeaderEffect::BeginFrames(from));
                self.effects.push_back(LeaderEffect::Replicated(from));
                self.authority.handle_following();
                self.check_caught_up(journal);
            }
            (Phase::Streaming, &PeerMessage::Ack { durable, committed }) => {
                let progress = &mut self.progress;
                if durable < progress.durable || durable > progress.sent || committed > durable {
                    return self.close("it acknowledges frames that were not sent, or takes an acknowledgement back");
                }
                progress.committed = committed;
                if durable > progress.durable {
                    progress.durable = durable;
                    progress.waiting_since = (durable < progress.sent).then_some(now);
                    self.effects.push_back(LeaderEffect::Replicated(durable));
                }
                self.check_caught_up(journal);
            }
            (Phase::Emptying, PeerMessage::Ready) => {
                self.phase = Phase::Copying(SentParts::default());
                self.effects.push_back(LeaderEffect::BeginCopy);
            }
            (Phase::Copying(parts), &PeerMessage::CopyTaken { parts: taken })
                if taken > parts.taken && taken <= parts.sent =>
            {
                self.phase = Phase::Copying(SentParts { taken, ..parts });
            }
            (Phase::Streaming, PeerMessage::StopNoted) if self.has_stopped => self.is_stop_noted = true,
            _ => self.close("it sends messages out of turn"),
        }
    }

    /// Takes the time.
    ///
    /// A beat tells the replica what is durable here, if no frames have since: the replica commits no more than that.
    pub fn handle_time(&mut self, now: Duration, journal: &JournalView<'_>) {
        self.authority.handle_time(now, journal.end);
        if self.phase == Phase::Down {
            return;
        }
        let is_stalled = self.phase == Phase::Streaming
            && self.progress.waiting_since.is_some_and(|since| now >= since + self.stall);
        match self.pulse.poll(now) {
            Some(PulseEvent::Silent) => self.close("it is silent"),
            _ if is_stalled => self.close("it does not acknowledge"),
            Some(PulseEvent::Beat) if self.has_news(journal) => self.send_news(journal),
            Some(PulseEvent::Beat) => self.effects.push_back(LeaderEffect::Send(PeerMessage::Beat)),
            None => {}
        }
    }

    /// Returns when [`Self::handle_time`] must be called next.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let link = (self.phase != Phase::Down).then(|| {
            let stall = self.progress.waiting_since.filter(|_| self.phase == Phase::Streaming);
            stall.map_or(self.pulse.deadline(), |since| self.pulse.deadline().min(since + self.stall))
        });
        [link, self.authority.deadline()].into_iter().flatten().min()
    }

    /// Returns whether frames are to be sent now.
    #[must_use]
    pub fn frames_wanted(&self, journal: &JournalView<'_>) -> Option<FramesWanted> {
        let waiting = self.progress.sent.0 - self.progress.durable.0;
        let has_frames = self.progress.sent < journal.end && waiting < WINDOW_BYTES;
        let bytes_max = FRAMES_BYTES_MAX.min(WINDOW_BYTES.saturating_sub(waiting) as usize);
        (self.phase == Phase::Streaming && has_frames).then_some(FramesWanted { bytes_max })
    }

    /// Returns whether a part of the whole file system, or its end, may be sent now.
    #[must_use]
    pub fn may_send_part(&self) -> bool {
        matches!(self.phase, Phase::Copying(parts) if parts.sent - parts.taken < WINDOW_PARTS)
    }

    /// Returns whether the whole file system is being copied.
    #[must_use]
    pub fn is_copying(&self) -> bool {
        matches!(self.phase, Phase::Emptying | Phase::Copying(_))
    }

    /// Takes the news that a part was sent.
    pub fn handle_part_sent(&mut self, now: Duration) {
        self.pulse.sent_at = now;
        if let Phase::Copying(parts) = &mut self.phase {
            parts.sent += 1;
        }
    }

    /// Takes the news that frames up to a position were sent, with the durable position.
    pub fn handle_frames_sent(&mut self, now: Duration, upto: JournalPosition, durable: JournalPosition) {
        if upto > self.progress.sent {
            self.progress.waiting_since.get_or_insert(now);
        }
        (self.progress.sent, self.durable_sent, self.pulse.sent_at) = (upto, durable, now);
    }

    /// Tells the replica that the writer ends in order; all frames were sent.
    pub fn handle_stop(&mut self, now: Duration, journal: &JournalView<'_>) {
        if self.phase == Phase::Streaming {
            self.has_stopped = true;
            self.pulse.sent_at = now;
            self.send_news(journal);
            self.effects.push_back(LeaderEffect::Send(PeerMessage::Stopped { at: journal.end }));
        }
    }

    /// Returns whether nothing is left to wait for before the writer ends: the replica has recorded that, or is away.
    #[must_use]
    pub fn has_said_goodbye(&self) -> bool {
        self.is_stop_noted || self.phase != Phase::Streaming
    }

    /// Returns the next act that the shell is to perform.
    pub fn poll_effect(&mut self) -> Option<LeaderEffect> {
        self.effects.pop_front().or_else(|| self.authority.poll_effect().map(LeaderEffect::Authority))
    }

    /// Decides where the replica's copy goes on.
    fn greet(&mut self, journal: &JournalView<'_>, follow: &Follow) {
        self.authority.handle_epoch(follow.epoch);
        if follow.epoch != self.epoch || matches!(self.authority.standing(), Standing::Replaced(_)) {
            let refused = PeerMessage::Refused(RefusedLead::OtherEpoch(self.epoch));
            self.effects.push_back(LeaderEffect::Send(refused));
            return self.close("it has another epoch");
        }
        let is_alone = self.authority.hard_state().alone.is_some();
        let (writer, replica) = (self.authority.min_replicas(), follow.min_replicas);
        #[cfg(test)]
        let replica = match self.authority.bug {
            Some(AuthorityBug::IgnoreMinReplicas) => writer,
            _ => replica,
        };
        if writer != replica {
            let refused = RefusedLead::OtherMinReplicas { min_replicas: writer, is_alone };
            self.effects.push_back(LeaderEffect::Send(PeerMessage::Refused(refused)));
            return self.close(LinkProblem::MinReplicas { writer, replica });
        }
        let common = journal.lineage.last_common(journal.end, &follow.lineage, follow.end);
        if follow.is_whole && common.is_none_or(|common| common < follow.committed) {
            // The copy has what nothing else has. It is not given up without an administrator.
            self.effects.push_back(LeaderEffect::Send(PeerMessage::Refused(RefusedLead::OtherCopy)));
            return self.close("it has committed updates that this node has lost; promote it, or make it anew");
        }
        self.effects.extend(follow.room.map(LeaderEffect::LimitRoom));
        let Some(from) = common.filter(|from| *from >= journal.head && *from >= follow.applied && follow.is_whole)
        else {
            self.phase = Phase::Emptying;
            self.pulse.allow_silence();
            let offer = PeerMessage::CopyBegin(CopyOffer { epoch: self.epoch });
            return self.effects.push_back(LeaderEffect::Send(offer));
        };
        let lead = Lead { epoch: self.epoch, is_alone, lineage: journal.lineage.clone(), from };
        self.effects.push_back(LeaderEffect::Send(PeerMessage::Lead(lead)));
        self.authority.handle_leading();
        self.phase = Phase::Preparing { from };
    }

    /// Returns whether the replica knows less than is durable here, of the frames that it has.
    fn has_news(&self, journal: &JournalView<'_>) -> bool {
        self.phase == Phase::Streaming && self.durable_sent < journal.flushed.min(self.progress.sent)
    }

    /// Tells the replica what is durable here.
    fn send_news(&mut self, journal: &JournalView<'_>) {
        self.durable_sent = journal.flushed.min(self.progress.sent);
        let news = PeerMessage::Frames { durable: self.durable_sent, bytes: &[] };
        self.effects.push_back(LeaderEffect::Send(news));
    }

    fn check_caught_up(&mut self, journal: &JournalView<'_>) {
        if self.progress.durable == journal.end {
            self.authority.handle_caught_up();
        }
    }

    fn close(&mut self, reason: impl Into<LinkProblem>) {
        self.phase = Phase::Down;
        self.effects.push_back(LeaderEffect::Close(reason.into()));
    }
}
