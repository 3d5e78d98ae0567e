//! Checks the logs of an arena that is not in use, for `fsck`.
//!
//! Their records are not in the shared area yet; the next start digests them.

use std::ffi::OsStr;

use ashlar_log::Log;
use ashlar_pmem::{Arena, Mapping, MappingAccess, SessionFile, sigbus};
use ashlar_processes::process::is_of_this_boot;
use ashlar_store::Store;
use ashlar_types::{LogPosition, SessionId};

use crate::DaemonError;
use crate::session_files::{SessionError, load_identity, open_lease_table};
use ashlar_node::records::log_check::{self, LogFault};

/// The records and faults that the logs hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFindings {
    /// Records that the next start digests.
    pub records: u64,
    /// The faults, a sentence each.
    pub problems: Vec<String>,
}

/// Reads the logs of all sessions that left one.
///
/// It reads from where the shared area has committed them.
///
/// # Errors
/// [`DaemonError`] if the arena's directory can't be read.
pub fn check_logs(arena: &Arena, store: &Store) -> Result<LogFindings, DaemonError> {
    sigbus::install().map_err(|error| DaemonError::System { what: "cannot guard against truncated files", error })?;
    let mut findings = LogFindings::default();
    for id in arena.sessions()? {
        // A session whose identity was not written yet has an empty log.
        if let Err(error) = check_log(arena, id, store.committed(id), &mut findings) {
            if !matches!(error, SessionError::Unfinished) {
                findings.problems.push(format!("the log of session {id} cannot be read: {error}"));
            }
        }
    }
    findings.problems.extend(list_quarantined(arena));
    Ok(findings)
}

fn check_log(
    arena: &Arena,
    id: SessionId,
    committed: LogPosition,
    findings: &mut LogFindings,
) -> Result<(), SessionError> {
    let page = open_lease_table(arena, id)?;
    let identity = load_identity(&page)?;
    let log_file = arena.open_session_file(id, SessionFile::Log)?;
    let log_bytes = log_file.metadata()?.len();
    let log = Log::open(Mapping::map(&log_file, log_bytes, MappingAccess::ReadWrite, arena.medium())?)?;
    let check = log_check::check_log(&log, committed, is_of_this_boot(&identity.process));
    findings.records += check.records;
    findings.problems.extend(check.fault.map(|fault| match fault {
        LogFault::Slots => format!("the log of session {id} is damaged: its slots contradict each other"),
        LogFault::Record { position, reason, left } => format!(
            "the log of session {id} ({}) is damaged at position {position} ({reason}); its last {left} bytes will not be \
             digested, but kept aside",
            identity.label
        ),
    }));
    Ok(())
}

/// Lists logs that an earlier start has quarantined.
fn list_quarantined(arena: &Arena) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(arena.dir().join("sessions")) else { return Vec::new() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| {
        let is_fenced = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"fenced-"));
        is_fenced && path.extension() == Some(OsStr::new("log"))
    });
    paths.sort();
    let findings = paths.iter().map(|path| {
        format!("a damaged or forged log was kept aside as {}; what it holds was not digested; remove it after you have inspected it", path.display())
    });
    findings.collect()
}
