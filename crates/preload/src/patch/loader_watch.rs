//! The dynamic linker's report that it has loaded an object.
//!
//! The linker calls a function of its own that does nothing, for debuggers to stop there (`r_brk` in `<link.h>`). It
//! calls it before it loads or unloads objects, and when all requested ones are mapped, before any of their code runs.
//! That function becomes a jump to the hook. If it is not empty, the library misses objects that are loaded later.

use super::apply::{self, JUMP_BYTES};
use super::library_of;

/// `struct r_debug`: version:4, unused:4, objects:8, function:8.
const FUNCTION_AT: usize = 16;
const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
const RETURN: u8 = 0xc3;
/// The most bytes of the function that are checked.
const LENGTH_MAX: usize = 16;

/// Returns the address of the dynamic linker's function.
pub(super) fn loader_function() -> Option<usize> {
    // SAFETY: it takes a string, and looks for its address among the symbols of the loaded objects.
    let debug = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_r_debug".as_ptr()) } as usize;
    if debug == 0 {
        return None;
    }
    // SAFETY: the structure is as in `<link.h>`, and the dynamic linker has filled it by now.
    let function = unsafe { ((debug + FUNCTION_AT) as *const usize).read() };
    (function != 0).then_some(function)
}

/// Makes the dynamic linker call a function after it loads or unloads objects.
///
/// No other thread may run yet.
pub(crate) fn watch_loader(function: extern "C" fn()) {
    let Some(at) = loader_function() else { return };
    let Some(linker) = library_of(at) else { return };
    let is_inside = linker.code.iter().any(|code| code.contains(&at) && at + LENGTH_MAX <= code.end);
    // SAFETY: the bytes lie in loaded code.
    if is_inside && is_empty_function(unsafe { std::slice::from_raw_parts(at as *const u8, LENGTH_MAX) }) {
        apply::put_jump(&linker, at, function as *const () as usize);
    }
}

/// Returns whether a function returns at once, with room for a jump before the next one.
///
/// It uses no decoder, whose tables take as long as half of a program's start.
fn is_empty_function(bytes: &[u8]) -> bool {
    let code = bytes.strip_prefix(ENDBR64).unwrap_or(bytes);
    let Some(mut rest) = code.strip_prefix(&[RETURN]) else { return false };
    while bytes.len() - rest.len() < JUMP_BYTES {
        match padding_length(rest) {
            Some(length) if length <= rest.len() => rest = &rest[length..],
            _ => return false,
        }
    }
    true
}

/// Returns the length of an instruction that does nothing, or that is never reached.
fn padding_length(bytes: &[u8]) -> Option<usize> {
    let prefixes = bytes.iter().take_while(|byte| matches!(byte, 0x66 | 0x2e)).count();
    let length = match bytes[prefixes..] {
        [0x90 | 0xcc, ..] => 1,
        [0x0f, 0x1f, operand, ..] => match operand {
            0x00 => 3,
            0x40 => 4,
            0x44 => 5,
            0x80 => 7,
            0x84 => 8,
            _ => return None,
        },
        _ => return None,
    };
    Some(prefixes + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_empty_function_is_replaced_by_jump() {
        let padded = |code: &[u8], padding: u8| {
            let mut bytes = code.to_vec();
            bytes.resize(LENGTH_MAX, padding);
            bytes
        };
        assert!(is_empty_function(&padded(&[0xc3], 0x90)) && is_empty_function(&padded(&[0xc3], 0xcc)));
        assert!(is_empty_function(&[0xc3, 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x0f, 0x1f, 0x40, 0]));
        assert!(is_empty_function(&padded(&[0xf3, 0x0f, 0x1e, 0xfa, 0xc3], 0x48)), "its own five bytes do");
        assert!(!is_empty_function(&padded(&[0xc3], 0x48)), "another function begins");
        assert!(!is_empty_function(&padded(&[0xcc, 0xc3], 0x90)), "a debugger has stopped there");
        assert!(!is_empty_function(&padded(&[0x31, 0xc0, 0xc3], 0x90)));
    }

    #[test]
    fn linker_of_this_machine_has_empty_function() {
        let at = loader_function().expect("the linker has it");
        // SAFETY: the function is loaded, and its segment does not end there.
        assert!(is_empty_function(unsafe { std::slice::from_raw_parts(at as *const u8, LENGTH_MAX) }));
    }
}
