//! LibFS's own descriptors inside a program that doesn't know of them.
//!
//! A program may close all descriptor numbers, or put a file of its own at any of them. So LibFS reports each of its
//! descriptors to the front end, from its creation until it is closed. The front end leaves them open and refuses them
//! to the program.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, RawFd};

/// How LibFS keeps its descriptors.
#[derive(Clone, Copy, Debug)]
pub struct DescriptorPolicy {
    /// The least number of a lasting descriptor: inside a program, lower numbers are the program's.
    pub from: i32,
    /// Receives each new descriptor.
    pub note: fn(RawFd),
    /// Receives each descriptor that is about to be closed.
    pub forget: fn(RawFd),
}

impl DescriptorPolicy {
    /// For a process that knows LibFS's descriptors: any number will do, and no report is needed.
    pub const ANY: Self = Self { from: 0, note: |_| {}, forget: |_| {} };
}

/// A value with a descriptor that is LibFS's own; reported until it is dropped.
#[derive(Debug)]
pub(crate) struct OwnDescriptor<T: AsRawFd> {
    own: DescriptorPolicy,
    value: T,
}

impl<T: AsRawFd> OwnDescriptor<T> {
    pub(crate) fn new(value: T, own: DescriptorPolicy) -> Self {
        (own.note)(value.as_raw_fd());
        Self { own, value }
    }
}

impl<T: AsRawFd> Drop for OwnDescriptor<T> {
    fn drop(&mut self) {
        (self.own.forget)(self.value.as_raw_fd());
    }
}

impl<T: AsRawFd> Deref for OwnDescriptor<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: AsRawFd> DerefMut for OwnDescriptor<T> {
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

    static REPORTS: Mutex<Vec<(RawFd, bool)>> = Mutex::new(Vec::new());

    #[test]
    fn own_descriptor_is_reported_until_closed() {
        let own = DescriptorPolicy {
            from: 0,
            note: |number| REPORTS.lock().expect("locked").push((number, true)),
            forget: |number| REPORTS.lock().expect("locked").push((number, false)),
        };
        let file = File::open("/dev/null").expect("opened");
        let number = file.as_raw_fd();
        let kept = OwnDescriptor::new(file, own);
        assert_eq!(*REPORTS.lock().expect("locked"), [(number, true)]);
        drop(kept);
        assert_eq!(*REPORTS.lock().expect("locked"), [(number, true), (number, false)]);
    }
}
