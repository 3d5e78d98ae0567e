//! Logs of sessions that are no more, which others go on with.

mod common;

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ashlar_types::{FileKind, InodeId};
use ashlar_update::Update;
use ashlar_wire::Request;
use common::{Client, NOW, Site};

/// What a session writes: so often, so many bytes, each this one.
const WRITES: usize = 48;
const BYTES: usize = 16 << 10;
const FILL: u8 = 0xee;
/// More than what a log has of room from the beginning.
const MANY: u64 = 512 << 10;

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// A session that has written much.
fn large(site: &Site, name: &str) -> Client {
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    client.call(&Request::LogSpace { bytes: 1 << 20 }).expect("room");
    let inode = client.make(InodeId::ROOT, name.as_bytes(), FileKind::Regular);
    for n in 0..WRITES {
        let offset = (n * BYTES) as u64;
        client.append(&Update::Write { inode, offset, at: NOW, strip: false, data: &[FILL; BYTES] });
    }
    client
}

fn file_of(client: &Client) -> File {
    File::from(client.log_file.as_fd().try_clone_to_owned().expect("a descriptor"))
}

fn number(file: &File) -> u64 {
    file.metadata().expect("known").ino()
}

/// The logs in the arena that have more memory than a new one: the names of their files, and their numbers.
fn large_logs(site: &Site) -> Vec<(String, u64)> {
    let logs = fs::read_dir(site.arena().join("sessions")).expect("listed").filter_map(|entry| {
        let path: PathBuf = entry.expect("an entry").path();
        // It may be gone by now.
        let metadata = fs::metadata(&path).ok()?;
        let is_large = path.extension()? == "log" && metadata.blocks() * 512 >= MANY;
        is_large.then(|| (path.file_name().expect("a name").to_string_lossy().into_owned(), metadata.ino()))
    });
    logs.collect()
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn the_next_session_goes_on_with_a_log_that_has_memory_and_finds_zeros_in_it() {
    let mut site = Site::new(64 << 20);
    let mut first = large(&site, "first");
    let log = number(&file_of(&first));
    first.call(&Request::Goodbye).expect("answered");
    drop(first);
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut second = loop {
        let next = Client::open(&site.socket());
        if number(&file_of(&next)) == log {
            break next;
        }
        assert!(Instant::now() < deadline, "nobody gets the log");
        std::thread::sleep(Duration::from_millis(5));
    };
    let file = file_of(&second);
    let content = fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("read");
    assert_eq!(content.len() as u64, second.welcome.log_bytes);
    assert!(!content.windows(8).any(|bytes| bytes == [FILL; 8]), "what another has written is there");
    // It is a log as any other, up to the end of the room that it has, and beyond.
    second.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    second.call(&Request::LogSpace { bytes: 2 << 20 }).expect("room");
    let inode = second.make(InodeId::ROOT, b"second", FileKind::Regular);
    for n in 0..2 * WRITES {
        let offset = (n * BYTES) as u64;
        second.append(&Update::Write { inode, offset, at: NOW, strip: false, data: &[n as u8; BYTES] });
    }
    site.kill();
    site.start();
    second.resume(&site.socket());
    let found = second.acquire(&[(inode, false)]).expect("granted");
    assert_eq!(found[0].state.attributes.size, (2 * WRITES * BYTES) as u64);
    site.check();
}

/// Opens sessions as whoever runs it, and says which logs they have.
#[test]
#[ignore = "this is a process of another user, which another test starts"]
fn others_logs() {
    let Some(socket) = std::env::var_os("ASHLAR_TEST_SOCKET").map(PathBuf::from) else { return };
    let clients: Vec<_> = (0..8).map(|_| Client::open(&socket)).collect();
    let numbers: Vec<_> = clients.iter().map(|client| number(&file_of(client)).to_string()).collect();
    println!("logs: {} .", numbers.join(" "));
}

#[test]
fn what_one_users_session_has_left_is_no_other_users() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let site = Site::new(64 << 20);
    let mut first = large(&site, "first");
    let log = number(&file_of(&first));
    first.call(&Request::Goodbye).expect("answered");
    drop(first);
    let is_blank =
        || site.status().sessions.is_empty() && large_logs(&site).iter().any(|(name, _)| !name.starts_with("spare-"));
    wait_for("nobody is to have the log", is_blank);
    let mut other = common::this_test("others_logs");
    std::os::unix::process::CommandExt::uid(&mut other, 12_345);
    let child = common::spawn(other.env("ASHLAR_TEST_SOCKET", site.socket()).stdout(std::process::Stdio::piped()));
    let told = String::from_utf8(child.wait_with_output().expect("run").stdout).expect("text");
    let logs = told.split_once("logs: ").unwrap_or_else(|| panic!("{told}")).1;
    assert_eq!(logs.split_whitespace().take_while(|word| *word != ".").count(), 8, "{told}");
    assert!(!logs.split_whitespace().any(|word| word == log.to_string()), "{told}");
    assert_eq!(number(&file_of(&Client::open(&site.socket()))), log, "its own user has it");
}

#[test]
fn a_log_that_somebody_holds_is_nobodys_any_more() {
    let site = Site::new(64 << 20);
    for only_mapped in [false, true] {
        let mut first = large(&site, &format!("first-{only_mapped}"));
        let log = number(&file_of(&first));
        first.call(&Request::Goodbye).expect("answered");
        let Client { log: mapped, log_file, .. } = first;
        let held: (Option<OwnedFd>, _) = if only_mapped { (None, Some(mapped)) } else { (Some(log_file), None) };
        wait_for("the log is still there", || !large_logs(&site).iter().any(|(_, ino)| *ino == log));
        let clients: Vec<_> = (0..8).map(|_| Client::open(&site.socket())).collect();
        assert!(clients.iter().all(|client| number(&file_of(client)) != log), "{only_mapped}");
        drop((held, clients));
    }
}

#[test]
fn few_are_kept_and_none_over_a_start() {
    let mut site = Site::new(64 << 20);
    let mut clients: Vec<_> = (0..6).map(|n| large(&site, &n.to_string())).collect();
    for client in &mut clients {
        client.call(&Request::Goodbye).expect("answered");
    }
    drop(clients);
    wait_for("sessions are there still", || site.status().sessions.is_empty() && large_logs(&site).len() <= 2);
    wait_for("none is kept", || !large_logs(&site).is_empty());
    site.kill();
    let spare = site.arena().join("sessions/spare-99.log");
    fs::write(&spare, "as of a daemon that was killed").expect("written");
    site.start();
    assert!(!spare.exists() && large_logs(&site).is_empty(), "a start removes them");
    let client = large(&site, "last");
    drop(client);
    assert!(site.terminate(), "told to end");
}
