#!/usr/bin/env bash
# Copies the command ashlar to PREFIX/bin, and its parts to PREFIX/lib/ashlar: the program with all verbs, and the
# library that programs load. Copies libashlar to PREFIX/lib, its header to PREFIX/include, and its pkg-config file to
# PREFIX/lib/pkgconfig.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${PREFIX:-/usr/local}
run=()
[ "$(id -u)" = 0 ] || [ -w "$prefix/bin" ] || run=(sudo)
built=${CARGO_TARGET_DIR:-target}/release
version=$(sed -n '/^\[workspace.package\]/,/^\[/ s/^version = "\(.*\)"/\1/p' Cargo.toml)
described=$(mktemp)
trap 'rm -f "$described"' EXIT
sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" crates/capi/ashlar.pc.in >"$described"

"${run[@]}" install -D -m 0755 "$built/ashlar" "$prefix/bin/ashlar"
"${run[@]}" install -D -m 0755 "$built/ashlar-main" "$prefix/lib/ashlar/ashlar-main"
"${run[@]}" install -D -m 0644 "$built/libashlar_preload.so" "$prefix/lib/ashlar/libashlar_preload.so"
# Programs search for the name with the number (crates/capi/build.rs), the compiler for the one without.
"${run[@]}" install -D -m 0644 "$built/libashlar.so" "$prefix/lib/libashlar.so.0"
"${run[@]}" ln -sf libashlar.so.0 "$prefix/lib/libashlar.so"
"${run[@]}" install -D -m 0644 crates/capi/include/ashlar.h "$prefix/include/ashlar.h"
"${run[@]}" install -D -m 0644 "$described" "$prefix/lib/pkgconfig/ashlar.pc"
# The dynamic linker has a list of the libraries in its own directories. With another prefix, programs name the path.
case $prefix in /usr | /usr/local)
  "${run[@]}" ldconfig || echo "install: ldconfig failed: programs may not find $prefix/lib/libashlar.so.0" >&2
  ;;
esac
echo "installed: $prefix/bin/ashlar, $prefix/lib/ashlar/ashlar-main, $prefix/lib/ashlar/libashlar_preload.so, $prefix/lib/libashlar.so, $prefix/include/ashlar.h"
