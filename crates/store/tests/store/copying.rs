//! Full copies of a store while it is written to.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use ashlar_store::{CopyBacklog, CopySource, Store};
use ashlar_types::{BLOCK_BYTES, FileKind, InodeId, LogPosition, SessionId, Timestamp};
use ashlar_update::{Allocation, Create, Update};

use crate::copy_bench::{NodeArena, RandomWriter, WRITER, check_clean, dump, replica};
use crate::media::{TestMedium, on_both_databases};

const FILE: InodeId = InodeId(500);
const PART: usize = ashlar_store::COPY_PART_BYTES_MAX;
const AT: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
/// Few blocks, so that they are soon used again.
const BLOCKS: [u32; 2] = [60, 90];
/// A replica's arena has another shape, and more room.
const REPLICA_BLOCKS: [u32; 3] = [100, 30, 200];

fn apply(store: &mut Store, update: &Update<'_>) {
    store.apply(SessionId::SHARED_FS, LogPosition(0), update, &|_| true).unwrap();
}

fn create(store: &mut Store, inode: InodeId, parent: InodeId, name: &[u8], kind: FileKind) {
    apply(
        store,
        &Update::Create(Create {
            inode,
            parent,
            name,
            kind,
            mode: 0o644,
            uid: 1,
            gid: 2,
            device: 0,
            at: AT,
            target: if kind == FileKind::Symlink { b"over there" } else { b"" },
            acl_access: &[],
            acl_default: &[],
        }),
    );
}

fn write(store: &mut Store, inode: InodeId, offset: u64, data: &[u8]) {
    apply(store, &Update::Write { inode, offset, at: AT, strip: false, data });
}

/// Copies a tree that does not change.
fn copy_still(store: &mut Store, arena: &NodeArena) -> Store {
    let (mut source, mut import) = (store.begin_copy().unwrap(), arena.begin_import().unwrap());
    while let Some(part) = source.next_part(PART).unwrap() {
        import.import_part(&part).unwrap();
    }
    let end = source.begin_last_pass().unwrap();
    assert_eq!(source.next_part(PART).unwrap(), None, "nothing was touched");
    import.finish(&end).unwrap()
}

fn copy_of_a_working_writer_is_its_tree(medium: TestMedium) {
    let seeds = if medium == TestMedium::Memory { 36 } else { 12 };
    for seed in 0..seeds {
        let mut writer = RandomWriter::new(medium, &BLOCKS, seed);
        let before = writer.choose(900);
        writer.work(before);
        if seed % 4 != 0 {
            writer.commit();
        }
        let arena = NodeArena::new(medium, replica(), &REPLICA_BLOCKS);
        // A store that was there before is replaced.
        if seed % 2 == 0 {
            arena.format();
        }
        let part_bytes = [1, 3 * BLOCK_BYTES as usize, PART][seed as usize % 3];
        let (mut copy, end) = writer.copy_to(&arena, part_bytes, 2 + seed as usize % 9);
        writer.check_copy(&mut copy, &end);
        let text = dump(&copy);
        drop(copy);
        assert_eq!(dump(&arena.open().unwrap()), text);
        writer.commit();
        check_clean(&mut writer.store);
    }
}

/// The copier works beside the writer's thread, without its lock.
fn copy_beside_a_writing_thread_is_its_tree(medium: TestMedium) {
    for seed in 100..103 {
        let mut writer = RandomWriter::new(medium, &BLOCKS, seed);
        writer.work(300);
        writer.commit();
        let arena = NodeArena::new(medium, replica(), &REPLICA_BLOCKS);
        let (mut source, mut import) = (writer.store.begin_copy().unwrap(), arena.begin_import().unwrap());
        let (writer, is_over) = (Mutex::new(writer), AtomicBool::new(false));
        let end = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    writer.lock().unwrap().work(3);
                }
            });
            let mut send = |source: &mut CopySource| {
                while let Some(part) = source.next_part(1).unwrap() {
                    import.import_part(&part).unwrap();
                    std::thread::yield_now();
                }
            };
            send(&mut source);
            for _ in 0..4 {
                source.begin_pass().unwrap();
                send(&mut source);
            }
            let end = source.begin_last_pass().unwrap();
            send(&mut source);
            is_over.store(true, Ordering::Relaxed);
            end
        });
        let mut copy = import.finish(&end).unwrap();
        writer.into_inner().unwrap().check_copy(&mut copy, &end);
    }
}

fn long_sparse_and_reserved_files_keep_their_shape(medium: TestMedium) {
    let source = NodeArena::new(medium, WRITER, &[4000, 4000]);
    source.format();
    let mut store = source.open().unwrap();
    create(&mut store, FILE, InodeId::ROOT, b"long", FileKind::Regular);
    for piece in 0..12_u64 {
        let data: Vec<u8> = (0..1 << 20).map(|byte: u64| (byte * 7 % 251) as u8 ^ piece as u8).collect();
        write(&mut store, FILE, piece << 20, &data);
        store.commit().unwrap();
    }
    write(&mut store, FILE, 1 << 40, b"far away");
    let how = Allocation::ReserveKeepSize;
    apply(&mut store, &Update::Allocate { inode: FILE, how, offset: 1 << 41, length: 3 << 20, strip: false, at: AT });
    let punch = Allocation::Punch;
    apply(
        &mut store,
        &Update::Allocate { inode: FILE, how: punch, offset: 12_345, length: 700_000, strip: false, at: AT },
    );
    store.commit().unwrap();
    let reserved = store.space().blocks_reserved;
    assert_eq!(reserved, 768);
    let arena = NodeArena::new(medium, replica(), &[5000, 4000]);
    let mut copy = copy_still(&mut store, &arena);
    assert_eq!(dump(&copy), dump(&store));
    assert_eq!(copy.space().blocks_reserved, reserved);
    assert_eq!(copy.inode(FILE).unwrap(), store.inode(FILE).unwrap());
    check_clean(&mut copy);
}

fn long_directories_and_attributes_are_copied(medium: TestMedium) {
    let source = NodeArena::new(medium, WRITER, &[200]);
    source.format();
    let mut store = source.open().unwrap();
    for number in 0..9000_u64 {
        let kind = if number % 3 == 0 { FileKind::Symlink } else { FileKind::Regular };
        create(&mut store, InodeId(1000 + number), InodeId::ROOT, format!("file {number}").as_bytes(), kind);
    }
    apply(&mut store, &Update::Link { inode: InodeId(1001), parent: InodeId::ROOT, name: b"another", at: AT });
    for length in [0, 1, 5000, 65_536] {
        let (name, value) = (format!("user.{length}"), vec![7; length]);
        let inode = InodeId(1001 + length as u64 % 7);
        apply(&mut store, &Update::SetXattr { inode, name: name.as_bytes(), value: &value, mode: None, at: AT });
    }
    store.commit().unwrap();
    let arena = NodeArena::new(medium, replica(), &[200]);
    let mut copy = copy_still(&mut store, &arena);
    assert_eq!(dump(&copy), dump(&store));
    check_clean(&mut copy);
}

/// The blocks of the last pass's state stay as they were, though the writer frees them and has no others.
///
/// A copy with the bytes that stand in a block later would be wrong for good: a write of a part of a block, which
/// follows, keeps the rest.
fn blocks_of_the_last_pass_are_not_used_again(medium: TestMedium) {
    let source = NodeArena::new(medium, WRITER, &[4096]);
    source.format();
    let mut store = source.open().unwrap();
    create(&mut store, FILE, InodeId::ROOT, b"file", FileKind::Regular);
    let mut copier = store.begin_copy().unwrap();
    let arena = NodeArena::new(medium, replica(), &[4096]);
    let mut import = arena.begin_import().unwrap();
    while let Some(part) = copier.next_part(PART).unwrap() {
        import.import_part(&part).unwrap();
    }
    write(&mut store, FILE, 0, &[1; 100 * BLOCK_BYTES as usize]);
    store.commit().unwrap();
    let end = copier.begin_last_pass().unwrap();
    let free = store.space().blocks_free;
    let part_of_each = |store: &mut Store| {
        (0..100).for_each(|block| write(store, FILE, block * BLOCK_BYTES + 9, &[2; 5]));
    };
    part_of_each(&mut store);
    store.commit().unwrap();
    store.commit().unwrap();
    assert_eq!(store.space().blocks_free, free - 100, "the old blocks are not free yet");
    // Another file would take them.
    create(&mut store, InodeId(501), InodeId::ROOT, b"other", FileKind::Regular);
    write(&mut store, InodeId(501), 0, &vec![3; (free as usize - 100) * BLOCK_BYTES as usize]);
    store.commit().unwrap();
    while let Some(part) = copier.next_part(1).unwrap() {
        import.import_part(&part).unwrap();
    }
    let mut copy = import.finish(&end).unwrap();
    part_of_each(&mut copy);
    let (mut found, mut expected) = (vec![0; 100 * BLOCK_BYTES as usize], vec![0; 100 * BLOCK_BYTES as usize]);
    copy.read(FILE, 0, &mut found).unwrap();
    store.read(FILE, 0, &mut expected).unwrap();
    assert_eq!(found, expected);
    // The pass is over, so the next commit frees them.
    create(&mut store, InodeId(502), InodeId::ROOT, b"third", FileKind::Regular);
    store.commit().unwrap();
    assert_eq!(store.space().blocks_free, 100);
}

/// A pass of a long file sends the touched pieces.
fn passes_send_what_was_touched(medium: TestMedium) {
    let source = NodeArena::new(medium, WRITER, &[4096, 4096]);
    source.format();
    let mut store = source.open().unwrap();
    create(&mut store, FILE, InodeId::ROOT, b"file", FileKind::Regular);
    write(&mut store, FILE, 0, &vec![1; 16 << 20]);
    store.commit().unwrap();
    let mut copier = store.begin_copy().unwrap();
    let arena = NodeArena::new(medium, replica(), &[4096, 4096]);
    let mut import = arena.begin_import().unwrap();
    let mut sent = 0;
    while let Some(part) = copier.next_part(PART).unwrap() {
        assert!(part.len() <= PART);
        sent += part.len();
        import.import_part(&part).unwrap();
        write(&mut store, FILE, 5 << 20, b"again and again");
        store.commit().unwrap();
    }
    assert!((16 << 20..17 << 20).contains(&sent), "{sent} bytes");
    let CopyBacklog { rows, chunks } = copier.backlog();
    assert_eq!((rows, chunks), (2, 1), "the inode and a chunk");
    assert!(copier.backlog().bytes() < 600_000);
    copier.begin_pass().unwrap();
    while let Some(part) = copier.next_part(PART).unwrap() {
        import.import_part(&part).unwrap();
    }
    assert_eq!((copier.progress().pass, copier.progress().rows), (1, 2));
    let end = copier.begin_last_pass().unwrap();
    assert_eq!(copier.next_part(PART).unwrap(), None);
    let copy = import.finish(&end).unwrap();
    assert_eq!(dump(&copy), dump(&store));
}

/// Files that are made during the first pass are left to the next one, so that it ends.
fn first_pass_ends_though_files_are_made(medium: TestMedium) {
    let source = NodeArena::new(medium, WRITER, &[4096, 4096]);
    source.format();
    let mut store = source.open().unwrap();
    create(&mut store, FILE, InodeId::ROOT, b"file", FileKind::Regular);
    write(&mut store, FILE, 0, &vec![1; 2 << 20]);
    store.commit().unwrap();
    let mut copier = store.begin_copy().unwrap();
    let arena = NodeArena::new(medium, replica(), &[4096, 4096]);
    let (mut import, mut files) = (arena.begin_import().unwrap(), 0);
    let mut send = |copier: &mut CopySource, store: &mut Store, files_max| {
        while let Some(part) = copier.next_part(PART / 2).unwrap() {
            import.import_part(&part).unwrap();
            if files < files_max {
                files += 1;
                let inode = InodeId(1000 + files);
                create(store, inode, InodeId::ROOT, format!("{files}").as_bytes(), FileKind::Regular);
                write(store, inode, 0, &[2; PART]);
                store.commit().unwrap();
            }
        }
        files
    };
    let made = send(&mut copier, &mut store, 100);
    assert!((16..24).contains(&made), "{made} files were made");
    copier.begin_pass().unwrap();
    send(&mut copier, &mut store, 0);
    let end = copier.begin_last_pass().unwrap();
    send(&mut copier, &mut store, 0);
    assert_eq!(dump(&import.finish(&end).unwrap()), dump(&store));
}

fn damaged_blocks_stay_damaged_in_the_copy(medium: TestMedium) {
    let source = NodeArena::new(medium, WRITER, &[4096]);
    source.format();
    let mut store = source.open().unwrap();
    create(&mut store, FILE, InodeId::ROOT, b"file", FileKind::Regular);
    write(&mut store, FILE, 0, &[1; 3 * BLOCK_BYTES as usize]);
    store.commit().unwrap();
    let ashlar_types::Contents::Extents(extents) = store.contents(FILE).unwrap() else { panic!("no blocks") };
    let address = extents[0].address.unwrap();
    store.segments().next().unwrap().store(address.block() + 1, 7, &[9]).unwrap();
    let arena = NodeArena::new(medium, replica(), &[4096]);
    let copy = copy_still(&mut store, &arena);
    let mut bytes = [0; BLOCK_BYTES as usize];
    copy.read(FILE, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; BLOCK_BYTES as usize]);
    copy.read(FILE, BLOCK_BYTES, &mut bytes).unwrap_err();
    copy.read(FILE, 2 * BLOCK_BYTES, &mut bytes).unwrap();
}

/// A segment that is added meanwhile has blocks of rows that a later pass sends.
fn segment_added_during_a_copy_is_read(medium: TestMedium) {
    let TestMedium::Memory = medium else { return };
    let source = NodeArena::new(medium, WRITER, &[20]);
    source.format();
    let mut store = source.open().unwrap();
    create(&mut store, FILE, InodeId::ROOT, b"file", FileKind::Regular);
    let mut copier = store.begin_copy().unwrap();
    let NodeArena::Memory(memory) = &source else { return };
    store.add_segment(memory.add_segment(4000)).unwrap();
    write(&mut store, FILE, 0, &[1; 100 * BLOCK_BYTES as usize]);
    store.commit().unwrap();
    let arena = NodeArena::new(medium, replica(), &[4000]);
    let mut import = arena.begin_import().unwrap();
    while let Some(part) = copier.next_part(PART).unwrap() {
        import.import_part(&part).unwrap();
    }
    let end = copier.begin_last_pass().unwrap();
    while let Some(part) = copier.next_part(PART).unwrap() {
        import.import_part(&part).unwrap();
    }
    assert_eq!(dump(&import.finish(&end).unwrap()), dump(&store));
}

on_both_databases!(
    copy_of_a_working_writer_is_its_tree,
    copy_beside_a_writing_thread_is_its_tree,
    long_sparse_and_reserved_files_keep_their_shape,
    long_directories_and_attributes_are_copied,
    blocks_of_the_last_pass_are_not_used_again,
    passes_send_what_was_touched,
    damaged_blocks_stay_damaged_in_the_copy,
    first_pass_ends_though_files_are_made,
    segment_added_during_a_copy_is_read,
);
