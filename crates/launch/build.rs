//! Links the small command without the dynamic linker, where the compiler has what that takes: loading libraries is most of what it would cost
//! to start it.
//!
//! The rest of the workspace is linked as usual, so it can't be asked for by `target-feature=+crt-static`, which holds for all of it. Instead the
//! command's linker finds, before the system's libraries, scripts of the same names that lead to the static ones.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What the standard library asks for.
const LIBRARIES: [&str; 7] = ["c", "m", "rt", "dl", "util", "pthread", "gcc_eh"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CC");
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from);
    let is_gnu = std::env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|environment| environment == "gnu");
    // Where a library has no static form, the command is loaded like any other program.
    if let Some(directory) = out.filter(|out| is_gnu && scripts(out).is_some()) {
        for word in [&format!("-L{}", directory.display()), "-static", "-no-pie"] {
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
