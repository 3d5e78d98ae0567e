//! The functions of the header. Each takes C's arguments apart, has a safe one do the work, and puts its result into C's form.

mod attributes;
mod data;
mod names;
mod sessions;
mod xattrs;

use std::panic::{AssertUnwindSafe, catch_unwind};

use ashlar_libfs::Outcome;
use ashlar_types::Errno;

use crate::pointers::Output;

/// A number that C gets: a result, or a negative errno.
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

/// Does what a function does. Nothing unwinds into its caller.
fn call<R: Returned>(act: impl FnOnce() -> Outcome<R>) -> R {
    // What a panic leaves behind are LibFS's states, which stand under locks and leases, and counts of open files.
    match catch_unwind(AssertUnwindSafe(act)) {
        Ok(Ok(result)) => result,
        Ok(Err(errno)) => R::from_errno(errno),
        Err(payload) => {
            // It could panic once more when it's dropped.
            std::mem::forget(payload);
            R::from_errno(Errno::EIO)
        }
    }
}

/// As [`call`], for what has no result but that it's done.
fn done(act: impl FnOnce() -> Outcome<()>) -> i32 {
    call(|| act().map(|()| 0))
}

/// Puts bytes of unknown length where there is room for them, or tells their length where there is none given.
fn sized(bytes: &[u8], room: &mut Output, length: usize) -> Outcome<isize> {
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
        // The test harness's own is the default one.
        drop(std::panic::take_hook());
        assert_eq!(call::<i64>(|| Err(Errno::ENXIO)), -i64::from(libc::ENXIO));
        assert_eq!(done(|| Ok(())), 0);
    }
}
