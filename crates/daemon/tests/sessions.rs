//! Honest sessions: what they log is there for others, outlives every kill, and space comes back.

mod common;

use ashlar_types::{Errno, FileKind, InodeId};
use ashlar_update::Update;
use ashlar_wire::{Contents, Request};
use common::{Client, Site, NOW};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

fn inline(grant: &ashlar_wire::GrantReply) -> Vec<u8> {
    match grant.state.contents.clone() {
        Some(Contents::Inline(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_session_logs_and_reads_back_what_it_logged() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    let root = client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    assert_eq!(root[0].inode, InodeId::ROOT);
    assert!(client.holds(&root[0]));
    let file = client.make(InodeId::ROOT, b"file", FileKind::Regular);
    client.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"hello" });
    assert_eq!(client.lookup(InodeId::ROOT, b"file").expect("answered"), Some(file));
    assert_eq!(client.lookup(InodeId::ROOT, b"other").expect("answered"), None);
    let grants = client.acquire(&[(InodeId::ROOT, false), (file, true)]).expect("granted");
    assert_eq!(inline(&grants[1]), b"hello");
    assert_eq!(grants[0].state.entries.as_ref().map(Vec::len), Some(1));
    let end = client.log.tail();
    assert_eq!(client.digest().expect("digested"), end);
    assert_eq!(client.control.committed(), end);
    let counters = site.check();
    assert_eq!(counters["records_applied"], 2);
    assert!(matches!(client.call(&Request::Goodbye), Ok(ashlar_wire::Reply::Done)));
    assert!(site.status().sessions.is_empty());
    assert!(site.terminate(), "a daemon that is told to end does so with success");
    site.start();
    let mut client = Client::open(&site.socket());
    assert_eq!(client.lookup(InodeId::ROOT, b"file").expect("answered"), Some(file));
}

#[test]
fn a_killed_daemon_is_a_pause_for_its_sessions() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    let root = client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let mut made = Vec::new();
    for round in 0..6u32 {
        for n in 0..50u32 {
            let name = format!("{round}-{n}");
            made.push((name.clone(), client.make(InodeId::ROOT, name.as_bytes(), FileKind::Regular)));
        }
        if round % 2 == 0 {
            client.digest().expect("digested");
        }
        site.kill();
        // What is logged while nobody is there counts as well.
        let file = made[made.len() - 1].1;
        client.append_unpaid(&Update::Accessed { inode: file, at: NOW }).expect("appended");
        site.start();
        client.resume(&site.socket());
        assert_eq!(client.control.restarts(), u64::from(round) + 1);
    }
    assert!(!client.holds(&root[0]), "a restart has all state asked for again");
    let root = client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    assert_eq!(root[0].state.attributes.entries, 300);
    for (name, inode) in &made {
        assert_eq!(client.lookup(InodeId::ROOT, name.as_bytes()).expect("answered"), Some(*inode));
    }
    client.make(InodeId::ROOT, b"more", FileKind::Directory);
    client.digest().expect("digested");
    assert!(!client.control.is_fenced());
    site.check();
}

#[test]
fn what_a_dead_session_logged_is_digested_whether_or_not_the_daemon_lives() {
    for daemon_dies in [false, true] {
        let mut site = Site::new(64 << 20);
        let mut child = common::this_test("short_life");
        let mut child = child.env("ASHLAR_TEST_SOCKET", site.socket()).spawn().expect("a session's process");
        let done = site.directory.path().join("done");
        while !done.exists() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        if daemon_dies {
            site.kill();
        }
        child.kill().expect("killed");
        child.wait().expect("reaped");
        if daemon_dies {
            site.start();
        }
        let mut client = Client::open(&site.socket());
        // Whoever comes next finds it: its leases are gone, or its log is applied before they move.
        let grants = client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        assert_eq!(grants[0].state.attributes.entries, 20);
        while site.status().sessions.len() > 1 {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        assert_eq!(std::fs::read_dir(site.arena().join("sessions")).expect("listed").count(), 3);
        site.check();
    }
}

#[test]
#[ignore = "this is a session's process, which another test starts and kills"]
fn short_life() {
    let Some(socket) = std::env::var_os("ASHLAR_TEST_SOCKET").map(std::path::PathBuf::from) else { return };
    let mut client = Client::open(&socket);
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    for n in 0..20u32 {
        client.make(InodeId::ROOT, &n.to_le_bytes().map(|b| b'a' + b), FileKind::Regular);
    }
    std::fs::write(socket.with_file_name("done"), "").expect("told");
    std::thread::sleep(std::time::Duration::from_secs(100));
}

#[test]
fn a_lease_moves_with_everything_that_was_written_under_it() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    let mut grant = one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = one.make(InodeId::ROOT, b"file", FileKind::Regular);
    for n in 0..20u8 {
        let (writer, reader) = if n % 2 == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
        if n > 0 {
            grant = writer.acquire(&[(file, true)]).expect("granted");
        }
        let seal = writer.log.seal_count();
        let written = writer.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: &[n; 100] });
        // The way to a file goes through its directory.
        reader.acquire(&[(InodeId::ROOT, false)]).expect("granted");
        let (found, dependencies) = reader.acquire_with(&[(file, true)]).expect("granted");
        assert_eq!(inline(&found[0]), [n; 100]);
        let writer_id = writer.welcome.peer.session;
        assert!(
            dependencies.iter().any(|(session, position)| *session == writer_id && *position >= written.end),
            "the reader learns what it has seen: {dependencies:?}"
        );
        assert!(!writer.holds(&grant[0]) && reader.holds(&found[0]));
        // Who was about to write finds out.
        let late = Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"late" };
        assert!(writer.log.append(seal, late.kind() as u8, &late.encode().parts()).is_err());
        reader.append(&Update::Depend { session: writer_id, position: written.end });
    }
    one.digest().expect("digested");
    two.digest().expect("digested");
    assert!(!one.control.is_fenced() && !two.control.is_fenced());
    site.check();
}

#[test]
fn an_unlinked_file_lives_until_its_last_handle_is_closed() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = one.make(InodeId::ROOT, b"file", FileKind::Regular);
    one.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"still here" });
    two.acquire(&[(InodeId::ROOT, false)]).expect("granted");
    two.acquire(&[(file, false)]).expect("granted");
    assert!(two.control.open_handle(file));
    one.acquire(&[(InodeId::ROOT, true), (file, true)]).expect("granted");
    one.append(&Update::Unlink { inode: file, parent: InodeId::ROOT, name: b"file", release: true, at: NOW });
    assert_eq!(two.lookup(InodeId::ROOT, b"file").expect("answered"), None);
    let found = two.acquire(&[(file, false)]).expect("granted");
    assert_eq!(inline(&found[0]), b"still here");
    // The restart knows it too.
    site.kill();
    site.start();
    two.resume(&site.socket());
    one.resume(&site.socket());
    assert_eq!(inline(&two.acquire(&[(file, false)]).expect("granted")[0]), b"still here");
    assert!(two.control.close_handle(file));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while two.acquire(&[(file, false)]).err() != Some(Errno::ESTALE) {
        assert!(std::time::Instant::now() < deadline, "nobody frees the orphan");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(site.check()["orphans_freed"], 1);
}

#[test]
fn a_full_arena_refuses_the_call_that_asks_and_nothing_else() {
    let mut site = Site::new(16 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    // Credit that another session sits on is no space lost.
    two.credit(1000, 1000).expect("granted");
    let (mut files, data) = (Vec::new(), vec![7; 64 << 10]);
    let write = |file, offset| Update::Write { inode: file, offset, at: NOW, strip: false, data: &data };
    let full = loop {
        let name = format!("file-{}", files.len());
        let file = one.make(InodeId::ROOT, name.as_bytes(), FileKind::Regular);
        files.push((name, file));
        let cost = write(file, 0).cost();
        match one.credit(cost.blocks, cost.metadata_bytes) {
            Ok(_) => {
                one.append(&write(file, 0));
            }
            Err(errno) => break errno,
        }
    };
    assert_eq!(full, Errno::ENOSPC);
    let taken = 64 * (files.len() as u64 - 1) << 10;
    assert!(taken > 12 << 20, "the arena holds what it says: {taken} bytes of 16 MiB");
    let ashlar_wire::Reply::Space(space) = one.call(&Request::Space).expect("answered") else { panic!("no space") };
    assert!(space.blocks_free < 16 + 1000, "statfs agrees: {space:?}");
    for (name, file) in &files {
        one.append(&Update::Unlink { inode: *file, parent: InodeId::ROOT, name: name.as_bytes(), release: true, at: NOW });
    }
    one.make_room();
    two.credit(1500, 1000).expect("there is room again");
    assert!(!one.control.is_fenced() && !two.control.is_fenced());
    site.check();
}
