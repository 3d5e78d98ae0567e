//! The users that may have sessions, and the files that they may make longer.
//!
//! Each of these stories is that of an ordinary user of the machine that talks the protocol.

mod common;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ashlar_types::{FileKind, InodeId};
use ashlar_wire::{Connection, Hello, MountTerms, Reply, Request, SessionKind};
use common::{Client, Site, first_message, this_test};

/// The user and group `nobody`, and another one.
const NOBODY: u32 = 65534;
const OTHER: u32 = 1000;
/// The story of a user's process, and the socket that it uses.
const STORY: &str = "ASHLAR_TEST_STORY";
const SOCKET: &str = "ASHLAR_TEST_SOCKET";

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

#[test]
#[ignore = "this is a user's process, which another test starts"]
fn user_process() {
    let Some(socket) = std::env::var_os(SOCKET).map(PathBuf::from) else { return };
    let story = std::env::var(STORY).expect("a story");
    match story.split_once(' ').expect("two words") {
        ("beside", device) => {
            let beside = device.parse().expect("a number");
            let mut line = Connection::connect(&socket).expect("connected");
            let hello = Hello { beside, ..first_message(SessionKind::Process) };
            let said = match line.call::<_, Reply>(&Request::Hello(hello), &[]).expect("answered").0 {
                Reply::Welcome(_) => "welcome".to_owned(),
                Reply::Error(errno) => errno.symbol().to_owned(),
                Reply::Refused(_) => "refused".to_owned(),
                other => panic!("{other:?}"),
            };
            println!("said={said}");
        }
        ("grow", file) => grow(&socket, file),
        other => panic!("{other:?}"),
    }
}

/// Asks for a session as a user, beside a mount's device; returns the answer in a word.
fn ask(site: &Site, user: u32, beside: u64) -> String {
    let mut command = this_test("user_process");
    command.env(SOCKET, site.socket()).env(STORY, format!("beside {beside}")).uid(user).gid(user);
    let done = command.output().expect("run");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    text.lines().find_map(|line| line.split_once("said=")).map_or(text.clone(), |(_, said)| said.to_owned())
}

#[test]
fn user_that_is_not_admitted_gets_no_session() {
    if !common::may_change_users() {
        return;
    }
    let site = Site::admitting("user=1000,group=7");
    assert_eq!([0, OTHER, 7, NOBODY].map(|user| ask(&site, user, 0)), ["welcome", "welcome", "welcome", "EPERM"]);
}

/// A mount made for reading only bound the kernel, and no session.
#[test]
fn sessions_by_a_mount_are_on_its_terms() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::admitting("root");
    let register = |device, terms: &str, read_only| {
        let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
        let (fuse, kernel) = UnixStream::pair().expect("a device");
        let terms = MountTerms { read_only, sessions: terms.parse().expect("an admission") };
        let reply = mount.line.call(&Request::RegisterMount { device, terms }, &[fuse.as_fd()]).expect("answered").0;
        assert!(matches!(reply, Reply::Done));
        (mount, kernel)
    };
    let _mounts = [register(77, "user=65534", false), register(78, "all", true)];
    let check = |site: &Site| {
        for (user, beside, answer) in [
            (NOBODY, 77, "welcome"),
            (OTHER, 77, "EPERM"),
            (NOBODY, 0, "EPERM"),
            (NOBODY, 78, "EROFS"),
            (0, 78, "EROFS"),
            (0, 77, "welcome"),
            (0, 79, "refused"),
        ] {
            assert_eq!(ask(site, user, beside), answer, "user {user} by {beside}");
        }
    };
    check(&site);
    site.kill();
    site.start();
    // The mounts' processes have not returned yet.
    check(&site);
}

/// Makes a file of its own session longer, and keeps it so after the session has ended.
fn grow(socket: &std::path::Path, file: &str) {
    let mut client = Client::open(socket);
    let grown = if file == "log" { client.log_file.try_clone() } else { client.control_file.try_clone() };
    let grown = std::fs::File::from(grown.expect("a copy"));
    let length = grown.metadata().expect("a length").len();
    rustix::io::pwrite(&grown, &[1; 4096], length + (8 << 20)).expect("written");
    wait_cut(&grown, length);
    client.wait_fenced();
    drop(client);
    for _ in 0..3 {
        rustix::io::pwrite(&grown, &[1; 4096], length).expect("written");
        wait_cut(&grown, length);
    }
}

/// Waits until SharedFS has cut a file to its length.
fn wait_cut(grown: &std::fs::File, length: u64) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while grown.metadata().expect("a length").len() > length {
        assert!(Instant::now() < deadline, "the file stays longer than it was");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The log's and the control page's descriptors were writable without end.
#[test]
fn session_file_made_longer_is_cut_and_fences() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let mut honest = Client::open(&site.socket());
    honest.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    for (done, file) in ["log", "control"].into_iter().enumerate() {
        let mut command = this_test("user_process");
        command.env(SOCKET, site.socket()).env(STORY, format!("grow {file}")).uid(NOBODY).gid(NOBODY);
        assert!(command.status().expect("run").success(), "{file}");
        assert_eq!(site.check()["sessions_fenced"], done as u64 + 1, "{file}");
    }
    honest.make(InodeId::ROOT, b"file", FileKind::Regular);
    assert!(honest.lookup(InodeId::ROOT, b"file").expect("served").is_some());
}

/// A log that grew while no SharedFS ran was taken for a longer log.
#[test]
fn session_file_grown_during_a_restart_is_cut() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let before = client.make(InodeId::ROOT, b"before", FileKind::Regular);
    site.kill();
    let lengths =
        || [&client.log_file, &client.control_file].map(|file| rustix::fs::fstat(file).unwrap().st_size as u64);
    let made = lengths();
    for (file, length) in [&client.log_file, &client.control_file].into_iter().zip(made) {
        rustix::fs::ftruncate(file, length + (1 << 20)).expect("longer");
    }
    site.start();
    assert_eq!(lengths(), made);
    let socket = site.socket();
    client.resume(&socket);
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    assert_eq!(client.lookup(InodeId::ROOT, b"before"), Ok(Some(before)));
    assert_eq!(site.check()["sessions_fenced"], 0);
}

/// A process that keeps the logs of its ended sessions is refused further ones.
#[test]
fn user_that_keeps_ended_sessions_files_is_refused() {
    if !common::may_change_users() {
        return;
    }
    let site = Site::new(64 << 20);
    let mut command = this_test("hoarding_process");
    command.env(SOCKET, site.socket()).uid(NOBODY).gid(NOBODY);
    assert!(command.status().expect("run").success());
    assert_eq!(ask(&site, OTHER, 0), "welcome", "another user has sessions");
    assert_eq!(ask(&site, NOBODY, 0), "welcome", "the process has ended");
}

#[test]
#[ignore = "this is a user's process, which another test starts"]
fn hoarding_process() {
    let Some(socket) = std::env::var_os(SOCKET).map(PathBuf::from) else { return };
    let mut kept = Vec::new();
    let refused = loop {
        assert!(kept.len() < 200, "no session was refused");
        match common::hello(&socket, SessionKind::Process, None).expect("answered") {
            (mut line, Reply::Welcome(_), files) => {
                let reply: Result<(Reply, _), _> = line.call(&Request::Goodbye, &[]);
                assert!(matches!(reply.expect("answered").0, Reply::Done));
                kept.push(files);
            }
            (_, Reply::Refused(sentence), _) => break sentence,
            (_, other, _) => panic!("{other:?}"),
        }
    };
    assert!(refused.contains("keep the files of ended sessions"), "{refused}");
    assert_eq!(kept.len(), 64);
    // The log of a session that has ended.
    let log = std::fs::File::from(kept.swap_remove(0).swap_remove(0));
    let length = log.metadata().expect("a length").len();
    rustix::io::pwrite(&log, &[1; 4096], length).expect("written");
    wait_cut(&log, length);
}
