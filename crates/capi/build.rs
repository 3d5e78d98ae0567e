//! Sets the library's soname, the name under which linked programs search for the library.
//!
//! Its number changes with each incompatible change.

/// The name under which `scripts/install.sh` installs the library.
const SONAME: &str = "libashlar.so.0";

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{SONAME}");
    println!("cargo:rerun-if-changed=build.rs");
}
