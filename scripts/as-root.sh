#!/usr/bin/env bash
# as-root.sh PROGRAM…: runs the program as root, through sudo if another user calls: mounting takes root.
set -euo pipefail
if [ "$(id -u)" = 0 ]; then
  exec "$@"
fi
command -v sudo >/dev/null 2>&1 || {
  echo "mounting a file system takes root, and there is no sudo: run the same command as root" >&2
  exit 1
}
echo "running as root, through sudo: $*"
# A test builds with the caller's Rust, which rustup searches for in its user's home.
[ ! -d "${RUSTUP_HOME:=${HOME:-}/.rustup}" ] || export RUSTUP_HOME
kept=$(compgen -e | grep -E '^(CI|PATH|RUSTUP_HOME|RUSTUP_TOOLCHAIN|ASHLAR_.*)$' | paste -sd,)
exec sudo --preserve-env="$kept" "$@"
