//! State that SharedFS grants LibFS sessions together and ahead.
//!
//! It takes few requests, and is never stale.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};

use ashlar_libfs::{
    AttributeChange, FinalLink, LibFs, Listed, NewInode, OpenAction, PathIntent, PathPurpose, RenameFlags, WriteAt,
    XattrFlags,
};
use ashlar_tests::random::Random;
use ashlar_types::{Access, Credentials, Errno, FileKind, InodeId, LeaseScope};
use ashlar_wire::{Reply, Request};
use common::Site;
use common::libfs::{ROOT, SingleUser, connect, make, requests, user};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// A session that makes files in a shared directory need not ask for each.
///
/// If another session held something below, or beside, it once asked for them one by one, and each time waited for a
/// digest.
#[test]
fn files_made_in_shared_directory_take_few_requests() {
    const FILES: u64 = 200;
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let requests = || requests(&site);
    let directory = one.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let theirs = two.make_open(&ROOT, directory, b"theirs", &make(FileKind::Regular)).expect("made").id;
    let name = |number: u64| format!("file-{number:04}");
    let before = requests();
    for number in 0..FILES {
        let kind = if number % 9 == 0 { FileKind::Directory } else { FileKind::Regular };
        let made = one.make(&ROOT, directory, name(number).as_bytes(), &make(kind)).expect("made").id;
        let file = match kind {
            FileKind::Directory => one.make(&ROOT, made, b"inner", &make(FileKind::Regular)).expect("made").id,
            _ => made,
        };
        one.open(file).expect("opened");
        one.write(&ROOT, file, WriteAt::Offset(0), &vec![1; number as usize], false).expect("written");
        one.close(file);
    }
    let asked = requests() - before;
    assert!(asked < FILES / 8, "{asked} requests for {FILES} files");
    // The other session sees all of it at once and changes it, and that shows here.
    let outer = |fs: &LibFs, number: u64| fs.lookup(&ROOT, directory, name(number).as_bytes()).expect("found");
    let file = |fs: &LibFs, number: u64| match outer(fs, number) {
        found if found.inode.is_directory() => fs.lookup(&ROOT, found.id, b"inner").expect("found"),
        found => found,
    };
    for number in 0..FILES {
        let found = file(&two, number);
        assert_eq!(found.inode.size, number);
        two.write(&ROOT, found.id, WriteAt::End, &[2; 10], false).expect("written");
        assert_eq!(file(&one, number).inode.size, number + 10, "{}", name(number));
    }
    two.close(theirs);
}

/// A directory's maker leaves the leases below it to readers.
///
/// It reads the directory again meanwhile. It once asked for all below the directory. A mount that did so took all that
/// other sessions had read.
#[test]
fn maker_of_directory_leaves_leases_below_to_readers() {
    const DIRECTORIES: u64 = 30;
    let site = Site::new(64 << 20);
    let (maker, reader) = (connect(&site), connect(&site));
    let directory = maker.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let name = |number: u64| format!("directory-{number}");
    for number in 0..DIRECTORIES {
        let inner = maker.make(&ROOT, directory, name(number).as_bytes(), &make(FileKind::Directory)).expect("made");
        maker.make(&ROOT, inner.id, b"file", &make(FileKind::Regular)).expect("made");
    }
    let look_at_all = || {
        let before = requests(&site);
        for number in 0..DIRECTORIES {
            let inner = reader.lookup(&ROOT, directory, name(number).as_bytes()).expect("found").id;
            reader.lookup(&ROOT, inner, b"file").expect("found");
        }
        requests(&site) - before
    };
    let asked = look_at_all();
    assert!(asked > 5, "{asked} requests while the maker held the leases");
    for _ in 0..3 {
        maker.attributes(directory).expect("there");
        let asked = look_at_all();
        assert!(asked < 3, "{asked} requests for files that the reader had read");
    }
    maker.make(&ROOT, directory, b"another", &make(FileKind::Directory)).expect("made");
    let asked = look_at_all();
    assert!(asked < 5, "{asked} requests where only the directory has changed");
}

/// Files of a shared directory are granted together.
///
/// A session that stats them once asked for each of them.
#[test]
fn files_of_shared_directory_are_granted_together() {
    const FILES: u64 = 200;
    let site = Site::new(64 << 20);
    let requests = || requests(&site);
    let name = |number: u64| format!("file-{number:04}");
    let maker = connect(&site);
    let directory = maker.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    for number in 0..FILES {
        maker.make(&ROOT, directory, name(number).as_bytes(), &make(FileKind::Regular)).expect("made");
    }
    drop(maker);
    let (one, two) = (connect(&site), connect(&site));
    let find = |fs: &LibFs, number: u64| fs.lookup(&ROOT, directory, name(number).as_bytes()).expect("found");
    for session in [&one, &two, &one] {
        let before = requests();
        (0..FILES).for_each(|number| drop(find(session, number)));
        let asked = requests() - before;
        assert!(asked < 10, "{asked} requests for {FILES} files");
    }
    let rename = |fs: &LibFs, from: u64, to: u64| {
        let (from, to) = (name(from), name(to));
        let renamed =
            fs.rename(&ROOT, (directory, from.as_bytes()), (directory, to.as_bytes()), RenameFlags::default());
        renamed.expect("renamed");
    };
    // A change by either session shows to the other at once.
    for number in 0..FILES {
        let (writer, reader) = if number % 3 == 0 { (&one, &two) } else { (&two, &one) };
        let file = find(writer, number).id;
        writer.write(&ROOT, file, WriteAt::Offset(0), &vec![1; number as usize], false).expect("written");
        assert_eq!(find(reader, number).inode.size, number);
        assert_eq!(find(reader, FILES - 1 - number).inode.size, find(writer, FILES - 1 - number).inode.size);
        rename(&two, number, FILES + number);
        assert_eq!(find(&one, FILES + number).inode.size, number);
        assert_eq!(one.lookup(&ROOT, directory, name(number).as_bytes()).err(), Some(Errno::ENOENT));
        rename(&one, FILES + number, number);
    }
}

/// A session that reads the files of a directory gets their contents together.
///
/// It once asked for the contents of each, and once more for the access list by which it opened each.
#[test]
fn contents_of_directory_files_are_granted_together() {
    const FILES: u64 = 100;
    let site = Site::new(64 << 20);
    let requests = || requests(&site);
    let name = |number: u64| format!("file-{number:04}");
    // Some texts stand in the answer itself, some in blocks, some in many.
    let text = |number: u64, version: u64| vec![(number + version) as u8; (number * 331 % 9000) as usize];
    let maker = connect(&site);
    let directory = maker.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    for number in 0..FILES {
        let file = maker.make(&ROOT, directory, name(number).as_bytes(), &make(FileKind::Regular)).expect("made").id;
        maker.write(&ROOT, file, WriteAt::Offset(0), &text(number, 0), false).expect("written");
    }
    drop(maker);
    let (one, two) = (connect(&site), connect(&site));
    let user = Credentials { checked: false, ..ROOT };
    let read = |fs: &LibFs, number: u64| {
        let found = fs.lookup(&user, directory, name(number).as_bytes()).expect("found");
        fs.open_for(&user, found.id, Access::READ).expect("opened");
        let mut room = vec![0xff; 10_000];
        let count = fs.read(found.id, 0, &mut room).expect("read");
        fs.close(found.id);
        room.truncate(count);
        (found.id, room)
    };
    // Alone, under one lease on all; then beside another session, under one on the files.
    for session in [&one, &two] {
        let before = requests();
        (0..FILES).for_each(|number| assert_eq!(read(session, number).1, text(number, 0), "{}", name(number)));
        let asked = requests() - before;
        assert!(asked < 15, "{asked} requests for {FILES} files");
    }
    // A write by either session shows to both at once, and all else is unchanged.
    for number in 0..FILES {
        let (writer, reader) = if number % 3 == 0 { (&one, &two) } else { (&two, &one) };
        let file = read(writer, number).0;
        writer.write(&ROOT, file, WriteAt::Offset(0), &text(number, 1), false).expect("written");
        let other = (number + 7) % FILES;
        for session in [reader, writer] {
            assert_eq!(read(session, number).1, text(number, 1), "{}", name(number));
            assert_eq!(read(session, other).1, text(other, u64::from(other < number)), "{}", name(other));
        }
    }
}

/// An answer for one file brings along others that either session writes meanwhile.
#[test]
fn grants_along_hide_no_concurrent_write() {
    const FILES: u64 = 12;
    const ROUNDS: u64 = 1500;
    let mut site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site)];
    let directory = sessions[0].make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let text = |version: u64| version.to_le_bytes().repeat(400);
    let made = |number: u64| {
        let name = format!("file-{number}");
        let file = sessions[0].make(&ROOT, directory, name.as_bytes(), &make(FileKind::Regular)).expect("made").id;
        sessions[0].write(&ROOT, file, WriteAt::Offset(0), &text(1), false).expect("written");
        (file, AtomicU64::new(1))
    };
    let files: Vec<_> = (0..FILES).map(made).collect();
    let writers = AtomicU64::new(2);
    // No session reads less than was written when it began to read.
    let read = |fs: &LibFs, (file, written): &(InodeId, AtomicU64)| {
        let least = written.load(Ordering::SeqCst);
        let mut room = [0; 4000];
        assert_eq!(fs.read(*file, 0, &mut room), Ok(3200));
        let version = u64::from_le_bytes(room[..8].try_into().expect("eight bytes"));
        assert!(version >= least, "version {version}, and {least} was there");
        assert_eq!(room[..3200], text(version), "a mixture of two writes");
    };
    std::thread::scope(|scope| {
        for (turn, fs) in sessions.iter().enumerate() {
            let (files, writers, read, text) = (&files, &writers, &read, &text);
            scope.spawn(move || {
                let mut random = Random::new(turn as u64);
                for version in 2..2 + ROUNDS {
                    let at = random.below(FILES / 2) as usize * 2 + turn;
                    let (file, written) = &files[at];
                    fs.write(&ROOT, *file, WriteAt::Offset(0), &text(version), false).expect("written");
                    written.store(version, Ordering::SeqCst);
                    read(fs, &files[at]);
                    read(fs, &files[random.below(FILES) as usize]);
                }
                writers.fetch_sub(1, Ordering::SeqCst);
            });
            scope.spawn(move || {
                let mut random = Random::new(10 + turn as u64);
                while writers.load(Ordering::SeqCst) > 0 {
                    read(fs, &files[random.below(FILES) as usize]);
                }
            });
        }
    });
    assert_eq!(site.check()["sessions_fenced"], 0);
}

/// A file that another session has changed last takes one request to change.
///
/// It once took two or three: to look, and then to write.
#[test]
fn file_changed_by_other_session_takes_one_request() {
    const FILES: u64 = 100;
    let site = Site::new(64 << 20);
    let requests = || requests(&site);
    let (one, two, user) = (connect(&site), connect(&site), SingleUser::of(1000));
    let top = NewInode { mode: 0o777, ..make(FileKind::Directory) };
    let directory = one.make(&ROOT, InodeId::ROOT, b"directory", &top).expect("made").id;
    let credentials = &user.credentials;
    let open = |fs: &LibFs, path: &str, flags: i32| {
        let place = user.place(fs, path, PathIntent::of_open_flags(flags)).expect("followed");
        match place.opening(flags).expect("opened") {
            OpenAction::Create => {
                fs.make_open(credentials, place.directory, &place.name, &make(FileKind::Regular)).expect("made")
            }
            OpenAction::Existing(found, access) => fs.open_for(credentials, found.id, access).expect("opened"),
            OpenAction::CreateUnnamed(_) => panic!("that has a name"),
        }
    };
    let create = |fs: &LibFs, path: &str| {
        let id = open(fs, path, libc::O_CREAT | libc::O_WRONLY).id;
        fs.write(credentials, id, WriteAt::End, path.as_bytes(), false).expect("written");
        fs.close(id);
    };
    type Step<'a> = (&'a str, u64, &'a dyn Fn(&LibFs, &str));
    let steps: [Step<'_>; 7] = [
        ("create", 1, &|fs, path| create(fs, &format!("{path}-two"))),
        ("stat", 1, &|fs, path| assert!(user.walk(fs, path, FinalLink::Keep).expect("followed").is_some())),
        ("read", 1, &|fs, path| {
            let mut text = [0; 64];
            let id = open(fs, path, libc::O_RDONLY).id;
            let length = fs.read(id, 0, &mut text).expect("read");
            assert_eq!(&text[..length], path.as_bytes());
            fs.close(id);
        }),
        ("append", 1, &|fs, path| {
            let id = open(fs, path, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND).id;
            assert_eq!(
                fs.write(credentials, id, WriteAt::End, b"more", false).expect("written").offset,
                path.len() as u64
            );
            fs.close(id);
        }),
        ("chmod", 1, &|fs, path| {
            let place = user.place(fs, path, FinalLink::Follow.to(PathPurpose::SetAttributes)).expect("followed");
            let change = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
            fs.set_attributes(credentials, place.found.expect("there").id, &change).expect("changed");
        }),
        ("unlink", 1, &|fs, path| {
            let place = user.place(fs, path, FinalLink::Keep.to(PathPurpose::Name)).expect("followed");
            fs.remove_at(credentials, &place, false).expect("removed");
        }),
        ("rename", 2, &|fs, path| {
            let aim = FinalLink::Keep.to(PathPurpose::Name);
            let new = format!("{path}-new");
            let (from, to) =
                (user.place(fs, path, aim).expect("followed"), user.place(fs, &new, aim).expect("followed"));
            fs.rename_at(credentials, &from, &to, RenameFlags::default()).expect("renamed");
        }),
    ];
    for (name, most, step) in steps {
        let mut asked = 0;
        for number in 0..FILES {
            let path = format!("directory/{name}-{number}");
            create(&one, &path);
            let before = requests();
            step(&two, &path);
            // The request for the counters is counted as well.
            asked += requests() - before - 1;
        }
        // Now and then the others of the directory are asked for as well.
        assert!(asked * 4 <= most * FILES * 5, "{asked} requests to {name} {FILES} files");
    }
    assert_eq!(one.attributes(directory).expect("known").inode.entries, 7 * FILES);
}

/// The state that comes with a directory is limited.
///
/// Files with long extended attributes once all came with their directory, until an answer was longer than allowed.
#[test]
fn state_granted_with_directory_is_limited() {
    const FILES: usize = 60;
    let (site, value) = (Site::new(64 << 20), vec![7; 32 << 10]);
    let fs = connect(&site);
    let top = fs.make(&ROOT, InodeId::ROOT, b"top", &make(FileKind::Directory)).expect("made").id;
    for number in 0..FILES {
        let name = format!("file-{number}");
        let id = fs.make(&ROOT, top, name.as_bytes(), &make(FileKind::Regular)).expect("made").id;
        fs.set_xattr(&ROOT, id, b"user.long", &value, XattrFlags::default(), false).expect("set");
    }
    drop(fs);
    let mut client = common::Client::open(&site.socket());
    let mut want = common::Client::want(top, true);
    want.lease.scope = LeaseScope::Subtree;
    let Ok(Reply::Granted { grants, .. }) = client.call(&Request::Acquire(vec![want])) else { panic!("not granted") };
    assert_eq!(grants.len(), 1 + FILES);
    let complete = grants.iter().filter(|grant| grant.state.xattrs.is_some()).count();
    assert!((8..=12).contains(&complete), "{complete} with all their attributes");
    let fs = connect(&site);
    let id = fs.lookup(&ROOT, top, b"file-59").expect("found").id;
    assert_eq!(fs.xattr(id, b"user.long").expect("read"), value);
}

/// Makes a tree of so many directories with files in them, in two levels.
///
/// Returns them by name.
fn tree(fs: &LibFs, directories: u64, files: u64) -> Vec<(String, InodeId)> {
    let mut made = Vec::new();
    for outer in 0..directories.div_ceil(20) {
        let name = format!("outer-{outer:02}");
        let top = fs.make(&ROOT, InodeId::ROOT, name.as_bytes(), &make(FileKind::Directory)).expect("made").id;
        for inner in 0..20 {
            let path = format!("{name}/inner-{inner:02}");
            let id = fs.make(&ROOT, top, &path.as_bytes()[9..], &make(FileKind::Directory)).expect("made").id;
            for file in 0..files {
                fs.make(&ROOT, id, format!("file-{file:02}").as_bytes(), &make(FileKind::Regular)).expect("made");
            }
            made.push((path, id));
        }
    }
    made
}

/// Checks the lengths of all files of a directory by their paths.
fn check_lengths(fs: &LibFs, user: &SingleUser, path: &str, length: impl Fn(u64) -> u64) {
    for file in 0..FILES_OF_TREE {
        let place = user.place(fs, &format!("{path}/file-{file:02}"), FinalLink::Follow).expect("walked");
        assert_eq!(place.found.expect("found").inode.size, length(file), "{path}/file-{file:02}");
    }
}

const FILES_OF_TREE: u64 = 25;

/// A session that walks through a tree gets the next directories ahead.
///
/// It once asked for each directory, and twice for its files.
#[test]
fn walk_through_tree_is_granted_ahead() {
    const DIRECTORIES: u64 = 200;
    // By name, in the order of a listing, from several positions at once, and in no order.
    for (order, most) in [("by name", 40), ("listed", 40), ("at once", 120), ("in no order", 3 * DIRECTORIES)] {
        let site = Site::new(64 << 20);
        let granted = || site.status().counters.iter().find(|(name, _)| name == "leases_granted").expect("a counter").1;
        let maker = connect(&site);
        let mut all = tree(&maker, DIRECTORIES, FILES_OF_TREE);
        let mut random = Random::new(7);
        match order {
            "by name" => {}
            "listed" => {
                let paths: std::collections::BTreeMap<_, _> =
                    all.iter().map(|(path, id)| (*id, path.clone())).collect();
                all.clear();
                visit_directories(&maker, InodeId::ROOT, &mut |id| {
                    all.extend(paths.get(&id).map(|path| (path.clone(), id)))
                });
            }
            "at once" => all.sort_by_key(|(path, _)| path[9..].to_owned()),
            _ => (0..all.len()).for_each(|at| all.swap(at, random.below(DIRECTORIES) as usize)),
        }
        assert_eq!(all.len() as u64, DIRECTORIES);
        // Beside the session that has made them, and holds leases there.
        let (fs, user) = (connect(&site), SingleUser::of(0));
        let (asked, given) = (requests(&site), granted());
        all.iter().for_each(|(path, _)| check_lengths(&fs, &user, path, |_| 0));
        let (asked, given) = (requests(&site) - asked, granted() - given);
        assert!(asked < most, "{order}: {asked} requests for {DIRECTORIES} directories");
        assert!(given < 5 * DIRECTORIES, "{order}: {given} leases for {DIRECTORIES} directories");
    }
}

/// Visits all directories below one in the order of listings.
fn visit_directories(fs: &LibFs, directory: InodeId, each: &mut dyn FnMut(InodeId)) {
    let mut inner = Vec::new();
    let mut note = |listed: Listed| {
        inner.extend((listed.kind == FileKind::Directory).then_some(listed.id));
        true
    };
    fs.list(directory, 0, &mut note).expect("listed");
    for directory in inner {
        each(directory);
        visit_directories(fs, directory, each);
    }
}

/// Other sessions go on changing files that were granted ahead.
#[test]
fn grants_ahead_of_walk_are_not_stale() {
    let site = Site::new(64 << 20);
    let (maker, writer) = (connect(&site), connect(&site));
    let all = tree(&maker, 60, FILES_OF_TREE);
    let mut random = Random::new(20_261_124);
    let mut lengths = vec![[0; FILES_OF_TREE as usize]; all.len()];
    for _ in 0..6 {
        let (fs, user) = (connect(&site), SingleUser::of(0));
        for (at, (path, _)) in all.iter().enumerate() {
            for _ in 0..4 {
                // Often one that was granted a moment ago.
                let near = (at + random.below(30) as usize) % all.len();
                let (file, fs) = (random.below(FILES_OF_TREE), if random.below(2) == 0 { &writer } else { &maker });
                let id = fs.lookup(&ROOT, all[near].1, format!("file-{file:02}").as_bytes()).expect("found").id;
                fs.write(&ROOT, id, WriteAt::End, b"x", false).expect("written");
                lengths[near][file as usize] += 1;
            }
            check_lengths(&fs, &user, path, |file| lengths[at][file as usize]);
        }
    }
}

/// A directory whose lease moves often has the right names.
///
/// It is known by a few of its names.
#[test]
fn crowded_directory_matches_model() {
    const NAMES: u64 = 120;
    let site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site), connect(&site)];
    let top = sessions[0].make(&ROOT, InodeId::ROOT, b"top", &make(FileKind::Directory)).expect("made").id;
    let mut random = Random::new(20_261_123);
    let mut model = std::collections::BTreeMap::new();
    for step in 0..6000 {
        // Mostly in turn, at times one alone for a while.
        let at = if step / 100 % 3 == 2 { step / 100 % 2 } else { random.below(3) } as usize;
        let fs = &sessions[at];
        let name = |random: &mut Random| format!("name-{}", random.below(NAMES));
        let (old, new) = (name(&mut random), name(&mut random));
        let found = fs.lookup(&ROOT, top, old.as_bytes()).map(|found| found.id);
        assert_eq!(found.ok(), model.get(&old).copied(), "{old} at step {step}");
        match random.below(if step < 600 { 4 } else { 12 }) {
            0..=3 => match fs.make(&ROOT, top, old.as_bytes(), &make(FileKind::Regular)) {
                Ok(made) => assert_eq!(model.insert(old, made.id), None),
                Err(errno) => assert_eq!((errno, model.contains_key(&old)), (Errno::EEXIST, true)),
            },
            4 | 5 => match fs.unlink(&ROOT, top, old.as_bytes()) {
                Ok(()) => assert!(model.remove(&old).is_some()),
                Err(errno) => assert_eq!((errno, model.contains_key(&old)), (Errno::ENOENT, false)),
            },
            6 | 7 => match fs.rename(&ROOT, (top, old.as_bytes()), (top, new.as_bytes()), RenameFlags::default()) {
                Ok(()) => {
                    let moved = model.remove(&old).expect("there");
                    model.insert(new, moved);
                }
                Err(errno) => assert_eq!((errno, model.contains_key(&old)), (Errno::ENOENT, false)),
            },
            8 => {
                let mut listed = std::collections::BTreeMap::new();
                let mut each = |entry: Listed| {
                    listed.insert(String::from_utf8(entry.name).expect("text"), entry.id);
                    true
                };
                fs.list(top, 0, &mut each).expect("listed");
                assert_eq!(listed, model, "at step {step}");
            }
            _ => {}
        }
        assert_eq!(fs.attributes(top).expect("known").inode.entries, model.len() as u64);
    }
}

/// A grant ahead is void once another session has changed the file.
///
/// The way of the change does not matter. A repeated grant is void, too.
#[test]
fn grant_ahead_is_void_after_change_by_other_session() {
    const FILES: u64 = 6;
    const NAME: &str = "user.note";
    let mut site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let name = |number: u64| format!("file-{number}");
    type FileChange<'a> = (&'a str, &'a dyn Fn(&LibFs, InodeId, &str));
    let find =
        |fs: &LibFs, directory: InodeId, name: &str| fs.lookup(&ROOT, directory, name.as_bytes()).expect("found").id;
    let set = |fs: &LibFs, directory: InodeId, name: &str, change: &AttributeChange| {
        fs.set_attributes(&ROOT, find(fs, directory, name), change).expect("changed");
    };
    let write = |fs: &LibFs, directory: InodeId, name: &str, at: WriteAt, text: &[u8]| {
        fs.write(&ROOT, find(fs, directory, name), at, text, false).expect("written");
    };
    let changes: [FileChange<'_>; 9] = [
        ("overwritten", &|fs, top, name| write(fs, top, name, WriteAt::Offset(0), b"other")),
        ("overwritten far in", &|fs, top, name| write(fs, top, name, WriteAt::Offset(8000), b"other")),
        ("appended to", &|fs, top, name| write(fs, top, name, WriteAt::End, b"more")),
        ("cut off", &|fs, top, name| {
            set(fs, top, name, &AttributeChange { size: Some(3), ..AttributeChange::default() })
        }),
        ("cut off and longer again", &|fs, top, name| {
            set(fs, top, name, &AttributeChange { size: Some(0), ..AttributeChange::default() });
            set(fs, top, name, &AttributeChange { size: Some(9000), ..AttributeChange::default() });
        }),
        ("closed to others", &|fs, top, name| {
            set(fs, top, name, &AttributeChange { mode: Some(0o600), ..AttributeChange::default() })
        }),
        ("noted upon", &|fs, top, name| {
            let flags = XattrFlags::default();
            fs.set_xattr(&ROOT, find(fs, top, name), NAME.as_bytes(), b"new", flags, false).expect("set");
        }),
        ("replaced", &|fs, top, name| {
            let new = fs.make(&ROOT, top, b"new", &make(FileKind::Regular)).expect("made").id;
            fs.write(&ROOT, new, WriteAt::Offset(0), b"replaced", false).expect("written");
            let flags = RenameFlags::default();
            fs.rename(&ROOT, (top, b"new"), (top, name.as_bytes()), flags).expect("renamed");
        }),
        ("exchanged", &|fs, top, name| {
            let flags = RenameFlags { exchange: true, ..RenameFlags::default() };
            fs.rename(&ROOT, (top, b"file-5"), (top, name.as_bytes()), flags).expect("renamed");
        }),
    ];
    // Returns all visible state of a file; and, if another user can't open it, the error.
    let seen = |fs: &LibFs, directory: InodeId, name: &str| {
        let found = fs.lookup(&ROOT, directory, name.as_bytes()).expect("found");
        let mut room = vec![0; 20_000];
        let count = fs.read(found.id, 0, &mut room).expect("read");
        room.truncate(count);
        let stranger = fs.open_for(&user(1000), found.id, Access::READ).map(|_| fs.close(found.id));
        let inode = found.inode;
        (found.id, inode.mode, inode.size, room, stranger, fs.xattr(found.id, NAME.as_bytes()).ok())
    };
    for (number, (what, change_file)) in changes.iter().enumerate() {
        let maker = connect(&site);
        let top = format!("directory-{number}");
        let top = maker.make(&ROOT, InodeId::ROOT, top.as_bytes(), &make(FileKind::Directory)).expect("made").id;
        for file in 0..FILES {
            let id = maker.make(&ROOT, top, name(file).as_bytes(), &make(FileKind::Regular)).expect("made").id;
            let text = vec![b'a' + file as u8; 3000 + 3000 * file as usize];
            maker.write(&ROOT, id, WriteAt::Offset(0), &text, false).expect("written");
            maker.set_xattr(&ROOT, id, NAME.as_bytes(), b"old", XattrFlags::default(), false).expect("set");
        }
        drop(maker);
        // The others come with these files, or with the next one if the file that came with its directory is among
        // them. Two of the others are read to see that they have come.
        drop([0, 1].map(|file| seen(&one, top, &name(file))));
        let before = requests(&site);
        drop([2, 5].map(|file| seen(&one, top, &name(file))));
        let asked = requests(&site) - before - 1;
        assert!(asked <= 1, "{what}: the files of the directory were not granted with the first ones");
        for (round, file) in [3, 2, 3, 4].into_iter().enumerate() {
            change_file(&two, top, &name(file));
            for file in [file, 5, 0, 2, 3, 4] {
                let (expected, found) = (seen(&two, top, &name(file)), seen(&one, top, &name(file)));
                assert_eq!(found, expected, "{} after another file was {what}, round {round}", name(file));
            }
        }
    }
    assert_eq!(site.check()["sessions_fenced"], 0);
}
