//! Honest sessions.
//!
//! Their updates show to other sessions and outlive every kill, and freed space returns.

mod common;

use std::time::{Duration, Instant};

use ashlar_log::AppendError;
use ashlar_types::{
    ByteRange, Contents, Errno, FileKind, InodeId, LockAction, LockKind, LockMode, LockedRange, LogPosition,
};
use ashlar_update::Update;
use ashlar_wire::{Credit, CreditKind, LeaseRequest, MountTerms, Need, Reply, Request};
use common::{Client, NOW, SessionsLeft, Site};

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
fn session_reads_back_its_records() {
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
    assert!(matches!(client.call(&Request::Goodbye), Ok(Reply::Done)));
    assert!(site.status().sessions.is_empty());
    assert!(site.terminate(), "a daemon that gets a signal to end does so with success");
    site.start();
    let mut client = Client::open(&site.socket());
    assert_eq!(client.lookup(InodeId::ROOT, b"file").expect("answered"), Some(file));
}

#[test]
fn extent_request_waits_for_no_digest_of_later_writes() {
    let site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = client.make(InodeId::ROOT, b"file", FileKind::Regular);
    let write = |offset: u64| Update::Write { inode: file, offset, at: NOW, strip: false, data: &[7; 8192] };
    client.append(&write(0));
    client.digest().expect("digested");
    let need = Need { contents: true, ..Need::default() };
    let want = LeaseRequest::on_inode(file, false, need);
    // The digest thread may be faster now and then.
    let is_ahead = (1..100).any(|number| {
        let end = client.append(&write(number * 8192)).body;
        let Ok(Reply::Granted { grants, applied, .. }) = client.call(&Request::Acquire(vec![want])) else {
            panic!("not granted");
        };
        assert_eq!(applied.0 > end.0, grants[0].state.attributes.size == (number + 1) * 8192, "both are of one time");
        applied.0 <= end.0
    });
    assert!(is_ahead, "each request waits until all is applied");
    // Other sessions see all of it, and so does a session that asks for more than extents.
    let all = client.acquire(&[(file, false)]).expect("granted")[0].state.attributes.size;
    let mut other = Client::open(&site.socket());
    assert_eq!(other.acquire(&[(file, false)]).expect("granted")[0].state.attributes.size, all);
    assert!(all > 8192 && all % 8192 == 0);
}

#[test]
fn leases_of_idle_session_expire_of_busy_session_stay() {
    let mut site = Site::with_lease_ttl(64 << 20, Some(500_000));
    let (mut busy, mut idle) = (Client::open(&site.socket()), Client::open(&site.socket()));
    busy.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let [mine, theirs] = [b"mine", b"them"].map(|name| busy.make(InodeId::ROOT, name, FileKind::Directory));
    busy.digest().expect("digested");
    let idle_grant = idle.acquire(&[(theirs, true)]).expect("granted");
    let file = idle.make(theirs, b"file", FileKind::Regular);
    let busy_grant = busy.acquire(&[(mine, true)]).expect("granted");
    let deadline = Instant::now() + Duration::from_secs(20);
    for n in 0u32.. {
        if !idle.holds(&idle_grant[0]) {
            break;
        }
        assert!(Instant::now() < deadline, "the idle session's lease does not expire");
        busy.make(mine, n.to_string().as_bytes(), FileKind::Regular);
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(busy.holds(&busy_grant[0]), "the busy session has lost its lease");
    // Records that the idle one logged before count, and it goes on from there.
    idle.acquire(&[(file, true)]).expect("granted");
    idle.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"late" });
    idle.digest().expect("digested");
    assert_eq!(inline(&busy.acquire(&[(file, false)]).expect("granted")[0]), b"late");
    site.check();
}

#[test]
fn log_of_dead_session_is_digested_also_after_restart() {
    for daemon_dies in [false, true] {
        let mut site = Site::new(64 << 20);
        let mut child = common::this_test("short_life");
        let mut child = common::spawn(child.env("ASHLAR_TEST_SOCKET", site.socket()));
        let done = site.directory.path().join("done");
        while !done.exists() {
            std::thread::sleep(Duration::from_millis(2));
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
        // The next session finds it: the dead one's leases are gone, or its log is applied before they move.
        let grants = client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        assert_eq!(grants[0].state.attributes.entries, 20);
        // The rest of its files loses its owner when its process is gone.
        let deadline = Instant::now() + Duration::from_secs(20);
        while site.status().sessions.len() > 1 || site.left().owned != 1 {
            assert!(Instant::now() < deadline, "there are {:?}", site.left());
            std::thread::sleep(Duration::from_millis(2));
        }
        site.check();
    }
}

/// As many sessions as SharedFS prepares.
const PREPARED: usize = 4;

#[test]
fn prepared_sessions_have_no_owner_until_taken() {
    let mut site = Site::new(64 << 20);
    assert_eq!(site.left(), SessionsLeft { owned: 0, prepared: 0 }, "no process has asked yet");
    let mut clients = vec![Client::open(&site.socket())];
    site.await_prepared_count(PREPARED);
    for n in 1..=PREPARED + 2 {
        let mut client = Client::open(&site.socket());
        assert!(clients.iter().all(|other| other.welcome.peer != client.welcome.peer), "each process gets its own");
        assert_eq!(client.log.tail(), LogPosition(0), "its log is empty");
        assert_eq!(client.control.committed(), LogPosition(0));
        client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        client.make(InodeId::ROOT, n.to_string().as_bytes(), FileKind::Regular);
        client.digest().expect("digested");
        clients.push(client);
    }
    site.await_prepared_count(PREPARED);
    assert_eq!(site.status().sessions.len(), clients.len(), "prepared sessions are not counted");
    site.kill();
    assert_eq!(site.left(), SessionsLeft { owned: clients.len(), prepared: PREPARED });
    site.start();
    assert_eq!(site.left(), SessionsLeft { owned: clients.len(), prepared: 0 }, "a start removes them");
    for client in &mut clients {
        client.resume(&site.socket());
    }
    assert_eq!(site.check()["sessions_opened"], 0);
    clients.push(Client::open(&site.socket()));
    site.await_prepared_count(PREPARED);
    drop(clients.pop().map(|mut client| client.call(&Request::Goodbye).expect("answered")));
    assert!(site.terminate(), "ended by a signal");
    assert_eq!(site.left(), SessionsLeft { owned: clients.len(), prepared: 0 }, "an end removes them");
}

#[test]
fn session_that_cannot_be_made_is_refused_with_reason() {
    let site = Site::new(64 << 20);
    let first = Client::open(&site.socket());
    site.await_prepared_count(PREPARED);
    let sessions = site.arena().join("sessions");
    // A directory in the place of the next sessions' files blocks them as a full disk does. The first session may have
    // a later number than some of those that were prepared after it asked.
    let number = first.welcome.peer.session.0;
    let paths = (number..number + 200).map(|number| sessions.join(format!("{}.log", ashlar_types::SessionId(number))));
    let in_the_way: Vec<_> = paths.filter(|path| !path.exists()).collect();
    for path in &in_the_way {
        std::fs::create_dir(path).expect("made");
    }
    let taken: Vec<_> = (0..PREPARED).map(|_| Client::open(&site.socket())).collect();
    let (_, reply, _) = common::hello(&site.socket(), ashlar_wire::SessionKind::Process, None).expect("answered");
    let Reply::Refused(why) = reply else { panic!("{reply:?}") };
    assert!(why.contains("no session can be made"), "{why}");
    for path in &in_the_way {
        std::fs::remove_dir(path).expect("removed");
    }
    let last = Client::open(&site.socket());
    site.await_prepared_count(PREPARED);
    drop((first, taken, last));
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
    std::fs::write(socket.with_file_name("done"), "").expect("written");
    std::thread::sleep(Duration::from_secs(100));
}

#[test]
fn moved_lease_shows_all_writes_under_it() {
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
        // The path to a file leads through its directory.
        reader.acquire(&[(InodeId::ROOT, false)]).expect("granted");
        let (found, dependencies) = reader.acquire_with(&[(file, true)]).expect("granted");
        assert_eq!(inline(&found[0]), [n; 100]);
        let writer_id = writer.welcome.peer.session;
        assert!(
            dependencies.iter().any(|(session, position)| *session == writer_id && *position >= written.end),
            "the reader learns what it has seen: {dependencies:?}"
        );
        assert!(!writer.holds(&grant[0]) && reader.holds(&found[0]));
        // A thread that was about to write notices.
        let late = Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"late" };
        assert!(writer.log.append(seal, late.kind() as u8, &late.encode().parts()).is_err());
        reader.append(&Update::Depend { session: writer_id, position: written.end });
    }
    one.digest().expect("digested");
    two.digest().expect("digested");
    assert!(!one.control.is_fenced() && !two.control.is_fenced());
    site.check();
}

/// It asks nothing of the writer, which goes on as if nothing had happened.
#[test]
fn fsync_commits_writes_of_other_session_and_moves_no_lease() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = one.make(InodeId::ROOT, b"file", FileKind::Regular);
    // Only its maker's log knows the inode.
    two.call(&Request::SyncInode { inode: file, dependencies: Vec::new() }).expect("synced");
    assert_eq!(one.control.committed(), one.log.tail(), "the maker's log was not committed");
    let grant = one.acquire(&[(file, true)]).expect("granted");
    let seal = one.log.seal_count();
    let written = one.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"hello" });
    two.call(&Request::SyncInode { inode: file, dependencies: Vec::new() }).expect("synced");
    assert!(one.control.committed() >= written.end, "the writer's log was not committed");
    assert!(one.holds(&grant[0]) && one.log.seal_count() == seal, "the writer lost its lease");
    let made = one.make(InodeId::ROOT, b"made", FileKind::Regular);
    two.call(&Request::SyncInode { inode: InodeId::ROOT, dependencies: Vec::new() }).expect("synced");
    assert_eq!(one.control.committed(), one.log.tail(), "the directory's entries were not committed");
    // Updates that another session has seen are applied; they must be committed, too.
    one.append(&Update::Write { inode: made, offset: 0, at: NOW, strip: false, data: b"hello" });
    let (_, dependencies) = two.acquire_with(&[(made, true)]).expect("granted");
    assert!(!dependencies.is_empty(), "nothing is to be committed");
    let mut three = Client::open(&site.socket());
    three.call(&Request::SyncInode { inode: made, dependencies: Vec::new() }).expect("synced");
    assert_eq!(one.control.committed(), one.log.tail(), "updates that another session saw were not committed");
    site.check();
}

#[test]
fn sync_commits_all_sessions_also_ended_ones() {
    let mut site = Site::new(64 << 20);
    let [mut one, mut two, mut left] = [(); 3].map(|()| Client::open(&site.socket()));
    for (client, name) in [(&mut one, b"one"), (&mut two, b"two"), (&mut left, b"lef")] {
        client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        client.make(InodeId::ROOT, name, FileKind::Regular);
    }
    left.call(&Request::Leave).expect("answered");
    two.call(&Request::SyncAll).expect("synced");
    for client in [&one, &two, &left] {
        assert_eq!(client.control.committed(), client.log.tail());
    }
    site.check();
}

#[test]
fn unlinked_file_lives_until_last_handle_is_closed() {
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
    // A restart knows it too.
    site.kill();
    site.start();
    two.resume(&site.socket());
    one.resume(&site.socket());
    assert_eq!(inline(&two.acquire(&[(file, false)]).expect("granted")[0]), b"still here");
    assert!(two.control.close_handle(file));
    let deadline = Instant::now() + Duration::from_secs(10);
    while two.acquire(&[(file, false)]).err() != Some(Errno::ESTALE) {
        assert!(Instant::now() < deadline, "the orphan is not freed");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(site.check()["orphans_freed"], 1);
}

#[test]
fn full_arena_refuses_only_requests_for_credit() {
    let mut site = Site::new(16 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    // Credit that another session holds is not lost.
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
    let taken = (files.len() as u64 - 1) * (64 << 10);
    assert!(taken > 12 << 20, "the arena holds what it says: {taken} bytes of 16 MiB");
    let Reply::Space(space) = one.call(&Request::Space { subtree: ashlar_types::QuotaId::NONE }).expect("answered")
    else {
        panic!("no space")
    };
    assert!(space.blocks_free < 16 + 1000, "statfs agrees: {space:?}");
    for (name, file) in &files {
        one.append(&Update::Unlink {
            inode: *file,
            parent: InodeId::ROOT,
            name: name.as_bytes(),
            release: true,
            at: NOW,
        });
    }
    let Reply::Space(space) = one.call(&Request::Space { subtree: ashlar_types::QuotaId::NONE }).expect("answered")
    else {
        panic!("no space")
    };
    assert!(space.blocks_free > 3000, "deleted files' blocks are free at once: {space:?}");
    one.make_room();
    two.credit(1500, 1000).expect("there is room again");
    assert!(!one.control.is_fenced() && !two.control.is_fenced());
    site.check();
}

fn lock(inode: InodeId, owner: u64, (first, last): (u64, u64), action: LockAction, wait: Option<u64>) -> Request {
    Request::Lock {
        inode,
        kind: LockKind::Record,
        owner,
        pid: 42,
        range: ByteRange::new(first, last),
        action,
        wait,
        slot: None,
    }
}

#[test]
fn locks_exclude_wait_cancel_and_outlive_daemon() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = one.make(InodeId::ROOT, b"locked", FileKind::Regular);
    one.digest().expect("digested");
    let held = lock(file, 1, (0, 9), LockAction::Write, None);
    one.call(&held).expect("locked");
    assert_eq!(two.call(&lock(file, 1, (5, 5), LockAction::Read, None)).err(), Some(Errno::EAGAIN));
    let query = Request::QueryLock {
        inode: file,
        kind: LockKind::Record,
        owner: 1,
        range: ByteRange::new(5, 20),
        action: LockAction::Write,
    };
    let Ok(Reply::Conflict(conflict)) = two.call(&query) else { panic!("no answer") };
    // A process has the number by which SharedFS knows it, and not the one that it sends.
    let locked = LockedRange { mode: LockMode::Write, range: ByteRange::new(0, 9) };
    assert_eq!(conflict, Some((locked, std::process::id())));
    // A cancelled wait ends, even if the cancellation arrives first.
    let mut side = two.attach(&site.socket());
    let waiter = std::thread::spawn(move || {
        let reply = two.call(&lock(file, 1, (5, 5), LockAction::Read, Some(8)));
        (two, reply)
    });
    assert!(matches!(side.call(&Request::CancelLock { ticket: 8 }, &[]).expect("answered").0, Reply::Done));
    let (mut two, reply) = waiter.join().expect("answered");
    assert_eq!(reply.err(), Some(Errno::EINTR));
    // After a restart the holder asks first, and a new request does not overtake it.
    site.kill();
    site.start();
    two.resume(&site.socket());
    let waiter = std::thread::spawn(move || {
        let reply =
            two.call(&Request::InodeRange).and_then(|_| two.call(&lock(file, 1, (5, 5), LockAction::Read, None)));
        (two, reply)
    });
    std::thread::sleep(Duration::from_millis(50));
    one.begin_to_resume(&site.socket());
    // It has not returned before it has asked for its locks, however long it pauses.
    std::thread::sleep(Duration::from_millis(500));
    one.call(&held).expect("it has its lock again");
    one.call(&Request::SyncDependencies(Vec::new())).expect("that was all");
    let (mut two, reply) = waiter.join().expect("answered");
    assert_eq!(reply.err(), Some(Errno::EAGAIN), "no other request came between");
    // A waiting session gets it when it's free.
    let waiter = std::thread::spawn(move || two.call(&lock(file, 1, (5, 5), LockAction::Read, Some(9))));
    one.call(&lock(file, 1, (0, u64::MAX), LockAction::Unlock, None)).expect("unlocked");
    assert!(waiter.join().expect("answered").is_ok());
}

/// Adds one to the number in `file`; returns the old number.
///
/// Other sessions do so at the same time.
fn increment(client: &mut Client, socket: &std::path::Path, file: InodeId) -> u64 {
    loop {
        let wants = vec![Client::want(file, true)];
        let reply = client.call_through(socket, &Request::Acquire(wants)).expect("granted");
        let Reply::Granted { grants, dependencies, .. } = reply else { panic!("{reply:?}") };
        let seal = client.log.seal_count();
        if !client.holds(&grants[0]) {
            continue;
        }
        let number = inline(&grants[0]).try_into().map(u64::from_le_bytes).expect("a number");
        let data = (number + 1).to_le_bytes();
        let write = Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: &data };
        let cost = Credit::from(write.cost());
        let Some(taken) = client.control.take_credit(cost, CreditKind::Common) else {
            client.call_through(socket, &Request::Credit { want: cost, replaces: false }).expect("credit");
            continue;
        };
        for (session, position) in dependencies {
            while client.append_unpaid(&Update::Depend { session, position }).is_err() {}
        }
        match client.log.append(seal, write.kind() as u8, &write.encode().parts()) {
            Ok(_) => return number,
            Err(ashlar_log::AppendError::Sealed) => client.control.give_back(&taken),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn no_increment_is_lost_while_daemon_is_killed_repeatedly() {
    const SESSIONS: u64 = 3;
    let mut site = Site::new(64 << 20);
    let mut first = Client::open(&site.socket());
    first.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = first.make(InodeId::ROOT, b"counter", FileKind::Regular);
    first.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: &[0; 8] });
    first.digest().expect("digested");
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let workers: Vec<_> = (0..SESSIONS)
        .map(|_| {
            let (stop, socket) = (std::sync::Arc::clone(&stop), site.socket());
            let mut client = Client::open(&socket);
            std::thread::spawn(move || {
                let (mut done, mut last) = (0u64, None);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let number = increment(&mut client, &socket, file);
                    assert!(last.is_none_or(|last| number > last), "time goes forward");
                    (done, last) = (done + 1, Some(number));
                    if client.log.used() > client.log.capacity() / 2 {
                        client.call_through(&socket, &Request::Digest).expect("digested");
                        client.log.release(client.control.committed());
                    }
                }
                assert!(!client.control.is_fenced());
                (done, client)
            })
        })
        .collect();
    for round in 0..12 {
        std::thread::sleep(Duration::from_millis(10 + 7 * round));
        site.kill();
        site.start();
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let ended: Vec<_> = workers.into_iter().map(|worker| worker.join().expect("worked")).collect();
    let done: u64 = ended.iter().map(|(done, _)| done).sum();
    first.resume(&site.socket());
    assert_eq!(increment(&mut first, &site.socket(), file), done);
    println!("{done} increments by {SESSIONS} sessions");
    assert!(done > 100);
    site.check();
}

#[test]
fn make_room_returns_when_that_much_is_committed() {
    const LAPS: u64 = 3;
    let mut site = Site::new(256 << 20);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = client.make(InodeId::ROOT, b"f", FileKind::Regular);
    let capacity = client.log.capacity();
    let (mut data, mut asked) = (vec![0; 64 << 10], 0);
    while client.log.tail().0 < LAPS * capacity {
        let block = client.log.tail().0 / data.len() as u64;
        data.fill(block as u8);
        let write = Update::Write { inode: file, offset: block % 64 * (64 << 10), at: NOW, strip: false, data: &data };
        client.pay(&write);
        while let Err(error) = client.append_unpaid(&write) {
            let AppendError::Full { needed } = error else { panic!("{error}") };
            let upto = client.control.committed().plus(needed.max(capacity / 4));
            let committed = client.committed_by(&Request::MakeRoom { upto }).expect("made");
            assert!(committed >= upto && client.control.committed() >= committed, "{committed:?} of {upto:?}");
            client.log.release(committed);
            client.control.set_released(committed);
            asked += 1;
        }
    }
    assert!(asked > 0, "the log was never full");
    let committed = client.control.committed();
    let again = client.committed_by(&Request::MakeRoom { upto: committed }).expect("there is room");
    assert!(again >= committed, "{again:?}");
    let all = client.committed_by(&Request::MakeRoom { upto: LogPosition(u64::MAX) }).expect("digested");
    assert_eq!(all, client.log.tail(), "there is no more than that");
    client.append_raw(99, &[b"no update"]).expect("appended");
    assert_eq!(client.committed_by(&Request::MakeRoom { upto: LogPosition(u64::MAX) }).err(), Some(Errno::EIO));
    assert!(client.control.is_fenced());
    site.check();
}

#[test]
fn wait_for_room_behind_forged_record_fails_at_once() {
    let site = Site::new(64 << 20);
    for _ in 0..3 {
        let mut client = Client::open(&site.socket());
        client.append_raw(99, &[b"no update"]).expect("appended");
        let upto = client.log.tail();
        client.append_raw(99, &[b"nor is this"]).expect("appended");
        let began = Instant::now();
        assert_eq!(client.committed_by(&Request::MakeRoom { upto }).err(), Some(Errno::EIO));
        assert!(began.elapsed() < Duration::from_millis(400), "{:?}", began.elapsed());
        assert!(client.control.is_fenced());
    }
}

/// Leaves a void slot at the end of the log.
///
/// It seals the log while an append of `client` is under way.
fn leave_void(client: &mut Client, file: InodeId) {
    let data = vec![7; 256 << 10];
    let write = Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: &data };
    let cost = Credit::from(write.cost());
    for attempt in 0..10_000u64 {
        let Some(taken) = client.control.take_credit(cost, CreditKind::Common) else {
            client.credit(4 * cost.blocks, 4 * cost.metadata_bytes).expect("credit");
            continue;
        };
        let (before, seal, encoded) = (client.log.tail(), client.log.seal_count(), write.encode());
        let appended = std::thread::scope(|scope| {
            let append = scope.spawn(|| client.log.append(seal, write.kind() as u8, &encoded.parts()).is_ok());
            std::thread::sleep(Duration::from_micros(attempt % 200));
            client.log.seal().expect("sealed");
            append.join().expect("no panic")
        });
        if !appended {
            client.control.give_back(&taken);
            if client.log.tail() > before {
                return;
            }
        }
        if client.log.used() > client.log.capacity() / 2 {
            client.make_room();
        }
    }
    panic!("no append was ever under way");
}

#[test]
fn logs_depending_across_void_slots_apply_after_restart() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    two.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = two.make(InodeId::ROOT, b"f", FileKind::Regular);
    leave_void(&mut two, file);
    two.digest().expect("digested");
    two.acquire(&[(InodeId::ROOT, true), (file, true)]).expect("granted");
    two.make(InodeId::ROOT, b"first", FileKind::Regular);
    two.acquire(&[(file, true)]).expect("granted");
    leave_void(&mut two, file);
    for (client, name) in [(&mut one, &b"second"[..]), (&mut two, b"third")] {
        let (_, dependencies) = client.acquire_with(&[(InodeId::ROOT, true)]).expect("granted");
        assert!(!dependencies.is_empty(), "the other session's updates are not committed yet");
        for (session, position) in dependencies {
            client.append(&Update::Depend { session, position });
        }
        client.make(InodeId::ROOT, name, FileKind::Regular);
    }
    // All of it is applied before the restart, which does not validate it again.
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    site.kill();
    site.start();
    for client in [&mut one, &mut two] {
        client.resume(&site.socket());
        assert!(client.digest().is_ok(), "an honest session goes on");
    }
    for name in [&b"first"[..], b"second", b"third"] {
        assert!(one.lookup(InodeId::ROOT, name).expect("asked").is_some());
    }
    assert_eq!(site.check()["logs_cut"], 0);
}

#[test]
fn records_depending_on_lost_update_are_cut_after_power_loss() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    one.make(InodeId::ROOT, b"kept", FileKind::Regular);
    let committed = one.digest().expect("digested");
    let inode = one.inode();
    let lost = one.append(&Update::Create(common::create(inode, InodeId::ROOT, b"lost", FileKind::Regular)));
    let (found, dependencies) = two.acquire_with(&[(InodeId::ROOT, true)]).expect("granted");
    assert_eq!(found[0].state.attributes.entries, 2);
    for (session, position) in dependencies {
        two.append(&Update::Depend { session, position });
    }
    two.make(InodeId::ROOT, b"built on it", FileKind::Regular);
    site.kill();
    assert_eq!(one.control.committed(), committed, "the second file is in the logs alone");
    // The machine goes down, and the first session's last page was never written.
    let ring_at = one.welcome.log_bytes - one.log.capacity();
    rustix::io::pwrite(&one.log_file, &[0; 64], ring_at + lost.position.0).expect("lost");
    [&one, &two].into_iter().for_each(|client| site.age(client.welcome.peer.session));
    site.start();
    let mut client = Client::open(&site.socket());
    let root = client.acquire(&[(InodeId::ROOT, false)]).expect("granted");
    let names: Vec<_> = root[0].state.entries.iter().flatten().map(|entry| entry.name.clone()).collect();
    assert_eq!(names, [b"kept"]);
    let counters = site.check();
    assert_eq!((counters["logs_cut"], counters["sessions_fenced"]), (1, 0));
    assert_eq!(site.status().sessions.len(), 1, "sessions from before the power loss are gone");
    assert!(
        common::hello(&site.socket(), ashlar_wire::SessionKind::Process, Some(one.welcome.peer))
            .is_ok_and(|(_, reply, _)| matches!(reply, Reply::Error(Errno::ESTALE)))
    );
}

/// A session may destroy its log while there is no SharedFS.
///
/// Others that work in a directory that it has just made lose what they did there, and nothing else.
#[test]
fn session_that_built_on_destroyed_log_goes_on() {
    let mut site = Site::new(64 << 20);
    let mut clients = [(); 3].map(|()| Client::open(&site.socket()));
    let [hostile, honest, reader] = &mut clients;
    hostile.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    hostile.digest().expect("digested");
    let began = hostile.log.tail();
    let directory = hostile.make(InodeId::ROOT, b"made by the hostile one", FileKind::Directory);
    let depend = |client: &mut Client, wanted: InodeId| {
        let (_, dependencies) = client.acquire_with(&[(wanted, true)]).expect("granted");
        assert!(!dependencies.is_empty(), "the other session's updates are not committed yet");
        for (session, position) in dependencies {
            client.append(&Update::Depend { session, position });
        }
    };
    depend(honest, directory);
    let inside = honest.make(directory, b"inside", FileKind::Directory);
    depend(reader, inside);
    reader.make(inside, b"deeper", FileKind::Regular);
    for (client, name) in [(&mut *honest, b"one"), (&mut *reader, b"two")] {
        depend(client, InodeId::ROOT);
        client.make(InodeId::ROOT, name, FileKind::Regular);
    }
    site.kill();
    let ring_at = hostile.welcome.log_bytes - hostile.log.capacity();
    rustix::io::pwrite(&hostile.log_file, &[0x55; 64], ring_at + began.0).expect("destroyed");
    site.start();
    assert!(hostile.control.is_fenced());
    for (client, name) in [(honest, b"one"), (reader, b"two")] {
        client.resume(&site.socket());
        assert!(client.digest().is_ok(), "an honest session goes on");
        assert!(client.lookup(InodeId::ROOT, name).expect("asked").is_some());
        assert_eq!(client.acquire(&[(inside, false)]).err(), Some(Errno::ESTALE));
        client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        client.make(InodeId::ROOT, format!("more {}", name[0]).as_bytes(), FileKind::Regular);
        assert!(client.digest().is_ok(), "its further records are taken");
    }
    assert_eq!(site.check()["sessions_fenced"], 1);
}

/// A start is cut after it has removed some of the sessions on which others depend.
#[test]
fn cut_records_stay_cut_in_any_order_of_removal() {
    let mut site = Site::new(64 << 20);
    let mut clients = [(); 3].map(|()| Client::open(&site.socket()));
    let mut first_lost = None;
    for (at, client) in clients.iter_mut().enumerate() {
        let (_, dependencies) = client.acquire_with(&[(InodeId::ROOT, true)]).expect("granted");
        for (session, position) in dependencies {
            client.append(&Update::Depend { session, position });
        }
        let inode = client.inode();
        let name = format!("file {at}");
        let create = common::create(inode, InodeId::ROOT, name.as_bytes(), FileKind::Regular);
        first_lost.get_or_insert(client.append(&Update::Create(create)).position);
    }
    site.kill();
    let one = &clients[0];
    let ring_at = one.welcome.log_bytes - one.log.capacity();
    let first_lost = first_lost.expect("appended");
    rustix::io::pwrite(&one.log_file, &[0; 64], ring_at + first_lost.0).expect("lost");
    let numbers = clients.each_ref().map(|client| client.welcome.peer.session);
    numbers.into_iter().for_each(|number| site.age(number));
    // The last one's files can't be removed: as if the machine stopped before.
    let kept = ["log", "leases", "control"].map(|kind| site.arena().join(format!("sessions/{}.{kind}", numbers[2])));
    let succeeds = |command: &str, args: &[&std::path::Path]| {
        std::process::Command::new(command).args(args).status().is_ok_and(|status| status.success())
    };
    if !kept.iter().all(|file| succeeds("mount", &["--bind".as_ref(), file, file])) {
        println!("skipped: only root can keep files from being removed");
        kept.iter().for_each(|file| _ = succeeds("umount", &[file]));
        return;
    }
    site.start();
    site.kill();
    assert!(kept.iter().all(|file| succeeds("umount", &[file])));
    assert_eq!(numbers.map(|session| site.has_files_of(session)), [false, false, true]);
    site.start();
    let mut client = Client::open(&site.socket());
    let root = client.acquire(&[(InodeId::ROOT, false)]).expect("granted");
    assert_eq!(root[0].state.attributes.entries, 0, "{:?}", root[0].state.entries);
    site.check();
    assert!(!site.has_files_of(numbers[2]));
}

#[test]
fn kernel_of_mount_is_notified_before_others_change_file() {
    use std::io::Read;
    use std::os::fd::AsFd;
    let mut site = Site::new(64 << 20);
    let mut mount = Client::open_as(&site.socket(), ashlar_wire::SessionKind::Mount);
    let (device, mut kernel) = std::os::unix::net::UnixStream::pair().expect("a device");
    let reply = mount
        .line
        .call(&Request::RegisterMount { device: 77, terms: MountTerms::default() }, &[device.as_fd()])
        .expect("answered")
        .0;
    assert!(matches!(reply, Reply::Done));
    mount.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = mount.make(InodeId::ROOT, b"file", FileKind::Regular);
    let mut other = Client::open(&site.socket());
    other.acquire(&[(InodeId::ROOT, false)]).expect("granted");
    mount.acquire(&[(file, true)]).expect("granted");
    let start = Instant::now();
    other.acquire(&[(file, true)]).expect("granted");
    assert!(start.elapsed() < Duration::from_millis(900), "a kernel that listens causes no delay");
    kernel.set_nonblocking(true).expect("set");
    let mut notifications = Vec::new();
    // All of it is there already, as the answer came later.
    let _ = kernel.read_to_end(&mut notifications);
    let mut inodes = Vec::new();
    while let Some((header, rest)) = notifications.split_at_checked(16) {
        let length = header[0] as usize - 16;
        if header[4] == 2 {
            inodes.push(rest[..8].try_into().map(u64::from_le_bytes).expect("an inode"));
        }
        notifications = rest[length..].to_vec();
    }
    assert!(inodes.contains(&file.0), "{inodes:?}");
    site.check();
}

/// Returns a file's content as SharedFS's segments have it.
fn read_file(site: &Site, file: InodeId) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let mut client = Client::open(&site.socket());
    let grants = client.acquire(&[(file, false)]).expect("granted");
    let state = &grants[0].state;
    let Some(Contents::Extents(extents)) = &state.contents else { panic!("{state:?}") };
    let mut content = vec![0; (state.attributes.size as usize).next_multiple_of(4096)];
    for extent in extents {
        let Some(address) = extent.address else { continue };
        let (reply, files) = client.line.call(&Request::Segment(address.segment()), &[]).expect("answered");
        let Reply::Segment(segment) = reply else { panic!("{reply:?}") };
        let start = extent.logical_block as usize * 4096;
        let end = (start + extent.blocks as usize * 4096).min(content.len());
        let at = segment.data_offset + u64::from(address.block()) * 4096;
        std::fs::File::from(files[0].try_clone().expect("cloned"))
            .read_exact_at(&mut content[start..end], at)
            .expect("read");
    }
    content.truncate(state.attributes.size as usize);
    content
}

#[test]
fn repeated_overwrites_are_coalesced() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = client.make(InodeId::ROOT, b"file", FileKind::Regular);
    for round in 0..1000u32 {
        let data = round.to_le_bytes().repeat(1024);
        client.append(&Update::Write { inode: file, offset: 4096, at: NOW, strip: false, data: &data });
    }
    client.append(&Update::Resize { inode: file, size: 4100, at: NOW, strip: false });
    let end = client.log.tail();
    assert_eq!(client.digest().expect("digested"), end, "records that are dropped are digested too");
    let counters = site.check();
    assert_eq!(counters["records_applied"], 1002);
    assert!(counters["coalesced_records"] > 900, "{counters:?}");
    assert!(counters["coalesced_bytes"] > 900 * 4096, "{counters:?}");
    let grants = client.acquire(&[(file, true)]).expect("granted");
    assert_eq!(grants[0].state.attributes.size, 4100);
    // The last logged content stands there, and the rest of the block is gone.
    client.append(&Update::Resize { inode: file, size: 4104, at: NOW, strip: false });
    assert!(matches!(client.call(&Request::Goodbye), Ok(Reply::Done)));
    let content = read_file(&site, file);
    assert_eq!(content[4096..], [999u32.to_le_bytes(), [0; 4]].concat());
    assert!(content[..4096].iter().all(|&byte| byte == 0));
}
