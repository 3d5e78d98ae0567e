//! A cluster in the output of `ashlar status`, as the asked node knows it.

use ashlar_types::escape_controls;
use ashlar_wire::{ClusterReport, MemberReport, NodeStanding};

use crate::output::size::Size;
use crate::output::table::{grouped, table};

/// Describes a cluster, a line for each fact; problems come last, each with the next command.
pub fn describe_cluster(cluster: &ClusterReport) -> String {
    let (number, node) = cluster.epoch;
    let copies = match cluster.min_replicas {
        1 => "1 copy".to_owned(),
        copies => format!("{copies} copies"),
    };
    let id = escape_controls(&cluster.cluster);
    let mut text = format!("cluster   {id}, epoch {number} of node {node}, fsync needs {copies}\n");
    let role = escape_controls(cluster.own_role()).into_owned();
    text += &format!("node      {}, {role}: {}\n", cluster.node, explain_standing(cluster));
    if let Some(journal) = describe_journal(cluster) {
        text += &format!("journal   {journal}\n");
    }
    if let Some(bytes) = cluster.copied_bytes {
        text += &format!("copy      of the whole file system: {} so far\n", Size(bytes));
    }
    if cluster.standing == NodeStanding::Serving && cluster.is_alone {
        text += match has_replica(cluster) {
            true => "alone     fsync returns without the replica, which can't take over now\n",
            false => "alone     there is no replica; 'ashlar node add HOST:PORT --invitation FILE' adds one\n",
        };
    }
    for problem in &cluster.problems {
        text += &format!("problem   {}\n", escape_controls(problem));
    }
    text
}

/// Returns the table of the members.
pub fn list_members(cluster: &ClusterReport) -> String {
    let rows = cluster.members.iter().map(|member| {
        let mark = if member.node == cluster.node { " (this)" } else { "" };
        let (role, address) = (escape_controls(&member.role), escape_controls(&member.address));
        let state = describe_member(cluster, member);
        vec![format!("{}{mark}", member.node), role.into_owned(), address.into_owned(), state]
    });
    table(&["NODE", "ROLE", "ADDRESS", "STATE"], &rows.collect::<Vec<_>>())
}

fn has_replica(cluster: &ClusterReport) -> bool {
    cluster.members.iter().any(|member| member.role == "replica")
}

fn explain_standing(cluster: &ClusterReport) -> &'static str {
    match (cluster.standing, cluster.in_sync) {
        (NodeStanding::Serving, _) => "serves sessions",
        (NodeStanding::Waiting, _) => "serves no sessions until its replica answers",
        (NodeStanding::Following, true) => "follows the writer, and may take over when the writer is gone",
        (NodeStanding::Following, false) => "follows the writer, and can't take over before it is in sync",
        (NodeStanding::Copying, _) => "takes a copy of the whole file system from the writer",
        (NodeStanding::Away, _) => "has no link to the writer",
        (NodeStanding::Replaced, _) => "serves no sessions; another node has taken over",
    }
}

/// Returns the state of a member, as far as the asked node knows it; `-` if it doesn't.
fn describe_member(cluster: &ClusterReport, member: &MemberReport) -> String {
    let sync = |link: &str| format!("{link}, {}", if cluster.in_sync { "in sync" } else { "not in sync" });
    let is_own = member.node == cluster.node;
    match (cluster.standing, member.role.as_str()) {
        (NodeStanding::Away, "replica") if is_own => sync("no link"),
        (NodeStanding::Following, "replica") if is_own => sync("following"),
        (standing, _) if is_own => standing.name().to_owned(),
        (NodeStanding::Replaced, _) | (_, "replaced") => "-".to_owned(),
        _ if cluster.copied_bytes.is_some() => "linked, copying".to_owned(),
        (NodeStanding::Following | NodeStanding::Away, _) if cluster.is_linked => "linked".to_owned(),
        _ if cluster.is_linked => sync("linked"),
        _ => "away".to_owned(),
    }
}

/// Describes the journal: its length, and what of it the replica lacks.
fn describe_journal(cluster: &ClusterReport) -> Option<String> {
    let end = cluster.journal_end?;
    let mut text = format!("{} bytes", grouped(end));
    let Some(progress) = &cluster.replication else { return Some(text) };
    let store = match (cluster.lag_bytes(), progress.lag_ms) {
        (Some(0), Some(_)) => {
            text += "; the replica has all of them";
            "its store"
        }
        (Some(lag), Some(lag_ms)) => {
            text += &format!("; the replica lacks {}, for {lag_ms} ms", Size(lag));
            "its store"
        }
        _ => {
            text += " here";
            if end > progress.durable {
                text += &format!(", {} of them not durable yet", Size(end - progress.durable));
            }
            "the store"
        }
    };
    if let Some(uncommitted @ 1..) = cluster.uncommitted_bytes() {
        text += &format!("; {store} lacks {}", Size(uncommitted));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use ashlar_wire::ReplicationReport;

    use super::*;

    fn cluster(own: u16, standing: NodeStanding) -> ClusterReport {
        let member =
            |node, role: &str| MemberReport { node, address: format!("10.0.0.{}:7900", node + 1), role: role.into() };
        ClusterReport {
            cluster: "0007".into(),
            node: own,
            epoch: (2, 0),
            min_replicas: 2,
            members: vec![member(0, "writer"), member(1, "replica")],
            standing,
            is_linked: false,
            in_sync: false,
            is_alone: false,
            journal_end: Some(12_345),
            replication: None,
            copied_bytes: None,
            problems: vec![],
        }
    }

    fn linked(cluster: ClusterReport, applied: Option<u64>, lag_ms: Option<u64>) -> ClusterReport {
        let replication = Some(ReplicationReport { durable: 10_297, applied, committed: 9_273, lag_ms });
        ClusterReport { is_linked: true, in_sync: true, replication, ..cluster }
    }

    fn text(cluster: &ClusterReport) -> String {
        describe_cluster(cluster) + &list_members(cluster)
    }

    #[test]
    fn writer_with_its_replica_shows_the_lag() {
        let cluster = linked(cluster(0, NodeStanding::Serving), None, Some(3));
        assert_eq!(
            text(&cluster),
            "cluster   0007, epoch 2 of node 0, fsync needs 2 copies\n\
             node      0, writer: serves sessions\n\
             journal   12,345 bytes; the replica lacks 2.0 KiB, for 3 ms; its store lacks 3.0 KiB\n\
             NODE      ROLE     ADDRESS        STATE\n\
             0 (this)  writer   10.0.0.1:7900  serving\n\
             1         replica  10.0.0.2:7900  linked, in sync\n"
        );
        let level = ReplicationReport { durable: 12_345, applied: None, committed: 12_345, lag_ms: Some(0) };
        let level = text(&ClusterReport { replication: Some(level), ..cluster.clone() });
        assert!(level.contains("\njournal   12,345 bytes; the replica has all of them\n"), "{level}");
        let behind = text(&ClusterReport { in_sync: false, ..cluster });
        assert!(behind.ends_with("linked, not in sync\n"), "{behind}");
    }

    #[test]
    fn writer_whose_replica_is_away_shows_the_problem() {
        let problems = vec!["node 1 is away; start it".to_owned()];
        let away = ClusterReport { problems, ..cluster(0, NodeStanding::Serving) };
        let shown = text(&away);
        assert!(shown.contains("journal   12,345 bytes\nproblem   node 1 is away; start it\n"), "{shown}");
        assert!(shown.ends_with("10.0.0.2:7900  away\n"), "{shown}");
        let alone = text(&ClusterReport { is_alone: true, min_replicas: 1, ..away });
        assert!(
            alone.contains("\nalone     fsync returns without the replica, which can't take over now\n"),
            "{alone}"
        );
        assert!(alone.contains("fsync needs 1 copy\n"), "{alone}");
    }

    #[test]
    fn writer_without_replica_says_how_to_add_one() {
        let mut only = ClusterReport { is_alone: true, ..cluster(0, NodeStanding::Serving) };
        only.members.truncate(1);
        let shown = text(&only);
        assert!(shown.contains("alone     there is no replica; 'ashlar node add "), "{shown}");
    }

    #[test]
    fn waiting_writer_says_that_it_serves_none() {
        let shown = text(&cluster(0, NodeStanding::Waiting));
        assert!(shown.contains("node      0, writer: serves no sessions until its replica answers\n"), "{shown}");
        assert!(shown.contains("10.0.0.1:7900  waiting\n") && shown.ends_with("10.0.0.2:7900  away\n"), "{shown}");
    }

    #[test]
    fn replica_shows_its_copy_and_no_lag() {
        let cluster = linked(cluster(1, NodeStanding::Following), Some(10_000), None);
        assert_eq!(
            text(&cluster),
            "cluster   0007, epoch 2 of node 0, fsync needs 2 copies\n\
             node      1, replica: follows the writer, and may take over when the writer is gone\n\
             journal   12,345 bytes here, 2.0 KiB of them not durable yet; the store lacks 3.0 KiB\n\
             NODE      ROLE     ADDRESS        STATE\n\
             0         writer   10.0.0.1:7900  linked\n\
             1 (this)  replica  10.0.0.2:7900  following, in sync\n"
        );
        let level = ReplicationReport { durable: 12_345, applied: Some(12_345), committed: 12_345, lag_ms: None };
        let level = text(&ClusterReport { replication: Some(level), ..cluster.clone() });
        assert!(level.contains("\njournal   12,345 bytes here\n"), "{level}");
        let behind = text(&ClusterReport { in_sync: false, ..cluster });
        assert!(behind.contains("can't take over before it is in sync\n"), "{behind}");
        assert!(behind.ends_with("following, not in sync\n"), "{behind}");
    }

    #[test]
    fn replica_without_link_shows_both_as_apart() {
        let apart = ClusterReport { in_sync: true, ..cluster(1, NodeStanding::Away) };
        let shown = text(&apart);
        assert!(shown.contains("node      1, replica: has no link to the writer\n"), "{shown}");
        assert!(shown.contains("10.0.0.1:7900  away\n") && shown.ends_with("no link, in sync\n"), "{shown}");
    }

    #[test]
    fn replaced_node_claims_nothing_of_others() {
        let mut replaced = ClusterReport { journal_end: None, ..cluster(0, NodeStanding::Replaced) };
        replaced.members[0].role = "replaced".into();
        let shown = text(&replaced);
        assert!(shown.contains("node      0, replaced: serves no sessions; another node has taken over\n"), "{shown}");
        assert!(!shown.contains("journal"), "{shown}");
        assert!(shown.contains("10.0.0.1:7900  replaced\n") && shown.ends_with("10.0.0.2:7900  -\n"), "{shown}");
    }

    #[test]
    fn control_characters_of_other_nodes_are_escaped() {
        let mut wild = cluster(0, NodeStanding::Serving);
        wild.cluster = "\x1b[2J".into();
        wild.members[1].address = "host\x07:1".into();
        wild.members[1].role = "repl\nica".into();
        wild.problems = vec!["the peer says \x1b]0;title\x07\nproblem   none".into()];
        let shown = text(&wild);
        assert!(!shown.contains(['\x1b', '\x07']), "{shown:?}");
        assert_eq!(shown.lines().count(), 7, "{shown}");
    }
}
