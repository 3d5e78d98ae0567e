//! Exports for files: open, read, write, lock.

use std::ffi::{c_int, c_uint};

use ashlar_libfs::Outcome;
use ashlar_types::Errno;
use libc::{mode_t, off_t};

use super::{Returned, call, call_for_success};
use crate::pointers::{Input, Out, Output, Parts, SessionPointer, TRANSFER_MAX, TextPointer};
use crate::transfer::TransferOffset;

#[unsafe(no_mangle)]
extern "C" fn ashlar_open(fs: SessionPointer, path: TextPointer, flags: c_int, mode: mode_t) -> c_int {
    call(|| fs.session()?.open_file(path.path()?, flags, mode))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_close(fs: SessionPointer, file: c_int) -> c_int {
    call_for_success(|| fs.session()?.files.remove(file).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_dup(fs: SessionPointer, file: c_int) -> c_int {
    call(|| {
        let session = fs.session()?;
        session.files.add(session.file(file)?)
    })
}

/// Limits the bytes of one transfer.
fn limit_transfer(bytes: usize) -> Outcome<usize> {
    if bytes > isize::MAX as usize { Err(Errno::EINVAL) } else { Ok(bytes.min(TRANSFER_MAX)) }
}

fn read(fs: &SessionPointer, file: c_int, buffer: &mut Output, bytes: usize, at: TransferOffset) -> isize {
    call(|| {
        let session = fs.session()?;
        let room = limit_transfer(bytes).and_then(|bytes| buffer.bytes(bytes));
        let count = session.read(file, at, &mut [room.map_err(|errno| session.refusal(file, at, false, errno))?])?;
        Ok(isize::from_length(count))
    })
}

fn write(fs: &SessionPointer, file: c_int, buffer: &Input, bytes: usize, at: TransferOffset) -> isize {
    call(|| {
        let session = fs.session()?;
        let data = limit_transfer(bytes).and_then(|bytes| buffer.bytes(bytes));
        let count = session.write(file, at, &[data.map_err(|errno| session.refusal(file, at, true, errno))?])?;
        Ok(isize::from_length(count))
    })
}

fn read_parts(fs: &SessionPointer, file: c_int, parts: &mut Parts, count: c_int, at: TransferOffset) -> isize {
    call(|| {
        let session = fs.session()?;
        let mut parts = parts.outputs(count).map_err(|errno| session.refusal(file, at, false, errno))?;
        parts.retain(|part| !part.is_empty());
        Ok(isize::from_length(session.read(file, at, &mut parts)?))
    })
}

fn write_parts(fs: &SessionPointer, file: c_int, parts: &Parts, count: c_int, at: TransferOffset) -> isize {
    call(|| {
        let session = fs.session()?;
        let parts = parts.inputs(count).map_err(|errno| session.refusal(file, at, true, errno))?;
        Ok(isize::from_length(session.write(file, at, &parts)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_read(fs: SessionPointer, file: c_int, mut buffer: Output, bytes: usize) -> isize {
    read(&fs, file, &mut buffer, bytes, TransferOffset::Offset)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_write(fs: SessionPointer, file: c_int, buffer: Input, bytes: usize) -> isize {
    write(&fs, file, &buffer, bytes, TransferOffset::Offset)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_readv(fs: SessionPointer, file: c_int, mut parts: Parts, count: c_int) -> isize {
    read_parts(&fs, file, &mut parts, count, TransferOffset::Offset)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_writev(fs: SessionPointer, file: c_int, parts: Parts, count: c_int) -> isize {
    write_parts(&fs, file, &parts, count, TransferOffset::Offset)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_pread(fs: SessionPointer, file: c_int, mut buffer: Output, bytes: usize, offset: off_t) -> isize {
    read(&fs, file, &mut buffer, bytes, TransferOffset::Given(offset))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_pwrite(fs: SessionPointer, file: c_int, buffer: Input, bytes: usize, offset: off_t) -> isize {
    write(&fs, file, &buffer, bytes, TransferOffset::Given(offset))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_preadv(fs: SessionPointer, file: c_int, mut parts: Parts, count: c_int, offset: off_t) -> isize {
    read_parts(&fs, file, &mut parts, count, TransferOffset::Given(offset))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_pwritev(fs: SessionPointer, file: c_int, parts: Parts, count: c_int, offset: off_t) -> isize {
    write_parts(&fs, file, &parts, count, TransferOffset::Given(offset))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_copy_file_range(
    fs: SessionPointer,
    from: c_int,
    mut from_offset: Out<off_t>,
    to: c_int,
    mut to_offset: Out<off_t>,
    bytes: usize,
    flags: c_uint,
) -> isize {
    call(|| {
        let (mut from_given, mut to_given) = (from_offset.load(), to_offset.load());
        let session = fs.session()?;
        let count = session.copy((from, from_given.as_mut()), (to, to_given.as_mut()), bytes, flags)?;
        from_given.map(|offset| from_offset.store(offset)).transpose()?;
        to_given.map(|offset| to_offset.store(offset)).transpose()?;
        Ok(isize::from_length(count))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lseek(fs: SessionPointer, file: c_int, offset: off_t, whence: c_int) -> off_t {
    call(|| fs.session()?.seek(file, offset, whence))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fsync(fs: SessionPointer, file: c_int) -> c_int {
    call_for_success(|| fs.session()?.sync_file(file))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fdatasync(fs: SessionPointer, file: c_int) -> c_int {
    call_for_success(|| fs.session()?.sync_file(file))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_truncate(fs: SessionPointer, path: TextPointer, size: off_t) -> c_int {
    call_for_success(|| fs.session()?.truncate(path.path()?, size))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_ftruncate(fs: SessionPointer, file: c_int, size: off_t) -> c_int {
    call_for_success(|| fs.session()?.truncate_file(file, size))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fallocate(fs: SessionPointer, file: c_int, mode: c_int, offset: off_t, bytes: off_t) -> c_int {
    call_for_success(|| fs.session()?.allocate(file, mode, offset, bytes))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_flock(fs: SessionPointer, file: c_int, operation: c_int) -> c_int {
    call_for_success(|| fs.session()?.lock_whole(file, operation))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lock(
    fs: SessionPointer,
    file: c_int,
    kind: c_int,
    start: off_t,
    bytes: off_t,
    wait: c_int,
) -> c_int {
    call_for_success(|| fs.session()?.lock_bytes(file, kind, start, bytes, wait != 0))
}
