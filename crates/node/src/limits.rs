//! The terms under which a node grants.

use ashlar_pmem::MediumKind;

/// The terms under which a node grants.
#[derive(Clone, Copy, Debug)]
pub struct NodeLimits {
    /// Microseconds for which a fresh lease isn't revoked.
    pub lease_hold_us: u64,
    /// Microseconds after which an idle session loses its leases; 0: never.
    pub lease_ttl_us: u64,
    /// The arena's medium.
    pub medium: MediumKind,
}
