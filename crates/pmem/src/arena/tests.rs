use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

const MIB: u64 = 1 << 20;
const SESSION: SessionId = SessionId(42);

fn options(size_bytes: u64) -> ArenaOptions {
    ArenaOptions::new(size_bytes)
}

fn blocks(segments: &[SegmentInfo]) -> Vec<u32> {
    segments.iter().map(|segment| segment.blocks).collect()
}

#[test]
fn an_arena_is_made_closed_and_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    let arena = Arena::create(&path, &options(16 * MIB)).unwrap();
    let (summary, segments) = (arena.summary(), arena.segments());
    assert_eq!(blocks(&segments), [4096]);
    assert!(matches!(Arena::open(&path), Err(ArenaError::InUse { pid }) if pid == std::process::id()));
    assert!(matches!(Arena::create(&path, &options(16 * MIB)), Err(ArenaError::InUse { .. })));
    assert_eq!(Arena::probe(&path).unwrap(), summary);
    drop(arena);
    assert!(matches!(Arena::create(&path, &options(16 * MIB)), Err(ArenaError::AlreadyExists(_))));
    let arena = Arena::open(&path).unwrap();
    assert_eq!((arena.summary(), arena.segments()), (summary, segments));
    for folder in ["", "metadata", "segments", "sessions"] {
        assert_eq!(fs::metadata(path.join(folder)).unwrap().permissions().mode() & 0o777, 0o700);
    }
    for file in ["ARENA", "lock", "segments/000000.data"] {
        assert_eq!(fs::metadata(path.join(file)).unwrap().permissions().mode() & 0o777, 0o600);
    }
}

#[test]
fn arena_is_opened_as_soon_as_it_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    let arena = Arena::create(&path, &options(16 * MIB)).unwrap();
    assert!(matches!(Arena::open_when_free(&path, &|| false), Err(ArenaError::InUse { .. })));
    let held = std::cell::Cell::new(Some(arena));
    let asked = std::cell::Cell::new(0);
    // Its process is gone the third time that the other one looks.
    let may_wait = || {
        asked.set(asked.get() + 1);
        if asked.get() == 3 {
            held.take();
        }
        true
    };
    Arena::open_when_free(&path, &may_wait).unwrap();
    assert_eq!(asked.get(), 3);
}

#[test]
fn segments_are_allocated_when_they_are_added() {
    let dir = tempfile::tempdir().unwrap();
    let arena = Arena::create(dir.path(), &options(16 * MIB)).unwrap();
    let segment = arena.segments()[0];
    let metadata = arena.segment_file(0, false).unwrap().metadata().unwrap();
    assert_eq!(metadata.len(), segment.file_bytes());
    assert!(metadata.blocks() * 512 >= segment.file_bytes());
    assert_eq!(segment.data_offset(), 16384);
    assert_eq!(segment.block_offset(4095) + BLOCK_BYTES, segment.file_bytes());
    let mut file = arena.segment_file(0, false).unwrap();
    assert!(file.write_all(b"x").is_err(), "a read-only descriptor was written through");
    arena.segment_file(0, true).unwrap().write_all(b"x").unwrap();
    assert!(matches!(arena.segment_file(1, false), Err(ArenaError::NoSegment(1))));
}

#[test]
fn segment_is_recognised_by_its_file_size() {
    for count in (1..3000).chain([65535, 65536, 1 << 26]) {
        let segment = SegmentInfo { number: 3, blocks: count };
        assert_eq!(SegmentInfo::from_file(3, segment.file_bytes()), Some(segment));
        assert_eq!(SegmentInfo::from_file(3, segment.file_bytes() + 1), None);
    }
    assert_eq!(SegmentInfo::from_file(0, 0), None);
    assert_eq!(SegmentInfo::from_file(0, 4096), None);
}

#[test]
fn an_arena_grows_and_shrinks_online() {
    let dir = tempfile::tempdir().unwrap();
    let arena = Arena::create(dir.path(), &options(16 * MIB)).unwrap();
    let grown = arena.resize(40 * MIB).unwrap();
    assert_eq!((blocks(&grown.added), grown.surplus.len()), (vec![24 * 256], 0));
    assert_eq!(blocks(&arena.resize(48 * MIB).unwrap().added), [8 * 256]);
    assert_eq!(arena.resize(40 * MIB).unwrap().surplus, [SegmentInfo { number: 2, blocks: 8 * 256 }]);
    // The end lies in the second segment, which stays whole.
    let shrunk = arena.resize(20 * MIB).unwrap();
    assert_eq!((blocks(&shrunk.added), blocks(&shrunk.surplus)), (vec![], vec![8 * 256]));
    let shrunk = arena.resize(16 * MIB).unwrap();
    assert_eq!(blocks(&shrunk.surplus), [8 * 256, 24 * 256]);
    assert!(matches!(arena.remove_segment(1), Err(ArenaError::NotLast(1))));
    assert!(matches!(arena.remove_segment(3), Err(ArenaError::NoSegment(3))));
    arena.remove_segment(2).unwrap();
    arena.remove_segment(1).unwrap();
    assert_eq!(arena.resize(16 * MIB).unwrap(), Resized { added: vec![], surplus: vec![] });
    assert!(matches!(arena.resize(MIB), Err(ArenaError::TooSmall { .. })));
    drop(arena);
    let arena = Arena::open(dir.path()).unwrap();
    assert_eq!(blocks(&arena.segments()), [4096]);
    assert_eq!(arena.summary().size_bytes, 16 * MIB);
}

#[test]
fn large_arenas_have_several_segments() {
    let dir = tempfile::tempdir().unwrap();
    let arena = Arena::create(dir.path(), &options(16 * MIB)).unwrap();
    let summary = ArenaSummary { segment_bytes: 4 * MIB, ..arena.summary() };
    let mut state = State { summary, segments: arena.segments() };
    arena.add_segments(&mut state, 26 * MIB).unwrap();
    // The rest is too little for a segment.
    arena.add_segments(&mut state, 27 * MIB - 4096).unwrap();
    assert_eq!(blocks(&state.segments), [4096, 1024, 1024, 512]);
}

#[test]
fn an_arena_that_cannot_grow_keeps_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let arena = Arena::create(dir.path(), &options(16 * MIB)).unwrap();
    let files = || fs::read_dir(dir.path().join("segments")).unwrap().count();
    assert!(matches!(arena.resize(1 << 47), Err(ArenaError::NoSpace { .. })));
    assert_eq!((blocks(&arena.segments()), files()), (vec![4096], 1));
    assert_eq!(Arena::probe(dir.path()).unwrap().size_bytes, 16 * MIB);
    // The third of the new segments can't be made: a directory has its name.
    fs::create_dir(dir.path().join("segments/000003.data.new")).unwrap();
    let summary = ArenaSummary { segment_bytes: 4 * MIB, ..arena.summary() };
    let mut state = State { summary, segments: arena.segments() };
    assert!(matches!(arena.add_segments(&mut state, 32 * MIB), Err(ArenaError::Io { .. })));
    assert_eq!((blocks(&state.segments), files()), (vec![4096], 2));
    // The superblock can't be written: the added segments are removed again.
    fs::create_dir(dir.path().join("ARENA.new")).unwrap();
    assert!(matches!(arena.resize(24 * MIB), Err(ArenaError::Io { .. })));
    assert_eq!((blocks(&arena.segments()), files()), (vec![4096], 2));
    fs::remove_dir(dir.path().join("ARENA.new")).unwrap();
    assert_eq!(blocks(&arena.resize(24 * MIB).unwrap().added), [2048]);
}

#[test]
fn directory_without_superblock_is_no_arena() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Arena::open(dir.path()), Err(ArenaError::NotAnArena)));
    assert!(!dir.path().join("lock").exists());
    assert!(matches!(Arena::open(&dir.path().join("absent")), Err(ArenaError::NotAnArena)));
    let error = Arena::create(dir.path(), &options(MIB)).unwrap_err();
    assert!(matches!(error, ArenaError::TooSmall { asked_bytes: MIB }));
    // As a creation leaves it that was killed before the superblock.
    fs::create_dir(dir.path().join("segments")).unwrap();
    let bytes = SegmentInfo { number: 0, blocks: 7 }.file_bytes();
    let segments = PrivateDirectory::open(&dir.path().join("segments")).unwrap();
    allocate_file(&segments, &segment_name(0), bytes, bytes).unwrap();
    let arena = Arena::create(dir.path(), &options(16 * MIB)).unwrap();
    assert_eq!(blocks(&arena.segments()), [4096]);
    drop(arena);
    fs::write(dir.path().join("segments/000001.data.new"), b"cut short").unwrap();
    drop(Arena::open(dir.path()).unwrap());
    assert!(!dir.path().join("segments/000001.data.new").exists());
}

#[test]
fn superblock_damage_differs_from_another_version() {
    let dir = tempfile::tempdir().unwrap();
    drop(Arena::create(dir.path(), &options(16 * MIB)).unwrap());
    let path = dir.path().join("ARENA");
    let good = fs::read(&path).unwrap();
    let with = |index: usize| {
        let mut bytes = good.clone();
        bytes[index] ^= 2;
        fs::write(&path, bytes).unwrap();
        Arena::open(dir.path()).unwrap_err()
    };
    assert!(matches!(with(0), ArenaError::NotAnArena));
    assert!(matches!(with(8), ArenaError::WrongVersion { .. }));
    assert!(matches!(with(30), ArenaError::DamagedSuperblock));
}

#[test]
fn session_files_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let arena = Arena::create(dir.path(), &options(16 * MIB)).unwrap();
    assert_eq!(arena.sessions().unwrap(), []);
    let [log] = arena.session_files(SESSION, [(SessionFile::Log, MIB, MIB)]).unwrap();
    assert_eq!(log.metadata().unwrap().len(), MIB);
    arena.session_files(SessionId(7), [(SessionFile::Control, 4096, 4096)]).unwrap();
    arena.session_files(SESSION, [(SessionFile::Leases, 4096, 4096)]).unwrap();
    let error = arena.session_files(SESSION, [(SessionFile::Log, MIB, MIB)]).unwrap_err();
    assert!(matches!(error, ArenaError::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists));
    let error = arena.open_session_file(SESSION, SessionFile::Control).unwrap_err();
    assert!(matches!(error, ArenaError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound));
    assert!(arena.open_session_file(SESSION, SessionFile::Log).is_ok());
    assert_eq!(arena.sessions().unwrap(), [SessionId(7), SESSION]);
    arena.remove_session(SESSION).unwrap();
    arena.remove_session(SESSION).unwrap();
    assert_eq!(arena.sessions().unwrap(), [SessionId(7)]);
}

#[test]
fn a_file_that_does_not_fit_is_refused_whole() {
    if !Path::new("/dev/shm").is_dir() {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let arena = Arena::create(dir.path(), &options(16 * MIB)).unwrap();
    // tmpfs compares the length with its own size before it allocates anything.
    let error = arena.session_files(SESSION, [(SessionFile::Log, 1 << 50, 1 << 50)]).unwrap_err();
    assert!(matches!(error, ArenaError::NoSpace { needed_bytes, .. } if needed_bytes == 1 << 50));
    assert_eq!(fs::read_dir(dir.path().join("sessions")).unwrap().count(), 0);
}

/// Root's own files were truncated through links in an arena that another user had prepared.
#[test]
fn links_in_a_prepared_arena_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let path = dir.path().join("arena");
    let link = |name: &str| {
        fs::create_dir_all(path.join(name).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&victim, path.join(name)).unwrap();
    };
    link("lock");
    assert!(matches!(Arena::create(&path, &options(16 * MIB)), Err(ArenaError::Io { .. })));
    fs::remove_file(path.join("lock")).unwrap();
    drop(Arena::create(&path, &options(16 * MIB)).unwrap());
    for name in ["ARENA.new", "segments/000001.data.new", "sessions/42.log"] {
        link(name);
        let arena = Arena::open(&path).unwrap();
        assert!(arena.open_session_file(SESSION, SessionFile::Log).is_err());
        let _ = arena.session_files(SESSION, [(SessionFile::Log, MIB, MIB)]);
        let _ = arena.resize(32 * MIB);
        arena.remove_session(SESSION).unwrap();
        fs::remove_file(path.join(name)).ok();
    }
    for name in ["metadata/data.mdb", "segments/000009.data"] {
        link(name);
        let opened = Arena::open(&path);
        assert_eq!(opened.is_err(), name.starts_with("metadata"), "{name}");
        fs::remove_file(path.join(name)).unwrap();
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
}

/// An arena that another user made beforehand was taken for root's, set-user-id programs included.
#[test]
fn arena_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    drop(Arena::create(&path, &options(16 * MIB)).unwrap());
    std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    let refused = [Arena::open(&path).unwrap_err(), Arena::create(&path, &options(16 * MIB)).unwrap_err()];
    for error in refused {
        assert!(error.to_string().contains("belongs to user 65534"), "{error}");
    }
    std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = Arena::open(&path).unwrap_err();
    assert!(error.to_string().contains("can be written by other users (mode 777)"), "{error}");
}

#[test]
fn new_arenas_have_file_systems_of_their_own() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let made = [&one, &two].map(|dir| Arena::create(dir.path(), &options(16 * MIB)).unwrap().summary());
    assert_ne!(made[0].file_system.id, made[1].file_system.id);
    assert_ne!(made[0].file_system.hash_key, made[1].file_system.hash_key);
    assert_eq!(made[0].node, NodeNumber::FIRST);
}

#[test]
fn joining_arena_has_file_system_of_first_and_own_id() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = Arena::create(one.path(), &options(16 * MIB)).unwrap().summary();
    let node = NodeNumber::new(3).unwrap();
    let joins = ArenaOptions { node, file_system: Some(first.file_system), ..options(16 * MIB) };
    drop(Arena::create(two.path(), &joins).unwrap());
    let joined = Arena::open(two.path()).unwrap().summary();
    assert_eq!((joined.node, joined.file_system), (node, first.file_system));
    assert_ne!(joined.id, first.id);
}

#[test]
fn refused_arena_of_another_version_is_left_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    // As the first version wrote it, which has no range of versions.
    let mut superblock = [0; 48];
    superblock[..8].copy_from_slice(b"ASHLARNA");
    superblock[8] = 1;
    fs::write(dir.path().join("ARENA"), superblock).unwrap();
    let error = Arena::open(dir.path()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the arena has format version 1, this program reads version 2; use the matching program"
    );
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["ARENA"], "nothing was made beside it");
    assert_eq!(fs::read(dir.path().join("ARENA")).unwrap(), superblock);
}

#[test]
fn arena_with_more_segments_than_addresses_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = Arena::create(dir.path(), &options(1 << 49)).unwrap_err();
    assert!(matches!(error, ArenaError::TooLarge { .. }), "{error}");
}
