//! The terms under which a node grants.

use std::time::Duration;

use ashlar_pmem::MediumKind;

/// The terms under which a node grants.
#[derive(Clone, Copy, Debug)]
pub struct NodeLimits {
    /// Microseconds for which a fresh lease isn't revoked.
    pub lease_hold_us: u64,
    /// Microseconds after which an idle session loses its leases; 0: never.
    pub lease_ttl_us: u64,
    /// How long a request to make updates durable waits for the replica before it fails.
    pub replication_patience: Duration,
    /// The arena's medium.
    pub medium: MediumKind,
}

impl NodeLimits {
    /// Returns the limits of a node with an arena on this medium; leases are revoked at once, and never lost by
    /// idleness.
    #[must_use]
    pub const fn new(medium: MediumKind) -> Self {
        Self { lease_hold_us: 0, lease_ttl_us: 0, replication_patience: Duration::from_secs(30), medium }
    }
}
