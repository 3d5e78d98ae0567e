//! The users for whose programs there are sessions.
//!
//! A session's process can read all data segments, so sessions are for chosen users. The kernel serves all others,
//! through the mount.

use std::fmt;
use std::str::FromStr;

use ashlar_types::Credentials;
use serde::{Deserialize, Serialize};

/// The most users and groups of an admission, together.
pub const ADMITTED_MAX: usize = 64;

/// The users for whose programs there are sessions. Root is always one of them.
///
/// Its text is `root`, `all`, or a list such as `user=1000,group=50`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Admission {
    /// All users.
    pub all: bool,
    /// These users.
    pub users: Vec<u32>,
    /// The members of these groups.
    pub groups: Vec<u32>,
}

impl Admission {
    /// The admission of all users.
    #[must_use]
    pub fn of_all() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// Whether a user may have sessions.
    #[must_use]
    pub fn admits(&self, user: &Credentials) -> bool {
        let is_member = |group: &u32| user.is_member(*group);
        self.all || user.uid == 0 || self.users.contains(&user.uid) || self.groups.iter().any(is_member)
    }
}

impl FromStr for Admission {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut admission = Self::default();
        for word in text.split(',') {
            let number = |text: &str| text.parse().map_err(|_| format!("{text} is no number"));
            match word.split_once('=') {
                None if word == "root" => {}
                None if word == "all" => admission.all = true,
                Some(("user", user)) => admission.users.push(number(user)?),
                Some(("group", group)) => admission.groups.push(number(group)?),
                _ => return Err(format!("{word} is none of root, user=N, group=N and all")),
            }
        }
        if admission.users.len() + admission.groups.len() > ADMITTED_MAX {
            return Err(format!("at most {ADMITTED_MAX} users and groups can be named"));
        }
        Ok(admission)
    }
}

impl fmt::Display for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.all { "all" } else { "root" })?;
        self.users.iter().try_for_each(|user| write!(f, ",user={user}"))?;
        self.groups.iter().try_for_each(|group| write!(f, ",group={group}"))
    }
}

/// The terms of a mount, as SharedFS knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountTerms {
    /// Nothing can be changed through it, so no program has a session by it.
    pub read_only: bool,
    /// The users whose programs may have sessions by it.
    pub sessions: Admission,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_users_and_groups_are_admitted() {
        let admission: Admission = "user=1000,group=50".parse().expect("an admission");
        let user = |uid, gid, groups: &[u32]| Credentials { groups: groups.to_vec(), ..Credentials::checked(uid, gid) };
        let admitted = [user(0, 0, &[]), user(1000, 1000, &[]), user(7, 50, &[]), user(7, 7, &[8, 50])];
        assert!(admitted.iter().all(|user| admission.admits(user)));
        assert!(!admission.admits(&user(50, 1000, &[1000])));
        assert!(!Admission::default().admits(&user(1000, 0, &[0])), "root's group is not root");
        assert!(Admission::of_all().admits(&user(7, 7, &[])));
    }

    #[test]
    fn admission_written_reads_equal() {
        for text in ["root", "all", "root,user=1,user=2,group=3"] {
            assert_eq!(text.parse::<Admission>().expect("an admission").to_string(), text);
        }
        let many = vec!["user=1"; ADMITTED_MAX + 1].join(",");
        for wrong in ["", "none", "user=ann", "user=", "user=-1", "root;all", &many] {
            assert!(wrong.parse::<Admission>().is_err(), "{wrong}");
        }
    }
}
