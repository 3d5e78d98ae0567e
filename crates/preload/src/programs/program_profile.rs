//! The program profile: which programs need a session from their first call on.
//!
//! Before its session, the kernel serves a program's calls, in case it ends soon (`deferred_session`). A program that
//! runs for long is better served by LibFS from the start, and it is mostly the same program each time: compilers, `git
//! status`, `find`. So a file beside the plans records how programs went on in earlier runs. It counts by a program's
//! name with its first argument, and by the name alone if that argument is new. Each has one byte in the file, shared
//! by all names with the same hash. A program that is taken for another loses some time, and nothing else.
//!
//! A program that is known to go on begins with a session a number of times, and is then observed again: rare behaviour
//! is forgotten.
//!
//! The file also records programs so short that the library itself is a burden: loading it takes a third of a
//! millisecond, half of the time that `cat` takes. A short program has ended soon eight times in a row, without making
//! a process, a thread or a session, and can make no process. It runs without the library (`without_library`) fifteen
//! times out of sixteen; the sixteenth time it is observed again.

use std::ffi::{CStr, c_char, c_int};
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::patch::KeptFile;
use crate::programs::imports;

/// Bytes for names with their first arguments.
///
/// As many for names alone follow, and then as many for short programs.
const SECTION_BYTES: u64 = 4096;
/// For a name with its argument: unknown.
const UNKNOWN: u8 = 0;
/// The program ended before its session would have begun, or is being observed.
///
/// A greater value is the number of times that it still begins with a session.
const ENDS_SOON: u8 = 1;
/// The first such number.
const SESSION_STARTS: u8 = 32;
/// For a name alone: the program goes on from this score up.
///
/// Each start takes one point off,
const SCORE: u8 = 8;
/// each program that has gone on adds so many,
const RISE: u8 = 4;
/// up to this score.
const SCORE_MAX: u8 = 15;

/// A short program has ended soon so many times in a row.
const SHORT: u8 = 8;
/// A program was not short: from here on, the runs that have ended soon since are counted.
const LONG: u8 = 128;
/// After so many such runs, the count starts anew.
const LONG_TIMES: u8 = 32;
/// One run in so many of a short program has the library all the same, and is observed.
const OBSERVED_ONE_IN: u64 = 16;
/// A program that computes longer than this gains nothing from the time saved.
const SHORT_CPU: std::time::Duration = std::time::Duration::from_millis(5);

/// With a longer path of the plans' directory there is no profile.
const PLANS_MAX: usize = 256;

/// The file's name.
const FILE_NAME: &str = "program_profile";

/// The offsets of a program's bytes.
#[derive(Clone, Copy, Debug)]
struct ProfileOffsets {
    whole: u64,
    name: u64,
    short: u64,
}

static PROGRAM: OnceLock<(KeptFile, ProfileOffsets)> = OnceLock::new();
/// Whether the process has done anything that short programs don't.
static IS_LONG: AtomicBool = AtomicBool::new(false);

/// Records the program's name, and the place of the profile.
///
/// # Safety
/// The arguments are as many strings.
pub(crate) unsafe fn set_program(plans: Option<&'static CStr>, count: c_int, arguments: *const *const c_char) {
    // Opening a file with a longer path takes memory.
    let Some(plans) = plans.filter(|plans| plans.count_bytes() < PLANS_MAX) else { return };
    // SAFETY: it asks for a number.
    let path = unsafe { libc::getauxval(libc::AT_EXECFN) } as *const c_char;
    if path.is_null() {
        return;
    }
    // SAFETY: the kernel has put the path there, and it stays there.
    let path = unsafe { CStr::from_ptr(path) };
    // SAFETY: as the caller says.
    let argument = |at: usize| (at < count as usize).then(|| unsafe { CStr::from_ptr(*arguments.add(at)) }.to_bytes());
    // It is set once, before the program runs.
    let _ = PROGRAM.set((
        KeptFile::named(plans, FILE_NAME),
        ProfileOffsets::of_program(path.to_bytes(), argument(1), argument(2)),
    ));
}

impl ProfileOffsets {
    /// Computes the offsets from a program's name, its first argument, and the second if that is a script.
    ///
    /// A script is given in the argument itself (`sh -ec`, `perl -e`).
    fn of_program(path: &[u8], first: Option<&[u8]>, second: Option<&[u8]>) -> Self {
        let is_script = first.is_some_and(|first| matches!(first, [b'-', b'a'..=b'z', ..]) && first.ends_with(b"c"))
            || first == Some(b"-e");
        let mut hasher = std::hash::DefaultHasher::new();
        path.rsplit(|&byte| byte == b'/').next().hash(&mut hasher);
        let name = hasher.finish() % SECTION_BYTES;
        (first, second.filter(|_| is_script)).hash(&mut hasher);
        Self { whole: hasher.finish() % SECTION_BYTES, name: SECTION_BYTES + name, short: 2 * SECTION_BYTES + name }
    }

    fn read(self, file: &File) -> (u8, u8) {
        (read_byte(file, self.whole), read_byte(file, self.name))
    }

    /// Writes changed bytes. A user that may not write the file only reads it.
    fn write(self, file: &File, before: (u8, u8), now: (u8, u8)) {
        for (place, before, now) in [(self.whole, before.0, now.0), (self.name, before.1, now.1)] {
            if before != now {
                write_byte(file, place, now);
            }
        }
    }
}

fn read_byte(file: &File, at: u64) -> u8 {
    let mut byte = [0];
    // Bytes after its end are unknown.
    file.read_at(&mut byte, at).map_or(0, |_| byte[0])
}

fn write_byte(file: &File, at: u64, byte: u8) {
    // Beyond the limit of file sizes, the program would get a signal.
    if at < crate::sessions::session::file_limit() {
        let _ = file.write_at(&[byte], at);
    }
}

/// Returns whether a program that begins will go on, by its bytes, and the bytes after this start.
fn predict_start((whole, name): (u8, u8)) -> (bool, (u8, u8)) {
    match whole {
        UNKNOWN if name >= SCORE => (true, (UNKNOWN, name - 1)),
        UNKNOWN => (false, (ENDS_SOON, name.saturating_sub(1))),
        ENDS_SOON => (false, (ENDS_SOON, name)),
        times => (true, (times - 1, name)),
    }
}

/// Returns the bytes of a program that has gone on.
fn after_going_on((_, name): (u8, u8)) -> (u8, u8) {
    (SESSION_STARTS, name.saturating_add(RISE).min(SCORE_MAX))
}

/// Predicts at its first call whether the program will go on. Called once.
pub(crate) fn will_go_on() -> bool {
    let Some((kept, places)) = PROGRAM.get() else { return false };
    let Some(file) = kept.open_to_change() else { return false };
    let before = places.read(&file);
    let (is_long, now) = predict_start(before);
    places.write(&file, before, now);
    is_long
}

/// Records that the program has gone on.
pub(crate) fn record_going_on() {
    let Some((kept, places)) = PROGRAM.get() else { return };
    let Some(file) = kept.open_to_change() else { return };
    let before = places.read(&file);
    places.write(&file, before, after_going_on(before));
}

/// Returns whether there is a profile.
pub(crate) fn is_available() -> bool {
    PROGRAM.get().is_some()
}

/// Predicts whether a program at this path, with these arguments, ends soon.
///
/// Returns `false` if the program is to be observed this time.
///
/// It allocates nothing.
pub(crate) fn is_short(path: &[u8], first: Option<&[u8]>, second: Option<&[u8]>) -> bool {
    let Some((kept, _)) = PROGRAM.get() else { return false };
    let Some((file, _)) = kept.open() else { return false };
    let places = ProfileOffsets::of_program(path, first, second);
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // The digits of the clock that change from one call to the next.
    let is_observed = (u64::from(since.subsec_nanos()) >> 7).is_multiple_of(OBSERVED_ONE_IN);
    let (whole, name) = places.read(&file);
    read_byte(&file, places.short) == SHORT && whole <= ENDS_SOON && name == 0 && !is_observed
}

/// Records that the program is not short: it needs the library.
pub(crate) fn record_long() {
    if !IS_LONG.swap(true, Ordering::Relaxed) {
        update_length(|_| LONG);
    }
}

/// Records that the program ends.
pub(crate) fn record_end() {
    if IS_LONG.load(Ordering::Relaxed) {
        return;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time goes into a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    let is_quick = time.tv_sec == 0 && time.tv_nsec < SHORT_CPU.subsec_nanos().into();
    update_length(|times| after_short_run(times, is_quick, imports::may_run_programs));
}

/// Returns the byte of a program that has ended soon once more.
///
/// A program that may run others is not short: they would run without the library too, unseen. One that computed long
/// is observed the next time, and starts anew if it does so again: now and then a processor takes long for anything.
fn after_short_run(times: u8, is_quick: bool, may_run_programs: impl Fn() -> bool) -> u8 {
    match times {
        SHORT if !is_quick => SHORT - 1,
        times if !is_quick && times < LONG => 0,
        _ if !is_quick => LONG,
        SHORT => SHORT,
        times if times < SHORT - 1 => times + 1,
        times if times < LONG => {
            if may_run_programs() {
                LONG
            } else {
                SHORT
            }
        }
        times if times < LONG + LONG_TIMES => times + 1,
        _ => 0,
    }
}

fn update_length(change: impl Fn(u8) -> u8) {
    let Some((kept, places)) = PROGRAM.get() else { return };
    let Some(file) = kept.open_to_change() else { return };
    let before = read_byte(&file, places.short);
    let now = change(before);
    if now != before {
        write_byte(&file, places.short, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts a program so often; returns for each start whether it began with a session.
    fn runs(known: &mut (u8, u8), times: usize, goes_on: impl Fn(usize) -> bool) -> Vec<bool> {
        let run = |time| {
            let (is_long, now) = predict_start(*known);
            *known = if !is_long && goes_on(time) { after_going_on(now) } else { now };
            is_long
        };
        (0..times).map(run).collect()
    }

    #[test]
    fn long_program_gets_session_from_second_run() {
        let mut known = (UNKNOWN, 0);
        let began = runs(&mut known, 200, |_| true);
        assert!(!began[0] && began[1]);
        assert!(began.iter().filter(|began| !**began).count() <= 200 / usize::from(SESSION_STARTS) + 1);
    }

    #[test]
    fn short_program_gets_no_session_until_it_changes() {
        let mut known = (UNKNOWN, 0);
        assert!(runs(&mut known, 100, |_| false).iter().all(|began| !began));
        assert!(runs(&mut known, 2, |_| true)[1]);
        let began = runs(&mut known, 100, |_| false);
        assert!(began[99..].iter().all(|began| !began) && began[0]);
    }

    #[test]
    fn new_argument_is_predicted_by_name() {
        let mut name = 0;
        let mut began = |goes_on: bool, times| {
            let mut last = false;
            for _ in 0..times {
                let (is_long, now) = predict_start((UNKNOWN, name));
                name = if !is_long && goes_on { after_going_on(now).1 } else { now.1 };
                last = is_long;
            }
            last
        };
        assert!(began(true, 5));
        assert!(!began(false, 20));
    }

    #[test]
    fn program_is_short_after_eight_quick_runs() {
        let after = |mut times: u8, ends: usize, runs: bool| {
            (0..ends).for_each(|_| times = after_short_run(times, true, || runs));
            times
        };
        assert_eq!((after(0, 7, false), after(0, 8, false), after(0, 100, false)), (7, SHORT, SHORT));
        assert!(after(0, 8, true) >= LONG && after(0, 1000, true) != SHORT);
        // One long run may have had reasons outside the program.
        assert_eq!(after_short_run(after_short_run(SHORT, false, || false), true, || false), SHORT);
        assert_eq!(after_short_run(after_short_run(SHORT, false, || false), false, || false), 0);
        assert_eq!((after_short_run(3, false, || false), after_short_run(LONG + 3, false, || false)), (0, LONG));
        // A program that was long once is observed for longer.
        assert_ne!(after(LONG, usize::from(LONG_TIMES), false), SHORT);
        assert_eq!(after(LONG, usize::from(LONG_TIMES) + 1 + usize::from(SHORT), false), SHORT);
        // For any byte in the file.
        (0..=u8::MAX).for_each(|times| assert!(after(times, 300, false) == SHORT));
    }

    #[test]
    fn programs_differ_by_name_and_first_argument() {
        let of_two = |path: &str, first: Option<&str>, second: Option<&str>| {
            let places =
                ProfileOffsets::of_program(path.as_bytes(), first.map(str::as_bytes), second.map(str::as_bytes));
            assert!(places.whole < SECTION_BYTES && (SECTION_BYTES..2 * SECTION_BYTES).contains(&places.name));
            (places.whole, places.name)
        };
        let of = |path: &str, first: Option<&str>| of_two(path, first, Some("other"));
        assert_eq!(of("/usr/bin/git", Some("status")), of("git", Some("status")));
        assert_ne!(of("git", Some("status")).0, of("git", Some("add")).0);
        assert_eq!(of("git", Some("status")).1, of("git", None).1);
        assert_ne!(of("cp", Some("status")), of("git", Some("status")));
        assert_eq!(of_two("git", Some("status"), Some("-s")), of_two("git", Some("status"), None));
        for option in ["-c", "-ec", "-e"] {
            assert_ne!(of_two("sh", Some(option), Some("one")), of_two("sh", Some(option), Some("two")));
        }
    }
}
