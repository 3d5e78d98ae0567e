//! `ashlar cluster` and `ashlar node`: two nodes with one file system.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;

use ashlar_member::{Invitation, found_cluster};
use ashlar_types::{ArenaId, Errno};
use ashlar_wire::{ClusterCommand, Reply, Request};
use rustix::rand::GetRandomFlags;

use crate::arguments::{
    ClusterInitArguments, ClusterVerb, NodeAddArguments, NodeForceArguments, NodeJoinArguments, NodePromoteArguments,
    NodeVerb,
};
use crate::error::CliError;
use crate::output::size::Size;
use crate::system::arena::ArenaLocation;
use crate::system::background::ask;

/// `ashlar cluster`.
pub fn run_cluster(verb: &ClusterVerb) -> Result<ExitCode, CliError> {
    match verb {
        ClusterVerb::Init(arguments) => init(arguments),
    }
}

/// `ashlar node`.
pub fn run_node(verb: &NodeVerb) -> Result<ExitCode, CliError> {
    match verb {
        NodeVerb::Add(arguments) => add(arguments),
        NodeVerb::Join(arguments) => join(arguments),
        NodeVerb::Promote(arguments) => promote(arguments),
        NodeVerb::Force(arguments) => force(arguments),
    }
}

fn init(arguments: &ClusterInitArguments) -> Result<ExitCode, CliError> {
    let place = ArenaLocation::new(&arguments.arena.arena)?;
    place.prepare(arguments.create.size, arguments.create.emulate_pmem)?;
    let place = ArenaLocation::at(place.directory().to_owned())?;
    let (address, tls) = (arguments.address.clone(), !arguments.no_tls);
    let document = found_cluster(&place.open()?, address, tls, arguments.min_replicas)?;
    let arena = place.directory().display();
    println!("cluster   {}", document.cluster);
    println!("node      {} at {}, the writer", document.writer().node, document.writer().address);
    println!("links     {}", if tls { "TLS 1.3, with certificates of this cluster" } else { "not encrypted" });
    println!("next      ashlar node add HOST:PORT --invitation FILE --arena {arena}");
    Ok(ExitCode::SUCCESS)
}

fn add(arguments: &NodeAddArguments) -> Result<ExitCode, CliError> {
    let place = ArenaLocation::new(&arguments.arena.arena)?;
    let path = &arguments.invitation;
    if path.exists() {
        let exists = io::Error::from(io::ErrorKind::AlreadyExists);
        return Err(CliError::system(format!("writing {}", path.display()))(exists));
    }
    let arena = Arc::new(place.open()?);
    let invitation = Invitation::issue(&arena, arguments.address.clone(), draw_arena_id()?)?;
    invitation.save(path).map_err(CliError::system(format!("writing {}", path.display())))?;
    println!("invited   a node at {}", arguments.address);
    println!("file      {}: carry it to that machine; it holds the node's key", path.display());
    println!("next      there: ashlar node join {} && ashlar daemon", path.display());
    println!("          here:  ashlar daemon --arena {}", place.directory().display());
    Ok(ExitCode::SUCCESS)
}

/// Returns a number for an arena that is made next.
pub fn draw_arena_id() -> Result<ArenaId, CliError> {
    let mut id = [0; 8];
    rustix::rand::getrandom(&mut id, GetRandomFlags::empty()).map_err(CliError::system("drawing a random number"))?;
    Ok(ArenaId(u64::from_le_bytes(id)))
}

fn join(arguments: &NodeJoinArguments) -> Result<ExitCode, CliError> {
    let invitation = Invitation::load(&arguments.invitation)?;
    let place = ArenaLocation::new(&arguments.arena.arena)?;
    if place.exists() {
        return Err(CliError::ArenaExists(place.directory().to_owned()));
    }
    let size = arguments.create.size.map_or(invitation.size_bytes(), |size| size.0);
    if size < invitation.size_bytes() {
        return Err(CliError::TooSmall { wanted: Size(size), least: Size(invitation.size_bytes()) });
    }
    place.make_directory()?;
    invitation.accept(place.directory(), size, arguments.create.emulate_pmem)?;
    println!("joined    arena {} ({})", place.directory().display(), Size(size));
    println!("next      ashlar daemon --arena {}", place.directory().display());
    Ok(ExitCode::SUCCESS)
}

fn promote(arguments: &NodePromoteArguments) -> Result<ExitCode, CliError> {
    let place = ArenaLocation::find(&arguments.arena.arena)?;
    command(&place, ClusterCommand::Promote { force: arguments.force })?;
    println!("promoted  this node is the writer now");
    println!("next      ashlar mount DIR --arena {}", place.directory().display());
    Ok(ExitCode::SUCCESS)
}

fn force(arguments: &NodeForceArguments) -> Result<ExitCode, CliError> {
    let place = ArenaLocation::find(&arguments.arena.arena)?;
    command(&place, ClusterCommand::Force)?;
    println!("forced    this node goes on without its replica, which must not be promoted now");
    Ok(ExitCode::SUCCESS)
}

/// Sends a command to the arena's node.
fn command(place: &ArenaLocation, command: ClusterCommand) -> Result<(), CliError> {
    let reply = ask(place, &Request::Cluster(command))?;
    match reply.ok_or_else(|| CliError::NoDaemon(place.directory().to_owned()))? {
        Reply::Done => Ok(()),
        Reply::Refused(sentence) => Err(CliError::ClusterRefused(sentence)),
        Reply::Error(Errno::EPERM | Errno::EACCES) => Err(CliError::NotRoot { what: "a change of the cluster" }),
        Reply::Error(Errno::ENXIO) => Err(CliError::NoCluster(place.directory().to_owned())),
        Reply::Error(error) => Err(CliError::Refused { what: "change the cluster", error, log: place.daemon_log() }),
        _ => Err(CliError::Misunderstood),
    }
}
