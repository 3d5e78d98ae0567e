//! Starts the threads that serve a mount, and ends them.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ashlar_helper::Helper;

use crate::connection::device::FuseDevice;
use crate::connection::negotiate::Agreement;
use crate::file_system::FileSystem;
use crate::operations::locks::cancel_waits;
use crate::serving::device_workers::DeviceWorkers;
use crate::serving::ring_workers::RingWorkers;
use crate::state::mount_state::MountState;

/// A mount's state, and the threads that serve it.
#[derive(Debug)]
pub(crate) struct Server<F> {
    mount: Arc<MountState<F>>,
    device_workers: Arc<DeviceWorkers>,
    ring_workers: Arc<RingWorkers>,
}

impl<F: FileSystem> Server<F> {
    pub(crate) fn new(
        file_system: Arc<F>,
        device: FuseDevice,
        threads: usize,
        (agreement, ring_workers): (Agreement, RingWorkers),
        helper: Helper,
    ) -> Self {
        Self {
            device_workers: Arc::new(DeviceWorkers::new(threads, ring_workers.are_any())),
            mount: Arc::new(MountState::new(file_system, device, agreement, ring_workers.allowed_cores(), helper)),
            ring_workers: Arc::new(ring_workers),
        }
    }

    /// Whether requests come by rings.
    pub(crate) fn has_rings(&self) -> bool {
        self.ring_workers.are_any()
    }

    /// Returns the device.
    pub(crate) fn device(&self) -> BorrowedFd<'_> {
        self.mount.device.as_fd()
    }

    /// Serves until the mount is gone, whose files show the device number `device_number`. The calling thread
    /// supervises the others.
    pub(crate) fn run(&self, device_number: u64) -> std::io::Result<()> {
        self.mount.device.set_nonblocking()?;
        let invalidating = Arc::clone(&self.mount);
        let forgetting = std::thread::Builder::new().name("ashlar-forget".into()).spawn(move || {
            let kernel_cache = &invalidating.kernel_cache;
            kernel_cache.invalidations.run_tasks(|task| kernel_cache.carry_out_task(task));
        })?;
        self.start_name_invalidation(device_number)?;
        self.start_watch_search(device_number)?;
        let started = self.ring_workers.start_cores(&self.mount);
        let served = started.and_then(|()| self.device_workers.run(&self.mount));
        cancel_waits(&self.mount);
        self.mount.kernel_cache.invalidations.close();
        self.ring_workers.join_threads();
        // If it panicked, that has been reported, and nothing is left that it could harm.
        let _ = forgetting.join();
        served
    }

    /// Starts the thread that makes the kernel forget names when the mount is no longer the sole mount. The thread ends
    /// with the process, and keeps nothing of the mount but its file system.
    fn start_name_invalidation(&self, device_number: u64) -> std::io::Result<()> {
        let (file_system, mount) = (Arc::clone(&self.mount.file_system), Arc::downgrade(&self.mount));
        let mut known = file_system.company();
        let watch = move || {
            loop {
                file_system.wait_company(known);
                let Some(mount) = mount.upgrade() else { return };
                let company = file_system.company();
                if company == known {
                    continue;
                }
                known = company;
                if file_system.is_shared() {
                    // The new session waits until this is done.
                    mount.watches.search_all(&*file_system, device_number);
                    mount.kernel_cache.drop_mappable_pages();
                    if mount.kernel_cache.forget_names() {
                        file_system.confirm_names_dropped(company);
                    }
                }
            }
        };
        std::thread::Builder::new().name("ashlar-company".into()).spawn(watch).map(drop)
    }

    /// Starts the thread that searches for watches on the mount. It ends with the process, and keeps nothing of the
    /// mount but its file system.
    fn start_watch_search(&self, device_number: u64) -> std::io::Result<()> {
        let (file_system, mount) = (Arc::clone(&self.mount.file_system), Arc::downgrade(&self.mount));
        let search = move || {
            loop {
                let Some(mount) = mount.upgrade() else { return };
                let pause = mount.watches.search_while_used(&*file_system, device_number);
                drop(mount);
                match pause {
                    Some(pause) => std::thread::sleep(pause),
                    None => file_system.wait_programs(),
                }
            }
        };
        std::thread::Builder::new().name("ashlar-watches".into()).spawn(search).map(drop)
    }
}
