//! Watches by inotify and fanotify, which the kernel serves.
//!
//! The kernel sees only operations through itself. So before a watch begins, the mount reserves its inode for the
//! kernel, and the process hands its own open files of that inode over.

use std::ffi::{CStr, CString};

use ashlar_types::Errno;
use ashlar_wire::{WATCH_ALL_ATTRIBUTE, WATCH_ATTRIBUTE};

use super::Served;
use crate::entry::arch::system_call;
use crate::files::{descriptors, materialise, path};
use crate::memory::program_memory::{self, PathBuffer};
use crate::sessions::session::MountSession;

/// `FAN_MARK_ADD`, `FAN_MARK_DONT_FOLLOW`, `FAN_MARK_MOUNT` and `FAN_MARK_FILESYSTEM`.
const MARK_ADD: u64 = 0x1;
const MARK_DONT_FOLLOW: u64 = 0x4;
const MARK_ALL: u64 = 0x110;

/// Prepares `inotify_add_watch` and `fanotify_mark`, which the kernel serves.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    match number {
        libc::SYS_inotify_add_watch => {
            reserve_watched(libc::AT_FDCWD, a[1], a[2] & u64::from(libc::IN_DONT_FOLLOW) == 0, false)?;
        }
        _ => {
            materialise::hand_over(a[3] as i32)?;
            if a[1] & MARK_ADD != 0 {
                reserve_watched(a[3] as i32, a[4], a[1] & MARK_DONT_FOLLOW == 0, a[1] & MARK_ALL != 0)?;
            }
        }
    }
    Ok(None)
}

/// Makes the mount of a path reserve its inode, or all its inodes.
///
/// The kernel handles a path elsewhere, or to nothing.
fn reserve_watched(directory: i32, address: u64, follows: bool, is_all: bool) -> Result<(), Errno> {
    if let Some(number) = path::descriptor_at_address(address) {
        materialise::hand_over(number)?;
    }
    let mut buffer = PathBuffer::new();
    let text = if address == 0 { None } else { Some(program_memory::copy_path(address, &mut buffer)?) };
    let text = match text {
        Some(text) if directory == libc::AT_FDCWD || text.first() == Some(&b'/') => text.to_vec(),
        // The path by way of the descriptor: no call for attributes takes a descriptor and a path.
        text => [format!("/proc/self/fd/{directory}/").as_bytes(), text.unwrap_or(b".")].concat(),
    };
    let text = CString::new(text).map_err(|_| Errno::EINVAL)?;
    let attribute = if is_all { WATCH_ALL_ATTRIBUTE } else { WATCH_ATTRIBUTE };
    let attribute = CString::new(attribute).map_err(|_| Errno::EINVAL)?;
    if has_attribute(&text, &attribute, follows) {
        hand_over_reserved();
    }
    Ok(())
}

fn has_attribute(path: &CStr, name: &CStr, follows: bool) -> bool {
    let call = if follows { libc::SYS_getxattr } else { libc::SYS_lgetxattr };
    // SAFETY: both are strings that outlive the call, which returns only the length of the value.
    unsafe { system_call(call as u64, [path.as_ptr() as u64, name.as_ptr() as u64, 0, 0, 0, 0]) > 0 }
}

/// Hands open files of reserved inodes over to the kernel, so that the watch sees no opening of them.
fn hand_over_reserved() {
    for number in descriptors::ours(0, u32::MAX) {
        let Some(file) = descriptors::file(number) else { continue };
        let is_reserved = |session: &MountSession| session.fs.attributes(file.inode()) == Err(Errno::RESERVED);
        if file.session().is_ok_and(is_reserved) {
            // If the hand-over fails, the next call on the file repeats it.
            let _ = materialise::hand_over(number);
        }
    }
}
