//! Identifies a session's process, also after SharedFS's own restart.

use ashlar_pmem::{Crc32c, OutOfBounds, Persistent};
use ashlar_types::{Credentials, VersionRange};
use ashlar_wire::SessionKind;

/// The most groups that a session may have: as many as the identity page holds.
pub const GROUPS_MAX: usize = 256;
/// The longest label that is kept, in bytes.
pub const LABEL_BYTES_MAX: usize = 256;

/// The versions of the format of a session's files that this program understands.
///
/// Log, control page, lease table, and table of mapped files have one version.
pub const SESSION_VERSIONS: VersionRange = VersionRange::new(1, 1);

/// The first four bytes of the magic word. The oldest version that understands the files and their version follow.
const MAGIC: u32 = u32::from_le_bytes(*b"ASHL");
const AT_MAGIC: u64 = 64;
const AT_PROCESS: u64 = 72;
const AT_START: u64 = 80;
const AT_BOOT: u64 = 88;
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

/// Knows the machine's processes.
///
/// The node asks while it decides, so the answer comes at once.
pub trait ProcessTable: Send + Sync {
    /// Returns whether no process has the number any more, or one that has ended.
    ///
    /// If another process has the number by now, this is `false`: the end of this one was reported before.
    fn is_gone(&self, process: &Process) -> bool;
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
        page.store_u64(AT_MAGIC, magic_word(SESSION_VERSIONS))?;
        page.flush(AT_MAGIC, 8)?;
        page.fence();
        Ok(())
    }

    /// Reads the versions that understand a session's files from its lease table's first page.
    ///
    /// Returns `None` if the files have no owner.
    pub fn versions(page: &impl Persistent) -> Option<VersionRange> {
        let word = page.load_u64(AT_MAGIC).ok()?;
        let [oldest, current] = [32, 48].map(|shift| (word >> shift & 0xffff) as u32);
        (word as u32 == MAGIC).then_some(VersionRange::new(oldest, current))
    }

    /// Reads the identity from a lease table's first page.
    ///
    /// Returns `None` if there is none, or one of a version that this program does not understand.
    pub fn load(page: &impl Persistent) -> Option<Self> {
        SESSION_VERSIONS.negotiate(Self::versions(page)?)?;
        if page.load_u64(AT_CRC).ok()? != checksum(page).ok()? {
            return None;
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

/// Returns the word that marks an identity, with the versions that understand the session's files.
const fn magic_word(versions: VersionRange) -> u64 {
    (versions.current as u64) << 48 | (versions.oldest as u64) << 32 | MAGIC as u64
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ashlar_pmem::{CrashMedium, CrashTwin};
    use ashlar_types::SessionId;
    use ashlar_wire::{LEASE_TABLE_BYTES, LeaseTable};

    use super::*;

    fn identity(kind: SessionKind) -> SessionIdentity {
        let process = Process { pid: 77, start_ticks: 1234, boot: [7; 16] };
        let groups = (0..GROUPS_MAX as u32).collect();
        SessionIdentity { process, uid: 5, gid: 6, groups, kind, label: "x".repeat(LABEL_BYTES_MAX) }
    }

    #[test]
    fn identity_stored_loads_equal() {
        let page = CrashTwin::new(CrashMedium::Pages, 4096);
        assert_eq!(SessionIdentity::load(&page), None);
        let identity = identity(SessionKind::Process);
        identity.store(&page).expect("stored");
        assert_eq!(SessionIdentity::load(&page), Some(identity));
    }

    #[test]
    fn identity_of_other_versions_is_not_loaded() {
        let page = CrashTwin::new(CrashMedium::Pages, 4096);
        assert_eq!(SessionIdentity::versions(&page), None);
        identity(SessionKind::Process).store(&page).expect("stored");
        assert_eq!(SessionIdentity::versions(&page), Some(SESSION_VERSIONS));
        let next = SESSION_VERSIONS.current + 1;
        for (oldest, is_loaded) in [(SESSION_VERSIONS.current, true), (next, false)] {
            let versions = VersionRange::new(oldest, next);
            page.store_u64(AT_MAGIC, magic_word(versions)).expect("stored");
            assert_eq!(SessionIdentity::versions(&page), Some(versions));
            assert_eq!(SessionIdentity::load(&page).is_some(), is_loaded, "{versions}");
        }
    }

    #[test]
    fn identity_stored_survives_power_loss() {
        let twin = Arc::new(CrashTwin::new(CrashMedium::Words, LEASE_TABLE_BYTES as usize));
        LeaseTable::new(Arc::clone(&twin)).expect("long enough").format(SessionId(3), 7);
        let identity = identity(SessionKind::Mount);
        identity.store(&*twin).expect("stored");
        for image in twin.crash_images(1, 30) {
            let table = CrashTwin::from_image(CrashMedium::Words, &image);
            assert_eq!(SessionIdentity::load(&table).as_ref(), Some(&identity));
            assert_eq!(LeaseTable::new(table).expect("long enough").owner(), Some((SessionId(3), 7)));
        }
    }
}
