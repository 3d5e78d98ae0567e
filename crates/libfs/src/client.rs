//! The session's connection to SharedFS: messages, request slot, descriptors.

pub(crate) mod own_descriptors;
pub(crate) mod request_slot;
pub(crate) mod sharedfs_client;
