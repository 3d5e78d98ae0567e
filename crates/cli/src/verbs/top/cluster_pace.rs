//! Replication in an interval, a line for each arena that is a member of a cluster.

use std::time::Duration;

use ashlar_types::escape_controls;
use ashlar_wire::{ClusterReport, NodeStanding};
use serde::Serialize;

use crate::output::size::Size;

/// Replication, as an arena's node knows it.
#[derive(Debug, Serialize)]
pub struct ClusterPace {
    node: u16,
    role: String,
    standing: NodeStanding,
    is_linked: bool,
    in_sync: bool,
    is_alone: bool,
    /// Bytes that are not durable at the replica, as a writer knows while the replica is linked.
    lag_bytes: Option<u64>,
    /// Milliseconds for which the oldest of them has waited.
    lag_ms: Option<u64>,
    /// Bytes that the replica has not committed to its store.
    uncommitted_bytes: Option<u64>,
    /// Bytes by which the journal, or its copy, has grown in one second.
    journal_bytes: Option<f64>,
    problems: Vec<String>,
}

impl ClusterPace {
    /// Returns the state now, and the rate since an earlier sample.
    ///
    /// Without one, and if a copy was cut since, the journal has no rate.
    pub fn new(earlier: Option<&ClusterReport>, now: &ClusterReport, passed: Duration) -> Self {
        let before = earlier.and_then(|report| report.journal_end);
        let grown = now.journal_end.zip(before).and_then(|(end, before)| end.checked_sub(before));
        Self {
            node: now.node,
            role: now.own_role().to_owned(),
            standing: now.standing,
            is_linked: now.is_linked,
            in_sync: now.in_sync,
            is_alone: now.is_alone,
            lag_bytes: now.lag_bytes(),
            lag_ms: now.replication.and_then(|progress| progress.lag_ms),
            uncommitted_bytes: now.uncommitted_bytes(),
            journal_bytes: grown.map(|bytes| bytes as f64 / passed.as_secs_f64().max(1e-3)),
            problems: now.problems.clone(),
        }
    }

    /// Returns whether the node serves sessions.
    pub fn serves(&self) -> bool {
        self.standing == NodeStanding::Serving
    }

    /// Formats it as one line.
    pub fn text(&self) -> String {
        let mut parts = vec![format!("node {}, {}", self.node, escape_controls(&self.role))];
        if self.standing != NodeStanding::Replaced {
            parts[0] += &format!(", {}", self.standing.name());
        }
        let sync = if self.in_sync { "in sync" } else { "not in sync" };
        match self.standing {
            NodeStanding::Replaced => {}
            NodeStanding::Following | NodeStanding::Copying | NodeStanding::Away => parts.push(sync.into()),
            _ if self.is_linked => parts.push(format!("replica linked, {sync}")),
            _ if self.is_alone => parts.push("no replica, fsync does not wait".into()),
            _ => parts.push("replica away, fsync waits".into()),
        }
        if let (Some(bytes), Some(time)) = (self.lag_bytes, self.lag_ms) {
            parts.push(format!("lag {}, {time} ms", Size(bytes)));
        }
        if let Some(bytes) = self.uncommitted_bytes {
            parts.push(format!("uncommitted {}", Size(bytes)));
        }
        if let Some(rate) = self.journal_bytes {
            parts.push(format!("journal {}/s", Size(rate as u64)));
        }
        match self.problems.len() {
            0 => {}
            1 => parts.push("1 problem, see 'ashlar status'".into()),
            count => parts.push(format!("{count} problems, see 'ashlar status'")),
        }
        parts.join("; ")
    }
}

#[cfg(test)]
pub mod tests {
    use ashlar_wire::{MemberReport, ReplicationReport};

    use super::*;

    /// Returns a report of node 0, whose other member is away.
    pub fn report(role: &str, standing: NodeStanding, end: u64) -> ClusterReport {
        ClusterReport {
            cluster: "0007".into(),
            node: 0,
            epoch: (1, 0),
            min_replicas: 2,
            members: vec![MemberReport { node: 0, address: "10.0.0.1:7900".into(), role: role.into() }],
            standing,
            is_linked: false,
            in_sync: false,
            is_alone: false,
            journal_end: Some(end),
            replication: None,
            copied_bytes: None,
            problems: vec![],
        }
    }

    fn pace(before: u64, now: &ClusterReport) -> ClusterPace {
        let earlier = report(now.own_role(), now.standing, before);
        ClusterPace::new(Some(&earlier), now, Duration::from_secs(2))
    }

    #[test]
    fn writer_shows_its_lag_and_the_journals_rate() {
        let replication = Some(ReplicationReport { durable: 8192, applied: None, committed: 6144, lag_ms: Some(3) });
        let serving = report("writer", NodeStanding::Serving, 10_240);
        let linked = ClusterReport { is_linked: true, in_sync: true, replication, ..serving.clone() };
        assert_eq!(
            pace(6144, &linked).text(),
            "node 0, writer, serving; replica linked, in sync; lag 2.0 KiB, 3 ms; uncommitted 4.0 KiB; journal 2.0 KiB/s"
        );
        let away = ClusterReport { problems: vec!["it is away".into()], ..serving.clone() };
        assert_eq!(
            pace(10_240, &away).text(),
            "node 0, writer, serving; replica away, fsync waits; journal 0 B/s; 1 problem, see 'ashlar status'"
        );
        let alone = ClusterReport { is_alone: true, ..serving };
        assert!(pace(0, &alone).text().contains("no replica, fsync does not wait"));
    }

    #[test]
    fn replica_shows_what_its_store_lacks() {
        let replication = Some(ReplicationReport { durable: 2048, applied: Some(1024), committed: 1024, lag_ms: None });
        let following = report("replica", NodeStanding::Following, 2048);
        let following = ClusterReport { is_linked: true, in_sync: true, replication, ..following };
        let pace = pace(0, &following);
        assert_eq!(pace.text(), "node 0, replica, following; in sync; uncommitted 1.0 KiB; journal 1.0 KiB/s");
        let json = serde_json::to_value(&pace).expect("JSON");
        assert_eq!((json["standing"].as_str(), json["journal_bytes"].as_f64()), (Some("following"), Some(1024.0)));
        assert!(json["lag_bytes"].is_null(), "{json}");
    }

    #[test]
    fn journal_that_was_cut_has_no_rate() {
        assert_eq!(pace(5000, &report("replica", NodeStanding::Away, 4000)).journal_bytes, None);
        let new = ClusterPace::new(None, &report("writer", NodeStanding::Serving, 5000), Duration::from_secs(1));
        assert_eq!(new.journal_bytes, None);
        let replaced = ClusterReport { journal_end: None, ..report("replaced", NodeStanding::Replaced, 0) };
        assert_eq!(pace(0, &replaced).text(), "node 0, replaced");
    }
}
