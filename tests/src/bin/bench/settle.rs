//! Waiting for Ashlar's background work: it must not burden the next contender.

use std::time::{Duration, Instant};

/// Daemons have settled when they have used no processor time for so long; a digest starts 300 ms after the last
/// update.
const QUIET: Duration = Duration::from_millis(600);
/// … and are waited for no longer than this.
const QUIET_MAX: Duration = Duration::from_secs(20);

/// Waits until these daemons are quiet.
pub fn settle(daemons: &[u32]) {
    let used_now = || daemons.iter().map(|daemon| processor_ticks(*daemon)).sum::<u64>();
    let deadline = Instant::now() + QUIET_MAX;
    let (mut used, mut since) = (used_now(), Instant::now());
    while since.elapsed() < QUIET && Instant::now() < deadline {
        std::thread::sleep(QUIET / 10);
        let now = used_now();
        // A tick now and then is a daemon looking whether there is something to do.
        if now > used + 1 {
            (used, since) = (now, Instant::now());
        }
    }
}

fn processor_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    fields.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
}
