//! Extended attributes: those of users, and the usual answers about access lists.
//!
//! LibFS also answers that there is no access list, no capability and no label, and sets access lists that say no more
//! than the permission bits. The kernel serves all others, for which it has rules of its own.

use std::sync::atomic::{AtomicU8, Ordering};

use ashlar_libfs::{Acl, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XattrFlags, xattr_list};
use ashlar_types::{Errno, FileKind, XATTR_NAME_MAX, XATTR_VALUE_MAX};

use super::Served;
use super::attributes::{CallFile, with_file, with_path};
use crate::entry::arch::system_call;
use crate::files::descriptors::OpenFileRef;
use crate::files::path::{FinalLink, PathPurpose};
use crate::files::{descriptors, record_locks};
use crate::memory::program_memory;

/// Lists that the kernel interprets, and returns as it has interpreted them.
const LISTS: [&[u8]; 2] = [XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT];
const CAPABILITY: &[u8] = b"security.capability";
/// The label that SELinux gives every file, even if none is stored.
///
/// `ls -l` asks for it everywhere.
const LABEL: &[u8] = b"security.selinux";

/// Whether the kernel runs SELinux: 0 if that is not known yet, 1 for no, 2 for yes.
static HAS_LABELS: AtomicU8 = AtomicU8::new(0);

fn has_labels() -> bool {
    let mut known = HAS_LABELS.load(Ordering::Relaxed);
    if known == 0 {
        let is_without = std::fs::read_to_string("/proc/filesystems").is_ok_and(|all| !all.contains("selinuxfs"));
        known = if is_without { 1 } else { 2 };
        HAS_LABELS.store(known, Ordering::Relaxed);
    }
    known == 2
}

/// Serves any call on extended attributes.
///
/// If the kernel must serve a call on an open file, it does so on a real open file beside LibFS's, which stays LibFS's.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    let by_descriptor =
        [libc::SYS_fgetxattr, libc::SYS_flistxattr, libc::SYS_fsetxattr, libc::SYS_fremovexattr].contains(&number);
    let file = descriptors::file(a[0] as i32).filter(|_| by_descriptor);
    if file.as_ref().is_some_and(OpenFileRef::is_o_path) {
        // The error for an `O_PATH` descriptor is not the first one that the kernel checks, and the placeholder is such
        // a descriptor.
        // SAFETY: the program's own call.
        return Ok(Some(unsafe { system_call(number as u64, *a) }));
    }
    match (answer_xattr(number, a)?, file) {
        (None, Some(file)) => record_locks::with_real_file(&file, false, |real| {
            let arguments = [real as u64, a[1], a[2], a[3], a[4], 0];
            // SAFETY: the program's own call, but for the number of the descriptor.
            Ok(Some(unsafe { system_call(number as u64, arguments) }))
        }),
        (answer, _) => Ok(answer),
    }
}

fn answer_xattr(number: i64, a: &[u64; 6]) -> Served {
    let at = |last: FinalLink, purpose, then: &dyn Fn(&CallFile) -> Served| {
        with_path(libc::AT_FDCWD, a[0], last.to(purpose), |subject| then(subject))
    };
    let list = |subject: &CallFile| list_xattrs(subject, (a[1], a[2]));
    match number {
        libc::SYS_listxattr => return at(FinalLink::Follow, PathPurpose::Look, &list),
        libc::SYS_llistxattr => return at(FinalLink::Keep, PathPurpose::Look, &list),
        libc::SYS_flistxattr => return with_file(a[0], list),
        _ => {}
    }
    let mut buffer = [0; XATTR_NAME_MAX + 1];
    // The kernel checks the name, the flags and the length before it looks for the file.
    let Some(name) = name_at(a[1], &mut buffer) else { return Ok(None) };
    let sets = matches!(number, libc::SYS_setxattr | libc::SYS_lsetxattr | libc::SYS_fsetxattr);
    if sets && (XattrFlags::of(a[4] as i32).is_err() || a[3] > XATTR_VALUE_MAX as u64) {
        return Ok(None);
    }
    if sets {
        program_memory::bytes(a[2], a[3] as usize)?;
    }
    let get = |subject: &CallFile| get_xattr(subject, name, (a[2], a[3]));
    let set = |subject: &CallFile| set_xattr(subject, name, (a[2], a[3]), a[4] as i32);
    let remove = |subject: &CallFile| remove_xattr(subject, name);
    match number {
        libc::SYS_getxattr => at(FinalLink::Follow, PathPurpose::Look, &get),
        libc::SYS_lgetxattr => at(FinalLink::Keep, PathPurpose::Look, &get),
        libc::SYS_fgetxattr => with_file(a[0], get),
        libc::SYS_setxattr => at(FinalLink::Follow, PathPurpose::SetAttributes, &set),
        libc::SYS_lsetxattr => at(FinalLink::Keep, PathPurpose::SetAttributes, &set),
        libc::SYS_fsetxattr => with_file(a[0], set),
        libc::SYS_removexattr => at(FinalLink::Follow, PathPurpose::SetAttributes, &remove),
        libc::SYS_lremovexattr => at(FinalLink::Keep, PathPurpose::SetAttributes, &remove),
        libc::SYS_fremovexattr => with_file(a[0], remove),
        _ => Ok(None),
    }
}

/// Returns the name at an address, or `None` if the kernel must report its error.
fn name_at(address: u64, buffer: &mut [u8; XATTR_NAME_MAX + 1]) -> Option<&[u8]> {
    let length = program_memory::copy_start(address, buffer);
    (1..=XATTR_NAME_MAX).contains(&length).then(|| &buffer[..length])
}

fn is_user_name(name: &[u8]) -> bool {
    name.starts_with(b"user.")
}

fn get_xattr(subject: &CallFile, name: &[u8], room: (u64, u64)) -> Served {
    let (fs, id) = (&subject.session.fs, subject.found.id);
    if is_user_name(name) {
        fs.check_xattr_read(&subject.session.user, id, name)?;
        return store_value(&fs.xattr(id, name)?, room);
    }
    let is_answered = match name {
        CAPABILITY => true,
        LABEL => !has_labels(),
        _ => LISTS.contains(&name) && subject.found.inode.kind != FileKind::Symlink,
    };
    if !is_answered {
        return Ok(None);
    }
    fs.xattr(id, name).map(|_| None)
}

fn list_xattrs(subject: &CallFile, room: (u64, u64)) -> Served {
    store_value(&xattr_list(&subject.session.fs.xattr_names(subject.found.id)?), room)
}

/// Stores a value at an address, if there is room for it.
///
/// Without any room it returns only the length.
fn store_value(value: &[u8], (address, room): (u64, u64)) -> Served {
    if room != 0 {
        if value.len() as u64 > room {
            return Err(Errno::ERANGE);
        }
        program_memory::store_bytes(address, value)?;
    }
    Ok(Some(value.len() as i64))
}

fn set_xattr(subject: &CallFile, name: &[u8], (address, length): (u64, u64), flags: i32) -> Served {
    let (session, id) = (subject.session, subject.found.id);
    let is_list = name == XATTR_ACL_ACCESS && subject.found.inode.kind != FileKind::Symlink;
    if !is_list && !is_user_name(name) {
        return Ok(None);
    }
    let value = program_memory::bytes(address, length as usize)?.to_vec();
    if !is_list {
        session.fs.set_xattr(&session.user, id, name, &value, XattrFlags::of(flags)?, false)?;
        return Ok(Some(0));
    }
    // `cp -p` and `sed -i` set such lists.
    if !Acl::is_plain(&value) {
        return Ok(None);
    }
    // The kernel ignores the flags.
    session.fs.set_xattr(&session.user, id, name, &value, XattrFlags::default(), false)?;
    Ok(Some(0))
}

fn remove_xattr(subject: &CallFile, name: &[u8]) -> Served {
    let kind = subject.found.inode.kind;
    let is_list = name == XATTR_ACL_ACCESS && kind != FileKind::Symlink
        || name == XATTR_ACL_DEFAULT && kind == FileKind::Directory;
    if !is_list && !is_user_name(name) {
        return Ok(None);
    }
    subject.session.fs.remove_xattr(&subject.session.user, subject.found.id, name)?;
    Ok(Some(0))
}
