//! Where answers may differ: each exception has the sentence of the documentation that names it.

use super::ServedBy;

/// Answers that may differ.
struct Exception {
    /// Where, and in which words, the documentation says so.
    #[allow(dead_code)]
    named_in: &'static str,
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
    /// What it returned: a number, or an errno with a minus sign.
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
        named_in: "limits.md, files that are replaced just when a program looks at them",
        places: &[ServedBy::Mount],
        holds: |expected, found| {
            let is_path_alone = expected.whole.contains("descriptor ") && expected.whole.contains("flags 2");
            is_path_alone && expected.whole.contains("links 0 ") && found.whole.ends_with("-ESTALE")
        },
    },
    Exception {
        named_in: "limits.md, file flags",
        places: &[ServedBy::Mount, ServedBy::Run],
        holds: |expected, found| {
            expected.call == "ioctl" && expected.whole.contains("FS_IOC_") && found.result == "-ENOTTY"
        },
    },
    Exception {
        named_in: "capi.md, null pointers",
        places: &[ServedBy::Library],
        holds: |expected, found| expected.is_error() && found.result == "-EFAULT" && expected.whole.contains("NULL"),
    },
];

/// Whether two lines are the same, or differ in a way that the documentation names.
pub fn are_alike(place: ServedBy, expected: &str, found: &str) -> bool {
    if expected == found {
        return true;
    }
    let (expected, found) = (Line::parse(expected), Line::parse(found));
    EXCEPTIONS.iter().any(|exception| exception.places.contains(&place) && (exception.holds)(&expected, &found))
}
