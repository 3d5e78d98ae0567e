//! Metrics of a node in the OpenMetrics text format, over HTTP.
//!
//! Purpose: [`render_metrics`] turns a status, the one that `ashlar status` shows, into text. [`MetricsServer`] answers
//! `GET /metrics` with it. The part of the node that runs at the moment fills a [`StatusSlot`]: SharedFS, a replica, or
//! a writer that waits. So the server lives as long as its process, whatever the node's role.
//!
//! Invariants:
//! - `docs/metrics.md` names each metric, and no other (`tests/documentation.rs`).
//! - Labels have few values: no process, file or user becomes one.
//! - Clients cost little: requests, connections and their time are bounded, and a status is read ten times a second at
//!   most. A client that is slow or silent delays no other.
//! - A port that can't be had stops no file system: the server tries again.
//!
//! Non-goals: other paths, TLS, access control. The address decides which machines reach it.
//!
//! Source: <https://prometheus.io/docs/specs/om/open_metrics_spec/>; RFC 9112 for HTTP/1.1.
#![forbid(unsafe_code)]

mod address;
mod exposition;
mod http;
mod server;
mod status_slot;

pub use address::{MetricsAddress, MetricsAddressError};
pub use exposition::{CONTENT_TYPE, render_metrics};
pub use server::MetricsServer;
pub use status_slot::{FilledStatus, StatusSlot, StatusSource};
