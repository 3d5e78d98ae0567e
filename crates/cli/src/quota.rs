//! `ashlar quota set`, `show` and `remove`.
//!
//! SharedFS keeps the limits, and the command asks it through its socket. Each inode names the subtree that it counts
//! against. So an existing tree is walked once, through a mount, before its limits hold.

pub mod names;
mod tree;

use std::process::ExitCode;

use ashlar_types::{BLOCK_BYTES, Errno, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaLimits};
use ashlar_wire::{QuotaStatus, Reply, Request};
use serde::Serialize;

use crate::arena::{ArenaChoice, Place};
use crate::arguments::{
    QuotaRemoveArguments, QuotaSetArguments, QuotaShowArguments, QuotaVerb, WhereArguments, WhoArguments,
};
use crate::error::CliError;
use crate::launch::{ask, ensure_daemon};
use crate::mounts;
use crate::size::Size;
use crate::table::{grouped, table};
use tree::Subtree;

/// Runs a verb on quotas.
pub fn run(verb: &QuotaVerb) -> Result<ExitCode, CliError> {
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::NotRoot { what: "looking after quotas" });
    }
    match verb {
        QuotaVerb::Set(arguments) => set(arguments),
        QuotaVerb::Show(arguments) => show(arguments),
        QuotaVerb::Remove(arguments) => remove(arguments),
    }
}

/// The account or subtree of a quota, and its arena.
enum Subject {
    Account(QuotaKey, Place),
    Tree(Subtree, Place),
}

impl Subject {
    fn new(who: &WhoArguments, at: &WhereArguments) -> Result<Self, CliError> {
        if let Some(directory) = &who.subtree {
            let tree = Subtree::open(directory)?;
            let place = Place::at(tree.arena.clone())?;
            return Ok(Self::Tree(tree, place));
        }
        let key = match (&who.user, &who.group) {
            (Some(user), _) => QuotaKey::User(names::user(user)?),
            (None, Some(group)) => QuotaKey::Group(names::group(group)?),
            (None, None) => return Err(CliError::NoQuota("nobody".to_owned())),
        };
        Ok(Self::Account(key, place(at)?))
    }

    fn key(&self) -> QuotaKey {
        match self {
            Self::Account(key, _) => *key,
            Self::Tree(tree, _) => QuotaKey::Subtree(QuotaId::of(InodeId(tree.number))),
        }
    }

    fn place(&self) -> &Place {
        match self {
            Self::Account(_, place) | Self::Tree(_, place) => place,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Account(key, _) => names::describe(*key, None),
            Self::Tree(tree, _) => tree.directory.display().to_string(),
        }
    }
}

/// Returns the arena behind a mount, or the one that is named.
fn place(at: &WhereArguments) -> Result<Place, CliError> {
    let place = match (&at.mount, &at.arena) {
        (Some(mount), _) => {
            let directory = mounts::resolve(mount)?;
            let record = mounts::record_of(&directory).ok_or(CliError::NotMounted(directory))?;
            Place::at(record.arena)?
        }
        (None, choice) => Place::new(choice.as_ref().unwrap_or(&ArenaChoice::Disk))?,
    };
    place.probe()?;
    ensure_daemon(&place)?;
    Ok(place)
}

fn call(place: &Place, request: &Request) -> Result<Reply, CliError> {
    match ask(place, request)?.ok_or_else(|| CliError::NoDaemon(place.directory().to_owned()))? {
        Reply::Error(Errno::EPERM | Errno::EACCES) => Err(CliError::NotRoot { what: "looking after quotas" }),
        Reply::Error(error) => Err(CliError::Refused { what: "look after quotas", error, log: place.daemon_log() }),
        reply => Ok(reply),
    }
}

fn all(place: &Place) -> Result<Vec<QuotaStatus>, CliError> {
    match call(place, &Request::Quotas)? {
        Reply::Quotas(quotas) => Ok(quotas),
        _ => Err(CliError::Misunderstood),
    }
}

/// Returns use and limits; both are empty if SharedFS has no account for it.
fn status(place: &Place, key: QuotaKey) -> Result<QuotaStatus, CliError> {
    let nothing = QuotaStatus { key, used: QuotaAmount::default(), limits: QuotaLimits::default(), path: None };
    Ok(all(place)?.into_iter().find(|status| status.key == key).unwrap_or(nothing))
}

fn set_limits(place: &Place, key: QuotaKey, limits: QuotaLimits) -> Result<(), CliError> {
    match call(place, &Request::SetQuota { key, limits })? {
        Reply::Done => Ok(()),
        _ => Err(CliError::Misunderstood),
    }
}

fn set(arguments: &QuotaSetArguments) -> Result<ExitCode, CliError> {
    let subject = Subject::new(&arguments.who, &arguments.at)?;
    let (place, key) = (subject.place(), subject.key());
    let before = status(place, key)?.limits;
    let blocks = arguments.space.map_or(before.blocks, |space| space.0.map(|size| size.0 / BLOCK_BYTES));
    let inodes = arguments.files.map_or(before.inodes, |files| files.0);
    let limits = QuotaLimits { blocks, inodes };
    if let Subject::Tree(tree, _) = &subject {
        // Limits exist only after a complete walk, and files that were made since count by themselves.
        if before.is_none() {
            tree.enter()?;
        }
    }
    set_limits(place, key, limits)?;
    let now = status(place, key)?;
    println!("{}: {}", subject.name(), sentence(&now));
    Ok(ExitCode::SUCCESS)
}

fn bytes(blocks: u64) -> u64 {
    blocks.saturating_mul(BLOCK_BYTES)
}

fn size(blocks: u64) -> String {
    Size(bytes(blocks)).to_string()
}

fn sentence(status: &QuotaStatus) -> String {
    let part = |used: String, limit: Option<String>| match limit {
        Some(limit) => format!("{used} of {limit}"),
        None => format!("{used} (no limit)"),
    };
    let space = part(size(status.used.blocks), status.limits.blocks.map(size));
    let files = part(grouped(status.used.inodes), status.limits.inodes.map(grouped));
    format!("{space} used, {files} files")
}

fn remove(arguments: &QuotaRemoveArguments) -> Result<ExitCode, CliError> {
    let subject = Subject::new(&arguments.who, &arguments.at)?;
    let (place, key) = (subject.place(), subject.key());
    let is_tree = match &subject {
        Subject::Tree(tree, _) => tree.is_entered()?,
        Subject::Account(..) => false,
    };
    if status(place, key)?.limits.is_none() && !is_tree {
        return Err(CliError::NoQuota(subject.name()));
    }
    set_limits(place, key, QuotaLimits::default())?;
    if let Subject::Tree(tree, _) = &subject {
        tree.leave()?;
    }
    println!("{}: no limit any more", subject.name());
    Ok(ExitCode::SUCCESS)
}

/// One line of `show --json`.
#[derive(Serialize)]
struct Line {
    kind: &'static str,
    id: u64,
    name: String,
    space_used_bytes: u64,
    space_limit_bytes: Option<u64>,
    files_used: u64,
    files_limit: Option<u64>,
}

impl Line {
    fn new(status: &QuotaStatus) -> Self {
        let (kind, id) = match status.key {
            QuotaKey::User(uid) => ("user", u64::from(uid)),
            QuotaKey::Group(gid) => ("group", u64::from(gid)),
            QuotaKey::Subtree(id) => ("subtree", id.0),
        };
        Self {
            kind,
            id,
            name: names::bare(status.key, status.path.as_deref()),
            space_used_bytes: bytes(status.used.blocks),
            space_limit_bytes: status.limits.blocks.map(bytes),
            files_used: status.used.inodes,
            files_limit: status.limits.inodes,
        }
    }
}

fn show(arguments: &QuotaShowArguments) -> Result<ExitCode, CliError> {
    let place = place(&arguments.at)?;
    let quotas = all(&place)?;
    if arguments.json {
        let lines: Vec<_> = quotas.iter().map(Line::new).collect();
        let text = serde_json::to_string_pretty(&serde_json::json!({ "quotas": lines }));
        println!("{}", text.map_err(CliError::system("writing JSON"))?);
        return Ok(ExitCode::SUCCESS);
    }
    print!("{}", text(&quotas));
    Ok(ExitCode::SUCCESS)
}

fn text(quotas: &[QuotaStatus]) -> String {
    let rows: Vec<_> = quotas.iter().map(row).collect();
    let mut text = table(&["SPACE", "LIMIT", "FULL", "FILES", "LIMIT", "FULL", "WHO"], &rows);
    if quotas.iter().all(|status| status.limits.is_none()) {
        text += "nobody is limited; 'ashlar quota set --user NAME --space 10G' limits somebody\n";
    }
    text
}

fn row(status: &QuotaStatus) -> Vec<String> {
    let full = |used: u64, limit: Option<u64>| match limit {
        None => "-".to_owned(),
        Some(0) => "100 %".to_owned(),
        Some(limit) => format!("{:.0} %", 100.0 * used as f64 / limit as f64),
    };
    let none = || "-".to_owned();
    vec![
        size(status.used.blocks),
        status.limits.blocks.map_or_else(none, size),
        full(status.used.blocks, status.limits.blocks),
        grouped(status.used.inodes),
        status.limits.inodes.map_or_else(none, grouped),
        full(status.used.inodes, status.limits.inodes),
        names::describe(status.key, status.path.as_deref()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_uses_how_much_stands_in_a_table() {
        let status = |key, path: Option<&str>, limits| QuotaStatus {
            key,
            used: QuotaAmount { blocks: 256, inodes: 1500 },
            limits,
            path: path.map(|path| path.as_bytes().to_vec()),
        };
        let limits = QuotaLimits { blocks: Some(512), inodes: None };
        let tree = status(QuotaKey::Subtree(QuotaId(16)), Some("/home/a"), limits);
        let shown = text(&[tree, status(QuotaKey::User(123_456), None, QuotaLimits::default())]);
        for part in ["1.0 MiB", "2.0 MiB", "50 %", "1,500", "subtree /home/a", "user 123456"] {
            assert!(shown.contains(part), "{part} is missing:\n{shown}");
        }
        assert!(!shown.contains("nobody"));
        let shown = text(&[status(QuotaKey::Group(123_456), None, QuotaLimits::default())]);
        assert!(shown.contains("nobody is limited") && shown.contains("group 123456"), "{shown}");
    }
}
