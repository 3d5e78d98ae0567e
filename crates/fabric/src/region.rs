//! Memory that peers may reach without a message.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;

/// A region that a node has registered. A node gives out each number once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);

/// Bytes of a peer's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRange {
    /// The region, as its node has announced it in a message.
    pub region: RegionId,
    /// The first byte.
    pub offset: u64,
}

/// Registered memory.
///
/// The fabric's threads call it, with locks held: it must not call the fabric. It checks bounds; a refused access
/// closes the link that asked for it.
pub trait RegionMemory: Send + Sync {
    /// Returns the size in bytes.
    fn size_bytes(&self) -> u64;

    /// Stores bytes. They need not be durable when it returns.
    ///
    /// # Errors
    /// Bytes outside the region; memory that has been cut off.
    fn store(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Loads bytes.
    ///
    /// # Errors
    /// Those of [`RegionMemory::store`].
    fn load(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
}

/// A node's registered regions.
#[derive(Default)]
pub(crate) struct RegionTable {
    regions: RwLock<HashMap<RegionId, Arc<dyn RegionMemory>>>,
    last: AtomicU64,
}

impl RegionTable {
    pub(crate) fn register(&self, memory: Arc<dyn RegionMemory>) -> RegionId {
        let region = RegionId(self.last.fetch_add(1, Ordering::Relaxed) + 1);
        self.regions.write().insert(region, memory);
        region
    }

    /// Waits for accesses under way: each holds the lock.
    pub(crate) fn deregister(&self, region: RegionId) {
        self.regions.write().remove(&region);
    }

    pub(crate) fn store(&self, target: RegionRange, bytes: &[u8]) -> Result<(), String> {
        self.access(target, bytes.len(), |memory| memory.store(target.offset, bytes))
    }

    /// Loads bytes; the caller has checked that they are no more than a message has.
    pub(crate) fn load(&self, source: RegionRange, length: usize) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        self.access(source, length, |memory| {
            bytes.resize(length, 0);
            memory.load(source.offset, &mut bytes)
        })?;
        Ok(bytes)
    }

    fn access(
        &self,
        range: RegionRange,
        length: usize,
        run: impl FnOnce(&dyn RegionMemory) -> io::Result<()>,
    ) -> Result<(), String> {
        let guard = self.regions.read();
        let region = range.region.0;
        let memory = guard.get(&range.region).ok_or_else(|| format!("there is no region {region}"))?;
        let end = range.offset.checked_add(length as u64);
        if end.is_none_or(|end| end > memory.size_bytes()) {
            return Err(format!("{length} bytes at {} are outside region {region}", range.offset));
        }
        run(memory.as_ref()).map_err(|error| format!("{length} bytes at {} of region {region}: {error}", range.offset))
    }
}
