# A database server under a user of its own: writers at once, a crash in the middle of their work and the recovery from
# it, checksums, a tablespace behind a symbolic link, and the files as the server's own tools check them.
programs=$(dirname "$(command -v initdb || ls /usr/lib/postgresql/*/bin/initdb | sort -V | tail -n 1)")
[ -x "$programs/pgbench" ] || programs=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
export PATH="$programs:$PATH" PGHOST="$PWD/socket" PGDATABASE=postgres PGUSER=postgres PGTZ=UTC
as() { runuser -u postgres -- "$@"; }
install -d -m 700 -o postgres -g postgres data socket space
ask() { as psql -XqAt -v ON_ERROR_STOP=1 "$@"; }
start() { as pg_ctl -s -w -t 300 -D data -l data/server.log start || { tail -n 20 data/server.log >&2; return 1; }; }
trap 'as pg_ctl -s -D data -m immediate stop 2>/dev/null || true' EXIT

as initdb -D data -k -A trust -E UTF8 --locale=C --wal-segsize=4 >/dev/null
cat >>data/postgresql.conf <<CONF
listen_addresses = ''
unix_socket_directories = '$PWD/socket'
shared_buffers = 16MB
max_wal_size = 64MB
jit = off
log_timezone = 'UTC'
CONF
start

# Writers at once. The seed decides what each of them draws, and sums do not depend on the order.
as pgbench -q -i -s 1 2>/dev/null
as pgbench -n -c 4 -j 2 -t 100 --random-seed=7 2>/dev/null | grep 'actually processed'
sums() {
  ask -c 'SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history),
    (SELECT sum(bbalance) FROM pgbench_branches) = (SELECT sum(delta) FROM pgbench_history),
    (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(delta) FROM pgbench_history)'
}
tables() {
  ask -c "SELECT count(*), md5(string_agg(aid || ' ' || abalance, ',' ORDER BY aid)) FROM pgbench_accounts" \
    -c "SELECT count(*), md5(string_agg(tid || ' ' || tbalance, ',' ORDER BY tid)) FROM pgbench_tellers" \
    -c "SELECT count(*), sum(delta) FROM pgbench_history"
}
sums
tables

# The server's other uses of a file system: copies of databases, links, rewriting, sorting on disk, dumps.
ask -c "CREATE TABLESPACE space LOCATION '$PWD/space'" -c "CREATE DATABASE copied TEMPLATE postgres TABLESPACE space" \
  -c "CREATE TABLE text AS SELECT n, repeat(md5(n::text), 40) AS t FROM generate_series(1, 4000) n" \
  -c "CREATE INDEX ON text(t)" -c "DELETE FROM text WHERE n % 3 = 0" -c "VACUUM FULL text" \
  -c "SET work_mem = '64kB'" -c "SELECT md5(string_agg(t, '' ORDER BY t DESC)) FROM text" \
  -c "COPY text TO '$PWD/space/text.csv' CSV" -c 'CHECKPOINT'
wc -c <space/text.csv
PGDATABASE=copied tables
as pg_dump -t text | grep -v restrict | sha256sum
as pg_amcheck -a --install-missing --heapallindexed && echo 'the check of tables and indexes is clean'

# Everything stops in the middle of the writers' work, and everything committed is there afterwards.
committed() { ask -c 'SELECT count(*) FROM pgbench_history'; }
as pgbench -n -c 4 -j 2 -T 60 >pgbench.log 2>&1 &
writers=$!
before=$(committed)
until [ "$(committed)" -gt $((before + 50)) ]; do sleep 0.1; done
acknowledged=$(committed)
as pg_ctl -s -D data -m immediate stop
wait "$writers" || true
start
grep -q 'was not properly shut down' data/server.log && echo 'recovered'
[ "$(committed)" -ge "$acknowledged" ] && echo 'nothing committed is lost'
sums
as pg_amcheck -a --heapallindexed && echo 'the check of tables and indexes is clean'
as pg_ctl -s -D data -m fast stop
as pg_checksums --check -D data | grep 'Bad checksums'
readlink data/pg_tblspc/* | xargs -n 1 basename
rm -rf data/server.log pgbench.log
