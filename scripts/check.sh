#!/usr/bin/env bash
# Formatting, lints, dependency rules, words and documentation. Changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh build check
echo "== formatting =="
cargo fmt --all -- --check
echo "== lints =="
cargo clippy --workspace --all-targets --locked -- -D warnings
echo "== dependency rules =="
scripts/modules_test.py
scripts/rules.py
echo "== words =="
scripts/words.py
echo "== fast paths =="
scripts/fast-paths.py check
echo "== documentation =="
RUSTDOCFLAGS='-D warnings' cargo doc --workspace --no-deps --locked
echo "all checks passed"
