//! A writer's authority: whether it serves, and how many copies it needs, from moment to moment.
//!
//! The shell reports what happens to the replica's link, and performs the effects, in their order, before it reports
//! anything else. Times are those since boot.

use std::collections::VecDeque;
use std::time::Duration;

use ashlar_types::{Epoch, JournalPosition, NodeNumber};

use crate::document::ClusterDocument;
use crate::hard_state::{AloneSince, HardState};

/// Whether a writer serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It serves.
    Serving,
    /// Its replica has not answered since the start, and may have been promoted meanwhile.
    Waiting(NodeNumber),
    /// Another node has taken over, in this epoch. It serves nothing, and keeps what it has.
    Replaced(Epoch),
}

/// How many copies an acknowledgement needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopiesNeeded {
    /// This node's copy is enough.
    Own,
    /// This node's and the replica's.
    Both,
}

/// An act that the shell performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthorityEffect {
    /// Write the hard state, durably. Then call [`WriterAuthority::handle_written`], or
    /// [`WriterAuthority::handle_write_failed`].
    WriteHardState(HardState),
    /// From now on an acknowledgement needs so many copies.
    NeedCopies(CopiesNeeded),
    /// Tell the replica, by [`InSync`](crate::chain::PeerMessage::InSync), that it is in sync once it has the journal
    /// up to its present end.
    DeclareInSync,
    /// The standing has changed.
    StandingChanged(Standing),
}

/// The replica, as the writer sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplicaLink {
    /// Its link is down, since this time.
    Down { since: Duration },
    /// Its link is up; it has not been declared in sync since it was down.
    Behind { down_since: Option<Duration> },
    /// It was declared in sync over this link.
    InSync,
}

/// Decides what a writer may do.
#[derive(Debug)]
pub struct WriterAuthority {
    replica: Option<NodeNumber>,
    epoch: Epoch,
    min_replicas: u8,
    /// How long the replica may be away before the writer goes on alone, if `min_replicas` is 1.
    patience: Duration,
    /// The hard state that is durable.
    state: HardState,
    /// The hard state that the shell is to write.
    writing: Option<HardState>,
    link: ReplicaLink,
    /// The replica has confirmed the epoch in this run.
    is_confirmed: bool,
    /// The replica had caught up in this run.
    was_whole: bool,
    /// No hard state is tried again before this time.
    retry_at: Duration,
    copies: CopiesNeeded,
    standing: Standing,
    effects: VecDeque<AuthorityEffect>,
    #[cfg(test)]
    pub(crate) bug: Option<AuthorityBug>,
}

/// Faults that tests plant to show that their checkers detect them.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuthorityBug {
    /// The writer serves before its replica has confirmed the epoch.
    ServeUnconfirmed,
    /// The replica is declared in sync while the hard state with *alone* stands.
    DeclareBeforeWrite,
    /// A newer epoch is passed over.
    IgnoreEpoch,
    /// The writer goes on alone without an order, though `min_replicas` is 2: the replica may be promoted meanwhile.
    GoAlone,
    /// A replica of another `min_replicas` is linked.
    IgnoreMinReplicas,
}

/// How long a hard state that could not be written waits until it is tried again.
const WRITE_RETRY: Duration = Duration::from_secs(1);

impl WriterAuthority {
    /// Returns the authority of a cluster's writer at its start. `end` is its journal's end.
    #[must_use]
    pub fn new(
        document: &ClusterDocument,
        state: HardState,
        patience: Duration,
        now: Duration,
        end: JournalPosition,
    ) -> Self {
        let replica = document.replica().map(|member| member.node);
        let mut authority = Self {
            replica,
            epoch: document.epoch,
            min_replicas: document.min_replicas,
            patience,
            state,
            writing: None,
            link: ReplicaLink::Down { since: now },
            is_confirmed: false,
            was_whole: false,
            retry_at: now,
            copies: CopiesNeeded::Both,
            standing: Standing::Waiting(document.writer().node),
            effects: VecDeque::new(),
            #[cfg(test)]
            bug: None,
        };
        let mut next = state;
        if document.epoch.number > state.newest_epoch.number {
            next.newest_epoch = document.epoch;
        }
        if replica.is_none() && next.alone.is_none() {
            // A replica that is added later does not count before it has everything.
            next.alone = Some(AloneSince { since: end, by_order: true });
        }
        if next != state {
            authority.write_state(next);
        }
        authority.standing = authority.find_standing();
        authority.copies = authority.find_copies();
        authority.effects.push_back(AuthorityEffect::NeedCopies(authority.copies));
        authority.effects.push_back(AuthorityEffect::StandingChanged(authority.standing));
        authority
    }

    /// Returns whether the writer serves.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Returns how many copies an acknowledgement needs.
    #[must_use]
    pub fn copies_needed(&self) -> CopiesNeeded {
        self.copies
    }

    /// Returns how many copies the document asks for.
    #[must_use]
    pub fn min_replicas(&self) -> u8 {
        self.min_replicas
    }

    /// Returns the hard state that is durable.
    #[must_use]
    pub fn hard_state(&self) -> HardState {
        self.state
    }

    /// Returns whether the replica's link is up and the replica in sync.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.link == ReplicaLink::InSync
    }

    /// Takes the news that the replica learns what the hard state says. The hard state stays so as long as the link
    /// is up.
    pub fn handle_leading(&mut self) {
        let down_since = match self.link {
            ReplicaLink::Down { since } => Some(since),
            ReplicaLink::Behind { down_since } => down_since,
            ReplicaLink::InSync => None,
        };
        self.link = ReplicaLink::Behind { down_since };
    }

    /// Takes the news that the replica follows this writer, in this epoch.
    pub fn handle_following(&mut self) {
        self.is_confirmed = true;
        self.show();
    }

    /// Takes the news that the replica has the journal up to its end.
    pub fn handle_caught_up(&mut self) {
        if !matches!(self.link, ReplicaLink::Behind { .. }) || !self.is_confirmed || self.writing.is_some() {
            return;
        }
        self.was_whole = true;
        #[cfg(test)]
        if self.planted(AuthorityBug::DeclareBeforeWrite) {
            return self.declare_in_sync();
        }
        if self.state.alone.is_some() {
            // Updates that are acknowledged from now on are there when the hard state is gone.
            self.write_state(HardState { alone: None, ..self.state });
        } else {
            self.declare_in_sync();
        }
        self.show();
    }

    /// Takes the news that the replica's link is down.
    ///
    /// A replica that connects again and again, and can't follow (its disk may be full), is away all the time.
    pub fn handle_replica_down(&mut self, now: Duration) {
        let since = match self.link {
            ReplicaLink::Down { since } => since,
            ReplicaLink::Behind { down_since } => down_since.unwrap_or(now),
            ReplicaLink::InSync => now,
        };
        self.link = ReplicaLink::Down { since };
    }

    /// Takes the time. `end` is the journal's end.
    pub fn handle_time(&mut self, now: Duration, end: JournalPosition) {
        if self.deadline().is_some_and(|deadline| now >= deadline) {
            self.retry_at = now + WRITE_RETRY;
            self.write_state(HardState { alone: Some(AloneSince { since: end, by_order: false }), ..self.state });
        }
    }

    /// Returns when [`Self::handle_time`] must be called next.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let ReplicaLink::Down { since } = self.link else { return None };
        let is_one_enough = self.min_replicas == 1;
        #[cfg(test)]
        let is_one_enough = is_one_enough || self.planted(AuthorityBug::GoAlone);
        let may_go_on = self.replica.is_some()
            && is_one_enough
            && self.was_whole
            && self.state.alone.is_none()
            && self.writing.is_none()
            && self.standing == Standing::Serving;
        may_go_on.then_some((since + self.patience).max(self.retry_at))
    }

    /// Takes an administrator's order to go on without the replica. It is one only while the replica's link is down: a
    /// connected replica would not know that its copy no longer counts.
    pub fn handle_force(&mut self, end: JournalPosition) {
        let is_down = matches!(self.link, ReplicaLink::Down { .. });
        if is_down && self.state.alone.is_none() && self.writing.is_none() {
            self.write_state(HardState { alone: Some(AloneSince { since: end, by_order: true }), ..self.state });
        }
    }

    /// Takes an epoch that another member knows. A newer one stops this node at once.
    pub fn handle_epoch(&mut self, epoch: Epoch) {
        #[cfg(test)]
        if self.planted(AuthorityBug::IgnoreEpoch) {
            return;
        }
        let next = self.writing.unwrap_or(self.state).with_epoch(epoch);
        if next.newest_epoch != self.state.newest_epoch {
            // It stops even if the hard state can't be written.
            self.state.newest_epoch = next.newest_epoch;
            self.write_state(next);
        }
        self.show();
    }

    /// Takes the news that the hard state is durable.
    ///
    /// # Panics
    /// If none was asked for.
    pub fn handle_written(&mut self) {
        let was_alone = self.state.alone.is_some();
        self.state = self.writing.take().expect("a hard state was asked for");
        if was_alone && self.state.alone.is_none() && matches!(self.link, ReplicaLink::Behind { .. }) {
            self.declare_in_sync();
        }
        self.show();
    }

    /// Takes the news that the hard state could not be written. Nothing has changed; it is tried again later.
    ///
    /// # Panics
    /// If none was asked for.
    pub fn handle_write_failed(&mut self, now: Duration) {
        self.writing.take().expect("a hard state was asked for");
        self.retry_at = now + WRITE_RETRY;
        self.show();
    }

    /// Returns the next act that the shell is to perform.
    pub fn poll_effect(&mut self) -> Option<AuthorityEffect> {
        self.effects.pop_front()
    }

    fn write_state(&mut self, state: HardState) {
        if self.writing.replace(state).is_some() {
            // The shell has not come to the one before.
            self.effects.retain(|effect| !matches!(effect, AuthorityEffect::WriteHardState(_)));
        }
        self.effects.push_back(AuthorityEffect::WriteHardState(state));
    }

    fn declare_in_sync(&mut self) {
        self.link = ReplicaLink::InSync;
        self.effects.push_back(AuthorityEffect::DeclareInSync);
    }

    #[cfg(test)]
    fn planted(&self, bug: AuthorityBug) -> bool {
        self.bug == Some(bug)
    }

    fn find_standing(&self) -> Standing {
        let is_confirmed = self.is_confirmed || self.state.alone.is_some();
        #[cfg(test)]
        let is_confirmed = is_confirmed || self.planted(AuthorityBug::ServeUnconfirmed);
        match (self.state.superseding(self.epoch), self.replica) {
            (Some(epoch), _) => Standing::Replaced(epoch),
            (None, Some(replica)) if !is_confirmed => Standing::Waiting(replica),
            (None, _) => Standing::Serving,
        }
    }

    /// The writer needs its own copy alone as long as the hard state says so, and nothing is under way that ends that.
    fn find_copies(&self) -> CopiesNeeded {
        let is_alone = self.state.alone.is_some() && self.writing.is_none_or(|state| state.alone.is_some());
        if is_alone { CopiesNeeded::Own } else { CopiesNeeded::Both }
    }

    /// Reports changes. More copies are needed from before the hard state on, so this precedes the hard state's effect.
    fn show(&mut self) {
        let (standing, copies) = (self.find_standing(), self.find_copies());
        if copies != std::mem::replace(&mut self.copies, copies) {
            let before_write =
                self.effects.iter().position(|effect| matches!(effect, AuthorityEffect::WriteHardState(_)));
            self.effects.insert(before_write.unwrap_or(self.effects.len()), AuthorityEffect::NeedCopies(copies));
        }
        if standing != std::mem::replace(&mut self.standing, standing) {
            self.effects.push_back(AuthorityEffect::StandingChanged(standing));
        }
    }
}
