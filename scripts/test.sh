#!/usr/bin/env bash
# Runs everything that CI runs: the crates' own tests, then the suite of whole processes as root. The last line is the
# sum.
set -uo pipefail
cd "$(dirname "$0")/.."
# CI skips nothing. So it also gets packages that are large or start servers: Node, a Java that compiles, and servers.
scripts/setup.sh build run test ${CI:+runtimes servers} || exit 1
log=$(mktemp)
trap 'rm -f "$log"' EXIT

echo "== unit and property tests =="
cargo test --workspace --locked --no-fail-fast 2>&1 | tee "$log"
units=${PIPESTATUS[0]}

echo "== simulation =="
cargo run --release --locked -p ashlar-sim -- --seeds "${ASHLAR_SIM_SEEDS:-500}"
simulation=$?

echo "== whole processes =="
cargo build --release --locked -p ashlar-launch -p ashlar-cli -p ashlar-preload -p ashlar-capi -p ashlar-tests && scripts/tools.sh || exit 1
scripts/as-root.sh "${CARGO_TARGET_DIR:-target}"/release/ashlar-suite "$@" 2>&1 | tee -a "$log"
suite=${PIPESTATUS[0]}

# All groups take half an hour more: `make shadow`, `make mirror`.
copies=0
if [ $# = 0 ]; then
  words=(quota/ two_mounts/random kill/killed_sharedfs kill/programs programs/git run/killed_sharedfs run/mapped_blocks)
  for of in shadow mirror; do
    echo "== whole processes, with a $of =="
    scripts/as-root.sh "${CARGO_TARGET_DIR:-target}"/release/ashlar-suite "--$of" "${words[@]}" 2>&1 | tee -a "$log"
    [ "${PIPESTATUS[0]}" = 0 ] || copies=1
  done
fi

# cargo test prints "test result: ok. 3 passed; 0 failed; 1 ignored; …" (ignored tests are measurements, to be run by
# hand). The suite prints "3 passed, 0 failed, 1 skipped".
awk '
  /^test result: /                              { passed += $4; failed += $6 }
  /^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped/ { passed += $1; failed += $3; skipped += $5 }
  END { printf "\nall tests together:\n%d passed, %d failed, %d skipped\n", passed, failed, skipped }
' "$log"
[ "$units" = 0 ] && [ "$simulation" = 0 ] && [ "$suite" = 0 ] && [ "$copies" = 0 ]
