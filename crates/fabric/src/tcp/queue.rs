//! Bytes that wait to be sent.

use std::collections::VecDeque;
use std::io::IoSlice;

/// Short frames share a chunk of this size.
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks that one system call sends.
const SLICES: usize = 16;

/// Bytes that wait to be sent on a link. Its user keeps the bound.
#[derive(Default)]
pub(super) struct SendQueue {
    chunks: VecDeque<Vec<u8>>,
    /// Bytes of the first chunk that were sent.
    head: usize,
    pushed: u64,
    sent: u64,
}

impl SendQueue {
    /// Bytes that wait.
    pub(super) const fn bytes(&self) -> usize {
        (self.pushed - self.sent) as usize
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.pushed == self.sent
    }

    /// The end of all bytes that were ever pushed.
    pub(super) const fn end(&self) -> u64 {
        self.pushed
    }

    /// The end of those that were sent.
    pub(super) const fn sent(&self) -> u64 {
        self.sent
    }

    /// Adds parts without their first `skipped` bytes.
    pub(super) fn push(&mut self, parts: &[&[u8]], mut skipped: usize) {
        for part in parts {
            let rest = &part[skipped.min(part.len())..];
            skipped -= part.len() - rest.len();
            self.push_part(rest);
        }
    }

    fn push_part(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        match self.chunks.back_mut() {
            Some(last) if last.len() + bytes.len() <= CHUNK_BYTES => last.extend_from_slice(bytes),
            _ => self.chunks.push_back(bytes.to_vec()),
        }
        self.pushed += bytes.len() as u64;
    }

    /// Hands the first bytes to a function that sends some of them, and returns what it returned.
    pub(super) fn with_slices<R>(&self, send: impl FnOnce(&[IoSlice<'_>]) -> R) -> R {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let mut head = self.head;
        for (slice, chunk) in slices.iter_mut().zip(&self.chunks) {
            *slice = IoSlice::new(&chunk[head..]);
            head = 0;
        }
        send(&slices[..self.chunks.len().min(SLICES)])
    }

    /// Drops bytes that were sent.
    pub(super) fn advance(&mut self, mut count: usize) {
        self.sent += count as u64;
        while let Some(first) = self.chunks.front() {
            let left = first.len() - self.head;
            if count < left {
                self.head += count;
                return;
            }
            count -= left;
            self.head = 0;
            self.chunks.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn queue_sends_all_bytes_in_order(
            lengths in prop::collection::vec(0..3000usize, 1..60),
            skipped in 0..50usize,
            counts in prop::collection::vec(1..70_000usize, 1..20),
        ) {
            let mut queue = SendQueue::default();
            let parts: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(at, length)| vec![at as u8; *length]).collect();
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let all = parts.concat();
            let skipped = skipped.min(all.len());
            queue.push(&parts, skipped);
            let mut sent = Vec::new();
            for count in counts.into_iter().cycle() {
                if queue.is_empty() {
                    break;
                }
                let (taken, bytes) = queue.with_slices(|slices| {
                    let bytes = slices.iter().flat_map(|slice| slice.iter().copied()).take(count).collect::<Vec<_>>();
                    (bytes.len(), bytes)
                });
                queue.advance(taken);
                sent.extend(bytes);
            }
            prop_assert_eq!(&sent[..], &all[skipped..]);
        }
    }
}
