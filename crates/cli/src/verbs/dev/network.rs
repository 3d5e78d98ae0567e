//! The network of a cluster on this machine: a namespace for each node, and one link between the two.
//!
//! The link is a pair of virtual devices, both inside the namespaces, so nothing of it shows in the machine's own
//! network. The addresses are those for documentation (RFC 5737): they reach nothing else.

use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::record::{ClusterRecord, NodeRecord};
use crate::error::DevError;

/// Where ip(8) keeps namespaces that have names.
const NAMESPACES: &str = "/run/netns";
/// The device of the link, in both namespaces.
const DEVICE: &str = "ashlar0";
/// The port of the daemons, in their namespaces.
const PORT: u16 = 7900;
/// The length of the network's prefix.
const PREFIX_BITS: u8 = 24;

/// Returns the name of a node's namespace.
pub fn namespace_of(cluster: &str, node: u16) -> String {
    format!("ashlar-{cluster}-{node}")
}

/// Returns the address at which a daemon listens in its namespace.
pub fn address_in_namespace(node: u16) -> String {
    format!("{}:{PORT}", host_of(node))
}

fn host_of(node: u16) -> String {
    format!("192.0.2.{}", node + 1)
}

/// Returns addresses that are free at the moment, for nodes without namespaces.
pub fn loopback_addresses(count: usize) -> io::Result<Vec<String>> {
    // All are open at once, so that they differ.
    let listeners = (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<io::Result<Vec<_>>>()?;
    listeners.iter().map(|listener| listener.local_addr().map(|address| address.to_string())).collect()
}

/// Checks that no namespace of the cluster exists.
pub fn check_free(nodes: &[NodeRecord]) -> Result<(), DevError> {
    let taken = namespaces(nodes).find(|namespace| path_of(namespace).exists());
    taken.map_or(Ok(()), |namespace| Err(DevError::NamespaceExists(namespace.to_owned())))
}

/// Makes the namespaces and the link between them, if the nodes are to have any.
pub fn make(nodes: &[NodeRecord]) -> Result<(), DevError> {
    let names: Vec<_> = namespaces(nodes).collect();
    let [first, second] = names[..] else { return Ok(()) };
    for name in [first, second] {
        ip(&["netns", "add", name])?;
    }
    ip(&["link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second])?;
    for node in nodes {
        let Some(name) = &node.namespace else { continue };
        let address = format!("{}/{PREFIX_BITS}", host_of(node.number));
        ip(&["-n", name, "address", "add", &address, "dev", DEVICE])?;
        ip(&["-n", name, "link", "set", "dev", "lo", "up"])?;
        ip(&["-n", name, "link", "set", "dev", DEVICE, "up"])?;
    }
    Ok(())
}

/// Removes those namespaces of the nodes that exist, and the link with them.
pub fn remove(nodes: &[NodeRecord]) -> Result<(), DevError> {
    let mut existing = namespaces(nodes).filter(|name| path_of(name).exists());
    existing.try_for_each(|name| ip(&["netns", "delete", name]).map(drop))
}

/// Takes the link down, or up.
pub fn set_link(cluster: &ClusterRecord, is_up: bool) -> Result<(), DevError> {
    let name = link_end(cluster).ok_or_else(|| DevError::NoLink(cluster.name.clone()))?;
    ip(&["-n", name, "link", "set", "dev", DEVICE, if is_up { "up" } else { "down" }]).map(drop)
}

/// Returns whether the link is cut; never without namespaces.
pub fn is_cut(cluster: &ClusterRecord) -> Result<bool, DevError> {
    let Some(name) = link_end(cluster).filter(|name| path_of(name).exists()) else { return Ok(false) };
    let shown = ip(&["-n", name, "-o", "link", "show", "dev", DEVICE])?;
    // The flags of the device: `<BROADCAST,MULTICAST,UP,LOWER_UP>`.
    let flags = shown.split_once('<').and_then(|(_, rest)| rest.split_once('>')).map_or("", |(flags, _)| flags);
    Ok(!flags.split(',').any(|flag| flag == "UP"))
}

/// Returns the namespace in which the link is cut: the second node's, so that the first one sees no more than silence.
fn link_end(cluster: &ClusterRecord) -> Option<&str> {
    namespaces(&cluster.nodes).last()
}

/// Starts a command in a namespace, or here.
pub fn spawn_in(namespace: Option<&str>, command: &mut Command) -> io::Result<Child> {
    let Some(name) = namespace else { return command.spawn() };
    let namespace = std::fs::File::open(path_of(name))?;
    // A thread of its own moves into the namespace, and its child with it. This process stays.
    let spawn = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        command.spawn()
    };
    std::thread::scope(|scope| {
        let spawning = std::thread::Builder::new().spawn_scoped(scope, spawn)?;
        spawning.join().unwrap_or_else(|_| Err(io::Error::other("the thread that starts it has panicked")))
    })
}

fn namespaces(nodes: &[NodeRecord]) -> impl DoubleEndedIterator<Item = &str> {
    nodes.iter().filter_map(|node| node.namespace.as_deref())
}

fn path_of(namespace: &str) -> PathBuf {
    Path::new(NAMESPACES).join(namespace)
}

/// Runs ip(8), and returns its output.
fn ip(words: &[&str]) -> Result<String, DevError> {
    let done = Command::new("ip").args(words).stdin(Stdio::null()).output().map_err(DevError::NoIpCommand)?;
    if !done.status.success() {
        let problem = String::from_utf8_lossy(&done.stderr).trim().to_owned();
        return Err(DevError::IpFailed { words: words.join(" "), problem });
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_differ() {
        let addresses = loopback_addresses(2).expect("two addresses");
        assert!(addresses.iter().all(|address| address.starts_with("127.0.0.1:")), "{addresses:?}");
        assert_ne!(addresses[0], addresses[1]);
    }

    #[test]
    fn cut_without_namespaces_names_the_remedy() {
        let error = set_link(&ClusterRecord::new("dev", vec![]), false).expect_err("nothing to cut");
        assert!(error.to_string().contains("takes root"), "{error}");
    }
}
