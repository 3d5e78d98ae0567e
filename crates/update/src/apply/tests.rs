use proptest::prelude::*;

use super::*;
use crate::Whiteout;
use crate::model::{ModelTree, UpdateChoice};
use crate::test_updates::{at, rename};

const ROOT: InodeId = InodeId::ROOT;
const A: InodeId = InodeId(20);
const B: InodeId = InodeId(21);
const C: InodeId = InodeId(22);
const D: InodeId = InodeId(23);

fn create(inode: InodeId, parent: InodeId, name: &'static [u8], kind: FileKind) -> Update<'static> {
    Update::Create(Create {
        inode,
        parent,
        name,
        kind,
        mode: 0o755,
        uid: 5,
        gid: 6,
        device: 0,
        at: at(1),
        target: if kind == FileKind::Symlink { b"there" } else { b"" },
        acl_access: b"",
        acl_default: b"",
    })
}

fn file(inode: InodeId, parent: InodeId, name: &'static [u8]) -> Update<'static> {
    create(inode, parent, name, FileKind::Regular)
}

fn directory(inode: InodeId, parent: InodeId, name: &'static [u8]) -> Update<'static> {
    create(inode, parent, name, FileKind::Directory)
}

fn unlink(inode: InodeId, parent: InodeId, name: &'static [u8]) -> Update<'static> {
    Update::Unlink { inode, parent, name, release: true, at: at(5) }
}

fn remove(inode: InodeId, parent: InodeId, name: &'static [u8]) -> Update<'static> {
    Update::RemoveDirectory { inode, parent, name, release: true, at: at(5) }
}

fn link(inode: InodeId, parent: InodeId, name: &'static [u8]) -> Update<'static> {
    Update::Link { inode, parent, name, at: at(5) }
}

fn moved(
    inode: InodeId,
    from: (InodeId, &'static [u8]),
    to: (InodeId, &'static [u8]),
    target: Option<InodeId>,
) -> Update<'static> {
    Update::Rename(rename(inode, from, to, target))
}

/// As [`moved`], and leaves inode `left` at the old name.
fn whited_out(
    inode: InodeId,
    from: (InodeId, &'static [u8]),
    to: (InodeId, &'static [u8]),
    target: Option<InodeId>,
    left: InodeId,
) -> Update<'static> {
    let whiteout = Some(Whiteout { inode: left, uid: 8, gid: 9, acl_access: b"" });
    Update::Rename(Rename { whiteout, ..rename(inode, from, to, target) })
}

fn exchanged(
    inode: InodeId,
    from: (InodeId, &'static [u8]),
    to: (InodeId, &'static [u8]),
    target: InodeId,
) -> Update<'static> {
    Update::Rename(Rename { exchange: true, ..rename(inode, from, to, Some(target)) })
}

fn write(inode: InodeId, offset: u64, data: &'static [u8]) -> Update<'static> {
    Update::Write { inode, offset, at: at(5), strip: true, data }
}

fn allocate(how: Allocation, offset: u64, length: u64) -> Update<'static> {
    Update::Allocate { inode: A, how, offset, length, strip: false, at: at(5) }
}

/// A tree after these updates, which must all fit, and is sound.
fn tree(updates: &[Update<'_>]) -> ModelTree {
    let mut tree = ModelTree::new();
    for update in updates {
        tree.apply(update).unwrap_or_else(|invalid| panic!("{update:?}: {invalid}"));
        tree.check();
    }
    tree
}

fn links(tree: &ModelTree, inode: InodeId) -> u32 {
    tree.inodes[&inode].links
}

/// The times of changes according to `stat`: modified, changed.
fn times(tree: &ModelTree, inode: InodeId) -> (i64, i64) {
    let inode = &tree.inodes[&inode];
    (inode.modified.seconds, inode.changed.seconds)
}

#[track_caller]
fn is_refused(tree: &mut ModelTree, update: &Update<'_>, expected: Invalid) {
    let before = tree.clone();
    assert_eq!(tree.apply(update), Err(expected), "{update:?}");
    assert!(*tree == before, "{update:?} was refused and changed something");
}

#[test]
fn created_inode_has_links_and_times() {
    let mut made = tree(&[directory(A, ROOT, b"a"), file(B, A, b"b"), create(C, A, b"c", FileKind::Symlink)]);
    assert_eq!((links(&made, ROOT), links(&made, A), links(&made, B)), (3, 2, 1));
    assert_eq!((made.inodes[&A].entries, made.inodes[&C].size), (2, 5));
    assert_eq!((times(&made, A), times(&made, ROOT)), ((1, 1), (1, 1)));
    assert_eq!(made.inodes[&B].born, at(1));
    // The parent of an inode without a name is not touched.
    made.inodes.get_mut(&ROOT).expect("there is a root").modified = at(0);
    assert_eq!(made.apply(&file(D, ROOT, b"")), Ok(Applied { orphaned: Some(D), freed: None }));
    made.check();
    assert_eq!(times(&made, ROOT), (0, 1));
    assert_eq!(links(&made, D), 0);
    assert_eq!(made.apply(&link(D, A, b"d")), Ok(Applied::default()));
    made.check();
    assert_eq!((links(&made, D), times(&made, D), times(&made, A)), (1, (1, 5), (5, 5)));
    // It has had a name now, and gets no other once that is removed.
    made.open.insert(D);
    made.apply(&unlink(D, A, b"d")).expect("it is there");
    is_refused(&mut made, &link(D, A, b"d"), Invalid::Removed(D));
}

#[test]
fn impossible_creation_is_refused() {
    let mut made = tree(&[file(A, ROOT, b"a"), directory(B, ROOT, b"b"), directory(C, ROOT, b"c")]);
    made.open.insert(C);
    made.apply(&remove(C, ROOT, b"c")).expect("it is empty");
    is_refused(&mut made, &file(D, ROOT, b"a"), Invalid::EntryExists);
    is_refused(&mut made, &file(A, ROOT, b"x"), Invalid::InodeExists(A));
    is_refused(&mut made, &file(ROOT, ROOT, b"x"), Invalid::InodeExists(ROOT));
    is_refused(&mut made, &file(D, A, b"x"), Invalid::WrongKind(A));
    is_refused(&mut made, &file(D, InodeId(99), b"x"), Invalid::NoInode(InodeId(99)));
    is_refused(&mut made, &directory(D, ROOT, b""), Invalid::WrongKind(D));
    // A removed directory that a session has open takes no new entries.
    is_refused(&mut made, &file(D, C, b"x"), Invalid::WrongKind(C));
    is_refused(&mut made, &link(A, C, b"x"), Invalid::WrongKind(C));
    is_refused(&mut made, &link(B, ROOT, b"x"), Invalid::WrongKind(B));
    is_refused(&mut made, &link(A, ROOT, b"b"), Invalid::EntryExists);
    made.inodes.get_mut(&B).expect("it was made").links = LINK_MAX;
    is_refused(&mut made, &directory(D, B, b"x"), Invalid::OutOfRange);
    made.inodes.get_mut(&A).expect("it was made").links = LINK_MAX;
    is_refused(&mut made, &link(A, ROOT, b"x"), Invalid::OutOfRange);
}

/// Leases on directories govern files by this place: were it a directory that is gone, an honest writer's records would
/// be taken for ones without a lease.
#[test]
fn file_keeps_a_parent_when_its_removed_link_s_directory_goes() {
    let place = |tree: &ModelTree| tree.inodes[&A].parent;
    let mut linked = tree(&[file(A, ROOT, b"a"), directory(B, ROOT, b"b"), link(A, B, b"a")]);
    assert_eq!(place(&linked), B);
    let mut replaced = linked.clone();
    for update in [unlink(A, B, b"a"), remove(B, ROOT, b"b")] {
        linked.apply(&update).expect("valid");
    }
    linked.check();
    assert_eq!((place(&linked), links(&linked, A)), (ROOT, 1));
    for update in [file(C, B, b"c"), moved(C, (B, b"c"), (B, b"a"), Some(A))] {
        replaced.apply(&update).expect("valid");
    }
    replaced.check();
    assert_eq!((place(&replaced), links(&replaced, A)), (ROOT, 1));
}

#[test]
fn the_last_link_frees_or_leaves_an_orphan() {
    let mut left = tree(&[file(A, ROOT, b"a"), link(A, ROOT, b"b"), write(A, 0, b"x")]);
    assert_eq!(left.apply(&unlink(A, ROOT, b"a")), Ok(Applied::default()));
    left.check();
    assert_eq!((links(&left, A), times(&left, A), times(&left, ROOT)), (1, (5, 5), (5, 5)));
    let mut held = left.clone();
    assert_eq!(left.apply(&unlink(A, ROOT, b"b")), Ok(Applied { orphaned: None, freed: Some(A) }));
    left.check();
    assert!(!left.inodes.contains_key(&A));
    // Another session has it open: it is not the writer's to free, until that session says so.
    held.open.insert(A);
    assert_eq!(held.apply(&unlink(A, ROOT, b"b")), Ok(Applied { orphaned: Some(A), freed: None }));
    assert_eq!(held.apply(&Update::Release { inode: A }), Ok(Applied::default()));
    is_refused(&mut held, &link(A, ROOT, b"again"), Invalid::Removed(A));
    held.check();
    held.open.clear();
    assert_eq!(held.apply(&Update::Release { inode: A }), Ok(Applied { orphaned: None, freed: Some(A) }));
    assert_eq!(held.apply(&Update::Release { inode: A }), Ok(Applied::default()));
    held.check();
}

#[test]
fn impossible_removal_is_refused() {
    let mut made = tree(&[file(A, ROOT, b"a"), directory(B, ROOT, b"b"), file(C, B, b"c")]);
    is_refused(&mut made, &unlink(A, ROOT, b"x"), Invalid::WrongEntry);
    is_refused(&mut made, &unlink(C, ROOT, b"a"), Invalid::WrongEntry);
    is_refused(&mut made, &unlink(B, ROOT, b"b"), Invalid::WrongKind(B));
    is_refused(&mut made, &remove(A, ROOT, b"a"), Invalid::WrongKind(A));
    is_refused(&mut made, &remove(B, ROOT, b"b"), Invalid::NotEmpty(B));
    is_refused(&mut made, &unlink(C, A, b"c"), Invalid::WrongKind(A));
}

#[test]
fn a_removed_directory_has_no_links() {
    let mut made = tree(&[directory(A, ROOT, b"a"), directory(B, A, b"b")]);
    assert_eq!(links(&made, A), 3);
    made.open.insert(B);
    assert_eq!(made.apply(&remove(B, A, b"b")), Ok(Applied { orphaned: Some(B), freed: None }));
    made.check();
    assert_eq!((links(&made, A), links(&made, B), made.inodes[&A].entries), (2, 0, 0));
    assert_eq!(made.apply(&remove(A, ROOT, b"a")), Ok(Applied { orphaned: None, freed: Some(A) }));
    made.check();
}

#[test]
fn a_rename_moves_and_replaces() {
    let made = tree(&[directory(A, ROOT, b"a"), directory(B, ROOT, b"b"), file(C, A, b"c"), file(D, B, b"d")]);
    let mut one = made.clone();
    assert_eq!(one.apply(&moved(C, (A, b"c"), (B, b"x"), None)), Ok(Applied::default()));
    one.check();
    assert_eq!((one.inodes[&A].entries, one.inodes[&B].entries, one.inodes[&C].parent), (0, 2, B));
    assert_eq!((times(&one, A), times(&one, B), times(&one, C)), ((5, 5), (5, 5), (1, 5)));
    let mut over = made.clone();
    let freed = Applied { orphaned: None, freed: Some(D) };
    assert_eq!(over.apply(&moved(C, (A, b"c"), (B, b"d"), Some(D))), Ok(freed));
    over.check();
    assert_eq!((over.inodes[&A].entries, over.inodes[&B].entries), (0, 1));
    let mut within = made.clone();
    assert_eq!(within.apply(&moved(C, (A, b"c"), (A, b"x"), None)), Ok(Applied::default()));
    within.check();
    assert_eq!(within.inodes[&A].entries, 1);
    // The replaced file has another name: it keeps it, and its link count and time of change say what happened.
    let mut linked = made;
    linked.apply(&link(D, ROOT, b"d")).expect("the name is free");
    let over = moved(C, (A, b"c"), (B, b"d"), Some(D));
    assert_eq!(linked.apply(&over), Ok(Applied::default()));
    linked.check();
    assert_eq!((links(&linked, D), times(&linked, D)), (1, (1, 5)));
}

#[test]
fn a_directory_replaces_an_empty_one() {
    let made =
        tree(&[directory(A, ROOT, b"a"), directory(B, ROOT, b"b"), directory(C, A, b"c"), directory(D, B, b"d")]);
    let mut across = made.clone();
    let freed = Applied { orphaned: None, freed: Some(D) };
    assert_eq!(across.apply(&moved(C, (A, b"c"), (B, b"d"), Some(D))), Ok(freed));
    across.check();
    assert_eq!((links(&across, A), links(&across, B), across.inodes[&C].parent), (2, 3, B));
    // In one directory, and while others have the replaced one open.
    let mut within = made.clone();
    within.apply(&moved(C, (A, b"c"), (B, b"x"), None)).expect("the name is free");
    within.check();
    within.open.insert(D);
    let orphaned = Applied { orphaned: Some(D), freed: None };
    assert_eq!(within.apply(&moved(C, (B, b"x"), (B, b"d"), Some(D))), Ok(orphaned));
    within.check();
    assert_eq!((links(&within, B), links(&within, D), within.inodes[&B].entries), (3, 0, 1));
    // A directory with as many links as there may be still takes one in the place of another.
    let mut full = made;
    full.inodes.get_mut(&B).expect("it was made").links = LINK_MAX;
    is_refused(&mut full, &moved(C, (A, b"c"), (B, b"x"), None), Invalid::OutOfRange);
    assert_eq!(full.apply(&moved(C, (A, b"c"), (B, b"d"), Some(D))), Ok(freed));
    assert_eq!(links(&full, B), LINK_MAX);
}

#[test]
fn a_rename_that_does_not_fit_is_refused() {
    let mut made = tree(&[directory(A, ROOT, b"a"), directory(B, A, b"b"), file(C, ROOT, b"c"), link(C, ROOT, b"d")]);
    is_refused(&mut made, &moved(C, (ROOT, b"x"), (A, b"c"), None), Invalid::WrongEntry);
    is_refused(&mut made, &moved(C, (ROOT, b"a"), (A, b"c"), None), Invalid::WrongEntry);
    is_refused(&mut made, &moved(C, (ROOT, b"c"), (A, b"b"), None), Invalid::WrongEntry);
    is_refused(&mut made, &moved(C, (ROOT, b"c"), (A, b"x"), Some(B)), Invalid::WrongEntry);
    is_refused(&mut made, &moved(C, (ROOT, b"c"), (A, b"b"), Some(B)), Invalid::WrongKind(B));
    is_refused(&mut made, &moved(A, (ROOT, b"a"), (ROOT, b"c"), Some(C)), Invalid::WrongKind(C));
    is_refused(&mut made, &moved(C, (ROOT, b"c"), (ROOT, b"d"), Some(C)), Invalid::WrongKind(C));
    is_refused(&mut made, &moved(C, (ROOT, b"c"), (ROOT, b"c"), Some(C)), Invalid::WrongKind(C));
    is_refused(&mut made, &moved(C, (ROOT, b"c"), (C, b"x"), None), Invalid::WrongKind(C));
    // Into itself, over its own parent, or in exchange for it.
    is_refused(&mut made, &moved(A, (ROOT, b"a"), (A, b"x"), None), Invalid::Cycle(A));
    is_refused(&mut made, &moved(A, (ROOT, b"a"), (A, b"b"), Some(B)), Invalid::Cycle(A));
    is_refused(&mut made, &moved(B, (A, b"b"), (ROOT, b"a"), Some(A)), Invalid::Cycle(A));
    is_refused(&mut made, &exchanged(B, (A, b"b"), (ROOT, b"a"), A), Invalid::Cycle(A));
    is_refused(&mut made, &exchanged(A, (ROOT, b"a"), (A, b"b"), B), Invalid::Cycle(A));
    is_refused(&mut made, &exchanged(C, (ROOT, b"c"), (ROOT, b"d"), C), Invalid::WrongEntry);
    is_refused(&mut made, &exchanged(C, (ROOT, b"c"), (A, b"x"), B), Invalid::WrongEntry);
    let Update::Rename(exchange) = exchanged(C, (ROOT, b"c"), (A, b"b"), B) else { unreachable!() };
    is_refused(&mut made, &Update::Rename(Rename { target: None, ..exchange }), Invalid::WrongEntry);
    made.apply(&file(D, B, b"d")).expect("the name is free");
    made.apply(&directory(InodeId(30), ROOT, b"e")).expect("the name is free");
    is_refused(&mut made, &moved(InodeId(30), (ROOT, b"e"), (A, b"b"), Some(B)), Invalid::NotEmpty(B));
}

#[test]
fn a_rename_leaves_a_whiteout_where_the_old_name_was() {
    const LEFT: InodeId = InodeId(40);
    let made = tree(&[
        directory(A, ROOT, b"a"),
        directory(B, ROOT, b"b"),
        file(C, A, b"c"),
        file(D, B, b"d"),
        link(D, A, b"e"),
    ]);
    let whiteout = |tree: &ModelTree, parent: InodeId, name: &[u8]| {
        let entry = Entry { inode: LEFT, kind: FileKind::CharDevice };
        assert_eq!(tree.entries.get(&(parent, name.to_vec())), Some(&entry));
        let left = &tree.inodes[&LEFT];
        assert_eq!((left.kind, left.mode, left.device, left.links), (FileKind::CharDevice, 0, 0, 1));
        assert_eq!((left.uid, left.gid, left.born, left.size, left.blocks), (8, 9, at(5), 0, 0));
    };
    // To another directory, over a file that has another name.
    let mut across = made.clone();
    assert_eq!(across.apply(&whited_out(C, (A, b"c"), (B, b"d"), Some(D), LEFT)), Ok(Applied::default()));
    across.check();
    whiteout(&across, A, b"c");
    assert_eq!((across.inodes[&A].entries, across.inodes[&B].entries, links(&across, D)), (2, 1, 1));
    assert_eq!((times(&across, A), times(&across, B), times(&across, C)), ((5, 5), (5, 5), (1, 5)));
    // Within one directory, over nothing and over a file that goes.
    let mut within = made.clone();
    within.apply(&whited_out(C, (A, b"c"), (A, b"x"), None, LEFT)).expect("it fits");
    within.check();
    whiteout(&within, A, b"c");
    assert_eq!(within.inodes[&A].entries, 3);
    let over = whited_out(C, (A, b"x"), (A, b"c"), Some(LEFT), InodeId(41));
    assert_eq!(
        within.apply(&over),
        Ok(Applied { orphaned: None, freed: Some(LEFT) }),
        "a whiteout is replaced as any file"
    );
    within.check();
    // A directory moves as well, with its link to the one above.
    let mut above = made.clone();
    above.apply(&whited_out(A, (ROOT, b"a"), (B, b"a"), None, LEFT)).expect("it fits");
    above.check();
    whiteout(&above, ROOT, b"a");
    assert_eq!((links(&above, ROOT), links(&above, B), above.inodes[&ROOT].entries), (3, 3, 2));
    // It counts against the same subtree as its directory, and carries the ACL that it inherits.
    let mut counted = made;
    counted.apply(&Update::SetQuota { inode: A, quota: QuotaId::of(A), at: at(2) }).expect("it fits");
    counted.apply(&file(InodeId(30), A, b"f")).expect("it fits");
    let inherits = Some(Whiteout { inode: LEFT, uid: 8, gid: 9, acl_access: b"list" });
    let within = rename(InodeId(30), (A, b"f"), (A, b"g"), None);
    counted.apply(&Update::Rename(Rename { whiteout: inherits, ..within })).expect("it fits");
    counted.check();
    whiteout(&counted, A, b"f");
    assert_eq!(counted.inodes[&LEFT].quota, QuotaId::of(A));
    assert_eq!(counted.xattrs[&(LEFT, XATTR_ACL_ACCESS.to_vec())], b"list");
}

#[test]
fn a_whiteout_that_does_not_fit_is_refused() {
    let mut made = tree(&[directory(A, ROOT, b"a"), file(B, A, b"b"), file(C, A, b"c"), link(C, ROOT, b"d")]);
    for taken in [A, B, C, ROOT] {
        is_refused(&mut made, &whited_out(B, (A, b"b"), (A, b"x"), None, taken), Invalid::InodeExists(taken));
        is_refused(&mut made, &whited_out(B, (A, b"b"), (A, b"c"), Some(C), taken), Invalid::InodeExists(taken));
    }
    is_refused(&mut made, &whited_out(B, (A, b"b"), (A, b"b"), Some(B), D), Invalid::WrongKind(B));
    is_refused(&mut made, &whited_out(C, (A, b"c"), (ROOT, b"d"), Some(C), D), Invalid::WrongKind(C));
    let Update::Rename(both) = whited_out(B, (A, b"b"), (A, b"c"), Some(C), D) else { unreachable!() };
    is_refused(&mut made, &Update::Rename(Rename { exchange: true, ..both }), Invalid::EntryExists);
}

#[test]
fn an_exchange_swaps_whatever_the_kinds() {
    let made = tree(&[directory(A, ROOT, b"a"), directory(B, ROOT, b"b"), directory(C, A, b"c"), file(D, B, b"d")]);
    let mut mixed = made.clone();
    assert_eq!(mixed.apply(&exchanged(C, (A, b"c"), (B, b"d"), D)), Ok(Applied::default()));
    mixed.check();
    assert_eq!((links(&mixed, A), links(&mixed, B)), (2, 3));
    assert_eq!((mixed.inodes[&C].parent, mixed.inodes[&D].parent), (B, A));
    assert_eq!(
        (times(&mixed, A), times(&mixed, B), times(&mixed, C), times(&mixed, D)),
        ((5, 5), (5, 5), (1, 5), (1, 5))
    );
    mixed.apply(&exchanged(D, (A, b"c"), (B, b"d"), C)).expect("it goes back as well");
    mixed.check();
    assert_eq!((links(&mixed, A), links(&mixed, B)), (3, 2));
    let mut same = made.clone();
    assert_eq!(same.apply(&exchanged(A, (ROOT, b"a"), (ROOT, b"b"), B)), Ok(Applied::default()));
    same.check();
    assert_eq!((links(&same, ROOT), same.inodes[&ROOT].entries), (4, 2));
    let mut within = made;
    within.apply(&file(InodeId(30), A, b"f")).expect("the name is free");
    within.apply(&exchanged(C, (A, b"c"), (A, b"f"), InodeId(30))).expect("one directory holds both");
    within.check();
    assert_eq!((links(&within, A), within.inodes[&A].entries), (3, 2));
}

#[test]
fn content_sets_size_blocks_times_and_strips() {
    let mut made = tree(&[file(A, ROOT, b"a")]);
    let step = |made: &mut ModelTree, update: Update<'_>, size: u64, blocks: u64| {
        made.apply(&update).unwrap_or_else(|invalid| panic!("{update:?}: {invalid}"));
        made.check();
        assert_eq!((made.inodes[&A].size, made.inodes[&A].blocks), (size, blocks), "{update:?}");
    };
    step(&mut made, write(A, 5000, b"hello"), 5005, 1);
    assert_eq!(times(&made, A), (5, 5));
    step(&mut made, write(A, 9000, b""), 5005, 1);
    step(&mut made, write(A, 0, b"x"), 5005, 2);
    step(&mut made, Update::Resize { inode: A, size: FILE_SIZE_MAX, strip: false, at: at(6) }, FILE_SIZE_MAX, 2);
    step(&mut made, Update::Resize { inode: A, size: 3, strip: false, at: at(6) }, 3, 1);
    step(&mut made, allocate(Allocation::Reserve, 4000, 200), 4200, 2);
    step(&mut made, allocate(Allocation::ReserveKeepSize, 8192, 1), 4200, 3);
    step(&mut made, allocate(Allocation::ZeroKeepSize, 0, 5000), 4200, 3);
    let mut bytes = [1; 4200];
    assert_eq!((made.read(A, 0, &mut bytes), bytes), (4200, [0; 4200]));
    step(&mut made, allocate(Allocation::Insert, 4096, 8192), 12392, 3);
    assert_eq!(made.blocks(A), [0, 3, 4].map(|block| (block, false)));
    step(&mut made, allocate(Allocation::Collapse, 0, 4096), 8296, 2);
    step(&mut made, allocate(Allocation::Punch, 8191, 4096), 8296, 2);
    step(&mut made, allocate(Allocation::Punch, 8191, 4097), 8296, 1);
    step(&mut made, allocate(Allocation::Zero, 8190, 10), 8296, 3);
    step(&mut made, Update::Resize { inode: A, size: 8296, strip: false, at: at(6) }, 8296, 2);
    step(&mut made, Update::Resize { inode: A, size: 8192, strip: false, at: at(6) }, 8192, 1);
    for (mode, strip, left) in [
        (0o6755, true, 0o755),
        (0o6745, true, 0o2745),
        (0o4700, true, 0o700),
        (0o6755, false, 0o6755),
        (0o1777, true, 0o1777),
    ] {
        made.inodes.get_mut(&A).expect("it was made").mode = mode;
        step(&mut made, Update::Write { inode: A, offset: 0, at: at(7), strip, data: b"x" }, 8192, 2);
        assert_eq!(made.inodes[&A].mode, left, "{mode:o} {strip}");
    }
}

#[test]
fn content_out_of_range_is_refused() {
    let mut made = tree(&[file(A, ROOT, b"a"), directory(B, ROOT, b"b"), write(A, 0, &[1; 8192])]);
    is_refused(&mut made, &write(A, FILE_SIZE_MAX, b"x"), Invalid::OutOfRange);
    is_refused(&mut made, &write(A, u64::MAX, b"xy"), Invalid::OutOfRange);
    is_refused(&mut made, &write(B, 0, b"x"), Invalid::WrongKind(B));
    is_refused(&mut made, &write(C, 0, b"x"), Invalid::NoInode(C));
    let resize = |inode, size| Update::Resize { inode, size, strip: false, at: at(5) };
    is_refused(&mut made, &resize(A, FILE_SIZE_MAX + 1), Invalid::OutOfRange);
    is_refused(&mut made, &resize(B, 0), Invalid::WrongKind(B));
    for (how, offset, length) in [
        (Allocation::Reserve, 0, 0),
        (Allocation::Reserve, FILE_SIZE_MAX, 1),
        (Allocation::Punch, u64::MAX, 2),
        (Allocation::Collapse, 0, 8192),
        (Allocation::Collapse, 1, 4096),
        (Allocation::Collapse, 0, 4095),
        (Allocation::Insert, 8192, 4096),
        (Allocation::Insert, 0, FILE_SIZE_MAX / 4096 * 4096),
        (Allocation::Insert, 4, 4096),
    ] {
        is_refused(&mut made, &allocate(how, offset, length), Invalid::OutOfRange);
    }
}

#[test]
fn attributes_are_set_as_asked() {
    let mut made = tree(&[file(A, ROOT, b"a")]);
    let none = SetAttributes { inode: A, mode: None, uid: None, gid: None, accessed: None, modified: None, at: at(8) };
    made.apply(&Update::SetAttributes(SetAttributes { uid: Some(9), modified: Some(at(3)), ..none }))
        .expect("it is there");
    let inode = &made.inodes[&A];
    assert_eq!((inode.uid, inode.gid, inode.mode, inode.accessed, times(&made, A)), (9, 6, 0o755, at(1), (3, 8)));
    is_refused(&mut made, &Update::SetAttributes(SetAttributes { inode: B, ..none }), Invalid::NoInode(B));
    let xattr = Update::SetXattr { inode: A, name: b"user.a", value: b"v", mode: Some(0o700), at: at(9) };
    made.apply(&xattr).expect("it is there");
    assert_eq!((made.inodes[&A].mode, times(&made, A), made.xattrs.len()), (0o700, (3, 9), 1));
    let gone = Update::RemoveXattr { inode: A, name: b"user.a", mode: None, at: at(10) };
    made.apply(&gone).expect("it is there");
    assert_eq!((made.inodes[&A].mode, times(&made, A), made.xattrs.len()), (0o700, (3, 10), 0));
    is_refused(
        &mut made,
        &Update::RemoveXattr { inode: B, name: b"user.a", mode: None, at: at(9) },
        Invalid::NoInode(B),
    );
    for (given, expected) in [(7, 7), (4, 7), (8, 8)] {
        made.apply(&Update::Accessed { inode: A, at: at(given) }).expect("it never fails");
        assert_eq!((made.inodes[&A].accessed, times(&made, A)), (at(expected), (3, 10)));
    }
    assert_eq!(made.apply(&Update::Accessed { inode: B, at: at(9) }), Ok(Applied::default()));
    assert_eq!(made.apply(&Update::Release { inode: A }), Ok(Applied::default()));
    assert!(made.inodes.contains_key(&A));
}

/// A record may meet a state that was damaged on its medium: it is refused, and nothing panics or gets worse.
#[test]
fn damaged_counts_are_refused() {
    let sound = tree(&[directory(A, ROOT, b"a"), file(B, ROOT, b"b"), directory(C, A, b"c")]);
    let mut no_entries = sound.clone();
    no_entries.inodes.get_mut(&ROOT).expect("there is a root").entries = 0;
    is_refused(&mut no_entries, &unlink(B, ROOT, b"b"), Invalid::OutOfRange);
    is_refused(&mut no_entries, &moved(B, (ROOT, b"b"), (A, b"x"), None), Invalid::OutOfRange);
    let mut no_links = sound.clone();
    no_links.inodes.get_mut(&A).expect("it was made").links = 2;
    is_refused(&mut no_links, &remove(C, A, b"c"), Invalid::OutOfRange);
    is_refused(&mut no_links, &moved(C, (A, b"c"), (ROOT, b"x"), None), Invalid::OutOfRange);
    is_refused(&mut no_links, &exchanged(C, (A, b"c"), (ROOT, b"b"), B), Invalid::OutOfRange);
    let mut all_links = sound.clone();
    all_links.inodes.get_mut(&ROOT).expect("there is a root").links = u32::MAX;
    is_refused(&mut all_links, &exchanged(C, (A, b"c"), (ROOT, b"b"), B), Invalid::OutOfRange);
    let mut in_itself = sound.clone();
    in_itself.entries.insert((A, b"a".to_vec()), Entry { inode: A, kind: FileKind::Directory });
    in_itself.inodes.get_mut(&A).expect("it was made").entries = 0;
    is_refused(&mut in_itself, &remove(A, A, b"a"), Invalid::Cycle(A));
    let mut circle = sound;
    circle.inodes.get_mut(&A).expect("it was made").parent = C;
    assert_eq!(would_make_cycle(&circle, B, C), Ok(true));
}

#[test]
fn inode_created_in_a_subtree_counts_and_stays_there() {
    let quota = |inode, id| Update::SetQuota { inode, quota: QuotaId(id), at: at(9) };
    let mut tree = tree(&[directory(A, ROOT, b"a"), quota(A, A.0), file(B, A, b"b"), file(C, ROOT, b"c")]);
    assert_eq!((tree.inodes[&A].changed, tree.inodes[&B].quota), (at(1), QuotaId::of(A)), "the new name came after");
    is_refused(&mut tree, &moved(B, (A, b"b"), (ROOT, b"b"), None), Invalid::OtherQuota(B));
    is_refused(&mut tree, &moved(C, (ROOT, b"c"), (A, b"c"), None), Invalid::OtherQuota(C));
    is_refused(&mut tree, &exchanged(B, (A, b"b"), (ROOT, b"c"), C), Invalid::OtherQuota(B));
    is_refused(&mut tree, &link(B, ROOT, b"x"), Invalid::OtherQuota(B));
    is_refused(&mut tree, &link(C, A, b"x"), Invalid::OtherQuota(C));
    is_refused(&mut tree, &quota(D, 7), Invalid::NoInode(D));
    // Within the subtree, and with the subtree as a whole, all is free.
    for update in [
        directory(D, A, b"d"),
        moved(B, (A, b"b"), (D, b"x"), None),
        link(B, A, b"y"),
        quota(D, D.0),
        moved(D, (A, b"d"), (ROOT, b"d"), None),
        moved(A, (ROOT, b"a"), (D, b"a"), None),
    ] {
        tree.apply(&update).expect("it is allowed");
    }
    assert_eq!(tree.inodes[&B].quota, QuotaId::of(A), "only what it is said of counts otherwise");
    tree.check();
}

#[test]
fn a_cycle_is_seen_from_any_depth() {
    let mut made = ModelTree::new();
    let mut parent = ROOT;
    for n in 100..200 {
        made.apply(&directory(InodeId(n), parent, b"d")).expect("the name is free");
        parent = InodeId(n);
    }
    for n in 100..200 {
        assert_eq!(would_make_cycle(&made, InodeId(n), InodeId(150)), Ok(n <= 150), "{n}");
    }
    assert_eq!(would_make_cycle(&made, ROOT, InodeId(150)), Ok(true));
    assert_eq!(would_make_cycle(&made, InodeId(99), InodeId(150)), Ok(false));
}

proptest! {
    /// Random updates keep the tree sound, and those that do not fit change nothing.
    #[test]
    fn a_tree_stays_sound(choices in prop::collection::vec(any::<UpdateChoice>(), 0..60), open in any::<u64>(), mix in any::<u64>()) {
        let mut tree = ModelTree::new();
        tree.set_open((16..80).filter(|n| open >> (n % 64) & 1 != 0).map(InodeId));
        let mut next = 16;
        for choice in choices {
            let Some(update) = tree.random_update(choice, InodeId(next)) else { continue };
            // Some updates name inodes that they should not: those that another update would.
            let update = if mix >> (next % 64) & 7 == 0 { misdirect(update, InodeId(16 + mix % 20)) } else { update };
            let before = tree.clone();
            match tree.apply(&update) {
                Ok(applied) => {
                    tree.check();
                    if let Some(freed) = applied.freed {
                        prop_assert!(!tree.inodes.contains_key(&freed) && before.inodes.contains_key(&freed));
                    }
                    if let Some(orphan) = applied.orphaned {
                        prop_assert!(tree.orphans.contains(&orphan) && !before.orphans.contains(&orphan));
                    }
                }
                Err(_) => prop_assert!(tree == before, "{:?} was refused and changed something", update),
            }
            next += 1;
        }
    }
}

/// The update with another inode in it, unless that would close a circle, which the caller of `apply` rules out.
fn misdirect(update: Update<'static>, other: InodeId) -> Update<'static> {
    match update {
        Update::Create(create) => Update::Create(Create { parent: other, ..create }),
        Update::Unlink { parent, name, release, at, .. } => {
            Update::RemoveDirectory { inode: other, parent, name, release, at }
        }
        Update::RemoveDirectory { inode, name, release, at, .. } => {
            Update::RemoveDirectory { inode, parent: other, name, release, at }
        }
        Update::Rename(Rename { whiteout: Some(whiteout), .. }) if other.0 % 2 == 0 => {
            let Update::Rename(rename) = update else { return update };
            Update::Rename(Rename { whiteout: Some(Whiteout { inode: other, ..whiteout }), ..rename })
        }
        Update::Rename(rename) => Update::Rename(Rename { target: Some(other), ..rename }),
        Update::Link { parent, name, at, .. } => Update::Link { inode: other, parent, name, at },
        Update::Write { offset, at, strip, data, .. } => Update::Write { inode: other, offset, at, strip, data },
        update => update,
    }
}
