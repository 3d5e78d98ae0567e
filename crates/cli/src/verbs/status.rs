//! `ashlar status`: shows arenas, sessions and counters.

use std::process::ExitCode;

use ashlar_launch::live_records;
use ashlar_pmem::Medium;
use ashlar_types::escape_controls;
use ashlar_wire::{NodeStanding, SessionStatus, StatusReply};
use serde::Serialize;

use crate::arguments::StatusArguments;
use crate::error::CliError;
use crate::output::size::Size;
use crate::output::table::{grouped, table};
use crate::system::admission::describe_terms;
use crate::system::arena::{ArenaChoice, ArenaLocation, survives};
use crate::system::background::daemon_status;
use crate::verbs::cluster_status::{describe_cluster, list_members};

/// The state of one arena.
#[derive(Debug, Serialize)]
struct ArenaReport {
    arena: String,
    medium: String,
    survives: &'static str,
    arena_bytes: u64,
    mounts: Vec<String>,
    /// The status of its daemon; `null` if none runs.
    daemon: Option<StatusReply>,
    /// Why the arena can't be read.
    problem: Option<String>,
}

#[derive(Serialize)]
struct StatusDocument {
    version: &'static str,
    arenas: Vec<ArenaReport>,
}

/// Shows arenas, sessions and counters.
pub fn run(arguments: &StatusArguments) -> Result<ExitCode, CliError> {
    let arenas: Vec<_> = match &arguments.arena {
        Some(_) => chosen_arenas(arguments.arena.as_ref())?.iter().map(report_arena).collect::<Result<_, _>>()?,
        None => chosen_arenas(None)?.iter().map(report_one_of_several).collect(),
    };
    if arguments.json {
        let report = StatusDocument { version: env!("CARGO_PKG_VERSION"), arenas };
        let text = serde_json::to_string_pretty(&report).map_err(CliError::system("writing JSON"))?;
        println!("{text}");
    } else if arenas.is_empty() {
        println!("no arena is there yet; 'ashlar mount DIR' makes one and mounts it");
    } else {
        let texts: Vec<_> = arenas.iter().map(text).collect();
        print!("{}", texts.join("\n"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the requested arena, or all mounted ones and the standard ones that exist.
pub fn chosen_arenas(wanted: Option<&ArenaChoice>) -> Result<Vec<ArenaLocation>, CliError> {
    if let Some(choice) = wanted {
        let place = ArenaLocation::find(choice)?;
        return if place.exists() { Ok(vec![place]) } else { Err(CliError::NoArena(place.directory().to_owned())) };
    }
    let mut chosen_arenas = Vec::new();
    let of_root = ArenaLocation::of_root_in_memory();
    let standard = [ArenaLocation::new(&ArenaChoice::Disk), ArenaLocation::new(&ArenaChoice::Memory), of_root];
    let mounted = live_records().into_iter().map(|record| ArenaLocation::at(record.arena));
    let existing = standard.into_iter().filter(|place| place.as_ref().is_ok_and(ArenaLocation::exists));
    for place in existing.chain(mounted) {
        let place = place?;
        if !chosen_arenas.contains(&place) {
            chosen_arenas.push(place);
        }
    }
    Ok(chosen_arenas)
}

/// Reads the report of one of several arenas. If its daemon gives no answer, as one of another version, the others are
/// still shown.
fn report_one_of_several(place: &ArenaLocation) -> ArenaReport {
    report_arena(place).unwrap_or_else(|error| ArenaReport {
        arena: place.directory().display().to_string(),
        medium: "unknown".into(),
        survives: survives("unknown"),
        arena_bytes: 0,
        mounts: vec![],
        daemon: None,
        problem: Some(error.to_string()),
    })
}

fn report_arena(place: &ArenaLocation) -> Result<ArenaReport, CliError> {
    let daemon = daemon_status(place)?;
    let records = live_records().into_iter().filter(|record| record.arena == place.directory());
    let probed = place.probe();
    let emulated = probed.as_ref().is_ok_and(|summary| summary.emulated);
    let medium = daemon.as_ref().map(|status| status.medium.clone()).unwrap_or_else(|| {
        Medium::probe(place.directory(), emulated).map_or("unknown", |medium| medium.kind.name()).to_owned()
    });
    Ok(ArenaReport {
        arena: place.directory().display().to_string(),
        survives: survives(&medium),
        medium,
        arena_bytes: daemon
            .as_ref()
            .map(|status| status.arena_bytes)
            .or(probed.as_ref().ok().map(|it| it.size_bytes))
            .unwrap_or(0),
        mounts: records.map(|record| record.directory.display().to_string()).collect(),
        problem: if daemon.is_some() { None } else { probed.err().map(|error| error.to_string()) },
        daemon,
    })
}

fn text(report: &ArenaReport) -> String {
    let mut text = format!("arena     {}\n", report.arena);
    if let Some(problem) = &report.problem {
        return text + &format!("problem   {problem}\n");
    }
    text += &format!("medium    {}: {}\n", report.medium, report.survives);
    let Some(daemon) = &report.daemon else {
        text += &format!("size      {}\n", Size(report.arena_bytes));
        return text + &format!("daemon    not running; 'ashlar mount DIR --arena {}' starts it\n", report.arena);
    };
    let (space, cluster) = (&daemon.space, daemon.cluster.as_deref());
    let serves = cluster.is_none_or(|cluster| cluster.standing == NodeStanding::Serving);
    if serves {
        let used = space.blocks_total.saturating_sub(space.blocks_free);
        let free = Size(space.blocks_free * ashlar_types::BLOCK_BYTES);
        let share = percent(used, space.blocks_total);
        text += &format!("size      {}, {free} free ({share} used)\n", Size(report.arena_bytes));
    } else {
        text += &format!("size      {}\n", Size(report.arena_bytes));
    }
    let (pid, version) = (daemon.pid, escape_controls(&daemon.version));
    text += &format!("daemon    process {pid}, version {version}, up {}\n", duration(daemon.uptime_seconds));
    if let Some(cluster) = cluster {
        text += &describe_cluster(cluster);
    }
    for session in &daemon.sessions {
        if let Some(terms) = &session.terms {
            text += &format!("mount     {}: sessions {}\n", escape_controls(&session.label), describe_terms(terms));
        }
    }
    if daemon.sessions.is_empty() {
        text += if serves { "sessions  none\n" } else { "sessions  none: this node serves none\n" };
    }
    if let Some(cluster) = cluster {
        text += "\n";
        text += &list_members(cluster);
    }
    if !daemon.sessions.is_empty() {
        let rows: Vec<_> = daemon.sessions.iter().map(row).collect();
        text += "\n";
        text += &table(&["SESSION", "KIND", "PROCESS", "USER", "LOG", "FULL", "RECORDS", "WHERE"], &rows);
    }
    for session in &daemon.sessions {
        if let Some(why) = &session.fenced {
            text += &format!("session {} is fenced, all its calls fail: {}\n", session.session, escape_controls(why));
        }
    }
    // A counter at zero is left out; JSON has all of them.
    let counters = daemon.counters.iter().filter(|(_, count)| *count > 0);
    let counters: Vec<_> = counters.map(|(name, count)| vec![name.clone(), grouped(*count)]).collect();
    if !counters.is_empty() {
        text += "\n";
        text += &table(&["COUNTER", "SINCE THE START"], &counters);
    }
    text
}

fn row(session: &SessionStatus) -> Vec<String> {
    vec![
        session.session.to_string(),
        format!("{:?}", session.kind).to_lowercase(),
        session.pid.to_string(),
        session.uid.to_string(),
        Size(session.log_bytes).to_string(),
        percent(session.log_used_bytes, session.log_bytes),
        grouped(session.records),
        escape_controls(&session.label).into_owned(),
    ]
}

/// Formats a share in whole percents.
pub fn percent(part: u64, whole: u64) -> String {
    format!("{:.0} %", 100.0 * part as f64 / whole.max(1) as f64)
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use ashlar_types::SessionId;
    use ashlar_wire::{Admission, MountTerms, SessionKind, SpaceReply};

    use super::*;

    fn report(daemon: Option<StatusReply>) -> ArenaReport {
        ArenaReport {
            arena: "/arena".into(),
            medium: "memory".into(),
            survives: survives("memory"),
            arena_bytes: 1 << 30,
            mounts: vec![],
            daemon,
            problem: None,
        }
    }

    #[test]
    fn an_arena_at_rest_says_how_to_mount_it() {
        let text = text(&report(None));
        assert!(text.contains("size      1.0 GiB") && text.contains("ashlar mount DIR --arena /arena"), "{text}");
    }

    #[test]
    fn sessions_stand_in_a_table_and_fences_are_explained() {
        let session = SessionStatus {
            session: SessionId(7),
            kind: SessionKind::Mount,
            pid: 42,
            uid: 0,
            label: "/mnt".into(),
            log_used_bytes: 16 << 20,
            log_bytes: 64 << 20,
            records: 1234,
            digested_bytes: 99_999,
            leases_granted: 3,
            leases_revoked: 2,
            operations: vec![],
            fenced: Some("a record named a file that is not its own".into()),
            terms: Some(MountTerms { read_only: false, sessions: Admission::of_all() }),
        };
        let daemon = StatusReply {
            version: "0.1.0".into(),
            pid: 41,
            uptime_seconds: 200,
            arena: "/arena".into(),
            medium: "memory".into(),
            arena_bytes: 1 << 30,
            space: SpaceReply { blocks_total: 100, blocks_free: 75, inodes_total: 0, inodes_free: 0 },
            sessions: vec![session],
            counters: vec![("grants".into(), 1_000_000), ("splits".into(), 0)],
            cluster: None,
        };
        let text = text(&report(Some(daemon)));
        for part in [
            "mount     /mnt: sessions for all users; each",
            "(25 % used)",
            "up 3 min",
            "25 %",
            "1,234",
            "/mnt",
            "is fenced",
            "1,000,000",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        assert!(!text.contains("splits"), "what never happened is shown:\n{text}");
    }
}
