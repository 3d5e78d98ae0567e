//! Waits for Ashlar's background work, which must not burden the next contender.

use std::time::{Duration, Instant};

/// Daemons are quiet if they have used no processor time for this long; a digest starts 300 ms after the last update.
const QUIET: Duration = Duration::from_millis(600);
/// The longest wait for quiet daemons.
const QUIET_MAX: Duration = Duration::from_secs(20);

/// Waits until these daemons are quiet.
pub fn settle(daemons: &[u32]) {
    let used_now = || daemons.iter().map(|daemon| processor_ticks(*daemon)).sum::<u64>();
    let deadline = Instant::now() + QUIET_MAX;
    let (mut used, mut since) = (used_now(), Instant::now());
    while since.elapsed() < QUIET && Instant::now() < deadline {
        std::thread::sleep(QUIET / 10);
        let now = used_now();
        // A tick now and then is a daemon that checks for work.
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
