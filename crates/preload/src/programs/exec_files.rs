//! Open files that a process passes on to the program that it runs next.
//!
//! A shell opens the file for a command's output, and then becomes the command. The open file is the kernel's then, and
//! stays so if another process may share it. But if this process has opened it since it was forked, and has passed it
//! to no other, the file is adoptable (`deferred_session`) in the next program.
//!
//! A variable of the environment lists such files; the next program removes it. The variable holds for the process and
//! the path that it names: a program in between that doesn't know it passes it on unchanged.

use std::ffi::{CStr, CString};

use crate::entry::arch::ADOPTABLE_MAX;
use crate::files::descriptors;
use crate::memory::program_memory;
use crate::memory::program_memory::PathBuffer;
use crate::programs::environment;
use crate::sessions::{deferred_session, session};

/// `ASHLAR_OPEN=PROCESS KEY MOUNTS NUMBER,FILE[ NUMBER,FILE…]:PATH`.
///
/// KEY is a hash of the program's variable of mounts. Descriptors with the same FILE have one open file. All but the
/// path is in decimal digits.
pub(crate) const VARIABLE: &str = "ASHLAR_OPEN";

/// The open files that a process passes on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExecFiles {
    /// The mounts of these files, by bit.
    pub(crate) mounts: u32,
    /// Descriptors, each with the index of its open file.
    pub(crate) numbers: Vec<(i32, u32)>,
}

/// Returns the open files that only this process has and that stay open when it runs another program.
pub(crate) fn collect_own() -> ExecFiles {
    let mut files: Vec<u32> = Vec::new();
    let mut numbers = Vec::new();
    for (number, file) in descriptors::unshared().filter(|&(number, _)| survives_exec(number)) {
        let index = files.iter().position(|&known| known == file).unwrap_or_else(|| {
            files.push(file);
            files.len() - 1
        });
        numbers.push((number, index as u32));
    }
    let sessions = session::all().fold(0, |mounts, session| mounts | 1 << session.number);
    ExecFiles { mounts: sessions | deferred_session::deferred_mounts(), numbers }
}

/// Returns whether a descriptor stays open when another program runs.
fn survives_exec(number: i32) -> bool {
    descriptors::closes_on_exec(number) == Some(false)
}

/// Returns the variable for a program at the address of a path.
///
/// Returns `None` if no file is passed on.
pub(crate) fn encode_variable(carried: &ExecFiles, path: u64) -> Option<CString> {
    if carried.numbers.is_empty() {
        return None;
    }
    let mut buffer = PathBuffer::new();
    // The kernel refuses a path that can't be read.
    let path = program_memory::copy_path(path, &mut buffer).ok()?;
    encode(carried, (std::process::id(), environment::mounts_key()), path)
}

/// Returns the files that the variable's value passes to this program, if they are still open.
pub(crate) fn read_variable(value: &CStr) -> ExecFiles {
    // SAFETY: it reads the path that the kernel has given the program; the string lives as long as the program.
    let path = unsafe {
        let address = libc::getauxval(libc::AT_EXECFN);
        if address == 0 { c"" } else { CStr::from_ptr(address as *const std::ffi::c_char) }
    };
    let mut carried =
        decode(value.to_bytes(), (std::process::id(), environment::mounts_key()), path.to_bytes()).unwrap_or_default();
    carried.numbers.retain(|&(number, _)| survives_exec(number));
    carried
}

fn encode(carried: &ExecFiles, (process, key): (u32, u64), path: &[u8]) -> Option<CString> {
    let mut text = format!("{VARIABLE}={process} {key} {}", carried.mounts);
    for (number, file) in &carried.numbers {
        text.push_str(&format!(" {number},{file}"));
    }
    text.push(':');
    CString::new([text.as_bytes(), path].concat()).ok()
}

fn decode(value: &[u8], (process, key): (u32, u64), path: &[u8]) -> Option<ExecFiles> {
    let colon = value.iter().position(|&byte| byte == b':')?;
    let mut words = std::str::from_utf8(&value[..colon]).ok()?.split(' ');
    if words.next()?.parse() != Ok(process) || words.next()?.parse() != Ok(key) || &value[colon + 1..] != path {
        return None;
    }
    let mounts = words.next()?.parse().ok()?;
    let pair = |word: &str| {
        let (number, file) = word.split_once(',')?;
        let pair: (i32, u32) = (number.parse().ok()?, file.parse().ok()?);
        let there_can_be = (0..ADOPTABLE_MAX as i32).contains(&pair.0) && pair.1 < ADOPTABLE_MAX as u32;
        there_can_be.then_some(pair)
    };
    Some(ExecFiles { mounts, numbers: words.map(pair).collect::<Option<_>>()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exec_variable_of_other_process_or_path_is_ignored() {
        let carried = ExecFiles { mounts: 3, numbers: vec![(0, 0), (1, 1), (2, 1), (1023, 2)] };
        let variable = encode(&carried, (17, 5), b"/bin/a b:c").unwrap();
        let value = variable.to_bytes().strip_prefix(b"ASHLAR_OPEN=").unwrap();
        assert_eq!(decode(value, (17, 5), b"/bin/a b:c"), Some(carried));
        assert_eq!(decode(value, (18, 5), b"/bin/a b:c"), None, "another process has it from its parent");
        assert_eq!(decode(value, (17, 6), b"/bin/a b:c"), None, "the mounts have other numbers");
        assert_eq!(decode(value, (17, 5), b"/bin/other"), None, "a program in between has passed it on");
        for wrong in [
            "",
            "17",
            "17 5 0",
            "17 5 0 1:/a",
            "17 5 0 1,1024:/a",
            "17 5 0 1024,1:/a",
            "17 5 0 -1,0:/a",
            "17 5 x 1,1:/a",
        ] {
            assert_eq!(decode(wrong.as_bytes(), (17, 5), b"/a"), None, "{wrong}");
        }
        assert_eq!(decode(b"17 5 1:/a", (17, 5), b"/a"), Some(ExecFiles { mounts: 1, numbers: vec![] }));
    }
}
