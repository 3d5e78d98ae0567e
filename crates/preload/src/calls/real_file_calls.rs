//! Calls that the kernel answers on a real open file beside LibFS's.
//!
//! They read or change the file, but neither keep the open file nor use its offset, its flags or its locks. So any open
//! file of that file serves them, and LibFS keeps its own. The kernel refuses most of them: regular files support few
//! requests, and are no sockets.

use super::Served;
use super::call_shape::{Shape, paths_of, shape_of};
use crate::entry::arch::{Frame, system_call};
use crate::entry::hook;
use crate::files::descriptors::{self, OpenFileRef};
use crate::files::{materialise, record_locks};
use crate::memory::program_memory;

/// Commands for the process that gets an open file's signals, the signal, and the user that set it.
const F_GETOWN_EX: i32 = 16;
const F_SETOWN_EX: i32 = 15;
const F_GETOWNER_UIDS: i32 = 17;
const F_GETOWN: i32 = 9;
const F_SETOWN: i32 = 8;
const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
/// Commands for the expected lifetime of a file's data.
const F_GET_FILE_RW_HINT: i32 = 1037;
const F_SET_FILE_RW_HINT: i32 = 1038;

/// The subject of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallSubject {
    /// The file: any open file of it serves.
    File,
    /// The open file, unless the kernel refuses the call.
    OpenFile,
    /// The open file.
    OpenFileAlone,
}

/// Lets the kernel answer a call on a LibFS descriptor that LibFS does not serve.
///
/// Returns `None` if the open file must be handed over to the kernel for the call.
pub(super) fn answer_by_kernel(call: &Frame) -> Served {
    let a = &call.arguments;
    let Some((at, file)) = named_file(call) else { return Ok(None) };
    let subject = subject_of(call.rax as i64, a, &file);
    if subject == CallSubject::OpenFileAlone {
        return Ok(None);
    }
    record_locks::with_real_file(&file, false, |real| {
        if call.rax as i64 == libc::SYS_ioctl && a[1] == libc::FIONREAD {
            // The kernel counts from the open file's offset.
            file.place().iter().for_each(|place| materialise::set_kernel_offset(real, place.offset));
        }
        let mut arguments = *a;
        arguments[at] = real as u64;
        // SAFETY: the program's own call, but for the number of the descriptor.
        let result = unsafe { system_call(call.rax, arguments) };
        let is_answer = subject == CallSubject::File || result < 0;
        if is_answer {
            hook::record_kernel_served();
        }
        Ok(is_answer.then_some(result))
    })
}

/// Returns the LibFS open file that a call is about, and the index of its descriptor.
///
/// The descriptor comes first, or before a path that is empty.
fn named_file(call: &Frame) -> Option<(usize, OpenFileRef)> {
    let a = &call.arguments;
    let file = |at: usize| Some((at, descriptors::file(a[at] as i32)?));
    match shape_of(call.rax as i64) {
        Shape::At => {
            let &(from, path) = paths_of(Shape::At).first()?;
            let is_empty = a[path] == 0 || program_memory::load::<u8>(a[path]) == Ok(0);
            if is_empty { file(from?) } else { None }
        }
        Shape::Descriptor | Shape::OtherKind | Shape::Address => file(0),
        _ => match call.rax as i64 {
            libc::SYS_fcntl | libc::SYS_ioctl | libc::SYS_sendmsg | libc::SYS_sendmmsg => file(0),
            libc::SYS_inotify_add_watch => file(0),
            _ => None,
        },
    }
}

fn subject_of(number: i64, a: &[u64; 6], file: &OpenFileRef) -> CallSubject {
    match number {
        libc::SYS_fcntl => match a[1] as i32 {
            F_GETOWN | F_GETOWN_EX | F_GETOWNER_UIDS | F_GETSIG | libc::F_GETLEASE => CallSubject::File,
            F_GET_FILE_RW_HINT | F_SET_FILE_RW_HINT => CallSubject::File,
            F_SETOWN | F_SETOWN_EX | F_SETSIG => CallSubject::OpenFileAlone,
            libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => CallSubject::OpenFileAlone,
            libc::F_NOTIFY if file.is_directory() => CallSubject::OpenFileAlone,
            _ => CallSubject::OpenFile,
        },
        // If LibFS does not serve these, another thread has handed the open file over to the kernel, or other processes
        // share it.
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
        | libc::SYS_lseek
        | libc::SYS_getdents
        | libc::SYS_getdents64 => CallSubject::OpenFileAlone,
        // Handing a directory over costs nothing: LibFS goes on resolving paths from it.
        libc::SYS_openat2 | libc::SYS_open_by_handle_at | libc::SYS_fspick | libc::SYS_setns => {
            CallSubject::OpenFileAlone
        }
        libc::SYS_close | libc::SYS_dup | libc::SYS_flock => CallSubject::OpenFileAlone,
        _ => CallSubject::File,
    }
}
