//! The bytes of an update: little-endian, packed, and only one way to write each.
//!
//! ```text
//! Write          inode:8 offset:8 seconds:8 nanoseconds:4 strip:1 data…
//! Create         inode:8 parent:8 at:12 mode:4 uid:4 gid:4 device:8 kind:1 name:1+n target:2+n access:2+n default:2+n
//! Link           inode:8 parent:8 at:12 name:1+n
//! Unlink         inode:8 parent:8 at:12 release:1 name:1+n             (RemoveDirectory alike)
//! Rename         parent:8 inode:8 new_parent:8 target:8 (0 = none) at:12 flags:1 name:1+n new_name:1+n
//!                flags: 1 exchange, 2 release, 4 whiteout;
//!                then with a whiteout: inode:8 uid:4 gid:4 access:2+n
//! Resize         inode:8 size:8 at:12 strip:1
//! Allocate       inode:8 offset:8 length:8 at:12 how:1 strip:1
//! SetAttributes  inode:8 at:12 mask:1 then those present: 4, 4, 4, 12, 12
//!                mask: mode 1, uid 2, gid 4, accessed 8, modified 16
//! SetXattr       inode:8 at:12 mode:4 (0xffffffff = unchanged) name:1+n value:4+n
//! RemoveXattr    inode:8 at:12 mode:4 name:1+n
//! Accessed       inode:8 at:12
//! Release        inode:8
//! Depend         session:8 position:8
//! SetQuota       inode:8 at:12 quota:8
//! ```
//!
//! `at` is seconds:8 nanoseconds:4; `name:1+n` is a length of one byte and that many bytes.

use ashlar_types::{
    FILE_SIZE_MAX, FileKind, InodeId, LogPosition, MODE_PERMISSIONS, Name, QuotaId, SYMLINK_MAX, SessionId, Timestamp,
    XATTR_NAME_MAX, XATTR_VALUE_MAX,
};
use thiserror::Error;

use crate::{Allocation, Create, Rename, SetAttributes, Update, UpdateKind, Whiteout};

/// Why bytes are no update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The kind is not known.
    #[error("unknown kind of update: {0}")]
    UnknownKind(u8),
    /// The body ends too early, or goes on too long.
    #[error("the update's length is wrong")]
    WrongLength,
    /// A field has a value that the encoder never writes.
    #[error("a field of the update is out of its range")]
    OutOfRange,
    /// A name is empty, too long, or holds `/` or NUL.
    #[error("a name in the update is not valid")]
    BadName,
}

/// Bytes in front of a write's data that need no allocation: enough for all but long names, targets, lists and values.
const SHORT_BYTES: usize = 128;

/// An update in bytes, in two parts, so that a write's data is not copied on the way to the log.
#[derive(Debug)]
pub struct Encoded<'a> {
    fixed: Writer,
    data: &'a [u8],
}

impl<'a> Encoded<'a> {
    /// The parts, in order.
    #[must_use]
    pub fn parts(&self) -> [&[u8]; 2] {
        [self.fixed.written(), self.data]
    }

    /// Bytes in front of a write's data.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        self.fixed.written().len() as u64
    }
}

const MODE_UNCHANGED: u32 = u32::MAX;
const WRITE_FIELDS_BYTES: usize = 29;

/// The fields in front of a write's data.
#[must_use]
#[inline]
pub fn write_fields(inode: InodeId, offset: u64, at: Timestamp, strip: bool) -> [u8; WRITE_FIELDS_BYTES] {
    let mut fields = [0; WRITE_FIELDS_BYTES];
    fields[..8].copy_from_slice(&inode.0.to_le_bytes());
    fields[8..16].copy_from_slice(&offset.to_le_bytes());
    fields[16..24].copy_from_slice(&at.seconds.to_le_bytes());
    fields[24..28].copy_from_slice(&at.nanoseconds.to_le_bytes());
    fields[28] = u8::from(strip);
    fields
}

impl<'a> Update<'a> {
    /// The update in bytes. Names and values must be within their limits, as LibFS has checked.
    #[must_use]
    pub fn encode(&self) -> Encoded<'a> {
        let mut out = Writer { short: [0; SHORT_BYTES], length: 0, long: Vec::new() };
        let mut tail: &'a [u8] = &[];
        match self {
            Self::Write { inode, offset, at, strip, data } => {
                out.bytes(&write_fields(*inode, *offset, *at, *strip));
                tail = data;
            }
            Self::Create(c) => {
                out.u64(c.inode.0).u64(c.parent.0).time(c.at).u32(c.mode).u32(c.uid).u32(c.gid).u64(c.device);
                out.u8(c.kind as u8).name(c.name).short(c.target).short(c.acl_access).short(c.acl_default);
            }
            Self::Link { inode, parent, name, at } => {
                out.u64(inode.0).u64(parent.0).time(*at).name(name);
            }
            Self::Unlink { inode, parent, name, release, at }
            | Self::RemoveDirectory { inode, parent, name, release, at } => {
                out.u64(inode.0).u64(parent.0).time(*at).u8(u8::from(*release)).name(name);
            }
            Self::Rename(r) => {
                let flags = u8::from(r.exchange) | u8::from(r.release) << 1 | u8::from(r.whiteout.is_some()) << 2;
                out.u64(r.parent.0).u64(r.inode.0).u64(r.new_parent.0).u64(r.target.map_or(0, |t| t.0)).time(r.at);
                out.u8(flags).name(r.name).name(r.new_name);
                if let Some(made) = &r.whiteout {
                    out.u64(made.inode.0).u32(made.uid).u32(made.gid).short(made.acl_access);
                }
            }
            Self::Resize { inode, size, strip, at } => {
                out.u64(inode.0).u64(*size).time(*at).u8(u8::from(*strip));
            }
            Self::Allocate { inode, how, offset, length, strip, at } => {
                out.u64(inode.0).u64(*offset).u64(*length).time(*at).u8(*how as u8).u8(u8::from(*strip));
            }
            Self::SetAttributes(set) => out.set_attributes(set),
            Self::SetXattr { inode, name, value, mode, at } => {
                out.u64(inode.0).time(*at).u32(mode.unwrap_or(MODE_UNCHANGED)).name(name);
                out.u32(value.len() as u32).bytes(value);
            }
            Self::RemoveXattr { inode, name, mode, at } => {
                out.u64(inode.0).time(*at).u32(mode.unwrap_or(MODE_UNCHANGED)).name(name);
            }
            Self::Accessed { inode, at } => {
                out.u64(inode.0).time(*at);
            }
            Self::Release { inode } => {
                out.u64(inode.0);
            }
            Self::Depend { session, position } => {
                out.u64(session.0).u64(position.0);
            }
            Self::SetQuota { inode, quota, at } => {
                out.u64(inode.0).time(*at).u64(quota.0);
            }
        }
        Encoded { fixed: out, data: tail }
    }

    /// Bytes of the update as [`Update::encode`] writes it.
    #[must_use]
    pub fn body_bytes(&self) -> u64 {
        let bytes = match self {
            Self::Write { data, .. } => WRITE_FIELDS_BYTES + data.len(),
            Self::Create(c) => 56 + c.name.len() + c.target.len() + c.acl_access.len() + c.acl_default.len(),
            Self::Link { name, .. } => 29 + name.len(),
            Self::Unlink { name, .. } | Self::RemoveDirectory { name, .. } => 30 + name.len(),
            Self::Rename(r) => {
                47 + r.name.len() + r.new_name.len() + r.whiteout.map_or(0, |made| 18 + made.acl_access.len())
            }
            Self::Resize { .. } => 29,
            Self::Allocate { .. } => 38,
            Self::SetAttributes(set) => {
                let numbers = [set.mode, set.uid, set.gid].iter().flatten().count();
                let times = [set.accessed, set.modified].iter().flatten().count();
                21 + 4 * numbers + 12 * times
            }
            Self::SetXattr { name, value, .. } => 29 + name.len() + value.len(),
            Self::RemoveXattr { name, .. } => 25 + name.len(),
            Self::Accessed { .. } => 20,
            Self::Release { .. } => 8,
            Self::Depend { .. } => 16,
            Self::SetQuota { .. } => 28,
        };
        bytes as u64
    }

    /// Reads an update of kind `kind` from a record's body.
    ///
    /// # Errors
    /// [`DecodeError`] where the bytes are not what [`Update::encode`] writes.
    pub fn decode(kind: u8, body: &'a [u8]) -> Result<Self, DecodeError> {
        let mut r = Reader(body);
        let update = match kind {
            k if k == UpdateKind::Write as u8 => {
                let (inode, offset, at, strip) = (r.inode()?, r.offset()?, r.time()?, r.flag()?);
                Self::Write { inode, offset, at, strip, data: r.rest() }
            }
            k if k == UpdateKind::Create as u8 => Self::Create(r.create()?),
            k if k == UpdateKind::Link as u8 => {
                let (inode, parent, at) = (r.inode()?, r.inode()?, r.time()?);
                Self::Link { inode, parent, name: r.entry_name()?, at }
            }
            k if k == UpdateKind::Unlink as u8 || k == UpdateKind::RemoveDirectory as u8 => {
                let (inode, parent, at, release) = (r.inode()?, r.inode()?, r.time()?, r.flag()?);
                let name = r.entry_name()?;
                if k == UpdateKind::Unlink as u8 {
                    Self::Unlink { inode, parent, name, release, at }
                } else {
                    Self::RemoveDirectory { inode, parent, name, release, at }
                }
            }
            k if k == UpdateKind::Rename as u8 => Self::Rename(r.rename()?),
            k if k == UpdateKind::Resize as u8 => {
                Self::Resize { inode: r.inode()?, size: r.offset()?, at: r.time()?, strip: r.flag()? }
            }
            k if k == UpdateKind::Allocate as u8 => {
                let (inode, offset, length, at) = (r.inode()?, r.offset()?, r.offset()?, r.time()?);
                Self::Allocate { inode, how: r.allocation()?, offset, length, strip: r.flag()?, at }
            }
            k if k == UpdateKind::SetAttributes as u8 => Self::SetAttributes(r.set_attributes()?),
            k if k == UpdateKind::SetXattr as u8 => {
                let (inode, at, mode, name) = (r.inode()?, r.time()?, r.optional_mode()?, r.xattr_name()?);
                let length = r.u32()? as usize;
                if length > XATTR_VALUE_MAX {
                    return Err(DecodeError::OutOfRange);
                }
                Self::SetXattr { inode, name, value: r.bytes(length)?, mode, at }
            }
            k if k == UpdateKind::RemoveXattr as u8 => {
                let (inode, at, mode) = (r.inode()?, r.time()?, r.optional_mode()?);
                Self::RemoveXattr { inode, name: r.xattr_name()?, mode, at }
            }
            k if k == UpdateKind::Accessed as u8 => Self::Accessed { inode: r.inode()?, at: r.time()? },
            k if k == UpdateKind::Release as u8 => Self::Release { inode: r.inode()? },
            k if k == UpdateKind::Depend as u8 => {
                Self::Depend { session: SessionId(r.u64()?), position: LogPosition(r.u64()?) }
            }
            k if k == UpdateKind::SetQuota as u8 => {
                Self::SetQuota { inode: r.inode()?, at: r.time()?, quota: r.quota()? }
            }
            other => return Err(DecodeError::UnknownKind(other)),
        };
        if r.0.is_empty() { Ok(update) } else { Err(DecodeError::WrongLength) }
    }
}

/// Bytes in the making: in `short` while they fit there, then all of them in `long`.
#[derive(Debug)]
struct Writer {
    short: [u8; SHORT_BYTES],
    length: usize,
    long: Vec<u8>,
}

impl Writer {
    #[inline]
    fn written(&self) -> &[u8] {
        if self.long.is_empty() { &self.short[..self.length] } else { &self.long }
    }
    #[inline]
    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        match self.short.get_mut(self.length..self.length + bytes.len()) {
            Some(place) if self.long.is_empty() => {
                place.copy_from_slice(bytes);
                self.length += bytes.len();
            }
            _ => self.lengthen(bytes),
        }
        self
    }
    #[cold]
    fn lengthen(&mut self, bytes: &[u8]) {
        if self.long.is_empty() {
            self.long.extend_from_slice(&self.short[..self.length]);
        }
        self.long.extend_from_slice(bytes);
    }
    #[inline]
    fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }
    #[inline]
    fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    #[inline]
    fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    #[inline]
    fn time(&mut self, time: Timestamp) -> &mut Self {
        self.bytes(&time.seconds.to_le_bytes()).u32(time.nanoseconds)
    }
    fn name(&mut self, name: &[u8]) -> &mut Self {
        self.u8(name.len() as u8).bytes(name)
    }
    fn short(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes(&(bytes.len() as u16).to_le_bytes()).bytes(bytes)
    }
    fn set_attributes(&mut self, set: &SetAttributes) {
        let mask = u8::from(set.mode.is_some())
            | u8::from(set.uid.is_some()) << 1
            | u8::from(set.gid.is_some()) << 2
            | u8::from(set.accessed.is_some()) << 3
            | u8::from(set.modified.is_some()) << 4;
        self.u64(set.inode.0).time(set.at).u8(mask);
        for value in [set.mode, set.uid, set.gid].into_iter().flatten() {
            self.u32(value);
        }
        for value in [set.accessed, set.modified].into_iter().flatten() {
            self.time(value);
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (head, tail) = self.0.split_at_checked(length).ok_or(DecodeError::WrongLength)?;
        self.0 = tail;
        Ok(head)
    }
    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        self.bytes(N)?.try_into().map_err(|_| DecodeError::WrongLength)
    }
    fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }
    fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    fn flag(&mut self) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::OutOfRange),
        }
    }
    fn inode(&mut self) -> Result<InodeId, DecodeError> {
        match self.u64()? {
            0 => Err(DecodeError::OutOfRange),
            number => Ok(InodeId(number)),
        }
    }
    fn quota(&mut self) -> Result<QuotaId, DecodeError> {
        let quota = QuotaId(self.u64()?);
        if quota.is_storable() { Ok(quota) } else { Err(DecodeError::OutOfRange) }
    }
    fn offset(&mut self) -> Result<u64, DecodeError> {
        let value = self.u64()?;
        if value > FILE_SIZE_MAX { Err(DecodeError::OutOfRange) } else { Ok(value) }
    }
    fn time(&mut self) -> Result<Timestamp, DecodeError> {
        let (seconds, nanoseconds) = (i64::from_le_bytes(self.array()?), self.u32()?);
        if nanoseconds >= 1_000_000_000 {
            return Err(DecodeError::OutOfRange);
        }
        Ok(Timestamp { seconds, nanoseconds })
    }
    fn mode(&mut self) -> Result<u32, DecodeError> {
        let mode = self.u32()?;
        if mode & !MODE_PERMISSIONS == 0 { Ok(mode) } else { Err(DecodeError::OutOfRange) }
    }
    fn optional_mode(&mut self) -> Result<Option<u32>, DecodeError> {
        match self.u32()? {
            MODE_UNCHANGED => Ok(None),
            mode if mode & !MODE_PERMISSIONS == 0 => Ok(Some(mode)),
            _ => Err(DecodeError::OutOfRange),
        }
    }
    fn entry_name(&mut self) -> Result<&'a [u8], DecodeError> {
        let length = self.u8()?;
        let name = self.bytes(length.into())?;
        Name::check(name).map_err(|_| DecodeError::BadName)?;
        Ok(name)
    }
    fn xattr_name(&mut self) -> Result<&'a [u8], DecodeError> {
        let length = usize::from(self.u8()?);
        let name = self.bytes(length)?;
        if length == 0 || length > XATTR_NAME_MAX || name.contains(&0) {
            return Err(DecodeError::BadName);
        }
        Ok(name)
    }
    fn short(&mut self, most: usize) -> Result<&'a [u8], DecodeError> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        if length > most { Err(DecodeError::OutOfRange) } else { self.bytes(length) }
    }
    fn allocation(&mut self) -> Result<Allocation, DecodeError> {
        Allocation::ALL.get(usize::from(self.u8()?)).copied().ok_or(DecodeError::OutOfRange)
    }
    fn create(&mut self) -> Result<Create<'a>, DecodeError> {
        let (inode, parent, at) = (self.inode()?, self.inode()?, self.time()?);
        let (mode, uid, gid, device) = (self.mode()?, self.u32()?, self.u32()?, self.u64()?);
        let kind = FileKind::from_u8(self.u8()?).ok_or(DecodeError::OutOfRange)?;
        let length = self.u8()?;
        let name = self.bytes(length.into())?;
        if length != 0 {
            Name::check(name).map_err(|_| DecodeError::BadName)?;
        }
        let target = self.short(SYMLINK_MAX)?;
        if target.is_empty() == (kind == FileKind::Symlink) || target.contains(&0) {
            return Err(DecodeError::OutOfRange);
        }
        let (acl_access, acl_default) = (self.short(usize::from(u16::MAX))?, self.short(usize::from(u16::MAX))?);
        Ok(Create { inode, parent, name, kind, mode, uid, gid, device, at, target, acl_access, acl_default })
    }
    fn rename(&mut self) -> Result<Rename<'a>, DecodeError> {
        let (parent, inode, new_parent) = (self.inode()?, self.inode()?, self.inode()?);
        let target = Some(InodeId(self.u64()?)).filter(|target| target.0 != 0);
        let (at, flags) = (self.time()?, self.u8()?);
        let (exchange, release, leaves) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
        if flags > 7 || exchange && leaves {
            return Err(DecodeError::OutOfRange);
        }
        let (name, new_name) = (self.entry_name()?, self.entry_name()?);
        let whiteout = leaves.then(|| self.whiteout()).transpose()?;
        Ok(Rename { parent, name, inode, new_parent, new_name, target, exchange, whiteout, release, at })
    }
    fn whiteout(&mut self) -> Result<Whiteout<'a>, DecodeError> {
        let (inode, uid, gid) = (self.inode()?, self.u32()?, self.u32()?);
        Ok(Whiteout { inode, uid, gid, acl_access: self.short(usize::from(u16::MAX))? })
    }
    fn set_attributes(&mut self) -> Result<SetAttributes, DecodeError> {
        let (inode, at, mask) = (self.inode()?, self.time()?, self.u8()?);
        if mask > 31 {
            return Err(DecodeError::OutOfRange);
        }
        Ok(SetAttributes {
            inode,
            at,
            mode: (mask & 1 != 0).then(|| self.mode()).transpose()?,
            uid: (mask & 2 != 0).then(|| self.u32()).transpose()?,
            gid: (mask & 4 != 0).then(|| self.u32()).transpose()?,
            accessed: (mask & 8 != 0).then(|| self.time()).transpose()?,
            modified: (mask & 16 != 0).then(|| self.time()).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests;
