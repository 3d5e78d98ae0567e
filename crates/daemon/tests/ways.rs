//! Grants to a user's sessions: nothing that the user could not reach, read or change by paths, and all that it could.

mod common;

use std::sync::Arc;

use ashlar_libfs::{AttributeChange, FinalLink, LibFs, PathPurpose, RenameFlags, SetTime, WriteAt, XattrFlags};
use ashlar_types::{Access, Contents, Credentials, Errno, FileKind, InodeId, Timestamp};
use ashlar_update::{Rename, SetAttributes, Update};
use ashlar_wire::{LeaseRequest, LeaseWord, Need, Reply, Request};
use common::libfs::{SingleUser, connect, make};
use common::{Client, NOW, Site, as_user, create};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const USER: u32 = 65534;
const MIB: u64 = 1 << 20;

fn user_client(site: &Site) -> Client {
    as_user(USER, || Client::open(&site.socket()))
}

fn user_libfs(site: &Site) -> (Arc<LibFs>, SingleUser) {
    (as_user(USER, || connect(site)), SingleUser::of(USER))
}

/// Makes an inode of root's with a mode and, in a file, this content.
fn plant(root: &mut Client, parent: InodeId, name: &[u8], kind: FileKind, mode: u32) -> InodeId {
    root.acquire(&[(parent, true)]).expect("granted");
    let inode = root.inode();
    root.append(&Update::Create(ashlar_update::Create { mode, ..create(inode, parent, name, kind) }));
    if kind == FileKind::Regular {
        root.append(&Update::Write { inode, offset: 0, at: NOW, strip: false, data: b"secret" });
    }
    root.digest().expect("digested");
    inode
}

fn set_mode(root: &mut Client, inode: InodeId, mode: u32) {
    root.acquire(&[(inode, true)]).expect("granted");
    let set = SetAttributes { inode, mode: Some(mode), uid: None, gid: None, accessed: None, modified: None, at: NOW };
    root.append(&Update::SetAttributes(set));
    root.digest().expect("digested");
}

fn content(client: &mut Client, inode: InodeId) -> Vec<u8> {
    match client.acquire(&[(inode, false)]).expect("granted").remove(0).state.contents {
        Some(Contents::Inline(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

/// A directory that root alone may search, with a file that all may read and write.
struct Private {
    site: Site,
    root: Client,
    directory: InodeId,
    file: InodeId,
}

impl Private {
    fn new() -> Self {
        let site = Site::new(64 * MIB);
        let mut root = Client::open(&site.socket());
        let directory = plant(&mut root, InodeId::ROOT, b"private", FileKind::Directory, 0o700);
        let file = plant(&mut root, directory, b"file", FileKind::Regular, 0o666);
        Self { site, root, directory, file }
    }
}

const ALL: Need = Need { contents: true, entries: true, children: true, xattrs: true };

#[test]
fn inode_below_private_directory_is_not_granted() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    let mut user = user_client(&story.site);
    let lookup = |directory, name: &[u8]| {
        let within = Some(LeaseRequest::on_inode(directory, false, ALL));
        Request::Lookup { directory, name: name.to_vec(), within, makes: true, write: true, need: ALL }
    };
    let Ok(Reply::Entry { entry: Some(_), grants, .. }) = user.call(&lookup(InodeId::ROOT, b"private")) else {
        panic!("the directory itself is shown")
    };
    let shown = &grants[0].state;
    assert!(shown.attributes.mode & 0o7777 == 0o700 && shown.entries.is_none() && shown.hides_entries);
    assert!(!LeaseWord(grants[0].word).may_write());
    assert_eq!(user.call(&lookup(story.directory, b"file")).err(), Some(Errno::EACCES));
    let page = Request::ReadDirectory { directory: story.directory, after: 0, limit: 10 };
    assert_eq!(user.call(&page).err(), Some(Errno::EACCES));
    for write in [false, true] {
        assert_eq!(user.acquire(&[(story.file, write)]).err(), Some(Errno::EACCES));
    }
    assert!(user.control.open_handle(story.file));
    assert_eq!(user.acquire(&[(story.file, false)]).err(), Some(Errno::EACCES), "a handle that is claimed");
    let map = Request::Map { inode: story.file, first: 0, blocks: 1, follows: false, number: 1 };
    assert_eq!(user.call(&map).err(), Some(Errno::EACCES));
    assert_eq!(user.call(&Request::Show { inode: story.file }).err(), Some(Errno::EACCES));
    // Inodes beside a file that is read, and directories that follow, go along to readers only.
    let open = plant(&mut story.root, InodeId::ROOT, b"open", FileKind::Directory, 0o755);
    plant(&mut story.root, open, b"one", FileKind::Regular, 0o644);
    let found = user.acquire(&[(InodeId::ROOT, false), (open, false)]).expect("granted");
    assert!(found.iter().all(|grant| grant.inode != story.file), "{found:?}");
    story.site.check();
}

#[test]
fn record_below_private_directory_fences_its_session() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    let all = plant(&mut story.root, InodeId::ROOT, b"all", FileKind::Directory, 0o777);
    set_mode(&mut story.root, InodeId::ROOT, 0o777);
    story.root.call(&Request::Goodbye).expect("ended");
    let mut user = user_client(&story.site);
    // The session is alone, so its lease covers the whole tree.
    user.acquire(&[(all, true), (InodeId::ROOT, true)]).expect("granted");
    user.append(&Update::Write { inode: story.file, offset: 0, at: NOW, strip: true, data: b"forged" });
    assert_eq!(user.digest().err(), Some(Errno::EIO));
    user.wait_fenced();
    let mut root = Client::open(&story.site.socket());
    assert_eq!(content(&mut root, story.file), b"secret");
    story.site.check();
}

/// A time of access needs no lease, which SharedFS would have refused.
#[test]
fn time_of_access_below_private_directory_stays() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    let accessed = |root: &mut Client, inode| {
        root.acquire(&[(inode, false)]).expect("granted").remove(0).state.attributes.accessed
    };
    let open = plant(&mut story.root, InodeId::ROOT, b"open", FileKind::Regular, 0o666);
    let before = accessed(&mut story.root, story.file);
    let mut user = user_client(&story.site);
    let at = Timestamp { seconds: NOW.seconds + 1, ..NOW };
    for inode in [story.file, open] {
        user.append_unpaid(&Update::Accessed { inode, at }).expect("appended");
    }
    user.digest().expect("a reader may have come there before the directory was narrowed");
    assert_eq!(accessed(&mut story.root, story.file), before);
    assert_eq!(accessed(&mut story.root, open), at);
    story.site.check();
}

#[test]
fn content_is_shown_to_readers_only() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let file = plant(&mut root, InodeId::ROOT, b"file", FileKind::Regular, 0o600);
    for (name, value) in [(&b"user.a"[..], &b"v"[..]), (b"trusted.b", b"w"), (b"security.c", b"x")] {
        root.append(&Update::SetXattr { inode: file, name, value, mode: None, at: NOW });
    }
    root.digest().expect("digested");
    let mut user = user_client(&site);
    let found = user.acquire(&[(file, true)]).expect("the attributes are shown").remove(0);
    assert!(!LeaseWord(found.word).may_write(), "the user can change nothing");
    assert!(matches!(found.state.contents, Some(Contents::Withheld(_))), "{:?}", found.state);
    let shown = |name: &[u8], value: &[u8]| (name.to_vec(), value.to_vec());
    assert_eq!(found.state.xattrs, Some(vec![shown(b"security.c", b"x"), shown(b"user.a", b"")]));
    set_mode(&mut root, file, 0o604);
    assert_eq!(content(&mut user, file), b"secret");
    site.check();
}

#[test]
fn open_file_is_kept_when_directories_above_are_narrowed() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    set_mode(&mut story.root, story.directory, 0o755);
    let below = plant(&mut story.root, story.directory, b"below", FileKind::Directory, 0o755);
    let deep = plant(&mut story.root, below, b"deep", FileKind::Regular, 0o666);
    let unopened = plant(&mut story.root, below, b"unopened", FileKind::Regular, 0o666);
    let mut user = user_client(&story.site);
    for inode in [story.file, deep] {
        assert!(user.control.open_handle(inode));
        user.acquire(&[(inode, true)]).expect("granted");
        user.append(&Update::Write { inode, offset: 0, at: NOW, strip: true, data: b"before" });
    }
    set_mode(&mut story.root, below, 0o700);
    set_mode(&mut story.root, story.directory, 0o700);
    for inode in [story.file, deep] {
        // Another session's lease, so that the user's is gone.
        story.root.acquire(&[(inode, true)]).expect("granted");
        user.acquire(&[(inode, true)]).expect("what is open stays open");
        user.append(&Update::Write { inode, offset: 0, at: NOW, strip: true, data: b"later!" });
        user.digest().expect("honest");
        assert_eq!(content(&mut story.root, inode), b"later!");
    }
    assert_eq!(user.acquire(&[(unopened, false)]).err(), Some(Errno::EACCES));
    // A session that begins after that has never reached it.
    let mut late = user_client(&story.site);
    assert!(late.control.open_handle(deep));
    assert_eq!(late.acquire(&[(deep, false)]).err(), Some(Errno::EACCES));
    set_mode(&mut story.root, story.directory, 0o755);
    set_mode(&mut story.root, below, 0o755);
    late.acquire(&[(deep, false)]).expect("the way is free again");
    story.site.check();
}

/// A hostile session may claim handles on all numbers before it loses the way.
#[test]
fn claimed_file_made_after_narrowing_is_not_granted() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    set_mode(&mut story.root, story.directory, 0o755);
    let mut user = user_client(&story.site);
    let before = plant(&mut story.root, story.directory, b"before", FileKind::Regular, 0o644);
    let hidden = plant(&mut story.root, InodeId::ROOT, b"hidden", FileKind::Directory, 0o700);
    let below = plant(&mut story.root, hidden, b"below", FileKind::Directory, 0o755);
    let moved = plant(&mut story.root, hidden, b"moved", FileKind::Regular, 0o644);
    let deep = plant(&mut story.root, below, b"deep", FileKind::Regular, 0o644);
    user.acquire(&[(before, false)]).expect("granted");
    assert!(user.control.open_handle(before));
    set_mode(&mut story.root, story.directory, 0o700);
    let after = plant(&mut story.root, story.directory, b"after", FileKind::Regular, 0o644);
    story.root.acquire(&[(hidden, true), (story.directory, true), (InodeId::RENAME, true)]).expect("granted");
    for (inode, name) in [(below, &b"below"[..]), (moved, b"moved")] {
        story.root.acquire(&[(inode, true)]).expect("granted");
        let (parent, new_parent, new_name) = (hidden, story.directory, name);
        let (target, exchange, whiteout, release, at) = (None, false, None, true, NOW);
        let rename = Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at };
        story.root.append(&Update::Rename(rename));
    }
    story.root.digest().expect("digested");
    for claimed in [after, moved, deep] {
        assert!(user.control.open_handle(claimed));
        assert_eq!(user.acquire(&[(claimed, false)]).err(), Some(Errno::EACCES), "{claimed}");
    }
    assert_eq!(content(&mut user, before), b"secret", "it has this one open");
    story.site.check();
}

/// The user's process is in a directory below one that is narrowed, and works on there.
#[test]
fn file_made_below_narrowed_directory_is_its_makers() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    set_mode(&mut story.root, story.directory, 0o755);
    let below = plant(&mut story.root, story.directory, b"below", FileKind::Directory, 0o777);
    let mut user = user_client(&story.site);
    user.acquire(&[(below, true)]).expect("granted");
    assert!(user.control.open_handle(below));
    set_mode(&mut story.root, story.directory, 0o700);
    user.acquire(&[(below, true)]).expect("it has this one open");
    let file = user.inode();
    let made = create(file, below, b"made", FileKind::Regular);
    user.append(&Update::Create(ashlar_update::Create { uid: USER, gid: USER, ..made }));
    assert!(user.control.open_handle(file));
    user.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: true, data: b"first" });
    user.digest().expect("honest");
    // Another session takes the lease.
    assert_eq!(content(&mut story.root, file), b"first");
    user.acquire(&[(file, true)]).expect("its own file");
    user.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: true, data: b"later" });
    user.digest().expect("honest");
    assert_eq!(content(&mut story.root, file), b"later");
    story.site.check();
}

#[test]
fn record_written_before_directory_is_narrowed_counts() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    set_mode(&mut story.root, story.directory, 0o755);
    let mut user = user_client(&story.site);
    user.acquire(&[(story.file, true)]).expect("granted");
    story.root.acquire(&[(story.directory, true)]).expect("granted");
    // The session does not have the file open, and its record is applied after the directory is narrowed.
    user.append(&Update::Write { inode: story.file, offset: 0, at: NOW, strip: true, data: b"honest" });
    set_mode(&mut story.root, story.directory, 0o700);
    user.digest().expect("honest");
    assert_eq!(content(&mut story.root, story.file), b"honest");
    story.site.check();
}

#[test]
fn open_file_is_kept_when_moved_or_removed_even_after_kill() {
    if !common::may_change_users() {
        return;
    }
    for moves in [true, false] {
        let mut story = Private::new();
        let file = plant(&mut story.root, InodeId::ROOT, b"f", FileKind::Regular, 0o666);
        let mut user = user_client(&story.site);
        assert!(user.control.open_handle(file));
        user.acquire(&[(file, true)]).expect("granted");
        story.root.acquire(&[(file, true), (InodeId::ROOT, true), (story.directory, true)]).expect("granted");
        let (inode, parent, name) = (file, InodeId::ROOT, &b"f"[..]);
        if moves {
            story.root.append(&Update::Rename(ashlar_update::Rename {
                parent,
                name,
                inode,
                new_parent: story.directory,
                new_name: b"g",
                target: None,
                exchange: false,
                whiteout: None,
                release: false,
                at: NOW,
            }));
        } else {
            story.root.append(&Update::Unlink { inode, parent, name, release: true, at: NOW });
        }
        story.root.digest().expect("digested");
        for round in 0..2 {
            user.acquire(&[(file, true)]).unwrap_or_else(|error| panic!("{moves} {round}: {error:?}"));
            user.append(&Update::Write { inode, offset: 0, at: NOW, strip: true, data: b"goes on" });
            user.digest().expect("honest");
            assert_eq!(content(&mut user, file), b"goes on");
            if round == 0 {
                story.site.kill();
                story.site.start();
                [&mut story.root, &mut user].into_iter().for_each(|client| client.resume(&story.site.socket()));
            }
        }
        let mut other = user_client(&story.site);
        assert!(other.control.open_handle(file));
        assert_eq!(other.acquire(&[(file, false)]).err(), Some(Errno::EACCES), "{moves}");
        story.site.check();
    }
}

#[test]
fn file_with_several_names_is_reached_by_each() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    let open = plant(&mut story.root, InodeId::ROOT, b"open", FileKind::Directory, 0o755);
    story.root.acquire(&[(story.file, true), (open, true)]).expect("granted");
    let mut user = user_client(&story.site);
    let link = |root: &mut Client, inode, parent, name: &[u8]| {
        root.acquire(&[(inode, true), (parent, true)]).expect("granted");
        root.append(&Update::Link { inode, parent, name, at: NOW });
        root.digest().expect("digested");
    };
    assert_eq!(user.acquire(&[(story.file, false)]).err(), Some(Errno::EACCES));
    link(&mut story.root, story.file, open, b"shown");
    user.acquire(&[(story.file, true)]).expect("it has a name that the user reaches");
    // Another name in the private directory: the file's attributes now name that one.
    link(&mut story.root, story.file, story.directory, b"again");
    user.acquire(&[(story.file, true)]).expect("the first name is still there");
    let mut other = user_client(&story.site);
    assert_eq!(other.lookup(open, b"shown"), Ok(Some(story.file)));
    other.acquire(&[(story.file, false)]).expect("it was looked up");
    // A file whose known directory lost its name counts as nowhere, not as in the root.
    let hidden = plant(&mut story.root, story.directory, b"hidden", FileKind::Regular, 0o666);
    link(&mut story.root, hidden, story.directory, b"second");
    story.root.acquire(&[(hidden, true), (story.directory, true)]).expect("granted");
    let (inode, parent) = (hidden, story.directory);
    story.root.append(&Update::Unlink { inode, parent, name: b"second", release: false, at: NOW });
    story.root.digest().expect("digested");
    assert_eq!(user.acquire(&[(hidden, false)]).err(), Some(Errno::EACCES));
    story.site.check();
}

/// Writes through LibFS as an open file does.
fn write(fs: &LibFs, user: &Credentials, id: InodeId, offset: u64, data: &[u8]) -> Result<usize, Errno> {
    fs.open_for(user, id, Access::WRITE)?;
    let written = fs.write(user, id, WriteAt::Offset(offset), data, true);
    fs.close(id);
    written.map(|written| written.bytes)
}

#[test]
fn libfs_passes_unreadable_directory_and_lists_nothing() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let directory = plant(&mut root, InodeId::ROOT, b"d", FileKind::Directory, 0o711);
    let file = plant(&mut root, directory, b"f", FileKind::Regular, 0o644);
    let drop = plant(&mut root, InodeId::ROOT, b"drop", FileKind::Directory, 0o733);
    let (fs, user) = user_libfs(&site);
    for last in [FinalLink::Follow.to(PathPurpose::Look), FinalLink::Follow.to(PathPurpose::Read)] {
        assert_eq!(user.place(&fs, "/d/f", last).map(|place| place.found.map(|found| found.id)), Ok(Some(file)));
        assert!(user.place(&fs, "/d/missing", last).is_ok_and(|place| place.found.is_none()));
    }
    let place = user.place(&fs, "/d", FinalLink::Follow.to(PathPurpose::Read));
    assert!(place.is_ok(), "open finds the directory, and then the user's rights");
    assert_eq!(fs.open_for(&user.credentials, directory, Access::READ).err(), Some(Errno::EACCES));
    let mut buffer = [0; 6];
    fs.open_for(&user.credentials, file, Access::READ).expect("opened");
    assert_eq!(fs.read(file, 0, &mut buffer), Ok(6));
    // A directory into which all may put files, and in which none sees the others'.
    let made = fs.make_open(&user.credentials, drop, b"mine", &make(FileKind::Regular)).expect("made");
    assert_eq!(fs.write(&user.credentials, made.id, WriteAt::End, b"text", true).map(|written| written.bytes), Ok(4));
    assert_eq!(fs.make(&user.credentials, drop, b"mine", &make(FileKind::Regular)).err(), Some(Errno::EEXIST));
    fs.unlink(&user.credentials, drop, b"mine").expect("removed");
    assert_eq!(fs.unlink(&user.credentials, drop, b"mine").err(), Some(Errno::ENOENT));
    assert_eq!(site.check()["sessions_fenced"], 0);
}

#[test]
fn libfs_writes_file_that_its_user_may_not_read() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let short = plant(&mut root, InodeId::ROOT, b"short", FileKind::Regular, 0o622);
    let long = plant(&mut root, InodeId::ROOT, b"long", FileKind::Regular, 0o622);
    root.append(&Update::Write { inode: long, offset: 0, at: NOW, strip: false, data: &[7; 40_000] });
    root.digest().expect("digested");
    let (fs, user) = user_libfs(&site);
    for file in [short, long] {
        assert_eq!(write(&fs, &user.credentials, file, 2, b"XX"), Ok(2));
        assert_eq!(fs.open_for(&user.credentials, file, Access::READ).err(), Some(Errno::EACCES));
        fs.open(file).expect("opened");
        assert_eq!(fs.read(file, 0, &mut [0; 6]), Err(Errno::EACCES), "nothing else than an error shows");
        fs.close(file);
    }
    fs.sync_all().expect("synced");
    assert_eq!(content(&mut root, short), b"seXXet");
    let reader = connect(&site);
    let mut all = vec![0; 40_000];
    assert_eq!(reader.read(long, 0, &mut all), Ok(40_000));
    assert!(all[..2] == [7, 7] && all[2..4] == *b"XX" && all[4..].iter().all(|byte| *byte == 7));
    assert_eq!(site.check()["sessions_fenced"], 0);
}

/// Otherwise it would log a record that fences it: more attributes than an inode may have.
#[test]
fn libfs_counts_attributes_that_its_user_may_not_see() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let mut files = Vec::new();
    for (file, name) in [(&b"one"[..], &b"user.large"[..]), (b"two", b"trusted.large")] {
        let file = plant(&mut root, InodeId::ROOT, file, FileKind::Regular, 0o622);
        root.append(&Update::SetXattr { inode: file, name, value: &[1; 60_000], mode: None, at: NOW });
        root.digest().expect("digested");
        files.push(file);
    }
    let (fs, user) = user_libfs(&site);
    let set =
        |file, bytes| fs.set_xattr(&user.credentials, file, b"user.own", &vec![2; bytes], XattrFlags::default(), false);
    for file in files {
        assert_eq!(set(file, 20_000), Err(Errno::ENOSPC));
        assert_eq!(set(file, 1000), Ok(()));
        let names = fs.xattr_names(file).expect("listed");
        assert!(names.iter().all(|name| !name.starts_with(b"trusted.")), "{names:?}");
    }
    fs.make_room().expect("honest");
    assert_eq!(site.check()["sessions_fenced"], 0);
}

#[test]
fn libfs_without_rights_gets_the_kernels_errors() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let file = plant(&mut root, InodeId::ROOT, b"file", FileKind::Regular, 0o644);
    let sticky = plant(&mut root, InodeId::ROOT, b"tmp", FileKind::Directory, 0o1777);
    plant(&mut root, sticky, b"roots", FileKind::Regular, 0o666);
    let (fs, user) = user_libfs(&site);
    let user = &user.credentials;
    let change = |change: AttributeChange| fs.set_attributes(user, file, &change).err();
    let none = AttributeChange::default();
    assert_eq!(change(AttributeChange { mode: Some(0o777), ..none }), Some(Errno::EPERM));
    assert_eq!(change(AttributeChange { uid: Some(USER), ..none }), Some(Errno::EPERM));
    assert_eq!(change(AttributeChange { size: Some(0), ..none }), Some(Errno::EACCES));
    let now = Some(SetTime::Now);
    assert_eq!(change(AttributeChange { accessed: now, modified: now, ..none }), Some(Errno::EACCES));
    // Every user may change an owner to no other. SharedFS gives no lease for that, and so the kernel serves the call.
    assert_eq!(change(AttributeChange { strip: true, ..none }), Some(Errno::RESERVED));
    let flags = XattrFlags::default();
    assert_eq!(fs.set_xattr(user, file, b"user.x", b"", flags, false).err(), Some(Errno::EACCES));
    assert_eq!(write(&fs, user, file, 0, b"x"), Err(Errno::EACCES));
    assert_eq!(fs.make(user, InodeId::ROOT, b"file", &make(FileKind::Directory)).err(), Some(Errno::EACCES));
    assert_eq!(fs.make(user, InodeId::ROOT, b"new", &make(FileKind::Directory)).err(), Some(Errno::EACCES));
    assert_eq!(fs.unlink(user, InodeId::ROOT, b"file").err(), Some(Errno::EACCES));
    assert_eq!(fs.unlink(user, InodeId::ROOT, b"missing").err(), Some(Errno::ENOENT));
    assert_eq!(fs.unlink(user, sticky, b"roots").err(), Some(Errno::EPERM));
    let own = fs.make(user, sticky, b"own", &make(FileKind::Regular)).expect("made");
    fs.set_attributes(user, own.id, &AttributeChange { mode: Some(0o600), ..none }).expect("its own");
    fs.unlink(user, sticky, b"own").expect("its own");
    assert_eq!(site.check()["sessions_fenced"], 0);
}

#[test]
fn libfs_removes_strangers_file_from_own_directory() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 * MIB);
    let mut root = Client::open(&site.socket());
    let directory = plant(&mut root, InodeId::ROOT, b"d", FileKind::Directory, 0o755);
    plant(&mut root, directory, b"roots", FileKind::Regular, 0o600);
    plant(&mut root, directory, b"moved", FileKind::Regular, 0o600);
    let set = SetAttributes {
        inode: directory,
        mode: None,
        uid: Some(USER),
        gid: Some(USER),
        accessed: None,
        modified: None,
        at: NOW,
    };
    root.append(&Update::SetAttributes(set));
    root.digest().expect("digested");
    let (fs, user) = user_libfs(&site);
    let user = &user.credentials;
    let flags = RenameFlags::default();
    fs.rename(user, (directory, b"moved"), (directory, b"away"), flags).expect("moved");
    fs.unlink(user, directory, b"roots").expect("removed");
    fs.unlink(user, directory, b"away").expect("removed");
    assert_eq!(site.check()["sessions_fenced"], 0);
}

#[test]
fn call_that_sharedfs_cannot_check_is_left_to_kernel() {
    if !common::may_change_users() {
        return;
    }
    let mut story = Private::new();
    let (fs, user) = user_libfs(&story.site);
    // As below a working directory that the user could not reach by a path, or by a mount of a part of the tree.
    assert_eq!(fs.attributes(story.file).err(), Some(Errno::RESERVED));
    assert_eq!(fs.open_adopted(&user.credentials, story.file, Access::READ).err(), Some(Errno::RESERVED));
    assert_eq!(user.walk(&fs, "/private/file", FinalLink::Follow), Err(Errno::EACCES), "a path is checked by LibFS");
    assert_eq!(story.site.check()["sessions_fenced"], 0);
    story.root.digest().expect("digested");
}
