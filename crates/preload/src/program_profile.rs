//! Habits: which programs make so many calls that they had better have a session from the first one on.
//!
//! Before its session a program's calls are the kernel's, in case that it ends soon (`deferred`). Those that don't end soon would have been served better
//! from the beginning, and mostly they are the same programs each time: compilers, `git status`, `find`. So a file beside the plans says how programs
//! went on the times before, by their name with its first argument, and by their name alone where that is new. It has a byte for each, shared by
//! those whose names fall on the same: whoever is taken for another loses some time, and nothing else.
//!
//! Who is known to go on begins with a session so many times, and is looked at again: what a program does now and then is forgotten.
//!
//! And which programs are so short that the library itself is a burden: loading it takes a third of a millisecond, half of what `cat` takes at all. A program
//! that has ended soon eight times one after the other, without having made a process, a thread or a session, and can make none, is run without it (`bare`), fifteen
//! times out of sixteen; the sixteenth time it is looked at again.

use std::ffi::{CStr, c_char, c_int};
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::imports;
use crate::patch::Kept;

/// Bytes for names with their first arguments, behind them as many for names alone, and as many again for short programs.
const PLACES: u64 = 4096;
/// Of a name with its argument: nothing is known.
const UNKNOWN: u8 = 0;
/// It ended before it would have had a session, or is being looked at. Above it: so many times more it begins with one.
const ENDS: u8 = 1;
/// How many times it does.
const TIMES: u8 = 32;
/// Of a name alone: it goes on if the score is so high. Each beginning takes one from it,
const SCORE: u8 = 8;
/// and each program that has gone on adds so many,
const RISE: u8 = 4;
/// up to this.
const SCORE_MAX: u8 = 15;

/// A short program is one that has ended soon so many times, one after the other.
const SHORT: u8 = 8;
/// One that was not short: from here on it is counted how often it has ended soon since,
const LONG: u8 = 128;
/// and so many times later it begins anew.
const LONG_TIMES: u8 = 32;
/// One in so many of them has the library all the same, and is looked at.
const LOOKED_AT: u64 = 16;
/// A program that computes longer than this has no use for the time that is saved.
const SHORT_CPU: std::time::Duration = std::time::Duration::from_millis(5);

/// Directories of plans with longer paths are none for habits.
const PLANS_MAX: usize = 256;

/// The file's name.
const NAME: &str = "program_profile";

/// Where a program's bytes stand.
#[derive(Clone, Copy, Debug)]
struct Places {
    whole: u64,
    name: u64,
    short: u64,
}

static FOUND: OnceLock<(Kept, Places)> = OnceLock::new();
/// Whether the process has done what short programs don't.
static IS_LONG: AtomicBool = AtomicBool::new(false);

/// Notes who the program is, and where habits are kept.
///
/// # Safety
/// The arguments are as many strings.
pub(crate) unsafe fn begin(plans: Option<&'static CStr>, count: c_int, arguments: *const *const c_char) {
    // A longer path takes memory to open.
    let Some(plans) = plans.filter(|plans| plans.count_bytes() < PLANS_MAX) else { return };
    // SAFETY: it asks for a number.
    let path = unsafe { libc::getauxval(libc::AT_EXECFN) } as *const c_char;
    if path.is_null() {
        return;
    }
    // SAFETY: the kernel has put the path there, and there it stays.
    let path = unsafe { CStr::from_ptr(path) };
    // SAFETY: as the caller says.
    let argument = |at: usize| (at < count as usize).then(|| unsafe { CStr::from_ptr(*arguments.add(at)) }.to_bytes());
    // It is noted once, before the program runs.
    let _ = FOUND.set((Kept::named(plans, NAME), Places::of(path.to_bytes(), argument(1), argument(2))));
}

impl Places {
    /// By the name of the program, its first argument, and the second one where that is a script in so many words (`sh -ec`, `perl -e`).
    fn of(path: &[u8], first: Option<&[u8]>, second: Option<&[u8]>) -> Self {
        let is_script = first.is_some_and(|first| matches!(first, [b'-', b'a'..=b'z', ..]) && first.ends_with(b"c"))
            || first == Some(b"-e");
        let mut hasher = std::hash::DefaultHasher::new();
        path.rsplit(|&byte| byte == b'/').next().hash(&mut hasher);
        let name = hasher.finish() % PLACES;
        (first, second.filter(|_| is_script)).hash(&mut hasher);
        Self { whole: hasher.finish() % PLACES, name: PLACES + name, short: 2 * PLACES + name }
    }

    fn read(self, file: &File) -> (u8, u8) {
        (byte(file, self.whole), byte(file, self.name))
    }

    /// Writes what has changed; who may not write the file only believes it.
    fn write(self, file: &File, before: (u8, u8), now: (u8, u8)) {
        for (place, before, now) in [(self.whole, before.0, now.0), (self.name, before.1, now.1)] {
            if before != now {
                store(file, place, now);
            }
        }
    }
}

fn byte(file: &File, at: u64) -> u8 {
    let mut byte = [0];
    // Behind its end nothing is known.
    file.read_at(&mut byte, at).map_or(0, |_| byte[0])
}

fn store(file: &File, at: u64, byte: u8) {
    // Beyond the limit of files' lengths the program would get a signal.
    if at < crate::session::file_limit() {
        let _ = file.write_at(&[byte], at);
    }
}

/// Whether a program that begins goes on, by what is known of it; and what is known then.
fn begins((whole, name): (u8, u8)) -> (bool, (u8, u8)) {
    match whole {
        UNKNOWN if name >= SCORE => (true, (UNKNOWN, name - 1)),
        UNKNOWN => (false, (ENDS, name.saturating_sub(1))),
        ENDS => (false, (ENDS, name)),
        times => (true, (times - 1, name)),
    }
}

/// What is known of a program that has gone on.
fn went_on((_, name): (u8, u8)) -> (u8, u8) {
    (TIMES, name.saturating_add(RISE).min(SCORE_MAX))
}

/// Whether the program, which makes its first call, will go on, as far as one can tell. Asked once.
pub(crate) fn will_go_on() -> bool {
    let Some((kept, places)) = FOUND.get() else { return false };
    let Some(file) = kept.change() else { return false };
    let before = places.read(&file);
    let (is_long, now) = begins(before);
    places.write(&file, before, now);
    is_long
}

/// Notes that it has.
pub(crate) fn note_going_on() {
    let Some((kept, places)) = FOUND.get() else { return };
    let Some(file) = kept.change() else { return };
    let before = places.read(&file);
    places.write(&file, before, went_on(before));
}

/// Whether anything may be known of programs.
pub(crate) fn is_any() -> bool {
    FOUND.get().is_some()
}

/// Whether a program at this path, with these first arguments, ends soon, as far as one can tell, and need not be looked at this time. Nothing is allocated.
pub(crate) fn is_short(path: &[u8], first: Option<&[u8]>, second: Option<&[u8]>) -> bool {
    let Some((kept, _)) = FOUND.get() else { return false };
    let Some((file, _)) = kept.open() else { return false };
    let places = Places::of(path, first, second);
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // Of the clock's digits those that change from one call to the next.
    let is_looked_at = (u64::from(since.subsec_nanos()) >> 7).is_multiple_of(LOOKED_AT);
    let (whole, name) = places.read(&file);
    byte(&file, places.short) == SHORT && whole <= ENDS && name == 0 && !is_looked_at
}

/// Notes that the program has done what short ones don't: it had better have the library.
pub(crate) fn note_long() {
    if !IS_LONG.swap(true, Ordering::Relaxed) {
        note_length(|_| LONG);
    }
}

/// Notes that the program ends.
pub(crate) fn note_end() {
    if IS_LONG.load(Ordering::Relaxed) {
        return;
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time goes into a local variable.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    let is_quick = time.tv_sec == 0 && time.tv_nsec < SHORT_CPU.subsec_nanos().into();
    note_length(|times| ended(times, is_quick, imports::may_run_programs));
}

/// What is known of a program that has ended soon once more. One that may run others is not short: they would go without the library too, unseen.
/// One that computed long is looked at the next time, and begins anew if it does again: now and then a processor takes long over anything.
fn ended(times: u8, is_quick: bool, may_run_programs: impl Fn() -> bool) -> u8 {
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

fn note_length(change: impl Fn(u8) -> u8) {
    let Some((kept, places)) = FOUND.get() else { return };
    let Some(file) = kept.change() else { return };
    let before = byte(&file, places.short);
    let now = change(before);
    if now != before {
        store(&file, places.short, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has a program begin so often, and says when it began with a session.
    fn runs(known: &mut (u8, u8), times: usize, goes_on: impl Fn(usize) -> bool) -> Vec<bool> {
        let run = |time| {
            let (is_long, now) = begins(*known);
            *known = if !is_long && goes_on(time) { went_on(now) } else { now };
            is_long
        };
        (0..times).map(run).collect()
    }

    #[test]
    fn who_goes_on_begins_with_a_session_from_the_second_time_on() {
        let mut known = (UNKNOWN, 0);
        let began = runs(&mut known, 200, |_| true);
        assert!(!began[0] && began[1]);
        assert!(began.iter().filter(|began| !**began).count() <= 200 / usize::from(TIMES) + 1);
    }

    #[test]
    fn who_ends_soon_has_none_and_who_changes_is_noticed() {
        let mut known = (UNKNOWN, 0);
        assert!(runs(&mut known, 100, |_| false).iter().all(|began| !began));
        assert!(runs(&mut known, 2, |_| true)[1]);
        let began = runs(&mut known, 100, |_| false);
        assert!(began[99..].iter().all(|began| !began) && began[0]);
    }

    #[test]
    fn of_a_new_argument_the_name_tells() {
        let mut name = 0;
        let mut began = |goes_on: bool, times| {
            let mut last = false;
            for _ in 0..times {
                let (is_long, now) = begins((UNKNOWN, name));
                name = if !is_long && goes_on { went_on(now).1 } else { now.1 };
                last = is_long;
            }
            last
        };
        assert!(began(true, 5));
        assert!(!began(false, 20));
    }

    #[test]
    fn short_is_who_has_ended_soon_each_time_and_runs_no_others() {
        let after = |mut times: u8, ends: usize, runs: bool| {
            (0..ends).for_each(|_| times = ended(times, true, || runs));
            times
        };
        assert_eq!((after(0, 7, false), after(0, 8, false), after(0, 100, false)), (7, SHORT, SHORT));
        assert!(after(0, 8, true) >= LONG && after(0, 1000, true) != SHORT);
        // Once it may have computed long for reasons that were not its own.
        assert_eq!(ended(ended(SHORT, false, || false), true, || false), SHORT);
        assert_eq!(ended(ended(SHORT, false, || false), false, || false), 0);
        assert_eq!((ended(3, false, || false), ended(LONG + 3, false, || false)), (0, LONG));
        // Who was long once is looked at longer.
        assert_ne!(after(LONG, usize::from(LONG_TIMES), false), SHORT);
        assert_eq!(after(LONG, usize::from(LONG_TIMES) + 1 + usize::from(SHORT), false), SHORT);
        // Whatever stands in the file.
        (0..=u8::MAX).for_each(|times| assert!(after(times, 300, false) == SHORT));
    }

    #[test]
    fn programs_differ_by_name_and_first_argument() {
        let of_two = |path: &str, first: Option<&str>, second: Option<&str>| {
            let places = Places::of(path.as_bytes(), first.map(str::as_bytes), second.map(str::as_bytes));
            assert!(places.whole < PLACES && (PLACES..2 * PLACES).contains(&places.name));
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
