//! Errors of the command, each with its next step.

mod dev;

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use ashlar_daemon::{DaemonError, SupervisorError};
use ashlar_fuse::MountError;
use ashlar_launch::LaunchError;
use ashlar_libfs::ConnectError;
use ashlar_member::MemberError;
use ashlar_metrics::MetricsAddress;
use ashlar_pmem::ArenaError;
use ashlar_store::{DumpError, StoreError};
use ashlar_types::{Errno, VersionRange};
use ashlar_wire::WireError;
use thiserror::Error;

pub use self::dev::DevError;
use crate::output::size::Size;

/// Why a verb failed.
#[derive(Debug, Error)]
pub enum CliError {
    /// Mounting takes root.
    #[error("{what} takes root; run it as root, or with sudo")]
    NotRoot {
        /// The attempted operation.
        what: &'static str,
    },
    /// No FUSE device.
    #[error(
        "there is no /dev/fuse, through which file systems are served; load the kernel's module with 'modprobe fuse' \
         (in a container: start it with --device /dev/fuse --cap-add SYS_ADMIN)"
    )]
    NoFuseDevice,
    /// The mount point is not there.
    #[error("there is no directory {0}; make it with 'mkdir -p {path}'", path = .0.display())]
    NoDirectory(PathBuf),
    /// The mount point is no directory.
    #[error("{0} is not a directory; name one to mount on")]
    NotADirectory(PathBuf),
    /// An Ashlar is mounted there already.
    #[error("{0} is mounted already; 'ashlar status' shows it, 'ashlar umount {path}' unmounts it", path = .0.display())]
    AlreadyMounted(PathBuf),
    /// No Ashlar is mounted there.
    #[error("no Ashlar file system is mounted on {0}; 'ashlar status' lists those that are")]
    NotMounted(PathBuf),
    /// A member of a cluster can't do this.
    #[error(transparent)]
    Member(#[from] MemberError),
    /// A cluster on this machine can't be made or changed.
    #[error(transparent)]
    Dev(#[from] DevError),
    /// A node refuses a command.
    #[error("{0}")]
    ClusterRefused(String),
    /// The arena belongs to no cluster.
    #[error("the arena {0} belongs to no cluster; 'ashlar cluster init' makes one")]
    NoCluster(PathBuf),
    /// An arena is there already.
    #[error("there is an arena in {0} already; name another directory with --arena, or remove it")]
    ArenaExists(PathBuf),
    /// No daemon runs.
    #[error(
        "no daemon runs; 'ashlar mount DIR' mounts an arena and starts one, 'ashlar status' shows those that are there"
    )]
    NothingRuns,
    /// Metrics can't be served.
    #[error("metrics can't be served at {address}: {error}; give another address with --metrics")]
    Metrics {
        /// The address.
        address: MetricsAddress,
        /// The cause.
        error: io::Error,
    },
    /// A program can't be run.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A subtree is a directory's.
    #[error("{0} is not a directory; a quota can be set on a directory, and counts all that is in it")]
    NoTree(PathBuf),
    /// The directory is in no mounted Ashlar.
    #[error("{0} is not in an Ashlar file system that is mounted; 'ashlar status' lists those that are")]
    NotInMount(PathBuf),
    /// No such user.
    #[error("there is no user {0}; name one that 'getent passwd' lists, or give a number")]
    NoSuchUser(String),
    /// No such group.
    #[error("there is no group {0}; name one that 'getent group' lists, or give a number")]
    NoSuchGroup(String),
    /// The account has no limit.
    #[error("{0} has no limit; 'ashlar quota show' lists all limits")]
    NoQuota(String),
    /// Programs use the mount.
    #[error("{path} is busy{users}; end the programs that use it, or detach it with 'ashlar umount --lazy {path}'", path = .path.display())]
    Busy {
        /// The mount point.
        path: PathBuf,
        /// Its users, as far as they can be seen, as part of the sentence.
        users: String,
    },
    /// The arena is held by a process that is not its daemon.
    #[error("the arena {arena} is in use by process {pid} ({program}); wait for it, or end it with 'kill {pid}'", arena = .arena.display())]
    ArenaInUse {
        /// The arena.
        arena: PathBuf,
        /// The holder.
        pid: u32,
        /// Its name.
        program: String,
    },
    /// The arena is of another version.
    #[error(
        "the arena {arena} has format {found}, this ashlar ({program}) reads {supported}; use the ashlar that made it, or another arena with --arena",
        arena = .arena.display(), program = env!("CARGO_PKG_VERSION")
    )]
    WrongVersion {
        /// The arena.
        arena: PathBuf,
        /// The versions that understand the arena.
        found: VersionRange,
        /// The versions that this program reads.
        supported: VersionRange,
    },
    /// The arena does not exist.
    #[error("there is no arena in {0}; 'ashlar mount DIR --arena {path}' makes one", path = .0.display())]
    NoArena(PathBuf),
    /// The caller may not read the arena.
    #[error("the arena {0} belongs to another user; run the command as root, or with sudo")]
    NotReadable(PathBuf),
    /// No room for the arena.
    #[error(
        "there is no room for an arena of {wanted} in {arena} ({free} are free there); ask for less with --size, free \
         some, or choose another place with --arena",
        arena = .arena.display()
    )]
    NoSpace {
        /// The arena.
        arena: PathBuf,
        /// Size wanted.
        wanted: Size,
        /// Free space.
        free: Size,
    },
    /// Too small an arena.
    #[error("an arena of {wanted} is too small; the smallest is {least}: ask for more with --size")]
    TooSmall {
        /// Size wanted.
        wanted: Size,
        /// The smallest one.
        least: Size,
    },
    /// The socket's path is too long for the kernel.
    #[error("the path {0} is too long to hold a socket; choose a shorter one with --arena")]
    PathTooLong(PathBuf),
    /// Another failure of an arena.
    #[error("arena {arena}: {error}", arena = .arena.display())]
    Arena {
        /// The arena.
        arena: PathBuf,
        /// The error.
        error: ArenaError,
    },
    /// The metadata store can't be opened.
    #[error("arena {arena}: {error}; 'ashlar fsck --arena {arena}' shows more", arena = .arena.display())]
    Store {
        /// The arena.
        arena: PathBuf,
        /// The error.
        error: StoreError,
    },
    /// The daemon did not start.
    #[error("the daemon did not start: {reason}; its log is {log}", log = .log.display())]
    DaemonStart {
        /// Its last error.
        reason: String,
        /// Its log.
        log: PathBuf,
    },
    /// No daemon answers.
    #[error("no daemon answers for the arena {0}; 'ashlar mount DIR' starts one, 'ashlar daemon' runs one")]
    NoDaemon(PathBuf),
    /// The daemon runs, and does not answer.
    #[error(
        "the daemon of the arena {arena} (process {pid}) does not answer; if it was stopped, 'kill -CONT {pid}' has it go on",
        arena = .arena.display()
    )]
    DaemonSilent {
        /// The arena.
        arena: PathBuf,
        /// The holder.
        pid: u32,
    },
    /// The daemon refused a request.
    #[error("the daemon did not {what}: {error}; its log says more: {log}", log = .log.display())]
    Refused {
        /// The refused request.
        what: &'static str,
        /// Its answer.
        error: Errno,
        /// Its log.
        log: PathBuf,
    },
    /// The daemon's answer can't be parsed: it may be of another version.
    #[error(
        "the daemon gave an answer that this ashlar does not understand; is it of another version? End it, and try again"
    )]
    Misunderstood,
    /// The arena can't shrink so far.
    #[error("the files in the arena need more than {0}; remove some, or choose a larger size")]
    ShrinkTooFar(Size),
    /// The arena may not shrink so far: programs would lose mapped bytes.
    #[error(
        "programs have files mapped that lie beyond {0} in the arena; end those that 'ashlar status' shows, or choose a larger size"
    )]
    ShrinkMapped(Size),
    /// Repair of an arena that is in use.
    #[error("the arena {0} is in use, and only one that is not can be repaired; unmount it first: 'ashlar umount DIR'")]
    RepairInUse(PathBuf),
    /// Comparing or dumping an arena that is in use.
    #[error(
        "the arena {0} is in use, and only one that is not can be compared or dumped; unmount it first: 'ashlar umount DIR'"
    )]
    CompareInUse(PathBuf),
    /// One arena in place of two.
    #[error("{0} is one arena; name another one to compare it with, such as a copy of its directory")]
    SameArena(PathBuf),
    /// The dump of an arena can't be made.
    #[error("dumping the arena {arena}: {error}", arena = .arena.display())]
    Dump {
        /// The arena.
        arena: PathBuf,
        /// The error.
        error: DumpError,
    },
    /// A comparison has no result.
    #[error(transparent)]
    Comparison(Box<CliError>),
    /// No tmpfs where one is expected.
    #[error("{0} is no tmpfs; name a directory to compare with: 'ashlar bench --compare DIR'")]
    NoTmpfs(PathBuf),
    /// The place to measure in is no directory.
    #[error("{0} is not a directory; name one to measure in")]
    NoBenchDirectory(PathBuf),
    /// No room for the measurement.
    #[error(
        "the cases take {wanted} in {directory} ({free} are free there); free some, or name another directory",
        directory = .directory.display()
    )]
    NoBenchSpace {
        /// The directory.
        directory: PathBuf,
        /// Size wanted.
        wanted: Size,
        /// Free space.
        free: Size,
    },
    /// No case of this name.
    #[error("no case's name contains '{word}'; there are: {cases}")]
    NoSuchCase {
        /// The given word.
        word: String,
        /// Their names.
        cases: String,
    },
    /// All programs that the benchmark starts would bypass the kernel.
    #[error("'ashlar bench' starts what it measures under 'ashlar run' by itself; start it without 'ashlar run'")]
    BenchUnderRun,
    /// A worker of the benchmark failed.
    #[error("measuring {case} on {contender}: {words}")]
    Measuring {
        /// The measured case.
        case: &'static str,
        /// The contender.
        contender: &'static str,
        /// Its message.
        words: String,
    },
    /// A signal ended the benchmark.
    #[error("interrupted; the files made for it are removed")]
    Interrupted,
    /// The mount process failed with this message.
    #[error("{0}")]
    MountProcess(String),
    /// The mount failed.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// No session could be opened.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// SharedFS failed.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// Its supervisor failed.
    #[error(transparent)]
    Supervisor(#[from] SupervisorError),
    /// The connection to the daemon failed.
    #[error("talking to the daemon failed: {0}; 'ashlar status' shows whether it runs")]
    Wire(#[from] WireError),
    /// The operating system failed a call.
    #[error("{what}: {error}")]
    System {
        /// The attempted operation.
        what: String,
        /// Why it failed.
        error: io::Error,
    },
}

impl CliError {
    /// Makes a function for `map_err` that adds the attempted operation to an error of the operating system.
    pub fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |error| Self::System { what, error: error.into() }
    }

    /// Returns the exit status: 1, and of a comparison that of diff(1) for trouble.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(if matches!(self, Self::Comparison(_)) { 2 } else { 1 })
    }
}
