//! The state in which a restarted SharedFS finds sessions that go on.

mod common;

use std::time::{Duration, Instant};

use ashlar_node::sessions::identity::SESSION_VERSIONS;
use ashlar_types::{Contents, ExtentVersion, FileKind, InodeId, VersionRange};
use ashlar_update::Update;
use ashlar_wire::{CreditKind, LeaseWord, MountTerms, Reply, Request, SessionKind};
use common::{Client, NOW, Site};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

#[test]
fn killed_daemon_is_a_pause_for_its_sessions() {
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
        // Records that are logged while there is no SharedFS count as well.
        let file = made[made.len() - 1].1;
        client.append_unpaid(&Update::Accessed { inode: file, at: NOW }).expect("appended");
        site.start();
        client.resume(&site.socket());
        assert_eq!(client.control.extent_version(), ExtentVersion(u64::from(round) + 1));
    }
    assert!(!client.holds(&root[0]), "after a restart, sessions ask for all state again");
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

/// The program that made the files can still digest what they hold.
#[test]
fn session_of_other_versions_stops_start_unchanged() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    client.make(InodeId::ROOT, b"made", FileKind::Regular);
    site.kill();
    let (session, next) = (client.welcome.peer.session, SESSION_VERSIONS.current + 1);
    site.set_versions(session, VersionRange::new(next, next + 2));
    let files = || {
        let read = |kind| std::fs::read(site.arena().join(format!("sessions/{session}.{kind}"))).expect("read");
        ["log", "control", "leases"].map(read)
    };
    let before = files();
    let complaints = site.start_refused();
    let sentence =
        format!("session {session} have format versions {next} to {}, this program reads {SESSION_VERSIONS}", next + 2);
    assert!(complaints.contains(&sentence), "{complaints}");
    assert!(files() == before, "a refused start changes no file of a session");
    site.set_versions(session, VersionRange::new(SESSION_VERSIONS.current, next));
    site.start();
    client.resume(&site.socket());
    let mut other = Client::open(&site.socket());
    assert!(other.lookup(InodeId::ROOT, b"made").expect("answered").is_some(), "it was in the log alone");
    site.check();
}

#[test]
fn write_to_unnamed_file_is_honest_after_restart() {
    let mut site = Site::new(64 << 20);
    let (mut one, mut two) = (Client::open(&site.socket()), Client::open(&site.socket()));
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = one.make(InodeId::ROOT, b"f", FileKind::Regular);
    let committed = one.digest().expect("digested");
    assert!(two.control.open_handle(file));
    one.acquire(&[(InodeId::ROOT, true), (file, true)]).expect("granted");
    one.append(&Update::Unlink { inode: file, parent: InodeId::ROOT, name: b"f", release: true, at: NOW });
    let (found, dependencies) = two.acquire_with(&[(file, true)]).expect("open, so it is there without a name");
    assert_eq!(found[0].state.attributes.links, 0);
    for (session, position) in dependencies {
        two.append(&Update::Depend { session, position });
    }
    two.append(&Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: b"late" });
    two.control.close_handle(file);
    site.kill();
    assert_eq!(one.control.committed(), committed, "the rest is in the logs alone");
    site.start();
    for client in [&mut one, &mut two] {
        client.resume(&site.socket());
        assert!(client.digest().is_ok(), "an honest session goes on");
    }
    assert_eq!(one.lookup(InodeId::ROOT, b"f"), Ok(None));
    let is_gone = (0..300).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        one.acquire(&[(file, false)]).is_err()
    });
    assert!(is_gone, "no session has it open, and still it is there");
    site.check();
}

/// A thread that writes late, on a lease that was being taken at a kill, is honest.
///
/// The thread checks its lease, and is not scheduled again before it writes. Meanwhile the lease was taken. SharedFS
/// was killed before it sealed the log, and the next one has read the log by then.
#[test]
fn late_write_under_lease_taken_at_kill_is_not_fenced() {
    let mut site = Site::new(64 << 20);
    let mut client = Client::open(&site.socket());
    client.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = client.make(InodeId::ROOT, b"f", FileKind::Regular);
    client.digest().expect("digested");
    let granted = client.acquire(&[(file, true)]).expect("granted");
    client.credit(10_000, 16 << 20).expect("credit");
    let checked = client.log.seal_count();
    site.kill();
    let table = site.arena().join(format!("sessions/{}.leases", client.welcome.peer.session));
    let table = std::fs::File::options().write(true).open(table).expect("a lease table");
    let revoked = LeaseWord::revoked(LeaseWord(granted[0].word).generation() + 1).0;
    for (at, word) in [(2072, 1), (4096 + 16 * u64::from(granted[0].slot), revoked)] {
        rustix::io::pwrite(&table, &word.to_le_bytes(), at).expect("written");
    }
    let (began, begun) = std::sync::mpsc::channel();
    let written = std::thread::scope(|scope| {
        let late = scope.spawn(|| {
            let began = began;
            let deadline = Instant::now() + Duration::from_secs(20);
            for written in 1u64.. {
                let data = written.to_le_bytes();
                let update = Update::Write { inode: file, offset: 0, at: NOW, strip: false, data: &data };
                assert!(client.control.take_credit(update.cost().into(), CreditKind::Common).is_some());
                if client.append_at(checked, &update).is_err() {
                    return written - 1;
                }
                began.send(()).expect("the other thread goes on");
                assert!(Instant::now() < deadline, "the log is not sealed");
                std::thread::sleep(Duration::from_micros(200));
            }
            unreachable!("the numbers don't end")
        });
        begun.recv().expect("it writes");
        site.start();
        late.join().expect("no panic")
    });
    client.resume(&site.socket());
    client.digest().expect("an honest session goes on");
    let found = client.acquire(&[(file, false)]).expect("granted");
    let Some(Contents::Inline(bytes)) = &found[0].state.contents else { panic!("{:?}", found[0]) };
    assert_eq!(bytes[..], written.to_le_bytes(), "the last write is there");
    site.check();
}

/// A mount's kernel believes its cache for a while after a restart.
///
/// No SharedFS can notify it.
#[test]
fn grant_waits_for_mount_absent_after_restart() {
    use std::os::fd::AsFd;
    for comes_back in [false, true] {
        let mut site = Site::new(64 << 20);
        let mut mount = Client::open_as(&site.socket(), SessionKind::Mount);
        mount.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        let file = mount.make(InodeId::ROOT, b"file", FileKind::Regular);
        let mut other = Client::open(&site.socket());
        other.acquire(&[(InodeId::ROOT, false)]).expect("granted");
        mount.acquire(&[(file, true)]).expect("granted");
        let killed = Instant::now();
        site.kill();
        site.start();
        other.resume(&site.socket());
        std::thread::scope(|scope| {
            let changing = scope.spawn(|| other.acquire(&[(file, true)]).map(drop));
            if !comes_back {
                changing.join().expect("no panic").expect("granted");
                assert!(
                    killed.elapsed() >= Duration::from_secs(1),
                    "its kernel believes its cache from just before the kill"
                );
                return;
            }
            let (device, mut kernel) = std::os::unix::net::UnixStream::pair().expect("a device");
            mount.resume(&site.socket());
            let reply = mount
                .line
                .call(&Request::RegisterMount { device: 77, terms: MountTerms::default() }, &[device.as_fd()])
                .expect("answered")
                .0;
            assert!(matches!(reply, Reply::Done));
            changing.join().expect("no panic").expect("granted");
            kernel.set_nonblocking(true).expect("set");
            let notified = std::io::Read::read(&mut kernel, &mut [0; 40]);
            // The kernel is notified before any session may change anything, unless its cache has expired meanwhile.
            assert!(notified.is_ok() || killed.elapsed() >= Duration::from_secs(1), "{notified:?}");
        });
        site.check();
    }
}
