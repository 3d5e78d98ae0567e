//! Reads from `/proc` the thread that has sent a request and waits for its answer.
//!
//! Some requests don't say all that an answer depends on. A thread that waits for an answer shows in `/proc` which call
//! it is in, and of which kind its process is. Each read takes some microseconds, so it is done only for requests that
//! need it. A thread whose process replaces its program is locked for `/proc`, but such a thread waits for no request
//! that is read here.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// How long to wait before a thread is read again that still runs. It is on its way into the wait for the answer,
/// unless it does not wait for this one.
const PAUSE: Duration = Duration::from_micros(50);
/// `pwritev2`, by its number for programs of this machine's width and for 32-bit programs.
const PWRITEV2: [i64; 2] = [libc::SYS_pwritev2, if cfg!(target_arch = "x86_64") { 379 } else { 393 }];
/// Its flag for writing at the offset though the open file appends.
const RWF_NOAPPEND: u64 = 0x20;

/// A system call: its number, or -1 if a thread waits outside of calls, and its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SystemCall {
    pub(crate) number: i64,
    pub(crate) arguments: [u64; 6],
}

/// The call that a thread is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadCall {
    /// It waits in a call.
    Waiting(SystemCall),
    /// It runs.
    Running,
    /// It is gone, or may not be read.
    Hidden,
}

impl ThreadCall {
    /// Reads a thread until it waits, `tries` times at most.
    pub(crate) fn read(thread: u32, tries: u32) -> Self {
        for attempt in 0..tries {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            let Ok(line) = fs::read_to_string(format!("/proc/{thread}/syscall")) else { return Self::Hidden };
            if let Some(call) = SystemCall::parse(&line) {
                return Self::Waiting(call);
            }
        }
        Self::Running
    }

    /// Whether it is a write that goes to its offset in a file that is open for appending.
    pub(crate) fn writes_at_offset(self) -> bool {
        let Self::Waiting(call) = self else { return false };
        PWRITEV2.contains(&call.number) && call.arguments[5] & RWF_NOAPPEND != 0
    }
}

impl SystemCall {
    /// Parses the text of `/proc/TID/syscall`; returns `None` if the thread runs.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let number = words.next()?.parse().ok()?;
        let mut arguments = [0; 6];
        if number >= 0 {
            for (argument, word) in arguments.iter_mut().zip(words) {
                *argument = u64::from_str_radix(word.trim_start_matches("0x"), 16).ok()?;
            }
        }
        Some(Self { number, arguments })
    }
}

/// Whether a thread's program is a 32-bit one. The kernel keeps a program's auxiliary vector as it gave it: pairs of
/// words, of which the first number is small.
pub(crate) fn is_32_bit(thread: u32) -> bool {
    let mut first = [0; 8];
    let auxiliary = File::open(format!("/proc/{thread}/auxv"));
    auxiliary.is_ok_and(|auxiliary| auxiliary.read_exact_at(&mut first, 0).is_ok()) && is_pair_of_32_bit(first)
}

fn is_pair_of_32_bit(first: [u8; 8]) -> bool {
    u64::from_ne_bytes(first) > u64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_is_read_with_its_arguments() {
        let call = SystemCall::parse("328 0x3 0x7ffe 0x1 0x2 0x0 0x20 0x7ffd 0x7f10\n").expect("a call");
        assert_eq!((call.number, call.arguments), (328, [3, 0x7ffe, 1, 2, 0, 0x20]));
        let call = SystemCall::parse("254 0x3 0x7ffe 0xfff 0x0 0x0 0x1f 0x7ffd 0x7f10\n").expect("a call");
        assert_eq!((call.number, call.arguments), (254, [3, 0x7ffe, 0xfff, 0, 0, 0x1f]));
        assert_eq!(SystemCall::parse("-1 0x7ffd 0x7f10\n").map(|call| call.number), Some(-1));
        assert_eq!(SystemCall::parse("running\n"), None);
    }

    #[test]
    fn only_a_write_with_the_flag_goes_to_its_offset() {
        let seen =
            |number: i64, flags: u64| ThreadCall::Waiting(SystemCall { number, arguments: [0, 0, 0, 0, 0, flags] });
        assert!(seen(libc::SYS_pwritev2, 0x22).writes_at_offset());
        assert!(seen(PWRITEV2[1], 0x20).writes_at_offset());
        assert!(!seen(libc::SYS_pwritev2, 0x10).writes_at_offset());
        assert!(!seen(libc::SYS_write, 0x20).writes_at_offset());
        assert!(!ThreadCall::Hidden.writes_at_offset() && !ThreadCall::Running.writes_at_offset());
    }

    #[test]
    fn waiting_thread_is_seen_in_its_call() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let (sender, number) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                sender.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).expect("sent");
                rustix::io::read(&reader, &mut [0; 1]).expect("read");
            });
            let thread = number.recv().expect("its number");
            let is_read =
                || matches!(ThreadCall::read(thread, 1000), ThreadCall::Waiting(call) if call.number == libc::SYS_read);
            while !is_read() {}
            drop(writer);
        });
        assert_eq!(ThreadCall::read(u32::MAX, 1), ThreadCall::Hidden);
    }

    #[test]
    fn width_is_read_off_the_auxiliary_vector() {
        assert!(!is_32_bit(std::process::id()), "this program has 64 bits");
        assert!(!is_32_bit(u32::MAX), "there is no such thread");
        // AT_SYSINFO and its address, in words of 32 bits.
        assert!(is_pair_of_32_bit((0xf7f0_1234 << 32 | 32_u64).to_ne_bytes()) || cfg!(target_endian = "big"));
    }
}
