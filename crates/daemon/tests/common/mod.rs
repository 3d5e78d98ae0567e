//! Test sessions on the bare protocol and the bare log, without LibFS.
//!
//! The daemon runs in a process of its own. Such a session may be honest or not.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod libfs;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ashlar_log::{AppendError, Appended, Log};
use ashlar_pmem::{Arena, ArenaOptions, Crc32c, Mapping, MappingAccess, Medium, Readable};
use ashlar_types::{Errno, FileKind, InodeId, LogPosition, SealCount, Timestamp, VersionRange};
use ashlar_update::{Create, Update};
use ashlar_wire::{
    CONTROL_BYTES, Connection, ControlPage, Credit, CreditKind, GrantReply, Hello, LEASE_TABLE_BYTES, LeaseRequest,
    LeaseTable, Need, PROTOCOL_VERSIONS, Peer, Reply, Request, SessionKind, Welcome, WireError,
};
use rustix::process::{Gid, Uid};

/// Names the directory of the hidden test that runs a daemon.
pub const DAEMON_ENV: &str = "ASHLAR_TEST_DAEMON";

pub const NOW: Timestamp = Timestamp { seconds: 1_700_000_000, nanoseconds: 5 };

/// Held while an arena's lock file is open, and while a process starts.
///
/// A child has copies of all descriptors until it executes its program, and so holds the lock too.
static STARTING: Mutex<()> = Mutex::new(());

/// Keeps other tests from starting processes, for as long as it is held.
pub fn block_process_starts() -> impl Drop {
    STARTING.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Starts a process.
pub fn spawn(command: &mut Command) -> Child {
    let _guard = block_process_starts();
    command.spawn().expect("a process")
}

/// Sets the daemon's time to live of leases, in microseconds.
const LEASE_TTL_ENV: &str = "ASHLAR_TEST_LEASE_TTL_US";

/// Names the users that may have sessions.
const SESSIONS_ENV: &str = "ASHLAR_TEST_SESSIONS";

/// An arena in a directory of its own, and the daemon that serves it.
pub struct Site {
    pub directory: tempfile::TempDir,
    lease_ttl_us: Option<u64>,
    sessions: &'static str,
    daemon: Option<Child>,
}

impl Site {
    /// Makes a fresh arena on memory, with a daemon.
    pub fn new(size_bytes: u64) -> Self {
        Self::with_lease_ttl(size_bytes, None)
    }

    /// Makes a fresh arena whose daemon expires leases so early.
    pub fn with_lease_ttl(size_bytes: u64, lease_ttl_us: Option<u64>) -> Self {
        Self::make(size_bytes, lease_ttl_us, "all")
    }

    /// Makes a fresh arena whose daemon has sessions for these users.
    pub fn admitting(sessions: &'static str) -> Self {
        Self::make(64 << 20, None, sessions)
    }

    fn make(size_bytes: u64, lease_ttl_us: Option<u64>, sessions: &'static str) -> Self {
        let directory = tempfile::Builder::new().prefix("ashlar").tempdir_in("/dev/shm").expect("a directory");
        open_to_all(directory.path());
        let guard = STARTING.lock();
        let arena = Arena::create(&directory.path().join("arena"), &ArenaOptions::new(size_bytes)).expect("an arena");
        ashlar_store::Store::format(&arena, Timestamp::default()).expect("formatted");
        drop((arena, guard));
        let mut site = Self { directory, lease_ttl_us, sessions, daemon: None };
        site.start();
        site
    }

    pub fn arena(&self) -> PathBuf {
        self.directory.path().join("arena")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    fn command(&self) -> Command {
        let mut command = this_test("daemon_process");
        command.env(DAEMON_ENV, self.directory.path()).stdout(Stdio::null());
        if std::env::var_os("ASHLAR_TEST_LOG").is_none() {
            let reports = std::fs::File::options().create(true).append(true).open(self.reports_path()).expect("opened");
            command.stderr(reports);
        }
        command.env(SESSIONS_ENV, self.sessions);
        if let Some(ttl_us) = self.lease_ttl_us {
            command.env(LEASE_TTL_ENV, ttl_us.to_string());
        }
        command
    }

    /// Starts the daemon, and waits until it answers.
    pub fn start(&mut self) {
        self.daemon = Some(spawn(&mut self.command()));
        let deadline = Instant::now() + Duration::from_secs(20);
        while Connection::connect(&self.socket()).is_err() {
            assert!(Instant::now() < deadline, "the daemon does not come up");
            let ended = self.daemon.as_mut().and_then(|daemon| daemon.try_wait().expect("asked"));
            assert!(ended.is_none(), "the daemon ended: {ended:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn reports_path(&self) -> PathBuf {
        self.directory.path().join("reports")
    }

    /// Returns what the daemon has written to its standard error.
    pub fn reports(&self) -> String {
        std::fs::read_to_string(self.reports_path()).unwrap_or_default()
    }

    /// Kills the daemon in the middle of whatever it does.
    pub fn kill(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill().expect("killed");
            daemon.wait().expect("reaped");
        }
    }

    /// Asks the daemon to end, and returns whether it did with success.
    pub fn terminate(&mut self) -> bool {
        let Some(mut daemon) = self.daemon.take() else { return false };
        let pid = rustix::process::Pid::from_child(&daemon);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("signalled");
        daemon.wait().expect("reaped").success()
    }

    /// Checks that the daemon lives and the file system is sound.
    ///
    /// Returns the counters.
    pub fn check(&mut self) -> std::collections::BTreeMap<String, u64> {
        let mut line = Connection::connect(&self.socket()).expect("the daemon listens");
        match line.call(&Request::Fsck, &[]).expect("answered").0 {
            Reply::Fsck(report) => assert_eq!(report.problems, Vec::<String>::new()),
            other => panic!("{other:?}"),
        }
        self.status().counters.into_iter().collect()
    }

    pub fn status(&self) -> ashlar_wire::StatusReply {
        let mut line = Connection::connect(&self.socket()).expect("the daemon listens");
        match line.call(&Request::Status, &[]).expect("answered").0 {
            Reply::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }
}

/// The sessions that left files.
///
/// Owned ones have an identity in their lease tables, prepared ones have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionsLeft {
    pub owned: usize,
    pub prepared: usize,
}

impl Site {
    pub fn left(&self) -> SessionsLeft {
        let mut left = SessionsLeft { owned: 0, prepared: 0 };
        for entry in std::fs::read_dir(self.arena().join("sessions")).expect("listed") {
            let path = entry.expect("an entry").path();
            // A session is made or removed at this moment: its other files count.
            let Ok(file) = std::fs::File::open(&path) else { continue };
            let mut magic = [0; 8];
            if path.extension().is_some_and(|extension| extension == "leases") {
                let read = std::os::unix::fs::FileExt::read_at(&file, &mut magic, 64).expect("read");
                if read == magic.len() && magic.starts_with(b"ASHL") {
                    left.owned += 1;
                } else {
                    left.prepared += 1;
                }
            }
        }
        left
    }

    /// Returns whether a session has left files.
    pub fn has_files_of(&self, session: ashlar_types::SessionId) -> bool {
        self.arena().join(format!("sessions/{session}.log")).exists()
    }

    /// Makes a session's files look like ones of an earlier boot.
    ///
    /// A power loss leaves such files.
    pub fn age(&self, session: ashlar_types::SessionId) {
        let table = self.arena().join(format!("sessions/{session}.leases"));
        let table = std::fs::File::options().write(true).open(table).expect("a lease table");
        rustix::io::pwrite(&table, &[0; 16], 88).expect("another boot");
    }

    /// Makes a session's files look like ones of an earlier boot, and of an ordinary user.
    pub fn age_as(&self, session: ashlar_types::SessionId, uid: u32) {
        self.age(session);
        let table = self.arena().join(format!("sessions/{session}.leases"));
        let table = std::fs::File::options().read(true).write(true).open(table).expect("a lease table");
        let mut page = [0; 1408];
        rustix::io::pread(&table, &mut page, 0).expect("read");
        page[104..112].copy_from_slice(&[uid.to_le_bytes(), uid.to_le_bytes()].concat());
        let mut checked = page;
        checked[64..104].fill(0);
        checked[120..128].fill(0);
        page[120..128].copy_from_slice(&u64::from(Crc32c::of(&checked)).to_le_bytes());
        rustix::io::pwrite(&table, &page[104..], 104).expect("another user");
    }

    /// Makes a session's files look like ones of other versions.
    pub fn set_versions(&self, session: ashlar_types::SessionId, versions: VersionRange) {
        let table = self.arena().join(format!("sessions/{session}.leases"));
        let table = std::fs::File::options().write(true).open(table).expect("a lease table");
        let [oldest, current] = [versions.oldest, versions.current].map(|version| (version as u16).to_le_bytes());
        rustix::io::pwrite(&table, &[oldest, current].concat(), 68).expect("written");
    }

    /// Starts the daemon, which must refuse the arena. Returns its complaints.
    pub fn start_refused(&self) -> String {
        let daemon = spawn(self.command().stderr(Stdio::piped()));
        let ended = daemon.wait_with_output().expect("reaped");
        assert!(!ended.status.success(), "it started");
        String::from_utf8_lossy(&ended.stderr).into_owned()
    }

    /// Waits until a session's files are prepared again, or removed.
    ///
    /// The session has ended. The daemon removes them if enough are prepared.
    pub fn await_prepared_of(&self, session: ashlar_types::SessionId) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let path = self.arena().join(format!("sessions/{session}.leases"));
        let is_prepared = || match std::fs::read(&path) {
            Ok(page) => page[64..72] == [0; 8] && page[..8] != [0; 8],
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        while !is_prepared() || self.status().sessions.iter().any(|other| other.session == session) {
            assert!(Instant::now() < deadline, "there are {:?}", self.left());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until so many sessions are prepared.
    pub fn await_prepared_count(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.left().prepared != count {
            assert!(Instant::now() < deadline, "there are {:?}", self.left());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.kill();
    }
}

fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("permissions");
}

/// Returns this test program as a command.
///
/// It runs one of the hidden tests in a process of its own.
pub fn this_test(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

/// Runs the daemon: the body of a hidden test.
pub fn run_daemon() {
    let Some(directory) = std::env::var_os(DAEMON_ENV).map(PathBuf::from) else { return };
    // A test that dies leaves no daemon behind.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).expect("set");
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut config = ashlar_daemon::Config {
        socket: directory.join("socket"),
        sessions: std::env::var(SESSIONS_ENV).expect("named").parse().expect("an admission"),
        ..ashlar_daemon::Config::new(directory.join("arena"))
    };
    if let Ok(ttl_us) = std::env::var(LEASE_TTL_ENV) {
        config.lease_ttl_us = ttl_us.parse().expect("a number");
    }
    if let Err(error) = ashlar_daemon::run(config) {
        eprintln!("{error}");
        std::process::exit(3);
    }
    std::process::exit(0);
}

pub type Dependencies = Vec<(ashlar_types::SessionId, LogPosition)>;

/// A session on the bare protocol.
pub struct Client {
    pub line: Connection,
    pub welcome: Welcome,
    pub log: Log<Arc<Mapping>>,
    pub control: ControlPage<Arc<Mapping>>,
    pub leases: LeaseTable<Arc<Mapping>, Readable>,
    pub log_file: OwnedFd,
    pub control_file: OwnedFd,
    pub leases_file: OwnedFd,
    kind: SessionKind,
    inodes: std::ops::Range<u64>,
}

pub fn hello(
    socket: &Path,
    kind: SessionKind,
    resume: Option<Peer>,
) -> Result<(Connection, Reply, Vec<OwnedFd>), WireError> {
    let mut line = Connection::connect(socket)?;
    let hello = Hello { resume, ..first_message(kind) };
    let (reply, files) = line.call(&Request::Hello(hello), &[])?;
    Ok((line, reply, files))
}

/// Returns the first message of a new session.
pub fn first_message(kind: SessionKind) -> Hello {
    let label = "test".into();
    Hello { versions: PROTOCOL_VERSIONS, kind, resume: None, label, beside: 0, yields_to_kernel: false }
}

impl Client {
    pub fn open(socket: &Path) -> Self {
        Self::open_as(socket, SessionKind::Process)
    }

    pub fn open_as(socket: &Path, kind: SessionKind) -> Self {
        Self::try_open(socket, kind).unwrap_or_else(|reply| panic!("{reply:?}"))
    }

    /// Opens a session; returns SharedFS's answer if it refuses.
    pub fn try_open(socket: &Path, kind: SessionKind) -> Result<Self, Box<Reply>> {
        // A session that truncates its own log must live to see the consequences.
        ashlar_pmem::sigbus::install().expect("installed");
        let (line, reply, files) = hello(socket, kind, None).expect("answered");
        let Reply::Welcome(welcome) = reply else { return Err(Box::new(reply)) };
        let mut files = files.into_iter();
        let mut file = || files.next().expect("a descriptor");
        let (log, control, leases) = (file(), file(), file());
        let map = |file: &OwnedFd, bytes, access| {
            Arc::new(Mapping::map(file, bytes, access, Medium::MEMORY).expect("mapped"))
        };
        let read_only = map(&leases, LEASE_TABLE_BYTES, MappingAccess::ReadOnly);
        assert!(
            Mapping::map(&leases, LEASE_TABLE_BYTES, MappingAccess::ReadWrite, Medium::MEMORY).is_err(),
            "a session can't write its lease table"
        );
        Ok(Self {
            line,
            log: Log::open(map(&log, welcome.log_bytes, MappingAccess::ReadWrite)).expect("a log"),
            control: ControlPage::new(map(&control, CONTROL_BYTES, MappingAccess::ReadWrite)).expect("a page"),
            leases: LeaseTable::read_only(read_only).expect("a table"),
            welcome: *welcome,
            log_file: log,
            control_file: control,
            leases_file: leases,
            kind,
            inodes: 0..0,
        })
    }

    /// Goes on after a restart of the daemon.
    pub fn resume(&mut self, socket: &Path) {
        loop {
            self.begin_to_resume(socket);
            // If it's killed again, repeat.
            if let Ok((reply, _)) = self.line.call(&Request::SyncDependencies(Vec::new()), &[]) {
                return assert!(matches!(reply, Reply::Done), "{reply:?}");
            }
        }
    }

    /// Returns after a restart of the daemon, and may ask for the locks that it had.
    pub fn begin_to_resume(&mut self, socket: &Path) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Ok((line, Reply::Welcome(welcome), _)) = hello(socket, self.kind, Some(self.welcome.peer)) {
                assert_eq!(welcome.peer, self.welcome.peer);
                self.line = line;
                return;
            }
            assert!(Instant::now() < deadline, "the session can't go on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn call(&mut self, request: &Request) -> Result<Reply, Errno> {
        match self.line.call(request, &[]).expect("the daemon answers").0 {
            Reply::Error(errno) => Err(errno),
            reply => Ok(reply),
        }
    }

    /// Calls, and goes on after each restart of the daemon.
    pub fn call_through(&mut self, socket: &Path, request: &Request) -> Result<Reply, Errno> {
        loop {
            match self.line.call(request, &[]) {
                Ok((Reply::Error(errno), _)) => return Err(errno),
                Ok((reply, _)) => return Ok(reply),
                Err(_) => self.resume(socket),
            }
        }
    }

    pub fn want(inode: InodeId, write: bool) -> LeaseRequest {
        let need = Need { contents: true, entries: true, children: true, xattrs: true };
        LeaseRequest::on_inode(inode, write, need)
    }

    pub fn acquire(&mut self, wants: &[(InodeId, bool)]) -> Result<Vec<GrantReply>, Errno> {
        self.acquire_with(wants).map(|found| found.0)
    }

    pub fn acquire_with(&mut self, wants: &[(InodeId, bool)]) -> Result<(Vec<GrantReply>, Dependencies), Errno> {
        let wants = wants.iter().map(|&(inode, write)| Self::want(inode, write)).collect();
        match self.call(&Request::Acquire(wants))? {
            Reply::Granted { grants, dependencies, .. } => Ok((grants, dependencies)),
            other => panic!("{other:?}"),
        }
    }

    /// Returns whether a granted lease still holds.
    pub fn holds(&self, grant: &GrantReply) -> bool {
        self.leases.word(grant.slot).0 == grant.word
    }

    pub fn credit(&mut self, blocks: u64, metadata_bytes: u64) -> Result<Credit, Errno> {
        match self.call(&Request::Credit { want: Credit { blocks, metadata_bytes }, replaces: false })? {
            Reply::Credit(credit) => Ok(credit),
            other => panic!("{other:?}"),
        }
    }

    /// Returns a number for a new inode.
    pub fn inode(&mut self) -> InodeId {
        if self.inodes.is_empty() {
            match self.call(&Request::InodeRange).expect("a range") {
                Reply::Inodes(first, count) => self.inodes = first.0..first.0 + count,
                other => panic!("{other:?}"),
            }
        }
        InodeId(self.inodes.next().expect("not empty"))
    }

    /// Appends a record as it is, without any request.
    pub fn append_raw(&self, kind: u8, parts: &[&[u8]]) -> Result<Appended, AppendError> {
        self.log.append(self.log.seal_count(), kind, parts)
    }

    /// Takes credit for an update.
    pub fn pay(&mut self, update: &Update<'_>) {
        let cost = Credit::from(update.cost());
        if self.control.take_credit(cost, CreditKind::Common).is_none() {
            self.credit(cost.blocks.max(1000), cost.metadata_bytes.max(1 << 20)).expect("credit");
            assert!(self.control.take_credit(cost, CreditKind::Common).is_some());
        }
    }

    /// Appends an update that is paid for.
    pub fn append(&mut self, update: &Update<'_>) -> Appended {
        self.pay(update);
        match self.append_unpaid(update) {
            Err(AppendError::Full { .. }) => {
                self.make_room();
                self.append_unpaid(update).expect("appended")
            }
            appended => appended.expect("appended"),
        }
    }

    /// Asks for the log's digest, and releases the log and freed blocks.
    pub fn make_room(&mut self) {
        let end = self.digest().expect("digested");
        self.log.release(end);
        self.control.set_released(end);
    }

    pub fn append_unpaid(&self, update: &Update<'_>) -> Result<Appended, AppendError> {
        self.append_at(self.log.seal_count(), update)
    }

    /// Appends an update of a thread that checked its leases at this seal count.
    pub fn append_at(&self, seal: SealCount, update: &Update<'_>) -> Result<Appended, AppendError> {
        self.log.append(seal, update.kind() as u8, &update.encode().parts())
    }

    pub fn digest(&mut self) -> Result<LogPosition, Errno> {
        self.committed_by(&Request::Digest)
    }

    /// Makes a request that commits a part of the log.
    ///
    /// Returns the committed position.
    pub fn committed_by(&mut self, request: &Request) -> Result<LogPosition, Errno> {
        match self.call(request)? {
            Reply::Committed(position) => Ok(position),
            other => panic!("{other:?}"),
        }
    }

    /// Makes a file or directory in a directory.
    ///
    /// The session holds a write lease on the directory.
    pub fn make(&mut self, parent: InodeId, name: &[u8], kind: FileKind) -> InodeId {
        let inode = self.inode();
        self.append(&Update::Create(create(inode, parent, name, kind)));
        inode
    }

    pub fn lookup(&mut self, directory: InodeId, name: &[u8]) -> Result<Option<InodeId>, Errno> {
        let (name, need) = (name.to_vec(), Need::default());
        match self.call(&Request::Lookup { directory, name, within: None, makes: false, write: false, need })? {
            Reply::Entry { entry, .. } => Ok(entry.map(|entry| entry.inode)),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the daemon has fenced this session.
    pub fn wait_fenced(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.control.is_fenced() {
            assert!(Instant::now() < deadline, "the session is not fenced");
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(self.call(&Request::InodeRange).err(), Some(Errno::EIO));
    }

    pub fn attach(&self, socket: &Path) -> Connection {
        let mut line = Connection::connect(socket).expect("connected");
        let attach = Request::Attach { version: self.welcome.version, peer: self.welcome.peer };
        assert!(matches!(line.call(&attach, &[]).expect("answered").0, Reply::Done));
        line
    }

    pub fn log_fd(&self) -> impl AsFd + '_ {
        &self.log_file
    }
}

/// Returns whether this test may act as other users; says so if it's skipped.
pub fn may_change_users() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can become another user");
    }
    is_root
}

/// Acts in a thread that has become a user, of no other group than the user's own.
pub fn as_user<R: Send>(user: u32, act: impl FnOnce() -> R + Send) -> R {
    let become_user = || {
        rustix::thread::set_thread_groups(&[]).expect("no groups");
        let (gid, uid) = (Gid::from_raw(user), Uid::from_raw(user));
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("another group");
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("another user");
        act()
    };
    std::thread::scope(|scope| scope.spawn(become_user).join().expect("done"))
}

pub fn create(inode: InodeId, parent: InodeId, name: &[u8], kind: FileKind) -> Create<'_> {
    Create {
        inode,
        parent,
        name,
        kind,
        mode: 0o755,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        device: 0,
        at: NOW,
        target: &[],
        acl_access: &[],
        acl_default: &[],
    }
}
