//! Reading a dump's lines: their order, their hash, and their counts.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::dump::error::DumpError;
use crate::dump::line::{DUMP_VERSION, DumpLine, DumpSubject, InodePart, KIND, LINES, REGULAR, SHA256, SIZE, VERSION};

/// A line that is not understood is shown up to this many characters.
const SHOWN_CHARACTERS: usize = 80;

/// The SHA-256 of a dump's lines, each with its line feed, without the last line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DumpHash(pub [u8; 32]);

impl fmt::Display for DumpHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The counts of a dump, and its hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DumpSummary {
    /// Lines, without the last one.
    pub lines: u64,
    /// Inodes.
    pub inodes: u64,
    /// Entries of all directories.
    pub entries: u64,
    /// The sizes of all files together.
    pub bytes: u64,
    /// The hash of the lines.
    pub hash: DumpHash,
}

/// Counts and hashes lines, on both sides of a dump.
#[derive(Clone, Debug, Default)]
pub struct DumpTally {
    summary: DumpSummary,
    hash: Sha256,
}

impl DumpTally {
    /// Adds a line.
    pub fn add(&mut self, line: &DumpLine, text: &str) {
        self.summary.lines += 1;
        match &line.subject {
            DumpSubject::Inode(_, InodePart::Attributes) => {
                self.summary.inodes += 1;
                let size = line.attribute(SIZE).filter(|_| line.attribute(KIND) == Some(REGULAR));
                let bytes = size.and_then(|size| size.parse().ok()).unwrap_or(0);
                self.summary.bytes = self.summary.bytes.saturating_add(bytes);
            }
            DumpSubject::Inode(_, InodePart::Entry { .. }) => self.summary.entries += 1,
            _ => {}
        }
        self.hash.update(text);
        self.hash.update(b"\n");
    }

    /// Returns the counts and the hash of the lines so far.
    pub fn summary(&self) -> DumpSummary {
        DumpSummary { hash: DumpHash(self.hash.clone().finalize().into()), ..self.summary }
    }

    /// Makes the line that ends a dump of these lines.
    pub fn end_line(&self) -> DumpLine {
        let summary = self.summary();
        let attributes = [(LINES, summary.lines.to_string()), (SHA256, summary.hash.to_string())];
        DumpLine::new(DumpSubject::End, attributes)
    }
}

/// A dump that is read line by line.
pub struct DumpReader<I> {
    lines: I,
    tally: DumpTally,
    /// The subject of the line before.
    last: Option<DumpSubject>,
    is_over: bool,
}

impl<I> DumpReader<I> {
    /// Reads a dump from its lines, which have no line feeds.
    pub fn new(lines: I) -> Self {
        Self { lines, tally: DumpTally::default(), last: None, is_over: false }
    }

    /// Returns the counts and the hash of the lines read.
    pub fn summary(&self) -> DumpSummary {
        self.tally.summary()
    }
}

impl<I, E> DumpReader<I>
where
    I: Iterator<Item = Result<String, E>>,
    DumpError: From<E>,
{
    /// Reads the next line; `None` at the end of a whole dump, whose hash is the one in its last line.
    ///
    /// # Errors
    /// [`DumpError`]. Nothing can be said of the dump then.
    pub fn next_line(&mut self) -> Result<Option<DumpLine>, DumpError> {
        if self.is_over {
            return Ok(None);
        }
        let lines = self.tally.summary.lines;
        let text = self.lines.next().ok_or(DumpError::CutOff { lines })??;
        let malformed =
            || DumpError::Malformed { number: lines + 1, text: text.chars().take(SHOWN_CHARACTERS).collect() };
        // A line has one spelling, so equal hashes and equal lines are the same.
        let line = DumpLine::parse(&text).filter(|line| line.to_string() == text).ok_or_else(malformed)?;
        match &self.last {
            None if line.subject != DumpSubject::FileSystem => return Err(malformed()),
            None => check_version(&line)?,
            Some(last) if line.subject <= *last => return Err(DumpError::Disordered { number: lines + 1 }),
            Some(_) => {}
        }
        if line.subject == DumpSubject::End {
            self.is_over = true;
            return if line == self.tally.end_line() { Ok(None) } else { Err(DumpError::WrongHash) };
        }
        self.tally.add(&line, &text);
        self.last = Some(line.subject.clone());
        Ok(Some(line))
    }
}

fn check_version(line: &DumpLine) -> Result<(), DumpError> {
    let found = line.attribute(VERSION).unwrap_or("0");
    if found == DUMP_VERSION.to_string() {
        return Ok(());
    }
    Err(DumpError::Version { found: found.to_owned(), supported: DUMP_VERSION })
}
