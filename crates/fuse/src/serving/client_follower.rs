//! Binds a serving thread to its client's core.
//!
//! To wake a thread that sleeps on another core takes an interrupt from core to core, and one back for the answer. That
//! takes longer than most requests; in a virtual machine it takes many times as long. A thread that waits on the
//! client's core is just switched to. The scheduler does not choose that core by itself: it prefers to wake a thread on
//! an idle core. So a thread that serves one client alone, with small requests, follows it: it may run only on the
//! client's core, for as long as that goes on.
//!
//! If several clients ask, or much data is moved, every core may serve: then there is work to be done at the same time.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// After so many requests the thread decides anew which client to follow, and to which core.
const WINDOW: u32 = 32;
/// So many of them must come from one thread …
const CLIENT_MIN: u32 = 28;
/// … and move no more bytes than this on average.
const SMALL_BYTES: u64 = 8 << 10;
/// The field of `/proc/TID/stat` for the core where the thread ran last, counted from the field after the name.
const STAT_CORE: usize = 36;

/// The recent clients of one serving thread.
#[derive(Debug)]
pub(crate) struct ClientFollower {
    /// The cores that it may use; `None` if it has only one.
    everywhere: Option<CpuSet>,
    /// The core that it is bound to.
    core: Option<usize>,
    /// The client thread, by its number.
    client: u32,
    stat: Option<File>,
    request_count: u32,
    client_count: u32,
    bytes: u64,
}

impl ClientFollower {
    /// Makes the follower of the calling thread.
    pub(crate) fn new() -> Self {
        let everywhere = sched_getaffinity(None).ok().filter(|cores| cores.count() > 1);
        Self { everywhere, core: None, client: 0, stat: None, request_count: 0, client_count: 0, bytes: 0 }
    }

    /// Counts a served request of the thread `client`, which moved so many bytes. A request that the kernel makes on
    /// its own behalf (`client` is 0) does not count.
    pub(crate) fn record_request(&mut self, client: u32, bytes: usize) {
        if client == 0 || self.everywhere.is_none() {
            return;
        }
        if self.client == 0 {
            (self.client, self.stat) = (client, None);
        }
        self.request_count += 1;
        self.client_count += u32::from(self.client == client);
        self.bytes += bytes as u64;
        if self.request_count == WINDOW {
            if self.client_count >= CLIENT_MIN && self.bytes <= u64::from(WINDOW) * SMALL_BYTES {
                self.follow_client();
            } else {
                self.stop_following();
            }
            (self.request_count, self.client_count, self.bytes) = (0, 0, 0);
        }
    }

    fn follow_client(&mut self) {
        let Some(core) = self.core_of_client() else { return self.stop_following() };
        if self.core == Some(core) {
            return;
        }
        let mut there = CpuSet::new();
        there.set(core);
        match sched_setaffinity(None, &there) {
            Ok(()) => self.core = Some(core),
            // The client may use cores that this thread may not.
            Err(_) => self.stop_following(),
        }
    }

    /// Follows no client: the thread may run on all its cores again.
    fn stop_following(&mut self) {
        (self.client, self.stat) = (0, None);
        if let (Some(everywhere), Some(_)) = (&self.everywhere, self.core.take()) {
            if let Err(errno) = sched_setaffinity(None, everywhere) {
                tracing::debug!(%errno, "a serving thread stays bound to its core");
            }
        }
    }

    /// Returns the core on which the client ran last.
    fn core_of_client(&mut self) -> Option<usize> {
        if self.stat.is_none() {
            self.stat = File::open(format!("/proc/{}/stat", self.client)).ok();
        }
        let mut text = [0; 1024];
        let count = self.stat.as_ref()?.read_at(&mut text, 0).ok()?;
        parse_core(text.get(..count)?).filter(|core| *core < CpuSet::MAX_CPU)
    }
}

/// Returns the core that the text of a `stat` file names.
fn parse_core(stat: &[u8]) -> Option<usize> {
    // The name may hold any characters, closing brackets too.
    let behind = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields = std::str::from_utf8(stat.get(behind..)?).ok()?;
    fields.split_ascii_whitespace().nth(STAT_CORE)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_thread() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get() as u32
    }

    fn allowed_cores() -> u32 {
        sched_getaffinity(None).expect("an affinity").count()
    }

    #[test]
    fn single_client_is_followed_until_another_comes() {
        let mut follower = ClientFollower::new();
        let before = allowed_cores();
        for _ in 0..WINDOW {
            follower.record_request(own_thread(), 100);
        }
        if before > 1 {
            assert!(follower.core.is_some());
            assert_eq!(allowed_cores(), 1);
        }
        for number in 0..WINDOW {
            follower.record_request(if number % 2 == 0 { own_thread() } else { 1 }, 100);
        }
        assert_eq!((follower.core, allowed_cores()), (None, before));
    }

    #[test]
    fn client_with_much_data_or_gone_is_not_followed() {
        let before = allowed_cores();
        let mut follower = ClientFollower::new();
        for _ in 0..2 * WINDOW {
            follower.record_request(own_thread(), 1 << 20);
        }
        assert_eq!((follower.core, allowed_cores()), (None, before));
        // No process has so high a number.
        for _ in 0..2 * WINDOW {
            follower.record_request(u32::MAX, 100);
        }
        assert_eq!((follower.core, allowed_cores()), (None, before));
    }

    #[test]
    fn core_is_parsed_after_name_with_brackets() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        let stat = format!("77 (a) (b c) {}", fields.join(" "));
        assert_eq!(parse_core(stat.as_bytes()), Some(39));
        assert_eq!(parse_core(b"77 (a) R 1"), None);
        assert_eq!(parse_core(b""), None);
    }
}
