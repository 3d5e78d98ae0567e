//! Extended attributes.

use std::ffi::c_int;

use ashlar_libfs::Last::{self, Follow, Keep};
use ashlar_libfs::Purpose;

use super::{call, done, sized};
use crate::pointers::{Input, Output, SessionPointer, Text};

fn value(fs: &SessionPointer, path: &Text, last: Last, name: &Text, room: &mut Output, bytes: usize) -> isize {
    call(|| {
        let (session, name) = (fs.session()?, name.bytes()?);
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

/// A value that is to be set, where it has so many bytes.
struct Set<'a> {
    name: &'a Text,
    value: &'a Input,
    bytes: usize,
    flags: c_int,
}

fn set(fs: &SessionPointer, path: &Text, last: Last, set: &Set<'_>) -> c_int {
    done(|| {
        let (session, name, value) = (fs.session()?, set.name.bytes()?, set.value.bytes(set.bytes)?);
        session
            .with(path.path()?, last.to(Purpose::Change), |found| session.set_xattr(found.id, name, value, set.flags))
    })
}

fn remove(fs: &SessionPointer, path: &Text, last: Last, name: &Text) -> c_int {
    done(|| {
        let (session, name) = (fs.session()?, name.bytes()?);
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
        let session = fs.session()?;
        let value = session.xattr(session.file(file)?.inode, name.bytes()?)?;
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
    set(&fs, &path, Follow, &Set { name: &name, value: &value, bytes, flags })
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
    set(&fs, &path, Keep, &Set { name: &name, value: &value, bytes, flags })
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
        let session = fs.session()?;
        session.set_xattr(session.file(file)?.inode, name.bytes()?, value.bytes(bytes)?, flags)
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
        let session = fs.session()?;
        session.remove_xattr(session.file(file)?.inode, name.bytes()?)
    })
}
