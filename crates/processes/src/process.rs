//! Finds the processes of sessions.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ashlar_node::sessions::identity::{GROUPS_MAX, LABEL_BYTES_MAX, Process, ProcessTable, SessionIdentity};
use ashlar_pmem::{peer_groups, peer_process};
use ashlar_types::escape_controls;
use ashlar_wire::SessionKind;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Room for one read of `/proc`, in bytes.
const TEXT_BYTES: usize = 1024;

/// The processes of this machine.
#[derive(Debug)]
pub struct MachineProcesses;

impl ProcessTable for MachineProcesses {
    fn is_gone(&self, process: &Process) -> bool {
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
        match pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(pidfd)) => has_ended(&pidfd),
            Some(Err(rustix::io::Errno::SRCH)) => true,
            _ => false,
        }
    }
}

/// Returns the process that has the number now; `None` if none has.
pub fn find_process(pid: u32) -> Option<Process> {
    Some(Process { pid, start_ticks: start_ticks(pid)?, boot: boot_id() })
}

/// Returns the process that has the number now, and a descriptor that becomes readable when the process ends.
///
/// Returns `None` if no process has the number.
pub fn find_open(pid: u32) -> Option<(Process, OwnedFd)> {
    let pidfd = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
    // This check comes after the opening of the descriptor: the number can't pass to another process unnoticed.
    Some((find_process(pid)?, pidfd)).filter(|(_, pidfd)| !has_ended(pidfd))
}

/// Returns the process that connected a socket, and a descriptor that becomes readable when the process ends.
///
/// Returns `None` if it is gone. The kernel keeps the number of a process only as long as the process is there. A
/// process that connects, ends, and leaves the socket to a child must not pass for the next one of that number. Before
/// Linux 6.5 no descriptor stands for the peer. Then a process that started after `accepted_ticks`, when the connection
/// was accepted, is another one.
fn find_peer(socket: BorrowedFd<'_>, pid: u32, accepted_ticks: u64) -> Option<(Process, OwnedFd)> {
    match peer_process(socket) {
        // The check comes after the look at the number: as long as the process is there, the number is its own.
        Ok(pidfd) => Some((find_process(pid)?, pidfd)).filter(|(_, pidfd)| !has_ended(pidfd)),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            find_open(pid).filter(|(found, _)| found.start_ticks <= accepted_ticks)
        }
        Err(_) => None,
    }
}

/// Returns whether this very process connected a socket.
pub fn has_connected(process: &Process, socket: impl AsFd, accepted_ticks: u64) -> bool {
    let socket = socket.as_fd();
    let Ok(peer) = rustix::net::sockopt::socket_peercred(socket) else { return false };
    let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
    pid == process.pid && find_peer(socket, pid, accepted_ticks).is_some_and(|(found, _)| found == *process)
}

/// Returns a descriptor that becomes readable when the process ends.
///
/// Returns `None` if the process is gone.
pub fn open_process(process: &Process) -> Option<OwnedFd> {
    let (found, pidfd) = find_open(process.pid)?;
    (found == *process).then_some(pidfd)
}

/// Returns whether the process ran in this boot of the machine.
///
/// Then all that it wrote to memory is there.
pub fn is_of_this_boot(process: &Process) -> bool {
    process.boot == boot_id()
}

/// Returns whether the process of a pidfd has ended.
pub fn has_ended(pidfd: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(count) if count > 0)
}

/// Reads a file of a process in `/proc`.
fn read_proc_file(pid: u32, name: &str) -> Option<String> {
    let mut text = Vec::with_capacity(TEXT_BYTES);
    // The first read gets it whole, as the kernel writes the text anew for each. A reader that does not know the length
    // begins with little.
    File::open(format!("/proc/{pid}/{name}")).ok()?.take(u64::MAX).read_to_end(&mut text).ok()?;
    // A process may have any name.
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Reads field 22 of `/proc/PID/stat`; a zombie counts as gone.
///
/// The second field may hold anything, so the count starts behind its last parenthesis.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = read_proc_file(pid, "stat")?;
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn boot_id() -> [u8; 16] {
    static BOOT: std::sync::OnceLock<[u8; 16]> = std::sync::OnceLock::new();
    *BOOT.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: Vec<u8> = text.bytes().filter_map(|c| (c as char).to_digit(16).map(|d| d as u8)).collect();
        let mut id = [0; 16];
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = pair[0] << 4 | pair[1];
        }
        id
    })
}

/// Returns the identity of a socket's peer.
///
/// A descriptor comes with it that reports the end of its process. Everything but the label comes from the kernel.
/// User, group and groups are those with which the process connected.
///
/// # Errors
/// A sentence for people if the peer can't be served.
pub fn identify_peer(
    socket: impl AsFd,
    accepted_ticks: u64,
    kind: SessionKind,
    label: &str,
) -> Result<(SessionIdentity, OwnedFd), String> {
    let unknown = |error: io::Error| format!("the kernel does not identify the peer: {error}");
    let socket = socket.as_fd();
    let peer = rustix::net::sockopt::socket_peercred(socket).map_err(|error| unknown(error.into()))?;
    let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
    let gone =
        || format!("process {pid} has ended, or cannot be seen from here; run the daemon in the same PID namespace");
    let (process, ending) = find_peer(socket, pid, accepted_ticks).ok_or_else(gone)?;
    let groups = peer_groups(socket).map_err(unknown)?;
    if groups.len() > GROUPS_MAX {
        return Err(format!("the process is in {} groups; at most {GROUPS_MAX} are supported", groups.len()));
    }
    let (uid, gid) = (peer.uid.as_raw(), peer.gid.as_raw());
    if kind == SessionKind::Mount && uid != 0 {
        return Err("only root may serve a mount, as it acts for all users".into());
    }
    // The administrator reads it, in a terminal and in the log.
    let label = escape_controls(label);
    let cut = label.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|&end| end <= LABEL_BYTES_MAX).last();
    let label = label[..cut.unwrap_or(0)].to_owned();
    Ok((SessionIdentity { process, uid, gid, groups, kind, label }, ending))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::clock::ticks_now;

    #[test]
    fn peer_is_this_process_and_its_label_is_cut() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        let label = format!("{}é", "x".repeat(LABEL_BYTES_MAX - 1));
        let (identity, _) = identify_peer(&one, u64::MAX, SessionKind::Process, &label).expect("this very process");
        assert_eq!(identity.process.pid, std::process::id());
        assert_eq!(identity.label.len(), LABEL_BYTES_MAX - 1, "cut between characters");
    }

    #[test]
    fn label_of_session_has_no_control_characters() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        let label = "vim\x1b]0;TITLE\x07\n      99  process  1  0  fake line";
        let (identity, _) = identify_peer(&one, u64::MAX, SessionKind::Process, label).expect("this very process");
        assert_eq!(identity.label, r"vim\u{1b}]0;TITLE\u{7}\n      99  process  1  0  fake line");
    }

    /// Connects to a socket in a child process that ends then; returns the far end of the connection.
    fn connection_of_ended_process() -> UnixStream {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
        let script = format!("import socket; socket.socket(socket.AF_UNIX).connect('{}')", path.display());
        let status = std::process::Command::new("python3").args(["-c", &script]).status().expect("run");
        assert!(status.success());
        listener.accept().expect("accepted").0
    }

    #[test]
    fn ended_peer_is_refused_whichever_process_has_its_number() {
        let socket = connection_of_ended_process();
        let found = identify_peer(&socket, u64::MAX, SessionKind::Process, "test");
        assert!(found.is_err_and(|reason| reason.contains("has ended")));
        // Its number may be that of any other process by now, this one's for one.
        assert!(find_peer(socket.as_fd(), std::process::id(), u64::MAX).is_none());
    }

    #[test]
    fn process_connects_as_itself_only() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        let me = find_process(std::process::id()).expect("this process");
        assert!(has_connected(&me, &one, ticks_now()));
        assert!(!has_connected(&Process { start_ticks: me.start_ticks + 1, ..me }, &one, ticks_now()));
        assert!(!has_connected(&Process { pid: me.pid + 1, ..me }, &one, ticks_now()));
        assert!(!has_connected(&me, connection_of_ended_process(), ticks_now()));
    }

    #[test]
    fn process_with_reused_number_is_distinct() {
        let me = find_process(std::process::id()).expect("this process");
        assert!(open_process(&me).is_some());
        assert!(open_process(&Process { start_ticks: me.start_ticks + 1, ..me }).is_none());
        assert!(open_process(&Process { boot: [0; 16], ..me }).is_none());
    }
}
