//! Full copies that are cut, that find no room, and that are no copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_store::{
    COPY_PART_BYTES_MAX, CommitFault, CopiedBlocks, CopyEnd, CopyItem, DatabaseError, FullCopyError, Store, StoreError,
    StoreImport,
};
use ashlar_types::{BLOCK_BYTES, FileKind, Inode, InodeId, QuotaId, QuotaKey, SessionId, Timestamp};
use proptest::prelude::*;

use crate::copy_bench::{NodeArena, RandomWriter, WRITER, check_clean, dump, replica};
use crate::media::{TestMedium, choose, on_both_databases};

const BLOCKS: [u32; 2] = [60, 90];
const REPLICA_BLOCKS: [u32; 3] = [100, 30, 200];

/// The parts of a tree that stands still, an item each, and its end.
fn parts_of(store: &mut Store) -> (Vec<Vec<u8>>, CopyEnd) {
    let (mut source, mut parts) = (store.begin_copy().unwrap(), Vec::new());
    while let Some(part) = source.next_part(1).unwrap() {
        parts.push(part);
    }
    (parts, source.begin_last_pass().unwrap())
}

fn random_tree(medium: TestMedium, seed: u64) -> RandomWriter {
    let mut writer = RandomWriter::new(medium, &BLOCKS, seed);
    writer.work(900);
    writer.commit();
    writer
}

fn import_all(arena: &NodeArena, parts: &[Vec<u8>], end: &CopyEnd) -> Result<Store, FullCopyError> {
    let mut import = arena.begin_import()?;
    for (number, part) in parts.iter().enumerate() {
        import.import_part(part)?;
        if number % 8 == 0 {
            import.commit()?;
        }
    }
    import.finish(end)
}

/// Killed after any item, the store is marked, and a second copy begins anew.
fn killed_import_leaves_a_marked_store(medium: TestMedium) {
    let mut writer = random_tree(medium, 3);
    let (parts, end) = parts_of(&mut writer.store);
    assert!(parts.len() > 40, "{} parts", parts.len());
    let mut arena = NodeArena::new(medium, replica(), &REPLICA_BLOCKS);
    arena.format();
    let step = if medium == TestMedium::Memory { 1 } else { 17 };
    for kept in (0..=parts.len()).step_by(step) {
        let mut import = arena.begin_import().unwrap();
        for (number, part) in parts[..kept].iter().enumerate() {
            import.import_part(part).unwrap();
            if number % 3 == 0 {
                import.commit().unwrap();
            }
        }
        drop(import);
        arena.crash(kept as u64);
        assert!(arena.is_copying(), "killed after {kept} items");
        // Nor does making an empty store make it whole.
        arena.format();
        assert!(arena.is_copying());
    }
    let mut copy = import_all(&arena, &parts, &end).unwrap();
    assert_eq!(dump(&copy), dump(&writer.store));
    check_clean(&mut copy);
}

on_both_databases!(killed_import_leaves_a_marked_store);

/// A loss of power in any commit leaves the old store, a marked one, or the whole copy.
#[test]
fn import_crashed_in_a_commit_is_whole_or_marked() {
    let mut writer = random_tree(TestMedium::Memory, 5);
    let (parts, end) = parts_of(&mut writer.store);
    let commits = {
        let arena = NodeArena::new(TestMedium::Memory, replica(), &REPLICA_BLOCKS);
        arena.format();
        let NodeArena::Memory(memory) = &arena else { unreachable!() };
        let before = memory.database().commits();
        import_all(&arena, &parts, &end).unwrap();
        memory.database().commits() - before
    };
    let faults = [CommitFault::Cut, CommitFault::Torn { is_new: false }, CommitFault::Torn { is_new: true }];
    for (commit, fault) in (0..commits).flat_map(|commit| faults.map(|fault| (commit, fault))) {
        let mut arena = NodeArena::new(TestMedium::Memory, replica(), &REPLICA_BLOCKS);
        arena.format();
        let NodeArena::Memory(memory) = &arena else { unreachable!() };
        memory.database().plan_fault(memory.database().commits() + commit, fault);
        let result = import_all(&arena, &parts, &end);
        let is_crashed =
            |error: &FullCopyError| matches!(error, FullCopyError::Store(StoreError::Database(DatabaseError::Crashed)));
        assert!(result.as_ref().err().is_some_and(is_crashed), "commit {commit} did not meet {fault:?}");
        drop(result);
        arena.crash(commit);
        let is_new = matches!(fault, CommitFault::Torn { is_new: true });
        match (commit, is_new) {
            (0, false) => assert_eq!(arena.open().unwrap().journal_mark(WRITER), None, "the old store"),
            (last, true) if last + 1 == commits => {
                let mut copy = arena.open().unwrap();
                assert_eq!(copy.journal_mark(WRITER), Some(end.mark));
                assert_eq!(dump(&copy), dump(&writer.store));
                check_clean(&mut copy);
                continue;
            }
            _ => assert!(arena.is_copying(), "commit {commit}, {fault:?}"),
        }
        assert_eq!(dump(&import_all(&arena, &parts, &end).unwrap()), dump(&writer.store));
    }
}

/// A loss of power at any flush, fence or sync leaves a marked store, but for those after the last commit.
#[test]
fn import_crashed_at_any_persist_point_is_marked() {
    let mut writer = random_tree(TestMedium::Memory, 6);
    let (parts, end) = parts_of(&mut writer.store);
    let arena = NodeArena::new(TestMedium::Memory, replica(), &REPLICA_BLOCKS);
    arena.format();
    let mut import = arena.begin_import().unwrap();
    let NodeArena::Memory(memory) = &arena else { unreachable!() };
    let points = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&points);
    memory.on_persist(Box::new(move |memory| {
        let mut seed = seen.fetch_add(1, Ordering::Relaxed);
        let left = memory.after_crash(&mut |choices| choose(&mut seed, choices));
        assert!(matches!(Store::open_in_memory(Arc::new(left)), Err(StoreError::Copying)));
    }));
    for part in &parts {
        import.import_part(part).unwrap();
        import.commit().unwrap();
    }
    let copy = import.finish(&end).unwrap();
    memory.stop_observing();
    assert!(points.load(Ordering::Relaxed) > 20);
    // All data of the whole store are durable.
    let mut seed = 1;
    let left = memory.after_crash(&mut |choices| choose(&mut seed, choices));
    let mut left = Store::open_in_memory(Arc::new(left)).unwrap();
    assert_eq!(dump(&left), dump(&copy));
    check_clean(&mut left);
}

/// A copy that fails for want of room says so, stays marked, and can't be finished.
#[test]
fn full_arena_is_a_typed_error() {
    let mut writer = random_tree(TestMedium::Memory, 8);
    let (parts, end) = parts_of(&mut writer.store);
    let arena = NodeArena::new(TestMedium::Memory, replica(), &[3]);
    let mut import = arena.begin_import().unwrap();
    let failed = parts.iter().find_map(|part| import.import_part(part).err());
    assert!(matches!(failed, Some(FullCopyError::Store(StoreError::FullBlocks { .. }))), "{failed:?}");
    assert!(matches!(import.import_part(&parts[0]), Err(FullCopyError::Failed)));
    assert!(matches!(import.finish(&end), Err(FullCopyError::Failed)));
    assert!(arena.is_copying());
}

#[test]
fn full_database_is_a_typed_error() {
    let mut writer = random_tree(TestMedium::Memory, 8);
    let (parts, end) = parts_of(&mut writer.store);
    let arena = NodeArena::new(TestMedium::Memory, replica(), &REPLICA_BLOCKS);
    let NodeArena::Memory(memory) = &arena else { unreachable!() };
    memory.database().plan_fault(memory.database().commits() + 5, CommitFault::Full);
    let failed = import_all(&arena, &parts, &end).err();
    assert!(matches!(failed, Some(FullCopyError::Store(StoreError::Database(DatabaseError::Full)))), "{failed:?}");
    assert!(arena.is_copying());
}

/// Blocks that are sent again replace others, and the room of these is used before the copy fails.
#[test]
fn blocks_sent_again_need_no_more_room() {
    let arena = NodeArena::new(TestMedium::Memory, replica(), &[40]);
    let mut import = arena.begin_import().unwrap();
    for round in 0..20_u8 {
        let bytes = vec![round; 20 * BLOCK_BYTES as usize];
        let blocks = CopiedBlocks::Written { bytes: &bytes, damaged: Vec::new() };
        let mut part = Vec::new();
        CopyItem::Blocks { inode: InodeId(20), first: 0, blocks }.encode(&mut part);
        import.import_part(&part).unwrap();
        if round % 2 == 0 {
            import.commit().unwrap();
        }
    }
    let reserved = CopiedBlocks::Reserved(30);
    let mut part = Vec::new();
    CopyItem::Blocks { inode: InodeId(20), first: 0, blocks: reserved }.encode(&mut part);
    import.import_part(&part).unwrap();
}

#[test]
fn copy_with_a_missing_part_is_incomplete() {
    let mut writer = random_tree(TestMedium::Memory, 9);
    let (parts, end) = parts_of(&mut writer.store);
    let arena = NodeArena::new(TestMedium::Memory, replica(), &REPLICA_BLOCKS);
    let is_inode = |part: &Vec<u8>| matches!(CopyItem::decode(part), Ok((CopyItem::Inode { .. }, _)));
    let missing = parts.iter().rposition(is_inode).unwrap();
    let mut others = parts.clone();
    others.remove(missing);
    let result = import_all(&arena, &others, &end);
    assert!(matches!(result, Err(FullCopyError::Incomplete { what: "inodes", .. })));
    assert!(arena.is_copying());
    import_all(&arena, &parts, &end).unwrap();
}

/// Numbers that the node has given out stay given out, though no inode of the copy bears them.
#[test]
fn numbers_given_out_before_a_copy_are_never_given_out_again() {
    let mut writer = random_tree(TestMedium::Memory, 10);
    let (parts, end) = parts_of(&mut writer.store);
    let arena = NodeArena::new(TestMedium::Memory, replica(), &REPLICA_BLOCKS);
    arena.format();
    let given = arena.open().unwrap().allocate_inodes(100).unwrap();
    let session = arena.open().unwrap().next_session_id().unwrap();
    let mut copy = import_all(&arena, &parts, &end).unwrap();
    assert!(copy.allocate_inodes(1).unwrap().start >= given.end);
    assert!(copy.next_session_id().unwrap() > session);
}

fn assert_refused(item: &CopyItem<'_>) {
    let arena = NodeArena::new(TestMedium::Memory, replica(), &[20]);
    let mut import = arena.begin_import().unwrap();
    let mut part = Vec::new();
    item.encode(&mut part);
    let error = import.import_part(&part).err();
    assert!(matches!(error, Some(FullCopyError::Item(_))), "{item:?}: {error:?}");
    assert!(matches!(import.commit(), Err(FullCopyError::Failed)));
}

#[test]
fn items_that_no_store_holds_are_refused() {
    let (file, blocks) = (InodeId(20), vec![0; 32 * BLOCK_BYTES as usize]);
    let at = |first, blocks| CopyItem::Blocks { inode: file, first, blocks };
    let written = |bytes, damaged| CopiedBlocks::Written { bytes, damaged };
    let inode = Inode::new(FileKind::Regular, 0o644, InodeId::ROOT, Timestamp::default());
    let link = Inode { kind: FileKind::Symlink, ..inode.clone() };
    let long = Inode { kind: FileKind::Symlink, target: vec![b'x'; 5000], ..inode.clone() };
    let mode = Inode { mode: 0o100_644, ..inode.clone() };
    let items = [
        at(0, CopiedBlocks::Hole(0)),
        at(0, CopiedBlocks::Hole(129)),
        at(1, CopiedBlocks::Hole(128)),
        at(u64::MAX, CopiedBlocks::Hole(1)),
        at(u64::MAX / BLOCK_BYTES, CopiedBlocks::Reserved(1)),
        at(100, CopiedBlocks::Reserved(40)),
        at(0, written(&blocks[..100], Vec::new())),
        at(0, written(&blocks[..0], Vec::new())),
        at(0, written(&blocks, Vec::new())),
        at(0, written(&blocks[..BLOCK_BYTES as usize], vec![1])),
        at(127, written(&blocks[..2 * BLOCK_BYTES as usize], Vec::new())),
        CopyItem::Inode { inode: InodeId(0), value: None },
        CopyItem::Inode { inode: InodeId(1 << 48), value: Some(inode.clone()) },
        CopyItem::Inode { inode: file, value: Some(link) },
        CopyItem::Inode { inode: file, value: Some(long) },
        CopyItem::Inode { inode: file, value: Some(mode) },
        CopyItem::Entry { directory: InodeId::ROOT, name: b"", target: None },
        CopyItem::Entry { directory: InodeId::ROOT, name: b"a/b", target: None },
        CopyItem::Entry { directory: InodeId::ROOT, name: &[b'x'; 256], target: None },
        CopyItem::Inline { inode: file, bytes: Some(b"") },
        CopyItem::Inline { inode: file, bytes: Some(&blocks[..1025]) },
        CopyItem::Xattr { inode: file, name: b"", value: None },
        CopyItem::Xattr { inode: file, name: &[b'x'; 256], value: None },
        CopyItem::Xattr { inode: file, name: b"user.x", value: Some(&blocks[..65_537]) },
        CopyItem::Orphan { inode: InodeId(u64::MAX), is_orphan: true },
        CopyItem::Session { session: SessionId::SHARED_FS, state: None },
        CopyItem::Session { session: SessionId(u64::MAX), state: None },
        CopyItem::Quota { key: QuotaKey::Subtree(QuotaId(0)), account: None },
        CopyItem::Quota { key: QuotaKey::Subtree(QuotaId(u64::MAX)), account: None },
    ];
    items.iter().for_each(assert_refused);
}

fn import_any(parts: &[Vec<u8>], end: &CopyEnd) {
    let arena = NodeArena::new(TestMedium::Memory, replica(), &REPLICA_BLOCKS);
    let mut import = arena.begin_import().unwrap();
    let failed = parts.iter().find_map(|part| import.import_part(part).err());
    let finished = import.finish(end);
    if failed.is_some() {
        assert!(matches!(finished, Err(FullCopyError::Failed)));
    }
    let is_whole = finished.is_ok();
    drop(finished);
    assert_eq!(arena.is_copying(), !is_whole);
    if is_whole {
        arena.open().unwrap().check(&mut |_| {}).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_imported_or_refused(
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..20),
    ) {
        import_any(&parts, &CopyEnd { writer: WRITER, mark: Default::default(), inodes: 1, entries: 0 });
    }

    /// A tree with some bytes changed.
    #[test]
    fn damaged_parts_are_imported_or_refused(
        seed in 0_u64..1000,
        changes in prop::collection::vec((any::<u16>(), any::<u16>(), any::<u8>()), 1..4),
    ) {
        let mut writer = random_tree(TestMedium::Memory, seed);
        let (mut parts, end) = parts_of(&mut writer.store);
        for (part, byte, value) in changes {
            let count = parts.len();
            let part = &mut parts[usize::from(part) % count];
            let length = part.len();
            part[usize::from(byte) % length.min(40)] = value;
        }
        import_any(&parts, &end);
    }
}

#[test]
fn part_that_is_too_long_is_refused() {
    let arena = NodeArena::new(TestMedium::Memory, replica(), &[20]);
    let mut import: StoreImport = arena.begin_import().unwrap();
    assert!(matches!(import.import_part(&vec![0; COPY_PART_BYTES_MAX + 1]), Err(FullCopyError::Encoding(_))));
}
