//! `ashlar dev`: a cluster on one machine, to try it out and for tests.
//!
//! As root, the daemon of each node runs in a network namespace of its own, so that the link between them can be cut.
//! Mounts and applications run outside: they reach their daemon through a socket in its arena.

mod network;
mod nodes;
mod processes;
mod record;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ashlar_wire::{NodeStanding, StatusReply};
use rustix::process::geteuid;
use serde::Serialize;

use self::network::{address_in_namespace, loopback_addresses, namespace_of};
use self::record::{ClusterRecord, NodeRecord, RecordDirectory, look_up};
use crate::arguments::{
    DevNameArgument, DevNodeArguments, DevStatusArguments, DevUpArguments, DevVerb, StatusArguments,
};
use crate::error::{CliError, DevError};
use crate::system::arena::{ArenaChoice, ArenaLocation};
use crate::system::background::daemon_status;
use crate::verbs::status;

/// The nodes of a cluster.
const NODES: u16 = 2;

/// `ashlar dev`.
pub fn run(verb: &DevVerb) -> Result<ExitCode, CliError> {
    match verb {
        DevVerb::Up(arguments) => bring_up(arguments)?,
        DevVerb::Status(arguments) => show(arguments)?,
        DevVerb::Start(arguments) => start(arguments)?,
        DevVerb::Stop(arguments) => stop(arguments)?,
        DevVerb::Kill(arguments) => kill(arguments)?,
        DevVerb::Freeze(arguments) => freeze(arguments)?,
        DevVerb::Cut(arguments) => cut(arguments)?,
        DevVerb::Heal(arguments) => heal(arguments)?,
        DevVerb::Down(arguments) => bring_down(arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn bring_up(arguments: &DevUpArguments) -> Result<(), CliError> {
    if arguments.nodes != NODES {
        return Err(DevError::WrongCount(arguments.nodes).into());
    }
    let directory = RecordDirectory::make(&arguments.of.name)?;
    if directory.read()?.is_some() {
        return Err(DevError::Exists(arguments.of.name.clone()).into());
    }
    let cluster = match plan(arguments) {
        Ok(cluster) => cluster,
        Err(error) => {
            directory.remove()?;
            return Err(error);
        }
    };
    directory.write(&cluster)?;
    if let Err(error) = make(&cluster, arguments) {
        // The first error is the cause.
        let _ = remove_all(&cluster).and_then(|()| directory.remove());
        return Err(error);
    }
    nodes::wait_for_sync(&cluster)?;
    print_summary(&cluster, arguments);
    Ok(())
}

/// Returns the record of a cluster that is to be made, if nothing stands in its way.
fn plan(arguments: &DevUpArguments) -> Result<ClusterRecord, CliError> {
    let name = &arguments.of.name;
    let has_namespaces = geteuid().is_root() && !arguments.loopback;
    let addresses = match has_namespaces {
        true => (0..NODES).map(address_in_namespace).collect(),
        false => loopback_addresses(NODES.into()).map_err(CliError::system("looking for free ports"))?,
    };
    let nodes = (0..NODES).zip(addresses).map(|(number, address)| {
        let place = match &arguments.directory {
            Some(directory) => ArenaLocation::new(&ArenaChoice::Directory(directory.join(format!("node{number}"))))?,
            None => ArenaLocation::in_memory(&format!("dev-{name}-{number}"))?,
        };
        nodes::check_free(place.directory())?;
        let namespace = has_namespaces.then(|| namespace_of(name, number));
        Ok(NodeRecord { number, arena: place.directory().to_owned(), address, namespace })
    });
    let nodes = nodes.collect::<Result<Vec<_>, CliError>>()?;
    network::check_free(&nodes)?;
    Ok(ClusterRecord::new(name, nodes))
}

/// Makes all that a record names, and starts the daemons.
fn make(cluster: &ClusterRecord, arguments: &DevUpArguments) -> Result<(), CliError> {
    network::make(&cluster.nodes)?;
    nodes::make_arenas(cluster, arguments)?;
    // The writer waits for its replica.
    for node in cluster.nodes.iter().rev() {
        nodes::start_daemon(node)?;
    }
    Ok(())
}

fn print_summary(cluster: &ClusterRecord, arguments: &DevUpArguments) {
    let links = if arguments.no_tls { "not encrypted" } else { "TLS 1.3" };
    println!("cluster   {}: fsync needs {} of 2 copies, links {links}", cluster.name, arguments.min_replicas);
    for node in &cluster.nodes {
        let place = node.namespace.as_ref().map_or(String::new(), |name| format!(" in network namespace {name}"));
        println!("node {}    {}{place}, arena {}", node.number, node.address, node.arena.display());
    }
    if let Some(writer) = cluster.nodes.first() {
        println!("next      ashlar mount DIR --arena {}", writer.arena.display());
    }
    if let Some(replica) = cluster.nodes.last() {
        println!("then      ashlar dev kill 0{}", name_option(&cluster.name));
        println!("          ashlar node promote --arena {}", replica.arena.display());
    }
    println!("remove    ashlar dev down{}", name_option(&cluster.name));
}

/// Returns the option that names a cluster, unless it has the standard name.
fn name_option(name: &str) -> String {
    if name == "dev" { String::new() } else { format!(" --name {name}") }
}

/// A node in the output.
#[derive(Serialize)]
struct DevNodeReport<'a> {
    node: u16,
    arena: &'a Path,
    address: &'a str,
    namespace: Option<&'a str>,
    /// `running`, `frozen` or `down`.
    state: &'static str,
    /// The directories on which it is mounted.
    mounts: Vec<PathBuf>,
    /// The status of its daemon, if it answers.
    daemon: Option<StatusReply>,
}

#[derive(Serialize)]
struct DevReport<'a> {
    name: &'a str,
    is_cut: bool,
    nodes: Vec<DevNodeReport<'a>>,
}

fn show(arguments: &DevStatusArguments) -> Result<(), CliError> {
    let cluster = look_up(&arguments.of.name)?;
    let is_cut = network::is_cut(&cluster)?;
    if arguments.json {
        let nodes = cluster.nodes.iter().map(report_node).collect();
        let report = DevReport { name: &cluster.name, is_cut, nodes };
        let text = serde_json::to_string_pretty(&report).map_err(CliError::system("writing JSON"))?;
        println!("{text}");
        return Ok(());
    }
    let option = name_option(&cluster.name);
    if is_cut {
        println!("link      cut; 'ashlar dev heal{option}' mends it\n");
    }
    for node in &cluster.nodes {
        let (number, state) = (node.number, state_of(node));
        let remedy = match state {
            "frozen" => format!("; 'ashlar dev heal{option}' lets it go on"),
            "down" => format!("; 'ashlar dev start {number}{option}' starts it"),
            _ => String::new(),
        };
        println!("node {number}    {state}{remedy}");
        if state == "running" && ArenaLocation::at(node.arena.clone())?.exists() {
            let arena = Some(ArenaChoice::Directory(node.arena.clone()));
            status::run(&StatusArguments { arena, json: false })?;
        }
        println!();
    }
    Ok(())
}

fn state_of(node: &NodeRecord) -> &'static str {
    match (processes::has_daemon(node), processes::is_frozen(node)) {
        (false, _) => "down",
        (true, true) => "frozen",
        (true, false) => "running",
    }
}

fn report_node(node: &NodeRecord) -> DevNodeReport<'_> {
    let state = state_of(node);
    // A daemon that is stopped would be waited for.
    let place = ArenaLocation::at(node.arena.clone()).ok().filter(|_| state == "running");
    DevNodeReport {
        node: node.number,
        arena: &node.arena,
        address: &node.address,
        namespace: node.namespace.as_deref(),
        state,
        mounts: processes::mounts_of(&node.arena).into_iter().map(|record| record.directory).collect(),
        daemon: place.and_then(|place| daemon_status(&place).ok().flatten()),
    }
}

fn start(arguments: &DevNodeArguments) -> Result<(), CliError> {
    let (_locked, cluster) = open(&arguments.of)?;
    let node = cluster.node(arguments.node)?;
    let status = nodes::start_daemon(node)?;
    let standing = status.cluster.map_or(NodeStanding::Serving, |cluster| cluster.standing).name();
    println!("started   node {}, process {}: {standing}", node.number, status.pid);
    println!("next      ashlar status --arena {}", node.arena.display());
    Ok(())
}

fn stop(arguments: &DevNodeArguments) -> Result<(), CliError> {
    let (_locked, cluster) = open(&arguments.of)?;
    let node = cluster.node(arguments.node)?;
    processes::end_daemon(node)?;
    println!("stopped   the daemon of node {}, in order", node.number);
    print_start(&cluster, node);
    Ok(())
}

fn kill(arguments: &DevNodeArguments) -> Result<(), CliError> {
    let (_locked, cluster) = open(&arguments.of)?;
    let node = cluster.node(arguments.node)?;
    let count = processes::kill_all(node)?;
    println!("killed    {count} processes of node {}: its daemon, and those behind its mounts", node.number);
    print_start(&cluster, node);
    Ok(())
}

fn print_start(cluster: &ClusterRecord, node: &NodeRecord) {
    println!("next      ashlar dev start {}{}", node.number, name_option(&cluster.name));
    for other in cluster.nodes.iter().filter(|other| other.number != node.number) {
        println!("          or, if it was the writer: ashlar node promote --arena {}", other.arena.display());
    }
}

fn freeze(arguments: &DevNodeArguments) -> Result<(), CliError> {
    let (_locked, cluster) = open(&arguments.of)?;
    let node = cluster.node(arguments.node)?;
    let count = processes::freeze_all(node)?;
    println!("frozen    {count} processes of node {}", node.number);
    println!("next      ashlar dev heal{}", name_option(&cluster.name));
    Ok(())
}

fn cut(arguments: &DevNameArgument) -> Result<(), CliError> {
    let (_locked, cluster) = open(arguments)?;
    network::set_link(&cluster, false)?;
    println!("cut       the link between the nodes");
    println!("next      ashlar dev heal{}", name_option(&cluster.name));
    Ok(())
}

fn heal(arguments: &DevNameArgument) -> Result<(), CliError> {
    let (_locked, cluster) = open(arguments)?;
    if network::is_cut(&cluster)? {
        network::set_link(&cluster, true)?;
        println!("healed    the link between the nodes");
    }
    for node in &cluster.nodes {
        let count = processes::continue_all(node);
        if count > 0 {
            println!("healed    {count} processes of node {} go on", node.number);
        }
    }
    println!("next      ashlar dev status{}", name_option(&cluster.name));
    Ok(())
}

fn bring_down(arguments: &DevNameArgument) -> Result<(), CliError> {
    let directory = RecordDirectory::open(&arguments.name)?;
    // Without a record, nothing was made yet.
    if let Some(cluster) = directory.read()? {
        remove_all(&cluster)?;
    }
    directory.remove()?;
    println!("removed   cluster {}, with its processes, namespaces and arenas", arguments.name);
    Ok(())
}

/// Removes all that a record names, as far as it was made.
fn remove_all(cluster: &ClusterRecord) -> Result<(), CliError> {
    for node in &cluster.nodes {
        processes::kill_all(node)?;
        nodes::remove_mounts(&node.arena)?;
    }
    network::remove(&cluster.nodes)?;
    cluster.nodes.iter().try_for_each(|node| nodes::remove_arena(&node.arena))
}

fn open(arguments: &DevNameArgument) -> Result<(RecordDirectory, ClusterRecord), CliError> {
    let directory = RecordDirectory::open(&arguments.name)?;
    let cluster = directory.require()?;
    Ok((directory, cluster))
}
