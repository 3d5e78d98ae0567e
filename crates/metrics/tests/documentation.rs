//! Compares `docs/metrics.md` with the metrics that nodes of all roles give.

use std::collections::{BTreeMap, BTreeSet};

use ashlar_metrics::render_metrics;
use ashlar_types::SessionId;
use ashlar_wire::{
    ClusterReport, MemberReport, NodeStanding, OperationCounts, ReplicationReport, SessionKind, SessionStatus,
    SpaceReply, StatusReply,
};

/// A metric: its type and its unit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MetricForm {
    kind: String,
    unit: String,
    labels: BTreeSet<String>,
}

fn session(kind: SessionKind, operations: u64) -> SessionStatus {
    SessionStatus {
        session: SessionId(7),
        kind,
        pid: 4242,
        uid: 1042,
        label: "secret-program".into(),
        log_used_bytes: 100,
        log_bytes: 1000,
        records: 11,
        digested_bytes: 1100,
        leases_granted: 3,
        leases_revoked: 2,
        operations: vec![OperationCounts { operations, sampled: vec![] }; 4],
        fenced: (operations == u64::MAX).then(|| "forged".into()),
        terms: None,
    }
}

fn status(cluster: Option<ClusterReport>) -> StatusReply {
    let counters = ["requests", "records_applied", "leases_held", "lease_requests_waiting", "huge_pages_waiting"];
    let serves = cluster.as_ref().is_none_or(|cluster| cluster.standing == NodeStanding::Serving);
    StatusReply {
        version: "0.1.0".into(),
        pid: 4141,
        uptime_seconds: 200,
        arena: "/arena \"a\"\n".into(),
        medium: "memory".into(),
        arena_bytes: 1 << 30,
        space: SpaceReply { blocks_total: 100, blocks_free: 75, inodes_total: 50, inodes_free: 49 },
        sessions: vec![
            session(SessionKind::Process, 10),
            session(SessionKind::Process, u64::MAX),
            session(SessionKind::Mount, 5),
        ],
        counters: counters.iter().filter(|_| serves).map(|name| ((*name).to_owned(), 9)).collect(),
        cluster: cluster.map(Box::new),
    }
}

fn cluster(role: &str, standing: NodeStanding, replication: Option<ReplicationReport>) -> ClusterReport {
    let member = |node, role: &str| MemberReport { node, address: format!("host{node}:1"), role: role.into() };
    let other = if role == "writer" { "replica" } else { "writer" };
    ClusterReport {
        cluster: "00000000000000000000000000000007".into(),
        node: 0,
        epoch: (3, 1),
        min_replicas: 2,
        members: vec![member(0, role), member(1, other)],
        standing,
        is_linked: replication.is_some(),
        in_sync: true,
        is_alone: false,
        journal_end: (role != "replaced").then_some(5000),
        replication,
        copied_bytes: None,
        problems: vec!["a problem".into()],
    }
}

/// Returns a status of each role, and the words of the column *given by* that hold for it.
fn samples() -> Vec<(StatusReply, Vec<&'static str>)> {
    let of_writer = ReplicationReport { durable: 4000, applied: None, committed: 3000, lag_ms: Some(1500) };
    let of_replica = ReplicationReport { durable: 5000, applied: Some(4500), committed: 3000, lag_ms: None };
    let writer = |standing, progress| status(Some(cluster("writer", standing, progress)));
    let replica = |standing| status(Some(cluster("replica", standing, Some(of_replica))));
    vec![
        (status(None), vec!["all", "serving"]),
        (
            writer(NodeStanding::Serving, Some(of_writer)),
            vec!["all", "serving", "members", "journal", "progress", "leading"],
        ),
        (writer(NodeStanding::Serving, None), vec!["all", "serving", "members", "journal"]),
        (writer(NodeStanding::Waiting, None), vec!["all", "members", "journal"]),
        (replica(NodeStanding::Following), vec!["all", "members", "journal", "progress", "replica"]),
        (replica(NodeStanding::Away), vec!["all", "members", "journal", "progress", "replica"]),
        (status(Some(cluster("replaced", NodeStanding::Replaced, None))), vec!["all", "members"]),
    ]
}

/// Returns the metrics of a text, by their names.
fn parse(text: &str) -> BTreeMap<String, MetricForm> {
    let (mut kind, mut unit) = (String::new(), String::new());
    let mut metrics = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["#", "HELP", ..] => unit.clear(),
            ["#", "TYPE", _, found] => found.clone_into(&mut kind),
            ["#", "UNIT", _, found] => found.clone_into(&mut unit),
            ["#", "EOF"] => {}
            _ => {
                let end = line.find(['{', ' ']).expect("a name");
                let labels =
                    line[end..].split(['{', ',']).filter_map(|part| part.split_once("=\"")).map(|(name, _)| name);
                let labels = labels.map(str::to_owned).collect();
                metrics.insert(line[..end].to_owned(), MetricForm { kind: kind.clone(), unit: unit.clone(), labels });
            }
        }
    }
    metrics
}

/// Returns the rows of the table, by their names, with the column *given by*.
fn documented() -> BTreeMap<String, (MetricForm, String)> {
    let page = include_str!("../../../docs/metrics.md");
    let rows = page.lines().filter(|line| line.starts_with("| `ashlar_"));
    let parsed = rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let [_, name, kind, unit, labels, given, meaning, _] = &cells[..] else { panic!("{row} has other columns") };
        assert!(!meaning.is_empty(), "{row} has no meaning");
        let labels = labels.split(", ").filter(|label| !label.is_empty()).map(str::to_owned).collect();
        (name.clone(), (MetricForm { kind: kind.clone(), unit: unit.clone(), labels }, given.clone()))
    });
    parsed.collect()
}

#[test]
fn nodes_of_all_roles_give_the_documented_metrics() {
    let documented = documented();
    for (status, words) in samples() {
        let given = parse(&render_metrics(status));
        let expected = documented.iter().filter(|(_, (_, nodes))| words.contains(&nodes.as_str()));
        let expected: BTreeMap<_, _> = expected.map(|(name, (form, _))| (name.clone(), form.clone())).collect();
        assert_eq!(given, expected, "of a node with {words:?}");
    }
    let known: BTreeSet<_> = samples().into_iter().flat_map(|(_, words)| words).collect();
    let unknown: Vec<_> = documented.iter().filter(|(_, (_, nodes))| !known.contains(nodes.as_str())).collect();
    assert!(unknown.is_empty(), "no node gives {unknown:?}");
}

#[test]
fn text_keeps_to_the_format() {
    for (status, _) in samples() {
        let text = render_metrics(status);
        assert!(text.ends_with("\n# EOF\n"), "{text}");
        let mut families = BTreeSet::new();
        for line in text.lines().filter(|line| line.starts_with("# TYPE ")) {
            let name = line.split(' ').nth(2).expect("a name");
            assert!(families.insert(name), "{name} is there twice");
        }
        let mut series = BTreeSet::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            assert!(series.insert(name), "{name} is there twice");
            assert!(value.parse::<f64>().is_ok_and(f64::is_finite), "{line}");
        }
    }
}

#[test]
fn labels_name_no_process_or_user() {
    for (status, _) in samples() {
        let text = render_metrics(status);
        for secret in ["4242", "4141", "1042", "secret-program"] {
            assert!(!text.contains(secret), "{secret} is in\n{text}");
        }
    }
}

#[test]
fn values_are_those_of_the_status() {
    let text = render_metrics(samples().swap_remove(1).0);
    for line in [
        "ashlar_build_info{version=\"0.1.0\"} 1",
        r#"ashlar_arena_info{arena="/arena \"a\"\\n",medium="memory"} 1"#,
        "ashlar_uptime_seconds 200",
        "ashlar_blocks_free 75",
        "ashlar_sessions{kind=\"process\"} 2",
        "ashlar_sessions_fenced 1",
        "ashlar_log_used_bytes{kind=\"process\"} 200",
        "ashlar_session_operations{kind=\"mount\",operation=\"sync\"} 5",
        "ashlar_session_operations{kind=\"process\",operation=\"read\"} 18446744073709551615",
        "ashlar_leases_held 9",
        "ashlar_events_total{name=\"records_applied\"} 9",
        "ashlar_cluster_epoch 3",
        "ashlar_node_role{role=\"writer\"} 1",
        "ashlar_node_role{role=\"replica\"} 0",
        "ashlar_node_standing{standing=\"serving\"} 1",
        "ashlar_replication_in_sync 1",
        "ashlar_journal_end_bytes 5000",
        "ashlar_replication_lag_bytes 1000",
        "ashlar_replication_lag_seconds 1.5",
        "ashlar_replication_uncommitted_bytes 2000",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
    }
}
