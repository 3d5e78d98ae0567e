//! `ashlar quota set`, `show` and `remove`.
//!
//! SharedFS keeps the limits, and the command asks it through its socket. Each inode names the subtree that it counts
//! against. So an existing tree is walked once, through a mount, before its limits hold.

mod tree;

use std::process::ExitCode;

use ashlar_types::{BLOCK_BYTES, Errno, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaLimits};
use ashlar_wire::{QuotaStatus, Reply, Request};
use serde::Serialize;

use crate::arguments::{
    AccountArguments, QuotaArenaArguments, QuotaRemoveArguments, QuotaSetArguments, QuotaShowArguments, QuotaVerb,
};
use crate::error::CliError;
use crate::output::size::Size;
use crate::output::table::{grouped, table};
use crate::system::arena::{ArenaChoice, ArenaLocation};
use crate::system::background::{ask, ensure_daemon};
use crate::system::mounts;
use crate::system::names;
use tree::Subtree;

/// Runs a verb on quotas.
pub fn run(verb: &QuotaVerb) -> Result<ExitCode, CliError> {
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::NotRoot { what: "managing quotas" });
    }
    match verb {
        QuotaVerb::Set(arguments) => set_quota(arguments),
        QuotaVerb::Show(arguments) => show_quotas(arguments),
        QuotaVerb::Remove(arguments) => remove_quota(arguments),
    }
}

/// The account or subtree of a quota, and its arena.
enum Subject {
    Account(QuotaKey, ArenaLocation),
    Tree(Subtree, ArenaLocation),
}

impl Subject {
    fn new(account: &AccountArguments, arena: &QuotaArenaArguments) -> Result<Self, CliError> {
        if let Some(directory) = &account.subtree {
            let tree = Subtree::open(directory)?;
            let place = ArenaLocation::at(tree.arena.clone())?;
            return Ok(Self::Tree(tree, place));
        }
        let key = match (&account.user, &account.group) {
            (Some(user), _) => QuotaKey::User(names::user_id(user)?),
            (None, Some(group)) => QuotaKey::Group(names::group_id(group)?),
            (None, None) => return Err(CliError::NoQuota("an unnamed account".to_owned())),
        };
        Ok(Self::Account(key, arena_location(arena)?))
    }

    fn key(&self) -> QuotaKey {
        match self {
            Self::Account(key, _) => *key,
            Self::Tree(tree, _) => QuotaKey::Subtree(QuotaId::of(InodeId(tree.number))),
        }
    }

    fn place(&self) -> &ArenaLocation {
        match self {
            Self::Account(_, place) | Self::Tree(_, place) => place,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Account(key, _) => names::account_label(*key, None),
            Self::Tree(tree, _) => tree.directory.display().to_string(),
        }
    }
}

/// Returns the arena behind a mount, or the one that is named.
fn arena_location(arena: &QuotaArenaArguments) -> Result<ArenaLocation, CliError> {
    let place = match (&arena.mount, &arena.arena) {
        (Some(mount), _) => {
            let directory = mounts::resolve_mount_point(mount)?;
            let record = mounts::record_of(&directory).ok_or(CliError::NotMounted(directory))?;
            ArenaLocation::at(record.arena)?
        }
        (None, choice) => ArenaLocation::find(choice.as_ref().unwrap_or(&ArenaChoice::Disk))?,
    };
    place.probe()?;
    ensure_daemon(&place)?;
    Ok(place)
}

fn ask_daemon(place: &ArenaLocation, request: &Request) -> Result<Reply, CliError> {
    match ask(place, request)?.ok_or_else(|| CliError::NoDaemon(place.directory().to_owned()))? {
        Reply::Error(Errno::EPERM | Errno::EACCES) => Err(CliError::NotRoot { what: "managing quotas" }),
        Reply::Error(error) => Err(CliError::Refused { what: "manage quotas", error, log: place.daemon_log() }),
        reply => Ok(reply),
    }
}

fn all_quotas(place: &ArenaLocation) -> Result<Vec<QuotaStatus>, CliError> {
    match ask_daemon(place, &Request::Quotas)? {
        Reply::Quotas(quotas) => Ok(quotas),
        _ => Err(CliError::Misunderstood),
    }
}

/// Returns use and limits; both are empty if SharedFS has no account for it.
fn status(place: &ArenaLocation, key: QuotaKey) -> Result<QuotaStatus, CliError> {
    let nothing = QuotaStatus { key, used: QuotaAmount::default(), limits: QuotaLimits::default(), path: None };
    Ok(all_quotas(place)?.into_iter().find(|status| status.key == key).unwrap_or(nothing))
}

fn set_limits(place: &ArenaLocation, key: QuotaKey, limits: QuotaLimits) -> Result<(), CliError> {
    match ask_daemon(place, &Request::SetQuota { key, limits })? {
        Reply::Done => Ok(()),
        _ => Err(CliError::Misunderstood),
    }
}

fn set_quota(arguments: &QuotaSetArguments) -> Result<ExitCode, CliError> {
    let subject = Subject::new(&arguments.account, &arguments.of_arena)?;
    let (place, key) = (subject.place(), subject.key());
    let before = status(place, key)?.limits;
    let blocks = arguments.space.map_or(before.blocks, |space| space.0.map(|size| size.0 / BLOCK_BYTES));
    let inodes = arguments.files.map_or(before.inodes, |files| files.0);
    let limits = QuotaLimits { blocks, inodes };
    if let Subject::Tree(tree, _) = &subject {
        // Limits exist only after a complete walk, and files that were made since count by themselves.
        if before.is_none() {
            tree.join_quota()?;
        }
    }
    set_limits(place, key, limits)?;
    let now = status(place, key)?;
    println!("{}: {}", subject.name(), usage_sentence(&now));
    Ok(ExitCode::SUCCESS)
}

fn bytes(blocks: u64) -> u64 {
    blocks.saturating_mul(BLOCK_BYTES)
}

fn size(blocks: u64) -> String {
    Size(bytes(blocks)).to_string()
}

fn usage_sentence(status: &QuotaStatus) -> String {
    let part = |used: String, limit: Option<String>| match limit {
        Some(limit) => format!("{used} of {limit}"),
        None => format!("{used} (no limit)"),
    };
    let space = part(size(status.used.blocks), status.limits.blocks.map(size));
    let files = part(grouped(status.used.inodes), status.limits.inodes.map(grouped));
    format!("{space} used, {files} files")
}

fn remove_quota(arguments: &QuotaRemoveArguments) -> Result<ExitCode, CliError> {
    let subject = Subject::new(&arguments.account, &arguments.of_arena)?;
    let (place, key) = (subject.place(), subject.key());
    let is_tree = match &subject {
        Subject::Tree(tree, _) => tree.is_in_quota()?,
        Subject::Account(..) => false,
    };
    if status(place, key)?.limits.is_none() && !is_tree {
        return Err(CliError::NoQuota(subject.name()));
    }
    set_limits(place, key, QuotaLimits::default())?;
    if let Subject::Tree(tree, _) = &subject {
        tree.leave_quota()?;
    }
    println!("{}: no limit any more", subject.name());
    Ok(ExitCode::SUCCESS)
}

/// One line of `show --json`.
#[derive(Serialize)]
struct QuotaLine {
    kind: &'static str,
    id: u64,
    name: String,
    space_used_bytes: u64,
    space_limit_bytes: Option<u64>,
    files_used: u64,
    files_limit: Option<u64>,
}

impl QuotaLine {
    fn new(status: &QuotaStatus) -> Self {
        let (kind, id) = match status.key {
            QuotaKey::User(uid) => ("user", u64::from(uid)),
            QuotaKey::Group(gid) => ("group", u64::from(gid)),
            QuotaKey::Subtree(id) => ("subtree", id.0),
        };
        Self {
            kind,
            id,
            name: names::account_name(status.key, status.path.as_deref()),
            space_used_bytes: bytes(status.used.blocks),
            space_limit_bytes: status.limits.blocks.map(bytes),
            files_used: status.used.inodes,
            files_limit: status.limits.inodes,
        }
    }
}

fn show_quotas(arguments: &QuotaShowArguments) -> Result<ExitCode, CliError> {
    let place = arena_location(&arguments.of_arena)?;
    let quotas = all_quotas(&place)?;
    if arguments.json {
        let lines: Vec<_> = quotas.iter().map(QuotaLine::new).collect();
        let text = serde_json::to_string_pretty(&serde_json::json!({ "quotas": lines }));
        println!("{}", text.map_err(CliError::system("writing JSON"))?);
        return Ok(ExitCode::SUCCESS);
    }
    print!("{}", text(&quotas));
    Ok(ExitCode::SUCCESS)
}

fn text(quotas: &[QuotaStatus]) -> String {
    let rows: Vec<_> = quotas.iter().map(row).collect();
    let mut text = table(&["SPACE", "LIMIT", "FULL", "FILES", "LIMIT", "FULL", "ACCOUNT"], &rows);
    if quotas.iter().all(|status| status.limits.is_none()) {
        text += "no account has a limit; 'ashlar quota set --user NAME --space 10G' sets one\n";
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
        names::account_label(status.key, status.path.as_deref()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_of_accounts_is_shown_in_a_table() {
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
        assert!(!shown.contains("no account"));
        let shown = text(&[status(QuotaKey::Group(123_456), None, QuotaLimits::default())]);
        assert!(shown.contains("no account has a limit") && shown.contains("group 123456"), "{shown}");
    }
}
