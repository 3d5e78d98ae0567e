//! The text: which metrics a status has.
//!
//! A metric is given only if the node knows its value: a replica has no sessions, and a writer doesn't know how far a
//! replica is that is away. So an absent metric never reads as 0.

use std::fmt;

use ashlar_types::escape_controls;
use ashlar_wire::{ClusterReport, NodeStanding, OperationKind, SessionKind, SessionStatus, StatusReply};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

/// The content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The prefix of all names.
const PREFIX: &str = "ashlar";
/// Named numbers of a status that rise and fall: each is a gauge of its own. The others are counters.
const LEVELS: [(&str, &str); 3] = [
    ("leases_held", "Leases that sessions hold."),
    ("lease_requests_waiting", "Requests that wait for a lease."),
    ("huge_pages_waiting", "Huge pages of the arena that are still to be made of small ones."),
];
/// The kinds of sessions, and their names.
const SESSION_KINDS: [(SessionKind, &str); 2] = [(SessionKind::Process, "process"), (SessionKind::Mount, "mount")];
/// The kinds of operations, and their names.
const OPERATIONS: [(OperationKind, &str); 4] = [
    (OperationKind::Read, "read"),
    (OperationKind::Write, "write"),
    (OperationKind::Name, "name"),
    (OperationKind::Sync, "sync"),
];
/// The roles of nodes.
const ROLES: [&str; 3] = ["writer", "replica", "replaced"];

/// Returns the metrics of a node in the OpenMetrics text format.
///
/// # Panics
/// Never: writing to a string does not fail.
#[must_use]
pub fn render_metrics(status: StatusReply) -> String {
    let mut registry = Registry::with_prefix(PREFIX);
    registry.register_collector(Box::new(StatusCollector(status)));
    let mut text = String::with_capacity(8 << 10);
    text::encode(&mut text, &registry).expect("a string takes all text");
    text
}

/// Gives a status as metrics.
#[derive(Debug)]
struct StatusCollector(StatusReply);

impl Collector for StatusCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let status = &self.0;
        let mut metrics = MetricWriter(encoder);
        write_node(&mut metrics, status)?;
        if status.cluster.as_ref().is_none_or(|cluster| cluster.standing == NodeStanding::Serving) {
            write_space(&mut metrics, status)?;
            write_sessions(&mut metrics, &status.sessions)?;
            write_counters(&mut metrics, &status.counters)?;
        }
        if let Some(cluster) = &status.cluster {
            write_cluster(&mut metrics, cluster)?;
            write_replication(&mut metrics, cluster)?;
        }
        Ok(())
    }
}

/// Writes families of metrics.
struct MetricWriter<'a>(DescriptorEncoder<'a>);

/// The labels of one metric of a family: names and values.
type MetricLabels<'a> = Vec<(&'a str, &'a str)>;

impl MetricWriter<'_> {
    fn info(&mut self, name: &str, help: &str, labels: &[(&str, String)]) -> fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Info)?.encode_info(&labels)
    }

    fn gauge(&mut self, name: &str, unit: Option<Unit>, help: &str, value: &impl EncodeGaugeValue) -> fmt::Result {
        self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?.encode_gauge(value)
    }

    fn gauges<'a>(
        &mut self,
        name: &str,
        unit: Option<Unit>,
        help: &str,
        values: impl Iterator<Item = (MetricLabels<'a>, u64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for (labels, value) in values {
            encoder.encode_family(&labels)?.encode_gauge(&value)?;
        }
        Ok(())
    }

    /// Writes a gauge for each of several states: 1 for the present one, and 0 for the others.
    fn states(&mut self, name: &str, help: &str, states: &[&str], present: &str) -> fmt::Result {
        let values = states.iter().map(|&state| (vec![(name_of_label(name), state)], u64::from(state == present)));
        self.gauges(name, None, help, values)
    }

    fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl Iterator<Item = (MetricLabels<'a>, u64)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in values {
            encoder.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)?;
        }
        Ok(())
    }
}

/// Returns the label of a family of states: the last word of its name.
fn name_of_label(family: &str) -> &str {
    family.rsplit('_').next().unwrap_or(family)
}

fn write_node(metrics: &mut MetricWriter<'_>, status: &StatusReply) -> fmt::Result {
    let printable = |text: &str| escape_controls(text).into_owned();
    metrics.info("build", "The version of Ashlar.", &[("version", printable(&status.version))])?;
    let arena = [("arena", printable(&status.arena)), ("medium", printable(&status.medium))];
    metrics.info("arena", "The arena's directory, and its medium.", &arena)?;
    metrics.gauge("uptime", Some(Unit::Seconds), "Time since SharedFS started.", &status.uptime_seconds)?;
    metrics.gauge("arena", Some(Unit::Bytes), "The arena's size.", &status.arena_bytes)
}

fn write_space(metrics: &mut MetricWriter<'_>, status: &StatusReply) -> fmt::Result {
    let space = &status.space;
    metrics.gauge("blocks", None, "Data blocks of 4096 bytes.", &space.blocks_total)?;
    metrics.gauge("blocks_free", None, "Data blocks that are neither used nor granted.", &space.blocks_free)?;
    metrics.gauge("inodes", None, "The largest number of inodes.", &space.inodes_total)?;
    metrics.gauge("inodes_free", None, "Inodes that can still be created.", &space.inodes_free)
}

fn write_sessions(metrics: &mut MetricWriter<'_>, sessions: &[SessionStatus]) -> fmt::Result {
    let sums = |number: fn(&SessionStatus) -> u64| {
        SESSION_KINDS.map(|(kind, name)| {
            let of_kind = sessions.iter().filter(|session| session.kind == kind);
            (vec![("kind", name)], of_kind.map(number).fold(0, u64::saturating_add))
        })
    };
    metrics.gauges("sessions", None, "Sessions.", sums(|_| 1).into_iter())?;
    let fenced = sessions.iter().filter(|session| session.fenced.is_some()).count();
    metrics.gauge("sessions_fenced", None, "Sessions that are fenced for a violation.", &fenced)?;
    let bytes = || Some(Unit::Bytes);
    metrics.gauges("log", bytes(), "The size of all logs.", sums(|session| session.log_bytes).into_iter())?;
    let help = "Bytes in logs that are not committed yet.";
    metrics.gauges("log_used", bytes(), help, sums(|session| session.log_used_bytes).into_iter())?;
    let help = "Records that were digested of the logs of present sessions.";
    metrics.gauges("session_records", None, help, sums(|session| session.records).into_iter())?;
    let help = "Bytes that were digested of the logs of present sessions.";
    metrics.gauges("session_digested", bytes(), help, sums(|session| session.digested_bytes).into_iter())?;
    let operations = OPERATIONS.iter().flat_map(|&(operation, operation_name)| {
        SESSION_KINDS.map(|(kind, kind_name)| {
            let of_kind = sessions.iter().filter(|session| session.kind == kind);
            let counted = of_kind.filter_map(|session| session.operations.get(operation as usize));
            // Sessions write these counts, so they may be anything.
            let sum = counted.map(|counts| counts.operations).fold(0, u64::saturating_add);
            (vec![("kind", kind_name), ("operation", operation_name)], sum)
        })
    });
    metrics.gauges("session_operations", None, "Operations that present sessions have counted.", operations)
}

fn write_counters(metrics: &mut MetricWriter<'_>, counters: &[(String, u64)]) -> fmt::Result {
    for (name, help) in LEVELS {
        if let Some((_, value)) = counters.iter().find(|(counter, _)| counter == name) {
            metrics.gauge(name, None, help, value)?;
        }
    }
    let events = counters.iter().filter(|(counter, _)| LEVELS.iter().all(|(name, _)| counter != name));
    let events = events.map(|(name, count)| (vec![("name", name.as_str())], *count));
    metrics.counters("events", "Events since SharedFS started.", events)
}

fn write_cluster(metrics: &mut MetricWriter<'_>, cluster: &ClusterReport) -> fmt::Result {
    let labels = [("cluster", escape_controls(&cluster.cluster).into_owned()), ("node", cluster.node.to_string())];
    metrics.info("cluster", "The cluster, and this node's number.", &labels)?;
    metrics.gauge("cluster_epoch", None, "The number of the epoch.", &cluster.epoch.0)?;
    metrics.gauge("cluster_min_replicas", None, "Nodes that fsync waits for.", &u32::from(cluster.min_replicas))?;
    metrics.gauge("cluster_problems", None, "Problems that status shows.", &cluster.problems.len())?;
    metrics.states("node_role", "This node's role: 1 for the present one.", &ROLES, cluster.own_role())?;
    let standings = NodeStanding::ALL.map(NodeStanding::name);
    metrics.states("node_standing", "This node's standing: 1 for the present one.", &standings, cluster.standing.name())
}

fn write_replication(metrics: &mut MetricWriter<'_>, cluster: &ClusterReport) -> fmt::Result {
    let mut flag = |name, help, value| metrics.gauge(name, None, help, &u32::from(value));
    flag("replication_linked", "1 if the link to the other node is up.", cluster.is_linked)?;
    flag("replication_in_sync", "1 if the replica is in sync.", cluster.in_sync)?;
    flag("replication_alone", "1 if the writer acknowledges without its replica.", cluster.is_alone)?;
    let bytes = || Some(Unit::Bytes);
    if let Some(end) = cluster.journal_end {
        metrics.gauge("journal_end", bytes(), "The end of this node's journal, or of its copy.", &end)?;
    }
    let Some(progress) = &cluster.replication else { return Ok(()) };
    let help = "The position up to which the replica's copy of the journal is durable.";
    metrics.gauge("journal_durable", bytes(), help, &progress.durable)?;
    if let Some(applied) = progress.applied {
        let help = "The position up to which this replica has applied the journal.";
        metrics.gauge("journal_applied", bytes(), help, &applied)?;
    }
    let help = "The position up to which the replica has committed the journal.";
    metrics.gauge("journal_committed", bytes(), help, &progress.committed)?;
    if let Some(uncommitted) = cluster.uncommitted_bytes() {
        let help = "Bytes of the journal that the replica has not committed.";
        metrics.gauge("replication_uncommitted", bytes(), help, &uncommitted)?;
    }
    if let Some(lag) = cluster.lag_bytes() {
        let help = "Bytes of the journal that are not durable at the replica.";
        metrics.gauge("replication_lag", bytes(), help, &lag)?;
    }
    if let Some(lag_ms) = progress.lag_ms {
        let help = "Time for which the oldest frame has waited for the replica.";
        metrics.gauge("replication_lag", Some(Unit::Seconds), help, &(lag_ms as f64 / 1000.0))?;
    }
    Ok(())
}
