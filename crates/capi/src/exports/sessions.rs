//! Exports for sessions, and for error texts.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::Arc;

use ashlar_types::Errno;

use super::{call, done};
use crate::pointers::{OpenedPlace, Output, SessionPointer, Text};
use crate::session::Session;
use crate::words;

#[unsafe(no_mangle)]
extern "C" fn ashlar_open_fs(
    mut fs: OpenedPlace<Arc<Session>>,
    place: Text,
    flags: c_uint,
    mut message: Output,
    message_size: usize,
) -> c_int {
    done(|| {
        let place = place.path()?;
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        fs.store(|| match Session::open(place) {
            Ok(session) => Ok(Arc::new(session)),
            Err((errno, sentence)) => {
                if !message.is_null() {
                    words::put(&sentence, message.bytes(message_size)?);
                }
                Err(errno)
            }
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_close_fs(fs: SessionPointer) -> c_int {
    done(|| {
        if let Some(session) = fs.into_session() {
            session.end();
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_umask(fs: SessionPointer, mask: libc::mode_t) -> c_int {
    call(|| Ok(fs.session()?.set_umask(mask) as c_int))
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_sync(fs: SessionPointer) -> c_int {
    done(|| fs.session()?.fs.sync_all())
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_strerror(error: c_int) -> *const c_char {
    words::text_of(error)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
