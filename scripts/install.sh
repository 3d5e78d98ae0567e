#!/usr/bin/env bash
# Copies the ashlar command to PREFIX/bin, and the library that it has programs load to PREFIX/lib/ashlar.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${PREFIX:-/usr/local}
run=()
[ "$(id -u)" = 0 ] || [ -w "$prefix/bin" ] || run=(sudo)
built=${CARGO_TARGET_DIR:-target}/release
"${run[@]}" install -D -m 0755 "$built/ashlar" "$prefix/bin/ashlar"
"${run[@]}" install -D -m 0644 "$built/libashlar_preload.so" "$prefix/lib/ashlar/libashlar_preload.so"
echo "installed: $prefix/bin/ashlar, $prefix/lib/ashlar/libashlar_preload.so"
