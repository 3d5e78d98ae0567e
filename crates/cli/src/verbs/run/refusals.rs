//! Mounts that serve the user's programs through the kernel only.

use std::path::PathBuf;

use ashlar_launch::{MountRecord, live_records};
use ashlar_types::Credentials;
use ashlar_wire::SessionKind;

use crate::system::arena::ArenaLocation;
use crate::system::background::daemon_status;

/// Returns the mounts that have no sessions for the user of this process, each with the reason.
pub fn find_refusals(mounts: &[PathBuf]) -> Vec<(PathBuf, String)> {
    let user = Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: rustix::process::getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()).collect(),
        checked: false,
    };
    let records = live_records().into_iter().filter(|record| mounts.contains(&record.directory));
    records.filter_map(|record| Some((record.directory.clone(), find_refusal(&record, &user)?))).collect()
}

/// Returns why a mount has no session for a user, as far as its daemon says so.
fn find_refusal(record: &MountRecord, user: &Credentials) -> Option<String> {
    let status = daemon_status(&ArenaLocation::at(record.arena.clone()).ok()?).ok()??;
    let is_it = |kind, pid| kind == SessionKind::Mount && pid == record.pid;
    let terms = status.sessions.into_iter().find(|session| is_it(session.kind, session.pid))?.terms?;
    if terms.read_only {
        return Some("it is mounted for reading only".into());
    }
    let reason = || format!("it has no sessions for user {}; 'ashlar status' shows for which users it has", user.uid);
    (!terms.sessions.admits(user)).then(reason)
}
