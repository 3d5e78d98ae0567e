# Everything that a person or the CI does with this tree. Targets install missing Debian/Ubuntu packages and name them;
# if a package can't be installed, an error names it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:

help:    ## what the targets are
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 18

build:   ## the ashlar command and libashlar, optimised: target/release/ashlar, target/release/libashlar.so
	@scripts/setup.sh build
	cargo build --release --locked -p ashlar-launch -p ashlar-cli -p ashlar-preload -p ashlar-capi

# Root installs an existing build, since root may well have no Rust of its own.
built := $(and $(filter 0,$(shell id -u)),$(wildcard $(or $(CARGO_TARGET_DIR),target)/release/ashlar-main),$(wildcard $(or $(CARGO_TARGET_DIR),target)/release/libashlar.so))
install: $(if $(built),,build) ## copies the ashlar command, libashlar and its header to PREFIX (/usr/local)
	@scripts/install.sh

demo:    ## real programs on one node and on two, kills in the middle, and a count of what was acknowledged
	@scripts/setup.sh build run demo
	cargo build --release --locked -p ashlar-launch -p ashlar-cli -p ashlar-preload -p ashlar-tests
	@scripts/as-root.sh "$${CARGO_TARGET_DIR:-target}/release/ashlar-demo"

test:    ## unit and property tests, then whole processes: real mounts, real programs, kill -9
	@scripts/test.sh

soak:    ## the kill loops, the fuzzers and the pairs of mounts at full length (hours)
	@scripts/soak.sh

shadow:  ## most of the suite, with a replica of each file system that must end with the same tree (half an hour)
	@scripts/copies.sh --shadow

mirror:  ## most of the suite on the writer of two nodes, which must end with the same tree (half an hour)
	@scripts/copies.sh --mirror

check:   ## formatting, lints, dependency rules, documentation; changes nothing
	@scripts/check.sh

fix:     ## formats, and applies what the lints propose
	@scripts/setup.sh build check
	cargo fmt --all
	cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged

bench:   ## against pass-through FUSE file systems over tmpfs, in one run
	@scripts/bench.sh

.PHONY: help build install demo test soak shadow mirror check fix bench
