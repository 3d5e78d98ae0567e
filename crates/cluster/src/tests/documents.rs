//! Documents and hard states: checks, changes and text.

use ashlar_types::{ArenaId, Epoch, FileSystemId, JournalPosition};

use super::{first_member, mirror, node};
use crate::{AloneSince, ClusterDocument, DocumentError, DocumentMember, HardState, MemberRole, TextError};

#[test]
fn document_written_as_text_reads_back_equal() {
    for document in [mirror(1), mirror(2), mirror(2).with_promotion(node(1)).expect("a promotion")] {
        assert_eq!(ClusterDocument::from_text(&document.to_text()), Ok(document));
    }
}

#[test]
fn hard_state_written_as_text_reads_back_equal() {
    let alone = Some(AloneSince { since: JournalPosition(4096), by_order: true });
    let epoch = Epoch { number: 9, node: node(1) };
    let full = HardState {
        alone,
        in_sync: true,
        writer_stopped_at: Some(JournalPosition(8)),
        writer_min_replicas: Some(2),
        newest_epoch: epoch,
    };
    for state in [HardState::default(), full] {
        assert_eq!(HardState::from_text(&state.to_text()), Ok(state));
    }
}

/// Returns the error of the mirror's text with a part replaced.
fn error_with(part: &str, by: &str) -> TextError {
    let text = mirror(2).to_text();
    assert!(text.contains(part), "{text}");
    ClusterDocument::from_text(&text.replacen(part, by, 1)).expect_err("a fault")
}

/// An administrator finds the line, and reads what to write.
#[test]
fn faulty_text_names_line_and_remedy() {
    let cases = [
        ("min_replicas = 2", "min_replicas = 3", 5, "write 1 or 2"),
        ("min_replicas = 2", "min_replica = 2", 5, "min_replica"),
        ("format = 1", "format = 2", 2, "another version"),
        ("format = 1", "format = ", 2, ""),
        ("tls = true", "tls = yes", 6, ""),
        ("role = \"replica\"", "role = \"witness\"", 19, "write writer or replica"),
        ("role = \"replica\"", "role = \"writer\"", 19, "exactly one"),
        ("10.0.0.2:7900", "10.0.0.2", 18, "HOST:PORT"),
        ("10.0.0.2:7900", "10.0.0.1:7900", 18, "each its own"),
        ("000000000000000b", "0b", 17, "16 hexadecimal digits"),
        ("000000000000000b", "000000000000000a", 17, "one arena"),
        ("number = 1", "number = 0", 16, "its own number"),
        ("number = 1", "number = 4096", 16, "the largest is 4095"),
        ("number = 1", "number = 7", 16, "next_node is 2"),
        ("cluster = \"00", "cluster = \"0", 3, "32 hexadecimal digits"),
        ("node = 0 }", "node = 5 }", 4, "no member"),
    ];
    for (part, by, line, words) in cases {
        // The first "number = " is the epoch's.
        let (part, by) = match part {
            "number = 1" => ("[[node]]\nnumber = 1".to_owned(), format!("[[node]]\n{by}")),
            _ => (part.to_owned(), by.to_owned()),
        };
        let error = error_with(&part, &by);
        assert!(error.line == line && error.problem.contains(words), "{part} → {by}: {error}");
    }
}

#[test]
fn writer_is_needed_exactly_once() {
    let none = error_with("role = \"writer\"", "role = \"replaced\"");
    assert!(none.problem.contains("0 members have the role 'writer'"), "{none}");
}

#[test]
fn addresses_need_host_and_port() {
    for good in ["host:1", "10.0.0.1:7900", "[fd00::1]:65535", "a-b.example:80"] {
        let member = DocumentMember { address: good.into(), ..first_member() };
        assert!(ClusterDocument::new(FileSystemId(7), member, true).is_ok(), "{good}");
    }
    for bad in ["", "host", "host:", ":1", "host:0", "host:65536", "host:+1", "fd00::1:7900", "a b:1", "ä:1", "[::1:1"]
    {
        let member = DocumentMember { address: bad.into(), ..first_member() };
        let error = ClusterDocument::new(FileSystemId(7), member, true).expect_err(bad);
        assert_eq!(error, DocumentError::Address(bad.into()));
    }
}

#[test]
fn each_change_begins_an_epoch() {
    let document = mirror(2);
    assert_eq!(document.epoch, Epoch { number: 3, node: node(0) });
    let promoted = document.with_promotion(node(1)).expect("a promotion");
    assert_eq!(promoted.epoch, Epoch { number: 4, node: node(1) });
    assert_eq!(promoted.without_member(node(0)).expect("a removal").epoch.number, 5);
}

#[test]
fn promotion_exchanges_roles_and_keeps_the_old_writer_out() {
    let promoted = mirror(2).with_promotion(node(1)).expect("a promotion");
    assert_eq!((promoted.writer().node, promoted.replica()), (node(1), None));
    assert_eq!(promoted.member(node(0)).map(|member| member.role), Some(MemberRole::Replaced));
    assert_eq!(promoted.peer_of(node(1)), None, "a replaced member has no link");
    let again = promoted.with_promotion(node(0)).expect_err("it has no copy");
    assert!(matches!(again, DocumentError::WrongRole { role: MemberRole::Replaced, .. }));
}

/// A number belongs to one arena for ever, since inode numbers begin with it.
#[test]
fn node_made_anew_gets_another_number() {
    let promoted = mirror(2).with_promotion(node(1)).expect("a promotion");
    let anew = promoted.with_replica(ArenaId(12), "10.0.0.1:7900".into()).expect("at the old one's address");
    assert_eq!(anew.replica().map(|member| member.node), Some(node(2)));
    let without = anew.without_member(node(0)).expect("a removal");
    assert_eq!(without.next_node, 3, "numbers are not given again");
}

#[test]
fn third_copy_is_refused() {
    let error = mirror(2).with_replica(ArenaId(12), "10.0.0.3:7900".into()).expect_err("too many");
    assert_eq!(error, DocumentError::TooManyMembers(3));
}

#[test]
fn writer_is_not_removed() {
    let error = mirror(2).without_member(node(0)).expect_err("the writer");
    assert!(error.to_string().contains("node 0 is writer"), "{error}");
}
