//! The numbers by which a session and SharedFS name the session's mappings of files.

/// The numbers of a session's mappings.
#[derive(Debug, Default)]
pub(crate) struct MappingNumbers {
    next: u32,
    /// Numbers of requests that failed, as far as LibFS knows.
    unsure: Vec<u32>,
}

impl MappingNumbers {
    /// Returns a number for a new mapping.
    pub(crate) fn take_number(&mut self) -> u32 {
        self.unsure.pop().unwrap_or_else(|| {
            let number = self.next;
            self.next = number.wrapping_add(1);
            number
        })
    }

    /// Records that a request with a number failed: SharedFS may have the mapping all the same.
    ///
    /// The next request with this number ends that mapping.
    pub(crate) fn mark_unsure(&mut self, number: u32) {
        self.unsure.push(number);
    }
}
