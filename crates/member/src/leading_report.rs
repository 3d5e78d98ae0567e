//! The report of a writer, whether it serves or waits.

use std::time::Duration;

use ashlar_cluster::chain::LinkProblem;
use ashlar_cluster::{CopiesNeeded, Standing};
use ashlar_processes::clock;
use ashlar_replica::mirror::LeaderStatus;
use ashlar_types::JournalPosition;
use ashlar_wire::{ClusterReport, NodeStanding, ReplicationReport};

use crate::membership::{MAKE_ANEW, Membership, describe_cause};

/// Returns the state of a writer's cluster. `end` is its journal's end.
#[must_use]
pub fn report_leading(membership: &Membership, status: &LeaderStatus, end: JournalPosition) -> ClusterReport {
    let waited = |since: Duration| clock::boot_time().saturating_sub(since).as_millis() as u64;
    ClusterReport {
        standing: match status.standing {
            Standing::Serving => NodeStanding::Serving,
            Standing::Waiting(_) => NodeStanding::Waiting,
            Standing::Replaced(_) => NodeStanding::Replaced,
        },
        is_linked: status.progress.is_some(),
        in_sync: status.is_whole,
        is_alone: status.copies == CopiesNeeded::Own,
        journal_end: Some(end.0),
        replication: status.progress.map(|progress| ReplicationReport {
            durable: progress.durable.0,
            applied: None,
            committed: progress.committed.0,
            lag_ms: Some(progress.waiting_since.map_or(0, waited)),
        }),
        copied_bytes: status.full_copy.map(|progress| progress.bytes),
        problems: describe_problems(membership, status),
        ..membership.report()
    }
}

fn describe_problems(membership: &Membership, status: &LeaderStatus) -> Vec<String> {
    if let Standing::Replaced(epoch) = status.standing {
        return vec![format!("node {} has taken over from this node; {MAKE_ANEW}", epoch.node)];
    }
    let Some(replica) = membership.document.replica() else { return Vec::new() };
    let (mut problems, name) = (Vec::new(), format!("node {} at {}", replica.node, replica.address));
    if status.progress.is_none() && status.full_copy.is_none() {
        if let Some(problem @ LinkProblem::MinReplicas { .. }) = &status.last_problem {
            return vec![format!("no link to {name}: {problem}")];
        }
        let cause = describe_cause(status.last_problem.as_ref(), "it has not connected yet");
        let force = "start it, or let this node go on alone with 'ashlar node force'";
        problems.push(match (status.standing, status.copies) {
            (Standing::Serving, CopiesNeeded::Own) => {
                format!("{name} is away ({cause}); fsync does not wait for it: start it")
            }
            (Standing::Serving, CopiesNeeded::Both) => format!("{name} is away ({cause}); fsync waits for it: {force}"),
            _ => format!("{name} is away ({cause}), and may have taken over meanwhile; {force}"),
        });
    }
    problems
}

#[cfg(test)]
mod tests {
    use ashlar_cluster::chain::ReplicaProgress;
    use ashlar_cluster::{ClusterDocument, DocumentMember, HardState, MemberRole};
    use ashlar_replica::mirror::ClusterFiles;
    use ashlar_store::CopyProgress;
    use ashlar_types::{ArenaId, Epoch, FileSystemId, NodeNumber};

    use super::*;

    fn node(number: u16) -> NodeNumber {
        NodeNumber::new(number).expect("a node's number")
    }

    /// Returns the place of node 0, the writer, in a cluster of one or two.
    fn membership(has_replica: bool) -> Membership {
        let (address, role) = ("10.0.0.1:1".to_owned(), MemberRole::Writer);
        let writer = DocumentMember { node: node(0), arena: ArenaId(1), address, role };
        let mut document = ClusterDocument::new(FileSystemId(7), writer, false).expect("a document");
        if has_replica {
            document = document.with_replica(ArenaId(2), "10.0.0.1:2".into()).expect("a replica");
        }
        let state = HardState { newest_epoch: document.epoch, ..HardState::default() };
        Membership { files: ClusterFiles::of("/arena".as_ref()), document, state, node: node(0) }
    }

    fn status(standing: Standing, copies: CopiesNeeded) -> LeaderStatus {
        LeaderStatus {
            standing,
            copies,
            is_whole: false,
            progress: None,
            last_problem: Some("the peer closed the connection".into()),
            full_copy: None,
        }
    }

    fn problems_of(status: &LeaderStatus) -> Vec<String> {
        report_leading(&membership(true), status, JournalPosition(500)).problems
    }

    #[test]
    fn linked_replica_is_reported_with_its_progress() {
        let (durable, committed) = (JournalPosition(400), JournalPosition(300));
        let progress = ReplicaProgress { sent: JournalPosition(500), durable, committed, waiting_since: None };
        let linked =
            LeaderStatus { is_whole: true, progress: Some(progress), ..status(Standing::Serving, CopiesNeeded::Both) };
        let report = report_leading(&membership(true), &linked, JournalPosition(500));
        assert_eq!((report.own_role(), report.standing), ("writer", NodeStanding::Serving));
        assert!(report.is_linked && report.in_sync && !report.is_alone && report.problems.is_empty(), "{report:?}");
        assert_eq!((report.lag_bytes(), report.uncommitted_bytes()), (Some(100), Some(200)));
        assert_eq!(report.replication.and_then(|progress| progress.lag_ms), Some(0));
    }

    #[test]
    fn writer_without_replica_has_no_problem() {
        let alone = LeaderStatus { last_problem: None, ..status(Standing::Serving, CopiesNeeded::Own) };
        let report = report_leading(&membership(false), &alone, JournalPosition(500));
        assert!(report.is_alone && report.problems.is_empty(), "{report:?}");
        assert_eq!((report.journal_end, report.replication), (Some(500), None));
    }

    #[test]
    fn replica_that_is_away_is_named_with_a_command() {
        let away = "node 1 at 10.0.0.1:2 is away (the peer closed the connection)";
        let force = "start it, or let this node go on alone with 'ashlar node force'";
        for (standing, copies, rest) in [
            (Standing::Serving, CopiesNeeded::Own, "; fsync does not wait for it: start it".to_owned()),
            (Standing::Serving, CopiesNeeded::Both, format!("; fsync waits for it: {force}")),
            (Standing::Waiting(node(1)), CopiesNeeded::Both, format!(", and may have taken over meanwhile; {force}")),
        ] {
            assert_eq!(problems_of(&status(standing, copies)), [format!("{away}{rest}")]);
        }
        let silent = LeaderStatus { last_problem: None, ..status(Standing::Serving, CopiesNeeded::Both) };
        assert!(problems_of(&silent)[0].contains("(it has not connected yet)"), "{silent:?}");
    }

    #[test]
    fn other_min_replicas_are_the_only_problem() {
        let problem = Some(LinkProblem::MinReplicas { writer: 2, replica: 1 });
        let refused = LeaderStatus { last_problem: problem, ..status(Standing::Waiting(node(1)), CopiesNeeded::Both) };
        let said = problems_of(&refused);
        let words = "no link to node 1 at 10.0.0.1:2: min_replicas is 2 at the writer and 1 at the replica; write";
        assert!(said.len() == 1 && said[0].starts_with(words), "{said:?}");
    }

    #[test]
    fn replica_that_is_being_filled_is_no_problem() {
        let progress = CopyProgress { bytes: 77, ..CopyProgress::default() };
        let copying = LeaderStatus { full_copy: Some(progress), ..status(Standing::Serving, CopiesNeeded::Own) };
        let report = report_leading(&membership(true), &copying, JournalPosition(500));
        assert_eq!((report.copied_bytes, report.problems), (Some(77), vec![]));
    }

    #[test]
    fn replaced_writer_names_its_successor() {
        let replaced = status(Standing::Replaced(Epoch { number: 9, node: node(1) }), CopiesNeeded::Both);
        assert_eq!(problems_of(&replaced), [format!("node 1 has taken over from this node; {MAKE_ANEW}")]);
    }
}
