//! Exports for names and directories.

use std::ffi::{c_int, c_uint};

use ashlar_types::Errno;
use libc::{mode_t, off_t};

use super::{Returned, call, done};
use crate::directory::{Entry, Stream};
use crate::pointers::{OpenedPlace, Out, Output, SessionPointer, StreamPointer, Text};

#[unsafe(no_mangle)]
extern "C" fn ashlar_mkdir(fs: SessionPointer, path: Text, mode: mode_t) -> c_int {
    done(|| fs.session()?.make_directory(path.path()?, mode))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_rmdir(fs: SessionPointer, path: Text) -> c_int {
    done(|| fs.session()?.remove(path.path()?, true))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_unlink(fs: SessionPointer, path: Text) -> c_int {
    done(|| fs.session()?.remove(path.path()?, false))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_rename(fs: SessionPointer, from: Text, to: Text, flags: c_uint) -> c_int {
    done(|| fs.session()?.rename(from.path()?, to.path()?, flags))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_link(fs: SessionPointer, from: Text, to: Text) -> c_int {
    done(|| fs.session()?.link(from.path()?, to.path()?))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_flink(fs: SessionPointer, file: c_int, to: Text) -> c_int {
    done(|| fs.session()?.link_file(file, to.path()?))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_symlink(fs: SessionPointer, target: Text, path: Text) -> c_int {
    done(|| fs.session()?.make_link(target.path()?, path.path()?))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_readlink(fs: SessionPointer, path: Text, mut buffer: Output, bytes: usize) -> isize {
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
extern "C" fn ashlar_opendir(fs: SessionPointer, path: Text, mut dir: OpenedPlace<Stream>) -> c_int {
    done(|| {
        let session = fs.session()?;
        let path = path.path()?;
        dir.store(|| Stream::open(session, path))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_readdir(dir: StreamPointer, mut entry: Out<Entry>) -> c_int {
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
    done(|| dir.stream()?.seek(place))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_closedir(dir: StreamPointer) -> c_int {
    done(|| {
        if let Some(stream) = dir.into_stream() {
            stream.close();
        }
        Ok(())
    })
}
