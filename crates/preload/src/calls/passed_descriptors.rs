//! Descriptors that a call passes to the kernel in another place than its subject.
//!
//! They stand in a later argument, in a structure, or in a path. The kernel goes on using most of them after the call,
//! so they are handed over to it.

use ashlar_types::Errno;

use super::descriptor::{FICLONE, FICLONERANGE, FIDEDUPERANGE};
use crate::entry::arch::Frame;
use crate::files::path;
use crate::memory::program_memory;

const LANDLOCK_RULE_PATH_BENEATH: u64 = 1;
/// The offset of the path in the address of a socket (`sockaddr_un`).
const SOCKET_PATH_AT: u64 = 2;
const KCMP_FILE: u64 = 0;
const FSCONFIG_SET_PATH: u64 = 3;
const FSCONFIG_SET_PATH_EMPTY: u64 = 4;
const FSCONFIG_SET_FD: u64 = 5;

/// Requests whose argument is a descriptor.
///
/// They are `FICLONE`, `LOOP_SET_FD`, `LOOP_CHANGE_FD`, `NBD_SET_SOCK`, `PERF_EVENT_IOC_SET_OUTPUT` and `…_SET_BPF`.
const ARGUMENTS: [u64; 6] = [FICLONE, 0x4C00, 0x4C06, 0xAB00, 0x2405, 0x4004_2408];
/// Requests whose argument is a structure, and its descriptors' offsets.
///
/// Each descriptor has four bytes.
const IN_STRUCTURES: [(u64, &[u64]); 18] = [
    (FICLONERANGE, &[0]),
    // LOOP_CONFIGURE
    (0x4C0A, &[0]),
    // EXT4_IOC_MOVE_EXT
    (0xC028_660F, &[4]),
    // F2FS_IOC_MOVE_RANGE
    (0xC020_F509, &[0]),
    // XFS_IOC_EXCHANGE_RANGE, XFS_IOC_SWAPEXT
    (0x4028_5881, &[0]),
    (0xC0C0_586D, &[8, 16]),
    // BTRFS_IOC_SNAP_CREATE, …_V2, BTRFS_IOC_SEND
    (0x5000_9401, &[0]),
    (0x5000_9417, &[0]),
    (0x4048_9426, &[0]),
    // FUSE_DEV_IOC_CLONE, FUSE_DEV_IOC_BACKING_OPEN
    (0x8004_E500, &[0]),
    (0x4010_E501, &[0]),
    // SECCOMP_IOCTL_NOTIF_ADDFD
    (0x4018_2103, &[12]),
    // UDMABUF_CREATE
    (0x4018_7542, &[0]),
    // VHOST_SET_VRING_KICK, …_CALL, …_ERR, VHOST_NET_SET_BACKEND, VHOST_SET_LOG_FD
    (0x4008_AF20, &[4]),
    (0x4008_AF21, &[4]),
    (0x4008_AF22, &[4]),
    (0x4008_AF30, &[4]),
    (0x4004_AF07, &[0]),
];
/// Layout of `struct file_dedupe_range`.
///
/// These are the offset of the number of files, the offset of the first file, and the bytes of each.
const DEDUPED_COUNT_AT: u64 = 16;
const DEDUPED_AT: u64 = 24;
const DEDUPED_BYTES: u64 = 32;
/// As many as fit into the memory that the kernel allocates for them.
const DEDUPED_MAX: u16 = 4096 / DEDUPED_BYTES as u16;

/// Returns whether a call passes a descriptor for which `is_meant` is true.
///
/// Unreadable memory passes none: the kernel reports it.
pub(super) fn passes_any(call: &Frame, is_meant: impl Fn(i32) -> bool) -> bool {
    let mut is_any = false;
    let _ = for_each_passed(call, &mut |descriptor| {
        is_any |= is_meant(descriptor);
        Ok(())
    });
    is_any
}

/// Calls `then` with each descriptor that a call passes, until that fails.
///
/// # Errors
/// Those of `then`, and `EFAULT` if the structure can't be read.
pub(super) fn for_each_passed(call: &Frame, then: &mut dyn FnMut(i32) -> Result<(), Errno>) -> Result<(), Errno> {
    let a = &call.arguments;
    match call.rax as i64 {
        libc::SYS_ioctl => in_request(a[1], a[2], then),
        libc::SYS_sendmsg => in_message(a[1], then),
        libc::SYS_sendmmsg => {
            let message = |index: u64| a[1] + index * size_of::<libc::mmsghdr>() as u64;
            (0..a[2]).try_for_each(|index| in_message(message(index), then))
        }
        libc::SYS_bind | libc::SYS_connect => match socket_path(a[1], a[2]).and_then(path::descriptor_at_address) {
            Some(descriptor) => then(descriptor),
            None => Ok(()),
        },
        libc::SYS_fanotify_mark => then(a[3] as i32),
        // allowed:8 directory:4
        libc::SYS_landlock_add_rule if a[1] == LANDLOCK_RULE_PATH_BENEATH => then(program_memory::load(a[2] + 8)?),
        libc::SYS_kcmp if a[2] == KCMP_FILE => {
            let own = u64::from(std::process::id());
            let compared = [(a[0], a[3]), (a[1], a[4])].into_iter().filter(|&(process, _)| process == own);
            compared.into_iter().try_for_each(|(_, descriptor)| then(descriptor as i32))
        }
        libc::SYS_pidfd_getfd => then(a[1] as i32),
        libc::SYS_fsconfig => match a[1] {
            FSCONFIG_SET_PATH | FSCONFIG_SET_PATH_EMPTY | FSCONFIG_SET_FD => then(a[4] as i32),
            _ => Ok(()),
        },
        libc::SYS_kexec_file_load => [a[0], a[1]].into_iter().try_for_each(|descriptor| then(descriptor as i32)),
        _ => Ok(()),
    }
}

/// Returns the address of a socket's path.
///
/// Sockets that the kernel has named and abstract ones have none.
pub(super) fn socket_path(address: u64, length: u64) -> Option<u64> {
    let at = address + SOCKET_PATH_AT;
    let is_path = program_memory::load::<u16>(address).is_ok_and(|family| family == libc::AF_UNIX as u16)
        && length > SOCKET_PATH_AT
        && program_memory::load::<u8>(at).is_ok_and(|first| first != 0);
    is_path.then_some(at)
}

fn in_request(request: u64, argument: u64, then: &mut dyn FnMut(i32) -> Result<(), Errno>) -> Result<(), Errno> {
    if ARGUMENTS.contains(&request) {
        return then(argument as i32);
    }
    if request == FIDEDUPERANGE {
        let count = program_memory::load::<u16>(argument + DEDUPED_COUNT_AT)?.min(DEDUPED_MAX);
        let file = |index: u16| program_memory::load(argument + DEDUPED_AT + u64::from(index) * DEDUPED_BYTES);
        return (0..count).try_for_each(|index| then(file(index)?));
    }
    let Some((_, places)) = IN_STRUCTURES.iter().find(|(known, _)| *known == request) else { return Ok(()) };
    places.iter().try_for_each(|place| then(program_memory::load(argument + place)?))
}

/// Calls `then` with each descriptor that a message passes on.
fn in_message(message: u64, then: &mut dyn FnMut(i32) -> Result<(), Errno>) -> Result<(), Errno> {
    let message: libc::msghdr = program_memory::load(message)?;
    let (mut at, length) = (message.msg_control as u64, message.msg_controllen as u64);
    let end = at + length;
    // A header: length:8 level:4 kind:4, then content; the next one begins at a multiple of 8.
    while at + 16 <= end {
        let length: u64 = program_memory::load(at)?;
        let level: i32 = program_memory::load(at + 8)?;
        let kind: i32 = program_memory::load(at + 12)?;
        if length < 16 || length > end - at {
            break;
        }
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            for place in (at + 16..at + length).step_by(4).filter(|place| place + 4 <= at + length) {
                then(program_memory::load(place)?)?;
            }
        }
        at += length.next_multiple_of(8);
    }
    Ok(())
}
