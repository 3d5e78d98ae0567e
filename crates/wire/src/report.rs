//! Counts of `ashlar run --report`, which its library and the mounts share.
//!
//! The counts stand in one file, which every process of the run maps and adds to. So the counts of a killed process are
//! there too:
//!
//! ```text
//!       0  magic:8 "ASHLRPT1"
//!       8  programs:8                                   that have begun with the library
//!      64  8 of device:8                                the mounts' files show this as st_dev; 0: none
//!    4096  512 of calls:8 ns:8 calls:8 ns:8             by system call: accelerated, delegated
//!   20480  4,194,304 bytes                              by thread (process): what it is doing, THREAD_*
//! ```
//!
//! The run asks a mount to count requests by reading attributes of its root directory that do not exist:
//! `ashlar.report.begin.FILE`, with the file's name in [`REPORT_DIRECTORY`], and `ashlar.report.end`, whose value is a
//! [`MissedReply`]. Both concern the reading process and all processes that it has started.

use serde::{Deserialize, Serialize};

/// The variable that names the file of counts.
pub const REPORT_VARIABLE: &str = "ASHLAR_REPORT";
/// The directory of files of counts: in memory, where every user may create files.
pub const REPORT_DIRECTORY: &str = "/dev/shm";
/// The attribute that makes a mount begin to count.
pub const REPORT_BEGIN: &str = "ashlar.report.begin.";
/// The attribute that makes a mount stop counting and return the counts.
pub const REPORT_END: &str = "ashlar.report.end";

/// The first word of a file of counts.
pub const REPORT_MAGIC: u64 = u64::from_le_bytes(*b"ASHLRPT1");
/// The offset of the number of programs.
pub const REPORT_PROGRAMS: usize = 8;
/// The offset of the devices.
pub const REPORT_DEVICES: usize = 64;
/// The number of devices.
pub const REPORT_DEVICES_MAX: usize = 8;
/// The offset of the counts.
pub const REPORT_COUNTS: usize = 4096;
/// System calls that are counted: those with smaller numbers.
pub const REPORT_CALLS: usize = 512;
/// Bytes of one call's counts.
pub const REPORT_ROW: usize = 32;
/// The offset of the threads' bytes.
pub const REPORT_THREADS: usize = REPORT_COUNTS + REPORT_CALLS * REPORT_ROW;
/// The highest number that Linux gives to a thread.
pub const REPORT_THREADS_MAX: usize = 1 << 22;
/// Bytes of the file.
pub const REPORT_BYTES: usize = REPORT_THREADS + REPORT_THREADS_MAX;
/// The thread is in a counted call.
pub const THREAD_COUNTED: u8 = 1;
/// The process has the library.
pub const THREAD_HAS_LIBRARY: u8 = 2;

const _: () = assert!(REPORT_DEVICES + REPORT_DEVICES_MAX * 8 <= REPORT_COUNTS);
const _: () = assert!(REPORT_THREADS == 20_480);

/// The number of calls of one system call on an Ashlar, and their total time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Calls that LibFS served.
    pub accelerated: u64,
    /// Nanoseconds in them.
    pub accelerated_ns: u64,
    /// Calls that the kernel served.
    pub delegated: u64,
    /// Nanoseconds in them.
    pub delegated_ns: u64,
}

/// Returns the counts in a file's content, by system call, and the number of programs.
///
/// Returns `None` if it is not a file of counts.
#[must_use]
pub fn decode_report(content: &[u8]) -> Option<(Vec<CallCounts>, u64)> {
    let word = |at: usize| content.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
    if word(0)? != REPORT_MAGIC {
        return None;
    }
    let row = |call: usize| {
        let at = REPORT_COUNTS + call * REPORT_ROW;
        Some(CallCounts {
            accelerated: word(at)?,
            accelerated_ns: word(at + 8)?,
            delegated: word(at + 16)?,
            delegated_ns: word(at + 24)?,
        })
    };
    Some(((0..REPORT_CALLS).map(row).collect::<Option<_>>()?, word(REPORT_PROGRAMS)?))
}

/// Returns the beginning of a file of counts.
#[must_use]
pub fn encode_report_header(devices: &[u64]) -> Vec<u8> {
    let mut header = vec![0; REPORT_DEVICES + REPORT_DEVICES_MAX * 8];
    header[..8].copy_from_slice(&REPORT_MAGIC.to_le_bytes());
    for (place, device) in header[REPORT_DEVICES..].chunks_exact_mut(8).zip(devices) {
        place.copy_from_slice(&device.to_le_bytes());
    }
    header
}

/// Requests of a run that reached a mount and that the run's library had not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissedReply {
    /// Requests by calls that the library did not see, by the call's number; -1 if the number is not known.
    pub calls: Vec<(i64, u64)>,
    /// Requests in calls that the library had counted.
    pub counted: u64,
    /// Requests that belong to no call on a file: programs that are loaded, and mapped memory.
    pub memory: u64,
    /// Requests that the kernel made on its own: read-ahead.
    pub behind: u64,
    /// The programs whose calls were missed, by name.
    pub programs: Vec<MissedProgram>,
}

/// A program some of whose calls were missed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissedProgram {
    /// The program's name in the kernel.
    pub name: String,
    /// Whether the library was loaded into it.
    pub has_library: bool,
    /// Requests by its missed calls.
    pub requests: u64,
}

impl MissedReply {
    /// Encodes the reply as the value of an attribute; `None` if it would be too long.
    #[must_use]
    pub fn encode(&self) -> Option<Vec<u8>> {
        postcard::to_extend(self, Vec::new()).ok()
    }

    /// Decodes the value of an attribute.
    #[must_use]
    pub fn decode(value: &[u8]) -> Option<Self> {
        postcard::from_bytes(value).ok()
    }

    /// Returns the number of all requests by missed calls.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.calls.iter().fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_decoded_as_written() {
        let mut content = encode_report_header(&[7, 8]);
        assert_eq!(
            content[REPORT_DEVICES..REPORT_DEVICES + 16],
            [[7, 0, 0, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0]].concat()
        );
        content.resize(REPORT_BYTES, 0);
        content[REPORT_PROGRAMS] = 3;
        for (index, value) in [5, 6, 7, 8].into_iter().enumerate() {
            content[REPORT_COUNTS + REPORT_ROW + index * 8] = value;
        }
        let (calls, programs) = decode_report(&content).expect("counts");
        let expected = CallCounts { accelerated: 5, accelerated_ns: 6, delegated: 7, delegated_ns: 8 };
        assert_eq!((calls[0], calls[1], programs), (CallCounts::default(), expected, 3));
        assert_eq!(decode_report(&content[..REPORT_THREADS - 1]), None);
        assert_eq!(decode_report(&[0; REPORT_BYTES]), None);
    }

    #[test]
    fn missed_reply_is_decoded_as_encoded() {
        let program = MissedProgram { name: "busybox".into(), has_library: false, requests: 12 };
        let reply = MissedReply { calls: vec![(-1, 5), (257, 7)], programs: vec![program], ..MissedReply::default() };
        let value = reply.encode().expect("a value");
        assert_eq!(MissedReply::decode(&value), Some(reply.clone()));
        assert_eq!((reply.missed(), MissedReply::decode(&value[..3])), (12, None));
    }
}
