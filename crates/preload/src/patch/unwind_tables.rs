//! Finds an object's functions by unwind tables (`.eh_frame_hdr`, `.eh_frame`).
//!
//! There may be data between functions, and two of its bytes may look like a system call. A function that is decoded
//! from its first byte on shows only its instructions. The tables are read in memory; if anything in them breaks the
//! format, no functions are found.

use std::ops::Range;

use super::Library;

const VERSION: u8 = 1;
/// The encoding of an absent pointer.
const OMITTED: u8 = 0xff;
/// Halves of a pointer's encoding: its form, and the base that it counts from.
const FORM: u8 = 0x0f;
const BASE: u8 = 0xf0;
const FROM_HERE: u8 = 0x10;
const FROM_TABLE: u8 = 0x30;

/// Reads an object's memory, as far as it is loaded from the file.
struct FrameReader<'a> {
    library: &'a Library,
    at: usize,
}

impl<'a> FrameReader<'a> {
    fn new(library: &'a Library, at: usize) -> Self {
        Self { library, at }
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let end = self.at.checked_add(N)?;
        let is_loaded = self.library.loaded.iter().any(|part| part.start <= self.at && end <= part.end);
        if !is_loaded {
            return None;
        }
        // SAFETY: the bytes lie in a loaded, readable segment; they need no alignment.
        let bytes = unsafe { (self.at as *const [u8; N]).read_unaligned() };
        self.at = end;
        Some(bytes)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// Passes over a number of variable length (LEB128).
    fn skip_number(&mut self) -> Option<()> {
        while self.byte()? & 0x80 != 0 {}
        Some(())
    }

    /// Reads a pointer in an encoding; `table` is the base of those that count from the table.
    fn pointer(&mut self, encoding: u8, table: usize) -> Option<usize> {
        let from = match encoding & BASE {
            0 => 0,
            FROM_HERE => self.at,
            FROM_TABLE => table,
            _ => return None,
        };
        let value = match encoding & FORM {
            0x0 | 0x4 | 0xc => u64::from_le_bytes(self.take()?) as usize,
            0x2 => u16::from_le_bytes(self.take()?).into(),
            0x3 => self.word()? as usize,
            0xa => i16::from_le_bytes(self.take()?) as usize,
            0xb => self.word()? as i32 as usize,
            _ => return None,
        };
        Some(from.wrapping_add(value))
    }
}

/// Returns the functions, in order.
///
/// Returns `None` if there are no tables, or they can't be read.
pub(super) fn functions(library: &Library) -> Option<Vec<Range<usize>>> {
    let table = library.frames?;
    let mut reader = FrameReader::new(library, table);
    let [version, frames, count, entries] = reader.take()?;
    if version != VERSION || [frames, count, entries].contains(&OMITTED) {
        return None;
    }
    reader.pointer(frames, table)?;
    let count = reader.pointer(count, table)?;
    // If the count is wrong, reading ends with the segment.
    let mut functions = Vec::new();
    let mut common = Common::default();
    for _ in 0..count {
        reader.pointer(entries, table)?;
        let frame = reader.pointer(entries, table)?;
        functions.extend(function(library, frame, &mut common)?);
    }
    functions.sort_unstable_by_key(|function: &Range<usize>| function.start);
    Some(functions)
}

/// Returns the function of an entry of `.eh_frame`.
///
/// Returns none outside the code, and none through which signal handlers return.
///
/// Those begin a byte after the address in the entry, and must stay as they are. `common` is the last part that several
/// entries share.
fn function(library: &Library, frame: usize, common: &mut Common) -> Option<Option<Range<usize>>> {
    let mut reader = FrameReader::new(library, frame);
    // An entry longer than 4 GiB has another form.
    if reader.word()? == u32::MAX {
        return None;
    }
    let at = reader.at;
    let shared = at.checked_sub(reader.word()? as usize)?;
    if common.at != shared {
        *common = Common::read(library, shared)?;
    }
    let start = reader.pointer(common.encoding, 0)?;
    let length = reader.pointer(common.encoding & FORM, 0)?;
    let end = start.checked_add(length)?;
    let is_code = library.code.iter().any(|code| code.start <= start && end <= code.end);
    Some((is_code && !common.is_of_signals).then_some(start..end))
}

/// The part of an entry that several functions share.
#[derive(Debug, Default)]
struct Common {
    /// Its address.
    at: usize,
    /// The encoding of pointers to functions.
    encoding: u8,
    /// Signal handlers return through these functions.
    is_of_signals: bool,
}

impl Common {
    fn read(library: &Library, at: usize) -> Option<Self> {
        let mut reader = FrameReader::new(library, at);
        let (length, number, version) = (reader.word()?, reader.word()?, reader.byte()?);
        if length == u32::MAX || number != 0 {
            return None;
        }
        let mut words = Vec::new();
        loop {
            match reader.byte()? {
                0 => break,
                byte => words.push(byte),
            }
        }
        // Alignments of code and of data, and the register of the return address.
        reader.skip_number()?;
        reader.skip_number()?;
        if version == 1 {
            reader.byte()?;
        } else {
            reader.skip_number()?;
        }
        let mut common = Self { at, ..Self::default() };
        for word in words {
            match word {
                b'z' => reader.skip_number()?,
                b'R' => common.encoding = reader.byte()?,
                b'S' => common.is_of_signals = true,
                b'L' => _ = reader.byte()?,
                b'P' => {
                    let personality = reader.byte()?;
                    reader.pointer(personality & FORM, 0)?;
                }
                b'B' => {}
                _ => return None,
            }
        }
        Some(common)
    }
}

#[cfg(test)]
mod tests {
    use super::super::library_of;
    use super::*;

    #[test]
    fn libc_functions_are_found_from_their_first_byte() {
        let library = library_of(libc::gnu_get_libc_version as *const () as usize).expect("loaded");
        let functions = functions(&library).expect("it has tables");
        assert!(functions.len() > 1000 && functions.windows(2).all(|pair| pair[0].start <= pair[1].start));
        for start in [libc::gnu_get_libc_version as *const () as usize, libc::openat as *const () as usize] {
            assert!(functions.iter().any(|function| function.start == start), "{start:#x}");
        }
    }

    #[test]
    fn damaged_tables_show_no_functions() {
        let table = [1_u8, 0x1b, 0x03, 0x3b, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0];
        let start = table.as_ptr() as usize;
        let part = start..start + table.len();
        let library = Library { frames: Some(start), loaded: vec![part], ..Library::default() };
        assert_eq!(functions(&library), None);
        assert_eq!(functions(&Library { loaded: Vec::new(), ..library }), None);
    }
}
