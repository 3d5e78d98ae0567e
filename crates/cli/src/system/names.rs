//! Converts names of users and groups to numbers and back.

use std::process::Command;

use ashlar_types::QuotaKey;

use crate::error::CliError;

/// Returns the number of a user, by name or number.
pub fn user_id(text: &str) -> Result<u32, CliError> {
    find_id("passwd", text).ok_or_else(|| CliError::NoSuchUser(text.to_owned()))
}

/// Returns the number of a group, by name or number.
pub fn group_id(text: &str) -> Result<u32, CliError> {
    find_id("group", text).ok_or_else(|| CliError::NoSuchGroup(text.to_owned()))
}

fn find_id(database: &str, text: &str) -> Option<u32> {
    // A number need not have a name.
    text.parse().ok().or_else(|| field(&entry(database, text)?, 2)?.parse().ok())
}

/// Returns the entry of a user or a group, from whatever database the system uses.
fn entry(database: &str, key: &str) -> Option<String> {
    if let Ok(found) = Command::new("getent").args([database, key]).output() {
        return String::from_utf8(found.stdout).ok().filter(|line| !line.is_empty());
    }
    // A system without the command has all of them in the file.
    let file = std::fs::read_to_string(format!("/etc/{database}")).ok()?;
    file.lines().find(|line| field(line, 0) == Some(key) || field(line, 2) == Some(key)).map(str::to_owned)
}

fn field(line: &str, index: usize) -> Option<&str> {
    line.trim_end().split(':').nth(index)
}

/// Returns the name, without its kind; the number for a subtree whose directory is gone.
pub fn account_name(key: QuotaKey, path: Option<&[u8]>) -> String {
    let named = |database: &str, number: u32| {
        let number = number.to_string();
        entry(database, &number).and_then(|line| field(&line, 0).map(str::to_owned)).unwrap_or(number)
    };
    match (key, path) {
        (QuotaKey::User(uid), _) => named("passwd", uid),
        (QuotaKey::Group(gid), _) => named("group", gid),
        (QuotaKey::Subtree(_), Some(path)) => String::from_utf8_lossy(path).into_owned(),
        (QuotaKey::Subtree(id), None) => format!("#{id}"),
    }
}

/// Returns the name, with its kind.
pub fn account_label(key: QuotaKey, path: Option<&[u8]>) -> String {
    let kind = match key {
        QuotaKey::User(_) => "user",
        QuotaKey::Group(_) => "group",
        QuotaKey::Subtree(_) => "subtree",
    };
    format!("{kind} {}", account_name(key, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_both_accepted() {
        assert_eq!(user_id("root").ok(), Some(0));
        assert_eq!(group_id("root").ok(), Some(0));
        assert_eq!(user_id("12345").ok(), Some(12345));
        assert!(matches!(user_id("no such user"), Err(CliError::NoSuchUser(_))));
        assert!(matches!(group_id("-1"), Err(CliError::NoSuchGroup(_))));
        assert_eq!(account_label(QuotaKey::User(0), None), "user root");
        assert_eq!(account_label(QuotaKey::Group(4_000_000_000), None), "group 4000000000");
    }
}
