//! Links the unwinder into the library: each program loads one library less.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=CC");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let found = Command::new(compiler).arg("-print-file-name=libgcc_eh.a").output();
    let path = found.ok().and_then(|found| String::from_utf8(found.stdout).ok()).unwrap_or_default();
    // If the compiler has no static unwinder, the dynamic linker loads the shared one.
    if let Some(directory) = std::path::Path::new(path.trim()).parent().filter(|directory| directory.is_absolute()) {
        println!("cargo::rustc-link-search=native={}", directory.display());
        println!("cargo::rustc-link-lib=static:+whole-archive=gcc_eh");
    }
}
