//! `ashlar fsck`: through the daemon if one runs, else on the arena itself.

mod compare;

use std::process::ExitCode;
use std::sync::Arc;

use ashlar_store::{CheckReport, Store};
use ashlar_wire::{Reply, Request};
use serde::Serialize;

use crate::arguments::FsckArguments;
use crate::error::CliError;
use crate::output::progress;
use crate::output::table::grouped;
use crate::system::arena::ArenaLocation;
use crate::system::background::ask_patiently;

/// The exit statuses of fsck(8).
const CLEAN: u8 = 0;
const REPAIRED: u8 = 1;
const DAMAGED: u8 = 4;

/// The result of a check.
#[derive(Debug, Serialize)]
struct Findings {
    arena: String,
    /// Whether the arena was in use.
    online: bool,
    /// The counts.
    counts: serde_json::Map<String, serde_json::Value>,
    /// The problems, a sentence each.
    problems: Vec<String>,
    /// Problems that the repair removed.
    repaired: Vec<String>,
}

/// Checks an arena, and repairs it if the user asks for that; or compares two, or dumps one.
pub fn run(arguments: &FsckArguments) -> Result<ExitCode, CliError> {
    if let Some([first, second]) = arguments.compare.as_deref() {
        return compare::run(first, second, arguments.json);
    }
    if let Some(arena) = &arguments.dump {
        return compare::print_dump(arena);
    }
    let place = ArenaLocation::find(&arguments.arena.arena)?;
    place.probe()?;
    let spinner = progress::spinner("checking");
    let online = ask_patiently(&place, &Request::Fsck);
    spinner.finish_and_clear();
    let findings = match online? {
        Some(_) if arguments.repair => return Err(CliError::RepairInUse(place.directory().to_owned())),
        Some(Reply::Fsck(reply)) => Findings {
            arena: place.directory().display().to_string(),
            online: true,
            counts: reply.counts.into_iter().map(|(name, count)| (name, count.into())).collect(),
            problems: reply.problems,
            repaired: Vec::new(),
        },
        Some(Reply::Error(ashlar_types::Errno::EPERM | ashlar_types::Errno::EACCES)) => {
            return Err(CliError::NotRoot { what: "checking an arena that is in use" });
        }
        Some(Reply::Error(error)) => {
            return Err(CliError::Refused { what: "check the arena", error, log: place.daemon_log() });
        }
        Some(_) => return Err(CliError::Misunderstood),
        None => check_offline(&place, arguments.repair)?,
    };
    if arguments.json {
        let text = serde_json::to_string_pretty(&findings).map_err(CliError::system("writing JSON"))?;
        println!("{text}");
    } else {
        print!("{}", text(&findings, arguments.repair));
    }
    Ok(ExitCode::from(exit_status(&findings)))
}

fn check_offline(place: &ArenaLocation, repair: bool) -> Result<Findings, CliError> {
    let arena = Arc::new(place.open()?);
    let mut store = Store::open(Arc::clone(&arena)).map_err(|error| place.store_error(error))?;
    let logs = ashlar_daemon::check_logs(&arena, &store)?;
    let found = check(&mut store, place, "checking")?;
    let sentences = |report: &CheckReport| report.problems.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (before, mut remaining) = (sentences(&found), Vec::new());
    let mut last = found;
    if !repair {
        remaining = before.clone();
    } else if !before.is_empty() {
        store.repair().map_err(|error| place.store_error(error))?;
        // Its frames describe a tree that is no more. The logs hold all of them that the store lacks.
        arena.remove_journal().map_err(|error| place.error(error))?;
        // A second check, since nothing else shows that the repair worked.
        last = check(&mut store, place, "checking again")?;
        remaining = sentences(&last);
    }
    let repaired = before.into_iter().filter(|problem| !remaining.contains(problem)).collect();
    remaining.extend(logs.problems);
    let mut counts = counts(&last);
    counts.insert("records".into(), logs.records.into());
    Ok(Findings {
        arena: place.directory().display().to_string(),
        online: false,
        counts,
        repaired,
        problems: remaining,
    })
}

fn check(store: &mut Store, place: &ArenaLocation, what: &str) -> Result<CheckReport, CliError> {
    let bar = progress::bar(what, 0);
    let result = store.check(&mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    });
    bar.finish_and_clear();
    result.map_err(|error| place.store_error(error))
}

fn counts(report: &CheckReport) -> serde_json::Map<String, serde_json::Value> {
    let counts = &report.counts;
    let named = [
        ("inodes", counts.inodes),
        ("directories", counts.directories),
        ("entries", counts.entries),
        ("blocks", counts.blocks),
        ("bytes", counts.bytes),
    ];
    named.into_iter().map(|(name, count)| (name.to_owned(), count.into())).collect()
}

fn exit_status(findings: &Findings) -> u8 {
    match (findings.problems.is_empty(), findings.repaired.is_empty()) {
        (false, _) => DAMAGED,
        (true, false) => REPAIRED,
        (true, true) => CLEAN,
    }
}

fn text(findings: &Findings, repair: bool) -> String {
    let how = if findings.online { "in use" } else { "not in use" };
    let mut text = format!("{:<12}{} ({how})\n", "arena", findings.arena);
    for (name, count) in &findings.counts {
        text += &format!("{name:<12}{}\n", grouped(count.as_u64().unwrap_or(0)));
    }
    for problem in &findings.repaired {
        text += &format!("repaired: {problem}\n");
    }
    for problem in &findings.problems {
        text += &format!("problem: {problem}\n");
    }
    let (open, done) = (findings.problems.len(), findings.repaired.len());
    text += &match (open, done) {
        (0, 0) => "clean: no problem found\n".to_owned(),
        (0, _) => format!("clean now: {done} problems repaired\n"),
        (_, _) if repair => {
            format!("{open} problems remain, which this cannot repair; copy what you can read to another file system\n")
        }
        (_, _) if findings.online => {
            format!("{open} problems found; unmount it, then 'ashlar fsck --repair --arena {}'\n", findings.arena)
        }
        (_, _) => format!(
            "{open} problems found; 'ashlar fsck --repair --arena {}' repairs what can be repaired\n",
            findings.arena
        ),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(problems: &[&str], repaired: &[&str]) -> Findings {
        let own = |sentences: &[&str]| sentences.iter().map(|&sentence| sentence.to_owned()).collect();
        Findings {
            arena: "/arena".into(),
            online: false,
            counts: std::iter::once(("inodes".to_owned(), 1234.into())).collect(),
            problems: own(problems),
            repaired: own(repaired),
        }
    }

    #[test]
    fn exit_statuses_are_those_of_fsck() {
        assert_eq!(exit_status(&findings(&[], &[])), 0);
        assert_eq!(exit_status(&findings(&[], &["x"])), 1);
        assert_eq!(exit_status(&findings(&["x"], &["y"])), 4);
    }

    #[test]
    fn problems_end_with_the_command_that_helps() {
        let text = text(&findings(&["a link count is wrong"], &[]), false);
        assert!(
            text.contains("problem: a link count is wrong") && text.contains("ashlar fsck --repair --arena /arena"),
            "{text}"
        );
        assert!(text.contains("1,234"), "{text}");
    }
}
