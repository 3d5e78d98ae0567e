//! Reads, writes, copies, and the offset of an open file.

use std::sync::MutexGuard;

use ashlar_libfs::{Outcome, WriteAt, check_copied_range};
use ashlar_types::{Errno, FILE_SIZE_MAX, InodeId};

use crate::numbered_file::NumberedFile;
use crate::pointers::TRANSFER_MAX;
use crate::session::{CapiSession, locked};

/// The most bytes that one call writes from several parts.
///
/// The caller continues from there, as after any short write.
const JOINED_MAX: usize = 64 << 20;

/// The position of a transfer, as the caller gives it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TransferOffset {
    /// At the open file's offset, which the transfer moves.
    Offset,
    /// At a given offset.
    Given(i64),
}

impl TransferOffset {
    /// Fails with `EINVAL` if the offset is not valid. The kernel checks that before the descriptor.
    fn check(self) -> Outcome<()> {
        if matches!(self, Self::Given(..0)) { Err(Errno::EINVAL) } else { Ok(()) }
    }
}

/// The position of a transfer, locked for its duration if it moves the open file's offset.
enum LockedOffset<'a> {
    Moving(MutexGuard<'a, u64>),
    Fixed(u64),
}

impl<'a> LockedOffset<'a> {
    /// Locks the position of a transfer of so many bytes.
    fn of(file: &'a NumberedFile, at: TransferOffset, bytes: usize) -> Outcome<Self> {
        let spot = match at {
            TransferOffset::Offset => Self::Moving(locked(&file.offset)),
            TransferOffset::Given(offset) => Self::Fixed(u64::try_from(offset).map_err(|_| Errno::EINVAL)?),
        };
        match spot.offset().checked_add(bytes as u64) {
            Some(end) if end <= FILE_SIZE_MAX => Ok(spot),
            _ => Err(Errno::EINVAL),
        }
    }

    fn offset(&self) -> u64 {
        match self {
            Self::Moving(offset) => **offset,
            Self::Fixed(offset) => *offset,
        }
    }

    fn move_to(&mut self, to: u64) {
        match self {
            Self::Moving(offset) => **offset = to,
            Self::Fixed(offset) => *offset = to,
        }
    }
}

impl CapiSession {
    /// Returns the error of a transfer whose bytes are wrong in the way that `errno` says.
    ///
    /// The kernel checks the offset and the open file before the bytes.
    pub(crate) fn refusal(&self, file: i32, at: TransferOffset, writes: bool, errno: Errno) -> Errno {
        let validate = || {
            at.check()?;
            let file = self.file(file)?;
            if if writes { file.may_write() } else { file.may_read() } { Err(errno) } else { Err(Errno::EBADF) }
        };
        let validated: Outcome<()> = validate();
        validated.err().unwrap_or(errno)
    }

    /// Reads, for all forms of `read`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn read(&self, file: i32, at: TransferOffset, parts: &mut [&mut [u8]]) -> Outcome<usize> {
        at.check()?;
        let file = self.file(file)?;
        if !file.may_read() {
            return Err(Errno::EBADF);
        }
        // If nothing is to be read, the kernel does not check the source.
        if parts.is_empty() {
            return Ok(0);
        }
        if file.is_directory {
            return Err(Errno::EISDIR);
        }
        let mut spot = LockedOffset::of(&file, at, parts.iter().map(|part| part.len()).sum())?;
        let start = spot.offset();
        let mut done = 0;
        for part in parts {
            let room = part.len().min(TRANSFER_MAX - done);
            match self.fs.read(file.inode, start + done as u64, &mut part[..room]) {
                Ok(count) => {
                    done += count;
                    if count < part.len() {
                        break;
                    }
                }
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        spot.move_to(start + done as u64);
        Ok(done)
    }

    /// Writes, for all forms of `write`. One call is one write, so that no reader sees a part of it.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn write(&self, file: i32, at: TransferOffset, parts: &[&[u8]]) -> Outcome<usize> {
        at.check()?;
        let file = self.file(file)?;
        if !file.may_write() {
            return Err(Errno::EBADF);
        }
        let mut spot = LockedOffset::of(&file, at, parts.iter().map(|part| part.len()).sum())?;
        let joined;
        let data = match parts {
            [] => &[],
            [one] => *one,
            parts => {
                joined = join(parts)?;
                &joined[..]
            }
        };
        if data.is_empty() {
            return Ok(0);
        }
        let at = if file.appends() { WriteAt::End } else { WriteAt::Offset(spot.offset()) };
        let data = &data[..data.len().min(TRANSFER_MAX)];
        let written =
            self.fs.write_within(&self.admitted, file.inode, at, data, self.clears_set_id(), self.file_limit)?;
        spot.move_to(written.offset + written.bytes as u64);
        if file.is_synchronous() {
            self.fs.sync_inode(file.inode)?;
        }
        Ok(written.bytes)
    }

    /// `copy_file_range`; an offset that the caller gives is moved.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn copy(
        &self,
        from: (i32, Option<&mut i64>),
        to: (i32, Option<&mut i64>),
        bytes: usize,
        flags: u32,
    ) -> Outcome<usize> {
        let (source, target) = (self.file(from.0)?, self.file(to.0)?);
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        if source.is_directory || target.is_directory {
            return Err(Errno::EISDIR);
        }
        if !source.may_read() || !target.may_write() || target.appends() {
            return Err(Errno::EBADF);
        }
        // The two may be one open file, whose offset can't be locked twice.
        let start = |file: &NumberedFile, given: &Option<&mut i64>| match given {
            Some(offset) => offset.cast_unsigned(),
            None => *locked(&file.offset),
        };
        let (source_start, target_start) = (start(&source, &from.1), start(&target, &to.1));
        check_copied_range(source_start, target_start, bytes as u64)?;
        let left = self.size(source.inode)?.saturating_sub(source_start);
        let length = left.min(bytes.min(TRANSFER_MAX) as u64);
        if length == 0 {
            return Ok(0);
        }
        let (user, strip, limit) = (&self.admitted, self.clears_set_id(), self.file_limit);
        let (input, output) = (source.inode, target.inode);
        let copied =
            self.fs.copy_range_within(user, input, source_start, output, target_start, length, strip, limit)?;
        let moved = |file: &NumberedFile, given: Option<&mut i64>, to: u64| match given {
            Some(offset) => *offset = to as i64,
            None => *locked(&file.offset) = to,
        };
        moved(&source, from.1, source_start + copied);
        moved(&target, to.1, target_start + copied);
        if target.is_synchronous() {
            self.fs.sync_inode(output)?;
        }
        Ok(copied as usize)
    }

    fn size(&self, inode: InodeId) -> Outcome<u64> {
        Ok(self.fs.attributes(inode)?.inode.size)
    }

    /// `lseek`.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn seek(&self, file: i32, offset: i64, whence: i32) -> Outcome<i64> {
        let file = self.file(file)?;
        let mut place = locked(&file.offset);
        *place = self.fs.seek_from(file.inode, *place, offset, whence)?;
        i64::try_from(*place).map_err(|_| Errno::EOVERFLOW)
    }

    /// `fsync` and similar calls.
    ///
    /// They make persistent every session's changes to the file and, since the log has one order, all changes of this
    /// session.
    ///
    /// # Errors
    /// As the header says.
    pub(crate) fn sync_file(&self, file: i32) -> Outcome<()> {
        self.fs.sync_inode(self.file(file)?.inode)
    }
}

fn join(parts: &[&[u8]]) -> Outcome<Vec<u8>> {
    let length = parts.iter().map(|part| part.len()).sum::<usize>().min(JOINED_MAX);
    let mut joined = Vec::new();
    joined.try_reserve_exact(length).map_err(|_| Errno::ENOMEM)?;
    for part in parts {
        joined.extend_from_slice(&part[..part.len().min(length - joined.len())]);
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_write_are_joined() {
        assert_eq!(join(&[b"one ", b"", b"two"]), Ok(b"one two".to_vec()));
        let large = vec![1; JOINED_MAX - 1];
        assert_eq!(join(&[&large, b"two"]).map(|joined| joined.len()), Ok(JOINED_MAX));
    }
}
