//! One line of a dump: a subject, and its attributes.
//!
//! A line is a list of words. Those without an equals sign name the subject; the others are attributes. Bytes that are
//! no printable ASCII, spaces, equals signs and backslashes are escaped as `\xNN`, so every name has one spelling.

use std::borrow::Cow;
use std::fmt::{self, Write};

use ashlar_types::{FileKind, Inode, InodeId, QuotaAmount, QuotaId, QuotaKey, QuotaLimits, SessionId, Timestamp};
use ashlar_types::{LogGeneration, LogPosition, escape_controls};

/// The version of the dump's lines, in the first of them.
pub const DUMP_VERSION: u32 = 1;
/// Attributes that other files name.
pub const VERSION: &str = "version";
pub const NAME_KEY: &str = "name-key";
pub const SIZE: &str = "size";
pub const KIND: &str = "kind";
pub const LINES: &str = "lines";
pub const SHA256: &str = "sha256";
/// The kind of regular files.
pub const REGULAR: &str = "file";

/// The subject of a line. Lines stand in the order of their subjects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DumpSubject {
    /// The file system as a whole.
    FileSystem,
    /// An inode, or a part of one.
    Inode(InodeId, InodePart),
    /// The use and limits of a user, group or subtree.
    Quota(QuotaKey),
    /// An inode that has lost its last name and is kept.
    Orphan(InodeId),
    /// A session.
    Session(SessionId),
    /// The end of the dump.
    End,
}

/// A part of an inode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InodePart {
    /// Its attributes.
    Attributes,
    /// An extended attribute, by name.
    Xattr(Vec<u8>),
    /// A directory's entry, by its place in the order of `readdir`.
    Entry {
        /// The name's cookie.
        cookie: u64,
        /// The name.
        name: Vec<u8>,
    },
    /// A piece of a file's contents that has bytes other than zero, by its first byte.
    Data(u64),
}

impl fmt::Display for DumpSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FileSystem => f.write_str("the file system"),
            Self::Inode(inode, InodePart::Attributes) => write!(f, "inode {inode}"),
            Self::Inode(inode, InodePart::Xattr(name)) => {
                write!(f, "inode {inode}, extended attribute '{}'", readable(name))
            }
            Self::Inode(inode, InodePart::Entry { name, .. }) => {
                write!(f, "directory {inode}, entry '{}'", readable(name))
            }
            Self::Inode(inode, InodePart::Data(offset)) => write!(f, "inode {inode}, bytes from {offset} on"),
            Self::Quota(key) => write!(f, "the quota of {key}"),
            Self::Orphan(inode) => write!(f, "the orphan {inode}"),
            Self::Session(session) => write!(f, "session {session}"),
            Self::End => f.write_str("the end"),
        }
    }
}

/// Returns a name as a person reads it.
fn readable(name: &[u8]) -> String {
    escape_controls(&String::from_utf8_lossy(name)).into_owned()
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpLine {
    pub subject: DumpSubject,
    /// The attributes' names and escaped values, in the order of the line.
    pub attributes: Vec<(Cow<'static, str>, String)>,
}

impl DumpLine {
    /// Makes a line.
    pub fn new<const N: usize>(subject: DumpSubject, attributes: [(&'static str, String); N]) -> Self {
        Self { subject, attributes: attributes.map(|(name, value)| (Cow::Borrowed(name), value)).into() }
    }

    /// Returns the escaped value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// Makes the line of an inode's own attributes.
    pub fn of_inode(id: InodeId, inode: &Inode) -> Self {
        Self::new(
            DumpSubject::Inode(id, InodePart::Attributes),
            [
                (KIND, kind_word(inode.kind).to_owned()),
                ("mode", format!("{:04o}", inode.mode)),
                ("uid", inode.uid.to_string()),
                ("gid", inode.gid.to_string()),
                ("links", inode.links.to_string()),
                ("device", inode.device.to_string()),
                (SIZE, inode.size.to_string()),
                ("blocks", inode.blocks.to_string()),
                ("entries", inode.entries.to_string()),
                ("parent", inode.parent.to_string()),
                ("accessed", time(inode.accessed)),
                ("modified", time(inode.modified)),
                ("changed", time(inode.changed)),
                ("born", time(inode.born)),
                ("subtree", inode.quota.to_string()),
                ("target", escape(&inode.target)),
            ],
        )
    }

    /// Makes the line of an extended attribute.
    pub fn of_xattr(inode: InodeId, name: Vec<u8>, value: &[u8]) -> Self {
        Self::new(DumpSubject::Inode(inode, InodePart::Xattr(name)), [("value", escape(value))])
    }

    /// Makes the line of a directory's entry.
    pub fn of_entry(directory: InodeId, cookie: u64, name: &[u8], inode: InodeId, kind: FileKind) -> Self {
        let part = InodePart::Entry { cookie, name: name.to_vec() };
        let attributes = [("inode", inode.to_string()), (KIND, kind_word(kind).to_owned())];
        Self::new(DumpSubject::Inode(directory, part), attributes)
    }

    /// Makes the line of an account.
    pub fn of_quota(key: QuotaKey, used: QuotaAmount, limits: QuotaLimits) -> Self {
        let limit = |limit: Option<u64>| limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        Self::new(
            DumpSubject::Quota(key),
            [
                ("blocks", used.blocks.to_string()),
                ("inodes", used.inodes.to_string()),
                ("blocks-limit", limit(limits.blocks)),
                ("inodes-limit", limit(limits.inodes)),
            ],
        )
    }

    /// Makes the line of a session.
    pub fn of_session(session: SessionId, generation: LogGeneration, applied: LogPosition) -> Self {
        let attributes = [("generation", generation.to_string()), ("applied", applied.to_string())];
        Self::new(DumpSubject::Session(session), attributes)
    }

    /// Reads a line, or returns `None` if it is no dump's.
    pub fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(' ').collect();
        let names = words.iter().take_while(|word| !word.contains('=')).count();
        let subject = parse_subject(&words[..names])?;
        let attributes = words[names..].iter().map(|word| {
            let (name, value) = word.split_once('=')?;
            Some((Cow::Owned(name.to_owned()), value.to_owned()))
        });
        Some(Self { subject, attributes: attributes.collect::<Option<_>>()? })
    }
}

impl fmt::Display for DumpLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subject {
            DumpSubject::FileSystem => f.write_str("dump")?,
            DumpSubject::Inode(inode, InodePart::Attributes) => write!(f, "inode {inode}")?,
            DumpSubject::Inode(inode, InodePart::Xattr(name)) => write!(f, "xattr {inode} {}", escape(name))?,
            DumpSubject::Inode(inode, InodePart::Entry { cookie, name }) => {
                write!(f, "entry {inode} {cookie} {}", escape(name))?;
            }
            DumpSubject::Inode(inode, InodePart::Data(offset)) => write!(f, "data {inode} {offset}")?,
            DumpSubject::Quota(QuotaKey::User(uid)) => write!(f, "quota user {uid}")?,
            DumpSubject::Quota(QuotaKey::Group(gid)) => write!(f, "quota group {gid}")?,
            DumpSubject::Quota(QuotaKey::Subtree(id)) => write!(f, "quota subtree {id}")?,
            DumpSubject::Orphan(inode) => write!(f, "orphan {inode}")?,
            DumpSubject::Session(session) => write!(f, "session {session}")?,
            DumpSubject::End => f.write_str("end")?,
        }
        self.attributes.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

fn parse_subject(words: &[&str]) -> Option<DumpSubject> {
    let inode = |number: &str| number.parse().ok().map(InodeId);
    Some(match *words {
        ["dump"] => DumpSubject::FileSystem,
        ["inode", number] => DumpSubject::Inode(inode(number)?, InodePart::Attributes),
        ["xattr", number, name] => DumpSubject::Inode(inode(number)?, InodePart::Xattr(unescape(name)?)),
        ["entry", number, cookie, name] => {
            let part = InodePart::Entry { cookie: cookie.parse().ok()?, name: unescape(name)? };
            DumpSubject::Inode(inode(number)?, part)
        }
        ["data", number, offset] => DumpSubject::Inode(inode(number)?, InodePart::Data(offset.parse().ok()?)),
        ["quota", "user", uid] => DumpSubject::Quota(QuotaKey::User(uid.parse().ok()?)),
        ["quota", "group", gid] => DumpSubject::Quota(QuotaKey::Group(gid.parse().ok()?)),
        ["quota", "subtree", id] => DumpSubject::Quota(QuotaKey::Subtree(QuotaId(id.parse().ok()?))),
        ["orphan", number] => DumpSubject::Orphan(inode(number)?),
        ["session", number] => DumpSubject::Session(SessionId(number.parse().ok()?)),
        ["end"] => DumpSubject::End,
        _ => return None,
    })
}

fn kind_word(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Fifo => "fifo",
        FileKind::CharDevice => "char-device",
        FileKind::Directory => "directory",
        FileKind::BlockDevice => "block-device",
        FileKind::Regular => REGULAR,
        FileKind::Symlink => "symlink",
        FileKind::Socket => "socket",
    }
}

/// Writes a time as seconds and nanoseconds after them. Before 1970 the seconds are negative, and the nanoseconds not.
fn time(at: Timestamp) -> String {
    format!("{}.{:09}", at.seconds, at.nanoseconds)
}

fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_graphic() && !matches!(byte, b'\\' | b'=') {
            text.push(byte.into());
        } else {
            // Writing to a string never fails.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut pieces = text.split('\\');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (digits, rest) = piece.strip_prefix('x')?.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_survive_their_text() {
        let at = Timestamp { seconds: -1, nanoseconds: 5 };
        let mut inode = Inode::new(FileKind::Symlink, 0o4755, InodeId::ROOT, at);
        inode.target = b"a b=\\\n\xff".to_vec();
        let used = QuotaAmount { blocks: 1, inodes: 2 };
        let limits = QuotaLimits { blocks: Some(0), inodes: None };
        let quota = |key| DumpLine::of_quota(key, used, limits);
        let lines = [
            DumpLine::new(DumpSubject::FileSystem, [(VERSION, "1".into()), (NAME_KEY, "ab".into())]),
            DumpLine::of_inode(InodeId(16), &inode),
            DumpLine::of_xattr(InodeId(16), b"user.x =".to_vec(), b"\0 value"),
            DumpLine::of_xattr(InodeId(16), b"user.y".to_vec(), b""),
            DumpLine::of_entry(InodeId(17), 77, b"\xc3\xa9 \\x20", InodeId(16), FileKind::Fifo),
            DumpLine::new(DumpSubject::Inode(InodeId(17), InodePart::Data(4096)), [(SHA256, "00".into())]),
            quota(QuotaKey::User(5)),
            quota(QuotaKey::Group(5)),
            quota(QuotaKey::Subtree(QuotaId(17))),
            DumpLine::new(DumpSubject::Orphan(InodeId(16)), []),
            DumpLine::of_session(SessionId(1), LogGeneration(2), LogPosition(3)),
            DumpLine::new(DumpSubject::End, [(LINES, "11".into())]),
        ];
        for line in &lines {
            let text = line.to_string();
            assert!(text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{text}");
            assert_eq!(DumpLine::parse(&text).as_ref(), Some(line), "{text}");
        }
        assert!(lines.is_sorted_by(|a, b| a.subject < b.subject), "subjects are not in the order of lines");
    }

    #[test]
    fn text_that_is_no_line_is_refused() {
        for text in
            ["", "inode", "inode x mode=1", "inode 1 mode=1 stray", "entry 1 2 a\\x", "xattr 1 \\q value=", "x=1"]
        {
            assert_eq!(DumpLine::parse(text), None, "{text}");
        }
    }
}
