//! `ashlar bench-peer`: the other end of what `ashlar bench fabric` measures.
//!
//! The task comes as one line of JSON on standard input, since it has a private key. The end of the input is the end of
//! the command, and ends this process too.

use std::io::{self, BufRead};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;

use ashlar_fabric::{NodeCredentials, Security};
use serde::{Deserialize, Serialize};

use super::fsync_floor::{FsyncPage, PersisterEnd, serve_persister};
use super::links::LinkServer;
use super::sockets;
use crate::error::CliError;

/// The task of a process.
#[derive(Serialize, Deserialize)]
pub enum PeerTask {
    /// The other node: answers on sockets and links, and persists data.
    Peer {
        /// Its certificate and key.
        credentials: PeerCredentials,
    },
    /// The daemon on this node: forwards requests of a program to the peer.
    Daemon {
        /// The file of the [`FsyncPage`].
        page: PathBuf,
        /// The peer's address for data.
        persister: String,
    },
}

/// [`NodeCredentials`], for the way to the other process.
#[derive(Serialize, Deserialize)]
pub struct PeerCredentials {
    ca: String,
    certificate: String,
    key: String,
}

impl From<NodeCredentials> for PeerCredentials {
    fn from(NodeCredentials { ca, certificate, key }: NodeCredentials) -> Self {
        Self { ca, certificate, key }
    }
}

impl From<PeerCredentials> for NodeCredentials {
    fn from(PeerCredentials { ca, certificate, key }: PeerCredentials) -> Self {
        Self { ca, certificate, key }
    }
}

/// The addresses of a process; a daemon has none.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PeerAddresses {
    /// Echoes messages on plain sockets.
    pub socket: String,
    /// The fabric without TLS.
    pub fabric: String,
    /// The fabric with TLS.
    pub fabric_tls: String,
    /// Persists data.
    pub persister: String,
}

/// Begins the task, prints the addresses or the error, and serves until the command ends.
pub fn run() -> Result<ExitCode, CliError> {
    let (mut input, mut line) = (io::stdin().lock(), String::new());
    input.read_line(&mut line).map_err(CliError::system("reading the task"))?;
    let task = serde_json::from_str(&line).map_err(CliError::system("reading the task"))?;
    let outcome = begin_task(task).map_err(|error| error.to_string());
    println!("{}", serde_json::to_string(&outcome).map_err(CliError::system("writing JSON"))?);
    if outcome.is_ok() {
        io::copy(&mut input, &mut io::sink()).map_err(CliError::system("waiting for the command"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn begin_task(task: PeerTask) -> io::Result<PeerAddresses> {
    match task {
        PeerTask::Peer { credentials } => {
            let listen = || TcpListener::bind("127.0.0.1:0");
            let (echo, data) = (listen()?, listen()?);
            let (mut plain, fabric) = LinkServer::listen(&Security::Plain)?;
            let (mut tls, fabric_tls) = LinkServer::listen(&Security::Tls(credentials.into()))?;
            let socket = echo.local_addr()?.to_string();
            let persister = data.local_addr()?.to_string();
            serve("bench-socket", move || sockets::serve(&echo))?;
            serve("bench-persister", move || serve_persister(&data))?;
            serve("bench-fabric", move || plain.serve())?;
            serve("bench-tls", move || tls.serve())?;
            Ok(PeerAddresses { socket, fabric, fabric_tls, persister })
        }
        PeerTask::Daemon { page, persister } => {
            let (page, mut end) = (FsyncPage::open(&page)?, PersisterEnd::connect(&persister)?);
            serve("bench-daemon", move || page.serve(&mut end))?;
            Ok(PeerAddresses::default())
        }
    }
}

/// Serves in a thread of its own. If it fails, the process ends, so that the command does not wait for ever.
fn serve(name: &str, mut run: impl FnMut() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    let run = move || {
        if let Err(error) = run() {
            eprintln!("ashlar: serving the benchmark: {error}");
            std::process::exit(1);
        }
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
}
