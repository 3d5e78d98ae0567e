//! Mirrors: each arena of a test is the writer's of a cluster, and its replica must have the same tree when the test
//! ends.
//!
//! `ashlar-suite --mirror` runs tests so. The process of a test learns it from the environment.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use rustix::process::Signal;

use crate::Outcome;
use crate::cluster::{PATIENCE, free_addresses, is_in_sync};
use crate::command::{
    ashlar, eventually, is_alive, kill_all, parent, processes_naming, run, signal, start_daemon, wait_for,
};
use crate::mount::TestArena;
use crate::shadows::ensure_served;

/// The variable that gives each arena of a test a replica, if it is not empty.
pub const MIRRORS: &str = "ASHLAR_MIRRORS";

/// How long the end of a session may take.
const SESSION_PATIENCE: Duration = Duration::from_secs(60);

/// The replica of a test's arena. A drop ends it.
#[derive(Debug)]
pub struct Mirror {
    arena: PathBuf,
    daemon: Child,
}

impl Mirror {
    /// Whether arenas are to have one.
    #[must_use]
    pub fn is_wanted() -> bool {
        std::env::var_os(MIRRORS).is_some_and(|value| !value.is_empty())
    }

    /// Makes a new arena the writer's of a cluster, whose replica is beside it.
    pub fn start(writer: &Path, size: &str) -> Outcome<Self> {
        let [first, second] = free_addresses()?;
        let (arena, invitation) = (writer.with_file_name("replica"), writer.with_file_name("invitation"));
        let invitation = invitation.display().to_string();
        let at = |words: &[&str], arena: &Path| run(ashlar(words).arg("--arena").arg(arena))?.success();
        at(&["cluster", "init", "--address", &first, "--size", size], writer)?;
        at(&["node", "add", &second, "--invitation", &invitation], writer)?;
        at(&["node", "join", &invitation, "--size", size], &arena)?;
        let daemon = start_daemon(&arena, &[])?;
        Ok(Self { arena, daemon })
    }

    /// Makes the replica's arena larger. Nothing happens if it would become smaller.
    pub fn grow(&self, size: &str) -> Outcome {
        let done = run(ashlar(&["arena", "resize", size, "--arena"]).arg(&self.arena))?;
        let is_smaller = done.errors.contains("can't be made smaller");
        if is_smaller { Ok(()) } else { done.success().map(drop) }
    }

    /// Ends all sessions and both nodes. Fails unless both have the same tree.
    pub fn compare(mut self, writer: &TestArena) -> Outcome {
        writer.clear_mounts();
        kill_all(&writer.recorded())?;
        ensure_served(writer.arena())?;
        let state = |arena: &Path| status_of(arena).map(|daemon| daemon["cluster"].clone());
        let mut last = None;
        eventually("all sessions have ended", SESSION_PATIENCE, || {
            last = status_of(writer.arena()).map(|daemon| daemon["sessions"].clone());
            last.as_ref().is_some_and(|sessions| sessions.as_array().is_some_and(Vec::is_empty))
        })
        .map_err(|error| format!("{error}: {last:?}"))?;
        let mut last = None;
        eventually("the replica has applied all", PATIENCE, || {
            last = state(writer.arena()).zip(state(&self.arena));
            last.as_ref().is_some_and(|(writer, replica)| {
                let end = &writer["journal_end"];
                is_in_sync(writer)
                    && writer["replication"]["durable"] == *end
                    && replica["replication"]["applied"] == *end
            })
        })
        .map_err(|error| format!("{error}: {last:?}"))?;
        let daemon = writer.daemon()?;
        let processes: Vec<_> = parent(daemon).into_iter().chain([daemon]).collect();
        signal(daemon, Signal::TERM)?;
        eventually("the writer's daemon ends", PATIENCE, || !processes.iter().any(|pid| is_alive(*pid)))?;
        signal(self.daemon.id(), Signal::TERM)?;
        wait_for(&mut self.daemon, PATIENCE)?.ok_or("the replica's daemon does not end")?;
        let done = run(ashlar(&["fsck", "--compare"]).arg(writer.arena()).arg(&self.arena))?;
        done.success().map(drop).map_err(|problem| format!("the replica is not equal: {problem}"))
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // After a comparison there is none left. A failed test may leave them in any state.
        let _ = kill_all(&processes_naming(&self.arena.display().to_string()));
        let _ = self.daemon.wait();
    }
}

/// Waits until the replica of a writer is in sync.
pub fn await_sync(writer: &Path) -> Outcome {
    eventually("the replica is in sync", PATIENCE, || {
        status_of(writer).is_some_and(|daemon| is_in_sync(&daemon["cluster"]))
    })
}

/// The status of an arena's daemon; `None` if none answers.
fn status_of(arena: &Path) -> Option<serde_json::Value> {
    let status = run(ashlar(&["status", "--json", "--arena"]).arg(arena)).ok()?;
    let mut report: serde_json::Value = serde_json::from_str(&status.output).ok()?;
    Some(report["arenas"][0]["daemon"].take()).filter(|daemon| !daemon.is_null())
}
