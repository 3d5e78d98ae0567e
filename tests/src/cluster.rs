//! Clusters of two nodes on this machine, by `ashlar dev`.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::command::{Done, ashlar, call, eventually, run};
use crate::mount::{keep_complaints, prefix};
use crate::reference::unmount;
use crate::{Outcome, ensure, open_directory, tried};

/// How long a node may take to start, to come into sync or to end.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// The most mounts that a test makes of a cluster.
const MOUNTS_MAX: usize = 4;
/// Where `ashlar dev` keeps root's records.
const RECORDS: &str = "/run/ashlar/dev";

/// Numbers the clusters of this process.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// The choices of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct ClusterOptions {
    /// How many copies an acknowledgement needs.
    pub copies: u8,
    /// The size of each arena.
    pub size: &'static str,
    /// The replica's arena is on a file system of its own, of this size.
    pub replica_disk: Option<&'static str>,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self { copies: 2, size: "64M", replica_disk: None }
    }
}

/// A cluster of a test's own, in memory. A drop removes all of it.
#[derive(Debug)]
pub struct TestCluster {
    name: String,
    /// Mount points and journals.
    directory: TempDir,
    /// Both arenas.
    arenas: TempDir,
    has_disk: bool,
}

impl TestCluster {
    /// Makes a cluster whose replica is in sync.
    pub fn up(options: ClusterOptions) -> Outcome<Self> {
        let pid = std::process::id();
        let arenas = TempDir::with_prefix_in(prefix(pid), "/dev/shm").map_err(tried("making a directory"))?;
        let cluster = Self {
            name: format!("{}{}", cluster_prefix(pid), NEXT.fetch_add(1, Ordering::Relaxed)),
            directory: open_directory(&prefix(pid))?,
            arenas,
            has_disk: options.replica_disk.is_some(),
        };
        if let Some(size) = options.replica_disk {
            let disk = cluster.arena(1);
            std::fs::create_dir(&disk).map_err(tried("making a directory"))?;
            let size = format!("size={size},mode=0755");
            call("mount", &["-t", "tmpfs", "-o", &size, "ashlar-test", &disk.display().to_string()])?.success()?;
        }
        let copies = options.copies.to_string();
        let arenas = cluster.arenas.path().display().to_string();
        let words = ["up", "2", "--min-replicas", &copies, "--size", options.size, "--directory", &arenas];
        cluster.dev(&words)?.success()?;
        Ok(cluster)
    }

    /// `ashlar dev` with arguments, on this cluster.
    pub fn dev(&self, arguments: &[&str]) -> Outcome<Done> {
        run(ashlar(&["dev"]).args(arguments).args(["--name", &self.name]))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The arena of a node.
    #[must_use]
    pub fn arena(&self, node: usize) -> PathBuf {
        self.arenas.path().join(format!("node{node}"))
    }

    /// A directory of the host's file system, outside the mounts.
    #[must_use]
    pub fn outside(&self) -> &Path {
        self.directory.path()
    }

    /// The directory of mount `number`.
    #[must_use]
    pub fn point(&self, number: usize) -> PathBuf {
        self.directory.path().join(format!("mount{number}"))
    }

    /// `ashlar` with arguments and a node's arena.
    pub fn ashlar(&self, node: usize, arguments: &[&str]) -> Outcome<Done> {
        run(ashlar(arguments).arg("--arena").arg(self.arena(node)))
    }

    /// Tries to mount a node's file system at directory `number`.
    pub fn try_mount(&self, node: usize, number: usize) -> Outcome<Done> {
        let point = self.point(number);
        match std::fs::create_dir(&point) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                Err(format!("making {}: {error}", point.display()))
            }
            _ => self.ashlar(node, &["mount", "--sessions", "all", &point.display().to_string()]),
        }
    }

    /// Mounts a node's file system at directory `number`.
    pub fn mount(&self, node: usize, number: usize) -> Outcome<Done> {
        self.try_mount(node, number)?.success()
    }

    /// Unmounts directory `number`.
    pub fn umount(&self, number: usize) -> Outcome<Done> {
        run(ashlar(&["umount"]).arg(self.point(number)))?.success()
    }

    /// Kills all processes of a node: its daemon, and those behind its mounts.
    pub fn kill(&self, node: usize) -> Outcome<Done> {
        self.dev(&["kill", &node.to_string()])?.success()
    }

    /// Starts the daemon of a node.
    pub fn start(&self, node: usize) -> Outcome<Done> {
        self.dev(&["start", &node.to_string()])?.success()
    }

    /// Ends the daemon of a node in order.
    pub fn stop(&self, node: usize) -> Outcome<Done> {
        self.dev(&["stop", &node.to_string()])?.success()
    }

    /// Promotes a node.
    pub fn promote(&self, node: usize, is_forced: bool) -> Outcome<Done> {
        self.ashlar(node, if is_forced { &["node", "promote", "--force"] } else { &["node", "promote"] })
    }

    /// Promotes a node as soon as it counts its writer as away, and waits until it serves.
    pub fn promote_in_time(&self, node: usize, is_forced: bool) -> Outcome {
        let mut problem = String::new();
        eventually("the replica is promoted", PATIENCE, || {
            let done = self.promote(node, is_forced).and_then(Done::success);
            let is_done = done.is_ok();
            problem = done.err().unwrap_or_default();
            is_done
        })
        .map_err(|error| format!("{error}: {problem}"))?;
        self.wait_for(node, "it serves", |state| state["standing"] == "serving")
    }

    /// The output of `ashlar dev status --json` about a node.
    pub fn node(&self, node: usize) -> Outcome<Value> {
        let done = self.dev(&["status", "--json"])?.success()?;
        let report: Value = serde_json::from_str(&done.output).map_err(tried("reading the JSON of status"))?;
        report["nodes"].get(node).cloned().ok_or_else(|| format!("no node {node} in {report}"))
    }

    /// The state of the cluster as a node knows it.
    pub fn state(&self, node: usize) -> Outcome<Value> {
        let status = self.ashlar(node, &["status", "--json"])?.success()?;
        let report: Value = serde_json::from_str(&status.output).map_err(tried("reading the JSON of status"))?;
        let state = &report["arenas"][0]["daemon"]["cluster"];
        if state.is_null() { Err(format!("node {node} does not answer: {report}")) } else { Ok(state.clone()) }
    }

    /// Waits until a node's view of the cluster meets a condition.
    pub fn wait_for(&self, node: usize, what: &str, condition: impl Fn(&Value) -> bool) -> Outcome {
        let mut last = Ok(Value::Null);
        let result = eventually(&format!("node {node}: {what}"), PATIENCE, || {
            last = self.state(node);
            last.as_ref().is_ok_and(&condition)
        });
        result.map_err(|error| format!("{error}: {last:?}"))
    }

    /// Waits until the replica is in sync with the writer.
    pub fn wait_in_sync(&self, writer: usize) -> Outcome {
        self.wait_for(writer, "the replica is in sync", is_in_sync)
    }

    /// Waits until the replica has applied the whole journal. No process may write meanwhile.
    pub fn wait_until_applied(&self, writer: usize) -> Outcome {
        self.wait_for(writer, "the replica has all frames", |state| {
            let progress = &state["replication"];
            !progress.is_null() && progress["durable"] == state["journal_end"]
        })?;
        let end = self.state(writer)?["journal_end"].clone();
        self.wait_for(1 - writer, "it has applied all frames", |state| state["replication"]["applied"] == end)
    }

    /// The sessions of a node, as its status shows them.
    pub fn sessions(&self, node: usize) -> Outcome<Vec<Value>> {
        Ok(self.node(node)?["daemon"]["sessions"].as_array().cloned().unwrap_or_default())
    }

    /// Fails if a session of a node was fenced.
    pub fn expect_no_fence(&self, node: usize) -> Outcome {
        let sessions = self.sessions(node)?;
        let fenced = sessions.iter().find(|session| !session["fenced"].is_null());
        fenced.map_or(Ok(()), |session| Err(format!("a session of node {node} is fenced: {session}")))
    }

    /// Checks a node's arena, in use or not; fails unless it is clean.
    pub fn check(&self, node: usize) -> Outcome {
        let done = self.ashlar(node, &["fsck", "--json"])?;
        ensure!(done.status.success(), "the check of node {node} is not clean: {}", done.describe());
        Ok(())
    }

    /// Ends both daemons in order. Fails unless both arenas are clean and hold the same tree. Nothing may be mounted.
    pub fn compare_at_rest(&self, writer: usize) -> Outcome {
        self.wait_in_sync(writer)?;
        self.wait_until_applied(writer)?;
        self.stop(writer)?;
        self.stop(1 - writer)?;
        self.check(0)?;
        self.check(1)?;
        run(ashlar(&["fsck", "--compare"]).args([self.arena(0), self.arena(1)]))?.success()?;
        Ok(())
    }

    /// Fills the file system of the replica's arena to the last byte.
    pub fn fill_replica_disk(&self) -> Outcome {
        let filler = self.filler();
        let done = run(Command::new("dd").args(["if=/dev/zero", "bs=64K"]).arg(format!("of={}", filler.display())))?;
        ensure!(done.errors.contains("No space left"), "the disk did not fill up: {}", done.describe());
        Ok(())
    }

    /// Makes room again on the file system of the replica's arena.
    pub fn free_replica_disk(&self) -> Outcome {
        std::fs::remove_file(self.filler()).map_err(tried("removing the file that fills the disk"))
    }

    fn filler(&self) -> PathBuf {
        self.arena(1).join("filler")
    }
}

impl Drop for TestCluster {
    fn drop(&mut self) {
        (0..2).for_each(|node| keep_complaints(&self.arena(node)));
        // A failed test may leave anything behind. 'down' ends processes and removes their mounts.
        if let Ok(done) = self.dev(&["down"])
            && !done.status.success()
        {
            eprintln!("cluster {} was not removed: {}", self.name, done.describe());
        }
        (0..MOUNTS_MAX).for_each(|number| unmount(&self.point(number)));
        if self.has_disk {
            unmount(&self.arena(1));
        }
    }
}

/// Whether a writer, by its own state, has a replica in sync.
#[must_use]
pub fn is_in_sync(state: &Value) -> bool {
    state["is_linked"] == true && state["in_sync"] == true && state["is_alone"] == false
}

/// Two free addresses of this machine.
pub fn free_addresses() -> Outcome<[String; 2]> {
    let port = || TcpListener::bind("127.0.0.1:0").map_err(tried("finding a free port"));
    let address = |port: TcpListener| port.local_addr().map_err(tried("reading a port")).map(|at| at.to_string());
    let (one, two) = (port()?, port()?);
    Ok([address(one)?, address(two)?])
}

/// The beginning of the names of clusters that process `pid` makes.
fn cluster_prefix(pid: u32) -> String {
    format!("test-{pid}-")
}

/// Removes the clusters of a killed test.
pub fn clear_clusters_behind(pid: u32) {
    let prefix = cluster_prefix(pid);
    let records = std::fs::read_dir(RECORDS).into_iter().flatten().flatten();
    for name in records.filter_map(|record| record.file_name().into_string().ok()) {
        if name.starts_with(&prefix) {
            // Only the removal matters, as far as it goes.
            let _ = run(ashlar(&["dev", "down", "--name"]).arg(name));
        }
    }
}
