#!/usr/bin/env bash
# The suite's loops at full length. The environment can set every number.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh build run test
cargo build --release --locked -p ashlar-launch -p ashlar-cli -p ashlar-preload -p ashlar-capi -p ashlar-tests
scripts/tools.sh
export ASHLAR_KILL_WRITER=${ASHLAR_KILL_WRITER:-300} ASHLAR_KILL_DAEMON=${ASHLAR_KILL_DAEMON:-300}
export ASHLAR_KILL_ALL=${ASHLAR_KILL_ALL:-100}
export ASHLAR_KILL_MOUNT=${ASHLAR_KILL_MOUNT:-300}
export ASHLAR_KILL_HELPER=${ASHLAR_KILL_HELPER:-100}
export ASHLAR_KILL_CAPI=${ASHLAR_KILL_CAPI:-100}
export ASHLAR_KILL_SCRATCH=${ASHLAR_KILL_SCRATCH:-200}
# Failures of nodes and links in each test of mirror/.
export ASHLAR_LOOPS=${ASHLAR_LOOPS:-300}
export ASHLAR_FSX_SEEDS=${ASHLAR_FSX_SEEDS:-80} ASHLAR_FSX_OPS=${ASHLAR_FSX_OPS:-20000}
export ASHLAR_RANGES_SEEDS=${ASHLAR_RANGES_SEEDS:-8} ASHLAR_RANGES_OPS=${ASHLAR_RANGES_OPS:-200000}
export ASHLAR_DIFFER_CALLS=${ASHLAR_DIFFER_CALLS:-1500000}
export ASHLAR_QUOTA_ROUNDS=${ASHLAR_QUOTA_ROUNDS:-100} ASHLAR_QUOTA_KILLS=${ASHLAR_QUOTA_KILLS:-50}
export ASHLAR_HAMMER_SECONDS=${ASHLAR_HAMMER_SECONDS:-600} ASHLAR_POWER_CUTS=${ASHLAR_POWER_CUTS:-100} ASHLAR_TEST_SECONDS=${ASHLAR_TEST_SECONDS:-36000}
cargo run --release --locked -p ashlar-sim -- --seeds "${ASHLAR_SIM_SEEDS:-100000}" --from "${ASHLAR_SIM_FROM:-500}"
ASHLAR_LEASE_CASES=${ASHLAR_LEASE_CASES:-1000000} cargo test --release --locked -p ashlar-lease --test arbitrary
ASHLAR_JOURNAL_CASES=${ASHLAR_JOURNAL_CASES:-1000000} cargo test --release --locked -p ashlar-journal --test arbitrary
ASHLAR_RECORD_CASES=${ASHLAR_RECORD_CASES:-1000000} cargo test --release --locked -p ashlar-node --lib arbitrary_records
export ASHLAR_HOSTILE_CASES=${ASHLAR_HOSTILE_CASES:-1000000}
cargo test --release --locked -p ashlar-daemon --test arbitrary -- --nocapture
exec scripts/as-root.sh "${CARGO_TARGET_DIR:-target}"/release/ashlar-suite "$@"
