//! A replica's link to its writer: it connects, and connects again.

use std::sync::Arc;
use std::time::Duration;

use ashlar_cluster::chain::{ChainTiming, Follower, FollowerEffect, LinkProblem, PEER_VERSIONS, PeerMessage};
use ashlar_cluster::{ClusterDocument, HardState};
use ashlar_fabric::{CloseReason, Event, Fabric, FabricError, LinkId};
use ashlar_node::journal::CopyPlan;
use ashlar_types::NodeNumber;

use crate::mirror::cluster_files::ClusterFiles;
use crate::mirror::link_log::LinkLog;

/// How long it waits before it connects again.
const RECONNECT: Duration = Duration::from_millis(100);
const RECONNECT_MAX: Duration = Duration::from_secs(1);
/// How long its thread waits for events if nothing else is due.
const IDLE: Duration = Duration::from_secs(1);

/// News of the link.
pub enum LinkNews {
    /// It is up: the follower takes that, with the copy as it stands.
    Up,
    /// The writer has sent a message.
    Message(Vec<u8>),
}

/// An act on the replica's own copy, which its service performs.
pub enum CopyAct {
    /// Cut the copy of the journal.
    Cut(CopyPlan),
    /// Empty the store: a copy of the whole file system follows.
    EmptyStore,
}

/// A replica's link to its writer.
pub struct WriterLink {
    /// Decides the replica's acts.
    pub follower: Follower,
    /// Why the link went down last.
    pub last_problem: Option<LinkProblem>,
    log: LinkLog,
    fabric: Arc<dyn Fabric>,
    files: ClusterFiles,
    writer: NodeNumber,
    link: Option<LinkId>,
    connecting: Option<LinkId>,
    connect_at: Duration,
    pause: Duration,
}

impl WriterLink {
    /// Returns the link of a replica that has just started.
    pub fn new(
        fabric: Arc<dyn Fabric>,
        files: ClusterFiles,
        document: &ClusterDocument,
        state: HardState,
        timing: ChainTiming,
        now: Duration,
    ) -> Self {
        Self {
            follower: Follower::new(state, document, timing, now),
            last_problem: None,
            log: LinkLog::default(),
            fabric,
            files,
            writer: document.writer().node,
            link: None,
            connecting: None,
            connect_at: now,
            pause: RECONNECT,
        }
    }

    /// Returns whether the link is up.
    pub fn is_up(&self) -> bool {
        self.link.is_some()
    }

    /// Connects if that is due. Returns how long to wait for events.
    pub fn prepare_wait(&mut self, now: Duration) -> Duration {
        if self.link.is_none() && self.connecting.is_none() && now >= self.connect_at {
            match self.fabric.connect(self.writer) {
                Ok(connecting) => self.connecting = Some(connecting),
                Err(error) => self.retry_later(now, error.to_string().into(), false),
            }
        }
        let is_down = self.link.is_none() && self.connecting.is_none();
        let next = [self.follower.deadline(), is_down.then_some(self.connect_at)];
        next.into_iter().flatten().min().map_or(IDLE, |at| at.saturating_sub(now)).min(IDLE)
    }

    /// Takes an event. Returns its news, if it has any.
    pub fn handle_event(&mut self, now: Duration, event: Event) -> Option<LinkNews> {
        match event {
            Event::Up { link: up, peer, is_outgoing } => {
                if !is_outgoing || peer.node != self.writer || peer.version != PEER_VERSIONS.current {
                    self.fabric.close(up);
                    return None;
                }
                (self.link, self.connecting) = (Some(up), None);
                self.log.handle_up();
                return Some(LinkNews::Up);
            }
            Event::Failed { link: failed, error, .. } if self.connecting == Some(failed) => {
                // A writer that has stopped in order is not reached until it is started again.
                let is_orderly = matches!(error, FabricError::Connect { .. }) && self.has_writer_stopped();
                self.retry_later(now, error.to_string().into(), is_orderly);
            }
            Event::Refused { link: refused, reason, .. } if self.connecting == Some(refused) => {
                self.retry_later(now, reason.to_string().into(), false);
            }
            Event::Message { link: from, bytes } if self.link == Some(from) => return Some(LinkNews::Message(bytes)),
            Event::Down { link: down, reason } if self.link == Some(down) => {
                self.link = None;
                // The end of its process may overtake its last frame.
                let is_orderly = match reason {
                    CloseReason::ClosedByPeer => true,
                    CloseReason::PeerGone => self.has_writer_stopped(),
                    _ => false,
                };
                self.follower.handle_down();
                self.retry_later(now, reason.to_string().into(), is_orderly);
            }
            _ => {}
        }
        None
    }

    /// Sends a message, if the link is up.
    pub fn send(&mut self, now: Duration, message: &PeerMessage<'_>) {
        if let Some(up) = self.link
            && let Err(error) = self.fabric.send(up, &[&message.encode_head(), message.tail()])
        {
            self.lose(now, error.to_string().into());
        }
    }

    /// Performs the follower's acts on the link and the hard state. Returns the next one on the copy.
    pub fn poll_act(&mut self, now: &dyn Fn() -> Duration) -> Option<CopyAct> {
        while let Some(effect) = self.follower.poll_effect() {
            match effect {
                FollowerEffect::Send(message) => {
                    if message == PeerMessage::Ready {
                        // The writer leads: a link that goes down now is made again soon.
                        self.pause = RECONNECT;
                    }
                    self.send(now(), &message);
                }
                FollowerEffect::Close(problem) => self.lose(now(), problem),
                FollowerEffect::WriteHardState(state) => match self.files.write_hard_state(&state) {
                    Ok(()) => self.follower.handle_written(),
                    Err(error) => self.lose(now(), error.to_string().into()),
                },
                FollowerEffect::Cut { lineage, from } => return Some(CopyAct::Cut(CopyPlan { lineage, from })),
                FollowerEffect::EmptyStore => return Some(CopyAct::EmptyStore),
            }
        }
        None
    }

    /// Closes the link for a reason, and connects again later.
    pub fn lose(&mut self, now: Duration, problem: LinkProblem) {
        self.close();
        self.follower.handle_down();
        self.retry_later(now, problem, false);
    }

    /// Closes the link, and connects again no sooner than after `pause`.
    pub fn lose_for(&mut self, now: Duration, pause: Duration, problem: String) {
        self.lose(now, problem.into());
        self.connect_at = now + pause;
    }

    /// Closes the link.
    pub fn close(&mut self) {
        if let Some(link) = self.link.take() {
            self.fabric.close(link);
        }
    }

    fn has_writer_stopped(&self) -> bool {
        self.follower.hard_state().writer_stopped_at.is_some()
    }

    fn retry_later(&mut self, now: Duration, problem: LinkProblem, is_orderly: bool) {
        self.connecting = None;
        self.connect_at = now + self.pause;
        self.pause = (self.pause * 2).min(RECONNECT_MAX);
        self.log.write_down(&problem, is_orderly);
        self.last_problem = Some(problem);
    }
}
