//! A cluster's own certificates: its authority, and what each node proves its number with.
//!
//! A certificate is valid for a hundred years. Clocks of machines can't be trusted: a node whose clock was reset must
//! reach its cluster. A node loses its access when it leaves the list of members, which names arenas; a certificate
//! alone opens nothing.

mod authority;
mod credentials;
mod error;
mod key_file;

pub use authority::ClusterAuthority;
pub use credentials::NodeCredentials;
pub use error::CredentialsError;

pub(crate) use credentials::{ParsedCredentials, check_name, node_name};
