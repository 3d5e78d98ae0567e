//! The environment of a program under `ashlar run`, computed without system calls.
//!
//! The command that starts programs by the thousand has no libc for these calls.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ashlar_wire::encode_mounts;

/// The variable that names the libraries which the dynamic linker loads first.
pub const PRELOAD_VARIABLE: &str = "LD_PRELOAD";
/// The directory, for root's programs, in which the library keeps its findings about a libc, and its patched code.
/// Programs may be run from there.
const PLANS_OF_ROOT: &str = "/var/cache/ashlar/plans";

/// Returns the place of the program in `run PROGRAM…` or `run -- PROGRAM…`, counted from the verb. Returns `None` for
/// all other command lines, those with options too.
pub fn plain_program<'a>(typed: impl IntoIterator<Item = &'a [u8]>) -> Option<usize> {
    let mut typed = typed.into_iter();
    let is_run = typed.next()? == b"run";
    let first = typed.next()?;
    let (at, program) = if first == b"--" { (2, typed.next()?) } else { (1, first) };
    (is_run && !program.starts_with(b"-")).then_some(at)
}

/// Returns the directories in which files of an installation may be. After a build all are beside the program. After an
/// installation `ashlar` is in `bin`, and all others are in `lib/ashlar`.
#[must_use]
pub fn install_directories(program: &Path) -> [PathBuf; 3] {
    let above = |levels| program.ancestors().nth(levels).unwrap_or(Path::new("/"));
    [above(1).to_owned(), above(2).join("lib/ashlar"), above(3).join("bin")]
}

/// Returns the message for an incomplete installation.
#[must_use]
pub fn missing_message(kind: &str, file: &Path) -> String {
    let file = file.display();
    format!("there is no {kind} {file}; build it with 'make build', or install all of it with 'make install'")
}

/// Encodes mounts with the sockets of their daemons, as the library reads them.
#[must_use]
pub fn encode_mount_list(mounts: &[(PathBuf, PathBuf)]) -> OsString {
    let bytes = mounts.iter().map(|(point, socket)| (point.as_os_str().as_bytes(), socket.as_os_str().as_bytes()));
    OsString::from_vec(encode_mounts(bytes))
}

/// Returns the value of `LD_PRELOAD`: the library, before those that the caller has set already.
#[must_use]
pub fn preload_value(library: &Path, others: Option<&OsStr>) -> OsString {
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    preload
}

/// Returns the caller's value of `LD_PRELOAD`, without the library; `None` if nothing is left.
#[must_use]
pub fn preload_without(library: &Path, others: Option<&OsStr>) -> Option<OsString> {
    let is_other = |name: &&[u8]| !name.is_empty() && *name != library.as_os_str().as_bytes();
    let names: Vec<_> = others?.as_bytes().split(|byte| b": ".contains(byte)).filter(is_other).collect();
    (!names.is_empty()).then(|| OsString::from_vec(names.join(&b':')))
}

/// Returns the directory for plans, which no other user writes: root's, or one below the user's `XDG_CACHE_HOME` or
/// else `HOME`.
#[must_use]
pub fn plans_directory(is_root: bool, cache: Option<&OsStr>, home: Option<&OsStr>) -> Option<PathBuf> {
    if is_root {
        return Some(PLANS_OF_ROOT.into());
    }
    let cache = cache.map(PathBuf::from).filter(|path| path.is_absolute());
    Some(cache.or_else(|| Some(Path::new(home?).join(".cache")))?.join("ashlar"))
}

/// Returns the name of a variable. A string without a name is no variable; a name may begin with `=`.
fn name_of(variable: &CStr) -> Option<&[u8]> {
    let variable = variable.to_bytes();
    let end = variable.iter().skip(1).position(|&byte| byte == b'=')? + 1;
    variable.get(..end)
}

/// Returns the value of a variable, if it has this name.
fn value_of<'a>(variable: &'a CStr, name: &str) -> Option<&'a OsStr> {
    let value = variable.to_bytes().strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
    Some(OsStr::from_bytes(value))
}

/// Returns the value of the first variable of a name, which is the one that counts.
pub fn variable_value<'a>(variables: impl IntoIterator<Item = &'a CStr>, name: &str) -> Option<&'a OsStr> {
    variables.into_iter().find_map(|variable| value_of(variable, name))
}

/// Returns an environment with some variables set in it, as the standard library gives it to a program: sorted by name,
/// and of variables with one name the last.
#[must_use]
pub fn with_variables<'a>(inherited: impl IntoIterator<Item = &'a CStr>, set: &[&'a CStr]) -> Vec<&'a CStr> {
    let all = inherited.into_iter().chain(set.iter().copied());
    let mut named: Vec<_> = all.filter_map(|variable| Some((name_of(variable)?, variable))).collect();
    named.sort_by_key(|&(name, _)| name);
    named.dedup_by(|later, kept| {
        let is_again = later.0 == kept.0;
        if is_again {
            *kept = *later;
        }
        is_again
    });
    named.into_iter().map(|(_, variable)| variable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_run_without_options_is_plain() {
        let program = |words: &[&'static str]| plain_program(words.iter().map(|word| word.as_bytes()));
        assert_eq!(program(&["run", "ls", "-l"]), Some(1));
        assert_eq!(program(&["run", "--", "ls", "--", "-l"]), Some(2));
        assert_eq!(program(&["run", ""]), Some(1));
        for words in [
            &[][..],
            &["run"],
            &["run", "--"],
            &["run", "--report", "ls"],
            &["run", "--", "-x"],
            &["run", "--", "--", "ls"],
            &["mount", "/mnt"],
        ] {
            assert_eq!(program(words), None, "{words:?}");
        }
    }

    #[test]
    fn files_are_beside_the_program_or_where_installed() {
        let expected = ["/usr/local/bin", "/usr/local/lib/ashlar", "/usr/bin"].map(PathBuf::from);
        assert_eq!(install_directories(Path::new("/usr/local/bin/ashlar")), expected);
        assert_eq!(install_directories(Path::new("/ashlar")), ["/", "/lib/ashlar", "/bin"].map(PathBuf::from));
    }

    #[test]
    fn plans_are_where_no_other_user_writes() {
        let directory = |cache: Option<&str>, home: Option<&str>| {
            plans_directory(false, cache.map(OsStr::new), home.map(OsStr::new)).map(|path| path.display().to_string())
        };
        assert_eq!(directory(Some("/c"), Some("/h")).as_deref(), Some("/c/ashlar"));
        assert_eq!(
            directory(Some("c"), Some("/h")).as_deref(),
            Some("/h/.cache/ashlar"),
            "a relative one does not count"
        );
        assert_eq!(directory(None, None), None);
        assert_eq!(plans_directory(true, Some(OsStr::new("/c")), None), Some(PLANS_OF_ROOT.into()));
    }

    #[test]
    fn others_are_loaded_after_the_library() {
        let library = Path::new("/lib/ours.so");
        for (others, expected) in
            [(None, "/lib/ours.so"), (Some(""), "/lib/ours.so"), (Some("a b"), "/lib/ours.so:a b")]
        {
            assert_eq!(preload_value(library, others.map(OsStr::new)), expected);
        }
    }

    #[test]
    fn preload_without_the_library_keeps_others() {
        let library = Path::new("/lib/ours.so");
        let without = |others: &str| preload_without(library, Some(OsStr::new(others)));
        assert_eq!(without("/lib/ours.so:a /lib/ours.so b").as_deref(), Some(OsStr::new("a:b")));
        assert_eq!(without("/lib/ours.so:"), None);
        assert_eq!(preload_without(library, None), None);
    }

    #[test]
    fn environment_has_each_variable_once() {
        let inherited = [c"B=1", c"nothing", c"=", c"=C:=x", c"A=1", c"B=2", c"", c"=y", c"PATH=/a", c"A==", c"C="];
        let expected = [c"=C:=x", c"A==", c"B=3", c"C=", c"D=4", c"PATH=/a"];
        assert_eq!(with_variables(inherited, &[c"D=4", c"B=3"]), expected);
    }

    #[test]
    fn first_variable_of_a_name_counts() {
        let variables = [c"PATHS=/x", c"PATH", c"PATH=/a", c"PATH=/b"];
        assert_eq!(variable_value(variables, "PATH"), Some(OsStr::new("/a")));
        assert_eq!(variable_value(variables, "HOME"), None);
    }
}
