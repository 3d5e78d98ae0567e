//! C's pointers, as the exported functions take them.
//!
//! Each type is one pointer of C's, and only C makes one. The caller promises that it leads to the value that the
//! header names, for as long as the call lasts. Every `SAFETY` here rests on that promise. The methods borrow from the
//! pointer, which lives for one call.

use std::ffi::{CStr, c_char, c_void};
use std::slice;
use std::sync::Arc;

use ashlar_libfs::Outcome;
use ashlar_types::{Errno, PATH_MAX};

use crate::directory::Stream;
use crate::session::CapiSession;

/// The most bytes of one transfer, as in the kernel.
pub(crate) const TRANSFER_MAX: usize = 0x7fff_f000;
/// The most parts of one transfer (`IOV_MAX`).
const PARTS_MAX: usize = 1024;

/// `ashlar_fs *`.
#[repr(transparent)]
pub struct SessionPointer(*mut Arc<CapiSession>);

impl SessionPointer {
    /// Returns the session, in the process that opened it.
    ///
    /// # Errors
    /// `EFAULT`, `EBADF`.
    pub(crate) fn session(&self) -> Outcome<&Arc<CapiSession>> {
        // SAFETY: by the header, it is null or was stored by `ashlar_open_fs` and not yet passed to `ashlar_close_fs`.
        let session = unsafe { self.0.as_ref() }.ok_or(Errno::EFAULT)?;
        session.check_alive()?;
        Ok(session)
    }

    /// Takes the session back for good.
    pub(crate) fn into_session(self) -> Option<Arc<CapiSession>> {
        // SAFETY: as above; by the header, this is the last call with it.
        (!self.0.is_null()).then(|| *unsafe { Box::from_raw(self.0) })
    }
}

/// `ashlar_dir *`.
#[repr(transparent)]
pub struct StreamPointer(*mut Stream);

impl StreamPointer {
    /// Returns the stream, in the process that opened it.
    ///
    /// # Errors
    /// `EFAULT`, `EBADF`.
    pub(crate) fn stream(&self) -> Outcome<&Stream> {
        // SAFETY: by the header, it is null or was stored by `ashlar_opendir` and not yet passed to `ashlar_closedir`.
        let stream = unsafe { self.0.as_ref() }.ok_or(Errno::EFAULT)?;
        stream.session.check_alive()?;
        Ok(stream)
    }

    /// Takes the stream back for good.
    pub(crate) fn into_stream(self) -> Option<Stream> {
        // SAFETY: as above; by the header, this is the last call with it.
        (!self.0.is_null()).then(|| *unsafe { Box::from_raw(self.0) })
    }
}

/// `const char *`, with a NUL at its end.
#[repr(transparent)]
pub struct TextPointer(*const c_char);

impl TextPointer {
    /// Returns its bytes, without the NUL.
    ///
    /// # Errors
    /// `EFAULT`.
    pub(crate) fn bytes(&self) -> Outcome<&[u8]> {
        if self.0.is_null() {
            return Err(Errno::EFAULT);
        }
        // SAFETY: by the header, it is a string.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// Returns it as a path.
    ///
    /// # Errors
    /// `EFAULT`, `ENAMETOOLONG`; `ENOENT` if it is empty.
    pub(crate) fn path(&self) -> Outcome<&[u8]> {
        match self.bytes()? {
            [] => Err(Errno::ENOENT),
            path if path.len() >= PATH_MAX => Err(Errno::ENAMETOOLONG),
            path => Ok(path),
        }
    }
}

/// `const void *`: bytes to be read.
#[repr(transparent)]
pub struct Input(*const c_void);

impl Input {
    /// Returns so many of the bytes.
    ///
    /// # Errors
    /// `EFAULT`.
    pub(crate) fn bytes(&self, count: usize) -> Outcome<&[u8]> {
        if self.0.is_null() {
            return if count == 0 { Ok(&[]) } else { Err(Errno::EFAULT) };
        }
        // SAFETY: by the header, so many bytes exist; the length is valid for a slice.
        Ok(unsafe { slice::from_raw_parts(self.0.cast(), count.min(isize::MAX as usize)) })
    }
}

/// `void *`: room for bytes.
#[repr(transparent)]
pub struct Output(*mut c_void);

impl Output {
    /// Returns so much of the room.
    ///
    /// # Errors
    /// `EFAULT`.
    pub(crate) fn bytes(&mut self, count: usize) -> Outcome<&mut [u8]> {
        if self.0.is_null() {
            return if count == 0 { Ok(&mut []) } else { Err(Errno::EFAULT) };
        }
        // SAFETY: by the header, so much room exists, and no other thread uses it meanwhile; the length is valid for a
        // slice.
        Ok(unsafe { slice::from_raw_parts_mut(self.0.cast(), count.min(isize::MAX as usize)) })
    }

    /// Whether it is null.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// `T *`: room for one value.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Fails if it is null, before anything is done.
    ///
    /// # Errors
    /// `EFAULT`.
    pub(crate) fn check(&self) -> Outcome<()> {
        if self.0.is_null() { Err(Errno::EFAULT) } else { Ok(()) }
    }

    /// Stores a value.
    ///
    /// # Errors
    /// `EFAULT`.
    pub(crate) fn store(&mut self, value: T) -> Outcome<()> {
        self.check()?;
        // SAFETY: by the header, a value of this type has room there.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Returns the value at the pointer, unless it is null.
    pub(crate) fn load(&self) -> Option<T> {
        // SAFETY: if a call loads a value, the header requires that one stands there.
        (!self.0.is_null()).then(|| unsafe { self.0.read() })
    }
}

/// `ashlar_fs **` and `ashlar_dir **`: room for the pointer to an opened object.
#[repr(transparent)]
pub struct OpenedPointer<T>(*mut *mut T);

impl<T> OpenedPointer<T> {
    /// Stores the object that `open` returns.
    ///
    /// # Errors
    /// `EFAULT`; those of `open`.
    pub(crate) fn store(&mut self, open: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
        if self.0.is_null() {
            return Err(Errno::EFAULT);
        }
        let opened = Box::into_raw(Box::new(open()?));
        // SAFETY: by the header, a pointer has room there.
        unsafe { self.0.write(opened) };
        Ok(())
    }
}

/// `const struct timespec *`: two times, or null.
#[repr(transparent)]
pub struct Times(*const libc::timespec);

impl Times {
    /// Returns both times, unless the pointer is null.
    pub(crate) fn load(&self) -> Option<[libc::timespec; 2]> {
        // SAFETY: by the header, it is null or leads to two times.
        (!self.0.is_null()).then(|| unsafe { self.0.cast::<[libc::timespec; 2]>().read() })
    }
}

/// `const struct iovec *`: the parts of a transfer.
#[repr(transparent)]
pub struct Parts(*const libc::iovec);

impl Parts {
    fn list(&self, count: i32) -> Outcome<&[libc::iovec]> {
        let count = usize::try_from(count).ok().filter(|count| *count <= PARTS_MAX).ok_or(Errno::EINVAL)?;
        if self.0.is_null() {
            return if count == 0 { Ok(&[]) } else { Err(Errno::EFAULT) };
        }
        // SAFETY: by the header, so many parts exist.
        let parts = unsafe { slice::from_raw_parts(self.0, count) };
        let sum = parts.iter().try_fold(0usize, |sum, part| sum.checked_add(part.iov_len));
        if sum.is_none_or(|sum| sum > isize::MAX as usize) { Err(Errno::EINVAL) } else { Ok(parts) }
    }

    /// Returns the room for bytes, part by part.
    ///
    /// # Errors
    /// `EFAULT`, `EINVAL`.
    pub(crate) fn outputs(&mut self, count: i32) -> Outcome<Vec<&mut [u8]>> {
        let mut left = TRANSFER_MAX;
        let part = |part: &libc::iovec| {
            let length = part.iov_len.min(left);
            left -= length;
            match (part.iov_base.is_null(), length) {
                (_, 0) => Ok(&mut [][..]),
                (true, _) => Err(Errno::EFAULT),
                // SAFETY: as for `Output`.
                _ => Ok(unsafe { slice::from_raw_parts_mut(part.iov_base.cast(), length) }),
            }
        };
        self.list(count)?.iter().map(part).collect()
    }

    /// Returns the bytes to be read, part by part.
    ///
    /// # Errors
    /// `EFAULT`, `EINVAL`.
    pub(crate) fn inputs(&self, count: i32) -> Outcome<Vec<&[u8]>> {
        let part = |part: &libc::iovec| match (part.iov_base.is_null(), part.iov_len) {
            (_, 0) => Ok(&[][..]),
            (true, _) => Err(Errno::EFAULT),
            // SAFETY: as for `Input`.
            (_, length) => Ok(unsafe { slice::from_raw_parts(part.iov_base.cast(), length) }),
        };
        self.list(count)?.iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null, null_mut};

    #[test]
    fn null_pointers_are_an_error_or_nothing() {
        assert_eq!(SessionPointer(null_mut()).session().err(), Some(Errno::EFAULT));
        assert!(SessionPointer(null_mut()).into_session().is_none());
        assert_eq!(StreamPointer(null_mut()).stream().err(), Some(Errno::EFAULT));
        assert_eq!(TextPointer(null()).path(), Err(Errno::EFAULT));
        assert_eq!(TextPointer(c"".as_ptr()).path(), Err(Errno::ENOENT));
        assert_eq!(TextPointer(c"a/b".as_ptr()).path(), Ok(&b"a/b"[..]));
        assert_eq!(Input(null()).bytes(1), Err(Errno::EFAULT));
        assert_eq!(Input(null()).bytes(0), Ok(&[][..]));
        assert_eq!(Output(null_mut()).bytes(1), Err(Errno::EFAULT));
        assert_eq!(Out::<u64>(null_mut()).store(1), Err(Errno::EFAULT));
        assert_eq!(Out::<u64>(null_mut()).load(), None);
        assert_eq!(OpenedPointer::<u64>(null_mut()).store(|| Ok(1)), Err(Errno::EFAULT));
        assert!(Times(null()).load().is_none());
    }

    #[test]
    fn parts_are_counted_and_bounded() {
        let part = |length| libc::iovec { iov_base: null_mut(), iov_len: length };
        let list = [part(0), part(5)];
        assert_eq!(Parts(list.as_ptr()).inputs(2), Err(Errno::EFAULT));
        assert_eq!(Parts(list.as_ptr()).inputs(1), Ok(vec![&[][..]]));
        assert_eq!(Parts(list.as_ptr()).outputs(-1).err(), Some(Errno::EINVAL));
        assert_eq!(Parts(null()).inputs(1025), Err(Errno::EINVAL));
        assert_eq!(Parts(null()).inputs(0), Ok(Vec::new()));
        let list = [part(isize::MAX as usize), part(1)];
        assert_eq!(Parts(list.as_ptr()).inputs(2), Err(Errno::EINVAL));
    }
}
