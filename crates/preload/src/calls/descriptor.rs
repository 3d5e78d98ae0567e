//! Calls on descriptors as such: closing, duplicating, flags, locks.

use std::sync::atomic::Ordering;

use ashlar_types::Errno;

use super::{F_CREATED_QUERY, F_DUPFD_QUERY, Served, data, process};
use crate::entry::arch::system_call;
use crate::entry::single_thread;
use crate::files::descriptors::{self, CHANGEABLE, OnExec, OpenFileRef};
use crate::files::record_locks::FcntlOutcome;
use crate::files::{record_locks, recycled_descriptor};
use crate::memory::program_memory;
use crate::sessions::session;

/// The flag for files larger than 2 GiB: always set on 64 bits, and shown by `F_GETFL`.
const LARGE_FILE: i32 = 0o100_000;
const TCGETS: u64 = libc::TCGETS;
/// As `TCGETS`, with any speed.
const TCGETS2: u64 = 0x802c_542a;
/// Copies a file, or a part of it, by sharing its blocks.
pub(super) const FICLONE: u64 = 0x4004_9409;
pub(super) const FICLONERANGE: u64 = 0x4020_940D;
/// Makes equal parts of files share their blocks.
pub(super) const FIDEDUPERANGE: u64 = 0xC018_9436;
/// Commands for the expected lifetime of written data.
const F_GET_RW_HINT: i32 = 1035;
const F_SET_RW_HINT: i32 = 1036;
/// `RWH_WRITE_LIFE_EXTREME`.
const RW_HINT_MAX: u64 = 5;

/// Serves any call on descriptors.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    let descriptor = a[0] as i32;
    match number {
        libc::SYS_close if descriptors::is_internal(descriptor) => Err(Errno::EBADF),
        libc::SYS_close => Ok(close(descriptor)),
        libc::SYS_dup => duplicate(descriptor, 0, false),
        libc::SYS_dup2 => duplicate_to(descriptor, a[1] as i32, 0, false),
        libc::SYS_dup3 => duplicate_to(descriptor, a[1] as i32, a[2] as i32, true),
        libc::SYS_close_range => close_range(a),
        libc::SYS_fcntl => control_descriptor(descriptor, a[1] as i32, a[2]),
        // It is no terminal: stdio asks this of each file that it writes to.
        libc::SYS_ioctl if is_terminal_request(a[1]) && descriptors::is_ours(descriptor) => Err(Errno::ENOTTY),
        libc::SYS_ioctl if a[1] == FICLONE => clone_file(descriptor, a[2] as i32),
        libc::SYS_ioctl if a[1] == FICLONERANGE => clone_file(descriptor, program_memory::load(a[2])?),
        libc::SYS_ioctl if a[1] == libc::FIONBIO => match descriptors::file(descriptor) {
            Some(file) => {
                let to = if program_memory::load::<i32>(a[2])? == 0 { 0 } else { libc::O_NONBLOCK };
                Ok(Some(set_flags(&file, descriptor, libc::O_NONBLOCK, to)))
            }
            None => Ok(None),
        },
        libc::SYS_ioctl if [libc::FIOCLEX, libc::FIONCLEX].contains(&a[1]) => {
            let flag = if a[1] == libc::FIOCLEX { libc::FD_CLOEXEC } else { 0 };
            control_descriptor(descriptor, libc::F_SETFD, flag as u64)
        }
        _ => Ok(None),
    }
}

/// Returns whether an `ioctl` is one that only terminals know.
pub(crate) const fn is_terminal_request(request: u64) -> bool {
    request == TCGETS || request == TCGETS2 || request == libc::TIOCGWINSZ
}

/// Serves `ioctl(FICLONE)`: no file shares blocks with another one.
///
/// `cp` asks this for each file before it copies it.
fn clone_file(to: i32, from: i32) -> Served {
    let is_closed = |file: &OpenFileRef| file.flags() & libc::O_PATH != 0;
    if descriptors::closes_on_exec(from).is_none() {
        return Err(Errno::EBADF);
    }
    match (descriptors::file(to), descriptors::file(from)) {
        (to, from) if to.as_ref().is_some_and(is_closed) || from.as_ref().is_some_and(is_closed) => Err(Errno::EBADF),
        (Some(to), Some(from)) if to.session()?.number == from.session()?.number => {
            if from.is_directory() || to.is_directory() {
                return Err(Errno::EISDIR);
            }
            let may = data::may_be_copied(from.flags(), to.flags());
            Err(if may { Errno::EOPNOTSUPP } else { Errno::EBADF })
        }
        (to_file, from_file) => match data::KernelFile::beside_ours(to, from) {
            Some(other) if other.is_apart => Err(Errno::EXDEV),
            Some(other) if other.is_regular => {
                let may = other.may_be_copied(from_file.as_ref(), to_file.as_ref());
                Err(if may { Errno::EOPNOTSUPP } else { Errno::EBADF })
            }
            _ => Ok(None),
        },
    }
}

/// Serves `close` of a LibFS descriptor.
#[inline]
pub(super) fn close_fast(descriptor: i32) -> Option<i64> {
    let file = descriptors::remove(descriptor)?;
    record_locks::end_locks(&file);
    let is_recycled = match file.on_exec() {
        OnExec::Unknown => false,
        known => recycled_descriptor::recycle(descriptor, known == OnExec::Closes),
    };
    Some(if is_recycled { 0 } else { descriptors::close_number(descriptor) })
}

fn close(descriptor: i32) -> Option<i64> {
    if let Some(closed) = close_fast(descriptor) {
        return Some(closed);
    }
    recycled_descriptor::record_freed(descriptor as u32);
    let named = record_locks::file_of_closing(descriptor);
    descriptors::forget_kernel_entry(descriptor);
    let named = named?;
    let result = descriptors::close_number(descriptor);
    record_locks::end_locks_of_closed(named);
    Some(result)
}

fn duplicate(descriptor: i32, from: i32, cloexec: bool) -> Served {
    let Some(file) = descriptors::file(descriptor) else {
        return Ok(duplicate_kernels(descriptor, from, cloexec));
    };
    if from < 0 {
        return Err(Errno::EINVAL);
    }
    if file.shared().is_some() {
        return duplicate_real(&file, descriptor, from, cloexec);
    }
    descriptors::install(&file, from, cloexec).map(|number| Some(number.into()))
}

/// Duplicates a LibFS descriptor whose open file forked processes share.
///
/// The kernel has a real open file there.
fn duplicate_real(file: &OpenFileRef, descriptor: i32, from: i32, cloexec: bool) -> Served {
    recycled_descriptor::close_recycled();
    let made = kernel_duplicate(descriptor, from, cloexec);
    if made >= 0 {
        if made as usize >= crate::entry::arch::DESCRIPTORS {
            descriptors::close_number(made as i32);
            return Err(Errno::EMFILE);
        }
        descriptors::enter(file, made as i32);
    }
    Ok(Some(made))
}

fn kernel_duplicate(descriptor: i32, from: i32, cloexec: bool) -> i64 {
    let command = if cloexec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    let arguments = [descriptor as u64, command as u64, from as u64, 0, 0, 0];
    // SAFETY: the program's own call.
    unsafe { system_call(libc::SYS_fcntl as u64, arguments) }
}

/// Duplicates a kernel descriptor from which paths may begin, or which is adoptable: so is the new one.
fn duplicate_kernels(descriptor: i32, from: i32, cloexec: bool) -> Option<i64> {
    if !descriptors::is_path_base(descriptor) && !descriptors::is_adoptable(descriptor) {
        return None;
    }
    recycled_descriptor::close_recycled();
    let made = kernel_duplicate(descriptor, from, cloexec);
    if made >= 0 {
        record_duplicate(descriptor, made as i32);
    }
    Some(made)
}

/// Records that one kernel descriptor is a duplicate of another.
fn record_duplicate(old: i32, new: i32) {
    if descriptors::is_adoptable(old) {
        descriptors::record_adoptable_duplicate(old, new);
    } else if descriptors::is_path_base(old) {
        descriptors::record_path_base(new);
    }
}

/// Serves `dup2` and `dup3`, if LibFS serves the one or the other descriptor.
fn duplicate_to(old: i32, new: i32, flags: i32, is_dup3: bool) -> Served {
    let file = descriptors::file(old);
    let number = if is_dup3 { libc::SYS_dup3 } else { libc::SYS_dup2 };
    let call = || {
        // SAFETY: the program's own call.
        unsafe { system_call(number as u64, [old as u64, new as u64, flags as u64, 0, 0, 0]) }
    };
    if old != new && descriptors::is_internal(new) && descriptors::closes_on_exec(old).is_some() {
        // The program does not know this descriptor, and may use any number. It must not receive the library's messages
        // there.
        process::leave_to_kernel();
        return Ok(None);
    }
    if old == new {
        // The kernel changes nothing, or reports an error; the placeholder serves for that.
        return Ok(Some(call()));
    }
    // The kernel puts the placeholder at the new number, and closes its descriptor there. It reports unknown flags and
    // invalid numbers.
    let named = record_locks::file_of_closing(new);
    let done = call();
    if done < 0 {
        return Ok(Some(done));
    }
    if let Some(named) = named {
        record_locks::end_locks_of_closed(named);
    }
    let replaced = descriptors::remove(new);
    descriptors::forget_kernel_entry(new);
    if let Some(replaced) = &replaced {
        record_locks::end_locks(replaced);
    }
    if file.is_none() {
        record_duplicate(old, new);
    }
    if let Some(file) = &file {
        if new as usize >= crate::entry::arch::DESCRIPTORS {
            descriptors::close_number(new);
            return Err(Errno::EMFILE);
        }
        descriptors::enter(file, new);
    }
    Ok(Some(done))
}

fn close_range(a: &[u64; 6]) -> Served {
    let (first, last, flags) = (a[0] as u32, a[1] as u32, a[2] as u32);
    // The kernel reports an unknown flag.
    if first > last || flags & !(libc::CLOSE_RANGE_UNSHARE | libc::CLOSE_RANGE_CLOEXEC) != 0 {
        return Ok(None);
    }
    if flags & libc::CLOSE_RANGE_UNSHARE != 0 && !single_thread::is_single_thread() {
        // From here on this thread has descriptors of its own, but the table is of the descriptors of all threads.
        process::leave_to_kernel();
        return Ok(None);
    }
    if flags & libc::CLOSE_RANGE_CLOEXEC != 0 {
        // The placeholders have this flag, as any descriptor.
        descriptors::ours(first, last).filter_map(descriptors::file).for_each(|file| file.forget_on_exec());
        return Ok(None);
    }
    for descriptor in descriptors::ours(first, last) {
        close(descriptor);
    }
    let is_closed = |descriptor: &i32| (first..=last).contains(&(*descriptor as u32));
    descriptors::adoptable().filter(is_closed).for_each(descriptors::forget_kernel_entry);
    recycled_descriptor::record_freed(first);
    let named = record_locks::files_of_closing(first, last);
    descriptors::inherited().filter(is_closed).for_each(descriptors::forget_kernel_entry);
    descriptors::forget_path_bases(first, last);
    let _closes = LocksEndingOnDrop(named);
    // Close around the descriptors that the program does not know of.
    let mut from = first;
    let highest = last.min(crate::entry::arch::DESCRIPTORS as u32);
    for internal in (first..=highest).filter(|&number| descriptors::is_internal(number as i32)) {
        if from < internal {
            close_kernel_range(from, internal - 1);
        }
        from = internal + 1;
    }
    Ok(Some(if from <= last { close_kernel_range(from, last) } else { 0 }))
}

/// Files that are closed; their locks end when this is dropped.
struct LocksEndingOnDrop(Vec<record_locks::LockedFile>);

impl Drop for LocksEndingOnDrop {
    fn drop(&mut self) {
        self.0.drain(..).for_each(record_locks::end_locks_of_closed);
    }
}

fn close_kernel_range(first: u32, last: u32) -> i64 {
    // SAFETY: the program's own call, or a part of it.
    unsafe { system_call(libc::SYS_close_range as u64, [first.into(), last.into(), 0, 0, 0, 0]) }
}

/// Sets status flags of an open file, and of the real open file that other processes share.
fn set_flags(file: &OpenFileRef, descriptor: i32, change: i32, to: i32) -> i64 {
    file.set_flags(change, to);
    if file.shared().is_none() {
        return 0;
    }
    let arguments = [descriptor as u64, libc::F_SETFL as u64, file.flags() as u64, 0, 0, 0];
    // SAFETY: it sets flags that the program has asked for.
    unsafe { system_call(libc::SYS_fcntl as u64, arguments) }
}

/// Returns whether the open call behind a kernel's open file has created the file.
pub(super) fn has_created_file(descriptor: i32) -> bool {
    // SAFETY: it asks for a flag.
    unsafe { system_call(libc::SYS_fcntl as u64, [descriptor as u64, F_CREATED_QUERY as u64, 0, 0, 0, 0]) == 1 }
}

/// Returns whether another descriptor leads to the same LibFS open file.
fn is_same_file(file: &OpenFileRef, other: i32) -> Result<bool, Errno> {
    if let Some(other) = descriptors::file(other) {
        return Ok(file.is_same(&other));
    }
    let is_there = !descriptors::is_internal(other) && descriptors::closes_on_exec(other).is_some();
    if is_there { Ok(false) } else { Err(Errno::EBADF) }
}

/// Serves `F_SETLEASE`: it grants no lease, as if others had the file open, if nothing else is wrong.
///
/// The kernel would grant leases by the open files that it knows, and would break them when it opens the file. It does
/// not see what LibFS opens.
fn set_lease(descriptor: i32, argument: u64) -> Served {
    let is_asked_for = [libc::F_RDLCK, libc::F_WRLCK].contains(&(argument as i32));
    let command = if is_asked_for { libc::F_UNLCK as u64 } else { argument };
    let ask = |descriptor: i32| {
        let arguments = [descriptor as u64, libc::F_SETLEASE as u64, command, 0, 0, 0];
        // SAFETY: the call takes numbers. It gives up no lease, since none exists.
        let result = unsafe { system_call(libc::SYS_fcntl as u64, arguments) };
        Ok(Some(if is_asked_for && result >= 0 { -i64::from(Errno::EAGAIN.0) } else { result }))
    };
    match descriptors::file(descriptor) {
        Some(file) => record_locks::with_real_file(&file, false, ask),
        None if descriptors::is_adoptable(descriptor) || session::file_of(descriptor).is_some() => ask(descriptor),
        None => Ok(None),
    }
}

/// Fails with `EPERM` unless the process's user owns the file or is the super-user.
fn check_owner(file: &OpenFileRef) -> Result<(), Errno> {
    let session = file.session()?;
    let owner = session.fs.attributes(file.inode())?.inode.uid;
    if session.user.uid == 0 || session.user.uid == owner { Ok(()) } else { Err(Errno::EPERM) }
}

fn control_descriptor(descriptor: i32, command: i32, argument: u64) -> Served {
    match command {
        libc::F_SETLEASE => return set_lease(descriptor, argument),
        libc::F_DUPFD => return duplicate(descriptor, argument as i32, false),
        libc::F_DUPFD_CLOEXEC => return duplicate(descriptor, argument as i32, true),
        _ => {}
    }
    let Some(file) = descriptors::file(descriptor) else { return Ok(None) };
    match command {
        libc::F_GETFD | libc::F_SETFD => {
            if command == libc::F_SETFD {
                file.forget_on_exec();
            }
            // The placeholder has this flag, as any descriptor.
            let arguments = [descriptor as u64, command as u64, argument, 0, 0, 0];
            // SAFETY: the program's own call.
            Ok(Some(unsafe { system_call(libc::SYS_fcntl as u64, arguments) }))
        }
        libc::F_GETFL if file.is_o_path() => Ok(Some(file.flags().into())),
        libc::F_GETFL => Ok(Some((file.flags() & !libc::O_CREAT | LARGE_FILE).into())),
        libc::F_SETFL => {
            let to = argument as i32;
            if to & libc::O_DIRECT != 0 && file.is_directory() {
                return Err(Errno::EINVAL);
            }
            let gains_noatime = to & libc::O_NOATIME != 0 && file.flags() & libc::O_NOATIME == 0;
            if gains_noatime {
                check_owner(&file)?;
            }
            Ok(Some(set_flags(&file, descriptor, CHANGEABLE, to)))
        }
        F_DUPFD_QUERY => is_same_file(&file, argument as i32).map(|is_same| Some(is_same.into())),
        F_CREATED_QUERY => Ok(Some(i64::from(file.flags() & libc::O_CREAT != 0))),
        F_GET_RW_HINT => {
            program_memory::store(argument, &u64::from(file.lifetime_hint().load(Ordering::Relaxed)))?;
            Ok(Some(0))
        }
        F_SET_RW_HINT => {
            check_owner(&file)?;
            match program_memory::load::<u64>(argument)? {
                hint @ 0..=RW_HINT_MAX => {
                    file.lifetime_hint().store(hint as u32, Ordering::Relaxed);
                    Ok(Some(0))
                }
                _ => Err(Errno::EINVAL),
            }
        }
        _ => Ok(None),
    }
}

/// Returns whether a command of `fcntl` is about a record lock of the process.
pub(super) fn is_record_lock(command: u64) -> bool {
    matches!(command as i32, libc::F_GETLK | libc::F_SETLK | libc::F_SETLKW)
}

/// Returns the outcome of a command of `fcntl`, if it is about a record lock.
pub(super) fn serve_record_lock(call: [u64; 6]) -> Result<FcntlOutcome, Errno> {
    if is_record_lock(call[1]) {
        record_locks::control_lock(call[0] as i32, call[1] as i32, call[2])
    } else {
        Ok(FcntlOutcome::Kernel)
    }
}
