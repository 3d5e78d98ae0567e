//! The cores on which this process may run, and the binding of threads to cores.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores on which unbound threads may run; none are named if no thread is bound.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AllowedCores(Option<CpuSet>);

impl AllowedCores {
    /// Reads the calling thread's cores, if the system tells them.
    pub(crate) fn read() -> Option<Self> {
        sched_getaffinity(None).ok().map(|cores| Self(Some(cores)))
    }

    /// Whether a core is among them.
    pub(crate) fn has(&self, core: usize) -> bool {
        core < CpuSet::MAX_CPU && self.0.is_some_and(|cores| cores.is_set(core))
    }

    /// Lets the calling thread run on any core. It inherited the binding of the thread that started it.
    pub(crate) fn unbind_thread(&self) {
        if let Some(cores) = &self.0 {
            bind_thread(cores);
        }
    }
}

/// Binds the calling thread to a core. Returns whether it could.
pub(crate) fn bind_to_core(core: usize) -> bool {
    let mut cores = CpuSet::new();
    cores.set(core);
    bind_thread(&cores)
}

fn bind_thread(cores: &CpuSet) -> bool {
    let bound = sched_setaffinity(None, cores);
    if let Err(errno) = bound {
        tracing::debug!(%errno, "a thread was not bound to its cores");
    }
    bound.is_ok()
}
