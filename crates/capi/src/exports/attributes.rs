//! Exports for attributes of files and of the file system.

use std::ffi::c_int;

use ashlar_libfs::FinalLink::{Follow, Keep};
use ashlar_libfs::{FinalLink, Outcome, PathPurpose};
use libc::{gid_t, mode_t, stat, statvfs, uid_t};

use super::call_for_success;
use crate::pointers::{Out, SessionPointer, TextPointer, Times};
use crate::session::CapiSession;

#[unsafe(no_mangle)]
extern "C" fn ashlar_stat(fs: SessionPointer, path: TextPointer, mut stat: Out<stat>) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        stat.store(session.act_on(path.path()?, Follow, |found| Ok(session.stat(found)))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lstat(fs: SessionPointer, path: TextPointer, mut stat: Out<stat>) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        stat.store(session.act_on(path.path()?, Keep, |found| Ok(session.stat(found)))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fstat(fs: SessionPointer, file: c_int, mut stat: Out<stat>) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        stat.store(session.stat(&session.current_inode(file)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_statvfs(fs: SessionPointer, path: TextPointer, mut space: Out<statvfs>) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        space.store(session.act_on(path.path()?, Follow, |found| session.space(found.id))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fstatvfs(fs: SessionPointer, file: c_int, mut space: Out<statvfs>) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        space.store(session.space(session.file(file)?.inode)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_access(fs: SessionPointer, path: TextPointer, mode: c_int) -> c_int {
    call_for_success(|| fs.session()?.check(path.path()?, mode))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_chmod(fs: SessionPointer, path: TextPointer, mode: mode_t) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        session.act_on(path.path()?, Follow.to(PathPurpose::SetAttributes), |found| session.set_mode(found, mode))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fchmod(fs: SessionPointer, file: c_int, mode: mode_t) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        session.set_mode(&session.current_inode(file)?, mode)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_chown(fs: SessionPointer, path: TextPointer, owner: uid_t, group: gid_t) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        session
            .act_on(path.path()?, Follow.to(PathPurpose::SetAttributes), |found| session.set_owner(found, owner, group))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lchown(fs: SessionPointer, path: TextPointer, owner: uid_t, group: gid_t) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        session
            .act_on(path.path()?, Keep.to(PathPurpose::SetAttributes), |found| session.set_owner(found, owner, group))
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_fchown(fs: SessionPointer, file: c_int, owner: uid_t, group: gid_t) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        session.set_owner(&session.current_inode(file)?, owner, group)
    })
}

/// Whether both times stay unchanged: then the path is not followed, as in the kernel.
fn is_nothing_to_set(times: Option<&[libc::timespec; 2]>) -> bool {
    times.is_some_and(|times| times.iter().all(|time| time.tv_nsec == libc::UTIME_OMIT))
}

/// Sets the times of the inode at a path.
fn set_times(session: &CapiSession, path: TextPointer, last: FinalLink, times: Times) -> Outcome<()> {
    let times = times.load();
    if is_nothing_to_set(times.as_ref()) {
        return Ok(());
    }
    session.act_on(path.path()?, last.to(PathPurpose::SetAttributes), |found| session.set_times(found, times.as_ref()))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_utimens(fs: SessionPointer, path: TextPointer, times: Times) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        set_times(session, path, Follow, times)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_lutimens(fs: SessionPointer, path: TextPointer, times: Times) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        set_times(session, path, Keep, times)
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_futimens(fs: SessionPointer, file: c_int, times: Times) -> c_int {
    call_for_success(|| {
        let session = fs.session()?;
        let times = times.load();
        if is_nothing_to_set(times.as_ref()) {
            return Ok(());
        }
        session.set_times(&session.current_inode(file)?, times.as_ref())
    })
}
