//! The report of a node that serves no sessions.

use ashlar_cluster::chain::LinkProblem;
use ashlar_replica::mirror::{CopyStatus, ReplicaStatus};
use ashlar_wire::{ClusterReport, NodeStanding, ReplicationReport};

use crate::membership::{MAKE_ANEW, Membership, describe_cause};

/// Describes a node that was replaced.
pub fn describe_replaced(membership: &Membership) -> ClusterReport {
    let mut report = membership.report();
    report.problems.push(describe_replacement(membership));
    report
}

/// Describes a replica that takes a copy of the whole file system.
pub fn describe_copying(membership: &Membership, status: &CopyStatus) -> ClusterReport {
    let mut report = membership.report();
    report.standing = if status.is_copying { NodeStanding::Copying } else { NodeStanding::Away };
    report.is_linked = status.is_copying;
    report.copied_bytes = Some(status.bytes);
    if !status.is_copying {
        let name = name_writer(membership);
        report.problems.push(match &status.last_problem {
            Some(problem @ LinkProblem::MinReplicas { .. }) => format!("no link to {name}: {problem}"),
            problem => {
                let cause = describe_cause(problem.as_ref(), "it has not answered yet");
                format!("no copy of the file system from {name} ({cause}); start that node")
            }
        });
    }
    report
}

/// Describes a replica that follows its writer.
pub fn describe_following(membership: &Membership, status: &ReplicaStatus) -> ClusterReport {
    let mut report = membership.report();
    report.standing = if status.is_following { NodeStanding::Following } else { NodeStanding::Away };
    report.is_linked = status.is_following;
    report.in_sync = status.state.in_sync;
    report.journal_end = Some(status.end.0);
    report.replication = Some(ReplicationReport {
        durable: status.durable.0,
        applied: Some(status.applied.0),
        committed: status.committed.0,
        lag_ms: None,
    });
    report.problems = describe_problems(membership, status);
    report
}

/// Says that the node was replaced: by which node, if that is known, and what to do.
fn describe_replacement(membership: &Membership) -> String {
    let Membership { document, node, state, .. } = membership;
    // A newer epoch is that of the successor's promotion, which this node's document does not have.
    let newer = state.superseding(document.epoch);
    if let Some(newer) = newer.filter(|epoch| epoch.node == *node) {
        return format!(
            "node {node} has been in epoch {}, and its document is of epoch {}, an older copy; on the other node, \
             run 'ashlar node add', and here 'ashlar node join' with a new arena",
            newer.number, document.epoch.number
        );
    }
    let successor = newer.map_or(document.writer().node, |epoch| epoch.node);
    let address = document.member(successor).map_or(String::new(), |member| format!(" at {}", member.address));
    format!("node {successor}{address} has taken over from this node; {MAKE_ANEW}")
}

fn name_writer(membership: &Membership) -> String {
    let writer = membership.document.writer();
    format!("node {} at {}", writer.node, writer.address)
}

fn describe_problems(membership: &Membership, status: &ReplicaStatus) -> Vec<String> {
    let writer = membership.document.writer();
    let mut problems = Vec::new();
    if let Some(epoch) = status.superseded {
        problems.push(format!(
            "node {} has taken over from node {} in epoch {}; {MAKE_ANEW}",
            epoch.node, writer.node, epoch.number
        ));
    } else if let (false, Some(problem @ LinkProblem::MinReplicas { .. })) = (status.is_following, &status.last_problem)
    {
        problems.push(format!("no link to {}: {problem}", name_writer(membership)));
    } else if !status.is_following {
        let cause = describe_cause(status.last_problem.as_ref(), "it has not answered yet");
        let remedy = match status.state.in_sync {
            true => "start it, or let this node take over with 'ashlar node promote'",
            false => "start it: this node is not in sync, so it can't take over",
        };
        problems.push(format!("no link to {} ({cause}); {remedy}", name_writer(membership)));
    }
    problems
}

#[cfg(test)]
mod tests {
    use ashlar_cluster::{ClusterDocument, DocumentMember, HardState, MemberRole};
    use ashlar_replica::mirror::ClusterFiles;
    use ashlar_types::{ArenaId, Epoch, FileSystemId, JournalPosition, NodeNumber};

    use super::*;

    fn node(number: u16) -> NodeNumber {
        NodeNumber::new(number).expect("a node's number")
    }

    /// Returns the place of node 1, the replica, in a cluster of two.
    fn membership() -> Membership {
        let address = |port: u16| format!("10.0.0.1:{port}");
        let role = MemberRole::Writer;
        let writer = DocumentMember { node: node(0), arena: ArenaId(1), address: address(1), role };
        let document = ClusterDocument::new(FileSystemId(7), writer, false).expect("a document");
        let document = document.with_replica(ArenaId(2), address(2)).expect("a replica");
        let state = HardState { newest_epoch: document.epoch, ..HardState::default() };
        Membership { files: ClusterFiles::of("/arena".as_ref()), document, state, node: node(1) }
    }

    fn status(is_following: bool, in_sync: bool) -> ReplicaStatus {
        ReplicaStatus {
            is_following,
            end: JournalPosition(500),
            durable: JournalPosition(400),
            applied: JournalPosition(300),
            committed: JournalPosition(200),
            state: HardState { in_sync, ..HardState::default() },
            last_problem: None,
            superseded: None,
        }
    }

    #[test]
    fn replica_that_follows_has_no_problem() {
        let report = describe_following(&membership(), &status(true, true));
        assert_eq!((report.own_role(), report.standing), ("replica", NodeStanding::Following));
        assert!(report.is_linked && report.in_sync && report.problems.is_empty(), "{report:?}");
        assert_eq!((report.journal_end, report.lag_bytes(), report.uncommitted_bytes()), (Some(500), None, Some(300)));
    }

    #[test]
    fn replica_without_link_names_the_writer_and_a_command() {
        let gone = |in_sync| ReplicaStatus {
            last_problem: Some("the peer closed the connection".into()),
            ..status(false, in_sync)
        };
        let report = describe_following(&membership(), &gone(true));
        assert_eq!(report.standing, NodeStanding::Away);
        assert_eq!(
            report.problems,
            ["no link to node 0 at 10.0.0.1:1 (the peer closed the connection); start it, or let this node take over \
              with 'ashlar node promote'"]
        );
        let report = describe_following(&membership(), &gone(false));
        assert!(
            report.problems[0].ends_with("start it: this node is not in sync, so it can't take over"),
            "{report:?}"
        );
        let report = describe_following(&membership(), &status(false, true));
        assert!(report.problems[0].contains("(it has not answered yet)"), "{report:?}");
    }

    #[test]
    fn other_min_replicas_are_the_only_problem() {
        let problem = || Some(LinkProblem::MinReplicas { writer: 2, replica: 1 });
        let refused = ReplicaStatus { last_problem: problem(), ..status(false, true) };
        let copying = CopyStatus { is_copying: false, bytes: 0, state: refused.state, last_problem: problem() };
        let words = "no link to node 0 at 10.0.0.1:1: min_replicas is 2 at the writer and 1 at the replica; write";
        for report in [describe_following(&membership(), &refused), describe_copying(&membership(), &copying)] {
            assert!(report.problems.len() == 1 && report.problems[0].starts_with(words), "{:?}", report.problems);
        }
    }

    #[test]
    fn replica_of_a_replaced_writer_names_the_successor() {
        let epoch = Epoch { number: 9, node: node(4) };
        let report =
            describe_following(&membership(), &ReplicaStatus { superseded: Some(epoch), ..status(false, true) });
        assert_eq!(
            report.problems,
            [
                "node 4 has taken over from node 0 in epoch 9; there, run 'ashlar node add', and here 'ashlar node join' with a new arena"
            ]
        );
    }

    /// Its document is older than its replacement, and calls it the writer.
    #[test]
    fn replaced_writer_shows_itself_as_replaced() {
        let mut replaced = membership();
        replaced.node = node(0);
        let newer = replaced.document.epoch.number + 1;
        replaced.state.newest_epoch = Epoch { number: newer, node: node(1) };
        let report = describe_replaced(&replaced);
        assert_eq!((report.own_role(), report.standing), ("replaced", NodeStanding::Replaced));
        assert_eq!(report.members[1].role, "writer");
        assert_eq!(
            report.problems,
            [
                "node 1 at 10.0.0.1:2 has taken over from this node; there, run 'ashlar node add', and here 'ashlar node join' with a new arena"
            ]
        );
        assert_eq!((report.journal_end, report.replication), (None, None));
        replaced.state.newest_epoch = Epoch { number: newer, node: node(0) };
        let problem = &describe_replaced(&replaced).problems[0];
        assert!(
            problem.starts_with("node 0 has been in epoch 3, and its document is of epoch 2, an older copy;"),
            "{problem}"
        );
    }
}
