//! Exports for extended attributes.

use std::ffi::c_int;

use ashlar_libfs::Last::{self, Follow, Keep};
use ashlar_libfs::{Outcome, Purpose, XattrFlags};
use ashlar_types::{Errno, XATTR_NAME_MAX, XATTR_VALUE_MAX};

use super::{call, done, sized};
use crate::pointers::{Input, Output, SessionPointer, Text};

/// Checks a name. The kernel also checks it before the path.
fn checked(name: &Text) -> Outcome<&[u8]> {
    let name = name.bytes()?;
    if name.is_empty() || name.len() > XATTR_NAME_MAX { Err(Errno::ERANGE) } else { Ok(name) }
}

fn value(fs: &SessionPointer, path: &Text, last: Last, name: &Text, room: &mut Output, bytes: usize) -> isize {
    call(|| {
        let (session, name) = (fs.session()?, checked(name)?);
        let value = session.with(path.path()?, last, |found| session.xattr(found.id, name))?;
        sized(&value, room, bytes)
    })
}

fn list(fs: &SessionPointer, path: &Text, last: Last, room: &mut Output, bytes: usize) -> isize {
    call(|| {
        let session = fs.session()?;
        let names = session.with(path.path()?, last, |found| session.xattr_list(found.id))?;
        sized(&names, room, bytes)
    })
}

/// An attribute for the caller to set.
struct GivenXattr<'a> {
    name: &'a Text,
    value: &'a Input,
    bytes: usize,
    flags: c_int,
}

impl GivenXattr<'_> {
    /// Returns flags, name and value, which are checked in this order, and before the path.
    fn checked(&self) -> Outcome<(XattrFlags, &[u8], &[u8])> {
        let (flags, name) = (XattrFlags::of(self.flags)?, checked(self.name)?);
        if self.bytes > XATTR_VALUE_MAX { Err(Errno::E2BIG) } else { Ok((flags, name, self.value.bytes(self.bytes)?)) }
    }
}

fn set(fs: &SessionPointer, path: &Text, last: Last, given: &GivenXattr<'_>) -> c_int {
    done(|| {
        let (session, (flags, name, value)) = (fs.session()?, given.checked()?);
        session.with(path.path()?, last.to(Purpose::Change), |found| session.set_xattr(found.id, name, value, flags))
    })
}

fn remove(fs: &SessionPointer, path: &Text, last: Last, name: &Text) -> c_int {
    done(|| {
        let (session, name) = (fs.session()?, checked(name)?);
        session.with(path.path()?, last.to(Purpose::Change), |found| session.remove_xattr(found.id, name))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_getxattr(fs: SessionPointer, path: Text, name: Text, mut room: Output, bytes: usize) -> isize {
    value(&fs, &path, Follow, &name, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lgetxattr(fs: SessionPointer, path: Text, name: Text, mut room: Output, bytes: usize) -> isize {
    value(&fs, &path, Keep, &name, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fgetxattr(fs: SessionPointer, file: c_int, name: Text, mut room: Output, bytes: usize) -> isize {
    call(|| {
        let (session, name) = (fs.session()?, checked(&name)?);
        let value = session.xattr(session.file(file)?.inode, name)?;
        sized(&value, &mut room, bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_setxattr(
    fs: SessionPointer,
    path: Text,
    name: Text,
    value: Input,
    bytes: usize,
    flags: c_int,
) -> c_int {
    set(&fs, &path, Follow, &GivenXattr { name: &name, value: &value, bytes, flags })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lsetxattr(
    fs: SessionPointer,
    path: Text,
    name: Text,
    value: Input,
    bytes: usize,
    flags: c_int,
) -> c_int {
    set(&fs, &path, Keep, &GivenXattr { name: &name, value: &value, bytes, flags })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fsetxattr(
    fs: SessionPointer,
    file: c_int,
    name: Text,
    value: Input,
    bytes: usize,
    flags: c_int,
) -> c_int {
    done(|| {
        let given = GivenXattr { name: &name, value: &value, bytes, flags };
        let (session, (flags, name, value)) = (fs.session()?, given.checked()?);
        session.set_xattr(session.file(file)?.inode, name, value, flags)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_listxattr(fs: SessionPointer, path: Text, mut room: Output, bytes: usize) -> isize {
    list(&fs, &path, Follow, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_llistxattr(fs: SessionPointer, path: Text, mut room: Output, bytes: usize) -> isize {
    list(&fs, &path, Keep, &mut room, bytes)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_flistxattr(fs: SessionPointer, file: c_int, mut room: Output, bytes: usize) -> isize {
    call(|| {
        let session = fs.session()?;
        sized(&session.xattr_list(session.file(file)?.inode)?, &mut room, bytes)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_removexattr(fs: SessionPointer, path: Text, name: Text) -> c_int {
    remove(&fs, &path, Follow, &name)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lremovexattr(fs: SessionPointer, path: Text, name: Text) -> c_int {
    remove(&fs, &path, Keep, &name)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fremovexattr(fs: SessionPointer, file: c_int, name: Text) -> c_int {
    done(|| {
        let (session, name) = (fs.session()?, checked(&name)?);
        session.remove_xattr(session.file(file)?.inode, name)
    })
}
