//! Exports for names and directories.

use std::ffi::{c_int, c_uint};

use ashlar_types::Errno;
use libc::{mode_t, off_t};

use super::{Returned, call, call_for_success};
use crate::directory::{Dirent, Stream};
use crate::pointers::{OpenedPointer, Out, Output, SessionPointer, StreamPointer, TextPointer};

#[unsafe(no_mangle)]
extern "C" fn ashlar_mkdir(fs: SessionPointer, path: TextPointer, mode: mode_t) -> c_int {
    call_for_success(|| fs.session()?.make_directory(path.path()?, mode))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_rmdir(fs: SessionPointer, path: TextPointer) -> c_int {
    call_for_success(|| fs.session()?.remove(path.path()?, true))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_unlink(fs: SessionPointer, path: TextPointer) -> c_int {
    call_for_success(|| fs.session()?.remove(path.path()?, false))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_rename(fs: SessionPointer, from: TextPointer, to: TextPointer, flags: c_uint) -> c_int {
    call_for_success(|| fs.session()?.rename(from.path()?, to.path()?, flags))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_link(fs: SessionPointer, from: TextPointer, to: TextPointer) -> c_int {
    call_for_success(|| fs.session()?.link(from.path()?, to.path()?))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_flink(fs: SessionPointer, file: c_int, to: TextPointer) -> c_int {
    call_for_success(|| fs.session()?.link_file(file, to.path()?))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_symlink(fs: SessionPointer, target: TextPointer, path: TextPointer) -> c_int {
    call_for_success(|| fs.session()?.make_link(target.path()?, path.path()?))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_readlink(fs: SessionPointer, path: TextPointer, mut buffer: Output, bytes: usize) -> isize {
    call(|| {
        let session = fs.session()?;
        if bytes == 0 {
            return Err(Errno::EINVAL);
        }
        let target = session.read_link(path.path()?)?;
        let count = target.len().min(bytes);
        buffer.bytes(count)?.copy_from_slice(&target[..count]);
        Ok(isize::from_length(count))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_opendir(fs: SessionPointer, path: TextPointer, mut dir: OpenedPointer<Stream>) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        let path = path.path()?;
        dir.store(|| Stream::open(session, path))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_readdir(dir: StreamPointer, mut entry: Out<Dirent>) -> c_int {
    call(|| {
        let stream = dir.stream()?;
        // Check before the read: otherwise the listing would skip an entry.
        entry.check()?;
        match stream.next()? {
            Some(next) => entry.store(next).map(|()| 1),
            None => Ok(0),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_telldir(dir: StreamPointer) -> off_t {
    call(|| Ok(dir.stream()?.tell()))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_seekdir(dir: StreamPointer, place: off_t) -> c_int {
    call_for_success(|| dir.stream()?.seek(place))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_closedir(dir: StreamPointer) -> c_int {
    call_for_success(|| {
        if let Some(stream) = dir.into_stream() {
            stream.close();
        }
        Ok(())
    })
}
