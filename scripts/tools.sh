#!/usr/bin/env bash
# Builds the conformance programs that the suite runs, at the versions named here, into tools beside what cargo builds.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${CARGO_TARGET_DIR:-target}/tools
for tool in pjdfstest@0.2.2 fsx@0.3.2; do
  stamp=$tools/.$tool
  [ -e "$stamp" ] && continue
  echo "setup: building $tool into $tools (cargo install --locked)"
  cargo install --quiet --locked --force --root "$tools" "$tool" || {
    echo "setup: $tool could not be built: is there a network, and a crate registry?" >&2
    exit 1
  }
  touch "$stamp"
done
