//! The record of a cluster on this machine: all that it has made, or was about to make.
//!
//! The record is written before the first of it is made. So `ashlar dev down` also removes a cluster whose `up` was
//! killed, and removes nothing else.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use ashlar_pmem::PrivateDirectory;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use crate::error::{CliError, DevError};

/// The directory of root's records.
const RECORDS_OF_ROOT: &str = "/run/ashlar/dev";
/// The record, in the cluster's directory, and its name while it is written.
const RECORD: &str = "cluster.json";
const NEW_RECORD: &str = "cluster.json.new";
/// The longest name: that of a namespace has it in the middle.
const NAME_BYTES_MAX: usize = 24;
/// The version of the record.
const FORMAT: u32 = 1;

/// A node of a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its number.
    pub number: u16,
    /// Its arena, which the cluster has made.
    pub arena: PathBuf,
    /// The address of its daemon.
    pub address: String,
    /// The network namespace of its daemon, which the cluster has made.
    pub namespace: Option<String>,
}

/// A cluster on this machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClusterRecord {
    /// The version of the record.
    pub format: u32,
    /// Its name.
    pub name: String,
    /// Its nodes.
    pub nodes: Vec<NodeRecord>,
}

impl ClusterRecord {
    /// Returns a record, not yet written.
    pub fn new(name: &str, nodes: Vec<NodeRecord>) -> Self {
        Self { format: FORMAT, name: name.to_owned(), nodes }
    }

    /// Returns a node.
    pub fn node(&self, number: u16) -> Result<&NodeRecord, DevError> {
        let found = self.nodes.iter().find(|node| node.number == number);
        found.ok_or_else(|| DevError::NoNode { name: self.name.clone(), node: number })
    }
}

/// The directory of a cluster's record, which this process has locked.
#[derive(Debug)]
pub struct RecordDirectory {
    directory: PrivateDirectory,
    name: String,
}

impl RecordDirectory {
    /// Makes the directory of a new cluster.
    pub fn make(name: &str) -> Result<Self, CliError> {
        check_name(name)?;
        let path = records_directory().join(name);
        let directory = PrivateDirectory::make(&path, 0o700)
            .map_err(|error| CliError::Arena { arena: path.clone(), error: error.into() })?;
        Self::lock(directory, name)
    }

    /// Opens the directory of a cluster.
    pub fn open(name: &str) -> Result<Self, CliError> {
        check_name(name)?;
        let path = records_directory().join(name);
        if !path.is_dir() {
            return Err(DevError::Missing(name.to_owned()).into());
        }
        let directory = PrivateDirectory::open(&path)
            .map_err(|error| CliError::Arena { arena: path.clone(), error: error.into() })?;
        Self::lock(directory, name)
    }

    fn lock(directory: PrivateDirectory, name: &str) -> Result<Self, CliError> {
        let what = || format!("locking {}", directory.path().display());
        flock(&directory, FlockOperation::LockExclusive).map_err(CliError::system(what()))?;
        Ok(Self { directory, name: name.to_owned() })
    }

    /// Reads the record; `None` if nothing was made yet.
    pub fn read(&self) -> Result<Option<ClusterRecord>, CliError> {
        read_record(self.directory.path())
    }

    /// Reads the record of a cluster that exists.
    pub fn require(&self) -> Result<ClusterRecord, CliError> {
        self.read()?.ok_or_else(|| DevError::Missing(self.name.clone()).into())
    }

    /// Writes the record. A process that is killed leaves the old one or the new one.
    pub fn write(&self, record: &ClusterRecord) -> Result<(), CliError> {
        let write = || -> std::io::Result<()> {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
            let mut file = self.directory.open_file(NEW_RECORD, flags)?;
            file.write_all(&serde_json::to_vec_pretty(record)?)?;
            file.sync_all()?;
            self.directory.rename(NEW_RECORD, RECORD)
        };
        write().map_err(CliError::system(format!("writing {}", self.directory.path().join(RECORD).display())))
    }

    /// Removes the record, after all that it names.
    pub fn remove(self) -> Result<(), CliError> {
        let path = self.directory.path();
        fs::remove_dir_all(path).map_err(CliError::system(format!("removing {}", path.display())))
    }
}

/// Reads the record of a cluster without a lock, for a look at it.
pub fn look_up(name: &str) -> Result<ClusterRecord, CliError> {
    check_name(name)?;
    read_record(&records_directory().join(name))?.ok_or_else(|| DevError::Missing(name.to_owned()).into())
}

fn read_record(directory: &Path) -> Result<Option<ClusterRecord>, CliError> {
    let path = directory.join(RECORD);
    let text = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(CliError::system(format!("reading {}", path.display())))?,
    };
    match serde_json::from_slice::<ClusterRecord>(&text) {
        Ok(record) if record.format == FORMAT => Ok(Some(record)),
        Ok(_) => Err(DevError::BadRecord { path, problem: "it is of another version of ashlar".into() }.into()),
        Err(error) => Err(DevError::BadRecord { path, problem: error.to_string() }.into()),
    }
}

/// Returns the directory of the caller's records.
fn records_directory() -> PathBuf {
    let user = geteuid();
    if user.is_root() {
        return RECORDS_OF_ROOT.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty()) {
        Some(directory) => PathBuf::from(directory).join("ashlar/dev"),
        None => format!("/dev/shm/ashlar-{}/dev", user.as_raw()).into(),
    }
}

fn check_name(name: &str) -> Result<(), DevError> {
    let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_name = !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(is_part);
    if is_name && !name.starts_with('-') { Ok(()) } else { Err(DevError::WrongName(name.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parts_of_names() {
        for good in ["dev", "a", "test-12-3"] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for wrong in ["", "-a", "a/b", "..", "A", "a b", "a-name-that-is-much-too-long"] {
            assert!(matches!(check_name(wrong), Err(DevError::WrongName(_))), "{wrong}");
        }
    }

    #[test]
    fn damaged_record_is_reported() {
        let directory = tempfile::tempdir().expect("a directory");
        assert!(read_record(directory.path()).expect("nothing made").is_none());
        fs::write(directory.path().join(RECORD), "{").expect("written");
        let error = read_record(directory.path()).expect_err("damaged");
        assert!(error.to_string().contains("remove the directory"), "{error}");
        let record = ClusterRecord { format: FORMAT + 1, ..ClusterRecord::new("dev", vec![]) };
        fs::write(directory.path().join(RECORD), serde_json::to_vec(&record).expect("encoded")).expect("written");
        let error = read_record(directory.path()).expect_err("of another version");
        assert!(error.to_string().contains("another version"), "{error}");
    }
}
