//! Links the small command without the dynamic linker and without the files by which libc starts, where the compiler has what that takes: loading
//! libraries, and then libc's own start, are most of what it would cost to start it.
//!
//! libc's static form is there for what the standard library names; next to nothing of it stays in the program, and nothing of it is called.
//! The rest of the workspace is linked as usual, so it can't be asked for by `target-feature=+crt-static`, which holds for all of it. Instead the
//! command's linker finds, before the system's libraries, scripts of the same names that lead to the static ones.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What the standard library asks for.
const LIBRARIES: [&str; 7] = ["c", "m", "rt", "dl", "util", "pthread", "gcc_eh"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CC");
    println!("cargo::rustc-check-cfg=cfg(bare)");
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from);
    let is = |of: &str, value: &str| std::env::var(format!("CARGO_CFG_TARGET_{of}")).is_ok_and(|found| found == value);
    // How a process begins, and how it calls the kernel, is written down for this one.
    let is_known = is("OS", "linux") && is("ENV", "gnu") && is("ARCH", "x86_64") && is("POINTER_WIDTH", "64");
    // Where a library has no static form, the command is loaded like any other program.
    if let Some(directory) = out.filter(|out| is_known && scripts(out).is_some()) {
        println!("cargo::rustc-cfg=bare");
        // Some linkers go through the libraries once, in order, and libc's and the compiler's name each other.
        let group = "-Wl,--start-group,-lc,-lgcc,-lgcc_eh,--end-group";
        for word in [&format!("-L{}", directory.display()), "-static", "-no-pie", "-nostartfiles", group] {
            println!("cargo::rustc-link-arg-bin=ashlar={word}");
        }
    }
}

/// Writes the scripts.
fn scripts(directory: &Path) -> Option<()> {
    for library in LIBRARIES {
        let file = format!("lib{library}.a");
        std::fs::write(directory.join(&file), format!("INPUT({})\n", found(&file)?.display())).ok()?;
    }
    // The unwinder's shared form is the one that the standard library asks for.
    std::fs::write(directory.join("libgcc_s.a"), "INPUT(-lgcc_eh)\n").ok()
}

/// Where the compiler has a library.
fn found(file: &str) -> Option<PathBuf> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let answer = Command::new(compiler).arg(format!("-print-file-name={file}")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(answer.stdout).ok()?.trim());
    path.is_absolute().then_some(path)
}
