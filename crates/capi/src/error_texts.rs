//! Error texts for people.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

/// The number behind Linux's highest errno.
const ERRNO_END: i32 = 134;
const UNKNOWN: &std::ffi::CStr = c"Unknown error";

static TEXTS: OnceLock<Vec<CString>> = OnceLock::new();

/// Returns the text of an error, given as a result or as an errno. The text is never freed.
pub(crate) fn error_text(error: i32) -> *const c_char {
    let texts = TEXTS.get_or_init(|| (0..ERRNO_END).map(text).collect());
    let number = usize::try_from(error.unsigned_abs()).unwrap_or(usize::MAX);
    texts.get(number).map_or(UNKNOWN, CString::as_c_str).as_ptr()
}

fn text(errno: i32) -> CString {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    let words = text.rsplit_once(" (os error").map_or(&text[..], |(words, _)| words);
    CString::new(words).unwrap_or_else(|_| UNKNOWN.to_owned())
}

/// Stores a sentence with a NUL, cut to the room. No character is cut in two.
pub(crate) fn store_sentence(sentence: &str, room: &mut [u8]) {
    let Some(most) = room.len().checked_sub(1) else { return };
    let mut length = sentence.len().min(most);
    while !sentence.is_char_boundary(length) {
        length -= 1;
    }
    room[..length].copy_from_slice(&sentence.as_bytes()[..length]);
    room[length] = 0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn words(error: i32) -> &'static str {
        // SAFETY: it is a string that is never freed.
        unsafe { CStr::from_ptr(error_text(error)) }.to_str().expect("words")
    }

    #[test]
    fn error_texts_exist_for_either_sign() {
        assert_eq!(words(-libc::ENOENT), "No such file or directory");
        assert_eq!(words(libc::EDQUOT), "Disk quota exceeded");
        assert_eq!(words(0), "Success");
        assert_eq!(words(i32::MIN), "Unknown error");
        assert_eq!(words(4000), "Unknown error");
    }

    #[test]
    fn sentences_are_cut_between_characters() {
        let mut room = [b'x'; 6];
        store_sentence("naïve", &mut room[..4]);
        assert_eq!(&room, b"na\0xxx");
        store_sentence("ab", &mut room);
        assert_eq!(&room[..3], b"ab\0");
        store_sentence("nothing", &mut []);
    }
}
