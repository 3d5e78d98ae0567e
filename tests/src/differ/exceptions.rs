//! Where answers may differ: each exception has the sentence of the documentation that names it.

use super::ServedBy;

/// Answers that may differ.
struct Exception {
    /// Where the documentation says so: a file, and words of it.
    #[cfg_attr(not(test), expect(dead_code, reason = "read by the test that looks it up"))]
    named_in: (&'static str, &'static str),
    /// The places that differ.
    places: &'static [ServedBy],
    /// Whether a line of the reference and one of the place differ in this way.
    holds: fn(&Line<'_>, &Line<'_>) -> bool,
}

/// A printed line.
struct Line<'a> {
    whole: &'a str,
    /// The call's name; empty where the line tells of the tree.
    call: &'a str,
    /// The call's result: a number, or an errno with a minus sign.
    result: &'a str,
}

impl<'a> Line<'a> {
    fn parse(whole: &'a str) -> Self {
        if !whole.starts_with(|first: char| first.is_ascii_digit()) {
            return Self { whole, call: "", result: "" };
        }
        let call = whole.split(' ').nth(1).unwrap_or_default().split('(').next().unwrap_or_default();
        let result = whole.rsplit_once(" = ").map_or("", |(_, result)| result.split(' ').next().unwrap_or_default());
        Self { whole, call, result }
    }

    fn is_error(&self) -> bool {
        self.result.starts_with('-')
    }
}

const EXCEPTIONS: &[Exception] = &[
    Exception {
        named_in: ("limits.md", "files that are replaced during a look"),
        places: &[ServedBy::Mount],
        holds: |expected, found| {
            let is_path_alone = expected.whole.contains("descriptor ") && expected.whole.contains("flags 2");
            is_path_alone && expected.whole.contains("links 0 ") && found.whole.ends_with("-ESTALE")
        },
    },
    Exception {
        named_in: ("limits.md", "bad pointers"),
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            let is_bad = ["NULL", "EDGE", "READ_ONLY", "KERNEL", "TWISTED", "FORBIDDEN", "1, "];
            let is_bad = is_bad.iter().any(|pointer| expected.whole.contains(pointer));
            expected.call.contains("read") && expected.result == "0" && found.result == "-EFAULT" && is_bad
        },
    },
    Exception {
        named_in: ("limits.md", "`F_OFD_GETLK`"),
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            let own_pid = expected.whole.strip_suffix("pid own");
            expected.whole.contains("F_OFD_GETLK") && own_pid.is_some() && own_pid == found.whole.strip_suffix("pid -1")
        },
    },
    Exception {
        named_in: ("limits.md", "file flags"),
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            expected.call == "ioctl" && expected.whole.contains("FS_IOC_") && found.result == "-ENOTTY"
        },
    },
    Exception {
        named_in: ("capi.md", "null pointer"),
        places: &[ServedBy::Library],
        holds: |expected, found| {
            let reads =
                expected.result == "0" && (expected.call.contains("read") || expected.call.contains("listxattr"));
            (expected.is_error() || reads) && found.result == "-EFAULT" && expected.whole.contains("NULL")
        },
    },
    Exception {
        named_in: ("capi.md", "A path's error comes before"),
        places: &[ServedBy::Library],
        holds: |expected, found| {
            let is_empty = found.result == "-ENOENT" && expected.whole.contains("\"\"");
            let is_long = expected.whole.contains("bytes, ") || expected.whole.contains("L*25");
            expected.is_error() && (is_empty || found.result == "-ENAMETOOLONG" && is_long)
        },
    },
    Exception {
        named_in: ("capi.md", "of several errors"),
        places: &[ServedBy::Library],
        holds: |expected, found| OTHER_ERROR_OF_LIBRARY.contains(&(expected.call, expected.result, found.result)),
    },
    Exception {
        named_in: ("interception.md", "names another of several errors"),
        places: &[ServedBy::Run],
        holds: |expected, found| OTHER_ERROR_OF_RUN.contains(&(expected.call, expected.result, found.result)),
    },
    Exception {
        named_in: ("interception.md", "does not show `O_NOFOLLOW`"),
        places: &[ServedBy::Run],
        holds: |expected, found| {
            let is_of_flags = expected.whole.contains("descriptor ") || expected.whole.contains("F_GETFL");
            is_of_flags && without_lost_flags(expected.whole) == found.whole
        },
    },
];

/// A line as it is without `O_NOFOLLOW`, `O_DIRECTORY` and `O_TMPFILE` among the flags of a descriptor.
fn without_lost_flags(line: &str) -> String {
    const LOST: u64 = 0x43_0000;
    let words = line.split(' ').enumerate().map(|(place, word)| {
        let number = if line.contains("descriptor ") { u64::from_str_radix(word, 16) } else { word.parse() };
        let is_flags = line.contains("F_GETFL") || line.split(' ').nth(place.wrapping_sub(1)) == Some("flags");
        match number {
            Ok(flags) if is_flags && flags & LOST != 0 && line.contains("descriptor ") => {
                format!("{:x}", flags & !LOST)
            }
            Ok(flags) if is_flags && flags & LOST != 0 => (flags & !LOST).to_string(),
            _ => word.to_owned(),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Calls under `ashlar run` with several reasons to fail, of which LibFS names another one than the kernel.
const OTHER_ERROR_OF_RUN: &[(&str, &str, &str)] = &[
    ("unlink", "-EISDIR", "-EACCES"),
    ("unlink", "-ENOENT", "-EACCES"),
    ("open", "-EINVAL", "-ENAMETOOLONG"),
    ("openat", "-EINVAL", "-ENAMETOOLONG"),
    ("mmap", "-EINVAL", "-EBADF"),
    ("linkat", "-ENOTDIR", "-ENOENT"),
    ("rename", "-EPERM", "-ENOTDIR"),
    ("renameat", "-EPERM", "-ENOTDIR"),
    ("renameat2", "-EPERM", "-ENOTDIR"),
    ("rmdir", "-EPERM", "-ENOTDIR"),
    ("unlinkat", "-EPERM", "-ENOTDIR"),
    ("renameat2", "-EPERM", "-EISDIR"),
    ("renameat2", "-ENOENT", "-EACCES"),
    ("rmdir", "-ENOENT", "-EACCES"),
    ("unlinkat", "-ENOENT", "-EACCES"),
    ("utimensat", "-EPERM", "-EACCES"),
];

/// Calls of `libashlar` with several reasons to fail, of which it names another one than the kernel.
const OTHER_ERROR_OF_LIBRARY: &[(&str, &str, &str)] = &[
    ("unlink", "-EISDIR", "-EACCES"),
    ("unlink", "-ENOENT", "-EACCES"),
    ("ftruncate", "-EINVAL", "-EBADF"),
    ("preadv", "0", "-EISDIR"),
    ("readv", "0", "-EISDIR"),
    ("utimens", "-EPERM", "-EACCES"),
    ("lutimens", "-EPERM", "-EACCES"),
    ("futimens", "-EPERM", "-EACCES"),
    ("rmdir", "-EPERM", "-ENOTDIR"),
    ("rmdir", "-ENOENT", "-EACCES"),
    ("rename2", "-EPERM", "-ENOTDIR"),
    ("rename2", "-EPERM", "-EISDIR"),
    ("rename2", "-ENOENT", "-EACCES"),
    ("copy_file_range", "-EOVERFLOW", "-EINVAL"),
];

/// Whether two lines differ so that what comes after them in the sequence says nothing: a mapping that ends with
/// `SIGBUS` was not written to. Named in interception.md.
pub fn ends_comparison(place: ServedBy, expected: &str, found: &str) -> bool {
    place == ServedBy::Run && expected.contains(" mmap(") && !expected.contains("SIGBUS") && found.contains(" SIGBUS")
}

/// Whether two lines are the same, or differ in a way that the documentation names.
pub fn are_alike(place: ServedBy, expected: &str, found: &str) -> bool {
    if expected == found {
        return true;
    }
    let (expected, found) = (Line::parse(expected), Line::parse(found));
    EXCEPTIONS.iter().any(|exception| exception.places.contains(&place) && (exception.holds)(&expected, &found))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An exception whose words are gone from the documentation is no exception any more.
    #[test]
    fn exception_is_named_by_the_documentation() {
        for Exception { named_in: (file, words), .. } in EXCEPTIONS {
            let path = format!("{}/../docs/{file}", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(&path).expect("a document");
            assert!(text.contains(words), "{file} does not say '{words}'");
        }
    }

    #[test]
    fn difference_of_another_kind_is_no_exception() {
        let line = |result: &str| format!("7.3 ioctl(5, FS_IOC_GETFLAGS, &) = {result}");
        assert!(are_alike(ServedBy::Mount, &line("0"), &line("-ENOTTY")));
        assert!(!are_alike(ServedBy::Library, &line("0"), &line("-ENOTTY")));
        assert!(!are_alike(ServedBy::Mount, &line("0"), &line("-EINVAL")));
    }
}
