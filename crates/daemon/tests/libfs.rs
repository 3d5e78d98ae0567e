//! Sessions of LibFS on a real daemon, without a kernel in between: what the kernel never hands on, and what it would hide.

mod common;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ashlar_libfs::{
    Aim, Allocation, Change, Found, Last, LibFs, Listed, Make, OpenInode, Opening, Options, Paths, Place as Spot,
    Purpose, RenameFlags, Seek, Surroundings, Walked, WriteAt, XattrFlags,
};
use ashlar_tests::linear::checker::{History, check};
use ashlar_tests::linear::model::{Picture, Seen, text_of};
use ashlar_tests::linear::operation::{Answer, DIRECTORIES, Event, Move, NAMES, Operation, Place};
use ashlar_tests::random::Random;
use ashlar_types::{Access, BLOCK_BYTES, Credentials, Errno, FILE_SIZE_MAX, FileKind, InodeId};
use ashlar_wire::{Reply, Request, ScopeKind, SessionKind, Want};
use common::Site;

const ROOT: Credentials = Credentials::checked(0, 0);

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

fn connect(site: &Site) -> Arc<LibFs> {
    let options = Options {
        socket: site.socket(),
        kind: SessionKind::Process,
        label: "test".into(),
        patience_ms: 20_000,
        notice: |_| {},
        descriptors_from: 0,
    };
    LibFs::connect(&options).expect("connected")
}

fn make(kind: FileKind) -> Make<'static> {
    Make { kind, mode: 0o755, umask: 0, device: 0, target: &[] }
}

#[test]
fn a_removed_file_gets_no_new_name() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let file = one.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    assert_eq!(two.lookup(&ROOT, InodeId::ROOT, b"file").expect("found").id, file);
    one.unlink(&ROOT, InodeId::ROOT, b"file").expect("removed");
    // As a kernel does that has looked the old name up before it was removed.
    for session in [&two, &one] {
        assert_eq!(session.link(&ROOT, file, InodeId::ROOT, b"again").err(), Some(Errno::ENOENT));
    }
    one.close(file);
    let unnamed = two.make_unnamed(&ROOT, InodeId::ROOT, &make(FileKind::Regular)).expect("made").id;
    assert_eq!(two.link(&ROOT, unnamed, InodeId::ROOT, b"named").expect("linked").inode.links, 1);
    two.unlink(&ROOT, InodeId::ROOT, b"named").expect("removed");
    assert_eq!(two.link(&ROOT, unnamed, InodeId::ROOT, b"named").err(), Some(Errno::ENOENT));
    two.close(unnamed);
}

/// Files that were made where another session held something below, or beside, were asked for one by one, and each time the log was
/// digested first.
#[test]
fn what_is_made_in_a_shared_directory_takes_no_questions() {
    const FILES: u64 = 200;
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let requests = || site.status().counters.iter().find(|(name, _)| name == "requests").expect("a counter").1;
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
    // The other session sees all of it at once, changes it, and that shows here.
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

/// Who looked at the files of a directory that others use as well asked for each of them.
#[test]
fn files_of_a_shared_directory_are_told_together() {
    const FILES: u64 = 200;
    let site = Site::new(64 << 20);
    let requests = || site.status().counters.iter().find(|(name, _)| name == "requests").expect("a counter").1;
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
    // What either changes, the other sees at once.
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

/// Who read the files of a directory asked for what is in each of them, and once more for the access list of each by which it was opened.
#[test]
fn what_is_in_the_files_of_a_directory_is_told_together() {
    const FILES: u64 = 100;
    let site = Site::new(64 << 20);
    let requests = || site.status().counters.iter().find(|(name, _)| name == "requests").expect("a counter").1;
    let name = |number: u64| format!("file-{number:04}");
    // Some stand in the answer itself, some in blocks, some in many.
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
    // Alone, under one lease on all; then beside another, under one on the files.
    for session in [&one, &two] {
        let before = requests();
        (0..FILES).for_each(|number| assert_eq!(read(session, number).1, text(number, 0), "{}", name(number)));
        let asked = requests() - before;
        assert!(asked < 15, "{asked} requests for {FILES} files");
    }
    // What either writes, both see at once, and all else is as it was.
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

/// What comes along with the answer for one file is about others that either session writes meanwhile.
#[test]
fn what_is_told_along_takes_back_nothing_that_was_written_meanwhile() {
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
    // Nobody reads less than what was written when he began.
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

/// A file that its maker knows by the lease of its directory was changed by him after SharedFS had freed it, and he was shut out for that.
#[test]
fn what_was_freed_is_changed_by_nobody() {
    let site = Site::new(64 << 20);
    let (zero, one, two) = (connect(&site), connect(&site), connect(&site));
    let directory = zero.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let theirs = two.make_open(&ROOT, directory, b"theirs", &make(FileKind::Regular)).expect("made").id;
    let file = one.make_open(&ROOT, directory, b"file", &make(FileKind::Regular)).expect("made").id;
    let chmod = || one.set_attributes(&ROOT, file, &Change { mode: Some(0o600), ..Change::default() }).map(drop);
    one.unlink(&ROOT, directory, b"file").expect("removed");
    assert_eq!(chmod(), Ok(()), "of an open file without a name");
    two.list(directory, 0, &mut |_| true).expect("listed");
    one.close(file);
    let freed = || site.status().counters.iter().find(|(name, _)| name == "orphans_freed").expect("a counter").1 > 0;
    let start = Instant::now();
    while !freed() {
        assert!(start.elapsed() < Duration::from_secs(30), "the file is not freed");
        std::thread::sleep(Duration::from_millis(20));
    }
    one.make(&ROOT, directory, b"other", &make(FileKind::Regular)).expect("made");
    assert_eq!(chmod(), Err(Errno::ESTALE));
    one.make_room().expect("digested");
    one.make(&ROOT, directory, b"another", &make(FileKind::Regular)).expect("made");
    two.close(theirs);
}

/// A descriptor says a file's number before SharedFS has seen in any log that there is such a file.
#[test]
fn a_number_is_known_before_its_log_was_read() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let made = one.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    assert!(two.attributes(made).expect("known").inode.is_directory());
    let file = one.make_open(&ROOT, made, b"file", &make(FileKind::Regular)).expect("made").id;
    assert_eq!(two.write(&ROOT, file, WriteAt::End, b"text", false).expect("written").bytes, 4);
    assert_eq!(one.attributes(file).expect("known").inode.size, 4);
    assert_eq!(two.attributes(InodeId(file.0 + 1)).err(), Some(Errno::ESTALE));
    one.close(file);
}

/// Surroundings of nothing else, for one user.
struct Alone {
    who: Credentials,
    paths: Paths,
}

impl Alone {
    fn of(uid: u32) -> Self {
        Self { who: Credentials { uid, gid: uid, groups: Vec::new(), checked: false }, paths: Paths::default() }
    }

    /// Where a path leads, or why not.
    fn walk(&self, fs: &LibFs, path: &str, last: Last) -> Result<Option<InodeId>, Errno> {
        self.place(fs, path, last).map(|place| place.found.map(|found| found.id))
    }

    fn place(&self, fs: &LibFs, path: &str, aim: impl Into<Aim>) -> Result<Spot, Errno> {
        match fs.walk(self, InodeId::ROOT, path.as_bytes(), aim)? {
            Walked::Inside(place) => Ok(place),
            Walked::Outside => Err(Errno::EXDEV),
        }
    }
}

impl Surroundings for Alone {
    fn who(&self) -> &Credentials {
        &self.who
    }
    fn inside<'a>(&self, _: &'a [u8]) -> Option<&'a [u8]> {
        None
    }
    fn is_covered(&self, _: InodeId) -> bool {
        false
    }
    fn era(&self) -> u64 {
        0
    }
    fn paths(&self) -> &Paths {
        &self.paths
    }
    fn may_follow(&self, _: InodeId, _: &Found) -> Result<bool, Errno> {
        Ok(true)
    }
}

/// Whoever changes what about the directories on their way, remembered paths lead where paths lead that nobody remembers.
#[test]
fn a_remembered_path_leads_where_it_leads_now() {
    const STEPS: u64 = 1500;
    const NAMES: [&str; 4] = ["a", "b", "c", "link"];
    let site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site)];
    let mut random = Random::new(20_261_122);
    let user = || [Alone::of(0), Alone::of(1000)];
    let remembering = [user(), user()];
    let mut remembered = 0;
    for step in 0..STEPS {
        let name = |random: &mut Random| *random.pick(&NAMES).expect("a name");
        let path = |random: &mut Random| (0..=random.below(3)).map(|_| name(random)).collect::<Vec<_>>().join("/");
        // For a while one is alone, and no lease moves.
        let company = if step / 50 % 2 == 0 { 1 } else { sessions.len() };
        let fs = &sessions[random.below(company as u64) as usize];
        // The directory and the last name of a path, if there is such a directory.
        let place = |random: &mut Random| {
            let path = path(random);
            let (way, name) = path.rsplit_once('/').unwrap_or(("", &path));
            let directory = Alone::of(0).walk(fs, way, Last::Follow).ok()??;
            Some((directory, name.to_owned()))
        };
        if let Some((directory, name)) = place(&mut random) {
            let name = name.as_bytes();
            // Most of them fail, as they should where the name is there or is not.
            let _ = match random.below(8) {
                0 | 1 => fs.make(&ROOT, directory, name, &make(FileKind::Directory)).map(drop),
                2 => fs.make(&ROOT, directory, name, &make(FileKind::Regular)).map(drop),
                3 => {
                    let target = ["a/b", "b", "../c", "."][random.below(4) as usize];
                    let link = Make { target: target.as_bytes(), ..make(FileKind::Symlink) };
                    fs.make(&ROOT, directory, name, &link).map(drop)
                }
                4 => fs.unlink(&ROOT, directory, name).or_else(|_| fs.remove_directory(&ROOT, directory, name, None)),
                5 => fs.lookup(&ROOT, directory, name).and_then(|found| {
                    let mode = if random.one_in(2) { 0o755 } else { 0o700 };
                    fs.set_attributes(&ROOT, found.id, &Change { mode: Some(mode), ..Change::default() }).map(drop)
                }),
                _ => place(&mut random).map_or(Ok(()), |(into, new)| {
                    let flags = RenameFlags { exchange: random.one_in(3), ..RenameFlags::default() };
                    fs.rename(&ROOT, (directory, name), (into, new.as_bytes()), flags)
                }),
            };
        }
        for _ in 0..8 {
            let path = path(&mut random);
            let last = if random.one_in(2) { Last::Follow } else { Last::Keep };
            for (fs, users) in sessions.iter().zip(&remembering).take(company) {
                for user in users {
                    let fresh = Alone::of(user.who.uid).walk(fs, &path, last);
                    let found = user.walk(fs, &path, last);
                    assert_eq!(found, fresh, "'{path}' at step {step}, for user {}", user.who.uid);
                    remembered += u64::from(matches!(found, Ok(Some(_))));
                }
            }
        }
    }
    assert!(remembered > STEPS, "only {remembered} paths led anywhere");
}

/// What one session has changed last, another had to ask for twice or three times before it could change it: to look, and then to write.
#[test]
fn what_another_has_changed_is_asked_for_once() {
    const FILES: u64 = 100;
    let site = Site::new(64 << 20);
    let requests = || site.status().counters.iter().find(|(name, _)| name == "requests").expect("a counter").1;
    let (one, two, user) = (connect(&site), connect(&site), Alone::of(1000));
    let top = Make { mode: 0o777, ..make(FileKind::Directory) };
    let directory = one.make(&ROOT, InodeId::ROOT, b"directory", &top).expect("made").id;
    let who = user.who();
    let open = |fs: &LibFs, path: &str, flags: i32| {
        let place = user.place(fs, path, Aim::of_opening(flags)).expect("followed");
        match place.opening(flags).expect("opened") {
            Opening::Make => fs.make_open(who, place.directory, &place.name, &make(FileKind::Regular)).expect("made"),
            Opening::Existing(found, access) => fs.open_for(who, found.id, access).expect("opened"),
            Opening::MakeUnnamed(_) => panic!("that has a name"),
        }
    };
    let create = |fs: &LibFs, path: &str| {
        let id = open(fs, path, libc::O_CREAT | libc::O_WRONLY).id;
        fs.write(who, id, WriteAt::End, path.as_bytes(), false).expect("written");
        fs.close(id);
    };
    type Step<'a> = (&'a str, u64, &'a dyn Fn(&LibFs, &str));
    let steps: [Step<'_>; 7] = [
        ("create", 1, &|fs, path| create(fs, &format!("{path}-two"))),
        ("stat", 1, &|fs, path| assert!(user.walk(fs, path, Last::Keep).expect("followed").is_some())),
        ("read", 1, &|fs, path| {
            let mut text = [0; 64];
            let id = open(fs, path, libc::O_RDONLY).id;
            let length = fs.read(id, 0, &mut text).expect("read");
            assert_eq!(&text[..length], path.as_bytes());
            fs.close(id);
        }),
        ("append", 1, &|fs, path| {
            let id = open(fs, path, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND).id;
            assert_eq!(fs.write(who, id, WriteAt::End, b"more", false).expect("written").offset, path.len() as u64);
            fs.close(id);
        }),
        ("chmod", 1, &|fs, path| {
            let place = user.place(fs, path, Last::Follow.to(Purpose::Change)).expect("followed");
            let change = Change { mode: Some(0o600), ..Change::default() };
            fs.set_attributes(who, place.found.expect("there").id, &change).expect("changed");
        }),
        ("unlink", 1, &|fs, path| {
            let place = user.place(fs, path, Last::Keep.to(Purpose::Name)).expect("followed");
            fs.remove_at(who, &place, false).expect("removed");
        }),
        ("rename", 2, &|fs, path| {
            let aim = Last::Keep.to(Purpose::Name);
            let new = format!("{path}-new");
            let (from, to) =
                (user.place(fs, path, aim).expect("followed"), user.place(fs, &new, aim).expect("followed"));
            fs.rename_at(who, &from, &to, RenameFlags::default()).expect("renamed");
        }),
    ];
    for (name, most, step) in steps {
        let mut asked = 0;
        for number in 0..FILES {
            let path = format!("directory/{name}-{number}");
            create(&one, &path);
            let before = requests();
            step(&two, &path);
            // The question how many there were is one as well.
            asked += requests() - before - 1;
        }
        // Now and then the others of the directory are asked for as well.
        assert!(asked * 4 <= most * FILES * 5, "{asked} requests to {name} {FILES} files");
    }
    assert_eq!(one.attributes(directory).expect("known").inode.entries, 7 * FILES);
}

/// Files with long extended attributes were all told of with their directory, until an answer was longer than any may be.
#[test]
fn what_comes_with_a_directory_has_an_end() {
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
    let want = Want { scope: ScopeKind::Subtree, ..common::Client::want(top, true) };
    let Ok(Reply::Granted { grants, .. }) = client.call(&Request::Acquire(vec![want])) else { panic!("not granted") };
    assert_eq!(grants.len(), 1 + FILES);
    let told = grants.iter().filter(|grant| grant.state.xattrs.is_some()).count();
    assert!((8..=12).contains(&told), "{told} with all their attributes");
    let fs = connect(&site);
    let id = fs.lookup(&ROOT, top, b"file-59").expect("found").id;
    assert_eq!(fs.xattr(id, b"user.long").expect("read"), value);
}

/// A file that is replaced all the time is there all the time: an answer about the one before said otherwise.
#[test]
fn what_is_replaced_is_there_at_all_times() {
    const SECONDS: u64 = 2;
    let site = Site::new(64 << 20);
    let sessions: Vec<_> = (0..4).map(|_| connect(&site)).collect();
    let top = sessions[0].make(&ROOT, InodeId::ROOT, b"top", &make(FileKind::Directory)).expect("made").id;
    sessions[0].make(&ROOT, top, b"file", &make(FileKind::Regular)).expect("made");
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let replace = |number: usize| {
        let (fs, new) = (&sessions[number], format!("new-{number}"));
        while Instant::now() < end {
            fs.make(&ROOT, top, new.as_bytes(), &make(FileKind::Regular)).expect("made");
            fs.rename(&ROOT, (top, new.as_bytes()), (top, b"file"), RenameFlags::default()).expect("renamed");
        }
    };
    let look = |number: usize| {
        let (fs, user) = (&sessions[number], Alone::of(0));
        let mut found = 0;
        while Instant::now() < end {
            let aim = Last::Follow.to(if found % 2 == 0 { Purpose::Read } else { Purpose::Write });
            match user.place(fs, "top/file", aim) {
                Ok(place) => assert!(place.found.is_some(), "it is said not to be there"),
                // A front end tries again.
                Err(errno) => assert_eq!(errno, Errno::ESTALE),
            }
            found += 1;
        }
        assert!(found > 10, "only {found} looks");
    };
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (replace, look) = (&replace, &look);
            scope.spawn(move || replace(number));
            scope.spawn(move || look(2 + number));
        }
    });
}

/// A name that is too long was asked for before it was looked at, and refused as if it were wrong in another way.
#[test]
fn a_name_that_is_too_long_is_refused_as_such() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let top = Make { mode: 0o700, ..make(FileKind::Directory) };
    one.make(&ROOT, InodeId::ROOT, b"top", &top).expect("made");
    let name = "x".repeat(256);
    let path = format!("top/{name}");
    for fs in [&two, &one, &two] {
        assert_eq!(Alone::of(0).walk(fs, &name, Last::Follow), Err(Errno::ENAMETOOLONG));
        assert_eq!(Alone::of(0).walk(fs, &path, Last::Follow), Err(Errno::ENAMETOOLONG));
        assert_eq!(Alone::of(1000).walk(fs, &path, Last::Follow), Err(Errno::EACCES));
    }
}

/// A directory whose lease moves often is known by a few of its names. They are the right ones.
#[test]
fn a_crowded_directory_has_the_names_that_it_has() {
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

/// What has no contents was asked for them again and again, for ever: the kernel refuses before it asks, and nobody had seen it.
#[test]
fn what_has_no_contents_is_refused_and_not_waited_for() {
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let id = fs.make(&ROOT, InodeId::ROOT, b"pipe", &make(FileKind::Fifo)).expect("made").id;
    let cut = Change { size: Some(0), ..Change::default() };
    let mut room = [0; 8];
    for (id, errno) in [(InodeId::ROOT, Errno::EISDIR), (id, Errno::EINVAL)] {
        assert_eq!(fs.set_attributes(&ROOT, id, &cut).err(), Some(errno));
        assert_eq!(fs.read(id, 0, &mut room), Err(errno));
        assert_eq!(fs.write(&ROOT, id, WriteAt::Offset(0), b"x", false), Err(errno));
        assert_eq!(fs.seek(id, Seek::Data, 0), Err(Errno::EINVAL));
        assert!(fs.allocate(&ROOT, id, Allocation::Reserve, 0, 1, false).is_err());
    }
}

/// A change of owner that names neither owner nor group takes set-id bits away, from one's own files only. A record that did it to a
/// stranger's would be refused by SharedFS, and the session with it.
#[test]
fn a_stranger_takes_no_set_id_bits_away() {
    let site = Site::new(64 << 20);
    let fs = connect(&site);
    let (owner, stranger) = (user(5), user(7));
    fs.set_attributes(&ROOT, InodeId::ROOT, &Change { mode: Some(0o777), ..Change::default() }).expect("opened to all");
    let file = fs.make(&owner, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    fs.set_attributes(&owner, file, &Change { mode: Some(0o4755), ..Change::default() }).expect("changed");
    let neither = Change { strip: true, ..Change::default() };
    assert_eq!(fs.set_attributes(&stranger, file, &neither).err(), Some(Errno::EPERM));
    assert_eq!(fs.attributes(file).expect("there").inode.mode, 0o4755);
    assert_eq!(fs.set_attributes(&owner, file, &neither).expect("changed").inode.mode, 0o755);
}

fn user(uid: u32) -> Credentials {
    Credentials { uid, gid: uid, groups: Vec::new(), checked: false }
}

/// A rename that leaves a whiteout is one update: the session that made it knows the whiteout at once, others find it, and it is
/// a file as any other from then on.
#[test]
fn a_whiteout_is_left_for_everybody() {
    let mut site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let user = Credentials::checked(5, 6);
    let directory = one.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let change = Change { gid: Some(9), mode: Some(0o2777), ..Change::default() };
    one.set_attributes(&ROOT, directory, &change).expect("changed");
    let flags = RenameFlags { whiteout: true, ..RenameFlags::default() };
    let (from, to) = ((directory, &b"file"[..]), (InodeId::ROOT, &b"moved"[..]));
    for (round, session) in [&one, &two, &one].into_iter().enumerate() {
        let file = session.make(&user, directory, b"file", &make(FileKind::Regular)).expect("made").id;
        session.rename(&user, from, to, flags).expect("moved");
        for looking in [session, &one, &two] {
            assert_eq!(looking.lookup(&ROOT, to.0, to.1).expect("found").id, file, "{round}");
            let left = looking.lookup(&ROOT, from.0, from.1).expect("found");
            let inode = &left.inode;
            assert_eq!((inode.kind, inode.device, inode.mode, inode.links), (FileKind::CharDevice, 0, 0, 1));
            assert_eq!((inode.uid, inode.gid), (5, 9), "as all that is made in a directory with set-group-id");
            assert_eq!(looking.attributes(directory).expect("there").inode.entries, 1);
        }
        let both = RenameFlags { exchange: true, ..flags };
        assert_eq!(session.rename(&user, from, to, both), Err(Errno::EINVAL));
        let neither = RenameFlags { no_replace: true, ..flags };
        assert_eq!(session.rename(&user, from, to, neither), Err(Errno::EEXIST));
        // The whiteout moves over the file, and goes.
        session.rename(&ROOT, from, to, RenameFlags::default()).expect("moved");
        assert_eq!(session.lookup(&ROOT, from.0, from.1).err(), Some(Errno::ENOENT));
        session.unlink(&ROOT, to.0, to.1).expect("removed");
    }
    assert_eq!(site.check()["sessions_fenced"], 0);
}

/// The kernel hands neither collapsing nor inserting on to FUSE, so they are tried here, between all else that changes a file.
/// Each thing that the short way does not look after must send the caller the long way, and the short way must be taken where it can.
#[test]
fn the_short_way_is_taken_only_where_all_is_at_hand() {
    let site = Site::new(64 << 20);
    let (one, two) = (connect(&site), connect(&site));
    let file = one.make_open(&ROOT, InodeId::ROOT, b"file", &make(FileKind::Regular)).expect("made").id;
    let way = one.open_inode(file);
    let write = |at: WriteAt, limit: u64| one.write_open(&way, at, b"short", true, limit);
    let read = |fs: &LibFs, way: &OpenInode| {
        let mut room = [0; 16];
        let count = fs.read_open(way, 0, room.len(), |length| room.get_mut(..length))?;
        Some(room[..count].to_vec())
    };
    // Credit is asked for the long way.
    let set_id = Change { mode: Some(0o4755), ..Change::default() };
    one.write(&ROOT, file, WriteAt::Offset(0), b"long way", false).expect("written");
    one.set_attributes(&ROOT, file, &set_id).expect("set");
    assert_eq!(write(WriteAt::Offset(4), 100).map(|written| (written.offset, written.bytes)), Some((4, 5)));
    assert_eq!(write(WriteAt::End, 100).map(|written| (written.offset, written.bytes)), Some((9, 5)));
    let now = one.attributes(file).expect("known").inode;
    assert_eq!((now.size, now.blocks, now.mode), (14, 1, 0o755), "a change of content clears set-id bits");
    assert_eq!(write(WriteAt::End, 18), None, "beyond the limit");
    assert_eq!(write(WriteAt::Offset(FILE_SIZE_MAX - 1), FILE_SIZE_MAX), None);
    let mut room = [0; 16];
    assert_eq!(one.read(file, 0, &mut room), Ok(14), "which moves the time of the access");
    assert_eq!(&room[..14], b"longshortshort");
    let fresh = read(&one, &way);
    assert!(fresh.is_none() || fresh.as_deref() == Some(b"longshortshort"));
    // A buffer that is not there yet, and one that is not asked for behind the end.
    assert_eq!(one.read_open(&way, 0, 16, |_| None), None);
    assert_eq!(one.read_open(&way, 14, 16, |_| panic!("nothing is to be copied")), Some(0));
    // The other session takes the lease away, and sees what was written.
    let theirs = two.open(file).map(|found| two.open_inode(found.id)).expect("opened");
    assert_eq!(two.write_open(&theirs, WriteAt::Offset(0), b"x", false, FILE_SIZE_MAX), None, "nothing is known yet");
    two.write(&ROOT, file, WriteAt::Offset(0), b"LONG", false).expect("written");
    assert_eq!((write(WriteAt::Offset(0), 100), read(&one, &way)), (None, None), "the lease is gone");
    assert!(two.write_open(&theirs, WriteAt::End, b"!", false, FILE_SIZE_MAX).is_some());
    assert_eq!(one.read(file, 0, &mut room), Ok(15));
    assert_eq!(&room[..15], b"LONGshortshort!");
    assert_eq!((read(&one, &theirs), read(&two, &way)), (None, None), "a way is good in its own session");
    // Capabilities are taken away by a record of their own.
    one.set_xattr(&ROOT, file, b"security.capability", b"value", XattrFlags::default(), false).expect("set");
    one.write(&ROOT, file, WriteAt::Offset(0), b"l", false).expect("written");
    one.set_xattr(&ROOT, file, b"security.capability", b"value", XattrFlags::default(), false).expect("set");
    assert_eq!(write(WriteAt::Offset(0), 100), None);
    one.write(&ROOT, file, WriteAt::Offset(0), b"l", false).expect("written");
    assert_eq!(one.xattr(file, b"security.capability"), Err(Errno::ENODATA));
    assert!(write(WriteAt::Offset(0), 100).is_some());
    // Without a name it goes on for as long as it is open.
    two.close(file);
    one.unlink(&ROOT, InodeId::ROOT, b"file").expect("removed");
    let _ = one.write(&ROOT, file, WriteAt::Offset(0), b"l", false).expect("written");
    assert!(write(WriteAt::Offset(0), 100).is_some());
    one.close(file);
    assert_eq!((write(WriteAt::Offset(0), 100), read(&one, &way)), (None, None), "it is gone");
    // What is no file.
    let directory = one.make(&ROOT, InodeId::ROOT, b"directory", &make(FileKind::Directory)).expect("made").id;
    let way = one.open_inode(directory);
    assert_eq!((one.write_open(&way, WriteAt::End, b"x", false, 100), read(&one, &way)), (None, None));
}

#[test]
fn ranges_of_a_file_are_what_a_model_says() {
    const SIZE_MAX: u64 = 192 << 10;
    let mut site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site)];
    for seed in 1..=3 {
        let (mut random, mut model) = (Random::new(seed), Vec::<u8>::new());
        let name = format!("ranges{seed}");
        let file = sessions[0].make(&ROOT, InodeId::ROOT, name.as_bytes(), &make(FileKind::Regular)).expect("made").id;
        // Who has not looked a file up can't know of it.
        assert_eq!(sessions[1].lookup(&ROOT, InodeId::ROOT, name.as_bytes()).expect("found").id, file);
        for number in 0..1500 {
            // Mostly the same session: its own log is what it reads from then.
            let fs = &sessions[usize::from(random.below(20) == 0)];
            let size = model.len() as u64;
            let (mut offset, mut length) = (random.below(SIZE_MAX - (16 << 10)), 1 + random.below(16 << 10));
            match random.below(10) {
                0..3 => {
                    let bytes = random.bytes(length as usize);
                    fs.write(&ROOT, file, WriteAt::Offset(offset), &bytes, false).expect("written");
                    put(&mut model, offset, &bytes);
                }
                3 => {
                    let change = ashlar_libfs::Change { size: Some(offset), ..Default::default() };
                    fs.set_attributes(&ROOT, file, &change).expect("truncated");
                    model.resize(offset as usize, 0);
                }
                4 if size > length => {
                    offset = random.below(size - length);
                    let to = random.below(SIZE_MAX - length);
                    if to >= offset + length || offset >= to + length {
                        assert_eq!(fs.copy_range(&ROOT, file, offset, file, to, length, false), Ok(length));
                        let bytes = model[offset as usize..(offset + length) as usize].to_vec();
                        put(&mut model, to, &bytes);
                    }
                }
                5..9 => {
                    let how = Allocation::ALL[random.below(7) as usize];
                    if matches!(how, Allocation::Collapse | Allocation::Insert) {
                        offset = random.below(size + 1) / BLOCK_BYTES * BLOCK_BYTES;
                        length = BLOCK_BYTES * (1 + random.below(4));
                    }
                    if how != Allocation::Insert || size + length <= SIZE_MAX {
                        let result = fs.allocate(&ROOT, file, how, offset, length, false);
                        assert_eq!(result, allocate(&mut model, how, offset, length), "seed {seed}, {number}: {how:?}");
                    }
                }
                _ => drop(fs.sync()),
            }
            if number % 10 == 0 {
                let mut found = vec![0; SIZE_MAX as usize];
                let count = fs.read(file, 0, &mut found).expect("read");
                let wrong = found[..count].iter().zip(&model).position(|(one, two)| one != two);
                assert_eq!((count, wrong), (model.len(), None), "seed {seed}, operation {number}");
            }
        }
    }
    sessions.iter().for_each(|session| session.end());
    site.check();
}

fn put(model: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let (start, end) = (offset as usize, offset as usize + bytes.len());
    model.resize(model.len().max(end), 0);
    model[start..end].copy_from_slice(bytes);
}

fn allocate(model: &mut Vec<u8>, how: Allocation, offset: u64, length: u64) -> Result<(), Errno> {
    let (start, end) = (offset as usize, (offset + length) as usize);
    let inside = start.min(model.len())..end.min(model.len());
    match how {
        Allocation::Reserve => model.resize(model.len().max(end), 0),
        Allocation::ReserveKeepSize => {}
        Allocation::Punch | Allocation::ZeroKeepSize => model[inside].fill(0),
        Allocation::Zero => put(model, offset, &vec![0; length as usize]),
        Allocation::Collapse if end >= model.len() => return Err(Errno::EINVAL),
        Allocation::Collapse => drop(model.drain(start..end)),
        Allocation::Insert if start >= model.len() => return Err(Errno::EINVAL),
        Allocation::Insert => drop(model.splice(start..start, vec![0; length as usize])),
    }
    Ok(())
}

/// One thread's view of a round.
struct Worker {
    fs: Arc<LibFs>,
    directories: Vec<InodeId>,
    open: Vec<InodeId>,
    /// Ways to open files that were read or written, kept as open files keep them.
    ways: HashMap<u64, OpenInode>,
    random: Random,
}

impl Worker {
    fn draw(&mut self) -> Operation {
        let how = [Move::Replace, Move::NoReplace, Move::Exchange][self.random.below(3) as usize];
        let mut place = || Place(self.random.below(4) as usize, self.random.below(NAMES.len() as u64) as usize);
        let (one, two) = (place(), place());
        let text = format!("{:x}", self.random.draw());
        let held = self.open.last().map(|file| file.0);
        match (self.random.below(100), held) {
            (0..12, _) => Operation::Create(one),
            (12..18, _) => Operation::MakeDirectory(one),
            (18..23, _) => Operation::RemoveDirectory(one),
            (23..31, _) => Operation::Unlink(one),
            (31..48, _) => Operation::Rename(one, two, how),
            (48..56, _) => Operation::Link(one, two),
            (56..63, _) => Operation::Stat(one),
            (63..70, _) => Operation::List(one.0),
            (70..78, Some(file)) => Operation::Write(file, self.random.below(30) as usize, text),
            (78..86, Some(file)) => Operation::Append(file, text),
            (86..96, Some(file)) => Operation::Read(file, 0, 4096),
            (96.., Some(file)) => Operation::StatOpen(file),
            _ => Operation::Open(one),
        }
    }

    /// Writes as a front end does: by what is at hand where that is enough.
    fn write(&mut self, file: u64, at: WriteAt, text: &str) -> Result<Answer, Errno> {
        let way = self.ways.entry(file).or_insert_with(|| self.fs.open_inode(InodeId(file)));
        match self.fs.write_open(way, at, text.as_bytes(), false, FILE_SIZE_MAX) {
            Some(_) => Ok(Answer::Done),
            None => self.fs.write(&ROOT, InodeId(file), at, text.as_bytes(), false).map(|_| Answer::Done),
        }
    }

    fn make(&mut self, operation: &Operation) -> Answer {
        self.try_make(operation).unwrap_or_else(|errno| Answer::Error(errno.0))
    }

    fn at(&self, place: Place) -> (InodeId, &'static [u8]) {
        (self.directories[place.0], NAMES[place.1].as_bytes())
    }

    /// Calls LibFS as the kernel does: a look-up first, where a path leads to what is meant.
    fn try_make(&mut self, operation: &Operation) -> Result<Answer, Errno> {
        let fs = Arc::clone(&self.fs);
        match operation {
            Operation::Create(place) => {
                let (directory, name) = self.at(*place);
                let file = fs.make_open(&ROOT, directory, name, &make(FileKind::Regular))?.id;
                self.open.push(file);
                Ok(Answer::File(file.0))
            }
            Operation::Open(place) => loop {
                let (directory, name) = self.at(*place);
                let found = fs.lookup(&ROOT, directory, name)?;
                if found.inode.is_directory() {
                    return Err(Errno::EISDIR);
                }
                match fs.open(found.id) {
                    Err(Errno::ESTALE) => {}
                    opened => {
                        self.open.push(opened?.id);
                        return Ok(Answer::File(found.id.0));
                    }
                }
            },
            Operation::MakeDirectory(place) => {
                let (directory, name) = self.at(*place);
                fs.make(&ROOT, directory, name, &make(FileKind::Directory)).map(|_| Answer::Done)
            }
            Operation::RemoveDirectory(place) => {
                let (directory, name) = self.at(*place);
                fs.remove_directory(&ROOT, directory, name, None).map(|()| Answer::Done)
            }
            Operation::Unlink(place) => {
                let (directory, name) = self.at(*place);
                fs.unlink(&ROOT, directory, name).map(|()| Answer::Done)
            }
            Operation::Rename(from, to, how) => {
                let flags = RenameFlags {
                    no_replace: *how == Move::NoReplace,
                    exchange: *how == Move::Exchange,
                    ..RenameFlags::default()
                };
                fs.rename(&ROOT, self.at(*from), self.at(*to), flags).map(|()| Answer::Done)
            }
            Operation::Link(from, to) => loop {
                let ((old, name), (directory, new)) = (self.at(*from), self.at(*to));
                let found = fs.lookup(&ROOT, old, name)?;
                match fs.link(&ROOT, found.id, directory, new) {
                    Err(Errno::ESTALE) => {}
                    linked => return linked.map(|_| Answer::Done),
                }
            },
            Operation::Stat(place) => {
                let (directory, name) = self.at(*place);
                let found = fs.lookup(&ROOT, directory, name)?;
                Ok(attributes(found.id, &found.inode))
            }
            Operation::StatOpen(file) => {
                let found = fs.attributes(InodeId(*file))?;
                Ok(attributes(found.id, &found.inode))
            }
            Operation::List(directory) => {
                let mut names = 0;
                fs.list(self.directories[*directory], 0, &mut |listed| {
                    let number = NAMES.iter().position(|name| name.as_bytes() == listed.name).expect("a name of ours");
                    names |= 1 << number;
                    true
                })?;
                Ok(Answer::Names(names))
            }
            Operation::Write(file, offset, text) => self.write(*file, WriteAt::Offset(*offset as u64), text),
            Operation::Append(file, text) => self.write(*file, WriteAt::End, text),
            Operation::Read(file, offset, count) => {
                let (mut bytes, mut room) = (vec![0; *count], vec![0; *count]);
                let way = self.ways.entry(*file).or_insert_with(|| fs.open_inode(InodeId(*file)));
                let count = match fs.read_open(way, *offset as u64, *count, |length| room.get_mut(..length)) {
                    Some(count) => {
                        bytes.copy_from_slice(&room);
                        count
                    }
                    None => fs.read(InodeId(*file), *offset as u64, &mut bytes)?,
                };
                Ok(Answer::Text(text_of(&bytes[..count])))
            }
            Operation::Truncate(file, size) => {
                let change = ashlar_libfs::Change { size: Some(*size as u64), ..Default::default() };
                fs.set_attributes(&ROOT, InodeId(*file), &change).map(|_| Answer::Done)
            }
        }
    }
}

fn attributes(id: InodeId, inode: &ashlar_types::Inode) -> Answer {
    if inode.is_directory() { Answer::Directory } else { Answer::Attributes(id.0, inode.size as usize, inode.links) }
}

fn picture(fs: &LibFs, directory: InodeId, above: &str, picture: &mut Picture) {
    let mut entries = Vec::new();
    let list = fs.list(directory, 0, &mut |listed| {
        entries.push((String::from_utf8(listed.name).expect("a name of ours"), listed.id, listed.kind));
        true
    });
    list.expect("listed");
    for (name, id, kind) in entries {
        let path = format!("{above}{name}");
        if kind == FileKind::Directory {
            self::picture(fs, id, &format!("{path}/"), picture);
            picture.insert(path, Seen::Directory);
        } else {
            let mut bytes = vec![0; 4096];
            let count = fs.read(id, 0, &mut bytes).expect("read");
            let links = fs.attributes(id).expect("attributes").inode.links;
            picture.insert(path, Seen::File(id.0, links, text_of(&bytes[..count])));
        }
    }
}

#[test]
fn operations_of_two_sessions_are_linearizable() {
    linearizable(150, false);
}

#[test]
fn operations_of_two_sessions_are_linearizable_while_the_daemon_is_killed() {
    linearizable(60, true);
}

/// Rounds of random operations, held against the model. With `kills`, the daemon dies somewhere in each round.
fn linearizable(rounds: u64, kills: bool) {
    const OPERATIONS: usize = 14;
    let mut site = Site::new(64 << 20);
    let sessions = [connect(&site), connect(&site)];
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, rounds) = (number("ASHLAR_SEED").unwrap_or(1), number("ASHLAR_ROUNDS").unwrap_or(rounds));
    for seed in first..first + rounds {
        let root = sessions[0].make(&ROOT, InodeId::ROOT, format!("r{seed}").as_bytes(), &make(FileKind::Directory));
        let mut directories = vec![root.expect("made").id];
        for (above, name) in DIRECTORIES {
            let above = directories[above];
            let made =
                sessions[0].make(&ROOT, above, NAMES[name].as_bytes(), &make(FileKind::Directory)).expect("made");
            directories.push(made.id);
        }
        for session in &sessions {
            // Who has not looked a directory up can't know of it.
            session.lookup(&ROOT, InodeId::ROOT, format!("r{seed}").as_bytes()).expect("found");
            for (above, name) in DIRECTORIES {
                session.lookup(&ROOT, directories[above], NAMES[name].as_bytes()).expect("found");
            }
            directories.iter().for_each(|id| drop(session.open(*id).expect("open")));
        }
        let (begin, ready) = (Instant::now(), AtomicU64::new(0));
        let histories: Vec<History> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4u64)
                .map(|number| {
                    let (fs, directories) = (Arc::clone(&sessions[number as usize % 2]), directories.clone());
                    let mut worker = Worker {
                        fs,
                        directories,
                        open: Vec::new(),
                        ways: HashMap::new(),
                        random: Random::new(seed * 4 + number),
                    };
                    let ready = &ready;
                    scope.spawn(move || {
                        ready.fetch_add(1, Ordering::SeqCst);
                        while ready.load(Ordering::SeqCst) < 4 {
                            std::hint::spin_loop();
                        }
                        let now = || begin.elapsed().as_nanos() as u64;
                        let history = (0..OPERATIONS).map(|_| {
                            let operation = worker.draw();
                            let called = now();
                            let answer = worker.make(&operation);
                            Event { called, returned: now(), operation, answer }
                        });
                        let history: History = history.collect();
                        worker.open.iter().for_each(|file| worker.fs.close(*file));
                        history
                    })
                })
                .collect();
            if kills {
                std::thread::sleep(Duration::from_micros(Random::new(seed).below(2000)));
                site.kill();
                site.start();
            }
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        for session in &sessions {
            let mut end = Picture::new();
            picture(session, directories[0], "", &mut end);
            if let Err(told) = check(&histories, &end) {
                panic!("seed {seed}: {told}");
            }
            directories.iter().for_each(|id| session.close(*id));
        }
    }
    sessions.iter().for_each(|session| session.end());
    site.check();
}
