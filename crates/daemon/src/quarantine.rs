//! Quarantines the files of fenced sessions.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ashlar_node::Node;
use ashlar_node::sessions::removal::record_quarantine;
use ashlar_pmem::Arena;
use ashlar_types::SessionId;

/// The number of quarantined sessions whose files are kept for inspection.
const FENCED_KEPT: usize = 8;

/// Quarantines fenced sessions.
///
/// Their files are kept for inspection, under names that no start takes up. SharedFS renames the log only after all
/// that it applied from it is committed: until then a restart needs the log.
pub fn quarantine_fenced(arena: &Arena, state: &mut Node) {
    for id in state.settled_fenced() {
        if let Err(error) = quarantine_session(arena, id) {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(session = id.0, %error, "a fenced session's files can't be quarantined");
            }
            continue;
        }
        tracing::warn!(session = id.0, "the fenced session's log is kept as sessions/fenced-{}.log", id.0);
        record_quarantine(state, id);
    }
}

/// Renames a session's files.
///
/// The log is first: without it, no start takes the session up.
pub fn quarantine_session(arena: &Arena, id: SessionId) -> io::Result<()> {
    let sessions = arena.dir().join("sessions");
    for extension in ["log", "control", "leases"] {
        fs::rename(sessions.join(format!("{id}.{extension}")), sessions.join(format!("fenced-{id}.{extension}")))?;
    }
    // The table of the process's mapped segments is needed until the process has ended, and no start takes it up.
    arena.remove_session(id).map_err(io::Error::other)?;
    remove_oldest_quarantined(&sessions)
}

/// Removes all but the files of the last few quarantined sessions.
///
/// A session that forges logs all day must not fill the arena. The times of the renames say which session came last,
/// since numbers are used again.
fn remove_oldest_quarantined(sessions: &Path) -> io::Result<()> {
    let number = |name: &str| name.strip_prefix("fenced-")?.split('.').next()?.parse::<u64>().ok();
    let mut kept = BTreeMap::<u64, ((i64, i64), Vec<PathBuf>)>::new();
    for file in fs::read_dir(sessions)? {
        let file = file?;
        if let Some(id) = file.file_name().to_str().and_then(number) {
            let metadata = file.metadata()?;
            let (renamed, paths) = kept.entry(id).or_default();
            *renamed = (*renamed).max((metadata.ctime(), metadata.ctime_nsec()));
            paths.push(file.path());
        }
    }
    let mut kept: Vec<_> = kept.into_values().collect();
    kept.sort();
    for path in kept.into_iter().rev().skip(FENCED_KEPT).flat_map(|(_, paths)| paths) {
        fs::remove_file(path)?;
    }
    Ok(())
}
