//! Cases of a link between a writer and its replica, one by one.

use std::time::Duration;

use ashlar_journal::Lineage;
use ashlar_types::{Epoch, JournalPosition, NodeNumber};

use super::{mirror, node};
use crate::chain::{
    ChainTiming, CopyView, Follower, FollowerEffect, JournalView, Leader, LeaderEffect, LinkProblem, PeerMessage,
};
use crate::{AloneSince, AuthorityEffect, HardState, Standing, WriterAuthority};

const END: JournalPosition = JournalPosition(640);
const IN_SYNC: HardState = HardState {
    alone: None,
    in_sync: true,
    writer_stopped_at: None,
    writer_min_replicas: Some(2),
    newest_epoch: Epoch { number: 0, node: NodeNumber::FIRST },
};

/// A writer and a replica that have greeted each other, and why each has closed the link.
struct Greeting {
    leader: Leader,
    follower: Follower,
    problems: [Option<LinkProblem>; 2],
}

impl Greeting {
    /// Connects nodes with these documents; all messages arrive at once.
    fn of(writer: u8, replica: u8, alone: Option<AloneSince>, is_whole: bool) -> Self {
        let (now, timing) = (Duration::ZERO, ChainTiming::default());
        let (document, state) = (mirror(writer), HardState { alone, ..HardState::default() });
        let authority = WriterAuthority::new(&document, state, Duration::from_millis(500), now, END);
        let leader = Leader::new(authority, document.epoch, timing, now);
        let mut replica = mirror(replica);
        replica.epoch = document.epoch;
        let follower = Follower::new(IN_SYNC, &replica, timing, now);
        let mut greeting = Self { leader, follower, problems: [None, None] };
        let lineage = Lineage::new(Epoch { number: 1, node: node(0) }, JournalPosition(0));
        let journal = JournalView { lineage: &lineage, head: JournalPosition(0), end: END, flushed: END };
        let copy = CopyView { lineage: &lineage, end: END, applied: END, committed: END, is_whole, room: None };
        greeting.leader.handle_up(now, document.epoch);
        greeting.follower.handle_up(now, &copy);
        while greeting.settle(&journal) {}
        greeting
    }

    /// Performs all effects. Returns whether there were any.
    fn settle(&mut self, journal: &JournalView<'_>) -> bool {
        let (now, mut has_acted) = (Duration::ZERO, false);
        while let Some(effect) = self.follower.poll_effect() {
            has_acted = true;
            match effect {
                FollowerEffect::Send(message) => self.leader.handle_message(now, journal, &message),
                FollowerEffect::Close(problem) => self.problems[1] = Some(problem),
                FollowerEffect::WriteHardState(_) => self.follower.handle_written(),
                FollowerEffect::Cut { from, .. } => self.follower.handle_cut(from),
                FollowerEffect::EmptyStore => {}
            }
        }
        while let Some(effect) = self.leader.poll_effect() {
            has_acted = true;
            match effect {
                LeaderEffect::Send(message) => self.follower.handle_message(now, &message),
                LeaderEffect::Close(problem) => self.problems[0] = Some(problem),
                LeaderEffect::Authority(AuthorityEffect::WriteHardState(_)) => {
                    self.leader.authority_mut().handle_written();
                }
                _ => {}
            }
        }
        has_acted
    }
}

#[test]
fn equal_min_replicas_are_linked() {
    let greeting = Greeting::of(1, 1, None, true);
    assert_eq!(greeting.problems, [None, None]);
    assert!(greeting.follower.is_following() && greeting.leader.authority().is_whole());
    assert_eq!(greeting.follower.hard_state().writer_min_replicas, Some(1));
}

/// The replica does not confirm the epoch, so the writer does not serve.
#[test]
fn other_min_replicas_are_refused_at_both_nodes() {
    for (writer, replica) in [(1, 2), (2, 1)] {
        for is_whole in [true, false] {
            let greeting = Greeting::of(writer, replica, None, is_whole);
            let problem = Some(LinkProblem::MinReplicas { writer, replica });
            assert_eq!(greeting.problems, [problem.clone(), problem]);
            assert_eq!(greeting.leader.authority().standing(), Standing::Waiting(node(1)));
            assert!(!greeting.leader.authority().is_whole() && !greeting.follower.is_following());
            let recorded = HardState { writer_min_replicas: Some(writer), ..IN_SYNC };
            assert_eq!(greeting.follower.hard_state(), recorded);
        }
    }
}

/// Otherwise it could be promoted, without a warning, although it lacks updates.
#[test]
fn refused_replica_of_lone_writer_is_not_in_sync() {
    let greeting = Greeting::of(1, 2, Some(AloneSince { since: END, by_order: false }), true);
    assert!(greeting.problems.iter().all(Option::is_some), "{:?}", greeting.problems);
    assert!(!greeting.follower.hard_state().in_sync);
}

#[test]
fn refusal_names_both_values_and_the_remedy() {
    let said = LinkProblem::MinReplicas { writer: 1, replica: 2 }.to_string();
    for words in ["1 at the writer and 2 at the replica", "cluster.toml of both arenas", "restart both daemons"] {
        assert!(said.contains(words), "{said}");
    }
}

/// Otherwise the writer would show for ever that the replica's store lacks frames.
#[test]
fn idle_replica_says_how_far_it_has_committed() {
    let mut greeting = Greeting::of(2, 2, None, true);
    let beat = ChainTiming::default().beat;
    let mut message_at = |beats: u32| {
        greeting.follower.handle_committed(END);
        greeting.follower.handle_time(beat * beats);
        greeting.follower.poll_effect()
    };
    let ack = PeerMessage::Ack { durable: END, committed: END };
    assert_eq!(message_at(1), Some(FollowerEffect::Send(ack)));
    assert_eq!(message_at(2), Some(FollowerEffect::Send(PeerMessage::Beat)));
}
