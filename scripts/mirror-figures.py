#!/usr/bin/env python3
"""Measures a mirror of two nodes on this machine, beside the floor of the same run.

    scripts/mirror-figures.py [ROUNDS]        # as root, after make build; some 30 s a round

In each round take turns: the floor of 'ashlar bench fabric', a file system without a cluster, a mirror without TLS, a
mirror with TLS, and a mirror whose writer goes on alone ('min_replicas = 1', its replica was killed). The last one has
all work of an fsync at the writer, and no link. Times are medians over the rounds.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ASHLAR = os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release", "ashlar")
SIZES = {"128 B": 128, "4 KB": 4096, "64 KB": 65536}
# The measured program. It prints microseconds (fsync), or megabytes a second.
JOB = r"""
import os, statistics, sys, time
root, kind, size, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
data = os.urandom(size)
file = os.open(f"{root}/file-{kind}-{size}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
if kind == "fsync":
    times = []
    for number in range(count):
        began = time.perf_counter()
        os.pwrite(file, data, number % 64 * size)
        os.fsync(file)
        times.append(time.perf_counter() - began)
    print(statistics.median(times) * 1e6)
else:
    began = time.perf_counter()
    for number in range(count):
        os.pwrite(file, data, number % 128 * size)
    if kind == "sustained":
        os.fsync(file)
    print(size * count / (time.perf_counter() - began) / 1e6)
os.close(file)
"""


def call(*words):
    done = subprocess.run([ASHLAR, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def measure(point, kind, size, count, under_run=True):
    words = [sys.executable, "-c", JOB, point, kind, str(size), str(count)]
    if under_run:
        words = [ASHLAR, "run", "--", *words]
    environment = {**os.environ, "ASHLAR_DEFER": "0"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def link_bytes(name):
    """Bytes that the link's device has carried in both directions, with the headers of TCP, IP and Ethernet."""
    shown = subprocess.run(["ip", "-netns", f"ashlar-{name}-0", "-j", "-s", "link"], capture_output=True, check=True)
    device = next(link for link in json.loads(shown.stdout) if link["ifname"] != "lo")
    return [device["stats64"][way]["bytes"] for way in ("tx", "rx")]


def journal_end(arena):
    return json.loads(call("status", "--json", "--arena", arena))["arenas"][0]["daemon"]["cluster"]["journal_end"]


def report_idle(name, seconds=20):
    """What the processes of each node take while nothing happens: a part of a core, and private memory."""
    status = json.loads(call("dev", "status", "--json", "--name", name))
    nodes = []
    for node in status["nodes"]:
        pid = node["daemon"]["pid"]
        parent = int(stat_of(pid)[1])
        children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        nodes.append([parent, pid, *map(int, children)])
    ticks = lambda pids: sum(int(field) for pid in pids for field in stat_of(pid)[11:13])
    before = [ticks(pids) for pids in nodes]
    time.sleep(seconds)
    for number, pids in enumerate(nodes):
        part = 100 * (ticks(pids) - before[number]) / os.sysconf("SC_CLK_TCK") / seconds
        print(f"idle, node {number}: {part:.2f} % of a core, {sum(map(private_mib, pids)):.1f} MiB private")


def stat_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()


def private_mib(pid):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1024


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    place = tempfile.mkdtemp(prefix="ashlar-figures-")
    clusters = {"mirror": ["--no-tls"], "tls": [], "alone": ["--no-tls", "--min-replicas", "1"]}
    arenas = {"single": "/run/ashlar/memory/figures-single"}
    try:
        for name, words in clusters.items():
            call("dev", "up", "2", "--size", "1G", "--name", f"figures-{name}", *words)
            arenas[name] = f"/run/ashlar/memory/dev-figures-{name}-0"
        report_idle("figures-tls")
        points = {}
        for name, arena in arenas.items():
            points[name] = os.path.join(place, name)
            os.mkdir(points[name])
            call("mount", "--sessions", "all", points[name], "--arena", arena)
        call("dev", "kill", "1", "--name", "figures-alone")
        report(rounds, points, arenas)
    finally:
        for name in arenas:
            subprocess.run([ASHLAR, "umount", os.path.join(place, name)], capture_output=True)
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(arenas["single"], ignore_errors=True)
        for name in clusters:
            subprocess.run([ASHLAR, "dev", "down", "--name", f"figures-{name}"], capture_output=True)


def report(rounds, points, arenas):
    figures = {}
    add = lambda *key: figures.setdefault(key[:-1], []).append(key[-1])
    for _ in range(rounds):
        fabric = json.loads(call("bench", "fabric", "--rounds", "1", "--json"))
        for case in fabric["cases"]:
            what, _, size = case["what"].partition(" ")
            if what == "fsync":
                add("fsync", size, "floor", case["contenders"]["nodes"]["p50_ns"] / 1e3)
            elif case["what"] == "round trip 64 B":
                add("fsync", "128 B", "fabric alone", case["contenders"]["fabric"]["p50_ns"] / 1e3)
            elif what == "stream":
                add("sustained", "socket", case["contenders"]["socket"]["megabytes_per_second"])
        for name, point in points.items():
            for size, bytes_ in SIZES.items():
                add("fsync", size, name, measure(point, "fsync", bytes_, 1500))
                add("fsync", size, f"{name}, mount", measure(point, "fsync", bytes_, 500, under_run=False))
            add("sustained", name, measure(point, "sustained", 1 << 20, 400))
            add("private", name, measure(point, "private", 4096, 20000))
        before = link_bytes("figures-mirror"), journal_end(arenas["mirror"])
        measure(points["mirror"], "fsync", 128, 3000)
        after = link_bytes("figures-mirror"), journal_end(arenas["mirror"])
        for index, way in enumerate(("out", "in")):
            add("wire", way, (after[0][index] - before[0][index]) / 3000)
        add("wire", "journal", (after[1] - before[1]) / 3000)
    for key in sorted(figures):
        print(f"{', '.join(key):28} {statistics.median(figures[key]):10.1f}   {' '.join(f'{value:.1f}' for value in figures[key])}")


if __name__ == "__main__":
    main()
