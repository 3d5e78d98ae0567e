//! Private memory of Ashlar's processes.

use ashlar_tests::mount::TestArena;
use ashlar_tests::{Outcome, tried};

/// The private memory of each process: its name and bytes. Memory that is mapped from the arena belongs to the arena.
pub fn private_bytes(site: &TestArena) -> Outcome<Vec<(String, u64)>> {
    let daemon = site.daemon()?;
    let supervisor = field(daemon, "PPid:")?;
    let mut all = vec![("daemon".to_owned(), anonymous(daemon)?)];
    // The parent of an orphaned daemon is process 1, which is not Ashlar's.
    if supervisor > 1 {
        all.push(("supervisor".to_owned(), anonymous(supervisor as u32)?));
    }
    for mount in site.mount_processes()? {
        all.push(("mount".to_owned(), anonymous(mount)?));
    }
    Ok(all)
}

fn anonymous(pid: u32) -> Outcome<u64> {
    field(pid, "RssAnon:").map(|kib| kib * 1024)
}

fn field(pid: u32, name: &str) -> Outcome<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(tried("looking at a process"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|rest| rest.split_whitespace().next()).and_then(|text| text.parse().ok());
    value.ok_or_else(|| format!("process {pid} has no {name}"))
}
