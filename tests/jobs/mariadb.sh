# A database server that writes through an io_uring: two engines, writers at once, everything killed in the middle of
# them, and the recovery from it.
PATH=$PATH:/usr/sbin:/sbin
install -d -m 700 -o mysql -g mysql data
mariadb-install-db --no-defaults --datadir="$PWD/data" --user=mysql --skip-test-db --auth-root-authentication-method=normal >install.log 2>&1 ||
  { cat install.log >&2; exit 1; }
ask() { mariadb --no-defaults -S "$PWD/data/socket" -u root -N -B "$@"; }
start() {
  mariadbd --no-defaults --datadir="$PWD/data" --user=mysql --socket="$PWD/data/socket" --skip-networking --pid-file="$PWD/data/pid" \
    --log-error="$PWD/data/log.err" --innodb-buffer-pool-size=32M --innodb-flush-log-at-trx-commit=1 &
  server=$!
  disown "$server"
  for _ in $(seq 600); do ask -e 'SELECT 1' >/dev/null 2>&1 && return; sleep 0.1; done
  tail -n 20 data/log.err >&2
  return 1
}
ended() { while kill -0 "$server" 2>/dev/null; do sleep 0.05; done; }
trap 'kill -9 $server 2>/dev/null || true' EXIT

start
grep -c 'Using io_uring\|Using liburing\|Using Linux native AIO' data/log.err
ask -e "CREATE DATABASE d; CREATE TABLE d.i (a INT PRIMARY KEY, b VARCHAR(200)) ENGINE=InnoDB; CREATE TABLE d.m (a INT PRIMARY KEY, b VARCHAR(200)) ENGINE=Aria"
insert() { for n in $(seq "$2" "$3"); do echo "INSERT INTO d.$1 VALUES ($n, REPEAT('$1$n ', 20)); SELECT $n;"; done; }
# Writers at once.
writers=()
for from in 1 201 401; do
  insert i "$from" $((from + 199)) | ask >/dev/null &
  writers+=($!)
done
insert m 1 300 | ask >/dev/null
wait "${writers[@]}"
sums() { ask -e "SELECT COUNT(*), MD5(GROUP_CONCAT(b ORDER BY a SEPARATOR ',')) FROM d.$1 WHERE a <= 600"; }
sums i
sums m
ask -e "ALTER TABLE d.i ADD COLUMN c INT DEFAULT 7, ADD INDEX (b), FORCE; DELETE FROM d.i WHERE a % 3 = 0; OPTIMIZE TABLE d.m; SELECT a FROM d.i WHERE b LIKE 'i1%' ORDER BY b DESC LIMIT 3"
sums i
ask -e 'CHECK TABLE d.i, d.m EXTENDED'

# Killed in the middle of the writers' work: everything committed is there.
insert i 1001 9000 | sed 's/);/, 8);/' | ask >acknowledged 2>/dev/null &
writer=$!
for _ in $(seq 600); do [ "$(wc -l <acknowledged)" -gt 100 ] && break; sleep 0.02; done
kill -9 "$server"
wait "$writer" || true
ended
acknowledged=$(tail -n 1 acknowledged)
[ "$acknowledged" -gt 1100 ] && echo 'some were committed'
start
[ "$(ask -e "SELECT COUNT(*) FROM d.i WHERE a BETWEEN 1001 AND $acknowledged")" = $((acknowledged - 1000)) ] && echo 'nothing committed is lost'
sums i
ask -e 'CHECK TABLE d.i, d.m EXTENDED'
mariadb-admin --no-defaults -S "$PWD/data/socket" -u root shutdown
ended
trap - EXIT
