//! Calls that the kernel answers on a real open file beside ours.
//!
//! They look at the file or change it, and neither keep the open file nor use its offset, its flags or its locks. So
//! it's the same for them which open file of that file they are made with, and ours stays ours. Most of them are
//! refused: regular files know few requests, and are no sockets.

use super::Served;
use super::shape::{Shape, paths_of, shape};
use crate::arch::{Frame, system_call};
use crate::descriptors::{self, File};
use crate::{hook, locks, materialise, memory};

/// The process that gets an open file's signals, which signal, and the user that has set it.
const F_GETOWN_EX: i32 = 16;
const F_SETOWN_EX: i32 = 15;
const F_GETOWNER_UIDS: i32 = 17;
const F_GETOWN: i32 = 9;
const F_SETOWN: i32 = 8;
const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
/// How long what is written to a file is expected to live.
const F_GET_FILE_RW_HINT: i32 = 1037;
const F_SET_FILE_RW_HINT: i32 = 1038;

/// The subject of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    /// The file: any open file of it will do.
    File,
    /// The open file, as far as the kernel does not refuse the call.
    OpenFile,
    /// The open file.
    OpenFileAlone,
}

/// Has the kernel answer a call by a descriptor of ours that we do not serve; `None` where the open file must become
/// the kernel's for it.
pub(super) fn answer(call: &Frame) -> Served {
    let a = &call.arguments;
    let Some((at, file)) = named_file(call) else { return Ok(None) };
    let subject = subject(call.rax as i64, a, &file);
    if subject == Subject::OpenFileAlone {
        return Ok(None);
    }
    locks::with_real(&file, false, |real| {
        if call.rax as i64 == libc::SYS_ioctl && a[1] == libc::FIONREAD {
            // It counts from where the open file stands.
            file.place().iter().for_each(|place| materialise::set_offset(real, place.offset));
        }
        let mut arguments = *a;
        arguments[at] = real as u64;
        // SAFETY: the program's own call, but for the number of the descriptor.
        let result = unsafe { system_call(call.rax, arguments) };
        let is_answer = subject == Subject::File || result < 0;
        if is_answer {
            hook::pass_on();
        }
        Ok(is_answer.then_some(result))
    })
}

/// The open file of ours that a call is about, and where its descriptor stands: it comes first, or before a path that
/// is empty.
fn named_file(call: &Frame) -> Option<(usize, File)> {
    let a = &call.arguments;
    let file = |at: usize| Some((at, descriptors::file(a[at] as i32)?));
    match shape(call.rax as i64) {
        Shape::At => {
            let &(from, path) = paths_of(Shape::At).first()?;
            let is_empty = a[path] == 0 || memory::load::<u8>(a[path]) == Ok(0);
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

fn subject(number: i64, a: &[u64; 6], file: &File) -> Subject {
    match number {
        libc::SYS_fcntl => match a[1] as i32 {
            F_GETOWN | F_GETOWN_EX | F_GETOWNER_UIDS | F_GETSIG | libc::F_GETLEASE => Subject::File,
            F_GET_FILE_RW_HINT | F_SET_FILE_RW_HINT => Subject::File,
            F_SETOWN | F_SETOWN_EX | F_SETSIG => Subject::OpenFileAlone,
            libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => Subject::OpenFileAlone,
            libc::F_NOTIFY if file.is_directory() => Subject::OpenFileAlone,
            _ => Subject::OpenFile,
        },
        // If LibFS does not serve them, another thread has handed the open file over to the kernel, or other processes
        // share it.
        libc::SYS_read
        | libc::SYS_write
        | libc::SYS_readv
        | libc::SYS_writev
        | libc::SYS_preadv2
        | libc::SYS_pwritev2
        | libc::SYS_lseek
        | libc::SYS_getdents
        | libc::SYS_getdents64 => Subject::OpenFileAlone,
        // A directory is the kernel's at no cost: paths go on being followed from it.
        libc::SYS_openat2 | libc::SYS_open_by_handle_at | libc::SYS_fspick | libc::SYS_setns => Subject::OpenFileAlone,
        libc::SYS_close | libc::SYS_dup | libc::SYS_flock => Subject::OpenFileAlone,
        _ => Subject::File,
    }
}
