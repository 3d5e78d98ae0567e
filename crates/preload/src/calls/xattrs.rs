//! Extended attributes: the user's, what says that there is no access list, no capability and no label, and access lists that say no more than
//! the permission bits. All others are the kernel's to give and to set, which has rules of its own for them.

use std::sync::atomic::{AtomicU8, Ordering};

use ashlar_libfs::{Acl, XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT, XattrFlags, xattr_list};
use ashlar_types::{Errno, FileKind, XATTR_NAME_MAX, XATTR_VALUE_MAX};

use super::Served;
use super::attributes::{Subject, with_file, with_path};
use crate::arch::system_call;
use crate::descriptors::File;
use crate::path::{Last, Purpose};
use crate::{descriptors, locks, memory};

/// Lists that the kernel reads, and shows as it has read them.
const LISTS: [&[u8]; 2] = [XATTR_ACL_ACCESS, XATTR_ACL_DEFAULT];
const CAPABILITY: &[u8] = b"security.capability";
/// The label that SELinux gives every file, also where nothing is stored. `ls -l` asks for it wherever it runs.
const LABEL: &[u8] = b"security.selinux";

/// Whether the kernel runs SELinux: 0 where that is not known yet, then 1 for no and 2 for yes.
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

/// Serves any of them. What is left to the kernel of an open file it does beside it: that one stays ours.
pub(super) fn serve(number: i64, a: &[u64; 6]) -> Served {
    let by_descriptor =
        [libc::SYS_fgetxattr, libc::SYS_flistxattr, libc::SYS_fsetxattr, libc::SYS_fremovexattr].contains(&number);
    let file = descriptors::file(a[0] as i32).filter(|_| by_descriptor);
    // What is wrong with a path alone is not the first thing that may be wrong.
    let answer = if file.as_ref().is_some_and(File::is_alone) { None } else { answer(number, a)? };
    match (answer, file) {
        (None, Some(file)) => locks::with_real(&file, false, |real| {
            let arguments = [real as u64, a[1], a[2], a[3], a[4], 0];
            // SAFETY: the program's own call, but for the number of the descriptor.
            Ok(Some(unsafe { system_call(number as u64, arguments) }))
        }),
        (answer, _) => Ok(answer),
    }
}

fn answer(number: i64, a: &[u64; 6]) -> Served {
    let at = |last: Last, purpose, then: &dyn Fn(&Subject) -> Served| {
        with_path(libc::AT_FDCWD, a[0], last.to(purpose), |subject| then(subject))
    };
    let list = |subject: &Subject| list(subject, (a[1], a[2]));
    match number {
        libc::SYS_listxattr => return at(Last::Follow, Purpose::Look, &list),
        libc::SYS_llistxattr => return at(Last::Keep, Purpose::Look, &list),
        libc::SYS_flistxattr => return with_file(a[0], list),
        _ => {}
    }
    let mut buffer = [0; XATTR_NAME_MAX + 1];
    // The kernel says what is wrong with a name, with flags, and with a length, before it looks for the file.
    let Some(name) = name_at(a[1], &mut buffer) else { return Ok(None) };
    let sets = matches!(number, libc::SYS_setxattr | libc::SYS_lsetxattr | libc::SYS_fsetxattr);
    if sets && (XattrFlags::of(a[4] as i32).is_err() || a[3] > XATTR_VALUE_MAX as u64) {
        return Ok(None);
    }
    let get = |subject: &Subject| get(subject, name, (a[2], a[3]));
    let set = |subject: &Subject| set(subject, name, (a[2], a[3]), a[4] as i32);
    let remove = |subject: &Subject| remove(subject, name);
    match number {
        libc::SYS_getxattr => at(Last::Follow, Purpose::Look, &get),
        libc::SYS_lgetxattr => at(Last::Keep, Purpose::Look, &get),
        libc::SYS_fgetxattr => with_file(a[0], get),
        libc::SYS_setxattr => at(Last::Follow, Purpose::Change, &set),
        libc::SYS_lsetxattr => at(Last::Keep, Purpose::Change, &set),
        libc::SYS_fsetxattr => with_file(a[0], set),
        libc::SYS_removexattr => at(Last::Follow, Purpose::Change, &remove),
        libc::SYS_lremovexattr => at(Last::Keep, Purpose::Change, &remove),
        libc::SYS_fremovexattr => with_file(a[0], remove),
        _ => Ok(None),
    }
}

/// The name at an address; `None` where the kernel says what is wrong with it.
fn name_at(address: u64, buffer: &mut [u8; XATTR_NAME_MAX + 1]) -> Option<&[u8]> {
    let length = memory::start_of(address, buffer);
    (1..=XATTR_NAME_MAX).contains(&length).then(|| &buffer[..length])
}

fn is_users(name: &[u8]) -> bool {
    name.starts_with(b"user.")
}

fn get(subject: &Subject, name: &[u8], room: (u64, u64)) -> Served {
    let (fs, id) = (&subject.session.fs, subject.found.id);
    if is_users(name) {
        fs.check_xattr_read(&subject.session.who, id, name)?;
        return give(&fs.xattr(id, name)?, room);
    }
    let may_be_told = match name {
        CAPABILITY => true,
        LABEL => !has_labels(),
        _ => LISTS.contains(&name) && subject.found.inode.kind != FileKind::Symlink,
    };
    if !may_be_told {
        return Ok(None);
    }
    fs.xattr(id, name).map(|_| None)
}

fn list(subject: &Subject, room: (u64, u64)) -> Served {
    give(&xattr_list(&subject.session.fs.xattr_names(subject.found.id)?), room)
}

/// Stores a value where there is room for it: an address, and so many bytes there. Without room, it says how much it takes.
fn give(value: &[u8], (address, room): (u64, u64)) -> Served {
    if room != 0 {
        if value.len() as u64 > room {
            return Err(Errno::ERANGE);
        }
        memory::store_bytes(address, value)?;
    }
    Ok(Some(value.len() as i64))
}

fn set(subject: &Subject, name: &[u8], (address, length): (u64, u64), flags: i32) -> Served {
    let (session, id) = (subject.session, subject.found.id);
    let is_list = name == XATTR_ACL_ACCESS && subject.found.inode.kind != FileKind::Symlink;
    if !is_list && !is_users(name) {
        return Ok(None);
    }
    let value = memory::bytes(address, length as usize)?.to_vec();
    if !is_list {
        session.fs.set_xattr(&session.who, id, name, &value, XattrFlags::of(flags)?, false)?;
        return Ok(Some(0));
    }
    // Such lists `cp -p` and `sed -i` set.
    if !Acl::is_plain(&value) {
        return Ok(None);
    }
    // The kernel takes no notice of the flags.
    session.fs.set_xattr(&session.who, id, name, &value, XattrFlags::default(), false)?;
    Ok(Some(0))
}

fn remove(subject: &Subject, name: &[u8]) -> Served {
    let kind = subject.found.inode.kind;
    let is_list = name == XATTR_ACL_ACCESS && kind != FileKind::Symlink
        || name == XATTR_ACL_DEFAULT && kind == FileKind::Directory;
    if !is_list && !is_users(name) {
        return Ok(None);
    }
    subject.session.fs.remove_xattr(&subject.session.who, subject.found.id, name)?;
    Ok(Some(0))
}
