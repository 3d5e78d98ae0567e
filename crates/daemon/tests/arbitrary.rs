//! Arbitrary requests, descriptors and records of a hostile user's process.
//!
//! They cost that process its sessions. Meanwhile an honest session works and asks. The daemon must neither panic nor
//! end, and the arena must be sound afterwards.
//!
//! `ASHLAR_HOSTILE_CASES` sets their number, `ASHLAR_HOSTILE_SEED` the first of them; `make soak` runs a million each.

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use ashlar_libfs::WriteAt;
use ashlar_tests::random::Random;
use ashlar_types::{
    ByteRange, FileKind, InodeId, LeaseMode, LeaseScope, LockAction, LockKind, LogPosition, QuotaAmount, QuotaId,
    QuotaKey, SessionId, Timestamp, WantedLease,
};
use ashlar_update::{Allocation, Create, Rename, SetAttributes, Update, Whiteout};
use ashlar_wire::{
    Connection, Credit, LeaseRequest, LockSlot, MountTerms, Need, QuotaRequest, Reply, Request, SessionKind, WireError,
};
use common::libfs::{ROOT, connect, make};
use common::{Client, NOW, Site, create};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use serde::ser::{Serialize, SerializeTuple, Serializer};

const NOBODY: u32 = 65534;
/// Cases without the variable.
const CASES: u64 = 4000;
/// How long an answer may take, on a machine that does other work besides.
const ANSWER_MAX: Duration = Duration::from_secs(3);
/// How long the hostile process waits for an answer before it begins another session.
const SILENCE_MAX: Duration = Duration::from_millis(500);
/// Records that are logged before SharedFS is asked to apply them.
const RECORDS_IN_TURN: u64 = 8;

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

/// Draws numbers, and what is odd about messages, from a seed.
struct Dice(Random);

impl Dice {
    fn of_case(case: u64) -> Self {
        Self(Random::new(case))
    }

    fn next(&mut self) -> u64 {
        self.0.draw()
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Returns a number near an end of some range, or a small one.
    fn number(&mut self) -> u64 {
        let wide = self.next();
        match self.below(8) {
            0 => 0,
            1 => u64::MAX - wide % 3,
            2 => (1 << 63) + wide % 3,
            3 => u64::from(u32::MAX) + wide % 3,
            4 => 1 << (wide % 64),
            5 => wide,
            _ => wide % 10_000,
        }
    }

    /// Changes some bytes, or none.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.pick(&[0, 0, 0, 0, 0, 0, 1, 1, 2, 8]) {
            let (at, byte) = (self.below(bytes.len()), self.next() as u8);
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, byte),
                2 => bytes.extend((0..self.pick(&[1, 9, 300])).map(|_| byte)),
                3 if !bytes.is_empty() => bytes[at] ^= 1 << (byte % 8),
                4 if !bytes.is_empty() => bytes[at] = self.pick(&[0, 1, 0x7f, 0x80, 0xff]),
                _ if !bytes.is_empty() => bytes[at] = byte,
                _ => {}
            }
        }
    }
}

/// Bytes in the place of a message.
struct RawMessage<'a>(&'a [u8]);

impl Serialize for RawMessage<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(self.0.len())?;
        self.0.iter().try_for_each(|byte| tuple.serialize_element(byte))?;
        tuple.end()
    }
}

/// The inodes that the hostile process knows of: its own directory and file, and some of root's.
#[derive(Clone, Copy)]
struct Places {
    own: InodeId,
    file: InodeId,
    roots: InodeId,
    private: InodeId,
}

impl Places {
    fn inode(&self, dice: &mut Dice) -> InodeId {
        let known = [self.own, self.file, self.roots, self.private, InodeId::ROOT, InodeId::RENAME];
        if dice.below(8) == 0 { InodeId(dice.number()) } else { dice.pick(&known) }
    }

    fn request(&self, dice: &mut Dice) -> Request {
        let (inode, number, other) = (self.inode(dice), dice.number(), dice.number());
        let need = Need {
            contents: number & 1 != 0,
            entries: number & 2 != 0,
            children: number & 4 != 0,
            xattrs: number & 8 != 0,
        };
        let scope = dice.pick(&[LeaseScope::Node, LeaseScope::Files, LeaseScope::Subtree]);
        let lease = WantedLease { inode, mode: LeaseMode::new(other & 1 == 0), scope };
        let want = LeaseRequest { lease, need };
        let (kind, owner) = (dice.pick(&[LockKind::Record, LockKind::Flock]), dice.number());
        let (range, action) = (
            ByteRange::new(dice.number(), dice.number()),
            dice.pick(&[LockAction::Read, LockAction::Write, LockAction::Unlock]),
        );
        let slot = (other & 2 != 0).then_some(LockSlot { number: number as u32, word: other });
        let dependencies = vec![(SessionId(number % 9), LogPosition(other)); (other % 20) as usize];
        match dice.below(24) {
            0 => Request::Acquire(vec![want; 1 + (other % 40) as usize]),
            1 | 2 => {
                let lease = WantedLease { inode: self.inode(dice), ..lease };
                Request::Acquire(vec![want, LeaseRequest { lease, need }])
            }
            3 => {
                let name = dice.pick(&[&b"file"[..], b"private", b"a/b", b"", b".."]).to_vec();
                let within = (other & 4 != 0).then_some(want);
                Request::Lookup { directory: inode, name, within, makes: other & 8 != 0, write: other & 16 != 0, need }
            }
            4 => Request::ReadDirectory { directory: inode, after: number, limit: other as u32 },
            5 => Request::InodeRange,
            6 => Request::Credit {
                want: Credit { blocks: number, metadata_bytes: other },
                replaces: range.first & 1 == 0,
            },
            7 => Request::LogSpace { bytes: number },
            8 => Request::HandleSpace,
            9 => Request::Digest,
            10 => Request::MakeRoom { upto: LogPosition(number) },
            11 => Request::SyncDependencies(dependencies),
            12 => Request::SyncInode { inode, dependencies },
            13 => Request::Space { subtree: QuotaId(inode.0) },
            14 => Request::Segment(number as u32 % 4),
            15 => Request::RegisterMount { device: number, terms: MountTerms::default() },
            16 => Request::Lock { inode, kind, owner, pid: number as u32, range, action, wait: None, slot },
            17 => Request::QueryLock { inode, kind, owner, range, action },
            18 => Request::ReleaseLocks { inode, owner, kind },
            19 => Request::YieldLocks { inode, moves: other & 1 != 0 },
            20 => Request::Materialise { inode, flags: number as u32 },
            21 => Request::Map { inode, first: number, blocks: other, follows: other & 1 != 0, number: owner as u32 },
            22 => Request::Unmap { number: number as u32 },
            _ => {
                let key = dice.pick(&[QuotaKey::User(NOBODY), QuotaKey::User(0), QuotaKey::Subtree(QuotaId(inode.0))]);
                let amount = QuotaAmount { blocks: number, inodes: other };
                Request::Quota(vec![QuotaRequest { key, amount, exempt: other & 1 != 0 }])
            }
        }
    }

    /// Returns an update, and makes it of `new` where it needs a new inode.
    fn update(&self, dice: &mut Dice, new: InodeId) -> Update<'static> {
        let (inode, parent) = (self.inode(dice), if dice.below(3) == 0 { self.inode(dice) } else { self.own });
        let (offset, length) = (dice.number(), dice.number());
        let name = dice.pick(&[&b"file"[..], b"other", b"made", b"a/b", b"", b"..", &[b'n'; 255]]);
        let at =
            if dice.below(4) == 0 { Timestamp { seconds: offset as i64, nanoseconds: length as u32 } } else { NOW };
        let (strip, release) = (length & 1 == 0, length & 2 == 0);
        let mode = (offset & 1 == 0).then_some(dice.number() as u32);
        let target = (length & 4 == 0).then(|| self.inode(dice));
        match dice.below(15) {
            0 | 1 => Update::Write { inode, offset, at, strip, data: dice.pick(&[&b"data"[..], &[7; 5000], b""]) },
            2 => {
                let kind = dice.pick(&[FileKind::Regular, FileKind::Directory, FileKind::Symlink, FileKind::Fifo]);
                let inode = if dice.below(4) == 0 { inode } else { new };
                Update::Create(Create {
                    at,
                    mode: dice.number() as u32,
                    device: offset,
                    ..create(inode, parent, name, kind)
                })
            }
            3 => Update::Link { inode, parent, name, at },
            4 => Update::Unlink { inode, parent, name, release, at },
            5 => Update::RemoveDirectory { inode, parent, name, release, at },
            6 => {
                let new_name = dice.pick(&[&b"file"[..], b"other", b"moved", b""]);
                let whiteout =
                    (length & 8 == 0).then_some(Whiteout { inode: new, uid: NOBODY, gid: NOBODY, acl_access: &[] });
                let (new_parent, exchange) = (self.inode(dice), offset & 2 == 0);
                Update::Rename(Rename {
                    parent,
                    name,
                    inode,
                    new_parent,
                    new_name,
                    target,
                    exchange,
                    whiteout,
                    release,
                    at,
                })
            }
            7 => Update::Resize { inode, size: offset, strip, at },
            8 => {
                let how = dice.pick(&[
                    Allocation::Reserve,
                    Allocation::ReserveKeepSize,
                    Allocation::Punch,
                    Allocation::Zero,
                    Allocation::Insert,
                    Allocation::Collapse,
                ]);
                Update::Allocate { inode, how, offset, length, strip, at }
            }
            9 => {
                let (uid, gid) = ((length & 16 == 0).then_some(offset as u32), (length & 32 == 0).then_some(NOBODY));
                let (accessed, modified) = ((offset & 4 == 0).then_some(at), (offset & 8 == 0).then_some(NOW));
                Update::SetAttributes(SetAttributes { inode, mode, uid, gid, accessed, modified, at })
            }
            10 => {
                let name =
                    dice.pick(&[&b"user.a"[..], b"security.capability", b"system.posix_acl_access", b"trusted.x"]);
                Update::SetXattr { inode, name, value: dice.pick(&[&b"v"[..], &[0; 4000], b""]), mode, at }
            }
            11 => Update::RemoveXattr { inode, name: b"user.a", mode, at },
            12 => Update::Accessed { inode, at },
            13 => Update::Release { inode },
            _ => Update::Depend { session: SessionId(offset % 9), position: LogPosition(length) },
        }
    }
}

/// Begins a session.
///
/// The user has only so many, and one that has ended counts until all is applied.
fn begin_session(socket: &Path) -> Client {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match Client::try_open(socket, SessionKind::Process) {
            Ok(client) => return client,
            Err(reply) => assert!(Instant::now() < deadline, "no session begins: {reply:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Adds a connection to a session.
///
/// It is given up if an answer takes long: the request may wait for another one's lock or lease.
fn add_connection(client: &Client, socket: &Path) -> Connection {
    let line = client.attach(socket);
    set_socket_timeout(line.socket(), Timeout::Recv, Some(SILENCE_MAX)).expect("set");
    line
}

/// Ends a session, fenced or not, and begins another one.
fn replace_session(client: &mut Client, socket: &Path) {
    let _ = client.call(&Request::Goodbye);
    *client = begin_session(socket);
}

/// Sends bytes in the place of a request; returns whether the connection is still of use.
fn send(line: &mut Connection, bytes: &[u8], files: &[BorrowedFd<'_>]) -> bool {
    let answered = line.call_watched::<_, Reply>(&RawMessage(bytes), files, &mut || Err(WireError::Silent));
    matches!(answered, Ok((reply, _)) if !matches!(reply, Reply::Refused(_)))
}

fn send_requests(socket: &Path, places: Places, seed: u64, cases: u64) {
    let files: Vec<OwnedFd> = {
        let null = std::fs::File::open("/dev/null").expect("opened");
        let (one, two) = std::os::unix::net::UnixStream::pair().expect("sockets");
        vec![null.into(), one.into(), two.into()]
    };
    let mut client = begin_session(socket);
    let mut line = add_connection(&client, socket);
    for case in seed..seed + cases {
        let mut dice = Dice::of_case(case);
        let mut bytes = postcard::to_stdvec(&places.request(&mut dice)).expect("encoded");
        dice.mutate(&mut bytes);
        let count = dice.pick(&[0, 0, 0, 0, 0, 0, 1, 3]);
        let sent: Vec<_> = files.iter().take(count).map(AsFd::as_fd).collect();
        let is_of_use = send(&mut line, &bytes, &sent);
        if client.control.is_fenced() || client.line.is_closed() {
            replace_session(&mut client, socket);
            line = add_connection(&client, socket);
        } else if !is_of_use {
            let deadline = Instant::now() + Duration::from_secs(20);
            // A user has only so many connections, and a closed one counts until SharedFS has seen its end.
            line = loop {
                let Ok(mut next) = Connection::connect(socket) else { panic!("the daemon is gone") };
                let attach = Request::Attach { version: client.welcome.version, peer: client.welcome.peer };
                if let Ok((Reply::Done, _)) = next.call::<_, Reply>(&attach, &[]) {
                    break next;
                }
                assert!(Instant::now() < deadline, "no connection can be added");
                replace_session(&mut client, socket);
            };
            set_socket_timeout(line.socket(), Timeout::Recv, Some(SILENCE_MAX)).expect("set");
        }
    }
}

fn log_records(socket: &Path, places: Places, seed: u64, cases: u64) {
    let prepare = |client: &mut Client| {
        let _ = client.acquire(&[(places.own, true), (places.file, true)]);
        let _ = client.credit(100, 1 << 16);
        client.inode()
    };
    let mut client = begin_session(socket);
    let mut new = prepare(&mut client);
    for case in seed..seed + cases {
        let mut dice = Dice::of_case(case);
        let update = places.update(&mut dice, new);
        let mut kind = update.kind() as u8;
        let mut bytes = update.encode().parts().concat();
        dice.mutate(&mut bytes);
        if dice.below(50) == 0 {
            kind = dice.next() as u8;
        }
        let is_logged = client.append_raw(kind, &[&bytes]).is_ok();
        let is_made = kind == ashlar_update::UpdateKind::Create as u8;
        if is_logged && !is_made && case % RECORDS_IN_TURN != 0 {
            continue;
        }
        if client.digest().is_err() || client.control.is_fenced() {
            replace_session(&mut client, socket);
            new = prepare(&mut client);
        } else if is_made {
            new = client.inode();
        }
    }
}

const ENV: [&str; 4] = ["ASHLAR_TEST_SOCKET", "ASHLAR_TEST_STORY", "ASHLAR_TEST_PLACES", "ASHLAR_TEST_RANGE"];

#[test]
#[ignore = "this is a hostile user's process, which another test starts"]
fn hostile_process() {
    let Some(socket) = std::env::var_os(ENV[0]).map(PathBuf::from) else { return };
    let numbers = |name| {
        let text = std::env::var(name).expect("set");
        text.split(' ').map(|word| word.parse().expect("a number")).collect::<Vec<u64>>()
    };
    let (inodes, range) = (numbers(ENV[2]), numbers(ENV[3]));
    let [own, file, roots, private] = [0, 1, 2, 3].map(|index| InodeId(inodes[index]));
    let places = Places { own, file, roots, private };
    match std::env::var(ENV[1]).expect("a story").as_str() {
        "requests" => send_requests(&socket, places, range[0], range[1]),
        _ => log_records(&socket, places, range[0], range[1]),
    }
}

/// Root's directory that all may write, with a file of the hostile user's, and files that the user may only read or
/// not reach.
fn make_places(site: &Site) -> Places {
    let mut root = Client::open(&site.socket());
    root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let own = root.make(InodeId::ROOT, b"own", FileKind::Directory);
    let private = root.make(InodeId::ROOT, b"private", FileKind::Directory);
    let [file, roots] = [(own, &b"file"[..]), (InodeId::ROOT, &b"roots"[..])]
        .map(|(parent, name)| root.make(parent, name, FileKind::Regular));
    let change = |inode, mode, uid| {
        let (uid, gid) = (Some(uid), Some(uid));
        let (accessed, modified) = (None, None);
        Update::SetAttributes(SetAttributes { inode, mode: Some(mode), uid, gid, accessed, modified, at: NOW })
    };
    root.append(&change(own, 0o1777, 0));
    root.append(&change(private, 0o700, 0));
    root.append(&change(file, 0o644, NOBODY));
    root.append(&change(roots, 0o644, 0));
    root.digest().expect("digested");
    assert!(root.call(&Request::Goodbye).is_ok());
    Places { own, file, roots, private }
}

fn number_of(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn attack(story: &str) {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(256 << 20);
    let places = make_places(&site);
    let before = site.status().pid;
    let (seed, cases) = (number_of("ASHLAR_HOSTILE_SEED", 1), number_of("ASHLAR_HOSTILE_CASES", CASES));
    let mut command = common::this_test("hostile_process");
    let inodes = [places.own, places.file, places.roots, places.private].map(|inode| inode.0.to_string()).join(" ");
    command.env(ENV[0], site.socket()).env(ENV[1], story).env(ENV[2], inodes).env(ENV[3], format!("{seed} {cases}"));
    let mut hostile = common::spawn(command.uid(NOBODY).gid(NOBODY).stdout(Stdio::null()));
    let honest = connect(&site);
    let diary = honest.make_open(&ROOT, places.private, b"diary", &make(FileKind::Regular)).expect("made").id;
    let (mut asked, mut longest, mut offset) = (0, Duration::ZERO, 0);
    let status = loop {
        if let Some(status) = hostile.try_wait().expect("asked") {
            break status;
        }
        let line = b"a line of the diary";
        honest.write(&ROOT, diary, WriteAt::Offset(offset), line, false).expect("an honest session goes on");
        offset = (offset + line.len() as u64) % 40_000;
        let began = Instant::now();
        honest.make_room().expect("applied");
        longest = longest.max(began.elapsed());
        asked += 1;
        std::thread::sleep(Duration::from_millis(2));
    };
    println!("{story}: {cases} cases from {seed} on; {asked} honest questions, the longest took {longest:?}");
    assert!(status.success(), "{story}: the hostile process ended with {status}");
    assert!(longest < ANSWER_MAX, "the longest answer took {longest:?}");
    assert_eq!(site.status().pid, before, "the daemon died");
    let reports = site.reports();
    assert!(!reports.contains("panicked"), "{reports}");
    honest.close(diary);
    drop(honest);
    site.check();
}

#[test]
fn arbitrary_requests_cost_only_their_session() {
    attack("requests");
}

#[test]
fn arbitrary_records_cost_only_their_session() {
    attack("records");
}
