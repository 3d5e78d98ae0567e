//! Requests of hostile processes: none of them stops SharedFS, makes it large, or takes it from other users.

mod common;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_types::{
    ByteRange, Errno, FileKind, InodeId, LeaseMode, LeaseScope, LockAction, LockKind, LogPosition, QuotaAmount,
    QuotaId, QuotaKey, SessionId, WantedLease,
};
use ashlar_wire::{
    Connection, Credit, LeaseRequest, LockSlot, MountTerms, Need, PROTOCOL_VERSIONS, Peer, QuotaRequest, Reply,
    Request, WireError,
};
use common::{Client, Site, hello};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

#[test]
#[ignore = "this is the daemon's process, which the other tests start"]
fn daemon_process() {
    common::run_daemon();
}

const NOBODY: u32 = 65534;
/// How long a connection may be silent before its first message, with some time to notice that.
const SILENCE_MAX: Duration = Duration::from_secs(10);
const NOTICE_MAX: Duration = Duration::from_secs(5);

/// Returns a hidden test as a command of an ordinary user.
fn command_of_nobody(site: &Site, story: &str) -> Command {
    let mut command = common::this_test("ordinary_user");
    command.env("ASHLAR_TEST_SOCKET", site.socket()).env("ASHLAR_TEST_STORY", story).uid(NOBODY).gid(NOBODY);
    command
}

/// An ordinary user's process; it ends with this.
struct Hostile(Child);

impl Hostile {
    /// Starts it, and waits until it says that its attack has begun.
    fn start(site: &Site, story: &str, argument: &str) -> Self {
        let mut command = command_of_nobody(site, story);
        let mut child = common::spawn(command.env("ASHLAR_TEST_ARGUMENT", argument).stdout(Stdio::piped()));
        let output = child.stdout.take().expect("a pipe");
        let lines = std::io::BufRead::lines(std::io::BufReader::new(output));
        assert!(lines.map_while(Result::ok).any(|line| line.ends_with(BEGUN)), "{story}: it did not begin");
        Self(child)
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("reaped");
    }
}

const BEGUN: &str = "the attack has begun";

#[test]
#[ignore = "this is a user's process, which another test starts"]
fn ordinary_user() {
    let Some(socket) = std::env::var_os("ASHLAR_TEST_SOCKET").map(PathBuf::from) else { return };
    let argument = std::env::var("ASHLAR_TEST_ARGUMENT").unwrap_or_default();
    match std::env::var("ASHLAR_TEST_STORY").expect("a story").as_str() {
        "hoard answers" => hoard_answers(&socket, InodeId(argument.parse().expect("a number"))),
        "ask for much" => ask_for_much(&socket),
        "attach" => {
            let (session, token) = argument.split_once(' ').expect("two numbers");
            let (session, token) = (SessionId(session.parse().expect("one")), token.parse().expect("one"));
            assert_eq!(attach(&socket, Peer { session, token }), Some(Errno::EPERM));
        }
        story => panic!("{story}"),
    }
}

/// Tries to add a connection to a session; returns the error.
fn attach(socket: &Path, peer: Peer) -> Option<Errno> {
    let mut line = Connection::connect(socket).expect("connected");
    match line.call::<_, Reply>(&Request::Attach { version: PROTOCOL_VERSIONS.current, peer }, &[]).expect("answered").0
    {
        Reply::Done => None,
        Reply::Error(errno) => Some(errno),
        other => panic!("{other:?}"),
    }
}

/// Sends requests for a large directory, many times in one, over many connections, and takes no answer.
fn hoard_answers(socket: &Path, directory: InodeId) -> ! {
    let client = Client::open(socket);
    let need = Need { entries: true, ..Need::default() };
    let want = LeaseRequest::on_inode(directory, false, need);
    let mut lines = Vec::new();
    for _ in 0..48 {
        let mut line = client.attach(socket);
        line.send(&Request::Acquire(vec![want; 48]), &[]).expect("sent");
        lines.push(line);
    }
    println!("{BEGUN}");
    loop {
        std::thread::park();
    }
}

/// Asks in many threads for more space than there is.
fn ask_for_much(socket: &Path) -> ! {
    let client = Client::open(socket);
    println!("{BEGUN}");
    std::thread::scope(|threads| {
        for _ in 0..16 {
            let mut line = client.attach(socket);
            threads.spawn(move || {
                let want = Credit { blocks: 1 << 40, metadata_bytes: 0 };
                let mut ask = || line.call::<_, Reply>(&Request::Credit { want, replaces: false }, &[]);
                while matches!(ask(), Ok((Reply::Error(Errno::ENOSPC), _))) {}
            });
        }
    });
    panic!("a question was answered otherwise")
}

/// Returns kilobytes of memory that the daemon has in use.
fn resident_kb(site: &Site) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", site.status().pid)).expect("the daemon's");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Two leases that no honest session asks for once ended SharedFS.
#[test]
fn scopes_that_no_session_asks_for_are_refused() {
    let mut site = Site::new(64 << 20);
    let mut one = Client::open(&site.socket());
    one.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let directory = one.make(InodeId::ROOT, b"directory", FileKind::Directory);
    let file = one.make(directory, b"file", FileKind::Regular);
    one.digest().expect("digested");
    let mut two = Client::open(&site.socket());
    let want = |inode, scope| LeaseRequest {
        lease: WantedLease { inode, mode: LeaseMode::Read, scope },
        need: Need::default(),
    };
    for _ in 0..3 {
        for (client, scope) in [(&mut one, LeaseScope::Files), (&mut two, LeaseScope::Subtree)] {
            assert_eq!(client.call(&Request::Acquire(vec![want(file, scope)])).err(), Some(Errno::EINVAL));
        }
    }
    for (inode, scope) in [(InodeId::ROOT, LeaseScope::Files), (directory, LeaseScope::Files)] {
        assert_eq!(two.call(&Request::Acquire(vec![want(inode, scope)])).err(), Some(Errno::EINVAL));
        let (name, within) = (b"file".to_vec(), Some(want(inode, scope)));
        let sought =
            Request::Lookup { directory: inode, name, within, makes: false, write: false, need: Need::default() };
        assert_eq!(two.call(&sought).err(), Some(Errno::EINVAL));
    }
    let below = want(directory, LeaseScope::Subtree).to_write();
    assert!(two.call(&Request::Acquire(vec![below])).is_ok(), "directories have something below them");
    site.check();
}

/// Numbers at the ends of their ranges, and inodes that are none, in all requests.
#[test]
fn odd_requests_are_answered() {
    let mut site = Site::new(64 << 20);
    let mut c = Client::open(&site.socket());
    c.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let file = c.make(InodeId::ROOT, b"file", FileKind::Regular);
    c.digest().expect("digested");
    let max = u64::MAX;
    let mut requests = Vec::new();
    for inode in [file, InodeId(max), InodeId(0), InodeId::RENAME, InodeId::ROOT] {
        requests.push(Request::ReadDirectory { directory: inode, after: max, limit: u32::MAX });
        requests.push(Request::Map { inode, first: max - 1, blocks: 1, follows: true, number: 7 });
        requests.push(Request::Map { inode, first: 0, blocks: max, follows: false, number: u32::MAX });
        requests.push(Request::Show { inode });
        requests.push(Request::YieldLocks { inode, moves: true });
        requests.push(Request::ReleaseLocks { inode, owner: max, kind: LockKind::Record });
        requests.push(Request::Materialise { inode, flags: u32::MAX });
        requests.push(Request::Materialise { inode, flags: 0 });
        for (first, last) in [(0, max), (max, max), (max - 1, max), (5, 9), (7, 7), (9, 5), (max, 0)] {
            let range = ByteRange::new(first, last);
            for kind in [LockKind::Record, LockKind::Flock] {
                for action in [LockAction::Read, LockAction::Write, LockAction::Unlock] {
                    let owner = max;
                    requests.push(Request::QueryLock { inode, kind, owner, range, action });
                    for slot in [None, Some(LockSlot { number: u32::MAX, word: max })] {
                        let (pid, wait) = (u32::MAX, None);
                        requests.push(Request::Lock { inode, kind, owner, pid, range, action, wait, slot });
                    }
                }
            }
        }
        let need = Need { contents: true, entries: true, children: true, xattrs: true };
        for scope in [LeaseScope::Node, LeaseScope::Files, LeaseScope::Subtree] {
            for write in [false, true] {
                let want = LeaseRequest { lease: WantedLease { inode, mode: LeaseMode::new(write), scope }, need };
                requests.push(Request::Acquire(vec![want; 5]));
                requests.push(Request::Acquire(vec![want; 1000]));
                let (name, within) = (b"x".to_vec(), Some(want));
                requests.push(Request::Lookup { directory: inode, name, within, makes: true, write, need });
            }
        }
        requests.push(Request::Space { subtree: QuotaId(inode.0) });
        let amount = QuotaAmount { blocks: max, inodes: max };
        let key = QuotaKey::Subtree(QuotaId(inode.0));
        requests.push(Request::Quota(vec![QuotaRequest { key, amount, exempt: true }]));
    }
    requests.push(Request::LogSpace { bytes: max });
    requests.push(Request::MakeRoom { upto: LogPosition(max) });
    requests.push(Request::SyncDependencies(vec![(SessionId(max), LogPosition(max)); 1000]));
    requests.push(Request::Segment(u32::MAX));
    requests.push(Request::Unmap { number: u32::MAX });
    requests.push(Request::RegisterMount { device: 1, terms: MountTerms::default() });
    for (blocks, metadata_bytes) in [(max, max), (max, 0), (1, max), (0, 0)] {
        for replaces in [false, true] {
            requests.push(Request::Credit { want: Credit { blocks, metadata_bytes }, replaces });
        }
    }
    for request in &requests {
        let answered = c.line.call::<_, Reply>(request, &[]);
        assert!(answered.is_ok(), "{request:?}: {answered:?}");
    }
    assert!(!c.control.is_fenced());
    site.check();
}

/// The secret of a session is known to children that gave up its rights.
#[test]
fn only_a_sessions_own_process_attaches_to_it() {
    if !common::may_change_users() {
        return;
    }
    let site = Site::new(64 << 20);
    let client = Client::open(&site.socket());
    let peer = client.welcome.peer;
    assert_eq!(attach(&site.socket(), peer), None, "its own process does");
    let mut child = command_of_nobody(&site, "attach");
    child.env("ASHLAR_TEST_ARGUMENT", format!("{} {}", peer.session.0, peer.token));
    assert!(child.stdout(Stdio::null()).status().expect("run").success());
    assert_eq!(attach(&site.socket(), Peer { token: peer.token ^ 2, ..peer }), Some(Errno::ESTALE));
}

#[test]
fn connection_without_a_message_ends() {
    let site = Site::new(64 << 20);
    let client = Client::open(&site.socket());
    let connect = || UnixStream::connect(site.socket()).expect("connected");
    let (mut silent, mut begun, within) = (connect(), connect(), client.attach(&site.socket()));
    begun.write_all(&[200, 0]).expect("sent");
    // A session's connection may be silent between messages, and not within one.
    let mut kept = client.attach(&site.socket());
    (&mut within.socket()).write_all(&[200, 0]).expect("sent");
    for line in [&mut silent, &mut begun, &mut within.socket().try_clone().expect("a copy")] {
        line.set_read_timeout(Some(SILENCE_MAX + NOTICE_MAX)).expect("set");
        assert_eq!(line.read(&mut [0]).expect("the end"), 0);
    }
    assert!(matches!(kept.call::<_, Reply>(&Request::Digest, &[]).expect("answered").0, Reply::Committed(_)));
}

/// Closing a descriptor may take an answer of a file's server that never comes, and each takes a number.
#[test]
fn descriptors_never_reach_the_daemon() {
    let mut site = Site::new(64 << 20);
    let pid = site.status().pid;
    let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the daemon's").count();
    let before = open();
    let null = std::fs::File::open("/dev/null").expect("opened");
    // A message that never ends, with some in each part.
    let endless = UnixStream::connect(site.socket()).expect("connected");
    let mut is_taken = true;
    for part in [&60_000u32.to_le_bytes()[..]].into_iter().chain(std::iter::repeat_n(&b"x"[..], 500)) {
        let (with, mut space) = ([null.as_fd(); 5], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(5))]);
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&with)));
        is_taken &= sendmsg(&endless, &[IoSlice::new(part)], &mut control, SendFlags::NOSIGNAL).is_ok();
    }
    assert!(!is_taken, "the kernel refuses them, or SharedFS has closed the connection");
    // Requests that take none, and one that would.
    for request in
        [Request::Status, Request::RegisterMount { device: 1, terms: MountTerms::default() }, Request::Digest]
    {
        let mut client = Client::open(&site.socket());
        let sent = client.line.call::<_, Reply>(&request, &[null.as_fd()]);
        assert!(matches!(sent, Err(WireError::Closed | WireError::Io(_))), "{sent:?}");
    }
    let deadline = Instant::now() + NOTICE_MAX;
    // Sessions and their successors have some.
    while open() > before + 200 {
        assert!(Instant::now() < deadline, "{} descriptors before, {} now", before, open());
        std::thread::sleep(Duration::from_millis(10));
    }
    site.check();
}

/// Sixteen such connections once made SharedFS take 2.8 GB.
#[test]
fn answers_that_are_not_taken_take_little_memory() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(256 << 20);
    let mut root = Client::open(&site.socket());
    root.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let directory = root.make(InodeId::ROOT, b"large", FileKind::Directory);
    for number in 0..Need::ENTRIES_MAX {
        root.make(directory, format!("{number:0>250}").as_bytes(), FileKind::Regular);
    }
    root.digest().expect("digested");
    assert!(root.call(&Request::Goodbye).is_ok());
    let before = resident_kb(&site);
    let hostile = Hostile::start(&site, "hoard answers", &directory.0.to_string());
    let deadline = Instant::now() + Duration::from_secs(3);
    let mut most = before;
    while Instant::now() < deadline {
        most = most.max(resident_kb(&site));
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("{before} kB before, {most} kB at most");
    assert!(most - before < 200 << 10, "{before} kB before, {most} kB at most");
    let mut honest = Client::open(&site.socket());
    let need = Need { entries: true, ..Need::default() };
    let want = LeaseRequest::on_inode(directory, false, need);
    let Ok(Reply::Granted { grants, .. }) = honest.call(&Request::Acquire(vec![want; 2])) else { panic!("refused") };
    let listed = |state: &ashlar_wire::InodeState| state.entries.as_ref().map(Vec::len);
    assert_eq!(listed(&grants[0].state), Some(Need::ENTRIES_MAX as usize), "other users get answers");
    assert_eq!(listed(&grants[1].state), None, "the state of an inode is sent once");
    drop(hostile);
    site.check();
}

/// Questions for space in sixteen threads once left root a twenty-fifth of its requests.
#[test]
fn questions_of_one_user_leave_time_to_others() {
    if !common::may_change_users() {
        return;
    }
    let mut site = Site::new(64 << 20);
    let mut root = Client::open(&site.socket());
    let mut rate = || {
        let (begun, mut count) = (Instant::now(), 0);
        while begun.elapsed() < Duration::from_secs(2) {
            root.acquire(&[(InodeId::ROOT, false)]).expect("granted");
            count += 1;
        }
        count
    };
    let alone = rate();
    let hostile = Hostile::start(&site, "ask for much", "");
    let beside = rate();
    drop(hostile);
    println!("{alone} requests alone, {beside} beside the questions");
    assert!(beside > alone / 8, "{alone} requests alone, {beside} beside the questions");
    site.check();
}

/// A session that has made SharedFS panic loses what was not applied by then, and no other session loses anything.
#[test]
fn barred_session_is_fenced_at_the_next_start() {
    let mut site = Site::new(64 << 20);
    let mut barred = Client::open(&site.socket());
    let mut other = Client::open(&site.socket());
    barred.acquire(&[(InodeId::ROOT, true)]).expect("granted");
    let directory = barred.make(InodeId::ROOT, b"of the other", FileKind::Directory);
    let before = barred.make(InodeId::ROOT, b"before", FileKind::Regular);
    barred.digest().expect("digested");
    other.acquire(&[(directory, true)]).expect("granted");
    other.make(directory, b"kept", FileKind::Regular);
    let id = barred.welcome.peer.session;
    let table = site.arena().join(format!("sessions/{id}.leases"));
    let table = std::fs::File::options().read(true).write(true).open(table).expect("a lease table");
    let mut applied = [0; 8];
    table.read_exact_at(&mut applied, 2048).expect("read");
    barred.make(InodeId::ROOT, b"behind", FileKind::Regular);
    site.kill();
    table.write_all_at(&(u64::from_le_bytes(applied) + 1).to_le_bytes(), 3736).expect("written");
    site.start();
    other.resume(&site.socket());
    assert!(barred.control.is_fenced());
    let resumed = hello(&site.socket(), ashlar_wire::SessionKind::Process, Some(barred.welcome.peer));
    assert!(matches!(resumed, Ok((_, Reply::Error(_), _))));
    let mut looking = Client::open(&site.socket());
    looking.acquire(&[(InodeId::ROOT, false)]).expect("granted");
    assert_eq!(looking.lookup(InodeId::ROOT, b"before"), Ok(Some(before)));
    assert_eq!(looking.lookup(InodeId::ROOT, b"behind"), Ok(None));
    looking.acquire(&[(directory, false)]).expect("granted");
    assert!(matches!(looking.lookup(directory, b"kept"), Ok(Some(_))));
    site.check();
}

#[test]
fn hello_of_other_versions_is_refused_with_a_line() {
    let mut site = Site::new(64 << 20);
    let mut line = Connection::connect(&site.socket()).expect("connected");
    let versions = ashlar_types::VersionRange::new(1, 2);
    let hello = ashlar_wire::Hello { versions, ..common::first_message(ashlar_wire::SessionKind::Process) };
    let (reply, _) = line.call::<_, Reply>(&Request::Hello(hello), &[]).expect("answered");
    let Reply::Refused(reason) = reply else { panic!("{reply:?}") };
    assert_eq!(
        reason,
        format!(
            "this daemon speaks protocol {PROTOCOL_VERSIONS}, not versions 1 to 2; use the same release on both sides"
        )
    );
    assert_eq!(site.status().sessions.len(), 0);
    site.check();
}

#[test]
fn hello_of_newer_release_gets_newest_common_version() {
    let mut site = Site::new(64 << 20);
    let mut line = Connection::connect(&site.socket()).expect("connected");
    let versions = ashlar_types::VersionRange::new(PROTOCOL_VERSIONS.current, PROTOCOL_VERSIONS.current + 3);
    let hello = ashlar_wire::Hello { versions, ..common::first_message(ashlar_wire::SessionKind::Process) };
    let (reply, _) = line.call::<_, Reply>(&Request::Hello(hello), &[]).expect("answered");
    let Reply::Welcome(welcome) = reply else { panic!("{reply:?}") };
    assert_eq!(welcome.version, PROTOCOL_VERSIONS.current);
    drop(line);
    site.check();
}
