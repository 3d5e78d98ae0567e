//! Links the small command statically and without libc's start files, if possible.
//!
//! Loading libraries, and then libc's own start, would be most of the cost of starting the command.
//!
//! The names in the standard library need libc's static form to link. Next to nothing of it stays in the program, and
//! nothing of it is called. The rest of the workspace is linked as usual, so `target-feature=+crt-static` is no way: it
//! holds for all of it. Instead the command's linker finds scripts of the same names before the system's libraries,
//! which lead to the static ones.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The libraries that the standard library names.
const LIBRARIES: [&str; 7] = ["c", "m", "rt", "dl", "util", "pthread", "gcc_eh"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CC");
    println!("cargo::rustc-check-cfg=cfg(bare)");
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from);
    let is = |of: &str, value: &str| std::env::var(format!("CARGO_CFG_TARGET_{of}")).is_ok_and(|found| found == value);
    // The start of a process and the system call are written for this platform alone.
    let is_known = is("OS", "linux") && is("ENV", "gnu") && is("ARCH", "x86_64") && is("POINTER_WIDTH", "64");
    // If a library has no static form, the command is loaded like any other program.
    if let Some(directory) = out.filter(|out| is_known && write_scripts(out).is_some()) {
        println!("cargo::rustc-cfg=bare");
        // Some linkers read the libraries once, in order, and libc's and the compiler's name each other.
        let group = "-Wl,--start-group,-lc,-lgcc,-lgcc_eh,--end-group";
        for word in [&format!("-L{}", directory.display()), "-static", "-no-pie", "-nostartfiles", group] {
            println!("cargo::rustc-link-arg-bin=ashlar={word}");
        }
    }
}

/// Writes the scripts.
fn write_scripts(directory: &Path) -> Option<()> {
    for library in LIBRARIES {
        let file = format!("lib{library}.a");
        std::fs::write(directory.join(&file), format!("INPUT({})\n", find_library(&file)?.display())).ok()?;
    }
    // The standard library names the unwinder's shared form.
    std::fs::write(directory.join("libgcc_s.a"), "INPUT(-lgcc_eh)\n").ok()
}

/// Returns the path where the compiler has a library.
fn find_library(file: &str) -> Option<PathBuf> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let answer = Command::new(compiler).arg(format!("-print-file-name={file}")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(answer.stdout).ok()?.trim());
    path.is_absolute().then_some(path)
}
