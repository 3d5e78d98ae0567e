//! The shared area: metadata in LMDB, extents, block allocator, data segments.

mod error;
mod name_hash;
mod api_stub;

pub use api_stub::*;
pub use error::StoreError;
pub use name_hash::{name_cookie, COOKIE_FIRST};
