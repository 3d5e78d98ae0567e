//! Exports for sessions, and for error texts.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::Arc;

use ashlar_types::Errno;

use super::{call, call_for_success};
use crate::error_texts;
use crate::pointers::{OpenedPointer, Output, SessionPointer, TextPointer};
use crate::session::CapiSession;

#[unsafe(no_mangle)]
extern "C" fn ashlar_open_fs(
    mut fs: OpenedPointer<Arc<CapiSession>>,
    place: TextPointer,
    flags: c_uint,
    mut message: Output,
    message_size: usize,
) -> c_int {
    call_for_success(|| {
        let place = place.path()?;
        if flags != 0 {
            return Err(Errno::EINVAL);
        }
        fs.store(|| match CapiSession::open(place) {
            Ok(session) => Ok(Arc::new(session)),
            Err((errno, sentence)) => {
                if !message.is_null() {
                    error_texts::store_sentence(&sentence, message.bytes(message_size)?);
                }
                Err(errno)
            }
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_close_fs(fs: SessionPointer) -> c_int {
    call_for_success(|| {
        if let Some(session) = fs.into_session() {
            session.close_session();
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
    call_for_success(|| fs.session()?.fs.sync_all())
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_strerror(error: c_int) -> *const c_char {
    error_texts::error_text(error)
}

#[unsafe(no_mangle)]
extern "C" fn ashlar_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
