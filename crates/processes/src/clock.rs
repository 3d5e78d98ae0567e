//! The machine's clocks, and the state of a socket's peer.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use ashlar_node::NodeTime;
use ashlar_types::Timestamp;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

/// Clock ticks in a second, by which the kernel tells when processes started (`USER_HZ`).
const TICKS_PER_SECOND: u64 = 100;

/// Returns the time since boot.
///
/// The clock runs through suspension and is the same for all processes.
pub fn boot_time() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Returns the time as a node takes it.
pub fn now() -> NodeTime {
    let wall = clock_gettime(ClockId::Realtime);
    let wall = Timestamp { seconds: wall.tv_sec, nanoseconds: wall.tv_nsec as u32 };
    NodeTime { since_boot: boot_time(), wall }
}

/// Returns the microseconds since boot.
pub fn now_us() -> u64 {
    boot_time().as_micros() as u64
}

/// Returns the time since boot in the unit in which the kernel tells when processes started.
pub fn ticks_now() -> u64 {
    let since_boot = boot_time();
    since_boot.as_secs() * TICKS_PER_SECOND + u64::from(since_boot.subsec_nanos()) * TICKS_PER_SECOND / 1_000_000_000
}

/// Returns whether the peer of a socket has closed its end, so that no answer reaches it.
pub fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok_and(|count| count > 0)
        && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}
