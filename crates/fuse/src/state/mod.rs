//! The state of a mount, which all threads that serve it share.
pub(crate) mod allowed_cores;
pub(crate) mod locks;
pub(crate) mod mount_state;
pub(crate) mod write_handles;
