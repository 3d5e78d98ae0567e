//! Tests of documents, hard states and authority.

mod authority;
mod documents;
mod links;
mod model;

use ashlar_types::{ArenaId, FileSystemId, NodeNumber};

use crate::{ClusterDocument, DocumentMember, MemberRole};

/// Returns a node.
fn node(number: u16) -> NodeNumber {
    NodeNumber::new(number).expect("a node's number")
}

/// Returns a member that becomes the writer.
fn first_member() -> DocumentMember {
    DocumentMember { node: node(0), arena: ArenaId(10), address: "10.0.0.1:7900".into(), role: MemberRole::Writer }
}

/// Returns the document of a writer, node 0, and a replica, node 1.
fn mirror(min_replicas: u8) -> ClusterDocument {
    let one = ClusterDocument::new(FileSystemId(7), first_member(), true).expect("a document");
    let two = one.with_replica(ArenaId(11), "10.0.0.2:7900".into()).expect("a second member");
    two.with_min_replicas(min_replicas).expect("a right number")
}
