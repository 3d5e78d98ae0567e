//! Identifies a session's process, also after SharedFS's own restart.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ashlar_pmem::{Crc32c, OutOfBounds, Persistent, peer_groups, peer_process};
use ashlar_types::{Credentials, SessionId, escape_controls};
use ashlar_wire::SessionKind;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The most groups that a session may have: as many as the identity page holds.
pub const GROUPS_MAX: usize = 256;
/// Room for one read of `/proc`, in bytes.
const TEXT_BYTES: usize = 1024;
/// Clock ticks in a second, by which the kernel tells when processes started (`USER_HZ`).
const TICKS_PER_SECOND: u64 = 100;
/// The longest label that is kept, in bytes.
const LABEL_BYTES_MAX: usize = 256;

const MAGIC: u64 = u64::from_le_bytes(*b"ASHLIDN2");
/// The magic of an earlier version, which wrote no checksum.
const MAGIC_BEFORE: u64 = u64::from_le_bytes(*b"ASHLIDN1");
const AT_MAGIC: u64 = 64;
const AT_PROCESS: u64 = 72;
/// Offset of the process's start time in the page.
pub const AT_START: u64 = 80;
/// Offset of the process's boot in the page.
pub const AT_BOOT: u64 = 88;
const AT_USER: u64 = 104;
const AT_SHAPE: u64 = 112;
const AT_CRC: u64 = 120;
const AT_GROUPS: u64 = 128;
const AT_LABEL: u64 = AT_GROUPS + 4 * GROUPS_MAX as u64;
const AT_END: u64 = AT_LABEL + LABEL_BYTES_MAX as u64;
const _: () = assert!(AT_END <= 2048, "the account stands behind the identity");

/// A process, identified so exactly that a reused number does not pass for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process's number.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
    /// The boot of the machine in which it started.
    pub boot: [u8; 16],
}

impl Process {
    /// Returns the process that has the number now; `None` if none has.
    pub fn find(pid: u32) -> Option<Self> {
        Some(Self { pid, start_ticks: start_ticks(pid)?, boot: boot_id() })
    }

    /// Returns the process that has the number now; `None` if none has.
    ///
    /// A descriptor comes with it that becomes readable when the process ends. `None` if no process has the number.
    pub fn find_open(pid: u32) -> Option<(Self, OwnedFd)> {
        let pidfd = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
        // This check comes after the opening of the descriptor: the number can't pass to another process unnoticed.
        Some((Self::find(pid)?, pidfd)).filter(|(_, pidfd)| !has_ended(pidfd))
    }

    /// Returns the process that connected a socket, and a descriptor that becomes readable when the process ends.
    ///
    /// Returns `None` if it is gone. The kernel keeps the number of a process only as long as the process is there. A
    /// process that connects, ends, and leaves the socket to a child must not pass for the next one of that number.
    /// Before Linux 6.5 no descriptor stands for the peer. Then a process that started after `accepted_ticks`, when the
    /// connection was accepted, is another one.
    fn find_peer(socket: BorrowedFd<'_>, pid: u32, accepted_ticks: u64) -> Option<(Self, OwnedFd)> {
        match peer_process(socket) {
            // The check comes after the look at the number: as long as the process is there, the number is its own.
            Ok(pidfd) => Some((Self::find(pid)?, pidfd)).filter(|(_, pidfd)| !has_ended(pidfd)),
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                Self::find_open(pid).filter(|(found, _)| found.start_ticks <= accepted_ticks)
            }
            Err(_) => None,
        }
    }

    /// Returns whether this very process connected a socket.
    pub fn has_connected(&self, socket: impl AsFd, accepted_ticks: u64) -> bool {
        let socket = socket.as_fd();
        let Ok(peer) = rustix::net::sockopt::socket_peercred(socket) else { return false };
        let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
        pid == self.pid && Self::find_peer(socket, pid, accepted_ticks).is_some_and(|(found, _)| found == *self)
    }

    /// Returns a descriptor that becomes readable when the process ends.
    ///
    /// Returns `None` if the process is gone.
    pub fn open(&self) -> Option<OwnedFd> {
        let (found, pidfd) = Self::find_open(self.pid)?;
        (found == *self).then_some(pidfd)
    }

    /// Returns whether no process has the number any more, or one that has ended.
    ///
    /// If another process has the number by now, this is `false`: the end of this one was reported before.
    pub fn is_gone(&self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        match pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(pidfd)) => has_ended(&pidfd),
            Some(Err(rustix::io::Errno::SRCH)) => true,
            _ => false,
        }
    }

    /// Returns whether the process ran in this boot of the machine.
    ///
    /// Then all that it wrote to memory is there.
    pub fn is_of_this_boot(&self) -> bool {
        self.boot == boot_id()
    }
}

/// Returns the time since boot in the unit in which the kernel tells when processes started.
pub fn ticks_now() -> u64 {
    let since_boot = crate::grant::boot_time();
    since_boot.as_secs() * TICKS_PER_SECOND + u64::from(since_boot.subsec_nanos()) * TICKS_PER_SECOND / 1_000_000_000
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

/// A session's process, user and label as SharedFS knows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionIdentity {
    /// Its process.
    pub process: Process,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Whether it is a mount's or a program's.
    pub kind: SessionKind,
    /// The mount point, or the program.
    pub label: String,
}

impl SessionIdentity {
    /// Returns the identity of a socket's peer.
    ///
    /// A descriptor comes with it that reports the end of its process. Everything but the label comes from the kernel.
    /// User, group and groups are those with which the process connected.
    ///
    /// # Errors
    /// A sentence for people if the peer can't be served.
    pub fn of_peer(
        socket: impl AsFd,
        accepted_ticks: u64,
        kind: SessionKind,
        label: &str,
    ) -> Result<(Self, OwnedFd), String> {
        let unknown = |error: io::Error| format!("the kernel does not identify the peer: {error}");
        let socket = socket.as_fd();
        let peer = rustix::net::sockopt::socket_peercred(socket).map_err(|error| unknown(error.into()))?;
        let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
        let gone = || {
            format!("process {pid} has ended, or cannot be seen from here; run the daemon in the same PID namespace")
        };
        let (process, ending) = Process::find_peer(socket, pid, accepted_ticks).ok_or_else(gone)?;
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
        let cut =
            label.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|&end| end <= LABEL_BYTES_MAX).last();
        let label = label[..cut.unwrap_or(0)].to_owned();
        Ok((Self { process, uid, gid, groups, kind, label }, ending))
    }

    /// Returns the credentials under which its records are validated.
    ///
    /// A mount's kernel has validated them already.
    pub fn credentials(&self) -> Credentials {
        Credentials {
            uid: self.uid,
            gid: self.gid,
            groups: self.groups.clone(),
            checked: self.kind == SessionKind::Mount,
        }
    }

    /// Removes the identity from a lease table's first page.
    ///
    /// Then its files have no owner.
    pub fn wipe(page: &impl Persistent) -> Result<(), OutOfBounds> {
        page.store_u64(AT_MAGIC, 0)?;
        page.flush(AT_MAGIC, 8)?;
        page.fence();
        Ok(())
    }

    /// Writes the identity into a lease table's first page.
    ///
    /// The page has its owner already. The magic is written last, so half an identity counts as none. On return, both
    /// are durable as far as the medium allows without a sync. Before a sync a disk may have any part of it: the
    /// checksum shows that.
    pub fn store(&self, page: &impl Persistent) -> Result<(), OutOfBounds> {
        page.store_u64(AT_PROCESS, u64::from(self.process.pid))?;
        page.store_u64(AT_START, self.process.start_ticks)?;
        page.store(AT_BOOT, &self.process.boot)?;
        page.store_u64(AT_USER, u64::from(self.gid) << 32 | u64::from(self.uid))?;
        let kind = u64::from(self.kind == SessionKind::Mount);
        page.store_u64(AT_SHAPE, kind << 32 | (self.label.len() as u64) << 16 | self.groups.len() as u64)?;
        let groups: Vec<u8> = self.groups.iter().flat_map(|group| group.to_le_bytes()).collect();
        page.store(AT_GROUPS, &groups)?;
        page.store(AT_LABEL, self.label.as_bytes())?;
        page.store_u64(AT_CRC, checksum(page)?)?;
        // The owner stands before it: without one, a session that was welcomed would be taken for one that never was.
        page.flush(0, 2048)?;
        page.fence();
        page.store_u64(AT_MAGIC, MAGIC)?;
        page.flush(AT_MAGIC, 8)?;
        page.fence();
        Ok(())
    }

    /// Reads the identity from a lease table's first page; `None` if there is none.
    pub fn load(page: &impl Persistent) -> Option<Self> {
        match page.load_u64(AT_MAGIC).ok()? {
            MAGIC if page.load_u64(AT_CRC).ok()? == checksum(page).ok()? => {}
            MAGIC_BEFORE => {}
            _ => return None,
        }
        let (user, shape) = (page.load_u64(AT_USER).ok()?, page.load_u64(AT_SHAPE).ok()?);
        let (group_count, label_bytes) = ((shape & 0xffff) as usize, (shape >> 16 & 0xffff) as usize);
        if group_count > GROUPS_MAX || label_bytes > LABEL_BYTES_MAX {
            return None;
        }
        let mut boot = [0; 16];
        page.load(AT_BOOT, &mut boot).ok()?;
        let (mut groups, mut label) = (vec![0; 4 * group_count], vec![0; label_bytes]);
        page.load(AT_GROUPS, &mut groups).ok()?;
        page.load(AT_LABEL, &mut label).ok()?;
        Some(Self {
            process: Process {
                pid: page.load_u64(AT_PROCESS).ok()? as u32,
                start_ticks: page.load_u64(AT_START).ok()?,
                boot,
            },
            uid: user as u32,
            gid: (user >> 32) as u32,
            groups: groups.chunks_exact(4).map(|g| u32::from_le_bytes([g[0], g[1], g[2], g[3]])).collect(),
            kind: if shape >> 32 & 1 == 1 { SessionKind::Mount } else { SessionKind::Process },
            label: String::from_utf8(label).ok()?,
        })
    }
}

/// Returns the checksum of a page's owner and of the user it's for.
///
/// The process is left out: after a power loss it is gone, whatever the page says of it.
fn checksum(page: &impl Persistent) -> Result<u64, OutOfBounds> {
    let mut bytes = [0; AT_END as usize];
    page.load(0, &mut bytes)?;
    bytes[AT_MAGIC as usize..AT_USER as usize].fill(0);
    bytes[AT_CRC as usize..][..8].fill(0);
    Ok(Crc32c::of(&bytes).into())
}

/// Returns a secret that proves that a connection belongs to a session.
pub fn fresh_token(session: SessionId) -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes))?;
    // Never zero, which a table that was not formatted holds.
    Ok(u64::from_le_bytes(bytes) | 1 << (session.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn page() -> impl Persistent {
        ashlar_pmem::CrashTwin::new(ashlar_pmem::CrashMedium::Pages, 4096)
    }

    #[test]
    fn identity_stored_loads_equal() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        let label = format!("{}é", "x".repeat(LABEL_BYTES_MAX - 1));
        let (mut identity, _) =
            SessionIdentity::of_peer(&one, u64::MAX, SessionKind::Process, &label).expect("this very process");
        assert_eq!(identity.process.pid, std::process::id());
        assert_eq!(identity.label.len(), LABEL_BYTES_MAX - 1, "cut between characters");
        identity.groups = (0..GROUPS_MAX as u32).collect();
        let page = page();
        assert_eq!(SessionIdentity::load(&page), None);
        identity.store(&page).expect("stored");
        assert_eq!(SessionIdentity::load(&page), Some(identity));
    }

    #[test]
    fn label_of_session_has_no_control_characters() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        let label = "vim\x1b]0;TITLE\x07\n      99  process  1  0  fake line";
        let (identity, _) =
            SessionIdentity::of_peer(&one, u64::MAX, SessionKind::Process, label).expect("this very process");
        assert_eq!(identity.label, r"vim\u{1b}]0;TITLE\u{7}\n      99  process  1  0  fake line");
    }

    #[test]
    fn identity_stored_survives_power_loss() {
        use ashlar_pmem::{CrashMedium, CrashTwin};
        use ashlar_wire::{LEASE_TABLE_BYTES, LeaseTable};
        let twin = std::sync::Arc::new(CrashTwin::new(CrashMedium::Words, LEASE_TABLE_BYTES as usize));
        LeaseTable::new(std::sync::Arc::clone(&twin)).expect("long enough").format(SessionId(3), 7);
        let (one, _two) = UnixStream::pair().expect("sockets");
        let (identity, _) =
            SessionIdentity::of_peer(&one, u64::MAX, SessionKind::Mount, "/mnt").expect("this very process");
        identity.store(&*twin).expect("stored");
        for image in twin.crash_images(1, 30) {
            let table = CrashTwin::from_image(CrashMedium::Words, &image);
            assert_eq!(SessionIdentity::load(&table).as_ref(), Some(&identity));
            assert_eq!(LeaseTable::new(table).expect("long enough").owner(), Some((SessionId(3), 7)));
        }
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
        let found = SessionIdentity::of_peer(&socket, u64::MAX, SessionKind::Process, "test");
        assert!(found.is_err_and(|reason| reason.contains("has ended")));
        // Its number may be that of any other process by now, this one's for one.
        assert!(Process::find_peer(socket.as_fd(), std::process::id(), u64::MAX).is_none());
    }

    #[test]
    fn process_connects_as_itself_only() {
        let (one, _two) = UnixStream::pair().expect("sockets");
        let me = Process::find(std::process::id()).expect("this process");
        assert!(me.has_connected(&one, ticks_now()));
        assert!(!Process { start_ticks: me.start_ticks + 1, ..me }.has_connected(&one, ticks_now()));
        assert!(!Process { pid: me.pid + 1, ..me }.has_connected(&one, ticks_now()));
        assert!(!me.has_connected(connection_of_ended_process(), ticks_now()));
    }

    #[test]
    fn process_with_reused_number_is_distinct() {
        let me = Process::find(std::process::id()).expect("this process");
        assert!(me.open().is_some());
        assert!(Process { start_ticks: me.start_ticks + 1, ..me }.open().is_none());
        assert!(Process { boot: [0; 16], ..me }.open().is_none());
    }
}
