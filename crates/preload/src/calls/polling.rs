//! Waiting for descriptors (`poll`, `select`, `epoll`).
//!
//! A file is always ready. The kernel reports this best, so the LibFS files that a call waits for are handed over to
//! it. No file is added to a set for `epoll`: programs detect a file by that error (libevent, Python). The kernel would
//! accept a FUSE file.

use ashlar_types::Errno;

use super::Served;
use crate::files::{descriptors, materialise};
use crate::memory::program_memory;
use crate::sessions::session;

/// Descriptors in one word of a set.
const WORD_BITS: u64 = 64;

/// Serves `poll`, `select` and their like.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    match number {
        libc::SYS_poll | libc::SYS_ppoll => hand_over_polled(a[0], a[1])?,
        libc::SYS_select | libc::SYS_pselect6 => {
            for set in [a[1], a[2], a[3]] {
                hand_over_selected(set, a[0] as i32)?;
            }
        }
        libc::SYS_epoll_ctl if may_be_libfs_file(a[2] as i32) => return refuse_epoll(a),
        _ => {}
    }
    Ok(None)
}

/// Returns whether a descriptor is LibFS's, or an adoptable regular file.
///
/// The kernel itself refuses directories and `O_PATH` descriptors.
fn may_be_libfs_file(descriptor: i32) -> bool {
    let is_path = || materialise::kernel_flags(descriptor) & libc::O_PATH != 0;
    let is_regular = || session::device_and_kind_of(descriptor).is_some_and(|(_, is_regular)| is_regular);
    descriptors::is_ours(descriptor) || descriptors::is_adoptable(descriptor) && is_regular() && !is_path()
}

/// Returns the kernel's error for a file in a set for `epoll`.
///
/// The call adds it, or changes or removes it.
fn refuse_epoll(a: &[u64; 6]) -> Served {
    if a[1] as i32 != libc::EPOLL_CTL_DEL {
        program_memory::check_access(a[3], size_of::<libc::epoll_event>() as u64, program_memory::MemoryUse::Read)?;
    }
    let is_there = descriptors::closes_on_exec(a[0] as i32).is_some();
    Err(if is_there { Errno::EPERM } else { Errno::EBADF })
}

fn hand_over_polled(address: u64, count: u64) -> Result<(), Errno> {
    for index in 0..count {
        let polled: libc::pollfd = program_memory::load(address + index * size_of::<libc::pollfd>() as u64)?;
        materialise::hand_over(polled.fd)?;
    }
    Ok(())
}

fn hand_over_selected(set: u64, count: i32) -> Result<(), Errno> {
    if set == 0 {
        return Ok(());
    }
    for word_number in 0..u64::from(count.max(0) as u32).div_ceil(WORD_BITS) {
        let mut word: u64 = program_memory::load(set + word_number * 8)?;
        while word != 0 {
            materialise::hand_over((word_number * WORD_BITS + u64::from(word.trailing_zeros())) as i32)?;
            word &= word - 1;
        }
    }
    Ok(())
}
