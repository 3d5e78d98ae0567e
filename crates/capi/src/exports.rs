//! The functions of the header.
//!
//! Each function converts C's arguments, calls a safe function, and converts its result for C.

mod attributes;
mod data;
mod names;
mod sessions;
mod xattrs;

use std::panic::{AssertUnwindSafe, catch_unwind};

use ashlar_libfs::Outcome;
use ashlar_types::Errno;

use crate::pointers::Output;

/// A number that C receives: a result, or a negative errno.
trait Returned: From<i8> {
    fn from_errno(errno: Errno) -> Self;
    fn from_length(length: usize) -> Self;
}

macro_rules! returned {
    ($($number:ty),*) => {
        $(impl Returned for $number {
            fn from_errno(errno: Errno) -> Self {
                -(errno.0 as Self)
            }

            fn from_length(length: usize) -> Self {
                Self::try_from(length).unwrap_or(Self::MAX)
            }
        })*
    };
}

returned!(i32, i64, isize);

/// Runs the body of an exported function. No panic unwinds into its caller.
fn call<R: Returned>(act: impl FnOnce() -> Outcome<R>) -> R {
    // A panic leaves behind LibFS's state, which locks and leases protect, and counts of open files.
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(result)) => result,
        Ok(Err(errno)) => R::from_errno(errno),
        Err(payload) => {
            // Dropping the payload could panic once more.
            std::mem::forget(payload);
            R::from_errno(Errno::EIO)
        }
    }
}

/// Runs a body like [`call`], which returns nothing but success.
fn call_for_success(act: impl FnOnce() -> Outcome<()>) -> i32 {
    call(|| act().map(|()| 0))
}

/// Stores bytes of unknown length, or returns their length if the caller gives no room.
fn store_sized(bytes: &[u8], room: &mut Output, length: usize) -> Outcome<isize> {
    if length > 0 {
        let room = room.bytes(length)?.get_mut(..bytes.len()).ok_or(Errno::ERANGE)?;
        room.copy_from_slice(bytes);
    }
    Ok(isize::from_length(bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_unwinds_into_c() {
        std::panic::set_hook(Box::new(|_| {}));
        assert_eq!(call::<i32>(|| panic!("a defect")), -libc::EIO);
        assert_eq!(call::<isize>(|| std::panic::panic_any(7)), -(libc::EIO as isize));
        // The test harness's own hook is the default one.
        drop(std::panic::take_hook());
        assert_eq!(call::<i64>(|| Err(Errno::ENXIO)), -i64::from(libc::ENXIO));
        assert_eq!(call_for_success(|| Ok(())), 0);
    }
}
