//! Links between the nodes of a cluster.
//!
//! Purpose: one trait, [`Fabric`], that carries messages and one-sided writes between nodes, whatever is between them.
//! [`TcpFabric`] runs on plain sockets, with mutual TLS or without. [`TwinNetwork`] has fabrics in memory, in virtual
//! time and with faults. A provider for RDMA comes later and must pass the same conformance suite (`tests/`).
//!
//! Invariants:
//! - A link is up only between two *members* of one cluster: each side has proved its node number, its arena and its
//!   cluster to the other, and both have a protocol version in common. Anything else changes nothing, and leaves one
//!   line in the log.
//! - Messages of a link arrive whole, in the order of sending, once. A link that loses or damages one is closed.
//! - A one-sided write is there before any message that was sent behind it arrives.
//! - After [`Fabric::close`] returns, nothing that the peer wrote lands in memory, and no event of the link follows.
//! - Every queue has a bound: a sender learns that a link is full, and nothing grows.
//! - Waiting uses no CPU: one thread of a node waits for all of its links.
//!
//! Not here: what messages mean, which node may be the writer, when a silent peer counts as dead. The handshake carries
//! both epochs, and refuses a member whose epoch is older than the oldest that is accepted of it; all else is decided
//! by the layers above.
//!
//! Source: `docs/format-link.md`; DESIGN §5; Assise §3.2 and LineFS §4 for what replication asks of it.
#![forbid(unsafe_code)]

mod certificates;
mod error;
mod event;
mod frame;
mod handshake;
mod member;
mod provider;
mod reason_filter;
mod region;
mod tcp;
mod transfer_window;
mod twin;

pub use certificates::{ClusterAuthority, CredentialsError, NodeCredentials};
pub use error::{CloseReason, FabricError, LinkRefusal, SendError};
pub use event::{Event, LinkId, PeerIdentity, TransferId};
pub use member::{FabricIdentity, Member};
pub use provider::{Fabric, LinkUsage, MESSAGE_BYTES_MAX, QUEUE_BYTES_MAX, READ_BYTES_MAX, TRANSFERS_MAX};
pub use reason_filter::ReasonFilter;
pub use region::{RegionId, RegionMemory, RegionRange};
pub use tcp::{Security, TcpFabric};
pub use twin::{TwinFabric, TwinNetwork};
