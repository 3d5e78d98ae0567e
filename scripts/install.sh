#!/usr/bin/env bash
# Copies the ashlar command to PREFIX/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${PREFIX:-/usr/local}
run=()
[ "$(id -u)" = 0 ] || [ -w "$prefix/bin" ] || run=(sudo)
"${run[@]}" install -D -m 0755 "${CARGO_TARGET_DIR:-target}/release/ashlar" "$prefix/bin/ashlar"
echo "installed: $prefix/bin/ashlar"
