//! The bytes of a body.
//!
//! There is one way to write each body, so equal frames are equal bytes. The decoder encodes the result and compares.

use ashlar_types::{Credentials, InodeId, JournalPosition, LogGeneration, LogPosition, NodeNumber, SessionId};
use serde::{Deserialize, Serialize};

use crate::FrameError;
use crate::body::{BatchVerdict, FrameBody, LogRecords, OwnAct, SessionBegan};
use crate::frame::{FLAG_CONTINUES, FRAME_BYTES_MAX, FrameHeader, FrameKind, frame_bytes, session_hint};

/// [`SessionBegan`] on media.
#[derive(Serialize, Deserialize)]
struct BeganFields {
    session: SessionId,
    generation: LogGeneration,
    uid: u32,
    gid: u32,
    checked: bool,
    /// The first group, and the difference of each other one to the one before. So all groups that Linux allows a
    /// process fit a frame: the differences together are below 2^32.
    groups: Vec<u32>,
}

/// [`FrameBody::After`] and [`FrameBody::Adopt`] on media.
#[derive(Serialize, Deserialize)]
struct NodeFields {
    node: NodeNumber,
    position: JournalPosition,
}

/// [`LogRecords`] on media, before the bytes themselves.
#[derive(Serialize)]
struct RecordsFields {
    session: SessionId,
    from: LogPosition,
    to: LogPosition,
    offset: u64,
    length: u64,
}

/// [`OwnAct::Update`] on media, before the bytes themselves; the first field is the choice's number.
#[derive(Serialize)]
struct UpdateFields {
    choice: u32,
    kind: u8,
    length: u64,
}

/// A body's bytes, and the fields of its header that follow from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedFrame<'a> {
    pub(crate) kind: FrameKind,
    pub(crate) flags: u8,
    pub(crate) session: u16,
    /// The fields.
    prefix: Vec<u8>,
    /// Bytes that stand behind the fields, where the caller has them.
    tail: &'a [u8],
}

impl EncodedFrame<'_> {
    /// Returns the body, in two parts.
    #[must_use]
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.prefix, self.tail]
    }

    /// Returns the bytes of the body.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        (self.prefix.len() + self.tail.len()) as u64
    }

    /// Returns the bytes that the frame takes up in the journal.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        frame_bytes(self.body_bytes())
    }
}

impl<'a> FrameBody<'a> {
    /// Encodes the body.
    ///
    /// # Errors
    /// [`FrameError::Length`] if it does not fit a frame, [`FrameError::OutOfBounds`] if a value is not allowed.
    pub fn encode(&self) -> Result<EncodedFrame<'a>, FrameError> {
        self.check()?;
        let (prefix, tail) = match self {
            Self::Began(began) => (fields(&began_fields(began))?, &[][..]),
            Self::Records(LogRecords { session, from, to, offset, bytes, continues: _ }) => {
                let (session, from, to, offset) = (*session, *from, *to, *offset);
                (fields(&RecordsFields { session, from, to, offset, length: bytes.len() as u64 })?, *bytes)
            }
            Self::Verdict(verdict) => (fields(verdict)?, &[][..]),
            Self::Own(OwnAct::Update { kind, body }) => {
                (fields(&UpdateFields { choice: 0, kind: *kind, length: body.len() as u64 })?, *body)
            }
            Self::Own(act) => (fields(act)?, &[][..]),
            Self::After { node, position } | Self::Adopt { node, upto: position } => {
                (fields(&NodeFields { node: *node, position: *position })?, &[][..])
            }
            Self::Ended { session } => (fields(session)?, &[][..]),
        };
        let continues = matches!(self, Self::Records(records) if records.continues);
        let encoded = EncodedFrame {
            kind: self.kind(),
            flags: if continues { FLAG_CONTINUES } else { 0 },
            session: self.session().map_or(0, session_hint),
            prefix,
            tail,
        };
        let bytes = encoded.frame_bytes();
        if bytes > FRAME_BYTES_MAX { Err(FrameError::Length { bytes }) } else { Ok(encoded) }
    }

    /// Decodes a body whose checksum is right.
    ///
    /// # Errors
    /// [`FrameError`] if this program's encoder would not have written header and body so.
    pub fn decode(header: &FrameHeader, body: &'a [u8]) -> Result<Self, FrameError> {
        let bytes = header.frame_bytes();
        if u64::from(header.length) != body.len() as u64 || bytes > FRAME_BYTES_MAX {
            return Err(FrameError::Length { bytes });
        }
        let kind = FrameKind::from_u8(header.kind).ok_or(FrameError::Kind(header.kind))?;
        let continues = header.flags == FLAG_CONTINUES && kind == FrameKind::Records;
        if header.flags != 0 && !continues {
            return Err(FrameError::Flags(header.flags));
        }
        let decoded = match kind {
            FrameKind::Began => Self::Began(began(read(body)?)?),
            FrameKind::Records => Self::Records(LogRecords { continues, ..read(body)? }),
            FrameKind::Verdict => Self::Verdict(read(body)?),
            FrameKind::Own => Self::Own(read(body)?),
            FrameKind::After => {
                let NodeFields { node, position } = read(body)?;
                Self::After { node, position }
            }
            FrameKind::Ended => Self::Ended { session: read(body)? },
            FrameKind::Adopt => {
                let NodeFields { node, position } = read(body)?;
                Self::Adopt { node, upto: position }
            }
        };
        let encoded = decoded.encode()?;
        if header.session != encoded.session {
            return Err(FrameError::Session);
        }
        let [prefix, tail] = encoded.parts();
        let is_alike = body.split_at_checked(prefix.len()) == Some((prefix, tail));
        if is_alike { Ok(decoded) } else { Err(FrameError::Malformed) }
    }

    /// Checks the bounds that the encoding does not imply.
    fn check(&self) -> Result<(), FrameError> {
        let fits = match self {
            Self::Began(_) | Self::Ended { .. } | Self::After { .. } | Self::Adopt { .. } => true,
            Self::Records(records) => records.from <= records.to && records.offset.checked_add(1).is_some(),
            Self::Verdict(verdict) => is_in_order(verdict),
            Self::Own(OwnAct::Update { .. } | OwnAct::Limits { .. }) => true,
            Self::Own(OwnAct::Inodes { first, count, .. }) => {
                first.0 != 0 && *count != 0 && first.0.checked_add(*count).is_some()
            }
            Self::Own(OwnAct::Right { inode, access, .. }) => inode.0 != 0 && (1..8).contains(access),
        };
        if fits { Ok(()) } else { Err(FrameError::OutOfBounds) }
    }
}

fn is_in_order(verdict: &BatchVerdict) -> bool {
    let BatchVerdict { upto, latest, refused, ignored, kept, .. } = verdict;
    let is_time = latest.is_none_or(|latest| latest.nanoseconds < 1_000_000_000);
    // A session is fenced at the record that was refused last, so that record may begin at `upto`.
    let are_refused = refused.is_sorted_by(|one, other| one.position < other.position)
        && refused.last().is_none_or(|last| last.position <= *upto);
    let are_ignored = ignored.is_sorted_by(|one, other| one < other) && ignored.last().is_none_or(|last| last < upto);
    let are_kept = kept.is_sorted_by(|one, other| one < other) && kept.first() != Some(&InodeId(0));
    is_time && are_refused && are_ignored && are_kept
}

fn began_fields(began: &SessionBegan) -> BeganFields {
    let SessionBegan { session, generation, credentials } = began;
    let mut groups = credentials.groups.clone();
    groups.sort_unstable();
    groups.dedup();
    let mut before = 0;
    for group in &mut groups {
        (before, *group) = (*group, *group - before);
    }
    let Credentials { uid, gid, checked, .. } = *credentials;
    BeganFields { session: *session, generation: *generation, uid, gid, checked, groups }
}

fn began(fields: BeganFields) -> Result<SessionBegan, FrameError> {
    let BeganFields { session, generation, uid, gid, checked, mut groups } = fields;
    let mut before = 0u32;
    for group in &mut groups {
        *group = before.checked_add(*group).ok_or(FrameError::OutOfBounds)?;
        before = *group;
    }
    Ok(SessionBegan { session, generation, credentials: Credentials { uid, gid, groups, checked } })
}

fn fields(value: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    postcard::to_stdvec(value).map_err(|_| FrameError::Malformed)
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        _ => Err(FrameError::Malformed),
    }
}
