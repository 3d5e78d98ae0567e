#!/usr/bin/env bash
# The suite with shadows: each daemon has a replica, whose tree must be the same at the end of each test.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh build run test
cargo build --release --locked -p ashlar-launch -p ashlar-cli -p ashlar-preload -p ashlar-capi -p ashlar-tests
scripts/tools.sh
[ $# -gt 0 ] || set -- programs/ run/ kill/ quota/ two_mounts/ life/ power/
exec scripts/as-root.sh "${CARGO_TARGET_DIR:-target}"/release/ashlar-suite --shadow "$@"
