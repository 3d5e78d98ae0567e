//! Records of an ordinary user, sent past LibFS's checks: what they may not gain.

mod common;

use std::time::{SystemTime, UNIX_EPOCH};

use ashlar_types::{DEPTH_MAX, Errno, FILE_SIZE_MAX, FileKind, Inode, InodeId, Timestamp};
use ashlar_update::{Allocation, Create, SetAttributes, Update, XATTR_CAPABILITY};
use ashlar_wire::Request;
use common::{Client, NOW, Site, as_user, create};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const USER: u32 = 65534;
const STRANGE_GROUP: u32 = 4242;
/// How far a time that SharedFS has limited may be ahead of this process's clock, in seconds.
const CLOCK_SLACK_SECONDS: i64 = 5;

/// A site with a directory that all users may write, and a session of the super-user.
struct Stage {
    site: Site,
    root: Client,
    open: InodeId,
}

impl Stage {
    /// Returns `None` if the test can't become another user.
    fn set() -> Option<Self> {
        if !common::may_change_users() {
            return None;
        }
        let site = Site::new(64 << 20);
        let mut root = Client::open(&site.socket());
        root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        let open = root.make(InodeId::ROOT, b"open", FileKind::Directory);
        root.append(&Update::SetAttributes(SetAttributes { mode: Some(0o777), ..set(open) }));
        root.digest().expect("digested");
        Some(Self { site, root, open })
    }

    /// Makes an inode with content, as the super-user.
    fn make(&mut self, name: &str, kind: FileKind, mode: u32, (uid, gid): (u32, u32)) -> InodeId {
        self.root.acquire(&[(self.open, true)]).expect("granted");
        let inode = self.root.inode();
        self.root.append(&Update::Create(Create { mode, uid, gid, ..create(inode, self.open, name.as_bytes(), kind) }));
        if kind == FileKind::Regular {
            self.root.append(&Update::Write { inode, offset: 0, at: NOW, strip: false, data: &[7; 9000] });
        }
        self.root.digest().expect("digested");
        inode
    }

    /// Opens a session of the ordinary user, by a thread that has become the user.
    fn user(&self) -> Client {
        as_user(USER, || Client::open(&self.site.socket()))
    }

    fn inode(&mut self, inode: InodeId) -> Inode {
        self.root.acquire(&[(inode, false)]).expect("granted")[0].state.attributes.clone()
    }

    /// Logs updates in a session of the user that holds leases on these inodes.
    ///
    /// Returns the error of the grant or the digest.
    fn try_update(&mut self, leased: &[InodeId], updates: &[Update<'_>]) -> Result<(), Errno> {
        let mut user = self.user();
        let wants: Vec<_> = leased.iter().map(|inode| (*inode, true)).collect();
        user.acquire(&wants)?;
        updates.iter().for_each(|update| {
            user.append(update);
        });
        let digested = user.digest().map(drop);
        if digested.is_err() {
            user.wait_fenced();
        } else {
            assert!(user.call(&Request::Goodbye).is_ok());
        }
        digested
    }

    fn refuse(&mut self, story: &str, leased: &[InodeId], update: &Update<'_>) {
        let before = self.inode(leased[0]);
        assert_eq!(self.try_update(leased, std::slice::from_ref(update)), Err(Errno::EIO), "{story}");
        assert_eq!(self.inode(leased[0]), before, "{story}");
    }

    fn accept(&mut self, story: &str, leased: &[InodeId], updates: &[Update<'_>]) {
        assert_eq!(self.try_update(leased, updates), Ok(()), "{story}");
    }
}

fn set(inode: InodeId) -> SetAttributes {
    SetAttributes { inode, mode: None, uid: None, gid: None, accessed: None, modified: None, at: NOW }
}

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    Timestamp { seconds: since.as_secs() as i64, nanoseconds: 0 }
}

fn later(seconds: i64) -> Timestamp {
    Timestamp { seconds: now().seconds.saturating_add(seconds), nanoseconds: 0 }
}

#[test]
fn file_of_another_user_gets_no_link() {
    let Some(mut stage) = Stage::set() else { return };
    let directory = stage.open;
    for (name, kind, mode, is_linked) in [
        ("secret", FileKind::Regular, 0o600, false),
        ("readable", FileKind::Regular, 0o644, false),
        ("writable", FileKind::Regular, 0o622, false),
        ("set-user-id", FileKind::Regular, 0o4777, false),
        ("set-group-id", FileKind::Regular, 0o2777, false),
        ("fifo", FileKind::Fifo, 0o666, false),
        ("shared", FileKind::Regular, 0o666, true),
        ("locking", FileKind::Regular, 0o2767, true),
    ] {
        let inode = stage.make(name, kind, mode, (0, 0));
        let link = Update::Link { inode, parent: directory, name: &[name.as_bytes(), b" linked"].concat(), at: NOW };
        if is_linked {
            stage.accept(name, &[inode, directory], &[link]);
        } else {
            stage.refuse(name, &[inode, directory], &link);
        }
    }
    let own = stage.make("own", FileKind::Regular, 0o4700, (USER, USER));
    let link = Update::Link { inode: own, parent: directory, name: b"own linked", at: NOW };
    stage.accept("own", &[own, directory], &[link]);
    stage.site.check();
}

#[test]
fn removed_file_gets_no_link_though_open() {
    let Some(mut stage) = Stage::set() else { return };
    let directory = stage.open;
    for (name, owner) in [("of root", 0), ("own", USER)] {
        let inode = stage.make(name, FileKind::Regular, 0o666, (owner, owner));
        let mut user = stage.user();
        user.acquire(&[(inode, false)]).expect("granted");
        assert!(user.control.open_handle(inode));
        stage.root.acquire(&[(directory, true), (inode, true)]).expect("granted");
        let name = name.as_bytes();
        stage.root.append(&Update::Unlink { inode, parent: directory, name, release: false, at: NOW });
        stage.root.digest().expect("digested");
        let link = Update::Link { inode, parent: directory, name: b"again", at: NOW };
        let before = stage.inode(inode);
        user.acquire(&[(inode, true), (directory, true)]).expect("it has the file open");
        user.append(&link);
        assert_eq!(user.digest().err(), Some(Errno::EIO));
        user.wait_fenced();
        assert_eq!(stage.try_update(&[inode, directory], &[link]), Err(Errno::EACCES), "not open in this session");
        assert_eq!(stage.inode(inode), before);
    }
    stage.site.check();
}

#[test]
fn file_without_a_name_is_linked_by_its_owner_once() {
    let Some(mut stage) = Stage::set() else { return };
    let directory = stage.open;
    stage.root.acquire(&[(directory, true)]).expect("granted");
    let theirs = stage.root.inode();
    assert!(stage.root.control.open_handle(theirs));
    stage.root.append(&Update::Create(Create { mode: 0o666, ..create(theirs, directory, b"", FileKind::Regular) }));
    stage.root.digest().expect("digested");
    let link = |inode| Update::Link { inode, parent: directory, name: b"named", at: NOW };
    assert_eq!(stage.try_update(&[theirs, directory], &[link(theirs)]), Err(Errno::EACCES), "it has no way there");
    stage.refuse("another user's", &[directory], &link(theirs));
    let mut user = stage.user();
    user.acquire(&[(directory, true)]).expect("granted");
    let own = user.inode();
    assert!(user.control.open_handle(own));
    let made = Create { uid: USER, gid: USER, ..create(own, directory, b"", FileKind::Regular) };
    user.append(&Update::Create(made));
    user.append(&link(own));
    user.digest().expect("its maker names it");
    assert_eq!(stage.inode(own).links, 1);
    user.acquire(&[(directory, true), (own, true)]).expect("granted");
    user.append(&Update::Unlink { inode: own, parent: directory, name: b"named", release: false, at: NOW });
    user.append(&link(own));
    assert_eq!(user.digest().err(), Some(Errno::EIO), "once only");
    stage.site.check();
}

#[test]
fn new_content_keeps_no_rights_of_a_strange_group() {
    let Some(mut stage) = Stage::set() else { return };
    let inode = stage.make("program", FileKind::Regular, 0o2775, (USER, STRANGE_GROUP));
    let write = |strip| Update::Write { inode, offset: 0, at: NOW, strip, data: b"#!/bin/sh" };
    let resize = |strip| Update::Resize { inode, size: 0, at: NOW, strip };
    let how = Allocation::Punch;
    let punch = |strip| Update::Allocate { inode, how, offset: 0, length: 4096, at: NOW, strip };
    stage.refuse("write", &[inode], &write(false));
    stage.refuse("resize", &[inode], &resize(false));
    stage.refuse("punch", &[inode], &punch(false));
    stage.accept("write", &[inode], &[write(true)]);
    assert_eq!(stage.inode(inode).mode, 0o775);
    stage.accept("no rights are left", &[inode], &[write(false), punch(false), resize(false)]);
    stage.site.check();
}

#[test]
fn new_content_keeps_no_capabilities() {
    let Some(mut stage) = Stage::set() else { return };
    let inode = stage.make("program", FileKind::Regular, 0o755, (USER, USER));
    stage.root.acquire(&[(inode, true)]).expect("granted");
    let capable = Update::SetXattr { inode, name: XATTR_CAPABILITY, value: b"capable", mode: None, at: NOW };
    stage.root.append(&capable);
    stage.root.digest().expect("digested");
    let write = Update::Write { inode, offset: 0, at: NOW, strip: true, data: b"#!/bin/sh" };
    let resize = Update::Resize { inode, size: 0, at: NOW, strip: true };
    let reserve = Update::Allocate { inode, how: Allocation::Zero, offset: 0, length: 4096, at: NOW, strip: true };
    for update in [&write, &resize, &reserve] {
        stage.refuse("capable", &[inode], update);
    }
    let removed = Update::RemoveXattr { inode, name: XATTR_CAPABILITY, mode: None, at: NOW };
    stage.accept("without capabilities", &[inode], &[removed, write]);
    stage.site.check();
}

#[test]
fn time_of_access_moves_by_readers_and_up_to_now() {
    let Some(mut stage) = Stage::set() else { return };
    let secret = stage.make("secret", FileKind::Regular, 0o600, (0, 0));
    let readable = stage.make("readable", FileKind::Regular, 0o644, (0, 0));
    let accessed = |inode, at| Update::Accessed { inode, at };
    let before = stage.inode(secret);
    stage.accept("of a file that the user can't read", &[], &[accessed(secret, now())]);
    assert_eq!(stage.inode(secret), before);
    let at = now();
    stage.accept("of a readable file", &[], &[accessed(readable, at)]);
    assert_eq!(stage.inode(readable).accessed, at);
    stage.accept("in the far future", &[], &[accessed(readable, Timestamp { seconds: i64::MAX - 5, nanoseconds: 7 })]);
    assert!(stage.inode(readable).accessed < later(CLOCK_SLACK_SECONDS));
    stage.site.check();
}

/// A reader keeps its right: its record may follow after the file was closed to it.
#[test]
fn reader_of_a_file_closed_since_is_not_fenced() {
    let Some(mut stage) = Stage::set() else { return };
    let file = stage.make("file", FileKind::Regular, 0o644, (0, 0));
    let mut user = stage.user();
    user.acquire(&[(file, false)]).expect("granted");
    user.append_unpaid(&Update::Accessed { inode: file, at: now() }).expect("appended");
    stage.root.acquire(&[(file, true)]).expect("granted");
    stage.root.append(&Update::SetAttributes(SetAttributes { mode: Some(0o600), ..set(file) }));
    stage.root.digest().expect("digested");
    user.digest().expect("honest");
    let mut holder = stage.user();
    let open = stage.make("open", FileKind::Regular, 0o644, (0, 0));
    holder.acquire(&[(open, false)]).expect("granted");
    assert!(holder.control.open_handle(open));
    stage.root.acquire(&[(open, true)]).expect("granted");
    stage.root.append(&Update::SetAttributes(SetAttributes { mode: Some(0o600), ..set(open) }));
    stage.root.digest().expect("digested");
    let at = now();
    holder.append_unpaid(&Update::Accessed { inode: open, at }).expect("appended");
    holder.digest().expect("honest");
    assert_eq!(stage.inode(open).accessed, at, "it has the file open with this right");
}

#[test]
fn no_record_sets_a_time_of_the_future_unasked() {
    let Some(mut stage) = Stage::set() else { return };
    let inode = stage.make("own", FileKind::Regular, 0o644, (USER, USER));
    let future = Timestamp { seconds: i64::MAX, nanoseconds: 999_999_999 };
    stage.accept("write", &[inode], &[Update::Write { inode, offset: 0, at: future, strip: true, data: b"new" }]);
    let found = stage.inode(inode);
    assert!(found.modified < later(CLOCK_SLACK_SECONDS) && found.changed == found.modified);
    // An owner may set these two to anything.
    let times = SetAttributes { accessed: Some(future), modified: Some(later(1000)), at: later(2000), ..set(inode) };
    stage.accept("utimensat", &[inode], &[Update::SetAttributes(times)]);
    let found = stage.inode(inode);
    assert_eq!((found.accessed, Some(found.modified)), (future, times.modified));
    assert!(found.changed < later(CLOCK_SLACK_SECONDS));
    // Another user that may write the file sets both to the present.
    let shared = stage.make("shared", FileKind::Regular, 0o666, (0, 0));
    let touched = SetAttributes { accessed: Some(future), modified: Some(future), at: future, ..set(shared) };
    stage.accept("touch", &[shared], &[Update::SetAttributes(touched)]);
    let found = stage.inode(shared);
    assert!(found.accessed < later(CLOCK_SLACK_SECONDS) && found.modified < later(CLOCK_SLACK_SECONDS));
    stage.site.check();
}

#[test]
fn another_users_attributes_stay_as_they_are() {
    let Some(mut stage) = Stage::set() else { return };
    let inode = stage.make("shared", FileKind::Regular, 0o666, (0, 0));
    let change = |set| Update::SetAttributes(set);
    stage.refuse("one time alone", &[inode], &change(SetAttributes { modified: Some(NOW), ..set(inode) }));
    stage.refuse("the same owner", &[inode], &change(SetAttributes { uid: Some(0), ..set(inode) }));
    stage.refuse("the same group", &[inode], &change(SetAttributes { gid: Some(0), ..set(inode) }));
    stage.accept("nothing", &[inode], &[change(set(inode))]);
    let sticky = stage.make("sticky", FileKind::Directory, 0o1777, (0, 0));
    let mark = |inode| Update::SetXattr { inode, name: b"user.mark", value: b"x", mode: None, at: NOW };
    stage.refuse("an attribute of a sticky directory", &[sticky], &mark(sticky));
    stage.accept("an attribute of a shared file", &[inode], &[mark(inode)]);
    let nameless = Update::SetXattr { inode, name: b"user.", value: b"x", mode: None, at: NOW };
    stage.refuse("a namespace alone", &[inode], &nameless);
    stage.site.check();
}

#[test]
fn attributes_of_an_inode_are_limited() {
    let Some(mut stage) = Stage::set() else { return };
    let inode = stage.make("own", FileKind::Regular, 0o644, (USER, USER));
    let value = vec![b'x'; 60_000];
    let fill =
        |name: &'static [u8], bytes| Update::SetXattr { inode, name, value: &value[..bytes], mode: None, at: NOW };
    stage.accept("one", &[inode], &[fill(b"user.a", 60_000), fill(b"user.b", 5000)]);
    stage.refuse("another", &[inode], &fill(b"user.c", 10_000));
    let removed = Update::RemoveXattr { inode, name: b"user.a", mode: None, at: NOW };
    stage.accept("another in its place", &[inode], &[removed, fill(b"user.c", 60_000)]);
    stage.refuse("the other, larger", &[inode], &fill(b"user.b", 20_000));
    stage.site.check();
}

#[test]
fn directory_far_too_deep_is_refused() {
    let Some(mut stage) = Stage::set() else { return };
    let mut user = stage.user();
    user.acquire(&[(stage.open, true)]).expect("granted");
    let mut directory = stage.open;
    let mut deepen = |user: &mut Client, levels| {
        for _ in 0..levels {
            let inode = user.inode();
            let made = Create { uid: USER, gid: USER, ..create(inode, directory, b"d", FileKind::Directory) };
            user.append(&Update::Create(made));
            directory = inode;
        }
    };
    deepen(&mut user, DEPTH_MAX);
    user.digest().expect("an honest session may be mistaken by so much");
    deepen(&mut user, DEPTH_MAX);
    assert_eq!(user.digest().err(), Some(Errno::EIO));
    user.wait_fenced();
    stage.site.check();
}

/// Blocks may be reserved behind a file's end.
#[test]
fn insertion_moves_no_blocks_beyond_all_offsets() {
    let Some(mut stage) = Stage::set() else { return };
    let inode = stage.make("own", FileKind::Regular, 0o644, (USER, USER));
    let allocate = |how, offset, length| Update::Allocate { inode, how, offset, length, strip: true, at: NOW };
    let last = FILE_SIZE_MAX - 3 * 4096 + 1;
    stage.accept("reserved", &[inode], &[allocate(Allocation::ReserveKeepSize, last, 4096)]);
    stage.accept("the last offset", &[inode], &[allocate(Allocation::Insert, 0, 4096)]);
    stage.refuse("beyond", &[inode], &allocate(Allocation::Insert, 0, 1 << 40));
    stage.site.check();
}

/// A right to open the file, kept over its narrowing, is one to its content and not to its name.
#[test]
fn kept_right_to_write_gives_no_link() {
    let Some(mut stage) = Stage::set() else { return };
    let (inode, directory) = (stage.make("file", FileKind::Regular, 0o666, (0, 0)), stage.open);
    let mut user = stage.user();
    user.acquire(&[(inode, false)]).expect("granted");
    assert!(user.control.open_handle(inode));
    stage.root.acquire(&[(inode, true)]).expect("granted");
    stage.root.append(&Update::SetAttributes(SetAttributes { mode: Some(0o600), ..set(inode) }));
    stage.root.digest().expect("digested");
    user.acquire(&[(inode, true), (directory, true)]).expect("granted");
    user.append(&Update::Write { inode, offset: 0, at: NOW, strip: true, data: b"kept" });
    user.digest().expect("it keeps the right to write");
    user.append(&Update::Link { inode, parent: directory, name: b"linked", at: NOW });
    assert_eq!(user.digest().err(), Some(Errno::EIO));
    stage.site.check();
}
