//! The records of a mount about the kernel, its callers and its handles.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ashlar_helper::Helper;

use crate::callers::report_runs::ReportRuns;
use crate::callers::watches::Watches;
use crate::connection::device::FuseDevice;
use crate::connection::negotiate::Agreement;
use crate::kernel_cache::coherence::KernelCache;
use crate::kernel_cache::estale_retry::EstaleRetries;
use crate::state::allowed_cores::AllowedCores;
use crate::state::locks::Locks;
use crate::state::write_handles::WriteHandles;

/// The state of a mount. All threads that serve it share one.
#[derive(Debug)]
pub(crate) struct MountState<F> {
    pub(crate) file_system: Arc<F>,
    pub(crate) device: Arc<FuseDevice>,
    pub(crate) kernel_cache: KernelCache<F>,
    pub(crate) locks: Locks,
    pub(crate) write_handles: WriteHandles,
    pub(crate) agreement: Agreement,
    pub(crate) estale_retries: EstaleRetries,
    pub(crate) report_runs: ReportRuns,
    pub(crate) watches: Watches,
    pub(crate) allowed_cores: AllowedCores,
    /// The number of the next handle, without its flags.
    pub(crate) next_handle: AtomicU64,
}

impl<F> MountState<F> {
    pub(crate) fn new(
        file_system: Arc<F>,
        device: FuseDevice,
        agreement: Agreement,
        allowed_cores: AllowedCores,
        helper: Helper,
    ) -> Self {
        let device = Arc::new(device);
        let kernel_cache = KernelCache::new(Arc::clone(&file_system), Arc::clone(&device), agreement.expires(), helper);
        Self {
            file_system,
            device,
            kernel_cache,
            locks: Locks::default(),
            write_handles: WriteHandles::default(),
            agreement,
            estale_retries: EstaleRetries::default(),
            report_runs: ReportRuns::default(),
            watches: Watches::default(),
            allowed_cores,
            next_handle: AtomicU64::new(0),
        }
    }
}
