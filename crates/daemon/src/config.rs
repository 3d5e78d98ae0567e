//! The configuration of SharedFS.

use std::ffi::OsString;
use std::path::PathBuf;

use ashlar_metrics::MetricsAddress;
use ashlar_node::journal::ReplicaFault;
use ashlar_wire::Admission;

/// Bytes of a log on a large arena.
const LOG_BYTES_DEFAULT: u64 = 64 << 20;
/// The smallest log.
///
/// It must hold the longest record and leave room to digest beside it.
const LOG_BYTES_MIN: u64 = 4 << 20;

/// Longer than an answer takes to reach its session and be used.
const LEASE_HOLD_US: u64 = 200;
/// So long that a session that only reads asks again seldom.
///
/// Such a session shows no activity.
const LEASE_TTL_US: u64 = 600_000_000;

/// How to run SharedFS.
#[derive(Clone, Debug)]
pub struct Config {
    /// The arena's directory, which must exist already.
    pub arena: PathBuf,
    /// The socket to listen at; `ARENA/socket` by default.
    pub socket: PathBuf,
    /// Bytes of each session's log.
    ///
    /// A small arena gets smaller ones (an eighth of it, 4 MiB at least).
    pub log_bytes: u64,
    /// Milliseconds for which a mount's kernel may believe its cache.
    pub cache_ttl_ms: u64,
    /// Microseconds for which a fresh lease isn't revoked.
    ///
    /// So its holder makes progress.
    pub lease_hold_us: u64,
    /// Microseconds after which an idle session loses its leases; 0: never.
    ///
    /// Idle means that it neither logged nor asked anything.
    pub lease_ttl_us: u64,
    /// Seconds without any session after which SharedFS ends; `None`: it stays.
    pub linger_seconds: Option<u64>,
    /// The address at which metrics are served, if they are.
    pub metrics: Option<MetricsAddress>,
    /// The users whose programs may have sessions that come by no mount, as those that name the socket do.
    ///
    /// A mount has its own ([`ashlar_wire::MountTerms`]).
    pub sessions: Admission,
    /// The directory of the shadow, if there is one: a replica in this process, to test that two digests agree.
    pub shadow: Option<PathBuf>,
    /// A fault to plant in the shadow, which the comparison must find.
    pub shadow_fault: Option<ReplicaFault>,
    /// The command of the process that does the work that may have to wait for a mount.
    ///
    /// It runs [`ashlar_helper::run`] on its standard input. If it's empty, sessions get no descriptors.
    pub helper: Vec<OsString>,
}

impl Config {
    /// Returns the defaults for an arena.
    #[must_use]
    pub fn new(arena: impl Into<PathBuf>) -> Self {
        let arena = arena.into();
        Self {
            socket: ashlar_wire::socket_of(&arena),
            arena,
            log_bytes: LOG_BYTES_DEFAULT,
            cache_ttl_ms: 1000,
            lease_hold_us: LEASE_HOLD_US,
            lease_ttl_us: LEASE_TTL_US,
            linger_seconds: None,
            metrics: None,
            sessions: Admission::default(),
            shadow: None,
            shadow_fault: None,
            helper: Vec::new(),
        }
    }

    /// Returns the bytes of a log on an arena of `arena_bytes`.
    pub(crate) fn log_bytes_for(&self, arena_bytes: u64) -> u64 {
        self.log_bytes.min(arena_bytes / 8).max(LOG_BYTES_MIN) / 4096 * 4096
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_bytes_for_small_arena_are_smaller() {
        let config = Config::new("/arena");
        assert_eq!(config.log_bytes_for(1 << 40), 64 << 20);
        assert_eq!(config.log_bytes_for(64 << 20), 8 << 20);
        assert_eq!(config.log_bytes_for(16 << 20), 4 << 20);
        assert_eq!(config.socket, PathBuf::from("/arena/socket"));
    }
}
