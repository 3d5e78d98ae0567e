//! The threads that serve a mount.
pub(crate) mod device_turn;
pub(crate) mod device_workers;
pub(crate) mod ring_workers;
pub(crate) mod server;
