//! Whether a program can load the library, by the beginning of its file.
//!
//! The check follows the kernel's, which looks at the same bytes to run the program. The library is for x86-64 and
//! glibc. The dynamic linker of another libc, or of another word size, reports an error, or ends the program.

use core::ops::Range;

/// Bytes at the beginning of a file that suffice for most programs.
const HEAD_BYTES: usize = 1024;
/// Bytes of a script in which the kernel looks for its interpreter.
const SCRIPT_BYTES: usize = 256;
/// The longest path of a dynamic linker that is checked.
const LINKER_BYTES: usize = 256;
/// The most scripts, each the interpreter of the last, that the kernel follows.
const SCRIPTS_MAX: usize = 5;

const ELF: &[u8] = b"\x7fELF";
const CLASS_AT: usize = 4;
const CLASS_64: u8 = 2;
const MACHINE_AT: usize = 18;
const MACHINE_X86_64: u16 = 62;
/// The offset in the ELF header of the program headers' offset, size and number.
const HEADERS_AT: usize = 32;
const HEADER_BYTES_AT: usize = 54;
const HEADER_COUNT_AT: usize = 56;
/// `struct Elf64_Phdr`: kind:4 flags:4 offset:8 address:8 physical:8 bytes in the file:8 …
const SEGMENT_OFFSET_AT: usize = 8;
const SEGMENT_BYTES_AT: usize = 32;
const SEGMENT_BYTES: usize = 56;
const PT_INTERP: u32 = 3;
/// The beginning of the names of glibc's dynamic linkers for x86-64.
const LINKER: &[u8] = b"ld-linux-x86-64.so";

/// The kind of a program, by the beginning of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ProgramKind {
    /// A script: the kernel runs another program for it, whose path stands here.
    Script(Range<usize>),
    /// A dynamic linker loads it, whose path stands here in the file.
    Linked(Range<u64>),
    /// The program is for another processor, or another word size.
    Foreign,
    /// No dynamic linker loads it, or only the kernel knows its kind.
    Other,
}

/// Whether a program can load the library.
///
/// The answer is also yes for a program that loads no library at all, since the programs that it runs may load one.
/// `read` fills a buffer from an offset in a file and returns the number of bytes. Its path is that of a script's
/// interpreter, or `None` for the program itself. A program that can't be read counts as one that can load the library.
pub fn can_load_library(mut read: impl FnMut(Option<&[u8]>, u64, &mut [u8]) -> Option<usize>) -> bool {
    let mut head = [0; HEAD_BYTES];
    let mut interpreter = [0; SCRIPT_BYTES];
    let mut path: Option<&[u8]> = None;
    for _ in 0..=SCRIPTS_MAX {
        let Some(found) = read(path, 0, &mut head).and_then(|count| head.get(..count)) else { return true };
        match kind_of(found) {
            ProgramKind::Script(place) => {
                let name = &found[place];
                let Some(kept) = interpreter.get_mut(..name.len()) else { return true };
                kept.copy_from_slice(name);
                path = Some(kept);
            }
            ProgramKind::Linked(place) => {
                let mut linker = [0; LINKER_BYTES];
                let length = usize::try_from(place.end.saturating_sub(place.start)).unwrap_or(LINKER_BYTES);
                let linker = &mut linker[..length.min(LINKER_BYTES)];
                let known = usize::try_from(place.start).ok().and_then(|start| found.get(start..start + linker.len()));
                match known {
                    Some(known) => linker.copy_from_slice(known),
                    None if read(path, place.start, linker) == Some(linker.len()) => {}
                    None => return true,
                }
                return is_glibc(linker);
            }
            ProgramKind::Foreign => return false,
            ProgramKind::Other => return true,
        }
    }
    true
}

/// Whether a path is that of glibc's dynamic linker.
fn is_glibc(linker: &[u8]) -> bool {
    let path = linker.split(|&byte| byte == 0).next().unwrap_or_default();
    path.rsplit(|&byte| byte == b'/').next().is_some_and(|name| name.starts_with(LINKER))
}

fn kind_of(head: &[u8]) -> ProgramKind {
    if head.starts_with(b"#!") {
        return script(&head[..head.len().min(SCRIPT_BYTES)]);
    }
    if !head.starts_with(ELF) {
        return ProgramKind::Other;
    }
    let short = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    if head.get(CLASS_AT) != Some(&CLASS_64) || short(MACHINE_AT) != Some(MACHINE_X86_64) {
        return ProgramKind::Foreign;
    }
    let linked = || {
        let first = usize::try_from(long(HEADERS_AT)?).ok()?;
        let (bytes, count) = (usize::from(short(HEADER_BYTES_AT)?), usize::from(short(HEADER_COUNT_AT)?));
        let headers = head.get(first..)?.chunks_exact(bytes.max(SEGMENT_BYTES)).take(count);
        let header = headers.into_iter().find(|header| header[..4] == PT_INTERP.to_le_bytes())?;
        let word = |at: usize| header.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let start = word(SEGMENT_OFFSET_AT)?;
        Some(start..start.checked_add(word(SEGMENT_BYTES_AT)?)?)
    };
    linked().map_or(ProgramKind::Other, ProgramKind::Linked)
}

/// Returns the interpreter that the first line of a script names.
fn script(head: &[u8]) -> ProgramKind {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let line = head.split(|&byte| byte == b'\n' || byte == 0).next().unwrap_or_default();
    let Some(start) = (2..line.len()).find(|&at| !is_blank(&line[at])) else { return ProgramKind::Other };
    let end = (start..line.len()).find(|&at| is_blank(&line[at])).unwrap_or(line.len());
    ProgramKind::Script(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes the beginning of a program of a class and a machine, with a linker's path at an offset.
    fn program(class: u8, machine: u16, linker: Option<(&str, usize)>) -> Vec<u8> {
        let mut bytes = vec![0; 64 + SEGMENT_BYTES];
        bytes[..4].copy_from_slice(ELF);
        bytes[CLASS_AT] = class;
        bytes[MACHINE_AT..][..2].copy_from_slice(&machine.to_le_bytes());
        bytes[HEADERS_AT] = 64;
        bytes[HEADER_BYTES_AT] = SEGMENT_BYTES as u8;
        bytes[HEADER_COUNT_AT] = 1;
        if let Some((path, at)) = linker {
            bytes[64] = PT_INTERP as u8;
            bytes[64 + SEGMENT_OFFSET_AT..][..8].copy_from_slice(&(at as u64).to_le_bytes());
            bytes[64 + SEGMENT_BYTES_AT..][..8].copy_from_slice(&(path.len() as u64 + 1).to_le_bytes());
            bytes.resize(at, 0);
            bytes.extend(path.as_bytes());
            bytes.push(0);
        }
        bytes
    }

    fn loads(files: &[(&str, Vec<u8>)]) -> bool {
        can_load_library(|path, offset, buffer| {
            let name = path.map_or(Ok(""), std::str::from_utf8).ok()?;
            let (_, bytes) = files.iter().find(|(file, _)| *file == name)?;
            let rest = bytes.get(offset as usize..)?;
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            Some(count)
        })
    }

    #[test]
    fn only_glibc_programs_of_this_machine_load_the_library() {
        let glibc = "/lib64/ld-linux-x86-64.so.2";
        let one = |linker, at| loads(&[("", program(CLASS_64, MACHINE_X86_64, Some((linker, at))))]);
        assert!(one(glibc, 200) && one("/nix/store/x-glibc/lib/ld-linux-x86-64.so.2", 200));
        assert!(one(glibc, 5000), "the path may stand far behind");
        assert!(!one("/lib/ld-musl-x86_64.so.1", 200) && !one("/lib/ld-musl-x86_64.so.1", 5000));
        assert!(!loads(&[("", program(1, 3, Some(("/lib/ld-linux.so.2", 200))))]), "32 bits");
        assert!(!loads(&[("", program(1, MACHINE_X86_64, None))]), "x32");
        assert!(!loads(&[("", program(CLASS_64, 183, None))]), "another processor");
        assert!(loads(&[("", program(CLASS_64, MACHINE_X86_64, None))]), "a static one hands it on");
    }

    #[test]
    fn script_loads_what_its_interpreter_loads() {
        let musl = program(CLASS_64, MACHINE_X86_64, Some(("/lib/ld-musl-x86_64.so.1", 200)));
        let glibc = program(CLASS_64, MACHINE_X86_64, Some(("/lib64/ld-linux-x86-64.so.2", 200)));
        for (line, interpreter) in
            [("#!/a\n", "/a"), ("#! \t/a -x y\n", "/a"), ("#!/a\0", "/a"), ("#!a b", "a"), ("#!/a\t", "/a")]
        {
            assert!(!loads(&[("", line.into()), (interpreter, musl.clone())]), "{line}");
            assert!(loads(&[("", line.into()), (interpreter, glibc.clone())]), "{line}");
        }
        assert!(!loads(&[("", b"#!/b".into()), ("/b", b"#!/c x".into()), ("/c", musl)]), "a script's interpreter");
        assert!(loads(&[("", b"#!/b".into()), ("/b", b"#!/b".into())]), "the kernel says what is wrong");
    }

    #[test]
    fn file_without_program_is_left_to_the_kernel() {
        for head in [&b""[..], b"#!", b"#!\n", b"#! ", b"echo", b"\x7fELF", &[0x7f, b'E', b'L', b'F', 2, 1, 1]] {
            assert_ne!(loads(&[("", head.to_vec())]), head.starts_with(ELF), "{head:?}");
        }
        assert!(loads(&[]), "it can't be read");
        let mut cut = program(CLASS_64, MACHINE_X86_64, Some(("/lib/ld-musl-x86_64.so.1", 200)));
        cut.truncate(100);
        assert!(loads(&[("", cut)]));
    }
}
