//! The task of one worker process.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::CliError;
use crate::system::arena::ArenaLocation;
use crate::verbs::bench::case::{Case, Contender, Step};
use crate::verbs::bench::digest_wait::wait_for_digest;
use crate::verbs::bench::worker::files::{LARGE, create, system};

/// A worker's task.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerTask {
    /// The case.
    pub case: Case,
    /// The contender.
    pub contender: Contender,
    /// The step.
    pub step: Step,
    /// The worker's number in a pair: 0 or 1.
    pub worker: u64,
    /// An empty directory to work in; both workers of a pair have the same one.
    pub directory: PathBuf,
    /// A directory for files that are not measured.
    pub aside: PathBuf,
    /// The arena, if the worker must wait for its digest.
    pub arena: Option<PathBuf>,
    /// The name of the arena's medium.
    pub medium: String,
    /// The length of an update log.
    pub log_bytes: u64,
    /// How often sustained cases fill it.
    pub laps: u64,
    /// Whether it may take minutes.
    pub is_long: bool,
}

impl WorkerTask {
    /// Whether the task measures the floor.
    pub fn is_floor(&self) -> bool {
        self.contender == Contender::Floor
    }

    /// Waits until the update logs are empty, if there are any.
    pub fn wait_for_digest(&self) -> Result<(), CliError> {
        match &self.arena {
            Some(arena) => wait_for_digest(&ArenaLocation::at(arena.clone())?),
            None => Ok(()),
        }
    }

    /// Fills the update log once, so that all its pages are in the page table of its writer, and empties it.
    pub fn warm_log(&self) -> Result<(), CliError> {
        if self.arena.is_none() {
            return Ok(());
        }
        let path = self.directory.join(format!("warm-{}", self.worker));
        let file = create(&path)?;
        let data = vec![3; LARGE];
        for _ in 0..=self.log_bytes / LARGE as u64 * 5 / 4 {
            file.write_all_at(&data, 0).map_err(system("writing", &path))?;
        }
        drop(file);
        fs::remove_file(&path).map_err(system("removing", &path))?;
        self.wait_for_digest()
    }
}
