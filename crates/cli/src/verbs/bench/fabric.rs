//! `ashlar bench fabric`: the cost of links between nodes, beside plain sockets in the same run.
//!
//! Both ends are on this machine, over loopback: this process, and a second one of the same program (`peer`). Plain
//! sockets, the fabric, and the fabric with TLS take turns in each round, each round beginning with another. So other
//! work of the machine affects all alike.
//!
//! The floor of an `fsync` over two nodes is measured in the same rounds (`fsync_floor`). A cluster's `fsync` is set
//! against the floor of the same run, since a loaded machine slows both.
//!
//! Method and figures: `docs/benchmarks.md`, section "Links between nodes: `ashlar bench fabric`".

mod case;
mod fsync_floor;
mod links;
mod peer;
mod peer_processes;
mod report;
mod sockets;

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use ashlar_fabric::{ClusterAuthority, Security};

use super::directories::{Scratch, TMPFS};
use super::interrupt::Interrupt;
use super::timing::{Summary, clock_ns, measure};
use crate::arguments::BenchFabricArguments;
use crate::error::CliError;
use crate::output::progress;
use case::{CARRIERS, Carrier, CarrierEnd, FabricCase, TurnPlan};
use fsync_floor::{FsyncPage, FsyncPath};
use links::{BenchLink, CLUSTER, NEAR, PEER};
use peer::{PeerCredentials, PeerTask};
use peer_processes::PeerProcess;
use report::{FabricReport, FabricSetting};
use sockets::SocketEnd;

pub use peer::run as run_peer;

/// Measures, and prints the results.
pub fn run(arguments: &BenchFabricArguments) -> Result<ExitCode, CliError> {
    let interrupt = Interrupt::catch()?;
    let mut site = FabricSite::start()?;
    let setting = FabricSetting {
        version: env!("CARGO_PKG_VERSION"),
        rounds: arguments.rounds,
        processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        clock_ns: clock_ns(),
    };
    let mut report = FabricReport::new(setting);
    let bar = progress::bar("", FabricCase::ALL.len() as u64 * arguments.rounds);
    for round in 0..arguments.rounds {
        for case in FabricCase::ALL {
            bar.set_message(format!("{}, round {}", case.name(), round + 1));
            let mut carriers = case.carriers().to_vec();
            let first = round as usize % carriers.len();
            carriers.rotate_left(first);
            for carrier in carriers {
                interrupt.check()?;
                let words = || format!("measuring {} by {}", case.name(), carrier.name());
                let summary = site.measure(case, carrier).map_err(|error| CliError::system(words())(error))?;
                report.add(case, carrier, summary);
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    // The processes end, and the files are removed, before the result is printed.
    drop(site);
    if arguments.json {
        println!("{}", report.json().map_err(CliError::system("writing JSON"))?);
    } else {
        print!("{}", report.text());
    }
    Ok(ExitCode::SUCCESS)
}

/// The processes of the benchmark, and this process's ends of all connections.
struct FabricSite {
    /// In the order of [`CARRIERS`].
    ends: [Box<dyn CarrierEnd>; CARRIERS.len()],
    page: FsyncPage,
    // Dropped in this order: the daemon has a connection to the peer, and the file is in use by the daemon.
    _daemon: PeerProcess,
    _peer: PeerProcess,
    _files: Scratch,
}

impl FabricSite {
    /// Starts the peer and the daemon, and connects to the peer.
    fn start() -> Result<Self, CliError> {
        let files = Scratch::make(Path::new(TMPFS), "fabric")?;
        let authority = ClusterAuthority::create(CLUSTER).map_err(other("making certificates"))?;
        let issue = |node| authority.issue(node).map_err(other("making certificates"));
        let (own, theirs) = (Security::Tls(issue(NEAR)?), PeerCredentials::from(issue(PEER)?));
        let (peer, addresses) = PeerProcess::start(&PeerTask::Peer { credentials: theirs })?;
        let connecting = || CliError::system("connecting to the peer of the benchmark");
        let ends: [Box<dyn CarrierEnd>; CARRIERS.len()] = [
            Box::new(SocketEnd::connect(&addresses.socket).map_err(connecting())?),
            Box::new(BenchLink::connect(&Security::Plain, &addresses.fabric).map_err(connecting())?),
            Box::new(BenchLink::connect(&own, &addresses.fabric_tls).map_err(connecting())?),
        ];
        let path = files.path().join("page");
        let page = FsyncPage::make(&path).map_err(CliError::system(format!("making {}", path.display())))?;
        let task = PeerTask::Daemon { page: path, persister: addresses.persister };
        let (mut daemon, _) = PeerProcess::start(&task)?;
        // A sleeping program would never learn that its daemon is gone.
        let lost = page.try_clone().map_err(CliError::system("mapping the page of the benchmark"))?;
        daemon.watch_end(move || lost.report_loss());
        Ok(Self { ends, page, _daemon: daemon, _peer: peer, _files: files })
    }

    /// Runs a contender's turn in a case.
    fn measure(&mut self, case: FabricCase, carrier: Carrier) -> io::Result<Summary> {
        let (length, count) = (case.bytes(), case.count());
        let bytes = vec![0x5a; length];
        let path = match carrier {
            Carrier::Nodes => FsyncPath::OverPeer,
            Carrier::Futex => FsyncPath::DaemonAlone,
            Carrier::Socket | Carrier::Fabric | Carrier::FabricTls => {
                let at = CARRIERS.iter().position(|other| *other == carrier);
                let end = &mut self.ends[at.expect("each carrier has an end")];
                return measure_carrier(end.as_mut(), case, &bytes);
            }
        };
        self.page.begin_turn(path, length)?;
        measure(count, |_| self.page.ask(&bytes))
    }
}

fn measure_carrier(end: &mut dyn CarrierEnd, case: FabricCase, bytes: &[u8]) -> io::Result<Summary> {
    let (count, is_stream) = (case.count(), matches!(case, FabricCase::Stream { .. }));
    end.begin_turn(TurnPlan { is_stream, length: bytes.len() as u32, count: count as u32 })?;
    if !is_stream {
        return measure(count, |_| end.exchange(bytes));
    }
    let start = Instant::now();
    end.stream(bytes, count)?;
    // All messages were timed at once.
    let mean_ns = start.elapsed().as_nanos() as f64 / count as f64;
    let (count, batch) = (count as u64, count as u64);
    Ok(Summary { count, batch, p50_ns: mean_ns, p99_ns: mean_ns, max_ns: mean_ns, mean_ns })
}

fn other<E: std::error::Error + Send + Sync + 'static>(what: &'static str) -> impl FnOnce(E) -> CliError {
    move |error| CliError::system(what)(io::Error::other(error))
}
