//! Gives the library the name under which programs that were linked with it look for it. Its number changes with what breaks them.

/// As `scripts/install.sh` installs it.
const SONAME: &str = "libashlar.so.0";

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{SONAME}");
    println!("cargo:rerun-if-changed=build.rs");
}
