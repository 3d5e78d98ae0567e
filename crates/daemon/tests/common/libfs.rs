//! Sessions of LibFS, and requests that tests make to them.

use std::sync::Arc;

use ashlar_libfs::{
    DescriptorPolicy, FinalLink, FoundInode, LibFs, NewInode, Options, PathCache, PathContext, PathIntent,
    ResolvedPath as Spot, WalkOutcome,
};
use ashlar_types::{Credentials, Errno, FileKind, InodeId};
use ashlar_wire::SessionKind;

use super::Site;

pub const ROOT: Credentials = Credentials::checked(0, 0);

/// Opens a program's session.
pub fn connect(site: &Site) -> Arc<LibFs> {
    connect_as(site, SessionKind::Process)
}

/// Opens a session.
pub fn connect_as(site: &Site, kind: SessionKind) -> Arc<LibFs> {
    let options = Options {
        socket: site.socket(),
        kind,
        label: "test".into(),
        patience_ms: 20_000,
        notice: |_| {},
        descriptors: DescriptorPolicy::ANY,
        beside: 0,
        yields_to_kernel: kind == SessionKind::Process,
    };
    LibFs::connect(&options).expect("connected")
}

/// Returns what to make if only the kind matters.
pub fn make(kind: FileKind) -> NewInode<'static> {
    NewInode { kind, mode: 0o755, umask: 0, device: 0, target: &[] }
}

/// Returns how many requests SharedFS has served, this one included.
pub fn requests(site: &Site) -> u64 {
    site.status().counters.iter().find(|(name, _)| name == "requests").expect("a counter").1
}

/// PathContext of one user, without other mounts.
pub struct SingleUser {
    pub credentials: Credentials,
    pub paths: PathCache,
}

impl SingleUser {
    pub fn of(uid: u32) -> Self {
        Self {
            credentials: Credentials { uid, gid: uid, groups: Vec::new(), checked: false },
            paths: PathCache::default(),
        }
    }

    /// Returns the inode to which a path leads, or the error.
    pub fn walk(&self, fs: &LibFs, path: &str, last: FinalLink) -> Result<Option<InodeId>, Errno> {
        self.place(fs, path, last).map(|place| place.found.map(|found| found.id))
    }

    pub fn place(&self, fs: &LibFs, path: &str, aim: impl Into<PathIntent>) -> Result<Spot, Errno> {
        match fs.walk(self, InodeId::ROOT, path.as_bytes(), aim)? {
            WalkOutcome::Inside(place) => Ok(place),
            WalkOutcome::Outside => Err(Errno::EXDEV),
        }
    }
}

impl PathContext for SingleUser {
    fn user(&self) -> &Credentials {
        &self.credentials
    }
    fn inside<'a>(&self, _: &'a [u8]) -> Option<&'a [u8]> {
        None
    }
    fn is_covered(&self, _: InodeId) -> bool {
        false
    }
    fn submount_version(&self) -> u64 {
        0
    }
    fn paths(&self) -> &PathCache {
        &self.paths
    }
    fn may_follow(&self, _: InodeId, _: &FoundInode) -> Result<bool, Errno> {
        Ok(true)
    }
}

/// Returns a user without groups, whose rights are checked.
pub fn user(uid: u32) -> Credentials {
    Credentials { uid, gid: uid, groups: Vec::new(), checked: false }
}
