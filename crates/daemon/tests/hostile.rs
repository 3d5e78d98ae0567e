//! Hostile sessions.
//!
//! Their forgeries change nothing, fence them, and harm no other session.

mod common;

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use ashlar_log::Appended;
use ashlar_types::{Errno, FileKind, InodeId, LogPosition, QuotaAmount, QuotaKey, QuotaLimits, SessionId, Timestamp};
use ashlar_update::{Create, Rename, SetAttributes, Update, Whiteout};
use ashlar_wire::{Connection, Credit, CreditKind, QuotaRequest, Reply, Request, SessionKind};
use common::{Client, NOW, Site, create, hello};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const NOBODY: u32 = 65534;
const NOBODYS: QuotaKey = QuotaKey::User(NOBODY);

/// Writes that take more blocks than a session begins with.
const MORE_THAN_GRANTED: u32 = 400;

/// Returns the tree as an honest session sees it.
///
/// It shows names, inodes and attributes of the root's entries, and the root's own.
fn picture(socket: &std::path::Path) -> String {
    let mut honest = Client::open(socket);
    let root = honest.acquire(&[(InodeId::ROOT, false)]).expect("granted");
    let entries = root[0].state.entries.clone().expect("entries");
    let mut picture = format!("{:?}", root[0].state.attributes);
    for entry in entries {
        let found = honest.acquire(&[(entry.inode, false)]).expect("granted");
        picture += &format!("\n{:?} {:?}", String::from_utf8_lossy(&entry.name), found[0].state);
    }
    assert!(honest.call(&Request::Goodbye).is_ok());
    picture
}

/// Runs one attack by a session of its own, and checks the outcome.
///
/// The session holds the leases it asks for.
fn attack(site: &mut Site, story: &str, forge: impl FnOnce(&mut Client)) {
    let before = picture(&site.socket());
    let mut hostile = Client::open(&site.socket());
    forge(&mut hostile);
    // The call fences it, or the daemon has done so by itself.
    assert_eq!(hostile.digest().err(), Some(Errno::EIO), "{story}");
    hostile.wait_fenced();
    assert!(hostile.log.append(hostile.log.seal_count(), 12, &[&[0; 20]]).is_err(), "{story}: the log takes no more");
    assert_eq!(picture(&site.socket()), before, "{story}: nothing has changed");
    let id = hostile.welcome.peer.session;
    let status = site.status();
    let shown = status.sessions.iter().find(|session| session.session == id).expect("shown while it lives");
    assert!(shown.fenced.is_some(), "{story}: the status shows the reason");
    wait_quarantined(site, &hostile);
    site.check();
}

/// Waits until a fenced session's log is quarantined.
fn wait_quarantined(site: &Site, client: &Client) {
    let log = site.arena().join(format!("sessions/fenced-{}.log", client.welcome.peer.session));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
    while !log.exists() {
        assert!(std::time::Instant::now() < deadline, "{} does not come", log.display());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Makes a file and a directory with one below it, by an honest root.
fn make_files(site: &Site) -> (InodeId, InodeId, InodeId) {
    let mut honest = Client::open(&site.socket());
    honest.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = honest.make(InodeId::ROOT, b"file", FileKind::Regular);
    honest.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"precious" });
    let outer = honest.make(InodeId::ROOT, b"outer", FileKind::Directory);
    let inner = honest.make(outer, b"inner", FileKind::Directory);
    honest.digest().expect("digested");
    assert!(honest.call(&Request::Goodbye).is_ok());
    (file, outer, inner)
}

#[test]
fn forged_records_change_nothing() {
    let mut site = Site::new(64 << 20);
    let (file, outer, inner) = make_files(&site);
    let all = [(InodeId::ROOT, true), (InodeId::RENAME, true), (file, true), (outer, true), (inner, true)];
    let mut bystander = Client::open(&site.socket());
    let write = |inode| Update::Write { inode, offset: 0, at: NOW, strip: false, data: b"forged" };
    attack(&mut site, "without any lease", |c| {
        c.append(&write(file));
    });
    attack(&mut site, "a foreign number", |c| {
        c.acquire(&all).expect("granted");
        c.append(&Update::Create(create(InodeId(1 << 40), InodeId::ROOT, b"new", FileKind::Regular)));
    });
    attack(&mut site, "a number that is taken", |c| {
        c.acquire(&all).expect("granted");
        c.append(&Update::Create(create(file, InodeId::ROOT, b"new", FileKind::Regular)));
    });
    attack(&mut site, "a cycle", |c| {
        c.acquire(&all).expect("granted");
        c.append(&Update::Rename(rename(outer, (InodeId::ROOT, b"outer"), (inner, b"loop"))));
    });
    let leaving = |number| {
        let whiteout = Some(Whiteout { inode: number, uid: 0, gid: 0, acl_access: &[] });
        Update::Rename(Rename { whiteout, ..rename(file, (InodeId::ROOT, b"file"), (outer, b"moved")) })
    };
    attack(&mut site, "a whiteout of a foreign number", |c| {
        c.acquire(&all).expect("granted");
        c.append(&leaving(InodeId(1 << 40)));
    });
    attack(&mut site, "a whiteout of the number of the file that moves", |c| {
        c.acquire(&all).expect("granted");
        c.append(&leaving(file));
    });
    attack(&mut site, "a whiteout where there is no lease", |c| {
        c.acquire(&[(file, true), (outer, true)]).expect("granted");
        let number = c.inode();
        bystander.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        c.append(&leaving(number));
    });
    attack(&mut site, "a bad name", |c| {
        c.acquire(&all).expect("granted");
        let inode = c.inode();
        c.append(&Update::Create(create(inode, InodeId::ROOT, b"a/b", FileKind::Regular)));
    });
    attack(&mut site, "a removed directory that holds entries", |c| {
        c.acquire(&all).expect("granted");
        let (parent, name) = (InodeId::ROOT, &b"outer"[..]);
        c.append(&Update::RemoveDirectory { inode: outer, parent, name, release: true, at: NOW });
    });
    attack(&mut site, "a dependency on records that do not exist", |c| {
        let session = bystander.welcome.peer.session;
        c.append_unpaid(&Update::Depend { session, position: LogPosition(1 << 40) }).expect("appended");
    });
    attack(&mut site, "space that was not granted", |c| {
        c.acquire(&all).expect("granted");
        for _ in 0..MORE_THAN_GRANTED {
            c.append_unpaid(&write(file)).expect("appended");
        }
    });
    attack(&mut site, "credit written into the page", |c| {
        c.acquire(&all).expect("granted");
        c.control.give_credit(Credit { blocks: 1 << 40, metadata_bytes: 1 << 50 }, CreditKind::Common);
        for _ in 0..MORE_THAN_GRANTED {
            c.append(&write(file));
        }
    });
    attack(&mut site, "an unknown kind", |c| {
        c.append_raw(99, &[&[1; 40]]).expect("appended");
    });
    attack(&mut site, "garbage", |c| {
        c.append_raw(1, &[&[0xff; 7]]).expect("appended");
    });
    attack(&mut site, "a leased file, after the lease moved", |c| {
        c.acquire(&[(file, true)]).expect("granted");
        bystander.acquire(&[(file, true)]).expect("granted");
        c.append(&write(file));
    });
    bystander.acquire(&[(file, true)]).expect("granted");
    bystander.append(&write(file));
    bystander.digest().expect("others go on");
    assert_eq!(site.check()["sessions_fenced"], 15);
    let kept = std::fs::read_dir(site.arena().join("sessions")).expect("listed");
    let kept = kept.filter(|file| file.as_ref().is_ok_and(|f| f.file_name().to_string_lossy().starts_with("fenced-")));
    assert_eq!(kept.count(), 3 * 8, "forged logs don't fill the arena");
}

/// A session that builds on what a fenced one made once was fenced itself, with all that it did afterwards.
///
/// That lasted as long as the fenced session's process.
#[test]
fn session_that_builds_on_a_fenced_ones_updates_goes_on() {
    let mut site = Site::new(64 << 20);
    let mut hostile = Client::open(&site.socket());
    let mut early = Client::open(&site.socket());
    hostile.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let seen = hostile.make(InodeId::ROOT, b"seen", FileKind::Regular);
    let position = hostile.digest().expect("an honest record so far");
    let (_, early_dependencies) = early.acquire_with(&[(seen, false)]).expect("granted");
    hostile.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    hostile.append(&Update::Create(create(InodeId(1 << 40), InodeId::ROOT, b"forged", FileKind::Regular)));
    assert_eq!(hostile.digest().err(), Some(Errno::EIO));
    hostile.wait_fenced();
    wait_quarantined(&site, &hostile);
    let build = |client: &mut Client, dependencies: Vec<(SessionId, LogPosition)>, name: &[u8]| {
        let (_, more) = client.acquire_with(&[(InodeId::ROOT, true), (seen, true)]).expect("granted");
        for (session, position) in dependencies.into_iter().chain(more) {
            client.append(&Update::Depend { session, position });
        }
        let made = client.make(InodeId::ROOT, name, FileKind::Regular);
        client.digest().unwrap_or_else(|error| panic!("{}: {error}", String::from_utf8_lossy(name)));
        made
    };
    build(&mut early, early_dependencies, b"early");
    build(&mut Client::open(&site.socket()), vec![(hostile.welcome.peer.session, position)], b"late");
    // LibFS logs what it depends on by itself.
    let fs = common::libfs::connect(&site);
    fs.lookup(&common::libfs::ROOT, InodeId::ROOT, b"seen").expect("found");
    fs.make_open(&common::libfs::ROOT, InodeId::ROOT, b"made", &common::libfs::make(FileKind::Regular)).expect("made");
    fs.make_room().expect("applied");
    assert_eq!(site.status().sessions.iter().filter(|session| session.fenced.is_some()).count(), 1);
    drop((hostile, fs));
    assert_eq!(site.check()["sessions_fenced"], 1);
}

#[test]
fn truncated_or_rewritten_log_hurts_only_its_session() {
    let mut site = Site::new(64 << 20);
    make_files(&site);
    attack(&mut site, "the log's file cut off", |c| {
        c.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        c.make(InodeId::ROOT, b"new", FileKind::Regular);
        rustix::fs::ftruncate(&c.log_file, 0).expect("truncated");
    });
    attack(&mut site, "the second half of the log's file cut off", |c| {
        c.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        c.make(InodeId::ROOT, b"new", FileKind::Regular);
        rustix::fs::ftruncate(&c.log_file, 4096).expect("truncated");
    });
    attack(&mut site, "zeros over the whole log", |c| {
        c.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        c.append_unpaid(&Update::Accessed { inode: InodeId(99), at: NOW }).expect("appended");
        c.digest().expect("digested");
        let zeros = vec![0; 1 << 20];
        for at in 0..c.welcome.log_bytes >> 20 {
            rustix::io::pwrite(&c.log_file, &zeros, at << 20).expect("written");
        }
    });
    attack(&mut site, "ones over the whole log", |c| {
        c.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        let ones = vec![0xff; 1 << 20];
        for at in 0..c.welcome.log_bytes >> 20 {
            rustix::io::pwrite(&c.log_file, &ones, at << 20).expect("written");
        }
    });
}

#[test]
fn records_edited_during_digest_are_whole_or_refused() {
    let mut site = Site::new(64 << 20);
    make_files(&site);
    for round in 0..8u64 {
        let mut hostile = Client::open(&site.socket());
        hostile.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        let dir = hostile.make(InodeId::ROOT, format!("dir-{round}").as_bytes(), FileKind::Directory);
        for n in 0..200u32 {
            hostile.make(dir, format!("file-{n}").as_bytes(), FileKind::Regular);
        }
        let file = hostile.log_file.try_clone().expect("a descriptor");
        let scribbler = std::thread::spawn(move || {
            for step in 0..4000u64 {
                let at = (step * 7919 + round * 131) % (64 << 10);
                // A log whose file is gone by now can't be scribbled on.
                let _ = rustix::io::pwrite(&file, &step.to_le_bytes(), 4096 + at);
            }
        });
        // The session may be fenced in the middle of it, or be quicker than the scribbler.
        let _ = hostile.digest();
        scribbler.join().expect("done");
        let _ = hostile.digest();
        site.check();
    }
    picture(&site.socket());
}

/// Runs an attack as an ordinary user, in a process of its own.
fn run_as_nobody(site: &Site, story: &str, inodes: [InodeId; 2]) -> bool {
    let mut child = common::this_test("hostile_user");
    child
        .env("ASHLAR_TEST_SOCKET", site.socket())
        .env("ASHLAR_TEST_STORY", story)
        .env("ASHLAR_TEST_INODES", format!("{} {}", inodes[0], inodes[1]))
        .uid(NOBODY)
        .gid(NOBODY)
        .status()
        .expect("run")
        .success()
}

#[test]
fn ordinary_user_cannot_change_files_of_others() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let (file, outer, _) = make_files(&site);
    let stories = ["write", "chmod", "chown", "unlink", "create", "setuid", "xattr", "trusted", "steal", "times"];
    for (done, story) in stories.iter().enumerate() {
        let before = picture(&site.socket());
        assert!(run_as_nobody(&site, story, [file, outer]), "{story}");
        assert_eq!(picture(&site.socket()), before, "{story}");
        assert_eq!(site.check()["sessions_fenced"], done as u64 + 1, "{story}");
    }
    assert!(run_as_nobody(&site, "honest", [file, outer]));
    assert!(run_as_nobody(&site, "mount", [file, outer]));
}

/// Linux lets any user make whiteouts.
///
/// They are character devices of number 0:0, and renames leave them; no other devices are allowed.
#[test]
fn ordinary_user_makes_own_whiteouts_and_no_other_devices() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let (file, outer, _) = make_files(&site);
    let mut root = Client::open(&site.socket());
    open_to_all(&mut root, outer);
    assert!(run_as_nobody(&site, "whiteout", [file, outer]));
    assert_eq!(site.check()["sessions_fenced"], 0);
    let stories = ["whiteout, root's", "whiteout, of a stranger's group", "device, zero", "device, block"];
    for (done, story) in stories.into_iter().enumerate() {
        let before = picture(&site.socket());
        assert!(run_as_nobody(&site, story, [file, outer]), "{story}");
        assert_eq!(picture(&site.socket()), before, "{story}");
        assert_eq!(site.check()["sessions_fenced"], done as u64 + 1, "{story}");
    }
    let mut honest = Client::open(&site.socket());
    honest.acquire(&[(outer, false)]).expect("granted");
    let left = honest.lookup(outer, b"file").expect("asked").expect("it is there");
    let found = honest.acquire(&[(left, false)]).expect("granted");
    let left = &found[0].state.attributes;
    assert_eq!((left.kind, left.device, left.mode, left.uid, left.links), (FileKind::CharDevice, 0, 0, NOBODY, 1));
}

fn open_to_all(root: &mut Client, directory: InodeId) {
    root.acquire(&[(directory, true)]).expect("granted");
    let none =
        SetAttributes { inode: directory, mode: None, uid: None, gid: None, accessed: None, modified: None, at: NOW };
    root.append(&Update::SetAttributes(SetAttributes { mode: Some(0o777), ..none }));
    root.digest().expect("digested");
}

/// Moves a file within a directory, so that it leaves a whiteout.
///
/// The whiteout is `left`, of this owner and group.
fn move_away(
    c: &mut Client,
    left: InodeId,
    (inode, parent): (InodeId, InodeId),
    [name, new_name]: [&[u8]; 2],
    (uid, gid): (u32, u32),
) -> Appended {
    let whiteout = Some(Whiteout { inode: left, uid, gid, acl_access: &[] });
    c.append(&Update::Rename(Rename { whiteout, ..rename(inode, (parent, name), (parent, new_name)) }))
}

/// Returns a rename to a name that does not exist yet.
fn rename<'a>(
    inode: InodeId,
    (parent, name): (InodeId, &'a [u8]),
    (new_parent, new_name): (InodeId, &'a [u8]),
) -> Rename<'a> {
    let (target, exchange, whiteout, release) = (None, false, None, false);
    Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at: NOW }
}

#[test]
fn ordinary_user_uses_no_more_than_quota_granted() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let (file, outer, _) = make_files(&site);
    let mut root = Client::open(&site.socket());
    open_to_all(&mut root, outer);
    let limits = QuotaLimits { blocks: Some(20), inodes: Some(20) };
    let mut line = Connection::connect(&site.socket()).expect("connected");
    let reply = line.call::<_, Reply>(&Request::SetQuota { key: NOBODYS, limits }, &[]).expect("answered").0;
    assert!(matches!(reply, Reply::Done));
    assert!(run_as_nobody(&site, "quota, honest", [file, outer]));
    assert_eq!(site.check()["sessions_fenced"], 0);
    for (done, story) in ["quota, blocks", "quota, inodes"].iter().enumerate() {
        assert!(run_as_nobody(&site, story, [file, outer]), "{story}");
        assert_eq!(site.check()["sessions_fenced"], done as u64 + 1, "{story}");
    }
    // Mounts are root's, and act for many users: their writes count, whichever session paid for them.
    root.acquire(&[(outer, true)]).expect("granted");
    let inode = root.inode();
    let owned = ashlar_update::Create { uid: NOBODY, ..create(inode, outer, b"of nobody", FileKind::Regular) };
    root.append(&Update::Create(owned));
    root.append(&Update::Write { inode, offset: 0, at: NOW, strip: false, data: &[1; 30 * 4096] });
    root.digest().expect("root's sessions are trusted");
    assert!(!root.control.is_fenced());
    site.check();
}

#[test]
#[ignore = "this is a user's process, which another test starts"]
fn hostile_user() {
    let Some(socket) = std::env::var_os("ASHLAR_TEST_SOCKET").map(PathBuf::from) else { return };
    let story = std::env::var("ASHLAR_TEST_STORY").expect("a story");
    let inodes: Vec<InodeId> = std::env::var("ASHLAR_TEST_INODES")
        .expect("inodes")
        .split(' ')
        .map(|number| InodeId(number.parse().expect("a number")))
        .collect();
    let (file, directory) = (inodes[0], inodes[1]);
    if story == "mount" {
        let (_, reply, _) = hello(&socket, SessionKind::Mount, None).expect("answered");
        assert!(matches!(reply, ashlar_wire::Reply::Refused(_)), "only root may mount");
        let mut line = Connection::connect(&socket).expect("connected");
        let reply = line.call::<_, ashlar_wire::Reply>(&Request::Shutdown, &[]).expect("answered").0;
        assert!(matches!(reply, ashlar_wire::Reply::Error(Errno::EPERM)));
        return;
    }
    if story == "crowd" {
        let mut lines = Vec::new();
        let refused = loop {
            let (line, reply, _) = hello(&socket, SessionKind::Process, None).expect("answered");
            match reply {
                ashlar_wire::Reply::Welcome(_) => lines.push(line),
                ashlar_wire::Reply::Refused(sentence) => break sentence,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(lines.len(), 32);
        assert!(refused.contains("user 65534 has 32 sessions"), "{refused}");
        return;
    }
    let mut c = Client::open(&socket);
    let again = std::fs::OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", c.leases_file.as_raw_fd()));
    assert!(again.is_err(), "a user's session can't open its lease table for writing");
    c.acquire(&[(InodeId::ROOT, true), (file, true), (directory, true)]).expect("granted");
    let set = SetAttributes {
        inode: file,
        mode: None,
        uid: None,
        gid: None,
        accessed: None,
        modified: None,
        at: Timestamp { seconds: 9, nanoseconds: 9 },
    };
    let new = c.inode();
    match story.as_str() {
        "write" => c.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: true, data: b"mine" }),
        "chmod" => c.append(&Update::SetAttributes(SetAttributes { mode: Some(0o777), ..set })),
        "chown" => c.append(&Update::SetAttributes(SetAttributes { uid: Some(NOBODY), ..set })),
        "times" => c.append(&Update::SetAttributes(SetAttributes { modified: Some(NOW), ..set })),
        "unlink" => {
            let (parent, name) = (InodeId::ROOT, &b"file"[..]);
            c.append(&Update::Unlink { inode: file, parent, name, release: true, at: NOW })
        }
        "create" => c.append(&Update::Create(create(new, directory, b"mine", FileKind::Regular))),
        "setuid" => {
            let mut create = create(new, directory, b"mine", FileKind::Regular);
            (create.uid, create.mode) = (0, 0o4755);
            c.append(&Update::Create(create))
        }
        "xattr" => c.append(&Update::SetXattr { inode: file, name: b"user.mine", value: b"x", mode: None, at: NOW }),
        "trusted" => c.append(&Update::SetXattr { inode: file, name: b"trusted.x", value: b"x", mode: None, at: NOW }),
        "steal" => c.append(&Update::Rename(rename(file, (InodeId::ROOT, b"file"), (directory, b"mine")))),
        quota if quota.starts_with("quota") => {
            let ask = |c: &mut Client, blocks, inodes| {
                // The session claims that no limit holds for it, and is not believed.
                let want = QuotaRequest { key: NOBODYS, amount: QuotaAmount { blocks, inodes }, exempt: true };
                c.call(&Request::Quota(vec![want])).map(drop)
            };
            assert_eq!(ask(&mut c, 21, 0), Err(Errno::EDQUOT));
            if quota != "quota, inodes" {
                ask(&mut c, 0, 1).expect("granted");
            }
            if quota != "quota, blocks" {
                ask(&mut c, 3, 0).expect("granted");
            }
            c.append(&Update::Create(create(new, directory, quota.as_bytes(), FileKind::Regular)));
            let write = Update::Write { inode: new, offset: 0, at: NOW, strip: true, data: &[1; 3 * 4096] };
            let appended = c.append(&write);
            if quota == "quota, honest" {
                c.digest().expect("a granted amount may be used");
                return;
            }
            appended
        }
        device if device.starts_with("device") => {
            let kind = if device == "device, block" { FileKind::BlockDevice } else { FileKind::CharDevice };
            let number = if device == "device, block" { 0 } else { 0x105 };
            c.append(&Update::Create(Create { device: number, ..create(new, directory, b"device", kind) }))
        }
        "whiteout" => {
            let (file, left) = (c.make(directory, b"file", FileKind::Regular), c.inode());
            move_away(&mut c, left, (file, directory), [b"file", b"moved"], (NOBODY, NOBODY));
            // The whiteout is known by the lease under which it was made, as every new inode.
            c.append(&Update::SetAttributes(SetAttributes { inode: left, modified: Some(NOW), ..set }));
            c.append(&Update::Create(create(new, directory, b"made", FileKind::CharDevice)));
            c.digest().expect("any user may");
            return;
        }
        whiteout if whiteout.starts_with("whiteout") => {
            let moved = c.lookup(directory, b"moved").expect("asked").expect("it is there");
            c.acquire(&[(moved, true)]).expect("granted");
            let owner = if whiteout == "whiteout, root's" { (0, NOBODY) } else { (NOBODY, 5) };
            move_away(&mut c, new, (moved, directory), [b"moved", b"moved again"], owner)
        }
        "honest" => {
            c.append_unpaid(&Update::Accessed { inode: file, at: NOW }).expect("appended");
            c.digest().expect("an honest user is served");
            return;
        }
        other => panic!("{other}"),
    };
    assert_eq!(c.digest().err(), Some(Errno::EIO), "{story}");
    c.wait_fenced();
}

/// Writes a whole table of open handles, as no honest session does.
fn forge_handles(c: &Client, entry: impl Fn(u64) -> (u64, u64)) {
    let table: Vec<u8> = (0..ashlar_wire::HANDLE_SLOTS)
        .flat_map(|slot| {
            let (inode, count) = entry(slot);
            [inode.to_le_bytes(), count.to_le_bytes()].concat()
        })
        .collect();
    let written = rustix::io::pwrite(&c.control_file, &table, 4096).expect("written");
    assert_eq!(written, table.len());
    // Only SharedFS says, to honest sessions, that all of it has room.
    rustix::io::pwrite(&c.control_file, &ashlar_wire::HANDLE_SLOTS.to_le_bytes(), 120).expect("written");
}

#[test]
fn forged_handles_keep_inodes_only_until_session_ends() {
    let mut site = Site::new(64 << 20);
    let (file, ..) = make_files(&site);
    let mut honest = Client::open(&site.socket());
    for (round, story) in ["every number", "one number everywhere", "nonsense"].into_iter().enumerate() {
        let mut hostile = Client::open(&site.socket());
        forge_handles(&hostile, |slot| match round {
            0 => (slot, 1),
            1 => (file.0, u64::MAX),
            _ => (slot.wrapping_mul(0x9e37_79b9_7f4a_7c15), u64::MAX - slot),
        });
        honest.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        let name = format!("short-lived-{round}");
        let inode = honest.make(InodeId::ROOT, name.as_bytes(), FileKind::Regular);
        let (parent, name) = (InodeId::ROOT, name.as_bytes());
        honest.append(&Update::Unlink { inode, parent, name, release: false, at: NOW });
        honest.digest().expect("others go on");
        site.check();
        let id = hostile.welcome.peer.session;
        let shown = site.status().sessions.into_iter().find(|session| session.session == id).expect("it lives");
        assert_eq!(shown.fenced, None, "{story}: open handles are no violation");
        hostile.digest().expect("it is served");
        assert!(hostile.call(&Request::Goodbye).is_ok());
    }
    // Inodes that no session has open any more are freed.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while site.check()["orphans_freed"] < 3 {
        assert!(std::time::Instant::now() < deadline, "orphans are left: {:?}", site.status().counters);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn truncated_control_page_fences_its_session() {
    let mut site = Site::new(64 << 20);
    make_files(&site);
    let before = picture(&site.socket());
    let mut hostile = Client::open(&site.socket());
    hostile.append_unpaid(&Update::Accessed { inode: InodeId(99), at: NOW }).expect("appended");
    rustix::fs::ftruncate(&hostile.control_file, 0).expect("truncated");
    // SharedFS notices when it next writes there. The session can't read there any more that it's fenced: its calls say
    // so.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while hostile.digest().is_ok() {
        assert!(std::time::Instant::now() < deadline, "the session is not fenced");
    }
    assert_eq!(hostile.call(&Request::InodeRange).err(), Some(Errno::EIO));
    assert_eq!(picture(&site.socket()), before, "others go on");
    assert_eq!(site.check()["sessions_fenced"], 1);
}

#[test]
fn leases_cannot_be_written_by_their_session() {
    let mut site = Site::new(64 << 20);
    let client = Client::open(&site.socket());
    assert!(rustix::fs::ftruncate(&client.leases_file, 0).is_err(), "it can't be truncated");
    assert!(rustix::io::pwrite(&client.leases_file, &[1; 8], 4096).is_err(), "it can't be written");
    site.check();
}

#[test]
fn one_user_cannot_keep_others_out() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let (file, outer, _) = make_files(&site);
    assert!(run_as_nobody(&site, "crowd", [file, outer]));
    assert_eq!(site.check()["sessions_fenced"], 0);
}
