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
        named_in: ("limits.md", "an `O_PATH` descriptor holds nothing"),
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            let is_path_alone = !expected.call.is_empty() || expected.whole.contains(" flags 2");
            is_path_alone && expected.whole.contains("links 0 ") && found.whole.ends_with("-ESTALE")
        },
    },
    Exception {
        named_in: ("limits.md", "nor does an open FIFO"),
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            // A FIFO's kind, as the mode shows it.
            let is_of_fifo = expected.whole.split(' ').any(|word| word.len() == 5 && word.starts_with("10"));
            is_of_fifo && expected.whole.contains("links 0 ") && found.whole.ends_with("-ESTALE")
        },
    },
    Exception {
        named_in: ("limits.md", "a read that finds no bytes"),
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            expected.call.contains("read")
                && expected.result == "0"
                && found.result == "-EFAULT"
                && has_bad_memory(expected.whole)
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
        named_in: ("limits.md", "`F_GETLK` names the process also of a lock"),
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            let of_open_file = expected.whole.strip_suffix("pid -1");
            expected.whole.contains(" F_GETLK")
                && of_open_file.is_some()
                && of_open_file == found.whole.strip_suffix("pid own")
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
        named_in: ("capi.md", "a path's error comes before that of flags"),
        places: &[ServedBy::Library],
        holds: |expected, found| {
            let is_empty = found.result == "-ENOENT" && expected.whole.contains("\"\"");
            let is_long = expected.whole.contains("bytes, ") || expected.whole.contains("L*25");
            expected.is_error() && (is_empty || found.result == "-ENAMETOOLONG" && is_long)
        },
    },
    Exception {
        named_in: ("interception.md", "An `O_PATH` descriptor below a directory that its user may no longer search"),
        places: &[ServedBy::Run],
        holds: |expected, found| expected.call == "openat2" && found.result == "-EACCES",
    },
    Exception {
        named_in: ("interception.md", "does not show `O_TMPFILE`"),
        places: &[ServedBy::Run],
        holds: |expected, found| {
            let is_of_flags = expected.whole.contains("descriptor ") || expected.whole.contains("F_GETFL");
            is_of_flags && without_tmpfile(expected.whole) == found.whole
        },
    },
    Exception {
        named_in: ("interception.md", "that its opening has made it"),
        places: &[ServedBy::Run],
        holds: |expected, found| {
            expected.whole.contains("F_CREATED_QUERY") && (expected.result, found.result) == ("1", "0")
        },
    },
    Exception {
        named_in: ("interception.md", "can't give a file another name by its descriptor alone"),
        places: &[ServedBy::Run],
        holds: |expected, found| {
            let is_by_descriptor = expected.call == "linkat" && expected.whole.contains("AT_EMPTY_PATH");
            is_by_descriptor && found.result == "-ENOENT"
        },
    },
];

/// Whether a call names memory that may not be touched, or more than the buffer has.
fn has_bad_memory(line: &str) -> bool {
    const BUFFER_BYTES: u64 = 256 << 10;
    let is_bad = ["NULL", "EDGE", "READ_ONLY", "KERNEL", "TWISTED", "FORBIDDEN", "{1, ", "; 1, ", ", 1, "];
    // A buffer stands with its length: as one word it is no pointer.
    let buffers = line.replace("buffer, ", "buffer:");
    let lengths = buffers.split("buffer:").skip(1);
    let mut lengths = lengths.filter_map(|rest| rest.split([',', ';', ')', '}']).next()?.parse::<u64>().ok());
    is_bad.iter().any(|pointer| buffers.contains(pointer)) || lengths.any(|length| length > BUFFER_BYTES)
}

/// A line as it is without `O_TMPFILE` among the flags of a descriptor.
fn without_tmpfile(line: &str) -> String {
    const TMPFILE: u64 = 0x41_0000;
    let words = line.split(' ').enumerate().map(|(place, word)| {
        let number = if line.contains("descriptor ") { u64::from_str_radix(word, 16) } else { word.parse() };
        let is_flags = line.contains("F_GETFL") || line.split(' ').nth(place.wrapping_sub(1)) == Some("flags");
        match number {
            Ok(flags) if is_flags && flags & TMPFILE == TMPFILE && line.contains("descriptor ") => {
                format!("{:x}", flags & !TMPFILE)
            }
            Ok(flags) if is_flags && flags & TMPFILE == TMPFILE => (flags & !TMPFILE).to_string(),
            _ => word.to_owned(),
        }
    });
    words.collect::<Vec<_>>().join(" ")
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
