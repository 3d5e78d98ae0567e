//! The store's promises through crashes, failures, damage and growth, one story per test.

use std::sync::Arc;

use crate::media::{StoreTestArena, TestMedium, on_both_databases};
use ashlar_pmem::{Arena, ArenaOptions};
use ashlar_store::{Problem, Store, StoreError};
use ashlar_types::{BlockAddress, Contents, FileKind, InodeId, LogGeneration, LogPosition, SessionId, Timestamp};
use ashlar_update::{Allocation, Create, Invalid, Update};

const SESSION: SessionId = SessionId(1);
const MIB: u64 = 1 << 20;

struct Node {
    arena: StoreTestArena,
    store: Store,
    position: u64,
}

impl Node {
    fn new(medium: TestMedium, size_bytes: u64) -> Self {
        let arena = StoreTestArena::new(medium, size_bytes);
        let mut store = arena.open();
        store.set_session(SESSION, LogGeneration(3), LogPosition(0));
        store.commit().unwrap();
        Self { arena, store, position: 0 }
    }

    /// The process dies and comes back.
    fn restart(self) -> Self {
        let Self { arena, store, position } = self;
        drop(store);
        let store = arena.open();
        Self { arena, store, position }
    }

    fn try_apply(&mut self, update: &Update<'_>) -> Result<ashlar_update::Applied, StoreError> {
        self.position += 1;
        self.store.apply(SESSION, LogPosition(self.position), update, &|_| true)
    }

    fn apply(&mut self, update: &Update<'_>) {
        self.try_apply(update).unwrap();
    }

    fn create(&mut self, inode: u64, parent: u64, name: &[u8], kind: FileKind) {
        self.apply(&Update::Create(Create {
            inode: InodeId(inode),
            parent: InodeId(parent),
            name,
            kind,
            mode: 0o755,
            uid: 0,
            gid: 0,
            device: 0,
            at: Timestamp::default(),
            target: if kind == FileKind::Symlink { b"x" } else { b"" },
            acl_access: &[],
            acl_default: &[],
        }));
    }

    fn write(&mut self, inode: u64, offset: u64, data: &[u8]) {
        let at = Timestamp::default();
        self.apply(&Update::Write { inode: InodeId(inode), offset, at, strip: false, data });
    }

    fn unlink(&mut self, inode: u64, parent: u64, name: &[u8]) {
        let (inode, parent, at) = (InodeId(inode), InodeId(parent), Timestamp::default());
        self.apply(&Update::Unlink { inode, parent, name, release: true, at });
    }

    fn read(&self, inode: u64, length: usize) -> Result<Vec<u8>, StoreError> {
        let mut bytes = vec![0xee; length];
        let count = self.store.read(InodeId(inode), 0, &mut bytes)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    fn address(&self, inode: u64, block: u64) -> Option<BlockAddress> {
        let Contents::Extents(extents) = self.store.contents(InodeId(inode)).unwrap() else { panic!("it is inline") };
        let extent = extents.iter().find(|e| (e.logical_block..e.logical_block + e.blocks).contains(&block))?;
        Some(extent.address?.plus(block - extent.logical_block))
    }

    fn check(&mut self) -> Vec<Problem> {
        self.store.check(&mut |_| {}).unwrap().problems
    }
}

fn uncommitted_updates_are_gone_after_a_crash(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"kept", FileKind::Regular);
    node.write(16, 0, &[5; 10_000]);
    node.store.commit().unwrap();
    node.create(17, 1, b"lost", FileKind::Regular);
    assert_eq!((node.store.applied(SESSION), node.store.committed(SESSION)), (LogPosition(3), LogPosition(2)));
    let mut node = node.restart();
    assert_eq!((node.store.applied(SESSION), node.store.committed(SESSION)), (LogPosition(2), LogPosition(2)));
    assert_eq!(node.store.sessions()[0].1.generation, LogGeneration(3));
    assert_eq!(node.store.inode(InodeId(17)).unwrap(), None);
    assert_eq!(node.read(16, 20_000).unwrap(), [5; 10_000]);
    assert_eq!(node.check(), []);
}

fn numbers_are_never_given_out_twice(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    let (mut inodes, mut sessions) = (0, 0);
    for round in 0..4 {
        let range = node.store.allocate_inodes(1 << 19).unwrap();
        assert!(range.start >= inodes.max(16) && range.end - range.start == 1 << 19);
        let session = node.store.next_session_id().unwrap().0;
        assert!(session > sessions);
        (inodes, sessions) = (range.end, session);
        if round % 2 == 0 {
            node.create(range.start, 1, format!("{round}").as_bytes(), FileKind::Regular);
            node.store.commit().unwrap();
        }
        node = node.restart();
    }
    // A number set aside while a commit is under way survives that commit.
    node.create(inodes, 1, b"x", FileKind::Regular);
    let job = node.store.begin_commit().unwrap();
    let range = node.store.allocate_inodes(1 << 22).unwrap();
    let done = job.run();
    node.store.finish_commit(done).unwrap();
    let mut node = node.restart();
    assert!(node.store.allocate_inodes(1).unwrap().start >= range.end);
}

fn the_store_goes_on_while_a_commit_runs(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"a", FileKind::Regular);
    node.write(16, 0, &[1; 5000]);
    let job = node.store.begin_commit().unwrap();
    assert!(node.store.begin_commit().is_none(), "one at a time");
    let thread = std::thread::spawn(move || job.run());
    node.write(16, 100, &[2; 50]);
    node.create(17, 1, b"b", FileKind::Regular);
    node.unlink(17, 1, b"b");
    let done = thread.join().unwrap();
    node.store.finish_commit(done).unwrap();
    assert_eq!(node.store.committed(SESSION), LogPosition(2));
    let mut expected = vec![1; 5000];
    expected[100..150].fill(2);
    assert_eq!(node.read(16, 9000).unwrap(), expected);
    // The first commit knows nothing of what came after its freeze.
    let node = node.restart();
    assert_eq!(node.read(16, 9000).unwrap(), [1; 5000]);
}

fn lost_commit_is_tried_again(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"a", FileKind::Regular);
    drop(node.store.begin_commit().unwrap());
    node.create(17, 1, b"b", FileKind::Regular);
    assert!(node.store.entry(InodeId::ROOT, b"a").unwrap().is_some());
    node.store.commit().unwrap();
    let node = node.restart();
    assert_eq!(node.store.inode(InodeId::ROOT).unwrap().unwrap().entries, 2);
}

fn made_and_deleted_in_one_batch_leaves_no_trace(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"a", FileKind::Regular);
    node.write(16, 0, &[1; 9000]);
    node.create(17, 1, b"b", FileKind::Regular);
    node.write(17, 0, &[1; 100]);
    let waiting = node.store.uncommitted_bytes();
    assert!(waiting > 300);
    node.unlink(16, 1, b"a");
    node.unlink(17, 1, b"b");
    assert_eq!(node.store.space().blocks_pinned, 3);
    node.store.commit().unwrap();
    let space = node.store.space();
    assert_eq!((space.blocks_free, space.blocks_pinned), (space.blocks_total, 0));
    assert_eq!(node.check(), []);
}

fn small_appends_to_one_block_take_one_block(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"a", FileKind::Regular);
    node.write(16, 0, &[1; 2000]);
    let before = node.store.space();
    for step in 0..16 {
        node.write(16, 2000 + step * 128, &[2; 128]);
    }
    assert_eq!(node.store.space(), before);
    node.store.commit().unwrap();
    // A committed block is copied once, and then the copy takes the rest.
    let old = node.address(16, 0);
    node.write(16, 0, &[3; 10]);
    let new = node.address(16, 0);
    node.write(16, 10, &[4; 10]);
    assert!(old != new && new == node.address(16, 0));
    assert_eq!(node.store.space().blocks_free, before.blocks_free - 1);
}

fn partly_replaced_block_waits_for_its_session(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    let total = node.store.space().blocks_total;
    node.create(16, 1, b"a", FileKind::Regular);
    node.write(16, 0, &[1; 5 * 4096]);
    node.store.commit().unwrap();
    // The session may yet read the beginning of the second block and the end of the last by its old extents.
    node.write(16, 5000, &[2; 13_000]);
    node.store.commit().unwrap();
    let space = node.store.space();
    assert_eq!((space.blocks_free, space.blocks_pinned), (total - 7, 2));
    node.store.release(SESSION, LogPosition(node.position));
    let space = node.store.space();
    assert_eq!((space.blocks_free, space.blocks_pinned), (total - 5, 0));
}

fn a_full_arena_changes_nothing_and_frees_after_commit(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    let total = node.store.space().blocks_total;
    node.create(16, 1, b"a", FileKind::Regular);
    let at = Timestamp::default();
    let reserve = |how, blocks: u64| Update::Allocate {
        inode: InodeId(16),
        how,
        offset: 0,
        length: blocks * 4096,
        strip: false,
        at,
    };
    node.apply(&reserve(Allocation::Reserve, total));
    assert_eq!(node.store.space().blocks_free, 0);
    node.create(17, 1, b"b", FileKind::Regular);
    let too_much = Update::Write { inode: InodeId(17), offset: 0, at, strip: false, data: &[1; 5000] };
    assert!(matches!(node.try_apply(&too_much), Err(StoreError::FullBlocks { needed: 2, free: 0 })));
    assert_eq!(node.store.inode(InodeId(17)).unwrap().unwrap().blocks, 0);
    // All reserved space can be written.
    for block in 0..total {
        node.write(16, block * 4096, &[block as u8; 4096]);
    }
    assert!(matches!(node.try_apply(&reserve(Allocation::Reserve, total + 1)), Err(StoreError::FullBlocks { .. })));
    node.apply(&reserve(Allocation::Punch, total));
    assert!(matches!(node.try_apply(&too_much), Err(StoreError::FullBlocks { .. })));
    node.store.commit().unwrap();
    node.apply(&too_much);
    assert_eq!(node.check(), []);
}

fn full_metadata_refuses_additions_and_allows_deletions(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    let value = vec![7; 60_000];
    let mut last = 0;
    let full = loop {
        last += 1;
        let (inode, name) = (InodeId(1), format!("user.{last}"));
        let (name, at) = (name.as_bytes(), Timestamp::default());
        match node.try_apply(&Update::SetXattr { inode, name, value: &value, mode: None, at }) {
            Ok(_) if last % 100 == 0 => drop(node.store.commit().unwrap()),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(full, StoreError::FullMetadata { .. }), "{full}");
    let inode = InodeId(1);
    for number in 1..last {
        let name = format!("user.{number}");
        let (name, at) = (name.as_bytes(), Timestamp::default());
        node.apply(&Update::RemoveXattr { inode, name, mode: None, at });
        if number % 100 == 0 {
            // Every page is rewritten while the budget is full, and the map holds it.
            node.store.commit().unwrap();
        }
    }
    node.store.commit().unwrap();
    assert!(node.store.space().metadata_bytes_used < MIB);
    node.create(16, 1, b"a", FileKind::Regular);
}

fn uncommitted_deletions_take_no_promised_space(medium: TestMedium) {
    const FILES: u64 = 3000;
    let mut node = Node::new(medium, 16 * MIB);
    let name = |number: u64| format!("f{number}");
    for number in 0..FILES {
        node.create(16 + number, 1, name(number).as_bytes(), FileKind::Regular);
    }
    // Only some 100 KiB are left, which a session was promised.
    for number in 0.. {
        node.store.commit().unwrap();
        let space = node.store.space();
        let left = space.metadata_bytes_total - space.metadata_bytes_used;
        if left < 100 << 10 {
            break;
        }
        let (value, name, at) = (vec![7; left.min(60_000) as usize], format!("user.{number}"), Timestamp::default());
        let (inode, name) = (InodeId(1), name.as_bytes());
        node.apply(&Update::SetXattr { inode, name, value: &value, mode: None, at });
    }
    let before = node.store.space();
    for number in 0..FILES {
        node.unlink(16 + number, 1, name(number).as_bytes());
    }
    let after = node.store.space();
    assert!(after.metadata_bytes_used <= before.metadata_bytes_used, "{before:?} {after:?}");
    for number in 0..50 {
        node.create(16 + FILES + number, 1, name(number).as_bytes(), FileKind::Regular);
    }
    node.store.commit().unwrap();
    assert!(node.store.space().metadata_bytes_used < before.metadata_bytes_used);
}

fn damage_survives_partial_overwrites_and_is_found(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"a", FileKind::Regular);
    node.write(16, 0, &[1; 8192]);
    node.store.commit().unwrap();
    let address = node.address(16, 1).unwrap();
    node.arena.damage(address, 4000);
    let is_checksum = |result: Result<Vec<u8>, StoreError>| {
        matches!(result, Err(StoreError::Checksum { inode: InodeId(16), block: 1, .. }))
    };
    assert!(is_checksum(node.read(16, 8192)));
    assert_eq!(node.read(16, 4096).unwrap(), [1; 4096]);
    let inode = InodeId(16);
    assert_eq!(node.check(), [Problem::DamagedBlock { inode, block: 1, address }]);
    // The copy of the block is damaged as well, and so it stays when more is written into it.
    for offset in [4096, 4200] {
        node.write(16, offset, &[2; 100]);
        assert!(is_checksum(node.read(16, 8192)));
    }
    assert_eq!(node.store.damaged_blocks(), 1);
    assert_eq!(node.check().len(), 1);
    // Only a whole new block is sound again.
    node.write(16, 4096, &[3; 4096]);
    assert_eq!(node.read(16, 8192).unwrap()[4096..], [3; 4096]);
    assert_eq!(node.check(), []);
}

fn zeroing_a_whole_small_file_leaves_a_reservation(medium: TestMedium) {
    for length in [100, 5000u64] {
        let mut node = Node::new(medium, 16 * MIB);
        node.create(16, 1, b"a", FileKind::Regular);
        node.write(16, 0, &vec![1; length as usize]);
        let at = Timestamp::default();
        let (how, inode) = (Allocation::ZeroKeepSize, InodeId(16));
        node.apply(&Update::Allocate { inode, how, offset: 0, length: 8192, strip: false, at });
        assert_eq!(node.store.space().blocks_reserved, 2);
        assert_eq!(node.read(16, 9000).unwrap(), vec![0; length as usize]);
    }
}

fn segment_is_emptied_removed_and_replaced(medium: TestMedium) {
    // The twin needs no files of the largest size.
    let mut node = Node::new(medium, if medium == TestMedium::Lmdb { 600 * MIB } else { 128 * MIB });
    let segments = node.arena.segments();
    assert!(segments.len() >= 2);
    for file in 0..40 {
        node.create(16 + file, 1, format!("{file}").as_bytes(), FileKind::Regular);
        node.write(16 + file, 0, &vec![file as u8; 300_000]);
    }
    let first = node.address(16, 0).unwrap().segment();
    let mut moved = node.store.retire_segment(first).unwrap();
    moved.sort_unstable();
    assert_eq!(moved, (16..56).map(InodeId).collect::<Vec<_>>());
    node.store.remove_segment(first).unwrap();
    assert_eq!(node.store.remove_segment(first).unwrap_err().to_string(), StoreError::Segment(first).to_string());
    for file in 0..40 {
        assert_eq!(node.read(16 + file, 400_000).unwrap(), vec![file as u8; 300_000]);
        assert_ne!(node.address(16 + file, 0).unwrap().segment(), first);
    }
    let before = node.store.space();
    let info = segments.into_iter().find(|info| info.number == first).unwrap();
    node.store.add_segment(info).unwrap();
    assert_eq!(node.store.space().blocks_free, before.blocks_free + u64::from(info.blocks));
    assert_eq!(node.check(), []);
}

fn a_checker_sees_its_state_while_the_store_goes_on(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"a", FileKind::Regular);
    node.write(16, 0, &[1; 100_000]);
    node.store.commit().unwrap();
    let checker = node.store.checker().unwrap();
    node.unlink(16, 1, b"a");
    node.store.commit().unwrap();
    node.store.release_all(SESSION);
    // The blocks of the checker's view are given out to no session.
    assert_eq!(node.store.space().blocks_pinned, 25);
    node.create(17, 1, b"b", FileKind::Regular);
    let free = node.store.space().blocks_free;
    node.write(17, 0, &vec![2; free as usize * 4096]);
    let mut reported_blocks = 0;
    let report = checker.run(&mut |progress| reported_blocks = progress.total).unwrap();
    assert!(report.is_clean() && reported_blocks > 25, "{report:?}");
    assert_eq!((report.counts.inodes, report.counts.blocks, report.counts.bytes), (2, 25, 100_000));
    node.store.commit().unwrap();
    assert_eq!(node.store.space().blocks_pinned, 0);
}

fn an_invalid_update_changes_nothing_and_poisons_nothing(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    let inode = InodeId(99);
    let error = node.try_apply(&Update::Resize { inode, size: 1, strip: false, at: Timestamp::default() });
    assert!(matches!(error, Err(StoreError::Invalid(Invalid::NoInode(_)))));
    assert!(!node.store.is_dirty());
    node.create(16, 1, b"a", FileKind::Regular);
}

#[test]
fn opening_an_invalid_or_foreign_store_fails() {
    let node = Node::new(TestMedium::Lmdb, 16 * MIB);
    let StoreTestArena::Files(arena, directory) = node.arena else { panic!("it has files") };
    let options = ArenaOptions::new(16 * MIB);
    let other = Arc::new(Arena::create(&directory.path().join("other"), &options).unwrap());
    assert!(matches!(Store::open(Arc::clone(&other)), Err(StoreError::NotFormatted)));
    let from = arena.metadata_dir();
    drop(node.store);
    std::fs::create_dir_all(other.metadata_dir()).unwrap();
    std::fs::copy(from.join("data.mdb"), other.metadata_dir().join("data.mdb")).unwrap();
    assert!(matches!(Store::open(other), Err(StoreError::WrongArena { .. })));
    assert!(Store::open(arena).is_ok());
}

fn a_forgotten_session_stays_forgotten_and_pins_nothing(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(16, 1, b"a", FileKind::Regular);
    node.write(16, 0, &[1; 8192]);
    node.unlink(16, 1, b"a");
    node.store.remove_session(SESSION);
    node.store.commit().unwrap();
    assert_eq!(node.store.space().blocks_pinned, 0);
    let node = node.restart();
    assert_eq!(node.store.sessions(), []);
    assert_ne!(SESSION, SessionId::SHARED_FS);
}

/// Earlier versions stored attributes without end.
fn inode_with_too_many_attributes_is_shown_in_part_and_removed(medium: TestMedium) {
    let mut node = Node::new(medium, 64 * MIB);
    node.create(9, 1, b"file", FileKind::Regular);
    let (inode, at, value) = (InodeId(9), Timestamp::default(), vec![b'x'; 60_000]);
    let set = |node: &mut Node, name: &str, value: &[u8]| {
        node.apply(&Update::SetXattr { inode, name: name.as_bytes(), value, mode: None, at });
    };
    set(&mut node, "security.capability", b"capable");
    for count in 0..50 {
        set(&mut node, &format!("user.{count:02}"), &value);
    }
    for _ in 0..2 {
        let shown = node.store.xattrs(inode).unwrap();
        let names: Vec<_> = shown.iter().map(|(name, _)| name.as_slice()).collect();
        assert_eq!(names, [&b"security.capability"[..], b"user.00"]);
        assert!(!node.store.xattr_fits(inode, b"user.new", b"").unwrap());
        assert!(node.store.xattr_fits(inode, b"user.30", b"less than before").unwrap());
        node.store.commit().unwrap();
    }
    let removed = Update::RemoveXattr { inode, name: b"user.00", mode: None, at };
    node.apply(&removed);
    assert_eq!(node.store.xattrs(inode).unwrap()[1].0, b"user.01", "the next one shows");
    node.store.commit().unwrap();
    node = node.restart();
    node.unlink(9, 1, b"file");
    node.store.commit().unwrap();
    assert_eq!(node.store.xattrs(inode).unwrap(), []);
    assert_eq!(node.check(), []);
}

fn size_of_attributes_is_followed(medium: TestMedium) {
    let mut node = Node::new(medium, 16 * MIB);
    node.create(9, 1, b"file", FileKind::Regular);
    let (inode, at, value) = (InodeId(9), Timestamp::default(), vec![b'x'; 60_000]);
    let set = |name, value| Update::SetXattr { inode, name, value, mode: None, at };
    assert!(node.store.xattr_fits(inode, b"user.a", &value).unwrap());
    node.apply(&set(b"user.a", &value));
    assert!(!node.store.xattr_fits(inode, b"user.b", &value).unwrap());
    node.apply(&set(b"user.a", b"short"));
    assert!(node.store.xattr_fits(inode, b"user.b", &value).unwrap());
    node.apply(&set(b"user.b", &value));
    node.store.commit().unwrap();
    assert!(!node.store.xattr_fits(inode, b"user.a", &value).unwrap());
    node.apply(&Update::RemoveXattr { inode, name: b"user.b", mode: None, at });
    assert!(node.store.xattr_fits(inode, b"user.a", &value).unwrap());
}

on_both_databases!(
    uncommitted_updates_are_gone_after_a_crash,
    numbers_are_never_given_out_twice,
    the_store_goes_on_while_a_commit_runs,
    lost_commit_is_tried_again,
    made_and_deleted_in_one_batch_leaves_no_trace,
    small_appends_to_one_block_take_one_block,
    partly_replaced_block_waits_for_its_session,
    a_full_arena_changes_nothing_and_frees_after_commit,
    full_metadata_refuses_additions_and_allows_deletions,
    uncommitted_deletions_take_no_promised_space,
    damage_survives_partial_overwrites_and_is_found,
    zeroing_a_whole_small_file_leaves_a_reservation,
    segment_is_emptied_removed_and_replaced,
    a_checker_sees_its_state_while_the_store_goes_on,
    an_invalid_update_changes_nothing_and_poisons_nothing,
    a_forgotten_session_stays_forgotten_and_pins_nothing,
    inode_with_too_many_attributes_is_shown_in_part_and_removed,
    size_of_attributes_is_followed,
);
