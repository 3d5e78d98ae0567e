//! The canonical dump: equal for equal trees wherever their blocks are, and each difference is found and named.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use ashlar_pmem::{Arena, ArenaOptions};
use ashlar_store::{DumpComparison, DumpError, INLINE_BYTES_MAX, Store, StoreError, compare_dumps};
use ashlar_types::{
    BlockAddress, FileKind, InodeId, LogGeneration, LogPosition, QuotaKey, QuotaLimits, SessionId, Timestamp,
};
use ashlar_update::{Allocation, Create, Rename, SetAttributes, Update};
use rustix::fs::{SeekFrom, seek};

const SESSION: SessionId = SessionId(1);
const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const START: Timestamp = Timestamp { seconds: 1000, nanoseconds: 0 };
const LATER: Timestamp = Timestamp { seconds: 2000, nanoseconds: 7 };
const DIRECTORY: InodeId = InodeId(16);
const FILE: InodeId = InodeId(17);
const SMALL: InodeId = InodeId(18);
const LINK: InodeId = InodeId(19);

struct TreeCopy {
    directory: tempfile::TempDir,
    store: Store,
}

impl TreeCopy {
    fn empty() -> Self {
        let directory = arena_directory();
        let options = ArenaOptions::new(16 * MIB);
        let arena = Arc::new(Arena::create(&directory.path().join("arena"), &options).unwrap());
        Store::format(&arena, START).unwrap();
        let mut store = Store::open(arena).unwrap();
        store.set_session(SESSION, LogGeneration(3), LogPosition(10));
        store.commit().unwrap();
        Self { directory, store }
    }

    /// A copy of the committed state, name-hash key included.
    fn copy(&mut self) -> Self {
        self.store.commit().unwrap();
        let directory = arena_directory();
        copy_files(&self.directory.path().join("arena"), &directory.path().join("arena"));
        let arena = Arc::new(Arena::open(&directory.path().join("arena")).unwrap());
        Self { directory, store: Store::open(arena).unwrap() }
    }

    fn apply(&mut self, update: &Update<'_>) {
        self.store.apply(SessionId::SHARED_FS, LogPosition(0), update, &|_| true).unwrap();
    }

    fn create(&mut self, inode: InodeId, parent: InodeId, name: &[u8], kind: FileKind) {
        self.apply(&Update::Create(Create {
            inode,
            parent,
            name,
            kind,
            mode: 0o644,
            uid: 5,
            gid: 6,
            device: 0,
            at: START,
            target: if kind == FileKind::Symlink { b"over there" } else { b"" },
            acl_access: &[],
            acl_default: &[],
        }));
    }

    fn write(&mut self, inode: InodeId, offset: u64, data: &[u8]) {
        self.apply(&Update::Write { inode, offset, at: START, strip: false, data });
    }

    /// A directory with a large file (a hole in its middle), a small one, a link, and an extended attribute.
    fn make_tree(&mut self) {
        self.create(DIRECTORY, InodeId::ROOT, b"a directory", FileKind::Directory);
        self.create(FILE, DIRECTORY, b"file", FileKind::Regular);
        self.write(FILE, 0, &[1; 10_000]);
        self.write(FILE, 2 * MIB, &[2; 20_000]);
        self.create(SMALL, DIRECTORY, b"small", FileKind::Regular);
        self.write(SMALL, 0, b"some bytes");
        self.create(LINK, InodeId::ROOT, b"link", FileKind::Symlink);
        self.apply(&Update::SetXattr { inode: FILE, name: b"user.kind", value: b"a value", mode: None, at: START });
    }

    fn dump(&self) -> String {
        let mut text = Vec::new();
        self.store.dump(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    /// Returns the lines that begin with `start`.
    fn lines(&self, start: &str) -> Vec<String> {
        self.dump().lines().filter(|line| line.starts_with(start)).map(str::to_owned).collect()
    }

    fn first_address(&self, inode: InodeId) -> BlockAddress {
        match self.store.contents(inode).unwrap() {
            ashlar_types::Contents::Extents(extents) | ashlar_types::Contents::Withheld(extents) => {
                extents[0].address.unwrap()
            }
            ashlar_types::Contents::Inline(_) => panic!("it is inline"),
        }
    }
}

fn arena_directory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

fn copy_files(from: &Path, to: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir(to).unwrap();
    std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o755)).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_files(&entry.path(), &target);
        } else {
            copy_sparsely(&std::fs::File::open(entry.path()).unwrap(), &std::fs::File::create(target).unwrap());
        }
    }
}

/// Copies a file without its holes: most of the database's file is one.
fn copy_sparsely(from: &std::fs::File, to: &std::fs::File) {
    use std::os::unix::fs::FileExt;
    let mut bytes = vec![0; MIB as usize];
    let mut at = 0;
    while let Ok(start) = seek(from, SeekFrom::Data(at)) {
        at = seek(from, SeekFrom::Hole(start)).unwrap();
        for place in (start..at).step_by(bytes.len()) {
            let piece = &mut bytes[..(at - place).min(MIB) as usize];
            from.read_exact_at(piece, place).unwrap();
            to.write_all_at(piece, place).unwrap();
        }
    }
    to.set_len(from.metadata().unwrap().len()).unwrap();
}

fn compare(a: &TreeCopy, b: &TreeCopy) -> DumpComparison {
    compare_dumps(a.store.dump_lines().unwrap(), b.store.dump_lines().unwrap(), 100).unwrap()
}

fn compare_texts(a: &str, b: &str) -> Result<DumpComparison, DumpError> {
    let lines = |text: &str| text.lines().map(|line| Ok::<_, std::io::Error>(line.to_owned())).collect::<Vec<_>>();
    compare_dumps(lines(a), lines(b), 100)
}

#[test]
fn trees_with_other_block_addresses_dump_equal() {
    let mut first = TreeCopy::empty();
    let mut second = first.copy();
    first.make_tree();
    let junk = InodeId(99);
    second.create(junk, InodeId::ROOT, b"junk", FileKind::Regular);
    second.write(junk, 0, &[9; 100_000]);
    second.store.commit().unwrap();
    second.create(DIRECTORY, InodeId::ROOT, b"a directory", FileKind::Directory);
    second.create(SMALL, DIRECTORY, b"small", FileKind::Regular);
    second.write(SMALL, 0, b"some bytes");
    second.create(FILE, DIRECTORY, b"file", FileKind::Regular);
    second.write(FILE, 2 * MIB + 8192, &[2; 20_000 - 8192]);
    second.write(FILE, 0, &[1; 10_000]);
    second.apply(&Update::SetXattr { inode: FILE, name: b"user.kind", value: b"a value", mode: None, at: START });
    second.apply(&Update::Unlink { inode: junk, parent: InodeId::ROOT, name: b"junk", release: true, at: START });
    second.store.commit().unwrap();
    second.write(FILE, 2 * MIB, &[2; 8192]);
    second.create(LINK, InodeId::ROOT, b"link", FileKind::Symlink);

    assert_ne!(first.first_address(FILE), second.first_address(FILE), "the trees have the same blocks");
    let comparison = compare(&first, &second);
    assert_eq!(comparison.differences, []);
    assert!(comparison.is_equal());
    assert_eq!(first.dump(), second.dump());
    assert_eq!((comparison.first.inodes, comparison.first.entries), (5, 4));
    assert_eq!(comparison.first.bytes, 2 * MIB + 20_010);
}

#[test]
fn holes_and_written_zeros_have_equal_contents() {
    let mut first = TreeCopy::empty();
    first.make_tree();
    let mut second = first.copy();
    second.write(FILE, MIB, &[0; BLOCK as usize]);
    let comparison = compare(&first, &second);
    assert!(first.lines("data 17 ").len() == 2 && first.lines("data ") == second.lines("data "));
    // Blocks are what `stat` shows and quotas count; the bytes are the same.
    let texts: Vec<_> = comparison.differences.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "inode 17: the number of blocks is 8 in A and 9 in B",
            "the quota of user 5: the number of blocks is 9 in A and 10 in B",
            "the quota of group 6: the number of blocks is 9 in A and 10 in B",
        ]
    );
    second.apply(&Update::Allocate {
        inode: FILE,
        how: Allocation::Punch,
        offset: MIB,
        length: BLOCK,
        strip: false,
        at: START,
    });
    assert_eq!(compare(&first, &second).differences, []);
}

/// The hashes are those of the bytes, as `sha256sum` finds them.
#[test]
fn dump_has_hashes_of_standard_tools() {
    let mut tree = TreeCopy::empty();
    tree.make_tree();
    // printf 'some bytes' | sha256sum
    let hash = "0d22cdcc10e6d049dbe1af5123d50873fdfc1a4f58306e58cb6241be9472014d";
    assert_eq!(tree.lines("data 18 "), [format!("data 18 0 length=10 sha256={hash}")]);
    let text = tree.dump();
    let (_, end) = text.trim_end().rsplit_once('\n').unwrap();
    let lines = text.lines().count() - 1;
    assert!(end.starts_with(&format!("end lines={lines} sha256=")), "{end}");
}

/// A planted difference: its name, the change, and the sentences that name it.
type Planted = (&'static str, fn(&mut TreeCopy), &'static [&'static str]);

fn set_attributes(tree: &mut TreeCopy, mode: Option<u32>, accessed: Option<Timestamp>) {
    tree.apply(&Update::SetAttributes(SetAttributes {
        inode: FILE,
        mode,
        uid: None,
        gid: None,
        accessed,
        modified: None,
        at: START,
    }));
}

const PLANTED: &[Planted] = &[
    ("a byte", |tree| tree.write(FILE, 2 * MIB + 5, b"x"), &["inode 17, bytes from 2097152 on: the contents differ"]),
    ("a byte of a small file", |tree| tree.write(SMALL, 0, b"S"), &["inode 18, bytes from 0 on: the contents differ"]),
    (
        "zeros over bytes",
        |tree| tree.write(FILE, 8000, &[0; 2000]),
        &["inode 17, bytes from 0 on: the contents differ"],
    ),
    ("a mode", |tree| set_attributes(tree, Some(0o4711), None), &["inode 17: the mode is 0644 in A and 4711 in B"]),
    (
        "an access time",
        |tree| set_attributes(tree, None, Some(LATER)),
        &["inode 17: the time of last access is 1000.000000000 in A and 2000.000000007 in B"],
    ),
    (
        "an extended attribute",
        |tree| {
            tree.apply(&Update::SetXattr { inode: FILE, name: b"user.kind", value: b"other", mode: None, at: START });
        },
        &[r"inode 17, extended attribute 'user.kind': the value is a\x20value in A and other in B"],
    ),
    (
        "a missing extended attribute",
        |tree| tree.apply(&Update::RemoveXattr { inode: FILE, name: b"user.kind", mode: None, at: START }),
        &["inode 17, extended attribute 'user.kind': in A only"],
    ),
    (
        "a name",
        |tree| {
            tree.apply(&Update::Rename(Rename {
                parent: DIRECTORY,
                name: b"file",
                inode: FILE,
                new_parent: DIRECTORY,
                new_name: b"new name",
                target: None,
                exchange: false,
                whiteout: None,
                release: true,
                at: START,
            }));
        },
        &["directory 16, entry 'file': in A only", "directory 16, entry 'new name': in B only"],
    ),
    (
        "a kept inode",
        |tree| {
            let update =
                Update::Unlink { inode: LINK, parent: InodeId::ROOT, name: b"link", release: false, at: START };
            tree.apply(&update);
        },
        &[
            "inode 1: the number of entries is 2 in A and 1 in B",
            "directory 1, entry 'link': in A only",
            "inode 19: the link count is 1 in A and 0 in B",
            "the orphan 19: in B only",
        ],
    ),
    (
        "another inode behind a name",
        |tree| {
            tree.apply(&Update::Rename(Rename {
                parent: DIRECTORY,
                name: b"file",
                inode: FILE,
                new_parent: DIRECTORY,
                new_name: b"small",
                target: Some(SMALL),
                exchange: true,
                whiteout: None,
                release: true,
                at: START,
            }));
        },
        &[
            "directory 16, entry 'small': the inode is 18 in A and 17 in B",
            "directory 16, entry 'file': the inode is 17 in A and 18 in B",
        ],
    ),
    (
        "another file, whose parts are no differences of their own",
        |tree| {
            tree.create(InodeId(20), DIRECTORY, b"more", FileKind::Regular);
            tree.write(InodeId(20), 0, b"bytes");
        },
        &[
            "inode 16: the number of entries is 2 in A and 3 in B",
            "directory 16, entry 'more': in B only",
            "inode 20: in B only",
            "the quota of user 5: the number of blocks is 9 in A and 10 in B",
            "the quota of user 5: the number of inodes is 4 in A and 5 in B",
            "the quota of group 6: the number of blocks is 9 in A and 10 in B",
            "the quota of group 6: the number of inodes is 4 in A and 5 in B",
        ],
    ),
    (
        "a limit",
        |tree| tree.store.set_quota_limits(QuotaKey::User(5), QuotaLimits { blocks: Some(9), inodes: None }),
        &["the quota of user 5: the limit of blocks is none in A and 9 in B"],
    ),
    (
        "a session's applied position",
        |tree| tree.store.advance(SESSION, LogPosition(11)),
        &["session 1: the applied position is 10 in A and 11 in B"],
    ),
    (
        "a session",
        |tree| tree.store.set_session(SessionId(2), LogGeneration(1), LogPosition(0)),
        &["session 2: in B only"],
    ),
];

/// Each is found in the applied state, in the committed one, and from the other side, and nothing else is.
#[test]
fn each_planted_difference_is_named() {
    let mut first = TreeCopy::empty();
    first.make_tree();
    for (name, plant, expected) in PLANTED {
        let mut second = first.copy();
        assert!(compare(&first, &second).is_equal(), "a copy differs");
        plant(&mut second);
        for is_committed in [false, true] {
            if is_committed {
                second.store.commit().unwrap();
            }
            let comparison = compare(&first, &second);
            // Names stand in the order of their hashes, whose key is drawn for each file system.
            let texts: BTreeSet<_> = comparison.differences.iter().map(ToString::to_string).collect();
            assert_eq!(texts, expected.iter().map(ToString::to_string).collect(), "{name}, committed: {is_committed}");
            assert_eq!(comparison.differences_count, expected.len() as u64, "{name}, committed: {is_committed}");
            assert!(!comparison.is_equal());
        }
        assert_eq!(compare(&second, &first).differences_count, expected.len() as u64, "{name}");
    }
}

#[test]
fn differences_beyond_the_bound_are_counted() {
    let mut first = TreeCopy::empty();
    first.make_tree();
    let mut second = first.copy();
    second.store.remove_session(SESSION);
    set_attributes(&mut second, Some(0), Some(LATER));
    let (a, b) = (first.store.dump_lines().unwrap(), second.store.dump_lines().unwrap());
    let comparison = compare_dumps(a, b, 1).unwrap();
    assert_eq!((comparison.differences.len(), comparison.differences_count), (1, 3));
}

/// Entries have other places then, so they are not compared one by one.
#[test]
fn other_name_hash_key_is_one_difference() {
    let (mut first, mut second) = (TreeCopy::empty(), TreeCopy::empty());
    first.make_tree();
    second.make_tree();
    let comparison = compare(&first, &second);
    let [difference] = &comparison.differences[..] else { panic!("{:?}", comparison.differences) };
    assert!(difference.to_string().contains("keys of the name hash differ"), "{difference}");
    assert!(!comparison.is_equal());
}

/// A large directory takes several pages, and its entries stand in the database and in both batches.
#[test]
fn large_directory_is_dumped_whole() {
    const FILES: u64 = 3000;
    let mut tree = TreeCopy::empty();
    tree.create(DIRECTORY, InodeId::ROOT, b"many", FileKind::Directory);
    for number in 0..FILES {
        let name = format!("file {number}");
        tree.create(InodeId(100 + number), DIRECTORY, name.as_bytes(), FileKind::Fifo);
        if number == FILES / 2 {
            tree.store.commit().unwrap();
        }
    }
    for number in [0, 7, FILES - 1] {
        let name = format!("file {number}");
        let inode = InodeId(100 + number);
        tree.apply(&Update::Unlink { inode, parent: DIRECTORY, name: name.as_bytes(), release: true, at: START });
    }
    let applied = tree.dump();
    assert_eq!(tree.lines("entry 16 ").len() as u64, FILES - 3);
    assert_eq!(tree.lines("inode ").len() as u64, FILES - 3 + 2);
    assert!(tree.lines("inode 107 ").is_empty() && tree.lines("inode 108 ").len() == 1);
    tree.store.commit().unwrap();
    assert_eq!(tree.dump(), applied);
}

/// Only parts that are allocated are read: the whole file would take centuries.
#[test]
fn sparse_file_costs_its_blocks_alone() {
    let mut tree = TreeCopy::empty();
    tree.create(FILE, InodeId::ROOT, b"sparse", FileKind::Regular);
    let offset = (1 << 62) + 5;
    tree.write(FILE, offset, b"end");
    let [line] = &tree.lines("data 17 ")[..] else { panic!("one line expected") };
    assert!(line.starts_with(&format!("data 17 {} length=8 ", 1_u64 << 62)), "{line}");
}

#[test]
fn bytes_behind_the_end_are_no_contents() {
    let mut tree = TreeCopy::empty();
    tree.create(FILE, InodeId::ROOT, b"file", FileKind::Regular);
    tree.write(FILE, 0, &[1; 2 * INLINE_BYTES_MAX as usize]);
    let (how, strip) = (Allocation::ReserveKeepSize, false);
    tree.apply(&Update::Allocate { inode: FILE, how, offset: 0, length: 4 * MIB, strip, at: START });
    let [line] = &tree.lines("data 17 ")[..] else { panic!("one line expected") };
    assert!(line.starts_with("data 17 0 length=2048 "), "{line}");
}

#[test]
fn damaged_block_ends_the_dump_with_its_error() {
    use std::os::unix::fs::FileExt;
    let mut tree = TreeCopy::empty();
    tree.make_tree();
    tree.store.commit().unwrap();
    let address = tree.first_address(FILE);
    let arena = tree.directory.path().join("arena");
    let info = tree.store.segments().next().unwrap().info();
    let file = std::fs::read_dir(arena.join("segments")).unwrap().flatten().next().unwrap().path();
    let file = std::fs::File::options().write(true).open(file).unwrap();
    file.write_all_at(b"damage", info.block_offset(address.block())).unwrap();
    let error = tree.store.dump(&mut std::io::sink()).unwrap_err();
    assert!(matches!(error, DumpError::Store(StoreError::Checksum { inode: FILE, block: 0, .. })), "{error}");
    assert_eq!(tree.store.dump_lines().unwrap().filter(Result::is_err).count(), 1, "an error is the last item");
}

#[test]
fn dump_that_is_not_whole_is_refused() {
    let mut tree = TreeCopy::empty();
    tree.make_tree();
    let whole = tree.dump();
    assert!(compare_texts(&whole, &whole).unwrap().is_equal());
    let (cut, _) = whole.trim_end().rsplit_once('\n').unwrap();
    assert!(matches!(compare_texts(&whole, cut), Err(DumpError::CutOff { .. })));
    let changed = whole.replace("mode=0755", "mode=0750");
    assert!(matches!(compare_texts(&changed, &whole), Err(DumpError::WrongHash)));
    let mut lines: Vec<_> = whole.lines().collect();
    lines.swap(1, 2);
    assert!(matches!(compare_texts(&lines.join("\n"), &whole), Err(DumpError::Disordered { number: 3 })));
    let other = whole.replace("dump version=1", "dump version=2");
    assert!(matches!(compare_texts(&whole, &other), Err(DumpError::Version { .. })));
    assert!(matches!(compare_texts("some text", &whole), Err(DumpError::Malformed { number: 1, .. })));
    assert!(matches!(compare_texts("", &whole), Err(DumpError::CutOff { lines: 0 })));
}
