//! Exports for extended attributes.

use std::ffi::c_int;

use ashlar_libfs::FinalLink::{self, Follow, Keep};
use ashlar_libfs::{Outcome, PathPurpose, XattrFlags};
use ashlar_types::{Errno, XATTR_NAME_MAX, XATTR_VALUE_MAX};

use super::{call, call_for_success, store_sized};
use crate::pointers::{Input, Output, SessionPointer, TextPointer};

/// Checks a name. The kernel also checks it before the path.
fn check_name(name: &TextPointer) -> Outcome<&[u8]> {
    let name = name.bytes()?;
    if name.is_empty() || name.len() > XATTR_NAME_MAX { Err(Errno::ERANGE) } else { Ok(name) }
}

fn value(
    fs: &SessionPointer,
    path: &TextPointer,
    last: FinalLink,
    name: &TextPointer,
    room: &mut Output,
    bytes: usize,
) -> isize {
    call(|| {
        let (session, name) = (fs.session()?, check_name(name)?);
        let value = session.act_on(path.path()?, last, |found| session.xattr(found.id, name))?;
        store_sized(&value, room, bytes)
    })
}

fn list(fs: &SessionPointer, path: &TextPointer, last: FinalLink, room: &mut Output, bytes: usize) -> isize {
    call(|| {
        let session = fs.session()?;
        let names = session.act_on(path.path()?, last, |found| session.xattr_list(found.id))?;
        store_sized(&names, room, bytes)
    })
}

/// An attribute for the caller to set.
struct NewXattr<'a> {
    name: &'a TextPointer,
    value: &'a Input,
    bytes: usize,
    flags: c_int,
}

impl NewXattr<'_> {
    /// Returns flags, name and value, which are checked in this order, and before the path.
    fn check(&self) -> Outcome<(XattrFlags, &[u8], &[u8])> {
        let (flags, name) = (XattrFlags::of(self.flags)?, check_name(self.name)?);
        if self.bytes > XATTR_VALUE_MAX { Err(Errno::E2BIG) } else { Ok((flags, name, self.value.bytes(self.bytes)?)) }
    }
}

fn set(fs: &SessionPointer, path: &TextPointer, last: FinalLink, given: &NewXattr<'_>) -> c_int {
    call_for_success(|| {
        let (session, (flags, name, value)) = (fs.session()?, given.check()?);
        session.act_on(path.path()?, last.to(PathPurpose::SetAttributes), |found| {
            session.set_xattr(found.id, name, value, flags)
        })
    })
}

fn remove(fs: &SessionPointer, path: &TextPointer, last: FinalLink, name: &TextPointer) -> c_int {
    call_for_success(|| {
        let (session, name) = (fs.session()?, check_name(name)?);
        session.act_on(path.path()?, last.to(PathPurpose::SetAttributes), |found| session.remove_xattr(found.id, name))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_getxattr(
    fs: SessionPointer,
    path: TextPointer,
    name: TextPointer,
    mut room: Output,
    bytes: usize,
) -> isize {
    value(&fs, &path, Follow, &name, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lgetxattr(
    fs: SessionPointer,
    path: TextPointer,
    name: TextPointer,
    mut room: Output,
    bytes: usize,
) -> isize {
    value(&fs, &path, Keep, &name, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fgetxattr(
    fs: SessionPointer,
    file: c_int,
    name: TextPointer,
    mut room: Output,
    bytes: usize,
) -> isize {
    call(|| {
        let (session, name) = (fs.session()?, check_name(&name)?);
        let value = session.xattr(session.file(file)?.inode, name)?;
        store_sized(&value, &mut room, bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_setxattr(
    fs: SessionPointer,
    path: TextPointer,
    name: TextPointer,
    value: Input,
    bytes: usize,
    flags: c_int,
) -> c_int {
    set(&fs, &path, Follow, &NewXattr { name: &name, value: &value, bytes, flags })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lsetxattr(
    fs: SessionPointer,
    path: TextPointer,
    name: TextPointer,
    value: Input,
    bytes: usize,
    flags: c_int,
) -> c_int {
    set(&fs, &path, Keep, &NewXattr { name: &name, value: &value, bytes, flags })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fsetxattr(
    fs: SessionPointer,
    file: c_int,
    name: TextPointer,
    value: Input,
    bytes: usize,
    flags: c_int,
) -> c_int {
    call_for_success(|| {
        let given = NewXattr { name: &name, value: &value, bytes, flags };
        let (session, (flags, name, value)) = (fs.session()?, given.check()?);
        session.set_xattr(session.file(file)?.inode, name, value, flags)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_listxattr(fs: SessionPointer, path: TextPointer, mut room: Output, bytes: usize) -> isize {
    list(&fs, &path, Follow, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_llistxattr(fs: SessionPointer, path: TextPointer, mut room: Output, bytes: usize) -> isize {
    list(&fs, &path, Keep, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_flistxattr(fs: SessionPointer, file: c_int, mut room: Output, bytes: usize) -> isize {
    call(|| {
        let session = fs.session()?;
        store_sized(&session.xattr_list(session.file(file)?.inode)?, &mut room, bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_removexattr(fs: SessionPointer, path: TextPointer, name: TextPointer) -> c_int {
    remove(&fs, &path, Follow, &name)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lremovexattr(fs: SessionPointer, path: TextPointer, name: TextPointer) -> c_int {
    remove(&fs, &path, Keep, &name)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fremovexattr(fs: SessionPointer, file: c_int, name: TextPointer) -> c_int {
    call_for_success(|| {
        let (session, name) = (fs.session()?, check_name(&name)?);
        session.remove_xattr(session.file(file)?.inode, name)
    })
}
