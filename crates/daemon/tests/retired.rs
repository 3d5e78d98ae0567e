//! Retired sessions, whose files later sessions take over.

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ashlar_pmem::Persistent;
use ashlar_types::{Errno, FileKind, InodeId, SessionId};
use ashlar_update::{SetAttributes, Update};
use ashlar_wire::{LeaseWord, Peer, Reply, Request, SessionKind};
use common::{Client, NOW, Site};

/// The writes of a session: so many, so many bytes each, of this value.
const WRITES: usize = 48;
const BYTES: usize = 16 << 10;
const FILL: u8 = 0xee;
/// A mode that the root does not have from the beginning.
const NEW_MODE: u32 = 0o711;
/// More than a log has room for from the beginning.
const MANY: u64 = 512 << 10;

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// Opens a session that has written much.
fn open_large(site: &Site, name: &str) -> Client {
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

fn inode_of(file: &File) -> u64 {
    file.metadata().expect("known").ino()
}

/// Returns the logs that take more memory than a new one.
///
/// They are names of files in the arena, with their inodes.
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

/// Opens sessions until one has the number of a session that has ended.
fn reopen_session(site: &Site, number: SessionId) -> Client {
    site.await_prepared_of(number);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let next = Client::open(&site.socket());
        if next.welcome.peer.session == number {
            return next;
        }
        assert!(Instant::now() < deadline, "no session takes over session {number}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ends a session, and waits until it's over.
///
/// A process that another test starts meanwhile would hold this session's files, and no session takes files over that a
/// process holds.
fn close_session(site: &Site, mut client: Client) -> Peer {
    let _guard = common::block_process_starts();
    client.call(&Request::Goodbye).expect("answered");
    let peer = client.welcome.peer;
    drop(client);
    wait_for("it is over", || !site.status().sessions.iter().any(|other| other.session == peer.session));
    peer
}

#[test]
fn reused_session_goes_on_in_log_and_keeps_nothing_else() {
    let mut site = Site::new(64 << 20);
    let first = open_large(&site, "first");
    let (log, handle) = (inode_of(&file_of(&first)), InodeId(77));
    assert!(first.control.open_handle(handle));
    let (end, before) = (first.log.tail(), close_session(&site, first));
    let mut second = reopen_session(&site, before.session);
    assert_eq!(inode_of(&file_of(&second)), log);
    assert!(second.log.tail() >= end, "its log begins anew");
    assert_eq!(second.log.head(), second.log.tail());
    assert_ne!(second.welcome.peer.token, before.token);
    assert!(!second.control.has_open(handle), "its predecessor's handle is open");
    assert!((0..64).all(|slot| second.leases.word(slot) == LeaseWord::default()), "it has its predecessor's leases");
    // The old session is unknown.
    let (_, reply, _) = common::hello(&site.socket(), SessionKind::Process, Some(before)).expect("answered");
    assert!(matches!(reply, Reply::Error(Errno::ESTALE)), "{reply:?}");
    // It is a session like any other, up to the end of its room, and beyond.
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

/// A log goes round several times, though each of its sessions was short.
#[test]
fn log_reused_by_many_sessions_loses_and_repeats_nothing() {
    const SESSIONS: usize = 60;
    let mut site = Site::new(64 << 20);
    let (mut numbers, mut tail, mut ring) = (BTreeSet::new(), 0, 0);
    for n in 0..SESSIONS {
        let client = open_large(&site, &format!("{n}"));
        numbers.insert(client.welcome.peer.session);
        (tail, ring) = (client.log.tail().0.max(tail), client.log.capacity());
        if n % 20 == 10 {
            // It dies at this point, and SharedFS with it.
            site.kill();
            drop(client);
            site.start();
            continue;
        }
        let before = close_session(&site, client);
        site.await_prepared_of(before.session);
    }
    assert!(numbers.len() < SESSIONS / 4, "{numbers:?}");
    assert!(tail > ring, "the log has not gone round: {tail} of {ring}");
    let mut reader = Client::open(&site.socket());
    for n in 0..SESSIONS {
        let name = n.to_string();
        let inode = reader.lookup(InodeId::ROOT, name.as_bytes()).expect("answered").expect("it is there");
        let found = reader.acquire(&[(inode, false)]).expect("granted");
        assert_eq!(found[0].state.attributes.size, (WRITES * BYTES) as u64, "{n}");
    }
    site.check();
}

/// How many sessions another user opens. Their files replace none that are there.
const OTHERS: usize = 4;

/// Opens sessions as the user that runs it, and prints their numbers.
#[test]
#[ignore = "this is a process of another user, which another test starts"]
fn others_sessions() {
    let Some(socket) = std::env::var_os("ASHLAR_TEST_SOCKET").map(PathBuf::from) else { return };
    let clients: Vec<_> = (0..OTHERS).map(|_| Client::open(&socket)).collect();
    let numbers: Vec<_> = clients.iter().map(|client| client.welcome.peer.session.to_string()).collect();
    println!("sessions: {} .", numbers.join(" "));
}

#[test]
fn retired_session_passes_to_no_other_user() {
    if !common::may_change_users() {
        return;
    }
    let site = Site::new(64 << 20);
    let before = close_session(&site, open_large(&site, "first"));
    site.await_prepared_of(before.session);
    let mut other = common::this_test("others_sessions");
    std::os::unix::process::CommandExt::uid(&mut other, 12_345);
    let child = common::spawn(other.env("ASHLAR_TEST_SOCKET", site.socket()).stdout(std::process::Stdio::piped()));
    let output = String::from_utf8(child.wait_with_output().expect("run").stdout).expect("text");
    let sessions = output.split_once("sessions: ").unwrap_or_else(|| panic!("{output}")).1;
    assert_eq!(sessions.split_whitespace().take_while(|word| *word != ".").count(), OTHERS, "{output}");
    assert!(!sessions.split_whitespace().any(|word| word == before.session.to_string()), "{output}");
    assert_eq!(Client::open(&site.socket()).welcome.peer.session, before.session, "its own user has it");
}

#[test]
fn session_whose_files_are_held_is_not_reused() {
    let site = Site::new(64 << 20);
    let (log, mapped_log, control, mapped_control) = (0, 1, 2, 3);
    for what in [log, mapped_log, control, mapped_control] {
        let mut first = open_large(&site, &what.to_string());
        first.call(&Request::Goodbye).expect("answered");
        let (before, mut held) = (first.welcome.peer, Vec::<Box<dyn std::any::Any>>::new());
        let Client { log: ring, log_file, control: page, control_file, .. } = first;
        let all: [Box<dyn std::any::Any>; 4] =
            [Box::new(log_file), Box::new(ring), Box::new(control_file), Box::new(page)];
        held.extend(all.into_iter().enumerate().filter(|(n, _)| *n == what).map(|(_, one)| one));
        wait_for("its files are still there", || !site.has_files_of(before.session));
        let clients: Vec<_> = (0..8).map(|_| Client::open(&site.socket())).collect();
        assert!(clients.iter().all(|client| client.welcome.peer.session != before.session), "{what}");
        drop((held, clients));
    }
}

/// A session that truncates its log, or destroys it, harms only itself.
#[test]
fn session_whose_files_are_damaged_is_not_reused() {
    let mut site = Site::new(64 << 20);
    let spoilt: [fn(&Client); 4] = [
        |client| rustix::fs::ftruncate(&client.control_file, 8192).expect("cut"),
        |client| {
            let how = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&client.log_file, how, 16 << 10, 32 << 10).expect("punched");
        },
        |client| client.log.memory().store_u64(24, 1).expect("written"),
        |client| client.log.memory().store_u64(256, 8).expect("written"),
    ];
    for (n, spoil) in spoilt.into_iter().enumerate() {
        let mut first = Client::open(&site.socket());
        first.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        first.make(InodeId::ROOT, format!("{n}").as_bytes(), FileKind::Regular);
        first.digest().expect("digested");
        spoil(&first);
        let before = close_session(&site, first);
        wait_for("its files are still there", || !site.has_files_of(before.session));
        let next = Client::open(&site.socket());
        assert_ne!(next.welcome.peer.session, before.session, "{n}");
    }
    site.check();
}

/// After a power loss, a reused session may show its predecessor's table.
///
/// The session had no sync. Its log then ends before the first record that uses an inode number: no grant of that
/// number is left. Its lease table may also have no owner.
#[test]
fn reused_log_after_power_loss_ends_at_known_position() {
    for is_nobodys in [false, true] {
        let mut site = Site::new(64 << 20);
        let table = |client: &Client| site.arena().join(format!("sessions/{}.leases", client.welcome.peer.session));
        let mut first = Client::open(&site.socket());
        first.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        first.make(InodeId::ROOT, b"first", FileKind::Regular);
        let old = fs::read(table(&first)).expect("read");
        let before = close_session(&site, first);
        let mut second = reopen_session(&site, before.session);
        let written = table(&second);
        second.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        second.append(&Update::SetAttributes(SetAttributes {
            inode: InodeId::ROOT,
            mode: Some(NEW_MODE),
            uid: None,
            gid: None,
            accessed: None,
            modified: None,
            at: NOW,
        }));
        second.make(InodeId::ROOT, b"second", FileKind::Regular);
        let mut third = Client::open(&site.socket());
        let (_, dependencies) = third.acquire_with(&[(InodeId::ROOT, true)]).expect("granted");
        assert!(dependencies.iter().any(|(session, _)| *session == before.session), "{dependencies:?}");
        for (session, position) in dependencies {
            third.append(&Update::Depend { session, position });
        }
        third.make(InodeId::ROOT, b"third", FileKind::Regular);
        site.kill();
        let mut lost = old;
        if is_nobodys {
            lost[64..72].fill(0);
        }
        fs::write(&written, lost).expect("lost");
        let gone = [second, third].map(|client| client.welcome.peer.session);
        gone.into_iter().for_each(|session| site.age(session));
        site.start();
        let mut client = Client::open(&site.socket());
        let root = client.acquire(&[(InodeId::ROOT, false)]).expect("granted");
        let names: BTreeSet<_> = root[0].state.entries.iter().flatten().map(|entry| entry.name.to_vec()).collect();
        assert_eq!(names, BTreeSet::from([b"first".to_vec()]));
        assert_eq!(root[0].state.attributes.mode == NEW_MODE, !is_nobodys, "the record that uses no grant");
        let (counters, cut) = (site.check(), if is_nobodys { 1 } else { 2 });
        assert_eq!((counters["logs_cut"], counters["sessions_fenced"]), (cut, 0));
        close_session(&site, client);
        assert!(site.terminate(), "ended by a signal");
        assert!(!gone.iter().any(|session| site.has_files_of(*session)), "{gone:?}");
    }
}

#[test]
fn few_retired_sessions_are_kept_and_none_over_start() {
    let mut site = Site::new(64 << 20);
    let clients: Vec<_> = (0..6).map(|n| open_large(&site, &n.to_string())).collect();
    for client in clients {
        close_session(&site, client);
    }
    wait_for("sessions are there still", || site.status().sessions.is_empty() && large_logs(&site).len() <= 2);
    wait_for("none is kept", || !large_logs(&site).is_empty());
    site.kill();
    site.start();
    assert!(large_logs(&site).is_empty() && site.status().sessions.is_empty(), "a start removes them");
    close_session(&site, open_large(&site, "last"));
    assert!(site.terminate(), "ended by a signal");
    assert_eq!(fs::read_dir(site.arena().join("sessions")).expect("listed").count(), 0, "all are removed at the end");
}
