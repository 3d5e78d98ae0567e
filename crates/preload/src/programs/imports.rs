//! The program's imports, by its relocations: whether it may run other programs.

use std::ffi::{CStr, c_char};

/// Functions of libc that make processes or run programs.
const RUNNERS: [&str; 17] = [
    "clone",
    "execl",
    "execle",
    "execlp",
    "execv",
    "execve",
    "execveat",
    "execvp",
    "execvpe",
    "fexecve",
    "fork",
    "popen",
    "posix_spawn",
    "posix_spawnp",
    "syscall",
    "system",
    "vfork",
];

const DT_PLTRELSZ: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_JMPREL: u64 = 23;
/// `struct Elf64_Rela`: offset:8, kind:4 symbol:4, addend:8.
const RELA_BYTES: u64 = 24;
const RELA_SYMBOL_AT: u64 = 12;
/// `struct Elf64_Sym` begins with the offset of its name.
const SYMBOL_BYTES: u64 = 24;

/// Returns whether the program may make processes or run programs, by its imports.
///
/// If they can't be read, it may. The imports of its libraries are not checked.
pub(crate) fn may_run_programs() -> bool {
    dynamic_section().is_none_or(|dynamic| {
        let value = |tag| dynamic.iter().find(|entry| entry[0] == tag).map_or(0, |entry| entry[1]);
        let (symbols, names) = (value(DT_SYMTAB), value(DT_STRTAB));
        let tables = [(value(DT_RELA), value(DT_RELASZ)), (value(DT_JMPREL), value(DT_PLTRELSZ))];
        let imported = |relocation: u64| {
            // SAFETY: the dynamic linker has used the same tables.
            unsafe {
                let symbol = *((relocation + RELA_SYMBOL_AT) as *const u32);
                let name = *((symbols + u64::from(symbol) * SYMBOL_BYTES) as *const u32);
                CStr::from_ptr((names + u64::from(name)) as *const c_char)
            }
        };
        let mut all = tables.into_iter().flat_map(|(at, bytes)| (at..at + bytes).step_by(RELA_BYTES as usize));
        symbols == 0 || names == 0 || all.any(|at| imported(at).to_str().is_ok_and(|name| RUNNERS.contains(&name)))
    })
}

/// Returns the program's dynamic section: tags and values, with addresses in memory.
fn dynamic_section() -> Option<Vec<[u64; 2]>> {
    // SAFETY: it asks for numbers.
    let (headers, count) = unsafe { (libc::getauxval(libc::AT_PHDR), libc::getauxval(libc::AT_PHNUM)) };
    if headers == 0 {
        return None;
    }
    // SAFETY: the kernel gives the address of the program's headers, and their number.
    let headers = unsafe { std::slice::from_raw_parts(headers as *const libc::Elf64_Phdr, count as usize) };
    let own = headers.iter().find(|header| header.p_type == libc::PT_PHDR)?;
    let base = (headers.as_ptr() as u64).wrapping_sub(own.p_vaddr);
    let section = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
    let entries = section.p_memsz as usize / size_of::<[u64; 2]>();
    // SAFETY: the section is loaded, and the dynamic linker is done with it.
    let entries = unsafe { std::slice::from_raw_parts((base + section.p_vaddr) as *const [u64; 2], entries) };
    let is_address = |tag: u64| [DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL].contains(&tag);
    // glibc has written addresses over the values in the file. A value that it left alone is an offset, below the
    // program.
    let absolute =
        |[tag, value]: [u64; 2]| if is_address(tag) && value < base { [tag, base + value] } else { [tag, value] };
    Some(entries.iter().take_while(|entry| entry[0] != 0).map(|entry| absolute(*entry)).collect())
}
