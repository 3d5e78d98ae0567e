#!/usr/bin/env bash
# Builds the conformance programs that the suite runs, at the versions named here, into target/tools.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in pjdfstest@0.2.2 fsx@0.3.2; do
  stamp=target/tools/.$tool
  [ -e "$stamp" ] && continue
  echo "setup: building $tool into target/tools (cargo install --locked)"
  cargo install --quiet --locked --force --root target/tools "$tool" || {
    echo "setup: $tool could not be built: is there a network, and a crate registry?" >&2
    exit 1
  }
  touch "$stamp"
done
