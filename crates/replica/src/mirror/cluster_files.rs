//! The files of a member in its arena: the document, the hard state, and the place of the certificates.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ashlar_cluster::{ClusterDocument, Coordinator, CoordinatorError, DocumentVersion, HardState, TextError};
use ashlar_pmem::PrivateDirectory;
use parking_lot::Mutex;
use rustix::fs::OFlags;
use thiserror::Error;

/// The directory in an arena.
const DIRECTORY: &str = "cluster";
const DOCUMENT: &str = "cluster.toml";
const HARD_STATE: &str = "state.toml";
/// The directory of the cluster's certificate authority, within the other.
const AUTHORITY: &str = "authority";
/// A document or hard state is never longer: what is longer was not written by Ashlar.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// Why a member's files can't be used.
#[derive(Debug, Error)]
pub enum ClusterFilesError {
    /// A file can't be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// A file's text is wrong.
    #[error("{path}, {error}")]
    Text {
        /// The file.
        path: PathBuf,
        /// The line and the problem.
        error: TextError,
    },
    /// The hard state is gone, or it is none.
    #[error(
        "{path} can't be used ({problem}), so this node can't know whether another one has taken over; make it anew: if \
         it was the writer, first run 'ashlar node promote' on the other node; then run 'ashlar node add' there, with \
         --replace if this node was the replica, and 'ashlar node join' here with a new arena; if no other node has \
         the files, write {path} again, in three lines: 'format = 1', 'newest_epoch' with the value of 'epoch' in \
         cluster.toml, 'in_sync = false'"
    )]
    NoHardState {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
}

/// The files of a member in its arena.
#[derive(Clone, Debug)]
pub struct ClusterFiles {
    directory: PathBuf,
}

impl ClusterFiles {
    /// Returns the files of an arena; they need not be there.
    #[must_use]
    pub fn of(arena: &Path) -> Self {
        Self { directory: arena.join(DIRECTORY) }
    }

    /// Returns the directory, where the certificates stand too.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns whether the arena belongs to a cluster.
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.directory.join(DOCUMENT).exists()
    }

    /// Returns the directory with the key of the cluster's certificate authority.
    #[must_use]
    pub fn authority_directory(&self) -> PathBuf {
        self.directory.join(AUTHORITY)
    }

    /// Makes the directories, which only their owner may enter, anew: the document is written last.
    ///
    /// # Errors
    /// Those of the system; the arena belongs to a cluster.
    pub fn make(&self) -> Result<(), ClusterFilesError> {
        let make = || {
            if self.is_member() {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            match fs::remove_dir_all(&self.directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            fs::DirBuilder::new().mode(0o700).create(&self.directory)?;
            fs::DirBuilder::new().mode(0o700).create(self.authority_directory())?;
            let parent = self.directory.parent().ok_or(io::ErrorKind::NotFound)?;
            fs::File::open(parent)?.sync_all()
        };
        make().map_err(|error| ClusterFilesError::File { path: self.directory.clone(), error })
    }

    /// Reads the document.
    ///
    /// # Errors
    /// [`ClusterFilesError`].
    pub fn document(&self) -> Result<ClusterDocument, ClusterFilesError> {
        let path = self.directory.join(DOCUMENT);
        let text = read_text(&path)?;
        ClusterDocument::from_text(&text).map_err(|error| ClusterFilesError::Text { path, error })
    }

    /// Replaces the document, durably.
    ///
    /// # Errors
    /// Those of the system.
    pub fn write_document(&self, document: &ClusterDocument) -> Result<(), ClusterFilesError> {
        self.write(DOCUMENT, &document.to_text())
    }

    /// Reads the hard state.
    ///
    /// # Errors
    /// [`ClusterFilesError`]; a member without one may have a successor.
    pub fn hard_state(&self) -> Result<HardState, ClusterFilesError> {
        let path = self.directory.join(HARD_STATE);
        match read_text(&path) {
            Ok(text) => HardState::from_text(&text)
                .map_err(|error| ClusterFilesError::NoHardState { path, problem: error.to_string() }),
            Err(ClusterFilesError::File { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
                Err(ClusterFilesError::NoHardState { path, problem: "it is missing".into() })
            }
            Err(error) => Err(error),
        }
    }

    /// Replaces the hard state, durably.
    ///
    /// # Errors
    /// Those of the system.
    pub fn write_hard_state(&self, state: &HardState) -> Result<(), ClusterFilesError> {
        self.write(HARD_STATE, &state.to_text())
    }

    /// Replaces a file as a whole: after a crash, the old text or the new one is there.
    fn write(&self, name: &str, text: &str) -> Result<(), ClusterFilesError> {
        let next = format!("{name}.new");
        let replace = || -> io::Result<()> {
            let directory = PrivateDirectory::open(&self.directory).map_err(io::Error::other)?;
            let mut file = directory.open_file(&next, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            directory.rename(&next, name)?;
            directory.sync()
        };
        replace().map_err(|error| ClusterFilesError::File { path: self.directory.join(name), error })
    }
}

fn read_text(path: &Path) -> Result<String, ClusterFilesError> {
    let failed = |error| ClusterFilesError::File { path: path.to_owned(), error };
    let length = fs::metadata(path).map_err(failed)?.len();
    if length > TEXT_BYTES_MAX {
        return Err(failed(io::Error::other("the file is too long")));
    }
    fs::read_to_string(path).map_err(failed)
}

/// The coordinator of a cluster whose membership is fixed: the document in a member's own file.
///
/// Each member has its own. They agree because changes are made by hand, and because a member that sees a newer epoch
/// at another one stops.
pub struct EmbeddedCoordinator {
    files: ClusterFiles,
    /// One change at a time.
    changing: Mutex<()>,
}

impl EmbeddedCoordinator {
    /// Returns the coordinator that keeps the document in a member's file.
    #[must_use]
    pub fn new(files: ClusterFiles) -> Self {
        Self { files, changing: Mutex::new(()) }
    }
}

impl Coordinator for EmbeddedCoordinator {
    fn read(&self) -> Result<(ClusterDocument, DocumentVersion), CoordinatorError> {
        let document = self.files.document().map_err(unavailable)?;
        let version = DocumentVersion(u64::from(document.epoch.number));
        Ok((document, version))
    }

    fn compare_and_swap(
        &self,
        expected: DocumentVersion,
        document: &ClusterDocument,
    ) -> Result<DocumentVersion, CoordinatorError> {
        document.check()?;
        let _changing = self.changing.lock();
        let (present, version) = self.read()?;
        if version != expected {
            return Err(CoordinatorError::Conflict);
        }
        if document.epoch.number <= present.epoch.number {
            return Err(CoordinatorError::OldEpoch);
        }
        self.files.write_document(document).map_err(unavailable)?;
        Ok(DocumentVersion(u64::from(document.epoch.number)))
    }
}

fn unavailable(error: ClusterFilesError) -> CoordinatorError {
    CoordinatorError::Unavailable { what: "the cluster's document".into(), problem: error.to_string() }
}

#[cfg(test)]
mod tests {
    use ashlar_cluster::{DocumentMember, MemberRole};
    use ashlar_types::{ArenaId, FileSystemId, NodeNumber};

    use super::*;

    fn files() -> (tempfile::TempDir, ClusterFiles, ClusterDocument) {
        let place = tempfile::tempdir().expect("a directory");
        let files = ClusterFiles::of(place.path());
        files.make().expect("a directory");
        let (address, role) = ("10.0.0.1:7900".into(), MemberRole::Writer);
        let writer = DocumentMember { node: NodeNumber::FIRST, arena: ArenaId(1), address, role };
        let document = ClusterDocument::new(FileSystemId(7), writer, true).expect("a document");
        (place, files, document)
    }

    #[test]
    fn written_files_read_back_equal() {
        let (_place, files, document) = files();
        assert!(!files.is_member());
        files.write_document(&document).expect("written");
        files.write_hard_state(&HardState::default()).expect("written");
        assert!(files.is_member());
        assert_eq!(files.document().expect("there"), document);
        assert_eq!(files.hard_state().expect("there"), HardState::default());
    }

    /// A node whose hard state is lost must not serve beside its successor.
    #[test]
    fn lost_hard_state_is_an_error_with_a_remedy_that_works() {
        let (_place, files, document) = files();
        files.write_document(&document).expect("written");
        let missing = files.hard_state().expect_err("missing").to_string();
        files.write(HARD_STATE, "format = 1\nin_sync = 7\n").expect("written");
        let faulty = files.hard_state().expect_err("a fault").to_string();
        for (error, problem) in [(missing, "(it is missing)"), (faulty, "(line ")] {
            let remedies = ["ashlar node promote", "ashlar node add", "ashlar node join", "in three lines"];
            assert!(remedies.iter().all(|remedy| error.contains(remedy)) && error.contains(problem), "{error}");
        }
        let text = document.to_text();
        let epoch = text.lines().find_map(|line| line.strip_prefix("epoch")).expect("an epoch");
        files.write(HARD_STATE, &format!("format = 1\nnewest_epoch{epoch}\nin_sync = false\n")).expect("written");
        let expected = HardState { newest_epoch: document.epoch, ..HardState::default() };
        assert_eq!(files.hard_state().expect("there"), expected);
    }

    #[test]
    fn faulty_document_names_file_and_line() {
        let (_place, files, document) = files();
        let text = document.to_text().replace("min_replicas = 2", "min_replicas = 9");
        files.write(DOCUMENT, &text).expect("written");
        let error = files.document().expect_err("a fault").to_string();
        assert!(error.contains("cluster.toml, line 5: min_replicas is 9"), "{error}");
    }

    #[test]
    fn document_changes_by_compare_and_swap_only() {
        let (_place, files, document) = files();
        files.write_document(&document).expect("written");
        let coordinator = EmbeddedCoordinator::new(files);
        let (read, version) = coordinator.read().expect("there");
        let next = read.with_replica(ArenaId(2), "10.0.0.2:7900".into()).expect("a replica");
        let newer = coordinator.compare_and_swap(version, &next).expect("swapped");
        assert!(newer > version);
        assert!(matches!(coordinator.compare_and_swap(version, &next), Err(CoordinatorError::Conflict)));
        assert!(matches!(coordinator.compare_and_swap(newer, &read), Err(CoordinatorError::OldEpoch)));
    }
}
