//! SharedFS accepts every record that LibFS logs for an ordinary user.
//!
//! The checks of both agree.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ashlar_libfs::{Allocation, AttributeChange, LibFs, NewInode, RenameFlags, SetTime, WriteAt, XattrFlags};
use ashlar_tests::random::Random;
use ashlar_types::{Access, Credentials, Errno, FileKind, InodeId, Timestamp};
use ashlar_update::{XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XATTR_CAPABILITY};
use common::Site;
use common::libfs::{ROOT, connect, make};
use rustix::process::{Gid, Uid};

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
/// Times that a directory is opened and closed to the user, which acts in it meanwhile.
const ROUNDS: u32 = 400;
const ROUNDS_MAX: u32 = 100 * ROUNDS;
/// Steps after which SharedFS validates the logged records.
const VALIDATED_AFTER: u64 = 5;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can become another user");
    }
    is_root
}

/// Opens a session of the ordinary user, with the user's credentials.
///
/// These are the credentials as LibFS knows them.
fn connect_as_user(site: &Site) -> (Arc<LibFs>, Credentials) {
    let open = || {
        let (gid, uid) = (Gid::from_raw(USER), Uid::from_raw(USER));
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("another group");
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("another user");
        connect(site)
    };
    let fs = std::thread::scope(|scope| scope.spawn(open).join().expect("connected"));
    // SharedFS takes the groups of the process.
    let groups = rustix::process::getgroups().expect("groups").into_iter().map(Gid::as_raw).collect();
    (fs, Credentials { uid: USER, gid: USER, groups, checked: false })
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
    if !is_root() {
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
    if !is_root() {
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
                        Err(Errno::EACCES) => drop(refused.fetch_add(1, Ordering::Relaxed)),
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
