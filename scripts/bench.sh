#!/usr/bin/env bash
# Ashlar against pass-through FUSE file systems over tmpfs, in one run. Arguments go to ashlar-bench.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh build run bench
cargo build --release --locked -p ashlar-launch -p ashlar-cli -p ashlar-preload -p ashlar-tests
exec scripts/as-root.sh "${CARGO_TARGET_DIR:-target}"/release/ashlar-bench "$@"
