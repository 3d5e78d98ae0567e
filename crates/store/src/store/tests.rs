use ashlar_pmem::{Arena, ArenaOptions, CrashMedium};
use ashlar_types::{FileSystemId, FileSystemIdentity, Timestamp, VersionRange};

use super::*;
use crate::metadata::rows::Superblock;
use crate::{MemoryArena, MemoryArenaOptions};

const NODE: NodeNumber = NodeNumber::MAX;

/// Makes a store in an arena with these options.
fn store_with(options: &ArenaOptions) -> (tempfile::TempDir, Store) {
    let directory = tempfile::tempdir().unwrap();
    let arena = Arc::new(Arena::create(directory.path(), options).unwrap());
    Store::format(&arena, Timestamp::default()).unwrap();
    (directory, Store::open(arena).unwrap())
}

fn options() -> ArenaOptions {
    ArenaOptions { node: NODE, ..ArenaOptions::new(16 << 20) }
}

#[test]
fn node_gives_out_numbers_that_bear_it() {
    let (_directory, mut store) = store_with(&options());
    let inodes = store.allocate_inodes(5).unwrap();
    assert_eq!(InodeId::new(NODE, 16), Some(InodeId(inodes.start)));
    assert_eq!(SessionId::new(NODE, 1), Some(store.next_session_id().unwrap()));
    let (block, _) = store.allocator.allocate(1, None).unwrap();
    assert_eq!(block.node(), NODE);
}

#[test]
fn exhausted_inode_numbers_are_refused_and_stay_so() {
    let (_directory, mut store) = store_with(&options());
    let end = InodeId::numbers_of(NODE).end;
    store.counters.next_inode = end - 3;
    let is_refused = |store: &mut Store| matches!(store.allocate_inodes(4), Err(StoreError::NumbersExhausted { .. }));
    assert!(is_refused(&mut store));
    assert_eq!(store.allocate_inodes(3).unwrap(), end - 3..end, "the last ones");
    assert!(is_refused(&mut store) && store.allocate_inodes(1).is_err());
    store.commit().unwrap();
    let medium = store.medium.clone();
    drop(store);
    let mut store = Store::open_on(medium).unwrap();
    assert!(!store.damaged && store.allocate_inodes(1).is_err(), "none was stored beyond the end");
    assert_eq!(store.check(&mut |_| {}).unwrap().problems, []);
}

#[test]
fn exhausted_session_numbers_are_refused() {
    let (_directory, mut store) = store_with(&options());
    store.counters.next_session = SessionId::numbers_of(NODE).end - 1;
    assert_eq!(store.next_session_id().unwrap().counter(), SessionId::COUNTER_END - 1);
    let error = store.next_session_id().unwrap_err();
    assert_eq!(error.to_string(), "node 4095 has given out all its session numbers; move its users to another node");
}

#[test]
fn skipped_numbers_are_only_those_of_the_same_node() {
    let arena = Arc::new(MemoryArena::new(&MemoryArenaOptions {
        node: NODE,
        ..MemoryArenaOptions::new(CrashMedium::Words, vec![64])
    }));
    Store::format_in_memory(&arena, Timestamp::default()).unwrap();
    let mut store = Store::open_in_memory(Arc::clone(&arena)).unwrap();
    let own = |counter| InodeId::new(NODE, counter).unwrap();
    store.skip_inodes(InodeId(1 << 30), 8).unwrap();
    store.skip_session_id(SessionId(1 << 30)).unwrap();
    assert_eq!(store.allocate_inodes(1).unwrap().start, own(16).0);
    assert_eq!(store.next_session_id().unwrap().counter(), 1);
    store.skip_inodes(own(1 << 30), 8).unwrap();
    store.skip_session_id(SessionId::new(NODE, 1 << 30).unwrap()).unwrap();
    assert_eq!(store.allocate_inodes(1).unwrap().start, own((1 << 30) + 8).0);
    assert_eq!(store.next_session_id().unwrap().counter(), (1 << 30) + 1);
    store.skip_inodes(own(16), 8).unwrap();
    assert_eq!(store.allocate_inodes(1).unwrap().start, own((1 << 30) + 9).0, "never backwards");
    drop(store);
    let mut store = Store::open_in_memory(arena).unwrap();
    assert!(store.allocate_inodes(1).unwrap().start > own((1 << 30) + 9).0, "set aside durably");
}

#[test]
fn skipped_last_numbers_leave_none() {
    let (_directory, mut store) = store_with(&options());
    let end = InodeId::numbers_of(NODE).end;
    store.skip_inodes(InodeId(end - 4), 100).unwrap();
    store.skip_session_id(SessionId(SessionId::numbers_of(NODE).end - 1)).unwrap();
    assert!(matches!(store.allocate_inodes(1), Err(StoreError::NumbersExhausted { .. })));
    assert!(matches!(store.next_session_id(), Err(StoreError::NumbersExhausted { .. })));
    let medium = store.medium.clone();
    drop(store);
    assert!(!Store::open_on(medium).unwrap().damaged, "none was stored beyond the end");
}

#[test]
fn joining_store_hashes_names_as_the_first() {
    let file_system = FileSystemIdentity { id: FileSystemId(9), hash_key: NameHashKey([3; 16]) };
    let joins = ArenaOptions { file_system: Some(file_system), ..options() };
    let (_one, first) = store_with(&ArenaOptions { node: NodeNumber::FIRST, ..joins });
    let (_two, joined) = store_with(&joins);
    let (_three, stranger) = store_with(&options());
    assert_eq!(first.name_cookie(b"name"), joined.name_cookie(b"name"));
    assert_ne!(first.name_cookie(b"name"), stranger.name_cookie(b"name"));
}

#[test]
fn counters_of_another_node_are_damage() {
    let (_directory, store) = store_with(&options());
    let mut writer = store.database.write(1, 64).unwrap();
    let counters = StoredCounters { next_inode: 16, next_session: 1, reserved_blocks: 0 };
    writer.put(&[kind::COUNTERS], &rows::encode_counters(counters)).unwrap();
    writer.commit().unwrap();
    let medium = store.medium.clone();
    drop(store);
    let mut store = Store::open_on(medium).unwrap();
    assert!(store.damaged && store.allocate_inodes(1).is_err());
    store.repair().unwrap();
    assert!(InodeId(store.allocate_inodes(1).unwrap().start).is_of(NODE));
}

#[test]
fn metadata_of_other_versions_is_refused_with_a_line() {
    let (_directory, store) = store_with(&options());
    let mut writer = store.database.write(1, 64).unwrap();
    let superblock =
        Superblock { versions: VersionRange::new(7, 8), arena: store.medium.identity().id, is_whole: true };
    writer.put(&[kind::SUPERBLOCK], &rows::encode_superblock(superblock)).unwrap();
    writer.commit().unwrap();
    let medium = store.medium.clone();
    drop(store);
    let error = Store::open_on(medium).err().unwrap().to_string();
    assert_eq!(
        error,
        "the metadata has format versions 7 to 8; this release reads version 3; use the matching release"
    );
}
