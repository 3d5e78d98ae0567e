//! The breakdown of one operation's time into parts.

use std::collections::BTreeMap;

use serde::Serialize;

use super::case::Contender;

/// The operations that are broken down.
pub const APPEND: &str = "append 4 KB";
pub const STAT: &str = "stat";
pub const CREATE: &str = "create, write 4 KB, close, rename";

/// The measured parts of an operation, each by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The operation itself.
    Whole,
    /// A call on a descriptor of the same file that does nothing (`lseek` by nothing): under `ashlar run`, the
    /// interception; else, the way into the kernel and back.
    Empty,
    /// The bytes, copied into memory of the log's size.
    Copy,
    /// The same, and persisted.
    CopyAndFlush,
    /// The bytes, checksummed.
    Checksum,
    /// The attributes of an open file (`fstat`).
    OpenFile,
    /// The calls that make a file.
    Create,
    Write,
    Close,
    Rename,
}

impl Part {
    /// Its name, between worker and report.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Empty => "an empty call",
            Self::Copy => "copy",
            Self::CopyAndFlush => "copy and flush",
            Self::Checksum => "checksum",
            Self::OpenFile => "of an open file",
            Self::Create => "open to create",
            Self::Write => "write 4 KB",
            Self::Close => "close",
            Self::Rename => "rename",
        }
    }
}

/// A line: a part of an operation, and its time for each contender, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    /// The operation.
    pub operation: &'static str,
    /// The part, in words.
    pub part: &'static str,
    /// Whether it was found by subtraction.
    pub is_difference: bool,
    /// Its time.
    pub ns: BTreeMap<Contender, f64>,
}

/// Returns the lines of all operations. `found` returns the time of a part on a contender, if it was measured there.
pub fn shares(found: &dyn Fn(&'static str, Part, Contender) -> Option<f64>) -> Vec<Share> {
    let mut lines = Vec::new();
    let mut line = |operation, part, is_difference, value: &dyn Fn(Contender) -> Option<f64>| {
        // The difference can be negative for parts that cost next to nothing.
        let ns = Contender::ALL.into_iter().filter_map(|contender| Some((contender, value(contender)?.max(0.0))));
        lines.push(Share { operation, part, is_difference, ns: ns.collect() });
    };
    let append = |part, contender| found(APPEND, part, contender);
    let flush = |contender| Some(append(Part::CopyAndFlush, contender)? - append(Part::Copy, contender)?);
    line(APPEND, "all of it", false, &|contender| append(Part::Whole, contender));
    line(APPEND, "an empty call", false, &|contender| append(Part::Empty, contender));
    line(APPEND, "copy", false, &|contender| append(Part::Copy, contender));
    line(APPEND, "checksum", false, &|contender| append(Part::Checksum, contender));
    line(APPEND, "flush", true, &flush);
    line(APPEND, "the rest", true, &|contender| {
        let parts = [append(Part::Copy, contender), append(Part::Checksum, contender), flush(contender)];
        let known: f64 = parts.into_iter().flatten().map(|part| part.max(0.0)).sum();
        Some(append(Part::Whole, contender)? - append(Part::Empty, contender)? - known)
    });
    let stat = |part, contender| found(STAT, part, contender);
    line(STAT, "all of it", false, &|contender| stat(Part::Whole, contender));
    line(STAT, "an empty call", false, &|contender| stat(Part::Empty, contender));
    line(STAT, "attributes (fstat less an empty call)", true, &|contender| {
        Some(stat(Part::OpenFile, contender)? - stat(Part::Empty, contender)?)
    });
    line(STAT, "the path (stat less fstat)", true, &|contender| {
        Some(stat(Part::Whole, contender)? - stat(Part::OpenFile, contender)?)
    });
    for part in [Part::Create, Part::Write, Part::Close, Part::Rename] {
        line(CREATE, part.name(), false, &|contender| found(CREATE, part, contender));
    }
    lines.retain(|line| !line.ns.is_empty());
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_an_operation_add_up_to_it() {
        let found = |operation, part, contender| match (operation, contender, part) {
            (APPEND, Contender::Run, Part::Whole) => Some(1000.0),
            (APPEND, Contender::Run, Part::Empty) => Some(100.0),
            (APPEND, Contender::Run, Part::Copy) => Some(300.0),
            (APPEND, Contender::Run, Part::CopyAndFlush) => Some(350.0),
            (APPEND, Contender::Run, Part::Checksum) => Some(200.0),
            (APPEND, Contender::Fuse, Part::Whole) => Some(9000.0),
            (APPEND, Contender::Fuse, Part::Empty) => Some(90.0),
            _ => None,
        };
        let shares = shares(&found);
        let of = |contender| {
            let values = shares.iter().map(|share| (share.part, share.ns.get(&contender).copied()));
            values.filter_map(|(part, ns)| ns.map(|ns| (part, ns))).collect::<Vec<_>>()
        };
        let run = of(Contender::Run);
        assert_eq!(run.iter().skip(1).map(|(_, ns)| ns).sum::<f64>(), run[0].1, "{run:?}");
        assert!(run.contains(&("flush", 50.0)) && run.contains(&("the rest", 350.0)), "{run:?}");
        assert_eq!(of(Contender::Fuse), [("all of it", 9000.0), ("an empty call", 90.0), ("the rest", 8910.0)]);
        assert!(shares.iter().all(|share| share.operation == APPEND), "nothing is said of what was not measured");
    }
}
