#!/usr/bin/env bash
# setup.sh NEED…: installs the Debian or Ubuntu packages that the given needs lack, and names them. Needs: build, run,
# demo, test, runtimes, servers, bench, check. If a package can't be installed, the error says what to do.
set -euo pipefail

fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# Whether one of these programs is installed.
has() {
  local program
  for program; do command -v "$program" >/dev/null 2>&1 && return; done
  return 1
}

# One line each: a test for the thing, then the package that contains it.
things() {
  case $1 in
    runtimes)
      echo 'has node|nodejs'
      echo 'has javac && has jar|default-jdk-headless'
      ;;
    servers)
      echo 'has dovecot && test -x /usr/lib/dovecot/imap|dovecot-imapd'
      echo 'test -x /usr/lib/dovecot/lmtp|dovecot-lmtpd'
      echo 'has mariadbd && has mariadb-install-db|mariadb-server'
      ;;
    build)
      echo 'has cc|gcc'
      echo 'has ld|binutils'
      echo 'test -e /usr/include/stdio.h|libc6-dev'
      ;;
    run)
      echo 'has mount|mount'
      ;;
    demo)
      echo 'has git|git'
      echo 'has sqlite3|sqlite3'
      echo 'has gcc|gcc'
      echo 'has make|make'
      echo 'has python3|python3'
      ;;
    test)
      things demo
      echo 'has rsync|rsync'
      echo 'has tar|tar'
      echo 'has g++|g++'
      echo 'test -e /usr/lib32/libc.so|gcc-multilib'
      echo 'has musl-gcc|musl-tools'
      echo 'has inotifywait|inotify-tools'
      echo '/usr/bin/python3 -c "import watchdog"|python3-watchdog'
      echo 'has valgrind|valgrind'
      echo 'has pkg-config|pkg-config'
      echo 'has setfattr|attr'
      echo 'has setfacl|acl'
      echo 'has mkfs.ext4|e2fsprogs'
      echo 'has flock|util-linux'
      echo 'has ps|procps'
      echo 'has tmux|tmux'
      echo 'has su|util-linux'
      echo 'python3 -c "import ensurepip"|python3-venv'
      echo 'has vim.tiny vim|vim-tiny'
      echo '/usr/bin/python3 -c "import plyvel"|python3-plyvel'
      echo 'has db_bench && has ldb|rocksdb-tools'
      echo 'ls /usr/lib/postgresql/*/bin/initdb|postgresql'
      ;;
    bench)
      echo 'has bindfs|bindfs'
      echo 'has fusermount3|fuse3'
      echo 'has pkg-config|pkg-config'
      echo 'test -e /usr/include/fuse3/fuse_lowlevel.h|libfuse3-dev'
      echo 'has git|git'
      echo 'has tar|tar'
      echo 'has xz|xz-utils'
      echo 'has make|make'
      echo 'has sqlite3|sqlite3'
      echo 'has db_bench|rocksdb-tools'
      echo 'has rsync|rsync'
      echo 'has python3|python3'
      # A C project to build: a distribution has one only as source.
      echo 'ls /usr/src/uClibc-ng-*|uclibc-source'
      ;;
    check) echo "has python3|python3" ;;
    *) fail "there is no need called '$1'" ;;
  esac
}

install() {
  local sudo=
  has apt-get || fail "these packages are missing and this system has no apt-get to install them: $*" \
    "install the packages of these names on your distribution, then run the same command again"
  if [ "$(id -u)" != 0 ]; then
    has sudo || fail "these packages are missing: $*" \
      "installing them needs root, and there is no sudo: run 'apt-get install $*' as root, then the same command again"
    sudo=sudo
  fi
  echo "setup: installing $* (apt-get install)"
  # PostgreSQL's package would make a database and start a server.
  case " $* " in *" postgresql "*)
    $sudo mkdir -p /etc/postgresql-common/createcluster.d
    echo 'create_main_cluster = false' | $sudo tee /etc/postgresql-common/createcluster.d/ashlar-tests.conf >/dev/null
    ;;
  esac
  local options=(-qq -y --no-install-recommends -o DPkg::Lock::Timeout=300)
  DEBIAN_FRONTEND=noninteractive $sudo apt-get "${options[@]}" install "$@" >/dev/null 2>&1 && return
  $sudo apt-get -qq update || fail "apt-get update failed: is there a network, and a package source?"
  DEBIAN_FRONTEND=noninteractive $sudo env DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" install "$@" >/dev/null ||
    fail "apt-get could not install: $*" "see its messages above; once they are installed, run the same command again"
}

rust() {
  [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ] && PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
  local how="get it from https://rustup.rs (or: apt-get install rustup && rustup default stable), then run the same command again"
  has cargo || fail "Rust is not there: no 'cargo' command" "$how"
  local wanted found
  wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  found=$(rustc --version | awk '{print $2}')
  [ "$(printf '%s\n%s\n' "$wanted" "$found" | sort -V | head -n 1)" = "$wanted" ] ||
    fail "Rust $found is too old: Ashlar needs $wanted or later" "run 'rustup update stable', or $how"
}

# The additional components for checks: rustup installs them; a distribution's Rust has them as packages.
components() {
  has cargo-fmt && has cargo-clippy && cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 && return
  has rustup || fail "rustfmt and clippy are missing: install them the way Rust was installed"
  echo "setup: installing rustfmt and clippy (rustup component add)"
  rustup component add rustfmt clippy
}

cd "$(dirname "$0")/.."
# The directories of system programs such as mkfs.ext4, which an ordinary user's path leaves out.
PATH=$PATH:/usr/sbin:/sbin
missing=()
for need in "$@"; do
  while IFS='|' read -r test package; do
    eval "$test" >/dev/null 2>&1 || case " ${missing[*]-} " in *" $package "*) ;; *) missing+=("$package") ;; esac
  done < <(things "$need")
done
[ ${#missing[@]} = 0 ] || install "${missing[@]}"
for need in "$@"; do
  case $need in
    build) rust ;;
    check) components ;;
  esac
done
