//! The comparison of two dumps, line by line.

use std::fmt;

use ashlar_types::InodeId;

use crate::dump::error::DumpError;
use crate::dump::line::{DumpLine, DumpSubject, InodePart, NAME_KEY};
use crate::dump::reader::{DumpReader, DumpSummary};

/// A difference shows so many characters of a value.
const SHOWN_CHARACTERS: usize = 100;

/// A difference between two dumps, A and B.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpDifference {
    /// The subject that differs.
    pub subject: DumpSubject,
    /// The attribute that differs; `None` if only one of the dumps has the subject.
    pub attribute: Option<String>,
    /// The attribute's value in A, or all attributes of the subject.
    pub first: Option<String>,
    /// The same in B.
    pub second: Option<String>,
}

impl fmt::Display for DumpDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.subject)?;
        if let DumpSubject::Inode(_, InodePart::Data(_)) = self.subject {
            return match (&self.first, &self.second) {
                (Some(_), None) => f.write_str("zeros, or behind the end, in B only"),
                (None, Some(_)) => f.write_str("zeros, or behind the end, in A only"),
                _ => f.write_str("the contents differ"),
            };
        }
        match (&self.attribute, &self.first, &self.second) {
            (Some(name), _, _) if name == NAME_KEY => f.write_str(
                "the keys of the name hash differ, so directories have other orders; entries are not compared",
            ),
            (Some(name), first, second) => {
                let shown = |value: &Option<String>| match value.as_deref() {
                    None => "missing".to_owned(),
                    Some("") => "empty".to_owned(),
                    Some(value) => shorten(value),
                };
                write!(f, "{} is {} in A and {} in B", attribute_words(name), shown(first), shown(second))
            }
            (None, Some(_), _) => f.write_str("in A only"),
            (None, None, _) => f.write_str("in B only"),
        }
    }
}

fn shorten(value: &str) -> String {
    match value.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}… ({} characters)", &value[..end], value.len()),
        None => value.to_owned(),
    }
}

/// Returns an attribute's name in words.
fn attribute_words(name: &str) -> &str {
    match name {
        "kind" => "the kind of file",
        "mode" => "the mode",
        "uid" => "the owner",
        "gid" => "the group",
        "links" => "the link count",
        "device" => "the device number",
        "size" => "the size",
        "blocks" => "the number of blocks",
        "entries" => "the number of entries",
        "parent" => "the parent directory",
        "accessed" => "the time of last access",
        "modified" => "the time of last modification",
        "changed" => "the time of last change",
        "born" => "the time of birth",
        "subtree" => "the subtree whose quota it counts against",
        "target" => "the target",
        "value" => "the value",
        "inode" => "the inode",
        "inodes" => "the number of inodes",
        "blocks-limit" => "the limit of blocks",
        "inodes-limit" => "the limit of inodes",
        "generation" => "the log's generation",
        "applied" => "the applied position",
        other => other,
    }
}

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpComparison {
    /// The counts and the hash of A.
    pub first: DumpSummary,
    /// The counts and the hash of B.
    pub second: DumpSummary,
    /// The first differences, in the order of the lines.
    pub differences: Vec<DumpDifference>,
    /// How many there are.
    pub differences_count: u64,
}

impl DumpComparison {
    /// Whether the dumps are equal.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.first.hash == self.second.hash
    }
}

/// Compares two dumps from their lines, which have no line feeds.
///
/// At most `kept_max` differences are kept; all are counted. Neither dump is in memory: both are read in step.
///
/// # Errors
/// [`DumpError`] if one of them can't be read, or is not whole.
pub fn compare_dumps<A, B, E, F>(first: A, second: B, kept_max: usize) -> Result<DumpComparison, DumpError>
where
    A: IntoIterator<Item = Result<String, E>>,
    B: IntoIterator<Item = Result<String, F>>,
    DumpError: From<E> + From<F>,
{
    let (mut a, mut b) = (DumpReader::new(first.into_iter()), DumpReader::new(second.into_iter()));
    let mut found = DumpDifferences::new(kept_max);
    let (mut next_a, mut next_b) = (a.next_line()?, b.next_line()?);
    loop {
        // The end comes after all else, so a dump that has ended never has the smaller line.
        let order = match (&next_a, &next_b) {
            (None, None) => break,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some(a), Some(b)) => a.subject.cmp(&b.subject),
        };
        found.add_lines(next_a.as_ref().filter(|_| order.is_le()), next_b.as_ref().filter(|_| order.is_ge()));
        if order.is_le() {
            next_a = a.next_line()?;
        }
        if order.is_ge() {
            next_b = b.next_line()?;
        }
    }
    Ok(DumpComparison {
        first: a.summary(),
        second: b.summary(),
        differences: found.kept,
        differences_count: found.count,
    })
}

struct DumpDifferences {
    kept: Vec<DumpDifference>,
    kept_max: usize,
    count: u64,
    /// The inode that only one dump has. Its parts are no differences of their own.
    alone: Option<InodeId>,
    /// The keys of the name hash are equal, so entries stand in one order.
    has_one_order: bool,
}

impl DumpDifferences {
    fn new(kept_max: usize) -> Self {
        Self { kept: Vec::new(), kept_max, count: 0, alone: None, has_one_order: true }
    }

    fn add(&mut self, difference: DumpDifference) {
        self.count += 1;
        if self.kept.len() < self.kept_max {
            self.kept.push(difference);
        }
    }

    /// Compares two lines of one subject; `None`: the dump has no such line.
    fn add_lines(&mut self, first: Option<&DumpLine>, second: Option<&DumpLine>) {
        let Some(subject) = first.or(second).map(|line| &line.subject) else { return };
        let is_skipped = match subject {
            DumpSubject::Inode(inode, InodePart::Attributes) => {
                self.alone = Some(*inode).filter(|_| first.is_none() || second.is_none());
                false
            }
            DumpSubject::Inode(_, InodePart::Entry { .. }) if !self.has_one_order => true,
            DumpSubject::Inode(inode, _) => self.alone == Some(*inode),
            _ => false,
        };
        if is_skipped {
            return;
        }
        let (Some(a), Some(b)) = (first, second) else {
            let text = |line: Option<&DumpLine>| line.map(attributes_text);
            let (first, second) = (text(first), text(second));
            return self.add(DumpDifference { subject: subject.clone(), attribute: None, first, second });
        };
        // A piece of a file is one fact, however many attributes its line has.
        if matches!(subject, DumpSubject::Inode(_, InodePart::Data(_))) {
            if a.attributes != b.attributes {
                let (first, second) = (Some(attributes_text(a)), Some(attributes_text(b)));
                let attribute = Some("contents".to_owned());
                self.add(DumpDifference { subject: subject.clone(), attribute, first, second });
            }
            return;
        }
        let only_in_b = b.attributes.iter().filter(|(name, _)| a.attribute(name).is_none());
        for (name, _) in a.attributes.iter().chain(only_in_b) {
            let (first, second) = (a.attribute(name), b.attribute(name));
            if first == second {
                continue;
            }
            self.has_one_order &= name != NAME_KEY;
            self.add(DumpDifference {
                subject: subject.clone(),
                attribute: Some(name.clone().into_owned()),
                first: first.map(str::to_owned),
                second: second.map(str::to_owned),
            });
        }
    }
}

fn attributes_text(line: &DumpLine) -> String {
    let words: Vec<_> = line.attributes.iter().map(|(name, value)| format!("{name}={value}")).collect();
    words.join(" ")
}
