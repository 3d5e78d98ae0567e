#!/usr/bin/env bash
# The suite with copies, whose trees must be the same at the end of each test. With --shadow each daemon has a replica
# in its own process, with --mirror each arena is the writer's of a cluster of two nodes.
set -euo pipefail
cd "$(dirname "$0")/.."
copies=${1:?--shadow or --mirror}
shift
scripts/setup.sh build run test
cargo build --release --locked -p ashlar-launch -p ashlar-cli -p ashlar-preload -p ashlar-capi -p ashlar-tests
scripts/tools.sh
if [ $# = 0 ]; then
  set -- programs/ run/ kill/ quota/ two_mounts/
  if [ "$copies" = --mirror ]; then set -- "$@" conformance/; else set -- "$@" life/ power/; fi
fi
exec scripts/as-root.sh "${CARGO_TARGET_DIR:-target}"/release/ashlar-suite "$copies" "$@"
