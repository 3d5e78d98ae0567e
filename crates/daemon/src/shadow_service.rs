//! Runs the shadow: its thread, and the comparison of the trees.

use std::path::Path;

use ashlar_node::pending::NodeRequest;
use ashlar_replica::Shadow;
use ashlar_store::{DumpComparison, DumpSummary, StoreError};
use ashlar_types::Errno;
use ashlar_wire::{ComparedTree, ComparisonReply, TreeDifference};
use parking_lot::Mutex;

use crate::digest::apply_all;
use crate::shared_state::SharedState;

/// Compares SharedFS's tree with the shadow's, both at the journal's end.
///
/// # Errors
/// `ENXIO` if SharedFS has no shadow there; `EIO` if a tree can't be read.
pub fn compare_trees(shared: &SharedState, directory: &Path) -> Result<Box<ComparisonReply>, Errno> {
    let shadow = shared.shadow.as_ref().ok_or(Errno::ENXIO)?;
    let failed = |error: StoreError| {
        tracing::error!(%error, "the trees can't be compared");
        Errno::EIO
    };
    let mut state = shared.lock();
    if !is_same_directory(directory, shadow.lock().path()) {
        return Err(Errno::ENXIO);
    }
    // A commit may be under way, which needs the lock to end.
    state.perform(NodeRequest::Commit)?;
    apply_all(&mut state);
    // No frame may follow: the lock is held until both trees are read.
    shared.commit(&mut state).map_err(failed)?;
    let mut shadow = shadow.lock();
    shadow.catch_up(&mut state).map_err(failed)?;
    let journal = state.journal.as_ref().ok_or(Errno::ENXIO)?;
    if !shadow.is_level(journal) {
        tracing::error!(journal = ?journal.mark(), "the shadow has not applied all of the journal");
        return Err(Errno::EIO);
    }
    let compared = shadow.compare(&state.store).map_err(failed)?;
    Ok(Box::new(describe_comparison(&compared)))
}

/// Returns a comparison as it is sent and printed.
#[must_use]
pub fn describe_comparison(compared: &DumpComparison) -> ComparisonReply {
    let tree = |summary: &DumpSummary| ComparedTree {
        inodes: summary.inodes,
        entries: summary.entries,
        bytes: summary.bytes,
        sha256: summary.hash.to_string(),
    };
    let differences = compared.differences.iter().map(|difference| TreeDifference {
        subject: difference.subject.to_string(),
        attribute: difference.attribute.clone(),
        a: difference.first.clone(),
        b: difference.second.clone(),
        text: difference.to_string(),
    });
    ComparisonReply {
        first: tree(&compared.first),
        second: tree(&compared.second),
        differences_count: compared.differences_count,
        differences: differences.collect(),
    }
}

fn is_same_directory(one: &Path, two: &Path) -> bool {
    matches!((one.canonicalize(), two.canonicalize()), (Ok(one), Ok(two)) if one == two)
}

/// Runs the shadow's thread: sends it what is new in the journal.
pub fn shadow_thread(shared: &SharedState) {
    let Some(shadow) = &shared.shadow else { return };
    if let Err(error) = follow(shared, shadow) {
        tracing::error!(%error, "SharedFS ends");
        shared.lock().failure.get_or_insert(error);
        shared.stop();
    }
}

/// Sends the shadow what is new, until SharedFS ends.
fn follow(shared: &SharedState, shadow: &Mutex<Shadow>) -> Result<(), StoreError> {
    let mut state = shared.lock();
    loop {
        let Some(journal) = state.journal.as_mut() else { return Ok(()) };
        let mut locked = shadow.lock();
        let is_new = locked.take_frames(journal)?;
        if is_new {
            drop(state);
            locked.apply_frames()?;
            drop(locked);
            state = shared.lock();
        } else {
            drop(locked);
            state.wait(&shared.journal_grew);
        }
        if state.is_over() {
            return Ok(());
        }
    }
}
