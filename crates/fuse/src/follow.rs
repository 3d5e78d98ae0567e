//! Serving on the client's core.
//!
//! To wake a thread that sleeps on another core takes an interrupt from core to core, and one back for the answer: longer than
//! most requests take, in a virtual machine many times as long. A thread that waits on the core of the one who asks is just switched
//! to. The scheduler does not see to that by itself, as it rather wakes on a core that has nothing to do. So a thread that serves
//! one client alone, with small requests, follows it: it may run on the client's core only, for as long as that goes on.
//!
//! Where several clients ask, or much is moved, every core may serve: then there is work to be done at the same time.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// After so many requests it's looked at anew whom to follow, and where to.
const WINDOW: u32 = 32;
/// So many of them must come from one thread …
const ASKED_MIN: u32 = 28;
/// … and move no more bytes than this on average.
const SMALL_BYTES: u64 = 8 << 10;
/// Which field of `/proc/TID/stat` says where the thread ran last, counted behind the name.
const STAT_CORE: usize = 36;

/// What one serving thread knows of those whom it serves.
#[derive(Debug)]
pub(crate) struct Follower {
    /// The cores that it may use; `None` where it's not to choose among them.
    everywhere: Option<CpuSet>,
    /// The one that it is bound to.
    core: Option<usize>,
    /// Who asks.
    client: u32,
    stat: Option<File>,
    seen: u32,
    asked: u32,
    bytes: u64,
}

impl Follower {
    /// For the calling thread.
    pub(crate) fn new() -> Self {
        let everywhere = sched_getaffinity(None).ok().filter(|cores| cores.count() > 1);
        Self { everywhere, core: None, client: 0, stat: None, seen: 0, asked: 0, bytes: 0 }
    }

    /// A request of the thread `client` was served, and moved so many bytes. What the kernel asks for on nobody's behalf
    /// (`client` is 0) says nothing.
    pub(crate) fn note(&mut self, client: u32, bytes: usize) {
        if client == 0 || self.everywhere.is_none() {
            return;
        }
        if self.client == 0 {
            (self.client, self.stat) = (client, None);
        }
        self.seen += 1;
        self.asked += u32::from(self.client == client);
        self.bytes += bytes as u64;
        if self.seen == WINDOW {
            if self.asked >= ASKED_MIN && self.bytes <= u64::from(WINDOW) * SMALL_BYTES {
                self.follow();
            } else {
                self.part();
            }
            (self.seen, self.asked, self.bytes) = (0, 0, 0);
        }
    }

    fn follow(&mut self) {
        let Some(core) = self.core_of_client() else { return self.part() };
        if self.core == Some(core) {
            return;
        }
        let mut there = CpuSet::new();
        there.set(core);
        match sched_setaffinity(None, &there) {
            Ok(()) => self.core = Some(core),
            // The client may use cores that this thread may not.
            Err(_) => self.part(),
        }
    }

    /// Serves whoever comes, from wherever.
    fn part(&mut self) {
        (self.client, self.stat) = (0, None);
        if let (Some(everywhere), Some(_)) = (&self.everywhere, self.core.take()) {
            if let Err(errno) = sched_setaffinity(None, everywhere) {
                tracing::debug!(%errno, "a serving thread stays on its core");
            }
        }
    }

    /// Where the client ran last.
    fn core_of_client(&mut self) -> Option<usize> {
        if self.stat.is_none() {
            self.stat = File::open(format!("/proc/{}/stat", self.client)).ok();
        }
        let mut text = [0; 1024];
        let count = self.stat.as_ref()?.read_at(&mut text, 0).ok()?;
        core_in(text.get(..count)?).filter(|core| *core < CpuSet::MAX_CPU)
    }
}

/// The core that the text of a `stat` file names.
fn core_in(stat: &[u8]) -> Option<usize> {
    // The name may hold anything, closing brackets too.
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

    fn allowed() -> u32 {
        sched_getaffinity(None).expect("told").count()
    }

    #[test]
    fn a_lone_client_is_followed_and_left_when_another_comes() {
        let mut follower = Follower::new();
        let before = allowed();
        for _ in 0..WINDOW {
            follower.note(own_thread(), 100);
        }
        if before > 1 {
            assert!(follower.core.is_some());
            assert_eq!(allowed(), 1);
        }
        for number in 0..WINDOW {
            follower.note(if number % 2 == 0 { own_thread() } else { 1 }, 100);
        }
        assert_eq!((follower.core, allowed()), (None, before));
    }

    #[test]
    fn who_moves_much_or_is_gone_is_not_followed() {
        let before = allowed();
        let mut follower = Follower::new();
        for _ in 0..2 * WINDOW {
            follower.note(own_thread(), 1 << 20);
        }
        assert_eq!((follower.core, allowed()), (None, before));
        // No process has so high a number.
        for _ in 0..2 * WINDOW {
            follower.note(u32::MAX, 100);
        }
        assert_eq!((follower.core, allowed()), (None, before));
    }

    #[test]
    fn the_core_stands_behind_a_name_with_brackets() {
        let fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        let stat = format!("77 (a) (b c) {}", fields.join(" "));
        assert_eq!(core_in(stat.as_bytes()), Some(39));
        assert_eq!(core_in(b"77 (a) R 1"), None);
        assert_eq!(core_in(b""), None);
    }
}
