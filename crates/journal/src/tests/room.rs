//! The account of room: against the ring, and against the longest frames.

use ashlar_types::{InodeId, LogPosition, SessionId, Timestamp};
use proptest::prelude::*;

use super::{plain, ring};
use crate::{
    BatchVerdict, ENDED_BYTES_MAX, FRAME_BYTES_MAX, FrameBody, JournalRoom, RefusalReason, RefusedRecord, RoomError,
    frame_bytes, records_bytes_max, split_batch, verdict_bytes_max,
};

#[test]
fn promises_and_reserve_never_exceed_what_is_free() {
    let mut room = JournalRoom::new(1000, 100, 200);
    assert_eq!(room.unassigned(), 700);
    room.promise(600).unwrap();
    assert_eq!(room.promise(101), Err(RoomError::Lacking { needed: 1 }));
    assert_eq!(room.append_free(150), Err(RoomError::Lacking { needed: 50 }));
    room.append_free(100).unwrap();
    // The reserve is for these alone, and ends.
    room.append_reserved(150).unwrap();
    assert_eq!((room.reserve_left(), room.unassigned()), (50, 0));
    assert_eq!(room.append_reserved(60), Err(RoomError::Lacking { needed: 10 }));
    // A frame shorter than its promise leaves the rest, and the reserve gets it first.
    room.append_promised(300, 200).unwrap();
    assert_eq!((room.used(), room.promised(), room.reserve_left()), (550, 300, 150));
    room.withdraw(100).unwrap();
    assert_eq!((room.reserve_left(), room.unassigned()), (200, 50));
    room.truncate(550);
    assert_eq!((room.used(), room.unassigned()), (0, 600));
}

#[test]
fn frame_that_breaks_its_promise_is_refused() {
    let mut room = JournalRoom::new(1000, 0, 0);
    room.promise(50).unwrap();
    let before = room;
    assert_eq!(room.append_promised(50, 51), Err(RoomError::NotPromised { bytes: 51, promised: 50 }));
    assert_eq!(room.append_promised(51, 1), Err(RoomError::NotPromised { bytes: 51, promised: 50 }));
    assert_eq!(room.withdraw(51), Err(RoomError::NotPromised { bytes: 51, promised: 50 }));
    assert_eq!(room, before);
}

#[test]
fn full_ring_fills_the_reserve_first() {
    let mut room = JournalRoom::new(1000, 950, 200);
    assert_eq!((room.reserve_left(), room.unassigned()), (50, 0));
    room.truncate(100);
    assert_eq!((room.reserve_left(), room.unassigned()), (150, 0));
    room.truncate(100);
    assert_eq!((room.reserve_left(), room.unassigned()), (200, 50));
}

#[test]
fn longest_frames_fit_the_room_promised_for_them() {
    let (session, most) = (SessionId(u64::MAX), LogPosition(u64::MAX));
    for length in [0, 1, 7, 4096, 262_069, 262_070, 262_071, 524_140, 600_001] {
        let bytes = vec![1; length];
        let frames = split_batch(session, most, most, &bytes, FRAME_BYTES_MAX);
        let used: u64 = frames.map(|part| FrameBody::Records(part).encode().unwrap().frame_bytes()).sum();
        let promised = records_bytes_max(length as u64);
        assert!(used <= promised && promised <= used + 64 * (1 + length as u64 / 200_000), "{length}: {used}");
    }
    let ended = FrameBody::Ended { session }.encode().unwrap();
    assert_eq!(ended.frame_bytes(), ENDED_BYTES_MAX);
    let count = 256;
    let positions = || (0..count).map(|index| u64::MAX - 1 - count + index);
    let refused = |position| RefusedRecord { position: LogPosition(position), reason: RefusalReason::Panicked };
    let verdict = BatchVerdict {
        session,
        upto: most,
        order: u64::MAX,
        latest: Some(Timestamp { seconds: i64::MIN, nanoseconds: 999_999_999 }),
        is_fenced: true,
        refused: positions().map(refused).collect(),
        ignored: positions().map(LogPosition).collect(),
        kept: positions().map(InodeId).collect(),
    };
    let used = FrameBody::Verdict(verdict).encode().unwrap().frame_bytes();
    assert!(used <= verdict_bytes_max(3 * count));
}

#[derive(Clone, Debug)]
enum RoomStep {
    Promise(u64),
    Withdraw,
    AppendPromised(u64),
    AppendFree(u64),
    AppendReserved(u64),
    Truncate(u64),
}

fn step() -> impl Strategy<Value = RoomStep> {
    prop_oneof![
        (24..250u64).prop_map(RoomStep::Promise),
        Just(RoomStep::Withdraw),
        (0..250u64).prop_map(RoomStep::AppendPromised),
        (0..200u64).prop_map(RoomStep::AppendFree),
        (0..100u64).prop_map(RoomStep::AppendReserved),
        (0..1100u64).prop_map(RoomStep::Truncate),
    ]
}

proptest! {
    /// Frames that the account takes are appended to a ring, which has room for each.
    #[test]
    fn ring_has_room_for_every_frame_that_the_account_takes(
        steps in prop::collection::vec(step(), 1..80),
        reserve in 0..300u64,
    ) {
        let mut ring = ring(1024);
        let mut room = JournalRoom::new(ring.capacity(), ring.used(), reserve);
        let mut promises = Vec::new();
        for step in steps {
            let body = |length: u64| vec![1; length as usize];
            let bytes = |length: u64| plain(&body(length)).encode().unwrap().frame_bytes();
            match step {
                RoomStep::Promise(bytes) => {
                    if room.promise(bytes).is_ok() {
                        promises.push(bytes);
                    }
                }
                RoomStep::Withdraw => {
                    if let Some(promise) = promises.pop() {
                        room.withdraw(promise).unwrap();
                    }
                }
                RoomStep::AppendPromised(length) => {
                    let kept = promises.last().copied().filter(|promise| bytes(length) <= *promise);
                    if let Some(promise) = kept {
                        room.append_promised(promise, bytes(length)).unwrap();
                        promises.pop();
                        ring.append(&plain(&body(length))).unwrap();
                    }
                }
                RoomStep::AppendFree(length) => {
                    if room.append_free(bytes(length)).is_ok() {
                        ring.append(&plain(&body(length))).unwrap();
                    }
                }
                RoomStep::AppendReserved(length) => {
                    let may = room.reserve_left() + room.unassigned() >= bytes(length);
                    let taken = room.append_reserved(bytes(length));
                    prop_assert_eq!(taken.is_ok(), may);
                    if may {
                        ring.append(&plain(&body(length))).unwrap();
                    }
                }
                RoomStep::Truncate(bound) => {
                    ring.flush().unwrap();
                    let before = ring.head();
                    let head = ring.truncate((before.plus(bound)).min(ring.flushed())).unwrap();
                    room.truncate(head.0 - before.0);
                }
            }
            prop_assert_eq!(room.used(), ring.used());
            prop_assert_eq!(room.promised(), promises.iter().sum::<u64>());
            prop_assert!(room.used() + room.promised() + room.reserve_left() <= room.capacity());
        }
        // Everything promised still fits, and so does what the reserve is for.
        while let Some(promise) = promises.pop() {
            let length = promise / 8 * 8 - 24;
            room.append_promised(promise, frame_bytes(length)).unwrap();
            ring.append(&plain(&vec![2; length.saturating_sub(4) as usize])).unwrap();
        }
    }
}
