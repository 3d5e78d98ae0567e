//! The session protocol between LibFS and SharedFS: messages, and words in shared memory.
//!
//! Purpose: one place for everything on which both sides must agree. Messages go over a unix socket. A session has any
//! number of connections to SharedFS. On each connection, a request is followed by its reply before the next request.
//! While SharedFS is awake anyway, requests for leases go through memory ([`RequestSlot`]).
//!
//! State that must cost no message stands in shared memory:
//! - the lease words that make cached state valid,
//! - the committed position that frees log space,
//! - the credits,
//! - the table of open handles,
//! - the grants on inodes that are only read ([`GrantCache`]).
//!
//! Invariants:
//! - A message has a length, then that many bytes. A peer that breaks the frame or the encoding loses its connection.
//! - The first message on a connection names the versions of the protocol that the peer understands. SharedFS refuses a
//!   peer that has none in common with it, with a clear error.
//! - SharedFS trusts nothing that a session can write. The words that a session writes in the control page are hints or
//!   claims, which SharedFS checks against its own account.
//!
//! Non-goals: decisions. Source: `docs/format-session.md`.
#![forbid(unsafe_code)]

mod admission;
mod busy_wait;
mod cluster;
mod connection;
mod control;
mod grant_cache;
mod late_reply;
mod lock_slots;
mod message;
mod node_socket;
mod operation_counts;
mod program_file;
mod report;
mod request_slot;
mod run_environment;
mod watch_attributes;

pub use admission::{ADMITTED_MAX, Admission, MountTerms};
pub use busy_wait::BusyWait;
pub use cluster::{ClusterCommand, ClusterReport, MemberReport, NodeStanding, ReplicationReport};
pub use connection::{Acceptor, Connection, Listener, MESSAGE_BYTES_MAX, ReceiveLimits, WireError, socket_of};
pub use control::{
    CONTROL_BYTES, CONTROL_ROOM, CONTROL_ROOM_FAR, ControlPage, CreditKind, HANDLE_SLOTS, HandleSlot, LEASE_SLOTS,
    LEASE_SLOTS_FIRST, LEASE_TABLE_BYTES, LeaseTable, LeaseWord, OPERATION_LANES, TakenCredit,
};
pub use grant_cache::{GRANT_CACHE_BYTES, GrantCache, GrantCacheWriter, PublishedGrant};
pub use late_reply::send_reply_now;
pub use lock_slots::{
    LOCK_LAST, LOCK_OWNER_PROCESS, LOCK_RANGES_MAX, LOCK_SLOTS, LOCK_SLOTS_BYTES, LockChange, LockList, LockNotes,
    LockSlotState,
};
pub use message::{
    ComparedTree, ComparisonReply, Credit, DirectoryEntry, FsckReply, GrantReply, HELPER_FLAG, Hello, InodeState,
    LeaseRequest, LockSlot, Need, PROTOCOL_VERSIONS, Peer, QuotaGrant, QuotaRequest, QuotaStatus, Reply, Request,
    ReserveReason, SessionKind, SessionStatus, SpaceReply, StatusReply, TreeDifference, Welcome, WelcomeSegment,
};
pub use node_socket::{is_administrator, listen_to_all};
pub use operation_counts::{LATENCY_BUCKETS, OperationCounts, OperationKind, latency_bucket, latency_from};
pub use program_file::can_load_library;
pub use report::{
    CallCounts, MissedProgram, MissedReply, REPORT_BEGIN, REPORT_BYTES, REPORT_CALLS, REPORT_COUNTS, REPORT_DEVICES,
    REPORT_DEVICES_MAX, REPORT_DIRECTORY, REPORT_END, REPORT_MAGIC, REPORT_PROGRAMS, REPORT_ROW, REPORT_THREADS,
    REPORT_THREADS_MAX, REPORT_VARIABLE, THREAD_COUNTED, THREAD_HAS_LIBRARY, decode_report, encode_report_header,
};
pub use request_slot::{Question, QuestionProgress, RequestSlot};
pub use run_environment::{
    DEFER_VARIABLE, MOUNTS_VARIABLE, PATIENCE_MS, PATIENCE_VARIABLE, PLANS_VARIABLE, decode_mounts, encode_mounts,
    patience_ms,
};
pub use watch_attributes::{WATCH_ALL_ATTRIBUTE, WATCH_ATTRIBUTE};
