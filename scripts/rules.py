#!/usr/bin/env python3
"""Rules of the tree that no compiler checks: which crate may use which, and where unsafe code may stand.

Also which files of a crate may use each other, and what crates without I/O may name. Also checks that the documentation names only existing links, pages, sections, make targets and tests. Prints each breach
and fails if there is one."""

import json
import os
import re
import subprocess
import sys

import modules

# docs/architecture.md, "Layers": a crate may use those named here, and no others of this workspace.
LAYERS = {
    "types": [],
    "pmem": ["types"],
    "log": ["types", "pmem"],
    "journal": ["types", "pmem"],
    "fabric": ["types", "pmem"],
    "update": ["types"],
    "wire": ["types", "pmem", "update"],
    "lease": ["types"],
    "cluster": ["types", "journal"],
    "store": ["types", "pmem", "update"],
    "libfs": ["types", "pmem", "log", "update", "wire"],
    "helper": ["types", "pmem", "wire"],
    "node": ["types", "pmem", "log", "journal", "update", "wire", "lease", "store"],
    "processes": ["types", "pmem", "wire", "node"],
    "metrics": ["types", "wire"],
    "replica": ["types", "pmem", "journal", "store", "node", "cluster", "fabric"],
    "member": ["types", "pmem", "wire", "store", "cluster", "fabric", "node", "processes", "replica", "metrics"],
    # Tests alone use it.
    "sim": ["types", "pmem", "log", "journal", "update", "wire", "store", "node"],
    "daemon": ["types", "pmem", "log", "update", "wire", "store", "helper", "node", "processes", "cluster", "replica", "member", "metrics"],
    "fuse": ["types", "update", "wire", "libfs", "helper"],
    "preload": ["types", "wire", "libfs"],
    "capi": ["types", "wire", "libfs"],
    "launch": ["types", "wire"],
    "cli": [
        "types", "pmem", "fabric", "wire", "store", "launch", "libfs", "helper", "daemon", "member", "metrics", "fuse",
    ],
    "tests": ["types", "wire", "libfs"],
}
# Protocol logic without I/O: no clock, thread, socket, file or randomness, so nothing that brings one.
SANS_IO = {"types", "update", "lease", "cluster", "journal", "node", "sim"}
# LMDB is one of two databases: only their folder, and the measurement behind the layout, name its crate.
HEED_ALLOWED = ("crates/store/src/database/", "crates/store/examples/lmdb_rate.rs")
SANS_IO_FORBIDDEN = {"rustix", "parking_lot", "tempfile", "rand", "tokio", "mio", "heed", "getrandom"}
# The same for their sources, tests aside: paths of the standard library and of other crates that they may not name.
SANS_IO_SOURCES = [
    "std::time::Instant",
    "std::time::SystemTime",
    "std::thread",
    "std::sync::Mutex",
    "std::sync::RwLock",
    "std::sync::Condvar",
    "std::sync::mpsc",
    "std::fs",
    "std::net",
    "std::os::unix::net",
    "parking_lot",
    "rand",
    "getrandom",
]
# Up to three files of a crate may form a cycle. Of more, something that they share wants a module of its own.
CYCLE_FILES = 3
# Crates that still have a longer cycle, with the reason. A crate without one must leave the set.
CIRCLES_LEFT = {
    "preload": "a call may begin a session, and a session may end in the middle of a call",
}
UNSAFE_ALLOWED = {"pmem", "log", "libfs", "preload", "capi"}
# One exception each, named in the code: LMDB's environment can't be opened otherwise, a ring shares memory with the
# kernel, and the small command begins without libc.
UNSAFE_DENIED = {"crates/store/src/lib.rs", "crates/fuse/src/lib.rs", "crates/launch/src/main.rs"}


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    os.chdir(root)
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    problems = []
    for package in metadata["packages"]:
        problems += layer_problems(package)
        problems += unsafe_problems(package)
        problems += source_problems(package)
    problems += heed_problems()
    problems += link_problems()
    problems += reference_problems()
    problems += target_problems()
    problems += test_problems()
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    print(f"{len(metadata['packages'])} crates keep to the rules; all that the documentation names is there")


def layer_problems(package):
    name = package["name"].removeprefix("ashlar-")
    if name not in LAYERS:
        return [f"crate '{name}' has no line in LAYERS ({__file__}): say which crates it may use"]
    problems = []
    for dependency in package["dependencies"]:
        if dependency["kind"] == "dev":
            continue
        other = dependency["name"]
        if other.startswith("ashlar-") and other.removeprefix("ashlar-") not in LAYERS[name]:
            problems.append(f"crate '{name}' uses '{other}', which the layers forbid (docs/architecture.md)")
        if name in SANS_IO and other in SANS_IO_FORBIDDEN:
            problems.append(f"crate '{name}' is free of I/O, but uses '{other}'")
    return problems


def unsafe_problems(package):
    name = package["name"].removeprefix("ashlar-")
    if name in UNSAFE_ALLOWED:
        return []
    problems = []
    for target in package["targets"]:
        if not set(target["kind"]) & {"lib", "bin"}:
            continue
        path = os.path.relpath(target["src_path"])
        with open(path, encoding="utf-8") as source:
            lint = "#![deny(unsafe_code)]" if path in UNSAFE_DENIED else "#![forbid(unsafe_code)]"
            if lint not in source.read():
                problems.append(f"{path} lacks {lint}")
    return problems


def source_problems(package):
    """Cycles of files, and I/O in the sources of a crate without it."""
    name = package["name"].removeprefix("ashlar-")
    folder = os.path.join(os.path.dirname(os.path.relpath(package["manifest_path"])), "src", "")
    uses, outside = {}, set()
    for target in package["targets"]:
        path = os.path.relpath(target["src_path"])
        if path.startswith(folder):
            crate = modules.Crate(path)
            outside.update(crate.outside)
            for file, used in crate.uses.items():
                uses.setdefault(file, set()).update(used)
    problems = []
    cycles = [cycle for cycle in modules.cycles(uses) if len(cycle) > CYCLE_FILES]
    if name in CIRCLES_LEFT and not cycles:
        problems.append(f"crate '{name}' has no such cycle any more: take it out of CIRCLES_LEFT ({__file__})")
    for cycle in [] if name in CIRCLES_LEFT else cycles:
        chains = [" → ".join(file.removeprefix(folder) for file in chain) for chain in modules.chains(uses, cycle)]
        problems.append(f"crate '{name}': {len(cycle)} files form a cycle:\n  " + "\n  ".join(chains))
    if name in SANS_IO:
        for path, file, line in sorted(outside):
            if any(is_within(path, forbidden) for forbidden in SANS_IO_SOURCES):
                problems.append(f"{file}:{line}: crate '{name}' is free of I/O, but names {path}")
    return problems


def is_within(path, forbidden):
    """Whether a path, perhaps with `*` at its end, names what is forbidden or something of it."""
    if path.endswith("::*"):
        return f"{forbidden}::".startswith(path[:-1]) or path.startswith(f"{forbidden}::")
    return f"{path}::".startswith(f"{forbidden}::")


def heed_problems():
    named = (path for path, text in listed("crates/*.rs") if re.search(r"\bheed\b", text))
    return [f"{path} names 'heed', which the store's `Database` hides" for path in named if not path.startswith(HEED_ALLOWED)]


def listed(*patterns):
    """The files of the tree that match, with their text."""
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *patterns], check=True, capture_output=True)
    for path in listing.stdout.decode().split():
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                yield path, file.read()


def link_problems():
    problems = []
    for page, text in listed("*.md"):
        text = re.sub(r"```.*?```", "", text, flags=re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:|#", target):
                continue
            if not os.path.exists(os.path.join(os.path.dirname(page), target.split("#")[0])):
                problems.append(f"{page}: the link to {target} leads nowhere")
    return problems


def reference_problems():
    """Pages that source code names, and the sections that it names in them."""
    problems = []
    for path, text in listed("*.rs", "*.sh", "*.toml", ".ci/*", "Makefile"):
        # A sentence may continue after the end of a comment's line.
        text = re.sub(r"\s*\n\s*(//[/!]?|#)\s*", " ", text)
        for page, section in re.findall(r'(docs/[\w./-]+\.md)(?:`, section "([^"]+)")?', text):
            if not os.path.exists(page):
                problems.append(f"{path}: there is no {page}")
            elif section:
                with open(page, encoding="utf-8") as file:
                    if not re.search(rf"^#+ {re.escape(section)}$", file.read(), flags=re.M):
                        problems.append(f"{path}: {page} has no section '{section}'")
    return problems


def target_problems():
    with open("Makefile", encoding="utf-8") as file:
        targets = set(re.findall(r"^([a-z-]+):", file.read(), flags=re.M))
    problems = []
    for page, text in listed("*.md"):
        for target in re.findall(r"(?:`|^\$ (?:sudo )?)make ([a-z-]+)", text, flags=re.M):
            if target not in targets:
                problems.append(f"{page}: there is no target '{target}' for make")
    return problems


def test_problems():
    """Tests that the documentation names, `group/name`, or all of a group, `group/`."""
    names = set()
    for _, text in listed("tests/src/bin/suite/*.rs"):
        names.update(re.findall(r'name: "(\w+/\w+)"', text))
    groups = {name.split("/")[0] for name in names}
    problems = []
    for page, text in listed("*.md"):
        for group, name in re.findall(r"`(\w+)/(\w*)`", text):
            if group in groups and name and f"{group}/{name}" not in names:
                problems.append(f"{page}: there is no test {group}/{name}")
    return problems


main()
