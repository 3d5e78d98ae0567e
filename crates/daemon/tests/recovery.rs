//! Recovery after a loss of power judges records that no SharedFS has seen.
//!
//! A session can write any record to its log's file. While it lives, SharedFS reads no record behind the log's tail.
//! After a loss of power, recovery takes every whole one.

mod common;

use ashlar_types::{Contents, Errno, FileKind, InodeId, LogPosition, QuotaId, SessionId, Timestamp};
use ashlar_update::{Allocation, Create, Rename, SetAttributes, Update, Whiteout};
use common::{Client, NOW, Site, create};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const NOBODY: u32 = 65534;
/// The highest offset of a byte in a file, and one more.
const OFFSET_END: u64 = 1 << 63;

/// An arena with a directory that all users may write, and a session that has made a file there.
struct Planting {
    site: Site,
    session: Client,
    directory: InodeId,
    honest: InodeId,
}

impl Planting {
    fn new() -> Self {
        let mut planting = {
            let site = Site::new(64 << 20);
            let session = Client::open(&site.socket());
            Self { site, session, directory: InodeId::ROOT, honest: InodeId::ROOT }
        };
        let mut root = Client::open(&planting.site.socket());
        root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        planting.directory = root.inode();
        let made = create(planting.directory, InodeId::ROOT, b"all", FileKind::Directory);
        root.append(&Update::Create(Create { mode: 0o777, ..made }));
        root.digest().expect("digested");
        planting.begin_honestly();
        planting
    }

    /// Begins another session, which makes a file.
    fn begin_honestly(&mut self) {
        self.session = Client::open(&self.site.socket());
        self.session.acquire(&[(self.directory, true)]).expect("granted");
        self.honest = self.session.inode();
        let name = format!("honest-{}", self.honest);
        let made = create(self.honest, self.directory, name.as_bytes(), FileKind::Regular);
        self.session.append(&Update::Create(Create { uid: NOBODY, gid: NOBODY, ..made }));
        self.session.digest().expect("digested");
    }

    /// Simulates a loss of power, and starts SharedFS again.
    ///
    /// Behind its honest records, the ordinary user's log then has this one.
    fn lose_power_with(&mut self, planted: &Update<'_>) {
        self.site.kill();
        self.session.append_unpaid(planted).expect("appended");
        self.site.age_as(self.session.welcome.peer.session, NOBODY);
        self.site.start();
    }

    /// Checks that the honest record is there, nothing else was made, and an honest session goes on.
    fn check(&mut self, story: &str) {
        let mut root = Client::open(&self.site.socket());
        let honest = format!("honest-{}", self.honest);
        assert_eq!(root.lookup(self.directory, honest.as_bytes()), Ok(Some(self.honest)), "{story}");
        assert_eq!(root.lookup(self.directory, b"planted"), Ok(None), "{story}");
        root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
        for n in 0..20u32 {
            root.make(InodeId::ROOT, format!("{story}-{n}").as_bytes(), FileKind::Regular);
        }
        root.digest().expect("an honest session goes on");
        let counters = self.site.check();
        assert_eq!((counters["logs_cut"], counters["sessions_fenced"]), (1, 0), "{story}");
    }
}

#[test]
fn planted_inode_numbers_end_their_log() {
    let mut planting = Planting::new();
    let mut other = Client::open(&planting.site.socket());
    let foreign = other.inode();
    for number in [u64::MAX, u64::MAX - 1, 1 << 63, 1 << 48, (1 << 48) - 1, 1, foreign.0, foreign.0 + (1 << 19)] {
        let made = create(InodeId(number), planting.directory, b"planted", FileKind::Regular);
        let planted = Update::Create(Create { uid: NOBODY, gid: NOBODY, ..made });
        planting.lose_power_with(&planted);
        planting.check(&format!("number {number}"));
        planting.begin_honestly();
    }
}

#[test]
fn planted_reservation_takes_no_more_than_credit() {
    let mut planting = Planting::new();
    // The second one has room in the arena.
    for length in [1 << 40, 40 << 20] {
        let inode = planting.honest;
        let how = Allocation::Reserve;
        planting.lose_power_with(&Update::Allocate { inode, how, offset: 0, length, strip: false, at: NOW });
        let mut root = Client::open(&planting.site.socket());
        let found = root.acquire(&[(inode, false)]).expect("granted");
        let state = &found[0].state;
        assert_eq!((state.attributes.size, state.attributes.blocks), (0, 0), "{:?}", state.contents);
        planting.check(&format!("{length} bytes"));
        planting.begin_honestly();
    }
}

#[test]
fn honest_records_survive_loss_of_power_with_their_credit() {
    let mut planting = Planting::new();
    let session = &mut planting.session;
    let mut made = Vec::new();
    for n in 0..600u32 {
        let inode = session.inode();
        let name = format!("more-{n}");
        let new = create(inode, planting.directory, name.as_bytes(), FileKind::Regular);
        session.append(&Update::Create(Create { uid: NOBODY, gid: NOBODY, ..new }));
        session.append(&Update::Write { inode, offset: 0, at: NOW, strip: false, data: &[7; 5000] });
        if n == 300 {
            session.digest().expect("digested");
        }
        made.push((name, inode));
    }
    planting.site.kill();
    planting.site.age_as(session.welcome.peer.session, NOBODY);
    planting.site.start();
    let mut root = Client::open(&planting.site.socket());
    for (name, inode) in made {
        assert_eq!(root.lookup(planting.directory, name.as_bytes()), Ok(Some(inode)));
    }
    let counters = planting.site.check();
    assert_eq!((counters["logs_cut"], counters["sessions_fenced"]), (0, 0));
}

/// Returns updates of all kinds with values at the ends of their ranges.
fn extreme_updates(planting: &Planting) -> Vec<Update<'static>> {
    let (inode, parent, own) = (planting.honest, planting.directory, planting.session.welcome.peer.session);
    let (last, far) = (OFFSET_END - 1, LogPosition(u64::MAX));
    let (none, name, release, strip) = (InodeId(u64::MAX), &b"planted"[..], true, true);
    let at = Timestamp { seconds: i64::MAX, nanoseconds: 999_999_999 };
    let whiteout = Some(Whiteout { inode: none, uid: NOBODY, gid: NOBODY, acl_access: &[] });
    let (mode, id, time) = (Some(0o7777), Some(u32::MAX), Some(at));
    let mut updates = vec![
        Update::Write { inode, offset: last - 9, at, strip, data: b"far" },
        Update::Write { inode: none, offset: 0, at, strip, data: b"x" },
        Update::Resize { inode, size: last, strip, at },
        Update::Resize { inode: none, size: last, strip, at },
        Update::Link { inode: none, parent, name, at },
        Update::Link { inode, parent: none, name, at },
        Update::Unlink { inode: none, parent, name, release, at },
        Update::RemoveDirectory { inode: none, parent: none, name, release, at },
        Update::Release { inode: none },
        Update::Accessed { inode: none, at },
        Update::SetQuota { inode, at, quota: QuotaId(u64::MAX) },
        Update::Depend { session: SessionId(u64::MAX), position: far },
        Update::Depend { session: own, position: far },
        Update::SetAttributes(SetAttributes { inode, mode, uid: id, gid: id, accessed: time, modified: time, at }),
        Update::Rename(Rename {
            parent,
            name,
            inode: none,
            new_parent: none,
            new_name: name,
            target: Some(none),
            exchange: false,
            whiteout,
            release,
            at,
        }),
    ];
    for how in Allocation::ALL {
        let ranges = [(0, last), (last, last), (last, 1), (4096, last / 4096 * 4096), (0, 1 << 62)];
        updates.extend(ranges.map(|(offset, length)| Update::Allocate { inode, how, offset, length, strip, at }));
    }
    updates
}

/// Values at the ends of their ranges stop no start, and reach no other session.
#[test]
fn planted_extreme_values_stop_no_start() {
    let mut planting = Planting::new();
    for n in 0..extreme_updates(&planting).len() {
        let planted = extreme_updates(&planting).swap_remove(n);
        planting.lose_power_with(&planted);
        let mut root = Client::open(&planting.site.socket());
        root.acquire(&[(planting.directory, true)]).expect("granted");
        root.make(planting.directory, format!("after-{n}").as_bytes(), FileKind::Regular);
        assert!(root.digest().is_ok(), "{planted:?}: an honest session goes on");
        planting.site.check();
        planting.begin_honestly();
    }
}

/// Records that the super-user's depend on come first, and forged ones behind them last.
#[test]
fn planted_name_is_not_taken_from_root() {
    let mut planting = Planting::new();
    let mut root = Client::open(&planting.site.socket());
    // An honest record that is not committed, on which the super-user's depend.
    let session = &mut planting.session;
    session.acquire(&[(planting.directory, true)]).expect("granted");
    let first = session.inode();
    let made = create(first, planting.directory, b"first", FileKind::Regular);
    session.append(&Update::Create(Create { uid: NOBODY, gid: NOBODY, ..made }));
    let (_, dependencies) = root.acquire_with(&[(planting.directory, true), (first, true)]).expect("granted");
    for (session, position) in dependencies {
        root.append(&Update::Depend { session, position });
    }
    root.append(&Update::Write { inode: first, offset: 0, at: NOW, strip: false, data: b"by root" });
    let precious = root.make(planting.directory, b"precious", FileKind::Regular);
    let forged = planting.session.inode();
    planting.site.kill();
    let made = create(forged, planting.directory, b"precious", FileKind::Regular);
    let planted = Update::Create(Create { uid: NOBODY, gid: NOBODY, ..made });
    planting.session.append_unpaid(&planted).expect("appended");
    let roots = root.welcome.peer.session;
    assert!(planting.session.welcome.peer.session < roots, "the forged log would come first");
    planting.site.age_as(planting.session.welcome.peer.session, NOBODY);
    planting.site.age(roots);
    planting.site.start();
    let mut honest = Client::open(&planting.site.socket());
    assert_eq!(honest.lookup(planting.directory, b"precious"), Ok(Some(precious)));
    assert_eq!(honest.lookup(planting.directory, b"first"), Ok(Some(first)));
    let found = honest.acquire(&[(first, false)]).expect("granted");
    assert!(matches!(&found[0].state.contents, Some(Contents::Inline(bytes)) if bytes == b"by root"), "{found:?}");
    assert!(!planting.site.arena().join(format!("sessions/fenced-{roots}.log")).exists());
    assert_eq!(planting.site.check()["sessions_fenced"], 1, "that of the forged record");
    assert_eq!(honest.acquire(&[(forged, false)]).err(), Some(Errno::ESTALE));
}
