//! A node of a cluster, as on a machine of its own: an arena, an address, a daemon, a mount.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use ashlar_tests::command::{Done, ashlar, eventually, kill, run, signal, wait};
use ashlar_tests::mount::{Medium, TestArena};
use ashlar_tests::{Outcome, ensure, tried};
use rustix::process::Signal;
use serde_json::Value;

/// The size of a node's arena.
pub const SIZE: &str = "512M";
/// The longest time that a change of a node may take, on two slow cores.
const PATIENCE: Duration = Duration::from_secs(60);

/// A node. A drop ends its processes and removes its arena.
pub struct Node {
    /// Its machine's name in the story.
    pub name: &'static str,
    /// The address at which it listens.
    pub address: String,
    /// Its arena and its mounts.
    pub site: TestArena,
    daemon: Option<Child>,
}

impl Node {
    /// Returns two nodes without arenas, which listen at free ports of this machine.
    pub fn pair() -> Outcome<[Self; 2]> {
        // Both ports are held until both are chosen.
        let ports = [free_port()?, free_port()?];
        let make = |name, port: &TcpListener| -> Outcome<Self> {
            let address = port.local_addr().map_err(tried("finding a free port"))?.to_string();
            Ok(Self { name, address, site: TestArena::new(Medium::Memory, SIZE)?.without_copy(), daemon: None })
        };
        Ok([make("A", &ports[0])?, make("B", &ports[1])?])
    }

    /// The file that invites this node into the other one's cluster.
    pub fn invitation(&self) -> PathBuf {
        self.site.outside().join("invitation")
    }

    /// Starts its daemon, and waits until it answers.
    pub fn start(&mut self) -> Outcome {
        let log = std::fs::File::create(self.site.outside().join("daemon.log")).map_err(tried("making a log"))?;
        let mut daemon = ashlar(&["daemon", "--arena"]);
        let daemon = daemon.arg(self.site.arena()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.daemon = Some(daemon.spawn().map_err(tried("starting a daemon"))?);
        eventually(&format!("{}'s daemon answers", self.name), PATIENCE, || self.state().is_ok())
    }

    /// Ends its daemon in order.
    pub fn stop(&mut self) -> Outcome {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        signal(daemon.id(), Signal::TERM)?;
        let status = wait(&mut daemon, PATIENCE)?;
        ensure!(status.success(), "{}'s daemon ended with {status}", self.name);
        Ok(())
    }

    /// Kills supervisor, SharedFS and the processes behind the mounts, as a loss of power does.
    pub fn kill_everything(&mut self) -> Outcome {
        let shared_fs = self.site.daemon()?;
        let mounts = self.site.mount_processes()?;
        // The supervisor first: it would start SharedFS again.
        let supervisor = self.daemon.take();
        supervisor.iter().map(Child::id).chain([shared_fs]).chain(mounts).try_for_each(kill)?;
        supervisor.map_or(Ok(()), |mut it| it.wait().map(drop)).map_err(tried("waiting for a killed daemon"))
    }

    /// Runs `ashlar` with arguments and its arena.
    pub fn ashlar(&self, arguments: &[&str]) -> Outcome<Done> {
        self.site.ashlar(arguments)?.success()
    }

    /// Returns the cluster's state as the node knows it.
    pub fn state(&self) -> Outcome<Value> {
        let state = self.site.status()?["daemon"]["cluster"].take();
        if state.is_null() { Err(format!("{} does not answer", self.name)) } else { Ok(state) }
    }

    /// Waits until the node's state meets a condition, and returns that state.
    pub fn wait_for(&self, what: &str, mut condition: impl FnMut(&Value) -> bool) -> Outcome<Value> {
        let mut last = Err("not asked".into());
        eventually(&format!("{} {what}", self.name), PATIENCE, || {
            last = self.state();
            last.as_ref().is_ok_and(&mut condition)
        })
        .map_err(|error| format!("{error}: {last:?}"))?;
        last
    }

    /// Promotes it as soon as it counts its writer as away, and waits until it serves.
    pub fn promote(&self) -> Outcome {
        let mut refusal = String::new();
        eventually("the replica is promoted", PATIENCE, || {
            let done = self.ashlar(&["node", "promote"]);
            refusal = done.as_ref().err().cloned().unwrap_or_default();
            done.is_ok()
        })
        .map_err(|error| format!("{error}: {refusal}"))?;
        self.wait_for("serves", |state| state["standing"] == "serving").map(drop)
    }

    /// Removes its arena. Its daemon must have ended.
    pub fn remove_arena(&self) -> Outcome {
        std::fs::remove_dir_all(self.site.arena()).map_err(tried("removing an arena"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // A failed story leaves a daemon. The supervisor ends first; SharedFS and mounts end with the arena.
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// Whether the writer's state says that its replica has everything that is acknowledged.
pub fn is_in_sync(state: &Value) -> bool {
    state["is_linked"] == true && state["in_sync"] == true && state["is_alone"] == false
}

/// The problems in a node's state, a sentence each.
pub fn problems(state: &Value) -> Vec<&str> {
    state["problems"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Compares the arenas of two nodes that have stopped. Returns the tree's counts.
pub fn compare(first: &Node, second: &Node) -> Outcome<Value> {
    let done = run(ashlar(&["fsck", "--json", "--compare"]).arg(first.site.arena()).arg(second.site.arena()))?;
    let report: Value = serde_json::from_str(&done.success()?.output).map_err(tried("reading the JSON of fsck"))?;
    ensure!(report["equal"] == true, "the arenas differ: {report}");
    let notes = &report["notes"];
    ensure!(notes.as_array().is_some_and(Vec::is_empty), "an arena lacks updates: {notes}");
    Ok(report["a"].clone())
}

fn free_port() -> Outcome<TcpListener> {
    TcpListener::bind("127.0.0.1:0").map_err(tried("finding a free port"))
}
