//! Sessions of LibFS, and requests that tests make to them.

use std::sync::Arc;

use ashlar_libfs::{
    Aim, Found, Last, LibFs, Make, Options, OwnDescriptors, Paths, Place as Spot, Surroundings, Walked,
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
        descriptors: OwnDescriptors::KNOWN,
        beside: 0,
        yields_to_kernel: kind == SessionKind::Process,
    };
    LibFs::connect(&options).expect("connected")
}

/// Returns what to make if only the kind matters.
pub fn make(kind: FileKind) -> Make<'static> {
    Make { kind, mode: 0o755, umask: 0, device: 0, target: &[] }
}

/// Returns how many requests SharedFS has served, this one included.
pub fn requests(site: &Site) -> u64 {
    site.status().counters.iter().find(|(name, _)| name == "requests").expect("a counter").1
}

/// Surroundings of one user, without other mounts.
pub struct SingleUser {
    pub credentials: Credentials,
    pub paths: Paths,
}

impl SingleUser {
    pub fn of(uid: u32) -> Self {
        Self { credentials: Credentials { uid, gid: uid, groups: Vec::new(), checked: false }, paths: Paths::default() }
    }

    /// Returns the inode to which a path leads, or the error.
    pub fn walk(&self, fs: &LibFs, path: &str, last: Last) -> Result<Option<InodeId>, Errno> {
        self.place(fs, path, last).map(|place| place.found.map(|found| found.id))
    }

    pub fn place(&self, fs: &LibFs, path: &str, aim: impl Into<Aim>) -> Result<Spot, Errno> {
        match fs.walk(self, InodeId::ROOT, path.as_bytes(), aim)? {
            Walked::Inside(place) => Ok(place),
            Walked::Outside => Err(Errno::EXDEV),
        }
    }
}

impl Surroundings for SingleUser {
    fn who(&self) -> &Credentials {
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
    fn paths(&self) -> &Paths {
        &self.paths
    }
    fn may_follow(&self, _: InodeId, _: &Found) -> Result<bool, Errno> {
        Ok(true)
    }
}

/// Returns a user without groups, whose rights are checked.
pub fn user(uid: u32) -> Credentials {
    Credentials { uid, gid: uid, groups: Vec::new(), checked: false }
}
