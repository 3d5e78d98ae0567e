# A Rust project without a network: a build script, a library, an incremental build, tests, and builds that have nothing
# to do.
export CARGO_HOME="$PWD/home" CARGO_NET_OFFLINE=true CARGO_TERM_COLOR=never CARGO_INCREMENTAL=1
unset CARGO_TARGET_DIR CARGO_BUILD_JOBS RUSTFLAGS RUSTC_WRAPPER
mkdir -p project/part/src project/src && cd project
cat >Cargo.toml <<'FILE'
[package]
name = "whole"
version = "1.0.0"
edition = "2021"
[workspace]
members = ["part"]
[dependencies]
part = { path = "part" }
FILE
printf '[package]\nname = "part"\nversion = "1.0.0"\nedition = "2021"\n' >part/Cargo.toml
printf 'pub fn twice(x: u64) -> u64 { x * 2 }\n#[test]\nfn grows() { assert!(twice(2) > 2) }\n' >part/src/lib.rs
cat >build.rs <<'FILE'
use std::{env, fs, path::Path};
fn main() {
    let text: String = (0..50).map(|n| format!("pub fn f{n}(x: u64) -> u64 {{ part::twice(x) + {n} }}\n")).collect();
    fs::write(Path::new(&env::var("OUT_DIR").unwrap()).join("made.rs"), text).unwrap();
    println!("cargo:rerun-if-changed=build.rs");
}
FILE
cat >src/main.rs <<'FILE'
mod made { include!(concat!(env!("OUT_DIR"), "/made.rs")); }
fn main() { println!("{}", made::f7(made::f49(1))) }
FILE
build() { cargo build -v 2>&1 | grep -oE '^ *(Compiling|Fresh|Dirty|Finished) [a-z]*' | tr -s ' ' | sort; }
build
target/debug/whole
build
sleep 1
sed -i 's/x \* 2/x * 3/' part/src/lib.rs
build
target/debug/whole
cargo test -q -p part 2>&1 | grep -oE '[0-9]+ (passed|failed)' | sort
touch src/main.rs
build
ls target/debug/incremental | sed 's/-.*//' | sort
cargo clean -q
ls
