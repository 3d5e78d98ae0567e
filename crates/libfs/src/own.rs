//! LibFS's own descriptors inside a program that doesn't know of them.
//!
//! A program may close all descriptor numbers, or put a file of its own at any of them. So LibFS reports each of its
//! descriptors to the front end, from its creation until it is closed. The front end leaves them open and refuses them
//! to the program.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, RawFd};

/// How LibFS keeps its descriptors.
#[derive(Clone, Copy, Debug)]
pub struct OwnDescriptors {
    /// The least number of a lasting descriptor: inside a program, lower numbers are the program's.
    pub from: i32,
    /// Receives each new descriptor.
    pub note: fn(RawFd),
    /// Receives each descriptor that is about to be closed.
    pub forget: fn(RawFd),
}

impl OwnDescriptors {
    /// For a process that knows LibFS's descriptors: any number will do, and no report is needed.
    pub const KNOWN: Self = Self { from: 0, note: |_| {}, forget: |_| {} };
}

/// A value with a descriptor that is LibFS's own; reported until it is dropped.
#[derive(Debug)]
pub(crate) struct Own<T: AsRawFd> {
    own: OwnDescriptors,
    value: T,
}

impl<T: AsRawFd> Own<T> {
    pub(crate) fn new(value: T, own: OwnDescriptors) -> Self {
        (own.note)(value.as_raw_fd());
        Self { own, value }
    }
}

impl<T: AsRawFd> Drop for Own<T> {
    fn drop(&mut self) {
        (self.own.forget)(self.value.as_raw_fd());
    }
}

impl<T: AsRawFd> Deref for Own<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: AsRawFd> DerefMut for Own<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Mutex;

    use super::*;

    static TOLD: Mutex<Vec<(RawFd, bool)>> = Mutex::new(Vec::new());

    #[test]
    fn who_serves_the_program_is_told_of_each() {
        let own = OwnDescriptors {
            from: 0,
            note: |number| TOLD.lock().expect("told").push((number, true)),
            forget: |number| TOLD.lock().expect("told").push((number, false)),
        };
        let file = File::open("/dev/null").expect("opened");
        let number = file.as_raw_fd();
        let kept = Own::new(file, own);
        assert_eq!(*TOLD.lock().expect("told"), [(number, true)]);
        drop(kept);
        assert_eq!(*TOLD.lock().expect("told"), [(number, true), (number, false)]);
    }
}
