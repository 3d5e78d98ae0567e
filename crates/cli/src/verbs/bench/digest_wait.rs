//! Waits for the digest, so that it burdens no other contender.

use std::time::{Duration, Instant};

use crate::error::CliError;
use crate::system::arena::ArenaLocation;
use crate::system::background::daemon_status;

/// How long to wait. Other processes may use the file system too, and then its logs are never empty.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often the state is read.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits until all records of the logs are applied and committed, and as many as possible are in huge pages. If other
/// processes go on writing, it gives up.
pub fn wait_for_digest(place: &ArenaLocation) -> Result<(), CliError> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let status = daemon_status(place)?.ok_or_else(|| CliError::NoDaemon(place.directory().to_owned()))?;
        let is_empty = status.sessions.iter().all(|session| session.log_used_bytes == 0);
        let waits = |(name, count): &(String, u64)| name == "huge_pages_waiting" && *count > 0;
        if is_empty && !status.counters.iter().any(waits) {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
