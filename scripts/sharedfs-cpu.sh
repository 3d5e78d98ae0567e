#!/usr/bin/env bash
# Measures SharedFS's CPU time for an operation, in microseconds, with several builds in turn.
#
#   scripts/sharedfs-cpu.sh create|append ROUNDS COUNT ASHLAR...
#
# Each turn mounts an arena in memory, and a program under 'ashlar run' creates files of 128 bytes, 1,000 in a
# directory, or appends 4 KB at a time to a file that it empties after 50,000. Then everything is synced, and the time
# counts until all of it is committed. The last build has one more turn in each round, with a shadow: a journal, and a
# replica in the same process.
set -euo pipefail
kind=$1 rounds=$2 count=$3
shift 3

job='
import os, sys
root, kind, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if kind == "create":
    for number in range(count):
        directory = f"{root}/{number // 1000}"
        if number % 1000 == 0:
            os.mkdir(directory)
        descriptor = os.open(f"{directory}/{number}", os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(descriptor, b"x" * 128)
        os.close(descriptor)
elif kind == "append":
    descriptor = os.open(f"{root}/file", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    data = b"x" * 4096
    for number in range(count):
        if number % 50000 == 0:
            os.ftruncate(descriptor, 0)
        os.write(descriptor, data)
else:
    sys.exit(f"{kind}: neither create nor append")
'

cpu_ticks() {
    local fields
    read -r -a fields < <(sed 's/.*) //' "/proc/$1/stat")
    echo $((fields[11] + fields[12]))
}

# Removes what a turn has made, also after a failure in its middle.
clear_place() {
    [ -n "$place" ] || return 0
    "$ashlar" umount "$place/mount" > /dev/null
    rm -rf "$place"
    place=
}
place=
trap clear_place EXIT

measure() {
    local shadows=$1 daemon before begun ended after
    place=$(mktemp -d /dev/shm/sharedfs-cpu.XXXXXX)
    mkdir "$place/mount"
    ASHLAR_SHADOWS=$shadows "$ashlar" mount --arena "$place/arena" --size 2G "$place/mount" > /dev/null
    daemon=$("$ashlar" status --json --arena "$place/arena" | grep -o '"pid": *[0-9]*' | head -n 1 | grep -o '[0-9]*')
    sync -f "$place/mount"
    before=$(cpu_ticks "$daemon")
    begun=$(date +%s%N)
    "$ashlar" run python3 -c "$job" "$place/mount" "$kind" "$count"
    ended=$(date +%s%N)
    sync -f "$place/mount"
    sleep 2
    after=$(cpu_ticks "$daemon")
    clear_place
    awk -v ticks=$((after - before)) -v hertz="$(getconf CLK_TCK)" -v count="$count" -v nanoseconds=$((ended - begun)) \
        -v name="$ashlar${shadows:+ with a shadow}" \
        'BEGIN { printf "%7.2f us of SharedFS, %7.2f us of time each: %s\n", ticks / hertz / count * 1e6, nanoseconds / count / 1e3, name }'
}

for ((round = 0; round < rounds; round++)); do
    for ashlar in "$@"; do
        measure ""
    done
    measure 1
done
