//! The socket of a node that serves no sessions: it says why, and takes commands.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ashlar_metrics::{FilledStatus, StatusSlot, StatusSource};
use ashlar_pmem::Arena;
use ashlar_types::Errno;
use ashlar_wire::{
    ClusterCommand, ClusterReport, Connection, Listener, ReceiveLimits, Reply, Request, SpaceReply, StatusReply,
    is_administrator, listen_to_all,
};

/// The longest message that is taken, and how long a peer may be silent.
const REQUEST_BYTES_MAX: usize = 64 << 10;
const SILENCE_MAX: Duration = Duration::from_secs(1);

/// A node that serves no sessions.
pub trait StandbyNode: Send + Sync {
    /// Returns the sentence for processes that ask for a session: which node serves, and the next command.
    fn refusal(&self) -> String;

    /// Returns whether sessions that exist may go on soon: they wait as for a SharedFS that is starting.
    fn may_serve_soon(&self) -> bool;

    /// Returns the state of the cluster.
    fn report(&self) -> ClusterReport;

    /// Changes the size of the node's arena.
    ///
    /// # Errors
    /// A sentence for people: why not, and what to do.
    fn resize(&self, bytes: u64) -> Result<(), String>;

    /// Carries out a command of an administrator.
    ///
    /// # Errors
    /// A sentence for people: why not, and the next command.
    fn run_command(&self, command: &ClusterCommand) -> Result<(), String>;
}

/// The socket of a node that serves no sessions, until it is dropped. Metrics are served of the same status.
pub struct StandbyServer {
    listener: Listener,
    thread: Option<JoinHandle<()>>,
    _status: FilledStatus,
}

impl StandbyServer {
    /// Listens at a socket, and fills the slot with the node's status.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn start(
        socket: &Path,
        arena: &Arc<Arena>,
        node: Arc<dyn StandbyNode>,
        status: &StatusSlot,
    ) -> io::Result<Self> {
        let listener = listen_to_all(socket)?;
        let acceptor = listener.acceptor();
        let (arena, reported, started) = (Arc::clone(arena), Arc::clone(&node), Instant::now());
        let source: StatusSource = Arc::new(move || report_status(&arena, started, reported.report()));
        let filled = status.fill(Arc::clone(&source));
        let thread = std::thread::Builder::new().name("standby".into()).spawn(move || {
            while let Ok(connection) = acceptor.accept() {
                serve(connection, &*node, &*source);
            }
        })?;
        Ok(Self { listener, thread: Some(thread), _status: filled })
    }
}

impl Drop for StandbyServer {
    fn drop(&mut self) {
        self.listener.stop_accepting();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has logged that.
            let _ = thread.join();
        }
    }
}

/// Serves one message: such connections are short.
fn serve(mut connection: Connection, node: &dyn StandbyNode, status: &dyn Fn() -> StatusReply) {
    let limits = ReceiveLimits {
        bytes_max: REQUEST_BYTES_MAX,
        silence_max: Some(SILENCE_MAX),
        message_max: SILENCE_MAX,
        takes_descriptors: false,
    };
    let Ok((request, _)) = connection.receive_bounded::<Request>(&limits) else { return };
    let reply = match request {
        Request::Status => Reply::Status(Box::new(status())),
        Request::Cluster(_) | Request::Resize { .. } => match is_administrator(connection.socket()) {
            Ok(true) => {
                let done = match request {
                    Request::Cluster(command) => node.run_command(&command),
                    Request::Resize { bytes } => node.resize(bytes),
                    _ => return,
                };
                done.map_or_else(Reply::Refused, |()| Reply::Done)
            }
            Ok(false) => Reply::Error(Errno::EPERM),
            Err(_) => return,
        },
        // A session takes a connection that is closed without an answer for a SharedFS that is not up yet.
        Request::Hello(hello) if hello.resume.is_some() && node.may_serve_soon() => return,
        Request::Attach { .. } => return,
        _ => Reply::Refused(node.refusal()),
    };
    // A peer that does not wait for the answer does not get it.
    let _ = connection.send(&reply, &[]);
}

fn report_status(arena: &Arena, started: Instant, cluster: ClusterReport) -> StatusReply {
    let medium = arena.medium();
    StatusReply {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_seconds: started.elapsed().as_secs(),
        arena: arena.dir().display().to_string(),
        medium: medium.label().to_owned(),
        arena_bytes: arena.summary().size_bytes,
        space: SpaceReply::default(),
        sessions: Vec::new(),
        counters: Vec::new(),
        cluster: Some(Box::new(cluster)),
    }
}
