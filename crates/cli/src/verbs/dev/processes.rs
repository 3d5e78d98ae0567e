//! The processes of a node on this machine: its daemon, SharedFS, helpers and those behind its mounts.
//!
//! They are found by their command lines, which name the node's arena: a record of numbers would lack a process that
//! was started just before `ashlar dev` was killed. Signals go through descriptors of processes, taken before the
//! command line was read. So a number that another process has got meanwhile is harmless.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ashlar_launch::{MountRecord, RECORDS_DIRECTORY, is_mount_process, is_record_name};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::record::NodeRecord;
use crate::error::DevError;

/// How often processes are looked at that are to end or to stop.
const PAUSE: Duration = Duration::from_millis(5);
/// How long processes may take to be killed or stopped.
const KILL_PATIENCE: Duration = Duration::from_secs(20);
/// How long a daemon may take to end in order: it commits everything.
const END_PATIENCE: Duration = Duration::from_secs(120);

/// The part of a process in a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ProcessRole {
    /// It starts SharedFS again, so it gets signals first.
    Supervisor,
    SharedFs,
    Other,
}

/// A process of a node.
#[derive(Debug)]
struct NodeProcess {
    role: ProcessRole,
    pid: u32,
    handle: OwnedFd,
}

impl NodeProcess {
    fn signal(&self, signal: Signal) {
        // A process that has ended needs no signal.
        let _ = pidfd_send_signal(&self.handle, signal);
    }
}

/// Returns whether the node's daemon runs.
pub fn has_daemon(node: &NodeRecord) -> bool {
    find_processes(&node.arena).iter().any(|process| process.role != ProcessRole::Other)
}

/// Returns whether the node's daemon is stopped by a signal.
pub fn is_frozen(node: &NodeRecord) -> bool {
    let mut daemons = find_processes(&node.arena);
    daemons.retain(|process| process.role != ProcessRole::Other);
    !daemons.is_empty() && daemons.iter().all(|process| is_stopped(process.pid))
}

/// Kills all processes of a node, and returns how many.
pub fn kill_all(node: &NodeRecord) -> Result<usize, DevError> {
    let deadline = Instant::now() + KILL_PATIENCE;
    let mut killed = Vec::new();
    loop {
        let found = find_processes(&node.arena);
        let Some(first) = found.first() else { return Ok(killed.len()) };
        if Instant::now() > deadline {
            return Err(DevError::Stubborn { pid: first.pid, node: node.number, what: "end" });
        }
        for process in found {
            process.signal(Signal::KILL);
            if !killed.contains(&process.pid) {
                killed.push(process.pid);
            }
        }
        std::thread::sleep(PAUSE);
    }
}

/// Stops all processes of a node, and returns how many.
pub fn freeze_all(node: &NodeRecord) -> Result<usize, DevError> {
    let deadline = Instant::now() + KILL_PATIENCE;
    loop {
        let found = find_processes(&node.arena);
        let Some(running) = found.iter().find(|process| !is_stopped(process.pid)) else { return Ok(found.len()) };
        if Instant::now() > deadline {
            return Err(DevError::Stubborn { pid: running.pid, node: node.number, what: "stop" });
        }
        found.iter().for_each(|process| process.signal(Signal::STOP));
        std::thread::sleep(PAUSE);
    }
}

/// Lets all processes of a node go on, and returns how many were stopped.
pub fn continue_all(node: &NodeRecord) -> usize {
    let mut stopped = find_processes(&node.arena);
    stopped.retain(|process| is_stopped(process.pid));
    stopped.iter().for_each(|process| process.signal(Signal::CONT));
    stopped.len()
}

/// Ends a node's daemon in order.
pub fn end_daemon(node: &NodeRecord) -> Result<(), DevError> {
    let deadline = Instant::now() + END_PATIENCE;
    let daemons = || find_processes(&node.arena).into_iter().filter(|process| process.role != ProcessRole::Other);
    let Some(first) = daemons().next() else { return Err(DevError::RunsNot(node.number)) };
    first.signal(Signal::TERM);
    while let Some(process) = daemons().next() {
        if Instant::now() > deadline {
            return Err(DevError::Stubborn { pid: process.pid, node: node.number, what: "end" });
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Returns the records of an arena's mounts, whether or not their processes live.
pub fn mounts_of(arena: &Path) -> Vec<MountRecord> {
    let files = fs::read_dir(RECORDS_DIRECTORY).into_iter().flatten().flatten();
    let records = files.filter(|file| is_record_name(file.file_name().as_bytes()));
    let records = records.filter_map(|file| MountRecord::read(&fs::read(file.path()).ok()?));
    records.filter(|record| record.arena == arena).collect()
}

/// Returns the processes of an arena, supervisors first.
fn find_processes(arena: &Path) -> Vec<NodeProcess> {
    let mounts: Vec<_> = mounts_of(arena).iter().map(|record| record.pid).collect();
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut found: Vec<_> = numbers
        .filter(|&pid| pid != own)
        .filter_map(|pid| {
            let raw = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
            role_of(&fs::read(format!("/proc/{pid}/cmdline")).ok()?, arena, mounts.contains(&pid))?;
            // Only now, and read again: most processes are of no interest, and this one may be another by now.
            let handle = pidfd_open(raw, PidfdFlags::empty()).ok()?;
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let role = role_of(&line, arena, mounts.contains(&pid))?;
            Some(NodeProcess { role, pid, handle })
        })
        .collect();
    found.sort_by_key(|process| process.role);
    found
}

/// Returns what a process does for an arena, by its command line as the kernel shows it.
fn role_of(line: &[u8], arena: &Path, is_recorded: bool) -> Option<ProcessRole> {
    if is_recorded && is_mount_process(line) {
        return Some(ProcessRole::Other);
    }
    let words: Vec<_> = line.split(|&byte| byte == 0).map(OsStr::from_bytes).collect();
    let is_of_arena = words.windows(2).any(|pair| pair[0] == "--arena" && Path::new(pair[1]) == arena);
    match words.get(1)?.to_str()? {
        "daemon" if is_of_arena => Some(ProcessRole::Supervisor),
        "shared-fs" if is_of_arena => Some(ProcessRole::SharedFs),
        "helper" | "mount-process" if is_of_arena => Some(ProcessRole::Other),
        _ => None,
    }
}

/// Returns whether all threads of a process are stopped.
fn is_stopped(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.map(|thread| fs::read_to_string(thread.path().join("stat")).ok()).all(|stat| {
        let state = stat.as_deref().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
        matches!(state, None | Some('T' | 'Z' | 'X'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_recognised_by_verb_and_arena() {
        let role = |line: &str| role_of(line.replace(' ', "\0").as_bytes(), Path::new("/a/b"), false);
        assert_eq!(role("/usr/bin/ashlar-main daemon --background --arena /a/b"), Some(ProcessRole::Supervisor));
        assert_eq!(role("ashlar-main shared-fs --arena /a/b --sessions root"), Some(ProcessRole::SharedFs));
        assert_eq!(role("ashlar-main mount-process /mnt --arena /a/b"), Some(ProcessRole::Other));
        for other in [
            "ashlar-main daemon --arena /a/bc",
            "ashlar-main daemon --arena",
            "ashlar-main status --arena /a/b",
            "vi --arena /a/b",
            "",
        ] {
            assert_eq!(role(other), None, "{other}");
        }
    }

    #[test]
    fn recorded_number_of_another_program_is_not_taken() {
        assert_eq!(role_of(b"sleep\x0010\0", Path::new("/a"), true), None);
        assert_eq!(role_of(b"ashlar-main\0mount\0/mnt\0-f\0", Path::new("/a"), true), Some(ProcessRole::Other));
    }
}
