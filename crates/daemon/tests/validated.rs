//! SharedFS accepts every record that LibFS logs for an ordinary user.
//!
//! The checks of both agree.

mod common;

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ashlar_libfs::{Allocation, AttributeChange, LibFs, NewInode, RenameFlags, SetTime, WriteAt, XattrFlags};
use ashlar_tests::random::Random;
use ashlar_types::{Access, Credentials, Errno, FileKind, InodeId, Timestamp};
use ashlar_update::{Create, Rename, SetAttributes, Update, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_CAPABILITY};
use ashlar_wire::Request;
use common::libfs::{ROOT, connect, make};
use common::{Client, Site, as_user, create};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const USER: u32 = 2000;
/// Users and groups of files; the user is a member of its own group alone.
const IDS: [u32; 3] = [0, USER, 4242];
const NAMES: [&[u8]; 6] = [b"a", b"b", b"c", b"d", b"e", b"f"];
const STEPS: u64 = 6000;
/// Cases of the property that both sides refuse the same.
const CASES: u32 = 1000;
/// Times that a directory is opened and closed to the user, which acts in it meanwhile.
const ROUNDS: u32 = 400;
const ROUNDS_MAX: u32 = 100 * ROUNDS;
/// Steps after which SharedFS validates the logged records.
const VALIDATED_AFTER: u64 = 5;

/// Opens a session of the ordinary user on the bare protocol.
fn open_as_user(site: &Site) -> Client {
    as_user(USER, || Client::open(&site.socket()))
}

/// Opens a session of the ordinary user, with the user's credentials.
///
/// These are the credentials as LibFS knows them.
fn connect_as_user(site: &Site) -> (Arc<LibFs>, Credentials) {
    let fs = as_user(USER, || connect(site));
    (fs, Credentials { uid: USER, gid: USER, groups: Vec::new(), checked: false })
}

/// Makes a list for the user and its group, with a mask.
fn list(random: &mut Random) -> Vec<u8> {
    let mut any = || random.below(8) as u16;
    let entries: [(u16, u16, u32); 6] = [
        (1, any(), u32::MAX),
        (2, any(), USER),
        (4, any(), u32::MAX),
        (8, any(), USER),
        (0x10, any(), u32::MAX),
        (0x20, any(), u32::MAX),
    ];
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes().iter().chain(&permissions.to_le_bytes()).chain(&id.to_le_bytes()));
    }
    value
}

fn one_of<T: Copy>(random: &mut Random, all: &[T]) -> T {
    *random.pick(all).expect("there are some")
}

fn maybe<T>(random: &mut Random, value: T) -> Option<T> {
    (random.below(3) == 0).then_some(value)
}

/// Draws permission bits, set-id and sticky ones too.
///
/// They allow much more often than not.
fn mode(random: &mut Random) -> u32 {
    let special = if random.below(3) == 0 { random.below(8) as u32 } else { 0 };
    let plain = if random.below(2) == 0 { 0o777 } else { random.below(0o1000) as u32 };
    special << 9 | plain
}

fn time(random: &mut Random) -> SetTime {
    match random.below(2) {
        0 => SetTime::Now,
        _ => SetTime::At(Timestamp { seconds: random.below(1 << 30) as i64, nanoseconds: 7 }),
    }
}

/// Sessions of the super-user and of the user, and the files.
struct World {
    random: Random,
    root: Arc<LibFs>,
    user: Arc<LibFs>,
    credentials: Credentials,
    directories: Vec<InodeId>,
    /// The files that the user has open for writing.
    open: Vec<InodeId>,
}

impl World {
    fn directory(&mut self) -> InodeId {
        one_of(&mut self.random, &self.directories)
    }

    /// Picks an inode that exists, most often.
    fn any(&mut self) -> Option<InodeId> {
        let (directory, name) = (self.directory(), one_of(&mut self.random, &NAMES));
        match self.random.below(5) {
            0 => Some(directory),
            _ => self.root.lookup(&ROOT, directory, name).ok().map(|found| found.id),
        }
    }

    fn change(&mut self) -> AttributeChange {
        let random = &mut self.random;
        let (mode, uid, gid) = (mode(random), one_of(random, &IDS), one_of(random, &IDS));
        // It may also name nothing.
        AttributeChange {
            mode: maybe(random, mode),
            uid: maybe(random, uid),
            gid: maybe(random, gid),
            size: None,
            accessed: maybe(random, ()).map(|()| time(random)),
            modified: maybe(random, ()).map(|()| time(random)),
            strip: random.below(2) == 0,
        }
    }

    fn make(&mut self) -> NewInode<'static> {
        let kind =
            one_of(&mut self.random, &[FileKind::Regular, FileKind::Directory, FileKind::Symlink, FileKind::Fifo]);
        let target: &[u8] = if kind == FileKind::Symlink { b"there" } else { b"" };
        NewInode { kind, mode: mode(&mut self.random), umask: self.random.below(0o100) as u32, device: 0, target }
    }

    fn record_made(&mut self, made: Result<ashlar_libfs::FoundInode, Errno>) -> Result<(), Errno> {
        let made = made?;
        if made.inode.is_directory() && self.directories.len() < 8 {
            self.directories.push(made.id);
        }
        Ok(())
    }

    /// Lets the super-user change the user's rights.
    fn change_rights(&mut self) -> Result<(), Errno> {
        let Some(id) = self.any() else {
            let (directory, name, make) = (self.directory(), one_of(&mut self.random, &NAMES), self.make());
            let made = self.root.make(&ROOT, directory, name, &make);
            return self.record_made(made);
        };
        let root = Arc::clone(&self.root);
        match self.random.below(6) {
            0..=2 => {
                let change = self.change();
                root.set_attributes(&ROOT, id, &change).map(drop)
            }
            3 => {
                let name = one_of(&mut self.random, &[XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT]);
                root.set_xattr(&ROOT, id, name, &list(&mut self.random), XattrFlags::default(), false)
            }
            4 => root.remove_xattr(&ROOT, id, one_of(&mut self.random, &[XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT])),
            _ => root.set_xattr(&ROOT, id, XATTR_CAPABILITY, b"capable", XattrFlags::default(), false),
        }
    }

    /// Makes a random call of the user, which may be refused.
    fn try_as_user(&mut self) -> (String, Result<(), Errno>) {
        let (user, credentials) = (Arc::clone(&self.user), self.credentials.clone());
        let admitted = Credentials { checked: true, ..credentials.clone() };
        let (directory, name) = (self.directory(), one_of(&mut self.random, &NAMES));
        let (other, new_name) = (self.directory(), one_of(&mut self.random, &NAMES));
        let id = self.any().unwrap_or(directory);
        let which = self.random.below(14);
        let done = match which {
            0..=2 => {
                let change = self.change();
                let done = user.set_attributes(&credentials, id, &change).map(drop);
                return (format!("{id} {change:?}"), done);
            }
            3 => user
                .set_attributes(
                    &credentials,
                    id,
                    &AttributeChange { size: Some(5), strip: true, ..AttributeChange::default() },
                )
                .map(drop),
            4 => {
                let name =
                    one_of(&mut self.random, &[XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, b"user.x", XATTR_CAPABILITY]);
                user.set_xattr(&credentials, id, name, &list(&mut self.random), XattrFlags::default(), false)
            }
            5 => user.remove_xattr(
                &credentials,
                id,
                one_of(&mut self.random, &[XATTR_ACL_ACCESS, b"user.x", XATTR_CAPABILITY]),
            ),
            6 | 7 => {
                let make = self.make();
                let made = user.make(&credentials, directory, name, &make);
                self.record_made(made)
            }
            8 => user.link(&credentials, id, directory, name).map(drop),
            9 => user.unlink(&credentials, directory, name),
            10 => {
                let flags = self.random.below(4);
                let flags = RenameFlags { exchange: flags == 1, whiteout: flags == 2, ..RenameFlags::default() };
                user.rename(&credentials, (directory, name), (other, new_name), flags)
            }
            11 => user.open_for(&credentials, id, Access::WRITE).and_then(|found| match found.inode.kind {
                FileKind::Regular => {
                    self.open.push(found.id);
                    Ok(())
                }
                _ => {
                    user.close(found.id);
                    Err(Errno::EISDIR)
                }
            }),
            _ if self.open.is_empty() => Ok(()),
            12 => {
                let id = one_of(&mut self.random, &self.open);
                user.write(&admitted, id, WriteAt::End, b"written", true).map(drop)
            }
            _ => {
                let index = self.random.below(self.open.len() as u64) as usize;
                let id = self.open.swap_remove(index);
                let done = user.allocate(&admitted, id, Allocation::Reserve, 0, 10, true);
                user.close(id);
                done
            }
        };
        (format!("{which}: {id}, {directory} {}, {other} {}", name.escape_ascii(), new_name.escape_ascii()), done)
    }
}

/// A user's calls among random attributes are all accepted.
///
/// Access lists, owners, sticky and set-id bits are random, too.
#[test]
fn every_record_libfs_logs_for_a_user_is_accepted() {
    if !common::may_change_users() {
        return;
    }
    for seed in 1..=3 {
        let mut site = Site::new(64 << 20);
        let root = connect(&site);
        let (user, credentials) = connect_as_user(&site);
        let all = AttributeChange { mode: Some(0o1777), ..AttributeChange::default() };
        root.set_attributes(&ROOT, InodeId::ROOT, &all).expect("opened to all");
        let random = Random::new(seed);
        let mut world = World { random, root, user, credentials, directories: vec![InodeId::ROOT], open: Vec::new() };
        let (mut steps, mut done) = (Vec::new(), 0);
        for step in 0..STEPS {
            if world.random.below(3) == 0 {
                let _ = world.change_rights();
                continue;
            }
            let (what, result) = world.try_as_user();
            assert_ne!(result, Err(Errno::EIO), "seed {seed}, step {step}: {what}, after {steps:#?}");
            done += u64::from(result.is_ok());
            steps.push(format!("{what}: {result:?}"));
            if step % VALIDATED_AFTER == 0 {
                assert_eq!(world.user.make_room(), Ok(()), "seed {seed}, step {step}: fenced after {steps:#?}");
                steps.clear();
            }
        }
        assert!(done > STEPS / 10, "only {done} of {STEPS} steps were allowed: little was tried");
        assert_eq!(site.check()["sessions_fenced"], 0);
    }
}

/// Another session may close a directory between check and record.
///
/// The check is of the directory's rights, and the record changes it.
#[test]
fn names_changed_as_their_directory_closes_are_accepted() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let root = connect(&site);
    let (user, credentials) = connect_as_user(&site);
    let directory = root.make(&ROOT, InodeId::ROOT, b"d", &make(FileKind::Directory)).expect("made").id;
    let is_over = AtomicBool::new(false);
    let (refused, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let set = |mode| {
        root.set_attributes(&ROOT, directory, &AttributeChange { mode: Some(mode), ..AttributeChange::default() })
    };
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let results = [
                    user.make(&credentials, directory, b"one", &make(FileKind::Regular)).map(drop),
                    user.rename(&credentials, (directory, b"one"), (directory, b"two"), RenameFlags::default()),
                    user.unlink(&credentials, directory, b"two"),
                    user.unlink(&credentials, directory, b"one"),
                ];
                for result in results {
                    match result {
                        Ok(()) => drop(done.fetch_add(1, Ordering::Relaxed)),
                        // A directory that closes before the lease is asked for is left to the kernel's check.
                        Err(Errno::EACCES | Errno::RESERVED) => drop(refused.fetch_add(1, Ordering::Relaxed)),
                        Err(Errno::ENOENT | Errno::EEXIST) => {}
                        Err(errno) => panic!("{errno:?} after {done:?} changes"),
                    }
                }
            }
        });
        // A busy machine may not let the user act for a while.
        let is_short = || refused.load(Ordering::Relaxed) == 0 || done.load(Ordering::Relaxed) == 0;
        let mut rounds = 0..ROUNDS_MAX;
        while rounds.next().is_some_and(|round| round < ROUNDS || is_short() && !acting.is_finished()) {
            set(0o777).expect("opened");
            std::thread::yield_now();
            set(0o755).expect("closed");
        }
        is_over.store(true, Ordering::Relaxed);
        acting.join().expect("honest");
        assert!(!is_short(), "{refused:?} were refused, {done:?} done");
    });
    user.make_room().expect("honest");
    assert_eq!(site.check()["sessions_fenced"], 0);
}

/// The attributes of one inode of a case.
#[derive(Clone, Debug)]
struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    /// The seed of an access list, if it has one.
    list: Option<u64>,
}

fn attributes() -> impl Strategy<Value = Attributes> {
    let mode = prop_oneof![0..0o10000_u32, Just(0o777), Just(0o755), Just(0o1777), Just(0o666), Just(0o2775)];
    let list = prop::option::weighted(0.2, any::<u64>());
    (mode, select(&IDS[..]), select(&IDS[..]), list).prop_map(|(mode, uid, gid, list)| Attributes {
        mode,
        uid,
        gid,
        list,
    })
}

/// A call that needs rights, and the record by which an honest session makes it.
#[derive(Clone, Copy, Debug)]
enum Call {
    SetMode(u32),
    SetOwner(u32),
    SetGroup(u32),
    Touch,
    TouchModified,
    SetTimes,
    Truncate,
    Write,
    SetXattr(&'static [u8]),
    RemoveXattr(&'static [u8]),
    Link,
    Unlink,
    Make(FileKind),
    MakeUnnamed,
    Rename,
    Move,
}

fn call() -> impl Strategy<Value = Call> {
    const XATTRS: [&[u8]; 6] =
        [b"user.x", b"trusted.x", b"security.x", b"other.x", XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT];
    prop_oneof![
        (0..0o10000_u32).prop_map(Call::SetMode),
        select(&IDS[..]).prop_map(Call::SetOwner),
        select(&IDS[..]).prop_map(Call::SetGroup),
        select(&XATTRS[..]).prop_map(Call::SetXattr),
        select(&XATTRS[..]).prop_map(Call::RemoveXattr),
        select(&[FileKind::Regular, FileKind::Directory, FileKind::Symlink][..]).prop_map(Call::Make),
        select(
            &[
                Call::Touch,
                Call::TouchModified,
                Call::SetTimes,
                Call::Truncate,
                Call::Write,
                Call::Link,
                Call::Unlink,
                Call::MakeUnnamed,
                Call::Rename,
                Call::Move,
            ][..]
        ),
    ]
}

/// Two directories, and an inode in the first one.
struct Subject {
    directory: InodeId,
    other: InodeId,
    inode: InodeId,
    is_directory: bool,
    owns: bool,
}

const LATE: Timestamp = Timestamp { seconds: 1_700_000_000, nanoseconds: 5 };

impl Call {
    /// Makes the call by LibFS.
    fn make(self, fs: &LibFs, user: &Credentials, on: &Subject, list: &[u8]) -> Result<(), Errno> {
        let set = |change| fs.set_attributes(user, on.inode, &change).map(drop);
        let none = AttributeChange::default();
        let value = |name| if [XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT].contains(&name) { list } else { b"value" };
        match self {
            Self::SetMode(mode) => set(AttributeChange { mode: Some(mode), ..none }),
            Self::SetOwner(uid) => set(AttributeChange { uid: Some(uid), strip: true, ..none }),
            Self::SetGroup(gid) => set(AttributeChange { gid: Some(gid), strip: true, ..none }),
            Self::Touch => set(AttributeChange { accessed: Some(SetTime::Now), modified: Some(SetTime::Now), ..none }),
            Self::TouchModified => set(AttributeChange { modified: Some(SetTime::Now), ..none }),
            Self::SetTimes => {
                set(AttributeChange { accessed: Some(SetTime::At(LATE)), modified: Some(SetTime::At(LATE)), ..none })
            }
            Self::Truncate => set(AttributeChange { size: Some(0), strip: true, ..none }),
            Self::Write => {
                fs.open_for(user, on.inode, Access::WRITE)?;
                let admitted = Credentials { checked: true, ..user.clone() };
                let written = fs.write(&admitted, on.inode, WriteAt::Offset(0), b"x", true).map(drop);
                fs.close(on.inode);
                written
            }
            Self::SetXattr(name) => fs.set_xattr(user, on.inode, name, value(name), XattrFlags::default(), false),
            Self::RemoveXattr(name) => fs.remove_xattr(user, on.inode, name),
            Self::Link => fs.link(user, on.inode, on.directory, b"linked").map(drop),
            Self::Unlink if on.is_directory => fs.remove_directory(user, on.directory, b"name", None),
            Self::Unlink => fs.unlink(user, on.directory, b"name"),
            Self::Make(kind) => {
                let target: &[u8] = if kind == FileKind::Symlink { b"there" } else { b"" };
                let make = NewInode { kind, mode: 0o755, umask: 0, device: 0, target };
                fs.make(user, on.directory, b"new", &make).map(drop)
            }
            Self::MakeUnnamed => {
                let made = fs.make_unnamed(user, on.directory, &make(FileKind::Regular))?;
                fs.close(made.id);
                Ok(())
            }
            Self::Rename => {
                fs.rename(user, (on.directory, b"name"), (on.directory, b"renamed"), RenameFlags::default())
            }
            Self::Move => fs.rename(user, (on.directory, b"name"), (on.other, b"moved"), RenameFlags::default()),
        }
    }

    /// Returns whether the refusal of the call forbids the record too.
    fn decides(self, on: &Subject, errno: Errno) -> bool {
        match self {
            // An owner may have had the file open before it took away its own right to write.
            Self::Truncate | Self::Write => errno == Errno::EACCES && !on.owns && !on.is_directory,
            _ => matches!(errno, Errno::EACCES | Errno::EPERM | Errno::EOPNOTSUPP),
        }
    }

    /// Appends the record of the call to a session that has checked nothing.
    ///
    /// It has the leases that it is granted.
    fn append(self, client: &mut Client, on: &Subject, list: &[u8]) {
        let (inode, at) = (on.inode, LATE);
        let (parent, new_parent) = (on.directory, if let Self::Move = self { on.other } else { on.directory });
        let wants = [(inode, true), (parent, true), (on.other, true), (InodeId::RENAME, true)];
        for want in wants {
            match client.acquire(&[want]) {
                Ok(_) | Err(Errno::EACCES) => {}
                Err(errno) => panic!("{errno:?}"),
            }
        }
        let none = SetAttributes { inode, mode: None, uid: None, gid: None, accessed: None, modified: None, at };
        let value = |name| if [XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT].contains(&name) { list } else { b"value" };
        let new = client.inode();
        let made = |name, kind| Update::Create(Create { uid: USER, gid: USER, ..create(new, parent, name, kind) });
        let set = Update::SetAttributes;
        let update = match self {
            Self::SetMode(mode) => set(SetAttributes { mode: Some(mode), ..none }),
            Self::SetOwner(uid) => set(SetAttributes { uid: Some(uid), ..none }),
            Self::SetGroup(gid) => set(SetAttributes { gid: Some(gid), ..none }),
            Self::Touch => set(SetAttributes { accessed: Some(at), modified: Some(at), ..none }),
            Self::TouchModified => set(SetAttributes { modified: Some(at), ..none }),
            Self::SetTimes => {
                let before = Some(Timestamp { seconds: 5, nanoseconds: 5 });
                set(SetAttributes { accessed: before, modified: before, ..none })
            }
            Self::Truncate => Update::Resize { inode, size: 0, strip: true, at },
            Self::Write => Update::Write { inode, offset: 0, at, strip: true, data: b"x" },
            Self::SetXattr(name) => Update::SetXattr { inode, name, value: value(name), mode: None, at },
            Self::RemoveXattr(name) => Update::RemoveXattr { inode, name, mode: None, at },
            Self::Link => Update::Link { inode, parent, name: b"linked", at },
            Self::Unlink if on.is_directory => {
                Update::RemoveDirectory { inode, parent, name: b"name", release: true, at }
            }
            Self::Unlink => Update::Unlink { inode, parent, name: b"name", release: true, at },
            Self::Make(kind) => made(b"new", kind),
            Self::MakeUnnamed => made(b"", FileKind::Regular),
            Self::Rename | Self::Move => Update::Rename(Rename {
                parent,
                name: b"name",
                inode,
                new_parent,
                new_name: if let Self::Move = self { b"moved" } else { b"renamed" },
                target: None,
                exchange: false,
                whiteout: None,
                release: true,
                at,
            }),
        };
        client.append(&update);
    }
}

/// Gives an inode its attributes, as the super-user.
fn give(root: &LibFs, inode: InodeId, given: &Attributes) {
    if let Some(seed) = given.list {
        let list = list(&mut Random::new(seed));
        root.set_xattr(&ROOT, inode, XATTR_ACL_ACCESS, &list, XattrFlags::default(), false).expect("set");
    }
    let owner = AttributeChange { uid: Some(given.uid), gid: Some(given.gid), ..AttributeChange::default() };
    root.set_attributes(&ROOT, inode, &owner).expect("set");
    let mode = AttributeChange { mode: Some(given.mode), ..AttributeChange::default() };
    root.set_attributes(&ROOT, inode, &mode).expect("set");
}

/// SharedFS refuses the record of each call that LibFS refuses, and accepts each one that LibFS makes.
///
/// Owners, modes, sticky and set-id bits, access lists and calls are random.
#[test]
fn sharedfs_refuses_what_libfs_refuses_and_no_more() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let root = connect(&site);
    let (user, credentials) = connect_as_user(&site);
    let raw = RefCell::new(open_as_user(&site));
    let (refused, done) = (Cell::new(0), Cell::new(0_u64));
    let attributes = || [attributes(), attributes(), attributes()];
    let mut runner = TestRunner::new(Config { cases: CASES, failure_persistence: None, ..Config::default() });
    let result =
        runner.run(&(attributes(), any::<bool>(), call(), any::<u64>()), |(given, is_directory, call, seed)| {
            let number = done.get() + refused.get();
            let directory = |name: &str| {
                root.make(&ROOT, InodeId::ROOT, name.as_bytes(), &make(FileKind::Directory)).expect("made").id
            };
            let names = [format!("{number} from"), format!("{number} to")];
            let (from, to) = (directory(&names[0]), directory(&names[1]));
            let kind = if is_directory { FileKind::Directory } else { FileKind::Regular };
            let inode = root.make(&ROOT, from, b"name", &make(kind)).expect("made").id;
            [from, to, inode].into_iter().zip(&given).for_each(|(inode, given)| give(&root, inode, given));
            let on = Subject { directory: from, other: to, inode, is_directory, owns: given[2].uid == USER };
            let list = list(&mut Random::new(seed));
            match call.make(&user, &credentials, &on, &list) {
                Ok(()) => {
                    done.set(done.get() + 1);
                    prop_assert_eq!(user.make_room(), Ok(()), "SharedFS refuses a record that LibFS has logged");
                }
                Err(Errno::EIO) => prop_assert!(false, "the honest session is fenced"),
                Err(errno) if call.decides(&on, errno) => {
                    refused.set(refused.get() + 1);
                    let mut client = raw.borrow_mut();
                    call.append(&mut client, &on, &list);
                    prop_assert_eq!(client.digest().err(), Some(Errno::EIO), "SharedFS accepts what LibFS refuses");
                    client.wait_fenced();
                    client.call(&Request::Goodbye).expect("ended");
                    *client = open_as_user(&site);
                }
                Err(_) => done.set(done.get() + 1),
            }
            Ok(())
        });
    if let Err(error) = result {
        panic!("{error}");
    }
    assert!(refused.get() > u64::from(CASES) / 10 && done.get() > u64::from(CASES) / 10, "{refused:?}, {done:?}");
    assert_eq!(site.check()["sessions_fenced"], refused.get());
}
