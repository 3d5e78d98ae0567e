//! Bodies: their bytes, their bounds, and that decoding takes nothing else.

use ashlar_types::{
    Credentials, InodeId, JournalPosition, LogGeneration, LogPosition, NodeNumber, SessionId, Timestamp,
};
use proptest::prelude::*;

use crate::frame::{FRAME_BYTES_MAX, FrameHeader};
use crate::{
    BatchVerdict, FrameBody, FrameError, FrameKind, LogRecords, OwnAct, RefusalReason, RefusedRecord, SessionBegan,
    split_batch,
};

const SESSION: SessionId = SessionId(0x1_0002);

fn header_of(body: &FrameBody<'_>) -> (FrameHeader, Vec<u8>) {
    let encoded = body.encode().unwrap();
    let header = FrameHeader {
        kind: encoded.kind as u8,
        flags: encoded.flags,
        session: encoded.session,
        length: encoded.body_bytes() as u32,
        position: JournalPosition(0),
        checksum: 0,
        epoch: 1,
    };
    (header, encoded.parts().concat())
}

fn verdict() -> BatchVerdict {
    BatchVerdict {
        session: SESSION,
        upto: LogPosition(300),
        order: 5,
        latest: Some(Timestamp { seconds: -1, nanoseconds: 7 }),
        is_fenced: true,
        refused: vec![RefusedRecord { position: LogPosition(300), reason: RefusalReason::Panicked }],
        ignored: vec![LogPosition(8), LogPosition(16)],
        kept: vec![InodeId(9)],
    }
}

/// Media hold these bytes: a change of them is a change of the format.
#[test]
fn bodies_have_the_bytes_of_the_format() {
    let credentials = Credentials { uid: 1000, gid: 100, groups: vec![30, 10, 30], checked: false };
    let began = SessionBegan { session: SESSION, generation: LogGeneration(3), credentials };
    let records = LogRecords {
        session: SESSION,
        from: LogPosition(8),
        to: LogPosition(200),
        offset: 2,
        bytes: b"xy",
        continues: true,
    };
    let inodes = OwnAct::Inodes { session: SESSION, first: InodeId(16), count: 4 };
    let cases: [(FrameBody<'_>, &[u8], &[u8]); 9] = [
        (FrameBody::Began(began), &[1, 0, 2, 0], &[130, 128, 4, 3, 232, 7, 100, 0, 2, 10, 20]),
        (FrameBody::Records(records), &[2, 1, 2, 0], &[130, 128, 4, 8, 200, 1, 2, 2, b'x', b'y']),
        (
            FrameBody::Verdict(verdict()),
            &[3, 0, 2, 0],
            &[130, 128, 4, 172, 2, 5, 1, 1, 7, 1, 1, 172, 2, 14, 2, 8, 16, 1, 9],
        ),
        (FrameBody::Own(OwnAct::Update { kind: 13, body: b"abc" }), &[4, 0, 0, 0], &[0, 13, 3, b'a', b'b', b'c']),
        (FrameBody::Own(inodes), &[4, 0, 2, 0], &[1, 130, 128, 4, 16, 4]),
        (
            FrameBody::Own(OwnAct::Right { session: SESSION, inode: InodeId(16), access: 6 }),
            &[4, 0, 2, 0],
            &[2, 130, 128, 4, 16, 6],
        ),
        (
            FrameBody::After { node: NodeNumber::new(300).unwrap(), position: JournalPosition(1) },
            &[5, 0, 0, 0],
            &[172, 2, 1],
        ),
        (FrameBody::Ended { session: SESSION }, &[6, 0, 2, 0], &[130, 128, 4]),
        (
            FrameBody::Adopt { node: NodeNumber::new(2).unwrap(), upto: JournalPosition(128) },
            &[7, 0, 0, 0],
            &[2, 128, 1],
        ),
    ];
    for (body, head, bytes) in &cases {
        let (header, encoded) = header_of(body);
        assert_eq!(encoded, *bytes, "{body:?}");
        assert_eq!(header.to_bytes()[..4], **head, "{body:?}");
        assert!(header.may_be_of(SESSION) || body.session().is_none());
    }
}

#[test]
fn groups_are_decoded_in_order_and_once() {
    let credentials = Credentials { uid: 1, gid: 2, groups: vec![u32::MAX, 0, 7, 0], checked: true };
    let body = FrameBody::Began(SessionBegan { session: SESSION, generation: LogGeneration(0), credentials });
    let (header, bytes) = header_of(&body);
    let FrameBody::Began(began) = FrameBody::decode(&header, &bytes).unwrap() else { panic!("another kind") };
    assert_eq!(began.credentials.groups, [0, 7, u32::MAX]);
}

#[test]
fn most_groups_of_a_process_fit_a_frame() {
    // NGROUPS_MAX, as far apart as they can be.
    let groups = (0..65_536).map(|index| index * 65_535).collect();
    let credentials = Credentials { groups, ..Credentials::root() };
    let began = SessionBegan { session: SessionId(u64::MAX), generation: LogGeneration(u32::MAX), credentials };
    assert!(FrameBody::Began(began).encode().unwrap().frame_bytes() <= FRAME_BYTES_MAX);
}

#[test]
fn batch_is_split_into_frames_that_fit() {
    let bytes: Vec<u8> = (0..700_000u32).map(|index| index as u8).collect();
    let (from, to) = (LogPosition(u64::MAX - 700_000), LogPosition(u64::MAX));
    let mut joined = Vec::new();
    let session = SessionId(u64::MAX);
    let parts: Vec<_> = split_batch(session, from, to, &bytes, FRAME_BYTES_MAX).collect();
    for (index, part) in parts.iter().enumerate() {
        assert_eq!(part.offset, joined.len() as u64);
        assert_eq!(part.continues, index + 1 < parts.len());
        assert!(FrameBody::Records(*part).encode().unwrap().frame_bytes() <= FRAME_BYTES_MAX);
        joined.extend_from_slice(part.bytes);
    }
    assert_eq!((parts.len(), joined), (3, bytes));
    let empty: Vec<_> = split_batch(session, from, to, &[], FRAME_BYTES_MAX).collect();
    assert_eq!((empty.len(), empty[0].continues), (1, false));
}

#[test]
fn body_longer_than_a_frame_is_refused() {
    let body = vec![0; FRAME_BYTES_MAX as usize];
    let encoded = FrameBody::Own(OwnAct::Update { kind: 1, body: &body }).encode();
    assert!(matches!(encoded, Err(FrameError::Length { bytes }) if bytes > FRAME_BYTES_MAX));
}

#[test]
fn header_that_does_not_fit_the_body_is_refused() {
    let (header, bytes) = header_of(&FrameBody::Ended { session: SESSION });
    let decode = |header| FrameBody::decode(&header, &bytes).unwrap_err();
    assert_eq!(decode(FrameHeader { kind: 8, ..header }), FrameError::Kind(8));
    assert_eq!(decode(FrameHeader { kind: 0, ..header }), FrameError::Kind(0));
    assert_eq!(decode(FrameHeader { flags: 1, ..header }), FrameError::Flags(1));
    assert_eq!(decode(FrameHeader { session: 3, ..header }), FrameError::Session);
    assert_eq!(decode(FrameHeader { length: 4, ..header }), FrameError::Length { bytes: 32 });
    assert!(matches!(decode(FrameHeader { length: u32::MAX, ..header }), FrameError::Length { .. }));
}

#[test]
fn bytes_that_the_encoder_never_writes_are_refused() {
    let header = |kind: FrameKind, session, bytes: &[u8]| FrameHeader {
        kind: kind as u8,
        flags: 0,
        session,
        length: bytes.len() as u32,
        position: JournalPosition(0),
        checksum: 0,
        epoch: 1,
    };
    let decode = |kind, session, bytes: &[u8]| FrameBody::decode(&header(kind, session, bytes), bytes).map(drop);
    assert_eq!(decode(FrameKind::Ended, 1, &[1]), Ok(()));
    // The same number in more bytes, a byte left over, a byte missing.
    assert_eq!(decode(FrameKind::Ended, 1, &[0x81, 0]), Err(FrameError::Malformed));
    assert_eq!(decode(FrameKind::Ended, 1, &[1, 0]), Err(FrameError::Malformed));
    assert_eq!(decode(FrameKind::Ended, 0, &[]), Err(FrameError::Malformed));
    // A group twice.
    assert_eq!(decode(FrameKind::Began, 1, &[1, 0, 0, 0, 0, 2, 5, 0]), Err(FrameError::Malformed));
    // Groups whose sum overflows.
    let groups = [1, 0, 0, 0, 0, 2, 255, 255, 255, 255, 15, 1];
    assert_eq!(decode(FrameKind::Began, 1, &groups), Err(FrameError::OutOfBounds));
    // A flag that is neither 0 nor 1; a node of 13 bits; a choice that is none.
    assert_eq!(decode(FrameKind::Began, 1, &[1, 0, 0, 0, 2, 0]), Err(FrameError::Malformed));
    assert_eq!(decode(FrameKind::After, 0, &[128, 32, 0]), Err(FrameError::Malformed));
    assert_eq!(decode(FrameKind::Own, 0, &[3, 0, 0]), Err(FrameError::Malformed));
}

/// A list that claims 2^60 elements, or more than there are bytes.
#[test]
fn list_longer_than_its_body_is_refused() {
    let mut bytes = vec![1, 0, 0, 0, 0];
    bytes.extend([0x80; 8]);
    bytes.extend([0x10, 1, 1, 1]);
    let header = |bytes: &[u8]| FrameHeader {
        kind: FrameKind::Began as u8,
        flags: 0,
        session: 1,
        length: bytes.len() as u32,
        position: JournalPosition(0),
        checksum: 0,
        epoch: 1,
    };
    assert_eq!(FrameBody::decode(&header(&bytes), &bytes), Err(FrameError::Malformed));
    let bytes = [1, 0, 0, 0, 0, 4, 1, 1];
    assert_eq!(FrameBody::decode(&header(&bytes), &bytes), Err(FrameError::Malformed));
}

#[test]
fn values_out_of_bounds_are_neither_encoded_nor_decoded() {
    let refused = |position, reason| RefusedRecord { position: LogPosition(position), reason };
    let misfit = RefusalReason::Misfit;
    let bad = [
        FrameBody::Verdict(BatchVerdict { refused: vec![refused(301, misfit)], ..verdict() }),
        FrameBody::Verdict(BatchVerdict { refused: vec![refused(8, misfit); 2], ..verdict() }),
        FrameBody::Verdict(BatchVerdict { ignored: vec![LogPosition(300)], ..verdict() }),
        FrameBody::Verdict(BatchVerdict { ignored: vec![LogPosition(8), LogPosition(8)], ..verdict() }),
        FrameBody::Verdict(BatchVerdict { kept: vec![InodeId(9), InodeId(8)], ..verdict() }),
        FrameBody::Verdict(BatchVerdict { kept: vec![InodeId(0)], ..verdict() }),
        FrameBody::Verdict(BatchVerdict {
            latest: Some(Timestamp { seconds: 0, nanoseconds: 1_000_000_000 }),
            ..verdict()
        }),
        FrameBody::Records(LogRecords {
            session: SESSION,
            from: LogPosition(9),
            to: LogPosition(8),
            offset: 0,
            bytes: &[],
            continues: false,
        }),
        FrameBody::Own(OwnAct::Inodes { session: SESSION, first: InodeId(0), count: 1 }),
        FrameBody::Own(OwnAct::Inodes { session: SESSION, first: InodeId(16), count: 0 }),
        FrameBody::Own(OwnAct::Inodes { session: SESSION, first: InodeId(16), count: u64::MAX }),
        FrameBody::Own(OwnAct::Right { session: SESSION, inode: InodeId(16), access: 8 }),
        FrameBody::Own(OwnAct::Right { session: SESSION, inode: InodeId(16), access: 0 }),
    ];
    for body in bad {
        assert_eq!(body.encode(), Err(FrameError::OutOfBounds), "{body:?}");
    }
    // The same from bytes: a Verdict whose record is refused behind its end.
    let (header, mut bytes) = header_of(&FrameBody::Verdict(verdict()));
    let at = bytes.windows(2).rposition(|pair| pair == [172, 2]).unwrap();
    bytes[at] += 1;
    assert_eq!(FrameBody::decode(&header, &bytes), Err(FrameError::OutOfBounds));
}

#[test]
fn body_that_names_no_node_is_refused() {
    let body = FrameBody::Adopt { node: NodeNumber::MAX, upto: JournalPosition(0) };
    let (header, mut bytes) = header_of(&body);
    assert_eq!(FrameBody::decode(&header, &bytes), Ok(body));
    assert_eq!(bytes[..2], [255, 31]);
    bytes[..2].copy_from_slice(&[128, 32]);
    assert_eq!(FrameBody::decode(&header, &bytes), Err(FrameError::Malformed));
}

fn any_session() -> impl Strategy<Value = SessionId> {
    prop_oneof![any::<u64>(), 0..70_000u64].prop_map(SessionId)
}

fn ascending(limit: u64) -> impl Strategy<Value = Vec<u64>> {
    prop::collection::btree_set(1..limit, 0..6).prop_map(|set| set.into_iter().collect())
}

/// Calls `check` with any body.
pub(super) fn any_body(check: impl Fn(FrameBody<'_>) -> Result<(), TestCaseError>) {
    let bytes = || prop::collection::vec(any::<u8>(), 0..80);
    let numbers = (any_session(), 0..u64::MAX / 2, any::<u64>(), any::<u32>(), 0..4096u16);
    let lists = (prop::collection::vec(any::<u32>(), 0..6), ascending(1000), ascending(1000), ascending(u64::MAX));
    let more = (0..9u8, bytes(), any::<bool>(), any::<i64>(), 1..8u8);
    proptest!(|((session, from, other, small, node) in numbers, (groups, one, two, three) in lists,
                (which, bytes, flag, seconds, access) in more)| {
        let position = JournalPosition(other);
        let (first, count) = (InodeId(from + 1), other / 2 + 1);
        let body = match which {
            0 => {
                let credentials = Credentials { uid: small, gid: small ^ 7, groups, checked: flag };
                FrameBody::Began(SessionBegan { session, generation: LogGeneration(small), credentials })
            }
            1 | 2 => FrameBody::Records(LogRecords {
                session,
                from: LogPosition(from),
                to: LogPosition(from + other / 2),
                offset: other / 2,
                bytes: &bytes,
                continues: flag,
            }),
            3 => FrameBody::Verdict(BatchVerdict {
                session,
                upto: LogPosition(1000),
                order: other,
                latest: flag.then_some(Timestamp { seconds, nanoseconds: small % 1_000_000_000 }),
                is_fenced: access > 3,
                refused: one
                    .into_iter()
                    .map(|at| RefusedRecord { position: LogPosition(at), reason: RefusalReason::NoQuota })
                    .collect(),
                ignored: two.into_iter().map(LogPosition).collect(),
                kept: three.into_iter().map(InodeId).collect(),
            }),
            4 => FrameBody::Own(OwnAct::Update { kind: access, body: &bytes }),
            5 => FrameBody::Own(OwnAct::Inodes { session, first, count: count.min(u64::MAX - first.0) }),
            6 => FrameBody::Own(OwnAct::Right { session, inode: first, access }),
            7 => FrameBody::After { node: NodeNumber::new(node).unwrap(), position },
            _ if flag => FrameBody::Adopt { node: NodeNumber::new(node).unwrap(), upto: position },
            _ => FrameBody::Ended { session },
        };
        check(body)?;
    });
}

#[test]
fn body_is_decoded_as_encoded() {
    any_body(|mut body| {
        let (header, bytes) = header_of(&body);
        prop_assert_eq!(u64::from(header.length), bytes.len() as u64);
        if let FrameBody::Began(began) = &mut body {
            began.credentials.groups.sort_unstable();
            began.credentials.groups.dedup();
        }
        prop_assert_eq!(FrameBody::decode(&header, &bytes), Ok(body));
        Ok(())
    });
}

/// One byte changed, added or removed: what is still a body is another one, and is encoded to these bytes.
#[test]
fn changed_body_is_refused_or_another_body() {
    any_body(|body| {
        let (header, bytes) = header_of(&body);
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            let cut = [&bytes[..at], &bytes[at + 1..]].concat();
            let longer = [&bytes[..at], &[0], &bytes[at..]].concat();
            for changed in [changed, cut, longer] {
                let header = FrameHeader { length: changed.len() as u32, ..header };
                if let Ok(decoded) = FrameBody::decode(&header, &changed) {
                    prop_assert_eq!(&header_of(&decoded).1, &changed);
                }
            }
        }
        Ok(())
    });
}
