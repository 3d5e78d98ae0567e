//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use ashlar_metrics::MetricsAddress;
use ashlar_wire::Admission;
use clap::{Args, Parser, Subcommand};

use crate::output::size::{FilesLimit, Size, SpaceLimit};
use crate::system::admission::AdmissionChoice;
use crate::system::arena::ArenaChoice;

const FIRST_STEPS: &str = "\
First steps:
  sudo ashlar mount DIR    a file system in DIR, with nothing to prepare
  ashlar status            what is there, and what it survives
  sudo ashlar umount DIR   nothing is left running

ASHLAR_ARENA in the environment stands for --arena.";

/// The size of an arena of 'ashlar dev': its space is taken at once.
const DEV_ARENA_SIZE: Size = Size(256 << 20);

/// A POSIX file system that runs next to the application.
#[derive(Debug, Parser)]
#[command(name = "ashlar", version, propagate_version = true, after_help = FIRST_STEPS)]
pub struct Arguments {
    /// The verb.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Mount the file system on a directory, starting everything that it needs
    Mount(MountArguments),
    /// Unmount it; when the last mount goes, nothing is left running
    #[command(visible_alias = "unmount")]
    Umount(UmountArguments),
    /// Run a program whose file operations on mounted Ashlars are function calls: same files, at memory speed
    Run(RunArguments),
    /// Show arenas, sessions and counters
    Status(StatusArguments),
    /// Show what sessions do, live: operations and their latency, logs, digest, leases
    ///
    /// Operations are those of LibFS: a system call with a path of several names is several. All are counted; latencies
    /// are those of a sample, what reaches LibFS through a mount without the time in the kernel.
    Top(TopArguments),
    /// Check an arena, in use or not; repair one, or compare two, that are not in use
    Fsck(FsckArguments),
    /// Run the daemon in the foreground, for service managers ('ashlar mount' starts one by itself)
    Daemon(DaemonArguments),
    /// Look after an arena
    #[command(subcommand)]
    Arena(ArenaVerb),
    /// Found a cluster: two nodes with one file system
    #[command(subcommand)]
    Cluster(ClusterVerb),
    /// Add nodes to a cluster, and let one take over
    #[command(subcommand)]
    Node(NodeVerb),
    /// Try a cluster out on this machine: two nodes, of which either can be killed, frozen or cut off
    #[command(subcommand)]
    Dev(DevVerb),
    /// Limit how much users, groups and directory trees may use
    #[command(subcommand)]
    Quota(QuotaVerb),
    /// Measure what operations cost: at the least, under 'ashlar run', through the mount, and on another file system
    Bench(BenchArguments),
    /// A process that runs the operations which 'ashlar bench' measures
    #[command(hide = true)]
    BenchWorker(BenchWorkerArguments),
    /// SharedFS itself, which the daemon's supervisor starts
    #[command(hide = true)]
    SharedFs(SharedFsArguments),
    /// The helper, for work that may have to wait for a mount; SharedFS and mount processes start it
    #[command(hide = true)]
    Helper(HelperArguments),
    /// The process behind a mount, which 'ashlar mount' starts
    #[command(hide = true)]
    MountProcess(MountProcessArguments),
    /// The other end of the links that 'ashlar bench fabric' measures; reads its task on standard input
    #[command(hide = true)]
    BenchPeer,
}

/// Verbs on arenas.
#[derive(Debug, Subcommand)]
pub enum ArenaVerb {
    /// Make an arena larger or smaller, while it is in use or not
    Resize(ResizeArguments),
}

/// Verbs on clusters.
#[derive(Debug, Subcommand)]
pub enum ClusterVerb {
    /// Make an arena, new or not in use, the first node of a cluster
    Init(ClusterInitArguments),
}

/// Verbs on the nodes of a cluster.
#[derive(Debug, Subcommand)]
pub enum NodeVerb {
    /// Add a node: writes an invitation, a file for the other machine
    Add(NodeAddArguments),
    /// Make an arena for an invited node; run this on the new machine
    Join(NodeJoinArguments),
    /// Let a replica take over from its writer, which must not run any more
    Promote(NodePromoteArguments),
    /// Let a writer go on without its replica
    Force(NodeForceArguments),
}

/// `ashlar cluster init`.
#[derive(Args, Debug)]
pub struct ClusterInitArguments {
    /// The address at which the other node reaches this one, HOST:PORT
    #[arg(long, value_name = "HOST:PORT")]
    pub address: String,
    /// How many nodes must have an update before fsync returns: 1 or 2
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub min_replicas: u8,
    /// Don't encrypt links, for trusted networks
    #[arg(long)]
    pub no_tls: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub create: CreateArguments,
}

/// `ashlar node add`.
#[derive(Args, Debug)]
pub struct NodeAddArguments {
    /// The address at which the new node will listen, HOST:PORT
    #[arg(value_name = "HOST:PORT")]
    pub address: String,
    /// The file to write; it has the new node's key
    #[arg(long, value_name = "FILE")]
    pub invitation: PathBuf,
    /// Put it in the place of the present replica, which is lost for good
    #[arg(long)]
    pub replace: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
}

/// `ashlar node join`.
#[derive(Args, Debug)]
pub struct NodeJoinArguments {
    /// The file that 'ashlar node add' wrote
    #[arg(value_name = "FILE")]
    pub invitation: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub create: CreateArguments,
}

/// `ashlar node promote`.
#[derive(Args, Debug)]
pub struct NodePromoteArguments {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
    /// Give up what the writer may have acknowledged alone
    #[arg(long)]
    pub force: bool,
}

/// `ashlar node force`.
#[derive(Args, Debug)]
pub struct NodeForceArguments {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
}

/// Verbs on a cluster on this machine.
#[derive(Debug, Subcommand)]
pub enum DevVerb {
    /// Make a cluster, and start its daemons; as root, in network namespaces
    Up(DevUpArguments),
    /// Show the status of each node
    Status(DevStatusArguments),
    /// Start the daemon of a node that was killed or stopped
    Start(DevNodeArguments),
    /// End the daemon of a node in order
    Stop(DevNodeArguments),
    /// Kill all processes of a node: its daemon, and those behind its mounts
    Kill(DevNodeArguments),
    /// Stop all processes of a node, as a machine that hangs
    Freeze(DevNodeArguments),
    /// Cut the link between the nodes
    Cut(DevNameArgument),
    /// Mend the link, and let frozen nodes go on
    Heal(DevNameArgument),
    /// End a cluster, and remove all that 'up' has made
    Down(DevNameArgument),
}

/// The cluster of a verb.
#[derive(Args, Clone, Debug)]
pub struct DevNameArgument {
    /// The name of the cluster; several can exist
    #[arg(long, value_name = "NAME", default_value = "dev")]
    pub name: String,
}

/// `ashlar dev up`.
#[derive(Args, Debug)]
pub struct DevUpArguments {
    /// How many nodes
    #[arg(value_name = "NODES", default_value_t = 2)]
    pub nodes: u16,
    /// How many nodes must have an update before fsync returns: 1 or 2
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub min_replicas: u8,
    /// Don't encrypt links
    #[arg(long)]
    pub no_tls: bool,
    /// Bytes of data that each arena holds
    #[arg(long, value_name = "SIZE", default_value_t = DEV_ARENA_SIZE)]
    pub size: Size,
    /// Make the arenas in this directory; by default they are in memory
    #[arg(long, value_name = "DIR")]
    pub directory: Option<PathBuf>,
    /// Use addresses of the loopback device, and no network namespaces, as without root; then no link can be cut
    #[arg(long)]
    pub loopback: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub of: DevNameArgument,
}

/// `ashlar dev status`.
#[derive(Args, Debug)]
pub struct DevStatusArguments {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub of: DevNameArgument,
}

/// A verb on a node of a cluster on this machine.
#[derive(Args, Debug)]
pub struct DevNodeArguments {
    /// The node's number
    #[arg(value_name = "NODE")]
    pub node: u16,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub of: DevNameArgument,
}

/// Verbs on quotas.
#[derive(Debug, Subcommand)]
pub enum QuotaVerb {
    /// Set limits, which hold at once
    Set(QuotaSetArguments),
    /// Show limits and use
    Show(QuotaShowArguments),
    /// Take limits away
    Remove(QuotaRemoveArguments),
}

/// The user, group or subtree of a quota.
#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
pub struct AccountArguments {
    /// All files of a user, by name or number
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// All files of a group, by name or number
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// All files below a directory of a mounted Ashlar
    #[arg(long, value_name = "DIR")]
    pub subtree: Option<PathBuf>,
}

/// The arena of a quota.
#[derive(Args, Clone, Debug)]
pub struct QuotaArenaArguments {
    /// A directory that an Ashlar is mounted on
    #[arg(value_name = "MOUNT")]
    pub mount: Option<PathBuf>,
    /// Where files are kept: 'disk' (the default), 'memory', or a directory
    #[arg(long, value_name = "WHERE", env = "ASHLAR_ARENA")]
    pub arena: Option<ArenaChoice>,
}

/// `ashlar quota set`.
#[derive(Args, Debug)]
pub struct QuotaSetArguments {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub account: AccountArguments,
    /// The most space, such as 10G, or 'none'; holes take none
    #[arg(long, value_name = "SIZE", required_unless_present = "files")]
    pub space: Option<SpaceLimit>,
    /// The most files, directories among them, or 'none'
    #[arg(long, value_name = "N")]
    pub files: Option<FilesLimit>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub of_arena: QuotaArenaArguments,
}

/// `ashlar quota show`.
#[derive(Args, Debug)]
pub struct QuotaShowArguments {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub of_arena: QuotaArenaArguments,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `ashlar quota remove`.
#[derive(Args, Debug)]
pub struct QuotaRemoveArguments {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub account: AccountArguments,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub of_arena: QuotaArenaArguments,
}

/// The arena of a verb.
#[derive(Args, Clone, Debug)]
pub struct ArenaArgument {
    /// Where files are kept: 'disk' (below /var/lib/ashlar), 'memory' (below /run/ashlar), or a directory
    #[arg(long, value_name = "WHERE", default_value = "disk", env = "ASHLAR_ARENA", hide_env = true)]
    pub arena: ArenaChoice,
}

/// How to make an arena if none exists.
#[derive(Args, Clone, Debug)]
pub struct CreateArguments {
    /// Bytes of data that a new arena holds, such as 512M or 64G; by default a modest part of what is free
    #[arg(long, value_name = "SIZE")]
    pub size: Option<Size>,
    /// Run the flush instructions of persistent memory on a new arena in memory, to see what they cost
    #[arg(long)]
    pub emulate_pmem: bool,
}

/// `ashlar mount`.
#[derive(Args, Debug)]
pub struct MountArguments {
    /// The directory to mount on
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub create: CreateArguments,
    /// Mount for reading only; programs under 'ashlar run' are served by the kernel then
    #[arg(short, long)]
    pub read_only: bool,
    /// The users that 'ashlar run' serves: root, user=NAME, group=NAME, several with commas between, or all
    ///
    /// By default these are root and the user behind sudo. The kernel serves all others. With 'all', each user can read
    /// all data in the arena, whatever the modes of files say.
    #[arg(long, value_name = "USERS")]
    pub sessions: Option<AdmissionChoice>,
    /// Stay in the foreground until the file system is unmounted, or Ctrl-C is pressed
    #[arg(short, long)]
    pub foreground: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
}

/// `ashlar umount`.
#[derive(Args, Debug)]
pub struct UmountArguments {
    /// The directory that is mounted
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// Take it out of the tree now, and let programs that use it finish with it
    #[arg(short, long)]
    pub lazy: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    pub quiet: bool,
}

/// `ashlar run`.
#[derive(Args, Debug, Default)]
pub struct RunArguments {
    /// Say at the end on standard error which calls were accelerated, delegated to the kernel and missed, how often,
    /// and how long they took
    #[arg(long)]
    pub report: bool,
    /// Write the report to a file
    #[arg(long, value_name = "FILE")]
    pub report_to: Option<PathBuf>,
    /// Write the report as JSON
    #[arg(long)]
    pub report_json: bool,
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<std::ffi::OsString>,
}

impl RunArguments {
    /// Whether there is to be a report.
    pub fn wants_report(&self) -> bool {
        self.report || self.report_json || self.report_to.is_some()
    }
}

/// `ashlar status`.
#[derive(Args, Debug)]
pub struct StatusArguments {
    /// Only this arena; by default all that are mounted, and the default ones
    #[arg(long, value_name = "WHERE", env = "ASHLAR_ARENA", hide_env = true)]
    pub arena: Option<ArenaChoice>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `ashlar top`.
#[derive(Args, Debug)]
pub struct TopArguments {
    /// Only this arena; by default all that are mounted, and the default ones
    #[arg(long, value_name = "WHERE", env = "ASHLAR_ARENA", hide_env = true)]
    pub arena: Option<ArenaChoice>,
    /// Seconds between two looks
    #[arg(short, long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub interval: f64,
    /// Show one interval, and end
    #[arg(long)]
    pub once: bool,
    /// Print a line of JSON for each interval
    #[arg(long)]
    pub json: bool,
}

impl TopArguments {
    /// Returns the time between two samples.
    pub fn interval(&self) -> Duration {
        Duration::from_secs_f64(self.interval)
    }
}

/// Parses a time that can be waited for.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| "a number of seconds from 0.1 to 86400".into())
}

/// `ashlar fsck`.
#[derive(Args, Debug)]
pub struct FsckArguments {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
    /// Repair what can be repaired; the arena must not be in use
    #[arg(long)]
    pub repair: bool,
    /// Compare the files of two arenas, neither in use; exits with 0 if they are equal, 1 if not, 2 on trouble
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with = "repair")]
    pub compare: Option<Vec<ArenaChoice>>,
    /// Print the canonical dump of an arena that is not in use: all that its files are, for diff(1)
    #[arg(long, value_name = "ARENA", conflicts_with_all = ["repair", "compare", "json"])]
    pub dump: Option<ArenaChoice>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `ashlar daemon`.
#[derive(Args, Debug)]
pub struct DaemonArguments {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub create: CreateArguments,
    /// The users whose programs may name the socket instead of a mount, as for 'ashlar mount'; by default root
    #[arg(long, value_name = "USERS")]
    pub sessions: Option<AdmissionChoice>,
    /// End when there was no session for so many seconds; without it, stay
    #[arg(long, value_name = "N")]
    pub linger_seconds: Option<u64>,
    /// Serve metrics for Prometheus at this address, as http://HOST:PORT/metrics
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics: Option<MetricsAddress>,
    /// A test: keep a replica of the file system in this directory, and commit nothing that it lacks; the file system
    /// must be empty when the shadow is made
    #[arg(long, value_name = "DIR")]
    pub shadow: Option<PathBuf>,
    /// Become the leader of a session of its own, as background processes do
    #[arg(long, hide = true)]
    pub background: bool,
}

/// `ashlar bench`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub struct BenchArguments {
    /// Another benchmark than that of file operations.
    #[command(subcommand)]
    pub other: Option<BenchVerb>,
    /// A directory on a mounted Ashlar; without one, a file system in memory is mounted for as long as it takes, which
    /// takes root
    #[arg(value_name = "DIR")]
    pub directory: Option<PathBuf>,
    /// The directory to compare with; by default one in /dev/shm, which is a tmpfs
    #[arg(long, value_name = "DIR")]
    pub compare: Option<PathBuf>,
    /// Only cases whose names contain one of these words: append, overwrite, processes, sustained, read, map, create,
    /// stat, open, readdir, turns, start, script, breakdown
    #[arg(long, value_name = "WORD", num_args = 1..)]
    pub cases: Vec<String>,
    /// How often each case is run on each contender; figures are medians over the rounds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=99))]
    pub rounds: u64,
    /// Longer sustained cases, and more of them: minutes instead of seconds for each
    #[arg(long)]
    pub long: bool,
    /// Print JSON, with each number of each round
    #[arg(long)]
    pub json: bool,
}

/// Benchmarks beside that of file operations.
#[derive(Debug, Subcommand)]
pub enum BenchVerb {
    /// Measure links between nodes beside plain sockets, and the floor of an fsync over two nodes
    ///
    /// Both ends are processes on this machine, and TCP goes over the loopback interface. In each round, plain blocking
    /// sockets (TCP_NODELAY), the fabric, and the fabric with TLS take turns, each round beginning with another. A
    /// round trip is a message and its echo of the same length. A stream is 256 messages of 1 MB, until the peer has
    /// all of them. Times are medians over the rounds of each round's median (p50) and 99th percentile (p99); a ratio
    /// is the median of the rounds' ratios.
    ///
    /// The floor of an fsync over two nodes has three processes with plain threads. A program copies bytes to shared
    /// memory and wakes a daemon by a futex. The daemon sends them over a plain socket to a peer. The peer copies them
    /// to a mapped file in memory and answers, and the daemon wakes the program. No part does any other work, and no
    /// thread spins.
    Fabric(BenchFabricArguments),
}

/// `ashlar bench fabric`.
#[derive(Args, Debug)]
pub struct BenchFabricArguments {
    /// How often each case is run on each contender; figures are medians over the rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=99))]
    pub rounds: u64,
    /// Print JSON, with each number of each round
    #[arg(long)]
    pub json: bool,
}

/// `ashlar bench-worker`.
#[derive(Args, Debug)]
pub struct BenchWorkerArguments {
    /// The task, as JSON
    pub task: String,
}

/// `ashlar shared-fs`.
#[derive(Args, Debug)]
pub struct SharedFsArguments {
    /// The arena's directory
    #[arg(long)]
    pub arena: PathBuf,
    /// End when there was no session for so many seconds
    #[arg(long)]
    pub linger_seconds: Option<u64>,
    /// The users that may have sessions without a mount
    #[arg(long, default_value = "root")]
    pub sessions: Admission,
    /// The address at which to serve metrics
    #[arg(long)]
    pub metrics: Option<MetricsAddress>,
    /// The directory of the shadow
    #[arg(long)]
    pub shadow: Option<PathBuf>,
}

/// `ashlar helper`.
#[derive(Args, Debug)]
pub struct HelperArguments {
    /// The arena's directory, shown in lists of processes
    #[arg(long)]
    pub arena: PathBuf,
}

/// `ashlar mount-process`.
#[derive(Args, Debug)]
pub struct MountProcessArguments {
    /// The directory to mount on
    pub directory: PathBuf,
    /// The arena's directory
    #[arg(long)]
    pub arena: PathBuf,
    /// Mount for reading only
    #[arg(long)]
    pub read_only: bool,
    /// The users that may have sessions by the mount
    #[arg(long, default_value = "root")]
    pub sessions: Admission,
}

/// `ashlar arena resize`.
#[derive(Args, Debug)]
pub struct ResizeArguments {
    /// The new size, such as 64G
    #[arg(value_name = "SIZE")]
    pub size: Size,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub arena: ArenaArgument,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn grammar_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn mount_reads_like_other_mount_commands() {
        let arguments = Arguments::parse_from(["ashlar", "mount", "--arena", "memory", "--size", "1G", "-f", "/mnt"]);
        let Verb::Mount(mount) = arguments.verb else { panic!("not a mount") };
        assert!(mount.foreground && !mount.read_only);
        assert_eq!(mount.arena.arena, ArenaChoice::Memory);
        assert_eq!((mount.create.size, mount.sessions), (Some(Size(1 << 30)), None));
        let arguments = Arguments::parse_from(["ashlar", "mount", "--sessions", "user=ann,group=staff", "/mnt"]);
        assert!(matches!(arguments.verb, Verb::Mount(MountArguments { sessions: Some(_), .. })));
    }

    #[test]
    fn quota_has_one_account_and_a_limit() {
        let parse = |words: &[&str]| Arguments::try_parse_from([&["ashlar", "quota"], words].concat());
        let set = parse(&["set", "--user", "ann", "--space", "10G", "--files", "none", "/mnt"]).expect("understood");
        let Verb::Quota(QuotaVerb::Set(set)) = set.verb else { panic!("not set") };
        assert_eq!(set.space, Some(SpaceLimit(Some(Size(10 << 30)))));
        assert_eq!((set.files, set.of_arena.mount), (Some(FilesLimit(None)), Some("/mnt".into())));
        for wrong in [
            &["set", "--user", "ann"][..],
            &["set", "--space", "10G"],
            &["set", "--user", "ann", "--group", "staff", "--space", "1G"],
            &["set", "--user", "ann", "--files", "many"],
            &["remove"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn interval_can_be_waited_for() {
        let parse = |interval: &str| Arguments::try_parse_from(["ashlar", "top", "--interval", interval]);
        let Verb::Top(top) = parse("0.5").expect("understood").verb else { panic!("not top") };
        assert_eq!(top.interval(), Duration::from_millis(500));
        for wrong in ["0", "-1", "NaN", "inf", "soon"] {
            assert!(parse(wrong).is_err(), "{wrong} was understood");
        }
    }

    #[test]
    fn bench_takes_directory_or_other_benchmark() {
        let parse = |words: &[&str]| Arguments::try_parse_from([&["ashlar", "bench"], words].concat());
        let Verb::Bench(bench) = parse(&["fabric", "--rounds", "2"]).expect("understood").verb else {
            panic!("not bench")
        };
        assert!(matches!(bench.other, Some(BenchVerb::Fabric(BenchFabricArguments { rounds: 2, json: false }))));
        for directory in ["/mnt/fabric", "./fabric", "help"] {
            let Verb::Bench(bench) = parse(&[directory, "--json"]).expect("understood").verb else {
                panic!("not bench")
            };
            assert!(bench.other.is_none() && bench.directory == Some(directory.into()), "{bench:?}");
        }
        assert!(parse(&["fabric", "--long"]).is_err(), "a flag of another benchmark was understood");
    }

    #[test]
    fn metrics_are_at_a_host_and_port() {
        let parse = |address: &str| Arguments::try_parse_from(["ashlar", "daemon", "--metrics", address]);
        let Verb::Daemon(daemon) = parse("[::1]:9100").expect("understood").verb else { panic!("not daemon") };
        assert_eq!(daemon.metrics.expect("an address").to_string(), "[::1]:9100");
        let error = parse("9100").expect_err("refused").to_string();
        assert!(error.contains("write HOST:PORT"), "{error}");
    }

    #[test]
    fn flags_after_the_program_are_its_own() {
        let parse = |words: &[&str]| Arguments::parse_from([&["ashlar", "run"], words].concat());
        let Verb::Run(run) = parse(&["--report-json", "--", "make", "--report"]).verb else { panic!("not run") };
        assert!(run.wants_report() && run.report_json && !run.report);
        assert_eq!(run.command, ["make", "--report"]);
        let Verb::Run(run) = parse(&["make", "--report"]).verb else { panic!("not run") };
        assert!(!run.wants_report());
    }

    #[test]
    fn unknown_flag_is_refused() {
        let error = Arguments::try_parse_from(["ashlar", "mount", "--sized", "1G", "/mnt"]).expect_err("refused");
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--size"), "the nearest flag is named: {error}");
    }
}
