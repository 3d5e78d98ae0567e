//! LibFS descriptors and the open files behind them.
//!
//! A LibFS descriptor has a number of the kernel's, whose placeholder there is `O_PATH`: reads and writes past the
//! library fail. An open file that processes share has a real open file there instead (`shared_file`). The entry looks
//! at the table from numbers to open files ([`ASHLAR_DESCRIPTORS`]). An open file has all the numbers that `dup` gave
//! it. It lives until the last number and the last call in progress on it are gone.

mod inherited;
mod open_file;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ashlar_types::Errno;
use rustix_futex_sync::{Mutex, MutexGuard};

pub(crate) use self::inherited::{
    Inherited, all_shared, forget_ours, inherited, inherited_alike, inherited_at, is_inherited, replace_inherited,
};
pub(crate) use self::open_file::{
    CHANGEABLE, FilePlace, OnExec, OpenFileRef, PlaceGuard, TMPFILE, open_in_session, open_known_inode,
};
use self::open_file::{O_PATH_COUNT, OPEN_MAX};
use crate::entry::arch::{ASHLAR_DESCRIPTORS, DESCRIPTORS, system_call};
use crate::files::recycled_descriptor;
use crate::sessions::session;

/// In place of an open file: a descriptor that the library uses itself.
const INTERNAL: u32 = u32::MAX;
/// In place of an open file: an adoptable descriptor of the kernel's.
///
/// It was opened on a mount before there was a session (`deferred_session`).
const ADOPTABLE: u32 = crate::entry::arch::ADOPTABLE;
/// In place of an open file: a kernel descriptor that paths may begin from.
///
/// It may be of a directory on a mount; LibFS resolves paths that begin from it.
const PATH_BASE: u32 = ADOPTABLE - 1;
/// Adoptable descriptors are below this number.
const ADOPTABLE_MAX: i32 = crate::entry::arch::ADOPTABLE_MAX as i32;
/// In place of an open file: an adoptable descriptor with duplicates.
///
/// From this number up to [`PATH_BASE`], descriptors of the same number may share their open file.
const DUPLICATED: u32 = PATH_BASE - ADOPTABLE_MAX as u32;
/// In place of an open file: a kernel descriptor inherited at a fork.
///
/// Other processes may still serve its open file (`shared_file`).
const INHERITED: u32 = DUPLICATED - 1;
/// The first of the numbers up to [`INHERITED`] that the table does not use.
///
/// [`unshared`] gives them to adoptable descriptors whose open file has no other number.
const UNSHARED: u32 = OPEN_MAX as u32 + 1;
const _: () = assert!(UNSHARED as usize + ADOPTABLE_MAX as usize <= INHERITED as usize && ADOPTABLE < INTERNAL);
/// Held by calls that change which numbers lead where.
///
/// So all numbers of an open file can be found. It contains the inherited open files.
static TABLE: Mutex<Inherited> = Mutex::new(BTreeMap::new());

/// Descriptors of sessions, by bit: a forked process has none of them.
static OF_SESSIONS: [AtomicU64; DESCRIPTORS / 64] = [const { AtomicU64::new(0) }; DESCRIPTORS / 64];
/// All these are among the words of [`OF_SESSIONS`] from the first of these numbers up to the other.
static SESSIONS_FROM: AtomicU32 = AtomicU32::new(u32::MAX);
static SESSIONS_TO: AtomicU32 = AtomicU32::new(0);

/// One more than the highest descriptor that LibFS ever served.
static HIGHEST: AtomicU32 = AtomicU32::new(0);

fn highest() -> i32 {
    HIGHEST.load(Ordering::Acquire) as i32
}

fn record_highest(descriptor: i32) {
    if highest() <= descriptor {
        HIGHEST.fetch_max(descriptor as u32 + 1, Ordering::AcqRel);
    }
}

#[inline]
fn table_entry(descriptor: i32) -> Option<&'static AtomicU32> {
    ASHLAR_DESCRIPTORS.get(usize::try_from(descriptor).ok()?)
}

/// Returns the open file behind a descriptor, if it is LibFS's.
#[inline]
pub(crate) fn file(descriptor: i32) -> Option<OpenFileRef> {
    let entry = table_entry(descriptor)?;
    loop {
        let number = entry.load(Ordering::Acquire);
        if !is_file(number) {
            return None;
        }
        let Some(file) = OpenFileRef::of_number(number) else { continue };
        if entry.load(Ordering::Acquire) == number {
            return Some(file);
        }
    }
}

/// Returns whether an entry of the table is an open file's number.
fn is_file(number: u32) -> bool {
    number != 0 && number <= OPEN_MAX as u32
}

/// Returns whether any LibFS descriptor is an `O_PATH` one.
pub(crate) fn is_any_o_path() -> bool {
    O_PATH_COUNT.load(Ordering::Relaxed) != 0
}

/// Returns whether a descriptor is LibFS's and an `O_PATH` one.
pub(crate) fn is_o_path(descriptor: i32) -> bool {
    is_any_o_path() && file(descriptor).is_some_and(|file| file.is_o_path())
}

/// Returns whether a descriptor is LibFS's.
pub(crate) fn is_ours(descriptor: i32) -> bool {
    table_entry(descriptor).is_some_and(|entry| is_file(entry.load(Ordering::Relaxed)))
}

/// Returns whether a descriptor is adoptable, and the kernel's for the time being.
pub(crate) fn is_adoptable(descriptor: i32) -> bool {
    table_entry(descriptor).is_some_and(|entry| is_adoptable_entry(entry.load(Ordering::Relaxed)))
}

fn is_adoptable_entry(number: u32) -> bool {
    number == ADOPTABLE || (DUPLICATED..PATH_BASE).contains(&number)
}

/// Returns whether a descriptor is the kernel's, and paths may begin from it.
///
/// It may be of a directory on a mount.
pub(crate) fn is_path_base(descriptor: i32) -> bool {
    table_entry(descriptor).is_some_and(|entry| entry.load(Ordering::Relaxed) == PATH_BASE)
}

/// Records such a descriptor. The user of the entry asks the kernel for its file.
pub(crate) fn record_path_base(descriptor: i32) {
    if let Some(entry) = table_entry(descriptor) {
        entry.store(PATH_BASE, Ordering::Release);
        HIGHEST_PATH_BASE.fetch_max(descriptor as u32 + 1, Ordering::AcqRel);
    }
}

/// Records a descriptor that was found to be the kernel's, if it still is.
pub(crate) fn record_if_kernels(descriptor: i32) {
    let Some(entry) = table_entry(descriptor) else { return };
    if entry.compare_exchange(0, PATH_BASE, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        HIGHEST_PATH_BASE.fetch_max(descriptor as u32 + 1, Ordering::AcqRel);
    }
    leave_adoptable(descriptor);
}

/// Removes the record of a kernel descriptor.
pub(crate) fn forget_kernel_entry(descriptor: i32) {
    let Some(entry) = table_entry(descriptor) else { return };
    let is_noted = |number| number == PATH_BASE || number == INHERITED || is_adoptable_entry(number);
    let _ = entry.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |number| is_noted(number).then_some(0));
}

/// Removes the records of such descriptors in a range.
pub(crate) fn forget_path_bases(from: u32, to: u32) {
    for descriptor in from..HIGHEST_PATH_BASE.load(Ordering::Acquire).min(to.saturating_add(1)) {
        if let Some(entry) = table_entry(descriptor as i32) {
            let _ = entry.compare_exchange(PATH_BASE, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// Returns such descriptors in a range.
pub(crate) fn path_bases(from: u32, to: u32) -> impl Iterator<Item = i32> {
    let end = HIGHEST_PATH_BASE.load(Ordering::Acquire).min(to.saturating_add(1));
    (from..end).map(|number| number as i32).filter(|&number| is_path_base(number))
}

/// One more than the highest descriptor that was ever recorded so.
static HIGHEST_PATH_BASE: AtomicU32 = AtomicU32::new(0);

/// Returns whether a descriptor is LibFS's or adoptable, or paths may begin from it.
pub(crate) fn is_tracked(descriptor: i32) -> bool {
    is_ours(descriptor) || is_adoptable(descriptor) || is_path_base(descriptor) || is_inherited(descriptor)
}

/// Returns all adoptable descriptors.
pub(crate) fn adoptable() -> impl Iterator<Item = i32> {
    (0..ADOPTABLE_MAX).filter(|&number| is_adoptable(number))
}

/// Leaves an adoptable descriptor with the kernel.
///
/// All those of the same open file stay there too; paths may begin from them.
pub(crate) fn leave_adoptable(descriptor: i32) {
    adoptable_alike(descriptor).into_iter().for_each(record_path_base);
}

/// Returns all adoptable descriptors of the open file that one is of.
pub(crate) fn adoptable_alike(descriptor: i32) -> Vec<i32> {
    match table_entry(descriptor).map(|entry| entry.load(Ordering::Relaxed)) {
        Some(ADOPTABLE) => vec![descriptor],
        Some(common) if is_adoptable_entry(common) => adoptable()
            .filter(|&number| ASHLAR_DESCRIPTORS[number as usize].load(Ordering::Relaxed) == common)
            .collect(),
        _ => Vec::new(),
    }
}

/// Records that an adoptable descriptor was duplicated: the new number has the same open file.
pub(crate) fn record_adoptable_duplicate(old: i32, new: i32) {
    if new >= ADOPTABLE_MAX {
        leave_adoptable(old);
        record_path_base(new);
        return;
    }
    let value = |number: i32| &ASHLAR_DESCRIPTORS[number as usize];
    let mut common = value(old).load(Ordering::Relaxed);
    if common == ADOPTABLE {
        let is_free = |one: &u32| adoptable().all(|number| value(number).load(Ordering::Relaxed) != *one);
        // Each number in use has at least one descriptor, and this descriptor uses none.
        common = (DUPLICATED..PATH_BASE).find(is_free).unwrap_or(ADOPTABLE);
        value(old).store(common, Ordering::Release);
    }
    value(new).store(common, Ordering::Release);
}

/// Records an adoptable descriptor from before the program began.
///
/// Those with the same `file`, below [`ADOPTABLE_MAX`], share their open file.
pub(crate) fn record_exec_file(descriptor: i32, file: u32) {
    if let Some(entry) = table_entry(descriptor) {
        entry.store(DUPLICATED + file, Ordering::Release);
    }
}

/// Returns the descriptors whose open files no other process has.
///
/// They are adoptable or LibFS's, and this is as far as the library knows.
///
/// Each comes with a number that is equal for descriptors of the same open file.
pub(crate) fn unshared() -> impl Iterator<Item = (i32, u32)> {
    (0..ADOPTABLE_MAX).filter_map(|descriptor| {
        let number = ASHLAR_DESCRIPTORS[descriptor as usize].load(Ordering::Relaxed);
        match number {
            // Each has its open file alone, so it gets a number of its own.
            ADOPTABLE => Some((descriptor, UNSHARED + descriptor as u32)),
            // Forked processes may share it.
            _ if is_file(number) && open_file::is_shared(number) => None,
            _ => (is_file(number) || is_adoptable_entry(number)).then_some((descriptor, number)),
        }
    })
}

/// Returns whether the library uses a descriptor itself, which the program does not know of.
pub(crate) fn is_internal(descriptor: i32) -> bool {
    table_entry(descriptor).is_some_and(|entry| entry.load(Ordering::Relaxed) == INTERNAL)
}

/// Returns whether the table has any entry for a descriptor.
pub(crate) fn has_entry(descriptor: i32) -> bool {
    table_entry(descriptor).is_some_and(|entry| entry.load(Ordering::Relaxed) != 0)
}

/// Records a descriptor that the library uses itself.
pub(crate) fn record_internal(descriptor: i32) {
    if let Some(entry) = table_entry(descriptor) {
        entry.store(INTERNAL, Ordering::Release);
    }
}

/// Removes the record of a descriptor of the library's own that is closed.
pub(crate) fn forget_internal(descriptor: i32) {
    if let Some(entry) = table_entry(descriptor) {
        // If the number leads elsewhere by now, it stays as it is.
        let _ = entry.compare_exchange(INTERNAL, 0, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// Records a descriptor of a session.
pub(crate) fn record_session_descriptor(descriptor: i32) {
    record_internal(descriptor);
    if let Some(word) = OF_SESSIONS.get(descriptor as usize / 64) {
        word.fetch_or(1 << (descriptor % 64), Ordering::Relaxed);
        SESSIONS_FROM.fetch_min(descriptor as u32 / 64, Ordering::Relaxed);
        SESSIONS_TO.fetch_max(descriptor as u32 / 64 + 1, Ordering::Relaxed);
    }
}

/// Removes the record of a descriptor of a session that is about to be closed.
pub(crate) fn forget_session_descriptor(descriptor: i32) {
    if let Some(word) = OF_SESSIONS.get(descriptor as usize / 64) {
        word.fetch_and(!(1 << (descriptor % 64)), Ordering::Relaxed);
    }
    forget_internal(descriptor);
    recycled_descriptor::record_freed(descriptor as u32);
}

/// Closes the descriptors of all sessions, which are the parent's, in a forked process.
pub(crate) fn close_session_descriptors() {
    let words = SESSIONS_FROM.load(Ordering::Relaxed)..SESSIONS_TO.load(Ordering::Relaxed);
    for (first, word) in words.map(|word| (word as i32 * 64, &OF_SESSIONS[word as usize])) {
        let mut left = word.swap(0, Ordering::Relaxed);
        while left != 0 {
            let descriptor = first + left.trailing_zeros() as i32;
            left &= left - 1;
            // The program may have taken the number of a session that has ended.
            if is_internal(descriptor) {
                forget_internal(descriptor);
                close_number(descriptor);
            }
        }
    }
}

/// Returns whether there ever was a LibFS descriptor.
pub(crate) fn was_any_ours() -> bool {
    highest() > 0
}

/// Returns all LibFS descriptors in a range.
pub(crate) fn ours(from: u32, to: u32) -> impl Iterator<Item = i32> {
    let end = to.saturating_add(1).min(HIGHEST.load(Ordering::Acquire));
    (from..end).map(|number| number as i32).filter(|&number| is_ours(number))
}

/// Gives an open file a descriptor: the lowest number that is free, from `from` on.
///
/// # Errors
/// `EMFILE`; `EINVAL` if `from` is beyond the largest number.
pub(crate) fn install(file: &OpenFileRef, from: i32, cloexec: bool) -> Result<i32, Errno> {
    let number = reserve_number(from, cloexec)?;
    enter(file, number);
    Ok(number)
}

/// Reserves a number for a descriptor, with a placeholder in the kernel.
///
/// # Errors
/// As [`install`].
pub(crate) fn reserve_number(from: i32, cloexec: bool) -> Result<i32, Errno> {
    if from > 0 {
        // The lowest free number does not count then.
        recycled_descriptor::close_recycled();
    } else if let Some(recycled) = recycled_descriptor::take_number(cloexec) {
        return Ok(recycled);
    }
    let command = if cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD } as u64;
    let duplicate = |placeholder: i32| {
        // SAFETY: it makes a descriptor.
        unsafe { system_call(libc::SYS_fcntl as u64, [placeholder as u64, command, from as u64, 0, 0, 0]) as i32 }
    };
    let mut number = duplicate(session::placeholder()?);
    if number == -libc::EBADF {
        // The program has closed it past libc.
        session::forget_placeholder();
        number = duplicate(session::placeholder()?);
    }
    if number < 0 {
        return Err(Errno(-number));
    }
    if number as usize >= DESCRIPTORS {
        close_number(number);
        return Err(Errno::EMFILE);
    }
    if from == 0 {
        recycled_descriptor::record_lowest(number);
    }
    Ok(number)
}

/// Gives back a number that was reserved and not used.
pub(crate) fn give_back_number(number: i32, cloexec: bool) {
    if !recycled_descriptor::recycle(number, cloexec) {
        close_number(number);
    }
}

/// Makes a number lead to an open file that was just opened.
pub(crate) fn enter_new(file: &OpenFileRef, number: i32, cloexec: bool) {
    record_highest(number);
    file.add_descriptor(number, if cloexec { OnExec::Closes } else { OnExec::Stays });
}

/// Makes a number lead to an open file.
///
/// The kernel has the placeholder there already.
pub(crate) fn enter(file: &OpenFileRef, number: i32) {
    record_highest(number);
    file.add_descriptor(number, OnExec::Unknown);
}

/// Removes a descriptor from the table, if it is LibFS's.
///
/// The kernel's number stays.
pub(crate) fn remove(descriptor: i32) -> Option<OpenFileRef> {
    let _one_at_a_time = TABLE.lock();
    let entry = table_entry(descriptor)?;
    let number = entry.load(Ordering::Acquire);
    if !is_file(number) {
        return None;
    }
    entry.store(0, Ordering::Release);
    Some(OpenFileRef { number })
}

/// Returns whether the kernel closes a descriptor when another program is run.
///
/// Returns `None` if it is not open.
pub(crate) fn closes_on_exec(descriptor: i32) -> Option<bool> {
    let arguments = [descriptor as u64, libc::F_GETFD as u64, 0, 0, 0, 0];
    // SAFETY: it asks for a flag.
    let flags = unsafe { system_call(libc::SYS_fcntl as u64, arguments) };
    (flags >= 0).then_some(flags & i64::from(libc::FD_CLOEXEC) != 0)
}

/// Closes the kernel's descriptor.
pub(crate) fn close_number(descriptor: i32) -> i64 {
    recycled_descriptor::record_freed(descriptor as u32);
    // SAFETY: neither the program nor the library uses it any more.
    unsafe { system_call(libc::SYS_close as u64, [descriptor as u64, 0, 0, 0, 0, 0]) }
}

/// Keeps other threads from changing which numbers lead where.
pub(crate) fn hold_table() -> MutexGuard<'static, Inherited> {
    TABLE.lock()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_adoptable_gets_unique_file_number() {
        // The last of all numbers, which no other test uses.
        let last = ADOPTABLE_MAX - 1;
        let numbers = [ADOPTABLE, DUPLICATED, DUPLICATED, 1, ADOPTABLE, last as u32 - 4, INTERNAL, PATH_BASE];
        let first = ADOPTABLE_MAX - numbers.len() as i32;
        let fill = |numbers: &[u32]| {
            for (descriptor, number) in (first..).zip(numbers) {
                ASHLAR_DESCRIPTORS[descriptor as usize].store(*number, Ordering::Relaxed);
            }
        };
        fill(&numbers);
        let found: Vec<_> = unshared().filter(|(descriptor, _)| *descriptor >= first).collect();
        fill(&[0; 8]);
        assert!(found.iter().map(|(descriptor, _)| *descriptor).eq(first..first + 6));
        for (at, (_, number)) in found.iter().enumerate() {
            let alike = found.iter().filter(|(_, other)| other == number).count();
            assert_eq!(alike, if numbers[at] == DUPLICATED { 2 } else { 1 }, "{at}");
        }
    }
}
