//! The connection to the kernel: device, rings, replies and notifications.
pub(crate) mod device;
pub(crate) mod negotiate;
pub mod notify;
pub(crate) mod reply_buffer;
pub(crate) mod reply_route;
#[allow(unsafe_code)]
pub(crate) mod ring;
