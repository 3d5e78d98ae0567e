//! The errors that POSIX calls return.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An error number as the kernel's ABI has it (`ENOENT` is 2). Every typed error of LibFS becomes one of these in one
/// place; front ends hand the number on unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident)*) => {
        #[allow(missing_docs)]
        impl Errno {
            $(pub const $name: Self = Self(libc::$name);)*

            /// Returns the symbol of the number, such as `ENOENT`.
            #[must_use]
            pub fn symbol(self) -> &'static str {
                match self.0 {
                    $(libc::$name => stringify!($name),)*
                    _ => "E?",
                }
            }
        }
    };
}

errnos! {
    EPERM ENOENT EINTR EIO ENXIO E2BIG EBADF EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR EINVAL
    ENFILE EMFILE ENOTTY ETXTBSY EFBIG ENOSPC ESPIPE EROFS EMLINK EPIPE ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS
    ENOTEMPTY ELOOP ENODATA EPROTO EOVERFLOW EOPNOTSUPP ETIMEDOUT ESTALE EDQUOT ECANCELED ENOTCONN EINPROGRESS EMSGSIZE
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.symbol(), self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

impl std::error::Error for Errno {}

impl Errno {
    /// The inode is reserved for the kernel: the caller repeats the call there.
    ///
    /// It is no number of the kernel's and never reaches a program: a front end that can get it handles it.
    pub const RESERVED: Self = Self(i32::MAX);

    /// Whether a mount with this error has lost its process: it is not connected; or, for calls that were under way,
    /// they were aborted (by a ring: cancelled).
    #[must_use]
    pub const fn is_of_dead_mount(self) -> bool {
        matches!(self.0, libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED)
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}
