//! Waiting for descriptors. A file is always ready, which the kernel says best: those of ours that are waited for become its own.

use ashlar_types::Errno;

use super::Served;
use crate::materialise;
use crate::memory;

/// Descriptors in one word of a set.
const WORD_BITS: u64 = 64;

/// Serves `poll`, `select` and their like.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    match number {
        libc::SYS_poll | libc::SYS_ppoll => polled(a[0], a[1])?,
        libc::SYS_select | libc::SYS_pselect6 => {
            for set in [a[1], a[2], a[3]] {
                selected(set, a[0] as i32)?;
            }
        }
        _ => {}
    }
    Ok(None)
}

fn polled(address: u64, count: u64) -> Result<(), Errno> {
    for index in 0..count {
        let polled: libc::pollfd = memory::load(address + index * size_of::<libc::pollfd>() as u64)?;
        materialise::descriptor(polled.fd)?;
    }
    Ok(())
}

fn selected(set: u64, count: i32) -> Result<(), Errno> {
    if set == 0 {
        return Ok(());
    }
    for word_number in 0..u64::from(count.max(0) as u32).div_ceil(WORD_BITS) {
        let mut word: u64 = memory::load(set + word_number * 8)?;
        while word != 0 {
            materialise::descriptor((word_number * WORD_BITS + u64::from(word.trailing_zeros())) as i32)?;
            word &= word - 1;
        }
    }
    Ok(())
}
