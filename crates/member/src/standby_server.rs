//! The socket of a node that serves no sessions: it says why, and takes commands.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ashlar_types::Errno;
use ashlar_wire::{ClusterCommand, Connection, Listener, ReceiveLimits, Reply, Request};

/// The longest message that is taken, and how long a peer may be silent.
const REQUEST_BYTES_MAX: usize = 64 << 10;
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Any process may ask.
const SOCKET_MODE: u32 = 0o666;

/// A node that serves no sessions.
pub trait StandbyNode: Send + Sync {
    /// Returns the sentence for processes that ask for a session: which node serves, and the next command.
    fn refusal(&self) -> String;

    /// Carries out a command of an administrator.
    ///
    /// # Errors
    /// A sentence for people: why not, and the next command.
    fn answer(&self, command: &ClusterCommand) -> Result<Reply, String>;
}

/// The socket of a node that serves no sessions, until it is dropped.
pub struct StandbyServer {
    listener: Listener,
    thread: Option<JoinHandle<()>>,
}

impl StandbyServer {
    /// Listens at a socket.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn start(socket: &Path, node: Arc<dyn StandbyNode>) -> io::Result<Self> {
        let listener = Listener::bind(socket)?;
        std::fs::set_permissions(socket, std::fs::Permissions::from_mode(SOCKET_MODE))?;
        let acceptor = listener.acceptor();
        let thread = std::thread::Builder::new().name("standby".into()).spawn(move || {
            while let Ok(connection) = acceptor.accept() {
                serve(connection, &*node);
            }
        })?;
        Ok(Self { listener, thread: Some(thread) })
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
fn serve(mut connection: Connection, node: &dyn StandbyNode) {
    let limits = ReceiveLimits {
        bytes_max: REQUEST_BYTES_MAX,
        silence_max: Some(SILENCE_MAX),
        message_max: SILENCE_MAX,
        takes_descriptors: false,
    };
    let Ok((request, _)) = connection.receive_bounded::<Request>(&limits) else { return };
    let reply = match request {
        Request::Cluster(command) => match may_command(&connection, &command) {
            Ok(true) => node.answer(&command).unwrap_or_else(Reply::Refused),
            Ok(false) => Reply::Error(Errno::EPERM),
            Err(_) => return,
        },
        _ => Reply::Refused(node.refusal()),
    };
    // A peer that does not wait for the answer does not get it.
    let _ = connection.send(&reply, &[]);
}

/// Any user may ask for the state; all else is for root and the user of this process.
fn may_command(connection: &Connection, command: &ClusterCommand) -> io::Result<bool> {
    if *command == ClusterCommand::Show {
        return Ok(true);
    }
    let peer = rustix::net::sockopt::socket_peercred(connection.socket())?;
    Ok(peer.uid.is_root() || peer.uid == rustix::process::geteuid())
}
