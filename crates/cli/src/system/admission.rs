//! The users for whose programs a mount has sessions, as people name them.

use std::str::FromStr;

use ashlar_types::QuotaKey;
use ashlar_wire::{ADMITTED_MAX, Admission, MountTerms};

use crate::error::CliError;
use crate::system::names;

/// The variable in which sudo passes on the user that called it.
const SUDO_USER_VARIABLE: &str = "SUDO_UID";

/// The users that a command line names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmissionChoice(Vec<AdmittedName>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum AdmittedName {
    Root,
    All,
    User(String),
    Group(String),
}

impl FromStr for AdmissionChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let name = |word: &str| match word.split_once('=') {
            None if word == "root" => Ok(AdmittedName::Root),
            None if word == "all" => Ok(AdmittedName::All),
            Some(("user", user)) if !user.is_empty() => Ok(AdmittedName::User(user.to_owned())),
            Some(("group", group)) if !group.is_empty() => Ok(AdmittedName::Group(group.to_owned())),
            _ => Err("name root, all, user=NAME or group=NAME, or several with commas between".to_owned()),
        };
        let names = text.split(',').map(name).collect::<Result<Vec<_>, _>>()?;
        if names.len() > ADMITTED_MAX {
            return Err(format!("at most {ADMITTED_MAX} users and groups can be named"));
        }
        Ok(Self(names))
    }
}

/// Returns the named users; without names, root and the user behind sudo.
///
/// # Errors
/// [`CliError::NoSuchUser`], [`CliError::NoSuchGroup`].
pub fn resolve_admission(choice: Option<&AdmissionChoice>) -> Result<Admission, CliError> {
    let Some(AdmissionChoice(names)) = choice else {
        return Ok(default_admission(std::env::var(SUDO_USER_VARIABLE).ok().as_deref()));
    };
    let mut admission = Admission::default();
    for name in names {
        match name {
            AdmittedName::Root => {}
            AdmittedName::All => admission.all = true,
            AdmittedName::User(user) => admission.users.push(names::user_id(user)?),
            AdmittedName::Group(group) => admission.groups.push(names::group_id(group)?),
        }
    }
    Ok(admission)
}

fn default_admission(sudo_user: Option<&str>) -> Admission {
    let user = sudo_user.and_then(|user| user.parse().ok()).filter(|&user: &u32| user != 0);
    Admission { users: user.into_iter().collect(), ..Admission::default() }
}

/// Describes the sessions by a mount.
pub fn describe_terms(terms: &MountTerms) -> String {
    if terms.read_only {
        return "none, as it is read-only; the kernel serves all programs".into();
    }
    let Admission { all, users, groups } = &terms.sessions;
    if *all {
        return "for all users; each of them can read all data in the arena, whatever the modes of files say".into();
    }
    let users = users.iter().map(|user| names::account_label(QuotaKey::User(*user), None));
    let groups = groups.iter().map(|group| names::account_label(QuotaKey::Group(*group), None));
    let named: Vec<_> = ["root".to_owned()].into_iter().chain(users).chain(groups).collect();
    let named = match named.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => named.concat(),
    };
    format!("for {named}; the kernel serves all others")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(text: &str) -> Admission {
        let choice: AdmissionChoice = text.parse().expect("a choice");
        resolve_admission(Some(&choice)).expect("known users")
    }

    #[test]
    fn users_and_groups_have_names_or_numbers() {
        assert_eq!(resolve("root"), Admission::default());
        assert_eq!(resolve("all"), Admission::of_all());
        assert_eq!(resolve("user=4000000000,group=root,root").to_string(), "root,user=4000000000,group=0");
        let unknown: AdmissionChoice = "user=no such user".parse().expect("a choice");
        assert!(matches!(resolve_admission(Some(&unknown)), Err(CliError::NoSuchUser(_))));
        for wrong in ["", "ann", "user=", "root all", "group"] {
            assert!(wrong.parse::<AdmissionChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn user_behind_sudo_is_admitted_by_default() {
        assert_eq!(default_admission(None), Admission::default());
        assert_eq!(default_admission(Some("1000")).users, [1000]);
        assert_eq!([Some("0"), Some("ann")].map(default_admission), [Admission::default(), Admission::default()]);
    }

    #[test]
    fn terms_name_users_with_sessions() {
        let terms = |read_only, text: &str| describe_terms(&MountTerms { read_only, sessions: resolve(text) });
        assert_eq!(terms(false, "root"), "for root; the kernel serves all others");
        assert_eq!(
            terms(false, "user=4000000001,group=4000000002"),
            "for root, user 4000000001 and group 4000000002; the kernel serves all others"
        );
        assert!(terms(false, "all").contains("each of them can read all data in the arena"));
        assert!(terms(true, "all").starts_with("none"));
    }
}
