#!/usr/bin/env python3
"""Measures what each special case for speed saves on whole programs (docs/fast-paths.md, which says how to read it).

    scripts/fast-paths.py build DIR [CASE…]      builds the tree as it is, and once without each case, into DIR
    scripts/fast-paths.py measure DIR [CASE…]    runs whole programs with and without each case, in turn
    scripts/fast-paths.py check                  finds every case in the source; changes nothing

A case is taken out by one statement at the beginning of one function. `build` edits a copy of the tree, not the tree.
`measure` needs root (it mounts), git, gcc, make, sqlite3, rsync, perl, python3 and an idle machine.
Options: --rounds N (40), --job JOB… (those of the case)"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time

PRELOAD, LIBFS, FUSE = "crates/preload/src/", "crates/libfs/src/", "crates/fuse/src/"
# Packages that are built, and the files that they make.
PACKAGES = {"ashlar-launch": "ashlar", "ashlar-cli": "ashlar-main", "ashlar-preload": "libashlar_preload.so"}

# Each case: the programs on which it should show, the likeliest first, and the edits that take it out. An edit is a
# file, a function in it, and the statement that takes the case out at the function's beginning.
CASES = {
    "patched-image": (["shell", "make"], [(PRELOAD + "patch/image.rs", "try_map_image", "return None")]),
    "deferred-session": (
        ["shell", "make"],
        [
            (PRELOAD + "sessions/deferred_session.rs", "is_active", "return false"),
            (PRELOAD + "sessions/deferred_session.rs", "defers_session", "return false"),
        ],
    ),
    "program-profile": (
        ["grep -r", "git status", "python"],
        [(PRELOAD + "programs/program_profile.rs", "will_go_on", "return false")],
    ),
    "without-library": (
        ["redirected", "shell", "make"],
        [(PRELOAD + "programs/without_library.rs", "is_possible", "return false")],
    ),
    "adopted-files": (
        ["dd > log", "script > log", "grep > file"],
        [(PRELOAD + "programs/exec_files.rs", "encode_variable", "return None")],
    ),
    "shared-files": (
        ["server", "workers", "redirected", "make"],
        [(PRELOAD + "files/shared_file.rs", "prepare_slots", "return Err(Errno::ENOMEM)")],
    ),
    "recycled-descriptor": (
        ["grep -r", "python", "cp -r", "md5sum"],
        [(PRELOAD + "files/recycled_descriptor.rs", "recycle", "return false")],
    ),
    "snapshot-mapping": (
        ["git diff", "git status", "python", "git log"],
        [(PRELOAD + "memory/snapshot_mapping.rs", "map_copy", "return Ok(None)")],
    ),
    "segment-mapping": (
        ["git clone", "make", "git log"],
        [(PRELOAD + "memory/segment_mapping.rs", "map_segments", "return Ok(None)")],
    ),
    "known-pages": (["sqlite3", "find"], [(PRELOAD + "memory/program_memory.rs", "are_pages_known", "return false")]),
    "kept-blocks": (["threads", "git status"], [(PRELOAD + "memory/heap.rs", "with_kept", "return None")]),
    "user-sessions": (["users"], [(PRELOAD + "sessions/user_sessions.rs", "resume", "return None")]),
    "open-file": (
        ["dd", "lookups", "sqlite3"],
        [
            (LIBFS + "files/open_file.rs", "read_open", "return None"),
            (LIBFS + "files/open_file.rs", "write_open", "return None"),
        ],
    ),
    "cached-path": (
        ["stat", "rsync again", "make again", "mail", "git status"],
        [(LIBFS + "names/cached_path.rs", "cached_end", "return None")],
    ),
    "path-cache": (["find", "mail", "cp -r"], [(LIBFS + "names/path_cache.rs", "find", "return None")]),
    "grant-cache": (
        ["shell", "make", "git status"],
        [
            (LIBFS + "leases/grant_cache.rs", "read_grant_cache", "return false"),
            (LIBFS + "leases/grant_cache.rs", "cached_grant_attributes", "return None"),
        ],
    ),
    "first-read": (
        ["grep -r", "find", "git status", "make"],
        [(LIBFS + "leases/grant_cache.rs", "cached_grant_attributes", "return None")],
    ),
    "request-slot": (
        ["standby", "grep -r", "shell", "make"],
        [(LIBFS + "client/request_slot.rs", "is_short", "return false")],
    ),
    "lock-slots": (["sqlite3"], [(LIBFS + "files/record_locks.rs", "claim_slot", "return None")]),
    "rings": (
        ["find", "tar x", "md5sum", "make", "git status"],
        [(FUSE + "serving/ring_workers.rs", "RingWorkers::new", "return None")],
    ),
    "device-turn": (
        ["tar x", "find", "md5sum"],
        [
            (FUSE + "serving/device_turn.rs", "take_turn", "return true"),
            (FUSE + "serving/device_turn.rs", "call_standby", "return false"),
        ],
    ),
    "dentry-ttl": (["make", "git status", "find"], [(FUSE + "operations/attributes.rs", "name_ttl_ms", "return 0")]),
    "page-fills": (
        ["dd", "sqlite3", "tar x", "rsync"],
        [(FUSE + "kernel_cache/page_fills.rs", "must_drop", "return true")],
    ),
}
# The kernel offers rings only if this is set.
RING_SWITCH = "/sys/module/fuse/parameters/enable_uring"

FILES, SMALL = 2000, 90
# `measure` goes on to the next case once three quarters of a program's rounds have shown more than this.
ENOUGH = 1.05


def repeated(times, command):
    """A shell's line that runs a command again and again; $n counts."""
    return f"for n in $(seq {times}); do {command}; done"


# Whole programs: preparations in the directory, the part that is timed (some 0.1 s), and its undoing.
# $I has the inputs, in memory.
JOBS = {
    "git clone": ("", "git clone -q file://$I/repository clone", "rm -rf clone"),
    "git status": ("git clone -q file://$I/many clone", repeated(8, "git -C clone status -s"), ""),
    "git diff": (
        "git clone -q file://$I/many clone; find clone -name 'file*' | xargs sed -i 1s/line/row/",
        "git -C clone diff --shortstat",
        "",
    ),
    "git log": ("git clone -q file://$I/repository clone", repeated(2, "git -C clone log --stat -30"), ""),
    "tar x": ("mkdir 1 2 3", repeated(3, "tar xf $I/tree.tar -C $n"), "rm -r ?/tree"),
    "grep -r": ("tar xf $I/tree.tar", repeated(4, "grep -rc nothing-of-this tree | tail -1"), ""),
    "md5sum": ("tar xf $I/tree.tar", repeated(2, "find tree -type f -print0 | xargs -0 md5sum | tail -1"), ""),
    "find": ("tar xf $I/tree.tar", repeated(12, "find tree -newer $I/tree.tar -size +1 | wc -l"), ""),
    "stat": ("tar xf $I/tree.tar; find $PWD/tree -type f > list", repeated(4, "xargs -a list stat -c %s | wc -l"), ""),
    "cp -r": ("tar xf $I/tree.tar", repeated(2, "cp -r tree copy$n"), "rm -r copy?"),
    "rsync": ("tar xf $I/tree.tar", "rsync -a tree/ copy/", "rm -r copy"),
    "rsync again": ("tar xf $I/tree.tar; rsync -a tree/ copy/", repeated(3, "rsync -a tree/ copy/"), ""),
    "make again": ("tar xf $I/project.tar; make -s -C project", repeated(20, "make -s -C project"), ""),
    "make": ("tar xf $I/project.tar", "make -s -C project", "rm project/*.o project/main"),
    "sqlite3": ("", "sqlite3 base.db < $I/inserts.sql", "rm base.db"),
    "lookups": ("sqlite3 base.db < $I/rows.sql", "sqlite3 base.db < $I/lookups.sql", ""),
    "python": ("cp -r $I/modules .", "python3 -S $I/imports.py modules", ""),
    "shell": ("tar xf $I/tree.tar", "sh $I/script.sh tree", "rm tree/1/src/main/changed"),
    "redirected": ("", f"{{ for n in $(seq {SMALL}); do /bin/echo line $n; done; }} > log", "rm log"),
    "script > log": ("", "bash -c 'sh $I/lines.sh > log'", "rm log"),
    "workers": ("", "exec > log; for w in 1 2 3; do (. $I/lines.sh) & done; wait", "rm log"),
    "mail": ("mkdir -p mail/a.org/user/Maildir", "perl $I/mail.pl $PWD/mail/a.org/user/Maildir", "rm -r mail/*/*/*/*"),
    "server": ("", "bash -c 'perl $I/server.pl > log'", "rm log"),
    "standby": ("", "perl $I/primary.pl", "rm log copy"),
    "dd > log": ("", "bash -c 'dd status=none if=/dev/zero bs=128 count=100000 > log'", "rm log"),
    "dd": ("", "dd status=none if=/dev/zero of=log bs=128 count=100000", "rm log"),
    "grep > file": ("tar xf $I/tree.tar", repeated(2, "grep -r 1 tree > found"), "rm found"),
    "users": ("chmod 777 .", "python3 -S $I/users.py", "rm mail*"),
    "threads": ("tar xf $I/tree.tar", "python3 -S $I/threads.py tree", "find tree -name *.copy -delete"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["build", "measure", "check"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--job", nargs="*", default=[])
    arguments = parser.parse_intermixed_args()
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if arguments.verb == "check":
        for name, (_, edits) in CASES.items():
            for file, function, statement in edits:
                without(open(file).read(), function, statement, f"{name}: {file}")
        return
    if not arguments.words:
        parser.error("a directory is missing")
    place, cases = os.path.abspath(arguments.words[0]), arguments.words[1:] or list(CASES)
    if unknown := set(cases) - set(CASES) - {"base"}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    build(place, cases) if arguments.verb == "build" else measure(place, cases, arguments.rounds, arguments.job)


def without(text, function, statement, place):
    """The text of a file whose function begins with a statement that is always taken."""
    owner, _, name = function.rpartition("::")
    start = text.index(f"impl {owner} {{") if owner else 0
    matches = list(re.finditer(rf"\bfn {name}\b[^{{]*\{{\n", text[start:]))
    if not matches:
        sys.exit(f"{place} has no function {function}: mend the table of cases")
    end = start + matches[0].end()
    return f"{text[:end]}if std::hint::black_box(true) {{ {statement}; }}\n{text[end:]}"


def shows_on_mount(case):
    """Whether a case is seen through a mount; the others are seen under `ashlar run`."""
    return case in CASES and CASES[case][1][0][0].startswith(FUSE)


def build(place, cases):
    copy = os.path.join(place, "tree")
    environment = dict(os.environ, CARGO_TARGET_DIR=os.path.join(place, "target"))
    files = subprocess.check_output(["git", "ls-files", "-z"]).decode().split("\0")[:-1]
    for file in files:
        os.makedirs(os.path.dirname(os.path.join(copy, file)), exist_ok=True)
        if read(file) != read(os.path.join(copy, file)):
            shutil.copyfile(file, os.path.join(copy, file))
    for case in ["base"] + [case for case in cases if case != "base"]:
        edits = CASES[case][1] if case in CASES else []
        before = {file: read(os.path.join(copy, file)) for file, _, _ in edits}
        for file, function, statement in edits:
            path = os.path.join(copy, file)
            edited = without(read(path).decode(), function, statement, f"{case}: {file}")
            open(path, "w").write(edited)
        # A case shows in the library or in the process behind the mount; all else is that of the tree as it is.
        packages = PACKAGES if case == "base" else ["ashlar-cli" if shows_on_mount(case) else "ashlar-preload"]
        command = ["cargo", "build", "--release", "--locked", "-q"]
        command += [word for name in packages for word in ("-p", name)]
        built = subprocess.run(command, cwd=copy, env=environment, stderr=subprocess.PIPE, text=True)
        for file, text in before.items():
            open(os.path.join(copy, file), "wb").write(text)
        if built.returncode:
            sys.exit(f"{case}: {built.stderr[-3000:]}")
        os.makedirs(os.path.join(place, case), exist_ok=True)
        for name, binary in PACKAGES.items():
            made = os.path.join(environment["CARGO_TARGET_DIR"], "release")
            shutil.copy(os.path.join(made if name in packages else f"{place}/base", binary), os.path.join(place, case))
        print(f"built {case}", flush=True)


def read(path):
    return open(path, "rb").read() if os.path.exists(path) else None


def make_inputs(inputs):
    """What programs work on, in memory: a repository, a tree, a project, tables, modules, scripts."""
    shutil.rmtree(inputs, ignore_errors=True)
    os.makedirs(inputs)
    for number in range(FILES):
        directory = f"{inputs}/tree/{number % 100}/src/main/org"
        os.makedirs(directory, exist_ok=True)
        text = f"line {number} of a file of no interest\n" * (10 + number * 7919 % 200)
        open(f"{directory}/file{number}", "w").write(text)
    subprocess.check_call(["git", "clone", "-q", "--bare", ".", f"{inputs}/repository"])
    commit = "git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm tree"
    command = f"cp -r tree committed && cd committed && {commit} && git clone -q --bare . ../many"
    subprocess.check_call(["sh", "-c", command], cwd=inputs)
    os.makedirs(f"{inputs}/project")
    units = range(8)
    for unit in units:
        uses = "".join(f"int f{other}(int);\n" for other in units)
        body = "".join(f"int g{unit}_{n}(int x) {{ return x * {n} + f{(unit + n) % 8}(x - 1); }}\n" for n in range(20))
        headers = '#include <stdio.h>\n#include <stdlib.h>\n#include "all.h"\n'
        last = f"int f{unit}(int x) {{ return x > 0 ? g{unit}_3(x - 1) : x; }}\n"
        open(f"{inputs}/project/u{unit}.c", "w").write(headers + body + last)
    open(f"{inputs}/project/all.h", "w").write(uses)
    open(f"{inputs}/project/main.c", "w").write('#include "all.h"\nint main(void) { return f0(3); }\n')
    objects = " ".join(f"u{unit}.o" for unit in units)
    rules = f"all: main\nCFLAGS = -O0\nmain: main.o {objects}\n\tgcc -o $@ $^\n*.o: all.h\n"
    open(f"{inputs}/project/Makefile", "w").write(rules)
    for name in ["tree", "project"]:
        subprocess.check_call(["tar", "cf", f"{inputs}/{name}.tar", "-C", inputs, name])
    inserts = "".join(f"insert into t values ({n}, 'row {n}');\n" for n in range(3000))
    open(f"{inputs}/inserts.sql", "w").write(f"create table t (a integer primary key, b text);\n{inserts}")
    # Rows of a table that is greater than SQLite's cache, looked up out of order.
    count = "with recursive c(i) as (select 0 union all select i + 1 from c where i < {}) "
    rows = "insert into t select i, printf('row %d of some length, so that few fit into a page', i) from c;"
    table = "create table t (a integer primary key, b text);"
    open(f"{inputs}/rows.sql", "w").write(table + count.format(200000) + rows)
    found = "select sum(length(b)) from c join t on t.a = i * 7919 % 200000;"
    open(f"{inputs}/lookups.sql", "w").write(count.format(30000) + found)
    library = os.path.dirname(os.__file__)
    os.makedirs(f"{inputs}/modules")
    modules = [name for name in sorted(os.listdir(library)) if name.endswith(".py")][:120]
    for name in modules:
        shutil.copyfile(f"{library}/{name}", f"{inputs}/modules/copied_{name}")
    open(f"{inputs}/imports.py", "w").write(
        "import sys, os, importlib.machinery\n"
        "for name in sorted(os.listdir(sys.argv[1])):\n"
        "    if name.endswith('.py'):\n"
        "        path = os.path.join(sys.argv[1], name)\n"
        "        importlib.machinery.SourceFileLoader(name[:-3], path).get_code(name[:-3])\n"
    )
    open(f"{inputs}/script.sh", "w").write(
        f"cd $1/1/src/main/org; for n in $(seq {SMALL // 3}); do f=$(ls | head -1); cat $f | wc -l;\n"
        "sed s/line/row/ $f > ../changed; test -s ../changed; done | tail -1\n"
    )
    open(f"{inputs}/lines.sh", "w").write("for n in $(seq 3000); do echo line $n; done\n")
    # As a mail server delivers and reads: each message has its own name, by its whole path.
    open(f"{inputs}/mail.pl", "w").write(
        "my $m = shift; mkdir \"$m/$_\" for qw(tmp new cur);\n"
        "for my $n (1..2000) { open(my $f, '>', \"$m/tmp/$n\") or die; print $f \"From: a\\n\\ntext $n\\n\" x 20;\n"
        "    close $f; rename \"$m/tmp/$n\", \"$m/new/$n\" or die }\n"
        "opendir(my $d, \"$m/new\"); for my $n (grep !/^\\./, readdir $d) {\n"
        "    rename \"$m/new/$n\", \"$m/cur/$n:2,S\" or die }\n"
        "opendir(my $d, \"$m/cur\"); my @all = grep !/^\\./, readdir $d;\n"
        "for (1..3) { for my $n (@all) {\n"
        "    stat \"$m/cur/$n\" or die; open(my $f, '<', \"$m/cur/$n\"); my @l = <$f>; close $f } }\n"
    )
    # As a server that writes a log with its workers: each worker serves some clients and ends.
    open(f"{inputs}/server.pl", "w").write(
        "$| = 1; print \"begins $_\\n\" for 1..200;\n"
        "for my $w (1..8) { unless (fork) { print \"$w serves $_\\n\" for 1..500; exit }\n"
        "    print \"$w began\\n\"; wait; print \"$w ended\\n\" for 1..100 }\n"
    )
    # As a database whose standby has copied each record of the log before the next one is written.
    open(f"{inputs}/primary.pl", "w").write(
        "pipe(my $down, my $to); pipe(my $from, my $up); open(my $log, '>', 'log') or die; close $log;\n"
        "unless (fork) { close $to; open(my $l, '<', 'log'); open(my $c, '>', 'copy'); my $b;\n"
        "    while (sysread($down, $b, 1)) {\n"
        "        sysread($l, $b, 4096) or die; syswrite($c, $b); syswrite($up, '.') } exit }\n"
        "close $down; open($log, '>>', 'log');\n"
        "for my $n (1..1000) {\n"
        "    syswrite($log, \"record $n\\n\" x 20); syswrite($to, '.'); sysread($from, my $b, 1) }\n"
    )
    open(f"{inputs}/users.py", "w").write(
        "import os\n"
        "for n in range(400):\n"
        "    os.setegid(1000 + n // 100); os.seteuid(1000 + n // 100)\n"
        "    with open(f'mail{n}', 'w') as f: f.write('text\\n' * 50)\n"
        "    os.stat(f'mail{n}'); os.seteuid(0); os.setegid(0)\n"
    )
    open(f"{inputs}/threads.py", "w").write(
        "import sys, os, threading\n"
        "def work(part):\n"
        "    for n, (at, _, names) in enumerate(sorted(os.walk(sys.argv[1]))):\n"
        "        if n % 4 == part:\n"
        "            for name in names:\n"
        "                data = open(os.path.join(at, name), 'rb').read()\n"
        "                open(os.path.join(at, name + '.copy'), 'wb').write(data)\n"
        "all = [threading.Thread(target=work, args=(part,)) for part in range(4)]\n"
        "[one.start() for one in all]; [one.join() for one in all]\n"
    )


class Site:
    """A mount of one build, with an arena in memory of its own."""

    def __init__(self, place, build, rings=False):
        self.binary = os.path.join(place, build, "ashlar")
        self.arena, self.mount = f"/dev/shm/fast-paths/{build}", os.path.join("/tmp/fast-paths", build)
        os.makedirs(self.mount, exist_ok=True)
        command = [self.binary, "mount", self.mount, "--arena", self.arena, "--size", "3G"]
        before = read(RING_SWITCH)
        if before is not None:
            open(RING_SWITCH, "w").write("Y" if rings else "N")
        try:
            subprocess.check_call(command, stdout=subprocess.DEVNULL)
        finally:
            if before is not None:
                open(RING_SWITCH, "wb").write(before)

    def unmount(self):
        subprocess.check_call([self.binary, "umount", self.mount], stdout=subprocess.DEVNULL)
        shutil.rmtree(self.arena)


def run(directory, binary, environment, timed, undo):
    """Runs a program once in a prepared directory; returns its time in seconds."""
    command = [binary, "run", "sh", "-c", timed] if binary else ["sh", "-c", timed]
    began = time.perf_counter()
    subprocess.check_call(command, cwd=directory, env=environment, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - began
    if undo:
        subprocess.check_call(["sh", "-c", undo], cwd=directory)
    return took


def measure(place, cases, rounds, jobs):
    inputs = "/dev/shm/fast-paths/inputs"
    make_inputs(inputs)
    environment = dict(os.environ, I=inputs)
    print(f"{'case':20} {'job':12} {'with (s)':>9} {'without/with':>13} (quartiles of {rounds} rounds)")
    for case in cases:
        on_mount = shows_on_mount(case)
        sites = [Site(place, build, case == "rings") for build in (["base", case] if on_mount else ["base"])]
        binaries = [None, None] if on_mount else [os.path.join(place, build, "ashlar") for build in ("base", case)]
        for job in jobs or CASES[case][0]:
            prepare, timed, undo = JOBS[job]
            directories = [os.path.join(site.mount, "turn") for site in sites]
            for directory in directories:
                os.mkdir(directory)
                subprocess.check_call(["sh", "-c", prepare or "true"], cwd=directory, env=environment)
            time.sleep(0.5)  # the digest of what was prepared
            pairs = []
            for number in range(rounds + 2):
                pair = {}
                for index in ([0, 1] if number % 2 else [1, 0]):
                    pair[index] = run(directories[index % len(sites)], binaries[index], environment, timed, undo)
                if number > 1:  # the first rounds bring files and profiles in
                    pairs.append((pair[0], pair[1]))
            for directory in directories:
                shutil.rmtree(directory)
            low, middle, high = statistics.quantiles((pair[1] / pair[0] for pair in pairs), n=4)
            usual = statistics.median(pair[0] for pair in pairs)
            print(f"{case:20} {job:12} {usual:9.3f} {middle:13.2f} ({low:.2f} to {high:.2f})", flush=True)
            if low > ENOUGH and not jobs:
                break
        for site in sites:
            site.unmount()


if __name__ == "__main__":
    main()
