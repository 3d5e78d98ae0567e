//! How a cluster is founded, and how an arena joins it: by a file that one administrator carries to the other machine.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use ashlar_cluster::{AloneSince, ClusterDocument, Coordinator, DocumentMember, HardState, MemberRole};
use ashlar_fabric::{ClusterAuthority, NodeCredentials};
use ashlar_pmem::{Arena, ArenaOptions};
use ashlar_replica::begin_full_copy;
use ashlar_replica::mirror::{ClusterFiles, EmbeddedCoordinator};
use ashlar_store::Store;
use ashlar_types::{ArenaId, FileSystemIdentity, JournalPosition, NameHashKey, NodeNumber, Timestamp};
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};

use crate::error::MemberError;
use crate::membership::Membership;

/// The version of the file.
const FORMAT: u32 = 1;
/// A file that is longer is none.
const INVITATION_BYTES_MAX: u64 = 1 << 20;

/// Makes an arena the first member, and the writer, of a new cluster.
///
/// # Errors
/// [`MemberError::IsMember`], [`MemberError::Document`], those of the files.
pub fn found_cluster(
    arena: &Arena,
    address: String,
    tls: bool,
    min_replicas: u8,
) -> Result<ClusterDocument, MemberError> {
    let files = ClusterFiles::of(arena.dir());
    if files.is_member() {
        return Err(MemberError::IsMember { path: files.directory().to_owned() });
    }
    let summary = arena.summary();
    let role = MemberRole::Writer;
    let member = DocumentMember { node: summary.node, arena: ArenaId(summary.id), address, role };
    let mut document = ClusterDocument::new(summary.file_system.id, member, tls)?;
    document.min_replicas = min_replicas;
    document.check()?;
    files.make()?;
    if tls {
        let authority = ClusterAuthority::create(document.cluster)?;
        authority.save(&files.authority_directory())?;
        authority.issue(summary.node)?.save(files.directory())?;
    }
    // A replica that is added later does not count before it has everything.
    let alone = Some(AloneSince { since: JournalPosition(0), by_order: true });
    files.write_hard_state(&HardState { alone, newest_epoch: document.epoch, ..HardState::default() })?;
    files.write_document(&document)?;
    Ok(document)
}

/// All that a machine needs to join a cluster. It has the node's key, so only its owner may read it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Invitation {
    format: u32,
    /// The new member's number, and its arena's id.
    node: u16,
    arena: String,
    /// The file system's hash key, in hexadecimal digits.
    hash_key: String,
    /// Bytes of the writer's arena: the new one must hold as much.
    size_bytes: u64,
    document: String,
    credentials: Option<InvitedCredentials>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InvitedCredentials {
    ca: String,
    /// The authority's key: a node that has taken over must be able to add another one.
    authority_key: String,
    certificate: String,
    key: String,
}

impl Invitation {
    /// Adds a replica to the cluster of a writer's arena, which is not in use.
    ///
    /// # Errors
    /// [`MemberError`].
    pub fn issue_at_rest(arena: &Arc<Arena>, address: String, replaces: bool) -> Result<Self, MemberError> {
        let membership = Membership::open(arena)?;
        let membership = membership.ok_or_else(|| MemberError::NoCluster { path: arena.dir().to_owned() })?;
        if membership.role() != MemberRole::Writer {
            return Err(MemberError::NotTheWriter { writer: membership.document.writer().node });
        }
        membership.adopt_former(arena)?;
        let state = membership.state;
        let alone = state.alone.or(Some(AloneSince { since: JournalPosition(0), by_order: true }));
        membership.files.write_hard_state(&HardState { alone, ..state })?;
        Self::issue(&membership, arena, address, replaces)
    }

    /// Adds a replica to a writer's cluster. The writer is alone already, and stays so until the replica has all.
    ///
    /// With `replaces` it takes the place of the present replica.
    ///
    /// # Errors
    /// [`MemberError`].
    pub fn issue(membership: &Membership, arena: &Arena, address: String, replaces: bool) -> Result<Self, MemberError> {
        let Membership { files, .. } = membership;
        let coordinator = EmbeddedCoordinator::new(files.clone());
        // It may have been edited since this node has started.
        let (document, version) = coordinator.read()?;
        let id = draw_arena_id()?;
        let next = match document.replica() {
            Some(replica) if !replaces => return Err(MemberError::HasReplica { replica: replica.node }),
            Some(_) => document.with_replacement(id, address)?,
            None => document.with_replica(id, address)?,
        };
        let node = next.replica().expect("it was just added").node;
        let credentials = match document.tls {
            true => {
                let authority = ClusterAuthority::load(&files.authority_directory(), document.cluster)?;
                let NodeCredentials { ca, certificate, key } = authority.issue(node)?;
                Some(InvitedCredentials { ca, authority_key: authority.key_pem(), certificate, key })
            }
            false => None,
        };
        coordinator.compare_and_swap(version, &next)?;
        let summary = arena.summary();
        Ok(Self {
            format: FORMAT,
            node: node.get(),
            arena: id.to_string(),
            hash_key: summary.file_system.hash_key.0.iter().map(|byte| format!("{byte:02x}")).collect(),
            size_bytes: summary.size_bytes,
            document: next.to_text(),
            credentials,
        })
    }

    /// Returns its text.
    ///
    /// # Panics
    /// Never: any invitation can be written.
    #[must_use]
    pub fn to_text(&self) -> String {
        toml::to_string(self).expect("an invitation is a table of texts and numbers")
    }

    /// Writes an invitation to a new file that only its owner may read.
    ///
    /// # Errors
    /// Those of the system; the file exists.
    pub fn save(text: &str, path: &Path) -> io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        io::Write::write_all(&mut file, text.as_bytes())?;
        file.sync_all()
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`MemberError::Invitation`].
    pub fn load(path: &Path) -> Result<Self, MemberError> {
        let failed = |problem: String| MemberError::Invitation { path: path.to_owned(), problem };
        let file = fs::File::open(path).map_err(|error| failed(error.to_string()))?;
        let mut text = String::new();
        file.take(INVITATION_BYTES_MAX).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
        let read: Self = toml::from_str(&text).map_err(|error| failed(error.message().to_owned()))?;
        if read.format != FORMAT {
            return Err(failed(format!("format {} is of another version of Ashlar", read.format)));
        }
        read.document().map_err(failed)?;
        read.options(0).map_err(failed)?;
        Ok(read)
    }

    /// Returns the bytes of the writer's arena.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn document(&self) -> Result<ClusterDocument, String> {
        ClusterDocument::from_text(&self.document).map_err(|error| format!("its document, {error}"))
    }

    fn options(&self, size_bytes: u64) -> Result<ArenaOptions, String> {
        let document = self.document()?;
        let node = NodeNumber::new(self.node).ok_or("its node is none")?;
        let id = document.member(node).ok_or("its node is no member of its document")?.arena;
        let mut hash_key = [0; 16];
        if self.hash_key.len() != 32 || !self.hash_key.is_ascii() {
            return Err("its hash key is none".into());
        }
        for (at, byte) in hash_key.iter_mut().enumerate() {
            let digits = &self.hash_key[2 * at..2 * at + 2];
            *byte = u8::from_str_radix(digits, 16).map_err(|_| "its hash key is none".to_owned())?;
        }
        let file_system = FileSystemIdentity { id: document.cluster, hash_key: NameHashKey(hash_key) };
        Ok(ArenaOptions { node, file_system: Some(file_system), id: Some(id), ..ArenaOptions::new(size_bytes) })
    }

    /// Makes the new member's arena.
    ///
    /// # Errors
    /// Those of the arena and of the files.
    pub fn accept(&self, directory: &Path, size_bytes: u64, emulate_pmem: bool) -> Result<(), MemberError> {
        let failed = |problem| MemberError::Invitation { path: directory.to_owned(), problem };
        let (document, options) = (self.document().map_err(failed)?, self.options(size_bytes).map_err(failed)?);
        let arena = Arena::create(directory, &ArenaOptions { emulate_pmem, ..options })?;
        // Its tree comes from the writer. Until then the store is marked as no whole one.
        Store::format(&arena, Timestamp::default())?;
        let arena = Arc::new(arena);
        drop(begin_full_copy(&arena)?);
        let files = ClusterFiles::of(directory);
        files.make()?;
        if let Some(InvitedCredentials { ca, authority_key, certificate, key }) = self.credentials.clone() {
            let authority =
                ClusterAuthority::from_pem(document.cluster, ca.clone(), &authority_key, "in the invitation")?;
            authority.save(&files.authority_directory())?;
            NodeCredentials { ca, certificate, key }.save(files.directory())?;
        }
        files.write_hard_state(&HardState { newest_epoch: document.epoch, ..HardState::default() })?;
        Ok(files.write_document(&document)?)
    }
}

fn draw_arena_id() -> Result<ArenaId, MemberError> {
    let mut id = [0; 8];
    rustix::rand::getrandom(&mut id, GetRandomFlags::empty())
        .map_err(|error| MemberError::System { what: "drawing a random number", error: error.into() })?;
    Ok(ArenaId(u64::from_le_bytes(id)))
}
