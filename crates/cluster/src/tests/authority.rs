//! Cases of a writer's authority, one by one.

use std::time::Duration;

use ashlar_types::{Epoch, JournalPosition};

use super::{mirror, node};
use crate::{
    AloneSince, AuthorityEffect, ClusterDocument, CopiesNeeded, HardState, LinkEvidence, PromotionRefusal, Standing,
    WriterAuthority, check_promotion,
};

const PATIENCE: Duration = Duration::from_millis(500);
const END: JournalPosition = JournalPosition(640);

/// A writer whose hard states are written at once.
struct Writer {
    authority: WriterAuthority,
    durable: HardState,
    effects: Vec<AuthorityEffect>,
}

impl Writer {
    fn start(document: &ClusterDocument, state: HardState) -> Self {
        let authority = WriterAuthority::new(document, state, PATIENCE, Duration::ZERO, END);
        let mut writer = Self { authority, durable: state, effects: Vec::new() };
        writer.perform();
        writer
    }

    fn perform(&mut self) {
        while let Some(effect) = self.authority.poll_effect() {
            self.effects.push(effect);
            if let AuthorityEffect::WriteHardState(state) = effect {
                self.durable = state;
                self.authority.handle_written();
            }
        }
    }

    fn make_whole(&mut self) {
        self.authority.handle_leading();
        self.authority.handle_following();
        self.authority.handle_caught_up();
        self.perform();
        assert!(self.authority.is_whole());
    }

    fn lose_replica(&mut self, now: Duration) {
        self.authority.handle_replica_down(now);
        self.perform();
    }

    fn pass_time(&mut self, now: Duration) {
        self.authority.handle_time(now, END);
        self.perform();
    }
}

#[test]
fn writer_waits_for_its_replica_after_a_start() {
    let mut writer = Writer::start(&mirror(2), HardState::default());
    assert_eq!(writer.authority.standing(), Standing::Waiting(node(1)));
    writer.pass_time(Duration::from_secs(1000));
    assert_eq!(writer.authority.standing(), Standing::Waiting(node(1)), "no time makes it serve");
    writer.authority.handle_leading();
    writer.authority.handle_following();
    assert_eq!(writer.authority.standing(), Standing::Serving);
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Both);
}

#[test]
fn mirror_waits_without_its_replica() {
    let mut writer = Writer::start(&mirror(2), HardState::default());
    writer.make_whole();
    writer.lose_replica(Duration::from_secs(1));
    writer.pass_time(Duration::from_secs(1000));
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Both);
    assert_eq!(writer.authority.standing(), Standing::Serving, "reads go on");
}

#[test]
fn writer_goes_on_alone_once_that_is_recorded() {
    let mut writer = Writer::start(&mirror(1), HardState::default());
    writer.make_whole();
    writer.lose_replica(Duration::from_secs(1));
    assert_eq!(writer.authority.deadline(), Some(Duration::from_millis(1500)));
    writer.pass_time(Duration::from_millis(1499));
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Both);
    writer.authority.handle_time(Duration::from_millis(1500), END);
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Both, "the hard state is not durable yet");
    writer.perform();
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Own);
    assert_eq!(writer.durable.alone, Some(AloneSince { since: END, by_order: false }));
}

/// Each time a replica connects that can't record what it learns, the link is up for a moment.
#[test]
fn replica_that_connects_in_vain_counts_as_away() {
    let mut writer = Writer::start(&mirror(1), HardState::default());
    writer.make_whole();
    let step = Duration::from_millis(100);
    (0..5).for_each(|attempt| {
        writer.lose_replica(step * attempt);
        writer.pass_time(step * attempt);
        assert!(writer.durable.alone.is_none(), "alone after {attempt} attempts");
        writer.authority.handle_leading();
    });
    writer.lose_replica(PATIENCE);
    writer.pass_time(PATIENCE);
    assert_eq!(writer.durable.alone, Some(AloneSince { since: END, by_order: false }));
}

#[test]
fn writer_alone_serves_after_a_restart() {
    let alone = Some(AloneSince { since: END, by_order: false });
    let writer = Writer::start(&mirror(1), HardState { alone, ..HardState::default() });
    assert_eq!(writer.authority.standing(), Standing::Serving);
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Own);
}

#[test]
fn writer_that_was_never_whole_does_not_go_on_alone() {
    let mut writer = Writer::start(&mirror(1), HardState::default());
    writer.authority.handle_leading();
    writer.authority.handle_following();
    writer.lose_replica(Duration::from_secs(1));
    writer.pass_time(Duration::from_secs(1000));
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Both);
}

#[test]
fn returning_replica_counts_before_alone_is_removed() {
    let alone = Some(AloneSince { since: END, by_order: false });
    let mut writer = Writer::start(&mirror(1), HardState { alone, ..HardState::default() });
    writer.effects.clear();
    writer.make_whole();
    let removed = HardState { alone: None, ..writer.durable };
    let expected = [
        AuthorityEffect::NeedCopies(CopiesNeeded::Both),
        AuthorityEffect::WriteHardState(removed),
        AuthorityEffect::DeclareInSync,
    ];
    assert_eq!(writer.effects, expected);
}

#[test]
fn failed_write_leaves_everything_as_it_was() {
    let mut writer = Writer::start(&mirror(1), HardState::default());
    writer.make_whole();
    writer.lose_replica(Duration::ZERO);
    writer.authority.handle_time(PATIENCE, END);
    assert!(matches!(writer.authority.poll_effect(), Some(AuthorityEffect::WriteHardState(_))));
    writer.authority.handle_write_failed(PATIENCE);
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Both);
    let retry = writer.authority.deadline().expect("it tries again");
    assert!(retry > PATIENCE);
    writer.effects.clear();
    writer.pass_time(retry);
    assert_eq!(writer.authority.copies_needed(), CopiesNeeded::Own);
}

#[test]
fn newer_epoch_stops_the_writer_for_ever() {
    let newer = Epoch { number: 4, node: node(1) };
    let mut writer = Writer::start(&mirror(2), HardState::default());
    writer.make_whole();
    writer.authority.handle_epoch(newer);
    assert_eq!(writer.authority.standing(), Standing::Replaced(newer));
    writer.perform();
    let restarted = Writer::start(&mirror(2), writer.durable);
    assert_eq!(restarted.authority.standing(), Standing::Replaced(newer));
}

#[test]
fn equal_epoch_of_another_node_stops_the_writer() {
    let other = Epoch { number: 3, node: node(1) };
    for document_first in [true, false] {
        let mut writer = Writer::start(&mirror(2), HardState::default());
        writer.authority.handle_epoch(if document_first { other } else { Epoch { number: 2, node: node(1) } });
        let is_stopped = writer.authority.standing() == Standing::Replaced(other);
        assert_eq!(is_stopped, document_first, "an older one does not");
    }
}

#[test]
fn forced_writer_serves_and_remembers_it() {
    let mut writer = Writer::start(&mirror(2), HardState::default());
    writer.authority.handle_force(END);
    assert_eq!(writer.authority.standing(), Standing::Waiting(node(1)), "the hard state is not durable yet");
    writer.perform();
    assert_eq!(writer.authority.standing(), Standing::Serving);
    assert_eq!(writer.durable.alone, Some(AloneSince { since: END, by_order: true }));
}

#[test]
fn single_member_is_alone_by_order() {
    let promoted = mirror(2).with_promotion(node(1)).expect("a promotion");
    let writer = Writer::start(&promoted, HardState::default());
    assert_eq!((writer.authority.standing(), writer.authority.copies_needed()), (Standing::Serving, CopiesNeeded::Own));
    assert!(writer.durable.alone.is_some(), "a replica that joins does not count before it has everything");
}

#[test]
fn promotion_needs_proof_that_nothing_is_missing() {
    let away = LinkEvidence { writer_answers: false, durable: END };
    let in_sync = HardState { in_sync: true, writer_min_replicas: Some(2), ..HardState::default() };
    let check = |min_replicas, state: &HardState, evidence, force| {
        check_promotion(&mirror(min_replicas), state, node(1), evidence, force)
    };
    assert_eq!(check(2, &in_sync, away, false), Ok(()));
    let lacking = PromotionRefusal::MayLackUpdates { writer: node(0), durable: END };
    assert_eq!(check(1, &in_sync, away, false), Err(lacking));
    assert_eq!(check(1, &in_sync, away, true), Ok(()));
    for writer_min_replicas in [None, Some(1)] {
        let edited = HardState { writer_min_replicas, ..in_sync };
        assert_eq!(check(2, &edited, away, false), Err(lacking), "the writer needs one copy, or has not said");
        assert_eq!(check(2, &edited, away, true), Ok(()));
    }
    let stopped = |at| HardState { writer_stopped_at: Some(JournalPosition(at)), ..in_sync };
    assert_eq!(check(1, &stopped(640), away, false), Ok(()));
    assert_eq!(check(1, &stopped(641), away, false), Err(lacking), "it lacks the end");
    let answering = LinkEvidence { writer_answers: true, ..away };
    assert_eq!(check(2, &in_sync, answering, true), Err(PromotionRefusal::WriterAnswers(node(0))));
    let apart = check(2, &HardState::default(), away, true).expect_err("it is not in sync");
    assert_eq!(apart, PromotionRefusal::NotInSync(node(0)));
    assert!(apart.to_string().starts_with("this node is not in sync: node 0 may have acknowledged"), "{apart}");
    let writer = check_promotion(&mirror(2), &in_sync, node(0), away, true);
    assert_eq!(writer, Err(PromotionRefusal::IsWriter(node(0))));
}
